//! Async block devices, and the code to implement, serve and load them.
//!
//! - [`BlockDevice`]: the trait. All offsets and lengths must be aligned to logical blocks, and the
//!   caller must check the limits in [`Geometry`]. It is implemented by remote logical units and by
//!   [`MemoryDevice`], which is used to test the exports.
//! - [`Buffer`]: transfer buffer. It is allocated by the device, because the memory may need to be
//!   registered with a NIC. [`BufferPool`]: pool of buffers in a single mapping.
//! - [`ByteDevice`]: adds support for requests with any byte offset and length.
//! - [`Service`]: client connection or kernel queue that can be served on the device thread.
//! - [`Command`]: an operation without its data, as executed by the backend of a device.
//! - [`Workload`]: I/O load that can be run on the device thread; see [`drive`] if there may be no
//!   thread.
//! - [`FlushQueue`], [`FlushRecord`], [`FlushDescriptor`], [`FlushChecks`]: the flush protocol of a
//!   file, without I/O.
//! - [`task`]: executor used by exports for their requests: the thread that completes an operation
//!   also continues the request, so there is no thread switch.
//! - [`Mailbox`], [`mod@oneshot`], [`poll_fds`]: messages to a device thread, its results, and its
//!   sleep.
//!
//! # Invariants
//! During an operation, the buffer is owned by the device: it is moved into the call and returned
//! with the result.
//!
//! This crate doesn't limit the queue depth, that's up to the server that accepts the requests.

mod buffer;
mod bytes;
mod command;
mod error;
mod flush;
mod lock;
mod losses;
mod mailbox;
mod memory;
pub mod oneshot;
pub mod poll_fds;
mod pool;
mod service;
pub mod task;
mod tasks;
mod workload;

use std::future::{Future, poll_fn};
use std::ops::Range;
use std::task::{Poll, Waker};

pub use buffer::{Buffer, BufferWaiters, SharedBuffer};
pub use bytes::{ByteDevice, Span};
pub use command::{Command, CommandKind};
pub use error::BlockError;
pub use flush::{FlushChecks, FlushDescriptor, FlushQueue, FlushRecord, FlushState};
pub use lock::{RangeGuard, RangeLocks};
pub use losses::LossCursor;
pub use mailbox::Mailbox;
pub use memory::MemoryDevice;
pub use pool::{BufferPool, TakeBuffer};
pub use service::{Service, ServiceStatus, Services, serve};
pub use tasks::drive;
pub use workload::{Completion, Operation, Submissions, Workload};

/// Max size of a single transfer in bytes, even if the target supports more.
pub const MAX_TRANSFER: u32 = 4 << 20;

/// Size and limits of a block device. All sizes are in bytes, and must be a multiple of
/// `block_size`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Geometry {
    /// Logical block size: a power of two of at least 512.
    pub block_size: u32,
    /// Physical block size; smaller or unaligned writes may require an additional read.
    pub physical_block_size: u32,
    /// Device size.
    pub capacity: u64,
    /// Max size of a read or write.
    pub max_transfer: u32,
    /// Optimal size of a read or write, used as a hint when splitting requests.
    pub optimal_transfer: u32,
    /// Max size of a discard; 0 if not supported.
    pub max_discard: u64,
    /// Max size of a write-zeroes; 0 if not supported.
    pub max_write_zeroes: u64,
    /// Set if [`BlockDevice::status`] can distinguish holes and data.
    pub reports_status: bool,
    /// The device is read-only.
    pub read_only: bool,
    /// A write may be stored in a volatile cache until the next flush.
    pub volatile_cache: bool,
    /// Flushes are sent to the device. If not set, a flush returns immediately and does nothing.
    pub flushes: bool,
    /// FUA is supported, either directly or by using a flush after the write. If not set, FUA is
    /// ignored.
    pub stable_writes: bool,
}

impl Geometry {
    /// Transfer size used to split large requests.
    #[must_use]
    pub fn split_len(&self) -> u32 {
        self.optimal_transfer.min(self.max_transfer)
    }

    /// Returns whether `len` bytes at `offset` are within the device.
    #[must_use]
    pub fn contains(&self, offset: u64, len: u64) -> bool {
        offset
            .checked_add(len)
            .is_some_and(|end| end <= self.capacity)
    }
}

/// Options for zeroing blocks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ZeroOptions {
    /// The device can deallocate the blocks.
    pub may_unmap: bool,
    /// The zeroes must be on stable storage before completion.
    pub fua: bool,
    /// Return [`BlockError::Unsupported`] if the zeroes would have to be written as data.
    pub fast: bool,
}

/// Allocation status.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ExtentKind {
    /// Data, or unknown.
    Data,
    /// Not allocated; will be read as zeroes.
    Hole,
    /// Allocated, and known to contain zeroes.
    Zero,
}

/// Range of blocks with the same status.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extent {
    /// Length in bytes: a multiple of the block size, never 0.
    pub len: u64,
    /// Allocation status of these blocks.
    pub kind: ExtentKind,
}

/// Disk with support for many operations in flight, in any order.
///
/// The caller must check that offsets, lengths and buffers are aligned to blocks and don't exceed
/// the limits in [`Geometry`]; a device may assert this. There is no guaranteed order for
/// overlapping operations in flight.
pub trait BlockDevice: Send + Sync + 'static {
    /// Size and limits. These values never change.
    fn geometry(&self) -> &Geometry;

    /// Allocates a buffer of `len` bytes, up to `max_transfer`. Returns `None` if there is
    /// currently no free buffer; try again when a buffer has been dropped.
    fn try_buffer(&self, len: usize) -> Option<Buffer>;

    /// Total size of all buffers in bytes.
    fn buffer_bytes(&self) -> u64;

    /// Calls `waker` once when a buffer may be available. After this, the caller must try again,
    /// because the last buffer may have been released in between.
    fn wake_when_free(&self, waker: &Waker);

    /// Number of times that the device may have lost acknowledged writes. [`Self::flush`] only
    /// reports each loss once; if a server has multiple clients, it can use this counter to notify
    /// all of them.
    fn losses(&self) -> u64 {
        0
    }

    /// Waits for a buffer of `len` bytes.
    fn buffer(&self, len: usize) -> impl Future<Output = Buffer> + Send {
        poll_fn(move |cx| {
            if let Some(buffer) = self.try_buffer(len) {
                return Poll::Ready(buffer);
            }
            self.wake_when_free(cx.waker());
            self.try_buffer(len).map_or(Poll::Pending, Poll::Ready)
        })
    }

    /// Serves a client on the device thread until it is closed.
    ///
    /// # Errors
    /// Returns the service if the device doesn't have a thread, or if the thread has exited.
    fn host(&self, service: Box<dyn Service>) -> Result<(), Box<dyn Service>> {
        Err(service)
    }

    /// Runs a workload on the device thread until it is done. If the device is closed first, the
    /// workload is dropped.
    ///
    /// # Errors
    /// Returns the workload if the device doesn't have a thread, or if the thread has exited.
    fn drive(&self, workload: Box<dyn Workload>) -> Result<(), Box<dyn Workload>> {
        Err(workload)
    }

    /// Reads from `offset` to fill the whole buffer.
    fn read(
        &self,
        offset: u64,
        buffer: Buffer,
    ) -> impl Future<Output = Result<Buffer, BlockError>> + Send;

    /// Writes the whole buffer to `offset`; if `fua` is set, to stable storage.
    fn write(
        &self,
        offset: u64,
        buffer: Buffer,
        fua: bool,
    ) -> impl Future<Output = Result<Buffer, BlockError>> + Send;

    /// Flushes all completed writes to stable storage, including writes from other clients.
    fn flush(&self) -> impl Future<Output = Result<(), BlockError>> + Send;

    /// Discards the contents; the range can return any data after this.
    fn discard(&self, range: Range<u64>) -> impl Future<Output = Result<(), BlockError>> + Send;

    /// Sets the range to zero. This must not use a buffer from [`Self::try_buffer`]: the caller may
    /// hold a lock, and if the current buffer owners wait for this lock, there would be a deadlock.
    fn write_zeroes(
        &self,
        range: Range<u64>,
        options: ZeroOptions,
    ) -> impl Future<Output = Result<(), BlockError>> + Send;

    /// Returns the allocation status of the range, starting at its first byte. There is at least
    /// one extent, and the result may be shorter than the range, but never longer.
    fn status(
        &self,
        range: Range<u64>,
    ) -> impl Future<Output = Result<Vec<Extent>, BlockError>> + Send;
}
