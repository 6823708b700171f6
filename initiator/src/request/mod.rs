//! Requests of a session for any protocol, their results, and rules for retries.
//!
//! `table` contains a session's requests, and decides about retries when an attempt has finished.

#![forbid(unsafe_code)]

mod command;
pub(crate) mod table;

use std::time::Instant;

use riser_scsi::iscsi::pdu::RejectReason;
use riser_scsi::lun::WireLun;
use riser_scsi::protection::ProtectionError;
use riser_scsi::sense::{AdditionalSense, Sense, SenseKey};
use riser_scsi::srp::{RspCode, TaskAttr};

pub use self::command::{Cdb, DataLen, MAX_CDB};

/// SCSI status GOOD (SAM-5 clause 5.3).
pub const GOOD: u8 = 0x00;
/// SCSI status CHECK CONDITION.
pub const CHECK_CONDITION: u8 = 0x02;
/// SCSI status BUSY (SAM-5).
pub const BUSY: u8 = 0x08;
/// SCSI status TASK SET FULL.
pub const TASK_SET_FULL: u8 = 0x28;
/// SCSI status TASK ABORTED.
pub const TASK_ABORTED: u8 = 0x40;

/// Effect of a command, which determines whether it may be executed twice.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Effect {
    /// No effect: inquiries, status.
    None,
    /// No effect, but reads blocks of the logical unit.
    Read {
        /// First logical block address.
        start: u64,
        /// Last block plus one.
        end: u64,
    },
    /// Sets blocks of the logical unit to a state that does not depend on their content: writes,
    /// unmaps. Executing it twice has the same result as once.
    Blocks {
        /// First logical block address.
        start: u64,
        /// Last block plus one.
        end: u64,
    },
    /// Affects the whole medium, but no block contents: cache flushes.
    Medium,
    /// Any other effect, which may be wrong if executed twice.
    Other,
}

impl Effect {
    /// Returns whether the command may be sent again if it is unknown whether it was executed.
    #[must_use]
    pub fn is_replayable(self) -> bool {
        self != Self::Other
    }

    /// Returns whether the command may change the unit.
    #[must_use]
    pub fn is_change(self) -> bool {
        !matches!(self, Self::None | Self::Read { .. })
    }

    /// Returns whether the data returned by another command may depend on this one.
    #[must_use]
    pub fn is_seen_by(self, other: Self) -> bool {
        match (self, other) {
            (Self::Blocks { start, end }, Self::Read { start: s, end: e }) => start < e && s < end,
            (Self::Other, Self::Read { .. }) => true,
            _ => false,
        }
    }

    /// Returns whether the order of two commands matters for the medium.
    #[must_use]
    pub fn conflicts(self, other: Self) -> bool {
        match (self, other) {
            _ if !self.is_change() || !other.is_change() => false,
            (Self::Blocks { start, end }, Self::Blocks { start: s, end: e }) => {
                start < e && s < end
            }
            _ => true,
        }
    }
}

/// Retries by the session if the target is busy or not ready.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Retry {
    /// Retry after BUSY, TASK SET FULL, unit attentions etc.: conditions under which the command
    /// was not executed.
    Standard,
    /// Never retry: the caller receives all statuses.
    Never,
    /// Same as [`Self::Standard`]. The command identifies the unit, so it precedes requests that
    /// wait for this.
    Probe,
}

/// A request to a session.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RequestSpec {
    /// Logical unit, in wire format.
    pub lun: WireLun,
    /// Task attribute of the command.
    pub attr: TaskAttr,
    /// Command descriptor block to send.
    pub cdb: Cdb,
    /// Data direction and length.
    pub len: DataLen,
    /// Latest time of its completion.
    pub deadline: Instant,
    /// Retries for statuses that request them.
    pub retry: Retry,
    /// Effect of the command on the unit.
    pub effect: Effect,
}

/// Response of the target to a command.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CommandResponse {
    /// SCSI status of the command.
    pub status: u8,
    /// Sense data, if received.
    pub sense: Option<Box<[u8]>>,
    /// Number of bytes of the buffer that were used.
    pub transferred: u32,
    /// Number of bytes that did not fit into the buffer.
    pub overflow: u32,
}

impl CommandResponse {
    /// Parses the sense data, if there is any.
    #[must_use]
    pub fn sense(&self) -> Option<Sense> {
        self.sense.as_deref().and_then(Sense::parse)
    }

    /// Returns whether the command was executed successfully: GOOD, or CHECK CONDITION that only
    /// reports a recovered error.
    #[must_use]
    pub fn is_success(&self) -> bool {
        self.status == GOOD || self.check().is_some_and(|sense| sense.is_success())
    }

    /// Returns the sense data of a CHECK CONDITION.
    fn check(&self) -> Option<Sense> {
        (self.status == CHECK_CONDITION).then(|| self.sense())?
    }
}

/// Reason why a request has no response.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RequestError {
    /// The request timed out. If it was sent, it may have been executed. The target will not
    /// execute it later, unless the connection is down. In that case, no later request overtakes
    /// it; with several paths, no later request that reads or changes the same blocks.
    #[error("timed out")]
    TimedOut,
    /// The request timed out before it was sent: a [`Retry::Probe`] waiting behind other commands.
    #[error("timed out before it was sent")]
    NotSent,
    /// The connection broke, and the command must not be sent twice.
    #[error("connection lost during a command that cannot be repeated")]
    ConnectionLost,
    /// The target reported an error in the request itself.
    #[error("target rejected the request (response code {0:?})")]
    Refused(RspCode),
    /// The target rejected the PDU that carried the request.
    #[error("target rejected the request ({0:?})")]
    Rejected(RejectReason),
    /// The target failed to execute the request; the value is the iSCSI response code.
    #[error("target failed (response {0:#04x})")]
    TargetFailure(u8),
    /// A flush was executed, but the target may have lost previously acknowledged data. Reported
    /// once; see [`crate::unit`].
    #[error("the target may have lost acknowledged writes that were not on the medium yet")]
    CacheLost,
    /// The session is closed, or was closed in the meantime.
    #[error("session is closed")]
    Closed,
    /// The request could not be started; contains the reason.
    #[error("{0}")]
    NotStarted(&'static str),
}

/// Result of a request.
pub type RequestResult = Result<CommandResponse, RequestError>;

/// Identifies a request of a session until its completion.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct RequestId(pub u32);

/// Next step after a response.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Verdict {
    /// Return it to the issuer.
    Report,
    /// Send the request again immediately.
    Again,
    /// Send the request again after a delay.
    Later,
    /// The target requests a wait: send the request again after a delay, until it times out.
    Wait,
}

/// Returns the unit attention condition reported by a response (SAM-5 clause 5.14), if any.
pub(crate) fn attention_of(response: &CommandResponse) -> Option<AdditionalSense> {
    let sense = response.check()?;
    (sense.key == SenseKey::UnitAttention).then_some(sense.additional)
}

/// Returns whether the target does not present the logical unit: LOGICAL UNIT NOT SUPPORTED. The
/// command was not executed.
pub(crate) fn is_unit_missing(response: &CommandResponse) -> bool {
    let code = AdditionalSense::LOGICAL_UNIT_NOT_SUPPORTED.code;
    let is_missing = |sense: Sense| {
        sense.key == SenseKey::IllegalRequest && sense.additional.code == code && !sense.is_deferred
    };
    response.check().is_some_and(is_missing)
}

/// Returns whether a response reports a deferred error instead of executing the command.
pub(crate) fn is_deferred(response: &CommandResponse) -> bool {
    response.check().is_some_and(|sense| sense.is_deferred)
}

/// Returns whether a logical unit that is not ready (04h) will become ready without intervention.
/// The qualifiers are the same for which Linux retries a command after a delay.
fn is_transient(qualifier: u8) -> bool {
    /// IN PROCESS OF BECOMING READY.
    const BECOMING_READY: u8 = 0x01;
    /// FORMAT, REBUILD, RECALCULATION, OPERATION, LONG WRITE, SELF-TEST IN PROGRESS.
    const IN_PROGRESS: std::ops::RangeInclusive<u8> = 0x04..=0x09;
    /// NOTIFY (ENABLE SPINUP) REQUIRED: the disk waits until it may spin up.
    const SPINUP: u8 = 0x11;
    /// SPACE ALLOCATION IN PROGRESS: a thin disk is mapping blocks (SBC-3 4.7.3.7).
    const SPACE_ALLOCATION: u8 = 0x14;
    /// START STOP UNIT COMMAND, SANITIZE, CONFIGURATION IN PROGRESS.
    const OPERATIONS: [u8; 3] = [0x1a, 0x1b, 0x1d];
    /// DEPOPULATION, DEPOPULATION RESTORATION IN PROGRESS.
    const DEPOPULATION: [u8; 2] = [0x24, 0x25];
    matches!(qualifier, BECOMING_READY | SPINUP | SPACE_ALLOCATION)
        || IN_PROGRESS.contains(&qualifier)
        || OPERATIONS.contains(&qualifier)
        || DEPOPULATION.contains(&qualifier)
}

/// Returns whether a unit attention may indicate a different unit or another capacity: a reset of
/// any kind (29h), CAPACITY DATA HAS CHANGED, INQUIRY DATA HAS CHANGED, REPORTED LUNS DATA HAS
/// CHANGED (SPC-4 annex F). Also returns true if a volatile cache may have been enabled: MODE
/// PARAMETERS CHANGED.
pub(crate) fn may_change_unit(attention: AdditionalSense) -> bool {
    matches!(
        (attention.code, attention.qualifier),
        (0x29, _) | (0x2a, 0x01 | 0x09) | (0x3f, 0x03 | 0x0e)
    )
}

/// Returns whether a unit attention may indicate that our commands were terminated without a
/// response: a reset (29h), or COMMANDS CLEARED BY ANOTHER INITIATOR and similar codes (2Fh; SAM-5
/// clause 5.6).
pub(crate) fn may_end_commands(attention: AdditionalSense) -> bool {
    matches!(attention.code, 0x29 | 0x2f)
}

/// Decides whether to retry after a response. Except for TASK ABORTED, after which a command may
/// have been executed, the target did not execute the command in any case that is retried here.
pub(crate) fn plan_verdict(response: &CommandResponse) -> Verdict {
    match response.status {
        BUSY | TASK_SET_FULL => Verdict::Wait,
        TASK_ABORTED => Verdict::Again,
        CHECK_CONDITION => match response.sense() {
            // The error belongs to an earlier command.
            Some(Sense {
                is_deferred: true, ..
            }) => Verdict::Again,
            Some(Sense {
                key: SenseKey::UnitAttention,
                ..
            }) => Verdict::Again,
            // Failed checks of protection information are reported, as Linux does.
            Some(Sense {
                key: SenseKey::AbortedCommand,
                additional,
                ..
            }) if ProtectionError::from_additional_sense(additional).is_none() => Verdict::Later,
            Some(Sense {
                key: SenseKey::NotReady,
                additional:
                    AdditionalSense {
                        code: 0x04,
                        qualifier,
                    },
                ..
            }) if is_transient(qualifier) => Verdict::Wait,
            // ASYMMETRIC ACCESS STATE TRANSITION: another path may be ready earlier.
            Some(Sense {
                key: SenseKey::NotReady,
                additional:
                    AdditionalSense {
                        code: 0x04,
                        qualifier: 0x0a,
                    },
                ..
            }) => Verdict::Later,
            _ => Verdict::Report,
        },
        _ => Verdict::Report,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn failed_protection_check_is_not_retried() {
        let verdict = |code, qualifier| {
            // Fixed format, ABORTED COMMAND.
            let mut sense = [0u8; 18];
            (sense[0], sense[2], sense[7]) = (0x70, 0x0b, 10);
            (sense[12], sense[13]) = (code, qualifier);
            plan_verdict(&CommandResponse {
                status: CHECK_CONDITION,
                sense: Some(sense.into()),
                transferred: 0,
                overflow: 0,
            })
        };
        for qualifier in 1..=3 {
            assert_eq!(verdict(0x10, qualifier), Verdict::Report);
        }
        assert_eq!(verdict(0x10, 0), Verdict::Later);
        assert_eq!(verdict(0x47, 0x05), Verdict::Later);
    }
}
