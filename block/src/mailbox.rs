//! Parking of a device thread, and its wake-up by other threads: [`Mailbox`].

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use rustix::event::{EventfdFlags, eventfd};

use crate::poll_fds::{PollInterest, wait};

/// Maximum sleep. A wake-up per hour is cheap and avoids large sums of times.
const LONGEST: Duration = Duration::from_secs(3600);

/// Mailbox for a thread that parks in [`Mailbox::park`].
///
/// Not bounded: each message corresponds to a resource held by its sender (a request with its
/// buffer, or a session), so the senders limit the number of messages.
#[derive(Debug)]
pub struct Mailbox<T> {
    inner: Mutex<Inner<T>>,
    /// The thread is sleeping, or about to sleep.
    parked: AtomicBool,
    bell: OwnedFd,
}

#[derive(Debug)]
struct Inner<T> {
    messages: Vec<T>,
    closed: bool,
}

impl<T> Mailbox<T> {
    /// Creates an empty mailbox.
    ///
    /// # Errors
    /// Returns the error of `eventfd(2)`.
    pub fn new() -> io::Result<Self> {
        let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
        Ok(Self {
            inner: Mutex::new(Inner {
                messages: Vec::new(),
                closed: false,
            }),
            parked: AtomicBool::new(false),
            bell: eventfd(0, flags)?,
        })
    }

    fn inner(&self) -> MutexGuard<'_, Inner<T>> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds a message and wakes the thread if it is parked.
    ///
    /// # Errors
    /// Returns the message if the mailbox is closed.
    pub fn send(&self, message: T) -> Result<(), T> {
        {
            let mut inner = self.inner();
            if inner.closed {
                return Err(message);
            }
            inner.messages.push(message);
        }
        if self.parked.swap(false, Ordering::SeqCst) {
            // The counter is far below its limit, so this could fail only with an invalid
            // descriptor.
            let _ = rustix::io::write(&self.bell, &1u64.to_ne_bytes());
        }
        Ok(())
    }

    /// Swaps the received messages into `out`, which must be empty.
    pub fn receive(&self, out: &mut Vec<T>) {
        debug_assert!(out.is_empty());
        std::mem::swap(&mut self.inner().messages, out);
    }

    /// Closes the mailbox for further messages, and returns the remaining ones.
    pub fn close(&self) -> Vec<T> {
        let mut inner = self.inner();
        inner.closed = true;
        std::mem::take(&mut inner.messages)
    }

    /// Sleeps until a message arrives, a descriptor is ready, or the timeout expires. Spurious
    /// wake-ups are possible.
    pub fn park(&self, fds: &[PollInterest<'_>], timeout: Option<Duration>) {
        self.parked.store(true, Ordering::SeqCst);
        if !self.inner().messages.is_empty() {
            self.parked.store(false, Ordering::SeqCst);
            return;
        }
        let bell = std::iter::once(PollInterest::reading(self.bell.as_fd()));
        let all = bell.chain(fds.iter().copied());
        wait(all, timeout.map(|t| t.min(LONGEST)));
        self.parked.store(false, Ordering::SeqCst);
        let mut count = [0; 8];
        let _ = rustix::io::read(&self.bell, &mut count);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::time::Instant;

    use super::*;

    /// Time limit for an expected message.
    const PATIENCE: Duration = Duration::from_secs(60);

    #[test]
    fn message_wakes_parked_thread() {
        let mailbox = Arc::new(Mailbox::new().unwrap());
        let sender = mailbox.clone();
        let thread = std::thread::spawn(move || {
            for i in 0..1000 {
                sender.send(i).unwrap();
                if i % 100 == 0 {
                    std::thread::yield_now();
                }
            }
        });
        let (mut got, mut batch) = (Vec::new(), Vec::new());
        while got.len() < 1000 {
            let begin = Instant::now();
            mailbox.park(&[], Some(PATIENCE));
            assert!(begin.elapsed() < PATIENCE, "no message has ended the park");
            mailbox.receive(&mut batch);
            got.append(&mut batch);
        }
        thread.join().unwrap();
        assert!(got.iter().copied().eq(0..1000));
        mailbox.park(&[], Some(Duration::from_millis(1)));
        assert!(mailbox.close().is_empty());
        assert_eq!(mailbox.send(5), Err(5));
    }
}
