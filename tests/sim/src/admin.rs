//! Administrative changes while the target is running: configuration updates, including updates
//! that must be rejected. A [`Layout`] is the configuration that should be served at some time.

use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::net::SocketAddr;
use std::time::Duration;

use fastrand::Rng;
use serde::{Deserialize, Serialize};

use crate::plan::{Fault, Plan, Protocol, Trouble};
use crate::target::{self, IQN, SERIAL, rdma_address, tcp_address};
use crate::{cheat, exchange, hog, initiator};

/// LUN of the unit that is changed.
pub const SIDE: u16 = 20;

/// LUN of the RAM disk, which must keep its contents across an upgrade.
pub const RAM: u16 = 21;

/// LUN of the unit that is added.
pub const ADDED: u16 = 22;

/// A TCP portal that is already used by another program.
pub const TAKEN_TCP: SocketAddr = SocketAddr::new(
    std::net::IpAddr::V4(std::net::Ipv4Addr::new(10, 0, 1, 99)),
    3260,
);

/// An RDMA portal on the first path that is already used by another program.
pub const TAKEN_RDMA: SocketAddr = SocketAddr::new(target::ADDRESS, 7777);

const PROTOCOLS: [Protocol; 3] = [Protocol::Srp, Protocol::Iser, Protocol::Iscsi];

/// A configuration change. It is reverted when the trouble is over, except for changes of size,
/// which are permanent.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum AdminFault {
    /// Adds a unit.
    AddLun,
    /// Removes a unit.
    RemoveLun,
    /// Replaces the backend of a unit by another disk.
    ReplaceLun,
    /// Grows the shared disk.
    GrowDisk,
    /// Grows another unit.
    GrowLun,
    /// Makes a unit read-only.
    ReadOnly,
    /// Denies access to an initiator.
    Deny(usize),
    /// Limits the disk to this number of commands per second.
    Limit(u64),
    /// Removes a portal.
    RemovePortal(usize, Protocol),
    /// Removes the target.
    RemoveTarget,
    /// Repeatedly tries changes that must be rejected.
    Refuse(Refusal),
}

/// The reason why a change must be rejected.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Refusal {
    /// A file does not exist.
    NoFile,
    /// A RAM disk would shrink.
    Shrinks,
    /// The change requires a restart.
    Restart,
    /// Another file for a unit that is being served.
    OtherFile,
    /// A new TCP portal is used by another program.
    TcpPortal,
    /// A new RDMA portal is used by another program.
    RdmaPortal,
    /// The change cannot be saved, so it must be withdrawn when all workers are prepared for it.
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
    /// Returns whether initiators should only notice unit attentions and slower commands.
    #[must_use]
    pub fn is_mild(self) -> bool {
        !matches!(
            self,
            Self::Deny(_) | Self::RemovePortal(..) | Self::RemoveTarget
        )
    }

    /// Draws the administrative troubles for a seed.
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

    /// Draws troubles which replace the disk of a unit, for a plan with an exchange user.
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

/// The configuration that should be served.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Layout {
    /// Size of the disk in MiB.
    pub disk: u64,
    /// Size of unit [`SIDE`] in MiB.
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

/// A unit as seen by an initiator with full access.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VisibleUnit {
    /// LUN of the unit.
    pub lun: u16,
    /// Name of the backend.
    pub backend: &'static str,
    /// Number of blocks.
    pub blocks: u64,
    /// Set if the unit is read-only.
    pub is_read_only: bool,
}

/// Blocks per MiB.
const PER_MIB: u64 = 2048;

/// Sizes in MiB of the disk that replaces another and of the disk that is added.
const OTHERS: [u64; 2] = [3, 5];

impl Layout {
    /// Returns the layout before any changes.
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

    /// Returns a new layout with these changes instead of the current ones.
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
        // A target needs at least one portal.
        let mut all = (0..paths).flat_map(|path| PROTOCOLS.map(|protocol| (path, protocol)));
        new.has_target &= all.any(|portal| !new.no_portals.contains(&portal));
        new
    }

    /// Returns this layout with a change that must be rejected, and possibly with other changes in
    /// the same update. Also returns the reason for the rejection.
    #[must_use]
    pub fn refused(&self, refusal: Refusal) -> (Self, Refusal) {
        // A unit can be replaced while it is not being served.
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

    /// Returns whether an initiator is denied access.
    #[must_use]
    pub fn is_denied(&self, index: usize) -> bool {
        self.denied.contains(&index)
    }

    /// Returns the initiators that are denied access.
    pub fn denied(&self) -> impl Iterator<Item = usize> {
        self.denied.iter().copied()
    }

    /// Returns whether the target exists.
    #[must_use]
    pub fn has_target(&self) -> bool {
        self.has_target
    }

    /// Returns the units that are visible to a session with full access. This is empty without the
    /// target.
    #[must_use]
    pub fn visible_units(&self) -> Vec<VisibleUnit> {
        let unit = |lun, backend, mib| VisibleUnit {
            lun,
            backend,
            blocks: mib * PER_MIB,
            is_read_only: false,
        };
        let side = match self.is_replaced {
            true => unit(SIDE, "r", OTHERS[0]),
            false => unit(SIDE, "s", self.side),
        };
        let side = VisibleUnit {
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

    /// Returns the configuration as YAML.
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
        let protection = match plan.protection {
            0 => String::new(),
            kind => format!(", protection: {{ type: {kind} }}"),
        };
        let mut text = format!(
            "  d: {{ kind: file, path: /in/memory, size: {}MiB, create: true, thin: true, serial: {SERIAL}, write_cache: {cache}, direct: {direct}{limits}{protection} }}\n",
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
            // Units of users whose history does not model a cache.
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
            for one in self.visible_units().iter().skip(1) {
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

    /// Returns the access rules. All initiators have access unless there are private units, an
    /// initiator that will be denied access, or a cheating peer on this target.
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
        // All other peers have addresses from 128 in these networks.
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

/// Network of the watchers.
pub const WATCHERS: &str = "10.0.7.0/24";

/// Returns the configuration of the target for cheating peers.
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
