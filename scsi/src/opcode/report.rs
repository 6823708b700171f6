//! REPORT SUPPORTED OPERATION CODES and REPORT SUPPORTED TASK MANAGEMENT FUNCTIONS (SPC-4 6.35,
//! 6.36), read from the opcode table.

use super::{INVALID_ACTION, Opcode, with_code};
use crate::cdb::{ACTION_MASK, Cdb};
use crate::commands::plan::{Plan, PlanResult, Planner};
use crate::config::Config;
use crate::flags::CommandFlags;
use crate::sense::Sense;

/// SUPPORT: not supported; supported as the standard says.
const NOT_SUPPORTED: u8 = 0x1;
const STANDARD: u8 = 0x3;

fn is_offered(entry: &Opcode, config: &Config) -> bool {
    !entry.flags.contains(CommandFlags::THIN) || config.is_thin()
}

/// REPORT SUPPORTED OPERATION CODES.
pub(crate) fn plan_opcodes<M>(planner: &Planner<'_>, cdb: &Cdb) -> PlanResult<M> {
    let config = planner.lu.config();
    let timeouts = cdb.bit(2, 7);
    let data = match cdb.byte(2) & 0x7 {
        0 => all(config, timeouts),
        option @ 1..=3 => {
            // A THIN command of a thick unit exists in the table, and not for this unit.
            let entry = one(option, cdb.byte(3), cdb.be16(4))?;
            describe(entry.filter(|entry| is_offered(entry, config)), timeouts)
        }
        _ => return Err(Sense::cdb_field(2, Some(2)).into()),
    };
    Ok(Plan::data(data, cdb.be32(6)))
}

/// Finds the command one descriptor is asked for.
///
/// Option 1 is for opcodes without service actions, option 2 for those with,
/// option 3 for either.
fn one(option: u8, code: u8, action: u16) -> Result<Option<&'static Opcode>, Sense> {
    // An unknown command is no error here: that it is not supported is the answer.
    let Some(first) = with_code(code).next() else {
        return Ok(None);
    };
    let has_actions = first.service_action.is_some();
    match option {
        // An option that does not fit the command is an error of the initiator, which would take
        // the answer for that of another command.
        1 if has_actions => return Err(Sense::cdb_field(2, Some(2))),
        2 if !has_actions => return Err(Sense::cdb_field(2, Some(2))),
        _ => {}
    }
    if !has_actions {
        // By option 3 a command without service actions has the action zero and no other.
        return Ok((option == 1 || action == 0).then_some(first));
    }
    Ok(with_code(code).find(|entry| entry.service_action.map(u16::from) == Some(action)))
}

/// Refuses a command that only initiators know.
pub(crate) fn plan_foreign<M>(_planner: &Planner<'_>, _cdb: &Cdb) -> PlanResult<M> {
    Err(INVALID_ACTION.into())
}

fn timeouts_descriptor(entry: &Opcode) -> [u8; 12] {
    let mut out = [0; 12];
    out[1] = 0x0a;
    // The nominal time is not known; the recommended timeout is.
    out[8..].copy_from_slice(&entry.timeout.to_be_bytes());
    out
}

fn all(config: &Config, timeouts: bool) -> Vec<u8> {
    let mut data = vec![0; 4];
    for entry in Opcode::all()
        .iter()
        .filter(|entry| is_offered(entry, config))
    {
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

fn describe(entry: Option<&Opcode>, timeouts: bool) -> Vec<u8> {
    let Some(entry) = entry else {
        return vec![0, NOT_SUPPORTED, 0, 0];
    };
    let mut data = vec![0, STANDARD | u8::from(timeouts) << 7];
    data.extend((entry.usage().len() as u16).to_be_bytes());
    let start = data.len();
    data.extend_from_slice(entry.usage());
    if let Some(action) = entry.service_action {
        // The bitmap names the action itself where the action is.
        data[start + 1] = data[start + 1] & !ACTION_MASK | action;
    }
    if timeouts {
        data.extend(timeouts_descriptor(entry));
    }
    data
}

/// REPORT SUPPORTED TASK MANAGEMENT FUNCTIONS.
pub(crate) fn plan_task_functions<M>(_planner: &Planner<'_>, cdb: &Cdb) -> PlanResult<M> {
    // ABORT TASK, ABORT TASK SET, CLEAR TASK SET, LOGICAL UNIT RESET, QUERY TASK;
    // then QUERY TASK SET, I_T NEXUS RESET.
    let mut data = vec![0x80 | 0x40 | 0x10 | 0x08 | 0x04, 0x02 | 0x01, 0, 0];
    if cdb.bit(2, 7) {
        // REPD: sixteen bytes, twelve of them additional; no timeouts known.
        data[3] = 0x0c;
        data.resize(16, 0);
    }
    Ok(Plan::data(data, cdb.be32(6)))
}
