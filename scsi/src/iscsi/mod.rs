//! iSCSI (RFC 7143): PDUs, text keys and login, without any I/O.
//!
//! # Modules
//! - [`frame`]: conversion between a byte stream and PDUs, with padding, digests and limits.
//! - [`pdu`], `raw`: PDU types with [`parse`](pdu::FromInitiator::parse) and `header`.
//! - [`text`]: key=value pairs, which can be split over multiple PDUs.
//! - [`keys`]: table of all keys with their negotiation rules, including iSER (RFC 7145).
//! - [`chap`]: CHAP digests and encoding of binary values.
//! - [`login`]: state machines for the login of a target and an initiator.
//! - [`name`]: iSCSI names and SendTargets.
//!
//! # Invariants
//! - Never trust a length sent by the peer. It must be validated against a limit before we allocate
//!   or buffer anything, and against the number of received bytes before we actually read any data.
//! - A peer must not be able to make us send an unlimited amount of data.
//! - Strings returned by [`text`] don't contain any control characters. Names are also checked.
//! - No data sent by a peer can cause a panic.
//!
//! # Not implemented
//! Kerberos and SRP authentication, and markers, which were removed in RFC 7143.

pub mod chap;
pub mod frame;
pub mod keys;
pub mod login;
pub mod name;
pub mod pdu;
mod raw;
pub mod text;

#[cfg(test)]
mod tests;

/// Size of a basic header segment, in bytes (RFC 7143 11.2.1).
pub const BHS_LEN: usize = 48;

/// Reserved tag, used when there is no task.
pub const NO_TAG: u32 = 0xffff_ffff;

/// Initiator Task Tag (RFC 7143 11.2.1.8).
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct Itt(pub u32);

impl Itt {
    /// Reserved tag, for PDUs that don't belong to a task.
    pub const NONE: Self = Self(NO_TAG);
}

/// Target Transfer Tag (RFC 7143 11.7.4).
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct Ttt(pub u32);

impl Ttt {
    /// Reserved tag, FFFFFFFFh.
    pub const NONE: Self = Self(NO_TAG);
}

macro_rules! serial_number {
    ($(#[$meta:meta])* $name:ident) => {
        $(#[$meta])*
        /// This can wrap around. Use serial number arithmetic to compare two values (RFC 1982).
        #[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
        pub struct $name(pub u32);

        impl $name {
            /// Returns the next number.
            #[must_use]
            pub fn next(self) -> Self {
                self.plus(1)
            }

            /// Adds `n` to this number.
            #[must_use]
            pub fn plus(self, n: u32) -> Self {
                Self(self.0.wrapping_add(n))
            }

            /// Returns whether this is before `other`.
            #[must_use]
            pub fn is_before(self, other: Self) -> bool {
                (self.0.wrapping_sub(other.0) as i32) < 0
            }

            /// Returns the difference between `start` and this number.
            #[must_use]
            pub fn since(self, start: Self) -> u32 {
                self.0.wrapping_sub(start.0)
            }
        }
    };
}

serial_number! {
    /// Command sequence number in a session.
    CmdSn
}
serial_number! {
    /// Status sequence number in a connection.
    StatSn
}

/// Initiator Session ID. The initiator port is identified by this and the initiator name (RFC 7143
/// 11.12.5).
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Default)]
pub struct Isid(pub [u8; 6]);

impl std::fmt::Debug for Isid {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        std::fmt::Display::fmt(self, f)
    }
}

/// Formatted as `0x` and 12 hex digits, as used in port names (RFC 7143 4.4.2).
impl std::fmt::Display for Isid {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "0x")?;
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

/// Target Session Identifying Handle. Zero is used to request a new session.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug, Default)]
pub struct Tsih(pub u16);

/// Connection ID in a session.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug, Default)]
pub struct Cid(pub u16);

/// Sequence numbers in a PDU sent by a target.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Numbers {
    /// StatSN, the status sequence number of this connection.
    pub stat_sn: StatSn,
    /// The next expected command.
    pub exp_cmd_sn: CmdSn,
    /// The last command that can be sent.
    pub max_cmd_sn: CmdSn,
}
