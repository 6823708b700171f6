//! The device server: checks a command against the state of its unit, plans it, and carries it from
//! step to step.
//!
//! It stands above everything else about SCSI here: the [`LogicalUnit`] has the state, the
//! [`Opcode`] of the request says what the command needs, its family in `commands` decides the
//! steps.

mod absent;
mod command;

pub use absent::respond_absent;
pub use command::Command;

use crate::cdb::Cdb;
use crate::commands::machine::Machine;
use crate::commands::plan::{Next, PlanResult, Planner, Refusal};
use crate::flags::CommandFlags;
use crate::lu::LogicalUnit;
use crate::lun::LunId;
use crate::nexus::NexusId;
use crate::opcode::{Direction, Opcode};
use crate::sense::{AdditionalSense, Sense, SenseKey};
use crate::step::{DataOut, Expected, Step, TaskAttribute};

/// One command as it came from a transport.
#[derive(Clone, Copy, Debug)]
pub struct Request<'a> {
    /// The nexus that sent it.
    pub nexus: NexusId,
    /// The CDB, as long as the transport delivered it; bytes beyond the
    /// command's own length are padding.
    pub cdb: &'a [u8],
    /// The row of the CDB: [`Opcode::of`].
    pub opcode: &'static Opcode,
    /// The initiator's buffer lengths.
    pub expected: Expected,
    /// Task attribute of the command.
    pub attribute: TaskAttribute,
    /// The logical units this nexus may see, for REPORT LUNS.
    pub luns: &'a [LunId],
    /// The LUN by which the nexus addresses the unit is read-only, even if the unit
    /// itself is not: WRITE PROTECTED.
    pub read_only: bool,
}

impl Request<'_> {
    fn planner<'a>(&'a self, lu: &'a LogicalUnit) -> Planner<'a> {
        Planner {
            lu,
            nexus: self.nexus,
            expected: self.expected,
            luns: self.luns,
            read_only: self.read_only,
        }
    }
}

impl LogicalUnit {
    /// Starts a command.
    ///
    /// A command whose CDB is refused comes back with its response as first step. Nothing in the
    /// request makes this panic.
    pub fn start(&self, request: &Request<'_>) -> (Command, Step) {
        let mut command = None;
        let step = self.start_in(request, &mut command);
        (command.expect("the command was started"), step)
    }

    /// Starts a command as [`start`](Self::start), in the place where it stays: it is large to
    /// move.
    pub fn start_in(&self, request: &Request<'_>, command: &mut Option<Command>) -> Step {
        let plan = plan(self, request);
        Command::begin(self, (request.nexus, request.expected), plan, command)
    }

    /// The Data-Out that a command begins with, according to its CDB, so that its data can be
    /// transferred before it takes its place in the order. All other checks are made when the
    /// command starts.
    #[must_use]
    pub fn data_out(&self, request: &Request<'_>) -> Option<DataOut> {
        let row = request.opcode;
        if request.expected.data_out == 0 || row.direction != Direction::Out {
            return None;
        }
        // A command that is going to be refused takes no data. Its sense is made when it starts,
        // after the checks that come before.
        let cdb = Cdb::parse(request.cdb, &row.usage).ok()?;
        // What takes data changes nothing as it is planned. RESERVE and START STOP UNIT do, and
        // have another direction.
        let plan = (row.plan)(&request.planner(self), &cdb).ok()?;
        match plan.first {
            Next::Receive { len, .. } if len > 0 => Some(DataOut {
                len,
                buffer_len: plan.buffer_len,
            }),
            _ => None,
        }
    }

    /// Whether a command would be refused before its first step if it started now, unit attentions
    /// apart. Of commands with an [`Opcode::volume`] only: some of the others take effect as they
    /// are planned.
    #[must_use]
    pub fn is_refused(&self, request: &Request<'_>) -> bool {
        // A whole plan, so that no check of the start can be forgotten here.
        plan_allowed(self, request).is_err()
    }
}

fn plan(lu: &LogicalUnit, request: &Request<'_>) -> PlanResult<Machine> {
    // Before the attention: a command that is refused in any state must not use it up.
    if request.attribute == TaskAttribute::Aca {
        // There is never an auto contingent allegiance (NORMACA is zero).
        return Err(Sense::illegal(AdditionalSense::INVALID_MESSAGE_ERROR).into());
    }
    if !request.opcode.is_free_of_attention()
        && let Some(attention) = lu.take_attention(request.nexus)
    {
        return Err(attention.sense().into());
    }
    plan_allowed(lu, request)
}

/// Plans a command that no unit attention stands before.
///
/// The order of the checks is what initiators see where several apply: a reservation conflict says
/// nothing of the CDB (SPC-4 5.13); a CDB that is not legal is never a matter of the medium's
/// state; and the state comes before the range of blocks, which belongs to the plan.
fn plan_allowed(lu: &LogicalUnit, request: &Request<'_>) -> PlanResult<Machine> {
    let row = request.opcode;
    let flags = row.flags;
    // The flag first, which is one atomic: without a reservation no command takes the mutex.
    if lu.is_restricted() && lu.conflicts(request.nexus, row.flags_under_reservation(request.cdb)) {
        return Err(Refusal::conflict());
    }
    // As an unknown command, and before its CDB is looked at: to a thick unit the operation code
    // means nothing.
    if flags.contains(CommandFlags::THIN) && !lu.config().is_thin() {
        return Err(row.unsupported().into());
    }
    let cdb = Cdb::parse(request.cdb, &row.usage)?;
    let needs_reservations =
        CommandFlags::RESERVATIONS | CommandFlags::SETTINGS | CommandFlags::CHANGES;
    // Where reservations could not be loaded, the unit does not know who may change it, and must
    // not take new ones, which would contradict those.
    let needs_unit = flags.contains(CommandFlags::READY)
        || (!lu.knows_reservations() && flags.intersects(needs_reservations));
    if needs_unit && let Some(sense) = lu.not_ready() {
        return Err(sense.into());
    }
    if flags.contains(CommandFlags::WRITES)
        && let Some(sense) = lu.write_protection()
    {
        return Err(sense.into());
    }
    // SETTINGS, too: an initiator that may not write must not hold up the others by a mode or a
    // reservation.
    if request.read_only && flags.intersects(CommandFlags::WRITES | CommandFlags::SETTINGS) {
        return Err(Sense::new(SenseKey::DataProtect, AdditionalSense::WRITE_PROTECTED).into());
    }
    (row.plan)(&request.planner(lu), &cdb)
}
