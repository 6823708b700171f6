//! This host's network interfaces: their addresses and MTUs.
//!
//! The list is walked here and not by `nix::ifaddrs`, which copies every name: the software NIC
//! looks up its MTU every few seconds, and a worker that has warmed up allocates nothing.

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

pub use watch::{AddressState, AddressWatch};

/// An address of an interface that is up.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Interface {
    /// Name of the interface.
    pub name: String,
    /// Address of the interface.
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
    let mut found: Vec<_> = Addresses::look()?
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

/// The MTU in bytes of the interface that has `addr`, or whose network holds it (as 127.0.0.2 is on
/// the loopback interface that has 127.0.0.1). `None` if there is none.
#[must_use]
pub fn interface_mtu(addr: IpAddr) -> Option<u32> {
    mtu_of(Addresses::look().ok()?.holder(addr)?.name)
}

/// The index of the interface that has `addr`, or whose network holds it; `None` if there is none.
#[must_use]
pub fn interface_index(addr: IpAddr) -> Option<u32> {
    index_of(Addresses::look().ok()?.holder(addr)?.name)
}

/// Whether an address is one of this host's: an interface that is up has it, or the loopback
/// interface holds it, as it does all of 127.0.0.0/8.
///
/// Binding a socket does not show that: multicast addresses can be bound, and with
/// `net.ipv4.ip_nonlocal_bind` all addresses. Addresses that are local by a route only (AnyIP) are
/// not among the host's.
///
/// # Errors
/// The error of `getifaddrs(3)`.
pub fn is_local(addr: IpAddr) -> io::Result<bool> {
    LocalAddresses::look().map(|all| all.has(addr))
}

/// The addresses of this host at one time.
pub(crate) struct LocalAddresses(Addresses);

impl LocalAddresses {
    /// Those of now.
    ///
    /// # Errors
    /// The error of `getifaddrs(3)`.
    pub(crate) fn look() -> io::Result<Self> {
        Addresses::look().map(Self)
    }

    /// Whether an address is one of them. See [`is_local`].
    pub(crate) fn has(&self, addr: IpAddr) -> bool {
        let addr = addr.to_canonical();
        let mut up = self.0.iter().filter(|entry| entry.is_up);
        up.any(|entry| {
            let holds_all = entry.address.is_loopback();
            entry.address == addr || holds_all && entry.common_bits(addr).is_some()
        })
    }
}

/// The list of getifaddrs(3).
struct Addresses(*mut libc::ifaddrs);

/// An IP address of an interface.
struct Entry<'a> {
    name: &'a [u8],
    is_up: bool,
    address: IpAddr,
    netmask: Option<IpAddr>,
}

impl Addresses {
    fn look() -> io::Result<Self> {
        let mut head = ptr::null_mut();
        // SAFETY: the call fills `head`, or fails.
        if unsafe { libc::getifaddrs(&raw mut head) } != 0 {
            return Err(io::Error::last_os_error());
        }
        Ok(Self(head))
    }

    /// The address by which an interface has `addr`, or holds it.
    fn holder(&self, addr: IpAddr) -> Option<Entry<'_>> {
        let entries = self.iter();
        let holding = entries.filter_map(|entry| Some((entry.common_bits(addr)?, entry)));
        // The longest prefix, as routing would decide.
        let best = holding.reduce(|best, next| if next.0 > best.0 { next } else { best });
        best.map(|(_, entry)| entry)
    }

    fn iter(&self) -> impl Iterator<Item = Entry<'_>> {
        // SAFETY: null or a node of the list, which lives as long as `self`.
        let node = |at: *mut libc::ifaddrs| unsafe { at.as_ref() };
        std::iter::successors(node(self.0), move |entry| node(entry.ifa_next)).filter_map(|entry| {
            // SAFETY: the name is a string that lives as long as the list.
            let label = unsafe { CStr::from_ptr(entry.ifa_name) }.to_bytes();
            Some(Entry {
                // An IPv4 address may have a label, `eth0:1`, which stands in the place of the
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
        // SAFETY: the list came from getifaddrs, and nothing refers to it any longer.
        unsafe { libc::freeifaddrs(self.0) };
    }
}

/// The IP address of a list's socket address, if it is one.
fn ip_of(address: *const libc::sockaddr) -> Option<IpAddr> {
    // SAFETY: null, which is refused, or a socket address of the family that it names.
    let address = unsafe { SockaddrStorage::from_raw(address, None) }?;
    let v4 = address.as_sockaddr_in().map(|a| a.ip().into());
    v4.or_else(|| address.as_sockaddr_in6().map(|a| a.ip().into()))
}

impl Entry<'_> {
    /// Length in bits of the prefix by which the interface's network holds `addr`; an exact match
    /// counts most.
    fn common_bits(&self, addr: IpAddr) -> Option<u32> {
        if self.address == addr {
            return Some(u32::MAX);
        }
        match (self.address, self.netmask?, addr) {
            (IpAddr::V4(a), IpAddr::V4(m), IpAddr::V4(b)) => {
                let m = m.to_bits();
                // A mask of no bits holds every address, and says nothing.
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

/// `struct ifreq` (netdevice(7)) with the name of an interface and a number.
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

    /// About an interface by its name; `None` for one that is too long.
    fn named(name: &[u8]) -> Option<Self> {
        let mut request = Self::new();
        // The last byte stays zero: the name is a C string.
        request.name[..libc::IFNAMSIZ - 1]
            .get_mut(..name.len())?
            .copy_from_slice(name);
        Some(request)
    }

    /// Asks the kernel in the network namespace of a socket, which may be of any family; the answer
    /// is in the request.
    fn ask(&mut self, socket: impl AsFd, what: libc::Ioctl) -> io::Result<()> {
        // SAFETY: the request has the layout of an `ifreq` and lives until the call returns.
        let answer = unsafe { libc::ioctl(socket.as_fd().as_raw_fd(), what, ptr::from_mut(self)) };
        if answer < 0 {
            return Err(io::Error::last_os_error());
        }
        Ok(())
    }
}

/// The number that the kernel has for an interface by its name. It is asked of the kernel and not
/// read from sysfs, whose mount may show another network namespace than the calling thread's.
fn number_of(name: &[u8], what: libc::Ioctl) -> Option<u32> {
    let mut request = Request::named(name)?;
    let socket = UnixDatagram::unbound().ok()?;
    if let Err(error) = request.ask(&socket, what) {
        let name = String::from_utf8_lossy(name);
        tracing::debug!(%error, %name, "the interface is not there");
        return None;
    }
    u32::try_from(request.number).ok()
}

/// The MTU of an interface by its name.
fn mtu_of(name: &[u8]) -> Option<u32> {
    number_of(name, libc::SIOCGIFMTU)
}

/// The index of an interface by its name.
fn index_of(name: &[u8]) -> Option<u32> {
    number_of(name, libc::SIOCGIFINDEX)
}

/// The flags of an interface by its index, in the network namespace of a socket; `None` where there
/// is none.
fn link_flags(socket: impl AsFd, index: u32) -> Option<u32> {
    let mut request = Request::new();
    request.number = c_int::try_from(index).ok()?;
    request.ask(&socket, libc::SIOCGIFNAME).ok()?;
    request.ask(&socket, libc::SIOCGIFFLAGS).ok()?;
    // A short integer.
    let [low, high, ..] = request.number.to_ne_bytes();
    Some(u16::from_ne_bytes([low, high]).into())
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
    fn the_addresses_of_a_host_are_those_of_its_interfaces_and_of_loopback() {
        for interface in interfaces().unwrap() {
            assert!(is_local(interface.address).unwrap(), "{interface:?}");
        }
        for own in ["127.0.0.1", "127.9.9.9", "::ffff:127.0.0.2"] {
            assert!(is_local(own.parse().unwrap()).unwrap(), "{own}");
        }
        // TEST-NET-3, and addresses that sockets can be bound to all the same.
        let foreign = ["203.0.113.77", "2001:db8::77"];
        for other in foreign
            .into_iter()
            .chain(["239.1.2.3", "ff05::77", "0.0.0.0", "::"])
        {
            assert!(!is_local(other.parse().unwrap()).unwrap(), "{other}");
        }
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
