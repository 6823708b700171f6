//! Several sessions that are paths to one unit.
//!
//! Events of such a session and ends of the commands on it are put into a queue, and given to the
//! paths' machine when nothing else is being carried out ([`Driver::run_paths`]): the machine may
//! close the session that an input is about.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use riser_scsi::lun::LunId;

use super::Driver;
use super::context::{Context, Report};
use super::inputs::{Input, answer_to_probe, probe};
use super::message::{Open, User};
use super::plan::{PathPlan, PathsOpen, Plan, Protocol};
use crate::block::Buffer;
use crate::engine::env::Env;
use crate::engine::io::{Done, Io, IoEnd, SessionKey, Target};
use crate::engine::status::SessionStatus;
use crate::paths::{Access, Found, Output, PathIndex, PathState, Paths, access};
use crate::request::{RequestError, RequestId, may_change_unit};
use crate::scsi::{Command, VPD_LEN};
use crate::session::{Down, Machine};
use crate::unit::{Check, Evidence};

/// Generations of caches that are remembered.
const GONE: usize = 16;

struct Member {
    target: Target,
    protocol: Protocol,
    session: Option<SessionKey>,
    /// `None` while it is in use.
    buffer: Option<Buffer>,
    check: Check,
    /// The check asks for the target port groups, last of all.
    is_grouping: bool,
    /// Something has happened since the first answer, so the check is made again.
    is_stale: bool,
    /// The generation of the unit's cache when it was last checked with success; `None` before.
    cache: Option<Option<[u8; 16]>>,
    evidence: Evidence,
    /// Time of the last unit attention.
    attended: Option<Instant>,
    /// Time at which the target was last heard of on the path, while it is not known to be the
    /// same.
    heard: Option<Instant>,
    /// Time of its last login.
    login: Option<Instant>,
}

impl Member {
    fn command(&self) -> Command {
        if !self.is_grouping {
            return self.check.command();
        }
        Command::report_target_port_groups(VPD_LEN.into())
    }

    fn begin_check(&mut self) {
        self.check = Check::default();
        (self.is_grouping, self.is_stale) = (false, false);
    }

    /// As [`Check::begin_again`].
    fn begin_again(&mut self) -> bool {
        (self.is_grouping, self.is_stale) = (false, false);
        self.check.begin_again()
    }

    /// Takes the unit's answer, which is empty where it refused; returns whether there is another
    /// question.
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
        let reported = group.and_then(|group| access::of_group(data, group));
        Found {
            unit: self.check.found().clone(),
            // A unit that offers it and then does not report it is used as if it did not.
            access: self
                .is_grouping
                .then(|| reported.unwrap_or(Access::Optimized)),
        }
    }

    /// The path is in use with what its check found; returns the generation of the cache that may
    /// be lost, if one may be.
    fn settle(&mut self, before: Before) -> Option<Option<[u8; 16]>> {
        let is = self.check.found().cache;
        let own = self.cache.replace(is);
        let was = before.generation.map(Some).or(own).or(before.cache);
        let mut evidence = std::mem::take(&mut self.evidence);
        if own.is_none() {
            // While another path is in use, the greeting of a first login says nothing of a cache
            // that only others have used. After an outage of all paths, it may be of that.
            if before.outage.is_none() {
                evidence = Evidence::default();
            }
            (evidence.outage, evidence.refused) = (before.outage, before.refused);
        }
        self.heard = None;
        was.filter(|was| evidence.is_cache_lost(*was, is))
    }
}

/// What was known of a unit's cache on all paths, before one of them is in use again.
struct Before {
    /// The generation that was found last, on any path: one that is back may have found an older
    /// one, whose loss is counted already.
    generation: Option<[u8; 16]>,
    /// What any path has found, for one that was in use never before.
    cache: Option<Option<[u8; 16]>>,
    /// Duration for which the unit was not heard of on any path; `None` while one is in use.
    outage: Option<Duration>,
    /// A path that was in use was refused a connection.
    refused: bool,
}

/// The paths to a unit, and their sessions.
pub(super) struct PathsLink {
    pub(super) machine: Paths,
    lun: LunId,
    members: Vec<Member>,
    /// By request: the completion of a command that a path's session has.
    dones: Vec<Option<Done>>,
    /// The generation of the unit's cache that a path has found last; `None` where it offers none.
    pub(super) generation: Option<[u8; 16]>,
    /// Generations of caches that are known to be gone, so that each is counted once, however many
    /// paths find it gone. Bound: [`GONE`].
    gone: VecDeque<[u8; 16]>,
}

impl PathsLink {
    /// The unit that the paths lead to.
    pub(super) fn lun(&self) -> LunId {
        self.lun
    }

    pub(super) fn new(open: PathsOpen, now: Instant) -> Self {
        let mut machine = Paths::new(open.config);
        if open.recovers {
            machine.recover(now);
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
            attended: None,
            heard: None,
            login: None,
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

    /// The first path's target.
    pub(super) fn target(&self) -> &Target {
        &self.members[0].target
    }

    pub(super) fn poll<E: Env>(&mut self, _: &mut Context<'_, E>) -> Option<Report> {
        Some(match self.machine.poll_output()? {
            Output::Complete(request, result) => Report::Complete(request, result),
            Output::Event(event) => Report::Event(event),
            output => Report::Path(output),
        })
    }

    pub(super) fn next_deadline(&self) -> Option<Instant> {
        self.machine.next_deadline()
    }

    pub(super) fn handle_timeout<E: Env>(&mut self, cx: &mut Context<'_, E>) {
        self.machine.handle_timeout(cx.now);
    }

    /// What was known before the last login of a path.
    fn before(&self, path: PathIndex) -> Before {
        let login = self.members[usize::from(path.0)].login;
        let used = || self.members.iter().filter(|m| m.cache.is_some());
        Before {
            generation: self.generation,
            cache: used().find_map(|m| m.cache),
            outage: self
                .last_heard()
                .zip(login)
                .map(|(heard, login)| login.saturating_duration_since(heard)),
            refused: used().any(|m| m.evidence.refused),
        }
    }

    /// When the unit was last heard of; `None` while a path is in use, and before one was.
    fn last_heard(&self) -> Option<Instant> {
        let used = self.members.iter().filter(|m| m.cache.is_some());
        let heard: Option<Vec<_>> = used.map(|m| m.heard).collect();
        heard?.into_iter().max()
    }

    /// An outage has begun, after the unit was last heard of: what paths that were never in use have
    /// seen before says nothing of it.
    fn forget_unused(&mut self, heard: Instant) {
        let unused = self.members.iter_mut().filter(|m| m.cache.is_none());
        let old = unused.filter(|m| m.attended.is_none_or(|at| at <= heard));
        old.for_each(|m| m.evidence.forget());
    }

    fn member(&mut self, path: PathIndex) -> &mut Member {
        &mut self.members[usize::from(path.0)]
    }
}

impl<E: Env> Driver<E> {
    fn paths(&mut self, key: SessionKey) -> Option<(usize, &mut PathsLink)> {
        let index = self.find(key)?;
        Some((index, self.sessions[index].link.paths_mut()?))
    }

    /// Gives machines of paths the events of their sessions, and checks watched units; whether
    /// there was anything to do.
    pub(super) fn run_paths(&mut self, now: Instant) -> bool {
        let worked = !self.inputs.is_empty();
        while let Some(input) = self.inputs.pop_front() {
            match input {
                Input::Check(session) => self.check_units(session, now),
                Input::UnitAnswered(session, unit, end) => {
                    self.handle_unit_answer(session, unit, end, now);
                }
                Input::PathAnswered(paths, path, end) => {
                    self.handle_path_answer(paths, path, end, now);
                }
                Input::Live(paths, path, port) => self.on_paths(paths, now, |link, _| {
                    let member = link.member(path);
                    let outage = member.heard.map(|heard| now - heard);
                    member.evidence.on_login(outage);
                    member.login = Some(now);
                    link.machine.handle_live(path, port);
                }),
                Input::Closed(paths, path, why, heard) => self.on_paths(paths, now, |link, _| {
                    let member = link.member(path);
                    member.session = None;
                    member.evidence.on_down(why);
                    // What was lost before it was in use is judged by the other paths.
                    let was_in_use = member.cache.is_some() && member.heard.is_none();
                    if member.cache.is_some() {
                        member.heard = member.heard.or(heard);
                    }
                    if let Some(heard) = link.last_heard().filter(|_| was_in_use) {
                        link.forget_unused(heard);
                    }
                    link.machine.handle_closed(path, why, now);
                }),
                Input::Attention(paths, path, attention) => self.on_paths(paths, now, |link, _| {
                    let member = link.member(path);
                    member.evidence.on_attention(attention);
                    member.attended = Some(now);
                    if may_change_unit(attention) {
                        link.machine.handle_attention(path);
                    }
                }),
                Input::Ended(paths, request, io, result) => {
                    self.on_paths(paths, now, |link, ios| {
                        let at = request.0 as usize;
                        let done = link.dones[at].take().expect("a receiver for each command");
                        link.machine.handle_ended(request, result, now);
                        ios[at] = Some(Io { done, ..*io });
                    });
                }
            }
        }
        worked
    }

    /// Gives paths an input, if they are still there, and carries out what follows.
    fn on_paths(
        &mut self,
        key: SessionKey,
        now: Instant,
        input: impl FnOnce(&mut PathsLink, &mut [Option<Io>]),
    ) {
        let Some(index) = self.find(key) else {
            return;
        };
        let session = &mut self.sessions[index];
        if let Some(link) = session.link.paths_mut() {
            input(link, &mut session.ios);
        }
        self.drain(index, now);
        // A path that is lost gives back its commands one by one.
        self.sessions[index].report_pending();
    }

    /// Carries out what paths ask for.
    pub(super) fn carry_out_path(&mut self, index: usize, output: Output, now: Instant) {
        let session = &mut self.sessions[index];
        let Some(link) = session.link.paths_mut() else {
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
                // One that is still being asked is asked again from the beginning, if it has
                // answered anything.
                member.is_stale = member.check.doubt();
                if member.buffer.is_some() {
                    member.begin_check();
                    self.ask(index, path, now);
                }
            }
            Output::Close(path) => {
                let session = link.member(path).session;
                if let Some(member) = session.and_then(|key| self.find(key)) {
                    self.close(member, now);
                }
            }
            Output::Start { request, path } => self.start_on_path(index, request, path, now),
            Output::Changed => session.status.set_paths(link.machine.views()),
            Output::Complete(request, result) => self.complete(index, request, result, now),
            Output::Event(event) => self.handle_event(index, event, now),
        }
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
            plan: Plan::One(protocol),
            status: std::sync::Arc::new(SessionStatus::default()),
            user: User::Paths(self.key(index), path),
        };
        let session = self.open(open, now);
        // It starts nothing before the unit is checked.
        if let Some(member) = session.and_then(|key| self.find(key)) {
            self.sessions[member].link.machine().set_guarded(true);
        }
        if let Some(link) = self.sessions[index].link.paths_mut() {
            link.member(path).session = session;
        }
    }

    fn start_on_path(&mut self, index: usize, request: RequestId, path: PathIndex, now: Instant) {
        let paths = self.key(index);
        let own = &mut self.sessions[index];
        let Some(link) = own.link.paths_mut() else {
            return;
        };
        let at = request.0 as usize;
        let mut io = own.ios[at].take().expect("every request has its command");
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

    /// Asks the unit the next question of a path's check.
    fn ask(&mut self, index: usize, path: PathIndex, now: Instant) {
        let paths = self.key(index);
        let Some(link) = self.sessions[index].link.paths_mut() else {
            return;
        };
        let lun = link.lun;
        let member = link.member(path);
        let (Some(session), Some(buffer)) = (member.session, member.buffer.take()) else {
            // The session is over, which is the machine's next input.
            return;
        };
        let done = Done::Check { paths, path };
        let io = probe(lun, member.command(), buffer, done, now);
        match self.find(session) {
            Some(member) => self.submit(member, io, now),
            None => self.deliver(index, io, Err(RequestError::Closed)),
        }
    }

    /// The unit has answered a question of a path's check, or not: asks the next one, begins again
    /// where something has happened since, or gives the outcome to the machine.
    fn handle_path_answer(&mut self, key: SessionKey, path: PathIndex, end: IoEnd, now: Instant) {
        // An attention that waits behind this input makes the check void already.
        let is_again = |input: &Input| match input {
            Input::Attention(own, on, attention) => {
                (*own, *on) == (key, path) && may_change_unit(*attention)
            }
            _ => false,
        };
        let is_again = self.inputs.iter().any(is_again);
        let Some((index, link)) = self.paths(key) else {
            return;
        };
        let member = &mut link.members[usize::from(path.0)];
        let session = member.session;
        let mut is_answered = match &end.result {
            Ok(answer) => member.is_grouping || member.check.is_conclusive(answer),
            Err(_) => false,
        };
        let (buffer, data) = answer_to_probe(end);
        member.buffer = buffer;
        member.is_stale |= is_again;
        if is_answered && member.is_stale {
            if member.begin_again() {
                self.ask(index, path, now);
                return;
            }
            is_answered = false;
        }
        if is_answered && member.take(&data) {
            self.ask(index, path, now);
            return;
        }
        let found = match is_answered {
            true => Ok(member.found(&data)),
            false => Err(Down::UnitSilent),
        };
        link.machine.handle_checked(path, found, now);
        let view = link.machine.views().nth(path.0.into());
        let is_good = view.is_some_and(|v| matches!(v.state, PathState::Live | PathState::Standby));
        if is_answered && is_good {
            self.settle_path(index, path);
        }
        // A session whose unit was not identified holds its requests back, so it ends instead.
        if let Some(member) = session.and_then(|key| self.find(key)) {
            self.with_link(member, now, |link, _| match is_answered {
                // It has had no connection before.
                true if is_good => link.machine().release(true, now),
                true => {}
                false => link.machine().close(now),
            });
        }
        self.drain(index, now);
        self.sessions[index].report_pending();
    }

    /// A path is in use again: counts what its target may have lost meanwhile.
    fn settle_path(&mut self, index: usize, path: PathIndex) {
        let Some(link) = self.sessions[index].link.paths_mut() else {
            return;
        };
        let (lun, before) = (link.lun, link.before(path));
        let found = link.member(path).check.found();
        let (is, is_on) = (found.cache, found.write_cache);
        let lost = link.member(path).settle(before);
        link.generation = is;
        self.count_lost(index, lost);
        // Only now: what may be lost is counted by the state before.
        self.sessions[index].on_write_cache(lun, is_on);
        self.sessions[index].report_cache();
    }

    /// Counts the cache of a unit that may be lost, once for each generation.
    fn count_lost(&mut self, index: usize, lost: Option<Option<[u8; 16]>>) {
        let (Some(link), Some(lost)) = (self.sessions[index].link.paths_mut(), lost) else {
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
