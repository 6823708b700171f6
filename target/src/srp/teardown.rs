//! Channel teardown, and messages initiated by the target: T_LOGOUT, CRED_REQ, AER_REQ.

use std::sync::Arc;
use std::time::{Duration, Instant};

use riser_scsi::attention::Attention;
use riser_scsi::sense::SenseFormat;
use riser_scsi::srp::{AerReq, CredReq, FromTarget, LoginReqFlags, TLogout, TLogoutReason, Tag};
use riser_state::become_state;

use super::action::{Action, SendIu};
use super::channel::{ChState, Channel, Cx};
use super::ioctx::IoctxState;
use super::login::MAX_TI_IU;
use super::own::{Kind, Slot};
use crate::audit::CloseReason;
use crate::fabric::{CommandFlow as _, End, LunMap, TaskAction, TaskIdx, UnitIdx};
use crate::pool::Pool;

/// Timeout for sending a T_LOGOUT. After that, we disconnect without it.
const LOGOUT_TIMEOUT: Duration = Duration::from_secs(1);

/// The same for a channel that is replaced by a new login. Commands of the new channel have to wait
/// until this channel is closed.
const REPLACED_LOGOUT_TIMEOUT: Duration = Duration::from_millis(100);

/// Maximum number of events waiting for AER_REQ. Any further event is only reported as a unit
/// attention.
const MAX_EVENTS: usize = 16;

impl Channel {
    /// Called when the target is shutting down. Commands in flight can complete until `until`, then
    /// we log out the initiator.
    pub fn handle_shutdown(&mut self, cx: &mut Cx<'_>, until: Instant) {
        self.ended.get_or_insert(CloseReason::Shutdown);
        match self.state {
            ChState::Live => {
                self.own.stopping = Some(until);
                self.deadline = Some(until);
            }
            ChState::Connecting => self.disconnect(cx),
            // No command was received yet.
            ChState::Joining => self.logout(cx, TLogoutReason::NoReason),
            ChState::Disconnecting | ChState::Draining | ChState::Disconnected => {}
        }
        self.settle_round(cx);
    }

    /// Called when the channel is replaced by a new login of the same nexus. Its commands are
    /// aborted now, because the initiator does not expect them to complete, and they must not
    /// overwrite the data of newer commands.
    pub fn handle_terminate(&mut self, cx: &mut Cx<'_>) {
        self.ended.get_or_insert(CloseReason::Terminated);
        self.logout(cx, TLogoutReason::MultiChannelAction);
        if self.state == ChState::Disconnecting {
            let until = cx.now + REPLACED_LOGOUT_TIMEOUT;
            self.deadline = Some(self.deadline.map_or(until, |at| at.min(until)));
        }
        self.tear_down(cx);
        self.settle_round(cx);
    }

    /// Called when the connection was closed, by the peer or due to an error.
    pub fn handle_disconnected(&mut self, cx: &mut Cx<'_>) {
        self.on_queue_pair_error(cx);
        self.settle_round(cx);
    }

    /// Called when the drain marker has completed. All earlier requests have completed too.
    pub fn handle_drained(&mut self, cx: &mut Cx<'_>) {
        self.drained = true;
        self.settle_round(cx);
    }

    /// Reports an event of a unit with AER_REQ, if this was requested by the initiator.
    pub fn handle_event(&mut self, cx: &mut Cx<'_>, unit: UnitIdx, attention: Attention) {
        if self.state == ChState::Live && self.config.params.wants_events {
            let sense = attention.sense().encode(SenseFormat::Fixed);
            let seen = self.config.luns.iter().find(|(_, u)| u.index == unit);
            let room = self.own.events.len() < MAX_EVENTS;
            if let Some((lun, _)) = seen
                && room
            {
                let event = (lun.encode(), sense);
                // If the initiator does not respond, a single event must not fill the queue.
                if !self.own.events.contains(&event) {
                    self.own.events.push_back(event);
                }
            }
        }
        self.settle_round(cx);
    }

    /// Called when the logical units for this initiator have changed. Commands in flight continue
    /// to use their unit. The nexus handles the unit attention, but if the initiator has requested
    /// events, it immediately gets an AER_REQ.
    pub fn handle_luns(&mut self, cx: &mut Cx<'_>, luns: Arc<LunMap>) {
        let is_same = self.config.luns.is_same(&luns);
        self.accounts.follow(&luns);
        self.config.luns = luns;
        if is_same {
            // Only the limits of the initiator have changed: see `Channel::handle_limits`.
            return self.settle_round(cx);
        }
        let first = self.config.luns.iter().next().map(|(_, unit)| unit.index);
        match first {
            Some(unit) => self.handle_event(cx, unit, Attention::LunsChanged),
            None => self.settle_round(cx),
        }
    }

    /// Called when the limits of units or of the initiator may have changed.
    pub fn handle_limits(&mut self, cx: &mut Cx<'_>) {
        let limiter = self.config.luns.limiter();
        self.backlog.limits.rebook(limiter, cx.now);
        self.poll_limits(cx);
        self.settle_round(cx);
    }

    /// Aborts everything immediately, when a worker exits without a shutdown. After this, the
    /// channel cannot be used. The devices are already closed, so buffers are no longer accessed.
    pub fn abandon(&mut self, pool: &mut Pool) {
        for idx in self.ioctx.numbers() {
            if let Some(io) = self.ioctx.get_mut(idx) {
                io.wrs = 0;
                drop(self.end_request(pool, idx, End::TornDown));
            }
        }
        self.first_receives = 0..0;
        self.actions.clear();
    }

    /// Logs out the initiator, then disconnects.
    pub(super) fn logout(&mut self, cx: &mut Cx<'_>, reason: TLogoutReason) {
        self.ended.get_or_insert(CloseReason::Protocol);
        match self.state {
            ChState::Joining | ChState::Live => {
                become_state(&mut self.state, ChState::Disconnecting);
                self.deadline = Some(cx.now + LOGOUT_TIMEOUT);
                let iu = FromTarget::TLogout(TLogout {
                    solicited: self.wants(LoginReqFlags::LOSOLNT),
                    reason,
                    tag: self.own_tag(),
                });
                self.send_own(Kind::Logout, &iu, self.wants(LoginReqFlags::LOSOLNT));
            }
            ChState::Connecting => self.disconnect(cx),
            ChState::Disconnecting | ChState::Draining | ChState::Disconnected => {}
        }
    }

    pub(super) fn on_i_logout(&mut self, cx: &mut Cx<'_>) {
        self.ended.get_or_insert(CloseReason::Logout);
        self.disconnect(cx);
    }

    pub(super) fn on_deadline(&mut self, cx: &mut Cx<'_>) {
        match self.state {
            ChState::Connecting | ChState::Disconnecting => self.disconnect(cx),
            ChState::Live if self.own.stopping.is_some() => {
                self.logout(cx, TLogoutReason::NoReason);
            }
            ChState::Joining => self.on_join_late(cx),
            ChState::Live | ChState::Draining | ChState::Disconnected => {}
        }
    }

    pub(super) fn on_queue_pair_error(&mut self, cx: &mut Cx<'_>) {
        self.ended.get_or_insert(CloseReason::Lost);
        if !matches!(self.state, ChState::Draining | ChState::Disconnected) {
            self.disconnect(cx);
        }
    }

    /// Starts to drain the channel, unless already started.
    fn disconnect(&mut self, cx: &mut Cx<'_>) {
        if matches!(self.state, ChState::Draining | ChState::Disconnected) {
            return;
        }
        become_state(&mut self.state, ChState::Draining);
        self.deadline = None;
        self.own.events.clear();
        self.own.stopping = None;
        self.actions.push_back(Action::Disconnect);
        self.tear_down(cx);
    }

    /// Tears down all requests, either immediately or as soon as they are no longer used by a
    /// device.
    fn tear_down(&mut self, cx: &mut Cx<'_>) {
        if std::mem::replace(&mut self.torn_down, true) {
            return;
        }
        self.deferred.clear();
        for idx in self.ioctx.numbers() {
            match self.ioctx_state(idx) {
                IoctxState::Done => {}
                IoctxState::DataIn => {
                    let io = &self.ioctx[idx];
                    if !io.exec.aborted {
                        self.request_action(TaskAction::AbortBlock(idx));
                    }
                }
                // It is torn down when its chain completes.
                _ if self.ioctx[idx].is_in_device() => {}
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
        if self.own.stopping.is_some() && self.req_lim.outstanding() == 0 {
            return self.logout(cx, TLogoutReason::NoReason);
        }
        // Credits are returned with responses. Only send a request if there is no response to
        // return them, because the initiator would then wait forever.
        if self.req_lim.is_stuck() && self.slot(Kind::CredReq).is_idle() {
            let tag = self.own_tag();
            let solicited = self.wants(LoginReqFlags::CRSOLNT);
            let iu = FromTarget::CredReq(CredReq {
                solicited,
                req_lim_delta: self.req_lim.grant(),
                tag,
            });
            self.slot_mut(Kind::CredReq).unanswered = Some(tag);
            self.send_own(Kind::CredReq, &iu, solicited);
        }
        if self.slot(Kind::AerReq).is_idle()
            && let Some((lun, sense)) = self.own.events.pop_front()
        {
            let tag = self.own_tag();
            let solicited = self.wants(LoginReqFlags::AESOLNT);
            let iu = FromTarget::AerReq(AerReq {
                solicited,
                req_lim_delta: self.req_lim.grant(),
                tag,
                lun,
                sense: &sense,
            });
            self.slot_mut(Kind::AerReq).unanswered = Some(tag);
            self.send_own(Kind::AerReq, &iu, solicited);
        }
    }

    pub(super) fn on_cred_rsp(&mut self, cx: &mut Cx<'_>, tag: Tag) {
        self.on_own_answer(cx, Kind::CredReq, tag);
    }

    pub(super) fn on_aer_rsp(&mut self, cx: &mut Cx<'_>, tag: Tag) {
        self.on_own_answer(cx, Kind::AerReq, tag);
    }

    fn on_own_answer(&mut self, cx: &mut Cx<'_>, kind: Kind, tag: Tag) {
        if self.slot(kind).unanswered == Some(tag) {
            self.slot_mut(kind).unanswered = None;
        } else {
            self.complain(
                cx,
                "an answer to nothing that was asked",
                TLogoutReason::SpuriousResponse,
            );
        }
    }

    /// Called when a message initiated by the target was sent, or has failed.
    pub(super) fn on_own_sent(&mut self, cx: &mut Cx<'_>, idx: TaskIdx, ok: bool) {
        let kind = match u32::from(idx.0) - self.config.params.req_lim {
            0 => Kind::CredReq,
            1 => Kind::AerReq,
            _ => Kind::Logout,
        };
        let slot = self.slot_mut(kind);
        assert!(slot.sending, "{kind:?} was being sent");
        slot.sending = false;
        // T_LOGOUT is always the last message. The initiator has received it, so we can close the
        // queue pair.
        if !ok || kind == Kind::Logout {
            self.on_queue_pair_error(cx);
        }
    }

    fn send_own(&mut self, kind: Kind, iu: &FromTarget<'_>, solicited: bool) {
        let idx = TaskIdx((self.config.params.req_lim + kind as u32) as u16);
        let mut bytes = [0; MAX_TI_IU as usize];
        let len = iu.emit(&mut bytes);
        self.send_slot(idx).write(0, &bytes[..len]);
        let slot = self.slot_mut(kind);
        debug_assert!(!slot.sending);
        slot.sending = true;
        self.actions.push_back(Action::Post {
            task: idx,
            send: Some(SendIu {
                len: len as u32,
                solicited,
            }),
        });
    }

    fn wants(&self, flag: LoginReqFlags) -> bool {
        self.config.params.flags.contains(flag)
    }

    fn own_tag(&mut self) -> Tag {
        self.own.next_tag += 1;
        Tag(self.own.next_tag)
    }

    fn slot(&self, kind: Kind) -> Slot {
        self.own.slots[kind as usize]
    }

    fn slot_mut(&mut self, kind: Kind) -> &mut Slot {
        &mut self.own.slots[kind as usize]
    }
}
