//! Memory that devices write behind the compiler's back.
//!
//! Everything that a NIC may read or write, everything that `io_uring` fills, and every pool from
//! which command buffers are cut is a [`Memory`]: one page-aligned anonymous mapping, shared by
//! reference count, zeroed at birth, or a range that another part of the process owns
//! ([`Memory::foreign`]). Code reads and writes it by copying ([`Memory::read`],
//! [`Memory::write`]) and hands devices its address, exactly as a driver treats device memory; so a
//! peer that rewrites a buffer while it is being read can spoil bytes, but cannot break a Rust
//! invariant.
//!
//! # Who may access it at once
//!
//! Any number of threads and devices. The safe functions copy as if by relaxed atomic accesses to
//! single bytes, so they may run at once on one range: bytes may be mixed of old and new, and that
//! is all. Who needs order makes it elsewhere, as with any device: a completion is polled after the
//! bytes it announces.
//!
//! Others may write a mapping as long as they have a handle to it. So code that needs a slice of
//! its bytes either looks at copies ([`MemSlice::for_each_chunk`]), or proves by its type that it
//! has the only handle ([`Memory::get_mut`]), or, where a registered mapping always has others,
//! promises that nothing writes the range meanwhile ([`Memory::with_bytes`], unsafe). A pointer
//! ([`Memory::ptr`]) is safe to make and unsafe to use, as any.
//!
//! - [`Memory`]: the mapping. Cloning shares it; the last clone unmaps it.
//! - [`MemSlice`]: a checked range of a mapping that keeps the mapping alive. It is what queues of
//!   posted work, rings and scatter lists hold while a device may touch the bytes.
//! - [`sys`]: system calls that send from ranges and receive into them.
//! - [`shared`]: a mapping that another process has as well.
//! - [`MappedFile`]: a file in memory, read without a system call.
//! - [`fault`]: accesses to memory that has gone.
//! - [`simulated`]: addresses that are the same in each run, and mappings that fail.
//!
//! Units: offsets and lengths are bytes. Addresses are virtual addresses of this process, except in
//! simulations.

#![allow(
    unsafe_code,
    reason = "this crate is the one place that maps memory and copies to and from it"
)]

mod copy;
pub mod fault;
mod mapped_file;
pub mod shared;
pub mod simulated;
pub mod sys;

use std::fmt;
use std::io;
use std::mem::MaybeUninit;
use std::ops::Range;
use std::ptr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

pub use self::mapped_file::MappedFile;

/// Bytes that are copied at a time where code needs a slice of them. Miri, which interprets each
/// access, has less patience.
const CHUNK: usize = if cfg!(miri) { 256 } else { 4096 };

/// Size and alignment of a page, and the granularity of every [`Memory`], in bytes.
pub const PAGE: usize = 4096;

struct Mapping {
    base: *mut u8,
    len: usize,
    /// Address by which devices know the first byte.
    address: u64,
    /// Another part of the process has mapped it, writes it and will unmap it.
    is_foreign: bool,
    /// A byte was accessed that is not mapped, or not for that access.
    has_faulted: AtomicBool,
}

// SAFETY: a mapping is plain bytes. All access from this crate goes through raw-pointer copies that
// create no references, so moving or sharing the owner between threads cannot alias a Rust object.
unsafe impl Send for Mapping {}
// SAFETY: as above; copies that run at once are made of atomic accesses.
unsafe impl Sync for Mapping {}

impl Drop for Mapping {
    fn drop(&mut self) {
        if self.is_foreign {
            return;
        }
        // SAFETY: `base` and `len` are those of the mmap call in `Memory::new`, and this is the
        // last owner, so nothing can address the range any more.
        unsafe { libc::munmap(self.base.cast(), self.len) };
    }
}

/// A page-aligned, zero-initialised anonymous mapping, shared by reference count; or a range of
/// another owner's.
#[derive(Clone)]
pub struct Memory(Arc<Mapping>);

impl fmt::Debug for Memory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Memory({:#x}+{:#x})", self.addr(), self.len())
    }
}

impl Memory {
    /// Maps `len` bytes, rounded up to whole pages; at least one page.
    ///
    /// # Errors
    /// The error of `mmap(2)`, `ENOMEM` as a rule.
    pub fn new(len: usize) -> io::Result<Self> {
        // At least one page, since mmap refuses a length of 0.
        let len = len
            .max(1)
            .checked_next_multiple_of(PAGE)
            .filter(|_| !simulated::fails())
            .ok_or_else(|| io::Error::from_raw_os_error(libc::ENOMEM))?;
        // SAFETY: an anonymous private mapping at an address of the kernel's choice touches nothing
        // that exists.
        let p = unsafe {
            libc::mmap(
                ptr::null_mut(),
                len,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
                -1,
                0,
            )
        };
        if p == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let base = p.cast::<u8>();
        let address = simulated::take(len).unwrap_or(base as u64);
        Ok(Self(Arc::new(Mapping {
            base,
            len,
            address,
            is_foreign: false,
            has_faulted: AtomicBool::new(false),
        })))
    }

    /// A range of `len` bytes that another part of the process has mapped, such as a buffer that a
    /// C program registers. It may begin at any address and have any length; [`Memory::len`] is
    /// exactly `len`. Dropping the last handle leaves the mapping as it is, and
    /// [`Memory::get_mut`] never answers its bytes, since its owner may write them at any time.
    ///
    /// # Safety
    /// The caller promises two things for as long as a handle to the range, or a slice of it,
    /// exists:
    ///
    /// - Each byte that is read through a handle is mapped readable when that happens, and each
    ///   byte that is written is mapped writable, or faults are caught ([`fault::catch`]). A range
    ///   with holes is allowed as long as nothing touches them.
    /// - No Rust reference to a byte of the range is alive while a handle writes that byte, and no
    ///   mutable one while a handle reads it. Raw pointers, and code in other languages, may access
    ///   the range at any time: bytes may then be mixed of old and new.
    #[must_use]
    pub unsafe fn foreign(base: *mut u8, len: usize) -> Self {
        Self(Arc::new(Mapping {
            base,
            len,
            address: base as u64,
            is_foreign: true,
            has_faulted: AtomicBool::new(false),
        }))
    }

    /// As [`Memory::new`], for a mapping of which little is used as a rule: a page takes memory only
    /// once it is written, and no larger piece does in its place.
    ///
    /// # Errors
    /// As of [`Memory::new`].
    pub fn sparse(len: usize) -> io::Result<Self> {
        let memory = Self::new(len)?;
        // With transparent huge pages the first byte that is written would take 2 MiB, since the
        // kernel joins neighbouring mappings to one.
        // SAFETY: the range is that of the mapping, whose contents the advice does not change.
        let advised =
            unsafe { libc::madvise(memory.ptr(0).cast(), memory.len(), libc::MADV_NOHUGEPAGE) };
        if advised != 0 {
            let error = io::Error::last_os_error();
            // A kernel without huge pages refuses the advice, and needs none.
            if error.raw_os_error() != Some(libc::EINVAL) {
                return Err(error);
            }
        }
        Ok(memory)
    }

    /// Length in bytes: a multiple of [`PAGE`], or that of a foreign range.
    #[must_use]
    pub fn len(&self) -> usize {
        self.0.len
    }

    /// Whether it holds no byte. True for a foreign range only: the smallest mapping is one page.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0.len == 0
    }

    /// Address of the first byte for devices: the virtual one, unless the mapping was made in
    /// [`simulated::addresses`].
    #[must_use]
    pub fn addr(&self) -> u64 {
        self.0.address
    }

    /// Pointer to the byte at `offset`, for handing to a device or a system call. Dereferencing it
    /// is the caller's business: the range must stay within the mapping, and a handle must be kept
    /// as long as the pointer is used, which [`Memory::get_mut`] relies on.
    ///
    /// # Panics
    /// If `offset` is beyond the end.
    #[must_use]
    pub fn ptr(&self, offset: usize) -> *mut u8 {
        // One past the end is allowed: an empty range may end there.
        assert!(
            offset <= self.0.len,
            "offset {offset} beyond {}",
            self.0.len
        );
        // A foreign range may be the whole address space, for which `add` is not defined.
        self.0.base.wrapping_add(offset)
    }

    /// Copies `out.len()` bytes out, from `offset` on.
    ///
    /// # Panics
    /// If the range is not within the mapping.
    pub fn read(&self, offset: usize, out: &mut [u8]) {
        self.check(offset, out.len());
        // SAFETY: the source range was checked; `out` is an exclusive Rust slice, so it cannot
        // overlap memory that is only reachable by raw pointer.
        let is_copied = unsafe { copy::load(self.ptr(offset), out.as_mut_ptr(), out.len()) };
        if !is_copied {
            self.note_fault();
            out.fill(0);
        }
    }

    /// Copies `data` in, at `offset`.
    ///
    /// # Panics
    /// If the range is not within the mapping.
    pub fn write(&self, offset: usize, data: &[u8]) {
        self.check(offset, data.len());
        // SAFETY: as in `read`, with the roles exchanged.
        let is_copied = unsafe { copy::store(data.as_ptr(), self.ptr(offset), data.len()) };
        if !is_copied {
            self.note_fault();
        }
    }

    /// Fills `len` bytes from `offset` on with `byte`.
    ///
    /// # Panics
    /// If the range is not within the mapping.
    pub fn fill(&self, offset: usize, len: usize, byte: u8) {
        self.check(offset, len);
        // SAFETY: the range was checked.
        if !unsafe { copy::fill(self.ptr(offset), byte, len) } {
            self.note_fault();
        }
    }

    /// Copies `len` bytes from one mapping to another, or within one; overlap is allowed.
    ///
    /// # Panics
    /// If either range is not within its mapping.
    pub fn copy(src: &Memory, src_offset: usize, dst: &Memory, dst_offset: usize, len: usize) {
        src.check(src_offset, len);
        dst.check(dst_offset, len);
        let (from, to) = (src.ptr(src_offset), dst.ptr(dst_offset));
        // Forward copying is wrong only where the destination begins within the source.
        let is_ahead = to.addr() > from.addr() && to.addr() - from.addr() < len;
        if !is_ahead {
            // SAFETY: both ranges were checked; the destination is outside of the source or before
            // it.
            if !unsafe { copy::copy(from, to, len) } {
                // Which of them it was, a closer look at either finds out.
                let foreign = [src, dst].into_iter().filter(|m| m.0.is_foreign);
                foreign.for_each(Memory::note_fault);
            }
            return;
        }
        // From the last to the first, in pieces that are wholly read before they are written.
        let mut left = len;
        while left > 0 {
            let n = left.min(CHUNK);
            left -= n;
            src.with_copy(src_offset + left, n, |bytes| {
                dst.write(dst_offset + left, bytes);
            });
        }
    }

    /// Calls `f` with a copy of at most [`CHUNK`] bytes.
    fn with_copy<R>(&self, offset: usize, len: usize, f: impl FnOnce(&[u8]) -> R) -> R {
        self.check(offset, len);
        let mut copy = [MaybeUninit::<u8>::uninit(); CHUNK];
        let room = &mut copy[..len];
        // SAFETY: the source range was checked; the destination is a local array.
        if !unsafe { copy::load(self.ptr(offset), room.as_mut_ptr().cast(), len) } {
            self.note_fault();
            room.fill(MaybeUninit::new(0));
        }
        // SAFETY: all of `room` has just been written.
        f(unsafe { &*(ptr::from_ref(room) as *const [u8]) })
    }

    /// Whether a byte of the range was not mapped when it was accessed through any handle, or not for
    /// that access. See [`fault`].
    #[must_use]
    pub fn has_faulted(&self) -> bool {
        self.0.has_faulted.load(Ordering::Acquire)
    }

    #[cold]
    pub(crate) fn note_fault(&self) {
        assert!(self.0.is_foreign, "a mapping of ours is not mapped");
        self.0.has_faulted.store(true, Ordering::Release);
        fault::note();
    }

    /// The bytes of the mapping, if it is not foreign and this is the only handle to it: who posts
    /// a request, registers memory or holds a range keeps a handle as long as anything of that may
    /// write the bytes. So a buffer whose requests have completed can be read in place.
    pub fn get_mut(&mut self) -> Option<&mut [u8]> {
        // The count says that no range, no posted request and no device's table has a handle.
        let mapping = Arc::get_mut(&mut self.0).filter(|mapping| !mapping.is_foreign)?;
        // SAFETY: the range is mapped and initialised. No other handle exists, so neither a device
        // nor a copy of ours writes it, and none comes to be as long as this one is borrowed.
        Some(unsafe { std::slice::from_raw_parts_mut(mapping.base, mapping.len) })
    }

    /// Calls `f` with the bytes of a range, without a copy: for a range that its user owns at this
    /// time, because no posted request names it.
    ///
    /// # Safety
    /// No thread and no device writes the range until `f` returns.
    ///
    /// # Panics
    /// If the range is not within the mapping.
    pub unsafe fn with_bytes<R>(&self, offset: usize, len: usize, f: impl FnOnce(&[u8]) -> R) -> R {
        self.check(offset, len);
        // SAFETY: the range was checked, the bytes are initialised, and the caller promises that
        // nothing writes them meanwhile.
        f(unsafe { std::slice::from_raw_parts(self.ptr(offset), len) })
    }

    /// The whole mapping as a slice.
    #[must_use]
    pub fn whole(&self) -> MemSlice {
        MemSlice {
            memory: self.clone(),
            offset: 0,
            len: self.len(),
        }
    }

    /// A range of the mapping, or `None` where it is not within it.
    #[must_use]
    pub fn slice(&self, range: Range<usize>) -> Option<MemSlice> {
        // `start <= end` as well, since the length of a reversed range would wrap.
        (range.start <= range.end && range.end <= self.len()).then(|| MemSlice {
            memory: self.clone(),
            offset: range.start,
            len: range.end - range.start,
        })
    }

    fn check(&self, offset: usize, len: usize) {
        assert!(
            offset.checked_add(len).is_some_and(|end| end <= self.0.len),
            "range {offset}+{len} beyond {}",
            self.0.len
        );
    }
}

/// A range of a [`Memory`] that keeps it alive. Offsets in its methods count from the range's
/// start.
#[derive(Clone, Debug)]
pub struct MemSlice {
    memory: Memory,
    offset: usize,
    len: usize,
}

impl MemSlice {
    /// The mapping the range lies in.
    #[must_use]
    pub fn memory(&self) -> &Memory {
        &self.memory
    }

    /// Offset of the range within its mapping, in bytes.
    #[must_use]
    pub fn offset(&self) -> usize {
        self.offset
    }

    /// Length of the slice in bytes.
    #[must_use]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether the range holds no byte.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Address of the range's first byte for devices, as [`Memory::addr`].
    #[must_use]
    pub fn addr(&self) -> u64 {
        self.memory.addr() + self.offset as u64
    }

    /// Pointer to the range's first byte, as [`Memory::ptr`].
    #[must_use]
    pub fn ptr(&self) -> *mut u8 {
        self.memory.ptr(self.offset)
    }

    /// Copies out, from `offset` within the range. Panics beyond its end.
    pub fn read(&self, offset: usize, out: &mut [u8]) {
        let from = self.part(offset, out.len());
        // SAFETY: the source range was checked; `out` is an exclusive Rust slice.
        if !unsafe { copy::load(from, out.as_mut_ptr(), out.len()) } {
            self.memory.note_fault();
            out.fill(0);
        }
    }

    /// Copies in, at `offset` within the range. Panics beyond its end.
    pub fn write(&self, offset: usize, data: &[u8]) {
        let to = self.part(offset, data.len());
        // SAFETY: as in `read`, with the roles exchanged.
        if !unsafe { copy::store(data.as_ptr(), to, data.len()) } {
            self.memory.note_fault();
        }
    }

    /// Fills a part of the range with `byte`. Panics beyond its end.
    pub fn fill(&self, offset: usize, len: usize, byte: u8) {
        self.check(offset, len);
        self.memory.fill(self.offset + offset, len, byte);
    }

    /// The bytes of the range, copied.
    #[must_use]
    pub fn to_vec(&self) -> Vec<u8> {
        let mut v = vec![0; self.len];
        self.read(0, &mut v);
        v
    }

    /// Calls `f` with copies of the range's bytes, piece by piece and in order, for computing
    /// checksums and comparing.
    pub fn for_each_chunk(&self, mut f: impl FnMut(&[u8])) {
        let mut done = 0;
        // In pieces on the stack: a checksum needs neither the heap nor a reference into the
        // mapping.
        while done < self.len {
            let n = (self.len - done).min(CHUNK);
            self.memory.with_copy(self.offset + done, n, &mut f);
            done += n;
        }
    }

    /// Sees to it that the range is mapped and that its pages are in memory, as an access would; for
    /// one that writes with `write`. For foreign ranges: all others are mapped.
    ///
    /// # Errors
    /// `ENOMEM` where it is not mapped, `EINVAL` where it is not mapped for that access, or is of a
    /// device; also on kernels before Linux 5.14, which do not have the call.
    pub fn populate(&self, write: bool) -> io::Result<()> {
        if self.len == 0 {
            return Ok(());
        }
        // By addresses, since the pages reach beyond the range.
        let start = self.ptr().addr() & !(PAGE - 1);
        let end = self.ptr().addr().checked_add(self.len);
        // Nothing is mapped in the upper half, to which the end of a page could not be added.
        let end = end.filter(|&end| end <= isize::MAX as usize);
        let end = end.ok_or_else(|| io::Error::from_raw_os_error(libc::ENOMEM))?;
        let advice = if write {
            libc::MADV_POPULATE_WRITE
        } else {
            libc::MADV_POPULATE_READ
        };
        // SAFETY: the advice changes no byte and no mapping.
        let r = unsafe { libc::madvise(ptr::without_provenance_mut(start), end - start, advice) };
        match r {
            0 => Ok(()),
            _ => Err(io::Error::last_os_error()),
        }
    }

    /// The range together with the one that follows it in the same mapping; `None` where `next` does
    /// not.
    #[must_use]
    pub fn join(&self, next: &MemSlice) -> Option<MemSlice> {
        let follows = self.offset + self.len == next.offset;
        (follows && Arc::ptr_eq(&self.memory.0, &next.memory.0)).then(|| MemSlice {
            memory: self.memory.clone(),
            offset: self.offset,
            len: self.len + next.len,
        })
    }

    /// A part of the range, or `None` where it is not within it.
    #[must_use]
    pub fn slice(&self, range: Range<usize>) -> Option<MemSlice> {
        (range.start <= range.end && range.end <= self.len).then(|| MemSlice {
            memory: self.memory.clone(),
            offset: self.offset + range.start,
            len: range.end - range.start,
        })
    }

    fn check(&self, offset: usize, len: usize) {
        assert!(
            offset.checked_add(len).is_some_and(|end| end <= self.len),
            "range {offset}+{len} beyond {}",
            self.len
        );
    }

    /// The first byte of a part of the range, once it is checked that all of it lies there.
    fn part(&self, offset: usize, len: usize) -> *mut u8 {
        self.check(offset, len);
        // The range lies in its mapping since it was cut from that, so the part does.
        self.memory.0.base.wrapping_add(self.offset + offset)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rounds_up_to_pages_and_starts_zeroed() {
        let m = Memory::new(5000).unwrap();
        assert_eq!(m.len(), 8192);
        assert_eq!(m.addr() % PAGE as u64, 0);
        assert!(m.whole().to_vec().iter().all(|&b| b == 0));
    }

    #[test]
    fn slices_share_bytes_and_keep_the_mapping_alive() {
        let s = {
            let m = Memory::new(PAGE).unwrap();
            m.write(100, b"riser");
            m.slice(100..105).unwrap()
        };
        assert_eq!(s.to_vec(), b"riser");
        let part = s.slice(1..3).unwrap();
        assert_eq!(part.to_vec(), b"is");
        assert!(s.slice(3..6).is_none());
        Memory::copy(s.memory(), 100, s.memory(), 102, 5);
        let mut out = [0; 7];
        s.memory().read(100, &mut out);
        assert_eq!(&out, b"ririser");
    }

    #[test]
    fn only_a_sole_handle_gives_its_bytes() {
        let mut m = Memory::new(PAGE).unwrap();
        m.get_mut().unwrap()[7] = 9;
        let slice = m.slice(7..8).unwrap();
        assert_eq!(m.get_mut(), None, "a request may hold the slice");
        assert_eq!(slice.to_vec(), [9]);
        drop(slice);
        assert_eq!(m.get_mut().unwrap()[7], 9);
    }

    #[test]
    fn a_foreign_range_is_as_long_as_it_is_and_stays_mapped() {
        let owner = Memory::new(PAGE).unwrap();
        owner.write(13, b"their bytes");
        // SAFETY: `owner` keeps the range mapped, and no reference to it is made.
        let mut range = unsafe { Memory::foreign(owner.ptr(13), 11) };
        assert_eq!((range.len(), range.addr()), (11, owner.addr() + 13));
        assert_eq!(range.get_mut(), None, "its owner may write it");
        assert_eq!(range.whole().to_vec(), b"their bytes");
        assert!(range.slice(0..12).is_none());
        range.write(6, b"chunk");
        drop(range);
        assert_eq!(owner.slice(13..24).unwrap().to_vec(), b"their chunk");
        // SAFETY: nothing of the range is touched.
        let empty = unsafe { Memory::foreign(ptr::null_mut(), 0) };
        assert!(empty.is_empty() && empty.whole().is_empty());
    }

    #[test]
    #[cfg_attr(miri, ignore = "Miri has no such advice")]
    fn unmapped_range_cannot_be_populated() {
        let m = Memory::new(4 * PAGE).unwrap();
        m.slice(PAGE - 1..3 * PAGE + 1)
            .unwrap()
            .populate(true)
            .unwrap();
        assert!(m.whole().to_vec().iter().all(|&b| b == 0));
        // SAFETY: nothing of the range is accessed.
        let all = unsafe { Memory::foreign(ptr::null_mut(), usize::MAX) };
        let at = m.addr() as usize;
        let part = |from: usize, len| all.slice(from..from + len).unwrap().populate(false);
        part(at + 7, 3 * PAGE).unwrap();
        part(0, 0).unwrap();
        // The range ends in a page without access. Otherwise the call would populate mappings of
        // other tests that follow, for example holes of their files.
        // SAFETY: a new mapping at an address of the kernel's choice.
        let guarded = unsafe {
            let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
            let base = libc::mmap(ptr::null_mut(), 2 * PAGE, libc::PROT_NONE, flags, -1, 0);
            assert_eq!(libc::mprotect(base, PAGE, libc::PROT_READ), 0);
            base
        };
        for (from, len) in [
            (0, 1),
            (guarded.addr(), 1 << 46),
            (1, usize::MAX - 1),
            (usize::MAX - 9, 9),
        ] {
            assert!(part(from, len).is_err(), "{from:#x}+{len:#x}");
        }
        // SAFETY: a mapping of our own, at an address of the kernel's choice, which is not used.
        unsafe {
            let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
            let p = libc::mmap(ptr::null_mut(), PAGE, libc::PROT_READ, flags, -1, 0);
            let range = Memory::foreign(p.cast(), PAGE).whole();
            range.populate(false).unwrap();
            assert!(range.populate(true).is_err(), "it is read-only");
            drop(range);
            libc::munmap(p, PAGE);
            libc::munmap(guarded, 2 * PAGE);
        }
    }

    #[test]
    fn overlapping_ranges_are_copied_as_they_were() {
        let len = 3 * CHUNK + 5;
        for (from, to) in [(0, 1), (1, 0), (0, CHUNK), (7, 7), (CHUNK + 3, 0)] {
            let m = Memory::new(8 * CHUNK).unwrap();
            let bytes: Vec<u8> = (0..len).map(|i| (i * 7 + i / 256) as u8).collect();
            m.write(from, &bytes);
            Memory::copy(&m, from, &m, to, len);
            assert_eq!(m.slice(to..to + len).unwrap().to_vec(), bytes);
        }
    }

    #[test]
    fn chunks_are_the_bytes_of_the_range_in_order() {
        let m = Memory::new(4 * CHUNK).unwrap();
        let bytes: Vec<u8> = (0..2 * CHUNK + 9).map(|i| (i / 3) as u8).collect();
        m.write(5, &bytes);
        let mut got = Vec::new();
        let slice = m.slice(5..5 + bytes.len()).unwrap();
        slice.for_each_chunk(|chunk| got.extend_from_slice(chunk));
        assert_eq!(got, bytes);
    }

    #[test]
    fn threads_may_copy_the_same_range_at_once() {
        const TIMES: usize = if cfg!(miri) { 10 } else { 1000 };
        let m = Memory::new(PAGE).unwrap();
        std::thread::scope(|scope| {
            for byte in [1, 2] {
                let m = m.clone();
                scope.spawn(move || (0..TIMES).for_each(|_| m.write(3, &[byte; 100])));
            }
            let mut got = [0; 100];
            for _ in 0..TIMES {
                m.read(3, &mut got);
                assert!(got.iter().all(|b| *b <= 2));
            }
        });
    }

    #[test]
    #[should_panic(expected = "beyond")]
    fn a_range_past_the_end_panics() {
        Memory::new(PAGE).unwrap().write(PAGE - 1, &[1, 2]);
    }

    #[test]
    #[should_panic(expected = "beyond")]
    fn a_range_that_wraps_panics() {
        let mut out = [0; 2];
        Memory::new(PAGE).unwrap().read(usize::MAX, &mut out);
    }
}
