//! Scripts for the requester: checks packets sent and processes responses.

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
fn send_is_split_and_requests_final_ack() {
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
    // Solicited, three bytes of padding, ACK requested; immediate data; one byte of payload.
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
fn operations_use_correct_opcodes_and_headers() {
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
fn chained_messages_share_acknowledgement() {
    let mut rig = Rig::new();
    for id in 0..3 {
        let flags = if id == 2 {
            SendFlags::SIGNALED
        } else {
            SendFlags::empty()
        };
        rig.post_flags(id, SendOp::Send, 10, flags);
    }
    // Only the last message should request an ACK, or at least every eighth packet.
    assert_eq!(
        rig.sent_brief(),
        [
            (4, SQ_PSN),
            (4, SQ_PSN + 1),
            (4, (SQ_PSN + 2) | ACK_REQUEST)
        ]
    );
    rig.ack(SQ_PSN + 1, UNLIMITED);
    assert_eq!(rig.sends(), []);
    rig.ack(SQ_PSN + 2, UNLIMITED);
    assert_eq!(rig.sends(), [(2, Success)]);
    rig.post(3, WRITE, 256 * 12);
    let requesting: Vec<usize> = rig
        .sent_brief()
        .iter()
        .enumerate()
        .filter(|(_, (_, psn))| psn & ACK_REQUEST != 0)
        .map(|(i, _)| i)
        .collect();
    assert_eq!(requesting, [7, 11]);
}

/// Sends a message that requests an acknowledgement.
fn receive_request(rig: &mut Rig, psn: u32) {
    rig.post_recv(9, 64);
    rig.feed(&packet(0x04, psn, true, &[], &[1; 8]));
}

#[test]
fn ack_precedes_ready_messages() {
    let mut rig = Rig::new();
    receive_request(&mut rig, RQ_PSN);
    rig.post(1, SendOp::Write(PEER), 256);
    rig.post(2, SendOp::Send, 16);
    let sent = [
        (0x11, RQ_PSN),
        (0x0a, SQ_PSN),
        (0x04, (SQ_PSN + 1) | ACK_REQUEST),
    ];
    assert_eq!(rig.sent_brief(), sent);
    receive_request(&mut rig, RQ_PSN + 1);
    assert_eq!(rig.sent_brief(), [(0x11, RQ_PSN + 1)], "it waits for none");
}

#[test]
fn ack_follows_ready_reads() {
    let mut rig = Rig::with(&Options {
        window: 64,
        ..DEFAULT
    });
    receive_request(&mut rig, RQ_PSN);
    rig.post(1, SendOp::Read(PEER), 16);
    rig.post(2, SendOp::Read(PEER), 16);
    rig.post(3, SendOp::Send, 16);
    let sent: Vec<_> = rig.sent_brief().into_iter().map(|(op, _)| op).collect();
    assert_eq!(sent, [0x0c, 0x0c, 0x11, 0x04]);
}

#[test]
fn read_receives_response_packets() {
    let mut rig = Rig::new();
    rig.post(1, READ, 600);
    rig.post(2, SendOp::Send, 4);
    let sent = rig.sent();
    assert_eq!(brief(&sent[0]), (0x0c, SQ_PSN | ACK_REQUEST));
    assert_eq!(sent[0][12..], reth(PEER.addr, PEER.rkey, 600));
    // The READ uses three PSNs.
    assert_eq!(brief(&sent[1]), (0x04, (SQ_PSN + 3) | ACK_REQUEST));
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
fn lost_read_response_is_requested_from_gap() {
    let mut rig = Rig::new();
    rig.post(1, READ, 700);
    rig.post(2, SendOp::Send, 4);
    rig.sent();
    let aeth = [UNLIMITED, 0, 0, 1];
    rig.feed(&packet(0x0d, SQ_PSN, false, &aeth, &bytes(256)));
    // The acknowledgement for the SEND implies that the remaining READ responses were sent.
    rig.ack(SQ_PSN + 3, UNLIMITED);
    let sent = rig.sent();
    assert_eq!(brief(&sent[0]), (0x0c, (SQ_PSN + 1) | ACK_REQUEST));
    assert_eq!(sent[0][12..], reth(PEER.addr + 256, PEER.rkey, 444));
    assert_eq!(brief(&sent[1]), (0x04, (SQ_PSN + 3) | ACK_REQUEST));
    // A duplicate must not cause a new request.
    rig.ack(SQ_PSN + 3, UNLIMITED);
    assert!(rig.sent().is_empty());
    assert_eq!(rig.qp.counters().implied_naks, 1);
    rig.feed(&packet(0x0d, SQ_PSN + 1, false, &aeth, &bytes(256)));
    rig.feed(&packet(0x0f, SQ_PSN + 2, false, &aeth, &bytes(188)));
    rig.ack(SQ_PSN + 3, UNLIMITED);
    assert_eq!(rig.sends(), [(1, Success), (2, Success)]);
}

#[test]
fn long_read_is_split_and_partially_repeated() {
    let mut rig = Rig::with(&Options {
        window: 8,
        ..DEFAULT
    });
    rig.post(1, READ, 256 * 10);
    let sent_requests = |rig: &mut Rig| -> Vec<(u32, u32)> {
        let len = |p: &[u8]| u32::from_be_bytes(p[24..28].try_into().unwrap());
        rig.sent()
            .iter()
            .map(|p| (brief(p).1 & !ACK_REQUEST, len(p)))
            .collect()
    };
    assert_eq!(
        sent_requests(&mut rig),
        [(SQ_PSN, 1024), (SQ_PSN + 4, 1024)]
    );
    let aeth = [UNLIMITED, 0, 0, 1];
    rig.feed(&packet(0x0d, SQ_PSN, false, &aeth, &bytes(256)));
    rig.expire();
    // This is the rest of the first piece, even though the window after a timeout is only four
    // packets.
    assert_eq!(sent_requests(&mut rig), [(SQ_PSN + 1, 768)]);
    for psn in 1..4 {
        let opcode = [0x0d, 0x0e, 0x0f][psn as usize - 1];
        let ext = if psn == 2 { &[][..] } else { &aeth[..] };
        rig.feed(&packet(opcode, SQ_PSN + psn, false, ext, &bytes(256)));
    }
    assert_eq!(sent_requests(&mut rig), [(SQ_PSN + 4, 1024)]);
    // After a second loss the window is smaller than the piece, so we request it in separate parts.
    rig.expire();
    assert_eq!(sent_requests(&mut rig), [(SQ_PSN + 4, 512)]);
    rig.feed(&packet(0x0d, SQ_PSN + 4, false, &aeth, &bytes(256)));
    assert_eq!(sent_requests(&mut rig), []);
    rig.feed(&packet(0x0f, SQ_PSN + 5, false, &aeth, &bytes(256)));
    assert_eq!(sent_requests(&mut rig), [(SQ_PSN + 6, 512)]);
}

#[test]
fn atomic_returns_original_value() {
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
    assert_eq!(brief(&sent[0]), (0x13, SQ_PSN | ACK_REQUEST));
    assert_eq!(sent[0][12..], atomic_eth(0x40, RKey(9), 0x0202, 0x0101));
    assert_eq!(brief(&sent[1]), (0x14, (SQ_PSN + 1) | ACK_REQUEST));
    assert_eq!(sent[1][12..], atomic_eth(0x40, RKey(9), 5, 0));
    let response = [&[UNLIMITED, 0, 0, 1][..], &0x1234_5678u64.to_be_bytes()].concat();
    rig.feed(&packet(0x12, SQ_PSN, false, &response, &[]));
    assert_eq!(rig.sends(), [(1, Success)]);
    assert_eq!(
        rig.memory.slice(0..8).unwrap().to_vec(),
        0x1234_5678u64.to_ne_bytes()
    );
}

#[test]
fn packets_after_lost_atomic_are_repeated() {
    let mut rig = Rig::new();
    let add = SendOp::FetchAdd {
        remote: RemoteAddr { addr: 8, ..PEER },
        add: 1,
    };
    rig.post(1, add, 8);
    rig.post(2, SendOp::Send, 4);
    let both = [(0x14, SQ_PSN), (0x04, (SQ_PSN + 1) | ACK_REQUEST)];
    let brief = |sent: Vec<(u8, u32)>| -> Vec<_> {
        let plain = |(op, psn)| (op, if op == 0x14 { psn & !ACK_REQUEST } else { psn });
        sent.into_iter().map(plain).collect()
    };
    assert_eq!(brief(rig.sent_brief()), both);
    rig.expire();
    assert_eq!(brief(rig.sent_brief()), both);
}

#[test]
fn reads_are_limited_to_initiator_depth() {
    let mut rig = Rig::new();
    for id in 0..4 {
        rig.post(id, READ, 4);
    }
    rig.post(4, SendOp::Send, 4);
    assert_eq!(rig.sent_brief().len(), 2);
    rig.feed(&packet(0x10, SQ_PSN, false, &[UNLIMITED, 0, 0, 1], &[1; 4]));
    assert_eq!(rig.sent_brief(), [(0x0c, (SQ_PSN + 2) | ACK_REQUEST)]);
}

#[test]
fn fence_waits_for_previous_reads() {
    let mut rig = Rig::new();
    rig.post(1, READ, 4);
    rig.post(2, WRITE, 4);
    rig.post_flags(3, SendOp::Send, 4, SendFlags::SIGNALED | SendFlags::FENCE);
    assert_eq!(
        rig.sent_brief(),
        [
            (0x0c, SQ_PSN | ACK_REQUEST),
            (0x0a, (SQ_PSN + 1) | ACK_REQUEST)
        ]
    );
    rig.feed(&packet(0x10, SQ_PSN, false, &[UNLIMITED, 0, 0, 1], &[1; 4]));
    assert_eq!(rig.sent_brief(), [(0x04, (SQ_PSN + 2) | ACK_REQUEST)]);
    rig.ack(SQ_PSN + 2, UNLIMITED);
    assert_eq!(rig.sends(), [(1, Success), (2, Success), (3, Success)]);
}

#[test]
fn sequence_nak_restarts_within_message() {
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
            (0x02, (SQ_PSN + 4) | ACK_REQUEST)
        ]
    );
    assert_eq!(rig.qp.counters().retransmits, 3);
    // We may still receive an acknowledgement sent before the loss.
    rig.ack(SQ_PSN + 1, UNLIMITED);
    rig.ack(SQ_PSN + 4, UNLIMITED);
    assert_eq!(rig.sends(), [(2, Success)]);
}

#[test]
fn late_ack_after_going_back_is_used() {
    let mut rig = Rig::new();
    rig.post(1, SendOp::Send, 256 * 3);
    rig.post(2, SendOp::Send, 4);
    rig.sent();
    rig.expire();
    rig.ack(SQ_PSN + 2, UNLIMITED);
    assert_eq!(rig.sends(), [(1, Success)]);
    assert_eq!(rig.sent_brief(), [(0x04, (SQ_PSN + 3) | ACK_REQUEST)]);
}

#[test]
fn responses_to_unsent_packets_are_ignored() {
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
        let response = [UNLIMITED, 0, 0, 0];
        rig.feed(&packet(0x10, psn & 0xff_ffff, false, &response, &[1; 4]));
    }
    assert_eq!(rig.sends(), []);
    assert!(rig.sent().is_empty());
    assert_eq!(rig.qp.counters().stale_responses, 21);
    // Reserved syndromes should be ignored.
    rig.ack(SQ_PSN, 0x40);
    rig.ack(SQ_PSN, 0x7f);
    assert_eq!(rig.sends(), []);
    rig.ack(SQ_PSN, UNLIMITED);
    assert_eq!(rig.sends(), [(1, Success)]);
}

#[test]
fn rnr_nak_delays_retry() {
    let mut rig = Rig::new();
    rig.post(1, SendOp::Send, 256 * 2);
    rig.post(2, WRITE, 4);
    rig.sent();
    // Code 14 is 1.28 ms.
    rig.ack(SQ_PSN, 0x2e);
    assert!(rig.sent().is_empty());
    // The NAK was duplicated by the network and must not use a second retry.
    rig.ack(SQ_PSN, 0x2e);
    assert_eq!(rig.expire(), Duration::from_micros(1280));
    assert_eq!(
        rig.sent_brief(),
        [
            (0x00, SQ_PSN),
            (0x02, SQ_PSN + 1),
            (0x0a, (SQ_PSN + 2) | ACK_REQUEST)
        ]
    );
    // Any progress resets the retry count: here the first packet was acknowledged.
    rig.ack(SQ_PSN + 1, 0x2e);
    rig.expire();
    rig.sent();
    rig.ack(SQ_PSN + 1, 0x2e);
    assert_eq!(rig.sends(), [(1, RnrRetryExcErr), (2, WrFlushErr)]);
    assert_eq!(rig.qp.state(), QpState::Error);
    assert_eq!(rig.qp.counters().rx_rnr_naks, 4);
}

#[test]
fn rnr_retry_seven_is_unlimited() {
    let mut rig = Rig::with(&Options {
        rnr_retry: 7,
        ..DEFAULT
    });
    rig.post(1, SendOp::Send, 4);
    for _ in 0..100 {
        assert_eq!(rig.sent_brief(), [(0x04, SQ_PSN | ACK_REQUEST)]);
        rig.ack(SQ_PSN, 0x21);
        assert_eq!(rig.expire(), Duration::from_micros(10));
    }
    rig.sent();
    rig.ack(SQ_PSN, UNLIMITED);
    assert_eq!(rig.sends(), [(1, Success)]);
}

#[test]
fn fatal_nak_fails_request_and_flushes_rest() {
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
fn armed_connection_restarts_on_alternate_path() {
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
    // If there is nothing else to send, we use an acknowledgement for previous packets to show the
    // new path.
    let mut sent = rig.sent_brief();
    assert!(sent.contains(&(0x11, RQ_PSN - 1)));
    sent.retain(|packet| *packet != (0x11, RQ_PSN - 1));
    assert_eq!(sent.len(), window, "the window of a new connection");
    assert_eq!(sent[0].1 & !ACK_REQUEST, SQ_PSN);
    // There are no more paths.
    for _ in 0..6 {
        rig.expire();
        rig.sent();
    }
    assert_eq!(rig.sends(), [(1, RetryExcErr)]);
}

#[test]
fn only_plausible_psns_are_known() {
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
    // A READ with multiple packets can be repeated from any position.
    let mr = rig.mr;
    rig.feed(&packet(0x0c, RQ_PSN, true, &reth(0, mr.rkey, 256 * 9), &[]));
    assert!(send(&rig, RQ_PSN + 8) && send(&rig, RQ_PSN + 9));
    assert!(!send(&rig, RQ_PSN + 10));
    rig.run(RcQp::to_error);
    assert!(!send(&rig, RQ_PSN + 9) && !ack(&rig, SQ_PSN));
}

#[test]
fn retries_depend_on_time_without_progress() {
    let mut rig = Rig::new();
    rig.post(1, SendOp::Send, 4);
    rig.post(2, SendOp::Send, 4);
    rig.sent();
    // With one retry, it is used after 3·T, and the request fails after 3·T more.
    for _ in 0..5 {
        assert_eq!(rig.expire(), T);
        assert_eq!(rig.sent_brief()[0].1 & !ACK_REQUEST, SQ_PSN);
    }
    // Any progress resets the count.
    rig.ack(SQ_PSN, UNLIMITED);
    assert_eq!(rig.sends(), [(1, Success)]);
    // The window is now less than one packet, so the next packet is sent a bit later.
    rig.sent();
    assert!(rig.expire() < T);
    for _ in 0..5 {
        assert_eq!(rig.sent_brief(), [(0x04, (SQ_PSN + 1) | ACK_REQUEST)]);
        assert_eq!(rig.expire(), T);
    }
    rig.sent();
    rig.expire();
    assert_eq!(rig.sends(), [(2, RetryExcErr)]);
    assert_eq!(rig.qp.counters().timeouts, 11);
}

/// On a slow link, acknowledgements are queued behind the peer's data.
#[test]
fn retries_last_longer_while_peer_sends() {
    let mut rig = Rig::new();
    rig.post(1, SendOp::Send, 4);
    for psn in RQ_PSN.. {
        rig.sent();
        let write = packet(0x0a, psn, true, &reth(0, RKey(0), 0), &[]);
        rig.feed(&write);
        rig.expire();
        if rig.qp.state() == QpState::Error {
            break;
        }
    }
    // Twice 3·T, where only a quarter of each timeout is counted.
    assert_eq!(rig.qp.counters().timeouts, 24);
}

#[test]
fn credits_limit_sends_but_allow_probe() {
    let mut rig = Rig::new();
    for id in 0..4 {
        rig.post(id, SendOp::Send, 300);
    }
    rig.post(4, WRITE, 4);
    // There is no limit yet.
    assert_eq!(rig.sent().len(), 9);
    // The first message is complete and the peer has one more receive, so the remaining packets
    // were dropped.
    rig.ack(SQ_PSN + 1, 0x01);
    rig.ack(SQ_PSN + 2, 0x60);
    assert_eq!(
        rig.sent_brief(),
        [(0x00, SQ_PSN + 2), (0x02, (SQ_PSN + 3) | ACK_REQUEST)],
        "the second message, and nothing after it"
    );
    rig.ack(SQ_PSN + 3, 0x00);
    assert_eq!(
        rig.sent_brief(),
        [(0x00, (SQ_PSN + 4) | ACK_REQUEST)],
        "one packet beyond the limit"
    );
    // The acknowledgement shows that the message has a receive.
    rig.ack(SQ_PSN + 4, 0x01);
    assert_eq!(rig.sent_brief(), [(0x02, (SQ_PSN + 5) | ACK_REQUEST)]);
    rig.ack(SQ_PSN + 5, UNLIMITED);
    assert_eq!(rig.sent_brief().len(), 3);
    rig.ack(SQ_PSN + 8, UNLIMITED);
    assert_eq!(rig.sends().len(), 5);
}

#[test]
fn window_limits_packets_in_flight() {
    let mut rig = Rig::with(&Options {
        window: 5,
        ..DEFAULT
    });
    rig.post(1, WRITE, 256 * 12);
    let sent = rig.sent_brief();
    assert_eq!(sent.len(), 5);
    assert_eq!(
        sent[4].1,
        (SQ_PSN + 4) | ACK_REQUEST,
        "the packet that fills the window requests an ACK"
    );
    rig.ack(SQ_PSN + 2, UNLIMITED);
    assert_eq!(rig.sent_brief().len(), 3);
    // After a timeout, only half of the packets are sent.
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
        [
            (0, 0xff_fffe),
            (1, 0xff_ffff),
            (2, ACK_REQUEST),
            (0x0c, 1 | ACK_REQUEST)
        ]
    );
    rig.ack(0xff_ffff, 0x60);
    assert_eq!(
        rig.sent_brief(),
        [(1, 0xff_ffff), (2, ACK_REQUEST), (0x0c, 1 | ACK_REQUEST)]
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
    // The packets in flight don't use the key, so no request has to wait and we only need to
    // request a single acknowledgement.
    let (first, third) = (SQ_PSN, SQ_PSN + 2);
    assert_eq!(
        rig.sent_brief(),
        [
            (0x04, first),
            (0x04, first + 1),
            (0x04, third | ACK_REQUEST)
        ]
    );
    assert!(!rig.mrs.query(mr).unwrap().valid);
    // They should complete in order.
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
fn invalidation_waits_for_requests_using_key() {
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
        // The message it waits for should request an acknowledgement.
        assert_eq!(rig.sent_brief(), [(0x04, SQ_PSN | ACK_REQUEST)]);
        assert!(rig.mrs.query(mr).unwrap().valid);
        rig.ack(SQ_PSN, UNLIMITED);
        assert_eq!(rig.sent_brief(), [(0x04, (SQ_PSN + 1) | ACK_REQUEST)]);
        assert!(!rig.mrs.query(mr).unwrap().valid);
        assert_eq!(rig.sends(), [(1, Success), (2, Success), (3, Success)]);
    }
}

#[test]
fn cve_2021_47076_bad_key_still_completes() {
    // CVE-2021-47076: this request never generated a completion.
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

/// The first message does not request an acknowledgement if it is immediately followed by a second
/// one.
#[test]
fn message_before_bad_key_requests_ack_immediately() {
    // The key is invalidated before the first packet of the message, or in the middle.
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
        assert_eq!(rig.sent_brief(), [(0x04, SQ_PSN | ACK_REQUEST)]);
        rig.ack(SQ_PSN, UNLIMITED);
        assert_eq!(rig.sends(), [(1, Success), (2, LocProtErr)]);
    }
}

/// The acknowledgement was already requested, and the memory may have been removed.
#[test]
fn bad_key_does_not_repeat_acked_messages() {
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
    assert_eq!(rig.sent_brief(), [(0x02, (SQ_PSN + 9) | ACK_REQUEST)]);
    rig.ack(SQ_PSN + 7, UNLIMITED);
    assert_eq!(rig.sends(), [(1, Success)]);
    rig.ack(SQ_PSN + 9, UNLIMITED);
    assert_eq!(rig.sends(), [(2, Success), (3, LocProtErr)]);
}

#[test]
fn invalid_response_fails_connection() {
    let read = |len| packet(0x10, SQ_PSN, false, &[UNLIMITED, 0, 0, 1], &bytes(len));
    let atomic = [&[UNLIMITED, 0, 0, 1][..], &[0; 8]].concat();
    for (op, response) in [
        (READ, read(3)),
        (READ, read(8)),
        (READ, packet(0x12, SQ_PSN, false, &atomic, &[])),
        (SendOp::Send, read(4)),
    ] {
        let mut rig = Rig::new();
        rig.post(1, op, 4);
        rig.sent();
        rig.feed(&response);
        assert_eq!(rig.sends(), [(1, BadRespErr)]);
    }
}

#[test]
fn draining_queue_completes_started_requests() {
    let mut rig = Rig::with(&Options {
        window: 2,
        ..DEFAULT
    });
    rig.post(1, SendOp::Send, 256 * 3);
    rig.post(2, SendOp::Send, 4);
    assert_eq!(rig.sent_brief().len(), 2);
    rig.run(RcQp::to_sqd);
    rig.ack(SQ_PSN + 1, UNLIMITED);
    assert_eq!(rig.sent_brief(), [(0x02, (SQ_PSN + 2) | ACK_REQUEST)]);
    rig.ack(SQ_PSN + 2, UNLIMITED);
    let events = rig.events();
    assert_eq!(events.len(), 2);
    assert_eq!(events[1], RcEvent::Async(AsyncEvent::SqDrained(QP)));
    assert!(rig.sent().is_empty());
    rig.qp.resume();
    assert_eq!(rig.sent_brief(), [(0x04, (SQ_PSN + 3) | ACK_REQUEST)]);
}

#[test]
fn posting_depends_on_state() {
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
fn chain_stops_at_rejected_request() {
    let mut rig = Rig::new();
    let wrs: Vec<_> = (0..20).map(|i| SendWr::new(i, SendOp::Send, &[])).collect();
    let error = rig.run(|qp, env| qp.post_send(&wrs, env)).unwrap_err();
    assert_eq!((error.index, error.reason), (16, PostReason::QueueFull));
    assert_eq!(rig.qp.sends_outstanding(), 16);
}

#[test]
fn inline_data_needs_no_key() {
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
fn first_retransmission_uses_measured_round_trip() {
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
    // An acknowledgement for a repeated packet should not be used as a measurement.
    rig.ack(SQ_PSN, UNLIMITED);
    rig.post(2, SendOp::Send, 4);
    rig.sent();
    let wait = |rig: &Rig| rig.qp.poll_timeout().unwrap() - rig.now;
    assert_eq!(wait(&rig), Duration::from_millis(3));
    // The round trip is one millisecond, so the next one may take up to three, which is the time it
    // needs.
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
    // The interval is doubled each time, up to the ACK timeout.
    for micros in [2500, 4194, 4194] {
        assert_eq!(rig.expire().as_micros(), micros);
        rig.sent();
    }
}

#[test]
fn early_timeout_restores_window() {
    let mut rig = Rig::new();
    rig.post(1, WRITE, 256 * 40);
    assert_eq!(rig.sent().len(), 16);
    rig.expire();
    assert_eq!(rig.sent().len(), 4);
    // Twelve packets are acknowledged but only four were sent again, so the rest was never lost.
    rig.ack(SQ_PSN + 11, UNLIMITED);
    let sent = rig.sent_brief();
    assert_eq!((sent.len(), sent[0].1 & !ACK_REQUEST), (16, SQ_PSN + 12));
    // In this case all acknowledged packets may have been sent again, so the window remains small.
    rig.expire();
    assert_eq!(rig.sent().len(), 4);
    rig.ack(SQ_PSN + 13, UNLIMITED);
    assert_eq!(rig.sent().len(), 4);
}

#[test]
fn cnp_reduces_window_once_per_round_trip() {
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

/// Forged notifications can slow down a connection for a short time but must not stop it.
#[test]
fn repeated_cnps_do_not_stop_connection() {
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
fn marked_responses_reduce_window() {
    let mut rig = Rig::new();
    rig.post(1, READ, 256 * 100);
    let requested = |rig: &mut Rig| rig.sent().iter().filter(|p| p[0] == 0x0c).count();
    assert_eq!(requested(&mut rig), 2, "eight packets each");
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
