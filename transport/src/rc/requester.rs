//! The requester: cuts send requests into packets, keeps the window, repeats what was lost.
//!
//! Packets are counted from the start of the connection by 64-bit numbers that never wrap; the PSN
//! on the wire is the first PSN plus the number. A READ takes one number for each packet of its
//! response. Three numbers are the state of the window:
//!
//! ```text
//!   acknowledged │ in flight │ sent before, to be sent again │ never sent
//!              una         nxt                             sent
//! ```
//!
//! Outside a recovery `nxt` equals `sent`. Going back sets `nxt` to `una`.
//!
//! # READs in pieces
//!
//! A READ is asked for in pieces that fit the window, since what its responder sends in answer is
//! what the path has to carry. A repeated request begins at the first byte that is missing and ends
//! where its piece ends, or before that where the window has become smaller. So to the responder it
//! is a part of a request that it has seen, with any windows (IBTA 9.4.4 allows a duplicate to ask
//! for less). Two parts of one request are never under way together, because a responder need not
//! remember more than one.

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

/// Code of an RNR retry count without end.
const RNR_FOREVER: u8 = 7;

/// Longest time between retransmissions where the ACK timeout is "for ever".
const SLOWEST_RETRANSMIT: Duration = Duration::from_secs(1);

/// The round trip that is assumed before one is known.
const FIRST_ROUND_TRIP: Duration = Duration::from_micros(200);

/// Maximum of the time between retransmissions, in units of its first value. Beyond that it
/// protects no path, since what is sent is one packet, but starves a connection.
const MOST_BACKOFF: u32 = 8;

/// ACK timeouts without progress that spend one retry; the standard allows up to four.
const TIMEOUTS_PER_RETRY: u32 = 3;

/// Time after a timeout from which a peer that has not answered counts as silent.
const SILENCE: Duration = Duration::from_secs(1);

#[derive(Debug)]
pub(super) struct Requester {
    pub(super) sq: SendQueue,
    state: RequesterState,
    /// PSN of packet number 0.
    base: Psn,
    pub(super) mtu: u32,
    /// Position of the request that `nxt` belongs to, or of the next to start.
    cur: u64,
    /// Oldest packet number not acknowledged.
    pub(super) una: u64,
    /// Next packet number to send.
    nxt: u64,
    /// First packet number never sent.
    pub(super) sent: u64,
    /// Ends of the READ requests and atomics in flight, oldest first; bounded by the initiator
    /// depth.
    reads: VecDeque<u64>,
    max_reads: usize,
    /// Ends of the READ requests that were sent for the first time and are not yet answered, oldest
    /// first; as many at most.
    pieces: VecDeque<u64>,
    congestion: Congestion,
    /// The window before a timeout that may turn out to have been too early, and when it fired.
    undo: Option<(Congestion, Instant)>,
    /// Time at which the last packet left, where the window is less than one packet.
    left: Option<Instant>,
    /// Time to look again at what waits for the window, or asks in place of a failed request.
    paced: Option<Instant>,
    /// State of the random numbers (xorshift); 0 gives no others.
    random: u32,
    ack_every: u32,
    since_ack_request: u32,
    /// Last receive of the peer's that it has advertised, `None` without flow control.
    limit: Option<u64>,
    /// Receive-consuming requests that are complete.
    consumed: u64,
    /// Packet number for which lost responses have been asked for again already.
    implied_at: Option<u64>,
    timer: Option<Instant>,
    interval: Duration,
    /// Time without progress since a retry was last spent.
    waited: Duration,
    /// The first interval, from measurement or, before any, from the configuration.
    first_retransmit: Duration,
    min_retransmit: Duration,
    round_trip: Option<RoundTrip>,
    /// The packet being timed, and when it left.
    timed: Option<(u64, Instant)>,
    ack_timeout: Option<Duration>,
    retry_cnt: u8,
    retries: u8,
    rnr_retry: u8,
    rnr_retries: u8,
    /// There is another path, which a request takes whose retries are used up.
    is_armed: bool,
    /// That has happened.
    wants_path: bool,
}

/// The round trip as measured: its mean and its mean deviation (RFC 6298, section 2).
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

    /// Time after which an acknowledgement is overdue (RFC 6298, section 2.3).
    fn patience(self) -> Duration {
        self.mean + self.deviation * 4
    }
}

/// The ACK timeout of a code: 4.096 µs × 2^n, `None` for 0 (IBTA 9.7.6.1.3).
fn plan_ack_timeout(code: u8) -> Option<Duration> {
    // A code has five bits; the cut keeps the shift in range for any value.
    (code != 0).then(|| Duration::from_nanos(4096 << code.min(31)))
}

impl Requester {
    pub(super) fn new(cap: &QpCap) -> Self {
        Self::with_queue(SendQueue::new(cap))
    }

    fn with_queue(sq: SendQueue) -> Self {
        // The queue keeps its memory over a reset, so that a queue pair that is used again
        // allocates nothing; everything else begins again.
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
            interval: Duration::ZERO,
            waited: Duration::ZERO,
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
        // The first PSN is the one that the peer expects; the CM has exchanged both. `una`, `nxt`
        // and `sent` stay at 0, since they count packets from this connection's first.
        self.base = params.sq_psn;
        self.mtu = mtu.bytes();
        self.max_reads = usize::from(params.max_rd_atomic);
        self.reads = VecDeque::with_capacity(self.max_reads);
        self.pieces = VecDeque::with_capacity(self.max_reads);
        // In packets, each at its cost in the peer's socket buffer and not at its payload: what
        // exceeds that buffer is dropped there.
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

    /// Sets the ACK timeout, and forgets what was measured.
    fn set_ack_timeout(&mut self, code: u8, cfg: &RcConfig) {
        self.ack_timeout = plan_ack_timeout(code);
        // A first retransmission after the ACK timeout would be later than the owner asked for.
        let longest = self.longest();
        self.first_retransmit = cfg.first_retransmit.min(longest);
        self.min_retransmit = cfg.min_retransmit.min(longest);
        self.interval = self.first_retransmit;
    }

    /// Changes attributes, of an empty or drained queue.
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
            // Nothing is outstanding, so both are empty.
            self.reads.reserve_exact(self.max_reads);
            self.pieces.reserve_exact(self.max_reads);
        }
    }

    pub(super) fn set_armed(&mut self, is_armed: bool) {
        self.is_armed = is_armed;
    }

    /// Whether the retries of an armed connection are used up, once.
    pub(super) fn take_path_wish(&mut self) -> bool {
        std::mem::take(&mut self.wants_path)
    }

    /// The connection has another path from now on, about which nothing is known.
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
        // All of them again, for the new path.
        self.retries = self.retry_cnt;
        self.is_armed = false;
        // What was sent by the old path may be lost, as may its answers. A request that waits for a
        // receive of the peer's has gone back already.
        if self.state == RequesterState::Ready {
            self.go_back(now);
        }
    }

    /// Returns whether a response is about a packet that is outstanding, or was a short while ago.
    pub(super) fn knows(&self, psn: Psn) -> bool {
        let distance = i64::from(psn.diff(self.psn(self.una)));
        let outstanding = i64::try_from(self.sent - self.una).unwrap_or(i64::MAX);
        -i64::from(RECENT) <= distance && distance < outstanding
    }

    /// Forgets everything, as a queue pair in RESET does.
    pub(super) fn reset(&mut self) {
        let mut sq = std::mem::take(&mut self.sq);
        sq.clear();
        *self = Self::with_queue(sq);
    }

    pub(super) fn outstanding(&self) -> usize {
        self.sq.len()
    }

    /// Bytes of memory of one with these depths and READs at once, besides itself.
    pub(super) const fn memory(cap: &QpCap, reads: u8) -> usize {
        SendQueue::memory(cap) + 2 * reads as usize * size_of::<u64>()
    }

    pub(super) fn footprint(&self) -> usize {
        self.sq.footprint() + (self.reads.capacity() + self.pieces.capacity()) * size_of::<u64>()
    }

    /// Whether no request has begun without being complete.
    pub(super) fn is_drained(&self) -> bool {
        // Requests start in order, so the oldest one decides. A local operation that waits for
        // its turn is `Posted` too.
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

    /// Completes every request as flushed, in order.
    pub(super) fn flush(&mut self, cfg: &RcConfig, out: &mut Vec<RcEvent>) {
        self.timer = None;
        self.end_rnr_wait();
        while !self.sq.is_empty() {
            let wqe = self.sq.retire();
            let flushed = wqe.completion(cfg.qp, cfg.qp_num, WcStatus::WrFlushErr);
            out.push(RcEvent::Send(flushed));
        }
        // The positions go on counting; a later post begins at the new head.
        self.cur = self.sq.head();
    }

    pub(super) fn deadline(&self) -> Option<Instant> {
        // During an RNR wait no other timer runs: nothing has been sent that could be overdue.
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

    /// Changes the most bytes that may be unacknowledged. Packets in flight beyond them are not
    /// taken back.
    pub(super) fn set_max_inflight(&mut self, bytes: u32, mtu: Mtu) {
        let max = bytes / packet_cost(mtu);
        self.congestion.set_max(max);
        if let Some((before, _)) = &mut self.undo {
            before.set_max(max);
        }
    }

    // ---- time ----

    /// Ends an RNR wait, or repeats from the oldest packet not acknowledged.
    pub(super) fn handle_timeout(&mut self, ctx: &mut Ctx<'_>) -> Result<(), Fault> {
        match self.state {
            RequesterState::RnrWait(until) if until <= ctx.now => {
                self.end_rnr_wait();
                return Ok(());
            }
            RequesterState::RnrWait(_) => return Ok(()),
            RequesterState::Ready => {}
        }
        // What waited for this is sent by the next poll.
        // A pace is not a timeout: nothing is repeated and no retry spent.
        self.paced = self.paced.filter(|&at| at > ctx.now);
        if self.timer.is_none_or(|at| at > ctx.now) {
            return Ok(());
        }
        ctx.counters.timeouts += 1;
        // The time is added up, since timers between retransmissions grow. It is 0 again after
        // each progress, so only silence in a row counts.
        self.waited += self.interval;
        if let Some(timeout) = self.ack_timeout
            && self.waited >= timeout * TIMEOUTS_PER_RETRY
        {
            if self.retries == 0 && !self.is_armed {
                return Err(self.fail_head(ctx, WcStatus::RetryExcErr));
            }
            self.wants_path = self.retries == 0;
            self.retries = self.retries.saturating_sub(1);
            self.waited = Duration::ZERO;
        }
        // Doubled, as after any sign of overload: a peer that is merely slow is not sent the same
        // packets at a steady rate.
        let most = self.first_retransmit * MOST_BACKOFF;
        self.interval = (self.interval * 2).min(most).min(self.longest());
        // The oldest window is kept if several timers fire in a row: the later ones only see the
        // window that the first has cut.
        self.undo.get_or_insert((self.congestion, ctx.now));
        // Before `go_back`, which moves `nxt`: signals about packets sent until now belong to
        // this cut.
        self.congestion.on_timeout(self.nxt);
        // A timeout may ask for lost responses again although an implied NAK already has.
        self.implied_at = None;
        self.go_back(ctx.now);
        Ok(())
    }

    /// The longest time between retransmissions.
    fn longest(&self) -> Duration {
        self.ack_timeout.unwrap_or(SLOWEST_RETRANSMIT)
    }

    /// Returns whether a timeout fired for packets that were not lost: the acknowledgement covers
    /// more than was sent again, or comes sooner than one for what was sent again could.
    fn was_early(&self, now: Instant, fired: Instant) -> bool {
        // An acknowledgement needs a whole round trip to answer a repeated packet. One that comes
        // in less than half of the mean answers the packet that was sent first.
        let soonest = self.round_trip.map_or(Duration::ZERO, |r| r.mean / 2);
        self.una > self.nxt || now.saturating_duration_since(fired) < soonest
    }

    /// Whether nothing has been acknowledged for so long that the peer may be gone.
    pub(super) fn is_peer_silent(&self, now: Instant) -> bool {
        // `undo` has the time of the first timeout without progress since: any progress takes it.
        let fired = self.undo.map(|(_, fired)| fired);
        fired.is_some_and(|fired| now.saturating_duration_since(fired) >= SILENCE)
    }

    /// Takes the round trip of the packet being timed, once it is acknowledged.
    fn measure(&mut self, now: Instant) {
        // `number` itself must be acknowledged, not only its predecessors.
        if let Some((number, left)) = self.timed
            && number < self.una
        {
            self.timed = None;
            let sample = now.saturating_duration_since(left);
            let estimate = RoundTrip::update(self.round_trip, sample);
            self.round_trip = Some(estimate);
            // Bounded below, since a peer whose core is busy answers late by milliseconds on any
            // path, and above by the ACK timeout.
            let longest = self.longest();
            self.first_retransmit = estimate.patience().clamp(self.min_retransmit, longest);
        }
    }

    /// Sends again from the oldest packet not acknowledged.
    pub(super) fn go_back(&mut self, now: Instant) {
        // Everything after a lost packet is repeated, although some of it may have arrived: the
        // responder drops all that is ahead of the packet that it waits for (IBTA 9.7.5).
        self.nxt = self.una;
        self.cur = self.locate(self.nxt);
        // READs and atomics will be requested again, and be counted again then. `pieces` stays:
        // repeated requests must end where the first ones did.
        while self.reads.back().is_some_and(|&end| end > self.una) {
            self.reads.pop_back();
        }
        self.since_ack_request = 0;
        // Which copy of a repeated packet an acknowledgement means is unknown (Karn's algorithm,
        // RFC 6298 section 3).
        self.timed = None;
        self.timer = (self.una < self.sent).then(|| now + self.vary(self.interval));
    }

    /// A time up to a quarter longer.
    fn vary(&mut self, time: Duration) -> Duration {
        // Xorshift: a few instructions, no state beside the word, and good enough to keep apart
        // the timers of connections that lost packets in the same moment.
        self.random ^= self.random << 13;
        self.random ^= self.random >> 17;
        self.random ^= self.random << 5;
        // Only longer, never shorter: a timer must not fire before the acknowledgement is
        // overdue.
        time + time / 1024 * (self.random & 0xff)
    }

    /// Takes back some of the window, for a loss that the peer reported.
    pub(super) fn narrow(&mut self) {
        self.congestion.on_loss(self.una, self.nxt);
    }

    /// A router has marked packets of ours, or their answers.
    pub(super) fn on_mark(&mut self) {
        self.congestion.on_mark(self.una, self.nxt);
    }

    /// A response showed that the response to a READ or an atomic before it was lost. It is asked
    /// for again once; if that fails too, the timer does it.
    pub(super) fn on_implied_nak(&mut self, ctx: &mut Ctx<'_>) {
        // A burst of responses behind the lost one would otherwise ask for it once for each of
        // them.
        if self.implied_at == Some(self.una) {
            return;
        }
        self.implied_at = Some(self.una);
        ctx.counters.implied_naks += 1;
        // The window that was too large is ours: it let the request ask for what was lost.
        self.narrow();
        self.go_back(ctx.now);
    }

    /// The peer has no receive for the packet `una`.
    pub(super) fn on_rnr_nak(&mut self, ctx: &mut Ctx<'_>, wait: Duration) -> Result<(), Fault> {
        if matches!(self.state, RequesterState::RnrWait(_)) {
            // Nothing has been sent since the NAK that began the wait, so this one is a copy of it.
            return Ok(());
        }
        // Counted in NAKs, not in time: the peer sets the time of a wait itself.
        if self.rnr_retry != RNR_FOREVER {
            if self.rnr_retries == 0 {
                return Err(self.fail_head(ctx, WcStatus::RnrRetryExcErr));
            }
            self.rnr_retries -= 1;
        }
        // The peer has dropped this packet and all that followed it, so all of it is sent again.
        // That is not a loss: the window stays.
        self.go_back(ctx.now);
        // The wait replaces the timer, and the NAK ended any silence before it.
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

    /// `una` has moved on by `packets`.
    pub(super) fn on_progress(&mut self, now: Instant, packets: u32) {
        // Progress decides about the last timeout at once, before the window grows from it.
        if let Some((congestion, fired)) = self.undo.take()
            && self.was_early(now, fired)
        {
            self.congestion = congestion;
        }
        self.congestion.on_progress(packets, self.una, self.nxt);
        // A retry count is for one packet: progress proves that path and peer are alive, so the
        // next packet that is lost has all of them again.
        self.retries = self.retry_cnt;
        self.rnr_retries = self.rnr_retry;
        self.waited = Duration::ZERO;
        self.measure(now);
        // The backoff ends with the first progress.
        self.interval = self.first_retransmit;
        self.implied_at = None;
        while self.reads.front().is_some_and(|&end| end <= self.una) {
            self.reads.pop_front();
        }
        while self.pieces.front().is_some_and(|&end| end <= self.una) {
            self.pieces.pop_front();
        }
        // An acknowledgement may come for packets that were to be sent again, because the first
        // copies arrived late. They need not be repeated.
        if self.nxt < self.una {
            self.nxt = self.una;
            self.cur = self.locate(self.nxt);
        }
        // For the oldest packet that is still in flight the time begins again. With none in
        // flight there is no timer, so an idle connection is never taken for a dead one.
        self.timer = (self.una < self.nxt).then(|| now + self.interval);
    }

    /// The peer has room for `credits` more messages after those complete; `None` is no limit.
    pub(super) fn set_credits(&mut self, credits: Option<u32>) {
        // Absolute, not relative: `limit` is compared with the number of each request, which
        // stays right for requests that are sent later or again.
        self.limit = credits.map(|c| self.consumed + u64::from(c));
    }

    /// Position of the request that packet number `number` belongs to, or of the first not started.
    fn locate(&self, number: u64) -> u64 {
        // From the head: after a loss that is near, and no index has to be kept for it.
        let mut at = self.sq.head();
        while let Some(wqe) = self.sq.peek(at)
            // It stops at a request that failed, too: nothing behind that one will be sent again.
            && matches!(wqe.phase, Phase::Started | Phase::Executed)
            && wqe.end() <= number
        {
            at += 1;
        }
        at
    }

    // ---- completion ----

    /// Completes what is done, in order.
    pub(super) fn retire(&mut self, ctx: &mut Ctx<'_>) -> Result<(), Fault> {
        while let Some(wqe) = self.sq.peek(self.sq.head()) {
            // In the order of posting: a completion says that everything posted before it is done
            // as well, which is how a consumer frees unsignaled requests.
            match wqe.phase {
                Phase::Executed => {}
                Phase::Started if wqe.end() <= self.una => {}
                // The turn of a local failure has come: all requests before it are complete.
                Phase::Failed(status) => return Err(self.fail_head(ctx, status)),
                Phase::Started | Phase::Posted => break,
            }
            let wqe = self.sq.retire();
            // Counted also for unsignaled requests: credits are about receives, not completions.
            self.consumed = wqe.recv_seq;
            if ctx.cfg.sq_sig_all || wqe.flags.contains(SendFlags::SIGNALED) {
                let done = wqe.completion(ctx.cfg.qp, ctx.cfg.qp_num, WcStatus::Success);
                ctx.out.push(RcEvent::Send(done));
            }
        }
        // A request that completes while it is being repeated leaves `cur` behind the head.
        self.cur = self.cur.max(self.sq.head());
        Ok(())
    }

    /// Ends the oldest request with an error.
    pub(super) fn fail_head(&mut self, ctx: &mut Ctx<'_>, status: WcStatus) -> Fault {
        // With an empty queue there is no request to blame, but the connection ends all the same.
        if !self.sq.is_empty() {
            let wqe = self.sq.retire();
            let failed = wqe.completion(ctx.cfg.qp, ctx.cfg.qp_num, status);
            ctx.out.push(RcEvent::Send(failed));
        }
        Fault
    }

    /// Ends the request being cut with an error, once those before it are complete.
    fn fail_current(&mut self, ctx: &mut Ctx<'_>, status: WcStatus) -> Result<(), Fault> {
        // Not completed at once: a consumer takes an error for the first of the requests that did
        // not happen, and those before it may still succeed.
        let wqe = self.sq.wqe_mut(self.cur);
        let is_begun = wqe.phase == Phase::Started;
        let first = if is_begun { wqe.first } else { self.nxt };
        wqe.phase = Phase::Failed(status);
        self.ask_before(ctx.now, first);
        self.retire(ctx)
    }

    /// Repeats the packet before a failed request, whose first packet is `first`, if it left the
    /// asking for an acknowledgement to that request.
    fn ask_before(&mut self, now: Instant, first: u64) {
        // Packets of the failed request may have left without asking, too.
        let has_asked = u64::from(self.since_ack_request) <= self.nxt - first;
        if has_asked || self.una >= first {
            return;
        }
        // This packet alone, and without the timer: nothing shows that one was lost. Those before
        // it may be acknowledged any moment, and with memory that is gone they would fail.
        self.nxt = first - 1;
        self.cur = self.locate(self.nxt);
        self.paced = Some(now);
    }
}
