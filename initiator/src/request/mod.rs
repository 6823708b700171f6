//! Work of a session of any protocol: requests, their ends, and which of them may be done twice.
//!
//! `table` holds a session's requests, and decides what becomes of one whose attempt is over.

#![forbid(unsafe_code)]

mod command;
pub(crate) mod table;

use std::time::Instant;

use riser_scsi::iscsi::pdu::RejectReason;
use riser_scsi::lun::WireLun;
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

/// Effect of a command, which decides whether it may be carried out twice.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Effect {
    /// It changes nothing: inquiries, status.
    None,
    /// It changes nothing, and brings what blocks of the logical unit hold.
    Read {
        /// First logical block address.
        start: u64,
        /// Block after the last.
        end: u64,
    },
    /// Blocks of the logical unit, to a state that does not depend on what they held: writes,
    /// unmaps. Doing it twice leaves what doing it once leaves.
    Blocks {
        /// First logical block address.
        start: u64,
        /// Block after the last.
        end: u64,
    },
    /// The whole medium, whose blocks stay what they are: cache flushes.
    Medium,
    /// Something else, which doing twice may spoil.
    Other,
}

impl Effect {
    /// Returns whether the command may be sent again when it is not known if it was carried out.
    #[must_use]
    pub fn is_replayable(self) -> bool {
        self != Self::Other
    }

    /// Returns whether the command may change the unit.
    #[must_use]
    pub fn is_change(self) -> bool {
        !matches!(self, Self::None | Self::Read { .. })
    }

    /// Returns whether what another command brings may depend on this one.
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

/// Repetition of a command by the session itself, when the target is busy or not ready.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Retry {
    /// After BUSY, TASK SET FULL, a unit attention and the like: conditions under which the command
    /// was not carried out.
    Standard,
    /// Never: the caller sees every status.
    Never,
    /// As [`Self::Standard`]. It asks which unit there is, so it goes ahead of the requests that
    /// wait for that to be known.
    Probe,
}

/// A request for a session.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RequestSpec {
    /// Logical unit, as on the wire.
    pub lun: WireLun,
    /// Task attribute of the command.
    pub attr: TaskAttr,
    /// Command descriptor block to send.
    pub cdb: Cdb,
    /// Data direction and length.
    pub len: DataLen,
    /// Time at which it ends at the latest.
    pub deadline: Instant,
    /// Repetition on the target's wish.
    pub retry: Retry,
    /// Change that it makes to the unit.
    pub effect: Effect,
}

/// A target's answer to a command.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Answer {
    /// SCSI status of the command.
    pub status: u8,
    /// Sense data, if any came.
    pub sense: Option<Box<[u8]>>,
    /// Bytes of the buffer that the command used.
    pub transferred: u32,
    /// Bytes more that it would have used.
    pub overflow: u32,
}

impl Answer {
    /// The meaning of the sense data, where there is any.
    #[must_use]
    pub fn sense(&self) -> Option<Sense> {
        self.sense.as_deref().and_then(Sense::parse)
    }

    /// Returns whether the command was executed successfully: GOOD, or CHECK CONDITION that only
    /// reports how the target recovered from an error.
    #[must_use]
    pub fn is_success(&self) -> bool {
        self.status == GOOD || self.check().is_some_and(|sense| sense.is_success())
    }

    /// Sense data of a CHECK CONDITION.
    fn check(&self) -> Option<Sense> {
        (self.status == CHECK_CONDITION).then(|| self.sense())?
    }
}

/// Reason for a request to have no answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RequestError {
    /// It did not end in time. It may have been carried out if it was sent. The target carries it
    /// out no longer, unless the connection is down: then none of what is sent later overtakes it,
    /// with several paths none that reads or changes the same blocks.
    #[error("timed out")]
    TimedOut,
    /// It was not sent before its time was up: a [`Retry::Probe`] behind other commands.
    #[error("timed out before it was sent")]
    NotSent,
    /// The connection broke, and the command is not one that may be sent twice.
    #[error("connection lost while a command that cannot be repeated was outstanding")]
    ConnectionLost,
    /// The target found the request itself at fault.
    #[error("target refused the request (response code {0:?})")]
    Refused(RspCode),
    /// The target rejected the PDU that carried the request.
    #[error("target rejected the request ({0:?})")]
    Rejected(RejectReason),
    /// The target could not carry the request out; the value is iSCSI's response code.
    #[error("target failed (response {0:#04x})")]
    TargetFailure(u8),
    /// A flush was carried out, but the target may have lost data before that which it had
    /// acknowledged. Reported once; see [`crate::unit`].
    #[error("the target may have lost acknowledged writes that were not on the medium yet")]
    CacheLost,
    /// The session is closed, or was meanwhile.
    #[error("session is closed")]
    Closed,
    /// The request could not be started; the message says why.
    #[error("{0}")]
    NotStarted(&'static str),
}

/// End of a request.
pub type RequestResult = Result<Answer, RequestError>;

/// Names a request of a session until it is completed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct RequestId(pub u32);

/// Next step after an answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Verdict {
    /// Report it to the issuer.
    Report,
    /// Send it again at once.
    Again,
    /// Send it again after a while.
    Later,
    /// The target asks to wait: send it again after a while, as long as there is time.
    Wait,
}

/// The unit attention condition that an answer reports (SAM-5 clause 5.14), if it does.
pub(crate) fn attention_of(answer: &Answer) -> Option<AdditionalSense> {
    let sense = answer.check()?;
    (sense.key == SenseKey::UnitAttention).then_some(sense.additional)
}

/// Returns whether an answer reports that the target does not present the logical unit: LOGICAL UNIT
/// NOT SUPPORTED. The command was not executed.
pub(crate) fn is_unit_missing(answer: &Answer) -> bool {
    let code = AdditionalSense::LOGICAL_UNIT_NOT_SUPPORTED.code;
    let is_missing = |sense: Sense| {
        sense.key == SenseKey::IllegalRequest && sense.additional.code == code && !sense.is_deferred
    };
    answer.check().is_some_and(is_missing)
}

/// Returns whether an answer reports a deferred error, instead of executing the command.
pub(crate) fn is_deferred(answer: &Answer) -> bool {
    answer.check().is_some_and(|sense| sense.is_deferred)
}

/// Returns whether a logical unit that is not ready (04h) becomes ready by itself. The qualifiers
/// are those for which Linux repeats a command after a delay.
fn is_transient(qualifier: u8) -> bool {
    /// IN PROCESS OF BECOMING READY.
    const BECOMING_READY: u8 = 0x01;
    /// FORMAT, REBUILD, RECALCULATION, OPERATION, LONG WRITE, SELF-TEST IN PROGRESS.
    const IN_PROGRESS: std::ops::RangeInclusive<u8> = 0x04..=0x09;
    /// NOTIFY (ENABLE SPINUP) REQUIRED: the disk waits for its turn to spin up.
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

/// Returns whether the unit may be another one after a unit attention, or of another size: a
/// reset of any kind (29h), CAPACITY DATA HAS CHANGED, INQUIRY DATA HAS CHANGED, REPORTED LUNS
/// DATA HAS CHANGED (SPC-4 annex F); or whether it may have a volatile cache from now on: MODE
/// PARAMETERS CHANGED.
pub(crate) fn may_change_unit(attention: AdditionalSense) -> bool {
    matches!(
        (attention.code, attention.qualifier),
        (0x29, _) | (0x2a, 0x01 | 0x09) | (0x3f, 0x03 | 0x0e)
    )
}

/// Returns whether commands of ours may have ended without an answer before a unit attention: a
/// reset (29h), COMMANDS CLEARED BY ANOTHER INITIATOR and its kin (2Fh; SAM-5 clause 5.6).
pub(crate) fn may_end_commands(attention: AdditionalSense) -> bool {
    matches!(attention.code, 0x29 | 0x2f)
}

/// Decides whether an answer asks for a repetition. In every case named here but TASK ABORTED,
/// after which a command may have been carried out, the target did not carry the command out.
pub(crate) fn plan_verdict(answer: &Answer) -> Verdict {
    match answer.status {
        BUSY | TASK_SET_FULL => Verdict::Wait,
        TASK_ABORTED => Verdict::Again,
        CHECK_CONDITION => match answer.sense() {
            // The error belongs to an earlier command.
            Some(Sense {
                is_deferred: true, ..
            }) => Verdict::Again,
            Some(Sense {
                key: SenseKey::UnitAttention,
                ..
            }) => Verdict::Again,
            Some(Sense {
                key: SenseKey::AbortedCommand,
                ..
            }) => Verdict::Later,
            Some(Sense {
                key: SenseKey::NotReady,
                additional:
                    AdditionalSense {
                        code: 0x04,
                        qualifier,
                    },
                ..
            }) if is_transient(qualifier) => Verdict::Wait,
            // ASYMMETRIC ACCESS STATE TRANSITION: another path may be ready sooner.
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
