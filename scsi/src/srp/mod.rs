//! SCSI RDMA Protocol (T10 SRP r16a, with immediate data from SRP-2): all information units.
//!
//! There are two layers. The private `raw` module has the layout of the fixed headers, without
//! checking any values. The types in this module can only contain valid values: use `parse` to
//! create a value from a received information unit, which returns an error if it's invalid, and
//! `emit` to write it to a buffer, which returns the number of bytes. Parsing never allocates any
//! memory, because the variable parts are slices of the received bytes.
//!
//! - From the initiator ([`FromInitiator`]): [`LoginReq`] (also in the 56-byte format for RDMA/CM
//!   private data), [`Cmd`], [`TskMgmt`], [`ILogout`], [`CredRsp`], [`AerRsp`].
//! - From the target ([`FromTarget`]): [`LoginRsp`], [`LoginRej`], [`Rsp`], [`CredReq`],
//!   [`AerReq`], [`TLogout`].
//!
//! # Invariants
//! - Never trust a length, count or offset sent by the peer. Make sure that it does not exceed the
//!   number of received bytes, without any overflow.
//! - Any bytes after the end of an IU are ignored, because CM private data is padded and receive
//!   buffers can be larger than the message.
//! - Reserved fields are ignored when parsing, and set to zero when writing.
//! - Tags are opaque 8-byte values. They are stored as a big-endian number.
//!
//! # Not implemented
//! There are no other format codes in SRP except for direct, indirect and immediate. Bidirectional
//! commands can be parsed, but immediate data is refused for data-in.

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

/// Size of [`LoginReq`] as an information unit in IB/CM private data, in bytes.
pub const LOGIN_REQ_LEN: usize = 64;
/// Size of [`LoginReq`] in RDMA/CM private data, in bytes.
pub const LOGIN_REQ_RDMA_LEN: usize = 56;
/// Size of [`LoginRsp`], in bytes.
pub const LOGIN_RSP_LEN: usize = 52;
/// Size of [`LoginRej`], in bytes.
pub const LOGIN_REJ_LEN: usize = 32;
/// Size of [`Cmd`] without the additional CDB and descriptors, in bytes.
pub const CMD_LEN: usize = 48;
/// Size of [`Rsp`] without response data and sense data, in bytes.
pub const RSP_LEN: usize = 36;
/// Size of [`TskMgmt`], in bytes.
pub const TSK_MGMT_LEN: usize = 48;
/// Size of [`AerReq`] without sense data, in bytes.
pub const AER_REQ_LEN: usize = 36;
/// Size of logout and credit messages and [`AerRsp`], in bytes.
pub const SHORT_IU_LEN: usize = 16;
/// Minimum value for the maximum IU size requested by an initiator in a login, in bytes (SRP r16a,
/// SRP_LOGIN_REQ).
pub const MIN_MAX_IU_LEN: u32 = 64;

/// An invalid information unit.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SrpError {
    /// The IU is too short for a field or range.
    #[error("{field} ends at byte {need}, but only {have} bytes were received")]
    Truncated {
        /// Name of the field or range.
        field: &'static str,
        /// Required number of bytes from the start of the IU.
        need: u64,
        /// Number of bytes received.
        have: usize,
    },
    /// Byte 0 is not an IU type in SRP.
    #[error("unknown information unit type {0:#04x}")]
    UnknownOpcode(u8),
    /// Byte 0 is a type that is not allowed here, or not for this direction.
    #[error("unexpected information unit type {0:?}")]
    UnexpectedOpcode(Opcode),
    /// A field has a value that is not defined or not allowed.
    #[error("invalid {field}: {value:#x}")]
    Illegal {
        /// Name of the field.
        field: &'static str,
        /// The received value.
        value: u64,
    },
}

/// Information unit type in byte 0 of an information unit (SRP r16a, table of information units).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, TryFromPrimitive)]
#[repr(u8)]
pub enum Opcode {
    /// Login request from the initiator, sent in CM private data.
    LoginReq = 0x00,
    /// Task management request from the initiator.
    TskMgmt = 0x01,
    /// Command from the initiator.
    Cmd = 0x02,
    /// SRP_I_LOGOUT: the initiator logs out.
    ILogout = 0x03,
    /// Response from the initiator for a credit request.
    CredRsp = 0x41,
    /// Response from the initiator for an asynchronous event request.
    AerRsp = 0x42,
    /// SRP_T_LOGOUT: the target logs out the initiator.
    TLogout = 0x80,
    /// The target updates the request limit.
    CredReq = 0x81,
    /// The target reports an asynchronous event.
    AerReq = 0x82,
    /// The target has accepted a login.
    LoginRsp = 0xc0,
    /// Response from the target for a command or a task management request.
    Rsp = 0xc1,
    /// The target has rejected a login.
    LoginRej = 0xc2,
}

impl Opcode {
    /// Returns the type of a received IU.
    ///
    /// # Errors
    /// [`SrpError::Truncated`] if this is empty, or [`SrpError::UnknownOpcode`] if the type is not
    /// defined.
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

/// Identifies a request in a channel. This is selected by the sender of the request and returned in
/// the response.
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

/// A 16-byte port identifier.
pub type SrpPortId = [u8; 16];

/// A port identifier split into two parts, using the format in SRP r16a (I/O class 0x0100).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct PortIdParts {
    /// Identifier extension, in the first 8 bytes.
    pub extension: u64,
    /// EUI-64 of the channel adapter or I/O controller, in the last 8 bytes.
    pub guid: u64,
}

port_id! {
    /// Identifies an SRP initiator port (SRP r16a Annex B: identifier extension, then GUID).
    InitiatorPortId, "the initiator's identifier extension", "its GUID"
}
port_id! {
    /// Identifies an SRP target port (SRP r16a Annex B: service identifier extension, then the GUID
    /// of the I/O controller).
    TargetPortId, "the identifier extension", "the I/O controller GUID"
}

/// An IU sent by an initiator.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FromInitiator<'a> {
    /// Login request in the 64-byte format.
    LoginReq(LoginReq),
    /// SRP_CMD: a SCSI command.
    Cmd(Cmd<'a>),
    /// SRP_TSK_MGMT: a task management request.
    TskMgmt(TskMgmt),
    /// SRP_I_LOGOUT: the initiator logs out.
    ILogout(ILogout),
    /// Response to a [`CredReq`].
    CredRsp(CredRsp),
    /// Response to an [`AerReq`].
    AerRsp(AerRsp),
}

impl<'a> FromInitiator<'a> {
    /// Parses an IU sent by an initiator. `immediate` is the offset that was negotiated in the
    /// login.
    ///
    /// # Errors
    /// Same as for `parse` of the IU, or [`SrpError::UnexpectedOpcode`] if this can only be sent by
    /// targets.
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

    /// Writes the IU to `out` and returns the number of bytes.
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

/// An IU sent by a target.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FromTarget<'a> {
    /// SRP_LOGIN_RSP: the login was accepted.
    LoginRsp(LoginRsp),
    /// SRP_LOGIN_REJ: the login was rejected.
    LoginRej(LoginRej),
    /// Response to a command or a task management request.
    Rsp(Rsp<'a>),
    /// Update of the request limit.
    CredReq(CredReq),
    /// SRP_AER_REQ: an asynchronous event.
    AerReq(AerReq<'a>),
    /// SRP_T_LOGOUT: the target logs out the initiator.
    TLogout(TLogout),
}

impl<'a> FromTarget<'a> {
    /// Parses an IU sent by a target.
    ///
    /// # Errors
    /// Same as for `parse` of the IU, or [`SrpError::UnexpectedOpcode`] if this can only be sent by
    /// initiators.
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

    /// Writes the IU to `out` and returns the number of bytes.
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
