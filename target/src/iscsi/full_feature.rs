//! Full-feature phase: PDUs are looked at and carried out, requests get contexts, and what is no
//! command is answered.

use std::fmt::Display;
use std::sync::Arc;
use std::time::Instant;

use riser_scsi::iscsi::frame::Frame;
use riser_scsi::iscsi::pdu::{
    FromInitiator, FromTarget, NopIn, NopOut, PduError, Reject, RejectReason, SnackKind,
};
use riser_scsi::iscsi::{Itt, StatSn, Ttt};
use riser_state::become_state;

use super::channel::{Channel, Cx, IMMEDIATE_TASKS, Phase};
use super::datamover::{Control, Datamover};
use super::task::{Task, TaskState};
use crate::fabric::TaskIdx;
use crate::stats::SessionEvent;
use crate::warn_limited;

impl<D: Datamover> Channel<D> {
    /// A whole PDU arrived, though perhaps with a wrong data digest.
    pub fn handle_frame(&mut self, cx: &mut Cx<'_>, frame: &Frame<'_>) {
        self.last_input = cx.now;
        // Any PDU shows that the initiator is there, not its answer to the ping alone.
        self.ping = None;
        // By reference from here on: a command is large to move.
        match &FromInitiator::parse(frame) {
            Ok(FromInitiator::LoginRequest(request)) if self.phase == Phase::Login => {
                self.on_login(cx, request, frame.data);
            }
            _ if self.phase == Phase::Login => {
                warn_limited!(self.complaints, cx.now, "something else than a login");
                self.drop_connection();
            }
            // Data-Out is left to its command: the header is sound, and says which data are
            // missing.
            Ok(pdu) if !frame.is_intact && !matches!(pdu, FromInitiator::DataOut(_)) => {
                self.on_digest_error(cx);
                self.reject(cx, frame, RejectReason::DataDigestError, &"data digest");
                if !self.mover.recovers() {
                    // There is no other way to bring the PDU again.
                    self.close(cx.now);
                }
            }
            Ok(pdu) => {
                if self.mover.recovers() {
                    let exp = StatSn(u32::from_be_bytes(
                        *frame.bhs[28..].first_chunk().expect("a header is 48 bytes"),
                    ));
                    self.on_acknowledged(cx, Some(exp));
                }
                self.on_pdu(cx, frame, pdu);
            }
            Err(error) => {
                cx.gate.count(SessionEvent::FormatError);
                let reason = match error {
                    PduError::Opcode(_) => RejectReason::CommandNotSupported,
                    _ => RejectReason::InvalidPduField,
                };
                self.reject(cx, frame, reason, error);
            }
        }
        self.settle(cx);
    }

    /// Carries out a PDU whose turn it is.
    pub(super) fn carry_out_pdu(
        &mut self,
        cx: &mut Cx<'_>,
        frame: &Frame<'_>,
        pdu: &FromInitiator,
    ) {
        let is_discovery = self.session.as_ref().is_none_or(|s| s.params.discovery);
        match pdu {
            FromInitiator::TextRequest(request) => self.on_text(cx, frame, request),
            // Nothing new follows a logout on its connection (RFC 7143 11.14). One that was kept
            // until its turn may also come after the connection has begun to close.
            FromInitiator::LogoutRequest(_) if self.phase != Phase::FullFeature => {
                self.reject(cx, frame, RejectReason::ProtocolError, &"a second logout");
            }
            FromInitiator::LogoutRequest(request) => self.on_logout(cx, request),
            FromInitiator::NopOut(nop) => self.on_nop(cx, frame, nop),
            FromInitiator::DataOut(data) => self.on_data_out(cx, frame, data),
            FromInitiator::LoginRequest(_) => {
                self.reject(cx, frame, RejectReason::ProtocolError, &"a second login");
            }
            FromInitiator::Snack(snack) if snack.kind == SnackKind::DataAck => {
                self.on_data_ack(cx, frame, snack);
            }
            FromInitiator::Snack(snack) => self.on_snack(cx, frame, snack),
            FromInitiator::ScsiCommand(_) | FromInitiator::TmfRequest(_) if is_discovery => {
                self.reject(cx, frame, RejectReason::ProtocolError, &"discovery session");
            }
            FromInitiator::ScsiCommand(_) | FromInitiator::TmfRequest(_)
                if self.phase != Phase::FullFeature =>
            {
                self.reject(cx, frame, RejectReason::WaitingForLogout, &"logout");
            }
            FromInitiator::ScsiCommand(command) => self.on_command(cx, frame, command),
            FromInitiator::TmfRequest(request) => self.on_tmf(cx, frame, request),
        }
    }

    /// Carries out a request that was admitted, and so has taken a place of the window. It gives
    /// that back unless it is kept in a context.
    pub(super) fn carry_out_admitted(
        &mut self,
        cx: &mut Cx<'_>,
        frame: &Frame<'_>,
        pdu: &FromInitiator,
    ) {
        self.has_place = true;
        let window = Arc::clone(self.window());
        self.carry_out_pdu(cx, frame, pdu);
        window.on_carried_out();
        if std::mem::take(&mut self.has_place) {
            window.on_gone(false);
        }
    }

    /// Takes a request into an idle context; `None` if there is none for it.
    pub(super) fn take_in(
        &mut self,
        cx: &mut Cx<'_>,
        itt: Itt,
        immediate: bool,
        state: TaskState,
    ) -> Option<TaskIdx> {
        let idx = self.take_context(cx, itt, immediate, state)?;
        if !immediate {
            // From here on the place is the context's.
            self.has_place = false;
            self.counted += 1;
        }
        self.tasks[usize::from(idx.0)].counted = !immediate;
        Some(idx)
    }

    /// Whether a request gets a context.
    pub(super) fn has_context(&self, immediate: bool) -> bool {
        let places = self.counted + self.lingering + self.expected;
        let others = self.in_flight().saturating_sub(usize::from(places));
        // The window does not count immediate requests. Without a bound of their own, an initiator
        // could fill with them the contexts that the window has promised.
        let is_bounded = !immediate || others < usize::from(IMMEDIATE_TASKS);
        is_bounded && !self.tasks.is_full()
    }

    /// Takes an idle context; `None` if too many have no place in the window, or none is idle.
    pub(super) fn take_context(
        &mut self,
        cx: &mut Cx<'_>,
        itt: Itt,
        immediate: bool,
        state: TaskState,
    ) -> Option<TaskIdx> {
        if !self.has_context(immediate) {
            return None;
        }
        let wait = self.pace.begin(cx.now);
        let idx = self.tasks.insert(cx.spare.0.take(|| Task::new(wait)));
        let task = &mut self.tasks[usize::from(idx.0)];
        become_state(&mut task.state, state);
        task.itt = itt;
        (task.wait, task.asked) = (wait, wait.since);
        self.unanswered.insert(itt, idx);
        Some(idx)
    }

    /// Takes the context of a request back; it holds nothing any more.
    pub(super) fn take_back(&mut self, idx: TaskIdx) -> Box<Task> {
        // The tag of one that was answered has been released already.
        if self.tasks[usize::from(idx.0)].state != TaskState::Sent {
            self.release_tag(idx);
        }
        let mut task = self.tasks.remove(idx);
        let counted = std::mem::take(&mut task.counted);
        let lingers = std::mem::take(&mut task.lingers);
        self.expected -= u16::from(std::mem::take(&mut task.expected));
        become_state(&mut task.state, TaskState::Idle);
        task.clear();
        self.counted -= u16::from(counted);
        self.lingering -= u16::from(lingers);
        if counted || lingers {
            self.window().on_gone(lingers);
        }
        task
    }

    /// The answer goes to the datamover: the window has a place again.
    pub(super) fn mark_sent(&mut self, idx: TaskIdx) {
        self.release_tag(idx);
        let task = &mut self.tasks[usize::from(idx.0)];
        become_state(&mut task.state, TaskState::Sent);
        if std::mem::take(&mut task.counted) {
            task.lingers = true;
            self.counted -= 1;
            self.lingering += 1;
            self.window().on_answered();
        }
        self.counters.answered += 1;
    }

    /// The state of the request with this tag, if there is one.
    #[must_use]
    pub fn task_state(&self, itt: Itt) -> Option<TaskState> {
        let mut tasks = self.tasks.iter();
        let found = tasks.find(|(_, task)| task.itt == itt);
        found.map(|(_, task)| task.state)
    }

    /// A request with this tag that has not been answered.
    pub(super) fn find(&self, itt: Itt) -> Option<TaskIdx> {
        self.unanswered.get(&itt).copied()
    }

    /// A request is answered, or gone: the next one may have its tag.
    fn release_tag(&mut self, idx: TaskIdx) {
        let itt = self.tasks[usize::from(idx.0)].itt;
        // The tag of one that was answered may be that of another one by now.
        if let Some(named) = self.unanswered.remove(&itt)
            && named != idx
        {
            self.unanswered.insert(itt, named);
        }
    }

    pub(super) fn send(&mut self, pdu: FromTarget, data: Vec<u8>, counts: bool) {
        self.mover.send_control(Control {
            pdu,
            data,
            counts,
            ends: None,
        });
    }

    pub(super) fn reject(
        &mut self,
        cx: &Cx<'_>,
        frame: &Frame<'_>,
        reason: RejectReason,
        why: &dyn Display,
    ) {
        self.counters.rejected += 1;
        warn_limited!(
            self.complaints, cx.now,
            opcode = frame.bhs[0] & 0x3f, ?reason, %why, "PDU rejected"
        );
        let header = frame.bhs.to_vec();
        self.send(FromTarget::Reject(Reject { reason }), header, true);
    }

    /// Counts a PDU whose content is not what was sent.
    pub(super) fn on_digest_error(&mut self, cx: &mut Cx<'_>) {
        self.counters.digest_errors += 1;
        cx.gate.count(SessionEvent::DigestError);
    }

    pub(super) fn on_acknowledged(&mut self, cx: &mut Cx<'_>, exp: Option<StatSn>) {
        for task in self.mover.acknowledge(exp) {
            self.finish_answered(cx, task);
        }
    }

    fn on_nop(&mut self, cx: &mut Cx<'_>, frame: &Frame<'_>, nop: &NopOut) {
        if nop.itt == Itt::NONE && !nop.immediate {
            return self.reject(
                cx,
                frame,
                RejectReason::ProtocolError,
                &"no tag, not immediate",
            );
        }
        // It answers our ping, or only acknowledges, and gets no answer.
        if nop.itt == Itt::NONE {
            return;
        }
        // The data come back, as far as the initiator takes a segment of that length.
        let limit = self.mover.max_send_segment() as usize;
        let data = frame.data[..frame.data.len().min(limit)].to_vec();
        let answer = NopIn {
            lun: nop.lun,
            itt: nop.itt,
            ttt: Ttt::NONE,
        };
        self.send(FromTarget::NopIn(answer), data, true);
    }

    pub(super) fn send_ping(&mut self, now: Instant) {
        self.ping = Some(now);
        self.next_ping = (self.next_ping + 1) & 0x7fff_ffff;
        let ping = NopIn {
            lun: [0; 8],
            itt: Itt::NONE,
            ttt: Ttt(self.next_ping),
        };
        self.send(FromTarget::NopIn(ping), Vec::new(), false);
    }
}
