//! INQUIRY (SPC-4 6.6): standard data, and dispatch of VPD page requests.

use super::plan::{Plan, PlanResult, Planner};
use super::vpd;
use crate::cdb::Cdb;
use crate::config::{Config, DEFAULT_PRODUCT, DEFAULT_REVISION, DEFAULT_VENDOR};
use crate::data::cdb::inquiry::{ALLOCATION_LENGTH, EVPD, PAGE_CODE};
use crate::data::inquiry::{
    ADDITIONAL_LENGTH, CMDQUE, HISUP, LEN, MIN_LEN, MULTIP, PERIPHERAL_DEVICE_TYPE,
    PERIPHERAL_QUALIFIER, PRODUCT, PROTECT, QUALIFIER_INCAPABLE, RESPONSE_DATA_FORMAT, REVISION,
    TYPE_NONE, VENDOR, VERSION, VERSION_DESCRIPTORS,
};
use crate::lu::NO_MEDIUM;
use crate::nexus::{Nexus, PortName};
use crate::sense::Sense;

/// VERSION field of the standard data: we claim SPC-4 (SPC-4 6.6.2).
const SPC_4: u8 = 6;
/// Version descriptors (SPC-4 table 147).
const SAM_5: u16 = 0x00a0;
const SPC_4_DESCRIPTOR: u16 = 0x0460;
const SBC_3: u16 = 0x04c0;
const SRP: u16 = 0x0940;
const ISCSI: u16 = 0x0960;

pub(crate) fn plan_inquiry<M>(planner: &Planner<'_>, cdb: &Cdb) -> PlanResult<M> {
    let page = cdb.get(PAGE_CODE);
    let allocation_length = u32::from(cdb.get(ALLOCATION_LENGTH));
    let nexus = planner.lu.nexus(planner.nexus);
    if !cdb.get(EVPD) {
        // The page code must be zero if EVPD is not set.
        if page != 0 {
            return Err(Sense::cdb_field(2, Some(7)).into());
        }
        let data = standard(planner.lu.config(), nexus.as_deref());
        return Ok(Plan::data(data, allocation_length));
    }
    // Initiators use these pages to identify a disk. If we made up a name here, the initiator would
    // see a different disk or a new one.
    if !planner.lu.has_names() && vpd::NAMING.contains(&page) {
        return Err(NO_MEDIUM.into());
    }
    let data = vpd::page(page, planner.lu, nexus.as_deref()).ok_or(Sense::cdb_field(2, Some(7)))?;
    Ok(Plan::data(data, allocation_length))
}

/// Returns the standard INQUIRY data for a connected direct-access LU.
fn standard(config: &Config, nexus: Option<&Nexus>) -> Vec<u8> {
    let identity = &config.identity;
    let mut data = with_len(LEN);
    PROTECT.set(&mut data, config.protection.is_some());
    // A portal can be added at any time.
    MULTIP.set(&mut data, true);
    CMDQUE.set(&mut data, true);
    VENDOR.set(&mut data, &identity.vendor);
    PRODUCT.set(&mut data, &identity.product);
    REVISION.set(&mut data, &identity.revision);
    let transport = match nexus.map(|nexus| &nexus.target.name) {
        Some(PortName::Srp(_)) => SRP,
        Some(PortName::Iscsi(_)) => ISCSI,
        None => 0,
    };
    let versions = [SAM_5, SPC_4_DESCRIPTOR, SBC_3, transport];
    for (field, version) in VERSION_DESCRIPTORS.into_iter().zip(versions) {
        field.set(&mut data, version);
    }
    data
}

/// Returns the standard INQUIRY data for a LUN without a logical unit.
///
/// This uses the target's default names. Linux before 4.4 will look up an empty name in its table
/// of quirky devices, where it matches the first entry, and then fail to find any LU of this
/// target.
pub(crate) fn absent() -> Vec<u8> {
    let mut data = with_len(MIN_LEN);
    PERIPHERAL_QUALIFIER.set(&mut data, QUALIFIER_INCAPABLE);
    PERIPHERAL_DEVICE_TYPE.set(&mut data, TYPE_NONE);
    VENDOR.set(&mut data, DEFAULT_VENDOR);
    PRODUCT.set(&mut data, DEFAULT_PRODUCT);
    REVISION.set(&mut data, DEFAULT_REVISION);
    data
}

/// Returns the first bytes, which are common to all standard INQUIRY data.
fn with_len(len: usize) -> Vec<u8> {
    let mut data = vec![0; len];
    VERSION.set(&mut data, SPC_4);
    HISUP.set(&mut data, true);
    RESPONSE_DATA_FORMAT.set(&mut data, 2);
    ADDITIONAL_LENGTH.set(&mut data, (len - ADDITIONAL_LENGTH.at() - 1) as u8);
    data
}
