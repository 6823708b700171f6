//! The interface between a command and the target that executes it.
//!
//! A [`Command`](crate::device_server::Command) returns a [`Step`]. The target executes this and
//! passes a [`StepResult`] back to the command. The last step of each command is a [`Response`].

use crate::protection::ProtectionChange;
use crate::reservation::{ReservationChange, ReservationError};
use crate::sense::{Sense, SenseData, SenseFormat};

/// Task attribute of a command (SAM-5 8.6).
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub enum TaskAttribute {
    /// Can be reordered with other SIMPLE commands.
    #[default]
    Simple,
    /// Waits for all older commands, and all newer commands have to wait for it.
    Ordered,
    /// HEAD OF QUEUE: starts immediately.
    HeadOfQueue,
    /// Only valid with an auto contingent allegiance. Always refused.
    Aca,
}

/// Number of bytes that the transport expects to transfer (buffer sizes at the initiator).
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub struct Expected {
    /// Data-Out: from the initiator to the target.
    pub data_out: u32,
    /// Data-In: from the target to the initiator.
    pub data_in: u32,
}

/// The next step of a command.
#[derive(Clone, PartialEq, Eq, Debug)]
#[must_use]
pub enum Step {
    /// Receive a piece of Data-Out into the buffer, at offset 0. This is done in order and without
    /// gaps.
    ReceiveData {
        /// Offset in the Data-Out, in bytes.
        from: u32,
        /// Number of bytes. The piece is always within the initiator's buffer.
        len: u32,
    },
    /// Send a piece of Data-In from the buffer, at offset 0. More data will follow, and the last
    /// piece is sent with the response. The buffer must no longer be in use when this step is done.
    SendData {
        /// Offset in the Data-In, in bytes.
        from: u32,
        /// Number of bytes. The piece is always within the initiator's buffer.
        len: u32,
    },
    /// Execute a block operation.
    Block(BlockOp),
    /// Send the response to the initiator. This is the last step of the command.
    Respond(Response),
}

/// Initial Data-Out of a command, in bytes.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct DataOut {
    /// Length of the first piece, at least 1.
    pub len: u32,
    /// Size of the buffer required for the command.
    pub buffer_len: u32,
}

/// An operation on the medium. All offsets and lengths are in bytes. They are always a multiple of
/// the logical block size, and within the capacity.
///
/// If the LU has [protection information](crate::protection), the backend stores eight bytes for
/// every block. It must ensure that a block and its protection information are always updated
/// together, even if there is a crash: if only one of them was written, any future read of this
/// block will fail. A block that has never been written has all bits set in its protection
/// information.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum BlockOp {
    /// Read from the medium to the buffer.
    Read {
        /// Offset on the medium.
        offset: u64,
        /// Number of bytes to read.
        len: u32,
        /// Offset in the command buffer.
        buffer_offset: u32,
        /// Offset in the command buffer for the protection information, with eight bytes for each
        /// block. `None` if the medium has no protection information.
        tags: Option<u32>,
        /// If set, the data must be read from stable storage. If there is dirty data for this range
        /// in the cache, it must be flushed first.
        fua: bool,
    },
    /// Write from the buffer to the medium.
    Write {
        /// Offset on the medium.
        offset: u64,
        /// Number of bytes to write.
        len: u32,
        /// Offset in the command buffer.
        buffer_offset: u32,
        /// Offset of the protection information in the command buffer, with eight bytes for each
        /// block. `None` if the medium has no protection information.
        tags: Option<u32>,
        /// If set, only complete this when the data is on stable storage.
        fua: bool,
    },
    /// Flush all data written in this range to stable storage.
    Flush {
        /// Offset on the medium.
        offset: u64,
        /// Number of bytes, up to the entire capacity.
        len: u64,
    },
    /// Deallocate a range, after which it's read as zeros. If some part of it is too small for the
    /// backend to deallocate, the data in this part is not changed.
    ///
    /// You must set all bits of the protection information for every block that will be read as
    /// zeros, and must not change the protection information of any other block.
    Discard {
        /// Offset on the medium.
        offset: u64,
        /// Number of bytes to deallocate.
        len: u64,
    },
    /// Fill a range with zeros. All bits of the protection information must be set, even if the
    /// range is not deallocated.
    WriteZeroes {
        /// Offset on the medium.
        offset: u64,
        /// Number of bytes to write.
        len: u64,
        /// If set, the range can be deallocated. Otherwise the space must stay allocated.
        unmap: bool,
        /// If set, only complete this when the zeros are on stable storage.
        fua: bool,
    },
    /// Call [`LogicalUnit::save_reservations`] from a context where it may block. The result is
    /// [`StepResult::Reservations`]. This does not access the medium.
    ///
    /// [`LogicalUnit::save_reservations`]: crate::lu::LogicalUnit::save_reservations
    ChangeReservations(ReservationChange),
    /// Call [`LogicalUnit::save_protection`] from a context where it may block, which stores the
    /// type of the protection information on the medium. Every block already has all bits set in
    /// its protection information. This must not be aborted: the next command would otherwise
    /// use the previous type.
    ///
    /// [`LogicalUnit::save_protection`]: crate::lu::LogicalUnit::save_protection
    ChangeProtection(ProtectionChange),
    /// Get the state of the extent at `offset`. The result is [`StepResult::Status`].
    Status {
        /// Offset on the medium.
        offset: u64,
        /// Maximum number of bytes to check.
        len: u64,
    },
}

impl BlockOp {
    /// Returns the end of the blocks that are read or changed, in bytes.
    pub(crate) fn end(&self) -> Option<u64> {
        match *self {
            Self::Read { offset, len, .. } | Self::Write { offset, len, .. } => {
                Some(offset + u64::from(len))
            }
            Self::WriteZeroes { offset, len, .. } | Self::Discard { offset, len } => {
                Some(offset + len)
            }
            Self::Flush { .. }
            | Self::ChangeReservations(_)
            | Self::ChangeProtection(_)
            | Self::Status { .. } => None,
        }
    }
}

/// Provisioning state of an extent.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Allocation {
    /// Space is allocated, or this is not known by the backend.
    Mapped,
    /// No space is allocated, and the blocks are read as zeros.
    Deallocated,
}

/// Result of a step.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum StepResult {
    /// The data was transferred, or the block operation was completed.
    Done,
    /// The result of [`BlockOp::Status`]. The state is the same for `len` bytes from the given
    /// offset. This should be at least a block, unless the backend has a smaller allocation unit.
    Status {
        /// State of the blocks.
        allocation: Allocation,
        /// Number of bytes with this state.
        len: u64,
    },
    /// The result of [`BlockOp::ChangeReservations`].
    Reservations(Result<(), ReservationError>),
    /// The step has failed.
    Failed(BackendError),
}

/// The reason why a step has failed. There are only as many reasons as can be reported to an
/// initiator.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum BackendError {
    /// Error on the medium, with the offset of the first bad byte if known.
    Medium {
        /// Offset on the medium, in bytes.
        offset: Option<u64>,
    },
    /// No space left.
    NoSpace,
    /// The backend is read-only.
    ReadOnly,
    /// The backend is currently not available.
    NotReady,
    /// The operation was aborted by the backend, but you can try again.
    Aborted,
    /// Error when transferring data between the initiator and the buffer.
    Transfer(TransferError),
    /// Internal error in this target.
    Internal,
}

/// The reason why data could not be transferred between the initiator and a buffer. All of these
/// except for the first are defined for iSCSI (RFC 7143 11.4.7.2).
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum TransferError {
    /// Error in the transport, or data was received out of order.
    Failed,
    /// Digest error, or PDUs are missing because of a digest error (RFC 7143 7.9).
    Crc,
    /// Received more unsolicited data than allowed.
    Unsolicited,
    /// The amount of data received is different from the R2T.
    Amount,
    /// The initiator has requested data again that we can no longer send.
    SnackRejected,
}

/// Status of a completed command (SAM-5 5.3.1).
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[repr(u8)]
pub enum Status {
    /// GOOD: the command was successful.
    Good = 0x00,
    /// CHECK CONDITION, with sense data.
    CheckCondition = 0x02,
    /// CONDITION MET: the blocks of a PRE-FETCH fit into the cache.
    ConditionMet = 0x04,
    /// BUSY: the initiator should retry the command later.
    Busy = 0x08,
    /// RESERVATION CONFLICT: the LU is reserved by another nexus.
    ReservationConflict = 0x18,
    /// TASK SET FULL: the initiator has sent too many commands.
    TaskSetFull = 0x28,
    /// ACA ACTIVE: the nexus has an auto contingent allegiance.
    AcaActive = 0x30,
    /// TASK ABORTED: the command was aborted by another nexus.
    TaskAborted = 0x40,
}

/// The data to send with the status.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum DataIn {
    /// No data.
    None,
    /// Data that is not in the command buffer.
    Inline(Vec<u8>),
    /// Data in the command buffer, starting at offset 0.
    Buffer {
        /// Offset in the Data-In. Everything before this has already been sent with
        /// [`Step::SendData`].
        from: u32,
        /// Number of bytes to send.
        len: u32,
    },
}

impl DataIn {
    /// Returns the number of bytes to send with the status.
    #[must_use]
    pub fn len(&self) -> u32 {
        match self {
            Self::None => 0,
            Self::Inline(bytes) => bytes.len() as u32,
            Self::Buffer { len, .. } => *len,
        }
    }

    /// Returns the offset in the Data-In.
    #[must_use]
    pub fn from(&self) -> u32 {
        match self {
            Self::None | Self::Inline(_) => 0,
            Self::Buffer { from, .. } => *from,
        }
    }

    /// Returns whether no data will be sent with the status.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// Difference between the number of bytes of a command and the number expected by the transport.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Residual {
    /// No difference.
    None,
    /// Number of bytes less than expected.
    Underflow(u32),
    /// Number of bytes more than expected.
    Overflow(u32),
}

impl Residual {
    /// Compares the length requested in a command with the size of the initiator's buffer.
    #[must_use]
    pub fn between(wanted: u32, expected: u32) -> Self {
        match wanted.cmp(&expected) {
            std::cmp::Ordering::Equal => Self::None,
            std::cmp::Ordering::Less => Self::Underflow(expected - wanted),
            std::cmp::Ordering::Greater => Self::Overflow(wanted - expected),
        }
    }
}

/// The response for a command.
#[derive(Clone, PartialEq, Eq, Debug)]
#[must_use]
pub struct Response {
    /// SCSI status of the command.
    pub status: Status,
    /// Sense data in the format set for the LU. This is empty except for CHECK CONDITION.
    pub sense: SenseData,
    /// The remaining data to send to the initiator. This is never longer than expected.
    pub data_in: DataIn,
    /// Residual for Data-In, in bytes.
    pub residual_in: Residual,
    /// Residual for Data-Out, in bytes.
    pub residual_out: Residual,
}

impl Response {
    /// Creates a new response without data and sense data, e.g. for BUSY, TASK SET FULL or TASK
    /// ABORTED.
    pub fn status_only(status: Status, expected: Expected) -> Self {
        Self {
            status,
            sense: SenseData::new(),
            data_in: DataIn::None,
            residual_in: Residual::between(0, expected.data_in),
            residual_out: Residual::between(0, expected.data_out),
        }
    }

    /// Creates a CHECK CONDITION response with the given sense data. Used when a command is refused
    /// by a transport or a task set, e.g. for overlapped commands or invalid information units.
    pub fn check_condition(sense: &Sense, format: SenseFormat, expected: Expected) -> Self {
        Self {
            sense: sense.encode(format),
            ..Self::status_only(Status::CheckCondition, expected)
        }
    }

    /// Returns the parsed sense data, if available.
    #[must_use]
    pub fn parsed_sense(&self) -> Option<Sense> {
        Sense::parse(&self.sense)
    }
}
