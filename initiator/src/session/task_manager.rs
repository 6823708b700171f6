//! Aborts and resets, common to SRP and iSCSI sessions: a late command is aborted, then its unit is
//! reset, and if this fails, the connection is closed.

use std::fmt::Debug;
use std::time::Instant;

use riser_scsi::lun::WireLun;
use riser_scsi::sense::Sense;

use super::core::{Core, Expired, SessionOutput};
use super::functions::{FunctionOutcome, TaskFunction};
use super::{Down, Machine};
use crate::request::table::RequestState;
use crate::request::{CommandResponse, attention_of, is_deferred, may_end_commands};

/// A session that aborts late commands with task management. A protocol implements the methods
/// without a default; the other methods are shared.
pub(crate) trait TaskManager: Machine {
    /// Identifier of a started request at the target.
    type Tag: Copy + Debug + PartialEq;
    /// Output of the machine.
    type Output: SessionOutput;

    fn core(&mut self) -> &mut Core<Self::Tag, Self::Output>;

    /// Returns whether functions can be sent on a channel.
    fn is_established(&self, channel: u8) -> bool;

    /// Sends a function; returns false if the channel does not accept it. `task` is the command to
    /// abort with ABORT TASK.
    fn send_function(
        &mut self,
        channel: u8,
        function: TaskFunction,
        lun: WireLun,
        task: Option<Self::Tag>,
    ) -> bool;

    /// Returns the function to send after a failed one, or `None` if the connection must be closed.
    fn plan_escalation(&mut self, failed: TaskFunction) -> Option<TaskFunction>;

    /// Called when a command was terminated by task management, so it will not get a response.
    fn on_aborted(&mut self, index: u32, channel: u8, tag: Self::Tag, now: Instant);

    /// Starts to close all connections.
    fn disconnect_all(&mut self);

    /// Called when a function timed out; its tag is abandoned.
    fn on_function_timeout(&mut self, _channel: u8) {}

    /// Called when a queued request is about to time out.
    fn on_queue_timeout(&mut self) {}

    /// Tears down the session for this reason; see
    /// [`Lifecycle::tear_down`](super::Lifecycle::tear_down).
    fn tear_down(&mut self, why: Down, last: bool) {
        if self.core().life.tear_down(why, last) {
            self.disconnect_all();
        }
    }

    /// Handles timed-out requests in order of submission.
    fn expire_requests(&mut self, now: Instant) {
        for late in self.core().plan_late(now) {
            if self.core().requests.at(late.index).state == RequestState::Queued {
                self.on_queue_timeout();
            }
            match self.core().expire(late, now) {
                Expired::Nothing => {}
                Expired::Abort(channel) => {
                    self.core().functions.queue_abort(channel, late);
                    self.pump_functions(channel, now);
                }
                Expired::Disconnect => self.tear_down(Down::Unresponsive, false),
            }
        }
    }

    /// Fails the functions that timed out.
    fn expire_functions(&mut self, now: Instant) {
        for channel in 0..self.core().functions.channels() {
            match self.core().functions.until(channel) {
                Some(until) if until <= now => {
                    self.on_function_timeout(channel);
                    self.on_function_completed(channel, FunctionOutcome::Failed, now);
                }
                Some(until) => self.core().arm(until),
                None => {}
            }
        }
    }

    /// Sends the next ABORT TASK of a channel, if any, unless a function is outstanding.
    fn pump_functions(&mut self, channel: u8, now: Instant) {
        while self.is_established(channel) {
            let Some(late) = self.core().functions.next_abort(channel) else {
                return;
            };
            // The response may have been received while the abort was queued.
            if self.core().requests.aborting(late).is_some() {
                self.start_function(channel, TaskFunction::AbortTask(late), now);
            }
        }
    }

    /// Sends a function and starts its timeout.
    fn start_function(&mut self, channel: u8, function: TaskFunction, now: Instant) {
        let requests = &self.core().requests;
        let (lun, task) = match function {
            TaskFunction::AbortTask(late) => {
                (requests.at(late.index).spec.lun, requests.aborting(late))
            }
            TaskFunction::LogicalUnitReset(lun) => (lun, None),
            TaskFunction::TargetReset => ([0; 8], None),
        };
        // Treat the function as outstanding even if it cannot be sent, so that no other one is
        // tried.
        let until = self.core().functions.start_function(channel, function, now);
        match self.send_function(channel, function, lun, task) {
            true => self.core().arm(until),
            false => self.tear_down(Down::Unresponsive, false),
        }
    }

    /// Handles the result of the outstanding function on a channel, if any.
    fn on_function_completed(&mut self, channel: u8, end: FunctionOutcome, now: Instant) {
        let Some(function) = self.core().functions.remove_function(channel) else {
            return;
        };
        let is_complete = end == FunctionOutcome::Complete;
        match function {
            TaskFunction::AbortTask(late) => match self.core().requests.aborting(late) {
                // The response was received while the abort was outstanding.
                None => {}
                // A task unknown to the target has finished: its response would have been received
                // before.
                Some(tag) if is_complete || end == FunctionOutcome::NoTask => {
                    self.on_aborted(late.index, channel, tag, now);
                }
                Some(_) => self.escalate(channel, function, now),
            },
            TaskFunction::LogicalUnitReset(lun) if is_complete => {
                self.on_reset(Some(lun), channel, now);
            }
            TaskFunction::TargetReset if is_complete => self.on_reset(None, channel, now),
            TaskFunction::LogicalUnitReset(_) | TaskFunction::TargetReset => {
                self.escalate(channel, function, now);
            }
        }
        self.pump_functions(channel, now);
    }

    /// Continues after a failed function: with a stronger one, or with a new connection.
    fn escalate(&mut self, channel: u8, failed: TaskFunction, now: Instant) {
        match self.plan_escalation(failed) {
            Some(stronger) => self.start_function(channel, stronger, now),
            None => self.tear_down(Down::Unresponsive, false),
        }
    }

    /// Called when a function on this channel has reset a unit or all units. Commands sent before
    /// it on this channel will not get a response. Commands on other channels may have been
    /// received after the reset, so each is aborted on its own channel, where the function follows
    /// it.
    fn on_reset(&mut self, lun: Option<WireLun>, here: u8, now: Instant) {
        self.core().on_own_reset(lun);
        for (index, channel, tag) in self.core().requests.outstanding(lun) {
            if channel == here {
                self.on_aborted(index, channel, tag, now);
            } else {
                self.core().sweep(index, channel);
            }
        }
        for channel in 0..self.core().functions.channels() {
            if channel != here {
                self.pump_functions(channel, now);
            }
        }
    }

    /// Holds requests if a unit attention indicates that the unit may be a different one.
    fn hold_if(&mut self, sense: Option<Sense>) {
        if self.core().may_be_another(sense) {
            self.hold_requests();
        }
    }

    /// Handles the consequences of a unit attention for the unit and for other commands. A reset
    /// may have terminated earlier commands without a response. Aborting them determines which,
    /// once [`Self::pump_functions`] sends the aborts queued here. A deferred error is also
    /// reported.
    fn on_attention(&mut self, index: u32, response: &CommandResponse) {
        let Some(attention) = attention_of(response) else {
            self.core().on_executed(index, response);
            if is_deferred(response) {
                self.core().report_sense(index, response);
            }
            return;
        };
        if may_end_commands(attention) {
            for (channel, late) in self.core().requests.abort_before(index) {
                self.core().functions.queue_abort(channel, late);
            }
        }
        self.hold_if(response.sense());
        self.core().report_sense(index, response);
    }
}
