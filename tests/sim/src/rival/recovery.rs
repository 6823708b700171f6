//! Error recovery level 2 of a rival: a session continues after connections were lost or closed,
//! and their commands are recovered (RFC 7143 7.2, 7.6, 7.15).
//!
//! ```text
//!   connection lost ─→ logged out from another one, or logged in again ─→ detached
//!   its commands: orphans ─→ TASK REASSIGN ─→ tasks of another connection
//!                         └→ left to the target, until QUERY TASK does not find them
//! ```
//!
//! CmdSNs that were not acknowledged by the target are reused for pings, immediately and again when
//! the target has released the connection: it does not execute any later command while a CmdSN is
//! missing.

use std::time::{Duration, Instant};

use riser_scsi::iscsi::pdu::{
    DataIn, LogoutReason, LogoutRequest, NopOut, Snack, SnackKind, TmfFunction, TmfRequest,
    TmfStatus,
};
use riser_scsi::iscsi::{Cid, CmdSn, Itt};
use riser_test_peers::pdus;
use tracing::debug;

use super::tasks::{Function, Task};
use super::{LATE, Phase, Rival};
use crate::coverage;

/// A lost connection of a session that continues.
#[derive(Debug)]
pub(super) struct Lost {
    /// Time of the next recovery attempt.
    next: Instant,
    /// The target has released the connection, so its commands may be reassigned.
    is_detached: bool,
}

/// A command whose connection was lost.
#[derive(Debug)]
pub(super) struct Orphan {
    task: Task,
    next: Instant,
    /// It will not be reassigned.
    is_abandoned: bool,
}

impl Orphan {
    pub(super) fn into_task(self) -> Task {
        self.task
    }
}

impl Rival {
    /// Returns the number of connections that are logged in.
    fn live(&self) -> usize {
        self.connections.iter().filter(|c| c.is_ready()).count()
    }

    /// Returns whether the session survives the loss of a connection.
    pub(super) fn recovers(&self) -> bool {
        let level = self.params.map_or(0, |params| params.error_recovery_level);
        matches!(self.phase, Phase::Up) && level > 1
    }

    /// Called when a connection was lost. This also closes the session, unless it can be recovered.
    pub(super) fn lose_connection(&mut self, at: usize, now: Instant) {
        let was_ready = self.connections[at].is_ready();
        self.connections[at].retire();
        let is_up = matches!(self.phase, Phase::Up);
        // A connection that could not join is not part of the session.
        let survives = self.recovers() || is_up && !was_ready;
        if !survives || self.live() == 0 {
            return self.lose(now);
        }
        debug!(port = self.user.port.0, at, "a connection is lost");
        let wait =
            Duration::from_micros(self.rng.u64(..if was_ready { 200_000 } else { 5_000_000 }));
        let lost = Lost {
            next: now + wait,
            is_detached: !was_ready,
        };
        self.lost.entry(at).or_insert(lost).next = now + wait;
        if was_ready {
            self.orphan(at, now);
        }
    }

    /// Commands in flight will not be completed on a lost connection.
    fn orphan(&mut self, at: usize, now: Instant) {
        let is_its = |_: &u32, sent: &mut Function| sent.connection == at;
        let functions: Vec<_> = self.functions.extract_if(.., is_its).collect();
        let mut numbers = std::mem::take(&mut self.plugs);
        for (_, sent) in functions {
            let ended = self.tasks.iter_mut();
            let ended = ended.filter(|(tag, _)| sent.may_end(**tag));
            ended.for_each(|(_, task)| task.is_doubtful = true);
            numbers.extend(sent.number());
        }
        self.aborted.retain(|_, ended| ended.connection != at);
        let its: Vec<_> = self
            .tasks
            .extract_if(.., |_, task| task.connection == at)
            .collect();
        for (tag, task) in its {
            numbers.push(task.cmd_sn);
            let orphan = Orphan {
                task,
                next: now + Duration::from_micros(self.rng.u64(..50_000)),
                is_abandoned: self.rng.u8(..4) == 0,
            };
            self.orphans.insert(tag, orphan);
        }
        numbers.extend(self.orphans.values().map(|orphan| orphan.task.cmd_sn));
        numbers.sort_unstable_by_key(|sn| sn.0);
        numbers.dedup();
        self.plugs = numbers;
        self.plug_all(now);
    }

    /// Reuses all CmdSNs that may not have been received.
    pub(super) fn plug_all(&mut self, now: Instant) {
        let mut numbers = std::mem::take(&mut self.plugs);
        numbers.retain(|sn| !sn.is_before(self.exp_cmd_sn));
        for sn in &numbers {
            self.plug(*sn, now);
        }
        self.plugs = numbers;
    }

    fn plug(&mut self, sn: CmdSn, now: Instant) {
        let (tag, out) = (self.take_tag(), self.pick_connection());
        let ping = NopOut {
            immediate: false,
            exp_stat_sn: self.connections[out].exp_stat_sn(),
            ..pdus::nop_out(tag, sn.0)
        };
        self.connections[out].send(now, ping.header(), &[]);
    }

    /// Returns the time of the next recovery attempt.
    pub(super) fn next_recovery(&self) -> Option<Instant> {
        let orphans = self.orphans.values().map(|orphan| orphan.next);
        orphans
            .chain(self.lost.values().map(|lost| lost.next))
            .min()
    }

    /// Performs recovery that is due. Returns whether there was any.
    pub(super) fn recover(&mut self, now: Instant) -> bool {
        let lost = self.lost.iter().find(|(_, lost)| lost.next <= now);
        if let Some(at) = lost.map(|(at, _)| *at) {
            self.recover_connection(at, now);
            return true;
        }
        let due = self.orphans.iter().find(|(_, orphan)| orphan.next <= now);
        let Some(tag) = due.map(|(tag, _)| *tag) else {
            return false;
        };
        let orphan = self.orphans.get_mut(&tag).expect("just found");
        orphan.next = now + LATE;
        let lost = self.lost.get(&orphan.task.connection);
        let function = match orphan.is_abandoned {
            true => TmfFunction::QueryTask,
            false if lost.is_some_and(|lost| !lost.is_detached) => return true,
            false => TmfFunction::TaskReassign,
        };
        let mut functions = self.functions.values();
        if !functions.any(|sent| sent.referenced == tag) {
            self.send_function(tag, function, now);
        }
        true
    }

    /// Logs out a lost connection, or logs it in again.
    fn recover_connection(&mut self, at: usize, now: Instant) {
        let lost = self.lost.get_mut(&at).expect("just found");
        lost.next = now + LATE;
        if lost.is_detached || self.rng.bool() {
            // Connection reinstatement.
            lost.next = now + LATE * 4;
            return self.dial(at, now);
        }
        let (tag, out) = (self.take_tag(), self.pick_connection());
        let request = LogoutRequest {
            immediate: true,
            reason: LogoutReason::RemoveConnection,
            itt: Itt(tag),
            cid: Cid(at as u16),
            cmd_sn: self.cmd_sn,
            exp_stat_sn: self.connections[out].exp_stat_sn(),
        };
        self.logouts.insert(tag, at);
        self.connections[out].send(now, request.header(), &[]);
    }

    /// Called when a connection was logged out, or doesn't exist at the target: the target has
    /// released the connection and the commands that were waiting there for older commands. Before
    /// that, it ignored reused CmdSNs as duplicates.
    pub(super) fn on_detached(&mut self, at: usize, now: Instant) {
        self.plug_all(now);
        if let Some(lost) = self.lost.get_mut(&at) {
            lost.is_detached = true;
            lost.next = now + Duration::from_micros(self.rng.u64(..1_000_000));
        }
    }

    /// Sends a function to reassign or query an orphan.
    fn send_function(&mut self, orphan: u32, function: TmfFunction, now: Instant) {
        let (tag, connection) = (self.take_tag(), self.pick_connection());
        let task = &self.orphans[&orphan].task;
        let reassigns = function == TmfFunction::TaskReassign;
        let request = TmfRequest {
            exp_stat_sn: self.connections[connection].exp_stat_sn(),
            ref_cmd_sn: task.cmd_sn,
            exp_data_sn: match reassigns && self.rng.bool() {
                true => task.units,
                false => 0,
            },
            ..pdus::tmf_request(tag, self.cmd_sn.0, function, orphan)
        };
        debug!(
            port = self.user.port.0,
            tag, connection, orphan, "{function:?} begins"
        );
        let sent = Function::about(function, connection, orphan, self.cmd_sn);
        self.functions.insert(tag, sent);
        self.connections[connection].send(now, request.header(), &[]);
    }

    /// Called when a function for an orphan was completed.
    pub(super) fn on_orphan(&mut self, sent: &Function, status: TmfStatus, now: Instant) {
        let reassigns = sent.function == TmfFunction::TaskReassign;
        let tag = sent.referenced;
        let Some(mut orphan) = self.orphans.remove(&tag) else {
            // It was aborted by another function.
            return;
        };
        match (reassigns, status) {
            // It has completed, with or without a response.
            (true, TmfStatus::TaskDoesNotExist) | (false, TmfStatus::Complete) => {
                self.model.on_silence(self.user.port);
                self.end_orphan(orphan);
            }
            (true, TmfStatus::Complete) => {
                coverage::note("rival's command", orphan.task.name(), "reassigned");
                let mut task = orphan.task;
                (task.connection, task.late) = (sent.connection, now + LATE);
                (task.is_doubtful, task.is_resumed, task.was_moved) = (true, true, true);
                self.tasks.insert(tag, task);
            }
            (true, TmfStatus::TaskStillAllegiant | TmfStatus::Rejected)
            | (false, TmfStatus::Succeeded | TmfStatus::Rejected) => {
                orphan.next = now + LATE.mul_f64(self.rng.f64());
                self.orphans.insert(tag, orphan);
            }
            (_, TmfStatus::LunDoesNotExist) if self.may_vanish => self.end_orphan(orphan),
            (_, status) => self.fail(&format!("{status:?} to {sent:?}")),
        }
    }

    /// Called when an orphan has no further effect.
    fn end_orphan(&self, orphan: Orphan) {
        if orphan.task.changes() {
            self.model.lose_change(self.user.port);
        }
        orphan.task.refuse(&self.user);
    }

    /// Called when a function has aborted all older orphans.
    pub(super) fn end_orphans_before(&mut self, sn: CmdSn) {
        let ends = |_: &u32, orphan: &mut Orphan| orphan.task.cmd_sn.is_before(sn);
        let ended: Vec<_> = self.orphans.extract_if(.., ends).collect();
        for (_, orphan) in ended {
            self.model.on_silence(self.user.port);
            self.end_orphan(orphan);
        }
    }

    /// Acknowledges Data-In, which is required at levels above 0 (RFC 7143 11.7.2).
    pub(super) fn acknowledge_data(&mut self, at: usize, header: &DataIn, now: Instant) {
        let snack = Snack {
            kind: SnackKind::DataAck,
            lun: header.lun,
            itt: header.itt,
            ttt: header.ttt,
            exp_stat_sn: self.connections[at].exp_stat_sn(),
            begin: header.data_sn.wrapping_add(1),
            run: 0,
        };
        self.connections[at].send(now, snack.header(), &[]);
    }
}
