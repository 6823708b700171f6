//! Timeouts: a late command is aborted, then its unit reset; a silent target is pinged, then
//! abandoned.

use std::time::Instant;

use riser_scsi::iscsi::pdu::{NopOut, TmfFunction, TmfRequest};
use riser_scsi::iscsi::{CmdSn, Itt, Ttt};
use riser_scsi::lun::WireLun;

use super::ping::Ping;
use super::types::ConnState;
use super::{IscsiSession, Output, PING_TAG, TMF_TAG};
use crate::request::table::AttemptOutcome;
use crate::session::{ConnectError, Core, Down, TaskFunction, TaskManager};

impl IscsiSession {
    pub(super) fn expire_connection(&mut self, now: Instant) {
        match self.conn {
            ConnState::XptWait(until) | ConnState::InLogin(until) if until <= now => {
                self.redirection.reset(false);
                self.core.life.on_login_timeout();
                self.tear_down(ConnectError::TimedOut.into(), false);
            }
            ConnState::InLogout(until) if until <= now => self.on_logged_out(),
            ConnState::XptWait(until) | ConnState::InLogin(until) | ConnState::InLogout(until) => {
                self.core.arm(until);
            }
            ConnState::Free | ConnState::LoggedIn | ConnState::CleanupWait => {}
        }
    }

    pub(super) fn expire_ping(&mut self, now: Instant) {
        if self.conn != ConnState::LoggedIn {
            return;
        }
        let due = self.core.ping_at();
        match self.pinged {
            Some(ping) if ping.until() <= now => self.tear_down(Down::Unresponsive, false),
            Some(ping) => self.core.arm(ping.until()),
            None if due <= now => {
                let ping = Ping::new(self.core.last_received, self.core.ping, now);
                self.core.arm(ping.until());
                self.pinged = Some(ping);
                self.send_nop(PING_TAG, Ttt::NONE, [0; 8], Vec::new());
            }
            None => self.core.arm(due),
        }
    }

    pub(super) fn send_nop(&mut self, itt: Itt, ttt: Ttt, lun: [u8; 8], data: Vec<u8>) {
        let nop = NopOut {
            immediate: true,
            lun,
            itt,
            ttt,
            cmd_sn: self.numbers.cmd_sn(),
            exp_stat_sn: self.numbers.exp_stat_sn(),
        };
        self.send_control(nop.header(), data);
    }

    /// Returns the tag of the last task-management request.
    pub(super) fn tmf_tag(&self) -> Itt {
        Itt(u32::from(self.tmf_serial) << 16 | TMF_TAG)
    }

    /// Returns whether the task-management request with this tag is outstanding.
    pub(super) fn is_tmf_pending(&self, itt: Itt) -> bool {
        self.core.functions.is_pending(0) && itt == self.tmf_tag()
    }
}

impl TaskManager for IscsiSession {
    type Tag = Itt;
    type Output = Output;

    fn core(&mut self) -> &mut Core<Itt, Output> {
        &mut self.core
    }

    fn is_established(&self, _channel: u8) -> bool {
        self.conn == ConnState::LoggedIn
    }

    fn send_function(
        &mut self,
        _channel: u8,
        function: TaskFunction,
        lun: WireLun,
        task: Option<Itt>,
    ) -> bool {
        let function = match function {
            TaskFunction::AbortTask(_) => TmfFunction::AbortTask,
            TaskFunction::LogicalUnitReset(_) => TmfFunction::LogicalUnitReset,
            TaskFunction::TargetReset => TmfFunction::TargetWarmReset,
        };
        let ref_cmd_sn = task
            .and_then(|itt| self.tasks.find(itt))
            .map_or(CmdSn(0), |task| task.cmd_sn);
        // Uses half of the numbers, so that no tag equals the reserved value.
        self.tmf_serial = (self.tmf_serial + 1) & 0x7fff;
        let request = TmfRequest {
            immediate: true,
            function,
            lun,
            itt: self.tmf_tag(),
            referenced: task.unwrap_or(Itt::NONE),
            cmd_sn: self.numbers.cmd_sn(),
            exp_stat_sn: self.numbers.exp_stat_sn(),
            ref_cmd_sn,
            exp_data_sn: 0,
        };
        self.send_control(request.header(), Vec::new());
        true
    }

    fn plan_escalation(&mut self, failed: TaskFunction) -> Option<TaskFunction> {
        match failed {
            TaskFunction::AbortTask(late) => {
                let lun = self.core.requests.at(late.index).spec.lun;
                Some(TaskFunction::LogicalUnitReset(lun))
            }
            TaskFunction::LogicalUnitReset(_) => Some(TaskFunction::TargetReset),
            TaskFunction::TargetReset => None,
        }
    }

    fn on_aborted(&mut self, index: u32, _channel: u8, itt: Itt, now: Instant) {
        self.retire_attempt(index, itt, AttemptOutcome::Aborted, now);
    }

    fn disconnect_all(&mut self) {
        self.disconnect();
    }
}
