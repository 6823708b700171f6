//! [`MappedFile`]: a file of a file system in memory, read without a system call.
//!
//! Its pages are in memory already, so a read is a copy, and what `preadv(2)` costs beyond that is
//! saved. Three things would make such a copy worse than the call:
//!
//! - A fault in a hole allocates a page: reading a sparse file would fill its file system. So only
//!   pages that are known to be allocated are read here.
//! - A file may be made shorter by another process, and memory may fail. The access ends in SIGBUS,
//!   which is caught ([`crate::fault`]): the copy reports that it has failed. The mapping is not used
//!   again after that.
//! - A page may be in swap. Its fault waits as long as the call would.
//!
//! The file is written by system calls only. They keep a block whole even where the process is
//! killed in the middle of it, which a copy to a mapping does not.

use std::io;
use std::ops::Range;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::ptr::{self, NonNull};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use rustix::fs::{Access, AtFlags, CWD};
use rustix::mm::{Advice, MapFlags, ProtFlags};

use crate::{MemSlice, PAGE, copy, fault};

/// Pages of one word of [`MappedFile::allocated`].
const BITS: usize = u64::BITS as usize;

/// The kernel is asked for whole groups of pages, so that one call serves the reads of a group.
const GROUP: usize = 16;

/// Most pages that the kernel is asked for at once: those of an unaligned MiB, and the rest of the
/// groups at its ends.
const ASKED: usize = 256 + 2 * GROUP;

/// Most pages of a mapping, 256 GiB. They have 8 MiB of bits; a sparse file may be of any length.
const MOST: usize = 1 << 26;

/// A mapping of a file, for reading. Unmapped when it is dropped.
#[derive(Debug)]
pub struct MappedFile {
    base: NonNull<u8>,
    /// Bytes: whole pages.
    len: usize,
    /// A bit for each page that is not a hole.
    allocated: Box<[AtomicU64]>,
    /// Calls of [`Self::forget`].
    forgotten: AtomicU64,
    /// A page of the file could not be read.
    is_lost: AtomicBool,
}

// SAFETY: a mapping is plain bytes; all access is by copies that create no references.
unsafe impl Send for MappedFile {}
// SAFETY: as above; nothing writes to it.
unsafe impl Sync for MappedFile {}

impl Drop for MappedFile {
    fn drop(&mut self) {
        // SAFETY: the range of the mmap call in `new`, which nothing can address any more. A failure
        // would leave it mapped.
        let _ = unsafe { rustix::mm::munmap(self.base.as_ptr().cast(), self.len) };
    }
}

impl MappedFile {
    /// Maps the whole pages of the first `len` bytes of a file, of 256 GiB at most. What lies beyond
    /// is not read through it.
    ///
    /// # Errors
    /// [`io::ErrorKind::PermissionDenied`] for a file that this process may not write, of which the
    /// kernel does not report holes; [`io::ErrorKind::InvalidInput`] if it has no whole page; and
    /// the errors of `mmap(2)` and [`fault::catch`].
    pub fn new(file: BorrowedFd<'_>, len: u64) -> io::Result<Self> {
        // mincore(2) reports each page of such a file as there.
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
        // SAFETY: a new mapping at an address of the kernel's choice touches nothing that exists.
        let base =
            unsafe { rustix::mm::mmap(ptr::null_mut(), len, ProtFlags::READ, flags, file, 0) }?;
        let base = NonNull::new(base.cast::<u8>()).ok_or(io::ErrorKind::AddrNotAvailable)?;
        // SAFETY: advice about the new mapping, that changes no byte. Without it a core dump may
        // have the file's content.
        let _ = unsafe { rustix::mm::madvise(base.as_ptr().cast(), len, Advice::LinuxDontDump) };
        let words = std::iter::repeat_with(AtomicU64::default).take(pages.div_ceil(BITS));
        Ok(Self {
            base,
            len,
            allocated: words.collect(),
            forgotten: AtomicU64::new(0),
            is_lost: AtomicBool::new(false),
        })
    }

    /// Copies from `offset` of `file`, which is the one that was mapped, into one piece after the
    /// other. `false` if that takes a system call that reads, or has failed: the pieces have no
    /// content of meaning then.
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
        // Of a file that was made shorter, the rest of its last page is zeros. Another byte at the end
        // of the range is the file's.
        let mut last = 0;
        let mut is_copied = true;
        for piece in into {
            // SAFETY: within the mapping, which `self` keeps, and a range that its slice keeps.
            // Others may write to either, as to any memory of this crate. Faults are caught.
            is_copied &=
                unsafe { copy::load(self.base.as_ptr().add(at), piece.ptr(), piece.len()) };
            at += piece.len();
        }
        // SAFETY: within the mapping, which is not empty; faults are caught.
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

    /// Notes that a range of the file has become a hole. The caller keeps reads of the range away
    /// from before the hole is made until this returns. For a moment a read of pages beside it may
    /// restore what was known of it: a read of the hole in that moment allocates it.
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

    /// A range of the mapping; `None` if it goes beyond.
    fn within(&self, offset: u64, len: usize) -> Option<Range<usize>> {
        let start = usize::try_from(offset).ok()?;
        let end = start.checked_add(len)?;
        (end <= self.len).then_some(start..end)
    }

    /// Whether all pages of a range are allocated. The kernel is asked for those that are not known
    /// to be.
    fn has_pages(&self, bytes: &Range<usize>) -> bool {
        let pages = pages(bytes);
        let is_known = |(word, mask): (usize, u64)| {
            self.allocated[word].load(Ordering::Relaxed) & mask == mask
        };
        words(pages.clone()).all(is_known) || self.ask(pages)
    }

    fn ask(&self, pages: Range<usize>) -> bool {
        let end = pages.end.next_multiple_of(GROUP).min(self.len / PAGE);
        let groups = pages.start / GROUP * GROUP..end;
        let mut are_there = [0_u8; ASKED];
        let Some(are_there) = are_there.get_mut(..groups.len()) else {
            return false;
        };
        let forgotten = self.forgotten.load(Ordering::SeqCst);
        let first = self.base.as_ptr().wrapping_add(groups.start * PAGE);
        // SAFETY: pages of the mapping, and one byte for each of them.
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
        // A group lies within one word.
        for (first, group) in groups.clone().step_by(GROUP).zip(are_there.chunks(GROUP)) {
            let bits = group.iter().rev();
            let found = bits.fold(0, |bits, page| bits << 1 | u64::from(page & 1));
            if found != 0 {
                self.allocated[first / BITS].fetch_or(found << (first % BITS), Ordering::SeqCst);
            }
        }
        // A page beside those that the caller reads may have become a hole since the kernel was asked.
        if self.forgotten.load(Ordering::SeqCst) != forgotten {
            self.clear(groups.clone());
        }
        let asked = pages.start - groups.start..pages.end - groups.start;
        are_there[asked].iter().all(|page| page & 1 == 1)
    }
}

/// The pages of a range of bytes.
fn pages(bytes: &Range<usize>) -> Range<usize> {
    bytes.start / PAGE..bytes.end.div_ceil(PAGE)
}

/// The words of a range of pages, and the bits of each.
fn words(pages: Range<usize>) -> impl Iterator<Item = (usize, u64)> {
    let (first, last) = (pages.start / BITS, pages.end.div_ceil(BITS));
    (first..last).map(move |word| {
        let start = pages.start.saturating_sub(word * BITS);
        let end = (pages.end - word * BITS).min(BITS);
        let below = |bits: usize| u64::MAX.checked_shr((BITS - bits) as u32).unwrap_or(0);
        (word, below(end) & !below(start))
    })
}

// Miri has no memory files, and loops do not catch faults.
#[cfg(all(test, target_arch = "x86_64", not(miri), not(feature = "loops")))]
mod tests {
    use std::fs::File;
    use std::os::fd::AsFd;
    use std::os::unix::fs::{FileExt, MetadataExt};

    use super::*;
    use crate::Memory;

    const PAGES: u64 = 150;

    /// A file in memory of [`PAGES`] pages, of which none is allocated.
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
    fn allocated_pages_are_read_and_holes_stay_holes() {
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
        // Across two words of bits.
        assert!(map.read(file.as_fd(), page(62), &pieces));
        assert_eq!(
            room.slice(PAGE..3 * PAGE).unwrap().to_vec()[PAGE - 1..=PAGE],
            [62, 63]
        );
        assert_eq!(room.slice(0..PAGE).unwrap().to_vec(), [64; PAGE]);
        // Not from the start of a page, nor whole pages.
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
        // What is written later is seen.
        file.write_all_at(&[9], page(64)).unwrap();
        assert!(map.read(file.as_fd(), page(64), &part));
        assert_eq!(part[0].to_vec()[..2], [9, 64]);
        assert_eq!(file.metadata().unwrap().blocks(), 3 * PAGE as u64 / 512);
    }

    #[test]
    fn a_range_that_became_a_hole_is_not_read() {
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
        // A range may end beyond the mapping.
        map.forget(page(149)..page(151));
        assert!(read(149) && !read(150));
    }

    #[test]
    fn neighbor_page_may_become_hole() {
        use rustix::fs::{FallocateFlags, fallocate};

        let file = file("riser-test-beside");
        file.write_all_at(&[1; 2 * PAGE], 0).unwrap();
        let map = mapped(&file);
        assert!(map.ask(0..1));
        assert_eq!(map.allocated[0].load(Ordering::SeqCst), 0b11);
        let (is_over, asked) = (AtomicBool::new(false), AtomicU64::new(0));
        std::thread::scope(|scope| {
            let asker = scope.spawn(|| {
                while !is_over.load(Ordering::Relaxed) {
                    assert!(map.ask(0..1));
                    asked.fetch_add(1, Ordering::SeqCst);
                }
            });
            let punch = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
            let mut is_stale = false;
            for _ in 0..20_000 {
                file.write_all_at(&[1; PAGE], page(1)).unwrap();
                fallocate(&file, punch, page(1), page(1)).unwrap();
                map.forget(page(1)..page(2));
                // A call that began before may set the bit, and clears it again.
                let before = asked.load(Ordering::SeqCst);
                while asked.load(Ordering::SeqCst) < before + 2 && !asker.is_finished() {
                    std::thread::yield_now();
                }
                is_stale |= map.allocated[0].load(Ordering::SeqCst) & 0b10 != 0;
            }
            is_over.store(true, Ordering::Relaxed);
            assert!(!is_stale, "a hole passes for a page");
        });
    }

    #[test]
    fn a_page_that_the_file_has_lost_is_reported() {
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
        let beside = [room.slice(0..PAGE).unwrap()];
        assert!(map.read(file.as_fd(), page(8), &beside));
        assert!(
            !map.read(file.as_fd(), page(8), &whole),
            "its second page is gone"
        );
        assert!(
            !map.read(file.as_fd(), page(8), &beside),
            "a page of the mapping is no longer the file's"
        );
        // One mapping says nothing about another.
        assert!(
            other.read(file.as_fd(), page(8), &beside)
                && !other.read(file.as_fd(), page(8), &whole)
        );
    }

    #[test]
    fn a_file_without_a_whole_page_is_not_mapped() {
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
    fn only_the_start_of_a_huge_file_is_mapped() {
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
