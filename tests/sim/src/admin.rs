//! What an administrator does while the target serves: changes of the configuration, and changes
//! that must be refused. [`Layout`] is what is to be served at a time.

use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::net::SocketAddr;
use std::time::Duration;

use fastrand::Rng;
use serde::{Deserialize, Serialize};

use crate::plan::{Fault, Plan, Protocol, Trouble};
use crate::target::{self, IQN, SERIAL, rdma_address, tcp_address};
use crate::{cheat, exchange, hog, initiator};

/// Number of the unit that changes.
pub const SIDE: u16 = 20;

/// Number of the unit in memory, whose content an upgrade keeps.
pub const RAM: u16 = 21;

/// Number of the unit that is added.
pub const ADDED: u16 = 22;

/// A TCP portal that another program has.
pub const TAKEN_TCP: SocketAddr = SocketAddr::new(
    std::net::IpAddr::V4(std::net::Ipv4Addr::new(10, 0, 1, 99)),
    3260,
);

/// An RDMA portal of the first path that another program has.
pub const TAKEN_RDMA: SocketAddr = SocketAddr::new(target::ADDRESS, 7777);

const PROTOCOLS: [Protocol; 3] = [Protocol::Srp, Protocol::Iser, Protocol::Iscsi];

/// A change that lasts as long as its trouble; one of a size stays.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum AdminFault {
    /// A unit is added.
    AddLun,
    /// A unit is taken away.
    RemoveLun,
    /// Another disk takes the number of a unit.
    ReplaceLun,
    /// The disk of all grows.
    GrowDisk,
    /// Another unit grows.
    GrowLun,
    /// A unit refuses writes.
    ReadOnly,
    /// An initiator may not use the target.
    Deny(usize),
    /// Commands a second that the disk takes at most.
    Limit(u64),
    /// A portal is taken away.
    RemovePortal(usize, Protocol),
    /// The target is taken away.
    RemoveTarget,
    /// Changes that must be refused are tried again and again.
    Refuse(Refusal),
}

/// The obstacle to a change.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Refusal {
    /// A file is not there.
    NoFile,
    /// A unit in memory would shrink.
    Shrinks,
    /// It takes a restart.
    Restart,
    /// Another file under a unit that is served.
    OtherFile,
    /// Another program listens at a new TCP portal.
    TcpPortal,
    /// Another program listens at a new RDMA portal.
    RdmaPortal,
    /// It cannot be written down, and is withdrawn when all workers are ready for it.
    NotKept,
}

impl Refusal {
    const ALL: [Self; 7] = [
        Self::NoFile,
        Self::Shrinks,
        Self::Restart,
        Self::OtherFile,
        Self::TcpPortal,
        Self::RdmaPortal,
        Self::NotKept,
    ];
}

impl AdminFault {
    /// Whether initiators notice nothing of it but unit attentions, and commands that take longer.
    #[must_use]
    pub fn is_mild(self) -> bool {
        !matches!(
            self,
            Self::Deny(_) | Self::RemovePortal(..) | Self::RemoveTarget
        )
    }

    /// The troubles of a seed with an administrator.
    #[must_use]
    pub fn draw(rng: &mut Rng, (paths, initiators): (usize, usize)) -> Vec<Trouble> {
        let number = [0, 0, 1, 2, 4][rng.usize(..5)];
        let one = |_| {
            let latest = [20_000, 100_000][rng.usize(..2)];
            let from = Duration::from_micros(rng.u64(0..latest));
            let length = [2_000, 50_000, 500_000, 12_000_000][rng.usize(..4)];
            Trouble {
                from,
                until: from + Duration::from_micros(rng.u64(1..=length)),
                fault: Fault::Admin(Self::draw_one(rng, paths, initiators)),
            }
        };
        (0..number).map(one).collect()
    }

    /// Exchanges of a unit for another disk, for a user that has it meanwhile.
    #[must_use]
    pub fn exchanges(rng: &mut Rng) -> Vec<Trouble> {
        if rng.u8(..6) > 0 {
            return Vec::new();
        }
        let number = rng.usize(1..=3);
        let one = |_| {
            let from = Duration::from_micros(rng.u64(1_000..120_000));
            let length = [2_000, 50_000, 500_000][rng.usize(..3)];
            Trouble {
                from,
                until: from + Duration::from_micros(rng.u64(1..=length)),
                fault: Fault::Admin(Self::ReplaceLun),
            }
        };
        (0..number).map(one).collect()
    }

    fn draw_one(rng: &mut Rng, paths: usize, initiators: usize) -> Self {
        match rng.u8(..14) {
            0 => Self::AddLun,
            1 => Self::RemoveLun,
            2 => Self::ReplaceLun,
            3 => Self::GrowDisk,
            4 => Self::GrowLun,
            5 => Self::ReadOnly,
            6 | 7 => Self::Deny(rng.usize(..initiators)),
            8 => Self::Limit([50, 1000][rng.usize(..2)]),
            9 => Self::RemovePortal(rng.usize(..paths), PROTOCOLS[rng.usize(..3)]),
            10 => Self::RemoveTarget,
            _ => Self::Refuse(Refusal::ALL[rng.usize(..7)]),
        }
    }
}

/// What is to be served.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Layout {
    /// Size of the disk, in MiB.
    pub disk: u64,
    /// Size of the unit [`SIDE`], in MiB.
    pub side: u64,
    has_added: bool,
    has_side: bool,
    is_replaced: bool,
    is_read_only: bool,
    denied: BTreeSet<usize>,
    limit: Option<u64>,
    no_portals: Vec<(usize, Protocol)>,
    has_target: bool,
    refusal: Option<Refusal>,
}

/// A unit as those see it that may see all.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Seen {
    /// Number of the unit.
    pub lun: u16,
    /// Name of the backend.
    pub backend: &'static str,
    /// Blocks of it.
    pub blocks: u64,
    /// It refuses writes.
    pub is_read_only: bool,
}

/// Blocks of a MiB.
const PER_MIB: u64 = 2048;

/// Sizes of the disks that take the place of another, and that are added, in MiB.
const OTHERS: [u64; 2] = [3, 5];

impl Layout {
    /// The layout before anything changes.
    #[must_use]
    pub fn first() -> Self {
        Self {
            disk: 16,
            side: 1,
            has_added: false,
            has_side: true,
            is_replaced: false,
            is_read_only: false,
            denied: BTreeSet::new(),
            limit: None,
            no_portals: Vec::new(),
            has_target: true,
            refusal: None,
        }
    }

    /// The layout with these changes, in the place of those that this one has.
    #[must_use]
    pub fn with(&self, active: &[Fault], paths: usize) -> Self {
        let mut new = Self {
            disk: self.disk,
            side: self.side,
            ..Self::first()
        };
        for fault in active {
            let Fault::Admin(change) = fault else {
                continue;
            };
            match *change {
                AdminFault::AddLun => new.has_added = true,
                AdminFault::RemoveLun => new.has_side = false,
                AdminFault::ReplaceLun => new.is_replaced = true,
                AdminFault::ReadOnly => new.is_read_only = true,
                AdminFault::Deny(index) => _ = new.denied.insert(index),
                AdminFault::Limit(iops) => new.limit = Some(iops.max(10)),
                AdminFault::RemovePortal(path, protocol) => new.no_portals.push((path, protocol)),
                AdminFault::RemoveTarget => new.has_target = false,
                AdminFault::GrowDisk | AdminFault::GrowLun | AdminFault::Refuse(_) => {}
            }
        }
        // A target has one portal at least.
        let mut all = (0..paths).flat_map(|path| PROTOCOLS.map(|protocol| (path, protocol)));
        new.has_target &= all.any(|portal| !new.no_portals.contains(&portal));
        new
    }

    /// The same with a change that must be refused, and others that go with it; what is refused.
    #[must_use]
    pub fn refused(&self, refusal: Refusal) -> (Self, Refusal) {
        // What is not served may become another.
        let is_served = match refusal {
            Refusal::OtherFile => self.has_target && self.has_side && !self.is_replaced,
            Refusal::Restart => true,
            _ => self.has_target,
        };
        let refusal = if is_served { refusal } else { Refusal::Restart };
        let layout = Self {
            side: self.side + 1,
            has_added: true,
            refusal: Some(refusal),
            ..self.clone()
        };
        (layout, refusal)
    }

    /// Whether an initiator may log in.
    #[must_use]
    pub fn is_denied(&self, index: usize) -> bool {
        self.denied.contains(&index)
    }

    /// The initiators that may not log in.
    pub fn denied(&self) -> impl Iterator<Item = usize> {
        self.denied.iter().copied()
    }

    /// Whether there is a target.
    #[must_use]
    pub fn has_target(&self) -> bool {
        self.has_target
    }

    /// The units that a session sees which may see all; none without the target.
    #[must_use]
    pub fn seen(&self) -> Vec<Seen> {
        let unit = |lun, backend, mib| Seen {
            lun,
            backend,
            blocks: mib * PER_MIB,
            is_read_only: false,
        };
        let side = match self.is_replaced {
            true => unit(SIDE, "r", OTHERS[0]),
            false => unit(SIDE, "s", self.side),
        };
        let side = Seen {
            is_read_only: self.is_read_only,
            ..side
        };
        let all = [
            (true, unit(0, "d", self.disk)),
            (self.has_side, side),
            (true, unit(RAM, "m", 1)),
            (self.has_added, unit(ADDED, "a", OTHERS[1])),
        ];
        let all = all.into_iter().filter(|(is_there, _)| *is_there);
        all.filter(|_| self.has_target)
            .map(|(_, one)| one)
            .collect()
    }

    /// The configuration, as YAML.
    #[must_use]
    pub fn text(&self, plan: &Plan) -> String {
        let is_other_host = self.refusal == Some(Refusal::Restart);
        let identity = if is_other_host { "other" } else { "simulated" };
        let cheats = !plan.cheats.is_empty();
        let mut text = format!("identity: {identity}\nbackends:\n{}", self.backends(plan));
        text += if self.has_target || cheats {
            "targets:\n"
        } else {
            "targets: []\n"
        };
        if self.has_target {
            text += &self.target(plan);
        }
        if cheats {
            text += &target_of_cheats();
        }
        let (workers, connections) = (plan.workers, plan.connections);
        let (level, depth) = (plan.recovery_level, plan.queue_depth);
        let _ = write!(
            text,
            "workers: {{ count: {workers} }}\nlimits: {{ connections_per_session: {connections}, error_recovery_level: {level}, queue_depth: {depth} }}\n"
        );
        text
    }

    fn backends(&self, plan: &Plan) -> String {
        let limits = self.limit.map_or(String::new(), |iops| {
            format!(", limits: {{ iops: {iops} }}")
        });
        let cache = if plan.write_cache { "on" } else { "off" };
        let direct = if plan.is_direct() { "auto" } else { "off" };
        let mut text = format!(
            "  d: {{ kind: file, path: /in/memory, size: {}MiB, create: true, thin: true, serial: {SERIAL}, write_cache: {cache}, direct: {direct}{limits} }}\n",
            self.disk
        );
        let mut file = |name: &str, path: &str, mib: u64, rest: &str| {
            let _ = writeln!(
                text,
                "  {name}: {{ kind: file, path: /in/memory/{path}, size: {mib}MiB, create: true, thin: true{rest} }}"
            );
        };
        if plan.private_units {
            for index in 0..plan.initiators.len() {
                let name = format!("p{index}");
                file(&name, &index.to_string(), 1, ", write_cache: off");
            }
        }
        for index in 0..hog::disk_count(plan) {
            file(
                &format!("h{index}"),
                &format!("h{index}"),
                hog::MIB,
                ", write_cache: on",
            );
        }
        if plan.is_administered() {
            let is_other = self.refusal == Some(Refusal::OtherFile);
            // Those of a user whose history knows nothing of a cache.
            let rest = if plan.exchange {
                ", write_cache: off"
            } else {
                ""
            };
            file("s", if is_other { "t" } else { "s" }, self.side, rest);
            file("r", "r", OTHERS[0], rest);
            file("a", "a", OTHERS[1], "");
            file("x", "nowhere", 1, "");
        }
        if !plan.cheats.is_empty() {
            file("c", "c", 1, "");
        }
        if plan.is_administered() {
            let shrinks = self.refusal == Some(Refusal::Shrinks);
            let size = if shrinks { "512KiB" } else { "1MiB" };
            let _ = writeln!(text, "  m: {{ kind: ram, size: {size} }}");
        }
        text
    }

    fn target(&self, plan: &Plan) -> String {
        let mut luns = String::from("0: { backend: d }");
        if plan.private_units {
            for index in 0..plan.initiators.len() {
                let _ = write!(luns, ", {}: {{ backend: p{index} }}", index + 10);
            }
        }
        for index in 0..hog::disk_count(plan) {
            let _ = write!(luns, ", {}: {{ backend: h{index} }}", index + 30);
        }
        if plan.is_administered() {
            for one in self.seen().iter().skip(1) {
                let (lun, backend, is_read_only) = (one.lun, one.backend, one.is_read_only);
                let _ = write!(
                    luns,
                    ", {lun}: {{ backend: {backend}, read_only: {is_read_only} }}"
                );
            }
            if self.refusal == Some(Refusal::NoFile) {
                luns += ", 23: { backend: x }";
            }
        }
        if cheat::rules(&plan.cheats).is_some() {
            luns += ", 9: { backend: c }";
        }
        let (portals, access) = (self.portals(plan), self.access(plan));
        format!(
            "  - name: t\n    iqn: {IQN}\n    portals:\n{portals}    luns: {{ {luns} }}\n    access: {access}\n"
        )
    }

    fn portals(&self, plan: &Plan) -> String {
        let mut text = String::new();
        for path in 0..plan.paths {
            let (rdma, tcp) = (rdma_address(path), tcp_address(path));
            let all = [
                (Protocol::Srp, "srp", format!("{rdma}:5555")),
                (Protocol::Iser, "iser", format!("{rdma}:3260")),
                (Protocol::Iscsi, "iscsi", tcp.to_string()),
            ];
            for (protocol, name, listen) in all {
                if !self.no_portals.contains(&(path, protocol)) {
                    let _ = writeln!(text, "      - {{ protocol: {name}, listen: \"{listen}\" }}");
                }
            }
        }
        let more = match self.refusal {
            Some(Refusal::TcpPortal) => Some(("iscsi", TAKEN_TCP)),
            Some(Refusal::RdmaPortal) => Some(("srp", TAKEN_RDMA)),
            _ => None,
        };
        if let Some((name, listen)) = more {
            let _ = writeln!(text, "      - {{ protocol: {name}, listen: \"{listen}\" }}");
        }
        text
    }

    /// The rules of access. Without private units, without an initiator that is denied at a time
    /// and without a peer that cheats here, all may log in.
    fn access(&self, plan: &Plan) -> String {
        let denies = |trouble: &Trouble| matches!(trouble.fault, Fault::Admin(AdminFault::Deny(_)));
        let may_deny = plan.troubles.iter().any(denies);
        let of_cheats = cheat::rules(&plan.cheats);
        if !plan.private_units && !may_deny && of_cheats.is_none() && plan.hogs.is_empty() {
            return "open".to_owned();
        }
        let is_closed = may_deny || of_cheats.is_some();
        let mut rules = format!("[{}", of_cheats.unwrap_or_default());
        if plan.is_administered() {
            rules += &format!("{{ address: {WATCHERS} }}, ");
        }
        if plan.exchange {
            rules += &format!("{{ address: {} }}, ", initiator::address(exchange::NUMBER));
        }
        rules += &hog::rules(&plan.hogs);
        for index in (0..plan.initiators.len()).filter(|index| !self.is_denied(*index)) {
            for moves in 0..initiator::ADDRESSES {
                let address = initiator::address_after(index, moves as u8);
                let luns = match plan.private_units {
                    true => format!(", luns: {{ 0: d, 1: p{index} }}"),
                    false => String::new(),
                };
                rules += &format!("{{ address: {address}{luns} }}, ");
            }
        }
        // Others have numbers from 128 on in these networks.
        let nets: &[&str] = match is_closed {
            true => &[
                "10.0.0.128/25",
                "10.0.3.128/25",
                "10.0.4.128/25",
                "10.0.5.128/25",
            ],
            false => &["10.0.0.0/8"],
        };
        for net in nets {
            rules += &format!("{{ address: {net}, luns: {{ 0: d }} }}, ");
        }
        rules + "]"
    }
}

/// The network of watchers.
pub const WATCHERS: &str = "10.0.7.0/24";

/// The target of cheating peers.
fn target_of_cheats() -> String {
    let (rdma, tcp) = (rdma_address(0), tcp_address(0));
    format!(
        "  - name: c\n    iqn: {}\n    portals:\n      \
         - {{ protocol: srp, listen: \"{rdma}:{}\" }}\n      \
         - {{ protocol: iser, listen: \"{rdma}:3260\" }}\n      \
         - {{ protocol: iscsi, listen: \"{tcp}\" }}\n    \
         luns: {{ 0: {{ backend: c }} }}\n    access: open\n",
        cheat::IQN,
        cheat::SRP_PORT
    )
}
