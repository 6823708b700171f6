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

use std::time::{Duration, Instant};

use riser_scsi::iscsi::Cid;
use riser_scsi::iscsi::pdu::{AsyncEvent, AsyncMessage, FromTarget, LogoutRequest, LogoutStatus};
use riser_state::become_state;

use super::action::{Action, Ending};
use super::channel::Channel;
use super::context::Cx;
use super::datamover::Datamover;
use super::phase::Phase;
use super::reassigned::{ReassignRequest, ReassignedTask};
use super::task::{Task, TaskState};
use crate::audit::CloseReason;
use crate::fabric::{End, TaskRef};

/// DefaultTime2Retain that we offer, in seconds (RFC 7143 13.16).
pub const TIME2RETAIN: u32 = 20;

/// Maximum DefaultTime2Wait in seconds, which is also the default if the initiator doesn't send
/// this key (RFC 7143 13.15).
pub(super) const TIME2WAIT: u32 = 2;

/// Time to keep the new names after all commands have been handed over.
const LINGER: Duration = Duration::from_secs(1);

impl<D: Datamover> Channel<D> {
    /// Handles the loss of the connection. At level 2, its commands are kept.
    pub(super) fn lose_connection(&mut self, now: Instant) {
        let retains = match self.executor.phase {
            Phase::CleanupWait | Phase::Retaining | Phase::Closed => return,
            Phase::FullFeature => true,
            Phase::Closing => self.executor.allegiance.detached,
            Phase::Login | Phase::Joining | Phase::LoggingOut(_) => false,
        };
        self.executor.ended.get_or_insert(CloseReason::Lost);
        let Some(retention) = self.executor.retention().filter(|_| retains) else {
            return self.drop_connection();
        };
        self.executor.allegiance.silent = true;
        self.leave_for(Phase::CleanupWait);
        self.executor.timers.phase = Some(now + retention);
        if !self.executor.allegiance.detached {
            self.executor.actions.push_back(Action::Lost);
        }
    }

    /// Called when this connection was logged out for recovery, or is being reinstated.
    pub fn handle_detach(&mut self, cx: &mut Cx<'_>) {
        self.executor.ended.get_or_insert(CloseReason::Terminated);
        let can = match self.executor.phase {
            Phase::FullFeature | Phase::CleanupWait | Phase::Retaining => {
                self.executor.retention().is_some()
            }
            Phase::Closing => self.executor.allegiance.detached,
            _ => false,
        };
        if !can {
            self.drop_connection();
        } else if self.executor.phase == Phase::Retaining {
            self.executor.actions.push_back(Action::Detached);
        } else {
            self.executor.allegiance.detached = true;
            self.lose_connection(cx.now);
        }
        self.finish_input(cx);
    }

    /// Notifies the initiator that another connection of the session was lost (RFC 7143 11.9.1).
    pub fn handle_lost(&mut self, cx: &mut Cx<'_>, cid: Cid) {
        if let (Phase::FullFeature, Some(session)) = (self.executor.phase, &self.executor.session) {
            let params = session.params;
            let message = AsyncMessage {
                event: AsyncEvent::ConnectionDropped,
                lun: [0; 8],
                parameters: [cid.0, params.time2wait, params.time2retain],
            };
            self.executor
                .send(FromTarget::AsyncMessage(message), Vec::new(), true);
        }
        self.finish_input(cx);
    }

    /// Handles a LOGOUT which removes a connection for recovery.
    pub(super) fn on_logout_for_recovery(&mut self, cx: &mut Cx<'_>, request: &LogoutRequest) {
        let itt = request.itt;
        if self.executor.recovery_level() < 2 {
            return self
                .executor
                .respond_logout(itt, LogoutStatus::RecoveryNotSupported);
        }
        if request.cid == self.cid {
            // Only the response will be sent.
            self.executor.mover.clear();
            self.executor.allegiance.silent = true;
            self.executor.allegiance.detached = true;
            self.executor.allegiance.by_itself = true;
            // This connection will no longer be notified when those logouts complete.
            self.respond_other_logouts(LogoutStatus::CleanupFailed);
            self.executor.respond_logout(itt, LogoutStatus::Closed);
            return self.close(cx.now);
        }
        self.log_out_other(cx, request, Ending::Detach);
    }

    /// Handles a timeout of the current phase.
    pub(super) fn on_time_over(&mut self, cx: &mut Cx<'_>) {
        match self.executor.phase {
            Phase::CleanupWait | Phase::Retaining => {
                self.executor.allegiance.by_itself = false;
                // Abort these regardless of their state: a claimed command may be waiting for them
                // in the order of a unit, and must still be handed over.
                self.executor.end_unclaimed(cx, self.is_flushed);
                if self.executor.allegiance.claims.is_empty() {
                    self.drop_connection();
                } else {
                    // A command that is currently at a device can be aborted by another nexus, and
                    // would then stay.
                    self.executor.timers.phase = Some(cx.now + LINGER);
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
        match self.executor.phase {
            Phase::CleanupWait | Phase::Retaining if self.is_quiet() => {
                self.executor.release_memory(cx);
            }
            Phase::FullFeature => self.check_data(cx),
            _ => {}
        }
        self.finish_input(cx);
    }

    /// Returns true if nothing is being sent to or received from the initiator.
    fn is_quiet(&self) -> bool {
        !self.is_connected && self.is_flushed
    }

    /// Called after each input while the connection is lost.
    pub(super) fn retain(&mut self, cx: &mut Cx<'_>) {
        if !self.is_quiet() {
            return;
        }
        let is_function = |task: &Task| {
            let has_response = task.state == TaskState::Sent && task.response.is_none();
            has_response || task.state == TaskState::Mgmt
        };
        for idx in self.executor.tasks.numbers() {
            // Task-management functions can't be reassigned.
            if self.executor.tasks.get(idx).is_some_and(is_function) {
                self.executor.finish(cx, idx, End::TornDown);
            }
        }
        if self.executor.phase == Phase::CleanupWait && self.executor.allegiance.detached {
            become_state(&mut self.executor.phase, Phase::Retaining);
            self.executor.timers.phase = self.executor.retention().map(|time| cx.now + time);
            // This must not be done earlier: a command can only be claimed if nothing from this
            // connection can reach the initiator.
            self.executor
                .window()
                .free_tags(self.executor.tasks.connection());
            self.executor.actions.push_back(Action::Detached);
        }
        // A command at a device can't be handed over, because its buffer belongs to the pool of
        // this worker.
        let claims = std::mem::take(&mut self.executor.allegiance.claims);
        for claim in claims {
            if self.executor.tasks.is_at_rest(claim.task.index) {
                self.executor.reassign(cx, claim);
            } else {
                self.executor.allegiance.claims.push(claim);
            }
        }
        if self.executor.phase == Phase::Retaining
            && self.executor.in_flight() == 0
            && !self.executor.allegiance.by_itself
        {
            if self.executor.allegiance.moved.is_empty() {
                self.drop_connection();
            } else {
                let at = cx.now + LINGER;
                self.executor.timers.phase =
                    Some(self.executor.timers.phase.map_or(at, |old| old.min(at)));
            }
        }
    }

    /// Handles a claim by another connection for one of our commands.
    pub fn handle_reassign(&mut self, cx: &mut Cx<'_>, reassign: ReassignRequest) {
        let idx = reassign.task.index;
        let is_idle = self.executor.tasks.get(idx).is_none();
        if is_idle || self.executor.tasks.task_ref(idx) != reassign.task {
            self.executor.deliver(reassign.to, None);
        } else {
            self.executor.allegiance.claims.push(reassign);
        }
        self.finish_input(cx);
    }

    /// Returns a command for another connection, or `None` if it has completed. Must be called once
    /// for each [`Action::DeliverTask`].
    ///
    /// # Panics
    /// Panics if there is no such command.
    pub fn take_reassigned(&mut self) -> (TaskRef, Option<Box<ReassignedTask>>) {
        let moved = self.executor.allegiance.reassigned.pop_front();
        moved.expect("an action for each command")
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
        self.executor.on_reassigned(cx, to, moved);
        self.finish_input(cx);
    }
}
