//! Wakes up a thread that serves clients: [`Bell`].

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::task::Wake;

use rustix::event::{EventfdFlags, eventfd};

/// Notifies the thread of a [`Service`](riser_block::Service) about changes made by other threads, or by
/// tasks on the same thread. If the thread is awake, this is just an atomic addition.
///
/// To make sure that we don't miss any event, the thread must read [`Bell::events`], then check for
/// work, and then pass the event count to [`Bell::prepare_sleep`].
#[derive(Debug)]
pub(crate) struct Bell {
    wake: OwnedFd,
    events: AtomicU64,
    /// Set if the thread is asleep, or about to sleep.
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

    /// Adds an event and wakes the thread.
    pub(crate) fn ring(&self) {
        self.events.fetch_add(1, Ordering::SeqCst);
        if self.sleeps.swap(false, Ordering::SeqCst) {
            // This can only fail if the counter is full, and then it is already readable.
            let _ = rustix::io::write(&self.wake, &1u64.to_ne_bytes());
        }
    }

    /// Adds an event, but doesn't wake the thread if it is asleep.
    pub(crate) fn note(&self) {
        self.events.fetch_add(1, Ordering::SeqCst);
    }

    /// Number of events so far.
    pub(crate) fn events(&self) -> u64 {
        self.events.load(Ordering::SeqCst)
    }

    /// Must be called before the thread goes to sleep. Returns false if there were new events since
    /// `seen` was read. After this, an event will wake the thread.
    pub(crate) fn prepare_sleep(&self, seen: u64) -> bool {
        self.sleeps.store(true, Ordering::SeqCst);
        self.events() == seen
    }

    /// File descriptor used to wake the thread.
    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        self.wake.as_fd()
    }

    /// Must be called when the thread is awake again.
    pub(crate) fn end_sleep(&self) {
        self.sleeps.store(false, Ordering::SeqCst);
        // We always need to read the counter, because it may still be set from a previous sleep.
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

    use riser_block::poll_fds::{PollInterest, wait};

    use super::*;

    #[test]
    fn late_wakeup_ends_single_sleep() {
        let bell = Bell::new().unwrap();
        assert!(bell.prepare_sleep(bell.events()));
        // Another thread has cleared the flag, but hasn't written to the descriptor yet.
        bell.events.fetch_add(1, Ordering::SeqCst);
        assert!(bell.sleeps.swap(false, Ordering::SeqCst));
        bell.end_sleep();
        rustix::io::write(&bell.wake, &1u64.to_ne_bytes()).unwrap();
        for _ in 0..2 {
            assert!(bell.prepare_sleep(bell.events()));
            let short = Some(Duration::from_millis(1));
            wait([PollInterest::reading(bell.fd())], short);
            bell.end_sleep();
        }
        let mut count = [0; 8];
        let empty = rustix::io::read(&bell.wake, &mut count);
        assert_eq!(empty, Err(rustix::io::Errno::AGAIN));
    }

    #[test]
    fn events_prevent_or_end_sleep() {
        let bell = Bell::new().unwrap();
        let seen = bell.events();
        bell.note();
        assert!(!bell.prepare_sleep(seen));
        bell.end_sleep();
        assert!(bell.prepare_sleep(bell.events()));
        bell.ring();
        // There is no timeout, so this will only return if the bell was rung.
        wait([PollInterest::reading(bell.fd())], None);
        bell.end_sleep();
    }
}
