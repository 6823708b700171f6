//! Requester: sends commands and measures the performance.

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use hdrhistogram::Histogram;
use riser_block::poll_fds::wait_readable;
use riser_memory::Memory;
use riser_transport::nic::batch::{SendOutcome, TxBatch};
use riser_transport::roce::driver::Driver;
use riser_transport::wire::IcrcFlow;

use super::packets::{Kind, Message, Received, Sender, parse};
use super::responder::MAX_REPLY;
use super::{WireCase, WireConfig, WireError, WireLatency};

/// Maximum number of datagrams or trains received in a round.
const RECEIVES: usize = 8;
/// Size of the memory for received data.
const MEMORY: usize = 4 << 20;
/// Time after which a command without a response is lost.
const STALL: Duration = Duration::from_millis(100);
/// Interval for checking for lost commands if nothing is received.
const LOOK: Duration = Duration::from_millis(10);
/// Interval and maximum number of attempts to contact the responder.
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

/// Statistics of received packets.
#[derive(Debug)]
pub(super) struct Tally {
    peer: SocketAddr,
    flow: IcrcFlow,
    icrc: bool,
    pub(super) epoch: u32,
    memory: Memory,
    /// Position for the next data.
    at: usize,
    /// Sequence numbers of responses since they were last processed.
    pub(super) completed: Vec<u32>,
    /// Cookie in the last response.
    pub(super) cookie: u64,
    pub(super) packets: u64,
    pub(super) bytes: u64,
    pub(super) corrupted: u64,
    pub(super) foreign: u64,
}

impl Tally {
    /// Creates statistics for packets sent from `peer` to `local`. Fails if they use different
    /// address families.
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
            completed: Vec::new(),
            cookie: 0,
            packets: 0,
            bytes: 0,
            corrupted: 0,
            foreign: 0,
        })
    }

    /// Resets all counters.
    fn reset(&mut self) {
        (self.packets, self.bytes) = (0, 0);
        (self.corrupted, self.foreign) = (0, 0);
    }

    /// Processes a datagram, or a train of packets of `segment` bytes.
    pub(super) fn process_datagram(&mut self, src: SocketAddr, segment: usize, bytes: &[u8]) {
        if src != self.peer {
            self.foreign += 1;
            return;
        }
        for (index, packet) in bytes.chunks(segment).enumerate() {
            self.take_packet(index as u16, packet);
        }
    }

    fn take_packet(&mut self, index: u16, packet: &[u8]) {
        // Verify the ICRC first, because we can't trust a corrupted packet.
        if self.icrc && self.flow.check(packet, index).is_err() {
            self.corrupted += 1;
            return;
        }
        match parse(packet) {
            None => self.foreign += 1,
            Some(Received::Acknowledge) => {}
            Some(Received::Message(message)) => {
                let is_response = message.is(Kind::Response);
                // Ignore late responses from a previous run.
                if is_response && message.epoch.get() == self.epoch {
                    self.cookie = message.cookie.get();
                    self.completed.push(message.seq.get());
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

    /// Copies data to its destination, which is always within the memory.
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

/// A requester and its socket.
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
            tally.process_datagram(src, segment, bytes);
        });
    }

    /// Contacts the responder and receives its cookie.
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
                if !self.tally.completed.is_empty() {
                    self.tally.completed.clear();
                    self.cookie = self.tally.cookie;
                    return Ok(());
                }
                if self.driver.arm() {
                    wait_readable(&[self.driver.fd()], Some(interval / 4));
                }
            }
        }
        Err(WireError::NoResponse(self.sender.peer().ip()))
    }

    /// Measures all cases.
    pub(super) fn run_all(&mut self, config: WireConfig) -> Result<Vec<WireCase>, WireError> {
        let shapes = SHAPES.into_iter();
        shapes.map(|shape| self.run(shape, config)).collect()
    }

    /// Measures a case.
    pub(super) fn run(
        &mut self,
        mut shape: Shape,
        config: WireConfig,
    ) -> Result<WireCase, WireError> {
        // Limit the depth so that all replies fit into the socket buffer. The kernel accounts
        // packets with up to four times their length.
        let held = self.driver.receive_buffer() as u32 / 4;
        shape.depth = shape.depth.min((held / shape.reply.max(1)).max(1));
        let mut run = Run::new(shape);
        self.tally.icrc = shape.icrc;
        self.send_initial_commands(&mut run, Instant::now());
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
            // If this thread was descheduled, responses may be pending for commands that appear
            // lost.
            let has_completions = !self.tally.completed.is_empty();
            if has_completions {
                // Use the time after receiving.
                self.send_next_commands(&mut run, Instant::now());
            }
            let interval = if has_completions { STALL } else { LOOK };
            if now.saturating_duration_since(run.looked) > interval {
                self.repeat_lost(&mut run, now);
            }
        }
    }

    /// Sends the initial commands. Responses from the previous case are ignored.
    fn send_initial_commands(&mut self, run: &mut Run, now: Instant) {
        self.tally.epoch += 1;
        self.tally.completed.clear();
        for place in 0..run.places.len() {
            self.command(run, place, now);
        }
        self.send(now);
    }

    /// Sends a new command for each response.
    fn send_next_commands(&mut self, run: &mut Run, now: Instant) {
        let mut completed = std::mem::take(&mut self.tally.completed);
        for seq in completed.drain(..) {
            if let Some(place) = run.count_response(seq, now) {
                self.command(run, place, now);
            }
        }
        self.tally.completed = completed;
        self.send(now);
    }

    /// Replaces each lost command by a new one, so that the number of commands in flight doesn't
    /// change.
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

    /// Receives all remaining replies. Otherwise they could be counted as corrupted in the next
    /// case.
    fn drain(&mut self, mut outstanding: u32) {
        let mut last_received = Instant::now();
        while outstanding > 0 && last_received.elapsed() < STALL {
            self.receive();
            let completed = self.tally.completed.len() as u32;
            if completed > 0 {
                last_received = Instant::now();
            }
            outstanding = outstanding.saturating_sub(completed);
            self.tally.completed.clear();
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
            // Replies in flight at the start or end of the measurement are only partially included.
            lost_packets: wanted
                .saturating_sub(self.tally.packets)
                .saturating_sub(u64::from(shape.depth * per_reply)),
            corrupted: self.tally.corrupted,
            foreign: self.tally.foreign,
        })
    }
}

/// A command in flight.
struct CommandInFlight {
    seq: u32,
    sent: Instant,
}

/// State of a case.
struct Run {
    shape: Shape,
    /// Sequence numbers for each index are equal to the index modulo the depth.
    places: Vec<CommandInFlight>,
    /// Time of the last check for lost commands.
    looked: Instant,
    operations: u64,
    lost_commands: u64,
    /// Only used if there is one command in flight.
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
            // This is incremented by the depth before the first command is sent.
            places: (0..shape.depth)
                .map(|seq| CommandInFlight { seq, sent: now })
                .collect(),
            looked: now,
            operations: 0,
            lost_commands: 0,
            latencies: (shape.depth == 1).then(histogram),
        }
    }

    /// Returns the next sequence number for this index.
    fn next(&mut self, place: usize, now: Instant) -> u32 {
        let place = &mut self.places[place];
        // After wrapping, the sequence number could belong to another index.
        place.seq = match place.seq.checked_add(self.shape.depth) {
            Some(seq) => seq,
            None => place.seq % self.shape.depth,
        };
        place.sent = now;
        place.seq
    }

    /// Counts the response for a command and returns its index. Returns `None` if this is a
    /// duplicate or if the command was already lost.
    fn count_response(&mut self, seq: u32, now: Instant) -> Option<usize> {
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
