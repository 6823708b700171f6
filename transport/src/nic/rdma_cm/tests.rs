//! Tests the states of identifiers using two devices that exchange packets.

use std::time::{Duration, Instant};

use riser_state::testing::{assert_all_taken, table};

use super::state::IdState::{
    self, Accepting, AddrResolved, Bound, Closed, Connecting, Disconnecting, Established, Idle,
    Listening, Requested, Responded, RouteResolved,
};
use super::*;
use crate::nic::batch::TxBatch;
use crate::nic::{Nic, NicConfig};
use crate::verbs::{
    AhAttr, AltPath, CmError, CmEventKind, CmOption, Gid, Mtu, QpCap, QpInitAttr, QpType,
    RdmaCm as _, Verbs as _,
};

const STATES: [IdState; 12] = [
    Idle,
    Bound,
    AddrResolved,
    RouteResolved,
    Listening,
    Connecting,
    Responded,
    Requested,
    Accepting,
    Established,
    Disconnecting,
    Closed,
];

struct Two {
    a: Nic,
    b: Nic,
    now: Instant,
}

impl Two {
    /// Creates two devices. The second listens on port 4000 and has a smaller path MTU.
    fn new() -> Self {
        let now = Instant::now();
        let nic = |host| Nic::new(NicConfig::new([10, 0, 0, host].into(), [host; 32]), now);
        let mut two = Self {
            a: nic(1),
            b: nic(2),
            now,
        };
        two.b.device.set_mtu(Mtu::Mtu512);
        let id = two.b.create_id(PortSpace::Tcp).unwrap();
        two.b.bind_addr(id, ([10, 0, 0, 2], 4000).into()).unwrap();
        two.b.listen(id, 8).unwrap();
        let id = two.b.create_id(PortSpace::Udp).unwrap();
        two.b.bind_addr(id, ([10, 0, 0, 2], 4000).into()).unwrap();
        two.b.listen(id, 8).unwrap();
        two
    }

    /// Requests the QP number of the datagram port, and returns the id.
    fn request_qp(&mut self) -> CmId {
        let id = resolved_in(&mut self.a, PortSpace::Udp);
        self.a.connect(id, &ConnParam::default()).unwrap();
        id
    }

    /// Advances the time on both devices.
    fn pass(&mut self, time: Duration) {
        self.now += time;
        for nic in [&mut self.a, &mut self.b] {
            nic.handle_timeouts(self.now);
        }
    }

    /// Exchanges packets until there are no more left.
    fn exchange(&mut self) {
        while hand_over(self.now, &mut self.a, &mut self.b)
            + hand_over(self.now, &mut self.b, &mut self.a)
            > 0
        {}
    }

    /// Starts a connection and returns the ids of both sides.
    fn connect(&mut self) -> (CmId, CmId) {
        let id = resolved(&mut self.a);
        with_qp(&mut self.a, id);
        self.a.connect(id, &ConnParam::default()).unwrap();
        self.exchange();
        let request = std::iter::from_fn(|| self.b.poll_cm_event())
            .find(|e| matches!(e.kind, CmEventKind::ConnectRequest { .. }))
            .expect("a request");
        with_qp(&mut self.b, request.id);
        (id, request.id)
    }
}

fn hand_over(now: Instant, from: &mut Nic, to: &mut Nic) -> usize {
    let mut batch = TxBatch::new(1);
    from.poll_transmit(now, &mut batch, 1 << 20);
    let packets: Vec<_> = batch
        .groups()
        .iter()
        .flat_map(|g| batch.copy_packets(g))
        .collect();
    for packet in &packets {
        to.handle_datagram(now, from.device.port.addr(), packet.len(), packet);
    }
    packets.len()
}

fn resolved(nic: &mut Nic) -> CmId {
    resolved_in(nic, PortSpace::Tcp)
}

fn resolved_in(nic: &mut Nic, space: PortSpace) -> CmId {
    let id = nic.create_id(space).unwrap();
    let wait = Duration::from_secs(1);
    nic.resolve_addr(id, None, ([10, 0, 0, 2], 4000).into(), wait)
        .unwrap();
    nic.resolve_route(id, wait).unwrap();
    id
}

fn with_qp(nic: &mut Nic, id: CmId) {
    let (pd, send_cq) = (nic.alloc_pd().unwrap(), nic.create_cq(8).unwrap());
    let init = QpInitAttr {
        recv_cq: nic.create_cq(8).unwrap(),
        ..QpInitAttr::new(pd, send_cq, QpType::Rc, QpCap::new(2, 2))
    };
    nic.create_cm_qp(id, &init).unwrap();
}

fn last_event(nic: &mut Nic) -> CmEvent {
    std::iter::from_fn(|| nic.poll_cm_event())
        .last()
        .expect("an event")
}

#[test]
fn transitions_match_diagram() {
    let expected = "Idle: Bound AddrResolved Listening\n\
                    Bound: AddrResolved Listening\n\
                    AddrResolved: RouteResolved\n\
                    RouteResolved: Connecting\n\
                    Listening: \n\
                    Connecting: Connecting Responded Established Closed\n\
                    Responded: Established Closed\n\
                    Requested: Accepting Established Closed\n\
                    Accepting: Established Closed\n\
                    Established: Disconnecting Closed\n\
                    Disconnecting: Closed\n\
                    Closed: \n";
    assert_eq!(table(&STATES), expected);
}

#[test]
fn valid_transitions_occur() {
    assert_all_taken(&STATES, || {
        let two = &mut Two::new();
        // The request is retried with a smaller path MTU, accepted, then closed by the active side.
        let (a, b) = two.connect();
        two.b.accept(b, &ConnParam::default()).unwrap();
        two.exchange();
        two.a.disconnect(a).unwrap();
        two.exchange();
        // The request is rejected.
        let (_, b) = two.connect();
        two.b.reject(b, &[]).unwrap();
        two.exchange();
        // Closed on either side before the connection is established.
        let (a, b) = two.connect();
        two.b.accept(b, &ConnParam::default()).unwrap();
        two.b.disconnect(b).unwrap();
        two.a.disconnect(a).unwrap();
        two.exchange();
        // QP managed by the application, which either continues or does not.
        for continues in [true, false] {
            let id = resolved(&mut two.a);
            let param = ConnParam {
                qp_num: 77,
                ..ConnParam::default()
            };
            two.a.connect(id, &param).unwrap();
            two.exchange();
            let request = last_event(&mut two.b).id;
            two.b.accept(request, &param).unwrap();
            two.exchange();
            match continues {
                true => two.a.establish(id).unwrap(),
                false => two.a.reject(id, &[]).unwrap(),
            }
            two.exchange();
        }
        // Datagram request which is either accepted or rejected.
        for tells in [true, false] {
            two.request_qp();
            two.exchange();
            let request = last_event(&mut two.b).id;
            let param = ConnParam {
                qp_num: 77,
                ..ConnParam::default()
            };
            match tells {
                true => two.b.accept(request, &param).unwrap(),
                false => two.b.reject(request, &[]).unwrap(),
            }
            two.exchange();
        }
        // Bind addresses first, and use a service id without an address.
        let id = two.a.create_id(PortSpace::Tcp).unwrap();
        two.a.bind_addr(id, ([10, 0, 0, 1], 0).into()).unwrap();
        let (to, wait) = (([10, 0, 0, 2], 4000).into(), Duration::from_secs(1));
        two.a.resolve_addr(id, None, to, wait).unwrap();
        let space = PortSpace::Ib {
            service_id: 7,
            mask: u64::MAX,
        };
        let id = two.a.create_id(space).unwrap();
        two.a.listen(id, 1).unwrap();
    });
}

/// The IB CM can reuse the id for a new connection, which must not be closed together with this
/// one.
#[test]
fn rejected_request_without_qp_releases_id() {
    let two = &mut Two::new();
    let id = resolved(&mut two.a);
    with_qp(&mut two.a, id);
    two.a.connect(id, &ConnParam::default()).unwrap();
    let qp = two.a.cm.ids.get(id).unwrap().qp.unwrap();
    // Without a QP, we cannot send another request.
    two.a.destroy_qp(qp).unwrap();
    two.exchange();
    let events: Vec<_> = std::iter::from_fn(|| two.a.poll_cm_event()).collect();
    assert!(
        matches!(events.last().unwrap().kind, CmEventKind::Rejected { .. }),
        "{events:?}"
    );
    assert_eq!(two.a.cm.ids.get(id).unwrap().ib, None);
    assert!(two.a.cm.by_ib.is_empty());
}

/// Drops all packets sent by a device and returns their number.
fn lose(now: Instant, nic: &mut Nic) -> usize {
    let mut batch = TxBatch::new(1);
    nic.poll_transmit(now, &mut batch, 1 << 20)
}

#[test]
fn lost_sidr_messages_are_retransmitted() {
    let two = &mut Two::new();
    let id = two.request_qp();
    assert_eq!(lose(two.now, &mut two.a), 1);
    two.pass(Duration::from_millis(600));
    two.exchange();
    let first = last_event(&mut two.b).id;
    let param = ConnParam {
        qp_num: 77,
        ..ConnParam::default()
    };
    two.b.accept(first, &param).unwrap();
    assert_eq!(lose(two.now, &mut two.b), 1);
    // As in Linux, a retransmitted request is treated as a new one.
    two.pass(Duration::from_millis(600));
    two.exchange();
    let second = last_event(&mut two.b).id;
    assert_ne!(first, second);
    two.b.accept(second, &param).unwrap();
    two.exchange();
    let event = last_event(&mut two.a);
    assert_eq!(event.id, id);
    let CmEventKind::Established { param } = event.kind else {
        panic!("{event:?}");
    };
    assert_eq!(param.qp_num, 77);
    assert_eq!(two.a.cm.ids.get(id).unwrap().ib, None);
    assert!(two.a.cm.by_ib.is_empty());
}

#[test]
fn unanswered_request_times_out() {
    let two = &mut Two::new();
    let id = two.request_qp();
    let mut sent = 0;
    for _ in 0..20 {
        sent += lose(two.now, &mut two.a);
        two.pass(Duration::from_millis(600));
    }
    assert_eq!(sent, 16);
    let event = last_event(&mut two.a);
    assert_eq!((event.id, event.kind), (id, CmEventKind::Unreachable));
    assert!(two.a.cm.by_ib.is_empty());
}

/// A peer can send a connection request to a datagram port, or a datagram request to a connection
/// port.
#[test]
fn request_with_wrong_qp_type_is_rejected() {
    use crate::cm::SidrReqParams;
    use crate::wire::cm_msg::{Bits, CmTimeout, PrivateData, ServiceId};

    let two = &mut Two::new();
    let space = PortSpace::Ib {
        service_id: 0x0111_0fa0,
        mask: !0,
    };
    let id = resolved_in(&mut two.a, space);
    with_qp(&mut two.a, id);
    two.a.connect(id, &ConnParam::default()).unwrap();
    two.exchange();
    let event = last_event(&mut two.a);
    assert!(
        matches!(event.kind, CmEventKind::Rejected { reason: 8, .. }),
        "{event:?}"
    );
    let params = SidrReqParams {
        traffic_class: 0,
        service_id: ServiceId(0x0106_0fa0),
        pkey: crate::verbs::PKey::DEFAULT,
        timeout: CmTimeout::new(17),
        max_cm_retries: Bits::truncate(1),
        private_data: PrivateData::default(),
    };
    let peer = [10, 0, 0, 2].into();
    two.a.cm.cm.send_sidr_req(two.now, peer, &params).unwrap();
    two.a.cm.may_send = true;
    two.exchange();
    assert_eq!(two.b.poll_cm_event(), None);
    assert_eq!(two.b.cm.ids.len(), 2);
    assert_eq!(two.a.cm.cm.id_count(), 0);
}

/// Returns the type of service for all packets sent by a device, and passes them to the other
/// device.
fn classes(now: Instant, from: &mut Nic, to: &mut Nic) -> Vec<u8> {
    let mut batch = TxBatch::new(1);
    from.poll_transmit(now, &mut batch, 1 << 20);
    let groups = batch.groups();
    for packet in groups.iter().flat_map(|g| batch.copy_packets(g)) {
        to.handle_datagram(now, from.device.port.addr(), packet.len(), &packet);
    }
    groups.iter().map(|g| g.way.tos).collect()
}

#[test]
fn type_of_service_is_taken_from_request() {
    let two = &mut Two::new();
    two.a.device.set_mtu(Mtu::Mtu512);
    for own in [None, Some(0x20)] {
        let id = resolved(&mut two.a);
        with_qp(&mut two.a, id);
        // The application can't set the ECN bits.
        let option = CmOption::TypeOfService(0x6b);
        two.a.set_option(id, option).unwrap();
        two.a.connect(id, &ConnParam::default()).unwrap();
        assert_eq!(classes(two.now, &mut two.a, &mut two.b), [0x68]);
        let request = last_event(&mut two.b).id;
        with_qp(&mut two.b, request);
        if let Some(class) = own {
            let option = CmOption::TypeOfService(class);
            two.b.set_option(request, option).unwrap();
        }
        two.b.accept(request, &ConnParam::default()).unwrap();
        assert_eq!(classes(two.now, &mut two.b, &mut two.a), [0x68]);
        assert_eq!(classes(two.now, &mut two.a, &mut two.b), [0x68], "RTU");
        for (nic, id, class) in [(&two.a, id, 0x68), (&two.b, request, own.unwrap_or(0x68))] {
            let qp = nic.cm.ids.get(id).unwrap().qp.unwrap();
            let ah = nic.query_qp(qp).unwrap().ah.unwrap();
            assert_eq!(ah.traffic_class, class);
        }
        two.a.disconnect(id).unwrap();
        assert_eq!(classes(two.now, &mut two.a, &mut two.b), [0x68], "DREQ");
        two.exchange();
        last_event(&mut two.a);
    }
    let id = resolved_in(&mut two.a, PortSpace::Udp);
    let option = CmOption::TypeOfService(0x68);
    two.a.set_option(id, option).unwrap();
    two.a.connect(id, &ConnParam::default()).unwrap();
    assert_eq!(classes(two.now, &mut two.a, &mut two.b), [0x68]);
}

/// Devices at 10.0.0.1, 10.0.0.2 and 10.0.0.3. The last two listen on port 4000.
struct Three {
    nics: [Nic; 3],
    now: Instant,
}

impl Three {
    fn new() -> Self {
        let now = Instant::now();
        let nics = [1, 2, 3].map(|host| {
            let mut nic = Nic::new(NicConfig::new([10, 0, 0, host].into(), [host; 32]), now);
            let id = nic.create_id(PortSpace::Tcp).unwrap();
            nic.bind_addr(id, ([10, 0, 0, host], 4000).into()).unwrap();
            nic.listen(id, 8).unwrap();
            nic
        });
        Self { nics, now }
    }

    /// Delivers packets until there are no more left. Packets to other hosts are lost.
    fn exchange(&mut self) {
        loop {
            let mut packets = Vec::new();
            for nic in &mut self.nics {
                let mut batch = TxBatch::new(1);
                nic.poll_transmit(self.now, &mut batch, 1 << 20);
                let from = nic.device.port.addr();
                for group in batch.groups() {
                    let copies = batch.copy_packets(group).into_iter();
                    packets.extend(copies.map(|packet| (from, group.way.dst.ip(), packet)));
                }
            }
            if packets.is_empty() {
                return;
            }
            for (from, to, packet) in packets {
                let mut nics = self.nics.iter_mut();
                if let Some(nic) = nics.find(|nic| nic.device.port.addr().ip() == to) {
                    nic.handle_datagram(self.now, from, packet.len(), &packet);
                }
            }
        }
    }

    /// Sends a request from the first device to the second, following up to `most` redirections.
    fn connect(&mut self, most: u8) -> CmId {
        let id = resolved(&mut self.nics[0]);
        self.send_request(id, most)
    }

    fn send_request(&mut self, id: CmId, most: u8) -> CmId {
        with_qp(&mut self.nics[0], id);
        let option = CmOption::Redirects(most);
        self.nics[0].set_option(id, option).unwrap();
        let param = ConnParam {
            private_data: b"login".to_vec(),
            ..ConnParam::default()
        };
        self.nics[0].connect(id, &param).unwrap();
        self.exchange();
        id
    }

    /// Returns the request received by a device.
    fn request(&mut self, nic: usize) -> Option<CmId> {
        let event = self.nics[nic].poll_cm_event()?;
        let CmEventKind::ConnectRequest { param, .. } = event.kind else {
            panic!("{event:?}");
        };
        assert_eq!(param.private_data[..5], *b"login");
        Some(event.id)
    }

    /// Returns the reason with which the first device reports a rejection.
    fn rejection(&mut self) -> u16 {
        let event = last_event(&mut self.nics[0]);
        let CmEventKind::Rejected { reason, .. } = event.kind else {
            panic!("{event:?}");
        };
        reason
    }
}

#[test]
fn redirected_request_reaches_other_port() {
    let three = &mut Three::new();
    // The request is sent again with a smaller path MTU.
    three.nics[2].device.set_mtu(Mtu::Mtu512);
    let id = three.connect(1);
    let request = three.request(1).unwrap();
    three.nics[1]
        .redirect(request, [10, 0, 0, 3].into())
        .unwrap();
    three.exchange();
    let request = three.request(2).expect("a request at the other port");
    with_qp(&mut three.nics[2], request);
    three.nics[2]
        .accept(request, &ConnParam::default())
        .unwrap();
    three.exchange();
    let event = last_event(&mut three.nics[0]);
    assert_eq!(event.id, id);
    assert!(
        matches!(event.kind, CmEventKind::Established { .. }),
        "{event:?}"
    );
    let peer = Some(([10, 0, 0, 3], 4000).into());
    assert_eq!(three.nics[0].peer_addr(id), peer);
    let qp = three.nics[0].cm.ids.get(id).unwrap().qp.unwrap();
    let ah = three.nics[0].query_qp(qp).unwrap().ah.unwrap();
    assert_eq!(ah.dgid.ip(), IpAddr::from([10, 0, 0, 3]));
    assert_eq!(three.nics[0].cm.cm.id_count(), 2, "listener and connection");
}

/// The path leads to the device that redirects the request.
#[test]
fn redirected_request_has_no_alternate_path() {
    let three = &mut Three::new();
    let id = resolved(&mut three.nics[0]);
    let gid = Gid::from(IpAddr::from([10, 0, 0, 2]));
    let path = AltPath {
        ah: AhAttr::new(gid),
        pkey_index: 0,
        timeout: 14,
    };
    three.nics[0].load_alternate_path(id, &path).unwrap();
    three.send_request(id, 1);
    let request = three.request(1).unwrap();
    let offered = three.nics[1].cm.ids.get(request).unwrap().alternate;
    assert!(offered.is_some());
    three.nics[1]
        .redirect(request, [10, 0, 0, 3].into())
        .unwrap();
    three.exchange();
    assert_eq!(three.nics[0].cm.ids.get(id).unwrap().alternate, None);
    let request = three.request(2).expect("a request at the other port");
    with_qp(&mut three.nics[2], request);
    three.nics[2]
        .accept(request, &ConnParam::default())
        .unwrap();
    three.exchange();
    let event = last_event(&mut three.nics[0]);
    assert!(
        matches!(event.kind, CmEventKind::Established { .. }),
        "{event:?}"
    );
    let qp = three.nics[0].cm.ids.get(id).unwrap().qp.unwrap();
    assert_eq!(three.nics[0].query_qp(qp).unwrap().alt_path, None);
}

#[test]
fn redirections_are_bounded() {
    for most in [0, 1, 3] {
        let three = &mut Three::new();
        three.connect(most);
        let mut requests = 0;
        // The second and third device refer to each other.
        for at in [1, 2].into_iter().cycle() {
            let Some(request) = three.request(at) else {
                break;
            };
            requests += 1;
            let to = [10, 0, 0, if at == 1 { 3 } else { 2 }].into();
            three.nics[at].redirect(request, to).unwrap();
            three.exchange();
        }
        assert_eq!(requests, u32::from(most) + 1);
        assert_eq!(three.rejection(), 24);
        assert!(three.nics[0].cm.by_ib.len() == 1, "only the listener");
    }
}

#[test]
fn unusable_redirections_are_reported() {
    use crate::wire::cm_msg::{AdditionalInfo, PrivateData, Redirect, RejReason};

    let gid = |ip: &str| Gid::from(ip.parse::<IpAddr>().unwrap());
    let to = |ip| Redirect::to_port(gid(ip)).emit();
    let other_qp = Redirect {
        qpn: Qpn::new(7),
        ..Redirect::to_port(gid("10.0.0.3"))
    };
    let short = AdditionalInfo::new(&[1, 2]).unwrap();
    for info in [
        // The port that sends it, no host, another address family, another QP, and too short.
        to("10.0.0.2"),
        to("0.0.0.0"),
        to("239.1.2.3"),
        to("2001:db8::1"),
        to("fe80::1"),
        other_qp.emit(),
        short,
    ] {
        let three = &mut Three::new();
        three.connect(4);
        let request = three.request(1).unwrap();
        let agent = &mut three.nics[1].cm;
        let ib = agent.ids.get(request).unwrap().ib.unwrap();
        let (reason, none) = (RejReason::PortCmRedirect, PrivateData::default());
        agent
            .cm
            .send_rej(three.now, ib, reason, info, none)
            .unwrap();
        agent.may_send = true;
        three.exchange();
        assert_eq!(three.rejection(), 24);
    }
    let three = &mut Three::new();
    three.connect(4);
    let request = three.request(1).unwrap();
    for ip in ["0.0.0.0", "239.1.2.3", "2001:db8::1"] {
        let refused = three.nics[1].redirect(request, ip.parse().unwrap());
        assert_eq!(refused, Err(CmError::Unreachable));
    }
    three.nics[1].reject(request, &[]).unwrap();
    three.exchange();
    assert_eq!(three.rejection(), 28);
    let late = three.nics[1].redirect(request, [10, 0, 0, 3].into());
    assert_eq!(late, Err(CmError::InvalidState("redirect")));
}

/// Requests must only be sent again as specified by the rejection, and their number is bounded, for
/// arbitrary reasons and additional information.
#[test]
fn rejections() {
    use crate::wire::cm_msg::{AdditionalInfo, PrivateData, RejReason};

    bolero::check!(name = "rejections").for_each(|input: &[u8]| {
        let (most, input) = input.split_first().unwrap_or((&0, &[]));
        let most = most % 4;
        let three = &mut Three::new();
        let id = three.connect(most);
        let mut chunks = input.chunks(74);
        let mut last: Option<(usize, RejReason, AdditionalInfo)> = None;
        for requests in 1.. {
            let Some((at, request)) = [1, 2].into_iter().find_map(|at| {
                let mut events = std::iter::from_fn(|| three.nics[at].poll_cm_event());
                let request = events
                    .find(|event| matches!(event.kind, CmEventKind::ConnectRequest { .. }))?;
                Some((at, request.id))
            }) else {
                break;
            };
            // Each redirection may be followed by one retry with a smaller path MTU.
            assert!(requests <= 2 * (u32::from(most) + 1), "{requests} requests");
            let gid = Gid::from(IpAddr::from([10, 0, 0, at as u8 + 1])).0;
            match &last {
                None => assert_eq!(at, 1),
                Some((from, RejReason::InvalidMtu, _)) => assert_eq!(at, *from),
                Some((from, RejReason::PortCmRedirect, info)) => {
                    assert!(at != *from && info[8..24] == gid && info[33..36] == [0, 0, 1]);
                }
                Some((from, RejReason::PortRedirect, info)) => {
                    assert!(at != *from && info[..16] == gid);
                }
                Some((_, reason, _)) => panic!("a request after {reason:?}"),
            }
            let (reason, info) = match chunks.next() {
                Some([reason, len, info @ ..]) => {
                    let len = info.len().min(usize::from(*len));
                    let info = AdditionalInfo::new(&info[..len]).unwrap();
                    (RejReason::from(u16::from(*reason % 40)), info)
                }
                _ => (RejReason::ConsumerDefined, AdditionalInfo::default()),
            };
            let agent = &mut three.nics[at].cm;
            let ib = agent.ids.get(request).unwrap().ib.unwrap();
            let none = PrivateData::default();
            agent
                .cm
                .send_rej(three.now, ib, reason, info, none)
                .unwrap();
            agent.may_send = true;
            last = Some((at, reason, info));
            three.exchange();
        }
        // Either the rejection was reported, or a request was sent to a host that does not respond.
        let is_connecting = three.nics[0].cm.ids.get(id).unwrap().state == IdState::Connecting;
        let events: Vec<_> = std::iter::from_fn(|| three.nics[0].poll_cm_event()).collect();
        let rejected = |event: &CmEvent| matches!(event.kind, CmEventKind::Rejected { .. });
        assert_eq!(events.iter().any(rejected), !is_connecting, "{events:?}");
        let nic = &mut three.nics[0];
        // A redirection to the device itself.
        let requests = events
            .iter()
            .filter(|event| matches!(event.kind, CmEventKind::ConnectRequest { .. }));
        for request in requests {
            nic.destroy_id(request.id).unwrap();
        }
        if let Some(qp) = nic.cm.ids.get(id).unwrap().qp {
            nic.destroy_qp(qp).unwrap();
        }
        nic.destroy_id(id).unwrap();
        assert_eq!(nic.cm.by_ib.len(), 1, "only the listener");
    });
}
