//! MODE SENSE (6) and (10) (SPC-4 6.13, 6.14).

use super::mode_pages::{ALL_PAGES, changeable, page_codes, render};
use super::plan::{Plan, PlanResult, Planner};
use super::threshold;
use crate::cdb::Cdb;
use crate::config::Config;
use crate::lu::{Flags, LogicalUnit};
use crate::sense::{AdditionalSense, Sense};

/// Bytes of a short mode parameter block descriptor.
fn short_descriptor(config: &Config, blocks: u64) -> [u8; 8] {
    let mut out = [0; 8];
    out[..4].copy_from_slice(&u32::try_from(blocks).unwrap_or(u32::MAX).to_be_bytes());
    out[4..].copy_from_slice(&config.block_size.bytes().to_be_bytes());
    out
}

/// Bytes of a long LBA mode parameter block descriptor.
fn long_descriptor(config: &Config, blocks: u64) -> [u8; 16] {
    let mut out = [0; 16];
    out[..8].copy_from_slice(&blocks.to_be_bytes());
    out[12..].copy_from_slice(&config.block_size.bytes().to_be_bytes());
    out
}

/// DEVICE-SPECIFIC PARAMETER of the mode parameter header: WP and DPOFUA.
fn device_specific(planner: &Planner<'_>) -> u8 {
    let lu = planner.lu;
    let protected = planner.read_only
        || lu.config().read_only
        || lu.flags().contains(Flags::SOFTWARE_WRITE_PROTECT);
    if protected { 0x90 } else { 0x10 }
}

/// MODE SENSE (6).
pub(crate) fn plan_mode_sense_6<M>(planner: &Planner<'_>, cdb: &Cdb) -> PlanResult<M> {
    let pages = pages(planner.lu, cdb)?;
    let config = planner.lu.config();
    let descriptor = short_descriptor(config, planner.lu.capacity_blocks());
    let descriptor = if cdb.bit(1, 3) { &[][..] } else { &descriptor };
    let mut data = vec![0, 0, device_specific(planner), descriptor.len() as u8];
    data.extend_from_slice(descriptor);
    data.extend(pages);
    data[0] = (data.len() - 1) as u8;
    Ok(Plan::data(data, u32::from(cdb.byte(4))))
}

/// MODE SENSE (10).
pub(crate) fn plan_mode_sense_10<M>(planner: &Planner<'_>, cdb: &Cdb) -> PlanResult<M> {
    let pages = pages(planner.lu, cdb)?;
    let config = planner.lu.config();
    let blocks = planner.lu.capacity_blocks();
    let (short, long) = (
        short_descriptor(config, blocks),
        long_descriptor(config, blocks),
    );
    let long_lba = cdb.bit(1, 4) && !cdb.bit(1, 3);
    let descriptor = match (cdb.bit(1, 3), long_lba) {
        (true, _) => &[][..],
        (false, true) => &long,
        (false, false) => &short,
    };
    let mut data = vec![0, 0, 0, device_specific(planner), long_lba.into(), 0, 0];
    data.push(descriptor.len() as u8);
    data.extend_from_slice(descriptor);
    data.extend(pages);
    let len = (data.len() - 2) as u16;
    data[..2].copy_from_slice(&len.to_be_bytes());
    Ok(Plan::data(data, u32::from(cdb.be16(7))))
}

/// The pages a MODE SENSE asks for.
fn pages(lu: &LogicalUnit, cdb: &Cdb) -> Result<Vec<u8>, Sense> {
    let (code, subpage) = (cdb.byte(2) & 0x3f, cdb.byte(3));
    let one = |code: u8| match cdb.byte(2) >> 6 {
        0 => render(code, lu.flags()),
        1 => changeable(code),
        _ => render(code, lu.default_flags()),
    };
    if cdb.byte(2) >> 6 == 3 {
        return Err(Sense::illegal(AdditionalSense::SAVING_NOT_SUPPORTED));
    }
    let threshold = || threshold::page(lu, cdb.byte(2) >> 6 == 1);
    if (code, subpage) == threshold::PAGE {
        return threshold().ok_or(Sense::cdb_field(3, Some(7)));
    }
    // FFh asks for a page and its subpages.
    if subpage != 0 && subpage != 0xff {
        return Err(Sense::cdb_field(3, Some(7)));
    }
    let mut pages = match code {
        ALL_PAGES => page_codes().filter_map(one).flatten().collect(),
        _ => one(code).ok_or(Sense::cdb_field(2, Some(5)))?,
    };
    // The only subpage is of the last page.
    if subpage == 0xff && (code == ALL_PAGES || code == threshold::PAGE.0) {
        pages.extend(threshold().into_iter().flatten());
    }
    Ok(pages)
}
