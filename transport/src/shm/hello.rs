//! Setting up shared memory between two processes: messages on a Unix socket, and access control.
//!
//! ```text
//!   connecting side                         listening side
//!        ── HELLO: version, own address ──▶     (user id checked on accept)
//!        ◀─ WELCOME: version, lengths ───       with the descriptor of the memory
//!        ◀─────── one byte: wake up ─────▶      as long as the link lasts
//! ```
//!
//! Messages keep their boundaries (`SOCK_SEQPACKET`). The name of a listener is abstract, so it
//! exists within one network namespace, as the IP address that it is made of does, and goes with
//! its owner. Any local user can bind such a name. So each side asks the kernel for the other's user
//! id (`SO_PEERCRED`), which on the connecting side is that of the process which began to listen.
//!
//! The listening side makes the memory: it need not trust a file of the other's, and takes no
//! descriptors from it. The connecting side takes one, from a user whom it has checked; before that
//! none can be sent ([`descriptors`]). Where the kernel cannot refuse them, no message of a user who is
//! not let in is read, and sockets that lead to one are closed by [`closer`].

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

/// Version of the messages and of what is in the memory. Another one is refused.
const VERSION: u16 = 1;

const HELLO: [u8; 8] = *b"RISRSHM>";
const WELCOME: [u8; 8] = *b"RISRSHM<";

/// Connections that wait in the kernel to be accepted.
const BACKLOG: i32 = 64;

/// User id by which the kernel shows users that have none here (`/proc/sys/kernel/overflowuid`).
/// It proves nothing.
const OVERFLOW_UID: u32 = 65_534;

/// Time in which a device that is there answers, unless its thread hangs.
const PATIENCE: Timespec = Timespec {
    tv_sec: 0,
    tv_nsec: 500_000_000,
};

/// The first message of a connection.
#[derive(Debug, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct Hello {
    magic: [u8; 8],
    version: U16,
    reserved: [u8; 6],
    /// IP address of the sender's device; IPv4 as an IPv4-mapped one.
    address: [u8; 16],
}

/// Its answer.
#[derive(Debug, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct Welcome {
    magic: [u8; 8],
    version: U16,
    reserved: [u8; 2],
    /// Bytes of a ring.
    ring: U32,
}

/// Users whose processes a device shares memory with.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ShmUsers {
    /// User ids beside our own and root's.
    pub also: Vec<u32>,
}

impl ShmUsers {
    /// Whether a process of a user is let in.
    fn lets_in(&self, uid: u32) -> bool {
        let own = rustix::process::geteuid().as_raw();
        let is_named = self.also.contains(&uid);
        is_named || uid != OVERFLOW_UID && (uid == own || uid == 0)
    }

    /// Checks the user at the other end of a socket.
    fn check(&self, socket: &impl AsFd) -> io::Result<()> {
        let peer = getsockopt(socket, sockopt::PeerCredentials)?;
        let uid = peer.uid();
        if self.lets_in(uid) {
            return Ok(());
        }
        let pid = peer.pid();
        let text = format!("process {pid} is of user {uid}, with whom no memory is shared");
        Err(io::Error::new(io::ErrorKind::PermissionDenied, text))
    }
}

fn invalid(what: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, what)
}

/// The name of the listener of the device at an address.
fn name(addr: IpAddr) -> String {
    format!("riser-shm/{}", addr.to_canonical())
}

fn socket_address(addr: IpAddr) -> io::Result<SocketAddrUnix> {
    Ok(SocketAddrUnix::new_abstract_name(name(addr).as_bytes())?)
}

/// A name that is listened at.
#[derive(Debug)]
pub(super) struct Listener(OwnedFd);

impl AsFd for Listener {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        // Closing it would close here what strangers have connected. Those that wait are accepted
        // even after the end of all others, so none is left.
        let _ = rustix::net::shutdown(&self.0, Shutdown::Both);
        while let Ok(socket) = rustix::net::accept_with(&self.0, SocketFlags::CLOEXEC) {
            closer::close(socket);
        }
    }
}

/// Listens for the device at an address.
///
/// # Errors
/// [`io::ErrorKind::AddrInUse`] where another process does, which the text names, and those of
/// [`closer::check_room`].
pub(super) fn listen(addr: IpAddr) -> io::Result<Listener> {
    closer::check_room()?;
    let (socket, name) = (descriptors::socket()?, socket_address(addr)?);
    rustix::net::bind(&socket, &name).map_err(|error| match error {
        rustix::io::Errno::ADDRINUSE => {
            let holder = holder(addr).unwrap_or_default();
            let text = format!("{holder} holds the name of the socket for shared memory at {addr}");
            io::Error::new(io::ErrorKind::AddrInUse, text)
        }
        error => error.into(),
    })?;
    rustix::net::listen(&socket, BACKLOG)?;
    Ok(Listener(socket))
}

/// A process that listens at an address. Any local user can take a name, so it need not be one of ours.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ListeningProcess {
    /// Its name and number, if it is known.
    process: Option<String>,
    /// Its user id, if it is known: not where the kernel cannot refuse descriptors
    /// ([`refuses_descriptors`]).
    pub uid: Option<u32>,
}

impl fmt::Display for ListeningProcess {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.process.as_deref().unwrap_or("another process"))
    }
}

/// The process that listens at an address.
pub(super) fn holder(addr: IpAddr) -> Option<ListeningProcess> {
    if !refuses_descriptors() {
        // Who is connected can send one until the socket is closed. Names are of any bytes.
        let table = std::fs::read("/proc/net/unix").ok()?;
        let table = String::from_utf8_lossy(&table);
        return is_listened_at(&table, addr).then(ListeningProcess::default);
    }
    let socket = reach(addr).ok()?;
    let peer = getsockopt(&socket, sockopt::PeerCredentials).ok()?;
    let (pid, uid) = (peer.pid(), peer.uid());
    let process = format!("process {pid} of user {uid}");
    let process = match std::fs::read_to_string(format!("/proc/{pid}/comm")) {
        // A process chooses its name itself.
        Ok(comm) => format!("{} ({process})", comm.trim_end().escape_debug()),
        // The unit of `riserd` hides processes of other users.
        Err(_) => process,
    };
    Some(ListeningProcess {
        process: Some(process),
        uid: Some(uid),
    })
}

/// Whether the kernel's table of Unix sockets has one that listens at the name of an address.
fn is_listened_at(table: &str, addr: IpAddr) -> bool {
    let name = format!("@{}", name(addr));
    table.lines().any(|line| {
        let fields: Vec<_> = line.split_ascii_whitespace().collect();
        // The fourth is the flag of listeners (`__SO_ACCEPTCON`): their connections have the name, too.
        matches!(fields.as_slice(), [_, _, _, "00010000", _, _, _, at] if *at == name)
    })
}

/// Connects to the process that has the name of an address, which any local user can take.
///
/// # Errors
/// Those of [`closer::check_room`] and `connect(2)`.
fn reach(addr: IpAddr) -> io::Result<OwnedFd> {
    closer::check_room()?;
    let (socket, name) = (descriptors::socket()?, socket_address(addr)?);
    rustix::net::connect(&socket, &name)?;
    Ok(socket)
}

/// Checks that addresses are of this host. Any other belongs to another host: a local process that
/// listens at its name is not that host, and access rules must not take it for that.
///
/// # Errors
/// [`io::ErrorKind::AddrNotAvailable`], and those of `getifaddrs(3)`.
pub(super) fn check_local(addresses: &[IpAddr]) -> io::Result<()> {
    let all = LocalAddresses::look()?;
    match addresses.iter().find(|addr| !all.has(**addr)) {
        None => Ok(()),
        Some(addr) => Err(io::Error::new(
            io::ErrorKind::AddrNotAvailable,
            format!("{addr} is not an address of this host"),
        )),
    }
}

/// Connects to the device at `to`, and says hello from the one at `own`.
///
/// # Errors
/// Those of [`check_local`] and [`closer::check_room`],
/// [`io::ErrorKind::ConnectionRefused`] where no process listens, [`io::ErrorKind::WouldBlock`]
/// where too many wait, [`io::ErrorKind::PermissionDenied`] for a listener of a user who is not let
/// in, and [`io::ErrorKind::UnexpectedEof`] where the listener has refused already.
pub(super) fn connect(to: IpAddr, own: IpAddr, users: &ShmUsers) -> io::Result<OwnedFd> {
    check_local(&[to, own])?;
    let socket = reach(to).map_err(|error| match error.kind() {
        io::ErrorKind::ConnectionRefused => {
            let text = format!("no process of this host shares memory at {to}");
            io::Error::new(io::ErrorKind::ConnectionRefused, text)
        }
        io::ErrorKind::WouldBlock => {
            let text = format!("too many processes wait to share memory at {to}");
            io::Error::new(io::ErrorKind::WouldBlock, text)
        }
        _ => error,
    })?;
    if let Err(error) = users.check(&socket) {
        closer::close(socket);
        return Err(error);
    }
    // The memory comes with the answer.
    descriptors::pass(&socket, true)?;
    let hello = Hello {
        magic: HELLO,
        version: U16::new(VERSION),
        reserved: [0; 6],
        address: mapped(own),
    };
    rustix::net::send(&socket, hello.as_bytes(), SendFlags::NOSIGNAL).map_err(or_refused)?;
    Ok(socket)
}

/// The error of a socket whose peer may have closed it, which is how it refuses.
fn or_refused(error: rustix::io::Errno) -> io::Error {
    match error {
        // Before it was sent to, and with a HELLO that was not read.
        rustix::io::Errno::PIPE | rustix::io::Errno::CONNRESET => refused(),
        error => error.into(),
    }
}

fn refused() -> io::Error {
    let text = "the process that shares memory there has refused: it lets in root and its own \
                user, and its log says why";
    io::Error::new(io::ErrorKind::UnexpectedEof, text)
}

/// Accepts a connection; `None` if none waits.
///
/// # Errors
/// [`io::ErrorKind::PermissionDenied`] for a user who is not let in, and those of `accept(2)` and
/// [`closer::check_room`].
pub(super) fn accept(listener: &Listener, users: &ShmUsers) -> io::Result<Option<OwnedFd>> {
    // Anyone may be the next.
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

/// The address that a HELLO to the device at `own` names. Both are of this host and of one family.
///
/// # Errors
/// [`io::ErrorKind::InvalidData`] for any other message, and those of [`check_local`].
pub(super) fn parse_hello(message: &[u8], own: IpAddr) -> io::Result<IpAddr> {
    let hello = Hello::ref_from_bytes(message).map_err(|_| invalid("not a HELLO"))?;
    if hello.magic != HELLO {
        return Err(invalid("not a HELLO"));
    }
    if hello.version.get() != VERSION {
        return Err(invalid("a HELLO of another version"));
    }
    let addr = Ipv6Addr::from(hello.address).to_canonical();
    if addr.is_ipv4() != own.is_ipv4() {
        return Err(invalid("a HELLO from an address of the other family"));
    }
    // Access rules trust an address as far as the network does: a local process can send from any
    // address of its host, and from no other one.
    check_local(&[addr, own])?;
    Ok(addr)
}

/// Answers a HELLO with the memory.
///
/// # Errors
/// The peer is gone.
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

/// Result of reading a socket.
#[derive(Debug)]
pub(super) enum Message {
    /// A message of this many bytes.
    Bytes(usize),
    /// Nothing for now.
    None,
    /// The peer has closed its end, or has ended.
    End,
}

/// Receives a message. Descriptors that come with it are not taken.
pub(super) fn receive(socket: &OwnedFd, room: &mut [u8]) -> Message {
    match rustix::net::recv(socket, room, RecvFlags::DONTWAIT) {
        // No message is empty, so this is the end, or a peer that violates the protocol.
        Ok((0, _)) => Message::End,
        Ok((len, _)) => Message::Bytes(len),
        Err(rustix::io::Errno::WOULDBLOCK | rustix::io::Errno::INTR) => Message::None,
        Err(_) => Message::End,
    }
}

/// Receives a WELCOME; `None` while it has not come.
///
/// # Errors
/// [`io::ErrorKind::InvalidData`] for any other message, [`io::ErrorKind::UnexpectedEof`] if the
/// peer has refused.
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
        .map_err(|_| invalid("not a WELCOME"))?;
    let is_ours = welcome.magic == WELCOME
        && welcome.version.get() == VERSION
        && welcome.ring.get() as usize * 2 == DATA;
    if !is_ours {
        return Err(invalid("a WELCOME of another version"));
    }
    let memory = memory.ok_or_else(|| invalid("a WELCOME without memory"))?;
    Ok(Some(memory))
}

/// Says hello to the device at an address from there, and waits for the answer for [`PATIENCE`].
///
/// # Errors
/// Those of [`connect`] and [`receive_welcome`], and [`io::ErrorKind::TimedOut`].
pub(super) fn ask(addr: IpAddr, users: &ShmUsers) -> io::Result<()> {
    let socket = connect(addr, addr, users)?;
    let mut readable = [PollFd::new(&socket, PollFlags::IN)];
    rustix::event::poll(&mut readable, Some(&PATIENCE))?;
    match receive_welcome(&socket)? {
        Some(_) => Ok(()),
        None => {
            let text = format!("the process that shares memory at {addr} does not answer");
            Err(io::Error::new(io::ErrorKind::TimedOut, text))
        }
    }
}

/// Wakes the peer. A full socket already holds wake-ups.
pub(super) fn ring_bell(socket: &OwnedFd) {
    // A peer that is gone is noticed by the end of the socket.
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

    /// Time limit for what happens on another thread.
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
    fn a_hello_names_an_address_of_this_host() {
        let good = hello(|_| {});
        let own = IpAddr::from([127, 0, 0, 1]);
        assert_eq!(
            parse_hello(&good, own).unwrap(),
            IpAddr::from([127, 0, 0, 9])
        );
        let wrong = [
            (good[..31].to_vec(), "not a HELLO"),
            ([&good[..], &[0]].concat(), "not a HELLO"),
            (hello(|h| h.magic = WELCOME), "not a HELLO"),
            (hello(|h| h.version = U16::new(2)), "version"),
            (
                hello(|h| h.address = mapped([192, 0, 2, 1].into())),
                "not an address",
            ),
            // A socket can be bound to these two.
            (
                hello(|h| h.address = mapped([239, 1, 2, 3].into())),
                "not an address",
            ),
            (
                hello(|h| h.address = mapped([0, 0, 0, 0].into())),
                "not an address",
            ),
            (hello(|h| h.address = [0; 16]), "other family"),
            (
                hello(|h| h.address = mapped("::1".parse().unwrap())),
                "other family",
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
    fn the_overflow_user_proves_nothing() {
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
    fn one_process_listens_at_an_address() {
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
            // The question who it is.
            let asked = accept(&listener, &users).unwrap().unwrap();
            assert!(matches!(receive(&asked, &mut [0; 64]), Message::End));
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

    /// A listener of a program that is none of ours, which can send and receive anything.
    fn squat(addr: IpAddr) -> OwnedFd {
        let socket = descriptors::socket().unwrap();
        descriptors::pass(&socket, true).unwrap();
        rustix::net::bind(&socket, &socket_address(addr).unwrap()).unwrap();
        rustix::net::listen(&socket, BACKLOG).unwrap();
        socket
    }

    #[test]
    fn who_takes_a_name_can_send_no_descriptor_before_its_user_is_checked() {
        let addr = IpAddr::from([127, 1, 2, 8]);
        let squatter = squat(addr);
        if !refuses_descriptors() {
            // No process is connected to.
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
        // This one is let in, and may answer with memory.
        let client = connect(addr, addr, &ShmUsers::default()).unwrap();
        let server = rustix::net::accept(&squatter).unwrap();
        assert_eq!(send_one(&server), Ok(1));
        assert!(matches!(receive(&client, &mut [0; 64]), Message::Bytes(1)));
    }

    #[test]
    fn a_listener_is_found_in_the_table_of_the_kernel() {
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
    fn a_listener_at_the_address_of_another_host_is_not_used() {
        let users = ShmUsers::default();
        for addr in [[192, 0, 2, 99], [239, 1, 2, 4]].map(IpAddr::from) {
            let listener = listen(addr).unwrap();
            let refused = connect(addr, [127, 0, 0, 1].into(), &users).unwrap_err();
            assert_eq!(refused.kind(), io::ErrorKind::AddrNotAvailable);
            assert!(accept(&listener, &users).unwrap().is_none(), "{addr}");
        }
    }

    #[test]
    fn a_socket_that_is_closed_unread_was_refused() {
        let addr = IpAddr::from([127, 1, 2, 6]);
        let users = ShmUsers::default();
        let listener = listen(addr).unwrap();
        let client = connect(addr, addr, &users).unwrap();
        // As `accept` does with another user.
        drop(rustix::net::accept(&listener).unwrap());
        let error = receive_welcome(&client).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::UnexpectedEof, "{error}");
        // One that is refused sooner cannot even say hello.
        let error = rustix::net::send(&client, b"x", SendFlags::NOSIGNAL).map_err(or_refused);
        assert_eq!(error.unwrap_err().kind(), io::ErrorKind::UnexpectedEof);
    }

    #[test]
    fn a_name_is_free_as_soon_as_its_listener_is_closed() {
        let addr = IpAddr::from([127, 1, 2, 7]);
        let listener = listen(addr).unwrap();
        let waiting = connect(addr, addr, &ShmUsers::default()).unwrap();
        drop(listener);
        let again = listen(addr).unwrap();
        assert!(accept(&again, &ShmUsers::default()).unwrap().is_none());
        // It is closed elsewhere.
        eventually("it has ended", PATIENT, || {
            receive_welcome(&waiting).is_err()
        });
    }

    #[test]
    fn another_message_than_a_welcome_is_refused() {
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
            (b"!".to_vec(), "not a WELCOME"),
            (vec![0; 16], "another version"),
            (vec![0; 17], "not a WELCOME"),
            (longer.as_bytes().to_vec(), "another version"),
            (welcome.as_bytes().to_vec(), "without memory"),
        ] {
            let client = connect(addr, addr, &users).unwrap();
            let server = accept(&listener, &users).unwrap().unwrap();
            rustix::net::send(&server, &message, SendFlags::NOSIGNAL).unwrap();
            let error = receive_welcome(&client).unwrap_err();
            assert!(error.to_string().contains(why), "{error}: {why}");
        }
    }
}
