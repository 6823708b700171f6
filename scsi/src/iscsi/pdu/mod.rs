//! Protocol data units as types that can only contain valid values (RFC 7143 chapter 11).
//!
//! Use `parse` to create a value from a [`Frame`](super::frame::Frame), and `header` to get the
//! basic header segment. The data segment is not included, because block data is located in the
//! buffer of a command. The lengths in the header are handled by [`frame`](super::frame).

mod initiator;
mod login;
mod logout;
mod target;
mod task_management;

pub use initiator::{
    CdbBytes, DataOut, FromInitiator, MAX_CDB, NopOut, ScsiCommand, Snack, SnackKind, TaskAttr,
    TextRequest,
};
pub use login::{LoginFlags, LoginRequest, LoginResponse, LoginStatus, Stage};
pub use logout::{LogoutReason, LogoutRequest, LogoutResponse, LogoutStatus};
pub use target::{
    AsyncEvent, AsyncMessage, DataIn, DataInStatus, FromTarget, NopIn, R2t, Reject, RejectReason,
    ScsiResponse, TextResponse,
};
pub use task_management::{TmfFunction, TmfRequest, TmfResponse, TmfStatus};

use num_enum::{IntoPrimitive, TryFromPrimitive};

use super::raw::RawTargetCommon;
use super::{BHS_LEN, Numbers};

/// I bit: deliver immediately, without using a sequence number.
pub(super) const IMMEDIATE: u8 = 0x40;
/// F bit, which is used as T bit in login PDUs.
pub(super) const FINAL: u8 = 0x80;
/// C bit in text and login PDUs.
pub(super) const CONTINUE: u8 = 0x40;

/// An invalid PDU. A target should send a [`Reject`].
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum PduError {
    /// The opcode is unknown, or must not be sent to this side.
    #[error("unexpected opcode {0:#04x}")]
    Opcode(u8),
    /// The value of a field is invalid.
    #[error("invalid {field}: {value:#x}")]
    Field {
        /// Name of the field.
        field: &'static str,
        /// The received value.
        value: u32,
    },
    /// An additional header segment exceeds the total length, is used twice, or has an invalid
    /// length.
    #[error("malformed additional header segments")]
    Ahs,
    /// The PDU is too short.
    #[error("{field} requires {need} bytes of data, but only {have} were received")]
    Data {
        /// Name of the missing field.
        field: &'static str,
        /// Required number of bytes.
        need: usize,
        /// Available number of bytes.
        have: usize,
    },
}

/// Converts a field to an enum. Returns an error if the value is unknown.
fn coded<T>(field: &'static str, code: u8) -> Result<T, PduError>
where
    T: TryFromPrimitive<Primitive = u8>,
{
    T::try_from_primitive(code).map_err(|_| PduError::Field {
        field,
        value: code.into(),
    })
}

/// Opcode (RFC 7143 11.2.1.2), without the I bit.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, TryFromPrimitive, IntoPrimitive)]
#[repr(u8)]
pub enum Opcode {
    /// NOP-Out (RFC 7143 11.18).
    NopOut = 0x00,
    /// SCSI Command (RFC 7143 11.3).
    ScsiCommand = 0x01,
    /// Task Management Function Request (RFC 7143 11.5).
    TmfRequest = 0x02,
    /// Login Request (RFC 7143 11.12).
    LoginRequest = 0x03,
    /// Text Request (RFC 7143 11.10).
    TextRequest = 0x04,
    /// SCSI Data-Out (RFC 7143 11.7).
    DataOut = 0x05,
    /// Logout Request (RFC 7143 11.14).
    LogoutRequest = 0x06,
    /// SNACK Request (RFC 7143 11.16).
    Snack = 0x10,
    /// NOP-In (RFC 7143 11.19).
    NopIn = 0x20,
    /// SCSI Response (RFC 7143 11.4).
    ScsiResponse = 0x21,
    /// Task Management Function Response (RFC 7143 11.6).
    TmfResponse = 0x22,
    /// Login Response (RFC 7143 11.13).
    LoginResponse = 0x23,
    /// Text Response (RFC 7143 11.11).
    TextResponse = 0x24,
    /// SCSI Data-In (RFC 7143 11.7).
    DataIn = 0x25,
    /// Logout Response (RFC 7143 11.15).
    LogoutResponse = 0x26,
    /// Ready To Transfer (RFC 7143 11.8).
    R2t = 0x31,
    /// Asynchronous Message (RFC 7143 11.9).
    AsyncMessage = 0x32,
    /// Reject (RFC 7143 11.17).
    Reject = 0x3f,
}

impl Opcode {
    /// Returns the opcode of a PDU.
    ///
    /// # Errors
    /// If the opcode is not defined in RFC 7143.
    pub fn of(bhs: &[u8; BHS_LEN]) -> Result<Self, PduError> {
        let code = bhs[0] & 0x3f;
        Self::try_from(code).map_err(|_| PduError::Opcode(code))
    }
}

/// Returns the I bit, if set.
fn immediate(is: bool) -> u8 {
    flag(is, IMMEDIATE)
}

/// Returns this bit, if set.
fn flag(is: bool, bit: u8) -> u8 {
    if is { bit } else { 0 }
}

/// Creates a new target header with the current sequence numbers.
fn with_numbers(opcode: Opcode, numbers: Numbers) -> RawTargetCommon {
    RawTargetCommon {
        opcode: opcode.into(),
        stat_sn: numbers.stat_sn.0.into(),
        exp_cmd_sn: numbers.exp_cmd_sn.0.into(),
        max_cmd_sn: numbers.max_cmd_sn.0.into(),
        ..RawTargetCommon::default()
    }
}
