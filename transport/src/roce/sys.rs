//! Socket options, addresses and control messages used by the [driver](super::driver).

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

use super::steer::{self, Requests};
use crate::nic::batch::ECT_0;

/// UDP control messages that are not defined for all targets of the libc crate.
pub(super) const UDP_SEGMENT: libc::c_int = 103;
pub(super) const UDP_GRO: libc::c_int = 104;

const UDP_NO_CHECK6_RX: libc::c_int = 102;
const IPV6_MULTICAST_ALL: libc::c_int = 29;

sockopt_impl!(
    /// Accepts IPv6 datagrams without a UDP checksum, as allowed for RoCEv2 (annex A17).
    NoCheck6Rx, SetOnly, libc::IPPROTO_UDP, UDP_NO_CHECK6_RX, bool
);
sockopt_impl!(
    /// Path MTU discovery for IPv4.
    Ipv4MtuDiscover, SetOnly, libc::IPPROTO_IP, libc::IP_MTU_DISCOVER, libc::c_int
);
sockopt_impl!(
    /// Path MTU discovery for IPv6.
    Ipv6MtuDiscover, SetOnly, libc::IPPROTO_IPV6, libc::IPV6_MTU_DISCOVER, libc::c_int
);
sockopt_impl!(
    /// Receive datagrams for groups joined by any other socket.
    Ipv4MulticastAll, SetOnly, libc::IPPROTO_IP, libc::IP_MULTICAST_ALL, bool
);
sockopt_impl!(
    /// Same as `Ipv4MulticastAll`, for IPv6.
    Ipv6MulticastAll, SetOnly, libc::IPPROTO_IPV6, IPV6_MULTICAST_ALL, bool
);
sockopt_impl!(
    /// Hop limit for sent IPv6 packets.
    Ipv6UnicastHops, SetOnly, libc::IPPROTO_IPV6, libc::IPV6_UNICAST_HOPS, libc::c_int
);

pub(super) fn check(result: libc::c_int) -> io::Result<libc::c_int> {
    if result < 0 {
        Err(io::Error::last_os_error())
    } else {
        Ok(result)
    }
}

/// Requests a socket buffer size of `bytes`, exceeding the system limit if permitted. Returns the
/// actual size: Linux doubles the value to account for its own overhead.
pub(super) fn grow_buffer<F: AsFd>(
    socket: &F,
    force: impl SetSockOpt<Val = usize>,
    plain: impl SetSockOpt<Val = usize> + GetSockOpt<Val = usize>,
    bytes: usize,
) -> usize {
    // The kernel uses a signed value.
    let bytes = bytes.min(i32::MAX as usize);
    if setsockopt(socket, force, &bytes).is_err() {
        // This option is subject to the system limit.
        let _ = setsockopt(socket, plain, &bytes);
    }
    getsockopt(socket, plain).unwrap_or(0)
}

/// Sends packets of any size, ignoring the path MTU learned by the kernel.
pub(super) fn set_mtu_probe(socket: &impl AsFd, is_v6: bool) -> io::Result<()> {
    if is_v6 {
        setsockopt(socket, Ipv6MtuDiscover, &libc::IPV6_PMTUDISC_PROBE)?;
    } else {
        setsockopt(socket, Ipv4MtuDiscover, &libc::IP_PMTUDISC_PROBE)?;
    }
    Ok(())
}

/// Accepts datagrams without a UDP checksum: the ICRC covers more data, and hardware does not set
/// the checksum.
pub(super) fn allow_no_checksum(socket: &impl AsFd) -> io::Result<()> {
    Ok(setsockopt(socket, NoCheck6Rx, &true)?)
}

/// Only receive multicast datagrams for groups which have been joined by this socket.
pub(super) fn only_own_groups(socket: &impl AsFd, is_v6: bool) -> io::Result<()> {
    match is_v6 {
        true => setsockopt(socket, Ipv6MulticastAll, &false)?,
        false => setsockopt(socket, Ipv4MulticastAll, &false)?,
    }
    Ok(())
}

/// Sets the hop limit for sending, and whether the hop limit of received packets is reported.
pub(super) fn set_hop_limit(
    socket: &impl AsFd,
    is_v6: bool,
    limit: u8,
    report: bool,
) -> io::Result<()> {
    // Only request received hop limits if we need to check them, since this requires an additional
    // control message.
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

/// Marks all sent packets as ECN-capable unless overridden by a control message, and enables
/// reporting of the ECN field in received packets (RFC 3168).
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

/// Enables receiving trains of datagrams (UDP_GRO). This will return `false` if not supported by
/// the kernel.
pub(super) fn enable_gro(socket: &impl AsFd) -> bool {
    setsockopt(socket, sockopt::UdpGroSegment, &true).is_ok()
}

/// Returns whether the kernel can split a send into multiple datagrams (UDP_SEGMENT). To check
/// this, we set the default segment size and reset it.
pub(super) fn has_gso(socket: &impl AsFd) -> bool {
    // This fails if the option is not supported. 0 disables it again, since we set the segment size
    // for each send.
    let set = |size| setsockopt(socket, sockopt::UdpGsoSegment, &size).is_ok();
    set(1024) && set(0)
}

/// Returns the level and type of the control message for the type of service or traffic class.
pub(super) fn tos_message(is_v6: bool) -> (libc::c_int, libc::c_int) {
    if is_v6 {
        (libc::IPPROTO_IPV6, libc::IPV6_TCLASS)
    } else {
        (libc::IPPROTO_IP, libc::IP_TOS)
    }
}

/// Returns the type of service or traffic class of a datagram. It is the same for all datagrams of
/// a train, since the kernel doesn't merge datagrams if it is different.
pub(super) fn traffic_class(header: &libc::msghdr) -> u8 {
    let tos = control_value(header, |level, kind| {
        (level, kind) == tos_message(true) || (level, kind) == tos_message(false)
    });
    tos.map_or(0, |tos| tos as u8)
}

/// Returns the level and type of the control message for the hop limit or TTL.
pub(super) fn hop_limit_message(is_v6: bool) -> (libc::c_int, libc::c_int) {
    if is_v6 {
        (libc::IPPROTO_IPV6, libc::IPV6_HOPLIMIT)
    } else {
        (libc::IPPROTO_IP, libc::IP_TTL)
    }
}

/// Returns the segment size of a train in bytes, or `None` for a single datagram.
pub(super) fn segment_size(header: &libc::msghdr) -> Option<usize> {
    let length = control_value(header, |level, kind| {
        (level, kind) == (libc::IPPROTO_UDP, UDP_GRO)
    });
    length.and_then(|v| usize::try_from(v).ok())
}

/// Returns the received hop limit of a datagram or train.
pub(super) fn hop_limit(header: &libc::msghdr) -> Option<libc::c_int> {
    control_value(header, |level, kind| {
        (level, kind) == hop_limit_message(true) || (level, kind) == hop_limit_message(false)
    })
}

/// Returns the value of the first matching control message. The values are integers, except for the
/// IPv4 type of service, which is a single byte.
fn control_value(
    header: &libc::msghdr,
    is_wanted: impl Fn(libc::c_int, libc::c_int) -> bool,
) -> Option<libc::c_int> {
    // SAFETY: the control data and its length have been set by the kernel. The macros don't access
    // anything outside of it.
    let mut c = unsafe { libc::CMSG_FIRSTHDR(header) };
    while !c.is_null() {
        // SAFETY: `c` is not null, so it points into the control data.
        let (level, kind) = unsafe { ((*c).cmsg_level, (*c).cmsg_type) };
        if is_wanted(level, kind) {
            // The IPv4 type of service is a single byte, all other values are integers. SAFETY:
            // this computes a length and reads a valid header.
            if unsafe { (*c).cmsg_len < libc::CMSG_LEN(size_of::<libc::c_int>() as _) as _ } {
                // SAFETY: the kernel always writes at least one byte.
                return Some(unsafe { *libc::CMSG_DATA(c) }.into());
            }
            // SAFETY: we have checked that the message is long enough for an integer.
            let v = unsafe { ptr::read_unaligned(libc::CMSG_DATA(c).cast::<libc::c_int>()) };
            return Some(v);
        }
        // SAFETY: same as for the first message.
        c = unsafe { libc::CMSG_NXTHDR(header, c) };
    }
    None
}

/// Writes control messages to a buffer.
pub(super) struct ControlWriter<'a> {
    buffer: &'a mut [u64],
    /// Number of bytes used.
    pub(super) len: usize,
}

impl<'a> ControlWriter<'a> {
    pub(super) fn new(buffer: &'a mut [u64]) -> Self {
        Self { buffer, len: 0 }
    }

    /// Appends a message. Panics if it does not fit.
    pub(super) fn push(&mut self, (level, kind): (libc::c_int, libc::c_int), value: &[u8]) {
        // SAFETY: this only computes lengths.
        let (space, len) = unsafe {
            (
                libc::CMSG_SPACE(value.len() as _) as usize,
                libc::CMSG_LEN(value.len() as _),
            )
        };
        assert!(self.len + space <= size_of_val(self.buffer));
        // SAFETY: the buffer has space for the header and value, starting at `len`. The offset is
        // aligned because the size of each message is a multiple of the buffer's alignment.
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
            // SAFETY: the type of the storage is given by the address family.
            let a = unsafe { &*ptr::from_ref(storage).cast::<libc::sockaddr_in>() };
            let ip = Ipv4Addr::from(u32::from_be(a.sin_addr.s_addr));
            Some(SocketAddrV4::new(ip, u16::from_be(a.sin_port)).into())
        }
        libc::AF_INET6 => {
            // SAFETY: the type of the storage is given by the address family.
            let a = unsafe { &*ptr::from_ref(storage).cast::<libc::sockaddr_in6>() };
            let ip = Ipv6Addr::from(a.sin6_addr.s6_addr);
            Some(SocketAddrV6::new(ip, u16::from_be(a.sin6_port), 0, a.sin6_scope_id).into())
        }
        _ => None,
    }
}

/// Writes an address to the storage used by a message header. Returns its length in bytes.
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
            // SAFETY: the storage has the size and alignment required for any address type.
            unsafe { ptr::from_mut(storage).cast::<libc::sockaddr_in>().write(a) };
            size_of::<libc::sockaddr_in>() as _
        }
        SocketAddr::V6(v6) => {
            // SAFETY: same as for IPv4.
            let mut a: libc::sockaddr_in6 = unsafe { zeroed() };
            a.sin6_family = libc::AF_INET6 as _;
            a.sin6_port = v6.port().to_be();
            a.sin6_addr.s6_addr = v6.ip().octets();
            a.sin6_scope_id = v6.scope_id();
            // SAFETY: same as for IPv4.
            unsafe { ptr::from_mut(storage).cast::<libc::sockaddr_in6>().write(a) };
            size_of::<libc::sockaddr_in6>() as _
        }
    }
}

/// Updates the events for which an epoll set watches a socket. If `events` is empty, the socket
/// is removed from the set.
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

/// Attaches the BPF program that selects the socket of a worker.
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
    // The instructions are valid until the call returns, and the kernel creates a copy.
    setsockopt(socket, sockopt::AttachReusePortCbpf, &program)?;
    Ok(())
}
