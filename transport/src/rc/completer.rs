//! Completer: processes responses and completes send requests (IBTA 9.7.5, 9.7.6, 9.9.2).
//!
//! We first use the PSN to find the packet in flight that a response refers to. If it is older than
//! the oldest unacknowledged packet or newer than the last packet sent, the response is stale or
//! forged and is dropped. Otherwise it acknowledges all previous packets, up to the first READ or
//! atomic that is still waiting for a response. If there is such a request, its response was lost.

use super::ctx::{Ctx, Fault};
use super::message::walk;
use super::requester::Requester;
use super::send_queue::Phase;
use crate::verbs::{SendOp, WcStatus};
use crate::wire::{AethSyndrome, Credit, NakCode, Operation, Packet, Psn};

impl Requester {
    /// Processes a response packet.
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
        // This packet was already acknowledged, so we must ignore a late NAK or response: the
        // request may be complete and its memory reused.
        if number < self.una {
            ctx.counters.stale_responses += 1;
            // This repeats the last acknowledgement, but the peer may have posted more receives
            // since then.
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
                // Any NAK acknowledges all previous packets. If a READ response before this packet
                // is missing, we request it first and the RNR NAK will be sent again.
                if self.acknowledge_before(ctx, number)? {
                    self.on_rnr_nak(ctx, timer.duration())?;
                }
                Ok(())
            }
            (_, Some(AethSyndrome::Nak(code))) => self.on_nak(ctx, number, code),
            // Reserved syndromes must be ignored.
            _ => Ok(()),
        }
    }

    /// Returns the packet number for the PSN of a response, or `None` if no such packet was sent.
    /// We select the number closest to the oldest packet in flight.
    fn place(&self, psn: Psn) -> Option<u64> {
        // Check both directions. The sign of the difference is unambiguous because less than half
        // of the PSNs can be in flight.
        let distance = i64::from(psn.diff(self.psn(self.una)));
        // This fails if the number is before the first packet of the connection.
        let number = self.una.checked_add_signed(distance)?;
        // A PSN beyond `sent` can't have been received by the peer. If we accepted it, we would
        // complete requests that were never sent.
        (number < self.sent).then_some(number)
    }

    fn on_ack(&mut self, ctx: &mut Ctx<'_>, number: u64, credit: Credit) -> Result<(), Fault> {
        // Unlike a NAK, this also acknowledges the packet itself.
        if self.acknowledge_before(ctx, number + 1)? {
            self.set_credits(credit.count());
        }
        Ok(())
    }

    fn on_nak(&mut self, ctx: &mut Ctx<'_>, number: u64, code: NakCode) -> Result<(), Fault> {
        let (counter, status) = match code {
            NakCode::PsnSequence => {
                ctx.counters.rx_nak_sequence += 1;
                // If this returns false, responses are missing and we already restarted from there.
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
        // The NAK is only for the oldest packet if all previous packets are complete. Otherwise we
        // would fail the request that is missing its response. That request is sent again, and will
        // run out of retries if the peer has closed the connection.
        if self.acknowledge_before(ctx, number)? {
            return Err(self.fail_head(ctx, status));
        }
        Ok(())
    }

    /// Processes a READ response packet or an atomic response.
    fn on_data(
        &mut self,
        ctx: &mut Ctx<'_>,
        pkt: &Packet<'_>,
        number: u64,
        syndrome: Option<AethSyndrome>,
    ) -> Result<(), Fault> {
        // Responses are sent in PSN order, so a gap means that a response was lost. We drop this
        // packet because it will be sent again. This ensures that memory is written in order, and
        // only once per byte.
        if !self.acknowledge_before(ctx, number)? {
            return Ok(());
        }
        // This must be done before updating `una`: if the response is invalid, we fail the
        // connection and this request must still be at the head of the queue.
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

    /// Writes the response data for packet `una` to the memory of the oldest request.
    fn store(&self, ctx: &mut Ctx<'_>, pkt: &Packet<'_>) -> Result<(), WcStatus> {
        let at = self.sq.head();
        // The response can only be for the head of the queue, as all packets before `una` are
        // complete.
        let wqe = self.sq.peek(at).ok_or(WcStatus::BadRespErr)?;
        // We must check the type of the request and not that of the packet. Otherwise a peer could
        // respond to an atomic with a READ response, or the other way around, and write any number
        // of bytes.
        let is_atomic = matches!(wqe.op, SendOp::CmpSwap { .. } | SendOp::FetchAdd { .. });
        let original = pkt.ext.atomic_ack.map(|a| a.original().to_ne_bytes());
        let (offset, data) = match (&original, wqe.op) {
            (Some(bytes), _) if is_atomic => (0, &bytes[..]),
            (None, SendOp::Read(_)) => {
                let offset = wqe.index_of(self.una) * self.mtu;
                let expected = (wqe.length - offset).min(self.mtu);
                // The size of each response packet must match the request. A shorter packet would
                // leave a gap.
                if pkt.payload.len() != expected as usize {
                    return Err(WcStatus::BadRespErr);
                }
                (offset as usize, pkt.payload)
            }
            _ => return Err(WcStatus::BadRespErr),
        };
        let (pd, mrs) = (ctx.cfg.pd, &*ctx.mrs);
        // Check the local key again, because the memory may have been deregistered while waiting
        // for the response.
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

    /// Acknowledges all packets before `end` and completes the corresponding requests. Returns
    /// false if a READ or atomic before `end` is still waiting for its response. In this case, all
    /// packets before it are acknowledged and the request is sent again.
    fn acknowledge_before(&mut self, ctx: &mut Ctx<'_>, end: u64) -> Result<bool, Fault> {
        let before = self.una;
        let mut at = self.sq.head();
        let mut is_whole = true;
        // Process requests instead of packets, as a single acknowledgement can cover thousands of
        // packets.
        while self.una < end {
            let Some(wqe) = self.sq.peek(at) else { break };
            match wqe.phase {
                // Nothing after this was sent. Since `place` has already checked `end`, this can
                // only be a request that failed after sending some of its packets.
                Phase::Posted | Phase::Failed(_) => {
                    is_whole = false;
                    break;
                }
                Phase::Started if wqe.end() > self.una => {
                    // An acknowledgement must never complete a READ, because we don't have the data
                    // yet.
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
            // The number of packets is limited by the window.
            #[expect(
                clippy::cast_possible_truncation,
                reason = "at most a window of 2^32 bytes"
            )]
            let packets = (self.una - before) as u32;
            // This must be called first: completing the head uses `una`, and going back below uses
            // the updated window.
            self.on_progress(ctx.now, packets);
            self.retire(ctx)?;
        }
        if !is_whole {
            self.on_implied_nak(ctx);
        }
        Ok(is_whole)
    }
}
