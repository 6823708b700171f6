//! Command ordering: requests are processed in CmdSN order and queued if received early.

use std::sync::Arc;

use riser_scsi::iscsi::frame::Frame;
use riser_scsi::iscsi::pdu::{FromInitiator, TmfFunction, TmfRequest};
use riser_scsi::iscsi::{CmdSn, Itt};

use super::action::Action;
use super::channel::Channel;
use super::context::Cx;
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
            let first_burst = self.executor.first_burst();
            if !self.waiting.keep_data(frame, pdu, first_burst) {
                self.process_pdu(cx, frame, pdu);
            }
            return;
        };
        let (admission, sn) = match (pdu, immediate) {
            (FromInitiator::TmfRequest(request), true) => self.admit_function(request),
            (_, true) => (Admission::AtOnce, sn),
            (_, false) if self.waiting.contains(sn) => (Admission::Never, sn),
            (_, false) => (
                self.executor
                    .window()
                    .admit(sn, self.executor.tasks.connection()),
                sn,
            ),
        };
        match admission {
            Admission::AtOnce => self.process_pdu(cx, frame, pdu),
            Admission::Now if immediate => {
                let window = Arc::clone(self.executor.window());
                self.process_pdu(cx, frame, pdu);
                window.on_carried_out();
            }
            Admission::Now => self.process_admitted(cx, frame, pdu),
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
        let (me, window, sn) = (
            self.executor.tasks.connection(),
            self.executor.window(),
            request.cmd_sn,
        );
        match request.function {
            // This has no effect if we can't execute it.
            TmfFunction::AbortTask if !self.can_abort(request) => (Admission::AtOnce, sn),
            TmfFunction::AbortTask => {
                let kept = self.waiting.command_sn(request.referenced);
                window.admit_abort(kept.unwrap_or(request.ref_cmd_sn), sn, me)
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
        let session = self.executor.session.as_ref().expect("full-feature phase");
        let has_unit = !session.luns.with_former(request.lun).is_empty();
        has_unit
            && self.executor.tasks.is_tag_free(request.itt)
            && self.executor.tasks.has_context(true)
    }

    /// Processes queued requests in order, or notifies the connection that has the next request.
    fn take_turns(&mut self, cx: &mut Cx<'_>) {
        let me = self.executor.tasks.connection();
        while let Some(whose) = self
            .executor
            .session
            .as_ref()
            .and_then(|s| s.window.next_up())
        {
            if whose != me {
                // It may belong to another worker, so we can't call it here.
                self.executor.actions.push_back(Action::TakeTurn(whose));
                return;
            }
            if !self.take_turn(cx) {
                return;
            }
        }
    }

    /// Processes the next request if it's on this connection. Returns false if it isn't.
    fn take_turn(&mut self, cx: &mut Cx<'_>) -> bool {
        let me = self.executor.tasks.connection();
        let window = Arc::clone(self.executor.window());
        let Some(waiting) = self.waiting.take_due(&window, me) else {
            return false;
        };
        for (at, kept) in std::iter::once(&waiting.request)
            .chain(&waiting.data)
            .enumerate()
        {
            let frame = kept.frame();
            let pdu = FromInitiator::parse(&frame).expect("it was parsed when received");
            if at == 0 && !waiting.immediate {
                self.process_admitted(cx, &frame, &pdu);
            } else {
                self.process_pdu(cx, &frame, &pdu);
            }
        }
        if waiting.immediate {
            window.on_carried_out();
        }
        true
    }

    /// Called by another connection of the session when the next request might be here.
    pub fn handle_turn(&mut self, cx: &mut Cx<'_>) {
        if self.is_receiving() && self.executor.session.is_some() {
            self.take_turns(cx);
        }
        self.finish_input(cx);
    }
}
