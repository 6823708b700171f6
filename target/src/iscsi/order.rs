//! Command ordering: requests are processed in CmdSN order and queued if received early.

use std::sync::Arc;

use riser_scsi::iscsi::frame::Frame;
use riser_scsi::iscsi::pdu::{FromInitiator, TmfFunction, TmfRequest};
use riser_scsi::iscsi::{CmdSn, Itt};

use super::channel::{Action, Channel, Cx};
use super::datamover::Datamover;
use super::pending::{QueuedPdu, QueuedRequest};
use super::window::Admission;

/// Returns the CmdSN and tag of a request and whether it's immediate, or `None` for PDUs without a
/// CmdSN.
fn number_of(pdu: &FromInitiator) -> Option<(CmdSn, bool, Itt)> {
    match pdu {
        FromInitiator::ScsiCommand(p) => Some((p.cmd_sn, p.immediate, p.itt)),
        FromInitiator::TmfRequest(p) => Some((p.cmd_sn, p.immediate, p.itt)),
        FromInitiator::TextRequest(p) => Some((p.cmd_sn, p.immediate, p.itt)),
        FromInitiator::LogoutRequest(p) => Some((p.cmd_sn, p.immediate, p.itt)),
        FromInitiator::NopOut(p) => Some((p.cmd_sn, p.immediate, p.itt)),
        FromInitiator::LoginRequest(_) | FromInitiator::DataOut(_) | FromInitiator::Snack(_) => {
            None
        }
    }
}

impl<D: Datamover> Channel<D> {
    /// Handles a PDU in full-feature phase after checking digests. It is processed, queued, or
    /// dropped.
    pub(super) fn on_pdu(&mut self, cx: &mut Cx<'_>, frame: &Frame<'_>, pdu: &FromInitiator) {
        let Some((sn, immediate, itt)) = number_of(pdu) else {
            if !self.keep_data(frame, pdu) {
                self.carry_out_pdu(cx, frame, pdu);
            }
            return;
        };
        let (admission, sn) = match (pdu, immediate) {
            (FromInitiator::TmfRequest(request), true) => self.admit_function(request),
            (_, true) => (Admission::AtOnce, sn),
            (_, false) if self.keeps(sn) => (Admission::Never, sn),
            (_, false) => (self.window().admit(sn, self.conn_ref()), sn),
        };
        match admission {
            Admission::AtOnce => self.carry_out_pdu(cx, frame, pdu),
            Admission::Now if immediate => {
                let window = Arc::clone(self.window());
                self.carry_out_pdu(cx, frame, pdu);
                window.on_carried_out();
            }
            Admission::Now => self.carry_out_admitted(cx, frame, pdu),
            Admission::Later => self.waiting.push(QueuedRequest {
                sn,
                immediate,
                itt,
                request: QueuedPdu::of(frame),
                data: Vec::new(),
            }),
            Admission::Never => {}
        }
        self.take_turns(cx);
    }

    /// Checks an immediate function. Also returns the CmdSN that it must wait for.
    fn admit_function(&self, request: &TmfRequest) -> (Admission, CmdSn) {
        let (me, window, sn) = (self.conn_ref(), self.window(), request.cmd_sn);
        match request.function {
            // This has no effect if we can't execute it.
            TmfFunction::AbortTask if !self.can_abort(request) => (Admission::AtOnce, sn),
            TmfFunction::AbortTask => {
                let mut kept = self.waiting.iter();
                let kept = kept.find(|one| one.itt == request.referenced && !one.immediate);
                window.admit_abort(kept.map_or(request.ref_cmd_sn, |one| one.sn), sn, me)
            }
            // The reassigned command was received, but other commands could have been lost with the
            // connection.
            TmfFunction::TaskReassign => (Admission::AtOnce, sn),
            _ => (window.admit_function(sn, me), sn),
        }
    }

    /// Returns true if an immediate ABORT TASK has a valid unit and tag, and a context is
    /// available.
    fn can_abort(&self, request: &TmfRequest) -> bool {
        let session = self.session.as_ref().expect("full-feature phase");
        let has_unit = !session.luns.with_former(request.lun).is_empty();
        has_unit && self.is_tag_free(request.itt) && self.has_context(true)
    }

    /// Returns true if a command with this CmdSN is queued on this connection.
    fn keeps(&self, sn: CmdSn) -> bool {
        self.waiting
            .iter()
            .any(|one| one.sn == sn && !one.immediate)
    }

    /// Stores unsolicited data with the queued command it belongs to. Data with an invalid digest
    /// must be stored as well, because the last PDU indicates that no more data follows. Data that
    /// exceeds the limit for unsolicited data is dropped, and will be missing when the command is
    /// processed.
    fn keep_data(&mut self, frame: &Frame<'_>, pdu: &FromInitiator) -> bool {
        let FromInitiator::DataOut(out) = pdu else {
            return false;
        };
        let of_it = |waiting: &&mut QueuedRequest| waiting.itt == out.itt && !waiting.immediate;
        let Some(waiting) = self.waiting.iter_mut().find(of_it) else {
            return false;
        };
        let limit = self.session.as_ref().map_or(0, |s| s.params.first_burst) as usize;
        // Include the memory used by each PDU, because an initiator could send any number of PDUs
        // without data.
        let kept: usize = waiting
            .data
            .iter()
            .map(|kept| kept.data.len().max(512))
            .sum();
        if kept + frame.data.len() <= limit {
            waiting.data.push(QueuedPdu::of(frame));
        }
        true
    }

    /// Processes queued requests in order, or notifies the connection that has the next request.
    fn take_turns(&mut self, cx: &mut Cx<'_>) {
        let me = self.conn_ref();
        while let Some(whose) = self.session.as_ref().and_then(|s| s.window.next_up()) {
            if whose != me {
                // It may belong to another worker, so we can't call it here.
                self.actions.push_back(Action::TakeTurn(whose));
                return;
            }
            if !self.take_turn(cx) {
                return;
            }
        }
    }

    /// Processes the next request if it's on this connection. Returns false if it isn't.
    fn take_turn(&mut self, cx: &mut Cx<'_>) -> bool {
        let me = self.conn_ref();
        let window = Arc::clone(self.window());
        let due = |waiting: &QueuedRequest| {
            if waiting.immediate {
                window.is_due(waiting.sn, me)
            } else {
                window.admit(waiting.sn, me) == Admission::Now
            }
        };
        // Process functions first: they precede the command with the same CmdSN.
        let functions = (0..self.waiting.len()).filter(|at| self.waiting[*at].immediate);
        let exp = window.bounds().0;
        let commands = (0..self.waiting.len())
            .filter(|at| !self.waiting[*at].immediate && self.waiting[*at].sn == exp);
        let Some(at) = functions.chain(commands).find(|at| due(&self.waiting[*at])) else {
            return false;
        };
        let waiting = self.waiting.swap_remove(at);
        for (at, kept) in std::iter::once(&waiting.request)
            .chain(&waiting.data)
            .enumerate()
        {
            let frame = kept.frame();
            let pdu = FromInitiator::parse(&frame).expect("it was parsed when it came");
            if at == 0 && !waiting.immediate {
                self.carry_out_admitted(cx, &frame, &pdu);
            } else {
                self.carry_out_pdu(cx, &frame, &pdu);
            }
        }
        if waiting.immediate {
            window.on_carried_out();
        }
        true
    }

    /// Called by another connection of the session when the next request might be here.
    pub fn handle_turn(&mut self, cx: &mut Cx<'_>) {
        if self.is_receiving() && self.session.is_some() {
            self.take_turns(cx);
        }
        self.settle(cx);
    }
}
