//! Outcome of a completed command, passed from the timer to the statistics.

use std::borrow::Cow;
use std::time::Instant;

use riser_scsi::opcode::Kind;
use riser_scsi::protection::ProtectionError;
use riser_scsi::sense::Sense;

use super::Stage;

/// Returns the current time, to measure stages. See the parent module.
pub type Clock = fn() -> Instant;

/// Results of a completed command.
#[derive(Debug)]
pub(super) struct Done {
    pub(super) class: Kind,
    /// Total time in nanoseconds.
    pub(super) took: u64,
    /// Time in nanoseconds by stage, for a timed command.
    pub(super) spent: Option<[u64; Stage::ALL.len()]>,
    pub(super) bytes: u64,
    pub(super) fault: Option<Fault>,
}

/// Fields of the protection information that can fail a check.
pub const CHECKS: [ProtectionError; 3] = [
    ProtectionError::Guard,
    ProtectionError::ApplicationTag,
    ProtectionError::ReferenceTag,
];

/// Returns the name of a field of the protection information, to be used as a label.
#[must_use]
pub const fn check_name(check: ProtectionError) -> &'static str {
    match check {
        ProtectionError::Guard => "guard",
        ProtectionError::ApplicationTag => "application_tag",
        ProtectionError::ReferenceTag => "reference_tag",
    }
}

/// Returns the failed check of protection information that is reported by sense data.
pub(super) fn failed_check(sense: &Sense) -> Option<ProtectionError> {
    let is_reported = |check: &ProtectionError| check.additional_sense() == sense.additional;
    CHECKS.into_iter().find(is_reported)
}

/// Failure of a command: its status and, for CHECK CONDITION, the sense key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fault {
    /// Kind of the command.
    pub class: Kind,
    /// SCSI status of the response.
    pub status: u8,
    /// Sense key, if the response includes sense data.
    pub sense_key: Option<u8>,
    /// Failed check of protection information.
    pub check: Option<ProtectionError>,
    /// Reason for flow control. This is not a failure, because the initiator will retry the
    /// command.
    pub throttle: Option<Throttle>,
}

/// Reason for refusing a command for flow control, with TASK SET FULL or BUSY.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Throttle {
    /// Too many commands are delayed by the limits of their unit or initiator.
    Limit,
    /// The task set is full, or there is not enough memory for the command.
    Queue,
}

impl Throttle {
    /// All reasons.
    pub const ALL: [Self; 2] = [Self::Limit, Self::Queue];

    /// Name in metrics.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Limit => "limit",
            Self::Queue => "queue",
        }
    }
}

impl Fault {
    /// Returns true if this is an error. A unit attention reports an event on the unit, and the
    /// command will be retried. NO SENSE and RECOVERED ERROR are reported for successful commands.
    /// Flow control is not an error either.
    #[must_use]
    pub fn is_error(&self) -> bool {
        self.throttle.is_none() && !matches!(self.sense_key, Some(0x0 | 0x1 | 0x6))
    }

    /// Returns true if this is a unit attention.
    #[must_use]
    pub fn is_attention(&self) -> bool {
        self.sense_key == Some(0x6)
    }

    /// Returns the name of the failed check, the sense key (SPC-4 4.5.6) or the status (SAM-5
    /// 5.3.1), as specified in the standards.
    #[must_use]
    pub fn name(&self) -> Cow<'static, str> {
        const KEYS: [&str; 16] = [
            "NO SENSE",
            "RECOVERED ERROR",
            "NOT READY",
            "MEDIUM ERROR",
            "HARDWARE ERROR",
            "ILLEGAL REQUEST",
            "UNIT ATTENTION",
            "DATA PROTECT",
            "BLANK CHECK",
            "VENDOR SPECIFIC",
            "COPY ABORTED",
            "ABORTED COMMAND",
            "EQUAL",
            "VOLUME OVERFLOW",
            "MISCOMPARE",
            "COMPLETED",
        ];
        if let Some(check) = self.check {
            return match check {
                ProtectionError::Guard => "GUARD CHECK FAILED",
                ProtectionError::ApplicationTag => "APPLICATION TAG CHECK FAILED",
                ProtectionError::ReferenceTag => "REFERENCE TAG CHECK FAILED",
            }
            .into();
        }
        // A sense key is more specific than its status, CHECK CONDITION.
        if let Some(key) = self.sense_key {
            return KEYS[usize::from(key & 0xf)].into();
        }
        match self.status {
            0x02 => "CHECK CONDITION".into(),
            0x08 => "BUSY".into(),
            0x18 => "RESERVATION CONFLICT".into(),
            0x28 => "TASK SET FULL".into(),
            0x40 => "TASK ABORTED".into(),
            other => format!("status {other:#04x}").into(),
        }
    }
}
