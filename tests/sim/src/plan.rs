//! [`Plan`]: what a seed decides before a run begins.

use std::fmt;
use std::time::Duration;

use fastrand::Rng;
use riser_transport::verbs::Mtu;

/// The protocol of an initiator.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Protocol {
    /// SRP over RDMA.
    Srp,
    /// iSER over RDMA.
    Iser,
    /// iSCSI over TCP.
    Iscsi,
}

/// One kind of trouble.
#[derive(Clone, Copy, Debug, PartialEq)]
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
    /// No RDMA packet reaches or leaves an initiator.
    Partition(usize),
    /// TCP connections break, each with this probability.
    CutTcp(f64),
    /// Nothing moves on TCP connections.
    StallTcp,
    /// Sockets of the target take and give few bytes at once.
    NarrowTcp,
    /// Operations on disks do not end.
    StallDisks,
    /// Operations on disks fail, each with this probability.
    FailDisks(f64),
    /// Transfers of disks move a part of what was asked for, each with this probability.
    ShortTransfers(f64),
    /// The target's process dies, and starts again at the end.
    CrashTarget,
    /// The target's host loses its power, and what its disk had not made stable; it is back at the
    /// end.
    PowerCut,
    /// The target has no RDMA device.
    Unplug,
}

impl Fault {
    /// Whether the target does not run meanwhile.
    #[must_use]
    pub fn ends_target(self) -> bool {
        matches!(self, Self::CrashTarget | Self::PowerCut)
    }
}

/// A fault, and when it is there.
#[derive(Clone, Copy, Debug)]
pub struct Trouble {
    /// When it begins.
    pub from: Duration,
    /// When it has gone.
    pub until: Duration,
    /// Its kind.
    pub fault: Fault,
}

/// What happens in a run.
#[derive(Clone, Debug)]
pub struct Plan {
    /// Seed of everything.
    pub seed: u64,
    /// Workers of the target.
    pub workers: usize,
    /// Initiators, by protocol.
    pub initiators: Vec<Protocol>,
    /// Tasks of an initiator at once.
    pub tasks: usize,
    /// Commands of each task.
    pub commands: usize,
    /// Blocks of the disk that they use; few, so that they meet.
    pub blocks: u64,
    /// Most blocks of a command.
    pub longest: u64,
    /// Time that a command may take: short ones are aborted, and units reset.
    pub timeout: Duration,
    /// The disk has a volatile cache, as initiators see it.
    pub write_cache: bool,
    /// Time of an RDMA packet on its way.
    pub latency: Duration,
    /// Largest path MTU of the target, and of the initiators.
    pub mtus: [Mtu; 2],
    /// Packets that the socket of an RDMA device takes at once.
    pub socket_room: usize,
    /// What goes wrong.
    pub troubles: Vec<Trouble>,
}

impl Plan {
    /// The plan of a seed.
    #[must_use]
    pub fn of(seed: u64) -> Self {
        let mut rng = Rng::with_seed(seed);
        let kinds = [Protocol::Srp, Protocol::Iser, Protocol::Iscsi];
        let initiators = (0..rng.usize(1..=3)).map(|_| kinds[rng.usize(..3)]);
        let initiators: Vec<_> = initiators.collect();
        let troubles = (0..rng.usize(0..=4)).map(|_| Trouble::draw(&mut rng, initiators.len()));
        let troubles = troubles.collect();
        let mtus = [Mtu::Mtu4096, Mtu::Mtu1024, Mtu::Mtu256];
        Self {
            seed,
            // A power of two, as the daemon makes it.
            workers: [1, 1, 2, 4][rng.usize(..4)],
            timeout: Duration::from_secs([1, 10, 60, 60][rng.usize(..4)]),
            write_cache: rng.u8(..4) > 0,
            latency: Duration::from_micros([2, 10, 10, 500][rng.usize(..4)]),
            mtus: [mtus[rng.usize(..3)], mtus[rng.usize(..3)]],
            socket_room: [usize::MAX, usize::MAX, 64, 16][rng.usize(..4)],
            tasks: rng.usize(1..=4),
            commands: rng.usize(5..=40),
            blocks: [16, 64, 512][rng.usize(..3)],
            longest: [1, 8, 64, 300][rng.usize(..4)],
            initiators,
            troubles,
        }
    }

    /// When the last fault has gone.
    #[must_use]
    pub fn healed(&self) -> Duration {
        let ends = self.troubles.iter().map(|trouble| trouble.until);
        ends.max().unwrap_or_default()
    }
}

impl Trouble {
    fn draw(rng: &mut Rng, initiators: usize) -> Self {
        let from = Duration::from_micros(rng.u64(0..300_000));
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
            _ => Fault::Unplug,
        };
        Self { from, until, fault }
    }
}

impl fmt::Display for Plan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "seed {}: {} worker(s), initiators {:?} with {} task(s) of {} commands on {} blocks, of up to {}",
            self.seed,
            self.workers,
            self.initiators,
            self.tasks,
            self.commands,
            self.blocks,
            self.longest
        )?;
        let [target, others] = self.mtus;
        write!(
            f,
            "\n  {} write cache, commands have {:?}, packets take {:?}, path MTU {target:?} and {others:?}",
            if self.write_cache { "with" } else { "no" },
            self.timeout,
            self.latency,
        )?;
        if self.socket_room < usize::MAX {
            write!(f, ", sockets take {} packets", self.socket_room)?;
        }
        for trouble in &self.troubles {
            let Trouble { from, until, fault } = trouble;
            write!(f, "\n  {from:?} to {until:?}: {fault:?}")?;
        }
        Ok(())
    }
}
