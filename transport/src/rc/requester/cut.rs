//! Builds the next request packet.

use std::time::Instant;

use super::{FIRST_ROUND_TRIP, Requester};
use crate::rc::TxPacket;
use crate::rc::ctx::{Ctx, Fault};
use crate::rc::emit::{RequestPacket, gather, plan_opcode, push_extended};
use crate::rc::message::plan_packets;
use crate::rc::send_queue::{Phase, SendWqe};
use crate::rc::state::RequesterState;
use crate::verbs::{SendFlags, SendOp, WcStatus};
use crate::wire::{Bth, Service, XrcEth, push_header};

impl Requester {
    /// Writes the next request packet to `tx` if allowed by state, window, credits and fences.
    /// `may_start` is false while the send queue is draining.
    pub(in crate::rc) fn poll(
        &mut self,
        ctx: &mut Ctx<'_>,
        tx: &mut TxPacket,
        may_start: bool,
    ) -> Result<bool, Fault> {
        if let RequesterState::RnrWait(until) = self.state {
            if ctx.now < until {
                return Ok(false);
            }
            // The caller can poll before the timer has expired.
            self.end_rnr_wait();
        }
        while let Some(wqe) = self.sq.peek(self.cur) {
            match wqe.phase {
                // The error is reported when all previous requests are complete. Until then, we
                // must not start any requests after it, because they would be flushed even though
                // the peer has executed them.
                Phase::Failed(_) => return Ok(false),
                Phase::Executed => self.cur += 1,
                // Local operations are not visible to the peer, but a draining send queue must not
                // start any requests.
                Phase::Posted if !may_start => return Ok(false),
                Phase::Posted if wqe.is_local() => {
                    let wqe = *wqe;
                    if !self.execute(ctx, &wqe)? {
                        return Ok(false);
                    }
                }
                Phase::Posted => return self.begin(ctx, tx),
                Phase::Started if wqe.end() <= self.nxt => self.cur += 1,
                Phase::Started => {
                    return Ok(self.may_send(ctx.now) && self.cut(ctx, tx, may_start)?);
                }
            }
        }
        Ok(false)
    }

    /// Returns true if the next request to send is a READ or an atomic.
    pub(in crate::rc) fn is_read_next(&self) -> bool {
        // All packets of the current request may have been sent.
        let is_sent = |wqe: &SendWqe| matches!(wqe.phase, Phase::Started) && wqe.end() <= self.nxt;
        let at = self.cur + u64::from(self.sq.peek(self.cur).is_some_and(is_sent));
        self.sq.peek(at).is_some_and(SendWqe::has_response)
    }

    /// Sends the first packet of the current request if this is currently allowed.
    fn begin(&mut self, ctx: &mut Ctx<'_>, tx: &mut TxPacket) -> Result<bool, Fault> {
        let (first, mtu) = (self.nxt, self.mtu);
        let wqe = self.sq.wqe_mut(self.cur);
        // The request is only started when this packet has been built. Until then, the packet
        // numbers are not final and will be assigned again on the next attempt.
        wqe.first = first;
        wqe.packets = plan_packets(wqe.length, mtu);
        if !self.may_send(ctx.now) {
            return Ok(false);
        }
        if let Err(status) = self.check_start(ctx) {
            self.fail_current(ctx, status)?;
            return Ok(false);
        }
        let is_sent = self.cut(ctx, tx, true)?;
        if is_sent {
            self.sq.wqe_mut(self.cur).phase = Phase::Started;
        }
        Ok(is_sent)
    }

    /// Executes a local operation when it is next in order. Returns false if it must wait.
    fn execute(&mut self, ctx: &mut Ctx<'_>, wqe: &SendWqe) -> Result<bool, Fault> {
        if self.awaits_others(self.cur, wqe) {
            return Ok(false);
        }
        if wqe.run_local(ctx.cfg.pd, ctx.cfg.qp, ctx.mrs).is_err() {
            self.fail_current(ctx, WcStatus::MwBindErr)?;
            return Ok(false);
        }
        // The operation has a position between the packets but doesn't use a packet number, so that
        // `locate` will skip it.
        let first = self.nxt;
        let done = self.sq.wqe_mut(self.cur);
        done.phase = Phase::Executed;
        done.first = first;
        self.cur += 1;
        self.retire(ctx)?;
        Ok(true)
    }

    /// Returns whether a local operation posted at this position must wait for previous requests.
    /// Most operations don't wait, as they only modify our own table.
    fn awaits_others(&self, at: u64, wqe: &SendWqe) -> bool {
        if wqe.flags.contains(SendFlags::FENCE) {
            // The owner can request to wait for READs. For an invalidation we must wait for all
            // requests, because a key is only unused when they are complete.
            return match wqe.op {
                SendOp::LocalInv(_) => at != self.sq.head(),
                _ => !self.reads.is_empty(),
            };
        }
        // Requests that may need to be sent again still need the key.
        matches!(wqe.op, SendOp::LocalInv(key) if self.sq.names(key, at))
    }

    /// Checks all packets of the current request before sending the first one.
    fn check_start(&self, ctx: &Ctx<'_>) -> Result<(), WcStatus> {
        let wqe = self.sq.wqe(self.cur);
        // The peer does not accept any READs or atomics and would reject the request, which fails
        // the connection. With this check, the owner gets an error for the correct request.
        if wqe.has_response() && self.max_reads == 0 {
            return Err(WcStatus::LocQpOpErr);
        }
        // If there is only one packet, it checks all entries itself.
        if wqe.packets == 1 && !wqe.has_response() {
            return Ok(());
        }
        // Check all entries, even if the first packet only needs a few of them: once it has been
        // sent, we cannot cancel the message.
        for sge in self.sq.sges(self.cur) {
            ctx.mrs
                .resolve_local(ctx.cfg.pd, sge, wqe.has_response())
                .map_err(|_| WcStatus::LocProtErr)?;
        }
        Ok(())
    }

    /// Returns the number of packet numbers used by the next packet of a request.
    fn next_count(&self, wqe: &SendWqe) -> u32 {
        // Each SEND or WRITE packet uses one number, and an atomic has a single response.
        if !matches!(wqe.op, SendOp::Read(_)) {
            return 1;
        }
        let window = self.congestion.packets();
        if self.nxt < self.sent {
            // A repeated READ request must use the original end, as the responder has only stored
            // this range and ignores requests beyond it.
            let end = self.pieces.iter().find(|&&end| end > self.nxt);
            let end = end.copied().unwrap_or(wqe.end()).min(wqe.end());
            return window.min(wqe.index_of(end) - wqe.index_of(self.nxt));
        }
        // Two pieces fill the window, so that one is in flight while we request the next one.
        let piece = if self.max_reads > 1 {
            window.div_ceil(2)
        } else {
            window
        };
        piece.min(wqe.packets - wqe.index_of(self.nxt))
    }

    /// Returns true if window, initiator depth, fence, credits and pace allow the next packet of
    /// the current request.
    fn may_send(&mut self, now: Instant) -> bool {
        let wqe = self.sq.wqe(self.cur);
        if !self.is_allowed(wqe) {
            return false;
        }
        if self.is_limited(wqe) {
            // IBTA 9.7.7.2.5: we can send one packet beyond the limit if all previous packets are
            // acknowledged. The acknowledgement for this packet shows that a receive is available.
            return if self.nxt == wqe.first {
                self.una == self.nxt
            } else {
                // When the first packet has been acknowledged, a receive is available for the rest
                // of the message.
                self.una > wqe.first
            };
        }
        self.is_paced(now)
    }

    /// Returns whether window, initiator depth and fence allow the next packet of a request.
    fn is_allowed(&self, wqe: &SendWqe) -> bool {
        let in_flight = self.nxt - self.una;
        // READ responses are counted as in flight once they are requested, because the responder
        // sends them without checking our window.
        if in_flight > 0 {
            let count = u64::from(self.next_count(wqe));
            let fits = in_flight + count <= u64::from(self.congestion.packets());
            // If the window was reduced, it may be full of packets that didn't request an
            // acknowledgement. In this case we send one more packet to request it.
            if !fits && self.since_ack_request == 0 {
                return false;
            }
        }
        if wqe.has_response() {
            // We must wait for the current part, as the responder only stores one entry per
            // request, and requesting a different part would replace the remaining packets of the
            // current one.
            if self.is_part_under_way(wqe) {
                return false;
            }
            // If we exceed the number of resources, the peer will reject this as an invalid request
            // and fail the connection.
            if self.reads.len() >= self.max_reads && self.max_reads > 0 {
                return false;
            }
        }
        // This is only needed for the first packet, because all previous READs are complete when it
        // is sent. SENDs and WRITEs don't need a fence because they are always executed in order.
        let is_fenced = wqe.flags.contains(SendFlags::FENCE) && self.nxt == wqe.first;
        !is_fenced || self.reads.is_empty()
    }

    /// If the window is less than one packet, returns true if a packet can be sent now. Otherwise
    /// this sets the time to check again.
    fn is_paced(&mut self, now: Instant) -> bool {
        let Some(left) = self.left else {
            return true;
        };
        let round_trip = self.round_trip.map_or(FIRST_ROUND_TRIP, |r| r.mean);
        // A window of at least one packet is paced by acknowledgements.
        let Some(gap) = self.congestion.gap(round_trip) else {
            self.left = None;
            return true;
        };
        // This must be before the timer, which is running if a repeated packet is waiting here and
        // would otherwise treat the gap as a timeout.
        let at = left + gap.min(self.interval / 2);
        if at <= now {
            return true;
        }
        self.paced = Some(at);
        false
    }

    /// Returns true if packet `nxt` is in the middle of a previous READ request and a different
    /// part of this request is in flight.
    fn is_part_under_way(&self, wqe: &SendWqe) -> bool {
        // The first packet of a request is never in the middle. This is also needed after an
        // atomic, as its end is not stored in `pieces`.
        self.nxt < self.sent
            && self.nxt != wqe.first
            && self.reads.back() == Some(&self.nxt)
            && !self.pieces.contains(&self.nxt)
    }

    fn is_limited(&self, wqe: &SendWqe) -> bool {
        wqe.consumes_receive() && self.limit.is_some_and(|limit| wqe.recv_seq > limit)
    }

    /// Writes packet `nxt` of the current request to `tx`.
    fn cut(
        &mut self,
        ctx: &mut Ctx<'_>,
        tx: &mut TxPacket,
        may_start: bool,
    ) -> Result<bool, Fault> {
        let wqe = self.sq.wqe(self.cur);
        let index = wqe.index_of(self.nxt);
        let count = self.next_count(wqe);
        let cut = RequestPacket {
            count,
            offset: index * self.mtu,
            is_first: index == 0,
            is_last: index + count == wqe.packets,
        };
        let has_response = wqe.has_response();
        // For a repeated packet we need to gather the payload again, because we don't store
        // packets.
        if !has_response {
            let len = (wqe.length - cut.offset).min(self.mtu) as usize;
            // Since the last packet, the key may have been invalidated or the region deregistered.
            let (pd, payload) = (ctx.cfg.pd, self.sq.payload(self.cur));
            if gather(payload, pd, ctx.mrs, tx, cut.offset as usize, len).is_err() {
                // Some entries may already have been added, and `tx` is reused by the next caller.
                tx.clear();
                self.fail_current(ctx, WcStatus::LocProtErr)?;
                return Ok(false);
            }
            tx.payload_len = len;
        }
        // READs and atomics always have a response. This is treated like a requested
        // acknowledgement, as it also advances the window.
        let ack_request = has_response || self.requests_ack(wqe, cut.is_last, may_start);
        let wakes = wqe.flags.contains(SendFlags::SOLICITED) && wqe.consumes_receive();
        let mut opcode = plan_opcode(&wqe.op, cut);
        let is_xrc = ctx.cfg.service == Service::Xrc;
        if is_xrc {
            opcode = opcode.in_service(Service::Xrc);
        }
        let bth = Bth::new(opcode, ctx.link.dest, self.psn(self.nxt))
            .with_ack_request(ack_request)
            // The solicited event is for the receiver's completion, so it is only set in the last
            // packet.
            .with_solicited(wakes && cut.is_last)
            .with_pad_for(tx.payload_len);
        push_header(&mut tx.headers, &bth);
        if is_xrc {
            push_header(&mut tx.headers, &XrcEth::new(wqe.remote_srqn()));
        }
        push_extended(&mut tx.headers, wqe, cut, self.mtu);
        debug_assert_eq!(tx.headers.len(), Bth::LEN + opcode.info().ext_len);
        let is_read = matches!(wqe.op, SendOp::Read(_));
        self.on_cut(ctx, count, ack_request, has_response.then_some(is_read));
        Ok(true)
    }

    /// Updates the state when a packet using `count` numbers is sent. For a request with a
    /// response, `read` indicates if it is a READ request.
    fn on_cut(&mut self, ctx: &mut Ctx<'_>, count: u32, ack_request: bool, read: Option<bool>) {
        self.since_ack_request = if ack_request {
            0
        } else {
            self.since_ack_request + 1
        };
        if self.nxt < self.sent {
            ctx.counters.retransmits += 1;
        // Only use the first transmission, and only packets with an immediate response. Without a
        // request, the acknowledgement may be delayed until a later packet.
        } else if ack_request && self.timed.is_none() {
            self.timed = Some((self.nxt, ctx.now));
        }
        let is_first_time = self.nxt == self.sent;
        self.nxt += u64::from(count);
        self.sent = self.sent.max(self.nxt);
        if let Some(is_read) = read {
            self.reads.push_back(self.nxt);
            // An atomic is never repeated in parts, so we don't need to store its end.
            if is_first_time && is_read {
                self.pieces.push_back(self.nxt);
            }
        }
        // Used to determine when the next packet can be sent.
        if self.congestion.is_partial() {
            self.left = Some(ctx.now);
        }
        // If the timer is already running, it is for the oldest packet in flight. It must not be
        // restarted by new packets, because otherwise it would never expire during a steady stream.
        if self.timer.is_none() {
            let length = self.vary(self.interval);
            self.arm(ctx.now, length);
        }
    }

    /// Returns whether packet `nxt` should request an acknowledgement: often enough to keep the
    /// window moving, and at the end of a message that is not immediately followed by a new
    /// message.
    fn requests_ack(&self, wqe: &SendWqe, is_last: bool, may_start: bool) -> bool {
        let window = self.congestion.packets();
        // Request two acknowledgements per window, so that packets are sent as they are
        // acknowledged and not in bursts.
        let most = self.ack_every.min(window.div_ceil(2));
        // If the window is full and no packet has requested an acknowledgement, we would be blocked
        // until the timer expires.
        self.nxt + 1 - self.una >= u64::from(window)
            || self.since_ack_request + 1 >= most
            // This is the one packet beyond the limit, and we need its acknowledgement to continue.
            || self.is_limited(wqe)
            || is_last && !self.is_followed(may_start)
    }

    /// Returns true if the current request will be followed by a SEND or WRITE without any delay.
    fn is_followed(&self, may_start: bool) -> bool {
        // The keys of the next request are checked when it is started. If a key is invalid, we
        // request the acknowledgement then (`request_ack_before`), so that we don't need to check twice.
        let mut at = self.cur + 1;
        while let Some(next) = self.sq.peek(at) {
            let may_run = match next.phase {
                Phase::Posted => may_start,
                Phase::Started => true,
                // This was already executed, so check the request after it.
                Phase::Executed => true,
                Phase::Failed(_) => false,
            };
            // If the next request may have to wait for previous requests, a response or credits, it
            // could wait for the acknowledgement that we would not have requested.
            if !may_run || next.has_response() || self.is_limited(next) {
                return false;
            }
            let is_fenced = next.flags.contains(SendFlags::FENCE);
            if !next.is_local() {
                return !is_fenced;
            }
            if next.phase == Phase::Posted && (is_fenced || self.awaits_others(at, next)) {
                return false;
            }
            at += 1;
        }
        false
    }
}
