//! Connection allegiance reassignment: moves commands from a failed connection to another
//! connection of the same session at error recovery level 2 (RFC 7143 7.2.2, 7.6, 11.5, 11.14).
//!
//! When a connection is lost, its channel is kept without a socket. Commands in flight continue to
//! execute until they require data from the initiator or are ready to send a response. If the
//! connection is then logged out for recovery, either with a LOGOUT or because it's reinstated by a
//! new login, a TASK REASSIGN on another connection can claim a command by its tag and the lost
//! connection hands it over:
//!
//! ```text
//! TASK REASSIGN ─→ claim_tag ─→ ReassignRequest ─→ lost connection: needs data, or complete?
//!                                                     │ yes, now or later
//! data, R2Ts, response ←─ handle_reassigned ←─ ReassignedTask
//! ```
//!
//! A reassigned task contains a copy of the data, because the two connections can belong to workers
//! with different pools.
//!
//! # Limits
//! Commands are kept for Time2Wait plus Time2Retain at most. We limit Time2Wait to [`TIME2WAIT`]:
//! the negotiated value is the larger of the two offers, so an initiator could otherwise request an
//! hour. Commands are also aborted if other initiators are waiting for the pool memory they use.
//! Each command still occupies a slot in the command window, so recovery doesn't increase the
//! number of contexts for a session. After a command is handed over, its previous name is valid for
//! another [`LINGER`], for mail that is still in flight.

use std::sync::Arc;
use std::time::{Duration, Instant};

use riser_scsi::iscsi::Cid;
use riser_scsi::iscsi::pdu::{
    AsyncEvent, AsyncMessage, FromTarget, LogoutRequest, LogoutStatus, TmfRequest,
};
use riser_scsi::step::{DataIn, Step};
use riser_state::become_state;

use super::channel::{Action, Channel, Cx, Ending, Phase};
use super::datamover::{Datamover, Progress, Start};
use super::reassigned::{ReassignRequest, ReassignedTask, ResumePoint};
use super::task::{Incoming, Piece, Task, TaskState};
use crate::audit::CloseReason;
use crate::fabric::task_mgmt::FunctionAnswer;
use crate::fabric::{CommandFlow as _, End, TaskIdx, TaskRef};
use crate::pool::Buffer;

/// DefaultTime2Retain that we offer, in seconds (RFC 7143 13.16).
pub const TIME2RETAIN: u32 = 20;

/// Maximum DefaultTime2Wait in seconds, which is also the default if the initiator doesn't send
/// this key (RFC 7143 13.15).
const TIME2WAIT: u32 = 2;

/// Time to keep the new names after all commands have been handed over.
const LINGER: Duration = Duration::from_secs(1);

impl<D: Datamover> Channel<D> {
    /// Returns the error recovery level of the session, or zero before login.
    fn recovery_level(&self) -> u8 {
        let session = self.session.as_ref();
        let session = session.filter(|s| D::RECOVERS && !s.params.discovery);
        session.map_or(0, |s| s.params.error_recovery_level)
    }

    /// Returns how long commands are kept after the connection is lost.
    fn retention(&self) -> Option<Duration> {
        let params = self.session.as_ref()?.params;
        let seconds = u32::from(params.time2wait).min(TIME2WAIT) + u32::from(params.time2retain);
        let retains = self.recovery_level() > 1 && params.time2retain > 0;
        retains.then(|| Duration::from_secs(seconds.into()))
    }

    /// Handles the loss of the connection. At level 2, its commands are kept.
    pub(super) fn lose_connection(&mut self, now: Instant) {
        let retains = match self.phase {
            Phase::CleanupWait | Phase::Retaining | Phase::Closed => return,
            Phase::FullFeature => true,
            Phase::Closing => self.allegiance.detached,
            Phase::Login | Phase::Joining | Phase::LoggingOut(_) => false,
        };
        self.ended.get_or_insert(CloseReason::Lost);
        let Some(retention) = self.retention().filter(|_| retains) else {
            return self.drop_connection();
        };
        self.allegiance.silent = true;
        self.leave_for(Phase::CleanupWait);
        self.phase_deadline = Some(now + retention);
        if !self.allegiance.detached {
            self.actions.push_back(Action::Lost);
        }
    }

    /// Called when this connection was logged out for recovery, or is being reinstated.
    pub fn handle_detach(&mut self, cx: &mut Cx<'_>) {
        self.ended.get_or_insert(CloseReason::Terminated);
        let can = match self.phase {
            Phase::FullFeature | Phase::CleanupWait | Phase::Retaining => {
                self.retention().is_some()
            }
            Phase::Closing => self.allegiance.detached,
            _ => false,
        };
        if !can {
            self.drop_connection();
        } else if self.phase == Phase::Retaining {
            self.actions.push_back(Action::Detached);
        } else {
            self.allegiance.detached = true;
            self.lose_connection(cx.now);
        }
        self.settle(cx);
    }

    /// Notifies the initiator that another connection of the session was lost (RFC 7143 11.9.1).
    pub fn handle_lost(&mut self, cx: &mut Cx<'_>, cid: Cid) {
        if let (Phase::FullFeature, Some(session)) = (self.phase, &self.session) {
            let params = session.params;
            let message = AsyncMessage {
                event: AsyncEvent::ConnectionDropped,
                lun: [0; 8],
                parameters: [cid.0, params.time2wait, params.time2retain],
            };
            self.send(FromTarget::AsyncMessage(message), Vec::new(), true);
        }
        self.settle(cx);
    }

    /// Handles a LOGOUT which removes a connection for recovery.
    pub(super) fn on_logout_for_recovery(&mut self, cx: &mut Cx<'_>, request: &LogoutRequest) {
        let itt = request.itt;
        if self.recovery_level() < 2 {
            return self.answer_logout(itt, LogoutStatus::RecoveryNotSupported);
        }
        if request.cid == self.cid {
            // Only the response will be sent.
            self.mover.clear();
            self.allegiance.silent = true;
            self.allegiance.detached = true;
            self.allegiance.by_itself = true;
            // This connection will no longer be notified when those logouts complete.
            self.answer_logouts_of_others(LogoutStatus::CleanupFailed);
            self.answer_logout(itt, LogoutStatus::Closed);
            return self.close(cx.now);
        }
        self.log_out_other(cx, request, Ending::Detach);
    }

    /// Handles a timeout of the current phase.
    pub(super) fn on_time_over(&mut self, cx: &mut Cx<'_>) {
        match self.phase {
            Phase::CleanupWait | Phase::Retaining => {
                self.allegiance.by_itself = false;
                // Abort these regardless of their state: a claimed command may be waiting for them
                // in the order of a unit, and must still be handed over.
                self.end_unclaimed(cx);
                if self.allegiance.claims.is_empty() {
                    self.drop_connection();
                } else {
                    // A command that is currently at a device can be aborted by another nexus, and
                    // would then stay.
                    self.phase_deadline = Some(cx.now + LINGER);
                }
            }
            Phase::Closing => self.lose_connection(cx.now),
            Phase::Joining if self.entering.as_ref().is_some_and(|login| login.is_leading) => {
                self.start_early(cx);
            }
            _ => self.drop_connection(),
        }
    }

    /// Other initiators are waiting for pool memory. Aborts kept commands that use memory, and
    /// shortens the timeout for commands that wait for the initiator and use more than their share.
    pub fn handle_pressure(&mut self, cx: &mut Cx<'_>) {
        match self.phase {
            Phase::CleanupWait | Phase::Retaining if self.is_quiet() => {
                self.give_up_memory(cx);
            }
            Phase::FullFeature => self.check_data(cx),
            _ => {}
        }
        self.settle(cx);
    }

    /// Aborts unclaimed commands that use memory and are only waiting for another connection.
    fn give_up_memory(&mut self, cx: &mut Cx<'_>) {
        for idx in self.tasks.numbers() {
            let task = self.tasks.get(idx);
            let has_buffer = task.is_some_and(|task| task.exec.buffer.is_some());
            let is_claimed = self.allegiance.is_claimed(self.task_ref(idx));
            if has_buffer && self.is_at_rest(idx) && !is_claimed {
                self.cut_short(cx, idx, End::TornDown);
            }
        }
    }

    /// Returns true if nothing is being sent to or received from the initiator.
    fn is_quiet(&self) -> bool {
        !self.is_connected && self.is_flushed
    }

    /// Aborts commands that were not claimed, because they can't be claimed any more.
    fn end_unclaimed(&mut self, cx: &mut Cx<'_>) {
        let window = Arc::clone(self.window());
        for idx in self.tasks.numbers() {
            let Some(task) = self.tasks.get(idx) else {
                continue;
            };
            let name = self.task_ref(idx);
            let may_end = task.state != TaskState::Sent || self.is_flushed;
            if may_end && !self.allegiance.is_claimed(name) {
                // Do this now, because a command at a device will complete later.
                window.remove_tag(task.itt, name);
                self.cut_short(cx, idx, End::TornDown);
            }
        }
    }

    /// Returns true if a command can't make progress without the initiator.
    fn is_at_rest(&self, idx: TaskIdx) -> bool {
        use TaskState::{AwaitUnsolicited, Receive, Send, Sent};

        let task = self.tasks.get(idx);
        task.is_some_and(|task| matches!(task.state, Receive | Send | AwaitUnsolicited | Sent))
    }

    /// Called after each input while the connection is lost.
    pub(super) fn retain(&mut self, cx: &mut Cx<'_>) {
        if !self.is_quiet() {
            return;
        }
        let is_function = |task: &Task| {
            let is_answered = task.state == TaskState::Sent && task.response.is_none();
            is_answered || task.state == TaskState::Mgmt
        };
        for idx in self.tasks.numbers() {
            // Task-management functions can't be reassigned.
            if self.tasks.get(idx).is_some_and(is_function) {
                self.finish(cx, idx, End::TornDown);
            }
        }
        if self.phase == Phase::CleanupWait && self.allegiance.detached {
            become_state(&mut self.phase, Phase::Retaining);
            self.phase_deadline = self.retention().map(|time| cx.now + time);
            // This must not be done earlier: a command can only be claimed if nothing from this
            // connection can reach the initiator.
            self.window().free_tags(self.conn_ref());
            self.actions.push_back(Action::Detached);
        }
        // A command at a device can't be handed over, because its buffer belongs to the pool of
        // this worker.
        let claims = std::mem::take(&mut self.allegiance.claims);
        for claim in claims {
            if self.is_at_rest(claim.task.index) {
                self.reassign(cx, claim);
            } else {
                self.allegiance.claims.push(claim);
            }
        }
        if self.phase == Phase::Retaining && self.in_flight() == 0 && !self.allegiance.by_itself {
            if self.allegiance.moved.is_empty() {
                self.drop_connection();
            } else {
                let at = cx.now + LINGER;
                self.phase_deadline = Some(self.phase_deadline.map_or(at, |old| old.min(at)));
            }
        }
    }

    /// Handles TASK REASSIGN. The response must be sent before any data or status of the reassigned
    /// command.
    pub(super) fn on_task_reassign(&mut self, cx: &mut Cx<'_>, idx: TaskIdx, request: &TmfRequest) {
        match self.claim(cx, idx, request) {
            Ok(reassign) => {
                self.answer_tmf(idx, FunctionAnswer::Complete);
                self.actions.push_back(Action::Reassign(reassign));
            }
            Err(status) => self.answer_tmf(idx, status),
        }
    }

    fn claim(
        &mut self,
        cx: &mut Cx<'_>,
        function: TaskIdx,
        request: &TmfRequest,
    ) -> Result<ReassignRequest, FunctionAnswer> {
        if self.recovery_level() < 2 {
            return Err(FunctionAnswer::ReassignmentNotSupported);
        }
        let window = Arc::clone(self.window());
        let tag = window.tag(request.referenced);
        let tag = tag.ok_or(FunctionAnswer::NoSuchTask)?;
        if !tag.is_free {
            return Err(FunctionAnswer::StillAllegiant);
        }
        // Another function might be using the tag here, even if this is not allowed.
        let found = self.find(request.referenced);
        if found.is_some_and(|found| found != function) {
            return Err(FunctionAnswer::Rejected);
        }
        let (itt, immediate) = (request.referenced, tag.immediate);
        let idx = self.take_context(cx, itt, immediate, TaskState::Expected);
        let idx = idx.ok_or(FunctionAnswer::Rejected)?;
        let to = self.task_ref(idx);
        // Another connection may have claimed it since we checked the tag.
        if !window.claim_tag(request.referenced, tag.task, to) {
            let context = self.take_back(idx);
            cx.spare.0.return_context(context);
            return Err(FunctionAnswer::StillAllegiant);
        }
        self.tasks[idx].expected = !tag.immediate;
        self.expected += u16::from(!tag.immediate);
        Ok(ReassignRequest {
            task: tag.task,
            to,
            exp_data_sn: request.exp_data_sn,
        })
    }

    /// Handles a claim by another connection for one of our commands.
    pub fn handle_reassign(&mut self, cx: &mut Cx<'_>, reassign: ReassignRequest) {
        let idx = reassign.task.index;
        let is_idle = self.tasks.get(idx).is_none();
        if is_idle || self.task_ref(idx) != reassign.task {
            self.deliver(reassign.to, None);
        } else {
            self.allegiance.claims.push(reassign);
        }
        self.settle(cx);
    }

    /// Responds to a claim for a task that has completed, so there is nothing to reassign.
    pub(super) fn drop_claim(&mut self, idx: TaskIdx) {
        let name = self.task_ref(idx);
        let mut claims = self.allegiance.claims.iter();
        if let Some(at) = claims.position(|claim| claim.task == name) {
            let claim = self.allegiance.claims.swap_remove(at);
            self.deliver(claim.to, None);
        }
    }

    fn deliver(&mut self, to: TaskRef, moved: Option<Box<ReassignedTask>>) {
        self.allegiance.reassigned.push_back((to, moved));
        self.actions.push_back(Action::DeliverTask);
    }

    /// Returns a command for another connection, or `None` if it has completed. Must be called once
    /// for each [`Action::DeliverTask`].
    ///
    /// # Panics
    /// Panics if there is no such command.
    pub fn take_reassigned(&mut self) -> (TaskRef, Option<Box<ReassignedTask>>) {
        let moved = self.allegiance.reassigned.pop_front();
        moved.expect("an action for each command")
    }

    fn reassign(&mut self, cx: &mut Cx<'_>, claim: ReassignRequest) {
        let idx = claim.task.index;
        let task = &mut self.tasks[idx];
        let waited = task.waited_by(cx.now, &self.pace);
        task.waited = 0;
        let mut exec = std::mem::take(&mut task.exec);
        let incoming = std::mem::take(&mut task.incoming);
        let exp = claim.exp_data_sn;
        let mut r2ts = std::mem::take(&mut task.r2ts);
        let start = std::mem::take(&mut task.data_start);
        // ExpDataSN in the TASK REASSIGN (RFC 7143 11.5.6) indicates which Data-In PDUs or R2Ts the
        // initiator has received. We use this to find where the other connection should start.
        let point = if let Some(mut response) = task.response.take() {
            let len = response.data_in.len().min(exec.expected.data_in);
            let end = response.data_in.from() + len;
            let base = response.data_in.from();
            if let DataIn::Buffer { .. } = response.data_in {
                response.data_in = DataIn::Inline(bytes_of(exec.buffer.as_ref(), len));
            }
            ResumePoint::Respond {
                response,
                base,
                start: acknowledged(&self.mover, start, end, exp),
            }
        } else if task.state == TaskState::Send {
            let Piece { from, len, .. } = task.piece;
            self.mover.forget(idx);
            ResumePoint::Send {
                from,
                data: bytes_of(exec.buffer.as_ref(), len),
                start: acknowledged(&self.mover, start, from + len, exp),
            }
        } else {
            let progress = if incoming.solicited {
                self.mover.progress(idx)
            } else {
                let got = incoming.got;
                Progress { got, r2ts }
            };
            self.mover.forget(idx);
            r2ts = if exp <= progress.r2ts {
                exp
            } else {
                progress.r2ts
            };
            let (from, end) = (incoming.from, incoming.wanted);
            let end = end.expect("the command waits for data");
            let got = progress.got.clamp(from, end) - from;
            let mut received = bytes_of(exec.buffer.as_ref(), got);
            received.extend(incoming.staged);
            ResumePoint::Receive {
                from,
                len: end - from,
                received,
            }
        };
        if let Some(buffer) = exec.buffer.take() {
            cx.pool.release(buffer);
        }
        // New mail will be sent to the new connection. For mail that is already in flight, we keep
        // the name in `moved`.
        exec.rename(claim.to);
        exec.timer.leave();
        let (counted, lingers) = (
            std::mem::take(&mut task.counted),
            std::mem::take(&mut task.lingers),
        );
        let moved = ReassignedTask {
            exec,
            lun: task.lun,
            counted,
            lingers,
            waited,
            r2ts,
            point,
        };
        self.counted -= u16::from(counted);
        self.lingering -= u16::from(lingers);
        let context = self.take_back(idx);
        cx.spare.0.return_context(context);
        self.allegiance.moved.push((claim.task, claim.to));
        self.deliver(claim.to, Some(Box::new(moved)));
    }

    /// Handles a command that was handed over by another connection, or that has completed there.
    ///
    /// # Panics
    /// Panics if no command is expected.
    pub fn handle_reassigned(
        &mut self,
        cx: &mut Cx<'_>,
        to: TaskRef,
        moved: Option<Box<ReassignedTask>>,
    ) {
        let idx = to.index;
        assert_eq!(
            self.task_ref(idx),
            to,
            "a context waits until its task comes"
        );
        let task = &mut self.tasks[idx];
        assert_eq!(task.state, TaskState::Expected, "a task comes once");
        self.expected -= u16::from(std::mem::take(&mut task.expected));
        match moved {
            Some(moved) => self.resume_reassigned(cx, idx, *moved),
            None => self.finish(cx, idx, End::Aborted),
        }
        self.settle(cx);
    }

    fn resume_reassigned(&mut self, cx: &mut Cx<'_>, idx: TaskIdx, moved: ReassignedTask) {
        let task = &mut self.tasks[idx];
        // Functions may have used this context's name while the command was being handed over. We
        // must keep their list of watchers, and apply an abort to the new command.
        let before = std::mem::replace(&mut task.exec, moved.exec);
        task.exec.watchers.extend(before.watchers);
        let addressed = self.session.as_ref().and_then(|session| {
            let worker = self.config.worker;
            let luns = &session.luns;
            self.accounts.addressed(luns, moved.lun, &[], worker)
        });
        let account = addressed.map(|addressed| addressed.account);
        task.exec.timer.join(account);
        task.lun = moved.lun;
        task.counted = moved.counted;
        task.lingers = moved.lingers;
        task.waited = moved.waited;
        task.r2ts = moved.r2ts;
        self.counted += u16::from(moved.counted);
        self.lingering += u16::from(moved.lingers);
        if before.aborted {
            return self.end_aborted(cx, idx);
        }
        match moved.point {
            ResumePoint::Respond {
                response,
                base,
                start,
            } => {
                task.data_start = start;
                task.piece.from = base;
                self.respond(cx, idx, response);
            }
            ResumePoint::Receive {
                from,
                len,
                received,
            } => {
                task.incoming = Incoming {
                    got: from + received.len() as u32,
                    staged: received,
                    ..Incoming::default()
                };
                self.run(cx, idx, Step::ReceiveData { from, len });
            }
            ResumePoint::Send { from, data, start } => {
                let len = data.len() as u32;
                task.data_start = start;
                task.incoming.staged = data;
                task.incoming.is_moved = true;
                self.run(cx, idx, Step::SendData { from, len });
            }
        }
    }
}

/// Returns the offset of the first byte that the initiator hasn't received, up to `end`, given that
/// it has acknowledged all Data-In PDUs before `exp`. Zero means that nothing was acknowledged.
/// Invalid values are ignored.
fn acknowledged(mover: &impl Datamover, start: Start, end: u32, exp: u32) -> Start {
    let found = mover.start_of(start, end, exp).filter(|_| exp > 0);
    found.unwrap_or(start)
}

/// Returns the first `len` bytes of a command's buffer.
fn bytes_of(buffer: Option<&Buffer>, len: u32) -> Vec<u8> {
    let slices = buffer.into_iter().flat_map(|buffer| buffer.slices(0..len));
    slices.flat_map(|slice| slice.to_vec()).collect()
}
