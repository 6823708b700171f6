//! Memory that devices may write without the compiler's knowledge.
//!
//! Memory that is accessed by a NIC or filled by `io_uring`, and pools that command buffers are
//! allocated from, are represented by a [`Memory`]: a page-aligned, zeroed, reference-counted
//! anonymous mapping, or a range that is owned by another part of the process
//! ([`Memory::foreign`]). It is accessed by copying ([`Memory::read`], [`Memory::write`]), and its
//! address is passed to devices, just like a driver handles device memory. A peer that overwrites a
//! buffer while it is being read can corrupt its bytes, but can't violate a Rust invariant.
//!
//! # Concurrent access
//!
//! Any number of threads and devices may access the memory. The safe functions behave as if they
//! copied single bytes using relaxed atomics, so they can be used concurrently on the same range.
//! The only consequence is that old and new bytes may be mixed. If ordering is required, it must be
//! provided by other means, as with any device: a completion is polled before the bytes that it
//! announces are used.
//!
//! A mapping may be written concurrently while other handles to it exist. So code that needs a
//! slice of its bytes has three options: it can use copies ([`MemSlice::for_each_chunk`]), it can
//! prove statically that it has the only handle ([`Memory::get_mut`]), or, if there are always
//! other handles because the mapping is registered, it can guarantee that the range is not written
//! concurrently ([`Memory::with_bytes`], unsafe). Creating a pointer ([`Memory::ptr`]) is safe, but
//! using it is unsafe, as usual.
//!
//! - [`Memory`]: the mapping. Clones share it, and dropping the last clone unmaps it.
//! - [`MemSlice`]: a checked range of a mapping, which keeps the mapping alive. Queues of posted
//!   work requests, rings and scatter lists hold it while a device may access the bytes.
//! - [`sys`]: system calls that send from ranges and receive into them.
//! - [`shared`]: a mapping that is shared with another process.
//! - [`MappedFile`]: a file in a memory-backed file system, read without system calls.
//! - [`fault`]: accesses to memory that was unmapped.
//! - [`simulated`]: reproducible addresses, and mappings that fail.
//!
//! Units: offsets and lengths are in bytes. Addresses are virtual addresses of this process, except
//! in simulations.

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

/// Number of bytes to copy at a time for code that needs a slice. It's smaller for Miri, because
/// every access is interpreted.
const CHUNK: usize = if cfg!(miri) { 256 } else { 4096 };

/// Size and alignment of a page, and the granularity of every [`Memory`], in bytes.
pub const PAGE: usize = 4096;

struct Mapping {
    base: *mut u8,
    len: usize,
    /// Address of the first byte for devices.
    address: u64,
    /// Set if another part of the process has mapped it, writes to it and will unmap it.
    is_foreign: bool,
    /// Set if a byte was accessed that is not mapped, or is not mapped for this kind of access.
    has_faulted: AtomicBool,
}

// SAFETY: a mapping is plain bytes. All accesses from this crate are raw-pointer copies that create
// no references, so moving or sharing the owner between threads cannot alias a Rust object.
unsafe impl Send for Mapping {}
// SAFETY: as above. Concurrent copies use atomic accesses.
unsafe impl Sync for Mapping {}

impl Drop for Mapping {
    fn drop(&mut self) {
        if self.is_foreign {
            return;
        }
        // SAFETY: `base` and `len` were used for the mmap call in `Memory::new`, and this is the
        // last owner, so the range can no longer be accessed.
        unsafe { libc::munmap(self.base.cast(), self.len) };
    }
}

/// A page-aligned, zeroed, reference-counted anonymous mapping, or a foreign range.
#[derive(Clone)]
pub struct Memory(Arc<Mapping>);

impl fmt::Debug for Memory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Memory({:#x}+{:#x})", self.addr(), self.len())
    }
}

impl Memory {
    /// Maps at least `len` bytes, rounded up to whole pages, and at least one page.
    ///
    /// # Errors
    /// Returns errors of `mmap(2)`, usually `ENOMEM`.
    pub fn new(len: usize) -> io::Result<Self> {
        // At least one page, because mmap rejects a length of 0.
        let len = len
            .max(1)
            .checked_next_multiple_of(PAGE)
            .filter(|_| !simulated::fails())
            .ok_or_else(|| io::Error::from_raw_os_error(libc::ENOMEM))?;
        // SAFETY: a new anonymous mapping at an address chosen by the kernel does not affect
        // existing mappings.
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
        let address = simulated::allocate_range(len).unwrap_or(base as u64);
        Ok(Self(Arc::new(Mapping {
            base,
            len,
            address,
            is_foreign: false,
            has_faulted: AtomicBool::new(false),
        })))
    }

    /// Creates a handle for a range of `len` bytes that was mapped by another part of the process,
    /// such as a buffer registered by a C program. It can have any address and length, and
    /// [`Memory::len`] returns exactly `len`. Dropping the last handle does not unmap the range,
    /// and [`Memory::get_mut`] always returns `None`, because the owner may write to it at any
    /// time.
    ///
    /// # Safety
    /// The caller must guarantee the following while a handle to the range, or a slice of it,
    /// exists:
    ///
    /// - Each byte that is read via a handle is mapped readable at this time, and each byte that is
    ///   written is mapped writable, unless faults are caught ([`fault::catch`]). The range may
    ///   contain holes if they are not accessed.
    /// - There is no Rust reference to a byte of the range while a handle writes that byte, and no
    ///   mutable reference while a handle reads it. Raw pointers, and code in other languages, may
    ///   access the range at any time, but then old and new bytes may be mixed.
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

    /// Like [`Memory::new`], for a mapping that is mostly unused: memory is only allocated for
    /// pages that are written, and never in larger units.
    ///
    /// # Errors
    /// Same as for [`Memory::new`].
    pub fn sparse(len: usize) -> io::Result<Self> {
        let memory = Self::new(len)?;
        // With transparent huge pages, writing the first byte would allocate 2 MiB, because the
        // kernel merges adjacent mappings.
        // SAFETY: this is the range of the mapping, and the advice does not change its contents.
        let advised =
            unsafe { libc::madvise(memory.ptr(0).cast(), memory.len(), libc::MADV_NOHUGEPAGE) };
        if advised != 0 {
            let error = io::Error::last_os_error();
            // A kernel without huge pages rejects the advice, and doesn't need it.
            if error.raw_os_error() != Some(libc::EINVAL) {
                return Err(error);
            }
        }
        Ok(memory)
    }

    /// Returns the length in bytes. It is a multiple of [`PAGE`], except for foreign ranges.
    #[must_use]
    pub fn len(&self) -> usize {
        self.0.len
    }

    /// Returns whether the length is zero. Only a foreign range can be empty, because the smallest
    /// mapping is one page.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0.len == 0
    }

    /// Returns the address of the first byte for devices. It is the virtual address, unless the
    /// mapping was created in [`simulated::addresses`].
    #[must_use]
    pub fn addr(&self) -> u64 {
        self.0.address
    }

    /// Returns a pointer to the byte at `offset`, which can be passed to a device or a system call.
    /// When using it, the caller must ensure that the range is within the mapping, and must keep a
    /// handle while the pointer is used, because [`Memory::get_mut`] relies on this.
    ///
    /// # Panics
    /// Panics if `offset` is out of bounds.
    #[must_use]
    pub fn ptr(&self, offset: usize) -> *mut u8 {
        // The end of the mapping is allowed, because an empty range can be there.
        assert!(
            offset <= self.0.len,
            "offset {offset} exceeds length {}",
            self.0.len
        );
        // A foreign range can be the whole address space, for which `add` is undefined behavior.
        self.0.base.wrapping_add(offset)
    }

    /// Copies `out.len()` bytes from `offset` to `out`.
    ///
    /// # Panics
    /// Panics if the range is out of bounds.
    pub fn read(&self, offset: usize, out: &mut [u8]) {
        self.check(offset, out.len());
        // SAFETY: the source range was checked. `out` is an exclusive Rust slice, so it cannot
        // overlap memory that is only reachable via raw pointers.
        let is_copied = unsafe { copy::load(self.ptr(offset), out.as_mut_ptr(), out.len()) };
        if !is_copied {
            self.note_fault();
            out.fill(0);
        }
    }

    /// Copies `data` to `offset`.
    ///
    /// # Panics
    /// Panics if the range is out of bounds.
    pub fn write(&self, offset: usize, data: &[u8]) {
        self.check(offset, data.len());
        // SAFETY: as in `read`, with the roles swapped.
        let is_copied = unsafe { copy::store(data.as_ptr(), self.ptr(offset), data.len()) };
        if !is_copied {
            self.note_fault();
        }
    }

    /// Sets `len` bytes starting at `offset` to `byte`.
    ///
    /// # Panics
    /// Panics if the range is out of bounds.
    pub fn fill(&self, offset: usize, len: usize, byte: u8) {
        self.check(offset, len);
        // SAFETY: the range was checked.
        if !unsafe { copy::fill(self.ptr(offset), byte, len) } {
            self.note_fault();
        }
    }

    /// Copies `len` bytes from one mapping to another, or within a mapping. The ranges may overlap.
    ///
    /// # Panics
    /// Panics if either range is out of bounds.
    pub fn copy(src: &Memory, src_offset: usize, dst: &Memory, dst_offset: usize, len: usize) {
        src.check(src_offset, len);
        dst.check(dst_offset, len);
        let (from, to) = (src.ptr(src_offset), dst.ptr(dst_offset));
        // Copying forwards is only wrong if the start of the destination is inside of the source.
        let is_ahead = to.addr() > from.addr() && to.addr() - from.addr() < len;
        if !is_ahead {
            // SAFETY: both ranges were checked. The destination is outside of the source or before
            // it.
            if !unsafe { copy::copy(from, to, len) } {
                // We don't know which of them has failed, so both are marked if they are foreign.
                let foreign = [src, dst].into_iter().filter(|m| m.0.is_foreign);
                foreign.for_each(Memory::note_fault);
            }
            return;
        }
        // Copy backwards, in chunks that are completely read before they are written.
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
        // SAFETY: the source range was checked. The destination is a local array.
        if !unsafe { copy::load(self.ptr(offset), room.as_mut_ptr().cast(), len) } {
            self.note_fault();
            room.fill(MaybeUninit::new(0));
        }
        // SAFETY: `room` has just been initialized.
        f(unsafe { &*(ptr::from_ref(room) as *const [u8]) })
    }

    /// Returns whether a byte of the range was accessed via any handle although it was not mapped,
    /// or not for this kind of access. See [`fault`].
    #[must_use]
    pub fn has_faulted(&self) -> bool {
        self.0.has_faulted.load(Ordering::Acquire)
    }

    #[cold]
    pub(crate) fn note_fault(&self) {
        assert!(self.0.is_foreign, "own mapping must be mapped");
        self.0.has_faulted.store(true, Ordering::Release);
        fault::note();
    }

    /// Returns the bytes of the mapping if it is not foreign and this is the only handle to it.
    /// Whoever posts a request, registers memory or holds a range must keep a handle while the
    /// bytes may be written. So a buffer can be read in place when its requests have completed.
    pub fn get_mut(&mut self) -> Option<&mut [u8]> {
        // This reference count proves that no range, no posted request and no table of a device has
        // a handle.
        let mapping = Arc::get_mut(&mut self.0).filter(|mapping| !mapping.is_foreign)?;
        // SAFETY: the range is mapped and initialized. There is no other handle, so neither a
        // device nor one of our copies writes to it, and no other handle can be created while this
        // one is borrowed.
        Some(unsafe { std::slice::from_raw_parts_mut(mapping.base, mapping.len) })
    }

    /// Calls `f` with the bytes of a range, without copying. For a range that is currently owned by
    /// its user, because no posted request refers to it.
    ///
    /// # Safety
    /// No thread or device may write to the range until `f` returns.
    ///
    /// # Panics
    /// Panics if the range is out of bounds.
    pub unsafe fn with_bytes<R>(&self, offset: usize, len: usize, f: impl FnOnce(&[u8]) -> R) -> R {
        self.check(offset, len);
        // SAFETY: the range was checked, the bytes are initialized, and the caller guarantees that
        // they are not written concurrently.
        f(unsafe { std::slice::from_raw_parts(self.ptr(offset), len) })
    }

    /// Returns the whole mapping as a slice.
    #[must_use]
    pub fn whole(&self) -> MemSlice {
        MemSlice {
            memory: self.clone(),
            offset: 0,
            len: self.len(),
        }
    }

    /// Returns a range of the mapping, or `None` if it is out of bounds.
    #[must_use]
    pub fn slice(&self, range: Range<usize>) -> Option<MemSlice> {
        // We also need to check `start <= end`, because the length of a reversed range would
        // overflow.
        (range.start <= range.end && range.end <= self.len()).then(|| MemSlice {
            memory: self.clone(),
            offset: range.start,
            len: range.end - range.start,
        })
    }

    fn check(&self, offset: usize, len: usize) {
        assert!(
            offset.checked_add(len).is_some_and(|end| end <= self.0.len),
            "range {offset}+{len} exceeds length {}",
            self.0.len
        );
    }
}

/// A range of a [`Memory`] that keeps it alive. Offsets in its methods are relative to the range.
#[derive(Clone, Debug)]
pub struct MemSlice {
    memory: Memory,
    offset: usize,
    len: usize,
}

impl MemSlice {
    /// Returns the mapping that contains the range.
    #[must_use]
    pub fn memory(&self) -> &Memory {
        &self.memory
    }

    /// Returns the offset of the range within its mapping, in bytes.
    #[must_use]
    pub fn offset(&self) -> usize {
        self.offset
    }

    /// Returns the length of the slice in bytes.
    #[must_use]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Returns whether the range is empty.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Returns the address of the first byte for devices, like [`Memory::addr`].
    #[must_use]
    pub fn addr(&self) -> u64 {
        self.memory.addr() + self.offset as u64
    }

    /// Returns a pointer to the first byte, like [`Memory::ptr`].
    #[must_use]
    pub fn ptr(&self) -> *mut u8 {
        self.memory.ptr(self.offset)
    }

    /// Copies bytes from `offset` within the range to `out`. Panics if they are out of bounds.
    pub fn read(&self, offset: usize, out: &mut [u8]) {
        let from = self.part(offset, out.len());
        // SAFETY: the source range was checked. `out` is an exclusive Rust slice.
        if !unsafe { copy::load(from, out.as_mut_ptr(), out.len()) } {
            self.memory.note_fault();
            out.fill(0);
        }
    }

    /// Copies `data` to `offset` within the range. Panics if it is out of bounds.
    pub fn write(&self, offset: usize, data: &[u8]) {
        let to = self.part(offset, data.len());
        // SAFETY: as in `read`, with the roles swapped.
        if !unsafe { copy::store(data.as_ptr(), to, data.len()) } {
            self.memory.note_fault();
        }
    }

    /// Sets a part of the range to `byte`. Panics if it is out of bounds.
    pub fn fill(&self, offset: usize, len: usize, byte: u8) {
        self.check(offset, len);
        self.memory.fill(self.offset + offset, len, byte);
    }

    /// Returns a copy of the bytes.
    #[must_use]
    pub fn to_vec(&self) -> Vec<u8> {
        let mut v = vec![0; self.len];
        self.read(0, &mut v);
        v
    }

    /// Calls `f` with copies of the bytes, in order and in chunks, for checksums and comparisons.
    pub fn for_each_chunk(&self, mut f: impl FnMut(&[u8])) {
        let mut done = 0;
        // The chunks are on the stack, so we need neither the heap nor a reference to the mapping.
        while done < self.len {
            let n = (self.len - done).min(CHUNK);
            self.memory.with_copy(self.offset + done, n, &mut f);
            done += n;
        }
    }

    /// Ensures that the range is mapped and that its pages are in memory, as if it was read, or
    /// written if `write` is set. This is only useful for foreign ranges, because all other ranges
    /// are mapped.
    ///
    /// # Errors
    /// Returns `ENOMEM` if it is not mapped, `EINVAL` if it is not mapped for this kind of access,
    /// or if it belongs to a device. Also returns `EINVAL` on kernels older than Linux 5.14, which
    /// do not support this call.
    pub fn populate(&self, write: bool) -> io::Result<()> {
        if self.len == 0 {
            return Ok(());
        }
        // We use addresses instead of pointers, because the pages may extend beyond the range.
        let start = self.ptr().addr() & !(PAGE - 1);
        let end = self.ptr().addr().checked_add(self.len);
        // The upper half of the address space is never mapped, and rounding up to the end of a page
        // could overflow there.
        let end = end.filter(|&end| end <= isize::MAX as usize);
        let end = end.ok_or_else(|| io::Error::from_raw_os_error(libc::ENOMEM))?;
        let advice = if write {
            libc::MADV_POPULATE_WRITE
        } else {
            libc::MADV_POPULATE_READ
        };
        // SAFETY: the advice does not change any bytes or mappings.
        let r = unsafe { libc::madvise(ptr::without_provenance_mut(start), end - start, advice) };
        match r {
            0 => Ok(()),
            _ => Err(io::Error::last_os_error()),
        }
    }

    /// Returns the union of this range and the range that follows it in the same mapping, or `None`
    /// if `next` does not follow this range.
    #[must_use]
    pub fn join(&self, next: &MemSlice) -> Option<MemSlice> {
        let follows = self.offset + self.len == next.offset;
        (follows && Arc::ptr_eq(&self.memory.0, &next.memory.0)).then(|| MemSlice {
            memory: self.memory.clone(),
            offset: self.offset,
            len: self.len + next.len,
        })
    }

    /// Returns a part of the range, or `None` if it is out of bounds.
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
            "range {offset}+{len} exceeds length {}",
            self.len
        );
    }

    /// Checks that a part of the range is within bounds, and returns a pointer to its first byte.
    fn part(&self, offset: usize, len: usize) -> *mut u8 {
        self.check(offset, len);
        // The range is within its mapping, because it was checked when it was created, so this part
        // is too.
        self.memory.0.base.wrapping_add(self.offset + offset)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mapping_is_zeroed_whole_pages() {
        let m = Memory::new(5000).unwrap();
        assert_eq!(m.len(), 8192);
        assert_eq!(m.addr() % PAGE as u64, 0);
        assert!(m.whole().to_vec().iter().all(|&b| b == 0));
    }

    #[test]
    fn slices_share_bytes_and_keep_mapping_alive() {
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
    fn get_mut_requires_unique_handle() {
        let mut m = Memory::new(PAGE).unwrap();
        m.get_mut().unwrap()[7] = 9;
        let slice = m.slice(7..8).unwrap();
        assert_eq!(m.get_mut(), None, "a request may hold the slice");
        assert_eq!(slice.to_vec(), [9]);
        drop(slice);
        assert_eq!(m.get_mut().unwrap()[7], 9);
    }

    #[test]
    fn foreign_range_keeps_length_and_mapping() {
        let owner = Memory::new(PAGE).unwrap();
        owner.write(13, b"their bytes");
        // SAFETY: `owner` keeps the range mapped, and there are no references to it.
        let mut range = unsafe { Memory::foreign(owner.ptr(13), 11) };
        assert_eq!((range.len(), range.addr()), (11, owner.addr() + 13));
        assert_eq!(range.get_mut(), None, "its owner may write it");
        assert_eq!(range.whole().to_vec(), b"their bytes");
        assert!(range.slice(0..12).is_none());
        range.write(6, b"chunk");
        drop(range);
        assert_eq!(owner.slice(13..24).unwrap().to_vec(), b"their chunk");
        // SAFETY: the range is not accessed.
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
        // SAFETY: the range is not accessed.
        let all = unsafe { Memory::foreign(ptr::null_mut(), usize::MAX) };
        let at = m.addr() as usize;
        let part = |from: usize, len| all.slice(from..from + len).unwrap().populate(false);
        part(at + 7, 3 * PAGE).unwrap();
        part(0, 0).unwrap();
        // This range ends in a page without access. Otherwise the call would populate subsequent
        // mappings of other tests, for example holes of their files.
        // SAFETY: this is a new mapping at an address chosen by the kernel.
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
        // SAFETY: this is a new mapping at an address chosen by the kernel, and it is not used.
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
    fn overlapping_ranges_are_copied_correctly() {
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
    fn chunks_are_visited_in_order() {
        let m = Memory::new(4 * CHUNK).unwrap();
        let bytes: Vec<u8> = (0..2 * CHUNK + 9).map(|i| (i / 3) as u8).collect();
        m.write(5, &bytes);
        let mut got = Vec::new();
        let slice = m.slice(5..5 + bytes.len()).unwrap();
        slice.for_each_chunk(|chunk| got.extend_from_slice(chunk));
        assert_eq!(got, bytes);
    }

    #[test]
    fn range_can_be_copied_concurrently() {
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
    #[should_panic(expected = "exceeds length")]
    fn range_past_end_panics() {
        Memory::new(PAGE).unwrap().write(PAGE - 1, &[1, 2]);
    }

    #[test]
    #[should_panic(expected = "exceeds length")]
    fn overflowing_range_panics() {
        let mut out = [0; 2];
        Memory::new(PAGE).unwrap().read(usize::MAX, &mut out);
    }
}
