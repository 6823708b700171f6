//! Several sessions that are paths to one unit.
//!
//! What happens to such a session and to the commands on it is put into a queue, and told to the paths'
//! machine when nothing else is being carried out ([`Driver::run_paths`]): the machine may close the
//! session that it hears of.

use std::time::{Duration, Instant};

use riser_scsi::lun::LunId;
use riser_transport::verbs::Provider;

use super::link::{Link, Protocol};
use super::{Driver, Open, SessionKey, Target, User};
use crate::block::Buffer;
use crate::engine::io::{Done, Io, IoData, IoEnd, ScsiIo};
use crate::engine::status::SessionStatus;
use crate::paths::{Access, Found, Output, PathIndex, Paths, PathsConfig, PortTag, access};
use crate::request::{Cdb, DataLen, GOOD, RequestError, RequestId, RequestResult};
use crate::scsi::{Command, Identity, VPD_LEN, vpd_body};
use crate::session::Down;

/// How long the unit may take to say who it is.
const CHECK: Duration = Duration::from_secs(10);

/// Length of every answer that is asked for, in bytes.
pub(in crate::engine) const CHECK_LEN: usize = VPD_LEN as usize;

/// Paths to make.
pub(in crate::engine) struct PathsOpen {
    pub(in crate::engine) config: PathsConfig,
    pub(in crate::engine) lun: LunId,
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

/// What happened to a session that is a path, or to a command on it.
pub(super) enum Input {
    Live(SessionKey, PathIndex, Option<PortTag>),
    Closed(SessionKey, PathIndex, Down),
    Ended(SessionKey, RequestId, Box<Io>, RequestResult),
    Told(SessionKey, PathIndex, IoEnd),
}

struct Member {
    target: Target,
    protocol: Protocol,
    session: Option<SessionKey>,
    /// `None` while it is in use.
    buffer: Option<Buffer>,
    step: Step,
    /// The body of the device identification page.
    designators: Option<Vec<u8>>,
    identity: Identity,
    is_asymmetric: bool,
}

/// What a unit is asked for, in this order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Step {
    Inquiry,
    Designators,
    Serial,
    Groups,
}

impl Step {
    fn command(self) -> Command {
        let [high, low] = VPD_LEN.to_be_bytes();
        let cdb: &[u8] = match self {
            Self::Inquiry => &[0x12, 0, 0, high, low, 0],
            Self::Designators => &[0x12, 1, 0x83, high, low, 0],
            Self::Serial => &[0x12, 1, 0x80, high, low, 0],
            Self::Groups => &[0xa3, 0x0a, 0, 0, 0, 0, 0, 0, high, low, 0, 0],
        };
        let cdb = Cdb::new(cdb).expect("a CDB of legal length");
        Command::raw(cdb, DataLen::In(VPD_LEN.into()))
    }
}

impl Member {
    /// Takes what the unit said, or nothing where it refused, and decides what it is asked next;
    /// `None` when it has told everything.
    fn take(&mut self, data: &[u8]) -> Option<Step> {
        match self.step {
            Step::Inquiry => {
                self.is_asymmetric = access::is_offered(data);
                // Byte 0 of a unit that is not there says so.
                let is_there = data.first().is_some_and(|b| b >> 5 == 0);
                is_there.then_some(Step::Designators)
            }
            Step::Designators => {
                self.designators = vpd_body(data, 0x83).map(<[u8]>::to_vec);
                Some(Step::Serial)
            }
            Step::Serial => {
                let designators = self.designators.as_deref();
                self.identity = Identity::parse(vpd_body(data, 0x80), designators);
                self.is_asymmetric.then_some(Step::Groups)
            }
            Step::Groups => None,
        }
    }

    fn found(&self, data: &[u8]) -> Found {
        let group = self.designators.as_deref().and_then(access::own_group);
        let told = group.and_then(|group| access::of_group(data, group));
        Found {
            identity: self.identity.clone(),
            // A unit that offers it and then does not tell is used as if it did not.
            access: (self.step == Step::Groups).then(|| told.unwrap_or(Access::Optimized)),
        }
    }
}

/// The paths to a unit, and their sessions.
pub(super) struct PathsLink {
    pub(super) machine: Paths,
    lun: LunId,
    members: Vec<Member>,
    /// By request: who waits for a command that a path's session has.
    dones: Vec<Option<Done>>,
}

impl PathsLink {
    pub(super) fn new(open: PathsOpen) -> Self {
        let member = |plan: PathPlan| Member {
            target: plan.target,
            protocol: plan.protocol,
            session: None,
            buffer: Some(plan.buffer),
            step: Step::Inquiry,
            designators: None,
            identity: Identity::default(),
            is_asymmetric: false,
        };
        Self {
            machine: Paths::new(open.config),
            lun: open.lun,
            members: open.paths.into_iter().map(member).collect(),
            dones: Vec::new(),
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
            | Input::Told(key, ..)) = input;
            let Some((index, link)) = self.paths(key) else {
                continue;
            };
            match input {
                Input::Live(_, path, port) => link.machine.handle_live(path, port),
                Input::Closed(_, path, why) => {
                    link.member(path).session = None;
                    link.machine.handle_closed(path, why, now);
                }
                Input::Ended(_, request, mut io, result) => {
                    let at = request.0 as usize;
                    io.done = link.dones[at].take().expect("somebody waits for it");
                    link.machine.handle_ended(request, result, now);
                    self.sessions[index].ios[at] = Some(*io);
                }
                Input::Told(_, path, end) => self.handle_told(index, path, end, now),
            }
            self.drain_paths(index, now);
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
                    // One that is still being asked will tell.
                    if member.buffer.is_some() {
                        member.step = Step::Inquiry;
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

    fn key(&self, index: usize) -> SessionKey {
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
        let io = Io {
            io: ScsiIo::new(lun, member.step.command(), IoData::One(buffer), CHECK),
            deadline: now + CHECK,
            done: Done::Check { paths, path },
        };
        match self.find(session) {
            Some(member) => self.submit(member, io, now),
            None => self.deliver(index, io, Err(RequestError::Closed)),
        }
    }

    fn handle_told(&mut self, index: usize, path: PathIndex, end: IoEnd, now: Instant) {
        let Link::Paths(link) = &mut self.sessions[index].link else {
            return;
        };
        let member = &mut link.members[usize::from(path.0)];
        let mut data = Vec::new();
        if let Some(buffer) = end.data.into_one() {
            if let Ok(answer) = &end.result
                && answer.status == GOOD
            {
                data.resize((answer.transferred as usize).min(buffer.len()), 0);
                buffer.slice().read(0, &mut data);
            }
            member.buffer = Some(buffer);
        }
        if end.result.is_err() {
            link.machine
                .handle_checked(path, Err(Down::UnitSilent), now);
            return;
        }
        match member.take(&data) {
            Some(step) => {
                member.step = step;
                self.ask(index, path, now);
            }
            None => {
                let found = member.found(&data);
                link.machine.handle_checked(path, Ok(found), now);
            }
        }
    }
}
