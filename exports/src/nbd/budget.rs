//! Shares of the device buffers for each connection of an export.
//!
//! A reply holds its buffer until the client has received it, so if a client doesn't read its
//! socket, buffers are not released, and it can open many connections. So half of the buffers are
//! reserved: each connection has a floor which is always available, regardless of buffers held by
//! other connections. If a request is larger than the available share, it is split into pieces
//! which fit into the floor.
//!
//! The remaining buffers are shared. A connection can only use more of them as long as it holds no
//! more than the free remainder: a single client which doesn't read will hold up to a half, two
//! clients a third each. One sixteenth is reserved for use by the device, for example to verify the
//! unit's identity.
//!
//! The same limits are used for replies which are assembled in separate memory: each connection can
//! have one, plus a total which is equal to the size of the device buffers.

use std::future::poll_fn;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Poll, Waker};

use riser_block::{BufferWaiters, Span};
use riser_memory::PAGE;

/// Max number of connections.
const MAX_CONNECTIONS: u64 = 64;

/// Rounds up to the page size, because buffers are allocated from the pool in pages.
fn in_pages(bytes: u64) -> u64 {
    bytes.next_multiple_of(PAGE as u64)
}

/// Device buffers, and memory for assembled replies, in bytes.
#[derive(Debug)]
pub(super) struct Budget {
    /// Bytes which are always available to each connection.
    floor: u64,
    connections: u64,
    /// Max bytes used by all connections above their floors.
    shared: u64,
    /// Max bytes of assembled replies for all connections, not including one reply per connection.
    assembled: u64,
    used: Mutex<Used>,
    /// Limited by the number of connections and requests in flight.
    waiters: BufferWaiters,
}

/// Bytes in use.
#[derive(Debug, Default)]
struct Used {
    /// Total for all connections.
    total: u64,
    /// Part of the total which exceeds the floors.
    shared: u64,
    /// Bytes of assembled replies.
    assembled: u64,
}

impl Budget {
    /// Creates a budget for `total` buffer bytes. The smallest useful buffer is one block, with
    /// `least` bytes.
    pub(super) fn new(total: u64, least: u64) -> Self {
        let half = total / 2;
        // Round down to pages, so that the largest piece will fit.
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

    /// Max number of connections.
    pub(super) fn connections(&self) -> usize {
        self.connections as usize
    }

    fn used(&self) -> MutexGuard<'_, Used> {
        self.used.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Budget account for a connection.
#[derive(Debug)]
pub(super) struct Account {
    budget: Arc<Budget>,
    /// Must only be updated while holding the budget lock.
    held: AtomicU64,
    /// Same as `held`, for assembled replies.
    assembled: AtomicU64,
    /// Number of requests waiting for a share.
    waiting: AtomicUsize,
    /// Wakes the connection when there are no more waiting requests.
    behind: BufferWaiters,
}

/// Request waiting for a share.
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

    /// Max bytes which are always available to a connection, if it doesn't hold anything.
    pub(super) fn floor(&self) -> u64 {
        self.budget.floor
    }

    /// Bytes used above the floor if this connection holds `held` bytes.
    fn beyond(&self, held: u64) -> u64 {
        held.saturating_sub(self.budget.floor)
    }

    fn held(&self) -> u64 {
        self.held.load(Ordering::Relaxed)
    }

    /// Returns whether `bytes` more can be allocated: either they fit into the floor, or the free
    /// remainder would be at least as large as this connection's use of it. If all buffers are
    /// free, any request is allowed.
    fn may_take(&self, used: &Used, bytes: u64) -> bool {
        let (before, after) = (self.beyond(self.held()), self.beyond(self.held() + bytes));
        let shared = used.shared + after - before;
        used.total == 0 || after == 0 || after + shared <= self.budget.shared
    }

    /// Allocates a share for `most`, or for `least` if only that fits, and is within the floor.
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

    /// Allocates a share for `most`, or for `least` if there isn't enough. On failure, `waker` will
    /// be called when more may be available.
    pub(super) fn take_or_wake(
        self: &Arc<Self>,
        most: &Span,
        least: &Span,
        waker: &Waker,
    ) -> Option<(Span, Share)> {
        self.try_take(most, least).or_else(|| {
            self.budget.waiters.register(waker);
            // Check again, because buffers may have been released before we registered the waker.
            self.try_take(most, least)
        })
    }

    /// Waits for a share for `most`, or for `least` if there isn't enough.
    pub(super) async fn acquire_share(
        self: &Arc<Self>,
        most: &Span,
        least: &Span,
    ) -> (Span, Share) {
        self.wait(|waker| self.take_or_wake(most, least, waker))
            .await
    }

    /// Allocates a share for an assembled reply with `len` bytes: either this is the only one on
    /// the connection, or it holds no more than the free remainder.
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

    /// Waits until [`Self::try_assemble`] succeeds.
    pub(super) async fn assemble(self: &Arc<Self>, len: u64) -> Share {
        self.wait(|waker| {
            self.try_assemble(len).or_else(|| {
                self.budget.waiters.register(waker);
                self.try_assemble(len)
            })
        })
        .await
    }

    /// Waits until `attempt` succeeds; on failure it must register the waker. The connection
    /// doesn't read new requests in the meantime: they could only wait as well, and all waiters are
    /// woken when a share is released.
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

    /// Returns whether a share is available and there are no waiting requests. If not, `waker` will
    /// be called when this may have changed.
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

/// Type of memory used by a share.
#[derive(Clone, Copy, Debug)]
enum Kind {
    Buffers,
    Assembled,
}

/// Share of a budget in bytes, released on drop.
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

    use crate::bell::Bell;

    use super::*;

    /// Allocates a share with `pages` pages.
    fn allocate_share(account: &Arc<Account>, pages: usize) -> Option<Share> {
        let span = Span::new(512, 0, pages * PAGE);
        let taken = account.take_or_wake(&span, &span, Waker::noop());
        taken.map(|(_, share)| share)
    }

    /// Allocates one-page shares until the limit is reached.
    fn allocate_all(account: &Arc<Account>) -> Vec<Share> {
        std::iter::from_fn(|| allocate_share(account, 1)).collect()
    }

    fn budget(pages: usize) -> Arc<Budget> {
        Arc::new(Budget::new((pages * PAGE) as u64, 512))
    }

    #[test]
    fn floor_is_guaranteed_per_connection() {
        let budget = budget(1024);
        assert_eq!(budget.connections(), 64);
        let accounts: Vec<_> = (0..64)
            .map(|_| Arc::new(Account::new(budget.clone())))
            .collect();
        let mut held = Vec::new();
        for (i, greedy) in accounts.iter().enumerate() {
            assert!(greedy.has_room(Waker::noop()));
            let shares = allocate_all(greedy);
            // There are 448 shared pages.
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
    fn waiting_request_stops_further_reads() {
        let account = Arc::new(Account::new(budget(1024)));
        let mut held: Vec<_> = std::iter::from_fn(|| allocate_share(&account, 9)).collect();
        let bell = Arc::new(Bell::new().unwrap());
        let waker = Waker::from(bell.clone());
        assert!(account.has_room(&waker), "a page can be had");
        let span = Span::new(512, 0, 9 * PAGE);
        let mut waiting = Box::pin(account.acquire_share(&span, &span));
        let mut cx = Context::from_waker(Waker::noop());
        assert!(waiting.as_mut().poll(&mut cx).is_pending());
        assert!(!account.has_room(&waker));
        held.pop();
        let events = bell.events();
        let taken = waiting.as_mut().poll(&mut cx);
        drop(waiting);
        assert!(taken.is_ready());
        assert!(bell.events() > events, "the connection continues");
        assert!(account.has_room(&waker));
        // Dropping the future should also stop waiting.
        let mut waiting = Box::pin(account.acquire_share(&span, &span));
        assert!(waiting.as_mut().poll(&mut cx).is_pending());
        assert!(!account.has_room(&waker));
        drop(waiting);
        assert!(account.has_room(&waker));
    }

    #[test]
    fn assembled_replies_are_bounded_across_connections() {
        let budget = budget(1024);
        let len = 64 * PAGE as u64;
        let mut held = Vec::new();
        for i in 0..64 {
            let account = Arc::new(Account::new(budget.clone()));
            let shares: Vec<_> = std::iter::from_fn(|| account.try_assemble(len))
                .take(1000)
                .collect();
            // There are 16 shared pages.
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
    fn large_request_falls_back_to_floor() {
        let budget = budget(1024);
        let account = || Arc::new(Account::new(budget.clone()));
        let held: Vec<_> = (0..8).map(|_| allocate_all(&account())).collect();
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
    fn small_requests_are_charged_whole_pages() {
        let budget = budget(1024);
        let account = Arc::new(Account::new(budget.clone()));
        let span = Span::new(512, 0, 512);
        let held: Vec<_> =
            std::iter::from_fn(|| account.take_or_wake(&span, &span, Waker::noop())).collect();
        assert_eq!(held.len(), 8 + 224);
    }

    #[test]
    fn floor_is_available_for_any_pool() {
        let budget = budget(1000);
        let _held: Vec<_> = (0..16)
            .map(|_| allocate_all(&Arc::new(Account::new(budget.clone()))))
            .collect();
        let modest = Arc::new(Account::new(budget));
        let most = Span::new(512, 0, 256 * PAGE);
        let least = Span::new(512, 0, modest.floor() as usize / 512 * 512);
        assert!(modest.take_or_wake(&most, &least, Waker::noop()).is_some());
    }

    #[test]
    fn floor_holds_block() {
        let budget = Budget::new(1 << 20, 64 << 10);
        assert_eq!((budget.floor, budget.connections()), (64 << 10, 8));
        assert_eq!(Budget::new(4096, 65536).connections(), 1);
    }

    #[test]
    fn oversized_request_is_served_alone() {
        let account = Arc::new(Account::new(budget(8)));
        let all = allocate_share(&account, 16).unwrap();
        assert!(allocate_share(&account, 1).is_none());
        drop(all);
        assert!(allocate_share(&account, 16).is_some());
    }
}
