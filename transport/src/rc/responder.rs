//! Responder: processes requests, transfers data and sends responses (IBTA 9.7.3 to 9.7.5, 9.9.3).
//!
//! A request packet is checked in this order, and there are no side effects before the last check:
//! PSN, position in the message, payload size, access rights of the QP, receive buffer or key,
//! range and access rights of the region.
//!
//! # Responses
//!
//! Responses are sent in the same order as the requests. READs and atomics are stored in a ring of
//! responder resources, in PSN order. An acknowledgement or NAK is sent when there are no pending
//! responses with an earlier PSN. READ response packets are created when they are sent, so a long
//! READ does not need any buffers. There is at most one pending acknowledgement and one pending
//! NAK, so duplicates cannot fill up a queue.

mod resource;

use std::collections::VecDeque;
use std::time::Instant;

use riser_memory::fault;
use riser_state::become_state;

use self::resource::{Resource, ResourceKind};
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
    /// Protection domain used to look up keys.
    pd: PdId,
    access: Access,
    rnr_timer: RnrTimer,
    /// Next expected PSN.
    expected: Psn,
    /// MSN: number of completed messages, modulo 2^24.
    msn: Msn,
    inbound: Inbound,
    recv: RecvWqe,
    is_bound: bool,
    /// Oldest first. Limited to `max_resources`.
    resources: VecDeque<Resource>,
    max_resources: usize,
    /// Number of resources with pending responses.
    waiting: usize,
    /// Last packet of a SEND or WRITE that was accepted. We must not acknowledge a later PSN: if it
    /// belongs to a READ or atomic, it would replace the response, which may have been lost
    /// (`rdma_rxe` will then complete a READ without its data).
    newest: Psn,
    /// Last packet to acknowledge.
    ack: Option<Psn>,
    nak: Option<(Psn, AethSyndrome)>,
    /// Number of packets since the last acknowledgement that didn't request one.
    unacked: u32,
    pacer: Pacer,
    /// Time to retry a paced READ response.
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
        // Allocate the maximum here, so that accepting a READ doesn't need an allocation.
        self.resources = VecDeque::with_capacity(self.max_resources);
    }

    /// Returns the memory size in bytes for these limits, without the struct itself.
    pub(super) const fn memory(max_recv_sge: u32, resources: u8) -> usize {
        resources as usize * size_of::<Resource>() + max_recv_sge as usize * size_of::<Sge>()
    }

    pub(super) fn footprint(&self) -> usize {
        self.resources.capacity() * size_of::<Resource>() + self.recv.footprint()
    }

    /// Resets all state, for a QP in RESET.
    pub(super) fn reset(&mut self) {
        // Keep the memory of the scatter list for the next connection.
        let recv = std::mem::replace(&mut self.recv, RecvWqe::new(0));
        *self = Self::with_recv(self.pd, recv);
    }

    /// Drops all pending responses, because they will be replaced by a NAK.
    fn silence(&mut self) {
        self.resources.clear();
        self.waiting = 0;
        self.ack = None;
        self.nak = None;
        // Packets received after this must not be acknowledged either.
        self.unacked = 0;
    }

    pub(super) fn is_bound(&self) -> bool {
        self.is_bound
    }

    pub(super) fn set_domain(&mut self, pd: PdId) {
        self.pd = pd;
    }

    /// Rejects the next expected packet as an invalid request.
    pub(super) fn refuse_expected(&mut self, ctx: &mut Ctx<'_>) -> Fault {
        self.refuse(ctx, Refusal::InvalidRequest)
    }

    pub(super) fn set_access(&mut self, access: Access) {
        self.access = access & Access::REMOTE;
    }

    /// Sets the maximum number of stored READs and atomics.
    pub(super) fn set_max_resources(&mut self, count: u8) {
        self.max_resources = usize::from(count);
        let missing = self.max_resources.saturating_sub(self.resources.len());
        self.resources.reserve_exact(missing);
        self.forget_completed(self.max_resources);
    }

    /// Handles a switch to a different path, for which nothing is known yet. We send an
    /// acknowledgement to notify the peer, as there may be nothing else to send.
    pub(super) fn on_migrated(&mut self) {
        self.pacer = Pacer::default();
        self.paced = None;
        if !self.has_failed() {
            self.ack = Some(self.newest);
        }
    }

    /// Returns true if a request is the next expected one or may be repeated by the peer.
    pub(super) fn knows(&self, psn: Psn) -> bool {
        psn.distance_to(self.expected) <= RECENT || self.resources.iter().any(|r| r.has(psn))
    }

    pub(super) fn set_min_rnr_timer(&mut self, timer: RnrTimer) {
        self.rnr_timer = timer;
    }

    /// Returns the receive bound to an incomplete message, if any.
    pub(super) fn unbind(&mut self) -> Option<WrId> {
        self.inbound = Inbound::None;
        std::mem::take(&mut self.is_bound).then_some(self.recv.wr_id)
    }

    /// Returns the PSN of the next expected request packet.
    pub(super) fn expected(&self) -> Psn {
        self.expected
    }

    /// Returns the time at which a paced READ response can be sent.
    pub(super) fn deadline(&self) -> Option<Instant> {
        self.paced
    }

    /// Clears an expired wait. Pending responses are sent by the next poll.
    pub(super) fn handle_timeout(&mut self, now: Instant) {
        self.paced = self.paced.filter(|&at| at > now);
    }

    /// Handles a congestion notification: the peer or a router on the path received too many
    /// packets from us.
    pub(super) fn on_cnp(&mut self, now: Instant) {
        self.pacer.on_cnp(now);
    }

    pub(super) fn has_failed(&self) -> bool {
        self.state == ResponderState::Failed
    }

    /// Processes a request packet.
    pub(super) fn handle_request(
        &mut self,
        ctx: &mut Ctx<'_>,
        pkt: &Packet<'_>,
    ) -> Result<(), Fault> {
        // We must not execute any request after a rejected one, because the peer will assume that
        // it was not executed.
        if self.state == ResponderState::Failed {
            return Ok(());
        }
        let psn = pkt.bth.psn();
        // All PSNs in the half of the number space before the expected one were already received.
        // This is exact, as a requester must not have more than half of the PSNs outstanding.
        if psn.is_before(self.expected) {
            ctx.counters.duplicates += 1;
            self.on_duplicate(ctx, pkt);
            return Ok(());
        }
        if psn != self.expected {
            ctx.counters.out_of_order += 1;
            // We only send one NAK per gap. This is called for all packets following a lost packet,
            // and with a NAK for each of them, the requester would go back multiple times.
            if self.state == ResponderState::Expecting {
                self.announce(AethSyndrome::Nak(NakCode::PsnSequence));
            }
            return Ok(());
        }
        if self.state == ResponderState::NakSent {
            // The missing packet was received, so a pending NAK is not needed anymore.
            become_state(&mut self.state, ResponderState::Expecting);
            self.nak = None;
        }
        self.on_expected(ctx, pkt)
            .map_err(|refusal| self.refuse(ctx, refusal))
    }

    fn on_expected(&mut self, ctx: &mut Ctx<'_>, pkt: &Packet<'_>) -> Result<(), Refusal> {
        // When we reject a request, all previous requests must remain intact, so check the order of
        // the opcodes first (IBTA 9.7.4.1.1).
        let is_start = pkt.op.position.is_start();
        let fits = match (self.inbound, pkt.op.operation) {
            (Inbound::None, _) => is_start,
            (Inbound::Send { .. }, Operation::Send) => !is_start,
            (Inbound::Write { .. }, Operation::Write) => !is_start,
            _ => false,
        };
        let mtu = ctx.link.mtu.bytes() as usize;
        // Packets in the middle must be full-sized (IBTA C9-92). Otherwise sender and receiver
        // would not agree on the position of the next packet.
        if !fits || !pkt.op.payload.allows(pkt.payload.len(), mtu) {
            return Err(Refusal::InvalidRequest);
        }
        let is_taken = match pkt.op.operation {
            Operation::Send => self.on_send(ctx, pkt)?,
            Operation::Write => self.on_write(ctx, pkt)?,
            Operation::ReadRequest => return self.on_read(ctx, pkt),
            _ => return self.on_atomic(ctx, pkt),
        };
        // We haven't modified PSN, MSN or memory, so a retry will find the same state.
        if !is_taken {
            self.announce(AethSyndrome::RnrNak(self.rnr_timer));
            return Ok(());
        }
        self.newest = self.expected;
        self.expected = self.expected.next();
        // The MSN is needed for requesters that use it. Our own requester only uses the PSN.
        if pkt.op.position.is_end() {
            self.msn = self.msn.next();
        }
        self.count(ctx, pkt);
        Ok(())
    }

    /// Sends a NAK for the next expected packet, but only once: the following packets are dropped
    /// until it is received (IBTA 9.7.5).
    fn announce(&mut self, syndrome: AethSyndrome) {
        // The NAK contains the next expected PSN, so it also acknowledges all previous packets.
        become_state(&mut self.state, ResponderState::NakSent);
        self.nak = Some((self.expected, syndrome));
    }

    /// Acknowledges all received packets if this packet requests it or if the limit is reached.
    fn count(&mut self, ctx: &Ctx<'_>, pkt: &Packet<'_>) {
        // We also need to acknowledge without a request, because some peers only request it at the
        // end of a long message and would otherwise not be able to move their window.
        self.unacked += 1;
        if pkt.bth.is_ack_requested() || self.unacked >= ctx.cfg.ack_every {
            // The last packet is sufficient, as an acknowledgement also covers all previous
            // packets.
            self.ack = Some(self.newest);
            self.unacked = 0;
        }
    }

    /// Processes a SEND packet. Returns false if no receive is available.
    fn on_send(&mut self, ctx: &mut Ctx<'_>, pkt: &Packet<'_>) -> Result<bool, Refusal> {
        let received = match self.inbound {
            Inbound::Send { received } => received,
            _ => 0,
        };
        // Check the key before writing the payload, because a rejected packet must not have any
        // side effects. It is invalidated last, when there can't be an error anymore.
        let invalidated = pkt.ext.ieth.map(|i| RKey(i.rkey()));
        if let Some(key) = invalidated {
            ctx.mrs
                .check_invalidate(self.pd, ctx.cfg.qp, key)
                .map_err(|_| Refusal::RemoteAccess)?;
        }
        // The receive is bound to the first packet of the message. With a shared queue, the next
        // receive could have been consumed by a different connection.
        if !self.is_bound {
            if !ctx.rq.pop(&mut self.recv) {
                return Ok(false);
            }
            self.is_bound = true;
        }
        let total = received + payload_len(pkt);
        // This is an error by the peer, which should know the size of our receives. It is reported
        // on both sides.
        if total > self.recv.length {
            return Err(self.fail_receive(ctx, WcStatus::LocLenErr, Refusal::InvalidRequest));
        }
        // A receive with an invalid key is an error by our owner, so the peer only receives a
        // remote operation error.
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

    /// Processes an RDMA WRITE packet. Returns false if it requires a receive and none is
    /// available.
    fn on_write(&mut self, ctx: &mut Ctx<'_>, pkt: &Packet<'_>) -> Result<bool, Refusal> {
        let part = WritePart::of(self.inbound, pkt).filter(|part| part.is_allowed(self.access));
        let part = part.ok_or(Refusal::InvalidRequest)?;
        // Check the remaining range and not just this packet, as a message exceeding the region
        // must be rejected before the first byte is written. This is repeated for each packet
        // because the owner may have invalidated the key.
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
        // Do this before writing the payload, so that a WRITE waiting for a receive has no side
        // effects.
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
            // This is the length of the WRITE. No data is written to the receive itself.
            self.complete_receive(ctx, pkt, WcOpcode::RecvWriteImm, part.total, None);
        }
        Ok(true)
    }

    fn on_read(&mut self, ctx: &mut Ctx<'_>, pkt: &Packet<'_>) -> Result<(), Refusal> {
        let reth = pkt.ext.reth.ok_or(Refusal::InvalidRequest)?;
        let (rkey, addr, len) = (RKey(reth.rkey()), reth.va(), reth.dma_len());
        // The access rights of the QP are an attribute of the connection, so missing rights are
        // treated as an invalid request. Missing rights for the key are an access error.
        let may_read = self.access.contains(Access::REMOTE_READ);
        if !may_read || len > MAX_MESSAGE {
            return Err(Refusal::InvalidRequest);
        }
        // The key is checked again for each response. We check it here as well, so that an invalid
        // READ is rejected with its own PSN and does not use a resource.
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
        // An unaligned address is an invalid request, even if the key is valid.
        if !may_run || !eth.va().is_multiple_of(8) {
            return Err(Refusal::InvalidRequest);
        }
        // Check this before modifying memory, because a rejected atomic must not have been
        // executed.
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
        // The memory uses host byte order. The operands were already converted (`wire/ext.rs`).
        let original = u64::from_ne_bytes(bytes);
        let value = match pkt.op.operation {
            Operation::FetchAdd => original.wrapping_add(eth.swap_or_add()),
            _ if original == eth.compare() => eth.swap_or_add(),
            _ => original,
        };
        span.write(0, &value.to_ne_bytes());
        // Unlike for a READ, the response is stored and the memory is not read again.
        if fault::count() != faults {
            return Err(Refusal::RemoteAccess);
        }
        // We must store the original value for duplicates, as executing the request again would add
        // twice.
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
        // The completion returns the receive to its owner, so we must not write to it after this.
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
        // The completion with the error is generated here. Without this, flushing would complete it
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
        // This can be called if the responder has already failed, when a key is invalidated during
        // a READ response.
        if !self.has_failed() {
            become_state(&mut self.state, ResponderState::Failed);
        }
        // The NAK uses the PSN of the rejected packet, which is the expected one, and acknowledges
        // all previous packets.
        self.nak = Some((self.expected, AethSyndrome::Nak(code)));
        ctx.out.push(RcEvent::Async(event));
        Fault
    }
}

/// Rejected request that fails the connection, and the NAK to send.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Refusal {
    InvalidRequest,
    RemoteAccess,
    RemoteOperation,
}
