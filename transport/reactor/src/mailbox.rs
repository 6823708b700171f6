//! A bounded queue of messages to a worker.

use riser_sync::mpsc::{Receiver, SyncSender, TrySendError, sync_channel};

use crate::waker::Waker;

/// Creates a queue of at most `capacity` messages to the owner of the ring that `waker` belongs to.
/// The bound prevents a stalled worker from accumulating memory. Senders get [`SendError::Full`] if
/// it is exceeded.
///
/// # Panics
/// Panics if `capacity` is zero, because a rendezvous channel would require the worker to block.
#[must_use]
pub fn mailbox<T>(capacity: usize, waker: Waker) -> (MailSender<T>, MailReceiver<T>) {
    assert!(capacity > 0, "a mailbox holds at least one message");
    let (tx, rx) = sync_channel(capacity);
    (MailSender { tx, waker }, MailReceiver { rx })
}

/// The sending half of a mailbox. Clones share the queue and its bound.
#[derive(Debug)]
pub struct MailSender<T> {
    tx: SyncSender<T>,
    waker: Waker,
}

impl<T> Clone for MailSender<T> {
    fn clone(&self) -> Self {
        Self {
            tx: self.tx.clone(),
            waker: self.waker.clone(),
        }
    }
}

impl<T> MailSender<T> {
    /// Queues a message and wakes the worker. Never blocks.
    ///
    /// # Errors
    /// Returns the message if the queue is full or the worker has exited.
    pub fn send(&self, message: T) -> Result<(), SendError<T>> {
        // We use `try_send` because two workers that wait for room in each other's queues would
        // deadlock.
        self.tx.try_send(message).map_err(|e| match e {
            TrySendError::Full(m) => SendError::Full(m),
            TrySendError::Disconnected(m) => SendError::Closed(m),
        })?;
        // This must follow the send, because otherwise the worker might check the queue too early.
        self.waker.wake();
        Ok(())
    }

    /// Queues a message, waiting for room. For threads that may block, never for workers.
    ///
    /// # Errors
    /// Returns the message if the worker has exited.
    pub fn send_blocking(&self, message: T) -> Result<(), SendError<T>> {
        self.tx.send(message).map_err(|e| SendError::Closed(e.0))?;
        self.waker.wake();
        Ok(())
    }
}

/// A message that could not be queued.
#[derive(Debug, thiserror::Error)]
pub enum SendError<T> {
    /// The queue is full.
    #[error("the worker's mailbox is full")]
    Full(T),
    /// The receiving half was dropped.
    #[error("the worker has exited")]
    Closed(T),
}

/// The receiving half of a mailbox, owned by the worker.
#[derive(Debug)]
pub struct MailReceiver<T> {
    rx: Receiver<T>,
}

impl<T> MailReceiver<T> {
    /// Returns the next message, if any. Never blocks.
    pub fn poll_message(&mut self) -> Option<T> {
        self.rx.try_recv().ok()
    }
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use riser_sync::testing::explore;
    use riser_sync::thread;
    use rustix::event::{PollFd, PollFlags, Timespec, poll};

    use super::*;
    use crate::handle::Handle;

    /// Waits for a wake-up like a ring does: its read of the counter completes, then it
    /// acknowledges the wake-up.
    fn park(waker: &Waker) {
        let counter = waker.counter().and_then(Handle::fd).unwrap();
        let deadline = Instant::now() + Duration::from_secs(10);
        // We must not block here, because the checker runs all threads on a single thread. Miri
        // doesn't support `poll`, but has real threads.
        while !cfg!(miri)
            && poll(
                &mut [PollFd::new(&counter, PollFlags::IN)],
                Some(&Timespec::default()),
            ) == Ok(0)
        {
            assert!(Instant::now() < deadline, "a wake is lost");
            thread::yield_now();
        }
        rustix::io::read(counter, &mut [0; 8]).unwrap();
        waker.acknowledge();
    }

    #[test]
    fn interleavings_of_senders_lose_no_message() {
        const EACH: u32 = 3;
        explore(|| {
            let waker = Waker::new().unwrap();
            // The capacity is smaller than the number of messages.
            let (sender, mut receiver) = mailbox(2, waker.clone());
            let senders = [0, 1].map(|who| {
                let sender = sender.clone();
                thread::spawn(move || {
                    (0..EACH).for_each(|n| sender.send_blocking((who, n)).unwrap());
                })
            });
            let mut next = [0; 2];
            while next != [EACH; 2] {
                match receiver.poll_message() {
                    Some((who, n)) => {
                        assert_eq!(n, next[who], "a sender's messages are in order");
                        next[who] += 1;
                    }
                    None => park(&waker),
                }
            }
            senders.into_iter().for_each(|one| one.join().unwrap());
            assert_eq!(receiver.poll_message(), None);
        });
    }

    #[test]
    fn interleavings_of_try_send_lose_no_message() {
        explore(|| {
            let (sender, mut receiver) = mailbox(1, Waker::simulated());
            let senders = [1, 2].map(|message| {
                let sender = sender.clone();
                thread::spawn(move || match sender.send(message) {
                    Ok(()) => message,
                    Err(SendError::Full(back)) => {
                        assert_eq!(back, message);
                        0
                    }
                    Err(SendError::Closed(_)) => panic!("the worker is there"),
                })
            });
            let early = receiver.poll_message().unwrap_or(0);
            let sent: i32 = senders.into_iter().map(|one| one.join().unwrap()).sum();
            let late = std::iter::from_fn(|| receiver.poll_message()).sum::<i32>();
            assert_eq!(early + late, sent);
            drop(receiver);
            assert!(matches!(sender.send(3), Err(SendError::Closed(3))));
        });
    }
}
