//! Words of the operations, and an operation and its completion as a kernel has them.

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

/// Condition on which a receive completes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Receive {
    /// With the first bytes.
    Some,
    /// With all bytes asked for, or at the end of the stream, or on an error.
    All,
}

/// An operation, as a kernel gets it. Its file and its memory come with it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Op {
    /// Reads from a file.
    Read {
        /// First byte in the file.
        offset: u64,
    },
    /// Writes to a file.
    Write {
        /// First byte in the file.
        offset: u64,
        /// Durability of the data when it completes.
        durability: Durability,
    },
    /// Makes earlier writes durable.
    Sync(SyncKind),
    /// Allocates, frees or zeroes a range of a file.
    Fallocate {
        /// Change to the range.
        what: Fallocate,
        /// First byte of the range.
        offset: u64,
        /// Length of the range in bytes.
        len: u64,
    },
    /// Reports poll events of a descriptor.
    Poll {
        /// Bits of `poll(2)`.
        events: i16,
        /// Goes on after the first event.
        is_multi: bool,
    },
    /// Accepts a connection.
    Accept,
    /// Receives from a socket.
    Receive(Receive),
    /// Sends on a socket.
    Send,
}

/// A completion, as a kernel gives it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Cqe {
    pub(crate) user_data: u64,
    pub(crate) result: i32,
    pub(crate) more: bool,
}
