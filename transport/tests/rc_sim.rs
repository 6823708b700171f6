//! Simulates two queue pairs on a bad wire, under virtual time.
//!
//! All packets are encoded with an ICRC. 20 % of them are lost, 5 % duplicated, 5 % corrupted (and
//! dropped because of their ICRC) and a quarter is overtaken by up to 64 other packets, in both
//! directions. Both sides send all kinds of requests, from 0 bytes to 64 KiB, with all path MTUs,
//! across the wrap of the PSN, with dedicated and shared receive queues. Their sockets are full
//! occasionally, so that packets wait while acknowledgements arrive, the limit of bytes in flight
//! changes, and the owner of a request overwrites its buffer as soon as it is complete. An oracle
//! checks all bytes, that each completion is delivered exactly once and in order, and that the
//! bytes of each packet still match its ICRC when it is sent.
//!
//! - `RISER_SIM_MESSAGES`: total number of messages to send (in sessions of 1,000). Such a long run
//!   uses different seeds each time, and prints the first one; otherwise the seeds are fixed.
//! - `RISER_SEED`: the first seed of a long run, to repeat it.
//! - `RISER_SIM_SEED`: runs only the session with this seed, which is printed by a failure.

#![allow(clippy::print_stderr, reason = "a failing session prints its seed")]

use std::cmp::Reverse;
use std::collections::{BinaryHeap, VecDeque};
use std::net::SocketAddr;
use std::ops::Range;
use std::time::{Duration, Instant};

use riser_memory::Memory;
use riser_transport::mr::MrTable;
use riser_transport::nic::batch::{Offered, SendOutcome, TxBatch, TxPath};
use riser_transport::rc::{
    Env, RcConfig, RcCounters, RcEvent, RcQp, RecvQueue, RtrParams, RtsParams, TxPacket,
};
use riser_transport::verbs::{
    Access, AsyncEvent, Completion, Handle, Mr, Mtu, PdId, QpCap, QpId, QpState, RKey, RecvWr,
    RemoteAddr, SendFlags, SendOp, SendWr, Sge, WcOpcode, WcStatus, WrId,
};
use riser_transport::wire::{IcrcFlow, Packet, Psn, Qpn, RnrTimer};

const SESSION_MESSAGES: u64 = 1000;
/// Number of messages in flight per side, each with separate memory.
const SLOTS: usize = 24;
const MAX_LEN: usize = 64 * 1024;
/// Length of a slot and the guard bytes after it.
const STRIDE: usize = MAX_LEN + 64;
const GUARD: u8 = 0xee;
const RECVS: usize = 16;
const FAST_REGIONS: usize = 4;
const PATTERN: usize = 1 << 18;
const INLINE: usize = 64;

/// Faults of the wire, in percent.
#[derive(Clone, Copy)]
struct Wire {
    loss: u64,
    duplication: u64,
    corruption: u64,
    reordered: u64,
    /// Probability that the socket is full when a packet is sent.
    full: u64,
    /// Probability that a router marks a packet for congestion.
    marked: u64,
}

const BAD: Wire = Wire {
    loss: 20,
    duplication: 5,
    corruption: 5,
    reordered: 25,
    full: 5,
    marked: 0,
};

const PERFECT: Wire = Wire {
    loss: 0,
    duplication: 0,
    corruption: 0,
    reordered: 0,
    full: 0,
    marked: 0,
};

const DEAD: Wire = Wire {
    loss: 100,
    ..PERFECT
};

const REORDER_BY: u64 = 64;
/// Probability in percent that the owner delays posting receives, and the delay in nanoseconds.
const RECV_STALL: u64 = 10;
const RECV_STALL_TIME: u64 = 400_000;
/// Transmission time and latency of a packet, in nanoseconds.
const PACKET_TIME: u64 = 1000;
const LATENCY: u64 = 5000;
/// Time during which a full socket accepts no packets, in nanoseconds.
const FULL_TIME: u64 = 20_000;

struct Random(fastrand::Rng);

impl Random {
    fn next(&mut self) -> u64 {
        self.0.u64(..)
    }

    fn below(&mut self, bound: u64) -> u64 {
        self.0.u64(..bound)
    }

    fn percent(&mut self, chance: u64) -> bool {
        self.below(100) < chance
    }

    /// Returns a limit of bytes in flight, from 8 KiB to 128 KiB.
    fn inflight(&mut self) -> u32 {
        1 << (13 + self.below(5))
    }

    /// Returns a message length: mostly small, occasionally up to 64 KiB.
    fn length(&mut self) -> usize {
        let most = match self.below(200) {
            0..100 => 65,
            100..160 => 513,
            160..190 => 4097,
            190..199 => 16385,
            _ => MAX_LEN as u64 + 1,
        };
        self.below(most) as usize
    }
}

#[derive(Clone, Copy, Debug)]
struct Message {
    wr_id: u64,
    slot: usize,
    len: usize,
    opcode: WcOpcode,
    is_signaled: bool,
    check: Check,
}

/// Condition that must hold when the message is complete.
#[derive(Clone, Copy, Debug)]
enum Check {
    Nothing,
    /// The peer's slot contains the pattern starting at this offset.
    Remote {
        slot: usize,
        at: usize,
        len: usize,
    },
    /// Our slot contains the pattern starting at this offset.
    Local {
        slot: usize,
        at: usize,
        len: usize,
    },
    /// Our slot contains this number.
    Number {
        slot: usize,
        value: u64,
    },
    /// The fast region is registered with this key, which may be passed to the peer.
    Registered {
        region: usize,
        key: RKey,
    },
    /// The fast region is invalid again.
    Invalidated {
        region: usize,
    },
}

#[derive(Debug)]
struct Expected {
    opcode: WcOpcode,
    len: usize,
    /// Offset of a SEND's data in the pattern.
    at: usize,
    imm: Option<u32>,
    invalidated: Option<RKey>,
    solicited: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Region {
    Idle,
    Busy,
    /// Registered, to be invalidated by us.
    Held,
    /// Registered, and may be invalidated by the peer.
    Transferred,
}

struct Side {
    qp: RcQp,
    mrs: MrTable,
    rq: RecvQueue,
    out: Vec<RcEvent>,
    local: Memory,
    remote: Memory,
    recv: Memory,
    cells: Memory,
    local_mr: Mr,
    remote_mr: Mr,
    recv_mr: Mr,
    cells_mr: Mr,
    /// Values of the peer's cells after all posted requests.
    cell_model: [u64; 2],
    under_way: VecDeque<Message>,
    free_slots: Vec<usize>,
    posted: u64,
    completed: u64,
    expected: VecDeque<Expected>,
    late_recvs: Vec<usize>,
    /// Time until which receives are not posted again.
    stalled_until: u64,
    /// Probability in percent that the owner delays posting receives.
    recv_stall: u64,
    regions: Vec<(Mr, RKey, Region)>,
    /// Keys of the peer that we may invalidate.
    transferred: Vec<RKey>,
    flow_out: IcrcFlow,
    flow_in: IcrcFlow,
    wire_free: u64,
    /// Packets that the socket has not accepted yet, and the time until which it accepts none.
    batch: TxBatch,
    full_until: u64,
}

const PD: PdId = PdId(Handle::new(1, 1));

impl Side {
    fn new(
        index: u32,
        random: &mut Random,
        srq: bool,
        is_lossy: bool,
        addrs: [SocketAddr; 2],
    ) -> Self {
        let seed = random.next();
        let mut mrs = MrTable::new(16, 4, std::array::from_fn(|i| (seed >> (i % 8 * 8)) as u8));
        let all = Access::LOCAL_WRITE | Access::REMOTE;
        let memory = |len| Memory::new(len).unwrap();
        let (local, remote) = (memory(SLOTS * STRIDE), memory(SLOTS * STRIDE));
        let (recv, cells) = (memory(RECVS * STRIDE), memory(4096));
        for slot in 0..SLOTS {
            local.fill(slot * STRIDE + MAX_LEN, 64, GUARD);
            remote.fill(slot * STRIDE + MAX_LEN, 64, GUARD);
        }
        let zero = if random.percent(50) {
            Access::ZERO_BASED
        } else {
            Access::empty()
        };
        let local_mr = mrs.reg(PD, &local.whole(), Access::LOCAL_WRITE).unwrap();
        let remote_mr = mrs.reg(PD, &remote.whole(), all | zero).unwrap();
        let recv_mr = mrs.reg(PD, &recv.whole(), Access::LOCAL_WRITE).unwrap();
        let cells_mr = mrs.reg(PD, &cells.whole(), all).unwrap();
        let regions = (0..FAST_REGIONS)
            .map(|i| {
                let mr = mrs.alloc_fast(PD, 2).unwrap();
                let from = i * STRIDE;
                mrs.map_sg(mr.id, &[remote.slice(from..from + 8).unwrap()])
                    .unwrap();
                (mr, mr.rkey, Region::Idle)
            })
            .collect();
        let cap = QpCap {
            max_send_wr: 32,
            max_recv_wr: RECVS as u32,
            max_send_sge: 3,
            max_recv_sge: 2,
            max_inline: INLINE as u32,
        };
        let mut cfg = RcConfig::new(QpId(Handle::new(index, 1)), PD, cap);
        cfg.has_srq = srq;
        if is_lossy {
            cfg.first_retransmit = Duration::from_micros(150);
            cfg.min_retransmit = Duration::from_micros(20);
        }
        cfg.ack_every = 1 + random.below(20) as u32;
        cfg.seed = random.next() as u32;
        cfg.max_inflight_bytes = random.inflight();
        let recvs = 1 + random.below(RECVS as u64) as usize;
        let flow = |from: usize, to: usize| IcrcFlow::new(addrs[from], addrs[to]).unwrap();
        let me = index as usize;
        Self {
            qp: RcQp::new(cfg),
            mrs,
            rq: RecvQueue::new(RECVS as u32, 2),
            out: Vec::new(),
            local,
            remote,
            recv,
            cells,
            local_mr,
            remote_mr,
            recv_mr,
            cells_mr,
            cell_model: [0; 2],
            under_way: VecDeque::new(),
            free_slots: (0..SLOTS).collect(),
            posted: 0,
            completed: 0,
            expected: VecDeque::new(),
            late_recvs: (0..recvs).collect(),
            stalled_until: 0,
            recv_stall: RECV_STALL,
            regions,
            transferred: Vec::new(),
            flow_out: flow(me, 1 - me),
            flow_in: flow(1 - me, me),
            wire_free: 0,
            batch: TxBatch::new(1),
            full_until: 0,
        }
    }

    fn env(&mut self) -> (&mut RcQp, Env<'_>) {
        let env = Env {
            mrs: &mut self.mrs,
            rq: &mut self.rq,
            out: &mut self.out,
        };
        (&mut self.qp, env)
    }

    fn post_recv(&mut self, slot: usize) {
        let addr = self.recv_mr.addr + (slot * STRIDE) as u64;
        let lkey = self.recv_mr.lkey;
        let sge = |addr, length| Sge { addr, length, lkey };
        let sges = [sge(addr, 1000), sge(addr + 1000, (MAX_LEN - 1000) as u32)];
        let wr = RecvWr {
            wr_id: WrId(slot as u64),
            sges: &sges,
        };
        let (qp, mut env) = self.env();
        if qp.config().has_srq {
            env.rq.post(&[wr]).unwrap();
        } else {
            qp.post_recv(&[wr], &mut env).unwrap();
        }
    }
}

struct Flight {
    to: usize,
    bytes: Vec<u8>,
}

struct Sim {
    sides: [Side; 2],
    random: Random,
    pattern: Vec<u8>,
    start: Instant,
    now: u64,
    heap: BinaryHeap<Reverse<(u64, u64, usize)>>,
    flights: Vec<Flight>,
    free_flights: Vec<usize>,
    sequence: u64,
    quota: u64,
    wire: Wire,
    scratch: Vec<u8>,
    tx: TxPacket,
}

impl Sim {
    fn new(seed: u64, quota: u64, wire: Wire) -> Self {
        let mut random = Random(fastrand::Rng::with_seed(seed));
        let addrs = if random.percent(50) {
            ["127.0.0.1:50001", "127.0.0.2:4791"]
        } else {
            ["[fd00::1]:50001", "[fd00::2]:4791"]
        }
        .map(|a| a.parse().unwrap());
        let mut pattern = Vec::with_capacity(PATTERN + MAX_LEN);
        while pattern.len() < PATTERN + MAX_LEN {
            pattern.extend_from_slice(&random.next().to_le_bytes());
        }
        let srq = random.percent(30);
        let mut sides = [0, 1].map(|i| Side::new(i, &mut random, srq, wire.loss > 0, addrs));
        let mtu = Mtu::ALL[(seed % 5) as usize];
        let reads = 1 + random.below(8) as u8;
        // Half of the sessions start just before the wrap of the PSN.
        let psns: [Psn; 2] = std::array::from_fn(|_| {
            let back = random.below(5000) as u32;
            let base = if random.percent(50) {
                0x100_0000
            } else {
                0x80_0000
            };
            Psn::new(base - back)
        });
        for (i, side) in sides.iter_mut().enumerate() {
            side.qp.to_init();
            side.qp.to_rtr(&RtrParams {
                path_mtu: mtu,
                dest_qpn: Qpn::new(100 + (1 - i) as u32),
                rq_psn: psns[1 - i],
                max_dest_rd_atomic: reads,
                min_rnr_timer: RnrTimer::new(3),
                access: Access::REMOTE,
            });
            side.qp.to_rts(&RtsParams {
                sq_psn: psns[i],
                timeout: if wire.loss > 0 { 8 } else { 14 },
                retry_cnt: 7,
                rnr_retry: 7,
                max_rd_atomic: reads,
            });
        }
        Self {
            sides,
            random,
            pattern,
            start: Instant::now(),
            now: 0,
            heap: BinaryHeap::new(),
            flights: Vec::new(),
            free_flights: Vec::new(),
            sequence: 0,
            quota,
            wire,
            scratch: vec![0; MAX_LEN],
            tx: TxPacket::default(),
        }
    }

    fn instant(&self) -> Instant {
        self.start + Duration::from_nanos(self.now)
    }

    fn run(&mut self) -> [RcCounters; 2] {
        // Longer than any session, but shorter than a test's timeout.
        let limit = 600_000_000_000;
        while self.sides.iter().any(|s| s.completed < self.quota) {
            self.step();
            assert!(self.now < limit, "no progress");
        }
        for me in 0..2 {
            let mut cells = [0; 16];
            self.sides[1 - me].cells.read(0, &mut cells);
            let model = self.sides[me].cell_model.map(u64::to_ne_bytes);
            assert_eq!(cells, model.concat()[..], "atomics ran exactly once");
        }
        for side in &self.sides {
            assert!(side.expected.is_empty() && side.under_way.is_empty());
            for slot in 0..SLOTS {
                for memory in [&side.local, &side.remote] {
                    let mut guard = [0; 64];
                    memory.read(slot * STRIDE + MAX_LEN, &mut guard);
                    assert_eq!(guard, [GUARD; 64]);
                }
            }
        }
        [0, 1].map(|i| *self.sides[i].qp.counters())
    }

    /// Executes all pending work of both sides, then advances time to the next event.
    fn step(&mut self) {
        for me in 0..2 {
            self.post(me);
            // Occasionally drain the send queue, and resume it when it is empty.
            if self.wire.loss > 0
                && self.random.below(1000) == 0
                && self.sides[me].qp.state() == QpState::Rts
            {
                let (qp, mut env) = self.sides[me].env();
                qp.to_sqd(&mut env);
            }
            // The limit per connection depends on the number of connections of a peer.
            if self.random.below(100) == 0 {
                let most = self.random.inflight();
                self.sides[me].qp.set_max_inflight(most);
            }
            self.transmit(me);
            self.finish_step(me);
        }
        let deadline = |s: &Side| {
            let at = s.qp.poll_timeout()?;
            Some(at.saturating_duration_since(self.start).as_nanos() as u64)
        };
        let arrival = self.heap.peek().map(|Reverse((at, ..))| *at);
        let stall = |s: &Side| (!s.late_recvs.is_empty()).then_some(s.stalled_until);
        let room = |s: &Side| (!s.batch.is_empty()).then_some(s.full_until);
        let sides = self.sides.iter();
        let waits = sides.flat_map(|s| [deadline(s), stall(s), room(s)]);
        let Some(next) = waits.chain([arrival]).flatten().min() else {
            assert!(self.sides.iter().all(|s| s.completed == self.quota));
            return;
        };
        self.now = self.now.max(next);
        self.arrive();
        let now = self.instant();
        for side in &mut self.sides {
            let (qp, mut env) = side.env();
            qp.handle_timeout(now, &mut env);
        }
    }

    fn arrive(&mut self) {
        let now = self.instant();
        while let Some(Reverse((at, _, index))) = self.heap.peek().copied()
            && at <= self.now
        {
            self.heap.pop();
            let is_marked = self.wire.marked > 0 && self.random.percent(self.wire.marked);
            let flight = &mut self.flights[index];
            let side = &mut self.sides[flight.to];
            let bytes = std::mem::take(&mut flight.bytes);
            if side.flow_in.check_exact(&bytes, 0).is_ok() {
                let packet = Packet::parse(&bytes).expect("a good ICRC on a bad packet");
                let (qp, mut env) = side.env();
                if is_marked {
                    qp.handle_mark(now, &packet);
                }
                qp.handle_packet(now, &packet, &mut env);
            }
            self.flights[index].bytes = bytes;
            self.free_flights.push(index);
        }
    }

    fn transmit(&mut self, me: usize) {
        if self.sides[me].full_until > self.now || !self.flush(me) {
            return;
        }
        self.gather(me);
        self.flush(me);
    }

    /// Adds the packets of a side to its batch.
    fn gather(&mut self, me: usize) {
        let now = self.instant();
        let side = &mut self.sides[me];
        let mut env = Env {
            mrs: &mut side.mrs,
            rq: &mut side.rq,
            out: &mut side.out,
        };
        while side.qp.poll_transmit(now, &mut env, &mut self.tx) {
            let mut bytes = Vec::with_capacity(self.tx.len());
            self.tx.copy_to(&mut bytes);
            let icrc = side.flow_out.compute(&bytes, 0);
            let dst = "127.0.0.1:4791".parse().expect("an address");
            let way = TxPath::to(dst).markable(true);
            side.batch.begin(way, Qpn::new(2), bytes.len() + 4);
            side.batch.push_bytes(&self.tx.headers);
            side.batch.push_bytes(&self.tx.inline);
            for slice in self.tx.segments.drain(..) {
                side.batch.push_memory(slice);
            }
            side.batch.push_bytes(&[0; 3][..self.tx.pad()]);
            side.batch.push_bytes(&icrc.to_le_bytes());
        }
    }

    /// Sends the batch of a side; returns false if the socket becomes full.
    fn flush(&mut self, me: usize) -> bool {
        let mut batch = std::mem::replace(&mut self.sides[me].batch, TxBatch::new(1));
        let outcome = batch.drain(self.instant(), |batch, groups| {
            if self.random.percent(self.wire.full) {
                return Offered::Full;
            }
            for packet in batch.copy_packets(&groups[0]) {
                self.send(me, &packet);
            }
            Offered::Taken(1)
        });
        self.sides[me].batch = batch;
        if outcome == SendOutcome::Blocked {
            self.sides[me].full_until = self.now + FULL_TIME;
        }
        outcome == SendOutcome::Done
    }

    fn send(&mut self, me: usize, packet: &[u8]) {
        let side = &mut self.sides[me];
        let is_whole = side.flow_out.check_exact(packet, 0).is_ok();
        assert!(is_whole, "a packet changed before it was sent");
        side.wire_free = side.wire_free.max(self.now) + PACKET_TIME;
        let leaves = side.wire_free;
        if self.random.percent(self.wire.loss) {
            return;
        }
        let is_doubled = self.random.percent(self.wire.duplication);
        for _ in 0..1 + u8::from(is_doubled) {
            self.fly(me, leaves, packet);
        }
    }

    fn fly(&mut self, me: usize, leaves: u64, packet: &[u8]) {
        let index = self.free_flights.pop().unwrap_or_else(|| {
            self.flights.push(Flight {
                to: 0,
                bytes: Vec::new(),
            });
            self.flights.len() - 1
        });
        let flight = &mut self.flights[index];
        flight.to = 1 - me;
        let bytes = &mut flight.bytes;
        bytes.clear();
        bytes.extend_from_slice(packet);
        if self.random.percent(self.wire.corruption) {
            // A burst of up to 32 bits, which CRC-32 always detects.
            let at = self.random.below(bytes.len() as u64 - 3) as usize;
            let flips = (self.random.next() as u32 | 1).to_le_bytes();
            for (byte, flip) in bytes[at..at + 4].iter_mut().zip(flips) {
                *byte ^= flip;
            }
        }
        let mut at = leaves + LATENCY;
        if self.random.percent(self.wire.reordered) {
            at += (1 + self.random.below(REORDER_BY)) * PACKET_TIME;
        }
        self.sequence += 1;
        self.heap.push(Reverse((at, self.sequence, index)));
    }

    /// Posts as much as possible: delayed receives, and chains of messages.
    fn post(&mut self, me: usize) {
        while self.sides[me].stalled_until <= self.now
            && let Some(slot) = self.sides[me].late_recvs.pop()
        {
            self.sides[me].post_recv(slot);
        }
        while self.sides[me].posted < self.quota && !self.sides[me].free_slots.is_empty() {
            self.post_message(me);
        }
    }

    fn post_message(&mut self, me: usize) {
        let is_last = self.sides[me].posted + 1 == self.quota;
        let slot = self.sides[me].free_slots.pop().expect("a free slot");
        let wr_id = self.sides[me].posted;
        let len = self.random.length();
        let at = self.random.below(PATTERN as u64) as usize;
        let local_at = slot * STRIDE;
        let remote = |peer: &Side| RemoteAddr {
            addr: peer.remote_mr.addr + local_at as u64,
            rkey: peer.remote_mr.rkey,
        };
        let kind = self.random.below(100);
        let imm = self.random.next() as u32;
        let (a, b) = self.sides.split_at_mut(1);
        let (side, peer) = if me == 0 {
            (&mut a[0], &mut b[0])
        } else {
            (&mut b[0], &mut a[0])
        };
        side.local.write(local_at, &self.pattern[at..at + len]);
        let flags_for = |random: &mut Random| {
            let mut flags = SendFlags::empty();
            flags.set(
                SendFlags::SIGNALED,
                is_last || wr_id.is_multiple_of(8) || random.percent(60),
            );
            flags.set(SendFlags::FENCE, random.percent(5));
            flags.set(SendFlags::SOLICITED, random.percent(30));
            flags
        };
        let flags = flags_for(&mut self.random);
        let mut len = len;
        let mut check = Check::Nothing;
        let mut expect = None;
        let op = match kind {
            0..25 => {
                expect = Some((WcOpcode::Recv, None, None));
                SendOp::Send
            }
            25..35 => {
                expect = Some((WcOpcode::Recv, Some(imm), None));
                SendOp::SendImm(imm)
            }
            35..45 if !side.transferred.is_empty() => {
                let key = side.transferred.pop().expect("a key");
                expect = Some((WcOpcode::Recv, None, Some(key)));
                SendOp::SendInv(key)
            }
            45..55 => {
                expect = Some((WcOpcode::RecvWriteImm, Some(imm), None));
                check = Check::Remote { slot, at, len };
                SendOp::WriteImm(remote(peer), imm)
            }
            55..75 => {
                peer.remote.write(local_at, &self.pattern[at..at + len]);
                side.local.fill(local_at, len, 0);
                check = Check::Local { slot, at, len };
                SendOp::Read(remote(peer))
            }
            75..85 => {
                len = 8;
                let cell = (imm % 2) as usize;
                let value = side.cell_model[cell];
                check = Check::Number { slot, value };
                let remote = RemoteAddr {
                    addr: peer.cells_mr.addr + 8 * cell as u64,
                    rkey: peer.cells_mr.rkey,
                };
                let number = self.random.next();
                if self.random.percent(50) {
                    side.cell_model[cell] = value.wrapping_add(number);
                    SendOp::FetchAdd {
                        remote,
                        add: number,
                    }
                } else {
                    let is_equal = self.random.percent(70);
                    if is_equal {
                        side.cell_model[cell] = number;
                    }
                    SendOp::CmpSwap {
                        remote,
                        compare: value ^ u64::from(!is_equal),
                        swap: number,
                    }
                }
            }
            85..92 if side.regions.iter().any(|r| r.2 == Region::Idle) => {
                len = 0;
                let region = side
                    .regions
                    .iter()
                    .position(|r| r.2 == Region::Idle)
                    .unwrap();
                let key = side.regions[region].1.next();
                side.regions[region].1 = key;
                side.regions[region].2 = Region::Busy;
                check = Check::Registered { region, key };
                SendOp::RegMr {
                    mr: side.regions[region].0.id,
                    key,
                    access: Access::LOCAL_WRITE | Access::REMOTE_WRITE,
                }
            }
            92..95 if side.regions.iter().any(|r| r.2 == Region::Held) => {
                len = 0;
                let region = side
                    .regions
                    .iter()
                    .position(|r| r.2 == Region::Held)
                    .unwrap();
                side.regions[region].2 = Region::Busy;
                check = Check::Invalidated { region };
                SendOp::LocalInv(side.regions[region].1)
            }
            _ => {
                check = Check::Remote { slot, at, len };
                SendOp::Write(remote(peer))
            }
        };
        if let Some((opcode, imm, invalidated)) = expect {
            peer.expected.push_back(Expected {
                opcode,
                len,
                at,
                imm,
                invalidated,
                solicited: flags.contains(SendFlags::SOLICITED),
            });
        }
        let may_inline = matches!(
            op,
            SendOp::Send
                | SendOp::SendImm(_)
                | SendOp::SendInv(_)
                | SendOp::Write(_)
                | SendOp::WriteImm(..)
        );
        let is_inline = may_inline && len <= INLINE && self.random.percent(50);
        // One to three entries, split at random offsets.
        let mut cuts = [
            0,
            self.random.below(len as u64 + 1),
            self.random.below(len as u64 + 1),
            len as u64,
        ];
        cuts.sort_unstable();
        let sges: [Sge; 3] = std::array::from_fn(|i| Sge {
            addr: side.local_mr.addr + local_at as u64 + cuts[i],
            length: (cuts[i + 1] - cuts[i]) as u32,
            lkey: side.local_mr.lkey,
        });
        let mut data = [0; INLINE];
        let is_local = matches!(op, SendOp::RegMr { .. } | SendOp::LocalInv(_));
        let wr = if is_inline {
            side.local.read(local_at, &mut data[..len]);
            SendWr::with_inline(wr_id, op, &data[..len])
        } else {
            SendWr::new(wr_id, op, if is_local { &[] } else { &sges })
        }
        .flags(flags);
        let message = Message {
            wr_id,
            slot,
            len,
            opcode: opcode_of(&op),
            is_signaled: flags.contains(SendFlags::SIGNALED),
            check,
        };
        side.under_way.push_back(message);
        side.posted += 1;
        let (qp, mut env) = side.env();
        qp.post_send(&[wr], &mut env)
            .expect("room in the send queue");
        if is_inline {
            // Inline data have been copied; the buffer may be modified immediately.
            side.local.fill(local_at, len, 0x55);
        }
    }

    /// Compares the events of a side with the expected events.
    fn finish_step(&mut self, me: usize) {
        // Transmitting may add events, because local requests complete immediately.
        while !self.sides[me].out.is_empty() {
            let mut events = std::mem::take(&mut self.sides[me].out);
            for event in events.drain(..) {
                match event {
                    RcEvent::Send(done) => self.on_send_done(me, &done),
                    RcEvent::Recv(done) => self.on_recv_done(me, &done),
                    RcEvent::Async(AsyncEvent::SqDrained(_)) => {
                        self.sides[me].qp.resume();
                        self.transmit(me);
                    }
                    RcEvent::Async(event) => panic!("unexpected {event:?}"),
                }
            }
        }
    }

    fn on_send_done(&mut self, me: usize, done: &Completion) {
        assert_eq!(done.status, WcStatus::Success, "{done:?}");
        loop {
            let message = self.sides[me]
                .under_way
                .pop_front()
                .expect("a message under way");
            self.check(me, &message);
            if message.is_signaled {
                assert_eq!((done.wr_id.0, done.opcode), (message.wr_id, message.opcode));
                break;
            }
        }
    }

    fn check(&mut self, me: usize, message: &Message) {
        let side = &mut self.sides[me];
        side.completed += 1;
        side.free_slots.push(message.slot);
        match message.check {
            Check::Nothing => {}
            Check::Remote { slot, at, len } => {
                let got = &mut self.scratch[..len];
                self.sides[1 - me].remote.read(slot * STRIDE, got);
                assert!(
                    got == &self.pattern[at..at + len],
                    "wrong bytes written: {message:?}"
                );
            }
            Check::Local { slot, at, len } => {
                let got = &mut self.scratch[..len];
                side.local.read(slot * STRIDE, got);
                assert!(
                    got == &self.pattern[at..at + len],
                    "wrong bytes read: {message:?}"
                );
            }
            Check::Number { slot, value } => {
                let mut got = [0; 8];
                side.local.read(slot * STRIDE, &mut got);
                assert_eq!(u64::from_ne_bytes(got), value, "{message:?}");
            }
            Check::Registered { region, key } => {
                if self.random.percent(30) {
                    side.regions[region].2 = Region::Held;
                } else {
                    side.regions[region].2 = Region::Transferred;
                    self.sides[1 - me].transferred.push(key);
                }
            }
            Check::Invalidated { region } => side.regions[region].2 = Region::Idle,
        }
        // The buffer is reused immediately.
        let at = message.slot * STRIDE;
        self.sides[me].local.fill(at, message.len, 0xaa);
    }

    fn on_recv_done(&mut self, me: usize, done: &Completion) {
        assert_eq!(done.status, WcStatus::Success, "{done:?}");
        let side = &mut self.sides[me];
        let expected = side.expected.pop_front().expect("a message to us");
        assert_eq!(
            (
                done.opcode,
                done.byte_len as usize,
                done.imm,
                done.invalidated,
                done.solicited
            ),
            (
                expected.opcode,
                expected.len,
                expected.imm,
                expected.invalidated,
                expected.solicited
            ),
        );
        let slot = done.wr_id.0 as usize;
        if expected.opcode == WcOpcode::Recv {
            let got = &mut self.scratch[..expected.len];
            side.recv.read(slot * STRIDE, got);
            let want = &self.pattern[expected.at..expected.at + expected.len];
            assert!(got == want, "wrong bytes received: {expected:?}");
        }
        if let Some(key) = done.invalidated {
            let region = side
                .regions
                .iter_mut()
                .find(|r| r.1 == key)
                .expect("our key");
            assert_eq!(region.2, Region::Transferred);
            region.2 = Region::Idle;
        }
        side.late_recvs.push(slot);
        if self.random.percent(side.recv_stall) {
            side.stalled_until = self.now + RECV_STALL_TIME;
        }
    }
}

fn opcode_of(op: &SendOp) -> WcOpcode {
    match op {
        SendOp::Send | SendOp::SendImm(_) | SendOp::SendInv(_) => WcOpcode::Send,
        SendOp::Write(_) | SendOp::WriteImm(..) => WcOpcode::Write,
        SendOp::Read(_) => WcOpcode::Read,
        SendOp::CmpSwap { .. } => WcOpcode::CmpSwap,
        SendOp::FetchAdd { .. } => WcOpcode::FetchAdd,
        SendOp::RegMr { .. } => WcOpcode::RegMr,
        SendOp::BindMw(_) => WcOpcode::BindMw,
        SendOp::LocalInv(_) => WcOpcode::LocalInv,
    }
}

/// Prints the command to repeat a failed session.
struct Replay(u64);

impl Drop for Replay {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!(
                "session seed {seed} failed; run it again with\n    \
                 RISER_SIM_SEED={seed} cargo test -p riser-transport --test rc_sim",
                seed = self.0
            );
        }
    }
}

/// Returns the seeds of the sessions to run.
fn seeds() -> Range<u64> {
    if let Some(seed) = number_from_env("RISER_SIM_SEED") {
        return seed..seed + 1;
    }
    let Some(messages) = number_from_env("RISER_SIM_MESSAGES") else {
        return 0..200;
    };
    let random = || u64::from(getrandom::u32().expect("the system has random numbers"));
    let first = number_from_env("RISER_SEED").unwrap_or_else(random);
    first..first + messages.div_ceil(SESSION_MESSAGES)
}

fn number_from_env(name: &str) -> Option<u64> {
    let text = std::env::var(name).ok()?;
    Some(
        text.replace('_', "")
            .parse()
            .unwrap_or_else(|_| panic!("{name} is not a number")),
    )
}

#[test]
fn bytes_and_completions_survive_bad_wire() {
    let seeds = seeds();
    eprintln!("RISER_SEED={}", seeds.start);
    let mut all = RcCounters::default();
    for seed in seeds.clone() {
        let _replay = Replay(seed);
        for one in Sim::new(seed, SESSION_MESSAGES / 2, BAD).run() {
            add(&mut all, &one);
        }
    }
    eprintln!(
        "{} sessions of {SESSION_MESSAGES} messages: {all:#?}",
        seeds.end - seeds.start
    );
    if seeds.end - seeds.start >= 10 {
        // The wire has triggered all kinds of faults, and no request was rejected.
        let met = [
            all.retransmits,
            all.timeouts,
            all.implied_naks,
            all.rx_nak_sequence,
            all.rx_rnr_naks,
            all.duplicates,
            all.out_of_order,
            all.stale_responses,
        ];
        assert!(met.iter().all(|&n| n > 0));
        let refused = [
            all.rx_nak_invalid,
            all.rx_nak_access,
            all.rx_nak_operation,
            all.tx_nak_invalid,
            all.tx_nak_access,
            all.tx_nak_operation,
            all.dropped,
        ];
        assert_eq!(refused, [0; 7]);
    }
}

fn add(all: &mut RcCounters, one: &RcCounters) {
    all.tx_packets += one.tx_packets;
    all.tx_bytes += one.tx_bytes;
    all.rx_packets += one.rx_packets;
    all.rx_bytes += one.rx_bytes;
    all.retransmits += one.retransmits;
    all.timeouts += one.timeouts;
    all.implied_naks += one.implied_naks;
    all.rx_nak_sequence += one.rx_nak_sequence;
    all.rx_rnr_naks += one.rx_rnr_naks;
    all.rx_nak_invalid += one.rx_nak_invalid;
    all.rx_nak_access += one.rx_nak_access;
    all.rx_nak_operation += one.rx_nak_operation;
    all.tx_nak_sequence += one.tx_nak_sequence;
    all.tx_rnr_naks += one.tx_rnr_naks;
    all.tx_nak_invalid += one.tx_nak_invalid;
    all.tx_nak_access += one.tx_nak_access;
    all.tx_nak_operation += one.tx_nak_operation;
    all.duplicates += one.duplicates;
    all.out_of_order += one.out_of_order;
    all.stale_responses += one.stale_responses;
    all.dropped += one.dropped;
}

#[test]
fn perfect_wire_carries_packets_once() {
    for seed in 0..20 {
        let _replay = Replay(seed);
        run_without_repetition(seed, 0);
    }
}

#[test]
fn congested_wire_only_delays_packets() {
    for seed in 0..20 {
        let _replay = Replay(seed);
        let marked = [3, 30, 100][seed as usize % 3];
        for counters in run_without_repetition(seed, marked) {
            assert!(counters.rx_cnps > 0);
        }
    }
}

/// Runs the session with `seed` on a perfect wire whose routers mark `marked` percent of the
/// packets for congestion, and checks that no packet is retransmitted.
fn run_without_repetition(seed: u64, marked: u64) -> [RcCounters; 2] {
    let wire = Wire { marked, ..PERFECT };
    let mut sim = Sim::new(seed, SESSION_MESSAGES / 2, wire);
    // A missing receive would cause an RNR NAK and a retransmission, so post all of them.
    for side in &mut sim.sides {
        side.recv_stall = 0;
        side.late_recvs = (0..RECVS).collect();
    }
    let all = sim.run();
    for counters in &all {
        let repeated = [
            counters.retransmits,
            counters.timeouts,
            counters.implied_naks,
            counters.duplicates,
            counters.out_of_order,
            counters.stale_responses,
        ];
        assert_eq!(repeated, [0; 6], "{counters:?}");
    }
    all
}

#[test]
fn bytes_survive_bad_and_congested_wire() {
    for seed in 0..30 {
        let _replay = Replay(seed);
        let wire = Wire {
            marked: [3, 30, 100][seed as usize % 3],
            loss: [1, 20][seed as usize % 2],
            ..BAD
        };
        Sim::new(seed, SESSION_MESSAGES / 2, wire).run();
    }
}

/// The wire fails in the middle: each side detects this, and every request of both queues completes
/// once, in order. The oldest unacknowledged request has the reason, and the remaining requests are
/// flushed.
#[test]
fn dead_wire_completes_requests_once() {
    for seed in 0..50 {
        let _replay = Replay(seed);
        let mut sim = Sim::new(seed, SESSION_MESSAGES / 2, BAD);
        let dies_after = 20 + sim.random.below(150);
        while sim.sides[0].completed < dies_after {
            sim.step();
        }
        sim.wire = DEAD;
        for me in 0..2 {
            sim.post(me);
            // A user draining the send queue would wait for a message that is never retransmitted.
            if sim.sides[me].qp.state() == QpState::Sqd {
                sim.sides[me].qp.resume();
            }
        }
        loop {
            // Transmit first, because a deadline may be a pacing deadline.
            for me in 0..2 {
                sim.transmit(me);
            }
            let deadlines = sim.sides.iter().filter_map(|s| s.qp.poll_timeout());
            let Some(next) = deadlines.min() else { break };
            let next = next - sim.start;
            let arrival = sim.heap.peek().map_or(u64::MAX, |Reverse((at, ..))| *at);
            sim.now = sim.now.max(arrival.min(next.as_nanos() as u64));
            sim.arrive();
            let now = sim.instant();
            for side in &mut sim.sides {
                let (qp, mut env) = side.env();
                qp.handle_timeout(now, &mut env);
            }
        }
        for me in 0..2 {
            let side = &mut sim.sides[me];
            if side.under_way.is_empty() {
                continue;
            }
            assert_eq!(side.qp.state(), QpState::Error);
            assert_eq!(side.qp.sends_outstanding(), 0);
            let mut status = WcStatus::Success;
            for event in std::mem::take(&mut side.out) {
                let RcEvent::Send(done) = event else { continue };
                let mut message = side.under_way.pop_front().expect("a message under way");
                if done.status == WcStatus::Success {
                    assert_eq!(status, WcStatus::Success, "a success after an error");
                }
                // Successful unsignaled requests are not reported.
                while message.wr_id != done.wr_id.0 {
                    assert!(!message.is_signaled && status == WcStatus::Success);
                    message = side.under_way.pop_front().expect("a message under way");
                }
                assert!(
                    match done.status {
                        WcStatus::RetryExcErr => status == WcStatus::Success,
                        WcStatus::WrFlushErr => status != WcStatus::Success,
                        other => other == WcStatus::Success,
                    },
                    "{done:?} after {status:?}"
                );
                status = done.status;
            }
            assert!(side.under_way.is_empty());
        }
    }
}
