//! Closing a connection: logout, shutdown, or connection loss.

use std::time::{Duration, Instant};

use riser_scsi::iscsi::pdu::{
    AsyncEvent, AsyncMessage, FromTarget, LogoutReason, LogoutRequest, LogoutStatus,
};
use riser_state::become_state;

use super::action::{Action, Ending};
use super::channel::Channel;
use super::context::Cx;
use super::datamover::Datamover;
use super::phase::Phase;
use crate::audit::CloseReason;
use crate::fabric::End;
use crate::pool::Pool;
use crate::stats::SessionEvent;

/// Timeout for sending the logout response or the remaining PDUs before a connection is closed.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(5);

/// Maximum number of concurrent logouts for other connections.
const MAX_LOGOUTS: usize = 16;

impl<D: Datamover> Channel<D> {
    /// Terminates the connection, because the session is being reinstated or the target shuts down.
    pub fn handle_terminate(&mut self, cx: &mut Cx<'_>) {
        self.executor.ended.get_or_insert(CloseReason::Terminated);
        self.drop_connection();
        self.finish_input(cx);
    }

    /// Requests a logout because the target is shutting down, and closes the connection at `until`.
    pub fn handle_shutdown(&mut self, cx: &mut Cx<'_>, until: Instant) {
        self.executor.ended.get_or_insert(CloseReason::Shutdown);
        if self.executor.phase == Phase::FullFeature {
            let seconds = until.saturating_duration_since(cx.now).as_secs();
            self.executor.send(
                FromTarget::AsyncMessage(AsyncMessage {
                    event: AsyncEvent::LogoutRequested,
                    lun: [0; 8],
                    parameters: [0, 0, u16::try_from(seconds).unwrap_or(u16::MAX)],
                }),
                Vec::new(),
                true,
            );
            self.executor.timers.phase = Some(until);
        } else {
            self.drop_connection();
        }
        self.finish_input(cx);
    }

    pub(super) fn on_logout(&mut self, cx: &mut Cx<'_>, request: &LogoutRequest) {
        cx.gate.count(match request.reason {
            LogoutReason::CloseSession => SessionEvent::LoggedOut,
            _ => SessionEvent::LoggedOutInPart,
        });
        match request.reason {
            LogoutReason::RemoveConnection => return self.on_logout_for_recovery(cx, request),
            LogoutReason::CloseConnection if request.cid != self.cid => {
                return self.log_out_other(cx, request, Ending::Terminate);
            }
            LogoutReason::CloseSession if self.executor.window().is_unordered() => {
                self.awaits_others = true;
                self.executor.actions.push_back(Action::EndOthers);
            }
            LogoutReason::CloseSession | LogoutReason::CloseConnection => {}
        }
        // Their responses must be sent first, and the session must not be closed before that.
        self.awaits_others |= !self.logouts.is_empty();
        self.ends_session =
            request.reason == LogoutReason::CloseSession || !self.executor.window().is_unordered();
        self.executor.ended.get_or_insert(CloseReason::Logout);
        become_state(&mut self.executor.phase, Phase::LoggingOut(request.itt));
        self.executor.timers.phase = Some(cx.now + CLOSE_TIMEOUT);
        // Abort commands that wait for something the initiator might never send.
        self.executor.abort_waiting(cx);
        // An initiator that is logging out doesn't need to receive a response again. This must not
        // be done earlier, because it's used to find pieces waiting for an acknowledgment.
        self.executor.on_acknowledged(cx, None);
    }

    /// Logs out another connection of the session. We must not respond before this is complete (RFC
    /// 7143 11.15). Otherwise, a write from that connection which is still at a device could
    /// overwrite data that the initiator writes after the response.
    pub(super) fn log_out_other(
        &mut self,
        cx: &mut Cx<'_>,
        request: &LogoutRequest,
        ending: Ending,
    ) {
        if self.logouts.len() >= MAX_LOGOUTS {
            self.executor
                .respond_logout(request.itt, LogoutStatus::CleanupFailed);
        } else if cx.gate.end_other(request.cid, ending) {
            self.logouts.push(request.itt);
        } else {
            self.executor
                .respond_logout(request.itt, LogoutStatus::CidNotFound);
        }
    }

    /// Responds to logouts for other connections.
    pub(super) fn respond_other_logouts(&mut self, status: LogoutStatus) {
        for itt in std::mem::take(&mut self.logouts) {
            self.executor.respond_logout(itt, status);
        }
    }

    /// Removes the session from all units. This must be done before its end is reported, because
    /// closing the connection could take a long time.
    fn lose_nexus(&self) {
        if let Some(session) = &self.executor.session {
            for (_, unit) in session.luns.iter() {
                unit.lu.remove_nexus(session.nexus);
            }
        }
    }

    /// Closes all connections of the session after the I_T NEXUS RESET response was queued. No
    /// commands are kept for recovery (RFC 7144 6.3). This connection must send the response first.
    fn end_reset_session(&mut self, cx: &mut Cx<'_>) {
        self.executor.ended.get_or_insert(CloseReason::Terminated);
        self.executor.actions.push_back(Action::EndOthers);
        // The initiator can no longer request retransmission of unacknowledged PDUs.
        self.executor.on_acknowledged(cx, None);
        self.close(cx.now);
    }

    /// Stops reading, and closes the connection when everything was sent.
    pub fn close(&mut self, now: Instant) {
        if self.is_receiving() {
            become_state(&mut self.executor.phase, Phase::Closing);
            self.executor.timers.phase = Some(now + CLOSE_TIMEOUT);
            self.discard_kept();
        }
    }

    /// Closes the connection without sending anything else, and discards queued requests.
    pub(super) fn drop_connection(&mut self) {
        if self.executor.phase != Phase::Closed {
            self.executor.timers.phase = None;
            self.leave_for(Phase::Closed);
        }
    }

    /// Discards requests received out of order. If this includes the next request, another
    /// connection must be notified.
    fn discard_kept(&mut self) {
        let me = self.executor.tasks.connection();
        let Some(session) = self
            .executor
            .session
            .as_ref()
            .filter(|_| !self.waiting.is_empty())
        else {
            return;
        };
        self.waiting.clear();
        session.window.remove_connection(me);
        let next = session.window.next_up();
        self.executor.actions.extend(next.map(Action::TakeTurn));
    }

    /// Changes the phase to close the connection, and discards requests received out of order.
    pub(super) fn leave_for(&mut self, phase: Phase) {
        let is_closing = !matches!(self.executor.phase, Phase::CleanupWait | Phase::Retaining);
        become_state(&mut self.executor.phase, phase);
        self.discard_kept();
        if is_closing && self.is_connected {
            self.executor.actions.push_back(Action::Disconnect);
        }
    }

    /// Called after each input to process everything that is now possible.
    pub(super) fn finish_input(&mut self, cx: &mut Cx<'_>) {
        match self.executor.phase {
            Phase::FullFeature if std::mem::take(&mut self.executor.is_reset) => {
                self.end_reset_session(cx);
            }
            Phase::LoggingOut(itt) if self.executor.in_flight() == 0 && !self.awaits_others => {
                self.logged_out = true;
                if self.ends_session {
                    self.lose_nexus();
                }
                self.executor.respond_logout(itt, LogoutStatus::Closed);
                self.close(cx.now);
            }
            Phase::Closing if self.executor.mover.queued() == 0 && self.is_flushed => {
                self.lose_connection(cx.now);
            }
            Phase::CleanupWait | Phase::Retaining => self.retain(cx),
            _ => {}
        }
        if self.executor.phase == Phase::Closed {
            self.executor.tear_down(cx, !self.is_flushed);
        }
        // The socket can read buffers until the batch is complete, and a device until its operation
        // is complete.
        let is_over = self.executor.phase == Phase::Closed
            && !self.is_connected
            && self.is_flushed
            && self.executor.in_flight() == 0;
        if is_over && !std::mem::replace(&mut self.released, true) {
            self.executor.actions.push_back(Action::Release);
        }
    }

    /// Aborts everything immediately. Memory must not be allocated from the pool until devices and
    /// sockets have released all buffers.
    pub fn abandon(&mut self, pool: &mut Pool) {
        if self.executor.phase != Phase::Closed {
            become_state(&mut self.executor.phase, Phase::Closed);
        }
        for idx in self.executor.tasks.numbers() {
            if self.executor.tasks.get(idx).is_some() {
                drop(self.executor.end_request(pool, idx, End::TornDown));
            }
        }
        self.executor.actions.clear();
    }
}
