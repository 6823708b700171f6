//! Handles and keys.

use std::fmt;

/// A handle: a slot and the generation of its present owner.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Handle {
    index: u32,
    generation: u32,
}

impl Handle {
    /// A handle of slot `index` in its `generation`-th use. For providers.
    #[must_use]
    pub const fn new(index: u32, generation: u32) -> Self {
        Self { index, generation }
    }

    /// Index of the slot.
    #[must_use]
    pub const fn index(self) -> usize {
        self.index as usize
    }

    /// Number of the use of the slot.
    #[must_use]
    pub const fn generation(self) -> u32 {
        self.generation
    }
}

macro_rules! handles {
    ($($(#[$doc:meta])* $name:ident)*) => {$(
        $(#[$doc])*
        #[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
        pub struct $name(pub Handle);

        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, concat!(stringify!($name), "({}.{})"), self.0.index(), self.0.generation())
            }
        }

        impl From<Handle> for $name {
            fn from(h: Handle) -> Self {
                Self(h)
            }
        }

        impl From<$name> for Handle {
            fn from(id: $name) -> Handle {
                id.0
            }
        }
    )*};
}

handles! {
    /// Handle of a protection domain.
    PdId
    /// A memory region, registered or for fast registration.
    MrId
    /// A memory window.
    MwId
    /// Handle of a completion queue.
    CqId
    /// A shared receive queue.
    SrqId
    /// Handle of a queue pair.
    QpId
    /// Handle of an address handle.
    AhId
    /// Handle of an XRC domain (IBTA annex A14).
    XrcdId
    /// An identifier of the RDMA CM: a listener, a connection, or one about to be.
    CmId
}

/// Local key: names a region in a scatter list of this device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
#[repr(transparent)]
pub struct LKey(pub u32);

/// Remote key: names a region, on the wire, to the peer that may use it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub struct RKey(pub u32);

/// The caller's own value, handed back in the completion of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub struct WrId(pub u64);

/// A partition key; the top bit marks full membership.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct PKey(pub u16);

impl PKey {
    /// The default partition, full member: the only one on RoCE.
    pub const DEFAULT: Self = Self(0xffff);
}

/// A queue key, checked on datagrams.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct QKey(pub u32);

impl QKey {
    /// The well-known queue key of queue pair 1 (IBTA 13.2.2).
    pub const GSI: Self = Self(0x8001_0000);
}

/// A global identifier: 16 bytes in network order. On RoCEv2 an IPv6 address, or an IPv4 address
/// mapped into one.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct Gid(pub [u8; 16]);

impl Gid {
    /// The address that the GID stands for; an IPv4-mapped one comes back as IPv4.
    #[must_use]
    pub fn ip(self) -> std::net::IpAddr {
        std::net::Ipv6Addr::from(self.0).to_canonical()
    }
}

impl From<std::net::IpAddr> for Gid {
    fn from(ip: std::net::IpAddr) -> Self {
        match ip {
            std::net::IpAddr::V4(v4) => Self(v4.to_ipv6_mapped().octets()),
            std::net::IpAddr::V6(v6) => Self(v6.octets()),
        }
    }
}

impl fmt::Debug for Gid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", std::net::Ipv6Addr::from(self.0))
    }
}

impl fmt::Display for Gid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(self, f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_gid_is_the_address_it_stands_for() {
        for text in ["127.0.0.1", "10.99.0.2", "fe80::1", "2001:db8::7"] {
            let ip: std::net::IpAddr = text.parse().unwrap();
            assert_eq!(Gid::from(ip).ip(), ip);
        }
        let v4 = Gid::from("192.0.2.1".parse::<std::net::IpAddr>().unwrap());
        assert_eq!(
            v4.0,
            [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 192, 0, 2, 1]
        );
    }
}
