//! iSCSI peers that occupy shared resources of a worker for as long as possible. With commands for
//! a hanging disk: memory of the pool, ring entries and kernel threads. With trickling data: memory
//! and the command order of a unit.
//!
//! # Verdict
//! No command from other initiators takes longer than [`PROMPT`](crate::initiator::PROMPT), and
//! none of their connections is closed. An upgrade while a disk is hanging is rejected before any
//! session has been closed, or it is reverted if the disk only starts to hang during the upgrade.

use std::collections::VecDeque;
use std::fmt::Write as _;
use std::net::{IpAddr, Ipv4Addr};
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
use crate::stream::Stream;
use crate::target;

/// Size of each hog's disk in MiB.
pub(crate) const MIB: u64 = 16;

/// Number of blocks of each disk that are not used by other initiators, which is also the first of
/// them.
const BLOCKS: u64 = MIB * 2048 / 2;

/// Time after which the load is established and operations on the disks are detected as hanging.
pub const ESTABLISHED: Duration = Duration::from_secs(5);

/// Login timeout, and the delay before the next login.
const LOGIN: Duration = Duration::from_secs(10);
const AGAIN: Duration = Duration::from_millis(100);

/// Interval between commands after the initial ones.
const REFILL: Duration = Duration::from_millis(10);

/// Maximum number of additional commands before the disk hangs.
const REFILLS: usize = 100;

/// Interval between pieces of trickling data.
const TRICKLE: Duration = Duration::from_millis(500);

/// Window of the target in bytes, for commands which are ordered while their data is trickling.
/// They are ordered when the second window starts.
const WINDOW: u32 = 64 << 10;

/// Commands sent by a hog.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Load {
    /// READ.
    Reads,
    /// WRITE, with the data sent immediately.
    Writes,
    /// WRITE SAME of zeros.
    Zeroes,
    /// All of the above, and SYNCHRONIZE CACHE.
    Mixed,
    /// WRITE, with the data sent at this rate in bytes per second.
    Trickle(u64),
    /// The same with the ORDERED attribute. The first window of data is sent immediately.
    OrderedTrickle(u64),
}

impl Load {
    /// Returns whether the commands will reach the disk.
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

/// Configuration of a hog.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct HogPlan {
    /// A disk which is only used by hogs, or `None` to use the shared disk.
    pub disk: Option<usize>,
    /// The file system of this disk needs a thread for any operation.
    pub blocks_threads: bool,
    /// Queue depth.
    pub depth: usize,
    /// Blocks per command.
    pub blocks: u64,
    /// Kind of the commands.
    pub load: Load,
    /// Set if it logs in again after it was disconnected.
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
    /// Returns whether other initiators are waiting for its commands because of the command order.
    #[must_use]
    pub fn delays_all(&self) -> bool {
        self.disk.is_none() && matches!(self.load, Load::OrderedTrickle(_))
    }

    /// Draws a hog whose disk hangs.
    fn executed(rng: &mut Rng, disks: &[bool]) -> Self {
        let disk = rng.usize(..disks.len());
        let load = [Load::Reads, Load::Writes, Load::Zeroes, Load::Mixed][rng.usize(..4)];
        let blocks = match load {
            // The data of these must be sent.
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

    /// Draws a hog with trickling data, from none to 1 MiB/s. The first hog may use the shared disk
    /// with ORDERED commands: each command delays all commands of this unit for a few seconds.
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

/// Returns the number of disks used by hogs.
#[must_use]
pub fn disk_count(plan: &Plan) -> usize {
    let disks = plan.hogs.iter().filter_map(|hog| hog.disk);
    disks.map(|disk| disk + 1).max().unwrap_or(0)
}

/// Returns the disks used by hogs.
pub(crate) fn disks(plan: &Plan) -> Vec<Disk> {
    let disk = |number| {
        let disk = Disk::new(0);
        let mut users = plan.hogs.iter().filter(|hog| hog.disk == Some(number));
        disk.set_blocks_threads(users.any(|hog| hog.blocks_threads));
        disk
    };
    (0..disk_count(plan)).map(disk).collect()
}

/// Returns the address of a hog.
fn address(index: usize) -> IpAddr {
    IpAddr::V4(Ipv4Addr::new(10, 0, 8, 1 + index as u8))
}

/// Returns access rules that map the units of hogs.
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

/// Draws troubles with hanging disks, and an upgrade at the same time. It either starts early,
/// before an operation has been detected as hanging, or late.
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

/// Draws the plan of a seed with hogs.
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
    // An ORDERED command has to wait for the commands of another slow hog before it, and the target
    // only disconnects hogs below its minimum rate. The queue of a faster hog can take minutes.
    if hogs.iter().any(HogPlan::delays_all) {
        let others = hogs.iter_mut().filter(|hog| !hog.delays_all());
        others
            .filter(|hog| hog.disk.is_none())
            .for_each(|hog| hog.disk = Some(disks.len()));
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
        // Large enough for the shares of initiators and units.
        pool: [16 << 20, 64 << 20][rng.usize(..2)],
        // Same as in the daemon.
        ring: ring_capacity(target::SESSIONS),
        troubles,
        ..Plan::default()
    }
}

/// State of a session.
#[derive(Debug)]
enum Stage {
    /// Disconnected until this time.
    Down {
        until: Instant,
    },
    LoggingIn {
        until: Instant,
    },
    Up,
    Over,
}

/// Data that was requested with R2T but has not been sent.
#[derive(Debug)]
struct Request {
    itt: Itt,
    ttt: Ttt,
    offset: u32,
    end: u32,
    data_sn: u32,
}

/// A hog, see the module documentation.
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
    /// Number of commands sent in this session.
    sent: usize,
    next_command: Instant,
    requests: VecDeque<Request>,
    /// Time when more data will be sent.
    next_data: Instant,
    /// Time when the hog leaves.
    until: Instant,
}

impl Hog {
    /// Creates a hog that will log in soon and leave at the given time.
    #[must_use]
    pub fn new(
        (index, plan): (usize, HogPlan),
        dialed: &Dialed,
        (now, until): (Instant, Instant),
        mut rng: Rng,
    ) -> Self {
        let begin = now + Duration::from_micros(rng.u64(..60_000));
        // If no disk hangs, there is no reason to wait any longer.
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

    /// Returns whether the hog has left.
    #[must_use]
    pub fn is_over(&self) -> bool {
        matches!(self.stage, Stage::Over)
    }

    /// Returns the time of the next action.
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

    /// Performs pending work. Returns whether there was any.
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
                // Disconnected by the target.
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
        let (ours, theirs) = Stream::pair();
        self.dialed.borrow_mut().push(Dial {
            from: address(self.index),
            to: target::tcp_address(0),
            stream: theirs,
        });
        let name = format!("iqn.2026-01.org.example:hog{}", self.index);
        // Don't send any unsolicited data.
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
        // The initial commands are sent in a single burst.
        if self.sent >= self.plan.depth {
            self.next_command = now + REFILL;
        }
    }

    fn on_pdu(&mut self, pdu: FromTarget, now: Instant) {
        let connection = self.connection.as_mut().expect("it was received");
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

    /// Sends requested data, oldest first: either all of it, or a trickle.
    fn send_data(&mut self, now: Instant) {
        let connection = self.connection.as_mut().expect("it is up");
        let is_first = |request: &Request| request.offset < WINDOW;
        let has_place = !self.requests.front().is_some_and(is_first);
        let rate = self.plan.load.rate();
        let is_ordered = matches!(self.plan.load, Load::OrderedTrickle(_));
        let mut most = u32::MAX;
        if let Some(rate) = rate.filter(|_| has_place || !is_ordered) {
            // A multiple of four bytes, even at low rates.
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
