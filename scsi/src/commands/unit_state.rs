//! Commands about the state of the unit: TEST UNIT READY, REQUEST SENSE, START STOP UNIT.

use super::cache::Flush;
use super::plan::{Plan, PlanResult, Planner};
use crate::cdb::Cdb;
use crate::data::cdb::request_sense::{ALLOCATION_LENGTH, DESC};
use crate::sense::{Sense, SenseFormat};

/// TEST UNIT READY: all that it reports has been checked already.
pub(crate) fn plan_test_unit_ready<M>(_planner: &Planner<'_>, _cdb: &Cdb) -> PlanResult<M> {
    Ok(Plan::good())
}

/// REQUEST SENSE: a pending unit attention, or the state of the unit, as
/// parameter data with GOOD status (SPC-4 6.39).
pub(crate) fn plan_request_sense<M>(planner: &Planner<'_>, cdb: &Cdb) -> PlanResult<M> {
    let lu = planner.lu;
    // Taken and not only looked at: what is reported here, the next command must not meet again.
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

/// START STOP UNIT (SBC-3 5.25). Only the active power condition exists, and
/// the medium does not leave the drive.
///
/// An initiator that shuts down may stop its disks, and others may go on using
/// the unit: unless the configuration says otherwise, a stop only flushes.
pub(crate) fn plan_start_stop_unit<M: From<Flush>>(
    planner: &Planner<'_>,
    cdb: &Cdb,
) -> PlanResult<M> {
    let lu = planner.lu;
    // Not left to READY, which would refuse START for a stopped unit, too.
    if let Some(sense) = lu.no_medium() {
        return Err(sense.into());
    }
    match cdb.byte(4) >> 4 {
        // START_VALID.
        0 => {}
        // ACTIVE.
        1 => {
            lu.set_stopped(false);
            return Ok(Plan::good());
        }
        _ => return Err(Sense::cdb_field(4, Some(7)).into()),
    }
    let (start, no_flush) = (cdb.bit(4, 0), cdb.bit(4, 2));
    let may_stop = lu.config().stoppable;
    // Neither of these has anything to flush: a start, and a stop whose initiator gives up what
    // the cache holds.
    if start || no_flush {
        lu.set_stopped(!start && may_stop);
        return Ok(Plan::good());
    }
    let flush = if may_stop { Flush::Stop } else { Flush::Cache };
    Ok(flush.plan(0, lu.capacity_bytes()))
}
