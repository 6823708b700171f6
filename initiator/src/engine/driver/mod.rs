//! The engine's thread: it owns a provider, drives sessions with what the provider reports, and
//! parks in one place.
//!
//! One round of the loop: packets and timers of the provider, connection events, completions,
//! messages of other threads, timeouts. After each input the session's outputs are carried out until
//! there are none, so that a session never sees an input with its outputs pending.

mod completions;
mod discovery;
mod iser;
mod link;
mod links;
mod outputs;
mod paths;
mod tcp;
mod units;
mod workloads;

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};

use riser_memory::MemSlice;
use riser_reactor::{Next, Spinner};
use riser_transport::verbs::{CmId, Completion, Notify, Provider, QpId, VerbsError};
use slab::Slab;

use self::discovery::Agent;
pub(super) use self::discovery::Found;
pub(super) use self::link::{IserOpen, Protocol, SrpOpen, TcpOpen};
use self::link::{Link, SrpLink};
pub(super) use self::paths::{CHECK_LEN, PathPlan, PathsOpen};
use self::paths::{Input, PathsLink};
pub(super) use self::units::Watch;
use self::units::Watched;
use crate::engine::conn::Scratch;
use crate::engine::io::{Done, Io, IoEnd, ScsiIo, Workload};
use crate::engine::oneshot::Sender;
use crate::engine::park::{Mailbox, Waited};
use crate::engine::status::SessionStatus;
use crate::engine::timer::Timers;
use crate::paths::PathIndex;
use crate::request::{RequestError, RequestId, RequestResult, RequestSpec};
use crate::session::{ConnectError, Down, SubmitError};
use crate::srp::session::ChannelIndex;
use crate::unit::{Evidence, FlushMark};

/// How long a logout, or a connection that is still being made, may take before the end of both.
const CLOSING_PATIENCE: Duration = Duration::from_millis(500);
/// How long a disconnect may take before its identifier is destroyed anyway.
const DISCONNECT_PATIENCE: Duration = Duration::from_secs(1);
/// Completions taken from a queue at once.
const BATCH: usize = 64;
/// Sessions on RDMA at most.
const MAX_RDMA: usize = 64;

/// Names a session of the engine; never used again for another one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct SessionKey {
    index: usize,
    serial: u64,
}

/// Where a session's target is.
#[derive(Clone, Copy, Debug)]
pub(super) struct Target {
    pub(super) dst: std::net::SocketAddr,
    pub(super) src: Option<std::net::SocketAddr>,
    /// InfiniBand service id, instead of the port's.
    pub(super) service_id: Option<u64>,
}

/// A session to make.
pub(super) struct Open {
    pub(super) target: Target,
    pub(super) protocol: Protocol,
    pub(super) status: Arc<SessionStatus>,
    pub(super) user: User,
}

/// Whom a session is for.
pub(super) enum User {
    /// Told when it is live, or why it never will be.
    Caller(Reply),
    /// Other sessions, which it is a path of.
    Paths(SessionKey, PathIndex),
}

/// Closes its session when it is dropped, even if nobody received it.
pub(super) struct SessionGuard {
    pub(super) key: SessionKey,
    mailbox: Arc<Mailbox<Message>>,
}

impl Drop for SessionGuard {
    fn drop(&mut self) {
        // A closed mailbox has no sessions.
        let _ = self.mailbox.send(Message::Close(self.key, None));
    }
}

type Reply = Sender<Result<SessionGuard, Down>>;

/// What other threads tell the engine.
pub(super) enum Message {
    Open(Box<Open>),
    Submit(SessionKey, Box<Io>),
    Work(SessionKey, Box<dyn Workload>),
    Watch(SessionKey, Box<Watch>),
    Close(SessionKey, Option<Sender<()>>),
    Timer(Instant, Sender<()>),
    Discover {
        ip: std::net::IpAddr,
        /// Number of the first question.
        transaction: u64,
        reply: Sender<Found>,
    },
    Shutdown,
}

/// Configuration of the thread.
#[derive(Clone, Debug)]
pub(super) struct DriverConfig {
    /// Longest span of polling after the last work.
    pub(super) spin: Duration,
}

struct Running {
    serial: u64,
    link: Link,
    /// By request.
    ios: Vec<Option<Io>>,
    /// Commands beyond what the machine takes.
    overflow: VecDeque<Io>,
    workloads: Slab<(Box<dyn Workload>, usize)>,
    status: Arc<SessionStatus>,
    reply: Option<Reply>,
    /// The paths that it is one of.
    paths: Option<(SessionKey, PathIndex)>,
    closers: Vec<Sender<()>>,
    closed: bool,
    /// Units whose users want them to stay the same.
    units: Vec<Watched>,
    /// What was seen since they were last known to be the same.
    evidence: Evidence,
    /// When the target was last heard of, while they are not known to be the same.
    heard: Option<Instant>,
    /// It has logged in, and is not reported to be live before the units are known to be the same.
    is_unchecked: bool,
}

/// The thread's state.
pub(super) struct Driver<P: Provider> {
    provider: P,
    mailbox: Arc<Mailbox<Message>>,
    pool: MemSlice,
    config: DriverConfig,
    sessions: Slab<Running>,
    next_serial: u64,
    /// Identifiers of the connection manager, by owner.
    ids: HashMap<CmId, (usize, u8)>,
    qps: HashMap<QpId, (usize, u8)>,
    /// Identifiers whose disconnect is under way, and until when it is waited for.
    leaving: Vec<(CmId, Instant)>,
    timers: Timers,
    agent: Option<Agent>,
    scratch: Scratch,
    /// The iSER message that is being looked at.
    message: Vec<u8>,
    completions: Vec<Completion>,
    /// Ends of workload commands: session, workload, token, end.
    finished: Vec<(usize, usize, u64, IoEnd)>,
    /// What happened to sessions that are paths.
    inputs: VecDeque<Input>,
    shutdown: bool,
}

impl<P: Provider> Driver<P> {
    pub(super) fn new(
        provider: P,
        mailbox: Arc<Mailbox<Message>>,
        pool: MemSlice,
        config: DriverConfig,
    ) -> Self {
        Self {
            provider,
            mailbox,
            pool,
            config,
            sessions: Slab::new(),
            next_serial: 0,
            ids: HashMap::new(),
            qps: HashMap::new(),
            leaving: Vec::new(),
            timers: Timers::default(),
            agent: None,
            scratch: Scratch::default(),
            message: Vec::new(),
            completions: Vec::with_capacity(BATCH),
            finished: Vec::new(),
            inputs: VecDeque::new(),
            shutdown: false,
        }
    }

    /// Runs until it is shut down and every session has ended.
    pub(super) fn run(&mut self) {
        let mut spinner = Spinner::new(self.config.spin);
        let mut inbox = Vec::new();
        loop {
            let now = Instant::now();
            let worked = self.round(now, &mut inbox);
            if self.shutdown && self.sessions.is_empty() && self.leaving.is_empty() {
                return;
            }
            let now = Instant::now();
            match spinner.plan(now, worked, self.deadline()) {
                Next::Poll => std::hint::spin_loop(),
                Next::Park(timeout) => {
                    if !self.arm() {
                        let fds = self.provider.event_fds();
                        let mut fds: Vec<Waited> = fds.into_iter().map(Waited::reading).collect();
                        fds.extend(self.sessions.iter().filter_map(|(_, s)| s.link.waited()));
                        self.mailbox.park(&fds, timeout);
                    }
                }
            }
        }
    }

    /// One round; whether there was anything to do.
    fn round(&mut self, now: Instant, inbox: &mut Vec<Message>) -> bool {
        let mut worked = self.provider.progress(now) > 0;
        while let Some(event) = self.provider.poll_cm_event() {
            worked = true;
            self.handle_cm_event(event, now);
        }
        while let Some(event) = self.provider.poll_async_event() {
            worked = true;
            self.handle_async_event(event, now);
        }
        worked |= self.poll_completions(now);
        self.mailbox.receive(inbox);
        worked |= !inbox.is_empty();
        for message in inbox.drain(..) {
            self.handle_message(message, now);
        }
        worked |= self.run_tcp(now);
        worked |= self.run_workloads(now);
        worked |= self.run_discovery(now);
        // What a timeout starts may have results already, of which no descriptor will tell.
        worked |= self.handle_timeouts(now);
        worked |= self.run_paths(now);
        self.reap();
        worked
    }

    /// When a round is due at the latest.
    fn deadline(&self) -> Option<Instant> {
        let machines = self.sessions.iter().flat_map(|(_, s)| {
            let closings = s.link.closings().map(|(_, until)| until);
            s.link.next_deadline().into_iter().chain(closings)
        });
        let leaving = self.leaving.iter().map(|(_, until)| *until);
        machines
            .chain(leaving)
            .chain(self.timers.deadline())
            .chain(self.discovery_deadline())
            .chain(self.provider.deadline())
            .min()
    }

    /// Arms every completion queue; whether completions wait already.
    fn arm(&mut self) -> bool {
        let mut waiting = self.arm_discovery();
        for (_, session) in &self.sessions {
            if let Some(cq) = session.link.cq() {
                let armed = self.provider.req_notify_cq(cq, Notify::Next);
                waiting |= armed.unwrap_or(false);
            }
        }
        while self.provider.poll_cq_event().is_some() {}
        waiting
    }

    fn handle_message(&mut self, message: Message, now: Instant) {
        match message {
            Message::Open(open) => {
                self.open(*open, now);
            }
            Message::Submit(key, io) => match self.find(key) {
                Some(index) => self.submit(index, *io, now),
                None => self.refuse(*io),
            },
            Message::Work(key, workload) => {
                if let Some(index) = self.find(key) {
                    self.start_workload(index, workload, now);
                }
            }
            Message::Watch(key, watch) => {
                if let Some(index) = self.find(key) {
                    self.watch(index, *watch, now);
                }
            }
            Message::Close(key, reply) => {
                if let Some(index) = self.find(key) {
                    self.sessions[index].closers.extend(reply);
                    self.sessions[index].link.close(now);
                    self.drain(index, now);
                }
            }
            Message::Timer(at, sender) => self.timers.insert(at, sender),
            Message::Discover {
                ip,
                transaction,
                reply,
            } => self.discover(ip, transaction, reply),
            Message::Shutdown => {
                self.shutdown = true;
                let all: Vec<usize> = self.sessions.iter().map(|(index, _)| index).collect();
                for index in all {
                    self.sessions[index].link.close(now);
                    self.drain(index, now);
                }
            }
        }
    }

    fn find(&self, key: SessionKey) -> Option<usize> {
        let session = self.sessions.get(key.index)?;
        (session.serial == key.serial).then_some(key.index)
    }

    fn refuse(&mut self, io: Io) {
        let end = IoEnd {
            result: Err(RequestError::Closed),
            data: io.io.data,
        };
        if let Done::Future(sender) = io.done {
            sender.send(end);
        }
    }

    /// Makes a session; `None` where there is no room, which its user has been told.
    fn open(&mut self, open: Open, now: Instant) -> Option<SessionKey> {
        let link = match self.make_link(open.target, open.protocol, now) {
            Ok(link) => link,
            Err(e) => {
                let why = ConnectError::Local(e).into();
                match open.user {
                    User::Caller(reply) => reply.send(Err(why)),
                    User::Paths(paths, path) => {
                        let input = Input::Closed(paths, path, why, None);
                        self.inputs.push_back(input);
                    }
                }
                return None;
            }
        };
        let (reply, paths) = match open.user {
            User::Caller(reply) => (Some(reply), None),
            User::Paths(paths, path) => (None, Some((paths, path))),
        };
        let serial = self.next_serial;
        self.next_serial += 1;
        let index = self.sessions.insert(Running {
            serial,
            link,
            ios: Vec::new(),
            overflow: VecDeque::new(),
            workloads: Slab::new(),
            status: open.status,
            reply,
            paths,
            closers: Vec::new(),
            closed: false,
            units: Vec::new(),
            evidence: Evidence::default(),
            heard: None,
            is_unchecked: false,
        });
        if self.shutdown {
            self.sessions[index].link.close(now);
        }
        self.drain(index, now);
        Some(SessionKey { index, serial })
    }

    fn make_link(
        &mut self,
        target: Target,
        protocol: Protocol,
        now: Instant,
    ) -> Result<Link, VerbsError> {
        let rdma = self.sessions.iter().filter(|(_, s)| s.link.cq().is_some());
        let needs_device = matches!(protocol, Protocol::Srp(_) | Protocol::Iser(_));
        if rdma.count() >= MAX_RDMA && needs_device {
            return Err(VerbsError::InsufficientResources("sessions of one engine"));
        }
        Ok(match protocol {
            Protocol::Srp(open) => {
                let link = SrpLink::new(&mut self.provider, &self.pool, target, &open, now)?;
                Link::Srp(Box::new(link))
            }
            Protocol::Iser(open) => {
                let provider = &mut self.provider;
                let link = iser::IserLink::new(provider, &self.pool, target, *open, now)?;
                Link::Iser(Box::new(link))
            }
            Protocol::Tcp(open) => Link::Tcp(Box::new(tcp::TcpLink::new(target, *open, now))),
            Protocol::Paths(open) => Link::Paths(Box::new(PathsLink::new(*open, now))),
        })
    }

    fn submit(&mut self, index: usize, mut io: Io, now: Instant) {
        let session = &mut self.sessions[index];
        session.mark_flush(&mut io);
        if !session.link.takes(io.io.data.buffers().len()) {
            let why = "buffer is in too many pieces";
            self.deliver(index, io, Err(RequestError::NotStarted(why)));
            return;
        }
        let spec = RequestSpec {
            lun: io.io.lun.encode(),
            attr: io.io.attr,
            cdb: io.io.command.cdb,
            len: io.io.command.len,
            deadline: io.deadline,
            retry: io.io.retry,
            effect: io.io.command.effect,
        };
        if !session.overflow.is_empty() && !session.closed {
            session.overflow.push_back(io);
            session.report_pending();
            return;
        }
        match session.link.submit(spec, now) {
            Ok(RequestId(id)) => {
                let id = id as usize;
                if id >= session.ios.len() {
                    session.ios.resize_with(id + 1, || None);
                }
                session.ios[id] = Some(io);
                self.drain(index, now);
            }
            Err(SubmitError::Full) => session.overflow.push_back(io),
            Err(SubmitError::Closed) => self.deliver(index, io, Err(RequestError::Closed)),
        }
        self.sessions[index].report_pending();
    }

    /// Tells whoever waits for a command how it ended.
    fn deliver(&mut self, index: usize, io: Io, result: RequestResult) {
        if let Done::Path { paths, request } = io.done {
            self.inputs
                .push_back(Input::Ended(paths, request, Box::new(io), result));
            return;
        }
        let end = IoEnd {
            result,
            data: io.io.data,
        };
        match io.done {
            Done::Future(sender) => sender.send(end),
            Done::Workload { workload, token } => {
                self.finished.push((index, workload, token, end));
            }
            Done::Check { paths, path } => self.inputs.push_back(Input::Told(paths, path, end)),
            Done::Unit { session, unit } => {
                self.inputs.push_back(Input::UnitTold(session, unit, end));
            }
            Done::Ping => {}
            Done::Path { .. } => unreachable!("given back as it is"),
        }
    }

    /// Does what is due; whether there was anything.
    fn handle_timeouts(&mut self, now: Instant) -> bool {
        self.timers.fire(now);
        let mut due: Vec<(usize, Option<u8>)> = Vec::new();
        for (index, session) in &self.sessions {
            if session.link.next_deadline().is_some_and(|t| t <= now) {
                due.push((index, None));
            }
            let closings = session.link.closings().filter(|(_, until)| *until <= now);
            due.extend(closings.map(|(channel, _)| (index, Some(channel))));
        }
        let worked = !due.is_empty();
        for (index, channel) in due {
            match channel {
                Some(_) if matches!(self.sessions[index].link, Link::Iser(_)) => {
                    self.tear_down_iser(index, now);
                }
                Some(channel) => self.tear_down(index, ChannelIndex(channel), now),
                None => {
                    self.sessions[index].link.handle_timeout(now);
                    self.drain(index, now);
                }
            }
        }
        let mut at = 0;
        while at < self.leaving.len() {
            if self.leaving[at].1 <= now {
                let (id, _) = self.leaving.swap_remove(at);
                let _ = self.provider.destroy_id(id);
            } else {
                at += 1;
            }
        }
        worked
    }

    /// Frees sessions that are over.
    fn reap(&mut self) {
        let over: Vec<usize> = self
            .sessions
            .iter()
            .filter(|(_, s)| s.closed && s.overflow.is_empty() && s.workloads.is_empty())
            .map(|(index, _)| index)
            .collect();
        for index in over {
            let session = self.sessions.remove(index);
            // All buffers are back in the pool before the closers are notified.
            drop(session.units);
            session.link.give_back(&mut self.provider);
            for closer in session.closers {
                closer.send(());
            }
        }
    }
}

/// A command with its deadline.
pub(super) fn new_io(io: ScsiIo, done: Done, now: Instant) -> Io {
    Io {
        deadline: now + io.timeout,
        io,
        done,
        mark: FlushMark::default(),
    }
}
