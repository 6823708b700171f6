//! Units by LUN, as last seen by the initiators of recently closed sessions.
//!
//! If an initiator loses its session without a logout, it logs in again and continues to use its
//! disks. If a LUN refers to a different unit by then, the initiator must not write to it before it
//! has identified the new unit. An initiator without previous state, such as firmware that boots
//! from a disk, may never do this, so entries expire after a short time.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use crate::fabric::KnownUnits;

/// Time until an entry expires. Linux keeps the commands of an iSCSI session for the same time
/// before they fail.
const LASTS: Duration = Duration::from_secs(120);

/// Maximum number of sessions.
const MAX_SESSIONS: usize = 256;

/// Maximum number of LUNs of all sessions.
const MAX_NUMBERS: usize = 4096;

/// Closed sessions, oldest first.
#[derive(Debug)]
pub(super) struct Recent<K>(VecDeque<(K, Instant, KnownUnits)>);

impl<K> Default for Recent<K> {
    fn default() -> Self {
        Self(VecDeque::new())
    }
}

impl<K: PartialEq> Recent<K> {
    /// Adds a closed session.
    pub(super) fn keep(&mut self, key: K, units: KnownUnits, now: Instant) {
        self.0.retain(|(known, _, _)| *known != key);
        self.0.push_back((key, now, units));
        let mut numbers: usize = self.0.iter().map(|(_, _, units)| units.len()).sum();
        // We need both limits, because a session can have any number of LUNs.
        while self.0.len() > MAX_SESSIONS || numbers > MAX_NUMBERS {
            let (_, _, units) = self.0.pop_front().expect("it has some");
            numbers -= units.len();
        }
    }

    /// Removes a session because the initiator has logged out, so it will start without previous
    /// state.
    pub(super) fn remove(&mut self, key: &K) {
        self.0.retain(|(known, _, _)| known != key);
    }

    /// Returns the units by LUN, as last seen by an initiator that is logging in.
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
    fn sessions_expire_by_age_and_number() {
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
        assert!(recent.find(&1, later).is_none(), "the oldest is displaced");
        assert!(recent.find(&2, later).is_some());
        recent.keep(2, KnownUnits::default(), later);
        assert_eq!(recent.0.len(), MAX_SESSIONS, "each is there once");
        recent.remove(&2);
        assert!(recent.find(&2, later).is_none() && recent.find(&3, later).is_some());
    }
}
