//! Test scripts: packets and time as input, packets and events as output. Packets are written as
//! bytes based on the specification, instead of using the code under test.

use std::collections::BTreeSet;

use proptest::prelude::*;
use riser_state::State;
use riser_state::testing::assert_all_taken;
use riser_testkit::{fuzz, one_of};

use super::*;
use crate::rc::packet_cost;
use crate::rc::tests::{Bench, CAP, PD, QP};
use crate::verbs::qp_state::{OfType, STATES};
use crate::verbs::{LKey, PostReason, RKey, RemoteAddr, SendFlags, SendOp, Sge};

const SQ_PSN: u32 = 0x00ff_fffe;
const RQ_PSN: u32 = 0x100;
const PEER: RemoteAddr = RemoteAddr {
    addr: 0x1122_3344_5566_7788,
    rkey: RKey(0xabcd_ef01),
};
const MTU: usize = 256;

type Rig = Bench<UcQp>;

impl Rig {
    fn new() -> Self {
        Self::with(false, Access::REMOTE)
    }

    fn with(has_srq: bool, access: Access) -> Self {
        let mut rig = Self::in_reset(has_srq);
        rig.qp.to_init();
        rig.receive_with(access);
        rig.qp.to_rts(Psn::new(SQ_PSN));
        rig
    }

    fn in_reset(has_srq: bool) -> Self {
        Self::of(UcQp::new(UcConfig {
            qp: QP,
            qp_num: 0x11,
            pd: PD,
            cap: CAP,
            sq_sig_all: false,
            has_srq,
            max_burst_bytes: 16 * packet_cost(Mtu::Mtu256),
        }))
    }

    fn receive_with(&mut self, access: Access) {
        self.qp.to_rtr(&UcRtrParams {
            path_mtu: Mtu::Mtu256,
            dest_qpn: Qpn::new(0x22),
            rq_psn: Psn::new(RQ_PSN),
            access,
        });
    }

    fn try_post(&mut self, wr_id: u64, op: SendOp, sges: &[Sge]) -> Result<(), PostError> {
        let wr = SendWr::new(wr_id, op, sges);
        self.run(|qp, env| qp.post_send(&[wr], env))
    }

    /// Posts a signaled request for `length` bytes at the start of the memory.
    fn post(&mut self, wr_id: u64, op: SendOp, length: usize) {
        let sges = [self.sge(0, length)];
        self.try_post(wr_id, op, &sges).unwrap();
    }

    fn post_recv(&mut self, wr_id: u64, length: usize) {
        let sges = [self.sge(0x8000, length)];
        let wr = RecvWr {
            wr_id: WrId(wr_id),
            sges: &sges,
        };
        let has_srq = self.qp.cfg.has_srq;
        self.run(|qp, env| match has_srq {
            true => env.rq.post(&[wr]),
            false => qp.post_recv(&[wr], env),
        })
        .unwrap();
    }

    /// Returns the next packet without its ICRC.
    fn packet(&mut self) -> Option<Vec<u8>> {
        let (now, mut tx) = (self.now, TxPacket::default());
        let is_sent = self.run(|qp, env| qp.poll_transmit(now, env, &mut tx));
        is_sent.then(|| {
            let mut bytes = Vec::new();
            tx.copy_to(&mut bytes);
            bytes
        })
    }

    /// Returns all packets that are currently sent.
    fn sent(&mut self) -> Vec<Vec<u8>> {
        let packets = std::iter::from_fn(|| self.packet());
        packets.take(1000).collect()
    }

    fn feed(&mut self, opcode: u8, psn: u32, ext: &[u8], payload: &[u8]) {
        let datagram = datagram(opcode, psn, ext, payload);
        let packet = Packet::parse(&datagram).expect("a well-formed packet");
        self.run(|qp, env| qp.handle_packet(&packet, env));
    }

    /// Returns the IDs, status values and sizes of receive completions since the last call. Panics
    /// on any other event.
    fn receives(&mut self) -> Vec<(u64, WcStatus, u32)> {
        let recv = |e| match e {
            RcEvent::Recv(c) => (c.wr_id.0, c.status, c.byte_len),
            other => panic!("unexpected {other:?}"),
        };
        self.events().into_iter().map(recv).collect()
    }

    fn lost(&self) -> u64 {
        self.qp.counters().lost_messages
    }
}

/// Creates a datagram for the QP. The ICRC is not checked here.
fn datagram(opcode: u8, psn: u32, ext: &[u8], payload: &[u8]) -> Vec<u8> {
    let pad = (4 - payload.len() % 4) % 4;
    let mut p = vec![opcode, (pad as u8) << 4, 0xff, 0xff, 0, 0, 0, 0x11, 0];
    p.extend_from_slice(&psn.to_be_bytes()[1..]);
    p.extend_from_slice(ext);
    p.extend_from_slice(payload);
    p.resize(p.len() + pad + 4, 0);
    p
}

fn reth(addr: u64, rkey: RKey, len: u32) -> Vec<u8> {
    let (addr, rkey, len) = (addr.to_be_bytes(), rkey.0.to_be_bytes(), len.to_be_bytes());
    [&addr[..], &rkey, &len].concat()
}

fn bytes(len: usize) -> Vec<u8> {
    (0..len).map(|i| (i * 7 + i / 256) as u8).collect()
}

const OK: WcStatus = WcStatus::Success;

#[test]
fn opcodes_match_specification_bytes() {
    let mut rig = Rig::new();
    let data = bytes(600);
    rig.memory.write(0, &data);
    let headers = |packets: Vec<Vec<u8>>, payloads: [usize; 3]| -> Vec<Vec<u8>> {
        let mut at = 0;
        let head = |(p, len): (&Vec<u8>, usize)| {
            let end = p.len() - usize::next_multiple_of(len, 4);
            assert_eq!(p[end..end + len], data[at..at + len]);
            at += len;
            p[..end].to_vec()
        };
        packets.iter().zip(payloads).map(head).collect()
    };
    rig.post(1, SendOp::SendImm(0x0102_0304), 600);
    assert_eq!(
        headers(rig.sent(), [256, 256, 88]),
        [
            &[0x20, 0x40, 0xff, 0xff, 0, 0, 0, 0x22, 0, 0xff, 0xff, 0xfe][..],
            &[0x21, 0x40, 0xff, 0xff, 0, 0, 0, 0x22, 0, 0xff, 0xff, 0xff],
            &[
                0x23, 0x40, 0xff, 0xff, 0, 0, 0, 0x22, 0, 0, 0, 0, 1, 2, 3, 4
            ],
        ]
    );
    rig.post(2, SendOp::WriteImm(PEER, 0x0506_0708), 515);
    assert_eq!(
        headers(rig.sent(), [256, 256, 3]),
        [
            &[
                0x26, 0x40, 0xff, 0xff, 0, 0, 0, 0x22, 0, 0, 0, 1, // BTH
                0x11, 0x22, 0x33, 0x44, 0x55, 0x66, 0x77, 0x88, // address
                0xab, 0xcd, 0xef, 0x01, 0, 0, 2, 3, // key and length
            ][..],
            &[0x27, 0x40, 0xff, 0xff, 0, 0, 0, 0x22, 0, 0, 0, 2],
            &[
                0x29, 0x50, 0xff, 0xff, 0, 0, 0, 0x22, 0, 0, 0, 3, 5, 6, 7, 8
            ],
        ]
    );
    assert_eq!(rig.sends(), [(1, OK), (2, OK)]);
    // Remaining opcodes, identified by the first byte.
    rig.post(3, SendOp::Send, 300);
    rig.post(4, SendOp::Send, 0);
    rig.post(5, SendOp::SendImm(1), 0);
    rig.post(6, SendOp::Write(PEER), 300);
    rig.post(7, SendOp::Write(PEER), 0);
    rig.post(8, SendOp::WriteImm(PEER, 1), 0);
    let sent = rig.sent();
    let opcodes: Vec<u8> = sent.iter().map(|p| p[0]).collect();
    assert_eq!(opcodes, [0x20, 0x22, 0x24, 0x25, 0x26, 0x28, 0x2a, 0x2b]);
    assert_eq!(sent[7][12..20], PEER.addr.to_be_bytes());
    assert_eq!(sent[7][28..], [0, 0, 0, 1]);
}

#[test]
fn request_completes_with_last_packet() {
    let mut rig = Rig::new();
    let sges = [rig.sge(0, 300)];
    let wr = SendWr::new(1, SendOp::Send, &sges).flags(SendFlags::SOLICITED | SendFlags::SIGNALED);
    rig.run(|qp, env| qp.post_send(&[wr], env)).unwrap();
    let quiet = SendWr::new(2, SendOp::Send, &sges).flags(SendFlags::empty());
    rig.run(|qp, env| qp.post_send(&[quiet], env)).unwrap();
    assert_eq!(rig.packet().unwrap()[1] & 0x80, 0);
    assert!(rig.events().is_empty());
    assert_eq!(rig.packet().unwrap()[1] & 0x80, 0x80);
    assert_eq!(rig.sends(), [(1, OK)]);
    assert_eq!(rig.sent().len(), 2);
    assert!(rig.events().is_empty(), "it is unsignaled");
}

#[test]
fn requests_needing_responses_are_rejected() {
    let mut rig = Rig::new();
    let eight = [rig.sge(0, 8)];
    let refused = [
        SendOp::Read(PEER),
        SendOp::SendInv(RKey(1)),
        SendOp::FetchAdd {
            remote: PEER,
            add: 1,
        },
        SendOp::CmpSwap {
            remote: PEER,
            compare: 1,
            swap: 2,
        },
    ];
    for op in refused {
        let error = rig.try_post(1, op, &eight).unwrap_err();
        assert_eq!(error.reason, PostReason::InvalidOpcode, "{op:?}");
    }
    assert!(rig.sent().is_empty() && rig.events().is_empty());
}

#[test]
fn incomplete_message_is_not_delivered() {
    let mut rig = Rig::new();
    rig.post_recv(1, 600);
    let data = bytes(600);
    // Complete message.
    rig.feed(0x20, RQ_PSN, &[], &data[..256]);
    rig.feed(0x21, RQ_PSN + 1, &[], &data[256..512]);
    assert!(rig.events().is_empty());
    rig.feed(0x23, RQ_PSN + 2, &[9, 8, 7, 6], &data[512..]);
    let events = rig.events();
    let [RcEvent::Recv(c)] = events[..] else {
        panic!("{events:?}");
    };
    assert_eq!((c.wr_id, c.status, c.byte_len), (WrId(1), OK, 600));
    assert_eq!((c.imm, c.opcode), (Some(0x0908_0706), WcOpcode::Recv));
    assert_eq!(rig.received(600), data);
    // The middle, first or last packet is missing.
    rig.post_recv(2, 600);
    let psn = RQ_PSN + 3;
    rig.feed(0x20, psn, &[], &data[..256]);
    rig.feed(0x22, psn + 2, &[], &data[..7]);
    rig.feed(0x21, psn + 4, &[], &data[..256]);
    rig.feed(0x22, psn + 5, &[], &data[..7]);
    rig.feed(0x20, psn + 6, &[], &data[..256]);
    rig.feed(0x24, psn + 8, &[], &data[100..200]);
    // The next message uses the receive of the lost messages.
    assert_eq!(rig.receives(), [(2, OK, 100)]);
    assert_eq!(rig.received(100), data[100..200]);
    assert_eq!((rig.lost(), rig.qp.counters().dropped), (2, 3));
    // The peer aborts a message and starts a new one without a gap.
    rig.post_recv(3, 600);
    rig.feed(0x20, psn + 9, &[], &data[..256]);
    rig.feed(0x24, psn + 10, &[], &data[..3]);
    assert_eq!(rig.receives(), [(3, OK, 3)]);
    assert_eq!(rig.lost(), 3);
    assert_eq!(rig.qp.state(), QpState::Rts);
}

#[test]
fn message_without_fitting_receive_is_lost() {
    let mut rig = Rig::new();
    let data = bytes(300);
    rig.feed(0x24, RQ_PSN, &[], &data[..10]);
    rig.feed(0x20, RQ_PSN + 1, &[], &data[..256]);
    rig.post_recv(1, 260);
    rig.feed(0x22, RQ_PSN + 2, &[], &data[256..]);
    assert_eq!(rig.lost(), 2);
    // The receive is exceeded by the last packet, and by the first packet.
    rig.feed(0x20, RQ_PSN + 3, &[], &data[..256]);
    rig.feed(0x22, RQ_PSN + 4, &[], &data[256..]);
    rig.feed(0x20, RQ_PSN + 5, &[], &data[..256]);
    rig.feed(0x22, RQ_PSN + 6, &[], &data[256..260]);
    assert_eq!(rig.receives(), [(1, OK, 260)]);
    assert_eq!(rig.received(260), data[..260]);
    // A middle packet that is too short, and a packet that exceeds the path MTU.
    rig.post_recv(2, 2000);
    rig.feed(0x20, RQ_PSN + 7, &[], &data[..255]);
    rig.feed(0x24, RQ_PSN + 8, &[], &data[..257]);
    assert_eq!((rig.lost(), rig.events().len()), (5, 0));
}

#[test]
fn write_packets_check_access_key_and_range() {
    let mut rig = Rig::new();
    let data = bytes(300);
    let (addr, rkey) = (rig.mr.addr + 0x8000, rig.mr.rkey);
    rig.feed(0x26, RQ_PSN, &reth(addr, rkey, 300), &data[..256]);
    rig.feed(0x28, RQ_PSN + 1, &[], &data[256..]);
    assert_eq!(rig.received(300), data);
    // With immediate data, and with a receive that is too short.
    rig.memory.fill(0x8000, 300, 0);
    rig.post_recv(1, 0);
    rig.feed(0x26, RQ_PSN + 2, &reth(addr, rkey, 300), &data[..256]);
    rig.feed(0x29, RQ_PSN + 3, &[0, 0, 0, 5], &data[256..]);
    let events = rig.events();
    let [RcEvent::Recv(c)] = events[..] else {
        panic!("{events:?}");
    };
    assert_eq!(
        (c.opcode, c.byte_len, c.imm),
        (WcOpcode::RecvWriteImm, 300, Some(5))
    );
    assert_eq!(rig.received(300), data);
    rig.memory.fill(0x8000, 300, 0);
    let end = rig.mr.addr + 0x1_0000;
    let wrong = [
        reth(addr, RKey(rkey.0 ^ 0x100), 3),
        reth(end - 2, rkey, 3),
        reth(u64::MAX - 1, rkey, 3),
        // The length does not match the payload.
        reth(addr, rkey, 2),
        reth(addr, rkey, 4),
    ];
    for (n, reth) in (4..).zip(&wrong) {
        rig.feed(0x2a, RQ_PSN + n, reth, &data[..3]);
    }
    assert_eq!(rig.lost(), 5);
    // There is no receive for the immediate data.
    let mut ext = reth(addr, rkey, 3);
    ext.extend_from_slice(&[0, 0, 0, 1]);
    rig.feed(0x2b, RQ_PSN + 9, &ext, &data[..3]);
    // The key is invalidated in the middle of a message.
    rig.feed(0x26, RQ_PSN + 10, &reth(addr, rkey, 300), &data[..256]);
    rig.memory.fill(0x8000, 300, 0);
    rig.mrs.dereg(rig.mr.id).unwrap();
    rig.feed(0x28, RQ_PSN + 11, &[], &data[256..]);
    // A zero-length WRITE doesn't require a key.
    rig.feed(0x2a, RQ_PSN + 12, &reth(0, RKey(0), 0), &[]);
    assert_eq!((rig.lost(), rig.events().len()), (7, 0));
    assert_eq!(rig.received(300), [0; 300]);
    // The QP does not allow access.
    let mut rig = Rig::with(false, Access::REMOTE_READ);
    let (addr, rkey) = (rig.mr.addr + 0x8000, rig.mr.rkey);
    rig.feed(0x2a, RQ_PSN, &reth(addr, rkey, 3), &data[..3]);
    assert_eq!((rig.lost(), rig.received(3)), (1, vec![0; 3]));
    rig.qp.set_access(Access::REMOTE_WRITE);
    rig.feed(0x2a, RQ_PSN + 1, &reth(addr, rkey, 3), &data[..3]);
    assert_eq!(rig.received(3), data[..3]);
}

#[test]
fn invalid_receive_fails_qp() {
    let mut rig = Rig::new();
    let bad = [Sge {
        lkey: LKey(0),
        ..rig.sge(0x8000, 64)
    }];
    let wr = RecvWr {
        wr_id: WrId(1),
        sges: &bad,
    };
    rig.run(|qp, env| qp.post_recv(&[wr], env)).unwrap();
    rig.post_recv(2, 64);
    rig.feed(0x24, RQ_PSN, &[], &[1, 2, 3]);
    let statuses = [(1, WcStatus::LocProtErr, 0), (2, WcStatus::WrFlushErr, 0)];
    assert_eq!(rig.receives(), statuses);
    assert_eq!(rig.qp.state(), QpState::Error);
    // Packets received and requests posted in this state.
    rig.feed(0x24, RQ_PSN + 1, &[], &[1, 2, 3]);
    rig.post_recv(3, 64);
    assert_eq!(rig.receives(), [(3, WcStatus::WrFlushErr, 0)]);
    rig.post(4, SendOp::Send, 4);
    assert_eq!(rig.sends(), [(4, WcStatus::WrFlushErr)]);
}

#[test]
fn invalid_request_only_stops_sending() {
    let mut rig = Rig::new();
    let bad = [Sge {
        lkey: LKey(0),
        ..rig.sge(0, 300)
    }];
    let two = [rig.sge(0, 256), bad[0]];
    rig.post(1, SendOp::Send, 4);
    rig.try_post(2, SendOp::Send, &two).unwrap();
    rig.post(3, SendOp::Send, 4);
    assert_eq!(rig.sent().len(), 1, "no packet of the bad one");
    let statuses = [
        (1, OK),
        (2, WcStatus::LocProtErr),
        (3, WcStatus::WrFlushErr),
    ];
    assert_eq!(rig.sends(), statuses);
    assert_eq!(rig.qp.state(), QpState::Sqe);
    rig.post(4, SendOp::Send, 4);
    assert_eq!(rig.sends(), [(4, WcStatus::WrFlushErr)]);
    rig.post_recv(5, 64);
    rig.feed(0x24, RQ_PSN, &[], &[1, 2, 3]);
    assert_eq!(rig.receives(), [(5, OK, 3)]);
    rig.qp.resume();
    rig.post(6, SendOp::Send, 4);
    // The PSNs continue after the previous packet.
    assert_eq!(rig.sent()[0][9..12], [0xff, 0xff, 0xff]);
    assert_eq!(rig.sends(), [(6, OK)]);
    // The memory is deregistered in the middle of a message.
    rig.post(7, SendOp::Send, 600);
    rig.packet().unwrap();
    rig.mrs.dereg(rig.mr.id).unwrap();
    assert_eq!(rig.packet(), None);
    assert_eq!(rig.sends(), [(7, WcStatus::LocProtErr)]);
}

#[test]
fn local_operations_execute_in_order() {
    let mut rig = Rig::new();
    let fast = rig.mrs.alloc_fast(PD, 2).unwrap();
    let slice = rig.memory.slice(0x8000..0x8100).unwrap();
    rig.mrs.map_sg(fast.id, &[slice]).unwrap();
    let key = fast.rkey.next();
    let access = Access::LOCAL_WRITE | Access::REMOTE_WRITE;
    let mr = fast.id;
    rig.post(1, SendOp::Send, 4);
    rig.try_post(2, SendOp::RegMr { mr, key, access }, &[])
        .unwrap();
    assert_eq!(rig.sent().len(), 1);
    assert_eq!(rig.sends(), [(1, OK), (2, OK)]);
    let base = rig.mrs.query(mr).unwrap().mr.addr;
    rig.feed(0x2a, RQ_PSN, &reth(base, key, 3), &[1, 2, 3]);
    assert_eq!(rig.received(3), [1, 2, 3]);
    rig.try_post(3, SendOp::LocalInv(key), &[]).unwrap();
    rig.try_post(4, SendOp::LocalInv(key), &[]).unwrap();
    assert!(rig.sent().is_empty());
    assert_eq!(rig.sends(), [(3, OK), (4, WcStatus::MwBindErr)]);
    assert_eq!(rig.qp.state(), QpState::Sqe);
}

#[test]
fn draining_queue_completes_current_message() {
    let mut rig = Rig::new();
    rig.post(1, SendOp::Send, 600);
    rig.post(2, SendOp::Send, 4);
    rig.packet().unwrap();
    rig.run(UcQp::to_sqd);
    assert!(rig.events().is_empty(), "the message is under way");
    assert_eq!(rig.sent().len(), 2);
    let events = rig.events();
    assert_eq!(events.len(), 2, "{events:?}");
    assert_eq!(events[1], RcEvent::Async(AsyncEvent::SqDrained(QP)));
    assert!(rig.sent().is_empty());
    rig.qp.resume();
    assert_eq!(rig.sent().len(), 1);
    assert_eq!(rig.sends(), [(2, OK)]);
    rig.run(UcQp::to_sqd);
    let drained = [RcEvent::Async(AsyncEvent::SqDrained(QP))];
    assert_eq!(rig.events(), drained, "nothing has begun");
}

#[test]
fn sent_packets_are_paced() {
    let mut rig = Rig::new();
    rig.post(1, SendOp::Write(PEER), 60 * MTU);
    let burst = rig.sent().len();
    assert_eq!(burst, 17);
    let start = rig.now;
    let mut sent = burst;
    while sent < 60 {
        let at = rig.qp.poll_timeout().expect("a deadline");
        assert!(at > rig.now);
        rig.now = at;
        rig.qp.handle_timeout(at);
        sent += rig.sent().len();
    }
    assert_eq!(rig.sends(), [(1, OK)]);
    let millis = (rig.now - start).as_secs_f64() * 1e3;
    assert!((1.2..1.5).contains(&millis), "{millis} ms for 43 packets");
    assert_eq!(rig.qp.poll_timeout(), None);
}

#[test]
fn lost_message_fails_shared_receive() {
    let mut rig = Rig::with(true, Access::REMOTE);
    rig.post_recv(1, 600);
    rig.post_recv(2, 260);
    rig.post_recv(3, 300);
    rig.post_recv(4, 600);
    let own = RecvWr {
        wr_id: WrId(9),
        sges: &[],
    };
    let refused = rig.run(|qp, env| qp.post_recv(&[own], env)).unwrap_err();
    assert_eq!(refused.reason, PostReason::InvalidOpcode);
    let ends = |rig: &mut Rig| -> Vec<_> {
        let events = rig.events().into_iter();
        events
            .map(|event| match event {
                RcEvent::Recv(c) => (c.wr_id.0, c.status),
                other => panic!("{other:?}"),
            })
            .collect()
    };
    // A packet is missing, followed by a message where the last packet is too long and dropped.
    rig.feed(0x20, RQ_PSN, &[], &bytes(256));
    rig.feed(0x20, RQ_PSN + 2, &[], &bytes(256));
    assert_eq!(ends(&mut rig), [(1, WcStatus::RemInvReqErr)]);
    rig.feed(0x21, RQ_PSN + 3, &[], &bytes(256));
    rig.feed(0x22, RQ_PSN + 4, &[], &bytes(3));
    assert_eq!(ends(&mut rig), [(2, WcStatus::LocLenErr)]);
    rig.feed(0x24, RQ_PSN + 5, &[], &bytes(3));
    assert_eq!(ends(&mut rig), [(3, WcStatus::Success)]);
    assert_eq!((rig.lost(), rig.qp.state()), (2, QpState::Rts));
    // If there is no receive or no access, nothing is completed.
    rig.feed(0x2a, RQ_PSN + 6, &reth(0, RKey(1), 3), &bytes(3));
    assert!(rig.events().is_empty());
    rig.feed(0x20, RQ_PSN + 7, &[], &bytes(256));
    assert_eq!(rig.rq.len(), 0);
    rig.run(UcQp::to_error);
    let events = rig.events();
    assert_eq!(
        events[1..],
        [RcEvent::Async(AsyncEvent::QpLastWqeReached(QP))]
    );
    let RcEvent::Recv(c) = events[0] else {
        panic!("{events:?}");
    };
    assert_eq!((c.wr_id, c.status), (WrId(4), WcStatus::WrFlushErr));
    rig.run(UcQp::to_error);
    assert!(rig.events().is_empty(), "it comes once");
}

#[test]
fn first_packet_in_rtr_reports_event() {
    let mut rig = Rig::in_reset(false);
    rig.qp.to_init();
    rig.feed(0x24, RQ_PSN, &[], &[]);
    assert_eq!(rig.qp.counters().dropped, 1);
    rig.receive_with(Access::REMOTE);
    // Packets for a different service should be dropped.
    rig.feed(0x04, RQ_PSN, &[], &[]);
    assert!(rig.events().is_empty());
    rig.feed(0x24, RQ_PSN, &[], &[]);
    rig.feed(0x24, RQ_PSN + 1, &[], &[]);
    let established = [RcEvent::Async(AsyncEvent::CommEstablished(QP))];
    assert_eq!(rig.events(), established);
}

#[test]
fn reset_clears_all_state() {
    let mut rig = Rig::new();
    rig.post(1, SendOp::Send, 600);
    rig.packet().unwrap();
    rig.post_recv(2, 600);
    rig.feed(0x20, RQ_PSN, &[], &bytes(256));
    rig.qp.to_reset();
    rig.rq.clear();
    assert!(rig.sent().is_empty() && rig.events().is_empty());
    rig.qp.to_init();
    rig.receive_with(Access::REMOTE);
    rig.qp.to_rts(Psn::new(5));
    rig.post_recv(3, 8);
    rig.feed(0x24, RQ_PSN, &[], &[1]);
    rig.run(UcQp::to_error);
    let ids: Vec<_> = rig.receives().iter().map(|r| r.0).collect();
    assert_eq!(ids, [3], "the receive of before is gone");
}

#[test]
fn tests_cover_all_transitions() {
    let in_state = |state| {
        let mut rig = Rig::in_reset(false);
        let rank = |state| STATES.iter().position(|s| *s == state);
        if rank(state) >= rank(QpState::Init) {
            rig.qp.to_init();
        }
        if rank(state) >= rank(QpState::Rtr) {
            rig.receive_with(Access::REMOTE);
        }
        if rank(state) >= rank(QpState::Rts) {
            rig.qp.to_rts(Psn::new(0));
        }
        match state {
            QpState::Sqd => rig.run(UcQp::to_sqd),
            QpState::Sqe => {
                rig.try_post(1, SendOp::LocalInv(RKey(0)), &[]).unwrap();
                rig.sent();
            }
            QpState::Error => rig.run(UcQp::to_error),
            _ => {}
        }
        assert_eq!(rig.qp.state(), state);
        rig
    };
    let states = STATES.map(|state| OfType(QpType::Uc, state));
    assert!(states[4].may_become(&states[5]));
    assert_all_taken(&states, || {
        for state in STATES {
            in_state(state).qp.to_reset();
            in_state(state).run(UcQp::to_error);
        }
        in_state(QpState::Init).qp.to_init();
        in_state(QpState::Rts).qp.resume();
        in_state(QpState::Sqd).qp.resume();
        in_state(QpState::Sqe).qp.resume();
        in_state(QpState::Sqd).run(UcQp::to_sqd);
        let mut rig = in_state(QpState::Rts);
        rig.post(1, SendOp::Send, 600);
        rig.packet().unwrap();
        rig.run(UcQp::to_sqd);
        rig.mrs.dereg(rig.mr.id).unwrap();
        assert_eq!(rig.packet(), None);
        assert_eq!(rig.qp.state(), QpState::Sqe);
    });
}

/// Packet from the peer: opcode, offset from the next PSN, size, and whether its key is valid.
type Forged = (u8, u32, usize, bool);

fn forged() -> impl Strategy<Value = Forged> {
    let psn = one_of![Just(0u32), 0u32..4, any::<u32>()];
    let len = one_of![Just(MTU), 0usize..300];
    (0x20u8..0x2c, psn, len, any::<bool>())
}

/// Packets must not break the QP, complete a receive twice, or access other memory.
fn take_in(packets: Vec<Forged>) {
    let mut rig = Rig::new();
    rig.memory.fill(0, 0x8000, 0x55);
    let mut psn = RQ_PSN;
    let mut completed = BTreeSet::new();
    for (n, (opcode, step, len, is_known)) in packets.into_iter().enumerate() {
        let list = [rig.sge(0x8000, 400)];
        let wr = RecvWr {
            wr_id: WrId(n as u64),
            sges: &list,
        };
        // This can fail if the queue is full.
        let _ = rig.run(|qp, env| qp.post_recv(&[wr], env));
        psn = psn.wrapping_add(step) & 0x00ff_ffff;
        let key = if is_known { rig.mr.rkey } else { RKey(0) };
        let mut ext = match opcode {
            0x26 | 0x2a | 0x2b => reth(rig.mr.addr + 0x8000, key, len as u32 * 2),
            _ => Vec::new(),
        };
        if matches!(opcode, 0x23 | 0x25 | 0x29 | 0x2b) {
            ext.extend_from_slice(&[1, 2, 3, 4]);
        }
        rig.feed(opcode, psn, &ext, &bytes(len));
        psn = psn.wrapping_add(1);
        for (id, status, length) in rig.receives() {
            assert!(completed.insert(id), "{id} completed twice");
            assert_eq!(status, OK);
            assert!(length <= 600);
        }
    }
    assert_eq!(rig.qp.state(), QpState::Rts);
    let untouched = rig.memory.slice(0..0x8000).unwrap().to_vec();
    assert!(untouched.iter().all(|&b| b == 0x55));
}

proptest! {
    #[test]
    fn hostile_packets_are_harmless(packets in proptest::collection::vec(forged(), 0..60)) {
        take_in(packets);
    }
}

#[test]
fn uc_queue_pair() {
    bolero::check!(name = "uc_queue_pair").for_each(|bytes: &[u8]| {
        if let Some(((), packets)) = fuzz::history(&Just(()), &forged(), bytes) {
            take_in(packets);
        }
    });
}
