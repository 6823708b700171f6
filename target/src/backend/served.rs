//! [`Served`]: a store as used by the driver of a worker.

use std::fmt::Display;
use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

use riser_block::{Command, CommandKind};
use riser_config::FaultOn;
use riser_file::{Failure, Fault, OpenFile, Storage};
use riser_memory::MemSlice;
use riser_reactor::{Handle, Threads, Waker};
use riser_scsi::step::{Allocation, BackendError, BlockOp, StepResult};

use super::errno::from_errno;
use super::execute::Extent;
use super::protected::Layout;
use super::store::Store;
use super::threads::close;
use crate::log::RateLimit;
use crate::warn_limited;

/// Minimum time between log messages about failures of a backend. A command with several
/// operations, such as a write to a full file system, would cause a message for each operation
/// otherwise.
const COMPLAINT_INTERVAL: Duration = Duration::from_secs(10);

/// A store attached to a driver.
#[derive(Debug)]
pub struct Served {
    pub(crate) store: Arc<Store>,
    /// Rate limit for logging failures.
    complaints: RateLimit,
}

impl From<Arc<Store>> for Served {
    fn from(store: Arc<Store>) -> Self {
        let complaints = RateLimit::new(1, COMPLAINT_INTERVAL);
        Self { store, complaints }
    }
}

impl Storage for Served {
    type Result = StepResult;
    type Error = BackendError;
    type Extents = Extent;

    fn result(&self, result: Result<Option<Extent>, BackendError>) -> StepResult {
        let result = match self.store.layout {
            Some(layout) => layout.result_on_unit(result),
            None => result,
        };
        match result {
            Ok(None) => StepResult::Done,
            Ok(Some((allocation, len))) => StepResult::Status { allocation, len },
            Err(error) => StepResult::Failed(error),
        }
    }

    fn error(failure: Failure, offset: u64) -> BackendError {
        match failure {
            Failure::Errno(errno) => from_errno(errno, offset),
            Failure::Truncated => BackendError::Medium {
                offset: Some(offset),
            },
            Failure::Cancelled => BackendError::Aborted,
            Failure::Ring => BackendError::Internal,
        }
    }

    fn file(&self) -> Option<&OpenFile> {
        self.store.open_file()
    }

    fn block_size(&self) -> u32 {
        match self.store.layout {
            Some(layout) => layout.frame() as u32,
            None => self.store.geometry.block_size,
        }
    }

    fn has_write_cache(&self) -> bool {
        self.store.geometry.write_cache
    }

    fn has_other_drivers(&self) -> bool {
        true
    }

    fn threads(&self) -> &dyn Threads {
        self.store.host().threads()
    }

    fn call(file: &Handle, op: &Command, block_size: u32) -> Result<Extent, BackendError> {
        match riser_file::extent(file, op.offset, op.len, block_size) {
            Ok((true, len)) => Ok((Allocation::Mapped, len)),
            Ok((false, len)) => Ok((Allocation::Deallocated, len)),
            Err(error) => {
                let errno = error.raw_os_error().unwrap_or(libc::EIO);
                Err(from_errno(errno, op.offset))
            }
        }
    }

    fn unknown_extents(op: &Command) -> Extent {
        (Allocation::Mapped, op.len)
    }

    fn flush_failure(&self) -> Option<i32> {
        self.store.flush_failure().map(|failure| failure.errno)
    }

    fn flush_clears(&self) -> u64 {
        self.store.flush_clears()
    }

    fn on_flush_failed(&mut self, errno: i32, now: Instant) {
        self.store.on_flush_failed(errno, now);
    }

    /// Closes the files on a separate thread, because the worker has to serve other backends.
    fn release(self, descriptor: Option<Handle>) {
        self.store.release_intents(Instant::now());
        if !self.store.may_hang() {
            return;
        }
        let (host, label) = (Arc::clone(self.store.host()), self.store.label().to_owned());
        close(host.threads(), label, (descriptor, self));
    }

    fn close(&self, descriptor: Handle) {
        self.store.close_descriptor(descriptor);
    }

    /// Logs that a store works again, at most once every ten seconds, with the number of failures
    /// that were not logged.
    fn on_success(&mut self, op: &Command, now: Instant) {
        if self.store.note_success(now, op.kind == CommandKind::Write) {
            let suppressed = self.complaints.take_suppressed();
            let suppressed = (suppressed > 0).then_some(suppressed);
            let backend = self.store.name();
            tracing::info!(backend, suppressed, "backend recovered");
        }
    }

    /// Logs the failure, except that of a flush, which is logged when it is recorded.
    fn on_failure(
        &mut self,
        op: Option<&Command>,
        error: BackendError,
        why: &dyn Display,
        now: Instant,
    ) {
        if self.store.count_error(now, error, why)
            && let Some(op) = op
        {
            let op = &self.on_unit(op);
            let (backend, offset, len) = (self.store.name(), op.offset, op.len);
            let op = name(op);
            warn_limited!(self.complaints, now, backend, op, offset, len, %why, "backend failed");
        }
    }

    fn fault(&self, op: &Command) -> Option<Fault<BackendError>> {
        let faults = self.store.faults.as_ref()?;
        let op = &self.on_unit(op);
        let (delay, error) = faults
            .strike(fault_type(op), op.offset, op.len)
            .unwrap_or_default();
        let error = match self.store.layout {
            Some(layout) => error.map(|error| layout.error_on_medium(error)),
            None => error,
        };
        let most = faults.most();
        Some(Fault { delay, error, most })
    }

    fn holds(&self, op: &Command) -> bool {
        let faults = self.store.faults.as_ref();
        let op = &self.on_unit(op);
        faults.is_some_and(|faults| faults.holds(fault_type(op), op.offset, op.len))
    }

    fn encode(&self, op: &Command, data: &[MemSlice]) {
        if let Some(layout) = self.store.layout
            && op.kind == CommandKind::Write
        {
            layout.invert_tuples(op, data);
        }
    }

    fn decode(&self, op: &Command, data: &[MemSlice]) {
        if let Some(layout) = self.store.layout {
            layout.invert_tuples(op, data);
        }
    }

    fn records_changes(&self) -> bool {
        self.store.intents.is_some()
    }

    fn begin_change(
        &self,
        bytes: Range<u64>,
        waited: Option<u64>,
        waker: impl FnOnce() -> Waker,
        now: Instant,
    ) -> Result<Option<u64>, i32> {
        self.store.begin_change(&bytes, waited, waker, now)
    }

    fn end_change(&self, bytes: Range<u64>, now: Instant) {
        if let Some(intents) = &self.store.intents {
            intents.log.end(&bytes, now);
        }
    }

    fn execute(
        &self,
        op: &Command,
        done: &mut u64,
        data: &[MemSlice],
        window: &mut Vec<MemSlice>,
    ) -> Option<Result<Option<Extent>, BackendError>> {
        let block_size = self.block_size().into();
        self.store
            .medium
            .execute(op, block_size, done, data, window)
    }
}

impl Served {
    /// Returns the frames of the medium, if blocks have protection information.
    pub(crate) fn layout(&self) -> Option<Layout> {
        self.store.layout
    }

    /// Converts an operation of a unit for the driver.
    pub(crate) fn command(&self, op: BlockOp) -> Command {
        match self.store.layout {
            Some(layout) => layout.on_medium(command(op)),
            None => command(op),
        }
    }

    /// Returns the command with the offset and length of the unit.
    fn on_unit(&self, op: &Command) -> Command {
        match self.store.layout {
            Some(layout) => layout.on_unit(op),
            None => *op,
        }
    }
}

/// Converts an operation on the medium for the driver.
pub(crate) fn command(op: BlockOp) -> Command {
    let (kind, offset, len) = match op {
        BlockOp::Read { offset, len, .. } => (CommandKind::Read, offset, len.into()),
        BlockOp::Write { offset, len, .. } => (CommandKind::Write, offset, len.into()),
        BlockOp::Flush { offset, len } => (CommandKind::Flush, offset, len),
        BlockOp::Discard { offset, len } => (CommandKind::Discard { zeroes: true }, offset, len),
        BlockOp::WriteZeroes {
            offset, len, unmap, ..
        } => {
            let fast = false;
            (CommandKind::WriteZeroes { unmap, fast }, offset, len)
        }
        BlockOp::Status { offset, len } => (CommandKind::Status, offset, len),
        BlockOp::ChangeReservations(_) | BlockOp::ChangeProtection(_) => {
            unreachable!("executed by the worker")
        }
    };
    let (buffer_offset, fua) = match op {
        BlockOp::Read {
            buffer_offset, fua, ..
        }
        | BlockOp::Write {
            buffer_offset, fua, ..
        } => (buffer_offset as usize, fua),
        BlockOp::WriteZeroes { fua, .. } => (0, fua),
        _ => (0, false),
    };
    Command {
        kind,
        offset,
        len,
        buffer_offset,
        fua,
    }
}

/// Returns the name of an operation for the log.
fn name(op: &Command) -> &'static str {
    match op.kind {
        CommandKind::Read => "read",
        CommandKind::Write => "write",
        CommandKind::Flush => "flush",
        CommandKind::Discard { .. } => "discard",
        CommandKind::WriteZeroes { .. } => "write zeroes",
        CommandKind::Status => "block status",
    }
}

/// Returns the type of an operation for injected faults.
fn fault_type(op: &Command) -> FaultOn {
    match op.kind {
        CommandKind::Read => FaultOn::Read,
        CommandKind::Write | CommandKind::WriteZeroes { .. } => FaultOn::Write,
        CommandKind::Flush => FaultOn::Flush,
        CommandKind::Discard { .. } => FaultOn::Discard,
        CommandKind::Status => FaultOn::Any,
    }
}
