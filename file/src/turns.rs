//! Prevents concurrent reads and changes of the same bytes.
//!
//! The page cache can copy data for a read while the same data is being written. Only some file
//! systems prevent this. A read could return a block with a mix of old and new data. Disks never do
//! this, and hosts sharing a disk depend on it: cluster leases and heartbeats are blocks that a
//! host writes while other hosts are reading them. Therefore a request waits for older requests for
//! the same bytes if either of them changes the data. Changes do not wait for each other, because
//! the kernel serializes writes to a file.
//!
//! However, the kernel can split a write between pages. If blocks are not aligned to pages, changes
//! of the same bytes are exclusive, so that another change is never executed between the parts of a
//! block.
//!
//! A disk does not split its own blocks, so turns are not required for direct I/O on a device.
//! They are required for all files, because some file systems use the page cache for direct I/O as
//! well.
//!
//! A request only checks requests of the other kind, when joining and leaving. Reads therefore do
//! not have to check anything if there are no changes. An exclusive change checks all requests.

use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use riser_reactor::Waker;
use slab::Slab;

/// Active requests of all threads that read or change the medium of a store.
#[derive(Debug, Default)]
pub struct Turns {
    line: Mutex<Line>,
    /// Changes of the same bytes wait for each other.
    has_exclusive_changes: bool,
}

/// Limited by the number of requests of all threads.
#[derive(Debug, Default)]
struct Line {
    next: u64,
    reads: Slab<Place>,
    changes: Slab<Place>,
}

#[derive(Debug)]
struct Place {
    /// Position in order of arrival.
    number: u64,
    bytes: Range<u64>,
    /// Number of older requests for the same bytes that it waits for.
    blockers: usize,
    /// Set if it has to wait.
    wait: Option<Wait>,
}

#[derive(Debug)]
struct Wait {
    is_over: Arc<AtomicBool>,
    waker: Waker,
}

impl Place {
    fn overlaps(&self, bytes: &Range<u64>) -> bool {
        self.bytes.start < bytes.end && bytes.start < self.bytes.end
    }

    /// Resumes all newer requests that were only waiting for this request.
    fn resume_newer(&self, places: &mut Slab<Self>) {
        // An iteration includes unused entries, and there may be many of these.
        if places.is_empty() {
            return;
        }
        for (_, place) in places.iter_mut() {
            if place.number < self.number || !place.overlaps(&self.bytes) {
                continue;
            }
            place.blockers -= 1;
            if place.blockers == 0
                && let Some(wait) = &place.wait
            {
                wait.is_over.store(true, Ordering::Release);
                wait.waker.wake();
            }
        }
    }
}

/// Position of a request that does not have to wait and completes synchronously. This does not
/// require any other state. Dropping it leaves the queue.
#[derive(Debug)]
pub struct ShortTurn<'a> {
    turns: &'a Arc<Turns>,
    key: usize,
    changes: bool,
}

/// Position of a request in the queue. Dropping it leaves the queue.
#[derive(Debug)]
pub struct Turn {
    turns: Arc<Turns>,
    key: usize,
    changes: bool,
    /// `None` if it did not have to wait.
    is_over: Option<Arc<AtomicBool>>,
}

impl Turns {
    /// Creates a queue for a file whose blocks are not aligned to pages, so that changes of the same
    /// bytes wait for each other.
    pub(super) fn with_exclusive_changes() -> Self {
        Self {
            line: Mutex::default(),
            has_exclusive_changes: true,
        }
    }

    /// Returns whether changes of the same bytes wait for each other.
    pub(super) fn has_exclusive_changes(&self) -> bool {
        self.has_exclusive_changes
    }

    /// Adds a request that reads or changes these bytes to the queue. If it has to wait, its worker
    /// is woken when it may continue.
    pub fn join(
        self: &Arc<Self>,
        bytes: Range<u64>,
        changes: bool,
        waker: impl FnOnce() -> Waker,
    ) -> Turn {
        let mut line = self.line();
        let number = line.next;
        line.next += 1;
        let (own, others) = line.sides(changes);
        let count =
            |places: &Slab<Place>| places.iter().filter(|(_, p)| p.overlaps(&bytes)).count();
        let mut blockers = count(others);
        if changes && self.has_exclusive_changes {
            blockers += count(own);
        }
        let is_over = (blockers > 0).then(Arc::default);
        let wait = is_over.clone().map(|is_over| Wait {
            is_over,
            waker: waker(),
        });
        let key = own.insert(Place {
            number,
            bytes,
            blockers,
            wait,
        });
        Turn {
            turns: self.clone(),
            key,
            changes,
            is_over,
        }
    }

    /// Same as [`Turns::join`], but only if it does not have to wait for an older request.
    pub fn try_join(self: &Arc<Self>, bytes: Range<u64>, changes: bool) -> Option<ShortTurn<'_>> {
        let mut line = self.line();
        let number = line.next;
        let (own, others) = line.sides(changes);
        // An iteration includes unused entries, and there may be many of these.
        let has_blocker = |places: &Slab<Place>| {
            !places.is_empty() && places.iter().any(|(_, place)| place.overlaps(&bytes))
        };
        if has_blocker(others) || (changes && self.has_exclusive_changes && has_blocker(own)) {
            return None;
        }
        let key = own.insert(Place {
            number,
            bytes,
            blockers: 0,
            wait: None,
        });
        line.next = number + 1;
        Some(ShortTurn {
            turns: self,
            key,
            changes,
        })
    }

    /// Removes a request, and resumes all requests that were only waiting for this request.
    fn remove(&self, key: usize, changes: bool) {
        let mut line = self.line();
        let (own, others) = line.sides(changes);
        let removed = own.remove(key);
        removed.resume_newer(others);
        if changes && self.has_exclusive_changes {
            removed.resume_newer(own);
        }
    }

    /// A panic in another thread cannot leave a partial entry.
    fn line(&self) -> MutexGuard<'_, Line> {
        self.line.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Turn {
    /// Returns whether the request may continue.
    pub(super) fn may_continue(&self) -> bool {
        let is_over = |flag: &Arc<AtomicBool>| flag.load(Ordering::Acquire);
        self.is_over.as_ref().is_none_or(is_over)
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        self.turns.remove(self.key, self.changes);
    }
}

impl ShortTurn<'_> {
    /// Keeps the position for a request that does not complete synchronously.
    pub(super) fn into_turn(self) -> Turn {
        let this = std::mem::ManuallyDrop::new(self);
        Turn {
            turns: Arc::clone(this.turns),
            key: this.key,
            changes: this.changes,
            is_over: None,
        }
    }
}

impl Drop for ShortTurn<'_> {
    fn drop(&mut self) {
        self.turns.remove(self.key, self.changes);
    }
}

impl Line {
    /// Returns the entries for requests of a kind, and for requests of the other kind.
    fn sides(&mut self, changes: bool) -> (&mut Slab<Place>, &mut Slab<Place>) {
        match changes {
            true => (&mut self.changes, &mut self.reads),
            false => (&mut self.reads, &mut self.changes),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_and_changes_alternate_in_arrival_order() {
        let turns = Arc::new(Turns::default());
        let waker = Waker::simulated();
        let join = |bytes, changes| turns.join(bytes, changes, || waker.clone());
        let first = join(0..1024, false);
        let disjoint = join(512..2048, false);
        let change = join(1000..1536, true);
        let elsewhere = join(2048..4096, true);
        let late = join(0..1001, false);
        assert!(
            [&first, &disjoint, &elsewhere]
                .iter()
                .all(|t| t.may_continue())
        );
        assert!(!change.may_continue() && !late.may_continue());
        drop(elsewhere);
        assert!(!waker.is_pending(), "no request waited for the change");
        drop(first);
        assert!(!change.may_continue(), "another request reads");
        assert!(!waker.is_pending(), "no request can continue");
        drop(disjoint);
        assert!(waker.is_pending() && change.may_continue());
        assert!(!late.may_continue(), "the change is older");
        drop(change);
        assert!(late.may_continue());
    }

    #[test]
    fn changes_do_not_wait_for_each_other() {
        let turns = Arc::new(Turns::default());
        let join = |changes| turns.join(0..512, changes, Waker::simulated);
        let [first, second, third] = [(); 3].map(|()| join(true));
        assert!([&first, &second, &third].iter().all(|t| t.may_continue()));
        let read = join(false);
        drop((first, third));
        assert!(!read.may_continue());
        drop(second);
        assert!(read.may_continue());
    }

    #[test]
    fn exclusive_changes_wait_in_arrival_order() {
        let turns = Arc::new(Turns::with_exclusive_changes());
        let waker = Waker::simulated();
        let join = |bytes, changes| turns.join(bytes, changes, || waker.clone());
        let first = turns.try_join(0..520, true).unwrap().into_turn();
        assert!(turns.try_join(519..1040, true).is_none());
        let disjoint = turns.try_join(520..1040, true).unwrap();
        let (second, third) = (join(0..1040, true), join(0..520, true));
        let reads = [(); 2].map(|()| join(1040..2080, false));
        assert!(reads.iter().all(Turn::may_continue), "reads are shared");
        drop(first);
        assert!(!second.may_continue() && !third.may_continue());
        assert!(!waker.is_pending());
        drop(disjoint);
        assert!(second.may_continue() && !third.may_continue());
        // If it is canceled, only the requests behind it continue.
        let read = join(0..520, false);
        drop(second);
        assert!(third.may_continue() && !read.may_continue());
        drop(third);
        assert!(read.may_continue());
    }

    #[test]
    fn short_turn_blocks_like_any_turn() {
        let turns = Arc::new(Turns::default());
        let waker = Waker::simulated();
        let join = |changes| turns.join(0..512, changes, || waker.clone());
        let read = turns.try_join(0..512, false).unwrap();
        assert!(turns.try_join(511..600, true).is_none(), "a read is active");
        assert!(turns.try_join(512..600, true).is_some(), "other bytes");
        let change = join(true);
        assert!(!change.may_continue());
        assert!(turns.try_join(0..1, false).is_none(), "the change is older");
        drop(read);
        assert!(change.may_continue() && waker.is_pending());
        drop(change);
        // A request that didn't complete synchronously keeps its position.
        let kept = turns.try_join(0..512, true).unwrap().into_turn();
        assert!(kept.may_continue());
        let late = join(false);
        assert!(!late.may_continue());
        drop(kept);
        assert!(late.may_continue());
        drop(late);
        assert!(turns.line().reads.is_empty() && turns.line().changes.is_empty());
    }

    /// If a request is canceled while waiting, this only releases requests waiting for it.
    #[test]
    fn canceled_turn_releases_followers() {
        let turns = Arc::new(Turns::default());
        let join = |changes| turns.join(0..512, changes, Waker::simulated);
        let (read, change, late) = (join(false), join(true), join(false));
        drop(change);
        assert!(late.may_continue());
        let change = join(true);
        drop(read);
        assert!(!change.may_continue());
        drop(late);
        assert!(change.may_continue());
    }
}
