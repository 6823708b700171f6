//! Allocators that track how much memory has been allocated but not freed. One can be used to get a
//! callback for each allocation, and one to track the memory used by a part of the program.

#![allow(
    unsafe_code,
    reason = "counting allocations takes an allocator of one's own"
)]

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Uses the system allocator and counts the number of bytes in use. This should be set as the
/// `#[global_allocator]`.
pub struct Counting {
    in_use: AtomicUsize,
    on_alloc: fn(),
}

impl Counting {
    /// Creates an allocator that calls `on_alloc` before each allocation. If `on_alloc` allocates,
    /// it will be called again.
    pub const fn new(on_alloc: fn()) -> Self {
        Self {
            in_use: AtomicUsize::new(0),
            on_alloc,
        }
    }

    /// Returns the number of bytes currently allocated by all threads, not including any overhead
    /// of the system allocator.
    pub fn in_use(&self) -> usize {
        self.in_use.load(Ordering::Relaxed)
    }
}

// SAFETY: all calls are passed to the system allocator without changes.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        (self.on_alloc)();
        self.in_use.fetch_add(layout.size(), Ordering::Relaxed);
        // SAFETY: the caller must uphold the same requirements as for the system allocator.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        self.in_use.fetch_sub(layout.size(), Ordering::Relaxed);
        // SAFETY: the caller must uphold the same requirements as for the system allocator.
        unsafe { System.dealloc(ptr, layout) }
    }
}

/// Number of bytes to add before each allocation in [`Attributed`], unless a larger alignment is
/// required.
const HEAD: usize = 16;

thread_local! {
    /// Set if allocations on this thread should be counted for the part.
    static IS_PART: Cell<bool> = const { Cell::new(false) };
    /// Number of bytes currently counted for the part on this thread.
    static OF_PART: Cell<isize> = const { Cell::new(0) };
}

/// Uses the system allocator and tracks how much memory was allocated by a part of the program,
/// even if it's freed by other code. This should be set as the `#[global_allocator]`.
///
/// Each allocation has a header with its owner. Without this, memory would still be counted for the
/// part after it has been passed to other code, such as a message.
pub struct Attributed;

impl Attributed {
    /// Runs code that belongs to the part.
    pub fn part<T>(run: impl FnOnce() -> T) -> T {
        Self::attribute(true, run)
    }

    /// Runs code that doesn't belong to the part, but is called from it.
    pub fn others<T>(run: impl FnOnce() -> T) -> T {
        Self::attribute(false, run)
    }

    fn attribute<T>(is_part: bool, run: impl FnOnce() -> T) -> T {
        /// Restores the previous state, including after a panic.
        struct Before(bool);
        impl Drop for Before {
            fn drop(&mut self) {
                IS_PART.set(self.0);
            }
        }
        let _before = Before(IS_PART.replace(is_part));
        run()
    }

    /// Returns the number of bytes that were allocated in [`Self::part`] on this thread since it
    /// was started, and have not been freed. If memory is freed on another thread, this is counted
    /// on that thread.
    #[must_use]
    pub fn in_use() -> isize {
        OF_PART.get()
    }

    /// Returns the layout of an allocation including its header, and the header length.
    fn with_head(layout: Layout) -> Option<(Layout, usize)> {
        let head = HEAD.max(layout.align());
        let size = layout.size().checked_add(head)?;
        let layout = Layout::from_size_align(size, head).ok()?;
        Some((layout, head))
    }

    /// Writes the header of an allocation and returns a pointer to the memory after it.
    ///
    /// # Safety
    /// `start` must be null, or the start of an allocation with a header of this length.
    unsafe fn enter(start: *mut u8, head: usize, size: usize) -> *mut u8 {
        if start.is_null() {
            return start;
        }
        let is_part = IS_PART.get();
        if is_part {
            OF_PART.set(OF_PART.get() + size as isize);
        }
        // SAFETY: guaranteed by the caller, and the header is not shorter than [`HEAD`].
        unsafe {
            *start = u8::from(is_part);
            start.add(head)
        }
    }
}

// SAFETY: we request enough memory from the system allocator for the header, followed by the
// requested size with the requested alignment. The same layout is calculated again when the memory
// is freed.
unsafe impl GlobalAlloc for Attributed {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        let Some((whole, head)) = Self::with_head(layout) else {
            return std::ptr::null_mut();
        };
        // SAFETY: the size is not zero, and the allocation has a header.
        unsafe { Self::enter(System.alloc(whole), head, layout.size()) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        let Some((whole, head)) = Self::with_head(layout) else {
            return std::ptr::null_mut();
        };
        // SAFETY: see above.
        unsafe { Self::enter(System.alloc_zeroed(whole), head, layout.size()) }
    }

    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        let (whole, head) = Self::with_head(layout).expect("it was allocated so");
        // SAFETY: guaranteed by the caller, so this must be the start of one of our allocations.
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
        // SAFETY: see above. The header is moved with the data, so the owner doesn't change.
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
    fn reallocated_memory_keeps_owner() {
        let layout = Layout::from_size_align(100, 64).unwrap();
        let larger = Layout::from_size_align(1000, 64).unwrap();
        let before = Attributed::in_use();
        let of_part = || Attributed::in_use() - before;
        // SAFETY: each allocation is freed once, using the same layout.
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
