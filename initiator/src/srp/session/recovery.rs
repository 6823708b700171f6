//! Timeouts: a late command is aborted, then its unit reset; an unresponsive target is abandoned.

use std::time::Instant;

use riser_scsi::lun::WireLun;
use riser_scsi::srp::{Tag, TskMgmtFunction};

use super::types::{ConnState, Member};
use super::{ChannelIndex, ConnectError, Down, Output, SessionState, SrpSession};
use crate::request::Retry;
use crate::request::table::AttemptOutcome;
use crate::session::{Core, TaskFunction, TaskManager};

impl SrpSession {
    pub(super) fn expire_connections(&mut self, now: Instant) {
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

    /// Pings a silent target, even while commands are waiting for it: if a target was killed after
    /// acknowledging them, there is nothing left to acknowledge. The ping is a request.
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
        if !self.core.requests.has_probe() {
            self.core.outputs.push_back(Output::Ping);
        }
    }

    /// Called when a queued request timed out. If no channel has a command that could time out, or
    /// room in its request limit for a ping, nothing else would detect that the target is unusable.
    /// A new login grants a new limit.
    fn tear_down_if_starved(&mut self) {
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
}

impl TaskManager for SrpSession {
    type Tag = Tag;
    type Output = Output;

    fn core(&mut self) -> &mut Core<Tag, Output> {
        &mut self.core
    }

    fn is_established(&self, channel: u8) -> bool {
        self.members[usize::from(channel)].conn == ConnState::Established
    }

    fn send_function(
        &mut self,
        channel: u8,
        function: TaskFunction,
        lun: WireLun,
        task: Option<Tag>,
    ) -> bool {
        let function = match function {
            TaskFunction::AbortTask(_) => TskMgmtFunction::AbortTask,
            TaskFunction::LogicalUnitReset(_) => TskMgmtFunction::LogicalUnitReset,
            TaskFunction::TargetReset => unreachable!("no escalation of SRP leads here"),
        };
        let member = &mut self.members[usize::from(channel)];
        let Some(iu) = member.channel.start_tsk_mgmt(lun, function, task) else {
            return false;
        };
        let channel = ChannelIndex(channel);
        self.core
            .outputs
            .push_back(Output::SendTskMgmt(channel, iu));
        true
    }

    fn plan_escalation(&mut self, failed: TaskFunction) -> Option<TaskFunction> {
        let TaskFunction::AbortTask(late) = failed else {
            return None;
        };
        let spec = &self.core.requests.at(late.index).spec;
        // A reset would terminate the commands of all other initiators.
        (spec.retry != Retry::Probe).then_some(TaskFunction::LogicalUnitReset(spec.lun))
    }

    fn on_aborted(&mut self, index: u32, channel: u8, tag: Tag, now: Instant) {
        self.members[usize::from(channel)]
            .channel
            .abandon_command(tag);
        self.retire_attempt(index, channel, AttemptOutcome::Aborted, now);
    }

    fn disconnect_all(&mut self) {
        self.close_members();
    }

    fn on_function_timeout(&mut self, channel: u8) {
        let member = &mut self.members[usize::from(channel)];
        member.channel.abandon_tsk_mgmt();
    }

    fn on_queue_timeout(&mut self) {
        self.tear_down_if_starved();
    }
}
