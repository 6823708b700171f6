//! Commands for the device file and their completions, using a ring.

#![allow(
    unsafe_code,
    reason = "an entry of a ring names memory or descriptors by number"
)]

use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};

use io_uring::{IoUring, opcode, types};
use zerocopy::IntoBytes;

use super::sys::{IoCmd, IoOp};

/// Sends commands to the driver. The driver checks the calling thread, so this must always be used
/// from the same thread.
pub(super) trait Commands: Send {
    /// Adds a command for a tag. There must not be an outstanding command for this tag.
    fn push(&mut self, op: IoOp, tag: u16, result: i32);

    /// Submits the added commands to the driver. Returns false if the kernel can't accept all of
    /// them now; the remaining commands are submitted by the next call.
    ///
    /// # Errors
    /// Returns an error from the system call. The driver will not receive any new commands after
    /// this.
    fn submit(&mut self) -> io::Result<bool>;

    /// Returns the next completion: the tag, and 0 for a new request or a negative error code.
    fn pop(&mut self) -> Option<(u16, i32)>;

    /// File descriptor to poll for completions.
    fn fd(&self) -> BorrowedFd<'_>;
}

/// Ring used for the commands of a single queue.
pub(super) struct Ring {
    ring: IoUring,
    channel: File,
    depth: u16,
}

impl Ring {
    pub(super) fn new(channel: File, depth: u16) -> io::Result<Self> {
        let ring = IoUring::builder().setup_clamp().build(depth.into())?;
        Ok(Self {
            ring,
            channel,
            depth,
        })
    }
}

impl Commands for Ring {
    fn push(&mut self, op: IoOp, tag: u16, result: i32) {
        assert!(tag < self.depth);
        let command = IoCmd {
            q_id: 0.into(),
            tag: tag.into(),
            result: result.into(),
            addr: 0.into(),
        };
        let mut bytes = [0; 16];
        bytes.copy_from_slice(command.as_bytes());
        let channel = types::Fd(self.channel.as_raw_fd());
        let entry = opcode::UringCmd16::new(channel, op as u32)
            .cmd(bytes)
            .build()
            .user_data(tag.into());
        // SAFETY: the entry uses a descriptor that lives as long as the ring, and no memory.
        let pushed = unsafe { self.ring.submission().push(&entry) };
        pushed.expect("a ring has an entry for every tag");
    }

    fn submit(&mut self) -> io::Result<bool> {
        while !self.ring.submission().is_empty() {
            if let Err(error) = self.ring.submit() {
                match error.raw_os_error() {
                    Some(libc::EINTR) => {}
                    // There is not enough memory for a request, which happens when the system
                    // writes back to block devices, or the completions need to be processed first.
                    Some(libc::EAGAIN | libc::EBUSY) => return Ok(false),
                    _ => return Err(error),
                }
            }
        }
        Ok(true)
    }

    fn pop(&mut self) -> Option<(u16, i32)> {
        let end = self.ring.completion().next()?;
        Some((end.user_data() as u16, end.result()))
    }

    fn fd(&self) -> BorrowedFd<'_> {
        // SAFETY: the ring is open while it is borrowed.
        unsafe { BorrowedFd::borrow_raw(self.ring.as_raw_fd()) }
    }
}
