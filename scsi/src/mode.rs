//! Mode pages, and MODE SENSE (6) and (10) (SPC-4 6.13, 6.14, 7.5, SBC-3 6.5).
//!
//! A page is rendered from the few flags that can change, so that current,
//! default and changeable values come from one place: the changeable mask is
//! the difference between a page with all of them and a page with none.

use crate::cdb::Cdb;
use crate::config::Config;
use crate::lu::{Flags, LogicalUnit};
use crate::plan::{Plan, PlanResult, Planner};
use crate::sense::{AdditionalSense, Sense};
use crate::threshold;

/// Flags that MODE SELECT may change.
pub(crate) const CHANGEABLE: Flags = Flags::D_SENSE
    .union(Flags::SOFTWARE_WRITE_PROTECT)
    .union(Flags::WRITE_CACHE);

/// A flag's place in a page: byte and bit.
pub(crate) struct FlagPlace {
    pub(crate) page: u8,
    pub(crate) byte: usize,
    pub(crate) bit: u8,
    pub(crate) flag: Flags,
}

/// Where each changeable flag lives.
pub(crate) const PLACES: [FlagPlace; 3] = [
    FlagPlace {
        page: 0x08,
        byte: 2,
        bit: 2,
        flag: Flags::WRITE_CACHE,
    },
    FlagPlace {
        page: 0x0a,
        byte: 2,
        bit: 2,
        flag: Flags::D_SENSE,
    },
    FlagPlace {
        page: 0x0a,
        byte: 4,
        bit: 3,
        flag: Flags::SOFTWARE_WRITE_PROTECT,
    },
];

/// The fixed part of every page, in ascending order of page codes.
///
/// Read-Write Error Recovery; Caching; Control with GLTSD, unrestricted
/// reordering, TAS and an unlimited busy period; Informational Exceptions Control
/// with DEXCPT.
const TEMPLATES: [&[u8]; 4] = [
    &[0x01, 0x0a, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0],
    &[
        0x08, 0x12, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0,
    ],
    &[0x0a, 0x0a, 0x02, 0x10, 0, 0x40, 0, 0, 0xff, 0xff, 0, 0],
    &[0x1c, 0x0a, 0x08, 0, 0, 0, 0, 0, 0, 0, 0, 0],
];

/// All pages.
const ALL_PAGES: u8 = 0x3f;

/// Page codes we have.
pub(crate) fn page_codes() -> impl Iterator<Item = u8> {
    TEMPLATES.iter().map(|template| template[0])
}

/// A page with the given flags, if there is such a page.
pub(crate) fn render(code: u8, flags: Flags) -> Option<Vec<u8>> {
    let mut page = TEMPLATES
        .iter()
        .find(|template| template[0] == code)?
        .to_vec();
    for place in PLACES.iter().filter(|place| place.page == code) {
        if flags.contains(place.flag) {
            page[place.byte] |= 1 << place.bit;
        }
    }
    Some(page)
}

/// The changeable mask of a page: its header, then a one for every bit that
/// MODE SELECT may change.
pub(crate) fn changeable(code: u8) -> Option<Vec<u8>> {
    let with = render(code, CHANGEABLE)?;
    let without = render(code, Flags::empty())?;
    let mut mask: Vec<u8> = with.iter().zip(&without).map(|(a, b)| a ^ b).collect();
    mask[..2].copy_from_slice(&without[..2]);
    Some(mask)
}

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
    let protected = planner.request.read_only
        || lu.config().read_only
        || lu.flags().contains(Flags::SOFTWARE_WRITE_PROTECT);
    if protected { 0x90 } else { 0x10 }
}

/// MODE SENSE (6).
pub(crate) fn plan_mode_sense_6(planner: &Planner<'_>, cdb: &Cdb) -> PlanResult {
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
pub(crate) fn plan_mode_sense_10(planner: &Planner<'_>, cdb: &Cdb) -> PlanResult {
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
