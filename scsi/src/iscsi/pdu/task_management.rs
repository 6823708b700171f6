//! Task management PDUs (RFC 7143 11.5, 11.6).

use num_enum::{FromPrimitive, IntoPrimitive, TryFromPrimitive};

use super::super::frame::Frame;
use super::super::raw::{RawTargetCommon, RawTmfRequest};
use super::super::{BHS_LEN, CmdSn, Itt, Numbers, StatSn};
use super::{FINAL, IMMEDIATE, Opcode, PduError, coded, immediate, with_numbers};
use crate::srp::WireLun;

/// Task management function (RFC 7143 11.5.1, RFC 7144 4.1).
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, FromPrimitive, IntoPrimitive)]
#[repr(u8)]
pub enum TmfFunction {
    /// ABORT TASK.
    AbortTask = 1,
    /// ABORT TASK SET.
    AbortTaskSet = 2,
    /// CLEAR ACA.
    ClearAca = 3,
    /// CLEAR TASK SET.
    ClearTaskSet = 4,
    /// LOGICAL UNIT RESET.
    LogicalUnitReset = 5,
    /// TARGET WARM RESET.
    TargetWarmReset = 6,
    /// TARGET COLD RESET.
    TargetColdReset = 7,
    /// Moves a task to another connection.
    TaskReassign = 8,
    /// QUERY TASK.
    QueryTask = 9,
    /// QUERY TASK SET.
    QueryTaskSet = 10,
    /// I_T NEXUS RESET.
    NexusReset = 11,
    /// QUERY ASYNCHRONOUS EVENT.
    QueryAsyncEvent = 12,
    /// Another code; it is answered as not supported.
    #[num_enum(catch_all)]
    Other(u8),
}

/// A task management function request.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct TmfRequest {
    /// I bit.
    pub immediate: bool,
    /// The function.
    pub function: TmfFunction,
    /// Logical unit.
    pub lun: WireLun,
    /// Tag.
    pub itt: Itt,
    /// The task meant.
    pub referenced: Itt,
    /// Sequence number.
    pub cmd_sn: CmdSn,
    /// Acknowledges status.
    pub exp_stat_sn: StatSn,
    /// CmdSN of the task meant.
    pub ref_cmd_sn: CmdSn,
    /// Of a reassigned task: data already received.
    pub exp_data_sn: u32,
}

impl TmfRequest {
    pub(super) fn parse(frame: &Frame<'_>) -> Self {
        let raw = RawTmfRequest::of(frame.bhs);
        Self {
            immediate: raw.opcode & IMMEDIATE != 0,
            function: (raw.flags & 0x7f).into(),
            lun: raw.lun,
            itt: Itt(raw.itt.get()),
            referenced: Itt(raw.referenced_itt.get()),
            cmd_sn: CmdSn(raw.cmd_sn.get()),
            exp_stat_sn: StatSn(raw.exp_stat_sn.get()),
            ref_cmd_sn: CmdSn(raw.ref_cmd_sn.get()),
            exp_data_sn: raw.exp_data_sn.get(),
        }
    }

    /// The basic header segment.
    #[must_use]
    pub fn header(&self) -> [u8; BHS_LEN] {
        RawTmfRequest {
            opcode: u8::from(Opcode::TmfRequest) | immediate(self.immediate),
            flags: FINAL | u8::from(self.function) & 0x7f,
            lun: self.lun,
            itt: self.itt.0.into(),
            referenced_itt: self.referenced.0.into(),
            cmd_sn: self.cmd_sn.0.into(),
            exp_stat_sn: self.exp_stat_sn.0.into(),
            ref_cmd_sn: self.ref_cmd_sn.0.into(),
            exp_data_sn: self.exp_data_sn.into(),
            ..RawTmfRequest::default()
        }
        .bytes()
    }
}

/// Answer to a task management function (RFC 7143 11.6.1, RFC 7144 4.2).
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, TryFromPrimitive, IntoPrimitive)]
#[repr(u8)]
pub enum TmfStatus {
    /// Function complete.
    Complete = 0,
    /// Task does not exist.
    TaskDoesNotExist = 1,
    /// LUN does not exist.
    LunDoesNotExist = 2,
    /// Task still allegiant.
    TaskStillAllegiant = 3,
    /// Task allegiance reassignment not supported.
    ReassignmentNotSupported = 4,
    /// Task management function not supported.
    NotSupported = 5,
    /// Function authorization failed.
    AuthorizationFailed = 6,
    /// Function succeeded.
    Succeeded = 7,
    /// Function rejected.
    Rejected = 255,
}

/// A task management function response.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct TmfResponse {
    /// The request.
    pub itt: Itt,
    /// The answer.
    pub status: TmfStatus,
}

impl TmfResponse {
    /// The basic header segment.
    #[must_use]
    pub fn header(&self, numbers: Numbers) -> [u8; BHS_LEN] {
        RawTargetCommon {
            flags: FINAL,
            byte2: self.status.into(),
            itt: self.itt.0.into(),
            ..with_numbers(Opcode::TmfResponse, numbers)
        }
        .bytes()
    }

    pub(super) fn parse(raw: &RawTargetCommon) -> Result<Self, PduError> {
        Ok(Self {
            itt: Itt(raw.itt.get()),
            status: coded("task management response", raw.byte2)?,
        })
    }
}
