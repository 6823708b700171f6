//! Asymmetric logical unit access (SPC-4 clause 5.15): the paths preferred by a unit.

use std::ops::RangeInclusive;

/// Access to a unit on a path, best first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Access {
    /// Optimal performance.
    Optimized,
    /// Reduced performance.
    NonOptimized,
    /// Currently not accessible: standby, unavailable, offline, or in transition.
    None,
}

impl Access {
    /// Returns the access for an ASYMMETRIC ACCESS STATE (SPC-4 table 312).
    #[must_use]
    pub fn from_state(state: u8) -> Self {
        const NON_OPTIMIZED: u8 = 0x1;
        const LBA_DEPENDENT: u8 = 0x4;
        match state & 0x0f {
            0x0 => Self::Optimized,
            NON_OPTIMIZED | LBA_DEPENDENT => Self::NonOptimized,
            _ => Self::None,
        }
    }
}

/// Returns whether a unit reports access states: the TPGS field in standard INQUIRY data (SPC-4
/// clause 6.6.2).
#[must_use]
pub fn is_offered(inquiry: &[u8]) -> bool {
    inquiry.get(5).is_some_and(|b| b & 0x30 != 0)
}

/// Returns the target port group of a path: the designator of this type in the body of the device
/// identification page (SPC-4 clause 7.8.6.9).
#[must_use]
pub fn own_group(designators: &[u8]) -> Option<u16> {
    const TARGET_PORT: u8 = 0x10;
    const GROUP: u8 = 0x5;
    let mut rest = designators;
    while let [_, kind, _, len, tail @ ..] = rest {
        let id = tail.get(..usize::from(*len))?;
        rest = &tail[usize::from(*len)..];
        if kind & 0x3f == TARGET_PORT | GROUP {
            return be16(id, 2..=3);
        }
    }
    None
}

/// Returns the access state of a group from REPORT TARGET PORT GROUPS data (SPC-4 clause 6.37) in
/// the format without extended header.
#[must_use]
pub fn of_group(data: &[u8], group: u16) -> Option<Access> {
    let declared = u32::from_be_bytes(data.get(..4)?.try_into().ok()?) as usize;
    let body = data.get(4..)?;
    let mut rest = &body[..declared.min(body.len())];
    while let [state, _, _, _, _, _, _, ports, tail @ ..] = rest {
        if be16(rest, 2..=3)? == group {
            return Some(Access::from_state(*state));
        }
        rest = tail.get(4 * usize::from(*ports)..)?;
    }
    None
}

fn be16(data: &[u8], at: RangeInclusive<usize>) -> Option<u16> {
    Some(u16::from_be_bytes(data.get(at)?.try_into().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn path_reports_group_and_access_state() {
        // An NAA designator of the unit, a relative target port, and target port group 2.
        let page = [
            &[0x01, 0x03, 0, 8, 0x60, 1, 2, 3, 4, 5, 6, 7][..],
            &[0x51, 0x94, 0, 4, 0, 0, 0, 1],
            &[0x51, 0x95, 0, 4, 0, 0, 0, 2],
        ]
        .concat();
        assert_eq!(own_group(&page), Some(2));
        assert_eq!(own_group(&page[..20]), None);
        // Group 1: active/optimized, two ports; group 2: standby, one port; group 3: non-optimized.
        let groups = [
            &[0, 0, 0, 40][..],
            &[0x80, 0x8f, 0, 1, 0, 0, 0, 2, 0, 0, 0, 1, 0, 0, 0, 2],
            &[0x02, 0x8f, 0, 2, 0, 0, 0, 1, 0, 0, 0, 3],
            &[0x01, 0x8f, 0, 3, 0, 0, 0, 1, 0, 0, 0, 4],
        ]
        .concat();
        assert_eq!(of_group(&groups, 1), Some(Access::Optimized));
        assert_eq!(of_group(&groups, 2), Some(Access::None));
        assert_eq!(of_group(&groups, 3), Some(Access::NonOptimized));
        assert_eq!(of_group(&groups, 4), None);
        for len in 0..groups.len() {
            let _ = of_group(&groups[..len], 9);
        }
    }
}
