//! Completion of requests: responses, aborts, and connection teardown.

use riser_scsi::step::Status;

use super::context::Cx;
use super::datamover::Datamover;
use super::executor::Executor;
use super::phase::Phase;
use super::task::{Task, TaskState};
use crate::fabric::{CommandFlow as _, End, TaskAction, TaskIdx, TaskRef};
use crate::pool::Pool;

impl<D: Datamover> Executor<D> {
    /// Removes the tag, so that other connections of the session can't find this task.
    fn forget_tag(&self, idx: TaskIdx) {
        if let Some(session) = &self.session {
            let itt = self.tasks[idx].itt;
            session.window.remove_tag(itt, self.tasks.task_ref(idx));
        }
    }

    /// The response was sent, but the command must be kept until it's acknowledged.
    pub(super) fn note_response(&mut self, cx: &Cx<'_>, idx: TaskIdx) {
        // It may already be acknowledged before we are notified that it was sent.
        let task = self.tasks.get_mut(idx);
        if let Some(task) = task.filter(|task| task.state == TaskState::Sent) {
            task.exec.timer.arrive(cx.now);
        }
    }

    /// Completes a request after its response was sent, or was lost with the connection.
    pub(super) fn finish_with_response(&mut self, cx: &mut Cx<'_>, idx: TaskIdx, was_sent: bool) {
        self.tasks[idx].exec.arrive(cx.now, was_sent);
        let response = self.tasks[idx].response.as_ref();
        self.timers
            .pace
            .on_moved(response.map_or(0, |response| response.data_in.len()));
        self.finish(cx, idx, End::Responded);
    }

    /// Completes a request: releases its resources and notifies its watchers.
    pub(super) fn finish(&mut self, cx: &mut Cx<'_>, idx: TaskIdx, end: End) {
        let context = self.end_request(cx.pool, idx, end);
        cx.spare.0.return_context(context);
    }

    /// Same as [`Channel::finish`], but returns the context of the request, which is now unused.
    pub(super) fn end_request(&mut self, pool: &mut Pool, idx: TaskIdx, end: End) -> Box<Task> {
        self.leave_task_set(idx);
        self.forget_tag(idx);
        // Another connection may be waiting for this command and would otherwise never release its
        // context.
        self.drop_claim(idx);
        let task = &mut self.tasks[idx];
        match end {
            End::Responded => {}
            End::Aborted => self.stats.counters.aborted += 1,
            End::TornDown => self.stats.counters.torn_down += 1,
        }
        let watchers = task.exec.finish(pool);
        self.report_gone(watchers);
        let session = self.session.as_ref().expect("full-feature phase");
        self.tasks.release_context(idx, &session.window)
    }

    /// Aborts a command without a response, either immediately or when its buffer is no longer used
    /// by a device.
    pub(super) fn abort(&mut self, cx: &mut Cx<'_>, idx: TaskIdx, watcher: Option<TaskRef>) {
        let task = &mut self.tasks[idx];
        if !task.is_command() {
            // The response is sent before ours, so the task is already complete for the initiator.
            if let Some(watcher) = watcher {
                self.request_action(TaskAction::TaskGone(watcher));
            }
            return;
        }
        task.exec.watchers.extend(watcher);
        task.exec.renounce();
        self.cut_short(cx, idx, End::Aborted);
    }

    /// Completes a command that was aborted by task management on this or another channel, either
    /// immediately or when its buffer is no longer used by a device.
    pub(super) fn end_managed(&mut self, cx: &mut Cx<'_>, idx: TaskIdx, watcher: TaskRef) {
        let task = &mut self.tasks[idx];
        if !task.is_command() {
            return self.abort(cx, idx, Some(watcher));
        }
        task.exec.watchers.push(watcher);
        if task.exec.aborted {
            return;
        }
        if self.stop(cx.pool, idx) {
            self.tasks[idx].exec.aborted = true;
        } else {
            self.end_aborted(cx, idx);
        }
    }

    /// Completes an aborted command after the device has released its buffer. If it was aborted by
    /// another nexus, we must send TASK ABORTED (SPC-4 7.5.8: TAS) because the initiator is waiting
    /// for a response.
    pub(super) fn end_aborted(&mut self, cx: &mut Cx<'_>, idx: TaskIdx) {
        let task = &self.tasks[idx];
        let is_over = matches!(self.phase, Phase::Closing | Phase::Closed);
        let is_awaited = !is_over && task.exec.is_cleared();
        // The same nexus may have aborted it on another connection.
        if !is_awaited || self.window().is_aborted(task.itt, self.tasks.task_ref(idx)) {
            return self.finish(cx, idx, End::Aborted);
        }
        let exec = &mut self.tasks[idx].exec;
        let watchers = exec.interrupt(cx.pool);
        self.report_gone(watchers);
        self.respond_with_status(cx, idx, Status::TaskAborted);
    }

    /// Aborts a request before its response was sent, either immediately or when its buffer is no
    /// longer used by a device.
    pub(super) fn cut_short(&mut self, cx: &mut Cx<'_>, idx: TaskIdx, end: End) {
        if self.tasks[idx].exec.aborted {
            return;
        }
        if self.stop(cx.pool, idx) {
            self.tasks[idx].exec.aborted = true;
        } else {
            self.finish(cx, idx, end);
        }
    }

    /// Stops processing a request. Returns true if the buffer is still used by a device or socket,
    /// or if the request belongs to another connection.
    fn stop(&mut self, pool: &mut Pool, idx: TaskIdx) -> bool {
        match self.tasks[idx].state {
            TaskState::AwaitBuffer => {
                self.backlog.leave_memory(pool, idx);
                false
            }
            TaskState::AwaitLimit => {
                self.backlog.limits.remove(idx);
                false
            }
            TaskState::Receive | TaskState::Send => self.mover.cancel_transfers(idx),
            TaskState::Expected => true,
            TaskState::Block => {
                self.request_action(TaskAction::AbortBlock(idx));
                true
            }
            _ => false,
        }
    }

    /// Aborts requests that wait for the initiator, because it is logging out, or for rate limits,
    /// because this would delay the logout.
    pub(super) fn abort_waiting(&mut self, cx: &mut Cx<'_>) {
        for idx in self.tasks.numbers() {
            let Some(task) = self.tasks.get(idx) else {
                continue;
            };
            let waits = match task.state {
                TaskState::Receive | TaskState::AwaitUnsolicited | TaskState::AwaitLimit => true,
                // Waiting for an acknowledgment.
                TaskState::Send => self.mover.recovers(),
                _ => false,
            };
            if waits {
                self.abort(cx, idx, None);
            }
        }
    }

    /// Aborts all requests with no buffer in use by a device or socket.
    pub(super) fn tear_down(&mut self, cx: &mut Cx<'_>, is_sending: bool) {
        for idx in self.tasks.numbers() {
            match self.tasks.get(idx).map(|task| task.state) {
                None => {}
                Some(TaskState::Sent) if is_sending => {}
                Some(_) => self.cut_short(cx, idx, End::TornDown),
            }
        }
    }
}
