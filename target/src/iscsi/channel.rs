//! Channel: state of a connection and its session.
//!
//! # Usage
//! 1. Call [`Channel::new`] when the connection is established.
//! 2. Pass inputs in any order: [`Channel::handle_frame`], [`Channel::handle_done`],
//!    [`Channel::handle_block_done`], [`Channel::handle_pool`], [`Channel::handle_timeout`],
//!    [`Channel::handle_disconnected`], and messages from other channels:
//!    [`Channel::handle_task_start`], [`Channel::handle_abort`], [`Channel::handle_task_gone`].
//! 3. After each input, call [`Channel::poll_action`] until it returns `None`.
//! 4. After [`Action::Release`], the channel holds no resources and can be dropped.

use std::fmt::Display;
use std::sync::Arc;
use std::time::Instant;

use riser_scsi::iscsi::login::{ConnectionParams, TargetLogin};
use riser_scsi::iscsi::{Cid, CmdSn, Itt, Numbers, StatSn};
use riser_scsi::step::StepResult;

use super::action::Action;
use super::config::ChannelConfig;
use super::context::Cx;
use super::datamover::Datamover;
use super::executor::Executor;
use super::pending::{LoginResult, RequestQueue, TextState};
use super::phase::Phase;
use super::task::{Task, TaskState};
use crate::audit::CloseReason;
use crate::fabric::{CommandFlow, Contexts, LunMap, TaskIdx, TaskRef};
use crate::pool::Buffer;
use crate::stats::SessionEvent;
use crate::warn_limited;

/// Maximum number of PDUs and transfers in the send queue before we stop reading.
pub const MAX_QUEUED: usize = 512;

/// Maximum size of control-type PDU data in the send queue before we stop reading, in bytes.
/// Command data isn't included because it's already stored in pool buffers.
pub const MAX_QUEUED_BYTES: usize = 256 << 10;

/// Connection with an initiator.
#[derive(Debug)]
pub struct Channel<D> {
    pub(super) executor: Executor<D>,
    pub(super) login: TargetLogin,
    pub(super) new_params: Option<ConnectionParams>,
    /// Logouts for other connections. We send the response when those connections have released
    /// their resources.
    pub(super) logouts: Vec<Itt>,
    /// First CmdSN, as set by the login request.
    pub(super) first_cmd_sn: CmdSn,
    /// Requests received out of order.
    pub(super) waiting: RequestQueue,
    /// Final login response, while waiting for replaced sessions.
    pub(super) entering: Option<Box<LoginResult>>,
    /// The logout is waiting for other connections of the session to close.
    pub(super) awaits_others: bool,
    /// The current logout closes the session.
    pub(super) ends_session: bool,
    /// The logout response was sent.
    pub(super) logged_out: bool,
    pub(super) text: TextState,
    pub(super) cid: Cid,
    pub(super) is_connected: bool,
    pub(super) is_flushed: bool,
    pub(super) released: bool,
}

/// Buffers of all contexts, used by the datamover.
#[derive(Clone, Copy)]
pub struct TaskBuffers<'a>(&'a Contexts<Task>);

impl<'a> TaskBuffers<'a> {
    /// Returns the buffer of a task with a data transfer in progress.
    pub fn buffer(&self, task: TaskIdx) -> &'a Buffer {
        let buffer = self.0[task].exec.buffer.as_ref();
        buffer.expect("data lie in a buffer")
    }
}

impl<D: Datamover> Channel<D> {
    /// Creates a channel in login phase.
    #[must_use]
    pub fn new(config: ChannelConfig, mover: D, now: Instant) -> Self {
        Self {
            executor: Executor::new(config, mover, now),
            login: TargetLogin::new(),
            new_params: None,
            logouts: Vec::new(),
            first_cmd_sn: CmdSn(0),
            waiting: RequestQueue::default(),
            entering: None,
            awaits_others: false,
            ends_session: false,
            logged_out: false,
            text: TextState::default(),
            cid: Cid(0),
            is_connected: true,
            is_flushed: true,
            released: false,
        }
    }

    /// Returns the session, and the requests of the connection.
    #[must_use]
    pub fn executor(&self) -> &Executor<D> {
        &self.executor
    }

    /// Returns the requests of the connection for events of the datamover.
    pub(crate) fn executor_mut(&mut self) -> &mut Executor<D> {
        &mut self.executor
    }

    /// Returns true if this connection can receive commands, which means that a normal session has
    /// reached full-feature phase.
    #[must_use]
    pub fn takes_commands(&self) -> bool {
        self.executor.tasks.bound() > 0
    }

    /// Returns the memory in bytes used by contexts and by unsolicited data without a buffer.
    #[must_use]
    pub fn memory(&self) -> usize {
        match self.takes_commands() && self.executor.session.is_some() {
            true => self.executor.config.memory() + self.executor.staged_memory(),
            false => 0,
        }
    }

    /// Returns the current phase.
    #[must_use]
    pub fn phase(&self) -> Phase {
        self.executor.phase
    }

    /// Returns the channel configuration.
    #[must_use]
    pub fn config(&self) -> &ChannelConfig {
        &self.executor.config
    }

    /// Returns true if received data will be processed.
    #[must_use]
    pub fn is_receiving(&self) -> bool {
        matches!(
            self.executor.phase,
            Phase::Login | Phase::FullFeature | Phase::LoggingOut(_)
        )
    }

    /// Returns true if we should read from the connection. This is false when the send queue is
    /// full.
    #[must_use]
    pub fn wants_input(&self) -> bool {
        self.is_receiving() && self.has_room()
    }

    /// Returns true if the send queue isn't full.
    #[must_use]
    pub fn has_room(&self) -> bool {
        self.executor.mover.queued() < MAX_QUEUED
            && self.executor.mover.queued_bytes() < MAX_QUEUED_BYTES
    }

    /// Returns when to call [`Channel::handle_timeout`].
    #[must_use]
    pub fn deadline(&self) -> Option<Instant> {
        let (phase, is_discovery) = (self.executor.phase, self.executor.is_discovery());
        let timers = self.executor.timers.deadline(phase, is_discovery);
        let limits = self.executor.backlog.limits.deadline();
        [timers, limits].into_iter().flatten().min()
    }

    /// Returns the next action.
    pub fn poll_action(&mut self) -> Option<Action> {
        self.executor.actions.pop_front()
    }

    /// Returns the negotiated connection parameters after login. They are returned only once.
    pub fn take_new_params(&mut self) -> Option<ConnectionParams> {
        self.new_params.take()
    }

    /// Returns the datamover.
    #[must_use]
    pub fn mover(&self) -> &D {
        &self.executor.mover
    }

    /// Returns the datamover for connection events.
    pub fn mover_mut(&mut self) -> &mut D {
        &mut self.executor.mover
    }

    /// Handles an error in the stream, which we can't parse any further. Counted as `event`.
    pub fn handle_broken(&mut self, cx: &mut Cx<'_>, event: SessionEvent, error: impl Display) {
        cx.gate.count(event);
        warn_limited!(self.executor.complaints, cx.now, %error, "the connection is broken");
        self.executor.ended.get_or_insert(CloseReason::Protocol);
        self.lose_connection(cx.now);
        self.finish_input(cx);
    }

    /// Called when the last PDU of a task, or a piece of its data, was sent. `ok` is false if this
    /// failed.
    pub fn handle_done(&mut self, cx: &mut Cx<'_>, task: TaskIdx, ok: bool) {
        self.executor.timers.last_taken = cx.now;
        if self.executor.tasks[task].state == TaskState::Send {
            self.executor.on_piece_sent(cx, task);
        } else {
            self.executor.finish_with_response(cx, task, ok);
        }
    }

    /// Called when the current batch was sent, or can't be sent if `ok` is false.
    pub fn handle_flushed(&mut self, cx: &mut Cx<'_>, ok: bool) {
        self.is_flushed = true;
        if !ok {
            self.lose_connection(cx.now);
        }
        self.finish_input(cx);
    }

    /// Handles a completed block operation.
    pub fn handle_block_done(&mut self, cx: &mut Cx<'_>, task: TaskIdx, result: StepResult) {
        self.executor.on_block_done(cx, task, result);
        self.finish_input(cx);
    }

    /// Called when the datamover has completed or canceled the data transfer for a task.
    ///
    /// # Panics
    /// Panics if there is no transfer.
    pub fn handle_arrived(&mut self, cx: &mut Cx<'_>, task: TaskIdx, ok: bool) {
        self.executor.on_arrived(cx, task, ok);
        self.finish_input(cx);
    }

    /// Called when a task can start because the tasks it was waiting for have completed.
    pub fn handle_task_start(&mut self, cx: &mut Cx<'_>, task: TaskRef) {
        self.executor.on_task_start(cx, task);
        self.finish_input(cx);
    }

    /// Handles an abort of one of our tasks by task management on this or another channel.
    pub fn handle_abort(&mut self, cx: &mut Cx<'_>, task: TaskRef, watcher: TaskRef) {
        self.executor.on_abort(cx, task, watcher);
        self.finish_input(cx);
    }

    /// Called when a task that a function is waiting for has completed.
    pub fn handle_task_gone(&mut self, cx: &mut Cx<'_>, watcher: TaskRef) {
        self.executor.on_task_gone(watcher);
        self.finish_input(cx);
    }

    /// Called when memory was released to the pool.
    pub fn handle_pool(&mut self, cx: &mut Cx<'_>) {
        self.executor.poll_memory(cx);
        self.finish_input(cx);
    }

    /// Called when a deadline might have expired.
    pub fn handle_timeout(&mut self, cx: &mut Cx<'_>) {
        if self.executor.timers.poll_phase(cx.now) {
            self.on_time_over(cx);
        }
        self.executor.poll_limits(cx);
        if self.executor.timers.is_data_due(cx.now) {
            self.check_data(cx);
        }
        let (phase, is_discovery) = (self.executor.phase, self.executor.is_discovery());
        if self.executor.timers.is_idle(phase, is_discovery, cx.now) {
            if is_discovery {
                self.executor.ended.get_or_insert(CloseReason::Silent);
                self.drop_connection();
            } else if self.executor.timers.is_pinging() {
                cx.gate.count(SessionEvent::TimedOut);
                warn_limited!(
                    self.executor.complaints,
                    cx.now,
                    "timed out waiting for a response from the initiator"
                );
                self.executor.ended.get_or_insert(CloseReason::Silent);
                self.lose_connection(cx.now);
            } else {
                self.executor.send_ping(cx.now);
            }
        }
        self.finish_input(cx);
    }

    /// Called when the connection is closed and no more data can be sent or received.
    pub fn handle_disconnected(&mut self, cx: &mut Cx<'_>) {
        self.is_connected = false;
        self.lose_connection(cx.now);
        self.finish_input(cx);
    }

    /// Called when the initiator closes the connection. [`Channel::handle_disconnected`] is called
    /// next.
    pub fn note_closed(&mut self) {
        self.executor.ended.get_or_insert(CloseReason::Closed);
    }

    /// Closes the connection if the initiator takes too long to move its data.
    pub(super) fn check_data(&mut self, cx: &mut Cx<'_>) {
        if self.executor.check_data(cx) {
            self.lose_connection(cx.now);
        }
    }

    /// Returns the reason for closing the connection.
    #[must_use]
    pub fn close_reason(&self) -> CloseReason {
        self.executor.ended.unwrap_or(CloseReason::Lost)
    }

    /// Updates the LUN map for the initiator. Commands in flight aren't affected.
    pub fn handle_luns(&mut self, luns: Arc<LunMap>) {
        if let Some(session) = &mut self.executor.session {
            self.executor.stats.accounts.follow(&luns);
            session.luns = luns;
        }
    }

    /// Called when the rate limits for units or for the initiator have changed.
    pub fn handle_limits(&mut self, cx: &mut Cx<'_>) {
        let luns = self.executor.session.as_ref().map(|session| &session.luns);
        let limiter = luns.and_then(|luns| luns.limiter());
        self.executor.backlog.limits.rebook(limiter, cx.now);
        self.executor.poll_limits(cx);
        self.finish_input(cx);
    }

    /// Returns true if the initiator has logged out before the connection was closed.
    #[must_use]
    pub fn has_logged_out(&self) -> bool {
        self.logged_out
    }

    /// Returns the connection ID.
    #[must_use]
    pub fn cid(&self) -> Cid {
        self.cid
    }

    fn numbers(&self) -> Numbers {
        let (exp_cmd_sn, max_cmd_sn) = match &self.executor.session {
            Some(session) => session.window.bounds(),
            None => {
                let more = u32::from(self.executor.config.commands).wrapping_sub(1);
                (self.first_cmd_sn, self.first_cmd_sn.plus(more))
            }
        };
        Numbers {
            stat_sn: StatSn(0),
            exp_cmd_sn,
            max_cmd_sn,
        }
    }

    /// Lets the datamover send data. Returns true if there was something to send.
    pub fn poll_mover(
        &mut self,
        poll: impl FnOnce(&mut D, Numbers, TaskBuffers<'_>) -> bool,
    ) -> bool {
        if matches!(
            self.executor.phase,
            Phase::CleanupWait | Phase::Retaining | Phase::Closed
        ) {
            return false;
        }
        // In this case we don't need to lock the command window, which is shared by all connections
        // of the session.
        if self.executor.mover.queued() == 0 {
            return false;
        }
        let numbers = self.numbers();
        let is_posted = poll(
            &mut self.executor.mover,
            numbers,
            TaskBuffers(&self.executor.tasks),
        );
        self.is_flushed &= !is_posted;
        is_posted
    }
}
