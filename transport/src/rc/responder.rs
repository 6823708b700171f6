//! The responder: takes requests, moves data, answers (IBTA 9.7.3 to 9.7.5, 9.9.3).
//!
//! A request packet is checked in this order, and nothing changes before the last check: PSN, place
//! in its message, payload length, right of the queue pair, receive buffer or key, range and right.
//!
//! # What it answers, and when
//!
//! Answers leave in the order of their requests. READs and atomics wait in a ring of responder
//! resources, in PSN order; an acknowledgement or a NAK leaves when no answer of an earlier PSN is
//! waiting. READ responses are made packet by packet as they are sent, so a long READ costs
//! nothing. There is at most one acknowledgement and one NAK waiting, so that no number of
//! duplicates makes a queue.

mod answer;

use std::collections::VecDeque;
use std::time::Instant;

use riser_memory::fault;
use riser_state::become_state;

use self::answer::{Resource, ResourceKind};
use super::ctx::{Ctx, Fault};
use super::message::{WritePart, payload_len, plan_packets};
use super::pacing::Pacer;
use super::state::{Inbound, ResponderState};
use super::{MAX_MESSAGE, RECENT, RcEvent, RecvWqe, RtrParams};
use crate::verbs::{Access, AsyncEvent, Completion, PdId, RKey, Sge, WcOpcode, WcStatus, WrId};
use crate::wire::{AethSyndrome, Msn, NakCode, Operation, Packet, Psn, RnrTimer};

#[derive(Debug)]
pub(super) struct Responder {
    state: ResponderState,
    /// Protection domain in which keys are looked up.
    pd: PdId,
    access: Access,
    rnr_timer: RnrTimer,
    /// The PSN that comes next.
    expected: Psn,
    /// MSN: messages completed, modulo 2^24.
    msn: Msn,
    inbound: Inbound,
    recv: RecvWqe,
    is_bound: bool,
    /// Oldest first; bounded by `max_resources`.
    resources: VecDeque<Resource>,
    max_resources: usize,
    /// Number of resources with something to send.
    waiting: usize,
    /// The newest packet of a SEND or a WRITE that was taken in. No acknowledgement names a later
    /// one: a PSN of a READ's or an atomic's would stand for its answer, which may have been lost
    /// (`rdma_rxe` then completes a READ without its data).
    newest: Psn,
    /// The newest packet to acknowledge.
    ack: Option<Psn>,
    nak: Option<(Psn, AethSyndrome)>,
    /// Packets since the last acknowledgement that did not ask for one.
    unacked: u32,
    pacer: Pacer,
    /// A READ response that waits for its time is looked at again then.
    paced: Option<Instant>,
}

impl Responder {
    pub(super) fn new(pd: PdId, max_recv_sge: u32) -> Self {
        Self::with_recv(pd, RecvWqe::new(max_recv_sge))
    }

    fn with_recv(pd: PdId, recv: RecvWqe) -> Self {
        Self {
            state: ResponderState::Expecting,
            pd,
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
            newest: Psn::default(),
            ack: None,
            nak: None,
            unacked: 0,
            pacer: Pacer::default(),
            paced: None,
        }
    }

    pub(super) fn start(&mut self, params: &RtrParams) {
        self.expected = params.rq_psn;
        self.newest = params.rq_psn.prev();
        self.access = params.access & Access::REMOTE;
        self.rnr_timer = params.min_rnr_timer;
        self.max_resources = usize::from(params.max_dest_rd_atomic);
        // The room for all of them is allocated here, so that accepting a READ allocates nothing.
        self.resources = VecDeque::with_capacity(self.max_resources);
    }

    /// Bytes of memory of one with these bounds, besides itself.
    pub(super) const fn memory(max_recv_sge: u32, resources: u8) -> usize {
        resources as usize * size_of::<Resource>() + max_recv_sge as usize * size_of::<Sge>()
    }

    pub(super) fn footprint(&self) -> usize {
        self.resources.capacity() * size_of::<Resource>() + self.recv.footprint()
    }

    /// Forgets everything, as a queue pair in RESET does.
    pub(super) fn reset(&mut self) {
        // The scatter list's memory is kept for the next connection.
        let recv = std::mem::replace(&mut self.recv, RecvWqe::new(0));
        *self = Self::with_recv(self.pd, recv);
    }

    /// Drops every answer that waits, for a NAK that overtakes them.
    fn silence(&mut self) {
        self.resources.clear();
        self.waiting = 0;
        self.ack = None;
        self.nak = None;
        // What came behind it will not be acknowledged either.
        self.unacked = 0;
    }

    pub(super) fn is_bound(&self) -> bool {
        self.is_bound
    }

    pub(super) fn set_domain(&mut self, pd: PdId) {
        self.pd = pd;
    }

    /// Refuses the packet that comes next as an invalid request.
    pub(super) fn refuse_expected(&mut self, ctx: &mut Ctx<'_>) -> Fault {
        self.refuse(ctx, Refusal::InvalidRequest)
    }

    pub(super) fn set_access(&mut self, access: Access) {
        self.access = access & Access::REMOTE;
    }

    /// Changes the number of READs and atomics that are held.
    pub(super) fn set_max_resources(&mut self, count: u8) {
        self.max_resources = usize::from(count);
        let missing = self.max_resources.saturating_sub(self.resources.len());
        self.resources.reserve_exact(missing);
        self.forget_answered(self.max_resources);
    }

    /// The connection has another path from now on. Nothing is known about it, and the peer is to
    /// learn of it by an acknowledgement: it may have nothing to send.
    pub(super) fn on_migrated(&mut self) {
        self.pacer = Pacer::default();
        self.paced = None;
        if !self.has_failed() {
            self.ack = Some(self.newest);
        }
    }

    /// Returns whether a request is the one that comes next, or one that the peer may repeat.
    pub(super) fn knows(&self, psn: Psn) -> bool {
        psn.distance_to(self.expected) <= RECENT || self.resources.iter().any(|r| r.has(psn))
    }

    pub(super) fn set_min_rnr_timer(&mut self, timer: RnrTimer) {
        self.rnr_timer = timer;
    }

    /// Gives up the receive of the message in progress, if there is one.
    pub(super) fn unbind(&mut self) -> Option<WrId> {
        self.inbound = Inbound::None;
        std::mem::take(&mut self.is_bound).then_some(self.recv.wr_id)
    }

    /// PSN of the next request packet.
    pub(super) fn expected(&self) -> Psn {
        self.expected
    }

    /// Time at which a READ response that is paced may leave.
    pub(super) fn deadline(&self) -> Option<Instant> {
        self.paced
    }

    /// Ends a wait whose time has come: the next poll sends what waited.
    pub(super) fn handle_timeout(&mut self, now: Instant) {
        self.paced = self.paced.filter(|&at| at > now);
    }

    /// The peer, or a router on the way to it, has too many of our packets.
    pub(super) fn on_cnp(&mut self, now: Instant) {
        self.pacer.on_cnp(now);
    }

    pub(super) fn has_failed(&self) -> bool {
        self.state == ResponderState::Failed
    }

    /// Takes in a request packet.
    pub(super) fn handle_request(
        &mut self,
        ctx: &mut Ctx<'_>,
        pkt: &Packet<'_>,
    ) -> Result<(), Fault> {
        // Nothing behind a refused request may be carried out: the peer takes it for not done.
        if self.state == ResponderState::Failed {
            return Ok(());
        }
        let psn = pkt.bth.psn();
        // A PSN from the half of the numbers before the expected one has been taken in. A
        // requester must never have more than that half outstanding, so the distinction is exact.
        if psn.is_before(self.expected) {
            ctx.counters.duplicates += 1;
            self.on_duplicate(ctx, pkt);
            return Ok(());
        }
        if psn != self.expected {
            ctx.counters.out_of_order += 1;
            // One NAK for each gap: every packet behind a lost one arrives here, and a NAK for
            // each would make the requester go back as often.
            if self.state == ResponderState::Expecting {
                self.announce(AethSyndrome::Nak(NakCode::PsnSequence));
            }
            return Ok(());
        }
        if self.state == ResponderState::NakSent {
            // The arrival of the packet overtakes a NAK for it that has not left.
            become_state(&mut self.state, ResponderState::Expecting);
            self.nak = None;
        }
        self.on_expected(ctx, pkt)
            .map_err(|refusal| self.refuse(ctx, refusal))
    }

    fn on_expected(&mut self, ctx: &mut Ctx<'_>, pkt: &Packet<'_>) -> Result<(), Refusal> {
        // A request is refused where it stands, with all before it intact, so the first check is
        // on the order of opcodes (IBTA 9.7.4.1.1).
        let is_start = pkt.op.position.is_start();
        let fits = match (self.inbound, pkt.op.operation) {
            (Inbound::None, _) => is_start,
            (Inbound::Send { .. }, Operation::Send) => !is_start,
            (Inbound::Write { .. }, Operation::Write) => !is_start,
            _ => false,
        };
        let mtu = ctx.link.mtu.bytes() as usize;
        // A packet in the middle has to be full (IBTA C9-92). Otherwise sender and receiver would
        // disagree about where the next one's data belongs.
        if !fits || !pkt.op.payload.allows(pkt.payload.len(), mtu) {
            return Err(Refusal::InvalidRequest);
        }
        let is_taken = match pkt.op.operation {
            Operation::Send => self.on_send(ctx, pkt)?,
            Operation::Write => self.on_write(ctx, pkt)?,
            Operation::ReadRequest => return self.on_read(ctx, pkt),
            _ => return self.on_atomic(ctx, pkt),
        };
        // Neither PSN nor MSN nor a byte of memory has changed: the repetition finds what this
        // one found.
        if !is_taken {
            self.announce(AethSyndrome::RnrNak(self.rnr_timer));
            return Ok(());
        }
        self.newest = self.expected;
        self.expected = self.expected.next();
        // Messages are counted for requesters that go by the MSN; ours goes by the PSN alone.
        if pkt.op.position.is_end() {
            self.msn = self.msn.next();
        }
        self.count(ctx, pkt);
        Ok(())
    }

    /// Sends a NAK for the packet that comes next, once: the packets behind it are dropped until it
    /// arrives (IBTA 9.7.5).
    fn announce(&mut self, syndrome: AethSyndrome) {
        // A NAK says which packet comes next, so it acknowledges all before it at the same time.
        become_state(&mut self.state, ResponderState::NakSent);
        self.nak = Some((self.expected, syndrome));
    }

    /// Acknowledges all that has been taken in, if the packet asks for that or enough have not.
    fn count(&mut self, ctx: &Ctx<'_>, pkt: &Packet<'_>) {
        // Peers that ask only at the end of a long message would not move their window in its
        // middle. Hence also without being asked.
        self.unacked += 1;
        if pkt.bth.is_ack_requested() || self.unacked >= ctx.cfg.ack_every {
            // The newest alone: an acknowledgement covers everything before it.
            self.ack = Some(self.newest);
            self.unacked = 0;
        }
    }

    /// A packet of a SEND; false if there is no receive for it.
    fn on_send(&mut self, ctx: &mut Ctx<'_>, pkt: &Packet<'_>) -> Result<bool, Refusal> {
        let received = match self.inbound {
            Inbound::Send { received } => received,
            _ => 0,
        };
        // The key is checked before the payload is written: a packet that is refused must change
        // nothing. It is invalidated last, when nothing can fail any more.
        let invalidated = pkt.ext.ieth.map(|i| RKey(i.rkey()));
        if let Some(key) = invalidated {
            ctx.mrs
                .check_invalidate(self.pd, ctx.cfg.qp, key)
                .map_err(|_| Refusal::RemoteAccess)?;
        }
        // The receive is taken with the first packet and stays bound. A shared queue could have
        // given the next one to another connection meanwhile.
        if !self.is_bound {
            if !ctx.rq.pop(&mut self.recv) {
                return Ok(false);
            }
            self.is_bound = true;
        }
        let total = received + payload_len(pkt);
        // The peer's fault: it has to know how long our receives are. Both ends report it.
        if total > self.recv.length {
            return Err(self.fail_receive(ctx, WcStatus::LocLenErr, Refusal::InvalidRequest));
        }
        // Our owner's fault: a receive with a bad key. The peer learns of an operational error
        // only.
        let (pd, mrs) = (self.pd, &*ctx.mrs);
        let placed = self.recv.scatter(pd, mrs, received as usize, pkt.payload);
        if placed.is_err() {
            return Err(self.fail_receive(ctx, WcStatus::LocProtErr, Refusal::RemoteOperation));
        }
        self.inbound = Inbound::Send { received: total };
        if pkt.op.position.is_end() {
            if let Some(key) = invalidated {
                ctx.mrs
                    .invalidate(self.pd, ctx.cfg.qp, key)
                    .map_err(|_| Refusal::RemoteAccess)?;
            }
            self.complete_receive(ctx, pkt, WcOpcode::Recv, total, invalidated);
        }
        Ok(true)
    }

    /// A packet of an RDMA WRITE; false if it needs a receive and there is none.
    fn on_write(&mut self, ctx: &mut Ctx<'_>, pkt: &Packet<'_>) -> Result<bool, Refusal> {
        let part = WritePart::of(self.inbound, pkt).filter(|part| part.is_allowed(self.access));
        let part = part.ok_or(Refusal::InvalidRequest)?;
        // The whole rest of the range, not this packet's part: a message that would leave the
        // region is refused before its first byte. And again with each packet, since the owner
        // may have invalidated the key in the middle of a message.
        let span = ctx
            .mrs
            .resolve_remote_head(
                self.pd,
                ctx.cfg.qp,
                part.rkey,
                part.addr,
                part.remaining,
                pkt.payload.len(),
                Access::REMOTE_WRITE,
            )
            .map_err(|_| Refusal::RemoteAccess)?;
        // Before the payload is written, so that a WRITE that must wait for a receive has done
        // nothing.
        if pkt.op.has_imm() {
            if !ctx.rq.pop(&mut self.recv) {
                return Ok(false);
            }
            self.is_bound = true;
        }
        span.write(0, pkt.payload);
        if !pkt.op.position.is_end() {
            self.inbound = part.rest();
            return Ok(true);
        }
        self.inbound = Inbound::None;
        if pkt.op.has_imm() {
            // The length of the WRITE; the receive itself gets no data.
            self.complete_receive(ctx, pkt, WcOpcode::RecvWriteImm, part.total, None);
        }
        Ok(true)
    }

    fn on_read(&mut self, ctx: &mut Ctx<'_>, pkt: &Packet<'_>) -> Result<(), Refusal> {
        let reth = pkt.ext.reth.ok_or(Refusal::InvalidRequest)?;
        let (rkey, addr, len) = (RKey(reth.rkey()), reth.va(), reth.dma_len());
        // The right of the queue pair is an attribute of the connection, so its lack makes the
        // opcode an invalid one; a key without the right is an access error.
        let may_read = self.access.contains(Access::REMOTE_READ);
        if !may_read || len > MAX_MESSAGE {
            return Err(Refusal::InvalidRequest);
        }
        // Checked now, although every response resolves the key again: a READ that cannot be
        // answered is refused by its own PSN and takes no resource.
        ctx.mrs
            .resolve_remote_head(self.pd, ctx.cfg.qp, rkey, addr, len, 0, Access::REMOTE_READ)
            .map_err(|_| Refusal::RemoteAccess)?;
        let packets = plan_packets(len, ctx.link.mtu.bytes());
        let pd = self.pd;
        let read = ResourceKind::Read {
            pd,
            rkey,
            addr,
            len,
        };
        self.accept(read, packets)
    }

    fn on_atomic(&mut self, ctx: &mut Ctx<'_>, pkt: &Packet<'_>) -> Result<(), Refusal> {
        let eth = pkt.ext.atomic_eth.ok_or(Refusal::InvalidRequest)?;
        let may_run = self.access.contains(Access::REMOTE_ATOMIC);
        // An address that is not aligned is an invalid request, with a valid key too.
        if !may_run || !eth.va().is_multiple_of(8) {
            return Err(Refusal::InvalidRequest);
        }
        // Before the memory changes: an atomic that was refused must not have run.
        self.check_room()?;
        let span = ctx
            .mrs
            .resolve_remote(
                self.pd,
                ctx.cfg.qp,
                RKey(eth.rkey()),
                eth.va(),
                8,
                Access::REMOTE_ATOMIC,
            )
            .map_err(|_| Refusal::RemoteAccess)?;
        let mut bytes = [0; 8];
        let faults = fault::count();
        span.read(0, &mut bytes);
        // In the byte order of this host, as the memory is its own; the operands were converted
        // on the wire (`wire/ext.rs`).
        let original = u64::from_ne_bytes(bytes);
        let value = match pkt.op.operation {
            Operation::FetchAdd => original.wrapping_add(eth.swap_or_add()),
            _ if original == eth.compare() => eth.swap_or_add(),
            _ => original,
        };
        span.write(0, &value.to_ne_bytes());
        // Its answer is kept, so it is not read again as that of a READ is.
        if fault::count() != faults {
            return Err(Refusal::RemoteAccess);
        }
        // The old value is kept with the resource. A duplicate gets it again, since a second
        // execution would add twice.
        self.accept(ResourceKind::Atomic { original }, 1)
    }

    fn complete_receive(
        &mut self,
        ctx: &mut Ctx<'_>,
        pkt: &Packet<'_>,
        opcode: WcOpcode,
        byte_len: u32,
        invalidated: Option<RKey>,
    ) {
        // The receive goes back to its owner with the completion, so nothing may be written to it
        // after this.
        self.is_bound = false;
        self.inbound = Inbound::None;
        let (qp, qp_num) = (ctx.cfg.qp, ctx.cfg.qp_num);
        let wr_id = self.recv.wr_id;
        ctx.out.push(RcEvent::Recv(Completion {
            byte_len,
            imm: pkt.ext.imm.map(|i| i.data()),
            invalidated,
            solicited: pkt.bth.is_solicited(),
            ..Completion::new(wr_id, WcStatus::Success, opcode, qp, qp_num)
        }));
    }

    fn fail_receive(&mut self, ctx: &mut Ctx<'_>, status: WcStatus, refusal: Refusal) -> Refusal {
        // Its completion is made here with the error; without this the flush would complete it
        // twice.
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
        // A key that goes away during a READ response can fail a responder that has failed.
        if !self.has_failed() {
            become_state(&mut self.state, ResponderState::Failed);
        }
        // The NAK names the refused packet, which is the expected one: all before it is
        // acknowledged.
        self.nak = Some((self.expected, AethSyndrome::Nak(code)));
        ctx.out.push(RcEvent::Async(event));
        Fault
    }
}

/// A request that ends the connection, and the NAK that says so.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Refusal {
    InvalidRequest,
    RemoteAccess,
    RemoteOperation,
}
