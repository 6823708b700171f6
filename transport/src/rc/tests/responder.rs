//! Scripts for the responder: processes request packets and checks responses.

use super::*;
use crate::verbs::{AsyncEvent, Completion, WcOpcode};

/// Returns an acknowledgement as sent: PSN, syndrome and MSN.
fn acknowledgement(psn: u32, syndrome: u8, msn: u8) -> Vec<u8> {
    let mut p = vec![0x11, 0x40, 0xff, 0xff, 0, 0, 0, 0x22];
    p.extend_from_slice(&psn.to_be_bytes());
    p.extend_from_slice(&[syndrome, 0, 0, msn]);
    p
}

/// Returns the receive completions since the last call. Panics on any other event.
fn receives(rig: &mut Rig) -> Vec<Completion> {
    let recv = |e| match e {
        RcEvent::Recv(c) => c,
        other => panic!("unexpected {other:?}"),
    };
    rig.events().into_iter().map(recv).collect()
}

/// Checks that a request was rejected: NAK, event and error state.
fn refused(rig: &mut Rig, psn: u32, syndrome: u8, event: AsyncEvent) {
    let events = rig.events();
    assert!(events.contains(&RcEvent::Async(event)), "{events:?}");
    assert_eq!(rig.qp.state(), QpState::Error);
    let sent = rig.sent();
    let nak = sent.last().expect("a NAK");
    assert_eq!((brief(nak), nak[12]), ((0x11, psn), syndrome));
    let c = rig.qp.counters();
    let by_kind = [c.tx_nak_invalid, c.tx_nak_access, c.tx_nak_operation];
    let expected = [0x61, 0x62, 0x63].map(|s| u64::from(s == syndrome));
    assert_eq!(by_kind, expected);
    assert!(rig.sent().is_empty());
}

#[test]
fn send_completes_receive_and_is_acknowledged() {
    let mut rig = Rig::new();
    rig.post_recv(1, 1000);
    let data = bytes(515);
    rig.feed(&packet(0x00, RQ_PSN, false, &[], &data[..256]));
    rig.feed(&packet(0x01, RQ_PSN + 1, false, &[], &data[256..512]));
    assert!(rig.sent().is_empty());
    let mut last = packet(0x03, RQ_PSN + 2, true, &[0, 0, 1, 2], &data[512..]);
    last[1] |= 0x80;
    rig.feed(&last);
    assert_eq!(rig.received(515), data);
    let done = receives(&mut rig);
    assert_eq!(done.len(), 1);
    assert_eq!(
        (done[0].wr_id.0, done[0].byte_len, done[0].imm),
        (1, 515, Some(0x0102))
    );
    assert!(done[0].solicited && done[0].opcode == WcOpcode::Recv);
    // There are no more receives, so the credit is zero. One message is complete.
    assert_eq!(rig.sent(), [acknowledgement(RQ_PSN + 2, 0x00, 1)]);
}

#[test]
fn credits_match_remaining_receives() {
    let mut rig = Rig::new();
    for id in 0..4 {
        rig.post_recv(id, 600);
    }
    rig.feed(&packet(0x04, RQ_PSN, true, &[], &[1]));
    assert_eq!(rig.sent(), [acknowledgement(RQ_PSN, 0x03, 1)]);
    // An incomplete message is still included in the credit because it has a receive.
    rig.feed(&packet(0x00, RQ_PSN + 1, true, &[], &bytes(256)));
    assert_eq!(rig.sent(), [acknowledgement(RQ_PSN + 1, 0x03, 1)]);
    let mut rig = Rig::with(&Options {
        has_srq: true,
        ..DEFAULT
    });
    rig.post_recv(0, 600);
    rig.feed(&packet(0x04, RQ_PSN, true, &[], &[1]));
    assert_eq!(rig.sent(), [acknowledgement(RQ_PSN, 0x1f, 1)]);
}

#[test]
fn acks_are_coalesced_within_limit() {
    let mut rig = Rig::with(&Options {
        ack_every: 4,
        ..DEFAULT
    });
    let write = |psn| packet(0x0a, psn, psn % 2 == 0, &reth(0, RKey(0), 0), &[]);
    for psn in RQ_PSN..RQ_PSN + 3 {
        rig.feed(&write(psn));
    }
    assert_eq!(rig.sent(), [acknowledgement(RQ_PSN + 2, 0x00, 3)]);
    for psn in RQ_PSN + 3..RQ_PSN + 9 {
        rig.feed(&packet(0x0a, psn, false, &reth(0, RKey(0), 0), &[]));
    }
    assert_eq!(rig.sent(), [acknowledgement(RQ_PSN + 6, 0x00, 9)]);
}

#[test]
fn gap_sends_single_nak() {
    let mut rig = Rig::new();
    rig.post_recv(1, 8);
    for psn in [2, 1, 2] {
        rig.feed(&packet(0x04, RQ_PSN + psn, true, &[], &[9]));
    }
    assert_eq!(rig.sent(), [acknowledgement(RQ_PSN, 0x60, 0)]);
    assert_eq!(rig.qp.counters().out_of_order, 3);
    rig.feed(&packet(0x04, RQ_PSN, true, &[], &[9]));
    assert_eq!(rig.sent(), [acknowledgement(RQ_PSN, 0x00, 1)]);
    // The next gap should be handled separately.
    rig.feed(&packet(0x04, RQ_PSN + 2, true, &[], &[9]));
    assert_eq!(rig.sent(), [acknowledgement(RQ_PSN + 1, 0x60, 1)]);
}

#[test]
fn send_without_receive_gets_rnr_nak() {
    let mut rig = Rig::new();
    for _ in 0..2 {
        rig.feed(&packet(0x00, RQ_PSN, false, &[], &bytes(256)));
        rig.feed(&packet(0x02, RQ_PSN + 1, true, &[], &[1]));
        assert_eq!(rig.sent(), [acknowledgement(RQ_PSN, 0x2e, 0)]);
    }
    assert_eq!(rig.qp.counters().tx_rnr_naks, 2);
    rig.post_recv(1, 300);
    rig.feed(&packet(0x00, RQ_PSN, false, &[], &bytes(256)));
    rig.feed(&packet(0x02, RQ_PSN + 1, true, &[], &[1]));
    assert_eq!(rig.sent(), [acknowledgement(RQ_PSN + 1, 0x00, 1)]);
    assert_eq!(receives(&mut rig)[0].byte_len, 257);
}

#[test]
fn immediate_write_consumes_receive_at_end() {
    let mut rig = Rig::new();
    let (addr, rkey) = (rig.mr.addr, rig.mr.rkey);
    let data = bytes(260);
    rig.feed(&packet(
        0x06,
        RQ_PSN,
        false,
        &reth(addr, rkey, 260),
        &data[..256],
    ));
    let last = packet(0x09, RQ_PSN + 1, true, &[0, 0, 0, 7], &data[256..]);
    rig.feed(&last);
    assert_eq!(rig.sent(), [acknowledgement(RQ_PSN + 1, 0x2e, 0)]);
    assert_eq!(rig.memory.slice(256..260).unwrap().to_vec(), [0; 4]);
    rig.post_recv(3, 0);
    rig.feed(&last);
    assert_eq!(rig.sent(), [acknowledgement(RQ_PSN + 1, 0x00, 1)]);
    let done = receives(&mut rig);
    assert_eq!(
        (done[0].wr_id.0, done[0].byte_len, done[0].imm),
        (3, 260, Some(7))
    );
    assert_eq!(done[0].opcode, WcOpcode::RecvWriteImm);
    assert_eq!(rig.memory.slice(0..260).unwrap().to_vec(), data);
}

#[test]
fn cve_2022_49929_rnr_nak_leaks_nothing() {
    // CVE-2022-49929: a reference to the region was leaked after an RNR NAK.
    let mut rig = Rig::new();
    let (addr, rkey) = (rig.mr.addr, rig.mr.rkey);
    let write = packet(
        0x0b,
        RQ_PSN,
        true,
        &[reth(addr, rkey, 4), vec![0; 4]].concat(),
        &[1; 4],
    );
    rig.feed(&write);
    assert_eq!(rig.sent(), [acknowledgement(RQ_PSN, 0x2e, 0)]);
    rig.mrs.dereg(rig.mr.id).unwrap();
    assert!(rig.mrs.is_empty());
    rig.post_recv(1, 0);
    rig.feed(&write);
    refused(&mut rig, RQ_PSN, 0x62, AsyncEvent::QpAccessError(QP));
}

#[test]
fn empty_write_needs_no_key() {
    // This is sent by ib_srpt when the connection has been established.
    let mut rig = Rig::with(&Options {
        access: Access::empty(),
        state: QpState::Rtr,
        ..DEFAULT
    });
    rig.feed(&packet(0x0a, RQ_PSN, true, &reth(0, RKey(0), 0), &[]));
    assert_eq!(rig.sent(), [acknowledgement(RQ_PSN, 0x00, 1)]);
    assert_eq!(
        rig.events(),
        [RcEvent::Async(AsyncEvent::CommEstablished(QP))]
    );
    rig.feed(&packet(0x0a, RQ_PSN + 1, true, &reth(0, RKey(0), 0), &[]));
    assert_eq!(rig.events(), []);
}

#[test]
fn misplaced_opcodes_and_lengths_are_rejected() {
    let first = || packet(0x00, RQ_PSN, false, &[], &bytes(256));
    let (addr, key) = (Rig::new().mr.addr, Rig::new().mr.rkey);
    let write = |len| packet(0x06, RQ_PSN, false, &reth(addr, key, len), &bytes(256));
    let second = RQ_PSN + 1;
    let scripts: Vec<(&str, Vec<Vec<u8>>)> = vec![
        (
            "a middle without a first",
            vec![packet(0x01, RQ_PSN, false, &[], &bytes(256))],
        ),
        (
            "a last without a first",
            vec![packet(0x02, RQ_PSN, true, &[], &[1])],
        ),
        (
            "an only in a message",
            vec![first(), packet(0x04, second, true, &[], &[1])],
        ),
        (
            "a first in a message",
            vec![first(), packet(0x00, second, true, &[], &bytes(256))],
        ),
        (
            "another operation",
            vec![first(), packet(0x07, second, true, &[], &bytes(256))],
        ),
        (
            "a read in a message",
            vec![
                first(),
                packet(0x0c, second, true, &reth(addr, key, 4), &[]),
            ],
        ),
        (
            "a short first",
            vec![packet(0x00, RQ_PSN, false, &[], &bytes(252))],
        ),
        (
            "a long only",
            vec![packet(0x04, RQ_PSN, false, &[], &bytes(260))],
        ),
        (
            "a short middle",
            vec![first(), packet(0x01, second, false, &[], &bytes(4))],
        ),
        (
            "an empty last",
            vec![first(), packet(0x02, second, false, &[], &[])],
        ),
        (
            "a write shorter than announced",
            vec![packet(0x0a, RQ_PSN, true, &reth(addr, key, 5), &[1; 4])],
        ),
        (
            "a write longer than announced",
            vec![packet(0x0a, RQ_PSN, true, &reth(addr, key, 3), &[1; 4])],
        ),
        ("a first that is the whole", vec![write(256)]),
        (
            "a middle that reaches the end",
            vec![write(512), packet(0x07, second, false, &[], &bytes(256))],
        ),
        (
            "a last before the end",
            vec![write(513), packet(0x08, second, false, &[], &bytes(256))],
        ),
        ("a message too long", vec![write(0x8000_0001)]),
        (
            "a crooked atomic",
            vec![packet(
                0x14,
                RQ_PSN,
                true,
                &atomic_eth(addr + 4, key, 1, 0),
                &[],
            )],
        ),
    ];
    for (what, script) in scripts {
        let mut rig = Rig::new();
        rig.post_recv(1, 1000);
        let last = RQ_PSN + script.len() as u32 - 1;
        for packet in script {
            rig.feed(&packet);
        }
        assert_eq!(rig.qp.state(), QpState::Error, "{what}");
        refused(&mut rig, last, 0x61, AsyncEvent::QpReqError(QP));
    }
}

#[test]
fn requests_without_access_rights_are_rejected() {
    let (addr, key) = (Rig::new().mr.addr, Rig::new().mr.rkey);
    let scripts = [
        (
            Access::REMOTE_WRITE,
            packet(0x0a, RQ_PSN, true, &reth(addr, key, 4), &[1; 4]),
        ),
        (
            Access::REMOTE_READ,
            packet(0x0c, RQ_PSN, true, &reth(addr, key, 4), &[]),
        ),
        (
            Access::REMOTE_ATOMIC,
            packet(0x13, RQ_PSN, true, &atomic_eth(addr, key, 1, 0), &[]),
        ),
    ];
    for (right, request) in scripts {
        let mut rig = Rig::with(&Options {
            access: Access::REMOTE - right,
            ..DEFAULT
        });
        rig.feed(&request);
        refused(&mut rig, RQ_PSN, 0x61, AsyncEvent::QpReqError(QP));
    }
}

#[test]
fn keys_and_ranges_are_checked_first() {
    let (addr, key) = (Rig::new().mr.addr, Rig::new().mr.rkey);
    let end = addr + 64 * 1024;
    let bad_key = RKey(key.0 ^ 1);
    let mut requests = Vec::new();
    for (addr, key) in [
        (addr, bad_key),
        (end - 3, key),
        (addr.wrapping_sub(1), key),
        (u64::MAX - 3, key),
        (u64::MAX, key),
    ] {
        requests.push(packet(0x0a, RQ_PSN, true, &reth(addr, key, 4), &[1; 4]));
        requests.push(packet(0x0c, RQ_PSN, true, &reth(addr, key, 4), &[]));
    }
    for (addr, key) in [(addr, bad_key), (end, key), (u64::MAX - 7, key)] {
        requests.push(packet(
            0x14,
            RQ_PSN,
            true,
            &atomic_eth(addr, key, 1, 0),
            &[],
        ));
    }
    // Check the full range and not just the first packet.
    requests.push(packet(
        0x06,
        RQ_PSN,
        true,
        &reth(end - 256, key, 257),
        &bytes(256),
    ));
    for request in requests {
        let mut rig = Rig::new();
        rig.feed(&request);
        refused(&mut rig, RQ_PSN, 0x62, AsyncEvent::QpAccessError(QP));
        assert!(rig.memory.whole().to_vec().iter().all(|&b| b == 0));
    }
}

#[test]
fn write_fails_if_key_is_invalidated() {
    let mut rig = Rig::new();
    let (addr, key) = (rig.mr.addr, rig.mr.rkey);
    rig.feed(&packet(
        0x06,
        RQ_PSN,
        false,
        &reth(addr, key, 600),
        &bytes(256),
    ));
    rig.mrs.dereg(rig.mr.id).unwrap();
    rig.feed(&packet(0x07, RQ_PSN + 1, false, &[], &bytes(256)));
    refused(&mut rig, RQ_PSN + 1, 0x62, AsyncEvent::QpAccessError(QP));
}

#[test]
fn oversized_message_fails_both_sides() {
    let mut rig = Rig::new();
    rig.post_recv(1, 256);
    rig.post_recv(2, 256);
    rig.feed(&packet(0x00, RQ_PSN, false, &[], &bytes(256)));
    rig.feed(&packet(0x02, RQ_PSN + 1, true, &[], &[1]));
    let ends: Vec<_> = rig
        .out
        .iter()
        .filter_map(|e| match e {
            RcEvent::Recv(c) => Some((c.wr_id.0, c.status)),
            _ => None,
        })
        .collect();
    assert_eq!(ends, [(1, WcStatus::LocLenErr), (2, WcStatus::WrFlushErr)]);
    refused(&mut rig, RQ_PSN + 1, 0x61, AsyncEvent::QpReqError(QP));
}

#[test]
fn receive_with_bad_key_reports_operational_error() {
    let mut rig = Rig::new();
    let bad = [
        rig.sge(0, 4),
        Sge {
            lkey: LKey(1),
            ..rig.sge(4, 4)
        },
    ];
    let wr = RecvWr {
        wr_id: WrId(1),
        sges: &bad,
    };
    rig.run(|qp, env| qp.post_recv(&[wr], env)).unwrap();
    rig.feed(&packet(0x04, RQ_PSN, true, &[], &[7; 8]));
    assert!(matches!(rig.out[0], RcEvent::Recv(c) if c.status == WcStatus::LocProtErr));
    refused(&mut rig, RQ_PSN, 0x63, AsyncEvent::QpFatal(QP));
    // The valid first half should not be written either.
    assert_eq!(rig.memory.slice(0..8).unwrap().to_vec(), [0; 8]);
}

#[test]
fn send_invalidates_only_fast_registrations() {
    let mut rig = Rig::new();
    let fast = rig.mrs.alloc_fast(PD, 1).unwrap();
    rig.mrs
        .map_sg(fast.id, &[rig.memory.slice(0..10).unwrap()])
        .unwrap();
    rig.mrs
        .reg_fast(PD, fast.id, fast.rkey, Access::REMOTE_READ)
        .unwrap();
    rig.post_recv(1, 8);
    rig.feed(&packet(
        0x17,
        RQ_PSN,
        true,
        &fast.rkey.0.to_be_bytes(),
        &[1],
    ));
    assert_eq!(receives(&mut rig)[0].invalidated, Some(fast.rkey));
    assert!(!rig.mrs.query(fast.id).unwrap().valid);
    rig.sent();
    // A permanently registered region is still available.
    rig.post_recv(2, 8);
    let key = rig.mr.rkey;
    rig.feed(&packet(0x17, RQ_PSN + 1, true, &key.0.to_be_bytes(), &[1]));
    refused(&mut rig, RQ_PSN + 1, 0x62, AsyncEvent::QpAccessError(QP));
    assert!(rig.mrs.query(rig.mr.id).unwrap().valid);
}

#[test]
fn responses_follow_request_order() {
    let mut rig = Rig::new();
    let (addr, key) = (rig.mr.addr, rig.mr.rkey);
    rig.memory.write(0, &bytes(600));
    rig.post_recv(1, 8);
    rig.post_recv(2, 8);
    rig.feed(&packet(0x04, RQ_PSN, true, &[], &[1]));
    rig.feed(&packet(0x0c, RQ_PSN + 1, true, &reth(addr, key, 600), &[]));
    rig.feed(&packet(0x04, RQ_PSN + 4, true, &[], &[1]));
    rig.feed(&packet(
        0x14,
        RQ_PSN + 5,
        true,
        &atomic_eth(addr, key, 0, 0),
        &[],
    ));
    let sent = rig.sent();
    // The second acknowledgement covers the packets not acknowledged by the READ response.
    let order: Vec<_> = sent.iter().map(|p| brief(p)).collect();
    assert_eq!(
        order,
        [
            (0x0d, RQ_PSN + 1),
            (0x0e, RQ_PSN + 2),
            (0x0f, RQ_PSN + 3),
            (0x11, RQ_PSN + 4),
            (0x12, RQ_PSN + 5)
        ]
    );
    assert_eq!(sent[0][12..], [&[0x00, 0, 0, 2][..], &bytes(256)].concat());
    assert_eq!(sent[1][12..], bytes(600)[256..512]);
    assert_eq!(
        sent[2][12..],
        [&[0x00, 0, 0, 2][..], &bytes(600)[512..]].concat()
    );
    assert_eq!(sent[3][12..], [0x00, 0, 0, 4]);
    let old = u64::from_ne_bytes(bytes(8).try_into().unwrap()).to_be_bytes();
    assert_eq!(sent[4][12..], [&[0x00, 0, 0, 4][..], &old].concat());
}

#[test]
fn duplicate_send_is_acknowledged_but_not_delivered() {
    let mut rig = Rig::new();
    rig.post_recv(1, 8);
    rig.post_recv(2, 8);
    rig.feed(&packet(0x04, RQ_PSN, true, &[], &[1]));
    rig.sent();
    assert_eq!(receives(&mut rig).len(), 1);
    // There should only be one acknowledgement regardless of the number of duplicates.
    for _ in 0..1000 {
        rig.feed(&packet(0x04, RQ_PSN, true, &[], &[2]));
    }
    assert_eq!(rig.sent(), [acknowledgement(RQ_PSN, 0x01, 1)]);
    assert!(receives(&mut rig).is_empty());
    assert_eq!(rig.received(1), [1]);
    assert_eq!(rig.qp.counters().duplicates, 1000);
}

/// `rdma_rxe` loses a request if it is acknowledged before it was fully repeated.
#[test]
fn duplicate_is_acknowledged_on_request() {
    let mut rig = Rig::new();
    rig.post_recv(1, 600);
    let opcodes = [0x00, 0x01, 0x02];
    let repeat = |rig: &mut Rig, at: u32| {
        let (last, payload) = (at == 2, bytes(if at == 2 { 88 } else { 256 }));
        rig.feed(&packet(
            opcodes[at as usize],
            RQ_PSN + at,
            last,
            &[],
            &payload,
        ));
        rig.sent()
    };
    for round in 0..2 {
        assert!(repeat(&mut rig, 0).is_empty(), "round {round}");
        assert!(repeat(&mut rig, 1).is_empty(), "round {round}");
        assert_eq!(repeat(&mut rig, 2).len(), 1, "round {round}");
    }
    // Without a request, duplicates are acknowledged after a while like new packets.
    let sent: Vec<_> = (0..8).map(|_| repeat(&mut rig, 0).len()).collect();
    assert_eq!(sent, [0, 0, 0, 0, 0, 0, 0, 1]);
}

#[test]
fn duplicate_read_is_partially_repeated() {
    let mut rig = Rig::new();
    let (addr, key) = (rig.mr.addr, rig.mr.rkey);
    rig.memory.write(0, &bytes(700));
    rig.feed(&packet(0x0c, RQ_PSN, true, &reth(addr, key, 700), &[]));
    assert_eq!(rig.sent().len(), 3);
    rig.feed(&packet(
        0x0c,
        RQ_PSN + 1,
        true,
        &reth(addr + 256, key, 444),
        &[],
    ));
    let sent = rig.sent();
    assert_eq!(
        [brief(&sent[0]), brief(&sent[1])],
        [(0x0d, RQ_PSN + 1), (0x0f, RQ_PSN + 2)]
    );
    assert_eq!(sent[0][16..], bytes(700)[256..512]);
    rig.feed(&packet(
        0x0c,
        RQ_PSN + 2,
        true,
        &reth(addr + 512, key, 188),
        &[],
    ));
    assert_eq!(rig.sent_brief(), [(0x10, RQ_PSN + 2)]);
    // It can also end earlier, at a packet boundary.
    rig.feed(&packet(0x0c, RQ_PSN, true, &reth(addr, key, 512), &[]));
    assert_eq!(rig.sent_brief(), [(0x0d, RQ_PSN), (0x0f, RQ_PSN + 1)]);
    // All other requests are dropped: different address, different key, too long, different
    // operation.
    for (psn, addr, key, len) in [
        (0, addr + 1, key, 700),
        (0, addr, key.next(), 700),
        (1, addr + 256, key, 445),
        (1, addr, key, 256),
        (1, addr + 256, key, 300),
    ] {
        rig.feed(&packet(
            0x0c,
            RQ_PSN + psn,
            true,
            &reth(addr, key, len),
            &[],
        ));
        assert!(rig.sent().is_empty());
    }
    rig.feed(&packet(
        0x14,
        RQ_PSN,
        true,
        &atomic_eth(addr, key, 1, 0),
        &[],
    ));
    assert!(rig.sent().is_empty());
    assert_eq!(rig.memory.slice(0..700).unwrap().to_vec(), bytes(700));
}

#[test]
fn late_duplicate_read_ignores_invalid_key() {
    let mut rig = Rig::new();
    let (addr, key) = (rig.mr.addr, rig.mr.rkey);
    rig.feed(&packet(0x0c, RQ_PSN, true, &reth(addr, key, 4), &[]));
    rig.sent();
    rig.mrs.dereg(rig.mr.id).unwrap();
    rig.feed(&packet(0x0c, RQ_PSN, true, &reth(addr, key, 4), &[]));
    assert!(rig.sent().is_empty());
    assert_eq!(rig.qp.state(), QpState::Rts);
}

#[test]
fn read_fails_if_key_is_invalidated() {
    let mut rig = Rig::new();
    let (addr, key) = (rig.mr.addr, rig.mr.rkey);
    rig.feed(&packet(0x0c, RQ_PSN, true, &reth(addr, key, 600), &[]));
    let (now, mut tx) = (rig.now, TxPacket::default());
    assert!(rig.run(|qp, env| qp.poll_transmit(now, env, &mut tx)));
    rig.mrs.dereg(rig.mr.id).unwrap();
    let sent = rig.sent();
    assert_eq!(
        (sent.len(), brief(&sent[0]), sent[0][12]),
        (1, (0x11, RQ_PSN + 1), 0x62)
    );
    assert_eq!(rig.qp.state(), QpState::Error);
}

/// The network duplicated a READ while we are still sending the response.
#[test]
fn unfinished_read_is_not_complete() {
    let begun = || {
        let mut rig = Rig::new();
        let (addr, key) = (rig.mr.addr, rig.mr.rkey);
        let read = packet(0x0c, RQ_PSN, true, &reth(addr, key, 600), &[]);
        rig.feed(&read);
        let (now, mut tx) = (rig.now, TxPacket::default());
        assert!(rig.run(|qp, env| qp.poll_transmit(now, env, &mut tx)));
        rig.feed(&read);
        rig
    };
    // The key is invalidated: the peer does not have its data yet and must get an error.
    let mut rig = begun();
    rig.mrs.dereg(rig.mr.id).unwrap();
    let sent = rig.sent();
    let naks: Vec<_> = sent.iter().map(|p| (brief(p), p[12])).collect();
    assert_eq!(naks, [((0x11, RQ_PSN), 0x62)]);
    assert_eq!(rig.qp.state(), QpState::Error);
    // A READ exceeding the number of resources must not replace it.
    let mut rig = begun();
    let (addr, key) = (rig.mr.addr, rig.mr.rkey);
    for psn in [RQ_PSN + 3, RQ_PSN + 4] {
        rig.feed(&packet(0x0c, psn, true, &reth(addr, key, 4), &[]));
    }
    assert_eq!(
        rig.sent_brief(),
        [
            (0x0d, RQ_PSN),
            (0x0e, RQ_PSN + 1),
            (0x0f, RQ_PSN + 2),
            (0x10, RQ_PSN + 3),
            (0x11, RQ_PSN + 4)
        ]
    );
    assert_eq!(rig.qp.state(), QpState::Error);
}

/// The requester can repeat the request in parts while it has never received a full response.
#[test]
fn read_completes_with_last_packet() {
    let in_parts = || {
        let mut rig = Rig::new();
        let (addr, key) = (rig.mr.addr, rig.mr.rkey);
        rig.feed(&packet(0x0c, RQ_PSN, true, &reth(addr, key, 600), &[]));
        let (now, mut tx) = (rig.now, TxPacket::default());
        assert!(rig.run(|qp, env| qp.poll_transmit(now, env, &mut tx)));
        let part = reth(addr + 256, key, 256);
        rig.feed(&packet(0x0c, RQ_PSN + 1, true, &part, &[]));
        assert_eq!(rig.sent_brief(), [(0x10, RQ_PSN + 1)]);
        rig
    };
    let rest = |rig: &Rig| reth(rig.mr.addr + 512, rig.mr.rkey, 88);
    let mut rig = in_parts();
    let last = packet(0x0c, RQ_PSN + 2, true, &rest(&rig), &[]);
    rig.mrs.dereg(rig.mr.id).unwrap();
    rig.feed(&last);
    let sent = rig.sent();
    let naks: Vec<_> = sent.iter().map(|p| (brief(p), p[12])).collect();
    assert_eq!(naks, [((0x11, RQ_PSN + 2), 0x62)]);
    // A new request must not replace it before that either.
    for is_complete in [false, true] {
        let mut rig = in_parts();
        if is_complete {
            let last = packet(0x0c, RQ_PSN + 2, true, &rest(&rig), &[]);
            rig.feed(&last);
            assert_eq!(rig.sent_brief(), [(0x10, RQ_PSN + 2)]);
        }
        let (addr, key) = (rig.mr.addr, rig.mr.rkey);
        for psn in [RQ_PSN + 3, RQ_PSN + 4] {
            rig.feed(&packet(0x0c, psn, true, &reth(addr, key, 4), &[]));
        }
        let opcode = if is_complete { 0x10 } else { 0x11 };
        let expected = [(0x10, RQ_PSN + 3), (opcode, RQ_PSN + 4)];
        assert_eq!(rig.sent_brief(), expected);
    }
}

/// The peer has lost the response, or it has the response but lost the previous acknowledgement. If
/// we acknowledge the PSN of the READ, `rdma_rxe` can complete it without data.
#[test]
fn ack_never_uses_read_psn() {
    let mut rig = Rig::new();
    let (addr, key) = (rig.mr.addr, rig.mr.rkey);
    rig.post_recv(1, 64);
    let send = packet(0x04, RQ_PSN, true, &[], b"data");
    let read = packet(0x0c, RQ_PSN + 1, true, &reth(addr, key, 4), &[]);
    rig.feed(&send);
    rig.feed(&read);
    assert_eq!(rig.sent_brief(), [(0x11, RQ_PSN), (0x10, RQ_PSN + 1)]);
    rig.feed(&send);
    assert_eq!(rig.sent_brief(), [(0x11, RQ_PSN)]);
    // Both are received before we send the first response: the READ response acknowledges both.
    rig.feed(&send);
    rig.feed(&read);
    assert_eq!(rig.sent_brief(), [(0x10, RQ_PSN + 1)]);
    // The next request acknowledges the READ, and must not acknowledge less.
    let write = packet(0x0a, RQ_PSN + 2, true, &reth(0, key, 0), &[]);
    rig.feed(&write);
    assert_eq!(rig.sent_brief(), [(0x11, RQ_PSN + 2)]);
    rig.feed(&send);
    assert_eq!(rig.sent_brief(), [(0x11, RQ_PSN + 2)]);
}

/// If `rdma_rxe` receives an acknowledgement between the packets of a READ response, it will
/// complete the READ with partial data, regardless of the PSN.
#[test]
fn ack_does_not_interrupt_read_response() {
    for repeats_read in [false, true] {
        let mut rig = Rig::new();
        let (addr, key) = (rig.mr.addr, rig.mr.rkey);
        rig.post_recv(1, 64);
        let send = packet(0x04, RQ_PSN, true, &[], b"data");
        let read = packet(0x0c, RQ_PSN + 1, true, &reth(addr, key, 600), &[]);
        rig.feed(&send);
        assert_eq!(rig.sent_brief(), [(0x11, RQ_PSN)]);
        rig.feed(&read);
        let (now, mut tx) = (rig.now, TxPacket::default());
        assert!(rig.run(|qp, env| qp.poll_transmit(now, env, &mut tx)));
        rig.feed(&send);
        if repeats_read {
            rig.feed(&read);
        }
        let sent = rig.sent_brief();
        assert!(sent.len() >= 2);
        assert!(sent.iter().all(|(opcode, _)| *opcode != 0x11), "{sent:x?}");
        // Without the READ it is acknowledged again.
        rig.feed(&send);
        assert_eq!(rig.sent_brief(), [(0x11, RQ_PSN)]);
    }
}

#[test]
fn closing_sends_no_ack_within_response() {
    let mut rig = Rig::new();
    let (addr, key) = (rig.mr.addr, rig.mr.rkey);
    rig.post_recv(1, 64);
    let send = packet(0x04, RQ_PSN, true, &[], b"data");
    rig.feed(&send);
    assert_eq!(rig.sent_brief(), [(0x11, RQ_PSN)]);
    rig.feed(&packet(0x0c, RQ_PSN + 1, true, &reth(addr, key, 600), &[]));
    let (now, mut tx) = (rig.now, TxPacket::default());
    assert!(rig.run(|qp, env| qp.poll_transmit(now, env, &mut tx)));
    rig.feed(&send);
    rig.run(RcQp::to_error);
    assert!(rig.sent_brief().is_empty());
}

/// For the peer, the NAK means that nothing starting with the READ was executed.
#[test]
fn requests_after_failed_read_are_unacknowledged() {
    let mut rig = Rig::new();
    let (addr, key) = (rig.mr.addr, rig.mr.rkey);
    rig.feed(&packet(0x0c, RQ_PSN, true, &reth(addr, key, 4), &[]));
    rig.feed(&packet(0x0a, RQ_PSN + 1, false, &reth(0, key, 0), &[]));
    rig.mrs.dereg(rig.mr.id).unwrap();
    assert_eq!(rig.sent_brief(), [(0x11, RQ_PSN)]);
    rig.run(RcQp::to_error);
    assert!(rig.sent_brief().is_empty());
}

#[test]
fn duplicate_atomic_is_not_executed_again() {
    let mut rig = Rig::new();
    let (addr, key) = (rig.mr.addr, rig.mr.rkey);
    let value = |rig: &Rig| {
        u64::from_ne_bytes(rig.memory.slice(0..8).unwrap().to_vec().try_into().unwrap())
    };
    let add = packet(0x14, RQ_PSN, true, &atomic_eth(addr, key, 5, 0), &[]);
    let swap = packet(0x13, RQ_PSN + 1, true, &atomic_eth(addr, key, 70, 5), &[]);
    let fail = packet(0x13, RQ_PSN + 2, true, &atomic_eth(addr, key, 80, 5), &[]);
    rig.feed(&add);
    rig.feed(&swap);
    assert_eq!(rig.sent().len(), 2);
    assert_eq!(value(&rig), 70);
    rig.feed(&add);
    rig.feed(&swap);
    let sent = rig.sent();
    assert_eq!(sent[0][16..], 0u64.to_be_bytes());
    assert_eq!(sent[1][16..], 5u64.to_be_bytes());
    rig.feed(&fail);
    assert_eq!(rig.sent()[0][16..], 70u64.to_be_bytes());
    assert_eq!(value(&rig), 70);
    // With two resources, the first atomic is removed and its duplicate is dropped.
    rig.feed(&add);
    assert!(rig.sent().is_empty());
    assert_eq!(value(&rig), 70);
}

#[test]
fn excess_reads_are_rejected_after_pending_responses() {
    let mut rig = Rig::new();
    let (addr, key) = (rig.mr.addr, rig.mr.rkey);
    for psn in RQ_PSN..RQ_PSN + 3 {
        rig.feed(&packet(0x0c, psn, true, &reth(addr, key, 4), &[]));
    }
    assert_eq!(rig.qp.state(), QpState::Error);
    assert_eq!(
        rig.sent_brief(),
        [(0x10, RQ_PSN), (0x10, RQ_PSN + 1), (0x11, RQ_PSN + 2)]
    );
    let mut rig = Rig::with(&Options {
        reads: 0,
        ..DEFAULT
    });
    rig.feed(&packet(0x0c, RQ_PSN, true, &reth(addr, key, 0), &[]));
    refused(&mut rig, RQ_PSN, 0x61, AsyncEvent::QpReqError(QP));
}

#[test]
fn cve_2026_93107_inactive_states_drop_packets() {
    // CVE-2026-93107: packets were processed in the error state.
    let request = packet(0x0a, RQ_PSN, true, &reth(0, RKey(0), 0), &[]);
    for state in [QpState::Reset, QpState::Init, QpState::Error] {
        let error = state == QpState::Error;
        let mut rig = Rig::with(&Options {
            state: if error { QpState::Rts } else { state },
            ..DEFAULT
        });
        if error {
            rig.run(RcQp::to_error);
        }
        rig.feed(&request);
        rig.ack(SQ_PSN, 0x1f);
        assert!(rig.sent().is_empty() && rig.events().is_empty());
        assert_eq!(
            (rig.qp.counters().dropped, rig.qp.counters().rx_packets),
            (2, 0)
        );
    }
    // A datagram packet is not valid for a connected QP.
    let mut rig = Rig::new();
    rig.feed(&packet(0x64, RQ_PSN, false, &[0; 8], &[]));
    assert_eq!(rig.qp.counters().dropped, 1);
}

#[test]
fn failed_qp_keeps_shared_queue() {
    let mut rig = Rig::with(&Options {
        has_srq: true,
        ..DEFAULT
    });
    rig.post_recv(1, 600);
    rig.post_recv(2, 600);
    rig.feed(&packet(0x00, RQ_PSN, false, &[], &bytes(256)));
    rig.run(RcQp::to_error);
    let events = rig.events();
    assert!(
        matches!(events[0], RcEvent::Recv(c) if c.wr_id.0 == 1 && c.status == WcStatus::WrFlushErr)
    );
    assert_eq!(
        events[1..],
        [RcEvent::Async(AsyncEvent::QpLastWqeReached(QP))]
    );
    assert_eq!(rig.rq.len(), 1);
    rig.run(RcQp::to_error);
    assert!(rig.events().is_empty());
}

#[test]
fn psns_wrap() {
    let mut rig = Rig::with(&Options {
        rq_psn: 0xff_ffff,
        ..DEFAULT
    });
    let (addr, key) = (rig.mr.addr, rig.mr.rkey);
    rig.feed(&packet(0x0c, 0xff_ffff, true, &reth(addr, key, 512), &[]));
    assert_eq!(rig.sent_brief(), [(0x0d, 0xff_ffff), (0x0f, 0)]);
    rig.feed(&packet(0x0a, 1, true, &reth(0, key, 0), &[]));
    rig.feed(&packet(0x0c, 0, true, &reth(addr + 256, key, 256), &[]));
    assert_eq!(rig.sent_brief(), [(0x10, 0), (0x11, 1)]);
}

#[test]
fn requests_and_responses_alternate() {
    let mut rig = Rig::with(&Options {
        window: 64,
        ..DEFAULT
    });
    let (addr, key) = (rig.mr.addr, rig.mr.rkey);
    // The window should be opened first.
    for (packets, last) in [(16, 15), (32, 47)] {
        rig.post(0, SendOp::Write(PEER), 256 * packets);
        assert_eq!(rig.sent().len(), packets);
        rig.ack(SQ_PSN + last, 0x1f);
    }
    rig.feed(&packet(0x0c, RQ_PSN, true, &reth(addr, key, 256 * 40), &[]));
    rig.post(1, SendOp::Write(PEER), 256 * 40);
    let kinds: Vec<bool> = rig.sent().iter().map(|p| p[0] >= 0x0d).collect();
    let runs: Vec<usize> = kinds.chunk_by(|a, b| a == b).map(<[bool]>::len).collect();
    assert_eq!(kinds.len(), 80);
    assert!(runs.iter().all(|&run| run <= 16), "{runs:?}");
    assert!(
        runs.len() <= 7,
        "packets of one message come in a row: {runs:?}"
    );
}

/// Resources are only removed when the space is needed for new READs and atomics, so after the PSN
/// has wrapped, an old resource can include PSNs that are used again.
#[test]
fn duplicate_atomic_gets_own_response() {
    let mut rig = Rig::with(&Options {
        reads: 4,
        ..DEFAULT
    });
    let (addr, key) = (rig.mr.addr, rig.mr.rkey);
    let number = |rig: &Rig, v: u64| rig.memory.write(0, &v.to_ne_bytes());
    let original = |p: &[u8]| u64::from_be_bytes(p[16..24].try_into().unwrap());
    let add = packet(0x14, RQ_PSN, true, &atomic_eth(addr, key, 1, 0), &[]);
    number(&rig, 5);
    rig.feed(&add);
    assert_eq!(original(&rig.sent()[0]), 5);
    // All other packets are zero-length WRITEs until the PSN wraps.
    let mut datagram = packet(0x0a, 0, false, &reth(0, RKey(0), 0), &[]);
    datagram.extend_from_slice(&[0; 4]);
    for n in 1..1u32 << 24 {
        datagram[9..12].copy_from_slice(&RQ_PSN.wrapping_add(n).to_be_bytes()[1..]);
        let parsed = Packet::parse(&datagram).unwrap();
        let now = rig.now;
        rig.run(|qp, env| qp.handle_packet(now, &parsed, env));
    }
    rig.sent();
    number(&rig, 1000);
    rig.feed(&add);
    assert_eq!(original(&rig.sent()[0]), 1000);
    // The response was lost, so the request is repeated.
    rig.feed(&add);
    assert_eq!(original(&rig.sent()[0]), 1000, "response of an old request");
}

#[test]
fn delivered_send_is_acknowledged_on_close() {
    let mut rig = Rig::new();
    rig.post_recv(1, 64);
    rig.feed(&packet(0x04, RQ_PSN, true, &[], b"bye!"));
    assert_eq!(receives(&mut rig).len(), 1);
    rig.run(RcQp::to_error);
    assert_eq!(rig.sent_brief(), [(0x11, RQ_PSN)]);
}

/// A READ response acknowledges the previous packets. Without a response, we need an
/// acknowledgement.
#[test]
fn send_before_dropped_read_is_acknowledged() {
    let mut rig = Rig::with(&Options {
        reads: 4,
        ..DEFAULT
    });
    let (addr, key) = (rig.mr.addr, rig.mr.rkey);
    let send = packet(0x04, RQ_PSN, false, &[], b"bye!");
    rig.post_recv(1, 64);
    rig.feed(&send);
    rig.feed(&packet(0x0c, RQ_PSN + 1, true, &reth(addr, key, 600), &[]));
    rig.feed(&packet(0x0c, RQ_PSN + 4, true, &reth(addr, key, 4), &[]));
    assert_eq!(receives(&mut rig).len(), 1);
    rig.run(RcQp::to_error);
    assert_eq!(rig.sent(), [acknowledgement(RQ_PSN, 0x00, 3)]);
}

#[test]
fn poll_last_response_skips_reads_and_terminates() {
    let mut rig = Rig::with(&Options {
        reads: 4,
        ..DEFAULT
    });
    let (addr, key) = (rig.mr.addr, rig.mr.rkey);
    let add = atomic_eth(addr, key, 1, 0);
    let write = |psn| packet(0x0a, psn, false, &reth(0, key, 0), &[]);
    rig.feed(&write(RQ_PSN));
    rig.feed(&packet(0x0c, RQ_PSN + 1, true, &reth(addr, key, 4), &[]));
    rig.feed(&write(RQ_PSN + 2));
    rig.feed(&packet(0x14, RQ_PSN + 3, true, &add, &[]));
    let (now, mut tx, mut sent) = (rig.now, TxPacket::default(), Vec::new());
    while rig.run(|qp, env| qp.poll_last_response(now, env, &mut tx)) {
        let mut bytes = Vec::new();
        tx.copy_to(&mut bytes);
        sent.push(brief(&bytes));
        assert!(sent.len() < 10, "{sent:?}");
    }
    assert_eq!(sent, [(0x11, RQ_PSN + 2), (0x12, RQ_PSN + 3)]);
}

/// Acknowledging a PSN of the READ would indicate that the peer has received its data.
#[test]
fn dropped_read_is_not_acknowledged() {
    for ack_request in [false, true] {
        let mut rig = Rig::new();
        let (addr, key) = (rig.mr.addr, rig.mr.rkey);
        rig.post_recv(1, 64);
        rig.feed(&packet(0x04, RQ_PSN, true, &[], b"bye!"));
        assert_eq!(rig.sent_brief(), [(0x11, RQ_PSN)]);
        rig.feed(&packet(0x0c, RQ_PSN + 1, true, &reth(addr, key, 600), &[]));
        // The acknowledgement was lost, so the SEND is repeated.
        rig.feed(&packet(0x04, RQ_PSN, ack_request, &[], b"bye!"));
        rig.run(RcQp::to_error);
        assert_eq!(rig.sent_brief(), [(0x11, RQ_PSN)], "asks: {ack_request}");
    }
}

#[test]
fn nak_is_sent_on_close() {
    let mut rig = Rig::new();
    rig.feed(&packet(0x0a, RQ_PSN, true, &reth(0, RKey(77), 4), b"evil"));
    assert!(!rig.events().is_empty());
    rig.run(RcQp::to_error);
    let sent = rig.sent();
    // NAK, remote access error (IBTA table 46).
    assert_eq!(
        (sent.len(), brief(&sent[0]), sent[0][12]),
        (1, (0x11, RQ_PSN), 0x62)
    );
}

/// A READ needs memory that now belongs to the owner again, but the result of an atomic is stored
/// in the QP.
#[test]
fn closing_responds_only_to_atomics() {
    let mut rig = Rig::with(&Options {
        reads: 4,
        ..DEFAULT
    });
    let (addr, key) = (rig.mr.addr, rig.mr.rkey);
    rig.feed(&packet(0x0c, RQ_PSN, true, &reth(addr, key, 8), &[]));
    let add = atomic_eth(addr, key, 1, 0);
    rig.feed(&packet(0x14, RQ_PSN + 1, true, &add, &[]));
    rig.run(RcQp::to_error);
    assert_eq!(rig.sent_brief(), [(0x12, RQ_PSN + 1)]);
}

#[test]
fn marked_data_triggers_limited_cnps() {
    let mut rig = Rig::new();
    let (addr, key) = (rig.mr.addr, rig.mr.rkey);
    let write = |rig: &mut Rig, psn| {
        let mut p = packet(0x0a, RQ_PSN + psn, false, &reth(addr, key, 4), &[1; 4]);
        // The P_Key of a limited member is copied.
        p[2] = 0x7f;
        rig.feed_marked(&p);
        rig.sent()
    };
    let mut cnp = vec![0x81, 0, 0x7f, 0xff, 0x40, 0, 0, 0x22];
    cnp.resize(28, 0);
    assert_eq!(write(&mut rig, 0), [cnp.clone()]);
    assert!(write(&mut rig, 1).is_empty(), "too soon");
    rig.now += Duration::from_micros(49);
    assert!(write(&mut rig, 2).is_empty());
    rig.now += Duration::from_micros(1);
    assert_eq!(write(&mut rig, 3), [cnp]);
    // Don't send a notification without a mark, or for a packet without data.
    rig.now += Duration::from_millis(1);
    rig.feed(&packet(
        0x0a,
        RQ_PSN + 4,
        false,
        &reth(addr, key, 4),
        &[1; 4],
    ));
    rig.feed_marked(&packet(0x0a, RQ_PSN + 5, true, &reth(0, key, 0), &[]));
    assert_eq!(rig.sent_brief(), [(0x11, RQ_PSN + 5)]);
    let c = rig.qp.counters();
    assert_eq!((c.rx_marked, c.tx_cnps), (4, 2));
}

/// Returns the time needed to send all packets.
fn time_to_send(rig: &mut Rig, packets: usize) -> Duration {
    let (start, mut sent) = (rig.now, rig.sent().len());
    while sent < packets {
        rig.expire();
        sent += rig.sent().len();
    }
    rig.now - start
}

#[test]
fn cnps_pace_read_responses_temporarily() {
    let mut rig = Rig::new();
    let (addr, key) = (rig.mr.addr, rig.mr.rkey);
    let mut psn = RQ_PSN;
    let mut read = |rig: &mut Rig, packets: u32| {
        rig.feed(&packet(
            0x0c,
            psn,
            true,
            &reth(addr, key, 256 * packets),
            &[],
        ));
        psn += packets;
        time_to_send(rig, packets as usize)
    };
    assert_eq!(read(&mut rig, 20), Duration::ZERO);
    rig.now += Duration::from_micros(200);
    rig.notify();
    let slow = read(&mut rig, 116);
    assert!(
        (900..1300).contains(&slow.as_micros()),
        "ten microseconds each, and an eighth: {slow:?}"
    );
    // The number of notifications does not matter.
    for _ in 0..1000 {
        rig.now += Duration::from_micros(100);
        rig.notify();
    }
    assert_eq!(read(&mut rig, 16), Duration::ZERO, "few are not worth it");
    let floor = read(&mut rig, 36);
    assert!(
        floor > slow && floor < Duration::from_millis(2 * 36),
        "{floor:?}"
    );
    rig.now += Duration::from_millis(70);
    assert_eq!(read(&mut rig, 40), Duration::ZERO, "it ends by itself");
    assert_eq!(rig.qp.poll_timeout(), None);
}
