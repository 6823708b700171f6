//! SYNCHRONIZE CACHE (SBC-3 5.27) and PRE-FETCH (SBC-3 5.8).

use super::plan::{Context, Next, Plan, PlanResult, Planner, Steps};
use crate::cdb::Cdb;
use crate::sense::Sense;
use crate::step::{BlockOp, DataIn, StepResult};

/// A flush in flight, and the reason for it.
#[derive(Debug)]
pub(crate) enum Flush {
    /// SYNCHRONIZE CACHE: we only need the flush itself.
    Cache,
    /// The LU is being stopped, so the cache must be flushed first.
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
        // Only stop after a successful flush. On an error, there may still be data in the cache, so
        // the LU has to keep running.
        if matches!(self, Self::Stop) {
            context.lu.set_stopped(true)?;
        }
        Ok(Next::Respond(DataIn::None))
    }
}

/// SYNCHRONIZE CACHE (10) and (16). If the number of blocks is zero, we flush up to the end of the
/// medium. IMMED would allow us to return status early, but we always wait for the flush.
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

/// PRE-FETCH (10) and (16) (SBC-3 5.8). We return GOOD, which means that not all blocks fit into
/// the cache, because the backend owns the cache and decides when to read ahead.
pub(crate) fn plan_prefetch<M>(planner: &Planner<'_>, cdb: &Cdb) -> PlanResult<M> {
    planner.byte_range(cdb.extent())?;
    Ok(Plan::good())
}
