//! Context used by both directions of a QP during a call.

use std::time::Instant;

use super::{RcConfig, RcCounters, RcEvent, RecvQueue};
use crate::mr::MrTable;
use crate::verbs::{Completion, Mtu, WcOpcode, WcStatus, WrId};
use crate::wire::Qpn;

/// Path to the peer, set on the transition to RTR.
#[derive(Clone, Copy, Debug)]
pub(super) struct PeerPath {
    pub(super) dest: Qpn,
    pub(super) mtu: Mtu,
}

/// Context for a single call.
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
    /// Reports a failed receive without data.
    pub(super) fn recv_failed(&mut self, wr_id: WrId, status: WcStatus) {
        let (qp, qp_num) = (self.cfg.qp, self.cfg.qp_num);
        let failed = Completion::new(wr_id, status, WcOpcode::Recv, qp, qp_num);
        self.out.push(RcEvent::Recv(failed));
    }
}

/// Returned if the QP can't continue. The function returning this has already reported the failed
/// request or the event.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Fault;
