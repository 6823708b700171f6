//! The ways of single commands: which are wanted, and what was found.

use std::time::Duration;

use serde::{Deserialize, Serialize};

/// Largest number of commands that are returned.
pub const MOST_COMMANDS: usize = 10_000;

/// Seconds that they are looked for at most.
pub const MOST_SECONDS: f64 = 3600.0;

/// Which commands are wanted; what is left out does not matter.
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

/// What was found.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Traced {
    /// Commands, in the order of their ends.
    pub commands: Vec<TracedCommand>,
    /// How many more there were than could be kept.
    pub missed: u64,
}

/// A command.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TracedCommand {
    /// When it came, in seconds since 1970.
    pub time: f64,
    /// The target's name.
    pub target: String,
    /// The logical unit.
    pub lun: u16,
    /// The initiator port; none if its session is gone already.
    pub initiator: Option<String>,
    /// `srp`, `iser` or `iscsi`; likewise.
    pub protocol: Option<String>,
    /// The I_T nexus.
    pub nexus: u64,
    /// Its tag.
    pub tag: u64,
    /// Operation code.
    pub opcode: u8,
    /// What that is called.
    pub name: Option<String>,
    /// The first logical block, where the command names blocks.
    pub lba: Option<u64>,
    /// How many blocks; likewise.
    pub blocks: Option<u32>,
    /// Data both ways.
    pub bytes: u64,
    /// SCSI status.
    pub status: u8,
    /// How long it took, in seconds.
    pub seconds: f64,
    /// The stages that it was in.
    pub steps: Vec<TracedStep>,
}

/// A stage of a command.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TracedStep {
    /// `fabric_in`, `scsi`, `limits`, `backend` or `fabric_out`.
    pub stage: String,
    /// How long after it had come the command reached it, in seconds.
    pub at: f64,
}

impl Wanted {
    /// Whether it is sensible.
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

    /// How many are enough.
    #[must_use]
    pub fn count(&self) -> usize {
        self.count.unwrap_or(100)
    }

    /// How long they are looked for.
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
