//! Interface between a channel and the layer that moves its data (RFC 5047 chapter 6).
//!
//! | RFC 5047 | here |
//! | --- | --- |
//! | Send_Control | [`Datamover::send_control`] |
//! | Put_Data | [`Datamover::put_data`] |
//! | Get_Data | [`Datamover::get_data`] |
//! | Control_Notify | [`Channel::handle_frame`](super::Channel::handle_frame) |
//! | Data_Completion_Notify | [`Channel::handle_done`](super::Channel::handle_done), [`Datamover::take_solicited`], [`Channel::handle_arrived`](super::Channel::handle_arrived) |
//! | Connection_Terminate_Notify | [`Channel::handle_disconnected`](super::Channel::handle_disconnected) |

use riser_scsi::iscsi::login::{ConnectionParams, SessionParams};
use riser_scsi::iscsi::pdu::{DataInStatus, DataOut, FromTarget, RejectReason, Snack};
use riser_scsi::iscsi::{Itt, StatSn};
use riser_scsi::lun::WireLun;
use riser_scsi::step::TransferError;

use crate::fabric::TaskIdx;

/// A control-type PDU to send.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Control {
    /// PDU without its sequence numbers.
    pub pdu: FromTarget,
    /// Data segment, without its padding.
    pub data: Vec<u8>,
    /// It takes a status sequence number.
    pub counts: bool,
    /// Task that ends once it is sent.
    pub ends: Option<TaskIdx>,
}

/// Beginning of a sequence of Data-In PDUs: later than with the first byte where the initiator has
/// acknowledged some of them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Start {
    /// Number of the first PDU.
    pub data_sn: u32,
    /// Offset in the command's data.
    pub offset: u32,
}

/// Progress of the data of a write.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Progress {
    /// Bytes from the first one on, without a gap.
    pub got: u32,
    /// R2T PDUs so far.
    pub r2ts: u32,
}

/// Data for the initiator: the start of a task's buffer, which holds a piece of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PutData {
    /// Context whose buffer holds the data.
    pub task: TaskIdx,
    /// Initiator task tag of the command.
    pub itt: Itt,
    /// LUN that the command was sent to.
    pub lun: WireLun,
    /// R2T PDUs that it had.
    pub r2ts: u32,
    /// Offset of the buffer in the command's data.
    pub base: u32,
    /// First PDU and byte, not before the buffer.
    pub start: Start,
    /// Offset of their end in the command's data; at least one byte after the beginning.
    pub end: u32,
    /// More pieces follow, for which the buffer is needed: when this one has left it,
    /// [`Channel::handle_done`](super::Channel::handle_done) or
    /// [`Channel::handle_arrived`](super::Channel::handle_arrived) says so.
    pub more: bool,
    /// The answer, if the last PDU is to carry it and so end the task.
    pub status: Option<DataInStatus>,
}

/// Data from the initiator, into a task's buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GetData {
    /// Context whose buffer takes the data.
    pub task: TaskIdx,
    /// Initiator task tag of the command.
    pub itt: Itt,
    /// LUN that the command was sent to.
    pub lun: WireLun,
    /// Number of the first R2T.
    pub r2t_sn: u32,
    /// Offset of the buffer in the command's data.
    pub base: u32,
    /// Offset in the command's data, not before the buffer.
    pub offset: u32,
    /// Bytes, at least one.
    pub len: u32,
}

/// Use of a Data-Out PDU that answers an R2T.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SolicitedData {
    /// Of a transfer that is over or has failed: to be dropped.
    Stale {
        /// It was asked for before.
        was_asked: bool,
    },
    /// For a task's buffer.
    Data {
        /// Context whose buffer takes the data.
        task: TaskIdx,
        /// Offset in the command's data.
        offset: u32,
        /// All that was asked for is here.
        complete: bool,
    },
    /// Some of the data are missing, and were asked for once more.
    Again(TaskIdx),
    /// The transfer has failed, and nothing more comes of it.
    Failed(TaskIdx, TransferError),
}

/// The layer that moves data.
pub trait Datamover {
    /// Whether connections on it recover from errors by more than a new login (RFC 7143 7.1.1):
    /// without that, the error recovery level of a session is zero in spite of what was negotiated.
    const RECOVERS: bool;

    /// Full-feature phase begins with these values, once the answer to the login is on its way.
    fn enable(&mut self, session: &SessionParams, connection: &ConnectionParams);

    /// The initiator declared another MaxRecvDataSegmentLength, in bytes: for what is sent after
    /// everything that waits already.
    fn set_max_send_segment(&mut self, bytes: u32);

    /// Longest data segment of a control-type PDU, in bytes.
    fn max_send_segment(&self) -> u32;

    /// The command that is being looked at was taken in as this task.
    fn begin(&mut self, task: TaskIdx);

    /// Sends a PDU after everything before it.
    fn send_control(&mut self, control: Control);

    /// Moves data to the initiator, after everything before it. The number of Data-In PDUs that the
    /// command has with that, where there are such. Unless more data follow, or the status goes
    /// with the data, the next PDU sent is the task's answer.
    fn put_data(&mut self, put: PutData) -> u32;

    /// Whether a good status can go with the data.
    fn carries_status(&self) -> bool;

    /// Asks the initiator for data. The number of R2T PDUs that the command has with that, where
    /// there are such.
    fn get_data(&mut self, get: GetData) -> u32;

    /// Looks at data that came as a PDU in answer to [`Datamover::get_data`].
    fn take_solicited(&mut self, pdu: &DataOut, len: u32, is_intact: bool) -> SolicitedData;

    /// Forgets what a task has under way, as far as it is not on its way already. Whether it is:
    /// then [`Channel::handle_arrived`](super::Channel::handle_arrived) says when it is over.
    fn forget(&mut self, task: TaskIdx) -> bool;

    /// The initiator has every status before `exp`; or it leaves, and wants none any more. The
    /// tasks that end with that; they were kept to be sent once more.
    fn acknowledge(&mut self, exp: Option<StatSn>) -> Vec<TaskIdx> {
        let _ = exp;
        Vec::new()
    }

    /// The initiator has all Data-In PDUs of a command before one, which it was asked to say: the
    /// task whose piece left its buffer with that, if nothing uses the buffer any more.
    ///
    /// # Errors
    /// Why that cannot be.
    fn acknowledge_data(&mut self, snack: &Snack) -> Result<Option<TaskIdx>, RejectReason> {
        let _ = snack;
        Err(RejectReason::InvalidDataAck)
    }

    /// Sends something once more.
    ///
    /// # Errors
    /// Why not.
    fn resend(&mut self, snack: &Snack) -> Result<(), RejectReason> {
        let _ = snack;
        Err(RejectReason::SnackReject)
    }

    /// Whether what is lost within the connection is brought again: error recovery level 1.
    fn recovers(&self) -> bool {
        false
    }

    /// Returns the progress of the data that a task has asked for.
    fn progress(&self, task: TaskIdx) -> Progress {
        let _ = task;
        Progress::default()
    }

    /// Returns the beginning of the PDU with a number, of data of `len` bytes; `None` if they are
    /// fewer.
    fn start_of(&self, start: Start, len: u32, data_sn: u32) -> Option<Start> {
        let _ = (start, len, data_sn);
        None
    }

    /// Sends nothing of what waits to be sent, and keeps nothing to be sent once more.
    fn clear(&mut self) {}

    /// Returns the number of PDUs and transfers that wait to be sent.
    fn queued(&self) -> usize;

    /// Whether a request for data of a task waits to be sent, or is being sent: the initiator cannot
    /// have answered it.
    fn is_asking(&self, task: TaskIdx) -> bool;

    /// Whether data of a task are being sent that the initiator has not taken yet, where it may take
    /// its time for that.
    fn is_sending_data(&self, task: TaskIdx) -> bool {
        let _ = task;
        false
    }

    /// Returns the bytes of data segments of control-type PDUs that wait to be sent.
    fn queued_bytes(&self) -> usize;
}
