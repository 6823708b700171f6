//! Units that the initiators of sessions which have just ended take their LUNs for.
//!
//! An initiator that loses its session without a logout logs in again and goes on with its disks:
//! if a LUN has come to lead to another unit meanwhile, the initiator must not write there before
//! it has asked which one it is. One that starts from nothing, such as firmware that boots from a
//! disk, may never ask; so this is forgotten soon.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use crate::fabric::KnownUnits;

/// Time until a session is forgotten. Linux keeps the commands of an iSCSI session for as long
/// before it fails them.
const LASTS: Duration = Duration::from_secs(120);

/// Sessions that are remembered, at most.
const MAX_SESSIONS: usize = 256;

/// LUNs of all of them, at most.
const MAX_NUMBERS: usize = 4096;

/// Sessions that have ended, the oldest first.
#[derive(Debug)]
pub(super) struct Recent<K>(VecDeque<(K, Instant, KnownUnits)>);

impl<K> Default for Recent<K> {
    fn default() -> Self {
        Self(VecDeque::new())
    }
}

impl<K: PartialEq> Recent<K> {
    /// A session has ended.
    pub(super) fn keep(&mut self, key: K, units: KnownUnits, now: Instant) {
        self.0.retain(|(known, _, _)| *known != key);
        self.0.push_back((key, now, units));
        let mut numbers: usize = self.0.iter().map(|(_, _, units)| units.len()).sum();
        // Bounded twice, since a session may have any number of LUNs.
        while self.0.len() > MAX_SESSIONS || numbers > MAX_NUMBERS {
            let (_, _, units) = self.0.pop_front().expect("it has some");
            numbers -= units.len();
        }
    }

    /// The initiator has logged out: it begins from nothing.
    pub(super) fn forget(&mut self, key: &K) {
        self.0.retain(|(known, _, _)| known != key);
    }

    /// Returns the units that the initiator of a session which logs in takes its LUNs for.
    pub(super) fn find(&mut self, key: &K, now: Instant) -> Option<KnownUnits> {
        let is_late = |since: Instant| now.saturating_duration_since(since) > LASTS;
        self.0.retain(|(_, since, _)| !is_late(*since));
        let (_, _, units) = self.0.iter().find(|(known, _, _)| known == key)?;
        Some(units.clone())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sessions_are_forgotten_by_age_and_number() {
        let mut recent = Recent::default();
        let start = Instant::now();
        let second = Duration::from_secs(1);
        recent.keep(0, KnownUnits::default(), start);
        recent.keep(1, KnownUnits::default(), start + second);
        assert!(recent.find(&0, start + LASTS).is_some());
        let later = start + LASTS + second;
        assert!(recent.find(&0, later).is_none() && recent.find(&1, later).is_some());
        for key in 2..2 + MAX_SESSIONS {
            recent.keep(key, KnownUnits::default(), later);
        }
        assert!(recent.find(&1, later).is_none(), "the oldest gives way");
        assert!(recent.find(&2, later).is_some());
        recent.keep(2, KnownUnits::default(), later);
        assert_eq!(recent.0.len(), MAX_SESSIONS, "each is there once");
        recent.forget(&2);
        assert!(recent.find(&2, later).is_none() && recent.find(&3, later).is_some());
    }
}
