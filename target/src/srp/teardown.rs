//! Channel teardown, and messages initiated by the target: T_LOGOUT, CRED_REQ, AER_REQ.

use std::sync::Arc;
use std::time::{Duration, Instant};

use riser_scsi::attention::Attention;
use riser_scsi::sense::SenseFormat;
use riser_scsi::srp::{TLogoutReason, Tag};
use riser_state::become_state;

use super::action::Action;
use super::channel::{ChState, Channel, Cx};
use super::ioctx::IoctxState;
use super::own::Kind;
use super::sender::Sender;
use crate::audit::CloseReason;
use crate::fabric::{CommandFlow as _, End, LunMap, TaskAction, UnitIdx};
use crate::pool::Pool;

/// Timeout for sending a T_LOGOUT. After that, we disconnect without it.
const LOGOUT_TIMEOUT: Duration = Duration::from_secs(1);

/// The same for a channel that is replaced by a new login. Commands of the new channel have to wait
/// until this channel is closed.
const REPLACED_LOGOUT_TIMEOUT: Duration = Duration::from_millis(100);

impl Channel {
    /// Called when the target is shutting down. Commands in flight can complete until `until`, then
    /// we log out the initiator.
    pub fn handle_shutdown(&mut self, cx: &mut Cx<'_>, until: Instant) {
        self.ended.get_or_insert(CloseReason::Shutdown);
        match self.state {
            ChState::Live => {
                self.own.stopping = Some(until);
                self.timers.phase = Some(until);
            }
            ChState::Connecting => self.disconnect(cx),
            // No command was received yet.
            ChState::Joining => self.logout(cx, TLogoutReason::NoReason),
            ChState::Disconnecting | ChState::Draining | ChState::Disconnected => {}
        }
        self.finish_input(cx);
    }

    /// Called when the channel is replaced by a new login of the same nexus. Its commands are
    /// aborted now, because the initiator does not expect them to complete, and they must not
    /// overwrite the data of newer commands.
    pub fn handle_terminate(&mut self, cx: &mut Cx<'_>) {
        self.ended.get_or_insert(CloseReason::Terminated);
        self.logout(cx, TLogoutReason::MultiChannelAction);
        if self.state == ChState::Disconnecting {
            let until = cx.now + REPLACED_LOGOUT_TIMEOUT;
            let phase = self.timers.phase.get_or_insert(until);
            *phase = until.min(*phase);
        }
        self.tear_down(cx);
        self.finish_input(cx);
    }

    /// Called when the connection was closed, by the peer or due to an error.
    pub fn handle_disconnected(&mut self, cx: &mut Cx<'_>) {
        self.on_queue_pair_error(cx);
        self.finish_input(cx);
    }

    /// Called when the drain marker has completed. All earlier requests have completed too.
    pub fn handle_drained(&mut self, cx: &mut Cx<'_>) {
        self.drained = true;
        self.finish_input(cx);
    }

    /// Reports an event of a unit with AER_REQ, if this was requested by the initiator.
    pub fn handle_event(&mut self, cx: &mut Cx<'_>, unit: UnitIdx, attention: Attention) {
        if self.state == ChState::Live {
            let seen = self.config.luns.iter().find(|(_, u)| u.index == unit);
            if let Some((lun, _)) = seen {
                let sense = attention.sense().encode(SenseFormat::Fixed);
                self.own.queue_event(lun.encode(), sense);
            }
        }
        self.finish_input(cx);
    }

    /// Called when the logical units for this initiator have changed. Commands in flight continue
    /// to use their unit. The nexus handles the unit attention, but if the initiator has requested
    /// events, it immediately gets an AER_REQ.
    pub fn handle_luns(&mut self, cx: &mut Cx<'_>, luns: Arc<LunMap>) {
        let is_same = self.config.luns.is_same(&luns);
        self.stats.accounts.follow(&luns);
        self.config.luns = luns;
        if is_same {
            // Only the limits of the initiator have changed: see `Channel::handle_limits`.
            return self.finish_input(cx);
        }
        let first = self.config.luns.iter().next().map(|(_, unit)| unit.index);
        match first {
            Some(unit) => self.handle_event(cx, unit, Attention::LunsChanged),
            None => self.finish_input(cx),
        }
    }

    /// Called when the limits of units or of the initiator may have changed.
    pub fn handle_limits(&mut self, cx: &mut Cx<'_>) {
        let limiter = self.config.luns.limiter();
        self.backlog.limits.rebook(limiter, cx.now);
        self.poll_limits(cx);
        self.finish_input(cx);
    }

    /// Aborts everything immediately, when a worker exits without a shutdown. After this, the
    /// channel cannot be used. The devices are already closed, so buffers are no longer accessed.
    pub fn abandon(&mut self, pool: &mut Pool) {
        for idx in self.requests.numbers() {
            if let Some(io) = self.requests.get_mut(idx) {
                io.wrs = 0;
                drop(self.end_request(pool, idx, End::TornDown));
            }
        }
        self.receives.discard_first();
        self.actions.clear();
    }

    /// Logs out the initiator, then disconnects.
    pub(super) fn logout(&mut self, cx: &mut Cx<'_>, reason: TLogoutReason) {
        self.ended.get_or_insert(CloseReason::Protocol);
        match self.state {
            ChState::Joining | ChState::Live => {
                become_state(&mut self.state, ChState::Disconnecting);
                self.timers.phase = Some(cx.now + LOGOUT_TIMEOUT);
                let logout = self.own.logout(reason, &self.sender.ring);
                self.actions.push_back(logout);
            }
            ChState::Connecting => self.disconnect(cx),
            ChState::Disconnecting | ChState::Draining | ChState::Disconnected => {}
        }
    }

    pub(super) fn on_queue_pair_error(&mut self, cx: &mut Cx<'_>) {
        self.ended.get_or_insert(CloseReason::Lost);
        if !matches!(self.state, ChState::Draining | ChState::Disconnected) {
            self.disconnect(cx);
        }
    }

    /// Starts to drain the channel, unless already started.
    pub(super) fn disconnect(&mut self, cx: &mut Cx<'_>) {
        if matches!(self.state, ChState::Draining | ChState::Disconnected) {
            return;
        }
        become_state(&mut self.state, ChState::Draining);
        self.timers.phase = None;
        self.receives.close();
        self.own.discard_pending();
        self.actions.push_back(Action::Disconnect);
        self.tear_down(cx);
    }

    /// Tears down all requests, either immediately or as soon as they are no longer used by a
    /// device.
    fn tear_down(&mut self, cx: &mut Cx<'_>) {
        if std::mem::replace(&mut self.torn_down, true) {
            return;
        }
        self.receives.discard_deferred();
        for idx in self.requests.numbers() {
            match self.requests.state(idx) {
                IoctxState::Done => {}
                IoctxState::DataIn => {
                    let io = &self.requests[idx];
                    if !io.exec.aborted {
                        self.request_action(TaskAction::AbortBlock(idx));
                    }
                }
                // It is torn down when its chain completes.
                _ if self.requests[idx].is_in_device() => {}
                _ => {
                    self.stop_waiting(cx.pool, idx);
                    self.finish(cx, idx, End::TornDown);
                }
            }
        }
    }

    /// Sends pending messages initiated by the target.
    pub(super) fn poll_own(&mut self, cx: &mut Cx<'_>) {
        if self.state != ChState::Live {
            return;
        }
        if self.own.stopping.is_some() && self.sender.req_lim.outstanding() == 0 {
            return self.logout(cx, TLogoutReason::NoReason);
        }
        let Sender { req_lim, ring, .. } = &mut self.sender;
        // This is called for every input, usually with nothing to send, so don't create an iterator
        // over the actions.
        if let Some(credits) = self.own.poll_credits(req_lim, ring) {
            self.actions.push_back(credits);
        }
        if let Some(event) = self.own.poll_event(req_lim, ring) {
            self.actions.push_back(event);
        }
    }

    /// Handles a response to a message initiated by the target.
    pub(super) fn on_own_response(&mut self, cx: &mut Cx<'_>, kind: Kind, tag: Tag) {
        if !self.own.on_response(kind, tag) {
            let what = "unsolicited response";
            self.complain(cx, what, TLogoutReason::SpuriousResponse);
        }
    }
}
