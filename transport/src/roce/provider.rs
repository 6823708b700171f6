//! The provider: a device and the socket.

use std::collections::VecDeque;
use std::fs::File;
use std::io::{self, BufWriter};
use std::net::{IpAddr, SocketAddr};
use std::os::fd::{BorrowedFd, OwnedFd};
use std::path::PathBuf;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use tracing::{info, warn};

use super::driver::{Driver, DriverConfig, DriverCounters};
use super::fault::{FaultCounters, FaultInjector, RoceFaults};
use super::pcap::PcapWriter;
use super::steer::{Requests, steer};
use crate::cm::MAX_WORKER_BITS;
use crate::netif::{AddressState, AddressWatch, interface_mtu};
use crate::nic::batch::{SendOutcome, TxBatch, TxPath};
use crate::nic::delegate::{delegate_counters_to_nic, delegate_to_nic};
use crate::nic::{IpFields, Nic, NicConfig, NicLimits};
use crate::verbs::{EventFds, MrId, Mtu, PortState, Provider, QpId, Verbs as _, VerbsError};
use crate::wire::mad::MadClass;
use crate::wire::{CommId, IcrcFlow, Mad, Qpn, ROCE_PORT, is_link_local};

/// Size of the IP and UDP headers in bytes.
const HEADERS_V4: u32 = 28;
const HEADERS_V6: u32 = 48;

/// How often to check the interface while packets are received.
const LOOK_INTERVAL: Duration = Duration::from_secs(1);

/// Minimum time between two system calls that check for address changes after a sleep.
const NOTICE_INTERVAL: Duration = Duration::from_millis(1);

/// Max number of trains received by a single call to `progress`.
const RX_LIMIT: usize = 32;
/// Number of bytes to collect before sending them.
const TX_BUDGET: usize = 256 << 10;
/// Max number of batches sent by a single call to `progress`.
const TX_BATCHES: usize = 8;
/// Max number of device addresses.
const MAX_ADDRS: usize = 16;
/// Max number of datagrams waiting to be forwarded to other workers.
const MAX_FORWARDED: usize = 1024;

/// Lower and upper bound for the number of in-flight bytes of a QP, regardless of how many other
/// QPs use the same peer.
const INFLIGHT_MIN: usize = 64 << 10;
const INFLIGHT_MAX: usize = 1 << 20;

/// Max number of in-flight bytes for all QPs with the same peer, as long as this is more than
/// [`INFLIGHT_MAX`] for each of them. Based on [`packet_cost`](crate::rc::packet_cost), this is 481
/// packets of 4096 bytes: fourteen commands of 128 KiB, or as much as a receiver can process in
/// half a millisecond. A higher value would not improve throughput, but it would delay other peers
/// of this receiver, and evict queued packets from its cache.
const PEER_INFLIGHT_MAX: usize = 4 << 20;

/// Device configuration.
#[derive(Clone, Debug)]
pub struct RoceConfig {
    /// Local address of the device.
    pub addr: IpAddr,
    /// Additional local addresses used for connection paths ([`NicConfig::other_addrs`]), up to 15.
    /// This is only supported for devices with a single worker, or if all workers are in the same
    /// process.
    pub other_addrs: Vec<IpAddr>,
    /// Maximum path MTU for new connections. If `None`, the only limit is the current MTU of the
    /// interface. The path MTU of a connection can't be changed after it has been established: if
    /// the interface MTU is lowered, its large packets will be dropped and the connection fails
    /// with [`WcStatus::RetryExcErr`](crate::verbs::WcStatus::RetryExcErr). The next connection
    /// will then use a smaller path MTU.
    pub mtu: Option<Mtu>,
    /// Worker index.
    pub worker_index: u32,
    /// Number of bits used to identify a worker; 0 for a device with a single worker.
    pub worker_bits: u8,
    /// Worker that handles connection requests.
    pub requests: Requests,
    /// Max number of in-flight bytes per QP. If `None`, the value is based on the size of the
    /// socket buffer.
    pub max_inflight_bytes: Option<u32>,
    /// Requested socket buffer size in bytes.
    pub socket_buffer: usize,
    /// Limits for device objects.
    pub limits: NicLimits,
    /// Faults to inject for testing.
    pub faults: RoceFaults,
    /// File to write a packet capture to.
    pub capture: Option<PathBuf>,
    /// Set this to remove the device if the interface with its address is removed: everything on
    /// the device will then fail
    /// ([`AsyncEvent::DeviceFatal`](crate::verbs::AsyncEvent::DeviceFatal)), and a new device can
    /// be opened. Otherwise, the port is down until the address is assigned to an interface again.
    pub is_removable: bool,
    /// Send packets individually even if the kernel supports segmentation.
    pub no_segmentation: bool,
    /// Only accept packets that have not been forwarded by a router, i.e. with a hop limit of 255
    /// (RFC 5082), to prevent spoofing by hosts behind a router. All peers must use this hop limit
    /// for sending, as this provider does. On Linux, it can be set using a route.
    pub on_link: bool,
    /// Seed for all random numbers. If `None`, we use random data from the operating system.
    pub seed: Option<[u8; 32]>,
}

impl RoceConfig {
    /// Creates a configuration for a device with a single worker at `addr`, using default values
    /// for everything else.
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

/// A datagram received by the wrong worker.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ForwardedPacket {
    /// Index of the worker that should handle the datagram.
    pub worker: u32,
    /// Source address.
    pub src: SocketAddr,
    /// IP header fields.
    pub ip: IpFields,
    /// Data of the datagram.
    pub bytes: Vec<u8>,
}

/// Metadata of a received packet.
#[derive(Clone, Copy, Debug)]
struct Arrival {
    src: SocketAddr,
    /// Multicast group the packet was sent to, if any.
    group: Option<IpAddr>,
    ip: IpFields,
}

/// The software NIC: a [`Nic`] and a UDP socket.
pub struct Roce {
    nic: Nic,
    driver: Driver,
    batch: TxBatch,
    tx_faults: Option<FaultInjector<(TxPath, Qpn)>>,
    rx_faults: Option<FaultInjector<Arrival>>,
    capture: Option<PcapWriter<BufWriter<File>>>,
    requests: Requests,
    forwarded: VecDeque<ForwardedPacket>,
    /// Packets returned by the fault injector.
    spoilt: TxBatch,
    /// Configured limit for the path MTU.
    mtu_limit: Option<Mtu>,
    /// Monitors the address; `None` if not supported by the system.
    watch: Option<AddressWatch>,
    /// When to check the interface again.
    look_at: Instant,
    /// When to start checking for address changes after a sleep which was not ended by a packet.
    notices_at: Instant,
    /// Set if the owner has armed the descriptors since the last receive.
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
    /// Opens a device. If there are multiple workers, their sockets must be opened in the order of
    /// the worker index, before there is any traffic. After that, they can be moved to their
    /// threads.
    ///
    /// # Errors
    /// [`io::ErrorKind::Unsupported`] for an IPv6 link-local address, since neither this
    /// configuration nor a GID can contain the required interface. [`io::ErrorKind::InvalidInput`]
    /// if the interface MTU is too small for RoCE packets or the worker index is out of range. This
    /// will also return the errors of the capture file and the socket, e.g. `EADDRNOTAVAIL` if this
    /// is not a local address or `EADDRINUSE` if it is used by another device.
    pub fn open(config: &RoceConfig) -> io::Result<Self> {
        Self::open_by(config, Driver::open)
    }

    /// Opens a device using the socket created by [`bind_group`] for this worker index. If a
    /// datagram for another worker is received, it will be returned by [`Roce::poll_forwarded`].
    ///
    /// [`bind_group`]: super::driver::bind_group
    ///
    /// # Errors
    /// See [`Roce::open`].
    pub fn open_shared(config: &RoceConfig, socket: OwnedFd) -> io::Result<Self> {
        Self::open_by(config, |driver| Driver::on_shared(driver, socket))
    }

    fn open_by(
        config: &RoceConfig,
        open: impl FnOnce(&DriverConfig) -> io::Result<Driver>,
    ) -> io::Result<Self> {
        // Use checked shifts since the configuration can contain any number of bits.
        let workers = 1u32.checked_shl(config.worker_bits.into()).unwrap_or(0);
        if u32::from(config.worker_bits) > MAX_WORKER_BITS || config.worker_index >= workers {
            return Err(io::Error::new(
                io::ErrorKind::InvalidInput,
                format!(
                    "invalid worker index {}: the device has {workers} workers",
                    config.worker_index
                ),
            ));
        }
        let addrs: Vec<IpAddr> = [config.addr]
            .into_iter()
            .chain(config.other_addrs.iter().copied())
            .collect();
        // Neither a GID nor this configuration can specify the interface for this address.
        if let Some(addr) = addrs.iter().find(|addr| is_link_local(**addr)) {
            return Err(io::Error::new(
                io::ErrorKind::Unsupported,
                format!("{addr} is a link-local address: use a global or unique local one"),
            ));
        }
        if addrs.len() > MAX_ADDRS {
            return Err(io::Error::new(
                io::ErrorKind::InvalidInput,
                format!("too many addresses: the limit is {MAX_ADDRS}"),
            ));
        }
        let has_tx_faults = config.faults.transmit.is_some();
        let driver = open(&DriverConfig {
            addr: config.addr,
            other_addrs: config.other_addrs.clone(),
            worker_bits: config.worker_bits,
            socket_buffer: config.socket_buffer,
            // If a packet in the middle of a segmented send were dropped, the index of the
            // following packets would change.
            no_segmentation: config.no_segmentation || has_tx_faults,
            on_link: config.on_link,
        })?;
        let carried: io::Result<Vec<_>> = addrs.iter().map(|addr| carried_mtu(*addr)).collect();
        let limits = carried?.into_iter().chain([config.mtu]);
        let mtu = limits.flatten().min();
        let mtu = mtu.unwrap_or(Mtu::Mtu1024);
        // This must be kept secret, since QP numbers, PSNs, keys and CM ids are derived from it.
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
            .and_then(|watch| driver.watch_fd(watch.fd()).map(|()| watch));
        let watch = watch.inspect_err(|error| {
            info!(addr = %config.addr, %error, "cannot monitor the port state");
        });
        let watch = watch.ok();
        if watch
            .as_ref()
            .is_some_and(|w| w.state() == AddressState::Down)
        {
            nic.device.set_port_state(PortState::Down);
            // The port has never been up, so these events can be ignored.
            while nic.poll_async_event().is_some() {}
        }
        // A fault injector needs to see all packets.
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
        self.nic.device.set_now(Instant::now());
    }

    fn join_group(&mut self, group: IpAddr) -> Result<(), VerbsError> {
        let joined = self.driver.join(group);
        joined.map_err(|e| VerbsError::Os(e.raw_os_error().unwrap_or(libc::EIO)))
    }

    /// Updates the port state depending on whether an interface has this address and its link is
    /// up.
    fn follow_address(&mut self) {
        let Some(watch) = &mut self.watch else {
            return;
        };
        let before = watch.state();
        if !watch.follow() {
            return;
        }
        let (addr, state) = (self.nic.device.port.addr().ip(), watch.state());
        let is_there = |state| matches!(state, AddressState::Up | AddressState::Down);
        match state {
            AddressState::Up => info!(%addr, "port is active"),
            AddressState::Down => warn!(%addr, "port is down: no link"),
            AddressState::Absent => {
                warn!(%addr, "port is down: address not assigned to any interface");
            }
            AddressState::Gone => warn!(%addr, "port is down: interface was removed"),
        }
        if is_there(before) != is_there(state) {
            self.nic.device.note_gid_change();
        }
        self.nic.device.set_port_state(match state {
            AddressState::Up => PortState::Active,
            AddressState::Down | AddressState::Absent | AddressState::Gone => PortState::Down,
        });
        if state == AddressState::Gone && self.is_removable {
            self.remove();
        }
    }

    /// Removes the device, as if its interface had been deleted. All objects fail, and
    /// [`AsyncEvent::DeviceFatal`](crate::verbs::AsyncEvent::DeviceFatal) is reported.
    pub fn remove(&mut self) {
        if self.is_removed() {
            return;
        }
        let addr = self.nic.device.port.addr().ip();
        warn!(%addr, "device was removed");
        self.nic.remove();
        self.watch = None;
        self.batch.clear();
        self.spoilt.clear();
        self.forwarded.clear();
        if let Err(error) = self.driver.close() {
            warn!(%addr, %error, "cannot close the sockets of a removed device");
        }
    }

    /// Returns whether the device has been removed.
    #[must_use]
    pub fn is_removed(&self) -> bool {
        self.nic.device.check_present().is_err()
    }

    /// Updates the path MTU limit from the current interface MTU. If this is unknown, because the
    /// interface was removed or is too small for RoCE packets, the device keeps its current limit.
    fn follow_mtu(&mut self) {
        let addr = self.nic.device.port.addr().ip();
        let before = self.nic.device.config().mtu;
        // A connection can migrate to any of these addresses.
        let addrs = self.nic.device.port.addrs().iter();
        let carried = addrs.map(|addr| carried_mtu(addr.ip()).ok().flatten());
        let least = carried.reduce(|a, b| a.zip(b).map(|(a, b)| a.min(b)));
        let Some(mtu) = least.flatten() else {
            return;
        };
        let mtu = self.mtu_limit.map_or(mtu, |limit| limit.min(mtu));
        self.nic.device.set_mtu(mtu);
        let (mtu, before_bytes) = (mtu.bytes(), before.bytes());
        if mtu < before_bytes {
            warn!(%addr, mtu, before = before_bytes, "interface MTU was lowered: \
                connections with a larger path MTU will time out and must be re-established");
        } else if mtu > before_bytes {
            info!(%addr, mtu, before = before_bytes, "interface MTU was raised");
        }
    }

    /// See [`Nic::modify_device`].
    ///
    /// # Errors
    /// See [`Nic::modify_device`].
    pub fn modify_device(&mut self, description: &str) -> Result<(), VerbsError> {
        self.nic.modify_device(description)
    }

    /// See [`Nic::register_agent`].
    ///
    /// # Errors
    /// See [`Nic::register_agent`].
    pub fn register_agent(&mut self, class: MadClass) -> Result<(), VerbsError> {
        self.nic.register_agent(class)
    }

    /// See [`Nic::send_mad`].
    ///
    /// # Errors
    /// See [`Nic::send_mad`].
    pub fn send_mad(&mut self, to: IpAddr, mad: &Mad) -> Result<(), VerbsError> {
        self.nic.send_mad(to, mad)
    }

    /// See [`Nic::poll_mad`].
    pub fn poll_mad(&mut self) -> Option<(IpAddr, Mad)> {
        self.nic.poll_mad()
    }

    /// See [`Cm::watch_connections`](crate::cm::Cm::watch_connections).
    pub fn watch_connections(&mut self) {
        self.nic.cm.watch_connections();
    }

    /// See [`Cm::poll_connection`](crate::cm::Cm::poll_connection).
    pub fn poll_connection(&mut self) -> Option<(CommId, Option<(IpAddr, Mad)>)> {
        self.nic.cm.poll_connection()
    }

    /// Returns the device address with the RoCEv2 port.
    #[must_use]
    pub fn socket_addr(&self) -> SocketAddr {
        self.nic.device.port.addr()
    }

    /// Returns the socket counters.
    #[must_use]
    pub fn driver_counters(&self) -> DriverCounters {
        self.driver.counters()
    }

    /// Returns the fault injection counters for sent and received packets.
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

    /// Returns the device clock in nanoseconds, as used for timestamps of completions.
    pub fn device_time(&mut self, now: Instant) -> u64 {
        self.nic.device.set_now(now);
        self.nic.device.clock.device_time()
    }

    /// Returns the memory region with this index in its id.
    #[must_use]
    pub fn mr_at(&self, index: u32) -> Option<MrId> {
        self.nic.device.memory.mr_at(index)
    }

    /// Removes the last `count` sends which have just been posted to a QP. This is used to ensure
    /// that either all requests of a list are posted or none of them. Nothing else can be called on
    /// the device in between. If the QP is in the ERROR state, the requests have already completed,
    /// and this has no effect.
    pub fn unpost_send(&mut self, qp: QpId, count: usize) {
        self.nic.device.unpost_send(qp, count);
    }

    /// Returns the next datagram for another worker, which should pass it to
    /// [`Roce::handle_forwarded`].
    pub fn poll_forwarded(&mut self) -> Option<ForwardedPacket> {
        self.forwarded.pop_front()
    }

    /// Handles a datagram received by another worker.
    pub fn handle_forwarded(&mut self, now: Instant, packet: &ForwardedPacket) {
        if self.is_removed() {
            return;
        }
        let (src, ip, bytes) = (packet.src, packet.ip, &packet.bytes[..]);
        capture_received(
            &mut self.capture,
            now,
            src,
            self.nic.device.port.addr(),
            bytes,
        );
        match &mut self.rx_faults {
            // The packet will be returned with the next received packets.
            Some(f) => {
                let group = None;
                f.handle_packet(now, Arrival { src, group, ip }, bytes.to_vec());
            }
            None => self.nic.handle_train(now, src, bytes.len(), bytes, ip),
        }
    }

    /// Returns all descriptors of the device. If a process has inherited them from `fork`, it must
    /// not use them, since they are used by its parent.
    pub fn descriptors(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        let watch = self.watch.as_ref().map(AddressWatch::fd);
        self.driver.descriptors().chain(watch)
    }

    /// Destroys all connection ids and sends all pending packets. This should be called before a
    /// process exits, so that peers are notified of each closed connection instead of having to
    /// wait for a timeout. A kernel does the same when it cleans up a process.
    pub fn end_connections(&mut self, now: Instant) {
        self.nic.device.set_now(now);
        let nic = &mut self.nic;
        nic.cm.destroy_ids(&mut nic.device);
        self.transmit(now);
    }

    /// Flushes all captured packets to the file.
    pub fn flush_capture(&mut self) {
        if let Some(capture) = &mut self.capture
            && let Err(e) = capture.flush()
        {
            warn!(%e, "cannot write the capture file, capturing stopped");
            self.capture = None;
        }
    }

    fn receive(&mut self, now: Instant) -> usize {
        let (nic, capture) = (&mut self.nic, &mut self.capture);
        let (faults, forwarded) = (&mut self.rx_faults, &mut self.forwarded);
        let (worker, bits) = (
            nic.device.config().worker_index,
            nic.device.config().worker_bits,
        );
        let requests = self.requests;
        let is_plain = capture.is_none() && faults.is_none();
        let is_ours = |packet: &[u8]| steer(packet, bits, requests).is_none_or(|to| to == worker);
        // This makes a single system call.
        let taken = self.driver.receive(1, |src, segment, bytes, ip| {
            // In the common case, handle an entire train at once. The kernel has selected the
            // worker based on the first packet only.
            if is_plain && (bits == 0 || bytes.chunks(segment).all(is_ours)) {
                nic.handle_train(now, src, segment, bytes, ip);
                return;
            }
            for packet in bytes.chunks(segment) {
                if let Some(to) = steer(packet, bits, requests).filter(|&to| to != worker) {
                    // This is bounded: if the other worker is busy, the packets are lost, as with a
                    // full socket.
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
                let local = nic.device.port.addrs()[usize::from(ip.gid_index)];
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

    /// Sends posted work like [`Provider::progress`], but does not receive. This is useful if the
    /// caller may not call the device again soon. Returns the number of packets sent.
    pub fn transmit(&mut self, now: Instant) -> usize {
        self.nic.device.set_now(now);
        if self.is_removed() {
            return 0;
        }
        let mut sent = 0;
        // Limit the number of batches, so that we also get to receive packets.
        for _ in 0..TX_BATCHES {
            if self.tx_faults.is_some() {
                let n = self.transmit_spoilt(now);
                sent += n;
                if n == 0 {
                    break;
                }
                continue;
            }
            // If the socket was full, send the remaining packets first.
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

    /// Receives packets sent to the local device address, which don't use a socket.
    fn receive_own(&mut self, now: Instant) -> usize {
        // These packets are both sent and received, but we should only capture them once.
        if let Some(own) = self.nic.own_packets() {
            capture_sent(&mut self.capture, now, &self.nic, own);
        }
        self.nic.receive_own(now)
    }

    /// Sends packets using the fault injector.
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
            // If we cannot send all packets now, the next call will continue with the rest.
            self.driver.send(now, &mut self.spoilt);
        }
        n
    }
}

impl Provider for Roce {
    fn progress(&mut self, now: Instant) -> usize {
        self.nic.device.set_now(now);
        // Don't do this each time, because these system calls aren't needed by the data path.
        if now >= self.look_at {
            self.look_at = now + LOOK_INTERVAL;
            self.follow_mtu();
            self.follow_address();
        }
        if self.is_removed() {
            return 0;
        }
        if self.nic.device.has_datagrams() {
            self.driver.report_hop_limits();
            while let Some(group) = self.nic.device.groups.poll_left() {
                self.driver.leave(group);
            }
        }
        // Send first: if the application has posted work based on the completions of the last call,
        // it is sent with the acknowledgements of that call, using a single system call.
        let mut sent = self.transmit(now);
        let mut received = self.receive(now);
        while self.driver.has_more() && received < RX_LIMIT {
            // Send between two receive system calls, because busy peers may be waiting for
            // acknowledgements to open their window. After the last one, we can wait, so the
            // acknowledgements are sent with the work posted next by the application.
            sent += self.transmit(now);
            received += self.receive(now);
        }
        // If we were not woken by a packet, check if there is a notification. We could also have
        // been woken by something else, such as a TCP request, so don't check each time. An unread
        // notification will wake us again until it is read.
        if std::mem::take(&mut self.has_slept) && received == 0 && now >= self.notices_at {
            self.notices_at = now + NOTICE_INTERVAL;
            self.follow_address();
        }
        // Set this before strangers are handled, since their messages must not be the reason for
        // the backlog.
        self.nic.cm.set_behind(received >= RX_LIMIT);
        let fired = self.nic.handle_timeouts(now);
        sent + received + fired
    }

    fn deadline(&self) -> Option<Instant> {
        // Don't let the application sleep if there are unread events.
        if self.nic.has_events() {
            return Some(self.nic.device.now());
        }
        if self.is_removed() {
            return None;
        }
        // If the socket is full, we need to wait until it is writable, not for our timer.
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

/// Returns the number of in-flight bytes always allowed for a QP, and the number allowed for all
/// QPs with the same peer, based on the size of our receive buffer.
fn plan_inflight(receive_buffer: usize) -> (u32, u32) {
    // All in-flight data must fit into the receive buffer of the remote socket, since it will be
    // dropped otherwise. We don't know the size of the remote buffer, so we use our own: peers
    // usually have the same configuration. For responses to our READs, this is the correct value.
    // We only use a quarter of it, because other peers send to this socket as well. These are upper
    // bounds: the window starts with a few packets, grows while there is no loss, and is reduced in
    // response to loss and congestion marks (`rc/congestion.rs`). If the peer has a smaller buffer,
    // or receives data from more peers, this will only cause a few retransmissions.
    let quarter = receive_buffer / 4;
    let each = quarter.clamp(INFLIGHT_MIN, INFLIGHT_MAX);
    let together = quarter.clamp(INFLIGHT_MIN, PEER_INFLIGHT_MAX);
    (each as u32, together as u32)
}

/// Returns the maximum path MTU supported by the interface of `addr`, or `None` if unknown.
fn carried_mtu(addr: IpAddr) -> io::Result<Option<Mtu>> {
    let Some(link) = interface_mtu(addr) else {
        return Ok(None);
    };
    // The interface MTU includes the IP header.
    let headers = if addr.is_ipv4() {
        HEADERS_V4
    } else {
        HEADERS_V6
    };
    let mtu = Mtu::for_udp_payload(link.saturating_sub(headers));
    mtu.map(Some).ok_or_else(|| {
        let text = format!("the MTU of the interface of {addr} is too small: {link} bytes");
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
        warn!(%e, "cannot write the capture file, capturing stopped");
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
            false => nic.device.port.addrs()[usize::from(group.way.from)],
        };
        // The kernel uses the index in the group as the identification of the packet.
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
    // The identification is not available from the socket, but we can recover it from the ICRC.
    let id = IcrcFlow::new(src, local).and_then(|f| f.check(packet, 0).ok());
    debug_assert_eq!(local.port(), ROCE_PORT);
    write_capture(capture, now, src, local, id.unwrap_or(0), packet);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn worker_sleeps_if_socket_is_watched() {
        let addr = "127.96.0.6".parse().unwrap();
        let mut device = Roce::open(&RoceConfig::new(addr)).unwrap();
        assert!(!device.arm_fds());
    }
}
