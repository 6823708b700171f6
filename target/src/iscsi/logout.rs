//! The end of a connection: logout, shutdown, loss.

use std::time::{Duration, Instant};

use riser_scsi::iscsi::Itt;
use riser_scsi::iscsi::pdu::{
    AsyncEvent, AsyncMessage, FromTarget, LogoutReason, LogoutRequest, LogoutResponse, LogoutStatus,
};
use riser_state::become_state;

use super::channel::{Action, Channel, Cx, Ending, Phase};
use super::datamover::Datamover;
use crate::audit::Parting;
use crate::fabric::End;
use crate::pool::Pool;
use crate::stats::SessionEvent;

/// Time limit for sending the answer to a logout, or the last PDUs of a connection that closes.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(5);

/// Logouts of other connections at once, whose end is awaited.
const MAX_LOGOUTS: usize = 16;

impl<D: Datamover> Channel<D> {
    /// Another login takes the session's place, or the target goes: the connection is cut.
    pub fn handle_terminate(&mut self, cx: &mut Cx<'_>) {
        self.ended.get_or_insert(Parting::Terminated);
        self.drop_connection();
        self.settle(cx);
    }

    /// The target goes: the initiator is asked to log out, and the connection cut at `until`.
    pub fn handle_shutdown(&mut self, cx: &mut Cx<'_>, until: Instant) {
        self.ended.get_or_insert(Parting::Shutdown);
        if self.phase == Phase::FullFeature {
            let seconds = until.saturating_duration_since(cx.now).as_secs();
            self.send(
                FromTarget::AsyncMessage(AsyncMessage {
                    event: AsyncEvent::LogoutRequested,
                    lun: [0; 8],
                    parameters: [0, 0, u16::try_from(seconds).unwrap_or(u16::MAX)],
                }),
                Vec::new(),
                true,
            );
            self.phase_deadline = Some(until);
        } else {
            self.drop_connection();
        }
        self.settle(cx);
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
            LogoutReason::CloseSession if self.window().is_unordered() => {
                self.awaits_others = true;
                self.actions.push_back(Action::EndOthers);
            }
            LogoutReason::CloseSession | LogoutReason::CloseConnection => {}
        }
        // Their answers come first, and the session survives their end as long as it is awaited.
        self.awaits_others |= !self.logouts.is_empty();
        self.ends_session =
            request.reason == LogoutReason::CloseSession || !self.window().is_unordered();
        self.ended.get_or_insert(Parting::Logout);
        become_state(&mut self.phase, Phase::LoggingOut(request.itt));
        self.phase_deadline = Some(cx.now + CLOSE_TIMEOUT);
        // Commands that wait for something the initiator may never send end here.
        self.abort_waiting(cx);
        // One that leaves misses no answer. Not earlier: pieces that wait for an acknowledgment are
        // known by it.
        self.on_acknowledged(cx, None);
    }

    /// Another connection of the session is logged out. The answer says that this has happened (RFC
    /// 7143 11.15): a write that the connection has at a device would else overtake what the
    /// initiator writes after the answer.
    pub(super) fn log_out_other(
        &mut self,
        cx: &mut Cx<'_>,
        request: &LogoutRequest,
        ending: Ending,
    ) {
        if self.logouts.len() >= MAX_LOGOUTS {
            self.answer_logout(request.itt, LogoutStatus::CleanupFailed);
        } else if cx.gate.end_other(request.cid, ending) {
            self.logouts.push(request.itt);
        } else {
            self.answer_logout(request.itt, LogoutStatus::CidNotFound);
        }
    }

    /// Answers the logouts of other connections.
    pub(super) fn answer_logouts_of_others(&mut self, status: LogoutStatus) {
        for itt in std::mem::take(&mut self.logouts) {
            self.answer_logout(itt, status);
        }
    }

    pub(super) fn answer_logout(&mut self, itt: Itt, status: LogoutStatus) {
        let params = self.session.as_ref().map(|s| s.params);
        let answer = LogoutResponse {
            itt,
            status,
            time2wait: params.map_or(0, |p| p.time2wait),
            time2retain: params.map_or(0, |p| p.time2retain),
        };
        self.send(FromTarget::LogoutResponse(answer), Vec::new(), true);
    }

    /// The units forget the session. Once its end is reported, that has happened, however long the
    /// connection takes to go.
    fn lose_nexus(&self) {
        if let Some(session) = &self.session {
            for (_, unit) in session.luns.iter() {
                unit.lu.remove_nexus(session.nexus);
            }
        }
    }

    /// I_T NEXUS RESET has been answered: all connections of the session end at once, and none of
    /// them is kept for recovery (RFC 7144 6.3). This one sends the answer first.
    fn end_reset_session(&mut self, cx: &mut Cx<'_>) {
        self.ended.get_or_insert(Parting::Terminated);
        self.actions.push_back(Action::EndOthers);
        // What the initiator has not acknowledged it cannot ask for any more.
        self.on_acknowledged(cx, None);
        self.close(cx.now);
    }

    /// Takes nothing more, and closes when everything is sent.
    pub fn close(&mut self, now: Instant) {
        if self.is_receiving() {
            become_state(&mut self.phase, Phase::Closing);
            self.phase_deadline = Some(now + CLOSE_TIMEOUT);
            self.discard_kept();
        }
    }

    /// Closes without sending anything more, and keeps nothing.
    pub(super) fn drop_connection(&mut self) {
        if self.phase != Phase::Closed {
            self.phase_deadline = None;
            self.leave_for(Phase::Closed);
        }
    }

    /// Discards the requests that this connection has kept until their turn. If one was next, the
    /// turn is another connection's.
    fn discard_kept(&mut self) {
        let me = self.conn_ref();
        let Some(session) = self.session.as_ref().filter(|_| !self.waiting.is_empty()) else {
            return;
        };
        self.waiting.clear();
        session.window.forget(me);
        let next = session.window.next_up();
        self.actions.extend(next.map(Action::TakeTurn));
    }

    /// Closes the connection. Requests that it kept until their turn are discarded.
    pub(super) fn leave_for(&mut self, phase: Phase) {
        let is_closing = !matches!(self.phase, Phase::CleanupWait | Phase::Retaining);
        become_state(&mut self.phase, phase);
        self.discard_kept();
        if is_closing && self.is_connected {
            self.actions.push_back(Action::Disconnect);
        }
    }

    /// Follows every input: carries out what it has made possible.
    pub(super) fn settle(&mut self, cx: &mut Cx<'_>) {
        match self.phase {
            Phase::FullFeature if std::mem::take(&mut self.is_reset) => {
                self.end_reset_session(cx);
            }
            Phase::LoggingOut(itt) if self.in_flight() == 0 && !self.awaits_others => {
                self.logged_out = true;
                if self.ends_session {
                    self.lose_nexus();
                }
                self.answer_logout(itt, LogoutStatus::Closed);
                self.close(cx.now);
            }
            Phase::Closing if self.mover.queued() == 0 && self.is_flushed => {
                self.lose_connection(cx.now);
            }
            Phase::CleanupWait | Phase::Retaining => self.retain(cx),
            _ => {}
        }
        if self.phase == Phase::Closed {
            self.tear_down(cx, !self.is_flushed);
        }
        // A socket reads buffers until the batch has ended, a device until its operation has.
        let is_over = self.phase == Phase::Closed
            && !self.is_connected
            && self.is_flushed
            && self.in_flight() == 0;
        if is_over && !std::mem::replace(&mut self.released, true) {
            self.actions.push_back(Action::Release);
        }
    }

    /// Ends everything at once. No memory may be taken from the pool until devices and sockets have
    /// released what they still use.
    pub fn abandon(&mut self, pool: &mut Pool) {
        if self.phase != Phase::Closed {
            become_state(&mut self.phase, Phase::Closed);
        }
        for idx in self.tasks.numbers() {
            if self.tasks.get(idx).is_some() {
                drop(self.end_request(pool, idx, End::TornDown));
            }
        }
        self.actions.clear();
    }
}
