//! Time: late commands are aborted, then reset; a silent target is pinged, then left.

use std::time::Instant;

use riser_scsi::iscsi::pdu::{NopOut, TmfFunction, TmfRequest, TmfStatus};
use riser_scsi::iscsi::{CmdSn, Itt, Ttt};

use super::types::{ConnState, TmfKind};
use super::{ControlPdu, Output, PING_TAG, Session, TMF_TAG};
use crate::request::table::{AttemptEnd, Late};
use crate::session::{ConnectError, Down, Expired};

impl Session {
    pub(super) fn expire_link(&mut self, now: Instant) {
        match self.conn {
            ConnState::XptWait(until) | ConnState::InLogin(until) if until <= now => {
                self.forget_move();
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
            Some(until) if until <= now => self.tear_down(Down::Unresponsive, false),
            Some(until) => self.core.arm(until),
            None if due <= now => {
                let until = now + self.core.ping;
                self.pinged = Some(until);
                self.core.arm(until);
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
            cmd_sn: self.cmd_sn,
            exp_stat_sn: self.exp_stat_sn,
        };
        let bhs = nop.header();
        self.core
            .outputs
            .push_back(Output::Send(ControlPdu { bhs, data }));
    }

    pub(super) fn expire_tmf(&mut self, now: Instant) {
        match self.tmf {
            Some((.., until)) if until <= now => self.on_tmf_end(None, now),
            Some((.., until)) => self.core.arm(until),
            None => {}
        }
    }

    pub(super) fn expire_requests(&mut self, now: Instant) {
        for late in self.core.plan_late(now) {
            self.expire_request(late, now);
        }
    }

    fn expire_request(&mut self, late: Late, now: Instant) {
        match self.core.expire(late, now) {
            Expired::Nothing => {}
            Expired::Abort(_) => {
                self.aborts.push_back(late);
                self.pump_tmf(now);
            }
            Expired::Leave => self.tear_down(Down::Unresponsive, false),
        }
    }

    /// Sends the next ABORT TASK, if there is one and nothing is under way.
    pub(super) fn pump_tmf(&mut self, now: Instant) {
        while self.conn == ConnState::LoggedIn && self.tmf.is_none() {
            let Some(late) = self.aborts.pop_front() else {
                return;
            };
            if self.core.requests.aborting(late).is_some() {
                self.send_tmf(TmfKind::Abort(late), now);
            }
        }
    }

    fn send_tmf(&mut self, kind: TmfKind, now: Instant) {
        let until = now + self.config.timing.tsk_mgmt;
        let (function, lun, referenced) = match kind {
            TmfKind::Abort(late) => {
                let lun = self.core.requests.at(late.index).spec.lun;
                (
                    TmfFunction::AbortTask,
                    lun,
                    self.core.requests.aborting(late),
                )
            }
            TmfKind::LunReset(lun) => (TmfFunction::LogicalUnitReset, lun, None),
            TmfKind::TargetReset => (TmfFunction::TargetWarmReset, [0; 8], None),
        };
        let ref_cmd_sn = referenced
            .and_then(|itt| self.task(itt))
            .map_or(CmdSn(0), |task| task.cmd_sn);
        self.tmf_serial = (self.tmf_serial + 1) & 0x7fff;
        let itt = Itt(u32::from(self.tmf_serial) << 16 | TMF_TAG);
        self.tmf = Some((kind, itt, until));
        self.core.arm(until);
        let request = TmfRequest {
            immediate: true,
            function,
            lun,
            itt,
            referenced: referenced.unwrap_or(Itt::NONE),
            cmd_sn: self.cmd_sn,
            exp_stat_sn: self.exp_stat_sn,
            ref_cmd_sn,
            exp_data_sn: 0,
        };
        let bhs = request.header();
        let data = Vec::new();
        self.core
            .outputs
            .push_back(Output::Send(ControlPdu { bhs, data }));
    }

    /// A task-management request was answered, or not in time (`None`).
    pub(super) fn on_tmf_end(&mut self, status: Option<TmfStatus>, now: Instant) {
        let Some((kind, ..)) = self.tmf.take() else {
            return;
        };
        let done = status == Some(TmfStatus::Complete);
        match kind {
            TmfKind::Abort(late) => {
                // The answer may have come while the abort was under way.
                if let Some(itt) = self.core.requests.aborting(late) {
                    // A task that the target does not have is over: its answer would have come
                    // before this one.
                    if done || status == Some(TmfStatus::TaskDoesNotExist) {
                        self.end_attempt(late.index, itt, AttemptEnd::Aborted, now);
                    } else {
                        let lun = self.core.requests.at(late.index).spec.lun;
                        self.send_tmf(TmfKind::LunReset(lun), now);
                    }
                }
            }
            TmfKind::LunReset(lun) if done => self.end_tasks(Some(lun), now),
            TmfKind::LunReset(_) => self.send_tmf(TmfKind::TargetReset, now),
            TmfKind::TargetReset if done => self.end_tasks(None, now),
            TmfKind::TargetReset => self.tear_down(Down::Unresponsive, false),
        }
        self.pump_tmf(now);
    }

    /// Whether a reset is under way: no command may be sent behind it.
    pub(super) fn is_resetting(&self) -> bool {
        let kind = self.tmf.map(|(kind, ..)| kind);
        matches!(kind, Some(TmfKind::LunReset(_) | TmfKind::TargetReset))
    }

    /// A reset: none of these commands will be answered.
    fn end_tasks(&mut self, lun: Option<[u8; 8]>, now: Instant) {
        for (index, _, itt) in self.core.requests.outstanding(lun) {
            self.end_attempt(index, itt, AttemptEnd::Aborted, now);
        }
    }
}
