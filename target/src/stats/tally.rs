//! Counters for rare events, by kind.

/// Event counters for a small number of kinds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tally<K>(Vec<(K, u64)>);

/// Completed task management functions, with the function and response as labels.
pub type Functions = Tally<(&'static str, &'static str)>;

impl<K> Default for Tally<K> {
    fn default() -> Self {
        Self(Vec::new())
    }
}

impl<K: PartialEq + Copy> Tally<K> {
    /// Counts an event.
    pub fn count(&mut self, kind: K) {
        self.add(kind, 1);
    }

    /// Counts `n` events.
    pub fn add(&mut self, kind: K, n: u64) {
        match self.0.iter_mut().find(|(known, _)| *known == kind) {
            Some((_, sum)) => *sum += n,
            None => self.0.push((kind, n)),
        }
    }

    /// Adds all counters of `other`.
    pub fn merge(&mut self, other: &Self) {
        for (kind, n) in other.iter() {
            self.add(kind, n);
        }
    }

    /// Returns all kinds with their number of events.
    pub fn iter(&self) -> impl Iterator<Item = (K, u64)> + '_ {
        self.0.iter().copied()
    }

    /// Returns the number of events of the kinds for which `is_meant` returns true.
    pub fn total_of(&self, is_meant: impl Fn(&K) -> bool) -> u64 {
        let meant = self.0.iter().filter(|(kind, _)| is_meant(kind));
        meant.map(|(_, n)| n).sum()
    }

    /// Returns the total number of events.
    #[must_use]
    pub fn total(&self) -> u64 {
        self.0.iter().map(|(_, n)| n).sum()
    }
}
