//! Interface between a channel and the layer that transfers its data (RFC 5047 chapter 6).
//!
//! | RFC 5047 | this module |
//! | --- | --- |
//! | Send_Control | [`Datamover::send_control`] |
//! | Put_Data | [`Datamover::put_data`] |
//! | Get_Data | [`Datamover::get_data`] |
//! | Control_Notify | [`Channel::handle_frame`](super::Channel::handle_frame) |
//! | Data_Completion_Notify | [`Channel::handle_done`](super::Channel::handle_done), [`Datamover::on_solicited`], [`Channel::handle_arrived`](super::Channel::handle_arrived) |
//! | Connection_Terminate_Notify | [`Channel::handle_disconnected`](super::Channel::handle_disconnected) |

use riser_scsi::iscsi::login::{ConnectionParams, SessionParams};
use riser_scsi::iscsi::pdu::{DataInStatus, DataOut, FromTarget, RejectReason, Snack};
use riser_scsi::iscsi::{Itt, StatSn};
use riser_scsi::lun::WireLun;
use riser_scsi::step::TransferError;

use crate::fabric::TaskIdx;

/// Control-type PDU to send.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Control {
    /// PDU without sequence numbers.
    pub pdu: FromTarget,
    /// Data segment without padding.
    pub data: Vec<u8>,
    /// Set if the PDU increments StatSN.
    pub counts: bool,
    /// Task to complete when this is sent.
    pub ends: Option<TaskIdx>,
}

/// Start of a sequence of Data-In PDUs. This isn't the first byte if the initiator has already
/// acknowledged some of the data.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Start {
    /// DataSN of the first PDU.
    pub data_sn: u32,
    /// Offset in the command data.
    pub offset: u32,
}

/// Progress of the data transfer for a write.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Progress {
    /// Number of contiguous bytes received from the start.
    pub got: u32,
    /// Number of R2T PDUs sent.
    pub r2ts: u32,
}

/// Data-In transfer for a piece of a command, which is stored at the start of the buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PutData {
    /// Context with the buffer.
    pub task: TaskIdx,
    /// Initiator task tag.
    pub itt: Itt,
    /// LUN of the command.
    pub lun: WireLun,
    /// Number of R2T PDUs sent for this command.
    pub r2ts: u32,
    /// Offset of the buffer in the command data.
    pub base: u32,
    /// First PDU and byte to send, which must be in the buffer.
    pub start: Start,
    /// End offset in the command data. The size must be at least one byte.
    pub end: u32,
    /// Set if the buffer will be used for the next piece. When it's no longer in use, the datamover
    /// must call [`Channel::handle_done`](super::Channel::handle_done) or
    /// [`Channel::handle_arrived`](super::Channel::handle_arrived).
    pub more: bool,
    /// Status to send in the last PDU, which completes the task.
    pub status: Option<DataInStatus>,
}

/// Data-Out transfer into the buffer of a task.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GetData {
    /// Context with the buffer.
    pub task: TaskIdx,
    /// Initiator task tag.
    pub itt: Itt,
    /// LUN of the command.
    pub lun: WireLun,
    /// R2TSN of the first R2T.
    pub r2t_sn: u32,
    /// Offset of the buffer in the command data.
    pub base: u32,
    /// Offset in the command data, which must be in the buffer.
    pub offset: u32,
    /// Length in bytes, must not be zero.
    pub len: u32,
}

/// How to handle a solicited Data-Out PDU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SolicitedData {
    /// The transfer is complete or has failed, so the data must be ignored.
    Stale {
        /// Set if this data was requested.
        was_solicited: bool,
    },
    /// Copy the data to the buffer.
    Data {
        /// Context with the buffer.
        task: TaskIdx,
        /// Offset in the command data.
        offset: u32,
        /// Set if all requested data was received.
        complete: bool,
    },
    /// Some of the data is missing and was requested again.
    Again(TaskIdx),
    /// The transfer failed. No more data will be received.
    Failed(TaskIdx, TransferError),
}

/// Data transfer layer.
pub trait Datamover {
    /// Set if connections support error recovery other than session recovery (RFC 7143 7.1.1). If
    /// not, the error recovery level of a session is always zero, regardless of the negotiated
    /// value.
    const RECOVERS: bool;

    /// Enters full-feature phase with these parameters. Called after sending the login response.
    fn enable(&mut self, session: &SessionParams, connection: &ConnectionParams);

    /// Sets MaxRecvDataSegmentLength of the initiator in bytes. This must not affect PDUs already
    /// in the send queue.
    fn set_max_send_segment(&mut self, bytes: u32);

    /// Returns the maximum data segment size for a control-type PDU, in bytes.
    fn max_send_segment(&self) -> u32;

    /// Called when a context was allocated for the current command.
    fn on_context_allocated(&mut self, task: TaskIdx);

    /// Queues a PDU for sending.
    fn send_control(&mut self, control: Control);

    /// Queues a transfer to the initiator. Returns the total number of Data-In PDUs for this
    /// command, if the datamover uses them. Unless more data follows or the status is sent with the
    /// data, the next PDU must be the response for this task.
    fn put_data(&mut self, put: PutData) -> u32;

    /// Returns true if a good status can be sent with the data.
    fn carries_status(&self) -> bool;

    /// Requests data from the initiator. Returns the total number of R2T PDUs for this command, if
    /// the datamover uses them.
    fn get_data(&mut self, get: GetData) -> u32;

    /// Processes the header of a solicited Data-Out PDU (see [`Datamover::get_data`]).
    fn on_solicited(&mut self, pdu: &DataOut, len: u32, is_intact: bool) -> SolicitedData;

    /// Cancels transfers for a task if they haven't been started. Returns true if a transfer is in
    /// progress. In this case, [`Channel::handle_arrived`](super::Channel::handle_arrived) is
    /// called when it's complete.
    fn cancel_transfers(&mut self, task: TaskIdx) -> bool;

    /// The initiator has acknowledged all status numbers before `exp`, or no longer needs them
    /// because the connection is closing. Returns the tasks that were only kept for retransmission.
    fn acknowledge(&mut self, exp: Option<StatSn>) -> Vec<TaskIdx> {
        let _ = exp;
        Vec::new()
    }

    /// The initiator has acknowledged the Data-In PDUs of a command, as requested by the A bit.
    /// Returns the task if this completes a piece and its buffer is no longer used.
    ///
    /// # Errors
    /// Returns the reject reason if the SNACK is invalid.
    fn acknowledge_data(&mut self, snack: &Snack) -> Result<Option<TaskIdx>, RejectReason> {
        let _ = snack;
        Err(RejectReason::InvalidDataAck)
    }

    /// Retransmits PDUs.
    ///
    /// # Errors
    /// Returns the reject reason if this isn't possible.
    fn resend(&mut self, snack: &Snack) -> Result<(), RejectReason> {
        let _ = snack;
        Err(RejectReason::SnackReject)
    }

    /// Returns true if lost PDUs can be recovered within the connection (error recovery level 1).
    fn recovers(&self) -> bool {
        false
    }

    /// Returns the progress of the current Data-Out transfer.
    fn progress(&self, task: TaskIdx) -> Progress {
        let _ = task;
        Progress::default()
    }

    /// Returns the offset for a DataSN in a transfer of `len` bytes, or `None` if it's past the
    /// end.
    fn start_of(&self, start: Start, len: u32, data_sn: u32) -> Option<Start> {
        let _ = (start, len, data_sn);
        None
    }

    /// Clears the send queue and discards PDUs kept for retransmission.
    fn clear(&mut self) {}

    /// Returns the number of PDUs and transfers in the send queue.
    fn queued(&self) -> usize;

    /// Returns true if a data request for this task is queued or being sent, so the initiator can't
    /// have responded.
    fn is_requesting(&self, task: TaskIdx) -> bool;

    /// Returns true if data for this task is being sent and the initiator might be slow to read it.
    fn is_sending_data(&self, task: TaskIdx) -> bool {
        let _ = task;
        false
    }

    /// Returns the total data segment size of control-type PDUs in the send queue, in bytes.
    fn queued_bytes(&self) -> usize;
}
