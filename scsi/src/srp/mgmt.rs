//! Task management, logout, credit and asynchronous event messages.

use std::fmt;

use num_enum::{FromPrimitive, IntoPrimitive};

use super::raw::{Cursor, RawAerReq, RawNumbered, RawTagOnly, RawTskMgmt, expect};
use super::{AER_REQ_LEN, Opcode, SrpError, Tag};
use crate::lun::WireLun;

/// Task management function (SRP r16a, TASK MANAGEMENT FUNCTION).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, FromPrimitive, IntoPrimitive)]
#[repr(u8)]
pub enum TskMgmtFunction {
    /// Abort the task specified in the request.
    AbortTask = 0x01,
    /// Abort all tasks of this nexus in the logical unit.
    AbortTaskSet = 0x02,
    /// Abort all tasks in the logical unit.
    ClearTaskSet = 0x04,
    /// Reset the logical unit.
    LogicalUnitReset = 0x08,
    /// Clear an auto contingent allegiance.
    ClearAca = 0x40,
    /// Unknown function. This is not a parse error, and the response should be
    /// [`super::RspCode::TskMgmtNotSupported`].
    #[num_enum(catch_all)]
    Other(u8),
}

/// SRP_TSK_MGMT: requests a task management function. The response is an [`super::Rsp`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TskMgmt {
    /// Tag for this request.
    pub tag: Tag,
    /// SCSOLNT: request a notification on success.
    pub notify_success: bool,
    /// UCSOLNT: request a notification on failure.
    pub notify_failure: bool,
    /// Logical unit number, in the 8-byte SAM-5 format.
    pub lun: WireLun,
    /// The requested function.
    pub function: TskMgmtFunction,
    /// Tag of the task for [`TskMgmtFunction::AbortTask`].
    pub task_tag: Tag,
}

impl TskMgmt {
    /// Parses an SRP_TSK_MGMT.
    ///
    /// # Errors
    /// Returns an error if the type is unexpected or the buffer is too short.
    pub fn parse(iu: &[u8]) -> Result<Self, SrpError> {
        let (raw, _) = RawTskMgmt::split(iu)?;
        expect(raw.opcode, Opcode::TskMgmt)?;
        Ok(Self {
            tag: Tag(raw.tag.get()),
            notify_success: raw.sol_not & 0x02 != 0,
            notify_failure: raw.sol_not & 0x04 != 0,
            lun: raw.lun,
            function: raw.tsk_mgmt_func.into(),
            task_tag: Tag(raw.task_tag.get()),
        })
    }

    /// Writes the IU to `out` and returns the number of bytes.
    ///
    /// # Panics
    /// If `out` is too short.
    pub fn emit(&self, out: &mut [u8]) -> usize {
        RawTskMgmt {
            opcode: Opcode::TskMgmt as u8,
            sol_not: u8::from(self.notify_success) << 1 | u8::from(self.notify_failure) << 2,
            tag: self.tag.0.into(),
            lun: self.lun,
            tsk_mgmt_func: self.function.into(),
            task_tag: self.task_tag.0.into(),
            ..RawTskMgmt::default()
        }
        .write_to(out)
    }
}

macro_rules! tag_only {
    ($(#[$meta:meta])* $name:ident) => {
        $(#[$meta])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub struct $name {
            /// Tag for this request, or from the request if this is a response.
            pub tag: Tag,
        }

        impl $name {
            /// Parses the IU.
            ///
            /// # Errors
            /// Returns an error if the type is unexpected or the buffer is too short.
            pub fn parse(iu: &[u8]) -> Result<Self, SrpError> {
                let (raw, _) = RawTagOnly::split(iu)?;
                expect(raw.opcode, Opcode::$name)?;
                Ok(Self { tag: Tag(raw.tag.get()) })
            }

            /// Writes the IU to `out` and returns the number of bytes.
            ///
            /// # Panics
            /// If `out` is too short.
            pub fn emit(&self, out: &mut [u8]) -> usize {
                RawTagOnly {
                    opcode: Opcode::$name as u8,
                    tag: self.tag.0.into(),
                    ..RawTagOnly::default()
                }
                .write_to(out)
            }
        }
    };
}

tag_only! {
    /// SRP_I_LOGOUT: the initiator logs out. There is no response, the target just disconnects.
    ILogout
}
tag_only! {
    /// SRP_CRED_RSP, the response to a [`CredReq`].
    CredRsp
}
tag_only! {
    /// SRP_AER_RSP, the response to an [`AerReq`].
    AerRsp
}

/// The reason for a logout by the target (SRP r16a, SRP_T_LOGOUT reason codes).
///
/// Existing implementations use different codes above 4, so an initiator should handle all of them
/// in the same way.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, FromPrimitive, IntoPrimitive)]
#[repr(u32)]
pub enum TLogoutReason {
    /// No specific reason.
    NoReason = 0,
    /// The channel was inactive, so the resources are freed.
    InactiveChannel = 1,
    /// The target has received an unknown type of information unit.
    InvalidIuType = 2,
    /// The initiator has sent a response without a request.
    SpuriousResponse = 3,
    /// This channel is terminated by a new login from the same nexus.
    MultiChannelAction = 4,
    /// Unsupported format of a data-out buffer descriptor.
    UnsupportedDataOutFormat = 6,
    /// Unsupported format of a data-in buffer descriptor.
    UnsupportedDataInFormat = 7,
    /// Invalid data-out buffer descriptor count.
    InvalidDataOutCount = 8,
    /// Invalid data-in buffer descriptor count.
    InvalidDataInCount = 9,
    /// Unknown code.
    #[num_enum(catch_all)]
    Other(u32),
}

impl fmt::Display for TLogoutReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::NoReason => "no reason given",
            Self::InactiveChannel => "the channel was inactive",
            Self::InvalidIuType => "invalid type of information unit",
            Self::SpuriousResponse => "response to a request that was never made",
            Self::MultiChannelAction => "another login of the same initiator port",
            Self::UnsupportedDataOutFormat => "unsupported format of a data-out descriptor",
            Self::UnsupportedDataInFormat => "unsupported format of a data-in descriptor",
            Self::InvalidDataOutCount => "invalid number of data-out descriptors",
            Self::InvalidDataInCount => "invalid number of data-in descriptors",
            Self::Other(code) => return write!(f, "reason {code:#x}"),
        })
    }
}

/// SRP_T_LOGOUT: the target logs out the initiator and will then disconnect.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TLogout {
    /// SOLNT: set if notifications were requested in the login.
    pub solicited: bool,
    /// The reason for the logout.
    pub reason: TLogoutReason,
    /// Tag selected by the target.
    pub tag: Tag,
}

impl TLogout {
    /// Parses an SRP_T_LOGOUT.
    ///
    /// # Errors
    /// Returns an error if the type is unexpected or the buffer is too short.
    pub fn parse(iu: &[u8]) -> Result<Self, SrpError> {
        let (raw, _) = RawNumbered::split(iu)?;
        expect(raw.opcode, Opcode::TLogout)?;
        Ok(Self {
            solicited: raw.sol_not & 0x01 != 0,
            reason: raw.number.get().into(),
            tag: Tag(raw.tag.get()),
        })
    }

    /// Writes the IU to `out` and returns the number of bytes.
    ///
    /// # Panics
    /// If `out` is too short.
    pub fn emit(&self, out: &mut [u8]) -> usize {
        RawNumbered {
            opcode: Opcode::TLogout as u8,
            sol_not: self.solicited.into(),
            number: u32::from(self.reason).into(),
            tag: self.tag.0.into(),
            ..RawNumbered::default()
        }
        .write_to(out)
    }
}

/// SRP_CRED_REQ: the target updates the request limit. The response is a [`CredRsp`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CredReq {
    /// SOLNT: set if notifications were requested in the login.
    pub solicited: bool,
    /// Value to add to the request limit.
    pub req_lim_delta: i32,
    /// Tag selected by the target.
    pub tag: Tag,
}

impl CredReq {
    /// Parses an SRP_CRED_REQ.
    ///
    /// # Errors
    /// Returns an error if the type is unexpected or the buffer is too short.
    pub fn parse(iu: &[u8]) -> Result<Self, SrpError> {
        let (raw, _) = RawNumbered::split(iu)?;
        expect(raw.opcode, Opcode::CredReq)?;
        Ok(Self {
            solicited: raw.sol_not & 0x01 != 0,
            req_lim_delta: raw.number.get().cast_signed(),
            tag: Tag(raw.tag.get()),
        })
    }

    /// Writes the IU to `out` and returns the number of bytes.
    ///
    /// # Panics
    /// If `out` is too short.
    pub fn emit(&self, out: &mut [u8]) -> usize {
        RawNumbered {
            opcode: Opcode::CredReq as u8,
            sol_not: self.solicited.into(),
            number: self.req_lim_delta.cast_unsigned().into(),
            tag: self.tag.0.into(),
            ..RawNumbered::default()
        }
        .write_to(out)
    }
}

/// SRP_AER_REQ: the target reports an asynchronous event. The response is an [`AerRsp`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AerReq<'a> {
    /// SOLNT: set if notifications were requested in the login.
    pub solicited: bool,
    /// Value to add to the request limit.
    pub req_lim_delta: i32,
    /// Tag selected by the target.
    pub tag: Tag,
    /// Logical unit number for this event.
    pub lun: WireLun,
    /// Sense data for this event.
    pub sense: &'a [u8],
}

impl<'a> AerReq<'a> {
    /// Parses an SRP_AER_REQ.
    ///
    /// # Errors
    /// Returns an error if the type is unexpected, or the buffer is too short for the header and
    /// sense data.
    pub fn parse(iu: &'a [u8]) -> Result<Self, SrpError> {
        let (raw, _) = RawAerReq::split(iu)?;
        expect(raw.opcode, Opcode::AerReq)?;
        let mut at = Cursor::new(iu, AER_REQ_LEN);
        Ok(Self {
            solicited: raw.sol_not & 0x01 != 0,
            req_lim_delta: raw.req_lim_delta.get(),
            tag: Tag(raw.tag.get()),
            lun: raw.lun,
            sense: at.take_bytes("sense data", raw.sense_data_len.get().into())?,
        })
    }

    /// Writes the IU to `out` and returns the number of bytes.
    ///
    /// # Panics
    /// If `out` is too short.
    pub fn emit(&self, out: &mut [u8]) -> usize {
        let at = RawAerReq {
            opcode: Opcode::AerReq as u8,
            sol_not: self.solicited.into(),
            req_lim_delta: self.req_lim_delta.into(),
            tag: self.tag.0.into(),
            lun: self.lun,
            sense_data_len: (self.sense.len() as u32).into(),
            ..RawAerReq::default()
        }
        .write_to(out);
        out[at..at + self.sense.len()].copy_from_slice(self.sense);
        at + self.sense.len()
    }
}
