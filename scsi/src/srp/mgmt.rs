//! Task management, logouts, credit and asynchronous-event messages.

use num_enum::{FromPrimitive, IntoPrimitive};

use super::raw::{Cursor, RawAerReq, RawNumbered, RawTagOnly, RawTskMgmt, expect};
use super::{AER_REQ_LEN, Opcode, SrpError, Tag};
use crate::lun::WireLun;

/// Task-management function (SRP r16a, TASK MANAGEMENT FUNCTION).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, FromPrimitive, IntoPrimitive)]
#[repr(u8)]
pub enum TskMgmtFunction {
    /// Abort the task that the request names.
    AbortTask = 0x01,
    /// Abort this nexus's tasks in the logical unit.
    AbortTaskSet = 0x02,
    /// Abort every task in the logical unit's task set.
    ClearTaskSet = 0x04,
    /// Reset the logical unit.
    LogicalUnitReset = 0x08,
    /// Clear an auto contingent allegiance.
    ClearAca = 0x40,
    /// A code that the standard does not define. It is answered, not refused: see
    /// [`super::RspCode::TskMgmtNotSupported`].
    #[num_enum(catch_all)]
    Other(u8),
}

/// SRP_TSK_MGMT: asks for a task-management function. An [`super::Rsp`] answers it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TskMgmt {
    /// Tag of this request.
    pub tag: Tag,
    /// SCSOLNT: notify when the function succeeds.
    pub notify_success: bool,
    /// UCSOLNT: notify when it does not.
    pub notify_failure: bool,
    /// Logical unit number, as eight bytes of SAM-5.
    pub lun: WireLun,
    /// Function that is asked for.
    pub function: TskMgmtFunction,
    /// Tag of the task that [`TskMgmtFunction::AbortTask`] means.
    pub task_tag: Tag,
}

impl TskMgmt {
    /// Parses an SRP_TSK_MGMT.
    ///
    /// # Errors
    /// A wrong type or too few bytes.
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

    /// Writes the information unit and returns its length.
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
        .put(out)
    }
}

macro_rules! tag_only {
    ($(#[$meta:meta])* $name:ident) => {
        $(#[$meta])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub struct $name {
            /// Of the request, or of the request that is answered.
            pub tag: Tag,
        }

        impl $name {
            /// Parses the information unit.
            ///
            /// # Errors
            /// A wrong type or too few bytes.
            pub fn parse(iu: &[u8]) -> Result<Self, SrpError> {
                let (raw, _) = RawTagOnly::split(iu)?;
                expect(raw.opcode, Opcode::$name)?;
                Ok(Self { tag: Tag(raw.tag.get()) })
            }

            /// Writes the information unit and returns its length.
            ///
            /// # Panics
            /// If `out` is too short.
            pub fn emit(&self, out: &mut [u8]) -> usize {
                RawTagOnly {
                    opcode: Opcode::$name as u8,
                    tag: self.tag.0.into(),
                    ..RawTagOnly::default()
                }
                .put(out)
            }
        }
    };
}

tag_only! {
    /// SRP_I_LOGOUT: the initiator logs out. The target disconnects without an answer.
    ILogout
}
tag_only! {
    /// SRP_CRED_RSP, which answers a [`CredReq`].
    CredRsp
}
tag_only! {
    /// SRP_AER_RSP, which answers an [`AerReq`].
    AerRsp
}

/// Reason for which a target logs an initiator out (SRP r16a, SRP_T_LOGOUT reason codes).
///
/// Implementations in the field disagree about the codes above four; an initiator should act alike
/// on all of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, FromPrimitive, IntoPrimitive)]
#[repr(u32)]
pub enum TLogoutReason {
    /// No reason is given.
    NoReason = 0,
    /// The channel was inactive and its resources are reclaimed.
    InactiveChannel = 1,
    /// The target received an information unit of an invalid type.
    InvalidIuType = 2,
    /// The initiator answered a request that was never made.
    SpuriousResponse = 3,
    /// A new login of the same nexus terminates this channel.
    MultiChannelAction = 4,
    /// A data-out buffer descriptor has an unsupported format.
    UnsupportedDataOutFormat = 6,
    /// A data-in buffer descriptor has an unsupported format.
    UnsupportedDataInFormat = 7,
    /// The data-out buffer descriptor count is invalid.
    InvalidDataOutCount = 8,
    /// The data-in buffer descriptor count is invalid.
    InvalidDataInCount = 9,
    /// A code that SRP does not define.
    #[num_enum(catch_all)]
    Other(u32),
}

/// SRP_T_LOGOUT: the target logs the initiator out and will disconnect.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TLogout {
    /// SOLNT: the login asked to be notified of this.
    pub solicited: bool,
    /// Reason of the logout.
    pub reason: TLogoutReason,
    /// Chosen by the target.
    pub tag: Tag,
}

impl TLogout {
    /// Parses an SRP_T_LOGOUT.
    ///
    /// # Errors
    /// A wrong type or too few bytes.
    pub fn parse(iu: &[u8]) -> Result<Self, SrpError> {
        let (raw, _) = RawNumbered::split(iu)?;
        expect(raw.opcode, Opcode::TLogout)?;
        Ok(Self {
            solicited: raw.sol_not & 0x01 != 0,
            reason: raw.number.get().into(),
            tag: Tag(raw.tag.get()),
        })
    }

    /// Writes the information unit and returns its length.
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
        .put(out)
    }
}

/// SRP_CRED_REQ: the target changes the request limit. [`CredRsp`] answers it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CredReq {
    /// SOLNT: the login asked to be notified of this.
    pub solicited: bool,
    /// Added to the request limit.
    pub req_lim_delta: i32,
    /// Chosen by the target.
    pub tag: Tag,
}

impl CredReq {
    /// Parses an SRP_CRED_REQ.
    ///
    /// # Errors
    /// A wrong type or too few bytes.
    pub fn parse(iu: &[u8]) -> Result<Self, SrpError> {
        let (raw, _) = RawNumbered::split(iu)?;
        expect(raw.opcode, Opcode::CredReq)?;
        Ok(Self {
            solicited: raw.sol_not & 0x01 != 0,
            req_lim_delta: raw.number.get().cast_signed(),
            tag: Tag(raw.tag.get()),
        })
    }

    /// Writes the information unit and returns its length.
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
        .put(out)
    }
}

/// SRP_AER_REQ: the target reports an asynchronous event. [`AerRsp`] answers it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AerReq<'a> {
    /// SOLNT: the login asked to be notified of this.
    pub solicited: bool,
    /// Added to the request limit.
    pub req_lim_delta: i32,
    /// Chosen by the target.
    pub tag: Tag,
    /// Logical unit that the event concerns.
    pub lun: WireLun,
    /// The event, as sense data.
    pub sense: &'a [u8],
}

impl<'a> AerReq<'a> {
    /// Parses an SRP_AER_REQ.
    ///
    /// # Errors
    /// A wrong type, or fewer bytes than header and declared sense data need.
    pub fn parse(iu: &'a [u8]) -> Result<Self, SrpError> {
        let (raw, _) = RawAerReq::split(iu)?;
        expect(raw.opcode, Opcode::AerReq)?;
        let mut at = Cursor::new(iu, AER_REQ_LEN);
        Ok(Self {
            solicited: raw.sol_not & 0x01 != 0,
            req_lim_delta: raw.req_lim_delta.get(),
            tag: Tag(raw.tag.get()),
            lun: raw.lun,
            sense: at.take("sense data", raw.sense_data_len.get().into())?,
        })
    }

    /// Writes the information unit and returns its length.
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
        .put(out);
        out[at..at + self.sense.len()].copy_from_slice(self.sense);
        at + self.sense.len()
    }
}
