//! [`RingConfig`]: the sizes of a ring.

use crate::error::RingError;

/// Sizes of a ring, fixed when it is made.
#[derive(Debug, Clone, Copy)]
pub struct RingConfig {
    /// Operations in flight at most, 1 to 32,767. The ring adds one of its own, and the kernel
    /// rounds up to a power of two, so one less than such a power wastes nothing.
    pub capacity: u32,
    /// Pieces of a scatter list at most, after joining neighbours; the kernel's limit is 1,024.
    pub max_slices: usize,
    /// Entries of the table of registered files.
    pub files: u32,
    /// Entries of the table of registered memory; a region takes one per GiB.
    pub memories: u32,
}

impl RingConfig {
    /// The most operations that a ring takes: the kernel's limit less the ring's own.
    pub const MAX_CAPACITY: u32 = 32_767;

    /// Slots of the ring: one more than the caller's, for the waker.
    pub(crate) fn total(&self) -> Result<u32, RingError> {
        let (asked, max) = (self.capacity, Self::MAX_CAPACITY);
        if asked == 0 || asked > max {
            return Err(RingError::Capacity { asked, max });
        }
        Ok(asked + 1)
    }

    /// Kernel threads for operations on files and block devices: one for each operation of the ring.
    ///
    /// Operations that have to wait (flushes, allocations, whatever a file system cannot do at once)
    /// block a thread of the kernel's pool (`io-wq`) each. By default these are four for each
    /// processor, so a few operations on a file system that hangs would delay operations on all other
    /// file systems. Threads exist only while operations block, and end after some idle seconds.
    pub(crate) fn threads(&self) -> u32 {
        self.capacity + 1
    }
}

impl Default for RingConfig {
    fn default() -> Self {
        Self {
            capacity: 511,
            max_slices: 256,
            files: 64,
            memories: 64,
        }
    }
}
