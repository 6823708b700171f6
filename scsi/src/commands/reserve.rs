//! RESERVE and RELEASE (SPC-2 7.21 to 7.23, 7.16 to 7.18).

use super::plan::{Plan, PlanResult, Planner, Refusal};
use crate::cdb::Cdb;
use crate::reservation::Reservations;

/// RESERVE (6) and (10).
pub(crate) fn plan_reserve<M>(planner: &Planner<'_>, _cdb: &Cdb) -> PlanResult<M> {
    let id = planner.nexus;
    if planner.lu.reserve_unit(id) {
        Ok(Plan::good())
    } else {
        Err(Refusal::conflict())
    }
}

/// RELEASE (6) and (10).
pub(crate) fn plan_release<M>(planner: &Planner<'_>, _cdb: &Cdb) -> PlanResult<M> {
    // If we returned GOOD here, the initiator would assume that it has released the unit, but this
    // may still be held by its persistent reservation.
    if planner.lu.with_reservations(Reservations::forbids_release) {
        return Err(Refusal::conflict());
    }
    planner.lu.release_unit(planner.nexus);
    Ok(Plan::good())
}
