//! The reliable-connected queue pair: its states, and who may send next.

use std::time::Instant;

use crate::verbs::{
    Access, AsyncEvent, Completion, PdId, PostError, QpCap, QpState, QpType, RecvWr, SendWr,
    WcOpcode, WcStatus, qp_state,
};
use crate::wire::{
    Bth, DEFAULT_PKEY, ExtHeaders, Operation, Packet, Psn, RnrTimer, Service, emit_headers,
};

use super::ctx::{Ctx, Fault, PeerPath};
use super::post::{post_receives, post_sends};
use super::requester::Requester;
use super::responder::Responder;
use super::{
    CNP_INTERVAL, DrainedChange, Env, RcConfig, RcCounters, RcEvent, RtrParams, RtsParams, TxPacket,
};

/// Packets of one kind (requests or READ responses) in a row while the other kind waits.
const BURST: u32 = 16;

/// Data stream that sent last, of the two.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stream {
    Requests,
    Responses,
}

/// A reliable-connected queue pair. See the [module](super) for the calling order.
///
/// Its states are those of [`QpState`] without `Sqe`. The caller checks a request against the table
/// of IBTA 11.2.5.2 ([`qp_state`]) and calls the `to_*` function of the new state, which panics
/// where the table has no such transition.
#[derive(Debug)]
pub struct RcQp {
    cfg: RcConfig,
    state: QpState,
    link: Option<PeerPath>,
    requester: Requester,
    responder: Responder,
    counters: RcCounters,
    /// No request of the peer's that follows the agreed sequence has come since RTR.
    awaits_first_packet: bool,
    /// `SqDrained` still has to be raised.
    awaits_drain: bool,
    stream: Stream,
    burst: u32,
    /// Requests sent ahead of the acknowledgement that waits.
    ahead: u32,
    /// The partition key of a marked packet that is to be answered with a notification.
    cnp: Option<u16>,
    /// Until when no other notification is sent.
    cnp_until: Option<Instant>,
}

/// Borrows the fields that a call works with, beside the direction that it calls.
macro_rules! ctx {
    ($self:ident, $now:expr, $env:ident) => {
        Ctx {
            now: $now,
            cfg: &$self.cfg,
            link: $self.link.expect("a path from RTR on"),
            mrs: &mut *$env.mrs,
            rq: &mut *$env.rq,
            out: &mut *$env.out,
            counters: &mut $self.counters,
        }
    };
}

impl RcQp {
    /// A queue pair in RESET.
    #[must_use]
    pub fn new(cfg: RcConfig) -> Self {
        Self {
            state: QpState::Reset,
            link: None,
            requester: Requester::new(&cfg.cap),
            responder: Responder::new(cfg.pd, cfg.cap.max_recv_sge),
            counters: RcCounters::default(),
            awaits_first_packet: false,
            awaits_drain: false,
            stream: Stream::Requests,
            burst: 0,
            ahead: 0,
            cnp: None,
            cnp_until: None,
            cfg,
        }
    }

    /// State of the queue pair.
    #[must_use]
    pub fn state(&self) -> QpState {
        self.state
    }

    /// Configuration of the queue pair.
    #[must_use]
    pub fn config(&self) -> &RcConfig {
        &self.cfg
    }

    /// Counters since its creation.
    #[must_use]
    pub fn counters(&self) -> &RcCounters {
        &self.counters
    }

    /// Send requests not completed.
    #[must_use]
    pub fn sends_outstanding(&self) -> usize {
        self.requester.outstanding()
    }

    /// Bytes of memory that a queue pair of the given depths holds in RTS, without the receive
    /// queue. `reads` of its own may be under way, and `resources` of the peer's.
    #[must_use]
    pub const fn memory(cap: &QpCap, reads: u8, resources: u8) -> usize {
        size_of::<Self>()
            + Requester::memory(cap, reads)
            + Responder::memory(cap.max_recv_sge, resources)
    }

    /// Bytes of memory that the queue pair holds, without the receive queue. It does not change
    /// after the move to RTS.
    #[must_use]
    pub fn footprint(&self) -> usize {
        size_of::<Self>() + self.requester.footprint() + self.responder.footprint()
    }

    /// Transition from RESET to INIT.
    pub fn to_init(&mut self) {
        self.become_state(QpState::Init);
    }

    /// INIT to RTR: packets are taken from now on.
    pub fn to_rtr(&mut self, params: &RtrParams) {
        self.become_state(QpState::Rtr);
        self.link = Some(PeerPath {
            dest: params.dest_qpn,
            mtu: params.path_mtu,
        });
        self.responder.start(params);
        // Set again for each connection: a queue pair comes back from RESET for another peer,
        // whose first packet has not come.
        self.awaits_first_packet = true;
    }

    /// RTR to RTS: requests are sent from now on.
    pub fn to_rts(&mut self, params: &RtsParams) {
        // The table allows SQD to RTS as well, but there the requester keeps its packet numbers:
        // `start` would give it the first PSN again while packets are outstanding.
        assert_eq!(self.state, QpState::Rtr, "SQD is left by `resume`");
        self.become_state(QpState::Rts);
        let link = self.link.expect("a path from RTR on");
        self.requester.start(params, link.mtu, &self.cfg);
    }

    /// RTS to SQD: requests that have begun are finished, no other begins. `SqDrained` reports the
    /// end.
    pub fn to_sqd(&mut self, env: &mut Env<'_>) {
        self.become_state(QpState::Sqd);
        self.awaits_drain = true;
        // With nothing begun no acknowledgement will come to raise the event later.
        self.check_drained(env);
    }

    /// SQD back to RTS.
    pub fn resume(&mut self) {
        assert_ne!(self.state, QpState::Rtr, "RTR is left by `to_rts`");
        self.become_state(QpState::Rts);
        self.awaits_drain = false;
    }

    /// Any state to ERROR: every request in both queues completes as flushed, sends first, each
    /// queue in order. What a shared queue holds stays there. What the peer's requests have done is
    /// still acknowledged, and a NAK that ended the connection is still sent; READs are not
    /// answered any longer.
    pub fn to_error(&mut self, env: &mut Env<'_>) {
        self.responder.close();
        self.enter_error(env);
    }

    /// The next answer that is due although the queue pair ends now, written into `tx`; false if
    /// there is none. It needs no memory. For a caller that cannot wait for
    /// [`RcQp::poll_transmit`].
    pub fn poll_last_answer(&mut self, now: Instant, env: &mut Env<'_>, tx: &mut TxPacket) -> bool {
        tx.clear();
        // READs need the owner's memory, which may be freed right after this call. They are
        // dropped here, so that what is left (an acknowledgement, atomics, a NAK) is made of
        // numbers only.
        self.responder.close();
        if !self.responder.has_output() {
            return false;
        }
        // Only a READ can fail.
        let is_answer = self.responder.poll(&mut ctx!(self, now, env), tx);
        let is_answer = is_answer.unwrap_or(false);
        if is_answer {
            self.note_sent(Stream::Responses, tx);
        }
        is_answer
    }

    /// Any state to RESET: everything is forgotten, nothing completes. The caller clears the queue
    /// pair's own receive queue.
    pub fn to_reset(&mut self) {
        // Retransmissions of the old connection must not be sent in the new one, whose packet
        // numbers begin elsewhere.
        self.requester.reset();
        self.responder.reset();
        // The packets of the old peer find no path from here on: RESET takes none in, and RTR
        // sets the path before the first one is taken.
        self.link = None;
        self.cnp = None;
        self.cnp_until = None;
        self.awaits_drain = false;
        self.become_state(QpState::Reset);
    }

    /// Changes what the peer may do.
    pub fn set_access(&mut self, access: Access) {
        self.responder.set_access(access);
    }

    /// Changes the most bytes that may be unacknowledged ([`RcConfig::max_inflight_bytes`]).
    pub fn set_max_inflight(&mut self, bytes: u32) {
        self.cfg.max_inflight_bytes = bytes;
        if let Some(link) = self.link {
            self.requester.set_max_inflight(bytes, link.mtu);
        }
    }

    /// Changes attributes of a queue pair whose send queue has drained.
    pub fn change_drained(&mut self, change: &DrainedChange) {
        self.requester.change(change, &self.cfg);
        if let Some(count) = change.max_dest_rd_atomic {
            self.responder.set_max_resources(count);
        }
    }

    /// Whether requests that had begun before a move to SQD are not complete yet.
    #[must_use]
    pub fn is_draining(&self) -> bool {
        self.state == QpState::Sqd && !self.requester.is_drained()
    }

    /// Says whether there is another path, which a request takes whose retries are used up.
    pub fn set_armed(&mut self, is_armed: bool) {
        self.requester.set_armed(is_armed);
    }

    /// Returns once whether retries of an armed connection are used up. The caller then takes it to
    /// its other path by [`RcQp::on_migrated`]. To be asked after each [`RcQp::handle_timeout`].
    pub fn take_path_wish(&mut self) -> bool {
        self.requester.take_path_wish()
    }

    /// The connection has another path from now on, with this ACK timeout. Window, round trip and
    /// retries begin again, and what is outstanding is sent again. An acknowledgement shows the peer
    /// the new path, even if there is nothing to send.
    pub fn on_migrated(&mut self, now: Instant, timeout: u8) {
        if matches!(self.state, QpState::Rts | QpState::Sqd)
            && let Some(link) = self.link
        {
            self.requester
                .on_migrated(now, timeout, link.mtu, &self.cfg);
        }
        self.cnp = None;
        // The initiator of an extended connection answers nothing.
        if self.cfg.service == Service::Rc || !self.awaits_first_packet {
            self.responder.on_migrated();
        }
    }

    /// Whether a packet has a PSN that its peer has reason to send now: that of the request which
    /// comes next, of one that may be repeated, or of a response to something outstanding. A stranger
    /// who does not see the connection's packets has to guess it.
    #[must_use]
    pub fn knows(&self, pkt: &Packet<'_>) -> bool {
        let psn = pkt.bth.psn();
        let is_up = matches!(self.state, QpState::Rts | QpState::Sqd);
        if pkt.op.service != self.cfg.service
            || pkt.op.operation == Operation::CongestionNotification
        {
            return false;
        }
        if pkt.op.is_request() {
            (is_up || self.state == QpState::Rtr) && self.responder.knows(psn)
        } else {
            is_up && self.requester.knows(psn)
        }
    }

    /// Changes the delay that our RNR NAKs ask for.
    pub fn set_min_rnr_timer(&mut self, timer: RnrTimer) {
        self.responder.set_min_rnr_timer(timer);
    }

    /// Posts a chain of send requests. In ERROR they complete as flushed at once.
    ///
    /// # Errors
    /// The index of the first request that was not posted, and why. RESET, INIT and RTR take none.
    pub fn post_send(&mut self, wrs: &[SendWr<'_>], env: &mut Env<'_>) -> Result<(), PostError> {
        let result = post_sends(self.state, wrs, |wr| self.requester.post(wr));
        if self.state == QpState::Error {
            self.requester.flush(&self.cfg, env.out);
        }
        result
    }

    /// Takes back the newest `count` sends, before anything has been done for them.
    pub fn unpost_send(&mut self, count: usize) {
        self.requester.unpost(count);
    }

    /// Posts receives to the queue pair's own receive queue. In ERROR they complete as flushed at
    /// once.
    ///
    /// # Errors
    /// The index of the first request that was not posted, and why. RESET takes none, nor does a
    /// queue pair with a shared receive queue.
    pub fn post_recv(&mut self, wrs: &[RecvWr<'_>], env: &mut Env<'_>) -> Result<(), PostError> {
        let result = post_receives(self.state, self.cfg.has_srq, wrs, env.rq);
        if self.state == QpState::Error {
            self.flush_receives(env);
        }
        result
    }

    /// Whether a request with this PSN would be carried out now, if nothing is wrong with it.
    #[must_use]
    pub fn expects(&self, psn: Psn) -> bool {
        matches!(self.state, QpState::Rtr | QpState::Rts | QpState::Sqd)
            && !self.responder.has_failed()
            && self.responder.expected() == psn
    }

    /// Forgets that answers were made to the peer's READs: they were lost before they left, because
    /// memory that they were read from is gone. A repeated request is refused then.
    pub fn lose_answers(&mut self) {
        self.responder.lose_answers();
    }

    /// Whether a message is arriving that has taken its receive.
    #[must_use]
    pub fn has_receive(&self) -> bool {
        self.responder.is_bound()
    }

    /// Sets the protection domain of the peer's requests from now on: that of the shared receive
    /// queue which they name.
    pub fn set_domain(&mut self, pd: PdId) {
        self.responder.set_domain(pd);
    }

    /// Refuses the request that is expected, since it names a receive queue that it may not use.
    pub fn refuse_expected(&mut self, now: Instant, env: &mut Env<'_>) {
        let fault = self.responder.refuse_expected(&mut ctx!(self, now, env));
        self.settle(Err(fault), env);
    }

    /// Takes in a packet for this queue pair.
    pub fn handle_packet(&mut self, now: Instant, pkt: &Packet<'_>, env: &mut Env<'_>) {
        let is_up = matches!(self.state, QpState::Rts | QpState::Sqd);
        // RTR has no requester: a response there belongs to an earlier connection with the same
        // number, or is forged.
        let takes = match self.state {
            QpState::Rtr => !pkt.op.is_response(),
            _ => is_up,
        };
        // RESET, INIT and ERROR take nothing (CVE-2026-93107).
        if !takes || pkt.op.service != self.cfg.service {
            self.counters.dropped += 1;
            return;
        }
        if pkt.op.operation == Operation::CongestionNotification {
            // A notification has no PSN that means anything and answers no request, so it goes
            // round both directions. The peer does not say which of them it is about: both slow
            // down.
            self.counters.rx_packets += 1;
            self.counters.rx_cnps += 1;
            self.requester.on_mark();
            self.responder.on_cnp(now);
            return;
        }
        // Only a request that begins the agreed sequence shows that the peer is ready. Any other
        // packet may be left from an earlier connection, and would establish a connection whose
        // peer has not confirmed it.
        let is_next = pkt.op.is_request() && pkt.bth.psn() == self.responder.expected();
        if self.awaits_first_packet && is_next {
            self.awaits_first_packet = false;
            // The event is for an owner that waits in RTR for its connection. One that has gone
            // on to RTS asks `has_received`.
            if self.state == QpState::Rtr {
                let event = AsyncEvent::CommEstablished(self.cfg.qp);
                env.out.push(RcEvent::Async(event));
            }
        }
        self.counters.rx_packets += 1;
        self.counters.rx_bytes += pkt.payload.len() as u64;
        if pkt.op.is_request() {
            let result = self
                .responder
                .handle_request(&mut ctx!(self, now, env), pkt);
            self.settle(result, env);
        } else {
            let result = self
                .requester
                .handle_response(&mut ctx!(self, now, env), pkt);
            self.settle(result, env);
        }
    }

    /// A packet arrives with a router's mark of congestion. To be called before
    /// [`RcQp::handle_packet`], or after it where only that shows that the packet is the peer's.
    pub fn handle_mark(&mut self, now: Instant, pkt: &Packet<'_>) {
        let is_up = matches!(self.state, QpState::Rtr | QpState::Rts | QpState::Sqd);
        // Only data can be slowed down. Acknowledgements are not sent as ECN-capable, so a mark on
        // one is a mistake or a forgery.
        if !is_up || pkt.payload.is_empty() {
            return;
        }
        self.counters.rx_marked += 1;
        // The data of a READ was sent at our request, so our window caused the congestion. Marked
        // SENDs and WRITEs are the peer's, whom the notification below slows.
        if pkt.op.operation == Operation::ReadResponse {
            self.requester.on_mark();
        }
        // Otherwise a full link, where every packet is marked, would carry as many notifications
        // back.
        if self.cnp_until.is_none_or(|until| now >= until) {
            // The notification carries the partition key of the packet that it answers: the peer
            // drops a packet of another partition.
            self.cnp = Some(pkt.bth.pkey());
            self.cnp_until = Some(now + CNP_INTERVAL);
        }
    }

    /// Returns whether the peer has sent a request that follows the agreed sequence since RTR.
    #[must_use]
    pub fn has_received(&self) -> bool {
        !self.awaits_first_packet
    }

    /// Whether requests have been repeated for so long without an answer that the peer may be gone.
    #[must_use]
    pub fn is_peer_silent(&self, now: Instant) -> bool {
        self.requester.is_peer_silent(now)
    }

    /// Next time at which [`RcQp::handle_timeout`] must be called.
    #[must_use]
    pub fn poll_timeout(&self) -> Option<Instant> {
        match self.state {
            QpState::Rtr => self.responder.deadline(),
            QpState::Rts | QpState::Sqd => {
                let due = [self.requester.deadline(), self.responder.deadline()];
                due.into_iter().flatten().min()
            }
            _ => None,
        }
    }

    /// Does what is due by `now`. Calling it early or twice does nothing.
    pub fn handle_timeout(&mut self, now: Instant, env: &mut Env<'_>) {
        // The responder also in RTR, where READ responses may already be paced. What ends in
        // ERROR has no timers: its last answers leave with the next poll.
        self.responder.handle_timeout(now);
        if matches!(self.state, QpState::Rts | QpState::Sqd) {
            let result = self.requester.handle_timeout(&mut ctx!(self, now, env));
            self.settle(result, env);
        }
    }

    /// The next packet to send, written into `tx`; false if there is none for now.
    ///
    /// Congestion notifications go first. READ responses and requests take turns in bursts of 16,
    /// so that the packets of one message come in a row. An acknowledgement waits for the READs and
    /// atomics that are ready, up to such a burst; other short answers wait for none.
    pub fn poll_transmit(&mut self, now: Instant, env: &mut Env<'_>, tx: &mut TxPacket) -> bool {
        loop {
            // Each turn begins with an empty packet: an attempt that fails may have gathered a
            // part of its payload.
            tx.clear();
            // ERROR still sends what was done before it, and the NAK that explains it.
            let (responds, requests) = match self.state {
                QpState::Rts | QpState::Sqd => (true, true),
                QpState::Rtr | QpState::Error => (true, false),
                _ => (false, false),
            };
            // A notification is useful only while the congestion lasts.
            if self.cnp.is_some() && responds {
                self.emit_cnp(tx);
                return true;
            }
            let (first, second) = match (responds && self.responder.has_output(), requests) {
                (false, false) => return false,
                (false, true) => (Stream::Requests, None),
                (true, false) => (Stream::Responses, None),
                // If one stream has nothing or waits for its window or pace, the other may still
                // send.
                (true, true) => match self.plan_turn() {
                    Stream::Responses => (Stream::Responses, Some(Stream::Requests)),
                    Stream::Requests => (Stream::Requests, Some(Stream::Responses)),
                },
            };
            let mut result = self.poll_stream(first, now, env, tx);
            if let (Ok(false), Some(second)) = (result, second) {
                result = self.poll_stream(second, now, env, tx);
            }
            match result {
                Ok(true) => return true,
                Ok(false) => {
                    // A local operation may have been the last to complete, which no packet will
                    // show.
                    self.check_drained(env);
                    return false;
                }
                // The queue pair is in ERROR now. Another round, for a NAK that the fault may have
                // left.
                Err(Fault) => self.enter_error(env),
            }
        }
    }

    /// The acknowledgement that waits for READs, written into `tx`; false if there is none. For
    /// a caller that stops before [`RcQp::poll_transmit`] has nothing left.
    pub fn poll_waiting_ack(&mut self, now: Instant, env: &mut Env<'_>, tx: &mut TxPacket) -> bool {
        tx.clear();
        // Only a READ can fail.
        self.responder.has_only_ack()
            && self
                .poll_stream(Stream::Responses, now, env, tx)
                .unwrap_or(false)
    }

    /// The stream that goes first where both may have something to send.
    fn plan_turn(&mut self) -> Stream {
        // An acknowledgement alone goes ahead of SENDs and WRITEs. The program that posted what it
        // acknowledges often expects its completion before that of our answer, as devices deliver
        // them that acknowledge by themselves; tgt's iSER refuses logins otherwise. The programs see
        // no READ or atomic, and behind the requests of these the acknowledgement is the last
        // segment of their train. Not behind more than a burst: the peer's window waits for it.
        if self.responder.has_only_ack() {
            if self.ahead < BURST && self.requester.is_read_next() {
                self.ahead += 1;
                return Stream::Requests;
            }
            return Stream::Responses;
        }
        let is_turn = self.stream == Stream::Responses && self.burst < BURST
            || self.stream == Stream::Requests && self.burst >= BURST;
        // NAKs and atomics' answers are single small packets that the peer waits for, so they do
        // not wait for the end of a burst of requests.
        if is_turn || self.responder.is_urgent() {
            Stream::Responses
        } else {
            Stream::Requests
        }
    }

    fn poll_stream(
        &mut self,
        stream: Stream,
        now: Instant,
        env: &mut Env<'_>,
        tx: &mut TxPacket,
    ) -> Result<bool, Fault> {
        let mut ctx = ctx!(self, now, env);
        let is_sent = match stream {
            Stream::Responses => self.responder.poll(&mut ctx, tx)?,
            Stream::Requests => {
                // In SQD what has begun goes on, since its completion is what ends the draining.
                let may_start = self.state == QpState::Rts;
                self.requester.poll(&mut ctx, tx, may_start)?
            }
        };
        if is_sent {
            self.note_sent(stream, tx);
        }
        Ok(is_sent)
    }

    fn become_state(&mut self, next: QpState) {
        // The states of an extended connection are the same.
        qp_state::become_state(&mut self.state, QpType::Rc, next);
    }

    fn emit_cnp(&mut self, tx: &mut TxPacket) {
        let link = self.link.expect("a path from RTR on");
        let pkey = self.cnp.take().unwrap_or(DEFAULT_PKEY);
        tx.headers = emit_headers(&Bth::cnp(link.dest, pkey), &ExtHeaders::default());
        self.counters.tx_packets += 1;
        self.counters.tx_cnps += 1;
    }

    fn note_sent(&mut self, stream: Stream, tx: &TxPacket) {
        self.counters.tx_packets += 1;
        self.counters.tx_bytes += tx.payload_len as u64;
        if stream == Stream::Responses {
            self.ahead = 0;
        }
        // The count goes on beyond `BURST` while the other stream has nothing: that one then has
        // its turn at once when it has something.
        if self.stream == stream {
            self.burst = self.burst.saturating_add(1);
        } else {
            self.stream = stream;
            self.burst = 1;
        }
    }

    fn settle(&mut self, result: Result<(), Fault>, env: &mut Env<'_>) {
        match result {
            Ok(()) => self.check_drained(env),
            Err(Fault) => self.enter_error(env),
        }
    }

    fn check_drained(&mut self, env: &mut Env<'_>) {
        if self.awaits_drain && self.state == QpState::Sqd && self.requester.is_drained() {
            self.awaits_drain = false;
            env.out
                .push(RcEvent::Async(AsyncEvent::SqDrained(self.cfg.qp)));
        }
    }

    fn enter_error(&mut self, env: &mut Env<'_>) {
        let was_in_error = self.state == QpState::Error;
        // A refusal leaves behind the answers of the requests before it and its NAK, and those
        // still go out. In any other case nothing may touch the owner's memory from here on.
        if !self.responder.has_failed() {
            self.responder.close();
        }
        self.become_state(QpState::Error);
        self.awaits_drain = false;
        // Sends before receives, always, so that an owner sees one order whichever direction
        // failed.
        self.requester.flush(&self.cfg, env.out);
        self.flush_receives(env);
        // The owner of a shared queue waits for this event before it destroys the queue pair: no
        // receive of the shared queue is taken for it any longer. A second error in ERROR is
        // possible, when a READ that is still being answered loses its key.
        if self.cfg.has_srq && !was_in_error {
            let event = AsyncEvent::QpLastWqeReached(self.cfg.qp);
            env.out.push(RcEvent::Async(event));
        }
    }

    fn flush_receives(&mut self, env: &mut Env<'_>) {
        // The receive of a half-received message is older than all in the queue, and its owner
        // still has to get it back.
        let bound = self.responder.unbind();
        let mut flush = |wr_id| {
            let (status, opcode) = (WcStatus::WrFlushErr, WcOpcode::Recv);
            let flushed = Completion::new(wr_id, status, opcode, self.cfg.qp, self.cfg.qp_num);
            env.out.push(RcEvent::Recv(flushed));
        };
        if let Some(wr_id) = bound {
            flush(wr_id);
        }
        // A shared queue serves other queue pairs, which still need what is in it.
        if !self.cfg.has_srq {
            while let Some(wr_id) = env.rq.pop_id() {
                flush(wr_id);
            }
        }
    }
}
