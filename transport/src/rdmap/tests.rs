//! Two instances using in-memory streams split at random positions, and a peer sending arbitrary
//! data.

use riser_memory::Memory;

use super::wire::ddp::{Atomic, AtomicRequest, Header, Opcode, Placement, ReadRequest};
use super::wire::fpdu::{Deframer, Framer, Framing, MAX_ULPDU};
use super::wire::start::{StartFrame, StartKind};
use super::wire::terminate::{Reason, Terminate};
use super::*;
use crate::rc::{Env, RecvQueue};
use crate::verbs::{
    Access, AsyncEvent, Completion, Handle, LKey, Mr, QpState, RecvWr, RemoteAddr, SendFlags,
    SendOp, SendWr, Sge, WcOpcode, WcStatus, WrId,
};

const PD: PdId = PdId(Handle::new(1, 1));
const QP: QpId = QpId(Handle::new(7, 1));
const REGION: usize = 1 << 20;

const CAP: QpCap = QpCap {
    max_send_wr: 64,
    max_recv_wr: 64,
    max_send_sge: 4,
    max_recv_sge: 4,
    max_inline: 64,
};

/// QP with its own memory region.
struct Bench {
    qp: RdmapQp,
    mrs: MrTable,
    rq: RecvQueue,
    out: Vec<RcEvent>,
    memory: Memory,
    mr: Mr,
    bytes: Vec<u8>,
}

impl Bench {
    fn new(agreed: NegotiatedParams, mulpdu: usize) -> Self {
        let mut mrs = MrTable::new(64, 8, *b"sixteen bytes!!!");
        let memory = Memory::new(REGION).unwrap();
        let all = Access::LOCAL_WRITE | Access::REMOTE;
        let mr = mrs.reg(PD, &memory.whole(), all).unwrap();
        let mut qp = RdmapQp::new(RdmapConfig {
            qp: QP,
            qp_num: 9,
            pd: PD,
            cap: CAP,
            sq_sig_all: false,
            has_srq: false,
        });
        qp.to_init();
        qp.start(&StreamParams {
            agreed,
            mulpdu,
            access: Access::REMOTE,
        });
        Self {
            qp,
            mrs,
            rq: RecvQueue::new(64, 4),
            out: Vec::new(),
            memory,
            mr,
            bytes: Vec::new(),
        }
    }

    fn with<T>(&mut self, f: impl FnOnce(&mut RdmapQp, &mut Env<'_>) -> T) -> T {
        let mut env = Env {
            mrs: &mut self.mrs,
            rq: &mut self.rq,
            out: &mut self.out,
        };
        f(&mut self.qp, &mut env)
    }

    fn sge(&self, offset: usize, length: usize) -> Sge {
        self.mr.sge(offset, length)
    }

    fn remote(&self, offset: usize) -> RemoteAddr {
        self.mr.remote(offset)
    }

    fn bytes(&self, offset: usize, length: usize) -> Vec<u8> {
        self.memory.slice(offset..offset + length).unwrap().to_vec()
    }

    fn send(&mut self, wr_id: u64, op: SendOp, sges: &[Sge]) {
        let wr = SendWr::new(wr_id, op, sges);
        self.with(|qp, env| qp.post_send(&[wr], env)).unwrap();
    }

    fn recv(&mut self, wr_id: u64, offset: usize, length: usize) {
        let sges = [self.sge(offset, length)];
        let wr = RecvWr {
            wr_id: WrId(wr_id),
            sges: &sges,
        };
        self.with(|qp, env| qp.post_recv(&[wr], env)).unwrap();
    }

    /// Returns the data to send.
    fn output(&mut self, limit: usize) -> Vec<u8> {
        let mut bytes = std::mem::take(&mut self.bytes);
        self.with(|qp, env| qp.poll_output(env, &mut bytes, limit));
        bytes
    }

    fn input(&mut self, bytes: &[u8]) {
        self.with(|qp, env| qp.handle_input(bytes, env));
    }

    /// Returns all completions with number, type and status.
    fn completions(&mut self) -> Vec<Completion> {
        let of = |event: RcEvent| match event {
            RcEvent::Send(c) | RcEvent::Recv(c) => Some(c),
            RcEvent::Async(_) => None,
        };
        self.out.drain(..).filter_map(of).collect()
    }

    fn ends(&mut self) -> Vec<(u64, WcOpcode, WcStatus)> {
        let all = self.completions();
        all.iter()
            .map(|c| (c.wr_id.0, c.opcode, c.status))
            .collect()
    }
}

fn agreed(framing: Framing, rtr: Option<Rtr>, awaits_first: bool) -> NegotiatedParams {
    NegotiatedParams {
        tx: framing,
        rx: framing,
        ird: 4,
        ord: 4,
        rtr,
        awaits_first,
    }
}

const PLAIN: Framing = Framing {
    markers: false,
    crc: true,
};

/// Initiator and responder.
struct Ends {
    a: Bench,
    b: Bench,
    random: fastrand::Rng,
}

impl Ends {
    fn new(framing: Framing, mulpdu: usize, rtr: Option<Rtr>, seed: u64) -> Self {
        Self {
            a: Bench::new(agreed(framing, rtr, false), mulpdu),
            b: Bench::new(agreed(framing, None, true), mulpdu),
            random: fastrand::Rng::with_seed(seed),
        }
    }

    fn plain() -> Self {
        Self::new(PLAIN, 1024, Some(Rtr::Write), 1)
    }

    /// Transfers data in blocks of random size until there is nothing left.
    fn run(&mut self) {
        loop {
            let limit = self.random.usize(1..20_000);
            let (to_b, to_a) = (self.a.output(limit), self.b.output(limit));
            if to_a.is_empty() && to_b.is_empty() {
                return;
            }
            for (end, bytes) in [(&mut self.b, to_b), (&mut self.a, to_a)] {
                let mut rest = &bytes[..];
                while !rest.is_empty() {
                    let most = [1, 7, 100, 100_000][self.random.usize(..4)];
                    let take = self.random.usize(1..=most).min(rest.len());
                    end.input(&rest[..take]);
                    rest = &rest[take..];
                }
            }
        }
    }
}

fn pattern(seed: u8, len: usize) -> Vec<u8> {
    (0..len).map(|n| (n * 31 + n / 251) as u8 ^ seed).collect()
}

#[test]
fn messages_arrive_for_any_stream_split() {
    for seed in 0..24 {
        let framing = Framing {
            markers: seed % 2 == 0,
            crc: seed % 3 != 0,
        };
        let rtr = [None, Some(Rtr::Empty), Some(Rtr::Write), Some(Rtr::Read)];
        let mulpdu = [128, 1441, MAX_ULPDU][seed as usize % 3];
        let mut e = Ends::new(framing, mulpdu, rtr[seed as usize % 4], seed);
        let data = pattern(seed as u8, 200_000);
        e.a.memory.write(0, &data);
        e.b.memory.write(300_000, &40u64.to_ne_bytes());
        e.b.recv(1, 400_000, 60_000);
        e.b.recv(2, 500_000, 10);
        e.b.recv(3, 600_000, 60_000);
        let remote = e.b.remote(0);
        let write = [
            e.a.sge(0, 70_001),
            e.a.sge(70_001, 1),
            e.a.sge(70_002, 29_998),
        ];
        e.a.send(10, SendOp::Write(remote), &write);
        e.a.send(11, SendOp::Send, &[e.a.sge(5, 50_000)]);
        let read = [e.a.sge(300_000, 3), e.a.sge(400_000, 39_997)];
        e.a.send(12, SendOp::Read(e.b.remote(1000)), &read);
        e.a.send(
            13,
            SendOp::WriteImm(e.b.remote(200_000), 0xcafe_f00d),
            &[e.a.sge(0, 900)],
        );
        e.a.send(14, SendOp::Read(remote), &[]);
        let counter = e.b.remote(300_000);
        e.a.send(
            15,
            SendOp::FetchAdd {
                remote: counter,
                add: 2,
            },
            &[e.a.sge(700_000, 8)],
        );
        let swap = SendOp::CmpSwap {
            remote: counter,
            compare: 42,
            swap: 7,
        };
        e.a.send(16, swap, &[e.a.sge(700_008, 8)]);
        e.a.send(17, SendOp::Send, &[]);
        // Both directions at the same time.
        e.a.recv(4, 800_000, 5000);
        e.b.send(
            20,
            SendOp::Read(e.a.remote(100)),
            &[e.b.sge(700_000, 50_000)],
        );
        e.b.send(21, SendOp::Send, &[e.b.sge(300_000, 4000)]);
        e.run();
        let all = |ids: std::ops::Range<u64>, ends: &[(u64, WcOpcode, WcStatus)]| {
            let sends = ends.iter().filter(|e| !e.1.is_recv());
            let sends: Vec<_> = sends.map(|e| (e.0, e.2)).collect();
            let want: Vec<_> = ids.map(|id| (id, WcStatus::Success)).collect();
            assert_eq!(sends, want, "{seed}");
        };
        let at_b = e.b.completions();
        let received: Vec<_> = at_b.iter().filter(|c| c.opcode.is_recv()).collect();
        let lens: Vec<_> = received
            .iter()
            .map(|c| (c.wr_id.0, c.byte_len, c.imm))
            .collect();
        assert_eq!(
            lens,
            [(1, 50_000, None), (2, 900, Some(0xcafe_f00d)), (3, 0, None)]
        );
        assert_eq!(received[1].opcode, WcOpcode::RecvWriteImm);
        let at_b: Vec<_> = at_b
            .iter()
            .map(|c| (c.wr_id.0, c.opcode, c.status))
            .collect();
        all(20..22, &at_b);
        let at_a = e.a.ends();
        all(10..18, &at_a);
        assert!(at_a.contains(&(4, WcOpcode::Recv, WcStatus::Success)));
        assert!(e.b.bytes(0, 100_000) == data[..100_000]);
        assert!(e.b.bytes(400_000, 50_000) == data[5..50_005]);
        assert!(e.a.bytes(300_000, 3) == data[1000..1003]);
        assert!(e.a.bytes(400_000, 39_997) == data[1003..41_000]);
        assert!(e.b.bytes(200_000, 900) == data[..900]);
        assert_eq!(e.a.bytes(700_000, 8), 40u64.to_ne_bytes());
        assert_eq!(e.a.bytes(700_008, 8), 42u64.to_ne_bytes());
        assert!(e.b.bytes(700_000, 50_000) == data[100..50_100]);
    }
}

#[test]
fn responder_waits_for_first_message() {
    let mut e = Ends::new(PLAIN, 1024, None, 3);
    e.a.recv(1, 0, 64);
    e.b.send(2, SendOp::Send, &[e.b.sge(0, 8)]);
    e.run();
    assert!(e.a.ends().is_empty() && e.b.ends().is_empty());
    e.b.recv(3, 0, 64);
    e.a.send(4, SendOp::Send, &[e.a.sge(0, 8)]);
    e.run();
    assert_eq!(e.a.ends().len(), 2);
    assert_eq!(e.b.ends().len(), 2);
}

#[test]
fn fences_and_limits_delay_requests() {
    let mut e = Ends::plain();
    e.b.memory.write(5000, b"what is read");
    for n in 0..9 {
        e.a.send(
            n,
            SendOp::Read(e.b.remote(5000)),
            &[e.a.sge(100 * n as usize, 12)],
        );
    }
    let out = e.a.output(usize::MAX);
    let mut deframer = Deframer::new(PLAIN);
    let (mut input, mut requests) = (&out[..], 0);
    while let Some(ulpdu) = deframer.poll(&mut input).unwrap() {
        requests += u32::from(Header::parse(ulpdu).unwrap().0.opcode == Opcode::ReadRequest);
    }
    assert_eq!(requests, 4, "as many as were agreed");
    e.b.input(&out);
    e.b.recv(1, 0, 64);
    let fenced = SendFlags::SIGNALED | SendFlags::FENCE;
    let sges = [e.a.sge(800, 12)];
    let wr = SendWr::new(9, SendOp::Send, &sges).flags(fenced);
    e.a.with(|qp, env| qp.post_send(&[wr], env)).unwrap();
    e.run();
    let want: Vec<_> = (0..10).collect();
    assert_eq!(e.a.ends().iter().map(|e| e.0).collect::<Vec<_>>(), want);
    assert_eq!(e.b.bytes(0, 12), b"what is read");
}

#[test]
fn send_with_invalidate_disables_key() {
    let mut e = Ends::plain();
    let fast = e.b.mrs.alloc_fast(PD, 4).unwrap();
    let parts = [e.b.memory.slice(0..100).unwrap()];
    e.b.mrs.map_sg(fast.id, &parts).unwrap();
    let key = fast.rkey.next();
    let access = Access::LOCAL_WRITE | Access::REMOTE_WRITE;
    let reg = SendOp::RegMr {
        mr: fast.id,
        key,
        access,
    };
    e.b.send(1, reg, &[]);
    e.run();
    assert_eq!(e.b.ends(), [(1, WcOpcode::RegMr, WcStatus::Success)]);
    let there = RemoteAddr {
        addr: e.b.mrs.query(fast.id).unwrap().mr.addr,
        rkey: key,
    };
    e.b.recv(2, 1000, 64);
    e.a.send(3, SendOp::Write(there), &[e.a.sge(0, 100)]);
    let flags = SendFlags::SIGNALED | SendFlags::SOLICITED;
    let wr = SendWr::new(4, SendOp::SendInv(key), &[]).flags(flags);
    e.a.with(|qp, env| qp.post_send(&[wr], env)).unwrap();
    e.run();
    let got = e.b.completions();
    assert_eq!((got[0].invalidated, got[0].solicited), (Some(key), true));
    // Repeating this is an error that closes the connection on both sides.
    e.b.recv(5, 1000, 64);
    e.a.completions();
    e.a.send(6, SendOp::SendInv(key), &[]);
    e.run();
    assert_eq!(e.b.ends(), [(5, WcOpcode::Recv, WcStatus::LocAccessErr)]);
    assert_eq!(e.a.ends(), [(6, WcOpcode::Send, WcStatus::Success)]);
    for end in [&e.a, &e.b] {
        assert_eq!(end.qp.state(), QpState::Error);
        assert!(end.qp.is_over());
    }
}

#[test]
fn rejected_read_fails_and_flushes_rest() {
    let mut e = Ends::plain();
    let mut bad = e.b.remote(0);
    bad.rkey.0 ^= 1;
    e.a.recv(1, 0, 64);
    e.b.recv(2, 0, 64);
    e.a.send(3, SendOp::Read(e.b.remote(0)), &[e.a.sge(0, 10)]);
    e.a.send(4, SendOp::Read(bad), &[e.a.sge(0, 10)]);
    e.a.send(5, SendOp::Read(e.b.remote(0)), &[e.a.sge(0, 10)]);
    e.run();
    let flushed = WcStatus::WrFlushErr;
    // The connection is closed before the first response.
    let want = [
        (3, WcOpcode::Read, flushed),
        (4, WcOpcode::Read, WcStatus::RemAccessErr),
        (5, WcOpcode::Read, flushed),
        (1, WcOpcode::Recv, flushed),
    ];
    assert_eq!(e.a.ends(), want);
    let event = RcEvent::Async(AsyncEvent::QpAccessError(QP));
    assert!(e.b.out.contains(&event));
    assert_eq!(e.b.ends(), [(2, WcOpcode::Recv, flushed)]);
}

#[test]
fn bad_local_key_fails_request_in_order() {
    let mut e = Ends::plain();
    let mut bad = e.a.sge(0, 8);
    bad.lkey = LKey(bad.lkey.0 ^ 1);
    let remote = e.b.remote(0);
    e.a.send(1, SendOp::Read(remote), &[e.a.sge(0, 8)]);
    e.a.send(2, SendOp::Write(remote), &[bad]);
    e.a.send(3, SendOp::Write(remote), &[e.a.sge(0, 8)]);
    e.run();
    let want = [
        (1, WcOpcode::Read, WcStatus::Success),
        (2, WcOpcode::Write, WcStatus::LocProtErr),
        (3, WcOpcode::Write, WcStatus::WrFlushErr),
    ];
    assert_eq!(e.a.ends(), want);
    assert_eq!(e.b.qp.state(), QpState::Error, "the peer was notified");
}

/// Returns the responder's reaction to invalid segments from a peer.
fn exchange(says: impl FnOnce(&mut Bench) -> Vec<Vec<u8>>) -> (Option<Terminate>, Bench) {
    let mut b = Bench::new(agreed(PLAIN, None, true), 1024);
    let ulpdus = says(&mut b);
    let mut framer = Framer::new(PLAIN);
    let mut bytes = Vec::new();
    for ulpdu in &ulpdus {
        let start = Framer::begin_fpdu(&mut bytes);
        bytes.extend_from_slice(ulpdu);
        framer.end_fpdu(&mut bytes, start);
    }
    b.input(&bytes);
    let out = b.output(usize::MAX);
    let mut deframer = Deframer::new(PLAIN);
    let (mut input, mut last) = (&out[..], None);
    while let Some(ulpdu) = deframer.poll(&mut input).unwrap() {
        let (header, payload) = Header::parse(ulpdu).unwrap();
        last = (header.opcode == Opcode::Terminate)
            .then(|| Terminate::parse(payload).unwrap())
            .or(last);
    }
    (last, b)
}

fn ulpdu(opcode: Opcode, last: bool, place: Placement, payload: &[u8]) -> Vec<u8> {
    let mut out = Vec::new();
    let header = Header {
        opcode,
        last,
        place,
    };
    header.emit(&mut out);
    out.extend_from_slice(payload);
    out
}

fn untagged(qn: u32, msn: u32, mo: u32) -> Placement {
    Placement::Untagged {
        invalidate: 0,
        qn,
        msn,
        mo,
    }
}

fn tagged(stag: u32, to: u64) -> Placement {
    Placement::Tagged { stag, to }
}

fn write(stag: u32, to: u64) -> Vec<u8> {
    ulpdu(Opcode::Write, true, tagged(stag, to), &[0xee])
}

fn read(msn: u32, size: u32, source_stag: u32, source_to: u64) -> Vec<u8> {
    let mut out = Vec::new();
    ReadRequest {
        sink_stag: 1,
        sink_to: 0,
        size,
        source_stag,
        source_to,
    }
    .emit(&mut out);
    ulpdu(Opcode::ReadRequest, true, untagged(1, msn, 0), &out)
}

/// Creates a request for an atomic that adds zero.
fn add(msn: u32, stag: u32, to: u64) -> Vec<u8> {
    let mut out = Vec::new();
    AtomicRequest {
        id: 1,
        stag,
        to,
        atomic: Atomic::FetchAdd { add: 0, mask: 0 },
    }
    .emit(&mut out);
    ulpdu(Opcode::AtomicRequest, true, untagged(1, msn, 0), &out)
}

fn message(last: bool, msn: u32, mo: u32, payload: &[u8]) -> Vec<u8> {
    ulpdu(Opcode::Send, last, untagged(0, msn, mo), payload)
}

/// Creates a single-segment message.
fn only(opcode: Opcode, place: Placement, payload: &[u8]) -> Vec<Vec<u8>> {
    vec![ulpdu(opcode, true, place, payload)]
}

type Case = (Reason, fn(u32, u64) -> Vec<Vec<u8>>);

const END: u64 = REGION as u64;

/// Each case gets the key and address of the responder's region.
const MISTAKES: &[Case] = &[
    (Reason::DdpInvalidStag, |key, at| vec![write(key ^ 1, at)]),
    (Reason::DdpBounds, |key, at| vec![write(key, at + END)]),
    (Reason::DdpBounds, |key, at| vec![write(key, at - 1)]),
    (Reason::DdpWrap, |key, _| vec![write(key, u64::MAX)]),
    (Reason::RdmapInvalidStag, |key, at| {
        vec![read(1, 1, key ^ 1, at)]
    }),
    (Reason::RdmapBounds, |key, at| {
        vec![read(1, 1, key, at + END)]
    }),
    (Reason::RdmapBounds, |key, at| {
        vec![read(1, u32::MAX, key, at)]
    }),
    (Reason::RdmapWrap, |key, _| vec![read(1, 2, key, u64::MAX)]),
    (Reason::InvalidMsn, |key, at| vec![read(2, 1, key, at)]),
    (Reason::NoBuffer, |_, _| {
        vec![message(true, 1, 0, b""), message(true, 2, 0, b"")]
    }),
    (Reason::InvalidMsn, |_, _| vec![message(true, 2, 0, b"")]),
    (Reason::InvalidMo, |_, _| vec![message(true, 1, 1, b"")]),
    (Reason::InvalidMo, |_, _| {
        vec![message(false, 1, 0, b"ab"), message(true, 1, 1, b"")]
    }),
    (Reason::TooLong, |_, _| {
        vec![message(true, 1, 0, &[0xee; 65])]
    }),
    (Reason::InvalidQueue, |_, _| {
        only(Opcode::Send, untagged(1, 1, 0), b"")
    }),
    (Reason::InvalidQueue, |_, _| {
        only(Opcode::Terminate, untagged(0, 1, 0), b"")
    }),
    (Reason::UnexpectedOpcode, |_, _| {
        let other = ulpdu(Opcode::SendSolicited, true, untagged(0, 1, 1), b"b");
        vec![message(false, 1, 0, b"a"), other]
    }),
    (Reason::UnexpectedOpcode, |_, _| {
        only(Opcode::ReadResponse, tagged(1, 0), &[0xee])
    }),
    (Reason::UnexpectedOpcode, |_, _| {
        only(Opcode::AtomicResponse, untagged(3, 1, 0), &[0; 12])
    }),
    (Reason::Framing, |_, _| {
        only(Opcode::ReadRequest, untagged(1, 1, 0), &[0; 27])
    }),
    (Reason::Framing, |_, _| {
        only(Opcode::Immediate, untagged(0, 1, 0), &[0; 7])
    }),
    (Reason::TooLong, |_, _| {
        vec![ulpdu(
            Opcode::ReadRequest,
            false,
            untagged(1, 1, 0),
            &[0; 28],
        )]
    }),
    // There is only one receive.
    (Reason::NoBuffer, |_, _| {
        let imm = |msn| ulpdu(Opcode::Immediate, true, untagged(0, msn, 0), &[0; 8]);
        vec![imm(1), imm(2)]
    }),
    (Reason::UnexpectedOpcode, |_, _| {
        let imm = ulpdu(Opcode::Immediate, true, untagged(0, 1, 0), &[0; 8]);
        vec![message(false, 1, 0, b"a"), imm]
    }),
    (Reason::RdmapBounds, |key, at| vec![add(1, key, at + 4)]),
    (Reason::RdmapBounds, |key, at| vec![add(1, key, at + END)]),
    (Reason::RdmapWrap, |key, _| vec![add(1, key, u64::MAX - 7)]),
    (Reason::RdmapInvalidStag, |key, at| {
        vec![add(1, key ^ 1, at)]
    }),
    (Reason::InvalidMsn, |key, at| {
        vec![read(1, 1, key, at), add(1, key, at)]
    }),
    (Reason::CannotInvalidate, |key, _| {
        let place = Placement::Untagged {
            invalidate: key,
            qn: 0,
            msn: 1,
            mo: 0,
        };
        only(Opcode::SendInvalidate, place, b"")
    }),
    (Reason::Framing, |_, _| vec![b"\x41\x43\0".to_vec()]),
    (Reason::DdpUntaggedVersion, |_, _| {
        vec![b"\x42\x43".to_vec()]
    }),
    (Reason::DdpTaggedVersion, |_, _| vec![b"\xc0\x40".to_vec()]),
    (Reason::RdmapVersion, |_, _| vec![b"\x41\x03".to_vec()]),
    (Reason::UnexpectedOpcode, |_, _| vec![b"\x41\x4f".to_vec()]),
];

#[test]
fn peer_errors_report_reason_without_side_effects() {
    for (n, (reason, says)) in MISTAKES.iter().enumerate() {
        let (terminate, mut b) = exchange(|b| {
            b.recv(1, 500, 64);
            // The last message would be accepted if there was no error before it.
            let mut all = says(b.mr.rkey.0, b.mr.addr);
            all.push(write(b.mr.rkey.0, b.mr.addr));
            all
        });
        let terminate = terminate.unwrap_or_else(|| panic!("case {n} is taken"));
        assert_eq!(terminate.reason, *reason, "case {n}");
        assert_eq!(b.qp.state(), QpState::Error);
        assert!(b.qp.is_over());
        b.input(&[0xee; 100]);
        assert!(!b.bytes(0, REGION).contains(&0xee), "case {n}");
    }
}

#[test]
fn qp_and_key_limit_access() {
    let other = PdId(Handle::new(2, 1));
    let all = Access::LOCAL_WRITE | Access::REMOTE;
    let atomic = |mr: &Mr| {
        let mut request = Vec::new();
        AtomicRequest {
            id: 1,
            stag: mr.rkey.0,
            to: mr.addr,
            atomic: Atomic::FetchAdd { add: 1, mask: 0 },
        }
        .emit(&mut request);
        ulpdu(Opcode::AtomicRequest, true, untagged(1, 1, 0), &request)
    };
    let local = Access::LOCAL_WRITE;
    for (pd, access, of_write, of_atomic) in [
        (
            other,
            all,
            Reason::DdpNotAssociated,
            Reason::RdmapNotAssociated,
        ),
        (PD, local, Reason::RdmapAccess, Reason::RdmapAccess),
    ] {
        for (reason, is_write) in [(of_write, true), (of_atomic, false)] {
            let (terminate, b) = exchange(|b| {
                let mr = b.mrs.reg(pd, &b.memory.whole(), access).unwrap();
                vec![match is_write {
                    true => write(mr.rkey.0, mr.addr),
                    false => atomic(&mr),
                }]
            });
            assert_eq!(terminate.unwrap().reason, reason);
            assert_eq!(b.bytes(0, 8), [0; 8]);
        }
    }
    // If the QP doesn't allow access, all keys are rejected.
    for is_write in [true, false] {
        let (terminate, _) = exchange(|b| {
            b.qp.set_access(Access::empty());
            vec![match is_write {
                true => write(b.mr.rkey.0, b.mr.addr),
                false => read(1, 1, b.mr.rkey.0, b.mr.addr),
            }]
        });
        assert_eq!(terminate.unwrap().reason, Reason::RdmapAccess);
    }
}

#[test]
fn unsupported_version_is_no_access_error() {
    for ulpdu in [b"\xc0\x40", b"\x42\x43"] {
        let (_, b) = exchange(|_| vec![ulpdu.to_vec()]);
        let event = RcEvent::Async(AsyncEvent::QpReqError(QP));
        assert!(b.out.contains(&event));
    }
}

#[test]
fn immediate_data_reports_write_length() {
    let imm = |msn| ulpdu(Opcode::Immediate, true, untagged(0, msn, 0), &[0; 8]);
    let (terminate, mut b) = exchange(|b| {
        b.recv(1, 500, 64);
        b.recv(2, 500, 64);
        vec![write(b.mr.rkey.0, b.mr.addr), imm(1), imm(2)]
    });
    assert!(terminate.is_none());
    let lens: Vec<_> = b.completions().iter().map(|c| c.byte_len).collect();
    assert_eq!(lens, [1, 0]);
}

#[test]
fn reads_beyond_limit_are_rejected() {
    let reads = |count| {
        exchange(|b| {
            let all = 1..=count;
            all.map(|msn| read(msn, 1, b.mr.rkey.0, b.mr.addr))
                .collect()
        })
    };
    assert!(reads(4).0.is_none());
    assert_eq!(reads(5).0.unwrap().reason, Reason::NoBuffer);
}

#[test]
fn invalid_crc_closes_connection() {
    let mut e = Ends::plain();
    e.a.send(1, SendOp::Write(e.b.remote(0)), &[e.a.sge(0, 100)]);
    let mut bytes = e.a.output(usize::MAX);
    let at = bytes.len() - 20;
    bytes[at] ^= 4;
    e.b.input(&bytes);
    e.run();
    assert_eq!(e.a.qp.counters().rx_terminates, 1);
    assert_eq!(e.a.qp.state(), QpState::Error);
    assert!(
        e.b.out
            .contains(&RcEvent::Async(AsyncEvent::QpReqError(QP)))
    );
}

#[test]
fn region_removed_during_read_closes_connection() {
    let mut e = Ends::plain();
    e.a.send(1, SendOp::Read(e.b.remote(0)), &[e.a.sge(0, 50_000)]);
    let request = e.a.output(usize::MAX);
    e.b.input(&request);
    let first = e.b.output(5000);
    e.a.input(&first);
    let id = e.b.mr.id;
    e.b.mrs.dereg(id).unwrap();
    e.run();
    let want = [(1, WcOpcode::Read, WcStatus::RemAccessErr)];
    assert_eq!(e.a.ends(), want);
}

#[test]
fn send_queue_drains_and_resumes() {
    let mut e = Ends::plain();
    let remote = e.b.remote(0);
    e.a.send(1, SendOp::Write(remote), &[e.a.sge(0, 10_000)]);
    let begun = e.a.output(3000);
    e.b.input(&begun);
    e.a.with(RdmapQp::to_sqd);
    e.a.send(2, SendOp::Write(remote), &[e.a.sge(0, 8)]);
    assert!(e.a.qp.is_draining());
    e.run();
    let drained = RcEvent::Async(AsyncEvent::SqDrained(QP));
    assert!(e.a.out.contains(&drained));
    assert_eq!(e.a.ends(), [(1, WcOpcode::Write, WcStatus::Success)]);
    e.a.qp.resume();
    e.run();
    assert_eq!(e.a.ends(), [(2, WcOpcode::Write, WcStatus::Success)]);
}

#[test]
fn unsupported_requests_are_rejected_when_posted() {
    let mut e = Ends::plain();
    let wr = SendWr::new(1, SendOp::SendImm(1), &[]);
    let refused = e.a.with(|qp, env| qp.post_send(&[wr], env)).unwrap_err();
    assert_eq!(refused.reason, crate::verbs::PostReason::InvalidOpcode);
}

/// Random data and segments with random headers must not cause a panic and must not write to memory
/// without a valid key.
#[test]
fn random_streams_have_no_effect() {
    let mut random = fastrand::Rng::with_seed(9);
    for round in 0..1000 {
        let mut b = Bench::new(agreed(PLAIN, None, true), 1024);
        b.recv(1, 0, 16);
        b.memory.fill(16, 1000, 0x55);
        let mut framer = Framer::new(PLAIN);
        let mut bytes = Vec::new();
        for _ in 0..random.usize(1..6) {
            let start = Framer::begin_fpdu(&mut bytes);
            if random.u8(..4) > 0 {
                bytes.push([0x41, 0x01, 0xc1, 0x81][random.usize(..4)]);
                bytes.push(0x40 | random.u8(..13));
            }
            let len = random.usize(..80);
            let most = [1, 2, 256][random.usize(..3)] as u16;
            bytes.extend((0..len).map(|_| random.u16(..most) as u8));
            match round % 3 {
                0 => bytes.resize(start + 80, 0),
                _ => framer.end_fpdu(&mut bytes, start),
            }
        }
        b.input(&bytes);
        let output = b.output(1 << 16);
        assert!(output.len() < 1000);
        assert!(b.bytes(16, 1000) == [0x55; 1000]);
    }
}

/// Processes data from a peer in two blocks. The first byte determines the position of the split
/// and if markers are used. Since the QP doesn't allow write access, only receives can be written.
fn take_in(bytes: &[u8]) {
    let Some((&how, bytes)) = bytes.split_first() else {
        return;
    };
    let framing = Framing {
        markers: how & 1 == 1,
        crc: false,
    };
    let mut b = Bench::new(agreed(framing, None, true), 1024);
    b.qp.set_access(Access::REMOTE_READ);
    b.recv(1, 0, 16);
    b.memory.fill(16, 1000, 0x55);
    let (first, rest) = bytes.split_at(bytes.len() * usize::from(how) / 256);
    for piece in [first, rest] {
        b.input(piece);
        // There can be four READs, and each of them can request the full region.
        assert!(b.output(1 << 16).len() < 1 << 17);
    }
    assert!(b.bytes(16, 1000) == [0x55; 1000]);
    assert_eq!(b.qp.state() == QpState::Error, b.qp.is_over());
    for kind in [StartKind::Request, StartKind::Reply] {
        if let Ok(Some((frame, len))) = StartFrame::parse(kind, bytes) {
            let mut out = Vec::new();
            frame.emit(&mut out);
            assert_eq!(out.len(), len);
            assert_eq!(StartFrame::parse(kind, &out), Ok(Some((frame, len))));
        }
    }
}

#[test]
fn rdmap_stream() {
    bolero::check!(name = "rdmap_stream").for_each(|bytes: &[u8]| take_in(bytes));
}
