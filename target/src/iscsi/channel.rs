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

use std::collections::VecDeque;
use std::fmt::Display;
use std::sync::Arc;
use std::time::{Duration, Instant};

use riser_scsi::iscsi::login::{
    CompletedLogin, ConnectionParams, Identity, LoginFault, Refusal, SessionParams, TargetLogin,
    Terms,
};
use riser_scsi::iscsi::name::{DiscoveredTarget, IscsiName};
use riser_scsi::iscsi::pdu::LoginStatus;
use riser_scsi::iscsi::{Cid, CmdSn, Itt, Numbers, StatSn, Tsih};
use riser_scsi::nexus::NexusId;
use riser_scsi::step::StepResult;
use riser_state::State;
use rustc_hash::FxHashMap;

use super::counters::Counters;
use super::datamover::Datamover;
use super::pending::{LoginResult, QueuedRequest, TextState};
use super::reassigned::{Allegiance, ReassignRequest};
use super::task::{SpareTasks, Task, TaskState};
use super::window::{WINDOWS, Window};
use crate::audit::CloseReason;
use crate::fabric::{
    Accounts, Backlog, CallContext, CommandFlow, ConnRef, Contexts, LunMap, Pace, TaskAction,
    TaskIdx, TaskRef, Wait,
};
use crate::log::RateLimit;
use crate::pool::{Buffer, Pool};
use crate::stats::{Functions, SessionEvent};
use crate::warn_limited;

/// Maximum number of PDUs and transfers in the send queue before we stop reading.
pub const MAX_QUEUED: usize = 512;

/// Maximum size of control-type PDU data in the send queue before we stop reading, in bytes.
/// Command data isn't included because it's already stored in pool buffers.
pub const MAX_QUEUED_BYTES: usize = 256 << 10;

/// Number of contexts in addition to the command window, used for immediate commands and functions.
pub(super) const IMMEDIATE_TASKS: u16 = 16;

/// Login timeout.
const LOGIN_TIMEOUT: Duration = Duration::from_secs(15);

/// Idle time before we send a ping to the initiator.
const PING_AFTER: Duration = Duration::from_secs(15);

/// Timeout for a ping response.
const PING_TIMEOUT: Duration = Duration::from_secs(10);

/// Maximum time without input from an initiator. Nothing is acknowledged during this time.
pub(super) const SILENCE: Duration = PING_AFTER.saturating_add(PING_TIMEOUT);

/// Idle timeout for a discovery session, because most initiators send nothing after SendTargets.
const DISCOVERY_IDLE: Duration = Duration::from_secs(15);

/// Maximum duration of a discovery session.
pub(super) const DISCOVERY_TIMEOUT: Duration = Duration::from_secs(60);

/// Decisions about login and discovery, implemented by the target.
pub trait Gate {
    /// Returns the authentication terms for a login.
    ///
    /// # Errors
    /// Returns the reason if the login is refused.
    fn admit(&mut self, identity: &Identity) -> Result<Terms, Refusal>;

    /// Creates a session with `first` as the first CmdSN, or adds a connection to an existing
    /// session.
    ///
    /// # Errors
    /// Returns the login status if this is refused.
    fn join(&mut self, joined: &CompletedLogin, first: CmdSn) -> Result<LoginGrant, LoginStatus>;

    /// Called when a login fails with this status. Includes the identity if it's already known, and
    /// the CHAP user name that was used.
    fn refused(
        &mut self,
        status: LoginStatus,
        identity: Option<&Identity>,
        fault: Option<&LoginFault>,
        user: Option<&str>,
    );

    /// Counts an event for the target of this session.
    fn count(&mut self, event: SessionEvent);

    /// Starts the logout of another connection, and returns false if there is no such connection.
    /// When that connection is closed, or its commands can be reassigned,
    /// [`Channel::handle_others_gone`] is called.
    fn end_other(&mut self, cid: Cid, ending: Ending) -> bool;

    /// The channel no longer waits for the sessions that are being replaced.
    fn stop_waiting(&mut self);

    /// Fills `out` with cryptographically secure random bytes.
    fn random(&mut self, out: &mut [u8]);

    /// Returns the targets visible to an initiator. If `wanted` is set, only this target is
    /// returned.
    fn targets(
        &mut self,
        initiator: &IscsiName,
        wanted: Option<&IscsiName>,
    ) -> Vec<DiscoveredTarget>;
}

/// Result of joining a session.
#[derive(Clone, Debug)]
pub struct LoginGrant {
    /// Target session identifying handle, must not be 0.
    pub tsih: Tsih,
    /// I_T nexus and LUN map, or `None` for a discovery session.
    pub nexus: Option<(NexusId, Arc<LunMap>)>,
    /// Parameters from the leading login of the session.
    pub params: SessionParams,
    /// Command window, shared by all connections of the session.
    pub window: Arc<Window>,
    /// Set if the new session replaces sessions which may still have commands at a device.
    /// [`Channel::handle_others_gone`] is called when these have completed. If this takes too long,
    /// the affected units will refuse new commands until then.
    pub waits: bool,
}

/// Worker context for a call.
pub struct Cx<'a> {
    /// Current time of the worker loop.
    pub now: Instant,
    /// Data buffers for this worker.
    pub pool: &'a mut Pool,
    /// Unused contexts of this worker.
    pub spare: &'a mut SpareTasks,
    /// Used for login and discovery.
    pub gate: &'a mut dyn Gate,
}

impl CallContext for Cx<'_> {
    fn now(&self) -> Instant {
        self.now
    }

    fn pool(&mut self) -> &mut Pool {
        self.pool
    }
}

/// Request from a channel to its worker.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Action {
    /// Request for a command or function.
    Task(TaskAction),
    /// Notify another connection of the session that it might have the next command.
    TakeTurn(ConnRef),
    /// Terminate all other connections of the session, then call [`Channel::handle_others_gone`].
    EndOthers,
    /// The connection was lost and its commands are kept. Another connection of this session should
    /// be notified by calling [`Channel::handle_lost`].
    Lost,
    /// The commands of this connection can now be claimed. The connection that requested the logout
    /// must be notified.
    Detached,
    /// Notify the channel owning a command that it's claimed by a TASK REASSIGN: call
    /// [`Channel::handle_reassign`].
    Reassign(ReassignRequest),
    /// Pass the result of [`Channel::take_reassigned`] to [`Channel::handle_reassigned`].
    DeliverTask,
    /// Close the connection, then call [`Channel::handle_disconnected`].
    Disconnect,
    /// The channel has released all resources.
    Release,
}

/// How a connection is terminated by another connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ending {
    /// Abort all commands.
    Terminate,
    /// Keep the commands so that other connections can claim them.
    Detach,
}

impl Ending {
    /// Returns how to terminate a connection when it's reinstated (RFC 7143 6.3.4).
    pub fn of_reinstatement(params: &SessionParams) -> Self {
        if params.error_recovery_level > 1 {
            Self::Detach
        } else {
            Self::Terminate
        }
    }
}

/// Connection phase.
///
/// ```text
///  Login ──→ (Joining) ──→ FullFeature ──→ LoggingOut ──→ Closing ──→ Closed
///    └───────────┴─────────────┴──── error ───────────────────┘
/// ```
///
/// If the login fails, the response is sent in the Closing phase.
///
/// At error recovery level 2, a connection that is lost during full-feature phase isn't closed
/// immediately (RFC 7143 8.2):
///
/// ```text
///  FullFeature ──lost──→ CleanupWait ──logged out for recovery──→ Retaining ──→ Closed
///    │                      ↑ └────────────── timeout ──────────────────────────┘
///    └── logs itself out for recovery ──→ Closing
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Phase {
    /// Exchanging login PDUs. If we receive any other PDU, the connection is closed.
    Login,
    /// Login succeeded. Wait until the commands of replaced sessions are no longer at a device, but
    /// at most [`REINSTATEMENT`](super::login::REINSTATEMENT).
    Joining,
    /// Processing commands, or text requests in a discovery session.
    FullFeature,
    /// Waiting for commands to complete before responding to the logout with this tag.
    LoggingOut(Itt),
    /// Sending the remaining PDUs before closing the connection.
    Closing,
    /// The connection was lost. Commands are kept until it's logged out.
    CleanupWait,
    /// The connection is logged out. Commands are kept for a TASK REASSIGN on another connection.
    Retaining,
    /// The connection is closed, but devices might still be using buffers.
    Closed,
}

impl State for Phase {
    fn may_become(&self, next: &Self) -> bool {
        match self {
            Self::Login => matches!(next, Self::Joining | Self::Closing | Self::Closed),
            Self::Joining => matches!(next, Self::FullFeature | Self::Closed),
            Self::FullFeature => matches!(
                next,
                Self::LoggingOut(_) | Self::Closing | Self::CleanupWait | Self::Closed
            ),
            Self::LoggingOut(_) => matches!(next, Self::Closing | Self::Closed),
            Self::Closing => matches!(next, Self::CleanupWait | Self::Closed),
            Self::CleanupWait => matches!(next, Self::Retaining | Self::Closed),
            Self::Retaining => matches!(next, Self::Closed),
            Self::Closed => false,
        }
    }
}

/// Configuration for a new channel.
#[derive(Clone, Copy, Debug)]
pub struct ChannelConfig {
    /// Worker index.
    pub worker: u16,
    /// Channel number, unique for this worker.
    pub serial: u64,
    /// Command window size.
    pub commands: u16,
    /// Timeout for data requested from the initiator.
    pub data_out_timeout: Duration,
}

/// Session state, available after login.
#[derive(Debug)]
pub(super) struct SessionContext {
    pub(super) identity: Identity,
    pub(super) tsih: Tsih,
    pub(super) params: SessionParams,
    pub(super) connection: ConnectionParams,
    pub(super) nexus: NexusId,
    pub(super) luns: Arc<LunMap>,
    pub(super) window: Arc<Window>,
}

/// Connection with an initiator.
#[derive(Debug)]
pub struct Channel<D> {
    pub(super) config: ChannelConfig,
    pub(super) phase: Phase,
    pub(super) login: TargetLogin,
    pub(super) session: Option<SessionContext>,
    pub(super) mover: D,
    pub(super) new_params: Option<ConnectionParams>,
    pub(super) tasks: Contexts<Task>,
    /// Pending requests by tag. There is at most one for each context, and the capacity is
    /// allocated for this. The tags are chosen by the initiator, which could cause hash collisions,
    /// but lookups are still limited by the number of contexts.
    pub(super) unanswered: FxHashMap<Itt, TaskIdx>,
    /// Memory for immediate data when not in use by a command. FirstBurstLength at most.
    pub(super) staging: Vec<u8>,
    /// The request currently being processed has a slot in the command window but no context.
    pub(super) has_place: bool,
    /// Number of tasks that use a slot in the command window.
    pub(super) counted: u16,
    /// Number of completed tasks that used a slot, but the response hasn't been sent yet.
    pub(super) lingering: u16,
    /// Number of tasks that will be handed over by another connection, and use a slot there.
    pub(super) expected: u16,
    pub(super) allegiance: Allegiance,
    /// Logouts for other connections. We send the response when those connections have released
    /// their resources.
    pub(super) logouts: Vec<Itt>,
    /// First CmdSN, as set by the login request.
    pub(super) first_cmd_sn: CmdSn,
    /// Requests received out of order.
    pub(super) waiting: Vec<QueuedRequest>,
    /// Final login response, while waiting for replaced sessions.
    pub(super) entering: Option<Box<LoginResult>>,
    /// The logout is waiting for other connections of the session to close.
    pub(super) awaits_others: bool,
    /// The current logout closes the session.
    pub(super) ends_session: bool,
    /// An I_T NEXUS RESET was received and the session will be closed.
    pub(super) is_reset: bool,
    /// The logout response was sent.
    pub(super) logged_out: bool,
    /// Reason for closing the connection, if known.
    pub(super) ended: Option<CloseReason>,
    /// Commands waiting for memory or for rate limits.
    pub(super) backlog: Backlog,
    pub(super) text: TextState,
    pub(super) cid: Cid,
    pub(super) last_input: Instant,
    /// Time when solicited or immediate data was last received.
    pub(super) last_data: Instant,
    /// Number of bytes of unsolicited data that were announced by commands but not received yet.
    pub(super) unasked: u64,
    /// Time when the initiator last received data from us.
    pub(super) last_taken: Instant,
    pub(super) pace: Pace,
    /// Set while other initiators are waiting for memory and this one is using more than its share.
    pub(super) owed: Option<Wait>,
    /// Set while other initiators are waiting for our commands in the order of a unit.
    pub(super) held: Option<Wait>,
    /// Time of the next check for data timeouts.
    pub(super) data_deadline: Option<Instant>,
    pub(super) ping: Option<Instant>,
    pub(super) next_ping: u32,
    pub(super) phase_deadline: Option<Instant>,
    pub(super) is_connected: bool,
    pub(super) is_flushed: bool,
    pub(super) released: bool,
    pub(super) actions: VecDeque<Action>,
    pub(super) counters: Counters,
    /// Number of functions by response.
    pub(super) functions: Functions,
    /// Command statistics for each unit.
    pub(super) accounts: Accounts,
    pub(super) complaints: RateLimit,
}

impl ChannelConfig {
    /// Returns the number of contexts for commands and functions.
    #[must_use]
    pub fn contexts(&self) -> u16 {
        WINDOWS * self.commands + IMMEDIATE_TASKS
    }

    /// Returns the memory used by contexts in bytes. They are allocated at the start of
    /// full-feature phase in a normal session.
    #[must_use]
    pub fn memory(&self) -> usize {
        let contexts = usize::from(self.contexts());
        // The tag index is at least half full.
        let index = 2 * size_of::<(Itt, TaskIdx)>();
        Contexts::<Task>::memory(contexts) + contexts * index
    }
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
            phase: Phase::Login,
            login: TargetLogin::new(),
            session: None,
            mover,
            new_params: None,
            // Contexts are allocated in full-feature phase, so that an unauthenticated peer can't
            // use memory.
            tasks: Contexts::default(),
            unanswered: FxHashMap::default(),
            staging: Vec::new(),
            has_place: false,
            counted: 0,
            lingering: 0,
            expected: 0,
            allegiance: Allegiance::default(),
            logouts: Vec::new(),
            first_cmd_sn: CmdSn(0),
            waiting: Vec::new(),
            entering: None,
            awaits_others: false,
            ends_session: false,
            is_reset: false,
            logged_out: false,
            ended: None,
            backlog: Backlog::new(config.serial, config.commands.into()),
            text: TextState::default(),
            cid: Cid(0),
            last_input: now,
            last_data: now,
            unasked: 0,
            last_taken: now,
            pace: Pace::new(config.commands.into()),
            owed: None,
            held: None,
            data_deadline: None,
            ping: None,
            next_ping: 0,
            phase_deadline: Some(now + LOGIN_TIMEOUT),
            is_connected: true,
            is_flushed: true,
            released: false,
            actions: VecDeque::new(),
            counters: Counters::default(),
            functions: Functions::default(),
            accounts: Accounts::default(),
            complaints: RateLimit::default(),
            config,
        }
    }

    /// Allocates contexts for requests. They are not needed before login or in a discovery session.
    pub(super) fn make_contexts(&mut self) {
        let tasks = self.config.contexts();
        self.tasks = Contexts::new(tasks);
        self.unanswered.reserve(usize::from(tasks));
    }

    /// Returns true if this connection can receive commands, which means that a normal session has
    /// reached full-feature phase.
    #[must_use]
    pub fn takes_commands(&self) -> bool {
        self.tasks.bound() > 0
    }

    /// Returns the memory in bytes used by contexts and by unsolicited data without a buffer.
    #[must_use]
    pub fn memory(&self) -> usize {
        match self.takes_commands() && self.session.is_some() {
            true => self.config.memory() + self.staged_memory(),
            false => 0,
        }
    }

    /// Returns the memory in bytes used by unsolicited data without a buffer. Each command can have
    /// up to FirstBurstLength, in a vector whose capacity might have doubled.
    #[must_use]
    pub fn staged_memory(&self) -> usize {
        let Some(session) = &self.session else {
            return 0;
        };
        let most = session.params.first_burst as usize * 2;
        let own = self.tasks.iter().map(|(_, task)| &task.incoming.staged);
        let lists = own.chain([&self.staging]);
        lists.map(|list| list.capacity().min(most)).sum()
    }

    /// Returns the current phase.
    #[must_use]
    pub fn phase(&self) -> Phase {
        self.phase
    }

    /// Returns the channel configuration.
    #[must_use]
    pub fn config(&self) -> &ChannelConfig {
        &self.config
    }

    /// Returns a copy of the counters.
    #[must_use]
    pub fn counters(&self) -> Counters {
        self.counters
    }

    /// Returns the number of task-management functions by response.
    #[must_use]
    pub fn functions(&self) -> &Functions {
        &self.functions
    }

    /// Returns the statistics for each unit.
    #[must_use]
    pub fn accounts(&self) -> &Accounts {
        &self.accounts
    }

    /// Returns the number of requests with a context.
    #[must_use]
    pub fn in_flight(&self) -> usize {
        self.tasks.len()
    }

    /// Returns the total number of waits for pool memory, counted for each unit.
    #[must_use]
    pub fn pool_waits_begun(&self) -> u64 {
        self.backlog.waits_begun()
    }

    /// Returns the number of units with commands waiting for pool memory.
    #[must_use]
    pub fn pool_waits(&self) -> usize {
        self.backlog.memory_waits()
    }

    /// Returns true if received data will be processed.
    #[must_use]
    pub fn is_receiving(&self) -> bool {
        matches!(
            self.phase,
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
        self.mover.queued() < MAX_QUEUED && self.mover.queued_bytes() < MAX_QUEUED_BYTES
    }

    /// Returns when to call [`Channel::handle_timeout`].
    #[must_use]
    pub fn deadline(&self) -> Option<Instant> {
        let ping = match (self.phase, self.ping) {
            (Phase::FullFeature, _) if self.is_discovery() => {
                Some(self.last_input + DISCOVERY_IDLE)
            }
            (Phase::FullFeature, None) => Some(self.last_input + PING_AFTER),
            (Phase::FullFeature, Some(sent)) => Some(sent + PING_TIMEOUT),
            _ => None,
        };
        let data = self.data_deadline;
        [
            self.phase_deadline,
            ping,
            data,
            self.backlog.limits.deadline(),
        ]
        .into_iter()
        .flatten()
        .min()
    }

    /// Returns the next action.
    pub fn poll_action(&mut self) -> Option<Action> {
        self.actions.pop_front()
    }

    /// Returns the data buffer of a task for its block operation, if it's required.
    #[must_use]
    pub fn data_buffer(&self, task: TaskIdx) -> Option<&Buffer> {
        self.tasks[task].exec.buffer.as_ref()
    }

    /// Returns the negotiated connection parameters after login. They are returned only once.
    pub fn take_new_params(&mut self) -> Option<ConnectionParams> {
        self.new_params.take()
    }

    /// Returns the datamover.
    #[must_use]
    pub fn mover(&self) -> &D {
        &self.mover
    }

    /// Returns the data transfer pace.
    #[must_use]
    pub fn pace(&self) -> &Pace {
        &self.pace
    }

    /// Returns the number of PDUs and transfers in the send queue.
    #[must_use]
    pub fn queued(&self) -> usize {
        self.mover.queued()
    }

    /// Returns the total data segment size of control-type PDUs in the send queue, in bytes.
    #[must_use]
    pub fn queued_bytes(&self) -> usize {
        self.mover.queued_bytes()
    }

    /// Returns the datamover for connection events.
    pub fn mover_mut(&mut self) -> &mut D {
        &mut self.mover
    }

    /// Handles an error in the stream, which we can't parse any further. Counted as `event`.
    pub fn handle_broken(&mut self, cx: &mut Cx<'_>, event: SessionEvent, error: impl Display) {
        cx.gate.count(event);
        warn_limited!(self.complaints, cx.now, %error, "the connection is broken");
        self.ended.get_or_insert(CloseReason::Protocol);
        self.lose_connection(cx.now);
        self.settle(cx);
    }

    /// Called when the last PDU of a task, or a piece of its data, was sent. `ok` is false if this
    /// failed.
    pub fn handle_done(&mut self, cx: &mut Cx<'_>, task: TaskIdx, ok: bool) {
        self.last_taken = cx.now;
        if self.tasks[task].state == TaskState::Send {
            self.on_piece_sent(cx, task);
        } else {
            self.finish_answered(cx, task, ok);
        }
    }

    /// Called when the current batch was sent, or can't be sent if `ok` is false.
    pub fn handle_flushed(&mut self, cx: &mut Cx<'_>, ok: bool) {
        self.is_flushed = true;
        if !ok {
            self.lose_connection(cx.now);
        }
        self.settle(cx);
    }

    /// Handles a completed block operation.
    pub fn handle_block_done(&mut self, cx: &mut Cx<'_>, task: TaskIdx, result: StepResult) {
        self.on_block_done(cx, task, result);
        self.settle(cx);
    }

    /// Called when memory was released to the pool.
    pub fn handle_pool(&mut self, cx: &mut Cx<'_>) {
        self.poll_memory(cx);
        self.settle(cx);
    }

    /// Called when a deadline might have expired.
    pub fn handle_timeout(&mut self, cx: &mut Cx<'_>) {
        if self.phase_deadline.is_some_and(|at| at <= cx.now) {
            self.phase_deadline = None;
            self.on_time_over(cx);
        }
        self.poll_limits(cx);
        if self.data_deadline.is_some_and(|at| at <= cx.now) {
            self.check_data(cx);
        }
        // The other deadlines were already handled above, so this can only be the idle timeout for
        // the initiator.
        if self.phase == Phase::FullFeature && self.deadline().is_some_and(|at| at <= cx.now) {
            if self.is_discovery() {
                self.ended.get_or_insert(CloseReason::Silent);
                self.drop_connection();
            } else if self.ping.is_some() {
                cx.gate.count(SessionEvent::TimedOut);
                warn_limited!(
                    self.complaints,
                    cx.now,
                    "timed out waiting for a response from the initiator"
                );
                self.ended.get_or_insert(CloseReason::Silent);
                self.lose_connection(cx.now);
            } else {
                self.send_ping(cx.now);
            }
        }
        self.settle(cx);
    }

    /// Called when the connection is closed and no more data can be sent or received.
    pub fn handle_disconnected(&mut self, cx: &mut Cx<'_>) {
        self.is_connected = false;
        self.lose_connection(cx.now);
        self.settle(cx);
    }

    /// Called when the initiator closes the connection. [`Channel::handle_disconnected`] is called
    /// next.
    pub fn note_closed(&mut self) {
        self.ended.get_or_insert(CloseReason::Closed);
    }

    /// Returns true for a discovery session.
    pub(super) fn is_discovery(&self) -> bool {
        self.session.as_ref().is_some_and(|s| s.params.discovery)
    }

    /// Returns the reason for closing the connection.
    #[must_use]
    pub fn end(&self) -> CloseReason {
        self.ended.unwrap_or(CloseReason::Lost)
    }

    /// Updates the LUN map for the initiator. Commands in flight aren't affected.
    pub fn handle_luns(&mut self, luns: Arc<LunMap>) {
        if let Some(session) = &mut self.session {
            self.accounts.follow(&luns);
            session.luns = luns;
        }
    }

    /// Called when the rate limits for units or for the initiator have changed.
    pub fn handle_limits(&mut self, cx: &mut Cx<'_>) {
        let luns = self.session.as_ref().map(|session| &session.luns);
        let limiter = luns.and_then(|luns| luns.limiter());
        self.backlog.limits.rebook(limiter, cx.now);
        self.poll_limits(cx);
        self.settle(cx);
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

    pub(super) fn conn_ref(&self) -> ConnRef {
        ConnRef {
            worker: self.config.worker,
            serial: self.config.serial,
        }
    }

    /// Returns the command window of the session.
    pub(super) fn window(&self) -> &Arc<Window> {
        let session = self.session.as_ref().expect("full-feature phase");
        &session.window
    }

    fn numbers(&self) -> Numbers {
        let (exp_cmd_sn, max_cmd_sn) = match &self.session {
            Some(session) => session.window.bounds(),
            None => {
                let more = u32::from(self.config.commands).wrapping_sub(1);
                (self.first_cmd_sn, self.first_cmd_sn.plus(more))
            }
        };
        Numbers {
            stat_sn: StatSn(0),
            exp_cmd_sn,
            max_cmd_sn,
        }
    }

    /// Returns the name of the task in a context, which other channels can use.
    pub(super) fn task_ref(&self, idx: TaskIdx) -> TaskRef {
        TaskRef {
            worker: self.config.worker,
            channel: self.config.serial,
            index: idx,
            generation: self.tasks.generation(idx),
        }
    }

    /// Lets the datamover send data. Returns true if there was something to send.
    pub fn poll_mover(
        &mut self,
        poll: impl FnOnce(&mut D, Numbers, TaskBuffers<'_>) -> bool,
    ) -> bool {
        if matches!(
            self.phase,
            Phase::CleanupWait | Phase::Retaining | Phase::Closed
        ) {
            return false;
        }
        let numbers = self.numbers();
        let is_posted = poll(&mut self.mover, numbers, TaskBuffers(&self.tasks));
        self.is_flushed &= !is_posted;
        is_posted
    }
}
