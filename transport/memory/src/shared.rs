//! Memory that two processes map: a page of atomic words, and data that are only copied.
//!
//! The other process is not trusted. It may write anything at any time, so a second read of a value
//! may differ from the first: users check the copy that they have. [`SharedMemory::map`] refuses
//! files whose pages could go missing, which would turn accesses into SIGBUS: files that can be
//! made shorter, and files of huge pages. A peer may punch holes, which read as zeros.
//!
//! Words and data never overlap, so no byte is accessed in two sizes.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::ptr::{self, NonNull};
use std::sync::atomic::AtomicU32;

use rustix::fs::{MemfdFlags, SealFlags};
use rustix::mm::{MapFlags, ProtFlags};

use crate::{MemSlice, PAGE, copy};

/// Number of words in the first page.
pub const WORDS: usize = PAGE / size_of::<AtomicU32>();

/// Type of file system that memory files are on: pages come from memory as they are touched
/// (`TMPFS_MAGIC`). That of huge pages may run out of them.
const TMPFS: i64 = 0x0102_1994;

/// A mapping of a memory file. Unmapped when it is dropped.
#[derive(Debug)]
pub struct SharedMemory {
    base: NonNull<u8>,
    /// Bytes after the page of words.
    len: usize,
}

// SAFETY: a mapping is plain bytes; all access is by atomic words and by copies that create no
// references, so it may move to another thread.
unsafe impl Send for SharedMemory {}

impl Drop for SharedMemory {
    fn drop(&mut self) {
        // SAFETY: the range of the mmap call in `map`, which nothing can address any more. A
        // failure would leave it mapped.
        let _ = unsafe { rustix::mm::munmap(self.base.as_ptr().cast(), PAGE + self.len) };
    }
}

impl SharedMemory {
    /// Makes a memory file with `len` bytes of data, and maps it. The descriptor is for the other
    /// process. `name` is shown among the mappings of a process.
    ///
    /// # Errors
    /// `ENOMEM`, or no descriptor is left.
    pub fn create(name: &str, len: usize) -> io::Result<(Self, OwnedFd)> {
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let file = rustix::fs::memfd_create(name, flags)?;
        rustix::fs::ftruncate(&file, (PAGE + len) as u64)?;
        let seals = SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL;
        rustix::fs::fcntl_add_seals(&file, seals)?;
        Ok((Self::map(&file, len)?, file))
    }

    /// Maps a memory file that another process has made with `len` bytes of data.
    ///
    /// # Errors
    /// [`io::ErrorKind::InvalidData`] for a file that has another length, that could become shorter
    /// or whose pages may be missing; and the errors of `mmap(2)`.
    pub fn map(file: &impl AsFd, len: usize) -> io::Result<Self> {
        let bad = |what| io::Error::new(io::ErrorKind::InvalidData, what);
        // Only memory files have seals; the kernel refuses the question for others.
        let seals = rustix::fs::fcntl_get_seals(file)
            .map_err(|_| bad("shared memory is not a memory file"))?;
        if !seals.contains(SealFlags::SHRINK) {
            return Err(bad("shared memory could become shorter"));
        }
        if rustix::fs::fstatfs(file)?.f_type != TMPFS {
            return Err(bad("shared memory is of huge pages"));
        }
        if rustix::fs::fstat(file)?.st_size != (PAGE + len) as i64 {
            return Err(bad("shared memory has another length"));
        }
        // SAFETY: a new mapping at an address of the kernel's choice touches nothing that exists.
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

    /// Bytes of data.
    #[must_use]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there are no data.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// A word of the first page.
    ///
    /// # Panics
    /// If `index` is not below [`WORDS`].
    #[must_use]
    pub fn word(&self, index: usize) -> &AtomicU32 {
        assert!(index < WORDS, "word {index} beyond the page");
        // SAFETY: within the page of words, aligned, mapped as long as `self` lives, and accessed
        // by nothing but such words.
        unsafe { self.base.cast::<AtomicU32>().add(index).as_ref() }
    }

    /// Copies `out.len()` bytes of data out, from `offset` on.
    ///
    /// # Panics
    /// If the range is not within the data.
    pub fn read(&self, offset: usize, out: &mut [u8]) {
        let from = self.data(offset, out.len());
        // SAFETY: the source was checked; `out` is an exclusive Rust slice.
        let is_copied = unsafe { copy::load(from, out.as_mut_ptr(), out.len()) };
        assert!(is_copied, "all of the file is there");
    }

    /// Copies `bytes` into the data, at `offset`.
    ///
    /// # Panics
    /// If the range is not within the data.
    pub fn write(&self, offset: usize, bytes: &[u8]) {
        let to = self.data(offset, bytes.len());
        // SAFETY: as in `read`, with the roles exchanged.
        let is_copied = unsafe { copy::store(bytes.as_ptr(), to, bytes.len()) };
        assert!(is_copied, "all of the file is there");
    }

    /// Copies memory of this process into the data, at `offset`.
    ///
    /// # Panics
    /// If the range is not within the data.
    pub fn write_memory(&self, offset: usize, slice: &MemSlice) {
        let to = self.data(offset, slice.len());
        // SAFETY: both ranges are mapped and checked, and of two mappings.
        if !unsafe { copy::copy(slice.ptr(), to, slice.len()) } {
            slice.memory().note_fault();
        }
    }

    fn data(&self, offset: usize, len: usize) -> *mut u8 {
        assert!(
            offset.checked_add(len).is_some_and(|end| end <= self.len),
            "range {offset}+{len} beyond {}",
            self.len
        );
        // SAFETY: within the mapping, as just asserted.
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
    fn two_mappings_show_the_same_bytes_and_words() {
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
    fn a_file_that_could_end_in_a_fault_is_refused() {
        let text = |file: &OwnedFd, len| SharedMemory::map(file, len).unwrap_err().to_string();
        let (_ours, file) = SharedMemory::create("riser-test", PAGE).unwrap();
        assert!(text(&file, 2 * PAGE).contains("another length"));
        // Nor can it be cut after it was looked at.
        assert!(rustix::fs::ftruncate(&file, 0).is_err());
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let open = rustix::fs::memfd_create("riser-test", flags).unwrap();
        rustix::fs::ftruncate(&open, 2 * PAGE as u64).unwrap();
        assert!(text(&open, PAGE).contains("shorter"));
        let plain = OwnedFd::from(std::fs::File::open("/dev/null").unwrap());
        assert!(text(&plain, PAGE).contains("not a memory file"));
    }

    #[test]
    #[cfg_attr(miri, ignore)]
    #[should_panic(expected = "beyond")]
    fn a_range_beyond_the_data_is_refused() {
        let (ours, _file) = SharedMemory::create("riser-test", PAGE).unwrap();
        ours.write(PAGE - 1, b"ab");
    }
}
