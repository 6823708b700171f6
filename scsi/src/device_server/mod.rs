//! The device server: checks a command against the state of the LU, plans it, and executes it step
//! by step.
//!
//! This is the top layer of the SCSI implementation. The state is in the [`LogicalUnit`], the
//! [`Opcode`] has the requirements of a command, and the steps are implemented in `commands`.

mod absent;
mod command;

pub use absent::respond_absent;
pub use command::Command;

use crate::commands::machine::Machine;
use crate::commands::plan::{Next, Plan, PlanResult, Planner, Refusal};
use crate::flags::CommandFlags;
use crate::lu::LogicalUnit;
use crate::lun::LunId;
use crate::nexus::NexusId;
use crate::opcode::{Direction, Opcode};
use crate::sense::{AdditionalSense, Sense, SenseKey};
use crate::step::{DataOut, Expected, Step, TaskAttribute};

/// A command received from a transport.
#[derive(Clone, Copy, Debug)]
pub struct Request<'a> {
    /// The nexus that sent this command.
    pub nexus: NexusId,
    /// The CDB as received from the transport. Any bytes after the length of the command are
    /// padding.
    pub cdb: &'a [u8],
    /// The row for this CDB, from [`Opcode::of`].
    pub opcode: &'static Opcode,
    /// Buffer sizes at the initiator.
    pub expected: Expected,
    /// Task attribute of the command.
    pub attribute: TaskAttribute,
    /// Logical units that are visible to this nexus, for REPORT LUNS.
    pub luns: &'a [LunId],
    /// The LUN used by the nexus is read-only, even if the LU is not. Writes will fail with WRITE
    /// PROTECTED.
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
    /// If the command is refused, the first step is the response. This never panics for any
    /// request.
    pub fn start(&self, request: &Request<'_>) -> (Command, Step) {
        let mut command = None;
        let step = self.start_in(request, &mut command);
        (command.expect("command was started"), step)
    }

    /// Same as [`start`](Self::start), but creates the command in place because it's expensive to
    /// move.
    pub fn start_in(&self, request: &Request<'_>, command: &mut Option<Command>) -> Step {
        let plan = plan(self, request);
        Command::begin(self, (request.nexus, request.expected), plan, command)
    }

    /// Returns the size of the first Data-Out transfer according to the CDB, so that the data can
    /// be received before the task is ordered. All other checks are made when the command is
    /// started.
    #[must_use]
    pub fn data_out(&self, request: &Request<'_>) -> Option<DataOut> {
        let row = request.opcode;
        if request.expected.data_out == 0 || row.direction != Direction::Out {
            return None;
        }
        // Don't receive any data if the command will be refused. The sense data will be created
        // when it's started, because some other check may have to be reported first.
        if !row.is_supported(self) {
            return None;
        }
        let cdb = row.parse(request.cdb, self).ok()?;
        // For a command with Data-Out, planning doesn't change any state. It does for RESERVE and
        // START STOP UNIT, but these have a different direction.
        match &(row.plan)(&request.planner(self), &cdb) {
            // A plan is large, so it's not moved.
            &Ok(Plan {
                first: Next::Receive { len, .. },
                buffer_len,
                ..
            }) if len > 0 => Some(DataOut { len, buffer_len }),
            _ => None,
        }
    }

    /// Returns whether a command would be refused if it were started now, ignoring unit attentions.
    /// This must only be called for a command with an [`Opcode::volume`], because some other
    /// commands are executed by the planning function.
    #[must_use]
    pub fn is_refused(&self, request: &Request<'_>) -> bool {
        // Create a full plan, so that we can't forget any check that is made on start.
        plan_allowed(self, request).is_err()
    }
}

fn plan(lu: &LogicalUnit, request: &Request<'_>) -> PlanResult<Machine> {
    // Check this before unit attentions, because a command that is refused in any case must not
    // consume the unit attention.
    if request.attribute == TaskAttribute::Aca {
        // NORMACA is zero, so there can't be an auto contingent allegiance.
        return Err(Sense::illegal(AdditionalSense::INVALID_MESSAGE_ERROR).into());
    }
    if !request.opcode.is_free_of_attention()
        && let Some(attention) = lu.take_attention(request.nexus)
    {
        return Err(attention.sense().into());
    }
    plan_allowed(lu, request)
}

/// Plans a command for which no unit attention has to be reported.
///
/// The order of these checks is visible to initiators if more than one of them fails. A reservation
/// conflict must be reported independent of the CDB (SPC-4 5.13), unless we
/// don't know the operation code. An invalid CDB must be reported in any state of the medium. The
/// state must be checked before the block range, which is part of the plan.
fn plan_allowed(lu: &LogicalUnit, request: &Request<'_>) -> PlanResult<Machine> {
    let row = request.opcode;
    let flags = row.flags;
    let is_supported = row.is_supported(lu);
    // The operation code of 32-byte CDBs is only defined with type 2. Ensure that it will otherwise
    // be refused in the same way as on a server that doesn't implement it.
    if !is_supported && flags.contains(CommandFlags::TYPE_2) {
        return Err(row.unsupported().into());
    }
    // Check the atomic flag first, so that we don't need to lock the mutex if there are no
    // reservations.
    if lu.is_restricted() && lu.conflicts(request.nexus, row.flags_under_reservation(request.cdb)) {
        return Err(Refusal::conflict());
    }
    // Refuse this as an unknown command, and do it before we check the CDB: the operation code is
    // not defined for this LU.
    if !is_supported {
        return Err(row.unsupported().into());
    }
    let cdb = row.parse(request.cdb, lu)?;
    let needs_reservations =
        CommandFlags::RESERVATIONS | CommandFlags::SETTINGS | CommandFlags::CHANGES;
    // If the reservations could not be loaded, we don't know which nexus may change the LU. We also
    // can't accept new reservations, because they might conflict with the saved ones.
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
    // This includes SETTINGS: an initiator without write access must not be able to block other
    // initiators by changing a mode or a reservation.
    if request.read_only && flags.intersects(CommandFlags::WRITES | CommandFlags::SETTINGS) {
        return Err(Sense::new(SenseKey::DataProtect, AdditionalSense::WRITE_PROTECTED).into());
    }
    (row.plan)(&request.planner(lu), &cdb)
}
