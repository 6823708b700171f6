//! Extended reliable connections: packet format (IBTA 9.2.1, annex A14).

use super::*;

fn rig() -> Rig {
    Rig::with(&Options {
        service: Service::Xrc,
        has_srq: true,
        ..DEFAULT
    })
}

/// Posts a request for the peer's SRQ 0x123456.
fn post(rig: &mut Rig, op: SendOp, length: usize) {
    let sges = [rig.sge(0, length)];
    let list = if length == 0 { &[][..] } else { &sges };
    let wr = SendWr {
        remote_srqn: Some(0x12_3456),
        ..SendWr::new(1, op, list)
    };
    rig.run(|qp, env| qp.post_send(&[wr], env)).unwrap();
}

/// XRCETH for queue 0x123456.
const QUEUE: [u8; 4] = [0, 0x12, 0x34, 0x56];

#[test]
fn requests_contain_srq_in_xrceth() {
    let swap = SendOp::CmpSwap {
        remote: RemoteAddr { addr: 8, ..PEER },
        compare: 1,
        swap: 2,
    };
    let key = RKey(0x0a0b_0c0d);
    let address = reth(PEER.addr, PEER.rkey, 4);
    let nothing = reth(PEER.addr, PEER.rkey, 0);
    let cases: [(SendOp, usize, u8, Vec<u8>); 7] = [
        (SendOp::Send, 0, 0xa4, vec![]),
        (SendOp::SendImm(0x0102_0304), 0, 0xa5, vec![1, 2, 3, 4]),
        (SendOp::SendInv(key), 0, 0xb7, vec![0xa, 0xb, 0xc, 0xd]),
        (SendOp::Write(PEER), 0, 0xaa, nothing.clone()),
        (
            SendOp::WriteImm(PEER, 7),
            0,
            0xab,
            [&nothing[..], &[0, 0, 0, 7]].concat(),
        ),
        (SendOp::Read(PEER), 4, 0xac, address),
        (swap, 8, 0xb3, atomic_eth(8, PEER.rkey, 2, 1)),
    ];
    for (op, length, opcode, rest) in cases {
        let mut rig = rig();
        post(&mut rig, op, length);
        let sent = rig.sent();
        assert_eq!(sent.len(), 1, "{op:?}");
        let bth = [0xff, 0xff, 0, 0, 0, 0x22, 0x80, 0, 2, 0];
        let want = [&[opcode, 0x40][..], &bth, &QUEUE, &rest].concat();
        assert_eq!(sent[0], want, "{op:?}");
    }
    // Packets of a single message.
    let mut rig = rig();
    post(&mut rig, SendOp::Write(PEER), 600);
    let sent = rig.sent();
    let heads: Vec<_> = sent.iter().map(|p| (p[0], p.len(), &p[12..16])).collect();
    assert_eq!(
        heads,
        [
            (0xa6, 32 + 256, &QUEUE[..]),
            (0xa7, 16 + 256, &QUEUE[..]),
            (0xa8, 16 + 88, &QUEUE[..])
        ]
    );
    rig.feed(&packet(0xb1, SQ_PSN + 2, false, &[0x1f, 0, 0, 1], &[]));
    assert_eq!(rig.sends(), [(1, WcStatus::Success)]);
}

#[test]
fn responses_use_xrc_opcodes_without_xrceth() {
    let mut rig = rig();
    rig.post_recv(1, 8);
    rig.feed(&packet(0xa4, RQ_PSN, true, &QUEUE, &[9]));
    let (addr, rkey) = (rig.mr.addr, rig.mr.rkey);
    let read = [&QUEUE[..], &reth(addr, rkey, 300)].concat();
    rig.feed(&packet(0xac, RQ_PSN + 1, true, &read, &[]));
    let add = [&QUEUE[..], &atomic_eth(addr, rkey, 1, 0)].concat();
    rig.feed(&packet(0xb4, RQ_PSN + 3, true, &add, &[]));
    let sent: Vec<_> = rig.sent().iter().map(|p| (p[0], p.len())).collect();
    assert_eq!(
        sent,
        [(0xb1, 16), (0xad, 16 + 256), (0xaf, 16 + 44), (0xb2, 24)]
    );
    // RC packets should be dropped.
    let before = rig.qp.counters().dropped;
    rig.feed(&packet(0x04, RQ_PSN + 4, true, &[], &[9]));
    assert_eq!(rig.qp.counters().dropped, before + 1);
}

#[test]
fn wrong_queue_is_rejected_in_order() {
    let mut rig = rig();
    rig.post_recv(1, 8);
    rig.feed(&packet(0xa4, RQ_PSN, false, &QUEUE, &[9]));
    assert!(!rig.qp.expects(Psn::new(RQ_PSN)) && rig.qp.expects(Psn::new(RQ_PSN + 1)));
    let now = rig.now;
    rig.run(|qp, env| qp.refuse_expected(now, env));
    assert_eq!(rig.qp.state(), QpState::Error);
    let sent = rig.sent();
    let nak = sent.last().unwrap();
    // Invalid request, using the PSN of the packet.
    assert_eq!((nak[0], nak[12]), (0xb1, 0x61));
    assert_eq!(brief(nak).1 & !ACK_REQUEST, RQ_PSN + 1);
    assert!(!rig.qp.expects(Psn::new(RQ_PSN + 1)));
}

#[test]
fn keys_use_domain_of_request() {
    let mut rig = rig();
    let other = PdId(Handle::new(2, 1));
    let access = Access::LOCAL_WRITE | Access::REMOTE | Access::ZERO_BASED;
    let theirs = rig.mrs.reg(other, &rig.memory.whole(), access).unwrap();
    let read = |key| [&QUEUE[..], &reth(0, key, 4)].concat();
    // Two READs using different domains are waiting for their responses.
    rig.feed(&packet(0xac, RQ_PSN, true, &read(rig.mr.rkey), &[]));
    rig.qp.set_domain(other);
    rig.feed(&packet(0xac, RQ_PSN + 1, true, &read(theirs.rkey), &[]));
    let opcodes: Vec<_> = rig.sent().iter().map(|p| p[0]).collect();
    assert_eq!(opcodes, [0xb0, 0xb0]);
    // The key of the first domain is not valid in this domain.
    rig.feed(&packet(0xac, RQ_PSN + 2, true, &read(rig.mr.rkey), &[]));
    let sent = rig.sent();
    assert_eq!((sent[0][0], sent[0][12]), (0xb1, 0x62));
}
