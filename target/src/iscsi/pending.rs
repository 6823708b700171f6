//! Pending exchanges on a connection: login before the final response, requests received out of
//! order, and text sent in several PDUs.

use riser_scsi::iscsi::frame::Frame;
use riser_scsi::iscsi::login::{ConnectionParams, SessionParams};
use riser_scsi::iscsi::pdu::LoginResponse;
use riser_scsi::iscsi::text::{Collector, Outgoing};
use riser_scsi::iscsi::{BHS_LEN, CmdSn, Itt, Ttt};

/// Successful login before sending the final response.
#[derive(Debug)]
pub(super) struct LoginResult {
    pub(super) response: LoginResponse,
    pub(super) text: Vec<u8>,
    pub(super) session: SessionParams,
    pub(super) connection: ConnectionParams,
    /// Set for the leading connection of a session.
    pub(super) is_leading: bool,
}

/// Queued PDU.
#[derive(Debug)]
pub(super) struct QueuedPdu {
    pub(super) bhs: [u8; BHS_LEN],
    pub(super) ahs: Vec<u8>,
    pub(super) data: Vec<u8>,
    /// See [`Frame::is_intact`].
    is_intact: bool,
}

impl QueuedPdu {
    pub(super) fn of(frame: &Frame<'_>) -> Self {
        Self {
            bhs: *frame.bhs,
            ahs: frame.ahs.to_vec(),
            data: frame.data.to_vec(),
            is_intact: frame.is_intact,
        }
    }

    pub(super) fn frame(&self) -> Frame<'_> {
        Frame {
            bhs: &self.bhs,
            ahs: &self.ahs,
            data: &self.data,
            is_intact: self.is_intact,
        }
    }
}

/// Request received out of order, followed by its unsolicited data.
#[derive(Debug)]
pub(super) struct QueuedRequest {
    pub(super) sn: CmdSn,
    pub(super) immediate: bool,
    pub(super) itt: Itt,
    pub(super) request: QueuedPdu,
    pub(super) data: Vec<QueuedPdu>,
}

/// Current text exchange, replaced when a new one starts.
#[derive(Debug, Default)]
pub(super) struct TextState {
    pub(super) collector: Collector,
    /// Remaining part of the response.
    pub(super) outgoing: Outgoing,
    /// Target transfer tag for the next part.
    pub(super) ttt: Option<Ttt>,
    pub(super) next_ttt: u32,
}
