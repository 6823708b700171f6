//! The requester: cuts send requests into packets, keeps the window, repeats what was lost.

use std::time::Instant;

use super::qp::{Ctx, Fault};
use super::send_queue::SendQueue;
use super::{RcConfig, RcEvent, RtsParams, TxPacket};
use crate::roce::mr::MrTable;
use crate::verbs::{Mtu, PdId, PostReason, QpCap, QpId, SendWr, WcStatus};
use crate::wire::Packet;

#[derive(Debug)]
pub(super) struct Requester {
    sq: SendQueue,
}

impl Requester {
    pub(super) fn new(cap: &QpCap) -> Self {
        Self {
            sq: SendQueue::new(cap),
        }
    }

    pub(super) fn start(&mut self, _params: &RtsParams, _mtu: Mtu, _cfg: &RcConfig) {}

    pub(super) fn reset(&mut self) {
        self.sq.clear();
    }

    pub(super) fn outstanding(&self) -> usize {
        self.sq.len()
    }

    pub(super) fn is_drained(&self) -> bool {
        self.sq.is_empty()
    }

    pub(super) fn post(
        &mut self,
        wr: &SendWr<'_>,
        pd: PdId,
        mrs: &MrTable,
    ) -> Result<(), PostReason> {
        self.sq.push(wr, pd, mrs)
    }

    pub(super) fn flush(&mut self, qp: QpId, out: &mut Vec<RcEvent>) {
        while !self.sq.is_empty() {
            let wqe = self.sq.retire();
            out.push(RcEvent::Send(wqe.completion(qp, WcStatus::WrFlushErr)));
        }
    }

    pub(super) fn deadline(&self) -> Option<Instant> {
        None
    }

    pub(super) fn handle_timeout(&mut self, _ctx: &mut Ctx<'_>) -> Result<(), Fault> {
        Ok(())
    }

    pub(super) fn handle_response(
        &mut self,
        _ctx: &mut Ctx<'_>,
        _pkt: &Packet<'_>,
    ) -> Result<(), Fault> {
        Ok(())
    }

    pub(super) fn poll(
        &mut self,
        _ctx: &mut Ctx<'_>,
        _tx: &mut TxPacket,
        _may_start: bool,
    ) -> Result<bool, Fault> {
        Ok(false)
    }
}
