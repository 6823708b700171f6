//! What comes in: every packet is checked and handed to its queue pair.

use std::net::SocketAddr;
use std::time::Instant;

use super::qp::with_env;
use super::{MAX_VERIFIERS, Machine, Nic};
use crate::rc::{Env, RcEvent};
use crate::verbs::{AsyncEvent, CqId, PKey, QpId};
use crate::wire::{GSI_QKEY, IcrcError, IcrcFlow, IcrcVerifier, Packet, Qpn, Service};

/// Identifications that segmented sends produce.
const SEGMENT_IDS: u16 = 128;
/// Offset of the management class in a MAD.
const MAD_CLASS: usize = 1;
/// Communication management.
const CLASS_CM: u8 = 0x07;

impl Nic {
    /// Takes in a datagram, or a train of them: `bytes` are packets of `segment` bytes, the last of
    /// which may be shorter.
    pub fn handle_datagram(&mut self, now: Instant, src: SocketAddr, segment: usize, bytes: &[u8]) {
        self.set_now(now);
        let known = self.verifiers.get(&src).copied();
        let Some(mut verifier) =
            known.or_else(|| IcrcFlow::new(src, self.local).map(IcrcVerifier::new))
        else {
            self.counters.rx_malformed += 1;
            return;
        };
        let mut is_genuine = known.is_some();
        for packet in bytes.chunks(segment.max(1)) {
            is_genuine |= self.handle_packet(src, packet, &mut verifier);
        }
        // Only who sent something sound is remembered, so that noise does not fill the table.
        if is_genuine {
            if known.is_none() && self.verifiers.len() >= MAX_VERIFIERS {
                self.verifiers.clear();
            }
            self.verifiers.insert(src, verifier);
        }
    }

    /// Takes in one packet; answers whether it was genuine.
    fn handle_packet(
        &mut self,
        src: SocketAddr,
        bytes: &[u8],
        verifier: &mut IcrcVerifier,
    ) -> bool {
        self.counters.rx_packets += 1;
        self.counters.rx_bytes += bytes.len() as u64;
        let Ok(packet) = Packet::parse(bytes) else {
            self.counters.rx_malformed += 1;
            return false;
        };
        // We are a full member, so a limited member may talk to us as well.
        if (packet.bth.pkey() ^ PKey::DEFAULT.0) & 0x7fff != 0 {
            self.counters.rx_wrong_pkey += 1;
            return false;
        }
        let qpn = packet.bth.dest_qpn();
        if qpn == Qpn::GSI {
            return self.verify(bytes, verifier) && self.handle_gsi(src, &packet);
        }
        let Some(&id) = self.by_qpn.get(&qpn.value()) else {
            self.counters.rx_unknown_qp += 1;
            return false;
        };
        if !self.is_from_peer(id, src, &packet) || !self.verify(bytes, verifier) {
            return false;
        }
        let now = self.now;
        let Ok(qp) = self.qps.get_mut(id) else {
            return false;
        };
        with_env!(self, qp, env);
        match &mut qp.machine {
            Machine::Rc(rc) => rc.handle_packet(now, &packet, &mut env),
            Machine::Ud(ud) => {
                let dst = self.local.ip();
                ud.handle_packet(&packet, src.ip(), dst, env.mrs, env.rq, env.out);
            }
        }
        self.settle(id);
        true
    }

    /// Whether a queue pair is of the packet's kind, and, if it has a peer, has this one.
    fn is_from_peer(&mut self, id: QpId, src: SocketAddr, packet: &Packet<'_>) -> bool {
        let Ok(qp) = self.qps.get_mut(id) else {
            return false;
        };
        let (service, is_peer) = match (&qp.machine, &qp.peer) {
            (Machine::Rc(_), Some(peer)) => (Service::Rc, peer.addr.ip() == src.ip()),
            (Machine::Rc(_), None) => (Service::Rc, false),
            (Machine::Ud(_), _) => (Service::Ud, true),
        };
        if packet.op.service != service {
            self.counters.rx_unknown_qp += 1;
            return false;
        }
        if !is_peer {
            qp.counters.wrong_source += 1;
            self.counters.rx_wrong_source += 1;
        }
        is_peer
    }

    fn verify(&mut self, bytes: &[u8], verifier: &mut IcrcVerifier) -> bool {
        match verifier.verify(bytes) {
            Ok(()) => true,
            // A peer of our kind sends single packets for a while and then segments: numbers that
            // segments have are always possible.
            Err(IcrcError::UnlikelyId { id }) if id < SEGMENT_IDS => true,
            Err(_) => {
                self.counters.rx_icrc_errors += 1;
                false
            }
        }
    }

    /// A datagram for queue pair 1: connection management is the device's own business, everything
    /// else goes to the user's queue pair.
    fn handle_gsi(&mut self, src: SocketAddr, packet: &Packet<'_>) -> bool {
        let is_mad = packet.op.service == Service::Ud
            && packet.payload.len() == crate::wire::mad::MAD_LEN
            && packet.ext.deth.is_some_and(|d| d.qkey() == GSI_QKEY);
        if !is_mad {
            self.counters.rx_malformed += 1;
            return false;
        }
        if packet.payload[MAD_CLASS] == CLASS_CM {
            self.handle_cm_mad(src, packet.payload);
            return true;
        }
        let Some(id) = self.gsi else {
            self.counters.rx_dropped_mads += 1;
            return true;
        };
        let dst = self.local.ip();
        if let Ok(qp) = self.qps.get_mut(id)
            && let Machine::Ud(ud) = &mut qp.machine
        {
            ud.handle_packet(packet, src.ip(), dst, &self.mrs, &mut qp.rq, &mut self.out);
        }
        self.settle(id);
        true
    }

    /// After a queue pair did something: hands on what it told, and sees to its turn and its timer.
    pub(super) fn settle(&mut self, id: QpId) {
        if !self.out.is_empty() {
            self.drain(id);
        }
        self.schedule(id);
    }

    fn drain(&mut self, id: QpId) {
        let mut out = std::mem::take(&mut self.out);
        let mut broken: Vec<CqId> = Vec::new();
        let mut shared = None;
        if let Ok(qp) = self.qps.get(id) {
            let (send_cq, recv_cq) = (qp.send_cq, qp.recv_cq);
            shared = qp.srq;
            for event in out.drain(..) {
                let (cq, completion) = match event {
                    RcEvent::Send(c) => (send_cq, c),
                    RcEvent::Recv(c) => (recv_cq, c),
                    RcEvent::Async(e) => {
                        self.on_async(e);
                        continue;
                    }
                };
                if self.complete(cq, completion) {
                    broken.push(cq);
                }
            }
        }
        out.clear();
        self.out = out;
        if let Some(srq) = shared {
            self.check_srq_limit(srq);
        }
        for cq in broken {
            let users: Vec<QpId> = self
                .qps
                .iter()
                .filter(|(_, q)| q.send_cq == cq || q.recv_cq == cq)
                .map(|(id, _)| id)
                .collect();
            // Flushing may break further queues; each breaks once, so this ends.
            for user in users {
                self.fail_qp(user);
            }
        }
    }

    fn on_async(&mut self, event: AsyncEvent) {
        if let AsyncEvent::CommEstablished(qp) = event {
            self.on_comm_established(qp);
        }
        self.raise(event);
    }
}
