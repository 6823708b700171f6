//! A bounded queue of messages into a worker.

use std::sync::mpsc::{Receiver, SyncSender, TrySendError, sync_channel};

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
