//! Commands about the unit itself: TEST UNIT READY, REQUEST SENSE, START STOP
//! UNIT, SYNCHRONIZE CACHE, PRE-FETCH and REPORT LUNS.

use crate::cdb::Cdb;
use crate::device;
use crate::plan::{Context, Machine, Next, Plan, PlanResult, Planner};
use crate::sense::{AdditionalSense, Sense, SenseFormat, SenseKey};
use crate::step::{BlockOp, DataIn};

/// The sense of a unit that START STOP UNIT has stopped.
pub(crate) const STOPPED: Sense = Sense::new(
    SenseKey::NotReady,
    AdditionalSense::INITIALIZING_COMMAND_REQUIRED,
);

/// The sense of a unit without a medium, which an administrator has to bring back.
pub(crate) const NO_MEDIUM: Sense = Sense::new(
    SenseKey::NotReady,
    AdditionalSense::MANUAL_INTERVENTION_REQUIRED,
);

/// A flush on its way, and what its completion means.
#[derive(Debug)]
pub(crate) enum Flush {
    /// Nothing more than that.
    Cache,
    /// The unit stops.
    Stop,
}

impl Flush {
    pub(crate) fn advance(&mut self, context: &mut Context<'_>) -> Next {
        if matches!(self, Self::Stop) {
            context.lu.set_stopped(true);
        }
        Next::Answer(DataIn::None)
    }

    fn plan(self, offset: u64, len: u64) -> Plan {
        Plan {
            first: Next::Block(BlockOp::Flush { offset, len }),
            machine: Machine::Flush(self),
            ..Plan::good()
        }
    }
}

/// TEST UNIT READY: whatever stands against it has been checked already.
pub(crate) fn plan_test_unit_ready(_planner: &Planner<'_>, _cdb: &Cdb) -> PlanResult {
    Ok(Plan::good())
}

/// REQUEST SENSE: a pending unit attention, or the state of the unit, as
/// parameter data with GOOD status (SPC-4 6.39).
pub(crate) fn plan_request_sense(planner: &Planner<'_>, cdb: &Cdb) -> PlanResult {
    let lu = planner.lu;
    let sense = match lu.take_attention(planner.request.nexus) {
        Some(attention) => attention.sense(),
        None => lu.not_ready().unwrap_or_else(Sense::none),
    };
    let format = if cdb.bit(1, 0) {
        SenseFormat::Descriptor
    } else {
        SenseFormat::Fixed
    };
    Ok(Plan::data(
        sense.encode(format).to_vec(),
        u32::from(cdb.byte(4)),
    ))
}

/// START STOP UNIT (SBC-3 5.25). Only the active power condition exists, and
/// the medium does not leave the drive.
///
/// An initiator that shuts down may stop its disks, and others may go on using
/// the unit: unless the configuration says otherwise, a stop only flushes.
pub(crate) fn plan_start_stop_unit(planner: &Planner<'_>, cdb: &Cdb) -> PlanResult {
    let lu = planner.lu;
    if !lu.has_medium() {
        return Err(NO_MEDIUM.into());
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
    if start || no_flush {
        lu.set_stopped(!start && may_stop);
        return Ok(Plan::good());
    }
    let flush = if may_stop { Flush::Stop } else { Flush::Cache };
    Ok(flush.plan(0, lu.capacity_bytes()))
}

/// SYNCHRONIZE CACHE (10) and (16). A number of zero blocks means the rest of
/// the medium. IMMED allows an early status; ours comes after the flush.
pub(crate) fn plan_synchronize_cache(planner: &Planner<'_>, cdb: &Cdb) -> PlanResult {
    let (offset, len) = planner.byte_range(cdb.extent())?;
    let len = if len == 0 {
        planner.lu.capacity_bytes() - offset
    } else {
        len
    };
    if len == 0 {
        return Ok(Plan::good());
    }
    Ok(Flush::Cache.plan(offset, len))
}

/// PRE-FETCH (10) and (16) (SBC-3 5.8). GOOD says that not everything fitted the
/// cache: the cache is the backend's, which reads ahead as it sees fit.
pub(crate) fn plan_prefetch(planner: &Planner<'_>, cdb: &Cdb) -> PlanResult {
    planner.byte_range(cdb.extent())?;
    Ok(Plan::good())
}

/// REPORT LUNS (SPC-4 6.33). It also clears the unit attention that told the
/// initiator to send it.
pub(crate) fn plan_report_luns(planner: &Planner<'_>, cdb: &Cdb) -> PlanResult {
    let data = device::luns_data(cdb.byte(2), planner.request.luns)?;
    planner.lu.acknowledge_luns(planner.request.nexus);
    Ok(Plan::data(data, cdb.be32(6)))
}
