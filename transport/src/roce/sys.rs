//! The system calls behind the [driver](super::driver) that concern one option, address or control
//! message each.

#![allow(
    unsafe_code,
    reason = "socket options, addresses and control messages have no safe wrapper"
)]

use std::io;
use std::mem::size_of;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV4, SocketAddrV6};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::ptr;

use super::steer;

/// Socket option names that the C library binding does not have everywhere.
pub(super) const UDP_NO_CHECK6_RX: libc::c_int = 102;
pub(super) const UDP_SEGMENT: libc::c_int = 103;
pub(super) const UDP_GRO: libc::c_int = 104;

/// ECN codepoints (RFC 3168, section 5): capable, marked, and where they are in the type of service.
pub(super) const ECT_0: libc::c_int = 0b10;
pub(super) const CE: libc::c_int = 0b11;
const ECN_MASK: libc::c_int = 0b11;

pub(super) fn check(result: libc::c_int) -> io::Result<libc::c_int> {
    if result < 0 {
        Err(io::Error::last_os_error())
    } else {
        Ok(result)
    }
}

pub(super) fn set_option(fd: RawFd, level: i32, name: i32, value: i32) -> io::Result<()> {
    // SAFETY: the pointer and length describe a live integer.
    check(unsafe {
        libc::setsockopt(
            fd,
            level,
            name,
            ptr::from_ref(&value).cast(),
            size_of::<libc::c_int>() as libc::socklen_t,
        )
    })
    .map(drop)
}

/// Asks for a buffer size, past the system's limit where we may; answers what it is then.
pub(super) fn grow_buffer(fd: RawFd, force: i32, plain: i32, bytes: usize) -> usize {
    let want = i32::try_from(bytes).unwrap_or(i32::MAX);
    if set_option(fd, libc::SOL_SOCKET, force, want).is_err() {
        // The plain option takes as much as the limit allows.
        let _ = set_option(fd, libc::SOL_SOCKET, plain, want);
    }
    let mut got: libc::c_int = 0;
    let mut len = size_of::<libc::c_int>() as libc::socklen_t;
    // SAFETY: pointers and length describe a live integer.
    let r = unsafe {
        libc::getsockopt(
            fd,
            libc::SOL_SOCKET,
            plain,
            ptr::from_mut(&mut got).cast(),
            &raw mut len,
        )
    };
    if r < 0 { 0 } else { got.max(0) as usize }
}

/// Sets the hop limit of what is sent, and whether that of what is received is reported.
pub(super) fn set_hop_limit(fd: RawFd, is_v6: bool, limit: u8, report: bool) -> io::Result<()> {
    let (level, send, receive) = if is_v6 {
        (
            libc::IPPROTO_IPV6,
            libc::IPV6_UNICAST_HOPS,
            libc::IPV6_RECVHOPLIMIT,
        )
    } else {
        (libc::IPPROTO_IP, libc::IP_TTL, libc::IP_RECVTTL)
    };
    set_option(fd, level, send, limit.into())?;
    set_option(fd, level, receive, report.into())
}

/// Has everything sent as capable of ECN, unless its control messages say otherwise, and the mark of what
/// is received reported (RFC 3168).
pub(super) fn set_ecn(fd: RawFd, is_v6: bool) -> io::Result<()> {
    let (level, send, receive) = if is_v6 {
        (libc::IPPROTO_IPV6, libc::IPV6_TCLASS, libc::IPV6_RECVTCLASS)
    } else {
        (libc::IPPROTO_IP, libc::IP_TOS, libc::IP_RECVTOS)
    };
    set_option(fd, level, send, ECT_0)?;
    set_option(fd, level, receive, 1)
}

/// Level and type of the control message with the type of service or traffic class.
pub(super) fn tos_message(is_v6: bool) -> (libc::c_int, libc::c_int) {
    if is_v6 {
        (libc::IPPROTO_IPV6, libc::IPV6_TCLASS)
    } else {
        (libc::IPPROTO_IP, libc::IP_TOS)
    }
}

/// Whether a datagram, or every one of a train, was marked for congestion on its way. The kernel merges no
/// datagrams whose marks differ.
pub(super) fn is_marked(header: &libc::msghdr) -> bool {
    ecn(header) == Some(CE)
}

/// The ECN codepoint of a datagram, or of every one of a train.
pub(super) fn ecn(header: &libc::msghdr) -> Option<libc::c_int> {
    let tos = control_value(header, |level, kind| {
        (level, kind) == tos_message(true) || (level, kind) == tos_message(false)
    });
    tos.map(|tos| tos & ECN_MASK)
}

/// The segment length of a train, in bytes; `None` for a single datagram.
pub(super) fn segment_size(header: &libc::msghdr) -> Option<usize> {
    let length = control_value(header, |level, kind| {
        (level, kind) == (libc::IPPROTO_UDP, UDP_GRO)
    });
    length.and_then(|v| usize::try_from(v).ok())
}

/// The hop limit with which a datagram, or every one of a train, has arrived.
pub(super) fn hop_limit(header: &libc::msghdr) -> Option<libc::c_int> {
    control_value(header, |level, kind| {
        let v4 = (libc::IPPROTO_IP, libc::IP_TTL);
        let v6 = (libc::IPPROTO_IPV6, libc::IPV6_HOPLIMIT);
        (level, kind) == v4 || (level, kind) == v6
    })
}

/// The value of the first control message that is wanted. Those that are asked for carry an integer,
/// or, as IPv4's type of service does, a byte.
fn control_value(
    header: &libc::msghdr,
    is_wanted: impl Fn(libc::c_int, libc::c_int) -> bool,
) -> Option<libc::c_int> {
    // SAFETY: the kernel filled in the control data and its length; the macros stay within it.
    let mut c = unsafe { libc::CMSG_FIRSTHDR(header) };
    while !c.is_null() {
        // SAFETY: not null, so within the control data.
        let (level, kind) = unsafe { ((*c).cmsg_level, (*c).cmsg_type) };
        if is_wanted(level, kind) {
            // SAFETY: computes a length, and reads the header that is there.
            if unsafe { (*c).cmsg_len < libc::CMSG_LEN(size_of::<libc::c_int>() as _) as _ } {
                // SAFETY: the kernel writes one byte at least.
                return Some(unsafe { *libc::CMSG_DATA(c) }.into());
            }
            // SAFETY: the message is long enough for an integer.
            let v = unsafe { ptr::read_unaligned(libc::CMSG_DATA(c).cast::<libc::c_int>()) };
            return Some(v);
        }
        // SAFETY: as for the first.
        c = unsafe { libc::CMSG_NXTHDR(header, c) };
    }
    None
}

/// Writes control messages one after the other.
pub(super) struct ControlWriter<'a> {
    buffer: &'a mut [u64],
    /// Bytes that are used.
    pub(super) len: usize,
}

impl<'a> ControlWriter<'a> {
    pub(super) fn new(buffer: &'a mut [u64]) -> Self {
        Self { buffer, len: 0 }
    }

    /// Appends a message. Panics if there is no room for it.
    pub(super) fn push(&mut self, (level, kind): (libc::c_int, libc::c_int), value: &[u8]) {
        // SAFETY: computes lengths only.
        let (space, len) = unsafe {
            (
                libc::CMSG_SPACE(value.len() as _) as usize,
                libc::CMSG_LEN(value.len() as _),
            )
        };
        assert!(self.len + space <= size_of_val(self.buffer));
        // SAFETY: the space of the message, header and value, lies within the buffer from `len` on, which
        // is aligned because each space is a multiple of the buffer's alignment.
        unsafe {
            let c = self.buffer.as_mut_ptr().byte_add(self.len);
            let c = c.cast::<libc::cmsghdr>();
            (*c).cmsg_level = level;
            (*c).cmsg_type = kind;
            (*c).cmsg_len = len as _;
            ptr::copy_nonoverlapping(value.as_ptr(), libc::CMSG_DATA(c), value.len());
        }
        self.len += space;
    }
}

pub(super) fn put_addr(addr: SocketAddr, storage: &mut libc::sockaddr_storage) -> libc::socklen_t {
    let raw = socket2::SockAddr::from(addr);
    // SAFETY: a socket address of `len` bytes fits the storage, whose type is the widest there is.
    unsafe {
        ptr::copy_nonoverlapping(
            raw.as_ptr().cast::<u8>(),
            ptr::from_mut(storage).cast::<u8>(),
            raw.len() as usize,
        );
    }
    raw.len()
}

pub(super) fn read_addr(storage: &libc::sockaddr_storage) -> Option<SocketAddr> {
    match i32::from(storage.ss_family) {
        libc::AF_INET => {
            // SAFETY: the family says what the storage holds.
            let a = unsafe { &*ptr::from_ref(storage).cast::<libc::sockaddr_in>() };
            let ip = Ipv4Addr::from(u32::from_be(a.sin_addr.s_addr));
            Some(SocketAddrV4::new(ip, u16::from_be(a.sin_port)).into())
        }
        libc::AF_INET6 => {
            // SAFETY: the family says what the storage holds.
            let a = unsafe { &*ptr::from_ref(storage).cast::<libc::sockaddr_in6>() };
            let ip = Ipv6Addr::from(a.sin6_addr.s6_addr);
            Some(SocketAddrV6::new(ip, u16::from_be(a.sin6_port), 0, a.sin6_scope_id).into())
        }
        _ => None,
    }
}

pub(super) fn open_epoll(socket: RawFd) -> io::Result<OwnedFd> {
    // SAFETY: creates a descriptor and touches no memory.
    let fd = check(unsafe { libc::epoll_create1(libc::EPOLL_CLOEXEC) })?;
    // SAFETY: just created and owned by nobody else.
    let epoll = unsafe { OwnedFd::from_raw_fd(fd) };
    epoll_ctl(&epoll, libc::EPOLL_CTL_ADD, socket, libc::EPOLLIN)?;
    Ok(epoll)
}

pub(super) fn epoll_ctl(epoll: &OwnedFd, op: i32, fd: RawFd, events: i32) -> io::Result<()> {
    let mut event = libc::epoll_event {
        events: events as u32,
        u64: 0,
    };
    // SAFETY: the event lives until the call returns.
    check(unsafe { libc::epoll_ctl(epoll.as_raw_fd(), op, fd, &raw mut event) }).map(drop)
}

/// Attaches the program that picks a worker's socket.
pub(super) fn attach_selector(fd: RawFd, worker_bits: u8) -> io::Result<()> {
    let mut code =
        steer::program(worker_bits).map(|(code, jt, jf, k)| libc::sock_filter { code, jt, jf, k });
    let program = libc::sock_fprog {
        len: code.len() as u16,
        filter: code.as_mut_ptr(),
    };
    // SAFETY: the program and its instructions live until the call returns; the kernel copies them.
    check(unsafe {
        libc::setsockopt(
            fd,
            libc::SOL_SOCKET,
            libc::SO_ATTACH_REUSEPORT_CBPF,
            ptr::from_ref(&program).cast(),
            size_of::<libc::sock_fprog>() as libc::socklen_t,
        )
    })
    .map(drop)
}
