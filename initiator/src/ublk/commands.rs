//! Commands to a device's file and their ends, in a ring.

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

/// The way of commands to the driver, which knows the thread that gives them: it must be the same
/// one each time.
pub(super) trait Commands: Send {
    /// Adds a command for a tag, of which none is outstanding.
    fn push(&mut self, op: IoOp, tag: u16, result: i32);

    /// Gives the driver what was added. Returns false if the kernel cannot take all of it now: the
    /// next call gives it the rest.
    ///
    /// # Errors
    /// Those of the system call. The driver does not get any further command then.
    fn submit(&mut self) -> io::Result<bool>;

    /// The end of a command: its tag, and 0 for a request or a negative error number.
    fn pop(&mut self) -> Option<(u16, i32)>;

    /// The descriptor that is readable while there are ends.
    fn fd(&self) -> BorrowedFd<'_>;
}

/// A ring for the commands of one queue.
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
        // SAFETY: the entry names a descriptor that lives as long as the ring, and no memory.
        let pushed = unsafe { self.ring.submission().push(&entry) };
        pushed.expect("a ring has an entry for every tag");
    }

    fn submit(&mut self) -> io::Result<bool> {
        while !self.ring.submission().is_empty() {
            if let Err(error) = self.ring.submit() {
                match error.raw_os_error() {
                    Some(libc::EINTR) => {}
                    // It has no memory for a request, which is when block devices are written to,
                    // or wants ends to be taken first.
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
        // SAFETY: the ring is open as long as it is borrowed.
        unsafe { BorrowedFd::borrow_raw(self.ring.as_raw_fd()) }
    }
}
