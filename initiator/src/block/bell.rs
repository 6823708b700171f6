//! The wake-up of a thread that serves clients by turns: [`Bell`].

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::task::Wake;

use rustix::event::{EventfdFlags, eventfd};

/// Notifies the thread of a [`Service`](super::Service) of what other threads, or tasks on its own,
/// have done for it. While it is awake that costs an atomic addition.
///
/// The thread reads [`Bell::events`], looks at all that it has, and passes the number that it read
/// to [`Bell::prepare_sleep`]: so nothing that happens in between is slept over.
#[derive(Debug)]
pub(crate) struct Bell {
    wake: OwnedFd,
    events: AtomicU64,
    /// The thread sleeps, or is about to.
    sleeps: AtomicBool,
}

impl Bell {
    pub(crate) fn new() -> io::Result<Self> {
        Ok(Self {
            wake: eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?,
            events: AtomicU64::new(0),
            sleeps: AtomicBool::new(false),
        })
    }

    /// Counts an event, and ends the thread's sleep.
    pub(crate) fn ring(&self) {
        self.events.fetch_add(1, Ordering::SeqCst);
        if self.sleeps.swap(false, Ordering::SeqCst) {
            // It can only fail when the counter is full, and then it is readable anyway.
            let _ = rustix::io::write(&self.wake, &1u64.to_ne_bytes());
        }
    }

    /// Counts an event that a thread need not be woken for.
    pub(crate) fn note(&self) {
        self.events.fetch_add(1, Ordering::SeqCst);
    }

    /// Number of events so far.
    pub(crate) fn events(&self) -> u64 {
        self.events.load(Ordering::SeqCst)
    }

    /// The thread is about to sleep; false if something has happened after the events that `seen`
    /// counts. From here on an event wakes the thread.
    pub(crate) fn prepare_sleep(&self, seen: u64) -> bool {
        self.sleeps.store(true, Ordering::SeqCst);
        self.events() == seen
    }

    /// The descriptor that wakes the thread.
    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        self.wake.as_fd()
    }

    /// The thread is awake.
    pub(crate) fn end_sleep(&self) {
        self.sleeps.store(false, Ordering::SeqCst);
        // In any case: the count of an earlier sleep may have come after its end.
        let mut count = [0; 8];
        let _ = rustix::io::read(&self.wake, &mut count);
    }
}

impl Wake for Bell {
    fn wake(self: std::sync::Arc<Self>) {
        self.ring();
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::poll_fds::{Waited, wait};

    #[test]
    fn a_count_that_comes_after_its_sleep_ends_one_sleep_at_most() {
        let bell = Bell::new().unwrap();
        assert!(bell.prepare_sleep(bell.events()));
        // Another thread has taken the mark, and is slow to write.
        bell.events.fetch_add(1, Ordering::SeqCst);
        assert!(bell.sleeps.swap(false, Ordering::SeqCst));
        bell.end_sleep();
        rustix::io::write(&bell.wake, &1u64.to_ne_bytes()).unwrap();
        for _ in 0..2 {
            assert!(bell.prepare_sleep(bell.events()));
            let short = Some(Duration::from_millis(1));
            wait([Waited::reading(bell.fd())], short);
            bell.end_sleep();
        }
        let mut count = [0; 8];
        let empty = rustix::io::read(&bell.wake, &mut count);
        assert_eq!(empty, Err(rustix::io::Errno::AGAIN));
    }

    #[test]
    fn what_happens_before_a_sleep_prevents_it_and_in_a_sleep_ends_it() {
        let bell = Bell::new().unwrap();
        let seen = bell.events();
        bell.note();
        assert!(!bell.prepare_sleep(seen));
        bell.end_sleep();
        assert!(bell.prepare_sleep(bell.events()));
        bell.ring();
        // Without a time: it ends because it was rung.
        wait([Waited::reading(bell.fd())], None);
        bell.end_sleep();
    }
}
