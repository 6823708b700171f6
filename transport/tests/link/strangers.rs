//! Attacks on connections by a stranger, a lying peer or the owner of the interface.

use std::io::Read;
use std::net::{IpAddr, SocketAddr, UdpSocket};
use std::sync::Arc;
use std::time::{Duration, Instant};

use riser_transport::cm::{Cm, CmConfig, ReqParams};
use riser_transport::verbs::{
    Access, AhAttr, Ece, Gid, Mtu, PKey, Provider as _, QpAttr, QpState, QpType, SendOp, SendWr,
    Sge, Verbs as _, WcStatus,
};
use riser_transport::wire::cm_msg::{Bits, CaGuid, CmPath, CmTimeout, PrivateData, ServiceId};
use riser_transport::wire::{
    Aeth, AethSyndrome, Bth, Deth, ExtHeaders, GSI_QKEY, IcrcFlow, Msn, Opcode, Psn, Qpn,
    emit_headers,
};
use socket2::{Domain, Protocol, Socket, Type};

use super::frames::sniffer;
use super::{Link, V4, V6, on_a_link, sh};
use crate::suite::world::{
    End, Side, Wants, World, connect_on, connected, init_attr, objects, pattern,
};
use riser_testkit::skip::skip;

/// Writes 64 KiB and checks that they arrive.
pub(super) fn write_arrives(w: &mut Link, a: &Side, b: &Side) {
    let data = pattern(7, 64 << 10);
    a.memory.write(0, &data);
    b.memory.fill(0, data.len(), 0);
    a.send(w, 1, SendOp::Write(b.remote(0)), 0, data.len());
    assert_eq!(a.completion(w).status, WcStatus::Success);
    assert!(b.bytes(0, data.len()) == data);
}

fn path_mtu(w: &mut Link, side: &Side) -> Mtu {
    let attr = w.provider(side.end).query_qp(side.qp).unwrap();
    attr.path_mtu.expect("a connected queue pair")
}

/// Computes the checksum of RFC 1071.
fn checksum(bytes: &[u8]) -> [u8; 2] {
    let words = bytes
        .chunks(2)
        .map(|w| u32::from(w[0]) << 8 | u32::from(w[1]));
    let mut sum: u32 = words.sum();
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    (!(sum as u16)).to_be_bytes()
}

/// Sends "fragmentation needed", with an MTU of 600 bytes, for a RoCEv2 packet from A to B. This
/// only requires knowledge of the two addresses (RFC 1191).
fn fragmentation_needed() {
    let mut m = vec![3, 4, 0, 0, 0, 0, 2, 88];
    m.extend([0x45, 0, 4, 64, 0, 0, 0x40, 0, 64, 17, 0, 0]);
    m.extend([10, 9, 0, 1, 10, 9, 0, 2]);
    m.extend([0x12, 0xb7, 0x12, 0xb7, 4, 44, 0, 0]);
    let sum = checksum(&m);
    m[2..4].copy_from_slice(&sum);
    send_icmp(Protocol::ICMPV4, V4[2], V4[0], &m);
}

/// Sends "packet too big", with an MTU of 1280 bytes (RFC 8201). The kernel computes the checksum.
fn packet_too_big() {
    let mut m = vec![2, 0, 0, 0, 0, 0, 5, 0];
    m.extend([0x60, 0, 0, 0, 4, 44, 17, 64]);
    for last in [1, 2] {
        m.extend([0xfd, 9, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, last]);
    }
    m.extend([0x12, 0xb7, 0x12, 0xb7, 4, 44, 0, 0]);
    send_icmp(Protocol::ICMPV6, V6[2], V6[0], &m);
}

fn send_icmp(protocol: Protocol, from: &str, to: &str, message: &[u8]) {
    let at = |ip: &str| SocketAddr::new(ip.parse().unwrap(), 0);
    let socket = Socket::new(Domain::for_address(at(from)), Type::RAW, Some(protocol)).unwrap();
    socket.bind(&at(from).into()).unwrap();
    socket.send_to(message, &at(to).into()).unwrap();
}

/// A third host claims that the path MTU is smaller. The kernel accepts this for ten minutes, but
/// it must not close connections, which have their own path MTU.
fn a_stranger_lowers_the_path_mtu(
    test: &'static str,
    addrs: [&'static str; 3],
    lie: fn(),
    learned: &'static str,
) {
    on_a_link(
        test,
        addrs,
        |_| {},
        move |w| {
            let (a, b) = connected(w);
            assert_eq!(path_mtu(w, &a), Mtu::Mtu4096);
            write_arrives(w, &a, &b);
            w.at_b.run(lie);
            w.until("the kernel's belief", |_| {
                let route = sh(&format!("ip route get {}", addrs[1])).unwrap();
                route.contains(learned).then_some(())
            });
            write_arrives(w, &a, &b);
            let (a, b) = connect_on(w, 5001, &Wants::default(), &Wants::default());
            assert_eq!(path_mtu(w, &a), Mtu::Mtu4096);
            write_arrives(w, &a, &b);
            assert_eq!(w.a.driver_counters().too_long, 0);
        },
    );
}

#[test]
fn icmp_does_not_stop_connections() {
    a_stranger_lowers_the_path_mtu(
        "icmp_does_not_stop_connections",
        V4,
        fragmentation_needed,
        "mtu 600",
    );
}

#[test]
fn icmpv6_does_not_stop_connections() {
    a_stranger_lowers_the_path_mtu(
        "icmpv6_does_not_stop_connections",
        V6,
        packet_too_big,
        "mtu 1280",
    );
}

/// Existing connections keep their path MTU, so short messages still pass. New connections use the
/// MTU of the interface.
#[test]
fn new_connections_use_interface_mtu() {
    let test = "new_connections_use_interface_mtu";
    on_a_link(
        test,
        V4,
        |_| {},
        |w| {
            let (old_a, old_b) = connected(w);
            sh("ip link set v0 mtu 1500").unwrap();
            w.until("the device sees it", |w| {
                let port = w.a.query_port(1).unwrap();
                (port.active_mtu == Mtu::Mtu1024).then_some(())
            });
            let (a, b) = connect_on(w, 5001, &Wants::default(), &Wants::default());
            assert_eq!(
                (path_mtu(w, &a), path_mtu(w, &b)),
                (Mtu::Mtu1024, Mtu::Mtu1024)
            );
            write_arrives(w, &a, &b);
            assert_eq!(path_mtu(w, &old_a), Mtu::Mtu4096);
            old_a.send(w, 2, SendOp::Write(old_b.remote(0)), 0, 512);
            assert_eq!(old_a.completion(w).status, WcStatus::Success);
            sh("ip link set v0 mtu 9000").unwrap();
            w.until("the device sees it", |w| {
                let port = w.a.query_port(1).unwrap();
                (port.active_mtu == Mtu::Mtu4096).then_some(())
            });
            write_arrives(w, &old_a, &old_b);
        },
    );
}

const MESSAGES: usize = 16;
const LEN: usize = 40 << 10;
const OTHERS: &[u8] = b"another session's bytes ";

/// A peer acknowledges packets before receiving them. The requests complete, and the buffers are
/// reused for another session. The bytes of that session must not be sent in packets which the full
/// socket has not accepted yet.
#[test]
fn reused_buffer_never_reaches_old_peer() {
    let test = "reused_buffer_never_reaches_old_peer";
    let unprivileged: fn(&mut _) = |config: &mut riser_transport::roce::RoceConfig| {
        config.socket_buffer = 208 << 10;
        config.max_inflight_bytes = Some(1 << 20);
    };
    on_a_link(test, V4, unprivileged, |w| {
        if let Err(why) = sh("tc qdisc add dev v0 root tbf rate 10mbit burst 64kb latency 60s") {
            return skip(test, &why);
        }
        let mut sniffer = w.at_b.run(sniffer);
        let forger = w.at_b.run(|| UdpSocket::bind((V4[1], 0)).unwrap());
        let (a, b) = connected(w);
        a.memory.fill(0, MESSAGES * LEN, b'A');
        let first = w.a.query_qp(a.qp).unwrap().sq_psn.unwrap();
        for n in 0..MESSAGES {
            a.send(w, n as u64, SendOp::Write(b.remote(0)), n * LEN, LEN);
        }
        // From this point, only A is driven, and the forger replaces the peer.
        let end = Instant::now() + w.patience();
        let (mut done, mut seen, mut out) = (0, 0, Vec::new());
        let mut frame = vec![0; 1 << 17];
        while done < MESSAGES || seen < w.a.counters().tx_bytes {
            assert!(Instant::now() < end, "{done} done, {seen} bytes seen");
            w.a.progress(Instant::now());
            let (to, qpn) = (w.a.socket_addr(), w.a.qp_num(a.qp).unwrap());
            // Acknowledge all generated packets, whether or not they have been sent, so that the
            // window grows.
            let made = w.a.qp_counters(a.qp).unwrap().rc;
            if let Some(last) = (made.tx_packets - made.retransmits).checked_sub(1) {
                forge_ack(&forger, to, qpn, Psn::new(first).add(last as u32));
            }
            w.a.poll_cq(a.cq, MESSAGES, &mut out).unwrap();
            for c in out.drain(..) {
                assert_eq!(c.status, WcStatus::Success);
                done += 1;
                let bytes = OTHERS.repeat(LEN.div_ceil(OTHERS.len()));
                a.memory.write(c.wr_id.0 as usize * LEN, &bytes[..LEN]);
            }
            while let Ok(n) = sniffer.read(&mut frame) {
                let leaks = frame[..n].windows(8).any(|w| w == &OTHERS[..8]);
                assert!(!leaks, "another session's bytes were sent");
                seen += udp_payload_from_a(&frame[..n]);
            }
        }
        assert!(w.a.driver_counters().blocked > 0);
    });
}

/// Returns the number of UDP payload bytes in a frame sent by A, or in several frames that the
/// kernel has combined.
fn udp_payload_from_a(frame: &[u8]) -> u64 {
    const HEADERS: usize = 14 + 20 + 8;
    let is_ours = frame.len() > HEADERS && frame[23] == 17 && frame[26..30] == [10, 9, 0, 1];
    if is_ours {
        (frame.len() - HEADERS) as u64
    } else {
        0
    }
}

fn forge_ack(from: &UdpSocket, to: SocketAddr, qpn: u32, psn: Psn) {
    let bth = Bth::new(Opcode::RcAcknowledge, Qpn::new(qpn), psn);
    let ext = ExtHeaders {
        aeth: Some(Aeth::new(AethSyndrome::from_wire(0x1f), Msn::new(1))),
        ..ExtHeaders::default()
    };
    let mut bytes = emit_headers(&bth, &ext).to_vec();
    let flow = IcrcFlow::new(from.local_addr().unwrap(), to).unwrap();
    bytes.extend_from_slice(&flow.compute(&bytes, 0).to_le_bytes());
    from.send_to(&bytes, to).unwrap();
}

/// Responses to unused addresses of the link wait for neighbour discovery in the kernel, for
/// seconds. They must not delay packets to a peer, nor a new peer.
#[test]
fn responses_to_missing_hosts_delay_no_peer() {
    let test = "responses_to_missing_hosts_delay_no_peer";
    let unprivileged: fn(&mut _) = |config: &mut riser_transport::roce::RoceConfig| {
        config.socket_buffer = 208 << 10;
    };
    on_a_link(test, V4, unprivileged, |w| {
        let (a, b) = connected(w);
        write_arrives(w, &a, &b);
        // The ends have static neighbour entries, and B's end does not respond for any other
        // address.
        let mac = |device: &str| {
            let shown = sh(&format!("ip -o link show {device}")).unwrap();
            let (_, rest) = shown.split_once("link/ether ").unwrap();
            rest.split(' ').next().unwrap().to_owned()
        };
        let (mac_a, mac_b) = (mac("v0"), w.at_b.run(move || mac("v1")));
        let know = |addr, mac: &str, device| {
            sh(&format!(
                "ip neigh replace {addr} lladdr {mac} dev {device} nud permanent"
            ))
        };
        know(V4[1], &mac_b, "v0").unwrap();
        let to = w.a.socket_addr();
        let sockets = w.at_b.run(move || {
            for host in 100..164 {
                sh(&format!("ip addr add 10.9.0.{host}/32 dev v1")).unwrap();
            }
            // Wait until the addresses have been announced, if they are.
            sh("ip link set v1 arp off").unwrap();
            know(V4[0], &mac_a, "v1").unwrap();
            let bind = |host| UdpSocket::bind((format!("10.9.0.{host}"), 0)).unwrap();
            Arc::new((100..164).map(bind).collect::<Vec<_>>())
        });
        let mut n = 0;
        w.until("answers", |w| {
            // Send the number of requests handled by a round. With more, the NIC falls behind and
            // handles fewer.
            let sockets = Arc::clone(&sockets);
            n += 1;
            w.at_b.run(move || {
                let some = sockets.chunks(16).nth(n as usize % 4);
                some.unwrap().iter().for_each(|from| forge_req(from, to, n));
            });
            (w.a.cm_counters().refused >= 64 * 16).then_some(())
        });
        let neighbours = sh("ip neigh show dev v0").unwrap();
        assert!(
            neighbours.matches("INCOMPLETE").count() > 32,
            "{neighbours}"
        );
        write_arrives(w, &a, &b);
        let (a, b) = connect_on(w, 5001, &Wants::default(), &Wants::default());
        write_arrives(w, &a, &b);
        assert_eq!(w.a.driver_counters().blocked, 0);
    });
}

/// Retransmissions to disconnected peers wait for neighbour discovery in the kernel, repeatedly.
/// They must not delay packets to other peers.
#[test]
fn disconnected_peers_delay_no_other() {
    let test = "disconnected_peers_delay_no_other";
    let unprivileged: fn(&mut _) = |config: &mut riser_transport::roce::RoceConfig| {
        config.socket_buffer = 208 << 10;
    };
    on_a_link(test, V4, unprivileged, |w| {
        let (a, b) = connected(w);
        write_arrives(w, &a, &b);
        let wants = Wants::default();
        let (pd, cq, _, mr) = objects(w, End::A, &wants);
        for n in 0..32 {
            let qp = w.a.create_qp(&init_attr(pd, cq, &wants)).unwrap();
            let gone = format!("10.9.0.{}", 100 + n % 4).parse().unwrap();
            for attr in to_rts(gone) {
                w.a.modify_qp(qp, &attr).unwrap();
            }
            let sges = [Sge {
                addr: mr.addr,
                length: LEN as u32,
                lkey: mr.lkey,
            }];
            let send = SendWr::new(n, SendOp::Send, &sges);
            w.a.post_send(qp, &[send]).unwrap();
        }
        w.pass(Duration::from_secs(4));
        let blocked = w.a.driver_counters().blocked;
        let mut longest = Duration::ZERO;
        let end = Instant::now() + Duration::from_secs(5);
        while Instant::now() < end {
            let start = Instant::now();
            write_arrives(w, &a, &b);
            longest = longest.max(start.elapsed());
        }
        assert!(longest < Duration::from_secs(1), "{longest:?}");
        assert_eq!(w.a.driver_counters().blocked, blocked);
    });
}

/// A connection survives if its link is down for some seconds.
#[test]
fn connection_survives_link_outage() {
    let test = "connection_survives_link_outage";
    on_a_link(
        test,
        V4,
        |_| {},
        |w| {
            let (a, b) = connected(w);
            write_arrives(w, &a, &b);
            w.at_b.run(|| sh("ip link set v1 down").unwrap());
            a.send(w, 2, SendOp::Write(b.remote(0)), 0, 64 << 10);
            w.pass(Duration::from_secs(3));
            w.at_b.run(|| sh("ip link set v1 up").unwrap());
            assert_eq!(a.completion(w).status, WcStatus::Success);
            write_arrives(w, &a, &b);
        },
    );
}

/// Returns the attributes to move a new queue pair to RTS.
fn to_rts(peer: IpAddr) -> [QpAttr; 3] {
    [
        QpAttr {
            pkey_index: Some(0),
            port: Some(1),
            access: Some(Access::REMOTE),
            ..QpAttr::to(QpState::Init)
        },
        QpAttr {
            ah: Some(AhAttr::new(Gid::from(peer))),
            path_mtu: Some(Mtu::Mtu4096),
            dest_qp: Some(17),
            rq_psn: Some(1),
            max_dest_rd_atomic: Some(1),
            min_rnr_timer: Some(12),
            ..QpAttr::to(QpState::Rtr)
        },
        QpAttr {
            sq_psn: Some(1),
            max_rd_atomic: Some(1),
            timeout: Some(20),
            retry_cnt: Some(7),
            rnr_retry: Some(7),
            ..QpAttr::to(QpState::Rts)
        },
    ]
}

/// Sends a REQ for a service that does not exist.
fn forge_req(from: &UdpSocket, to: SocketAddr, n: u32) {
    let ip = from.local_addr().unwrap().ip();
    let mut cm = Cm::new(CmConfig::new(CaGuid(1)), 0, 0, [n as u8; 32]);
    let path = CmPath::roce(Gid::from(ip), Gid::from(to.ip()), CmTimeout::new(14));
    let params = ReqParams {
        service_id: ServiceId(0xdead),
        qp_type: QpType::Rc,
        local_qpn: Qpn::new(17 + n),
        ece: Ece::default(),
        starting_psn: Psn::new(1),
        primary: path,
        alternate: CmPath::default(),
        path_mtu: Mtu::Mtu1024,
        pkey: PKey::DEFAULT,
        responder_resources: 1,
        initiator_depth: 1,
        flow_control: true,
        srq: false,
        retry_count: Bits::truncate(7),
        rnr_retry_count: Bits::truncate(7),
        remote_cm_timeout: CmTimeout::new(20),
        local_cm_timeout: CmTimeout::new(20),
        max_cm_retries: Bits::truncate(15),
        private_data: PrivateData::default(),
    };
    cm.send_req(Instant::now(), to.ip(), &params).unwrap();
    let (_, mad) = cm.poll_transmit().unwrap();
    let bth = Bth::new(Opcode::UdSendOnly, Qpn::GSI, Psn::new(n));
    let ext = ExtHeaders {
        deth: Some(Deth::new(GSI_QKEY, Qpn::GSI)),
        ..ExtHeaders::default()
    };
    let mut bytes = emit_headers(&bth, &ext).to_vec();
    bytes.extend_from_slice(&mad);
    let flow = IcrcFlow::new(from.local_addr().unwrap(), to).unwrap();
    bytes.extend_from_slice(&flow.compute(&bytes, 0).to_le_bytes());
    from.send_to(&bytes, to).unwrap();
}
