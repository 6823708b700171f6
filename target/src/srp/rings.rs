//! The rings of a channel: memory for messages in both directions, and received messages that are
//! waiting to be handled.

use std::collections::VecDeque;
use std::ops::Range;

use riser_memory::{MemSlice, Memory};

use super::ioctx::{RecvIdx, SendIoctx};
use super::login::ChannelParams;
use crate::fabric::TaskIdx;

/// Memory of equal slots.
#[derive(Debug)]
struct Ring {
    memory: MemSlice,
    /// Distance between two slots in bytes.
    stride: usize,
    /// Size of a message in bytes.
    len: u32,
}

impl Ring {
    fn new(memory: MemSlice, slots: u32, stride: usize, len: u32) -> Self {
        assert!(memory.len() >= slots as usize * stride);
        Self {
            memory,
            stride,
            len,
        }
    }

    fn offset(&self, slot: u16) -> usize {
        usize::from(slot) * self.stride
    }

    fn slot(&self, slot: u16) -> MemSlice {
        let offset = self.offset(slot);
        let slice = self.memory.slice(offset..offset + self.len as usize);
        slice.expect("contexts lie in their ring")
    }

    fn addr(&self, slot: u16) -> u64 {
        self.memory.addr() + self.offset(slot) as u64
    }
}

/// Receive contexts of a channel.
#[derive(Debug)]
pub(crate) struct ReceiveRing {
    ring: Ring,
    /// Number of posted receives.
    posted: u32,
    /// Receives that have not been posted yet, because the channel is new.
    first: Range<u16>,
    /// Receives are no longer posted again.
    is_closed: bool,
    /// Received messages that have not been handled yet, oldest first. Bounded by the ring.
    deferred: VecDeque<(RecvIdx, u32)>,
    /// Buffer for a deferred information unit, allocated on first use.
    scratch: Vec<u8>,
}

impl ReceiveRing {
    /// Creates the state of a new channel, which posts all receives: the initiator may send as soon
    /// as it receives our response.
    ///
    /// # Panics
    /// If the memory is too small.
    pub(super) fn new(params: &ChannelParams, memory: MemSlice) -> Self {
        let slots = params.receives();
        let (stride, len) = (params.receive_stride(), params.max_it_iu_len);
        Self {
            ring: Ring::new(memory, slots, stride, len),
            posted: slots,
            first: 0..slots as u16,
            is_closed: false,
            deferred: VecDeque::with_capacity(slots as usize),
            scratch: Vec::new(),
        }
    }

    /// Returns the memory of a receive context.
    pub(crate) fn slot(&self, recv: RecvIdx) -> MemSlice {
        self.ring.slot(recv.0)
    }

    /// Returns the address and length of a receive context, for the device.
    pub(crate) fn place(&self, recv: RecvIdx) -> (u64, u32) {
        (self.ring.addr(recv.0), self.ring.len)
    }

    /// Returns the maximum size of a message in bytes.
    pub(super) fn max_len(&self) -> usize {
        self.ring.len as usize
    }

    /// Returns the next context to be posted for the first time.
    pub(super) fn next_first(&mut self) -> Option<RecvIdx> {
        self.first.next().map(RecvIdx)
    }

    /// Called when a receive has completed or was flushed.
    pub(super) fn on_completed(&mut self) {
        self.posted -= 1;
    }

    /// Called when a context can be posted again. Returns false if the channel is closed.
    pub(super) fn recycle(&mut self) -> bool {
        self.posted += u32::from(!self.is_closed);
        !self.is_closed
    }

    /// Stops posting contexts again.
    pub(super) fn close(&mut self) {
        self.is_closed = true;
    }

    /// Called when the queues were destroyed, so posted receives will not complete.
    pub(super) fn forget_posted(&mut self) {
        self.posted = 0;
    }

    /// Discards receives that were never posted, when the channel is abandoned.
    pub(super) fn discard_first(&mut self) {
        self.first = 0..0;
    }

    /// Returns whether all posted receives have completed.
    pub(super) fn is_drained(&self) -> bool {
        self.posted == 0
    }

    /// Keeps a received message until it can be handled.
    pub(super) fn defer(&mut self, recv: RecvIdx, len: usize) {
        self.deferred.push_back((recv, len as u32));
    }

    /// Returns whether messages are deferred.
    pub(super) fn has_deferred(&self) -> bool {
        !self.deferred.is_empty()
    }

    /// Returns a copy of the oldest deferred message, in a buffer to be passed to
    /// [`ReceiveRing::keep_scratch`].
    pub(super) fn oldest_deferred(&mut self) -> Option<(RecvIdx, Vec<u8>)> {
        let &(recv, len) = self.deferred.front()?;
        let mut scratch = std::mem::take(&mut self.scratch);
        scratch.resize(len as usize, 0);
        self.ring.slot(recv.0).read(0, &mut scratch);
        Some((recv, scratch))
    }

    /// Keeps a buffer for the next deferred message.
    pub(super) fn keep_scratch(&mut self, scratch: Vec<u8>) {
        self.scratch = scratch;
    }

    /// Removes the oldest deferred message after it was handled.
    pub(super) fn pop_deferred(&mut self) {
        self.deferred.pop_front();
    }

    /// Removes all deferred messages, because they will not be handled.
    pub(super) fn discard_deferred(&mut self) {
        self.deferred.clear();
    }

    /// Copies immediate data of a command to its buffer. Returns the receive context when all data
    /// was copied.
    pub(super) fn copy_immediate(&self, io: &mut SendIoctx, len: u32) -> Option<RecvIdx> {
        let held = io.immediate.as_mut().expect("immediate data is held");
        let immediate = *held;
        let len = len.min(immediate.len);
        held.offset += len;
        held.len -= len;
        let ring = &self.ring.memory;
        let start = ring.offset() + self.ring.offset(immediate.recv.0);
        let mut from = start + immediate.offset as usize;
        if let Some(buffer) = &io.exec.buffer {
            let memory = buffer.memory();
            for range in buffer.ranges(0..len) {
                Memory::copy(ring.memory(), from, memory, range.start, range.len());
                from += range.len();
            }
        }
        let is_copied = len == immediate.len;
        if is_copied {
            io.immediate = None;
        }
        is_copied.then_some(immediate.recv)
    }
}

/// Messages of a channel to its initiator, by context.
#[derive(Debug)]
pub(crate) struct SendRing(Ring);

impl SendRing {
    /// Creates the ring of a new channel.
    ///
    /// # Panics
    /// If the memory is too small.
    pub(super) fn new(params: &ChannelParams, memory: MemSlice) -> Self {
        let (stride, len) = (params.send_stride(), params.max_ti_iu_len);
        Self(Ring::new(memory, params.sends(), stride, len))
    }

    /// Returns the memory for the message of a send context.
    #[cfg(test)]
    pub(crate) fn slot(&self, ioctx: TaskIdx) -> MemSlice {
        self.0.slot(ioctx.0)
    }

    /// Returns the address of the message of a send context, for the device.
    pub(crate) fn addr(&self, ioctx: TaskIdx) -> u64 {
        self.0.addr(ioctx.0)
    }

    /// Writes a message.
    pub(super) fn write(&self, ioctx: TaskIdx, message: &[u8]) {
        self.0.memory.write(self.0.offset(ioctx.0), message);
    }
}
