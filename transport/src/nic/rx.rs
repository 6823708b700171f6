//! Receive path: checks each packet and passes it to its queue pair.

use std::net::SocketAddr;
use std::time::Instant;

use super::qp::{Machine, Peer};
use super::received::{IpFields, LinkPeer, Received};
use super::tables::FlowPort;
use super::{Nic, with_env};
use crate::nic::batch::TxBatch;
use crate::rc::Env;
use crate::verbs::{PKey, PathMigState, QpId};
use crate::wire::cm_msg::MAD_CLASS_OFFSET;
use crate::wire::mad::{Mad, MadClass};
use crate::wire::{
    GSI_QKEY, IcrcFlow, IcrcVerifier, Operation, Packet, Qpn, ROCE_PORT, Service, is_link_local,
};

/// State shared by the packets of a train.
#[derive(Default)]
struct Train<'a> {
    /// Used to verify the ICRC; `None` to skip this check.
    verifier: Option<&'a mut IcrcVerifier>,
    /// Number and id of the last QP.
    qp: Option<(Qpn, QpId)>,
    /// QP with pending events in `Device::out`, which may also have something to send. Its turn must
    /// be finished before we change anything else on the device.
    pending: Option<QpId>,
}

/// Result of processing a packet.
pub(super) struct RxOutcome {
    /// Set if this packet was sent by the peer of a connected QP.
    pub(super) is_peer: bool,
    /// Set if this is the first packet on an accepted connection.
    pub(super) is_first: bool,
}

impl Nic {
    /// Handles a received datagram or a train of datagrams: `bytes` contains packets of `segment`
    /// bytes, but the last can be shorter.
    pub fn handle_datagram(&mut self, now: Instant, src: SocketAddr, segment: usize, bytes: &[u8]) {
        self.handle_train(now, src, segment, bytes, IpFields::default());
    }

    /// Same as [`Nic::handle_datagram`], but with IP header fields.
    pub fn handle_train(
        &mut self,
        now: Instant,
        src: SocketAddr,
        segment: usize,
        bytes: &[u8],
        ip: IpFields,
    ) {
        self.device.set_now(now);
        // We can't send to a link-local address since we don't know the interface.
        if is_link_local(src.ip()) {
            self.device.counters.rx_wrong_source += 1;
            return;
        }
        let to = self.device.port.addrs()[usize::from(ip.gid_index)];
        let key = (
            src.ip(),
            FlowPort::from(src.port()) | FlowPort::from(ip.gid_index) << 16,
        );
        let known = self.device.peers.verifier(key);
        // If the address families don't match, the packet is invalid and there is no ICRC to check.
        let Some(mut verifier) = known.or_else(|| IcrcFlow::new(src, to).map(IcrcVerifier::new))
        else {
            self.device.counters.rx_malformed += 1;
            return;
        };
        let mut is_peer = known.is_some();
        let mut train = Train {
            verifier: Some(&mut verifier),
            ..Train::default()
        };
        // A segment size of 0 is invalid, and would cause a panic here.
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
        self.flush_train(&mut train);
        verifier.end_train();
        // Only store this for peers, so the table cannot be filled up by noise or strangers. For
        // most packets, there is nothing new to store.
        if is_peer && known != Some(verifier) {
            self.device.peers.remember(key, verifier);
        }
    }

    /// Returns the packets to be looped back.
    pub(crate) fn own_packets(&self) -> Option<&TxBatch> {
        self.own.as_ref().map(|own| &own.batch)
    }

    /// Receives all packets looped back by the last [`Nic::poll_transmit`]. This will return the
    /// number of packets. This must be called after each transmit, before any request can complete,
    /// because the packets reference memory of these requests.
    pub(crate) fn receive_own(&mut self, now: Instant) -> usize {
        // We need to take this because handling packets requires `self`. It is put back afterwards
        // to reuse its memory.
        let Some(mut own) = self.own.take() else {
            return 0;
        };
        let packets = own.batch.packets();
        for group in own.batch.groups() {
            own.train.clear();
            own.batch.copy_group(group, &mut own.train);
            let mut locals = self.device.port.addrs().iter();
            let to = locals.position(|at| *at == group.way.dst);
            let ip = IpFields {
                traffic_class: group.way.tos,
                hop_limit: group.way.hop_limit,
                gid_index: to.unwrap_or(0) as u8,
            };
            let src = self.device.port.addrs()[usize::from(group.way.from)];
            self.handle_train(now, src, group.segment, &own.train, ip);
        }
        own.batch.clear();
        self.own = Some(own);
        packets
    }

    /// Handles a packet without an ICRC, received from a wire with a trusted source
    /// ([`Wire::Links`](super::Wire::Links)).
    pub(crate) fn handle_unsealed(&mut self, now: Instant, from: LinkPeer, bytes: &[u8]) {
        debug_assert!(!self.device.config.has_icrc());
        self.device.set_now(now);
        let received = Received {
            src: SocketAddr::new(from.name, ROCE_PORT),
            datagram_src: from.datagrams,
            dst: self.device.port.addr().ip(),
            bytes,
            ip: IpFields::default(),
            follows: false,
        };
        let mut train = Train::default();
        self.handle_packet(&received, &mut train);
        self.flush_train(&mut train);
    }

    /// Parses a packet and checks its partition key.
    #[inline]
    pub(super) fn parse<'a>(&mut self, bytes: &'a [u8]) -> Option<Packet<'a>> {
        self.device.counters.rx_packets += 1;
        self.device.counters.rx_bytes += bytes.len() as u64;
        let Ok(packet) = Packet::parse(bytes) else {
            self.device.counters.rx_malformed += 1;
            return None;
        };
        // We are a full member, so we also accept packets from limited members.
        if (packet.bth.pkey() ^ PKey::DEFAULT.0) & 0x7fff != 0 {
            self.device.counters.rx_wrong_pkey += 1;
            return None;
        }
        Some(packet)
    }

    /// Handles a packet. Returns whether it was sent by the peer of a connected QP.
    fn handle_packet(&mut self, received: &Received<'_>, train: &mut Train<'_>) -> bool {
        let Some(packet) = self.parse(received.bytes) else {
            return false;
        };
        let qpn = packet.bth.dest_qpn();
        let verifier = train.verifier.as_deref_mut();
        if qpn == Qpn::GSI {
            if let Some(id) = self.verify(received, verifier) {
                self.flush_train(train);
                self.handle_gsi(received, &packet, id);
            }
            return false;
        }
        // Look up the QP and check the source address before computing the ICRC over the entire
        // packet. This keeps the cost of a flood low if the attacker does not know both.
        let found = train.qp.filter(|&(last, _)| last == qpn);
        let found = found.map(|(_, id)| id);
        let Some(id) = found.or_else(|| self.device.qps.find(qpn)) else {
            self.device.counters.rx_unknown_qp += 1;
            return false;
        };
        let is_plain = self.is_from_peer(id, received, &packet);
        if !is_plain && !self.device.is_on_path(id, received, &packet) {
            return false;
        }
        let Some(ip_id) = self.verify(received, verifier) else {
            return false;
        };
        train.qp = Some((qpn, id));
        if train.pending != Some(id) {
            self.flush_train(train);
        }
        if !is_plain {
            // Pending packets must be sent on the previous path.
            self.flush_train(train);
            let is_accepted = self.device.follow_path(id, received, &packet);
            self.follow_migrations();
            if !is_accepted {
                return false;
            }
        }
        let Some(taken) = self.hand_over(id, received, &packet, ip_id) else {
            return false;
        };
        train.pending = Some(id);
        // Like an RTU, data indicates that the peer is ready. The RTU can be lost, and the peer
        // only retransmits it in response to another REP.
        if taken.is_first {
            self.flush_train(train);
            self.cm.on_first_packet(&mut self.device, id);
        }
        taken.is_peer
    }

    /// Passes a verified packet to the QP. Returns `None` if it is not accepted.
    fn hand_over(
        &mut self,
        id: QpId,
        received: &Received<'_>,
        packet: &Packet<'_>,
        ip_id: u16,
    ) -> Option<RxOutcome> {
        if packet.op.service == Service::Xrc {
            return self.hand_over_xrc(id, packet);
        }
        let (src, is_marked) = (received.src, received.ip.is_marked());
        let now = self.device.now();
        let qp = self.device.qps.get_mut(id).ok()?;
        // A CNP does not contain a PSN which an attacker would have to guess, so it must use the
        // same source port as packets with a valid PSN. This is also required for a congestion
        // mark, since we send a CNP in response.
        let is_new_port = qp.source_port != Some(src.port());
        let is_cnp = packet.op.operation == Operation::CongestionNotification;
        if is_cnp && is_new_port {
            qp.counters.wrong_source += 1;
            self.device.counters.rx_wrong_source += 1;
            return None;
        }
        with_env!(self.device, qp, env);
        let taken = match &mut qp.machine {
            Machine::Rc(rc) => {
                if is_marked && !is_new_port {
                    rc.handle_mark(now, packet);
                }
                // Only the QP knows if the packet is in sequence. It counts all packets that it
                // doesn't accept, so if the count does not change, this port is used by the peer.
                let refused = is_new_port.then(|| rc.counters().refused());
                rc.handle_packet(now, packet, &mut env);
                if refused.is_some_and(|before| before == rc.counters().refused()) {
                    qp.source_port = Some(src.port());
                    // If this is the first packet from a new port, the mark is valid now that we
                    // have verified the port.
                    if is_marked {
                        rc.handle_mark(now, packet);
                    }
                }
                RxOutcome {
                    is_peer: true,
                    is_first: qp.awaits_first_packet && rc.has_received(),
                }
            }
            // These types use a different service, or don't have packets.
            Machine::Xrc(_) | Machine::Stream(_) => return None,
            Machine::Uc(uc) => {
                uc.handle_packet(packet, &mut env);
                RxOutcome {
                    is_peer: true,
                    is_first: false,
                }
            }
            Machine::Ud(ud) => {
                let header = received.route_header(ip_id);
                ud.handle_packet(packet, &header, env.mrs, env.rq, env.out);
                RxOutcome {
                    is_peer: false,
                    is_first: false,
                }
            }
        };
        qp.awaits_first_packet &= !taken.is_first;
        Some(taken)
    }

    /// Finishes the turn of the QP of the last packets in a train.
    fn flush_train(&mut self, train: &mut Train<'_>) {
        if let Some(id) = train.pending.take() {
            self.device.finish_turn(id);
        }
    }

    /// Returns whether a packet matches the service type of a QP and, if connected, its peer. This
    /// will return `false` if the QP has an alternate path which could match as well.
    fn is_from_peer(&self, id: QpId, received: &Received<'_>, packet: &Packet<'_>) -> bool {
        let Ok(qp) = self.device.qps.get(id) else {
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

    /// Verifies the ICRC and returns the identification from the IP header.
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
            self.device.counters.rx_icrc_errors += 1;
        }
        verified.ok()
    }

    /// Handles a datagram for QP1. Connection management and performance management requests are
    /// handled by the device. All other datagrams are passed to the application's QP.
    fn handle_gsi(&mut self, received: &Received<'_>, packet: &Packet<'_>, ip_id: u16) {
        // The Q_Key of QP1 is well-known. This check only rejects datagrams that were meant for a
        // different QP; it doesn't protect against attackers.
        let is_datagram = packet.op.service == Service::Ud
            && packet.ext.deth.is_some_and(|d| d.qkey() == GSI_QKEY);
        let mad = <&Mad>::try_from(packet.payload).ok();
        let Some(mad) = mad.filter(|_| is_datagram) else {
            self.device.counters.rx_malformed += 1;
            return;
        };
        if mad[MAD_CLASS_OFFSET] == MadClass::ComMgt as u8 {
            if !self.cm.handle_mad(&mut self.device, received, mad) {
                self.device.counters.rx_dropped_mads += 1;
            }
            return;
        }
        let source_qpn = packet.ext.deth.map(|deth| deth.src_qpn());
        // Agents always respond from the first address.
        let is_request = source_qpn == Some(Qpn::GSI) && received.ip.gid_index == 0;
        if is_request
            && self
                .agents
                .handle_mad(&mut self.device, received.src.ip(), mad)
        {
            return;
        }
        let Some(id) = self.device.qps.gsi() else {
            self.device.counters.rx_dropped_mads += 1;
            return;
        };
        if let Ok(qp) = self.device.qps.get_mut(id)
            && let Machine::Ud(ud) = &mut qp.machine
        {
            let header = received.route_header(ip_id);
            with_env!(self.device, qp, env);
            ud.handle_packet(packet, &header, env.mrs, env.rq, env.out);
        }
        self.device.finish_turn(id);
    }
}
