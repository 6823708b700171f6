//! Allocators that count what is allocated and not freed: one reports each allocation, and one knows
//! what a part of a program has.

#![allow(
    unsafe_code,
    reason = "counting allocations takes an allocator of one's own"
)]

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::sync::atomic::{AtomicUsize, Ordering};

/// The system's allocator, with a count of bytes in use. For `#[global_allocator]`.
pub struct Counting {
    in_use: AtomicUsize,
    on_alloc: fn(),
}

impl Counting {
    /// An allocator that calls `on_alloc` before each allocation. What `on_alloc` allocates calls
    /// it again.
    pub const fn new(on_alloc: fn()) -> Self {
        Self {
            in_use: AtomicUsize::new(0),
            on_alloc,
        }
    }

    /// Bytes that all threads have allocated and not freed, without what the system's allocator
    /// adds.
    pub fn in_use(&self) -> usize {
        self.in_use.load(Ordering::Relaxed)
    }
}

// SAFETY: everything is passed on to the system's allocator unchanged.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        (self.on_alloc)();
        self.in_use.fetch_add(layout.size(), Ordering::Relaxed);
        // SAFETY: the caller's promises are the system allocator's.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        self.in_use.fetch_sub(layout.size(), Ordering::Relaxed);
        // SAFETY: the caller's promises are the system allocator's.
        unsafe { System.dealloc(ptr, layout) }
    }
}

/// Bytes before each allocation of [`Attributed`], if it needs no larger alignment.
const HEAD: usize = 16;

thread_local! {
    /// What this thread allocates is the part's.
    static IS_PART: Cell<bool> = const { Cell::new(false) };
    /// Bytes that the part has, on this thread.
    static OF_PART: Cell<isize> = const { Cell::new(0) };
}

/// The system's allocator, which knows how much of what is in use was allocated by a part of a
/// program, also when others free it. For `#[global_allocator]`.
///
/// Each allocation has a head that says whose it is: what a part gives to others, as a message
/// does, would otherwise stay in its account.
pub struct Attributed;

impl Attributed {
    /// Runs what belongs to the part.
    pub fn part<T>(run: impl FnOnce() -> T) -> T {
        Self::attribute(true, run)
    }

    /// Runs what does not belong to it, in the midst of what does.
    pub fn others<T>(run: impl FnOnce() -> T) -> T {
        Self::attribute(false, run)
    }

    fn attribute<T>(is_part: bool, run: impl FnOnce() -> T) -> T {
        /// Ends it by a panic as well.
        struct Before(bool);
        impl Drop for Before {
            fn drop(&mut self) {
                IS_PART.set(self.0);
            }
        }
        let _before = Before(IS_PART.replace(is_part));
        run()
    }

    /// Bytes that this thread has allocated in [`Self::part`], and that were not freed, since it
    /// began. Frees on other threads are charged to those threads.
    #[must_use]
    pub fn in_use() -> isize {
        OF_PART.get()
    }

    /// The layout of an allocation with its head, and the length of the head.
    fn with_head(layout: Layout) -> Option<(Layout, usize)> {
        let head = HEAD.max(layout.align());
        let size = layout.size().checked_add(head)?;
        let layout = Layout::from_size_align(size, head).ok()?;
        Some((layout, head))
    }

    /// Writes the head of an allocation, and returns its memory.
    ///
    /// # Safety
    /// `start` is null, or the start of an allocation with a head of that length.
    unsafe fn enter(start: *mut u8, head: usize, size: usize) -> *mut u8 {
        if start.is_null() {
            return start;
        }
        let is_part = IS_PART.get();
        if is_part {
            OF_PART.set(OF_PART.get() + size as isize);
        }
        // SAFETY: the caller's promise; the head is not shorter than [`HEAD`].
        unsafe {
            *start = u8::from(is_part);
            start.add(head)
        }
    }
}

// SAFETY: the system's allocator gives memory for the head and, behind it, of the alignment and the
// size that was asked for; the same layout is computed when it is freed.
unsafe impl GlobalAlloc for Attributed {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        let Some((whole, head)) = Self::with_head(layout) else {
            return std::ptr::null_mut();
        };
        // SAFETY: the size is not 0, and the allocation has a head.
        unsafe { Self::enter(System.alloc(whole), head, layout.size()) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        let Some((whole, head)) = Self::with_head(layout) else {
            return std::ptr::null_mut();
        };
        // SAFETY: as above.
        unsafe { Self::enter(System.alloc_zeroed(whole), head, layout.size()) }
    }

    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        let (whole, head) = Self::with_head(layout).expect("it was allocated so");
        // SAFETY: the caller's promise, so that is the start of an allocation of ours.
        unsafe {
            let start = ptr.sub(head);
            if *start != 0 {
                OF_PART.set(OF_PART.get() - layout.size() as isize);
            }
            System.dealloc(start, whole);
        }
    }

    unsafe fn realloc(&self, ptr: *mut u8, layout: Layout, new_size: usize) -> *mut u8 {
        let (whole, head) = Self::with_head(layout).expect("it was allocated so");
        let Some(size) = new_size.checked_add(head) else {
            return std::ptr::null_mut();
        };
        // SAFETY: as above; the head moves with the rest, so the memory stays whose it was.
        unsafe {
            let start = System.realloc(ptr.sub(head), whole, size);
            if start.is_null() {
                return start;
            }
            if *start != 0 {
                OF_PART.set(OF_PART.get() + new_size as isize - layout.size() as isize);
            }
            start.add(head)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_stays_whose_it_was() {
        let layout = Layout::from_size_align(100, 64).unwrap();
        let larger = Layout::from_size_align(1000, 64).unwrap();
        let before = Attributed::in_use();
        let of_part = || Attributed::in_use() - before;
        // SAFETY: each is freed once, with its layout.
        unsafe {
            let own = Attributed::part(|| Attributed.alloc(layout));
            let other = Attributed::part(|| Attributed::others(|| Attributed.alloc_zeroed(layout)));
            assert_eq!((own as usize % 64, other as usize % 64), (0, 0));
            assert_eq!(of_part(), 100);
            own.write_bytes(7, 100);
            let own = Attributed.realloc(own, layout, 1000);
            assert_eq!((of_part(), *own.add(99)), (1000, 7));
            Attributed::part(|| Attributed.dealloc(other, layout));
            assert_eq!(of_part(), 1000);
            Attributed.dealloc(own, larger);
        }
        assert_eq!(of_part(), 0);
    }
}
