//! Turns: a read and a change of the same bytes take place one after the other.
//!
//! The page cache copies what is read while others copy what is written there: of all file systems
//! only some keep the two apart. A reader could get a block of which a part is old and the rest is
//! new. No disk does that, and hosts that share one rely on it: leases and heartbeats of clusters
//! are blocks that one host writes while others read them. So a request waits for older ones of
//! the same bytes, where one of the two changes them. Changes do not wait for each other: writers of
//! a file exclude one another in the kernel.
//!
//! With direct I/O it is the disk that does not divide its blocks, and memory has locks of its own
//! (`ram`). There, no request needs a turn.

use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use riser_reactor::Waker;

/// The requests of a store's workers that read or change its medium, in the order of their arrival.
#[derive(Debug, Default)]
pub(super) struct Turns(Mutex<Line>);

#[derive(Debug, Default)]
struct Line {
    next: u64,
    /// Oldest first. At most the workers' requests.
    places: Vec<Place>,
}

#[derive(Debug)]
struct Place {
    number: u64,
    bytes: Range<u64>,
    changes: bool,
    /// Of its worker, where it waits.
    waker: Option<Waker>,
}

impl Place {
    fn excludes(&self, other: &Self) -> bool {
        self.changes != other.changes
            && self.bytes.start < other.bytes.end
            && other.bytes.start < self.bytes.end
    }
}

/// A request's place in the line, which it leaves with this.
#[derive(Debug)]
pub(super) struct Turn {
    turns: Arc<Turns>,
    number: u64,
}

impl Turns {
    /// Takes a place behind all others, for a request that reads these bytes or changes them.
    pub(super) fn join(self: &Arc<Self>, bytes: Range<u64>, changes: bool) -> Turn {
        let mut line = self.line();
        let number = line.next;
        line.next += 1;
        line.places.push(Place {
            number,
            bytes,
            changes,
            waker: None,
        });
        Turn {
            turns: self.clone(),
            number,
        }
    }

    /// A panic elsewhere leaves no place half taken.
    fn line(&self) -> MutexGuard<'_, Line> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Turn {
    /// Returns whether the request may go on. Otherwise its worker is woken when that may have
    /// changed.
    pub(super) fn has_come(&self, waker: impl FnOnce() -> Waker) -> bool {
        let mut line = self.turns.line();
        let at = line.place_of(self.number);
        let (older, rest) = line.places.split_at_mut(at);
        let is_free = !older.iter().any(|place| place.excludes(&rest[0]));
        if !is_free && rest[0].waker.is_none() {
            rest[0].waker = Some(waker());
        }
        is_free
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        let mut line = self.turns.line();
        let at = line.place_of(self.number);
        let gone = line.places.remove(at);
        for place in &line.places[at..] {
            if let Some(waker) = &place.waker
                && place.excludes(&gone)
            {
                waker.wake();
            }
        }
    }
}

impl Line {
    fn place_of(&self, number: u64) -> usize {
        let found = self.places.binary_search_by_key(&number, |p| p.number);
        found.expect("a place is left once")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn has_come(turn: &Turn, waker: &Waker) -> bool {
        turn.has_come(|| waker.clone())
    }

    #[test]
    fn readers_and_writers_of_a_block_take_turns_in_the_order_of_their_arrival() {
        let turns = Arc::new(Turns::default());
        let waker = Waker::simulated();
        let first = turns.join(0..1024, false);
        let beside = turns.join(512..2048, false);
        let change = turns.join(1000..1536, true);
        let elsewhere = turns.join(2048..4096, true);
        let late = turns.join(0..1001, false);
        assert!([&first, &beside, &elsewhere].map(|t| has_come(t, &waker)) == [true; 3]);
        assert!(!has_come(&change, &waker) && !has_come(&late, &waker));
        drop(elsewhere);
        assert!(!waker.is_pending(), "nobody has waited for it");
        drop(first);
        assert!(waker.is_pending());
        assert!(!has_come(&change, &waker), "another one reads");
        drop(beside);
        assert!(has_come(&change, &waker));
        assert!(!has_come(&late, &waker), "it is behind the change");
        drop(change);
        assert!(has_come(&late, &waker));
    }

    #[test]
    fn changes_of_a_block_do_not_wait_for_each_other() {
        let turns = Arc::new(Turns::default());
        let waker = Waker::simulated();
        let all = [(); 3].map(|()| turns.join(0..512, true));
        assert!(all.iter().all(|turn| has_come(turn, &waker)));
        let read = turns.join(0..512, false);
        let [first, second, third] = all;
        drop((first, third));
        assert!(!has_come(&read, &waker));
        drop(second);
        assert!(has_come(&read, &waker));
    }
}
