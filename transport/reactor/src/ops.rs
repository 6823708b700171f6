//! The operations: one `submit_*` each, and the words they take.

#![allow(
    unsafe_code,
    reason = "looks at the vectors of a busy slot through the pointer that the kernel gets"
)]

use std::ptr;

use io_uring::{opcode, squeue, types};
use riser_memory::MemSlice;

use crate::error::SubmitError;
use crate::handle::{Handle, Target};
use crate::ring::Ring;
use crate::slot::{Kind, MAX_TRANSFER, Token};

/// Durability of a write when it completes: in the host's cache, or on stable storage.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Durability {
    /// Complete once the host has the data.
    Cached,
    /// Complete once the device says the data is durable (`RWF_DSYNC`).
    Durable,
}

/// Extent of a sync.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SyncKind {
    /// Data and what is needed to find it (`fdatasync`).
    Data,
    /// Data and all attributes (`fsync`).
    All,
}

/// Operation of `fallocate` on a byte range. The file's size never changes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fallocate {
    /// Allocates what is not allocated.
    Allocate,
    /// Frees the range, which reads as zeroes afterwards.
    PunchHole,
    /// Makes the range read as zeroes and keeps it allocated.
    ZeroRange,
}

impl Fallocate {
    fn mode(self) -> i32 {
        libc::FALLOC_FL_KEEP_SIZE
            | match self {
                Self::Allocate => 0,
                Self::PunchHole => libc::FALLOC_FL_PUNCH_HOLE,
                Self::ZeroRange => libc::FALLOC_FL_ZERO_RANGE,
            }
    }
}

/// Condition on which a receive completes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Receive {
    /// With the first bytes.
    Some,
    /// With all bytes asked for, or at the end of the stream, or on an error.
    All,
}

impl Ring {
    /// Reads from `offset` of the file into the pieces, in order.
    ///
    /// The result is the number of bytes read, which may be short, and is zero at the end of file.
    ///
    /// # Errors
    /// See [`SubmitError`]; nothing was queued.
    pub fn submit_read(
        &mut self,
        file: &Handle,
        offset: u64,
        into: &[MemSlice],
        token: Token,
    ) -> Result<(), SubmitError> {
        let (index, user_data) = self.prepare(token, Kind::Plain, Some(file), into)?;
        let (iov, count) = self.vectors(index);
        // A read into one range of registered memory is a fixed one, which spares the kernel
        // pinning its pages.
        let entry = match (file.target(&self.files), self.buffer_of(iov, count)) {
            (t, Some((addr, len, buffer))) => with_target(
                t,
                |t| {
                    opcode::ReadFixed::new(t, addr, len, buffer)
                        .offset(offset)
                        .build()
                },
                |t| {
                    opcode::ReadFixed::new(t, addr, len, buffer)
                        .offset(offset)
                        .build()
                },
            ),
            (t, None) => with_target(
                t,
                |t| opcode::Readv::new(t, iov, count).offset(offset).build(),
                |t| opcode::Readv::new(t, iov, count).offset(offset).build(),
            ),
        };
        self.push(entry, user_data);
        Ok(())
    }

    /// Writes the pieces, in order, at `offset` of the file. The result may be short.
    ///
    /// # Errors
    /// See [`SubmitError`]; nothing was queued.
    pub fn submit_write(
        &mut self,
        file: &Handle,
        offset: u64,
        from: &[MemSlice],
        durability: Durability,
        token: Token,
    ) -> Result<(), SubmitError> {
        let flags = match durability {
            Durability::Cached => 0,
            Durability::Durable => libc::RWF_DSYNC,
        };
        let (index, user_data) = self.prepare(token, Kind::Plain, Some(file), from)?;
        let (iov, count) = self.vectors(index);
        let fixed = |t: Target, addr: *mut u8, len, buffer| {
            macro_rules! build {
                ($t:expr) => {
                    opcode::WriteFixed::new($t, addr, len, buffer)
                        .offset(offset)
                        .rw_flags(flags)
                        .build()
                };
            }
            with_target(t, |t| build!(t), |t| build!(t))
        };
        let vectored = |t: Target| {
            macro_rules! build {
                ($t:expr) => {
                    opcode::Writev::new($t, iov, count)
                        .offset(offset)
                        .rw_flags(flags)
                        .build()
                };
            }
            with_target(t, |t| build!(t), |t| build!(t))
        };
        let target = file.target(&self.files);
        // As for reads: the fixed form where the memory is registered.
        let entry = match self.buffer_of(iov, count) {
            Some((addr, len, buffer)) => fixed(target, addr, len, buffer),
            None => vectored(target),
        };
        self.push(entry, user_data);
        Ok(())
    }

    /// Makes earlier, completed writes durable.
    ///
    /// # Errors
    /// See [`SubmitError`]; nothing was queued.
    pub fn submit_sync(
        &mut self,
        file: &Handle,
        kind: SyncKind,
        token: Token,
    ) -> Result<(), SubmitError> {
        let flags = match kind {
            SyncKind::Data => types::FsyncFlags::DATASYNC,
            SyncKind::All => types::FsyncFlags::empty(),
        };
        let (_, user_data) = self.prepare(token, Kind::Plain, Some(file), &[])?;
        let entry = with_target(
            file.target(&self.files),
            |t| opcode::Fsync::new(t).flags(flags).build(),
            |t| opcode::Fsync::new(t).flags(flags).build(),
        );
        self.push(entry, user_data);
        Ok(())
    }

    /// Allocates, frees or zeroes `len` bytes from `offset` of a file or block device.
    ///
    /// # Errors
    /// See [`SubmitError`]; nothing was queued.
    pub fn submit_fallocate(
        &mut self,
        file: &Handle,
        what: Fallocate,
        offset: u64,
        len: u64,
        token: Token,
    ) -> Result<(), SubmitError> {
        let (_, user_data) = self.prepare(token, Kind::Plain, Some(file), &[])?;
        let mode = what.mode();
        let entry = with_target(
            file.target(&self.files),
            |t| {
                opcode::Fallocate::new(t, len)
                    .offset(offset)
                    .mode(mode)
                    .build()
            },
            |t| {
                opcode::Fallocate::new(t, len)
                    .offset(offset)
                    .mode(mode)
                    .build()
            },
        );
        self.push(entry, user_data);
        Ok(())
    }

    /// Reports the poll events of a descriptor, again and again, until cancelled or until a
    /// completion says that no [`more`](crate::Completion::more) follow.
    ///
    /// `events` are the `POLL*` bits of `poll(2)`; results are such bits. An event is reported when
    /// it arises, not while it lasts: read until `EAGAIN` after each. Every arrival costs the
    /// kernel a completion, so a worker that polls a busy descriptor anyway does better with
    /// [`submit_poll_once`](Ring::submit_poll_once) before it parks.
    ///
    /// # Errors
    /// See [`SubmitError`]; nothing was queued.
    pub fn submit_poll(
        &mut self,
        file: &Handle,
        events: i16,
        token: Token,
    ) -> Result<(), SubmitError> {
        self.poll(file, events, true, token)
    }

    /// Reports once that any of the poll events of a descriptor is there; at once where it already
    /// is. `events` and results are as for [`submit_poll`](Ring::submit_poll).
    ///
    /// # Errors
    /// See [`SubmitError`]; nothing was queued.
    pub fn submit_poll_once(
        &mut self,
        file: &Handle,
        events: i16,
        token: Token,
    ) -> Result<(), SubmitError> {
        self.poll(file, events, false, token)
    }

    fn poll(
        &mut self,
        file: &Handle,
        events: i16,
        multi: bool,
        token: Token,
    ) -> Result<(), SubmitError> {
        let (_, user_data) = self.prepare(token, Kind::Plain, Some(file), &[])?;
        // Sign-extended, the bits of a negative number would be other events.
        let events = u32::from(events as u16);
        let entry = with_target(
            file.target(&self.files),
            |t| opcode::PollAdd::new(t, events).multi(multi).build(),
            |t| opcode::PollAdd::new(t, events).multi(multi).build(),
        );
        self.push(entry, user_data);
        Ok(())
    }

    /// Accepts one connection of a listening socket; the completion carries it.
    ///
    /// # Errors
    /// See [`SubmitError`]; nothing was queued.
    pub fn submit_accept(&mut self, listener: &Handle, token: Token) -> Result<(), SubmitError> {
        let (_, user_data) = self.prepare(token, Kind::Accept, Some(listener), &[])?;
        // The peer's address is not asked for, since it would need room that outlives the call.
        macro_rules! build {
            ($t:expr) => {
                opcode::Accept::new($t, ptr::null_mut(), ptr::null_mut())
                    .flags(libc::SOCK_CLOEXEC)
                    .build()
            };
        }
        let entry = with_target(listener.target(&self.files), |t| build!(t), |t| build!(t));
        self.push(entry, user_data);
        Ok(())
    }

    /// Receives from a connected socket into the pieces, in order. A result of zero is the end of
    /// the stream.
    ///
    /// # Errors
    /// See [`SubmitError`]; nothing was queued.
    pub fn submit_recv(
        &mut self,
        socket: &Handle,
        into: &[MemSlice],
        mode: Receive,
        token: Token,
    ) -> Result<(), SubmitError> {
        let flags = match mode {
            Receive::Some => 0,
            Receive::All => libc::MSG_WAITALL,
        };
        let (index, user_data) = self.prepare(token, Kind::Plain, Some(socket), into)?;
        // The header is boxed in its slot: the kernel may read it until the operation ends.
        let msg: *mut libc::msghdr = &raw mut *self.slots.slot(index).msg;
        macro_rules! build {
            ($t:expr) => {
                opcode::RecvMsg::new($t, msg).flags(flags as u32).build()
            };
        }
        let entry = with_target(socket.target(&self.files), |t| build!(t), |t| build!(t));
        self.push(entry, user_data);
        Ok(())
    }

    /// Sends the pieces, in order, on a connected socket. The result may be short. A peer that is
    /// gone is `EPIPE`, never a signal.
    ///
    /// # Errors
    /// See [`SubmitError`]; nothing was queued.
    pub fn submit_send(
        &mut self,
        socket: &Handle,
        from: &[MemSlice],
        token: Token,
    ) -> Result<(), SubmitError> {
        let (index, user_data) = self.prepare(token, Kind::Plain, Some(socket), from)?;
        let msg: *const libc::msghdr = &raw const *self.slots.slot(index).msg;
        // With `MSG_WAITALL` io_uring itself goes on after a short send, which saves a completion
        // and a submission for the rest.
        let flags = (libc::MSG_NOSIGNAL | libc::MSG_WAITALL) as u32;
        macro_rules! build {
            ($t:expr) => {
                opcode::SendMsg::new($t, msg).flags(flags).build()
            };
        }
        let entry = with_target(socket.target(&self.files), |t| build!(t), |t| build!(t));
        self.push(entry, user_data);
        Ok(())
    }

    /// Vectors of a slot as the kernel wants them.
    pub(crate) fn vectors(&mut self, index: u32) -> (*const libc::iovec, u32) {
        let iovecs = &self.slots.slot(index).iovecs;
        (iovecs.as_ptr(), iovecs.len() as u32)
    }

    /// The one piece of the list, where it is one and lies in registered memory.
    fn buffer_of(&self, iov: *const libc::iovec, count: u32) -> Option<(*mut u8, u32, u16)> {
        if count != 1 {
            return None;
        }
        // SAFETY: `vectors` gave the pointer to `count` initialised entries of a busy slot.
        let iov = unsafe { *iov };
        let start = iov.iov_base.addr();
        // The kernel takes a fixed transfer only within one registered buffer.
        let index = self
            .buffers
            .iter()
            .position(|b| start >= b.addr && start + iov.iov_len <= b.addr + b.len)?;
        debug_assert!(iov.iov_len <= MAX_TRANSFER);
        Some((iov.iov_base.cast(), iov.iov_len as u32, index as u16))
    }
}

fn with_target(
    target: Target,
    fd: impl FnOnce(types::Fd) -> squeue::Entry,
    fixed: impl FnOnce(types::Fixed) -> squeue::Entry,
) -> squeue::Entry {
    match target {
        Target::Fd(t) => fd(t),
        Target::Fixed(t) => fixed(t),
    }
}
