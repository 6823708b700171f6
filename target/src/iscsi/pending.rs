//! Pending exchanges on a connection: login before the final response, requests received out of
//! order, and text sent in several PDUs.

use riser_scsi::iscsi::frame::Frame;
use riser_scsi::iscsi::login::{ConnectionParams, SessionParams};
use riser_scsi::iscsi::pdu::{FromInitiator, LoginResponse};
use riser_scsi::iscsi::text::{Collector, Outgoing};
use riser_scsi::iscsi::{BHS_LEN, CmdSn, Itt, Ttt};

use super::window::{Admission, Window};
use crate::fabric::ConnRef;

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

/// Requests received out of order. The number is limited by the command window of the session.
#[derive(Debug, Default)]
pub(super) struct RequestQueue(Vec<QueuedRequest>);

impl RequestQueue {
    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub(super) fn clear(&mut self) {
        self.0.clear();
    }

    pub(super) fn push(&mut self, request: QueuedRequest) {
        self.0.push(request);
    }

    /// Returns true if a command with this CmdSN is queued.
    pub(super) fn contains(&self, sn: CmdSn) -> bool {
        self.0.iter().any(|one| one.sn == sn && !one.immediate)
    }

    /// Returns the CmdSN of the queued command with this tag.
    pub(super) fn command_sn(&self, itt: Itt) -> Option<CmdSn> {
        let mut commands = self.0.iter().filter(|one| !one.immediate);
        commands.find(|one| one.itt == itt).map(|one| one.sn)
    }

    /// Stores unsolicited data with the queued command it belongs to. Data with an invalid digest
    /// must be stored as well, because the last PDU indicates that no more data follows. Data that
    /// exceeds the limit for unsolicited data is dropped, and will be missing when the command is
    /// processed.
    pub(super) fn keep_data(
        &mut self,
        frame: &Frame<'_>,
        pdu: &FromInitiator,
        first_burst: u32,
    ) -> bool {
        let FromInitiator::DataOut(out) = pdu else {
            return false;
        };
        let of_it = |waiting: &&mut QueuedRequest| waiting.itt == out.itt && !waiting.immediate;
        let Some(waiting) = self.0.iter_mut().find(of_it) else {
            return false;
        };
        // Include the memory used by each PDU, because an initiator could send any number of PDUs
        // without data.
        let kept: usize = waiting
            .data
            .iter()
            .map(|kept| kept.data.len().max(512))
            .sum();
        if kept + frame.data.len() <= first_burst as usize {
            waiting.data.push(QueuedPdu::of(frame));
        }
        true
    }

    /// Removes the next request, if it's on this connection.
    pub(super) fn take_due(&mut self, window: &Window, me: ConnRef) -> Option<QueuedRequest> {
        let due = |waiting: &QueuedRequest| {
            if waiting.immediate {
                window.is_due(waiting.sn, me)
            } else {
                window.admit(waiting.sn, me) == Admission::Now
            }
        };
        // Process functions first: they precede the command with the same CmdSN.
        let functions = (0..self.0.len()).filter(|at| self.0[*at].immediate);
        let exp = window.bounds().0;
        let commands =
            (0..self.0.len()).filter(|at| !self.0[*at].immediate && self.0[*at].sn == exp);
        let at = functions.chain(commands).find(|at| due(&self.0[*at]))?;
        Some(self.0.swap_remove(at))
    }
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
