//! Responder resources, and selection of the next response to send.

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

/// READ or atomic that was accepted, stored so that the response can be repeated (IBTA 9.7.5.1.2).
#[derive(Clone, Copy, Debug)]
pub(super) struct Resource {
    first: Psn,
    packets: u32,
    kind: ResourceKind,
    msn: Msn,
    /// Number of previous packets that are only acknowledged by this response.
    unacked: u32,
    /// Set if the first packet of the response was sent, which also acknowledged all previous
    /// packets.
    has_begun: bool,
    /// Set if the last packet of the response was sent. The peer still needs the response before
    /// that.
    is_complete: bool,
    pending: Option<Pending>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ResourceKind {
    Read {
        /// Protection domain of the key.
        pd: PdId,
        rkey: RKey,
        addr: u64,
        len: u32,
    },
    Atomic {
        original: u64,
    },
}

/// Part of a resource that needs to be sent, in packets relative to its first packet.
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

    /// Returns true if there is only an acknowledgement to send.
    pub(in crate::rc) fn has_only_ack(&self) -> bool {
        self.waiting == 0 && self.nak.is_none() && self.ack.is_some()
    }

    /// Returns whether the next response is an acknowledgement, a NAK or an atomic response.
    pub(in crate::rc) fn is_urgent(&self) -> bool {
        // An acknowledgement that can be sent before a READ response has the same priority as a
        // single one.
        match self.front() {
            Some(at) => {
                let resource = &self.resources[at];
                matches!(resource.kind, ResourceKind::Atomic { .. })
                    || (!resource.has_begun && self.has_ack_before(resource))
            }
            None => self.has_output(),
        }
    }

    /// Returns true if there is a pending acknowledgement for a packet before this resource.
    fn has_ack_before(&self, resource: &Resource) -> bool {
        self.ack
            .is_some_and(|psn| psn.is_before(resource.next_psn()))
    }

    /// Returns the oldest resource with pending responses.
    fn front(&self) -> Option<usize> {
        if self.waiting == 0 {
            return None;
        }
        // A linear search is sufficient, as the ring is limited to the number of responder
        // resources negotiated by the CM.
        self.resources.iter().position(|r| r.pending.is_some())
    }

    fn credit(&self, ctx: &Ctx<'_>) -> AethSyndrome {
        // We cannot use a limit with a shared queue, because its receives are also consumed by
        // other QPs.
        AethSyndrome::Ack(if ctx.cfg.has_srq {
            Credit::UNLIMITED
        } else {
            // The current message is incomplete but already has a receive.
            Credit::at_most(ctx.rq.len() + usize::from(self.is_bound))
        })
    }

    /// Checks that the peer does not use more READs and atomics than there are resources. If the
    /// response was already sent, the resource is not counted even if it must be sent again, as the
    /// peer has received it before.
    pub(super) fn check_room(&self) -> Result<(), Refusal> {
        // Only check the oldest resource, because responses are sent in order: if it was sent, the
        // resource can be removed to make space.
        let is_full = self.resources.len() >= self.max_resources;
        let may_forget = self.resources.front().is_some_and(|r| r.is_complete);
        if is_full && !may_forget {
            return Err(Refusal::InvalidRequest);
        }
        Ok(())
    }

    pub(super) fn accept(&mut self, kind: ResourceKind, packets: u32) -> Result<(), Refusal> {
        self.check_room()?;
        // Removed resources can't be repeated anymore. If the peer stays within its limit, it must
        // have received the full response before sending a new request.
        self.forget_completed(self.max_resources.saturating_sub(1));
        // The count must already include the READ in its own response (IBTA C9-148).
        self.msn = self.msn.next();
        // The request uses one PSN per response packet, so the next request is expected after the
        // last of them.
        self.resources.push_back(Resource {
            first: self.expected,
            packets,
            kind,
            msn: self.msn,
            // The response acknowledges all previous packets.
            unacked: std::mem::take(&mut self.unacked),
            has_begun: false,
            is_complete: false,
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

    /// Removes the oldest resources that were fully sent while there are more than `most`.
    pub(super) fn forget_completed(&mut self, most: usize) {
        while self.resources.len() > most
            && let Some(oldest) = self.resources.pop_front_if(|r| r.is_complete)
        {
            self.waiting -= usize::from(oldest.pending.is_some());
        }
    }

    /// Handles a packet that was already received. SENDs and WRITEs are acknowledged again, READ
    /// and atomic responses are sent again if their resource still exists (IBTA 9.7.5.1.4,
    /// 9.7.5.1.5).
    ///
    /// The acknowledgement covers all received packets and is only sent when requested, as for new
    /// packets, as `rdma_rxe` will lose a request that is acknowledged while it is being repeated.
    pub(super) fn on_duplicate(&mut self, ctx: &Ctx<'_>, pkt: &Packet<'_>) {
        let psn = pkt.bth.psn();
        let mtu = ctx.link.mtu.bytes();
        // Check the newest resources first. If there is an old one with the same PSN, it is from
        // before the PSN wrapped, because resources are only removed by new READs and atomics.
        let found = self
            .resources
            .iter_mut()
            .rev()
            .find(|r| psn.is_within(r.first, r.packets));
        // Requests are never executed twice. SENDs and WRITEs are only counted for the next
        // acknowledgement (IBTA C9-105).
        match (pkt.op.operation, found) {
            (Operation::Send | Operation::Write, _) => self.count(ctx, pkt),
            // If the READ or atomic was already removed, we silently drop the packet. A NAK would
            // fail a connection because of an old packet delayed in the network.
            (_, None) => {}
            (operation, Some(resource)) => {
                let start = resource.first.distance_to(psn);
                // If this part was never requested before, it is not a duplicate but an error or an
                // attack. We must not access memory that was not checked for the original request.
                let Some(end) = resource.plan_replay(operation, pkt, start, mtu) else {
                    return;
                };
                if resource.pending.is_none() {
                    self.waiting += 1;
                }
                // Restart at the requested part and replace pending packets, as the requester will
                // discard everything following a missing packet.
                resource.pending = Some(Pending {
                    start,
                    next: start,
                    end,
                });
            }
        }
    }

    /// Called when the connection is closed. Drops all responses that need the owner's memory and
    /// the READs of the peer. Requests that were already executed are still acknowledged and a NAK
    /// is kept. Otherwise the peer would assume that delivered messages were lost, and would not
    /// get the reason for the failure.
    pub(in crate::rc) fn close(&mut self) {
        self.acknowledge_all();
        // Don't acknowledge in the middle of a response, which is aborted here (see `poll`).
        if let Some(at) = self.front()
            && self.resources[at].is_under_way()
            && self.has_ack_before(&self.resources[at])
        {
            self.ack = None;
        }
        let is_atomic = |r: &Resource| matches!(r.kind, ResourceKind::Atomic { .. });
        // Atomics are kept because the result is stored in the resource, while a READ would access
        // the owner's memory.
        self.resources.retain(is_atomic);
        // This was only needed for READ responses, which are now removed.
        self.paced = None;
        let waiting = self.resources.iter().filter(|r| r.pending.is_some());
        self.waiting = waiting.count();
        // After a sequence or RNR NAK, the peer would resend packets that are now dropped.
        if !self.has_failed() {
            self.nak = None;
        }
    }

    /// Acknowledges all received packets without a request, because there will be no more packets.
    fn acknowledge_all(&mut self) {
        // This includes packets to be acknowledged by a READ response if no part of that response
        // was sent. Atomic responses will still be sent.
        let is_read = |r: &Resource| matches!(r.kind, ResourceKind::Read { .. });
        let is_owing =
            |r: &Resource| r.pending.is_some() && is_read(r) && !r.has_begun && r.unacked > 0;
        if self.unacked > 0 || self.resources.iter().any(is_owing) {
            self.ack = Some(self.newest);
            self.unacked = 0;
        }
    }

    /// Writes the next response to `tx`.
    pub(in crate::rc) fn poll(
        &mut self,
        ctx: &mut Ctx<'_>,
        tx: &mut TxPacket,
    ) -> Result<bool, Fault> {
        // Use PSN order: an acknowledgement also covers all previous packets, so it must not be
        // sent before a READ response with an earlier PSN.
        while let Some(at) = self.front() {
            let resource = &self.resources[at];
            let is_covered = self.has_ack_before(resource);
            if is_covered && !resource.has_begun {
                break;
            }
            // All later responses must wait as well because of the PSN order.
            if self.is_early(ctx.now, at) {
                return Ok(false);
            }
            // This returns false if a repeated response was dropped because its key is not valid
            // anymore. Try the next one.
            if self.emit_response(ctx, tx, at)? {
                // The response packets acknowledge all previous packets. `rdma_rxe` treats an
                // acknowledgement between them as the end of the response.
                if is_covered {
                    self.ack = None;
                }
                return Ok(true);
            }
        }
        // Get the credits now, as more receives may have been posted since the packet was received.
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
        // This must follow the acknowledgement, which has an earlier PSN, because a NAK also
        // acknowledges all previous packets.
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

    /// Returns whether pacing does not allow the next packet of this resource yet.
    fn is_early(&mut self, now: Instant, at: usize) -> bool {
        // A closed connection has no timers.
        let is_read = matches!(self.resources[at].kind, ResourceKind::Read { .. });
        if !is_read || self.has_failed() || !self.pacer.is_active() {
            return false;
        }
        // If the requester only requests small amounts of data, it handles the congestion itself.
        let pending = self.resources.iter().filter_map(|r| r.pending);
        if pending.map(|p| p.end - p.next).sum::<u32>() <= BURST {
            return false;
        }
        self.paced = self.pacer.wait(now);
        self.paced.is_some()
    }

    /// Writes the next packet of a resource to `tx`, or returns false if there is nothing to send.
    fn emit_response(
        &mut self,
        ctx: &mut Ctx<'_>,
        tx: &mut TxPacket,
        at: usize,
    ) -> Result<bool, Fault> {
        let resource = self.resources[at];
        let Some(mut pending) = resource.pending else {
            return Ok(false);
        };
        // Use the MSN of this request, not that of the last message.
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
                // `packets` is based on the length, so an empty READ has a single packet without
                // payload and `offset` never exceeds `len`.
                let offset = pending.next * mtu;
                let take = (len - offset).min(mtu);
                let addr = addr.wrapping_add(u64::from(offset));
                let right = Access::REMOTE_READ;
                // The key must be checked for each packet, as its owner may have invalidated it.
                match ctx
                    .mrs
                    .resolve_remote(pd, ctx.cfg.qp, rkey, addr, take, right)
                {
                    Ok(span) => span.push_slices(0, span.len(), &mut tx.segments),
                    Err(_) => return self.lose(ctx, at),
                }
                tx.payload_len = take as usize;
                self.pacer.on_response(ctx.now);
                // This is based on the current request, because a repeated part is a separate
                // response starting with First or Only.
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
        entry.is_complete |= pending.next == entry.packets;
        entry.pending = (!is_done).then_some(pending);
        self.waiting -= usize::from(is_done);
        self.emit(ctx, tx, opcode, psn, ext);
        Ok(true)
    }

    /// Handles a READ key that became invalid before the response was complete. This is an error by
    /// the owner, unless the full response was sent before. In that case, the current request may
    /// be caused by a packet delayed in the network, so it is dropped.
    fn lose(&mut self, ctx: &mut Ctx<'_>, at: usize) -> Result<bool, Fault> {
        let psn = self.resources[at].next_psn();
        self.resources[at].pending = None;
        self.waiting -= 1;
        // The connection continues, as the peer has already received the response once.
        if self.resources[at].is_complete {
            return Ok(false);
        }
        // The NAK fails the connection at the peer, which will ignore all responses after it.
        self.silence();
        let fault = self.refuse(ctx, Refusal::RemoteAccess);
        // The NAK must refer to the failed response and not to the next expected request, because
        // previous responses are valid.
        self.nak = self.nak.map(|(_, syndrome)| (psn, syndrome));
        Err(fault)
    }

    /// Marks all responses as not sent. This is used if they were lost before transmission because
    /// their memory was removed.
    pub(in crate::rc) fn lose_responses(&mut self) {
        for resource in &mut self.resources {
            resource.is_complete = false;
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
    /// Returns true if the first packet of the response was sent but not the last one.
    fn is_under_way(&self) -> bool {
        self.pending.is_some_and(|p| p.next > p.start)
    }

    /// Returns whether the response includes this PSN.
    pub(super) fn has(&self, psn: Psn) -> bool {
        psn.is_within(self.first, self.packets)
    }

    fn next_psn(&self) -> Psn {
        self.first.add(self.pending.map_or(0, |p| p.next))
    }

    /// Returns the end of a repeated request starting at packet `start`, or `None` if it is not
    /// part of the accepted request.
    fn plan_replay(
        &self,
        operation: Operation,
        pkt: &Packet<'_>,
        start: u32,
        mtu: u32,
    ) -> Option<u32> {
        match self.kind {
            ResourceKind::Atomic { .. } => {
                // We don't need to check which of the two atomics this is, as the response is
                // always the stored value.
                matches!(operation, Operation::CmpSwap | Operation::FetchAdd).then_some(1)
            }
            ResourceKind::Read {
                rkey, addr, len, ..
            } => {
                // The lengths are provided by the peer, so we need checked arithmetic.
                let reth = pkt.ext.reth?;
                let offset = start.checked_mul(mtu)?;
                let part = reth.dma_len();
                let stop = offset.checked_add(part)?;
                // Only the last packet of a READ can be short, so a part that ends earlier must end
                // at a packet boundary.
                let is_whole_packets = part.is_multiple_of(mtu) || stop == len;
                let is_part = operation == Operation::ReadRequest
                    && reth.rkey() == rkey.0
                    // If key and address match this PSN, the part is within the range that was
                    // checked when the request was accepted.
                    && reth.va() == addr.wrapping_add(u64::from(offset))
                    && stop <= len
                    && is_whole_packets;
                // An empty part is counted as one packet, which can be after the last packet.
                let end = start + plan_packets(part, mtu);
                (is_part && end <= self.packets).then_some(end)
            }
        }
    }
}
