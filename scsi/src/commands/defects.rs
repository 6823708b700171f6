//! READ DEFECT DATA (SBC-3 5.17, 5.18). We never have any defects to report.

use super::plan::{Plan, PlanResult, Planner};
use crate::cdb::Cdb;
use crate::sense::Sense;

/// READ DEFECT DATA (10).
pub(crate) fn plan_defects_10<M>(_planner: &Planner<'_>, cdb: &Cdb) -> PlanResult<M> {
    // The requested lists are valid and in the requested format, but empty.
    let lists = cdb.byte(2);
    Ok(Plan::data(vec![0, lists, 0, 0], cdb.be16(7).into()))
}

/// READ DEFECT DATA (12).
pub(crate) fn plan_defects_12<M>(_planner: &Planner<'_>, cdb: &Cdb) -> PlanResult<M> {
    let lists = cdb.byte(1);
    let index = cdb.be32(2);
    if index > 0 {
        // The list is empty, so there can't be any data at a higher index.
        return Err(Sense::cdb_field(2, None).into());
    }
    Ok(Plan::data(vec![0, lists, 0, 0, 0, 0, 0, 0], cdb.be32(6)))
}
