//! Ends of a channel, and the messages that a target sends of its own accord: T_LOGOUT, CRED_REQ,
//! AER_REQ.

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
use crate::audit::Parting;
use crate::fabric::{CommandFlow as _, End, LunMap, TaskAction, TaskIdx, UnitIdx};
use crate::pool::Pool;

/// Time limit for sending a T_LOGOUT; the connection ends without it then.
const LOGOUT_TIMEOUT: Duration = Duration::from_secs(1);

/// The same for a channel that a new login replaces: its commands wait until this channel is gone.
const REPLACED_LOGOUT_TIMEOUT: Duration = Duration::from_millis(100);

/// Events that wait for AER_REQ at most; more are not reported that way, and meet the initiator as
/// unit attentions.
const MAX_EVENTS: usize = 16;

impl Channel {
    /// The target is shutting down: commands under way may finish until `until`, then the initiator
    /// is logged out.
    pub fn handle_shutdown(&mut self, cx: &mut Cx<'_>, until: Instant) {
        self.ended.get_or_insert(Parting::Shutdown);
        match self.state {
            ChState::Live => {
                self.own.stopping = Some(until);
                self.deadline = Some(until);
            }
            ChState::Connecting => self.disconnect(cx),
            // It has taken no command yet.
            ChState::Joining => self.logout(cx, TLogoutReason::NoReason),
            ChState::Disconnecting | ChState::Draining | ChState::Disconnected => {}
        }
        self.settle_round(cx);
    }

    /// A new login of the same nexus ends the channel. Its commands end now, since the initiator
    /// has given them up: one that started or went on would overwrite what comes after it.
    pub fn handle_terminate(&mut self, cx: &mut Cx<'_>) {
        self.ended.get_or_insert(Parting::Terminated);
        self.logout(cx, TLogoutReason::MultiChannelAction);
        if self.state == ChState::Disconnecting {
            let until = cx.now + REPLACED_LOGOUT_TIMEOUT;
            self.deadline = Some(self.deadline.map_or(until, |at| at.min(until)));
        }
        self.tear_down(cx);
        self.settle_round(cx);
    }

    /// The connection ended, by the peer or by an error.
    pub fn handle_disconnected(&mut self, cx: &mut Cx<'_>) {
        self.on_queue_pair_error(cx);
        self.settle_round(cx);
    }

    /// The drain marker completed: nothing posted before it is left.
    pub fn handle_drained(&mut self, cx: &mut Cx<'_>) {
        self.drained = true;
        self.settle_round(cx);
    }

    /// Reports an event of a unit by AER_REQ, if the initiator has asked for that.
    pub fn handle_event(&mut self, cx: &mut Cx<'_>, unit: UnitIdx, attention: Attention) {
        if self.state == ChState::Live && self.config.params.wants_events {
            let sense = attention.sense().encode(SenseFormat::Fixed);
            let seen = self.config.luns.iter().find(|(_, u)| u.index == unit);
            let room = self.own.events.len() < MAX_EVENTS;
            if let Some((lun, _)) = seen
                && room
            {
                let event = (lun.encode(), sense);
                // An initiator that does not answer must not have the queue filled by one event.
                if !self.own.events.contains(&event) {
                    self.own.events.push_back(event);
                }
            }
        }
        self.settle_round(cx);
    }

    /// The initiator sees other units from now on. Commands under way keep theirs to their end. The
    /// unit attention is the nexus's affair; an initiator that has asked for events gets an AER_REQ
    /// at once.
    pub fn handle_luns(&mut self, cx: &mut Cx<'_>, luns: Arc<LunMap>) {
        let is_same = self.config.luns.is_same(&luns);
        self.accounts.follow(&luns);
        self.config.luns = luns;
        if is_same {
            // The initiator has other limits: see `Channel::handle_limits`.
            return self.settle_round(cx);
        }
        let first = self.config.luns.iter().next().map(|(_, unit)| unit.index);
        match first {
            Some(unit) => self.handle_event(cx, unit, Attention::LunsChanged),
            None => self.settle_round(cx),
        }
    }

    /// The limits of units or of the initiator may be others from now on.
    pub fn handle_limits(&mut self, cx: &mut Cx<'_>) {
        let limiter = self.config.luns.limiter();
        self.backlog.limits.rebook(limiter, cx.now);
        self.poll_limits(cx);
        self.settle_round(cx);
    }

    /// Ends everything at once, for a worker that ends without a shutdown; the channel is of no use
    /// then. The devices are closed already, so nothing touches a buffer.
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

    /// Logs the initiator out, then disconnects.
    pub(super) fn logout(&mut self, cx: &mut Cx<'_>, reason: TLogoutReason) {
        self.ended.get_or_insert(Parting::Protocol);
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
        self.ended.get_or_insert(Parting::Logout);
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
        self.ended.get_or_insert(Parting::Lost);
        if !matches!(self.state, ChState::Draining | ChState::Disconnected) {
            self.disconnect(cx);
        }
    }

    /// Goes to the draining state, unless it is there.
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

    /// Ends all requests: those that no device holds now, the rest as they come back.
    fn tear_down(&mut self, cx: &mut Cx<'_>) {
        if std::mem::replace(&mut self.torn_down, true) {
            return;
        }
        self.deferred.clear();
        for idx in self.ioctx.numbers() {
            match self.ioctx_state(idx) {
                IoctxState::Done => {}
                IoctxState::DataIn => {
                    let io = &self.ioctx[usize::from(idx.0)];
                    if !io.exec.aborted {
                        self.ask(TaskAction::AbortBlock(idx));
                    }
                }
                // The completion of its chain ends it.
                _ if self.ioctx[usize::from(idx.0)].is_in_device() => {}
                _ => {
                    self.stop_waiting(cx.pool, idx);
                    self.finish(cx, idx, End::TornDown);
                }
            }
        }
    }

    /// Sends what is due of our own.
    pub(super) fn poll_own(&mut self, cx: &mut Cx<'_>) {
        if self.state != ChState::Live {
            return;
        }
        if self.own.stopping.is_some() && self.req_lim.outstanding() == 0 {
            return self.logout(cx, TLogoutReason::NoReason);
        }
        // Credits travel with answers. Only when none is under way that could carry them, a request
        // of ours does, or the initiator would wait for ever.
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

    /// The send of a message of our own completed, or failed.
    pub(super) fn on_own_sent(&mut self, cx: &mut Cx<'_>, idx: TaskIdx, ok: bool) {
        let kind = match u32::from(idx.0) - self.config.params.req_lim {
            0 => Kind::CredReq,
            1 => Kind::AerReq,
            _ => Kind::Logout,
        };
        let slot = self.slot_mut(kind);
        assert!(slot.sending, "{kind:?} was being sent");
        slot.sending = false;
        // Nothing follows a T_LOGOUT: the initiator has it now, and the queue pair may go.
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
