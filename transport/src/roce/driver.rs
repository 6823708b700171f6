//! The UDP socket of a device: the only part of it that makes system calls.
//!
//! One non-blocking, unconnected socket for each of the device's addresses, bound to it and port 4791,
//! and as a rule there is one. Unconnected,
//! and with fragmentation forbidden, because the kernel then sends a known IPv4 identification (0,
//! or the segment's number within a segmented send), which the ICRC covers. Path MTUs that the
//! kernel learned are ignored (`IP_PMTUDISC_PROBE`): the path MTU of a connection is fixed when it
//! is made, and an ICMP message that lowers the kernel's can come from anyone, since both ports are
//! known. Packets that are too long for the interface are refused with `EMSGSIZE`. Sends gather
//! headers and registered memory in place; consecutive packets leave as one segmented send where
//! the kernel can do that, and several sends as one system call. Receives take whole trains of
//! segments at once.
//!
//! - [`Driver::open`] makes and tunes the socket and finds out what the kernel offers.
//! - [`Driver::send`] sends a [`TxBatch`] as far as the socket takes it; what is left stays for the
//!   next call, and the descriptor becomes readable when the socket takes more.
//! - [`Driver::receive`] hands every waiting datagram to a closure.
//! - [`Driver::fd`] is what an event loop waits for: an epoll set, readable when there is something
//!   to receive or a held-back batch may go on. It watches the socket from [`Driver::arm`] to the
//!   next receive only: a socket that is watched costs each packet that arrives a callback, which
//!   on one host its sender makes. Not the socket itself, since a ring that a process leaves behind
//!   would keep its port for a while.
//!
//! # Strangers
//!
//! A question on queue pair 1 may come in the name of a host that does not exist. An answer to an
//! address on the link then waits for its neighbour, for seconds, in the buffer of the socket that
//! has sent it. So messages to addresses that have proved nothing
//! ([`Way::is_to_stranger`](super::batch::Way::is_to_stranger)) leave by sockets of their own, with
//! a port of their own; peers look at the destination port only. Where these are full, messages are
//! dropped, and the requester repeats its question; what is sent to peers never waits for that.
//!
//! A peer that is gone is a neighbour that does not answer as well, and its connections repeat
//! their requests until they end. Those that have done so for a while send by two more such
//! sockets. These are bound to the first address. The socket of another one holds up all others for
//! 5 ms at most; as long as it stays full after that, what would leave by it is dropped.
//!
//! # Multicast
//!
//! The socket is bound to the device's own address, where no datagram to a group arrives. Each group
//! that is joined has a socket of its own, bound to the group's address. The kernel speaks IGMP and
//! MLD, and hands a copy to each such socket of the host, that of the sender's device as well.
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

use super::batch::{
    ECT_0, Group, HOP_LIMIT, MAX_GROUP_SEGMENTS, Offered, Piece, SendOutcome, TxBatch,
};
use super::nic::IpFields;
use super::steer::Requests;
use super::sys::{
    ControlWriter, UDP_SEGMENT, allow_no_checksum, attach_selector, check, enable_gro, grow_buffer,
    has_gso, hop_limit, hop_limit_message, only_own_groups, read_addr, segment_size, set_ecn,
    set_hop_limit, set_mtu_probe, tos_message, traffic_class, watch, write_addr,
};
use crate::netif::interface_index;
use crate::wire::{Qpn, ROCE_PORT};

/// Datagrams taken by one receiving system call. They come into the first slots, whose memory the
/// last call has used and the cache still holds.
const RX_SLOTS: usize = 8;
/// The same while they are long trains, whose memory would otherwise not fit the cache.
const RX_SLOTS_OF_TRAINS: usize = 4;
/// Bytes of one call that show that.
const RX_LONG: usize = 128 << 10;
/// Room for the longest datagram, or the longest train of them.
const RX_BUFFER: usize = 1 << 16;
/// Groups sent by one system call.
const TX_GROUPS: usize = 16;
/// Bytes of control messages per message: three values of up to 4 bytes, each with its header,
/// aligned.
const CONTROL: usize = 96;

/// Sockets for messages to strangers. An address that is made up fills one at most: the kernel
/// keeps as much for a neighbour that does not answer as a small socket buffer has.
const STRANGER_SOCKETS: usize = 4;
/// Sockets for what is repeated for peers that may be gone. They come before those for strangers.
const SILENT_SOCKETS: usize = 2;
/// Bytes of send buffer to ask for, of each of them.
const STRANGER_BUFFER: usize = 1 << 20;

/// Time that a full socket of another address than the first may hold up a batch. One that sends has
/// room again within it; one that waits for a neighbour that does not answer has none for seconds.
const OTHER_PATIENCE: Duration = Duration::from_millis(5);

/// Configuration of the socket.
#[derive(Clone, Debug)]
pub struct DriverConfig {
    /// Address to bind to; its port is 4791.
    pub addr: IpAddr,
    /// Further addresses of the device, with a socket each.
    pub other_addrs: Vec<IpAddr>,
    /// Bits of a queue-pair number that name the worker. Other than 0, the sockets of all workers
    /// share the port, and must be opened in the order of the workers' indices.
    pub worker_bits: u8,
    /// Bytes of socket buffer to ask for, each way.
    pub socket_buffer: usize,
    /// To send packets one by one even where the kernel segments.
    pub no_segmentation: bool,
    /// To drop packets that a router has forwarded: those whose hop limit is not
    /// [`HOP_LIMIT`].
    pub on_link: bool,
}

/// Counters of the driver.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DriverCounters {
    /// Number of sending system calls.
    pub send_calls: u64,
    /// Receiving system calls that brought something.
    pub receive_calls: u64,
    /// Datagrams, or trains of segments, received.
    pub trains: u64,
    /// Groups dropped because the path does not carry their length (`EMSGSIZE`).
    pub too_long: u64,
    /// Groups dropped because the destination cannot be reached, or for any other error.
    pub send_errors: u64,
    /// Times that the socket was full.
    pub blocked: u64,
    /// Messages to strangers and to silent peers, and by further addresses, dropped because too many
    /// wait for neighbours that do not answer.
    pub strangers_dropped: u64,
    /// Datagrams longer than the receive buffer.
    pub truncated: u64,
    /// Datagrams dropped because a router has forwarded them.
    pub off_link: u64,
}

/// The socket of a device.
pub struct Driver {
    /// Those of the device's addresses, in the order of the GID table.
    ports: Vec<Port>,
    /// For messages to silent peers, then for those to strangers, all at one port.
    strangers: Vec<Socket>,
    stranger_port: u16,
    /// A socket for each multicast group that was joined.
    groups: Vec<(IpAddr, Socket)>,
    epoll: OwnedFd,
    /// Times that the set could not be made to watch a socket.
    unwatched: Cell<u64>,
    /// The socket that was full, by its place among [`Driver::ports`].
    full: Option<usize>,
    segments: usize,
    rcvbuf: usize,
    sndbuf: usize,
    on_link: bool,
    reports_hop_limits: bool,
    counters: DriverCounters,
    rx: Box<[u8]>,
    /// Datagrams that the next receiving call takes, and whether the last one was full.
    rx_slots: usize,
    has_more: bool,
    rx_headers: Box<Headers<RX_SLOTS>>,
    tx_headers: Box<Headers<TX_GROUPS>>,
    iovecs: Vec<libc::iovec>,
}

/// Socket of one of the device's addresses.
struct Port {
    socket: Socket,
    local: SocketAddr,
    /// Events that the set watches the socket for; none while the worker is awake.
    watched: Cell<EventFlags>,
    /// Time from which on it has taken nothing.
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

/// Headers of the messages of one system call, with addresses and control data. They are kept:
/// zeroing them for each call would write kilobytes. What a call uses is written before it.
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

    /// Prepares one message to be received into each vector.
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

// SAFETY: the only members that are not `Send` are raw pointers: those of `iovecs`, which is empty
// whenever no method of the driver runs, and those of the headers, which each call writes before it
// uses them.
unsafe impl Send for Driver {}

impl Driver {
    /// Makes, tunes and binds the socket.
    ///
    /// # Errors
    /// The errors of `socket(2)`, `bind(2)` and `epoll_create1(2)`; `EADDRINUSE` if another device
    /// has one of the addresses.
    pub fn open(config: &DriverConfig) -> io::Result<Self> {
        let local = SocketAddr::new(config.addr, ROCE_PORT);
        let socket = match config.worker_bits {
            0 => bind_alone(local)?,
            bits => bind_in_group(local, bits, Requests::Spread)?,
        };
        Self::on_socket(config, socket)
    }

    /// Makes a driver of one of the sockets that [`bind_group`] has made, for the first address. Those
    /// of others are bound here.
    ///
    /// # Errors
    /// The errors of setting the socket's options, and of `epoll_create1(2)`; those of
    /// [`Driver::open`] for the other addresses.
    pub fn on_shared(config: &DriverConfig, socket: OwnedFd) -> io::Result<Self> {
        Self::on_socket(config, Socket::from(socket))
    }

    fn on_socket(config: &DriverConfig, socket: Socket) -> io::Result<Self> {
        let mut ports = vec![Port::new(socket, config.addr)];
        for &addr in &config.other_addrs {
            // Packets find their worker by the first address only, so another is one worker's.
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
            // Trains save a system call for each packet; without them the packets come one by one.
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

    /// The first address and the port that it is bound to.
    #[must_use]
    pub fn local_addr(&self) -> SocketAddr {
        self.ports[0].local
    }

    /// The port that messages to strangers come from.
    #[must_use]
    pub fn stranger_port(&self) -> u16 {
        self.stranger_port
    }

    /// All its descriptors.
    pub fn descriptors(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        let groups = self.groups.iter().map(|(_, socket)| socket);
        let ports = self.ports.iter().map(|port| &port.socket);
        let sockets = self.strangers.iter().chain(groups).chain(ports);
        sockets.map(AsFd::as_fd).chain([self.epoll.as_fd()])
    }

    /// Has the descriptor of [`Driver::fd`] readable whenever another one is.
    ///
    /// # Errors
    /// Those of `epoll_ctl(2)`.
    pub fn watch_beside(&self, fd: BorrowedFd<'_>) -> io::Result<()> {
        let data = epoll::EventData::new_u64(0);
        Ok(epoll::add(&self.epoll, fd, data, EventFlags::IN)?)
    }

    /// Closes all sockets, so that another device can have the address. Nothing is sent or received
    /// from then on.
    ///
    /// # Errors
    /// Those of `socket(2)` and `epoll_create1(2)`.
    pub fn close(&mut self) -> io::Result<()> {
        // Those that are bound nowhere stand for the device's.
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

    /// Packets that one group of a batch may have.
    #[must_use]
    pub fn max_segments(&self) -> usize {
        self.segments
    }

    /// Bytes that the socket queues for receiving, as the kernel accounts them (with overhead).
    #[must_use]
    pub fn receive_buffer(&self) -> usize {
        self.rcvbuf
    }

    /// Bytes that the socket queues for sending, as the kernel accounts them.
    #[must_use]
    pub fn send_buffer(&self) -> usize {
        self.sndbuf
    }

    /// Counters since the start.
    #[must_use]
    pub fn counters(&self) -> DriverCounters {
        self.counters
    }

    /// The descriptor to wait for, after [`Driver::arm`]: readable when there is something to do.
    #[must_use]
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.epoll.as_fd()
    }

    /// Makes the descriptor readable for packets that are there and for later ones, until the next
    /// receive. To be called before each sleep. False if that failed, and the caller must not sleep.
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

    /// Has the set watch a socket for `events`, or forget it where they are none; false if that
    /// failed, as where the user watches too many descriptors.
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
                // A caller that is awake does not mind what the set watches.
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
        // At each attempt to sleep there may be another.
        if failures.is_power_of_two() {
            let addr = self.local_addr().ip();
            warn!(%addr, %error, failures, "cannot watch the device's socket: its worker polls \
                it and does not sleep (is fs.epoll.max_user_watches too low?)");
        }
    }

    /// Has the hop limits of received packets reported from now on, which costs a control message
    /// for each train. Without that they are taken for [`HOP_LIMIT`].
    pub fn report_hop_limits(&mut self) {
        if !self.reports_hop_limits {
            for Port { socket, local, .. } in &self.ports {
                if let Err(error) = set_hop_limit(socket, local.is_ipv6(), HOP_LIMIT, true) {
                    debug!(%error, "hop limits are not reported");
                }
            }
            // One attempt: a kernel that refuses it will refuse it again.
            self.reports_hop_limits = true;
        }
    }

    /// Joins a multicast group on the interface of the device's address. Whoever has joined it gets
    /// its datagrams by [`Driver::receive_groups`]. It may be joined already.
    ///
    /// # Errors
    /// Those of `socket(2)`, `bind(2)` and of the options that join a group: `ENODEV` where no
    /// interface has the address, `ENOBUFS` beyond the system's limit.
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
        // The socket ends its membership, and its place in the set.
        self.groups.retain(|(joined, _)| *joined != group);
    }

    /// Takes in datagrams to multicast groups, a few of each: `handle` gets the sender, the group,
    /// the bytes and the fields of the IP header. Answers how many.
    pub fn receive_groups(
        &mut self,
        mut handle: impl FnMut(SocketAddr, IpAddr, &[u8], IpFields),
    ) -> usize {
        let mut taken = 0;
        for at in 0..self.groups.len() {
            let (group, fd) = (self.groups[at].0, self.groups[at].1.as_raw_fd());
            // No trains: each is one datagram. What is left waits for the next round.
            taken += self
                .receive_from(fd, 0, &mut |src, _, bytes, ip| {
                    handle(src, group, bytes, ip);
                })
                .unwrap_or(0);
        }
        taken
    }

    /// Returns whether the last call of [`Driver::receive`] may have left something.
    #[must_use]
    pub fn has_more(&self) -> bool {
        self.has_more
    }

    /// Whether a batch was left half sent.
    #[must_use]
    pub fn is_blocked(&self) -> bool {
        self.full.is_some()
    }

    /// Sends a batch, from where the last call on it stopped. Where the socket is full, the rest
    /// waits in the batch, as bytes of its own, until the descriptor is readable.
    pub fn send(&mut self, now: Instant, batch: &mut TxBatch) -> SendOutcome {
        self.full = None;
        batch.drain(now, |batch, groups| self.offer(now, batch, groups))
    }

    /// Time at which a batch that was left half sent goes on even if the descriptor shows nothing.
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
        // Only what goes by the same ordinary socket, up to the first that does not: the order is
        // kept.
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
                    // ENOBUFS is a full queue of the network device, which drains as a socket's
                    // buffer does.
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

    /// Sends a message to a stranger, or to a peer that may be gone, by the first socket for such
    /// that has room for it. It is never held back.
    fn offer_to_stranger(&mut self, batch: &TxBatch, group: &[Group]) -> Offered {
        // Messages of the CM and data of silent peers have sockets of their own each, or one kind
        // could fill those of the other.
        let sockets = match group[0].qpn {
            Qpn::GSI => SILENT_SOCKETS..self.strangers.len(),
            _ => 0..SILENT_SOCKETS,
        };
        for at in sockets {
            let fd = self.strangers[at].as_raw_fd();
            match self.send_some(fd, batch, group) {
                Ok(_) => return Offered::Taken(1),
                Err(e) => match e.raw_os_error() {
                    // This socket waits for neighbours; the next may have room.
                    Some(libc::EAGAIN | libc::ENOBUFS | libc::EINTR) => {}
                    errno => return self.drop_group(&group[0], errno),
                },
            }
        }
        // Dropped, not held back: a batch that waited for these would hold up all peers behind
        // it.
        self.counters.strangers_dropped += 1;
        Offered::Taken(1)
    }

    /// The kernel refused a group for a reason that waiting does not mend.
    fn drop_group(&mut self, group: &Group, errno: Option<i32>) -> Offered {
        match errno {
            Some(libc::EMSGSIZE) => {
                self.counters.too_long += 1;
                // Each power of two, so that a wrong path MTU is logged but does not fill the
                // log.
                if self.counters.too_long.is_power_of_two() {
                    warn!(dst = %group.way.dst, packet = group.segment, dropped = self.counters.too_long,
                        "the interface does not carry packets of this length: lower the path MTU");
                }
            }
            Some(libc::EIO | libc::EINVAL) if group.count > 1 => {
                // The route's device cannot segment. What was lost is sent again one by one.
                debug!(dst = %group.way.dst, errno, "a segmented send failed, sending packets one by one");
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

    /// Sends as many groups as one system call takes; returns how many the socket took.
    fn send_some(&mut self, fd: RawFd, batch: &TxBatch, groups: &[Group]) -> io::Result<usize> {
        let groups = &groups[..groups.len().min(TX_GROUPS)];
        self.iovecs.clear();
        // All vectors are laid down before any is pointed to, since the list may move as it grows.
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
        // All leave from one address.
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
        // SAFETY: every message points to an address, vectors and control data that live until the
        // call returns; the vectors point into the batch's bytes and into mappings that the batch
        // keeps alive. The kernel only reads.
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

    /// Takes in what waits, at most about `limit` datagrams or trains: for each, `handle` gets the
    /// sender, the length of a segment (the last may be shorter), the bytes, and the fields of their
    /// IP headers. Answers how many. A limit of 1 is one system call.
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
            // One call for each: what is left waits for the next round.
            let got = self.receive_from(fd, at as u8, &mut handle).unwrap_or(0);
            others_have_more |= got == slots;
            taken += got;
        }
        self.has_more = true;
        while taken < limit && self.has_more {
            let (fd, slots) = (self.ports[0].socket.as_raw_fd(), self.rx_slots);
            match self.receive_from(fd, 0, &mut handle) {
                Ok(n) => {
                    // Fewer than asked for: the socket is empty, and another call would only say
                    // so.
                    self.has_more = n == slots;
                    taken += n;
                }
                Err(e) => match e.raw_os_error() {
                    Some(libc::EINTR) => {}
                    Some(libc::EAGAIN) => self.has_more = false,
                    // An ICMP error of some earlier send, reported here; the next call goes on.
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

    /// Takes in one system call what waits at a socket of the address with this index.
    fn receive_from(
        &mut self,
        fd: RawFd,
        gid_index: u8,
        handle: &mut impl FnMut(SocketAddr, usize, &[u8], IpFields),
    ) -> io::Result<usize> {
        let base = self.rx.as_mut_ptr();
        let mut iovecs: [libc::iovec; RX_SLOTS] = std::array::from_fn(|i| libc::iovec {
            // SAFETY: within the buffer, which has room for every slot.
            iov_base: unsafe { base.add(i * RX_BUFFER) }.cast(),
            iov_len: RX_BUFFER,
        });
        let headers = &mut *self.rx_headers;
        let slots = self.rx_slots;
        headers.receive_into(&mut iovecs[..slots]);
        // SAFETY: every message points to an address, a vector, control space and a part of the
        // receive buffer that is its own, all of which live until the call returns.
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
            // What is left of it would fail its ICRC; the sender repeats it.
            if header.msg_flags & libc::MSG_TRUNC != 0 {
                self.counters.truncated += 1;
                continue;
            }
            // A router lowers the hop limit, so 255 shows that none has had the packet (RFC
            // 5082).
            if self.on_link && hop_limit(header) != Some(HOP_LIMIT.into()) {
                self.counters.off_link += 1;
                continue;
            }
            let segment = segment_size(header).unwrap_or(len);
            // An empty datagram is no packet, and a train of length 0 cannot be cut.
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

/// Fields of a received IP header.
fn ip_fields(header: &libc::msghdr, has_hop_limit: bool, gid_index: u8) -> IpFields {
    let hops = has_hop_limit.then(|| hop_limit(header)).flatten();
    IpFields {
        traffic_class: traffic_class(header),
        hop_limit: hops.and_then(|h| h.try_into().ok()).unwrap_or(HOP_LIMIT),
        gid_index,
    }
}

/// Makes the sockets of workers that are processes, `1 << worker_bits` of them, which share the port
/// of RoCEv2 at an address. Each takes little as long as no process has made a driver of it. They
/// have to stay open together, since the kernel counts those that are.
///
/// # Errors
/// Those of `socket(2)` and `bind(2)`; `EADDRINUSE` where the port is in use, even if it is shared.
pub fn bind_group(addr: IpAddr, worker_bits: u8, requests: Requests) -> io::Result<Vec<OwnedFd>> {
    let local = SocketAddr::new(addr, ROCE_PORT);
    // Sharing would let the sockets into any other group of this user's.
    drop(bind_alone(local)?);
    let bind = || {
        let socket = bind_in_group(local, worker_bits, requests)?;
        socket.set_recv_buffer_size(1)?;
        Ok(socket.into())
    };
    (0..1u32 << worker_bits).map(|_| bind()).collect()
}

/// A socket that has the port for itself.
fn bind_alone(local: SocketAddr) -> io::Result<Socket> {
    let socket = make_receiver(local)?;
    socket.bind(&local.into())?;
    Ok(socket)
}

/// A socket that shares the port with those of other workers.
fn bind_in_group(local: SocketAddr, worker_bits: u8, requests: Requests) -> io::Result<Socket> {
    let socket = make_receiver(local)?;
    // The port is shared from the bind on, and the selector attached after it, when the group
    // exists.
    socket.set_reuse_port(true)?;
    socket.bind(&local.into())?;
    attach_selector(&socket, worker_bits, requests)?;
    Ok(socket)
}

/// A socket that takes packets as RoCE senders make them, not bound yet.
fn make_receiver(local: SocketAddr) -> io::Result<Socket> {
    let socket = make_socket(local)?;
    // IPv6 demands a UDP checksum, which RoCE senders leave out.
    if local.is_ipv6() {
        allow_no_checksum(&socket)?;
    }
    Ok(socket)
}

/// A socket that sends packets as the ICRC wants them, not bound yet.
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

/// Makes datagrams to multicast groups leave by the interface of the device's address. Their hop
/// limit comes with each of them.
fn prepare_groups(socket: &Socket, addr: IpAddr) {
    let set = match addr {
        // The interface follows from the address that the socket is bound to.
        IpAddr::V4(_) => socket.set_multicast_ttl_v4(HOP_LIMIT.into()),
        IpAddr::V6(_) => socket
            .set_multicast_hops_v6(HOP_LIMIT.into())
            .and_then(|()| match interface_index(addr) {
                Some(index) => socket.set_multicast_if_v6(index),
                None => Ok(()),
            }),
    };
    if let Err(error) = set {
        debug!(%error, "multicast datagrams leave as the system wishes");
    }
}

/// A socket that receives the datagrams of a multicast group.
fn open_group(group: IpAddr, own: IpAddr) -> io::Result<Socket> {
    let is_v6 = group.is_ipv6();
    let socket = make_socket(SocketAddr::new(group, ROCE_PORT))?;
    set_hop_limit(&socket, group.is_ipv6(), HOP_LIMIT, true)?;
    set_ecn(&socket, is_v6)?;
    // Other devices of the host may join the group as well, and each has a copy.
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
            // A group of the link's scope is bound to on an interface only.
            let at = SocketAddrV6::new(group, ROCE_PORT, 0, index);
            socket.bind(&SocketAddr::from(at).into())?;
            socket.join_multicast_v6(&group, index)?;
        }
        _ => return Err(io::Error::from_raw_os_error(libc::EAFNOSUPPORT)),
    }
    Ok(socket)
}

/// The sockets for messages to strangers and to silent peers, and their port. Nothing is received
/// there.
fn open_strangers(config: &DriverConfig) -> io::Result<(Vec<Socket>, u16)> {
    // The first socket gets a port from the kernel and the others share it: the ICRC covers the
    // port, so it must not depend on which socket has room.
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
        // Nothing is read there, so as little as possible is kept.
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
    use crate::roce::batch::Way;

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

    /// The ECN codepoint of the next datagram.
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
        // SAFETY: what the header points to lives until the call returns.
        let got = unsafe { libc::recvmsg(socket.as_raw_fd(), &raw mut header, 0) };
        assert!(got > 0, "{}", io::Error::last_os_error());
        traffic_class(&header) & 0b11
    }

    fn packets(batch: &mut TxBatch, dst: SocketAddr, is_markable: bool) {
        for _ in 0..2 {
            let way = Way::to(dst).markable(is_markable);
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
    fn a_dead_neighbour_of_another_address_holds_up_no_peer_of_the_first() {
        // SAFETY: the network of this thread alone is unshared.
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
            push(Way {
                from: 1,
                ..Way::to(dst)
            });
        }
        push(Way::to(peer.local_addr().unwrap()));
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
        // As long as the socket takes nothing, the next ones wait no longer.
        assert!(driver.counters().strangers_dropped > 0);
        let dst = ([10, 9, 2, 77], ROCE_PORT).into();
        batch.begin(
            Way {
                from: 1,
                ..Way::to(dst)
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
    fn the_descriptor_shows_to_a_sleeper_what_came_in_and_that_a_batch_may_go_on() {
        let mut driver = open("127.96.0.3");
        assert!(driver.arm());
        assert!(!is_readable(&driver));
        let sender = UdpSocket::bind(("127.96.0.4", 0)).unwrap();
        set_hop_limit(&sender, false, HOP_LIMIT, false).unwrap();
        // More than one call takes.
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
    fn a_socket_that_cannot_be_watched_keeps_its_worker_awake() {
        let mut driver = open("127.96.0.5");
        assert!(driver.arm());
        // Not a set of descriptors.
        driver.epoll = std::fs::File::open("/dev/null").unwrap().into();
        driver.receive(1, |_, _, _, _| {});
        assert_eq!(driver.unwatched.get(), 0, "it is awake");
        driver.full = Some(0);
        assert!(!driver.arm(), "no descriptor will show what comes");
        assert_eq!(driver.unwatched.get(), 1);
    }

    #[test]
    fn data_may_be_marked_and_marks_are_seen() {
        marks_pass("127.96.0.1", "127.96.0.2", false);
        // There is one address only, and other tests may have it.
        let v6 = UdpSocket::bind(("::1", ROCE_PORT));
        if v6.is_ok() {
            drop(v6);
            marks_pass("::1", "::1", true);
        }
    }
}
