//! Types for commands that are moved between connections of a session. See `allegiance` for the
//! protocol.

use std::collections::VecDeque;

use riser_scsi::lun::WireLun;
use riser_scsi::step::Response;

use super::datamover::Start;
use crate::fabric::{Execution, TaskRef};

/// Request to claim a command of a lost connection (TASK REASSIGN).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReassignRequest {
    /// Command on the lost connection.
    pub task: TaskRef,
    /// New context for the command.
    pub to: TaskRef,
    /// Number of the first Data-In or R2T PDU that the initiator hasn't received.
    pub exp_data_sn: u32,
}

/// Command being moved from a lost connection to another connection.
#[derive(Debug)]
pub struct ReassignedTask {
    pub(super) exec: Execution,
    pub(super) lun: WireLun,
    pub(super) counted: bool,
    pub(super) lingers: bool,
    /// Time that the command has been waiting for the initiator while others may be waiting for the
    /// command, in milliseconds.
    pub(super) waited: u32,
    pub(super) r2ts: u32,
    pub(super) point: ResumePoint,
}

/// Where to resume a reassigned command.
#[derive(Debug)]
pub(super) enum ResumePoint {
    /// Send the response. Its data begins at `base`, and the initiator has received it up to
    /// `start`.
    Respond {
        response: Response,
        base: u32,
        start: Start,
    },
    /// Receive a piece of `len` bytes. `received` bytes are already in the buffer.
    Receive {
        from: u32,
        len: u32,
        received: Vec<u8>,
    },
    /// Send a piece, which the initiator has received up to this point.
    Send {
        from: u32,
        data: Vec<u8>,
        start: Start,
    },
}

/// Commands being moved from or to another connection.
#[derive(Debug, Default)]
pub(super) struct Allegiance {
    /// Nothing is sent to the initiator.
    pub(super) silent: bool,
    /// The connection was logged out for recovery.
    pub(super) detached: bool,
    /// This connection has requested the logout itself, so it may be the last one of the session.
    pub(super) by_itself: bool,
    /// Claims by other connections for our commands.
    pub(super) claims: Vec<ReassignRequest>,
    /// Previous and new names of commands that were handed over.
    pub(super) moved: Vec<(TaskRef, TaskRef)>,
    pub(super) reassigned: VecDeque<(TaskRef, Option<Box<ReassignedTask>>)>,
}

impl Allegiance {
    /// Returns true if nothing is sent to the initiator.
    pub(super) fn is_silent(&self) -> bool {
        self.silent
    }

    /// Returns the new name of a command that was handed over.
    pub(super) fn moved(&self, name: TaskRef) -> Option<TaskRef> {
        let found = self.moved.iter().find(|(old, _)| *old == name);
        found.map(|(_, new)| *new)
    }

    pub(super) fn is_claimed(&self, task: TaskRef) -> bool {
        self.claims.iter().any(|claim| claim.task == task)
    }
}
