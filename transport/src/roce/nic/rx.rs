//! Receiving: every packet is checked and handed to its queue pair.

use std::net::{IpAddr, SocketAddr};
use std::time::Instant;

use super::qp::with_env;
use super::{Machine, Nic, PORTS_PER_QP, Peer};
use crate::rc::{Env, RcEvent};
use crate::roce::batch::{HOP_LIMIT, TxBatch};
use crate::verbs::{AsyncEvent, CqId, PKey, PathMigState, QpId, QpType, RouteHeader};
use crate::wire::cm_msg::MAD_CLASS_OFFSET;
use crate::wire::mad::{Mad, MadClass};
use crate::wire::{
    GSI_QKEY, IcrcFlow, IcrcVerifier, Operation, Packet, Qpn, ROCE_PORT, Service, is_link_local,
};

/// Fields of a received IP header, beside the sender's address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IpFields {
    /// Type of service, or traffic class: DSCP and ECN.
    pub traffic_class: u8,
    /// Hop limit, or time to live, with which the packet has arrived.
    pub hop_limit: u8,
    /// Address of ours that it was sent to, by its index in the GID table.
    pub gid_index: u8,
}

/// UDP port of a peer and the index of our address, which is in the upper half. Each such pair has
/// an ICRC of its own.
pub(super) type FlowPort = u32;

impl Default for IpFields {
    fn default() -> Self {
        Self {
            traffic_class: 0,
            hop_limit: HOP_LIMIT,
            gid_index: 0,
        }
    }
}

impl IpFields {
    /// Whether a router has marked the packet for congestion (RFC 3168, section 5).
    #[must_use]
    pub fn is_marked(self) -> bool {
        self.traffic_class & 0b11 == 0b11
    }
}

/// A packet as it came in.
pub(super) struct Received<'a> {
    pub(super) src: SocketAddr,
    /// Address of the sender for users of datagrams, who may answer there.
    pub(super) datagram_src: IpAddr,
    /// Address that it was sent to.
    pub(super) dst: IpAddr,
    pub(super) bytes: &'a [u8],
    pub(super) ip: IpFields,
    /// It follows another packet in a train.
    pub(super) follows: bool,
}

impl Received<'_> {
    /// The header that a datagram's receiver gets. The ICRC has shown its identification.
    pub(super) fn route_header(&self, identification: u16) -> RouteHeader {
        RouteHeader {
            source: self.datagram_src,
            destination: self.dst,
            traffic_class: self.ip.traffic_class,
            flow_label: 0,
            hop_limit: self.ip.hop_limit,
            identification,
            // With the header of UDP.
            payload_len: (self.bytes.len() + 8) as u16,
        }
    }
}

/// What the packets of a train have in common, as a rule.
#[derive(Default)]
struct Train<'a> {
    /// Checks their ICRCs; without one these are not looked at.
    verifier: Option<&'a mut IcrcVerifier>,
    /// The queue pair of the last packet, by its number.
    qp: Option<(Qpn, QpId)>,
    /// A queue pair whose events wait in [`Nic::out`], and which may have something to send. It is
    /// settled before anything else changes the device.
    unsettled: Option<QpId>,
}

/// A packet that its queue pair has looked at.
pub(super) struct Taken {
    /// It came from the peer of a connected queue pair.
    pub(super) is_peer: bool,
    /// It is the first of a connection that was accepted.
    pub(super) is_first: bool,
}

/// Peer at the other end of a link.
#[derive(Clone, Copy, Debug)]
pub(crate) struct LinkPeer {
    /// Name of the link.
    pub(crate) name: IpAddr,
    /// Address that datagrams are said to come from, and that leads back to the peer.
    pub(crate) datagrams: IpAddr,
}

impl Nic {
    /// Takes in a datagram, or a train of them: `bytes` are packets of `segment` bytes, the last of
    /// which may be shorter.
    pub fn handle_datagram(&mut self, now: Instant, src: SocketAddr, segment: usize, bytes: &[u8]) {
        self.handle_train(now, src, segment, bytes, IpFields::default());
    }

    /// [`Nic::handle_datagram`], for packets with these IP headers.
    pub fn handle_train(
        &mut self,
        now: Instant,
        src: SocketAddr,
        segment: usize,
        bytes: &[u8],
        ip: IpFields,
    ) {
        self.set_now(now);
        // Nothing can be sent to an address whose interface is not known.
        if is_link_local(src.ip()) {
            self.counters.rx_wrong_source += 1;
            return;
        }
        let to = self.locals[usize::from(ip.gid_index)];
        let key = (
            src.ip(),
            FlowPort::from(src.port()) | FlowPort::from(ip.gid_index) << 16,
        );
        let known = self.verifiers.get(&key).copied();
        // Addresses of two families share no packet, so there is no ICRC to compare with.
        let Some(mut verifier) = known.or_else(|| IcrcFlow::new(src, to).map(IcrcVerifier::new))
        else {
            self.counters.rx_malformed += 1;
            return;
        };
        let mut is_peer = known.is_some();
        let mut train = Train {
            verifier: Some(&mut verifier),
            ..Train::default()
        };
        // A train of length 0 cannot be cut.
        for (at, bytes) in bytes.chunks(segment.max(1)).enumerate() {
            let received = Received {
                src,
                datagram_src: src.ip(),
                dst: to.ip(),
                bytes,
                ip,
                follows: at > 0,
            };
            is_peer |= self.handle_packet(&received, &mut train);
        }
        self.settle_train(&mut train);
        verifier.end_train();
        // Only peers are remembered, so that neither noise nor strangers fill the table. Most
        // packets of a peer teach nothing new.
        if is_peer && known != Some(verifier) {
            self.remember(key, verifier);
        }
    }

    /// The packets that the device keeps for itself.
    pub(in crate::roce) fn own_packets(&self) -> Option<&TxBatch> {
        let own = self.own_way.as_ref()?.packets.as_ref()?;
        Some(&own.batch)
    }

    /// Takes in the packets that were kept by the last [`Nic::poll_transmit`]. Answers how many.
    /// To be called after each, before a request may complete: they refer to its memory.
    pub(in crate::roce) fn receive_own(&mut self, now: Instant) -> usize {
        // Taken out, since the packets change the device, and put back with its memory.
        let own_way = self.own_way.as_mut();
        let Some(mut own) = own_way.and_then(|way| way.packets.take()) else {
            return 0;
        };
        let packets = own.batch.packets();
        for group in own.batch.groups() {
            own.train.clear();
            own.batch.copy_group(group, &mut own.train);
            let to = self.locals.iter().position(|at| *at == group.way.dst);
            let ip = IpFields {
                traffic_class: group.way.tos,
                hop_limit: group.way.hop_limit,
                gid_index: to.unwrap_or(0) as u8,
            };
            let src = self.locals[usize::from(group.way.from)];
            self.handle_train(now, src, group.segment, &own.train, ip);
        }
        own.batch.clear();
        if let Some(way) = &mut self.own_way {
            way.packets = Some(own);
        }
        packets
    }

    /// Takes in one packet without an ICRC from a wire that proves where it comes from: a device
    /// on a wire of [`Wire::Links`](super::Wire::Links).
    pub(crate) fn handle_unsealed(&mut self, now: Instant, from: LinkPeer, bytes: &[u8]) {
        debug_assert!(!self.config.has_icrc());
        self.set_now(now);
        let received = Received {
            src: SocketAddr::new(from.name, ROCE_PORT),
            datagram_src: from.datagrams,
            dst: self.locals[0].ip(),
            bytes,
            ip: IpFields::default(),
            follows: false,
        };
        let mut train = Train::default();
        self.handle_packet(&received, &mut train);
        self.settle_train(&mut train);
    }

    /// Remembers how a peer numbers its packets. One that uses more ports than it should forgets
    /// its own oldest one.
    fn remember(&mut self, key: (IpAddr, FlowPort), verifier: IcrcVerifier) {
        if self.verifiers.insert(key, verifier).is_some() {
            return;
        }
        let (ip, port) = key;
        let qps = self.peers.get(&ip).map_or(0, Vec::len);
        let ports = self.verified_ports.entry(ip).or_default();
        ports.push_back(port);
        while ports.len() > qps * PORTS_PER_QP {
            let oldest = ports.pop_front().expect("more than none");
            self.verifiers.remove(&(ip, oldest));
        }
    }

    /// The last queue pair of a peer is gone.
    pub(super) fn forget_peer(&mut self, ip: IpAddr) {
        for port in self.verified_ports.remove(&ip).into_iter().flatten() {
            self.verifiers.remove(&(ip, port));
        }
    }

    /// Parses a packet that is of our partition.
    #[inline]
    pub(super) fn parse<'a>(&mut self, bytes: &'a [u8]) -> Option<Packet<'a>> {
        self.counters.rx_packets += 1;
        self.counters.rx_bytes += bytes.len() as u64;
        let Ok(packet) = Packet::parse(bytes) else {
            self.counters.rx_malformed += 1;
            return None;
        };
        // We are a full member, so a limited member may talk to us as well.
        if (packet.bth.pkey() ^ PKey::DEFAULT.0) & 0x7fff != 0 {
            self.counters.rx_wrong_pkey += 1;
            return None;
        }
        Some(packet)
    }

    /// Takes in one packet; returns whether it came from the peer of a connected queue pair.
    fn handle_packet(&mut self, received: &Received<'_>, train: &mut Train<'_>) -> bool {
        let Some(packet) = self.parse(received.bytes) else {
            return false;
        };
        let qpn = packet.bth.dest_qpn();
        let verifier = train.verifier.as_deref_mut();
        if qpn == Qpn::GSI {
            if let Some(id) = self.verify(received, verifier) {
                self.settle_train(train);
                self.handle_gsi(received, &packet, id);
            }
            return false;
        }
        // The number is looked up before the ICRC is computed over the whole packet, and the
        // sender compared: a flood that does not know both costs little.
        let found = train.qp.filter(|&(last, _)| last == qpn);
        let found = found.map(|(_, id)| id);
        let Some(id) = found.or_else(|| self.by_qpn.get(&qpn.value()).copied()) else {
            self.counters.rx_unknown_qp += 1;
            return false;
        };
        let is_plain = self.is_from_peer(id, received, &packet);
        if !is_plain && !self.is_on_path(id, received, &packet) {
            return false;
        }
        let Some(ip_id) = self.verify(received, verifier) else {
            return false;
        };
        train.qp = Some((qpn, id));
        if train.unsettled != Some(id) {
            self.settle_train(train);
        }
        if !is_plain {
            // What waits was sent on the path of before.
            self.settle_train(train);
            if !self.follow_path(id, received, &packet) {
                return false;
            }
        }
        let Some(taken) = self.hand_over(id, received, &packet, ip_id) else {
            return false;
        };
        train.unsettled = Some(id);
        // Data shows as well as an RTU that the peer is ready. The RTU may be lost, and the peer
        // repeats it only when it is asked by another REP.
        if taken.is_first {
            self.settle_train(train);
            self.on_first_packet(id);
        }
        taken.is_peer
    }

    /// Hands a packet that has been checked to its queue pair. `None` if that does not take it.
    fn hand_over(
        &mut self,
        id: QpId,
        received: &Received<'_>,
        packet: &Packet<'_>,
        ip_id: u16,
    ) -> Option<Taken> {
        if packet.op.service == Service::Xrc {
            return self.hand_over_xrc(id, packet);
        }
        let (src, is_marked) = (received.src, received.ip.is_marked());
        let now = self.now;
        let qp = self.qps.get_mut(id).ok()?;
        // A notification has no PSN that would have to be guessed, so it has to come from where
        // packets with a right one come from. So does a mark, which is answered with a
        // notification.
        let is_new_port = qp.source_port != Some(src.port());
        let is_cnp = packet.op.operation == Operation::CongestionNotification;
        if is_cnp && is_new_port {
            qp.counters.wrong_source += 1;
            self.counters.rx_wrong_source += 1;
            return None;
        }
        with_env!(self, qp, env);
        let taken = match &mut qp.machine {
            Machine::Rc(rc) => {
                if is_marked && !is_new_port {
                    rc.handle_mark(now, packet);
                }
                // Only the queue pair knows whether the packet was in sequence. It counts what it
                // does not take, so with an equal count the port is taken for the peer's.
                let refused = is_new_port.then(|| rc.counters().refused());
                rc.handle_packet(now, packet, &mut env);
                if refused.is_some_and(|before| before == rc.counters().refused()) {
                    qp.source_port = Some(src.port());
                    // A mark on the first packet from a new port counts as soon as the port is
                    // proved.
                    if is_marked {
                        rc.handle_mark(now, packet);
                    }
                }
                Taken {
                    is_peer: true,
                    is_first: qp.awaits_first_packet && rc.has_received(),
                }
            }
            // Packets of these have a service of their own, or there are none.
            Machine::Xrc(_) | Machine::Stream(_) => return None,
            Machine::Uc(uc) => {
                uc.handle_packet(packet, &mut env);
                Taken {
                    is_peer: true,
                    is_first: false,
                }
            }
            Machine::Ud(ud) => {
                let header = received.route_header(ip_id);
                ud.handle_packet(packet, &header, env.mrs, env.rq, env.out);
                Taken {
                    is_peer: false,
                    is_first: false,
                }
            }
        };
        qp.awaits_first_packet &= !taken.is_first;
        Some(taken)
    }

    /// Settles the queue pair of the last packets of a train.
    fn settle_train(&mut self, train: &mut Train<'_>) {
        if let Some(id) = train.unsettled.take() {
            self.settle(id);
        }
    }

    /// Whether a queue pair is of the packet's kind, and, if it has a peer, has this one, and has no
    /// other path that the packet could be about.
    fn is_from_peer(&self, id: QpId, received: &Received<'_>, packet: &Packet<'_>) -> bool {
        let Ok(qp) = self.qps.get(id) else {
            return false;
        };
        let is_peer =
            |peer: &Peer| peer.is_way_of(received) && qp.mig_state == PathMigState::Migrated;
        let (service, is_peer) = match (&qp.machine, &qp.peer) {
            (Machine::Rc(_), peer) => (Service::Rc, peer.as_ref().is_some_and(is_peer)),
            (Machine::Uc(_), peer) => (Service::Uc, peer.as_ref().is_some_and(is_peer)),
            (Machine::Xrc(_), peer) => (Service::Xrc, peer.as_ref().is_some_and(is_peer)),
            (Machine::Ud(_), _) => (Service::Ud, true),
            (Machine::Stream(_), _) => return false,
        };
        is_peer && packet.op.service == service
    }

    /// The identification in the IP header of a packet whose ICRC is right.
    pub(super) fn verify(
        &mut self,
        received: &Received<'_>,
        verifier: Option<&mut IcrcVerifier>,
    ) -> Option<u16> {
        let Some(verifier) = verifier else {
            return Some(0);
        };
        let verified = verifier.verify(received.bytes, received.follows);
        if verified.is_err() {
            self.counters.rx_icrc_errors += 1;
        }
        verified.ok()
    }

    /// A datagram for queue pair 1: connection management and questions of performance management
    /// are the device's own business, everything else goes to the user's queue pair.
    fn handle_gsi(&mut self, received: &Received<'_>, packet: &Packet<'_>, ip_id: u16) {
        // Queue pair 1 has a Q_Key that every CM knows. It keeps out datagrams that were meant
        // for another queue pair, not strangers.
        let is_datagram = packet.op.service == Service::Ud
            && packet.ext.deth.is_some_and(|d| d.qkey() == GSI_QKEY);
        let mad = <&Mad>::try_from(packet.payload).ok();
        let Some(mad) = mad.filter(|_| is_datagram) else {
            self.counters.rx_malformed += 1;
            return;
        };
        if mad[MAD_CLASS_OFFSET] == MadClass::ComMgt as u8 {
            if !self.handle_cm_mad(received, mad) {
                self.counters.rx_dropped_mads += 1;
            }
            return;
        }
        let asker = packet.ext.deth.map(|deth| deth.src_qpn());
        // The agents answer from the first address.
        let is_asked = asker == Some(Qpn::GSI) && received.ip.gid_index == 0;
        if is_asked && self.handle_agent_mad(received.src.ip(), mad) {
            return;
        }
        let Some(id) = self.gsi else {
            self.counters.rx_dropped_mads += 1;
            return;
        };
        if let Ok(qp) = self.qps.get_mut(id)
            && let Machine::Ud(ud) = &mut qp.machine
        {
            let header = received.route_header(ip_id);
            ud.handle_packet(packet, &header, &self.mrs, &mut qp.rq, &mut self.out);
        }
        self.settle(id);
    }

    /// After a queue pair did something: hands on its events, and sees to its turn and its timer.
    pub(super) fn settle(&mut self, id: QpId) {
        if !self.out.is_empty() {
            self.drain(id);
        }
        self.schedule(id);
    }

    fn drain(&mut self, id: QpId) {
        // Taken out, since passing the events on changes the device, and put back with its
        // memory.
        let mut out = std::mem::take(&mut self.out);
        let mut broken: Vec<CqId> = Vec::new();
        let mut shared = None;
        if let Ok(qp) = self.qps.get(id) {
            let (send_cq, notifies_drain) = (qp.send_cq, qp.notifies_drain);
            let recv_cq = match qp.qp_type {
                QpType::XrcTgt => qp.srq.and_then(|srq| self.xrc_cq(srq)),
                _ => Some(qp.recv_cq),
            };
            shared = qp.srq;
            for event in out.drain(..) {
                let (cq, completion) = match event {
                    RcEvent::Send(c) => (send_cq, c),
                    RcEvent::Recv(c) => match recv_cq {
                        Some(cq) => (cq, c),
                        // Its queue was destroyed in the middle of its message.
                        None => continue,
                    },
                    // Its owner has not asked for it.
                    RcEvent::Async(AsyncEvent::SqDrained(_)) if !notifies_drain => continue,
                    RcEvent::Async(e) => {
                        self.raise(e);
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
        // After the receives that this round took.
        if let Some(srq) = shared {
            self.check_srq_limit(srq);
        }
        for cq in broken {
            self.fail_users(cq);
        }
    }

    /// A queue that overran has lost completions, so the queue pairs that complete there cannot go
    /// on.
    pub(super) fn fail_users(&mut self, cq: CqId) {
        let is_user = |qp: &super::Qp| qp.send_cq == cq || qp.recv_cq == cq;
        let users = self.qps.iter().filter(|(_, qp)| is_user(qp));
        let users: Vec<QpId> = users.map(|(id, _)| id).collect();
        // Flushing may break further queues; each breaks once, so this ends.
        for user in users {
            self.fail_qp(user);
        }
    }

    /// Has the connection manager notified when the peer's first packet arrives.
    pub(in crate::roce) fn await_first_packet(&mut self, id: QpId) {
        if let Ok(qp) = self.qps.get_mut(id) {
            qp.awaits_first_packet = true;
        }
    }
}
