//! Waiting with a timeout on the engine's clock, independent of the executor.

use std::cmp::Ordering;
use std::collections::BinaryHeap;
use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Instant;

use riser_block::oneshot::{Receiver, Sender};

/// The timeout expired.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("timed out")]
pub struct Elapsed;

/// Future with a timeout. See [`Client::timeout`](super::Client::timeout).
#[must_use = "futures do nothing unless polled"]
pub struct Timeout<F> {
    future: Pin<Box<F>>,
    timer: Receiver<()>,
}

impl<F> std::fmt::Debug for Timeout<F> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Timeout").finish_non_exhaustive()
    }
}

impl<F> Timeout<F> {
    pub(super) fn new(future: F, timer: Receiver<()>) -> Self {
        Self {
            future: Box::pin(future),
            timer,
        }
    }
}

impl<F: Future> Future for Timeout<F> {
    type Output = Result<F::Output, Elapsed>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        if let Poll::Ready(output) = self.future.as_mut().poll(cx) {
            return Poll::Ready(Ok(output));
        }
        // If the engine has terminated, the timeout expires immediately.
        Pin::new(&mut self.timer).poll(cx).map(|_| Err(Elapsed))
    }
}

struct Entry {
    at: Instant,
    sender: Sender<()>,
}

impl PartialEq for Entry {
    fn eq(&self, other: &Self) -> bool {
        self.at == other.at
    }
}

impl Eq for Entry {}

impl PartialOrd for Entry {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Entry {
    /// Reverses the order, so that the heap returns the earliest entry first.
    fn cmp(&self, other: &Self) -> Ordering {
        other.at.cmp(&self.at)
    }
}

/// Timers of the engine, earliest first. An abandoned timer stays until it expires.
#[derive(Default)]
pub(super) struct Timers(BinaryHeap<Entry>);

impl Timers {
    pub(super) fn insert(&mut self, at: Instant, sender: Sender<()>) {
        self.0.push(Entry { at, sender });
    }

    /// Returns the time of the next expiry.
    pub(super) fn deadline(&self) -> Option<Instant> {
        self.0.peek().map(|entry| entry.at)
    }

    /// Fires the expired timers.
    pub(super) fn fire(&mut self, now: Instant) {
        while self.deadline().is_some_and(|at| at <= now) {
            let entry = self.0.pop().expect("peeked");
            entry.sender.send(());
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use riser_block::oneshot::oneshot;
    use riser_block::task::block_on;

    use super::*;

    #[test]
    fn timers_fire_in_deadline_order() {
        let now = Instant::now();
        let mut timers = Timers::default();
        let mut waiting = Vec::new();
        for ms in [30u64, 10, 20] {
            let (sender, receiver) = oneshot();
            timers.insert(now + Duration::from_millis(ms), sender);
            waiting.push(receiver);
        }
        assert_eq!(timers.deadline(), Some(now + Duration::from_millis(10)));
        timers.fire(now + Duration::from_millis(20));
        assert_eq!(timers.deadline(), Some(now + Duration::from_millis(30)));
        assert_eq!(block_on(waiting.remove(1)), Some(()));
        assert_eq!(block_on(waiting.remove(1)), Some(()));
    }

    #[test]
    fn wait_returns_value_or_timeout() {
        let (sender, receiver) = oneshot();
        let wait = Timeout::new(std::future::ready(5), receiver);
        assert_eq!(block_on(wait), Ok(5));
        drop(sender);
        let (sender, receiver) = oneshot();
        let wait = Timeout::new(std::future::pending::<u8>(), receiver);
        sender.send(());
        assert_eq!(block_on(wait), Err(Elapsed));
    }
}
