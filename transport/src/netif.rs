//! Network interfaces of this host: addresses and MTUs.
//!
//! We don't use `nix::ifaddrs` because it copies all names: the software NIC checks its MTU every
//! few seconds, and must not allocate memory in a steady state.

#![allow(
    unsafe_code,
    reason = "walks the C library's list of addresses, and no library wraps the request for an MTU"
)]

mod watch;

use std::ffi::{CStr, c_int};
use std::io;
use std::net::IpAddr;
use std::os::fd::{AsFd, AsRawFd as _};
use std::os::unix::net::UnixDatagram;
use std::ptr;

use nix::sys::socket::{SockaddrLike, SockaddrStorage};
use serde::ser::SerializeStruct;
use serde::{Serialize, Serializer};

pub use watch::{AddressState, AddressWatch};

/// Address of an interface that is up.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Interface {
    /// Interface name.
    pub name: String,
    /// Interface address.
    pub address: IpAddr,
    /// Maximum IP packet size in bytes, or `None` if the interface was just removed.
    pub mtu: Option<u32>,
}

impl Serialize for Interface {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut fields = serializer.serialize_struct("Interface", 4)?;
        fields.serialize_field("interface", &self.name)?;
        fields.serialize_field("address", &self.address)?;
        fields.serialize_field("mtu", &self.mtu)?;
        fields.serialize_field("path_mtu", &self.path_mtu())?;
        fields.end()
    }
}

impl Interface {
    /// Returns the largest RoCE path MTU that fits into a packet, including IPv6, UDP, the longest
    /// transport headers and the ICRC.
    #[must_use]
    pub fn path_mtu(&self) -> Option<u16> {
        // 40 + 8 for IPv6 and UDP, 12 + 16 + 4 for BTH, RETH and immediate data, 4 for the ICRC.
        let room = self.mtu?.saturating_sub(40 + 8 + 12 + 16 + 4 + 4);
        [4096u16, 2048, 1024, 512, 256]
            .into_iter()
            .find(|&mtu| u32::from(mtu) <= room)
    }
}

/// Returns the sorted addresses of all interfaces that are up, without IPv6 link-local addresses.
///
/// # Errors
/// Returns an error from `getifaddrs(3)`.
pub fn interfaces() -> io::Result<Vec<Interface>> {
    let mut found: Vec<_> = Addresses::query()?
        .iter()
        .filter(|entry| entry.is_up && !crate::wire::is_link_local(entry.address))
        .map(|entry| Interface {
            name: String::from_utf8_lossy(entry.name).into_owned(),
            address: entry.address,
            mtu: mtu_of(entry.name),
        })
        .collect();
    found.sort();
    Ok(found)
}

/// Returns the MTU in bytes of the interface that uses `addr` or whose network includes it (for
/// example, 127.0.0.2 belongs to the loopback interface with the address 127.0.0.1). Returns `None`
/// if there is no such interface.
#[must_use]
pub fn interface_mtu(addr: IpAddr) -> Option<u32> {
    mtu_of(Addresses::query().ok()?.holder(addr)?.name)
}

/// Returns the index of the interface that uses `addr` or whose network includes it, or `None` if
/// there is no such interface.
#[must_use]
pub fn interface_index(addr: IpAddr) -> Option<u32> {
    index_of(Addresses::query().ok()?.holder(addr)?.name)
}

/// Returns true if this is an address of this host: it is used by an interface that is up, or
/// included in the network of the loopback interface, as for 127.0.0.0/8.
///
/// We cannot check this by binding a socket, because it is possible to bind to multicast addresses,
/// and to all addresses with `net.ipv4.ip_nonlocal_bind`. Addresses that are only local because of
/// a route (AnyIP) are not included.
///
/// # Errors
/// Returns an error from `getifaddrs(3)`.
pub fn is_local(addr: IpAddr) -> io::Result<bool> {
    LocalAddresses::query().map(|all| all.has(addr))
}

/// Snapshot of the addresses of this host.
pub(crate) struct LocalAddresses(Addresses);

impl LocalAddresses {
    /// Gets the current addresses.
    ///
    /// # Errors
    /// Returns an error from `getifaddrs(3)`.
    pub(crate) fn query() -> io::Result<Self> {
        Addresses::query().map(Self)
    }

    /// Returns whether the address is included. See [`is_local`].
    pub(crate) fn has(&self, addr: IpAddr) -> bool {
        let addr = addr.to_canonical();
        let mut up = self.0.iter().filter(|entry| entry.is_up);
        up.any(|entry| {
            let holds_all = entry.address.is_loopback();
            entry.address == addr || holds_all && entry.common_bits(addr).is_some()
        })
    }
}

/// List returned by getifaddrs(3).
struct Addresses(*mut libc::ifaddrs);

/// IP address of an interface.
struct Entry<'a> {
    name: &'a [u8],
    is_up: bool,
    address: IpAddr,
    netmask: Option<IpAddr>,
}

impl Addresses {
    fn query() -> io::Result<Self> {
        let mut head = ptr::null_mut();
        // SAFETY: on success, `head` has been initialized.
        if unsafe { libc::getifaddrs(&raw mut head) } != 0 {
            return Err(io::Error::last_os_error());
        }
        Ok(Self(head))
    }

    /// Returns the interface address that is equal to `addr` or whose network includes it.
    fn holder(&self, addr: IpAddr) -> Option<Entry<'_>> {
        let entries = self.iter();
        let holding = entries.filter_map(|entry| Some((entry.common_bits(addr)?, entry)));
        // Use the longest prefix, like for routing.
        let best = holding.reduce(|best, next| if next.0 > best.0 { next } else { best });
        best.map(|(_, entry)| entry)
    }

    fn iter(&self) -> impl Iterator<Item = Entry<'_>> {
        // SAFETY: this is either null or a list entry that is valid for the lifetime of `self`.
        let node = |at: *mut libc::ifaddrs| unsafe { at.as_ref() };
        std::iter::successors(node(self.0), move |entry| node(entry.ifa_next)).filter_map(|entry| {
            // SAFETY: the name is a valid string for the lifetime of the list.
            let label = unsafe { CStr::from_ptr(entry.ifa_name) }.to_bytes();
            Some(Entry {
                // For an IPv4 address, this can be a label like `eth0:1` instead of the interface
                // name.
                name: label.split(|&byte| byte == b':').next()?,
                is_up: entry.ifa_flags & libc::IFF_UP as u32 != 0,
                address: ip_of(entry.ifa_addr)?,
                netmask: ip_of(entry.ifa_netmask),
            })
        })
    }
}

impl Drop for Addresses {
    fn drop(&mut self) {
        // SAFETY: the list was returned by getifaddrs and there are no more references to it.
        unsafe { libc::freeifaddrs(self.0) };
    }
}

/// Returns the IP address for a list entry, if it is one.
fn ip_of(address: *const libc::sockaddr) -> Option<IpAddr> {
    // SAFETY: this is either null, which returns `None`, or a socket address matching its address
    // family.
    let address = unsafe { SockaddrStorage::from_raw(address, None) }?;
    let v4 = address.as_sockaddr_in().map(|a| a.ip().into());
    v4.or_else(|| address.as_sockaddr_in6().map(|a| a.ip().into()))
}

impl Entry<'_> {
    /// Returns the prefix length in bits if the interface network includes `addr`. An exact match
    /// has the highest value.
    fn common_bits(&self, addr: IpAddr) -> Option<u32> {
        if self.address == addr {
            return Some(u32::MAX);
        }
        match (self.address, self.netmask?, addr) {
            (IpAddr::V4(a), IpAddr::V4(m), IpAddr::V4(b)) => {
                let m = m.to_bits();
                // An empty mask would match all addresses.
                (m != 0 && a.to_bits() & m == b.to_bits() & m).then(|| m.count_ones())
            }
            (IpAddr::V6(a), IpAddr::V6(m), IpAddr::V6(b)) => {
                let m = m.to_bits();
                (m != 0 && a.to_bits() & m == b.to_bits() & m).then(|| m.count_ones())
            }
            _ => None,
        }
    }
}

/// `struct ifreq` (netdevice(7)) with an interface name and a number.
#[repr(C)]
struct Request {
    name: [u8; libc::IFNAMSIZ],
    number: c_int,
    rest: [u8; size_of::<libc::ifreq>() - libc::IFNAMSIZ - size_of::<c_int>()],
}

const _: () = assert!(size_of::<Request>() == size_of::<libc::ifreq>());

impl Request {
    fn new() -> Self {
        Self {
            name: [0; libc::IFNAMSIZ],
            number: 0,
            rest: [0; _],
        }
    }

    /// Creates a request for an interface name, or returns `None` if it is too long.
    fn named(name: &[u8]) -> Option<Self> {
        let mut request = Self::new();
        // The name is a C string, so the last byte must be zero.
        request.name[..libc::IFNAMSIZ - 1]
            .get_mut(..name.len())?
            .copy_from_slice(name);
        Some(request)
    }

    /// Executes the ioctl in the network namespace of a socket, which can use any address family.
    /// The result is stored in the request.
    fn execute(&mut self, socket: impl AsFd, what: libc::Ioctl) -> io::Result<()> {
        // SAFETY: the request uses the layout of `ifreq` and is valid until the call returns.
        let result = unsafe { libc::ioctl(socket.as_fd().as_raw_fd(), what, ptr::from_mut(self)) };
        if result < 0 {
            return Err(io::Error::last_os_error());
        }
        Ok(())
    }
}

/// Returns a number for an interface name. We don't use sysfs for this, as the mounted sysfs can
/// belong to a different network namespace than the current thread.
fn number_of(name: &[u8], what: libc::Ioctl) -> Option<u32> {
    let mut request = Request::named(name)?;
    let socket = UnixDatagram::unbound().ok()?;
    if let Err(error) = request.execute(&socket, what) {
        let name = String::from_utf8_lossy(name);
        tracing::debug!(%error, %name, "interface not found");
        return None;
    }
    u32::try_from(request.number).ok()
}

/// Returns the MTU for an interface name.
fn mtu_of(name: &[u8]) -> Option<u32> {
    number_of(name, libc::SIOCGIFMTU)
}

/// Returns the index for an interface name.
fn index_of(name: &[u8]) -> Option<u32> {
    number_of(name, libc::SIOCGIFINDEX)
}

/// Returns the flags for an interface index in the network namespace of a socket, or `None` if the
/// interface doesn't exist.
fn link_flags(socket: impl AsFd, index: u32) -> Option<u32> {
    let mut request = Request::new();
    request.number = c_int::try_from(index).ok()?;
    request.execute(&socket, libc::SIOCGIFNAME).ok()?;
    request.execute(&socket, libc::SIOCGIFFLAGS).ok()?;
    // The value is a short integer.
    let [low, high, ..] = request.number.to_ne_bytes();
    Some(u16::from_ne_bytes([low, high]).into())
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use super::*;

    #[test]
    fn loopback_supports_largest_path_mtu() {
        let all = interfaces().unwrap();
        let lo = all
            .iter()
            .find(|i| i.address == IpAddr::from([127, 0, 0, 1]))
            .expect("a host has 127.0.0.1");
        assert_eq!(lo.path_mtu(), Some(4096));
    }

    #[test]
    fn loopback_includes_whole_network() {
        let (one, two) = (Ipv4Addr::new(127, 0, 0, 1), Ipv4Addr::new(127, 9, 9, 9));
        let mtu = interface_mtu(one.into()).expect("a loopback interface");
        assert!(mtu >= 1280);
        assert_eq!(interface_mtu(two.into()), Some(mtu));
    }

    #[test]
    fn foreign_address_has_no_interface() {
        // TEST-NET-3 (RFC 5737).
        let foreign = IpAddr::from([203, 0, 113, 77]);
        assert!(interfaces().unwrap().iter().all(|i| i.address != foreign));
        assert_eq!(interface_mtu(foreign), None);
    }

    #[test]
    fn local_addresses_include_interfaces_and_loopback() {
        for interface in interfaces().unwrap() {
            assert!(is_local(interface.address).unwrap(), "{interface:?}");
        }
        for own in ["127.0.0.1", "127.9.9.9", "::ffff:127.0.0.2"] {
            assert!(is_local(own.parse().unwrap()).unwrap(), "{own}");
        }
        // TEST-NET-3, and other addresses to which sockets can be bound.
        let foreign = ["203.0.113.77", "2001:db8::77"];
        for other in foreign
            .into_iter()
            .chain(["239.1.2.3", "ff05::77", "0.0.0.0", "::"])
        {
            assert!(!is_local(other.parse().unwrap()).unwrap(), "{other}");
        }
    }

    #[test]
    fn ethernet_mtu_allows_path_mtu_1024() {
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
