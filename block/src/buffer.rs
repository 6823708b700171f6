//! Transfer buffer.

use std::any::Any;
use std::fmt;
use std::io;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::Waker;

use riser_memory::{MemSlice, Memory};

/// Transfer buffer: a memory range that can be accessed by a device, and a lease that returns the
/// range to its pool when the buffer is dropped.
///
/// Buffers can't be cloned, because only the owner should be able to start an operation.
pub struct Buffer {
    slice: MemSlice,
    /// Original length.
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
    /// Allocates a buffer that isn't part of a pool.
    ///
    /// # Errors
    /// Returns an error from `mmap(2)`.
    pub fn anonymous(len: usize) -> io::Result<Self> {
        let memory = Memory::new(len)?;
        let slice = memory
            .slice(0..len)
            .expect("the mapping contains the requested range");
        Ok(Self {
            slice,
            capacity: len,
            lease: None,
        })
    }

    /// Creates a buffer using a range from a pool; the lease is dropped with the buffer.
    #[must_use]
    pub fn leased(slice: MemSlice, lease: Box<dyn Any + Send + Sync>) -> Self {
        Self {
            capacity: slice.len(),
            slice,
            lease: Some(lease),
        }
    }

    /// Memory range to be used by devices.
    #[must_use]
    pub fn slice(&self) -> &MemSlice {
        &self.slice
    }

    /// Buffer length in bytes.
    #[must_use]
    pub fn len(&self) -> usize {
        self.slice.len()
    }

    /// Changes the length. Uses the first `len` bytes of the original memory.
    ///
    /// # Panics
    /// If `len` exceeds the original length.
    pub fn set_len(&mut self, len: usize) {
        assert!(len <= self.capacity, "{len} bytes of {}", self.capacity);
        if len != self.slice.len() {
            let start = self.slice.offset();
            let slice = self.slice.memory().slice(start..start + len);
            self.slice = slice.expect("the range was a part of it before");
        }
    }

    /// Returns whether the length is zero.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.slice.is_empty()
    }
}

/// Buffer shared by multiple operations. Each operation uses a piece of it.
#[derive(Debug)]
pub struct SharedBuffer(Arc<Buffer>);

impl SharedBuffer {
    /// Shares a buffer whose pieces will be used by multiple operations.
    #[must_use]
    pub fn new(buffer: Buffer) -> Self {
        Self(Arc::new(buffer))
    }

    /// Splits the buffer into pieces of `len` bytes; the last piece contains the remaining bytes.
    ///
    /// # Panics
    /// If `len` is 0.
    pub fn pieces(&self, len: usize) -> impl Iterator<Item = Buffer> + '_ {
        let whole = self.0.slice();
        (0..whole.len()).step_by(len).map(move |at| {
            let end = whole.len().min(at + len);
            let range = whole.offset() + at..whole.offset() + end;
            let slice = whole.memory().slice(range).expect("a part of the buffer");
            Buffer::leased(slice, Box::new(self.0.clone()))
        })
    }

    /// Returns the buffer if all pieces have been dropped.
    #[must_use]
    pub fn into_whole(self) -> Option<Buffer> {
        Arc::into_inner(self.0)
    }
}

/// Wakers waiting for a buffer from a pool. The pool must call [`BufferWaiters::wake_all`] when a
/// buffer is released. The number of wakers is limited by the requests in flight, because each
/// request registers up to once per poll.
#[derive(Debug, Default)]
pub struct BufferWaiters(Mutex<Vec<Waker>>);

impl BufferWaiters {
    /// Adds a waker, unless it is already registered.
    pub fn register(&self, waker: &Waker) {
        let mut waiting = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if !waiting.iter().any(|w| w.will_wake(waker)) {
            waiting.push(waker.clone());
        }
    }

    /// Wakes and removes all wakers.
    pub fn wake_all(&self) {
        let waiting = std::mem::take(&mut *self.0.lock().unwrap_or_else(PoisonError::into_inner));
        waiting.into_iter().for_each(Waker::wake);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buffer_shrinks_and_regrows() {
        let mut buffer = Buffer::anonymous(8192).unwrap();
        buffer.slice().fill(0, 8192, 7);
        buffer.set_len(512);
        assert_eq!(buffer.slice().to_vec(), [7; 512]);
        buffer.set_len(8192);
        assert_eq!(buffer.slice().to_vec(), [7; 8192]);
    }
}
