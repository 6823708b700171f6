//! This host's network interfaces: their addresses and MTUs.

#![allow(
    unsafe_code,
    reason = "neither rustix nor nix wraps the interface request for an MTU"
)]

use std::io;
use std::net::IpAddr;
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixDatagram;

use nix::ifaddrs::{InterfaceAddress, getifaddrs};
use nix::net::if_::InterfaceFlags;
use nix::sys::socket::SockaddrStorage;

/// An address of an interface that is up.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Interface {
    /// The interface's name.
    pub name: String,
    /// The address.
    pub address: IpAddr,
    /// Largest IP packet in bytes; `None` if the interface has just gone.
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
    let mut found: Vec<_> = getifaddrs()?
        .filter(|entry| entry.flags.contains(InterfaceFlags::IFF_UP))
        .filter_map(|entry| Some((ip_of(entry.address.as_ref()?)?, entry)))
        .filter(|(address, _)| !crate::wire::is_link_local(*address))
        .map(|(address, entry)| Interface {
            name: name_of(&entry).to_owned(),
            address,
            mtu: mtu_of(name_of(&entry)),
        })
        .collect();
    found.sort();
    Ok(found)
}

/// The MTU in bytes of the interface that has `addr`, or whose network holds it (as 127.0.0.2 is on
/// the loopback interface that has 127.0.0.1). `None` if there is none.
#[must_use]
pub fn interface_mtu(addr: IpAddr) -> Option<u32> {
    let entries = getifaddrs().ok()?;
    let holding = entries.filter_map(|entry| Some((common_bits(&entry, addr)?, entry)));
    let (_, best) = holding.reduce(|best, next| if next.0 > best.0 { next } else { best })?;
    mtu_of(name_of(&best))
}

/// The name of the interface. An IPv4 address may have a label, `eth0:1`, which the C library gives
/// in place of the name.
fn name_of(entry: &InterfaceAddress) -> &str {
    let label = &entry.interface_name;
    label.split_once(':').map_or(label, |(name, _)| name)
}

fn ip_of(address: &SockaddrStorage) -> Option<IpAddr> {
    let v4 = address.as_sockaddr_in().map(|a| a.ip().into());
    v4.or_else(|| address.as_sockaddr_in6().map(|a| a.ip().into()))
}

/// Length in bits of the prefix by which an interface's network holds `addr`; an exact match counts
/// most.
fn common_bits(entry: &InterfaceAddress, addr: IpAddr) -> Option<u32> {
    let has = ip_of(entry.address.as_ref()?)?;
    if has == addr {
        return Some(u32::MAX);
    }
    match (has, ip_of(entry.netmask.as_ref()?)?, addr) {
        (IpAddr::V4(a), IpAddr::V4(m), IpAddr::V4(b)) => {
            let m = m.to_bits();
            (m != 0 && a.to_bits() & m == b.to_bits() & m).then(|| m.count_ones())
        }
        (IpAddr::V6(a), IpAddr::V6(m), IpAddr::V6(b)) => {
            let m = m.to_bits();
            (m != 0 && a.to_bits() & m == b.to_bits() & m).then(|| m.count_ones())
        }
        _ => None,
    }
}

/// `struct ifreq` (netdevice(7)) as `SIOCGIFMTU` uses it: a name in, the MTU out.
#[repr(C)]
struct MtuRequest {
    name: [u8; libc::IFNAMSIZ],
    mtu: libc::c_int,
    rest: [u8; size_of::<libc::ifreq>() - libc::IFNAMSIZ - size_of::<libc::c_int>()],
}

const _: () = assert!(size_of::<MtuRequest>() == size_of::<libc::ifreq>());

/// The MTU of an interface by its name. It is asked of the kernel and not read from sysfs, whose
/// mount may show another network namespace than the calling thread's.
fn mtu_of(name: &str) -> Option<u32> {
    let mut request = MtuRequest {
        name: [0; libc::IFNAMSIZ],
        mtu: 0,
        rest: [0; _],
    };
    // The last byte stays zero: the name is a C string.
    request.name[..libc::IFNAMSIZ - 1]
        .get_mut(..name.len())?
        .copy_from_slice(name.as_bytes());
    // The request goes to the network namespace of a socket of any family.
    let socket = UnixDatagram::unbound().ok()?;
    // SAFETY: the request has the layout of an `ifreq` and lives until the call returns.
    let answer = unsafe { libc::ioctl(socket.as_raw_fd(), libc::SIOCGIFMTU, &raw mut request) };
    if answer < 0 {
        tracing::debug!(error = %io::Error::last_os_error(), name, "no MTU");
        return None;
    }
    u32::try_from(request.mtu).ok()
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

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
    fn the_loopback_interface_holds_its_whole_network() {
        let (one, two) = (Ipv4Addr::new(127, 0, 0, 1), Ipv4Addr::new(127, 9, 9, 9));
        let mtu = interface_mtu(one.into()).expect("a loopback interface");
        assert!(mtu >= 1280);
        assert_eq!(interface_mtu(two.into()), Some(mtu));
    }

    #[test]
    fn a_foreign_address_is_on_no_interface() {
        // TEST-NET-3 (RFC 5737).
        let foreign = IpAddr::from([203, 0, 113, 77]);
        assert!(interfaces().unwrap().iter().all(|i| i.address != foreign));
        assert_eq!(interface_mtu(foreign), None);
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
