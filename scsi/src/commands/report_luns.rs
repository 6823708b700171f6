//! REPORT LUNS (SPC-4 6.33).

use super::plan::{Plan, PlanResult, Planner};
use crate::cdb::Cdb;
use crate::data::cdb::report_luns::{ALLOCATION_LENGTH, SELECT_REPORT};
use crate::data::luns;
use crate::lun::LunId;
use crate::sense::Sense;

/// REPORT LUNS (SPC-4 6.33). This also clears the unit attention REPORTED LUNS DATA HAS CHANGED.
pub(crate) fn plan_report_luns<M>(planner: &Planner<'_>, cdb: &Cdb) -> PlanResult<M> {
    let data = luns_data(cdb.get(SELECT_REPORT), planner.luns)?;
    // Only acknowledge this after the data has been created, so that a command with an invalid
    // SELECT REPORT doesn't clear it.
    planner.lu.acknowledge_luns(planner.nexus);
    Ok(Plan::data(data, cdb.get(ALLOCATION_LENGTH)))
}

/// Returns the REPORT LUNS parameter data for a given SELECT REPORT code.
pub(crate) fn luns_data(select_report: u8, luns: &[LunId]) -> Result<Vec<u8>, Sense> {
    let reported = match select_report {
        // Either without or with the well-known LUNs. We don't report any well-known LUNs.
        0x00 | 0x02 => luns,
        0x01 => &[],
        _ => return Err(Sense::cdb_field(2, Some(7))),
    };
    Ok(luns::encode(reported))
}
