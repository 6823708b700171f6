//! [`Plan`]: everything that a seed determines before a run starts. It can be converted from and to
//! YAML ([`crate::text`]).

use std::time::Duration;

use fastrand::Rng;
use riser_transport::verbs::Mtu;
use serde::{Deserialize, Serialize};

use crate::admin::AdminFault;
use crate::cheat::CheatPlan;
use crate::disks::DiskFault;
use crate::foreign::{self, ForeignFault, Traits};
use crate::hog::{self, HogPlan};
use crate::initiator::{ORDER_DELAY, PROMPT, TIMEOUT};
use crate::keeper::SaveFailure;
use crate::model::Knowledge;
use crate::nics::{NicFault, Place};
use crate::rival::RivalPlan;
use crate::text;

/// Maximum packet loss in percent without closed connections.
const MILD: f64 = 1.0;

/// Maximum delay without closed connections.
const BRIEF: Duration = Duration::from_millis(500);

/// Seeds with this remainder modulo 8 use a foreign target.
const FOREIGN: u64 = 7;

/// Seeds with this remainder modulo 16 use hogs.
const HOGS: u64 = 3;

/// Protocol of an initiator.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Protocol {
    /// SRP over RDMA.
    Srp,
    /// iSER over RDMA.
    Iser,
    /// iSCSI over TCP.
    Iscsi,
}

/// A kind of trouble.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Fault {
    /// The RDMA network loses, duplicates, corrupts and reorders packets, each in percent.
    Wire {
        /// Lost packets.
        loss: f64,
        /// Duplicated packets.
        duplication: f64,
        /// Corrupted packets.
        corruption: f64,
        /// Packets that are overtaken by later ones.
        reorder: f64,
    },
    /// Disconnects an initiator, for RDMA and TCP.
    Partition(usize),
    /// Drops everything sent to a place, but not from it.
    Deaf(Place),
    /// Drops everything sent from a place, but not to it.
    Mute(Place),
    /// Networks randomly delay some packets and deliver them later, possibly after their connection
    /// was closed.
    Delay {
        /// The share of packets and TCP segments that is delayed.
        share: f64,
        /// Maximum delay.
        #[serde(with = "text::duration")]
        most: Duration,
    },
    /// TCP connections are reset, with this probability.
    CutTcp(f64),
    /// Disconnects a path of the target.
    LosePath(usize),
    /// TCP connections don't transfer any data.
    StallTcp,
    /// Sockets of the target only send and receive a few bytes at once.
    NarrowTcp,
    /// Disk operations don't complete.
    StallDisks,
    /// Disk operations fail, with this probability.
    FailDisks(f64),
    /// Another disk fault.
    Disk(DiskFault),
    /// Disk transfers are short, with this probability.
    ShortTransfers(f64),
    /// Kills the target process, and starts it again at the end.
    CrashTarget,
    /// Power loss of the target host, which also loses data that is not on stable storage. The host
    /// is started again at the end.
    PowerCut,
    /// A device fault.
    Nic(Place, NicFault),
    /// The target cannot save its state.
    FailSaves(SaveFailure),
    /// The host of an initiator is disconnected, and returns with another address at the end.
    MoveInitiator(usize),
    /// Starts another initiator with the same name, and kills it at the end.
    Twin(usize),
    /// Kills an initiator process, and starts it again at the end with the same names.
    KillInitiator {
        /// The initiator.
        index: usize,
        /// Also disconnects its host, so that peers don't notice that the connections were closed.
        vanishes: bool,
    },
    /// An initiator process exits normally, and starts again at the end or when it has exited.
    RestartInitiator(usize),
    /// An administrator changes the configuration.
    Admin(AdminFault),
    /// A fault of the target process or its threads.
    Process(ProcessFault),
    /// A fault of a foreign target.
    Foreign(ForeignFault),
}

/// Faults where the target process exits, and faults of its workers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ProcessFault {
    /// The process exits normally, and starts again at the end or when it has exited.
    Restart,
    /// The process hands over to a new program.
    Upgrade,
    /// The new program cannot be started, so the process takes back its state and continues.
    FailedUpgrade,
    /// A worker thread fails, so the process exits and is started again.
    FailWorker(usize),
    /// A worker thread is stalled.
    StallWorker(usize),
}

impl ProcessFault {
    /// Draws faults of the target process for a seed.
    fn draw(rng: &mut Rng) -> Vec<Trouble> {
        let number = [0, 0, 0, 1, 2][rng.usize(..5)];
        let one = |_| {
            let latest = [20_000, 120_000][rng.usize(..2)];
            let from = Duration::from_micros(rng.u64(0..latest));
            let length = [1_000, 50_000, 12_000_000][rng.usize(..3)];
            let fault = match rng.u8(..8) {
                0 | 1 => Self::Restart,
                2 | 3 => Self::Upgrade,
                4 => Self::FailedUpgrade,
                5 => Self::FailWorker(rng.usize(..4)),
                _ => Self::StallWorker(rng.usize(..4)),
            };
            Trouble {
                from,
                until: from + Duration::from_micros(rng.u64(1..=length)),
                fault: Fault::Process(fault),
            }
        };
        (0..number).map(one).collect()
    }
}

impl Fault {
    /// Returns the names of all kinds, as used in plan files.
    #[must_use]
    pub fn kinds() -> Vec<&'static str> {
        const NESTED: [&str; 5] = ["disk", "nic", "admin", "process", "foreign"];
        let own = text::variants_of::<Self>().iter();
        let own = own.filter(|name| !NESTED.contains(name));
        let disks = text::variants_of::<DiskFault>();
        let nics = text::variants_of::<NicFault>();
        let changes = text::variants_of::<AdminFault>();
        let processes = text::variants_of::<ProcessFault>();
        let own = own.chain(disks).chain(nics);
        let foreign = text::variants_of::<ForeignFault>();
        let all = own.chain(changes).chain(processes).chain(foreign);
        all.copied().collect()
    }

    /// Returns the names of all kinds that are drawn by seeds.
    #[must_use]
    pub fn drawn_kinds() -> Vec<&'static str> {
        let mut kinds = Self::kinds();
        // `tests/enumerate.rs` tests failed calls one by one.
        kinds.retain(|kind| *kind != "fail-call");
        kinds
    }

    /// Returns the name of this kind.
    #[must_use]
    pub fn kind(self) -> &'static str {
        match self {
            Self::Disk(fault) => text::variant_of(&fault),
            Self::Nic(_, fault) => text::variant_of(&fault),
            Self::Admin(change) => text::variant_of(&change),
            Self::Process(fault) => text::variant_of(&fault),
            Self::Foreign(fault) => text::variant_of(&fault),
            fault => text::variant_of(&fault),
        }
    }

    /// Returns whether disk operations fail or written data is lost.
    #[must_use]
    pub fn fails_disks(self) -> bool {
        match self {
            Self::FailDisks(_) => true,
            Self::Disk(fault) => !matches!(
                fault,
                DiskFault::StallDisk(_) | DiskFault::StallSome(_) | DiskFault::HangDisk(_)
            ),
            _ => false,
        }
    }

    /// Returns whether a device of the target is removed.
    #[must_use]
    pub fn unplugs_target(self) -> bool {
        matches!(self, Self::Nic(Place::Path(_), NicFault::Unplug))
    }

    /// Returns whether this initiator is not running during the fault.
    #[must_use]
    pub fn ends_initiator(self, one: usize) -> bool {
        match self {
            Self::KillInitiator { index, .. }
            | Self::MoveInitiator(index)
            | Self::RestartInitiator(index) => index == one,
            _ => false,
        }
    }

    /// Returns whether retransmission is sufficient to recover, if necessary.
    fn is_mild(self) -> bool {
        match self {
            Self::Wire {
                loss, corruption, ..
            } => loss + corruption <= MILD,
            Self::Delay { share, most } => share * 100.0 <= MILD && most <= BRIEF,
            Self::Admin(change) => change.is_mild(),
            // Only used by hogs.
            Self::Disk(DiskFault::HangDisk(_)) => true,
            _ => false,
        }
    }

    /// Returns whether the target is not running during the fault.
    #[must_use]
    pub fn ends_target(self) -> bool {
        match self {
            Self::CrashTarget | Self::PowerCut => true,
            Self::Process(fault) => !matches!(fault, ProcessFault::StallWorker(_)),
            _ => false,
        }
    }
}

/// A fault, with its start and end.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Trouble {
    /// Start time.
    #[serde(with = "text::duration")]
    pub from: Duration,
    /// End time.
    #[serde(with = "text::duration")]
    pub until: Duration,
    /// Kind of the fault.
    pub fault: Fault,
}

/// The plan of a run. If a field is missing in a file, the value from [`Plan::default`] is used, so
/// old files remain valid if a new field is disabled by default.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Plan {
    /// Seed of all random numbers.
    pub seed: u64,
    /// Number of workers in the target.
    pub workers: usize,
    /// Protocols of the initiators.
    pub initiators: Vec<Protocol>,
    /// Number of paths from each initiator to the disk.
    pub paths: usize,
    /// Initiators of another implementation.
    pub rivals: Vec<RivalPlan>,
    /// Cheating peers.
    pub cheats: Vec<CheatPlan>,
    /// Number of concurrent tasks per initiator.
    pub tasks: usize,
    /// Number of commands per task.
    pub commands: usize,
    /// Maximum number of connections per iSCSI session at the target.
    pub connections: usize,
    /// Error recovery level offered by the target.
    pub recovery_level: u8,
    /// Maximum number of commands per session at the target.
    pub queue_depth: u16,
    /// Number of blocks that are used. This is small, so that commands conflict.
    pub blocks: u64,
    /// Maximum number of blocks per command.
    pub longest: u64,
    /// Command timeout. With a short timeout, commands are aborted and units are reset.
    #[serde(with = "text::duration")]
    pub timeout: Duration,
    /// Set if the disk reports a volatile cache to initiators.
    pub write_cache: bool,
    /// Type of protection information of the disk, or 0 if it has none.
    pub protection: u8,
    /// Latency of an RDMA packet.
    #[serde(with = "text::duration")]
    pub latency: Duration,
    /// Maximum path MTU of the target and of the initiators.
    #[serde(with = "text::mtus")]
    pub mtus: [Mtu; 2],
    /// Number of packets that fit into the socket of an RDMA device.
    pub socket_room: usize,
    /// Maximum number of packets per segmented send.
    pub segments: usize,
    /// Size of a worker's pool for data in bytes. This is small, so that commands wait for memory.
    pub pool: usize,
    /// Maximum number of bytes in memory for the data of a single command.
    pub window: u32,
    /// Size of the send queue for an SRP channel, if it is limited.
    pub sends: Option<u32>,
    /// Number of entries in a worker's ring.
    pub ring: u32,
    /// Set if each initiator has a private unit that is not visible to other initiators.
    pub private_units: bool,
    /// Peers that occupy shared resources for as long as possible.
    pub hogs: Vec<HogPlan>,
    /// Maximum pause between two commands of a task.
    #[serde(with = "text::duration")]
    pub pause: Duration,
    /// Number of pings with data from a peer that doesn't read the responses for some time.
    pub flood: u32,
    /// Set if one of our users has the unit that the administrator replaces by another disk.
    pub exchange: bool,
    /// Set if the initiator connects to a foreign target instead of ours.
    pub foreign: Option<Traits>,
    /// Faults.
    pub troubles: Vec<Trouble>,
}

impl Default for Plan {
    /// A single initiator without any faults.
    fn default() -> Self {
        Self {
            seed: 1,
            workers: 1,
            initiators: vec![Protocol::Srp],
            paths: 1,
            rivals: Vec::new(),
            cheats: Vec::new(),
            tasks: 1,
            commands: 10,
            connections: 1,
            recovery_level: 0,
            queue_depth: 128,
            blocks: 16,
            longest: 8,
            timeout: Duration::from_secs(60),
            write_cache: true,
            protection: 0,
            latency: Duration::from_micros(10),
            mtus: [Mtu::Mtu4096; 2],
            socket_room: usize::MAX,
            segments: 1,
            pool: 2 << 20,
            window: 1 << 20,
            sends: None,
            ring: 511,
            private_units: false,
            hogs: Vec::new(),
            pause: Duration::ZERO,
            flood: 0,
            exchange: false,
            foreign: None,
            troubles: Vec::new(),
        }
    }
}

impl Plan {
    /// Returns whether the target bypasses the page cache.
    pub(crate) fn is_direct(&self) -> bool {
        !self.seed.is_multiple_of(4) && self.protection == 0
    }

    /// Returns the plan of a seed.
    #[must_use]
    pub fn of(seed: u64) -> Self {
        Self::drawn(seed, |_| true)
    }

    /// Returns the plan of a seed, restricted to wanted kinds of trouble.
    #[must_use]
    pub fn drawn(seed: u64, is_wanted: impl Fn(Fault) -> bool) -> Self {
        if seed % 8 == FOREIGN {
            return foreign::draw(seed, is_wanted);
        }
        if seed % 16 == HOGS {
            return hog::draw(seed, is_wanted);
        }
        let mut rng = Rng::with_seed(seed);
        let kinds = [Protocol::Srp, Protocol::Iser, Protocol::Iscsi];
        let initiators = (0..rng.usize(1..=3)).map(|_| kinds[rng.usize(..3)]);
        let initiators: Vec<_> = initiators.collect();
        let count = rng.usize(0..=4);
        let mut draw = || Trouble::draw(&mut rng, initiators.len());
        let troubles = (0..count).filter_map(|_| {
            // This finds nothing if all wanted kinds are drawn by the generators below.
            let mut some = std::iter::repeat_with(&mut draw).take(1000);
            some.find(|trouble| is_wanted(trouble.fault))
        });
        let mut troubles: Vec<_> = troubles.collect();
        let mtus = [Mtu::Mtu4096, Mtu::Mtu1024, Mtu::Mtu256];
        // Uses another sequence of random numbers, so that older parts of the plan don't change.
        let mut others = Rng::with_seed(seed ^ 0x0124_e501);
        // Reservations need multiple rivals which conflict repeatedly. Either all rivals change
        // reservations or none of them, because the model must know about all of them.
        let reservations = [0, 0, 12][others.usize(..3)];
        let rivals = match reservations {
            0 => [0, 0, 1, 2][others.usize(..4)],
            _ => others.usize(2..=3),
        };
        let rival = |_| {
            let rival = RivalPlan::draw(&mut others);
            let commands = rival.commands * if reservations > 0 { 3 } else { 1 };
            RivalPlan {
                reservations,
                commands,
                ..rival
            }
        };
        let rivals: Vec<_> = (0..rivals).map(rival).collect();
        let mut more = Trouble::deaths(&mut others, initiators.len());
        let paths = [1, 1, 2][others.usize(..3)];
        if paths > 1 {
            more.extend(Trouble::losses(&mut others, paths));
        }
        more.extend(Trouble::returns(&mut others, initiators.len()));
        more.extend(Trouble::cuts(&mut others));
        more.extend(DiskFault::draw(&mut Rng::with_seed(seed ^ 0xd15c)));
        let mut devices = Rng::with_seed(seed ^ 0x41c5);
        more.extend(NicFault::draw(&mut devices, (paths, initiators.len())));
        more.extend(Trouble::doubles(&mut devices, initiators.len()));
        let mut cheats = Rng::with_seed(seed ^ 0xc4ea7);
        let number = [0, 0, 0, 1, 3][cheats.usize(..5)];
        let mut cheats: Vec<_> = (0..number).map(|_| CheatPlan::draw(&mut cheats)).collect();
        CheatPlan::extend(&mut cheats, &mut Rng::with_seed(seed ^ 0x57ea1));
        // Administrative changes only happen with certain seeds, so that other seeds don't change.
        let mut admin = Rng::with_seed(seed ^ 0xad_717);
        more.extend(AdminFault::draw(&mut admin, (paths, initiators.len())));
        more.extend(ProcessFault::draw(&mut admin));
        let mut floods = Rng::with_seed(seed ^ 0x0f10_0d5e);
        let flood = if floods.u8(..8) > 0 {
            0
        } else {
            floods.u32(50..=400)
        };
        let exchanges = AdminFault::exchanges(&mut Rng::with_seed(seed ^ 0x0e8c_4a6e));
        // With multiple paths, a request would wait until there is a path to its unit again.
        let exchange = !exchanges.is_empty() && paths == 1;
        more.extend(exchanges.iter().copied());
        let mut late = Rng::with_seed(seed ^ 0x1a7e);
        more.extend(Trouble::one_way(&mut late, (paths, initiators.len())));
        more.extend(Trouble::delays(&mut late));
        more.extend(NicFault::draw_more(&mut late, (paths, initiators.len())));
        let mut failures = Rng::with_seed(seed ^ 0xfa11);
        more.extend(NicFault::failures(&mut failures, (paths, initiators.len())));
        more.extend(DiskFault::stalls(&mut late, initiators.len()));
        more.extend(Trouble::restarts(&mut late, initiators.len()));
        more.extend(Trouble::failing_saves(&mut late));
        more.extend(DiskFault::stalls_of_some(&mut Rng::with_seed(
            seed ^ 0x5a11_50e4,
        )));
        let segments = [1, 64][late.usize(..2)];
        troubles.extend(more.into_iter().filter(|trouble| is_wanted(trouble.fault)));
        let mut timeout = Duration::from_secs([1, 10, 60, 60][rng.usize(..4)]);
        // Checks are stricter without faults.
        if seed % 6 == 5 {
            troubles = Vec::from_iter(Trouble::mild(&mut others));
            let changes = AdminFault::draw(&mut admin, (paths, initiators.len()));
            let is_mild = |trouble: &Trouble| match trouble.fault {
                Fault::Admin(change) => change.is_mild(),
                _ => false,
            };
            troubles.extend(changes.into_iter().chain(exchanges).filter(is_mild));
            troubles.extend(Trouble::brief(&mut late));
            if (seed / 6).is_multiple_of(3) {
                troubles.extend(DiskFault::stall_of_one(&mut late, initiators.len()));
            }
            troubles.retain(|trouble| is_wanted(trouble.fault));
            timeout = TIMEOUT;
        }
        let mut sessions = Rng::with_seed(seed ^ 0x5e55_1075);
        let rivals = rivals.into_iter();
        let rivals = rivals.map(|rival| rival.with_more(&mut sessions));
        let rivals: Vec<_> = rivals.collect();
        let is_deep = rivals.iter().any(|rival| rival.depth > 64);
        // A full window of commands is waiting for a disk, but none of the connections is waiting
        // for these.
        if is_deep && seed % 6 != 5 && sessions.bool() {
            troubles = vec![Trouble::stall(&mut sessions)];
            troubles.retain(|trouble| is_wanted(trouble.fault));
        }
        let mut protected = Rng::with_seed(seed ^ 0xd1f_d1f);
        let protection = match protected.u8(..16) {
            kind @ 1..=3 => kind,
            _ => 0,
        };
        if protection > 0 {
            // A disk that loses single sectors also loses parts of blocks.
            troubles.retain(|trouble| !trouble.fault.fails_disks());
            troubles.extend(DiskFault::damages(&mut protected, &troubles));
            troubles.retain(|trouble| is_wanted(trouble.fault));
        }
        let mut pieces = Rng::with_seed(seed ^ 0x70_1ece);
        // Users that connect at the same time: a twin and two watchers.
        let iscsi = initiators.iter().filter(|one| **one == Protocol::Iscsi);
        let iscsi = (iscsi.count() + 1) * paths;
        let connections = iscsi + rivals.iter().map(|one| one.connections).sum::<usize>() + 2;
        let connections = connections + usize::from(flood > 0) + usize::from(exchange) * paths;
        Self {
            hogs: Vec::new(),
            pause: Duration::ZERO,
            flood,
            exchange,
            paths,
            rivals,
            seed,
            foreign: None,
            timeout,
            segments,
            connections: match cheats.iter().any(|one| one.aim.joins(one.protocol)) {
                // A thief tries to join a session with multiple connections.
                true => 4,
                false => [1, 1, 2, 4][sessions.usize(..4)],
            },
            recovery_level: [0, 1, 2, 2][sessions.usize(..4)],
            queue_depth: [128, 128, 128, 8][sessions.usize(..4)],
            pool: [1 << 20, 2 << 20][others.usize(..2)],
            // COMPARE AND WRITE requires two blocks, with their tuples if the disk is protected.
            window: [1 << 20, 64 << 10, 8 << 10, 1 << 10][pieces.usize(..4)]
                .max(if protection > 0 { 2 << 10 } else { 0 }),
            sends: [None, Some(8), Some(16)][pieces.usize(..3)],
            // The smallest ring is sufficient for eight connections.
            ring: [64, 128, if is_deep { 64 } else { 511 }][others.usize(..3)]
                .max(if connections > 8 { 128 } else { 0 }),
            // A power of two, same as in the daemon.
            workers: [1, 1, 2, 4][rng.usize(..4)],
            write_cache: rng.u8(..4) > 0,
            protection,
            latency: Duration::from_micros([2, 10, 10, 500][rng.usize(..4)]),
            mtus: [mtus[rng.usize(..3)], mtus[rng.usize(..3)]],
            socket_room: [usize::MAX, 64, 16, 4][rng.usize(..4)],
            tasks: rng.usize(1..=4),
            commands: rng.usize(5..=40),
            blocks: [16, 64, 512][rng.usize(..3)],
            longest: [1, 8, 64, 300][rng.usize(..4)],
            // Not drawn, so that older parts of the plan don't change.
            private_units: (seed / 6).is_multiple_of(3),
            cheats,
            initiators,
            troubles,
        }
    }

    /// Returns the information that is available for the model of reservations and unit attentions.
    #[must_use]
    pub fn knowledge(&self) -> Knowledge {
        Knowledge {
            // Otherwise initiators may reset the unit because of a timeout.
            resets: self.is_quiet(),
            reservations: self.rivals.iter().any(|rival| rival.reservations > 0),
            fails_to_save: self.fails_to_save(),
        }
    }

    /// Returns whether no check of protection information may fail.
    #[must_use]
    pub fn keeps_protection(&self) -> bool {
        let mut troubles = self.troubles.iter();
        self.protection > 0 && !troubles.any(|trouble| trouble.fault.fails_disks())
    }

    /// Returns whether retransmission is sufficient to recover from all faults, and there are no
    /// short timeouts. Then no command fails and no connection is closed.
    #[must_use]
    pub fn is_quiet(&self) -> bool {
        let mut troubles = self.troubles.iter();
        let is_mild = |one: &Trouble| one.fault.is_mild() || self.is_refused_upgrade(one);
        troubles.all(is_mild) && self.timeout >= TIMEOUT
    }

    /// Returns whether a trouble is an upgrade that must be rejected before any session is closed,
    /// because disk operations have been hanging for a few seconds.
    #[must_use]
    pub fn is_refused_upgrade(&self, trouble: &Trouble) -> bool {
        let is_upgrade = matches!(
            trouble.fault,
            Fault::Process(ProcessFault::Upgrade | ProcessFault::FailedUpgrade)
        );
        let hangs = |other: &Trouble| match other.fault {
            Fault::Disk(DiskFault::HangDisk(disk)) => {
                let mut users = self.hogs.iter();
                other.from + hog::ESTABLISHED <= trouble.from
                    && trouble.until + hog::ESTABLISHED <= other.until
                    && users.any(|hog| hog.disk == Some(disk) && hog.load.is_executed())
            }
            _ => false,
        };
        is_upgrade && self.troubles.iter().any(hangs)
    }

    /// Returns whether there are only hogs, hanging disks and upgrades. Then an upgrade must not
    /// end the process with a failure.
    #[must_use]
    pub fn may_only_hang(&self) -> bool {
        let mut faults = self.troubles.iter().map(|trouble| trouble.fault);
        faults.all(|fault| {
            matches!(
                fault,
                Fault::Disk(DiskFault::HangDisk(_))
                    | Fault::Process(ProcessFault::Upgrade | ProcessFault::FailedUpgrade)
            )
        })
    }

    /// Returns whether the target never closes a connection. It must not do this because of a
    /// stalled disk.
    #[must_use]
    pub fn keeps_connections(&self) -> bool {
        let mut troubles = self.troubles.iter();
        troubles.all(|one| {
            one.fault.is_mild() || one.fault == Fault::StallDisks || self.is_refused_upgrade(one)
        })
    }

    /// Returns whether an initiator should not notice any faults: all faults are mild, except for
    /// disks that it doesn't use.
    #[must_use]
    pub fn is_quiet_for(&self, index: usize) -> bool {
        let is_of_another = |fault: Fault| match fault {
            Fault::Disk(DiskFault::StallDisk(number)) => {
                let others = 1..=self.initiators.len();
                self.private_units && others.contains(&number) && number != index + 1
            }
            _ => false,
        };
        let mut rest = self.clone();
        rest.troubles
            .retain(|trouble| !is_of_another(trouble.fault));
        rest.is_quiet()
    }

    /// Returns whether the target will be unable to save its state at some time.
    #[must_use]
    pub fn fails_to_save(&self) -> bool {
        let mut troubles = self.troubles.iter();
        troubles.any(|trouble| matches!(trouble.fault, Fault::FailSaves(_)))
    }

    /// Returns whether all commands should also be fast, without a rate limit.
    #[must_use]
    pub fn is_prompt(&self) -> bool {
        self.is_quiet() && !self.is_limited()
    }

    /// Returns whether all commands from one initiator should be fast.
    #[must_use]
    pub fn is_prompt_for(&self, index: usize) -> bool {
        self.is_quiet_for(index) && !self.is_limited()
    }

    /// Returns the maximum latency of commands that should be fast. An ORDERED command of a hog
    /// delays all later commands.
    #[must_use]
    pub fn max_latency(&self) -> Duration {
        match self.hogs.iter().any(HogPlan::delays_all) {
            true => ORDER_DELAY,
            false => PROMPT,
        }
    }

    /// Returns whether there is only one initiator, and no other peer or administrator that resets,
    /// reserves or changes its units.
    #[must_use]
    pub fn is_alone(&self) -> bool {
        let others = self.rivals.len() + self.cheats.len() + self.hogs.len();
        let peers = self.initiators.len() + others;
        peers == 1 && self.troubles.is_empty()
    }

    /// Returns whether there are administrative changes, so that additional units are needed.
    #[must_use]
    pub fn is_administered(&self) -> bool {
        let mut troubles = self.troubles.iter();
        troubles.any(|trouble| matches!(trouble.fault, Fault::Admin(_) | Fault::Process(_)))
    }

    /// Returns whether an administrator limits the rate of the disk.
    #[must_use]
    pub fn is_limited(&self) -> bool {
        let mut troubles = self.troubles.iter();
        troubles.any(|one| matches!(one.fault, Fault::Admin(AdminFault::Limit(_))))
    }

    /// Returns whether an administrator removes units that users are waiting for.
    #[must_use]
    pub fn may_lose_units(&self) -> bool {
        let mut faults = self.troubles.iter().map(|trouble| trouble.fault);
        let takes = |fault| matches!(fault, Fault::Admin(AdminFault::RemoveLun));
        self.may_lose_target() || faults.any(takes)
    }

    /// Returns whether the target may be removed with all its units.
    #[must_use]
    pub fn may_lose_target(&self) -> bool {
        let mut faults = self.troubles.iter().map(|trouble| trouble.fault);
        faults.any(|fault| {
            matches!(
                fault,
                Fault::Admin(AdminFault::RemoveTarget | AdminFault::RemovePortal(..))
            )
        })
    }

    /// Returns whether the target process may fail to exit normally, because writes are not durable
    /// or a worker doesn't respond.
    #[must_use]
    pub fn may_fail_shutdown(&self) -> bool {
        let mut faults = self.troubles.iter().map(|trouble| trouble.fault);
        faults.any(|fault| match fault {
            Fault::StallDisks | Fault::FailDisks(_) | Fault::Disk(_) | Fault::FailSaves(_) => true,
            Fault::Process(fault) => matches!(
                fault,
                ProcessFault::FailWorker(_) | ProcessFault::StallWorker(_)
            ),
            _ => false,
        })
    }

    /// Returns the time when the last fault is over and networks have delivered all delayed
    /// packets.
    #[must_use]
    pub fn healed(&self) -> Duration {
        let ends = self.troubles.iter().map(|trouble| match trouble.fault {
            Fault::Delay { most, .. } => trouble.until + most,
            _ => trouble.until,
        });
        ends.max().unwrap_or_default()
    }
}

impl Trouble {
    /// Draws initiators that return with another address or meet a twin with the same name.
    fn doubles(rng: &mut Rng, initiators: usize) -> Vec<Self> {
        let number = [0, 0, 0, 0, 1, 2][rng.usize(..6)];
        let double = |_| {
            let from = Duration::from_micros(rng.u64(0..60_000));
            let length = [2_000, 50_000, 2_000_000, 20_000_000][rng.usize(..4)];
            let index = rng.usize(..initiators);
            Self {
                from,
                until: from + Duration::from_micros(rng.u64(1..=length)),
                fault: [Fault::MoveInitiator(index), Fault::Twin(index)][rng.usize(..2)],
            }
        };
        (0..number).map(double).collect()
    }

    /// Draws initiator processes that are killed.
    fn deaths(rng: &mut Rng, initiators: usize) -> Vec<Self> {
        let number = [0, 0, 0, 1, 3][rng.usize(..5)];
        let death = |_| {
            let from = Duration::from_micros(rng.u64(0..60_000));
            // Usually it returns before this is noticed.
            let length = [1, 2_000, 50_000, 20_000_000][rng.usize(..4)];
            Self {
                from,
                until: from + Duration::from_micros(rng.u64(1..=length)),
                fault: Fault::KillInitiator {
                    index: rng.usize(..initiators),
                    vanishes: rng.bool(),
                },
            }
        };
        (0..number).map(death).collect()
    }

    /// Draws initiators that restart repeatedly while disks delay their previous commands.
    fn returns(rng: &mut Rng, initiators: usize) -> Vec<Self> {
        if rng.u8(..6) > 0 {
            return Vec::new();
        }
        let length = [20_000, 500_000, 20_000_000][rng.usize(..3)];
        let from = rng.u64(1_000..60_000);
        let during = |from: u64, length: u64, fault| Self {
            from: Duration::from_micros(from),
            until: Duration::from_micros(from + length),
            fault,
        };
        let stall = during(from, length, Fault::StallDisks);
        let number = rng.usize(1..=4);
        let death = |_| {
            let at = from + rng.u64(..length);
            let fault = Fault::KillInitiator {
                index: rng.usize(..initiators),
                vanishes: rng.bool(),
            };
            during(at, rng.u64(1..=2_000), fault)
        };
        let deaths: Vec<_> = (0..number).map(death).collect();
        [vec![stall], deaths].concat()
    }

    /// Draws a disk stall which is long enough to affect all users.
    fn stall(rng: &mut Rng) -> Self {
        let from = Duration::from_micros(rng.u64(2_000..60_000));
        let length = [50_000, 2_000_000, 20_000_000][rng.usize(..3)];
        Self {
            from,
            until: from + Duration::from_micros(rng.u64(1..=length)),
            fault: Fault::StallDisks,
        }
    }

    /// Draws a network that loses and duplicates no or few packets.
    fn mild(rng: &mut Rng) -> Option<Self> {
        let fault = Fault::Wire {
            loss: rng.f64() * MILD / 2.0,
            duplication: rng.f64() * 5.0,
            corruption: rng.f64() * MILD / 2.0,
            reorder: rng.f64() * 5.0,
        };
        rng.bool().then_some(Self {
            from: Duration::ZERO,
            until: Duration::from_secs(1),
            fault,
        })
    }

    /// Draws repeated power losses, so that some of them happen during a flush.
    fn cuts(rng: &mut Rng) -> Vec<Self> {
        let number = [0, 0, 0, 0, 0, 3, 6][rng.usize(..7)];
        let cut = |_| {
            let from = Duration::from_micros(rng.u64(2_000..120_000));
            Self {
                from,
                until: from + Duration::from_micros(rng.u64(1..=2_000)),
                fault: Fault::PowerCut,
            }
        };
        (0..number).map(cut).collect()
    }

    /// Draws places that are disconnected in one direction.
    fn one_way(rng: &mut Rng, devices: (usize, usize)) -> Vec<Self> {
        let number = [0, 0, 0, 1, 2][rng.usize(..5)];
        let one = |_| {
            let from = Duration::from_micros(rng.u64(0..100_000));
            let length = [2_000, 200_000, 8_000_000, 90_000_000][rng.usize(..4)];
            let place = Place::draw(rng, devices);
            Self {
                from,
                until: from + Duration::from_micros(rng.u64(1..=length)),
                fault: [Fault::Deaf(place), Fault::Mute(place)][rng.usize(..2)],
            }
        };
        (0..number).map(one).collect()
    }

    /// Draws networks that delay packets, usually until the connection has been closed.
    fn delays(rng: &mut Rng) -> Vec<Self> {
        let number = [0, 0, 0, 0, 1, 2][rng.usize(..6)];
        let one = |_| {
            let from = Duration::from_micros(rng.u64(0..60_000));
            let length = [2_000, 50_000, 2_000_000, 20_000_000][rng.usize(..4)];
            let most = [20, 1_000, 5_000, 40_000][rng.usize(..4)];
            Self {
                from,
                until: from + Duration::from_micros(rng.u64(1..=length)),
                fault: Fault::Delay {
                    share: [0.002, 0.02, 0.3][rng.usize(..3)],
                    most: Duration::from_millis(most),
                },
            }
        };
        (0..number).map(one).collect()
    }

    /// Draws a network that delays no or few packets for a short time.
    fn brief(rng: &mut Rng) -> Option<Self> {
        let fault = Fault::Delay {
            share: rng.f64() * MILD / 100.0,
            most: [Duration::from_millis(5), BRIEF][rng.usize(..2)],
        };
        rng.bool().then_some(Self {
            from: Duration::ZERO,
            until: Duration::from_secs(1),
            fault,
        })
    }

    /// Draws initiator processes that exit normally.
    fn restarts(rng: &mut Rng, initiators: usize) -> Vec<Self> {
        let number = [0, 0, 0, 0, 1, 3][rng.usize(..6)];
        let one = |_| {
            let from = Duration::from_micros(rng.u64(0..60_000));
            let length = [1, 2_000, 50_000, 20_000_000][rng.usize(..4)];
            Self {
                from,
                until: from + Duration::from_micros(rng.u64(1..=length)),
                fault: Fault::RestartInitiator(rng.usize(..initiators)),
            }
        };
        (0..number).map(one).collect()
    }

    /// Draws failures of the state directory.
    fn failing_saves(rng: &mut Rng) -> Vec<Self> {
        let number = [0, 0, 0, 1, 3][rng.usize(..5)];
        let one = |_| {
            let from = Duration::from_micros(rng.u64(0..80_000));
            let length = [2_000, 20_000, 500_000, 8_000_000][rng.usize(..4)];
            let failure = [SaveFailure::Full, SaveFailure::Broken][rng.usize(..2)];
            Self {
                from,
                until: from + Duration::from_micros(rng.u64(1..=length)),
                fault: Fault::FailSaves(failure),
            }
        };
        (0..number).map(one).collect()
    }

    /// Draws lost paths, which may overlap.
    fn losses(rng: &mut Rng, paths: usize) -> Vec<Self> {
        let number = rng.usize(1..=3);
        let loss = |_| {
            let from = Duration::from_micros(rng.u64(0..100_000));
            let length = [5_000, 3_000_000, 30_000_000, 90_000_000][rng.usize(..4)];
            Self {
                from,
                until: from + Duration::from_micros(rng.u64(1..=length)),
                fault: Fault::LosePath(rng.usize(..paths)),
            }
        };
        (0..number).map(loss).collect()
    }

    fn draw(rng: &mut Rng, initiators: usize) -> Self {
        // Most of the work is done at the beginning of a run.
        let latest = [20_000, 60_000, 300_000][rng.usize(..3)];
        let from = Duration::from_micros(rng.u64(0..latest));
        // Short troubles are not noticed, and long troubles exceed all timeouts.
        let length = [2_000, 200_000, 8_000_000, 90_000_000][rng.usize(..4)];
        let until = from + Duration::from_micros(rng.u64(1..length));
        let percent = |rng: &mut Rng| rng.f64() * [0.0, 0.5, 5.0][rng.usize(..3)];
        let fault = match rng.u8(..12) {
            0 => Fault::Wire {
                loss: percent(rng),
                duplication: percent(rng),
                corruption: percent(rng),
                reorder: percent(rng),
            },
            1 => Fault::Partition(rng.usize(..initiators)),
            2 => Fault::CutTcp(rng.f64()),
            3 => Fault::StallTcp,
            4 => Fault::NarrowTcp,
            5 => Fault::StallDisks,
            6 => Fault::FailDisks(rng.f64() * 0.2),
            7 => Fault::ShortTransfers(rng.f64()),
            8 => Fault::CrashTarget,
            9 | 10 => Fault::PowerCut,
            _ => Fault::Nic(Place::Path(0), NicFault::Unplug),
        };
        Self { from, until, fault }
    }
}
