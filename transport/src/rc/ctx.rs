//! The context that both directions of a queue pair use during one call.

use std::time::Instant;

use super::{RcConfig, RcCounters, RcEvent, RecvQueue};
use crate::mr::MrTable;
use crate::verbs::{Completion, Mtu, WcOpcode, WcStatus, WrId};
use crate::wire::Qpn;

/// The path to the peer, known from RTR on.
#[derive(Clone, Copy, Debug)]
pub(super) struct PeerPath {
    pub(super) dest: Qpn,
    pub(super) mtu: Mtu,
}

/// Context of one call.
pub(super) struct Ctx<'a> {
    pub(super) now: Instant,
    pub(super) cfg: &'a RcConfig,
    pub(super) link: PeerPath,
    pub(super) mrs: &'a mut MrTable,
    pub(super) rq: &'a mut RecvQueue,
    pub(super) out: &'a mut Vec<RcEvent>,
    pub(super) counters: &'a mut RcCounters,
}

impl Ctx<'_> {
    /// Reports the end of a receive that brought no data.
    pub(super) fn recv_failed(&mut self, wr_id: WrId, status: WcStatus) {
        self.out.push(RcEvent::Recv(Completion {
            wr_id,
            status,
            opcode: WcOpcode::Recv,
            qp: self.cfg.qp,
            qp_num: self.cfg.qp_num,
            byte_len: 0,
            imm: None,
            invalidated: None,
            src_qp: 0,
            solicited: false,
            network: None,
            vendor_err: 0,
        }));
    }
}

/// The queue pair cannot go on. The function that returns it has reported the
/// request or the event that it ended with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Fault;
