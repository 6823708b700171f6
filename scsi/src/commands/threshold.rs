//! The soft threshold for thin provisioned LUs (SBC-3 4.7.3.8), as reported in the Logical Block
//! Provisioning VPD page (6.6.4) and the Logical Block Provisioning mode page (6.5.9).
//!
//! There is only a single threshold. This is set in the configuration and applies when the used
//! space increases. All nexuses will be notified ([`LogicalUnit::note_space`]).

use crate::data::mode::provisioning::{
    ENABLED, INCREASING, LEN, PAGE_LENGTH, SUBPAGE, SUBPAGE_CODE, THRESHOLD_ARMING,
    THRESHOLD_COUNT, THRESHOLD_RESOURCE, USED,
};
use crate::data::mode::{INFORMATIONAL_EXCEPTIONS, PAGE_CODE, SPF};
use crate::lu::LogicalUnit;

/// PAGE CODE and SUBPAGE CODE.
pub(crate) const PAGE: (u8, u8) = (INFORMATIONAL_EXCEPTIONS, SUBPAGE);

/// Number of bytes in this page before the first field that MODE SELECT could change.
const HEADER_LEN: usize = 4;

/// Returns the size of a threshold set, as a power of two, in blocks. An LU with at least 512 pairs
/// of blocks will have at least 512 sets. There cannot be 2^32 sets unless the LU has grown by a
/// factor of millions.
pub(crate) fn exponent(blocks: u64) -> u8 {
    (blocks.max(1).ilog2() as u8).saturating_sub(9).max(1)
}

/// Returns the mode page if a threshold is configured. If `is_mask` is set, this is the mask of
/// changeable bits, which is always empty.
pub(crate) fn page(lu: &LogicalUnit, is_mask: bool) -> Option<Vec<u8>> {
    let percent = lu.threshold()?;
    let mut page = vec![0; LEN];
    PAGE_CODE.set(&mut page, PAGE.0);
    SPF.set(&mut page, true);
    SUBPAGE_CODE.set(&mut page, PAGE.1);
    PAGE_LENGTH.set(&mut page, (LEN - HEADER_LEN) as u16);
    if is_mask {
        return Some(page);
    }
    let blocks = u128::from(lu.capacity_blocks()) * u128::from(percent) / 100;
    let sets = blocks >> exponent(lu.config().blocks);
    // SITUA is zero, to notify all nexuses. THRESHOLD TYPE is zero for a soft threshold.
    ENABLED.set(&mut page, true);
    THRESHOLD_ARMING.set(&mut page, INCREASING);
    THRESHOLD_RESOURCE.set(&mut page, USED);
    THRESHOLD_COUNT.set(&mut page, u32::try_from(sets).unwrap_or(u32::MAX));
    Some(page)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::BlockSize;
    use crate::tests::{A, B, Rig, config};

    fn rig(percent: u8) -> Rig {
        let mut config = config(BlockSize::B512, 1 << 20);
        config.threshold = Some(percent);
        Rig::with(config)
    }

    #[test]
    fn threshold_notifies_all_nexuses_once() {
        let mut rig = rig(80);
        let ready = [0; 6];
        let both = |rig: &mut Rig| {
            [A, B].map(|nexus| rig.run(nexus, &ready, &[], 0).response.parsed_sense())
        };
        assert_eq!(rig.lu.note_space(79, 100), None);
        assert_eq!(both(&mut rig), [None, None]);
        assert_eq!(rig.lu.note_space(80, 100), Some(true));
        assert!(rig.lu.is_filling());
        for sense in both(&mut rig).map(Option::unwrap) {
            let code = (
                sense.key as u8,
                sense.additional.code,
                sense.additional.qualifier,
            );
            assert_eq!((code, sense.information), ((6, 0x38, 7), Some(16)));
        }
        assert_eq!(both(&mut rig), [None, None], "once");
        // If the used space only varies around the threshold, we should not report it again.
        for used in [90, 79, 81, 76, 80] {
            assert_eq!(rig.lu.note_space(used, 100), None);
        }
        assert_eq!(both(&mut rig), [None, None]);
        assert_eq!(rig.lu.note_space(74, 100), Some(false));
        assert_eq!(both(&mut rig), [None, None]);
        assert_eq!(rig.lu.note_space(u64::MAX / 8 * 7, u64::MAX), Some(true));
        assert!(both(&mut rig).iter().all(Option::is_some));
    }

    #[test]
    fn mode_and_vpd_pages_report_threshold() {
        let mut rig = rig(75);
        // A set has 2^11 blocks, and there are 512 sets.
        let vpd = rig.send(&[0x12, 1, 0xb2, 0, 255, 0]).good().data;
        assert_eq!(vpd, [0, 0xb2, 0, 4, 11, 0xe4, 2, 0]);
        let mut page = [0; 24];
        page[..4].copy_from_slice(&[0x5c, 2, 0, 20]);
        page[16..].copy_from_slice(&[0x81, 2, 0, 0, 0, 0, 1, 0x80]);
        let sense = |rig: &mut Rig, code, subpage| {
            let cdb = [0x1a, 8, code, subpage, 255, 0];
            rig.send(&cdb).good().data[4..].to_vec()
        };
        assert_eq!(sense(&mut rig, 0x1c, 2), page, "current");
        assert_eq!(sense(&mut rig, 0x9c, 2), page, "default");
        let mut mask = [0; 24];
        mask[..4].copy_from_slice(&page[..4]);
        assert_eq!(sense(&mut rig, 0x5c, 2), mask, "changeable");
        let exceptions = sense(&mut rig, 0x1c, 0);
        assert_eq!(exceptions.len(), 12);
        assert_eq!(
            sense(&mut rig, 0x1c, 0xff),
            [&exceptions[..], &page].concat()
        );
        assert!(sense(&mut rig, 0x3f, 0xff).ends_with(&page));
        assert!(sense(&mut rig, 0x3f, 0).ends_with(&exceptions));
        // The current values should be accepted in MODE SELECT, but not any other value.
        let select = |rig: &mut Rig, page: &[u8]| {
            let list = [&[0; 4], page].concat();
            rig.send_out(&[0x15, 0x10, 0, 0, list.len() as u8, 0], &list)
        };
        select(&mut rig, &page).good();
        let mut other = page;
        other[23] = 1;
        assert_eq!(select(&mut rig, &other).check(), (5, 0x26, 0));
        assert_eq!(select(&mut rig, &page[..20]).check(), (5, 0x1a, 0));
        rig.lu.set_capacity(1 << 21).unwrap();
        assert_eq!(rig.run(A, &[0; 6], &[], 0).check(), (6, 0x2a, 9));
        assert_eq!(rig.run(A, &[0; 6], &[], 0).check(), (6, 0x2a, 1));
        page[22..].copy_from_slice(&[3, 0]);
        assert_eq!(sense(&mut rig, 0x1c, 2), page);
    }

    #[test]
    fn threshold_page_requires_threshold() {
        let mut rig = Rig::with(config(BlockSize::B512, 1 << 20));
        let cdb = [0x1a, 8, 0x1c, 2, 255, 0];
        assert_eq!(rig.send(&cdb).cdb_pointer(), (3, Some(7)));
        assert_eq!(
            rig.send(&[0x1a, 8, 0x1c, 0xff, 255, 0]).good().data.len(),
            16
        );
        assert_eq!(rig.lu.note_space(100, 100), None);
        assert!(!rig.lu.is_filling());
    }

    #[test]
    fn threshold_set_count_fits_field() {
        for blocks in [1, 2, 1000, 1 << 20, 1 << 40, 1 << 54] {
            let exponent = exponent(blocks);
            assert!(exponent > 0 && blocks >> exponent < 1 << 32, "{blocks}");
        }
    }
}
