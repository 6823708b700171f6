//! Sessions that are paths to one unit.
//!
//! Events of these sessions and completions of their commands are queued, and passed to the paths'
//! machine when no other call is being processed ([`Driver::run_paths`]), because the machine may
//! close the session that caused an input.

mod cache;

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use riser_block::Buffer;
use riser_scsi::lun::LunId;

use super::Driver;
use super::commands::CommandQueue;
use super::context::{Context, Report};
use super::inputs::{Input, probe, probe_response};
use super::message::{Open, User};
use super::plan::{PathPlan, PathsOpen, Plan, Protocol};
use crate::engine::env::Env;
use crate::engine::io::{Done, Io, IoCompletion, SessionKey, Target};
use crate::engine::status::SessionStatus;
use crate::paths::{Access, Output, PathIndex, PathState, Paths, UnitReport, access};
use crate::request::{RequestError, RequestId, may_change_unit};
use crate::scsi::{Command, VPD_LEN};
use crate::session::{Down, Machine, settle_message};
use crate::unit::{Check, Evidence};

struct Member {
    target: Target,
    protocol: Protocol,
    session: Option<SessionKey>,
    /// `None` while in use.
    buffer: Option<Buffer>,
    check: Check,
    /// The check is querying the target port groups, as its last step.
    is_grouping: bool,
    /// An event occurred after the first response, so the check must be repeated.
    is_stale: bool,
    /// Generation of the unit's cache at the last successful check; the outer `Option` is `None`
    /// before that.
    cache: Option<Option<[u8; 16]>>,
    evidence: Evidence,
    /// Time of the last unit attention.
    attended: Option<Instant>,
    /// The unit was checked successfully on the current session.
    is_in_use: bool,
    /// The loss or rejection of the path was logged.
    is_logged: bool,
    /// The session only starts probes until the unit was checked.
    is_held: bool,
    /// Outstanding pings; see [`Driver::ping_others`].
    pings: u32,
    /// The check starts when the pings on the other paths complete.
    is_waiting: bool,
    /// Time of the target's last message on this path, if it was in use. Updated by
    /// [`Driver::update_last_received`].
    last_received: Option<Instant>,
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

    fn start_check(&mut self) {
        self.check = Check::default();
        (self.is_grouping, self.is_stale) = (false, false);
    }

    /// See [`Check::restart`].
    fn restart_check(&mut self) -> bool {
        (self.is_grouping, self.is_stale) = (false, false);
        self.check.restart()
    }

    /// Processes the unit's response, which is empty if the unit rejected the query; returns
    /// whether there is another query.
    fn process_response(&mut self, data: &[u8]) -> bool {
        if self.is_grouping {
            return false;
        }
        if self.check.process_response(data) {
            return true;
        }
        self.is_grouping = self.check.is_there() && access::is_offered(self.check.inquiry());
        self.is_grouping
    }

    fn found(&self, data: &[u8]) -> UnitReport {
        let group = self.check.designators().and_then(access::own_group);
        let reported = group.and_then(|group| access::of_group(data, group));
        UnitReport {
            unit: self.check.found().clone(),
            // If a unit offers asymmetric access but does not report its state, ignore the feature.
            access: self
                .is_grouping
                .then(|| reported.unwrap_or(Access::Optimized)),
        }
    }
}

/// Paths to a unit, with their sessions.
pub(super) struct PathsLink {
    pub(super) machine: Paths,
    lun: LunId,
    members: Vec<Member>,
    /// Receivers of commands submitted on a path's session, by request.
    dones: Vec<Option<Done>>,
    /// Last generation of the unit's cache found on any path; `None` if it has none.
    pub(super) generation: Option<[u8; 16]>,
    /// Generations of lost caches, so that each is counted once, even if several paths detect the
    /// loss. Bound: [`GONE`].
    gone: VecDeque<[u8; 16]>,
    /// Time of the last refused connection on a path that was in use before.
    refused: Option<Instant>,
    /// Time of the last counted cache loss.
    lost: Option<Instant>,
}

impl PathsLink {
    /// Returns the unit of the paths.
    pub(super) fn lun(&self) -> LunId {
        self.lun
    }

    pub(super) fn new(open: PathsOpen, now: Instant) -> Self {
        let mut machine = Paths::new(open.config);
        if open.recovers {
            machine.recover(open.was_redirected, now);
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
            is_in_use: false,
            is_logged: false,
            is_held: true,
            pings: 0,
            is_waiting: false,
            last_received: None,
            login: None,
        };
        Self {
            machine,
            lun: open.lun,
            members: open.paths.into_iter().map(member).collect(),
            dones: Vec::new(),
            generation: None,
            gone: VecDeque::new(),
            refused: None,
            lost: None,
        }
    }

    /// Returns the target of the first path.
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

    /// Logs the loss or rejection of a path, once per outage.
    fn log_closed(&mut self, path: PathIndex, was_in_use: bool) {
        let view = self.machine.views().nth(path.0.into());
        let Some(why) = view.and_then(|view| view.why) else {
            return;
        };
        let is_ending = self.machine.is_ending();
        let member = self.member(path);
        if is_ending || std::mem::replace(&mut member.is_logged, true) {
            return;
        }
        let portal = member.target.dst;
        match was_in_use {
            true => tracing::warn!(%portal, "path lost: {why}"),
            false => tracing::warn!(%portal, "path rejected: {why}"),
        }
    }

    fn member(&mut self, path: PathIndex) -> &mut Member {
        &mut self.members[usize::from(path.0)]
    }
}

impl<E: Env> Driver<E> {
    fn paths(&mut self, key: SessionKey) -> Option<(usize, &mut PathsLink)> {
        let index = self.sessions.find(key)?;
        Some((index, self.sessions[index].link.paths_mut()?))
    }

    /// Passes events of path sessions to their machines, and checks watched units; returns whether
    /// there was anything to do.
    pub(super) fn run_paths(&mut self, now: Instant) -> bool {
        let worked = !self.inputs.is_empty();
        while let Some(input) = self.inputs.pop_front() {
            match input {
                Input::Check(session) => self.check_units(session, now),
                Input::UnitResponse(session, unit, completion) => {
                    self.handle_unit_response(session, unit, completion, now);
                }
                Input::PathResponse(paths, path, completion) => {
                    self.handle_path_response(paths, path, completion, now);
                }
                Input::Live(paths, path, port) => {
                    self.update_last_received(paths);
                    self.ping_others(paths, path, now);
                    self.on_paths(paths, now, |link, _| {
                        let (outage, refused) = link.outage(now);
                        let member = link.member(path);
                        member.evidence.refused = refused;
                        member.evidence.on_login(outage);
                        member.login = Some(now);
                        link.machine.handle_live(path, port, now);
                    });
                }
                Input::Pinged(paths, path) => self.handle_pinged(paths, path, now),
                Input::Closed(paths, path, why, last_received) => {
                    self.update_last_received(paths);
                    self.check_attentions(paths, path, now);
                    self.on_paths(paths, now, |link, _| {
                        let was_in_use = link.note_closed(path, why, last_received, now);
                        link.machine.handle_closed(path, why, now);
                        link.log_closed(path, was_in_use);
                    });
                }
                Input::Attention(paths, path, attention, is_own_reset) => {
                    self.on_paths(paths, now, |link, _| {
                        let member = link.member(path);
                        member.evidence.on_attention(attention, is_own_reset);
                        member.attended = Some(now);
                        if may_change_unit(attention) {
                            member.is_held = true;
                            link.machine.handle_attention(path);
                        }
                    });
                    self.check_attentions(paths, path, now);
                    if let Some(index) = self.sessions.find(paths) {
                        self.count_reported(index, now);
                    }
                }
                Input::Deferred(paths, lun, sense) => {
                    if let Some(index) = self.sessions.find(paths) {
                        self.sessions[index].on_deferred_error(lun, sense);
                    }
                }
                Input::Completed(paths, request, io, result) => {
                    self.on_paths(paths, now, |link, commands| {
                        let done = link.dones[request.0 as usize].take();
                        let done = done.expect("a receiver for each command");
                        link.machine.handle_completed(request, result, now);
                        commands.insert(request, Io { done, ..*io });
                    });
                }
            }
        }
        worked
    }

    /// Sets the wait before the next login, as requested by the target of a path's closed session.
    pub(super) fn set_time2wait(&mut self, key: SessionKey, path: PathIndex, wait: Duration) {
        if let Some((_, link)) = self.paths(key) {
            link.machine.set_time2wait(path, wait);
        }
    }

    /// Returns the session of a path in use.
    fn member_in_use(&mut self, key: SessionKey, at: usize) -> Option<usize> {
        let (_, link) = self.paths(key)?;
        let member = link.members.get(at).filter(|m| m.is_in_use)?;
        let session = member.session?;
        self.sessions.find(session)
    }

    /// Passes an input to paths if they still exist, and processes the outputs.
    fn on_paths(
        &mut self,
        key: SessionKey,
        now: Instant,
        input: impl FnOnce(&mut PathsLink, &mut CommandQueue),
    ) {
        let Some(index) = self.sessions.find(key) else {
            return;
        };
        let session = &mut self.sessions[index];
        if let Some(link) = session.link.paths_mut() {
            input(link, &mut session.commands);
        }
        self.drain(index, now);
        // A lost path returns its commands one at a time.
        self.sessions[index].report_pending();
    }

    /// Executes an output of paths.
    pub(super) fn execute_path_output(&mut self, index: usize, output: Output, now: Instant) {
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
                let target = link.member(through).target.clone();
                let protocol = link.member(path).protocol.once(patience);
                self.open_path(index, path, target, protocol, now);
            }
            Output::Check(path) => {
                let member = link.member(path);
                // If a check is in progress and has received a response, repeat it from the start.
                member.is_stale = member.check.invalidate();
                if member.buffer.is_some() {
                    member.start_check();
                    if !link.awaits_others(path) {
                        self.send_next_query(index, path, now);
                    }
                }
            }
            Output::Close(path) => {
                let session = link.member(path).session;
                if let Some(member) = session.and_then(|key| self.sessions.find(key)) {
                    self.close(member, now);
                }
            }
            Output::Settling {
                path,
                settle,
                redirect,
            } => {
                let portal = link.member(path).target.dst;
                tracing::warn!(%portal, "{}", settle_message(settle, redirect));
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
            user: User::Paths(self.sessions.key(index), path),
        };
        let session = self.open(open, now);
        // The session must not start commands before the unit is checked.
        if let Some(member) = session.and_then(|key| self.sessions.find(key)) {
            self.sessions[member].link.machine().set_guarded(true);
        }
        if let Some(link) = self.sessions[index].link.paths_mut() {
            link.member(path).session = session;
        }
    }

    fn start_on_path(&mut self, index: usize, request: RequestId, path: PathIndex, now: Instant) {
        let paths = self.sessions.key(index);
        let own = &mut self.sessions[index];
        let Some(link) = own.link.paths_mut() else {
            return;
        };
        let at = request.0 as usize;
        let mut io = own.commands.remove(request);
        if at >= link.dones.len() {
            link.dones.resize_with(at + 1, || None);
        }
        let done = Done::Path { paths, request };
        link.dones[at] = Some(std::mem::replace(&mut io.done, done));
        let session = link.member(path).session;
        match session.and_then(|key| self.sessions.find(key)) {
            Some(member) => self.submit(member, io, now),
            None => self.deliver(index, io, Err(RequestError::Closed)),
        }
    }

    /// Sends the next query of a path's check.
    fn send_next_query(&mut self, index: usize, path: PathIndex, now: Instant) {
        let paths = self.sessions.key(index);
        let Some(link) = self.sessions[index].link.paths_mut() else {
            return;
        };
        let lun = link.lun;
        let member = link.member(path);
        let Some(session) = member.session else {
            // The session is closed, which is the next input of the machine.
            return;
        };
        let Some(buffer) = member.buffer.take() else {
            return;
        };
        let done = Done::Check { paths, path };
        let io = probe(lun, member.command(), buffer, done, now);
        match self.sessions.find(session) {
            Some(member) => self.submit(member, io, now),
            None => self.deliver(index, io, Err(RequestError::Closed)),
        }
    }

    /// Handles the response to a query of a path's check, or its failure: sends the next query,
    /// restarts the check if an event occurred, or passes the result to the machine.
    fn handle_path_response(
        &mut self,
        key: SessionKey,
        path: PathIndex,
        completion: IoCompletion,
        now: Instant,
    ) {
        // A unit attention queued after this input already invalidates the check.
        let is_again = |input: &Input| match input {
            Input::Attention(own, on, attention, _) => {
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
        let mut has_response = match &completion.result {
            Ok(response) => member.is_grouping || member.check.is_conclusive(response),
            Err(_) => false,
        };
        let was_sent = !matches!(completion.result, Err(RequestError::NotSent));
        let (buffer, data) = probe_response(completion);
        member.buffer = buffer;
        member.is_stale |= is_again;
        // The commands before a probe have separate deadlines.
        if !was_sent && member.is_in_use {
            self.send_next_query(index, path, now);
            return;
        }
        if has_response && member.is_stale {
            if member.restart_check() {
                self.send_next_query(index, path, now);
                return;
            }
            has_response = false;
        }
        if has_response && member.process_response(&data) {
            self.send_next_query(index, path, now);
            return;
        }
        let found = match has_response {
            true => Ok(member.found(&data)),
            false => Err(Down::UnitSilent),
        };
        link.machine.handle_checked(path, found, now);
        let view = link.machine.views().nth(path.0.into());
        let is_good = view.is_some_and(|v| matches!(v.state, PathState::Live | PathState::Standby));
        if has_response && is_good {
            self.finish_path_check(index, path, now);
        }
        // If a session holds its requests until the unit is identified, close it. If only its
        // access state was queried, keep it.
        let is_held = self
            .paths(key)
            .is_none_or(|(_, link)| link.member(path).is_held);
        if let Some(member) = session.and_then(|key| self.sessions.find(key)) {
            self.with_link(member, now, |link, _| match has_response {
                // The session had no earlier connection.
                true if is_good => link.machine().release(true, now),
                false if is_held => link.machine().close(now),
                true | false => {}
            });
        }
        self.drain(index, now);
        self.sessions[index].report_pending();
    }
}

#[cfg(test)]
impl PathsLink {
    pub(super) fn set_last_received(&mut self, path: PathIndex, at: Instant) {
        self.member(path).last_received = Some(at);
    }

    pub(super) fn is_waiting(&mut self, path: PathIndex) -> bool {
        self.member(path).is_waiting
    }

    pub(super) fn session_of(&mut self, path: PathIndex) -> Option<SessionKey> {
        self.member(path).session
    }
}
