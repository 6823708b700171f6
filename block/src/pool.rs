//! Pool for data buffers.
//!
//! A [`BufferPool`] is a single mapping. A buffer is a run of its pages, allocated first-fit and
//! released when the buffer is dropped, on any thread. If there is no run of the requested size,
//! the user waits in a FIFO queue, so that small requests don't starve a large one.
//!
//! The pages of the buffers are followed by a run of zeroes, shared by all writes of zeroes. Such
//! writes need no buffer from the pool.
//!
//! [`BufferPool::split`] turns a buffer into a pool for another purpose, in the same mapping. Users
//! that hold a buffer of one pool while they wait for the other one cannot deadlock.
//!
//! Bound: the size of the mapping, fixed when the pool is created. The number of waiters is bounded
//! by the futures held by the callers.

use std::collections::VecDeque;
use std::future::Future;
use std::io;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};

use riser_memory::{Memory, PAGE};

use crate::{Buffer, BufferWaiters};

/// Length of the zeroes in bytes: the largest worthwhile command if zeroes are written as data.
const ZEROES: usize = 256 << 10;

/// A pool of data buffers. Clones share it.
#[derive(Clone, Debug)]
pub struct BufferPool(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    memory: Memory,
    /// Page range of the buffers in the mapping.
    pages: Run,
    /// Buffer of another pool that contains the pages.
    _part: Option<Buffer>,
    state: Mutex<State>,
    /// Waiters that poll [`BufferPool::try_take`] instead of using the queue.
    pollers: BufferWaiters,
}

#[derive(Debug)]
struct State {
    /// Free runs of pages, sorted by start; adjacent runs are merged.
    free: Vec<Run>,
    /// Waiting users in FIFO order.
    queue: VecDeque<Ticket>,
    next_ticket: u64,
}

#[derive(Clone, Copy, Debug)]
struct Run {
    start: usize,
    pages: usize,
}

#[derive(Debug)]
struct Ticket {
    number: u64,
    waker: Option<Waker>,
}

/// Releases its run when dropped.
struct Lease {
    pool: Arc<Inner>,
    run: Run,
}

impl Drop for Lease {
    fn drop(&mut self) {
        self.pool.return_run(self.run);
    }
}

impl State {
    /// Allocates a run of `pages` pages.
    fn allocate_run(&mut self, pages: usize) -> Option<Run> {
        let at = self.free.iter().position(|run| run.pages >= pages)?;
        let run = &mut self.free[at];
        let start = run.start;
        run.start += pages;
        run.pages -= pages;
        if run.pages == 0 {
            self.free.remove(at);
        }
        Some(Run { start, pages })
    }

    fn free_run(&mut self, run: Run) {
        let at = self.free.partition_point(|other| other.start < run.start);
        let joins_next = self
            .free
            .get(at)
            .is_some_and(|next| run.start + run.pages == next.start);
        let joins_last = at > 0 && {
            let last = self.free[at - 1];
            last.start + last.pages == run.start
        };
        match (joins_last, joins_next) {
            (true, true) => {
                self.free[at - 1].pages += run.pages + self.free[at].pages;
                self.free.remove(at);
            }
            (true, false) => self.free[at - 1].pages += run.pages,
            (false, true) => {
                self.free[at].start = run.start;
                self.free[at].pages += run.pages;
            }
            (false, false) => self.free.insert(at, run),
        }
    }

    /// Returns the waker of the first user in the queue.
    fn first_waker(&mut self) -> Option<Waker> {
        self.queue.front_mut()?.waker.take()
    }
}

impl Inner {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn return_run(&self, run: Run) {
        let waker = {
            let mut state = self.state();
            state.free_run(run);
            state.first_waker()
        };
        if let Some(waker) = waker {
            waker.wake();
        }
        self.pollers.wake_all();
    }
}

impl BufferPool {
    /// Creates a pool of `len` bytes, rounded up to whole pages.
    ///
    /// # Errors
    /// Returns the error of `mmap(2)`.
    pub fn new(len: usize) -> io::Result<Self> {
        // An impossible length is rejected by the mapping.
        let memory = Memory::new(len.max(PAGE).saturating_add(ZEROES))?;
        let pages = (memory.len() - ZEROES) / PAGE;
        Ok(Self::of(memory, Run { start: 0, pages }, None))
    }

    fn of(memory: Memory, pages: Run, part: Option<Buffer>) -> Self {
        Self(Arc::new(Inner {
            memory,
            pages,
            _part: part,
            state: Mutex::new(State {
                free: vec![pages],
                queue: VecDeque::new(),
                next_ticket: 0,
            }),
            pollers: BufferWaiters::default(),
        }))
    }

    /// Creates a pool in a buffer of this pool. The memory returns to this pool when the new one and
    /// all of its buffers are dropped.
    ///
    /// # Panics
    /// Panics if the buffer belongs to a different pool.
    #[must_use]
    pub fn split(&self, buffer: Buffer) -> Self {
        let slice = buffer.slice();
        let is_own = slice.memory().addr() == self.0.memory.addr();
        assert!(
            is_own && slice.offset().is_multiple_of(PAGE),
            "another pool's buffer"
        );
        let pages = Run {
            start: slice.offset() / PAGE,
            pages: slice.len() / PAGE,
        };
        Self::of(self.0.memory.clone(), pages, Some(buffer))
    }

    /// Returns the memory region that contains all buffers and the zeroes.
    #[must_use]
    pub fn memory(&self) -> &Memory {
        &self.0.memory
    }

    /// Returns the total size of all buffers in bytes, free or allocated.
    #[must_use]
    pub fn size(&self) -> usize {
        self.0.pages.pages * PAGE
    }

    /// Returns the first `most` bytes of the zeroes, or all of them. You must not modify them,
    /// because other users may be sending them.
    #[must_use]
    pub fn zeroes(&self, most: u64) -> Buffer {
        let len = most.min(ZEROES as u64) as usize;
        let start = self.0.memory.len() - ZEROES;
        let slice = self.0.memory.slice(start..start + len);
        let slice = slice.expect("the zeroes lie within the mapping");
        // A peer with write access to the pool may have changed them.
        slice.fill(0, len, 0);
        Buffer::leased(slice, Box::new(()))
    }

    /// Allocates a buffer of `len` bytes. Returns `None` if no run is free or other users are
    /// waiting.
    #[must_use]
    pub fn try_take(&self, len: usize) -> Option<Buffer> {
        let mut state = self.0.state();
        if !state.queue.is_empty() {
            return None;
        }
        let run = state.allocate_run(pages(len))?;
        drop(state);
        Some(self.buffer(run, len))
    }

    /// Wakes `waker` once when a buffer may be available for [`BufferPool::try_take`].
    pub fn wake_when_free(&self, waker: &Waker) {
        self.0.pollers.register(waker);
    }

    /// Waits for a buffer of `len` bytes in FIFO order.
    ///
    /// # Panics
    /// Panics if `len` exceeds the size of the pool.
    pub fn take_buffer(&self, len: usize) -> TakeBuffer {
        assert!(len <= self.size(), "buffer larger than its pool");
        TakeBuffer {
            pool: self.clone(),
            len,
            ticket: None,
        }
    }

    fn buffer(&self, run: Run, len: usize) -> Buffer {
        let start = run.start * PAGE;
        let lease = Lease {
            pool: self.0.clone(),
            run,
        };
        let slice = self
            .0
            .memory
            .slice(start..start + len)
            .expect("a run lies within the mapping");
        Buffer::leased(slice, Box::new(lease))
    }

    /// Returns the number of free bytes in all runs.
    #[must_use]
    pub fn free(&self) -> usize {
        self.0.state().free.iter().map(|run| run.pages * PAGE).sum()
    }
}

fn pages(len: usize) -> usize {
    len.div_ceil(PAGE).max(1)
}

/// Future for a buffer. Dropping it leaves the queue.
#[derive(Debug)]
#[must_use = "futures do nothing unless polled"]
pub struct TakeBuffer {
    pool: BufferPool,
    len: usize,
    ticket: Option<u64>,
}

impl TakeBuffer {
    /// Leaves the queue. Returns the waker of the new first user, which must try again.
    fn leave_queue(&mut self, state: &mut State) -> Option<Waker> {
        let number = self.ticket.take()?;
        state.queue.retain(|ticket| ticket.number != number);
        state.first_waker()
    }
}

impl Future for TakeBuffer {
    type Output = Buffer;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Buffer> {
        let this = self.get_mut();
        let pool = this.pool.clone();
        let mut state = pool.0.state();
        // In ticket order, so that small requests don't starve a large one.
        let first = match (this.ticket, state.queue.front()) {
            (None, None) => true,
            (Some(number), Some(front)) => front.number == number,
            _ => false,
        };
        if first && let Some(run) = state.allocate_run(pages(this.len)) {
            let next = this.leave_queue(&mut state);
            drop(state);
            if let Some(next) = next {
                next.wake();
            } else {
                pool.0.pollers.wake_all();
            }
            return Poll::Ready(pool.buffer(run, this.len));
        }
        let waker = Some(cx.waker().clone());
        match this.ticket {
            Some(number) => {
                let mine = state.queue.iter_mut().find(|t| t.number == number);
                mine.expect("a ticket stays queued").waker = waker;
            }
            None => {
                let number = state.next_ticket;
                state.next_ticket += 1;
                state.queue.push_back(Ticket { number, waker });
                this.ticket = Some(number);
            }
        }
        Poll::Pending
    }
}

impl Drop for TakeBuffer {
    fn drop(&mut self) {
        let pool = self.pool.clone();
        let next = self.leave_queue(&mut pool.0.state());
        match next {
            Some(next) => next.wake(),
            None => pool.0.pollers.wake_all(),
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn poll(future: &mut TakeBuffer) -> Option<Buffer> {
        let mut cx = Context::from_waker(Waker::noop());
        match Pin::new(future).poll(&mut cx) {
            Poll::Ready(buffer) => Some(buffer),
            Poll::Pending => None,
        }
    }

    #[test]
    fn buffers_are_granted_in_fifo_order() {
        let pool = BufferPool::new(4 * PAGE).unwrap();
        let a = pool.try_take(3 * PAGE).unwrap();
        let mut large = pool.take_buffer(2 * PAGE);
        let mut small = pool.take_buffer(100);
        assert!(poll(&mut large).is_none());
        assert!(poll(&mut small).is_none(), "not before the large one");
        assert!(pool.try_take(100).is_none(), "not before anybody");
        drop(a);
        assert!(poll(&mut small).is_none());
        let large = poll(&mut large).unwrap();
        let small = poll(&mut small).unwrap();
        assert_eq!((large.len(), small.len()), (2 * PAGE, 100));
        drop((large, small));
        assert_eq!(pool.free(), 4 * PAGE);
        assert!(pool.try_take(4 * PAGE).is_some(), "runs are joined again");
    }

    #[test]
    fn zeroes_need_no_pool_buffer() {
        let pool = BufferPool::new(2 * PAGE).unwrap();
        assert_eq!(pool.size(), 2 * PAGE);
        let held = pool.try_take(2 * PAGE).unwrap();
        held.slice().fill(0, held.len(), 7);
        assert!(pool.try_take(1).is_none(), "they are not buffers");
        let zeroes = [pool.zeroes(512), pool.zeroes(u64::MAX)];
        assert_eq!(zeroes.each_ref().map(Buffer::len), [512, ZEROES]);
        for buffer in &zeroes {
            assert!(buffer.slice().to_vec().iter().all(|byte| *byte == 0));
        }
        drop(zeroes);
        assert!(held.slice().to_vec() == [7; 2 * PAGE]);
        assert_eq!(pool.free(), 0);
    }

    #[test]
    fn split_pool_returns_its_memory() {
        let pool = BufferPool::new(4 * PAGE).unwrap();
        let first = pool.try_take(PAGE).unwrap();
        let other = pool.split(pool.try_take(2 * PAGE + 100).unwrap());
        assert_eq!(
            (other.size(), other.free(), pool.free()),
            (2 * PAGE, 2 * PAGE, 0)
        );
        let buffer = other.try_take(2 * PAGE).unwrap();
        assert_eq!(buffer.slice().offset(), PAGE);
        assert!(other.try_take(1).is_none());
        assert_eq!(
            other.zeroes(8).slice().offset(),
            pool.zeroes(8).slice().offset()
        );
        drop((other, first));
        assert_eq!(pool.free(), PAGE, "still used by the buffer");
        drop(buffer);
        assert_eq!(pool.free(), 4 * PAGE);
    }

    #[test]
    fn dropped_waiter_wakes_next() {
        let pool = BufferPool::new(2 * PAGE).unwrap();
        let held = pool.try_take(PAGE).unwrap();
        let mut large = pool.take_buffer(2 * PAGE);
        let mut small = pool.take_buffer(PAGE);
        assert!(poll(&mut large).is_none() && poll(&mut small).is_none());
        drop(large);
        assert!(poll(&mut small).is_some());
        drop(held);
    }

    proptest! {
        #[test]
        fn runs_never_overlap_or_leak(sizes in proptest::collection::vec((1usize..5 * PAGE, any::<bool>()), 1..60)) {
            let pool = BufferPool::new(16 * PAGE).unwrap();
            let mut held: Vec<Buffer> = Vec::new();
            for (len, drop_one) in sizes {
                if drop_one && !held.is_empty() {
                    held.swap_remove(len % held.len());
                }
                if let Some(buffer) = pool.try_take(len) {
                    let range = |b: &Buffer| b.slice().offset()..b.slice().offset() + b.len();
                    let new = range(&buffer);
                    for other in held.iter().map(range) {
                        prop_assert!(new.end <= other.start || other.end <= new.start);
                    }
                    held.push(buffer);
                }
            }
            drop(held);
            prop_assert_eq!(pool.free(), 16 * PAGE);
        }
    }
}
