//! REPORT LUNS (SPC-4 6.33).

use super::plan::{Plan, PlanResult, Planner};
use crate::cdb::Cdb;
use crate::data::cdb::report_luns::{ALLOCATION_LENGTH, SELECT_REPORT};
use crate::data::luns;
use crate::lun::LunId;
use crate::sense::Sense;

/// REPORT LUNS (SPC-4 6.33). It also clears the unit attention REPORTED LUNS DATA
/// HAS CHANGED.
pub(crate) fn plan_report_luns<M>(planner: &Planner<'_>, cdb: &Cdb) -> PlanResult<M> {
    let data = luns_data(cdb.get(SELECT_REPORT), planner.luns)?;
    // After the data are made, so that a command with an illegal SELECT REPORT acknowledges
    // nothing.
    planner.lu.acknowledge_luns(planner.nexus);
    Ok(Plan::data(data, cdb.get(ALLOCATION_LENGTH)))
}

/// REPORT LUNS parameter data for a SELECT REPORT code.
pub(crate) fn luns_data(select_report: u8, luns: &[LunId]) -> Result<Vec<u8>, Sense> {
    let reported = match select_report {
        // Ordinary units, or these and well-known ones: we report none of the latter.
        0x00 | 0x02 => luns,
        0x01 => &[],
        _ => return Err(Sense::cdb_field(2, Some(7))),
    };
    Ok(luns::encode(reported))
}
