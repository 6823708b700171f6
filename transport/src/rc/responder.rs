//! The responder: takes requests, moves data, answers.

use super::qp::{Ctx, Fault};
use super::{RecvWqe, RtrParams, TxPacket};
use crate::verbs::{Access, WrId};
use crate::wire::{Packet, RnrTimer};

#[derive(Debug)]
pub(super) struct Responder {
    recv: RecvWqe,
}

impl Responder {
    pub(super) fn new(max_recv_sge: u32) -> Self {
        Self {
            recv: RecvWqe::new(max_recv_sge),
        }
    }

    pub(super) fn start(&mut self, _params: &RtrParams) {}

    pub(super) fn reset(&mut self) {}

    pub(super) fn silence(&mut self) {}

    pub(super) fn set_access(&mut self, _access: Access) {}

    pub(super) fn set_min_rnr_timer(&mut self, _timer: RnrTimer) {}

    pub(super) fn unbind(&mut self) -> Option<WrId> {
        (self.recv.length > 0).then_some(self.recv.wr_id)
    }

    pub(super) fn has_failed(&self) -> bool {
        false
    }

    pub(super) fn has_output(&self) -> bool {
        false
    }

    pub(super) fn is_urgent(&self) -> bool {
        false
    }

    pub(super) fn handle_request(
        &mut self,
        _ctx: &mut Ctx<'_>,
        _pkt: &Packet<'_>,
    ) -> Result<(), Fault> {
        Ok(())
    }

    pub(super) fn poll(&mut self, _ctx: &mut Ctx<'_>, _tx: &mut TxPacket) -> Result<bool, Fault> {
        Ok(false)
    }
}
