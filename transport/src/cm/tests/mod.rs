//! Scripts to test each state, and two instances connected by an unreliable network.

mod hostile;
mod lossy;
mod script;
mod sidr_lap;
mod states;
mod strangers;
mod unproven;

use std::net::Ipv4Addr;
use std::time::{Duration, Instant};

use super::*;
use crate::verbs::{Ece, Gid, Mtu, PKey, QpType};
use crate::wire::cm_msg::{
    AdditionalInfo, Bits, CmMessage, CmPath, CmTimeout, Failover, PrivateData, RejOf, RejReason,
    SidrStatus, TransportType,
};
use crate::wire::ids::{Psn, Qpn};
use crate::wire::mad::TransactionId;

const SERVICE: ServiceId = ServiceId(0x0106_0cbc);

fn addr(host: u8) -> PeerAddr {
    Ipv4Addr::new(10, 0, 0, host).into()
}

/// Creates a CM for `host` with IDs generated from `seed`.
fn machine(host: u8, seed: u8) -> Cm {
    Cm::new(CmConfig::new(CaGuid(u64::from(host))), 0, 0, [seed; 32])
}

fn req_params(from: u8, to: u8, qpn: u32) -> ReqParams {
    ReqParams {
        service_id: SERVICE,
        qp_type: QpType::Rc,
        local_qpn: Qpn::new(qpn),
        ece: Ece::default(),
        starting_psn: Psn::new(0x100 + qpn),
        // 4.096 µs · 2¹⁴ is 67 ms.
        primary: CmPath::roce(
            Gid::from(addr(from)),
            Gid::from(addr(to)),
            CmTimeout::new(14),
        ),
        alternate: CmPath::default(),
        path_mtu: Mtu::Mtu1024,
        pkey: PKey::DEFAULT,
        responder_resources: 4,
        initiator_depth: 5,
        flow_control: true,
        srq: false,
        retry_count: Bits::truncate(6),
        rnr_retry_count: Bits::truncate(3),
        // 134 ms.
        remote_cm_timeout: CmTimeout::new(15),
        local_cm_timeout: CmTimeout::new(15),
        max_cm_retries: Bits::truncate(3),
        private_data: PrivateData::new(&[qpn as u8]).unwrap(),
    }
}

fn rep_params(qpn: u32) -> RepParams {
    RepParams {
        local_qpn: Qpn::new(qpn),
        ece: Ece::default(),
        starting_psn: Psn::new(0x200 + qpn),
        responder_resources: 2,
        initiator_depth: 3,
        target_ack_delay: CmTimeout::new(7),
        failover: Failover::Unsupported,
        flow_control: true,
        rnr_retry_count: Bits::truncate(5),
        srq: true,
        private_data: PrivateData::new(&[0xbb]).unwrap(),
    }
}

/// Active CM on host 1 and passive CM on host 2, which is listening.
struct Pair {
    a: Cm,
    p: Cm,
    now: Instant,
}

/// Connection IDs for both sides.
#[derive(Clone, Copy)]
struct Ids {
    a: IbCmId,
    p: IbCmId,
}

const ACTIVE_QPN: u32 = 0x11;
const PASSIVE_QPN: u32 = 0x22;

impl Pair {
    fn new() -> Self {
        let (a, mut p) = (machine(1, 1), machine(2, 2));
        p.listen(SERVICE, u64::MAX, 8).unwrap();
        Self {
            a,
            p,
            now: Instant::now(),
        }
    }

    /// Delivers all messages from the active side and returns the number of MADs.
    fn a_to_p(&mut self) -> usize {
        let mut count = 0;
        while let Some((to, mad)) = self.a.poll_transmit() {
            assert_eq!(to, addr(2));
            self.p.handle_mad(self.now, addr(1), &mad).unwrap();
            count += 1;
        }
        count
    }

    /// Delivers all messages from the passive side.
    fn p_to_a(&mut self) -> usize {
        let mut count = 0;
        while let Some((to, mad)) = self.p.poll_transmit() {
            assert_eq!(to, addr(1));
            self.a.handle_mad(self.now, addr(2), &mad).unwrap();
            count += 1;
        }
        count
    }

    fn a_event(&mut self) -> IbCmEventKind {
        self.a
            .poll_event()
            .expect("an event on the active side")
            .kind
    }

    fn p_event(&mut self) -> IbCmEventKind {
        self.p
            .poll_event()
            .expect("an event on the passive side")
            .kind
    }

    /// Advances the time on both sides.
    fn pass(&mut self, time: Duration) {
        self.now += time;
        self.a.handle_timeout(self.now);
        self.p.handle_timeout(self.now);
    }

    fn states(&self, ids: Ids) -> (CmState, CmState) {
        (self.a.state(ids.a), self.p.state(ids.p))
    }

    /// Checks that only the listener on the passive side remains and that there are no pending
    /// messages.
    fn assert_clean(&mut self) {
        assert_eq!((self.a.id_count(), self.p.id_count()), (0, 1));
        for cm in [&mut self.a, &mut self.p] {
            assert_eq!(cm.poll_event(), None);
            assert_eq!(cm.poll_timeout(), None);
            assert!(
                cm.peers.by_req.is_empty()
                    && cm.peers.claims.is_empty()
                    && cm.peers.by_sidr.is_empty()
            );
            assert!(
                cm.listeners.unconfirmed.is_empty()
                    && cm.proven.is_empty()
                    && cm.finished.is_empty()
            );
            assert!(
                cm.listeners.half_open.is_empty()
                    && cm.listeners.by_id.values().all(|l| l.half_open == 0)
            );
        }
    }

    // Builders for each state.

    fn req_sent(&mut self) -> IbCmId {
        self.a
            .send_req(self.now, addr(2), &req_params(1, 2, ACTIVE_QPN))
            .unwrap()
    }

    fn req_rcvd(&mut self) -> Ids {
        let a = self.req_sent();
        assert_eq!(self.a_to_p(), 1);
        let event = self.p.poll_event().unwrap();
        assert!(matches!(event.kind, IbCmEventKind::ReqReceived { .. }));
        let ids = Ids { a, p: event.id };
        assert_eq!(self.states(ids), (CmState::ReqSent, CmState::ReqRcvd));
        ids
    }

    fn rep_sent(&mut self) -> Ids {
        let ids = self.req_rcvd();
        self.p
            .send_rep(self.now, ids.p, &rep_params(PASSIVE_QPN))
            .unwrap();
        assert_eq!(self.states(ids), (CmState::ReqSent, CmState::RepSent));
        ids
    }

    fn rep_rcvd(&mut self) -> Ids {
        let ids = self.rep_sent();
        assert_eq!(self.p_to_a(), 1);
        assert!(matches!(self.a_event(), IbCmEventKind::RepReceived { .. }));
        assert_eq!(self.states(ids), (CmState::RepRcvd, CmState::RepSent));
        ids
    }

    fn established(&mut self) -> Ids {
        let ids = self.rep_rcvd();
        self.a
            .send_rtu(ids.a, PrivateData::new(&[0xcc]).unwrap())
            .unwrap();
        assert_eq!(self.a_to_p(), 1);
        let IbCmEventKind::RtuReceived { private_data } = self.p_event() else {
            panic!()
        };
        assert_eq!(private_data[0], 0xcc);
        assert_eq!(
            self.states(ids),
            (CmState::Established, CmState::Established)
        );
        ids
    }
}
