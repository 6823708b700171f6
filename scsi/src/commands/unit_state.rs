//! Commands for the state of the LU: TEST UNIT READY, REQUEST SENSE, START STOP UNIT.

use super::cache::Flush;
use super::plan::{Plan, PlanResult, Planner};
use crate::cdb::Cdb;
use crate::data::cdb::request_sense::{ALLOCATION_LENGTH, DESC};
use crate::sense::{Sense, SenseFormat};

/// TEST UNIT READY. Everything has already been checked at this point.
pub(crate) fn plan_test_unit_ready<M>(_planner: &Planner<'_>, _cdb: &Cdb) -> PlanResult<M> {
    Ok(Plan::good())
}

/// REQUEST SENSE: returns either a pending unit attention or the LU state, as parameter data with
/// GOOD status (SPC-4 6.39).
pub(crate) fn plan_request_sense<M>(planner: &Planner<'_>, cdb: &Cdb) -> PlanResult<M> {
    let lu = planner.lu;
    // We need to remove the unit attention here, so it's not reported again for the next command.
    let sense = match lu.take_attention(planner.nexus) {
        Some(attention) => attention.sense(),
        None => lu.not_ready().unwrap_or_else(Sense::none),
    };
    let format = if cdb.get(DESC) {
        SenseFormat::Descriptor
    } else {
        SenseFormat::Fixed
    };
    Ok(Plan::data(
        sense.encode(format).to_vec(),
        cdb.get(ALLOCATION_LENGTH).into(),
    ))
}

/// START STOP UNIT (SBC-3 5.25). We only support the active power condition, and the medium cannot
/// be ejected.
///
/// An initiator may stop all disks when it shuts down, but other initiators might still be using
/// them. By default, a stop will therefore only flush the cache, which can be changed in the
/// configuration.
pub(crate) fn plan_start_stop_unit<M: From<Flush>>(
    planner: &Planner<'_>,
    cdb: &Cdb,
) -> PlanResult<M> {
    let lu = planner.lu;
    // We can't use the READY flag to check this, because it would also refuse to start a unit that
    // is stopped.
    if let Some(sense) = lu.no_medium() {
        return Err(sense.into());
    }
    match cdb.byte(4) >> 4 {
        // START_VALID.
        0 => {}
        // ACTIVE.
        1 => {
            lu.set_stopped(false)?;
            return Ok(Plan::good());
        }
        _ => return Err(Sense::cdb_field(4, Some(7)).into()),
    }
    let (start, no_flush) = (cdb.bit(4, 0), cdb.bit(4, 2));
    let may_stop = lu.config().stoppable;
    // No flush is necessary for a start, or if the initiator has set NO_FLUSH because it doesn't
    // need the data in the cache.
    if start || no_flush {
        lu.set_stopped(!start && may_stop)?;
        return Ok(Plan::good());
    }
    let flush = if may_stop { Flush::Stop } else { Flush::Cache };
    Ok(flush.plan(0, lu.capacity_bytes()))
}
