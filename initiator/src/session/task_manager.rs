//! Abort and reset, as the sessions of SRP and iSCSI have them in common: a late command is
//! aborted, then its unit is reset, and a connection on which that fails is left.

use std::fmt::Debug;
use std::time::Instant;

use riser_scsi::lun::WireLun;
use riser_scsi::sense::Sense;

use super::core::{Core, Expired, SessionOutput};
use super::functions::{FunctionEnd, TaskFunction};
use super::{Down, Machine};
use crate::request::table::RequestState;
use crate::request::{Answer, attention_of, is_deferred, may_end_commands};

/// A session that ends late commands by task management. A fabric gives the methods without a body;
/// the others are the same for all.
pub(crate) trait TaskManager: Machine {
    /// Name of a started request for the target.
    type Tag: Copy + Debug + PartialEq;
    /// Output of the machine.
    type Output: SessionOutput;

    fn core(&mut self) -> &mut Core<Self::Tag, Self::Output>;

    /// Returns whether functions can be sent on a channel.
    fn is_established(&self, channel: u8) -> bool;

    /// Sends a function; false where the channel does not take it. `task` is the command that ABORT
    /// TASK names.
    fn send_function(
        &mut self,
        channel: u8,
        function: TaskFunction,
        lun: WireLun,
        task: Option<Self::Tag>,
    ) -> bool;

    /// The function to send after one that failed; `None` where the connection is to be left.
    fn plan_escalation(&mut self, failed: TaskFunction) -> Option<TaskFunction>;

    /// A command was ended by task management, and will not be answered.
    fn on_aborted(&mut self, index: u32, channel: u8, tag: Self::Tag, now: Instant);

    /// Begins to close every connection.
    fn disconnect_all(&mut self);

    /// A function was not answered in time, and its tag is given up.
    fn on_function_timeout(&mut self, _channel: u8) {}

    /// A request is about to end that waited in the queue for all of its time.
    fn on_queue_timeout(&mut self) {}

    /// Goes down for this reason; see [`Lifecycle::tear_down`](super::Lifecycle::tear_down).
    fn tear_down(&mut self, why: Down, last: bool) {
        if self.core().life.tear_down(why, last) {
            self.disconnect_all();
        }
    }

    /// Treats the requests whose time has come, in the order of submission.
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
                Expired::Leave => self.tear_down(Down::Unresponsive, false),
            }
        }
    }

    /// Ends the functions that were not answered in time.
    fn expire_functions(&mut self, now: Instant) {
        for channel in 0..self.core().functions.channels() {
            match self.core().functions.until(channel) {
                Some(until) if until <= now => {
                    self.on_function_timeout(channel);
                    self.on_function_end(channel, FunctionEnd::Failed, now);
                }
                Some(until) => self.core().arm(until),
                None => {}
            }
        }
    }

    /// Sends the next ABORT TASK of a channel, if there is one and no function is under way.
    fn pump_functions(&mut self, channel: u8, now: Instant) {
        while self.is_established(channel) {
            let Some(late) = self.core().functions.next_abort(channel) else {
                return;
            };
            // The answer may have come while the abort waited.
            if self.core().requests.aborting(late).is_some() {
                self.start_function(channel, TaskFunction::AbortTask(late), now);
            }
        }
    }

    /// Sends a function, and awaits its answer.
    fn start_function(&mut self, channel: u8, function: TaskFunction, now: Instant) {
        let requests = &self.core().requests;
        let (lun, task) = match function {
            TaskFunction::AbortTask(late) => {
                (requests.at(late.index).spec.lun, requests.aborting(late))
            }
            TaskFunction::LogicalUnitReset(lun) => (lun, None),
            TaskFunction::TargetReset => ([0; 8], None),
        };
        // Under way even when it cannot be sent, so that no other is tried meanwhile.
        let until = self.core().functions.begin(channel, function, now);
        match self.send_function(channel, function, lun, task) {
            true => self.core().arm(until),
            false => self.tear_down(Down::Unresponsive, false),
        }
    }

    /// Handles the end of the function that is under way on a channel, if there is one.
    fn on_function_end(&mut self, channel: u8, end: FunctionEnd, now: Instant) {
        let Some(function) = self.core().functions.take(channel) else {
            return;
        };
        let is_complete = end == FunctionEnd::Complete;
        match function {
            TaskFunction::AbortTask(late) => match self.core().requests.aborting(late) {
                // The answer came while the abort was under way.
                None => {}
                // A task that the target does not have is over: its answer would have come before.
                Some(tag) if is_complete || end == FunctionEnd::NoTask => {
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

    /// Goes on after a function that failed: with a stronger one, or with a new connection.
    fn escalate(&mut self, channel: u8, failed: TaskFunction, now: Instant) {
        match self.plan_escalation(failed) {
            Some(stronger) => self.start_function(channel, stronger, now),
            None => self.tear_down(Down::Unresponsive, false),
        }
    }

    /// A unit, or every unit, was reset by a function on this channel. Its commands that were sent
    /// there before will not be answered. Those of other channels may have arrived behind the
    /// reset, so each is aborted on its own channel, where the function arrives behind it.
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

    /// Holds requests back where a unit attention says that the unit may be another one.
    fn hold_if(&mut self, sense: Option<Sense>) {
        if self.core().may_be_another(sense) {
            self.hold();
        }
    }

    /// Handles the consequences of a unit attention for the unit and for other commands. A reset
    /// may have ended those that were sent before without an answer; aborting them shows which,
    /// once [`Self::pump_functions`] sends what is queued here. A deferred error is reported as well.
    fn on_attention(&mut self, index: u32, answer: &Answer) {
        let Some(attention) = attention_of(answer) else {
            self.core().on_executed(index, answer);
            if is_deferred(answer) {
                self.core().report_sense(index, answer);
            }
            return;
        };
        if may_end_commands(attention) {
            for (channel, late) in self.core().requests.abort_before(index) {
                self.core().functions.queue_abort(channel, late);
            }
        }
        self.hold_if(answer.sense());
        self.core().report_sense(index, answer);
    }
}
