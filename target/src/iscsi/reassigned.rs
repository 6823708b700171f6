//! Commands on their way between the connections of a session, as the connections know them. The
//! way itself is in `allegiance`.

use std::collections::VecDeque;

use riser_scsi::lun::WireLun;
use riser_scsi::step::Response;

use super::datamover::Start;
use crate::fabric::{Execution, TaskRef};

/// A claim of TASK REASSIGN to a command of a lost connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReassignRequest {
    /// Name of the command on the connection that is lost.
    pub task: TaskRef,
    /// The context that waits for it.
    pub to: TaskRef,
    /// Number of the first Data-In or R2T PDU that the initiator does not have.
    pub exp_data_sn: u32,
}

/// A command on its way from a lost connection to another one.
#[derive(Debug)]
pub struct ReassignedTask {
    pub(super) exec: Execution,
    pub(super) lun: WireLun,
    pub(super) counted: bool,
    pub(super) lingers: bool,
    /// Milliseconds that it has waited for the initiator, while others may have waited for it.
    pub(super) waited: u32,
    pub(super) r2ts: u32,
    pub(super) point: ResumePoint,
}

/// Point from which a reassigned command goes on.
#[derive(Debug)]
pub(super) enum ResumePoint {
    /// It is answered, with data from `base` on that the initiator has up to `start`.
    Respond {
        response: Response,
        base: u32,
        start: Start,
    },
    /// It wants a piece of `len` bytes, of which `received` have arrived.
    Receive {
        from: u32,
        len: u32,
        received: Vec<u8>,
    },
    /// It sends a piece, which the initiator has up to here.
    Send {
        from: u32,
        data: Vec<u8>,
        start: Start,
    },
}

/// Commands of a channel that come from or go to another connection.
#[derive(Debug, Default)]
pub(super) struct Allegiance {
    /// Nothing is said to the initiator any more.
    pub(super) silent: bool,
    /// The connection is logged out for recovery.
    pub(super) detached: bool,
    /// It has logged itself out, so perhaps the session has no other.
    pub(super) by_itself: bool,
    /// Claims of other connections to commands of this one.
    pub(super) claims: Vec<ReassignRequest>,
    /// Old and new names of commands that were handed over.
    pub(super) moved: Vec<(TaskRef, TaskRef)>,
    pub(super) reassigned: VecDeque<(TaskRef, Option<Box<ReassignedTask>>)>,
}

impl Allegiance {
    /// Whether nothing is said to the initiator any more.
    pub(super) fn is_silent(&self) -> bool {
        self.silent
    }

    /// The present name of a command that was handed over.
    pub(super) fn moved(&self, name: TaskRef) -> Option<TaskRef> {
        let found = self.moved.iter().find(|(old, _)| *old == name);
        found.map(|(_, new)| *new)
    }

    pub(super) fn is_claimed(&self, task: TaskRef) -> bool {
        self.claims.iter().any(|claim| claim.task == task)
    }
}
