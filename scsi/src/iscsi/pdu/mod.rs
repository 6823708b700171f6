//! Protocol data units as values that hold only what is legal (RFC 7143 chapter 11).
//!
//! `parse` makes a value from a [`Frame`](super::frame::Frame); `header` returns its basic header
//! segment; the data segment stays apart, because block data lie in a command's buffer. Lengths in
//! the header are the business of [`frame`](super::frame).

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

/// The I bit: deliver at once, do not count.
pub(super) const IMMEDIATE: u8 = 0x40;
/// The F, and in login PDUs the T, bit.
pub(super) const FINAL: u8 = 0x80;
/// The C bit of text and login PDUs.
pub(super) const CONTINUE: u8 = 0x40;

/// An illegal PDU. A target answers with a [`Reject`].
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum PduError {
    /// No such opcode, or not one that this side receives.
    #[error("opcode {0:#04x} is not expected here")]
    Opcode(u8),
    /// A field has a value that it cannot have.
    #[error("{field} is {value:#x}")]
    Field {
        /// Name of the field.
        field: &'static str,
        /// Value that was received.
        value: u32,
    },
    /// An additional header segment runs over the end, comes twice, or has a wrong length.
    #[error("the additional header segments are malformed")]
    Ahs,
    /// Fewer bytes of data than the PDU needs.
    #[error("{field} needs {need} bytes of data, there are {have}")]
    Data {
        /// Name of the missing field.
        field: &'static str,
        /// Bytes that it needs.
        need: usize,
        /// Bytes that there are.
        have: usize,
    },
}

/// The value of a field that has one of a few codes.
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
    /// The opcode of a PDU.
    ///
    /// # Errors
    /// RFC 7143 has no such opcode.
    pub fn of(bhs: &[u8; BHS_LEN]) -> Result<Self, PduError> {
        let code = bhs[0] & 0x3f;
        Self::try_from(code).map_err(|_| PduError::Opcode(code))
    }
}

/// The I bit, where it is set.
fn immediate(is: bool) -> u8 {
    flag(is, IMMEDIATE)
}

/// A bit, where it is set.
fn flag(is: bool, bit: u8) -> u8 {
    if is { bit } else { 0 }
}

/// A header of a target with the numbers of the moment.
fn with_numbers(opcode: Opcode, numbers: Numbers) -> RawTargetCommon {
    RawTargetCommon {
        opcode: opcode.into(),
        stat_sn: numbers.stat_sn.0.into(),
        exp_cmd_sn: numbers.exp_cmd_sn.0.into(),
        max_cmd_sn: numbers.max_cmd_sn.0.into(),
        ..RawTargetCommon::default()
    }
}
