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
        let (qp, qp_num) = (self.cfg.qp, self.cfg.qp_num);
        let failed = Completion::new(wr_id, status, WcOpcode::Recv, qp, qp_num);
        self.out.push(RcEvent::Recv(failed));
    }
}

/// The queue pair cannot go on. The function that returns it has reported the
/// request or the event that it ended with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Fault;
