//! Peers of iSCSI that occupy shared resources of a worker for as long as they can: memory of the
//! pool, slots of the ring and threads of the kernel, by commands for a disk that hangs; memory and
//! the order of a unit, by data that trickle.
//!
//! # Verdict
//! Of other initiators, no command takes longer than [`PROMPT`](crate::initiator::PROMPT), and no
//! connection ends. An upgrade while a disk hangs is refused before any session ends, or, if the disk
//! hangs only since then, undone.

use std::collections::VecDeque;
use std::fmt::Write as _;
use std::net::{IpAddr, Ipv4Addr};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use fastrand::Rng;
use riser_reactor::simulated::Disk;
use riser_scsi::iscsi::keys::{Key, Offer};
use riser_scsi::iscsi::login::InitiatorConfig;
use riser_scsi::iscsi::name::IscsiName;
use riser_scsi::iscsi::pdu::{DataOut, FromTarget, NopOut, R2t, ScsiCommand, TaskAttr};
use riser_scsi::iscsi::{Cid, CmdSn, Isid, Itt, Tsih, Ttt};
use riser_target::worker::ring_capacity;
use riser_test_peers::pdus;
use riser_tests::history::BLOCK;
use serde::{Deserialize, Serialize};

use crate::disks::DiskFault;
use crate::initiator::{Dial, Dialed, TIMEOUT};
use crate::plan::{Fault, Plan, ProcessFault, Protocol, Trouble};
use crate::rival::connection::{Connection, Event};
use crate::target;

/// Size of a hog's disk, in MiB.
pub(crate) const MIB: u64 = 16;

/// Blocks of each disk that no other initiator uses, and the first of them.
const BLOCKS: u64 = MIB * 2048 / 2;

/// Time after which the load of hogs is established, and operations of their disks count as hanging.
pub const ESTABLISHED: Duration = Duration::from_secs(5);

/// Time limit of a login, and the wait for the next one.
const LOGIN: Duration = Duration::from_secs(10);
const AGAIN: Duration = Duration::from_millis(100);

/// Interval between two commands beyond the first ones.
const REFILL: Duration = Duration::from_millis(10);

/// Commands for which a hog has time until its disk hangs.
const REFILLS: usize = 100;

/// Interval at which data trickle.
const TRICKLE: Duration = Duration::from_millis(500);

/// Window of the target, in bytes, where commands have a place in the order while their data trickle:
/// that is so from the second window on.
const WINDOW: u32 = 64 << 10;

/// Commands of a hog.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Load {
    /// READs.
    Reads,
    /// WRITEs, whose data it sends at once.
    Writes,
    /// WRITE SAME of zeroes.
    Zeroes,
    /// These and SYNCHRONIZE CACHE.
    Mixed,
    /// WRITEs, whose data it sends at this rate, in bytes a second.
    Trickle(u64),
    /// Such WRITEs with the ORDERED attribute. The first window of data is sent at once.
    OrderedTrickle(u64),
}

impl Load {
    /// Whether its commands reach the disk.
    #[must_use]
    pub fn is_executed(self) -> bool {
        self.rate().is_none()
    }

    fn rate(self) -> Option<u64> {
        match self {
            Self::Trickle(rate) | Self::OrderedTrickle(rate) => Some(rate),
            _ => None,
        }
    }
}

/// A hog.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct HogPlan {
    /// Its disk, which only hogs use; without one, the disk of all.
    pub disk: Option<usize>,
    /// The file system of that disk executes nothing without a thread.
    pub blocks_threads: bool,
    /// Commands at once.
    pub depth: usize,
    /// Blocks of a command.
    pub blocks: u64,
    /// Kind of the commands.
    pub load: Load,
    /// It logs in again when the target disconnects it.
    pub returns: bool,
}

impl Default for HogPlan {
    fn default() -> Self {
        Self {
            disk: Some(0),
            blocks_threads: false,
            depth: 1,
            blocks: 8,
            load: Load::Writes,
            returns: false,
        }
    }
}

impl HogPlan {
    /// Whether other initiators wait for its commands in the order of their unit.
    #[must_use]
    pub fn delays_all(&self) -> bool {
        self.disk.is_none() && matches!(self.load, Load::OrderedTrickle(_))
    }

    /// A hog whose disk hangs.
    fn executed(rng: &mut Rng, disks: &[bool]) -> Self {
        let disk = rng.usize(..disks.len());
        let load = [Load::Reads, Load::Writes, Load::Zeroes, Load::Mixed][rng.usize(..4)];
        let blocks = match load {
            // Their data have to be sent.
            Load::Writes | Load::Mixed => [1, 8, 128, 512][rng.usize(..4)],
            _ => [1, 8, 128, 2048][rng.usize(..4)],
        };
        Self {
            disk: Some(disk),
            blocks_threads: disks[disk],
            depth: [1, 9, 32, 127][rng.usize(..4)],
            blocks,
            load,
            returns: rng.bool(),
        }
    }

    /// A hog whose data trickle, from silence to 1 MiB/s. The first one may use the disk of all with
    /// ORDERED commands: each of these delays other commands of the unit for some seconds.
    fn trickle(rng: &mut Rng, (index, free): (usize, usize)) -> Self {
        const RATES: [u64; 8] = [0, 2, 100, 4 << 10, 64 << 10, 256 << 10, 600 << 10, 1 << 20];
        let rate = RATES[rng.usize(..RATES.len())];
        let is_ordered = rng.bool();
        Self {
            disk: (rng.bool() || is_ordered && index > 0).then_some(free),
            depth: if is_ordered {
                1
            } else {
                [1, 16, 127][rng.usize(..3)]
            },
            blocks: if is_ordered { 4096 } else { 2048 },
            load: match is_ordered {
                true => Load::OrderedTrickle(rate),
                false => Load::Trickle(rate),
            },
            returns: rng.bool(),
            ..Self::default()
        }
    }
}

/// Number of disks that hogs have.
#[must_use]
pub fn disk_count(plan: &Plan) -> usize {
    let disks = plan.hogs.iter().filter_map(|hog| hog.disk);
    disks.map(|disk| disk + 1).max().unwrap_or(0)
}

/// The disks of hogs.
pub(crate) fn disks(plan: &Plan) -> Vec<Disk> {
    let disk = |number| {
        let disk = Disk::new(0);
        let mut users = plan.hogs.iter().filter(|hog| hog.disk == Some(number));
        disk.set_blocks_threads(users.any(|hog| hog.blocks_threads));
        disk
    };
    (0..disk_count(plan)).map(disk).collect()
}

/// Address of a hog.
fn address(index: usize) -> IpAddr {
    IpAddr::V4(Ipv4Addr::new(10, 0, 8, 1 + index as u8))
}

/// Rules of access by which hogs have their units.
pub(crate) fn rules(hogs: &[HogPlan]) -> String {
    let mut rules = String::new();
    for (index, hog) in hogs.iter().enumerate() {
        let backend = hog.disk.map_or("d".to_owned(), |disk| format!("h{disk}"));
        let _ = write!(
            rules,
            "{{ address: {}, luns: {{ 0: {backend} }} }}, ",
            address(index)
        );
    }
    rules
}

/// Disks that hang, in the plan of a seed, and an upgrade at that time: early, when no operation counts
/// as hanging yet, or late.
fn troubles(rng: &mut Rng, disks: usize) -> Vec<Trouble> {
    let trouble = |from, length, fault| Trouble {
        from: Duration::from_micros(from),
        until: Duration::from_micros(from + length),
        fault,
    };
    let mut hang = |disk| {
        let (from, length) = (rng.u64(0..30_000), rng.u64(25_000_000..50_000_000));
        trouble(from, length, Fault::Disk(DiskFault::HangDisk(disk)))
    };
    let mut troubles: Vec<_> = (0..disks).map(&mut hang).collect();
    let at = match rng.u8(..4) {
        0 | 1 => return troubles,
        2 => rng.u64(..3_500_000),
        _ => rng.u64(5_100_000..15_000_000),
    };
    let upgrade = [ProcessFault::Upgrade, ProcessFault::FailedUpgrade][rng.usize(..2)];
    troubles.push(trouble(at, 1_000, Fault::Process(upgrade)));
    troubles
}

/// The plan of a seed with hogs.
pub(crate) fn draw(seed: u64, is_wanted: impl Fn(Fault) -> bool) -> Plan {
    let rng = &mut Rng::with_seed(seed ^ 0x4096_0001);
    let protocols = [Protocol::Srp, Protocol::Iser, Protocol::Iscsi];
    let initiators = (0..rng.usize(1..=3)).map(|_| protocols[rng.usize(..3)]);
    let initiators = initiators.collect();
    let kinds = [(true, false), (true, false), (false, true), (true, true)];
    let (hangs, trickles) = kinds[rng.usize(..4)];
    let disks: Vec<bool> = (0..rng.usize(1..=2)).map(|_| rng.bool()).collect();
    let (mut hogs, mut troubles) = (Vec::new(), Vec::new());
    if hangs {
        let number = rng.usize(1..=6);
        hogs.extend((0..number).map(|_| HogPlan::executed(rng, &disks)));
        troubles = self::troubles(rng, disks.len());
        troubles.retain(|trouble| is_wanted(trouble.fault));
    }
    if trickles {
        let number = rng.usize(1..=4);
        let trickle = |index| HogPlan::trickle(rng, (index, disks.len()));
        hogs.extend((0..number).map(trickle));
    }
    let window = match hogs.iter().any(HogPlan::delays_all) {
        true => WINDOW,
        false => [1 << 20, WINDOW][rng.usize(..2)],
    };
    Plan {
        seed,
        workers: [1, 1, 2][rng.usize(..3)],
        initiators,
        private_units: rng.bool(),
        hogs,
        pause: Duration::from_millis(rng.u64(200..2_000)),
        tasks: rng.usize(1..=4),
        commands: rng.usize(10..=20),
        blocks: [16, 64, 512][rng.usize(..3)],
        longest: [8, 64, 300][rng.usize(..3)],
        write_cache: rng.u8(..4) > 0,
        timeout: TIMEOUT,
        window,
        // Enough for the parts of initiators and units.
        pool: [16 << 20, 64 << 20][rng.usize(..2)],
        // As the daemon makes it.
        ring: ring_capacity(target::SESSIONS),
        troubles,
        ..Plan::default()
    }
}

/// State of a hog's session.
#[derive(Debug)]
enum Stage {
    /// No session until then.
    Down {
        until: Instant,
    },
    LoggingIn {
        until: Instant,
    },
    Up,
    Over,
}

/// Data that were requested and not sent.
#[derive(Debug)]
struct Request {
    itt: Itt,
    ttt: Ttt,
    offset: u32,
    end: u32,
    data_sn: u32,
}

/// See the module's documentation.
#[derive(Debug)]
pub struct Hog {
    index: usize,
    plan: HogPlan,
    dialed: Dialed,
    rng: Rng,
    stage: Stage,
    connection: Option<Connection>,
    cmd_sn: CmdSn,
    max_cmd_sn: CmdSn,
    outstanding: usize,
    /// Commands that were sent in this session.
    sent: usize,
    next_command: Instant,
    requests: VecDeque<Request>,
    /// When the next data leave.
    next_data: Instant,
    /// When it leaves.
    until: Instant,
}

impl Hog {
    /// A hog that logs in soon, and leaves at a time.
    #[must_use]
    pub fn new(
        (index, plan): (usize, HogPlan),
        dialed: &Dialed,
        (now, until): (Instant, Instant),
        mut rng: Rng,
    ) -> Self {
        let begin = now + Duration::from_micros(rng.u64(..60_000));
        // Without a disk that hangs, there is nothing to wait for.
        let until = until.max(now + Duration::from_secs(30));
        Self {
            index,
            plan,
            dialed: dialed.clone(),
            rng,
            stage: Stage::Down { until: begin },
            connection: None,
            cmd_sn: CmdSn(1),
            max_cmd_sn: CmdSn(0),
            outstanding: 0,
            sent: 0,
            next_command: begin,
            requests: VecDeque::new(),
            next_data: begin,
            until,
        }
    }

    /// Whether it has left.
    #[must_use]
    pub fn is_over(&self) -> bool {
        matches!(self.stage, Stage::Over)
    }

    /// Time of the next action.
    #[must_use]
    pub fn next_deadline(&self) -> Option<Instant> {
        let own = match self.stage {
            Stage::Down { until } | Stage::LoggingIn { until } => until,
            Stage::Up => {
                let command = self.may_send().then_some(self.next_command);
                let data = (!self.requests.is_empty()).then_some(self.next_data);
                let all = command.into_iter().chain(data);
                all.fold(self.until, Instant::min)
            }
            Stage::Over => return None,
        };
        let connection = self.connection.as_ref();
        let leaving = connection.and_then(Connection::next_deadline);
        Some(leaving.map_or(own, |at| at.min(own)).min(self.until))
    }

    /// Does what there is to do; returns whether there was anything.
    pub fn step(&mut self, now: Instant) -> bool {
        if self.is_over() {
            return false;
        }
        if now >= self.until {
            self.leave();
            return true;
        }
        let mut worked = false;
        if let Some(connection) = &mut self.connection {
            worked |= connection.step(now);
        }
        while let Some(event) = self.connection.as_mut().and_then(Connection::poll) {
            worked = true;
            match event {
                Event::Ready(..) => self.stage = Stage::Up,
                Event::Pdu(pdu, numbers, _) => {
                    if self.max_cmd_sn.is_before(numbers.max_cmd_sn) {
                        self.max_cmd_sn = numbers.max_cmd_sn;
                    }
                    self.on_pdu(pdu, now);
                }
                // The target disconnects it.
                Event::Ended | Event::Fault(_) => self.lose(now),
            }
        }
        match self.stage {
            Stage::Down { until } if until <= now => self.log_in(now),
            Stage::LoggingIn { until } if until <= now => self.lose(now),
            Stage::Up if self.may_send() && self.next_command <= now => self.send_command(now),
            Stage::Up if !self.requests.is_empty() && self.next_data <= now => self.send_data(now),
            _ => return worked,
        }
        true
    }

    fn leave(&mut self) {
        self.connection = None;
        self.stage = Stage::Over;
    }

    fn lose(&mut self, now: Instant) {
        self.connection = None;
        self.requests.clear();
        (self.outstanding, self.sent) = (0, 0);
        self.stage = match self.plan.returns {
            true => Stage::Down { until: now + AGAIN },
            false => Stage::Over,
        };
    }

    fn log_in(&mut self, now: Instant) {
        let (ours, theirs) = UnixStream::pair().expect("two sockets");
        for end in [&ours, &theirs] {
            end.set_nonblocking(true).expect("a socket");
        }
        self.dialed.borrow_mut().push(Dial {
            from: address(self.index),
            to: target::tcp_address(0),
            stream: theirs,
        });
        let name = format!("iqn.2026-01.org.example:hog{}", self.index);
        // No data leave before they are requested.
        let offer = Offer::default()
            .with(Key::InitialR2T, 1)
            .with(Key::ImmediateData, 0)
            .with(Key::MaxBurstLength, 1 << 20);
        let config = InitiatorConfig {
            name: IscsiName::new(&name).expect("a name"),
            target: IscsiName::new(target::IQN).ok(),
            isid: Isid([0x80, 0, 0, 0, 8, self.index as u8]),
            tsih: Tsih(0),
            cid: Cid(0),
            cmd_sn: CmdSn(1),
            credentials: None,
            target_credentials: None,
            offer,
            keys: vec![Key::InitialR2T, Key::ImmediateData, Key::MaxBurstLength],
        };
        (self.cmd_sn, self.max_cmd_sn) = (CmdSn(1), CmdSn(1));
        self.connection = Some(Connection::new(ours, config, [7; 33], now));
        self.stage = Stage::LoggingIn { until: now + LOGIN };
    }

    fn may_send(&self) -> bool {
        let is_open = !self.max_cmd_sn.is_before(self.cmd_sn);
        let most = 3 * self.plan.depth + REFILLS;
        is_open && self.sent < most && self.outstanding < self.plan.depth
    }

    fn send_command(&mut self, now: Instant) {
        let connection = self.connection.as_mut().expect("it is up");
        let load = match self.plan.load {
            Load::Mixed => {
                [Load::Reads, Load::Writes, Load::Zeroes, Load::Mixed][self.rng.usize(..4)]
            }
            load => load,
        };
        let blocks = self.plan.blocks.min(BLOCKS);
        let first = BLOCKS + self.rng.u64(..=BLOCKS - blocks);
        let cdb = |op| pdus::cdb10(op, first as u32, blocks as u16);
        let bytes = blocks as u32 * BLOCK as u32;
        let (cdb, writes, len) = match load {
            Load::Reads => (cdb(0x28), false, bytes),
            Load::Zeroes => (cdb(0x41), true, BLOCK as u32),
            Load::Mixed => (pdus::cdb10(0x35, 0, 0), false, 0),
            Load::Writes | Load::Trickle(_) | Load::OrderedTrickle(_) => (cdb(0x2a), true, bytes),
        };
        let command = ScsiCommand {
            attribute: match load {
                Load::OrderedTrickle(_) => TaskAttr::Ordered,
                _ => TaskAttr::Simple,
            },
            exp_stat_sn: connection.exp_stat_sn(),
            ..pdus::scsi_command(self.cmd_sn.0, self.cmd_sn.0, &cdb, writes, len)
        };
        connection.send(now, command.header(), &[]);
        self.cmd_sn = self.cmd_sn.next();
        self.outstanding += 1;
        self.sent += 1;
        // The first ones leave together.
        if self.sent >= self.plan.depth {
            self.next_command = now + REFILL;
        }
    }

    fn on_pdu(&mut self, pdu: FromTarget, now: Instant) {
        let connection = self.connection.as_mut().expect("it was heard");
        match pdu {
            FromTarget::R2t(R2t {
                itt,
                ttt,
                offset,
                len,
                ..
            }) => {
                let (end, data_sn) = (offset + len, 0);
                self.requests.push_back(Request {
                    itt,
                    ttt,
                    offset,
                    end,
                    data_sn,
                });
            }
            FromTarget::ScsiResponse(_) => self.outstanding = self.outstanding.saturating_sub(1),
            FromTarget::DataIn(data) if data.status.is_some() => {
                self.outstanding = self.outstanding.saturating_sub(1);
            }
            FromTarget::NopIn(ping) if ping.ttt != Ttt::NONE => {
                let pong = NopOut {
                    exp_stat_sn: connection.exp_stat_sn(),
                    ..pdus::pong(&ping, self.cmd_sn.0)
                };
                connection.send(now, pong.header(), &[]);
            }
            _ => {}
        }
    }

    /// Sends data that were requested first: all of them, or as many as trickle.
    fn send_data(&mut self, now: Instant) {
        let connection = self.connection.as_mut().expect("it is up");
        let is_first = |request: &Request| request.offset < WINDOW;
        let has_place = !self.requests.front().is_some_and(is_first);
        let rate = self.plan.load.rate();
        let is_ordered = matches!(self.plan.load, Load::OrderedTrickle(_));
        let mut most = u32::MAX;
        if let Some(rate) = rate.filter(|_| has_place || !is_ordered) {
            // Words of four bytes, however seldom.
            let piece = (rate as f64 * TRICKLE.as_secs_f64()).max(4.0);
            most = piece as u32 & !3;
            self.next_data = match rate {
                0 => self.until,
                rate => now + Duration::from_secs_f64(f64::from(most) / rate as f64),
            };
            if rate == 0 {
                return;
            }
        }
        while most > 0
            && let Some(request) = self.requests.front_mut()
        {
            let len = (request.end - request.offset)
                .min(most)
                .min(connection.max_send);
            let is_final = request.offset + len == request.end;
            let header = DataOut {
                exp_stat_sn: connection.exp_stat_sn(),
                ..pdus::data_out(
                    request.itt.0,
                    request.ttt,
                    request.data_sn,
                    request.offset,
                    is_final,
                )
            };
            connection.send(now, header.header(), &vec![0x5a; len as usize]);
            request.offset += len;
            request.data_sn += 1;
            most -= len;
            if is_final {
                self.requests.pop_front();
            }
        }
    }
}
