//! Setting up shared memory between two processes: Unix socket messages and access control.
//!
//! ```text
//!   connecting side                         listening side
//!        ── HELLO: version, own address ──▶     (user id checked on accept)
//!        ◀─ WELCOME: version, lengths ───       with the descriptor of the memory
//!        ◀─────── one byte: wake up ─────▶      while the link is up
//! ```
//!
//! We use `SOCK_SEQPACKET` to preserve message boundaries. A listener uses an abstract name. Like
//! the IP address included in the name, it only exists within a network namespace, and it is
//! removed when the listener is closed. Any local user can bind to this name, so both sides must
//! query the user id of their peer from the kernel (`SO_PEERCRED`). On the connecting side, this is
//! the user id of the process which called listen.
//!
//! The listening side creates the memory, so it does not need to trust a file created by the peer,
//! and never accepts descriptors from it. The connecting side accepts a single descriptor after
//! checking the user id; until then, the kernel rejects descriptors ([`descriptors`]). If this is
//! not supported by the kernel, we never read messages from an untrusted user, and use [`closer`]
//! to close their sockets.

use std::fmt;
use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::net::{IpAddr, Ipv6Addr};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use nix::sys::socket::{getsockopt, sockopt};
use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, Shutdown, SocketAddrUnix, SocketFlags,
};
use zerocopy::byteorder::native_endian::{U16, U32};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use super::closer;
use super::descriptors::{self, refuses_descriptors};
use super::ring::{DATA, RING};
use crate::netif::LocalAddresses;

/// Version of the messages and of the memory layout. Any other version is rejected.
const VERSION: u16 = 1;

const HELLO: [u8; 8] = *b"RISRSHM>";
const WELCOME: [u8; 8] = *b"RISRSHM<";

/// Max number of connections waiting to be accepted.
const BACKLOG: i32 = 64;

/// The kernel reports this user id for users without a mapping in this namespace
/// (`/proc/sys/kernel/overflowuid`), so it must not be trusted.
const OVERFLOW_UID: u32 = 65_534;

/// Response timeout, which should only be exceeded if the thread of the device hangs.
const PATIENCE: Timespec = Timespec {
    tv_sec: 0,
    tv_nsec: 500_000_000,
};

/// First message on a connection.
#[derive(Debug, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct Hello {
    magic: [u8; 8],
    version: U16,
    reserved: [u8; 6],
    /// IP address of the sender's device. An IPv4 address is stored as an IPv4-mapped address.
    address: [u8; 16],
}

/// Response to [`Hello`].
#[derive(Debug, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct Welcome {
    magic: [u8; 8],
    version: U16,
    reserved: [u8; 2],
    /// Size of a ring in bytes.
    ring: U32,
}

/// Users allowed to share memory with a device.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ShmUsers {
    /// Additional user ids. Our own user id and root are always allowed.
    pub also: Vec<u32>,
}

impl ShmUsers {
    /// Returns whether processes of this user are allowed.
    fn lets_in(&self, uid: u32) -> bool {
        let own = rustix::process::geteuid().as_raw();
        let is_named = self.also.contains(&uid);
        is_named || uid != OVERFLOW_UID && (uid == own || uid == 0)
    }

    /// Checks the user id of a socket's peer.
    fn check(&self, socket: &impl AsFd) -> io::Result<()> {
        let peer = getsockopt(socket, sockopt::PeerCredentials)?;
        let uid = peer.uid();
        if self.lets_in(uid) {
            return Ok(());
        }
        let pid = peer.pid();
        let text = format!("process {pid} of user {uid} is not allowed to share memory");
        Err(io::Error::new(io::ErrorKind::PermissionDenied, text))
    }
}

fn invalid(what: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, what)
}

/// Returns the listener name for the device at an address.
fn name(addr: IpAddr) -> String {
    format!("riser-shm/{}", addr.to_canonical())
}

fn socket_address(addr: IpAddr) -> io::Result<SocketAddrUnix> {
    Ok(SocketAddrUnix::new_abstract_name(name(addr).as_bytes())?)
}

/// A listening socket.
#[derive(Debug)]
pub(super) struct Listener(OwnedFd);

impl AsFd for Listener {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        // We must not close connections of untrusted users on this thread. After shutdown, we can
        // still accept all pending connections, so there won't be any left.
        let _ = rustix::net::shutdown(&self.0, Shutdown::Both);
        while let Ok(socket) = rustix::net::accept_with(&self.0, SocketFlags::CLOEXEC) {
            closer::close(socket);
        }
    }
}

/// Creates the listener for the device at an address.
///
/// # Errors
/// [`io::ErrorKind::AddrInUse`] if the name is in use; the error message contains the other
/// process. This will also return the errors of [`closer::check_room`].
pub(super) fn listen(addr: IpAddr) -> io::Result<Listener> {
    closer::check_room()?;
    let (socket, name) = (descriptors::socket()?, socket_address(addr)?);
    rustix::net::bind(&socket, &name).map_err(|error| match error {
        rustix::io::Errno::ADDRINUSE => {
            let holder = holder(addr).unwrap_or_default();
            let text = format!("socket name for shared memory at {addr} is in use by {holder}");
            io::Error::new(io::ErrorKind::AddrInUse, text)
        }
        error => error.into(),
    })?;
    rustix::net::listen(&socket, BACKLOG)?;
    Ok(Listener(socket))
}

/// Process that is listening on an address. Any local user can use this name, so it may not be one
/// of our processes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ListeningProcess {
    /// Process name and id, if known.
    process: Option<String>,
    /// User id, if known. This is never known if the kernel can't reject descriptors
    /// ([`refuses_descriptors`]).
    pub uid: Option<u32>,
}

impl fmt::Display for ListeningProcess {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.process.as_deref().unwrap_or("another process"))
    }
}

/// Returns the process that is listening on an address.
pub(super) fn holder(addr: IpAddr) -> Option<ListeningProcess> {
    if !refuses_descriptors() {
        // If we connected, the process could send descriptors until we close the socket. Names can
        // contain arbitrary bytes.
        let table = std::fs::read("/proc/net/unix").ok()?;
        let table = String::from_utf8_lossy(&table);
        return is_listened_at(&table, addr).then(ListeningProcess::default);
    }
    let socket = reach(addr).ok()?;
    let peer = getsockopt(&socket, sockopt::PeerCredentials).ok()?;
    let (pid, uid) = (peer.pid(), peer.uid());
    let process = format!("process {pid} of user {uid}");
    let process = match std::fs::read_to_string(format!("/proc/{pid}/comm")) {
        // A process can set its name to anything.
        Ok(comm) => format!("{} ({process})", comm.trim_end().escape_debug()),
        // The `riserd` unit can't see the processes of other users.
        Err(_) => process,
    };
    Some(ListeningProcess {
        process: Some(process),
        uid: Some(uid),
    })
}

/// Searches the kernel's table of Unix sockets for a listener using the name of this address.
fn is_listened_at(table: &str, addr: IpAddr) -> bool {
    let name = format!("@{}", name(addr));
    table.lines().any(|line| {
        let fields: Vec<_> = line.split_ascii_whitespace().collect();
        // Check the listener flag in the fourth column (`__SO_ACCEPTCON`), since connections use
        // the same name.
        matches!(fields.as_slice(), [_, _, _, "00010000", _, _, _, at] if *at == name)
    })
}

/// Connects to the process using the name of this address, which could be any local user.
///
/// # Errors
/// Returns the errors of [`closer::check_room`] and `connect(2)`.
fn reach(addr: IpAddr) -> io::Result<OwnedFd> {
    closer::check_room()?;
    let (socket, name) = (descriptors::socket()?, socket_address(addr)?);
    rustix::net::connect(&socket, &name)?;
    Ok(socket)
}

/// Verifies that all addresses are local. If an address is used by a different host, a local
/// process using its name must not be mistaken for this host by access rules.
///
/// # Errors
/// [`io::ErrorKind::AddrNotAvailable`], and the errors of `getifaddrs(3)`.
pub(super) fn check_local(addresses: &[IpAddr]) -> io::Result<()> {
    let all = LocalAddresses::query()?;
    match addresses.iter().find(|addr| !all.has(**addr)) {
        None => Ok(()),
        Some(addr) => Err(io::Error::new(
            io::ErrorKind::AddrNotAvailable,
            format!("{addr} is not an address of this host"),
        )),
    }
}

/// Connects to the device at `to`, and sends a HELLO from the device at `own`.
///
/// # Errors
/// - [`io::ErrorKind::ConnectionRefused`] if no process is listening
/// - [`io::ErrorKind::WouldBlock`] if there are too many pending connections
/// - [`io::ErrorKind::PermissionDenied`] if the user of the listener is not allowed
/// - [`io::ErrorKind::UnexpectedEof`] if the listener has already rejected the connection
/// - the errors of [`check_local`] and [`closer::check_room`]
pub(super) fn connect(to: IpAddr, own: IpAddr, users: &ShmUsers) -> io::Result<OwnedFd> {
    check_local(&[to, own])?;
    let socket = reach(to).map_err(|error| match error.kind() {
        io::ErrorKind::ConnectionRefused => {
            let text = format!("no process on this host shares memory at {to}");
            io::Error::new(io::ErrorKind::ConnectionRefused, text)
        }
        io::ErrorKind::WouldBlock => {
            let text = format!("too many processes are waiting to share memory at {to}");
            io::Error::new(io::ErrorKind::WouldBlock, text)
        }
        _ => error,
    })?;
    if let Err(error) = users.check(&socket) {
        closer::close(socket);
        return Err(error);
    }
    // We will receive the memory with the response.
    descriptors::allow_descriptors(&socket, true)?;
    let hello = Hello {
        magic: HELLO,
        version: U16::new(VERSION),
        reserved: [0; 6],
        address: mapped(own),
    };
    rustix::net::send(&socket, hello.as_bytes(), SendFlags::NOSIGNAL).map_err(or_refused)?;
    Ok(socket)
}

/// Converts a socket error. If the peer has closed the socket, it has rejected the connection.
fn or_refused(error: rustix::io::Errno) -> io::Error {
    match error {
        // The socket was closed before we could send, or with an unread HELLO.
        rustix::io::Errno::PIPE | rustix::io::Errno::CONNRESET => refused(),
        error => error.into(),
    }
}

fn refused() -> io::Error {
    let text = "connection refused by the process that shares memory: it only accepts root and its \
                own user; see its log";
    io::Error::new(io::ErrorKind::UnexpectedEof, text)
}

/// Accepts a connection. Returns `None` if there are no pending connections.
///
/// # Errors
/// [`io::ErrorKind::PermissionDenied`] if the user is not allowed, and the errors of `accept(2)`
/// and [`closer::check_room`].
pub(super) fn accept(listener: &Listener, users: &ShmUsers) -> io::Result<Option<OwnedFd>> {
    // The next connection could be from any user.
    closer::check_room()?;
    let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
    match rustix::net::accept_with(listener, flags) {
        Ok(socket) => match users.check(&socket) {
            Ok(()) => Ok(Some(socket)),
            Err(error) => {
                closer::close(socket);
                Err(error)
            }
        },
        Err(rustix::io::Errno::WOULDBLOCK) => Ok(None),
        Err(error) => Err(error.into()),
    }
}

/// Returns the address from a HELLO to the device at `own`. Both must be local addresses of the
/// same family.
///
/// # Errors
/// [`io::ErrorKind::InvalidData`] for any other message, and the errors of [`check_local`].
pub(super) fn parse_hello(message: &[u8], own: IpAddr) -> io::Result<IpAddr> {
    let hello = Hello::ref_from_bytes(message).map_err(|_| invalid("invalid HELLO"))?;
    if hello.magic != HELLO {
        return Err(invalid("invalid HELLO"));
    }
    if hello.version.get() != VERSION {
        return Err(invalid("unsupported version in HELLO"));
    }
    let addr = Ipv6Addr::from(hello.address).to_canonical();
    if addr.is_ipv4() != own.is_ipv4() {
        return Err(invalid("address family mismatch in HELLO"));
    }
    // Access rules need to be able to trust this address in the same way as on a network: a local
    // process can use any address of its host, but no other address.
    check_local(&[addr, own])?;
    Ok(addr)
}

/// Sends the memory in response to a HELLO.
///
/// # Errors
/// Returns an error if the socket was closed by the peer.
pub(super) fn welcome(socket: &OwnedFd, memory: BorrowedFd<'_>) -> io::Result<()> {
    let welcome = Welcome {
        magic: WELCOME,
        version: U16::new(VERSION),
        reserved: [0; 2],
        ring: U32::new(RING as u32),
    };
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    let rights = [memory];
    let fits = control.push(SendAncillaryMessage::ScmRights(&rights));
    debug_assert!(fits, "room for one descriptor");
    let bytes = [IoSlice::new(welcome.as_bytes())];
    rustix::net::sendmsg(socket, &bytes, &mut control, SendFlags::NOSIGNAL)?;
    Ok(())
}

/// Result of reading from a socket.
#[derive(Debug)]
pub(super) enum Message {
    /// Received a message of this size in bytes.
    Bytes(usize),
    /// No message is currently available.
    None,
    /// The peer has closed the socket or exited.
    End,
}

/// Receives a message. Any descriptors are discarded.
pub(super) fn receive(socket: &OwnedFd, room: &mut [u8]) -> Message {
    match rustix::net::recv(socket, room, RecvFlags::DONTWAIT) {
        // There are no empty messages, so either the socket is closed or the peer violates the
        // protocol.
        Ok((0, _)) => Message::End,
        Ok((len, _)) => Message::Bytes(len),
        Err(rustix::io::Errno::WOULDBLOCK | rustix::io::Errno::INTR) => Message::None,
        Err(_) => Message::End,
    }
}

/// Receives a WELCOME. This will return `None` if it is not available yet.
///
/// # Errors
/// [`io::ErrorKind::InvalidData`] for any other message, [`io::ErrorKind::UnexpectedEof`] if the
/// peer has rejected the connection.
pub(super) fn receive_welcome(socket: &OwnedFd) -> io::Result<Option<OwnedFd>> {
    let mut message = [0; size_of::<Welcome>() + 1];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let mut room = [IoSliceMut::new(&mut message)];
    let flags = RecvFlags::DONTWAIT | RecvFlags::CMSG_CLOEXEC;
    let received = match rustix::net::recvmsg(socket, &mut room, &mut control, flags) {
        Err(rustix::io::Errno::WOULDBLOCK | rustix::io::Errno::INTR) => return Ok(None),
        received => received.map_err(or_refused)?,
    };
    let mut memory = None;
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(mut rights) = message {
            memory = rights.next();
        }
    }
    if received.bytes == 0 {
        return Err(refused());
    }
    let welcome = Welcome::ref_from_bytes(&message[..received.bytes])
        .map_err(|_| invalid("invalid WELCOME"))?;
    let is_ours = welcome.magic == WELCOME
        && welcome.version.get() == VERSION
        && welcome.ring.get() as usize * 2 == DATA;
    if !is_ours {
        return Err(invalid("unsupported version in WELCOME"));
    }
    let memory = memory.ok_or_else(|| invalid("missing memory in WELCOME"))?;
    Ok(Some(memory))
}

/// Sends a HELLO to and from the device at this address, and waits up to [`PATIENCE`] for the
/// response.
///
/// # Errors
/// [`io::ErrorKind::TimedOut`], and the errors of [`connect`] and [`receive_welcome`].
pub(super) fn test_handshake(addr: IpAddr, users: &ShmUsers) -> io::Result<()> {
    let socket = connect(addr, addr, users)?;
    let mut readable = [PollFd::new(&socket, PollFlags::IN)];
    rustix::event::poll(&mut readable, Some(&PATIENCE))?;
    match receive_welcome(&socket)? {
        Some(_) => Ok(()),
        None => {
            let text = format!("timed out waiting for the process that shares memory at {addr}");
            Err(io::Error::new(io::ErrorKind::TimedOut, text))
        }
    }
}

/// Wakes up the peer. If the socket is full, it already contains wake-up messages.
pub(super) fn ring_bell(socket: &OwnedFd) {
    // If the peer is dead, we will find out when the socket is closed.
    let _ = rustix::net::send(socket, b"!", SendFlags::NOSIGNAL | SendFlags::DONTWAIT);
}

fn mapped(addr: IpAddr) -> [u8; 16] {
    match addr {
        IpAddr::V4(v4) => v4.to_ipv6_mapped().octets(),
        IpAddr::V6(v6) => v6.octets(),
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use riser_testkit::eventually;

    use super::*;

    /// Timeout for operations on a different thread.
    const PATIENT: Duration = Duration::from_secs(20);

    fn hello(change: impl FnOnce(&mut Hello)) -> Vec<u8> {
        let mut hello = Hello {
            magic: HELLO,
            version: U16::new(VERSION),
            reserved: [0; 6],
            address: mapped([127, 0, 0, 9].into()),
        };
        change(&mut hello);
        hello.as_bytes().to_vec()
    }

    #[test]
    fn hello_requires_local_address() {
        let good = hello(|_| {});
        let own = IpAddr::from([127, 0, 0, 1]);
        assert_eq!(
            parse_hello(&good, own).unwrap(),
            IpAddr::from([127, 0, 0, 9])
        );
        let wrong = [
            (good[..31].to_vec(), "invalid HELLO"),
            ([&good[..], &[0]].concat(), "invalid HELLO"),
            (hello(|h| h.magic = WELCOME), "invalid HELLO"),
            (hello(|h| h.version = U16::new(2)), "version"),
            (
                hello(|h| h.address = mapped([192, 0, 2, 1].into())),
                "not an address",
            ),
            // It is possible to bind a socket to these addresses.
            (
                hello(|h| h.address = mapped([239, 1, 2, 3].into())),
                "not an address",
            ),
            (
                hello(|h| h.address = mapped([0, 0, 0, 0].into())),
                "not an address",
            ),
            (hello(|h| h.address = [0; 16]), "family mismatch"),
            (
                hello(|h| h.address = mapped("::1".parse().unwrap())),
                "family mismatch",
            ),
        ];
        for (message, why) in wrong {
            let error = parse_hello(&message, own).unwrap_err();
            assert!(error.to_string().contains(why), "{error}: {why}");
        }
        let gone = parse_hello(&good, [192, 0, 2, 1].into()).unwrap_err();
        assert_eq!(gone.kind(), io::ErrorKind::AddrNotAvailable);
    }

    #[test]
    fn overflow_uid_is_not_trusted() {
        let none = ShmUsers::default();
        assert!(none.lets_in(0));
        assert!(none.lets_in(rustix::process::geteuid().as_raw()));
        assert!(!none.lets_in(OVERFLOW_UID));
        assert!(!none.lets_in(54_321));
        let some = ShmUsers {
            also: vec![54_321, OVERFLOW_UID],
        };
        assert!(some.lets_in(54_321) && some.lets_in(OVERFLOW_UID));
    }

    #[test]
    fn second_listener_gets_address_in_use() {
        let addr = IpAddr::from([127, 1, 2, 3]);
        let own = IpAddr::from([127, 0, 0, 1]);
        let users = ShmUsers::default();
        let refused = connect(addr, own, &users).unwrap_err();
        assert_eq!(refused.kind(), io::ErrorKind::ConnectionRefused);
        let listener = listen(addr).unwrap();
        let taken = listen(addr).unwrap_err();
        assert_eq!(taken.kind(), io::ErrorKind::AddrInUse);
        let text = taken.to_string();
        assert!(text.contains("127.1.2.3"), "{text}");
        if refuses_descriptors() {
            let holder = format!("process {} of user", std::process::id());
            assert!(text.contains(&holder), "{text}");
            // This connection was made to find out the process name.
            let requested = accept(&listener, &users).unwrap().unwrap();
            assert!(matches!(receive(&requested, &mut [0; 64]), Message::End));
        }
        assert!(accept(&listener, &users).unwrap().is_none());
        let client = connect(addr, own, &users).unwrap();
        let server = accept(&listener, &users).unwrap().unwrap();
        let mut room = [0; 64];
        let Message::Bytes(len) = receive(&server, &mut room) else {
            panic!("a HELLO has been sent");
        };
        assert_eq!(parse_hello(&room[..len], addr).unwrap(), own);
        assert!(receive_welcome(&client).unwrap().is_none());
        let (_memory, file) =
            riser_memory::shared::SharedMemory::create("riser-test", DATA).unwrap();
        welcome(&server, file.as_fd()).unwrap();
        let memory = receive_welcome(&client).unwrap().unwrap();
        riser_memory::shared::SharedMemory::map(&memory, DATA).unwrap();
        drop(client);
        assert!(matches!(receive(&server, &mut room), Message::End));
    }

    /// Sends a descriptor.
    fn send_one(socket: &OwnedFd) -> rustix::io::Result<usize> {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        let rights = [socket.as_fd()];
        assert!(control.push(SendAncillaryMessage::ScmRights(&rights)));
        let bytes = [IoSlice::new(b"x")];
        rustix::net::sendmsg(socket, &bytes, &mut control, SendFlags::NOSIGNAL)
    }

    /// Creates a listener of an untrusted program, which can send and receive arbitrary messages.
    fn squat(addr: IpAddr) -> OwnedFd {
        let socket = descriptors::socket().unwrap();
        descriptors::allow_descriptors(&socket, true).unwrap();
        rustix::net::bind(&socket, &socket_address(addr).unwrap()).unwrap();
        rustix::net::listen(&socket, BACKLOG).unwrap();
        socket
    }

    #[test]
    fn squatter_cannot_send_descriptors() {
        let addr = IpAddr::from([127, 1, 2, 8]);
        let squatter = squat(addr);
        if !refuses_descriptors() {
            // We must not connect to the process.
            assert_eq!(holder(addr), Some(ListeningProcess::default()));
            let waiting = rustix::net::accept(&squatter);
            assert_eq!(waiting.unwrap_err(), rustix::io::Errno::WOULDBLOCK);
            riser_testkit::skip::skip("sending descriptors", "the kernel is older than Linux 6.16");
            return;
        }
        let client = reach(addr).unwrap();
        let server = rustix::net::accept(&squatter).unwrap();
        assert_eq!(send_one(&server), Err(rustix::io::Errno::PERM));
        assert!(matches!(receive(&client, &mut [0; 64]), Message::None));
        // This client is allowed to connect, and can send a response with memory.
        let client = connect(addr, addr, &ShmUsers::default()).unwrap();
        let server = rustix::net::accept(&squatter).unwrap();
        assert_eq!(send_one(&server), Ok(1));
        assert!(matches!(receive(&client, &mut [0; 64]), Message::Bytes(1)));
    }

    #[test]
    fn listener_is_found_in_kernel_table() {
        let addr = IpAddr::from([127, 1, 2, 9]);
        let look = || {
            let table = std::fs::read("/proc/net/unix").unwrap();
            is_listened_at(&String::from_utf8_lossy(&table), addr)
        };
        assert!(!look());
        let listener = listen(addr).unwrap();
        let _client = connect(addr, addr, &ShmUsers::default()).unwrap();
        let _server = accept(&listener, &ShmUsers::default()).unwrap().unwrap();
        assert!(look());
        drop(listener);
        assert!(!look(), "its connection does not listen");
        let six = "0000000000000000: 00000002 00000000 00010000 0005 01 4711 @riser-shm/::1\n";
        assert!(is_listened_at(six, "::1".parse().unwrap()));
        assert!(!is_listened_at(six, addr));
    }

    #[test]
    fn listener_on_remote_address_is_rejected() {
        let users = ShmUsers::default();
        for addr in [[192, 0, 2, 99], [239, 1, 2, 4]].map(IpAddr::from) {
            let listener = listen(addr).unwrap();
            let refused = connect(addr, [127, 0, 0, 1].into(), &users).unwrap_err();
            assert_eq!(refused.kind(), io::ErrorKind::AddrNotAvailable);
            assert!(accept(&listener, &users).unwrap().is_none(), "{addr}");
        }
    }

    #[test]
    fn unread_close_is_reported_as_refused() {
        let addr = IpAddr::from([127, 1, 2, 6]);
        let users = ShmUsers::default();
        let listener = listen(addr).unwrap();
        let client = connect(addr, addr, &users).unwrap();
        // This is also done by `accept` if the user is not allowed.
        drop(rustix::net::accept(&listener).unwrap());
        let error = receive_welcome(&client).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::UnexpectedEof, "{error}");
        // If the connection is rejected earlier, sending the HELLO fails.
        let error = rustix::net::send(&client, b"x", SendFlags::NOSIGNAL).map_err(or_refused);
        assert_eq!(error.unwrap_err().kind(), io::ErrorKind::UnexpectedEof);
    }

    #[test]
    fn closing_listener_releases_name() {
        let addr = IpAddr::from([127, 1, 2, 7]);
        let listener = listen(addr).unwrap();
        let waiting = connect(addr, addr, &ShmUsers::default()).unwrap();
        drop(listener);
        let again = listen(addr).unwrap();
        assert!(accept(&again, &ShmUsers::default()).unwrap().is_none());
        // The socket is closed on a separate thread.
        eventually("it has ended", PATIENT, || {
            receive_welcome(&waiting).is_err()
        });
    }

    #[test]
    fn invalid_welcome_is_rejected() {
        let addr = IpAddr::from([127, 1, 2, 4]);
        let users = ShmUsers::default();
        let listener = listen(addr).unwrap();
        let welcome = Welcome {
            magic: WELCOME,
            version: U16::new(VERSION),
            reserved: [0; 2],
            ring: U32::new(RING as u32),
        };
        let longer = Welcome {
            magic: WELCOME,
            version: U16::new(VERSION),
            reserved: [0; 2],
            ring: U32::new(RING as u32 * 2),
        };
        for (message, why) in [
            (b"!".to_vec(), "invalid WELCOME"),
            (vec![0; 16], "unsupported version"),
            (vec![0; 17], "invalid WELCOME"),
            (longer.as_bytes().to_vec(), "unsupported version"),
            (welcome.as_bytes().to_vec(), "missing memory"),
        ] {
            let client = connect(addr, addr, &users).unwrap();
            let server = accept(&listener, &users).unwrap().unwrap();
            rustix::net::send(&server, &message, SendFlags::NOSIGNAL).unwrap();
            let error = receive_welcome(&client).unwrap_err();
            assert!(error.to_string().contains(why), "{error}: {why}");
        }
    }
}
