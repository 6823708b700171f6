//! What this host offers a program that wants an RDMA device, for people: addresses for the software
//! NIC, and the devices behind rdma-core, or why there are none.

#![allow(
    unsafe_code,
    reason = "getifaddrs has no safe wrapper in the standard library"
)]

use std::error::Error;
use std::ffi::CStr;
use std::fmt;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::ptr;

use crate::rdma_core::{self, DeviceSummary};

/// What a host has. Its text form is a few lines, each of which names the provider that it is about.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Host {
    /// Addresses that the software NIC can have.
    pub interfaces: Vec<Interface>,
    /// Names of the RDMA devices that the kernel has.
    pub kernel: Vec<String>,
    /// The devices that libibverbs finds, or why there are none.
    pub rdma_core: Result<Vec<DeviceSummary>, String>,
}

impl Host {
    /// Looks at this host.
    ///
    /// # Errors
    /// The addresses cannot be listed.
    pub fn look() -> io::Result<Self> {
        let found = rdma_core::devices().map_err(|e| with_causes(&rdma_core::OpenError::from(e)));
        let some = |devices: Vec<DeviceSummary>| match devices.is_empty() {
            true => Err("the kernel has none".to_owned()),
            false => Ok(devices),
        };
        Ok(Self {
            interfaces: interfaces()?,
            kernel: rdma_devices(),
            rdma_core: found.and_then(some),
        })
    }
}

/// An error and what it came from, on one line.
fn with_causes(error: &dyn Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        // Some errors say their cause themselves.
        let said = error.to_string();
        if !text.ends_with(&said) {
            text = format!("{text}: {said}");
        }
        cause = error.source();
    }
    text
}

impl fmt::Display for Host {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "roce, the software NIC, can have:")?;
        for i in &self.interfaces {
            let mtu = i
                .path_mtu()
                .map_or("unknown".into(), |m| format!("up to {m}"));
            let address = i.address.to_string();
            writeln!(f, "  {address:<39} {:<15} path MTU {mtu}", i.name)?;
        }
        match self.kernel.as_slice() {
            [] => writeln!(f, "RDMA devices of the kernel: none")?,
            names => writeln!(f, "RDMA devices of the kernel: {}", names.join(", "))?,
        }
        match &self.rdma_core {
            Err(why) => write!(f, "rdma_core: no devices, because {why}"),
            Ok(devices) => {
                let line = |d: &DeviceSummary| {
                    let addrs: Vec<_> = d.addrs.iter().map(ToString::to_string).collect();
                    let state = if d.active { "" } else { ", not active" };
                    format!("rdma_core: {} at {}{state}", d.name, addrs.join(", "))
                };
                let lines: Vec<_> = devices.iter().map(line).collect();
                write!(f, "{}", lines.join("\n"))
            }
        }
    }
}

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
        // An IPv4 address may have a label, `eth0:1`, which the C library gives as the name of its interface.
        let name = name.to_string_lossy();
        let name = name.split(':').next().unwrap_or_default().to_owned();
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
    fn a_host_says_what_it_has_and_why_it_lacks_the_rest() {
        let mut host = Host {
            interfaces: vec![Interface {
                name: "eth0".into(),
                address: IpAddr::from([192, 0, 2, 1]),
                mtu: Some(1500),
            }],
            kernel: vec![],
            rdma_core: Err("rdma-core is not installed: libibverbs.so.1: not found".into()),
        };
        let expected = "roce, the software NIC, can have:\n  \
            192.0.2.1                               eth0            path MTU up to 1024\n\
            RDMA devices of the kernel: none\n\
            rdma_core: no devices, because rdma-core is not installed: libibverbs.so.1: not found";
        assert_eq!(host.to_string(), expected);
        host.kernel = vec!["rxe0".into(), "rxe1".into()];
        let device = |name: &str, active| DeviceSummary {
            name: name.into(),
            guid: 1,
            active,
            addrs: vec![[192, 0, 2, 1].into(), "fd99::1".parse().unwrap()],
        };
        host.rdma_core = Ok(vec![device("rxe0", true), device("rxe1", false)]);
        let text = host.to_string();
        let tail: Vec<_> = text.lines().skip(2).collect();
        assert_eq!(
            tail,
            [
                "RDMA devices of the kernel: rxe0, rxe1",
                "rdma_core: rxe0 at 192.0.2.1, fd99::1",
                "rdma_core: rxe1 at 192.0.2.1, fd99::1, not active",
            ]
        );
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
