//! Event queues with a descriptor.

use std::collections::{BTreeSet, VecDeque};
use std::ffi::c_int;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::{Condvar, Mutex, MutexGuard};

use rustix::event::{EventfdFlags, eventfd};

use crate::errno::Errno;
use crate::lock::{Shielded, shielded, unpoisoned};

/// The descriptors of all queues. They are replaced in the child after a `fork`.
pub(crate) static DESCRIPTORS: Mutex<BTreeSet<c_int>> = Mutex::new(BTreeSet::new());

/// Creates a descriptor for an empty queue.
pub(crate) fn descriptor() -> Result<OwnedFd, Errno> {
    Ok(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::SEMAPHORE)?)
}

/// An event queue. Its descriptor is readable while there are events: it is an eventfd that counts
/// them. Programs can wait for it using `poll`, and make it non-blocking using `fcntl`.
pub(crate) struct EventQueue<T> {
    number: c_int,
    waiting: Mutex<Waiting<T>>,
}

struct Waiting<T> {
    /// `None` after the queue was closed.
    fd: Option<OwnedFd>,
    events: VecDeque<T>,
}

impl<T> EventQueue<T> {
    pub(crate) fn new() -> Result<Self, Errno> {
        let fd = descriptor()?;
        let number = fd.as_raw_fd();
        descriptors().insert(number);
        let waiting = Waiting {
            fd: Some(fd),
            events: VecDeque::new(),
        };
        Ok(Self {
            number,
            waiting: Mutex::new(waiting),
        })
    }

    pub(crate) fn raw_fd(&self) -> c_int {
        self.number
    }

    /// Closes the descriptor. New events can still be added, but can only be retracted.
    pub(crate) fn close(&self) {
        let mut waiting = self.lock();
        if let Some(fd) = waiting.fd.take() {
            descriptors().remove(&self.number);
            drop(fd);
        }
    }

    pub(crate) fn push(&self, event: T) {
        self.add(|events| events.push_back(event));
    }

    /// Puts an event that was removed back to the front of the queue.
    pub(crate) fn put_back(&self, event: T) {
        self.add(|events| events.push_front(event));
    }

    fn add(&self, put: impl FnOnce(&mut VecDeque<T>)) {
        let mut waiting = self.lock();
        put(&mut waiting.events);
        if let Some(fd) = &waiting.fd {
            // This only fails for the maximum count, which is never reached.
            let _ = rustix::io::write(fd, &1u64.to_ne_bytes());
        }
    }

    /// Returns the next event, for a thread that has read its count from the descriptor
    /// ([`read_count`](crate::cancel::read_count)). `account` is called before another thread can
    /// retract events of the same object. Returns `None` if the event was retracted. In this case,
    /// the thread must read the next count.
    pub(crate) fn pop(&self, account: impl Fn(&T)) -> Option<T> {
        let mut waiting = self.lock();
        let event = waiting.events.pop_front()?;
        account(&event);
        Some(event)
    }

    /// Waits for the next event.
    #[cfg(test)]
    pub(crate) fn pop_event(&self, account: impl Fn(&T)) -> Result<T, Errno> {
        loop {
            // SAFETY: the descriptor is open, and tests do not cancel their threads.
            match unsafe { crate::cancel::read_count(self.number) } {
                0 => {}
                error => return Err(Errno(error)),
            }
            if let Some(event) = self.pop(&account) {
                return Ok(event);
            }
        }
    }

    /// Removes all events for which `is_gone` returns true, and returns them, oldest first.
    pub(crate) fn retract(&self, mut is_gone: impl FnMut(&T) -> bool) -> Vec<T> {
        let mut waiting = self.lock();
        let (gone, rest): (VecDeque<T>, _) =
            waiting.events.drain(..).partition(|event| is_gone(event));
        waiting.events = rest;
        for fd in waiting.fd.iter().cycle().take(gone.len()) {
            // This never blocks, regardless of the mode of the descriptor, because a thread in
            // `pop_event` may already have read the count.
            let mut byte = [0; 8];
            let mut pieces = [std::io::IoSliceMut::new(&mut byte)];
            let _ = rustix::io::preadv2(
                fd,
                &mut pieces,
                u64::MAX,
                rustix::io::ReadWriteFlags::NOWAIT,
            );
        }
        gone.into()
    }

    fn lock(&self) -> Shielded<'_, Waiting<T>> {
        shielded(&self.waiting)
    }
}

impl<T> Drop for EventQueue<T> {
    fn drop(&mut self) {
        self.close();
    }
}

fn descriptors() -> MutexGuard<'static, BTreeSet<c_int>> {
    unpoisoned(DESCRIPTORS.lock())
}

/// Number of events of an object that were returned to the program, but not acknowledged yet. An
/// object can only be destroyed if all events are acknowledged.
#[derive(Default)]
pub(crate) struct Unacknowledged {
    count: Mutex<u32>,
    none: Condvar,
}

impl Unacknowledged {
    pub(crate) fn add(&self) {
        *shielded(&self.count) += 1;
    }

    pub(crate) fn acknowledge(&self, n: u32) {
        let mut count = shielded(&self.count);
        // If a program acknowledges more events than were returned, this is a bug that only affects
        // the program itself.
        *count = count.saturating_sub(n);
        if *count == 0 {
            self.none.notify_all();
        }
    }

    /// Waits until all events are acknowledged.
    pub(crate) fn wait(&self) {
        if *shielded(&self.count) == 0 {
            return;
        }
        // We don't use a shield here, because the thread sleeps.
        let count = unpoisoned(self.count.lock());
        drop(self.none.wait_while(count, |n| *n > 0));
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::thread;
    use std::time::Duration;

    use super::*;

    #[test]
    fn put_back_event_is_returned_next() {
        let queue = EventQueue::new().unwrap();
        queue.push(1);
        queue.push(2);
        let first = queue.pop_event(|_| {}).unwrap();
        queue.put_back(first);
        let all = [queue.pop_event(|_| {}), queue.pop_event(|_| {})];
        assert_eq!(all, [Ok(1), Ok(2)]);
    }

    #[test]
    fn event_is_counted_before_retraction() {
        let queue = EventQueue::new().unwrap();
        queue.push(1);
        queue.push(2);
        let is_back = AtomicBool::new(false);
        thread::scope(|scope| {
            let taken = queue.pop_event(|_| {
                scope.spawn(|| {
                    assert_eq!(queue.retract(|_| true), [2]);
                    is_back.store(true, Ordering::Relaxed);
                });
                thread::sleep(Duration::from_millis(50));
                assert!(!is_back.load(Ordering::Relaxed));
            });
            assert_eq!(taken, Ok(1));
        });
        queue.push(3);
        queue.close();
        assert_eq!(queue.retract(|_| true), [3]);
    }
}
