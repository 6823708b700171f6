//! Path migration (IBTA 17.2.8) between devices with two addresses each, by attributes and by the
//! connection manager. Tests with dead paths or forged packets are in `tests/migration.rs`.

use std::net::SocketAddr;
use std::time::Duration;

use riser_transport::verbs::{
    Access, AhAttr, AltPath, AsyncEvent, CmEventKind, CmId, CmOption, ConnParam, Gid, Handle, Mtu,
    PathMigState, PortSpace, QpAttr, QpId, QpInitAttr, QpState, QpType, RdmaCm as _, SendOp,
    SendWr, SrqAttr, Verbs as _, VerbsError, WrId,
};

use crate::suite::world::{
    End, Side, Wants, World, cm_event, init_attr, objects, pattern, resolve_for,
};

/// Types of queue pairs that connect to each other.
const KINDS: [[QpType; 2]; 3] = [
    [QpType::Rc, QpType::Rc],
    [QpType::Uc, QpType::Uc],
    [QpType::XrcIni, QpType::XrcTgt],
];
/// ACK timeout of both paths: 67 ms.
const TIMEOUT: u8 = 14;
/// Initial PSN of both directions.
const PSN: u32 = 0x00ff_fff0;

fn to(state: PathMigState) -> QpAttr {
    QpAttr {
        path_mig_state: Some(state),
        ..QpAttr::default()
    }
}

/// Returns the two addresses of each device, starting with A. Returns `None` if a device has fewer
/// addresses, or if its connections do not migrate.
fn gids<W: World>(w: &mut W) -> Option<[[Gid; 2]; 2]> {
    for end in [End::A, End::B] {
        let p = w.provider(end);
        let has_two = p.query_port(1).unwrap().gid_table_len > 1;
        // A kernel's GID table contains additional GIDs.
        if !p.device_attr().path_migration || !has_two || w.is_rxe(end) {
            return None;
        }
    }
    Some(
        [End::A, End::B]
            .map(|end| [0, 1].map(|index| w.provider(end).query_gid(1, index).unwrap())),
    )
}

/// Returns the path of a side between the addresses with this number.
fn path_of(gids: &[[Gid; 2]; 2], own: usize, number: u16) -> AltPath {
    AltPath {
        ah: AhAttr {
            sgid_index: number,
            ..AhAttr::new(gids[1 - own][usize::from(number)])
        },
        pkey_index: 0,
        timeout: TIMEOUT,
    }
}

/// A connection and the addresses of its ends.
struct Link {
    sides: [Side; 2],
    gids: [[Gid; 2]; 2],
    kinds: [QpType; 2],
    /// Number of the shared receive queue of an XRC connection.
    srqn: Option<u32>,
}

impl Link {
    /// Creates the ends, using `make` to create their queue pairs.
    fn new<W: World>(
        w: &mut W,
        gids: [[Gid; 2]; 2],
        kinds: [QpType; 2],
        mut make: impl FnMut(&mut W, End, &QpInitAttr) -> (QpId, CmId),
    ) -> Self {
        let mut srqn = None;
        let sides = [(End::A, kinds[0]), (End::B, kinds[1])].map(|(end, qp_type)| {
            let wants = Wants::default();
            let (pd, cq, memory, mr) = objects(w, end, &wants);
            let mut init = QpInitAttr {
                qp_type,
                ..init_attr(pd, cq, &wants)
            };
            if qp_type == QpType::XrcTgt {
                let p = w.provider(end);
                let xrcd = p.open_xrcd().unwrap();
                let attr = SrqAttr {
                    max_wr: 16,
                    max_sge: 1,
                    limit: 0,
                };
                let srq = p.create_xrc_srq(pd, xrcd, cq, attr).unwrap();
                srqn = Some(p.srq_num(srq).unwrap());
                init = QpInitAttr::xrc_target(xrcd);
            }
            let (qp, id) = make(w, end, &init);
            Side {
                end,
                pd,
                cq,
                memory,
                mr,
                qp,
                id,
            }
        });
        Self {
            sides,
            gids,
            kinds,
            srqn,
        }
    }

    /// Establishes a connection manually, over the first addresses.
    fn by_hand<W: World>(w: &mut W, kinds: [QpType; 2]) -> Option<Self> {
        let gids = gids(w)?;
        let link = Self::new(w, gids, kinds, |w, end, init| {
            let qp = w.provider(end).create_qp(init).unwrap();
            (qp, CmId(Handle::new(u32::MAX, 0)))
        });
        for own in 0..2 {
            link.bring_up(w, own);
        }
        Some(link)
    }

    fn bring_up<W: World>(&self, w: &mut W, own: usize) {
        let kind = self.kinds[own];
        let is_requester = matches!(kind, QpType::Rc | QpType::XrcIni);
        let is_responder = matches!(kind, QpType::Rc | QpType::XrcTgt);
        let peer = &self.sides[1 - own];
        let dest_qp = w.provider(peer.end).qp_num(peer.qp).unwrap();
        let init = QpAttr {
            pkey_index: Some(0),
            port: Some(1),
            access: Some(Access::REMOTE_WRITE),
            ..QpAttr::to(QpState::Init)
        };
        let rtr = QpAttr {
            ah: Some(self.path(own, 0).ah),
            path_mtu: Some(Mtu::Mtu1024),
            dest_qp: Some(dest_qp),
            rq_psn: Some(PSN),
            max_dest_rd_atomic: is_responder.then_some(4),
            min_rnr_timer: is_responder.then_some(1),
            ..QpAttr::to(QpState::Rtr)
        };
        let rts = QpAttr {
            sq_psn: Some(PSN),
            timeout: (is_requester || is_responder).then_some(TIMEOUT),
            retry_cnt: is_requester.then_some(7),
            rnr_retry: is_requester.then_some(7),
            max_rd_atomic: is_requester.then_some(4),
            ..QpAttr::to(QpState::Rts)
        };
        for step in [init, rtr, rts] {
            self.modify(w, own, &step).unwrap();
        }
    }

    /// Same as [`path_of`].
    fn path(&self, own: usize, number: u16) -> AltPath {
        path_of(&self.gids, own, number)
    }

    fn modify<W: World>(&self, w: &mut W, own: usize, attr: &QpAttr) -> Result<(), VerbsError> {
        let side = &self.sides[own];
        w.provider(side.end).modify_qp(side.qp, attr)
    }

    fn attr<W: World>(&self, w: &mut W, own: usize) -> QpAttr {
        let side = &self.sides[own];
        w.provider(side.end).query_qp(side.qp).unwrap()
    }

    /// Sends a WRITE and checks that it arrives. The receiving end of an XRC connection does not
    /// send.
    fn write<W: World>(&self, w: &mut W, own: usize, seed: u64) {
        if self.kinds[own] == QpType::XrcTgt {
            return;
        }
        let (from, at) = (&self.sides[own], &self.sides[1 - own]);
        let data = pattern(seed, 3000);
        from.memory.write(0, &data);
        let sges = [from.sge(0, 3000)];
        let wr = SendWr {
            remote_srqn: self.srqn,
            ..SendWr::new(1, SendOp::Write(at.remote(100_000)), &sges)
        };
        w.provider(from.end).post_send(from.qp, &[wr]).unwrap();
        let c = from.completion(w);
        assert!(c.status.is_ok(), "{c:?}");
        w.until("the data", |_| {
            (at.bytes(100_000, 3000) == data).then_some(())
        });
    }

    /// Loads the path with this number at both ends.
    fn load<W: World>(&self, w: &mut W, number: u16) {
        for own in 0..2 {
            let attr = QpAttr {
                alt_path: Some(self.path(own, number)),
                ..to(PathMigState::Rearm)
            };
            self.modify(w, own, &attr).unwrap();
            let attr = self.attr(w, own);
            assert_eq!(attr.path_mig_state, Some(PathMigState::Rearm));
            assert_eq!(attr.alt_path, Some(self.path(own, number)));
        }
    }

    /// Arms both ends by exchanging packets.
    fn arm<W: World>(&self, w: &mut W, seed: u64) {
        for own in 0..2 {
            self.write(w, own, seed + own as u64);
        }
        self.until_state(w, PathMigState::Armed);
    }

    fn until_state<W: World>(&self, w: &mut W, state: PathMigState) {
        w.until("a state of migration", |w| {
            let states = [0, 1].map(|own| self.attr(w, own).path_mig_state);
            (states == [Some(state); 2]).then_some(())
        });
    }

    /// Checks that a side has migrated to the path with this number and has reported it.
    fn assert_migrated<W: World>(&self, w: &mut W, own: usize, number: u16) {
        let side = &self.sides[own];
        let event = side.event(w);
        assert_eq!(event, AsyncEvent::PathMig(side.qp), "{own}");
        let attr = self.attr(w, own);
        let ah = attr.ah.unwrap();
        let expected = self.path(own, number).ah;
        assert_eq!(
            (ah.dgid, ah.sgid_index),
            (expected.dgid, expected.sgid_index)
        );
        assert_eq!(attr.path_mig_state, Some(PathMigState::Migrated));
        assert_eq!(attr.alt_path, None);
    }
}

/// Migrates to the second path and back. Each time, one side migrates on command, and the other
/// follows.
pub(crate) fn connection_migrates_by_command_and_packet<W: World>(mut w: W) {
    let w = &mut w;
    for kinds in KINDS {
        let Some(link) = Link::by_hand(w, kinds) else {
            return;
        };
        link.write(w, 0, 1);
        // The receiving end of an XRC connection does not send packets on its own.
        let second = if kinds[1] == QpType::XrcTgt { 0 } else { 1 };
        for (number, own) in [(1, 0), (0, second)] {
            link.load(w, number);
            link.arm(w, 10 * u64::from(number) + 2);
            link.modify(w, own, &to(PathMigState::Migrated)).unwrap();
            link.assert_migrated(w, own, number);
            link.write(w, own, 40 + u64::from(number));
            link.assert_migrated(w, 1 - own, number);
            link.write(w, 1 - own, 50 + u64::from(number));
            // There is no alternate path now.
            let refused = link.modify(w, own, &to(PathMigState::Rearm));
            assert!(refused.is_err());
        }
    }
}

pub(crate) fn connection_migrates_under_load<W: World>(mut w: W) {
    const LEN: usize = 100_000;
    let w = &mut w;
    let Some(link) = Link::by_hand(w, KINDS[0]) else {
        return;
    };
    link.load(w, 1);
    link.arm(w, 3);
    let [a, b] = &link.sides;
    let data = pattern(7, 5 * LEN);
    a.memory.write(0, &data);
    for n in 0..5 {
        a.send(
            w,
            n,
            SendOp::Write(b.remote(n as usize * LEN)),
            n as usize * LEN,
            LEN,
        );
    }
    w.step();
    link.modify(w, 0, &to(PathMigState::Migrated)).unwrap();
    let done = a.completions(w, 5);
    assert!(done.iter().all(|c| c.status.is_ok()), "{done:?}");
    assert_eq!(done[4].wr_id, WrId(4));
    assert!(b.bytes(0, 5 * LEN) == data);
    link.write(w, 0, 9);
    for own in 0..2 {
        link.assert_migrated(w, own, 1);
    }
}

pub(crate) fn armed_connection_is_rearmed_and_disarmed<W: World>(mut w: W) {
    let w = &mut w;
    let Some(link) = Link::by_hand(w, KINDS[0]) else {
        return;
    };
    // No path is loaded, and only packets can arm a connection.
    for state in [PathMigState::Rearm, PathMigState::Armed] {
        assert!(link.modify(w, 0, &to(state)).is_err());
    }
    let wrong = |change: fn(&mut AltPath)| {
        let mut path = link.path(0, 1);
        change(&mut path);
        QpAttr {
            alt_path: Some(path),
            ..to(PathMigState::Rearm)
        }
    };
    let wrong = [
        wrong(|path| path.ah.sgid_index = 77),
        wrong(|path| path.ah.sgid_index = 0x101),
        wrong(|path| path.ah.port = 2),
        wrong(|path| path.pkey_index = 9),
        wrong(|path| path.timeout = 32),
    ];
    for attr in wrong {
        assert!(link.modify(w, 0, &attr).is_err(), "{attr:?}");
        let now = link.attr(w, 0);
        assert_eq!(now.path_mig_state, Some(PathMigState::Migrated));
        assert_eq!(now.alt_path, None);
    }
    link.load(w, 1);
    link.arm(w, 1);
    // Return to REARM, until the next packets arrive.
    for own in 0..2 {
        link.modify(w, own, &to(PathMigState::Rearm)).unwrap();
    }
    link.arm(w, 5);
    link.modify(w, 1, &to(PathMigState::Migrated)).unwrap();
    link.assert_migrated(w, 1, 1);
    link.write(w, 1, 8);
    link.assert_migrated(w, 0, 1);
    assert_eq!(w.provider(End::A).poll_async_event(), None);
}

/// Identifiers of each type negotiate a path by messages, if supported.
pub(crate) fn cm_loads_alternate_path<W: World>(mut w: W) {
    let w = &mut w;
    let Some(gids) = gids(w) else { return };
    for end in [End::A, End::B] {
        if w.is_rdma_core(end) {
            // Linux does not support this on RoCE.
            let path = path_of(&gids, 0, 1);
            let p = w.provider(end);
            let id = p.create_id(PortSpace::Tcp).unwrap();
            let unsupported = Err(VerbsError::Unsupported("alternate paths").into());
            assert_eq!(p.load_alternate_path(id, &path), unsupported);
            let option = CmOption::AlternatePaths(true);
            assert_eq!(p.set_option(id, option), unsupported);
            return;
        }
    }
    let ways = KINDS.map(|kinds| [(kinds, false), (kinds, true)]);
    for (kinds, by_request) in ways.into_iter().flatten() {
        let at = SocketAddr::new(w.addr(End::B), 4000);
        let p = w.provider(End::B);
        let listener = p.create_id_for(PortSpace::IbIp, kinds[1]).unwrap();
        p.bind_addr(listener, at).unwrap();
        let option = CmOption::AlternatePaths(true);
        p.set_option(listener, option).unwrap();
        p.listen(listener, 4).unwrap();
        let param = ConnParam::default();
        let path = path_of(&gids, 0, 1);
        let link = Link::new(w, gids, kinds, |w, end, init| {
            if end == End::A {
                let id = resolve_for(w, init.qp_type);
                let p = w.provider(end);
                let qp = p.create_cm_qp(id, init).unwrap();
                if by_request {
                    p.load_alternate_path(id, &path).unwrap();
                }
                p.connect(id, &param).unwrap();
                return (qp, id);
            }
            let id = cm_event(w, end).id;
            let p = w.provider(end);
            let qp = p.create_cm_qp(id, init).unwrap();
            p.accept(id, &param).unwrap();
            (qp, id)
        });
        for end in [End::A, End::B] {
            let kind = cm_event(w, end).kind;
            assert!(matches!(kind, CmEventKind::Established { .. }), "{kind:?}");
        }
        let (a, b) = (link.sides[0].id, link.sides[1].id);
        if !by_request {
            w.provider(End::A).load_alternate_path(a, &path).unwrap();
        }
        for (own, end) in [End::A, End::B].into_iter().enumerate() {
            let kind = cm_event(w, end).kind;
            let CmEventKind::AlternatePath { path } = kind else {
                panic!("{kind:?}");
            };
            assert_eq!(path.ah.dgid, link.gids[1 - own][1]);
            let state = link.attr(w, own).path_mig_state;
            assert_ne!(state, Some(PathMigState::Migrated));
        }
        link.arm(w, 3);
        link.modify(w, 0, &to(PathMigState::Migrated)).unwrap();
        link.assert_migrated(w, 0, 1);
        link.write(w, 0, 4);
        link.assert_migrated(w, 1, 1);
        let p = w.provider(End::B);
        p.destroy_id(listener).unwrap();
        p.disconnect(b).unwrap();
        for end in [End::A, End::B] {
            assert_eq!(cm_event(w, end).kind, CmEventKind::Disconnected);
        }
        for side in &link.sides {
            let p = w.provider(side.end);
            p.destroy_qp(side.qp).unwrap();
            p.destroy_id(side.id).unwrap();
        }
        w.pass(Duration::from_millis(1));
    }
}
