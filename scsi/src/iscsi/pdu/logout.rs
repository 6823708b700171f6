//! Logout PDUs (RFC 7143 11.14, 11.15).

use num_enum::{IntoPrimitive, TryFromPrimitive};

use super::super::frame::Frame;
use super::super::raw::{RawLogoutRequest, RawTargetCommon};
use super::super::{BHS_LEN, Cid, CmdSn, Itt, Numbers, StatSn};
use super::{FINAL, IMMEDIATE, Opcode, PduError, coded, immediate, with_numbers};

/// Reason of a logout (RFC 7143 11.14.1).
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, TryFromPrimitive, IntoPrimitive)]
#[repr(u8)]
pub enum LogoutReason {
    /// Close the session with all connections.
    CloseSession = 0,
    /// Close a single connection. Outstanding commands are aborted.
    CloseConnection = 1,
    /// Remove a connection. Tasks can be moved to a different connection.
    RemoveConnection = 2,
}

/// Logout Request (RFC 7143 11.14).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct LogoutRequest {
    /// I bit: can be sent outside of the command window (RFC 7143 11.2.1.1).
    pub immediate: bool,
    /// What should be closed.
    pub reason: LogoutReason,
    /// Initiator Task Tag for this request (RFC 7143 11.2.1.8).
    pub itt: Itt,
    /// CID of the connection, if the reason is for a single connection.
    pub cid: Cid,
    /// CmdSN for this request (RFC 7143 11.3.2).
    pub cmd_sn: CmdSn,
    /// ExpStatSN: acknowledges all previous statuses (RFC 7143 11.3.3).
    pub exp_stat_sn: StatSn,
}

impl LogoutRequest {
    pub(super) fn parse(frame: &Frame<'_>) -> Result<Self, PduError> {
        let raw = RawLogoutRequest::of(frame.bhs);
        Ok(Self {
            immediate: raw.opcode & IMMEDIATE != 0,
            reason: coded("logout reason", raw.flags & 0x7f)?,
            itt: Itt(raw.itt.get()),
            cid: Cid(raw.cid.get()),
            cmd_sn: CmdSn(raw.cmd_sn.get()),
            exp_stat_sn: StatSn(raw.exp_stat_sn.get()),
        })
    }

    /// Returns the basic header segment.
    #[must_use]
    pub fn header(&self) -> [u8; BHS_LEN] {
        RawLogoutRequest {
            opcode: u8::from(Opcode::LogoutRequest) | immediate(self.immediate),
            flags: FINAL | u8::from(self.reason),
            itt: self.itt.0.into(),
            cid: self.cid.0.into(),
            cmd_sn: self.cmd_sn.0.into(),
            exp_stat_sn: self.exp_stat_sn.0.into(),
            ..RawLogoutRequest::default()
        }
        .bytes()
    }
}

/// Result of a logout (RFC 7143 11.15.1).
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, TryFromPrimitive, IntoPrimitive)]
#[repr(u8)]
pub enum LogoutStatus {
    /// The connection or session was closed successfully.
    Closed = 0,
    /// The CID was not found.
    CidNotFound = 1,
    /// Connection recovery is not supported.
    RecoveryNotSupported = 2,
    /// Cleanup failed for various reasons.
    CleanupFailed = 3,
}

/// Logout Response (RFC 7143 11.15).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct LogoutResponse {
    /// Initiator Task Tag from the request.
    pub itt: Itt,
    /// Result of the logout.
    pub status: LogoutStatus,
    /// Delay before reconnecting, in seconds.
    pub time2wait: u16,
    /// Time for which tasks are kept after that, in seconds.
    pub time2retain: u16,
}

impl LogoutResponse {
    /// Returns the basic header segment.
    #[must_use]
    pub fn header(&self, numbers: Numbers) -> [u8; BHS_LEN] {
        RawTargetCommon {
            flags: FINAL,
            byte2: self.status.into(),
            itt: self.itt.0.into(),
            word40: (u32::from(self.time2wait) << 16 | u32::from(self.time2retain)).into(),
            ..with_numbers(Opcode::LogoutResponse, numbers)
        }
        .bytes()
    }

    pub(super) fn parse(raw: &RawTargetCommon) -> Result<Self, PduError> {
        Ok(Self {
            itt: Itt(raw.itt.get()),
            status: coded("logout response", raw.byte2)?,
            time2wait: (raw.word40.get() >> 16) as u16,
            time2retain: raw.word40.get() as u16,
        })
    }
}
