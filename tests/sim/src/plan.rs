//! [`Plan`]: what a seed decides before a run begins. It can be written and read as YAML
//! ([`crate::text`]).

use std::time::Duration;

use fastrand::Rng;
use riser_transport::verbs::Mtu;
use serde::{Deserialize, Serialize};

use crate::admin::AdminFault;
use crate::cheat::CheatPlan;
use crate::disks::DiskFault;
use crate::foreign::{self, ForeignFault, Traits};
use crate::hog::{self, HogPlan};
use crate::initiator::TIMEOUT;
use crate::keeper::SaveFailure;
use crate::model::Knowledge;
use crate::nics::{NicFault, Place};
use crate::rival::RivalPlan;
use crate::text;

/// Packets that are lost at most where no connection breaks, in percent.
const MILD: f64 = 1.0;

/// Longest time that something is held where no connection breaks.
const BRIEF: Duration = Duration::from_millis(500);

/// Remainder by eight of seeds with a foreign target.
const FOREIGN: u64 = 7;

/// Remainder by 16 of seeds with hogs.
const HOGS: u64 = 3;

/// The protocol of an initiator.
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

/// One kind of trouble.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Fault {
    /// The RDMA network loses, repeats, spoils and reorders packets, in percent of each.
    Wire {
        /// Packets lost.
        loss: f64,
        /// Packets that arrive twice.
        duplication: f64,
        /// Packets with some bits flipped.
        corruption: f64,
        /// Packets that later ones overtake.
        reorder: f64,
    },
    /// Nothing reaches an initiator, nor comes from there, over RDMA and TCP.
    Partition(usize),
    /// Nothing reaches a place; what it sends arrives.
    Deaf(Place),
    /// Nothing that a place sends arrives; it is reached.
    Mute(Place),
    /// The networks hold some of what is sent, each for a time of its own, and deliver it when its
    /// connection may be long over.
    Delay {
        /// Packets, and segments of TCP, that are held, as a share of all.
        share: f64,
        /// Longest time that one is held.
        #[serde(with = "text::duration")]
        most: Duration,
    },
    /// TCP connections break, each with this probability.
    CutTcp(f64),
    /// Nothing reaches the target by that path, nor comes back.
    LosePath(usize),
    /// Nothing moves on TCP connections.
    StallTcp,
    /// Sockets of the target take and give few bytes at once.
    NarrowTcp,
    /// Operations on disks do not end.
    StallDisks,
    /// Operations on disks fail, each with this probability.
    FailDisks(f64),
    /// Something else is wrong with disks.
    Disk(DiskFault),
    /// Transfers of disks move a part of what was asked for, each with this probability.
    ShortTransfers(f64),
    /// The target's process dies, and starts again at the end.
    CrashTarget,
    /// The target's host loses its power, and what its disk had not made stable; it is back at the
    /// end.
    PowerCut,
    /// Something is wrong with a device.
    Nic(Place, NicFault),
    /// The target can save nothing in its state directory.
    FailSaves(SaveFailure),
    /// The host of an initiator is gone, and back at another address at the end.
    MoveInitiator(usize),
    /// Another initiator has the names of this one, until it dies.
    Twin(usize),
    /// The process of an initiator dies, and starts again at the end, with the same names.
    KillInitiator {
        /// The initiator.
        index: usize,
        /// Its host goes with it, so no peer learns that its connections are gone.
        vanishes: bool,
    },
    /// The process of an initiator ends in good order, and starts again at the end, or when it is
    /// over.
    RestartInitiator(usize),
    /// An administrator changes what is served.
    Admin(AdminFault),
    /// Something happens to the target's process, or to a thread of it.
    Process(ProcessFault),
    /// A fault of a target of another make.
    Foreign(ForeignFault),
}

/// Ends of the target's process, and faults of its workers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ProcessFault {
    /// The process ends in good order, and starts again at the end, or when it is over.
    Restart,
    /// The process hands over to the next program.
    Upgrade,
    /// The next program cannot be run, and this one goes on with what was to be handed over.
    FailedUpgrade,
    /// The thread of a worker fails. The process ends for it, and starts again.
    FailWorker(usize),
    /// The thread of a worker gets no time.
    StallWorker(usize),
}

impl ProcessFault {
    /// The troubles of a seed with the target's process.
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
    /// Names of all kinds, as in files of plans.
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

    /// Names of those that seeds have.
    #[must_use]
    pub fn drawn_kinds() -> Vec<&'static str> {
        let mut kinds = Self::kinds();
        // `tests/enumerate.rs` has each call fail by itself.
        kinds.retain(|kind| *kind != "fail-call");
        kinds
    }

    /// Name of its kind.
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

    /// Whether operations on disks fail, or what they have written is lost.
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

    /// Whether a device of the target is taken away.
    #[must_use]
    pub fn unplugs_target(self) -> bool {
        matches!(self, Self::Nic(Place::Path(_), NicFault::Unplug))
    }

    /// Whether the process of an initiator does not run meanwhile.
    #[must_use]
    pub fn ends_initiator(self, one: usize) -> bool {
        match self {
            Self::KillInitiator { index, .. }
            | Self::MoveInitiator(index)
            | Self::RestartInitiator(index) => index == one,
            _ => false,
        }
    }

    /// Whether repetitions of packets cure it, if anything has to.
    fn is_mild(self) -> bool {
        match self {
            Self::Wire {
                loss, corruption, ..
            } => loss + corruption <= MILD,
            Self::Delay { share, most } => share * 100.0 <= MILD && most <= BRIEF,
            Self::Admin(change) => change.is_mild(),
            // Only hogs use it.
            Self::Disk(DiskFault::HangDisk(_)) => true,
            _ => false,
        }
    }

    /// Whether the target does not run meanwhile.
    #[must_use]
    pub fn ends_target(self) -> bool {
        match self {
            Self::CrashTarget | Self::PowerCut => true,
            Self::Process(fault) => !matches!(fault, ProcessFault::StallWorker(_)),
            _ => false,
        }
    }
}

/// A fault, and when it is there.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Trouble {
    /// When it begins.
    #[serde(with = "text::duration")]
    pub from: Duration,
    /// When it has gone.
    #[serde(with = "text::duration")]
    pub until: Duration,
    /// Its kind.
    pub fault: Fault,
}

/// What happens in a run. A field that a file does not name is that of [`Plan::default`], so files
/// stay readable if a new field does nothing by default.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Plan {
    /// Seed of everything.
    pub seed: u64,
    /// Workers of the target.
    pub workers: usize,
    /// Initiators, by protocol.
    pub initiators: Vec<Protocol>,
    /// Paths of each initiator to the disk.
    pub paths: usize,
    /// Initiators of another make.
    pub rivals: Vec<RivalPlan>,
    /// Peers that cheat.
    pub cheats: Vec<CheatPlan>,
    /// Tasks of an initiator at once.
    pub tasks: usize,
    /// Commands of each task.
    pub commands: usize,
    /// Connections that the target allows a session of iSCSI.
    pub connections: usize,
    /// Error recovery level that the target offers.
    pub recovery_level: u8,
    /// Commands that the target allows a session at once.
    pub queue_depth: u16,
    /// Blocks of the disk that they use; few, so that they meet.
    pub blocks: u64,
    /// Most blocks of a command.
    pub longest: u64,
    /// Time that a command may take: short ones are aborted, and units reset.
    #[serde(with = "text::duration")]
    pub timeout: Duration,
    /// The disk has a volatile cache, as initiators see it.
    pub write_cache: bool,
    /// Time of an RDMA packet on its way.
    #[serde(with = "text::duration")]
    pub latency: Duration,
    /// Largest path MTU of the target, and of the initiators.
    #[serde(with = "text::mtus")]
    pub mtus: [Mtu; 2],
    /// Packets that the socket of an RDMA device takes at once.
    pub socket_room: usize,
    /// Packets that it takes as one train at most.
    pub segments: usize,
    /// Memory of a worker for data, in bytes. Little, so that commands wait for it.
    pub pool: usize,
    /// Bytes of one command's data that are in memory at a time.
    pub window: u32,
    /// Work requests in the send queue of an SRP channel, if they are few.
    pub sends: Option<u32>,
    /// Operations of a worker's ring at once.
    pub ring: u32,
    /// Each initiator has a unit that others may not read.
    pub private_units: bool,
    /// Peers that occupy shared resources for as long as they can.
    pub hogs: Vec<HogPlan>,
    /// Longest pause between two commands of a task.
    #[serde(with = "text::duration")]
    pub pause: Duration,
    /// Pings with data of a peer that does not read their answers for a while.
    pub flood: u32,
    /// A user of ours has the unit that an administrator exchanges for another disk.
    pub exchange: bool,
    /// The initiator has a target of another make instead of ours.
    pub foreign: Option<Traits>,
    /// What goes wrong.
    pub troubles: Vec<Trouble>,
}

impl Default for Plan {
    /// A quiet day of one initiator.
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
    /// The target reads and writes the disk past the page cache.
    pub(crate) fn is_direct(&self) -> bool {
        !self.seed.is_multiple_of(4)
    }

    /// The plan of a seed.
    #[must_use]
    pub fn of(seed: u64) -> Self {
        Self::drawn(seed, |_| true)
    }

    /// The plan of a seed in which only these kinds of trouble happen.
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
            // There is none if all that are wanted are of the generators below.
            let mut some = std::iter::repeat_with(&mut draw).take(1000);
            some.find(|trouble| is_wanted(trouble.fault))
        });
        let mut troubles: Vec<_> = troubles.collect();
        let mtus = [Mtu::Mtu4096, Mtu::Mtu1024, Mtu::Mtu256];
        // Of random numbers of their own, so that what was there before stays as it is.
        let mut others = Rng::with_seed(seed ^ 0x0124_e501);
        // Reservations need several that meet at them, again and again. All rivals change them, or
        // none: those that the model does not know are not for it.
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
        // An administrator has days of his own, for which others are as they were.
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
        // Over several paths a request waits until one leads to its unit again.
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
        // A quiet day is judged more strictly.
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
        // All commands of a full window wait for a disk, and connections for none of them.
        if is_deep && seed % 6 != 5 && sessions.bool() {
            troubles = vec![Trouble::stall(&mut sessions)];
            troubles.retain(|trouble| is_wanted(trouble.fault));
        }
        let mut pieces = Rng::with_seed(seed ^ 0x70_1ece);
        // Those that want to be connected at once: a twin, and two watchers.
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
                // A thief joins a session of several connections, if it can.
                true => 4,
                false => [1, 1, 2, 4][sessions.usize(..4)],
            },
            recovery_level: [0, 1, 2, 2][sessions.usize(..4)],
            queue_depth: [128, 128, 128, 8][sessions.usize(..4)],
            pool: [1 << 20, 2 << 20][others.usize(..2)],
            window: [1 << 20, 64 << 10, 8 << 10, 1 << 10][pieces.usize(..4)],
            sends: [None, Some(8), Some(16)][pieces.usize(..3)],
            // The smallest has room for eight connections.
            ring: [64, 128, if is_deep { 64 } else { 511 }][others.usize(..3)]
                .max(if connections > 8 { 128 } else { 0 }),
            // A power of two, as the daemon makes it.
            workers: [1, 1, 2, 4][rng.usize(..4)],
            write_cache: rng.u8(..4) > 0,
            latency: Duration::from_micros([2, 10, 10, 500][rng.usize(..4)]),
            mtus: [mtus[rng.usize(..3)], mtus[rng.usize(..3)]],
            socket_room: [usize::MAX, 64, 16, 4][rng.usize(..4)],
            tasks: rng.usize(1..=4),
            commands: rng.usize(5..=40),
            blocks: [16, 64, 512][rng.usize(..3)],
            longest: [1, 8, 64, 300][rng.usize(..4)],
            // Not drawn, so that what was drawn before stays as it is.
            private_units: (seed / 6).is_multiple_of(3),
            cheats,
            initiators,
            troubles,
        }
    }

    /// What the model of reservations and unit attentions knows.
    #[must_use]
    pub fn knowledge(&self) -> Knowledge {
        Knowledge {
            // Otherwise initiators may reset the unit because a command takes too long.
            resets: self.is_quiet(),
            reservations: self.rivals.iter().any(|rival| rival.reservations > 0),
            fails_to_save: self.fails_to_save(),
        }
    }

    /// Whether nothing goes wrong that repetitions of packets do not cure, and all commands have
    /// time: then none fails, and no connection breaks.
    #[must_use]
    pub fn is_quiet(&self) -> bool {
        let mut troubles = self.troubles.iter();
        let is_mild = |one: &Trouble| one.fault.is_mild() || self.is_refused_upgrade(one);
        troubles.all(is_mild) && self.timeout >= TIMEOUT
    }

    /// Whether a trouble is an upgrade that must be refused before any session ends: operations of a
    /// disk have been hanging for some seconds.
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

    /// Whether the only troubles are hogs, disks that hang, and upgrades: then no upgrade may end the
    /// process as a failure does.
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

    /// Whether the target ends no connection by itself: a disk that stalls is no reason.
    #[must_use]
    pub fn keeps_connections(&self) -> bool {
        let mut troubles = self.troubles.iter();
        troubles.all(|one| {
            one.fault.is_mild() || one.fault == Fault::StallDisks || self.is_refused_upgrade(one)
        })
    }

    /// Whether nothing goes wrong that an initiator may notice: all is mild, but for disks that only
    /// others use.
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

    /// Whether the target's state directory takes nothing at a time.
    #[must_use]
    pub fn fails_to_save(&self) -> bool {
        let mut troubles = self.troubles.iter();
        troubles.any(|trouble| matches!(trouble.fault, Fault::FailSaves(_)))
    }

    /// Whether all commands are carried out soon as well: nothing limits their number.
    #[must_use]
    pub fn is_prompt(&self) -> bool {
        self.is_quiet() && !self.is_limited()
    }

    /// Whether all commands of an initiator are.
    #[must_use]
    pub fn is_prompt_for(&self, index: usize) -> bool {
        self.is_quiet_for(index) && !self.is_limited()
    }

    /// Whether there is a single initiator: no other peer and no administrator resets, reserves or
    /// changes its units.
    #[must_use]
    pub fn is_alone(&self) -> bool {
        let others = self.rivals.len() + self.cheats.len() + self.hogs.len();
        let peers = self.initiators.len() + others;
        peers == 1 && self.troubles.is_empty()
    }

    /// Whether an administrator changes what is served, so that there are units for it.
    #[must_use]
    pub fn is_administered(&self) -> bool {
        let mut troubles = self.troubles.iter();
        troubles.any(|trouble| matches!(trouble.fault, Fault::Admin(_) | Fault::Process(_)))
    }

    /// Whether an administrator limits the rate of the disk.
    #[must_use]
    pub fn is_limited(&self) -> bool {
        let mut troubles = self.troubles.iter();
        troubles.any(|one| matches!(one.fault, Fault::Admin(AdminFault::Limit(_))))
    }

    /// Whether an administrator takes units away, for which users wait.
    #[must_use]
    pub fn may_lose_units(&self) -> bool {
        let mut faults = self.troubles.iter().map(|trouble| trouble.fault);
        let takes = |fault| matches!(fault, Fault::Admin(AdminFault::RemoveLun));
        self.may_lose_target() || faults.any(takes)
    }

    /// Whether the target may be taken away, and all units with it.
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

    /// Whether the end of the target's process may fail: what was written may not be durable, or a
    /// worker does not answer.
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

    /// When the last fault has gone, and what networks have held is there.
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
    /// Initiators that come back elsewhere, or meet another of their names.
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

    /// Processes of initiators that die.
    fn deaths(rng: &mut Rng, initiators: usize) -> Vec<Self> {
        let number = [0, 0, 0, 1, 3][rng.usize(..5)];
        let death = |_| {
            let from = Duration::from_micros(rng.u64(0..60_000));
            // Mostly it is back before anybody has noticed.
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

    /// Initiators that come back again and again while disks hold what they had sent before.
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

    /// Disks that stall for long enough that all who use them wait.
    fn stall(rng: &mut Rng) -> Self {
        let from = Duration::from_micros(rng.u64(2_000..60_000));
        let length = [50_000, 2_000_000, 20_000_000][rng.usize(..3)];
        Self {
            from,
            until: from + Duration::from_micros(rng.u64(1..=length)),
            fault: Fault::StallDisks,
        }
    }

    /// A network that loses and repeats few packets, or none.
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

    /// Power that goes again and again, so that some of it hits a flush.
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

    /// Places that do not hear, or are not heard.
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

    /// Networks that hold what is sent, mostly until its connection is over.
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

    /// Networks that hold few packets, and not for long, or none.
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

    /// Processes of initiators that end in good order.
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

    /// A state directory that takes nothing.
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

    /// Paths that are lost, one after the other or at once.
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
        // Most of the work is done early.
        let latest = [20_000, 60_000, 300_000][rng.usize(..3)];
        let from = Duration::from_micros(rng.u64(0..latest));
        // Short ones are over before anything notices; long ones outlast every patience.
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
