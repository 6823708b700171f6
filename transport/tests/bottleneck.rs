//! Simulates many connections through one switch port, under virtual time.
//!
//! Each flow has two hosts and a separate link; all links lead to one port of the same rate, which
//! has room for a few packets and drops the excess. If marking is enabled, it marks packets with
//! data once a quarter of the room is in use. Acknowledgements and READ requests bypass the port.
//! All flows always have data to send. So they must share the port themselves, and with go-back-N
//! each loss costs a window of packets.
//!
//! A row of the table is checked from the user's perspective: the share of the port's rate that was
//! delivered, the bytes sent for each byte delivered, and the slowest flow's share of its fair
//! rate. The same seed yields the same row.
//!
//! The whole table: `cargo test --release -p riser-transport --test bottleneck -- --ignored
//! --nocapture table`

#![allow(clippy::print_stderr, reason = "the table is for reading")]

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::time::{Duration, Instant};

use fastrand::Rng;
use riser_memory::Memory;
use riser_transport::mr::MrTable;
use riser_transport::rc::{
    Env, RcConfig, RcCounters, RcEvent, RcQp, RecvQueue, RtrParams, RtsParams, TxPacket,
};
use riser_transport::verbs::{
    Access, Handle, Mr, Mtu, PdId, QpCap, QpId, RecvWr, RemoteAddr, SendFlags, SendOp, SendWr, Sge,
    WrId,
};
use riser_transport::wire::{Packet, Psn, Qpn, RnrTimer};

const PD: PdId = PdId(Handle::new(1, 1));
/// Message length in bytes, and number of messages in flight per flow.
const LEN: usize = 64 * 1024;
const DEPTH: usize = 16;
/// Number of posted receives.
const RECVS: u32 = 24;
/// Cable delay of a packet, in nanoseconds.
const CABLE: u64 = 5_000;
/// Wake-up delay of an idle host, in nanoseconds.
const LATENESS: u64 = 50_000;
/// Time during which the flows start, in nanoseconds.
const START: u64 = 1_000_000;
/// Bytes of a packet in addition to its payload: BTH, sometimes RETH, ICRC, UDP, IP, Ethernet and
/// its gap.
const OVERHEAD: u64 = 90;
/// Shorter packets bypass the port.
const SHORT: usize = 250;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Write,
    Send,
    Read,
}

/// Parameters of a row in the table.
#[derive(Clone, Copy, Debug)]
struct Net {
    flows: usize,
    /// Queue length of the port, in packets.
    room: u64,
    /// Whether the port marks packets when its queue is at least a quarter full.
    marks: bool,
    mtu: Mtu,
    kind: Kind,
    /// Maximum bytes in flight per connection.
    inflight: u32,
    /// Virtual run time, in milliseconds.
    millis: u64,
}

/// Results, as fractions.
#[derive(Clone, Copy, Debug)]
struct Row {
    /// Share of the port's rate.
    goodput: f64,
    /// Packets sent for each packet delivered.
    sent: f64,
    /// Share of the fair rate, for the slowest and the fastest flow.
    least: f64,
    most: f64,
    drops: u64,
    counters: RcCounters,
    dead: usize,
}

impl Row {
    fn is_good(&self) -> bool {
        self.dead == 0
            && self.goodput >= MIN_GOODPUT
            && self.sent <= MAX_SENT
            && self.least >= MIN_SHARE
    }
}

/// Bounds for every row.
const MIN_GOODPUT: f64 = 0.90;
const MAX_SENT: f64 = 1.10;
/// Minimum share of the fair rate for the slowest flow.
const MIN_SHARE: f64 = 0.33;

/// One end of a flow.
struct Side {
    qp: RcQp,
    mrs: MrTable,
    rq: RecvQueue,
    out: Vec<RcEvent>,
    mr: Mr,
    _memory: Memory,
    /// Earliest valid timer event.
    armed: Option<u64>,
}

impl Side {
    fn new(net: &Net, random: &mut Rng) -> Self {
        let mut mrs = MrTable::new(16, 8, [5; 16]);
        let memory = Memory::new(LEN).unwrap();
        let access = Access::LOCAL_WRITE | Access::REMOTE | Access::ZERO_BASED;
        let mr = mrs.reg(PD, &memory.whole(), access).unwrap();
        let cap = QpCap {
            max_send_wr: DEPTH as u32,
            max_recv_wr: RECVS,
            max_send_sge: 1,
            max_recv_sge: 1,
            max_inline: 0,
        };
        let mut cfg = RcConfig::new(QpId(Handle::new(7, 1)), PD, cap);
        cfg.max_inflight_bytes = net.inflight;
        cfg.ack_every = 32;
        cfg.seed = random.u64(..1 << 32) as u32;
        let mut qp = RcQp::new(cfg);
        qp.to_init();
        qp.to_rtr(&RtrParams {
            path_mtu: net.mtu,
            dest_qpn: Qpn::new(5),
            rq_psn: Psn::new(0),
            max_dest_rd_atomic: 16,
            min_rnr_timer: RnrTimer::new(12),
            access: Access::REMOTE,
        });
        qp.to_rts(&RtsParams {
            sq_psn: Psn::new(0),
            timeout: 16,
            retry_cnt: 7,
            rnr_retry: 7,
            max_rd_atomic: 16,
        });
        let mut side = Self {
            qp,
            mrs,
            rq: RecvQueue::new(RECVS, 1),
            out: Vec::new(),
            mr,
            _memory: memory,
            armed: None,
        };
        for _ in 0..RECVS {
            side.post_recv();
        }
        side
    }

    fn env(&mut self) -> (&mut RcQp, Env<'_>) {
        let env = Env {
            mrs: &mut self.mrs,
            rq: &mut self.rq,
            out: &mut self.out,
        };
        (&mut self.qp, env)
    }

    fn sge(&self) -> [Sge; 1] {
        [Sge {
            addr: 0,
            length: LEN as u32,
            lkey: self.mr.lkey,
        }]
    }

    fn post_recv(&mut self) {
        let sges = self.sge();
        let wr = RecvWr {
            wr_id: WrId(0),
            sges: &sges,
        };
        let (qp, mut env) = self.env();
        qp.post_recv(&[wr], &mut env).unwrap();
    }

    fn post(&mut self, kind: Kind, remote: RemoteAddr) {
        let op = match kind {
            Kind::Write => SendOp::Write(remote),
            Kind::Send => SendOp::Send,
            Kind::Read => SendOp::Read(remote),
        };
        let sges = self.sge();
        let wr = SendWr::new(1, op, &sges).flags(SendFlags::SIGNALED);
        let (qp, mut env) = self.env();
        qp.post_send(&[wr], &mut env).unwrap();
    }
}

/// Scheduled event. Packets are stored in [`Sim::packets`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Event {
    Start,
    AtPort(usize),
    Delivered(usize),
    /// Packet with a congestion mark.
    Marked(usize),
    Timer,
}

/// Sides are numbered: 2 × flow for the side that posts, followed by its peer.
struct Sim {
    net: Net,
    random: Rng,
    start: Instant,
    now: u64,
    sequence: u64,
    heap: BinaryHeap<Reverse<(u64, u64, usize, Event)>>,
    sides: Vec<Side>,
    /// Time at which the link of each flow becomes free.
    links: Vec<u64>,
    /// Time at which the port becomes free.
    port: u64,
    /// Transmission time of a full packet at the port, in nanoseconds.
    service: u64,
    done: Vec<u64>,
    is_dead: Vec<bool>,
    packets: Vec<Vec<u8>>,
    free: Vec<usize>,
    drops: u64,
    tx: TxPacket,
}

impl Sim {
    fn new(net: &Net, seed: u64) -> Self {
        let mut random = Rng::with_seed(seed);
        let sides = (0..2 * net.flows).map(|_| Side::new(net, &mut random));
        let mut sim = Self {
            sides: sides.collect(),
            net: *net,
            random,
            start: Instant::now(),
            now: 0,
            sequence: 0,
            heap: BinaryHeap::new(),
            links: vec![0; net.flows],
            port: 0,
            // 10 Gb/s.
            service: (u64::from(net.mtu.bytes()) + OVERHEAD) * 8 / 10,
            done: vec![0; net.flows],
            is_dead: vec![false; net.flows],
            packets: Vec::new(),
            free: Vec::new(),
            drops: 0,
            tx: TxPacket::default(),
        };
        for flow in 0..net.flows {
            let at = sim.random.u64(..START);
            sim.push(at, 2 * flow, Event::Start);
        }
        sim
    }

    fn push(&mut self, at: u64, side: usize, event: Event) {
        self.sequence += 1;
        self.heap.push(Reverse((at, self.sequence, side, event)));
    }

    fn run(mut self) -> Row {
        let end = self.net.millis * 1_000_000;
        while let Some(Reverse((at, _, side, event))) = self.heap.pop()
            && at <= end
        {
            self.now = at;
            self.handle(side, event);
        }
        self.summarize(end)
    }

    fn handle(&mut self, side: usize, event: Event) {
        let now = self.start + Duration::from_nanos(self.now);
        match event {
            Event::Start => (0..DEPTH).for_each(|_| self.post(side / 2)),
            Event::AtPort(packet) => return self.enqueue(side, packet),
            Event::Delivered(packet) | Event::Marked(packet) => {
                let bytes = std::mem::take(&mut self.packets[packet]);
                self.free.push(packet);
                let parsed = Packet::parse(&bytes).unwrap();
                let (qp, mut env) = self.sides[side].env();
                if matches!(event, Event::Marked(_)) {
                    qp.handle_mark(now, &parsed);
                }
                qp.handle_packet(now, &parsed, &mut env);
                self.packets[packet] = bytes;
            }
            Event::Timer => {
                if self.sides[side].armed != Some(self.now) {
                    return;
                }
                self.sides[side].armed = None;
                let (qp, mut env) = self.sides[side].env();
                qp.handle_timeout(now, &mut env);
            }
        }
        self.finish_side(side);
        self.transmit(side, now);
    }

    fn post(&mut self, flow: usize) {
        let remote = RemoteAddr {
            addr: 0,
            rkey: self.sides[2 * flow + 1].mr.rkey,
        };
        self.sides[2 * flow].post(self.net.kind, remote);
    }

    /// A packet has arrived at the port: it is queued or dropped.
    fn enqueue(&mut self, side: usize, packet: usize) {
        let queued = self.port.saturating_sub(self.now) / self.service;
        if queued >= self.net.room {
            self.drops += 1;
            self.free.push(packet);
            return;
        }
        self.port = self.port.max(self.now) + self.service;
        let event = if self.net.marks && queued >= self.net.room / 4 {
            Event::Marked(packet)
        } else {
            Event::Delivered(packet)
        };
        self.push(self.port + CABLE, side, event);
    }

    /// Handles completions and posts new requests.
    fn finish_side(&mut self, side: usize) {
        let flow = side / 2;
        let mut out = std::mem::take(&mut self.sides[side].out);
        for event in out.drain(..) {
            match event {
                RcEvent::Send(c) if c.status.is_ok() => {
                    self.done[flow] += 1;
                    self.post(flow);
                }
                RcEvent::Recv(c) if c.status.is_ok() => self.sides[side].post_recv(),
                _ => self.is_dead[flow] = true,
            }
        }
        self.sides[side].out = out;
    }

    fn transmit(&mut self, side: usize, now: Instant) {
        let flow = side / 2;
        let mut tx = std::mem::take(&mut self.tx);
        loop {
            let (qp, mut env) = self.sides[side].env();
            if !qp.poll_transmit(now, &mut env, &mut tx) {
                break;
            }
            let packet = self.free.pop().unwrap_or_else(|| {
                self.packets.push(Vec::new());
                self.packets.len() - 1
            });
            let bytes = &mut self.packets[packet];
            bytes.clear();
            tx.copy_to(bytes);
            bytes.extend_from_slice(&[0; 4]);
            let peer = side ^ 1;
            if bytes.len() < SHORT {
                self.push(self.now + 2 * CABLE, peer, Event::Delivered(packet));
                continue;
            }
            if self.links[flow] < self.now {
                self.links[flow] = self.now + self.random.u64(..LATENESS);
            }
            self.links[flow] += self.service;
            // This is less than a packet, so the packet order is preserved. If all links had
            // exactly the same rate, a flow that finds the last free slot of a full queue would
            // always get it.
            let drift = self.random.u64(..self.service);
            self.push(
                self.links[flow] + CABLE + drift,
                peer,
                Event::AtPort(packet),
            );
        }
        self.tx = tx;
        self.arm(side);
    }

    fn arm(&mut self, side: usize) {
        let s = &mut self.sides[side];
        let Some(at) = s.qp.poll_timeout() else {
            return;
        };
        let at = at.saturating_duration_since(self.start).as_nanos() as u64;
        let at = at.max(self.now + 1);
        if s.armed.is_none_or(|armed| at < armed) {
            s.armed = Some(at);
            self.push(at, side, Event::Timer);
        }
    }

    fn summarize(&self, end: u64) -> Row {
        let per_message = (LEN / self.net.mtu.bytes() as usize) as u64;
        let delivered = self.done.iter().sum::<u64>() * per_message;
        let sender = usize::from(self.net.kind == Kind::Read);
        let mut counters = RcCounters::default();
        let mut sent = 0;
        for (i, side) in self.sides.iter().enumerate() {
            let c = side.qp.counters();
            counters.timeouts += c.timeouts;
            counters.rx_nak_sequence += c.rx_nak_sequence;
            counters.implied_naks += c.implied_naks;
            counters.rx_cnps += c.rx_cnps;
            if i % 2 == sender {
                sent += c.tx_packets;
            }
        }
        let share = delivered as f64 / per_message as f64 / self.net.flows as f64;
        let of_share = |n: Option<&u64>| *n.unwrap_or(&0) as f64 / share.max(1.0);
        Row {
            goodput: (delivered * self.service) as f64 / end as f64,
            sent: sent as f64 / delivered.max(1) as f64,
            least: of_share(self.done.iter().min()),
            most: of_share(self.done.iter().max()),
            drops: self.drops,
            counters,
            dead: self.is_dead.iter().filter(|d| **d).count(),
        }
    }
}

fn show(net: &Net) -> Row {
    let row = Sim::new(net, 1).run();
    eprintln!(
        "{:5?} {:4} flows, MTU {:4}, room {:3}{}: {:5.1} % of the port, sent {:5.3}x, shares {:4.2} to {:4.2}; \
         {:6} dropped, {:6} time-outs, {:6} NAKs, {:5} gaps, {:6} CNPs, {} dead{}",
        net.kind,
        net.flows,
        net.mtu.bytes(),
        net.room,
        if net.marks { ", marks" } else { "" },
        row.goodput * 100.0,
        row.sent,
        row.least,
        row.most,
        row.drops,
        row.counters.timeouts,
        row.counters.rx_nak_sequence,
        row.counters.implied_naks,
        row.counters.rx_cnps,
        row.dead,
        if row.is_good() { "" } else { "   <--" },
    );
    row
}

/// Returns the rows for a kind and number of flows.
fn rows(kind: Kind, flows: usize, marks: bool, millis: u64) -> impl Iterator<Item = Net> {
    let row = move |mtu, room, inflight| Net {
        flows,
        room,
        marks,
        mtu,
        kind,
        inflight,
        millis,
    };
    // The default socket buffers of a host, and the buffers of a host with a limit of 16 MiB per
    // program.
    let ethernet = [64, 180, 512].map(|room| row(Mtu::Mtu1024, room, 425_984 / 4));
    let jumbo = [32, 128, 512].map(|room| row(Mtu::Mtu4096, room, 1 << 20));
    ethernet.into_iter().chain(jumbo)
}

/// Runs a short row of every kind. The bounds are relaxed, because the initial phase has a larger
/// share of the time.
#[test]
fn flows_share_and_saturate_port() {
    for (kind, flows, mtu, room, marks, millis) in [
        (Kind::Send, 64, Mtu::Mtu4096, 32, true, 150),
        (Kind::Write, 16, Mtu::Mtu1024, 180, false, 150),
        (Kind::Write, 256, Mtu::Mtu4096, 128, true, 150),
        (Kind::Read, 256, Mtu::Mtu4096, 32, true, 150),
        // Windows of two packets, where losses are the only congestion signal.
        (Kind::Write, 32, Mtu::Mtu4096, 64, false, 300),
    ] {
        let row = show(&Net {
            flows,
            room,
            marks,
            mtu,
            kind,
            inflight: 425_984 / 4,
            millis,
        });
        assert!(row.is_good(), "{row:?}");
    }
}

#[test]
#[ignore = "a table for reading; takes minutes"]
fn table() {
    let millis = std::env::var("RISER_SIM_MILLIS").map_or(1000, |v| v.parse().unwrap());
    let (mut good, mut all) = (0, 0);
    let only = std::env::var("RISER_SIM_KIND").unwrap_or_default();
    for kind in [Kind::Write, Kind::Send, Kind::Read] {
        if !format!("{kind:?}").contains(&only) {
            continue;
        }
        for flows in [16, 64, 256] {
            for marks in [false, true] {
                for net in rows(kind, flows, marks, millis) {
                    good += usize::from(show(&net).is_good());
                    all += 1;
                }
            }
        }
    }
    eprintln!("{good} of {all} rows reach what they have to");
}
