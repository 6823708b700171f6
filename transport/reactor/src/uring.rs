//! The host's `io_uring`, used by a ring.

#![allow(
    unsafe_code,
    reason = "queueing an operation hands addresses to the kernel; slots keep them valid"
)]

use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::ptr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use io_uring::{IoUring, cqueue, opcode, squeue, types};
use riser_memory::Memory;

use crate::config::RingConfig;
use crate::error::{RegisterError, RingError, SubmitError};
use crate::handle::{FileTable, Handle, Target};
use crate::op::{Cqe, Durability, Fallocate, Op, Receive, SyncKind};
use crate::slot::{MAX_TRANSFER, Slot};

/// User data of the ring's own cancellations, whose completions are ignored. Never used by a slot.
pub(crate) const CANCEL: u64 = 1 << 63;

/// Maximum length of a buffer that the kernel can register.
const MAX_BUFFER: usize = 1 << 30;

/// Time for which a new ring waits for the memory of closed rings.
const SETUP_PATIENCE: Duration = Duration::from_millis(500);

struct Buffer {
    /// Keeps the address range from being unmapped, and mapped again, while it is registered.
    memory: Memory,
    addr: usize,
    len: usize,
}

/// An `io_uring` with its registered memory.
///
/// All resources used by an operation are owned by its slot, which the ring neither changes nor
/// frees before the last completion. Every method that queues an operation relies on this.
pub(crate) struct Uring {
    uring: IoUring,
    /// Registered memory by table index.
    buffers: Vec<Buffer>,
    max_buffers: usize,
}

/// Builds an entry for either kind of target.
macro_rules! entry {
    ($target:expr, |$t:ident| $build:expr) => {
        match $target {
            Target::Fd($t) => $build.build(),
            Target::Fixed($t) => $build.build(),
        }
    };
}

impl Uring {
    /// Sets up queues for `total` operations and tables of the configured sizes. Also returns the
    /// number of entries in its file table.
    ///
    /// # Errors
    /// Returns the errors of [`Ring::new`](crate::Ring::new).
    pub(crate) fn new(config: &RingConfig, total: u32) -> Result<(Self, u32), RingError> {
        let uring =
            build_patiently(total).map_err(|e| RingError::from_setup(e, config.capacity))?;
        // We require timeouts while waiting, and that completions are never dropped.
        if !uring.params().is_feature_ext_arg() || !uring.params().is_feature_nodrop() {
            return Err(RingError::Missing);
        }
        lend_threads(&uring, config.threads());
        // Older kernels do not support sparse tables. Everything works without them, using
        // descriptors and addresses.
        let files = match uring.submitter().register_files_sparse(config.files) {
            Ok(()) => config.files,
            Err(_) => 0,
        };
        let max_buffers = match uring.submitter().register_buffers_sparse(config.memories) {
            Ok(()) => config.memories as usize,
            Err(_) => 0,
        };
        let uring = Self {
            uring,
            buffers: Vec::with_capacity(max_buffers),
            max_buffers,
        };
        Ok((uring, files))
    }

    /// Registers an eventfd that counts all completions, including deferred ones.
    pub(crate) fn register_event_fd(&self, event: &OwnedFd) -> io::Result<()> {
        self.uring.submitter().register_eventfd(event.as_raw_fd())
    }

    /// Returns the maximum number of concurrent blocking operations on files and block devices.
    #[cfg(test)]
    pub(crate) fn threads(&self) -> u32 {
        let mut limits = [0, 0];
        let limits_of = self.uring.submitter();
        limits_of.register_iowq_max_workers(&mut limits).unwrap();
        limits[0]
    }

    /// Returns the number of entries in use in the registered buffer table.
    pub(crate) fn buffers(&self) -> usize {
        self.buffers.len()
    }

    /// Registers a mapping, split into pieces that the kernel supports.
    pub(crate) fn register_memory(&mut self, memory: &Memory) -> Result<(), RegisterError> {
        let base = memory.addr() as usize;
        if self.buffers.iter().any(|b| b.addr == base) {
            return Ok(());
        }
        // Register all pieces of a mapping or none, because a partially registered mapping would
        // not help transfers across the boundary.
        if self.buffers.len() + memory.len().div_ceil(MAX_BUFFER) > self.max_buffers {
            return Err(RegisterError::NoRoom);
        }
        // The kernel's limit is 1 GiB per entry, so a larger mapping needs multiple entries.
        let mut offset = 0;
        while offset < memory.len() {
            let len = (memory.len() - offset).min(MAX_BUFFER);
            let iov = libc::iovec {
                iov_base: memory.ptr(offset).cast(),
                iov_len: len,
            };
            // SAFETY: the range is part of `memory`, a clone of which is kept until the ring is
            // dropped.
            unsafe {
                self.uring.submitter().register_buffers_update(
                    self.buffers.len() as u32,
                    &[iov],
                    None,
                )
            }
            .map_err(RegisterError::Kernel)?;
            self.buffers.push(Buffer {
                memory: memory.clone(),
                addr: base + offset,
                len,
            });
            offset += len;
        }
        Ok(())
    }

    /// Stores a file in an entry of the table, or clears the entry.
    pub(crate) fn update_file(&mut self, index: u32, file: Option<&Handle>) -> io::Result<()> {
        let fd = match file {
            Some(file) => match file.fd() {
                Some(fd) => fd.as_raw_fd(),
                None => return Err(io::Error::from_raw_os_error(libc::EBADF)),
            },
            None => -1,
        };
        let submitter = self.uring.submitter();
        submitter.register_files_update(index, &[fd]).map(drop)
    }

    /// Ensures that one entry can be queued.
    pub(crate) fn make_room(&mut self) -> Result<(), SubmitError> {
        if self.uring.submission().is_full() {
            self.enter(None)
                .map_err(|e| SubmitError::Enter(e.raw_os_error().unwrap_or(0)))?;
            // The kernel copies the entries that it accepts, so a queue that is still full means
            // that the kernel is not accepting any entries now.
            if self.uring.submission().is_full() {
                return Err(SubmitError::Full);
            }
        }
        Ok(())
    }

    /// Queues the operation that a slot was prepared for. [`make_room`](Self::make_room) must have
    /// been called before.
    #[inline(always)]
    #[allow(
        clippy::inline_always,
        reason = "callers name the operation: one arm of the match is left"
    )]
    pub(crate) fn submit(
        &mut self,
        op: Op,
        user_data: u64,
        file: &Handle,
        slot: &mut Slot,
        files: &Arc<FileTable>,
    ) {
        let target = file.target(files);
        // The vectors and the header don't move until the slot is free, because the kernel may read
        // them until then.
        let (iov, count) = (slot.iovecs.as_ptr(), slot.iovecs.len() as u32);
        let msg = &raw mut *slot.msg;
        let entry = match op {
            // If there is only one range and it is registered, we use a fixed transfer, so that the
            // kernel doesn't need to pin its pages.
            Op::Read { offset } => match self.buffer_of(&slot.iovecs) {
                Some((addr, len, buffer)) => {
                    entry!(target, |t| opcode::ReadFixed::new(t, addr, len, buffer)
                        .offset(offset))
                }
                None => entry!(target, |t| opcode::Readv::new(t, iov, count).offset(offset)),
            },
            Op::Write { offset, durability } => {
                let flags = match durability {
                    Durability::Cached => 0,
                    Durability::Durable => libc::RWF_DSYNC,
                };
                match self.buffer_of(&slot.iovecs) {
                    Some((addr, len, buffer)) => {
                        entry!(target, |t| opcode::WriteFixed::new(t, addr, len, buffer)
                            .offset(offset)
                            .rw_flags(flags))
                    }
                    None => entry!(target, |t| opcode::Writev::new(t, iov, count)
                        .offset(offset)
                        .rw_flags(flags)),
                }
            }
            Op::Sync(kind) => {
                let flags = match kind {
                    SyncKind::Data => types::FsyncFlags::DATASYNC,
                    SyncKind::All => types::FsyncFlags::empty(),
                };
                entry!(target, |t| opcode::Fsync::new(t).flags(flags))
            }
            Op::Fallocate { what, offset, len } => {
                entry!(target, |t| opcode::Fallocate::new(t, len)
                    .offset(offset)
                    .mode(mode_of(what)))
            }
            Op::Poll { events, is_multi } => {
                // Sign extension would set additional event bits.
                let events = u32::from(events as u16);
                entry!(target, |t| opcode::PollAdd::new(t, events).multi(is_multi))
            }
            // We don't request the peer's address, because its buffer would have to outlive the
            // call.
            Op::Accept => entry!(target, |t| opcode::Accept::new(
                t,
                ptr::null_mut(),
                ptr::null_mut()
            )
            .flags(libc::SOCK_CLOEXEC)),
            Op::Receive(mode) => {
                let flags = match mode {
                    Receive::Some => 0,
                    Receive::All => libc::MSG_WAITALL,
                };
                entry!(target, |t| opcode::RecvMsg::new(t, msg).flags(flags as u32))
            }
            Op::Send => {
                // With `MSG_WAITALL`, io_uring continues after a short send, which saves a
                // completion and a submission for the remaining bytes.
                let flags = (libc::MSG_NOSIGNAL | libc::MSG_WAITALL) as u32;
                entry!(target, |t| opcode::SendMsg::new(t, msg.cast_const())
                    .flags(flags))
            }
        };
        self.push(entry, user_data);
    }

    /// Queues the cancellation of an operation. [`make_room`](Self::make_room) must have been
    /// called before. The completion of the cancellation is ignored, because the cancelled
    /// operation has its own completion.
    pub(crate) fn cancel(&mut self, user_data: u64) {
        self.push(opcode::AsyncCancel::new(user_data).build(), CANCEL);
    }

    fn push(&mut self, entry: squeue::Entry, user_data: u64) {
        let entry = entry.user_data(user_data);
        // SAFETY: every address in the entry belongs to the busy slot identified by `user_data`,
        // which is neither changed nor freed before the last completion. Cancellations contain no
        // address.
        unsafe { self.uring.submission().push(&entry) }.expect("make_room found room");
    }

    /// Returns the piece if there is only one and it is in registered memory.
    fn buffer_of(&self, iovecs: &[libc::iovec]) -> Option<(*mut u8, u32, u16)> {
        let [iov] = iovecs else {
            return None;
        };
        let start = iov.iov_base.addr();
        // The kernel only supports fixed transfers within a single registered buffer.
        let index = self
            .buffers
            .iter()
            .position(|b| start >= b.addr && start + iov.iov_len <= b.addr + b.len)?;
        debug_assert!(iov.iov_len <= MAX_TRANSFER);
        Some((iov.iov_base.cast(), iov.iov_len as u32, index as u16))
    }

    /// Returns whether the kernel must be entered before completions can be collected.
    pub(crate) fn must_enter(&mut self) -> bool {
        let sq = self.uring.submission();
        // With `DEFER_TASKRUN`, the kernel only posts completions when the thread enters, and
        // indicates this in a flag. If there is nothing to do, checking it costs no system call.
        !sq.is_empty() || sq.taskrun() || sq.cq_overflow()
    }

    /// Enters the kernel. With `wait`, blocks until a completion is available or the timeout
    /// expires.
    pub(crate) fn enter(&mut self, wait: Option<Option<Duration>>) -> io::Result<()> {
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
            Err(e) if passes(&e) => {
                // The kernel did not wait. The caller will retry until memory is available.
                if wait.is_some() && e.raw_os_error() == Some(libc::ENOMEM) {
                    std::thread::sleep(Duration::from_millis(1));
                }
                Ok(())
            }
            Err(e) => Err(e),
        }
    }

    /// Calls `f` for each completion. Never enters the kernel.
    #[inline(always)]
    #[allow(clippy::inline_always, reason = "one loop with what it does")]
    pub(crate) fn for_each_completion(&mut self, mut f: impl FnMut(Cqe)) {
        for cqe in self.uring.completion() {
            f(Cqe {
                user_data: cqe.user_data(),
                result: cqe.result(),
                more: cqueue::more(cqe.flags()),
            });
        }
    }

    /// Releases registered files and memory. Must only be called if there are no operations in
    /// flight. The kernel tears down a closed ring asynchronously, but a file lock must be released
    /// with its last handle.
    pub(crate) fn release(&mut self) {
        let _ = self.uring.submitter().unregister_files();
        let _ = self.uring.submitter().unregister_buffers();
    }

    /// Leaks registered memory, because the kernel may still write to it.
    pub(crate) fn leak_memory(&mut self) {
        let buffers = std::mem::take(&mut self.buffers);
        buffers.into_iter().for_each(|b| std::mem::forget(b.memory));
    }
}

/// Raises the kernel's limit on threads for blocking operations of this ring.
fn lend_threads(uring: &IoUring, threads: u32) {
    // The second number is the limit for sockets and pipes. 0 leaves it at the default, which is
    // much higher. Kernels before 5.15 do not support this call, but everything works without it.
    let submitter = uring.submitter();
    let _ = submitter.register_iowq_max_workers(&mut [threads, 0]);
}

/// Returns whether the error is transient, and the caller should continue and submit queued entries
/// later: after a signal, when the wait has timed out, if the kernel needs completions to be
/// collected first, or if it is currently out of memory. If a worker exited in these cases, the
/// sessions of all initiators would be lost.
fn passes(error: &io::Error) -> bool {
    matches!(
        error.raw_os_error(),
        Some(libc::EINTR | libc::ETIME | libc::EBUSY | libc::EAGAIN | libc::ENOMEM)
    )
}

fn mode_of(what: Fallocate) -> i32 {
    libc::FALLOC_FL_KEEP_SIZE
        | match what {
            Fallocate::Allocate => 0,
            Fallocate::PunchHole => libc::FALLOC_FL_PUNCH_HOLE,
            Fallocate::ZeroRange => libc::FALLOC_FL_ZERO_RANGE,
        }
}

/// Sets up the queues. If there is not enough memory, waits for closed rings to be freed.
///
/// The kernel charges rings to the user's `RLIMIT_MEMLOCK`, and frees a closed ring shortly after
/// its descriptor is closed or its process exits.
fn build_patiently(entries: u32) -> io::Result<IoUring> {
    let deadline = Instant::now() + SETUP_PATIENCE;
    loop {
        match build(entries) {
            Err(e) if e.raw_os_error() == Some(libc::ENOMEM) && Instant::now() < deadline => {
                std::thread::sleep(SETUP_PATIENCE / 50);
            }
            // Waiting only helps if there is not enough memory.
            other => return other,
        }
    }
}

/// Sets up the queues with the best mode that the kernel supports.
fn build(entries: u32) -> io::Result<IoUring> {
    // Twice the number of submissions, because polls complete more than once.
    let cq = entries.next_power_of_two() * 2;
    let newer = IoUring::builder()
        .setup_cqsize(cq)
        .setup_submit_all()
        .setup_single_issuer()
        .setup_defer_taskrun()
        .setup_taskrun_flag()
        .build(entries);
    match newer {
        // Old kernels reject unknown flags. Without the flags, they use locks that we do not need.
        Err(e) if e.raw_os_error() == Some(libc::EINVAL) => {
            IoUring::builder().setup_cqsize(cq).build(entries)
        }
        other => other,
    }
}
