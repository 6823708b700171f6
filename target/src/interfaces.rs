//! What this host has to listen on: addresses for the software NIC, and RDMA devices.

#![allow(
    unsafe_code,
    reason = "getifaddrs has no safe wrapper in the standard library"
)]

use std::ffi::CStr;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::ptr;

/// An address of an interface that is up.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Interface {
    /// The interface's name.
    pub name: String,
    /// The address.
    pub address: IpAddr,
    /// Largest IP packet in bytes, where the system tells.
    pub mtu: Option<u32>,
}

impl Interface {
    /// The largest RoCE path MTU that fits: the packet less IPv6, UDP, the longest transport
    /// headers and the ICRC.
    #[must_use]
    pub fn path_mtu(&self) -> Option<u16> {
        // 40 + 8 for IPv6 and UDP, 12 + 16 + 4 for BTH, RETH and immediate, 4 for the ICRC.
        let room = self.mtu?.saturating_sub(40 + 8 + 12 + 16 + 4 + 4);
        [4096u16, 2048, 1024, 512, 256]
            .into_iter()
            .find(|&mtu| u32::from(mtu) <= room)
    }
}

/// The addresses of all interfaces that are up, link-local IPv6 ones excepted, sorted.
///
/// # Errors
/// The error of `getifaddrs(3)`.
pub fn interfaces() -> io::Result<Vec<Interface>> {
    let mut head: *mut libc::ifaddrs = ptr::null_mut();
    // SAFETY: the call fills `head`, or fails.
    if unsafe { libc::getifaddrs(&raw mut head) } != 0 {
        return Err(io::Error::last_os_error());
    }
    let mut found = Vec::new();
    let mut next = head;
    while !next.is_null() {
        // SAFETY: a node of the list that the call made, which is freed only below.
        let node = unsafe { &*next };
        next = node.ifa_next;
        if node.ifa_flags & libc::IFF_UP as u32 == 0 {
            continue;
        }
        // SAFETY: the node's address is null or a socket address of its own family.
        let Some(address) = (unsafe { address(node.ifa_addr) }) else {
            continue;
        };
        // SAFETY: the name is a string that lives as long as the list.
        let name = unsafe { CStr::from_ptr(node.ifa_name) };
        let name = name.to_string_lossy().into_owned();
        let mtu = std::fs::read_to_string(format!("/sys/class/net/{name}/mtu"))
            .ok()
            .and_then(|s| s.trim().parse().ok());
        found.push(Interface { name, address, mtu });
    }
    // SAFETY: the list came from getifaddrs and is not used any more.
    unsafe { libc::freeifaddrs(head) };
    found.retain(|i| match i.address {
        IpAddr::V6(a) => !a.is_unicast_link_local(),
        IpAddr::V4(_) => true,
    });
    found.sort();
    Ok(found)
}

/// # Safety
/// `addr` is null or points to a socket address of the family that it names.
unsafe fn address(addr: *const libc::sockaddr) -> Option<IpAddr> {
    if addr.is_null() {
        return None;
    }
    // SAFETY: the caller's promise; the structure read is that of the family.
    unsafe {
        match i32::from((*addr).sa_family) {
            libc::AF_INET => {
                let a = ptr::read_unaligned(addr.cast::<libc::sockaddr_in>());
                Some(Ipv4Addr::from(u32::from_be(a.sin_addr.s_addr)).into())
            }
            libc::AF_INET6 => {
                let a = ptr::read_unaligned(addr.cast::<libc::sockaddr_in6>());
                Some(Ipv6Addr::from(a.sin6_addr.s6_addr).into())
            }
            _ => None,
        }
    }
}

/// Names of the RDMA devices that the kernel has, sorted; empty where it has no RDMA.
#[must_use]
pub fn rdma_devices() -> Vec<String> {
    let mut names: Vec<String> = std::fs::read_dir("/sys/class/infiniband")
        .into_iter()
        .flatten()
        .filter_map(|entry| entry.ok()?.file_name().into_string().ok())
        .collect();
    names.sort();
    names
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_loopback_interface_is_found_and_fits_the_largest_mtu() {
        let all = interfaces().unwrap();
        let lo = all
            .iter()
            .find(|i| i.address == IpAddr::from([127, 0, 0, 1]))
            .expect("a host has 127.0.0.1");
        assert_eq!(lo.path_mtu(), Some(4096));
    }

    #[test]
    fn an_ethernet_frame_carries_1024() {
        let with = |mtu| Interface {
            name: "e".into(),
            address: IpAddr::from([10, 0, 0, 1]),
            mtu,
        };
        assert_eq!(with(Some(1500)).path_mtu(), Some(1024));
        assert_eq!(with(Some(9000)).path_mtu(), Some(4096));
        assert_eq!(with(Some(300)).path_mtu(), None);
        assert_eq!(with(None).path_mtu(), None);
    }
}
