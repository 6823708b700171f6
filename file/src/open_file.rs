//! [`OpenFile`]: a file or block device, shared by the drivers of all threads.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::AtomicUsize;

use riser_block::FlushChecks;
use riser_memory::MappedFile;
use riser_reactor::Handle;
use rustix::fs::{SeekFrom, ioctl_blkpbszget, ioctl_blksszget};

use super::sys::{self, Align};
use super::turns::Turns;

/// An open file or block device.
#[derive(Debug)]
pub struct OpenFile {
    /// Descriptor for reads and writes.
    pub handle: Handle,
    /// Properties of a device.
    pub device: Option<Device>,
    /// Requests that read or change the file using the page cache.
    pub turns: Arc<Turns>,
    /// Alignment, if direct I/O is used.
    pub(super) align: Option<Align>,
    /// The file system is stored in memory.
    pub(super) is_in_memory: bool,
    /// Mapping to read the file without system calls.
    pub(super) mapped: Option<MappedFile>,
    /// Number of long changes to a file in memory that are in a ring. The kernel executes them
    /// sequentially, and deallocates gigabytes in a single call.
    pub(super) changing: AtomicUsize,
    /// Errors of durable writes that are checked by a thread.
    pub flush_checks: FlushChecks,
}

impl OpenFile {
    /// Creates the state of a file, or of a device.
    #[must_use]
    pub fn new(file: File, align: Option<Align>, device: Option<Device>) -> Self {
        // The special file of a device may be stored on a file system in memory.
        let is_in_memory = device.is_none() && sys::is_in_memory(file.as_fd());
        Self {
            is_in_memory,
            mapped: is_in_memory.then(|| sys::map(&file)).flatten(),
            ..Self::simulated(OwnedFd::from(file).into(), align, device)
        }
    }

    /// Same as [`OpenFile::new`], for a disk in memory. Its operations complete asynchronously, as
    /// determined by the simulation.
    #[must_use]
    pub fn simulated(handle: Handle, align: Option<Align>, device: Option<Device>) -> Self {
        Self {
            handle,
            device,
            turns: Arc::default(),
            align,
            is_in_memory: false,
            mapped: None,
            changing: AtomicUsize::new(0),
            flush_checks: FlushChecks::default(),
        }
    }

    /// Sets that blocks are not aligned to pages, so that the kernel may execute other writes between
    /// the parts of a block. Changes of the same bytes therefore wait for each other.
    #[must_use]
    pub fn with_unaligned_blocks(self) -> Self {
        Self {
            turns: Arc::new(Turns::with_exclusive_changes()),
            ..self
        }
    }

    /// Opens another descriptor. This may block if the file system does not respond.
    ///
    /// # Errors
    /// Returns the error of `open(2)`.
    pub fn reopen(&self) -> io::Result<Handle> {
        sys::reopen(&self.handle)
    }

    /// Returns the minimum size for zeroing and discarding, in bytes. Ranges of a file do not have
    /// to be aligned.
    pub(super) fn unit(&self) -> u64 {
        let device = self.device.as_ref();
        device.map_or(1, |device| device.logical_block.max(1).into())
    }

    /// Returns whether reads never return a block with a mix of old and new data. Disks do not
    /// split their own blocks, but the page cache does, and file systems may use it for direct I/O
    /// as well.
    pub(super) fn keeps_blocks_whole(&self, block_size: u32) -> bool {
        let is_direct = self.device.is_some() && self.align.is_some();
        is_direct && u64::from(block_size) <= self.unit()
    }
}

/// Properties of a block device.
#[derive(Debug, Clone, Copy, Default)]
pub struct Device {
    /// Size in bytes.
    pub size: u64,
    /// Logical block size in bytes, the minimum size for zeroing and discarding.
    pub logical_block: u32,
    /// Physical block size in bytes.
    pub physical_block: u32,
    /// The device can discard and zero ranges. Otherwise the kernel would write zeroes to the whole
    /// range in a single call, which may take long and cannot be cancelled. For a file, we try it.
    pub can_zero: bool,
    /// The device can discard ranges.
    pub can_discard: bool,
    /// Granularity of discards in bytes.
    pub discard_granularity: u32,
    /// The device has seek times.
    pub is_rotational: bool,
}

impl Device {
    /// Queries the properties of an open device. Changes the file position.
    pub fn of(file: &File) -> io::Result<Self> {
        let queue = Queue::of(file.metadata()?.rdev());
        // The kernel returns 0 if a device doesn't support this.
        let is_set = |name| queue.number(name) > 0;
        Ok(Self {
            size: rustix::fs::seek(file, SeekFrom::End(0))?,
            // The physical size is only a hint. 4096 is a multiple of all common logical sizes.
            logical_block: ioctl_blksszget(file).unwrap_or(4096),
            physical_block: ioctl_blkpbszget(file).unwrap_or(4096),
            can_zero: is_set("write_zeroes_max_bytes"),
            can_discard: is_set("discard_max_bytes"),
            discard_granularity: queue.number("discard_granularity").clamp(512, 1 << 30) as u32,
            is_rotational: queue.number("rotational") == 1,
        })
    }
}

/// Queue attributes of a block device.
struct Queue(Option<PathBuf>);

impl Queue {
    fn of(rdev: u64) -> Self {
        let (major, minor) = (libc::major(rdev), libc::minor(rdev));
        let device = PathBuf::from(format!("/sys/dev/block/{major}:{minor}"));
        // For a partition, the queue of its disk is in the parent directory.
        let found = [device.join("queue"), device.join("../queue")]
            .into_iter()
            .find(|p| p.is_dir());
        Self(found)
    }

    /// Returns the value of an attribute, or 0 if it does not exist.
    fn number(&self, name: &str) -> u64 {
        self.0
            .as_ref()
            .and_then(|p| std::fs::read_to_string(p.join(name)).ok())
            .and_then(|s| s.trim().parse().ok())
            .unwrap_or(0)
    }
}
