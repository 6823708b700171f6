//! Command traces: the filter and the results.

use std::time::Duration;

use serde::{Deserialize, Serialize};

/// Maximum number of commands to return.
pub const MOST_COMMANDS: usize = 10_000;

/// Maximum duration of a trace in seconds.
pub const MOST_SECONDS: f64 = 3600.0;

/// A filter for commands. Fields that are not set match all commands.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Wanted {
    /// Target name.
    pub target: Option<String>,
    /// Logical unit number.
    pub lun: Option<u16>,
    /// Initiator port, or a prefix of the initiator name.
    pub initiator: Option<String>,
    /// Tag: the SRP tag or the iSCSI initiator task tag.
    pub tag: Option<u64>,
    /// Minimum latency in seconds.
    pub slower_than: f64,
    /// Number of commands; 100 by default.
    pub count: Option<usize>,
    /// Maximum duration of the trace in seconds; 10 by default.
    pub seconds: Option<f64>,
}

/// Traced commands.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Traced {
    /// Commands in the order of their completion.
    pub commands: Vec<TracedCommand>,
    /// Number of matching commands that were dropped because the buffer was full.
    pub missed: u64,
}

/// A command with the timestamps of its stages.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TracedCommand {
    /// Arrival time in seconds since 1970.
    pub time: f64,
    /// Target name in the configuration.
    pub target: String,
    /// Logical unit number.
    pub lun: u16,
    /// Initiator port; not set if the session was already closed.
    pub initiator: Option<String>,
    /// `srp`, `iser` or `iscsi`; not set if the session was already closed.
    pub protocol: Option<String>,
    /// Number of the I_T nexus.
    pub nexus: u64,
    /// Tag assigned by the initiator.
    pub tag: u64,
    /// Operation code, the first byte of the CDB.
    pub opcode: u8,
    /// Name of the operation code, if known.
    pub name: Option<String>,
    /// First logical block, if the command has a block range.
    pub lba: Option<u64>,
    /// Number of blocks, if the command has a block range.
    pub blocks: Option<u32>,
    /// Bytes transferred in both directions.
    pub bytes: u64,
    /// SCSI status.
    pub status: u8,
    /// Seconds from arrival until the response was sent.
    pub seconds: f64,
    /// The stages of the command.
    pub steps: Vec<TracedStep>,
}

/// A stage of a command.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TracedStep {
    /// `fabric_in`, `limits`, `order`, `memory`, `scsi`, `backend` or `fabric_out`.
    pub stage: String,
    /// Start of the stage, in seconds since the command's arrival.
    pub at: f64,
}

impl Wanted {
    /// Checks that the filter is valid.
    ///
    /// # Errors
    /// Returns a message if it is not valid.
    pub fn check(&self) -> Result<(), String> {
        let is_time = |seconds: f64| (0.0..=MOST_SECONDS).contains(&seconds);
        if !is_time(self.slower_than) || !self.seconds.is_none_or(is_time) {
            return Err(format!(
                "invalid time: must be from 0 to {MOST_SECONDS} seconds"
            ));
        }
        if !(1..=MOST_COMMANDS).contains(&self.count()) {
            return Err(format!("invalid count: must be from 1 to {MOST_COMMANDS}"));
        }
        Ok(())
    }

    /// Returns the number of commands after which the trace is complete.
    #[must_use]
    pub fn count(&self) -> usize {
        self.count.unwrap_or(100)
    }

    /// Returns the maximum duration of the trace. After this time, we return all commands found so
    /// far.
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
