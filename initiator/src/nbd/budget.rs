//! Shares of the connections of an export in the device's buffers.
//!
//! A reply holds its buffer until the client has taken it, so a client that does not read holds
//! what it was given for as long as it likes, on as many connections as it likes. Half of the
//! buffers are therefore divided among the connections that there can be: a floor that each can
//! have at any time, however much the others hold. A request that is larger than what can be had
//! goes on in pieces that fit into the floor.
//!
//! The rest is for all. A connection gets more of it only as long as it would hold no more than
//! what stays free: one that does not read ends up with half of it, two with a third each. A
//! sixteenth of the buffers is left to what the device does itself, such as checking the unit's
//! identity.

use std::future::poll_fn;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Poll, Waker};

use riser_memory::PAGE;

use crate::block::{BufferWaiters, Span};

/// Largest number of connections.
const MAX_CONNECTIONS: u64 = 64;

/// Bytes of pages, of which a pool's buffers consist.
fn in_pages(bytes: u64) -> u64 {
    bytes.next_multiple_of(PAGE as u64)
}

/// The buffers of a device, in bytes.
#[derive(Debug)]
pub(super) struct Budget {
    /// Bytes that each connection can have at any time.
    floor: u64,
    connections: u64,
    /// Bytes that all connections together can have beyond their floors.
    shared: u64,
    used: Mutex<Used>,
    /// Bounded by the requests in flight and the connections.
    waiters: BufferWaiters,
}

/// Bytes that are held.
#[derive(Debug, Default)]
struct Used {
    /// Bytes of all connections.
    total: u64,
    /// Of that, beyond their floors.
    shared: u64,
}

impl Budget {
    /// `total` bytes of buffers, of which the smallest useful one has `least`: a block.
    pub(super) fn new(total: u64, least: u64) -> Self {
        let half = total / 2;
        // Whole pages: the longest piece that fits takes no more than that.
        let pages = half / MAX_CONNECTIONS / PAGE as u64;
        let floor = (pages * PAGE as u64).max(in_pages(least));
        Self {
            floor,
            connections: (half / floor).clamp(1, MAX_CONNECTIONS),
            shared: half - total / 16,
            used: Mutex::default(),
            waiters: BufferWaiters::default(),
        }
    }

    /// Number of connections that there can be.
    pub(super) fn connections(&self) -> usize {
        self.connections as usize
    }

    fn used(&self) -> MutexGuard<'_, Used> {
        self.used.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Account of one connection at a [`Budget`].
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

    /// The most that a connection can take at any time, in bytes, if it holds nothing.
    pub(super) fn floor(&self) -> u64 {
        self.budget.floor
    }

    /// Bytes beyond its floor that the connection would have, if it held `held`.
    fn beyond(&self, held: u64) -> u64 {
        held.saturating_sub(self.budget.floor)
    }

    fn held(&self) -> u64 {
        self.held.load(Ordering::Relaxed)
    }

    /// Returns whether `bytes` more are within the floor, or leave at least as much of the rest
    /// free as this connection would hold of it. A device with all buffers free serves any
    /// request.
    fn may_take(&self, used: &Used, bytes: u64) -> bool {
        let (before, after) = (self.beyond(self.held()), self.beyond(self.held() + bytes));
        let shared = used.shared + after - before;
        used.total == 0 || after == 0 || after + shared <= self.budget.shared
    }

    /// Takes what `most` covers, or else what `least` does, where that is within the floor.
    fn try_take(self: &Arc<Self>, most: &Span, least: &Span) -> Option<(Span, Share)> {
        let mut used = self.budget.used();
        let whole = in_pages(most.covering as u64);
        let piece = in_pages(least.covering as u64);
        let (span, bytes) = match () {
            () if self.may_take(&used, whole) => (most, whole),
            () if self.beyond(self.held() + piece) == 0 => (least, piece),
            () => return None,
        };
        let before = self.held.fetch_add(bytes, Ordering::Relaxed);
        used.total += bytes;
        used.shared += self.beyond(before + bytes) - self.beyond(before);
        let account = self.clone();
        Some((*span, Share { account, bytes }))
    }

    /// Takes a share for `most`, or for `least` where there is too little; or has `waker` woken
    /// when there may be more.
    pub(super) fn take_or_wake(
        self: &Arc<Self>,
        most: &Span,
        least: &Span,
        waker: &Waker,
    ) -> Option<(Span, Share)> {
        self.try_take(most, least).or_else(|| {
            self.budget.waiters.register(waker);
            // Some may have come back before the waker was known.
            self.try_take(most, least)
        })
    }

    /// Waits for a share for `most`, or for `least` where there is too little.
    pub(super) async fn take(self: &Arc<Self>, most: &Span, least: &Span) -> (Span, Share) {
        poll_fn(|cx| {
            self.take_or_wake(most, least, cx.waker())
                .map_or(Poll::Pending, Poll::Ready)
        })
        .await
    }

    /// Returns whether anything can be taken; if not, `waker` is woken when there may be more.
    pub(super) fn has_room(&self, waker: &Waker) -> bool {
        let has_room = || self.may_take(&self.budget.used(), in_pages(1));
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
        let account = &self.account;
        let budget = &account.budget;
        {
            let mut used = budget.used();
            let before = account.held.fetch_sub(self.bytes, Ordering::Relaxed);
            used.total -= self.bytes;
            used.shared -= account.beyond(before) - account.beyond(before - self.bytes);
        }
        budget.waiters.wake_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Takes a share of `pages` pages.
    fn take(account: &Arc<Account>, pages: usize) -> Option<Share> {
        let span = Span::new(512, 0, pages * PAGE);
        let taken = account.take_or_wake(&span, &span, Waker::noop());
        taken.map(|(_, share)| share)
    }

    /// As many shares of a page as can be had.
    fn take_all(account: &Arc<Account>) -> Vec<Share> {
        std::iter::from_fn(|| take(account, 1)).collect()
    }

    fn budget(pages: usize) -> Arc<Budget> {
        Arc::new(Budget::new((pages * PAGE) as u64, 512))
    }

    #[test]
    fn every_connection_has_its_floor_however_greedy_the_others_are() {
        let budget = budget(1024);
        assert_eq!(budget.connections(), 64);
        let accounts: Vec<_> = (0..64)
            .map(|_| Arc::new(Account::new(budget.clone())))
            .collect();
        let mut held = Vec::new();
        for (i, greedy) in accounts.iter().enumerate() {
            assert!(greedy.has_room(Waker::noop()));
            let shares = take_all(greedy);
            // 448 pages are shared.
            let wanted = [8 + 224, 8 + 112, 8 + 56].get(i).copied().unwrap_or(8);
            assert!(shares.len() >= wanted, "{} of {i}", shares.len());
            assert!(i > 2 || shares.len() == wanted, "{} of {i}", shares.len());
            assert!(!greedy.has_room(Waker::noop()));
            held.push(shares);
        }
        let pages: usize = held.iter().map(Vec::len).sum();
        assert!(pages <= 1024 - 64, "the device's own are left: {pages}");
        held.clear();
        let used = budget.used();
        assert_eq!((used.total, used.shared), (0, 0));
    }

    #[test]
    fn what_is_too_large_for_the_rest_goes_on_in_pieces_of_the_floor() {
        let budget = budget(1024);
        let account = || Arc::new(Account::new(budget.clone()));
        let held: Vec<_> = (0..8).map(|_| take_all(&account())).collect();
        let modest = account();
        let most = Span::new(512, 0, 256 * PAGE);
        let least = Span::new(512, 0, modest.floor() as usize);
        let take = || modest.take_or_wake(&most, &least, Waker::noop());
        let (span, share) = take().unwrap();
        assert_eq!(span, least);
        assert!(take().is_none(), "the floor is used up");
        drop(share);
        drop(held);
        assert_eq!(take().unwrap().0, most);
    }

    #[test]
    fn small_requests_count_as_the_pages_that_they_take() {
        let budget = budget(1024);
        let account = Arc::new(Account::new(budget.clone()));
        let span = Span::new(512, 0, 512);
        let held: Vec<_> =
            std::iter::from_fn(|| account.take_or_wake(&span, &span, Waker::noop())).collect();
        assert_eq!(held.len(), 8 + 224);
    }

    #[test]
    fn a_floor_can_be_had_whatever_the_size_of_the_pool() {
        let budget = budget(1000);
        let _held: Vec<_> = (0..16)
            .map(|_| take_all(&Arc::new(Account::new(budget.clone()))))
            .collect();
        let modest = Arc::new(Account::new(budget));
        let most = Span::new(512, 0, 256 * PAGE);
        let least = Span::new(512, 0, modest.floor() as usize / 512 * 512);
        assert!(modest.take_or_wake(&most, &least, Waker::noop()).is_some());
    }

    #[test]
    fn a_floor_holds_a_block() {
        let budget = Budget::new(1 << 20, 64 << 10);
        assert_eq!((budget.floor, budget.connections()), (64 << 10, 8));
        assert_eq!(Budget::new(4096, 65536).connections(), 1);
    }

    #[test]
    fn a_request_larger_than_the_budget_is_served_alone() {
        let account = Arc::new(Account::new(budget(8)));
        let all = take(&account, 16).unwrap();
        assert!(take(&account, 1).is_none());
        drop(all);
        assert!(take(&account, 16).is_some());
    }
}
