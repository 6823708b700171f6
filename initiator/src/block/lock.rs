//! Byte-range locks for requests in flight.
//!
//! A write of part of a block is a read, a change and a write of the whole block. Between its read
//! and its write no other request may write that block, or that write is lost. So every change of
//! the disk takes a lock on the blocks it touches: shared where it writes whole blocks
//! (overlapping writes have no order among them anyway), exclusive where it reads, changes and
//! writes.
//!
//! The queue holds one entry per request in flight; the server that accepts requests bounds it.
//! Order is first come, first served among conflicting requests, so none starves.

use std::future::Future;
use std::ops::Range;
use std::pin::Pin;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};

#[derive(Debug)]
struct Entry {
    id: u64,
    range: Range<u64>,
    exclusive: bool,
    granted: bool,
    waker: Option<Waker>,
}

impl Entry {
    fn conflicts(&self, other: &Entry) -> bool {
        (self.exclusive || other.exclusive)
            && self.range.start < other.range.end
            && other.range.start < self.range.end
    }
}

#[derive(Debug, Default)]
struct Queue {
    next_id: u64,
    // In order of arrival.
    entries: Vec<Entry>,
}

impl Queue {
    /// Grants every waiter that conflicts with no request before it, and returns whom to wake.
    fn grant(&mut self) -> Vec<Waker> {
        let mut wake = Vec::new();
        for i in 0..self.entries.len() {
            let (before, rest) = self.entries.split_at_mut(i);
            let entry = &mut rest[0];
            if !entry.granted && !before.iter().any(|e| e.conflicts(entry)) {
                entry.granted = true;
                wake.extend(entry.waker.take());
            }
        }
        wake
    }
}

/// The locks of one disk. See the module documentation.
#[derive(Debug, Default)]
pub struct RangeLocks(Mutex<Queue>);

impl RangeLocks {
    /// Lock of which no range is held.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Waits until the range can be held together with other shared holders.
    pub fn shared(&self, range: Range<u64>) -> impl Future<Output = RangeGuard<'_>> + Send {
        self.enter(range, false)
    }

    /// Waits until no other request holds any part of the range.
    pub fn exclusive(&self, range: Range<u64>) -> impl Future<Output = RangeGuard<'_>> + Send {
        self.enter(range, true)
    }

    fn enter(&self, range: Range<u64>, exclusive: bool) -> Waiting<'_> {
        let mut queue = self.lock();
        let id = queue.next_id;
        queue.next_id += 1;
        let mut entry = Entry {
            id,
            range,
            exclusive,
            granted: false,
            waker: None,
        };
        entry.granted = !queue.entries.iter().any(|e| e.conflicts(&entry));
        queue.entries.push(entry);
        Waiting {
            guard: Some(RangeGuard { locks: self, id }),
        }
    }

    fn lock(&self) -> MutexGuard<'_, Queue> {
        // Nothing in here panics half-way through a change.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

struct Waiting<'a> {
    // Its drop takes the entry out of the queue, whether granted or not.
    guard: Option<RangeGuard<'a>>,
}

impl<'a> Future for Waiting<'a> {
    type Output = RangeGuard<'a>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<RangeGuard<'a>> {
        let guard = self.guard.take().expect("polled after it was ready");
        {
            let mut queue = guard.locks.lock();
            let entry = queue
                .entries
                .iter_mut()
                .find(|e| e.id == guard.id)
                .expect("an entry stays until its guard is dropped");
            if !entry.granted {
                entry.waker = Some(cx.waker().clone());
                drop(queue);
                self.guard = Some(guard);
                return Poll::Pending;
            }
        }
        Poll::Ready(guard)
    }
}

/// A held range. Dropping it releases the range and wakes those who waited for it.
#[derive(Debug)]
pub struct RangeGuard<'a> {
    locks: &'a RangeLocks,
    id: u64,
}

impl Drop for RangeGuard<'_> {
    fn drop(&mut self) {
        let wake = {
            let mut queue = self.locks.lock();
            queue.entries.retain(|e| e.id != self.id);
            queue.grant()
        };
        // Outside the lock: a waker may run the request, which takes the lock.
        wake.into_iter().for_each(Waker::wake);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::pin::pin;

    fn poll_once<F: Future>(f: Pin<&mut F>) -> Poll<F::Output> {
        f.poll(&mut Context::from_waker(Waker::noop()))
    }

    #[test]
    fn shared_holders_overlap_and_an_exclusive_one_waits_for_all_of_them() {
        let locks = RangeLocks::new();
        let mut a = pin!(locks.shared(0..4096));
        let mut b = pin!(locks.shared(2048..8192));
        let mut c = pin!(locks.exclusive(0..512));
        let Poll::Ready(a) = poll_once(a.as_mut()) else {
            panic!("nobody holds it")
        };
        let Poll::Ready(b) = poll_once(b.as_mut()) else {
            panic!("shared")
        };
        assert!(poll_once(c.as_mut()).is_pending());
        drop(b);
        assert!(poll_once(c.as_mut()).is_pending());
        drop(a);
        assert!(poll_once(c.as_mut()).is_ready());
    }

    #[test]
    fn a_shared_request_does_not_overtake_an_exclusive_waiter() {
        let locks = RangeLocks::new();
        let mut a = pin!(locks.shared(0..512));
        let a = match poll_once(a.as_mut()) {
            Poll::Ready(a) => a,
            Poll::Pending => panic!("free"),
        };
        let mut exclusive = pin!(locks.exclusive(0..512));
        assert!(poll_once(exclusive.as_mut()).is_pending());
        let mut late = pin!(locks.shared(0..512));
        assert!(poll_once(late.as_mut()).is_pending());
        drop(a);
        assert!(poll_once(late.as_mut()).is_pending());
        assert!(poll_once(exclusive.as_mut()).is_ready());
        // The guard went with the result, so the late one is next.
        assert!(poll_once(late.as_mut()).is_ready());
    }

    #[test]
    fn distant_ranges_do_not_meet() {
        let locks = RangeLocks::new();
        let mut a = pin!(locks.exclusive(0..512));
        let _a = poll_once(a.as_mut());
        let mut b = pin!(locks.exclusive(512..1024));
        assert!(poll_once(b.as_mut()).is_ready());
    }

    #[test]
    fn giving_up_waiting_leaves_no_trace() {
        let locks = RangeLocks::new();
        let mut a = pin!(locks.exclusive(0..512));
        let Poll::Ready(a) = poll_once(a.as_mut()) else {
            panic!("free")
        };
        drop(locks.exclusive(0..512));
        let mut c = pin!(locks.exclusive(0..512));
        drop(a);
        assert!(poll_once(c.as_mut()).is_ready());
        assert!(locks.lock().entries.is_empty());
    }
}
