//! Sends a single value from a device thread to a future on any executor.

use std::future::Future;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};

#[derive(Debug)]
struct State<T> {
    value: Option<T>,
    waker: Option<Waker>,
    /// The sender was dropped.
    closed: bool,
}

#[derive(Debug)]
struct Shared<T>(Mutex<State<T>>);

impl<T> Shared<T> {
    fn state(&self) -> MutexGuard<'_, State<T>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Sends the value. If it is dropped without sending, the receiver returns `None`.
#[derive(Debug)]
pub struct Sender<T>(Arc<Shared<T>>);

/// Waits for the value; returns `None` if the sender was dropped.
#[derive(Debug)]
#[must_use = "futures do nothing unless polled"]
pub struct Receiver<T>(Arc<Shared<T>>);

/// Creates a connected pair.
pub fn oneshot<T>() -> (Sender<T>, Receiver<T>) {
    let shared = Arc::new(Shared(Mutex::new(State {
        value: None,
        waker: None,
        closed: false,
    })));
    (Sender(shared.clone()), Receiver(shared))
}

impl<T> Sender<T> {
    /// Sends the value. If the receiver was dropped, the value is dropped with the pair.
    pub fn send(self, value: T) {
        self.0.state().value = Some(value);
        // Dropping `self` closes the pair and wakes the receiver.
    }
}

impl<T> Drop for Sender<T> {
    fn drop(&mut self) {
        let waker = {
            let mut state = self.0.state();
            state.closed = true;
            state.waker.take()
        };
        // Call this without holding the lock, because waking may run the receiver immediately.
        if let Some(waker) = waker {
            waker.wake();
        }
    }
}

impl<T> Future for Receiver<T> {
    type Output = Option<T>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<T>> {
        let mut state = self.0.state();
        if let Some(value) = state.value.take() {
            return Poll::Ready(Some(value));
        }
        if state.closed {
            return Poll::Ready(None);
        }
        state.waker = Some(cx.waker().clone());
        Poll::Pending
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::task::block_on;

    #[test]
    fn value_is_sent_across_threads() {
        let (tx, rx) = oneshot();
        let thread = std::thread::spawn(move || tx.send(7));
        assert_eq!(block_on(rx), Some(7));
        thread.join().unwrap();
    }

    #[test]
    fn dropped_sender_closes_channel() {
        let (tx, rx) = oneshot::<u8>();
        drop(tx);
        assert_eq!(block_on(rx), None);
    }

    #[test]
    fn dropped_receiver_discards_value() {
        let (tx, rx) = oneshot();
        drop(rx);
        tx.send(String::from("dropped"));
    }
}
