//! [`ThreadDisk`].

use std::fmt;
use std::io;
use std::ops::Range;
use std::task::Waker;

use super::operation::{Command, Ended, Operation};
use super::thread::{Backend, DiskThread};
use crate::block::{
    BlockDevice, BlockError, Buffer, Extent, ExtentKind, Geometry, Service, ZeroOptions,
};
use crate::engine::{BufferPool, oneshot};

/// Memory for buffers, in bytes; only what is used of it takes room.
const POOL: usize = 64 << 20;

/// Largest transfer of one operation, as with logical units.
pub(super) const MAX_TRANSFER: u32 = 4 << 20;

/// Most that one discard or write-zeroes covers.
pub(super) const MAX_RANGE: u64 = 1 << 30;

/// Longest write of zeroes where the disk has no command for them.
const ZERO_PIECE: u64 = 256 << 10;

/// A disk whose operations are carried out by a thread of its own.
pub struct ThreadDisk {
    geometry: Geometry,
    description: String,
    /// A write may ask for stable storage; where not, a flush follows it.
    has_fua: bool,
    pool: BufferPool,
    thread: DiskThread,
}

impl fmt::Debug for ThreadDisk {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ThreadDisk")
            .field("description", &self.description)
            .field("geometry", &self.geometry)
            .finish_non_exhaustive()
    }
}

/// Properties of a disk, and its thread's name.
pub(super) struct Properties {
    pub(super) thread: &'static str,
    pub(super) geometry: Geometry,
    pub(super) description: String,
    pub(super) has_fua: bool,
}

impl ThreadDisk {
    /// Starts the thread, on which `make` makes the backend.
    pub(super) fn start<B: Backend>(
        properties: Properties,
        make: impl FnOnce() -> io::Result<B> + Send + 'static,
    ) -> io::Result<Self> {
        Ok(Self {
            geometry: properties.geometry,
            description: properties.description,
            has_fua: properties.has_fua,
            pool: BufferPool::new(POOL)?,
            thread: DiskThread::start(properties.thread, make)?,
        })
    }

    /// Description of the disk for people.
    #[must_use]
    pub fn description(&self) -> &str {
        &self.description
    }

    /// Ends what is in flight, and the connection or the use of the file. Operations fail from then
    /// on.
    pub fn close(&self) {
        self.thread.close();
    }

    async fn run(&self, command: Command, buffer: Option<Buffer>) -> Ended {
        let (done, ended) = oneshot();
        self.thread.submit(Operation {
            command,
            buffer,
            done,
        });
        ended.await.unwrap_or_else(|| Ended {
            result: Err(BlockError::Disconnected("the disk is closed".into())),
            buffer: None,
        })
    }

    async fn transfer(&self, command: Command, buffer: Buffer) -> Result<Buffer, BlockError> {
        let ended = self.run(command, Some(buffer)).await;
        ended.result?;
        Ok(ended.buffer.expect("a transfer gives its buffer back"))
    }

    async fn change(&self, command: Command) -> Result<(), BlockError> {
        self.run(command, None).await.result.map(drop)
    }

    /// Returns whether a range is whole blocks within the disk.
    fn check(&self, range: &Range<u64>) -> Result<(), BlockError> {
        let block = u64::from(self.geometry.block_size);
        let is_aligned = range.start.is_multiple_of(block) && range.end.is_multiple_of(block);
        let len = range.end.checked_sub(range.start);
        match len {
            Some(len) if is_aligned && self.geometry.contains(range.start, len) => Ok(()),
            _ => Err(BlockError::OutOfRange),
        }
    }

    fn check_transfer(&self, offset: u64, len: usize) -> Result<(), BlockError> {
        if len > self.geometry.max_transfer as usize {
            return Err(BlockError::OutOfRange);
        }
        let end = offset.checked_add(len as u64);
        self.check(&(offset..end.ok_or(BlockError::OutOfRange)?))
    }

    fn check_change(&self, range: &Range<u64>, most: u64) -> Result<(), BlockError> {
        if self.geometry.read_only {
            return Err(BlockError::ReadOnly);
        }
        if most == 0 {
            return Err(BlockError::Unsupported);
        }
        self.check(range)?;
        match range.end - range.start <= most {
            true => Ok(()),
            false => Err(BlockError::OutOfRange),
        }
    }

    /// Writes zeroes as data.
    async fn write_zero_data(&self, range: Range<u64>, fua: bool) -> Result<(), BlockError> {
        let most = ZERO_PIECE.min(self.geometry.max_transfer.into());
        let mut at = range.start;
        while at < range.end {
            let len = (range.end - at).min(most) as usize;
            let buffer = self.pool.take(len).await;
            buffer.slice().fill(0, len, 0);
            let command = Command::Write { offset: at, fua };
            drop(self.transfer(command, buffer).await?);
            at += len as u64;
        }
        Ok(())
    }
}

impl BlockDevice for ThreadDisk {
    fn geometry(&self) -> &Geometry {
        &self.geometry
    }

    fn try_buffer(&self, len: usize) -> Option<Buffer> {
        self.pool.try_take(len)
    }

    fn buffer_bytes(&self) -> u64 {
        self.pool.memory().len() as u64
    }

    fn wake_when_free(&self, waker: &Waker) {
        self.pool.wake_when_free(waker);
    }

    fn buffer(&self, len: usize) -> impl Future<Output = Buffer> + Send {
        self.pool.take(len)
    }

    fn host(&self, service: Box<dyn Service>) -> Result<(), Box<dyn Service>> {
        self.thread.host(service)
    }

    async fn read(&self, offset: u64, buffer: Buffer) -> Result<Buffer, BlockError> {
        self.check_transfer(offset, buffer.len())?;
        if buffer.is_empty() {
            return Ok(buffer);
        }
        self.transfer(Command::Read { offset }, buffer).await
    }

    async fn write(&self, offset: u64, buffer: Buffer, fua: bool) -> Result<Buffer, BlockError> {
        if self.geometry.read_only {
            return Err(BlockError::ReadOnly);
        }
        self.check_transfer(offset, buffer.len())?;
        if buffer.is_empty() {
            return Ok(buffer);
        }
        let command = Command::Write {
            offset,
            fua: fua && self.has_fua,
        };
        let buffer = self.transfer(command, buffer).await?;
        if fua && !self.has_fua {
            BlockDevice::flush(self).await?;
        }
        Ok(buffer)
    }

    async fn flush(&self) -> Result<(), BlockError> {
        match self.geometry.volatile_cache {
            true => self.change(Command::Flush).await,
            false => Ok(()),
        }
    }

    async fn discard(&self, range: Range<u64>) -> Result<(), BlockError> {
        self.check_change(&range, self.geometry.max_discard)?;
        if range.is_empty() {
            return Ok(());
        }
        self.change(Command::Discard(range)).await
    }

    async fn write_zeroes(
        &self,
        range: Range<u64>,
        options: ZeroOptions,
    ) -> Result<(), BlockError> {
        self.check_change(&range, self.geometry.max_write_zeroes)?;
        if range.is_empty() {
            return Ok(());
        }
        let fua = options.fua && self.has_fua;
        let command = Command::WriteZeroes(range.clone(), ZeroOptions { fua, ..options });
        match self.change(command).await {
            // The file system or the device below lacks the command, or this form of it.
            Err(BlockError::Unsupported) => self.write_zero_data(range, fua).await?,
            result => result?,
        }
        // A file has no such form of the command. A server without flushes has that form, or
        // nothing that is not stable.
        if options.fua {
            BlockDevice::flush(self).await?;
        }
        Ok(())
    }

    async fn status(&self, range: Range<u64>) -> Result<Vec<Extent>, BlockError> {
        self.check(&range)?;
        if range.is_empty() {
            return Err(BlockError::OutOfRange);
        }
        let whole = |len| {
            let kind = ExtentKind::Data;
            vec![Extent { len, kind }]
        };
        let len = range.end - range.start;
        if !self.geometry.reports_status {
            return Ok(whole(len));
        }
        let end = range.start + len.min(MAX_RANGE);
        let extents = self.run(Command::Status(range.start..end), None).await;
        extents.result
    }
}
