//! READ CAPACITY (10) and (16) (SBC-3 5.15, 5.16).

use super::plan::{Plan, PlanResult, Planner};
use crate::cdb::Cdb;

/// READ CAPACITY (10): FFFFFFFFh where the last LBA needs more than 32 bits.
pub(crate) fn plan_read_capacity_10<M>(planner: &Planner<'_>, _cdb: &Cdb) -> PlanResult<M> {
    let last = u32::try_from(planner.lu.capacity_blocks() - 1).unwrap_or(u32::MAX);
    let data = [last.to_be_bytes(), planner.block().to_be_bytes()].concat();
    Ok(Plan::data(data, u32::MAX))
}

/// READ CAPACITY (16).
pub(crate) fn plan_read_capacity_16<M>(planner: &Planner<'_>, cdb: &Cdb) -> PlanResult<M> {
    let config = planner.lu.config();
    let mut data = vec![0; 32];
    data[..8].copy_from_slice(&(planner.lu.capacity_blocks() - 1).to_be_bytes());
    data[8..12].copy_from_slice(&planner.block().to_be_bytes());
    data[13] = config.physical_exponent;
    if config.is_thin() {
        data[14] = 0xc0; // LBPME, LBPRZ.
    }
    Ok(Plan::data(data, cdb.be32(10)))
}
