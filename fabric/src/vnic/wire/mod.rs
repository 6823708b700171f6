//! Wire formats.

pub mod attr;
pub mod mad;
pub mod packet;

use std::fmt;

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// A MAC address, in wire order.
#[derive(
    Clone,
    Copy,
    Default,
    PartialEq,
    Eq,
    Hash,
    PartialOrd,
    Ord,
    FromBytes,
    IntoBytes,
    Immutable,
    KnownLayout,
    Unaligned,
)]
#[repr(transparent)]
pub struct Mac(pub [u8; 6]);

impl Mac {
    /// Returns whether this is a group address (IEEE 802, the I/G bit).
    #[must_use]
    pub const fn is_multicast(self) -> bool {
        self.0[0] & 1 != 0
    }

    /// Returns whether the address is locally administered (IEEE 802, the U/L bit).
    #[must_use]
    pub const fn is_local(self) -> bool {
        self.0[0] & 2 != 0
    }

    /// Returns whether all bytes are zero, which is an invalid address.
    #[must_use]
    pub fn is_zero(self) -> bool {
        self == Self::default()
    }

    /// Returns the locally administered address of a LID: the last three bytes are the LID, with
    /// the lowest byte first. If an address is not in a table, senders derive the LID from it.
    #[must_use]
    pub const fn of_lid(lid: Lid) -> Self {
        let [low, middle, high, _] = lid.0.to_le_bytes();
        Self([0x02, 0, 0, low, middle, high])
    }

    /// Returns the LID in a locally administered address.
    #[must_use]
    pub const fn lid(self) -> Lid {
        let [.., low, middle, high] = self.0;
        Lid(u32::from_le_bytes([low, middle, high, 0]))
    }
}

impl fmt::Display for Mac {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [a, b, c, d, e, g] = self.0;
        write!(f, "{a:02x}:{b:02x}:{c:02x}:{d:02x}:{e:02x}:{g:02x}")
    }
}

impl fmt::Debug for Mac {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// A 24-bit local identifier: the address of a port, or of all ports of a virtual switch. 0 is
/// invalid.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Lid(pub u32);

impl Lid {
    /// Invalid address.
    pub const NONE: Self = Self(0);
    /// First multicast address: the top four bits are ones (`OPA_MCAST_NR`).
    pub const MULTICAST: Self = Self(0xf0_0000);

    /// Returns whether this is a multicast address.
    #[must_use]
    pub const fn is_multicast(self) -> bool {
        self.0 >= Self::MULTICAST.0
    }
}

/// 32-bit FNV-1a hash.
pub(super) fn fnv1a<'a>(bytes: impl IntoIterator<Item = &'a u8>) -> u32 {
    bytes.into_iter().fold(0x811c_9dc5, |hash, byte| {
        (hash ^ u32::from(*byte)).wrapping_mul(0x0100_0193)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn local_address_contains_lid() {
        let mac = Mac::of_lid(Lid(0x01_0203));
        assert_eq!(mac.to_string(), "02:00:00:03:02:01");
        assert_eq!(mac.lid(), Lid(0x01_0203));
        assert!(mac.is_local() && !mac.is_multicast() && !mac.is_zero());
        assert!(Lid(0xf0_0000).is_multicast() && !Lid(0xef_ffff).is_multicast());
    }
}
