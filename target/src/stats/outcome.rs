//! Outcome of a command that was answered, as its timer hands it to the statistics.

use std::borrow::Cow;
use std::time::Instant;

use riser_scsi::opcode::Kind;

use super::Stage;

/// Reads the time of a stage; see the module above.
pub type Clock = fn() -> Instant;

/// The numbers of a command that was answered, for its account.
#[derive(Debug)]
pub(super) struct Done {
    pub(super) class: Kind,
    /// Total time in nanoseconds.
    pub(super) took: u64,
    /// Nanoseconds by stage, of a command that is timed.
    pub(super) spent: Option<[u64; Stage::ALL.len()]>,
    pub(super) bytes: u64,
    pub(super) fault: Option<Fault>,
}

/// Failure of a command: its status and, with CHECK CONDITION, the sense key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fault {
    /// Kind of the command.
    pub class: Kind,
    /// SCSI status of the answer.
    pub status: u8,
    /// Sense key, if the answer has sense data.
    pub sense_key: Option<u8>,
    /// Reason for flow control. This is not a failure: the initiator sends the command again.
    pub throttle: Option<Throttle>,
}

/// Reason for which flow control turns a command away, with TASK SET FULL or BUSY.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Throttle {
    /// Too many commands wait for the limits of their backend or initiator.
    Limit,
    /// The task set is full, or there is no memory for the command.
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
    /// Returns true if it is an error. A unit attention reports what has happened to the unit, and
    /// its command is repeated; NO SENSE and RECOVERED ERROR go with commands that were carried
    /// out. Flow control is no error either.
    #[must_use]
    pub fn is_error(&self) -> bool {
        self.throttle.is_none() && !matches!(self.sense_key, Some(0x0 | 0x1 | 0x6))
    }

    /// Returns true if it is a unit attention.
    #[must_use]
    pub fn is_attention(&self) -> bool {
        self.sense_key == Some(0x6)
    }

    /// Its sense key (SPC-4 4.5.6) or status (SAM-5 5.3.1), as the standards call them.
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
        // A sense key says more than CHECK CONDITION, the status that comes with it.
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
