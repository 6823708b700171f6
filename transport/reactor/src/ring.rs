//! [`Ring`]: setting up, registering, reaping, parking, and dropping.

#![allow(
    unsafe_code,
    reason = "slots that a kernel may still use are dropped by hand; an accept's result is a descriptor"
)]

use std::io;
use std::marker::PhantomData;
use std::mem::ManuallyDrop;
use std::os::fd::{FromRawFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use riser_memory::{MemSlice, Memory};
use rustix::event::{EventfdFlags, eventfd};

use crate::config::RingConfig;
use crate::error::{RegisterError, RingError, SubmitError};
use crate::handle::{FileTable, Handle};
use crate::kernel::Kernel;
use crate::op::{Cqe, Op};
use crate::simulated;
use crate::slot::{Kind, Slots, Token};
use crate::uring::{CANCEL, Uring};
use crate::waker::Waker;

/// Time that a dropped ring waits for the kernel to release buffers before it leaks them.
const DROP_PATIENCE: Duration = Duration::from_secs(30);

/// A finished operation, or one event of a poll that goes on.
#[derive(Debug)]
pub struct Completion {
    /// The token of the submission.
    pub token: Token,
    /// Bytes moved, poll events, or zero; a negated error number on failure.
    pub result: i32,
    /// More completions of the same operation follow (polls only); false on the last one.
    pub more: bool,
    /// The new socket of a successful accept.
    pub socket: Option<Handle>,
}

impl Completion {
    /// The result as a count, or the error.
    ///
    /// # Errors
    /// The operation's error, `ECANCELED` after a cancel.
    pub fn outcome(&self) -> io::Result<u32> {
        u32::try_from(self.result).map_err(|_| io::Error::from_raw_os_error(-self.result))
    }
}

/// Result of a call of [`Ring::reap`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Reaped {
    /// Completions added to the caller's list.
    pub completions: usize,
    /// A [`Waker`] of this ring was used: look into the mailboxes.
    pub woken: bool,
}

impl Reaped {
    /// Whether there is nothing to do.
    #[must_use]
    pub fn is_empty(self) -> bool {
        self.completions == 0 && !self.woken
    }
}

/// An `io_uring` and everything in flight on it.
///
/// Order of calls: any number of `submit_*`, then [`reap`](Ring::reap); with nothing left to do,
/// [`park`](Ring::park), then `reap` again.
pub struct Ring {
    kernel: Kernel,
    /// Leaked, rather than freed, where the kernel does not release it.
    slots: ManuallyDrop<Slots>,
    files: Arc<FileTable>,
    waker: Waker,
    /// Buffer of the read of the waker's counter.
    waker_counter: MemSlice,
    waker_armed: bool,
    capacity: usize,
    _on_one_thread: PhantomData<*mut ()>,
}

impl std::fmt::Debug for Ring {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Ring")
            .field("capacity", &self.capacity)
            .field("in_flight", &self.in_flight())
            .field("buffers", &self.kernel.buffers())
            .finish_non_exhaustive()
    }
}

impl Ring {
    /// Makes a ring that belongs to the calling thread.
    ///
    /// # Errors
    /// [`RingError::Missing`] and [`RingError::Forbidden`] where the host denies `io_uring`; the
    /// other variants as named.
    pub fn new(config: RingConfig) -> Result<Self, RingError> {
        let total = config.total()?;
        let (uring, files) = Uring::new(&config, total)?;
        let waker = Waker::new().map_err(RingError::Setup)?;
        Self::over(Kernel::Uring(uring), &config, files, waker)
    }

    /// Makes a ring whose operations a kernel in memory carries out, when its driver says so: see
    /// [`simulated`].
    ///
    /// # Errors
    /// [`RingError::Capacity`], as for a ring of the host.
    pub fn simulated(config: RingConfig) -> Result<(Self, simulated::Kernel), RingError> {
        let (queue, driver) = simulated::Kernel::new(config.threads(), config.total()?);
        let kernel = Kernel::Simulated(queue);
        let ring = Self::over(kernel, &config, config.files, Waker::simulated())?;
        Ok((ring, driver))
    }

    fn over(
        kernel: Kernel,
        config: &RingConfig,
        files: u32,
        waker: Waker,
    ) -> Result<Self, RingError> {
        // The waker's read outlives any call, so its room does too.
        let waker_counter = Memory::new(8)
            .map_err(RingError::Setup)?
            .slice(0..8)
            .expect("a page holds eight bytes");
        let slots = Slots::new(config.total()?, config.max_slices.clamp(1, 1024));
        let mut ring = Self {
            kernel,
            slots: ManuallyDrop::new(slots),
            files: Arc::new(FileTable::new(files)),
            waker,
            waker_counter,
            waker_armed: false,
            capacity: config.capacity as usize,
            _on_one_thread: PhantomData,
        };
        ring.arm_waker();
        Ok(ring)
    }

    /// A waker that ends this ring's park.
    #[must_use]
    pub fn waker(&self) -> Waker {
        self.waker.clone()
    }

    /// An eventfd that becomes readable when there may be something to [`reap`](Ring::reap): for a
    /// thread that also waits for descriptors that are not in the ring. Before each sleep it reads
    /// the counter, calls [`park`](Ring::park) for no time, and finds nothing to reap. `poll(2)` on the
    /// ring itself does not see completions that the kernel defers to this thread.
    ///
    /// # Errors
    /// Those of making and registering it; `Unsupported` for a simulated ring.
    pub fn event_fd(&mut self) -> io::Result<OwnedFd> {
        let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
        let event = eventfd(0, flags)?;
        match &mut self.kernel {
            Kernel::Uring(uring) => uring.register_event_fd(&event)?,
            Kernel::Simulated(_) => return Err(io::ErrorKind::Unsupported.into()),
        }
        Ok(event)
    }

    /// Operations in flight, the ring's own not counted.
    #[must_use]
    pub fn in_flight(&self) -> usize {
        self.slots.in_flight() - usize::from(self.waker_armed)
    }

    /// Operations that can be in flight at once.
    #[must_use]
    pub fn capacity(&self) -> usize {
        self.capacity
    }

    /// Pieces that the scatter list of one operation may have, after joining neighbours.
    #[must_use]
    pub fn max_slices(&self) -> usize {
        self.slots.max_slices()
    }

    /// Whether the next submission would be refused with [`SubmitError::Full`].
    #[must_use]
    pub fn is_full(&self) -> bool {
        self.in_flight() >= self.capacity
    }

    /// Registers a mapping, so that reads and writes of one piece within it save the kernel its
    /// look-ups. It stays registered as long as the ring lives. Registering twice does nothing.
    ///
    /// # Errors
    /// The mapping stays usable without registration; see [`RegisterError`].
    pub fn register_memory(&mut self, memory: &Memory) -> Result<(), RegisterError> {
        self.kernel.register_memory(memory)
    }

    /// Registers a file. The entry is free again once every clone of the handle is gone.
    ///
    /// # Errors
    /// The file stays usable through [`Handle::new`]; see [`RegisterError`].
    pub fn register_file(&mut self, file: &Handle) -> Result<Handle, RegisterError> {
        // Entries whose last handle is gone are taken out first, so that they can be used again.
        self.drop_stale_files();
        let index = self.files.take().ok_or(RegisterError::NoRoom)?;
        match self.kernel.update_file(index, Some(file)) {
            Ok(()) => Ok(file.fixed(self.files.clone(), index)),
            Err(e) => {
                self.files.give_back(index);
                Err(RegisterError::Kernel(e))
            }
        }
    }

    fn drop_stale_files(&mut self) {
        while let Some(index) = self.files.take_stale() {
            // Failing leaves an open file in the table until the entry is used again.
            let _ = self.kernel.update_file(index, None);
            self.files.give_back(index);
        }
    }

    /// Asks the kernel to cancel every operation with this token; returns how many there are.
    ///
    /// Each still completes, with `ECANCELED` or with what it achieved. A read or write that
    /// the disk has already begun is not interrupted.
    ///
    /// # Errors
    /// [`SubmitError::Enter`] or [`SubmitError::Full`] where the kernel takes no others.
    pub fn cancel(&mut self, token: Token) -> Result<usize, SubmitError> {
        let doomed: Vec<u64> = self.slots.with_token(token).collect();
        for &user_data in &doomed {
            self.kernel.make_room()?;
            self.kernel.cancel(user_data);
        }
        Ok(doomed.len())
    }

    /// Hands queued operations to the kernel.
    ///
    /// # Errors
    /// [`RingError::Enter`]: the ring is of no further use.
    pub fn submit(&mut self) -> Result<(), RingError> {
        self.kernel.enter(None).map_err(RingError::Enter)
    }

    /// Hands over what is queued and collects what has finished, without waiting.
    ///
    /// # Errors
    /// [`RingError::Enter`]: the ring is of no further use.
    pub fn reap(&mut self, out: &mut Vec<Completion>) -> Result<Reaped, RingError> {
        if self.kernel.must_enter() {
            self.submit()?;
        }
        Ok(self.drain(out))
    }

    /// Hands over what is queued and sleeps until something finishes, a [`Waker`] is used, a signal
    /// arrives, or `timeout` passes; then call [`reap`](Ring::reap). Returns at once where
    /// completions are waiting.
    ///
    /// # Errors
    /// [`RingError::Enter`]: the ring is of no further use.
    pub fn park(&mut self, timeout: Option<Duration>) -> Result<(), RingError> {
        // A worker that parks has time for it. A stale entry keeps a closed file open.
        self.drop_stale_files();
        if !self.waker_armed {
            self.arm_waker();
        }
        self.kernel.enter(Some(timeout)).map_err(RingError::Enter)
    }

    /// Takes a slot for an operation and hands both to the kernel. On an error nothing was queued.
    #[inline(always)]
    #[allow(
        clippy::inline_always,
        reason = "callers name the operation: one arm of a match on it is left"
    )]
    pub(crate) fn submit_op(
        &mut self,
        op: Op,
        kind: Kind,
        file: &Handle,
        slices: &[MemSlice],
        token: Token,
    ) -> Result<(), SubmitError> {
        let (index, user_data) = self.prepare(token, kind, file, slices)?;
        let slot = self.slots.slot(index);
        self.kernel.submit(op, user_data, file, slot, &self.files);
        Ok(())
    }

    fn prepare(
        &mut self,
        token: Token,
        kind: Kind,
        file: &Handle,
        slices: &[MemSlice],
    ) -> Result<(u32, u64), SubmitError> {
        // The last slot is the waker's, also while it is not armed.
        if kind != Kind::Waker && self.is_full() {
            return Err(SubmitError::Full);
        }
        // Before the slot is taken: an operation that has one is in the kernel's queue.
        self.kernel.make_room()?;
        let file = Some(file.clone());
        self.slots.prepare(token, kind, file, slices)
    }

    fn arm_waker(&mut self) {
        // A waker in memory is a flag, which `drain` looks at.
        let Some(counter) = self.waker.counter() else {
            return;
        };
        let file = counter.clone();
        let counter = [self.waker_counter.clone()];
        let read = Op::Read { offset: 0 };
        // Failing here means a queue that the kernel will not take; `park` tries again and reports.
        let armed = self.submit_op(read, Kind::Waker, &file, &counter, Token(0));
        self.waker_armed = armed.is_ok();
    }

    /// Collects completions; never enters the kernel.
    fn drain(&mut self, out: &mut Vec<Completion>) -> Reaped {
        let mut reaped = Reaped {
            completions: 0,
            // Before the caller looks at its mailboxes, as below.
            woken: self.waker.take_flag(),
        };
        // In an arm of its own: one loop with all that it does, as if there were no other kernel.
        match &mut self.kernel {
            Kernel::Uring(uring) => uring.for_each_completion(|cqe| {
                let is_wake = settle(&mut self.slots, cqe, Accepted::InResult, out, &mut reaped);
                if is_wake {
                    // Before the caller looks at its mailboxes: a message that comes after this
                    // wakes again.
                    self.waker.acknowledge();
                    self.waker_armed = false;
                }
            }),
            Kernel::Simulated(queue) => {
                while let Some((cqe, socket)) = queue.take_completion() {
                    let accepted = Accepted::Simulated(socket);
                    settle(&mut self.slots, cqe, accepted, out, &mut reaped);
                }
            }
        }
        // A wake ends the read, which has to be posted again for the next.
        if !self.waker_armed {
            self.arm_waker();
        }
        reaped
    }

    /// Cancels everything and waits for the kernel to release the memory; false where it does not.
    fn quiesce(&mut self) -> bool {
        let deadline = Instant::now() + DROP_PATIENCE;
        while self.slots.in_flight() > 0 {
            // In each round, since an operation that had not begun may have missed the first
            // cancellation.
            let doomed: Vec<u64> = self.slots.all().collect();
            for user_data in doomed {
                if Instant::now() > deadline || self.kernel.make_room().is_err() {
                    return false;
                }
                self.kernel.cancel(user_data);
            }
            let wait = Some(Duration::from_millis(20));
            if self.kernel.enter(Some(wait)).is_err() {
                return false;
            }
            let Kernel::Uring(uring) = &mut self.kernel else {
                return false;
            };
            let slots = &mut self.slots;
            uring.for_each_completion(|cqe| {
                if let Some(busy) = slots.busy(cqe.user_data) {
                    // A socket that was accepted while the ring is dropped has no owner, and
                    // closes.
                    drop(new_socket(busy.kind, cqe.result, Accepted::InResult));
                    if !cqe.more {
                        slots.release(cqe.user_data);
                    }
                }
            });
        }
        true
    }
}

impl Drop for Ring {
    fn drop(&mut self) {
        let is_released = match &mut self.kernel {
            Kernel::Uring(_) => self.quiesce(),
            // It forgets what it has, and holds the memory by handles of its own.
            Kernel::Simulated(queue) => queue.close(),
        };
        if is_released {
            self.kernel.release();
            // SAFETY: dropped once, here; nothing uses the slots afterwards.
            unsafe { ManuallyDrop::drop(&mut self.slots) };
        } else {
            // The kernel may still write: losing the memory is the price of never corrupting it.
            self.kernel.leak_memory();
        }
    }
}

/// The socket that an accept made, as its kernel gives it.
enum Accepted {
    /// The result is its descriptor, where the operation was an accept that succeeded.
    InResult,
    /// One in memory, if there is one.
    Simulated(Option<Handle>),
}

/// Adds a completion to the caller's list; returns true if it is a wake, which the caller never
/// sees.
#[inline(always)]
#[allow(
    clippy::inline_always,
    reason = "the body of the loop over completions"
)]
fn settle(
    slots: &mut Slots,
    cqe: Cqe,
    accepted: Accepted,
    out: &mut Vec<Completion>,
    reaped: &mut Reaped,
) -> bool {
    let user_data = cqe.user_data;
    let Some(busy) = slots.busy(user_data) else {
        debug_assert_eq!(user_data, CANCEL, "a completion for no operation");
        return false;
    };
    let is_wake = busy.kind == Kind::Waker;
    if is_wake {
        reaped.woken = true;
    } else {
        out.push(Completion {
            token: busy.token,
            result: cqe.result,
            more: cqe.more,
            socket: new_socket(busy.kind, cqe.result, accepted),
        });
        reaped.completions += 1;
    }
    // The slot is released after the completion was read from it, and only by the last one of an
    // operation.
    if !cqe.more {
        slots.release(user_data);
    }
    is_wake
}

#[inline]
fn new_socket(kind: Kind, result: i32, accepted: Accepted) -> Option<Handle> {
    match accepted {
        Accepted::InResult if kind == Kind::Accept && result >= 0 => {
            // SAFETY: a successful accept returns a new descriptor, and its one completion is seen
            // once.
            Some(unsafe { OwnedFd::from_raw_fd(result) }.into())
        }
        Accepted::InResult => None,
        Accepted::Simulated(socket) => socket,
    }
}

#[cfg(test)]
#[path = "ring_tests.rs"]
mod tests;
