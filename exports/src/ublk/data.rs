//! Request descriptors and data, accessed via the device file.

#![allow(
    unsafe_code,
    reason = "reads what the kernel has mapped, and shows it memory by its address"
)]

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::ptr::NonNull;

use riser_block::{BlockError, Buffer};

use super::sys::{DATA_OFFSET, DESCS_OFFSET, IoDesc, TAG_SHIFT};

/// Request descriptors, written by the kernel.
pub(super) struct Descs {
    first: NonNull<IoDesc>,
    bytes: usize,
}

// SAFETY: the mapping is only used by this value, and is read-only.
unsafe impl Send for Descs {}

impl Descs {
    pub(super) fn map(channel: &File, depth: u16) -> io::Result<Self> {
        let bytes = usize::from(depth) * size_of::<IoDesc>();
        // SAFETY: this creates a new mapping, and the driver checks the length.
        let at = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                bytes,
                libc::PROT_READ,
                libc::MAP_SHARED | libc::MAP_POPULATE,
                channel.as_raw_fd(),
                DESCS_OFFSET,
            )
        };
        match NonNull::new(at.cast()) {
            Some(first) if at != libc::MAP_FAILED => Ok(Self { first, bytes }),
            _ => Err(io::Error::last_os_error()),
        }
    }

    /// Returns the descriptor for a request that was just fetched.
    pub(super) fn get(&self, tag: u16) -> IoDesc {
        assert!(usize::from(tag) < self.bytes / size_of::<IoDesc>());
        // SAFETY: the index is within the mapping. The kernel writes this before the fetch
        // completes, and doesn't write it again until we commit the result.
        unsafe { self.first.add(tag.into()).as_ptr().read_volatile() }
    }
}

impl Drop for Descs {
    fn drop(&mut self) {
        // SAFETY: this address and length were returned by mmap, and there are no references to it.
        unsafe { libc::munmap(self.first.as_ptr().cast(), self.bytes) };
    }
}

/// Copy direction.
#[derive(Clone, Copy)]
pub(super) enum Direction {
    ToRequest,
    FromRequest,
}

/// Copies data between the request pages and a buffer.
pub(super) fn copy(
    channel: &File,
    tag: u16,
    buffer: &Buffer,
    direction: Direction,
) -> Result<(), BlockError> {
    let from = DATA_OFFSET + (u64::from(tag) << TAG_SHIFT);
    let mut done = 0;
    while done < buffer.len() {
        // SAFETY: `done` is within the buffer.
        let at = unsafe { buffer.slice().ptr().add(done) };
        let (fd, left) = (channel.as_raw_fd(), buffer.len() - done);
        let position = (from + done as u64) as i64;
        // SAFETY: the buffer has `left` bytes remaining at this offset. It is only used by its
        // owner, and there is no operation in flight for it.
        let moved = unsafe {
            match direction {
                Direction::ToRequest => libc::pwrite(fd, at.cast(), left, position),
                Direction::FromRequest => libc::pread(fd, at.cast(), left, position),
            }
        };
        match moved {
            1.. => done += moved as usize,
            0 => return Err(BlockError::Io("no data left in the request".into())),
            _ => {
                let error = io::Error::last_os_error();
                if error.kind() != io::ErrorKind::Interrupted {
                    return Err(BlockError::Io(error.to_string()));
                }
            }
        }
    }
    Ok(())
}
