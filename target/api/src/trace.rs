//! The ways of single commands: which are wanted, and what was found.

use std::time::Duration;

use serde::{Deserialize, Serialize};

/// Largest number of commands that are returned.
pub const MOST_COMMANDS: usize = 10_000;

/// Seconds that they are looked for at most.
pub const MOST_SECONDS: f64 = 3600.0;

/// A filter for commands; a field that is left out matches all.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Wanted {
    /// Those to this target.
    pub target: Option<String>,
    /// Those to the logical unit of this number.
    pub lun: Option<u16>,
    /// Those of this initiator port, or of an initiator whose name begins so.
    pub initiator: Option<String>,
    /// Those of this tag: SRP's, or the initiator task tag of iSCSI.
    pub tag: Option<u64>,
    /// Those that take at least so long, in seconds.
    pub slower_than: f64,
    /// Number of commands; 100 by default.
    pub count: Option<usize>,
    /// Longest time of the search, in seconds; 10 by default.
    pub seconds: Option<f64>,
}

/// Commands that a search has found.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Traced {
    /// Commands, in the order of their ends.
    pub commands: Vec<TracedCommand>,
    /// Number of matching commands beyond those that could be kept.
    pub missed: u64,
}

/// One command and the times of its stages.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TracedCommand {
    /// Arrival, in seconds since 1970.
    pub time: f64,
    /// Target's name in the configuration.
    pub target: String,
    /// Logical unit number in the target.
    pub lun: u16,
    /// The initiator port; none if its session is gone already.
    pub initiator: Option<String>,
    /// `srp`, `iser` or `iscsi`; likewise.
    pub protocol: Option<String>,
    /// Number of the I_T nexus that it came by.
    pub nexus: u64,
    /// Tag that the initiator has given it.
    pub tag: u64,
    /// Operation code, the first byte of the CDB.
    pub opcode: u8,
    /// Name of the operation code, if it is known.
    pub name: Option<String>,
    /// The first logical block, where the command names blocks.
    pub lba: Option<u64>,
    /// Number of blocks; likewise.
    pub blocks: Option<u32>,
    /// Data from and to the initiator, in bytes.
    pub bytes: u64,
    /// SCSI status of the answer.
    pub status: u8,
    /// Seconds from its arrival to the end of its answer.
    pub seconds: f64,
    /// The stages that it was in.
    pub steps: Vec<TracedStep>,
}

/// A stage of a command.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TracedStep {
    /// `fabric_in`, `scsi`, `limits`, `backend` or `fabric_out`.
    pub stage: String,
    /// Seconds from the command's arrival to the beginning of the stage.
    pub at: f64,
}

impl Wanted {
    /// Checks that the filter is sensible.
    ///
    /// # Errors
    /// Why not.
    pub fn check(&self) -> Result<(), String> {
        let is_time = |seconds: f64| (0.0..=MOST_SECONDS).contains(&seconds);
        if !is_time(self.slower_than) || !self.seconds.is_none_or(is_time) {
            return Err(format!("times are from 0 to {MOST_SECONDS} seconds"));
        }
        if !(1..=MOST_COMMANDS).contains(&self.count()) {
            return Err(format!("a count is from 1 to {MOST_COMMANDS}"));
        }
        Ok(())
    }

    /// Number of commands after which the search is over.
    #[must_use]
    pub fn count(&self) -> usize {
        self.count.unwrap_or(100)
    }

    /// Time after which the search is over, with as many as there are.
    #[must_use]
    pub fn patience(&self) -> Duration {
        Duration::from_secs_f64(self.seconds.unwrap_or(10.0))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_cannot_be_is_refused() {
        assert_eq!(Wanted::default().check(), Ok(()));
        for wanted in [
            Wanted {
                slower_than: -1.0,
                ..Wanted::default()
            },
            Wanted {
                slower_than: f64::NAN,
                ..Wanted::default()
            },
            Wanted {
                seconds: Some(1e9),
                ..Wanted::default()
            },
            Wanted {
                count: Some(0),
                ..Wanted::default()
            },
        ] {
            assert!(wanted.check().is_err(), "{wanted:?}");
        }
    }
}
