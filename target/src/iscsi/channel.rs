//! The channel: one connection, and the session on it.
//!
//! # Calling order
//! 1. [`Channel::new`] when the connection exists.
//! 2. Inputs, in any order: [`Channel::handle_frame`], [`Channel::handle_done`],
//!    [`Channel::handle_block_done`], [`Channel::handle_pool`], [`Channel::handle_timeout`],
//!    [`Channel::handle_disconnected`], and what other channels say:
//!    [`Channel::handle_task_start`], [`Channel::handle_abort`], [`Channel::handle_task_gone`].
//! 3. After every input, [`Channel::poll_action`] until it has none.
//! 4. After [`Action::Release`] the channel holds nothing, and may be dropped.

use std::collections::VecDeque;
use std::fmt::Display;
use std::sync::Arc;
use std::time::{Duration, Instant};

use riser_scsi::iscsi::login::{
    CompletedLogin, ConnectionParams, Identity, Refusal, SessionParams, TargetLogin, Terms,
};
use riser_scsi::iscsi::name::{Found, IscsiName};
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
use crate::audit::Parting;
use crate::fabric::{
    Accounts, Backlog, CommandFlow, ConnRef, Contexts, Lent, LunMap, Pace, TaskAction, TaskIdx,
    TaskRef,
};
use crate::log::RateLimit;
use crate::pool::{Buffer, Pool};
use crate::stats::{Functions, SessionEvent};
use crate::warn_limited;

/// PDUs and transfers that may wait to be sent before nothing more is read.
pub const MAX_QUEUED: usize = 512;

/// Bytes of control-type PDUs' data that may wait to be sent before nothing more is read. Data of
/// commands do not count: they lie in buffers of the pool.
pub const MAX_QUEUED_BYTES: usize = 256 << 10;

/// Contexts beyond the command window, for immediate commands and functions.
pub(super) const IMMEDIATE_TASKS: u16 = 16;

/// Bytes of unsolicited data of a connection's commands that wait for limits.
pub(super) const MAX_STAGED: usize = 256 << 10;

/// Time limit of a login.
const LOGIN_TIMEOUT: Duration = Duration::from_secs(15);

/// Silence after which an initiator is pinged.
const PING_AFTER: Duration = Duration::from_secs(15);

/// Time limit for the answer to a ping.
const PING_TIMEOUT: Duration = Duration::from_secs(10);

/// Maximum silence of an initiator, which acknowledges nothing meanwhile.
pub(super) const SILENCE: Duration = PING_AFTER.saturating_add(PING_TIMEOUT);

/// Maximum silence of a discovery session: one that has found its targets sends nothing else.
const DISCOVERY_IDLE: Duration = Duration::from_secs(15);

/// Maximum duration of a discovery session.
pub(super) const DISCOVERY_TIMEOUT: Duration = Duration::from_secs(60);

/// Decisions of the target about logins and discovery.
pub trait Gate {
    /// Terms of a login.
    ///
    /// # Errors
    /// The refusal.
    fn admit(&mut self, identity: &Identity) -> Result<Terms, Refusal>;

    /// Enters a session whose first command will have the number `first`, or a connection into its
    /// session.
    ///
    /// # Errors
    /// The status that refuses it.
    fn join(&mut self, joined: &CompletedLogin, first: CmdSn) -> Result<LoginGrant, LoginStatus>;

    /// A login has failed, with this status. Whose it was, if it came so far.
    fn refused(&mut self, status: LoginStatus, identity: Option<&Identity>);

    /// Something has happened that the session's target counts.
    fn count(&mut self, event: SessionEvent);

    /// Another connection of the session is logged out; whether there is such a one. When it holds
    /// nothing any more, or others may have its commands, [`Channel::handle_others_gone`] follows.
    fn end_other(&mut self, cid: Cid, ending: Ending) -> bool;

    /// Fills with random bytes that cannot be predicted.
    fn random(&mut self, out: &mut [u8]);

    /// The targets that an initiator may see: all, or the one with a name.
    fn targets(&mut self, initiator: &IscsiName, wanted: Option<&IscsiName>) -> Vec<Found>;
}

/// A session that was entered.
#[derive(Clone, Debug)]
pub struct LoginGrant {
    /// Target session identifying handle, never 0.
    pub tsih: Tsih,
    /// The I_T nexus and its units; none of a discovery session.
    pub nexus: Option<(NexusId, Arc<LunMap>)>,
    /// Parameters of the session's first login.
    pub params: SessionParams,
    /// Command numbers, which all connections of the session share.
    pub window: Arc<Window>,
    /// It replaces sessions whose commands must leave the devices first:
    /// [`Channel::handle_others_gone`] follows.
    pub waits: bool,
}

/// The worker's part of a call.
pub struct Cx<'a> {
    /// Time of the worker's present round.
    pub now: Instant,
    /// The worker's data buffers.
    pub pool: &'a mut Pool,
    /// The worker's contexts that no request has.
    pub spare: &'a mut SpareTasks,
    /// Decides about logins and discovery.
    pub gate: &'a mut dyn Gate,
}

impl Lent for Cx<'_> {
    fn now(&self) -> Instant {
        self.now
    }

    fn pool(&mut self) -> &mut Pool {
        self.pool
    }
}

/// A request of a channel to its worker.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Action {
    /// A request for a command or a function.
    Task(TaskAction),
    /// Notify a connection of the session that it may have the command that is next.
    TakeTurn(ConnRef),
    /// End the other connections of the session, then call [`Channel::handle_others_gone`].
    EndOthers,
    /// The connection is lost, and what it had under way is kept: another connection of the session
    /// is to be notified, by [`Channel::handle_lost`].
    Lost,
    /// Other connections may claim what this one had under way: the one that has logged it out is
    /// to be notified.
    Detached,
    /// Notify the channel of a command that TASK REASSIGN claims it: [`Channel::handle_reassign`].
    Reassign(ReassignRequest),
    /// Deliver the command that [`Channel::take_reassigned`] gives: [`Channel::handle_reassigned`].
    DeliverTask,
    /// Close the connection; then call [`Channel::handle_disconnected`].
    Disconnect,
    /// The channel holds nothing any more.
    Release,
}

/// Ways in which a connection is ended by others.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ending {
    /// With all its commands.
    Terminate,
    /// Its commands are kept for other connections.
    Detach,
}

impl Ending {
    /// Returns how a connection ends that a login replaces (RFC 7143 6.3.4).
    pub fn of_reinstatement(params: &SessionParams) -> Self {
        if params.error_recovery_level > 1 {
            Self::Detach
        } else {
            Self::Terminate
        }
    }
}

/// Phase of a connection.
///
/// ```text
///  Login ──→ (Joining) ──→ FullFeature ──→ LoggingOut ──→ Closing ──→ Closed
///    └───────────┴─────────────┴──── error ───────────────────┘
/// ```
///
/// A login that fails is answered in Closing, too.
///
/// At error recovery level 2 a connection that is lost in full-feature phase does not end at once
/// (RFC 7143 8.2):
///
/// ```text
///  FullFeature ──lost──→ CleanupWait ──logged out for recovery──→ Retaining ──→ Closed
///    │                      ↑ └─────────── time is over ────────────────────────┘
///    └── logs itself out for recovery ──→ Closing
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Phase {
    /// Exchanges login PDUs; any other PDU ends the connection.
    Login,
    /// Login succeeded; waits until the commands of the sessions that it replaces have left the
    /// devices.
    Joining,
    /// Takes commands, or text requests in a discovery session.
    FullFeature,
    /// Commands end, then the logout with this tag is answered.
    LoggingOut(Itt),
    /// Sends what is still to be sent, then closes.
    Closing,
    /// The connection is lost, and its commands wait until it is logged out.
    CleanupWait,
    /// It is logged out, and its commands wait for TASK REASSIGN on another connection.
    Retaining,
    /// The connection is gone; devices may still use buffers.
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

/// Parameters of a new channel.
#[derive(Clone, Copy, Debug)]
pub struct ChannelConfig {
    /// Number of the connection's worker.
    pub worker: u16,
    /// The channel's number at that worker, never used twice.
    pub serial: u64,
    /// Commands at once: the window.
    pub commands: u16,
    /// Time limit for data that the initiator was asked for.
    pub data_out_timeout: Duration,
}

/// A session, once there is one.
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

/// One connection with one initiator.
#[derive(Debug)]
pub struct Channel<D> {
    pub(super) config: ChannelConfig,
    pub(super) phase: Phase,
    pub(super) login: TargetLogin,
    pub(super) session: Option<SessionContext>,
    pub(super) mover: D,
    pub(super) new_params: Option<ConnectionParams>,
    pub(super) tasks: Contexts<Task>,
    /// The requests that are not answered, by their tags: at most one for each context, with the
    /// room for that. The tags are the initiator's; bad ones are found slowly, and there are no more of
    /// them than contexts.
    pub(super) unanswered: FxHashMap<Itt, TaskIdx>,
    /// Memory for data that come with a command, while none has it; FirstBurstLength at most.
    pub(super) staging: Vec<u8>,
    /// The request that is being carried out has taken a place of the command window, and no
    /// context.
    pub(super) has_place: bool,
    /// Tasks that take a place of the command window.
    pub(super) counted: u16,
    /// Tasks that took one and are answered, but whose answer is not yet sent.
    pub(super) lingering: u16,
    /// Tasks that are to come from another connection, which took one there.
    pub(super) expected: u16,
    pub(super) allegiance: Allegiance,
    /// Logouts of other connections, to be answered when these hold nothing any more.
    pub(super) logouts: Vec<Itt>,
    /// The number that the login says comes first.
    pub(super) first_cmd_sn: CmdSn,
    /// Requests whose turn has not come.
    pub(super) waiting: Vec<QueuedRequest>,
    /// The answer to the login, while it waits for others to go.
    pub(super) entering: Option<Box<LoginResult>>,
    /// Others of the session are on their way out, and the logout waits for them.
    pub(super) awaits_others: bool,
    /// The session ends with the logout that is under way.
    pub(super) ends_session: bool,
    /// An I_T NEXUS RESET is answered, with which the session ends.
    pub(super) is_reset: bool,
    /// The initiator has logged out, and was answered.
    pub(super) logged_out: bool,
    /// Reason of the connection's end, once there is one.
    pub(super) ended: Option<Parting>,
    /// Commands that wait for memory or limits.
    pub(super) backlog: Backlog,
    pub(super) text: TextState,
    pub(super) cid: Cid,
    pub(super) last_input: Instant,
    /// Time of the last data that were asked for, or that came with a command.
    pub(super) last_data: Instant,
    /// Unsolicited data that commands have announced and that have not come, in bytes.
    pub(super) unasked: u64,
    /// Time at which the initiator last took data.
    pub(super) last_taken: Instant,
    pub(super) pace: Pace,
    /// Time of the next check for overdue data.
    pub(super) data_deadline: Option<Instant>,
    pub(super) ping: Option<Instant>,
    pub(super) next_ping: u32,
    pub(super) phase_deadline: Option<Instant>,
    pub(super) is_connected: bool,
    pub(super) is_flushed: bool,
    pub(super) released: bool,
    pub(super) actions: VecDeque<Action>,
    pub(super) counters: Counters,
    /// Functions answered, and how.
    pub(super) functions: Functions,
    /// Statistics of its commands, by unit.
    pub(super) accounts: Accounts,
    pub(super) complaints: RateLimit,
}

impl ChannelConfig {
    /// Contexts of commands and functions.
    #[must_use]
    pub fn contexts(&self) -> u16 {
        WINDOWS * self.commands + IMMEDIATE_TASKS
    }

    /// Memory of the contexts, in bytes, once there are any: from full-feature phase of a normal
    /// session on.
    #[must_use]
    pub fn memory(&self) -> usize {
        let contexts = usize::from(self.contexts());
        // The index by tags is half empty at most.
        let index = 2 * size_of::<(Itt, TaskIdx)>();
        Contexts::<Task>::memory(contexts) + contexts * index
    }
}

/// The contexts' buffers, for the datamover.
#[derive(Clone, Copy)]
pub struct TaskBuffers<'a>(&'a Contexts<Task>);

impl<'a> TaskBuffers<'a> {
    /// The buffer of a task that has data under way.
    pub fn buffer(&self, task: TaskIdx) -> &'a Buffer {
        let buffer = self.0[usize::from(task.0)].exec.buffer.as_ref();
        buffer.expect("data lie in a buffer")
    }
}

impl<D: Datamover> Channel<D> {
    /// A channel that waits for a login.
    #[must_use]
    pub fn new(config: ChannelConfig, mover: D, now: Instant) -> Self {
        Self {
            phase: Phase::Login,
            login: TargetLogin::new(),
            session: None,
            mover,
            new_params: None,
            // Contexts come with full-feature phase: a stranger who never logs in costs no memory.
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

    /// From here on requests may have contexts. Connections before login and discovery sessions
    /// have none.
    pub(super) fn make_contexts(&mut self) {
        let tasks = self.config.contexts();
        self.tasks = Contexts::new(tasks);
        self.unanswered.reserve(usize::from(tasks));
    }

    /// Whether commands may come, or might have come: not before full-feature phase, and not in a
    /// discovery session.
    #[must_use]
    pub fn takes_commands(&self) -> bool {
        self.tasks.bound() > 0
    }

    /// Returns the memory of its contexts and of unsolicited data that have no buffer yet, in
    /// bytes.
    #[must_use]
    pub fn memory(&self) -> usize {
        match self.takes_commands() && self.session.is_some() {
            true => self.config.memory() + self.staged_memory(),
            false => 0,
        }
    }

    /// Returns the memory of unsolicited data that have no buffer yet, in bytes. A command has no
    /// more than FirstBurstLength of these, in a list that may have doubled.
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

    /// Returns the phase of the connection.
    #[must_use]
    pub fn phase(&self) -> Phase {
        self.phase
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

    /// Returns the number of requests that hold a context.
    #[must_use]
    pub fn in_flight(&self) -> usize {
        self.tasks.len()
    }

    /// Whether commands wait for pool memory.
    #[must_use]
    pub fn waits_for_pool(&self) -> bool {
        self.backlog.waits_for_memory()
    }

    /// Whether it looks at what arrives at all.
    #[must_use]
    pub fn is_receiving(&self) -> bool {
        matches!(
            self.phase,
            Phase::Login | Phase::FullFeature | Phase::LoggingOut(_)
        )
    }

    /// Whether more should be read from the connection: what is to be sent does not pile up.
    #[must_use]
    pub fn wants_input(&self) -> bool {
        self.is_receiving() && self.has_room()
    }

    /// Whether more may be said to the initiator: what waits to be sent is not too much.
    #[must_use]
    pub fn has_room(&self) -> bool {
        self.mover.queued() < MAX_QUEUED && self.mover.queued_bytes() < MAX_QUEUED_BYTES
    }

    /// Returns the time at which [`Channel::handle_timeout`] is due.
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

    /// Returns the next action, in order.
    pub fn poll_action(&mut self) -> Option<Action> {
        self.actions.pop_front()
    }

    /// Returns the data buffer of a task, for its block operation, if that needs one.
    #[must_use]
    pub fn data_buffer(&self, task: TaskIdx) -> Option<&Buffer> {
        self.tasks[usize::from(task.0)].exec.buffer.as_ref()
    }

    /// Returns the connection's parameters after its login, once.
    pub fn take_new_params(&mut self) -> Option<ConnectionParams> {
        self.new_params.take()
    }

    /// Returns the datamover that carries it.
    #[must_use]
    pub fn mover(&self) -> &D {
        &self.mover
    }

    /// Returns the pace at which it moves data.
    #[must_use]
    pub fn pace(&self) -> &Pace {
        &self.pace
    }

    /// Returns the number of PDUs and transfers that wait to be sent.
    #[must_use]
    pub fn queued(&self) -> usize {
        self.mover.queued()
    }

    /// Returns the bytes of data segments of control-type PDUs that wait to be sent.
    #[must_use]
    pub fn queued_bytes(&self) -> usize {
        self.mover.queued_bytes()
    }

    /// Returns the datamover, for inputs of its connection.
    pub fn mover_mut(&mut self) -> &mut D {
        &mut self.mover
    }

    /// The stream cannot be followed further; this counts as `event`.
    pub fn handle_broken(&mut self, cx: &mut Cx<'_>, event: SessionEvent, error: impl Display) {
        cx.gate.count(event);
        warn_limited!(self.complaints, cx.now, %error, "the connection is broken");
        self.ended.get_or_insert(Parting::Protocol);
        self.lose_connection(cx.now);
        self.settle(cx);
    }

    /// What was handed to the datamover with this task as its end is on its way, or a piece of its
    /// data is.
    pub fn handle_done(&mut self, cx: &mut Cx<'_>, task: TaskIdx) {
        self.last_taken = cx.now;
        if self.tasks[usize::from(task.0)].state == TaskState::Send {
            self.on_piece_sent(cx, task);
        } else {
            self.finish_answered(cx, task);
        }
    }

    /// The batch that was being sent is sent, or never will be.
    pub fn handle_flushed(&mut self, cx: &mut Cx<'_>, ok: bool) {
        self.is_flushed = true;
        if !ok {
            self.lose_connection(cx.now);
        }
        self.settle(cx);
    }

    /// A block operation ended.
    pub fn handle_block_done(&mut self, cx: &mut Cx<'_>, task: TaskIdx, result: StepResult) {
        self.on_block_done(cx, task, result);
        self.settle(cx);
    }

    /// The pool has more room than before.
    pub fn handle_pool(&mut self, cx: &mut Cx<'_>) {
        self.poll_memory(cx);
        self.settle(cx);
    }

    /// A deadline may have passed.
    pub fn handle_timeout(&mut self, cx: &mut Cx<'_>) {
        if self.phase_deadline.is_some_and(|at| at <= cx.now) {
            self.phase_deadline = None;
            self.on_time_over(cx);
        }
        self.poll_limits(cx);
        if self.data_deadline.is_some_and(|at| at <= cx.now) {
            self.check_data(cx);
        }
        // The other deadlines were dealt with above: one that is still due is that of the
        // initiator's silence.
        if self.phase == Phase::FullFeature && self.deadline().is_some_and(|at| at <= cx.now) {
            if self.is_discovery() {
                self.ended.get_or_insert(Parting::Silent);
                self.drop_connection();
            } else if self.ping.is_some() {
                cx.gate.count(SessionEvent::TimedOut);
                warn_limited!(self.complaints, cx.now, "the initiator does not answer");
                self.ended.get_or_insert(Parting::Silent);
                self.lose_connection(cx.now);
            } else {
                self.send_ping(cx.now);
            }
        }
        self.settle(cx);
    }

    /// The connection is gone: nothing is sent or received any more.
    pub fn handle_disconnected(&mut self, cx: &mut Cx<'_>) {
        self.is_connected = false;
        self.lose_connection(cx.now);
        self.settle(cx);
    }

    /// The initiator has closed the connection; [`Channel::handle_disconnected`] follows.
    pub fn note_closed(&mut self) {
        self.ended.get_or_insert(Parting::Closed);
    }

    /// Whether its session is one of discovery.
    pub(super) fn is_discovery(&self) -> bool {
        self.session.as_ref().is_some_and(|s| s.params.discovery)
    }

    /// Returns the reason of the connection's end.
    #[must_use]
    pub fn end(&self) -> Parting {
        self.ended.unwrap_or(Parting::Lost)
    }

    /// The initiator may use other units from now on. Commands under way go on.
    pub fn handle_luns(&mut self, luns: Arc<LunMap>) {
        if let Some(session) = &mut self.session {
            self.accounts.follow(&luns);
            session.luns = luns;
        }
    }

    /// The limits of units or of the initiator may be others from now on.
    pub fn handle_limits(&mut self, cx: &mut Cx<'_>) {
        let luns = self.session.as_ref().map(|session| &session.luns);
        let limiter = luns.and_then(|luns| luns.limiter());
        self.backlog.limits.rebook(limiter, cx.now);
        self.poll_limits(cx);
        self.settle(cx);
    }

    /// Whether the initiator has logged out before the connection went.
    #[must_use]
    pub fn has_logged_out(&self) -> bool {
        self.logged_out
    }

    /// The connection's number in its session.
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

    /// The session's command numbers.
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

    /// The name of a context's present use, for other channels.
    pub(super) fn task_ref(&self, idx: TaskIdx) -> TaskRef {
        TaskRef {
            worker: self.config.worker,
            channel: self.config.serial,
            index: idx,
            generation: self.tasks.generation(idx),
        }
    }

    /// Lets the datamover put something on its way; whether it did.
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
