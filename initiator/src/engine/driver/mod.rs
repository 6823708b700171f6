//! The engine's driver: it owns a provider and drives sessions with the provider's events. It does
//! not read a clock: its caller passes the time to each round.
//!
//! A round consists of: packets and timers of the provider, connection events, completions, clients
//! of disks, messages of other threads, and timeouts; then the resulting requests are posted to the
//! device. After each input, all outputs of the session are processed, so that a session never
//! receives an input with pending outputs.

mod commands;
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
mod session;
mod srp;
mod tcp;
mod units;
mod watched;
mod workloads;

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use riser_block::poll_fds::{PollInterest, PollInterests};
use riser_block::{Mailbox, Services};
use riser_memory::MemSlice;
use riser_transport::verbs::{Completion, Provider, VerbsError};

use self::context::{Context, Report};
use self::discovery::PortSearches;
use self::inputs::Input;
use self::iscsi::IscsiLink;
use self::link::Link;
pub(super) use self::message::{Message, Open, SessionGuard, User};
use self::multipath::PathsLink;
pub(super) use self::plan::{
    CHECK_LEN, IscsiOpen, PathPlan, PathsOpen, Plan, Protocol, SrpOpen, Transport,
};
use self::session::Sessions;
use self::srp::SrpLink;
pub(super) use self::watched::Watch;
use crate::engine::env::Env;
use crate::engine::io::{Done, Io, IoCompletion, ScsiIo, SessionKey, Target};
use crate::engine::rdma::Device;
use crate::engine::timer::Timers;
use crate::request::{RequestError, RequestResult, RequestSpec};
use crate::session::{ConnectError, SubmitError};

/// Maximum number of completions per poll.
const BATCH: usize = 64;
/// Maximum number of sessions on RDMA.
const MAX_RDMA: usize = 64;

/// State of the engine's thread.
pub(super) struct Driver<E: Env> {
    env: E,
    /// `None` for an engine whose sessions all run on TCP.
    device: Option<Device<E::Provider>>,
    mailbox: Arc<Mailbox<Message>>,
    pool: MemSlice,
    sessions: Sessions,
    timers: Timers,
    searches: PortSearches,
    completions: Vec<Completion>,
    /// Completions of workload commands: session, workload, token, completion.
    finished: Vec<(usize, usize, u64, IoCompletion)>,
    /// Commands submitted by a workload in one call.
    work: Vec<(u64, ScsiIo)>,
    /// Inputs for sessions that are paths or have watched units.
    inputs: VecDeque<Input>,
    /// Clients of disks served by this thread.
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
            sessions: Sessions::default(),
            timers: Timers::default(),
            searches: PortSearches::default(),
            completions: Vec::with_capacity(BATCH),
            finished: Vec::new(),
            work: Vec::new(),
            inputs: VecDeque::new(),
            services: Services::default(),
            inbox: Vec::new(),
            shutdown: false,
        }
    }

    /// Sleeps until there is work to do or the timeout expires.
    pub(super) fn park(&mut self, timeout: Option<Duration>) {
        if self.arm() {
            return;
        }
        if self.services.prepare_sleep() && !self.arm_fds() {
            let device = self.device.as_ref();
            let fds = device.map(|d| d.provider.event_fds()).unwrap_or_default();
            let mut fds: PollInterests<'_> = fds.into_iter().map(PollInterest::reading).collect();
            fds.extend(self.sessions.iter().filter_map(|s| s.link.poll_interest()));
            self.services.add_interests(&mut fds);
            self.mailbox.park(&fds, timeout);
        }
        self.services.end_sleep();
    }

    pub(super) fn provider(&self) -> Option<&E::Provider> {
        self.device.as_ref().map(|device| &device.provider)
    }

    pub(super) fn unreturned(&self) -> i64 {
        let all = self.sessions.iter();
        all.map(|session| session.link.unreturned()).sum()
    }

    /// Returns whether the engine was shut down and all sessions have closed.
    pub(super) fn is_over(&self) -> bool {
        self.shutdown && self.is_idle()
    }

    /// Returns whether all sessions have closed and all disconnects have completed.
    fn is_idle(&self) -> bool {
        let device = self.device.as_ref();
        self.sessions.is_empty() && device.is_none_or(|d| !d.is_disconnecting())
    }

    /// Executes one round; returns whether there was anything to do.
    ///
    /// Inputs of paths are processed last, and only there, because their machine may close the
    /// session that caused the event. Closed sessions are freed after that, because all previous
    /// steps may refer to them by index.
    pub(super) fn round(&mut self, now: Instant) -> bool {
        let mut worked = self.run_device(now);
        worked |= self.poll_completions(now);
        // Before the messages, so that requests of services are processed in this round.
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
        worked |= self.searches.run_once(self.device.as_mut(), now);
        // The outputs of a timeout may already have results that no descriptor reports.
        worked |= self.handle_timeouts(now);
        worked |= self.run_paths(now);
        // Post the requests of the whole round as one list per queue pair.
        worked |= self.flush_device(now);
        self.release_closed();
        worked
    }

    /// Runs all clients of disks; returns whether there was anything to do.
    pub(super) fn run_services(&mut self) -> bool {
        self.services.run_all()
    }

    /// Returns the latest time of the next round.
    pub(super) fn deadline(&self) -> Option<Instant> {
        let deadlines = [
            self.sessions.next_deadline(),
            self.device.as_ref().and_then(Device::next_deadline),
            self.timers.deadline(),
            self.searches.next_deadline(),
        ];
        deadlines.into_iter().flatten().min()
    }

    /// Arms all completion queues; returns whether completions are already available.
    fn arm(&mut self) -> bool {
        let is_found = self.searches.arm(self.device.as_mut());
        self.device.as_mut().is_some_and(Device::arm) || is_found
    }

    /// Arms the device's descriptors for the following sleep; returns whether there are already
    /// events.
    fn arm_fds(&mut self) -> bool {
        let device = self.device.as_mut();
        device.is_some_and(|device| device.provider.arm_fds())
    }

    /// Passes an input to a session's link and processes the resulting outputs: a machine never
    /// receives an input with pending outputs.
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
            ios: session.commands.submitted(),
            index,
            now,
        };
        (&mut session.link, cx)
    }

    /// Processes all outputs of a session, and submits waiting commands while there is room. An
    /// output may cause a nested call, which only processes the outputs.
    fn drain(&mut self, index: usize, now: Instant) {
        let is_nested = std::mem::replace(&mut self.sessions[index].is_draining, true);
        loop {
            let (link, mut cx) = self.context(index, now);
            match link.poll(&mut cx) {
                Some(Report::Complete(request, result)) => {
                    self.complete(index, request, result, now);
                }
                Some(Report::Event(event)) => self.handle_event(index, event, now),
                Some(Report::Ping) => self.ping(index, now),
                Some(Report::Path(output)) => self.execute_path_output(index, output, now),
                None if is_nested => return,
                None if self.submit_waiting(index, now) => {}
                None => break,
            }
        }
        self.sessions[index].is_draining = false;
    }

    fn close(&mut self, index: usize, now: Instant) {
        self.with_link(index, now, |link, _| link.machine().close(now));
    }

    fn handle_message(&mut self, message: Message, now: Instant) {
        match message {
            Message::Open(open) => {
                self.open(*open, now);
            }
            Message::Submit(key, io, sender) => match self.sessions.find(key) {
                Some(index) => self.submit(index, Io::new(*io, Done::Future(sender), now), now),
                // The session is closed. Without this, the caller would wait forever.
                None => sender.send(IoCompletion {
                    result: Err(RequestError::Closed),
                    data: io.data,
                }),
            },
            Message::Work(key, workload) => {
                if let Some(index) = self.sessions.find(key) {
                    self.start_workload(index, workload, now);
                }
            }
            Message::Watch(key, watch) => {
                if let Some(index) = self.sessions.find(key) {
                    self.watch(index, *watch, now);
                }
            }
            Message::Close(key, reply) => {
                if let Some(index) = self.sessions.find(key) {
                    let session = &mut self.sessions[index];
                    if !session.closed {
                        session.was_settled = session.link.machine().is_settled();
                    }
                    session.closers.extend(reply);
                    self.close(index, now);
                }
            }
            Message::Host(service) => self.services.push(service),
            Message::Wake => {}
            Message::Timer(limit, sender) => self.timers.insert(now + limit, sender),
            Message::Discover {
                ip,
                transaction,
                reply,
            } => {
                let device = self.device.as_mut();
                self.searches.start(device, ip, transaction, reply);
            }
            Message::Shutdown => {
                self.shutdown = true;
                // Collect them first, because closing a session borrows the whole driver.
                let all: Vec<usize> = self.sessions.indices().collect();
                for index in all {
                    self.close(index, now);
                }
            }
        }
    }

    /// Opens a session. On error, notifies the user and returns `None`.
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
        let key = self.sessions.insert(link, open.status, reply, paths);
        // If the engine was shut down in the meantime, close the session like all other sessions,
        // so that its user is notified.
        match self.shutdown {
            true => self.close(key.index, now),
            false => self.drain(key.index, now),
        }
        Some(key)
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

    /// Returns the device for an additional session, and the memory to register.
    fn claim_device(&mut self) -> Result<(&mut Device<E::Provider>, &MemSlice), VerbsError> {
        if self.sessions.count_rdma() >= MAX_RDMA {
            return Err(VerbsError::InsufficientResources("sessions of one engine"));
        }
        let device = self.device.as_mut();
        let device = device.ok_or(VerbsError::InvalidState("the engine has no RDMA device"))?;
        Ok((device, &self.pool))
    }

    fn submit(&mut self, index: usize, io: Io, now: Instant) {
        let session = &mut self.sessions[index];
        if !session.link.accepts_segments(io.io.data.buffers().len()) {
            let why = "buffer has too many pieces";
            self.deliver(index, io, Err(RequestError::NotStarted(why)));
            return;
        }
        session.commands.push_waiting(io);
        if !session.is_draining {
            self.drain(index, now);
        }
        self.sessions[index].report_pending();
    }

    /// Submits the next waiting command, if there is room.
    fn submit_waiting(&mut self, index: usize, now: Instant) -> bool {
        let session = &mut self.sessions[index];
        let Some(mut io) = session.commands.pop_waiting() else {
            return false;
        };
        session.units.mark_flush(&mut io);
        let rejected = self.submit_command(index, io, now);
        let is_submitted = rejected.is_none();
        if let Some(io) = rejected {
            self.sessions[index].commands.return_waiting(io);
        }
        is_submitted
    }

    /// Submits a command to the session's machine; returns the command if there is no room.
    fn submit_command(&mut self, index: usize, io: Io, now: Instant) -> Option<Io> {
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
            Ok(request) => session.commands.insert(request, io),
            Err(SubmitError::Full) => return Some(io),
            Err(SubmitError::Closed) => {
                self.deliver(index, io, Err(RequestError::Closed));
                self.sessions[index].report_pending();
            }
        }
        None
    }

    /// Delivers the completion of a command to its receiver.
    fn deliver(&mut self, index: usize, io: Io, result: RequestResult) {
        let completion = |io: Io, result| IoCompletion {
            result,
            data: io.io.data,
        };
        match io.done {
            Done::Future(sender) => sender.send(IoCompletion {
                result,
                data: io.io.data,
            }),
            Done::Workload { workload, token } => {
                self.finished
                    .push((index, workload, token, completion(io, result)));
            }
            // Paths may retry the command on another path.
            Done::Path { paths, request } => {
                let input = Input::Completed(paths, request, Box::new(io), result);
                self.inputs.push_back(input);
            }
            Done::Check { paths, path } => {
                let input = Input::PathResponse(paths, path, completion(io, result));
                self.inputs.push_back(input);
            }
            Done::Unit { session, unit } => {
                let input = Input::UnitResponse(session, unit, completion(io, result));
                self.inputs.push_back(input);
            }
            Done::Ping => {}
            Done::PathPing { paths, path } => {
                self.inputs.push_back(Input::Pinged(paths, path));
            }
        }
    }

    /// Handles expired timeouts; returns whether there were any.
    fn handle_timeouts(&mut self, now: Instant) -> bool {
        self.timers.fire(now);
        if let Some(device) = &mut self.device {
            device.handle_timeout(now);
        }
        let mut worked = false;
        // A timeout may create sessions, at higher or lower indices.
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

    /// Frees closed sessions.
    fn release_closed(&mut self) {
        for session in self.sessions.remove_closed() {
            // Return all buffers to the pool before notifying the closers.
            drop(session.units);
            session.link.release_device(self.device.as_mut());
            for closer in session.closers {
                closer.send(session.was_settled);
            }
        }
    }
}

/// Closes the mailbox and drops late messages. Dropping their oneshots notifies the senders.
impl<E: Env> Drop for Driver<E> {
    fn drop(&mut self) {
        drop(self.mailbox.close());
    }
}
