//! The host's `io_uring` under a ring.

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

/// User data of the ring's own cancellations, whose completions are not awaited. No slot has it.
pub(crate) const CANCEL: u64 = 1 << 63;

/// The kernel registers at most this much as one buffer.
const MAX_BUFFER: usize = 1 << 30;

/// Time that a new ring waits for the memory of rings that are gone.
const SETUP_PATIENCE: Duration = Duration::from_millis(500);

struct Buffer {
    /// Keeps the address range from being unmapped, and mapped again, while it is registered.
    memory: Memory,
    addr: usize,
    len: usize,
}

/// An `io_uring` with its registered memory.
///
/// What an operation names is owned by its slot, which its ring neither changes nor frees before
/// the last completion: every method that queues one relies on that.
pub(crate) struct Uring {
    uring: IoUring,
    /// Registered memory by table index.
    buffers: Vec<Buffer>,
    max_buffers: usize,
}

/// Builds an entry for a target of either kind.
macro_rules! entry {
    ($target:expr, |$t:ident| $build:expr) => {
        match $target {
            Target::Fd($t) => $build.build(),
            Target::Fixed($t) => $build.build(),
        }
    };
}

impl Uring {
    /// Sets up queues for `total` operations and tables of the configured sizes; returns the
    /// entries that its table of files has.
    ///
    /// # Errors
    /// Those of [`Ring::new`](crate::Ring::new).
    pub(crate) fn new(config: &RingConfig, total: u32) -> Result<(Self, u32), RingError> {
        let uring =
            build_patiently(total).map_err(|e| RingError::from_setup(e, config.capacity))?;
        // Waiting with a timeout and never dropping completions are the floor we stand on.
        if !uring.params().is_feature_ext_arg() || !uring.params().is_feature_nodrop() {
            return Err(RingError::Missing);
        }
        lend_threads(&uring, config.threads());
        // Tables of older kernels cannot be sparse; everything works without them, by descriptor
        // and address.
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

    /// Has the kernel count completions, also deferred ones, in an eventfd.
    pub(crate) fn register_event_fd(&self, event: &OwnedFd) -> io::Result<()> {
        self.uring.submitter().register_eventfd(event.as_raw_fd())
    }

    /// Operations of files and block devices that may block at once.
    #[cfg(test)]
    pub(crate) fn threads(&self) -> u32 {
        let mut limits = [0, 0];
        let limits_of = self.uring.submitter();
        limits_of.register_iowq_max_workers(&mut limits).unwrap();
        limits[0]
    }

    /// Entries of the table of registered memory that are in use.
    pub(crate) fn buffers(&self) -> usize {
        self.buffers.len()
    }

    /// Registers a mapping, in pieces that the kernel takes.
    pub(crate) fn register_memory(&mut self, memory: &Memory) -> Result<(), RegisterError> {
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
                memory: memory.clone(),
                addr: base + offset,
                len,
            });
            offset += len;
        }
        Ok(())
    }

    /// Puts a file into an entry of the table, or takes it out.
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

    /// Makes sure that one entry can be queued.
    pub(crate) fn make_room(&mut self) -> Result<(), SubmitError> {
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

    /// Queues the operation that a slot was prepared for; [`make_room`](Self::make_room) has found
    /// room.
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
        // The vectors and the header stay where they are until the slot is free: the kernel may
        // read them as long as that.
        let (iov, count) = (slot.iovecs.as_ptr(), slot.iovecs.len() as u32);
        let msg = &raw mut *slot.msg;
        let entry = match op {
            // A transfer of one range of registered memory is a fixed one, which spares the kernel
            // pinning its pages.
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
                // Sign-extended, the bits of a negative number would be other events.
                let events = u32::from(events as u16);
                entry!(target, |t| opcode::PollAdd::new(t, events).multi(is_multi))
            }
            // The peer's address is not asked for, since it would need room that outlives the call.
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
                // With `MSG_WAITALL` io_uring itself goes on after a short send, which saves a
                // completion and a submission for the rest.
                let flags = (libc::MSG_NOSIGNAL | libc::MSG_WAITALL) as u32;
                entry!(target, |t| opcode::SendMsg::new(t, msg.cast_const())
                    .flags(flags))
            }
        };
        self.push(entry, user_data);
    }

    /// Queues the cancellation of an operation; [`make_room`](Self::make_room) has found room. Its
    /// completion is not awaited: what counts is that of the operation that it ends.
    pub(crate) fn cancel(&mut self, user_data: u64) {
        self.push(opcode::AsyncCancel::new(user_data).build(), CANCEL);
    }

    fn push(&mut self, entry: squeue::Entry, user_data: u64) {
        let entry = entry.user_data(user_data);
        // SAFETY: every address in the entry belongs to the busy slot that `user_data` names, which
        // neither changes nor frees it before the last completion. Cancellations hold no address.
        unsafe { self.uring.submission().push(&entry) }.expect("make_room found room");
    }

    /// The one piece of the list, where it is one and lies in registered memory.
    fn buffer_of(&self, iovecs: &[libc::iovec]) -> Option<(*mut u8, u32, u16)> {
        let [iov] = iovecs else {
            return None;
        };
        let start = iov.iov_base.addr();
        // The kernel takes a fixed transfer only within one registered buffer.
        let index = self
            .buffers
            .iter()
            .position(|b| start >= b.addr && start + iov.iov_len <= b.addr + b.len)?;
        debug_assert!(iov.iov_len <= MAX_TRANSFER);
        Some((iov.iov_base.cast(), iov.iov_len as u32, index as u16))
    }

    /// Whether the kernel has to be entered before there are completions to collect.
    pub(crate) fn must_enter(&mut self) -> bool {
        let sq = self.uring.submission();
        // With `DEFER_TASKRUN` the kernel posts completions only when its thread enters, and says
        // so in a flag. Without anything to do the look costs no system call.
        !sq.is_empty() || sq.taskrun() || sq.cq_overflow()
    }

    /// Enters the kernel; with `wait`, until a completion is there or the time in it has passed.
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
                // The kernel has not waited, and is asked again until it has memory.
                if wait.is_some() && e.raw_os_error() == Some(libc::ENOMEM) {
                    std::thread::sleep(Duration::from_millis(1));
                }
                Ok(())
            }
            Err(e) => Err(e),
        }
    }

    /// Calls `f` for each completion; never enters the kernel.
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

    /// Releases registered files and memory, once nothing is in flight. The kernel takes a closed
    /// ring apart later, on a thread of its own, but a file's lock is to end with its last handle.
    pub(crate) fn release(&mut self) {
        let _ = self.uring.submitter().unregister_files();
        let _ = self.uring.submitter().unregister_buffers();
    }

    /// Never unmaps the memory that was registered: the kernel may still write there.
    pub(crate) fn leak_memory(&mut self) {
        let buffers = std::mem::take(&mut self.buffers);
        buffers.into_iter().for_each(|b| std::mem::forget(b.memory));
    }
}

/// Raises the kernel's limit of threads for operations of this ring that block.
fn lend_threads(uring: &IoUring, threads: u32) {
    // Those of sockets and pipes, the second number, have no such bound. Kernels before 5.15 do not
    // know the call: everything works, with the default.
    let submitter = uring.submitter();
    let _ = submitter.register_iowq_max_workers(&mut [threads, 0]);
}

/// Whether the caller's loop may go round, and come back with what is still queued: after a signal,
/// at the end of the wait, where the kernel wants completions collected first, or has no memory at
/// this moment. A worker that ended for that would end the sessions of all initiators.
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
