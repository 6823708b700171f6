//! Byte range locks for requests in flight.
//!
//! To write a partial block, we have to read the block, modify it, and write it back. If another
//! request writes to the same block between our read and our write, that data is lost. To avoid
//! this, all requests that change the disk must lock their blocks: shared if they only write whole
//! blocks (there is no guaranteed order for overlapping writes), and exclusive for
//! read-modify-write.
//!
//! The queue has an entry for each request in flight, so its size is limited by the server that
//! accepts these requests. Conflicting requests are processed first come, first served, to avoid
//! starvation.

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
    /// Grants all entries without a conflicting entry before them. Returns the wakers to call.
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

/// Locks for a disk, see the module documentation.
#[derive(Debug, Default)]
pub struct RangeLocks(Mutex<Queue>);

impl RangeLocks {
    /// Creates a lock with no ranges held.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Waits until this range is available for shared access.
    pub fn shared(&self, range: Range<u64>) -> impl Future<Output = RangeGuard<'_>> + Send {
        self.enqueue_range(range, false)
    }

    /// Waits until no other request holds a lock in this range.
    pub fn exclusive(&self, range: Range<u64>) -> impl Future<Output = RangeGuard<'_>> + Send {
        self.enqueue_range(range, true)
    }

    fn enqueue_range(&self, range: Range<u64>, exclusive: bool) -> Waiting<'_> {
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
        // There are no panics that could leave it in an invalid state.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

struct Waiting<'a> {
    // On drop, the entry is removed from the queue, granted or not.
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

/// Range lock. On drop, the range is released and waiting requests are woken.
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
        // Unlock first: a waker may run the request directly, and it will use the same lock.
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
    fn exclusive_lock_waits_for_all_shared() {
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
    fn shared_request_queues_behind_exclusive_waiter() {
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
        // The first guard was dropped together with the result, so `late` is next.
        assert!(poll_once(late.as_mut()).is_ready());
    }

    #[test]
    fn disjoint_ranges_do_not_conflict() {
        let locks = RangeLocks::new();
        let mut a = pin!(locks.exclusive(0..512));
        let _a = poll_once(a.as_mut());
        let mut b = pin!(locks.exclusive(512..1024));
        assert!(poll_once(b.as_mut()).is_ready());
    }

    #[test]
    fn dropped_wait_leaves_queue() {
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
