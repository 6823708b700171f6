//! Task-management functions of a session: those under way, and the requests that wait for theirs.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use riser_scsi::lun::WireLun;

use crate::request::table::Late;

/// A task-management function, from the mildest to the strongest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum TaskFunction {
    /// ABORT TASK of that attempt at a request.
    AbortTask(Late),
    /// LOGICAL UNIT RESET of that unit.
    LogicalUnitReset(WireLun),
    /// TARGET WARM RESET, which ends the commands of every unit. SRP does not have it.
    TargetReset,
}

impl TaskFunction {
    fn is_reset(self) -> bool {
        !matches!(self, Self::AbortTask(_))
    }
}

/// End of a task-management function.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum FunctionEnd {
    /// The target carried it out.
    Complete,
    /// The target does not have the task: its answer came before this one, or it never arrived.
    NoTask,
    /// The target refused it, or did not answer in time.
    Failed,
}

/// A function whose answer is awaited.
#[derive(Clone, Copy, Debug)]
struct Pending {
    function: TaskFunction,
    until: Instant,
    /// It has been given more time.
    is_extended: bool,
}

/// Task management on one channel, with one function under way at a time.
#[derive(Debug, Default)]
struct ChannelFunctions {
    /// The function under way.
    pending: Option<Pending>,
    /// Requests that wait for their ABORT TASK. Bound: the channel's queue size.
    aborts: VecDeque<Late>,
}

/// Task management on every channel of a session.
#[derive(Debug)]
pub(crate) struct TaskFunctions {
    channels: Box<[ChannelFunctions]>,
    /// A reset is over, and its unit's commands of other channels are being aborted.
    is_sweeping: bool,
    /// Longest wait for an answer.
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

    /// Returns whether the answer to a function is awaited on a channel.
    pub(crate) fn is_pending(&self, channel: u8) -> bool {
        self.at(channel).pending.is_some()
    }

    /// Forgets the functions of a channel, which has gone.
    pub(crate) fn clear(&mut self, channel: u8) {
        let functions = self.at_mut(channel);
        functions.pending = None;
        functions.aborts.clear();
    }

    /// Returns whether a request may be started. During a reset none may: each command that is
    /// outstanding on the reset's channel when it is answered was then sent before it, and is ended
    /// by it. The aborts that follow a reset on other channels belong to it.
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

    /// Takes the next attempt to abort, unless a function is under way.
    pub(super) fn next_abort(&mut self, channel: u8) -> Option<Late> {
        let functions = self.at_mut(channel);
        match functions.pending {
            None => functions.aborts.pop_front(),
            Some(_) => None,
        }
    }

    /// A reset has ended, and commands of other channels are aborted one by one.
    pub(super) fn begin_sweep(&mut self) {
        self.is_sweeping = true;
    }

    /// A function is under way. Returns the time until which its answer is awaited.
    pub(super) fn begin(&mut self, channel: u8, function: TaskFunction, now: Instant) -> Instant {
        let until = now + self.patience;
        self.at_mut(channel).pending = Some(Pending {
            function,
            until,
            is_extended: false,
        });
        until
    }

    /// The time until which the answer to a channel's function is awaited.
    pub(super) fn until(&self, channel: u8) -> Option<Instant> {
        self.at(channel).pending.map(|pending| pending.until)
    }

    /// The function of a channel is on its way to the target. An ABORT TASK has its time again: it
    /// ends with its request's, and a reset in its place would hit other initiators. A reset has
    /// twice its time and no more, since nothing is started before it is over.
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

    /// Takes the function that is under way, which is over.
    pub(super) fn take(&mut self, channel: u8) -> Option<TaskFunction> {
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
    fn nothing_is_started_during_a_reset_and_the_aborts_that_follow_it() {
        let now = Instant::now();
        let mut functions = TaskFunctions::new(2, Duration::from_secs(1));
        assert!(functions.may_start());
        functions.begin(0, TaskFunction::LogicalUnitReset([0; 8]), now);
        assert!(!functions.may_start());
        functions.take(0);
        functions.begin_sweep();
        functions.begin(1, TaskFunction::TargetReset, now);
        assert!(!functions.may_start());
        functions.clear(1);
        assert!(
            functions.may_start(),
            "the channel with the aborts has gone"
        );
    }
}
