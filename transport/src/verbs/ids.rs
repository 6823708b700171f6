//! Handles and keys.

use std::fmt;

/// Handle, consisting of a slot and its current generation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Handle {
    index: u32,
    generation: u32,
}

impl Handle {
    /// Creates a handle for a slot. Only used by providers.
    #[must_use]
    pub const fn new(index: u32, generation: u32) -> Self {
        Self { index, generation }
    }

    /// Returns the slot index.
    #[must_use]
    pub const fn index(self) -> usize {
        self.index as usize
    }

    /// Returns the slot generation.
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
    /// Protection domain handle.
    PdId
    /// Memory region handle, including fast-registration regions.
    MrId
    /// Memory window handle.
    MwId
    /// Completion queue handle.
    CqId
    /// Shared receive queue handle.
    SrqId
    /// Queue pair handle.
    QpId
    /// Address handle.
    AhId
    /// XRC domain handle (IBTA annex A14).
    XrcdId
    /// RDMA CM ID: a listener or a connection, which may not be established yet.
    CmId
}

/// Local key, used in a scatter list for this device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
#[repr(transparent)]
pub struct LKey(pub u32);

/// Remote key, sent to a peer to provide access to a region.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub struct RKey(pub u32);

/// Work request ID, set by the caller and returned in the completion.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub struct WrId(pub u64);

/// Partition key. The top bit indicates full membership.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct PKey(pub u16);

impl PKey {
    /// Default partition with full membership, which is the only partition on RoCE.
    pub const DEFAULT: Self = Self(0xffff);
}

/// Queue key, checked for datagrams.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct QKey(pub u32);

impl QKey {
    /// Well-known Q_Key for queue pair 1 (IBTA 13.2.2).
    pub const GSI: Self = Self(0x8001_0000);
}

/// Global identifier: 16 bytes in network order. On RoCEv2, this is an IPv6 address or an
/// IPv4-mapped address.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct Gid(pub [u8; 16]);

impl Gid {
    /// Returns the IP address for this GID. An IPv4-mapped address is returned as IPv4.
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
    fn gid_converts_to_ip_address() {
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
