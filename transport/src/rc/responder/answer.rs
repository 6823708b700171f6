//! Answering: the responder resources, and which answer leaves next.

use std::time::Instant;

use super::{Refusal, Responder};
use crate::rc::TxPacket;
use crate::rc::ctx::{Ctx, Fault};
use crate::rc::message::plan_packets;
use crate::rc::pacing::BURST;
use crate::verbs::{Access, PdId, RKey};
use crate::wire::{
    Aeth, AethSyndrome, AtomicAckEth, Bth, Credit, ExtHeaders, Msn, NakCode, Opcode, Operation,
    Packet, Psn, Service, emit_headers,
};

/// A READ or an atomic that was accepted, kept to be answered again (IBTA 9.7.5.1.2).
#[derive(Clone, Copy, Debug)]
pub(super) struct Resource {
    first: Psn,
    packets: u32,
    kind: ResourceKind,
    msn: Msn,
    /// Packets before it that its answer acknowledges, and nothing else does.
    unacked: u32,
    /// A packet of its answer has left, which acknowledged what came before it.
    has_begun: bool,
    /// The end of its answer has left; before that the peer cannot be done with it.
    is_answered: bool,
    pending: Option<Pending>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ResourceKind {
    Read {
        /// Domain of the key.
        pd: PdId,
        rkey: RKey,
        addr: u64,
        len: u32,
    },
    Atomic {
        original: u64,
    },
}

/// Part of a resource that is still to be sent, in packets from its first.
#[derive(Clone, Copy, Debug)]
struct Pending {
    start: u32,
    next: u32,
    end: u32,
}

impl Responder {
    pub(in crate::rc) fn has_output(&self) -> bool {
        self.waiting > 0 || self.ack.is_some() || self.nak.is_some()
    }

    /// Whether an acknowledgement is all that there is to send.
    pub(in crate::rc) fn has_only_ack(&self) -> bool {
        self.waiting == 0 && self.nak.is_none() && self.ack.is_some()
    }

    /// Whether the next answer is an acknowledgement, a NAK or an atomic's.
    pub(in crate::rc) fn is_urgent(&self) -> bool {
        // An acknowledgement that may leave before a READ's answer is as urgent as one that is
        // alone.
        match self.front() {
            Some(at) => {
                let resource = &self.resources[at];
                matches!(resource.kind, ResourceKind::Atomic { .. })
                    || (!resource.has_begun && self.has_ack_before(resource))
            }
            None => self.has_output(),
        }
    }

    /// Whether an acknowledgement is due for something before this resource's next packet.
    fn has_ack_before(&self, resource: &Resource) -> bool {
        self.ack
            .is_some_and(|psn| psn.is_before(resource.next_psn()))
    }

    /// The oldest resource with something to send.
    fn front(&self) -> Option<usize> {
        if self.waiting == 0 {
            return None;
        }
        // A scan, over a handful: the ring is no longer than the responder resources that the CM
        // agreed to.
        self.resources.iter().position(|r| r.pending.is_some())
    }

    fn credit(&self, ctx: &Ctx<'_>) -> AethSyndrome {
        // A limit would be wrong with a shared queue, whose receives other queue pairs take as
        // well.
        AethSyndrome::Ack(if ctx.cfg.has_srq {
            Credit::UNLIMITED
        } else {
            // The message in progress is not complete but has its receive.
            Credit::at_most(ctx.rq.len() + usize::from(self.is_bound))
        })
    }

    /// The peer must not have more READs and atomics outstanding than there are resources. One
    /// whose answer has left does not count, even if it waits to be answered again: the peer has
    /// had it.
    pub(super) fn check_room(&self) -> Result<(), Refusal> {
        // The oldest decides, since they are answered in order: behind one that has been
        // answered, room is made by forgetting it.
        let is_full = self.resources.len() >= self.max_resources;
        let may_forget = self.resources.front().is_some_and(|r| r.is_answered);
        if is_full && !may_forget {
            return Err(Refusal::InvalidRequest);
        }
        Ok(())
    }

    pub(super) fn accept(&mut self, kind: ResourceKind, packets: u32) -> Result<(), Refusal> {
        self.check_room()?;
        // What was pushed out can no longer be repeated. A peer within its depth has had the
        // whole answer, or it would not have sent a further request.
        self.forget_answered(self.max_resources.saturating_sub(1));
        // The count includes the READ before it is answered (IBTA C9-148): its response carries
        // it.
        self.msn = self.msn.next();
        // The range of PSNs that it takes is that of its responses, so the next request is
        // expected after the last of them.
        self.resources.push_back(Resource {
            first: self.expected,
            packets,
            kind,
            msn: self.msn,
            // Its response acknowledges all that came before.
            unacked: std::mem::take(&mut self.unacked),
            has_begun: false,
            is_answered: false,
            pending: Some(Pending {
                start: 0,
                next: 0,
                end: packets,
            }),
        });
        self.waiting += 1;
        self.expected = self.expected.add(packets);
        Ok(())
    }

    /// Forgets the oldest resources, as long as there are more than `most` and they were answered.
    pub(super) fn forget_answered(&mut self, most: usize) {
        while self.resources.len() > most
            && let Some(oldest) = self.resources.pop_front_if(|r| r.is_answered)
        {
            self.waiting -= usize::from(oldest.pending.is_some());
        }
    }

    /// A packet that was taken in before: SENDs and WRITEs are acknowledged again, READs and
    /// atomics answered again if their resource is still there (IBTA 9.7.5.1.4, 9.7.5.1.5).
    ///
    /// The acknowledgement covers all that has been taken in, so it waits until it is asked for, as
    /// for new packets: `rdma_rxe` loses a request that is acknowledged while it is being repeated.
    pub(super) fn on_duplicate(&mut self, ctx: &Ctx<'_>, pkt: &Packet<'_>) {
        let psn = pkt.bth.psn();
        let mtu = ctx.link.mtu.bytes();
        // The newest first: an older one with the same PSN is from an earlier turn of the PSN, and
        // only READs and atomics push it out.
        let found = self
            .resources
            .iter_mut()
            .rev()
            .find(|r| psn.is_within(r.first, r.packets));
        // Nothing is executed twice. SENDs and WRITEs only count towards the next acknowledgement
        // (IBTA C9-105).
        match (pkt.op.operation, found) {
            (Operation::Send | Operation::Write, _) => self.count(ctx, pkt),
            // A READ or an atomic that was forgotten is dropped silently: a NAK would end a
            // connection for an old copy that the network kept.
            (_, None) => {}
            (operation, Some(resource)) => {
                let start = resource.first.distance_to(psn);
                // A part that was never asked for is not a repetition, but a mistake or a
                // forgery. It must not reach memory that the first request was not checked for.
                let Some(end) = resource.plan_replay(operation, pkt, start, mtu) else {
                    return;
                };
                if resource.pending.is_none() {
                    self.waiting += 1;
                }
                // From the part that is asked for on, instead of what was still waiting: the
                // requester has thrown away, or will, what comes behind a missing packet.
                resource.pending = Some(Pending {
                    start,
                    next: start,
                    end,
                });
            }
        }
    }

    /// The connection ends: what needs the owner's memory is dropped, and READs of the peer's with
    /// it. What has been done stays answered, and a refusal keeps its NAK; otherwise the peer takes
    /// what was delivered for lost, and does not learn why the connection ended.
    pub(in crate::rc) fn close(&mut self) {
        self.acknowledge_all();
        // Not in the middle of an answer, which ends here (see `poll`).
        if let Some(at) = self.front()
            && self.resources[at].is_under_way()
            && self.has_ack_before(&self.resources[at])
        {
            self.ack = None;
        }
        let is_atomic = |r: &Resource| matches!(r.kind, ResourceKind::Atomic { .. });
        // Atomics are kept, since their answers hold their result. A READ would read the owner's
        // memory.
        self.resources.retain(is_atomic);
        // The wait was for READ responses, which are gone.
        self.paced = None;
        let waiting = self.resources.iter().filter(|r| r.pending.is_some());
        self.waiting = waiting.count();
        // A sequence or RNR NAK asks the peer to send again what would now be dropped.
        if !self.has_failed() {
            self.nak = None;
        }
    }

    /// Acknowledges all that has been taken in, unasked: there will be no further packet to ask.
    fn acknowledge_all(&mut self) {
        // What a READ's answer was to acknowledge as well, if nothing of that answer has left.
        // Those of atomics will leave.
        let is_read = |r: &Resource| matches!(r.kind, ResourceKind::Read { .. });
        let is_owing =
            |r: &Resource| r.pending.is_some() && is_read(r) && !r.has_begun && r.unacked > 0;
        if self.unacked > 0 || self.resources.iter().any(is_owing) {
            self.ack = Some(self.newest);
            self.unacked = 0;
        }
    }

    /// The next answer, written into `tx`.
    pub(in crate::rc) fn poll(
        &mut self,
        ctx: &mut Ctx<'_>,
        tx: &mut TxPacket,
    ) -> Result<bool, Fault> {
        // In PSN order: an acknowledgement covers everything before its PSN, so it must not
        // overtake the READ response of an earlier one.
        while let Some(at) = self.front() {
            let resource = &self.resources[at];
            let is_covered = self.has_ack_before(resource);
            if is_covered && !resource.has_begun {
                break;
            }
            // The others wait as well: they are behind it in PSN order.
            if self.is_early(ctx.now, at) {
                return Ok(false);
            }
            // False if a replay lost its key and was dropped: then the next one is looked at.
            if self.answer(ctx, tx, at)? {
                // The packets of an answer acknowledge what came before it. `rdma_rxe` takes an
                // acknowledgement between them for the end of the answer.
                if is_covered {
                    self.ack = None;
                }
                return Ok(true);
            }
        }
        // The credits are counted now and not when the packet came: more receives may have been
        // posted since.
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
        // After the acknowledgement, whose PSN is older: a NAK is the last word about everything
        // before it.
        let Some((psn, syndrome)) = self.nak.take() else {
            return Ok(false);
        };
        let counters = &mut *ctx.counters;
        *match syndrome {
            AethSyndrome::Nak(NakCode::PsnSequence) => &mut counters.tx_nak_sequence,
            AethSyndrome::Nak(NakCode::RemoteAccess) => &mut counters.tx_nak_access,
            AethSyndrome::Nak(NakCode::RemoteOperation) => &mut counters.tx_nak_operation,
            AethSyndrome::Nak(_) => &mut counters.tx_nak_invalid,
            _ => &mut counters.tx_rnr_naks,
        } += 1;
        self.emit(
            ctx,
            tx,
            Opcode::RcAcknowledge,
            psn,
            aeth(syndrome, self.msn),
        );
        Ok(true)
    }

    /// Whether the next packet of a resource has to wait for its time.
    fn is_early(&mut self, now: Instant, at: usize) -> bool {
        // A connection that has ended has no timers.
        let is_read = matches!(self.resources[at].kind, ResourceKind::Read { .. });
        if !is_read || self.has_failed() || !self.pacer.is_active() {
            return false;
        }
        // A requester that asks for little at a time looks after the path itself.
        let pending = self.resources.iter().filter_map(|r| r.pending);
        if pending.map(|p| p.end - p.next).sum::<u32>() <= BURST {
            return false;
        }
        self.paced = self.pacer.wait(now);
        self.paced.is_some()
    }

    /// The next packet of a resource; false if it turned out to have none.
    fn answer(&mut self, ctx: &mut Ctx<'_>, tx: &mut TxPacket, at: usize) -> Result<bool, Fault> {
        let resource = self.resources[at];
        let Some(mut pending) = resource.pending else {
            return Ok(false);
        };
        // The MSN is that of the request, not of the newest message.
        let mut ext = aeth(self.credit(ctx), resource.msn);
        let opcode = match resource.kind {
            ResourceKind::Atomic { original } => {
                ext.atomic_ack = Some(AtomicAckEth::new(original));
                Opcode::RcAtomicAcknowledge
            }
            ResourceKind::Read {
                pd,
                rkey,
                addr,
                len,
            } => {
                let mtu = ctx.link.mtu.bytes();
                // `packets` comes from the length, so an empty READ has one packet of no bytes
                // here and `offset` never exceeds `len`.
                let offset = pending.next * mtu;
                let take = (len - offset).min(mtu);
                let addr = addr.wrapping_add(u64::from(offset));
                let right = Access::REMOTE_READ;
                // The key is resolved for each packet, since its owner may have invalidated it
                // since the last one.
                match ctx
                    .mrs
                    .resolve_remote(pd, ctx.cfg.qp, rkey, addr, take, right)
                {
                    Ok(span) => span.push_slices(0, span.len(), &mut tx.segments),
                    Err(_) => return self.lose(ctx, at),
                }
                tx.payload_len = take as usize;
                self.pacer.on_response(ctx.now);
                // First and last of what is asked for now: a repeated part is a response of its
                // own, which begins with First or Only.
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
        let entry = &mut self.resources[at];
        entry.has_begun = true;
        entry.is_answered |= pending.next == entry.packets;
        entry.pending = (!is_done).then_some(pending);
        self.waiting -= usize::from(is_done);
        self.emit(ctx, tx, opcode, psn, ext);
        Ok(true)
    }

    /// The key of a READ stopped working while it was being answered. That is an error of the
    /// owner's, until the whole answer has left: a further one may have been asked for by a packet
    /// that was long under way, and is dropped.
    fn lose(&mut self, ctx: &mut Ctx<'_>, at: usize) -> Result<bool, Fault> {
        let psn = self.resources[at].next_psn();
        self.resources[at].pending = None;
        self.waiting -= 1;
        // The connection goes on: this peer has had its answer once.
        if self.resources[at].is_answered {
            return Ok(false);
        }
        // The NAK ends the connection for the peer, so answers behind it would not be looked at.
        self.silence();
        let fault = self.refuse(ctx, Refusal::RemoteAccess);
        // It is about the response that could not be made, not the request that comes next: the
        // answers before it stand.
        self.nak = self.nak.map(|(_, syndrome)| (psn, syndrome));
        Err(fault)
    }

    /// Answers were lost before they left, since the memory that they were read from is gone: the peer
    /// is not taken to have had any of them.
    pub(in crate::rc) fn lose_answers(&mut self) {
        for resource in &mut self.resources {
            resource.is_answered = false;
        }
    }

    fn emit(&self, ctx: &Ctx<'_>, tx: &mut TxPacket, opcode: Opcode, psn: Psn, ext: ExtHeaders) {
        let opcode = match ctx.cfg.service {
            Service::Rc => opcode,
            other => opcode.in_service(other),
        };
        let bth = Bth::new(opcode, ctx.link.dest, psn).with_pad_for(tx.payload_len);
        tx.headers = emit_headers(&bth, &ext);
    }
}

fn aeth(syndrome: AethSyndrome, msn: Msn) -> ExtHeaders {
    ExtHeaders {
        aeth: Some(Aeth::new(syndrome, msn)),
        ..ExtHeaders::default()
    }
}

impl Resource {
    /// A packet of the answer has left, and not the last one.
    fn is_under_way(&self) -> bool {
        self.pending.is_some_and(|p| p.next > p.start)
    }

    /// Whether a PSN is one of its answer's.
    pub(super) fn has(&self, psn: Psn) -> bool {
        psn.is_within(self.first, self.packets)
    }

    fn next_psn(&self) -> Psn {
        self.first.add(self.pending.map_or(0, |p| p.next))
    }

    /// End of a repeated request that begins at packet `start`; `None` if it is not part of the
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
                // Which of the two atomics it is, is not compared further: the answer is the old
                // one in any case.
                matches!(operation, Operation::CmpSwap | Operation::FetchAdd).then_some(1)
            }
            ResourceKind::Read {
                rkey, addr, len, ..
            } => {
                // The lengths are the peer's, hence the checked arithmetic.
                let reth = pkt.ext.reth?;
                let offset = start.checked_mul(mtu)?;
                let part = reth.dma_len();
                let stop = offset.checked_add(part)?;
                // Only the last packet of a READ is short, so a part that ends early ends with a
                // packet.
                let is_whole_packets = part.is_multiple_of(mtu) || stop == len;
                let is_part = operation == Operation::ReadRequest
                    && reth.rkey() == rkey.0
                    // Same key and the address that belongs to the PSN: so the part lies inside
                    // the range that was checked when the request was accepted.
                    && reth.va() == addr.wrapping_add(u64::from(offset))
                    && stop <= len
                    && is_whole_packets;
                // A part of no bytes counts as one packet, which may lie behind the last.
                let end = start + plan_packets(part, mtu);
                (is_part && end <= self.packets).then_some(end)
            }
        }
    }
}
