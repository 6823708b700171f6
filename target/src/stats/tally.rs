//! Counts of what happens rarely, by kind.

/// Counts by kind. There are few kinds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tally<K>(Vec<(K, u64)>);

/// Task-management functions that were answered: the function and the answer, as labels.
pub type Functions = Tally<(&'static str, &'static str)>;

impl<K> Default for Tally<K> {
    fn default() -> Self {
        Self(Vec::new())
    }
}

impl<K: PartialEq + Copy> Tally<K> {
    /// It has happened once more.
    pub fn count(&mut self, kind: K) {
        self.add(kind, 1);
    }

    /// It has happened `n` times more.
    pub fn add(&mut self, kind: K, n: u64) {
        match self.0.iter_mut().find(|(known, _)| *known == kind) {
            Some((_, sum)) => *sum += n,
            None => self.0.push((kind, n)),
        }
    }

    /// Adds what another one has counted.
    pub fn merge(&mut self, other: &Self) {
        for (kind, n) in other.iter() {
            self.add(kind, n);
        }
    }

    /// Everything that has happened, and how often.
    pub fn iter(&self) -> impl Iterator<Item = (K, u64)> + '_ {
        self.0.iter().copied()
    }

    /// Returns the sum of all kinds.
    #[must_use]
    pub fn total(&self) -> u64 {
        self.0.iter().map(|(_, n)| n).sum()
    }
}
