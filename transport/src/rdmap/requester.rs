//! Sends messages for send requests and processes responses.

use std::collections::VecDeque;

use super::setup::Rtr;
use super::wire::ddp::{
    Atomic, AtomicRequest, AtomicResponse, Header, Opcode, Placement, Queue, ReadRequest,
};
use super::wire::terminate::Reason;
use super::{RdmapConfig, Tx};
use crate::mr::{KeyError, MrTable};
use crate::rc::RcEvent;
use crate::rc::message::walk;
use crate::rc::send_queue::{Payload, Phase, SendQueue, SendWqe};
use crate::verbs::{PostReason, QpCap, RemoteAddr, SendFlags, SendOp, SendWr, Sge, WcStatus};

/// Returned if the QP can't continue. The failed request has already been completed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Fault;

/// READ or atomic waiting for the complete response.
#[derive(Clone, Copy, Debug)]
struct Outstanding {
    /// Position in the send queue, or `None` for a zero-length READ sent at the start of a
    /// connection.
    at: Option<u64>,
    /// Request number, used as the sink key of a READ or the ID of an atomic.
    number: u32,
    is_atomic: bool,
    length: u32,
    received: u32,
}

/// Requester of a QP.
#[derive(Debug)]
pub(super) struct Requester {
    sq: SendQueue,
    /// Request currently being sent, or the next one.
    next: u64,
    /// Number of message bytes sent.
    offset: u32,
    /// Set if the current message was started but is not complete.
    is_sending: bool,
    /// READs and atomics in flight, limited to `ord`.
    outstanding: VecDeque<Outstanding>,
    ord: u16,
    /// Next message numbers for the peer's queues.
    send_msn: u32,
    read_msn: u32,
    /// Next expected number of an atomic response.
    response_msn: u32,
}

/// Appends `len` bytes of request data, starting at `offset`.
fn gather(
    payload: Payload<'_>,
    cfg: &RdmapConfig,
    mrs: &MrTable,
    out: &mut Vec<u8>,
    offset: usize,
    len: usize,
) -> Result<(), KeyError> {
    let sges = match payload {
        Payload::Inline(data) => {
            out.extend_from_slice(&data[offset..offset + len]);
            return Ok(());
        }
        Payload::Sges(sges) => sges,
    };
    walk(sges, offset, len, |sge, within, _, take| {
        let span = mrs.resolve_local_part(cfg.pd, sge, within..within + take, false)?;
        span.append_to(within, take, out);
        Ok(())
    })
}

/// Writes response data to the scatter list of the request. On error, nothing is written.
fn scatter(
    sges: &[Sge],
    cfg: &RdmapConfig,
    mrs: &MrTable,
    offset: usize,
    data: &[u8],
) -> Result<(), KeyError> {
    for write in [false, true] {
        walk(sges, offset, data.len(), |sge, within, done, take| {
            let span = mrs.resolve_local_part(cfg.pd, sge, within..within + take, true)?;
            if write {
                span.write(within, &data[done..done + take]);
            }
            Ok(())
        })?;
    }
    Ok(())
}

/// Returns the opcode and invalidated key for a message that consumes a receive.
fn send_opcode(op: &SendOp, is_solicited: bool) -> (Opcode, u32) {
    match (op, is_solicited) {
        (SendOp::SendInv(key), false) => (Opcode::SendInvalidate, key.0),
        (SendOp::SendInv(key), true) => (Opcode::SendSolicitedInvalidate, key.0),
        (_, false) => (Opcode::Send, 0),
        (_, true) => (Opcode::SendSolicited, 0),
    }
}

impl Requester {
    pub(super) fn new(cap: &QpCap) -> Self {
        Self {
            sq: SendQueue::new(cap),
            next: 0,
            offset: 0,
            is_sending: false,
            outstanding: VecDeque::new(),
            ord: 0,
            send_msn: 1,
            read_msn: 1,
            response_msn: 1,
        }
    }

    /// Starts a connection with a limit of `ord` READs and atomics.
    pub(super) fn start(&mut self, ord: u16) {
        self.ord = ord;
        self.outstanding.clear();
        (self.send_msn, self.read_msn, self.response_msn) = (1, 1, 1);
    }

    pub(super) fn reset(&mut self) {
        self.sq.clear();
        self.next = 0;
        self.is_sending = false;
        self.start(0);
    }

    pub(super) fn post(&mut self, wr: &SendWr<'_>) -> Result<(), PostReason> {
        // This is not supported by RDMAP.
        if matches!(wr.op, SendOp::SendImm(_)) {
            return Err(PostReason::InvalidOpcode);
        }
        self.sq.push(wr)
    }

    pub(super) fn unpost(&mut self, count: usize) {
        self.sq.unpost(count);
    }

    /// Returns true if a message was started and must be completed first.
    pub(super) fn is_sending(&self) -> bool {
        self.is_sending
    }

    /// Returns whether all requests that were started are complete.
    pub(super) fn is_drained(&self) -> bool {
        let begun = |wqe: &SendWqe| wqe.phase != Phase::Posted;
        !self.sq.peek(self.sq.head()).is_some_and(begun)
    }

    /// Flushes all requests.
    pub(super) fn flush(&mut self, cfg: &RdmapConfig, events: &mut Vec<RcEvent>) {
        while !self.sq.is_empty() {
            let flushed = self.sq.retire();
            let flushed = flushed.completion(cfg.qp, cfg.qp_num, WcStatus::WrFlushErr);
            events.push(RcEvent::Send(flushed));
        }
        self.outstanding.clear();
        self.is_sending = false;
        self.next = self.sq.head();
    }

    /// Completes finished requests in order.
    fn retire(&mut self, cfg: &RdmapConfig, events: &mut Vec<RcEvent>) -> Result<(), Fault> {
        while let Some(wqe) = self.sq.peek(self.sq.head()) {
            let status = match wqe.phase {
                Phase::Executed => WcStatus::Success,
                Phase::Failed(status) => status,
                Phase::Posted | Phase::Started => break,
            };
            let wqe = self.sq.retire();
            let is_visible = cfg.sq_sig_all || wqe.flags.contains(SendFlags::SIGNALED);
            if is_visible || !status.is_ok() {
                let done = wqe.completion(cfg.qp, cfg.qp_num, status);
                events.push(RcEvent::Send(done));
            }
            if !status.is_ok() {
                return Err(Fault);
            }
        }
        self.next = self.next.max(self.sq.head());
        Ok(())
    }

    /// Fails a request, once all previous requests are complete.
    fn fail(
        &mut self,
        at: u64,
        status: WcStatus,
        cfg: &RdmapConfig,
        events: &mut Vec<RcEvent>,
    ) -> Result<(), Fault> {
        self.sq.wqe_mut(at).phase = Phase::Failed(status);
        self.is_sending = false;
        self.retire(cfg, events)
    }

    /// Creates the next segment if allowed by state, fences and limits. `may_start` is false while
    /// the send queue is draining.
    pub(super) fn poll(&mut self, tx: &mut Tx<'_>, may_start: bool) -> Result<bool, Fault> {
        while let Some(wqe) = self.sq.peek(self.next) {
            let wqe = *wqe;
            match wqe.phase {
                // All requests after this will be flushed, so they must not be executed.
                Phase::Failed(_) => return Ok(false),
                Phase::Executed => self.next += 1,
                Phase::Started => return self.cut(tx, &wqe).map(|()| true),
                Phase::Posted if !may_start || self.must_wait(&wqe) => return Ok(false),
                Phase::Posted if wqe.is_local() => {
                    let done = wqe.run_local(tx.cfg.pd, tx.cfg.qp, tx.mrs);
                    if done.is_err() {
                        self.fail(self.next, WcStatus::MwBindErr, tx.cfg, tx.events)?;
                        return Ok(false);
                    }
                    self.sq.wqe_mut(self.next).phase = Phase::Executed;
                    self.next += 1;
                    self.retire(tx.cfg, tx.events)?;
                }
                Phase::Posted => {
                    if let Err(status) = self.check_start(tx, &wqe) {
                        self.fail(self.next, status, tx.cfg, tx.events)?;
                        return Ok(false);
                    }
                    self.sq.wqe_mut(self.next).phase = Phase::Started;
                    if wqe.has_response() {
                        self.send_read_request(tx, &wqe);
                        self.next += 1;
                        return Ok(true);
                    }
                    (self.offset, self.is_sending) = (0, true);
                }
            }
        }
        Ok(false)
    }

    /// Returns true if a request must wait for previous requests.
    fn must_wait(&self, wqe: &SendWqe) -> bool {
        if wqe.flags.contains(SendFlags::FENCE) && !self.outstanding.is_empty() {
            return true;
        }
        match wqe.op {
            // There may still be a response for a READ using this key.
            SendOp::LocalInv(key) => self.sq.names(key, self.next),
            // If the limit is zero, the request will fail, so don't wait.
            _ => {
                wqe.has_response()
                    && self.ord > 0
                    && self.outstanding.len() >= usize::from(self.ord)
            }
        }
    }

    /// Checks a request before sending it.
    fn check_start(&self, tx: &Tx<'_>, wqe: &SendWqe) -> Result<(), WcStatus> {
        if wqe.has_response() && self.ord == 0 {
            return Err(WcStatus::LocQpOpErr);
        }
        for sge in self.sq.sges(self.next) {
            tx.mrs
                .resolve_local(tx.cfg.pd, sge, wqe.has_response())
                .map_err(|_| WcStatus::LocProtErr)?;
        }
        Ok(())
    }

    /// Sends the request for a READ or an atomic.
    fn send_read_request(&mut self, tx: &mut Tx<'_>, wqe: &SendWqe) {
        let number = self.read_msn;
        let atomic = |remote: RemoteAddr, atomic| AtomicRequest {
            id: number,
            stag: remote.rkey.0,
            to: remote.addr,
            atomic,
        };
        let atomic = match wqe.op {
            SendOp::CmpSwap {
                remote,
                compare,
                swap,
            } => Some(atomic(
                remote,
                Atomic::CmpSwap {
                    swap,
                    swap_mask: u64::MAX,
                    compare,
                    compare_mask: u64::MAX,
                },
            )),
            SendOp::FetchAdd { remote, add } => {
                Some(atomic(remote, Atomic::FetchAdd { add, mask: 0 }))
            }
            _ => None,
        };
        match (atomic, wqe.op) {
            (Some(atomic), _) => {
                let queue = Queue::ReadRequest;
                tx.message(Opcode::AtomicRequest, queue, number, |out| atomic.emit(out));
            }
            (None, SendOp::Read(remote)) => self.send_read(tx, remote, wqe.length),
            (None, _) => unreachable!("only READs and atomics have responses"),
        }
        self.expect(Some(self.next), atomic.is_some(), wqe.length);
    }

    fn send_read(&self, tx: &mut Tx<'_>, remote: RemoteAddr, size: u32) {
        let number = self.read_msn;
        let read = ReadRequest {
            // The response only identifies the READ and not the destination address.
            sink_stag: number,
            sink_to: 0,
            size,
            source_stag: remote.rkey.0,
            source_to: remote.addr,
        };
        let queue = Queue::ReadRequest;
        tx.message(Opcode::ReadRequest, queue, number, |out| read.emit(out));
    }

    /// Adds a request that was just sent to the list of expected responses.
    fn expect(&mut self, at: Option<u64>, is_atomic: bool, length: u32) {
        self.outstanding.push_back(Outstanding {
            at,
            number: self.read_msn,
            is_atomic,
            length,
            received: 0,
        });
        self.read_msn = self.read_msn.wrapping_add(1);
    }

    /// Sends the first message, which allows the responder to send.
    pub(super) fn send_rtr(&mut self, tx: &mut Tx<'_>, rtr: Rtr) {
        let nowhere = RemoteAddr {
            addr: 0,
            rkey: crate::verbs::RKey(0),
        };
        match rtr {
            Rtr::Empty => {
                let start = super::Framer::begin_fpdu(tx.out);
                tx.framer.end_fpdu(tx.out, start);
            }
            Rtr::Write => {
                let header = Header {
                    opcode: Opcode::Write,
                    last: true,
                    place: Placement::Tagged { stag: 0, to: 0 },
                };
                let filled: Result<(), std::convert::Infallible> =
                    tx.segment(&header, |_, _| Ok(()));
                let Ok(()) = filled;
            }
            Rtr::Read => {
                self.send_read(tx, nowhere, 0);
                self.expect(None, false, 0);
            }
        }
    }

    /// Returns opcode and position for the next segment of a message with data.
    fn plan_segment(&self, wqe: &SendWqe) -> (Opcode, Placement) {
        if let SendOp::Write(remote) | SendOp::WriteImm(remote, _) = wqe.op {
            let place = Placement::Tagged {
                stag: remote.rkey.0,
                to: remote.addr.wrapping_add(u64::from(self.offset)),
            };
            return (Opcode::Write, place);
        }
        let is_solicited = wqe.flags.contains(SendFlags::SOLICITED);
        let (opcode, invalidate) = send_opcode(&wqe.op, is_solicited);
        let place = Placement::Untagged {
            invalidate,
            qn: Queue::Send as u32,
            msn: self.send_msn,
            mo: self.offset,
        };
        (opcode, place)
    }

    /// Sends the next segment of the current request.
    fn cut(&mut self, tx: &mut Tx<'_>, wqe: &SendWqe) -> Result<(), Fault> {
        if let (SendOp::WriteImm(_, imm), true) = (wqe.op, self.offset > wqe.length) {
            let opcode = match wqe.flags.contains(SendFlags::SOLICITED) {
                true => Opcode::ImmediateSolicited,
                false => Opcode::Immediate,
            };
            let (queue, data) = (Queue::Send, u64::from(imm).to_be_bytes());
            tx.message(opcode, queue, self.send_msn, |out| {
                out.extend_from_slice(&data);
            });
            self.send_msn = self.send_msn.wrapping_add(1);
            return self.finish_message(tx);
        }
        let left = wqe.length - self.offset;
        let (opcode, place) = self.plan_segment(wqe);
        let room = tx.mulpdu - Header::len(place);
        let len = (left as usize).min(room);
        let last = len == left as usize;
        let header = Header {
            opcode,
            last,
            place,
        };
        let (payload, offset, cfg) = (self.sq.payload(self.next), self.offset, tx.cfg);
        let filled = tx.segment(&header, |mrs, out| {
            gather(payload, cfg, mrs, out, offset as usize, len)
        });
        if filled.is_err() {
            // We cannot complete this message anymore, so the connection must be closed even if
            // previous requests are not complete.
            self.fail(self.next, WcStatus::LocProtErr, tx.cfg, tx.events)?;
            return Err(Fault);
        }
        #[expect(clippy::cast_possible_truncation, reason = "what is left at most")]
        let len = len as u32;
        self.offset += len;
        if !last {
            return Ok(());
        }
        if matches!(opcode, Opcode::Write) && matches!(wqe.op, SendOp::WriteImm(..)) {
            // This is beyond the end of the WRITE, to indicate that the immediate data is next.
            self.offset = wqe.length + 1;
            return Ok(());
        }
        if matches!(place, Placement::Untagged { .. }) {
            self.send_msn = self.send_msn.wrapping_add(1);
        }
        self.finish_message(tx)
    }

    /// Called when the message for a request was sent.
    fn finish_message(&mut self, tx: &mut Tx<'_>) -> Result<(), Fault> {
        self.is_sending = false;
        self.sq.wqe_mut(self.next).phase = Phase::Executed;
        self.next += 1;
        self.retire(tx.cfg, tx.events)
    }

    /// Processes a READ response segment.
    ///
    /// # Errors
    /// Returns the reason for closing the connection.
    pub(super) fn handle_read_response(
        &mut self,
        cfg: &RdmapConfig,
        mrs: &MrTable,
        events: &mut Vec<RcEvent>,
        header: &Header,
        payload: &[u8],
    ) -> Result<(), Reason> {
        let Placement::Tagged { stag, to } = header.place else {
            return Err(Reason::UnexpectedOpcode);
        };
        let Some(read) = self.outstanding.front_mut().filter(|it| !it.is_atomic) else {
            return Err(Reason::UnexpectedOpcode);
        };
        if stag != read.number {
            return Err(Reason::DdpInvalidStag);
        }
        let end = u64::from(read.received) + payload.len() as u64;
        let is_end = end == u64::from(read.length);
        if to != u64::from(read.received) || end > u64::from(read.length) || header.last != is_end {
            return Err(Reason::DdpBounds);
        }
        if let Some(at) = read.at {
            let offset = read.received as usize;
            if scatter(self.sq.sges(at), cfg, mrs, offset, payload).is_err() {
                // The connection will be closed with this reason in any case.
                let _ = self.fail(at, WcStatus::LocProtErr, cfg, events);
                return Err(Reason::DdpCatastrophic);
            }
        }
        #[expect(
            clippy::cast_possible_truncation,
            reason = "the length of the READ at most"
        )]
        {
            read.received = end as u32;
        }
        match header.last {
            true => self.complete_response(cfg, events),
            false => Ok(()),
        }
    }

    /// Processes an atomic response.
    ///
    /// # Errors
    /// Returns the reason for closing the connection.
    pub(super) fn handle_atomic_response(
        &mut self,
        cfg: &RdmapConfig,
        mrs: &MrTable,
        events: &mut Vec<RcEvent>,
        msn: u32,
        payload: &[u8],
    ) -> Result<(), Reason> {
        if msn != self.response_msn {
            return Err(Reason::InvalidMsn);
        }
        let response = AtomicResponse::parse(payload).ok_or(Reason::Framing)?;
        let requested = self.outstanding.front();
        let requested = requested.filter(|it| it.is_atomic && it.number == response.id);
        let at = requested
            .and_then(|it| it.at)
            .ok_or(Reason::UnexpectedOpcode)?;
        self.response_msn = self.response_msn.wrapping_add(1);
        let value = response.original.to_ne_bytes();
        if scatter(self.sq.sges(at), cfg, mrs, 0, &value).is_err() {
            // See above.
            let _ = self.fail(at, WcStatus::LocProtErr, cfg, events);
            return Err(Reason::DdpCatastrophic);
        }
        self.complete_response(cfg, events)
    }

    /// Called when the response to the oldest READ or atomic is complete.
    fn complete_response(
        &mut self,
        cfg: &RdmapConfig,
        events: &mut Vec<RcEvent>,
    ) -> Result<(), Reason> {
        let done = self
            .outstanding
            .pop_front()
            .expect("response for an outstanding request");
        if let Some(at) = done.at {
            self.sq.wqe_mut(at).phase = Phase::Executed;
        }
        // A later request may have failed while waiting for this response.
        self.retire(cfg, events)
            .map_err(|Fault| Reason::RdmapCatastrophic)
    }

    /// Fails the READ or atomic with this number, since the peer has closed the connection because
    /// of it. Returns false if there is no such request.
    pub(super) fn refuse(
        &mut self,
        cfg: &RdmapConfig,
        events: &mut Vec<RcEvent>,
        number: u32,
        status: WcStatus,
    ) -> bool {
        let mut all = self.outstanding.iter();
        let named = all.find(|it| it.number == number);
        // Linux `siw` uses a different number, but it processes requests in order.
        let refused = named.or(self.outstanding.front());
        let Some(at) = refused.and_then(|it| it.at) else {
            return false;
        };
        // There will be no more responses for previous requests.
        while self.sq.head() < at {
            let wqe = self.sq.retire();
            let done = wqe.completion(cfg.qp, cfg.qp_num, WcStatus::WrFlushErr);
            events.push(RcEvent::Send(done));
        }
        let failed = self.sq.retire().completion(cfg.qp, cfg.qp_num, status);
        events.push(RcEvent::Send(failed));
        true
    }
}
