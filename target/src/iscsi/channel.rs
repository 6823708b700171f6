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
    self, AsyncEvent, AsyncMessage, FromInitiator, FromTarget, LoginRequest, LoginStatus,
    LogoutReason, LogoutRequest, LogoutResponse, LogoutStatus, NopIn, NopOut, PduError, Reject,
    RejectReason,
};
use riser_scsi::iscsi::{Cid, CmdSn, Itt, Numbers, StatSn, Tsih, Ttt};
use riser_scsi::nexus::NexusId;
use riser_scsi::step::{BlockOp, StepResult};

use super::command::End;
use super::datamover::{Control, Datamover};
use super::task::{Task, TaskIdx, TaskState};
use super::tcp::{Batch, Tcp};
use super::text::TextState;
use crate::log::RateLimit;
use crate::pool::Pool;
use crate::srp::{LunMap, SendIdx, TaskRef, UnitIdx};
use crate::warn_limited;

/// PDUs and transfers that may wait to be sent before nothing more is read.
pub const MAX_QUEUED: usize = 512;

/// Contexts for commands, in windows: one that runs, one whose answers are being sent, and one whose
/// answers wait behind those. An answer opens the window before it is sent, and the initiator learns
/// of that no earlier than it arrives, so there are never more.
const WINDOWS: u16 = 3;

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

    /// Enters a session.
    ///
    /// # Errors
    /// The status that refuses it.
    fn join(&mut self, joined: &Joined) -> Result<Admitted, LoginStatus>;

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
    /// Close the connection; then call [`Channel::handle_disconnected`].
    Disconnect,
    /// The channel holds nothing any more.
    Release,
}

/// How far a connection has come.
///
/// ```text
///  Login ──→ FullFeature ──→ LoggingOut ──→ Closing ──→ Closed
///    └───────────┴──── error ───────────────────┘
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Phase {
    /// Negotiates.
    Login,
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
    pub(super) nexus: NexusId,
    pub(super) luns: Arc<LunMap>,
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
    /// What was agreed on.
    pub params: SessionParams,
    /// Requests under way.
    pub in_flight: usize,
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
    exp_cmd_sn: CmdSn,
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

/// Gives the login what the channel's gate says, and keeps what was entered.
struct Keeper<'a> {
    gate: &'a mut dyn Gate,
    admitted: Option<Admitted>,
}

impl Gatekeeper for Keeper<'_> {
    fn admit(&mut self, identity: &Identity) -> Result<Terms, Refusal> {
        self.gate.admit(identity)
    }

    fn join(&mut self, joined: &Joined) -> Result<Tsih, LoginStatus> {
        let admitted = self.gate.join(joined)?;
        let tsih = admitted.tsih;
        self.admitted = Some(admitted);
        Ok(tsih)
    }

    fn random(&mut self, out: &mut [u8]) {
        self.gate.random(out);
    }
}

impl<D: Datamover> Channel<D> {
    /// A channel that waits for a login.
    #[must_use]
    pub fn new(config: ChannelConfig, mover: D, now: Instant) -> Self {
        let tasks = WINDOWS * config.commands + IMMEDIATE_TASKS;
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
            exp_cmd_sn: CmdSn(0),
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
            params: session.params,
            in_flight: self.in_flight(),
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
        let buffer = self.tasks[usize::from(task.0)].buffer.as_ref();
        buffer
            .into_iter()
            .flat_map(move |b| b.slices(range.clone()))
    }

    /// What a login has just agreed on for the connection, once.
    pub fn take_new_params(&mut self) -> Option<ConnectionParams> {
        self.new_params.take()
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
            Ok(pdu) => self.on_pdu(cx, frame, pdu),
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
            admitted: None,
        };
        let answer = self.login.handle(request, data, &mut keeper);
        self.exp_cmd_sn = request.cmd_sn;
        self.cid = request.cid;
        let status = answer.response.status;
        self.send(
            FromTarget::LoginResponse(answer.response),
            answer.text,
            true,
        );
        match answer.outcome {
            Outcome::Continue => {}
            Outcome::Failed => {
                warn_limited!(self.complaints, cx.now, %status, "login refused");
                self.close(cx.now);
            }
            Outcome::FullFeature(joined) => {
                let admitted = keeper.admitted.expect("joined before");
                let (nexus, luns) = admitted.nexus.unwrap_or_else(|| {
                    // A discovery session has no nexus, and runs no command.
                    (NexusId(0), Arc::new(LunMap::default()))
                });
                self.mover.enable(&joined.session, &joined.connection);
                self.new_params = Some(joined.connection);
                self.session = Some(Session {
                    identity: joined.identity,
                    tsih: admitted.tsih,
                    params: joined.session,
                    nexus,
                    luns,
                });
                self.phase = Phase::FullFeature;
                self.phase_deadline = None;
            }
        }
    }

    fn on_pdu(&mut self, cx: &mut Cx<'_>, frame: &Frame<'_>, pdu: FromInitiator) {
        if !frame.is_intact && !matches!(pdu, FromInitiator::DataOut(_)) {
            // At recovery level zero there is no other way to bring the PDU again.
            self.reject(cx, frame, RejectReason::DataDigestError, &"data digest");
            return self.close(cx.now);
        }
        let is_discovery = self.session.as_ref().is_none_or(|s| s.params.discovery);
        match pdu {
            FromInitiator::TextRequest(request) => {
                if self.admit(request.cmd_sn, request.immediate) {
                    self.on_text(cx, frame, &request);
                }
            }
            FromInitiator::LogoutRequest(request) => {
                if self.admit(request.cmd_sn, request.immediate) {
                    self.on_logout(cx, &request);
                }
            }
            FromInitiator::NopOut(nop) => self.on_nop(cx, frame, &nop),
            FromInitiator::DataOut(data) => self.on_data_out(cx, frame, &data),
            FromInitiator::LoginRequest(_) => {
                self.reject(cx, frame, RejectReason::ProtocolError, &"a second login");
            }
            FromInitiator::Snack(_) => {
                self.reject(cx, frame, RejectReason::SnackReject, &"SNACK");
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

    /// Whether a request is the next one, or immediate. Others are passed over in silence
    /// (RFC 7143 4.2.2.1).
    pub(super) fn admit(&mut self, cmd_sn: CmdSn, immediate: bool) -> bool {
        if immediate {
            return true;
        }
        let is_next = cmd_sn == self.exp_cmd_sn && self.room() > 0;
        if is_next {
            self.exp_cmd_sn = self.exp_cmd_sn.next();
        }
        is_next
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
        self.counted += u16::from(!immediate);
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
        self.counted -= u16::from(std::mem::take(&mut task.counted));
        self.lingering -= u16::from(std::mem::take(&mut task.lingers));
        task.state = TaskState::Idle;
        self.idle.push(idx);
    }

    /// The answer goes to the datamover: the window has a place again.
    pub(super) fn mark_sent(&mut self, idx: TaskIdx) {
        let task = &mut self.tasks[usize::from(idx.0)];
        task.state = TaskState::Sent;
        task.lingers = std::mem::take(&mut task.counted);
        self.counted -= u16::from(task.lingers);
        self.lingering += u16::from(task.lingers);
        self.counters.answered += 1;
    }

    /// Places of the command window that are free.
    fn room(&self) -> u16 {
        let contexts = WINDOWS * self.config.commands - self.counted - self.lingering;
        contexts.min(self.config.commands - self.counted)
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

    fn on_nop(&mut self, cx: &mut Cx<'_>, frame: &Frame<'_>, nop: &NopOut) {
        if nop.itt == Itt::NONE && !nop.immediate {
            return self.reject(
                cx,
                frame,
                RejectReason::ProtocolError,
                &"no tag, not immediate",
            );
        }
        if !self.admit(nop.cmd_sn, nop.immediate) || nop.itt == Itt::NONE {
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
        let status = match request.reason {
            LogoutReason::CloseSession => LogoutStatus::Closed,
            LogoutReason::CloseConnection if request.cid == self.cid => LogoutStatus::Closed,
            LogoutReason::CloseConnection => LogoutStatus::CidNotFound,
            LogoutReason::RemoveConnection => LogoutStatus::RecoveryNotSupported,
        };
        if status != LogoutStatus::Closed {
            return self.answer_logout(request.itt, status);
        }
        self.phase = Phase::LoggingOut(request.itt);
        self.phase_deadline = Some(cx.now + CLOSE_TIMEOUT);
        // Commands that wait for something the initiator may never send end here.
        self.abort_waiting(cx);
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
            if self.is_connected {
                self.actions.push_back(Action::Disconnect);
            }
        }
    }

    /// What every input ends with.
    pub(super) fn settle(&mut self, cx: &mut Cx<'_>) {
        match self.phase {
            Phase::LoggingOut(itt) if self.in_flight() == 0 => {
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
        let room = self.room();
        Numbers {
            stat_sn: StatSn(0),
            exp_cmd_sn: self.exp_cmd_sn,
            max_cmd_sn: CmdSn(
                self.exp_cmd_sn
                    .0
                    .wrapping_add(u32::from(room))
                    .wrapping_sub(1),
            ),
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
}

impl Channel<Tcp> {
    /// What to send next; see [`TcpChannel::poll_batch`](super::TcpChannel::poll_batch).
    pub(super) fn poll_batch(&mut self, batch: &mut Batch) -> bool {
        if self.phase == Phase::Closed {
            return false;
        }
        let numbers = self.numbers();
        let tasks = &self.tasks;
        let buffer = |idx: TaskIdx| {
            let task = &tasks[usize::from(idx.0)];
            task.buffer.as_ref().expect("data lie in a buffer")
        };
        let has_batch = self.mover.poll_batch(numbers, buffer, batch);
        self.is_flushed &= !has_batch;
        has_batch
    }
}
