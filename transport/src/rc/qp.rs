//! Reliable connected queue pair (QP): states and transmit scheduling.

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

/// Maximum number of consecutive packets of one type (requests or READ responses) while packets of
/// the other type are ready.
const BURST: u32 = 16;

/// Data stream that sent the last packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stream {
    Requests,
    Responses,
}

/// Reliable connected QP. See the [module](super) documentation for the calling order.
///
/// Uses all states in [`QpState`] except `Sqe`. The caller must check each transition using the
/// table in IBTA 11.2.5.2 ([`qp_state`]) and then call the corresponding `to_*` function, which
/// will panic if the transition is not in the table.
#[derive(Debug)]
pub struct RcQp {
    cfg: RcConfig,
    state: QpState,
    link: Option<PeerPath>,
    requester: Requester,
    responder: Responder,
    counters: RcCounters,
    /// Set if no valid request was received from the peer since RTR.
    awaits_first_packet: bool,
    /// Set if `SqDrained` has not been reported yet.
    awaits_drain: bool,
    stream: Stream,
    burst: u32,
    /// Number of requests sent while an acknowledgement was pending.
    ahead: u32,
    /// P_Key of a marked packet for which we need to send a congestion notification.
    cnp: Option<u16>,
    /// No congestion notification is sent before this time.
    cnp_until: Option<Instant>,
}

/// Borrows the fields used during a call, except for the direction being called.
macro_rules! ctx {
    ($self:ident, $now:expr, $env:ident) => {
        Ctx {
            now: $now,
            cfg: &$self.cfg,
            link: $self.link.expect("path is set in RTR"),
            mrs: &mut *$env.mrs,
            rq: &mut *$env.rq,
            out: &mut *$env.out,
            counters: &mut $self.counters,
        }
    };
}

impl RcQp {
    /// Creates a QP in RESET.
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

    /// Returns the current state.
    #[must_use]
    pub fn state(&self) -> QpState {
        self.state
    }

    /// Returns the configuration.
    #[must_use]
    pub fn config(&self) -> &RcConfig {
        &self.cfg
    }

    /// Returns the counters since creation.
    #[must_use]
    pub fn counters(&self) -> &RcCounters {
        &self.counters
    }

    /// Returns the number of send requests that are not complete.
    #[must_use]
    pub fn sends_outstanding(&self) -> usize {
        self.requester.outstanding()
    }

    /// Returns the memory size in bytes of a QP in RTS with these queue sizes, without the receive
    /// queue. `reads` is the maximum number of our outstanding READs, `resources` that of the peer.
    #[must_use]
    pub const fn memory(cap: &QpCap, reads: u8, resources: u8) -> usize {
        size_of::<Self>()
            + Requester::memory(cap, reads)
            + Responder::memory(cap.max_recv_sge, resources)
    }

    /// Returns the memory used by the QP in bytes, without the receive queue. This does not change
    /// after the transition to RTS.
    #[must_use]
    pub fn footprint(&self) -> usize {
        size_of::<Self>() + self.requester.footprint() + self.responder.footprint()
    }

    /// RESET to INIT.
    pub fn to_init(&mut self) {
        self.become_state(QpState::Init);
    }

    /// INIT to RTR. The QP will now process received packets.
    pub fn to_rtr(&mut self, params: &RtrParams) {
        self.become_state(QpState::Rtr);
        self.link = Some(PeerPath {
            dest: params.dest_qpn,
            mtu: params.path_mtu,
        });
        self.responder.start(params);
        // This must be set for each connection: after a RESET, the QP can be used for a different
        // peer.
        self.awaits_first_packet = true;
    }

    /// RTR to RTS. The QP will now send requests.
    pub fn to_rts(&mut self, params: &RtsParams) {
        // The transition from SQD to RTS is also valid but must not use this function. The
        // requester needs to keep its packet numbers, while `start` would reset the PSN with
        // packets still outstanding.
        assert_eq!(self.state, QpState::Rtr, "SQD is left by `resume`");
        self.become_state(QpState::Rts);
        let link = self.link.expect("path is set in RTR");
        self.requester.start(params, link.mtu, &self.cfg);
    }

    /// RTS to SQD. Requests that were started are completed, but no new requests are started.
    /// `SqDrained` is reported when this is done.
    pub fn to_sqd(&mut self, env: &mut Env<'_>) {
        self.become_state(QpState::Sqd);
        self.awaits_drain = true;
        // If no request was started, there will be no acknowledgement to trigger the event later.
        self.check_drained(env);
    }

    /// SQD to RTS.
    pub fn resume(&mut self) {
        assert_ne!(self.state, QpState::Rtr, "RTR is left by `to_rts`");
        self.become_state(QpState::Rts);
        self.awaits_drain = false;
    }

    /// Any state to ERROR. All requests in both queues are flushed, starting with the send queue,
    /// in order. Receives in a shared queue are not affected. Requests from the peer that were
    /// already executed are still acknowledged and a NAK that failed the connection is still sent,
    /// but no more READ responses.
    pub fn to_error(&mut self, env: &mut Env<'_>) {
        self.responder.close();
        self.enter_error(env);
    }

    /// Writes the next pending response to `tx` even though the QP is closed, or returns false if
    /// nothing is pending. This does not use registered memory. It should be called if the caller
    /// cannot wait for [`RcQp::poll_transmit`].
    pub fn poll_last_response(
        &mut self,
        now: Instant,
        env: &mut Env<'_>,
        tx: &mut TxPacket,
    ) -> bool {
        tx.clear();
        // READ responses use memory that may be freed right after this call, so we drop them here.
        // The remaining responses (acknowledgement, atomics or NAK) don't use any memory.
        self.responder.close();
        if !self.responder.has_output() {
            return false;
        }
        // Only a READ can return an error.
        let is_response = self.responder.poll(&mut ctx!(self, now, env), tx);
        let is_response = is_response.unwrap_or(false);
        if is_response {
            self.note_sent(Stream::Responses, tx);
        }
        is_response
    }

    /// Any state to RESET. All state is cleared without completing any requests. The caller must
    /// clear the QP's own receive queue.
    pub fn to_reset(&mut self) {
        // We must not retransmit packets of the old connection after this, because the new
        // connection will use different packet numbers.
        self.requester.reset();
        self.responder.reset();
        // There is no path for packets from the old peer now: they are ignored in RESET, and the
        // transition to RTR sets the new path first.
        self.link = None;
        self.cnp = None;
        self.cnp_until = None;
        self.awaits_drain = false;
        self.become_state(QpState::Reset);
    }

    /// Sets the access rights for the peer.
    pub fn set_access(&mut self, access: Access) {
        self.responder.set_access(access);
    }

    /// Sets the maximum amount of unacknowledged data ([`RcConfig::max_inflight_bytes`]).
    pub fn set_max_inflight(&mut self, bytes: u32) {
        self.cfg.max_inflight_bytes = bytes;
        if let Some(link) = self.link {
            self.requester.set_max_inflight(bytes, link.mtu);
        }
    }

    /// Updates the attributes of a QP with a drained send queue.
    pub fn change_drained(&mut self, change: &DrainedChange) {
        self.requester.change(change, &self.cfg);
        if let Some(count) = change.max_dest_rd_atomic {
            self.responder.set_max_resources(count);
        }
    }

    /// Returns true if requests that were started before the transition to SQD are not yet
    /// complete.
    #[must_use]
    pub fn is_draining(&self) -> bool {
        self.state == QpState::Sqd && !self.requester.is_drained()
    }

    /// Sets whether an alternate path is available, to be used when a request runs out of retries.
    pub fn set_armed(&mut self, is_armed: bool) {
        self.requester.set_armed(is_armed);
    }

    /// Returns true once if an armed connection ran out of retries. The caller should then switch
    /// to the alternate path using [`RcQp::on_migrated`]. This must be checked after each
    /// [`RcQp::handle_timeout`].
    pub fn take_path_wish(&mut self) -> bool {
        self.requester.take_path_wish()
    }

    /// Handles a switch to a different path with this ACK timeout. Window, round trip and retries
    /// are reset, and outstanding packets are sent again. We also send an acknowledgement, so that
    /// the peer will see the new path even if there is nothing to send.
    pub fn on_migrated(&mut self, now: Instant, timeout: u8) {
        if matches!(self.state, QpState::Rts | QpState::Sqd)
            && let Some(link) = self.link
        {
            self.requester
                .on_migrated(now, timeout, link.mtu, &self.cfg);
        }
        self.cnp = None;
        // The initiator of an extended connection does not send responses.
        if self.cfg.service == Service::Rc || !self.awaits_first_packet {
            self.responder.on_migrated();
        }
    }

    /// Returns whether the PSN of this packet is plausible for the peer: it is the next request, a
    /// request that may be repeated, or a response to an outstanding request. An attacker who can't
    /// see the packets of this connection would need to guess it.
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

    /// Sets the delay requested in our RNR NAKs.
    pub fn set_min_rnr_timer(&mut self, timer: RnrTimer) {
        self.responder.set_min_rnr_timer(timer);
    }

    /// Posts a chain of send requests. In ERROR, they are flushed immediately.
    ///
    /// # Errors
    /// Returns the index of the first request that could not be posted, and the reason. This fails
    /// in RESET, INIT and RTR.
    pub fn post_send(&mut self, wrs: &[SendWr<'_>], env: &mut Env<'_>) -> Result<(), PostError> {
        let result = post_sends(self.state, wrs, |wr| self.requester.post(wr));
        if self.state == QpState::Error {
            self.requester.flush(&self.cfg, env.out);
        }
        result
    }

    /// Removes the last `count` send requests, before they are processed.
    pub fn unpost_send(&mut self, count: usize) {
        self.requester.unpost(count);
    }

    /// Posts receives to the QP's own receive queue. In ERROR, they are flushed immediately.
    ///
    /// # Errors
    /// Returns the index of the first request that could not be posted, and the reason. This fails
    /// in RESET, and if the QP uses an SRQ.
    pub fn post_recv(&mut self, wrs: &[RecvWr<'_>], env: &mut Env<'_>) -> Result<(), PostError> {
        let result = post_receives(self.state, self.cfg.has_srq, wrs, env.rq);
        if self.state == QpState::Error {
            self.flush_receives(env);
        }
        result
    }

    /// Returns true if a valid request with this PSN would be executed now.
    #[must_use]
    pub fn expects(&self, psn: Psn) -> bool {
        matches!(self.state, QpState::Rtr | QpState::Rts | QpState::Sqd)
            && !self.responder.has_failed()
            && self.responder.expected() == psn
    }

    /// Discards the record of READ responses generated for the peer. This is used if they were lost
    /// before transmission because their memory was removed. A repeated request will then be
    /// rejected.
    pub fn lose_responses(&mut self) {
        self.responder.lose_responses();
    }

    /// Returns whether a receive is bound to an incomplete message.
    #[must_use]
    pub fn has_receive(&self) -> bool {
        self.responder.is_bound()
    }

    /// Sets the protection domain used for requests from the peer: that of their SRQ.
    pub fn set_domain(&mut self, pd: PdId) {
        self.responder.set_domain(pd);
    }

    /// Rejects the expected request because it is not allowed to use its receive queue.
    pub fn refuse_expected(&mut self, now: Instant, env: &mut Env<'_>) {
        let fault = self.responder.refuse_expected(&mut ctx!(self, now, env));
        self.apply_result(Err(fault), env);
    }

    /// Processes a packet received for this QP.
    pub fn handle_packet(&mut self, now: Instant, pkt: &Packet<'_>, env: &mut Env<'_>) {
        let is_up = matches!(self.state, QpState::Rts | QpState::Sqd);
        // There is no requester in RTR, so a response is either from an old connection using the
        // same number or forged.
        let takes = match self.state {
            QpState::Rtr => !pkt.op.is_response(),
            _ => is_up,
        };
        // Packets must be ignored in RESET, INIT and ERROR (CVE-2026-93107).
        if !takes || pkt.op.service != self.cfg.service {
            self.counters.dropped += 1;
            return;
        }
        if pkt.op.operation == Operation::CongestionNotification {
            // A congestion notification has no valid PSN and is not a response, so it is handled
            // here. It doesn't indicate the direction, so we slow down both of them.
            self.counters.rx_packets += 1;
            self.counters.rx_cnps += 1;
            self.requester.on_received();
            self.requester.on_mark();
            self.responder.on_cnp(now);
            return;
        }
        // Only the first expected request proves that the peer is ready. Any other packet may be
        // from an old connection and must not establish this one, as the peer has not confirmed it.
        let is_next = pkt.op.is_request() && pkt.bth.psn() == self.responder.expected();
        if self.awaits_first_packet && is_next {
            self.awaits_first_packet = false;
            // This event is for owners waiting in RTR. In RTS, the owner uses `has_received`
            // instead.
            if self.state == QpState::Rtr {
                let event = AsyncEvent::CommEstablished(self.cfg.qp);
                env.out.push(RcEvent::Async(event));
            }
        }
        self.counters.rx_packets += 1;
        self.counters.rx_bytes += pkt.payload.len() as u64;
        self.requester.on_received();
        if pkt.op.is_request() {
            let result = self
                .responder
                .handle_request(&mut ctx!(self, now, env), pkt);
            self.apply_result(result, env);
        } else {
            let result = self
                .requester
                .handle_response(&mut ctx!(self, now, env), pkt);
            self.apply_result(result, env);
        }
    }

    /// Handles a packet with a congestion mark. This must be called before [`RcQp::handle_packet`],
    /// or after it if that is required to verify that the packet is from the peer.
    pub fn handle_mark(&mut self, now: Instant, pkt: &Packet<'_>) {
        let is_up = matches!(self.state, QpState::Rtr | QpState::Rts | QpState::Sqd);
        // We can only slow down data. Acknowledgements are not sent as ECN-capable, so a mark on an
        // acknowledgement is either an error or forged.
        if !is_up || pkt.payload.is_empty() {
            return;
        }
        self.counters.rx_marked += 1;
        // READ responses are sent at our request, so the congestion was caused by our window. For
        // SENDs and WRITEs, we notify the peer instead.
        if pkt.op.operation == Operation::ReadResponse {
            self.requester.on_mark();
        }
        // Without this limit, we would send a notification for every packet on a congested link.
        if self.cnp_until.is_none_or(|until| now >= until) {
            // We must use the P_Key of the marked packet, because the peer will drop packets with a
            // different P_Key.
            self.cnp = Some(pkt.bth.pkey());
            self.cnp_until = Some(now + CNP_INTERVAL);
        }
    }

    /// Returns true if a valid request was received from the peer since RTR.
    #[must_use]
    pub fn has_received(&self) -> bool {
        !self.awaits_first_packet
    }

    /// Returns whether retransmissions have not been acknowledged for so long that the peer may be
    /// down.
    #[must_use]
    pub fn is_peer_silent(&self, now: Instant) -> bool {
        self.requester.is_peer_silent(now)
    }

    /// Returns the next time [`RcQp::handle_timeout`] must be called.
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

    /// Processes expired timers. Calling this early or twice has no effect.
    pub fn handle_timeout(&mut self, now: Instant, env: &mut Env<'_>) {
        // The responder needs this in RTR as well, as READ responses may already be paced. There
        // are no timers in ERROR: the last responses are sent by the next poll.
        self.responder.handle_timeout(now);
        if matches!(self.state, QpState::Rts | QpState::Sqd) {
            let result = self.requester.handle_timeout(&mut ctx!(self, now, env));
            self.apply_result(result, env);
        }
    }

    /// Writes the next packet to `tx`, or returns false if there is nothing to send.
    ///
    /// Congestion notifications are sent first. READ responses and requests are sent in alternating
    /// bursts of 16, so that packets of the same message stay together. An acknowledgement is sent
    /// after pending READs and atomics, up to one burst. Other short responses are sent
    /// immediately.
    pub fn poll_transmit(&mut self, now: Instant, env: &mut Env<'_>, tx: &mut TxPacket) -> bool {
        loop {
            // We must start with an empty packet, because a failed attempt may already have added
            // some payload.
            tx.clear();
            // In ERROR, we still send responses for previous requests and the NAK.
            let (responds, requests) = match self.state {
                QpState::Rts | QpState::Sqd => (true, true),
                QpState::Rtr | QpState::Error => (true, false),
                _ => (false, false),
            };
            // A notification is only useful if it is sent immediately.
            if self.cnp.is_some() && responds {
                self.emit_cnp(tx);
                return true;
            }
            let (first, second) = match (responds && self.responder.has_output(), requests) {
                (false, false) => return false,
                (false, true) => (Stream::Requests, None),
                (true, false) => (Stream::Responses, None),
                // If the first stream has no packet or is blocked by its window or pace, we try the
                // other stream.
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
                    // The last request to complete may be a local operation, for which we will not
                    // receive a packet.
                    self.check_drained(env);
                    return false;
                }
                // The QP is now in ERROR. Try again because there may be a NAK to send.
                Err(Fault) => self.enter_error(env),
            }
        }
    }

    /// Writes an acknowledgement that is waiting for READs to `tx`, or returns false if there is no
    /// acknowledgement. This must be used if the caller stops calling [`RcQp::poll_transmit`]
    /// before it returns false.
    pub fn poll_waiting_ack(&mut self, now: Instant, env: &mut Env<'_>, tx: &mut TxPacket) -> bool {
        tx.clear();
        // Only a READ can return an error.
        self.responder.has_only_ack()
            && self
                .poll_stream(Stream::Responses, now, env, tx)
                .unwrap_or(false)
    }

    /// Returns the stream to use first if both may have packets to send.
    fn plan_turn(&mut self) -> Stream {
        // An acknowledgement is sent before any SENDs and WRITEs. The peer's application often
        // expects the completion of its request before our response, because this is how hardware
        // behaves: for example, tgt will otherwise reject iSER logins. READs and atomics are not
        // visible to the application, so the acknowledgement can be the last segment in their
        // train. But we limit this to one burst, as the peer's window is waiting for the
        // acknowledgement.
        if self.responder.has_only_ack() {
            if self.ahead < BURST && self.requester.is_read_next() {
                self.ahead += 1;
                return Stream::Requests;
            }
            return Stream::Responses;
        }
        let is_turn = self.stream == Stream::Responses && self.burst < BURST
            || self.stream == Stream::Requests && self.burst >= BURST;
        // NAKs and atomic responses are single small packets that the peer is waiting for, so we
        // don't delay them until the end of a burst.
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
                // In SQD, requests that were started must continue so that the queue can drain.
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
        // Extended connections use the same states.
        qp_state::become_state(&mut self.state, QpType::Rc, next);
    }

    fn emit_cnp(&mut self, tx: &mut TxPacket) {
        let link = self.link.expect("path is set in RTR");
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
        // We keep counting beyond `BURST` if the other stream has no packets, so that it can send
        // immediately when a packet is ready.
        if self.stream == stream {
            self.burst = self.burst.saturating_add(1);
        } else {
            self.stream = stream;
            self.burst = 1;
        }
    }

    fn apply_result(&mut self, result: Result<(), Fault>, env: &mut Env<'_>) {
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
        // If we have rejected a request, responses to previous requests and the NAK are still sent.
        // In all other cases, we must not access the owner's memory anymore.
        if !self.responder.has_failed() {
            self.responder.close();
        }
        self.become_state(QpState::Error);
        self.awaits_drain = false;
        // Always flush sends before receives, so that the order does not depend on which direction
        // failed.
        self.requester.flush(&self.cfg, env.out);
        self.flush_receives(env);
        // The owner of a shared queue must wait for this event before destroying the QP, as it
        // indicates that no more receives will be consumed. A second error is possible in ERROR, if
        // the key used by a pending READ response is invalidated.
        if self.cfg.has_srq && !was_in_error {
            let event = AsyncEvent::QpLastWqeReached(self.cfg.qp);
            env.out.push(RcEvent::Async(event));
        }
    }

    fn flush_receives(&mut self, env: &mut Env<'_>) {
        // The receive of an incomplete message is older than all receives in the queue and must be
        // returned to its owner.
        let bound = self.responder.unbind();
        let mut flush = |wr_id| {
            let (status, opcode) = (WcStatus::WrFlushErr, WcOpcode::Recv);
            let flushed = Completion::new(wr_id, status, opcode, self.cfg.qp, self.cfg.qp_num);
            env.out.push(RcEvent::Recv(flushed));
        };
        if let Some(wr_id) = bound {
            flush(wr_id);
        }
        // Don't flush a shared queue because it is still used by other QPs.
        if !self.cfg.has_srq {
            while let Some(wr_id) = env.rq.pop_id() {
                flush(wr_id);
            }
        }
    }
}
