//! Turns: a read and a change of the same bytes take place one after the other.
//!
//! The page cache copies what is read while others copy what is written there: of all file systems
//! only some keep the two apart. A reader could get a block of which a part is old and the rest is
//! new. No disk does that, and hosts that share one rely on it: leases and heartbeats of clusters
//! are blocks that one host writes while others read them. So a request waits for older ones of
//! the same bytes, where one of the two changes them. Changes do not wait for each other: writers of
//! a file exclude one another in the kernel.
//!
//! A disk does not divide its own blocks, and memory has locks of its own (`ram`): with direct I/O on
//! a device, no request needs a turn. Of files, all do: some file systems use the page cache for
//! direct I/O as well.
//!
//! A request looks at those of the other kind when it joins and when it leaves, so reads alone look
//! at none.

use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use riser_reactor::Waker;
use slab::Slab;

/// The requests of a store's workers that read or change its medium.
#[derive(Debug, Default)]
pub(super) struct Turns(Mutex<Line>);

/// At most the workers' requests.
#[derive(Debug, Default)]
struct Line {
    next: u64,
    reads: Slab<Place>,
    changes: Slab<Place>,
}

#[derive(Debug)]
struct Place {
    /// Position in the order of arrival.
    number: u64,
    bytes: Range<u64>,
    /// Older requests of the other kind for the same bytes.
    blockers: usize,
    /// Where it has to wait.
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
}

/// The place of a request whose turn has come at once, and that ends in the call that began it:
/// nothing is kept for it but the place, which it leaves with this.
#[derive(Debug)]
pub(super) struct ShortTurn<'a> {
    turns: &'a Arc<Turns>,
    key: usize,
    changes: bool,
}

/// A request's place in the line, which it leaves with this.
#[derive(Debug)]
pub(super) struct Turn {
    turns: Arc<Turns>,
    key: usize,
    changes: bool,
    /// `None` where it did not have to wait.
    is_over: Option<Arc<AtomicBool>>,
}

impl Turns {
    /// Takes a place behind all others, for a request that reads these bytes or changes them. Where
    /// it has to wait, its worker is woken when its turn has come.
    pub(super) fn join(
        self: &Arc<Self>,
        bytes: Range<u64>,
        changes: bool,
        waker: impl FnOnce() -> Waker,
    ) -> Turn {
        let mut line = self.line();
        let number = line.next;
        line.next += 1;
        let (own, others) = line.sides(changes);
        let blockers = others.iter().filter(|(_, p)| p.overlaps(&bytes)).count();
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

    /// Takes a place as [`Turns::join`], but only where no older request is in the way.
    pub(super) fn enter(
        self: &Arc<Self>,
        bytes: Range<u64>,
        changes: bool,
    ) -> Option<ShortTurn<'_>> {
        let mut line = self.line();
        let number = line.next;
        let (own, others) = line.sides(changes);
        // A walk goes over the places that are free as well, of which there may be many.
        if !others.is_empty() && others.iter().any(|(_, place)| place.overlaps(&bytes)) {
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

    /// Removes a place, and lets those go on for which it was the last in the way.
    fn leave(&self, key: usize, changes: bool) {
        let mut line = self.line();
        let (own, others) = line.sides(changes);
        let gone = own.remove(key);
        if others.is_empty() {
            return;
        }
        for (_, place) in others.iter_mut() {
            if place.number < gone.number || !place.overlaps(&gone.bytes) {
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

    /// A panic elsewhere leaves no place half taken.
    fn line(&self) -> MutexGuard<'_, Line> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Turn {
    /// Returns whether the request may go on.
    pub(super) fn has_come(&self) -> bool {
        let is_over = |flag: &Arc<AtomicBool>| flag.load(Ordering::Acquire);
        self.is_over.as_ref().is_none_or(is_over)
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        self.turns.leave(self.key, self.changes);
    }
}

impl ShortTurn<'_> {
    /// Keeps the place for a request that does not end in this call.
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
        self.turns.leave(self.key, self.changes);
    }
}

impl Line {
    /// The places of requests of a kind, and those of the other kind.
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
    fn readers_and_writers_of_a_block_take_turns_in_the_order_of_their_arrival() {
        let turns = Arc::new(Turns::default());
        let waker = Waker::simulated();
        let join = |bytes, changes| turns.join(bytes, changes, || waker.clone());
        let first = join(0..1024, false);
        let beside = join(512..2048, false);
        let change = join(1000..1536, true);
        let elsewhere = join(2048..4096, true);
        let late = join(0..1001, false);
        assert!([&first, &beside, &elsewhere].iter().all(|t| t.has_come()));
        assert!(!change.has_come() && !late.has_come());
        drop(elsewhere);
        assert!(!waker.is_pending(), "no request waited for it");
        drop(first);
        assert!(!change.has_come(), "another one reads");
        assert!(!waker.is_pending(), "none can proceed yet");
        drop(beside);
        assert!(waker.is_pending() && change.has_come());
        assert!(!late.has_come(), "it is behind the change");
        drop(change);
        assert!(late.has_come());
    }

    #[test]
    fn changes_of_a_block_do_not_wait_for_each_other() {
        let turns = Arc::new(Turns::default());
        let join = |changes| turns.join(0..512, changes, Waker::simulated);
        let [first, second, third] = [(); 3].map(|()| join(true));
        assert!([&first, &second, &third].iter().all(|t| t.has_come()));
        let read = join(false);
        drop((first, third));
        assert!(!read.has_come());
        drop(second);
        assert!(read.has_come());
    }

    #[test]
    fn a_short_turn_is_a_place_as_any_other_or_none() {
        let turns = Arc::new(Turns::default());
        let waker = Waker::simulated();
        let join = |changes| turns.join(0..512, changes, || waker.clone());
        let read = turns.enter(0..512, false).unwrap();
        assert!(turns.enter(511..600, true).is_none(), "a read is under way");
        assert!(turns.enter(512..600, true).is_some(), "other bytes");
        let change = join(true);
        assert!(!change.has_come());
        assert!(turns.enter(0..1, false).is_none(), "behind the change");
        drop(read);
        assert!(change.has_come() && waker.is_pending());
        drop(change);
        // One that did not end in its call keeps its place.
        let kept = turns.enter(0..512, true).unwrap().into_turn();
        assert!(kept.has_come());
        let late = join(false);
        assert!(!late.has_come());
        drop(kept);
        assert!(late.has_come());
        drop(late);
        assert!(turns.line().reads.is_empty() && turns.line().changes.is_empty());
    }

    /// A request that is canceled while it waits releases only those behind it.
    #[test]
    fn a_place_may_be_left_before_its_turn() {
        let turns = Arc::new(Turns::default());
        let join = |changes| turns.join(0..512, changes, Waker::simulated);
        let (read, change, late) = (join(false), join(true), join(false));
        drop(change);
        assert!(late.has_come());
        let change = join(true);
        drop(read);
        assert!(!change.has_come());
        drop(late);
        assert!(change.has_come());
    }
}
