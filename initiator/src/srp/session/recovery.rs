//! Time: late commands are aborted, then reset; a target that does not answer is left.

use std::time::Instant;

use riser_scsi::srp::{RspCode, Tag, TskMgmtFunction, WireLun};

use super::types::{ConnState, Member, TskMgmtKind};
use super::{ChannelIndex, ConnectError, Down, Output, Session, SessionState};
use crate::request::Retry;
use crate::request::table::{AttemptEnd, Late, RequestState};
use crate::session::Expired;

impl Session {
    pub(super) fn expire_links(&mut self, now: Instant) {
        for index in 0..self.members.len() {
            let ConnState::Connecting(until) = self.members[index].conn else {
                continue;
            };
            if until > now {
                self.core.arm(until);
                continue;
            }
            self.disconnect(ChannelIndex(index as u8));
            if index == 0 {
                self.core.life.on_login_timeout();
                self.tear_down(ConnectError::TimedOut.into(), false);
            }
        }
    }

    /// Asks a target that is silent whether it is there. The question is a request; requests that
    /// are outstanding have times of their own.
    pub(super) fn expire_ping(&mut self, now: Instant) {
        if self.state() != SessionState::Live {
            return;
        }
        let due = self.core.ping_at();
        if due > now {
            self.core.arm(due);
            return;
        }
        self.core.arm(now + self.core.ping);
        if self.core.requests.len() == 0 {
            self.core.outputs.push_back(Output::Ping);
        }
    }

    pub(super) fn expire_tsk_mgmt(&mut self, now: Instant) {
        for index in 0..self.members.len() {
            match self.members[index].tmf {
                Some((_, until)) if until <= now => {
                    self.members[index].channel.give_up_tsk_mgmt();
                    self.handle_tsk_mgmt_end(index as u8, None, now);
                }
                Some((_, until)) => self.core.arm(until),
                None => {}
            }
        }
    }

    pub(super) fn expire_requests(&mut self, now: Instant) {
        for late in self.core.plan_late(now) {
            self.expire_request(late, now);
        }
    }

    pub(super) fn expire_request(&mut self, late: Late, now: Instant) {
        let state = &self.core.requests.at(late.index).state;
        if *state == RequestState::Queued {
            self.leave_if_starved();
        }
        match self.core.expire(late, now) {
            Expired::Nothing => {}
            Expired::Abort(channel) => {
                self.members[usize::from(channel)].aborts.push_back(late);
                self.pump_tsk_mgmt(channel, now);
            }
            Expired::Leave => self.tear_down(Down::Unresponsive, false),
        }
    }

    /// A request has waited in vain. Where no channel has a command that could be late, or room in its
    /// request limit for a ping, nothing else would show that the target is of no use. A new login
    /// grants a new limit.
    fn leave_if_starved(&mut self) {
        let is_live = self.state() == SessionState::Live;
        let is_stuck = |m: &Member| match m.conn {
            ConnState::Established => m.channel.is_starved(),
            ConnState::Connecting(_) => false,
            ConnState::Free | ConnState::Disconnecting => true,
        };
        if is_live && self.members.iter().all(is_stuck) {
            self.tear_down(Down::Unresponsive, false);
        }
    }

    /// Sends the next ABORT TASK of a channel, if there is one and none is under way.
    pub(super) fn pump_tsk_mgmt(&mut self, channel: u8, now: Instant) {
        if self.members[usize::from(channel)].conn != ConnState::Established {
            return;
        }
        while self.members[usize::from(channel)].tmf.is_none() {
            let next = self.members[usize::from(channel)].aborts.pop_front();
            let Some(late) = next else {
                return;
            };
            if let Some(tag) = self.core.requests.aborting(late) {
                let lun = self.core.requests.at(late.index).spec.lun;
                let kind = TskMgmtKind::Abort(late);
                self.send_tsk_mgmt(channel, lun, kind, Some(tag), now);
            }
        }
    }

    pub(super) fn send_tsk_mgmt(
        &mut self,
        channel: u8,
        lun: WireLun,
        kind: TskMgmtKind,
        task: Option<Tag>,
        now: Instant,
    ) {
        let until = now + self.config.timing.tsk_mgmt;
        let function = match kind {
            TskMgmtKind::Abort(..) => TskMgmtFunction::AbortTask,
            TskMgmtKind::LunReset(_) => TskMgmtFunction::LogicalUnitReset,
        };
        let member = &mut self.members[usize::from(channel)];
        // Set even when the request cannot be sent, so that no other is tried meanwhile.
        member.tmf = Some((kind, until));
        match member.channel.start_tsk_mgmt(lun, function, task) {
            Some(iu) => {
                self.core.arm(until);
                self.core
                    .outputs
                    .push_back(Output::SendTskMgmt(ChannelIndex(channel), iu));
            }
            None => self.tear_down(Down::Unresponsive, false),
        }
    }

    /// A task-management request was answered, or not in time (`None`).
    pub(super) fn handle_tsk_mgmt_end(&mut self, channel: u8, code: Option<RspCode>, now: Instant) {
        let Some((kind, _)) = self.members[usize::from(channel)].tmf.take() else {
            return;
        };
        let done = code == Some(RspCode::Complete);
        match kind {
            TskMgmtKind::Abort(late) => {
                // The answer may have come while the abort was under way.
                if let Some(tag) = self.core.requests.aborting(late) {
                    let is_probe = self.core.requests.at(late.index).spec.retry == Retry::Probe;
                    if done {
                        self.members[usize::from(channel)].channel.give_up(tag);
                        self.end_attempt(late.index, channel, AttemptEnd::Aborted, now);
                    } else if is_probe {
                        // A reset would end the commands of every other initiator.
                        self.tear_down(Down::Unresponsive, false);
                    } else {
                        let lun = self.core.requests.at(late.index).spec.lun;
                        let kind = TskMgmtKind::LunReset(lun);
                        self.send_tsk_mgmt(channel, lun, kind, None, now);
                    }
                }
            }
            TskMgmtKind::LunReset(lun) if done => self.end_lun(lun, channel, now),
            TskMgmtKind::LunReset(_) => self.tear_down(Down::Unresponsive, false),
        }
        self.pump_tsk_mgmt(channel, now);
    }

    /// Whether a reset is under way, or the aborts that follow it on other channels.
    pub(super) fn is_resetting(&self) -> bool {
        let is_reset = |m: &Member| matches!(m.tmf, Some((TskMgmtKind::LunReset(_), _)));
        let is_aborting = |m: &Member| m.tmf.is_some() || !m.aborts.is_empty();
        self.members.iter().any(is_reset)
            || (self.is_sweeping && self.members.iter().any(is_aborting))
    }

    /// A logical unit was reset by a request on this channel. Its commands that were sent there before
    /// will not be answered. Those of other channels may have arrived behind the reset, so each is
    /// aborted on its own channel, where the request arrives behind it.
    pub(super) fn end_lun(&mut self, lun: WireLun, here: u8, now: Instant) {
        self.is_sweeping = true;
        for (index, channel, tag) in self.core.requests.outstanding(Some(lun)) {
            if channel == here {
                self.members[usize::from(channel)].channel.give_up(tag);
                self.end_attempt(index, channel, AttemptEnd::Aborted, now);
            } else if self.core.requests.begin_abort(index).is_some() {
                let late = self.core.requests.at(index).late(index);
                self.members[usize::from(channel)].aborts.push_back(late);
            }
        }
        for channel in 0..self.members.len() {
            if channel != usize::from(here) {
                self.pump_tsk_mgmt(channel as u8, now);
            }
        }
    }
}
