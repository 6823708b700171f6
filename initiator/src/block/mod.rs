//! The asynchronous block device that every export needs, and its surroundings.
//!
//! - [`BlockDevice`]: the trait. Offsets and lengths are whole logical blocks; the caller keeps
//!   within the limits of [`Geometry`]. A remote logical unit implements it, and so does
//!   [`MemoryDevice`], with which exports are tried and tested.
//! - [`Buffer`]: memory for one transfer, given by the device, so that it may come from memory
//!   that a NIC knows.
//! - [`ByteDevice`]: serves requests of any byte offset and length on top of a block device.
//! - [`Service`]: a client's connection, or a queue of the kernel's, that a device may serve on its
//!   own thread.
//! - [`Workload`]: a load that a device may run on its own thread; [`drive`] runs it in any case.
//! - [`task`]: the executor that exports run requests on: the thread that completes an operation
//!   continues the request, without waking another thread.
//!
//! # Invariants
//! Buffers belong to the device while an operation on them runs: they are moved into the call and
//! come back with its result.
//!
//! Not here: queue-depth limits. The server that accepts requests from a peer bounds them.

mod bell;
mod buffer;
mod bytes;
mod ending;
mod error;
mod lock;
mod memory;
mod service;
pub mod task;
mod tasks;
mod workload;

use std::future::{Future, poll_fn};
use std::ops::Range;
use std::task::{Poll, Waker};

pub(crate) use bell::Bell;
pub use buffer::{Buffer, BufferWaiters};
pub use bytes::{ByteDevice, Span};
pub(crate) use ending::{Ending, Outcome};
pub use error::BlockError;
pub use lock::{RangeGuard, RangeLocks};
pub use memory::MemoryDevice;
pub(crate) use service::{Looks, Services};
pub use service::{Service, Turn, serve};
pub use tasks::drive;
pub use workload::{Completion, Operation, Submissions, Workload};

/// Largest transfer of one operation, in bytes, even if a target would take more.
pub(crate) const MAX_TRANSFER: u32 = 4 << 20;

/// Size and limits of a block device. All sizes are bytes and multiples of `block_size`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Geometry {
    /// Size of a logical block: a power of two from 512 on.
    pub block_size: u32,
    /// Size of a physical block; smaller or unaligned writes may cost a read.
    pub physical_block_size: u32,
    /// Size of the device.
    pub capacity: u64,
    /// Most that one read or write transfers.
    pub max_transfer: u32,
    /// Longest read or write that is worth making in one piece: a hint for callers that split requests.
    pub optimal_transfer: u32,
    /// Most that one discard may cover; 0 where the device cannot discard.
    pub max_discard: u64,
    /// Most that one write-zeroes may cover; 0 where the device cannot.
    pub max_write_zeroes: u64,
    /// [`BlockDevice::status`] distinguishes holes and data.
    pub reports_status: bool,
    /// The device refuses writes.
    pub read_only: bool,
    /// A write may be in a volatile cache until a flush.
    pub volatile_cache: bool,
    /// A flush reaches the device. Where not, it ends at once, without an effect.
    pub flushes: bool,
    /// A write to stable storage is one: the device has that form of it, or a flush follows. Where
    /// not, it is a write like any other.
    pub stable_writes: bool,
}

impl Geometry {
    /// Length of the transfers that a longer request is split into.
    #[must_use]
    pub fn split_len(&self) -> u32 {
        self.optimal_transfer.min(self.max_transfer)
    }

    /// Returns whether `len` bytes from `offset` on lie within the device.
    #[must_use]
    pub fn contains(&self, offset: u64, len: u64) -> bool {
        offset
            .checked_add(len)
            .is_some_and(|end| end <= self.capacity)
    }
}

/// Treatment of the space behind the blocks that are zeroed, durability of the zeroes, and their
/// cost.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ZeroOptions {
    /// The device may deallocate the blocks.
    pub may_unmap: bool,
    /// Done only when the zeroes are on stable storage.
    pub fua: bool,
    /// [`BlockError::Unsupported`] where the zeroes would have to be written as data.
    pub fast: bool,
}

/// Allocation of a run of blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ExtentKind {
    /// Data, or nothing better is known.
    Data,
    /// Not allocated; reads as zeroes.
    Hole,
    /// Allocated, and known to read as zeroes.
    Zero,
}

/// A run of blocks of one kind.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extent {
    /// Length in bytes: whole blocks, never 0.
    pub len: u64,
    /// Allocation of the blocks.
    pub kind: ExtentKind,
}

/// A disk with many operations in flight, in any order.
///
/// Division of checks: the caller keeps offsets, lengths and buffers within [`Geometry`] and on
/// block boundaries; a device may assert it. Overlapping operations in flight have no order among
/// them.
pub trait BlockDevice: Send + Sync + 'static {
    /// Size and limits. They stay the same for the life of the device.
    fn geometry(&self) -> &Geometry;

    /// A buffer of `len` bytes, at most `max_transfer`, or `None` while the device has none free;
    /// one that is dropped may serve the next call.
    fn try_buffer(&self, len: usize) -> Option<Buffer>;

    /// Bytes of all the buffers that may be out at once.
    fn buffer_bytes(&self) -> u64;

    /// Wakes `waker` once, when a buffer may have become free. The caller tries again after
    /// registering, since the last buffer may have come back in between.
    fn wake_when_free(&self, waker: &Waker);

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

    /// Serves a client on the device's own thread, until that is over.
    ///
    /// # Errors
    /// Gives it back where the device has no thread, or none any more.
    fn host(&self, service: Box<dyn Service>) -> Result<(), Box<dyn Service>> {
        Err(service)
    }

    /// Runs a workload on the device's own thread, until that is over. If the device ends first,
    /// the workload is dropped.
    ///
    /// # Errors
    /// Gives it back where the device has no thread, or none any more.
    fn drive(&self, workload: Box<dyn Workload>) -> Result<(), Box<dyn Workload>> {
        Err(workload)
    }

    /// Fills the whole buffer from `offset` on.
    fn read(
        &self,
        offset: u64,
        buffer: Buffer,
    ) -> impl Future<Output = Result<Buffer, BlockError>> + Send;

    /// Writes the whole buffer to `offset`; with `fua`, to stable storage.
    fn write(
        &self,
        offset: u64,
        buffer: Buffer,
        fua: bool,
    ) -> impl Future<Output = Result<Buffer, BlockError>> + Send;

    /// Puts every write that is done already onto stable storage, also those of others.
    fn flush(&self) -> impl Future<Output = Result<(), BlockError>> + Send;

    /// Reports that the contents are not needed any longer; they read as anything afterwards.
    fn discard(&self, range: Range<u64>) -> impl Future<Output = Result<(), BlockError>> + Send;

    /// Makes the range read as zeroes, without a buffer of those that [`Self::try_buffer`] gives:
    /// a caller may hold a lock that who has them waits for.
    fn write_zeroes(
        &self,
        range: Range<u64>,
        options: ZeroOptions,
    ) -> impl Future<Output = Result<(), BlockError>> + Send;

    /// Allocation of the range, from its start on: at least one extent, perhaps fewer than the
    /// range has, never beyond it.
    fn status(
        &self,
        range: Range<u64>,
    ) -> impl Future<Output = Result<Vec<Extent>, BlockError>> + Send;
}
