//! Exchanges that a connection has not finished: a login before its last answer, requests before
//! their turn, a text whose parts go one by one.

use riser_scsi::iscsi::frame::Frame;
use riser_scsi::iscsi::login::{ConnectionParams, SessionParams};
use riser_scsi::iscsi::pdu::LoginResponse;
use riser_scsi::iscsi::text::{Collector, Outgoing};
use riser_scsi::iscsi::{BHS_LEN, CmdSn, Itt, Ttt};

/// A login that has succeeded, before its last answer is sent.
#[derive(Debug)]
pub(super) struct LoginResult {
    pub(super) response: LoginResponse,
    pub(super) text: Vec<u8>,
    pub(super) session: SessionParams,
    pub(super) connection: ConnectionParams,
}

/// A PDU that is kept until its turn.
#[derive(Debug)]
pub(super) struct QueuedPdu {
    pub(super) bhs: [u8; BHS_LEN],
    pub(super) ahs: Vec<u8>,
    pub(super) data: Vec<u8>,
    /// As [`Frame::is_intact`].
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

/// A request whose turn has not come, and the unsolicited data that followed it.
#[derive(Debug)]
pub(super) struct QueuedRequest {
    pub(super) sn: CmdSn,
    pub(super) immediate: bool,
    pub(super) itt: Itt,
    pub(super) request: QueuedPdu,
    pub(super) data: Vec<QueuedPdu>,
}

/// A text exchange under way. A new one ends the old one.
#[derive(Debug, Default)]
pub(super) struct TextState {
    pub(super) collector: Collector,
    /// The part of the answer that is still to be sent.
    pub(super) outgoing: Outgoing,
    /// The transfer tag that goes on with it.
    pub(super) ttt: Option<Ttt>,
    pub(super) next_ttt: u32,
}
