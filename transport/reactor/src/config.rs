//! [`RingConfig`]: the sizes of a ring.

use crate::error::RingError;

/// Sizes of a ring, fixed when it is created.
#[derive(Debug, Clone, Copy)]
pub struct RingConfig {
    /// Maximum number of operations in flight, 1 to 32,767. The ring adds one operation for its
    /// waker, and the kernel rounds up to a power of two, so a power of two minus one wastes no
    /// entries.
    pub capacity: u32,
    /// Maximum number of pieces in a scatter list, after merging adjacent pieces. The kernel's
    /// limit is 1,024.
    pub max_slices: usize,
    /// Entries in the registered file table.
    pub files: u32,
    /// Entries in the registered buffer table. A region uses one entry per GiB.
    pub memories: u32,
}

impl RingConfig {
    /// Maximum capacity of a ring: the kernel's limit minus the ring's own operation.
    pub const MAX_CAPACITY: u32 = 32_767;

    /// Returns the number of slots: the configured capacity plus one for the waker.
    pub(crate) fn total(&self) -> Result<u32, RingError> {
        let (requested, max) = (self.capacity, Self::MAX_CAPACITY);
        if requested == 0 || requested > max {
            return Err(RingError::Capacity { requested, max });
        }
        Ok(requested + 1)
    }

    /// Returns the limit of kernel threads for file and block device operations: one for each
    /// operation of the ring.
    ///
    /// Each blocking operation (flushes, allocations, and everything that a file system cannot do
    /// without waiting) occupies a thread of the kernel's pool (`io-wq`). The default limit is four
    /// threads per processor, so a few operations on a file system that hangs would delay
    /// operations on all other file systems. Threads only exist while operations block, and exit
    /// after a few idle seconds.
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
