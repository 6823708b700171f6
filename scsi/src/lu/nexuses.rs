//! The I_T nexuses of a unit with their pending unit attentions.
//!
//! The table is behind a mutex. Hint bits, indexed by a hash of the nexus, say whether a command
//! must look behind it at all: a READ or WRITE of a nexus without pending attention takes no lock.
//!
//! Invariant: a hint bit is set while any nexus that hashes to it has a pending attention. Bits are
//! cleared under the mutex only, so no attention can be raised in between.

use std::collections::HashMap;
use std::sync::{Arc, PoisonError};

use riser_sync::atomic::{AtomicU64, Ordering};
use riser_sync::{Mutex, MutexGuard};

use crate::attention::{Attention, AttentionScope, Attentions};
use crate::nexus::{Nexus, NexusId};

/// Number of 64-bit words of hint bits.
const WORDS: usize = 16;

/// A nexus that has logged in.
#[derive(Debug)]
struct Entry {
    nexus: Arc<Nexus>,
    pending: Attentions,
}

/// The nexuses of a unit.
#[derive(Debug)]
pub(crate) struct Nexuses {
    hints: Hints,
    table: Mutex<HashMap<NexusId, Entry>>,
}

/// Table of nexuses, locked as long as it lives.
pub(crate) struct NexusTable<'a> {
    hints: &'a Hints,
    entries: MutexGuard<'a, HashMap<NexusId, Entry>>,
}

impl Nexuses {
    /// Table without any nexus.
    pub(super) fn new() -> Self {
        Self {
            hints: Hints([const { AtomicU64::new(0) }; WORDS]),
            table: Mutex::new(HashMap::new()),
        }
    }

    /// Locks the table. A panic elsewhere cannot have left it half changed, so poison is ignored.
    pub(crate) fn lock(&self) -> NexusTable<'_> {
        NexusTable {
            hints: &self.hints,
            entries: self.table.lock().unwrap_or_else(PoisonError::into_inner),
        }
    }

    /// Takes the next pending unit attention of a nexus.
    #[inline]
    pub(super) fn take_attention(&self, id: NexusId) -> Option<Attention> {
        // The bit may be that of another nexus. Then the table is locked in vain, which costs time
        // and nothing else.
        if !self.hints.is_set(id) {
            return None;
        }
        let mut table = self.lock();
        let taken = table.entries.get_mut(&id)?.pending.take();
        table.update_hint(id);
        taken
    }

    /// Clears a unit attention of a nexus, if it is pending.
    pub(super) fn clear_attention(&self, id: NexusId, attention: Attention) {
        if !self.hints.is_set(id) {
            return;
        }
        let mut table = self.lock();
        if let Some(entry) = table.entries.get_mut(&id) {
            entry.pending.clear(attention);
        }
        table.update_hint(id);
    }
}

impl NexusTable<'_> {
    /// Adds a nexus with unit attentions.
    pub(super) fn insert(&mut self, id: NexusId, nexus: Nexus, attentions: &[Attention]) {
        let mut pending = Attentions::default();
        attentions.iter().for_each(|&one| pending.raise(one));
        let nexus = Arc::new(nexus);
        self.entries.insert(id, Entry { nexus, pending });
        self.hints.set(id);
    }

    /// Removes a nexus and what is pending for it.
    pub(super) fn remove(&mut self, id: NexusId) {
        self.entries.remove(&id);
        self.update_hint(id);
    }

    /// The number of nexuses.
    pub(super) fn len(&self) -> usize {
        self.entries.len()
    }

    /// Whether there is no nexus.
    pub(super) fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// The ports of a nexus.
    pub(super) fn nexus(&self, id: NexusId) -> Option<Arc<Nexus>> {
        self.entries.get(&id).map(|entry| Arc::clone(&entry.nexus))
    }

    /// Establishes a unit attention condition.
    pub(super) fn raise(&mut self, attention: Attention, scope: AttentionScope) {
        self.raise_where(attention, |id, _| scope.covers(id));
    }

    /// Establishes a unit attention condition for some nexuses.
    pub(super) fn raise_where(
        &mut self,
        attention: Attention,
        is_meant: impl Fn(NexusId, &Nexus) -> bool,
    ) {
        for (&id, entry) in self.entries.iter_mut() {
            if is_meant(id, &entry.nexus) {
                entry.pending.raise(attention);
                self.hints.set(id);
            }
        }
    }

    /// Clears the hint of a nexus unless one that shares it has something pending.
    fn update_hint(&self, id: NexusId) {
        // All nexuses are looked at. This happens after an attention was taken or a nexus has
        // left, and not for reads and writes.
        let is_needed = self
            .entries
            .iter()
            .any(|(&other, entry)| bit_of(other) == bit_of(id) && !entry.pending.is_empty());
        if !is_needed {
            self.hints.clear(id);
        }
    }
}

/// A bit for each hash of a nexus.
#[derive(Debug)]
struct Hints([AtomicU64; WORDS]);

impl Hints {
    #[inline]
    fn is_set(&self, id: NexusId) -> bool {
        let (word, bit) = bit_of(id);
        self.0[word].load(Ordering::Acquire) & bit != 0
    }

    fn set(&self, id: NexusId) {
        let (word, bit) = bit_of(id);
        self.0[word].fetch_or(bit, Ordering::AcqRel);
    }

    fn clear(&self, id: NexusId) {
        let (word, bit) = bit_of(id);
        self.0[word].fetch_and(!bit, Ordering::AcqRel);
    }
}

/// Word and bit of a nexus.
#[inline]
fn bit_of(id: NexusId) -> (usize, u64) {
    let index = id.0 as usize % (WORDS * 64);
    (index / 64, 1 << (index % 64))
}

#[cfg(test)]
mod tests {
    use riser_sync::testing::explore;
    use riser_sync::thread;

    use super::*;
    use crate::tests::srp_nexus;

    /// Two nexuses that share a hint bit.
    const PAIR: [NexusId; 2] = [NexusId(1), NexusId(1 + 64 * WORDS as u64)];

    #[test]
    fn interleavings_of_raising_and_taking_leave_each_attention_once() {
        explore(|| {
            let nexuses = Arc::new(Nexuses::new());
            for id in PAIR {
                nexuses.lock().insert(id, srp_nexus(1), &[]);
            }
            let takers = PAIR.map(|id| {
                let nexuses = Arc::clone(&nexuses);
                thread::spawn(move || [nexuses.take_attention(id), nexuses.take_attention(id)])
            });
            let raised = [Attention::CapacityChanged, Attention::ModeChanged];
            for one in raised {
                nexuses.lock().raise(one, AttentionScope::All);
            }
            for (id, taker) in PAIR.into_iter().zip(takers) {
                let early = taker.join().unwrap();
                let late = std::iter::from_fn(|| nexuses.take_attention(id));
                let mut all: Vec<_> = early.into_iter().flatten().chain(late).collect();
                all.sort_by_key(|one| raised.iter().position(|other| other == one));
                assert_eq!(all, raised);
            }
        });
    }
}
