//! The in-process wire: devices joined in memory, under a virtual clock, for tests and simulations.
//!
//! A [`Fabric`] carries packets between [`Endpoint`]s, each of which is a whole software NIC
//! ([`crate::roce::nic::Nic`]) without a socket. Every packet takes the configured time and may be
//! lost, repeated, spoilt or overtaken ([`FaultInjector`]). Nothing here reads a clock or draws a
//! random number that does not come from the seed, so one seed gives one trace ([`Fabric::trace`]).
//!
//! ```text
//!   Endpoint ──poll_transmit──▶ FaultInjector ──latency──▶ queue of the destination ──▶ Endpoint
//! ```
//!
//! - [`Fabric`]: the wire and the clock. Cloning shares it.
//! - [`Endpoint`]: a [`Provider`]. Its `progress` takes in what has arrived by the given time, so
//!   who drives endpoints by hand passes [`Fabric::now`].
//! - [`Pair`]: two endpoints and their fabric, driven together: [`Pair::advance`],
//!   [`Pair::run_until_idle`].
//!
//! A target whose workers share an address has a device of each worker there
//! ([`Fabric::endpoint_of`]), to which packets go by the rule of the socket's selector
//! ([`crate::roce::steer`]).
//!
//! Bound: [`QUEUE`] packets wait for an address; what comes beyond is lost, as in a socket buffer.

mod defects;

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet, VecDeque};
use std::hash::Hasher as _;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use fnv::FnvHasher;

use defects::{DefectiveNic, Defects, Recording};
pub use defects::{Failing, Record, Refusals};

use crate::roce::batch::{Offered, SendOutcome, TxBatch};
use crate::roce::delegate::{delegate_counters_to_nic, delegate_to_nic};
use crate::roce::fault::{FaultConfig, FaultCounters, FaultInjector};
use crate::roce::nic::{Breakage, IpFields, Nic, NicConfig, NicLimits};
use crate::roce::steer::{Requests, steer};
use crate::verbs::{CmId, EventFds, Mtu, PortSpace, Provider, RdmaCm, VerbsError};

/// Packets that wait for one device.
pub const QUEUE: usize = 8192;

/// Bytes that an endpoint sends in one call of `progress`.
const TX_BUDGET: usize = 256 << 10;

/// Configuration of the wire and its devices.
#[derive(Clone, Copy, Debug)]
pub struct FabricConfig {
    /// From where all random numbers come.
    pub seed: u64,
    /// Time from sending a packet to its arrival.
    pub latency: Duration,
    /// Faults of the wire; their seed is mixed with the fabric's.
    pub faults: FaultConfig,
    /// Path MTU of the devices.
    pub mtu: Mtu,
    /// Most bytes that a queue pair has on the way.
    pub max_inflight_bytes: u32,
    /// Packets that a device's socket takes before it is full, for the time that a packet takes to
    /// arrive. The rest waits in the device's batch.
    pub socket_room: usize,
    /// Packets that a device's socket takes as one train at most: 1 without segmentation.
    pub segments: usize,
    /// Limits of the devices.
    pub limits: NicLimits,
}

impl Default for FabricConfig {
    fn default() -> Self {
        Self {
            seed: 1,
            latency: Duration::from_micros(10),
            faults: FaultConfig::default(),
            mtu: Mtu::Mtu4096,
            max_inflight_bytes: 128 * 1024,
            socket_room: usize::MAX,
            segments: 1,
            limits: NicLimits::default(),
        }
    }
}

/// Packets on the way to an address, by time of arrival and order of sending.
type Queue = BTreeMap<(Instant, u64), (Ends, Vec<u8>)>;

/// Source and destination of a packet.
type Ends = (SocketAddr, SocketAddr);

/// Packets that are held, by the end of that and the order of sending.
type Held = BTreeMap<(Instant, u64), (Ends, Vec<u8>)>;

/// Ways that are blocked, as an address sees them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Blocked {
    /// Nothing arrives at it.
    pub inbound: bool,
    /// Nothing that it sends arrives.
    pub outbound: bool,
}

impl Blocked {
    /// Neither way.
    pub const NONE: Self = Self {
        inbound: false,
        outbound: false,
    };
    /// Both ways.
    pub const BOTH: Self = Self {
        inbound: true,
        outbound: true,
    };
}

/// Packets that a network holds for a long time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Delay {
    /// Seed of the random numbers.
    pub seed: u64,
    /// Packets that are held, of a million.
    pub rate: u32,
    /// Longest time that one is held.
    pub most: Duration,
}

/// Most packets that are held at a time: others are not.
pub const HELD: usize = 256;

/// A network that holds packets.
#[derive(Debug)]
struct Delays {
    random: fastrand::Rng,
    rate: u32,
    most: Duration,
}

impl Delays {
    /// The time for which a packet is held; `None` for most.
    fn draw(&mut self) -> Option<Duration> {
        let is_held = self.random.u32(..1_000_000) < self.rate;
        is_held.then(|| self.most.mul_f64(self.random.f64()))
    }
}

/// Place of a device: its address, and the worker that it belongs to.
type Place = (IpAddr, u32);

/// A function that gets source, destination and bytes of a packet.
type OnPacket = dyn FnMut(SocketAddr, SocketAddr, &[u8]) + Send;

/// Sees the packets that devices send.
struct Tap(Box<OnPacket>);

impl std::fmt::Debug for Tap {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Tap").finish_non_exhaustive()
    }
}

#[derive(Debug)]
struct Wire {
    config: FabricConfig,
    start: Instant,
    now: Instant,
    injector: FaultInjector<Ends>,
    delays: Option<Delays>,
    /// They are on no device's queue, since the device that takes them may not be there yet.
    held: Held,
    queues: HashMap<Place, Queue>,
    /// Device at each place, by the order of their making.
    plugged: HashMap<Place, u64>,
    /// Low bits of queue-pair numbers that name the worker, at addresses that workers share.
    worker_bits: HashMap<IpAddr, u8>,
    /// First addresses of devices by their others.
    others: HashMap<IpAddr, IpAddr>,
    /// Addresses whose device was taken away.
    unplugged: HashSet<IpAddr>,
    /// Devices that have joined each multicast group.
    groups: BTreeMap<IpAddr, BTreeSet<Place>>,
    /// Addresses that are cut off, and how.
    partitioned: HashMap<IpAddr, Blocked>,
    /// What is wrong with the devices at an address, which they know as well.
    defects: HashMap<IpAddr, Arc<Mutex<Defects>>>,
    /// Largest path MTU of the devices at an address, if it is not that of the configuration.
    mtus: HashMap<IpAddr, Mtu>,
    /// Largest path MTU of the ways to an address.
    ways: HashMap<IpAddr, Mtu>,
    /// Ports that other programs have.
    occupied: HashSet<SocketAddr>,
    tap: Option<Tap>,
    sequence: u64,
    packets: u64,
    endpoints: u64,
    trace: u64,
    overflows: u64,
}

/// Most bytes of a packet beside its payload: headers, padding and ICRC.
const HEADERS: usize = 64;

impl Wire {
    /// The largest path MTU of connections that devices at an address make.
    fn mtu(&self, addr: IpAddr) -> Mtu {
        let own = self.mtus.get(&addr).copied().unwrap_or(self.config.mtu);
        let way = self.ways.get(&addr).copied().unwrap_or(own);
        std::cmp::min_by_key(own, way, |mtu| mtu.bytes())
    }

    /// Whether a packet is too long for the way between two addresses.
    fn is_too_long(&self, ends: [SocketAddr; 2], len: usize) -> bool {
        let mut ways = ends.iter().filter_map(|at| self.ways.get(&at.ip()));
        ways.any(|mtu| len > mtu.bytes() as usize + HEADERS)
    }

    /// Takes what comes out of the injector, and what was held, onto the queues.
    fn pump(&mut self, now: Instant) {
        while let Some((ends, bytes)) = self.injector.poll_packet(now) {
            let room = HELD.saturating_sub(self.held.len());
            let delays = self.delays.as_mut().filter(|_| room > 0);
            match delays.and_then(Delays::draw) {
                Some(time) => {
                    self.sequence += 1;
                    self.held.insert((now + time, self.sequence), (ends, bytes));
                }
                None => self.queue(now, ends, bytes),
            }
        }
        while let Some(held) = self.held.first_entry()
            && held.key().0 <= now
        {
            let (ends, bytes) = held.remove();
            self.queue(now, ends, bytes);
        }
    }

    /// Takes a packet onto the queue of its destination.
    fn queue(&mut self, now: Instant, ends: Ends, bytes: Vec<u8>) {
        let dst = ends.1;
        // Each device of a group has a copy, its sender as well.
        if let Some(group) = self.groups.get(&dst.ip()) {
            for place in group.clone() {
                self.queue_at(now, ends, bytes.clone(), place);
            }
            return;
        }
        // A packet to an address without a device is lost, as on a network.
        let first = self.others.get(&dst.ip()).copied().unwrap_or(dst.ip());
        let bits = self.worker_bits.get(&first).copied().unwrap_or(0);
        // The selector's load beyond the packet ends it with 0.
        let worker = steer(&bytes, bits, Requests::Spread).unwrap_or(0);
        self.queue_at(now, ends, bytes, (first, worker));
    }

    fn queue_at(&mut self, now: Instant, ends: Ends, bytes: Vec<u8>, place: Place) {
        let Some(queue) = self.queues.get_mut(&place) else {
            return;
        };
        // As a socket buffer does: what comes last is lost.
        if queue.len() >= QUEUE {
            self.overflows += 1;
            return;
        }
        // Packets of one instant arrive in the order in which they were sent.
        self.sequence += 1;
        let at = now + self.config.latency;
        queue.insert((at, self.sequence), (ends, bytes));
    }

    /// When something comes out of hold.
    fn release(&self) -> Option<Instant> {
        let held = self.held.keys().next().map(|(at, _)| *at);
        held.into_iter().chain(self.injector.deadline()).min()
    }

    /// Whether a packet is lost between two addresses.
    fn is_blocked(&self, src: SocketAddr, dst: SocketAddr) -> bool {
        let of = |at: SocketAddr| self.partitioned.get(&at.ip()).copied().unwrap_or_default();
        of(src).outbound || of(dst).inbound
    }

    /// Mixes a packet into the trace.
    fn note(&mut self, now: Instant, dst: SocketAddr, bytes: &[u8]) {
        let time = now.duration_since(self.start).as_nanos() as u64;
        let port = u64::from(dst.port()).to_le_bytes();
        let head = time.to_le_bytes();
        let mut trace = FnvHasher::with_key(self.trace);
        for part in [&head[..], &port, bytes] {
            trace.write(part);
        }
        self.trace = trace.finish();
    }
}

/// The wire and the clock.
#[derive(Clone, Debug)]
pub struct Fabric(Arc<Mutex<Wire>>);

impl Fabric {
    /// A wire without devices.
    #[must_use]
    pub fn new(config: FabricConfig) -> Self {
        // The one look at a real clock: where virtual time begins matters to no test.
        let start = Instant::now();
        let faults = FaultConfig {
            seed: config.faults.seed ^ config.seed.rotate_left(32),
            ..config.faults
        };
        Self(Arc::new(Mutex::new(Wire {
            config,
            start,
            now: start,
            injector: FaultInjector::new(faults),
            delays: None,
            held: BTreeMap::new(),
            queues: HashMap::new(),
            plugged: HashMap::new(),
            worker_bits: HashMap::new(),
            others: HashMap::new(),
            unplugged: HashSet::new(),
            groups: BTreeMap::new(),
            partitioned: HashMap::new(),
            defects: HashMap::new(),
            mtus: HashMap::new(),
            ways: HashMap::new(),
            occupied: HashSet::new(),
            tap: None,
            sequence: 0,
            packets: 0,
            endpoints: 0,
            trace: FnvHasher::default().finish(),
            overflows: 0,
        })))
    }

    fn wire(&self) -> MutexGuard<'_, Wire> {
        // A panic of another test thread leaves plain data behind.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds a device.
    ///
    /// # Panics
    /// If there is one at this address.
    #[must_use]
    pub fn endpoint(&self, addr: IpAddr) -> Endpoint {
        self.endpoint_of(addr, 0, 0)
    }

    /// Adds a device with several addresses. It is named by the first one.
    ///
    /// # Panics
    /// If there is one at one of these addresses, or there are none of them.
    #[must_use]
    pub fn endpoint_with(&self, addrs: &[IpAddr]) -> Endpoint {
        let (&first, others) = addrs.split_first().expect("a device has an address");
        let mut wire = self.wire();
        for &other in others {
            let before = wire.others.insert(other, first);
            assert!(before.is_none(), "an address belongs to one device");
        }
        drop(wire);
        self.endpoint_of(first, 0, 0)
    }

    /// Adds a worker's device at an address that `1 << worker_bits` workers share.
    ///
    /// # Panics
    /// If the worker has one at this address.
    #[must_use]
    pub fn endpoint_of(&self, addr: IpAddr, worker: u32, worker_bits: u8) -> Endpoint {
        let mut wire = self.wire();
        let place = (addr, worker);
        let before = wire.queues.insert(place, Queue::new());
        assert!(before.is_none(), "a worker has one device at an address");
        wire.worker_bits.insert(addr, worker_bits);
        wire.endpoints += 1;
        let number = wire.endpoints;
        wire.plugged.insert(place, number);
        // The seed is the fabric's and the device's number, so that devices differ and runs do not.
        let mut seed = [0; 32];
        seed[..8].copy_from_slice(&wire.config.seed.to_le_bytes());
        seed[8..16].copy_from_slice(&wire.endpoints.to_le_bytes());
        let others = wire.others.iter();
        let mut others: Vec<_> = others.filter(|(_, first)| **first == addr).collect();
        others.sort_unstable();
        let config = NicConfig {
            other_addrs: others.into_iter().map(|(other, _)| *other).collect(),
            provider: "loopback",
            mtu: wire.mtu(addr),
            max_inflight_bytes: wire.config.max_inflight_bytes,
            limits: wire.config.limits,
            worker_index: worker,
            worker_bits,
            ..NicConfig::new(addr, seed)
        };
        let batch = TxBatch::new(wire.config.segments);
        let defects = Arc::clone(wire.defects.entry(addr).or_default());
        let nic = DefectiveNic {
            nic: Nic::new(config, wire.now),
            defects,
            late: VecDeque::new(),
        };
        let here = wire.occupied.iter().copied();
        let occupied: Vec<_> = here.filter(|at| at.ip() == addr).collect();
        drop(wire);
        let mut endpoint = Endpoint {
            nic,
            fabric: self.clone(),
            number,
            place,
            batch,
            full_until: None,
            occupied: Vec::new(),
            is_reported: false,
        };
        for at in occupied {
            endpoint.occupy(at);
        }
        endpoint
    }

    /// Gives a port to another program, on devices that are made from now on: it cannot be bound.
    pub fn occupy(&self, at: SocketAddr) {
        self.wire().occupied.insert(at);
    }

    /// The other program ends.
    pub fn vacate(&self, at: SocketAddr) {
        self.wire().occupied.remove(&at);
    }

    /// Takes the device at an address away, of all workers, with what is on the way to it: it is
    /// gone ([`Endpoint::is_gone`]) and stays so, and there is none until [`Fabric::plug`].
    pub fn unplug(&self, addr: IpAddr) {
        let mut wire = self.wire();
        wire.plugged.retain(|(at, _), _| *at != addr);
        wire.queues.retain(|(at, _), _| *at != addr);
        wire.unplugged.insert(addr);
    }

    /// Separates an address from all others, in both directions or one, or joins it with them
    /// again. What is on the way arrives.
    pub fn partition(&self, addr: IpAddr, blocked: Blocked) {
        self.wire().partitioned.insert(addr, blocked);
    }

    /// Holds some of the packets from now on; those that are held already stay so.
    pub fn hold(&self, delay: Option<Delay>) {
        self.wire().delays = delay.map(|Delay { seed, rate, most }| Delays {
            random: fastrand::Rng::with_seed(seed),
            rate,
            most,
        });
    }

    /// Fills the sockets of the devices at an address, so that they take nothing, or empties them.
    pub fn fill_sockets(&self, addr: IpAddr, is_full: bool) {
        self.change(addr, |defects| defects.is_full = is_full);
    }

    /// Has the sockets at an address drop trains of packets, since a route cannot segment them, or
    /// has them take these again.
    pub fn refuse_trains(&self, addr: IpAddr, refuses: bool) {
        self.change(addr, |defects| defects.refuses_trains = refuses);
    }

    /// Has the devices at an address refuse these posts, in place of those of the last call: one
    /// that is being taken away refuses all, before its owner learns of it.
    pub fn refuse_posts(&self, addr: IpAddr, refusals: Refusals) {
        self.change(addr, |defects| defects.refusals = refusals);
    }

    /// Has receives that are posted at an address reach their queues so much later. Senders find
    /// none there meanwhile, and are asked to wait (RNR NAK).
    pub fn delay_receives(&self, addr: IpAddr, delay: Duration) {
        self.change(addr, |defects| defects.delay = delay);
    }

    /// Breaks something of one of the connections at an address, the `nth`, once there is one.
    pub fn break_one(&self, addr: IpAddr, what: Breakage, nth: usize) {
        self.change(addr, |defects| defects.broken = Some((what, nth)));
    }

    /// Breaks nothing more at an address.
    pub fn break_none(&self, addr: IpAddr) {
        self.change(addr, |defects| defects.broken = None);
    }

    /// Records what the devices at an address are asked for from now on, and has one of that fail.
    pub fn record(&self, addr: IpAddr, fails: Option<Failing>) {
        self.change(addr, |defects| {
            defects.recording = Some(Recording::new(fails));
        });
    }

    /// Ends a record, and returns it; an empty one if there was none.
    #[must_use]
    pub fn take_record(&self, addr: IpAddr) -> Record {
        let recording = self.change(addr, |defects| defects.recording.take());
        recording
            .map(|recording| recording.record)
            .unwrap_or_default()
    }

    fn change<T>(&self, addr: IpAddr, change: impl FnOnce(&mut Defects) -> T) -> T {
        let mut wire = self.wire();
        let known = wire.defects.entry(addr).or_default();
        change(&mut known.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Narrows all ways to an address: longer packets are lost, and devices there make no
    /// connections of a larger path MTU. `None` widens them again.
    pub fn narrow(&self, addr: IpAddr, most: Option<Mtu>) {
        let mut wire = self.wire();
        match most {
            Some(most) => wire.ways.insert(addr, most),
            None => wire.ways.remove(&addr),
        };
    }

    /// Puts a packet on the wire that no device has made.
    pub fn inject(&self, src: SocketAddr, dst: SocketAddr, packet: Vec<u8>) {
        self.send(self.now(), src, dst, packet);
    }

    /// Lets an address have a new device.
    pub fn plug(&self, addr: IpAddr) {
        self.wire().unplugged.remove(&addr);
    }

    /// Shows each packet that a device sends, as it leaves it, to a function: where it is from,
    /// where it goes, and its bytes. The function must not use the fabric.
    pub fn tap(&self, tap: impl FnMut(SocketAddr, SocketAddr, &[u8]) + Send + 'static) {
        self.wire().tap = Some(Tap(Box::new(tap)));
    }

    /// Returns the number of packets that were sent.
    #[must_use]
    pub fn packets(&self) -> u64 {
        self.wire().packets
    }

    /// Whether the device at an address was taken away, and not brought back.
    #[must_use]
    pub fn is_unplugged(&self, addr: IpAddr) -> bool {
        self.wire().unplugged.contains(&addr)
    }

    /// Present time of the virtual clock.
    #[must_use]
    pub fn now(&self) -> Instant {
        self.wire().now
    }

    /// Time since the fabric was made.
    #[must_use]
    pub fn elapsed(&self) -> Duration {
        let wire = self.wire();
        wire.now.duration_since(wire.start)
    }

    /// Moves the clock; it never goes back.
    pub fn advance_to(&self, now: Instant) {
        let mut wire = self.wire();
        wire.now = wire.now.max(now);
        let now = wire.now;
        wire.pump(now);
    }

    /// Next time at which a packet arrives or comes out of hold.
    #[must_use]
    pub fn next_arrival(&self) -> Option<Instant> {
        let wire = self.wire();
        let queued = wire.queues.values().filter_map(|q| q.keys().next());
        queued.map(|(at, _)| *at).chain(wire.release()).min()
    }

    /// Next time after `now` at which a packet arrives or comes out of hold. Those that have arrived
    /// at a device that does not take them are left out.
    #[must_use]
    pub fn next_arrival_after(&self, now: Instant) -> Option<Instant> {
        let wire = self.wire();
        let queues = wire.queues.values();
        let queued = queues.filter_map(|q| q.keys().map(|(at, _)| *at).find(|at| *at > now));
        queued.chain(wire.release().filter(|at| *at > now)).min()
    }

    /// A number that stands for everything ever sent, and when: equal for equal runs.
    #[must_use]
    pub fn trace(&self) -> u64 {
        self.wire().trace
    }

    /// Bytes of packets on their way that these addresses have sent.
    #[must_use]
    pub fn bytes_from(&self, is_sender: impl Fn(IpAddr) -> bool) -> usize {
        let wire = self.wire();
        let queued = wire.queues.values().flat_map(BTreeMap::values);
        let sent = queued.chain(wire.held.values());
        let sent = sent.map(|((src, _), packet)| (src, packet));
        let sent = sent.filter(|(src, _)| is_sender(src.ip()));
        sent.map(|(_, packet)| packet.capacity()).sum()
    }

    /// Counters of the wire's faults.
    #[must_use]
    pub fn fault_counters(&self) -> FaultCounters {
        self.wire().injector.counters()
    }

    /// Packets lost because too many waited.
    #[must_use]
    pub fn overflows(&self) -> u64 {
        self.wire().overflows
    }

    /// Changes what befalls packets from now on, keeping the sequence of random numbers apart from
    /// the old one's by its seed.
    pub fn set_faults(&self, faults: FaultConfig) {
        let mut wire = self.wire();
        // An hour from now nothing is held back any longer: what is under way comes out and goes
        // through the new faults, so that a change of faults loses nothing by itself.
        let now = wire.now + Duration::from_secs(3600);
        let mut held = Vec::new();
        while let Some(p) = wire.injector.poll_packet(now) {
            held.push(p);
        }
        wire.injector = FaultInjector::new(faults);
        let now = wire.now;
        for ((src, dst), bytes) in held {
            wire.injector.handle_packet(now, (src, dst), bytes);
        }
        wire.pump(now);
    }

    /// Packets that a device's socket takes, and how long it is full then.
    fn socket(&self) -> (usize, Duration) {
        let config = self.wire().config;
        // Virtual time has to pass, or a full socket would never be ready.
        let latency = config.latency.max(Duration::from_nanos(1));
        (config.socket_room, latency)
    }

    fn send(&self, now: Instant, src: SocketAddr, dst: SocketAddr, packet: Vec<u8>) {
        let mut wire = self.wire();
        wire.packets += 1;
        wire.note(now, dst, &packet);
        if let Some(Tap(tap)) = &mut wire.tap {
            tap(src, dst, &packet);
        }
        if wire.is_blocked(src, dst) || wire.is_too_long([src, dst], packet.len()) {
            return;
        }
        wire.injector.handle_packet(now, (src, dst), packet);
        wire.pump(now);
    }

    fn join(&self, group: IpAddr, place: Place) {
        self.wire().groups.entry(group).or_default().insert(place);
    }

    fn leave(&self, group: IpAddr, place: Place) {
        if let Some(places) = self.wire().groups.get_mut(&group) {
            places.remove(&place);
        }
    }

    /// The next packet that has arrived at a place.
    fn take(&self, now: Instant, place: Place) -> Option<(Ends, Vec<u8>)> {
        let mut wire = self.wire();
        let entry = wire.queues.get_mut(&place)?.first_entry()?;
        // The first is the one that arrives first; nothing behind it can be due.
        (entry.key().0 <= now).then(|| entry.remove())
    }

    fn next_for(&self, place: Place) -> Option<Instant> {
        let wire = self.wire();
        let first = wire.queues.get(&place)?.keys().next().map(|k| k.0);
        first.into_iter().chain(wire.release()).min()
    }
}

/// A device on a fabric.
#[derive(Debug)]
pub struct Endpoint {
    nic: DefectiveNic,
    fabric: Fabric,
    /// Number of the device in its fabric.
    number: u64,
    place: Place,
    batch: TxBatch,
    /// Until when its socket takes nothing.
    full_until: Option<Instant>,
    /// Ports of other programs, by identifiers that have them.
    occupied: Vec<(SocketAddr, CmId)>,
    /// Its owner knows that it is gone.
    is_reported: bool,
}

delegate_to_nic!(Endpoint, tick);
delegate_counters_to_nic!(Endpoint);

impl Endpoint {
    fn tick(&mut self) {
        self.nic.set_now(self.fabric.now());
    }

    #[allow(
        clippy::unnecessary_wraps,
        clippy::needless_pass_by_ref_mut,
        reason = "sockets may refuse"
    )]
    fn join_group(&mut self, group: IpAddr) -> Result<(), VerbsError> {
        self.fabric.join(group, self.place);
        Ok(())
    }

    fn occupy(&mut self, at: SocketAddr) {
        let id = self.create_id(PortSpace::Tcp);
        let id = id.expect("a new device has identifiers");
        self.bind_addr(id, at).expect("a new device has all ports");
        self.occupied.push((at, id));
    }

    /// Frees the ports of programs that have ended.
    fn vacate(&mut self) {
        let is_over = |(at, _): &mut (SocketAddr, CmId)| !self.fabric.wire().occupied.contains(at);
        let over: Vec<_> = self.occupied.extract_if(.., is_over).collect();
        for (_, id) in over {
            self.destroy_id(id).expect("it is only bound");
        }
    }

    /// Address of the device.
    #[must_use]
    pub fn addr(&self) -> IpAddr {
        self.place.0
    }

    /// Changes the largest path MTU of connections that are made from now on.
    /// A device that takes its place has it as well.
    pub fn set_mtu(&mut self, mtu: Mtu) {
        self.fabric.wire().mtus.insert(self.place.0, mtu);
        self.nic.set_mtu(mtu);
    }

    /// Returns the worker that it belongs to, and how many bits name it.
    #[must_use]
    pub fn worker(&self) -> (u32, u8) {
        let config = self.nic.config();
        (config.worker_index, config.worker_bits)
    }

    /// The wire that it is on.
    #[must_use]
    pub fn fabric(&self) -> &Fabric {
        &self.fabric
    }

    /// Whether it was taken off the wire. It does nothing any more.
    #[must_use]
    pub fn is_gone(&self) -> bool {
        self.fabric.wire().plugged.get(&self.place) != Some(&self.number)
    }

    /// Sends what the socket takes; returns how many packets the device made for that.
    fn transmit(&mut self, now: Instant) -> usize {
        let (is_full, refuses_trains) = {
            let defects = self.nic.defects();
            (defects.is_full, defects.refuses_trains)
        };
        if is_full || self.full_until.is_some_and(|at| at > now) {
            return 0;
        }
        // What a full socket has left goes first, as with a real one (`roce/provider.rs`).
        let made = match self.batch.is_empty() {
            true => self.nic.poll_transmit(now, &mut self.batch, TX_BUDGET),
            false => 0,
        };
        let (fabric, locals) = (&self.fabric, self.nic.local_addrs());
        let (mut room, latency) = fabric.socket();
        let outcome = self.batch.drain(now, |batch, groups| {
            let group = &groups[0];
            // As with a real one, a train goes whole if there is room for some of it.
            if room == 0 {
                return Offered::Full;
            }
            if refuses_trains && group.count > 1 {
                return Offered::Unsegmentable;
            }
            room = room.saturating_sub(group.count);
            for packet in batch.copy_packets(group) {
                let src = locals[usize::from(group.way.from)];
                fabric.send(now, src, group.way.dst, packet);
            }
            Offered::Taken(1)
        });
        self.full_until = (outcome == SendOutcome::Blocked).then(|| now + latency);
        made
    }
}

impl Drop for Endpoint {
    fn drop(&mut self) {
        // Another device may have its address by now, and keeps its queue.
        if !self.is_gone() {
            let mut wire = self.fabric.wire();
            wire.queues.remove(&self.place);
            wire.others.retain(|_, first| *first != self.place.0);
            wire.plugged.remove(&self.place);
            for places in wire.groups.values_mut() {
                places.remove(&self.place);
            }
        }
    }
}

impl Provider for Endpoint {
    fn progress(&mut self, now: Instant) -> usize {
        self.fabric.advance_to(now);
        if self.is_gone() {
            if std::mem::replace(&mut self.is_reported, true) {
                return 0;
            }
            self.nic.pull_out();
            return 1;
        }
        if !self.occupied.is_empty() {
            self.vacate();
        }
        let mtu = self.fabric.wire().mtu(self.place.0);
        self.nic.set_mtu(mtu);
        while let Some(group) = self.nic.poll_left_group() {
            self.fabric.leave(group, self.place);
        }
        let mut did = self.nic.suffer(now);
        while let Some(((src, dst), packet)) = self.fabric.take(now, self.place) {
            let nic = &mut self.nic;
            let to = nic.local_addrs().iter().position(|at| *at == dst);
            let fields = IpFields {
                gid_index: to.unwrap_or(0) as u8,
                ..IpFields::default()
            };
            match dst.ip().is_multicast() {
                false => nic.handle_train(now, src, packet.len(), &packet, fields),
                true => nic.handle_group_datagram(now, src, dst.ip(), &packet, fields),
            }
            did += 1;
        }
        // Arrivals before timers: an acknowledgement that has come in time stops the timer.
        did += self.nic.handle_timeouts(now);
        did + self.transmit(now)
    }

    fn deadline(&self) -> Option<Instant> {
        // Its timers no longer end: nothing is due at a device that is gone.
        if self.is_gone() {
            return None;
        }
        let arrival = self.fabric.next_for(self.place);
        // A full socket takes nothing, so output that is ready is no reason to wake. One that stays
        // full has no time at which it is to be tried.
        let is_full = self.nic.defects().is_full;
        let nic = match is_full || self.full_until.is_some() {
            true => self.nic.timer_deadline(),
            false => self.nic.deadline(),
        };
        let late = self.nic.late.front().map(|late| late.at);
        let full_until = self.full_until.filter(|_| !is_full);
        let all = [nic, full_until, arrival, late];
        all.into_iter().flatten().min()
    }

    fn event_fds(&self) -> EventFds<'_> {
        EventFds::new()
    }
}

/// Two devices, 127.0.0.1 and 127.0.0.2, and the wire between them.
#[derive(Debug)]
pub struct Pair {
    /// First endpoint of the pair.
    pub a: Endpoint,
    /// Second endpoint of the pair.
    pub b: Endpoint,
    /// Wire and clock of both.
    pub fabric: Fabric,
}

impl Pair {
    /// Makes two connected endpoints.
    #[must_use]
    pub fn new(config: FabricConfig) -> Self {
        let fabric = Fabric::new(config);
        Self {
            a: fabric.endpoint(Ipv4Addr::new(127, 0, 0, 1).into()),
            b: fabric.endpoint(Ipv4Addr::new(127, 0, 0, 2).into()),
            fabric,
        }
    }

    /// Does what is due now; answers how much.
    pub fn step(&mut self) -> usize {
        let now = self.fabric.now();
        self.a.progress(now) + self.b.progress(now)
    }

    /// Moves the clock to the next thing that happens by `limit`, and does it. False if there is
    /// none.
    pub fn step_to_next(&mut self, limit: Instant) -> bool {
        let next = [self.a.deadline(), self.b.deadline()]
            .into_iter()
            .flatten()
            .min();
        match next {
            Some(at) if at <= limit => {
                self.fabric.advance_to(at);
                self.step();
                true
            }
            _ => false,
        }
    }

    /// Advances the virtual clock by `time`.
    pub fn advance(&mut self, time: Duration) {
        let end = self.fabric.now() + time;
        self.step();
        while self.step_to_next(end) {}
        self.fabric.advance_to(end);
        self.step();
    }

    /// Runs until no packet is on the way and nothing is ready, leaving timers that are further
    /// than `horizon` away alone; answers the time that passed.
    pub fn run_until_idle(&mut self, horizon: Duration) -> Duration {
        let start = self.fabric.now();
        self.step();
        loop {
            let limit = self.fabric.now() + horizon;
            if !self.step_to_next(limit) {
                return self.fabric.now() - start;
            }
        }
    }
}

#[cfg(test)]
mod tests;
