//! The end that sends commands, and measures.

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use hdrhistogram::Histogram;
use riser_memory::Memory;
use riser_transport::roce::batch::{SendOutcome, TxBatch};
use riser_transport::roce::driver::Driver;
use riser_transport::wire::IcrcFlow;

use super::packets::{Kind, Message, Received, Sender, parse};
use super::responder::MAX_REPLY;
use super::{WireCase, WireConfig, WireError, WireLatency};
use crate::poll_fds::wait_readable;

/// Datagrams or trains that one round takes.
const RECEIVES: usize = 8;
/// Memory that data are placed in.
const MEMORY: usize = 4 << 20;
/// Time after which a command without a reply is lost.
const STALL: Duration = Duration::from_millis(100);
/// Interval at which such commands are looked for while nothing comes.
const LOOK: Duration = Duration::from_millis(10);
/// Interval and number of attempts to reach the responder.
const GREETING: (Duration, usize) = (Duration::from_millis(200), 10);

/// A case to measure.
#[derive(Clone, Copy, Debug)]
pub(super) struct Shape {
    pub(super) name: &'static str,
    pub(super) depth: u32,
    pub(super) reply: u32,
    pub(super) icrc: bool,
}

const SHAPES: [Shape; 6] = [
    Shape {
        name: "4 KiB replies",
        depth: 32,
        reply: 4096,
        icrc: false,
    },
    Shape {
        name: "4 KiB replies, ICRC and placement",
        depth: 32,
        reply: 4096,
        icrc: true,
    },
    Shape {
        name: "128 KiB replies",
        depth: 4,
        reply: 128 << 10,
        icrc: false,
    },
    Shape {
        name: "128 KiB replies, ICRC, placement",
        depth: 4,
        reply: 128 << 10,
        icrc: true,
    },
    Shape {
        name: "round trip",
        depth: 1,
        reply: 0,
        icrc: true,
    },
    Shape {
        name: "round trip, 4 KiB reply",
        depth: 1,
        reply: 4096,
        icrc: true,
    },
];

/// Result of a run.
#[derive(Debug)]
pub(super) struct Tally {
    peer: SocketAddr,
    flow: IcrcFlow,
    icrc: bool,
    pub(super) epoch: u32,
    memory: Memory,
    /// Place of the next data.
    at: usize,
    /// Numbers of the commands that were answered since the caller looked.
    pub(super) answered: Vec<u32>,
    /// Cookie of the last response.
    pub(super) cookie: u64,
    pub(super) packets: u64,
    pub(super) bytes: u64,
    pub(super) corrupted: u64,
    pub(super) foreign: u64,
}

impl Tally {
    /// For replies from `peer` to `local`; `None` where they are not of one address family.
    pub(super) fn new(local: SocketAddr, peer: SocketAddr) -> Result<Self, WireError> {
        let flow = IcrcFlow::new(peer, local);
        let memory = Memory::new(MEMORY).map_err(|e| WireError::Thread(e.to_string()))?;
        Ok(Self {
            peer,
            flow: flow.ok_or(WireError::Family(local.ip(), peer.ip()))?,
            icrc: true,
            epoch: 0,
            memory,
            at: 0,
            answered: Vec::new(),
            cookie: 0,
            packets: 0,
            bytes: 0,
            corrupted: 0,
            foreign: 0,
        })
    }

    /// Begins to count from 0.
    fn reset(&mut self) {
        (self.packets, self.bytes) = (0, 0);
        (self.corrupted, self.foreign) = (0, 0);
    }

    /// Takes a datagram, or a train of packets of `segment` bytes.
    pub(super) fn take(&mut self, src: SocketAddr, segment: usize, bytes: &[u8]) {
        if src != self.peer {
            self.foreign += 1;
            return;
        }
        for (index, packet) in bytes.chunks(segment).enumerate() {
            self.take_packet(index as u16, packet);
        }
    }

    fn take_packet(&mut self, index: u16, packet: &[u8]) {
        // The ICRC comes first: nothing of a corrupted packet is to be trusted.
        if self.icrc && self.flow.check(packet, index).is_err() {
            self.corrupted += 1;
            return;
        }
        match parse(packet) {
            None => self.foreign += 1,
            Some(Received::Acknowledge) => {}
            Some(Received::Message(message)) => {
                let is_response = message.is(Kind::Response);
                // Late replies are of an earlier run.
                if is_response && message.epoch.get() == self.epoch {
                    self.cookie = message.cookie.get();
                    self.answered.push(message.seq.get());
                }
            }
            Some(Received::Data(place, payload)) => {
                self.packets += 1;
                self.bytes += payload.len() as u64;
                if self.icrc {
                    self.place(place, payload);
                }
            }
        }
    }

    /// Copies data to their place, which never reaches beyond the memory.
    fn place(&mut self, place: Option<u64>, payload: &[u8]) {
        if let Some(va) = place {
            self.at = (va % (MEMORY - MAX_REPLY) as u64) as usize;
        }
        if self.at + payload.len() > MEMORY {
            self.at = 0;
        }
        self.memory.write(self.at, payload);
        self.at += payload.len();
    }
}

/// A requester at a socket.
pub(super) struct Requester {
    driver: Driver,
    batch: TxBatch,
    sender: Sender,
    tally: Tally,
    mtu: u16,
    cookie: u64,
}

impl Requester {
    pub(super) fn new(driver: Driver, peer: SocketAddr, mtu: u16) -> Result<Self, WireError> {
        let local = driver.local_addr();
        let family = WireError::Family(local.ip(), peer.ip());
        Ok(Self {
            batch: TxBatch::new(driver.max_segments()),
            sender: Sender::new(local, peer).ok_or(family)?,
            tally: Tally::new(local, peer)?,
            driver,
            mtu,
            cookie: 0,
        })
    }

    fn send(&mut self, now: Instant) {
        while self.driver.send(now, &mut self.batch) == SendOutcome::Blocked {
            if self.driver.arm() {
                wait_readable(&[self.driver.fd()], Some(STALL));
            }
        }
    }

    fn receive(&mut self) {
        let tally = &mut self.tally;
        self.driver.receive(RECEIVES, |src, segment, bytes, _| {
            tally.take(src, segment, bytes);
        });
    }

    /// Finds the responder and gets its cookie.
    pub(super) fn greet(&mut self) -> Result<(), WireError> {
        let (interval, attempts) = GREETING;
        self.tally.epoch = 1;
        for _ in 0..attempts {
            let mut hello = Message::new(Kind::Hello, true);
            hello.epoch = self.tally.epoch.into();
            self.sender.push_command(&mut self.batch, &hello);
            let sent = Instant::now();
            self.send(sent);
            while sent.elapsed() < interval {
                self.receive();
                if !self.tally.answered.is_empty() {
                    self.tally.answered.clear();
                    self.cookie = self.tally.cookie;
                    return Ok(());
                }
                if self.driver.arm() {
                    wait_readable(&[self.driver.fd()], Some(interval / 4));
                }
            }
        }
        Err(WireError::NoAnswer(self.sender.peer().ip()))
    }

    /// Measures every case.
    pub(super) fn run_all(&mut self, config: WireConfig) -> Result<Vec<WireCase>, WireError> {
        let shapes = SHAPES.into_iter();
        shapes.map(|shape| self.run(shape, config)).collect()
    }

    /// Measures one case.
    pub(super) fn run(
        &mut self,
        mut shape: Shape,
        config: WireConfig,
    ) -> Result<WireCase, WireError> {
        // More than the socket holds would be lost. The kernel accounts packets at up to four times
        // their length.
        let held = self.driver.receive_buffer() as u32 / 4;
        shape.depth = shape.depth.min((held / shape.reply.max(1)).max(1));
        let mut run = Run::new(shape);
        self.tally.icrc = shape.icrc;
        self.begin(&mut run, Instant::now());
        let from = Instant::now() + config.warm_up;
        let mut measured_from = None;
        loop {
            let now = Instant::now();
            match measured_from {
                None if now >= from => {
                    self.tally.reset();
                    run.reset();
                    measured_from = Some(now);
                }
                Some(begin) if now >= begin + config.runtime => {
                    let seconds = now.duration_since(begin).as_secs_f64();
                    let case = self.finish(&run, seconds, config);
                    self.drain(shape.depth);
                    return case;
                }
                _ => {}
            }
            self.receive();
            // After a time in which this thread did not run, answers are here that look late.
            let has_answers = !self.tally.answered.is_empty();
            if has_answers {
                // The time after the receive, not before it.
                self.go_on(&mut run, Instant::now());
            }
            let interval = if has_answers { STALL } else { LOOK };
            if now.saturating_duration_since(run.looked) > interval {
                self.repeat_lost(&mut run, now);
            }
        }
    }

    /// Sends as many commands as may be outstanding, whose replies do not mix with earlier ones.
    fn begin(&mut self, run: &mut Run, now: Instant) {
        self.tally.epoch += 1;
        self.tally.answered.clear();
        for place in 0..run.places.len() {
            self.command(run, place, now);
        }
        self.send(now);
    }

    /// Sends a command for each that was answered.
    fn go_on(&mut self, run: &mut Run, now: Instant) {
        let mut answered = std::mem::take(&mut self.tally.answered);
        for seq in answered.drain(..) {
            if let Some(place) = run.answer(seq, now) {
                self.command(run, place, now);
            }
        }
        self.tally.answered = answered;
        self.send(now);
    }

    /// Sends a command in the place of each that is lost, so that as many as before are
    /// outstanding.
    fn repeat_lost(&mut self, run: &mut Run, now: Instant) {
        run.looked = now;
        let lost_before = run.lost_commands;
        for place in 0..run.places.len() {
            if now.saturating_duration_since(run.places[place].sent) > STALL {
                run.lost_commands += 1;
                self.command(run, place, now);
            }
        }
        if run.lost_commands > lost_before {
            self.send(now);
        }
    }

    /// Takes in the replies that are outstanding, which the next case might count as corrupted.
    fn drain(&mut self, mut outstanding: u32) {
        let mut heard = Instant::now();
        while outstanding > 0 && heard.elapsed() < STALL {
            self.receive();
            let answered = self.tally.answered.len() as u32;
            if answered > 0 {
                heard = Instant::now();
            }
            outstanding = outstanding.saturating_sub(answered);
            self.tally.answered.clear();
        }
    }

    fn command(&mut self, run: &mut Run, place: usize, now: Instant) {
        let shape = run.shape;
        let seq = run.next(place, now);
        let mut command = Message::new(Kind::Command, shape.icrc);
        command.mtu = self.mtu.into();
        command.cookie = self.cookie.into();
        command.len = shape.reply.into();
        command.epoch = self.tally.epoch.into();
        command.seq = seq.into();
        self.sender.push_command(&mut self.batch, &command);
    }

    fn finish(&self, run: &Run, seconds: f64, config: WireConfig) -> Result<WireCase, WireError> {
        let shape = run.shape;
        if run.operations == 0 || (shape.reply > 0 && self.tally.packets == 0) {
            return Err(WireError::Nothing(shape.name, config.runtime));
        }
        let per_reply = shape.reply.div_ceil(self.mtu.into());
        let wanted = run.operations * u64::from(per_reply);
        Ok(WireCase {
            name: shape.name,
            depth: shape.depth,
            reply_bytes: shape.reply,
            icrc: shape.icrc,
            seconds,
            operations: run.operations,
            operations_per_second: run.operations as f64 / seconds,
            bytes_per_second: self.tally.bytes as f64 / seconds,
            latency_ns: run.latency(),
            lost_commands: run.lost_commands,
            // Replies under way at the begin and the end of the time count in part.
            lost_packets: wanted
                .saturating_sub(self.tally.packets)
                .saturating_sub(u64::from(shape.depth * per_reply)),
            corrupted: self.tally.corrupted,
            foreign: self.tally.foreign,
        })
    }
}

/// A command outstanding.
struct Place {
    seq: u32,
    sent: Instant,
}

/// State of a case.
struct Run {
    shape: Shape,
    /// The number of a command is that of its place, or a multiple of the depth more.
    places: Vec<Place>,
    /// Time at which lost commands were looked for.
    looked: Instant,
    operations: u64,
    lost_commands: u64,
    /// For cases with one command outstanding.
    latencies: Option<Histogram<u64>>,
}

impl Run {
    fn new(shape: Shape) -> Self {
        let now = Instant::now();
        let histogram = || {
            let longest = Duration::from_secs(1).as_nanos() as u64;
            Histogram::new_with_bounds(1, longest, 3).expect("the bounds are in order")
        };
        Self {
            shape,
            // The first command of a place is one turn further.
            places: (0..shape.depth)
                .map(|seq| Place { seq, sent: now })
                .collect(),
            looked: now,
            operations: 0,
            lost_commands: 0,
            latencies: (shape.depth == 1).then(histogram),
        }
    }

    /// Number of the next command of a place.
    fn next(&mut self, place: usize, now: Instant) -> u32 {
        let place = &mut self.places[place];
        // A number that wrapped might be that of another place.
        place.seq = match place.seq.checked_add(self.shape.depth) {
            Some(seq) => seq,
            None => place.seq % self.shape.depth,
        };
        place.sent = now;
        place.seq
    }

    /// Counts the answer to a command. Returns its place; `None` if it was answered before, or was
    /// given up.
    fn answer(&mut self, seq: u32, now: Instant) -> Option<usize> {
        let index = (seq % self.shape.depth) as usize;
        let place = &self.places[index];
        if place.seq != seq {
            return None;
        }
        self.operations += 1;
        if let Some(latencies) = &mut self.latencies {
            let took = now.saturating_duration_since(place.sent).as_nanos() as u64;
            latencies.saturating_record(took);
        }
        Some(index)
    }

    fn reset(&mut self) {
        (self.operations, self.lost_commands) = (0, 0);
        if let Some(latencies) = &mut self.latencies {
            latencies.reset();
        }
    }

    fn latency(&self) -> Option<WireLatency> {
        let latencies = self.latencies.as_ref().filter(|l| !l.is_empty())?;
        let at = |percent| latencies.value_at_percentile(percent);
        Some(WireLatency {
            min: latencies.min(),
            p50: at(50.0),
            p99: at(99.0),
            p99_9: at(99.9),
            max: latencies.max(),
        })
    }
}
