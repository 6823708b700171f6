//! In-process wire for tests and simulations: devices connected in memory, using a virtual clock.
//!
//! A [`Fabric`] transfers packets between [`Endpoint`]s, each of which is a complete software NIC
//! ([`crate::nic::Nic`]) without a socket. Each packet is delayed by the configured latency,
//! and can be lost, duplicated, corrupted or reordered ([`FaultInjector`]). We don't use a real
//! clock, and all random numbers are based on the seed, so the trace only depends on the seed
//! ([`Fabric::trace`]).
//!
//! ```text
//!   Endpoint ──poll_transmit──▶ FaultInjector ──latency──▶ queue of the destination ──▶ Endpoint
//! ```
//!
//! - [`Fabric`]: the wire and the clock. It can be cloned to share it.
//! - [`Endpoint`]: a [`Provider`]. Its `progress` method handles all packets that have arrived at
//!   the given time. If you drive endpoints manually, you should pass [`Fabric::now`].
//! - [`Pair`]: two endpoints and their fabric, which are driven together: [`Pair::advance`],
//!   [`Pair::run_until_idle`].
//!
//! If the workers of a target share an address, each worker has a separate device
//! ([`Fabric::endpoint_of`]). Packets are distributed using the same rule as for sockets
//! ([`crate::roce::steer`]).
//!
//! Bound: up to [`QUEUE`] packets are queued for each address. Any more are dropped, as in a socket
//! buffer.

mod defects;

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::hash::Hasher as _;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use fnv::{FnvHashMap, FnvHashSet, FnvHasher};

use defects::{DefectiveNic, Defects, Recording};
pub use defects::{Failing, Record, Refusals};

use crate::nic::batch::{Offered, SendOutcome, TxBatch};
use crate::nic::delegate::{delegate_counters_to_nic, delegate_to_nic};
use crate::nic::{Breakage, IpFields, Nic, NicConfig, NicLimits};
use crate::roce::fault::{FaultConfig, FaultCounters, FaultInjector};
use crate::roce::steer::{Requests, steer};
use crate::verbs::{CmId, EventFds, Mtu, PortSpace, Provider, RdmaCm, VerbsError};

/// Max number of packets queued for a device.
pub const QUEUE: usize = 8192;

/// Max number of bytes sent by an endpoint in a single call to `progress`.
const TX_BUDGET: usize = 256 << 10;

/// Configuration of the wire and its devices.
#[derive(Clone, Copy, Debug)]
pub struct FabricConfig {
    /// Seed for all random numbers.
    pub seed: u64,
    /// Time between sending a packet and its arrival.
    pub latency: Duration,
    /// Faults to inject. The seed is combined with the seed of the fabric.
    pub faults: FaultConfig,
    /// Path MTU for all devices.
    pub mtu: Mtu,
    /// Max number of in-flight bytes per QP.
    pub max_inflight_bytes: u32,
    /// Number of packets a device's socket can accept before it is full for the duration of the
    /// latency. The remaining packets must wait in the batch of the device.
    pub socket_room: usize,
    /// Maximum number of packets in a segmented send; 1 to disable segmentation.
    pub segments: usize,
    /// Device limits.
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

/// In-flight packets for an address, ordered by arrival time and sequence number.
type Queue = BTreeMap<(Instant, u64), (Ends, Vec<u8>)>;

/// Source and destination of a packet.
type Ends = (SocketAddr, SocketAddr);

/// Delayed packets, ordered by release time and sequence number.
type DelayedPackets = BTreeMap<(Instant, u64), (Ends, Vec<u8>)>;

/// Blocked directions for an address.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Blocked {
    /// Packets to this address are dropped.
    pub inbound: bool,
    /// Packets from this address are dropped.
    pub outbound: bool,
}

impl Blocked {
    /// No direction is blocked.
    pub const NONE: Self = Self {
        inbound: false,
        outbound: false,
    };
    /// Both directions are blocked.
    pub const BOTH: Self = Self {
        inbound: true,
        outbound: true,
    };
}

/// Configuration of packets held in the network for a long time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Delay {
    /// Seed for the random number generator.
    pub seed: u64,
    /// Rate of held packets, per million.
    pub rate: u32,
    /// Maximum hold time.
    pub most: Duration,
}

/// Max number of packets held at the same time. If exceeded, packets are not held.
pub const HELD: usize = 256;

/// State of a network that holds packets.
#[derive(Debug)]
struct Delays {
    random: fastrand::Rng,
    rate: u32,
    most: Duration,
}

impl Delays {
    /// Returns how long to hold a packet. This is usually `None`.
    fn draw(&mut self) -> Option<Duration> {
        let is_held = self.random.u32(..1_000_000) < self.rate;
        is_held.then(|| self.most.mul_f64(self.random.f64()))
    }
}

/// Address of a device and the index of its worker.
type DeviceKey = (IpAddr, u32);

/// Callback for the source, destination and data of a packet.
type OnPacket = dyn FnMut(SocketAddr, SocketAddr, &[u8]) + Send;

/// Receives all packets sent by devices.
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
    /// They can't be stored in the queue of a device, because the device may not exist yet.
    held: DelayedPackets,
    queues: FnvHashMap<DeviceKey, Queue>,
    /// Number of the device at each place.
    plugged: FnvHashMap<DeviceKey, u64>,
    /// Number of low bits in QP numbers that contain the worker index, for shared addresses.
    worker_bits: FnvHashMap<IpAddr, u8>,
    /// Maps additional addresses of a device to its first address.
    others: FnvHashMap<IpAddr, IpAddr>,
    /// Addresses of removed devices.
    unplugged: FnvHashSet<IpAddr>,
    /// Devices that have joined each multicast group.
    groups: BTreeMap<IpAddr, BTreeSet<DeviceKey>>,
    /// Blocked directions of isolated addresses.
    partitioned: FnvHashMap<IpAddr, Blocked>,
    /// Faults of all devices at an address, shared with these devices.
    defects: FnvHashMap<IpAddr, Arc<Mutex<Defects>>>,
    /// Maximum path MTU for devices at an address, if different from the configuration.
    mtus: FnvHashMap<IpAddr, Mtu>,
    /// Maximum path MTU on the path to an address.
    ways: FnvHashMap<IpAddr, Mtu>,
    /// Ports used by other programs.
    occupied: FnvHashSet<SocketAddr>,
    tap: Option<Tap>,
    sequence: u64,
    packets: u64,
    endpoints: u64,
    trace: u64,
    overflows: u64,
}

/// Max packet size in bytes excluding payload: headers, padding and ICRC.
const HEADERS: usize = 64;

impl Wire {
    /// Returns the maximum path MTU for new connections of devices at an address.
    fn mtu(&self, addr: IpAddr) -> Mtu {
        let own = self.mtus.get(&addr).copied().unwrap_or(self.config.mtu);
        let way = self.ways.get(&addr).copied().unwrap_or(own);
        std::cmp::min_by_key(own, way, |mtu| mtu.bytes())
    }

    /// Returns whether a packet is too large for the path between two addresses.
    fn is_too_long(&self, ends: [SocketAddr; 2], len: usize) -> bool {
        let mut ways = ends.iter().filter_map(|at| self.ways.get(&at.ip()));
        ways.any(|mtu| len > mtu.bytes() as usize + HEADERS)
    }

    /// Moves packets from the injector to the queues, and releases held packets.
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

    /// Adds a packet to the queue of its destination.
    fn queue(&mut self, now: Instant, ends: Ends, bytes: Vec<u8>) {
        let dst = ends.1;
        // Each device in a group gets a copy, including the sender.
        if let Some(group) = self.groups.get(&dst.ip()) {
            for place in group.clone() {
                self.queue_at(now, ends, bytes.clone(), place);
            }
            return;
        }
        // If there is no device with this address, the packet is lost, as on a network.
        let first = self.others.get(&dst.ip()).copied().unwrap_or(dst.ip());
        let bits = self.worker_bits.get(&first).copied().unwrap_or(0);
        // Like the BPF program, use worker 0 if a load is out of bounds.
        let worker = steer(&bytes, bits, Requests::Spread).unwrap_or(0);
        self.queue_at(now, ends, bytes, (first, worker));
    }

    fn queue_at(&mut self, now: Instant, ends: Ends, bytes: Vec<u8>, place: DeviceKey) {
        let Some(queue) = self.queues.get_mut(&place) else {
            return;
        };
        // Like in a socket buffer, the last packet is dropped.
        if queue.len() >= QUEUE {
            self.overflows += 1;
            return;
        }
        // Packets sent at the same time must arrive in the same order.
        self.sequence += 1;
        let at = now + self.config.latency;
        queue.insert((at, self.sequence), (ends, bytes));
    }

    /// Returns when the next held packet will be released.
    fn release(&self) -> Option<Instant> {
        let held = self.held.keys().next().map(|(at, _)| *at);
        held.into_iter().chain(self.injector.deadline()).min()
    }

    /// Returns whether packets between two addresses are dropped.
    fn is_blocked(&self, src: SocketAddr, dst: SocketAddr) -> bool {
        let of = |at: SocketAddr| self.partitioned.get(&at.ip()).copied().unwrap_or_default();
        of(src).outbound || of(dst).inbound
    }

    /// Updates the trace with a packet.
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
    /// Creates a wire without devices.
    #[must_use]
    pub fn new(config: FabricConfig) -> Self {
        // This is the only use of the real clock. Tests don't depend on the start value of the
        // virtual time.
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
            queues: FnvHashMap::default(),
            plugged: FnvHashMap::default(),
            worker_bits: FnvHashMap::default(),
            others: FnvHashMap::default(),
            unplugged: FnvHashSet::default(),
            groups: BTreeMap::new(),
            partitioned: FnvHashMap::default(),
            defects: FnvHashMap::default(),
            mtus: FnvHashMap::default(),
            ways: FnvHashMap::default(),
            occupied: FnvHashSet::default(),
            tap: None,
            sequence: 0,
            packets: 0,
            endpoints: 0,
            trace: FnvHasher::default().finish(),
            overflows: 0,
        })))
    }

    fn wire(&self) -> MutexGuard<'_, Wire> {
        // The data is still valid if another test thread has panicked.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Creates a device.
    ///
    /// # Panics
    /// If there is already a device with this address.
    #[must_use]
    pub fn endpoint(&self, addr: IpAddr) -> Endpoint {
        self.endpoint_of(addr, 0, 0)
    }

    /// Creates a device with multiple addresses. The first address identifies the device.
    ///
    /// # Panics
    /// If there is already a device with one of these addresses, or if there are no addresses.
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

    /// Creates the device of a worker, using an address shared by `1 << worker_bits` workers.
    ///
    /// # Panics
    /// If this worker already has a device with this address.
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
        // Combine the seed of the fabric with the device number, so that devices are different but
        // each run is the same.
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
            writable: Vec::new(),
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

    /// Simulates a program using this port, so it cannot be bound by devices created after this.
    pub fn occupy(&self, at: SocketAddr) {
        self.wire().occupied.insert(at);
    }

    /// Simulates that the program has exited.
    pub fn vacate(&self, at: SocketAddr) {
        self.wire().occupied.remove(&at);
    }

    /// Removes all devices with this address and drops their in-flight packets. They can't be used
    /// anymore ([`Endpoint::is_gone`]), and you cannot create new ones until [`Fabric::plug`] is
    /// called.
    pub fn unplug(&self, addr: IpAddr) {
        let mut wire = self.wire();
        wire.plugged.retain(|(at, _), _| *at != addr);
        wire.queues.retain(|(at, _), _| *at != addr);
        wire.unplugged.insert(addr);
    }

    /// Blocks an address in one or both directions, or unblocks it. In-flight packets will still
    /// arrive.
    pub fn partition(&self, addr: IpAddr, blocked: Blocked) {
        self.wire().partitioned.insert(addr, blocked);
    }

    /// Sets which packets should be held. Packets that are already being held are not affected.
    pub fn hold(&self, delay: Option<Delay>) {
        self.wire().delays = delay.map(|Delay { seed, rate, most }| Delays {
            random: fastrand::Rng::with_seed(seed),
            rate,
            most,
        });
    }

    /// Sets whether the sockets of the devices at this address are full.
    pub fn fill_sockets(&self, addr: IpAddr, is_full: bool) {
        self.change(addr, |defects| defects.is_full = is_full);
    }

    /// Sets whether segmented sends from this address are dropped, since a route does not support
    /// segmentation.
    pub fn refuse_trains(&self, addr: IpAddr, refuses: bool) {
        self.change(addr, |defects| defects.refuses_trains = refuses);
    }

    /// Sets which posts should be rejected by the devices at this address, replacing the previous
    /// value. For example, a device that is being removed rejects all posts before its owner is
    /// notified.
    pub fn refuse_posts(&self, addr: IpAddr, refusals: Refusals) {
        self.change(addr, |defects| defects.refusals = refusals);
    }

    /// Sets the delay before posted receives are added to their queue. Until then, a sender gets an
    /// RNR NAK if there are no other receives.
    pub fn delay_receives(&self, addr: IpAddr, delay: Duration) {
        self.change(addr, |defects| defects.delay = delay);
    }

    /// Breaks an object of connection number `nth` at this address, once there is a connection.
    pub fn break_one(&self, addr: IpAddr, what: Breakage, nth: usize) {
        self.change(addr, |defects| defects.broken = Some((what, nth)));
    }

    /// Cancels the last [`Fabric::break_one`] for this address.
    pub fn break_none(&self, addr: IpAddr) {
        self.change(addr, |defects| defects.broken = None);
    }

    /// Starts to record calls and completions of the devices at this address. One of them can be
    /// selected to fail.
    pub fn record(&self, addr: IpAddr, fails: Option<Failing>) {
        self.change(addr, |defects| {
            defects.recording = Some(Recording::new(fails));
        });
    }

    /// Stops recording. Returns the record, which is empty if it was not started.
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

    /// Sets the maximum path MTU for all paths to this address: larger packets are dropped, and
    /// devices with this address use it for new connections. If `None`, there is no limit.
    pub fn narrow(&self, addr: IpAddr, most: Option<Mtu>) {
        let mut wire = self.wire();
        match most {
            Some(most) => wire.ways.insert(addr, most),
            None => wire.ways.remove(&addr),
        };
    }

    /// Sends a packet that was not created by a device.
    pub fn inject(&self, src: SocketAddr, dst: SocketAddr, packet: Vec<u8>) {
        self.send(self.now(), src, dst, packet);
    }

    /// Allows a new device to be created with this address.
    pub fn plug(&self, addr: IpAddr) {
        self.wire().unplugged.remove(&addr);
    }

    /// Sets a callback to be called for each packet when it is sent by a device, with its source,
    /// destination and data. The callback must not use the fabric.
    pub fn tap(&self, tap: impl FnMut(SocketAddr, SocketAddr, &[u8]) + Send + 'static) {
        self.wire().tap = Some(Tap(Box::new(tap)));
    }

    /// Returns the number of packets sent.
    #[must_use]
    pub fn packets(&self) -> u64 {
        self.wire().packets
    }

    /// Returns whether the device with this address has been removed and not been replaced.
    #[must_use]
    pub fn is_unplugged(&self, addr: IpAddr) -> bool {
        self.wire().unplugged.contains(&addr)
    }

    /// Returns the current virtual time.
    #[must_use]
    pub fn now(&self) -> Instant {
        self.wire().now
    }

    /// Returns the time since the fabric was created.
    #[must_use]
    pub fn elapsed(&self) -> Duration {
        let wire = self.wire();
        wire.now.duration_since(wire.start)
    }

    /// Advances the clock. It never goes backwards.
    pub fn advance_to(&self, now: Instant) {
        let mut wire = self.wire();
        wire.now = wire.now.max(now);
        let now = wire.now;
        wire.pump(now);
    }

    /// Returns the next time when a packet arrives or is released.
    #[must_use]
    pub fn next_arrival(&self) -> Option<Instant> {
        let wire = self.wire();
        let queued = wire.queues.values().filter_map(|q| q.keys().next());
        queued.map(|(at, _)| *at).chain(wire.release()).min()
    }

    /// Returns the next time after `now` when a packet arrives or is released. This ignores packets
    /// that have already arrived but have not been received by their device.
    #[must_use]
    pub fn next_arrival_after(&self, now: Instant) -> Option<Instant> {
        let wire = self.wire();
        let queues = wire.queues.values();
        let queued = queues.filter_map(|q| q.keys().map(|(at, _)| *at).find(|at| *at > now));
        queued.chain(wire.release().filter(|at| *at > now)).min()
    }

    /// Returns a hash of all packets and the time they were sent. It is the same if two runs are
    /// the same.
    #[must_use]
    pub fn trace(&self) -> u64 {
        self.wire().trace
    }

    /// Returns the number of in-flight bytes sent by these addresses.
    #[must_use]
    pub fn bytes_from(&self, is_sender: impl Fn(IpAddr) -> bool) -> usize {
        let wire = self.wire();
        let queued = wire.queues.values().flat_map(BTreeMap::values);
        let sent = queued.chain(wire.held.values());
        let sent = sent.map(|((src, _), packet)| (src, packet));
        let sent = sent.filter(|(src, _)| is_sender(src.ip()));
        sent.map(|(_, packet)| packet.capacity()).sum()
    }

    /// Returns the fault injection counters.
    #[must_use]
    pub fn fault_counters(&self) -> FaultCounters {
        self.wire().injector.counters()
    }

    /// Returns the number of packets dropped because a queue was full.
    #[must_use]
    pub fn overflows(&self) -> u64 {
        self.wire().overflows
    }

    /// Changes the faults for new packets. They use a separate random number generator based on the
    /// new seed.
    pub fn set_faults(&self, faults: FaultConfig) {
        let mut wire = self.wire();
        // After an hour, the injector does not delay any packets. This returns all in-flight
        // packets, and we pass them to the new injector, so that no packets are lost due to this
        // change.
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

    /// Returns how many packets a device's socket can accept, and how long it is full after that.
    fn socket(&self) -> (usize, Duration) {
        let config = self.wire().config;
        // If no virtual time passed, a full socket would never become ready.
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

    fn join(&self, group: IpAddr, place: DeviceKey) {
        self.wire().groups.entry(group).or_default().insert(place);
    }

    fn leave(&self, group: IpAddr, place: DeviceKey) {
        if let Some(places) = self.wire().groups.get_mut(&group) {
            places.remove(&place);
        }
    }

    /// Returns the next packet that has arrived at a place.
    fn receive_packet(&self, now: Instant, place: DeviceKey) -> Option<(Ends, Vec<u8>)> {
        let mut wire = self.wire();
        let entry = wire.queues.get_mut(&place)?.first_entry()?;
        // The first packet also arrives first, so if it is not due, we don't need to check the
        // rest.
        (entry.key().0 <= now).then(|| entry.remove())
    }

    fn next_for(&self, place: DeviceKey) -> Option<Instant> {
        let wire = self.wire();
        let first = wire.queues.get(&place)?.keys().next().map(|k| k.0);
        first.into_iter().chain(wire.release()).min()
    }
}

/// A device connected to a fabric.
#[derive(Debug)]
pub struct Endpoint {
    nic: DefectiveNic,
    fabric: Fabric,
    /// Number of this device in the fabric.
    number: u64,
    place: DeviceKey,
    batch: TxBatch,
    /// If set, the socket is full until this time.
    full_until: Option<Instant>,
    /// Ports used by other programs, and the ids that use them.
    occupied: Vec<(SocketAddr, CmId)>,
    /// Set if the owner has been notified that the device was removed.
    is_reported: bool,
}

delegate_to_nic!(Endpoint, tick);
delegate_counters_to_nic!(Endpoint);

impl Endpoint {
    fn tick(&mut self) {
        self.nic.device.set_now(self.fabric.now());
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

    /// Releases the ports of programs that have exited.
    fn vacate(&mut self) {
        let is_over = |(at, _): &mut (SocketAddr, CmId)| !self.fabric.wire().occupied.contains(at);
        let over: Vec<_> = self.occupied.extract_if(.., is_over).collect();
        for (_, id) in over {
            self.destroy_id(id).expect("it is only bound");
        }
    }

    /// Returns the device address.
    #[must_use]
    pub fn addr(&self) -> IpAddr {
        self.place.0
    }

    /// Sets the maximum path MTU for new connections. This also applies if the device is replaced
    /// by a new one.
    pub fn set_mtu(&mut self, mtu: Mtu) {
        self.fabric.wire().mtus.insert(self.place.0, mtu);
        self.nic.device.set_mtu(mtu);
    }

    /// Returns the worker index and the number of bits used for it.
    #[must_use]
    pub fn worker(&self) -> (u32, u8) {
        let config = self.nic.device.config();
        (config.worker_index, config.worker_bits)
    }

    /// Returns the fabric this device is connected to.
    #[must_use]
    pub fn fabric(&self) -> &Fabric {
        &self.fabric
    }

    /// Returns whether the device has been removed. If so, it doesn't do anything.
    #[must_use]
    pub fn is_gone(&self) -> bool {
        self.fabric.wire().plugged.get(&self.place) != Some(&self.number)
    }

    /// Sends packets until the socket is full. Returns the number of packets created by the device.
    fn transmit(&mut self, now: Instant) -> usize {
        let (is_full, refuses_trains) = {
            let defects = self.nic.defects();
            (defects.is_full, defects.refuses_trains)
        };
        if is_full || self.full_until.is_some_and(|at| at > now) {
            return 0;
        }
        // Like on a real socket, send the remaining packets first (`roce/provider.rs`).
        let made = match self.batch.is_empty() {
            true => self.nic.poll_transmit(now, &mut self.batch, TX_BUDGET),
            false => 0,
        };
        let (fabric, locals) = (&self.fabric, self.nic.device.port.addrs());
        let (mut room, latency) = fabric.socket();
        let outcome = self.batch.drain(now, |batch, groups| {
            let group = &groups[0];
            // Like on a real socket, a train is sent completely if there is any space left.
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
        // Otherwise, the queue could already be used by a new device with this address.
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
            self.nic.device.pull_out();
            return 1;
        }
        if !self.occupied.is_empty() {
            self.vacate();
        }
        let mtu = self.fabric.wire().mtu(self.place.0);
        self.nic.device.set_mtu(mtu);
        while let Some(group) = self.nic.device.groups.poll_left() {
            self.fabric.leave(group, self.place);
        }
        let mut did = self.nic.suffer(now);
        while let Some(((src, dst), packet)) = self.fabric.receive_packet(now, self.place) {
            let nic = &mut self.nic;
            let to = nic.device.port.addrs().iter().position(|at| *at == dst);
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
        // Handle packets before timers, so that an acknowledgement received in time will stop the
        // timer.
        did += self.nic.handle_timeouts(now);
        did + self.transmit(now)
    }

    fn deadline(&self) -> Option<Instant> {
        // A removed device does not have any timers.
        if self.is_gone() {
            return None;
        }
        let arrival = self.fabric.next_for(self.place);
        // If the socket is full, we don't need to wake up for output that is ready. If it should
        // remain full, there is no time when we should try again.
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

/// Two devices with addresses 127.0.0.1 and 127.0.0.2, and the wire between them.
#[derive(Debug)]
pub struct Pair {
    /// First endpoint of the pair.
    pub a: Endpoint,
    /// Second endpoint of the pair.
    pub b: Endpoint,
    /// Wire and clock used by both endpoints.
    pub fabric: Fabric,
}

impl Pair {
    /// Creates two endpoints on the same wire.
    #[must_use]
    pub fn new(config: FabricConfig) -> Self {
        let fabric = Fabric::new(config);
        Self {
            a: fabric.endpoint(Ipv4Addr::new(127, 0, 0, 1).into()),
            b: fabric.endpoint(Ipv4Addr::new(127, 0, 0, 2).into()),
            fabric,
        }
    }

    /// Handles everything that is due now. This will return the number of events.
    pub fn step(&mut self) -> usize {
        let now = self.fabric.now();
        self.a.progress(now) + self.b.progress(now)
    }

    /// Advances the clock to the next event, up to `limit`, and handles it. This will return
    /// `false` if there is no event.
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

    /// Runs until there are no more in-flight packets and nothing is ready, ignoring timers that
    /// expire after more than `horizon`. Returns the elapsed time.
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
