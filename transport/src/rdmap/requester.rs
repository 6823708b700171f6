//! Messages of send requests, and the answers to them.

use std::collections::VecDeque;

use super::setup::Rtr;
use super::wire::ddp::{
    Atomic, AtomicRequest, AtomicResponse, Header, Opcode, Place, Queue, ReadRequest,
};
use super::wire::terminate::Reason;
use super::{RdmapConfig, Tx};
use crate::mr::{KeyError, MrTable};
use crate::rc::RcEvent;
use crate::rc::message::walk;
use crate::rc::send_queue::{Payload, Phase, SendQueue, SendWqe};
use crate::verbs::{PostReason, QpCap, RemoteAddr, SendFlags, SendOp, SendWr, Sge, WcStatus};

/// The queue pair cannot go on; the request that is to blame has completed so.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Fault;

/// A READ or atomic whose answer has not come in full.
#[derive(Clone, Copy, Debug)]
struct Outstanding {
    /// Its place in the send queue; `None` for the READ of no bytes with which a connection begins.
    at: Option<u64>,
    /// Number of the request: the key of its sink, or the identifier of an atomic.
    number: u32,
    is_atomic: bool,
    length: u32,
    received: u32,
}

/// The requesting half of a queue pair.
#[derive(Debug)]
pub(super) struct Requester {
    sq: SendQueue,
    /// The request that is sent, or is the next one to be.
    next: u64,
    /// Bytes of its message that were sent.
    offset: u32,
    /// A message has begun and not ended.
    is_sending: bool,
    /// READs and atomics under way. Bound: `ord`.
    outstanding: VecDeque<Outstanding>,
    ord: u16,
    /// Numbers of the next messages in the queues of the peer.
    send_msn: u32,
    read_msn: u32,
    /// Number of the next answer to an atomic.
    answer_msn: u32,
}

/// Appends `len` bytes of a request's data, from `offset` on.
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

/// Writes what has come of an answer into the scatter list of its request: all of it, or nothing.
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

/// The opcode and invalidated key of a message for a receive.
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
            answer_msn: 1,
        }
    }

    /// Begins a connection with `ord` READs and atomics at once.
    pub(super) fn start(&mut self, ord: u16) {
        self.ord = ord;
        self.outstanding.clear();
        (self.send_msn, self.read_msn, self.answer_msn) = (1, 1, 1);
    }

    pub(super) fn reset(&mut self) {
        self.sq.clear();
        self.next = 0;
        self.is_sending = false;
        self.start(0);
    }

    pub(super) fn post(&mut self, wr: &SendWr<'_>) -> Result<(), PostReason> {
        // RDMAP has no such message.
        if matches!(wr.op, SendOp::SendImm(_)) {
            return Err(PostReason::InvalidOpcode);
        }
        self.sq.push(wr)
    }

    pub(super) fn unpost(&mut self, count: usize) {
        self.sq.unpost(count);
    }

    /// Whether a message has begun whose end has to follow before any other.
    pub(super) fn is_sending(&self) -> bool {
        self.is_sending
    }

    /// Whether every request that has begun is complete.
    pub(super) fn is_drained(&self) -> bool {
        let begun = |wqe: &SendWqe| wqe.phase != Phase::Posted;
        !self.sq.peek(self.sq.head()).is_some_and(begun)
    }

    /// Completes all requests as flushed.
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

    /// Completes what is done, in order.
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

    /// Ends a request with an error, once those before it are complete.
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

    /// Makes the next segment, if state, fences and depths allow one. `may_start` is false while the
    /// send queue drains.
    pub(super) fn poll(&mut self, tx: &mut Tx<'_>, may_start: bool) -> Result<bool, Fault> {
        while let Some(wqe) = self.sq.peek(self.next) {
            let wqe = *wqe;
            match wqe.phase {
                // What is behind it would complete as flushed, and must not be carried out.
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
                        self.ask(tx, &wqe);
                        self.next += 1;
                        return Ok(true);
                    }
                    (self.offset, self.is_sending) = (0, true);
                }
            }
        }
        Ok(false)
    }

    /// Whether a request waits for earlier ones.
    fn must_wait(&self, wqe: &SendWqe) -> bool {
        if wqe.flags.contains(SendFlags::FENCE) && !self.outstanding.is_empty() {
            return true;
        }
        match wqe.op {
            // An answer may still come for a READ that names the key.
            SendOp::LocalInv(key) => self.sq.names(key, self.next),
            // Without any place it fails, and does not wait.
            _ => {
                wqe.has_response()
                    && self.ord > 0
                    && self.outstanding.len() >= usize::from(self.ord)
            }
        }
    }

    /// Checks a request before anything of it is sent.
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

    /// Sends the request of a READ or an atomic.
    fn ask(&mut self, tx: &mut Tx<'_>, wqe: &SendWqe) {
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
            (None, _) => unreachable!("requests with answers are READs and atomics"),
        }
        self.expect(Some(self.next), atomic.is_some(), wqe.length);
    }

    fn send_read(&self, tx: &mut Tx<'_>, remote: RemoteAddr, size: u32) {
        let number = self.read_msn;
        let read = ReadRequest {
            // The answer names the READ, and not where its bytes go.
            sink_stag: number,
            sink_to: 0,
            size,
            source_stag: remote.rkey.0,
            source_to: remote.addr,
        };
        let queue = Queue::ReadRequest;
        tx.message(Opcode::ReadRequest, queue, number, |out| read.emit(out));
    }

    /// Expects the answer to a request that was just sent.
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

    /// Sends the message by which the responder may send.
    pub(super) fn send_rtr(&mut self, tx: &mut Tx<'_>, rtr: Rtr) {
        let nowhere = RemoteAddr {
            addr: 0,
            rkey: crate::verbs::RKey(0),
        };
        match rtr {
            Rtr::Empty => {
                let start = super::Framer::begin(tx.out);
                tx.framer.end(tx.out, start);
            }
            Rtr::Write => {
                let header = Header {
                    opcode: Opcode::Write,
                    last: true,
                    place: Place::Tagged { stag: 0, to: 0 },
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

    /// Opcode and place of the next segment of a message with data.
    fn plan_segment(&self, wqe: &SendWqe) -> (Opcode, Place) {
        if let SendOp::Write(remote) | SendOp::WriteImm(remote, _) = wqe.op {
            let place = Place::Tagged {
                stag: remote.rkey.0,
                to: remote.addr.wrapping_add(u64::from(self.offset)),
            };
            return (Opcode::Write, place);
        }
        let is_solicited = wqe.flags.contains(SendFlags::SOLICITED);
        let (opcode, invalidate) = send_opcode(&wqe.op, is_solicited);
        let place = Place::Untagged {
            invalidate,
            qn: Queue::Send as u32,
            msn: self.send_msn,
            mo: self.offset,
        };
        (opcode, place)
    }

    /// Sends the next segment of the request that is being sent.
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
            return self.end(tx);
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
            // The message has no end that could follow, so the connection ends even if requests
            // before this one are not complete.
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
            // Behind the end of the WRITE: its immediate data come next.
            self.offset = wqe.length + 1;
            return Ok(());
        }
        if matches!(place, Place::Untagged { .. }) {
            self.send_msn = self.send_msn.wrapping_add(1);
        }
        self.end(tx)
    }

    /// The message of a request has been sent.
    fn end(&mut self, tx: &mut Tx<'_>) -> Result<(), Fault> {
        self.is_sending = false;
        self.sq.wqe_mut(self.next).phase = Phase::Executed;
        self.next += 1;
        self.retire(tx.cfg, tx.events)
    }

    /// Takes a segment of the answer to a READ.
    ///
    /// # Errors
    /// The reason for which the connection ends.
    pub(super) fn handle_read_response(
        &mut self,
        cfg: &RdmapConfig,
        mrs: &MrTable,
        events: &mut Vec<RcEvent>,
        header: &Header,
        payload: &[u8],
    ) -> Result<(), Reason> {
        let Place::Tagged { stag, to } = header.place else {
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
                // The connection ends in any case, by this reason.
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
            true => self.answered(cfg, events),
            false => Ok(()),
        }
    }

    /// Takes the answer to an atomic.
    ///
    /// # Errors
    /// The reason for which the connection ends.
    pub(super) fn handle_atomic_response(
        &mut self,
        cfg: &RdmapConfig,
        mrs: &MrTable,
        events: &mut Vec<RcEvent>,
        msn: u32,
        payload: &[u8],
    ) -> Result<(), Reason> {
        if msn != self.answer_msn {
            return Err(Reason::InvalidMsn);
        }
        let response = AtomicResponse::parse(payload).ok_or(Reason::Framing)?;
        let asked = self.outstanding.front();
        let asked = asked.filter(|it| it.is_atomic && it.number == response.id);
        let at = asked.and_then(|it| it.at).ok_or(Reason::UnexpectedOpcode)?;
        self.answer_msn = self.answer_msn.wrapping_add(1);
        let value = response.original.to_ne_bytes();
        if scatter(self.sq.sges(at), cfg, mrs, 0, &value).is_err() {
            // As above.
            let _ = self.fail(at, WcStatus::LocProtErr, cfg, events);
            return Err(Reason::DdpCatastrophic);
        }
        self.answered(cfg, events)
    }

    /// The oldest READ or atomic has its answer in full.
    fn answered(&mut self, cfg: &RdmapConfig, events: &mut Vec<RcEvent>) -> Result<(), Reason> {
        let done = self.outstanding.pop_front().expect("it was answered");
        if let Some(at) = done.at {
            self.sq.wqe_mut(at).phase = Phase::Executed;
        }
        // A request behind it has failed, and had to wait for this one.
        self.retire(cfg, events)
            .map_err(|Fault| Reason::RdmapCatastrophic)
    }

    /// The peer has ended the connection because of a READ or an atomic, by its number: that one has
    /// failed. Answers whether there is any.
    pub(super) fn refuse(
        &mut self,
        cfg: &RdmapConfig,
        events: &mut Vec<RcEvent>,
        number: u32,
        status: WcStatus,
    ) -> bool {
        let mut all = self.outstanding.iter();
        let named = all.find(|it| it.number == number);
        // Linux's `siw` names another number, and answers one after the other.
        let refused = named.or(self.outstanding.front());
        let Some(at) = refused.and_then(|it| it.at) else {
            return false;
        };
        // The answers to those before it will not come any more.
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
