//! Task management PDUs (RFC 7143 11.5, 11.6).

use num_enum::{FromPrimitive, IntoPrimitive, TryFromPrimitive};

use super::super::frame::Frame;
use super::super::raw::{RawTargetCommon, RawTmfRequest};
use super::super::{BHS_LEN, CmdSn, Itt, Numbers, StatSn};
use super::{FINAL, IMMEDIATE, Opcode, PduError, coded, immediate, with_numbers};
use crate::lun::WireLun;

/// Task management function (RFC 7143 11.5.1, RFC 7144 6.3).
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, FromPrimitive, IntoPrimitive)]
#[repr(u8)]
pub enum TmfFunction {
    /// ABORT TASK: abort a single task of this nexus.
    AbortTask = 1,
    /// ABORT TASK SET: abort all tasks of this nexus for the LU.
    AbortTaskSet = 2,
    /// CLEAR ACA: clear an auto contingent allegiance.
    ClearAca = 3,
    /// CLEAR TASK SET: abort all tasks of any nexus for the LU.
    ClearTaskSet = 4,
    /// LOGICAL UNIT RESET: reset the LU for all nexuses.
    LogicalUnitReset = 5,
    /// TARGET WARM RESET: reset all LUs, but keep the sessions.
    TargetWarmReset = 6,
    /// TARGET COLD RESET: reset all LUs and close all sessions.
    TargetColdReset = 7,
    /// Move a task to a different connection.
    TaskReassign = 8,
    /// QUERY TASK: check if a task exists (RFC 7144).
    QueryTask = 9,
    /// QUERY TASK SET: check if there are any tasks (RFC 7144).
    QueryTaskSet = 10,
    /// I_T NEXUS RESET: abort all tasks of this nexus (RFC 7144).
    NexusReset = 11,
    /// QUERY ASYNCHRONOUS EVENT: check if a unit attention is pending (RFC 7144).
    QueryAsyncEvent = 12,
    /// Unknown function. The response will be "not supported".
    #[num_enum(catch_all)]
    Other(u8),
}

/// A task management function request.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct TmfRequest {
    /// I bit: can be sent outside of the command window (RFC 7143 11.2.1.1).
    pub immediate: bool,
    /// Requested function (RFC 7143 11.5.1).
    pub function: TmfFunction,
    /// Logical unit number, in the 8-byte SAM-5 format.
    pub lun: WireLun,
    /// Initiator Task Tag for this request (RFC 7143 11.2.1.8).
    pub itt: Itt,
    /// Referenced Task Tag, used for ABORT TASK and TASK REASSIGN (RFC 7143 11.5.4).
    pub referenced: Itt,
    /// CmdSN for this request (RFC 7143 11.3.2).
    pub cmd_sn: CmdSn,
    /// ExpStatSN: acknowledges all previous statuses (RFC 7143 11.3.3).
    pub exp_stat_sn: StatSn,
    /// CmdSN of the referenced task.
    pub ref_cmd_sn: CmdSn,
    /// Data that has already been received, used to reassign a task.
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

    /// Returns the basic header segment.
    #[must_use]
    pub fn header(&self) -> [u8; BHS_LEN] {
        RawTmfRequest {
            opcode: u8::from(Opcode::TmfRequest) | immediate(self.immediate),
            // This may be an unknown function with any value, but the field only has 7 bits.
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

/// Result of a task management function (RFC 7143 11.6.1, RFC 7144 6.4.2).
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, TryFromPrimitive, IntoPrimitive)]
#[repr(u8)]
pub enum TmfStatus {
    /// The function was completed.
    Complete = 0,
    /// Task does not exist.
    TaskDoesNotExist = 1,
    /// LUN does not exist.
    LunDoesNotExist = 2,
    /// The task is still allegiant to its connection.
    TaskStillAllegiant = 3,
    /// Task allegiance reassignment not supported.
    ReassignmentNotSupported = 4,
    /// Task management function not supported.
    NotSupported = 5,
    /// The initiator is not authorized for the function.
    AuthorizationFailed = 6,
    /// The task was found (RFC 7144).
    Succeeded = 7,
    /// The function is rejected.
    Rejected = 255,
}

/// A task management function response.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct TmfResponse {
    /// Initiator Task Tag from the request.
    pub itt: Itt,
    /// Result of the function (RFC 7143 11.6.1).
    pub status: TmfStatus,
}

impl TmfResponse {
    /// Returns the basic header segment.
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
