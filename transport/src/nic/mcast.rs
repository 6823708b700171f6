//! Multicast groups and the datagram queue pairs attached to them (IBTA 10.5.2, 11.3).
//!
//! A group is identified by an MGID, which for RoCEv2 is the IP address of the group (annex
//! A17.4.5.1): an IPv6 multicast address, or an IPv4-mapped address. The device owner must join a
//! group when the first queue pair is attached, as indicated by [`Nic::attach_mcast`], and leave it
//! when the last queue pair has been detached ([`Nic::poll_left_group`]). Multicast datagrams are
//! sent to queue pair [`Qpn::MULTICAST`], and each attached queue pair with a matching Q_Key will
//! receive a copy.
//!
//! Bounds: [`NicLimits`](super::NicLimits) sets the maximum number of groups and of queue pairs per
//! group.

use std::net::{IpAddr, SocketAddr};
use std::time::Instant;

use super::qp::with_env;
use super::rx::{IpFields, Received};
use super::{Machine, Nic, Wire};
use crate::rc::Env;
use crate::verbs::{Gid, QpId, QpType, VerbsError};
use crate::wire::{IcrcFlow, IcrcVerifier, Qpn, ROCE_PORT, Service, is_link_local};

/// QPs attached to a group, in the order they were attached.
#[derive(Debug)]
pub(super) struct Group {
    addr: IpAddr,
    qps: Vec<QpId>,
}

#[allow(
    missing_docs,
    reason = "the calls of the verbs traits, documented there"
)]
impl Nic {
    /// Attaches a QP. If it is the first in its group, returns the group that should be joined.
    pub fn attach_mcast(&mut self, qp: QpId, mgid: Gid) -> Result<Option<IpAddr>, VerbsError> {
        if self.qps.get(qp)?.qp_type != QpType::Ud {
            return Err(VerbsError::WrongQpType("multicast"));
        }
        let addr = mgid.ip();
        if !addr.is_multicast() || !self.has_groups_like(addr) {
            return Err(VerbsError::InvalidParameter("multicast group"));
        }
        let limits = &self.config.limits;
        if let Some(group) = self.groups.iter_mut().find(|group| group.addr == addr) {
            // A QP is only attached once (IBTA 11.3.1).
            if group.qps.contains(&qp) {
                return Ok(None);
            }
            if group.qps.len() >= limits.max_mcast_qp_attach as usize {
                return Err(VerbsError::InsufficientResources("queue pairs of a group"));
            }
            group.qps.push(qp);
            return Ok(None);
        }
        if self.groups.len() >= limits.max_mcast_grp as usize {
            return Err(VerbsError::InsufficientResources("multicast groups"));
        }
        // Don't leave the group if it has just been left.
        self.left_groups.retain(|left| *left != addr);
        self.groups.push(Group {
            addr,
            qps: vec![qp],
        });
        Ok(Some(addr))
    }

    pub fn detach_mcast(&mut self, qp: QpId, mgid: Gid) -> Result<(), VerbsError> {
        self.qps.get(qp)?;
        let addr = mgid.ip();
        let group = self.groups.iter_mut().find(|group| group.addr == addr);
        let attached = group.and_then(|group| group.qps.iter().position(|other| *other == qp));
        if attached.is_none() {
            return Err(VerbsError::InvalidParameter("multicast group"));
        }
        self.detach(qp, |group| group == addr);
        Ok(())
    }

    /// Detaches a QP from all groups before it is destroyed.
    pub(super) fn detach_all(&mut self, qp: QpId) {
        self.detach(qp, |_| true);
    }

    fn detach(&mut self, qp: QpId, from: impl Fn(IpAddr) -> bool) {
        let left = &mut self.left_groups;
        self.groups.retain_mut(|group| {
            if from(group.addr) {
                group.qps.retain(|other| *other != qp);
            }
            if group.qps.is_empty() {
                left.push(group.addr);
            }
            !group.qps.is_empty()
        });
    }

    /// Returns the next group without any attached QPs.
    pub(crate) fn poll_left_group(&mut self) -> Option<IpAddr> {
        self.left_groups.pop()
    }

    /// Returns whether the wire of this device supports multicast groups of this address family.
    pub(super) fn has_groups_like(&self, addr: IpAddr) -> bool {
        self.config.wire == Wire::Network && addr.is_ipv4() == self.config.addr.is_ipv4()
    }

    /// Handles a datagram received for a multicast group.
    pub(crate) fn handle_group_datagram(
        &mut self,
        now: Instant,
        src: SocketAddr,
        group: IpAddr,
        bytes: &[u8],
        ip: IpFields,
    ) {
        self.set_now(now);
        let Some(packet) = self.parse(bytes) else {
            return;
        };
        self.counters.rx_multicast += 1;
        // Same check as for unicast datagrams.
        if is_link_local(src.ip()) {
            self.counters.rx_wrong_source += 1;
            return;
        }
        let at = self.groups.iter().position(|known| known.addr == group);
        let deth = packet.ext.deth;
        let is_multicast = packet.bth.dest_qpn() == Qpn::MULTICAST;
        let (Some(at), Some(deth), true, Service::Ud) = (at, deth, is_multicast, packet.op.service)
        else {
            self.counters.rx_unknown_qp += 1;
            return;
        };
        // The ICRC covers the group address. Any number of hosts can send to a group, so we don't
        // store state for the sender.
        let Some(flow) = IcrcFlow::new(src, SocketAddr::new(group, ROCE_PORT)) else {
            self.counters.rx_malformed += 1;
            return;
        };
        let received = Received {
            src,
            datagram_src: src.ip(),
            dst: group,
            bytes,
            ip,
            follows: false,
        };
        let mut verifier = IcrcVerifier::new(flow);
        let Some(identification) = self.verify(&received, Some(&mut verifier)) else {
            return;
        };
        let header = received.route_header(identification);
        let is_own = src.ip() == self.locals[0].ip();
        // An unexpected datagram can cause a QP to fail, but it doesn't attach or detach QPs.
        for member in 0..self.groups[at].qps.len() {
            let id = self.groups[at].qps[member];
            let Ok(qp) = self.qps.get_mut(id) else {
                continue;
            };
            if is_own && qp.blocks_own_mcast && qp.qpn == deth.src_qpn().value() {
                continue;
            }
            with_env!(self, qp, env);
            if let Machine::Ud(ud) = &mut qp.machine {
                ud.handle_packet(&packet, &header, env.mrs, env.rq, env.out);
            }
            self.finish_turn(id);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use riser_memory::Memory;

    use super::*;
    use crate::nic::{NicConfig, NicLimits};
    use crate::verbs::{
        Access, Completion, CqId, Mr, QKey, QpAttr, QpCap, QpInitAttr, QpState, RecvWr, Sge, WrId,
    };

    /// A datagram from QP 0x77 at 10.0.0.2, port 49152, to 239.1.2.3, with queue key 0x11. The ICRC
    /// was computed using the CRC from zlib.
    const DATAGRAM: [u8; 28] = [
        0x64, 0x00, 0xff, 0xff, 0x00, 0xff, 0xff, 0xff, 0x00, 0x00, 0x00, 0x01, 0x00, 0x00, 0x00,
        0x11, 0x00, 0x00, 0x00, 0x77, b'p', b'i', b'n', b'g', 0xf1, 0xaf, 0xe2, 0x2c,
    ];

    fn src() -> SocketAddr {
        "10.0.0.2:49152".parse().unwrap()
    }

    fn group(last: u8) -> IpAddr {
        Ipv4Addr::new(239, 1, 2, last).into()
    }

    struct Bench {
        nic: Nic,
        init: QpInitAttr,
        memory: Memory,
        mr: Mr,
        cq: CqId,
    }

    impl Bench {
        /// Creates a device that supports two groups with two QPs each.
        fn new() -> Self {
            let config = NicConfig {
                limits: NicLimits {
                    max_mcast_grp: 2,
                    max_mcast_qp_attach: 2,
                    ..NicLimits::default()
                },
                ..NicConfig::new("10.0.0.1".parse().unwrap(), [7; 32])
            };
            let mut nic = Nic::new(config, Instant::now());
            let (pd, cq) = (nic.alloc_pd().unwrap(), nic.create_cq(16).unwrap());
            let memory = Memory::new(4096).unwrap();
            let access = Access::LOCAL_WRITE;
            let mr = nic.reg_mr(pd, &memory.whole(), access).unwrap();
            let init = QpInitAttr::new(pd, cq, QpType::Ud, QpCap::new(4, 4));
            Self {
                nic,
                init,
                memory,
                mr,
                cq,
            }
        }

        /// Creates a QP with a posted receive and attaches it to a group.
        fn attached(&mut self, to: u8) -> (QpId, Result<Option<IpAddr>, VerbsError>) {
            let qp = self.nic.create_qp(&self.init).unwrap();
            let init = QpAttr {
                pkey_index: Some(0),
                port: Some(1),
                qkey: Some(QKey(0x11)),
                ..QpAttr::to(QpState::Init)
            };
            for step in [init, QpAttr::to(QpState::Rtr)] {
                self.nic.modify_qp(qp, &step).unwrap();
            }
            let sges = [Sge {
                addr: self.mr.addr,
                length: 64,
                lkey: self.mr.lkey,
            }];
            let wr_id = WrId(1);
            let wr = RecvWr { wr_id, sges: &sges };
            self.nic.post_recv(qp, &[wr]).unwrap();
            let attached = self.nic.attach_mcast(qp, group(to).into());
            (qp, attached)
        }

        fn receive(&mut self, to: u8, bytes: &[u8]) -> Vec<Completion> {
            let (now, ip) = (self.nic.now(), IpFields::default());
            self.nic
                .handle_group_datagram(now, src(), group(to), bytes, ip);
            let mut out = Vec::new();
            self.nic.poll_cq(self.cq, 16, &mut out).unwrap();
            out
        }
    }

    #[test]
    fn attached_qps_receive_copy() {
        let mut b = Bench::new();
        let (first, joined) = b.attached(3);
        assert_eq!(joined, Ok(Some(group(3))));
        let (second, joined) = b.attached(3);
        assert_eq!(joined, Ok(None));
        let got = b.receive(3, &DATAGRAM);
        let qps: Vec<_> = got.iter().map(|c| c.qp).collect();
        assert_eq!(qps, [first, second]);
        assert!(got.iter().all(|c| c.status.is_ok() && c.src_qp == 0x77));
        let bytes = b.memory.whole().to_vec();
        assert_eq!(bytes[36..40], [239, 1, 2, 3]);
        assert_eq!(&bytes[40..44], b"ping");
    }

    #[test]
    fn forged_datagrams_are_dropped() {
        let mut b = Bench::new();
        let _ = b.attached(3);
        let _ = b.attached(4);
        // The ICRC covers the group address.
        assert_eq!(b.receive(4, &DATAGRAM), []);
        assert_eq!(b.nic.counters().rx_icrc_errors, 1);
        // A group without QPs, a unicast QP number, and a different service.
        assert_eq!(b.receive(5, &DATAGRAM), []);
        for (at, byte) in [(7, 1), (0, 0x04)] {
            let mut other = DATAGRAM;
            other[at] = byte;
            assert_eq!(b.receive(3, &other), []);
        }
        assert_eq!(b.nic.counters().rx_unknown_qp, 3);
        for len in 0..DATAGRAM.len() {
            assert_eq!(b.receive(3, &DATAGRAM[..len]), []);
        }
        assert_eq!(b.receive(3, &DATAGRAM).len(), 1, "the group works");
    }

    #[test]
    fn multicast_groups_and_qps_are_limited() {
        let mut b = Bench::new();
        let (first, _) = b.attached(3);
        let _ = b.attached(3);
        let (third, refused) = b.attached(3);
        let full = |what| Err(VerbsError::InsufficientResources(what));
        assert_eq!(refused, full("queue pairs of a group"));
        let gid = |last| Gid::from(group(last));
        assert_eq!(
            b.nic.attach_mcast(first, gid(3)),
            Ok(None),
            "once is enough"
        );
        assert_eq!(b.nic.attach_mcast(first, gid(4)), Ok(Some(group(4))));
        assert_eq!(b.nic.attach_mcast(third, gid(5)), full("multicast groups"));
        let other_family = Gid::from("ff15::1".parse::<IpAddr>().unwrap());
        for gid in [other_family, Gid::from(src().ip())] {
            let refused = b.nic.attach_mcast(third, gid);
            assert_eq!(
                refused,
                Err(VerbsError::InvalidParameter("multicast group"))
            );
        }
    }

    #[test]
    fn last_detach_leaves_group() {
        let mut b = Bench::new();
        let (first, _) = b.attached(3);
        let (second, _) = b.attached(3);
        b.nic.attach_mcast(second, group(4).into()).unwrap();
        b.nic.detach_mcast(first, group(3).into()).unwrap();
        assert_eq!(b.nic.poll_left_group(), None);
        assert!(b.nic.detach_mcast(first, group(3).into()).is_err());
        b.nic.destroy_qp(second).unwrap();
        let mut left: Vec<_> = std::iter::from_fn(|| b.nic.poll_left_group()).collect();
        left.sort();
        assert_eq!(left, [group(3), group(4)]);
        // A group must not be left if it has been joined again in the meantime.
        b.nic.attach_mcast(first, group(3).into()).unwrap();
        b.nic.detach_mcast(first, group(3).into()).unwrap();
        let again = b.nic.attach_mcast(first, group(3).into());
        assert_eq!(again, Ok(Some(group(3))));
        assert_eq!(b.nic.poll_left_group(), None);
    }

    #[test]
    fn only_datagram_qps_can_be_attached() {
        let mut b = Bench::new();
        let init = QpInitAttr {
            qp_type: QpType::Rc,
            ..b.init
        };
        let rc = b.nic.create_qp(&init).unwrap();
        let refused = b.nic.attach_mcast(rc, group(3).into());
        assert_eq!(refused, Err(VerbsError::WrongQpType("multicast")));
    }
}
