//! A queue pair's completion queue, and registered memory.

use std::ffi::{c_int, c_void};
use std::mem::zeroed;
use std::ptr;

use riser_memory::Memory;
use riser_rdma_core_sys::bindings::*;

use super::ident::never_block;
use crate::cq::*;
use crate::errno::Errno;
use crate::memory::*;

/// Completions that are taken at a time.
const BATCH: usize = 16;

/// A completion queue with a channel whose descriptor never blocks.
pub(super) struct Completions {
    cq: *mut ibv_cq,
    channel: *mut ibv_comp_channel,
    entries: usize,
}

// SAFETY: the library's calls may be made in any thread.
unsafe impl Send for Completions {}

impl Completions {
    /// Makes one for this number of work requests.
    ///
    /// # Errors
    /// Those of `ibv_create_comp_channel(3)` and `ibv_create_cq(3)`.
    ///
    /// # Safety
    /// The context is alive.
    pub(super) unsafe fn new(context: *mut ibv_context, entries: u32) -> Result<Self, Errno> {
        // SAFETY: as the caller promises; what is made here is alive.
        unsafe {
            let channel = ibv_create_comp_channel(context);
            if channel.is_null() {
                return Err(Errno::last());
            }
            never_block((*channel).fd);
            let cq = ibv_create_cq(context, entries as c_int, ptr::null_mut(), channel, 0);
            if cq.is_null() {
                let errno = Errno::last();
                ibv_destroy_comp_channel(channel);
                return Err(errno);
            }
            let entries = entries as usize;
            Ok(Self {
                cq,
                channel,
                entries,
            })
        }
    }

    /// The queue, for a queue pair.
    pub(super) fn cq(&self) -> *mut ibv_cq {
        self.cq
    }

    /// Descriptor that is readable once a completion has come since [`Self::arm`].
    pub(super) fn fd(&self) -> c_int {
        // SAFETY: the channel is alive.
        unsafe { (*self.channel).fd }
    }

    /// Asks for the next completion to make the descriptor readable.
    pub(super) fn arm(&self) {
        // SAFETY: the queue is alive.
        unsafe { req_notify_cq(self.cq, 0) };
    }

    /// Takes the events that have made the descriptor readable. Answers whether there was one.
    pub(super) fn take_events(&self) -> bool {
        let mut is_taken = false;
        let (mut cq, mut context) = (ptr::null_mut(), ptr::null_mut());
        // SAFETY: the channel is alive, and there are places for what the call answers.
        while unsafe { ibv_get_cq_event(self.channel, &raw mut cq, &raw mut context) } == 0 {
            // SAFETY: the queue is this one.
            unsafe { ibv_ack_cq_events(cq, 1) };
            is_taken = true;
        }
        is_taken
    }

    /// Completions that the queue has room for.
    pub(super) fn entries(&self) -> usize {
        self.entries
    }

    /// Takes some completions; the caller goes on by [`drain`].
    pub(super) fn poll(&self, mut each: impl FnMut(&ibv_wc)) -> usize {
        // SAFETY: all-zero bytes are valid for this plain C structure.
        let mut completions: [ibv_wc; BATCH] = unsafe { zeroed() };
        // SAFETY: the queue is alive, and there is room for as many.
        let n = unsafe { poll_cq(self.cq, BATCH as c_int, completions.as_mut_ptr()) };
        let n = usize::try_from(n).unwrap_or(0);
        completions[..n].iter().for_each(&mut each);
        n
    }
}

/// Calls `round`, which answers how many completions it has taken, until there are none, or it has
/// taken as many as a queue holds. Answers whether there were any.
///
/// Then all are taken that had come before, and a later one has made the descriptor readable if the
/// queue was armed. A peer that sends without end must not keep a call from returning.
pub(super) fn drain(entries: usize, mut round: impl FnMut() -> usize) -> bool {
    let mut taken = 0;
    while taken < entries {
        match round() {
            0 => break,
            n => taken += n,
        }
    }
    taken > 0
}

impl Drop for Completions {
    fn drop(&mut self) {
        // SAFETY: both are alive, and no one else has them.
        unsafe {
            self.take_events();
            ibv_destroy_cq(self.cq);
            ibv_destroy_comp_channel(self.channel);
        }
    }
}

/// Registered memory.
pub(super) struct Buffer {
    memory: Memory,
    mr: *mut ibv_mr,
}

// SAFETY: the library's calls may be made in any thread.
unsafe impl Send for Buffer {}

impl Buffer {
    /// Makes `length` zero bytes, and registers them.
    ///
    /// # Errors
    /// `ENOMEM`, and those of `ibv_reg_mr(3)`.
    ///
    /// # Safety
    /// The protection domain is alive.
    pub(super) unsafe fn new(pd: *mut ibv_pd, length: usize, access: u32) -> Result<Self, Errno> {
        let memory = Memory::new(length)?;
        let addr = memory.ptr(0).cast::<c_void>();
        // SAFETY: as the caller promises; the memory is kept beside the region.
        let mr = unsafe { ibv_reg_mr(pd, addr, length, access as c_int) };
        if mr.is_null() {
            return Err(Errno::last());
        }
        Ok(Self { memory, mr })
    }

    /// The bytes.
    pub(super) fn memory(&self) -> &Memory {
        &self.memory
    }

    /// Its local key.
    pub(super) fn lkey(&self) -> u32 {
        // SAFETY: the region is alive.
        unsafe { (*self.mr).lkey }
    }

    /// Its remote key.
    pub(super) fn rkey(&self) -> u32 {
        // SAFETY: the region is alive.
        unsafe { (*self.mr).rkey }
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        // SAFETY: the region is alive, and no one else has it.
        unsafe { ibv_dereg_mr(self.mr) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_queue_that_never_is_empty_is_left() {
        let mut calls = 0;
        let mut round = |n| {
            calls += 1;
            n
        };
        assert!(drain(100, || round(BATCH)));
        assert_eq!(calls, 100usize.div_ceil(BATCH));
        assert!(!drain(100, || 0));
        let mut left = [3, 2, 0].into_iter();
        assert!(drain(100, || left.next().unwrap()));
        assert_eq!(left.next(), None);
    }
}
