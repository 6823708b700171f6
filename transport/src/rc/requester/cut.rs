//! Cutting: which packet goes next, and what it looks like.

use std::time::Instant;

use super::{FIRST_ROUND_TRIP, Requester};
use crate::rc::TxPacket;
use crate::rc::ctx::{Ctx, Fault};
use crate::rc::emit::{Cut, gather, plan_opcode, push_extended};
use crate::rc::message::plan_packets;
use crate::rc::send_queue::{Phase, SendWqe};
use crate::rc::state::RequesterState;
use crate::verbs::{SendFlags, SendOp, WcStatus};
use crate::wire::{Bth, Service, XrcEth, push_header};

impl Requester {
    /// The next request packet, if state, window, credits and fences allow one. `may_start` is
    /// false while the send queue drains.
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
            // The caller may poll before the timer has fired.
            self.end_rnr_wait();
        }
        while let Some(wqe) = self.sq.peek(self.cur) {
            match wqe.phase {
                // Its error is reported once the requests before it are complete; until then
                // nothing behind it may start, since it would complete as flushed although the
                // peer had carried it out.
                Phase::Failed(_) => return Ok(false),
                Phase::Executed => self.cur += 1,
                // Local operations begin nothing that the peer sees, but a send queue that drains
                // starts no request at all.
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

    /// Whether the next request to send is a READ or an atomic.
    pub(in crate::rc) fn is_read_next(&self) -> bool {
        // All packets of the current one may have left.
        let is_sent = |wqe: &SendWqe| matches!(wqe.phase, Phase::Started) && wqe.end() <= self.nxt;
        let at = self.cur + u64::from(self.sq.peek(self.cur).is_some_and(is_sent));
        self.sq.peek(at).is_some_and(SendWqe::has_response)
    }

    /// Sends the first packet of the current request, if it may leave now.
    fn begin(&mut self, ctx: &mut Ctx<'_>, tx: &mut TxPacket) -> Result<bool, Fault> {
        let (first, mtu) = (self.nxt, self.mtu);
        let wqe = self.sq.wqe_mut(self.cur);
        // The request counts as started only when this packet has been cut. Until then the
        // numbers are a plan, which is made again the next time.
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

    /// Runs a local operation whose turn has come; false if it must wait.
    fn execute(&mut self, ctx: &mut Ctx<'_>, wqe: &SendWqe) -> Result<bool, Fault> {
        if self.awaits_others(self.cur, wqe) {
            return Ok(false);
        }
        if wqe.run_local(ctx.cfg.pd, ctx.cfg.qp, ctx.mrs).is_err() {
            self.fail_current(ctx, WcStatus::MwBindErr)?;
            return Ok(false);
        }
        // It has a place between the packets but none of its own, so `locate` finds the way past
        // it.
        let first = self.nxt;
        let done = self.sq.wqe_mut(self.cur);
        done.phase = Phase::Executed;
        done.first = first;
        self.cur += 1;
        self.retire(ctx)?;
        Ok(true)
    }

    /// Whether a local operation, posted at this position, waits for requests before it. It changes
    /// our own table alone, so most do not.
    fn awaits_others(&self, at: u64, wqe: &SendWqe) -> bool {
        if wqe.flags.contains(SendFlags::FENCE) {
            // Its owner has it wait for READs, and for an invalidation all requests are waited for:
            // only completed ones show that nothing will use the key any more.
            return match wqe.op {
                SendOp::LocalInv(_) => at != self.sq.head(),
                _ => !self.reads.is_empty(),
            };
        }
        // Requests that may have to be sent again still need the key.
        matches!(wqe.op, SendOp::LocalInv(key) if self.sq.names(key, at))
    }

    /// Checks what holds for all packets of the current request, before the first one.
    fn check_start(&self, ctx: &Ctx<'_>) -> Result<(), WcStatus> {
        let wqe = self.sq.wqe(self.cur);
        // The peer has agreed to no READs or atomics. It would refuse the request and end the
        // connection; this way the owner sees which request was wrong.
        if wqe.has_response() && self.max_reads == 0 {
            return Err(WcStatus::LocQpOpErr);
        }
        // The only packet of a message looks at all entries itself.
        if wqe.packets == 1 && !wqe.has_response() {
            return Ok(());
        }
        // All entries, although the first packet may need a few only: once the peer has that, the
        // message can no longer be taken back.
        for sge in self.sq.sges(self.cur) {
            ctx.mrs
                .resolve_local(ctx.cfg.pd, sge, wqe.has_response())
                .map_err(|_| WcStatus::LocProtErr)?;
        }
        Ok(())
    }

    /// Packet numbers that the next packet of a request uses up.
    fn next_count(&self, wqe: &SendWqe) -> u32 {
        // Every packet of a SEND or WRITE has a number of its own, and an atomic is answered by
        // one.
        if !matches!(wqe.op, SendOp::Read(_)) {
            return 1;
        }
        let window = self.congestion.packets();
        if self.nxt < self.sent {
            // A repeated READ request ends where the first one ended, since the responder has a
            // resource for that range and answers nothing that reaches beyond it.
            let end = self.pieces.iter().find(|&&end| end > self.nxt);
            let end = end.copied().unwrap_or(wqe.end()).min(wqe.end());
            return window.min(wqe.index_of(end) - wqe.index_of(self.nxt));
        }
        // Two pieces fill the window, so that one is under way while the next is asked for.
        let piece = if self.max_reads > 1 {
            window.div_ceil(2)
        } else {
            window
        };
        piece.min(wqe.packets - wqe.index_of(self.nxt))
    }

    /// Returns whether window, initiator depth, fence, credits and pace allow the next packet of
    /// the current request.
    fn may_send(&mut self, now: Instant) -> bool {
        let wqe = self.sq.wqe(self.cur);
        if !self.is_allowed(wqe) {
            return false;
        }
        if self.is_limited(wqe) {
            // IBTA 9.7.7.2.5: one packet beyond the limit, when all before it is acknowledged. Its
            // acknowledgement shows that the message has its receive.
            return if self.nxt == wqe.first {
                self.una == self.nxt
            } else {
                // Once the first packet has found a receive, the rest of the message has it as
                // well.
                self.una > wqe.first
            };
        }
        self.is_paced(now)
    }

    /// Whether window, initiator depth and fence allow the next packet of a request.
    fn is_allowed(&self, wqe: &SendWqe) -> bool {
        let in_flight = self.nxt - self.una;
        // The responses of a READ count as in flight as soon as they are asked for: the responder
        // sends them without regard to our window.
        if in_flight > 0 {
            let count = u64::from(self.next_count(wqe));
            let fits = in_flight + count <= u64::from(self.congestion.packets());
            // A window that was cut may be full of packets that no acknowledgement was asked for:
            // then one more packet asks.
            if !fits && self.since_ack_request == 0 {
                return false;
            }
        }
        if wqe.has_response() {
            // The part under way has to be answered first: the responder keeps one place for each
            // request, and a second part would replace what it still has to send of the first.
            if self.is_part_under_way(wqe) {
                return false;
            }
            // One more than the peer has resources would be refused as an invalid request, and
            // end the connection.
            if self.reads.len() >= self.max_reads && self.max_reads > 0 {
                return false;
            }
        }
        // Only the first packet is held back: READs in front of the request have been answered
        // when it leaves. SENDs and WRITEs in front need no fence, since they take effect in
        // their order anyway.
        let is_fenced = wqe.flags.contains(SendFlags::FENCE) && self.nxt == wqe.first;
        !is_fenced || self.reads.is_empty()
    }

    /// Whether a window of less than one packet allows a packet by now; if not, sees to it that it
    /// is asked for again.
    fn is_paced(&mut self, now: Instant) -> bool {
        let Some(left) = self.left else {
            return true;
        };
        let round_trip = self.round_trip.map_or(FIRST_ROUND_TRIP, |r| r.mean);
        // A window of a packet or more is paced by its acknowledgements.
        let Some(gap) = self.congestion.gap(round_trip) else {
            self.left = None;
            return true;
        };
        // Sooner than the timer, which runs while a repeated packet waits here, and would take
        // the pause for silence.
        let at = left + gap.min(self.interval / 2);
        if at <= now {
            return true;
        }
        self.paced = Some(at);
        false
    }

    /// Whether the packet `nxt` is in the middle of a READ request of before, of which another part
    /// is under way.
    fn is_part_under_way(&self, wqe: &SendWqe) -> bool {
        // The first packet of a request is in the middle of none, also behind an atomic, whose end
        // is not among `pieces`.
        self.nxt < self.sent
            && self.nxt != wqe.first
            && self.reads.back() == Some(&self.nxt)
            && !self.pieces.contains(&self.nxt)
    }

    fn is_limited(&self, wqe: &SendWqe) -> bool {
        wqe.consumes_receive() && self.limit.is_some_and(|limit| wqe.recv_seq > limit)
    }

    /// Writes the packet `nxt` of the current request into `tx`.
    fn cut(
        &mut self,
        ctx: &mut Ctx<'_>,
        tx: &mut TxPacket,
        may_start: bool,
    ) -> Result<bool, Fault> {
        let wqe = self.sq.wqe(self.cur);
        let index = wqe.index_of(self.nxt);
        let count = self.next_count(wqe);
        let cut = Cut {
            count,
            offset: index * self.mtu,
            is_first: index == 0,
            is_last: index + count == wqe.packets,
        };
        let has_response = wqe.has_response();
        // The payload is gathered again for a repeated packet, since nothing was kept the first
        // time.
        if !has_response {
            let len = (wqe.length - cut.offset).min(self.mtu) as usize;
            // The key may have been invalidated, or the region deregistered, since the last
            // packet.
            let (pd, payload) = (ctx.cfg.pd, self.sq.payload(self.cur));
            if gather(payload, pd, ctx.mrs, tx, cut.offset as usize, len).is_err() {
                // Some entries may be gathered already, and `tx` goes on to the next user.
                tx.clear();
                self.fail_current(ctx, WcStatus::LocProtErr)?;
                return Ok(false);
            }
            tx.payload_len = len;
        }
        // READs and atomics are answered in any case. They count as having asked, since their
        // answer moves the window like an acknowledgement.
        let asks = has_response || self.asks_for_ack(wqe, cut.is_last, may_start);
        let wakes = wqe.flags.contains(SendFlags::SOLICITED) && wqe.consumes_receive();
        let mut opcode = plan_opcode(&wqe.op, cut);
        let is_xrc = ctx.cfg.service == Service::Xrc;
        if is_xrc {
            opcode = opcode.in_service(Service::Xrc);
        }
        let bth = Bth::new(opcode, ctx.link.dest, self.psn(self.nxt))
            .with_ack_request(asks)
            // The event is for the receiver's completion, which only the last packet makes.
            .with_solicited(wakes && cut.is_last)
            .with_pad_for(tx.payload_len);
        push_header(&mut tx.headers, &bth);
        if is_xrc {
            push_header(&mut tx.headers, &XrcEth::new(wqe.remote_srqn()));
        }
        push_extended(&mut tx.headers, wqe, cut, self.mtu);
        debug_assert_eq!(tx.headers.len(), Bth::LEN + opcode.info().ext_len);
        let is_read = matches!(wqe.op, SendOp::Read(_));
        self.on_cut(ctx, count, asks, has_response.then_some(is_read));
        Ok(true)
    }

    /// A packet that uses up `count` numbers leaves. `read` is whether it is a READ request, of a
    /// request that has a response.
    fn on_cut(&mut self, ctx: &mut Ctx<'_>, count: u32, asks: bool, read: Option<bool>) {
        self.since_ack_request = if asks { 0 } else { self.since_ack_request + 1 };
        if self.nxt < self.sent {
            ctx.counters.retransmits += 1;
        // Only first copies are timed, and only packets that are answered at once: what is not
        // asked for may be acknowledged with a later packet.
        } else if asks && self.timed.is_none() {
            self.timed = Some((self.nxt, ctx.now));
        }
        let is_first_time = self.nxt == self.sent;
        self.nxt += u64::from(count);
        self.sent = self.sent.max(self.nxt);
        if let Some(is_read) = read {
            self.reads.push_back(self.nxt);
            // An atomic is never repeated in parts, so its end need not be remembered.
            if is_first_time && is_read {
                self.pieces.push_back(self.nxt);
            }
        }
        // The next packet's time counts from here.
        if self.congestion.is_partial() {
            self.left = Some(ctx.now);
        }
        // A timer that runs belongs to the oldest packet in flight, and is not put off by newer
        // ones: a steady stream would never time out.
        if self.timer.is_none() {
            self.timer = Some(ctx.now + self.vary(self.interval));
        }
    }

    /// Returns whether the packet `nxt` asks for an acknowledgement: so often that the window keeps
    /// moving, and at the end of a message that no other follows at once.
    fn asks_for_ack(&self, wqe: &SendWqe, is_last: bool, may_start: bool) -> bool {
        let window = self.congestion.packets();
        // Twice in a window, so that packets follow acknowledgements and not one burst the other.
        let most = self.ack_every.min(window.div_ceil(2));
        // A full window, of which nothing asks for an acknowledgement, would stand still until
        // the timer.
        self.nxt + 1 - self.una >= u64::from(window)
            || self.since_ack_request + 1 >= most
            // This packet is the one beyond the limit: only its acknowledgement lets the rest
            // follow.
            || self.is_limited(wqe)
            || is_last && !self.is_followed(may_start)
    }

    /// Whether another SEND or WRITE will follow the current request without waiting for anything.
    fn is_followed(&self, may_start: bool) -> bool {
        // Its keys are checked when it starts. If one is bad, this message asks then
        // (`ask_before`), so that the check is not made twice for every request.
        let mut at = self.cur + 1;
        while let Some(next) = self.sq.peek(at) {
            let may_run = match next.phase {
                Phase::Posted => may_start,
                Phase::Started => true,
                // It is done, and what comes behind it follows.
                Phase::Executed => true,
                Phase::Failed(_) => false,
            };
            // Anything that may wait, for its turn, a response or credits, could wait for the
            // very acknowledgement that this message does not ask for.
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
