//! The engine's thread: it owns a provider, drives sessions with what the provider reports, and
//! parks in one place.
//!
//! One round of the loop: packets and timers of the provider, connection events, completions,
//! messages of other threads, timeouts. After each input the session's outputs are carried out until
//! there are none, so that a session never sees an input with its outputs pending.

use std::collections::HashMap;
use std::os::fd::RawFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use riser_memory::MemSlice;
use riser_reactor::{Next, Spinner};
use riser_transport::verbs::{
    Access, AsyncEvent, CmEvent, CmEventKind, CmId, Completion, ConnParam, CqId, Notify, PdId,
    PortSpace, Provider, QpId, VerbsError,
};
use slab::Slab;

use super::conn::{Conn, ConnConfig, DataKeys, RECV_LEN, Scratch, Start, StartArgs, Work};
use super::io::{Done, Io, IoEnd, ScsiIo, WorkQueue, Workload};
use super::oneshot::Sender;
use super::park::Mailbox;
use super::status::SessionStatus;
use crate::srp::request::{RequestError, RequestId, RequestSpec};
use crate::srp::session::{
    ChannelIndex, ConnectError, Down, Output, Session, SessionConfig, SessionEvent, SubmitError,
};

/// How long a logout may take before the connection is closed without it.
const LOGOUT_PATIENCE: Duration = Duration::from_millis(500);
/// How long a disconnect may take before its identifier is destroyed anyway.
const DISCONNECT_PATIENCE: Duration = Duration::from_secs(1);
/// Completions taken from a queue at once.
const BATCH: usize = 64;

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
    pub(super) config: SessionConfig,
    pub(super) conn: ConnConfig,
    /// Whether commands use the pool's own remote key.
    pub(super) pool_wide: bool,
    pub(super) status: Arc<SessionStatus>,
    /// Told when the session is live, or why it never will be.
    pub(super) reply: Sender<Result<SessionKey, Down>>,
}

/// What other threads tell the engine.
pub(super) enum Message {
    Open(Box<Open>),
    Submit(SessionKey, Box<Io>),
    Work(SessionKey, Box<dyn Workload>),
    Close(SessionKey, Option<Sender<()>>),
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
    machine: Session,
    target: Target,
    conn_config: ConnConfig,
    pd: PdId,
    cq: CqId,
    keys: DataKeys,
    conns: Vec<Option<Conn>>,
    /// By request.
    ios: Vec<Option<Io>>,
    /// Commands beyond what the machine takes.
    overflow: std::collections::VecDeque<Io>,
    workloads: Slab<(Box<dyn Workload>, usize)>,
    status: Arc<SessionStatus>,
    reply: Option<Sender<Result<SessionKey, Down>>>,
    closers: Vec<Sender<()>>,
    /// The receive whose information unit is being handled and whether it may be posted again.
    receiving: Option<(ChannelIndex, u16)>,
    closed: bool,
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
    scratch: Scratch,
    completions: Vec<Completion>,
    /// Ends of workload commands: session, workload, token, end.
    finished: Vec<(usize, usize, u64, IoEnd)>,
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
            scratch: Scratch::default(),
            completions: Vec::with_capacity(BATCH),
            finished: Vec::new(),
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
                        let fds: Vec<RawFd> = self.provider.event_fds();
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
        worked |= self.run_workloads(now);
        self.handle_timeouts(now);
        self.reap();
        worked
    }

    /// When a round is due at the latest.
    fn deadline(&self) -> Option<Instant> {
        let machines = self.sessions.iter().flat_map(|(_, s)| {
            let logouts = s.conns.iter().flatten().filter_map(|c| c.logout_until);
            s.machine.next_deadline().into_iter().chain(logouts)
        });
        let leaving = self.leaving.iter().map(|(_, until)| *until);
        machines
            .chain(leaving)
            .chain(self.provider.deadline())
            .min()
    }

    /// Arms every completion queue; whether completions wait already.
    fn arm(&mut self) -> bool {
        let mut waiting = false;
        for (_, session) in &self.sessions {
            waiting |= self
                .provider
                .req_notify_cq(session.cq, Notify::Next)
                .unwrap_or(false);
        }
        while self.provider.poll_cq_event().is_some() {}
        waiting
    }

    // ---- messages -------------------------------------------------------------------------------

    fn handle_message(&mut self, message: Message, now: Instant) {
        match message {
            Message::Open(open) => self.open(*open, now),
            Message::Submit(key, io) => match self.find(key) {
                Some(index) => self.submit(index, *io, now),
                None => self.refuse(*io),
            },
            Message::Work(key, workload) => {
                if let Some(index) = self.find(key) {
                    self.start_workload(index, workload, now);
                }
            }
            Message::Close(key, reply) => {
                if let Some(index) = self.find(key) {
                    self.sessions[index].closers.extend(reply);
                    self.sessions[index].machine.close(now);
                    self.drain(index, now);
                }
            }
            Message::Shutdown => {
                self.shutdown = true;
                let all: Vec<usize> = self.sessions.iter().map(|(index, _)| index).collect();
                for index in all {
                    self.sessions[index].machine.close(now);
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

    fn open(&mut self, open: Open, now: Instant) {
        let (pd, cq, keys) = match self.allocate(&open) {
            Ok(made) => made,
            Err(e) => {
                open.reply.send(Err(ConnectError::Local(e).into()));
                return;
            }
        };
        let serial = self.next_serial;
        self.next_serial += 1;
        let channels = open.config.channels.into();
        let index = self.sessions.insert(Running {
            serial,
            machine: Session::new(open.config, now),
            target: open.target,
            conn_config: open.conn,
            pd,
            cq,
            keys,
            conns: (0..channels).map(|_| None).collect(),
            ios: Vec::new(),
            overflow: std::collections::VecDeque::new(),
            workloads: Slab::new(),
            status: open.status,
            reply: Some(open.reply),
            closers: Vec::new(),
            receiving: None,
            closed: false,
        });
        if self.shutdown {
            self.sessions[index].machine.close(now);
        }
        self.drain(index, now);
    }

    /// A protection domain, a completion queue and the pool's registration for a session.
    fn allocate(&mut self, open: &Open) -> Result<(PdId, CqId, DataKeys), VerbsError> {
        let pd = self.provider.alloc_pd()?;
        // One spare, so that a correct device cannot fill the queue.
        let entries = open.conn.completions() * u32::from(open.config.channels) + 1;
        let cq = match self.provider.create_cq(entries) {
            Ok(cq) => cq,
            Err(e) => {
                let _ = self.provider.dealloc_pd(pd);
                return Err(e);
            }
        };
        let remote = Access::REMOTE_READ | Access::REMOTE_WRITE;
        let access = if open.pool_wide {
            Access::LOCAL_WRITE | remote
        } else {
            Access::LOCAL_WRITE
        };
        match self.provider.reg_mr(pd, &self.pool, access) {
            Ok(pool) => {
                let pool_wide = open.pool_wide;
                Ok((pd, cq, DataKeys { pool, pool_wide }))
            }
            Err(e) => {
                let _ = self.provider.destroy_cq(cq);
                let _ = self.provider.dealloc_pd(pd);
                Err(e)
            }
        }
    }

    fn submit(&mut self, index: usize, io: Io, now: Instant) {
        let session = &mut self.sessions[index];
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
            return;
        }
        match session.machine.submit(spec, now) {
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
    }

    /// Tells whoever waits for a command how it ended.
    fn deliver(&mut self, index: usize, io: Io, result: crate::srp::request::RequestResult) {
        let end = IoEnd {
            result,
            data: io.io.data,
        };
        match io.done {
            Done::Future(sender) => sender.send(end),
            Done::Workload { workload, token } => {
                self.finished.push((index, workload, token, end));
            }
        }
    }

    // ---- workloads ------------------------------------------------------------------------------

    fn start_workload(&mut self, index: usize, mut workload: Box<dyn Workload>, now: Instant) {
        let mut queue = WorkQueue::default();
        workload.start(&mut queue);
        let id = self.sessions[index].workloads.insert((workload, 0));
        self.submit_work(index, id, &mut queue, now);
    }

    fn submit_work(&mut self, index: usize, workload: usize, queue: &mut WorkQueue, now: Instant) {
        self.sessions[index].workloads[workload].1 += queue.submitted.len();
        for (token, io) in queue.submitted.drain(..) {
            let done = Done::Workload { workload, token };
            self.submit(index, new_io(io, done, now), now);
        }
        if self.sessions[index].workloads[workload].1 == 0 {
            self.sessions[index].workloads.remove(workload);
        }
    }

    /// Tells workloads of the ends of their commands; whether there were any.
    fn run_workloads(&mut self, now: Instant) -> bool {
        let mut finished = std::mem::take(&mut self.finished);
        let any = !finished.is_empty();
        let mut queue = WorkQueue::default();
        for (index, workload, token, end) in finished.drain(..) {
            // A workload is there as long as a command of it is outstanding.
            let entry = &mut self.sessions[index].workloads[workload];
            entry.1 -= 1;
            entry.0.complete(token, end, &mut queue);
            self.submit_work(index, workload, &mut queue, now);
        }
        if self.finished.is_empty() {
            self.finished = finished;
        }
        any
    }

    // ---- completions ----------------------------------------------------------------------------

    fn poll_completions(&mut self, now: Instant) -> bool {
        let mut worked = false;
        let queues: arrayvec::ArrayVec<(usize, CqId), 64> = self
            .sessions
            .iter()
            .take(64)
            .map(|(index, session)| (index, session.cq))
            .collect();
        if queues.len() == self.sessions.len() {
            for (index, cq) in queues {
                worked |= self.poll_session(index, cq, now);
            }
        } else {
            let queues: Vec<_> = self.sessions.iter().map(|(i, s)| (i, s.cq)).collect();
            for (index, cq) in queues {
                worked |= self.poll_session(index, cq, now);
            }
        }
        worked
    }

    fn poll_session(&mut self, index: usize, cq: CqId, now: Instant) -> bool {
        let mut completions = std::mem::take(&mut self.completions);
        completions.clear();
        let polled = self.provider.poll_cq(cq, BATCH, &mut completions);
        for completion in completions.drain(..) {
            self.handle_completion(index, &completion, now);
        }
        self.completions = completions;
        match polled {
            Ok(n) => n > 0,
            Err(_) => {
                self.break_session(index, now);
                true
            }
        }
    }

    fn break_session(&mut self, index: usize, now: Instant) {
        self.sessions[index]
            .machine
            .handle_channel_error(ChannelIndex(0), now);
        self.drain(index, now);
    }

    fn break_channel(&mut self, index: usize, channel: u8, now: Instant) {
        self.sessions[index]
            .machine
            .handle_channel_error(ChannelIndex(channel), now);
        self.drain(index, now);
    }

    fn handle_completion(&mut self, index: usize, completion: &Completion, now: Instant) {
        let Some(&(owner, channel)) = self.qps.get(&completion.qp) else {
            return;
        };
        debug_assert_eq!(owner, index);
        let Some(work) = Work::of(completion.wr_id) else {
            return;
        };
        if !completion.status.is_ok() {
            self.handle_failed_work(index, channel, work, completion, now);
            return;
        }
        match work {
            Work::Recv(slot) => self.handle_recv(index, channel, slot, completion.byte_len, now),
            Work::Command(slot) | Work::Invalidate(slot) => {
                let Some(conn) = self.sessions[index].conns[usize::from(channel)].as_mut() else {
                    return;
                };
                let back = match work {
                    Work::Command(_) => conn.on_command_sent(&mut self.provider, slot),
                    _ => conn.on_invalidated(&mut self.provider, slot),
                };
                if let Some(request) = back {
                    self.sessions[index].machine.handle_retired(request, now);
                    self.feed_starved(index, channel, now);
                    self.drain(index, now);
                }
            }
            Work::Register(_) => {}
            Work::Answer(slot) => {
                if let Some(conn) = self.sessions[index].conns[usize::from(channel)].as_mut() {
                    conn.on_short_sent(work);
                    if !conn.post_recv(&mut self.provider, slot) {
                        self.break_channel(index, channel, now);
                    }
                }
            }
            Work::TskMgmt(_) => {
                if let Some(conn) = self.sessions[index].conns[usize::from(channel)].as_mut() {
                    conn.on_short_sent(work);
                }
            }
            Work::Logout => self.tear_down(index, ChannelIndex(channel), now),
        }
    }

    fn handle_failed_work(
        &mut self,
        index: usize,
        channel: u8,
        work: Work,
        completion: &Completion,
        now: Instant,
    ) {
        let closing = self.sessions[index].conns[usize::from(channel)]
            .as_ref()
            .is_some_and(|c| c.logout_until.is_some());
        if closing || work == Work::Logout {
            self.tear_down(index, ChannelIndex(channel), now);
            return;
        }
        tracing::debug!(?work, status = ?completion.status, channel, "work request failed");
        self.break_channel(index, channel, now);
    }

    fn handle_recv(&mut self, index: usize, channel: u8, slot: u16, len: u32, now: Instant) {
        let mut iu = [0; RECV_LEN];
        let len = (len as usize).min(RECV_LEN);
        let session = &mut self.sessions[index];
        let Some(conn) = &session.conns[usize::from(channel)] else {
            return;
        };
        conn.received(slot, &mut iu[..len]);
        let channel = ChannelIndex(channel);
        session.receiving = Some((channel, slot));
        session.machine.handle_iu(channel, &iu[..len], now);
        self.drain(index, now);
        // Unless an answer took it over, the receive is posted again at once.
        if let Some((channel, slot)) = self.sessions[index].receiving.take()
            && let Some(conn) = self.sessions[index].conns[usize::from(channel.0)].as_mut()
            && !conn.post_recv(&mut self.provider, slot)
        {
            self.break_channel(index, channel.0, now);
        }
    }

    fn handle_async_event(&mut self, event: AsyncEvent, now: Instant) {
        match event {
            AsyncEvent::QpFatal(qp)
            | AsyncEvent::QpReqError(qp)
            | AsyncEvent::QpAccessError(qp) => {
                if let Some(&(index, channel)) = self.qps.get(&qp) {
                    self.break_channel(index, channel, now);
                }
            }
            AsyncEvent::CqError(cq) => {
                let found = self.sessions.iter().find(|(_, s)| s.cq == cq);
                if let Some((index, _)) = found {
                    self.break_session(index, now);
                }
            }
            AsyncEvent::DeviceFatal => {
                let all: Vec<usize> = self.sessions.iter().map(|(i, _)| i).collect();
                for index in all {
                    self.break_session(index, now);
                }
            }
            _ => {}
        }
    }

    // ---- connections ----------------------------------------------------------------------------

    fn handle_cm_event(&mut self, event: CmEvent, now: Instant) {
        let Some(&(index, channel)) = self.ids.get(&event.id) else {
            let over = matches!(
                event.kind,
                CmEventKind::Disconnected | CmEventKind::TimewaitExit
            );
            if over && let Some(at) = self.leaving.iter().position(|(id, _)| *id == event.id) {
                self.leaving.swap_remove(at);
                let _ = self.provider.destroy_id(event.id);
            }
            return;
        };
        let channel = ChannelIndex(channel);
        let timeout = Duration::from_secs(2);
        match event.kind {
            CmEventKind::AddrResolved => {
                if let Err(e) = self.provider.resolve_route(event.id, timeout) {
                    self.fail_connect(index, channel, ConnectError::Cm(e), now);
                }
            }
            CmEventKind::RouteResolved => self.connect(index, channel, now),
            CmEventKind::AddrError(e) | CmEventKind::RouteError(e) => {
                self.fail_connect(index, channel, ConnectError::Address(e), now);
            }
            CmEventKind::ConnectError(e) => {
                self.fail_connect(index, channel, ConnectError::Cm(e), now);
            }
            CmEventKind::Unreachable => {
                self.fail_connect(index, channel, ConnectError::Unreachable, now);
            }
            CmEventKind::Rejected {
                reason,
                private_data,
            } => {
                self.release(index, channel, false, now);
                self.sessions[index]
                    .machine
                    .handle_rejected(channel, reason, &private_data, now);
                self.drain(index, now);
            }
            CmEventKind::Established { param } => {
                self.sessions[index]
                    .machine
                    .handle_connected(channel, &param.private_data, now);
                self.drain(index, now);
            }
            CmEventKind::Disconnected | CmEventKind::DeviceRemoval => {
                let conn = self.sessions[index].conns[usize::from(channel.0)].as_ref();
                if conn.is_some_and(|c| c.logout_until.is_some()) {
                    self.tear_down(index, channel, now);
                } else {
                    self.break_channel(index, channel.0, now);
                }
            }
            CmEventKind::TimewaitExit | CmEventKind::ConnectRequest { .. } => {}
        }
    }

    /// Begins to find the path for a channel.
    fn resolve(&mut self, index: usize, channel: ChannelIndex, now: Instant) {
        let session = &mut self.sessions[index];
        let target = session.target;
        let space = match target.service_id {
            Some(service_id) => PortSpace::Ib {
                service_id,
                mask: u64::MAX,
            },
            None => PortSpace::Tcp,
        };
        let id = match self.provider.create_id(space) {
            Ok(id) => id,
            Err(e) => {
                let error = ConnectError::Cm(e);
                session.machine.handle_connect_failed(channel, error, now);
                return;
            }
        };
        self.ids.insert(id, (index, channel.0));
        session.conns[usize::from(channel.0)] = Some(Conn::new(id, session.conn_config));
        let timeout = Duration::from_secs(2);
        if let Err(e) = self
            .provider
            .resolve_addr(id, target.src, target.dst, timeout)
        {
            self.release(index, channel, false, now);
            self.sessions[index].machine.handle_connect_failed(
                channel,
                ConnectError::Address(e),
                now,
            );
        }
    }

    /// The path is found: makes the queue pair and sends the request with the login in it.
    fn connect(&mut self, index: usize, channel: ChannelIndex, now: Instant) {
        let session = &mut self.sessions[index];
        let Some(conn) = session.conns[usize::from(channel.0)].as_mut() else {
            return;
        };
        let made = conn.set_up(&mut self.provider, session.pd, session.cq);
        if let Some(qp) = conn.qp() {
            self.qps.insert(qp, (index, channel.0));
        }
        if let Err(e) = made {
            self.fail_connect(index, channel, ConnectError::Local(e), now);
            return;
        }
        let param = ConnParam {
            private_data: session.machine.begin_login(channel).to_vec(),
            ..ConnParam::default()
        };
        if let Err(e) = self.provider.connect(conn.id, &param) {
            self.fail_connect(index, channel, ConnectError::Cm(e), now);
        }
    }

    fn fail_connect(
        &mut self,
        index: usize,
        channel: ChannelIndex,
        error: ConnectError,
        now: Instant,
    ) {
        self.release(index, channel, false, now);
        self.sessions[index]
            .machine
            .handle_connect_failed(channel, error, now);
        self.drain(index, now);
    }

    /// Lets go of a channel's connection. With `linger` the peer is told, and the identifier lives
    /// until the peer has heard of it.
    fn release(&mut self, index: usize, channel: ChannelIndex, linger: bool, now: Instant) {
        let conn = self.sessions[index].conns[usize::from(channel.0)].take();
        let Some(mut conn) = conn else {
            return;
        };
        self.ids.remove(&conn.id);
        let told = linger && self.provider.disconnect(conn.id).is_ok();
        if let Some(qp) = conn.qp() {
            self.qps.remove(&qp);
        }
        conn.release(&mut self.provider);
        if told {
            self.leaving.push((conn.id, now + DISCONNECT_PATIENCE));
        } else {
            let _ = self.provider.destroy_id(conn.id);
        }
    }

    /// Tears a channel down now and tells the session.
    fn tear_down(&mut self, index: usize, channel: ChannelIndex, now: Instant) {
        self.release(index, channel, true, now);
        self.sessions[index]
            .machine
            .handle_channel_gone(channel, now);
        self.drain(index, now);
    }

    // ---- outputs --------------------------------------------------------------------------------

    /// Carries out a session's outputs until there are none.
    fn drain(&mut self, index: usize, now: Instant) {
        while let Some(output) = self.sessions[index].machine.poll_output() {
            match output {
                Output::Connect(channel) => self.resolve(index, channel, now),
                Output::Start {
                    request,
                    channel,
                    immediate,
                } => self.start(index, channel, request, immediate, now),
                Output::Retire { request, channel } => {
                    self.retire(index, channel, request, now);
                }
                Output::SendTskMgmt(channel, iu) => {
                    let conn = self.sessions[index].conns[usize::from(channel.0)].as_mut();
                    if !conn.is_some_and(|c| c.post_tsk_mgmt(&mut self.provider, &iu)) {
                        self.sessions[index]
                            .machine
                            .handle_channel_error(channel, now);
                    }
                }
                Output::Answer(channel, iu) => self.answer(index, channel, &iu, now),
                Output::Disconnect(channel, logout) => {
                    self.begin_tear_down(index, channel, logout.as_ref().map(|l| &l[..]), now);
                }
                Output::Complete(request, result) => {
                    let io = self.sessions[index].ios[request.0 as usize].take();
                    let io = io.expect("every request has its command");
                    self.deliver(index, io, result);
                    self.refill(index, now);
                }
                Output::Event(event) => self.handle_event(index, event),
            }
        }
    }

    /// Submits commands that had no room before.
    fn refill(&mut self, index: usize, now: Instant) {
        let session = &mut self.sessions[index];
        if let Some(io) = session.overflow.pop_front() {
            let rest = std::mem::take(&mut session.overflow);
            self.submit(index, io, now);
            // If it was put back, it goes before the rest.
            let session = &mut self.sessions[index];
            session.overflow.extend(rest);
        }
    }

    fn start(
        &mut self,
        index: usize,
        channel: ChannelIndex,
        request: RequestId,
        immediate: bool,
        now: Instant,
    ) {
        let session = &mut self.sessions[index];
        let Some(conn) = session.conns[usize::from(channel.0)].as_mut() else {
            return;
        };
        if !conn.starved.is_empty() {
            conn.starved.push_back((request, immediate));
            return;
        }
        let outcome = self.try_start(index, channel, request, immediate);
        self.settle_start(index, channel, request, outcome, now);
        if outcome == Start::Starved
            && let Some(conn) = self.sessions[index].conns[usize::from(channel.0)].as_mut()
        {
            conn.starved.push_back((request, immediate));
        }
    }

    fn try_start(
        &mut self,
        index: usize,
        channel: ChannelIndex,
        request: RequestId,
        immediate: bool,
    ) -> Start {
        let session = &mut self.sessions[index];
        let io = session.ios.get(request.0 as usize).and_then(Option::as_ref);
        let (Some(io), Some(conn)) = (io, session.conns[usize::from(channel.0)].as_mut()) else {
            return Start::Dropped;
        };
        io.io.data.slices(&mut self.scratch.slices);
        let args = StartArgs {
            session: &session.machine,
            channel,
            request,
            immediate,
            keys: &session.keys,
        };
        conn.start(&mut self.provider, &args, &mut self.scratch)
    }

    fn settle_start(
        &mut self,
        index: usize,
        channel: ChannelIndex,
        request: RequestId,
        outcome: Start,
        now: Instant,
    ) {
        let machine = &mut self.sessions[index].machine;
        match outcome {
            Start::Sent | Start::Starved | Start::Dropped => {}
            Start::Impossible(why) => machine.handle_start_failed(request, why, now),
            Start::Broken => machine.handle_channel_error(channel, now),
        }
    }

    /// Starts what had to wait for resources of its connection.
    fn feed_starved(&mut self, index: usize, channel: u8, now: Instant) {
        let at = usize::from(channel);
        let channel = ChannelIndex(channel);
        loop {
            let conn = self.sessions[index].conns[at].as_ref();
            let Some(&(request, immediate)) = conn.and_then(|c| c.starved.front()) else {
                return;
            };
            let outcome = self.try_start(index, channel, request, immediate);
            if outcome == Start::Starved {
                return;
            }
            if let Some(conn) = self.sessions[index].conns[at].as_mut() {
                conn.starved.pop_front();
            }
            self.settle_start(index, channel, request, outcome, now);
        }
    }

    fn retire(&mut self, index: usize, channel: ChannelIndex, request: RequestId, now: Instant) {
        let session = &mut self.sessions[index];
        // Without a connection, its end tells the session.
        let Some(conn) = session.conns[usize::from(channel.0)].as_mut() else {
            return;
        };
        match conn.retire(&mut self.provider, request) {
            Some(true) => {
                session.machine.handle_retired(request, now);
                self.feed_starved(index, channel.0, now);
            }
            Some(false) => {}
            None => session.machine.handle_channel_error(channel, now),
        }
    }

    fn answer(&mut self, index: usize, channel: ChannelIndex, iu: &[u8], now: Instant) {
        let session = &mut self.sessions[index];
        let (Some((from, slot)), Some(conn)) = (
            session.receiving.take(),
            session.conns[usize::from(channel.0)].as_mut(),
        ) else {
            return;
        };
        debug_assert_eq!(from, channel);
        if !conn.post_answer(&mut self.provider, slot, iu) {
            session.machine.handle_channel_error(channel, now);
        }
    }

    fn begin_tear_down(
        &mut self,
        index: usize,
        channel: ChannelIndex,
        logout: Option<&[u8]>,
        now: Instant,
    ) {
        let session = &mut self.sessions[index];
        if let Some(iu) = logout
            && let Some(conn) = session.conns[usize::from(channel.0)].as_mut()
            && conn.post_logout(&mut self.provider, iu)
        {
            conn.logout_until = Some(now + LOGOUT_PATIENCE);
            return;
        }
        self.release(index, channel, true, now);
        self.sessions[index]
            .machine
            .handle_channel_gone(channel, now);
    }

    fn handle_event(&mut self, index: usize, event: SessionEvent) {
        let session = &mut self.sessions[index];
        session.status.on_event(&event);
        match event {
            SessionEvent::Live => {
                let key = SessionKey {
                    index,
                    serial: session.serial,
                };
                if let Some(reply) = session.reply.take() {
                    reply.send(Ok(key));
                }
            }
            SessionEvent::Closed(why) => {
                session.closed = true;
                if let Some(reply) = session.reply.take() {
                    reply.send(Err(why));
                }
            }
            SessionEvent::Reconnecting(why) => {
                tracing::warn!(target = %session.target.dst, "connection lost: {why}");
            }
            SessionEvent::UnitEvent { .. } => {}
        }
    }

    // ---- time and ends --------------------------------------------------------------------------

    fn handle_timeouts(&mut self, now: Instant) {
        let mut due: Vec<(usize, Option<u8>)> = Vec::new();
        for (index, session) in &self.sessions {
            if session.machine.next_deadline().is_some_and(|t| t <= now) {
                due.push((index, None));
            }
            for (channel, conn) in session.conns.iter().enumerate() {
                let until = conn.as_ref().and_then(|c| c.logout_until);
                if until.is_some_and(|t| t <= now) {
                    due.push((index, Some(channel as u8)));
                }
            }
        }
        for (index, channel) in due {
            match channel {
                Some(channel) => self.tear_down(index, ChannelIndex(channel), now),
                None => {
                    self.sessions[index].machine.handle_timeout(now);
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
            debug_assert!(session.conns.iter().all(Option::is_none));
            let _ = self.provider.dereg_mr(session.keys.pool.id);
            let _ = self.provider.destroy_cq(session.cq);
            let _ = self.provider.dealloc_pd(session.pd);
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
    }
}
