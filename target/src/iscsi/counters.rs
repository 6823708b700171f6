//! Channel counters and their totals.

/// Channel counters.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// SCSI commands with a context.
    pub commands: u64,
    /// Task-management functions with a context.
    pub task_management: u64,
    /// Responses passed to the datamover.
    pub responded: u64,
    /// Commands aborted by task management.
    pub aborted: u64,
    /// Requests aborted because the channel was closed.
    pub torn_down: u64,
    /// Bytes sent to the initiator.
    pub bytes_in: u64,
    /// Bytes received from the initiator.
    pub bytes_out: u64,
    /// Reject PDUs sent.
    pub rejected: u64,
    /// PDUs with an invalid digest.
    pub digest_errors: u64,
    /// Number of times a command had to wait for a buffer.
    pub buffer_waits: u64,
}

impl std::ops::AddAssign for Counters {
    fn add_assign(&mut self, other: Self) {
        self.commands += other.commands;
        self.task_management += other.task_management;
        self.responded += other.responded;
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
