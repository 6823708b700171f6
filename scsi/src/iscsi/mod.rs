//! iSCSI (RFC 7143): its PDUs, text keys and login, with no connection in it.
//!
//! # Modules
//! - [`frame`]: a stream of bytes into PDUs, and PDUs into bytes: padding, digests, limits.
//! - [`pdu`], `raw`: each PDU as a value with [`parse`](pdu::FromInitiator::parse) and `header`.
//! - [`text`]: key=value pairs, over several PDUs.
//! - [`keys`]: the one table of keys that drives negotiation, with those of iSER (RFC 7145).
//! - [`chap`]: CHAP with its digests and its coding of binary values.
//! - [`login`]: the target's and the initiator's login as machines.
//! - [`name`]: iSCSI names and SendTargets.
//!
//! # Invariants
//! - The received length is the only authority: a declared length is compared with a limit before
//!   anything is kept for it, and with the received bytes before anything is read.
//! - What a peer can make us write is bounded, not only what it can make us read.
//! - Text of a peer has no control characters once it has left [`text`]; names are checked besides.
//! - Nothing here panics on a peer's bytes.
//!
//! # Not implemented
//! Authentication by Kerberos and by SRP; markers, which RFC 7143 removed.

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

/// Length of a basic header segment, in bytes (RFC 7143 11.2.1).
pub const BHS_LEN: usize = 48;

/// The tag that names no task.
pub const NO_TAG: u32 = 0xffff_ffff;

/// Initiator Task Tag (RFC 7143 11.2.1.8).
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct Itt(pub u32);

impl Itt {
    /// The reserved tag, of PDUs that belong to no task.
    pub const NONE: Self = Self(NO_TAG);
}

/// Target Transfer Tag (RFC 7143 11.7.4).
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct Ttt(pub u32);

impl Ttt {
    /// The reserved tag, FFFFFFFFh.
    pub const NONE: Self = Self(NO_TAG);
}

macro_rules! serial_number {
    ($(#[$meta:meta])* $name:ident) => {
        $(#[$meta])*
        ///
        /// It wraps; order is that of serial number arithmetic (RFC 1982).
        #[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
        pub struct $name(pub u32);

        impl $name {
            /// The number after this one.
            #[must_use]
            pub fn next(self) -> Self {
                self.plus(1)
            }

            /// The number `n` after this one.
            #[must_use]
            pub fn plus(self, n: u32) -> Self {
                Self(self.0.wrapping_add(n))
            }

            /// Whether this number comes before `other`.
            #[must_use]
            pub fn is_before(self, other: Self) -> bool {
                (self.0.wrapping_sub(other.0) as i32) < 0
            }

            /// Steps from `start` to this number.
            #[must_use]
            pub fn since(self, start: Self) -> u32 {
                self.0.wrapping_sub(start.0)
            }
        }
    };
}

serial_number! {
    /// Command sequence number of a session.
    CmdSn
}
serial_number! {
    /// Status sequence number of a connection.
    StatSn
}

/// Initiator Session ID: with the initiator's name it makes the initiator port (RFC 7143 11.12.5).
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Default)]
pub struct Isid(pub [u8; 6]);

impl std::fmt::Debug for Isid {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        std::fmt::Display::fmt(self, f)
    }
}

/// Twelve hexadecimal digits after `0x`, as in port names (RFC 7143 4.4.2).
impl std::fmt::Display for Isid {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "0x")?;
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

/// Target Session Identifying Handle; zero asks for a new session.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug, Default)]
pub struct Tsih(pub u16);

/// Connection ID within a session.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug, Default)]
pub struct Cid(pub u16);

/// Sequence numbers in every PDU of a target.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Numbers {
    /// StatSN, the number of a status on its connection.
    pub stat_sn: StatSn,
    /// Next command that is expected.
    pub exp_cmd_sn: CmdSn,
    /// Last command that may be sent.
    pub max_cmd_sn: CmdSn,
}
