//! REPORT SUPPORTED OPERATION CODES and REPORT SUPPORTED TASK MANAGEMENT FUNCTIONS (SPC-4 6.35,
//! 6.36), based on the opcode table.

use super::{INVALID_ACTION, Opcode, with_code};
use crate::cdb::{ACTION_MASK, Cdb};
use crate::commands::plan::{Plan, PlanResult, Planner};
use crate::data::cdb::block_32;
use crate::lu::LogicalUnit;
use crate::sense::Sense;

/// SUPPORT field: not supported, or supported as in the standard.
const NOT_SUPPORTED: u8 = 0x1;
const STANDARD: u8 = 0x3;

/// REPORT SUPPORTED OPERATION CODES.
pub(crate) fn plan_opcodes<M>(planner: &Planner<'_>, cdb: &Cdb) -> PlanResult<M> {
    let lu = planner.lu;
    let timeouts = cdb.bit(2, 7);
    let data = match cdb.byte(2) & 0x7 {
        0 => all(lu, timeouts),
        option @ 1..=3 => {
            let entry = one(lu, option, cdb.byte(3), cdb.be16(4))?;
            describe(entry, lu, timeouts)
        }
        _ => return Err(Sense::cdb_field(2, Some(2)).into()),
    };
    Ok(Plan::data(data, cdb.be32(6)))
}

/// Returns the command for which a single descriptor was requested.
///
/// Option 1 is used for opcodes without service actions, option 2 for opcodes with service actions,
/// and option 3 for both.
fn one(
    lu: &LogicalUnit,
    option: u8,
    code: u8,
    action: u16,
) -> Result<Option<&'static Opcode>, Sense> {
    // A THIN or TYPE_2 command is in the table, but not supported by all LUs.
    let mut rows = with_code(code).filter(|entry| entry.is_supported(lu));
    // An unknown command is not an error. We need to report that it's not supported.
    let Some(first) = rows.next() else {
        return Ok(None);
    };
    let has_actions = first.service_action.is_some();
    match option {
        // If the option does not match the command, we need to return an error. Otherwise, the
        // initiator would use the response for a different command.
        1 if has_actions => return Err(Sense::cdb_field(2, Some(2))),
        2 if !has_actions => return Err(Sense::cdb_field(2, Some(2))),
        _ => {}
    }
    if !has_actions {
        // With option 3, a command without service actions must have an action of zero.
        return Ok((option == 1 || action == 0).then_some(first));
    }
    let is_requested = |entry: &&Opcode| entry.service_action.map(u16::from) == Some(action);
    Ok(std::iter::once(first).chain(rows).find(is_requested))
}

/// Refuses a command that is only sent by initiators.
pub(crate) fn plan_foreign<M>(_planner: &Planner<'_>, _cdb: &Cdb) -> PlanResult<M> {
    Err(INVALID_ACTION.into())
}

fn timeouts_descriptor(entry: &Opcode) -> [u8; 12] {
    let mut out = [0; 12];
    out[1] = 0x0a;
    // We don't know the nominal time, so use the recommended timeout.
    out[8..].copy_from_slice(&entry.timeout.to_be_bytes());
    out
}

fn all(lu: &LogicalUnit, timeouts: bool) -> Vec<u8> {
    let mut data = vec![0; 4];
    for entry in Opcode::all().iter().filter(|entry| entry.is_supported(lu)) {
        let flags = u8::from(entry.service_action.is_some()) | u8::from(timeouts) << 1;
        data.extend([entry.code, 0]);
        data.extend([0, entry.service_action.unwrap_or(0)]);
        data.extend([0, flags]);
        data.extend((entry.usage().len() as u16).to_be_bytes());
        if timeouts {
            data.extend(timeouts_descriptor(entry));
        }
    }
    let len = data.len() as u32 - 4;
    data[..4].copy_from_slice(&len.to_be_bytes());
    data
}

fn describe(entry: Option<&Opcode>, lu: &LogicalUnit, timeouts: bool) -> Vec<u8> {
    let Some(entry) = entry else {
        return vec![0, NOT_SUPPORTED, 0, 0];
    };
    let mut data = vec![0, STANDARD | u8::from(timeouts) << 7];
    let mut usage = entry.usage_for(lu).bytes().to_vec();
    if let Some(action) = entry.service_action {
        // Replace the mask in the bitmap with the actual service action.
        if entry.code == block_32::VARIABLE_LENGTH {
            block_32::SERVICE_ACTION.set(&mut usage, action.into());
        } else {
            usage[1] = usage[1] & !ACTION_MASK | action;
        }
    }
    data.extend((usage.len() as u16).to_be_bytes());
    data.extend(usage);
    if timeouts {
        data.extend(timeouts_descriptor(entry));
    }
    data
}

/// REPORT SUPPORTED TASK MANAGEMENT FUNCTIONS.
pub(crate) fn plan_task_functions<M>(_planner: &Planner<'_>, cdb: &Cdb) -> PlanResult<M> {
    // ABORT TASK, ABORT TASK SET, CLEAR TASK SET, LOGICAL UNIT RESET, QUERY TASK, then QUERY TASK
    // SET, I_T NEXUS RESET.
    let mut data = vec![0x80 | 0x40 | 0x10 | 0x08 | 0x04, 0x02 | 0x01, 0, 0];
    if cdb.bit(2, 7) {
        // REPD: the total size is 16 bytes, with 12 additional bytes. We don't report any timeouts.
        data[3] = 0x0c;
        data.resize(16, 0);
    }
    Ok(Plan::data(data, cdb.be32(6)))
}
