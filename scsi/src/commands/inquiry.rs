//! INQUIRY (SPC-4 6.6): standard data, and the way to the VPD pages.

use super::plan::{Plan, PlanResult, Planner};
use super::vpd;
use crate::cdb::Cdb;
use crate::config::Identity;
use crate::lu::NO_MEDIUM;
use crate::nexus::{Nexus, PortName};
use crate::sense::Sense;

/// Length of our standard INQUIRY data in bytes.
const STANDARD_LEN: usize = 96;

/// INQUIRY.
pub(crate) fn plan_inquiry<M>(planner: &Planner<'_>, cdb: &Cdb) -> PlanResult<M> {
    let page = cdb.byte(2);
    let allocation_length = u32::from(cdb.be16(3));
    let nexus = planner.lu.nexus(planner.nexus);
    if !cdb.bit(1, 0) {
        // Without EVPD a page code has no meaning.
        if page != 0 {
            return Err(Sense::cdb_field(2, Some(7)).into());
        }
        let data = standard(&planner.lu.config().identity, nexus.as_deref());
        return Ok(Plan::data(data.to_vec(), allocation_length));
    }
    if !planner.lu.has_names() && vpd::NAMING.contains(&page) {
        return Err(NO_MEDIUM.into());
    }
    let data = vpd::page(page, planner.lu.config(), nexus.as_deref())
        .ok_or(Sense::cdb_field(2, Some(7)))?;
    Ok(Plan::data(data, allocation_length))
}

/// Standard INQUIRY data of a connected direct-access unit.
fn standard(identity: &Identity, nexus: Option<&Nexus>) -> [u8; STANDARD_LEN] {
    let mut data = [0; STANDARD_LEN];
    data[2] = 6; // VERSION: SPC-4.
    data[3] = 0x12; // HISUP, RESPONSE DATA FORMAT 2.
    data[4] = (STANDARD_LEN - 5) as u8;
    data[6] = 0x10; // MULTIP: portals may be added at any time.
    data[7] = 0x02; // CMDQUE.
    vpd::ascii(&mut data[8..16], &identity.vendor);
    vpd::ascii(&mut data[16..32], &identity.product);
    vpd::ascii(&mut data[32..36], &identity.revision);
    let transport = match nexus.map(|nexus| &nexus.target.name) {
        Some(PortName::Srp(_)) => 0x0940,
        Some(PortName::Iscsi(_)) => 0x0960,
        None => 0,
    };
    // SAM-5, SPC-4, SBC-3, then the transport (SPC-4 table 147).
    for (index, version) in [0x00a0_u16, 0x0460, 0x04c0, transport]
        .into_iter()
        .enumerate()
    {
        data[58 + 2 * index..60 + 2 * index].copy_from_slice(&version.to_be_bytes());
    }
    data
}

/// Standard INQUIRY data of a logical unit number behind which there is
/// nothing: peripheral qualifier 011b, device type 1Fh.
pub(crate) fn absent() -> Vec<u8> {
    let mut data = vec![0; 36];
    data[0] = 0x7f;
    data[2] = 6;
    data[3] = 0x12;
    data[4] = 31;
    data[8..].fill(b' ');
    data
}
