//! Counters of a channel, and their sums.

/// Counters of a channel.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// SCSI commands that got a context.
    pub commands: u64,
    /// Task-management functions that got a context.
    pub task_management: u64,
    /// Requests whose answer was handed to the datamover.
    pub answered: u64,
    /// Commands ended by task management.
    pub aborted: u64,
    /// Requests that ended with the channel.
    pub torn_down: u64,
    /// Bytes sent to the initiator.
    pub bytes_in: u64,
    /// Bytes taken from the initiator.
    pub bytes_out: u64,
    /// PDUs answered with a Reject PDU.
    pub rejected: u64,
    /// PDUs whose digest was wrong.
    pub digest_errors: u64,
    /// Times a command waited for a buffer.
    pub buffer_waits: u64,
}

impl std::ops::AddAssign for Counters {
    fn add_assign(&mut self, other: Self) {
        self.commands += other.commands;
        self.task_management += other.task_management;
        self.answered += other.answered;
        self.aborted += other.aborted;
        self.torn_down += other.torn_down;
        self.bytes_in += other.bytes_in;
        self.bytes_out += other.bytes_out;
        self.rejected += other.rejected;
        self.digest_errors += other.digest_errors;
        self.buffer_waits += other.buffer_waits;
    }
}

impl std::ops::Add for Counters {
    type Output = Self;

    fn add(mut self, other: Self) -> Self {
        self += other;
        self
    }
}
