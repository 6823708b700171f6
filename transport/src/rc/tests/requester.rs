//! Scripts of the sending side: packets out, responses in.

use super::*;
use crate::verbs::{AsyncEvent, PostReason, WcOpcode};
use WcStatus::{
    BadRespErr, LocProtErr, MwBindErr, RemAccessErr, RemInvReqErr, RemOpErr, RetryExcErr,
    RnrRetryExcErr, Success, WrFlushErr,
};

const READ: SendOp = SendOp::Read(PEER);
const WRITE: SendOp = SendOp::Write(PEER);
const UNLIMITED: u8 = 0x1f;

#[test]
fn a_send_is_cut_at_the_mtu_and_asks_at_its_end() {
    let mut rig = Rig::new();
    rig.memory.write(0, &bytes(513));
    rig.post_flags(
        1,
        SendOp::SendImm(0x0102_0304),
        513,
        SendFlags::SIGNALED | SendFlags::SOLICITED,
    );
    let sent = rig.sent();
    assert_eq!(sent.len(), 3);
    assert_eq!(
        sent[0][..12],
        [0x00, 0x40, 0xff, 0xff, 0, 0, 0, 0x22, 0, 0, 2, 0]
    );
    assert_eq!(
        sent[1][..12],
        [0x01, 0x40, 0xff, 0xff, 0, 0, 0, 0x22, 0, 0, 2, 1]
    );
    // Solicited, three bytes of padding, ACK asked for; immediate data; one byte of payload.
    assert_eq!(
        sent[2],
        [
            0x03,
            0xf0,
            0xff,
            0xff,
            0,
            0,
            0,
            0x22,
            0x80,
            0,
            2,
            2,
            1,
            2,
            3,
            4,
            bytes(513)[512],
            0,
            0,
            0
        ]
    );
    assert_eq!([&sent[0][12..], &sent[1][12..]].concat(), bytes(512));
    assert!(rig.sends().is_empty());
    rig.ack(SQ_PSN + 2, UNLIMITED);
    assert_eq!(rig.sends(), [(1, Success)]);
    assert_eq!(rig.qp.poll_timeout(), None);
}

#[test]
fn every_operation_has_its_opcodes_and_headers() {
    let mut rig = Rig::with(&Options {
        window: 64,
        ..DEFAULT
    });
    let imm = 0xdead_beef;
    let key = RKey(0x5566_7788);
    for (id, op) in [
        SendOp::Send,
        SendOp::SendInv(key),
        WRITE,
        SendOp::WriteImm(PEER, imm),
    ]
    .into_iter()
    .enumerate()
    {
        rig.post(id as u64, op, 0);
        rig.post(id as u64, op, 600);
    }
    let sent = rig.sent();
    let opcodes: Vec<u8> = sent.iter().map(|p| p[0]).collect();
    assert_eq!(
        opcodes,
        [
            0x04, 0x00, 0x01, 0x02, 0x17, 0x00, 0x01, 0x16, 0x0a, 0x06, 0x07, 0x08, 0x0b, 0x06,
            0x07, 0x09
        ]
    );
    assert_eq!(sent[4][12..], [0x55, 0x66, 0x77, 0x88]);
    let to = |len: u32| reth(0x1122_3344_5566_7788, RKey(0xabcd_ef01), len);
    assert_eq!(sent[8][12..], to(0));
    assert_eq!(sent[9][12..28], to(600));
    assert_eq!(
        sent[12][12..],
        [to(0), vec![0xde, 0xad, 0xbe, 0xef]].concat()
    );
    assert_eq!(sent[15][12..16], [0xde, 0xad, 0xbe, 0xef]);
}

#[test]
fn chained_messages_share_an_acknowledgement() {
    let mut rig = Rig::new();
    for id in 0..3 {
        let flags = if id == 2 {
            SendFlags::SIGNALED
        } else {
            SendFlags::empty()
        };
        rig.post_flags(id, SendOp::Send, 10, flags);
    }
    // Only the last of the chain asks; ACK requests come every eight packets at the latest.
    assert_eq!(
        rig.sent_brief(),
        [(4, SQ_PSN), (4, SQ_PSN + 1), (4, (SQ_PSN + 2) | ASKS)]
    );
    rig.ack(SQ_PSN + 1, UNLIMITED);
    assert_eq!(rig.sends(), []);
    rig.ack(SQ_PSN + 2, UNLIMITED);
    assert_eq!(rig.sends(), [(2, Success)]);
    rig.post(3, WRITE, 256 * 12);
    let asking: Vec<usize> = rig
        .sent_brief()
        .iter()
        .enumerate()
        .filter(|(_, (_, psn))| psn & ASKS != 0)
        .map(|(i, _)| i)
        .collect();
    assert_eq!(asking, [7, 11]);
}

/// Has the peer send a message that asks for an acknowledgement.
fn ask(rig: &mut Rig, psn: u32) {
    rig.post_recv(9, 64);
    rig.feed(&packet(0x04, psn, true, &[], &[1; 8]));
}

#[test]
fn an_acknowledgement_leaves_ahead_of_the_messages_that_are_ready() {
    let mut rig = Rig::new();
    ask(&mut rig, RQ_PSN);
    rig.post(1, SendOp::Write(PEER), 256);
    rig.post(2, SendOp::Send, 16);
    let sent = [(0x11, RQ_PSN), (0x0a, SQ_PSN), (0x04, (SQ_PSN + 1) | ASKS)];
    assert_eq!(rig.sent_brief(), sent);
    ask(&mut rig, RQ_PSN + 1);
    assert_eq!(rig.sent_brief(), [(0x11, RQ_PSN + 1)], "it waits for none");
}

#[test]
fn an_acknowledgement_leaves_behind_the_reads_that_are_ready() {
    let mut rig = Rig::with(&Options {
        window: 64,
        ..DEFAULT
    });
    ask(&mut rig, RQ_PSN);
    rig.post(1, SendOp::Read(PEER), 16);
    rig.post(2, SendOp::Read(PEER), 16);
    rig.post(3, SendOp::Send, 16);
    let sent: Vec<_> = rig.sent_brief().into_iter().map(|(op, _)| op).collect();
    assert_eq!(sent, [0x0c, 0x0c, 0x11, 0x04]);
}

#[test]
fn a_read_is_answered_packet_by_packet() {
    let mut rig = Rig::new();
    rig.post(1, READ, 600);
    rig.post(2, SendOp::Send, 4);
    let sent = rig.sent();
    assert_eq!(brief(&sent[0]), (0x0c, SQ_PSN | ASKS));
    assert_eq!(sent[0][12..], reth(PEER.addr, PEER.rkey, 600));
    // The READ takes three PSNs.
    assert_eq!(brief(&sent[1]), (0x04, (SQ_PSN + 3) | ASKS));
    let data = bytes(600);
    let aeth = [UNLIMITED, 0, 0, 1];
    rig.feed(&packet(0x0d, SQ_PSN, false, &aeth, &data[..256]));
    rig.feed(&packet(0x0e, SQ_PSN + 1, false, &[], &data[256..512]));
    assert_eq!(rig.sends(), []);
    rig.feed(&packet(0x0f, SQ_PSN + 2, false, &aeth, &data[512..]));
    assert_eq!(rig.sends(), [(1, Success)]);
    assert_eq!(rig.memory.slice(0..600).unwrap().to_vec(), data);
    rig.ack(SQ_PSN + 3, UNLIMITED);
    assert_eq!(rig.sends(), [(2, Success)]);
}

#[test]
fn a_lost_read_response_is_asked_for_from_the_first_missing_byte() {
    let mut rig = Rig::new();
    rig.post(1, READ, 700);
    rig.post(2, SendOp::Send, 4);
    rig.sent();
    let aeth = [UNLIMITED, 0, 0, 1];
    rig.feed(&packet(0x0d, SQ_PSN, false, &aeth, &bytes(256)));
    // The acknowledgement of the SEND implies that the rest of the READ was answered.
    rig.ack(SQ_PSN + 3, UNLIMITED);
    let sent = rig.sent();
    assert_eq!(brief(&sent[0]), (0x0c, (SQ_PSN + 1) | ASKS));
    assert_eq!(sent[0][12..], reth(PEER.addr + 256, PEER.rkey, 444));
    assert_eq!(brief(&sent[1]), (0x04, (SQ_PSN + 3) | ASKS));
    // The same sign again does not ask again.
    rig.ack(SQ_PSN + 3, UNLIMITED);
    assert!(rig.sent().is_empty());
    assert_eq!(rig.qp.counters().implied_naks, 1);
    rig.feed(&packet(0x0d, SQ_PSN + 1, false, &aeth, &bytes(256)));
    rig.feed(&packet(0x0f, SQ_PSN + 2, false, &aeth, &bytes(188)));
    rig.ack(SQ_PSN + 3, UNLIMITED);
    assert_eq!(rig.sends(), [(1, Success), (2, Success)]);
}

#[test]
fn a_long_read_is_asked_for_in_pieces_and_repeated_in_parts_of_them() {
    let mut rig = Rig::with(&Options {
        window: 8,
        ..DEFAULT
    });
    rig.post(1, READ, 256 * 10);
    let ask = |rig: &mut Rig| -> Vec<(u32, u32)> {
        let len = |p: &[u8]| u32::from_be_bytes(p[24..28].try_into().unwrap());
        rig.sent()
            .iter()
            .map(|p| (brief(p).1 & !ASKS, len(p)))
            .collect()
    };
    assert_eq!(ask(&mut rig), [(SQ_PSN, 1024), (SQ_PSN + 4, 1024)]);
    let aeth = [UNLIMITED, 0, 0, 1];
    rig.feed(&packet(0x0d, SQ_PSN, false, &aeth, &bytes(256)));
    rig.expire();
    // What is left of the first piece, although the window after a timeout is four packets.
    assert_eq!(ask(&mut rig), [(SQ_PSN + 1, 768)]);
    for psn in 1..4 {
        let opcode = [0x0d, 0x0e, 0x0f][psn as usize - 1];
        let ext = if psn == 2 { &[][..] } else { &aeth[..] };
        rig.feed(&packet(opcode, SQ_PSN + psn, false, ext, &bytes(256)));
    }
    assert_eq!(ask(&mut rig), [(SQ_PSN + 4, 1024)]);
    // A second loss makes the window smaller than the piece, which is asked for in parts, one after
    // the other.
    rig.expire();
    assert_eq!(ask(&mut rig), [(SQ_PSN + 4, 512)]);
    rig.feed(&packet(0x0d, SQ_PSN + 4, false, &aeth, &bytes(256)));
    assert_eq!(ask(&mut rig), []);
    rig.feed(&packet(0x0f, SQ_PSN + 5, false, &aeth, &bytes(256)));
    assert_eq!(ask(&mut rig), [(SQ_PSN + 6, 512)]);
}

#[test]
fn an_atomic_brings_back_the_old_value() {
    let mut rig = Rig::new();
    let remote = RemoteAddr {
        addr: 0x40,
        rkey: RKey(9),
    };
    let (compare, swap) = (0x0101, 0x0202);
    rig.post(
        1,
        SendOp::CmpSwap {
            remote,
            compare,
            swap,
        },
        8,
    );
    rig.post(2, SendOp::FetchAdd { remote, add: 5 }, 8);
    let sent = rig.sent();
    assert_eq!(brief(&sent[0]), (0x13, SQ_PSN | ASKS));
    assert_eq!(sent[0][12..], atomic_eth(0x40, RKey(9), 0x0202, 0x0101));
    assert_eq!(brief(&sent[1]), (0x14, (SQ_PSN + 1) | ASKS));
    assert_eq!(sent[1][12..], atomic_eth(0x40, RKey(9), 5, 0));
    let answer = [&[UNLIMITED, 0, 0, 1][..], &0x1234_5678u64.to_be_bytes()].concat();
    rig.feed(&packet(0x12, SQ_PSN, false, &answer, &[]));
    assert_eq!(rig.sends(), [(1, Success)]);
    assert_eq!(
        rig.memory.slice(0..8).unwrap().to_vec(),
        0x1234_5678u64.to_ne_bytes()
    );
}

#[test]
fn what_follows_an_atomic_is_repeated_with_it() {
    let mut rig = Rig::new();
    let add = SendOp::FetchAdd {
        remote: RemoteAddr { addr: 8, ..PEER },
        add: 1,
    };
    rig.post(1, add, 8);
    rig.post(2, SendOp::Send, 4);
    let both = [(0x14, SQ_PSN), (0x04, (SQ_PSN + 1) | ASKS)];
    let brief = |sent: Vec<(u8, u32)>| -> Vec<_> {
        let plain = |(op, psn)| (op, if op == 0x14 { psn & !ASKS } else { psn });
        sent.into_iter().map(plain).collect()
    };
    assert_eq!(brief(rig.sent_brief()), both);
    rig.expire();
    assert_eq!(brief(rig.sent_brief()), both);
}

#[test]
fn no_more_reads_are_out_than_the_initiator_depth() {
    let mut rig = Rig::new();
    for id in 0..4 {
        rig.post(id, READ, 4);
    }
    rig.post(4, SendOp::Send, 4);
    assert_eq!(rig.sent_brief().len(), 2);
    rig.feed(&packet(0x10, SQ_PSN, false, &[UNLIMITED, 0, 0, 1], &[1; 4]));
    assert_eq!(rig.sent_brief(), [(0x0c, (SQ_PSN + 2) | ASKS)]);
}

#[test]
fn a_fence_waits_for_reads_before_it() {
    let mut rig = Rig::new();
    rig.post(1, READ, 4);
    rig.post(2, WRITE, 4);
    rig.post_flags(3, SendOp::Send, 4, SendFlags::SIGNALED | SendFlags::FENCE);
    assert_eq!(
        rig.sent_brief(),
        [(0x0c, SQ_PSN | ASKS), (0x0a, (SQ_PSN + 1) | ASKS)]
    );
    rig.feed(&packet(0x10, SQ_PSN, false, &[UNLIMITED, 0, 0, 1], &[1; 4]));
    assert_eq!(rig.sent_brief(), [(0x04, (SQ_PSN + 2) | ASKS)]);
    rig.ack(SQ_PSN + 2, UNLIMITED);
    assert_eq!(rig.sends(), [(1, Success), (2, Success), (3, Success)]);
}

#[test]
fn a_sequence_nak_goes_back_into_the_middle_of_a_message() {
    let mut rig = Rig::new();
    rig.post(1, WRITE, 4);
    rig.post(2, SendOp::Send, 256 * 4);
    assert_eq!(rig.sent_brief().len(), 5);
    rig.ack(SQ_PSN + 2, 0x60);
    assert_eq!(rig.sends(), [(1, Success)]);
    assert_eq!(
        rig.sent_brief(),
        [
            (0x01, SQ_PSN + 2),
            (0x01, SQ_PSN + 3),
            (0x02, (SQ_PSN + 4) | ASKS)
        ]
    );
    assert_eq!(rig.qp.counters().retransmits, 3);
    // An acknowledgement from before the loss may still arrive.
    rig.ack(SQ_PSN + 1, UNLIMITED);
    rig.ack(SQ_PSN + 4, UNLIMITED);
    assert_eq!(rig.sends(), [(2, Success)]);
}

#[test]
fn an_acknowledgement_that_comes_after_going_back_is_used() {
    let mut rig = Rig::new();
    rig.post(1, SendOp::Send, 256 * 3);
    rig.post(2, SendOp::Send, 4);
    rig.sent();
    rig.expire();
    rig.ack(SQ_PSN + 2, UNLIMITED);
    assert_eq!(rig.sends(), [(1, Success)]);
    assert_eq!(rig.sent_brief(), [(0x04, (SQ_PSN + 3) | ASKS)]);
}

#[test]
fn responses_to_nothing_that_was_sent_are_ignored() {
    let mut rig = Rig::new();
    rig.post(1, SendOp::Send, 4);
    rig.ack(SQ_PSN, UNLIMITED);
    rig.sent();
    for psn in [
        SQ_PSN + 1,
        SQ_PSN - 1,
        SQ_PSN + 0x7f_ffff,
        SQ_PSN.wrapping_sub(0x80_0000),
    ] {
        for syndrome in [UNLIMITED, 0x60, 0x62, 0x2e] {
            rig.ack(psn, syndrome);
        }
        let answer = [UNLIMITED, 0, 0, 0];
        rig.feed(&packet(0x10, psn & 0xff_ffff, false, &answer, &[1; 4]));
    }
    assert_eq!(rig.sends(), []);
    assert!(rig.sent().is_empty());
    assert_eq!(rig.qp.counters().stale_responses, 21);
    // Reserved syndromes mean nothing either.
    rig.ack(SQ_PSN, 0x40);
    rig.ack(SQ_PSN, 0x7f);
    assert_eq!(rig.sends(), []);
    rig.ack(SQ_PSN, UNLIMITED);
    assert_eq!(rig.sends(), [(1, Success)]);
}

#[test]
fn an_rnr_nak_waits_as_long_as_it_says() {
    let mut rig = Rig::new();
    rig.post(1, SendOp::Send, 256 * 2);
    rig.post(2, WRITE, 4);
    rig.sent();
    // Code 14 is 1.28 ms.
    rig.ack(SQ_PSN, 0x2e);
    assert!(rig.sent().is_empty());
    // The network doubles the NAK: that is not a second retry.
    rig.ack(SQ_PSN, 0x2e);
    assert_eq!(rig.expire(), Duration::from_micros(1280));
    assert_eq!(
        rig.sent_brief(),
        [
            (0x00, SQ_PSN),
            (0x02, SQ_PSN + 1),
            (0x0a, (SQ_PSN + 2) | ASKS)
        ]
    );
    // Progress restores the retries: here the first packet is through.
    rig.ack(SQ_PSN + 1, 0x2e);
    rig.expire();
    rig.sent();
    rig.ack(SQ_PSN + 1, 0x2e);
    assert_eq!(rig.sends(), [(1, RnrRetryExcErr), (2, WrFlushErr)]);
    assert_eq!(rig.qp.state(), QpState::Error);
    assert_eq!(rig.qp.counters().rx_rnr_naks, 4);
}

#[test]
fn seven_rnr_retries_are_without_end() {
    let mut rig = Rig::with(&Options {
        rnr_retry: 7,
        ..DEFAULT
    });
    rig.post(1, SendOp::Send, 4);
    for _ in 0..100 {
        assert_eq!(rig.sent_brief(), [(0x04, SQ_PSN | ASKS)]);
        rig.ack(SQ_PSN, 0x21);
        assert_eq!(rig.expire(), Duration::from_micros(10));
    }
    rig.sent();
    rig.ack(SQ_PSN, UNLIMITED);
    assert_eq!(rig.sends(), [(1, Success)]);
}

#[test]
fn each_fatal_nak_has_its_status_and_flushes_the_rest_in_order() {
    for (syndrome, status) in [(0x61, RemInvReqErr), (0x62, RemAccessErr), (0x63, RemOpErr)] {
        let mut rig = Rig::new();
        rig.post_recv(10, 8);
        rig.post_recv(11, 8);
        rig.post(1, SendOp::Send, 4);
        rig.post_flags(2, WRITE, 600, SendFlags::empty());
        rig.post_flags(3, READ, 4, SendFlags::empty());
        rig.post(4, SendOp::Send, 4);
        rig.sent();
        rig.ack(SQ_PSN + 2, syndrome);
        let ends: Vec<_> = rig
            .events()
            .into_iter()
            .map(|e| match e {
                RcEvent::Send(c) | RcEvent::Recv(c) => (c.wr_id.0, c.status),
                RcEvent::Async(e) => panic!("{e:?}"),
            })
            .collect();
        assert_eq!(
            ends,
            [
                (1, Success),
                (2, status),
                (3, WrFlushErr),
                (4, WrFlushErr),
                (10, WrFlushErr),
                (11, WrFlushErr)
            ]
        );
        assert!(rig.sent().is_empty());
        assert_eq!(rig.qp.poll_timeout(), None);
        let c = rig.qp.counters();
        let by_kind = [c.rx_nak_invalid, c.rx_nak_access, c.rx_nak_operation];
        assert_eq!(
            by_kind,
            [0x61, 0x62, 0x63].map(|s| u64::from(s == syndrome))
        );
    }
}

#[test]
fn an_armed_connection_asks_for_its_other_path_and_begins_again_there() {
    let mut rig = Rig::new();
    rig.qp.set_armed(true);
    rig.post(1, WRITE, 256 * 40);
    let window = rig.sent().len();
    for _ in 0..6 {
        assert!(!rig.qp.take_path_wish());
        rig.expire();
        let repeated = rig.sent().len();
        assert!(repeated < window, "a narrow window after time-outs");
    }
    assert!(rig.qp.take_path_wish());
    assert!(!rig.qp.take_path_wish(), "once");
    assert!(rig.sends().is_empty());
    let now = rig.now;
    rig.qp.on_migrated(now, TIMEOUT);
    // The acknowledgement of what came before shows the path, if there is nothing else.
    let mut sent = rig.sent_brief();
    assert!(sent.contains(&(0x11, RQ_PSN - 1)));
    sent.retain(|packet| *packet != (0x11, RQ_PSN - 1));
    assert_eq!(sent.len(), window, "the window of a new connection");
    assert_eq!(sent[0].1 & !ASKS, SQ_PSN);
    // It has no further path.
    for _ in 0..6 {
        rig.expire();
        rig.sent();
    }
    assert_eq!(rig.sends(), [(1, RetryExcErr)]);
}

#[test]
fn only_what_the_peer_has_reason_to_send_is_known() {
    let mut rig = Rig::new();
    rig.post(1, WRITE, 4);
    rig.sent();
    let knows = |rig: &Rig, opcode: u8, psn: u32, ext: &[u8]| {
        let mut datagram = packet(opcode, psn & 0xff_ffff, false, ext, &[]);
        datagram.extend_from_slice(&[0; 4]);
        rig.qp.knows(&Packet::parse(&datagram).unwrap())
    };
    let ack = |rig: &Rig, psn| knows(rig, 0x11, psn, &[UNLIMITED, 0, 0, 0]);
    let send = |rig: &Rig, psn| knows(rig, 0x04, psn, &[]);
    assert!(ack(&rig, SQ_PSN) && ack(&rig, SQ_PSN.wrapping_sub(1)));
    assert!(!ack(&rig, SQ_PSN + 1), "it was not sent");
    assert!(!ack(&rig, SQ_PSN.wrapping_sub(5000)));
    assert!(send(&rig, RQ_PSN) && send(&rig, RQ_PSN.wrapping_sub(4096)));
    assert!(!send(&rig, RQ_PSN + 1) && !send(&rig, RQ_PSN.wrapping_sub(4097)));
    // A READ of many packets may be repeated from any of them.
    let mr = rig.mr;
    rig.feed(&packet(0x0c, RQ_PSN, true, &reth(0, mr.rkey, 256 * 9), &[]));
    assert!(send(&rig, RQ_PSN + 8) && send(&rig, RQ_PSN + 9));
    assert!(!send(&rig, RQ_PSN + 10));
    rig.run(RcQp::to_error);
    assert!(!send(&rig, RQ_PSN + 9) && !ack(&rig, SQ_PSN));
}

#[test]
fn retries_are_spent_in_time_without_progress() {
    let mut rig = Rig::new();
    rig.post(1, SendOp::Send, 4);
    rig.post(2, SendOp::Send, 4);
    rig.sent();
    // One retry: it is spent after 3·T, and the request fails after 3·T more.
    for _ in 0..5 {
        assert_eq!(rig.expire(), T);
        assert_eq!(rig.sent_brief()[0].1 & !ASKS, SQ_PSN);
    }
    // Progress starts the count again.
    rig.ack(SQ_PSN, UNLIMITED);
    assert_eq!(rig.sends(), [(1, Success)]);
    // The window is a part of a packet by now: the next one leaves a little later.
    rig.sent();
    assert!(rig.expire() < T);
    for _ in 0..5 {
        assert_eq!(rig.sent_brief(), [(0x04, (SQ_PSN + 1) | ASKS)]);
        assert_eq!(rig.expire(), T);
    }
    rig.sent();
    rig.expire();
    assert_eq!(rig.sends(), [(2, RetryExcErr)]);
    assert_eq!(rig.qp.counters().timeouts, 11);
}

#[test]
fn credits_limit_what_consumes_receives_and_let_one_packet_try() {
    let mut rig = Rig::new();
    for id in 0..4 {
        rig.post(id, SendOp::Send, 300);
    }
    rig.post(4, WRITE, 4);
    // No limit is known yet.
    assert_eq!(rig.sent().len(), 9);
    // The first is done and the peer has one receive: the rest of what went out is lost.
    rig.ack(SQ_PSN + 1, 0x01);
    rig.ack(SQ_PSN + 2, 0x60);
    assert_eq!(
        rig.sent_brief(),
        [(0x00, SQ_PSN + 2), (0x02, (SQ_PSN + 3) | ASKS)],
        "the second message, and nothing after it"
    );
    rig.ack(SQ_PSN + 3, 0x00);
    assert_eq!(
        rig.sent_brief(),
        [(0x00, (SQ_PSN + 4) | ASKS)],
        "one packet beyond the limit"
    );
    // Its acknowledgement shows that the message has its receive.
    rig.ack(SQ_PSN + 4, 0x01);
    assert_eq!(rig.sent_brief(), [(0x02, (SQ_PSN + 5) | ASKS)]);
    rig.ack(SQ_PSN + 5, UNLIMITED);
    assert_eq!(rig.sent_brief().len(), 3);
    rig.ack(SQ_PSN + 8, UNLIMITED);
    assert_eq!(rig.sends().len(), 5);
}

#[test]
fn the_window_bounds_what_is_in_flight() {
    let mut rig = Rig::with(&Options {
        window: 5,
        ..DEFAULT
    });
    rig.post(1, WRITE, 256 * 12);
    let sent = rig.sent_brief();
    assert_eq!(sent.len(), 5);
    assert_eq!(
        sent[4].1,
        (SQ_PSN + 4) | ASKS,
        "the packet that fills the window asks"
    );
    rig.ack(SQ_PSN + 2, UNLIMITED);
    assert_eq!(rig.sent_brief().len(), 3);
    // After a timeout half as many go.
    rig.expire();
    assert_eq!(rig.sent_brief().len(), 2);
    rig.ack(SQ_PSN + 3, UNLIMITED);
    assert_eq!(rig.sent_brief().len(), 1);
}

#[test]
fn psns_wrap() {
    let mut rig = Rig::with(&Options {
        sq_psn: 0xff_fffe,
        ..DEFAULT
    });
    rig.post(1, SendOp::Send, 256 * 3);
    rig.post(2, READ, 256 * 2);
    assert_eq!(
        rig.sent_brief(),
        [(0, 0xff_fffe), (1, 0xff_ffff), (2, ASKS), (0x0c, 1 | ASKS)]
    );
    rig.ack(0xff_ffff, 0x60);
    assert_eq!(
        rig.sent_brief(),
        [(1, 0xff_ffff), (2, ASKS), (0x0c, 1 | ASKS)]
    );
    rig.feed(&packet(0x0d, 1, false, &[UNLIMITED, 0, 0, 1], &bytes(256)));
    rig.feed(&packet(0x0f, 2, false, &[UNLIMITED, 0, 0, 2], &bytes(256)));
    assert_eq!(rig.sends(), [(1, Success), (2, Success)]);
}

#[test]
fn registrations_run_in_order() {
    let mut rig = Rig::new();
    let fast = rig.mrs.alloc_fast(PD, 2).unwrap();
    rig.mrs
        .map_sg(fast.id, &[rig.memory.slice(0..100).unwrap()])
        .unwrap();
    let (mr, key, access) = (fast.id, fast.rkey.next(), Access::REMOTE_READ);
    rig.post(1, SendOp::Send, 4);
    rig.post(2, SendOp::RegMr { mr, key, access }, 0);
    rig.post(3, SendOp::Send, 4);
    rig.post(4, SendOp::LocalInv(key), 0);
    rig.post(5, SendOp::Send, 4);
    // Neither waits for what is in flight, which does not need the key: one acknowledgement is
    // asked for.
    let (first, third) = (SQ_PSN, SQ_PSN + 2);
    assert_eq!(
        rig.sent_brief(),
        [(0x04, first), (0x04, first + 1), (0x04, third | ASKS)]
    );
    assert!(!rig.mrs.query(mr).unwrap().valid);
    // They complete in their turn.
    assert_eq!(rig.sends(), []);
    rig.ack(first, UNLIMITED);
    assert_eq!(rig.sends(), [(1, Success), (2, Success)]);
    rig.ack(first + 1, UNLIMITED);
    let done = rig.events();
    assert!(
        matches!(done[..], [RcEvent::Send(_), RcEvent::Send(c)] if c.opcode == WcOpcode::LocalInv)
    );
    rig.post(6, SendOp::LocalInv(key), 0);
    rig.post(7, SendOp::Send, 4);
    rig.sent();
    rig.ack(SQ_PSN + 2, UNLIMITED);
    rig.sent();
    assert_eq!(rig.sends(), [(5, Success), (6, MwBindErr), (7, WrFlushErr)]);
}

#[test]
fn an_invalidation_waits_for_requests_that_name_its_key_and_behind_a_fence_for_all() {
    for is_fenced in [false, true] {
        let mut rig = Rig::new();
        let fast = rig.mrs.alloc_fast(PD, 2).unwrap();
        let memory = rig.memory.slice(0..100).unwrap();
        let addr = memory.addr();
        rig.mrs.map_sg(fast.id, &[memory]).unwrap();
        let (mr, key, access) = (fast.id, fast.rkey.next(), Access::REMOTE_READ);
        rig.post(1, SendOp::RegMr { mr, key, access }, 0);
        if is_fenced {
            rig.post(2, SendOp::Send, 4);
        } else {
            let sges = [Sge {
                addr,
                length: 4,
                lkey: LKey(key.0),
            }];
            let wr = SendWr::new(2, SendOp::Send, &sges).flags(SendFlags::SIGNALED);
            rig.run(|qp, env| qp.post_send(&[wr], env)).unwrap();
        }
        let flags = match is_fenced {
            true => SendFlags::SIGNALED | SendFlags::FENCE,
            false => SendFlags::SIGNALED,
        };
        rig.post_flags(3, SendOp::LocalInv(key), 0, flags);
        rig.post(4, SendOp::Send, 4);
        // What it waits for asks for its acknowledgement.
        assert_eq!(rig.sent_brief(), [(0x04, SQ_PSN | ASKS)]);
        assert!(rig.mrs.query(mr).unwrap().valid);
        rig.ack(SQ_PSN, UNLIMITED);
        assert_eq!(rig.sent_brief(), [(0x04, (SQ_PSN + 1) | ASKS)]);
        assert!(!rig.mrs.query(mr).unwrap().valid);
        assert_eq!(rig.sends(), [(1, Success), (2, Success), (3, Success)]);
    }
}

#[test]
fn cve_2021_47076_a_bad_local_key_completes_after_what_came_before() {
    // CVE-2021-47076: such a request gave no completion at all.
    let mut rig = Rig::new();
    rig.post(1, SendOp::Send, 4);
    let bad = [Sge {
        lkey: LKey(rig.mr.lkey.0 ^ 0x100),
        ..rig.sge(0, 4)
    }];
    let wrs = [
        SendWr::new(2, SendOp::Send, &bad).flags(SendFlags::empty()),
        SendWr::new(3, SendOp::Send, &[]),
    ];
    rig.run(|qp, env| qp.post_send(&wrs, env)).unwrap();
    assert_eq!(rig.sent_brief().len(), 1);
    assert_eq!(rig.sends(), []);
    rig.expire();
    assert_eq!(rig.sent_brief().len(), 1);
    rig.ack(SQ_PSN, UNLIMITED);
    assert_eq!(
        rig.sends(),
        [(1, Success), (2, LocProtErr), (3, WrFlushErr)]
    );
}

/// The message in front does not ask for an acknowledgement where another follows at once.
#[test]
fn a_message_in_front_of_a_bad_key_asks_without_waiting_for_the_timer() {
    // The key goes away before the first packet of its message, or in the middle.
    for before in [0, 2] {
        let mut rig = Rig::new();
        let whole = rig.memory.whole();
        let other = rig.mrs.reg(PD, &whole, Access::LOCAL_WRITE).unwrap();
        let sge = Sge {
            addr: rig.memory.addr(),
            length: 256,
            lkey: other.lkey,
        };
        rig.post(1, SendOp::Send, 4);
        let list = [sge; 2];
        let long = SendWr::new(2, SendOp::Send, &list);
        rig.run(|qp, env| qp.post_send(&[long], env)).unwrap();
        let (now, mut tx) = (rig.now, TxPacket::default());
        for _ in 0..before {
            assert!(rig.run(|qp, env| qp.poll_transmit(now, env, &mut tx)));
        }
        rig.mrs.dereg(other.id).unwrap();
        rig.sent();
        assert_eq!(rig.expire(), Duration::ZERO, "after {before} packets");
        assert_eq!(rig.sent_brief(), [(0x04, SQ_PSN | ASKS)]);
        rig.ack(SQ_PSN, UNLIMITED);
        assert_eq!(rig.sends(), [(1, Success), (2, LocProtErr)]);
    }
}

/// Their acknowledgement is on its way, and their memory may be gone.
#[test]
fn messages_that_have_asked_are_not_repeated_for_a_bad_key_behind_them() {
    let mut rig = Rig::new();
    rig.post(1, WRITE, 256 * 8);
    rig.post(2, SendOp::Send, 256 * 2);
    let bad = Sge {
        lkey: LKey(rig.mr.lkey.0 ^ 0x100),
        ..rig.sge(0, 4)
    };
    let wr = SendWr::new(3, SendOp::Send, std::slice::from_ref(&bad));
    rig.run(|qp, env| qp.post_send(&[wr], env)).unwrap();
    assert_eq!(rig.sent_brief().len(), 10);
    rig.expire();
    assert_eq!(rig.sent_brief(), [(0x02, (SQ_PSN + 9) | ASKS)]);
    rig.ack(SQ_PSN + 7, UNLIMITED);
    assert_eq!(rig.sends(), [(1, Success)]);
    rig.ack(SQ_PSN + 9, UNLIMITED);
    assert_eq!(rig.sends(), [(2, Success), (3, LocProtErr)]);
}

#[test]
fn a_response_that_does_not_fit_ends_the_connection() {
    let read = |len| packet(0x10, SQ_PSN, false, &[UNLIMITED, 0, 0, 1], &bytes(len));
    let atomic = [&[UNLIMITED, 0, 0, 1][..], &[0; 8]].concat();
    for (op, answer) in [
        (READ, read(3)),
        (READ, read(8)),
        (READ, packet(0x12, SQ_PSN, false, &atomic, &[])),
        (SendOp::Send, read(4)),
    ] {
        let mut rig = Rig::new();
        rig.post(1, op, 4);
        rig.sent();
        rig.feed(&answer);
        assert_eq!(rig.sends(), [(1, BadRespErr)]);
    }
}

#[test]
fn a_draining_queue_finishes_what_it_began() {
    let mut rig = Rig::with(&Options {
        window: 2,
        ..DEFAULT
    });
    rig.post(1, SendOp::Send, 256 * 3);
    rig.post(2, SendOp::Send, 4);
    assert_eq!(rig.sent_brief().len(), 2);
    rig.run(RcQp::to_sqd);
    rig.ack(SQ_PSN + 1, UNLIMITED);
    assert_eq!(rig.sent_brief(), [(0x02, (SQ_PSN + 2) | ASKS)]);
    rig.ack(SQ_PSN + 2, UNLIMITED);
    let events = rig.events();
    assert_eq!(events.len(), 2);
    assert_eq!(events[1], RcEvent::Async(AsyncEvent::SqDrained(QP)));
    assert!(rig.sent().is_empty());
    rig.qp.resume();
    assert_eq!(rig.sent_brief(), [(0x04, (SQ_PSN + 3) | ASKS)]);
}

#[test]
fn posts_depend_on_the_state() {
    for state in [QpState::Reset, QpState::Init, QpState::Rtr] {
        let mut rig = Rig::with(&Options { state, ..DEFAULT });
        let wr = SendWr::new(1, SendOp::Send, &[]);
        let error = rig.run(|qp, env| qp.post_send(&[wr], env)).unwrap_err();
        assert_eq!(error.reason, PostReason::InvalidState(state));
        let wr = RecvWr {
            wr_id: WrId(1),
            sges: &[],
        };
        let posted = rig.run(|qp, env| qp.post_recv(&[wr], env));
        assert_eq!(posted.is_ok(), state != QpState::Reset);
    }
    let mut rig = Rig::new();
    rig.run(RcQp::to_error);
    rig.post_flags(1, SendOp::Send, 4, SendFlags::empty());
    assert_eq!(rig.sends(), [(1, WrFlushErr)]);
    rig.post_recv(2, 4);
    assert!(matches!(rig.events()[..], [RcEvent::Recv(c)] if c.status == WrFlushErr));
    rig.qp.to_reset();
    assert_eq!(rig.qp.state(), QpState::Reset);
}

#[test]
fn a_chain_stops_at_the_request_that_does_not_fit() {
    let mut rig = Rig::new();
    let wrs: Vec<_> = (0..20).map(|i| SendWr::new(i, SendOp::Send, &[])).collect();
    let error = rig.run(|qp, env| qp.post_send(&wrs, env)).unwrap_err();
    assert_eq!((error.index, error.reason), (16, PostReason::QueueFull));
    assert_eq!(rig.qp.sends_outstanding(), 16);
}

#[test]
fn inline_data_travels_without_a_key() {
    let mut rig = Rig::new();
    let mut data = *b"inline!";
    let wr = SendWr::with_inline(1, SendOp::Send, &data);
    rig.run(|qp, env| qp.post_send(&[wr], env)).unwrap();
    data.fill(0);
    let sent = rig.sent();
    assert_eq!(sent[0][12..], *b"inline!\0");
    rig.expire();
    assert_eq!(rig.sent(), sent);
}

#[test]
fn the_first_retransmission_follows_the_measured_round_trip() {
    let mut rig = Rig::new();
    let mut cfg = *rig.qp.config();
    cfg.first_retransmit = Duration::from_millis(3);
    cfg.min_retransmit = Duration::from_micros(100);
    rig.qp = RcQp::new(cfg);
    rig.qp.to_init();
    rig.qp.to_rtr(&RtrParams {
        path_mtu: Mtu::Mtu256,
        dest_qpn: Qpn::new(0x22),
        rq_psn: Psn::new(RQ_PSN),
        max_dest_rd_atomic: 1,
        min_rnr_timer: RnrTimer::new(14),
        access: Access::empty(),
    });
    rig.qp.to_rts(&RtsParams {
        sq_psn: Psn::new(SQ_PSN),
        timeout: TIMEOUT,
        retry_cnt: 1,
        rnr_retry: 1,
        max_rd_atomic: 1,
    });
    rig.post(1, SendOp::Send, 4);
    rig.sent();
    assert_eq!(rig.expire(), Duration::from_millis(3));
    assert_eq!(rig.sent().len(), 1);
    // The acknowledgement of a repeated packet measures nothing.
    rig.ack(SQ_PSN, UNLIMITED);
    rig.post(2, SendOp::Send, 4);
    rig.sent();
    let wait = |rig: &Rig| rig.qp.poll_timeout().unwrap() - rig.now;
    assert_eq!(wait(&rig), Duration::from_millis(3));
    // One millisecond: three are allowed for the next, which takes as long.
    rig.now += Duration::from_millis(1);
    rig.ack(SQ_PSN + 1, UNLIMITED);
    rig.post(3, SendOp::Send, 4);
    rig.sent();
    assert_eq!(wait(&rig), Duration::from_millis(3));
    rig.now += Duration::from_millis(1);
    rig.ack(SQ_PSN + 2, UNLIMITED);
    rig.post(4, SendOp::Send, 4);
    rig.sent();
    assert_eq!(wait(&rig), Duration::from_micros(2500));
    // Each further one waits twice as long, up to the ACK timeout.
    for micros in [2500, 4194, 4194] {
        assert_eq!(rig.expire().as_micros(), micros);
        rig.sent();
    }
}

#[test]
fn a_timeout_that_was_too_early_costs_no_window() {
    let mut rig = Rig::new();
    rig.post(1, WRITE, 256 * 40);
    assert_eq!(rig.sent().len(), 16);
    rig.expire();
    assert_eq!(rig.sent().len(), 4);
    // Twelve packets are acknowledged, of which four were sent again: the others were never lost.
    rig.ack(SQ_PSN + 11, UNLIMITED);
    let sent = rig.sent_brief();
    assert_eq!((sent.len(), sent[0].1 & !ASKS), (16, SQ_PSN + 12));
    // Here all that is acknowledged may have been sent again, and the window stays small.
    rig.expire();
    assert_eq!(rig.sent().len(), 4);
    rig.ack(SQ_PSN + 13, UNLIMITED);
    assert_eq!(rig.sent().len(), 4);
}

#[test]
fn a_notification_narrows_the_window_once_in_a_round_trip() {
    let mut rig = Rig::new();
    rig.post(1, WRITE, 256 * 200);
    assert_eq!(rig.sent().len(), 16);
    rig.notify();
    rig.notify();
    rig.ack(SQ_PSN + 15, UNLIMITED);
    assert_eq!(rig.sent().len(), 14);
    assert_eq!(rig.qp.counters().rx_cnps, 2);
    rig.ack(SQ_PSN + 29, UNLIMITED);
    assert_eq!(rig.sent().len(), 14);
    rig.notify();
    rig.ack(SQ_PSN + 43, UNLIMITED);
    assert_eq!(rig.sent().len(), 12);
}

/// Forged notifications slow a connection down, but do not stop it, and not for long.
#[test]
fn no_number_of_notifications_stops_a_connection() {
    let mut rig = Rig::new();
    rig.post(1, WRITE, 256 * 250);
    let mut acknowledged = 0;
    let trip = Duration::from_micros(50);
    let mut step = |rig: &mut Rig, hostile: bool| {
        let start = rig.now;
        if rig.sent().is_empty() {
            rig.expire();
            assert!(!rig.sent().is_empty());
        }
        assert_eq!(rig.qp.counters().timeouts, 0);
        let packets = rig.qp.counters().tx_packets as u32 - acknowledged;
        acknowledged += packets;
        rig.now += trip;
        for _ in 0..if hostile { 100 } else { 0 } {
            rig.notify();
        }
        rig.ack(SQ_PSN + acknowledged - 1, UNLIMITED);
        (rig.now - start) / packets
    };
    for _ in 0..60 {
        step(&mut rig, true);
    }
    let slow = step(&mut rig, true);
    assert!(slow > trip * 8 && slow < trip * 20, "{slow:?}");
    let peace = rig.now;
    for _ in 0..60 {
        step(&mut rig, false);
    }
    assert!(rig.now - peace < Duration::from_millis(20));
    assert!(step(&mut rig, false) < trip * 3);
}

#[test]
fn marked_responses_narrow_the_window_too() {
    let mut rig = Rig::new();
    rig.post(1, READ, 256 * 100);
    let asked = |rig: &mut Rig| rig.sent().iter().filter(|p| p[0] == 0x0c).count();
    assert_eq!(asked(&mut rig), 2, "eight packets each");
    let aeth = [UNLIMITED, 0, 0, 1];
    rig.feed_marked(&packet(0x0d, SQ_PSN, false, &aeth, &bytes(256)));
    for psn in 1..8 {
        let (op, ext) = if psn == 7 {
            (0x0f, &aeth[..])
        } else {
            (0x0e, &[][..])
        };
        rig.feed(&packet(op, SQ_PSN + psn, false, ext, &bytes(256)));
    }
    let sent = rig.sent();
    assert_eq!(
        sent.len(),
        1,
        "the notification: the window is eight, and eight are on their way"
    );
    assert_eq!(sent[0][0], 0x81);
}
