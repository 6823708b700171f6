//! How the connections of an export share the device's buffers.
//!
//! A reply holds its buffer until the client has taken it, so a client that does not read holds what
//! it was given for as long as it likes. A connection therefore gets more only as long as it would
//! hold no more than what stays free: one such client ends up with half of the buffers, two with a
//! third each, and there is always something left for another.

use std::future::poll_fn;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Poll, Waker};

use crate::block::BufferWaiters;

/// The buffers of a device, in bytes.
#[derive(Debug)]
pub(super) struct Budget {
    total: u64,
    used: Mutex<u64>,
    /// Bounded by the requests in flight and the connections.
    waiters: BufferWaiters,
}

impl Budget {
    pub(super) fn new(total: u64) -> Self {
        Self {
            total,
            used: Mutex::new(0),
            waiters: BufferWaiters::default(),
        }
    }

    fn used(&self) -> MutexGuard<'_, u64> {
        self.used.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// What one connection holds of a [`Budget`].
#[derive(Debug)]
pub(super) struct Account {
    budget: Arc<Budget>,
    /// Changes under the budget's lock.
    held: AtomicU64,
}

impl Account {
    pub(super) fn new(budget: Arc<Budget>) -> Self {
        Self {
            budget,
            held: AtomicU64::new(0),
        }
    }

    /// Whether `bytes` more leave at least as much free as this connection would hold. A device whose
    /// buffers nobody holds serves any request.
    fn may_take(&self, used: u64, bytes: u64) -> bool {
        let held = self.held.load(Ordering::Relaxed) + bytes;
        used == 0 || held + used + bytes <= self.budget.total
    }

    fn try_take(self: &Arc<Self>, bytes: u64) -> Option<Share> {
        let mut used = self.budget.used();
        if !self.may_take(*used, bytes) {
            return None;
        }
        *used += bytes;
        self.held.fetch_add(bytes, Ordering::Relaxed);
        Some(Share {
            account: self.clone(),
            bytes,
        })
    }

    /// Takes `bytes`, or has `waker` woken when there may be more.
    pub(super) fn take_or_wake(self: &Arc<Self>, bytes: u64, waker: &Waker) -> Option<Share> {
        self.try_take(bytes).or_else(|| {
            self.budget.waiters.register(waker);
            // Some may have come back before the waker was known.
            self.try_take(bytes)
        })
    }

    /// Waits for `bytes`.
    pub(super) async fn take(self: &Arc<Self>, bytes: u64) -> Share {
        poll_fn(|cx| {
            self.take_or_wake(bytes, cx.waker())
                .map_or(Poll::Pending, Poll::Ready)
        })
        .await
    }

    /// Whether anything can be taken; if not, `waker` is woken when there may be more.
    pub(super) fn has_room(&self, waker: &Waker) -> bool {
        let has_room = || self.may_take(*self.budget.used(), 1);
        has_room() || {
            self.budget.waiters.register(waker);
            has_room()
        }
    }
}

/// Bytes of a budget, given back when it is dropped.
#[derive(Debug)]
pub(super) struct Share {
    account: Arc<Account>,
    bytes: u64,
}

impl Drop for Share {
    fn drop(&mut self) {
        let budget = &self.account.budget;
        {
            let mut used = budget.used();
            *used -= self.bytes;
            self.account.held.fetch_sub(self.bytes, Ordering::Relaxed);
        }
        budget.waiters.wake_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn there_is_always_something_left_for_another_connection() {
        let budget = Arc::new(Budget::new(64));
        let account = || Arc::new(Account::new(budget.clone()));
        let mut held = Vec::new();
        for taken in [32, 16, 8] {
            let greedy = account();
            let mut shares = Vec::new();
            while let Some(share) = greedy.take_or_wake(1, Waker::noop()) {
                shares.push(share);
            }
            assert_eq!(shares.len(), taken);
            assert!(!greedy.has_room(Waker::noop()));
            held.push(shares);
        }
        let modest = account();
        assert!(modest.has_room(Waker::noop()));
        assert!(modest.take_or_wake(4, Waker::noop()).is_some());
        assert!(modest.take_or_wake(5, Waker::noop()).is_none());
        held.clear();
        assert_eq!(*budget.used(), 0);
    }

    #[test]
    fn a_request_larger_than_the_budget_is_served_alone() {
        let account = Arc::new(Account::new(Arc::new(Budget::new(8))));
        let all = account.take_or_wake(16, Waker::noop()).unwrap();
        assert!(account.take_or_wake(1, Waker::noop()).is_none());
        drop(all);
        assert!(account.take_or_wake(16, Waker::noop()).is_some());
    }
}
