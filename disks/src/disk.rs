//! [`ThreadDisk`].

use std::fmt;
use std::io;
use std::ops::Range;
use std::sync::Arc;
use std::task::Waker;

use riser_block::BufferPool;
use riser_block::oneshot::oneshot;
use riser_block::{
    BlockDevice, BlockError, Buffer, Command, CommandKind, Completion, Extent, ExtentKind,
    Geometry, MAX_TRANSFER, Operation, Service, Workload, ZeroOptions,
};

use super::backend::Backend;
use super::limits::{Limits, Plan};
use super::operation::Ended;
use super::thread::DiskThread;

/// Default memory size for disk buffers, in bytes. The memory is only allocated when it is used.
pub const BUFFERS: u64 = 64 << 20;

/// Max size for a single discard or write-zeroes command.
pub(super) const MAX_RANGE: u64 = 1 << 30;

/// Disk with a dedicated thread that executes the operations.
pub struct ThreadDisk {
    limits: Arc<Limits>,
    description: String,
    pool: BufferPool,
    thread: DiskThread,
}

impl fmt::Debug for ThreadDisk {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ThreadDisk")
            .field("description", &self.description)
            .field("limits", &self.limits)
            .finish_non_exhaustive()
    }
}

/// Disk properties and thread name.
pub(super) struct Properties {
    pub(super) thread: &'static str,
    pub(super) geometry: Geometry,
    pub(super) description: String,
    pub(super) has_fua: bool,
    /// Buffer memory in bytes; should be enough for at least one transfer.
    pub(super) buffers: u64,
}

impl ThreadDisk {
    /// Starts the thread and calls `make` on it to create the backend.
    pub(super) fn start<B: Backend>(
        properties: Properties,
        make: impl FnOnce() -> io::Result<B> + Send + 'static,
    ) -> io::Result<Self> {
        let buffers = properties.buffers.max(MAX_TRANSFER.into());
        let buffers = usize::try_from(buffers).unwrap_or(usize::MAX);
        let limits = Arc::new(Limits {
            geometry: properties.geometry,
            has_fua: properties.has_fua,
        });
        Ok(Self {
            limits: limits.clone(),
            description: properties.description,
            pool: BufferPool::new(buffers)?,
            thread: DiskThread::start(properties.thread, limits, make)?,
        })
    }

    /// Human-readable description of the disk.
    #[must_use]
    pub fn description(&self) -> &str {
        &self.description
    }

    /// Completes operations in flight, then closes the connection or file. New operations will
    /// fail.
    pub fn close(&self) {
        self.thread.close();
    }

    async fn run(&self, command: Command, buffer: Option<Buffer>) -> Ended {
        let (done, ended) = oneshot();
        self.thread.submit(command, buffer, done);
        ended.await.unwrap_or_else(|| Ended {
            result: Err(BlockError::Disconnected("the disk is closed".into())),
            buffer: None,
        })
    }

    /// Executes an operation, followed by a flush if required.
    async fn execute(&self, operation: Operation) -> Completion {
        let Plan {
            command,
            mut buffer,
            then_flush,
        } = self.limits.plan(operation)?;
        let flush = then_flush.then(|| Command::new(CommandKind::Flush, 0, 0));
        for command in command.into_iter().chain(flush) {
            let ended = self.run(command, buffer).await;
            ended.result?;
            buffer = ended.buffer;
        }
        Ok(buffer)
    }

    async fn transfer(&self, operation: Operation) -> Result<Buffer, BlockError> {
        let buffer = self.execute(operation).await?;
        Ok(buffer.expect("a transfer returns its buffer"))
    }

    async fn change(&self, command: Command) -> Result<(), BlockError> {
        self.run(command, None).await.result.map(drop)
    }

    /// Writes zeroes using normal writes.
    async fn write_zero_data(&self, range: Range<u64>, fua: bool) -> Result<(), BlockError> {
        let most = u64::from(self.limits.geometry.split_len());
        let mut at = range.start;
        while at < range.end {
            let buffer = self.pool.zeroes(most.min(range.end - at));
            let len = buffer.len() as u64;
            let write = Operation::Write {
                offset: at,
                buffer,
                fua,
            };
            drop(self.transfer(write).await?);
            at += len;
        }
        Ok(())
    }
}

impl BlockDevice for ThreadDisk {
    fn geometry(&self) -> &Geometry {
        &self.limits.geometry
    }

    fn try_buffer(&self, len: usize) -> Option<Buffer> {
        self.pool.try_take(len)
    }

    fn buffer_bytes(&self) -> u64 {
        self.pool.size() as u64
    }

    fn wake_when_free(&self, waker: &Waker) {
        self.pool.wake_when_free(waker);
    }

    fn buffer(&self, len: usize) -> impl Future<Output = Buffer> + Send {
        self.pool.take_buffer(len)
    }

    fn host(&self, service: Box<dyn Service>) -> Result<(), Box<dyn Service>> {
        self.thread.host(service)
    }

    fn drive(&self, workload: Box<dyn Workload>) -> Result<(), Box<dyn Workload>> {
        self.thread.drive(workload)
    }

    async fn read(&self, offset: u64, buffer: Buffer) -> Result<Buffer, BlockError> {
        self.transfer(Operation::Read { offset, buffer }).await
    }

    async fn write(&self, offset: u64, buffer: Buffer, fua: bool) -> Result<Buffer, BlockError> {
        let write = Operation::Write {
            offset,
            buffer,
            fua,
        };
        self.transfer(write).await
    }

    async fn flush(&self) -> Result<(), BlockError> {
        self.execute(Operation::Flush).await.map(drop)
    }

    async fn discard(&self, range: Range<u64>) -> Result<(), BlockError> {
        let discard = Operation::Discard(range);
        self.execute(discard).await.map(drop)
    }

    async fn write_zeroes(
        &self,
        range: Range<u64>,
        options: ZeroOptions,
    ) -> Result<(), BlockError> {
        let geometry = &self.limits.geometry;
        self.limits
            .check_change(&range, geometry.max_write_zeroes)?;
        if range.is_empty() {
            return Ok(());
        }
        let fua = options.fua && self.limits.has_fua;
        let (unmap, fast) = (options.may_unmap, options.fast);
        let kind = CommandKind::WriteZeroes { unmap, fast };
        let command = Command {
            fua,
            ..Command::new(kind, range.start, range.end - range.start)
        };
        match self.change(command).await {
            // Not supported by the underlying file system or device, at least with these flags.
            Err(BlockError::Unsupported) if !options.fast => {
                self.write_zero_data(range, fua).await?;
            }
            result => result?,
        }
        // There is no FUA flag for this command on files. If a server supports flush, it also
        // supports this flag; otherwise all data is already stable.
        if options.fua {
            BlockDevice::flush(self).await?;
        }
        Ok(())
    }

    async fn status(&self, range: Range<u64>) -> Result<Vec<Extent>, BlockError> {
        self.limits.check(&range)?;
        if range.is_empty() {
            return Err(BlockError::OutOfRange);
        }
        let whole = |len| {
            let kind = ExtentKind::Data;
            vec![Extent { len, kind }]
        };
        let len = range.end - range.start;
        if !self.limits.geometry.reports_status {
            return Ok(whole(len));
        }
        let command = Command::new(CommandKind::Status, range.start, len.min(MAX_RANGE));
        let extents = self.run(command, None).await;
        extents.result
    }
}
