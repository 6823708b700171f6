//! The I_T nexuses of an LU, with their pending unit attentions.
//!
//! The table is protected by a mutex. To avoid this lock for every READ or WRITE, we use an array
//! of hint bits, indexed by a hash of the nexus ID. The table must only be checked if this bit is
//! set.
//!
//! Invariant: a hint bit is set if there is a pending unit attention for any nexus with this hash.
//! The mutex is required to clear a bit, so that we cannot miss a unit attention raised in between.

use std::collections::HashMap;
use std::sync::{Arc, PoisonError};

use riser_sync::atomic::{AtomicU64, Ordering};
use riser_sync::{Mutex, MutexGuard};

use crate::attention::{Attention, AttentionScope, Attentions};
use crate::nexus::{Nexus, NexusId};

/// Size of the hint array, in 64-bit words.
const WORDS: usize = 16;

/// A nexus that is logged in.
#[derive(Debug)]
struct Entry {
    nexus: Arc<Nexus>,
    pending: Attentions,
}

/// The nexuses of an LU.
#[derive(Debug)]
pub(crate) struct Nexuses {
    hints: Hints,
    table: Mutex<HashMap<NexusId, Entry>>,
}

/// The nexus table. It is locked until this is dropped.
pub(crate) struct NexusTable<'a> {
    hints: &'a Hints,
    entries: MutexGuard<'a, HashMap<NexusId, Entry>>,
}

impl Nexuses {
    /// Creates a new empty table.
    pub(super) fn new() -> Self {
        Self {
            hints: Hints([const { AtomicU64::new(0) }; WORDS]),
            table: Mutex::new(HashMap::new()),
        }
    }

    /// Locks the table. If another thread has panicked, the table is still consistent, so we can
    /// ignore that the mutex is poisoned.
    pub(crate) fn lock(&self) -> NexusTable<'_> {
        NexusTable {
            hints: &self.hints,
            entries: self.table.lock().unwrap_or_else(PoisonError::into_inner),
        }
    }

    /// Removes and returns the next pending unit attention for a nexus.
    #[inline]
    pub(super) fn take_attention(&self, id: NexusId) -> Option<Attention> {
        // The bit may be set for some other nexus, in which case we lock the table for nothing.
        // This takes some time but is otherwise safe.
        if !self.hints.is_set(id) {
            return None;
        }
        let mut table = self.lock();
        let taken = table.entries.get_mut(&id)?.pending.take_next();
        table.update_hint(id);
        taken
    }

    /// Clears a unit attention for a nexus, if it is pending.
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
    /// Adds a nexus with initial unit attentions.
    pub(super) fn insert(&mut self, id: NexusId, nexus: Nexus, attentions: &[Attention]) {
        let mut pending = Attentions::default();
        attentions.iter().for_each(|&one| pending.raise(one));
        let nexus = Arc::new(nexus);
        self.entries.insert(id, Entry { nexus, pending });
        self.hints.set(id);
    }

    /// Removes a nexus and all pending unit attentions.
    pub(super) fn remove(&mut self, id: NexusId) {
        self.entries.remove(&id);
        self.update_hint(id);
    }

    /// Returns the number of nexuses.
    pub(super) fn len(&self) -> usize {
        self.entries.len()
    }

    /// Returns whether the table is empty.
    pub(super) fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// Returns the ports of a nexus.
    pub(super) fn nexus(&self, id: NexusId) -> Option<Arc<Nexus>> {
        self.entries.get(&id).map(|entry| Arc::clone(&entry.nexus))
    }

    /// Establishes a unit attention condition.
    pub(super) fn raise(&mut self, attention: Attention, scope: AttentionScope) {
        self.raise_where(attention, |id, _| scope.covers(id));
    }

    /// Establishes a unit attention condition for some of the nexuses.
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

    /// Clears the hint bit for a nexus, unless a unit attention is pending for any nexus with this
    /// bit.
    fn update_hint(&self, id: NexusId) {
        // This needs to check all nexuses, but it's only done after a unit attention was returned
        // or a nexus was removed. It is never done for reads and writes.
        let is_needed = self
            .entries
            .iter()
            .any(|(&other, entry)| bit_of(other) == bit_of(id) && !entry.pending.is_empty());
        if !is_needed {
            self.hints.clear(id);
        }
    }
}

/// A hint bit for each hash value.
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

/// Returns the index of the word and the bit for a nexus.
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

    /// Two nexuses that use the same hint bit.
    const PAIR: [NexusId; 2] = [NexusId(1), NexusId(1 + 64 * WORDS as u64)];

    #[test]
    fn concurrent_raise_keeps_each_attention_once() {
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
