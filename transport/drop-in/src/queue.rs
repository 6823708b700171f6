//! Queues of events with a descriptor.

use std::collections::VecDeque;
use std::ffi::c_int;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

use rustix::event::{EventfdFlags, eventfd};

use crate::errno::Errno;

/// A queue of events whose descriptor is readable while there is one: an eventfd that counts them.
/// Programs wait for it with `poll`, and make it non-blocking with `fcntl`.
pub(crate) struct EventQueue<T> {
    fd: OwnedFd,
    events: Mutex<VecDeque<T>>,
}

impl<T> EventQueue<T> {
    pub(crate) fn new() -> Result<Self, Errno> {
        let fd = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::SEMAPHORE)?;
        Ok(Self {
            fd,
            events: Mutex::new(VecDeque::new()),
        })
    }

    pub(crate) fn raw_fd(&self) -> c_int {
        self.fd.as_raw_fd()
    }

    pub(crate) fn push(&self, event: T) {
        self.lock().push_back(event);
        // It fails only at the largest count, which nobody reaches.
        let _ = rustix::io::write(&self.fd, &1u64.to_ne_bytes());
    }

    /// The next event. Waits for it unless the descriptor is non-blocking.
    ///
    /// # Errors
    /// `EAGAIN` where it would have to wait, `EINTR` for a signal.
    pub(crate) fn take(&self) -> Result<T, Errno> {
        loop {
            rustix::io::read(&self.fd, &mut [0; 8])?;
            // Another thread may have taken the event back.
            if let Some(event) = self.lock().pop_front() {
                return Ok(event);
            }
        }
    }

    /// Takes back the events for which `is_gone` says so, oldest first.
    pub(crate) fn retract(&self, mut is_gone: impl FnMut(&T) -> bool) -> Vec<T> {
        let mut events = self.lock();
        let (gone, rest): (VecDeque<T>, _) = events.drain(..).partition(|event| is_gone(event));
        *events = rest;
        drop(events);
        for _ in &gone {
            // Never waits, whatever the program has made of the descriptor: a thread in `take` may
            // have the count already.
            let mut byte = [0; 8];
            let mut pieces = [std::io::IoSliceMut::new(&mut byte)];
            let _ = rustix::io::preadv2(
                &self.fd,
                &mut pieces,
                u64::MAX,
                rustix::io::ReadWriteFlags::NOWAIT,
            );
        }
        gone.into()
    }

    fn lock(&self) -> MutexGuard<'_, VecDeque<T>> {
        self.events.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Events of an object that the program has been given and has not acknowledged. An object is
/// destroyed only once there are none.
#[derive(Default)]
pub(crate) struct Unacknowledged {
    count: Mutex<u32>,
    none: Condvar,
}

impl Unacknowledged {
    pub(crate) fn add(&self) {
        *self.count.lock().unwrap_or_else(PoisonError::into_inner) += 1;
    }

    pub(crate) fn acknowledge(&self, n: u32) {
        let mut count = self.count.lock().unwrap_or_else(PoisonError::into_inner);
        // A program that acknowledges more than it was given is wrong, and harms itself only.
        *count = count.saturating_sub(n);
        if *count == 0 {
            self.none.notify_all();
        }
    }

    /// Waits until every event has been acknowledged.
    pub(crate) fn wait(&self) {
        let count = self.count.lock().unwrap_or_else(PoisonError::into_inner);
        drop(self.none.wait_while(count, |n| *n > 0));
    }
}
