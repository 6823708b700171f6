//! [`MappedFile`]: reads a file in a memory-backed file system without system calls.
//!
//! Its pages are already in memory, so a read is a copy, and we avoid the overhead of `preadv(2)`.
//! There are three cases in which such a copy would be worse than the system call:
//!
//! - A fault in a hole allocates a page, so reading a sparse file would fill its file system. To
//!   avoid this, we only read pages that are known to be allocated.
//! - A file may be truncated by another process, and memory may fail. The access raises SIGBUS,
//!   which is caught ([`crate::fault`]), and the copy returns an error. The mapping is not used
//!   anymore after that.
//! - A page may be swapped out. In this case a fault blocks for the same time as a system call.
//!
//! The file is only written using system calls. Unlike copies to a mapping, they keep blocks
//! consistent even if the process is killed in the middle of a write.

use std::io;
use std::ops::Range;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::ptr::{self, NonNull};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use rustix::fs::{Access, AtFlags, CWD};
use rustix::mm::{Advice, MapFlags, ProtFlags};

use crate::{MemSlice, PAGE, copy, fault};

/// Pages per word of [`MappedFile::allocated`].
const BITS: usize = u64::BITS as usize;

/// The kernel is queried for whole groups of pages, so that one call serves the reads of a group.
const GROUP: usize = 16;

/// Maximum number of pages per query: an unaligned MiB, plus the rest of the groups at both ends.
const MAX_QUERIED: usize = 256 + 2 * GROUP;

/// Maximum number of pages of a mapping, 256 GiB. Their bits need 8 MiB. Without a limit, they
/// could need much more, because a sparse file can have any length.
const MOST: usize = 1 << 26;

/// A read-only mapping of a file. Unmapped when it is dropped.
#[derive(Debug)]
pub struct MappedFile {
    base: NonNull<u8>,
    /// Length in bytes, a multiple of the page size.
    len: usize,
    /// One bit for each page. It is set if the page is known to be allocated.
    allocated: Box<[AtomicU64]>,
    /// Number of calls of [`Self::forget`].
    forgotten: AtomicU64,
    /// Set if a page of the file could not be read.
    is_lost: AtomicBool,
}

// SAFETY: a mapping is plain bytes. All accesses are copies that create no references.
unsafe impl Send for MappedFile {}
// SAFETY: as above, and the mapping is never written.
unsafe impl Sync for MappedFile {}

impl Drop for MappedFile {
    fn drop(&mut self) {
        // SAFETY: this is the range of the mmap call in `new`, which can no longer be accessed. If
        // this fails, it stays mapped.
        let _ = unsafe { rustix::mm::munmap(self.base.as_ptr().cast(), self.len) };
    }
}

impl MappedFile {
    /// Maps the whole pages of the first `len` bytes of a file, up to 256 GiB. Bytes beyond these
    /// pages can't be read with this mapping.
    ///
    /// # Errors
    /// Returns [`io::ErrorKind::PermissionDenied`] if this process may not write to the file,
    /// because the kernel does not report holes in this case, [`io::ErrorKind::InvalidInput`] if
    /// there is no whole page, and errors of `mmap(2)` and [`fault::catch`].
    pub fn new(file: BorrowedFd<'_>, len: u64) -> io::Result<Self> {
        // For a file that is not writable, mincore(2) reports all pages as resident.
        let path = format!("/proc/self/fd/{}", file.as_raw_fd());
        rustix::fs::accessat(CWD, path, Access::WRITE_OK, AtFlags::EACCESS)?;
        let pages = usize::try_from(len).unwrap_or(usize::MAX) / PAGE;
        let pages = pages.min(MOST);
        if pages == 0 {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        fault::catch()?;
        let len = pages * PAGE;
        let flags = MapFlags::SHARED | MapFlags::NORESERVE;
        // SAFETY: a new mapping at an address chosen by the kernel does not affect existing
        // mappings.
        let base =
            unsafe { rustix::mm::mmap(ptr::null_mut(), len, ProtFlags::READ, flags, file, 0) }?;
        let base = NonNull::new(base.cast::<u8>()).ok_or(io::ErrorKind::AddrNotAvailable)?;
        // SAFETY: this is advice for the new mapping, and does not change any bytes. Without it, a
        // core dump could contain the contents of the file.
        let _ = unsafe { rustix::mm::madvise(base.as_ptr().cast(), len, Advice::LinuxDontDump) };
        // SAFETY: this does not change any bytes. If this process locks its memory, each page would
        // stay in memory after it was read, although the file may be larger than the memory.
        let _ = unsafe { rustix::mm::munlock(base.as_ptr().cast(), len) };
        let words = std::iter::repeat_with(AtomicU64::default).take(pages.div_ceil(BITS));
        Ok(Self {
            base,
            len,
            allocated: words.collect(),
            forgotten: AtomicU64::new(0),
            is_lost: AtomicBool::new(false),
        })
    }

    /// Copies from `offset` of `file`, which must be the file that was mapped, into the pieces, in
    /// order. Returns `false` if this needs a system call for reading, or has failed. In this case
    /// the contents of the pieces are unspecified.
    #[must_use]
    pub fn read(&self, file: BorrowedFd<'_>, offset: u64, into: &[MemSlice]) -> bool {
        let total: usize = into.iter().map(MemSlice::len).sum();
        let Some(bytes) = self.within(offset, total) else {
            return false;
        };
        if self.is_lost.load(Ordering::Acquire) || !self.has_pages(&bytes) {
            return false;
        }
        let mut at = bytes.start;
        // If the file was truncated, the remaining bytes of its last page are zero. So if the last
        // byte of the range is nonzero, it is still part of the file.
        let mut last = 0;
        let mut is_copied = true;
        for piece in into {
            // SAFETY: the source is within the mapping, which `self` keeps alive, and the
            // destination is kept alive by its slice. Both may be written concurrently, like all
            // memory of this crate. Faults are caught.
            is_copied &=
                unsafe { copy::load(self.base.as_ptr().add(at), piece.ptr(), piece.len()) };
            at += piece.len();
        }
        // SAFETY: within the mapping, which is not empty. Faults are caught.
        is_copied &= unsafe {
            let from = self.base.as_ptr().add(at.saturating_sub(1));
            copy::load(from, &raw mut last, 1)
        };
        if !is_copied {
            self.is_lost.store(true, Ordering::Release);
            return false;
        }
        let end = offset + total as u64;
        last != 0 || rustix::fs::fstat(file).is_ok_and(|stat| stat.st_size as u64 >= end)
    }

    /// Records that a range of the file has become a hole. From before the hole is created until
    /// this returns, the caller must not read the range. A concurrent read of nearby pages may
    /// briefly mark it as allocated again. Reading the hole at that time would allocate it.
    pub fn forget(&self, bytes: Range<u64>) {
        let within = |at: u64| usize::try_from(at).map_or(self.len, |at| at.min(self.len));
        let bytes = within(bytes.start)..within(bytes.end);
        self.forgotten.fetch_add(1, Ordering::SeqCst);
        self.clear(pages(&bytes));
    }

    fn clear(&self, pages: Range<usize>) {
        for (word, mask) in words(pages) {
            self.allocated[word].fetch_and(!mask, Ordering::SeqCst);
        }
    }

    /// Returns a range of the mapping, or `None` if it is out of bounds.
    fn within(&self, offset: u64, len: usize) -> Option<Range<usize>> {
        let start = usize::try_from(offset).ok()?;
        let end = start.checked_add(len)?;
        (end <= self.len).then_some(start..end)
    }

    /// Returns whether all pages of a range are allocated. Queries the kernel if this is not known.
    fn has_pages(&self, bytes: &Range<usize>) -> bool {
        let pages = pages(bytes);
        let is_known = |(word, mask): (usize, u64)| {
            self.allocated[word].load(Ordering::Relaxed) & mask == mask
        };
        words(pages.clone()).all(is_known) || self.query_pages(pages)
    }

    fn query_pages(&self, pages: Range<usize>) -> bool {
        let end = pages.end.next_multiple_of(GROUP).min(self.len / PAGE);
        let groups = pages.start / GROUP * GROUP..end;
        let mut are_there = [0_u8; MAX_QUERIED];
        let Some(are_there) = are_there.get_mut(..groups.len()) else {
            return false;
        };
        let forgotten = self.forgotten.load(Ordering::SeqCst);
        let first = self.base.as_ptr().wrapping_add(groups.start * PAGE);
        // SAFETY: the pages are within the mapping, and there is one byte for each of them.
        let result = unsafe {
            libc::mincore(
                first.cast(),
                groups.len() * PAGE,
                are_there.as_mut_ptr().cast(),
            )
        };
        if result != 0 {
            return false;
        }
        // Groups do not cross word boundaries.
        for (first, group) in groups.clone().step_by(GROUP).zip(are_there.chunks(GROUP)) {
            let bits = group.iter().rev();
            let found = bits.fold(0, |bits, page| bits << 1 | u64::from(page & 1));
            if found != 0 {
                self.allocated[first / BITS].fetch_or(found << (first % BITS), Ordering::SeqCst);
            }
        }
        // A page near the requested pages may have become a hole after the kernel was queried.
        if self.forgotten.load(Ordering::SeqCst) != forgotten {
            self.clear(groups.clone());
        }
        let range = pages.start - groups.start..pages.end - groups.start;
        are_there[range].iter().all(|page| page & 1 == 1)
    }
}

/// Returns the pages of a range of bytes.
fn pages(bytes: &Range<usize>) -> Range<usize> {
    bytes.start / PAGE..bytes.end.div_ceil(PAGE)
}

/// Returns the words of a range of pages, and a bit mask for each.
fn words(pages: Range<usize>) -> impl Iterator<Item = (usize, u64)> {
    let (first, last) = (pages.start / BITS, pages.end.div_ceil(BITS));
    (first..last).map(move |word| {
        let start = pages.start.saturating_sub(word * BITS);
        let end = (pages.end - word * BITS).min(BITS);
        // `start` is less than the number of bits, and `end` is at least one.
        (word, (u64::MAX << start) & (u64::MAX >> (BITS - end)))
    })
}

// Miri does not support memory files, and loops do not catch faults.
#[cfg(all(test, target_arch = "x86_64", not(miri), not(feature = "loops")))]
mod tests {
    use std::fs::File;
    use std::os::fd::AsFd;
    use std::os::unix::fs::{FileExt, MetadataExt};

    use rustix::mm::{MlockAllFlags, mlockall};

    use super::*;
    use crate::Memory;

    const PAGES: u64 = 150;

    /// Creates a memory file of [`PAGES`] unallocated pages.
    fn file(name: &str) -> File {
        let file = rustix::fs::memfd_create(name, rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        let file = File::from(file);
        file.set_len(PAGES * PAGE as u64).unwrap();
        file
    }

    fn mapped(file: &File) -> MappedFile {
        MappedFile::new(file.as_fd(), PAGES * PAGE as u64).unwrap()
    }

    const fn page(number: u64) -> u64 {
        number * PAGE as u64
    }

    #[test]
    fn only_allocated_pages_are_read() {
        let file = file("riser-test-holes");
        let map = mapped(&file);
        let room = Memory::new(4 * PAGE).unwrap();
        let pieces = [
            room.slice(PAGE..3 * PAGE).unwrap(),
            room.slice(0..PAGE).unwrap(),
        ];
        assert!(!map.read(file.as_fd(), page(62), &pieces), "a hole");
        assert_eq!(
            file.metadata().unwrap().blocks(),
            0,
            "reading has allocated"
        );
        for number in 62..65 {
            file.write_all_at(&[number as u8; PAGE], page(number))
                .unwrap();
        }
        // The range crosses a word boundary in the bits.
        assert!(map.read(file.as_fd(), page(62), &pieces));
        assert_eq!(
            room.slice(PAGE..3 * PAGE).unwrap().to_vec()[PAGE - 1..=PAGE],
            [62, 63]
        );
        assert_eq!(room.slice(0..PAGE).unwrap().to_vec(), [64; PAGE]);
        // Unaligned range of less than a page.
        let part = [room.slice(0..600).unwrap()];
        assert!(map.read(file.as_fd(), page(64) - 512, &part));
        assert_eq!(part[0].to_vec()[511..513], [63, 64]);
        assert!(
            !map.read(file.as_fd(), page(65) - 512, &part),
            "its end is in a hole"
        );
        assert!(
            !map.read(file.as_fd(), page(62) - 512, &part),
            "its start is in a hole"
        );
        // Later writes are visible.
        file.write_all_at(&[9], page(64)).unwrap();
        assert!(map.read(file.as_fd(), page(64), &part));
        assert_eq!(part[0].to_vec()[..2], [9, 64]);
        assert_eq!(file.metadata().unwrap().blocks(), 3 * PAGE as u64 / 512);
    }

    #[test]
    fn punched_hole_is_not_read() {
        let file = file("riser-test-punched");
        file.write_all_at(&vec![1; PAGES as usize * PAGE], 0)
            .unwrap();
        let map = mapped(&file);
        let room = Memory::new(PAGE).unwrap();
        let mut read = |number| map.read(file.as_fd(), page(number), &[room.whole()]);
        assert!((0..PAGES).all(&mut read));
        let mode = rustix::fs::FallocateFlags::PUNCH_HOLE | rustix::fs::FallocateFlags::KEEP_SIZE;
        rustix::fs::fallocate(&file, mode, page(60), page(70)).unwrap();
        map.forget(page(60)..page(130));
        assert!(read(59) && read(130) && !(60..130).any(&mut read));
        assert_eq!(file.metadata().unwrap().blocks(), 80 * PAGE as u64 / 512);
        // A range may extend beyond the mapping.
        map.forget(page(149)..page(151));
        assert!(read(149) && !read(150));
    }

    #[test]
    fn neighbor_page_may_become_hole() {
        use rustix::fs::{FallocateFlags, fallocate};

        let file = file("riser-test-beside");
        file.write_all_at(&[1; 2 * PAGE], 0).unwrap();
        let map = mapped(&file);
        assert!(map.query_pages(0..1));
        assert_eq!(map.allocated[0].load(Ordering::SeqCst), 0b11);
        let (is_over, queried) = (AtomicBool::new(false), AtomicU64::new(0));
        std::thread::scope(|scope| {
            let thread = scope.spawn(|| {
                while !is_over.load(Ordering::Relaxed) {
                    assert!(map.query_pages(0..1));
                    queried.fetch_add(1, Ordering::SeqCst);
                }
            });
            let punch = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
            let mut is_stale = false;
            for _ in 0..20_000 {
                file.write_all_at(&[1; PAGE], page(1)).unwrap();
                fallocate(&file, punch, page(1), page(1)).unwrap();
                map.forget(page(1)..page(2));
                // A call that started earlier may set the bit, but clears it again.
                let before = queried.load(Ordering::SeqCst);
                while queried.load(Ordering::SeqCst) < before + 2 && !thread.is_finished() {
                    std::thread::yield_now();
                }
                is_stale |= map.allocated[0].load(Ordering::SeqCst) & 0b10 != 0;
            }
            is_over.store(true, Ordering::Relaxed);
            assert!(!is_stale, "a hole passes for a page");
        });
    }

    #[test]
    fn truncated_page_is_reported() {
        let file = file("riser-test-shorter");
        file.write_all_at(&vec![1; PAGES as usize * PAGE], 0)
            .unwrap();
        let (map, other) = (mapped(&file), mapped(&file));
        let room = Memory::new(2 * PAGE).unwrap();
        let whole = [room.whole()];
        assert!(
            map.read(file.as_fd(), page(8), &whole) && other.read(file.as_fd(), page(8), &whole)
        );
        file.set_len(page(9)).unwrap();
        let segments = [room.slice(0..PAGE).unwrap()];
        assert!(map.read(file.as_fd(), page(8), &segments));
        assert!(
            !map.read(file.as_fd(), page(8), &whole),
            "its second page is gone"
        );
        assert!(
            !map.read(file.as_fd(), page(8), &segments),
            "a page of the mapping is no longer the file's"
        );
        // Mappings are independent of each other.
        assert!(
            other.read(file.as_fd(), page(8), &segments)
                && !other.read(file.as_fd(), page(8), &whole)
        );
    }

    /// `riser` locks its own memory, but reading a file must not keep all of its pages in memory.
    #[test]
    fn locked_process_locks_no_file() {
        const NAME: &str = "mapped_file::tests::locked_process_locks_no_file";
        // Use a separate process, because this affects all of its mappings.
        if std::env::var_os("RISER_MEMORY_CHILD").is_none() {
            let mut child = std::process::Command::new(std::env::current_exe().unwrap());
            let child = child.args(["--exact", NAME]).env("RISER_MEMORY_CHILD", "1");
            assert!(child.status().unwrap().success());
            return;
        }
        let flags = MlockAllFlags::CURRENT | MlockAllFlags::FUTURE | MlockAllFlags::ONFAULT;
        if let Err(error) = mlockall(flags) {
            riser_testkit::skip::skip("locked memory", &error.to_string());
            return;
        }
        let file = file("riser-test-locked");
        file.write_all_at(&vec![1; PAGES as usize * PAGE], 0)
            .unwrap();
        let map = mapped(&file);
        let room = Memory::new(PAGE).unwrap();
        assert!((0..PAGES).all(|number| map.read(file.as_fd(), page(number), &[room.whole()])));
        let mappings = std::fs::read_to_string("/proc/self/smaps").unwrap();
        let (_, mapping) = mappings.split_once("riser-test-locked").unwrap();
        let locked = mapping.lines().find(|line| line.starts_with("Locked:"));
        assert!(locked.unwrap().ends_with(" 0 kB"), "{locked:?}");
    }

    #[test]
    fn file_shorter_than_page_is_rejected() {
        let file = file("riser-test-short");
        let refused = |len| MappedFile::new(file.as_fd(), len).unwrap_err().kind();
        assert_eq!(refused(4095), io::ErrorKind::InvalidInput);
        let map = MappedFile::new(file.as_fd(), 8191).unwrap();
        file.write_all_at(&[1; 2 * PAGE], 0).unwrap();
        let room = Memory::new(PAGE).unwrap();
        assert!(
            map.read(file.as_fd(), 0, &[room.whole()])
                && !map.read(file.as_fd(), 4096, &[room.whole()])
        );
    }

    #[test]
    fn huge_file_is_mapped_partially() {
        let file = file("riser-test-huge");
        let (len, most) = (i64::MAX as u64 & !4095, (MOST * PAGE) as u64);
        file.set_len(len).unwrap();
        let map = MappedFile::new(file.as_fd(), len).unwrap();
        let room = Memory::new(PAGE).unwrap();
        for at in [most - PAGE as u64, most] {
            file.write_all_at(&[1; PAGE], at).unwrap();
            assert_eq!(map.read(file.as_fd(), at, &[room.whole()]), at < most);
        }
        map.forget(0..len);
        assert!(map.read(file.as_fd(), most - PAGE as u64, &[room.whole()]));
    }
}
