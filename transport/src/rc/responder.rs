//! The responder: takes requests, moves data, answers (IBTA 9.7.3 to 9.7.5, 9.9.3).
//!
//! A request packet is checked in this order, and nothing changes before the last check: PSN, place in
//! its message, payload length, right of the queue pair, receive buffer or key, range and right.
//!
//! # What it answers, and when
//!
//! Answers leave in the order of their requests. READs and atomics wait in a ring of responder
//! resources, in PSN order; an acknowledgement or a NAK leaves when no answer of an earlier PSN is
//! waiting. READ responses are made packet by packet as they are sent, so a long READ costs nothing.
//! There is at most one acknowledgement and one NAK waiting, so that no number of duplicates makes a
//! queue.

use std::collections::VecDeque;

use super::qp::{Ctx, Fault};
use super::requester::{plan_packets, walk};
use super::state::{Inbound, ResponderState};
use super::{MAX_MESSAGE, RcEvent, RecvWqe, RtrParams, TxPacket};
use crate::roce::mr::KeyError;
use crate::verbs::{Access, AsyncEvent, Completion, RKey, WcOpcode, WcStatus, WrId};
use crate::wire::{
    Aeth, AethSyndrome, AtomicAckEth, Bth, Credit, ExtHeaders, Msn, NakCode, Opcode, Operation,
    Packet, Psn, RnrTimer, emit_headers,
};

/// A READ or an atomic that was accepted, kept to be answered again (IBTA 9.7.5.1.2).
#[derive(Clone, Copy, Debug)]
struct Resource {
    first: Psn,
    packets: u32,
    kind: ResourceKind,
    msn: Msn,
    pending: Option<Pending>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ResourceKind {
    Read { rkey: RKey, addr: u64, len: u32 },
    Atomic { original: u64 },
}

/// What of a resource is still to be sent, in packets from its first.
#[derive(Clone, Copy, Debug)]
struct Pending {
    start: u32,
    next: u32,
    end: u32,
    /// Whether it has been answered before.
    is_replay: bool,
}

#[derive(Debug)]
pub(super) struct Responder {
    state: ResponderState,
    access: Access,
    rnr_timer: RnrTimer,
    /// The PSN that comes next.
    expected: Psn,
    /// Messages completed.
    msn: Msn,
    inbound: Inbound,
    recv: RecvWqe,
    is_bound: bool,
    /// Oldest first; bounded by `max_resources`.
    resources: VecDeque<Resource>,
    max_resources: usize,
    /// How many resources have something to send.
    waiting: usize,
    /// The newest packet to acknowledge.
    ack: Option<Psn>,
    nak: Option<(Psn, AethSyndrome)>,
    /// Packets since the last acknowledgement that did not ask for one.
    unacked: u32,
}

impl Responder {
    pub(super) fn new(max_recv_sge: u32) -> Self {
        Self::with_recv(RecvWqe::new(max_recv_sge))
    }

    fn with_recv(recv: RecvWqe) -> Self {
        Self {
            state: ResponderState::Expecting,
            access: Access::empty(),
            rnr_timer: RnrTimer::new(0),
            expected: Psn::default(),
            msn: Msn::default(),
            inbound: Inbound::None,
            recv,
            is_bound: false,
            resources: VecDeque::new(),
            max_resources: 0,
            waiting: 0,
            ack: None,
            nak: None,
            unacked: 0,
        }
    }

    pub(super) fn start(&mut self, params: &RtrParams) {
        self.expected = params.rq_psn;
        self.access = params.access & Access::REMOTE;
        self.rnr_timer = params.min_rnr_timer;
        self.max_resources = usize::from(params.max_dest_rd_atomic);
        self.resources = VecDeque::with_capacity(self.max_resources);
    }

    /// Forgets everything, as a queue pair in RESET does.
    pub(super) fn reset(&mut self) {
        let recv = std::mem::replace(&mut self.recv, RecvWqe::new(0));
        *self = Self::with_recv(recv);
    }

    /// Drops every answer that waits.
    pub(super) fn silence(&mut self) {
        self.resources.clear();
        self.waiting = 0;
        self.ack = None;
        self.nak = None;
    }

    pub(super) fn set_access(&mut self, access: Access) {
        self.access = access & Access::REMOTE;
    }

    pub(super) fn set_min_rnr_timer(&mut self, timer: RnrTimer) {
        self.rnr_timer = timer;
    }

    /// Gives up the receive of the message in progress, if there is one.
    pub(super) fn unbind(&mut self) -> Option<WrId> {
        self.inbound = Inbound::None;
        std::mem::take(&mut self.is_bound).then_some(self.recv.wr_id)
    }

    pub(super) fn has_failed(&self) -> bool {
        self.state == ResponderState::Failed
    }

    pub(super) fn has_output(&self) -> bool {
        self.waiting > 0 || self.ack.is_some() || self.nak.is_some()
    }

    /// Whether the next answer is an acknowledgement, a NAK or an atomic's.
    pub(super) fn is_urgent(&self) -> bool {
        match self.front() {
            Some(at) => {
                let resource = &self.resources[at];
                matches!(resource.kind, ResourceKind::Atomic { .. })
                    || self
                        .ack
                        .is_some_and(|psn| psn.is_before(resource.next_psn()))
            }
            None => self.has_output(),
        }
    }

    /// The oldest resource with something to send.
    fn front(&self) -> Option<usize> {
        if self.waiting == 0 {
            return None;
        }
        self.resources.iter().position(|r| r.pending.is_some())
    }

    fn credit(&self, ctx: &Ctx<'_>) -> AethSyndrome {
        AethSyndrome::Ack(if ctx.cfg.has_srq {
            Credit::UNLIMITED
        } else {
            // The message in progress is not complete but has its receive.
            Credit::at_most(ctx.rq.len() as u32 + u32::from(self.is_bound))
        })
    }

    // ---- requests ----

    /// Takes in a request packet.
    pub(super) fn handle_request(
        &mut self,
        ctx: &mut Ctx<'_>,
        pkt: &Packet<'_>,
    ) -> Result<(), Fault> {
        if self.state == ResponderState::Failed {
            return Ok(());
        }
        let psn = pkt.bth.psn();
        if psn.is_before(self.expected) {
            ctx.counters.duplicates += 1;
            self.on_duplicate(pkt, ctx.link.mtu.bytes() as u32);
            return Ok(());
        }
        if psn != self.expected {
            ctx.counters.out_of_order += 1;
            if self.state == ResponderState::Expecting {
                self.state = ResponderState::NakSent;
                self.nak = Some((self.expected, AethSyndrome::Nak(NakCode::PsnSequence)));
            }
            return Ok(());
        }
        // Whatever was announced about this packet is overtaken by its arrival.
        self.state = ResponderState::Expecting;
        self.nak = None;
        self.on_expected(ctx, pkt)
            .map_err(|refusal| self.refuse(ctx, refusal))
    }

    fn on_expected(&mut self, ctx: &mut Ctx<'_>, pkt: &Packet<'_>) -> Result<(), Refusal> {
        let is_start = pkt.op.position.is_start();
        let fits = match (self.inbound, pkt.op.operation) {
            (Inbound::None, _) => is_start,
            (Inbound::Send { .. }, Operation::Send) => !is_start,
            (Inbound::Write { .. }, Operation::Write) => !is_start,
            _ => false,
        };
        let mtu = ctx.link.mtu.bytes();
        if !fits || !pkt.op.payload.allows(pkt.payload.len(), mtu) {
            return Err(Refusal::InvalidRequest);
        }
        let is_taken = match pkt.op.operation {
            Operation::Send => self.on_send(ctx, pkt)?,
            Operation::Write => self.on_write(ctx, pkt)?,
            Operation::ReadRequest => return self.on_read(ctx, pkt),
            _ => return self.on_atomic(ctx, pkt),
        };
        if !is_taken {
            self.state = ResponderState::NakSent;
            self.nak = Some((self.expected, AethSyndrome::RnrNak(self.rnr_timer)));
            return Ok(());
        }
        self.unacked += 1;
        if pkt.bth.is_ack_requested() || self.unacked >= ctx.cfg.ack_every {
            self.ack = Some(self.expected);
            self.unacked = 0;
        }
        self.expected = self.expected.next();
        if pkt.op.position.is_end() {
            self.msn = self.msn.next();
        }
        Ok(())
    }

    /// A packet of a SEND; false if there is no receive for it.
    fn on_send(&mut self, ctx: &mut Ctx<'_>, pkt: &Packet<'_>) -> Result<bool, Refusal> {
        let received = match self.inbound {
            Inbound::Send { received } => received,
            _ => 0,
        };
        let invalidated = pkt.ext.ieth.map(|i| RKey(i.rkey()));
        if let Some(key) = invalidated {
            ctx.mrs
                .check_invalidate(ctx.cfg.pd, key)
                .map_err(|_| Refusal::RemoteAccess)?;
        }
        if !self.is_bound {
            if !ctx.rq.pop(&mut self.recv) {
                return Ok(false);
            }
            self.is_bound = true;
        }
        let total = received + pkt.payload.len() as u32;
        if total > self.recv.length {
            return Err(self.fail_receive(ctx, WcStatus::LocLenErr, Refusal::InvalidRequest));
        }
        if self.scatter(ctx, received as usize, pkt.payload).is_err() {
            return Err(self.fail_receive(ctx, WcStatus::LocProtErr, Refusal::RemoteOperation));
        }
        self.inbound = Inbound::Send { received: total };
        if pkt.op.position.is_end() {
            if let Some(key) = invalidated {
                ctx.mrs
                    .invalidate(ctx.cfg.pd, key)
                    .map_err(|_| Refusal::RemoteAccess)?;
            }
            self.complete_receive(ctx, pkt, WcOpcode::Recv, total, invalidated);
        }
        Ok(true)
    }

    /// Writes a packet of a SEND into the bound receive: all of it, or nothing.
    fn scatter(&self, ctx: &Ctx<'_>, offset: usize, data: &[u8]) -> Result<(), KeyError> {
        let (pd, mrs) = (ctx.cfg.pd, &*ctx.mrs);
        let sges = self.recv.sges();
        walk(sges, offset, data.len(), |sge, _, _, _| {
            mrs.resolve_local(pd, sge, true).map(drop)
        })?;
        walk(sges, offset, data.len(), |sge, within, done, take| {
            let span = mrs.resolve_local(pd, sge, true)?;
            span.write(within, &data[done..done + take]);
            Ok(())
        })
    }

    /// A packet of an RDMA WRITE; false if it needs a receive and there is none.
    fn on_write(&mut self, ctx: &mut Ctx<'_>, pkt: &Packet<'_>) -> Result<bool, Refusal> {
        let len = pkt.payload.len() as u32;
        let (rkey, addr, remaining, total) = match (self.inbound, pkt.ext.reth) {
            (
                Inbound::Write {
                    rkey,
                    addr,
                    remaining,
                    total,
                },
                None,
            ) => (rkey, addr, remaining, total),
            (_, Some(reth)) => (RKey(reth.rkey()), reth.va(), reth.dma_len(), reth.dma_len()),
            _ => return Err(Refusal::InvalidRequest),
        };
        let is_end = pkt.op.position.is_end();
        let fits = if is_end {
            len == remaining
        } else {
            len < remaining
        };
        if !fits || total > MAX_MESSAGE {
            return Err(Refusal::InvalidRequest);
        }
        // A WRITE of no bytes needs neither right nor key: peers send one to wake a connection.
        if total > 0 && !self.access.contains(Access::REMOTE_WRITE) {
            return Err(Refusal::InvalidRequest);
        }
        let span = ctx
            .mrs
            .resolve_remote(ctx.cfg.pd, rkey, addr, remaining, Access::REMOTE_WRITE)
            .map_err(|_| Refusal::RemoteAccess)?;
        if pkt.op.has_imm() {
            if !ctx.rq.pop(&mut self.recv) {
                return Ok(false);
            }
            self.is_bound = true;
        }
        span.write(0, pkt.payload);
        if !is_end {
            self.inbound = Inbound::Write {
                rkey,
                addr: addr.wrapping_add(u64::from(len)),
                remaining: remaining - len,
                total,
            };
            return Ok(true);
        }
        self.inbound = Inbound::None;
        if pkt.op.has_imm() {
            self.complete_receive(ctx, pkt, WcOpcode::RecvWriteImm, total, None);
        }
        Ok(true)
    }

    fn on_read(&mut self, ctx: &mut Ctx<'_>, pkt: &Packet<'_>) -> Result<(), Refusal> {
        let reth = pkt.ext.reth.ok_or(Refusal::InvalidRequest)?;
        let (rkey, addr, len) = (RKey(reth.rkey()), reth.va(), reth.dma_len());
        let may_read = self.access.contains(Access::REMOTE_READ);
        if !may_read || len > MAX_MESSAGE {
            return Err(Refusal::InvalidRequest);
        }
        ctx.mrs
            .resolve_remote(ctx.cfg.pd, rkey, addr, len, Access::REMOTE_READ)
            .map_err(|_| Refusal::RemoteAccess)?;
        let packets = plan_packets(len, ctx.link.mtu.bytes() as u32);
        self.accept(ResourceKind::Read { rkey, addr, len }, packets)
    }

    fn on_atomic(&mut self, ctx: &mut Ctx<'_>, pkt: &Packet<'_>) -> Result<(), Refusal> {
        let eth = pkt.ext.atomic_eth.ok_or(Refusal::InvalidRequest)?;
        let may_run = self.access.contains(Access::REMOTE_ATOMIC);
        if !may_run || !eth.va().is_multiple_of(8) {
            return Err(Refusal::InvalidRequest);
        }
        self.check_room()?;
        let span = ctx
            .mrs
            .resolve_remote(
                ctx.cfg.pd,
                RKey(eth.rkey()),
                eth.va(),
                8,
                Access::REMOTE_ATOMIC,
            )
            .map_err(|_| Refusal::RemoteAccess)?;
        let mut bytes = [0; 8];
        span.read(0, &mut bytes);
        let original = u64::from_ne_bytes(bytes);
        let value = match pkt.op.operation {
            Operation::FetchAdd => original.wrapping_add(eth.swap_or_add()),
            _ if original == eth.compare() => eth.swap_or_add(),
            _ => original,
        };
        span.write(0, &value.to_ne_bytes());
        self.accept(ResourceKind::Atomic { original }, 1)
    }

    /// The peer must not have more READs and atomics outstanding than there are resources. One that
    /// waits only to be answered again does not count: the peer has its answer.
    fn check_room(&self) -> Result<(), Refusal> {
        let is_full = self.resources.len() >= self.max_resources;
        let oldest = self.resources.front().and_then(|r| r.pending);
        if is_full && (self.max_resources == 0 || oldest.is_some_and(|p| !p.is_replay)) {
            return Err(Refusal::InvalidRequest);
        }
        Ok(())
    }

    fn accept(&mut self, kind: ResourceKind, packets: u32) -> Result<(), Refusal> {
        self.check_room()?;
        if self.resources.len() == self.max_resources
            && let Some(oldest) = self.resources.pop_front()
            && oldest.pending.is_some()
        {
            self.waiting -= 1;
        }
        self.msn = self.msn.next();
        self.resources.push_back(Resource {
            first: self.expected,
            packets,
            kind,
            msn: self.msn,
            pending: Some(Pending {
                start: 0,
                next: 0,
                end: packets,
                is_replay: false,
            }),
        });
        self.waiting += 1;
        self.unacked = 0;
        self.expected = self.expected.add(packets);
        Ok(())
    }

    /// A packet that was taken in before: SENDs and WRITEs are acknowledged again, READs and atomics
    /// answered again if their resource is still there (IBTA 9.7.5.1.4, 9.7.5.1.5).
    fn on_duplicate(&mut self, pkt: &Packet<'_>, mtu: u32) {
        let psn = pkt.bth.psn();
        let found = self
            .resources
            .iter_mut()
            .find(|r| psn.is_within(r.first, r.packets));
        match (pkt.op.operation, found) {
            (Operation::Send | Operation::Write, _) => self.ack = Some(self.expected.prev()),
            (_, None) => {}
            (operation, Some(resource)) => {
                let start = resource.first.distance_to(psn);
                let Some(end) = resource.plan_replay(operation, pkt, start, mtu) else {
                    return;
                };
                if resource.pending.is_none() {
                    self.waiting += 1;
                }
                resource.pending = Some(Pending {
                    start,
                    next: start,
                    end,
                    is_replay: true,
                });
            }
        }
    }

    fn complete_receive(
        &mut self,
        ctx: &mut Ctx<'_>,
        pkt: &Packet<'_>,
        opcode: WcOpcode,
        byte_len: u32,
        invalidated: Option<RKey>,
    ) {
        self.is_bound = false;
        self.inbound = Inbound::None;
        ctx.out.push(RcEvent::Recv(Completion {
            wr_id: self.recv.wr_id,
            status: WcStatus::Success,
            opcode,
            qp: ctx.cfg.qp,
            byte_len,
            imm: pkt.ext.imm.map(|i| i.data()),
            invalidated,
            src_qp: 0,
            solicited: pkt.bth.is_solicited(),
            vendor_err: 0,
        }));
    }

    fn fail_receive(&mut self, ctx: &mut Ctx<'_>, status: WcStatus, refusal: Refusal) -> Refusal {
        self.is_bound = false;
        ctx.recv_failed(self.recv.wr_id, status);
        refusal
    }

    fn refuse(&mut self, ctx: &mut Ctx<'_>, refusal: Refusal) -> Fault {
        let qp = ctx.cfg.qp;
        let (code, event) = match refusal {
            Refusal::InvalidRequest => (NakCode::InvalidRequest, AsyncEvent::QpReqError(qp)),
            Refusal::RemoteAccess => (NakCode::RemoteAccess, AsyncEvent::QpAccessError(qp)),
            Refusal::RemoteOperation => (NakCode::RemoteOperation, AsyncEvent::QpFatal(qp)),
        };
        self.state = ResponderState::Failed;
        self.nak = Some((self.expected, AethSyndrome::Nak(code)));
        ctx.out.push(RcEvent::Async(event));
        Fault
    }

    // ---- answers ----

    /// The next answer, written into `tx`.
    pub(super) fn poll(&mut self, ctx: &mut Ctx<'_>, tx: &mut TxPacket) -> Result<bool, Fault> {
        while let Some(at) = self.front() {
            let next = self.resources[at].next_psn();
            if let Some(psn) = self.ack
                && psn.is_before(next)
            {
                break;
            }
            if self.answer(ctx, tx, at)? {
                return Ok(true);
            }
        }
        if let Some(psn) = self.ack.take() {
            let syndrome = self.credit(ctx);
            self.emit(
                ctx,
                tx,
                Opcode::RcAcknowledge,
                psn,
                aeth(syndrome, self.msn),
            );
            return Ok(true);
        }
        let Some((psn, syndrome)) = self.nak.take() else {
            return Ok(false);
        };
        match syndrome {
            AethSyndrome::RnrNak(_) => ctx.counters.tx_rnr_naks += 1,
            AethSyndrome::Nak(NakCode::PsnSequence) => ctx.counters.tx_nak_sequence += 1,
            _ => ctx.counters.tx_nak_errors += 1,
        }
        self.emit(
            ctx,
            tx,
            Opcode::RcAcknowledge,
            psn,
            aeth(syndrome, self.msn),
        );
        Ok(true)
    }

    /// The next packet of a resource; false if it turned out to have none.
    fn answer(&mut self, ctx: &mut Ctx<'_>, tx: &mut TxPacket, at: usize) -> Result<bool, Fault> {
        let resource = self.resources[at];
        let Some(mut pending) = resource.pending else {
            return Ok(false);
        };
        let mut ext = aeth(self.credit(ctx), resource.msn);
        let opcode = match resource.kind {
            ResourceKind::Atomic { original } => {
                ext.atomic_ack = Some(AtomicAckEth::new(original));
                Opcode::RcAtomicAcknowledge
            }
            ResourceKind::Read { rkey, addr, len } => {
                let mtu = ctx.link.mtu.bytes() as u32;
                let offset = pending.next * mtu;
                let take = (len - offset).min(mtu);
                let addr = addr.wrapping_add(u64::from(offset));
                let right = Access::REMOTE_READ;
                match ctx.mrs.resolve_remote(ctx.cfg.pd, rkey, addr, take, right) {
                    Ok(span) => span.push_slices(0, span.len(), &mut tx.segments),
                    Err(_) => return self.lose(ctx, at, pending),
                }
                tx.payload_len = take as usize;
                match (
                    pending.next == pending.start,
                    pending.next + 1 == pending.end,
                ) {
                    (true, true) => Opcode::RcReadResponseOnly,
                    (true, false) => Opcode::RcReadResponseFirst,
                    (false, false) => Opcode::RcReadResponseMiddle,
                    (false, true) => Opcode::RcReadResponseLast,
                }
            }
        };
        let psn = resource.next_psn();
        pending.next += 1;
        let is_done = pending.next == pending.end;
        self.resources[at].pending = (!is_done).then_some(pending);
        self.waiting -= usize::from(is_done);
        self.emit(ctx, tx, opcode, psn, ext);
        Ok(true)
    }

    /// The key of a READ stopped working while it was being answered. For a first answer that is an
    /// error of the owner's; a second one may have been asked for by a packet that was long under way,
    /// and is dropped.
    fn lose(&mut self, ctx: &mut Ctx<'_>, at: usize, pending: Pending) -> Result<bool, Fault> {
        let psn = self.resources[at].next_psn();
        self.resources[at].pending = None;
        self.waiting -= 1;
        if pending.is_replay {
            return Ok(false);
        }
        self.silence();
        let fault = self.refuse(ctx, Refusal::RemoteAccess);
        self.nak = self.nak.map(|(_, syndrome)| (psn, syndrome));
        Err(fault)
    }

    fn emit(&self, ctx: &Ctx<'_>, tx: &mut TxPacket, opcode: Opcode, psn: Psn, ext: ExtHeaders) {
        let bth = Bth::new(opcode, ctx.link.dest, psn).with_pad_for(tx.payload_len);
        tx.headers = emit_headers(&bth, &ext);
    }
}

/// A request that ends the connection, and the NAK that says so.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Refusal {
    InvalidRequest,
    RemoteAccess,
    RemoteOperation,
}

fn aeth(syndrome: AethSyndrome, msn: Msn) -> ExtHeaders {
    ExtHeaders {
        aeth: Some(Aeth::new(syndrome, msn)),
        ..ExtHeaders::default()
    }
}

impl Resource {
    fn next_psn(&self) -> Psn {
        self.first.add(self.pending.map_or(0, |p| p.next))
    }

    /// Where a repeated request that begins at packet `start` ends; `None` if it is not part of the
    /// request that was accepted.
    fn plan_replay(
        &self,
        operation: Operation,
        pkt: &Packet<'_>,
        start: u32,
        mtu: u32,
    ) -> Option<u32> {
        match self.kind {
            ResourceKind::Atomic { .. } => {
                matches!(operation, Operation::CmpSwap | Operation::FetchAdd).then_some(1)
            }
            ResourceKind::Read { rkey, addr, len } => {
                let reth = pkt.ext.reth?;
                let offset = start.checked_mul(mtu)?;
                let is_part = operation == Operation::ReadRequest
                    && reth.rkey() == rkey.0
                    && reth.va() == addr.wrapping_add(u64::from(offset))
                    && offset.checked_add(reth.dma_len())? <= len;
                let end = start + plan_packets(reth.dma_len(), mtu);
                // Only the last packet may be short, so a part that ends early ends at a packet.
                (is_part && end <= self.packets).then_some(end)
            }
        }
    }
}
