//! 24-bit numbers used by the transport: packet sequence numbers, queue pair numbers and message
//! sequence numbers, based on a shared 24-bit field.

use core::cmp::Ordering;
use core::fmt;

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

const MASK: u32 = 0x00ff_ffff;

/// 24-bit big-endian field in wire format.
#[derive(
    Clone,
    Copy,
    Default,
    PartialEq,
    Eq,
    Hash,
    FromBytes,
    IntoBytes,
    Immutable,
    KnownLayout,
    Unaligned,
)]
#[repr(transparent)]
pub struct U24([u8; 3]);

const _: () = assert!(size_of::<U24>() == 3);

impl U24 {
    /// Uses the low 24 bits of `value`.
    #[must_use]
    pub const fn new(value: u32) -> Self {
        let bytes = value.to_be_bytes();
        Self([bytes[1], bytes[2], bytes[3]])
    }

    /// Returns the value, 0 to FFFFFFh.
    #[must_use]
    pub const fn value(self) -> u32 {
        u32::from_be_bytes([0, self.0[0], self.0[1], self.0[2]])
    }
}

impl fmt::Debug for U24 {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:#08x}", self.value())
    }
}

/// Defines a number that is encoded as [`U24`] and wraps at 24 bits.
macro_rules! number {
    ($(#[$attribute:meta])* $name:ident) => {
        $(#[$attribute])*
        pub struct $name(u32);

        impl $name {
            /// Uses the low 24 bits of `value`.
            #[must_use]
            pub const fn new(value: u32) -> Self {
                Self(value & MASK)
            }

            /// Returns the value, 0 to FFFFFFh.
            #[must_use]
            pub const fn value(self) -> u32 {
                self.0
            }
        }

        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, concat!(stringify!($name), "({:#08x})"), self.0)
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "{:#08x}", self.0)
            }
        }

        impl From<U24> for $name {
            fn from(raw: U24) -> Self {
                Self(raw.value())
            }
        }

        impl From<$name> for U24 {
            fn from(number: $name) -> Self {
                Self::new(number.0)
            }
        }
    };
}

number! {
    /// Packet sequence number, modulo 2²⁴ (IBTA 9.7.1).
    ///
    /// This does not implement `Ord`, because PSNs can only be compared within half the number
    /// space and the order is not transitive. Use [`Self::window_cmp`] or the other explicit
    /// methods instead.
    #[derive(Clone, Copy, Default, PartialEq, Eq, Hash)]
    Psn
}

number! {
    /// Queue pair number, 24 bits.
    #[derive(Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
    Qpn
}

number! {
    /// Number of messages completed by a responder, modulo 2²⁴ (IBTA 9.7.7.1).
    #[derive(Clone, Copy, Default, PartialEq, Eq, Hash)]
    Msn
}

impl Psn {
    /// Half of the number space. If the distance between two PSNs exceeds this, the result of a
    /// comparison is reversed.
    pub const HALF: u32 = 1 << 23;

    /// Returns the next PSN.
    #[must_use]
    pub const fn next(self) -> Self {
        self.add(1)
    }

    /// Returns the previous PSN, modulo 2^24.
    #[must_use]
    pub const fn prev(self) -> Self {
        self.sub(1)
    }

    /// Returns the PSN incremented by `count`, wrapping.
    #[must_use]
    #[allow(
        clippy::should_implement_trait,
        reason = "wrapping must stay visible by name in const code"
    )]
    pub const fn add(self, count: u32) -> Self {
        Self(self.0.wrapping_add(count) & MASK)
    }

    /// Returns the PSN decremented by `count`, wrapping.
    #[must_use]
    #[allow(
        clippy::should_implement_trait,
        reason = "wrapping must stay visible by name in const code"
    )]
    pub const fn sub(self, count: u32) -> Self {
        Self(self.0.wrapping_sub(count) & MASK)
    }

    /// Returns the forward distance from `self` to `later`, `0..2²⁴`.
    #[must_use]
    pub const fn distance_to(self, later: Self) -> u32 {
        later.0.wrapping_sub(self.0) & MASK
    }

    /// Returns the signed difference `self - other`, in `-2²³..2²³`.
    #[must_use]
    pub const fn diff(self, other: Self) -> i32 {
        // The shift moves the sign bit of the 24-bit difference to bit 31.
        ((self.0.wrapping_sub(other.0) << 8) as i32) >> 8
    }

    /// Compares two PSNs within half the number space (IBTA 9.7.1: the responder's valid, duplicate
    /// and out-of-sequence regions).
    #[must_use]
    pub fn window_cmp(self, other: Self) -> Ordering {
        self.diff(other).cmp(&0)
    }

    /// Returns true if `self` is in the half of the number space before `other`.
    #[must_use]
    pub const fn is_before(self, other: Self) -> bool {
        self.diff(other) < 0
    }

    /// Returns whether `self` is in the half of the number space after `other`.
    #[must_use]
    pub const fn is_after(self, other: Self) -> bool {
        self.diff(other) > 0
    }

    /// Returns true if `self` is within the range of `count` PSNs starting at `first`.
    #[must_use]
    pub const fn is_within(self, first: Self, count: u32) -> bool {
        first.distance_to(self) < count
    }
}

impl Qpn {
    /// Queue pair 0, used for subnet management. Not used by RoCE.
    pub const SMI: Self = Self(0);
    /// Queue pair 1, general services interface.
    pub const GSI: Self = Self(1);
    /// Destination used for multicast datagrams (IBTA 10.5.2).
    pub const MULTICAST: Self = Self(MASK);
}

impl Msn {
    /// Returns the count incremented by one message.
    #[must_use]
    pub const fn next(self) -> Self {
        Self(self.0.wrapping_add(1) & MASK)
    }

    /// Returns the number of messages from `self` to `later`, `0..2²⁴`.
    #[must_use]
    pub const fn distance_to(self, later: Self) -> u32 {
        later.0.wrapping_sub(self.0) & MASK
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn psn_wraps_at_24_bits() {
        assert_eq!(Psn::new(0xff_ffff).next(), Psn::new(0));
        assert_eq!(Psn::new(0).prev(), Psn::new(0xff_ffff));
        assert!(Psn::new(0xff_ffff).is_before(Psn::new(0)));
        assert!(Psn::new(2).is_after(Psn::new(0xff_fff0)));
        assert_eq!(Psn::new(0xff_fffe).distance_to(Psn::new(3)), 5);
        assert_eq!(Psn::new(3).diff(Psn::new(0xff_fffe)), 5);
        assert_eq!(Psn::new(0xff_fffe).diff(Psn::new(3)), -5);
        assert!(Psn::new(1).is_within(Psn::new(0xff_ffff), 3));
        assert!(!Psn::new(2).is_within(Psn::new(0xff_ffff), 3));
        assert_eq!(Msn::new(0xff_ffff).next(), Msn::new(0));
    }

    proptest! {
        #[test]
        fn order_and_distance_agree(start: u32, steps in 1u32..Psn::HALF) {
            let a = Psn::new(start);
            let b = a.add(steps);
            prop_assert!(a.is_before(b) && b.is_after(a));
            prop_assert_eq!(a.distance_to(b), steps);
            prop_assert_eq!(i64::from(b.diff(a)), i64::from(steps));
            prop_assert_eq!(b.sub(steps), a);
            prop_assert_eq!(a.window_cmp(b), Ordering::Less);
            prop_assert_eq!(Psn::from(U24::from(a)), a);
        }
    }
}
