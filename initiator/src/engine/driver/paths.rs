//! Several sessions that are paths to one unit.
//!
//! What happens to such a session and to the commands on it is put into a queue, and told to the paths'
//! machine when nothing else is being carried out ([`Driver::run_paths`]): the machine may close the
//! session that it hears of.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use riser_scsi::lun::LunId;
use riser_scsi::sense::AdditionalSense;
use riser_transport::verbs::Provider;

use super::link::{Link, Protocol};
use super::{Driver, Open, SessionKey, Target, User, new_io};
use crate::block::Buffer;
use crate::engine::io::{Done, Io, IoData, IoEnd, ScsiIo};
use crate::engine::status::SessionStatus;
use crate::paths::{
    Access, Found, Output, PathIndex, PathState, Paths, PathsConfig, PortTag, access,
};
use crate::request::{
    Cdb, DataLen, GOOD, RequestError, RequestId, RequestResult, Retry, may_change_unit,
};
use crate::scsi::{Command, VPD_LEN};
use crate::session::Down;
use crate::unit::{Check, Evidence};

/// How long the check of a unit's identity may take.
const CHECK: Duration = Duration::from_secs(10);

/// Length of every answer that is asked for, in bytes.
pub(in crate::engine) const CHECK_LEN: usize = VPD_LEN as usize;

/// Generations of caches that are remembered.
const GONE: usize = 16;

/// Paths to make.
pub(in crate::engine) struct PathsOpen {
    pub(in crate::engine) config: PathsConfig,
    pub(in crate::engine) lun: LunId,
    /// See [`Paths::recover`].
    pub(in crate::engine) recovers: bool,
    pub(in crate::engine) paths: Vec<PathPlan>,
}

/// A path to make.
pub(in crate::engine) struct PathPlan {
    pub(in crate::engine) target: Target,
    /// Of its initiator port.
    pub(in crate::engine) protocol: Protocol,
    /// For what the unit says of itself: [`CHECK_LEN`] bytes.
    pub(in crate::engine) buffer: Buffer,
}

/// What happened to a session that is a path or whose unit is watched, or to a command on it.
pub(super) enum Input {
    Live(SessionKey, PathIndex, Option<PortTag>),
    /// With the time when the target was last heard of, if it ever was.
    Closed(SessionKey, PathIndex, Down, Option<Instant>),
    Ended(SessionKey, RequestId, Box<Io>, RequestResult),
    Told(SessionKey, PathIndex, IoEnd),
    Attention(SessionKey, PathIndex, AdditionalSense),
    /// The watched units of a session are to be checked.
    Check(SessionKey),
    /// A watched unit, named by its serial number, has answered.
    UnitTold(SessionKey, u64, IoEnd),
}

struct Member {
    target: Target,
    protocol: Protocol,
    session: Option<SessionKey>,
    /// `None` while it is in use.
    buffer: Option<Buffer>,
    check: Check,
    /// The check asks for the target port groups, last of all.
    is_grouping: bool,
    /// Something has happened since the check began, so it is made again.
    is_stale: bool,
    /// The generation of the unit's cache when it was last checked with success; `None` before.
    cache: Option<Option<[u8; 16]>>,
    evidence: Evidence,
    /// When the target was last heard of on the path, while it is not known to be the same.
    heard: Option<Instant>,
}

impl Member {
    fn command(&self) -> Command {
        let [high, low] = VPD_LEN.to_be_bytes();
        if !self.is_grouping {
            return self.check.command();
        }
        let cdb = Cdb::new(&[0xa3, 0x0a, 0, 0, 0, 0, 0, 0, high, low, 0, 0]);
        Command::raw(
            cdb.expect("a CDB of legal length"),
            DataLen::In(VPD_LEN.into()),
        )
    }

    fn begin_check(&mut self) {
        self.check = Check::default();
        self.is_grouping = false;
        self.is_stale = false;
    }

    /// Takes what the unit said, or nothing where it refused; whether there is another question.
    fn take(&mut self, data: &[u8]) -> bool {
        if self.is_grouping {
            return false;
        }
        if self.check.take(data) {
            return true;
        }
        self.is_grouping = self.check.is_there() && access::is_offered(self.check.inquiry());
        self.is_grouping
    }

    fn found(&self, data: &[u8]) -> Found {
        let group = self.check.designators().and_then(access::own_group);
        let told = group.and_then(|group| access::of_group(data, group));
        Found {
            unit: self.check.found().clone(),
            // A unit that offers it and then does not tell is used as if it did not.
            access: self.is_grouping.then(|| told.unwrap_or(Access::Optimized)),
        }
    }

    /// The path is in use with what its check found; the generation of the cache that may be lost, if
    /// one may be. `known` is what the unit was found with last, on whichever path: what this one found may be
    /// older, and its loss be counted already.
    fn settle(&mut self, known: Option<[u8; 16]>) -> Option<Option<[u8; 16]>> {
        let is = self.check.found().cache;
        let own = self.cache.replace(is);
        let was = known.map(Some).or(own);
        let evidence = std::mem::take(&mut self.evidence);
        self.heard = None;
        was.filter(|was| evidence.is_cache_lost(*was, is))
    }
}

/// The paths to a unit, and their sessions.
pub(super) struct PathsLink {
    pub(super) machine: Paths,
    lun: LunId,
    members: Vec<Member>,
    /// By request: the completion of a command that a path's session has.
    dones: Vec<Option<Done>>,
    /// The generation of the unit's cache that a path has found last.
    generation: Option<[u8; 16]>,
    /// Generations of caches that are known to be gone, so that each is counted once, however many paths
    /// find it gone. Bound: [`GONE`].
    gone: VecDeque<[u8; 16]>,
}

impl PathsLink {
    /// The unit that the paths lead to.
    pub(super) fn lun(&self) -> LunId {
        self.lun
    }

    /// The generation of the unit's cache; `None` where it offers none.
    pub(super) fn generation(&self) -> Option<[u8; 16]> {
        self.generation
    }

    pub(super) fn new(open: PathsOpen, now: Instant) -> Self {
        let mut machine = Paths::new(open.config);
        if open.recovers {
            machine.recover(open.lun.encode(), now);
        }
        let member = |plan: PathPlan| Member {
            target: plan.target,
            protocol: plan.protocol,
            session: None,
            buffer: Some(plan.buffer),
            check: Check::default(),
            is_grouping: false,
            is_stale: false,
            cache: None,
            evidence: Evidence::default(),
            heard: None,
        };
        Self {
            machine,
            lun: open.lun,
            members: open.paths.into_iter().map(member).collect(),
            dones: Vec::new(),
            generation: None,
            gone: VecDeque::new(),
        }
    }

    /// Where the first path leads.
    pub(super) fn target(&self) -> &Target {
        &self.members[0].target
    }

    fn member(&mut self, path: PathIndex) -> &mut Member {
        &mut self.members[usize::from(path.0)]
    }
}

impl<P: Provider> Driver<P> {
    fn paths(&mut self, key: SessionKey) -> Option<(usize, &mut PathsLink)> {
        let index = self.find(key)?;
        match &mut self.sessions[index].link {
            Link::Paths(link) => Some((index, link)),
            _ => None,
        }
    }

    /// Tells machines of paths what happened to their sessions; whether anything did.
    pub(super) fn run_paths(&mut self, now: Instant) -> bool {
        let mut worked = false;
        while let Some(input) = self.inputs.pop_front() {
            worked = true;
            let (Input::Live(key, ..)
            | Input::Closed(key, ..)
            | Input::Ended(key, ..)
            | Input::Told(key, ..)
            | Input::Attention(key, ..)
            | Input::Check(key)
            | Input::UnitTold(key, ..)) = input;
            match input {
                Input::Check(_) => {
                    self.check_units(key, now);
                    continue;
                }
                Input::UnitTold(_, unit, end) => {
                    self.handle_unit_told(key, unit, end, now);
                    continue;
                }
                _ => {}
            }
            let Some((index, link)) = self.paths(key) else {
                continue;
            };
            match input {
                Input::Live(_, path, port) => {
                    let member = link.member(path);
                    member.evidence.outage = member.heard.map(|heard| now - heard);
                    link.machine.handle_live(path, port);
                }
                Input::Closed(_, path, why, heard) => {
                    let member = link.member(path);
                    member.session = None;
                    member.evidence.on_down(why);
                    if member.cache.is_some() {
                        member.heard = member.heard.or(heard);
                    }
                    link.machine.handle_closed(path, why, now);
                }
                Input::Attention(_, path, attention) => {
                    link.member(path).evidence.on_attention(attention);
                    if may_change_unit(attention) {
                        link.machine.handle_attention(path);
                    }
                }
                Input::Check(_) | Input::UnitTold(..) => unreachable!("carried out above"),
                Input::Ended(_, request, mut io, result) => {
                    let at = request.0 as usize;
                    io.done = link.dones[at].take().expect("somebody waits for it");
                    link.machine.handle_ended(request, result, now);
                    self.sessions[index].ios[at] = Some(*io);
                }
                Input::Told(_, path, end) => self.handle_told(index, path, end, now),
            }
            self.drain_paths(index, now);
            // A path that is lost gives back its commands one by one.
            self.sessions[index].report_pending();
        }
        worked
    }

    /// Carries out what the paths ask for.
    pub(super) fn drain_paths(&mut self, index: usize, now: Instant) {
        loop {
            let running = &mut self.sessions[index];
            let Link::Paths(link) = &mut running.link else {
                return;
            };
            let Some(output) = link.machine.poll_output() else {
                return;
            };
            match output {
                Output::Open {
                    path,
                    through,
                    patience,
                } => {
                    let target = link.member(through).target;
                    let protocol = link.member(path).protocol.once(patience);
                    self.open_path(index, path, target, protocol, now);
                }
                Output::Check(path) => {
                    let member = link.member(path);
                    // One that is still being asked is asked again from the beginning.
                    member.is_stale = true;
                    if member.buffer.is_some() {
                        member.begin_check();
                        self.ask(index, path, now);
                    }
                }
                Output::Close(path) => {
                    let session = link.member(path).session;
                    if let Some(member) = session.and_then(|key| self.find(key)) {
                        self.sessions[member].link.close(now);
                        self.drain(member, now);
                    }
                }
                Output::Start { request, path } => self.start_on_path(index, request, path, now),
                Output::Complete(request, result) => self.complete(index, request, result, now),
                Output::Changed => running.status.set_paths(link.machine.views()),
                Output::Event(event) => self.handle_event(index, event, now),
            }
        }
    }

    pub(super) fn key(&self, index: usize) -> SessionKey {
        let serial = self.sessions[index].serial;
        SessionKey { index, serial }
    }

    fn open_path(
        &mut self,
        index: usize,
        path: PathIndex,
        target: Target,
        protocol: Protocol,
        now: Instant,
    ) {
        let open = Open {
            target,
            protocol,
            status: std::sync::Arc::new(SessionStatus::default()),
            user: User::Paths(self.key(index), path),
        };
        let session = self.open(open, now);
        // It starts nothing before the unit is checked.
        if let Some(member) = session.and_then(|key| self.find(key)) {
            self.sessions[member].link.set_guarded(true);
        }
        if let Link::Paths(link) = &mut self.sessions[index].link {
            link.member(path).session = session;
        }
    }

    fn start_on_path(&mut self, index: usize, request: RequestId, path: PathIndex, now: Instant) {
        let paths = self.key(index);
        let running = &mut self.sessions[index];
        let Link::Paths(link) = &mut running.link else {
            return;
        };
        let at = request.0 as usize;
        let mut io = running.ios[at]
            .take()
            .expect("every request has its command");
        if at >= link.dones.len() {
            link.dones.resize_with(at + 1, || None);
        }
        let done = Done::Path { paths, request };
        link.dones[at] = Some(std::mem::replace(&mut io.done, done));
        let session = link.member(path).session;
        match session.and_then(|key| self.find(key)) {
            Some(member) => self.submit(member, io, now),
            None => self.deliver(index, io, Err(RequestError::Closed)),
        }
    }

    /// Asks the unit for the next thing about it.
    fn ask(&mut self, index: usize, path: PathIndex, now: Instant) {
        let paths = self.key(index);
        let Link::Paths(link) = &mut self.sessions[index].link else {
            return;
        };
        let lun = link.lun;
        let member = link.member(path);
        let (Some(session), Some(buffer)) = (member.session, member.buffer.take()) else {
            // The session is over; the machine hears of it next.
            return;
        };
        let io = probe(
            lun,
            member.command(),
            buffer,
            Done::Check { paths, path },
            now,
        );
        match self.find(session) {
            Some(member) => self.submit(member, io, now),
            None => self.deliver(index, io, Err(RequestError::Closed)),
        }
    }

    fn handle_told(&mut self, index: usize, path: PathIndex, end: IoEnd, now: Instant) {
        // What has happened since and is still to be handled makes the check void already.
        let key = self.key(index);
        let is_again = |input: &Input| match input {
            Input::Attention(own, on, attention) => {
                (*own, *on) == (key, path) && may_change_unit(*attention)
            }
            _ => false,
        };
        let is_again = self.inputs.iter().any(is_again);
        let Link::Paths(link) = &mut self.sessions[index].link else {
            return;
        };
        let member = &mut link.members[usize::from(path.0)];
        let session = member.session;
        let is_told = match &end.result {
            Ok(answer) => member.is_grouping || member.check.is_conclusive(answer),
            Err(_) => false,
        };
        let (buffer, data) = answer_to_probe(end);
        member.buffer = buffer;
        member.is_stale |= is_again;
        if is_told && !member.is_stale && member.take(&data) {
            self.ask(index, path, now);
            return;
        }
        if is_told && member.is_stale {
            member.begin_check();
            self.ask(index, path, now);
            return;
        }
        let found = match is_told {
            true => Ok(member.found(&data)),
            false => Err(Down::UnitSilent),
        };
        link.machine.handle_checked(path, found, now);
        let view = link.machine.views().nth(path.0.into());
        let is_good = view.is_some_and(|v| matches!(v.state, PathState::Live | PathState::Standby));
        if is_told && is_good {
            self.settle_path(index, path);
        }
        // A session whose unit was not identified holds its requests back, so it ends instead.
        if let Some(member) = session.and_then(|key| self.find(key)) {
            match is_told {
                // It has had no connection before.
                true if is_good => self.sessions[member].link.release(true, now),
                true => {}
                false => self.sessions[member].link.close(now),
            }
            self.drain(member, now);
        }
    }

    /// A path is in use again: counts what its target may have lost meanwhile.
    fn settle_path(&mut self, index: usize, path: PathIndex) {
        let Link::Paths(link) = &mut self.sessions[index].link else {
            return;
        };
        let (lun, known) = (link.lun, link.generation);
        let found = link.member(path).check.found();
        let (is, is_on) = (found.cache, found.write_cache);
        let lost = link.member(path).settle(known);
        link.generation = is;
        self.count_lost(index, lost);
        // Only now: what may be lost is counted by the state before.
        self.sessions[index].on_write_cache(lun, is_on);
        self.sessions[index].report_cache();
    }

    /// Counts the cache of a unit that may be lost, once for each generation.
    fn count_lost(&mut self, index: usize, lost: Option<Option<[u8; 16]>>) {
        let (Link::Paths(link), Some(lost)) = (&mut self.sessions[index].link, lost) else {
            return;
        };
        if let Some(generation) = lost {
            if link.gone.contains(&generation) {
                return;
            }
            link.gone.truncate(GONE - 1);
            link.gone.push_front(generation);
        }
        self.sessions[index].on_cache_lost();
    }
}

/// A command of the check of a unit's identity.
pub(super) fn probe(lun: LunId, command: Command, buffer: Buffer, done: Done, now: Instant) -> Io {
    let mut io = ScsiIo::new(lun, command, IoData::One(buffer), CHECK);
    io.retry = Retry::Probe;
    new_io(io, done, now)
}

/// The memory of a probe, and what the unit said: nothing where it refused.
pub(super) fn answer_to_probe(end: IoEnd) -> (Option<Buffer>, Vec<u8>) {
    let mut data = Vec::new();
    let buffer = end.data.into_one();
    if let (Some(buffer), Ok(answer)) = (&buffer, &end.result)
        && answer.status == GOOD
    {
        data.resize((answer.transferred as usize).min(buffer.len()), 0);
        buffer.slice().read(0, &mut data);
    }
    (buffer, data)
}
