//! Queue pair (QP): its states, its stream, and selection of the next message to send.
//!
//! Uses the same states as reliable connections ([`qp_state`]), but the transition from INIT to RTS
//! is a single step, since the stream is either open or not.

use super::requester::{Fault, Requester};
use super::responder::{Responder, event_of};
use super::setup::{Disagreement, NegotiatedParams, Rtr};
use super::wire::ddp::{Header, HeaderError, Opcode, Placement, Queue};
use super::wire::fpdu::{Deframer, Framer, FramingError, MAX_ULPDU};
use super::wire::terminate::{Reason, Terminate};
use super::{RdmapConfig, RdmapCounters, Tx};
use crate::rc::post::{post_receives, post_sends};
use crate::rc::{Env, RcEvent};
use crate::verbs::{
    Access, AsyncEvent, PostError, QpState, QpType, RecvWr, SendWr, WcStatus, qp_state,
};

/// Minimum value for the maximum ULPDU size, in bytes: enough for a header, an atomic request and
/// some data.
pub const MIN_MULPDU: usize = 128;

/// Initial parameters for a connection.
#[derive(Clone, Copy, Debug)]
pub struct StreamParams {
    /// Result of the negotiation.
    pub agreed: NegotiatedParams,
    /// Maximum size of a ULPDU to send in bytes, from [`MIN_MULPDU`] to [`MAX_ULPDU`].
    pub mulpdu: usize,
    /// Access rights for the peer. Only remote rights are used.
    pub access: Access,
}

#[derive(Debug)]
struct Stream {
    framer: Framer,
    deframer: Deframer,
    mulpdu: usize,
    /// Message to send before all other messages.
    rtr: Option<Rtr>,
    /// Set if nothing must be sent before the first message has been received.
    awaits_first: bool,
    /// Terminate message to be sent.
    terminate: Option<Terminate>,
    /// Set if nothing is processed or sent anymore, except for the Terminate message.
    is_over: bool,
    /// Set if a response was sent last, so that a request should be sent next.
    responded_last: bool,
}

/// QP using a stream. See the [module](super) documentation.
#[derive(Debug)]
pub struct RdmapQp {
    cfg: RdmapConfig,
    state: QpState,
    stream: Option<Box<Stream>>,
    requester: Requester,
    responder: Responder,
    counters: RdmapCounters,
    /// Set if `SqDrained` has not been reported yet.
    awaits_drain: bool,
}

impl RdmapQp {
    /// Creates a QP in RESET.
    #[must_use]
    pub fn new(cfg: RdmapConfig) -> Self {
        Self {
            state: QpState::Reset,
            stream: None,
            requester: Requester::new(&cfg.cap),
            responder: Responder::new(cfg.cap.max_recv_sge),
            counters: RdmapCounters::default(),
            awaits_drain: false,
            cfg,
        }
    }

    /// Returns the current state.
    #[must_use]
    pub fn state(&self) -> QpState {
        self.state
    }

    /// Returns the counters since creation.
    #[must_use]
    pub fn counters(&self) -> &RdmapCounters {
        &self.counters
    }

    fn become_state(&mut self, next: QpState) {
        qp_state::become_state(&mut self.state, QpType::Rc, next);
    }

    /// RESET to INIT.
    pub fn to_init(&mut self) {
        self.become_state(QpState::Init);
    }

    /// INIT to RTS, after the negotiation. The next byte in the stream must be the start of the
    /// first FPDU.
    ///
    /// # Panics
    /// Panics if the state is not INIT.
    pub fn start(&mut self, params: &StreamParams) {
        let agreed = &params.agreed;
        self.become_state(QpState::Rtr);
        self.become_state(QpState::Rts);
        self.requester.start(agreed.ord);
        self.responder.start(agreed.ird, params.access);
        self.stream = Some(Box::new(Stream {
            framer: Framer::new(agreed.tx),
            deframer: Deframer::new(agreed.rx),
            mulpdu: params.mulpdu.clamp(MIN_MULPDU, MAX_ULPDU),
            rtr: agreed.rtr,
            awaits_first: agreed.awaits_first,
            terminate: None,
            is_over: false,
            responded_last: false,
        }));
    }

    /// RTS to SQD. The current message is completed but no new message is started. `SqDrained` is
    /// reported when this is done.
    pub fn to_sqd(&mut self, env: &mut Env<'_>) {
        self.become_state(QpState::Sqd);
        self.awaits_drain = true;
        self.check_drained(env.out);
    }

    /// SQD to RTS.
    pub fn resume(&mut self) {
        self.become_state(QpState::Rts);
        self.awaits_drain = false;
    }

    /// Returns whether a message that was started before the transition to SQD is not yet complete.
    #[must_use]
    pub fn is_draining(&self) -> bool {
        self.state == QpState::Sqd && !self.requester.is_drained()
    }

    fn check_drained(&mut self, events: &mut Vec<RcEvent>) {
        if self.awaits_drain && self.requester.is_drained() {
            self.awaits_drain = false;
            events.push(RcEvent::Async(AsyncEvent::SqDrained(self.cfg.qp)));
        }
    }

    /// Any state to ERROR. All requests in both queues are flushed, starting with the send queue,
    /// in order. Receives in a shared queue are not affected. The connection is closed.
    pub fn to_error(&mut self, env: &mut Env<'_>) {
        let was_in_error = self.state == QpState::Error;
        self.become_state(QpState::Error);
        self.awaits_drain = false;
        if let Some(stream) = &mut self.stream {
            stream.is_over = true;
        }
        self.requester.flush(&self.cfg, env.out);
        self.responder.flush(&self.cfg, env);
        // The owner of a shared queue must wait for this event before destroying the QP.
        if self.cfg.has_srq && !was_in_error {
            let event = AsyncEvent::QpLastWqeReached(self.cfg.qp);
            env.out.push(RcEvent::Async(event));
        }
    }

    /// Any state to RESET. All state is cleared without completing any requests. The caller must
    /// clear the QP's own receive queue.
    pub fn to_reset(&mut self) {
        self.become_state(QpState::Reset);
        self.requester.reset();
        self.responder.start(0, Access::empty());
        self.stream = None;
        self.awaits_drain = false;
    }

    /// Sets the access rights for the peer.
    pub fn set_access(&mut self, access: Access) {
        self.responder.set_access(access);
    }

    /// Returns true if the stream should be closed after sending the remaining data.
    #[must_use]
    pub fn is_over(&self) -> bool {
        let stream = self.stream.as_ref();
        stream.is_none_or(|stream| stream.is_over && stream.terminate.is_none())
    }

    /// Posts a chain of send requests. In ERROR, they are flushed immediately.
    ///
    /// # Errors
    /// Returns the index of the first request that could not be posted, and the reason. This fails
    /// in RESET and INIT, and for a SEND with immediate data, which is not supported.
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
            self.responder.flush(&self.cfg, env);
        }
        result
    }

    /// Processes data received from the stream.
    pub fn handle_input(&mut self, mut bytes: &[u8], env: &mut Env<'_>) {
        self.counters.rx_bytes += bytes.len() as u64;
        // Processing a segment modifies the QP, so we need to move the stream out temporarily.
        let Some(mut stream) = self.stream.take() else {
            return;
        };
        while !stream.is_over {
            match stream.deframer.poll(&mut bytes) {
                Ok(None) => break,
                Ok(Some(ulpdu)) => {
                    stream.awaits_first = false;
                    self.counters.rx_segments += 1;
                    match self.handle_segment(ulpdu, env) {
                        Ok(SegmentResult::Segment) => {}
                        Ok(SegmentResult::End) => stream.is_over = true,
                        Err(reason) => {
                            stream.terminate = Some(Terminate::about(reason, ulpdu));
                            stream.is_over = true;
                            self.report(reason, env);
                        }
                    }
                }
                Err(e) => {
                    let reason = match e {
                        FramingError::Crc => Reason::Crc,
                        FramingError::Marker => Reason::Framing,
                    };
                    stream.terminate = Some(Terminate::new(reason));
                    stream.is_over = true;
                    self.report(reason, env);
                }
            }
        }
        let is_over = stream.is_over;
        self.stream = Some(stream);
        if is_over && self.state != QpState::Error {
            self.to_error(env);
        }
        self.check_drained(env.out);
    }

    /// Reports an error by the peer, unless it is reported in a completion.
    fn report(&self, reason: Reason, env: &mut Env<'_>) {
        let failed = |event: &RcEvent| {
            matches!(event, RcEvent::Send(c) | RcEvent::Recv(c)
                if !c.status.is_ok() && c.status != WcStatus::WrFlushErr)
        };
        if !env.out.iter().any(failed) {
            env.out.push(RcEvent::Async(event_of(&self.cfg, reason)));
        }
    }

    fn handle_segment(&mut self, ulpdu: &[u8], env: &mut Env<'_>) -> Result<SegmentResult, Reason> {
        // The first message from an initiator can be empty.
        if ulpdu.is_empty() {
            return Ok(SegmentResult::Segment);
        }
        let (header, payload) = Header::parse(ulpdu).map_err(|e| match e {
            HeaderError::Length { .. } => Reason::Framing,
            HeaderError::DdpVersion { tagged: true, .. } => Reason::DdpTaggedVersion,
            HeaderError::DdpVersion { tagged: false, .. } => Reason::DdpUntaggedVersion,
            HeaderError::RdmapVersion { .. } => Reason::RdmapVersion,
            HeaderError::Opcode { .. } => Reason::UnexpectedOpcode,
        })?;
        let cfg = &self.cfg;
        let mut number = 0;
        if let Placement::Untagged { qn, msn, .. } = header.place {
            if header.opcode.queue().map(|queue| queue as u32) != Some(qn) {
                return Err(Reason::InvalidQueue);
            }
            number = msn;
        }
        match header.opcode {
            Opcode::Write => self.responder.handle_write(cfg, env, &header, payload)?,
            Opcode::ReadRequest => {
                self.responder.handle_read(cfg, env.mrs, &header, payload)?;
            }
            Opcode::AtomicRequest => {
                self.responder
                    .handle_atomic(cfg, env.mrs, &header, payload)?;
            }
            Opcode::ReadResponse => self
                .requester
                .handle_read_response(cfg, env.mrs, env.out, &header, payload)?,
            Opcode::AtomicResponse => self
                .requester
                .handle_atomic_response(cfg, env.mrs, env.out, number, payload)?,
            Opcode::Send
            | Opcode::SendInvalidate
            | Opcode::SendSolicited
            | Opcode::SendSolicitedInvalidate => {
                self.responder.handle_send(cfg, env, &header, payload)?;
            }
            Opcode::Immediate | Opcode::ImmediateSolicited => {
                self.responder
                    .handle_immediate(cfg, env, &header, payload)?;
            }
            Opcode::Terminate => {
                self.counters.rx_terminates += 1;
                self.on_terminate(payload, env);
                return Ok(SegmentResult::End);
            }
        }
        Ok(SegmentResult::Segment)
    }

    /// The peer has closed the connection.
    fn on_terminate(&mut self, payload: &[u8], env: &mut Env<'_>) {
        let terminate = Terminate::parse(payload);
        let reason = terminate.as_ref().map(|t| t.reason);
        tracing::debug!(qp = ?self.cfg.qp, ?reason, "connection terminated by the peer");
        let request = terminate.as_ref().and_then(Terminate::request);
        let status = match reason {
            Some(reason) if super::responder::is_access_error(reason) => WcStatus::RemAccessErr,
            Some(Reason::NoBuffer | Reason::TooLong | Reason::UnexpectedOpcode) => {
                WcStatus::RemInvReqErr
            }
            _ => WcStatus::RemOpErr,
        };
        // All other requests were completed when they were sent.
        let is_blamed =
            request.is_some_and(|msn| self.requester.refuse(&self.cfg, env.out, msn, status));
        if !is_blamed {
            let event = AsyncEvent::QpFatal(self.cfg.qp);
            env.out.push(RcEvent::Async(event));
        }
    }

    /// Appends data to send to `out` until it has reached `limit` bytes; the last segment can
    /// exceed this. Returns whether there may be more data.
    pub fn poll_output(&mut self, env: &mut Env<'_>, out: &mut Vec<u8>, limit: usize) -> bool {
        let before = out.len();
        let mut has_more = true;
        while has_more && out.len() < limit {
            let (is_made, failed) = match self.make_segment(env, out) {
                Ok(is_made) => (is_made, None),
                Err(terminate) => (false, Some(terminate)),
            };
            self.counters.tx_segments += u64::from(is_made);
            if let Some(terminate) = failed {
                self.terminate_stream(terminate, env);
                // The Terminate message is sent in the next iteration.
                continue;
            }
            has_more = is_made;
        }
        self.counters.tx_bytes += (out.len() - before) as u64;
        self.check_drained(env.out);
        has_more
    }

    /// Closes the connection with a Terminate message.
    fn terminate_stream(&mut self, terminate: Terminate, env: &mut Env<'_>) {
        if let Some(stream) = &mut self.stream
            && !stream.is_over
        {
            stream.terminate = Some(terminate);
        }
        self.to_error(env);
    }

    /// Closes a connection after receiving an invalid reply. The stream has already been started.
    pub fn refuse_reply(&mut self, disagreement: Disagreement, env: &mut Env<'_>) {
        self.terminate_stream(Terminate::new(disagreement.reason()), env);
    }

    fn make_segment(&mut self, env: &mut Env<'_>, out: &mut Vec<u8>) -> Result<bool, Terminate> {
        let Some(stream) = &mut self.stream else {
            return Ok(false);
        };
        let mut tx = Tx {
            cfg: &self.cfg,
            mrs: env.mrs,
            events: env.out,
            framer: &mut stream.framer,
            mulpdu: stream.mulpdu,
            out,
        };
        if let Some(terminate) = stream.terminate.take() {
            tx.message(Opcode::Terminate, Queue::Terminate, 1, |out| {
                terminate.emit(out);
            });
            self.counters.tx_terminates += 1;
            return Ok(true);
        }
        if stream.is_over || stream.awaits_first {
            return Ok(false);
        }
        if let Some(rtr) = stream.rtr.take() {
            self.requester.send_rtr(&mut tx, rtr);
            return Ok(true);
        }
        let may_start = self.state == QpState::Rts;
        // Messages can't be interleaved, so we alternate between READ responses and our own
        // requests.
        let responses_first = !stream.responded_last && self.responder.has_responses();
        let is_response =
            self.responder.is_sending() || responses_first && !self.requester.is_sending();
        if !is_response {
            let sent = self.requester.poll(&mut tx, may_start);
            if sent.map_err(|Fault| Terminate::new(Reason::RdmapCatastrophic))? {
                stream.responded_last = self.requester.is_sending() && stream.responded_last;
                return Ok(true);
            }
        }
        let sent = self.responder.poll(&mut tx)?;
        stream.responded_last = sent;
        Ok(sent)
    }
}

/// Result of processing a segment.
enum SegmentResult {
    Segment,
    /// The connection was closed by the peer.
    End,
}
