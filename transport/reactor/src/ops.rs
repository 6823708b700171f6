//! The operations: one `submit_*` method each.

use riser_memory::MemSlice;

use crate::error::SubmitError;
use crate::handle::Handle;
use crate::op::{Durability, Fallocate, Op, Receive, SyncKind};
use crate::ring::Ring;
use crate::slot::{Kind, Token};

impl Ring {
    /// Reads from `offset` of the file into the pieces, in order.
    ///
    /// The result is the number of bytes read, which may be short, and is zero at the end of the
    /// file.
    ///
    /// # Errors
    /// See [`SubmitError`]. The operation was not queued.
    pub fn submit_read(
        &mut self,
        file: &Handle,
        offset: u64,
        into: &[MemSlice],
        token: Token,
    ) -> Result<(), SubmitError> {
        let op = Op::Read { offset };
        self.submit_op(op, Kind::Plain, file, into, token)
    }

    /// Writes the pieces, in order, at `offset` of the file. The result may be short.
    ///
    /// # Errors
    /// See [`SubmitError`]. The operation was not queued.
    pub fn submit_write(
        &mut self,
        file: &Handle,
        offset: u64,
        from: &[MemSlice],
        durability: Durability,
        token: Token,
    ) -> Result<(), SubmitError> {
        let op = Op::Write { offset, durability };
        self.submit_op(op, Kind::Plain, file, from, token)
    }

    /// Makes earlier, completed writes durable.
    ///
    /// # Errors
    /// See [`SubmitError`]. The operation was not queued.
    pub fn submit_sync(
        &mut self,
        file: &Handle,
        kind: SyncKind,
        token: Token,
    ) -> Result<(), SubmitError> {
        self.submit_op(Op::Sync(kind), Kind::Plain, file, &[], token)
    }

    /// Allocates, deallocates or zeroes `len` bytes at `offset` of a file or block device.
    ///
    /// # Errors
    /// See [`SubmitError`]. The operation was not queued.
    pub fn submit_fallocate(
        &mut self,
        file: &Handle,
        what: Fallocate,
        offset: u64,
        len: u64,
        token: Token,
    ) -> Result<(), SubmitError> {
        let op = Op::Fallocate { what, offset, len };
        self.submit_op(op, Kind::Plain, file, &[], token)
    }

    /// Reports poll events of a descriptor repeatedly, until cancelled or until a completion
    /// indicates that there are no [`more`](crate::Completion::more) events.
    ///
    /// `events` and results are the `POLL*` bits of `poll(2)`. Events are edge-triggered, so the
    /// caller must read until `EAGAIN` after each event. Every arrival costs the kernel a
    /// completion. A worker that polls a busy descriptor anyway should use
    /// [`submit_poll_once`](Ring::submit_poll_once) before it parks.
    ///
    /// # Errors
    /// See [`SubmitError`]. The operation was not queued.
    pub fn submit_poll(
        &mut self,
        file: &Handle,
        events: i16,
        token: Token,
    ) -> Result<(), SubmitError> {
        let is_multi = true;
        self.submit_op(Op::Poll { events, is_multi }, Kind::Plain, file, &[], token)
    }

    /// Completes once when any of the poll events of a descriptor occurs, or immediately if it is
    /// already pending. `events` and results are the same as for
    /// [`submit_poll`](Ring::submit_poll).
    ///
    /// # Errors
    /// See [`SubmitError`]. The operation was not queued.
    pub fn submit_poll_once(
        &mut self,
        file: &Handle,
        events: i16,
        token: Token,
    ) -> Result<(), SubmitError> {
        let is_multi = false;
        self.submit_op(Op::Poll { events, is_multi }, Kind::Plain, file, &[], token)
    }

    /// Accepts one connection from a listening socket, which is returned in the completion.
    ///
    /// # Errors
    /// See [`SubmitError`]. The operation was not queued.
    pub fn submit_accept(&mut self, listener: &Handle, token: Token) -> Result<(), SubmitError> {
        self.submit_op(Op::Accept, Kind::Accept, listener, &[], token)
    }

    /// Receives from a connected socket into the pieces, in order. A result of zero indicates the
    /// end of the stream.
    ///
    /// # Errors
    /// See [`SubmitError`]. The operation was not queued.
    pub fn submit_recv(
        &mut self,
        socket: &Handle,
        into: &[MemSlice],
        mode: Receive,
        token: Token,
    ) -> Result<(), SubmitError> {
        self.submit_op(Op::Receive(mode), Kind::Plain, socket, into, token)
    }

    /// Sends the pieces, in order, on a connected socket. The result may be short. If the peer has
    /// closed the connection, this fails with `EPIPE`, but never raises a signal.
    ///
    /// # Errors
    /// See [`SubmitError`]. The operation was not queued.
    pub fn submit_send(
        &mut self,
        socket: &Handle,
        from: &[MemSlice],
        token: Token,
    ) -> Result<(), SubmitError> {
        self.submit_op(Op::Send, Kind::Plain, socket, from, token)
    }
}
