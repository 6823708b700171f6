//! The completer: takes responses and completes send requests (IBTA 9.7.5, 9.7.6, 9.9.2).
//!
//! A response is first placed among the packets in flight by its PSN. One that is older than the
//! oldest unacknowledged packet, or newer than the newest sent, is stale or forged and is dropped.
//! Any other acknowledges what was sent before it, up to the first READ or atomic whose own answer
//! is missing; running into one means that the answer was lost.

use super::ctx::{Ctx, Fault};
use super::message::walk;
use super::requester::Requester;
use super::send_queue::Phase;
use crate::verbs::{SendOp, WcStatus};
use crate::wire::{AethSyndrome, Credit, NakCode, Operation, Packet, Psn};

impl Requester {
    /// Takes in a response.
    pub(super) fn handle_response(
        &mut self,
        ctx: &mut Ctx<'_>,
        pkt: &Packet<'_>,
    ) -> Result<(), Fault> {
        let aeth = pkt.ext.aeth;
        let Some(number) = self.place(pkt.bth.psn()) else {
            ctx.counters.stale_responses += 1;
            return Ok(());
        };
        // Its packet has been acknowledged already. Neither a late NAK nor a late response may
        // change anything: the request may be complete and its memory used otherwise.
        if number < self.una {
            ctx.counters.stale_responses += 1;
            // The newest acknowledgement again: receives may have been posted since.
            if let Some(AethSyndrome::Ack(credit)) = aeth.map(|a| a.syndrome())
                && number + 1 == self.una
            {
                self.set_credits(credit.count());
            }
            return Ok(());
        }
        match (pkt.op.operation, aeth.map(|a| a.syndrome())) {
            (Operation::ReadResponse | Operation::AtomicAck, syndrome) => {
                self.on_data(ctx, pkt, number, syndrome)
            }
            (_, Some(AethSyndrome::Ack(credit))) => self.on_ack(ctx, number, credit),
            (_, Some(AethSyndrome::RnrNak(timer))) => {
                ctx.counters.rx_rnr_naks += 1;
                // Everything before the packet is acknowledged by any NAK. If a READ's response
                // is missing in front of it, that one is asked for first, and the wait will be
                // announced again.
                if self.acknowledge_before(ctx, number)? {
                    self.on_rnr_nak(ctx, timer.duration())?;
                }
                Ok(())
            }
            (_, Some(AethSyndrome::Nak(code))) => self.on_nak(ctx, number, code),
            // Reserved syndromes are ignored.
            _ => Ok(()),
        }
    }

    /// The packet number of a response's PSN: the one nearest to the oldest packet in flight.
    /// `None` for one that was never sent.
    fn place(&self, psn: Psn) -> Option<u64> {
        // The nearest in either direction: less than half of the PSNs are ever in flight, so the
        // sign of the difference is unambiguous.
        let distance = i64::from(psn.diff(self.psn(self.una)));
        // Below the first packet of the connection there is none.
        let number = self.una.checked_add_signed(distance)?;
        // Beyond `sent` the peer acknowledges what it cannot have; taken at its word it would
        // complete requests that were never sent.
        (number < self.sent).then_some(number)
    }

    fn on_ack(&mut self, ctx: &mut Ctx<'_>, number: u64, credit: Credit) -> Result<(), Fault> {
        // The packet itself as well, unlike a NAK.
        if self.acknowledge_before(ctx, number + 1)? {
            self.set_credits(credit.count());
        }
        Ok(())
    }

    fn on_nak(&mut self, ctx: &mut Ctx<'_>, number: u64, code: NakCode) -> Result<(), Fault> {
        let (counter, status) = match code {
            NakCode::PsnSequence => {
                ctx.counters.rx_nak_sequence += 1;
                // False if responses are missing before it: going back has happened for them.
                if self.acknowledge_before(ctx, number)? {
                    self.narrow();
                    self.go_back(ctx.now);
                }
                return Ok(());
            }
            NakCode::InvalidRequest | NakCode::InvalidRdRequest => {
                (&mut ctx.counters.rx_nak_invalid, WcStatus::RemInvReqErr)
            }
            NakCode::RemoteAccess => (&mut ctx.counters.rx_nak_access, WcStatus::RemAccessErr),
            NakCode::RemoteOperation => (&mut ctx.counters.rx_nak_operation, WcStatus::RemOpErr),
        };
        *counter += 1;
        // The NAK is for the oldest packet only if all before it is done. Otherwise it would blame
        // the request whose response is missing. That one is asked for again, and ends by its
        // retries where the peer has closed.
        if self.acknowledge_before(ctx, number)? {
            return Err(self.fail_head(ctx, status));
        }
        Ok(())
    }

    /// A packet of a READ response, or the answer to an atomic.
    fn on_data(
        &mut self,
        ctx: &mut Ctx<'_>,
        pkt: &Packet<'_>,
        number: u64,
        syndrome: Option<AethSyndrome>,
    ) -> Result<(), Fault> {
        // Responses come in PSN order, so a gap means that one was lost: this packet is dropped
        // and comes again. Memory is written in order, and each byte by one response.
        if !self.acknowledge_before(ctx, number)? {
            return Ok(());
        }
        // Checked and written before `una` moves: a response that does not fit ends the
        // connection with the request still at the head.
        if let Err(status) = self.store(ctx, pkt) {
            return Err(self.fail_head(ctx, status));
        }
        self.una += 1;
        self.on_progress(ctx.now, 1);
        self.retire(ctx)?;
        if let Some(AethSyndrome::Ack(credit)) = syndrome {
            self.set_credits(credit.count());
        }
        Ok(())
    }

    /// Writes the data of the response to packet `una` where the oldest request wants it.
    fn store(&self, ctx: &mut Ctx<'_>, pkt: &Packet<'_>) -> Result<(), WcStatus> {
        let at = self.sq.head();
        // Only the head can be meant: everything before packet `una` is complete, and `una` is
        // its next.
        let wqe = self.sq.peek(at).ok_or(WcStatus::BadRespErr)?;
        // The kind of the request decides, never that of the packet: a peer must not answer an
        // atomic with a READ response, or the other way round, and write as many bytes as it
        // likes.
        let is_atomic = matches!(wqe.op, SendOp::CmpSwap { .. } | SendOp::FetchAdd { .. });
        let original = pkt.ext.atomic_ack.map(|a| a.original().to_ne_bytes());
        let (offset, data) = match (&original, wqe.op) {
            (Some(bytes), _) if is_atomic => (0, &bytes[..]),
            (None, SendOp::Read(_)) => {
                let offset = wqe.index_of(self.una) * self.mtu;
                let expected = (wqe.length - offset).min(self.mtu);
                // A response is as long as the request says, packet by packet; a shorter one would
                // leave a hole.
                if pkt.payload.len() != expected as usize {
                    return Err(WcStatus::BadRespErr);
                }
                (offset as usize, pkt.payload)
            }
            _ => return Err(WcStatus::BadRespErr),
        };
        let (pd, mrs) = (ctx.cfg.pd, &*ctx.mrs);
        // The local key again, since the owner may have deregistered its memory while the READ
        // was under way.
        walk(
            self.sq.sges(at),
            offset,
            data.len(),
            |sge, within, done, take| {
                let span = mrs.resolve_local_part(pd, sge, within..within + take, true)?;
                span.write(within, &data[done..done + take]);
                Ok(())
            },
        )
        .map_err(|_| WcStatus::LocProtErr)
    }

    /// Acknowledges every packet before `end` and completes what that completes. False if a READ or
    /// an atomic before `end` is unanswered: everything before it is acknowledged, and it has been
    /// asked for again.
    fn acknowledge_before(&mut self, ctx: &mut Ctx<'_>, end: u64) -> Result<bool, Fault> {
        let before = self.una;
        let mut at = self.sq.head();
        let mut is_whole = true;
        // Request by request, not packet by packet: an acknowledgement may cover thousands.
        while self.una < end {
            let Some(wqe) = self.sq.peek(at) else { break };
            match wqe.phase {
                // Beyond what was sent of the queue. `place` has bounded `end` by packets, so
                // only a failed request, some of whose packets were sent, stands in the way.
                Phase::Posted | Phase::Failed(_) => {
                    is_whole = false;
                    break;
                }
                Phase::Started if wqe.end() > self.una => {
                    // An acknowledgement never completes a READ: its data is still missing.
                    if wqe.has_response() {
                        is_whole = false;
                        break;
                    }
                    self.una = end.min(wqe.end());
                }
                Phase::Started | Phase::Executed => {}
            }
            at += 1;
        }
        if self.una > before {
            // No more than the window has packets.
            #[expect(
                clippy::cast_possible_truncation,
                reason = "at most a window of 2^32 bytes"
            )]
            let packets = (self.una - before) as u32;
            // Progress first: completing the head needs `una`, and going back below needs the
            // window after it.
            self.on_progress(ctx.now, packets);
            self.retire(ctx)?;
        }
        if !is_whole {
            self.on_implied_nak(ctx);
        }
        Ok(is_whole)
    }
}
