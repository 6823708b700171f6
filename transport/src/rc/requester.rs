//! Requester: splits send requests into packets, handles the window and retransmits lost packets.
//!
//! Packet numbers are 64 bits, start at the beginning of the connection and never wrap. The PSN
//! used on the wire is the first PSN plus the packet number. A READ uses one number per response
//! packet. The state of the window consists of three numbers:
//!
//! ```text
//!   acknowledged │ in flight │ sent before, to be sent again │ never sent
//!              una         nxt                             sent
//! ```
//!
//! `nxt` is equal to `sent`, except during recovery, when `nxt` is set back to `una`.
//!
//! # READs in pieces
//!
//! A READ is split into pieces that fit into the window, as the path needs to transport the
//! responses. A repeated request starts at the first missing byte and extends to the end of the
//! piece, or less if the window was reduced. The responder will therefore always see a part of a
//! previous request (IBTA 9.4.4 allows a duplicate to request less data). We never have two parts
//! of the same request in flight, because a responder is only required to store one.

mod cut;

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use riser_state::become_state;

use super::congestion::Congestion;
use super::ctx::{Ctx, Fault};
use super::send_queue::{Phase, SendQueue};
use super::state::RequesterState;
use super::{DrainedChange, RECENT, RcConfig, RcEvent, RtsParams, packet_cost};
use crate::verbs::{Mtu, PostReason, QpCap, SendFlags, SendWr, WcStatus};
use crate::wire::Psn;

/// RNR retry count for unlimited retries.
const RNR_FOREVER: u8 = 7;

/// Maximum time between retransmissions if the ACK timeout is disabled.
const SLOWEST_RETRANSMIT: Duration = Duration::from_secs(1);

/// Initial value for the round trip time.
const FIRST_ROUND_TRIP: Duration = Duration::from_micros(200);

/// Maximum backoff, in multiples of the first interval. A higher value would not help the path,
/// since we only send one packet, but would starve the connection.
const MOST_BACKOFF: u32 = 8;

/// Number of ACK timeouts without progress per retry. The standard allows up to four.
const TIMEOUTS_PER_RETRY: u32 = 3;

/// Divisor for the time without progress if packets were received from the peer. On a slow link the
/// acknowledgements are queued behind its data, so we only use retries at the full rate if the peer
/// is silent.
const RECEIVED_DIVISOR: u32 = 4;

/// Time after a timeout before a peer is considered silent.
const SILENCE: Duration = Duration::from_secs(1);

#[derive(Debug)]
pub(super) struct Requester {
    pub(super) sq: SendQueue,
    state: RequesterState,
    /// PSN for packet number 0.
    base: Psn,
    pub(super) mtu: u32,
    /// Position of the request containing `nxt`, or of the next request to start.
    cur: u64,
    /// Oldest unacknowledged packet number.
    pub(super) una: u64,
    /// Next packet number to send.
    nxt: u64,
    /// First packet number that was never sent.
    pub(super) sent: u64,
    /// End positions of READ requests and atomics in flight, oldest first. Limited by the initiator
    /// depth.
    reads: VecDeque<u64>,
    max_reads: usize,
    /// End positions of READ requests that were sent for the first time and are still waiting for a
    /// response, oldest first. The limit is the same.
    pieces: VecDeque<u64>,
    congestion: Congestion,
    /// Window before a timeout and the time of the timeout. Used to restore the window if the
    /// timeout was too early.
    undo: Option<(Congestion, Instant)>,
    /// Time the last packet was sent, if the window is less than one packet.
    left: Option<Instant>,
    /// Time to check again for packets waiting for the window, or requesting an acknowledgement for
    /// a failed request.
    paced: Option<Instant>,
    /// Random number state (xorshift). Remains 0 if it was initialized with 0.
    random: u32,
    ack_every: u32,
    since_ack_request: u32,
    /// Last receive advertised by the peer, or `None` without flow control.
    limit: Option<u64>,
    /// Number of completed requests that consumed a receive.
    consumed: u64,
    /// Packet number for which lost responses have already been requested again.
    implied_at: Option<u64>,
    timer: Option<Instant>,
    /// Duration of the current timer, including the random variation.
    armed: Duration,
    interval: Duration,
    /// Time without progress since a retry was last used.
    waited: Duration,
    /// Set if a packet was received from the peer since the last progress or timeout.
    has_received: bool,
    /// First interval, based on the measured round trip or initially on the configuration.
    first_retransmit: Duration,
    min_retransmit: Duration,
    round_trip: Option<RoundTrip>,
    /// Packet used to measure the round trip, and the time it was sent.
    timed: Option<(u64, Instant)>,
    ack_timeout: Option<Duration>,
    retry_cnt: u8,
    retries: u8,
    rnr_retry: u8,
    rnr_retries: u8,
    /// Set if an alternate path is available, to be used when a request runs out of retries.
    is_armed: bool,
    /// Set if the requester ran out of retries and wants to use the alternate path.
    wants_path: bool,
}

/// Measured round trip: mean and mean deviation (RFC 6298, section 2).
#[derive(Clone, Copy, Debug)]
struct RoundTrip {
    mean: Duration,
    deviation: Duration,
}

impl RoundTrip {
    fn update(old: Option<Self>, sample: Duration) -> Self {
        match old {
            None => Self {
                mean: sample,
                deviation: sample / 2,
            },
            Some(old) => Self {
                mean: (old.mean * 7 + sample) / 8,
                deviation: (old.deviation * 3 + old.mean.abs_diff(sample)) / 4,
            },
        }
    }

    /// Returns the time after which an acknowledgement is overdue (RFC 6298, section 2.3).
    fn patience(self) -> Duration {
        self.mean + self.deviation * 4
    }
}

/// Returns the ACK timeout for a code: 4.096 µs × 2^n, or `None` for 0 (IBTA 9.7.6.1.3).
fn plan_ack_timeout(code: u8) -> Option<Duration> {
    // The code only has five bits, but we limit it so that the shift cannot overflow.
    (code != 0).then(|| Duration::from_nanos(4096 << code.min(31)))
}

impl Requester {
    pub(super) fn new(cap: &QpCap) -> Self {
        Self::with_queue(SendQueue::new(cap))
    }

    fn with_queue(sq: SendQueue) -> Self {
        // Keep the memory used by the queue, so that reusing the QP doesn't need an allocation. All
        // other state is reset.
        Self {
            sq,
            state: RequesterState::Ready,
            base: Psn::default(),
            mtu: 0,
            cur: 0,
            una: 0,
            nxt: 0,
            sent: 0,
            reads: VecDeque::new(),
            max_reads: 0,
            pieces: VecDeque::new(),
            congestion: Congestion::new(1, 1),
            undo: None,
            left: None,
            paced: None,
            random: 0,
            ack_every: 1,
            since_ack_request: 0,
            limit: None,
            consumed: 0,
            implied_at: None,
            timer: None,
            armed: Duration::ZERO,
            interval: Duration::ZERO,
            waited: Duration::ZERO,
            has_received: false,
            first_retransmit: Duration::ZERO,
            min_retransmit: Duration::ZERO,
            round_trip: None,
            timed: None,
            ack_timeout: None,
            retry_cnt: 0,
            retries: 0,
            rnr_retry: 0,
            rnr_retries: 0,
            is_armed: false,
            wants_path: false,
        }
    }

    pub(super) fn start(&mut self, params: &RtsParams, mtu: Mtu, cfg: &RcConfig) {
        // The CM has exchanged the first PSNs, so the peer expects this value. `una`, `nxt` and
        // `sent` remain at 0 because they are relative to the first packet of the connection.
        self.base = params.sq_psn;
        self.mtu = mtu.bytes();
        self.max_reads = usize::from(params.max_rd_atomic);
        self.reads = VecDeque::with_capacity(self.max_reads);
        self.pieces = VecDeque::with_capacity(self.max_reads);
        // Use the size of a packet in the peer's socket buffer and not the payload size, because
        // the peer drops all packets that exceed this buffer.
        let max = cfg.max_inflight_bytes / packet_cost(mtu);
        self.congestion = Congestion::new(max, self.mtu);
        self.random = cfg.seed;
        self.ack_every = cfg.ack_every.max(1);
        self.set_ack_timeout(params.timeout, cfg);
        self.retry_cnt = params.retry_cnt;
        self.retries = params.retry_cnt;
        self.rnr_retry = params.rnr_retry;
        self.rnr_retries = params.rnr_retry;
    }

    /// Sets the ACK timeout and resets the measured round trip.
    fn set_ack_timeout(&mut self, code: u8, cfg: &RcConfig) {
        self.ack_timeout = plan_ack_timeout(code);
        // The first retransmission must not be later than the ACK timeout set by the owner.
        let longest = self.longest();
        self.first_retransmit = cfg.first_retransmit.min(longest);
        self.min_retransmit = cfg.min_retransmit.min(longest);
        self.interval = self.first_retransmit;
    }

    /// Updates attributes while the queue is empty or drained.
    pub(super) fn change(&mut self, change: &DrainedChange, cfg: &RcConfig) {
        if let Some(code) = change.timeout {
            self.set_ack_timeout(code, cfg);
        }
        if let Some(count) = change.retry_cnt {
            (self.retry_cnt, self.retries) = (count, count);
        }
        if let Some(count) = change.rnr_retry {
            (self.rnr_retry, self.rnr_retries) = (count, count);
        }
        if let Some(depth) = change.max_rd_atomic {
            self.max_reads = usize::from(depth);
            // Nothing is outstanding, so both queues are empty.
            self.reads.reserve_exact(self.max_reads);
            self.pieces.reserve_exact(self.max_reads);
        }
    }

    /// Called when a packet was received from the peer.
    pub(super) fn on_received(&mut self) {
        self.has_received = true;
    }

    pub(super) fn set_armed(&mut self, is_armed: bool) {
        self.is_armed = is_armed;
    }

    /// Returns true once if an armed connection ran out of retries.
    pub(super) fn take_path_wish(&mut self) -> bool {
        std::mem::take(&mut self.wants_path)
    }

    /// Handles a switch to a different path, for which nothing is known yet.
    pub(super) fn on_migrated(&mut self, now: Instant, timeout: u8, mtu: Mtu, cfg: &RcConfig) {
        let max = cfg.max_inflight_bytes / packet_cost(mtu);
        self.congestion = Congestion::new(max, self.mtu);
        self.undo = None;
        self.left = None;
        self.paced = None;
        self.round_trip = None;
        self.implied_at = None;
        self.set_ack_timeout(timeout, cfg);
        self.waited = Duration::ZERO;
        // Reset the retry count for the new path.
        self.retries = self.retry_cnt;
        self.is_armed = false;
        // Packets sent via the old path may be lost, including their responses. In the RNR wait
        // state, we already went back.
        if self.state == RequesterState::Ready {
            self.go_back(now);
        }
    }

    /// Returns whether a response refers to a packet that is outstanding or was recently
    /// acknowledged.
    pub(super) fn knows(&self, psn: Psn) -> bool {
        let distance = i64::from(psn.diff(self.psn(self.una)));
        let outstanding = i64::try_from(self.sent - self.una).unwrap_or(i64::MAX);
        -i64::from(RECENT) <= distance && distance < outstanding
    }

    /// Resets all state, for a QP in RESET.
    pub(super) fn reset(&mut self) {
        let mut sq = std::mem::take(&mut self.sq);
        sq.clear();
        *self = Self::with_queue(sq);
    }

    pub(super) fn outstanding(&self) -> usize {
        self.sq.len()
    }

    /// Returns the memory size in bytes for these queue sizes and this number of READs, without the
    /// struct itself.
    pub(super) const fn memory(cap: &QpCap, reads: u8) -> usize {
        SendQueue::memory(cap) + 2 * reads as usize * size_of::<u64>()
    }

    pub(super) fn footprint(&self) -> usize {
        self.sq.footprint() + (self.reads.capacity() + self.pieces.capacity()) * size_of::<u64>()
    }

    /// Returns true if no request is started but incomplete.
    pub(super) fn is_drained(&self) -> bool {
        // Requests are started in order, so we only need to check the oldest one. A local operation
        // that is still waiting is also `Posted`.
        self.sq
            .peek(self.sq.head())
            .is_none_or(|w| w.phase == Phase::Posted)
    }

    pub(super) fn post(&mut self, wr: &SendWr<'_>) -> Result<(), PostReason> {
        self.sq.push(wr)
    }

    pub(super) fn unpost(&mut self, count: usize) {
        self.sq.unpost(count);
    }

    /// Flushes all requests, in order.
    pub(super) fn flush(&mut self, cfg: &RcConfig, out: &mut Vec<RcEvent>) {
        self.timer = None;
        self.end_rnr_wait();
        while !self.sq.is_empty() {
            let wqe = self.sq.retire();
            let flushed = wqe.completion(cfg.qp, cfg.qp_num, WcStatus::WrFlushErr);
            out.push(RcEvent::Send(flushed));
        }
        // Positions are never reset, so the next post will start at the new head.
        self.cur = self.sq.head();
    }

    pub(super) fn deadline(&self) -> Option<Instant> {
        // During an RNR wait there is no other timer, as no packets are in flight.
        match self.state {
            RequesterState::RnrWait(until) => Some(until),
            RequesterState::Ready => [self.timer, self.paced].into_iter().flatten().min(),
        }
    }

    #[expect(
        clippy::cast_possible_truncation,
        reason = "a PSN counts modulo 2^24 (IBTA 9.7.1)"
    )]
    pub(super) fn psn(&self, number: u64) -> Psn {
        self.base.add(number as u32)
    }

    /// Sets the maximum amount of unacknowledged data. This has no effect on packets already in
    /// flight.
    pub(super) fn set_max_inflight(&mut self, bytes: u32, mtu: Mtu) {
        let max = bytes / packet_cost(mtu);
        self.congestion.set_max(max);
        if let Some((before, _)) = &mut self.undo {
            before.set_max(max);
        }
    }

    // ---- timers ----

    /// Stops an RNR wait, or retransmits starting at the oldest unacknowledged packet.
    pub(super) fn handle_timeout(&mut self, ctx: &mut Ctx<'_>) -> Result<(), Fault> {
        match self.state {
            RequesterState::RnrWait(until) if until <= ctx.now => {
                self.end_rnr_wait();
                return Ok(());
            }
            RequesterState::RnrWait(_) => return Ok(()),
            RequesterState::Ready => {}
        }
        // Packets waiting for this are sent by the next poll. Pacing is not a timeout, so there is
        // no retransmission and no retry is used.
        self.paced = self.paced.filter(|&at| at > ctx.now);
        if self.timer.is_none_or(|at| at > ctx.now) {
            return Ok(());
        }
        ctx.counters.timeouts += 1;
        // We need to add up the time because the intervals increase. This is reset on any progress,
        // so only consecutive timeouts are counted.
        self.waited += match std::mem::take(&mut self.has_received) {
            true => self.armed / RECEIVED_DIVISOR,
            false => self.armed,
        };
        let patience = self.ack_timeout.map(|timeout| timeout * TIMEOUTS_PER_RETRY);
        if let Some(patience) = patience
            && self.waited >= patience
        {
            if self.retries == 0 && !self.is_armed {
                return Err(self.fail_head(ctx, WcStatus::RetryExcErr));
            }
            self.wants_path = self.retries == 0;
            self.retries = self.retries.saturating_sub(1);
            // The rest is counted for the next retry, because it can be shorter than the interval.
            self.waited -= patience;
        }
        // Double the interval, as for any sign of overload, so that we don't keep sending the same
        // packets to a slow peer at a constant rate.
        let most = self.first_retransmit * MOST_BACKOFF;
        self.interval = (self.interval * 2).min(most).min(self.longest());
        // Keep the first window if there are multiple timeouts, as the later ones only see the
        // reduced window.
        self.undo.get_or_insert((self.congestion, ctx.now));
        // This must be called before `go_back` changes `nxt`, because signals for packets sent
        // before now belong to this cut.
        self.congestion.on_timeout(self.nxt);
        // After a timeout, we can request lost responses again even if this was already done for an
        // implied NAK.
        self.implied_at = None;
        self.go_back(ctx.now);
        Ok(())
    }

    /// Returns the maximum time between retransmissions.
    fn longest(&self) -> Duration {
        self.ack_timeout.unwrap_or(SLOWEST_RETRANSMIT)
    }

    /// Returns whether a timeout was too early and no packets were lost, as the acknowledgement
    /// covers more packets than were sent again, or was received too early to be caused by these
    /// packets.
    fn was_early(&self, now: Instant, fired: Instant) -> bool {
        // It takes a full round trip to receive the acknowledgement for a retransmission. If it is
        // received in less than half of the average, it is for the original packet.
        let soonest = self.round_trip.map_or(Duration::ZERO, |r| r.mean / 2);
        self.una > self.nxt || now.saturating_duration_since(fired) < soonest
    }

    /// Returns true if there was no acknowledgement for so long that the peer may be down.
    pub(super) fn is_peer_silent(&self, now: Instant) -> bool {
        // `undo` contains the time of the first timeout without progress, because it is cleared on
        // any progress.
        let fired = self.undo.map(|(_, fired)| fired);
        fired.is_some_and(|fired| now.saturating_duration_since(fired) >= SILENCE)
    }

    /// Measures the round trip when the timed packet has been acknowledged.
    fn measure(&mut self, now: Instant) {
        // The packet itself must be acknowledged, not only its predecessors.
        if let Some((number, left)) = self.timed
            && number < self.una
        {
            self.timed = None;
            let sample = now.saturating_duration_since(left);
            let estimate = RoundTrip::update(self.round_trip, sample);
            self.round_trip = Some(estimate);
            // The lower limit is needed because a busy peer can respond a few milliseconds late on
            // any path. The upper limit is the ACK timeout.
            let longest = self.longest();
            self.first_retransmit = estimate.patience().clamp(self.min_retransmit, longest);
        }
    }

    /// Restarts sending at the oldest unacknowledged packet.
    pub(super) fn go_back(&mut self, now: Instant) {
        // All packets following a lost packet must be sent again even if they were received, as the
        // responder drops everything after a missing packet (IBTA 9.7.5).
        self.nxt = self.una;
        self.cur = self.locate(self.nxt);
        // READs and atomics will be sent and counted again. `pieces` is not changed, because
        // repeated requests must use the original end.
        while self.reads.back().is_some_and(|&end| end > self.una) {
            self.reads.pop_back();
        }
        self.since_ack_request = 0;
        // For a retransmission we don't know which copy was acknowledged (Karn's algorithm, RFC
        // 6298 section 3).
        self.timed = None;
        self.timer = None;
        if self.una < self.sent {
            let length = self.vary(self.interval);
            self.arm(now, length);
        }
    }

    /// Starts the timer for the oldest packet in flight.
    fn arm(&mut self, now: Instant, length: Duration) {
        self.armed = length;
        self.timer = Some(now + length);
    }

    /// Increases `time` by a random value of up to a quarter.
    fn vary(&mut self, time: Duration) -> Duration {
        // Xorshift only needs a few instructions and a single word of state, and is sufficient to
        // spread the timers of connections which lost packets at the same time.
        self.random ^= self.random << 13;
        self.random ^= self.random >> 17;
        self.random ^= self.random << 5;
        // We only increase the time, as the timer must not expire before the acknowledgement is
        // overdue.
        time + time / 1024 * (self.random & 0xff)
    }

    /// Reduces the window for a loss reported by the peer.
    pub(super) fn narrow(&mut self) {
        self.congestion.on_loss(self.una, self.nxt);
    }

    /// Handles a congestion mark on our packets or their responses.
    pub(super) fn on_mark(&mut self) {
        self.congestion.on_mark(self.una, self.nxt);
    }

    /// Handles a response which shows that the response to a previous READ or atomic was lost. We
    /// request it again once. If this fails, the timer will retry.
    pub(super) fn on_implied_nak(&mut self, ctx: &mut Ctx<'_>) {
        // Otherwise, all packets of a burst following the lost response would cause a new request.
        if self.implied_at == Some(self.una) {
            return;
        }
        self.implied_at = Some(self.una);
        ctx.counters.implied_naks += 1;
        // The loss was caused by our window, which allowed us to request too much data.
        self.narrow();
        self.go_back(ctx.now);
    }

    /// Handles an RNR NAK for packet `una`.
    pub(super) fn on_rnr_nak(&mut self, ctx: &mut Ctx<'_>, wait: Duration) -> Result<(), Fault> {
        if matches!(self.state, RequesterState::RnrWait(_)) {
            // Nothing was sent since we started waiting, so this is a duplicate NAK.
            return Ok(());
        }
        // This counts NAKs instead of time, because the wait time is chosen by the peer.
        if self.rnr_retry != RNR_FOREVER {
            if self.rnr_retries == 0 {
                return Err(self.fail_head(ctx, WcStatus::RnrRetryExcErr));
            }
            self.rnr_retries -= 1;
        }
        // The peer dropped this packet and all following packets, so we need to resend them. The
        // window is not reduced because this is not a loss.
        self.go_back(ctx.now);
        // The wait replaces the timer, and the NAK shows that the peer is alive.
        self.timer = None;
        self.waited = Duration::ZERO;
        become_state(&mut self.state, RequesterState::RnrWait(ctx.now + wait));
        Ok(())
    }

    fn end_rnr_wait(&mut self) {
        if matches!(self.state, RequesterState::RnrWait(_)) {
            become_state(&mut self.state, RequesterState::Ready);
        }
    }

    /// Called when `una` was increased by `packets`.
    pub(super) fn on_progress(&mut self, now: Instant, packets: u32) {
        // We must decide if the last timeout was too early before the window is increased.
        if let Some((congestion, fired)) = self.undo.take()
            && self.was_early(now, fired)
        {
            self.congestion = congestion;
        }
        self.congestion.on_progress(packets, self.una, self.nxt);
        // The retry count is per packet: progress proves that path and peer are alive, so we can
        // reset it for the next packet.
        self.retries = self.retry_cnt;
        self.rnr_retries = self.rnr_retry;
        self.waited = Duration::ZERO;
        self.has_received = false;
        self.measure(now);
        // Any progress resets the backoff.
        self.interval = self.first_retransmit;
        self.implied_at = None;
        while self.reads.front().is_some_and(|&end| end <= self.una) {
            self.reads.pop_front();
        }
        while self.pieces.front().is_some_and(|&end| end <= self.una) {
            self.pieces.pop_front();
        }
        // We may receive acknowledgements for packets that we were about to send again, if the
        // original packets arrived late. In this case we can skip them.
        if self.nxt < self.una {
            self.nxt = self.una;
            self.cur = self.locate(self.nxt);
        }
        // Restart the timer for the oldest packet still in flight. Otherwise no timer is
        // needed, so an idle connection is never considered dead.
        self.timer = None;
        if self.una < self.nxt {
            self.arm(now, self.interval);
        }
    }

    /// Sets the number of messages the peer can receive after the completed ones. `None` means no
    /// limit.
    pub(super) fn set_credits(&mut self, credits: Option<u32>) {
        // We store an absolute limit and compare it with the number of each request, so that it is
        // also correct for requests that are sent later or repeated.
        self.limit = credits.map(|c| self.consumed + u64::from(c));
    }

    /// Returns the position of the request containing packet `number`, or of the first request that
    /// was not started.
    fn locate(&self, number: u64) -> u64 {
        // Search from the head: after a loss it is close, and we don't need to maintain an index.
        let mut at = self.sq.head();
        while let Some(wqe) = self.sq.peek(at)
            // This also stops at a failed request because nothing after it will be sent.
            && matches!(wqe.phase, Phase::Started | Phase::Executed)
            && wqe.end() <= number
        {
            at += 1;
        }
        at
    }

    // ---- completions ----

    /// Completes finished requests in order.
    pub(super) fn retire(&mut self, ctx: &mut Ctx<'_>) -> Result<(), Fault> {
        while let Some(wqe) = self.sq.peek(self.sq.head()) {
            // Requests must complete in the order they were posted, as consumers rely on this to
            // release unsignaled requests.
            match wqe.phase {
                Phase::Executed => {}
                Phase::Started if wqe.end() <= self.una => {}
                // All previous requests are complete, so we can now report this local failure.
                Phase::Failed(status) => return Err(self.fail_head(ctx, status)),
                Phase::Started | Phase::Posted => break,
            }
            let wqe = self.sq.retire();
            // This must include unsignaled requests, because credits count receives and not
            // completions.
            self.consumed = wqe.recv_seq;
            if ctx.cfg.sq_sig_all || wqe.flags.contains(SendFlags::SIGNALED) {
                let done = wqe.completion(ctx.cfg.qp, ctx.cfg.qp_num, WcStatus::Success);
                ctx.out.push(RcEvent::Send(done));
            }
        }
        // If a request is completed while it is being sent again, `cur` can be behind the head.
        self.cur = self.cur.max(self.sq.head());
        Ok(())
    }

    /// Fails the oldest request.
    pub(super) fn fail_head(&mut self, ctx: &mut Ctx<'_>, status: WcStatus) -> Fault {
        // If the queue is empty there is no request to fail, but the connection still fails.
        if !self.sq.is_empty() {
            let wqe = self.sq.retire();
            let failed = wqe.completion(ctx.cfg.qp, ctx.cfg.qp_num, status);
            ctx.out.push(RcEvent::Send(failed));
        }
        Fault
    }

    /// Fails the current request, once all previous requests are complete.
    fn fail_current(&mut self, ctx: &mut Ctx<'_>, status: WcStatus) -> Result<(), Fault> {
        // We can't complete this immediately. The consumer expects that all requests before the
        // first error were successful, and previous requests may still succeed.
        let wqe = self.sq.wqe_mut(self.cur);
        let is_begun = wqe.phase == Phase::Started;
        let first = if is_begun { wqe.first } else { self.nxt };
        wqe.phase = Phase::Failed(status);
        self.request_ack_before(ctx.now, first);
        self.retire(ctx)
    }

    /// Sends the packet preceding a failed request again if it left the acknowledgement to that
    /// request. `first` is the first packet of the failed request.
    fn request_ack_before(&mut self, now: Instant, first: u64) {
        // Some packets of the failed request may also have been sent without requesting an
        // acknowledgement.
        let has_requested = u64::from(self.since_ack_request) <= self.nxt - first;
        if has_requested || self.una >= first {
            return;
        }
        // Only send this packet, without starting the timer, as there is no indication of a loss.
        // Previous packets may be acknowledged at any time, and would fail if their memory was
        // removed.
        self.nxt = first - 1;
        self.cur = self.locate(self.nxt);
        self.paced = Some(now);
    }
}
