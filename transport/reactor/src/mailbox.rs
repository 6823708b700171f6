//! A bounded queue of messages into a worker.

use riser_sync::mpsc::{Receiver, SyncSender, TrySendError, sync_channel};

use crate::waker::Waker;

/// Makes a queue that holds at most `capacity` messages for the owner of the ring that `waker`
/// belongs to. The bound keeps a stalled worker from collecting memory; senders see it as
/// [`SendError::Full`].
///
/// # Panics
/// If `capacity` is zero: a rendezvous would need the worker to block.
#[must_use]
pub fn mailbox<T>(capacity: usize, waker: Waker) -> (MailSender<T>, MailReceiver<T>) {
    assert!(capacity > 0, "a mailbox holds at least one message");
    let (tx, rx) = sync_channel(capacity);
    (MailSender { tx, waker }, MailReceiver { rx })
}

/// The sending end; clones share the queue and its bound.
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
    /// Gives the message back where the queue is full or the worker is gone.
    pub fn send(&self, message: T) -> Result<(), SendError<T>> {
        // `try_send`: a worker that waited for another one's room could wait for one that waits
        // for it.
        self.tx.try_send(message).map_err(|e| match e {
            TrySendError::Full(m) => SendError::Full(m),
            TrySendError::Disconnected(m) => SendError::Closed(m),
        })?;
        // After the message is in the queue, or the worker might look before it.
        self.waker.wake();
        Ok(())
    }

    /// Queues a message, waiting for room; for threads that may block, never for workers.
    ///
    /// # Errors
    /// Gives the message back where the worker is gone.
    pub fn send_blocking(&self, message: T) -> Result<(), SendError<T>> {
        self.tx.send(message).map_err(|e| SendError::Closed(e.0))?;
        self.waker.wake();
        Ok(())
    }
}

/// A message that could not be queued.
#[derive(Debug, thiserror::Error)]
pub enum SendError<T> {
    /// The queue is at its bound.
    #[error("the worker's mailbox is full")]
    Full(T),
    /// The receiving end is gone.
    #[error("the worker is gone")]
    Closed(T),
}

/// Receiving end of a mailbox, which the worker has.
#[derive(Debug)]
pub struct MailReceiver<T> {
    rx: Receiver<T>,
}

impl<T> MailReceiver<T> {
    /// The next message, if there is one. Never blocks.
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

    /// Waits for a wake as a ring does: its read of the counter ends, then it has seen the wake.
    fn park(waker: &Waker) {
        let counter = waker.counter().and_then(Handle::fd).unwrap();
        let deadline = Instant::now() + Duration::from_secs(10);
        // It must not block: the threads of a checker are one thread. In Miri, which does not know
        // the call, they are not.
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
    fn interleavings_of_senders_lose_no_message_and_no_wake() {
        const EACH: u32 = 3;
        explore(|| {
            let waker = Waker::new().unwrap();
            // Of fewer messages than are sent.
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
    fn interleavings_of_workers_that_never_wait_lose_nothing_unnoticed() {
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
