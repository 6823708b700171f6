//! The channel: one RC connection with one initiator.
//!
//! # Calling order
//! 1. [`Channel::new`] after the login was accepted; its first actions post the receives.
//! 2. Inputs, in any order: [`Channel::handle_recv`], [`Channel::handle_post_done`],
//!    [`Channel::handle_block_done`], [`Channel::handle_pool`], [`Channel::handle_established`],
//!    [`Channel::handle_disconnected`], [`Channel::handle_timeout`], and what other channels say:
//!    [`Channel::handle_others_gone`], [`Channel::handle_task_start`], [`Channel::handle_abort`],
//!    [`Channel::handle_task_gone`].
//! 3. After every input, [`Channel::poll_action`] until it has none.
//! 4. After [`Action::Release`] the channel is [`ChState::Disconnected`], holds nothing, and may be
//!    dropped.

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
use crate::audit::Parting;
use crate::fabric::{
    Accounts, Backlog, CommandFlow, Contexts, Lent, LunMap, MAX_DATA_TIMEOUTS, OWED, Pace,
    PortionLimits, RdmaRequest, Spare, TaskIdx, TaskRef, Wait,
};
use crate::log::RateLimit;
use crate::pool::{Buffer, Pool, Ranges};
use crate::stats::Functions;
use crate::warn_limited;

/// Time limit from our accept to the establishment of a connection.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(20);

/// Time limit for the end of the commands of the session that an established channel replaces.
/// A device that holds them longer is broken: the initiator is logged out, and may log in again.
pub const JOIN_TIMEOUT: Duration = Duration::from_secs(20);

/// Time after which such a channel starts early, if the commands that it waits for are at a device
/// that may hang: units with such commands then refuse commands of the channel.
pub(super) const REINSTATEMENT: Duration = Duration::from_secs(2);

/// Silence after which the target checks that the initiator is there. A reliable connection
/// without traffic does not notice that its peer is gone, and its session would stay for ever.
pub const KEEPALIVE: Duration = Duration::from_secs(15);

/// Work requests that the credit of commands does not count: our own messages, the probe, and the
/// drain marker.
const RESERVED: u32 = OWN_MESSAGES + 2;

/// State of a channel. The names are those of `rdma_ch_state`.
///
/// ```text
///  Connecting ──established──→ Joining ──the replaced session is gone──→ Live
///      │                         │   │                                   │   │
///      │                         │   └──→ Disconnecting ←── logout, ─────┘   │
///      │                         │   (T_LOGOUT on its way)  shutdown         │
///      │                         │            │ sent, or its time is up      │
///      │                         v            v                              │
///      └── disconnected, ────→ Draining (queue pair in error) ←──────────────┘
///          time is up             └──all is back──→ Disconnected
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ChState {
    /// Accepted, not yet known to be established; requests that arrive are kept.
    Connecting,
    /// Established; the channels of the session that it replaces still have commands under way.
    /// Requests that arrive are kept.
    Joining,
    /// Takes requests and carries them out.
    Live,
    /// Takes no requests any longer; a T_LOGOUT with the reason is on its way.
    Disconnecting,
    /// The queue pair flushes; devices still use buffers.
    Draining,
    /// Holds nothing, and may be dropped.
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

/// The worker's time and memory, for the length of a call.
#[derive(Debug)]
pub struct Cx<'a> {
    /// Time of the worker's present round.
    pub now: Instant,
    /// The worker's data buffers.
    pub pool: &'a mut Pool,
    /// The worker's contexts that no request has.
    pub spare: &'a mut Spare<SendIoctx>,
}

impl Lent for Cx<'_> {
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
    /// Limits of the channel and of its rings.
    pub params: ChannelParams,
    /// Number of the channel's worker.
    pub worker: u16,
    /// The channel's number at that worker, never used twice.
    pub serial: u64,
    /// I_T nexus that the channel belongs to.
    pub nexus: NexusId,
    /// Logical units that the initiator may see.
    pub luns: Arc<LunMap>,
    /// Receive ring: [`ChannelParams::receives`] × [`ChannelParams::receive_stride`] bytes.
    pub receive_ring: MemSlice,
    /// Send ring: [`ChannelParams::sends`] × [`ChannelParams::send_stride`] bytes.
    pub send_ring: MemSlice,
    /// Scatter-gather entries of a send request.
    pub max_sge: usize,
    /// Time limit for data that the initiator is asked for.
    pub data_out_timeout: Duration,
}

/// One connection with one initiator.
#[derive(Debug)]
pub struct Channel {
    pub(super) config: ChannelConfig,
    pub(super) state: ChState,
    pub(super) ioctx: Contexts<SendIoctx>,
    /// Commands that are not answered yet, by the tags that the initiator knows them by. Those that
    /// are chosen for their hashes are found slowly, and there are no more of them than credits.
    pub(super) tags: FxHashMap<Tag, TaskIdx>,
    pub(super) req_lim: ReqLim,
    pub(super) send_queue: SendQueue,
    /// Receives in the queue pair.
    posted_receives: u32,
    /// Receives that are not posted yet, since the channel is new.
    pub(super) first_receives: Range<u16>,
    /// Received and not yet looked at, oldest first; bounded by the receive ring.
    pub(super) deferred: VecDeque<(RecvIdx, u32)>,
    /// Scratch for a deferred information unit, once there was one.
    scratch: Vec<u8>,
    /// Commands that wait for memory or limits.
    pub(super) backlog: Backlog,
    pub(super) own: OwnMessages,
    pub(super) blocks_in_flight: u32,
    /// Chains under way that commands wait for: all but those that end with an answer.
    pub(super) transfers: u32,
    /// Until when the next chain must have completed.
    pub(super) data_deadline: Option<Instant>,
    /// No later than the end of the time that a command has for all its pieces after the first.
    pieces_deadline: Option<Instant>,
    /// That time.
    pieces_timeout: Duration,
    /// Since when other initiators wait for memory of which it has more than its share.
    owed: Option<Wait>,
    /// Since when other initiators wait for its commands in the order of their unit.
    held: Option<Wait>,
    /// Time of the next check of both.
    awaited_deadline: Option<Instant>,
    pub(super) pace: Pace,
    notified: bool,
    pub(super) drained: bool,
    /// Its requests end without being carried out.
    pub(super) torn_down: bool,
    pub(super) deadline: Option<Instant>,
    /// Time at which a channel that still waits for replaced sessions is logged out.
    join_until: Instant,
    /// Time at which the initiator was last heard.
    heard: Instant,
    /// Time of the next check that it is still there.
    probe_at: Option<Instant>,
    /// A probe is under way.
    probing: bool,
    pub(super) actions: VecDeque<Action>,
    pub(super) counters: Counters,
    /// Functions answered, and how.
    pub(super) functions: Functions,
    /// Reason of its end, once there is one.
    pub(super) ended: Option<Parting>,
    /// Statistics of its commands, by unit.
    pub(super) accounts: Accounts,
    pub(super) complaints: RateLimit,
}

impl Channel {
    /// A channel in state [`ChState::Connecting`]; its first actions post all receives.
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
            // Twice as large as it gets: a table at most half full never allocates again.
            tags: FxHashMap::with_capacity_and_hasher(2 * params.req_lim as usize, FxBuildHasher),
            req_lim: ReqLim::new(params.req_lim),
            send_queue: SendQueue::new(credits, params.req_lim as usize),
            posted_receives: receives,
            // All of them, since the initiator may send as soon as it has our answer.
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

    /// Returns the number of its I_T nexus.
    #[must_use]
    pub fn nexus(&self) -> NexusId {
        self.config.nexus
    }

    /// Returns the parameters that it was made with.
    #[must_use]
    pub fn config(&self) -> &ChannelConfig {
        &self.config
    }

    /// Returns a copy of its counters.
    #[must_use]
    pub fn counters(&self) -> Counters {
        self.counters
    }

    /// Task-management functions that it has answered, and how.
    #[must_use]
    pub fn functions(&self) -> &Functions {
        &self.functions
    }

    /// Returns its statistics of each unit.
    #[must_use]
    pub fn accounts(&self) -> &Accounts {
        &self.accounts
    }

    /// The initiator has closed the connection; [`Channel::handle_disconnected`] follows.
    pub fn note_closed(&mut self) {
        self.ended.get_or_insert(Parting::Closed);
    }

    /// Returns the reason of its end.
    #[must_use]
    pub fn end(&self) -> Parting {
        self.ended.unwrap_or(Parting::Lost)
    }

    /// Returns its account of the initiator's credits.
    #[must_use]
    pub fn req_lim(&self) -> &ReqLim {
        &self.req_lim
    }

    /// Returns its account of the send queue's credits.
    #[must_use]
    pub fn send_queue(&self) -> &SendQueue {
        &self.send_queue
    }

    /// Returns the number of requests that hold a context.
    #[must_use]
    pub fn in_flight(&self) -> usize {
        self.ioctx.len()
    }

    /// The state of a context.
    #[must_use]
    pub fn ioctx_state(&self, idx: TaskIdx) -> IoctxState {
        self.ioctx.get(idx).map_or(IoctxState::Done, |io| io.state)
    }

    /// Number of waits for pool memory for one unit that have begun.
    #[must_use]
    pub fn pool_waits_begun(&self) -> u64 {
        self.backlog.waits_begun()
    }

    /// Number of units for which commands wait for pool memory.
    #[must_use]
    pub fn pool_waits(&self) -> usize {
        self.backlog.memory_waits()
    }

    /// Returns the time at which [`Channel::handle_timeout`] is due.
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

    /// Returns the next action, in order.
    pub fn poll_action(&mut self) -> Option<Action> {
        if let Some(first) = self.first_receives.next() {
            return Some(Action::PostRecv(RecvIdx(first)));
        }
        let action = self.actions.pop_front();
        if action.is_none() {
            // Begins again at the front of its memory, most of which a shallow session never
            // touches.
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

    /// Returns the address and the length of a receive context, for the device.
    #[must_use]
    pub fn receive_place(&self, recv: RecvIdx) -> (u64, u32) {
        let addr = self.config.receive_ring.addr() + self.receive_offset(recv) as u64;
        (addr, self.config.params.max_it_iu_len)
    }

    /// Returns the memory of a send context's message.
    #[must_use]
    pub fn send_slot(&self, ioctx: TaskIdx) -> MemSlice {
        let len = self.config.params.max_ti_iu_len as usize;
        slot(&self.config.send_ring, self.send_offset(ioctx), len)
    }

    /// Returns the address of a send context's message, for the device.
    #[must_use]
    pub fn send_addr(&self, ioctx: TaskIdx) -> u64 {
        self.config.send_ring.addr() + self.send_offset(ioctx) as u64
    }

    pub(super) fn send_offset(&self, ioctx: TaskIdx) -> usize {
        usize::from(ioctx.0) * self.config.params.send_stride()
    }

    /// Returns the data buffer of a context, for its block operation, if that needs one.
    #[must_use]
    pub fn data_buffer(&self, ioctx: TaskIdx) -> Option<&Buffer> {
        self.ioctx[usize::from(ioctx.0)].exec.buffer.as_ref()
    }

    /// Returns the RDMA requests of the chain that is being posted.
    pub fn requests(&self, task: TaskIdx) -> impl Iterator<Item = RdmaRequest<Ranges<'_>>> {
        // A message of our own has none.
        let ioctx = self.ioctx.get(task);
        ioctx.into_iter().flat_map(SendIoctx::requests)
    }

    /// A message arrived in this receive context.
    ///
    /// `bytes` are what was received there.
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
            // Otherwise it would overtake those that wait for a context.
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

    /// A receive ended without a message: the queue pair is in error.
    pub fn handle_recv_flushed(&mut self, cx: &mut Cx<'_>, _recv: RecvIdx) {
        self.posted_receives -= 1;
        self.on_queue_pair_error(cx);
        self.settle_round(cx);
    }

    /// The chain of a context completed, or failed.
    pub fn handle_post_done(&mut self, cx: &mut Cx<'_>, idx: TaskIdx, ok: bool) {
        if u32::from(idx.0) >= self.config.params.req_lim {
            self.on_own_sent(cx, idx, ok);
        } else {
            let io = &mut self.ioctx[usize::from(idx.0)];
            assert!(io.wrs > 0, "a chain was posted for {idx:?}");
            self.send_queue.give_back(std::mem::take(&mut io.wrs));
            if !ok {
                self.on_queue_pair_error(cx);
            }
            self.on_chain_done(cx, idx, ok);
        }
        self.settle_round(cx);
    }

    /// A block operation ended.
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

    /// The pool has more room than before.
    pub fn handle_pool(&mut self, cx: &mut Cx<'_>) {
        self.poll_memory(cx);
        self.settle_round(cx);
    }

    /// The connection is established. Unless the channel may start at once, it waits for
    /// [`Channel::handle_others_gone`], for at most [`JOIN_TIMEOUT`].
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

    /// The channels that this one waited for hold nothing any more.
    pub fn handle_others_gone(&mut self, cx: &mut Cx<'_>) {
        if self.state == ChState::Joining {
            self.start_serving();
        }
        self.settle_round(cx);
    }

    /// The channel has waited for replaced sessions longer than their commands usually take.
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

    /// A deadline may have passed.
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
            // Messages do not touch the timer, which is cheaper: what has been heard meanwhile is
            // only seen here.
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

    /// A probe was answered, or was not.
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

    /// The queues are gone, alone or with their device: nothing that was posted there will happen or
    /// complete.
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
        // Queues that are gone flush nothing.
        self.posted_receives = 0;
        self.probing = false;
        self.drained = true;
        self.settle_round(cx);
    }

    /// What every input ends with: deferred requests, chains that wait for credit, our own
    /// messages, and whether the channel is done.
    pub(super) fn settle_round(&mut self, cx: &mut Cx<'_>) {
        // Each input of each command comes here, and as a rule there is nothing to do.
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

    /// Limits the time in which chains complete. An initiator that does not take its answers holds
    /// memory, and blocks what waits for credit behind them.
    fn watch_chains(&mut self, now: Instant) {
        if self.send_queue.is_idle() && self.send_queue.front().is_none() && self.transfers == 0 {
            return;
        }
        // An answer alone, with nothing behind it, has longer than what others wait for.
        let at = if self.transfers > 0 || self.send_queue.front().is_some() {
            now + self.config.data_out_timeout
        } else {
            now + self.pieces_timeout
        };
        self.data_deadline = Some(self.data_deadline.map_or(at, |other| other.min(at)));
    }

    /// A command that goes in pieces has its place in the order from the second one on, and others
    /// may wait for its end: all later pieces together have a time, and the answer what is left of
    /// it. Data that are moved meanwhile extend it: see [`Pace`](crate::fabric::Pace).
    pub(super) fn begin_piece(&mut self, now: Instant, idx: TaskIdx) {
        let io = &mut self.ioctx[usize::from(idx.0)];
        io.began = Some(self.pace.begin(now));
        if io.exec.is_gathering() {
            return;
        }
        io.wait = io.began;
        io.ordered = io.ordered.or(io.began);
        // The first wait of a command has all of the time, and most commands wait once.
        let due = match io.waited.is_zero() {
            true => Some(now + self.pieces_timeout),
            false => io.piece_due(self.pieces_timeout, &self.pace),
        };
        if self.pieces_deadline.is_none() || due < self.pieces_deadline {
            self.pieces_deadline = due;
        }
    }

    /// Whether the initiator has had all the time that there is to give or take data.
    fn is_overdue(&mut self, now: Instant) -> bool {
        let is_over = |at: Option<Instant>| at.is_some_and(|at| at <= now);
        if is_over(self.pieces_deadline) {
            // The piece may have come or gone meanwhile.
            let time = self.pieces_timeout;
            let dues = self
                .ioctx
                .iter()
                .filter_map(|(_, io)| io.piece_due(time, &self.pace));
            self.pieces_deadline = dues.min();
        }
        is_over(self.data_deadline) || is_over(self.pieces_deadline)
    }

    /// Other initiators wait for memory, of which this channel may have more than its share.
    pub fn handle_pressure(&mut self, cx: &mut Cx<'_>) {
        if self.state == ChState::Live {
            self.check_awaited(cx);
        }
        self.settle_round(cx);
    }

    /// A command waits for the initiator with its place in the order. Nothing tells the channel that
    /// others begin to wait for it there.
    pub(super) fn watch_order(&mut self, now: Instant) {
        let look = now + OWED;
        self.awaited_deadline = Some(self.awaited_deadline.map_or(look, |at| at.min(look)));
    }

    /// Closes the channel if other initiators wait too long for its memory or its commands, as
    /// [`iscsi::Channel`](crate::iscsi::Channel) does in `check_data`.
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
            // Other initiators wait for all of its pieces together.
            let ordered = io.ordered.unwrap_or(began);
            let held = held.map(|since| pace.due_awaited(ordered.later(since), OWED));
            owed.into_iter().chain(held).min()
        };
        let due = self.ioctx.iter().filter_map(|(_, io)| due(io)).min();
        let is_watched = is_owed || self.ioctx.iter().any(|(_, io)| is_in_order(io));
        let look = is_watched.then_some(cx.now + OWED);
        self.awaited_deadline = look.into_iter().chain(due).min();
        if due.is_some_and(|at| at <= cx.now) {
            self.end_silent(cx);
        }
    }

    /// Closes the channel of an initiator that moves no data, or too little.
    fn end_silent(&mut self, cx: &mut Cx<'_>) {
        warn_limited!(
            self.complaints,
            cx.now,
            nexus = self.config.nexus.0,
            "timed out waiting for the initiator to move its data"
        );
        self.ended.get_or_insert(Parting::Silent);
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

    /// Looks at a message; `false` if it has to wait for a context.
    fn dispatch(&mut self, cx: &mut Cx<'_>, recv: RecvIdx, bytes: &[u8]) -> bool {
        let opcode = Opcode::of(bytes);
        if self.ioctx.is_full() && matches!(opcode, Ok(Opcode::Cmd | Opcode::TskMgmt)) {
            return false;
        }
        let immediate = self.config.params.immediate;
        // Nearly all are commands, which are large to move: they are parsed by themselves.
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

    /// Looks at a message that is no command, or is not legal.
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
                // A request with a tag can be answered by itself; anything else leaves it open what
                // the peer means, so the channel ends.
                match (opcode, tag_of(bytes)) {
                    (Ok(Opcode::Cmd | Opcode::TskMgmt), Some(tag)) => self.refuse(cx, tag),
                    _ => self.logout(cx, TLogoutReason::InvalidIuType),
                }
            }
        }
    }

    /// Ends the channel because of what its peer did.
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

    /// Posts a receive context again, while the channel still receives.
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

    /// The mapping that the receive ring lies in, and where a context begins in it.
    pub(super) fn receive_memory(&self, recv: RecvIdx) -> (&Memory, usize) {
        let ring = &self.config.receive_ring;
        (ring.memory(), ring.offset() + self.receive_offset(recv))
    }

    pub(super) fn portion_limits(&self) -> PortionLimits {
        // Half the queue, so that one long transfer and a short one go side by side; one place is
        // the answer's.
        let credits = self.config.params.send_queue - RESERVED;
        PortionLimits {
            wrs: (credits / 2).max(1).min(credits - 1),
            sges: self.config.max_sge,
        }
    }

    /// The name of a context's present use, for other channels.
    pub(super) fn task_ref(&self, idx: TaskIdx) -> TaskRef {
        TaskRef {
            worker: self.config.worker,
            channel: self.config.serial,
            index: idx,
            generation: self.ioctx.generation(idx),
        }
    }

    fn check_drained(&mut self) {
        // Everything that a device may still touch: posted receives, chains and block operations
        // of the contexts, messages of our own, the probe. The marker is behind all that was
        // posted.
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

/// The tag of a request that is otherwise not understood: every request has it in the same place.
fn tag_of(bytes: &[u8]) -> Option<riser_scsi::srp::Tag> {
    let tag = bytes.get(8..16)?;
    Some(riser_scsi::srp::Tag(u64::from_be_bytes(
        tag.try_into().expect("eight bytes"),
    )))
}
