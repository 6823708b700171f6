//! Multicast groups and the datagram queue pairs attached to them (IBTA 10.5.2, 11.3).
//!
//! A group is identified by an MGID, which for RoCEv2 is the IP address of the group (annex
//! A17.4.5.1): an IPv6 multicast address, or an IPv4-mapped address. The device owner must join a
//! group when the first queue pair is attached, as indicated by [`Device::attach_group`], and leave it
//! when the last queue pair has been detached (`Groups::poll_left`). Multicast datagrams are
//! sent to queue pair [`Qpn::MULTICAST`], and each attached queue pair with a matching Q_Key will
//! receive a copy.
//!
//! Bounds: [`NicLimits`](super::NicLimits) sets the maximum number of groups and of queue pairs per
//! group.

use std::net::{IpAddr, SocketAddr};
use std::time::Instant;

use super::qp::Machine;
use super::received::{IpFields, Received};
use super::{Device, Nic, with_env};
use crate::rc::Env;
use crate::verbs::{Gid, QpId, QpType, VerbsError};
use crate::wire::{IcrcFlow, IcrcVerifier, Qpn, ROCE_PORT, Service, is_link_local};

impl Device {
    /// Attaches a QP. If it is the first in its group, returns the group that should be joined.
    ///
    /// # Errors
    /// See [`Verbs::attach_mcast`](crate::verbs::Verbs::attach_mcast).
    pub fn attach_group(&mut self, qp: QpId, mgid: Gid) -> Result<Option<IpAddr>, VerbsError> {
        if self.qps.get(qp)?.qp_type != QpType::Ud {
            return Err(VerbsError::WrongQpType("multicast"));
        }
        let addr = mgid.ip();
        if !addr.is_multicast() || !self.port.has_groups_like(addr) {
            return Err(VerbsError::InvalidParameter("multicast group"));
        }
        self.groups.attach(qp, addr, &self.config.limits)
    }

    /// Detaches a QP from a group.
    ///
    /// # Errors
    /// See [`Verbs::detach_mcast`](crate::verbs::Verbs::detach_mcast).
    pub fn detach_group(&mut self, qp: QpId, mgid: Gid) -> Result<(), VerbsError> {
        self.qps.get(qp)?;
        self.groups.detach(qp, mgid.ip())
    }
}

impl Nic {
    /// Handles a datagram received for a multicast group.
    pub(crate) fn handle_group_datagram(
        &mut self,
        now: Instant,
        src: SocketAddr,
        group: IpAddr,
        bytes: &[u8],
        ip: IpFields,
    ) {
        self.device.set_now(now);
        let Some(packet) = self.parse(bytes) else {
            return;
        };
        self.device.counters.rx_multicast += 1;
        // Same check as for unicast datagrams.
        if is_link_local(src.ip()) {
            self.device.counters.rx_wrong_source += 1;
            return;
        }
        let at = self.device.groups.position(group);
        let deth = packet.ext.deth;
        let is_multicast = packet.bth.dest_qpn() == Qpn::MULTICAST;
        let (Some(at), Some(deth), true, Service::Ud) = (at, deth, is_multicast, packet.op.service)
        else {
            self.device.counters.rx_unknown_qp += 1;
            return;
        };
        // The ICRC covers the group address. Any number of hosts can send to a group, so we don't
        // store state for the sender.
        let Some(flow) = IcrcFlow::new(src, SocketAddr::new(group, ROCE_PORT)) else {
            self.device.counters.rx_malformed += 1;
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
        let is_own = src.ip() == self.device.port.addr().ip();
        // An unexpected datagram can cause a QP to fail, but it doesn't attach or detach QPs.
        for member in 0..self.device.groups.members(at).len() {
            let id = self.device.groups.members(at)[member];
            let Ok(qp) = self.device.qps.get_mut(id) else {
                continue;
            };
            if is_own && qp.blocks_own_mcast && qp.qpn == deth.src_qpn().value() {
                continue;
            }
            with_env!(self.device, qp, env);
            if let Machine::Ud(ud) = &mut qp.machine {
                ud.handle_packet(&packet, &header, env.mrs, env.rq, env.out);
            }
            self.device.finish_turn(id);
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
        Access, Completion, CqId, Mr, QKey, QpAttr, QpCap, QpInitAttr, QpState, RecvWr, Sge,
        Verbs as _, WrId,
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
            let attached = self.nic.device.attach_group(qp, group(to).into());
            (qp, attached)
        }

        fn receive(&mut self, to: u8, bytes: &[u8]) -> Vec<Completion> {
            let (now, ip) = (self.nic.device.now(), IpFields::default());
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
        assert_eq!(b.nic.device.counters().rx_icrc_errors, 1);
        // A group without QPs, a unicast QP number, and a different service.
        assert_eq!(b.receive(5, &DATAGRAM), []);
        for (at, byte) in [(7, 1), (0, 0x04)] {
            let mut other = DATAGRAM;
            other[at] = byte;
            assert_eq!(b.receive(3, &other), []);
        }
        assert_eq!(b.nic.device.counters().rx_unknown_qp, 3);
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
            b.nic.device.attach_group(first, gid(3)),
            Ok(None),
            "once is enough"
        );
        assert_eq!(b.nic.device.attach_group(first, gid(4)), Ok(Some(group(4))));
        assert_eq!(
            b.nic.device.attach_group(third, gid(5)),
            full("multicast groups")
        );
        let other_family = Gid::from("ff15::1".parse::<IpAddr>().unwrap());
        for gid in [other_family, Gid::from(src().ip())] {
            let refused = b.nic.device.attach_group(third, gid);
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
        b.nic.device.attach_group(second, group(4).into()).unwrap();
        b.nic.device.detach_group(first, group(3).into()).unwrap();
        assert_eq!(b.nic.device.groups.poll_left(), None);
        assert!(b.nic.device.detach_group(first, group(3).into()).is_err());
        b.nic.destroy_qp(second).unwrap();
        let mut left: Vec<_> = std::iter::from_fn(|| b.nic.device.groups.poll_left()).collect();
        left.sort();
        assert_eq!(left, [group(3), group(4)]);
        // A group must not be left if it has been joined again in the meantime.
        b.nic.device.attach_group(first, group(3).into()).unwrap();
        b.nic.device.detach_group(first, group(3).into()).unwrap();
        let again = b.nic.device.attach_group(first, group(3).into());
        assert_eq!(again, Ok(Some(group(3))));
        assert_eq!(b.nic.device.groups.poll_left(), None);
    }

    #[test]
    fn only_datagram_qps_can_be_attached() {
        let mut b = Bench::new();
        let init = QpInitAttr {
            qp_type: QpType::Rc,
            ..b.init
        };
        let rc = b.nic.create_qp(&init).unwrap();
        let refused = b.nic.device.attach_group(rc, group(3).into());
        assert_eq!(refused, Err(VerbsError::WrongQpType("multicast")));
    }
}
