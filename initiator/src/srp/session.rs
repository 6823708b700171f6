//! A session: one initiator port, one target port, one or more channels, and the requests on them.
//!
//! [`Session`] is a machine with no I/O in it. Its owner tells it what happened (`handle_*`), asks it
//! what to do ([`Session::poll_output`]) and when to wake it ([`Session::next_deadline`]).
//!
//! # Memory
//! The session never reports a request while the target could still reach its memory. When an
//! attempt is over, for whatever reason, the session says [`Output::Retire`]; the owner invalidates
//! the memory's keys and answers [`Session::handle_retired`]; only then is the request completed or
//! tried again. When a channel has been torn down, so that nothing can arrive on it any more and its
//! keys are gone, [`Session::handle_channel_gone`] says so for all of its requests at once.
//!
//! # Time
//! An attempt that is not answered in time is aborted: ABORT TASK, then LOGICAL UNIT RESET, then a
//! new connection, each when the one before it fails or is not answered either.
//!
//! # Replay
//! When a connection breaks, nobody knows which of its outstanding commands were carried out. After
//! the new login those are sent again for which that makes no difference ([`Effect`]): commands
//! that change nothing, and commands that set blocks to a given content. That is safe because
//! - the first channel of the new login asks the target to terminate the old ones
//!   (MULTI-CHANNEL ACTION 0), and the target answers it only when their commands have ended, so no
//!   command of the old connection is carried out after one of the new;
//! - a command that was never acknowledged is, for its issuer, still in progress: carrying it out
//!   a second time before acknowledging it is one of the orders in which it may take effect;
//! - they are sent in the order of their submission, and none is sent while an earlier one with an
//!   overlapping effect is outstanding.
//!
//! Task-management functions and commands with other effects (reservations, mode pages, compare and
//! write) are never sent again; they end with [`RequestError::ConnectionLost`].
//!
//! # Not implemented
//! Channels beyond the first that break take the whole session through a reconnection.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use riser_scsi::srp::{
    LOGIN_REQ_RDMA_LEN, MultiChannelAction, RspCode, SHORT_IU_LEN, TLogoutReason, TSK_MGMT_LEN,
    Tag, TskMgmtFunction, WireLun,
};
use slab::Slab;

use super::channel::{
    Agreed, ChannelConfig, ChannelFault, ChannelState, CommandData, CommandIu, DataLen,
    InitiatorChannel, LoginError, Received,
};
use super::request::{
    Answer, AttemptEnd, Request, RequestError, RequestId, RequestResult, RequestSpec, RequestState,
    Retry, Verdict, plan_verdict,
};

/// What a session is made with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SessionConfig {
    /// Channels wanted; the target may grant fewer.
    pub channels: u8,
    /// Of each channel. The multi-channel action is the session's to choose.
    pub channel: ChannelConfig,
    /// Requests taken and not yet completed at most, queued ones included.
    pub max_requests: usize,
    /// Times.
    pub timing: Timing,
    /// Attempts at one request at most.
    pub max_attempts: u8,
}

/// A session's times.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Timing {
    /// How long a command may go unanswered before it is aborted.
    pub attempt: Duration,
    /// How long task management may go unanswered.
    pub tsk_mgmt: Duration,
    /// How long connecting and logging in may take.
    pub login: Duration,
    /// Wait before the first try to reconnect; doubles with every failure.
    pub backoff_min: Duration,
    /// Longest wait between tries to reconnect.
    pub backoff_max: Duration,
    /// Wait before a command is repeated that the target was too busy for; doubles with every
    /// attempt.
    pub busy: Duration,
}

impl Default for Timing {
    fn default() -> Self {
        Self {
            attempt: Duration::from_secs(30),
            tsk_mgmt: Duration::from_secs(5),
            login: Duration::from_secs(10),
            backoff_min: Duration::from_millis(100),
            backoff_max: Duration::from_secs(5),
            busy: Duration::from_millis(5),
        }
    }
}

/// A channel's place in its session.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ChannelIndex(pub u8);

/// What the owner is to do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Output {
    /// Find the path to the target, take [`Session::begin_login`]'s request and connect with it.
    Connect(ChannelIndex),
    /// Make the request's memory known to the target, write the command with
    /// [`Session::emit_command`] and send it.
    Start {
        /// The request.
        request: RequestId,
        /// Where to send it.
        channel: ChannelIndex,
        /// Send the data within the command instead.
        immediate: bool,
    },
    /// Take the request's memory back from the target, then [`Session::handle_retired`].
    Retire {
        /// The request.
        request: RequestId,
        /// Where it was sent.
        channel: ChannelIndex,
    },
    /// Send a task-management request.
    SendTskMgmt(ChannelIndex, [u8; TSK_MGMT_LEN]),
    /// Send an answer, and post the receive it answers only after that.
    Answer(ChannelIndex, [u8; SHORT_IU_LEN]),
    /// Tear the channel down, after sending the logout if there is one; then
    /// [`Session::handle_channel_gone`].
    Disconnect(ChannelIndex, Option<[u8; SHORT_IU_LEN]>),
    /// The request is over, and nobody but its issuer can reach its memory.
    Complete(RequestId, RequestResult),
    /// Something that the session's user may want to know.
    Event(SessionEvent),
}

/// What happened to a session.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SessionEvent {
    /// Logged in; requests flow.
    Live,
    /// The connection broke for this reason; a new one is being made.
    Reconnecting(Down),
    /// A logical unit reported an event.
    UnitEvent {
        /// Logical unit.
        lun: WireLun,
        /// What happened, as sense data.
        sense: Box<[u8]>,
    },
    /// The session is over, for this reason. Every request has been completed.
    Closed(Down),
}

/// Why a session is down.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Down {
    /// The connection could not be made.
    #[error(transparent)]
    Connect(#[from] ConnectError),
    /// The target violated the protocol.
    #[error(transparent)]
    Fault(#[from] ChannelFault),
    /// The target logged us out.
    #[error("target logged out ({0:?})")]
    Logout(TLogoutReason),
    /// The connection was closed by the peer, or broke.
    #[error("connection lost")]
    ConnectionLost,
    /// Commands were not answered and could not be aborted.
    #[error("target does not answer")]
    Unresponsive,
    /// It was closed from this side.
    #[error("closed")]
    Closed,
}

/// Why a connection could not be made.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ConnectError {
    /// The target's address cannot be reached from this device.
    #[error("address cannot be reached: {0}")]
    Address(riser_transport::verbs::CmError),
    /// The target did not answer.
    #[error("target does not answer")]
    Unreachable,
    /// Login refused.
    #[error(transparent)]
    Login(LoginError),
    /// It took too long.
    #[error("connecting timed out")]
    TimedOut,
    /// A local resource could not be had.
    #[error("local resources: {0}")]
    Local(riser_transport::verbs::VerbsError),
    /// A CM call failed.
    #[error("connection manager: {0}")]
    Cm(riser_transport::verbs::CmError),
}

/// Where a session is in its life.
///
/// ```text
/// LoggingIn → Live → TearingDown → Backoff → LoggingIn
///     │                  ↓
///     └────────────→  Closed
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SessionState {
    /// The first channel is being connected.
    LoggingIn,
    /// At least one channel is live.
    Live,
    /// Every channel is being closed; then a new login, or the end.
    TearingDown {
        /// Why.
        why: Down,
        /// Whether it is the end.
        last: bool,
    },
    /// Waits to try again.
    Backoff {
        /// Until then.
        until: Instant,
    },
    /// Over.
    Closed,
}

/// A channel's connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Link {
    /// None.
    Down,
    /// Being made, until the given time.
    Connecting(Instant),
    /// Made.
    Up,
    /// Being closed by the owner.
    Closing,
}

/// What a task-management request is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum TskMgmtKind {
    /// The request of that place and sequence number.
    Abort(u32, u64),
    /// Every request of the logical unit.
    LunReset(WireLun),
}

#[derive(Debug)]
struct Member {
    channel: InitiatorChannel,
    link: Link,
    tmf: Option<(TskMgmtKind, Instant)>,
    /// Requests that wait for their ABORT TASK. Bound: the channel's queue size.
    aborts: VecDeque<(u32, u64)>,
}

/// Why a request was not taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SubmitError {
    /// There are as many as the session takes.
    #[error("session has as many requests as it takes")]
    Full,
    /// The session is over.
    #[error("session is closed")]
    Closed,
}

/// One session. See the module's documentation.
#[derive(Debug)]
pub struct Session {
    config: SessionConfig,
    state: SessionState,
    ever_live: bool,
    backoff: Duration,
    members: Vec<Member>,
    requests: Slab<Request>,
    /// Requests in state Queued, in order of submission. Bound: `max_requests`.
    queue: VecDeque<u32>,
    next_seq: u64,
    /// Requests with an attempt lost to a broken connection; while there are any, order matters.
    replays: usize,
    outputs: VecDeque<Output>,
    /// Not after the earliest deadline of anything.
    timer: Option<Instant>,
}

impl Session {
    /// A session that begins to connect at once.
    ///
    /// # Panics
    /// If the configuration has no channel or no room for a request.
    #[must_use]
    pub fn new(config: SessionConfig, now: Instant) -> Self {
        assert!(config.channels > 0 && config.max_requests > 0 && config.max_attempts > 0);
        let mut session = Self {
            config,
            state: SessionState::LoggingIn,
            ever_live: false,
            backoff: config.timing.backoff_min,
            members: (0..config.channels).map(|i| member(&config, i)).collect(),
            requests: Slab::with_capacity(config.max_requests),
            queue: VecDeque::with_capacity(config.max_requests),
            next_seq: 0,
            replays: 0,
            outputs: VecDeque::new(),
            timer: None,
        };
        session.connect(0, now);
        session
    }

    /// Where the session is in its life.
    #[must_use]
    pub fn state(&self) -> SessionState {
        self.state
    }

    /// Requests taken and not yet completed.
    #[must_use]
    pub fn requests(&self) -> usize {
        self.requests.len()
    }

    /// Live channels.
    #[must_use]
    pub fn live_channels(&self) -> usize {
        self.members.iter().filter(|m| m.link == Link::Up).count()
    }

    /// What a channel's login agreed on; `None` before.
    #[must_use]
    pub fn agreed(&self, channel: ChannelIndex) -> Option<&Agreed> {
        self.members[usize::from(channel.0)].channel.agreed()
    }

    /// The next thing to do.
    pub fn poll_output(&mut self) -> Option<Output> {
        self.outputs.pop_front()
    }

    /// When [`Self::handle_timeout`] should be called, at the latest.
    #[must_use]
    pub fn next_deadline(&self) -> Option<Instant> {
        self.timer
    }

    fn arm(&mut self, at: Instant) {
        self.timer = Some(self.timer.map_or(at, |t| t.min(at)));
    }

    // ---- requests -------------------------------------------------------------------------------

    /// Takes a request.
    ///
    /// # Errors
    /// [`SubmitError`]; nothing was taken.
    pub fn submit(&mut self, spec: RequestSpec, now: Instant) -> Result<RequestId, SubmitError> {
        if self.is_ending() {
            return Err(SubmitError::Closed);
        }
        if self.requests.len() >= self.config.max_requests {
            return Err(SubmitError::Full);
        }
        let seq = self.next_seq;
        self.next_seq += 1;
        let index = self.requests.insert(Request {
            spec,
            seq,
            attempts: 0,
            replayed: false,
            state: RequestState::Queued,
        }) as u32;
        self.queue.push_back(index);
        self.arm(spec.deadline);
        self.pump(now);
        Ok(RequestId(index))
    }

    fn is_ending(&self) -> bool {
        matches!(
            self.state,
            SessionState::Closed | SessionState::TearingDown { last: true, .. }
        )
    }

    fn request(&self, index: u32) -> &Request {
        &self.requests[index as usize]
    }

    fn request_mut(&mut self, index: u32) -> &mut Request {
        &mut self.requests[index as usize]
    }

    /// The request that has been submitted.
    ///
    /// # Panics
    /// If there is none of that id.
    #[must_use]
    pub fn spec(&self, request: RequestId) -> &RequestSpec {
        &self.request(request.0).spec
    }

    /// Starts what can be started.
    fn pump(&mut self, now: Instant) {
        while let Some(&index) = self.queue.front() {
            let Some(channel) = self.pick_channel() else {
                return;
            };
            if self.replays > 0 && self.must_wait(index) {
                return;
            }
            self.queue.pop_front();
            self.start(index, channel, now);
        }
    }

    /// The live channel with the fewest commands that has room for one more.
    fn pick_channel(&self) -> Option<u8> {
        let open = self
            .members
            .iter()
            .enumerate()
            .filter(|(_, m)| m.link == Link::Up && m.channel.can_start());
        let (index, _) = open.min_by_key(|(_, m)| m.channel.outstanding())?;
        Some(index as u8)
    }

    /// Whether an earlier request with an overlapping effect is outstanding.
    fn must_wait(&self, index: u32) -> bool {
        let request = self.request(index);
        let effect = request.spec.effect;
        self.requests.iter().any(|(_, other)| {
            other.seq < request.seq
                && other.spec.lun == request.spec.lun
                && other.state != RequestState::Queued
                && effect.conflicts(other.spec.effect)
        })
    }

    fn start(&mut self, index: u32, channel: u8, now: Instant) {
        let until = now + self.config.timing.attempt;
        let len = self.request(index).spec.len;
        let member = &mut self.members[usize::from(channel)];
        let tag = member
            .channel
            .reserve(index, len)
            .expect("the channel has room");
        let immediate = match (len, member.channel.agreed().and_then(|a| a.immediate)) {
            (DataLen::Out(len), Some(immediate)) => len > 0 && len <= immediate.max_len,
            _ => false,
        };
        let request = self.request_mut(index);
        request.attempts = request.attempts.saturating_add(1);
        request.state = RequestState::Started {
            channel,
            tag,
            until,
        };
        self.arm(until);
        self.outputs.push_back(Output::Start {
            request: RequestId(index),
            channel: ChannelIndex(channel),
            immediate,
        });
    }

    /// Writes the command of a started request and returns its header's length; `None` where the
    /// request is no longer to be sent, because its attempt has been given up meanwhile.
    ///
    /// # Panics
    /// As [`InitiatorChannel::emit_command`].
    pub fn emit_command(
        &self,
        request: RequestId,
        data: CommandData<'_>,
        out: &mut [u8],
    ) -> Option<usize> {
        let request = self.requests.get(request.0 as usize)?;
        let (RequestState::Started { channel, tag, .. } | RequestState::Aborting { channel, tag }) =
            request.state
        else {
            return None;
        };
        let command = CommandIu {
            lun: request.spec.lun,
            attr: request.spec.attr,
            cdb: &request.spec.cdb,
            len: request.spec.len,
            data,
        };
        let channel = &self.members[usize::from(channel)].channel;
        Some(channel.emit_command(tag, &command, out))
    }

    /// A request cannot be started, for good; nothing of it was sent.
    pub fn handle_start_failed(&mut self, request: RequestId, why: &'static str, now: Instant) {
        let state = self.requests.get(request.0 as usize).map(|r| &r.state);
        if let Some(
            &(RequestState::Started { channel, tag, .. } | RequestState::Aborting { channel, tag }),
        ) = state
        {
            self.members[usize::from(channel)].channel.cancel(tag);
            self.complete(request.0, Err(RequestError::NotStarted(why)));
            self.pump(now);
        }
    }

    /// The target can no longer reach the memory of a request's last attempt.
    pub fn handle_retired(&mut self, request: RequestId, now: Instant) {
        let Some(found) = self.requests.get_mut(request.0 as usize) else {
            return;
        };
        if let RequestState::Retiring { end, .. } = &found.state {
            let end = end.clone();
            self.settle(request.0, end, now);
            self.pump(now);
        }
    }

    /// Ends an attempt: its memory is to be taken back.
    fn end_attempt(&mut self, index: u32, channel: u8, end: AttemptEnd) {
        self.request_mut(index).state = RequestState::Retiring { channel, end };
        self.outputs.push_back(Output::Retire {
            request: RequestId(index),
            channel: ChannelIndex(channel),
        });
    }

    /// Decides what becomes of a request whose attempt is over.
    fn settle(&mut self, index: u32, end: AttemptEnd, now: Instant) {
        let max_attempts = self.config.max_attempts;
        let ending = self.is_ending();
        let request = self.request_mut(index);
        let in_time = now < request.spec.deadline;
        let may_repeat = request.attempts < max_attempts && in_time && !ending;
        match end {
            AttemptEnd::Answered(answer) => {
                let verdict = match request.spec.retry {
                    Retry::Standard if may_repeat => plan_verdict(&answer),
                    _ => Verdict::Report,
                };
                match verdict {
                    Verdict::Report => self.complete(index, Ok(answer)),
                    Verdict::Again => self.enqueue(index),
                    Verdict::Later => self.back_off(index, now),
                }
            }
            AttemptEnd::Refused(code) => self.complete(index, Err(RequestError::Refused(code))),
            AttemptEnd::Aborted => {
                if may_repeat && request.spec.effect.is_replayable() {
                    self.enqueue(index);
                } else {
                    self.complete(index, Err(RequestError::TimedOut));
                }
            }
            AttemptEnd::Lost if ending => self.complete(index, Err(RequestError::Closed)),
            AttemptEnd::Lost if !in_time => self.complete(index, Err(RequestError::TimedOut)),
            AttemptEnd::Lost => {
                if may_repeat && request.spec.effect.is_replayable() {
                    if !request.replayed {
                        request.replayed = true;
                        self.replays += 1;
                    }
                    self.enqueue(index);
                } else {
                    self.complete(index, Err(RequestError::ConnectionLost));
                }
            }
        }
    }

    /// Queues a request again, in the order of submission.
    fn enqueue(&mut self, index: u32) {
        self.request_mut(index).state = RequestState::Queued;
        let seq = self.request(index).seq;
        let at = self
            .queue
            .partition_point(|&other| self.request(other).seq < seq);
        self.queue.insert(at, index);
    }

    fn back_off(&mut self, index: u32, now: Instant) {
        let busy = self.config.timing.busy;
        let request = self.request_mut(index);
        let doublings = u32::from(request.attempts.saturating_sub(1)).min(7);
        let until = (now + busy * (1 << doublings)).min(request.spec.deadline);
        request.state = RequestState::Backoff { until };
        self.arm(until);
    }

    fn complete(&mut self, index: u32, result: RequestResult) {
        let request = self.requests.remove(index as usize);
        if request.replayed {
            self.replays -= 1;
        }
        self.outputs
            .push_back(Output::Complete(RequestId(index), result));
    }

    // ---- connections ----------------------------------------------------------------------------

    fn connect(&mut self, channel: u8, now: Instant) {
        let until = now + self.config.timing.login;
        let fresh = member(&self.config, channel);
        let member = &mut self.members[usize::from(channel)];
        *member = fresh;
        member.link = Link::Connecting(until);
        self.arm(until);
        self.outputs
            .push_back(Output::Connect(ChannelIndex(channel)));
    }

    /// The path is found: the private data to connect with.
    ///
    /// # Panics
    /// If the channel is not being connected.
    pub fn begin_login(&mut self, channel: ChannelIndex) -> [u8; LOGIN_REQ_RDMA_LEN] {
        let login = self.members[usize::from(channel.0)].channel.begin_login();
        let mut private_data = [0; LOGIN_REQ_RDMA_LEN];
        login.emit_rdma(&mut private_data);
        private_data
    }

    /// The connection is established; `private_data` is the target's.
    pub fn handle_connected(&mut self, channel: ChannelIndex, private_data: &[u8], now: Instant) {
        let member = &mut self.members[usize::from(channel.0)];
        if !matches!(member.link, Link::Connecting(_)) {
            return;
        }
        match member.channel.handle_established(private_data) {
            Ok(_) => member.link = Link::Up,
            Err(fault) => {
                member.channel.begin_disconnect();
                member.link = Link::Closing;
                self.outputs.push_back(Output::Disconnect(channel, None));
                if channel.0 == 0 {
                    let error = ConnectError::Login(fault.into());
                    self.tear_down(error.into(), false);
                }
                return;
            }
        }
        if channel.0 == 0 && self.state == SessionState::LoggingIn {
            self.state = SessionState::Live;
            self.ever_live = true;
            self.backoff = self.config.timing.backoff_min;
            self.outputs.push_back(Output::Event(SessionEvent::Live));
            for extra in 1..self.config.channels {
                self.connect(extra, now);
            }
        }
        self.pump(now);
    }

    /// A connection was rejected with a CM reason and private data. The owner has released what the
    /// channel held.
    pub fn handle_rejected(
        &mut self,
        channel: ChannelIndex,
        reason: u16,
        private_data: &[u8],
        now: Instant,
    ) {
        let member = &mut self.members[usize::from(channel.0)];
        let error = member.channel.handle_rejected(reason, private_data);
        self.handle_connect_failed(channel, ConnectError::Login(error), now);
    }

    /// A connection could not be made. The owner has released what the channel held.
    pub fn handle_connect_failed(
        &mut self,
        channel: ChannelIndex,
        error: ConnectError,
        now: Instant,
    ) {
        let member = &mut self.members[usize::from(channel.0)];
        if member.link == Link::Down {
            return;
        }
        member.link = Link::Down;
        member.channel.handle_disconnected();
        // The target need not grant more than one channel.
        if channel.0 == 0 && self.state == SessionState::LoggingIn {
            self.state = SessionState::TearingDown {
                why: error.into(),
                last: !self.ever_live,
            };
        }
        self.on_member_down(now);
    }

    /// A channel's connection broke, was closed by the peer, or a work request on it failed.
    pub fn handle_channel_error(&mut self, channel: ChannelIndex, _now: Instant) {
        match self.members[usize::from(channel.0)].link {
            Link::Up | Link::Connecting(_) => self.tear_down(Down::ConnectionLost, false),
            Link::Down | Link::Closing => {}
        }
    }

    /// A channel has been torn down: nothing can arrive on it any more, and the keys of all memory
    /// that was made known on it are invalid.
    pub fn handle_channel_gone(&mut self, channel: ChannelIndex, now: Instant) {
        let member = &mut self.members[usize::from(channel.0)];
        member.link = Link::Down;
        member.channel.handle_disconnected();
        member.tmf = None;
        member.aborts.clear();
        let here = channel.0;
        let mut ended: Vec<(u64, u32, AttemptEnd)> = self
            .requests
            .iter()
            .filter_map(|(index, request)| {
                let end = match &request.state {
                    RequestState::Started { channel, .. }
                    | RequestState::Aborting { channel, .. }
                        if *channel == here =>
                    {
                        AttemptEnd::Lost
                    }
                    RequestState::Retiring { channel, end } if *channel == here => end.clone(),
                    _ => return None,
                };
                Some((request.seq, index as u32, end))
            })
            .collect();
        ended.sort_by_key(|(seq, ..)| *seq);
        for (_, index, end) in ended {
            self.settle(index, end, now);
        }
        self.on_member_down(now);
    }

    /// Goes on with a tear-down once the last channel is down.
    fn on_member_down(&mut self, now: Instant) {
        let SessionState::TearingDown { why, last } = self.state else {
            return;
        };
        if self.members.iter().any(|m| m.link != Link::Down) {
            // Channels that are up or being connected go too.
            self.close_members();
            return;
        }
        if last || !self.ever_live {
            self.state = SessionState::Closed;
            let left: Vec<u32> = self.requests.iter().map(|(i, _)| i as u32).collect();
            self.queue.clear();
            for index in left {
                self.complete(index, Err(RequestError::Closed));
            }
            self.timer = None;
            self.outputs
                .push_back(Output::Event(SessionEvent::Closed(why)));
            return;
        }
        let until = now + self.backoff;
        self.backoff = (self.backoff * 2).min(self.config.timing.backoff_max);
        self.state = SessionState::Backoff { until };
        self.arm(until);
        self.outputs
            .push_back(Output::Event(SessionEvent::Reconnecting(why)));
    }

    /// Begins to close every channel.
    fn tear_down(&mut self, why: Down, last: bool) {
        match &mut self.state {
            SessionState::Closed => return,
            SessionState::TearingDown { last: l, .. } => *l |= last,
            state => *state = SessionState::TearingDown { why, last },
        }
        self.close_members();
    }

    fn close_members(&mut self) {
        let last = matches!(self.state, SessionState::TearingDown { last: true, .. });
        for (index, member) in self.members.iter_mut().enumerate() {
            if matches!(member.link, Link::Up | Link::Connecting(_)) {
                let logout = member.channel.begin_disconnect().filter(|_| last);
                member.link = Link::Closing;
                self.outputs
                    .push_back(Output::Disconnect(ChannelIndex(index as u8), logout));
            }
        }
    }

    /// Ends the session: logs out, disconnects, and completes every request with
    /// [`RequestError::Closed`].
    pub fn close(&mut self, now: Instant) {
        self.tear_down(Down::Closed, true);
        self.on_member_down(now);
    }

    // ---- arrivals -------------------------------------------------------------------------------

    /// Takes an information unit that arrived on a channel.
    pub fn handle_iu(&mut self, channel: ChannelIndex, iu: &[u8], now: Instant) {
        let member = &mut self.members[usize::from(channel.0)];
        if member.link != Link::Up {
            return;
        }
        let received = match member.channel.handle_iu(iu) {
            Ok(received) => received,
            Err(fault) => {
                self.tear_down(fault.into(), false);
                return;
            }
        };
        match received {
            Received::Response { owner, rsp } => {
                let len = self.request(owner).spec.len;
                let end = match rsp.response {
                    None | Some(RspCode::Complete) => AttemptEnd::Answered(Answer::new(&rsp, len)),
                    Some(code) => AttemptEnd::Refused(code),
                };
                self.end_attempt(owner, channel.0, end);
            }
            Received::TskMgmt(code) => self.handle_tsk_mgmt_end(channel.0, Some(code), now),
            Received::Answer(answer) => self.outputs.push_back(Output::Answer(channel, answer)),
            Received::Event { lun, sense, answer } => {
                let sense = Box::from(sense);
                self.outputs.push_back(Output::Answer(channel, answer));
                self.outputs
                    .push_back(Output::Event(SessionEvent::UnitEvent { lun, sense }));
            }
            Received::Logout(reason) => self.tear_down(Down::Logout(reason), false),
            Received::Stale => {}
        }
        self.pump(now);
    }

    // ---- time -----------------------------------------------------------------------------------

    /// Does what is due.
    pub fn handle_timeout(&mut self, now: Instant) {
        if self.timer.is_none_or(|t| t > now) {
            return;
        }
        self.timer = None;
        if let SessionState::Backoff { until } = self.state {
            if until <= now {
                self.state = SessionState::LoggingIn;
                self.connect(0, now);
            } else {
                self.arm(until);
            }
        }
        self.expire_links(now);
        self.expire_tsk_mgmt(now);
        self.expire_requests(now);
        self.pump(now);
    }

    fn expire_links(&mut self, now: Instant) {
        for index in 0..self.members.len() {
            let Link::Connecting(until) = self.members[index].link else {
                continue;
            };
            if until > now {
                self.arm(until);
                continue;
            }
            let member = &mut self.members[index];
            member.channel.begin_disconnect();
            member.link = Link::Closing;
            let channel = ChannelIndex(index as u8);
            self.outputs.push_back(Output::Disconnect(channel, None));
            if index == 0 {
                self.tear_down(ConnectError::TimedOut.into(), false);
            }
        }
    }

    fn expire_tsk_mgmt(&mut self, now: Instant) {
        for index in 0..self.members.len() {
            match self.members[index].tmf {
                Some((_, until)) if until <= now => {
                    self.members[index].channel.give_up_tsk_mgmt();
                    self.handle_tsk_mgmt_end(index as u8, None, now);
                }
                Some((_, until)) => self.arm(until),
                None => {}
            }
        }
    }

    fn expire_requests(&mut self, now: Instant) {
        let mut late = Vec::new();
        for index in 0..self.requests.capacity() as u32 {
            let Some(request) = self.requests.get(index as usize) else {
                continue;
            };
            let at = match request.state {
                RequestState::Queued => request.spec.deadline,
                RequestState::Backoff { until } => until.min(request.spec.deadline),
                RequestState::Started { until, .. } => until.min(request.spec.deadline),
                RequestState::Aborting { .. } | RequestState::Retiring { .. } => continue,
            };
            if at <= now {
                late.push((request.seq, index));
            } else {
                self.arm(at);
            }
        }
        late.sort_unstable();
        for (seq, index) in late {
            self.expire_request(index, seq, now);
        }
    }

    fn expire_request(&mut self, index: u32, seq: u64, now: Instant) {
        let request = self.request(index);
        let overdue = request.spec.deadline <= now;
        match request.state {
            RequestState::Queued => {
                self.queue.retain(|&i| i != index);
                self.complete(index, Err(RequestError::TimedOut));
            }
            RequestState::Backoff { .. } if overdue => {
                self.complete(index, Err(RequestError::TimedOut));
            }
            RequestState::Backoff { .. } => self.enqueue(index),
            RequestState::Started { channel, tag, .. } => {
                self.request_mut(index).state = RequestState::Aborting { channel, tag };
                let member = &mut self.members[usize::from(channel)];
                member.aborts.push_back((index, seq));
                self.pump_tsk_mgmt(channel, now);
            }
            RequestState::Aborting { .. } | RequestState::Retiring { .. } => {}
        }
    }

    /// The tag of a request that still waits for its abort on a channel.
    fn aborting(&self, index: u32, seq: u64) -> Option<Tag> {
        let request = self.requests.get(index as usize)?;
        match request.state {
            RequestState::Aborting { tag, .. } if request.seq == seq => Some(tag),
            _ => None,
        }
    }

    /// Sends the next ABORT TASK of a channel, if there is one and none is under way.
    fn pump_tsk_mgmt(&mut self, channel: u8, now: Instant) {
        if self.members[usize::from(channel)].link != Link::Up {
            return;
        }
        while self.members[usize::from(channel)].tmf.is_none() {
            let next = self.members[usize::from(channel)].aborts.pop_front();
            let Some((index, seq)) = next else {
                return;
            };
            if let Some(tag) = self.aborting(index, seq) {
                let lun = self.request(index).spec.lun;
                let kind = TskMgmtKind::Abort(index, seq);
                self.send_tsk_mgmt(channel, lun, kind, Some(tag), now);
            }
        }
    }

    fn send_tsk_mgmt(
        &mut self,
        channel: u8,
        lun: WireLun,
        kind: TskMgmtKind,
        task: Option<Tag>,
        now: Instant,
    ) {
        let until = now + self.config.timing.tsk_mgmt;
        let function = match kind {
            TskMgmtKind::Abort(..) => TskMgmtFunction::AbortTask,
            TskMgmtKind::LunReset(_) => TskMgmtFunction::LogicalUnitReset,
        };
        let member = &mut self.members[usize::from(channel)];
        // Set even when the request cannot be sent, so that no other is tried meanwhile.
        member.tmf = Some((kind, until));
        match member.channel.start_tsk_mgmt(lun, function, task) {
            Some(iu) => {
                self.arm(until);
                self.outputs
                    .push_back(Output::SendTskMgmt(ChannelIndex(channel), iu));
            }
            None => self.tear_down(Down::Unresponsive, false),
        }
    }

    /// A task-management request was answered, or not in time (`None`).
    fn handle_tsk_mgmt_end(&mut self, channel: u8, code: Option<RspCode>, now: Instant) {
        let Some((kind, _)) = self.members[usize::from(channel)].tmf.take() else {
            return;
        };
        let done = code == Some(RspCode::Complete);
        match kind {
            TskMgmtKind::Abort(index, seq) => {
                // The answer may have come while the abort was under way.
                if let Some(tag) = self.aborting(index, seq) {
                    if done {
                        self.members[usize::from(channel)].channel.give_up(tag);
                        self.end_attempt(index, channel, AttemptEnd::Aborted);
                    } else {
                        let lun = self.request(index).spec.lun;
                        let kind = TskMgmtKind::LunReset(lun);
                        self.send_tsk_mgmt(channel, lun, kind, None, now);
                    }
                }
            }
            TskMgmtKind::LunReset(lun) if done => self.end_lun(lun),
            TskMgmtKind::LunReset(_) => self.tear_down(Down::Unresponsive, false),
        }
        self.pump_tsk_mgmt(channel, now);
    }

    /// A logical unit was reset: none of its commands will be answered.
    fn end_lun(&mut self, lun: WireLun) {
        let mut ended = Vec::new();
        for (index, request) in &self.requests {
            if let RequestState::Started { channel, tag, .. }
            | RequestState::Aborting { channel, tag } = request.state
                && request.spec.lun == lun
            {
                ended.push((request.seq, index as u32, channel, tag));
            }
        }
        ended.sort_unstable();
        for (_, index, channel, tag) in ended {
            self.members[usize::from(channel)].channel.give_up(tag);
            self.end_attempt(index, channel, AttemptEnd::Aborted);
        }
    }
}

fn member(config: &SessionConfig, index: u8) -> Member {
    let multi_channel = if index == 0 {
        MultiChannelAction::Single
    } else {
        MultiChannelAction::Multi
    };
    let channel = InitiatorChannel::new(ChannelConfig {
        multi_channel,
        ..config.channel
    });
    debug_assert_eq!(channel.state(), ChannelState::Connecting);
    Member {
        channel,
        link: Link::Down,
        tmf: None,
        aborts: VecDeque::new(),
    }
}

#[cfg(test)]
#[path = "session_tests.rs"]
mod tests;
