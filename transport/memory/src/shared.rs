//! Memory mapped by two processes: a page of atomic words, and data that are only accessed by
//! copying.
//!
//! The other process is not trusted. It may write anything at any time, so reading a value twice
//! may yield different results: users must validate their copy. [`SharedMemory::map`] rejects files
//! whose pages could disappear, because accesses would raise SIGBUS: files that can be truncated,
//! and files of huge pages. A peer may punch holes, which read as zeros.
//!
//! Words and data never overlap, so no byte is accessed with different sizes.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::ptr::{self, NonNull};
use std::sync::atomic::AtomicU32;

use rustix::fs::{MemfdFlags, SealFlags};
use rustix::mm::{MapFlags, ProtFlags};

use crate::{MemSlice, PAGE, copy};

/// Number of words in the first page.
pub const WORDS: usize = PAGE / size_of::<AtomicU32>();

/// Type of the file system of memory files (`TMPFS_MAGIC`), which allocates pages on first access.
/// The file system of huge pages could run out of them.
const TMPFS: i64 = 0x0102_1994;

/// A mapping of a memory file. Unmapped when it is dropped.
#[derive(Debug)]
pub struct SharedMemory {
    base: NonNull<u8>,
    /// Number of bytes after the page of words.
    len: usize,
}

// SAFETY: a mapping is plain bytes. All accesses use atomic words or copies that create no
// references, so it can be moved to another thread.
unsafe impl Send for SharedMemory {}

impl Drop for SharedMemory {
    fn drop(&mut self) {
        // SAFETY: this is the range of the mmap call in `map`, which can no longer be accessed. If
        // this fails, it stays mapped.
        let _ = unsafe { rustix::mm::munmap(self.base.as_ptr().cast(), PAGE + self.len) };
    }
}

impl SharedMemory {
    /// Creates a memory file with `len` bytes of data, and maps it. Also returns the descriptor,
    /// which should be passed to the other process. `name` is shown in the list of mappings of a
    /// process.
    ///
    /// # Errors
    /// Fails if there is not enough memory (`ENOMEM`), or if there are too many open descriptors.
    pub fn create(name: &str, len: usize) -> io::Result<(Self, OwnedFd)> {
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let file = rustix::fs::memfd_create(name, flags)?;
        rustix::fs::ftruncate(&file, (PAGE + len) as u64)?;
        let seals = SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL;
        rustix::fs::fcntl_add_seals(&file, seals)?;
        Ok((Self::map(&file, len)?, file))
    }

    /// Maps a memory file that was created by another process with `len` bytes of data.
    ///
    /// # Errors
    /// Returns [`io::ErrorKind::InvalidData`] if the file has a different length, could be
    /// truncated or could have missing pages, and errors of `mmap(2)`.
    pub fn map(file: &impl AsFd, len: usize) -> io::Result<Self> {
        let bad = |what| io::Error::new(io::ErrorKind::InvalidData, what);
        // Only memory files have seals. For other files, the kernel returns an error.
        let seals = rustix::fs::fcntl_get_seals(file)
            .map_err(|_| bad("invalid shared memory: not a memory file"))?;
        if !seals.contains(SealFlags::SHRINK) {
            return Err(bad("invalid shared memory: missing seal against shrinking"));
        }
        if rustix::fs::fstatfs(file)?.f_type != TMPFS {
            return Err(bad("unsupported shared memory: huge pages"));
        }
        if rustix::fs::fstat(file)?.st_size != (PAGE + len) as i64 {
            return Err(bad("invalid length of shared memory"));
        }
        // SAFETY: a new mapping at an address chosen by the kernel does not affect existing
        // mappings.
        let base = unsafe {
            rustix::mm::mmap(
                ptr::null_mut(),
                PAGE + len,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::SHARED,
                file,
                0,
            )
        }?;
        let base = NonNull::new(base.cast::<u8>()).ok_or_else(|| bad("mapped at address 0"))?;
        Ok(Self { base, len })
    }

    /// Returns the number of bytes of data.
    #[must_use]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Returns whether there are no data.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Returns a word of the first page.
    ///
    /// # Panics
    /// Panics if `index` is not less than [`WORDS`].
    #[must_use]
    pub fn word(&self, index: usize) -> &AtomicU32 {
        assert!(index < WORDS, "word {index} exceeds the page");
        // SAFETY: within the page of words, aligned, mapped while `self` exists, and only accessed
        // as atomic words.
        unsafe { self.base.cast::<AtomicU32>().add(index).as_ref() }
    }

    /// Copies `out.len()` bytes of data from `offset` to `out`.
    ///
    /// # Panics
    /// Panics if the range is out of bounds.
    pub fn read(&self, offset: usize, out: &mut [u8]) {
        let from = self.data(offset, out.len());
        // SAFETY: the source was checked. `out` is an exclusive Rust slice.
        let is_copied = unsafe { copy::load(from, out.as_mut_ptr(), out.len()) };
        assert!(is_copied, "all of the file is there");
    }

    /// Copies `bytes` to `offset` of the data.
    ///
    /// # Panics
    /// Panics if the range is out of bounds.
    pub fn write(&self, offset: usize, bytes: &[u8]) {
        let to = self.data(offset, bytes.len());
        // SAFETY: as in `read`, with the roles swapped.
        let is_copied = unsafe { copy::store(bytes.as_ptr(), to, bytes.len()) };
        assert!(is_copied, "all of the file is there");
    }

    /// Copies memory of this process to `offset` of the data.
    ///
    /// # Panics
    /// Panics if the range is out of bounds.
    pub fn write_memory(&self, offset: usize, slice: &MemSlice) {
        let to = self.data(offset, slice.len());
        // SAFETY: both ranges are mapped, were checked, and belong to different mappings.
        if !unsafe { copy::copy(slice.ptr(), to, slice.len()) } {
            slice.memory().note_fault();
        }
    }

    fn data(&self, offset: usize, len: usize) -> *mut u8 {
        assert!(
            offset.checked_add(len).is_some_and(|end| end <= self.len),
            "range {offset}+{len} exceeds length {}",
            self.len
        );
        // SAFETY: within the mapping, as checked above.
        unsafe { self.base.as_ptr().add(PAGE + offset) }
    }
}

#[cfg(test)]
#[cfg_attr(
    miri,
    allow(dead_code, unused_imports, reason = "Miri has no memory files")
)]
mod tests {
    use std::sync::atomic::Ordering;

    use super::*;
    use crate::Memory;

    #[test]
    #[cfg_attr(miri, ignore)]
    fn mappings_share_bytes_and_words() {
        let (ours, file) = SharedMemory::create("riser-test", 2 * PAGE).unwrap();
        let theirs = SharedMemory::map(&file, 2 * PAGE).unwrap();
        ours.write(PAGE - 2, b"abcd");
        let memory = Memory::new(PAGE).unwrap();
        memory.write(7, b"xyz");
        ours.write_memory(2 * PAGE - 3, &memory.slice(7..10).unwrap());
        let mut got = [0; 4];
        theirs.read(PAGE - 2, &mut got);
        assert_eq!(&got, b"abcd");
        theirs.read(2 * PAGE - 4, &mut got);
        assert_eq!(&got, b"\0xyz");
        ours.word(WORDS - 1).store(7, Ordering::Relaxed);
        assert_eq!(theirs.word(WORDS - 1).load(Ordering::Relaxed), 7);
        assert_eq!(theirs.word(0).load(Ordering::Relaxed), 0);
    }

    #[test]
    #[cfg_attr(miri, ignore)]
    fn faulting_files_are_rejected() {
        let text = |file: &OwnedFd, len| SharedMemory::map(file, len).unwrap_err().to_string();
        let (_ours, file) = SharedMemory::create("riser-test", PAGE).unwrap();
        assert!(text(&file, 2 * PAGE).contains("invalid length"));
        // It can't be truncated after it was checked either.
        assert!(rustix::fs::ftruncate(&file, 0).is_err());
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let open = rustix::fs::memfd_create("riser-test", flags).unwrap();
        rustix::fs::ftruncate(&open, 2 * PAGE as u64).unwrap();
        assert!(text(&open, PAGE).contains("shrinking"));
        let plain = OwnedFd::from(std::fs::File::open("/dev/null").unwrap());
        assert!(text(&plain, PAGE).contains("not a memory file"));
    }

    #[test]
    #[cfg_attr(miri, ignore)]
    #[should_panic(expected = "exceeds length")]
    fn range_beyond_data_is_rejected() {
        let (ours, _file) = SharedMemory::create("riser-test", PAGE).unwrap();
        ours.write(PAGE - 1, b"ab");
    }
}
