//! Watchers: iSCSI initiators that continuously check the units, and the ledger of the expected
//! results.
//!
//! # Verdict
//! - The response to a command must match a layout that was in effect while it was in flight:
//!   existing units, capacity, disk and protection. A unit that does not exist must be reported as
//!   not supported.
//! - A change of a unit must be reported once to each nexus and unit, as REPORTED LUNS DATA HAS
//!   CHANGED or CAPACITY DATA HAS CHANGED, before another command succeeds. Nothing else may be
//!   reported.
//! - Data written to a RAM disk can be read until the process exits without a successor.

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::rc::Rc;
use std::time::{Duration, Instant};

use fastrand::Rng;
use riser_scsi::iscsi::keys::{Key, Offer};
use riser_scsi::iscsi::login::InitiatorConfig;
use riser_scsi::iscsi::name::IscsiName;
use riser_scsi::iscsi::pdu::{FromTarget, NopOut, ScsiCommand, ScsiResponse};
use riser_scsi::iscsi::{Cid, CmdSn, Isid, Itt, Numbers, Tsih, Ttt};
use riser_scsi::sense::{Sense, SenseKey};
use riser_test_peers::pdus;
use riser_tests::history::BLOCK;

use crate::admin::{ADDED, RAM, SIDE, VisibleUnit};
use crate::coverage;
use crate::initiator::{Dial, Dialed, Verdict};
use crate::rival::connection::{Connection, Event};
use crate::stream::Stream;
use crate::target;

/// Timeout for a response or a login, after which the session is closed.
const SILENCE: Duration = Duration::from_secs(20);

/// Maximum delay between two commands and between two logins.
const SOON: Duration = Duration::from_millis(2);

/// Time after the last change in which watchers check continuously.
const EAGER: Duration = Duration::from_millis(20);

const GOOD: u8 = 0x00;
const CHECK_CONDITION: u8 = 0x02;

/// ASC and ASCQ of a unit attention.
type Kind = (u8, u8);

const LUNS_CHANGED: Kind = (0x3f, 0x0e);
const CAPACITY_CHANGED: Kind = (0x2a, 0x09);

/// POWER ON, RESET, OR BUS DEVICE RESET OCCURRED, and similar conditions.
const RESET: u8 = 0x29;

/// The units of a layout, and the period in which they may have been visible.
#[derive(Debug)]
struct Period {
    begin: Instant,
    /// Time when they are no longer served by any worker.
    end: Option<Instant>,
    units: Vec<VisibleUnit>,
}

impl Period {
    fn unit(&self, lun: u16) -> Option<&VisibleUnit> {
        self.units.iter().find(|one| one.lun == lun)
    }
}

/// All layouts of a run.
#[derive(Debug)]
pub struct Ledger {
    periods: Vec<Period>,
    /// Serial numbers by backend.
    serials: BTreeMap<&'static str, Vec<u8>>,
    /// Possible contents of block 0 on the RAM disk.
    ram: Vec<u8>,
    /// Time when the contents of the RAM disk were last lost.
    lost: Option<Instant>,
    /// Time of the last event that watchers may notice.
    noted: Instant,
}

impl Ledger {
    /// Creates a ledger with these initial units.
    #[must_use]
    pub fn new(units: Vec<VisibleUnit>, now: Instant) -> Self {
        Self {
            periods: vec![Period {
                begin: now,
                end: None,
                units,
            }],
            serials: BTreeMap::new(),
            ram: vec![0],
            lost: None,
            noted: now,
        }
    }

    /// Called for an event that watchers may notice.
    pub fn note(&mut self, now: Instant) {
        self.noted = now;
    }

    /// Called when other units may become visible.
    pub fn change(&mut self, units: Vec<VisibleUnit>, now: Instant) {
        self.note(now);
        self.periods.push(Period {
            begin: now,
            end: None,
            units,
        });
    }

    /// Called when only the last layout is visible.
    pub fn end_periods(&mut self, now: Instant) {
        self.note(now);
        let last = self.periods.len() - 1;
        for period in &mut self.periods[..last] {
            period.end.get_or_insert(now);
        }
    }

    /// Called when the contents of the RAM disk were lost.
    pub fn lose_memory(&mut self, now: Instant) {
        self.ram.push(0);
        self.lost = Some(now);
    }

    /// Returns all layouts that may have been in effect during this period.
    fn during(&self, begin: Instant, end: Instant) -> impl Iterator<Item = &Period> {
        let overlaps = move |period: &&Period| {
            period.begin <= end && period.end.is_none_or(|over| over >= begin)
        };
        self.periods.iter().filter(overlaps)
    }

    /// Returns all unit attentions of a unit that were caused by changes since then: the kind, the
    /// time when the cause started, and the time when it was completed, if it was.
    fn causes(&self, lun: u16, since: Instant) -> Vec<(Kind, Instant, Option<Instant>)> {
        let mut causes = Vec::new();
        for pair in self.periods.windows(2) {
            let [old, new] = pair else { continue };
            let Some(unit) = new.unit(lun) else { continue };
            if new.begin < since {
                continue;
            }
            let names = |period: &Period| {
                let units = period.units.iter();
                let names = units.map(|one| (one.lun, one.backend, one.is_read_only));
                names.collect::<Vec<_>>()
            };
            let mut cause = |kind| causes.push((kind, new.begin, old.end));
            if names(old) != names(new) {
                cause(LUNS_CHANGED);
            }
            let before = old.unit(lun).filter(|one| one.backend == unit.backend);
            if before.is_some_and(|before| before.blocks != unit.blocks) {
                cause(CAPACITY_CHANGED);
            }
        }
        causes
    }
}

/// A command in flight.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum WatcherCommand {
    TestUnitReady,
    ReadCapacity,
    SerialNumber,
    ReportLuns,
    /// WRITE of a block filled with this byte.
    Write(u8),
    Read,
}

#[derive(Debug)]
struct Task {
    look: WatcherCommand,
    lun: u16,
    tag: u32,
    begin: Instant,
    data: Vec<u8>,
}

/// A cause that was reported to a nexus, or doesn't need to be reported.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct ReportedCause {
    lun: u16,
    kind: Kind,
    begin: Instant,
    /// Set if it may still be reported.
    is_excused: bool,
}

/// A watcher.
#[derive(Debug)]
pub struct Watcher {
    index: usize,
    ledger: Rc<RefCell<Ledger>>,
    verdict: Verdict,
    dialed: Dialed,
    rng: Rng,
    connection: Option<Connection>,
    /// Start time of the login.
    since: Instant,
    is_up: bool,
    next: Instant,
    tag: u32,
    cmd_sn: CmdSn,
    task: Option<Task>,
    reported: Vec<ReportedCause>,
    /// The backend that each LUN is expected to use.
    taken: BTreeMap<u16, &'static str>,
    /// The backends of each LUN during its logins since it was last identified.
    led_to: BTreeMap<u16, BTreeSet<&'static str>>,
    /// At the end of the run: LUNs that have not been ready since then.
    missing: Option<BTreeSet<u16>>,
    /// Set if sessions should not be closed without a reason.
    is_quiet: bool,
    is_over: bool,
}

impl Watcher {
    /// Creates a watcher that will log in.
    #[must_use]
    pub fn new(
        index: usize,
        ledger: &Rc<RefCell<Ledger>>,
        verdict: &Verdict,
        dialed: &Dialed,
        (is_quiet, now, rng): (bool, Instant, Rng),
    ) -> Self {
        Self {
            index,
            ledger: Rc::clone(ledger),
            verdict: Rc::clone(verdict),
            dialed: Rc::clone(dialed),
            rng,
            connection: None,
            since: now,
            is_up: false,
            next: now,
            tag: 1,
            cmd_sn: CmdSn(1),
            task: None,
            reported: Vec::new(),
            taken: BTreeMap::new(),
            led_to: BTreeMap::new(),
            missing: None,
            is_quiet,
            is_over: false,
        }
    }

    /// Called when all troubles are over: each unit must become ready again.
    pub fn look_at_all(&mut self, now: Instant) {
        let ledger = self.ledger.borrow();
        let units = ledger.periods.iter().last().into_iter();
        let luns = units.flat_map(|period| period.units.iter().map(|unit| unit.lun));
        self.missing = Some(luns.collect());
        // A pending login or command keeps its full timeout.
        if self.connection.is_none() || (self.is_up && self.task.is_none()) {
            self.next = now;
        }
    }

    /// Returns the LUNs that have not become ready after [`Self::look_at_all`].
    #[must_use]
    pub fn missing(&self) -> &BTreeSet<u16> {
        const NONE: &BTreeSet<u16> = &BTreeSet::new();
        self.missing.as_ref().unwrap_or(NONE)
    }

    /// Closes its session permanently.
    pub fn end_session(&mut self) {
        (self.connection, self.task, self.is_over) = (None, None, true);
    }

    /// Returns the time of the next action.
    #[must_use]
    pub fn next_deadline(&self) -> Option<Instant> {
        let own = (!self.is_over).then_some(self.next);
        let leaving = self.connection.as_ref().and_then(Connection::next_deadline);
        own.into_iter().chain(leaving).min()
    }

    /// Performs pending work. Returns whether there was any.
    pub fn step(&mut self, now: Instant) -> bool {
        if self.is_over {
            return false;
        }
        let mut worked = self.connection.as_mut().is_some_and(|one| one.step(now));
        while let Some(event) = self.connection.as_mut().and_then(Connection::poll) {
            worked = true;
            self.on_event(event, now);
        }
        worked | self.act(now)
    }

    fn fail(&self, what: &str) {
        let why = format!("watcher {}: {what}", self.index);
        self.verdict.borrow_mut().get_or_insert(why);
    }

    fn on_event(&mut self, event: Event, now: Instant) {
        match event {
            Event::Ready(..) => {
                (self.is_up, self.next) = (true, now);
                self.reported.clear();
                self.take_units(now);
                // Changes since the start of the login may or may not be reported.
                for lun in [0, SIDE, RAM, ADDED] {
                    self.excuse(lun, &|_| true);
                }
            }
            Event::Pdu(pdu, numbers, data) => self.on_pdu(pdu, numbers, &data, now),
            Event::Ended => {
                if self.is_quiet && self.is_up {
                    self.fail("its session ended on a quiet day");
                }
                self.leave(now);
            }
            Event::Fault(what) => {
                self.fail(&what);
                self.leave(now);
            }
        }
    }

    /// A LUN is expected to use its backend at the time of the login or in any earlier session,
    /// depending on what the target remembers.
    fn take_units(&mut self, now: Instant) {
        for (lun, backend) in std::mem::take(&mut self.taken) {
            self.led_to.entry(lun).or_default().insert(backend);
        }
        let ledger = self.ledger.borrow();
        for lun in [0, SIDE, RAM, ADDED] {
            let units = ledger.during(self.since, now);
            let mut backends = units.filter_map(|period| Some(period.unit(lun)?.backend));
            let Some(first) = backends.next() else {
                continue;
            };
            let led_to = self.led_to.entry(lun).or_default();
            led_to.insert(first);
            led_to.extend(backends);
            if led_to.len() == 1 {
                self.taken.insert(lun, first);
            }
        }
    }

    fn leave(&mut self, now: Instant) {
        if self.connection.is_some() && !self.is_up {
            // The target may have accepted the login.
            self.take_units(now);
        }
        let task = self.task.take();
        if let Some(task) = task
            .as_ref()
            .filter(|t| t.look == WatcherCommand::SerialNumber)
        {
            // The target may have executed the INQUIRY.
            let ledger = self.ledger.borrow();
            let units = ledger.during(task.begin, now);
            let units = units.filter_map(|period| period.unit(task.lun));
            let led_to = self.led_to.entry(task.lun).or_default();
            led_to.extend(units.map(|unit| unit.backend));
        }
        // It's unknown whether this was written.
        if let Some(Task {
            look: WatcherCommand::Write(byte),
            lun: RAM,
            ..
        }) = task
        {
            self.ledger.borrow_mut().ram.push(byte);
        }
        (self.connection, self.is_up) = (None, false);
        self.wait(SOON * 4, now);
    }

    /// Waits for up to `most`, and longer if there were no recent changes.
    fn wait(&mut self, most: Duration, now: Instant) {
        let quiet = now - self.ledger.borrow().noted;
        let more = match self.missing().is_empty() {
            true => quiet.saturating_sub(EAGER) / 4,
            false => Duration::ZERO,
        };
        self.next = now + (most + more).mul_f64(self.rng.f64());
    }

    /// Runs the action that is due.
    fn act(&mut self, now: Instant) -> bool {
        if now < self.next {
            return false;
        }
        match (&self.connection, self.is_up, &self.task) {
            (None, ..) => self.log_in(now),
            (Some(_), true, None) => self.send_command(now),
            // Timeout.
            (Some(_), ..) => self.leave(now),
        }
        true
    }

    fn log_in(&mut self, now: Instant) {
        let name = format!("iqn.2026-01.org.example:watcher{}", self.index);
        self.cmd_sn = CmdSn(self.rng.u32(..));
        let config = InitiatorConfig {
            name: IscsiName::new(&name).expect("a name"),
            target: IscsiName::new(target::IQN).ok(),
            isid: Isid([0x80, 0, 0, 0, 2, self.index as u8]),
            tsih: Tsih(0),
            cid: Cid(0),
            cmd_sn: self.cmd_sn,
            credentials: None,
            target_credentials: None,
            offer: Offer::default()
                .with(Key::InitialR2T, 0)
                .with(Key::ImmediateData, 1),
            keys: vec![Key::InitialR2T, Key::ImmediateData],
        };
        let (ours, theirs) = Stream::pair();
        self.dialed.borrow_mut().push(Dial {
            from: IpAddr::from([10, 0, 7, 10 + self.index as u8]),
            to: target::tcp_address(0),
            stream: theirs,
        });
        self.connection = Some(Connection::new(ours, config, [7; 33], now));
        self.since = now;
        self.next = now + SILENCE;
    }

    /// Sends the next command.
    fn send_command(&mut self, now: Instant) {
        let lun = [0, SIDE, SIDE, RAM, ADDED][self.rng.usize(..5)];
        let byte = self.rng.u8(1..);
        // Only one watcher uses the RAM disk, so that the last write is known.
        let is_memory = lun == RAM && self.index == 0;
        let look = match self.rng.u8(..8) {
            0 => WatcherCommand::ReportLuns,
            1 | 2 => WatcherCommand::ReadCapacity,
            3 | 4 => WatcherCommand::SerialNumber,
            5 if lun == SIDE || is_memory => WatcherCommand::Write(byte),
            6 if is_memory => WatcherCommand::Read,
            _ => WatcherCommand::TestUnitReady,
        };
        let (look, lun) = match (self.missing().first(), look) {
            // If the LUN was changed, it must be identified first.
            (Some(lun), WatcherCommand::SerialNumber) => (look, *lun),
            (Some(lun), _) => (WatcherCommand::TestUnitReady, *lun),
            (None, WatcherCommand::ReportLuns) => (look, 0),
            (None, _) => (look, lun),
        };
        let (cdb, len): (Vec<u8>, u32) = match look {
            WatcherCommand::TestUnitReady => (vec![0; 6], 0),
            WatcherCommand::ReadCapacity => {
                let mut cdb = vec![0; 16];
                (cdb[0], cdb[1], cdb[13]) = (0x9e, 0x10, 32);
                (cdb, 32)
            }
            WatcherCommand::SerialNumber => (vec![0x12, 1, 0x80, 0, 255, 0], 255),
            WatcherCommand::ReportLuns => (vec![0xa0, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0], 256),
            WatcherCommand::Write(_) => (pdus::cdb10(0x2a, 0, 1).to_vec(), BLOCK as u32),
            WatcherCommand::Read => (pdus::cdb10(0x28, 0, 1).to_vec(), BLOCK as u32),
        };
        self.tag += 1;
        let connection = self.connection.as_mut().expect("it is up");
        let data = match look {
            WatcherCommand::Write(byte) => vec![byte; BLOCK],
            _ => Vec::new(),
        };
        let command = ScsiCommand {
            lun: [0, lun as u8, 0, 0, 0, 0, 0, 0],
            exp_stat_sn: connection.exp_stat_sn(),
            ..pdus::scsi_command(self.tag, self.cmd_sn.0, &cdb, !data.is_empty(), len)
        };
        connection.send(now, command.header(), &data);
        self.cmd_sn = self.cmd_sn.next();
        self.task = Some(Task {
            look,
            lun,
            tag: self.tag,
            begin: now,
            data: Vec::new(),
        });
        self.next = now + SILENCE;
    }

    fn on_pdu(&mut self, pdu: FromTarget, numbers: Numbers, data: &[u8], now: Instant) {
        let _ = numbers;
        match pdu {
            FromTarget::DataIn(header) => {
                let own = self.task.as_mut().filter(|task| task.tag == header.itt.0);
                if let Some(task) = own {
                    task.data.extend_from_slice(data);
                }
                if let Some(with) = header.status {
                    self.on_status(header.itt.0, with.status, None, now);
                }
            }
            FromTarget::ScsiResponse(response) => {
                let sense = ScsiResponse::sense_of(data).ok().and_then(Sense::parse);
                self.on_status(response.itt.0, response.status, sense, now);
            }
            FromTarget::NopIn(ping) if ping.ttt != Ttt::NONE => {
                let connection = self.connection.as_mut().expect("it sent this");
                let pong = NopOut {
                    itt: Itt::NONE,
                    ttt: ping.ttt,
                    exp_stat_sn: connection.exp_stat_sn(),
                    ..pdus::nop_out(0, self.cmd_sn.0)
                };
                connection.send(now, pong.header(), &[]);
            }
            FromTarget::AsyncMessage(_) if !self.is_quiet => self.leave(now),
            FromTarget::NopIn(_) | FromTarget::AsyncMessage(_) => {}
            other => self.fail(&format!("{other:?}")),
        }
    }

    fn on_status(&mut self, tag: u32, status: u8, sense: Option<Sense>, now: Instant) {
        let Some(task) = self.task.take_if(|task| task.tag == tag) else {
            return self.fail(&format!("status {status:#04x} for nothing"));
        };
        self.wait(SOON, now);
        let text = match sense {
            Some(sense) => format!("{}: {}", sense.key, sense.additional),
            None => format!("{status:#04x}"),
        };
        coverage::note("watcher's command", "answer", &text);
        tracing::debug!(watcher = self.index, lun = task.lun, look = ?task.look, "{text}");
        if let Some(missing) = &mut self.missing
            && (status, task.look) == (GOOD, WatcherCommand::TestUnitReady)
        {
            missing.remove(&task.lun);
        }
        let result = match (status, sense) {
            (GOOD, _) => self.on_success(&task, now),
            (CHECK_CONDITION, Some(sense)) => self.on_sense(&task, sense, now),
            _ => Ok(()),
        };
        if status != GOOD
            && let WatcherCommand::Write(byte) = task.look
            && task.lun == RAM
        {
            self.ledger.borrow_mut().ram.push(byte);
        }
        if let Err(why) = result {
            self.fail(&format!("LUN {}: {:?}: {why}", task.lun, task.look));
        }
    }

    fn on_sense(&mut self, task: &Task, sense: Sense, now: Instant) -> Result<(), String> {
        let code = (sense.additional.code, sense.additional.qualifier);
        let ledger = Rc::clone(&self.ledger);
        let ledger = ledger.borrow();
        let mut periods = ledger.during(task.begin, now);
        let mut is_some = |is_it: &dyn Fn(Option<&VisibleUnit>) -> bool| {
            periods.any(|period| is_it(period.unit(task.lun)))
        };
        let is_explained = match (sense.key, code) {
            (SenseKey::UnitAttention, kind) => return self.on_attention(task, kind, now),
            (SenseKey::IllegalRequest, (0x25, 0)) => is_some(&|unit| unit.is_none()),
            // There are no VPD pages without a unit.
            (SenseKey::IllegalRequest, (0x24, 0)) if task.look == WatcherCommand::SerialNumber => {
                is_some(&|unit| unit.is_none())
            }
            (SenseKey::DataProtect, (0x27, 0)) => {
                is_some(&|unit| unit.is_some_and(|unit| unit.is_read_only))
            }
            (SenseKey::IllegalRequest, _) => false,
            // Caused by a failing disk.
            _ => !self.is_quiet,
        };
        match is_explained {
            true => Ok(()),
            false => Err(format!("{}: {}", sense.key, sense.additional)),
        }
    }

    /// Checks that a unit attention has a cause that was not reported before.
    fn on_attention(&mut self, task: &Task, kind: Kind, now: Instant) -> Result<(), String> {
        if kind.0 == RESET {
            // It replaces pending conditions.
            self.excuse(task.lun, &|_| true);
            return Ok(());
        }
        if task.lun == 0 && kind != LUNS_CHANGED && kind != CAPACITY_CHANGED {
            return Ok(());
        }
        if kind == LUNS_CHANGED && self.may_be_stale(task, now) {
            // Other pending conditions may have been reported together with this one, either now or
            // earlier.
            self.excuse(task.lun, &|kind| kind == LUNS_CHANGED);
            return Ok(());
        }
        let causes = self.ledger.borrow().causes(task.lun, self.since);
        let all = causes
            .into_iter()
            .filter(|(of, begin, _)| *of == kind && *begin <= now);
        let all: Vec<_> = all.collect();
        let fresh = all.iter().filter(|(_, begin, _)| {
            let place = self.find_attention(task.lun, kind, *begin);
            place.is_none_or(|at| self.reported[at].is_excused)
        });
        if fresh.count() == 0 {
            return Err(format!("UNIT ATTENTION {kind:02x?} without a cause"));
        }
        // All causes that were completed before the command started are reported, or otherwise one
        // of the remaining causes.
        let certain = |at: Option<Instant>| at.is_some_and(|at| at < task.begin);
        let is_one = all.len() == 1;
        for (_, begin, at) in all {
            self.record_attention(task.lun, kind, begin, !is_one && !certain(at));
        }
        Ok(())
    }

    /// Returns whether this LUN may use another backend than the initiator expects. In this case
    /// all commands fail with REPORTED LUNS DATA HAS CHANGED until the LUN was identified.
    fn may_be_stale(&self, task: &Task, now: Instant) -> bool {
        let ledger = self.ledger.borrow();
        let backend_at = |period: &Period| period.unit(task.lun).map(|unit| unit.backend);
        let taken = self.taken.get(&task.lun);
        let led_to = self.led_to.get(&task.lun).into_iter().flatten();
        let mut taken_for: Vec<_> = taken.into_iter().chain(led_to).copied().collect();
        // The target doesn't know whether the backend at the time of the login was identified.
        if taken.is_none() {
            taken_for.extend(ledger.during(self.since, now).filter_map(backend_at));
        }
        let mut units = ledger.during(task.begin, now).filter_map(backend_at);
        units.any(|backend| taken_for.iter().any(|taken| *taken != backend))
    }

    /// Checks a successful command: it must have been executed by the backend that the initiator
    /// expects.
    fn check_identity(&mut self, task: &Task, now: Instant) -> Result<(), String> {
        let ledger = self.ledger.borrow();
        let units = ledger.during(task.begin, now);
        let units = units.filter_map(|period| period.unit(task.lun));
        let mut backends: Vec<_> = units.map(|unit| unit.backend).collect();
        backends.dedup();
        match (self.taken.get(&task.lun), &backends[..]) {
            (Some(taken), all) if !all.contains(taken) => {
                Err(format!("it succeeds at disk {all:?} instead of {taken}"))
            }
            (None, [one]) => {
                self.taken.insert(task.lun, one);
                Ok(())
            }
            _ => Ok(()),
        }
    }

    fn find_attention(&self, lun: u16, kind: Kind, begin: Instant) -> Option<usize> {
        let is_it = |one: &ReportedCause| (one.lun, one.kind, one.begin) == (lun, kind, begin);
        self.reported.iter().position(is_it)
    }

    fn record_attention(&mut self, lun: u16, kind: Kind, begin: Instant, is_excused: bool) {
        match self.find_attention(lun, kind, begin) {
            Some(at) => self.reported[at].is_excused &= is_excused,
            None => self.reported.push(ReportedCause {
                lun,
                kind,
                begin,
                is_excused,
            }),
        }
    }

    /// Makes reports for earlier changes optional.
    fn excuse(&mut self, lun: u16, is_it: &dyn Fn(Kind) -> bool) {
        let causes = self.ledger.borrow().causes(lun, self.since);
        for (kind, begin, _) in causes {
            if is_it(kind) && self.find_attention(lun, kind, begin).is_none() {
                self.record_attention(lun, kind, begin, true);
            }
        }
    }

    fn on_success(&mut self, task: &Task, now: Instant) -> Result<(), String> {
        let ledger = Rc::clone(&self.ledger);
        // INQUIRY and REPORT LUNS do not report unit attentions (SPC-5 5.15.1).
        if !matches!(
            task.look,
            WatcherCommand::SerialNumber | WatcherCommand::ReportLuns
        ) {
            self.check_identity(task, now)?;
            let causes = ledger.borrow().causes(task.lun, self.since);
            for (kind, begin, certain) in causes {
                let is_certain = certain.is_some_and(|at| at < task.begin);
                if is_certain && self.find_attention(task.lun, kind, begin).is_none() {
                    return Err(format!("it succeeds, and {kind:02x?} was not reported"));
                }
            }
        }
        if task.look == WatcherCommand::ReportLuns {
            for lun in [0, SIDE, RAM, ADDED] {
                self.excuse(lun, &|kind| kind == LUNS_CHANGED);
            }
        }
        let mut ledger = ledger.borrow_mut();
        let Ledger { serials, .. } = &mut *ledger;
        let mut learned = None;
        let known = std::mem::take(serials);
        let units = ledger.during(task.begin, now);
        let units = units.filter_map(|period| Some(period.unit(task.lun)?.backend));
        let mut backends: Vec<_> = units.collect();
        backends.dedup();
        let mut units = ledger.during(task.begin, now);
        let is_explained = units.any(|period| {
            let unit = period.unit(task.lun);
            match (task.look, unit) {
                (WatcherCommand::ReportLuns, _) => luns_of(&task.data) == numbers(period),
                (WatcherCommand::SerialNumber, None) => is_absent(&task.data),
                (WatcherCommand::SerialNumber, Some(unit)) => {
                    let serial = task.data.get(4..).unwrap_or_default();
                    let is_known = known.get(unit.backend);
                    let is_it = !is_absent(&task.data) && is_known.is_none_or(|k| k == serial);
                    if is_it && is_known.is_none() && backends.len() == 1 {
                        learned = Some((unit.backend, serial.to_vec()));
                    }
                    is_it
                }
                (_, None) => false,
                (WatcherCommand::ReadCapacity, Some(unit)) => {
                    blocks_of(&task.data) == Some(unit.blocks)
                }
                (WatcherCommand::Write(_), Some(unit)) => !unit.is_read_only,
                (WatcherCommand::TestUnitReady | WatcherCommand::Read, Some(_)) => true,
            }
        });
        drop(units);
        ledger.serials = known;
        ledger.serials.extend(learned);
        let serial = task.data.get(4..).unwrap_or_default();
        let mut known = ledger.serials.iter();
        let named = known.find(|(_, known)| *known == serial);
        if task.look == WatcherCommand::SerialNumber {
            self.led_to.remove(&task.lun);
            match named {
                Some((backend, _)) => {
                    self.taken.insert(task.lun, backend);
                }
                // Unknown backend: it may be any visible backend.
                None => {
                    self.taken.remove(&task.lun);
                    self.led_to.insert(task.lun, backends.into_iter().collect());
                }
            }
        }
        if !is_explained {
            let data = &task.data[..task.data.len().min(64)];
            return Err(format!("no layout explains GOOD with {data:02x?}"));
        }
        if task.lun == RAM {
            return check_memory(&mut ledger, task, self.since);
        }
        Ok(())
    }
}

/// Compares data from the RAM disk with its possible contents. If the session started before the
/// contents were lost, its writes may still go to the old contents.
fn check_memory(ledger: &mut Ledger, task: &Task, since: Instant) -> Result<(), String> {
    match task.look {
        WatcherCommand::Write(byte) => {
            ledger.ram = vec![byte];
            if ledger.lost.is_some_and(|lost| lost >= since) {
                ledger.ram.push(0);
            }
        }
        WatcherCommand::Read => {
            let byte = task.data.first().copied().unwrap_or_default();
            if !ledger.ram.contains(&byte) || task.data.iter().any(|other| *other != byte) {
                let may = &ledger.ram;
                return Err(format!("it reads {byte:#04x}, expected one of {may:02x?}"));
            }
            ledger.ram = vec![byte];
        }
        _ => {}
    }
    Ok(())
}

/// Returns whether there is no unit according to INQUIRY data.
fn is_absent(data: &[u8]) -> bool {
    data.first() == Some(&0x7f)
}

fn blocks_of(data: &[u8]) -> Option<u64> {
    let last = data.get(..8)?.try_into().ok()?;
    Some(u64::from_be_bytes(last) + 1)
}

/// Parses REPORT LUNS data. Returns LUN 0 and LUNs that may change.
fn luns_of(data: &[u8]) -> Vec<u16> {
    let list = data.get(8..).unwrap_or_default().chunks_exact(8);
    let numbers = list.map(|lun| u16::from(lun[1]));
    numbers
        .filter(|lun| [0, SIDE, RAM, ADDED].contains(lun))
        .collect()
}

fn numbers(period: &Period) -> Vec<u16> {
    period.units.iter().map(|one| one.lun).collect()
}
