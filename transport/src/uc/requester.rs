//! Requester: splits send requests into packets. A request completes with its last packet.

use std::time::Instant;

use super::pace::Pace;
use super::{Link, UcConfig};
use crate::mr::KeyError;
use crate::rc::emit::{RequestPacket, gather, plan_opcode, push_extended};
use crate::rc::message::plan_packets;
use crate::rc::send_queue::{SendQueue, SendWqe};
use crate::rc::{Env, RcEvent, TxPacket, packet_cost};
use crate::verbs::{PostReason, QpType, SendFlags, SendWr, WcStatus};
use crate::wire::{Bth, Psn, Service, push_header};

/// Returned if a request has failed, which stops the send queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Stopped;

#[derive(Debug)]
pub(super) struct Requester {
    sq: SendQueue,
    /// PSN for the next packet.
    psn: Psn,
    /// Number of packets of the oldest request that were sent, or 0 between messages.
    index: u32,
    pace: Pace,
}

impl Requester {
    pub(super) fn new(cfg: &UcConfig) -> Self {
        Self {
            sq: SendQueue::new(&cfg.cap),
            psn: Psn::default(),
            index: 0,
            pace: Pace::new(cfg.max_burst_bytes),
        }
    }

    pub(super) fn start(&mut self, psn: Psn) {
        self.psn = psn;
    }

    /// Resets all state, for a QP in RESET. The pacing state is not changed, since packets already
    /// sent can still be in the peer's socket buffer.
    pub(super) fn reset(&mut self) {
        self.sq.clear();
        self.index = 0;
    }

    pub(super) fn set_max_burst(&mut self, bytes: u32) {
        self.pace.set_burst(bytes);
    }

    pub(super) fn deadline(&self) -> Option<Instant> {
        self.pace.deadline()
    }

    pub(super) fn handle_timeout(&mut self, now: Instant) {
        self.pace.handle_timeout(now);
    }

    pub(super) fn is_between_messages(&self) -> bool {
        self.index == 0
    }

    pub(super) fn post(&mut self, wr: &SendWr<'_>) -> Result<(), PostReason> {
        if !QpType::Uc.has_operation(&wr.op) {
            return Err(PostReason::InvalidOpcode);
        }
        self.sq.push(wr)
    }

    pub(super) fn unpost(&mut self, count: usize) {
        self.sq.unpost(count);
    }

    /// Flushes all requests, in order.
    pub(super) fn flush(&mut self, cfg: &UcConfig, out: &mut Vec<RcEvent>) {
        self.index = 0;
        while !self.sq.is_empty() {
            let wqe = self.sq.retire();
            let flushed = wqe.completion(cfg.qp, cfg.qp_num, WcStatus::WrFlushErr);
            out.push(RcEvent::Send(flushed));
        }
    }

    /// Writes the next packet to `tx` if there is one and pacing allows it. `may_start` is false
    /// while the send queue is draining.
    pub(super) fn poll(
        &mut self,
        cfg: &UcConfig,
        link: Link,
        now: Instant,
        env: &mut Env<'_>,
        tx: &mut TxPacket,
        may_start: bool,
    ) -> Result<bool, Stopped> {
        while let Some(wqe) = self.sq.peek(self.sq.head()) {
            if self.index == 0 && !may_start {
                break;
            }
            let wqe = *wqe;
            if wqe.is_local() {
                // All previous requests are complete, so this doesn't need to wait.
                if wqe.run_local(cfg.pd, cfg.qp, env.mrs).is_err() {
                    return Err(self.fail(cfg, env, WcStatus::MwBindErr));
                }
                self.complete(cfg, env);
                continue;
            }
            if self.pace.waits(now) {
                break;
            }
            if self.cut(cfg, link, &wqe, env, tx).is_err() {
                return Err(self.fail(cfg, env, WcStatus::LocProtErr));
            }
            self.pace.on_sent(now, packet_cost(link.mtu));
            return Ok(true);
        }
        Ok(false)
    }

    /// Writes the next packet of the oldest request to `tx`.
    fn cut(
        &mut self,
        cfg: &UcConfig,
        link: Link,
        wqe: &SendWqe,
        env: &mut Env<'_>,
        tx: &mut TxPacket,
    ) -> Result<(), KeyError> {
        let (at, mtu) = (self.sq.head(), link.mtu.bytes());
        let packets = plan_packets(wqe.length, mtu);
        let cut = RequestPacket {
            count: 1,
            offset: self.index * mtu,
            is_first: self.index == 0,
            is_last: self.index + 1 == packets,
        };
        // Check all entries before sending the first packet, even if it only needs a few of them:
        // once started, we can't cancel the message.
        if cut.is_first && !cut.is_last {
            for sge in self.sq.sges(at) {
                env.mrs.resolve_local(cfg.pd, sge, false)?;
            }
        }
        let (offset, len) = (cut.offset as usize, (wqe.length - cut.offset).min(mtu));
        let len = len as usize;
        gather(self.sq.payload(at), cfg.pd, env.mrs, tx, offset, len)?;
        tx.payload_len = len;
        let wakes = wqe.flags.contains(SendFlags::SOLICITED) && wqe.consumes_receive();
        let opcode = plan_opcode(&wqe.op, cut).in_service(Service::Uc);
        let bth = Bth::new(opcode, link.dest, self.psn)
            .with_solicited(wakes && cut.is_last)
            .with_pad_for(len);
        push_header(&mut tx.headers, &bth);
        push_extended(&mut tx.headers, wqe, cut, mtu);
        self.psn = self.psn.next();
        self.index += 1;
        if cut.is_last {
            self.index = 0;
            self.complete(cfg, env);
        }
        Ok(())
    }

    /// Completes the oldest request.
    fn complete(&mut self, cfg: &UcConfig, env: &mut Env<'_>) {
        let wqe = self.sq.retire();
        if cfg.sq_sig_all || wqe.flags.contains(SendFlags::SIGNALED) {
            let done = wqe.completion(cfg.qp, cfg.qp_num, WcStatus::Success);
            env.out.push(RcEvent::Send(done));
        }
    }

    /// Fails the oldest request.
    fn fail(&mut self, cfg: &UcConfig, env: &mut Env<'_>, status: WcStatus) -> Stopped {
        self.index = 0;
        let failed = self.sq.retire().completion(cfg.qp, cfg.qp_num, status);
        env.out.push(RcEvent::Send(failed));
        Stopped
    }
}
