//! Types of operations and completions, as exchanged with a kernel.

/// Durability of a write when it completes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Durability {
    /// The host has received the data, possibly in its cache.
    Cached,
    /// The device has reported that the data is on stable storage (`RWF_DSYNC`).
    Durable,
}

/// Extent of a sync.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SyncKind {
    /// Data and the metadata needed to find it (`fdatasync`).
    Data,
    /// Data and all attributes (`fsync`).
    All,
}

/// Operation of `fallocate` on a byte range. The file's size never changes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fallocate {
    /// Allocates unallocated blocks.
    Allocate,
    /// Deallocates the range, which reads as zeroes afterwards.
    PunchHole,
    /// Makes the range read as zeroes and keeps it allocated.
    ZeroRange,
}

/// Condition for completing a receive.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Receive {
    /// When any bytes are received.
    Some,
    /// When all requested bytes are received, or at the end of the stream, or on an error.
    All,
}

/// An operation as received by a kernel. Its file and its memory are passed separately.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Op {
    /// Read from a file.
    Read {
        /// Offset of the first byte in the file.
        offset: u64,
    },
    /// Write to a file.
    Write {
        /// Offset of the first byte in the file.
        offset: u64,
        /// Durability of the data at completion.
        durability: Durability,
    },
    /// Make earlier writes durable.
    Sync(SyncKind),
    /// Allocate, deallocate or zero a range of a file.
    Fallocate {
        /// Change to the range.
        what: Fallocate,
        /// Offset of the first byte of the range.
        offset: u64,
        /// Length of the range in bytes.
        len: u64,
    },
    /// Report poll events of a descriptor.
    Poll {
        /// Bits of `poll(2)`.
        events: i16,
        /// Continue after the first event.
        is_multi: bool,
    },
    /// Accept a connection.
    Accept,
    /// Receive from a socket.
    Receive(Receive),
    /// Send to a socket.
    Send,
}

/// A completion as returned by a kernel.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Cqe {
    pub(crate) user_data: u64,
    pub(crate) result: i32,
    pub(crate) more: bool,
}
