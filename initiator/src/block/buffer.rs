//! Memory for one transfer.

use std::any::Any;
use std::fmt;
use std::io;
use std::sync::{Mutex, PoisonError};
use std::task::Waker;

use riser_memory::{MemSlice, Memory};

/// Memory for one transfer: a range of memory that a device may address, and the lease that gives
/// the range back to its pool when the buffer is dropped.
///
/// It is not cloneable: only its holder may start an operation on it.
pub struct Buffer {
    slice: MemSlice,
    /// Length that it was made with.
    capacity: usize,
    lease: Option<Box<dyn Any + Send + Sync>>,
}

impl fmt::Debug for Buffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Buffer")
            .field("slice", &self.slice)
            .field("leased", &self.lease.is_some())
            .finish()
    }
}

impl Buffer {
    /// A buffer in memory of its own.
    ///
    /// # Errors
    /// The error of `mmap(2)`.
    pub fn anonymous(len: usize) -> io::Result<Self> {
        let memory = Memory::new(len)?;
        let slice = memory
            .slice(0..len)
            .expect("a mapping holds what was asked for");
        Ok(Self {
            slice,
            capacity: len,
            lease: None,
        })
    }

    /// A range of a pool; dropping the buffer drops the lease.
    #[must_use]
    pub fn leased(slice: MemSlice, lease: Box<dyn Any + Send + Sync>) -> Self {
        Self {
            capacity: slice.len(),
            slice,
            lease: Some(lease),
        }
    }

    /// Range of memory that devices address.
    #[must_use]
    pub fn slice(&self) -> &MemSlice {
        &self.slice
    }

    /// Length of the buffer in bytes.
    #[must_use]
    pub fn len(&self) -> usize {
        self.slice.len()
    }

    /// Makes it the first `len` bytes of the memory that it was made with.
    ///
    /// # Panics
    /// If it was made with less.
    pub fn set_len(&mut self, len: usize) {
        assert!(len <= self.capacity, "{len} bytes of {}", self.capacity);
        if len != self.slice.len() {
            let start = self.slice.offset();
            let slice = self.slice.memory().slice(start..start + len);
            self.slice = slice.expect("the range was a part of it before");
        }
    }

    /// Returns whether it holds no byte.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.slice.is_empty()
    }
}

/// Wakers of those that wait for a buffer of a pool. The pool calls [`BufferWaiters::wake_all`]
/// when one comes back. Bounded by the requests in flight, of which each registers at most once
/// per poll.
#[derive(Debug, Default)]
pub struct BufferWaiters(Mutex<Vec<Waker>>);

impl BufferWaiters {
    /// Registers one, unless it is registered already.
    pub fn register(&self, waker: &Waker) {
        let mut waiting = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if !waiting.iter().any(|w| w.will_wake(waker)) {
            waiting.push(waker.clone());
        }
    }

    /// Wakes and forgets all of them.
    pub fn wake_all(&self) {
        let waiting = std::mem::take(&mut *self.0.lock().unwrap_or_else(PoisonError::into_inner));
        waiting.into_iter().for_each(Waker::wake);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_buffer_shrinks_and_grows_back_to_its_first_length() {
        let mut buffer = Buffer::anonymous(8192).unwrap();
        buffer.slice().fill(0, 8192, 7);
        buffer.set_len(512);
        assert_eq!(buffer.slice().to_vec(), [7; 512]);
        buffer.set_len(8192);
        assert_eq!(buffer.slice().to_vec(), [7; 8192]);
    }
}
