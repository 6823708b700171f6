//! Commands for a block device, without their data: [`Command`].

/// Command for a byte range of a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Command {
    /// Type of command.
    pub kind: CommandKind,
    /// First byte.
    pub offset: u64,
    /// Length in bytes.
    pub len: u64,
    /// Start of the data of a read or write in its buffer.
    pub buffer_offset: usize,
    /// The data must be on stable storage when it is read, or on completion of a change.
    pub fua: bool,
}

/// Type of a [`Command`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CommandKind {
    /// Reads data into the buffer.
    Read,
    /// Writes data from the buffer.
    Write,
    /// Flushes completed writes to stable storage.
    Flush,
    /// Discards the contents.
    Discard {
        /// Parts of the range that are deallocated return zeroes after this, and all other parts
        /// are unchanged. If not set, the range can return any data.
        zeroes: bool,
    },
    /// Sets the range to zero.
    WriteZeroes {
        /// The blocks can be deallocated.
        unmap: bool,
        /// Fails if the zeroes would have to be written as data.
        fast: bool,
    },
    /// Requests the allocation status.
    Status,
}

impl Command {
    /// Creates a command without FUA, with its data at the start of the buffer.
    #[must_use]
    pub fn new(kind: CommandKind, offset: u64, len: u64) -> Self {
        Self {
            kind,
            offset,
            len,
            buffer_offset: 0,
            fua: false,
        }
    }
}
