//! What this host's interfaces are: their addresses and MTUs.

#![allow(
    unsafe_code,
    reason = "getifaddrs and the interface requests have no safe wrapper"
)]

use std::io;
use std::mem::zeroed;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::os::fd::AsRawFd;
use std::ptr;

use socket2::{Domain, Socket, Type};

/// The MTU in bytes of the interface that has `addr`, or whose network holds it (as 127.0.0.2 is on
/// the loopback interface that has 127.0.0.1). `None` if there is none.
#[must_use]
pub fn interface_mtu(addr: IpAddr) -> Option<usize> {
    let mut list: *mut libc::ifaddrs = ptr::null_mut();
    // SAFETY: on success the list is ours until freed below.
    if unsafe { libc::getifaddrs(&raw mut list) } != 0 {
        return None;
    }
    let mut best: Option<(u32, [libc::c_char; libc::IFNAMSIZ])> = None;
    let mut at = list;
    while !at.is_null() {
        // SAFETY: a non-null entry of the list.
        let entry = unsafe { &*at };
        at = entry.ifa_next;
        let Some(bits) = common_network(entry, addr) else {
            continue;
        };
        if best.is_none_or(|(b, _)| bits > b) {
            let mut name = [0; libc::IFNAMSIZ];
            // SAFETY: an interface name is a C string shorter than IFNAMSIZ.
            unsafe { libc::strncpy(name.as_mut_ptr(), entry.ifa_name, libc::IFNAMSIZ - 1) };
            best = Some((bits, name));
        }
    }
    // SAFETY: the list came from getifaddrs and nothing refers to it any more.
    unsafe { libc::freeifaddrs(list) };
    let (_, name) = best?;
    let socket = Socket::new(Domain::IPV4, Type::DGRAM, None).ok()?;
    // SAFETY: all-zero bytes are a valid request.
    let mut request: libc::ifreq = unsafe { zeroed() };
    request.ifr_name = name;
    // SAFETY: the request lives until the call returns; the kernel fills in the MTU.
    let answer = unsafe { libc::ioctl(socket.as_raw_fd(), libc::SIOCGIFMTU, &raw mut request) };
    if answer < 0 {
        tracing::debug!(error = %io::Error::last_os_error(), %addr, "no MTU");
        return None;
    }
    // SAFETY: this request answers the MTU.
    usize::try_from(unsafe { request.ifr_ifru.ifru_mtu }).ok()
}

/// The addresses of this host's interfaces.
#[must_use]
pub fn local_addresses() -> Vec<IpAddr> {
    let mut list: *mut libc::ifaddrs = ptr::null_mut();
    // SAFETY: on success the list is ours until freed below.
    if unsafe { libc::getifaddrs(&raw mut list) } != 0 {
        return Vec::new();
    }
    let mut found = Vec::new();
    let mut at = list;
    while !at.is_null() {
        // SAFETY: a non-null entry of the list.
        let entry = unsafe { &*at };
        found.extend(ip_of(entry.ifa_addr));
        at = entry.ifa_next;
    }
    // SAFETY: the list came from getifaddrs and nothing refers to it any more.
    unsafe { libc::freeifaddrs(list) };
    found
}

fn ip_of(p: *mut libc::sockaddr) -> Option<IpAddr> {
    // SAFETY: an address of the list or null, read only as far as its family says.
    match i32::from(unsafe { p.as_ref() }?.sa_family) {
        libc::AF_INET => {
            // SAFETY: the family says so.
            let a = unsafe { ptr::read_unaligned(p.cast::<libc::sockaddr_in>()) };
            Some(IpAddr::V4(Ipv4Addr::from(u32::from_be(a.sin_addr.s_addr))))
        }
        libc::AF_INET6 => {
            // SAFETY: the family says so.
            let a = unsafe { ptr::read_unaligned(p.cast::<libc::sockaddr_in6>()) };
            Some(IpAddr::V6(Ipv6Addr::from(a.sin6_addr.s6_addr)))
        }
        _ => None,
    }
}

/// How specifically an interface's network holds `addr`, in bits; an exact match counts most.
fn common_network(entry: &libc::ifaddrs, addr: IpAddr) -> Option<u32> {
    let has = ip_of(entry.ifa_addr)?;
    if has == addr {
        return Some(u32::MAX);
    }
    match (has, ip_of(entry.ifa_netmask)?, addr) {
        (IpAddr::V4(a), IpAddr::V4(m), IpAddr::V4(b)) => {
            let m = u32::from(m);
            (m != 0 && u32::from(a) & m == u32::from(b) & m).then(|| m.count_ones())
        }
        (IpAddr::V6(a), IpAddr::V6(m), IpAddr::V6(b)) => {
            let m = u128::from(m);
            (m != 0 && u128::from(a) & m == u128::from(b) & m).then(|| m.count_ones())
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_loopback_interface_holds_its_whole_network() {
        let (one, two) = (Ipv4Addr::new(127, 0, 0, 1), Ipv4Addr::new(127, 9, 9, 9));
        assert!(local_addresses().contains(&one.into()));
        let mtu = interface_mtu(one.into()).expect("a loopback interface");
        assert!(mtu >= 1280);
        assert_eq!(interface_mtu(two.into()), Some(mtu));
    }

    #[test]
    fn a_foreign_address_is_on_no_interface() {
        // TEST-NET-3 (RFC 5737).
        let foreign = Ipv4Addr::new(203, 0, 113, 77).into();
        assert!(!local_addresses().contains(&foreign));
        assert_eq!(interface_mtu(foreign), None);
    }
}
