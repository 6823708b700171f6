//! Full-feature phase: parses PDUs, allocates contexts for requests, and responds to non-SCSI
//! requests.

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
    /// Handles a complete PDU. Its data digest may be invalid.
    pub fn handle_frame(&mut self, cx: &mut Cx<'_>, frame: &Frame<'_>) {
        self.last_input = cx.now;
        // Any PDU shows that the initiator is still connected, not only a ping response.
        self.ping = None;
        // Use a reference, because moving a command is expensive.
        match &FromInitiator::parse(frame) {
            Ok(FromInitiator::LoginRequest(request)) if self.phase == Phase::Login => {
                self.on_login(cx, request, frame.data);
            }
            _ if self.phase == Phase::Login => {
                warn_limited!(self.complaints, cx.now, "something else than a login");
                self.drop_connection();
            }
            // Data-Out is handled by the command: the header is valid, so we know which data is
            // missing.
            Ok(pdu) if !frame.is_intact && !matches!(pdu, FromInitiator::DataOut(_)) => {
                self.on_digest_error(cx);
                self.reject(cx, frame, RejectReason::DataDigestError, &"data digest");
                if !self.mover.recovers() {
                    // The PDU can't be recovered in any other way.
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

    /// Processes a PDU when it's next in order.
    pub(super) fn carry_out_pdu(
        &mut self,
        cx: &mut Cx<'_>,
        frame: &Frame<'_>,
        pdu: &FromInitiator,
    ) {
        let is_discovery = self.session.as_ref().is_none_or(|s| s.params.discovery);
        match pdu {
            FromInitiator::TextRequest(request) => self.on_text(cx, frame, request),
            // Nothing else can be received after a logout on this connection (RFC 7143 11.14). A
            // queued PDU may also be processed after the connection has started to close.
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

    /// Processes a request that was admitted and therefore has a slot in the window. The slot is
    /// released unless the request is stored in a context.
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

    /// Stores a request in an unused context. Returns `None` if there is no context.
    pub(super) fn take_in(
        &mut self,
        cx: &mut Cx<'_>,
        itt: Itt,
        immediate: bool,
        state: TaskState,
    ) -> Option<TaskIdx> {
        let idx = self.take_context(cx, itt, immediate, state)?;
        if !immediate {
            // The slot now belongs to the context.
            self.has_place = false;
            self.counted += 1;
        }
        self.tasks[idx].counted = !immediate;
        Some(idx)
    }

    /// Returns true if a context is available for a request.
    pub(super) fn has_context(&self, immediate: bool) -> bool {
        let places = self.counted + self.lingering + self.expected;
        let others = self.in_flight().saturating_sub(usize::from(places));
        // Immediate requests aren't counted in the window. Without a separate limit, an initiator
        // could use all contexts that are reserved for the window.
        let is_bounded = !immediate || others < usize::from(IMMEDIATE_TASKS);
        is_bounded && !self.tasks.is_full()
    }

    /// Allocates a context. Returns `None` if too many contexts have no slot in the window, or if
    /// none are available.
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
        let idx = self
            .tasks
            .insert(cx.spare.0.take_context(|| Task::new(wait)));
        let task = &mut self.tasks[idx];
        become_state(&mut task.state, state);
        task.itt = itt;
        (task.wait, task.asked) = (wait, wait.since);
        (task.first_asked, task.ordered) = (wait, None);
        self.unanswered.insert(itt, idx);
        Some(idx)
    }

    /// Releases the context of a request. All its resources must already be released.
    pub(super) fn take_back(&mut self, idx: TaskIdx) -> Box<Task> {
        // If the response was sent, the tag has already been released.
        if self.tasks[idx].state != TaskState::Sent {
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

    /// Called when a response is passed to the datamover, which frees a slot in the window.
    pub(super) fn mark_sent(&mut self, idx: TaskIdx) {
        self.release_tag(idx);
        let task = &mut self.tasks[idx];
        become_state(&mut task.state, TaskState::Sent);
        if std::mem::take(&mut task.counted) {
            task.lingers = true;
            self.counted -= 1;
            self.lingering += 1;
            self.window().on_answered();
        }
        self.counters.answered += 1;
    }

    /// Returns the state of the request with this tag, if it exists.
    #[must_use]
    pub fn task_state(&self, itt: Itt) -> Option<TaskState> {
        let mut tasks = self.tasks.iter();
        let found = tasks.find(|(_, task)| task.itt == itt);
        found.map(|(_, task)| task.state)
    }

    /// Returns the pending request with this tag.
    pub(super) fn find(&self, itt: Itt) -> Option<TaskIdx> {
        self.unanswered.get(&itt).copied()
    }

    /// Releases the tag of a request that is complete, so that it can be used for the next request.
    fn release_tag(&mut self, idx: TaskIdx) {
        let itt = self.tasks[idx].itt;
        // After the response, the tag may already be used for another request.
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

    /// Counts a PDU with a digest error.
    pub(super) fn on_digest_error(&mut self, cx: &mut Cx<'_>) {
        self.counters.digest_errors += 1;
        cx.gate.count(SessionEvent::DigestError);
    }

    pub(super) fn on_acknowledged(&mut self, cx: &mut Cx<'_>, exp: Option<StatSn>) {
        for task in self.mover.acknowledge(exp) {
            self.finish_answered(cx, task, exp.is_some());
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
        // This is a ping response or only an acknowledgment, so we must not respond.
        if nop.itt == Itt::NONE {
            return;
        }
        // Return as much of the ping data as the initiator can receive in a segment.
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
