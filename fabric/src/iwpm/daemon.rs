//! Port mapper with its sockets.

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use socket2::{Domain, Protocol, Socket, Type};

use super::mapper::QueryResult;
use super::{ErrorCode, Host, Mapper, Mapping, Output};
use crate::netlink::{IWPM_GROUP, RdmaNetlink};

/// Receive buffer for a datagram from the kernel, which may contain several mappings
/// (`NLMSG_GOODSIZE`).
const NETLINK_DATAGRAM: usize = 32 << 10;

/// Receive buffer for a datagram from a peer. Longer datagrams are truncated; no valid message is
/// longer.
const WIRE_DATAGRAM: usize = 128;

/// Maximum number of consecutive datagrams from one socket, so that no socket starves another.
const TURN: usize = 64;

/// Error of starting a port mapper.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// The kernel does not support `NETLINK_RDMA`.
    #[error(
        "the kernel does not support RDMA netlink (NETLINK_RDMA: {0}): load ib_core, or use --no-kernel"
    )]
    NoRdma(io::Error),
    /// Permission to receive kernel requests was denied.
    #[error("receiving kernel requests requires CAP_NET_ADMIN: run as root, or use --no-kernel")]
    NotPermitted,
    /// The netlink socket cannot be opened for any other reason.
    #[error("cannot open an RDMA netlink socket: {0}")]
    Netlink(io::Error),
    /// Another port mapper is running.
    #[error("UDP port {} of {} is in use by another port mapper, iwpmd or riser-iwpmd", .0.port(), .0.ip())]
    InUse(SocketAddr),
    /// An address cannot be bound.
    #[error("cannot listen on {0}: {1}")]
    Listen(SocketAddr, io::Error),
}

/// TCP ports and random numbers of the local host.
#[derive(Debug)]
pub struct ThisHost(());

/// Bound TCP socket that never listens. It prevents other programs from using its port.
#[derive(Debug)]
pub struct ReservedPort(#[expect(dead_code, reason = "it is held open")] OwnedFd);

impl Host for ThisHost {
    type Reservation = ReservedPort;

    fn reserve(&mut self, ip: IpAddr, port: Option<u16>) -> io::Result<(u16, ReservedPort)> {
        let socket = Socket::new(domain(ip), Type::STREAM, Some(Protocol::TCP))?;
        if ip.is_ipv6() {
            socket.set_only_v6(true)?;
        }
        // Bind the wildcard address, since a peer may request a wildcard mapping at any address.
        socket.bind(&any(ip, port.unwrap_or(0)).into())?;
        let bound = socket.local_addr()?.as_socket();
        let bound = bound.ok_or(io::ErrorKind::Unsupported)?;
        Ok((bound.port(), ReservedPort(socket.into())))
    }

    fn random(&mut self) -> u64 {
        // No program on the host could run without a random source.
        getrandom::u64().expect("the kernel has random numbers")
    }
}

/// Port mapper with its sockets: a netlink socket, unless it runs without the kernel, and UDP
/// sockets. A response to a nonexistent address blocks its socket's queue for seconds until address
/// resolution fails, and delays the responses after it. Therefore requests of this host use
/// separate sockets.
#[derive(Debug)]
pub struct Daemon {
    mapper: Mapper<ThisHost>,
    netlink: Option<RdmaNetlink>,
    /// Sockets that receive requests from peers and send the responses.
    responders: Vec<UdpSocket>,
    /// Sockets that send requests of this host.
    requesters: Vec<UdpSocket>,
}

impl Daemon {
    /// Opens the sockets: the netlink socket if `with_kernel`, and UDP sockets at these addresses,
    /// at most one per IP version. The first [`Self::turn`] registers with the kernel.
    ///
    /// # Errors
    /// [`StartError`].
    pub fn open(with_kernel: bool, listen: &[SocketAddr]) -> Result<Self, StartError> {
        let open = |addr: SocketAddr| {
            listen_at(addr).map_err(|error| match error.kind() {
                io::ErrorKind::AddrInUse => StartError::InUse(addr),
                _ => StartError::Listen(addr, error),
            })
        };
        // Bind the UDP port first, because another port mapper may be using it: the kernel uses the
        // port mapper that registered last.
        let responders = listen.iter().map(|addr| open(*addr));
        let responders = responders.collect::<Result<_, _>>()?;
        let requesters = listen
            .iter()
            .map(|addr| open(SocketAddr::new(addr.ip(), 0)));
        let requesters = requesters.collect::<Result<_, _>>()?;
        let open = || RdmaNetlink::open(IWPM_GROUP);
        let netlink = with_kernel.then(open).transpose();
        let netlink = netlink.map_err(|error| match error.raw_os_error() {
            Some(libc::EPROTONOSUPPORT) => StartError::NoRdma(error),
            Some(libc::EPERM | libc::EACCES) => StartError::NotPermitted,
            _ => StartError::Netlink(error),
        })?;
        let port = netlink.as_ref().map(RdmaNetlink::port);
        Ok(Self {
            mapper: Mapper::new(ThisHost(()), port),
            netlink,
            responders,
            requesters,
        })
    }

    /// Adds a mapping on behalf of this program; see [`Mapper::add`].
    ///
    /// # Errors
    /// As [`Mapper::add`].
    pub fn add(&mut self, local: SocketAddr, port: Option<u16>) -> Result<SocketAddr, ErrorCode> {
        self.mapper.add(local, port)
    }

    /// Starts a query; see [`Mapper::query`]. [`Self::turn`] returns the response.
    ///
    /// # Errors
    /// As [`Mapper::query`].
    pub fn query(&mut self, local: SocketAddr, remote: SocketAddr) -> Result<(), ErrorCode> {
        self.mapper.query(Instant::now(), local, remote)
    }

    /// Returns the mappings in arbitrary order.
    pub fn mappings(&self) -> impl Iterator<Item = &Mapping<ReservedPort>> {
        self.mapper.mappings()
    }

    /// Sends pending output, waits until a socket or `wake` is readable or a timer expires, and
    /// processes received datagrams. Returns the response to a query of this program.
    ///
    /// # Errors
    /// Returns the errors of `poll(2)`.
    pub fn turn(&mut self, wake: Option<BorrowedFd<'_>>) -> io::Result<Option<QueryResult>> {
        while let Some(output) = self.mapper.poll_output() {
            if let Some(result) = self.send_output(output) {
                return Ok(Some(result));
            }
        }
        self.wait(wake)?;
        self.take_netlink();
        self.take_wire();
        self.mapper.handle_timeout(Instant::now());
        Ok(None)
    }

    fn send_output(&self, output: Output) -> Option<QueryResult> {
        match output {
            Output::QueryResult(result) => return Some(result),
            Output::Netlink(message) => {
                let sent = self.netlink.as_ref().map(|socket| socket.send(&message));
                if let Some(Err(error)) = sent {
                    tracing::warn!("cannot send a message to the kernel: {error}");
                }
            }
            Output::Wire {
                to,
                datagram,
                is_response,
            } => {
                let is_of = |socket: &&UdpSocket| {
                    let addr = socket.local_addr();
                    addr.is_ok_and(|addr| addr.is_ipv4() == to.is_ipv4())
                };
                // A lost datagram will be retransmitted.
                let sockets = match is_response {
                    true => &self.responders,
                    false => &self.requesters,
                };
                let socket = sockets.iter().find(is_of);
                let sent = socket.map(|socket| socket.send_to(&datagram, to));
                match sent {
                    Some(Ok(_)) => {}
                    Some(Err(error)) => tracing::debug!(%to, "cannot send a datagram: {error}"),
                    None => {
                        tracing::debug!(%to, "cannot send a datagram: no socket for its IP version");
                    }
                }
            }
        }
        None
    }

    fn wait(&self, wake: Option<BorrowedFd<'_>>) -> io::Result<()> {
        let netlink = self.netlink.iter().map(RdmaNetlink::fd);
        let wire = self
            .responders
            .iter()
            .chain(&self.requesters)
            .map(AsFd::as_fd);
        let fds = netlink.chain(wire).chain(wake);
        let mut fds: Vec<_> = fds.map(|fd| PollFd::new(fd, PollFlags::POLLIN)).collect();
        let timeout = self.mapper.deadline().map_or(PollTimeout::NONE, |due| {
            // Round up, so that the timer has expired after the wait.
            let wait = due.saturating_duration_since(Instant::now()) + Duration::from_millis(1);
            PollTimeout::try_from(wait).unwrap_or(PollTimeout::MAX)
        });
        match poll(&mut fds, timeout) {
            Ok(_) | Err(nix::errno::Errno::EINTR) => Ok(()),
            Err(errno) => Err(errno.into()),
        }
    }

    fn take_netlink(&mut self) {
        let Some(socket) = &self.netlink else {
            return;
        };
        let mut buffer = vec![0; NETLINK_DATAGRAM];
        for _ in 0..TURN {
            match socket.receive(&mut buffer) {
                Ok(Some(datagram)) => self.mapper.handle_netlink(Instant::now(), datagram),
                Ok(None) => break,
                // The kernel's client will time out and connect without a mapping.
                Err(error) => tracing::warn!("cannot receive from the kernel: {error}"),
            }
        }
    }

    fn take_wire(&mut self) {
        let mut buffer = [0; WIRE_DATAGRAM];
        for socket in self.responders.iter().chain(&self.requesters) {
            for _ in 0..TURN {
                match socket.recv_from(&mut buffer) {
                    Ok((len, from)) => {
                        self.mapper
                            .handle_wire(Instant::now(), from, &buffer[..len]);
                    }
                    Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                    // ICMP error for a previous datagram.
                    Err(error) => tracing::debug!("cannot receive from a peer: {error}"),
                }
            }
        }
    }
}

fn domain(ip: IpAddr) -> Domain {
    if ip.is_ipv4() {
        Domain::IPV4
    } else {
        Domain::IPV6
    }
}

/// Returns the wildcard address of the IP version of `ip`.
fn any(ip: IpAddr, port: u16) -> SocketAddr {
    match ip {
        IpAddr::V4(_) => (Ipv4Addr::UNSPECIFIED, port).into(),
        IpAddr::V6(_) => (Ipv6Addr::UNSPECIFIED, port).into(),
    }
}

fn listen_at(addr: SocketAddr) -> io::Result<UdpSocket> {
    let socket = Socket::new(domain(addr.ip()), Type::DGRAM, Some(Protocol::UDP))?;
    if addr.is_ipv6() {
        socket.set_only_v6(true)?;
    }
    socket.set_nonblocking(true)?;
    socket.bind(&addr.into())?;
    Ok(socket.into())
}
