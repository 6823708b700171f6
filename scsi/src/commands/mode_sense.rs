//! MODE SENSE (6) and (10) (SPC-4 6.13, 6.14).

use super::mode_pages::{PAGES, changeable, render};
use super::plan::{Plan, PlanResult, Planner};
use super::threshold;
use crate::cdb::Cdb;
use crate::data::cdb::mode_sense_6::{ALLOCATION_LENGTH, DBD, PAGE_CODE, PC, SUBPAGE_CODE};
use crate::data::cdb::mode_sense_10;
use crate::data::mode::{ALL_PAGES, header_6, header_10, long_descriptor, short_descriptor};
use crate::lu::LogicalUnit;
use crate::sense::{AdditionalSense, Sense};

/// SUBPAGE CODE to request a page with all subpages.
const ALL_SUBPAGES: u8 = 0xff;

/// PAGE CONTROL: current values.
const CURRENT: u8 = 0;
const CHANGEABLE: u8 = 1;
const SAVED: u8 = 3;

/// Returns a short mode parameter block descriptor.
fn short_descriptor(lu: &LogicalUnit) -> Vec<u8> {
    use short_descriptor::{BLOCK_LENGTH, BLOCKS, LEN};
    let mut data = vec![0; LEN];
    let blocks = u32::try_from(lu.capacity_blocks()).unwrap_or(u32::MAX);
    BLOCKS.set(&mut data, blocks);
    BLOCK_LENGTH.set(&mut data, lu.config().block_size.bytes());
    data
}

/// Returns a long LBA mode parameter block descriptor.
fn long_descriptor(lu: &LogicalUnit) -> Vec<u8> {
    use long_descriptor::{BLOCK_LENGTH, BLOCKS, LEN};
    let mut data = vec![0; LEN];
    BLOCKS.set(&mut data, lu.capacity_blocks());
    BLOCK_LENGTH.set(&mut data, lu.config().block_size.bytes());
    data
}

/// Returns whether writes are not allowed for this nexus (WP bit).
fn is_protected(planner: &Planner<'_>) -> bool {
    planner.read_only || planner.lu.write_protection().is_some()
}

pub(crate) fn plan_mode_sense_6<M>(planner: &Planner<'_>, cdb: &Cdb) -> PlanResult<M> {
    use header_6::{BLOCK_DESCRIPTOR_LENGTH, DATA_LENGTH, DPOFUA, LEN, WP};
    let pages = pages(planner.lu, cdb)?;
    let descriptor = match cdb.get(DBD) {
        true => Vec::new(),
        false => short_descriptor(planner.lu),
    };
    let mut data = vec![0; LEN];
    WP.set(&mut data, is_protected(planner));
    DPOFUA.set(&mut data, true);
    BLOCK_DESCRIPTOR_LENGTH.set(&mut data, descriptor.len() as u8);
    data.extend(descriptor);
    data.extend(pages);
    // All pages with a descriptor use much less than 256 bytes, so this can't overflow.
    let len = data.len() as u8;
    DATA_LENGTH.set(&mut data, len - 1);
    Ok(Plan::data(data, cdb.get(ALLOCATION_LENGTH).into()))
}

pub(crate) fn plan_mode_sense_10<M>(planner: &Planner<'_>, cdb: &Cdb) -> PlanResult<M> {
    use header_10::{BLOCK_DESCRIPTOR_LENGTH, DATA_LENGTH, DPOFUA, LEN, LONGLBA, WP};
    let pages = pages(planner.lu, cdb)?;
    let (no_descriptor, accepts_long) = (cdb.get(DBD), cdb.get(mode_sense_10::LLBAA));
    let descriptor = match (no_descriptor, accepts_long) {
        (true, _) => Vec::new(),
        (false, true) => long_descriptor(planner.lu),
        (false, false) => short_descriptor(planner.lu),
    };
    let mut data = vec![0; LEN];
    WP.set(&mut data, is_protected(planner));
    DPOFUA.set(&mut data, true);
    LONGLBA.set(&mut data, accepts_long && !no_descriptor);
    BLOCK_DESCRIPTOR_LENGTH.set(&mut data, descriptor.len() as u16);
    data.extend(descriptor);
    data.extend(pages);
    let len = data.len() as u16;
    DATA_LENGTH.set(&mut data, len - 2);
    let allocation_length = cdb.get(mode_sense_10::ALLOCATION_LENGTH);
    Ok(Plan::data(data, allocation_length.into()))
}

/// Returns the pages that were requested in a MODE SENSE.
fn pages(lu: &LogicalUnit, cdb: &Cdb) -> Result<Vec<u8>, Sense> {
    let (code, subpage, values) = (cdb.get(PAGE_CODE), cdb.get(SUBPAGE_CODE), cdb.get(PC));
    let one = |code: u8| match values {
        CURRENT => render(code, lu.config(), lu.flags()),
        CHANGEABLE => changeable(code, lu.config()),
        // Default values are from the configuration. A reset will restore them.
        _ => render(code, lu.config(), lu.default_flags()),
    };
    if values == SAVED {
        return Err(Sense::illegal(AdditionalSense::SAVING_NOT_SUPPORTED));
    }
    let threshold = || threshold::page(lu, values == CHANGEABLE);
    if (code, subpage) == threshold::PAGE {
        return threshold().ok_or(Sense::cdb_field(3, Some(7)));
    }
    if subpage != 0 && subpage != ALL_SUBPAGES {
        return Err(Sense::cdb_field(3, Some(7)));
    }
    let mut pages = match code {
        ALL_PAGES => PAGES.into_iter().filter_map(one).flatten().collect(),
        _ => one(code).ok_or(Sense::cdb_field(2, Some(5)))?,
    };
    // Only the last page has a subpage.
    if subpage == ALL_SUBPAGES && (code == ALL_PAGES || code == threshold::PAGE.0) {
        pages.extend(threshold().into_iter().flatten());
    }
    Ok(pages)
}
