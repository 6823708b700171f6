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
use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

use riser_memory::{MemSlice, Memory};
use riser_scsi::nexus::NexusId;
use riser_scsi::srp::{Cmd, FromInitiator, Opcode, SrpError, TLogoutReason, Tag};
use riser_scsi::step::StepResult;
use riser_state::{State, become_state};
use rustc_hash::{FxBuildHasher, FxHashMap};

use super::action::{Action, Counters};
use super::credit::{ReqLim, SendQueue};
use super::ioctx::{IoctxState, RecvIdx, SendIoctx};
use super::login::{ChannelParams, OWN_MESSAGES};
use super::own::OwnMessages;
use crate::audit::CloseReason;
use crate::fabric::{
    Accounts, Backlog, CallContext, CommandFlow, Contexts, LunMap, MAX_DATA_TIMEOUTS,
    ORDER_CHECK_INTERVAL, OWED, Pace, PortionLimits, RdmaRequest, Spare, TaskIdx, TaskRef, Wait,
};
use crate::log::RateLimit;
use crate::pool::{Buffer, Pool, Ranges};
use crate::stats::Functions;
use crate::warn_limited;

/// Maximum time between accepting a connection and its establishment.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(20);

/// Maximum time that an established channel waits for commands of the session it replaces. A device
/// that needs more time is broken: we log out the initiator, which can then try again.
pub const JOIN_TIMEOUT: Duration = Duration::from_secs(20);

/// Time after which such a channel is started early, if the remaining commands are waiting for a
/// device that may hang. Units with such commands will reject commands of this channel.
pub(super) const REINSTATEMENT: Duration = Duration::from_secs(2);

/// Idle time after which we check whether the initiator is still reachable. Without traffic, a
/// reliable connection does not detect that its peer has failed, and the session would stay open
/// forever.
pub const KEEPALIVE: Duration = Duration::from_secs(15);

/// Work requests that are not part of the credit for commands: messages initiated by the target,
/// the probe, and the drain marker.
const RESERVED: u32 = OWN_MESSAGES + 2;

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

/// Parameters of a new channel.
#[derive(Debug)]
pub struct ChannelConfig {
    /// Limits of the channel and its rings.
    pub params: ChannelParams,
    /// Worker index.
    pub worker: u16,
    /// Channel number, which is never reused by this worker.
    pub serial: u64,
    /// The I_T nexus of this channel.
    pub nexus: NexusId,
    /// Logical units that the initiator can access.
    pub luns: Arc<LunMap>,
    /// Receive ring: [`ChannelParams::receives`] × [`ChannelParams::receive_stride`] bytes.
    pub receive_ring: MemSlice,
    /// Send ring: [`ChannelParams::sends`] × [`ChannelParams::send_stride`] bytes.
    pub send_ring: MemSlice,
    /// Maximum number of scatter-gather entries per send request.
    pub max_sge: usize,
    /// Timeout for solicited data.
    pub data_out_timeout: Duration,
}

/// A connection with an initiator.
#[derive(Debug)]
pub struct Channel {
    pub(super) config: ChannelConfig,
    pub(super) state: ChState,
    pub(super) ioctx: Contexts<SendIoctx>,
    /// Commands without a response, by tag. Tags are chosen by the peer: collisions make lookups
    /// linear, but bounded by the credit limit.
    pub(super) tags: FxHashMap<Tag, TaskIdx>,
    pub(super) req_lim: ReqLim,
    pub(super) send_queue: SendQueue,
    /// Number of posted receives.
    posted_receives: u32,
    /// Receives that have not been posted yet, because the channel is new.
    pub(super) first_receives: Range<u16>,
    /// Received messages that have not been handled yet, oldest first. Bounded by the receive ring.
    pub(super) deferred: VecDeque<(RecvIdx, u32)>,
    /// Buffer for a deferred information unit, allocated on first use.
    scratch: Vec<u8>,
    /// Commands waiting for memory or rate limits.
    pub(super) backlog: Backlog,
    pub(super) own: OwnMessages,
    pub(super) blocks_in_flight: u32,
    /// Chains in flight that commands are waiting for, not including chains of a response and its
    /// data.
    pub(super) transfers: u32,
    /// Deadline for the next chain to complete.
    pub(super) data_deadline: Option<Instant>,
    /// A lower bound for the deadline of a command's pieces, not including the first.
    pieces_deadline: Option<Instant>,
    /// Maximum total time for the pieces of a command.
    pieces_timeout: Duration,
    /// Set if other initiators are waiting for memory and this channel uses more than its share.
    owed: Option<Wait>,
    /// Set if other initiators are waiting for commands of this channel in the order of their unit.
    held: Option<Wait>,
    /// Time of the next check for `owed` and `held`.
    awaited_deadline: Option<Instant>,
    pub(super) pace: Pace,
    notified: bool,
    pub(super) drained: bool,
    /// Set if requests should complete without being executed.
    pub(super) torn_down: bool,
    pub(super) deadline: Option<Instant>,
    /// Time at which to log out a channel that is still waiting for replaced sessions.
    join_until: Instant,
    /// Time of the last message from the initiator.
    heard: Instant,
    /// Time of the next keepalive check.
    probe_at: Option<Instant>,
    /// Set while a probe is in flight.
    probing: bool,
    pub(super) actions: VecDeque<Action>,
    pub(super) counters: Counters,
    /// Completed functions by result.
    pub(super) functions: Functions,
    /// The reason why the channel was closed, if known.
    pub(super) ended: Option<CloseReason>,
    /// Command statistics per unit.
    pub(super) accounts: Accounts,
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
        let receives = params.receives();
        assert!(config.receive_ring.len() >= receives as usize * params.receive_stride());
        assert!(config.send_ring.len() >= params.sends() as usize * params.send_stride());
        let credits = params.send_queue - RESERVED;
        assert!(credits >= 2, "a send queue for a transfer and an answer");
        Self {
            state: ChState::Connecting,
            ioctx: Contexts::new(params.req_lim as u16),
            // Twice the maximum number of entries: a table that is at most half full is never
            // reallocated.
            tags: FxHashMap::with_capacity_and_hasher(2 * params.req_lim as usize, FxBuildHasher),
            req_lim: ReqLim::new(params.req_lim),
            send_queue: SendQueue::new(credits, params.req_lim as usize),
            posted_receives: receives,
            // Post all of them, because the initiator may send as soon as it receives our response.
            first_receives: 0..receives as u16,
            deferred: VecDeque::with_capacity(receives as usize),
            scratch: Vec::new(),
            backlog: Backlog::new(config.serial, params.req_lim as usize),
            own: OwnMessages::default(),
            blocks_in_flight: 0,
            transfers: 0,
            data_deadline: None,
            pieces_deadline: None,
            pieces_timeout: config.data_out_timeout * MAX_DATA_TIMEOUTS,
            owed: None,
            held: None,
            awaited_deadline: None,
            pace: Pace::new(params.req_lim),
            notified: false,
            drained: false,
            torn_down: false,
            deadline: Some(now + CONNECT_TIMEOUT),
            join_until: now,
            heard: now,
            probe_at: None,
            probing: false,
            actions: VecDeque::with_capacity(2 * receives as usize),
            counters: Counters::default(),
            functions: Functions::default(),
            ended: None,
            accounts: Accounts::default(),
            complaints: RateLimit::default(),
            config,
        }
    }

    /// Returns the state of the channel.
    #[must_use]
    pub fn state(&self) -> ChState {
        self.state
    }

    /// Returns the I_T nexus.
    #[must_use]
    pub fn nexus(&self) -> NexusId {
        self.config.nexus
    }

    /// Returns the parameters of this channel.
    #[must_use]
    pub fn config(&self) -> &ChannelConfig {
        &self.config
    }

    /// Returns a copy of the counters.
    #[must_use]
    pub fn counters(&self) -> Counters {
        self.counters
    }

    /// Returns the number of completed task management functions by result.
    #[must_use]
    pub fn functions(&self) -> &Functions {
        &self.functions
    }

    /// Returns the statistics per unit.
    #[must_use]
    pub fn accounts(&self) -> &Accounts {
        &self.accounts
    }

    /// Called when the initiator has closed the connection, before
    /// [`Channel::handle_disconnected`].
    pub fn note_closed(&mut self) {
        self.ended.get_or_insert(CloseReason::Closed);
    }

    /// Returns the reason why the channel was closed.
    #[must_use]
    pub fn end(&self) -> CloseReason {
        self.ended.unwrap_or(CloseReason::Lost)
    }

    /// Returns the credits of the initiator.
    #[must_use]
    pub fn req_lim(&self) -> &ReqLim {
        &self.req_lim
    }

    /// Returns the credits of the send queue.
    #[must_use]
    pub fn send_queue(&self) -> &SendQueue {
        &self.send_queue
    }

    /// Returns the number of requests that use a context.
    #[must_use]
    pub fn in_flight(&self) -> usize {
        self.ioctx.len()
    }

    /// Returns the state of a context.
    #[must_use]
    pub fn ioctx_state(&self, idx: TaskIdx) -> IoctxState {
        self.ioctx.get(idx).map_or(IoctxState::Done, |io| io.state)
    }

    /// Returns the number of times that commands for a unit started to wait for pool memory.
    #[must_use]
    pub fn pool_waits_begun(&self) -> u64 {
        self.backlog.waits_begun()
    }

    /// Returns the number of units with commands waiting for pool memory.
    #[must_use]
    pub fn pool_waits(&self) -> usize {
        self.backlog.memory_waits()
    }

    /// Returns the next time at which to call [`Channel::handle_timeout`].
    #[must_use]
    pub fn deadline(&self) -> Option<Instant> {
        let live = |at: Option<Instant>| at.filter(|_| self.state == ChState::Live);
        let all = [
            self.deadline,
            live(self.probe_at),
            live(self.data_deadline),
            live(self.pieces_deadline),
            live(self.awaited_deadline),
            self.backlog.limits.deadline(),
        ];
        all.into_iter().flatten().min()
    }

    /// Returns the next action.
    pub fn poll_action(&mut self) -> Option<Action> {
        if let Some(first) = self.first_receives.next() {
            return Some(Action::PostRecv(RecvIdx(first)));
        }
        let action = self.actions.pop_front();
        if action.is_none() {
            // Start again at the beginning of the allocation. If the queue depth is low, most of
            // the memory is never touched.
            self.actions.clear();
        }
        action
    }

    /// Returns the memory of a receive context.
    #[must_use]
    pub fn receive_slot(&self, recv: RecvIdx) -> MemSlice {
        let len = self.config.params.max_it_iu_len as usize;
        slot(&self.config.receive_ring, self.receive_offset(recv), len)
    }

    /// Returns the address and length of a receive context, for the device.
    #[must_use]
    pub fn receive_place(&self, recv: RecvIdx) -> (u64, u32) {
        let addr = self.config.receive_ring.addr() + self.receive_offset(recv) as u64;
        (addr, self.config.params.max_it_iu_len)
    }

    /// Returns the memory for the message of a send context.
    #[must_use]
    pub fn send_slot(&self, ioctx: TaskIdx) -> MemSlice {
        let len = self.config.params.max_ti_iu_len as usize;
        slot(&self.config.send_ring, self.send_offset(ioctx), len)
    }

    /// Returns the address of the message of a send context, for the device.
    #[must_use]
    pub fn send_addr(&self, ioctx: TaskIdx) -> u64 {
        self.config.send_ring.addr() + self.send_offset(ioctx) as u64
    }

    pub(super) fn send_offset(&self, ioctx: TaskIdx) -> usize {
        usize::from(ioctx.0) * self.config.params.send_stride()
    }

    /// Returns the data buffer for the block operation of a context, if it needs one.
    #[must_use]
    pub fn data_buffer(&self, ioctx: TaskIdx) -> Option<&Buffer> {
        self.ioctx[ioctx].exec.buffer.as_ref()
    }

    /// Returns the RDMA requests of the chain to be posted.
    pub fn requests(&self, task: TaskIdx) -> impl Iterator<Item = RdmaRequest<Ranges<'_>>> {
        // A message initiated by the target does not have any RDMA requests.
        let ioctx = self.ioctx.get(task);
        ioctx.into_iter().flat_map(SendIoctx::requests)
    }

    /// Called when a message was received in this context.
    ///
    /// `bytes` is the received data.
    pub fn handle_recv(&mut self, cx: &mut Cx<'_>, recv: RecvIdx, bytes: &[u8]) {
        self.posted_receives -= 1;
        self.heard = cx.now;
        let bytes = &bytes[..bytes.len().min(self.config.params.max_it_iu_len as usize)];
        match self.state {
            ChState::Connecting => {
                self.deferred.push_back((recv, bytes.len() as u32));
                if !std::mem::replace(&mut self.notified, true) {
                    self.actions.push_back(Action::NotifyEstablished);
                }
            }
            // If there are messages waiting for a context, this message must wait too, to avoid
            // overtaking them.
            ChState::Live if self.deferred.is_empty() => {
                if !self.dispatch(cx, recv, bytes) {
                    self.counters.context_waits += 1;
                    self.deferred.push_back((recv, bytes.len() as u32));
                }
            }
            ChState::Joining | ChState::Live => {
                self.deferred.push_back((recv, bytes.len() as u32));
            }
            ChState::Disconnecting | ChState::Draining | ChState::Disconnected => {}
        }
        self.settle_round(cx);
    }

    /// Called when a receive was flushed because the queue pair is in the error state.
    pub fn handle_recv_flushed(&mut self, cx: &mut Cx<'_>, _recv: RecvIdx) {
        self.posted_receives -= 1;
        self.on_queue_pair_error(cx);
        self.settle_round(cx);
    }

    /// Called when the chain of a context has completed or failed.
    pub fn handle_post_done(&mut self, cx: &mut Cx<'_>, idx: TaskIdx, ok: bool) {
        if u32::from(idx.0) >= self.config.params.req_lim {
            self.on_own_sent(cx, idx, ok);
        } else {
            let io = &mut self.ioctx[idx];
            assert!(io.wrs > 0, "a chain was posted for {idx:?}");
            self.send_queue.give_back(std::mem::take(&mut io.wrs));
            if !ok {
                self.on_queue_pair_error(cx);
            }
            self.on_chain_done(cx, idx, ok);
        }
        self.settle_round(cx);
    }

    /// Called when a block operation has completed.
    pub fn handle_block_done(&mut self, cx: &mut Cx<'_>, idx: TaskIdx, result: StepResult) {
        assert_eq!(
            self.ioctx_state(idx),
            IoctxState::DataIn,
            "a block operation runs for {idx:?}"
        );
        self.blocks_in_flight -= 1;
        self.on_block_done(cx, idx, result);
        self.settle_round(cx);
    }

    /// Called when memory was returned to the pool.
    pub fn handle_pool(&mut self, cx: &mut Cx<'_>) {
        self.poll_memory(cx);
        self.settle_round(cx);
    }

    /// Called when the connection is established. Unless `may_start` is set, the channel waits for
    /// [`Channel::handle_others_gone`], but at most for [`JOIN_TIMEOUT`].
    pub fn handle_established(&mut self, cx: &mut Cx<'_>, may_start: bool) {
        if self.state == ChState::Connecting {
            become_state(&mut self.state, ChState::Joining);
            self.join_until = cx.now + JOIN_TIMEOUT;
            self.deadline = Some(cx.now + REINSTATEMENT);
            self.heard = cx.now;
            self.probe_at = Some(cx.now + KEEPALIVE);
            if may_start {
                self.start_serving();
            }
        }
        self.settle_round(cx);
    }

    /// Called when the replaced channels have released all resources.
    pub fn handle_others_gone(&mut self, cx: &mut Cx<'_>) {
        if self.state == ChState::Joining {
            self.start_serving();
        }
        self.settle_round(cx);
    }

    /// Called when the channel has waited for replaced sessions for longer than expected.
    pub(super) fn on_join_late(&mut self, cx: &mut Cx<'_>) {
        if cx.now >= self.join_until {
            return self.logout(cx, TLogoutReason::NoReason);
        }
        self.actions.push_back(Action::StartEarly);
        self.deadline = Some(self.join_until.min(cx.now + REINSTATEMENT));
    }

    fn start_serving(&mut self) {
        become_state(&mut self.state, ChState::Live);
        self.deadline = None;
    }

    /// Handles expired deadlines.
    pub fn handle_timeout(&mut self, cx: &mut Cx<'_>) {
        if self.deadline.is_some_and(|d| d <= cx.now) {
            self.deadline = None;
            self.on_deadline(cx);
        }
        self.poll_limits(cx);
        if self.state == ChState::Live && self.is_overdue(cx.now) {
            self.end_silent(cx);
        }
        let is_due = self.awaited_deadline.is_some_and(|at| at <= cx.now);
        if self.state == ChState::Live && is_due {
            self.check_awaited(cx);
        }
        if self.state == ChState::Live && self.probe_at.is_some_and(|at| at <= cx.now) {
            // To save time, the timer is not updated when a message is received. If there was one,
            // set the timer again here.
            let silent = cx.now.saturating_duration_since(self.heard);
            if silent < KEEPALIVE {
                self.probe_at = Some(self.heard + KEEPALIVE);
            } else {
                self.probe_at = None;
                self.probing = true;
                self.actions.push_back(Action::Probe);
            }
        }
        self.settle_round(cx);
    }

    /// Called when a probe has completed or failed.
    pub fn handle_probed(&mut self, cx: &mut Cx<'_>, ok: bool) {
        self.probing = false;
        if ok {
            self.heard = cx.now;
            self.probe_at = Some(cx.now + KEEPALIVE);
        } else {
            self.on_queue_pair_error(cx);
        }
        self.settle_round(cx);
    }

    /// Called when the queues were destroyed, with or without their device: posted requests will
    /// neither be executed nor complete.
    pub fn handle_queues_gone(&mut self, cx: &mut Cx<'_>) {
        self.on_queue_pair_error(cx);
        for idx in self.ioctx.numbers() {
            let wrs = self
                .ioctx
                .get_mut(idx)
                .map(|io| std::mem::take(&mut io.wrs));
            if let Some(wrs) = wrs.filter(|wrs| *wrs > 0) {
                self.send_queue.give_back(wrs);
                self.on_chain_done(cx, idx, false);
            }
        }
        self.own.forget_sends();
        // There are no flush completions for destroyed queues.
        self.posted_receives = 0;
        self.probing = false;
        self.drained = true;
        self.settle_round(cx);
    }

    /// Called after every input. Handles deferred requests, chains waiting for credit and messages
    /// initiated by the target, and checks whether the channel is drained.
    pub(super) fn settle_round(&mut self, cx: &mut Cx<'_>) {
        // This is called for every input of every command, usually with nothing to do.
        if !self.deferred.is_empty() {
            self.retry_deferred(cx);
        }
        if self.send_queue.front().is_some() {
            self.retry_posts(cx);
        }
        self.poll_own(cx);
        self.watch_chains(cx.now);
        if self.state == ChState::Draining {
            self.check_drained();
        }
    }

    /// Starts the timer for chains to complete. An initiator that does not receive its responses
    /// uses memory, and blocks any chain that is waiting for credit.
    fn watch_chains(&mut self, now: Instant) {
        if self.send_queue.is_idle() && self.send_queue.front().is_none() && self.transfers == 0 {
            return;
        }
        // If no other command is waiting, a response has more time.
        let at = if self.transfers > 0 || self.send_queue.front().is_some() {
            now + self.config.data_out_timeout
        } else {
            now + self.pieces_timeout
        };
        self.data_deadline = Some(self.data_deadline.map_or(at, |other| other.min(at)));
    }

    /// Starts the wait for a piece of data. After the first piece, the command is ordered in its
    /// unit, so other commands may have to wait for it. Therefore, all further pieces share a time
    /// limit, and the response gets the remaining time. Any data transferred in the meantime
    /// extends it: see [`Pace`](crate::fabric::Pace).
    pub(super) fn begin_piece(&mut self, now: Instant, idx: TaskIdx) {
        let io = &mut self.ioctx[idx];
        io.began = Some(self.pace.begin(now));
        self.awaited_deadline.get_or_insert(now + OWED);
        if io.exec.is_gathering() {
            return;
        }
        io.wait = io.began;
        io.ordered = io.ordered.or(io.began);
        // For the first wait of a command, the full time is available. Most commands only wait
        // once.
        let due = match io.waited.is_zero() {
            true => Some(now + self.pieces_timeout),
            false => io.piece_due(self.pieces_timeout, &self.pace),
        };
        if self.pieces_deadline.is_none() || due < self.pieces_deadline {
            self.pieces_deadline = due;
        }
    }

    /// Returns whether the time for the initiator to send or receive data has expired.
    fn is_overdue(&mut self, now: Instant) -> bool {
        let is_over = |at: Option<Instant>| at.is_some_and(|at| at <= now);
        if is_over(self.pieces_deadline) {
            // The piece may have completed since.
            let time = self.pieces_timeout;
            let dues = self
                .ioctx
                .iter()
                .filter_map(|(_, io)| io.piece_due(time, &self.pace));
            self.pieces_deadline = dues.min();
        }
        is_over(self.data_deadline) || is_over(self.pieces_deadline)
    }

    /// Called when other initiators are waiting for memory. This channel may be using more than its
    /// share.
    pub fn handle_pressure(&mut self, cx: &mut Cx<'_>) {
        if self.state == ChState::Live {
            self.check_awaited(cx);
        }
        self.settle_round(cx);
    }

    /// Called when an ordered command starts to wait for the initiator. We need to check regularly,
    /// because the channel is not notified if other initiators start to wait for it.
    pub(super) fn watch_order(&mut self, now: Instant) {
        let look = now + ORDER_CHECK_INTERVAL;
        self.awaited_deadline = Some(self.awaited_deadline.map_or(look, |at| at.min(look)));
    }

    /// Closes the channel if other initiators have been waiting for too long for its memory or its
    /// commands, like `check_data` in [`iscsi::Channel`](crate::iscsi::Channel).
    fn check_awaited(&mut self, cx: &mut Cx<'_>) {
        let timeout = self.config.data_out_timeout;
        let now = self.pace.begin(cx.now);
        let is_owed = cx.pool.is_owed_by(self.backlog.owner());
        self.owed = is_owed.then(|| self.owed.unwrap_or(now));
        let is_in_order = |io: &SendIoctx| io.began.is_some() && !io.exec.is_gathering();
        let is_held = |io: &SendIoctx| is_in_order(io) && io.exec.holds_others();
        let held = self.ioctx.iter().any(|(_, io)| is_held(io));
        self.held = held.then(|| self.held.unwrap_or(now));
        if is_owed && let Some(at) = &mut self.data_deadline {
            *at = (*at).min(cx.now + OWED);
        }
        let (owed, held, pace) = (self.owed, self.held, &self.pace);
        let due = |io: &SendIoctx| {
            let began = io.began?;
            let owed = owed.map(|since| pace.due_awaited(began.later(since), timeout));
            let held = held.filter(|_| is_in_order(io));
            // Other initiators wait for the total time of all pieces.
            let ordered = io.ordered.unwrap_or(began);
            let held = held.map(|since| pace.due_awaited(ordered.later(since), OWED));
            owed.into_iter().chain(held).min()
        };
        let due = self.ioctx.iter().filter_map(|(_, io)| due(io)).min();
        let look = if self.ioctx.iter().any(|(_, io)| is_in_order(io)) {
            Some(cx.now + ORDER_CHECK_INTERVAL)
        } else {
            // The channel is not notified if it exceeds its share of memory while other initiators
            // are already waiting.
            let is_waiting = self.ioctx.iter().any(|(_, io)| io.began.is_some());
            (is_owed || is_waiting).then_some(cx.now + OWED)
        };
        self.awaited_deadline = look.into_iter().chain(due).min();
        if due.is_some_and(|at| at <= cx.now) {
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
            let Some(&(recv, len)) = self.deferred.front() else {
                break;
            };
            if self.ioctx.is_full() {
                break;
            }
            let mut scratch = std::mem::take(&mut self.scratch);
            scratch.resize(len as usize, 0);
            let bytes = &mut scratch[..];
            self.receive_slot(recv).read(0, bytes);
            let taken = self.dispatch(cx, recv, bytes);
            self.scratch = scratch;
            if !taken {
                break;
            }
            self.deferred.pop_front();
        }
    }

    /// Handles a message. Returns `false` if it has to wait for a context.
    fn dispatch(&mut self, cx: &mut Cx<'_>, recv: RecvIdx, bytes: &[u8]) -> bool {
        let opcode = Opcode::of(bytes);
        if self.ioctx.is_full() && matches!(opcode, Ok(Opcode::Cmd | Opcode::TskMgmt)) {
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
            Ok(FromInitiator::ILogout(_)) => self.on_i_logout(cx),
            Ok(FromInitiator::CredRsp(rsp)) => self.on_cred_rsp(cx, rsp.tag),
            Ok(FromInitiator::AerRsp(rsp)) => self.on_aer_rsp(cx, rsp.tag),
            Ok(FromInitiator::LoginReq(_)) => self.complain(
                cx,
                "a login on an established channel",
                TLogoutReason::InvalidIuType,
            ),
            Err(error) => {
                self.counters.malformed += 1;
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
        self.counters.malformed += 1;
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
        if matches!(
            self.state,
            ChState::Connecting | ChState::Joining | ChState::Live | ChState::Disconnecting
        ) {
            self.post_recv(recv);
        }
    }

    fn post_recv(&mut self, recv: RecvIdx) {
        self.posted_receives += 1;
        self.actions.push_back(Action::PostRecv(recv));
    }

    pub(super) fn receive_offset(&self, recv: RecvIdx) -> usize {
        usize::from(recv.0) * self.config.params.receive_stride()
    }

    /// Returns the mapping that contains the receive ring, and the offset of a context.
    pub(super) fn receive_memory(&self, recv: RecvIdx) -> (&Memory, usize) {
        let ring = &self.config.receive_ring;
        (ring.memory(), ring.offset() + self.receive_offset(recv))
    }

    pub(super) fn portion_limits(&self) -> PortionLimits {
        // Use half of the queue, so that a long and a short transfer can run at the same time, and
        // reserve an entry for the response.
        let credits = self.config.params.send_queue - RESERVED;
        PortionLimits {
            wrs: (credits / 2).max(1).min(credits - 1),
            sges: self.config.max_sge,
        }
    }

    /// Returns a reference to the current request of a context, for other channels.
    pub(super) fn task_ref(&self, idx: TaskIdx) -> TaskRef {
        TaskRef {
            worker: self.config.worker,
            channel: self.config.serial,
            index: idx,
            generation: self.ioctx.generation(idx),
        }
    }

    fn check_drained(&mut self) {
        // Check everything that a device may still access: posted receives, chains and block
        // operations, messages initiated by the target, and the probe. The marker was posted after
        // all of them.
        let done = self.state == ChState::Draining
            && self.drained
            && self.posted_receives == 0
            && self.ioctx.is_empty()
            && self.blocks_in_flight == 0
            && !self.own.is_sending()
            && !self.probing;
        if done {
            assert!(self.send_queue.is_idle(), "all credit is back");
            become_state(&mut self.state, ChState::Disconnected);
            self.deadline = None;
            self.actions.push_back(Action::Release);
        }
    }
}

fn slot(ring: &MemSlice, offset: usize, len: usize) -> MemSlice {
    ring.slice(offset..offset + len)
        .expect("contexts lie in their ring")
}

/// Returns the tag of a request that cannot be parsed. The tag is at the same offset in all
/// requests.
fn tag_of(bytes: &[u8]) -> Option<riser_scsi::srp::Tag> {
    let tag = bytes.get(8..16)?;
    Some(riser_scsi::srp::Tag(u64::from_be_bytes(
        tag.try_into().expect("eight bytes"),
    )))
}
