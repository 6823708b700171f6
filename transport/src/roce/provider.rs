//! The provider: a device and its socket.

use std::collections::VecDeque;
use std::fs::File;
use std::io::{self, BufWriter};
use std::net::{IpAddr, SocketAddr};
use std::os::fd::{BorrowedFd, OwnedFd};
use std::path::PathBuf;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use tracing::{info, warn};

use super::batch::{SendOutcome, TxBatch, Way};
use super::delegate::{delegate_counters_to_nic, delegate_to_nic};
use super::driver::{Driver, DriverConfig, DriverCounters};
use super::fault::{FaultCounters, FaultInjector, RoceFaults};
use super::nic::{IpFields, Nic, NicConfig, NicLimits};
use super::pcap::PcapWriter;
use super::steer::{Requests, steer};
use crate::cm::MAX_WORKER_BITS;
use crate::netif::{AddressState, AddressWatch, interface_mtu};
use crate::verbs::{EventFds, MrId, Mtu, PortState, Provider, QpId, VerbsError};
use crate::wire::mad::MadClass;
use crate::wire::{IcrcFlow, Mad, Qpn, ROCE_PORT, is_link_local};

/// Bytes of IP and UDP headers.
const HEADERS_V4: u32 = 28;
const HEADERS_V6: u32 = 48;

/// Interval at which the interface is looked at while there are packets.
const LOOK_INTERVAL: Duration = Duration::from_secs(1);

/// Shortest time between two system calls for notices of the address after sleeps.
const NOTICE_INTERVAL: Duration = Duration::from_millis(1);

/// Trains taken in by one call of `progress`.
const RX_LIMIT: usize = 32;
/// Bytes collected before they are sent.
const TX_BUDGET: usize = 256 << 10;
/// Batches sent by one call of `progress`.
const TX_BATCHES: usize = 8;
/// Most addresses of a device.
const MAX_ADDRS: usize = 16;
/// Datagrams of other workers that wait to be forwarded.
const MAX_FORWARDED: usize = 1024;

/// Bounds of the bytes that a queue pair has on the way, however many others its peer has.
const INFLIGHT_MIN: usize = 64 << 10;
const INFLIGHT_MAX: usize = 1 << 20;

/// Most bytes that the queue pairs with one peer have on the way together, as long as that is more
/// than each one's [`INFLIGHT_MAX`]. At [`packet_cost`](crate::rc::packet_cost) they are 481
/// packets of 4096 bytes: fourteen commands of 128 KiB, or what a receiver takes half a millisecond
/// to take in. More would make no transfer faster, but keep other peers of the receiver waiting
/// behind it, and push what waits out of its cache.
const PEER_INFLIGHT_MAX: usize = 4 << 20;

/// Configuration of a device.
#[derive(Clone, Debug)]
pub struct RoceConfig {
    /// Its address: one of this host's.
    pub addr: IpAddr,
    /// Further addresses of this host, for paths of connections ([`NicConfig::other_addrs`]), 15 at
    /// most. Only a device of one worker, or one whose workers' sockets are of one process, has
    /// them.
    pub other_addrs: Vec<IpAddr>,
    /// Largest path MTU of new connections. `None` sets no limit beside what the address's
    /// interface carries, which the device follows. A connection keeps the path MTU that it was
    /// made with: where the interface carries less from then on, its long packets are dropped, it
    /// ends with [`WcStatus::RetryExcErr`](crate::verbs::WcStatus::RetryExcErr), and the next one
    /// is made with a smaller path MTU.
    pub mtu: Option<Mtu>,
    /// Number of the worker.
    pub worker_index: u32,
    /// Bits that name a worker: 0 for a device of one worker.
    pub worker_bits: u8,
    /// Worker that gets the requests for connections.
    pub requests: Requests,
    /// Most bytes that a queue pair has on the way; `None` takes what suits the socket's buffer.
    pub max_inflight_bytes: Option<u32>,
    /// Bytes of socket buffer to ask for.
    pub socket_buffer: usize,
    /// Limits on the objects of the device.
    pub limits: NicLimits,
    /// Packets to lose, repeat, spoil and reorder, for tests.
    pub faults: RoceFaults,
    /// A file to capture every packet to.
    pub capture: Option<PathBuf>,
    /// To be removed with the interface that has the address: from then on everything on the device
    /// fails ([`AsyncEvent::DeviceFatal`](crate::verbs::AsyncEvent::DeviceFatal)), and another one
    /// can be opened. Otherwise the port is down until an interface has the address again.
    pub is_removable: bool,
    /// To send packets one by one even where the kernel segments.
    pub no_segmentation: bool,
    /// To take only packets that no router has forwarded, which arrive with hop limit 255 (RFC
    /// 5082): no host beyond a router can then send in a peer's name. Every peer must send with
    /// that hop limit, as this provider does; Linux does where its route says so.
    pub on_link: bool,
    /// From where all random numbers come; `None` asks the operating system.
    pub seed: Option<[u8; 32]>,
}

impl RoceConfig {
    /// A device of one worker at `addr`, everything else by default.
    #[must_use]
    pub fn new(addr: IpAddr) -> Self {
        Self {
            addr,
            other_addrs: Vec::new(),
            mtu: None,
            worker_index: 0,
            worker_bits: 0,
            requests: Requests::Spread,
            max_inflight_bytes: None,
            socket_buffer: 16 << 20,
            limits: NicLimits::default(),
            faults: RoceFaults::default(),
            capture: None,
            is_removable: false,
            no_segmentation: false,
            on_link: false,
            seed: None,
        }
    }
}

/// A datagram that belongs to another worker.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ForwardedPacket {
    /// Number of the worker that it is for.
    pub worker: u32,
    /// Address of its sender.
    pub src: SocketAddr,
    /// Fields of its IP header.
    pub ip: IpFields,
    /// Bytes of the datagram.
    pub bytes: Vec<u8>,
}

/// What a received packet came with.
#[derive(Clone, Copy, Debug)]
struct Arrival {
    src: SocketAddr,
    /// The multicast group that it was sent to.
    group: Option<IpAddr>,
    ip: IpFields,
}

/// The software NIC: a [`Nic`] and a UDP socket.
pub struct Roce {
    nic: Nic,
    driver: Driver,
    batch: TxBatch,
    tx_faults: Option<FaultInjector<(Way, Qpn)>>,
    rx_faults: Option<FaultInjector<Arrival>>,
    capture: Option<PcapWriter<BufWriter<File>>>,
    requests: Requests,
    forwarded: VecDeque<ForwardedPacket>,
    /// Packets that came out of the faulty wire.
    spoilt: TxBatch,
    /// The configured limit of the path MTU.
    mtu_limit: Option<Mtu>,
    /// The address; `None` where the system does not let it be followed.
    watch: Option<AddressWatch>,
    /// Time at which the interface is looked at next.
    look_at: Instant,
    /// Time from which notices are taken after a sleep that no packet has ended.
    notices_at: Instant,
    /// The owner has armed the descriptors since packets were taken in last.
    has_slept: bool,
    is_removable: bool,
}

impl std::fmt::Debug for Roce {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Roce")
            .field("nic", &self.nic)
            .field("driver", &self.driver)
            .finish_non_exhaustive()
    }
}

delegate_to_nic!(Roce, tick);
delegate_counters_to_nic!(Roce);

impl Roce {
    /// Opens a device. The sockets of several workers must be opened in the order of their indices,
    /// before any traffic; they may then move to their threads.
    ///
    /// # Errors
    /// [`io::ErrorKind::Unsupported`] for an IPv6 link-local address, which needs an interface that
    /// neither this configuration nor a GID names, and those of the socket (`EADDRNOTAVAIL` for an
    /// address that is not ours, `EADDRINUSE` for one that has a device already), of the capture
    /// file, and [`io::ErrorKind::InvalidInput`] for an interface that carries no RoCE packet or a
    /// worker that does not exist.
    pub fn open(config: &RoceConfig) -> io::Result<Self> {
        Self::open_by(config, Driver::open)
    }

    /// Opens a device on the socket of its worker's index, of those that [`bind_group`] has made.
    /// Datagrams of other workers that come to it nevertheless are in [`Roce::poll_forwarded`].
    ///
    /// [`bind_group`]: super::driver::bind_group
    ///
    /// # Errors
    /// As [`Roce::open`].
    pub fn open_shared(config: &RoceConfig, socket: OwnedFd) -> io::Result<Self> {
        Self::open_by(config, |driver| Driver::on_shared(driver, socket))
    }

    fn open_by(
        config: &RoceConfig,
        open: impl FnOnce(&DriverConfig) -> io::Result<Driver>,
    ) -> io::Result<Self> {
        // Shifts are checked, since the configuration may name any number of bits.
        let workers = 1u32.checked_shl(config.worker_bits.into()).unwrap_or(0);
        if u32::from(config.worker_bits) > MAX_WORKER_BITS || config.worker_index >= workers {
            return Err(io::Error::new(
                io::ErrorKind::InvalidInput,
                format!("no worker {} of {workers}", config.worker_index),
            ));
        }
        let addrs: Vec<IpAddr> = [config.addr]
            .into_iter()
            .chain(config.other_addrs.iter().copied())
            .collect();
        // Neither a GID nor this configuration can say on which interface such an address is.
        if let Some(addr) = addrs.iter().find(|addr| is_link_local(**addr)) {
            return Err(io::Error::new(
                io::ErrorKind::Unsupported,
                format!("{addr} is a link-local address: use a global or unique local one"),
            ));
        }
        if addrs.len() > MAX_ADDRS {
            return Err(io::Error::new(
                io::ErrorKind::InvalidInput,
                format!("a device has {MAX_ADDRS} addresses at most"),
            ));
        }
        let has_tx_faults = config.faults.transmit.is_some();
        let driver = open(&DriverConfig {
            addr: config.addr,
            other_addrs: config.other_addrs.clone(),
            worker_bits: config.worker_bits,
            socket_buffer: config.socket_buffer,
            // A lost packet in the middle of a segmented send would change the numbers of the rest.
            no_segmentation: config.no_segmentation || has_tx_faults,
            on_link: config.on_link,
        })?;
        let carried: io::Result<Vec<_>> = addrs.iter().map(|addr| carried_mtu(*addr)).collect();
        let limits = carried?.into_iter().chain([config.mtu]);
        let mtu = limits.flatten().min();
        let mtu = mtu.unwrap_or(Mtu::Mtu1024);
        // Secret: queue-pair numbers, PSNs, keys and ids of the CM follow from it.
        let mut seed = config.seed.unwrap_or_default();
        if config.seed.is_none() {
            getrandom::fill(&mut seed).map_err(io::Error::other)?;
        }
        let (inflight, peer_inflight) = match config.max_inflight_bytes {
            Some(fixed) => (fixed, fixed),
            None => plan_inflight(driver.receive_buffer()),
        };
        info!(addr = %config.addr, mtu = mtu.bytes(), inflight, peer_inflight, "RoCE device");
        let now = Instant::now();
        let mut nic = Nic::new(
            NicConfig {
                mtu,
                worker_index: config.worker_index,
                worker_bits: config.worker_bits,
                max_inflight_bytes: inflight,
                peer_inflight_bytes: peer_inflight,
                limits: config.limits,
                other_addrs: config.other_addrs.clone(),
                wall_start: SystemTime::now()
                    .duration_since(UNIX_EPOCH)
                    .unwrap_or_default(),
                ..NicConfig::new(config.addr, seed)
            },
            now,
        );
        nic.set_stranger_port(driver.stranger_port());
        let watch = AddressWatch::open(config.addr)
            .and_then(|watch| driver.watch_beside(watch.fd()).map(|()| watch));
        let watch = watch.inspect_err(|error| {
            info!(addr = %config.addr, %error, "the state of the port cannot be followed");
        });
        let watch = watch.ok();
        if watch
            .as_ref()
            .is_some_and(|w| w.state() == AddressState::Down)
        {
            nic.set_port_state(PortState::Down);
            // It was never up.
            while nic.poll_async_event().is_some() {}
        }
        // A faulty wire gets all packets.
        if !has_tx_faults && config.faults.receive.is_none() {
            nic.keep_own_packets(driver.max_segments());
        }
        let capture = config
            .capture
            .as_deref()
            .map(|file| {
                let named = |e: io::Error| {
                    let text = format!("cannot capture to {}: {e}", file.display());
                    io::Error::new(e.kind(), text)
                };
                PcapWriter::create(file).map_err(named)
            })
            .transpose()?;
        Ok(Self {
            nic,
            batch: TxBatch::new(driver.max_segments()),
            spoilt: TxBatch::new(1),
            driver,
            tx_faults: config.faults.transmit.map(FaultInjector::new),
            rx_faults: config.faults.receive.map(FaultInjector::new),
            capture,
            requests: config.requests,
            forwarded: VecDeque::new(),
            mtu_limit: config.mtu,
            watch,
            look_at: now + LOOK_INTERVAL,
            notices_at: now,
            has_slept: false,
            is_removable: config.is_removable,
        })
    }

    fn tick(&mut self) {
        self.nic.set_now(Instant::now());
    }

    fn join_group(&mut self, group: IpAddr) -> Result<(), VerbsError> {
        let joined = self.driver.join(group);
        joined.map_err(|e| VerbsError::Os(e.raw_os_error().unwrap_or(libc::EIO)))
    }

    /// Takes over whether an interface has the address, and its link is up.
    fn follow_address(&mut self) {
        let Some(watch) = &mut self.watch else {
            return;
        };
        let before = watch.state();
        if !watch.follow() {
            return;
        }
        let (addr, state) = (self.nic.local_addr().ip(), watch.state());
        let is_there = |state| matches!(state, AddressState::Up | AddressState::Down);
        match state {
            AddressState::Up => info!(%addr, "the port is active"),
            AddressState::Down => warn!(%addr, "the port is down: its link is"),
            AddressState::Absent => warn!(%addr, "the port is down: no interface has its address"),
            AddressState::Gone => warn!(%addr, "the port is down: its interface is gone"),
        }
        if is_there(before) != is_there(state) {
            self.nic.note_gid_change();
        }
        self.nic.set_port_state(match state {
            AddressState::Up => PortState::Active,
            AddressState::Down | AddressState::Absent | AddressState::Gone => PortState::Down,
        });
        if state == AddressState::Gone && self.is_removable {
            self.remove();
        }
    }

    /// Ends the device.
    fn remove(&mut self) {
        let addr = self.nic.local_addr().ip();
        warn!(%addr, "the device is removed");
        self.nic.remove();
        self.watch = None;
        self.batch.clear();
        self.spoilt.clear();
        self.forwarded.clear();
        if let Err(error) = self.driver.close() {
            warn!(%addr, %error, "the sockets of a device that is removed stay open");
        }
    }

    /// Whether it was removed.
    #[must_use]
    pub fn is_removed(&self) -> bool {
        self.nic.check_present().is_err()
    }

    /// Takes over what the interface carries now. While it is unknown, because the interface is
    /// gone or carries no RoCE packet, the device stays as it is.
    fn follow_mtu(&mut self) {
        let addr = self.nic.local_addr().ip();
        let before = self.nic.config().mtu;
        // Each connection may migrate to any of them.
        let addrs = self.nic.local_addrs().iter();
        let carried = addrs.map(|addr| carried_mtu(addr.ip()).ok().flatten());
        let least = carried.reduce(|a, b| a.zip(b).map(|(a, b)| a.min(b)));
        let Some(mtu) = least.flatten() else {
            return;
        };
        let mtu = self.mtu_limit.map_or(mtu, |limit| limit.min(mtu));
        self.nic.set_mtu(mtu);
        let (mtu, before_bytes) = (mtu.bytes(), before.bytes());
        if mtu < before_bytes {
            warn!(%addr, mtu, before = before_bytes, "the interface carries less than before: \
                connections with a larger path MTU will time out and have to be made again");
        } else if mtu > before_bytes {
            info!(%addr, mtu, before = before_bytes, "the interface carries more than before");
        }
    }

    /// As [`Nic::register_agent`].
    ///
    /// # Errors
    /// Those of [`Nic::register_agent`].
    pub fn register_agent(&mut self, class: MadClass) -> Result<(), VerbsError> {
        self.nic.register_agent(class)
    }

    /// As [`Nic::send_mad`].
    ///
    /// # Errors
    /// Those of [`Nic::send_mad`].
    pub fn send_mad(&mut self, to: IpAddr, mad: &Mad) -> Result<(), VerbsError> {
        self.nic.send_mad(to, mad)
    }

    /// As [`Nic::poll_mad`].
    pub fn poll_mad(&mut self) -> Option<(IpAddr, Mad)> {
        self.nic.poll_mad()
    }

    /// Its address and the port of RoCEv2.
    #[must_use]
    pub fn socket_addr(&self) -> SocketAddr {
        self.nic.local_addr()
    }

    /// Counters of the socket.
    #[must_use]
    pub fn driver_counters(&self) -> DriverCounters {
        self.driver.counters()
    }

    /// Counters of the faulty wire, sending and receiving.
    #[must_use]
    pub fn fault_counters(&self) -> (FaultCounters, FaultCounters) {
        (
            self.tx_faults
                .as_ref()
                .map_or_else(Default::default, FaultInjector::counters),
            self.rx_faults
                .as_ref()
                .map_or_else(Default::default, FaultInjector::counters),
        )
    }

    /// Time of the device's clock, in nanoseconds, as timed completions have it.
    pub fn device_time(&mut self, now: Instant) -> u64 {
        self.nic.set_now(now);
        self.nic.clock().0
    }

    /// The memory region whose id has an index.
    #[must_use]
    pub fn mr_at(&self, index: u32) -> Option<MrId> {
        self.nic.mr_at(index)
    }

    /// Takes back the newest `count` sends of a queue pair, which have just been posted: so a list is
    /// posted whole or not at all. Between the posts and this nothing else of the device may have
    /// been called. A queue pair in ERROR has completed them, and keeps that.
    pub fn unpost_send(&mut self, qp: QpId, count: usize) {
        self.nic.unpost_send(qp, count);
    }

    /// The next datagram that belongs to another worker, for its [`Roce::handle_forwarded`].
    pub fn poll_forwarded(&mut self) -> Option<ForwardedPacket> {
        self.forwarded.pop_front()
    }

    /// Takes in a datagram that another worker received.
    pub fn handle_forwarded(&mut self, now: Instant, packet: &ForwardedPacket) {
        if self.is_removed() {
            return;
        }
        let (src, ip, bytes) = (packet.src, packet.ip, &packet.bytes[..]);
        capture_received(&mut self.capture, now, src, self.nic.local_addr(), bytes);
        match &mut self.rx_faults {
            // It comes out with what is received next.
            Some(f) => {
                let group = None;
                f.handle_packet(now, Arrival { src, group, ip }, bytes.to_vec());
            }
            None => self.nic.handle_train(now, src, bytes.len(), bytes, ip),
        }
    }

    /// Every descriptor of the device's, for a process that has inherited them by `fork`: it must
    /// not use them, since its parent does.
    pub fn descriptors(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        let watch = self.watch.as_ref().map(AddressWatch::fd);
        self.driver.descriptors().chain(watch)
    }

    /// Destroys all identifiers of connections and sends what waits to be sent, for a process that
    /// ends: peers get the end of each connection, as from a kernel that cleans up after a process,
    /// and not by a timeout.
    pub fn end_connections(&mut self, now: Instant) {
        self.nic.set_now(now);
        self.nic.destroy_ids();
        self.transmit(now);
    }

    /// Brings everything captured so far to the file.
    pub fn flush_capture(&mut self) {
        if let Some(capture) = &mut self.capture
            && let Err(e) = capture.flush()
        {
            warn!(%e, "cannot write the capture, which ends here");
            self.capture = None;
        }
    }

    fn receive(&mut self, now: Instant) -> usize {
        let (nic, capture) = (&mut self.nic, &mut self.capture);
        let (faults, forwarded) = (&mut self.rx_faults, &mut self.forwarded);
        let (worker, bits) = (nic.config().worker_index, nic.config().worker_bits);
        let requests = self.requests;
        let is_plain = capture.is_none() && faults.is_none();
        let is_ours = |packet: &[u8]| steer(packet, bits, requests).is_none_or(|to| to == worker);
        // One system call.
        let taken = self.driver.receive(1, |src, segment, bytes, ip| {
            // The common case hands whole trains on. The kernel has chosen the worker by the
            // first packet.
            if is_plain && (bits == 0 || bytes.chunks(segment).all(is_ours)) {
                nic.handle_train(now, src, segment, bytes, ip);
                return;
            }
            for packet in bytes.chunks(segment) {
                if let Some(to) = steer(packet, bits, requests).filter(|&to| to != worker) {
                    // Bounded: workers that are busy elsewhere lose packets, as a full socket
                    // would.
                    if forwarded.len() < MAX_FORWARDED {
                        forwarded.push_back(ForwardedPacket {
                            worker: to,
                            src,
                            ip,
                            bytes: packet.to_vec(),
                        });
                    }
                    continue;
                }
                let local = nic.local_addrs()[usize::from(ip.gid_index)];
                capture_received(capture, now, src, local, packet);
                match faults {
                    Some(f) => {
                        let group = None;
                        f.handle_packet(now, Arrival { src, group, ip }, packet.to_vec());
                    }
                    None => nic.handle_train(now, src, packet.len(), packet, ip),
                }
            }
        });
        let taken = taken
            + self.driver.receive_groups(|src, group, packet, ip| {
                let to = SocketAddr::new(group, ROCE_PORT);
                capture_received(capture, now, src, to, packet);
                match faults {
                    Some(f) => {
                        let group = Some(group);
                        f.handle_packet(now, Arrival { src, group, ip }, packet.to_vec());
                    }
                    None => nic.handle_group_datagram(now, src, group, packet, ip),
                }
            });
        if let Some(f) = faults {
            while let Some((Arrival { src, group, ip }, packet)) = f.poll_packet(now) {
                match group {
                    Some(group) => nic.handle_group_datagram(now, src, group, &packet, ip),
                    None => nic.handle_train(now, src, packet.len(), &packet, ip),
                }
            }
        }
        taken
    }

    /// Sends what has been posted, as [`Provider::progress`] does, but takes nothing in: for a caller
    /// that posts and may not come back soon. Answers how many packets left.
    pub fn transmit(&mut self, now: Instant) -> usize {
        self.nic.set_now(now);
        if self.is_removed() {
            return 0;
        }
        let mut sent = 0;
        // A bounded number of batches, so that receiving has its turn.
        for _ in 0..TX_BATCHES {
            if self.tx_faults.is_some() {
                let n = self.transmit_spoilt(now);
                sent += n;
                if n == 0 {
                    break;
                }
                continue;
            }
            // What was left by a full socket goes before anything new.
            if self.batch.is_empty() {
                sent += self.nic.poll_transmit(now, &mut self.batch, TX_BUDGET);
                let own = self.receive_own(now);
                if self.batch.is_empty() && own == 0 {
                    break;
                }
                capture_sent(&mut self.capture, now, &self.nic, &self.batch);
            }
            if self.driver.send(now, &mut self.batch) == SendOutcome::Blocked {
                break;
            }
        }
        sent
    }

    /// Takes in what was sent to the device's own address, which no socket sees.
    fn receive_own(&mut self, now: Instant) -> usize {
        // Captured once, although it is sent and received.
        if let Some(own) = self.nic.own_packets() {
            capture_sent(&mut self.capture, now, &self.nic, own);
        }
        self.nic.receive_own(now)
    }

    /// Sends through the bad wire.
    fn transmit_spoilt(&mut self, now: Instant) -> usize {
        let Some(faults) = &mut self.tx_faults else {
            return 0;
        };
        if !self.spoilt.is_empty()
            && self.driver.send(now, &mut self.spoilt) == SendOutcome::Blocked
        {
            return 0;
        }
        let n = self.nic.poll_transmit(now, &mut self.batch, TX_BUDGET);
        for group in self.batch.groups() {
            for packet in self.batch.copy_packets(group) {
                faults.handle_packet(now, (group.way, group.qpn), packet);
            }
        }
        self.batch.clear();
        while let Some(((way, qpn), packet)) = faults.poll_packet(now) {
            self.spoilt.begin(way, qpn, packet.len());
            self.spoilt.push_bytes(&packet);
        }
        capture_sent(&mut self.capture, now, &self.nic, &self.spoilt);
        if !self.spoilt.is_empty() {
            // What does not go out now goes out first the next time.
            self.driver.send(now, &mut self.spoilt);
        }
        n
    }
}

impl Provider for Roce {
    fn progress(&mut self, now: Instant) -> usize {
        self.nic.set_now(now);
        // Now and then only: these are system calls that the data path does not need.
        if now >= self.look_at {
            self.look_at = now + LOOK_INTERVAL;
            self.follow_mtu();
            self.follow_address();
        }
        if self.is_removed() {
            return 0;
        }
        if self.nic.has_datagrams() {
            self.driver.report_hop_limits();
            while let Some(group) = self.nic.poll_left_group() {
                self.driver.leave(group);
            }
        }
        // Sending comes first: what the user posted in answer to the last call's completions leaves
        // together with the acknowledgements of that call, in one system call.
        let mut sent = self.transmit(now);
        let mut received = self.receive(now);
        while self.driver.has_more() && received < RX_LIMIT {
            // Between two system calls, since the windows of busy peers wait for acknowledgements.
            // Not after the last one: what the user posts next then takes them along.
            sent += self.transmit(now);
            received += self.receive(now);
        }
        // What has ended the sleep, where no packet has. Other things end it too, such as requests by
        // TCP, so not each time; a notice that waits ends each sleep until it is taken.
        if std::mem::take(&mut self.has_slept) && received == 0 && now >= self.notices_at {
            self.notices_at = now + NOTICE_INTERVAL;
            self.follow_address();
        }
        // Before the turns of strangers, whose messages must not be what it is behind with.
        self.nic.set_behind(received >= RX_LIMIT);
        let fired = self.nic.handle_timeouts(now);
        sent + received + fired
    }

    fn deadline(&self) -> Option<Instant> {
        // A user that has not taken its events yet is not to sleep.
        if self.nic.has_events() {
            return Some(self.nic.now());
        }
        if self.is_removed() {
            return None;
        }
        // While the socket takes nothing, its readiness says when to go on, not ours.
        let nic = if self.driver.is_blocked() {
            self.nic.timer_deadline()
        } else {
            self.nic.deadline()
        };
        let tx = self.tx_faults.as_ref().and_then(FaultInjector::deadline);
        let rx = self.rx_faults.as_ref().and_then(FaultInjector::deadline);
        let all = [nic, tx, rx, self.driver.deadline()];
        all.into_iter().flatten().min()
    }

    fn event_fds(&self) -> EventFds<'_> {
        EventFds::from_iter([self.driver.fd()])
    }

    fn arm_fds(&mut self) -> bool {
        self.has_slept = true;
        !self.is_removed() && !self.driver.arm()
    }
}

/// Bytes that a queue pair may have on the way in any case, and that those of one peer may have
/// together, by the bytes of our receive buffer.
fn plan_inflight(receive_buffer: usize) -> (u32, u32) {
    // What is on the way has to fit the receive buffer of the socket at the other end, which has
    // dropped what does not. How large that is no packet says, so our own stands for it: peers of
    // one configuration are granted the same. For the answers to our READs it is the right one. A
    // quarter of it, since other peers send to that socket as well. These are upper bounds: a
    // window begins with a few packets, grows while nothing is lost, and is cut by losses and by
    // marks (`rc/congestion.rs`), so a peer whose buffer is smaller, or that more peers send to,
    // costs a retransmission now and then.
    let quarter = receive_buffer / 4;
    let each = quarter.clamp(INFLIGHT_MIN, INFLIGHT_MAX);
    let together = quarter.clamp(INFLIGHT_MIN, PEER_INFLIGHT_MAX);
    (each as u32, together as u32)
}

/// The largest path MTU that the interface of `addr` carries; `None` where that is not known.
fn carried_mtu(addr: IpAddr) -> io::Result<Option<Mtu>> {
    let Some(link) = interface_mtu(addr) else {
        return Ok(None);
    };
    // An MTU counts whole IP packets.
    let headers = if addr.is_ipv4() {
        HEADERS_V4
    } else {
        HEADERS_V6
    };
    let mtu = Mtu::for_udp_payload(link.saturating_sub(headers));
    mtu.map(Some).ok_or_else(|| {
        let text = format!("the interface of {addr} carries packets of {link} bytes only");
        io::Error::new(io::ErrorKind::InvalidInput, text)
    })
}

type Capture = Option<PcapWriter<BufWriter<File>>>;

fn write_capture(
    capture: &mut Capture,
    now: Instant,
    src: SocketAddr,
    dst: SocketAddr,
    id: u16,
    packet: &[u8],
) {
    if let Some(c) = capture
        && let Err(e) = c.write(now, src, dst, id, packet)
    {
        warn!(%e, "cannot write the capture, which ends here");
        *capture = None;
    }
}

fn capture_sent(capture: &mut Capture, now: Instant, nic: &Nic, batch: &TxBatch) {
    if capture.is_none() {
        return;
    }
    for group in batch.groups() {
        let local = match group.way.is_to_stranger {
            true => nic.stranger_addr(),
            false => nic.local_addrs()[usize::from(group.way.from)],
        };
        // The number in the group is the identification that the kernel gives the packet.
        for (id, packet) in batch.copy_packets(group).iter().enumerate() {
            write_capture(capture, now, local, group.way.dst, id as u16, packet);
        }
    }
}

fn capture_received(
    capture: &mut Capture,
    now: Instant,
    src: SocketAddr,
    local: SocketAddr,
    packet: &[u8],
) {
    if capture.is_none() {
        return;
    }
    // The socket does not report the identification; the ICRC implies it.
    let id = IcrcFlow::new(src, local).and_then(|f| f.check(packet, 0).ok());
    debug_assert_eq!(local.port(), ROCE_PORT);
    write_capture(capture, now, src, local, id.unwrap_or(0), packet);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_device_whose_socket_is_watched_lets_its_worker_sleep() {
        let addr = "127.96.0.6".parse().unwrap();
        let mut device = Roce::open(&RoceConfig::new(addr)).unwrap();
        assert!(!device.arm_fds());
    }
}
