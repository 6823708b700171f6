//! File operations on the disk thread.

use std::collections::VecDeque;
use std::io;
use std::ops::Range;
use std::os::fd::{AsFd, OwnedFd};
use std::time::{Duration, Instant};

use riser_block::poll_fds::{PollInterest, PollInterests};
use riser_block::{BlockError, Extent, FlushQueue, FlushRecord};
use riser_reactor::{
    Completion, Durability, Fallocate, Handle, Offload, Ring, RingConfig, SubmitError, SyncKind,
    SystemThreads, Token, Waker,
};
use slab::Slab;

use super::sys;
use crate::backend::Backend;
use crate::operation::{Command, Operation};

/// Max number of operations in flight; if there are more, they are queued. This is one less than a
/// power of two, because we need an entry for the ring's waker.
const CAPACITY: usize = 1023;

/// File used by a disk.
pub(super) struct Target {
    pub(super) file: OwnedFd,
    pub(super) is_device: bool,
    /// Reads and writes bypass the page cache and must be aligned to blocks.
    pub(super) is_direct: bool,
    /// Logical block size in bytes.
    pub(super) block: u32,
}

/// Submitted to the ring or the helper thread.
enum InFlight {
    /// Operation, with the number of bytes already transferred, because a completion can be short.
    Operation { operation: Operation, done: usize },
    /// Flush for all operations served by [`FileBackend::flushes`].
    Flush,
}

/// Backend for file operations.
pub(super) struct FileBackend {
    ring: Ring,
    /// Becomes readable when there may be completions.
    event: OwnedFd,
    file: Handle,
    is_device: bool,
    is_direct: bool,
    block: u64,
    in_flight: Slab<InFlight>,
    waiting: VecDeque<Operation>,
    flushes: FlushQueue<Operation>,
    /// Flushes use the descriptor for writes, so a write with FUA may receive the error that we
    /// expect from a flush.
    flush_record: FlushRecord<BlockError>,
    /// Used for system calls that are not supported by the ring.
    helper: Offload<io::Result<Vec<Extent>>>,
    /// Called by the helper thread. The ring's waker doesn't work here: it uses a ring operation,
    /// and its completion may not signal `event`.
    helper_waker: Waker,
    completions: Vec<Completion>,
    /// There are queued operations that have not been submitted to the kernel.
    has_queued: bool,
    /// Set if the ring failed; returned for all new operations.
    failed: Option<BlockError>,
    is_closing: bool,
}

impl FileBackend {
    /// Creates the ring. Must be called on the thread that will use it.
    pub(super) fn new(target: Target) -> io::Result<Self> {
        let config = RingConfig {
            capacity: CAPACITY as u32,
            max_slices: 1,
            files: 1,
            memories: 0,
        };
        let mut ring = Ring::new(config).map_err(io::Error::other)?;
        let event = ring.event_fd()?;
        let file = Handle::from(target.file);
        // Registering the file avoids a lookup for each operation, but it is optional.
        let file = ring.register_file(&file).unwrap_or(file);
        let helper_waker = Waker::detached()?;
        let helper = Offload::new(CAPACITY, helper_waker.clone(), &SystemThreads)?;
        Ok(Self {
            ring,
            event,
            file,
            is_device: target.is_device,
            is_direct: target.is_direct,
            block: target.block.into(),
            in_flight: Slab::with_capacity(64),
            waiting: VecDeque::new(),
            flushes: FlushQueue::default(),
            flush_record: FlushRecord::default(),
            helper,
            helper_waker,
            completions: Vec::new(),
            has_queued: false,
            failed: None,
            is_closing: false,
        })
    }

    fn start_operation(&mut self, operation: Operation) {
        if matches!(operation.command, Command::Flush) {
            if let Some(error) = self.flush_record.failure() {
                return operation.complete(Err(error.clone()));
            }
            self.flushes.join(operation);
            return self.start_flush();
        }
        if let Command::WriteZeroes(_, options) = &operation.command
            && self.is_device
            && options.fast
            && !options.may_unmap
        {
            // If a device doesn't support this command, the kernel will write zeroes instead.
            return operation.complete(Err(BlockError::Unsupported));
        }
        let in_flight = InFlight::Operation { operation, done: 0 };
        let key = self.in_flight.insert(in_flight);
        self.queue(key);
    }

    /// Starts a flush for all waiting operations, unless a flush is in progress.
    fn start_flush(&mut self) {
        if self.flushes.due().is_some() {
            self.flushes.start();
            let key = self.in_flight.insert(InFlight::Flush);
            self.queue(key);
        }
    }

    /// Queues an operation, or the remaining part of it.
    fn queue(&mut self, key: usize) {
        let queued = self.try_queue(key);
        self.has_queued = true;
        if let Err(error) = queued {
            self.complete_in_flight(key, Err(BlockError::Io(error.to_string())));
        }
    }

    fn try_queue(&mut self, key: usize) -> Result<(), SubmitError> {
        let token = Token(key as u64);
        let (ring, file) = (&mut self.ring, &self.file);
        let InFlight::Operation { operation, done } = &self.in_flight[key] else {
            return ring.submit_sync(file, SyncKind::Data, token);
        };
        let at = |offset: &u64| offset + *done as u64;
        let rest = || {
            let memory = operation.memory().slice();
            let rest = memory.slice(*done..memory.len());
            [rest.expect("what is done lies within the buffer")]
        };
        match &operation.command {
            Command::Read { offset } => ring.submit_read(file, at(offset), &rest(), token),
            Command::Write { offset, fua } => {
                let durability = match fua {
                    true => Durability::Durable,
                    false => Durability::Cached,
                };
                ring.submit_write(file, at(offset), &rest(), durability, token)
            }
            Command::Flush => unreachable!("flushes are in the flush queue"),
            Command::Discard(range) if self.is_device => {
                self.offload(key, range.clone(), |file, range, _| {
                    sys::discard(file, range).map(|()| Vec::new())
                });
                Ok(())
            }
            Command::Discard(range) => {
                let len = range.end - range.start;
                ring.submit_fallocate(file, Fallocate::PunchHole, range.start, len, token)
            }
            Command::WriteZeroes(range, options) => {
                let what = match options.may_unmap {
                    true => Fallocate::PunchHole,
                    false => Fallocate::ZeroRange,
                };
                let len = range.end - range.start;
                ring.submit_fallocate(file, what, range.start, len, token)
            }
            Command::Status(range) => {
                self.offload(key, range.clone(), sys::status_of);
                Ok(())
            }
        }
    }

    /// Runs a blocking system call on the helper thread.
    fn offload(
        &mut self,
        key: usize,
        range: Range<u64>,
        call: fn(std::os::fd::BorrowedFd<'_>, &Range<u64>, u64) -> io::Result<Vec<Extent>>,
    ) {
        let (file, block) = (self.file.clone(), self.block);
        let job = move || call(file.fd().expect("a file of the host"), &range, block);
        let submitted = self.helper.submit(Token(key as u64), job);
        submitted.expect("it holds as many as there are operations in flight");
    }

    fn complete_in_flight(&mut self, key: usize, result: Result<Vec<Extent>, BlockError>) {
        let InFlight::Operation { operation, .. } = self.in_flight.remove(key) else {
            return self.complete_flush(result);
        };
        if let (Err(error), Command::Write { fua: true, .. }) = (&result, &operation.command) {
            self.flush_record.record(error.clone());
        }
        operation.complete(result);
    }

    fn complete_flush(&mut self, result: Result<Vec<Extent>, BlockError>) {
        if let Err(error) = &result {
            self.flush_record.record(error.clone());
        }
        // Check this even after a success, because the error may have been reported to a write with
        // FUA while the flush was in flight.
        let result = match self.flush_record.failure() {
            Some(error) => result.and(Err(error.clone())),
            None => result,
        };
        let mut served = self.flushes.complete();
        for operation in served.drain(..) {
            operation.complete(result.clone());
        }
        self.flushes.recycle(served);
        if let Some(error) = self.flush_record.failure() {
            for operation in self.flushes.take_waiting() {
                operation.complete(Err(error.clone()));
            }
        }
        self.start_flush();
    }

    fn on_completion(&mut self, key: usize, outcome: io::Result<u32>) {
        let count = match outcome {
            Ok(count) => count as usize,
            Err(error) if is_passing(&error) => return self.queue(key),
            Err(error) => return self.complete_in_flight(key, Err(block_error(&error))),
        };
        let InFlight::Operation { operation, done } = &mut self.in_flight[key] else {
            return self.complete_in_flight(key, Ok(Vec::new()));
        };
        let (Command::Read { offset } | Command::Write { offset, .. }) = operation.command else {
            return self.complete_in_flight(key, Ok(Vec::new()));
        };
        *done += count;
        let at = offset + *done as u64;
        // A read within a block can only be short at the end of the file, and we can't read past
        // it.
        let is_read = matches!(operation.command, Command::Read { .. });
        let is_end = self.is_direct && is_read && !at.is_multiple_of(self.block);
        match *done == operation.memory().len() {
            true => self.complete_in_flight(key, Ok(Vec::new())),
            // The kernel may return early at the end of a page cache read or because of a signal.
            false if count > 0 && !is_end => self.queue(key),
            false => {
                let what = format!("the file was truncated to {at} bytes");
                self.complete_in_flight(key, Err(BlockError::Io(what)));
            }
        }
    }

    /// Completes operations executed by the helper thread. Returns whether there were any.
    fn complete_offloaded(&mut self) -> bool {
        let mut any = false;
        while let Some((Token(key), result)) = self.helper.poll_result() {
            any = true;
            self.complete_in_flight(key as usize, result.map_err(|error| block_error(&error)));
        }
        any
    }

    /// The ring can't be used anymore.
    fn fail(&mut self, error: &riser_reactor::RingError) {
        let error = BlockError::Io(error.to_string());
        tracing::error!(%error, "the ring of a disk has failed");
        self.failed = Some(error.clone());
        let waiting: Vec<_> = self.waiting.drain(..).collect();
        let in_flight: Vec<_> = self.in_flight.drain().collect();
        let flushes = self.flushes.clear();
        // The kernel may still use this memory. It is kept mapped by the ring's handles, but we
        // must not reuse the buffers.
        for in_flight in in_flight {
            if let InFlight::Operation { mut operation, .. } = in_flight {
                std::mem::forget(operation.buffer.take());
                operation.complete(Err(error.clone()));
            }
        }
        for operation in waiting.into_iter().chain(flushes) {
            operation.complete(Err(error.clone()));
        }
    }
}

impl Backend for FileBackend {
    fn submit(&mut self, operation: Operation, _: Instant) {
        if let Some(error) = &self.failed {
            return operation.complete(Err(error.clone()));
        }
        if self.is_closing {
            let error = BlockError::Disconnected("the disk is closed".into());
            return operation.complete(Err(error));
        }
        if self.waiting.is_empty() && self.in_flight.len() < CAPACITY {
            self.start_operation(operation);
        } else {
            self.waiting.push_back(operation);
        }
    }

    fn flush(&mut self, _: Instant) {
        while self.in_flight.len() < CAPACITY
            && let Some(operation) = self.waiting.pop_front()
        {
            self.start_operation(operation);
        }
        if std::mem::take(&mut self.has_queued)
            && self.failed.is_none()
            && let Err(error) = self.ring.submit()
        {
            self.fail(&error);
        }
    }

    fn complete(&mut self, _: Instant) -> bool {
        if self.failed.is_some() {
            return false;
        }
        let mut completions = std::mem::take(&mut self.completions);
        let reaped = self.ring.reap(&mut completions);
        let mut worked = !completions.is_empty();
        for completion in completions.drain(..) {
            self.on_completion(completion.token.0 as usize, completion.outcome());
        }
        self.completions = completions;
        worked |= self.complete_offloaded();
        if let Err(error) = reaped {
            self.fail(&error);
        }
        worked
    }

    fn prepare_sleep(&mut self) -> bool {
        if self.failed.is_some() {
            return true;
        }
        // New completions after this will prevent the sleep.
        let _ = rustix::io::read(&self.event, &mut [0; 8]);
        self.helper_waker.clear();
        let has_results = self.complete_offloaded();
        // Parking without a timeout lets the kernel run deferred work, which doesn't happen on
        // submit, and it also queues the waker's read again.
        let submitted = self.ring.park(Some(Duration::ZERO));
        match submitted.and_then(|()| self.ring.reap(&mut self.completions)) {
            Ok(_) => self.completions.is_empty() && !has_results,
            Err(error) => {
                self.fail(&error);
                false
            }
        }
    }

    fn add_interests<'a>(&'a self, out: &mut PollInterests<'a>) {
        if self.failed.is_none() {
            out.push(PollInterest::reading(self.event.as_fd()));
            out.extend(self.helper_waker.descriptor().map(PollInterest::reading));
        }
    }

    fn deadline(&self) -> Option<Instant> {
        None
    }

    fn close(&mut self) {
        self.is_closing = true;
    }

    fn is_over(&self) -> bool {
        self.is_closing && self.in_flight.is_empty() && self.waiting.is_empty()
    }
}

/// Returns whether the same operation might succeed if it is retried.
fn is_passing(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::EINTR | libc::EAGAIN))
}

fn block_error(error: &io::Error) -> BlockError {
    match error.raw_os_error() {
        Some(libc::ENOSPC | libc::EDQUOT | libc::EFBIG) => BlockError::NoSpace,
        Some(libc::EOPNOTSUPP | libc::ENOSYS | libc::ENOTTY) => BlockError::Unsupported,
        Some(libc::EROFS | libc::EPERM | libc::EBADF) => BlockError::ReadOnly,
        // Used by the block layer to report bad sectors and checksum errors.
        Some(libc::ENODATA | libc::EILSEQ) => BlockError::Medium(error.to_string()),
        Some(libc::ETIMEDOUT) => BlockError::TimedOut,
        _ => BlockError::Io(error.to_string()),
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use riser_block::oneshot::oneshot;
    use riser_block::task::block_on;
    use riser_block::{Buffer, ZeroOptions};
    use riser_testkit::eventually;

    use super::*;
    use crate::operation::{Done, Ended};

    fn backend() -> FileBackend {
        let file = rustix::fs::memfd_create("disk", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        rustix::fs::ftruncate(&file, 4096).unwrap();
        FileBackend::new(Target {
            file,
            is_device: false,
            is_direct: false,
            block: 512,
        })
        .unwrap()
    }

    fn submit(
        backend: &mut FileBackend,
        command: Command,
        buffer: Option<Buffer>,
    ) -> impl Future<Output = Option<Ended>> + use<> {
        let (done, ended) = oneshot();
        let operation = Operation {
            command,
            buffer,
            done: Done::Task(done),
        };
        backend.submit(operation, Instant::now());
        ended
    }

    fn flush(backend: &mut FileBackend) -> impl Future<Output = Option<Ended>> + use<> {
        submit(backend, Command::Flush, None)
    }

    fn result(ended: impl Future<Output = Option<Ended>>) -> Result<(), BlockError> {
        block_on(ended).expect("an answer").result.map(drop)
    }

    #[test]
    fn failed_flush_fails_all_and_persists() {
        let mut backend = backend();
        let first = flush(&mut backend);
        let second = flush(&mut backend);
        // Linux will only report this once.
        backend.on_completion(0, Err(io::Error::from_raw_os_error(libc::EIO)));
        let third = flush(&mut backend);
        for ended in [result(first), result(second), result(third)] {
            assert!(matches!(ended, Err(BlockError::Io(_))), "{ended:?}");
        }
        assert!(backend.in_flight.is_empty());
    }

    #[test]
    fn fua_error_fails_flush_in_flight() {
        let mut backend = backend();
        let buffer = Buffer::anonymous(512).unwrap();
        let fua = Command::Write {
            offset: 0,
            fua: true,
        };
        let write = submit(&mut backend, fua, Some(buffer));
        let flush = flush(&mut backend);
        backend.on_completion(0, Err(io::Error::from_raw_os_error(libc::EIO)));
        // Linux has already reported the error, so the flush succeeds.
        backend.on_completion(1, Ok(0));
        for ended in [result(write), result(flush)] {
            assert!(matches!(ended, Err(BlockError::Io(_))), "{ended:?}");
        }
    }

    #[test]
    fn flushes_during_flush_share_next_one() {
        let mut backend = backend();
        let all: Vec<_> = (0..4).map(|_| flush(&mut backend)).collect();
        assert_eq!(backend.in_flight.len(), 1);
        backend.flush(Instant::now());
        eventually("the end of all", Duration::from_secs(60), || {
            backend.complete(Instant::now());
            backend.flush(Instant::now());
            backend.in_flight.is_empty()
        });
        for ended in all {
            result(ended).unwrap();
        }
    }

    #[test]
    fn short_direct_read_reports_file_end() {
        let mut backend = backend();
        backend.is_direct = true;
        let read = |backend: &mut FileBackend| {
            let buffer = Buffer::anonymous(4096).unwrap();
            submit(backend, Command::Read { offset: 512 }, Some(buffer))
        };
        let ended = read(&mut backend);
        backend.on_completion(0, Ok(1024));
        assert_eq!(backend.in_flight.len(), 1, "whole blocks: it goes on");
        backend.on_completion(0, Ok(100));
        let error = result(ended).unwrap_err().to_string();
        assert!(error.contains("truncated to 1636 bytes"), "{error}");
        // This limit doesn't apply to the page cache.
        backend.is_direct = false;
        let _ended = read(&mut backend);
        backend.on_completion(0, Ok(100));
        assert_eq!(backend.in_flight.len(), 1);
    }

    #[test]
    fn fast_zeroes_never_fall_back_on_devices() {
        let mut backend = backend();
        let zero = |backend: &mut FileBackend, may_unmap| {
            let options = ZeroOptions {
                may_unmap,
                fua: false,
                fast: true,
            };
            submit(backend, Command::WriteZeroes(0..4096, options), None)
        };
        let _of_a_file = zero(&mut backend, false);
        assert_eq!(
            backend.in_flight.len(),
            1,
            "its file system has no data to write"
        );
        backend.is_device = true;
        let refused = zero(&mut backend, false);
        assert_eq!(backend.in_flight.len(), 1, "the kernel has got it");
        assert_eq!(result(refused), Err(BlockError::Unsupported));
        let _that_unmaps = zero(&mut backend, true);
        assert_eq!(backend.in_flight.len(), 2);
    }

    #[test]
    fn helper_thread_wakes_driver() {
        const PATIENCE: Duration = Duration::from_secs(60);
        let mut backend = backend();
        for _ in 0..200 {
            let ended = submit(&mut backend, Command::Status(0..4096), None);
            backend.flush(Instant::now());
            assert_eq!(backend.deadline(), None, "no timer looks for the result");
            while !backend.in_flight.is_empty() {
                if backend.prepare_sleep() {
                    let mut waited = PollInterests::new();
                    backend.add_interests(&mut waited);
                    let begun = Instant::now();
                    riser_block::poll_fds::wait(waited, Some(PATIENCE));
                    assert!(begun.elapsed() < PATIENCE, "nothing has ended the sleep");
                }
                backend.complete(Instant::now());
            }
            result(ended).unwrap();
        }
    }
}
