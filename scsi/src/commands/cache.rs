//! SYNCHRONIZE CACHE (SBC-3 5.27) and PRE-FETCH (SBC-3 5.8).

use super::plan::{Context, Next, Plan, PlanResult, Planner, Steps};
use crate::cdb::Cdb;
use crate::sense::Sense;
use crate::step::{BlockOp, DataIn, StepResult};

/// A flush on its way, and what its completion means.
#[derive(Debug)]
pub(crate) enum Flush {
    /// Nothing more than that.
    Cache,
    /// The unit stops, so its cache goes to the medium first.
    Stop,
}

impl Flush {
    pub(crate) fn plan<M: From<Self>>(self, offset: u64, len: u64) -> Plan<M> {
        Plan {
            first: Next::Block(BlockOp::Flush { offset, len }),
            machine: Some(self.into()),
            ..Plan::good()
        }
    }
}

impl Steps for Flush {
    fn advance(&mut self, context: &mut Context<'_>, _result: StepResult) -> Result<Next, Sense> {
        // Stopped only when the flush has succeeded: after an error data may still be in the
        // cache, and the unit goes on.
        if matches!(self, Self::Stop) {
            context.lu.set_stopped(true);
        }
        Ok(Next::Answer(DataIn::None))
    }
}

/// SYNCHRONIZE CACHE (10) and (16). A number of zero blocks means the rest of
/// the medium. IMMED allows an early status; ours comes after the flush.
pub(crate) fn plan_synchronize_cache<M: From<Flush>>(
    planner: &Planner<'_>,
    cdb: &Cdb,
) -> PlanResult<M> {
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
pub(crate) fn plan_prefetch<M>(planner: &Planner<'_>, cdb: &Cdb) -> PlanResult<M> {
    planner.byte_range(cdb.extent())?;
    Ok(Plan::good())
}
