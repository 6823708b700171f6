//! [`Ring`]: setup, registration, reaping, parking, and teardown.

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

/// Time for which a dropped ring waits for the kernel to release buffers before it leaks them.
const DROP_PATIENCE: Duration = Duration::from_secs(30);

/// A completed operation, or one event of a multishot poll.
#[derive(Debug)]
pub struct Completion {
    /// The token passed at submission.
    pub token: Token,
    /// Bytes transferred, poll events, or zero. A negative error number on failure.
    pub result: i32,
    /// Set if more completions of the same operation will follow (polls only). False for the last
    /// completion.
    pub more: bool,
    /// The new socket of a successful accept.
    pub socket: Option<Handle>,
}

impl Completion {
    /// Returns the result as a count, or an error.
    ///
    /// # Errors
    /// Returns the operation's error, or `ECANCELED` if it was cancelled.
    pub fn outcome(&self) -> io::Result<u32> {
        u32::try_from(self.result).map_err(|_| io::Error::from_raw_os_error(-self.result))
    }
}

/// Result of [`Ring::reap`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Reaped {
    /// Number of completions added to the caller's list.
    pub completions: usize,
    /// Set if a [`Waker`] of this ring was used. The mailboxes should be checked.
    pub woken: bool,
}

impl Reaped {
    /// Returns whether there is nothing to do.
    #[must_use]
    pub fn is_empty(self) -> bool {
        self.completions == 0 && !self.woken
    }
}

/// An `io_uring` and everything in flight on it.
///
/// Call any number of `submit_*` methods, then [`reap`](Ring::reap). If there is nothing left to
/// do, call [`park`](Ring::park), then `reap` again.
pub struct Ring {
    kernel: Kernel,
    /// Leaked instead of freed if the kernel doesn't release them.
    slots: ManuallyDrop<Slots>,
    files: Arc<FileTable>,
    waker: Waker,
    /// Buffer for reading the waker's counter.
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
    /// Creates a ring that belongs to the calling thread.
    ///
    /// # Errors
    /// Returns [`RingError::Missing`] or [`RingError::Forbidden`] if the host denies `io_uring`, or
    /// other variants as documented.
    pub fn new(config: RingConfig) -> Result<Self, RingError> {
        let total = config.total()?;
        let (uring, files) = Uring::new(&config, total)?;
        let waker = Waker::new().map_err(RingError::Setup)?;
        Self::over(Kernel::Uring(uring), &config, files, waker)
    }

    /// Creates a ring whose operations are executed by an in-memory kernel, under the control of
    /// its driver: see [`simulated`].
    ///
    /// # Errors
    /// Returns [`RingError::Capacity`], like a ring of the host.
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
        // The waker's read stays in flight after this call, so its buffer must be kept.
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

    /// Returns a waker that wakes this ring from a park.
    #[must_use]
    pub fn waker(&self) -> Waker {
        self.waker.clone()
    }

    /// Returns an eventfd that becomes readable when there may be completions to
    /// [`reap`](Ring::reap). For a thread that also waits for descriptors outside of the ring.
    /// Before each sleep the thread must read the counter, call [`park`](Ring::park) with a timeout
    /// of zero, and find nothing to reap. Using `poll(2)` on the ring itself does not report
    /// completions that the kernel defers to this thread.
    ///
    /// # Errors
    /// Returns errors of creating and registering the eventfd, or `Unsupported` for a simulated
    /// ring.
    pub fn event_fd(&mut self) -> io::Result<OwnedFd> {
        let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
        let event = eventfd(0, flags)?;
        match &mut self.kernel {
            Kernel::Uring(uring) => uring.register_event_fd(&event)?,
            Kernel::Simulated(_) => return Err(io::ErrorKind::Unsupported.into()),
        }
        Ok(event)
    }

    /// Returns the number of operations in flight, not counting the ring's own operation.
    #[must_use]
    pub fn in_flight(&self) -> usize {
        self.slots.in_flight() - usize::from(self.waker_armed)
    }

    /// Returns the maximum number of operations in flight.
    #[must_use]
    pub fn capacity(&self) -> usize {
        self.capacity
    }

    /// Returns the maximum number of pieces in the scatter list of an operation, after merging
    /// adjacent pieces.
    #[must_use]
    pub fn max_slices(&self) -> usize {
        self.slots.max_slices()
    }

    /// Returns whether the next submission would fail with [`SubmitError::Full`].
    #[must_use]
    pub fn is_full(&self) -> bool {
        self.in_flight() >= self.capacity
    }

    /// Registers a mapping, so that the kernel can skip lookups for reads and writes of a single
    /// piece within it. It stays registered until the ring is dropped. Registering it again has no
    /// effect.
    ///
    /// # Errors
    /// See [`RegisterError`]. The mapping can still be used without registration.
    pub fn register_memory(&mut self, memory: &Memory) -> Result<(), RegisterError> {
        self.kernel.register_memory(memory)
    }

    /// Registers a file. The entry is freed when all clones of the returned handle are dropped.
    ///
    /// # Errors
    /// See [`RegisterError`]. The file can still be used via [`Handle::new`].
    pub fn register_file(&mut self, file: &Handle) -> Result<Handle, RegisterError> {
        // Free entries without handles first, so that they can be reused.
        self.remove_unused_files();
        let index = self.files.allocate_index().ok_or(RegisterError::NoRoom)?;
        match self.kernel.update_file(index, Some(file)) {
            Ok(()) => Ok(file.fixed(self.files.clone(), index)),
            Err(e) => {
                self.files.release_index(index);
                Err(RegisterError::Kernel(e))
            }
        }
    }

    /// Removes the files without handles from the table. Otherwise [`park`](Ring::park) and
    /// [`register_file`](Ring::register_file) do this, and the ring keeps these files open.
    pub fn remove_unused_files(&mut self) {
        while let Some(index) = self.files.take_stale() {
            // If this fails, the file stays open in the table until the entry is reused.
            let _ = self.kernel.update_file(index, None);
            self.files.release_index(index);
        }
    }

    /// Requests the cancellation of all operations with this token. Returns their number.
    ///
    /// Each of them still completes, either with `ECANCELED` or with its actual result. A read or
    /// write that the disk has already started is not interrupted.
    ///
    /// # Errors
    /// Returns [`SubmitError::Enter`] or [`SubmitError::Full`] if the kernel does not accept more
    /// entries.
    pub fn cancel(&mut self, token: Token) -> Result<usize, SubmitError> {
        let doomed: Vec<u64> = self.slots.with_token(token).collect();
        for &user_data in &doomed {
            self.kernel.make_room()?;
            self.kernel.cancel(user_data);
        }
        Ok(doomed.len())
    }

    /// Submits queued operations to the kernel.
    ///
    /// # Errors
    /// Returns [`RingError::Enter`] if the ring can no longer be used.
    pub fn submit(&mut self) -> Result<(), RingError> {
        self.kernel.enter(None).map_err(RingError::Enter)
    }

    /// Submits queued operations and collects completions, without waiting.
    ///
    /// # Errors
    /// Returns [`RingError::Enter`] if the ring can no longer be used.
    pub fn reap(&mut self, out: &mut Vec<Completion>) -> Result<Reaped, RingError> {
        if self.kernel.must_enter() {
            self.submit()?;
        }
        Ok(self.drain(out))
    }

    /// Submits queued operations and sleeps until an operation completes, a [`Waker`] is used, a
    /// signal arrives, or `timeout` expires. Returns immediately if completions are available. The
    /// caller should call [`reap`](Ring::reap) afterwards.
    ///
    /// # Errors
    /// Returns [`RingError::Enter`] if the ring can no longer be used.
    pub fn park(&mut self, timeout: Option<Duration>) -> Result<(), RingError> {
        // A stale entry keeps a closed file open. A worker that parks has time to remove it.
        self.remove_unused_files();
        if !self.waker_armed {
            self.arm_waker();
        }
        self.kernel.enter(Some(timeout)).map_err(RingError::Enter)
    }

    /// Allocates a slot for an operation and passes both to the kernel. On error, the operation was
    /// not queued.
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
        // The last slot is reserved for the waker, even while the waker is not armed.
        if kind != Kind::Waker && self.is_full() {
            return Err(SubmitError::Full);
        }
        // This must precede allocating a slot, because an operation with a slot must be in the
        // kernel's queue.
        self.kernel.make_room()?;
        let file = Some(file.clone());
        self.slots.prepare(token, kind, file, slices)
    }

    fn arm_waker(&mut self) {
        // A simulated waker is a flag, which is checked by `drain`.
        let Some(counter) = self.waker.counter() else {
            return;
        };
        let file = counter.clone();
        let counter = [self.waker_counter.clone()];
        let read = Op::Read { offset: 0 };
        // This fails if the kernel does not accept the queue. `park` will try again and report the
        // error.
        let armed = self.submit_op(read, Kind::Waker, &file, &counter, Token(0));
        self.waker_armed = armed.is_ok();
    }

    /// Collects completions. Never enters the kernel.
    fn drain(&mut self, out: &mut Vec<Completion>) -> Reaped {
        let mut reaped = Reaped {
            completions: 0,
            // Before the caller checks its mailboxes, as below.
            woken: self.waker.take_flag(),
        };
        // A separate arm, so that the compiler generates a single loop, as if there were no other
        // kernel.
        match &mut self.kernel {
            Kernel::Uring(uring) => uring.for_each_completion(|cqe| {
                let is_wake =
                    deliver_completion(&mut self.slots, cqe, Accepted::InResult, out, &mut reaped);
                if is_wake {
                    // Before the caller checks its mailboxes, so that a message that arrives after
                    // this wakes the ring again.
                    self.waker.acknowledge();
                    self.waker_armed = false;
                }
            }),
            Kernel::Simulated(queue) => {
                while let Some((cqe, socket)) = queue.take_completion() {
                    let accepted = Accepted::Simulated(socket);
                    deliver_completion(&mut self.slots, cqe, accepted, out, &mut reaped);
                }
            }
        }
        // A wake-up completes the read, which must be posted again for the next wake-up.
        if !self.waker_armed {
            self.arm_waker();
        }
        reaped
    }

    /// Cancels all operations and waits for the kernel to release their memory. Returns false if it
    /// does not.
    fn quiesce(&mut self) -> bool {
        let deadline = Instant::now() + DROP_PATIENCE;
        while self.slots.in_flight() > 0 {
            // Repeated in each round, because an operation that had not started yet may have missed
            // the first cancellation.
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
                    // A socket that is accepted while the ring is being dropped has no owner, and
                    // is closed.
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
            // The simulated kernel drops all operations, and holds references to their memory.
            Kernel::Simulated(queue) => queue.close(),
        };
        if is_released {
            self.kernel.release();
            // SAFETY: the slots are dropped only here, and are not used afterwards.
            unsafe { ManuallyDrop::drop(&mut self.slots) };
        } else {
            // The kernel may still write to this memory, so we leak it to avoid corruption.
            self.kernel.leak_memory();
        }
    }
}

/// The socket created by an accept, as returned by the kernel.
enum Accepted {
    /// The result is the descriptor, if the operation was a successful accept.
    InResult,
    /// A simulated socket, if any.
    Simulated(Option<Handle>),
}

/// Adds a completion to the caller's list. Returns true for a wake-up, which is never passed to the
/// caller.
#[inline(always)]
#[allow(
    clippy::inline_always,
    reason = "the body of the loop over completions"
)]
fn deliver_completion(
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
    // The slot is released after its data was used, and only by the last completion of an
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
            // SAFETY: a successful accept returns a new descriptor in its only completion.
            Some(unsafe { OwnedFd::from_raw_fd(result) }.into())
        }
        Accepted::InResult => None,
        Accepted::Simulated(socket) => socket,
    }
}

#[cfg(test)]
#[path = "ring_tests.rs"]
mod tests;
