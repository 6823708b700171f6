//! File operations on the disk thread.

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::time::{Duration, Instant};

use riser_block::poll_fds::{PollInterest, PollInterests};
use riser_block::{BlockError, Buffer, CommandKind};
use riser_file::{Done, Driver, DriverConfig, Failure, StoreId};
use riser_reactor::{Completion, Ring, RingConfig, RingError, Waker};
use slab::Slab;

use super::local::{LocalFile, block_error};
use crate::backend::Backend;
use crate::operation::Operation;

/// Max number of operations in flight; if there are more, they are queued. This is one less than a
/// power of two, because we need an entry for the ring's waker.
const CAPACITY: usize = 1023;

/// Backend for file operations.
pub(super) struct FileBackend {
    ring: Ring,
    /// Becomes readable when there may be completions.
    event: OwnedFd,
    /// Used by the driver. The ring's waker doesn't work here: it uses a ring operation, and its
    /// completion may not signal `event`.
    waker: Waker,
    driver: Driver<LocalFile>,
    file: StoreId,
    /// Operations of the driver.
    in_flight: Slab<Operation>,
    waiting: VecDeque<Operation>,
    completions: Vec<Completion>,
    /// Set if the ring failed; returned for all new operations.
    failed: Option<BlockError>,
    is_closing: bool,
}

impl FileBackend {
    /// Creates the ring. Must be called on the thread that will use it.
    pub(super) fn new(file: LocalFile) -> io::Result<Self> {
        let config = RingConfig {
            capacity: CAPACITY as u32,
            max_slices: 16,
            files: 1,
            memories: 0,
        };
        let mut ring = Ring::new(config).map_err(io::Error::other)?;
        let event = ring.event_fd()?;
        let waker = Waker::detached()?;
        let config = DriverConfig {
            depth: CAPACITY,
            ..DriverConfig::default()
        };
        let mut driver = Driver::new(waker.clone(), &mut ring, Instant::now(), config)?;
        Ok(Self {
            file: driver.attach(&mut ring, file),
            ring,
            event,
            waker,
            driver,
            in_flight: Slab::with_capacity(64),
            waiting: VecDeque::new(),
            completions: Vec::new(),
            failed: None,
            is_closing: false,
        })
    }

    fn start_operation(&mut self, operation: Operation) {
        let key = self.in_flight.insert(operation);
        self.submit_to_driver(key);
    }

    fn submit_to_driver(&mut self, key: usize) {
        let Operation {
            mut command,
            ref buffer,
            ..
        } = self.in_flight[key];
        let is_device = self.driver.store(self.file).file.device.is_some();
        match &mut command.kind {
            // A device can discard without zeroes, but a hole in a file is always zero.
            CommandKind::Discard { zeroes } => *zeroes = !is_device,
            // The disk flushes after this.
            CommandKind::WriteZeroes { .. } => command.fua = false,
            _ => {}
        }
        let memory = buffer.as_ref().map(Buffer::slice);
        let (data, user) = (memory.map_or(&[][..], std::slice::from_ref), key as u64);
        let submitted = self
            .driver
            .submit(&mut self.ring, self.file, command, data, user);
        submitted.expect("it has room for as many operations as there are in flight");
    }

    /// Completes all operations with a result. Returns whether there were any.
    fn complete_operations(&mut self) -> bool {
        let mut any = false;
        while let Some(Done { user, result }) = self.driver.poll_done(&mut self.ring) {
            any = true;
            let key = user as usize;
            let is_passing = matches!(result, Err((Failure::Errno(libc::EINTR | libc::EAGAIN), _)));
            // The same operation might succeed if it is retried. A flush can't be retried, because
            // an error is only reported once.
            if is_passing && self.in_flight[key].command.kind != CommandKind::Flush {
                self.submit_to_driver(key);
                continue;
            }
            let operation = self.in_flight.remove(key);
            operation.complete(result.map_err(block_error));
        }
        any
    }

    /// The ring can't be used anymore.
    fn fail(&mut self, error: &RingError) {
        let error = BlockError::Io(error.to_string());
        tracing::error!(%error, "the ring of a disk has failed");
        self.failed = Some(error.clone());
        let mut all: Vec<_> = self.in_flight.drain().collect();
        // The kernel may still use this memory. It is kept mapped by the ring's handles, but we
        // must not reuse the buffers.
        all.iter_mut()
            .for_each(|operation| std::mem::forget(operation.buffer.take()));
        all.extend(self.waiting.drain(..));
        for operation in all {
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
        // This only enters the kernel if there is something to submit, or to collect.
        if self.failed.is_none()
            && let Err(error) = self.ring.reap(&mut self.completions)
        {
            self.fail(&error);
        }
    }

    fn complete(&mut self, now: Instant) -> bool {
        if self.failed.is_some() {
            return false;
        }
        self.driver.begin_round(now);
        let mut completions = std::mem::take(&mut self.completions);
        let reaped = self.ring.reap(&mut completions);
        let mut worked = !completions.is_empty();
        for completion in completions.drain(..) {
            self.driver.handle_completion(&mut self.ring, &completion);
        }
        self.completions = completions;
        worked |= self.complete_operations();
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
        self.waker.clear();
        let has_results = self.complete_operations();
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
            out.extend(self.waker.descriptor().map(PollInterest::reading));
        }
    }

    fn deadline(&self) -> Option<Instant> {
        self.driver.poll_deadline()
    }

    fn close(&mut self) {
        self.is_closing = true;
    }

    fn is_over(&self) -> bool {
        self.is_closing && self.in_flight.is_empty() && self.waiting.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use riser_block::Command;
    use riser_block::oneshot::oneshot;
    use riser_block::task::block_on;
    use riser_file::{Device, OpenFile, Storage};
    use riser_testkit::eventually;

    use super::*;
    use crate::operation::{Done, Ended};

    const PATIENCE: Duration = Duration::from_secs(60);

    fn file(device: Option<Device>) -> LocalFile {
        let file = rustix::fs::memfd_create("disk", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        rustix::fs::ftruncate(&file, 4096).unwrap();
        LocalFile::new(OpenFile::new(file.into(), None, device), 512)
    }

    fn backend() -> FileBackend {
        FileBackend::new(file(None)).unwrap()
    }

    fn submit(
        backend: &mut FileBackend,
        kind: CommandKind,
    ) -> impl Future<Output = Option<Ended>> + use<> {
        let (done, ended) = oneshot();
        let operation = Operation {
            command: Command::new(kind, 0, 4096),
            buffer: None,
            done: Done::Task(done),
        };
        backend.submit(operation, Instant::now());
        ended
    }

    fn finish(
        backend: &mut FileBackend,
        ended: impl Future<Output = Option<Ended>>,
    ) -> Result<(), BlockError> {
        eventually("the end of all", PATIENCE, || {
            backend.flush(Instant::now());
            backend.complete(Instant::now());
            backend.in_flight.is_empty()
        });
        block_on(ended).expect("response").result.map(drop)
    }

    #[test]
    fn failed_flush_fails_all_later_flushes() {
        let mut file = file(None);
        for errno in [libc::EIO, libc::ENOSPC] {
            file.on_flush_failed(errno, Instant::now());
        }
        let mut backend = FileBackend::new(file).unwrap();
        for _ in 0..2 {
            let ended = submit(&mut backend, CommandKind::Flush);
            let result = finish(&mut backend, ended);
            assert!(matches!(result, Err(BlockError::Io(_))), "{result:?}");
        }
    }

    #[test]
    fn flushes_during_flush_share_next_one() {
        let mut backend = backend();
        let all = [(); 4].map(|()| submit(&mut backend, CommandKind::Flush));
        assert_eq!(backend.ring.in_flight(), 1);
        for ended in all {
            finish(&mut backend, ended).unwrap();
        }
    }

    #[test]
    fn fast_zeroes_never_fall_back_on_devices() {
        let device = Device {
            logical_block: 512,
            can_zero: false,
            ..Device::default()
        };
        let mut backend = FileBackend::new(file(Some(device))).unwrap();
        for (unmap, fast) in [(false, true), (true, true), (true, false)] {
            let ended = submit(&mut backend, CommandKind::WriteZeroes { unmap, fast });
            let expected = match fast {
                true => Err(BlockError::Unsupported),
                false => Ok(()),
            };
            assert_eq!(finish(&mut backend, ended), expected);
        }
    }

    #[test]
    fn helper_thread_wakes_driver() {
        let mut backend = backend();
        for _ in 0..200 {
            let ended = submit(&mut backend, CommandKind::Status);
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
            finish(&mut backend, ended).unwrap();
        }
    }
}
