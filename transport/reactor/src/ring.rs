//! [`Ring`]: setting up, registering, reaping, parking, and dropping.

#![allow(
    unsafe_code,
    reason = "queueing an operation hands addresses to the kernel; slots keep them valid"
)]

use std::io;
use std::marker::PhantomData;
use std::mem::{self, ManuallyDrop};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use io_uring::{IoUring, cqueue, opcode, squeue, types};
use riser_memory::{MemSlice, Memory};

use crate::error::{RegisterError, RingError, SubmitError};
use crate::handle::{FileTable, Handle};
use crate::slot::{Kind, Slots, Token};
use crate::waker::Waker;

/// User data of the ring's own cancellations, whose completions are not awaited. No slot has it.
const CANCEL: u64 = 1 << 63;

/// The kernel registers at most this much as one buffer.
const MAX_BUFFER: usize = 1 << 30;

/// Time that a new ring waits for the memory of rings that are gone.
const SETUP_PATIENCE: Duration = Duration::from_millis(500);

/// Time that a dropped ring waits for the kernel to release buffers before it leaks them.
const DROP_PATIENCE: Duration = Duration::from_secs(30);

/// Sizes of a ring, fixed when it is made.
#[derive(Debug, Clone, Copy)]
pub struct RingConfig {
    /// Operations in flight at most, 1 to 32,767. The ring adds one of its own, and the kernel
    /// rounds up to a power of two, so one less than such a power wastes nothing.
    pub capacity: u32,
    /// Pieces of a scatter list at most, after joining neighbours; the kernel's limit is 1,024.
    pub max_slices: usize,
    /// Entries of the table of registered files.
    pub files: u32,
    /// Entries of the table of registered memory; a region takes one per GiB.
    pub memories: u32,
}

impl RingConfig {
    /// The most operations that a ring takes: the kernel's limit less the ring's own.
    pub const MAX_CAPACITY: u32 = 32_767;
}

impl Default for RingConfig {
    fn default() -> Self {
        Self {
            capacity: 511,
            max_slices: 256,
            files: 64,
            memories: 64,
        }
    }
}

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
    pub fd: Option<OwnedFd>,
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

pub(crate) struct Buffer {
    /// Keeps the address range from being unmapped, and mapped again, while it is registered.
    _memory: Memory,
    pub(crate) addr: usize,
    pub(crate) len: usize,
}

/// An `io_uring` and everything in flight on it.
///
/// Order of calls: any number of `submit_*`, then [`reap`](Ring::reap); with nothing left to do,
/// [`park`](Ring::park), then `reap` again.
pub struct Ring {
    uring: IoUring,
    /// Leaked, rather than freed, where the kernel does not release it.
    pub(crate) slots: ManuallyDrop<Slots>,
    pub(crate) files: Arc<FileTable>,
    /// Registered memory by table index.
    pub(crate) buffers: Vec<Buffer>,
    max_buffers: usize,
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
            .field("buffers", &self.buffers.len())
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
        let max = RingConfig::MAX_CAPACITY;
        if config.capacity == 0 || config.capacity > max {
            let asked = config.capacity;
            return Err(RingError::Capacity { asked, max });
        }
        // One slot more than the caller's, for the waker.
        let total = config.capacity + 1;
        let uring =
            build_patiently(total).map_err(|e| RingError::from_setup(e, config.capacity))?;
        // Waiting with a timeout and never dropping completions are the floor we stand on.
        if !uring.params().is_feature_ext_arg() || !uring.params().is_feature_nodrop() {
            return Err(RingError::Missing);
        }
        // Tables of older kernels cannot be sparse; everything works without them, by descriptor
        // and address.
        let files = match uring.submitter().register_files_sparse(config.files) {
            Ok(()) => config.files,
            Err(_) => 0,
        };
        let memories = match uring.submitter().register_buffers_sparse(config.memories) {
            Ok(()) => config.memories as usize,
            Err(_) => 0,
        };
        // The waker's read outlives any call, so its room does too.
        let waker_counter = Memory::new(8)
            .map_err(RingError::Setup)?
            .slice(0..8)
            .expect("a page holds eight bytes");
        let mut ring = Self {
            uring,
            slots: ManuallyDrop::new(Slots::new(total, config.max_slices.clamp(1, 1024))),
            files: Arc::new(FileTable::new(files)),
            buffers: Vec::with_capacity(memories),
            max_buffers: memories,
            waker: Waker::new().map_err(RingError::Setup)?,
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
        let base = memory.addr() as usize;
        if self.buffers.iter().any(|b| b.addr == base) {
            return Ok(());
        }
        // All pieces of a mapping or none: a half that is registered would help no transfer
        // across it.
        if self.buffers.len() + memory.len().div_ceil(MAX_BUFFER) > self.max_buffers {
            return Err(RegisterError::NoRoom);
        }
        // The kernel takes at most 1 GiB in one entry, so a larger mapping is several.
        let mut offset = 0;
        while offset < memory.len() {
            let len = (memory.len() - offset).min(MAX_BUFFER);
            let iov = libc::iovec {
                iov_base: memory.ptr(offset).cast(),
                iov_len: len,
            };
            // SAFETY: the range lies in `memory`, a clone of which is kept until the ring is gone.
            unsafe {
                self.uring.submitter().register_buffers_update(
                    self.buffers.len() as u32,
                    &[iov],
                    None,
                )
            }
            .map_err(RegisterError::Kernel)?;
            self.buffers.push(Buffer {
                _memory: memory.clone(),
                addr: base + offset,
                len,
            });
            offset += len;
        }
        Ok(())
    }

    /// Registers a file. The entry is free again once every clone of the handle is gone.
    ///
    /// # Errors
    /// The file stays usable through [`Handle::new`]; see [`RegisterError`].
    pub fn register_file(&mut self, fd: Arc<OwnedFd>) -> Result<Handle, RegisterError> {
        // Entries whose last handle is gone are taken out first, so that they can be used again.
        self.drop_stale_files();
        let index = self.files.take().ok_or(RegisterError::NoRoom)?;
        match self
            .uring
            .submitter()
            .register_files_update(index, &[fd.as_raw_fd()])
        {
            Ok(_) => Ok(Handle::fixed(fd, self.files.clone(), index)),
            Err(e) => {
                self.files.give_back(index);
                Err(RegisterError::Kernel(e))
            }
        }
    }

    fn drop_stale_files(&mut self) {
        while let Some(index) = self.files.take_stale() {
            // Failing leaves an open file in the table until the entry is used again.
            let _ = self.uring.submitter().register_files_update(index, &[-1]);
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
            self.make_room()?;
            // Its completion is not awaited: what counts is that of the operation that it ends.
            self.push(opcode::AsyncCancel::new(user_data).build(), CANCEL);
        }
        Ok(doomed.len())
    }

    /// Hands queued operations to the kernel.
    ///
    /// # Errors
    /// [`RingError::Enter`]: the ring is of no further use.
    pub fn submit(&mut self) -> Result<(), RingError> {
        self.enter(None).map_err(RingError::Enter)
    }

    /// Hands over what is queued and collects what has finished, without waiting.
    ///
    /// # Errors
    /// [`RingError::Enter`]: the ring is of no further use.
    pub fn reap(&mut self, out: &mut Vec<Completion>) -> Result<Reaped, RingError> {
        let sq = self.uring.submission();
        // With `DEFER_TASKRUN` the kernel posts completions only when its thread enters, and says
        // so in a flag. Without anything to do the look costs no system call.
        let must_enter = !sq.is_empty() || sq.taskrun() || sq.cq_overflow();
        drop(sq);
        if must_enter {
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
        self.enter(Some(timeout)).map_err(RingError::Enter)
    }

    pub(crate) fn prepare(
        &mut self,
        token: Token,
        kind: Kind,
        file: Option<&Handle>,
        slices: &[MemSlice],
    ) -> Result<(u32, u64), SubmitError> {
        // The last slot is the waker's, also while it is not armed.
        if kind != Kind::Waker && self.is_full() {
            return Err(SubmitError::Full);
        }
        self.make_room()?;
        self.slots.prepare(token, kind, file.cloned(), slices)
    }

    /// Makes sure that one entry can be queued.
    fn make_room(&mut self) -> Result<(), SubmitError> {
        if self.uring.submission().is_full() {
            self.enter(None)
                .map_err(|e| SubmitError::Enter(e.raw_os_error().unwrap_or(0)))?;
            // The kernel copies what it takes, so a queue that is still full means that it takes
            // nothing now.
            if self.uring.submission().is_full() {
                return Err(SubmitError::Full);
            }
        }
        Ok(())
    }

    pub(crate) fn push(&mut self, entry: squeue::Entry, user_data: u64) {
        let entry = entry.user_data(user_data);
        // SAFETY: every address in the entry belongs to the busy slot that `user_data` names, which
        // neither changes nor frees it before the last completion. Cancellations hold no address.
        unsafe { self.uring.submission().push(&entry) }.expect("make_room found room");
    }

    fn arm_waker(&mut self) {
        let file = Handle::new(self.waker.counter().clone());
        let counter = [self.waker_counter.clone()];
        // Failing here means a queue that the kernel will not take; `park` tries again and reports.
        if let Ok((index, user_data)) = self.prepare(Token(0), Kind::Waker, Some(&file), &counter) {
            let (iov, count) = self.vectors(index);
            let fd = types::Fd(file.fd().as_raw_fd());
            self.push(opcode::Readv::new(fd, iov, count).build(), user_data);
            self.waker_armed = true;
        }
    }

    /// Collects completions; never enters the kernel.
    fn drain(&mut self, out: &mut Vec<Completion>) -> Reaped {
        let mut reaped = Reaped::default();
        for cqe in self.uring.completion() {
            let user_data = cqe.user_data();
            let Some(busy) = self.slots.busy(user_data) else {
                debug_assert_eq!(user_data, CANCEL, "a completion for no operation");
                continue;
            };
            let more = cqueue::more(cqe.flags());
            match busy.kind {
                Kind::Waker => {
                    // Before the caller looks at its mailboxes: a message that comes after this
                    // wakes again.
                    self.waker.acknowledge();
                    self.waker_armed = false;
                    reaped.woken = true;
                }
                kind => {
                    out.push(Completion {
                        token: busy.token,
                        result: cqe.result(),
                        more,
                        fd: new_socket(kind, cqe.result()),
                    });
                    reaped.completions += 1;
                }
            }
            // The slot is released after the completion was read from it, and only by the last one
            // of an operation.
            if !more {
                self.slots.release(user_data);
            }
        }
        // A wake ends the read, which has to be posted again for the next.
        if !self.waker_armed {
            self.arm_waker();
        }
        reaped
    }

    /// Enters the kernel; with `wait`, until a completion is there or the time in it has passed.
    fn enter(&mut self, wait: Option<Option<Duration>>) -> io::Result<()> {
        let result = match wait {
            None => self.uring.submit(),
            Some(None) => self.uring.submit_and_wait(1),
            Some(Some(timeout)) => {
                let ts = types::Timespec::from(timeout);
                let args = types::SubmitArgs::new().timespec(&ts);
                self.uring.submitter().submit_with_args(1, &args)
            }
        };
        match result {
            Ok(_) => Ok(()),
            // A signal, the end of the wait, or a kernel that wants completions collected first:
            // the caller's loop goes round and comes back with what is still queued.
            Err(e)
                if matches!(
                    e.raw_os_error(),
                    Some(libc::EINTR | libc::ETIME | libc::EBUSY | libc::EAGAIN)
                ) =>
            {
                Ok(())
            }
            Err(e) => Err(e),
        }
    }

    /// Cancels everything and waits for the kernel to release the memory; false where it does not.
    fn quiesce(&mut self) -> bool {
        let deadline = Instant::now() + DROP_PATIENCE;
        while self.slots.in_flight() > 0 {
            // In each round, since an operation that had not begun may have missed the first
            // cancellation.
            let doomed: Vec<u64> = self.slots.all().collect();
            for user_data in doomed {
                if Instant::now() > deadline || self.make_room().is_err() {
                    return false;
                }
                self.push(opcode::AsyncCancel::new(user_data).build(), CANCEL);
            }
            if self.enter(Some(Some(Duration::from_millis(20)))).is_err() {
                return false;
            }
            for cqe in self.uring.completion() {
                let user_data = cqe.user_data();
                if let Some(busy) = self.slots.busy(user_data) {
                    // A socket that was accepted while the ring is dropped has no owner, and
                    // closes.
                    drop(new_socket(busy.kind, cqe.result()));
                    if !cqueue::more(cqe.flags()) {
                        self.slots.release(user_data);
                    }
                }
            }
        }
        true
    }
}

impl Drop for Ring {
    fn drop(&mut self) {
        if self.quiesce() {
            // The kernel takes a closed ring apart later, on a thread of its own. Files and memory
            // are released now, so that a file's lock ends with its last handle.
            let _ = self.uring.submitter().unregister_files();
            let _ = self.uring.submitter().unregister_buffers();
            // SAFETY: dropped once, here; nothing uses the slots afterwards.
            unsafe { ManuallyDrop::drop(&mut self.slots) };
        } else {
            // The kernel may still write: losing the memory is the price of never corrupting it.
            mem::take(&mut self.buffers)
                .into_iter()
                .for_each(mem::forget);
        }
    }
}

/// The socket that an accept made.
fn new_socket(kind: Kind, result: i32) -> Option<OwnedFd> {
    (kind == Kind::Accept && result >= 0).then(|| {
        // SAFETY: a successful accept returns a new descriptor, and its one completion is seen
        // once.
        unsafe { OwnedFd::from_raw_fd(result) }
    })
}

/// Sets up the queues; where memory is short, waits for what rings that are gone still hold.
///
/// The kernel charges rings to the user's `RLIMIT_MEMLOCK`, and takes a closed one apart a moment
/// after its descriptor or its process is gone.
fn build_patiently(entries: u32) -> io::Result<IoUring> {
    let deadline = Instant::now() + SETUP_PATIENCE;
    loop {
        match build(entries) {
            Err(e) if e.raw_os_error() == Some(libc::ENOMEM) && Instant::now() < deadline => {
                std::thread::sleep(SETUP_PATIENCE / 50);
            }
            // Anything but a lack of memory does not mend by waiting.
            other => return other,
        }
    }
}

/// Sets up the queues with the best mode the kernel knows.
fn build(entries: u32) -> io::Result<IoUring> {
    // Twice the submissions: polls complete more than once.
    let cq = entries.next_power_of_two() * 2;
    let newer = IoUring::builder()
        .setup_cqsize(cq)
        .setup_submit_all()
        .setup_single_issuer()
        .setup_defer_taskrun()
        .setup_taskrun_flag()
        .build(entries);
    match newer {
        // An old kernel refuses flags that it does not know; without them it takes locks that are
        // not needed.
        Err(e) if e.raw_os_error() == Some(libc::EINVAL) => {
            IoUring::builder().setup_cqsize(cq).build(entries)
        }
        other => other,
    }
}

#[cfg(test)]
#[path = "ring_tests.rs"]
mod tests;
