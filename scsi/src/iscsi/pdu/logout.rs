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
    /// All connections, and the session.
    CloseSession = 0,
    /// Close one connection: its commands end.
    CloseConnection = 1,
    /// The connection's tasks may move to another.
    RemoveConnection = 2,
}

/// Logout Request (RFC 7143 11.14).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct LogoutRequest {
    /// I bit: outside the command window (RFC 7143 11.2.1.1).
    pub immediate: bool,
    /// The reason, which says what ends.
    pub reason: LogoutReason,
    /// Initiator Task Tag of this request (RFC 7143 11.2.1.8).
    pub itt: Itt,
    /// CID of the connection, where the reason is about one.
    pub cid: Cid,
    /// CmdSN of this request (RFC 7143 11.3.2).
    pub cmd_sn: CmdSn,
    /// ExpStatSN: acknowledges all statuses before it (RFC 7143 11.3.3).
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

    /// The basic header segment.
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

/// Answer to a logout (RFC 7143 11.15.1).
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, TryFromPrimitive, IntoPrimitive)]
#[repr(u8)]
pub enum LogoutStatus {
    /// Connection or session closed successfully.
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
    /// Initiator Task Tag of the request.
    pub itt: Itt,
    /// Result of the logout.
    pub status: LogoutStatus,
    /// Seconds to wait before reconnecting.
    pub time2wait: u16,
    /// Seconds that tasks are kept after that.
    pub time2retain: u16,
}

impl LogoutResponse {
    /// The basic header segment.
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
