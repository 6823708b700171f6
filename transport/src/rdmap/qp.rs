//! The queue pair: its states, its stream, and which message is sent next.
//!
//! The states are those of reliable connections ([`qp_state`]), of which
//! INIT to RTS is one step: there is a stream, or there is none.

use super::requester::{Fault, Requester};
use super::responder::{Responder, event_of};
use super::setup::{Agreed, Disagreement, Rtr};
use super::wire::ddp::{Header, HeaderError, Opcode, Place, Queue};
use super::wire::fpdu::{Deframer, Framer, FramingError, MAX_ULPDU};
use super::wire::terminate::{Reason, Terminate};
use super::{RdmapConfig, RdmapCounters, Tx};
use crate::rc::post::{post_receives, post_sends};
use crate::rc::{Env, RcEvent};
use crate::verbs::{
    Access, AsyncEvent, PostError, QpState, QpType, RecvWr, SendWr, WcStatus, qp_state,
};

/// Least of the longest ULPDU, in bytes: a header, an atomic request, and something to move.
pub const MIN_MULPDU: usize = 128;

/// What a connection begins with.
#[derive(Clone, Copy, Debug)]
pub struct StreamParams {
    /// What both ends have agreed on.
    pub agreed: Agreed,
    /// Longest ULPDU that is sent, in bytes, from [`MIN_MULPDU`] to [`MAX_ULPDU`].
    pub mulpdu: usize,
    /// Rights of the peer: the remote ones only.
    pub access: Access,
}

#[derive(Debug)]
struct Stream {
    framer: Framer,
    deframer: Deframer,
    mulpdu: usize,
    /// The message that is sent before all others.
    rtr: Option<Rtr>,
    /// Nothing is sent before a message has come.
    awaits_first: bool,
    /// The message that ends the connection, to be sent.
    terminate: Option<Terminate>,
    /// Nothing is taken in or sent any more, but for the message that ends the connection.
    is_over: bool,
    /// An answer was sent last, so a request has its turn.
    answered_last: bool,
}

/// A queue pair over a stream. See the [module](super).
#[derive(Debug)]
pub struct RdmapQp {
    cfg: RdmapConfig,
    state: QpState,
    stream: Option<Box<Stream>>,
    requester: Requester,
    responder: Responder,
    counters: RdmapCounters,
    /// `SqDrained` still has to be raised.
    awaits_drain: bool,
}

impl RdmapQp {
    /// A queue pair in RESET.
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

    /// State of the queue pair.
    #[must_use]
    pub fn state(&self) -> QpState {
        self.state
    }

    /// Counters since its creation.
    #[must_use]
    pub fn counters(&self) -> &RdmapCounters {
        &self.counters
    }

    fn become_state(&mut self, next: QpState) {
        qp_state::become_state(&mut self.state, QpType::Rc, next);
    }

    /// Transition from RESET to INIT.
    pub fn to_init(&mut self) {
        self.become_state(QpState::Init);
    }

    /// INIT to RTS: both ends have agreed, and the stream is at its first FPDU.
    ///
    /// # Panics
    /// In another state than INIT.
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
            answered_last: false,
        }));
    }

    /// RTS to SQD: a message that has begun is finished, no other begins. `SqDrained` reports the end.
    pub fn to_sqd(&mut self, env: &mut Env<'_>) {
        self.become_state(QpState::Sqd);
        self.awaits_drain = true;
        self.check_drained(env.out);
    }

    /// SQD back to RTS.
    pub fn resume(&mut self) {
        self.become_state(QpState::Rts);
        self.awaits_drain = false;
    }

    /// Whether a message that had begun before a move to SQD is not complete yet.
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

    /// Any state to ERROR: every request in both queues completes as flushed, sends first, each queue
    /// in order. What a shared queue holds stays there. The connection is over.
    pub fn to_error(&mut self, env: &mut Env<'_>) {
        let was_in_error = self.state == QpState::Error;
        self.become_state(QpState::Error);
        self.awaits_drain = false;
        if let Some(stream) = &mut self.stream {
            stream.is_over = true;
        }
        self.requester.flush(&self.cfg, env.out);
        self.responder.flush(&self.cfg, env);
        // The owner of a shared queue waits for this event before it destroys the queue pair.
        if self.cfg.has_srq && !was_in_error {
            let event = AsyncEvent::QpLastWqeReached(self.cfg.qp);
            env.out.push(RcEvent::Async(event));
        }
    }

    /// Any state to RESET: everything is forgotten, nothing completes. The caller clears the queue
    /// pair's own receive queue.
    pub fn to_reset(&mut self) {
        self.become_state(QpState::Reset);
        self.requester.reset();
        self.responder.start(0, Access::empty());
        self.stream = None;
        self.awaits_drain = false;
    }

    /// Changes what the peer may do.
    pub fn set_access(&mut self, access: Access) {
        self.responder.set_access(access);
    }

    /// Whether the stream is to be closed when what was made is sent: nothing follows.
    #[must_use]
    pub fn is_over(&self) -> bool {
        let stream = self.stream.as_ref();
        stream.is_none_or(|stream| stream.is_over && stream.terminate.is_none())
    }

    /// Posts a chain of send requests. In ERROR they complete as flushed at once.
    ///
    /// # Errors
    /// The index of the first request that was not posted, and why. RESET and INIT take none, and
    /// SENDs with immediate data do not exist here.
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
            self.responder.flush(&self.cfg, env);
        }
        result
    }

    /// Takes in bytes of the stream.
    pub fn handle_input(&mut self, mut bytes: &[u8], env: &mut Env<'_>) {
        self.counters.rx_bytes += bytes.len() as u64;
        // Taken out, since segments change the queue pair, and put back.
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
                        Ok(Heard::Segment) => {}
                        Ok(Heard::End) => stream.is_over = true,
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

    /// Reports an error of the peer's, unless a completion does.
    fn report(&self, reason: Reason, env: &mut Env<'_>) {
        let failed = |event: &RcEvent| {
            matches!(event, RcEvent::Send(c) | RcEvent::Recv(c)
                if !c.status.is_ok() && c.status != WcStatus::WrFlushErr)
        };
        if !env.out.iter().any(failed) {
            env.out.push(RcEvent::Async(event_of(&self.cfg, reason)));
        }
    }

    fn handle_segment(&mut self, ulpdu: &[u8], env: &mut Env<'_>) -> Result<Heard, Reason> {
        // The first message of an initiator may have no bytes at all.
        if ulpdu.is_empty() {
            return Ok(Heard::Segment);
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
        if let Place::Untagged { qn, msn, .. } = header.place {
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
                return Ok(Heard::End);
            }
        }
        Ok(Heard::Segment)
    }

    /// The peer ends the connection.
    fn on_terminate(&mut self, payload: &[u8], env: &mut Env<'_>) {
        let terminate = Terminate::parse(payload);
        let reason = terminate.as_ref().map(|t| t.reason);
        tracing::debug!(qp = ?self.cfg.qp, ?reason, "the peer has ended the connection");
        let request = terminate.as_ref().and_then(Terminate::request);
        let status = match reason {
            Some(reason) if super::responder::is_access_error(reason) => WcStatus::RemAccessErr,
            Some(Reason::NoBuffer | Reason::TooLong | Reason::UnexpectedOpcode) => {
                WcStatus::RemInvReqErr
            }
            _ => WcStatus::RemOpErr,
        };
        // Other requests have completed when they were sent.
        let is_blamed =
            request.is_some_and(|msn| self.requester.refuse(&self.cfg, env.out, msn, status));
        if !is_blamed {
            let event = AsyncEvent::QpFatal(self.cfg.qp);
            env.out.push(RcEvent::Async(event));
        }
    }

    /// Appends what is to be sent now to `out`, until that has `limit` bytes; the last segment may be
    /// longer. Answers whether there may be more.
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
                self.end(terminate, env);
                // The message about it is made in the next turn.
                continue;
            }
            has_more = is_made;
        }
        self.counters.tx_bytes += (out.len() - before) as u64;
        self.check_drained(env.out);
        has_more
    }

    /// Ends the connection with a message.
    fn end(&mut self, terminate: Terminate, env: &mut Env<'_>) {
        if let Some(stream) = &mut self.stream
            && !stream.is_over
        {
            stream.terminate = Some(terminate);
        }
        self.to_error(env);
    }

    /// Ends a connection that was made by a reply which does not fit. Its stream has begun.
    pub fn refuse_reply(&mut self, disagreement: Disagreement, env: &mut Env<'_>) {
        self.end(Terminate::new(disagreement.reason()), env);
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
        // A message is sent as a whole, and READs are answered in turn with requests of our own.
        let answers_first = !stream.answered_last && self.responder.has_answers();
        let is_answer =
            self.responder.is_sending() || answers_first && !self.requester.is_sending();
        if !is_answer {
            let sent = self.requester.poll(&mut tx, may_start);
            if sent.map_err(|Fault| Terminate::new(Reason::RdmapCatastrophic))? {
                stream.answered_last = self.requester.is_sending() && stream.answered_last;
                return Ok(true);
            }
        }
        let sent = self.responder.poll(&mut tx)?;
        stream.answered_last = sent;
        Ok(sent)
    }
}

/// What a segment was.
enum Heard {
    Segment,
    /// The peer has ended the connection.
    End,
}
