//! The mode pages that we support (SPC-4 7.5, SBC-3 6.5).
//!
//! We create a page from the few flags that can be changed, so that the current, default and
//! changeable values always match. The mask of changeable bits is the difference between a page
//! with all flags set and a page with all flags clear.

use crate::config::{Config, Protection};
use crate::data::field::Field;
use crate::data::mode::{
    CACHING, CONTROL, INFORMATIONAL_EXCEPTIONS, PAGE_CODE, PAGE_HEADER_LEN, PAGE_LENGTH,
    READ_WRITE_ERROR_RECOVERY, caching, control, exceptions,
};
use crate::lu::Flags;

/// Flags that can be changed via MODE SELECT. The last one is only used with protection
/// information.
const CHANGEABLE: Flags = Flags::D_SENSE
    .union(Flags::SOFTWARE_WRITE_PROTECT)
    .union(Flags::WRITE_CACHE)
    .union(Flags::IGNORE_UNREQUESTED_CHECKS);

/// Page and field for each flag that can be changed via MODE SELECT.
const FLAGS: [(u8, Field<bool>, Flags); 4] = [
    (CACHING, caching::WCE, Flags::WRITE_CACHE),
    (CONTROL, control::D_SENSE, Flags::D_SENSE),
    (CONTROL, control::SWP, Flags::SOFTWARE_WRITE_PROTECT),
    (CONTROL, control::DPICZ, Flags::IGNORE_UNREQUESTED_CHECKS),
];

/// Returns the field for each flag of a page that can be changed via MODE SELECT.
pub(crate) fn fields(
    code: u8,
    config: &Config,
) -> impl Iterator<Item = (Field<bool>, Flags)> + use<> {
    let is_protected = config.protection.is_some();
    FLAGS
        .into_iter()
        .filter(move |(page, _, flag)| {
            *page == code && (is_protected || *flag != Flags::IGNORE_UNREQUESTED_CHECKS)
        })
        .map(|(_, field, flag)| (field, flag))
}

/// Page codes in ascending order.
pub(crate) const PAGES: [u8; 4] = [
    READ_WRITE_ERROR_RECOVERY,
    CACHING,
    CONTROL,
    INFORMATIONAL_EXCEPTIONS,
];

/// Returns the fixed contents of a page, if the page exists.
fn fixed(code: u8, config: &Config) -> Option<Vec<u8>> {
    /// SIMPLE commands can be reordered without restriction.
    const UNRESTRICTED: u8 = 1;
    let len = match code {
        CACHING => caching::LEN,
        READ_WRITE_ERROR_RECOVERY | CONTROL | INFORMATIONAL_EXCEPTIONS => 12,
        _ => return None,
    };
    let mut page = vec![0; len];
    PAGE_CODE.set(&mut page, code);
    PAGE_LENGTH.set(&mut page, (len - PAGE_HEADER_LEN) as u8);
    match code {
        CONTROL => {
            control::GLTSD.set(&mut page, true);
            control::QUEUE_ALGORITHM_MODIFIER.set(&mut page, UNRESTRICTED);
            control::TAS.set(&mut page, true);
            let owned = |protection: Protection| protection.client_owns_tag;
            control::ATO.set(&mut page, config.protection.is_some_and(owned));
            // Unlimited.
            control::BUSY_TIMEOUT_PERIOD.set(&mut page, u16::MAX);
        }
        INFORMATIONAL_EXCEPTIONS => exceptions::DEXCPT.set(&mut page, true),
        _ => {}
    }
    Some(page)
}

/// Returns a page with the given flags set, if the page exists.
pub(crate) fn render(code: u8, config: &Config, flags: Flags) -> Option<Vec<u8>> {
    let mut page = fixed(code, config)?;
    for (field, flag) in fields(code, config) {
        field.set(&mut page, flags.contains(flag));
    }
    Some(page)
}

/// Returns the mask of changeable bits in a page: the page header, then a one for each bit that can
/// be changed via MODE SELECT.
pub(crate) fn changeable(code: u8, config: &Config) -> Option<Vec<u8>> {
    let with = render(code, config, CHANGEABLE)?;
    let without = render(code, config, Flags::empty())?;
    let mut mask: Vec<u8> = with.iter().zip(&without).map(|(a, b)| a ^ b).collect();
    mask[..PAGE_HEADER_LEN].copy_from_slice(&without[..PAGE_HEADER_LEN]);
    Some(mask)
}
