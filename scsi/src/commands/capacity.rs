//! READ CAPACITY (10) and (16) (SBC-3 5.15, 5.16).

use super::plan::{Plan, PlanResult, Planner};
use crate::cdb::Cdb;
use crate::config::ProtectionType;
use crate::data::capacity::{capacity_10, capacity_16};
use crate::data::cdb::read_capacity_16::ALLOCATION_LENGTH;

pub(crate) fn plan_read_capacity_10<M>(planner: &Planner<'_>, _cdb: &Cdb) -> PlanResult<M> {
    use capacity_10::{BLOCK_LENGTH, LAST_LBA, LEN};
    let mut data = vec![0; LEN];
    let last = planner.lu.capacity_blocks() - 1;
    LAST_LBA.set(&mut data, u32::try_from(last).unwrap_or(u32::MAX));
    BLOCK_LENGTH.set(&mut data, planner.block());
    Ok(Plan::data(data, u32::MAX))
}

pub(crate) fn plan_read_capacity_16<M>(planner: &Planner<'_>, cdb: &Cdb) -> PlanResult<M> {
    use capacity_16::{
        BLOCK_LENGTH, LAST_LBA, LBPME, LBPRZ, LEN, P_TYPE, PHYSICAL_EXPONENT, PROT_EN,
    };
    let config = planner.lu.config();
    let mut data = vec![0; LEN];
    LAST_LBA.set(&mut data, planner.lu.capacity_blocks() - 1);
    BLOCK_LENGTH.set(&mut data, planner.block());
    PHYSICAL_EXPONENT.set(&mut data, config.physical_exponent);
    if let Some(protection) = planner.lu.protection() {
        PROT_EN.set(&mut data, true);
        P_TYPE.set(
            &mut data,
            match protection.protection_type {
                ProtectionType::Type1 => 0,
                ProtectionType::Type2 => 1,
                ProtectionType::Type3 => 2,
            },
        );
    }
    LBPME.set(&mut data, config.is_thin());
    LBPRZ.set(&mut data, config.is_thin());
    Ok(Plan::data(data, cdb.get(ALLOCATION_LENGTH)))
}
