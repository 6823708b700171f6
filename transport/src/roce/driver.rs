//! The UDP socket of a device. This is the only part of the device that makes system calls.
//!
//! The device uses a non-blocking, unconnected socket bound to port 4791 for each of its addresses;
//! there is usually only one address. The socket is not connected and does not allow fragmentation,
//! since the kernel will then set the IPv4 identification to a known value (0, or the segment index
//! in case of a segmented send). This is required because the ICRC covers this field. We ignore the
//! path MTU learned by the kernel (`IP_PMTUDISC_PROBE`): the path MTU of a connection is negotiated
//! when it is established, and since both ports are known, anyone could send an ICMP message to
//! lower the kernel's value. If a packet is too large for the interface, sending it fails with
//! `EMSGSIZE`. Headers and registered memory are sent in place using scatter-gather I/O. If
//! supported by the kernel, consecutive packets are sent using a single segmented send, and
//! multiple sends using a single system call. We also receive an entire train of segments at once.
//!
//! - [`Driver::open`] creates and configures the socket, and checks which features are supported by
//!   the kernel.
//! - [`Driver::send`] sends a [`TxBatch`] until the socket is full. The remaining packets will be
//!   sent by the next call, and the descriptor becomes readable when the socket has room again.
//! - [`Driver::receive`] passes every available datagram to a closure.
//! - [`Driver::fd`] returns the descriptor for use in an event loop. This is an epoll set that
//!   becomes readable when packets are available or a blocked batch can be resumed. We only add the
//!   socket to the epoll set between [`Driver::arm`] and the next receive, because a watched socket
//!   needs a callback for each incoming packet, which is executed by the sender if it is on the
//!   same host. We don't return the socket itself, since io_uring can keep the port in use for a
//!   while after the process has exited.
//!
//! # Strangers
//!
//! Anyone can send a request to queue pair 1 using a spoofed source address. If this address is on
//! the local link but doesn't exist, our response will wait for neighbor resolution for seconds,
//! using up the send buffer of the socket. Therefore, messages to unverified addresses
//! ([`TxPath::is_to_stranger`](crate::nic::batch::TxPath::is_to_stranger)) are sent using separate sockets
//! with a different source port; peers only check the destination port. If these sockets are full,
//! messages are dropped and the requester has to retransmit its request. Packets to peers are never
//! blocked by this.
//!
//! A peer that has crashed is an unreachable neighbor, too, and its connections will retransmit
//! until they fail. After some retries, we send these packets using another two such sockets, which
//! are bound to the first address. The socket of any other address can block the remaining sockets
//! for up to 5 ms. If it is still full after this, the packets are dropped.
//!
//! # Multicast
//!
//! The socket is bound to a unicast address, so it does not receive any multicast datagrams. We
//! create a separate socket for each joined group and bind it to the group address. The kernel
//! implements IGMP and MLD, and passes a copy of each datagram to all such sockets on this host,
//! including the sending device.
//!
//! Not implemented: raw sockets, and IPv6 packets with a flow label.

#![allow(
    unsafe_code,
    reason = "sendmmsg and recvmmsg with control messages have no safe wrapper"
)]

use std::cell::Cell;
use std::io;
use std::mem::{size_of, zeroed};
use std::net::{IpAddr, SocketAddr, SocketAddrV6};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::ptr;
use std::time::{Duration, Instant};

use nix::sys::socket::sockopt;
use rustix::event::epoll::{self, EventFlags};
use socket2::{Domain, Protocol, Socket, Type};
use tracing::{debug, info, warn};

use super::steer::Requests;
use super::sys::{
    ControlWriter, UDP_SEGMENT, allow_no_checksum, attach_selector, check, enable_gro, grow_buffer,
    has_gso, hop_limit, hop_limit_message, only_own_groups, read_addr, segment_size, set_ecn,
    set_hop_limit, set_mtu_probe, tos_message, traffic_class, watch, write_addr,
};
use crate::netif::interface_index;
use crate::nic::IpFields;
use crate::nic::batch::{
    ECT_0, Group, HOP_LIMIT, MAX_GROUP_SEGMENTS, Offered, Piece, SendOutcome, TxBatch,
};
use crate::wire::{Qpn, ROCE_PORT};

/// Max number of datagrams received by a single system call. The first slots are always filled
/// first, since their memory was used by the previous call and is still in the cache.
const RX_SLOTS: usize = 8;
/// Same as [`RX_SLOTS`], but used when receiving long trains, which would not fit into the cache
/// otherwise.
const RX_SLOTS_OF_TRAINS: usize = 4;
/// If a call receives this number of bytes, we assume long trains.
const RX_LONG: usize = 128 << 10;
/// Size of a receive buffer: fits the largest datagram and the largest train.
const RX_BUFFER: usize = 1 << 16;
/// Number of groups sent by a single system call.
const TX_GROUPS: usize = 16;
/// Size of the control buffer for a message in bytes: three values of up to 4 bytes, including
/// headers and alignment.
const CONTROL: usize = 96;

/// Number of sockets for messages to strangers. A spoofed address can fill up only one of them,
/// since the kernel queues as many bytes for an unresolved neighbor as fit in a small socket
/// buffer.
const STRANGER_SOCKETS: usize = 4;
/// Number of sockets for retransmissions to peers that may be dead. They precede the sockets for
/// strangers.
const SILENT_SOCKETS: usize = 2;
/// Send buffer size requested for each of these sockets, in bytes.
const STRANGER_BUFFER: usize = 1 << 20;

/// How long a full socket can block a batch, if it is not the socket of the first address. A
/// working socket will have room again before this timeout, but a socket waiting for an unreachable
/// neighbor can be full for seconds.
const OTHER_PATIENCE: Duration = Duration::from_millis(5);

/// Socket configuration.
#[derive(Clone, Debug)]
pub struct DriverConfig {
    /// Address to bind to, using port 4791.
    pub addr: IpAddr,
    /// Additional device addresses. We create a socket for each of them.
    pub other_addrs: Vec<IpAddr>,
    /// Number of bits in a QP number that identify the worker. If not 0, the sockets of all workers
    /// share the port, and they must be opened in worker order.
    pub worker_bits: u8,
    /// Requested socket buffer size in bytes, for each direction.
    pub socket_buffer: usize,
    /// Send packets individually even if the kernel supports segmentation.
    pub no_segmentation: bool,
    /// Drop packets that have been forwarded by a router, i.e. if the hop limit is not
    /// [`HOP_LIMIT`].
    pub on_link: bool,
}

/// Driver counters.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DriverCounters {
    /// Send system calls.
    pub send_calls: u64,
    /// Receive system calls that returned data.
    pub receive_calls: u64,
    /// Received datagrams or trains.
    pub trains: u64,
    /// Groups dropped since they are too large for the path (`EMSGSIZE`).
    pub too_long: u64,
    /// Groups dropped because the destination is unreachable, or due to any other error.
    pub send_errors: u64,
    /// Number of times the socket was full.
    pub blocked: u64,
    /// Messages to strangers, to unresponsive peers and from additional addresses that were dropped
    /// because too many are waiting for unreachable neighbors.
    pub strangers_dropped: u64,
    /// Datagrams that didn't fit into the receive buffer.
    pub truncated: u64,
    /// Datagrams dropped because they were forwarded by a router.
    pub off_link: u64,
}

/// Sockets of a device.
pub struct Driver {
    /// Sockets of the device addresses, in GID table order.
    ports: Vec<Port>,
    /// Sockets for unresponsive peers, followed by the sockets for strangers, all bound to the same
    /// port.
    strangers: Vec<Socket>,
    stranger_port: u16,
    /// Sockets of the joined multicast groups.
    groups: Vec<(IpAddr, Socket)>,
    epoll: OwnedFd,
    /// Number of times we could not add a socket to the epoll set.
    unwatched: Cell<u64>,
    /// The socket that is currently full, as an index into [`Driver::ports`].
    full: Option<usize>,
    segments: usize,
    rcvbuf: usize,
    sndbuf: usize,
    on_link: bool,
    reports_hop_limits: bool,
    counters: DriverCounters,
    rx: Box<[u8]>,
    /// Number of datagrams to request in the next receive call, and whether the previous call used
    /// all of them.
    rx_slots: usize,
    has_more: bool,
    rx_headers: Box<Headers<RX_SLOTS>>,
    tx_headers: Box<Headers<TX_GROUPS>>,
    iovecs: Vec<libc::iovec>,
}

/// Socket of a device address.
struct Port {
    socket: Socket,
    local: SocketAddr,
    /// Events for which the epoll set currently watches the socket; empty while the worker is
    /// awake.
    watched: Cell<EventFlags>,
    /// Time since when the socket has been full.
    full_since: Option<Instant>,
}

impl Port {
    fn new(socket: Socket, addr: IpAddr) -> Self {
        Self {
            socket,
            local: SocketAddr::new(addr, ROCE_PORT),
            watched: Cell::new(EventFlags::empty()),
            full_since: None,
        }
    }
}

/// Message headers for a system call, including addresses and control data. We reuse them because
/// zeroing them for each call would write kilobytes. All fields needed by a call are set before
/// using them.
struct Headers<const N: usize> {
    messages: [libc::mmsghdr; N],
    names: [libc::sockaddr_storage; N],
    controls: [[u64; CONTROL / 8]; N],
}

impl<const N: usize> Headers<N> {
    fn new() -> Box<Self> {
        // SAFETY: all-zero bytes are valid for these plain C structures.
        Box::new(unsafe { zeroed() })
    }

    /// Prepares a message to be received into each vector.
    fn receive_into(&mut self, iovecs: &mut [libc::iovec]) {
        for (i, iovec) in iovecs.iter_mut().enumerate() {
            let header = &mut self.messages[i].msg_hdr;
            header.msg_name = ptr::from_mut(&mut self.names[i]).cast();
            header.msg_namelen = size_of::<libc::sockaddr_storage>() as _;
            header.msg_iov = iovec;
            header.msg_iovlen = 1;
            header.msg_control = self.controls[i].as_mut_ptr().cast();
            header.msg_controllen = CONTROL as _;
        }
    }
}

impl std::fmt::Debug for Driver {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Driver")
            .field("local", &self.local_addr())
            .field("segments", &self.segments)
            .finish_non_exhaustive()
    }
}

// SAFETY: only the raw pointers are not `Send`: `iovecs` is always empty when no driver method is
// running, and the pointers in the headers are set by each call before using them.
unsafe impl Send for Driver {}

impl Driver {
    /// Creates, configures and binds the socket.
    ///
    /// # Errors
    /// Returns the errors of `socket(2)`, `bind(2)` and `epoll_create1(2)`. Fails with `EADDRINUSE`
    /// if an address is used by a different device.
    pub fn open(config: &DriverConfig) -> io::Result<Self> {
        let local = SocketAddr::new(config.addr, ROCE_PORT);
        let socket = match config.worker_bits {
            0 => bind_alone(local)?,
            bits => bind_in_group(local, bits, Requests::Spread)?,
        };
        Self::on_socket(config, socket)
    }

    /// Creates a driver using a socket from [`bind_group`] for the first address. Sockets for
    /// additional addresses will be created and bound here.
    ///
    /// # Errors
    /// Returns the errors of setting socket options and of `epoll_create1(2)`, and the errors of
    /// [`Driver::open`] for additional addresses.
    pub fn on_shared(config: &DriverConfig, socket: OwnedFd) -> io::Result<Self> {
        Self::on_socket(config, Socket::from(socket))
    }

    fn on_socket(config: &DriverConfig, socket: Socket) -> io::Result<Self> {
        let mut ports = vec![Port::new(socket, config.addr)];
        for &addr in &config.other_addrs {
            // Packets are only steered to workers on the first address, so only a single worker can
            // use an additional address.
            let local = SocketAddr::new(addr, ROCE_PORT);
            let named = |e: io::Error| io::Error::new(e.kind(), format!("{local}: {e}"));
            let socket = bind_alone(local).map_err(named)?;
            ports.push(Port::new(socket, addr));
        }
        let (mut rcvbuf, mut sndbuf, mut gso) = (usize::MAX, usize::MAX, !config.no_segmentation);
        for Port { socket, local, .. } in &ports {
            set_hop_limit(socket, local.is_ipv6(), HOP_LIMIT, config.on_link)?;
            set_ecn(socket, local.is_ipv6())?;
            let size = config.socket_buffer;
            rcvbuf = rcvbuf.min(grow_buffer(
                socket,
                sockopt::RcvBufForce,
                sockopt::RcvBuf,
                size,
            ));
            sndbuf = sndbuf.min(grow_buffer(
                socket,
                sockopt::SndBufForce,
                sockopt::SndBuf,
                size,
            ));
            // A train saves a system call per packet. If not supported, we will receive individual
            // packets.
            let gro = enable_gro(socket);
            gso &= has_gso(socket);
            info!(%local, rcvbuf, sndbuf, gso, gro, "opened the RoCE socket");
        }
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        let (strangers, stranger_port) = open_strangers(config)?;
        prepare_groups(&ports[0].socket, config.addr);
        Ok(Self {
            ports,
            strangers,
            stranger_port,
            groups: Vec::new(),
            epoll,
            unwatched: Cell::new(0),
            full: None,
            segments: if gso { MAX_GROUP_SEGMENTS } else { 1 },
            rcvbuf,
            sndbuf,
            on_link: config.on_link,
            reports_hop_limits: config.on_link,
            counters: DriverCounters::default(),
            rx: vec![0; RX_SLOTS * RX_BUFFER].into_boxed_slice(),
            rx_slots: RX_SLOTS,
            has_more: false,
            rx_headers: Headers::new(),
            tx_headers: Headers::new(),
            iovecs: Vec::with_capacity(4096),
        })
    }

    /// Returns the first address and its port.
    #[must_use]
    pub fn local_addr(&self) -> SocketAddr {
        self.ports[0].local
    }

    /// Returns the source port used for messages to strangers.
    #[must_use]
    pub fn stranger_port(&self) -> u16 {
        self.stranger_port
    }

    /// Returns all descriptors.
    pub fn descriptors(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        let groups = self.groups.iter().map(|(_, socket)| socket);
        let ports = self.ports.iter().map(|port| &port.socket);
        let sockets = self.strangers.iter().chain(groups).chain(ports);
        sockets.map(AsFd::as_fd).chain([self.epoll.as_fd()])
    }

    /// Adds another descriptor to the epoll set, so that [`Driver::fd`] becomes readable when this
    /// descriptor is readable.
    ///
    /// # Errors
    /// Returns the errors of `epoll_ctl(2)`.
    pub fn watch_fd(&self, fd: BorrowedFd<'_>) -> io::Result<()> {
        let data = epoll::EventData::new_u64(0);
        Ok(epoll::add(&self.epoll, fd, data, EventFlags::IN)?)
    }

    /// Closes all sockets, so that another device can use the address. The driver can't send or
    /// receive anything after this.
    ///
    /// # Errors
    /// Returns the errors of `socket(2)` and `epoll_create1(2)`.
    pub fn close(&mut self) -> io::Result<()> {
        // Use unbound sockets as placeholders.
        for port in &mut self.ports {
            port.socket = make_socket(port.local)?;
            port.watched.set(EventFlags::empty());
            port.full_since = None;
        }
        self.epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        self.full = None;
        self.strangers.clear();
        self.groups.clear();
        Ok(())
    }

    /// Returns the maximum number of packets per group of a batch.
    #[must_use]
    pub fn max_segments(&self) -> usize {
        self.segments
    }

    /// Returns the receive buffer size in bytes, as accounted by the kernel (including overhead).
    #[must_use]
    pub fn receive_buffer(&self) -> usize {
        self.rcvbuf
    }

    /// Returns the send buffer size in bytes, as accounted by the kernel.
    #[must_use]
    pub fn send_buffer(&self) -> usize {
        self.sndbuf
    }

    /// Returns the counters since the driver was created.
    #[must_use]
    pub fn counters(&self) -> DriverCounters {
        self.counters
    }

    /// Returns the descriptor to wait for after calling [`Driver::arm`]. It becomes readable when
    /// the device needs to be polled.
    #[must_use]
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.epoll.as_fd()
    }

    /// Makes the descriptor readable when packets are already available or arrive later, until the
    /// next receive. This must be called before waiting. This will return `false` if this fails, in
    /// which case the caller must not sleep.
    #[must_use]
    pub fn arm(&self) -> bool {
        let mut all = true;
        for (at, port) in self.ports.iter().enumerate() {
            let mut events = EventFlags::IN;
            events.set(EventFlags::OUT, self.full == Some(at));
            all &= self.watch(port, events);
        }
        all
    }

    /// Adds a socket to the epoll set for `events`, or removes it if `events` is empty. This will
    /// return `false` if this fails, e.g. because the application is watching too many descriptors.
    fn watch(&self, port: &Port, events: EventFlags) -> bool {
        let watched = port.watched.get();
        if watched == events {
            return true;
        }
        match watch(&self.epoll, &port.socket, watched, events) {
            Ok(()) => {
                port.watched.set(events);
                true
            }
            Err(error) => {
                // If the caller is awake, it doesn't matter which events are set.
                if !events.is_empty() {
                    self.report_unwatched(&error);
                }
                false
            }
        }
    }

    fn report_unwatched(&self, error: &io::Error) {
        let failures = self.unwatched.get() + 1;
        self.unwatched.set(failures);
        // This can happen each time we try to sleep.
        if failures.is_power_of_two() {
            let addr = self.local_addr().ip();
            warn!(%addr, %error, failures, "cannot watch the device's socket: its worker polls \
                it and does not sleep (is fs.epoll.max_user_watches too low?)");
        }
    }

    /// Enables reporting of the hop limit for received packets, which requires a control message
    /// for each train. Until this is called, we assume [`HOP_LIMIT`].
    pub fn report_hop_limits(&mut self) {
        if !self.reports_hop_limits {
            for Port { socket, local, .. } in &self.ports {
                if let Err(error) = set_hop_limit(socket, local.is_ipv6(), HOP_LIMIT, true) {
                    debug!(%error, "cannot enable reporting of hop limits");
                }
            }
            // Only try this once: if the kernel does not support the option, it never will.
            self.reports_hop_limits = true;
        }
    }

    /// Joins a multicast group on the interface of the device address. Its datagrams will be
    /// returned by [`Driver::receive_groups`]. Joining a group twice is allowed.
    ///
    /// # Errors
    /// Returns the errors of `socket(2)`, `bind(2)` and of the socket options used to join the
    /// group: `ENODEV` if the address isn't assigned to any interface, `ENOBUFS` if the system
    /// limit is exceeded.
    pub fn join(&mut self, group: IpAddr) -> io::Result<()> {
        if self.groups.iter().any(|(joined, _)| *joined == group) {
            return Ok(());
        }
        let socket = open_group(group, self.local_addr().ip())?;
        let data = epoll::EventData::new_u64(0);
        epoll::add(&self.epoll, &socket, data, EventFlags::IN)?;
        debug!(%group, "joined a multicast group");
        self.groups.push((group, socket));
        Ok(())
    }

    /// Leaves a multicast group.
    pub fn leave(&mut self, group: IpAddr) {
        // Closing the socket also drops its group membership and removes it from the epoll set.
        self.groups.retain(|(joined, _)| *joined != group);
    }

    /// Receives a few multicast datagrams for each group. `handle` is called with the source
    /// address, the group, the data and the IP header fields. Returns the number of datagrams.
    pub fn receive_groups(
        &mut self,
        mut handle: impl FnMut(SocketAddr, IpAddr, &[u8], IpFields),
    ) -> usize {
        let mut taken = 0;
        for at in 0..self.groups.len() {
            let (group, fd) = (self.groups[at].0, self.groups[at].1.as_raw_fd());
            // There are no trains here, only single datagrams. The next call will receive the rest.
            taken += self
                .receive_from(fd, 0, &mut |src, _, bytes, ip| {
                    handle(src, group, bytes, ip);
                })
                .unwrap_or(0);
        }
        taken
    }

    /// Returns whether more packets may be available after the last call to [`Driver::receive`].
    #[must_use]
    pub fn has_more(&self) -> bool {
        self.has_more
    }

    /// Returns whether a batch has only been partially sent.
    #[must_use]
    pub fn is_blocked(&self) -> bool {
        self.full.is_some()
    }

    /// Sends a batch, starting where the previous call stopped. If the socket is full, the
    /// remaining packets are copied and will be sent when the descriptor becomes readable.
    pub fn send(&mut self, now: Instant, batch: &mut TxBatch) -> SendOutcome {
        self.full = None;
        batch.drain(now, |batch, groups| self.offer(now, batch, groups))
    }

    /// Returns when a partially sent batch should be resumed even if the descriptor isn't readable.
    #[must_use]
    pub fn deadline(&self) -> Option<Instant> {
        let full = self.full.filter(|at| *at != 0)?;
        self.ports[full]
            .full_since
            .map(|since| since + OTHER_PATIENCE)
    }

    fn offer(&mut self, now: Instant, batch: &TxBatch, groups: &[Group]) -> Offered {
        if groups[0].way.is_to_stranger {
            return self.offer_to_stranger(batch, &groups[..1]);
        }
        // To keep the order, stop at the first group that uses a different socket.
        let from = groups[0].way.from;
        let others = groups
            .iter()
            .take_while(|g| !g.way.is_to_stranger && g.way.from == from);
        let groups = &groups[..others.count()];
        let at = usize::from(from);
        let fd = self.ports[at].socket.as_raw_fd();
        loop {
            match self.send_some(fd, batch, groups) {
                Ok(sent) => {
                    self.ports[at].full_since = None;
                    return Offered::Taken(sent);
                }
                Err(e) => match e.raw_os_error() {
                    Some(libc::EINTR) => {}
                    // ENOBUFS indicates that the queue of the network device is full. Like a socket
                    // buffer, it will drain.
                    Some(libc::EAGAIN | libc::ENOBUFS) => {
                        let since = *self.ports[at].full_since.get_or_insert(now);
                        if at != 0 && now >= since + OTHER_PATIENCE {
                            self.counters.strangers_dropped += groups.len() as u64;
                            return Offered::Taken(groups.len());
                        }
                        self.counters.blocked += 1;
                        self.full = Some(at);
                        return Offered::Full;
                    }
                    errno => return self.drop_group(&groups[0], errno),
                },
            }
        }
    }

    /// Sends a message to a stranger, or to a peer that may be dead, using the first of these
    /// sockets that has room. The message is never delayed.
    fn offer_to_stranger(&mut self, batch: &TxBatch, group: &[Group]) -> Offered {
        // CM messages and data for unresponsive peers use different sockets, because otherwise one
        // of them could block the other.
        let sockets = match group[0].qpn {
            Qpn::GSI => SILENT_SOCKETS..self.strangers.len(),
            _ => 0..SILENT_SOCKETS,
        };
        for at in sockets {
            let fd = self.strangers[at].as_raw_fd();
            match self.send_some(fd, batch, group) {
                Ok(_) => return Offered::Taken(1),
                Err(e) => match e.raw_os_error() {
                    // This socket is waiting for neighbors, but the next one may have room.
                    Some(libc::EAGAIN | libc::ENOBUFS | libc::EINTR) => {}
                    errno => return self.drop_group(&group[0], errno),
                },
            }
        }
        // We need to drop the message, because a blocked batch would delay all peers behind it.
        self.counters.strangers_dropped += 1;
        Offered::Taken(1)
    }

    /// Handles a group that was rejected by the kernel for a permanent reason.
    fn drop_group(&mut self, group: &Group, errno: Option<i32>) -> Offered {
        match errno {
            Some(libc::EMSGSIZE) => {
                self.counters.too_long += 1;
                // Only log powers of two: a wrong path MTU should be logged but must not fill up
                // the log.
                if self.counters.too_long.is_power_of_two() {
                    warn!(dst = %group.way.dst, packet = group.segment, dropped = self.counters.too_long,
                        "packet exceeds the interface MTU: lower the path MTU");
                }
            }
            Some(libc::EIO | libc::EINVAL) if group.count > 1 => {
                // The device on this route does not support segmentation. We will retransmit the
                // lost packets individually.
                debug!(dst = %group.way.dst, errno, "segmented send failed, sending single packets");
                self.counters.send_errors += 1;
                return Offered::Unsegmentable;
            }
            _ => {
                self.counters.send_errors += 1;
                debug!(dst = %group.way.dst, errno, "send failed");
            }
        }
        Offered::Taken(1)
    }

    /// Sends up to the maximum number of groups per system call. This will return the number of
    /// groups accepted by the socket.
    fn send_some(&mut self, fd: RawFd, batch: &TxBatch, groups: &[Group]) -> io::Result<usize> {
        let groups = &groups[..groups.len().min(TX_GROUPS)];
        self.iovecs.clear();
        // We need to create all vectors before setting any pointers, since the list can be
        // reallocated when it grows.
        for group in groups {
            for piece in batch.pieces(group) {
                let (base, len) = match piece {
                    Piece::Bytes(r) => (batch.own(r).as_ptr().cast_mut(), r.len()),
                    Piece::Memory(m) => (m.ptr(), m.len()),
                };
                self.iovecs.push(libc::iovec {
                    iov_base: base.cast(),
                    iov_len: len,
                });
            }
        }
        // All groups use the same source address.
        let is_v6 = groups[0].way.dst.is_ipv6();
        let tos = tos_message(is_v6);
        let hops = hop_limit_message(is_v6);
        let mut at = 0;
        let headers = &mut *self.tx_headers;
        for (i, group) in groups.iter().enumerate() {
            let header = &mut headers.messages[i].msg_hdr;
            header.msg_namelen = write_addr(&mut headers.names[i], group.way.dst);
            header.msg_name = ptr::from_mut(&mut headers.names[i]).cast();
            header.msg_iov = self.iovecs[at..].as_mut_ptr();
            header.msg_iovlen = group.pieces.len() as _;
            at += group.pieces.len();
            let mut control = ControlWriter::new(&mut headers.controls[i]);
            if group.count > 1 {
                let segment = (group.segment as u16).to_ne_bytes();
                control.push((libc::IPPROTO_UDP, UDP_SEGMENT), &segment);
            }
            if group.way.tos != ECT_0 {
                control.push(tos, &i32::from(group.way.tos).to_ne_bytes());
            }
            if group.way.hop_limit != HOP_LIMIT {
                control.push(hops, &i32::from(group.way.hop_limit).to_ne_bytes());
            }
            header.msg_controllen = control.len as _;
            header.msg_control = match control.len {
                0 => ptr::null_mut(),
                _ => headers.controls[i].as_mut_ptr().cast(),
            };
        }
        self.counters.send_calls += 1;
        // SAFETY: every message points to an address, vectors and control data that outlive the
        // call. The vectors point into the buffer of the batch and into mappings that the batch
        // keeps alive. The kernel only reads from them.
        let sent = unsafe {
            libc::sendmmsg(
                fd,
                headers.messages.as_mut_ptr(),
                groups.len() as _,
                libc::MSG_NOSIGNAL as _,
            )
        };
        self.iovecs.clear();
        check(sent).map(|n| n as usize)
    }

    /// Receives available packets, up to about `limit` datagrams or trains. For each of them,
    /// `handle` is called with the source address, the segment length (the last segment may be
    /// shorter), the data, and the IP header fields. Returns the number of datagrams or trains. If
    /// `limit` is 1, we make a single system call.
    pub fn receive(
        &mut self,
        limit: usize,
        mut handle: impl FnMut(SocketAddr, usize, &[u8], IpFields),
    ) -> usize {
        // The caller is awake.
        for port in &self.ports {
            let _ = self.watch(port, EventFlags::empty());
        }
        let mut taken = 0;
        let mut others_have_more = false;
        for at in 1..self.ports.len() {
            let (fd, slots) = (self.ports[at].socket.as_raw_fd(), self.rx_slots);
            // Use a single call per address. The next call will receive the rest.
            let got = self.receive_from(fd, at as u8, &mut handle).unwrap_or(0);
            others_have_more |= got == slots;
            taken += got;
        }
        self.has_more = true;
        while taken < limit && self.has_more {
            let (fd, slots) = (self.ports[0].socket.as_raw_fd(), self.rx_slots);
            match self.receive_from(fd, 0, &mut handle) {
                Ok(n) => {
                    // We received less than requested, so the socket is empty. This avoids another
                    // call to find out.
                    self.has_more = n == slots;
                    taken += n;
                }
                Err(e) => match e.raw_os_error() {
                    Some(libc::EINTR) => {}
                    Some(libc::EAGAIN) => self.has_more = false,
                    // An ICMP error caused by a previous send is reported here. The next call will
                    // continue.
                    Some(libc::ECONNREFUSED | libc::EHOSTUNREACH | libc::ENETUNREACH) => taken += 1,
                    errno => {
                        debug!(errno, "receive failed");
                        self.has_more = false;
                    }
                },
            }
        }
        self.has_more |= others_have_more;
        taken
    }

    /// Receives packets from the socket with this address index, using a single system call.
    fn receive_from(
        &mut self,
        fd: RawFd,
        gid_index: u8,
        handle: &mut impl FnMut(SocketAddr, usize, &[u8], IpFields),
    ) -> io::Result<usize> {
        let base = self.rx.as_mut_ptr();
        let mut iovecs: [libc::iovec; RX_SLOTS] = std::array::from_fn(|i| libc::iovec {
            // SAFETY: the buffer has space for every slot, so this is in bounds.
            iov_base: unsafe { base.add(i * RX_BUFFER) }.cast(),
            iov_len: RX_BUFFER,
        });
        let headers = &mut *self.rx_headers;
        let slots = self.rx_slots;
        headers.receive_into(&mut iovecs[..slots]);
        // SAFETY: every message points to an address, a vector, control space and a separate part
        // of the receive buffer, which outlive the call.
        let got = check(unsafe {
            libc::recvmmsg(
                fd,
                headers.messages.as_mut_ptr(),
                slots as _,
                libc::MSG_DONTWAIT as _,
                ptr::null_mut(),
            )
        })? as usize;
        let received = headers.messages[..got].iter().map(|m| m.msg_len as usize);
        self.rx_slots = match received.sum::<usize>() > RX_LONG {
            true => RX_SLOTS_OF_TRAINS,
            false => RX_SLOTS,
        };
        self.counters.receive_calls += 1;
        self.counters.trains += got as u64;
        for i in 0..got {
            let header = &headers.messages[i].msg_hdr;
            let len = headers.messages[i].msg_len as usize;
            let Some(src) = read_addr(&headers.names[i]) else {
                continue;
            };
            // The ICRC check would fail for truncated data. The sender will retransmit it.
            if header.msg_flags & libc::MSG_TRUNC != 0 {
                self.counters.truncated += 1;
                continue;
            }
            // Routers decrement the hop limit, so a value of 255 indicates that the packet has not
            // been forwarded (RFC 5082).
            if self.on_link && hop_limit(header) != Some(HOP_LIMIT.into()) {
                self.counters.off_link += 1;
                continue;
            }
            let segment = segment_size(header).unwrap_or(len);
            // Ignore empty datagrams. We cannot split a train with a segment size of 0.
            if len > 0 && segment > 0 {
                let bytes = &self.rx[i * RX_BUFFER..][..len];
                handle(
                    src,
                    segment,
                    bytes,
                    ip_fields(header, self.reports_hop_limits, gid_index),
                );
            }
        }
        Ok(got)
    }
}

/// Returns the IP header fields of a received message.
fn ip_fields(header: &libc::msghdr, has_hop_limit: bool, gid_index: u8) -> IpFields {
    let hops = has_hop_limit.then(|| hop_limit(header)).flatten();
    IpFields {
        traffic_class: traffic_class(header),
        hop_limit: hops.and_then(|h| h.try_into().ok()).unwrap_or(HOP_LIMIT),
        gid_index,
    }
}

/// Creates `1 << worker_bits` sockets for worker processes which share the RoCEv2 port of an
/// address. A socket uses few resources until a process creates a driver for it. All sockets must
/// be kept open, since the kernel selects them by index.
///
/// # Errors
/// Returns the errors of `socket(2)` and `bind(2)`. Fails with `EADDRINUSE` if the port is in use,
/// even if it is shared.
pub fn bind_group(addr: IpAddr, worker_bits: u8, requests: Requests) -> io::Result<Vec<OwnedFd>> {
    let local = SocketAddr::new(addr, ROCE_PORT);
    // If the port is shared, our sockets could become part of a different group of the same user.
    drop(bind_alone(local)?);
    let bind = || {
        let socket = bind_in_group(local, worker_bits, requests)?;
        socket.set_recv_buffer_size(1)?;
        Ok(socket.into())
    };
    (0..1u32 << worker_bits).map(|_| bind()).collect()
}

/// Creates a socket with exclusive use of the port.
fn bind_alone(local: SocketAddr) -> io::Result<Socket> {
    let socket = make_receiver(local)?;
    socket.bind(&local.into())?;
    Ok(socket)
}

/// Creates a socket which shares the port with the sockets of other workers.
fn bind_in_group(local: SocketAddr, worker_bits: u8, requests: Requests) -> io::Result<Socket> {
    let socket = make_receiver(local)?;
    // The port must be shared before calling bind, but we can only attach the selector after that,
    // when the group exists.
    socket.set_reuse_port(true)?;
    socket.bind(&local.into())?;
    attach_selector(&socket, worker_bits, requests)?;
    Ok(socket)
}

/// Creates an unbound socket that accepts packets from RoCE senders.
fn make_receiver(local: SocketAddr) -> io::Result<Socket> {
    let socket = make_socket(local)?;
    // By default, IPv6 requires a UDP checksum, but RoCE senders don't set it.
    if local.is_ipv6() {
        allow_no_checksum(&socket)?;
    }
    Ok(socket)
}

/// Creates an unbound socket that sends packets as required for the ICRC.
fn make_socket(local: SocketAddr) -> io::Result<Socket> {
    let socket = Socket::new(
        Domain::for_address(local),
        Type::DGRAM.nonblocking().cloexec(),
        Some(Protocol::UDP),
    )?;
    if local.is_ipv6() {
        socket.set_only_v6(true)?;
    }
    set_mtu_probe(&socket, local.is_ipv6())?;
    set_hop_limit(&socket, local.is_ipv6(), HOP_LIMIT, false)?;
    Ok(socket)
}

/// Configures the socket to send multicast datagrams via the interface of the device address. The
/// hop limit is set per datagram.
fn prepare_groups(socket: &Socket, addr: IpAddr) {
    let set = match addr {
        // The interface is selected using the bound address.
        IpAddr::V4(_) => socket.set_multicast_ttl_v4(HOP_LIMIT.into()),
        IpAddr::V6(_) => socket
            .set_multicast_hops_v6(HOP_LIMIT.into())
            .and_then(|()| match interface_index(addr) {
                Some(index) => socket.set_multicast_if_v6(index),
                None => Ok(()),
            }),
    };
    if let Err(error) = set {
        debug!(%error, "cannot set multicast options, using system defaults");
    }
}

/// Creates a socket to receive the datagrams of a multicast group.
fn open_group(group: IpAddr, own: IpAddr) -> io::Result<Socket> {
    let is_v6 = group.is_ipv6();
    let socket = make_socket(SocketAddr::new(group, ROCE_PORT))?;
    set_hop_limit(&socket, group.is_ipv6(), HOP_LIMIT, true)?;
    set_ecn(&socket, is_v6)?;
    // Other devices on this host can join the group as well, and each will get a copy.
    socket.set_reuse_address(true)?;
    only_own_groups(&socket, is_v6)?;
    match (group, own) {
        (IpAddr::V4(group), IpAddr::V4(own)) => {
            socket.bind(&SocketAddr::new(group.into(), ROCE_PORT).into())?;
            socket.join_multicast_v4(&group, &own)?;
        }
        (IpAddr::V6(group), IpAddr::V6(_)) => {
            allow_no_checksum(&socket)?;
            let no_interface = || io::Error::from_raw_os_error(libc::ENODEV);
            let index = interface_index(own).ok_or_else(no_interface)?;
            // Binding to a link-local group requires an interface.
            let at = SocketAddrV6::new(group, ROCE_PORT, 0, index);
            socket.bind(&SocketAddr::from(at).into())?;
            socket.join_multicast_v6(&group, index)?;
        }
        _ => return Err(io::Error::from_raw_os_error(libc::EAFNOSUPPORT)),
    }
    Ok(socket)
}

/// Creates the sockets for messages to strangers and unresponsive peers. Returns the sockets and
/// their port. We don't receive anything on them.
fn open_strangers(config: &DriverConfig) -> io::Result<(Vec<Socket>, u16)> {
    // The kernel selects a port for the first socket, and the remaining sockets share it: the ICRC
    // covers the source port, so the port must not depend on which socket has room.
    let mut local = SocketAddr::new(config.addr, 0);
    let mut sockets = Vec::with_capacity(STRANGER_SOCKETS);
    for _ in 0..SILENT_SOCKETS + STRANGER_SOCKETS {
        let socket = make_socket(local)?;
        grow_buffer(
            &socket,
            sockopt::SndBufForce,
            sockopt::SndBuf,
            STRANGER_BUFFER,
        );
        // We never read from this socket, so use the minimum buffer size.
        socket.set_recv_buffer_size(1)?;
        socket.set_reuse_port(true)?;
        socket.bind(&local.into())?;
        let bound = socket.local_addr()?.as_socket();
        local.set_port(bound.map_or(0, |bound| bound.port()));
        sockets.push(socket);
    }
    Ok((sockets, local.port()))
}

#[cfg(test)]
mod tests {
    use std::net::UdpSocket;
    use std::process::Command;

    use nix::sys::socket::setsockopt;
    use riser_testkit::skip::skip;
    use rustix::event::{PollFd, PollFlags, Timespec, poll};

    use super::*;
    use crate::nic::batch::TxPath;

    fn open(addr: &str) -> Driver {
        Driver::open(&DriverConfig {
            addr: addr.parse().unwrap(),
            other_addrs: Vec::new(),
            worker_bits: 0,
            socket_buffer: 1 << 20,
            no_segmentation: false,
            on_link: true,
        })
        .unwrap()
    }

    /// Returns the ECN codepoint of the next datagram.
    fn next_ecn(socket: &UdpSocket) -> u8 {
        let (mut data, mut control) = ([0u8; 64], [0u64; 16]);
        let mut vector = libc::iovec {
            iov_base: data.as_mut_ptr().cast(),
            iov_len: data.len(),
        };
        // SAFETY: all-zero bytes are valid for this plain C structure.
        let mut header: libc::msghdr = unsafe { zeroed() };
        header.msg_iov = &raw mut vector;
        header.msg_iovlen = 1;
        header.msg_control = control.as_mut_ptr().cast();
        header.msg_controllen = size_of_val(&control) as _;
        // SAFETY: all pointers in the header outlive the call.
        let got = unsafe { libc::recvmsg(socket.as_raw_fd(), &raw mut header, 0) };
        assert!(got > 0, "{}", io::Error::last_os_error());
        traffic_class(&header) & 0b11
    }

    fn packets(batch: &mut TxBatch, dst: SocketAddr, is_markable: bool) {
        for _ in 0..2 {
            let way = TxPath::to(dst).markable(is_markable);
            batch.begin(way, Qpn::new(2), 16);
            batch.push_bytes(&[0; 16]);
        }
    }

    fn marks_pass(addr: &str, other: &str, is_v6: bool) {
        let mut driver = open(addr);
        let socket = UdpSocket::bind((other, 0)).unwrap();
        socket
            .set_read_timeout(Some(Duration::from_secs(10)))
            .unwrap();
        set_ecn(&socket, is_v6).unwrap();
        set_hop_limit(&socket, is_v6, HOP_LIMIT, false).unwrap();
        let dst = socket.local_addr().unwrap();
        let mut batch = TxBatch::new(driver.max_segments());
        packets(&mut batch, dst, true);
        packets(&mut batch, dst, false);
        assert_eq!(driver.send(Instant::now(), &mut batch), SendOutcome::Done);
        let sent = [0; 4].map(|_| next_ecn(&socket));
        assert_eq!(sent, [ECT_0, ECT_0, 0, 0]);

        let local = driver.local_addr();
        let mut marked = Vec::new();
        for tos in [0, 0b10, 0b11] {
            match is_v6 {
                true => setsockopt(&socket, sockopt::Ipv6TClass, &tos).unwrap(),
                false => setsockopt(&socket, sockopt::Ipv4Tos, &tos).unwrap(),
            }
            socket.send_to(&[0; 16], local).unwrap();
        }
        let end = Instant::now() + Duration::from_secs(10);
        while marked.len() < 3 && Instant::now() < end {
            driver.receive(8, |_, _, _, ip| marked.push(ip.is_marked()));
        }
        assert_eq!(marked, [false, false, true]);
    }

    #[test]
    fn dead_neighbor_does_not_block_first_address() {
        // SAFETY: this only unshares the network namespace of the current thread.
        if unsafe { libc::unshare(libc::CLONE_NEWNET) } != 0 {
            let why = io::Error::last_os_error().to_string();
            return skip("a network namespace", &why);
        }
        for words in [
            "link set lo up",
            "link add v0 type veth peer name v1",
            "addr add 10.9.2.1/24 dev v0",
            "link set v0 up",
            "link set v1 up",
        ] {
            let status = Command::new("ip").args(words.split(' ')).status();
            assert!(status.unwrap().success(), "ip {words}");
        }
        let peer = UdpSocket::bind("127.0.0.2:0").unwrap();
        let mut driver = Driver::open(&DriverConfig {
            addr: [127, 0, 0, 1].into(),
            other_addrs: vec![[10, 9, 2, 1].into()],
            worker_bits: 0,
            socket_buffer: 1 << 14,
            no_segmentation: true,
            on_link: true,
        })
        .unwrap();
        let mut batch = TxBatch::new(1);
        let mut push = |way| {
            batch.begin(way, Qpn::new(2), 1024);
            batch.push_bytes(&[0; 1024]);
        };
        for _ in 0..2000 {
            let dst = ([10, 9, 2, 77], ROCE_PORT).into();
            push(TxPath {
                from: 1,
                ..TxPath::to(dst)
            });
        }
        push(TxPath::to(peer.local_addr().unwrap()));
        let now = Instant::now();
        assert_eq!(driver.deadline(), None);
        assert_eq!(driver.send(now, &mut batch), SendOutcome::Blocked);
        let at = driver.deadline().unwrap();
        assert_eq!(at, now + OTHER_PATIENCE);
        let before = at - Duration::from_millis(1);
        assert_eq!(driver.send(before, &mut batch), SendOutcome::Blocked);
        assert_eq!(driver.send(at, &mut batch), SendOutcome::Done);
        assert_eq!(driver.deadline(), None);
        let wait = Some(Duration::from_secs(10));
        peer.set_read_timeout(wait).unwrap();
        assert_eq!(peer.recv(&mut [0; 2048]).unwrap(), 1024);
        // While the socket is full, further groups are not delayed again.
        assert!(driver.counters().strangers_dropped > 0);
        let dst = ([10, 9, 2, 77], ROCE_PORT).into();
        batch.begin(
            TxPath {
                from: 1,
                ..TxPath::to(dst)
            },
            Qpn::new(2),
            1024,
        );
        batch.push_bytes(&[0; 1024]);
        assert_eq!(driver.send(at, &mut batch), SendOutcome::Done);
    }

    fn is_readable(driver: &Driver) -> bool {
        let mut fds = [PollFd::from_borrowed_fd(driver.fd(), PollFlags::IN)];
        poll(&mut fds, Some(&Timespec::default())).unwrap() > 0
    }

    #[test]
    fn descriptor_signals_packets_and_free_send_buffer() {
        let mut driver = open("127.96.0.3");
        assert!(driver.arm());
        assert!(!is_readable(&driver));
        let sender = UdpSocket::bind(("127.96.0.4", 0)).unwrap();
        set_hop_limit(&sender, false, HOP_LIMIT, false).unwrap();
        // Send more than a single call can receive.
        for _ in 0..=RX_SLOTS {
            sender.send_to(&[0; 16], driver.local_addr()).unwrap();
        }
        assert!(is_readable(&driver));
        assert_eq!(driver.receive(1, |_, _, _, _| {}), RX_SLOTS);
        assert!(driver.has_more());
        assert!(!is_readable(&driver), "not armed");
        assert!(driver.arm());
        assert!(is_readable(&driver), "what has come before");
        assert_eq!(driver.receive(1, |_, _, _, _| {}), 1);
        assert!(!driver.has_more());
        assert!(driver.arm());
        assert!(!is_readable(&driver));
        driver.full = Some(0);
        assert!(driver.arm());
        assert!(is_readable(&driver), "the socket takes more");
        driver.full = None;
        assert!(driver.arm());
        assert!(!is_readable(&driver));
    }

    #[test]
    fn failed_watch_keeps_worker_awake() {
        let mut driver = open("127.96.0.5");
        assert!(driver.arm());
        // This is not an epoll descriptor.
        driver.epoll = std::fs::File::open("/dev/null").unwrap().into();
        driver.receive(1, |_, _, _, _| {});
        assert_eq!(driver.unwatched.get(), 0, "it is awake");
        driver.full = Some(0);
        assert!(!driver.arm(), "no descriptor will show what comes");
        assert_eq!(driver.unwatched.get(), 1);
    }

    #[test]
    fn ecn_marks_are_sent_and_received() {
        marks_pass("127.96.0.1", "127.96.0.2", false);
        // There is only one address, and it may be used by other tests.
        let v6 = UdpSocket::bind(("::1", ROCE_PORT));
        if v6.is_ok() {
            drop(v6);
            marks_pass("::1", "::1", true);
        }
    }
}
