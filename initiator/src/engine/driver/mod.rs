//! The engine itself: it owns a provider, and drives sessions with what the provider reports. It
//! reads no clock: the loop around it gives each round its time.
//!
//! One round: packets and timers of the provider, connection events, completions, clients of disks,
//! messages of other threads, timeouts; then what all these ask of the device. After each input the
//! session's outputs are carried out until there are none, so that a session never sees an input with
//! its outputs pending.

mod context;
mod discovery;
mod events;
mod inputs;
mod iscsi;
mod iser;
mod link;
mod message;
mod multipath;
mod outages;
mod plan;
mod services;
mod srp;
mod tcp;
mod units;
mod workloads;

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use riser_memory::MemSlice;
use riser_transport::verbs::{Completion, Provider, VerbsError};
use slab::Slab;

use self::context::{Context, Report};
use self::discovery::Agent;
use self::inputs::Input;
use self::iscsi::IscsiLink;
use self::link::Link;
use self::message::Reply;
pub(super) use self::message::{Message, Open, SessionGuard, User};
use self::multipath::PathsLink;
use self::outages::OutageLog;
pub(super) use self::plan::{
    CHECK_LEN, IscsiOpen, PathPlan, PathsOpen, Plan, Protocol, SrpOpen, Transport,
};
use self::srp::SrpLink;
pub(super) use self::units::Watch;
use self::units::Watched;
use crate::block::Services;
use crate::engine::env::Env;
use crate::engine::io::{Done, Io, IoEnd, SessionKey, Target, WorkQueue, Workload};
use crate::engine::oneshot::Sender;
use crate::engine::park::{Mailbox, Waited, WaitedFds};
use crate::engine::rdma::Device;
use crate::engine::status::SessionStatus;
use crate::engine::timer::Timers;
use crate::paths::PathIndex;
use crate::request::{RequestError, RequestId, RequestResult, RequestSpec, Retry};
use crate::session::{ConnectError, SubmitError};
use crate::unit::Evidence;

/// Completions taken from a queue at once.
const BATCH: usize = 64;
/// Sessions on RDMA at most.
const MAX_RDMA: usize = 64;

/// A session in the engine.
struct EngineSession {
    serial: u64,
    link: Link,
    /// Commands that the machine has, by request.
    ios: Vec<Option<Io>>,
    /// Commands beyond what the machine takes.
    overflow: VecDeque<Io>,
    /// They are being given to the machine.
    is_refilling: bool,
    workloads: Slab<(Box<dyn Workload>, usize)>,
    status: Arc<SessionStatus>,
    reply: Option<Reply>,
    /// The paths that it is one of.
    paths: Option<(SessionKey, PathIndex)>,
    closers: Vec<Sender<bool>>,
    /// The session was settled when it was closed; see [`Machine::is_settled`].
    was_settled: bool,
    closed: bool,
    /// Units whose users want them to stay the same.
    units: Vec<Watched>,
    /// Signs, since they were last known to be the same, that their caches were lost.
    evidence: Evidence,
    /// Time of the target's last message, while they are not known to be the same.
    heard: Option<Instant>,
    /// It has logged in, and is not reported to be live before the units are known to be the same.
    is_unchecked: bool,
    /// Its connection is lost, and not made again yet.
    is_away: bool,
    outages: OutageLog,
}

/// State of the engine's thread.
pub(super) struct Driver<E: Env> {
    env: E,
    /// `None` for an engine whose sessions all run on TCP.
    device: Option<Device<E::Provider>>,
    mailbox: Arc<Mailbox<Message>>,
    pool: MemSlice,
    sessions: Slab<EngineSession>,
    next_serial: u64,
    timers: Timers,
    agent: Option<Agent>,
    completions: Vec<Completion>,
    /// Ends of workload commands: session, workload, token, end.
    finished: Vec<(usize, usize, u64, IoEnd)>,
    /// What a workload submits in one call.
    work: WorkQueue,
    /// Inputs of sessions that are paths, or whose units are watched.
    inputs: VecDeque<Input>,
    /// Clients of disks, which are served here.
    services: Services,
    inbox: Vec<Message>,
    shutdown: bool,
}

impl<E: Env> Driver<E> {
    pub(super) fn new(
        env: E,
        provider: Option<E::Provider>,
        mailbox: Arc<Mailbox<Message>>,
        pool: MemSlice,
    ) -> Self {
        Self {
            env,
            device: provider.map(Device::new),
            mailbox,
            pool,
            sessions: Slab::new(),
            next_serial: 0,
            timers: Timers::default(),
            agent: None,
            completions: Vec::with_capacity(BATCH),
            finished: Vec::new(),
            work: WorkQueue::default(),
            inputs: VecDeque::new(),
            services: Services::default(),
            inbox: Vec::new(),
            shutdown: false,
        }
    }

    /// Sleeps until there is something to do, or the time is over.
    pub(super) fn park(&mut self, timeout: Option<Duration>) {
        if self.arm() {
            return;
        }
        if self.services.prepare_sleep() && !self.arm_fds() {
            let device = self.device.as_ref();
            let fds = device.map(|d| d.provider.event_fds()).unwrap_or_default();
            let mut fds: WaitedFds<'_> = fds.into_iter().map(Waited::reading).collect();
            fds.extend(self.sessions.iter().filter_map(|(_, s)| s.link.waited()));
            self.services.put_waited(&mut fds);
            self.mailbox.park(&fds, timeout);
        }
        self.services.end_sleep();
    }

    pub(super) fn provider(&self) -> Option<&E::Provider> {
        self.device.as_ref().map(|device| &device.provider)
    }

    pub(super) fn unreturned(&self) -> i64 {
        let all = self.sessions.iter();
        all.map(|(_, session)| session.link.unreturned()).sum()
    }

    /// Returns whether it was shut down, and every session has ended.
    pub(super) fn is_over(&self) -> bool {
        self.shutdown && self.is_idle()
    }

    /// Returns whether every session has ended, and every peer knows.
    fn is_idle(&self) -> bool {
        let device = self.device.as_ref();
        self.sessions.is_empty() && device.is_none_or(|d| !d.is_disconnecting())
    }

    /// One round; whether there was anything to do.
    ///
    /// Paths come last, and in no other place: their machine may close the session whose event it
    /// handles. So do sessions that are over, which everything before may still name by index.
    pub(super) fn round(&mut self, now: Instant) -> bool {
        let mut worked = self.run_device(now);
        worked |= self.poll_completions(now);
        // Before the messages: what they ask for is carried out in this round.
        worked |= self.run_services();
        let mut inbox = std::mem::take(&mut self.inbox);
        self.mailbox.receive(&mut inbox);
        worked |= !inbox.is_empty();
        for message in inbox.drain(..) {
            self.handle_message(message, now);
        }
        self.inbox = inbox;
        worked |= self.run_tcp(now);
        worked |= self.run_workloads(now);
        worked |= self.run_discovery(now);
        // The outputs of a timeout may have results already, which no descriptor reports.
        worked |= self.handle_timeouts(now);
        worked |= self.run_paths(now);
        // What all of it asks of the device leaves in one list for each queue pair.
        worked |= self.flush_device(now);
        self.reap();
        worked
    }

    /// The time of the next round at the latest.
    pub(super) fn deadline(&self) -> Option<Instant> {
        let sessions = self.sessions.iter();
        let links = sessions.filter_map(|(_, s)| s.link.next_deadline());
        links
            .chain(self.device.as_ref().and_then(Device::next_deadline))
            .chain(self.timers.deadline())
            .chain(self.discovery_deadline())
            .chain(self.work_deadline())
            .min()
    }

    /// Arms every completion queue; whether completions wait already.
    fn arm(&mut self) -> bool {
        let is_found = self.arm_discovery();
        self.device.as_mut().is_some_and(Device::arm) || is_found
    }

    /// Has the device's descriptors end the sleep that follows; whether something has come already.
    fn arm_fds(&mut self) -> bool {
        let device = self.device.as_mut();
        device.is_some_and(|device| device.provider.arm_fds())
    }

    /// Gives a session's link an input, and carries out what follows from it: a machine never sees
    /// an input with its outputs pending.
    fn with_link<T>(
        &mut self,
        index: usize,
        now: Instant,
        input: impl FnOnce(&mut Link, &mut Context<'_, E>) -> T,
    ) -> T {
        let (link, mut cx) = self.context(index, now);
        let result = input(link, &mut cx);
        self.drain(index, now);
        result
    }

    fn context(&mut self, index: usize, now: Instant) -> (&mut Link, Context<'_, E>) {
        let session = &mut self.sessions[index];
        let cx = Context {
            device: self.device.as_mut(),
            env: &mut self.env,
            ios: &session.ios,
            index,
            now,
        };
        (&mut session.link, cx)
    }

    /// Carries out a session's outputs until there are none.
    fn drain(&mut self, index: usize, now: Instant) {
        loop {
            let (link, mut cx) = self.context(index, now);
            let Some(report) = link.poll(&mut cx) else {
                return;
            };
            match report {
                Report::Complete(request, result) => self.complete(index, request, result, now),
                Report::Event(event) => self.handle_event(index, event, now),
                Report::Ping => self.ping(index, now),
                Report::Path(output) => self.carry_out_path(index, output, now),
            }
        }
    }

    fn close(&mut self, index: usize, now: Instant) {
        self.with_link(index, now, |link, _| link.machine().close(now));
    }

    fn handle_message(&mut self, message: Message, now: Instant) {
        match message {
            Message::Open(open) => {
                self.open(*open, now);
            }
            Message::Submit(key, io, sender) => match self.find(key) {
                Some(index) => self.submit(index, Io::new(*io, Done::Future(sender), now), now),
                // The session is over, and its issuer would wait without end.
                None => sender.send(IoEnd {
                    result: Err(RequestError::Closed),
                    data: io.data,
                }),
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
                    let session = &mut self.sessions[index];
                    if !session.closed {
                        session.was_settled = session.link.machine().is_settled();
                    }
                    session.closers.extend(reply);
                    self.close(index, now);
                }
            }
            Message::Host(service) => self.services.push(service),
            Message::Timer(limit, sender) => self.timers.insert(now + limit, sender),
            Message::Discover {
                ip,
                transaction,
                reply,
            } => self.discover(ip, transaction, reply),
            Message::Shutdown => {
                self.shutdown = true;
                // Collected first, since closing a session works on the whole driver.
                let all: Vec<usize> = self.sessions.iter().map(|(index, _)| index).collect();
                for index in all {
                    self.close(index, now);
                }
            }
        }
    }

    fn find(&self, key: SessionKey) -> Option<usize> {
        let session = self.sessions.get(key.index)?;
        (session.serial == key.serial).then_some(key.index)
    }

    fn key(&self, index: usize) -> SessionKey {
        let serial = self.sessions[index].serial;
        SessionKey { index, serial }
    }

    /// Makes a session; `None` where it cannot be made, after its user has been notified.
    fn open(&mut self, open: Open, now: Instant) -> Option<SessionKey> {
        let link = match self.make_link(open.target, open.plan, now) {
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
        let index = self.sessions.insert(EngineSession {
            serial,
            link,
            ios: Vec::new(),
            overflow: VecDeque::new(),
            is_refilling: false,
            workloads: Slab::new(),
            status: open.status,
            reply,
            paths,
            closers: Vec::new(),
            was_settled: false,
            closed: false,
            units: Vec::new(),
            evidence: Evidence::default(),
            heard: None,
            is_unchecked: false,
            is_away: false,
            outages: OutageLog::default(),
        });
        // One that was on its way when the engine was shut down ends as the others do, so that
        // its user hears of it.
        match self.shutdown {
            true => self.close(index, now),
            false => self.drain(index, now),
        }
        Some(SessionKey { index, serial })
    }

    fn make_link(&mut self, target: Target, plan: Plan, now: Instant) -> Result<Link, VerbsError> {
        let protocol = match plan {
            Plan::Paths(open) => return Ok(Link::Paths(Box::new(PathsLink::new(*open, now)))),
            Plan::One(protocol) => protocol,
        };
        Ok(match protocol {
            Protocol::Srp(open) => {
                let (device, pool) = self.claim_device()?;
                Link::Srp(Box::new(SrpLink::new(device, pool, target, &open, now)?))
            }
            Protocol::Iscsi(open) => Link::Iscsi(Box::new(match open.transport {
                Transport::Tcp => IscsiLink::tcp(target, *open, now),
                Transport::Iser(config) => {
                    let (device, pool) = self.claim_device()?;
                    IscsiLink::iser(device, pool, target, *open, config, now)?
                }
            })),
        })
    }

    /// The device for one more session, and the memory to register on it.
    fn claim_device(&mut self) -> Result<(&mut Device<E::Provider>, &MemSlice), VerbsError> {
        let rdma = self.sessions.iter().filter(|(_, s)| s.link.is_rdma());
        if rdma.count() >= MAX_RDMA {
            return Err(VerbsError::InsufficientResources("sessions of one engine"));
        }
        let device = self.device.as_mut();
        let device = device.ok_or(VerbsError::InvalidState("this engine has no RDMA device"))?;
        Ok((device, &self.pool))
    }

    fn submit(&mut self, index: usize, mut io: Io, now: Instant) {
        let session = &mut self.sessions[index];
        session.mark_flush(&mut io);
        if !session.link.takes(io.io.data.buffers().len()) {
            let why = "buffer is in too many pieces";
            self.deliver(index, io, Err(RequestError::NotStarted(why)));
            return;
        }
        // Behind those that wait already, so that commands start in the order of their submission.
        // A probe does not wait: they may be held until it is answered.
        let is_probe = io.io.retry == Retry::Probe;
        let must_wait = !session.overflow.is_empty() && !session.closed && !is_probe;
        let left = match must_wait {
            true => Some(io),
            false => self.begin(index, io, now),
        };
        let session = &mut self.sessions[index];
        session.overflow.extend(left);
        session.report_pending();
    }

    /// Gives a command to the session's machine; returns it if there is no room.
    fn begin(&mut self, index: usize, io: Io, now: Instant) -> Option<Io> {
        let spec = RequestSpec {
            lun: io.io.lun.encode(),
            attr: io.io.attr,
            cdb: io.io.command.cdb,
            len: io.io.command.len,
            deadline: io.deadline,
            retry: io.io.retry,
            effect: io.io.command.effect,
        };
        let session = &mut self.sessions[index];
        match session.link.submit(spec, now) {
            Ok(RequestId(id)) => {
                let id = id as usize;
                if id >= session.ios.len() {
                    session.ios.resize_with(id + 1, || None);
                }
                session.ios[id] = Some(io);
                self.drain(index, now);
            }
            Err(SubmitError::Full) => return Some(io),
            Err(SubmitError::Closed) => self.deliver(index, io, Err(RequestError::Closed)),
        }
        None
    }

    /// Delivers a command's end to its receiver.
    fn deliver(&mut self, index: usize, io: Io, result: RequestResult) {
        let end = |io: Io, result| IoEnd {
            result,
            data: io.io.data,
        };
        match io.done {
            Done::Future(sender) => sender.send(IoEnd {
                result,
                data: io.io.data,
            }),
            Done::Workload { workload, token } => {
                self.finished
                    .push((index, workload, token, end(io, result)));
            }
            // Paths may send the command once more, by another path.
            Done::Path { paths, request } => {
                let ended = Input::Ended(paths, request, Box::new(io), result);
                self.inputs.push_back(ended);
            }
            Done::Check { paths, path } => {
                let answered = Input::PathAnswered(paths, path, end(io, result));
                self.inputs.push_back(answered);
            }
            Done::Unit { session, unit } => {
                let answered = Input::UnitAnswered(session, unit, end(io, result));
                self.inputs.push_back(answered);
            }
            Done::Ping => {}
            Done::PathPing { paths, path } => {
                self.inputs.push_back(Input::Pinged(paths, path));
            }
        }
    }

    /// Does what is due; whether there was anything.
    fn handle_timeouts(&mut self, now: Instant) -> bool {
        self.timers.fire(now);
        if let Some(device) = &mut self.device {
            device.handle_timeout(now);
        }
        let mut worked = false;
        // A timeout may make sessions, in places that come later or have been passed.
        for index in 0..self.sessions.capacity() {
            let deadline = self
                .sessions
                .get(index)
                .and_then(|s| s.link.next_deadline());
            if deadline.is_some_and(|at| at <= now) {
                worked = true;
                self.with_link(index, now, Link::handle_timeout);
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
            session.link.release_device(self.device.as_mut());
            for closer in session.closers {
                closer.send(session.was_settled);
            }
        }
    }
}

/// Refuses messages from now on, and drops those that came too late, whose senders are notified by
/// the ends of their oneshots.
impl<E: Env> Drop for Driver<E> {
    fn drop(&mut self) {
        drop(self.mailbox.close());
    }
}
