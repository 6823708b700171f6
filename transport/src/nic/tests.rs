//! Tests how a device handles any input from a peer.

use std::collections::VecDeque;
use std::net::SocketAddr;
use std::time::{Duration, Instant};

use proptest::prelude::*;
use riser_memory::Memory;

use super::qp::Machine;
use super::tables::PORTS_PER_QP;
use super::*;
use crate::nic::batch::{Group, Offered, SendOutcome, TxBatch};
use crate::verbs::{
    Access, AhAttr, Gid, Mtu, PortCapabilities, PortSpace, QKey, QpAttr, QpCap, QpInitAttr,
    QpState, QpType, RKey, RecvOrder, RecvWr, RemoteAddr, SendOp, SendWr, Sge, SrqAttr, SrqId,
    UdDest, VerbsError, WrId,
};
use crate::wire::mad::MadClass;
use crate::wire::{
    Aeth, AethSyndrome, AtomicEth, Bth, Credit, Deth, ExtHeaders, GSI_QKEY, IcrcFlow, Ieth, ImmDt,
    Msn, Opcode, OpcodeInfo, PayloadRule, Psn, Qpn, Reth, emit_headers,
};

const CAP: QpCap = QpCap {
    max_send_wr: 8,
    max_recv_wr: 8,
    max_send_sge: 2,
    max_recv_sge: 2,
    max_inline: 32,
};

fn peer() -> SocketAddr {
    "10.0.0.2:49152".parse().unwrap()
}

fn nic() -> Nic {
    let config = NicConfig::new("10.0.0.1".parse().unwrap(), [7; 32]);
    Nic::new(config, Instant::now())
}

fn init(nic: &mut Nic, qp_type: QpType) -> QpInitAttr {
    let pd = nic.alloc_pd().unwrap();
    let cq = nic.create_cq(64).unwrap();
    QpInitAttr {
        pd,
        send_cq: cq,
        recv_cq: cq,
        srq: None,
        qp_type,
        cap: CAP,
        sq_sig_all: false,
        xrcd: None,
        recv_order: RecvOrder::OldestFirst,
        block_self_mcast: false,
    }
}

/// Creates a QP in RTS, connected to the peer, with 100 as the next receive PSN and 200 as the next
/// send PSN.
fn connected(nic: &mut Nic) -> QpId {
    connected_to(nic, peer().ip())
}

fn connected_to(nic: &mut Nic, peer: IpAddr) -> QpId {
    let init = init(nic, QpType::Rc);
    connected_as(nic, &init, peer)
}

fn connected_as(nic: &mut Nic, init: &QpInitAttr, peer: IpAddr) -> QpId {
    let qp = nic.create_qp(init).unwrap();
    let steps = [
        QpAttr {
            pkey_index: Some(0),
            port: Some(1),
            access: Some(Access::REMOTE),
            ..QpAttr::to(QpState::Init)
        },
        QpAttr {
            ah: Some(AhAttr::new(Gid::from(peer))),
            path_mtu: Some(Mtu::Mtu1024),
            dest_qp: Some(0x99),
            rq_psn: Some(100),
            max_dest_rd_atomic: Some(4),
            min_rnr_timer: Some(12),
            ..QpAttr::to(QpState::Rtr)
        },
        QpAttr {
            sq_psn: Some(200),
            max_rd_atomic: Some(4),
            timeout: Some(14),
            retry_cnt: Some(7),
            rnr_retry: Some(7),
            ..QpAttr::to(QpState::Rts)
        },
    ];
    for step in steps {
        nic.modify_qp(qp, &step).unwrap();
    }
    qp
}

/// IP header of a packet with a congestion mark.
const MARKED: IpFields = IpFields {
    traffic_class: 0b11,
    hop_limit: 64,
    gid_index: 0,
};

#[test]
fn uc_drops_wrong_service_or_source() {
    let mut nic = nic();
    let init = init(&mut nic, QpType::Uc);
    let qp = nic.create_qp(&init).unwrap();
    let steps = [
        QpAttr {
            pkey_index: Some(0),
            port: Some(1),
            access: Some(Access::REMOTE),
            ..QpAttr::to(QpState::Init)
        },
        QpAttr {
            ah: Some(AhAttr::new(Gid::from(peer().ip()))),
            path_mtu: Some(Mtu::Mtu1024),
            dest_qp: Some(0x99),
            rq_psn: Some(100),
            ..QpAttr::to(QpState::Rtr)
        },
        QpAttr {
            sq_psn: Some(200),
            ..QpAttr::to(QpState::Rts)
        },
    ];
    for step in steps {
        nic.modify_qp(qp, &step).unwrap();
    }
    let dest = Qpn::new(nic.qp_num(qp).unwrap());
    let ext = ExtHeaders {
        reth: Some(Reth::new(0, 0, 0)),
        ..ExtHeaders::default()
    };
    let mut send = |opcode, src: SocketAddr| {
        let bth = Bth::new(opcode, dest, Psn::new(100));
        let bytes = sealed(&nic, src, &bth, &ext, &[]);
        receive(&mut nic, src, &bytes);
        let taken = nic.device.qp_counters(qp).unwrap().uc.rx_packets;
        let counters = nic.device.counters();
        (taken, counters.rx_unknown_qp, counters.rx_wrong_source)
    };
    let stranger = SocketAddr::new([10, 0, 0, 9].into(), 4791);
    assert_eq!(send(crate::wire::Opcode::RcWriteOnly, peer()), (0, 1, 0));
    assert_eq!(send(crate::wire::Opcode::UcWriteOnly, stranger), (0, 1, 1));
    assert_eq!(send(crate::wire::Opcode::UcWriteOnly, peer()), (1, 1, 1));
}

/// Returns the maximum number of in-flight bytes for a QP.
fn inflight(nic: &Nic, qp: QpId) -> u32 {
    match &nic.device.qps.get(qp).unwrap().machine {
        Machine::Rc(rc) => rc.config().max_inflight_bytes,
        _ => panic!("not a connection"),
    }
}

#[test]
fn qps_of_peer_share_inflight_limit() {
    let config = NicConfig {
        max_inflight_bytes: 100,
        peer_inflight_bytes: 400,
        ..NicConfig::new("10.0.0.1".parse().unwrap(), [7; 32])
    };
    let mut nic = Nic::new(config, Instant::now());
    let other = connected_to(&mut nic, "10.0.0.3".parse().unwrap());
    let first = connected(&mut nic);
    assert_eq!(inflight(&nic, first), 400);
    let second = connected(&mut nic);
    assert_eq!([first, second].map(|qp| inflight(&nic, qp)), [200; 2]);
    let more = [(); 5].map(|()| connected(&mut nic));
    assert_eq!([first, second].map(|qp| inflight(&nic, qp)), [100; 2]);
    assert_eq!(
        more.map(|qp| inflight(&nic, qp)),
        [100; 5],
        "what each may have"
    );
    for qp in more {
        nic.destroy_qp(qp).unwrap();
    }
    assert_eq!([first, second].map(|qp| inflight(&nic, qp)), [200; 2]);
    nic.modify_qp(second, &QpAttr::to(QpState::Reset)).unwrap();
    assert_eq!([first, second].map(|qp| inflight(&nic, qp)), [400, 100]);
    assert_eq!(inflight(&nic, other), 400);
    nic.modify_qp(first, &QpAttr::to(QpState::Sqd)).unwrap();
    for _ in 0..2 {
        move_to(&mut nic, first, [10, 0, 0, 3]);
        assert_eq!([first, other].map(|qp| inflight(&nic, qp)), [200; 2]);
    }
    nic.destroy_qp(other).unwrap();
    assert_eq!(inflight(&nic, first), 400);
}

/// Changes the peer of a QP in SQD.
fn move_to(nic: &mut Nic, qp: QpId, addr: [u8; 4]) {
    let ah = AhAttr {
        dgid: Gid::from(IpAddr::from(addr)),
        ..nic.query_qp(qp).unwrap().ah.unwrap()
    };
    let moved = QpAttr {
        ah: Some(ah),
        ..QpAttr::default()
    };
    nic.modify_qp(qp, &moved).unwrap();
}

/// Returns a full datagram from `src`, including its ICRC.
fn sealed(nic: &Nic, src: SocketAddr, bth: &Bth, ext: &ExtHeaders, payload: &[u8]) -> Vec<u8> {
    let bth = bth.with_pad_for(payload.len());
    let mut bytes = emit_headers(&bth, ext).to_vec();
    bytes.extend_from_slice(payload);
    bytes.resize(bytes.len().next_multiple_of(4), 0);
    let flow = IcrcFlow::new(src, nic.device.port.addr()).unwrap();
    let icrc = flow.compute(&bytes, 0);
    bytes.extend_from_slice(&icrc.to_le_bytes());
    bytes
}

fn receive(nic: &mut Nic, src: SocketAddr, bytes: &[u8]) {
    let now = nic.device.now();
    nic.handle_datagram(now, src, bytes.len(), bytes);
}

fn write_only(nic: &Nic, qpn: u32, psn: u32) -> Vec<u8> {
    write_from(nic, peer(), qpn, psn)
}

fn write_from(nic: &Nic, src: SocketAddr, qpn: u32, psn: u32) -> Vec<u8> {
    let bth = Bth::new(
        crate::wire::Opcode::RcWriteOnly,
        Qpn::new(qpn),
        Psn::new(psn),
    )
    .with_ack_request(true);
    let ext = ExtHeaders {
        reth: Some(Reth::new(0, 0, 0)),
        ..ExtHeaders::default()
    };
    sealed(nic, src, &bth, &ext, &[])
}

#[test]
fn invalid_packets_are_dropped() {
    let mut nic = nic();
    let qp = connected(&mut nic);
    let qpn = nic.qp_num(qp).unwrap();
    let good = write_only(&nic, qpn, 100);
    // Invalid length, ICRC, QP number, source address and partition key.
    receive(&mut nic, peer(), &good[..good.len() - 1]);
    let mut bad = good.clone();
    bad[20] ^= 1;
    receive(&mut nic, peer(), &bad);
    let other = write_only(&nic, qpn ^ 0x100, 100);
    receive(&mut nic, peer(), &other);
    receive(&mut nic, "10.0.0.3:49152".parse().unwrap(), &good);
    let bth = Bth::new(
        crate::wire::Opcode::RcSendOnly,
        Qpn::new(qpn),
        Psn::new(100),
    )
    .with_pkey(0x8001);
    let foreign = sealed(&nic, peer(), &bth, &ExtHeaders::default(), &[]);
    receive(&mut nic, peer(), &foreign);
    let c = *nic.device.counters();
    assert_eq!(
        (
            c.rx_malformed,
            c.rx_icrc_errors,
            c.rx_unknown_qp,
            c.rx_wrong_source,
            c.rx_wrong_pkey
        ),
        (1, 1, 1, 1, 1)
    );
    assert_eq!(nic.device.qp_counters(qp).unwrap().rc.rx_packets, 0);
    receive(&mut nic, peer(), &good);
    assert_eq!(nic.device.qp_counters(qp).unwrap().rc.rx_packets, 1);
    // The response must be sent to the peer's QP.
    let mut batch = TxBatch::new(1);
    let now = nic.device.now();
    assert_eq!(nic.poll_transmit(now, &mut batch, 1 << 16), 1);
    let group = &batch.groups()[0];
    assert_eq!(
        (group.way.dst, group.qpn),
        ("10.0.0.2:4791".parse().unwrap(), Qpn::new(0x99))
    );
}

#[test]
fn cnp_requires_verified_source_port() {
    let mut nic = nic();
    let qp = connected(&mut nic);
    let qpn = nic.qp_num(qp).unwrap();
    let notify = |nic: &mut Nic, src: SocketAddr| {
        let cnp = Bth::cnp(Qpn::new(qpn), 0xffff);
        let bytes = sealed(nic, src, &cnp, &ExtHeaders::default(), &[]);
        receive(nic, src, &bytes);
        nic.device.rc_counters().rx_cnps
    };
    assert_eq!(notify(&mut nic, peer()), 0, "nothing has come from there");
    let first = write_only(&nic, qpn, 100);
    receive(&mut nic, peer(), &first);
    assert_eq!(notify(&mut nic, peer()), 1);
    let port = SocketAddr::new(peer().ip(), peer().port() + 1);
    assert_eq!(notify(&mut nic, port), 1);
    // Without a valid PSN, other packets have no effect.
    let stale = write_from(&nic, port, qpn, 90);
    receive(&mut nic, port, &stale);
    let early = write_from(&nic, port, qpn, 150);
    receive(&mut nic, port, &early);
    assert_eq!(notify(&mut nic, port), 1);
    let next = write_from(&nic, port, qpn, 101);
    receive(&mut nic, port, &next);
    assert_eq!(notify(&mut nic, port), 2, "the peer has moved");
    assert_eq!(notify(&mut nic, "10.0.0.3:49152".parse().unwrap()), 2);
    assert_eq!(nic.device.counters().rx_wrong_source, 4);
}

#[test]
fn marked_packet_triggers_cnp() {
    let mut nic = nic();
    let qp = connected(&mut nic);
    let qpn = nic.qp_num(qp).unwrap();
    let bth = Bth::new(Opcode::RcSendOnly, Qpn::new(qpn), Psn::new(100)).with_ack_request(true);
    let bytes = sealed(&nic, peer(), &bth, &ExtHeaders::default(), &[1; 4]);
    let now = nic.device.now();
    nic.handle_train(now, peer(), bytes.len(), &bytes, MARKED);
    let memory = Memory::new(4096).unwrap();
    let pd = nic.device.qps.get(qp).unwrap().pd;
    let mr = nic
        .reg_mr(pd, &memory.whole(), Access::LOCAL_WRITE)
        .unwrap();
    let sges = [Sge {
        addr: mr.addr,
        length: 1024,
        lkey: mr.lkey,
    }];
    let sends = [&sges[..], &[]].map(|sges| SendWr::new(1, SendOp::Send, sges));
    nic.post_send(qp, &sends).unwrap();
    let mut batch = TxBatch::new(64);
    nic.poll_transmit(now, &mut batch, usize::MAX);
    let opcodes = |g: &Group| batch.copy_packets(g).iter().map(|p| p[0]).collect();
    let sent: Vec<(Vec<u8>, bool)> = batch
        .groups()
        .iter()
        .map(|g| (opcodes(g), g.way.tos == 2))
        .collect();
    // A CNP, an RNR NAK because no receive is posted, and two SENDs, of which one has no data.
    let expected = [
        (vec![0x81, 0x11], false),
        (vec![0x04], true),
        (vec![0x04], false),
    ];
    assert_eq!(sent, expected);
    assert_eq!(nic.device.rc_counters().tx_cnps, 1);
}

/// Returns the opcodes of all packets sent by a device within a budget of bytes.
fn opcodes_sent(nic: &mut Nic, budget: usize) -> Vec<u8> {
    let (now, mut batch) = (nic.device.now(), TxBatch::new(64));
    nic.poll_transmit(now, &mut batch, budget);
    let packets = batch.groups().iter().map(|group| batch.copy_packets(group));
    packets.flatten().map(|packet| packet[0]).collect()
}

#[test]
fn budget_limit_does_not_delay_acks() {
    let (ack, read) = (0x11u8, 0x0cu8);
    let mut nic = nic();
    let qp = connected(&mut nic);
    let request = write_only(&nic, nic.qp_num(qp).unwrap(), 100);
    receive(&mut nic, peer(), &request);
    let rkey = RKey(0);
    let remote = RemoteAddr { addr: 0, rkey };
    let reads = [1, 2].map(|n| SendWr::new(n, SendOp::Read(remote), &[]));
    nic.post_send(qp, &reads).unwrap();
    assert_eq!(opcodes_sent(&mut nic, 1), [read, ack]);
    assert_eq!(opcodes_sent(&mut nic, 1), [read]);
}

#[test]
fn qp_failing_during_transmit_still_acknowledges() {
    let mut nic = nic();
    let mut init = init(&mut nic, QpType::Rc);
    // There is only room for one of the two completions.
    init.send_cq = nic.create_cq(1).unwrap();
    let qp = connected_as(&mut nic, &init, peer().ip());
    // The peer has not requested an acknowledgement yet.
    let qpn = Qpn::new(nic.qp_num(qp).unwrap());
    let bth = Bth::new(Opcode::RcWriteOnly, qpn, Psn::new(100));
    let ext = ExtHeaders {
        reth: Some(Reth::new(0, 0, 0)),
        ..ExtHeaders::default()
    };
    let write = sealed(&nic, peer(), &bth, &ext, &[]);
    receive(&mut nic, peer(), &write);
    assert!(opcodes_sent(&mut nic, 1 << 16).is_empty());
    let memory = Memory::new(4096).unwrap();
    let mr = nic.alloc_fast_mr(init.pd, 1).unwrap();
    nic.map_mr_sg(mr.id, &[memory.whole()]).unwrap();
    let reg = SendOp::RegMr {
        mr: mr.id,
        key: mr.rkey,
        access: Access::LOCAL_WRITE,
    };
    let sends = [reg, SendOp::LocalInv(mr.rkey)].map(|op| SendWr::new(1, op, &[]));
    nic.post_send(qp, &sends).unwrap();
    assert_eq!(opcodes_sent(&mut nic, 1 << 16), [0x11u8]);
    assert_eq!(nic.query_qp(qp).unwrap().state, Some(QpState::Error));
}

#[test]
fn congestion_mark_requires_verified_source_port() {
    let mut nic = nic();
    let qp = connected(&mut nic);
    let qpn = nic.qp_num(qp).unwrap();
    let mut take = |src: SocketAddr, opcode, psn| {
        let bth = Bth::new(opcode, Qpn::new(qpn), Psn::new(psn));
        let aeth = Aeth::new(AethSyndrome::Ack(Credit::UNLIMITED), Msn::default());
        let ext = ExtHeaders {
            aeth: (opcode == Opcode::RcReadResponseOnly).then_some(aeth),
            ..ExtHeaders::default()
        };
        let bytes = sealed(&nic, src, &bth, &ext, &[1; 4]);
        nic.handle_train(nic.device.now(), src, bytes.len(), &bytes, MARKED);
        nic.device.rc_counters().rx_marked
    };
    assert_eq!(take(peer(), Opcode::RcSendOnly, 100), 1);
    let port = SocketAddr::new(peer().ip(), peer().port() + 1);
    assert_eq!(take(port, Opcode::RcSendOnly, 150), 1);
    assert_eq!(take(port, Opcode::RcReadResponseOnly, 7), 1);
    assert_eq!(take(peer(), Opcode::RcSendOnly, 150), 2);
}

/// Returns the destination and source of all requests sent between `since` and `since + time`
/// without a response.
fn repeated(nic: &mut Nic, since: Instant, time: Duration) -> Vec<(bool, bool)> {
    let mut sent = Vec::new();
    for step in 0..time.as_millis() as u64 {
        let now = since + Duration::from_millis(step);
        nic.handle_timeouts(now);
        let mut batch = TxBatch::new(64);
        nic.poll_transmit(now, &mut batch, usize::MAX);
        for group in batch.groups() {
            let from = SocketAddr::new(nic.device.port.addr().ip(), 5555);
            let flow = IcrcFlow::new(from, group.way.dst).unwrap();
            let packets = batch.copy_packets(group);
            let is_sealed = flow.check_exact(&packets[0], 0).is_ok();
            sent.push((group.way.is_to_stranger, is_sealed));
        }
    }
    sent
}

#[test]
fn silent_peer_uses_separate_socket() {
    let mut nic = nic();
    nic.set_stranger_port(5555);
    let qp = connected(&mut nic);
    let qpn = nic.qp_num(qp).unwrap();
    let sends = [1, 2].map(|id| SendWr::new(id, SendOp::Send, &[]));
    nic.post_send(qp, &sends).unwrap();
    let start = nic.device.now();
    let second = Duration::from_secs(1);
    let first = repeated(&mut nic, start, second);
    assert!(first.iter().all(|&sent| sent == (false, false)));
    let start = start + second + second / 10;
    let later = repeated(&mut nic, start, second / 5);
    assert!(!later.is_empty() && later.iter().all(|&sent| sent == (true, true)));
    let bth = Bth::new(Opcode::RcAcknowledge, Qpn::new(qpn), Psn::new(200));
    let ext = ExtHeaders {
        aeth: Some(Aeth::new(
            AethSyndrome::Ack(Credit::UNLIMITED),
            Msn::default(),
        )),
        ..ExtHeaders::default()
    };
    let response = sealed(&nic, peer(), &bth, &ext, &[]);
    receive(&mut nic, peer(), &response);
    let start = nic.device.now();
    let last = repeated(&mut nic, start, second / 5);
    assert!(!last.is_empty() && last.iter().all(|&sent| sent == (false, false)));
}

#[test]
fn qp_in_error_drops_packets() {
    let mut nic = nic();
    let qp = connected(&mut nic);
    let qpn = nic.qp_num(qp).unwrap();
    nic.modify_qp(qp, &QpAttr::to(QpState::Error)).unwrap();
    let good = write_only(&nic, qpn, 100);
    receive(&mut nic, peer(), &good);
    let counters = nic.device.qp_counters(qp).unwrap().rc;
    assert_eq!((counters.rx_packets, counters.dropped), (0, 1));
}

#[test]
fn iteration_visits_each_qp_once() {
    let mut nic = Nic::new(
        NicConfig::new([10, 0, 0, 1].into(), [7; 32]),
        Instant::now(),
    );
    assert_eq!(nic.device.qps().next(), None);
    let (pd, cq) = (nic.alloc_pd().unwrap(), nic.create_cq(16).unwrap());
    let mut create = |qp_type| {
        let init = QpInitAttr::new(pd, cq, qp_type, QpCap::new(1, 1));
        nic.create_qp(&init).unwrap()
    };
    let [rc, uc, ud, gsi] = [QpType::Rc, QpType::Uc, QpType::Ud, QpType::Gsi].map(&mut create);
    let sorted = |nic: &Nic| {
        let mut all: Vec<_> = nic.device.qps().collect();
        all.sort();
        all
    };
    assert_eq!(sorted(&nic), [rc, uc, ud, gsi]);
    nic.destroy_qp(uc).unwrap();
    assert_eq!(sorted(&nic), [rc, ud, gsi]);
    // A failed queue pair exists until it is destroyed.
    nic.modify_qp(rc, &QpAttr::to(QpState::Error)).unwrap();
    assert_eq!(sorted(&nic), [rc, ud, gsi]);
    for qp in [rc, ud, gsi] {
        nic.destroy_qp(qp).unwrap();
    }
    assert_eq!(nic.device.qps().next(), None);
}

#[test]
fn cve_2026_45910_timer_of_destroyed_qp() {
    // CVE-2026-45910: there is only room for a single QP, so the next one will use the same slot.
    let mut config = NicConfig::new("10.0.0.1".parse().unwrap(), [7; 32]);
    config.limits.max_qp = 1;
    let mut nic = Nic::new(config, Instant::now());
    let qp = connected(&mut nic);
    let wr = SendWr::new(
        1,
        SendOp::Write(crate::verbs::RemoteAddr {
            addr: 0,
            rkey: crate::verbs::RKey(0),
        }),
        &[],
    );
    nic.post_send(qp, &[wr]).unwrap();
    let mut batch = TxBatch::new(1);
    let now = nic.device.now();
    nic.poll_transmit(now, &mut batch, 1 << 16);
    assert_eq!(batch.packets(), 1);
    let at = nic.timer_deadline().expect("a retransmission timer");
    nic.destroy_qp(qp).unwrap();
    let other = connected(&mut nic);
    assert_eq!(nic.handle_timeouts(at + Duration::from_secs(100)), 0);
    batch.clear();
    assert_eq!(nic.poll_transmit(at, &mut batch, 1 << 16), 0);
    assert_eq!(nic.device.qp_counters(other).unwrap().rc.timeouts, 0);
    assert_eq!(nic.timer_deadline(), None);
}

#[test]
fn gsi_qp_receives_other_classes() {
    let mut nic = nic();
    let mut attr = init(&mut nic, QpType::Gsi);
    let srq = nic
        .create_srq(
            attr.pd,
            SrqAttr {
                max_wr: 1,
                max_sge: 1,
                limit: 0,
            },
        )
        .unwrap();
    attr.srq = Some(srq);
    assert!(matches!(
        nic.create_qp(&attr),
        Err(VerbsError::WrongQpType(_))
    ));
    attr.srq = None;
    let qp = nic.create_qp(&attr).unwrap();
    assert_eq!(nic.qp_num(qp), Ok(1));
    assert!(matches!(
        nic.create_qp(&attr),
        Err(VerbsError::ResourceBusy(_))
    ));
    let steps = [
        QpAttr {
            pkey_index: Some(0),
            qkey: Some(QKey::GSI),
            ..QpAttr::to(QpState::Init)
        },
        QpAttr::to(QpState::Rtr),
        QpAttr {
            sq_psn: Some(0),
            ..QpAttr::to(QpState::Rts)
        },
    ];
    for step in steps {
        nic.modify_qp(qp, &step).unwrap();
    }
    let memory = Memory::new(4096).unwrap();
    let mr = nic
        .reg_mr(attr.pd, &memory.whole(), Access::LOCAL_WRITE)
        .unwrap();
    let sges = [crate::verbs::Sge {
        addr: mr.addr,
        length: 296,
        lkey: mr.lkey,
    }];
    nic.post_recv(
        qp,
        &[RecvWr {
            wr_id: WrId(3),
            sges: &sges,
        }],
    )
    .unwrap();
    let bth = Bth::new(crate::wire::Opcode::UdSendOnly, Qpn::GSI, Psn::new(0));
    let with_key = |key| ExtHeaders {
        deth: Some(Deth::new(key, Qpn::GSI)),
        ..ExtHeaders::default()
    };
    let mut mad = [0; 256];
    mad[..4].copy_from_slice(&[1, 6, 1, 1]);
    for (key, mad) in [(1, &mad[..]), (GSI_QKEY, &mad[..252])] {
        let bad = sealed(&nic, peer(), &bth, &with_key(key), mad);
        receive(&mut nic, peer(), &bad);
    }
    assert_eq!(nic.device.counters().rx_malformed, 2);
    let good = sealed(&nic, peer(), &bth, &with_key(GSI_QKEY), &mad);
    receive(&mut nic, peer(), &good);
    let mut out = Vec::new();
    assert_eq!(nic.poll_cq(attr.recv_cq, 9, &mut out), Ok(1));
    assert_eq!(
        (out[0].wr_id, out[0].byte_len, out[0].src_qp),
        (WrId(3), 296, 1)
    );
    // Communication management is always handled by the device.
    mad[1] = 7;
    let cm = sealed(&nic, peer(), &bth, &with_key(GSI_QKEY), &mad);
    receive(&mut nic, peer(), &cm);
    assert_eq!(nic.poll_cq(attr.recv_cq, 9, &mut out), Ok(0));
    nic.destroy_qp(qp).unwrap();
    receive(&mut nic, peer(), &good);
    assert_eq!(nic.device.counters().rx_dropped_mads, 1);
}

#[test]
fn drained_connection_can_change_peer() {
    let mut nic = nic();
    let qp = connected(&mut nic);
    nic.modify_qp(qp, &QpAttr::to(QpState::Sqd)).unwrap();
    let changed = QpAttr {
        timeout: Some(9),
        retry_cnt: Some(1),
        max_dest_rd_atomic: Some(2),
        ..QpAttr::default()
    };
    nic.modify_qp(qp, &changed).unwrap();
    let attr = nic.query_qp(qp).unwrap();
    assert_eq!((attr.timeout, attr.retry_cnt), (Some(9), Some(1)));
    assert_eq!(attr.sq_draining, Some(false));
    move_to(&mut nic, qp, [10, 0, 0, 9]);
    let qpn = nic.qp_num(qp).unwrap();
    let good = write_only(&nic, qpn, 100);
    receive(&mut nic, peer(), &good);
    assert_eq!(
        nic.device.counters().rx_wrong_source,
        1,
        "the peer has moved"
    );
}

#[test]
fn guid_depends_on_address() {
    let a = device_guid("10.0.0.1".parse().unwrap());
    assert_ne!(a, device_guid("10.0.0.2".parse().unwrap()));
    assert_eq!(a >> 56 & 3, 2, "locally administered, for one device");
}

/// Creates an XRC target in RTS with 100 as the next PSN, and a queue in the same domain.
fn xrc_target(nic: &mut Nic, own: &QpInitAttr) -> (QpId, SrqId) {
    let xrcd = nic.open_xrcd().unwrap();
    let attr = SrqAttr {
        max_wr: 8,
        max_sge: 2,
        limit: 0,
    };
    let srq = nic.create_xrc_srq(own.pd, xrcd, own.send_cq, attr).unwrap();
    let qp = nic.create_qp(&QpInitAttr::xrc_target(xrcd)).unwrap();
    let steps = [
        QpAttr {
            pkey_index: Some(0),
            port: Some(1),
            access: Some(Access::REMOTE),
            ..QpAttr::to(QpState::Init)
        },
        QpAttr {
            ah: Some(AhAttr::new(Gid::from(peer().ip()))),
            path_mtu: Some(Mtu::Mtu1024),
            dest_qp: Some(0x99),
            rq_psn: Some(100),
            max_dest_rd_atomic: Some(4),
            min_rnr_timer: Some(12),
            ..QpAttr::to(QpState::Rtr)
        },
        QpAttr {
            sq_psn: Some(200),
            timeout: Some(14),
            ..QpAttr::to(QpState::Rts)
        },
    ];
    for step in steps {
        nic.modify_qp(qp, &step).unwrap();
    }
    (qp, srq)
}

fn any_ext() -> impl Strategy<Value = ExtHeaders> {
    (any::<[u64; 4]>(), any::<[u32; 4]>(), any::<u8>()).prop_map(|(q, d, s)| ExtHeaders {
        deth: Some(Deth::new(
            if s & 1 == 0 { GSI_QKEY } else { d[0] },
            Qpn::new(d[1]),
        )),
        reth: Some(Reth::new(q[0], d[2], d[3])),
        atomic_eth: Some(AtomicEth::compare_swap(q[1], d[0], q[2], q[3])),
        aeth: Some(Aeth::new(AethSyndrome::from_wire(s), Msn::new(d[1]))),
        atomic_ack: Some(crate::wire::AtomicAckEth::new(q[3])),
        imm: Some(ImmDt::new(d[2])),
        ieth: Some(Ieth::new(d[3])),
        xrc: Some(crate::wire::XrcEth::new(d[0])),
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// Sends well-formed packets of any type with random contents, both close to and far from
    /// expected values. The device must not panic or send more than a few packets in response.
    #[test]
    fn nic_survives_hostile_packets(
        packets in proptest::collection::vec(
            (0usize..crate::wire::opcode::OPCODES.len(), 0u32..12, any_ext(), 0usize..1100, any::<[u8; 4]>()),
            1..60,
        ),
        gsi in any::<u64>(),
    ) {
        let mut nic = nic();
        let qp = connected(&mut nic);
        let listener = nic.create_id(PortSpace::Tcp).unwrap();
        nic.bind_addr(listener, "10.0.0.1:700".parse().unwrap()).unwrap();
        nic.listen(listener, 4).unwrap();
        let memory = Memory::new(8192).unwrap();
        let pd = nic.device.qps.get(qp).unwrap().pd;
        let access = Access::LOCAL_WRITE | Access::REMOTE;
        let mr = nic.reg_mr(pd, &memory.slice(0..4096).unwrap(), access).unwrap();
        let sge = |len| [crate::verbs::Sge { addr: mr.addr, length: len, lkey: mr.lkey }];
        let mut batch = TxBatch::new(64);
        for (n, (row, psn, mut ext, len, knobs)) in packets.into_iter().enumerate() {
            let op: &OpcodeInfo = &crate::wire::opcode::OPCODES[row];
            if knobs[0] & 1 == 0 {
                // Half of the packets use the correct key.
                let near = mr.addr + u64::from(knobs[1]);
                ext.reth = Some(Reth::new(near, mr.rkey.0, u32::from(knobs[2]) * 16));
                ext.atomic_eth = Some(AtomicEth::fetch_add(near & !7, mr.rkey.0, 1));
            }
            let dest = if gsi >> (n % 64) & 1 == 1 && op.service == crate::wire::Service::Ud {
                Qpn::GSI
            } else {
                Qpn::new(nic.qp_num(qp).unwrap())
            };
            let base = if op.is_response() { 198 } else { 98 };
            let bth = Bth::new(op.opcode, dest, Psn::new(base + psn)).with_ack_request(knobs[3] & 1 == 0);
            let len = match op.payload {
                PayloadRule::Empty => 0,
                _ if dest == Qpn::GSI => 256,
                PayloadRule::ExactlyMtu if knobs[3] & 2 == 0 => 1024,
                _ => len,
            };
            let mut payload = vec![knobs[1]; len];
            if dest == Qpn::GSI {
                payload[..4].copy_from_slice(&[1, 7, 2, 3]);
                payload[16..18].copy_from_slice(&[0, 0x10 + knobs[2] % 10]);
            }
            let bytes = sealed(&nic, peer(), &bth, &ext, &payload);
            let sges = sge(100);
            // This fails if the queue is full or in an error state, which is fine.
            let _ = nic.post_recv(qp, &[RecvWr { wr_id: WrId(0), sges: &sges }]);
            let _ = nic.post_send(qp, &[SendWr::new(0, SendOp::Send, &sges)]);
            receive(&mut nic, peer(), &bytes);
            let now = nic.device.now() + Duration::from_millis(u64::from(knobs[2]));
            nic.handle_timeouts(now);
            batch.clear();
            nic.poll_transmit(now, &mut batch, 1 << 20);
            prop_assert!(batch.packets() < 1000);
            let mut out = Vec::new();
            let cq = nic.device.qps.get(qp).unwrap().recv_cq;
            nic.poll_cq(cq, 64, &mut out).unwrap();
        }
        // Memory after the region must not be modified.
        prop_assert!(memory.slice(4096..8192).unwrap().to_vec().iter().all(|&b| b == 0));
    }

    /// Same as the previous test for an XRC target, with both valid and invalid queue numbers.
    #[test]
    fn xrc_target_survives_hostile_packets(
        packets in proptest::collection::vec(
            (0usize..crate::wire::opcode::OPCODES.len(), 0u32..6, any_ext(), 0usize..1100, any::<[u8; 4]>()),
            1..60,
        ),
    ) {
        let mut nic = nic();
        let own = init(&mut nic, QpType::Rc);
        let (qp, srq) = xrc_target(&mut nic, &own);
        let number = nic.srq_num(srq).unwrap();
        let memory = Memory::new(8192).unwrap();
        let access = Access::LOCAL_WRITE | Access::REMOTE;
        let mr = nic.reg_mr(own.pd, &memory.slice(0..4096).unwrap(), access).unwrap();
        let sges = [Sge { addr: mr.addr, length: 2000, lkey: mr.lkey }];
        let dest = Qpn::new(nic.qp_num(qp).unwrap());
        let mut batch = TxBatch::new(64);
        let mut out = Vec::new();
        let mut posted = 0;
        for (row, psn, mut ext, len, knobs) in packets {
            let op: &OpcodeInfo = &crate::wire::opcode::OPCODES[row];
            if knobs[0] & 7 > 0 {
                let near = mr.addr + u64::from(knobs[1]);
                ext.xrc = Some(crate::wire::XrcEth::new(number));
                ext.reth = Some(Reth::new(near, mr.rkey.0, u32::from(knobs[2]) * 16));
                ext.atomic_eth = Some(AtomicEth::fetch_add(near & !7, mr.rkey.0, 1));
            }
            let len = match op.payload {
                PayloadRule::Empty => 0,
                PayloadRule::ExactlyMtu if knobs[3] & 6 > 0 => 1024,
                _ => len,
            };
            posted += u64::from(nic.post_srq_recv(srq, &[RecvWr { wr_id: WrId(0), sges: &sges }]).is_ok());
            let bth = Bth::new(op.opcode, dest, Psn::new(98 + psn)).with_ack_request(knobs[3] & 1 == 0);
            let bytes = sealed(&nic, peer(), &bth, &ext, &vec![knobs[1]; len]);
            receive(&mut nic, peer(), &bytes);
            batch.clear();
            let now = nic.device.now();
            nic.poll_transmit(now, &mut batch, 1 << 20);
            prop_assert!(batch.packets() < 1000);
            nic.poll_cq(own.send_cq, 64, &mut out).unwrap();
        }
        prop_assert!(out.len() as u64 <= posted);
        prop_assert!(out.iter().all(|c| c.qp == qp));
        prop_assert!(memory.slice(4096..8192).unwrap().to_vec().iter().all(|&b| b == 0));
        nic.destroy_srq(srq).unwrap();
        nic.destroy_qp(qp).unwrap();
        nic.destroy_cq(own.send_cq).unwrap();
    }

    #[test]
    fn arbitrary_bytes_change_nothing(bytes in proptest::collection::vec(any::<u8>(), 0..300), segment in 0usize..400) {
        let mut nic = nic();
        let qp = connected(&mut nic);
        let now = nic.device.now();
        nic.handle_datagram(now, peer(), segment, &bytes);
        prop_assert_eq!(nic.device.qp_counters(qp).unwrap().rc.rx_packets, 0);
        prop_assert_eq!(nic.query_qp(qp).unwrap().state, Some(QpState::Rts));
    }
}

/// Returns a REQ for port 4000 sent by the peer, with `data` at the start of the private data.
fn req_mad(data: [u8; 92]) -> [u8; 256] {
    use crate::cm::{Cm, CmConfig, ReqParams};
    use crate::wire::cm_msg::{Bits, CaGuid, CmPath, CmTimeout, PrivateData, ServiceId};
    let own = IpAddr::from([10, 0, 0, 1]);
    let mut cm = Cm::new(CmConfig::new(CaGuid(9)), 0, 0, [3; 32]);
    let params = ReqParams {
        service_id: ServiceId(0x0106_0000 | 4000),
        qp_type: QpType::Rc,
        local_qpn: Qpn::new(0x99),
        ece: crate::verbs::Ece::default(),
        starting_psn: Psn::new(300),
        primary: CmPath::roce(Gid::from(peer().ip()), Gid::from(own), CmTimeout::new(16)),
        alternate: CmPath::default(),
        path_mtu: Mtu::Mtu1024,
        pkey: crate::verbs::PKey::DEFAULT,
        responder_resources: 1,
        initiator_depth: 1,
        flow_control: true,
        srq: false,
        retry_count: Bits::truncate(7),
        rnr_retry_count: Bits::truncate(7),
        remote_cm_timeout: CmTimeout::new(31),
        local_cm_timeout: CmTimeout::new(17),
        max_cm_retries: Bits::truncate(15),
        private_data: PrivateData(data),
    };
    cm.send_req(Instant::now(), own, &params).unwrap();
    cm.poll_transmit().unwrap().1
}

fn gsi(nic: &Nic, mad: &[u8]) -> Vec<u8> {
    let bth = Bth::new(crate::wire::Opcode::UdSendOnly, Qpn::GSI, Psn::new(0));
    let ext = ExtHeaders {
        deth: Some(Deth::new(GSI_QKEY, Qpn::GSI)),
        ..ExtHeaders::default()
    };
    sealed(nic, peer(), &bth, &ext, mad)
}

/// Creates a device listening on port 4000.
fn listening() -> Nic {
    let mut nic = nic();
    let id = nic.create_id(PortSpace::Tcp).unwrap();
    nic.bind_addr(id, "10.0.0.1:4000".parse().unwrap()).unwrap();
    nic.listen(id, 256).unwrap();
    nic
}

/// Returns private data starting with an IPv4 address header.
fn with_addresses() -> [u8; 92] {
    let mut data = [0; 92];
    data[1] = 0x40;
    data
}

#[test]
fn first_packet_replaces_lost_rtu() {
    let mut nic = listening();
    let req = gsi(&nic, &req_mad(with_addresses()));
    receive(&mut nic, peer(), &req);
    let request = nic.poll_cm_event().expect("a request");
    let attr = init(&mut nic, QpType::Rc);
    let qp = nic.create_cm_qp(request.id, &attr).unwrap();
    nic.accept(request.id, &crate::verbs::ConnParam::default())
        .unwrap();
    let rq_psn = nic.query_qp(qp).unwrap().rq_psn.unwrap();
    let qpn = nic.qp_num(qp).unwrap();
    // A packet that does not start the negotiated sequence could be spoofed.
    let stray = write_only(&nic, qpn, rq_psn.wrapping_add(5) & 0x00ff_ffff);
    receive(&mut nic, peer(), &stray);
    assert_eq!(nic.poll_cm_event(), None);
    let write = write_only(&nic, qpn, rq_psn);
    receive(&mut nic, peer(), &write);
    let event = nic.poll_cm_event().map(|event| event.kind);
    assert!(
        matches!(event, Some(crate::verbs::CmEventKind::Established { .. })),
        "{event:?}"
    );
    assert_eq!(nic.poll_async_event(), None);
}

/// Returns datagrams containing different requests.
fn requests() -> impl FnMut(&Nic) -> Vec<u8> {
    let template = req_mad(with_addresses());
    let mut number = 0u32;
    move |nic| {
        number += 1;
        let mut mad = template;
        mad[8..16].copy_from_slice(&u64::from(number).to_be_bytes());
        mad[24..28].copy_from_slice(&(0x1000_0000 + number).to_be_bytes());
        mad[56..59].copy_from_slice(&(0x10_0000 + number).to_be_bytes()[1..]);
        gsi(nic, &mad)
    }
}

#[test]
fn messages_of_strangers_do_not_delay_data() {
    let mut nic = listening();
    let mut request = requests();
    let first = request(&nic);
    receive(&mut nic, peer(), &first);
    let id = nic.poll_cm_event().expect("a request").id;
    for _ in 0..1000 {
        let bytes = request(&nic);
        receive(&mut nic, peer(), &bytes);
    }
    assert_eq!(nic.cm_counters().received, 16);
    assert_eq!(nic.device.counters().rx_dropped_mads, 1001 - 16 - 512);
    // The remaining requests are handled in the next rounds.
    for round in 1..=3 {
        assert_eq!(nic.deadline(), Some(nic.device.now()));
        assert_eq!(nic.timer_deadline(), Some(nic.device.now()));
        nic.handle_timeouts(nic.device.now());
        assert_eq!(nic.cm_counters().received, 16 * (1 + round));
    }
    // Messages for a known connection don't need to wait.
    let attr = init(&mut nic, QpType::Rc);
    nic.create_cm_qp(id, &attr).unwrap();
    nic.accept(id, &crate::verbs::ConnParam::default()).unwrap();
    let mut batch = TxBatch::new(1);
    let now = nic.device.now();
    nic.poll_transmit(now, &mut batch, 1 << 20);
    let groups = batch.groups().iter();
    let sent: Vec<_> = groups.flat_map(|g| batch.copy_packets(g)).collect();
    let rep = sent.iter().find(|p| p[37] == 0x13).expect("a REP");
    let mut rtu = [0; 256];
    rtu[..4].copy_from_slice(&[1, 7, 2, 3]);
    rtu[17] = 0x14;
    rtu[24..28].copy_from_slice(&rep[48..52]);
    rtu[28..32].copy_from_slice(&rep[44..48]);
    let bytes = gsi(&nic, &rtu);
    receive(&mut nic, peer(), &bytes);
    let is_up = std::iter::from_fn(|| nic.poll_cm_event())
        .any(|e| matches!(e.kind, crate::verbs::CmEventKind::Established { .. }));
    assert!(is_up);
}

/// Simulates a host where handling a request takes a long time. It cannot keep up with the flood,
/// so requests fill up the socket that is also used for data.
#[test]
fn data_is_not_delayed_by_request_flood() {
    const ROUND: usize = 32;
    let (packet_cost, request_cost) = (Duration::from_micros(20), Duration::from_millis(2));
    let mut nic = listening();
    let qp = connected(&mut nic);
    let qpn = nic.qp_num(qp).unwrap();
    let mut request = requests();
    let mut socket = VecDeque::new();
    let (start, mut now) = (nic.device.now(), nic.device.now());
    let (mut next_request, mut next_write, mut writes) = (start, start, 0);
    let (mut longest, mut handled) = (Duration::ZERO, 0);
    while now < start + Duration::from_secs(2) {
        while next_request.min(next_write) <= now {
            if next_request < next_write {
                socket.push_back((next_request, false, request(&nic)));
                next_request += Duration::from_micros(125);
            } else {
                let write = write_only(&nic, qpn, 100 + writes);
                socket.push_back((next_write, true, write));
                next_write += Duration::from_millis(10);
                writes += 1;
            }
        }
        let taken = socket.len().min(ROUND);
        for (arrived, is_write, bytes) in socket.drain(..taken) {
            nic.handle_datagram(now, peer(), bytes.len(), &bytes);
            if is_write {
                longest = longest.max(now - arrived);
            }
        }
        nic.cm.set_behind(taken == ROUND);
        nic.handle_timeouts(now);
        while nic.poll_cm_event().is_some() {}
        let mut batch = TxBatch::new(1);
        nic.poll_transmit(now, &mut batch, 1 << 20);
        let requests = nic.cm_counters().received - handled;
        handled += requests;
        now += packet_cost * (1 + taken as u32) + request_cost * requests as u32;
    }
    // Data must only wait for the requests of one or two rounds, and requests must not wait any
    // longer for data.
    assert!(longest < Duration::from_millis(150), "{longest:?}");
    assert!(handled > 300, "{handled} requests in two seconds");
}

/// Data alone can prevent the socket from ever being empty, but hosts must still be able to log in.
#[test]
fn requests_are_handled_under_data_load() {
    let mut nic = listening();
    let mut request = requests();
    for _ in 0..32 {
        let bytes = request(&nic);
        receive(&mut nic, peer(), &bytes);
    }
    let before = nic.cm_counters().received;
    nic.cm.set_behind(true);
    for _ in 0..64 {
        nic.handle_timeouts(nic.device.now());
    }
    assert_eq!(nic.cm_counters().received, before + 8);
    nic.cm.set_behind(false);
    nic.handle_timeouts(nic.device.now());
    assert_eq!(nic.cm_counters().received, 32);
}

/// Simulates a full socket.
fn block(nic: &Nic, batch: &mut TxBatch) {
    let outcome = batch.drain(nic.device.now(), |_, _| Offered::Full);
    assert_eq!(outcome, SendOutcome::Blocked);
}

/// Returns the packets of `batch` when the socket finally accepts them.
fn sent_late(nic: &Nic, batch: &mut TxBatch) -> Vec<Vec<u8>> {
    let mut packets = Vec::new();
    batch.drain(nic.device.now(), |batch, groups| {
        packets.extend(batch.copy_packets(&groups[0]));
        Offered::Taken(1)
    });
    packets
}

fn holds(packet: &[u8], byte: u8) -> bool {
    packet.windows(16).any(|w| w == [byte; 16])
}

/// A peer can acknowledge a packet which the socket hasn't accepted yet. The request then completes
/// and the buffer is reused for a different session.
#[test]
fn completed_request_does_not_change_in_batch() {
    let mut nic = nic();
    let qp = connected(&mut nic);
    let attr = nic.device.qps.get(qp).unwrap();
    let (pd, cq) = (attr.pd, attr.send_cq);
    let qpn = nic.qp_num(qp).unwrap();
    let memory = Memory::new(4096).unwrap();
    memory.fill(0, 1024, b'A');
    let mr = nic
        .reg_mr(pd, &memory.whole(), Access::LOCAL_WRITE)
        .unwrap();
    let sges = [Sge {
        addr: mr.addr,
        length: 1024,
        lkey: mr.lkey,
    }];
    let to = RemoteAddr {
        addr: 0,
        rkey: RKey(1),
    };
    nic.post_send(qp, &[SendWr::new(1, SendOp::Write(to), &sges)])
        .unwrap();
    let mut batch = TxBatch::new(64);
    let now = nic.device.now();
    assert_eq!(nic.poll_transmit(now, &mut batch, 1 << 18), 1);
    let bth = Bth::new(
        crate::wire::Opcode::RcAcknowledge,
        Qpn::new(qpn),
        Psn::new(200),
    );
    let ext = ExtHeaders {
        aeth: Some(Aeth::new(AethSyndrome::from_wire(0x1f), Msn::new(1))),
        ..ExtHeaders::default()
    };
    let ack = sealed(&nic, peer(), &bth, &ext, &[]);
    block(&nic, &mut batch);
    receive(&mut nic, peer(), &ack);
    let mut out = Vec::new();
    nic.poll_cq(cq, 9, &mut out).unwrap();
    assert!(matches!(&out[..], [c] if c.status.is_ok()));
    memory.fill(0, 1024, b'S');
    let packets = sent_late(&nic, &mut batch);
    assert!(holds(&packets[0], b'A') && !holds(&packets[0], b'S'));
}

/// Buffers can be reused if a QP is destroyed, or a region is deregistered.
#[test]
fn read_response_does_not_change_in_batch() {
    let mut nic = nic();
    let qp = connected(&mut nic);
    let pd = nic.device.qps.get(qp).unwrap().pd;
    let qpn = nic.qp_num(qp).unwrap();
    let memory = Memory::new(4096).unwrap();
    memory.fill(0, 1024, b'A');
    let mr = nic
        .reg_mr(pd, &memory.whole(), Access::REMOTE_READ)
        .unwrap();
    let bth = Bth::new(
        crate::wire::Opcode::RcReadRequest,
        Qpn::new(qpn),
        Psn::new(100),
    );
    let ext = ExtHeaders {
        reth: Some(Reth::new(mr.addr, mr.rkey.0, 1024)),
        ..ExtHeaders::default()
    };
    let read = sealed(&nic, peer(), &bth, &ext, &[]);
    receive(&mut nic, peer(), &read);
    let mut batch = TxBatch::new(64);
    let now = nic.device.now();
    assert_eq!(nic.poll_transmit(now, &mut batch, 1 << 18), 1);
    block(&nic, &mut batch);
    nic.destroy_qp(qp).unwrap();
    nic.dereg_mr(mr.id).unwrap();
    memory.fill(0, 1024, b'S');
    let packets = sent_late(&nic, &mut batch);
    assert!(holds(&packets[0], b'A') && !holds(&packets[0], b'S'));
}

/// A datagram completes before it has been sent.
#[test]
fn completed_datagram_does_not_change_in_batch() {
    let mut nic = nic();
    let attr = init(&mut nic, QpType::Ud);
    let qp = nic.create_qp(&attr).unwrap();
    let steps = [
        QpAttr {
            pkey_index: Some(0),
            port: Some(1),
            qkey: Some(QKey(0x11)),
            ..QpAttr::to(QpState::Init)
        },
        QpAttr::to(QpState::Rtr),
        QpAttr {
            sq_psn: Some(0),
            ..QpAttr::to(QpState::Rts)
        },
    ];
    for step in steps {
        nic.modify_qp(qp, &step).unwrap();
    }
    let memory = Memory::new(4096).unwrap();
    memory.fill(0, 64, b'A');
    let mr = nic
        .reg_mr(attr.pd, &memory.whole(), Access::LOCAL_WRITE)
        .unwrap();
    let ah = AhAttr::new(Gid::from(peer().ip()));
    let ah = nic.create_ah(attr.pd, ah).unwrap();
    let sges = [Sge {
        addr: mr.addr,
        length: 64,
        lkey: mr.lkey,
    }];
    let wr = SendWr {
        ud: Some(UdDest {
            ah,
            qpn: 9,
            qkey: QKey(0x11),
        }),
        ..SendWr::new(1, SendOp::Send, &sges)
    };
    nic.post_send(qp, &[wr]).unwrap();
    let mut batch = TxBatch::new(64);
    let now = nic.device.now();
    nic.poll_transmit(now, &mut batch, 1 << 18);
    assert_eq!(nic.peek_cq(attr.send_cq, 9).unwrap(), 1);
    block(&nic, &mut batch);
    memory.fill(0, 64, b'S');
    let packets = sent_late(&nic, &mut batch);
    assert!(holds(&packets[0], b'A') && !holds(&packets[0], b'S'));
}

#[test]
fn ports_of_host_do_not_evict_peers() {
    let mut nic = nic();
    let qp = connected(&mut nic);
    let qpn = nic.qp_num(qp).unwrap();
    for psn in 100..164 {
        let write = write_only(&nic, qpn, psn);
        receive(&mut nic, peer(), &write);
    }
    let key = (peer().ip(), peer().port().into());
    let learned = nic.device.peers.verifier(key).unwrap().pattern();
    assert_eq!(learned, crate::wire::IdPattern::Segments);
    // A stranger sending valid messages, and a peer with an established connection.
    let hostile: IpAddr = [10, 0, 0, 3].into();
    let own = connected_to(&mut nic, hostile);
    let own_qpn = nic.qp_num(own).unwrap();
    for port in 1000..6000 {
        let mad = [0; 256];
        let bth = Bth::new(crate::wire::Opcode::UdSendOnly, Qpn::GSI, Psn::new(0));
        let ext = ExtHeaders {
            deth: Some(Deth::new(GSI_QKEY, Qpn::GSI)),
            ..ExtHeaders::default()
        };
        let stranger = SocketAddr::new([10, 0, 0, 4].into(), port);
        let bytes = sealed(&nic, stranger, &bth, &ext, &mad);
        receive(&mut nic, stranger, &bytes);
        let src = SocketAddr::new(hostile, port);
        let bytes = write_from(&nic, src, own_qpn, 100);
        receive(&mut nic, src, &bytes);
    }
    assert_eq!(nic.device.peers.verifier(key).unwrap().pattern(), learned);
    assert_eq!(nic.device.peers.verifier_count().0, 1 + PORTS_PER_QP);
    nic.destroy_qp(own).unwrap();
    assert_eq!(nic.device.peers.verifier_count(), (1, 1));
}

/// Single packets always use number 0, while segments are numbered starting from 0.
#[test]
fn segments_are_accepted_after_single_packets() {
    let mut nic = nic();
    let qp = connected(&mut nic);
    let qpn = nic.qp_num(qp).unwrap();
    let flow = IcrcFlow::new(peer(), nic.device.port.addr()).unwrap();
    let singles = std::iter::repeat_n(0, 64);
    for (psn, id) in (100..).zip(singles.chain(0..=128)) {
        let mut bytes = write_only(&nic, qpn, psn);
        bytes.truncate(bytes.len() - 4);
        let icrc = flow.compute(&bytes, id);
        bytes.extend_from_slice(&icrc.to_le_bytes());
        receive(&mut nic, peer(), &bytes);
    }
    // A send has up to 128 segments, so the last number is not valid.
    assert_eq!(nic.device.qp_counters(qp).unwrap().rc.rx_packets, 64 + 128);
    assert_eq!(nic.device.counters().rx_icrc_errors, 1);
}

#[test]
fn link_local_addresses_are_rejected() {
    let own: IpAddr = "fd00::1".parse().unwrap();
    let mut nic = Nic::new(NicConfig::new(own, [7; 32]), Instant::now());
    let id = nic.create_id(PortSpace::Tcp).unwrap();
    let peer: SocketAddr = "[fe80::2]:4791".parse().unwrap();
    nic.resolve_addr(id, None, peer, Duration::ZERO).unwrap();
    let event = nic.poll_cm_event().unwrap().kind;
    let refused = crate::verbs::CmError::LinkLocal;
    assert_eq!(event, crate::verbs::CmEventKind::AddrError(refused));
    let bth = Bth::new(crate::wire::Opcode::UdSendOnly, Qpn::GSI, Psn::new(0));
    let ext = ExtHeaders {
        deth: Some(Deth::new(GSI_QKEY, Qpn::GSI)),
        ..ExtHeaders::default()
    };
    let bytes = sealed(&nic, peer, &bth, &ext, &[0; 256]);
    receive(&mut nic, peer, &bytes);
    assert_eq!(nic.device.counters().rx_wrong_source, 1);
}

/// Returns a MAD with a 24-byte header based on the class, and an attribute at byte 64.
fn mad_of(class: u8, method: u8, attribute: u16, modifier: u32, data: &[u8]) -> [u8; 256] {
    let mut mad = [0; 256];
    mad[..4].copy_from_slice(&[1, class, 1, method]);
    mad[8..16].copy_from_slice(&[9, 8, 7, 6, 5, 4, 3, 2]);
    mad[16..18].copy_from_slice(&attribute.to_be_bytes());
    mad[20..24].copy_from_slice(&modifier.to_be_bytes());
    mad[64..64 + data.len()].copy_from_slice(data);
    mad
}

/// Returns the status and attribute of the NIC's response.
fn query_local(nic: &mut Nic, mad: &[u8; 256]) -> Option<(u16, Vec<u8>)> {
    let response = nic.local_mad(1, mad).unwrap()?;
    assert_eq!(response[..3], mad[..3]);
    // The response to both Set() and Get() is GetResp().
    let expected = if mad[3] == 0x02 { 0x81 } else { mad[3] | 0x80 };
    assert_eq!(response[3], expected, "a response");
    assert_eq!(response[8..24], mad[8..24]);
    let status = u16::from_be_bytes([response[4], response[5]]);
    Some((status, response[64..].to_vec()))
}

#[test]
fn local_mad_returns_node_and_port_info() {
    let mut nic = nic();
    let get = |attribute, modifier| mad_of(0x01, 0x01, attribute, modifier, &[]);
    let (status, name) = query_local(&mut nic, &get(0x10, 0)).unwrap();
    assert_eq!((status, &name[..14]), (0, &b"roce-10.0.0.1\0"[..]));
    // A channel adapter with a single port. The GUID is the low half of ::ffff:10.0.0.1.
    let (status, node) = query_local(&mut nic, &get(0x11, 0)).unwrap();
    let guid = nic.device_attr().node_guid.to_be_bytes();
    assert_eq!((status, &node[..4]), (0, &[1, 1, 1, 1][..]));
    assert_eq!((&node[4..12], &node[12..20]), (&guid[..], &guid[..]));
    let port_guid = [0, 0, 0xff, 0xff, 10, 0, 0, 1];
    assert_eq!(node[20..28], port_guid);
    assert_eq!(node[28..40], [0, 1, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0]);
    let (status, guids) = query_local(&mut nic, &get(0x14, 0)).unwrap();
    assert_eq!(
        (status, &guids[..8], &guids[8..64]),
        (0, &port_guid[..], &[0; 56][..])
    );
    // Active and link up, 4096 bytes, single lane, 2.5 Gbit/s, single virtual lane, single GUID.
    let (status, port) = query_local(&mut nic, &get(0x15, 1)).unwrap();
    assert_eq!(
        (status, &port[8..16], &port[20..24]),
        (0, &[0; 8][..], &[0, 1, 0, 0][..])
    );
    assert_eq!(port[28..38], [1, 1, 1, 1, 0x14, 0x52, 0, 0x11, 0x50, 0x10]);
    assert_eq!((port[41], port[43], port[50], port[52]), (5, 0x10, 1, 18));
    // A program registers an agent for device management.
    nic.modify_port(
        1,
        PortCapabilities::DEVICE_MANAGEMENT,
        PortCapabilities::empty(),
    )
    .unwrap();
    let (_, port) = query_local(&mut nic, &get(0x15, 0)).unwrap();
    assert_eq!(port[20..24], [0, 9, 0, 0]);
    let (status, keys) = query_local(&mut nic, &get(0x16, 0)).unwrap();
    assert_eq!((status, &keys[..4]), (0, &[0xff, 0xff, 0, 0][..]));
    // Directed route with zero hops, so the response is already on its way back.
    let directed = mad_of(0x81, 0x01, 0x11, 0, &[]);
    assert_eq!(query_local(&mut nic, &directed).unwrap().0, 0x8000);
}

#[test]
fn modified_node_description_is_returned() {
    let mut nic = nic();
    let get = mad_of(0x01, 0x01, 0x10, 0, &[]);
    let text = "storage-1 riser0 ".repeat(3) + "0123456789abc";
    assert_eq!(text.len(), 64);
    nic.modify_device(&text).unwrap();
    let (status, name) = query_local(&mut nic, &get).unwrap();
    assert_eq!((status, &name[..64]), (0, text.as_bytes()));
    let refused = nic.modify_device(&format!("{text}-"));
    assert_eq!(
        refused,
        Err(VerbsError::InvalidParameter("node description"))
    );
    nic.modify_device("short").unwrap();
    let (_, name) = query_local(&mut nic, &get).unwrap();
    assert_eq!(name[..6], *b"short\0");
}

#[test]
fn unsupported_mads_return_error_status() {
    let mut nic = nic();
    let cases: [(u8, u8, u16, u32, u16); 15] = [
        // Unknown class, both for the local program and on this port.
        (0x03, 0x01, 0x0011, 0, 0x0004),
        (0x07, 0x01, 0x0001, 0, 0x0004),
        // Unknown method: Report() for both classes.
        (0x01, 0x06, 0x0011, 0, 0x0008),
        (0x04, 0x06, 0x0012, 0, 0x0008),
        // SwitchInfo and SMInfo are not supported, and attributes can't be set.
        (0x01, 0x01, 0x0012, 0, 0x000c),
        (0x01, 0x01, 0x0020, 0, 0x000c),
        (0x01, 0x02, 0x0015, 0, 0x000c),
        // State of a different port, and additional blocks.
        (0x01, 0x01, 0x0015, 2, 0x001c),
        (0x01, 0x01, 0x0014, 1, 0x001c),
        (0x01, 0x01, 0x0016, 1, 0x001c),
        // PortSamplesControl and PortSamplesResult are not supported, and ClassPortInfo can't be
        // set.
        (0x04, 0x01, 0x0010, 0, 0x000c),
        (0x04, 0x01, 0x0011, 0, 0x000c),
        (0x04, 0x02, 0x0001, 0, 0x000c),
        // There are no counters for port 0.
        (0x04, 0x01, 0x0012, 0, 0x001c),
        (0x04, 0x01, 0x001d, 0, 0x001c),
    ];
    for (class, method, attribute, modifier, status) in cases {
        let mad = mad_of(class, method, attribute, modifier, &[]);
        let response = query_local(&mut nic, &mad).unwrap();
        assert_eq!(response.0, status, "{class:#x} {method:#x} {attribute:#x}");
    }
    // Unsupported versions.
    for at in [0, 2] {
        let mut mad = mad_of(0x01, 0x01, 0x0011, 0, &[]);
        mad[at] = 2;
        assert_eq!(query_local(&mut nic, &mad).unwrap().0, 0x0004);
    }
    // There is no response to responses and traps, or if there are more hops on a directed route.
    for method in [0x81, 0x03, 0x05, 0x07] {
        assert_eq!(
            query_local(&mut nic, &mad_of(0x04, method, 0x0012, 0, &[])),
            None
        );
    }
    let mut hops = mad_of(0x81, 0x01, 0x11, 0, &[]);
    hops[7] = 1;
    assert_eq!(query_local(&mut nic, &hops), None);
    let mad = mad_of(0x04, 0x01, 0x0001, 0, &[]);
    assert_eq!(nic.local_mad(2, &mad), Err(VerbsError::InvalidPort(2)));
}

/// Parses a 4-byte or 8-byte number.
fn number(data: &[u8], at: usize, len: usize) -> u64 {
    let bytes = data[at..at + len].iter();
    bytes.fold(0, |n, byte| n << 8 | u64::from(*byte))
}

#[test]
fn selected_port_counters_are_reset() {
    let mut nic = nic();
    // Two packets of 16 bytes for an unknown QP, and a datagram of two bytes, which is too short to
    // be a packet.
    for _ in 0..2 {
        let stray = write_only(&nic, 0x00ab_cdef, 0);
        receive(&mut nic, peer(), &stray);
    }
    receive(&mut nic, peer(), &[1, 2]);
    let counters = *nic.device.counters();
    assert_eq!((counters.rx_packets, counters.rx_malformed), (3, 1));
    let words = counters.rx_bytes / 4;
    let basic = |method, select: u16, select2| {
        let [high, low] = select.to_be_bytes();
        let mut data = [0; 20];
        data[1..4].copy_from_slice(&[1, high, low]);
        data[18] = select2;
        mad_of(0x04, method, 0x0012, 0, &data)
    };
    let (status, data) = query_local(&mut nic, &basic(0x01, 0, 0)).unwrap();
    assert_eq!((status, data[1], number(&data, 8, 2)), (0, 1, 1));
    assert_eq!((number(&data, 28, 4), number(&data, 36, 4)), (words, 3));
    let mut extended = [0; 8];
    extended[..4].copy_from_slice(&[0, 0xff, 0, 0]);
    let extended = mad_of(0x04, 0x01, 0x001d, 0, &extended);
    let (status, data) = query_local(&mut nic, &extended).unwrap();
    assert_eq!((status, data[1], number(&data, 16, 8)), (0, 0xff, words));
    assert_eq!(
        (
            number(&data, 32, 8),
            number(&data, 48, 8),
            number(&data, 64, 8)
        ),
        (3, 3, 0)
    );
    // Only PortRcvPkts is reset, and the response already contains the new value.
    let (status, data) = query_local(&mut nic, &basic(0x02, 1 << 15, 0)).unwrap();
    assert_eq!(
        (status, number(&data, 28, 4), number(&data, 36, 4)),
        (0, words, 0)
    );
    assert_eq!(number(&data, 8, 2), 1);
    receive(&mut nic, peer(), &[1, 2]);
    let (_, data) = query_local(&mut nic, &basic(0x02, 1 << 3, 0)).unwrap();
    assert_eq!((number(&data, 8, 2), number(&data, 36, 4)), (0, 1));
    // The counters returned to the device owner are not reset.
    assert_eq!(
        (
            nic.device.counters().rx_packets,
            nic.device.counters().rx_malformed
        ),
        (4, 2)
    );
}

#[test]
fn remote_hosts_can_only_query_counters() {
    let mut nic = nic();
    let bth = Bth::new(crate::wire::Opcode::UdSendOnly, Qpn::GSI, Psn::new(0));
    let ext = ExtHeaders {
        deth: Some(Deth::new(GSI_QKEY, Qpn::GSI)),
        ..ExtHeaders::default()
    };
    let question = mad_of(0x04, 0x01, 0x0012, 0, &[0, 1]);
    let packet = sealed(&nic, peer(), &bth, &ext, &question);
    receive(&mut nic, peer(), &packet);
    let mut batch = TxBatch::new(1);
    let now = nic.device.now();
    assert_eq!(nic.poll_transmit(now, &mut batch, 1 << 16), 1);
    let sent = batch.copy_packets(&batch.groups()[0]);
    batch.clear();
    // The packet uses QP1 as both source and destination.
    assert_eq!(sent[0][..8], [0x64, 0x40, 0xff, 0xff, 0, 0, 0, 1]);
    assert_eq!(sent[0][12..20], [0x80, 1, 0, 0, 0, 0, 0, 1]);
    let response = &sent[0][20..276];
    assert_eq!(response[..8], [1, 4, 1, 0x81, 0, 0, 0, 0]);
    assert_eq!(number(response, 64 + 36, 4), 1, "the question itself");
    assert_eq!(number(response, 64 + 28, 4), packet.len() as u64 / 4);
    // Subnet management is only available to the local program, and a response must have been
    // requested.
    for (class, method) in [(0x01, 0x01), (0x81, 0x01), (0x04, 0x81)] {
        let mad = mad_of(class, method, 0x0011, 0, &[]);
        let packet = sealed(&nic, peer(), &bth, &ext, &mad);
        receive(&mut nic, peer(), &packet);
    }
    assert_eq!(nic.poll_transmit(now, &mut batch, 1 << 16), 0);
    assert_eq!(nic.device.counters().rx_dropped_mads, 3);
    // This uses a different source QP, so it isn't a request from a management program.
    let other = ExtHeaders {
        deth: Some(Deth::new(GSI_QKEY, Qpn::new(0x1234))),
        ..ExtHeaders::default()
    };
    let other = sealed(&nic, peer(), &bth, &other, &question);
    receive(&mut nic, peer(), &other);
    assert_eq!(nic.poll_transmit(now, &mut batch, 1 << 16), 0);
    assert_eq!(nic.device.counters().rx_dropped_mads, 4);
    // Send many requests before sending any responses.
    for _ in 0..100 {
        receive(&mut nic, peer(), &packet);
    }
    assert_eq!(nic.poll_transmit(now, &mut batch, 1 << 16), 16);
    assert_eq!(nic.device.counters().rx_dropped_mads, 4 + 84);
}

#[test]
fn performance_responses_go_to_program() {
    let mut nic = nic();
    let bth = Bth::new(crate::wire::Opcode::UdSendOnly, Qpn::GSI, Psn::new(0));
    let ext = ExtHeaders {
        deth: Some(Deth::new(GSI_QKEY, Qpn::GSI)),
        ..ExtHeaders::default()
    };
    let question = mad_of(0x04, 0x01, 0x0001, 0, &[]);
    let response = mad_of(0x04, 0x81, 0x0001, 0, &[]);
    let [request_packet, response_packet] =
        [question, response].map(|mad| sealed(&nic, peer(), &bth, &ext, &mad));
    receive(&mut nic, peer(), &response_packet);
    assert_eq!(nic.device.counters().rx_dropped_mads, 1);
    nic.register_agent(MadClass::Performance).unwrap();
    receive(&mut nic, peer(), &request_packet);
    receive(&mut nic, peer(), &response_packet);
    assert_eq!(nic.poll_mad(), Some((peer().ip(), response)));
    assert_eq!(nic.poll_mad(), None);
    // The request is handled by the device.
    let mut batch = TxBatch::new(1);
    let now = nic.device.now();
    assert_eq!(nic.poll_transmit(now, &mut batch, 1 << 16), 1);
    let sent = batch.copy_packets(&batch.groups()[0]);
    assert_eq!(sent[0][20..24], [1, 4, 1, 0x81]);
}

#[test]
fn program_handles_registered_classes() {
    let mut nic = nic();
    for class in [MadClass::ComMgt, MadClass::SubnLid] {
        assert!(nic.register_agent(class).is_err(), "{class:?}");
    }
    let bth = Bth::new(crate::wire::Opcode::UdSendOnly, Qpn::GSI, Psn::new(0));
    let ext = ExtHeaders {
        deth: Some(Deth::new(GSI_QKEY, Qpn::GSI)),
        ..ExtHeaders::default()
    };
    let question = mad_of(0x03, 0x01, 0x0035, 0, &[]);
    let packet = sealed(&nic, peer(), &bth, &ext, &question);
    receive(&mut nic, peer(), &packet);
    assert_eq!(nic.device.counters().rx_dropped_mads, 1);
    nic.register_agent(MadClass::SubnetAdm).unwrap();
    // Send more datagrams than can be queued.
    for _ in 0..300 {
        receive(&mut nic, peer(), &packet);
    }
    assert_eq!(nic.device.counters().rx_dropped_mads, 1 + 44);
    let taken: Vec<_> = std::iter::from_fn(|| nic.poll_mad()).collect();
    assert_eq!(taken, vec![(peer().ip(), question); 256]);
    // A response uses QP1 as both source and destination.
    let response = mad_of(0x03, 0x81, 0x0035, 0, &[]);
    nic.send_mad(peer().ip(), &response).unwrap();
    let mut batch = TxBatch::new(1);
    let now = nic.device.now();
    assert_eq!(nic.poll_transmit(now, &mut batch, 1 << 16), 1);
    let sent = batch.copy_packets(&batch.groups()[0]);
    assert_eq!(sent[0][12..20], [0x80, 1, 0, 0, 0, 0, 0, 1]);
    assert_eq!(sent[0][20..276], response);
    batch.clear();
    for _ in 0..256 {
        nic.send_mad(peer().ip(), &response).unwrap();
    }
    assert!(nic.send_mad(peer().ip(), &response).is_err());
}
