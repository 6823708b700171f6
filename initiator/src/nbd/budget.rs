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
//!
//! Replies that are assembled in memory of their own are bounded in the same way: each connection
//! can have one, and all together as many bytes beyond that as the device has of buffers.

use std::future::poll_fn;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
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

/// The buffers of a device, and the memory of replies that are assembled, in bytes.
#[derive(Debug)]
pub(super) struct Budget {
    /// Bytes that each connection can have at any time.
    floor: u64,
    connections: u64,
    /// Bytes that all connections together can have beyond their floors.
    shared: u64,
    /// Bytes of replies that all connections together can assemble, one of each apart.
    assembled: u64,
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
    /// Bytes of replies that are assembled.
    assembled: u64,
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
            assembled: total,
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
    /// As `held`, of replies that are assembled.
    assembled: AtomicU64,
    /// Requests that wait for a share.
    waiting: AtomicUsize,
    /// The connection, where it waits until none of them does.
    behind: BufferWaiters,
}

/// A request that waits for a share.
struct Waiting<'a>(&'a Account);

impl<'a> Waiting<'a> {
    fn new(account: &'a Account) -> Self {
        account.waiting.fetch_add(1, Ordering::SeqCst);
        Self(account)
    }
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        if self.0.waiting.fetch_sub(1, Ordering::SeqCst) == 1 {
            self.0.behind.wake_all();
        }
    }
}

impl Account {
    pub(super) fn new(budget: Arc<Budget>) -> Self {
        Self {
            budget,
            held: AtomicU64::new(0),
            assembled: AtomicU64::new(0),
            waiting: AtomicUsize::new(0),
            behind: BufferWaiters::default(),
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
        let share = Share {
            account: self.clone(),
            bytes,
            kind: Kind::Buffers,
        };
        Some((*span, share))
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
        self.wait(|waker| self.take_or_wake(most, least, waker))
            .await
    }

    /// Takes a share for a reply of `len` bytes that is assembled: the connection's only one, or
    /// one with which it holds no more than what stays free.
    pub(super) fn try_assemble(self: &Arc<Self>, len: u64) -> Option<Share> {
        let mut used = self.budget.used();
        let bytes = in_pages(len);
        let own = self.assembled.load(Ordering::Relaxed);
        if own > 0 && own + bytes + used.assembled + bytes > self.budget.assembled {
            return None;
        }
        self.assembled.fetch_add(bytes, Ordering::Relaxed);
        used.assembled += bytes;
        Some(Share {
            account: self.clone(),
            bytes,
            kind: Kind::Assembled,
        })
    }

    /// Waits for what [`Self::try_assemble`] takes.
    pub(super) async fn assemble(self: &Arc<Self>, len: u64) -> Share {
        self.wait(|waker| {
            self.try_assemble(len).or_else(|| {
                self.budget.waiters.register(waker);
                self.try_assemble(len)
            })
        })
        .await
    }

    /// Waits until `attempt` succeeds, which has the waker woken otherwise. No further requests are
    /// read meanwhile: they could only wait too, and a share that comes back wakes all that wait.
    async fn wait<T>(&self, attempt: impl Fn(&Waker) -> Option<T>) -> T {
        let mut waiting = None;
        poll_fn(|cx| match attempt(cx.waker()) {
            Some(taken) => Poll::Ready(taken),
            None => {
                if waiting.is_none() {
                    waiting = Some(Waiting::new(self));
                }
                Poll::Pending
            }
        })
        .await
    }

    /// Returns whether anything can be taken, and no request waits for more; if not, `waker` is
    /// woken when that may have changed.
    pub(super) fn has_room(&self, waker: &Waker) -> bool {
        let has_room = || {
            self.waiting.load(Ordering::SeqCst) == 0
                && self.may_take(&self.budget.used(), in_pages(1))
        };
        has_room() || {
            self.behind.register(waker);
            self.budget.waiters.register(waker);
            has_room()
        }
    }
}

/// What the bytes of a share are of.
#[derive(Clone, Copy, Debug)]
enum Kind {
    Buffers,
    Assembled,
}

/// Bytes of a budget, given back when it is dropped.
#[derive(Debug)]
pub(super) struct Share {
    account: Arc<Account>,
    bytes: u64,
    kind: Kind,
}

impl Drop for Share {
    fn drop(&mut self) {
        let account = &self.account;
        let budget = &account.budget;
        {
            let mut used = budget.used();
            match self.kind {
                Kind::Buffers => {
                    let before = account.held.fetch_sub(self.bytes, Ordering::Relaxed);
                    used.total -= self.bytes;
                    used.shared -= account.beyond(before) - account.beyond(before - self.bytes);
                }
                Kind::Assembled => {
                    account.assembled.fetch_sub(self.bytes, Ordering::Relaxed);
                    used.assembled -= self.bytes;
                }
            }
        }
        budget.waiters.wake_all();
    }
}

#[cfg(test)]
mod tests {
    use std::task::Context;

    use super::*;
    use crate::block::Bell;

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
    fn while_a_request_waits_the_connection_reads_no_others() {
        let account = Arc::new(Account::new(budget(1024)));
        let mut held: Vec<_> = std::iter::from_fn(|| take(&account, 9)).collect();
        let bell = Arc::new(Bell::new().unwrap());
        let waker = Waker::from(bell.clone());
        assert!(account.has_room(&waker), "a page can be had");
        let span = Span::new(512, 0, 9 * PAGE);
        let mut waiting = Box::pin(account.take(&span, &span));
        let mut cx = Context::from_waker(Waker::noop());
        assert!(waiting.as_mut().poll(&mut cx).is_pending());
        assert!(!account.has_room(&waker));
        held.pop();
        let events = bell.events();
        let taken = waiting.as_mut().poll(&mut cx);
        drop(waiting);
        assert!(taken.is_ready());
        assert!(bell.events() > events, "the connection goes on");
        assert!(account.has_room(&waker));
        // One that is given up does not wait either.
        let mut waiting = Box::pin(account.take(&span, &span));
        assert!(waiting.as_mut().poll(&mut cx).is_pending());
        assert!(!account.has_room(&waker));
        drop(waiting);
        assert!(account.has_room(&waker));
    }

    #[test]
    fn assembled_replies_of_all_connections_are_bounded_and_each_has_one() {
        let budget = budget(1024);
        let len = 64 * PAGE as u64;
        let mut held = Vec::new();
        for i in 0..64 {
            let account = Arc::new(Account::new(budget.clone()));
            let shares: Vec<_> = std::iter::from_fn(|| account.try_assemble(len))
                .take(1000)
                .collect();
            // 16 are for all.
            let wanted = [8, 4, 2].get(i).copied().unwrap_or(1);
            assert_eq!(shares.len(), wanted, "of {i}");
            held.push((account, shares));
        }
        let (account, shares) = &mut held[63];
        let mut waiting = Box::pin(account.assemble(len));
        let mut cx = Context::from_waker(Waker::noop());
        assert!(waiting.as_mut().poll(&mut cx).is_pending());
        assert!(!account.has_room(Waker::noop()));
        shares.clear();
        let taken = waiting.as_mut().poll(&mut cx);
        assert!(taken.is_ready());
        drop((waiting, taken));
        held.clear();
        assert_eq!(budget.used().assembled, 0);
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
