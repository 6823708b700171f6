//! SCSI RDMA Protocol (T10 SRP r16a, with SRP-2's immediate data): every information unit.
//!
//! Two layers. The private `raw` module lays fixed headers over received bytes and judges nothing.
//! The types here hold legal values only: `parse` makes one from a received information unit and
//! refuses the rest, `emit` writes one into the caller's buffer and returns its length. Parsing
//! allocates nothing; variable parts are slices of the received bytes.
//!
//! - From the initiator ([`FromInitiator`]): [`LoginReq`] (also in the 56-byte form that RDMA/CM
//!   private data carries), [`Cmd`], [`TskMgmt`], [`ILogout`], [`CredRsp`], [`AerRsp`].
//! - From the target ([`FromTarget`]): [`LoginRsp`], [`LoginRej`], [`Rsp`], [`CredReq`],
//!   [`AerReq`], [`TLogout`].
//!
//! # Invariants
//! - The received length is the only authority. Every length, count and offset that a peer declares
//!   is compared with it, in arithmetic that cannot wrap.
//! - Bytes after the end of an information unit are ignored: CM private data is padded, and receive
//!   buffers may be longer than what was sent.
//! - Reserved fields are ignored on receipt and written as zero.
//! - Tags are opaque. They travel as eight bytes and are read here as a big-endian number.
//!
//! # Not implemented
//! Format codes of SRP other than direct, indirect and immediate do not exist; bidirectional
//! commands parse, but immediate data is refused for data-in.

mod cmd;
mod login;
mod mgmt;
mod raw;
mod rsp;

#[cfg(test)]
mod tests;

pub use cmd::{Cmd, DataBuffer, IndirectTable, MAX_ADDITIONAL_CDB, MemDesc, TaskAttr};
pub use login::{
    BufferFormats, ImmediateDataOffset, LoginRej, LoginRejReason, LoginReq, LoginReqFlags,
    LoginRsp, MultiChannelAction, MultiChannelResult,
};
pub use mgmt::{
    AerReq, AerRsp, CredReq, CredRsp, ILogout, TLogout, TLogoutReason, TskMgmt, TskMgmtFunction,
};
pub use rsp::{Residual, Rsp, RspCode};

use std::fmt;

use num_enum::{TryFromPrimitive, TryFromPrimitiveError};

/// Length of [`LoginReq`] as an information unit, in IB/CM private data; in bytes.
pub const LOGIN_REQ_LEN: usize = 64;
/// Length of [`LoginReq`] in RDMA/CM private data, in bytes.
pub const LOGIN_REQ_RDMA_LEN: usize = 56;
/// Length of [`LoginRsp`], in bytes.
pub const LOGIN_RSP_LEN: usize = 52;
/// Length of [`LoginRej`], in bytes.
pub const LOGIN_REJ_LEN: usize = 32;
/// Length of [`Cmd`] before its additional CDB and descriptors, in bytes.
pub const CMD_LEN: usize = 48;
/// Length of [`Rsp`] before response data and sense data, in bytes.
pub const RSP_LEN: usize = 36;
/// Length of [`TskMgmt`], in bytes.
pub const TSK_MGMT_LEN: usize = 48;
/// Length of [`AerReq`] before its sense data, in bytes.
pub const AER_REQ_LEN: usize = 36;
/// Length of logouts, credit messages and [`AerRsp`], in bytes.
pub const SHORT_IU_LEN: usize = 16;
/// The smallest maximum length of an initiator's information units that may be asked for in a
/// login, in bytes (SRP r16a, SRP_LOGIN_REQ).
pub const MIN_MAX_IU_LEN: u32 = 64;

/// An illegal information unit.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SrpError {
    /// The information unit ends before a field or a declared range does.
    #[error("{field} ends at byte {need}, but {have} bytes were received")]
    Truncated {
        /// The field or range that does not fit.
        field: &'static str,
        /// Offset at which it would end, in bytes from the start of the information unit.
        need: u64,
        /// Number of bytes received.
        have: usize,
    },
    /// Byte 0 is no information-unit type of SRP.
    #[error("unknown information unit type {0:#04x}")]
    UnknownOpcode(u8),
    /// Byte 0 is a type that this direction, or this place, does not allow.
    #[error("information unit type {0:?} is not allowed here")]
    UnexpectedOpcode(Opcode),
    /// A field holds a value that the standard does not define or allow.
    #[error("{field} is {value:#x}, which is not legal")]
    Illegal {
        /// Name of the field.
        field: &'static str,
        /// Value that was received.
        value: u64,
    },
}

/// Information-unit type: byte 0 of every information unit (SRP r16a, table of information units).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, TryFromPrimitive)]
#[repr(u8)]
pub enum Opcode {
    /// Initiator asks for a login. Travels in CM private data.
    LoginReq = 0x00,
    /// Initiator asks for a task-management function.
    TskMgmt = 0x01,
    /// Initiator sends a command.
    Cmd = 0x02,
    /// SRP_I_LOGOUT: the initiator logs out.
    ILogout = 0x03,
    /// Initiator answers a credit request.
    CredRsp = 0x41,
    /// Initiator answers an asynchronous-event request.
    AerRsp = 0x42,
    /// Target logs the initiator out.
    TLogout = 0x80,
    /// Target changes the request limit.
    CredReq = 0x81,
    /// Target reports an asynchronous event.
    AerReq = 0x82,
    /// Target accepts a login.
    LoginRsp = 0xc0,
    /// Target answers a command or a task-management function.
    Rsp = 0xc1,
    /// Target refuses a login.
    LoginRej = 0xc2,
}

impl Opcode {
    /// The type of a received information unit.
    ///
    /// # Errors
    /// [`SrpError::Truncated`] for no bytes, [`SrpError::UnknownOpcode`] for an undefined type.
    pub fn of(iu: &[u8]) -> Result<Self, SrpError> {
        let &byte = iu.first().ok_or(SrpError::Truncated {
            field: "type",
            need: 1,
            have: 0,
        })?;
        Ok(Self::try_from(byte)?)
    }
}

impl From<TryFromPrimitiveError<Opcode>> for SrpError {
    fn from(error: TryFromPrimitiveError<Opcode>) -> Self {
        Self::UnknownOpcode(error.number)
    }
}

/// Identifies a request on its channel; chosen by the sender of the request, returned in the
/// answer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Tag(pub u64);

impl fmt::Display for Tag {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:#x}", self.0)
    }
}

macro_rules! port_id {
    ($(#[$meta:meta])* $name:ident, $ext:literal, $guid:literal) => {
        $(#[$meta])*
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub struct $name(pub SrpPortId);

        impl $name {
            #[doc = concat!("Made of ", $ext, " and ", $guid, ", in that order, each big-endian.")]
            #[must_use]
            pub fn from_parts(parts: PortIdParts) -> Self {
                let mut id = [0; 16];
                id[..8].copy_from_slice(&parts.extension.to_be_bytes());
                id[8..].copy_from_slice(&parts.guid.to_be_bytes());
                Self(id)
            }

            #[doc = concat!("The ", $ext, " and the ", $guid, ".")]
            #[must_use]
            pub fn parts(&self) -> PortIdParts {
                let half = |range: std::ops::Range<usize>| {
                    self.0[range].iter().fold(0, |v, &b| v << 8 | u64::from(b))
                };
                PortIdParts { extension: half(0..8), guid: half(8..16) }
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                let parts = self.parts();
                write!(f, "{:016x}:{:016x}", parts.extension, parts.guid)
            }
        }
    };
}

/// The sixteen bytes of a port identifier.
pub type SrpPortId = [u8; 16];

/// The two halves of a port identifier in the form of SRP r16a (I/O class 0x0100).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct PortIdParts {
    /// Identifier extension: the first eight bytes.
    pub extension: u64,
    /// EUI-64 of the channel adapter or I/O controller: the last eight bytes.
    pub guid: u64,
}

port_id! {
    /// Names an SRP initiator port (SRP r16a Annex B: identifier extension, then GUID).
    InitiatorPortId, "the initiator's identifier extension", "its GUID"
}
port_id! {
    /// Names an SRP target port (SRP r16a Annex B: service identifier extension, then the I/O
    /// controller's GUID).
    TargetPortId, "the identifier extension", "the I/O controller GUID"
}

/// An information unit that an initiator sends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FromInitiator<'a> {
    /// Login request in its 64-byte form.
    LoginReq(LoginReq),
    /// SRP_CMD: a SCSI command.
    Cmd(Cmd<'a>),
    /// SRP_TSK_MGMT: a task-management request.
    TskMgmt(TskMgmt),
    /// SRP_I_LOGOUT: the initiator logs out.
    ILogout(ILogout),
    /// Answer to a [`CredReq`].
    CredRsp(CredRsp),
    /// Answer to an [`AerReq`].
    AerRsp(AerRsp),
}

impl<'a> FromInitiator<'a> {
    /// Parses an information unit that an initiator sent. `immediate` is what the login agreed on.
    ///
    /// # Errors
    /// Those of the information unit's own `parse`; [`SrpError::UnexpectedOpcode`] for one that
    /// only targets send.
    pub fn parse(iu: &'a [u8], immediate: Option<ImmediateDataOffset>) -> Result<Self, SrpError> {
        Ok(match Opcode::of(iu)? {
            Opcode::LoginReq => Self::LoginReq(LoginReq::parse(iu)?),
            Opcode::Cmd => Self::Cmd(Cmd::parse(iu, immediate)?),
            Opcode::TskMgmt => Self::TskMgmt(TskMgmt::parse(iu)?),
            Opcode::ILogout => Self::ILogout(ILogout::parse(iu)?),
            Opcode::CredRsp => Self::CredRsp(CredRsp::parse(iu)?),
            Opcode::AerRsp => Self::AerRsp(AerRsp::parse(iu)?),
            other => return Err(SrpError::UnexpectedOpcode(other)),
        })
    }

    /// Writes the information unit to the start of `out` and returns its length in bytes.
    ///
    /// # Panics
    /// If `out` is too short.
    pub fn emit(&self, out: &mut [u8]) -> usize {
        match self {
            Self::LoginReq(iu) => iu.emit(out),
            Self::Cmd(iu) => iu.emit(out),
            Self::TskMgmt(iu) => iu.emit(out),
            Self::ILogout(iu) => iu.emit(out),
            Self::CredRsp(iu) => iu.emit(out),
            Self::AerRsp(iu) => iu.emit(out),
        }
    }
}

/// An information unit that a target sends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FromTarget<'a> {
    /// SRP_LOGIN_RSP: the login is accepted.
    LoginRsp(LoginRsp),
    /// SRP_LOGIN_REJ: the login is refused.
    LoginRej(LoginRej),
    /// Answer to a command or task-management request.
    Rsp(Rsp<'a>),
    /// Change of the request limit.
    CredReq(CredReq),
    /// SRP_AER_REQ: an asynchronous event.
    AerReq(AerReq<'a>),
    /// SRP_T_LOGOUT: the target logs out.
    TLogout(TLogout),
}

impl<'a> FromTarget<'a> {
    /// Parses an information unit that a target sent.
    ///
    /// # Errors
    /// Those of the information unit's own `parse`; [`SrpError::UnexpectedOpcode`] for one that
    /// only initiators send.
    pub fn parse(iu: &'a [u8]) -> Result<Self, SrpError> {
        Ok(match Opcode::of(iu)? {
            Opcode::LoginRsp => Self::LoginRsp(LoginRsp::parse(iu)?),
            Opcode::LoginRej => Self::LoginRej(LoginRej::parse(iu)?),
            Opcode::Rsp => Self::Rsp(Rsp::parse(iu)?),
            Opcode::CredReq => Self::CredReq(CredReq::parse(iu)?),
            Opcode::AerReq => Self::AerReq(AerReq::parse(iu)?),
            Opcode::TLogout => Self::TLogout(TLogout::parse(iu)?),
            other => return Err(SrpError::UnexpectedOpcode(other)),
        })
    }

    /// Writes the information unit to the start of `out` and returns its length in bytes.
    ///
    /// # Panics
    /// If `out` is too short.
    pub fn emit(&self, out: &mut [u8]) -> usize {
        match self {
            Self::LoginRsp(iu) => iu.emit(out),
            Self::LoginRej(iu) => iu.emit(out),
            Self::Rsp(iu) => iu.emit(out),
            Self::CredReq(iu) => iu.emit(out),
            Self::AerReq(iu) => iu.emit(out),
            Self::TLogout(iu) => iu.emit(out),
        }
    }
}
