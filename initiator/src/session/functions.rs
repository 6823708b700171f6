//! Task-management functions of a session: outstanding functions, and the requests waiting for
//! them.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use riser_scsi::lun::WireLun;

use crate::request::table::Late;

/// A task-management function, from the weakest to the strongest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum TaskFunction {
    /// ABORT TASK for this attempt at a request.
    AbortTask(Late),
    /// LOGICAL UNIT RESET for this unit.
    LogicalUnitReset(WireLun),
    /// TARGET WARM RESET, which terminates the commands of all units. Not available in SRP.
    TargetReset,
}

impl TaskFunction {
    fn is_reset(self) -> bool {
        !matches!(self, Self::AbortTask(_))
    }
}

/// Result of a task-management function.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum FunctionOutcome {
    /// The target executed it.
    Complete,
    /// The target does not have the task: its response was sent before, or it was never received.
    NoTask,
    /// The target rejected it, or it timed out.
    Failed,
}

/// An outstanding function.
#[derive(Clone, Copy, Debug)]
struct Pending {
    function: TaskFunction,
    until: Instant,
    /// Its timeout was extended.
    is_extended: bool,
}

/// Task management on one channel, with at most one outstanding function.
#[derive(Debug, Default)]
struct ChannelFunctions {
    /// The outstanding function.
    pending: Option<Pending>,
    /// Requests waiting for their ABORT TASK. Bound: the channel's queue size.
    aborts: VecDeque<Late>,
}

/// Task management on all channels of a session.
#[derive(Debug)]
pub(crate) struct TaskFunctions {
    channels: Box<[ChannelFunctions]>,
    /// A reset has completed, and the unit's commands on other channels are being aborted.
    is_sweeping: bool,
    /// Timeout of a function.
    patience: Duration,
}

impl TaskFunctions {
    pub(super) fn new(channels: u8, patience: Duration) -> Self {
        Self {
            channels: (0..channels).map(|_| ChannelFunctions::default()).collect(),
            is_sweeping: false,
            patience,
        }
    }

    pub(super) fn channels(&self) -> u8 {
        self.channels.len() as u8
    }

    /// Returns whether a function is outstanding on a channel.
    pub(crate) fn is_pending(&self, channel: u8) -> bool {
        self.at(channel).pending.is_some()
    }

    /// Removes the functions of a closed channel.
    pub(crate) fn clear(&mut self, channel: u8) {
        let functions = self.at_mut(channel);
        functions.pending = None;
        functions.aborts.clear();
    }

    /// Returns whether a request may be started. This is not allowed during a reset: then all
    /// commands outstanding on the channel when the reset completes were sent before it, and are
    /// terminated by it. The subsequent aborts on other channels are a part of the reset.
    pub(crate) fn may_start(&mut self) -> bool {
        let is_reset = |f: &ChannelFunctions| f.pending.is_some_and(|p| p.function.is_reset());
        if self.channels.iter().any(is_reset) {
            return false;
        }
        let is_aborting = |f: &ChannelFunctions| f.pending.is_some() || !f.aborts.is_empty();
        self.is_sweeping = self.is_sweeping && self.channels.iter().any(is_aborting);
        !self.is_sweeping
    }

    /// Queues the ABORT TASK of an attempt.
    pub(super) fn queue_abort(&mut self, channel: u8, late: Late) {
        self.at_mut(channel).aborts.push_back(late);
    }

    /// Removes the next attempt to abort, unless a function is outstanding.
    pub(super) fn next_abort(&mut self, channel: u8) -> Option<Late> {
        let functions = self.at_mut(channel);
        match functions.pending {
            None => functions.aborts.pop_front(),
            Some(_) => None,
        }
    }

    /// Called when a reset has completed, and commands on other channels are aborted one at a time.
    pub(super) fn begin_sweep(&mut self) {
        self.is_sweeping = true;
    }

    /// Called when a function is sent. Returns the time at which it times out.
    pub(super) fn start_function(
        &mut self,
        channel: u8,
        function: TaskFunction,
        now: Instant,
    ) -> Instant {
        let until = now + self.patience;
        self.at_mut(channel).pending = Some(Pending {
            function,
            until,
            is_extended: false,
        });
        until
    }

    /// Returns the time at which the function of a channel times out.
    pub(super) fn until(&self, channel: u8) -> Option<Instant> {
        self.at(channel).pending.map(|pending| pending.until)
    }

    /// Called when a channel's function is in transit to the target. The timeout of an ABORT TASK
    /// restarts: it is bounded by the timeout of its request, and a reset instead would affect
    /// other initiators. The timeout of a reset is doubled once, because no request is started
    /// before its completion.
    pub(crate) fn on_progress(&mut self, channel: u8, now: Instant) {
        let patience = self.patience;
        let Some(pending) = &mut self.at_mut(channel).pending else {
            return;
        };
        if !pending.function.is_reset() {
            pending.until = now + patience;
        } else if !pending.is_extended {
            pending.until += patience;
            pending.is_extended = true;
        }
    }

    /// Removes the outstanding function when it has finished.
    pub(super) fn remove_function(&mut self, channel: u8) -> Option<TaskFunction> {
        let pending = self.at_mut(channel).pending.take();
        pending.map(|pending| pending.function)
    }

    fn at(&self, channel: u8) -> &ChannelFunctions {
        &self.channels[usize::from(channel)]
    }

    fn at_mut(&mut self, channel: u8) -> &mut ChannelFunctions {
        &mut self.channels[usize::from(channel)]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reset_and_its_aborts_delay_requests() {
        let now = Instant::now();
        let mut functions = TaskFunctions::new(2, Duration::from_secs(1));
        assert!(functions.may_start());
        functions.start_function(0, TaskFunction::LogicalUnitReset([0; 8]), now);
        assert!(!functions.may_start());
        functions.remove_function(0);
        functions.begin_sweep();
        functions.start_function(1, TaskFunction::TargetReset, now);
        assert!(!functions.may_start());
        functions.clear(1);
        assert!(
            functions.may_start(),
            "the channel with the aborts has gone"
        );
    }
}
