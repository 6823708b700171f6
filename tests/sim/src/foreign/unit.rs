//! The logical unit of a foreign target, for all protocols.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::ops::Range;
use std::time::{Duration, Instant};

use fastrand::Rng;
use riser_tests::history::BLOCK;

use super::disk::Disk;
use super::scsi::{self, Action, SenseBytes};
use super::{ForeignFault, Traits};
use crate::initiator::Verdict;

/// POWER ON OCCURRED.
const POWER_ON: SenseBytes = [0x70, 0x06, 0x29, 0x01];

/// REPORTED LUNS DATA HAS CHANGED.
const LUNS_CHANGED: SenseBytes = [0x70, 0x06, 0x3f, 0x0e];

/// A deferred WRITE ERROR: a previous write to the cache has failed.
const DEFERRED: SenseBytes = [0x71, 0x03, 0x0c, 0x00];

/// RECOVERED ERROR: the command was completed after a reallocation.
const RECOVERED: SenseBytes = [0x70, 0x01, 0x0c, 0x01];

/// LOGICAL UNIT NOT READY, without a qualifier.
const NOT_READY: SenseBytes = [0x70, 0x02, 0x04, 0x00];

/// LOGICAL UNIT NOT SUPPORTED.
const NO_UNIT: SenseBytes = [0x70, 0x05, 0x25, 0x00];

/// SCSI status CHECK CONDITION.
const CHECK_CONDITION: u8 = 0x02;

/// SCSI status TASK ABORTED.
const TASK_ABORTED: u8 = 0x40;

/// Last byte of the unit's designator.
const OWN: u8 = 0x77;

/// Last byte of the other unit's designator, and contents of its blocks, which are not a valid
/// version of any block.
const OTHER: u8 = 0xee;

/// A command without its data.
#[derive(Clone, Debug)]
pub(super) struct Command {
    /// Number of the session.
    pub(super) session: u64,
    pub(super) cdb: [u8; 16],
    /// Bytes that the initiator expects to transfer.
    pub(super) expected: u32,
    /// The number of transferred bytes is known from the protocol, even if the residual is wrong.
    pub(super) is_counted: bool,
    /// The initiator will receive the response, because it has not closed the connection.
    pub(super) is_connected: bool,
}

/// Difference between the expected and the actual length of a transfer, as reported in the
/// response.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Residual {
    pub(super) over: bool,
    pub(super) under: bool,
    pub(super) count: u32,
    /// Set if the residual is reported for the direction in which no data was transferred.
    pub(super) is_reverse: bool,
}

impl Residual {
    fn under(count: u32) -> Self {
        Self {
            under: count > 0,
            count,
            ..Self::default()
        }
    }

    /// Draws a residual that does not describe a complete transfer of this length.
    fn wrong(len: u32, rng: &mut Rng) -> Self {
        let some = rng.u32(1..=len.max(1));
        let plain = Self::under(some);
        match rng.u8(..7) {
            0 => Self::under(len.saturating_add(some)),
            1 => Self {
                over: true,
                ..plain
            },
            2 => Self {
                under: false,
                ..plain
            },
            3 => Self {
                under: true,
                ..Self::default()
            },
            4 => Self {
                over: true,
                under: false,
                ..plain
            },
            5 => Self {
                is_reverse: true,
                ..plain
            },
            _ => plain,
        }
    }
}

/// Completion of a command.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Reply {
    pub(super) status: u8,
    pub(super) sense: Option<SenseBytes>,
    /// The target could not execute the command (response code TARGET FAILURE).
    pub(super) is_failure: bool,
    pub(super) data: Vec<u8>,
    pub(super) residual: Residual,
}

impl Reply {
    /// Returns whether the reply reports a condition that is only reported once: a unit attention
    /// or a deferred error.
    pub(super) fn clears_condition(&self) -> bool {
        const UNIT_ATTENTION: u8 = 0x06;
        let is_once = |[code, key, ..]: SenseBytes| code == DEFERRED[0] || key == UNIT_ATTENTION;
        self.sense.is_some_and(is_once)
    }

    fn check(sense: SenseBytes, command: &Command) -> Self {
        Self {
            status: CHECK_CONDITION,
            sense: Some(sense),
            residual: Residual::under(command.expected),
            ..Self::default()
        }
    }

    fn status(status: u8, command: &Command) -> Self {
        Self {
            status,
            residual: Residual::under(command.expected),
            ..Self::default()
        }
    }

    fn data(data: Vec<u8>, command: &Command) -> Self {
        Self {
            residual: Residual::under(command.expected.saturating_sub(data.len() as u32)),
            data,
            ..Self::default()
        }
    }
}

/// Next step of a command.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Step {
    Complete(Reply),
    /// The unit needs the data of the write.
    Gather(Write),
}

/// A write of blocks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Write {
    pub(super) blocks: Range<u64>,
    pub(super) fua: bool,
}

/// Identifies a write command and its connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Issuer {
    pub(super) node: usize,
    pub(super) connection: u64,
    /// Initiator part of the session's name.
    pub(super) isid: [u8; 6],
    pub(super) tag: u64,
}

/// A write that is in flight to the medium. It completes even if its session is closed.
#[derive(Debug)]
struct Landing {
    issuer: Issuer,
    write: Write,
    data: Vec<u8>,
}

/// The unit that is visible to a session while another unit replaces this one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum View {
    /// The session doesn't know that the unit is missing.
    #[default]
    Unaware,
    /// The unit was reported missing.
    Missing,
    /// The session has identified, or could have identified, the other unit.
    Other,
}

#[derive(Debug, Default)]
struct Nexus {
    node: usize,
    attentions: VecDeque<SenseBytes>,
    view: View,
}

/// Permanent faults of the unit.
#[derive(Clone, Debug, Default)]
pub(super) struct UnitFaults {
    recovered: f64,
    failures: f64,
    not_ready: Option<u8>,
    residuals: f64,
    shorts: f64,
    status: Option<(u8, f64)>,
    is_removed: bool,
    is_replaced: bool,
}

impl UnitFaults {
    pub(super) fn add(&mut self, fault: ForeignFault) {
        match fault {
            ForeignFault::RecoverErrors(share) => self.recovered = share,
            ForeignFault::FailResponses(share) => self.failures = share,
            ForeignFault::NotReady(qualifier) => self.not_ready = Some(qualifier),
            ForeignFault::WrongResiduals(share) => self.residuals = share,
            ForeignFault::ShortReads(share) => self.shorts = share,
            ForeignFault::ReturnStatus(status, share) => self.status = Some((status, share)),
            ForeignFault::RemoveUnit => self.is_removed = true,
            ForeignFault::ReplaceUnit => self.is_replaced = true,
            _ => {}
        }
    }
}

#[derive(Debug)]
pub(super) struct Unit {
    disk: Disk,
    traits: Traits,
    landing: BTreeMap<(Instant, u64), Landing>,
    nexuses: BTreeMap<u64, Nexus>,
    faults: UnitFaults,
    /// Nodes that report a power-on for the next command.
    powered_on: BTreeSet<usize>,
    /// A lost cache that was not reported yet.
    is_loss_deferred: bool,
    landed: u64,
    rng: Rng,
    verdict: Verdict,
}

impl Unit {
    pub(super) fn new(disk: Disk, traits: Traits, rng: Rng, verdict: Verdict) -> Self {
        Self {
            disk,
            traits,
            landing: BTreeMap::new(),
            nexuses: BTreeMap::new(),
            faults: UnitFaults::default(),
            powered_on: BTreeSet::from([0, 1]),
            is_loss_deferred: false,
            landed: 0,
            rng,
            verdict,
        }
    }

    pub(super) fn is_idle(&self) -> bool {
        self.landing.is_empty()
    }

    pub(super) fn next_deadline(&self) -> Option<Instant> {
        self.landing.keys().next().map(|(at, _)| *at)
    }

    /// Returns whether a matching write is in flight to the medium.
    pub(super) fn is_writing(&self, mut is_match: impl FnMut(&Issuer) -> bool) -> bool {
        self.landing
            .values()
            .any(|landing| is_match(&landing.issuer))
    }

    /// Reports a power-on to the next session at this node. The condition remains pending if this
    /// session is closed before.
    pub(super) fn power_on(&mut self, node: usize) {
        self.powered_on.insert(node);
    }

    /// Called when a session was opened at this node.
    pub(super) fn open(&mut self, session: u64, node: usize) {
        let nexus = self.nexuses.entry(session).or_default();
        nexus.node = node;
        if self.faults.is_replaced {
            nexus.view = View::Other;
        }
    }

    /// Removes closed sessions.
    pub(super) fn retain(&mut self, is_open: impl Fn(u64) -> bool) {
        self.nexuses.retain(|session, _| is_open(*session));
    }

    /// Updates the active faults.
    pub(super) fn set_faults(&mut self, faults: UnitFaults) {
        let was_removed = std::mem::replace(&mut self.faults, faults).is_removed;
        if was_removed && !self.faults.is_removed {
            self.notify(LUNS_CHANGED);
        }
        if !self.faults.is_replaced {
            self.nexuses
                .values_mut()
                .for_each(|nexus| nexus.view = View::Unaware);
        }
    }

    /// Establishes a unit attention condition for every session.
    fn notify(&mut self, attention: SenseBytes) {
        for nexus in self.nexuses.values_mut() {
            nexus.attentions.push_back(attention);
        }
    }

    /// Writeback fails for cached writes. Returns whether data was lost.
    pub(super) fn lose_cache(&mut self, share: f64) -> bool {
        let is_lost = self.disk.lose_cache(share, &mut self.rng);
        self.is_loss_deferred |= is_lost;
        is_lost
    }

    /// Loses power, and with it the cache and incomplete writes. Returns whether acknowledged data
    /// was lost.
    pub(super) fn lose_power(&mut self, share: f64) -> bool {
        self.landing.clear();
        self.is_loss_deferred = false;
        self.disk.lose_cache(share, &mut self.rng)
    }

    /// Resets the unit, which aborts its commands and reports this ASCQ of 29h. An aborted write is
    /// partially written to the medium. Returns commands to be completed with TASK ABORTED.
    pub(super) fn reset(&mut self, qualifier: u8) -> Vec<(Issuer, Reply)> {
        let mut aborted = Vec::new();
        for landing in std::mem::take(&mut self.landing).into_values() {
            let blocks = landing.data.len() / BLOCK;
            let written = self.rng.usize(..=blocks) * BLOCK;
            let Write { blocks, fua } = landing.write;
            self.disk.write(blocks.start, &landing.data[..written], fua);
            let reply = Reply {
                status: TASK_ABORTED,
                ..Reply::default()
            };
            aborted.push((landing.issuer, reply));
        }
        self.notify([0x70, 0x06, 0x29, qualifier]);
        // TAS in the Control mode page determines whether aborted commands of other sessions
        // complete.
        match self.rng.bool() {
            true => aborted,
            false => Vec::new(),
        }
    }

    /// Completes writes that are due.
    pub(super) fn land(&mut self, now: Instant) -> Vec<(Issuer, Reply)> {
        let later = self.landing.split_off(&(now, u64::MAX));
        let due = std::mem::replace(&mut self.landing, later);
        let mut completed = Vec::new();
        for landing in due.into_values() {
            let Write { blocks, fua } = landing.write;
            self.disk.write(blocks.start, &landing.data, fua);
            let mut reply = self.recovered();
            reply.residual = self.residual(landing.data.len() as u32);
            completed.push((landing.issuer, reply));
        }
        completed
    }

    fn recovered(&mut self) -> Reply {
        if self.rng.f64() >= self.faults.recovered {
            return Reply::default();
        }
        Reply {
            status: CHECK_CONDITION,
            sense: Some(RECOVERED),
            ..Reply::default()
        }
    }

    /// Returns the residual of a complete transfer.
    fn residual(&mut self, len: u32) -> Residual {
        match self.rng.f64() < self.faults.residuals {
            true => Residual::wrong(len, &mut self.rng),
            false => Residual::default(),
        }
    }

    /// Starts to execute a command.
    pub(super) fn execute(&mut self, command: &Command) -> Step {
        match self.presence(command) {
            View::Unaware => {}
            View::Missing => return Step::Complete(absent(command)),
            View::Other => return Step::Complete(self.other(command)),
        }
        if let Some(reply) = self.condition(command) {
            return Step::Complete(reply);
        }
        match scsi::plan(&command.cdb, &self.disk, &self.traits, OWN) {
            Action::Check(sense) => Step::Complete(Reply::check(sense, command)),
            Action::Return(data) => Step::Complete(Reply::data(data, command)),
            Action::Read(blocks) => Step::Complete(self.read(blocks, command)),
            Action::Flush => {
                self.disk.flush();
                Step::Complete(Reply::default())
            }
            Action::Write { blocks, fua } => Step::Gather(Write { blocks, fua }),
        }
    }

    /// Returns the unit that is visible to a session. A session only sees the other unit after it
    /// has been informed that its own unit is missing: then all commands that were sent before have
    /// been processed, because the commands that identify a unit are sent after these.
    fn presence(&mut self, command: &Command) -> View {
        let UnitFaults {
            is_removed,
            is_replaced,
            ..
        } = self.faults;
        let nexus = self.nexuses.entry(command.session).or_default();
        let is_probe = matches!(command.cdb[0], 0x12 | 0x25 | 0x9e | 0xa0);
        match (is_replaced, nexus.view) {
            (true, View::Missing) if is_probe => nexus.view = View::Other,
            (true, View::Unaware) => nexus.view = View::Missing,
            (true, _) => {}
            (false, _) if is_removed => return View::Missing,
            (false, _) => {}
        }
        nexus.view
    }

    /// Executes a command at the other unit, which must not be changed by any command from the
    /// initiator.
    fn other(&self, command: &Command) -> Reply {
        match scsi::plan(&command.cdb, &self.disk, &self.traits, OTHER) {
            Action::Check(sense) => Reply::check(sense, command),
            Action::Return(data) => Reply::data(data, command),
            Action::Read(blocks) => {
                let len = (blocks.end - blocks.start) as usize * BLOCK;
                Reply::data(vec![OTHER; len], command)
            }
            Action::Flush => Reply::default(),
            Action::Write { blocks, .. } => {
                let why = format!("a write of blocks {blocks:?} reaches another unit");
                self.verdict.borrow_mut().get_or_insert(why);
                Reply::default()
            }
        }
    }

    /// Returns a reply that reports a condition, so the command is not executed.
    fn condition(&mut self, command: &Command) -> Option<Reply> {
        let opcode = command.cdb[0];
        // A condition is only reported once, so the initiator must receive the report.
        if matches!(opcode, 0x12 | 0xa0) || !command.is_connected {
            return None;
        }
        let nexus = self.nexuses.entry(command.session).or_default();
        if self.powered_on.remove(&nexus.node) {
            return Some(Reply::check(POWER_ON, command));
        }
        if let Some(attention) = nexus.attentions.pop_front() {
            return Some(Reply::check(attention, command));
        }
        if std::mem::take(&mut self.is_loss_deferred) {
            return Some(Reply::check(DEFERRED, command));
        }
        if let Some(qualifier) = self.faults.not_ready {
            let [code, key, asc, _] = NOT_READY;
            return Some(Reply::check([code, key, asc, qualifier], command));
        }
        if self.rng.f64() < self.faults.failures {
            return Some(Reply {
                is_failure: true,
                ..Reply::default()
            });
        }
        let (status, share) = self.faults.status.unwrap_or_default();
        // A reservation doesn't block READ CAPACITY and MODE SENSE of other initiators.
        let is_io = scsi::is_io(opcode) || status != scsi::RESERVATION_CONFLICT;
        (is_io && self.rng.f64() < share).then(|| Reply::status(status, command))
    }

    fn read(&mut self, blocks: Range<u64>, command: &Command) -> Reply {
        let data = self.disk.read(blocks);
        let len = data.len();
        let mut reply = self.recovered();
        reply.residual = self.residual(len as u32);
        reply.data = data;
        if self.rng.f64() < self.faults.shorts {
            reply.data.truncate(self.rng.usize(..len / BLOCK) * BLOCK);
            let missing = (len - reply.data.len()) as u32;
            // With RDMA, only the residual indicates that data is missing.
            let is_stated = !command.is_counted || self.rng.bool();
            reply.residual = Residual::under(if is_stated { missing } else { 0 });
        }
        reply
    }

    /// Starts to write to the medium after all data was received.
    pub(super) fn write(&mut self, issuer: Issuer, write: Write, data: Vec<u8>, now: Instant) {
        // Most writes are fast, but some of them use the maximum latency.
        let slowest = match self.rng.u8(..8) {
            0 => self.traits.slowest,
            _ => self.traits.slowest.min(Duration::from_millis(1)),
        };
        let at = now + slowest.mul_f64(self.rng.f64());
        self.landed += 1;
        let landing = Landing {
            issuer,
            write,
            data,
        };
        self.landing.insert((at, self.landed), landing);
    }
}

/// Returns the reply to a command for a LUN without a unit.
fn absent(command: &Command) -> Reply {
    /// Peripheral qualifier and device type for a LUN without a unit.
    const ABSENT: u8 = 0x7f;
    match (command.cdb[0], command.cdb[1] & 1) {
        (0x12, 0) => {
            let mut standard = vec![0; 36];
            (standard[0], standard[4]) = (ABSENT, 31);
            standard.truncate(command.expected as usize);
            Reply::data(standard, command)
        }
        (0xa0, _) => Reply::data(vec![0; 8], command),
        _ => Reply::check(NO_UNIT, command),
    }
}
