//! Mode pages (SPC-4 7.5, SBC-3 6.5).
//!
//! A page is rendered from the few flags that can change, so that current, default and changeable
//! values come from one place: the changeable mask is the difference between a page with all of
//! them and a page with none.

use crate::lu::Flags;

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
pub(crate) const ALL_PAGES: u8 = 0x3f;

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
