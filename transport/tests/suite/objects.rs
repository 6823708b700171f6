//! Objects: limits, handles, references between objects, and queue pair states.

use std::net::IpAddr;

use riser_memory::Memory;
use riser_transport::verbs::{
    Access, AhAttr, AhId, Completion, CqId, GRH_LEN, Gid, Mr, Mtu, PKey, PdId, PortCapabilities,
    PortState, PostReason, QKey, QpAttr, QpCap, QpId, QpInitAttr, QpState, QpType, RecvWr,
    RouteHeader, SendOp, SendWr, Sge, UdDest, VerbsError, WcOpcode, WcStatus, WrId,
};

use riser_transport::verbs::Verbs as _;

use crate::suite::world::{End, Wants, World, init_attr, objects};

pub(crate) fn device_reports_attributes<W: World>(mut w: W) {
    let addr = w.addr(End::A);
    let is_rxe = w.is_rxe(End::A);
    let p = w.provider(End::A);
    let attr = p.device_attr().clone();
    assert!(attr.max_qp > 0 && attr.max_sge >= 4 && attr.ports == 1);
    let port = p.query_port(1).unwrap();
    assert_eq!((port.state, port.addr), (PortState::Active, addr));
    assert!(port.active_mtu >= Mtu::Mtu1024);
    assert_eq!(p.query_port(2), Err(VerbsError::InvalidPort(2)));
    // A kernel adds a link-local address first, and has room for more.
    let end = port.gid_table_len;
    let own = (0..end).filter(|i| p.query_gid(1, *i) == Ok(Gid::from(addr)));
    assert!(if is_rxe {
        own.count() > 0
    } else {
        own.eq(0..1)
    });
    assert_eq!(p.query_gid(1, end), Err(VerbsError::InvalidIndex(end)));
    let index = p.find_gid(1, addr.into()).unwrap();
    assert_eq!(p.query_gid(1, index), Ok(addr.into()));
    assert_eq!(p.find_gid(2, addr.into()), Err(VerbsError::InvalidPort(2)));
    let other = Gid::from(IpAddr::from([192, 0, 2, 1]));
    assert!(matches!(
        p.find_gid(1, other),
        Err(VerbsError::InvalidParameter(_))
    ));
    assert_eq!(p.query_pkey(1, 0), Ok(PKey::DEFAULT));
    assert_eq!(p.query_pkey(0, 0), Err(VerbsError::InvalidPort(0)));
}

pub(crate) fn port_capabilities_are_set_and_cleared<W: World>(mut w: W) {
    let p = w.provider(End::A);
    let before = p.query_port(1).unwrap().capabilities;
    let (none, dm, vendor) = (
        PortCapabilities::empty(),
        PortCapabilities::DEVICE_MANAGEMENT,
        PortCapabilities::VENDOR_CLASS,
    );
    assert_eq!(p.modify_port(2, dm, none), Err(VerbsError::InvalidPort(2)));
    match p.modify_port(1, dm, none) {
        // Adapters, and iWARP devices, which have no management datagrams.
        Err(VerbsError::Unsupported(_)) => {
            assert_eq!(p.query_port(1).unwrap().capabilities, before);
            return;
        }
        result => result.unwrap(),
    }
    let now = |p: &W::P| p.query_port(1).unwrap().capabilities - before;
    assert_eq!(now(p), dm);
    p.modify_port(1, vendor, dm).unwrap();
    assert_eq!(now(p), vendor);
    // Clearing has priority.
    p.modify_port(1, dm | vendor, vendor).unwrap();
    assert_eq!(now(p), dm);
    // Capabilities of the port itself do not depend on programs.
    let refused = p.modify_port(1, vendor, PortCapabilities::COMMUNICATION_MANAGEMENT);
    assert!(matches!(refused, Err(VerbsError::InvalidParameter(_))));
    assert_eq!(now(p), dm);
    p.modify_port(1, none, dm).unwrap();
    assert_eq!(p.query_port(1).unwrap().capabilities, before);
}

pub(crate) fn objects_in_use_are_busy<W: World>(mut w: W) {
    let wants = Wants::default();
    let (pd, cq, memory, mr) = objects(&mut w, End::A, &wants);
    let p = w.provider(End::A);
    let busy = |r: Result<(), VerbsError>| assert!(matches!(r, Err(VerbsError::ResourceBusy(_))));
    busy(p.dealloc_pd(pd));
    let qp = p.create_qp(&init_attr(pd, cq, &wants)).unwrap();
    p.dereg_mr(mr.id).unwrap();
    busy(p.dealloc_pd(pd));
    busy(p.destroy_cq(cq));
    p.destroy_qp(qp).unwrap();
    p.destroy_cq(cq).unwrap();
    p.dealloc_pd(pd).unwrap();
    // Stale handles are invalid, even after their slots have been reused.
    let again = p.alloc_pd().unwrap();
    assert_ne!(again, pd);
    let gone = |r: Result<(), VerbsError>| assert!(matches!(r, Err(VerbsError::InvalidHandle(_))));
    gone(p.dealloc_pd(pd));
    gone(p.destroy_cq(cq));
    gone(p.destroy_qp(qp));
    gone(p.dereg_mr(mr.id));
    gone(p.query_mr(mr.id).map(drop));
    gone(p.query_qp(qp).map(drop));
    gone(p.reg_mr(pd, &memory.whole(), Access::empty()).map(drop));
    gone(p.create_qp(&init_attr(pd, cq, &wants)).map(drop));
    let refused = p.post_send(qp, &[]).unwrap_err();
    assert_eq!(refused.reason, PostReason::InvalidHandle);
}

pub(crate) fn limits_hold<W: World>(mut w: W) {
    let wants = Wants::default();
    let (pd, cq, memory, _) = objects(&mut w, End::A, &wants);
    let p = w.provider(End::A);
    let attr = p.device_attr().clone();
    let invalid = |r: Result<(), VerbsError>| {
        assert!(matches!(r, Err(VerbsError::InvalidParameter(_))), "{r:?}");
    };
    invalid(p.create_cq(0).map(drop));
    invalid(p.create_cq(attr.max_cqe + 1).map(drop));
    invalid(p.resize_cq(cq, 0));
    invalid(
        p.alloc_fast_mr(pd, attr.max_fast_reg_segments + 1)
            .map(drop),
    );
    let cap = wants.cap;
    let too_much = [
        QpCap {
            max_send_wr: attr.max_qp_wr + 1,
            ..cap
        },
        QpCap {
            max_recv_wr: attr.max_qp_wr + 1,
            ..cap
        },
        QpCap {
            max_send_sge: attr.max_sge + 1,
            ..cap
        },
        QpCap {
            max_recv_sge: attr.max_sge + 1,
            ..cap
        },
        QpCap {
            max_inline: attr.max_inline + 1,
            ..cap
        },
    ];
    for cap in too_much {
        let init = QpInitAttr {
            cap,
            ..init_attr(pd, cq, &wants)
        };
        invalid(p.create_qp(&init).map(drop));
    }
    for qp_type in [QpType::Smi, QpType::RawPacket] {
        let refused = p.create_qp(&QpInitAttr::new(pd, cq, qp_type, wants.cap));
        assert!(matches!(refused, Err(VerbsError::Unsupported(_))));
    }
    let wrong = p.reg_mr(pd, &memory.whole(), Access::REMOTE_WRITE);
    assert!(matches!(wrong, Err(VerbsError::InvalidAccess(_))));
    // No failed call has kept a reference to the objects.
    p.destroy_cq(cq).unwrap();
}

pub(crate) fn qp_transitions_through_states<W: World>(mut w: W) {
    let wants = Wants::default();
    let (pd, cq, _memory, _) = objects(&mut w, End::A, &wants);
    let peer = w.addr(End::B);
    let p = w.provider(End::A);
    let qp = p.create_qp(&init_attr(pd, cq, &wants)).unwrap();
    let number = p.qp_num(qp).unwrap();
    assert!(number > 1 && number < 0xff_ffff);
    let state = |p: &mut W::P| p.query_qp(qp).unwrap().state.unwrap();
    assert_eq!(state(p), QpState::Reset);
    let wr = RecvWr {
        wr_id: WrId(1),
        sges: &[],
    };
    let early = p.post_recv(qp, &[wr]).unwrap_err();
    assert_eq!(early.reason, PostReason::InvalidState(QpState::Reset));
    let init = QpAttr {
        state: Some(QpState::Init),
        pkey_index: Some(0),
        port: Some(1),
        access: Some(Access::REMOTE),
        ..QpAttr::default()
    };
    let missing = QpAttr { port: None, ..init };
    assert_eq!(
        p.modify_qp(qp, &missing),
        Err(VerbsError::MissingAttribute {
            to: QpState::Init,
            attribute: "port"
        })
    );
    assert_eq!(state(p), QpState::Reset);
    p.modify_qp(qp, &init).unwrap();
    p.post_recv(qp, &[wr]).unwrap();
    let early = p
        .post_send(qp, &[SendWr::new(1, SendOp::Send, &[])])
        .unwrap_err();
    assert_eq!(early.reason, PostReason::InvalidState(QpState::Init));
    let skip = QpAttr::to(QpState::Rts);
    assert_eq!(
        p.modify_qp(qp, &skip),
        Err(VerbsError::InvalidTransition {
            from: QpState::Init,
            to: QpState::Rts
        })
    );
    let rtr = QpAttr {
        state: Some(QpState::Rtr),
        ah: Some(AhAttr::new(peer.into())),
        path_mtu: Some(Mtu::Mtu1024),
        dest_qp: Some(77),
        rq_psn: Some(5),
        max_dest_rd_atomic: Some(4),
        min_rnr_timer: Some(12),
        ..QpAttr::default()
    };
    let wrong = QpAttr {
        rq_psn: Some(1 << 24),
        ..rtr
    };
    assert_eq!(
        p.modify_qp(qp, &wrong),
        Err(VerbsError::InvalidParameter("rq_psn"))
    );
    let forbidden = QpAttr {
        qkey: Some(QKey(1)),
        ..rtr
    };
    assert_eq!(
        p.modify_qp(qp, &forbidden),
        Err(VerbsError::ForbiddenAttribute {
            to: QpState::Rtr,
            attribute: "qkey"
        })
    );
    p.modify_qp(qp, &rtr).unwrap();
    let rts = QpAttr {
        state: Some(QpState::Rts),
        sq_psn: Some(9),
        max_rd_atomic: Some(4),
        timeout: Some(14),
        retry_cnt: Some(7),
        rnr_retry: Some(7),
        ..QpAttr::default()
    };
    p.modify_qp(qp, &rts).unwrap();
    let all = p.query_qp(qp).unwrap();
    assert_eq!(all.state, Some(QpState::Rts));
    assert_eq!(
        (all.dest_qp, all.rq_psn, all.sq_psn),
        (Some(77), Some(5), Some(9))
    );
    assert_eq!(
        (all.path_mtu, all.pkey, all.timeout),
        (Some(Mtu::Mtu1024), Some(PKey::DEFAULT), Some(14))
    );
    let reset = QpAttr::to(QpState::Reset);
    p.modify_qp(qp, &reset).unwrap();
    assert_eq!(p.query_qp(qp).unwrap().dest_qp, None);
    assert_eq!(p.peek_cq(cq, 9), Ok(0), "reset forgets without completions");
    p.modify_qp(qp, &init).unwrap();
}

/// A datagram queue pair in RTS, with a receive at the start of its memory.
struct Datagrams {
    end: End,
    pd: PdId,
    cq: CqId,
    memory: Memory,
    mr: Mr,
    qp: QpId,
    number: u32,
}

const KEY: QKey = QKey(0x1234);

impl Datagrams {
    fn new<W: World>(w: &mut W, end: End, block_self_mcast: bool) -> Self {
        let wants = Wants::default();
        let (pd, cq, memory, mr) = objects(w, end, &wants);
        let init = QpInitAttr {
            qp_type: QpType::Ud,
            block_self_mcast,
            ..init_attr(pd, cq, &wants)
        };
        let p = w.provider(end);
        let qp = p.create_qp(&init).unwrap();
        let to_init = QpAttr {
            pkey_index: Some(0),
            port: Some(1),
            qkey: Some(KEY),
            ..QpAttr::to(QpState::Init)
        };
        let to_rts = QpAttr {
            sq_psn: Some(3),
            ..QpAttr::to(QpState::Rts)
        };
        for step in [to_init, QpAttr::to(QpState::Rtr), to_rts] {
            p.modify_qp(qp, &step).unwrap();
        }
        let number = p.qp_num(qp).unwrap();
        let made = Self {
            end,
            pd,
            cq,
            memory,
            mr,
            qp,
            number,
        };
        made.receive(w);
        made
    }

    fn receive<W: World>(&self, w: &mut W) {
        let sges = [self.sge(0, 4096 + 40)];
        let wr = RecvWr {
            wr_id: WrId(1),
            sges: &sges,
        };
        w.provider(self.end).post_recv(self.qp, &[wr]).unwrap();
    }

    fn sge(&self, offset: u64, length: u32) -> Sge {
        Sge {
            addr: self.mr.addr + offset,
            length,
            lkey: self.mr.lkey,
        }
    }

    fn send<W: World>(&self, w: &mut W, ah: AhId, qpn: u32, sges: &[Sge]) {
        let wr = SendWr {
            ud: Some(UdDest { ah, qpn, qkey: KEY }),
            ..SendWr::new(8, SendOp::Send, sges)
        };
        w.provider(self.end).post_send(self.qp, &[wr]).unwrap();
    }

    /// Returns the next datagram and the preceding header.
    fn received<W: World>(&self, w: &mut W) -> (Completion, [u8; GRH_LEN]) {
        let mut out = Vec::new();
        let c = w.until("a datagram", |w| {
            out.clear();
            w.provider(self.end).poll_cq(self.cq, 1, &mut out).unwrap();
            out.first().copied().filter(|c| c.opcode.is_recv())
        });
        let mut grh = [0; GRH_LEN];
        self.memory.read(0, &mut grh);
        (c, grh)
    }

    /// Returns the number of pending datagrams.
    fn waiting<W: World>(&self, w: &mut W) -> usize {
        let mut out = Vec::new();
        w.provider(self.end).poll_cq(self.cq, 9, &mut out).unwrap();
        out.iter().filter(|c| c.opcode.is_recv()).count()
    }
}

pub(crate) fn datagrams<W: World>(mut w: W) {
    let w = &mut w;
    let [a, b] = [End::A, End::B].map(|end| Datagrams::new(w, end, false));
    let dgid = w.addr(End::B).into();
    let attr = AhAttr::new(dgid);
    let other = match dgid.ip().is_ipv4() {
        true => "2001:db8::1",
        false => "192.0.2.1",
    };
    let other = AhAttr::new(Gid::from(other.parse::<std::net::IpAddr>().unwrap()));
    let nowhere = AhAttr::new(Gid::from(w.addr(End::A)));
    let p = w.provider(End::A);
    assert!(p.create_ah(a.pd, other).is_err());
    let ah = p.create_ah(a.pd, nowhere).unwrap();
    assert_eq!(p.query_ah(ah), Ok(nowhere));
    assert!(p.modify_ah(ah, other).is_err());
    assert_eq!(p.query_ah(ah), Ok(nowhere));
    p.modify_ah(ah, attr).unwrap();
    assert_eq!(p.query_ah(ah), Ok(attr));
    a.memory.write(9000, b"datagram");
    let sges = [a.sge(9000, 8)];
    let wr = SendWr {
        ud: Some(UdDest {
            ah,
            qpn: b.number,
            qkey: KEY,
        }),
        ..SendWr::new(7, SendOp::SendImm(5), &sges)
    };
    let no_read = SendWr {
        op: SendOp::Read(riser_transport::verbs::RemoteAddr {
            addr: 0,
            rkey: riser_transport::verbs::RKey(0),
        }),
        ..wr
    };
    let refused = p.post_send(a.qp, &[no_read]).unwrap_err();
    assert_eq!(refused.reason, PostReason::InvalidOpcode);
    p.post_send(a.qp, &[wr]).unwrap();
    let (c, grh) = b.received(w);
    assert_eq!(
        (c.status, c.opcode, c.byte_len),
        (WcStatus::Success, WcOpcode::Recv, 48)
    );
    assert_eq!((c.src_qp, c.imm), (a.number, Some(5)));
    let mut got = [0; 8];
    b.memory.read(40, &mut got);
    assert_eq!(&got, b"datagram");
    // The header before the payload identifies the sender. With shared memory, this is a link.
    let header = RouteHeader::parse(&grh).unwrap();
    assert_eq!(c.network, Some(header.network()));
    let here = w.addr(End::B);
    assert_eq!(header.destination, here);
    let p = w.provider(End::B);
    let back = p.ah_from_wc(1, &c, &grh).unwrap();
    assert_eq!(
        (back.dgid, back.hop_limit),
        (header.source.into(), header.hop_limit)
    );
    assert_eq!(p.query_gid(1, back.sgid_index), Ok(here.into()));
    assert_eq!(p.ah_from_wc(9, &c, &grh), Err(VerbsError::InvalidPort(9)));
    assert!(p.ah_from_wc(1, &c, &[0; GRH_LEN]).is_err());
    let without = Completion { network: None, ..c };
    assert!(p.ah_from_wc(1, &without, &grh).is_err());
    let ah = p.create_ah(b.pd, back).unwrap();
    b.send(w, ah, c.src_qp, &[b.sge(40, 8)]);
    assert_eq!(a.received(w).0.byte_len, 48);
    a.memory.read(40, &mut got);
    assert_eq!(&got, b"datagram");
    w.provider(End::B).destroy_ah(ah).unwrap();
    let gone = w.provider(End::B).query_ah(ah);
    assert!(matches!(gone, Err(VerbsError::InvalidHandle(_))));
}

/// Destination queue pair of group datagrams.
const TO_GROUP: u32 = 0x00ff_ffff;

pub(crate) fn multicast<W: World>(mut w: W) {
    let w = &mut w;
    // A kernel's groups require a network with multicast; shared memory has none.
    let has_groups = w.provider(End::A).device_attr().max_mcast_grp > 0;
    if !has_groups || w.is_rxe(End::A) || w.is_rxe(End::B) {
        return;
    }
    let group = match w.addr(End::A) {
        IpAddr::V4(own) => IpAddr::from([239, 255, own.octets()[2], own.octets()[3]]),
        IpAddr::V6(_) => "ff15::4711".parse().unwrap(),
    };
    let gid = Gid::from(group);
    let a = Datagrams::new(w, End::A, true);
    let b = [false, true].map(|block| Datagrams::new(w, End::B, block));
    let other = Datagrams::new(w, End::B, false);
    let wrong = [w.addr(End::B).into(), Gid::default()];
    for gid in wrong {
        let refused = w.provider(End::B).attach_mcast(other.qp, gid, 0);
        assert_eq!(
            refused,
            Err(VerbsError::InvalidParameter("multicast group"))
        );
    }
    for at in [&a, &b[0], &b[1], &b[1]] {
        w.provider(at.end).attach_mcast(at.qp, gid, 0).unwrap();
    }
    let attr = AhAttr {
        hop_limit: 1,
        ..AhAttr::new(gid)
    };
    let ah = w.provider(End::A).create_ah(a.pd, attr).unwrap();
    a.memory.write(9000, b"for all of you");
    let sges = [a.sge(9000, 14)];
    a.send(w, ah, TO_GROUP, &sges);
    for b in &b {
        let (c, grh) = b.received(w);
        assert_eq!((c.status, c.byte_len), (WcStatus::Success, 54));
        assert_eq!(c.src_qp, a.number);
        let mut got = [0; 14];
        b.memory.read(40, &mut got);
        assert_eq!(&got, b"for all of you");
        let header = RouteHeader::parse(&grh).unwrap();
        let ends = (w.addr(End::A), group);
        assert_eq!((header.source, header.destination), ends);
        // A group cannot be a sender.
        assert!(w.provider(End::B).ah_from_wc(1, &c, &grh).is_err());
        b.receive(w);
    }
    // The sender does not receive its own datagram, and unattached queue pairs receive none.
    assert_eq!(a.waiting(w) + other.waiting(w), 0);
    // Send from an attached queue pair that wants to receive its own datagrams.
    let ah = w.provider(End::B).create_ah(b[0].pd, attr).unwrap();
    b[0].send(w, ah, TO_GROUP, &[b[0].sge(9000, 4)]);
    for to in [&a, &b[0], &b[1]] {
        let (c, _) = to.received(w);
        assert_eq!((c.byte_len, c.src_qp), (44, b[0].number));
        to.receive(w);
    }
    // A detached queue pair receives no more datagrams, even if it was attached twice or is
    // destroyed.
    let p = w.provider(End::B);
    p.detach_mcast(b[1].qp, gid, 0).unwrap();
    assert_eq!(
        p.detach_mcast(b[1].qp, gid, 0),
        Err(VerbsError::InvalidParameter("multicast group"))
    );
    p.destroy_qp(b[0].qp).unwrap();
    let late = Datagrams::new(w, End::B, false);
    w.provider(End::B).attach_mcast(late.qp, gid, 0).unwrap();
    let ah = w.provider(End::A).create_ah(a.pd, attr).unwrap();
    a.send(w, ah, TO_GROUP, &sges);
    assert_eq!(late.received(w).0.byte_len, 54);
    assert_eq!(b[1].waiting(w) + a.waiting(w), 0);
}
