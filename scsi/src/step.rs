//! The vocabulary between a command and the target that carries it out.
//!
//! A [`Command`](crate::device_server::Command) says what it wants next with a
//! [`Step`]; the target does it and answers with a [`StepResult`]; the last
//! step of every command is a [`Response`].

use crate::reservation::{ReservationChange, ReservationError};
use crate::sense::{Sense, SenseData, SenseFormat};

/// Task attribute of a command (SAM-5 8.6).
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub enum TaskAttribute {
    /// May be reordered with other SIMPLE commands.
    #[default]
    Simple,
    /// Waits for everything older; everything newer waits for it.
    Ordered,
    /// HEAD OF QUEUE: starts at once.
    HeadOfQueue,
    /// Only meaningful under auto contingent allegiance; refused.
    Aca,
}

/// Bytes the transport expects to move (the initiator's buffer lengths).
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub struct Expected {
    /// Data-Out: from the initiator to us.
    pub data_out: u32,
    /// Data-In: from us to the initiator.
    pub data_in: u32,
}

/// The next step of a command.
#[derive(Clone, PartialEq, Eq, Debug)]
#[must_use]
pub enum Step {
    /// Bring a piece of Data-Out to offset 0 of the buffer. Pieces come in order, without gaps.
    ReceiveData {
        /// Offset in Data-Out, in bytes.
        from: u32,
        /// Bytes; the piece lies inside the initiator's Data-Out buffer.
        len: u32,
    },
    /// Send a piece of Data-In, which lies at offset 0 of the buffer. More follows, at last with
    /// the response; the buffer must not be needed any more when this step is reported as done.
    SendData {
        /// Offset in Data-In, in bytes.
        from: u32,
        /// Bytes; the piece lies inside the initiator's Data-In buffer.
        len: u32,
    },
    /// Do a block operation.
    Block(BlockOp),
    /// Answer the initiator; the command is over.
    Respond(Response),
}

/// Data-Out that a command begins with, in bytes.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct DataOut {
    /// The first piece of the data, at least one byte.
    pub len: u32,
    /// The whole buffer that the command needs.
    pub buffer_len: u32,
}

/// An operation on the medium. Offsets and lengths are bytes, always multiples
/// of the logical block size and always inside the capacity.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum BlockOp {
    /// Transfer from the medium to the buffer.
    Read {
        /// Offset on the medium.
        offset: u64,
        /// Length of the transfer in bytes.
        len: u32,
        /// Offset in the command's buffer.
        buffer_offset: u32,
        /// The data must come from stable storage: dirty cached data for the
        /// range are made stable first.
        fua: bool,
    },
    /// Transfer from the buffer to the medium.
    Write {
        /// Offset on the medium.
        offset: u64,
        /// Length of the transfer in bytes.
        len: u32,
        /// Offset in the command's buffer.
        buffer_offset: u32,
        /// Complete only when the data are on stable storage.
        fua: bool,
    },
    /// Make everything written in the range stable.
    Flush {
        /// Offset on the medium.
        offset: u64,
        /// Length, up to the whole capacity.
        len: u64,
    },
    /// Deallocate; afterwards the range reads zeroes. Parts of it that are less than what the
    /// backend can deallocate stay as they are.
    Discard {
        /// Offset on the medium.
        offset: u64,
        /// Length of the range in bytes.
        len: u64,
    },
    /// Make the range read zeroes.
    WriteZeroes {
        /// Offset on the medium.
        offset: u64,
        /// Length of the range in bytes.
        len: u64,
        /// Deallocating is welcome; otherwise space stays allocated.
        unmap: bool,
        /// Complete only when the zeroes are on stable storage.
        fua: bool,
    },
    /// Call [`LogicalUnit::save_reservations`] where it may block; the answer is
    /// [`StepResult::Reservations`]. The medium has no part in it.
    ///
    /// [`LogicalUnit::save_reservations`]: crate::lu::LogicalUnit::save_reservations
    ChangeReservations(ReservationChange),
    /// Find the state of the extent at `offset`; the answer is
    /// [`StepResult::Status`].
    Status {
        /// Offset on the medium.
        offset: u64,
        /// Maximum length to look at.
        len: u64,
    },
}

impl BlockOp {
    /// End of the blocks that it reads or changes, in bytes.
    pub(crate) fn end(&self) -> Option<u64> {
        match *self {
            Self::Read { offset, len, .. } | Self::Write { offset, len, .. } => {
                Some(offset + u64::from(len))
            }
            Self::WriteZeroes { offset, len, .. } | Self::Discard { offset, len } => {
                Some(offset + len)
            }
            Self::Flush { .. } | Self::ChangeReservations(_) | Self::Status { .. } => None,
        }
    }
}

/// Provisioning state of an extent.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Allocation {
    /// Space is allocated, or the backend does not know.
    Mapped,
    /// No space is allocated; reads give zeroes.
    Deallocated,
}

/// Result of a step.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum StepResult {
    /// The data arrived, or the block operation completed in full.
    Done,
    /// The answer to [`BlockOp::Status`]: `len` bytes from the offset asked,
    /// at least one block unless the backend looks at nothing, are alike.
    Status {
        /// State of these blocks.
        allocation: Allocation,
        /// Bytes from the offset that share it.
        len: u64,
    },
    /// The answer to [`BlockOp::ChangeReservations`].
    Reservations(Result<(), ReservationError>),
    /// It did not work.
    Failed(BackendError),
}

/// Reason of a failed step, in the few ways that a SCSI initiator can distinguish.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum BackendError {
    /// The medium gave an error; byte offset of the first bad byte if known.
    Medium {
        /// Byte offset on the medium.
        offset: Option<u64>,
    },
    /// No space left to allocate.
    NoSpace,
    /// The backend turned out to be read-only.
    ReadOnly,
    /// The backend is not there at the moment.
    NotReady,
    /// The backend gave the operation up; it may be retried.
    Aborted,
    /// Moving data between initiator and buffer failed.
    Transfer(TransferError),
    /// A failure of our own.
    Internal,
}

/// Reasons for which data did not come from the initiator to a buffer, or did not go to it. All but
/// the first are conditions of iSCSI (RFC 7143 11.4.7.2).
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum TransferError {
    /// The transport could not move them, or they came in a wrong order.
    Failed,
    /// A digest was wrong, or PDUs are missing, which a digest error explains (RFC 7143 7.9).
    Crc,
    /// More data came unsolicited than may.
    Unsolicited,
    /// Another amount came than an R2T had asked for.
    Amount,
    /// The initiator lacks data that cannot be sent once more.
    SnackRejected,
}

/// Status of a finished command (SAM-5 5.3.1).
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[repr(u8)]
pub enum Status {
    /// GOOD: the command succeeded.
    Good = 0x00,
    /// CHECK CONDITION, with sense data.
    CheckCondition = 0x02,
    /// CONDITION MET: a PRE-FETCH fits the cache.
    ConditionMet = 0x04,
    /// BUSY: the initiator repeats the command later.
    Busy = 0x08,
    /// RESERVATION CONFLICT: another nexus holds the unit.
    ReservationConflict = 0x18,
    /// TASK SET FULL: the initiator has too many commands.
    TaskSetFull = 0x28,
    /// ACA ACTIVE: an auto contingent allegiance is in effect.
    AcaActive = 0x30,
    /// TASK ABORTED: another nexus ended the command.
    TaskAborted = 0x40,
}

/// Data to send to the initiator with the status.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum DataIn {
    /// No Data-In with the status.
    None,
    /// Data-In that is not in the command's buffer.
    Inline(Vec<u8>),
    /// This many bytes from offset 0 of the command's buffer.
    Buffer {
        /// Offset in Data-In: what is before it was sent by [`Step::SendData`].
        from: u32,
        /// Number of bytes from its start.
        len: u32,
    },
}

impl DataIn {
    /// Bytes that go to the initiator with the status.
    #[must_use]
    pub fn len(&self) -> u32 {
        match self {
            Self::None => 0,
            Self::Inline(bytes) => bytes.len() as u32,
            Self::Buffer { len, .. } => *len,
        }
    }

    /// Their offset in Data-In.
    #[must_use]
    pub fn from(&self) -> u32 {
        match self {
            Self::None | Self::Inline(_) => 0,
            Self::Buffer { from, .. } => *from,
        }
    }

    /// Whether nothing goes to the initiator with the status.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// The difference between what a command moves and what the transport expects.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Residual {
    /// As many bytes as expected.
    None,
    /// The command moved this many bytes less.
    Underflow(u32),
    /// The command wanted to move this many bytes more.
    Overflow(u32),
}

impl Residual {
    /// Compares the length a command asks for with the initiator's buffer.
    #[must_use]
    pub fn between(wanted: u32, expected: u32) -> Self {
        match wanted.cmp(&expected) {
            std::cmp::Ordering::Equal => Self::None,
            std::cmp::Ordering::Less => Self::Underflow(expected - wanted),
            std::cmp::Ordering::Greater => Self::Overflow(wanted - expected),
        }
    }
}

/// The answer to a command.
#[derive(Clone, PartialEq, Eq, Debug)]
#[must_use]
pub struct Response {
    /// SCSI status of the command.
    pub status: Status,
    /// Sense data in the format the unit is set to; empty unless CHECK CONDITION.
    pub sense: SenseData,
    /// Data for the initiator that were not sent before, never longer than it expects.
    pub data_in: DataIn,
    /// Residual of Data-In, in bytes.
    pub residual_in: Residual,
    /// Residual of Data-Out, in bytes.
    pub residual_out: Residual,
}

impl Response {
    /// A response with a status, no data and no sense: BUSY, TASK SET FULL and
    /// the like, or TASK ABORTED.
    pub fn status_only(status: Status, expected: Expected) -> Self {
        Self {
            status,
            sense: SenseData::new(),
            data_in: DataIn::None,
            residual_in: Residual::between(0, expected.data_in),
            residual_out: Residual::between(0, expected.data_out),
        }
    }

    /// CHECK CONDITION with the given sense data, for refusals that a transport
    /// or a task set decides: overlapped commands, broken information units.
    pub fn check_condition(sense: &Sense, format: SenseFormat, expected: Expected) -> Self {
        Self {
            sense: sense.encode(format),
            ..Self::status_only(Status::CheckCondition, expected)
        }
    }

    /// The meaning of the sense data, if there are any.
    #[must_use]
    pub fn parsed_sense(&self) -> Option<Sense> {
        Sense::parse(&self.sense)
    }
}
