//! Socket options, addresses and control messages of the [driver](super::driver).

#![allow(
    unsafe_code,
    reason = "no library wraps the control messages of a caller's own message headers without copying"
)]

use std::io;
use std::mem::{size_of, zeroed};
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV4, SocketAddrV6};
use std::os::fd::{AsFd, OwnedFd};
use std::ptr;

use nix::sys::socket::{GetSockOpt, SetSockOpt, getsockopt, setsockopt, sockopt};
use nix::{setsockopt_impl, sockopt_impl};
use rustix::event::epoll::{self, EventFlags};

use super::batch::ECT_0;
use super::steer::{self, Requests};

/// Control messages of UDP that the C library binding does not have everywhere.
pub(super) const UDP_SEGMENT: libc::c_int = 103;
pub(super) const UDP_GRO: libc::c_int = 104;

const UDP_NO_CHECK6_RX: libc::c_int = 102;
const IPV6_MULTICAST_ALL: libc::c_int = 29;

sockopt_impl!(
    /// Accepts IPv6 datagrams without a UDP checksum, as RoCEv2 allows (annex A17).
    NoCheck6Rx, SetOnly, libc::IPPROTO_UDP, UDP_NO_CHECK6_RX, bool
);
sockopt_impl!(
    /// Path MTU discovery of IPv4.
    Ipv4MtuDiscover, SetOnly, libc::IPPROTO_IP, libc::IP_MTU_DISCOVER, libc::c_int
);
sockopt_impl!(
    /// Path MTU discovery of IPv6.
    Ipv6MtuDiscover, SetOnly, libc::IPPROTO_IPV6, libc::IPV6_MTU_DISCOVER, libc::c_int
);
sockopt_impl!(
    /// To receive datagrams of groups that other sockets have joined.
    Ipv4MulticastAll, SetOnly, libc::IPPROTO_IP, libc::IP_MULTICAST_ALL, bool
);
sockopt_impl!(
    /// The same over IPv6.
    Ipv6MulticastAll, SetOnly, libc::IPPROTO_IPV6, IPV6_MULTICAST_ALL, bool
);
sockopt_impl!(
    /// Hop limit of what is sent over IPv6.
    Ipv6UnicastHops, SetOnly, libc::IPPROTO_IPV6, libc::IPV6_UNICAST_HOPS, libc::c_int
);

pub(super) fn check(result: libc::c_int) -> io::Result<libc::c_int> {
    if result < 0 {
        Err(io::Error::last_os_error())
    } else {
        Ok(result)
    }
}

/// Asks for a socket buffer of `bytes`, past the system's limit where that is permitted, and
/// returns what it is then: Linux doubles the number for its own overhead.
pub(super) fn grow_buffer<F: AsFd>(
    socket: &F,
    force: impl SetSockOpt<Val = usize>,
    plain: impl SetSockOpt<Val = usize> + GetSockOpt<Val = usize>,
    bytes: usize,
) -> usize {
    // The kernel takes a signed number.
    let bytes = bytes.min(i32::MAX as usize);
    if setsockopt(socket, force, &bytes).is_err() {
        // The plain option takes as much as the limit allows.
        let _ = setsockopt(socket, plain, &bytes);
    }
    getsockopt(socket, plain).unwrap_or(0)
}

/// Has packets sent whole, without regard to the path MTU that the kernel has learned.
pub(super) fn set_mtu_probe(socket: &impl AsFd, is_v6: bool) -> io::Result<()> {
    if is_v6 {
        setsockopt(socket, Ipv6MtuDiscover, &libc::IPV6_PMTUDISC_PROBE)?;
    } else {
        setsockopt(socket, Ipv4MtuDiscover, &libc::IP_PMTUDISC_PROBE)?;
    }
    Ok(())
}

/// Accepts datagrams without a UDP checksum: the ICRC covers more, and hardware sends none.
pub(super) fn allow_no_checksum(socket: &impl AsFd) -> io::Result<()> {
    Ok(setsockopt(socket, NoCheck6Rx, &true)?)
}

/// Has only datagrams received that arrive where the socket has joined their group.
pub(super) fn only_own_groups(socket: &impl AsFd, is_v6: bool) -> io::Result<()> {
    match is_v6 {
        true => setsockopt(socket, Ipv6MulticastAll, &false)?,
        false => setsockopt(socket, Ipv4MulticastAll, &false)?,
    }
    Ok(())
}

/// Sets the hop limit of what is sent, and whether that of what is received is reported.
pub(super) fn set_hop_limit(
    socket: &impl AsFd,
    is_v6: bool,
    limit: u8,
    report: bool,
) -> io::Result<()> {
    // Received hop limits are asked for only where they are checked: each costs a control
    // message.
    let limit = libc::c_int::from(limit);
    if is_v6 {
        setsockopt(socket, Ipv6UnicastHops, &limit)?;
        setsockopt(socket, sockopt::Ipv6RecvHopLimit, &report)?;
    } else {
        setsockopt(socket, sockopt::Ipv4Ttl, &limit)?;
        setsockopt(socket, sockopt::Ipv4RecvTtl, &report)?;
    }
    Ok(())
}

/// Has everything sent as capable of ECN, unless its control messages say otherwise, and the mark
/// of what is received reported (RFC 3168).
pub(super) fn set_ecn(socket: &impl AsFd, is_v6: bool) -> io::Result<()> {
    if is_v6 {
        setsockopt(socket, sockopt::Ipv6TClass, &ECT_0.into())?;
        setsockopt(socket, sockopt::Ipv6RecvTClass, &true)?;
    } else {
        setsockopt(socket, sockopt::Ipv4Tos, &ECT_0.into())?;
        setsockopt(socket, sockopt::IpRecvTos, &true)?;
    }
    Ok(())
}

/// Turns on trains of datagrams on receiving (UDP_GRO) and reports whether the kernel has them.
pub(super) fn enable_gro(socket: &impl AsFd) -> bool {
    setsockopt(socket, sockopt::UdpGroSegment, &true).is_ok()
}

/// Returns whether the kernel cuts one send into datagrams (UDP_SEGMENT). Setting the size for all
/// sends and taking it back shows it.
pub(super) fn has_gso(socket: &impl AsFd) -> bool {
    // The kernel refuses the option where it does not have it. 0 is off again: sizes are given
    // for each send.
    let set = |size| setsockopt(socket, sockopt::UdpGsoSegment, &size).is_ok();
    set(1024) && set(0)
}

/// Level and type of the control message with the type of service or traffic class.
pub(super) fn tos_message(is_v6: bool) -> (libc::c_int, libc::c_int) {
    if is_v6 {
        (libc::IPPROTO_IPV6, libc::IPV6_TCLASS)
    } else {
        (libc::IPPROTO_IP, libc::IP_TOS)
    }
}

/// The type of service, or traffic class, of a datagram, or of every one of a train: the kernel
/// merges no datagrams in which it differs.
pub(super) fn traffic_class(header: &libc::msghdr) -> u8 {
    let tos = control_value(header, |level, kind| {
        (level, kind) == tos_message(true) || (level, kind) == tos_message(false)
    });
    tos.map_or(0, |tos| tos as u8)
}

/// Level and type of the control message with the hop limit or time to live.
pub(super) fn hop_limit_message(is_v6: bool) -> (libc::c_int, libc::c_int) {
    if is_v6 {
        (libc::IPPROTO_IPV6, libc::IPV6_HOPLIMIT)
    } else {
        (libc::IPPROTO_IP, libc::IP_TTL)
    }
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
        (level, kind) == hop_limit_message(true) || (level, kind) == hop_limit_message(false)
    })
}

/// The value of the first control message that is wanted. Those that are asked for carry an
/// integer, or, as IPv4's type of service does, a byte.
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
            // IPv4's type of service comes as one byte, everything else as an integer.
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
        // SAFETY: the space of the message, header and value, lies within the buffer from `len` on,
        // which is aligned because each space is a multiple of the buffer's alignment.
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

/// Writes an address to where a message header points; returns its length in bytes.
pub(super) fn write_addr(
    storage: &mut libc::sockaddr_storage,
    addr: SocketAddr,
) -> libc::socklen_t {
    match addr {
        SocketAddr::V4(v4) => {
            // SAFETY: all-zero bytes are valid for this plain C structure.
            let mut a: libc::sockaddr_in = unsafe { zeroed() };
            a.sin_family = libc::AF_INET as _;
            a.sin_port = v4.port().to_be();
            a.sin_addr.s_addr = u32::from(*v4.ip()).to_be();
            // SAFETY: the storage has room for every kind of address, and is aligned for it.
            unsafe { ptr::from_mut(storage).cast::<libc::sockaddr_in>().write(a) };
            size_of::<libc::sockaddr_in>() as _
        }
        SocketAddr::V6(v6) => {
            // SAFETY: as above.
            let mut a: libc::sockaddr_in6 = unsafe { zeroed() };
            a.sin6_family = libc::AF_INET6 as _;
            a.sin6_port = v6.port().to_be();
            a.sin6_addr.s6_addr = v6.ip().octets();
            a.sin6_scope_id = v6.scope_id();
            // SAFETY: as above.
            unsafe { ptr::from_mut(storage).cast::<libc::sockaddr_in6>().write(a) };
            size_of::<libc::sockaddr_in6>() as _
        }
    }
}

/// Has a set that watches a socket for some events watch it for others; for none it forgets it.
pub(super) fn watch(
    set: &OwnedFd,
    socket: &impl AsFd,
    watched: EventFlags,
    events: EventFlags,
) -> io::Result<()> {
    let data = epoll::EventData::new_u64(0);
    if events.is_empty() {
        epoll::delete(set, socket)?;
    } else if watched.is_empty() {
        epoll::add(set, socket, data, events)?;
    } else {
        epoll::modify(set, socket, data, events)?;
    }
    Ok(())
}

/// Attaches the program that picks a worker's socket.
pub(super) fn attach_selector(
    socket: &impl AsFd,
    worker_bits: u8,
    requests: Requests,
) -> io::Result<()> {
    let mut code = steer::program(worker_bits, requests)
        .map(|(code, jt, jf, k)| libc::sock_filter { code, jt, jf, k });
    let program = libc::sock_fprog {
        len: code.len() as u16,
        filter: code.as_mut_ptr(),
    };
    // The instructions live until the call returns; the kernel copies them.
    setsockopt(socket, sockopt::AttachReusePortCbpf, &program)?;
    Ok(())
}
