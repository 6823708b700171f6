//! Requests in the order of their numbers: which is carried out at once, which is kept for later.

use std::sync::Arc;

use riser_scsi::iscsi::frame::Frame;
use riser_scsi::iscsi::pdu::{FromInitiator, TmfFunction, TmfRequest};
use riser_scsi::iscsi::{CmdSn, Itt};

use super::channel::{Action, Channel, Cx};
use super::datamover::Datamover;
use super::pending::{QueuedPdu, QueuedRequest};
use super::window::Admission;

/// The number of a request, and whether it is immediate; `None` of PDUs that have none.
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
    /// A PDU of full-feature phase, with its digests checked: carried out now, later, or never.
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

    /// Looks at an immediate function. Returns the number that it waits for as well.
    fn admit_function(&self, request: &TmfRequest) -> (Admission, CmdSn) {
        let (me, window, sn) = (self.conn_ref(), self.window(), request.cmd_sn);
        match request.function {
            // It changes nothing if it cannot be carried out.
            TmfFunction::AbortTask if !self.can_abort(request) => (Admission::AtOnce, sn),
            TmfFunction::AbortTask => {
                let mut kept = self.waiting.iter();
                let kept = kept.find(|one| one.itt == request.referenced && !one.immediate);
                window.admit_abort(kept.map_or(request.ref_cmd_sn, |one| one.sn), sn, me)
            }
            // What is reassigned has come, and numbers may be missing with the connection that is
            // lost.
            TmfFunction::TaskReassign => (Admission::AtOnce, sn),
            _ => (window.admit_function(sn, me), sn),
        }
    }

    /// Whether an immediate ABORT TASK has a unit, a tag and a context.
    fn can_abort(&self, request: &TmfRequest) -> bool {
        let session = self.session.as_ref().expect("full-feature phase");
        let has_unit = !session.luns.with_former(request.lun).is_empty();
        has_unit && self.is_tag_free(request.itt) && self.has_context(true)
    }

    /// Whether a command with this number waits here for its turn.
    fn keeps(&self, sn: CmdSn) -> bool {
        self.waiting
            .iter()
            .any(|one| one.sn == sn && !one.immediate)
    }

    /// Keeps unsolicited data with the command that they belong to, if that waits: spoilt ones as
    /// well, since the last of them says that no more will come. Data beyond what
    /// may come unsolicited are dropped, and missed when the command's turn has come.
    fn keep_data(&mut self, frame: &Frame<'_>, pdu: &FromInitiator) -> bool {
        let FromInitiator::DataOut(out) = pdu else {
            return false;
        };
        let of_it = |waiting: &&mut QueuedRequest| waiting.itt == out.itt && !waiting.immediate;
        let Some(waiting) = self.waiting.iter_mut().find(of_it) else {
            return false;
        };
        let limit = self.session.as_ref().map_or(0, |s| s.params.first_burst) as usize;
        // Each PDU counts for its own memory as well: an initiator could send any number without
        // data.
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

    /// Carries out what is next, or notifies the connection that keeps it.
    fn take_turns(&mut self, cx: &mut Cx<'_>) {
        let me = self.conn_ref();
        while let Some(whose) = self.session.as_ref().and_then(|s| s.window.next_up()) {
            if whose != me {
                // It may be another worker's, so it cannot be called from here.
                self.actions.push_back(Action::TakeTurn(whose));
                return;
            }
            if !self.take_turn(cx) {
                return;
            }
        }
    }

    /// Carries out the request of this connection that is next; whether there was one.
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
        // Functions first: they go before the command whose number they carry.
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

    /// Another connection of the session says that this one may have what is next.
    pub fn handle_turn(&mut self, cx: &mut Cx<'_>) {
        if self.is_receiving() && self.session.is_some() {
            self.take_turns(cx);
        }
        self.settle(cx);
    }
}
