//! An allocator that counts what is allocated and not freed, and reports each allocation.

#![allow(
    unsafe_code,
    reason = "counting allocations takes an allocator of one's own"
)]

use std::alloc::{GlobalAlloc, Layout, System};
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
