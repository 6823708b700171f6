//! The channel: one connection, and the session on it.
//!
//! # Calling order
//! 1. [`Channel::new`] when the connection exists.
//! 2. Inputs, in any order: [`Channel::handle_frame`], [`Channel::handle_done`],
//!    [`Channel::handle_block_done`], [`Channel::handle_pool`], [`Channel::handle_timeout`],
//!    [`Channel::handle_disconnected`], and what other channels say: [`Channel::handle_task_start`],
//!    [`Channel::handle_abort`], [`Channel::handle_task_gone`].
//! 3. After every input, [`Channel::poll_action`] until it has none.
//! 4. After [`Action::Release`] the channel holds nothing, and may be dropped.

use std::collections::VecDeque;
use std::fmt::Display;
use std::sync::Arc;
use std::time::{Duration, Instant};

use riser_scsi::iscsi::frame::Frame;
use riser_scsi::iscsi::login::{
    ConnectionParams, Gatekeeper, Identity, Joined, Outcome, Refusal, SessionParams, TargetLogin,
    Terms,
};
use riser_scsi::iscsi::name::{Found, IscsiName};
use riser_scsi::iscsi::pdu::{
    self, AsyncEvent, AsyncMessage, FromInitiator, FromTarget, LoginRequest, LoginResponse,
    LoginStatus, LogoutReason, LogoutRequest, LogoutResponse, LogoutStatus, NopIn, NopOut,
    PduError, Reject, RejectReason,
};
use riser_scsi::iscsi::{Cid, CmdSn, Itt, Numbers, StatSn, Tsih, Ttt};
use riser_scsi::nexus::NexusId;
use riser_scsi::step::{BlockOp, StepResult};

use super::command::End;
use super::datamover::{Control, Datamover};
use super::order::Waiting;
use super::task::{Task, TaskIdx, TaskState};
use super::text::TextState;
use super::window::{Member, WINDOWS, Window};
use crate::log::RateLimit;
use crate::pool::{Buffer, Pool};
use crate::srp::{LunMap, SendIdx, TaskRef, UnitIdx};
use crate::warn_limited;

/// PDUs and transfers that may wait to be sent before nothing more is read.
pub const MAX_QUEUED: usize = 512;

/// Contexts beyond the command window, for immediate commands and functions.
const IMMEDIATE_TASKS: u16 = 16;

/// How long a login may take.
const LOGIN_TIMEOUT: Duration = Duration::from_secs(15);

/// How long a silent initiator is believed to live.
const PING_AFTER: Duration = Duration::from_secs(15);

/// How long a ping may stay unanswered.
const PING_TIMEOUT: Duration = Duration::from_secs(10);

/// How long a logout's answer, or a farewell, may take to be sent.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(5);

/// What the target decides about logins and discovery.
pub trait Gate {
    /// On which terms somebody may log in.
    ///
    /// # Errors
    /// The refusal.
    fn admit(&mut self, identity: &Identity) -> Result<Terms, Refusal>;

    /// Enters a session whose first command will have the number `first`, or a connection into its
    /// session.
    ///
    /// # Errors
    /// The status that refuses it.
    fn join(&mut self, joined: &Joined, first: CmdSn) -> Result<Admitted, LoginStatus>;

    /// Fills with random bytes that nobody can foresee.
    fn random(&mut self, out: &mut [u8]);

    /// The targets that an initiator may see: all, or the one with a name.
    fn targets(&mut self, initiator: &IscsiName, wanted: Option<&IscsiName>) -> Vec<Found>;
}

/// A session that was entered.
#[derive(Clone, Debug)]
pub struct Admitted {
    /// Its handle.
    pub tsih: Tsih,
    /// The I_T nexus and its units; none of a discovery session.
    pub nexus: Option<(NexusId, Arc<LunMap>)>,
    /// What the session's first login agreed on.
    pub params: SessionParams,
    /// Its command numbers.
    pub window: Arc<Window>,
    /// Whether it takes the place of others, which must let go of the devices first:
    /// [`Channel::handle_others_gone`] tells of that.
    pub waits: bool,
}

/// What the channel works with for the length of a call.
pub struct Cx<'a> {
    /// The time.
    pub now: Instant,
    /// The worker's data buffers.
    pub pool: &'a mut Pool,
    /// Decides about logins.
    pub gate: &'a mut dyn Gate,
}

/// What the worker is to do for a channel.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Action {
    /// Start a block operation; when it ends, call [`Channel::handle_block_done`].
    SubmitBlock {
        /// The context.
        task: TaskIdx,
        /// On which unit.
        unit: UnitIdx,
        /// What.
        op: BlockOp,
    },
    /// Try to end a block operation early. It still ends with [`Channel::handle_block_done`].
    AbortBlock(TaskIdx),
    /// Tell a task's channel that it may start.
    StartTask(TaskRef),
    /// Tell a task's channel to abort it.
    AbortTask {
        /// The task.
        task: TaskRef,
        /// The function that waits for it.
        watcher: TaskRef,
    },
    /// Tell a function that a task it waited for is gone.
    TaskGone(TaskRef),
    /// Tell a connection of the session that it may have the command that is next.
    TakeTurn(Member),
    /// End other connections of the session, then call [`Channel::handle_others_gone`].
    EndOthers(Others),
    /// Close the connection; then call [`Channel::handle_disconnected`].
    Disconnect,
    /// The channel holds nothing any more.
    Release,
}

/// Which other connections of a session.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Others {
    /// All.
    All,
    /// The one with this number; there may be none.
    One(Cid),
}

/// How far a connection has come.
///
/// ```text
///  Login ──→ (Joining) ──→ FullFeature ──→ LoggingOut ──→ Closing ──→ Closed
///    └───────────┴─────────────┴──── error ───────────────────┘
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Phase {
    /// Negotiates.
    Login,
    /// Has logged in, and waits for those whose place it takes to let go of the devices.
    Joining,
    /// Works.
    FullFeature,
    /// Lets commands end, then answers the logout.
    LoggingOut(Itt),
    /// Sends what is still to be sent, then closes.
    Closing,
    /// The connection is gone; devices let go.
    Closed,
}

/// What a channel has done.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// Commands taken in.
    pub commands: u64,
    /// Functions taken in.
    pub task_management: u64,
    /// Requests answered.
    pub answered: u64,
    /// Commands ended by task management.
    pub aborted: u64,
    /// Requests that ended with the channel.
    pub torn_down: u64,
    /// Bytes sent to the initiator.
    pub bytes_in: u64,
    /// Bytes taken from the initiator.
    pub bytes_out: u64,
    /// PDUs rejected.
    pub rejected: u64,
    /// Times a command waited for a buffer.
    pub buffer_waits: u64,
}

impl std::ops::AddAssign for Counters {
    fn add_assign(&mut self, other: Self) {
        self.commands += other.commands;
        self.task_management += other.task_management;
        self.answered += other.answered;
        self.aborted += other.aborted;
        self.torn_down += other.torn_down;
        self.bytes_in += other.bytes_in;
        self.bytes_out += other.bytes_out;
        self.rejected += other.rejected;
        self.buffer_waits += other.buffer_waits;
    }
}

impl std::ops::Add for Counters {
    type Output = Self;

    fn add(mut self, other: Self) -> Self {
        self += other;
        self
    }
}

/// What a channel is made of.
#[derive(Clone, Copy, Debug)]
pub struct ChannelConfig {
    /// The worker's number.
    pub worker: u16,
    /// The channel's number at that worker, never used twice.
    pub serial: u32,
    /// Commands at once: the window.
    pub commands: u16,
}

/// A session, once there is one.
#[derive(Debug)]
pub(super) struct Session {
    pub(super) identity: Identity,
    pub(super) tsih: Tsih,
    pub(super) params: SessionParams,
    connection: ConnectionParams,
    pub(super) nexus: NexusId,
    pub(super) luns: Arc<LunMap>,
    pub(super) window: Arc<Window>,
}

/// What is known of a session, for people.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SessionInfo {
    /// Who.
    pub identity: Identity,
    /// Its handle.
    pub tsih: Tsih,
    /// Its nexus.
    pub nexus: NexusId,
    /// Where the connection is in its life.
    pub phase: Phase,
    /// What was agreed on.
    pub params: SessionParams,
    /// What was agreed on for the connection.
    pub connection: ConnectionParams,
    /// Requests under way.
    pub in_flight: usize,
    /// Logical units that it sees.
    pub luns: usize,
}

/// One connection with one initiator.
#[derive(Debug)]
pub struct Channel<D> {
    pub(super) config: ChannelConfig,
    phase: Phase,
    login: TargetLogin,
    pub(super) session: Option<Session>,
    pub(super) mover: D,
    new_params: Option<ConnectionParams>,
    pub(super) tasks: Vec<Task>,
    pub(super) idle: Vec<TaskIdx>,
    /// Tasks that take a place of the command window.
    counted: u16,
    /// Tasks that took one and are answered, but whose answer is not yet sent.
    lingering: u16,
    /// The number that the login says comes first.
    first_cmd_sn: CmdSn,
    /// Requests whose turn has not come.
    pub(super) waiting: Vec<Waiting>,
    /// The answer to the login, while it waits for others to go.
    entering: Option<Box<Entering>>,
    /// Others of the session are on their way out, and the logout waits for them.
    awaits_others: bool,
    /// The initiator has said goodbye, and was answered.
    logged_out: bool,
    /// Contexts that wait for pool memory, oldest first; each once.
    pub(super) pool_waiters: VecDeque<TaskIdx>,
    pub(super) text: TextState,
    cid: Cid,
    last_input: Instant,
    ping: Option<Instant>,
    next_ping: u32,
    phase_deadline: Option<Instant>,
    is_connected: bool,
    is_flushed: bool,
    released: bool,
    pub(super) actions: VecDeque<Action>,
    pub(super) counters: Counters,
    pub(super) complaints: RateLimit,
}

/// A login that has succeeded, before its last answer is sent.
#[derive(Debug)]
struct Entering {
    response: LoginResponse,
    text: Vec<u8>,
    session: SessionParams,
    connection: ConnectionParams,
}

/// Gives the login what the channel's gate says, and keeps what was entered.
struct Keeper<'a> {
    gate: &'a mut dyn Gate,
    first: CmdSn,
    admitted: Option<Admitted>,
}

impl Gatekeeper for Keeper<'_> {
    fn admit(&mut self, identity: &Identity) -> Result<Terms, Refusal> {
        self.gate.admit(identity)
    }

    fn join(&mut self, joined: &Joined) -> Result<Tsih, LoginStatus> {
        let admitted = self.gate.join(joined, self.first)?;
        let tsih = admitted.tsih;
        self.admitted = Some(admitted);
        Ok(tsih)
    }

    fn random(&mut self, out: &mut [u8]) {
        self.gate.random(out);
    }
}

impl ChannelConfig {
    /// Contexts of commands and functions.
    #[must_use]
    pub fn contexts(&self) -> u16 {
        WINDOWS * self.commands + IMMEDIATE_TASKS
    }

    /// What the contexts occupy, in bytes.
    #[must_use]
    pub fn memory(&self) -> usize {
        usize::from(self.contexts()) * (size_of::<Task>() + size_of::<TaskIdx>())
    }
}

/// The contexts' buffers, for the datamover.
#[derive(Clone, Copy)]
pub(super) struct Held<'a>(&'a [Task]);

impl<'a> Held<'a> {
    /// The buffer of a task that has data under way.
    pub(super) fn buffer(&self, task: TaskIdx) -> &'a Buffer {
        let buffer = self.0[usize::from(task.0)].exec.buffer.as_ref();
        buffer.expect("data lie in a buffer")
    }
}

impl<D: Datamover> Channel<D> {
    /// A channel that waits for a login.
    #[must_use]
    pub fn new(config: ChannelConfig, mover: D, now: Instant) -> Self {
        let tasks = config.contexts();
        Self {
            phase: Phase::Login,
            login: TargetLogin::new(),
            session: None,
            mover,
            new_params: None,
            tasks: (0..tasks).map(|_| Task::new()).collect(),
            idle: (0..tasks).rev().map(TaskIdx).collect(),
            counted: 0,
            lingering: 0,
            first_cmd_sn: CmdSn(0),
            waiting: Vec::new(),
            entering: None,
            awaits_others: false,
            logged_out: false,
            pool_waiters: VecDeque::new(),
            text: TextState::default(),
            cid: Cid(0),
            last_input: now,
            ping: None,
            next_ping: 0,
            phase_deadline: Some(now + LOGIN_TIMEOUT),
            is_connected: true,
            is_flushed: true,
            released: false,
            actions: VecDeque::new(),
            counters: Counters::default(),
            complaints: RateLimit::default(),
            config,
        }
    }

    /// How far it has come.
    #[must_use]
    pub fn phase(&self) -> Phase {
        self.phase
    }

    /// What it was made of.
    #[must_use]
    pub fn config(&self) -> &ChannelConfig {
        &self.config
    }

    /// What it has done.
    #[must_use]
    pub fn counters(&self) -> Counters {
        self.counters
    }

    /// Requests under way.
    #[must_use]
    pub fn in_flight(&self) -> usize {
        self.tasks.len() - self.idle.len()
    }

    /// Its session, for people.
    #[must_use]
    pub fn session_info(&self) -> Option<SessionInfo> {
        let session = self.session.as_ref()?;
        Some(SessionInfo {
            identity: session.identity.clone(),
            tsih: session.tsih,
            nexus: session.nexus,
            phase: self.phase,
            params: session.params,
            connection: session.connection,
            in_flight: self.in_flight(),
            luns: session.luns.luns().len(),
        })
    }

    /// Whether commands wait for pool memory.
    #[must_use]
    pub fn waits_for_pool(&self) -> bool {
        !self.pool_waiters.is_empty()
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
        self.is_receiving() && self.mover.queued() < MAX_QUEUED
    }

    /// When [`Channel::handle_timeout`] wants to be called.
    #[must_use]
    pub fn deadline(&self) -> Option<Instant> {
        let ping = match (self.phase, self.ping) {
            (Phase::FullFeature, None) => Some(self.last_input + PING_AFTER),
            (Phase::FullFeature, Some(sent)) => Some(sent + PING_TIMEOUT),
            _ => None,
        };
        self.phase_deadline.into_iter().chain(ping).min()
    }

    /// What to do next, in order.
    pub fn poll_action(&mut self) -> Option<Action> {
        self.actions.pop_front()
    }

    /// The data buffer of a task, for its block operation.
    pub fn block_slices(
        &self,
        task: TaskIdx,
        range: std::ops::Range<u32>,
    ) -> impl Iterator<Item = riser_memory::MemSlice> + '_ {
        let buffer = self.tasks[usize::from(task.0)].exec.buffer.as_ref();
        buffer
            .into_iter()
            .flat_map(move |b| b.slices(range.clone()))
    }

    /// What a login has just agreed on for the connection, once.
    pub fn take_new_params(&mut self) -> Option<ConnectionParams> {
        self.new_params.take()
    }

    /// The datamover.
    pub(super) fn mover(&self) -> &D {
        &self.mover
    }

    /// What waits to be sent, in PDUs and transfers.
    #[must_use]
    pub fn queued(&self) -> usize {
        self.mover.queued()
    }

    pub(super) fn mover_mut(&mut self) -> &mut D {
        &mut self.mover
    }

    /// A PDU arrived.
    pub fn handle_frame(&mut self, cx: &mut Cx<'_>, frame: &Frame<'_>) {
        self.last_input = cx.now;
        self.ping = None;
        match FromInitiator::parse(frame) {
            Ok(FromInitiator::LoginRequest(request)) if self.phase == Phase::Login => {
                self.on_login(cx, &request, frame.data);
            }
            _ if self.phase == Phase::Login => {
                warn_limited!(self.complaints, cx.now, "something else than a login");
                self.drop_connection();
            }
            Ok(pdu) if !frame.is_intact && !matches!(pdu, FromInitiator::DataOut(_)) => {
                self.reject(cx, frame, RejectReason::DataDigestError, &"data digest");
                if !self.mover.recovers() {
                    // There is no other way to bring the PDU again.
                    self.close(cx.now);
                }
            }
            Ok(pdu) => {
                if self.mover.recovers() {
                    let exp = StatSn(u32::from_be_bytes(
                        *frame.bhs[28..].first_chunk().expect("a header is 48 bytes"),
                    ));
                    self.on_acknowledged(cx, Some(exp));
                }
                self.on_pdu(cx, frame, pdu);
            }
            Err(error) => {
                let reason = match error {
                    PduError::Opcode(_) => RejectReason::CommandNotSupported,
                    _ => RejectReason::InvalidPduField,
                };
                self.reject(cx, frame, reason, &error);
            }
        }
        self.settle(cx);
    }

    /// The stream cannot be followed further.
    pub fn handle_broken(&mut self, cx: &mut Cx<'_>, error: impl Display) {
        warn_limited!(self.complaints, cx.now, %error, "the connection is broken");
        self.drop_connection();
        self.settle(cx);
    }

    /// What was handed to the datamover with this task as its end is on its way.
    pub fn handle_done(&mut self, cx: &mut Cx<'_>, task: TaskIdx) {
        self.finish(cx.pool, task, End::Answered);
    }

    /// What was being sent is sent, or will never be.
    pub fn handle_flushed(&mut self, cx: &mut Cx<'_>, ok: bool) {
        self.is_flushed = true;
        if !ok {
            self.drop_connection();
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
        for _ in 0..self.pool_waiters.len() {
            let Some(task) = self.pool_waiters.pop_front() else {
                break;
            };
            self.resume(cx, task);
            if self.pool_waiters.back() == Some(&task) {
                self.pool_waiters.rotate_right(1);
                break;
            }
        }
        self.settle(cx);
    }

    /// A deadline may have passed.
    pub fn handle_timeout(&mut self, cx: &mut Cx<'_>) {
        if self.phase_deadline.is_some_and(|at| at <= cx.now) {
            self.phase_deadline = None;
            self.drop_connection();
        }
        if self.phase == Phase::FullFeature && self.deadline().is_some_and(|at| at <= cx.now) {
            if self.ping.is_some() {
                warn_limited!(self.complaints, cx.now, "the initiator does not answer");
                self.drop_connection();
            } else {
                self.send_ping(cx.now);
            }
        }
        self.settle(cx);
    }

    /// The connection is gone: nothing is sent or received any more.
    pub fn handle_disconnected(&mut self, cx: &mut Cx<'_>) {
        self.is_connected = false;
        self.drop_connection();
        self.settle(cx);
    }

    /// Another login takes the session's place, or the target goes: the connection is cut.
    pub fn handle_terminate(&mut self, cx: &mut Cx<'_>) {
        self.drop_connection();
        self.settle(cx);
    }

    /// The target goes: the initiator is asked to log out, and the connection cut at `until`.
    pub fn handle_shutdown(&mut self, cx: &mut Cx<'_>, until: Instant) {
        if self.phase == Phase::FullFeature {
            let seconds = until.saturating_duration_since(cx.now).as_secs();
            self.send(
                FromTarget::AsyncMessage(AsyncMessage {
                    event: AsyncEvent::LogoutRequested,
                    lun: [0; 8],
                    parameters: [0, 0, u16::try_from(seconds).unwrap_or(u16::MAX)],
                }),
                Vec::new(),
                true,
            );
            self.phase_deadline = Some(until);
        } else {
            self.drop_connection();
        }
        self.settle(cx);
    }

    fn on_login(&mut self, cx: &mut Cx<'_>, request: &LoginRequest, data: &[u8]) {
        let mut keeper = Keeper {
            gate: &mut *cx.gate,
            first: request.cmd_sn,
            admitted: None,
        };
        let answer = self.login.handle(request, data, &mut keeper);
        self.first_cmd_sn = request.cmd_sn;
        self.cid = request.cid;
        let status = answer.response.status;
        let send = |channel: &mut Self, text| {
            channel.send(FromTarget::LoginResponse(answer.response), text, true);
        };
        match answer.outcome {
            Outcome::Continue => send(self, answer.text),
            Outcome::Failed => {
                send(self, answer.text);
                warn_limited!(self.complaints, cx.now, %status, "login refused");
                self.close(cx.now);
            }
            Outcome::FullFeature(joined) => {
                let admitted = keeper.admitted.expect("joined before");
                let (nexus, luns) = admitted.nexus.unwrap_or_else(|| {
                    // A discovery session has no nexus, and runs no command.
                    (NexusId(0), Arc::new(LunMap::default()))
                });
                self.session = Some(Session {
                    identity: joined.identity,
                    tsih: admitted.tsih,
                    params: admitted.params,
                    connection: joined.connection,
                    nexus,
                    luns,
                    window: admitted.window,
                });
                self.entering = Some(Box::new(Entering {
                    response: answer.response,
                    text: answer.text,
                    session: admitted.params,
                    connection: joined.connection,
                }));
                self.phase = Phase::Joining;
                if !admitted.waits {
                    self.enter_full_feature();
                }
            }
        }
    }

    /// Sends the login's last answer.
    fn enter_full_feature(&mut self) {
        let entering = self.entering.take().expect("a login has succeeded");
        let response = FromTarget::LoginResponse(entering.response);
        self.send(response, entering.text, true);
        self.mover.enable(&entering.session, &entering.connection);
        self.new_params = Some(entering.connection);
        self.phase = Phase::FullFeature;
        self.phase_deadline = None;
    }

    /// The others that this connection waits for hold nothing any more.
    pub fn handle_others_gone(&mut self, cx: &mut Cx<'_>) {
        self.awaits_others = false;
        if self.phase == Phase::Joining {
            self.last_input = cx.now;
            self.enter_full_feature();
        }
        self.settle(cx);
    }

    /// The initiator may use other units from now on. Commands under way go on.
    pub fn handle_luns(&mut self, luns: Arc<LunMap>) {
        if let Some(session) = &mut self.session {
            session.luns = luns;
        }
    }

    /// Whether the initiator said goodbye before the connection went.
    #[must_use]
    pub fn has_logged_out(&self) -> bool {
        self.logged_out
    }

    /// The connection's number in its session.
    #[must_use]
    pub fn cid(&self) -> Cid {
        self.cid
    }

    pub(super) fn member(&self) -> Member {
        Member {
            worker: self.config.worker,
            channel: self.config.serial,
        }
    }

    /// The session's command numbers.
    pub(super) fn window(&self) -> Arc<Window> {
        let session = self.session.as_ref().expect("full-feature phase");
        Arc::clone(&session.window)
    }

    /// Carries out a PDU whose turn it is.
    pub(super) fn carry_out_pdu(&mut self, cx: &mut Cx<'_>, frame: &Frame<'_>, pdu: FromInitiator) {
        let is_discovery = self.session.as_ref().is_none_or(|s| s.params.discovery);
        match pdu {
            FromInitiator::TextRequest(request) => self.on_text(cx, frame, &request),
            FromInitiator::LogoutRequest(request) => self.on_logout(cx, &request),
            FromInitiator::NopOut(nop) => self.on_nop(cx, frame, &nop),
            FromInitiator::DataOut(data) => self.on_data_out(cx, frame, &data),
            FromInitiator::LoginRequest(_) => {
                self.reject(cx, frame, RejectReason::ProtocolError, &"a second login");
            }
            FromInitiator::Snack(snack) => {
                if let Err(reason) = self.mover.resend(&snack) {
                    self.reject(cx, frame, reason, &"SNACK");
                }
            }
            FromInitiator::ScsiCommand(_) | FromInitiator::TmfRequest(_) if is_discovery => {
                self.reject(cx, frame, RejectReason::ProtocolError, &"discovery session");
            }
            FromInitiator::ScsiCommand(_) | FromInitiator::TmfRequest(_)
                if self.phase != Phase::FullFeature =>
            {
                self.reject(cx, frame, RejectReason::WaitingForLogout, &"logout");
            }
            FromInitiator::ScsiCommand(command) => self.on_command(cx, frame, command),
            FromInitiator::TmfRequest(request) => self.on_tmf(cx, frame, &request),
        }
    }

    /// Takes a request into an idle context; `None` if there are too many immediate ones.
    pub(super) fn take_in(
        &mut self,
        itt: Itt,
        immediate: bool,
        state: TaskState,
    ) -> Option<TaskIdx> {
        let others = self.in_flight() - usize::from(self.counted + self.lingering);
        if immediate && others >= usize::from(IMMEDIATE_TASKS) {
            return None;
        }
        let idx = self
            .idle
            .pop()
            .expect("a context for each place of the window");
        if !immediate {
            self.counted += 1;
            self.window().take_place();
        }
        let task = &mut self.tasks[usize::from(idx.0)];
        debug_assert_eq!(task.state, TaskState::Idle);
        task.generation = task.generation.wrapping_add(1);
        task.state = state;
        task.itt = itt;
        task.counted = !immediate;
        Some(idx)
    }

    /// Gives a context back.
    pub(super) fn give_back(&mut self, idx: TaskIdx) {
        let task = &mut self.tasks[usize::from(idx.0)];
        let counted = std::mem::take(&mut task.counted);
        let lingers = std::mem::take(&mut task.lingers);
        task.state = TaskState::Idle;
        self.counted -= u16::from(counted);
        self.lingering -= u16::from(lingers);
        if counted || lingers {
            self.window().on_gone(lingers);
        }
        self.idle.push(idx);
    }

    /// The answer goes to the datamover: the window has a place again.
    pub(super) fn mark_sent(&mut self, idx: TaskIdx) {
        let task = &mut self.tasks[usize::from(idx.0)];
        task.state = TaskState::Sent;
        task.lingers = std::mem::take(&mut task.counted);
        if task.lingers {
            self.counted -= 1;
            self.lingering += 1;
            self.window().on_answered();
        }
        self.counters.answered += 1;
    }

    /// The state of the request with this tag, if there is one.
    #[must_use]
    pub fn task_state(&self, itt: Itt) -> Option<TaskState> {
        let mut tasks = self.tasks.iter();
        let found = tasks.find(|task| task.itt == itt && task.state != TaskState::Idle);
        found.map(|task| task.state)
    }

    /// A request with this tag that has not been answered.
    pub(super) fn find(&self, itt: Itt) -> Option<TaskIdx> {
        let unanswered = |state| !matches!(state, TaskState::Idle | TaskState::Sent);
        let at = self
            .tasks
            .iter()
            .position(|task| task.itt == itt && unanswered(task.state))?;
        Some(TaskIdx(at as u16))
    }

    pub(super) fn send(&mut self, pdu: FromTarget, data: Vec<u8>, counts: bool) {
        self.mover.send_control(Control {
            pdu,
            data,
            counts,
            ends: None,
        });
    }

    pub(super) fn reject(
        &mut self,
        cx: &Cx<'_>,
        frame: &Frame<'_>,
        reason: RejectReason,
        why: &dyn Display,
    ) {
        self.counters.rejected += 1;
        warn_limited!(
            self.complaints, cx.now,
            opcode = pdu::opcode(frame), ?reason, %why, "PDU rejected"
        );
        let header = frame.bhs.to_vec();
        self.send(FromTarget::Reject(Reject { reason }), header, true);
    }

    fn on_acknowledged(&mut self, cx: &mut Cx<'_>, exp: Option<StatSn>) {
        for task in self.mover.acknowledge(exp) {
            self.finish(cx.pool, task, End::Answered);
        }
    }

    fn on_nop(&mut self, cx: &mut Cx<'_>, frame: &Frame<'_>, nop: &NopOut) {
        if nop.itt == Itt::NONE && !nop.immediate {
            return self.reject(
                cx,
                frame,
                RejectReason::ProtocolError,
                &"no tag, not immediate",
            );
        }
        if nop.itt == Itt::NONE {
            return;
        }
        let limit = self.mover.max_send_segment() as usize;
        let data = frame.data[..frame.data.len().min(limit)].to_vec();
        let answer = NopIn {
            lun: nop.lun,
            itt: nop.itt,
            ttt: Ttt::NONE,
        };
        self.send(FromTarget::NopIn(answer), data, true);
    }

    fn send_ping(&mut self, now: Instant) {
        self.ping = Some(now);
        self.next_ping = (self.next_ping + 1) & 0x7fff_ffff;
        let ping = NopIn {
            lun: [0; 8],
            itt: Itt::NONE,
            ttt: Ttt(self.next_ping),
        };
        self.send(FromTarget::NopIn(ping), Vec::new(), false);
    }

    fn on_logout(&mut self, cx: &mut Cx<'_>, request: &LogoutRequest) {
        match request.reason {
            LogoutReason::RemoveConnection => {
                return self.answer_logout(request.itt, LogoutStatus::RecoveryNotSupported);
            }
            LogoutReason::CloseConnection if request.cid != self.cid => {
                return self.on_logout_of_other(request);
            }
            LogoutReason::CloseSession if self.window().is_unordered() => {
                self.awaits_others = true;
                self.actions.push_back(Action::EndOthers(Others::All));
            }
            LogoutReason::CloseSession | LogoutReason::CloseConnection => {}
        }
        // Whoever leaves misses no answer.
        self.on_acknowledged(cx, None);
        self.phase = Phase::LoggingOut(request.itt);
        self.phase_deadline = Some(cx.now + CLOSE_TIMEOUT);
        // Commands that wait for something the initiator may never send end here.
        self.abort_waiting(cx);
    }

    /// Another connection of the session is to be closed. Its answer does not wait for that: what
    /// the connection had to say, it cannot say any more.
    fn on_logout_of_other(&mut self, request: &LogoutRequest) {
        let has_others = self.window().is_unordered();
        if has_others {
            self.actions
                .push_back(Action::EndOthers(Others::One(request.cid)));
        }
        let status = if has_others {
            LogoutStatus::Closed
        } else {
            LogoutStatus::CidNotFound
        };
        self.answer_logout(request.itt, status);
    }

    fn answer_logout(&mut self, itt: Itt, status: LogoutStatus) {
        let params = self.session.as_ref().map(|s| s.params);
        let answer = LogoutResponse {
            itt,
            status,
            time2wait: params.map_or(0, |p| p.time2wait),
            time2retain: params.map_or(0, |p| p.time2retain),
        };
        self.send(FromTarget::LogoutResponse(answer), Vec::new(), true);
    }

    /// Takes nothing more, and closes when everything is sent.
    pub(super) fn close(&mut self, now: Instant) {
        if self.is_receiving() {
            self.phase = Phase::Closing;
            self.phase_deadline = Some(now + CLOSE_TIMEOUT);
        }
    }

    /// Closes without sending anything more.
    fn drop_connection(&mut self) {
        if self.phase != Phase::Closed {
            self.phase = Phase::Closed;
            self.phase_deadline = None;
            self.waiting.clear();
            if let Some(session) = &self.session {
                session.window.forget(self.member());
            }
            if self.is_connected {
                self.actions.push_back(Action::Disconnect);
            }
        }
    }

    /// What every input ends with.
    pub(super) fn settle(&mut self, cx: &mut Cx<'_>) {
        match self.phase {
            Phase::LoggingOut(itt) if self.in_flight() == 0 && !self.awaits_others => {
                self.logged_out = true;
                self.answer_logout(itt, LogoutStatus::Closed);
                self.close(cx.now);
            }
            Phase::Closing if self.mover.queued() == 0 && self.is_flushed => {
                self.drop_connection();
            }
            Phase::Closed => self.tear_down(cx.pool, !self.is_flushed),
            _ => {}
        }
        let is_over = self.phase == Phase::Closed
            && !self.is_connected
            && self.is_flushed
            && self.in_flight() == 0;
        if is_over && !std::mem::replace(&mut self.released, true) {
            self.actions.push_back(Action::Release);
        }
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
            ioctx: SendIdx(idx.0),
            generation: self.tasks[usize::from(idx.0)].generation,
        }
    }

    /// Lets the datamover put something on its way; whether it did.
    pub(super) fn poll_mover(
        &mut self,
        poll: impl FnOnce(&mut D, Numbers, Held<'_>) -> bool,
    ) -> bool {
        if self.phase == Phase::Closed {
            return false;
        }
        let numbers = self.numbers();
        let is_posted = poll(&mut self.mover, numbers, Held(&self.tasks));
        self.is_flushed &= !is_posted;
        is_posted
    }

    /// Ends everything at once: no device and no socket holds anything any more.
    pub fn abandon(&mut self, pool: &mut Pool) {
        self.phase = Phase::Closed;
        for idx in (0..self.tasks.len() as u16).map(TaskIdx) {
            if self.tasks[usize::from(idx.0)].state != TaskState::Idle {
                self.finish(pool, idx, End::TornDown);
            }
        }
        self.actions.clear();
    }
}
