//! The channel: an RC connection with an initiator.
//!
//! # Calling order
//! 1. [`Channel::new`] after the login was accepted. The first actions post the receives.
//! 2. Inputs, in any order: [`Channel::handle_recv`], [`Channel::handle_post_done`],
//!    [`Channel::handle_block_done`], [`Channel::handle_pool`], [`Channel::handle_established`],
//!    [`Channel::handle_disconnected`], [`Channel::handle_timeout`], and messages from other
//!    channels: [`Channel::handle_others_gone`], [`Channel::handle_task_start`],
//!    [`Channel::handle_abort`], [`Channel::handle_task_gone`].
//! 3. After each input, [`Channel::poll_action`] until it returns `None`.
//! 4. After [`Action::Release`], the channel is [`ChState::Disconnected`]. It no longer holds any
//!    resources, and can be dropped.

use std::collections::VecDeque;
use std::time::Instant;

use riser_scsi::srp::{Cmd, FromInitiator, Opcode, SrpError, TLogoutReason, Tag};
use riser_scsi::step::StepResult;
use riser_state::{State, become_state};

use super::action::{Action, Counters};
use super::config::ChannelConfig;
use super::ioctx::{IoctxState, RecvIdx, SendIoctx};
use super::own::{Kind, OwnMessages};
use super::requests::RequestTable;
use super::rings::ReceiveRing;
use super::sender::Sender;
use super::timers::Timers;
use crate::audit::CloseReason;
use crate::fabric::{Backlog, CallContext, CommandFlow, Spare, Statistics, TaskIdx};
use crate::log::RateLimit;
use crate::pool::Pool;
use crate::warn_limited;

/// State of a channel. The names are the same as in `rdma_ch_state`.
///
/// ```text
///  Connecting ──established──→ Joining ──replaced session closed───────→ Live
///      │                         │   │                                   │   │
///      │                         │   └──→ Disconnecting ←── logout, ─────┘   │
///      │                         │   (T_LOGOUT in flight)   shutdown         │
///      │                         │            │ sent, or timeout             │
///      │                         v            v                              │
///      └── disconnected, ────→ Draining (queue pair in error) ←──────────────┘
///          timeout                └──all completed──→ Disconnected
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ChState {
    /// Accepted, but not established yet. Requests are queued.
    Connecting,
    /// Established, but the channels of the replaced session still have commands in flight.
    /// Requests are queued.
    Joining,
    /// Receiving and executing requests.
    Live,
    /// Not receiving requests any more. A T_LOGOUT with the reason is in flight.
    Disconnecting,
    /// The queue pair is being flushed, and devices may still use buffers.
    Draining,
    /// No resources left. The channel can be dropped.
    Disconnected,
}

impl State for ChState {
    fn may_become(&self, next: &Self) -> bool {
        match self {
            Self::Connecting => matches!(next, Self::Joining | Self::Draining),
            Self::Joining => matches!(next, Self::Live | Self::Disconnecting | Self::Draining),
            Self::Live => matches!(next, Self::Disconnecting | Self::Draining),
            Self::Disconnecting => matches!(next, Self::Draining),
            Self::Draining => matches!(next, Self::Disconnected),
            Self::Disconnected => false,
        }
    }
}

/// The worker's time and memory for the duration of a call.
#[derive(Debug)]
pub struct Cx<'a> {
    /// Time of the worker's current round.
    pub now: Instant,
    /// The worker's data buffers.
    pub pool: &'a mut Pool,
    /// Unused contexts of the worker.
    pub spare: &'a mut Spare<SendIoctx>,
}

impl CallContext for Cx<'_> {
    fn now(&self) -> Instant {
        self.now
    }

    fn pool(&mut self) -> &mut Pool {
        self.pool
    }
}

/// A connection with an initiator.
#[derive(Debug)]
pub struct Channel {
    pub(super) config: ChannelConfig,
    pub(super) state: ChState,
    /// Requests in flight.
    pub(super) requests: RequestTable,
    /// The receive ring, and received messages that were not handled yet.
    pub(super) receives: ReceiveRing,
    /// The send ring, credits, and chains in flight.
    pub(super) sender: Sender,
    /// Messages initiated by the target.
    pub(super) own: OwnMessages,
    /// Deadlines, and the time for the initiator to move its data.
    pub(super) timers: Timers,
    /// Commands waiting for memory or rate limits.
    pub(super) backlog: Backlog,
    pub(super) blocks_in_flight: u32,
    notified: bool,
    pub(super) drained: bool,
    /// Set if requests should complete without being executed.
    pub(super) torn_down: bool,
    pub(super) actions: VecDeque<Action>,
    pub(super) stats: Statistics<Counters>,
    /// The reason why the channel was closed, if known.
    pub(super) ended: Option<CloseReason>,
    pub(super) complaints: RateLimit,
}

impl Channel {
    /// Creates a channel in state [`ChState::Connecting`]. Its first actions post all receives.
    ///
    /// # Panics
    /// If the rings are too small.
    #[must_use]
    pub fn new(config: ChannelConfig, now: Instant) -> Self {
        let params = config.params;
        Self {
            state: ChState::Connecting,
            requests: RequestTable::new(&config),
            receives: ReceiveRing::new(&params, config.receive_ring.clone()),
            sender: Sender::new(&config),
            own: OwnMessages::new(&params),
            timers: Timers::new(now, config.data_out_timeout, params.req_lim),
            backlog: Backlog::new(config.serial, params.req_lim as usize),
            blocks_in_flight: 0,
            notified: false,
            drained: false,
            torn_down: false,
            actions: VecDeque::with_capacity(2 * params.receives() as usize),
            stats: Statistics::default(),
            ended: None,
            complaints: RateLimit::default(),
            config,
        }
    }

    /// Returns the state of the channel.
    #[must_use]
    pub fn state(&self) -> ChState {
        self.state
    }

    /// Returns the parameters of this channel.
    #[must_use]
    pub fn config(&self) -> &ChannelConfig {
        &self.config
    }

    /// Returns the statistics of the channel.
    #[must_use]
    pub fn stats(&self) -> &Statistics<Counters> {
        &self.stats
    }

    /// Called when the initiator has closed the connection, before
    /// [`Channel::handle_disconnected`].
    pub fn note_closed(&mut self) {
        self.ended.get_or_insert(CloseReason::Closed);
    }

    /// Returns the reason why the channel was closed.
    #[must_use]
    pub fn close_reason(&self) -> CloseReason {
        self.ended.unwrap_or(CloseReason::Lost)
    }

    /// Returns the send side: credits and the send ring.
    pub(crate) fn sender(&self) -> &Sender {
        &self.sender
    }

    /// Returns the receive ring.
    pub(crate) fn receives(&self) -> &ReceiveRing {
        &self.receives
    }

    /// Returns the requests in flight.
    pub(crate) fn requests(&self) -> &RequestTable {
        &self.requests
    }

    /// Returns the number of times that commands for a unit started to wait for pool memory.
    #[must_use]
    pub fn pool_waits_begun(&self) -> u64 {
        self.backlog.waits_begun()
    }

    /// Returns the number of units with commands waiting for pool memory.
    #[cfg(test)]
    pub(crate) fn pool_waits(&self) -> usize {
        self.backlog.memory_waits()
    }

    /// Returns the next time at which to call [`Channel::handle_timeout`].
    #[must_use]
    pub fn deadline(&self) -> Option<Instant> {
        let timers = self.timers.deadline(self.state == ChState::Live);
        let all = [timers, self.backlog.limits.deadline()];
        all.into_iter().flatten().min()
    }

    /// Returns the next action.
    pub fn poll_action(&mut self) -> Option<Action> {
        if let Some(first) = self.receives.next_first() {
            return Some(Action::PostRecv(first));
        }
        let action = self.actions.pop_front();
        if action.is_none() {
            // Start again at the beginning of the allocation. If the queue depth is low, most of
            // the memory is never touched.
            self.actions.clear();
        }
        action
    }

    /// Called when a message was received in this context.
    ///
    /// `bytes` is the received data.
    pub fn handle_recv(&mut self, cx: &mut Cx<'_>, recv: RecvIdx, bytes: &[u8]) {
        self.receives.on_completed();
        self.timers.keepalive.on_received(cx.now);
        let bytes = &bytes[..bytes.len().min(self.receives.max_len())];
        match self.state {
            ChState::Connecting => {
                self.receives.defer(recv, bytes.len());
                if !std::mem::replace(&mut self.notified, true) {
                    self.actions.push_back(Action::NotifyEstablished);
                }
            }
            // If there are messages waiting for a context, this message must wait too, to avoid
            // overtaking them.
            ChState::Live if !self.receives.has_deferred() => {
                if !self.dispatch(cx, recv, bytes) {
                    self.stats.counters.context_waits += 1;
                    self.receives.defer(recv, bytes.len());
                }
            }
            ChState::Joining | ChState::Live => {
                self.receives.defer(recv, bytes.len());
            }
            ChState::Disconnecting | ChState::Draining | ChState::Disconnected => {}
        }
        self.finish_input(cx);
    }

    /// Called when a receive was flushed because the queue pair is in the error state.
    pub fn handle_recv_flushed(&mut self, cx: &mut Cx<'_>, _recv: RecvIdx) {
        self.receives.on_completed();
        self.on_queue_pair_error(cx);
        self.finish_input(cx);
    }

    /// Called when the chain of a context has completed or failed.
    pub fn handle_post_done(&mut self, cx: &mut Cx<'_>, idx: TaskIdx, ok: bool) {
        if self.own.owns(idx) {
            // T_LOGOUT is always the last message. The initiator has received it, so we can close
            // the queue pair.
            let kind = self.own.on_sent(idx);
            if !ok || kind == Kind::Logout {
                self.on_queue_pair_error(cx);
            }
        } else {
            let io = &mut self.requests[idx];
            assert!(io.wrs > 0, "a chain was posted for {idx:?}");
            self.sender.queue.release(std::mem::take(&mut io.wrs));
            if !ok {
                self.on_queue_pair_error(cx);
            }
            self.on_chain_done(cx, idx, ok);
        }
        self.finish_input(cx);
    }

    /// Called when a block operation has completed.
    pub fn handle_block_done(&mut self, cx: &mut Cx<'_>, idx: TaskIdx, result: StepResult) {
        assert_eq!(
            self.requests.state(idx),
            IoctxState::DataIn,
            "a block operation runs for {idx:?}"
        );
        self.blocks_in_flight -= 1;
        if !self.ends_early(cx, idx) {
            self.resume_task(cx, idx, result);
        }
        self.finish_input(cx);
    }

    /// Called when memory was returned to the pool.
    pub fn handle_pool(&mut self, cx: &mut Cx<'_>) {
        self.poll_memory(cx);
        self.finish_input(cx);
    }

    /// Called when the connection is established. Unless `may_start` is set, the channel waits for
    /// [`Channel::handle_others_gone`], but at most for [`JOIN_TIMEOUT`](super::JOIN_TIMEOUT).
    pub fn handle_established(&mut self, cx: &mut Cx<'_>, may_start: bool) {
        if self.state == ChState::Connecting {
            become_state(&mut self.state, ChState::Joining);
            self.timers.on_established(cx.now);
            if may_start {
                become_state(&mut self.state, ChState::Live);
                self.timers.phase = None;
            }
        }
        self.finish_input(cx);
    }

    /// Called when the replaced channels have released all resources.
    pub fn handle_others_gone(&mut self, cx: &mut Cx<'_>) {
        if self.state == ChState::Joining {
            become_state(&mut self.state, ChState::Live);
            self.timers.phase = None;
        }
        self.finish_input(cx);
    }

    /// Handles expired deadlines.
    pub fn handle_timeout(&mut self, cx: &mut Cx<'_>) {
        if self.timers.poll_phase(cx.now) {
            match self.state {
                ChState::Connecting | ChState::Disconnecting => self.disconnect(cx),
                ChState::Live if self.own.stopping.is_some() => {
                    self.logout(cx, TLogoutReason::NoReason);
                }
                // The channel has waited for replaced sessions for longer than expected.
                ChState::Joining if self.timers.extend_join(cx.now) => {
                    self.actions.push_back(Action::StartEarly);
                }
                ChState::Joining => self.logout(cx, TLogoutReason::NoReason),
                ChState::Live | ChState::Draining | ChState::Disconnected => {}
            }
        }
        self.poll_limits(cx);
        if self.state == ChState::Live && self.timers.is_overdue(cx.now, &self.requests) {
            self.end_silent(cx);
        }
        if self.state == ChState::Live && self.timers.is_awaited_due(cx.now) {
            self.check_awaited(cx);
        }
        if self.state == ChState::Live && self.timers.keepalive.poll_probe(cx.now) {
            self.actions.push_back(Action::Probe);
        }
        self.finish_input(cx);
    }

    /// Called when a probe has completed or failed.
    pub fn handle_probed(&mut self, cx: &mut Cx<'_>, ok: bool) {
        self.timers.keepalive.on_probed(cx.now, ok);
        if !ok {
            self.on_queue_pair_error(cx);
        }
        self.finish_input(cx);
    }

    /// Called when the queues were destroyed, with or without their device: posted requests will
    /// neither be executed nor complete.
    pub fn handle_queues_gone(&mut self, cx: &mut Cx<'_>) {
        self.on_queue_pair_error(cx);
        for idx in self.requests.numbers() {
            let io = self.requests.get_mut(idx);
            let wrs = io.map(|io| std::mem::take(&mut io.wrs));
            if let Some(wrs) = wrs.filter(|wrs| *wrs > 0) {
                self.sender.queue.release(wrs);
                self.on_chain_done(cx, idx, false);
            }
        }
        self.own.forget_sends();
        // There are no flush completions for destroyed queues.
        self.receives.forget_posted();
        self.timers.keepalive.forget_probe();
        self.drained = true;
        self.finish_input(cx);
    }

    /// Called after every input. Handles deferred requests, chains waiting for credit and messages
    /// initiated by the target, and checks whether the channel is drained.
    pub(super) fn finish_input(&mut self, cx: &mut Cx<'_>) {
        // This is called for every input of every command, usually with nothing to do.
        if self.receives.has_deferred() {
            self.retry_deferred(cx);
        }
        let (requests, counters) = (&mut self.requests, &mut self.stats.counters);
        while let Some(post) = self.sender.retry_post(requests, counters) {
            self.actions.push_back(post);
        }
        self.poll_own(cx);
        self.timers.watch_chains(cx.now, &self.sender);
        if self.state == ChState::Draining {
            self.check_drained();
        }
    }

    /// Called when other initiators are waiting for memory. This channel may be using more than its
    /// share.
    pub fn handle_pressure(&mut self, cx: &mut Cx<'_>) {
        if self.state == ChState::Live {
            self.check_awaited(cx);
        }
        self.finish_input(cx);
    }

    /// Closes the channel if other initiators have been waiting for too long for its memory or its
    /// commands.
    fn check_awaited(&mut self, cx: &mut Cx<'_>) {
        let is_owed = cx.pool.is_owed_by(self.backlog.owner());
        if self.timers.check_awaited(cx.now, is_owed, &self.requests) {
            self.end_silent(cx);
        }
    }

    /// Closes the channel because the initiator transfers data too slowly, or not at all.
    fn end_silent(&mut self, cx: &mut Cx<'_>) {
        warn_limited!(
            self.complaints,
            cx.now,
            nexus = self.config.nexus.0,
            "timed out waiting for the initiator to move its data"
        );
        self.ended.get_or_insert(CloseReason::Silent);
        self.on_queue_pair_error(cx);
    }

    fn retry_deferred(&mut self, cx: &mut Cx<'_>) {
        while self.state == ChState::Live {
            if self.requests.is_full() {
                break;
            }
            let Some((recv, bytes)) = self.receives.oldest_deferred() else {
                break;
            };
            let is_handled = self.dispatch(cx, recv, &bytes);
            self.receives.keep_scratch(bytes);
            if !is_handled {
                break;
            }
            self.receives.pop_deferred();
        }
    }

    /// Handles a message. Returns `false` if it has to wait for a context.
    fn dispatch(&mut self, cx: &mut Cx<'_>, recv: RecvIdx, bytes: &[u8]) -> bool {
        let opcode = Opcode::of(bytes);
        if self.requests.is_full() && matches!(opcode, Ok(Opcode::Cmd | Opcode::TskMgmt)) {
            return false;
        }
        let immediate = self.config.params.immediate;
        // Almost all messages are commands. Moving them is expensive, so they are parsed
        // separately.
        let other = match opcode {
            Ok(Opcode::Cmd) => match Cmd::parse(bytes, immediate) {
                Ok(cmd) => {
                    self.on_cmd(cx, recv, &cmd);
                    return true;
                }
                Err(error) => Err(error),
            },
            _ => FromInitiator::parse(bytes, immediate),
        };
        self.on_other(cx, opcode, bytes, other);
        self.recycle_recv(recv);
        true
    }

    /// Handles a message other than a command, or a malformed message.
    fn on_other(
        &mut self,
        cx: &mut Cx<'_>,
        opcode: Result<Opcode, SrpError>,
        bytes: &[u8],
        message: Result<FromInitiator<'_>, SrpError>,
    ) {
        match message {
            Ok(FromInitiator::Cmd(_)) => unreachable!("commands are parsed by themselves"),
            Ok(FromInitiator::TskMgmt(request)) => self.on_tsk_mgmt(cx, &request),
            Ok(FromInitiator::ILogout(_)) => {
                self.ended.get_or_insert(CloseReason::Logout);
                self.disconnect(cx);
            }
            Ok(FromInitiator::CredRsp(rsp)) => self.on_own_response(cx, Kind::CredReq, rsp.tag),
            Ok(FromInitiator::AerRsp(rsp)) => self.on_own_response(cx, Kind::AerReq, rsp.tag),
            Ok(FromInitiator::LoginReq(_)) => self.complain(
                cx,
                "a login on an established channel",
                TLogoutReason::InvalidIuType,
            ),
            Err(error) => {
                self.stats.counters.malformed += 1;
                warn_limited!(
                    self.complaints,
                    cx.now,
                    nexus = self.config.nexus.0,
                    %error,
                    "malformed information unit"
                );
                // If the request has a tag, we can send a response for it. Otherwise, the state of
                // the peer is unknown, so we close the channel.
                match (opcode, tag_of(bytes)) {
                    (Ok(Opcode::Cmd | Opcode::TskMgmt), Some(tag)) => self.refuse(cx, tag),
                    _ => self.logout(cx, TLogoutReason::InvalidIuType),
                }
            }
        }
    }

    /// Closes the channel because of a protocol error.
    pub(super) fn complain(&mut self, cx: &mut Cx<'_>, what: &str, reason: TLogoutReason) {
        self.stats.counters.malformed += 1;
        warn_limited!(
            self.complaints,
            cx.now,
            nexus = self.config.nexus.0,
            what,
            "protocol error"
        );
        self.logout(cx, reason);
    }

    /// Posts a receive context again, unless the channel no longer receives.
    pub(super) fn recycle_recv(&mut self, recv: RecvIdx) {
        if self.receives.recycle() {
            self.actions.push_back(Action::PostRecv(recv));
        }
    }

    fn check_drained(&mut self) {
        // Check everything that a device may still access: posted receives, chains and block
        // operations, messages initiated by the target, and the probe. The marker was posted after
        // all of them.
        let done = self.state == ChState::Draining
            && self.drained
            && self.receives.is_drained()
            && self.requests.is_empty()
            && self.blocks_in_flight == 0
            && !self.own.is_sending()
            && !self.timers.keepalive.is_probing();
        if done {
            assert!(self.sender.queue.is_idle(), "all credit is back");
            become_state(&mut self.state, ChState::Disconnected);
            self.timers.phase = None;
            self.actions.push_back(Action::Release);
        }
    }
}

/// Returns the tag of a request that cannot be parsed. The tag is at the same offset in all
/// requests.
fn tag_of(bytes: &[u8]) -> Option<Tag> {
    let tag = bytes.get(8..16)?;
    Some(Tag(u64::from_be_bytes(
        tag.try_into().expect("eight bytes"),
    )))
}
