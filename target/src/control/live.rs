//! What the status page and `riserd top` show: sums since the start, of which two tell a rate.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use riser_scsi::lu::LogicalUnit;
use riser_scsi::reservation::Registration;
use serde::{Deserialize, Serialize};

use super::{health, view};
use crate::config::Backend;
use crate::server::Server;
use crate::server::problems::Subject;
use crate::stats::{BUCKETS, CLASSES, Fault, LunStats, Share, Tally, Times, bound, class_name};
use crate::worker::mail::Snapshot;
use crate::worker::target::TargetDef;

/// The daemon at a moment.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Live {
    /// When, in seconds since 1970. That clock may be set, so this is for people only.
    pub time: f64,
    /// How long the daemon has served, in seconds: what differs between two moments differs by this.
    pub uptime: f64,
    /// Its version.
    pub version: String,
    /// The host's name.
    #[serde(default)]
    pub host: String,
    /// What is missing that it should serve; nothing if it is ready.
    pub missing: Option<String>,
    /// The longest durations of the buckets of all histograms but the last, in seconds.
    pub bounds: Vec<f64>,
    /// Workers.
    pub workers: Vec<LiveWorker>,
    /// Where targets are served.
    #[serde(default)]
    pub portals: Vec<LivePortal>,
    /// Backends that are served, or should be.
    #[serde(default)]
    pub backends: Vec<LiveBackend>,
    /// Targets, as initiators of iSCSI come and leave.
    #[serde(default)]
    pub targets: Vec<LiveTarget>,
    /// Logical units, by target.
    pub luns: Vec<LiveLun>,
    /// Connections of initiators.
    pub sessions: Vec<LiveSession>,
    /// Packets of all devices.
    pub network: LiveNetwork,
}

/// A worker.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct LiveWorker {
    /// Its number.
    pub worker: u16,
    /// Seconds in which it had something to do.
    pub busy: f64,
    /// Seconds in all.
    pub ran: f64,
    /// Bytes of its data buffers.
    pub pool: usize,
    /// Bytes of them that are free.
    pub pool_free: usize,
}

/// A portal.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct LivePortal {
    /// `srp`, `iser` or `iscsi`.
    pub protocol: String,
    /// Its address and port.
    pub listen: String,
    /// The targets that it serves.
    pub targets: Vec<String>,
    /// Whether it is listened on.
    pub is_listening: bool,
    /// Why not, if that is known.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
}

/// A backend.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct LiveBackend {
    /// Its name in the configuration.
    pub name: String,
    /// `file`, `device`, `ram` or `null`.
    pub kind: String,
    /// Bytes that it offers; nothing if it is not open.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub size: Option<u64>,
    /// Bytes that its file has been allocated; nothing if that was not measured.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub allocated: Option<u64>,
    /// Bytes that its file system has free; likewise.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub free: Option<u64>,
    /// The percentage of the space available to it at which initiators are warned.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub threshold: Option<u8>,
    /// Whether that is reached.
    pub is_filling: bool,
    /// Operations that its medium failed, by kind.
    pub errors: BTreeMap<String, u64>,
    /// Why it is not served.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
}

/// A target.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct LiveTarget {
    /// Its name.
    pub target: String,
    /// Logins of iSCSI that were accepted.
    pub logins: u64,
    /// Those that were refused, by the answer.
    pub refused: BTreeMap<String, u64>,
    /// The last one of them.
    pub last_refused: Option<LiveRefused>,
    /// What has happened to sessions: `logout`, `partial_logout`, `digest_error`, `timeout`,
    /// `format_error`.
    pub events: BTreeMap<String, u64>,
    /// The last one that was an error.
    pub last_error: Option<LiveError>,
}

/// A login that was refused.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct LiveRefused {
    /// With what answer.
    pub answer: String,
    /// Whose.
    pub initiator: String,
    /// From where.
    pub address: String,
    /// How long ago, in seconds.
    pub ago: f64,
}

/// An error in a session.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct LiveError {
    /// What.
    pub event: String,
    /// Whose session.
    pub initiator: String,
}

/// A logical unit of a target.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct LiveLun {
    /// The target.
    pub target: String,
    /// Its number.
    pub lun: u16,
    /// Bytes.
    pub size: u64,
    /// Whether it refuses writes.
    pub read_only: bool,
    /// Commands under way.
    pub queue_depth: u64,
    /// Commands that failed, unit attentions apart.
    pub errors: u64,
    /// Commands that were answered with a unit attention.
    #[serde(default)]
    pub attentions: u64,
    /// All of these, by kind of command and by status or sense key.
    #[serde(default)]
    pub faults: BTreeMap<String, u64>,
    /// Commands, by kind; those that there were.
    pub ops: BTreeMap<String, LiveOp>,
    /// Commands, by the initiator's name, sessions that are over included.
    #[serde(default)]
    pub initiators: BTreeMap<String, LiveShare>,
    /// Resets of the unit, whichever target they came by.
    #[serde(default)]
    pub resets: u64,
    /// Tasks that an initiator asked to be aborted, likewise.
    #[serde(default)]
    pub aborts: u64,
    /// Those that were not there.
    #[serde(default)]
    pub vain_aborts: u64,
    /// Who has reserved the unit, likewise.
    #[serde(default)]
    pub reservations: LiveReservations,
}

/// Registrations and reservations of a unit.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct LiveReservations {
    /// PRGENERATION.
    pub generation: u32,
    /// TYPE of the persistent reservation, if there is one (SPC-4 table 40).
    #[serde(rename = "type", skip_serializing_if = "Option::is_none")]
    pub kind: Option<u8>,
    /// Whether all of it persists through power loss (PTPL_A).
    #[serde(default)]
    pub persists: bool,
    /// Who is registered, in the order in which they came.
    pub registrants: Vec<LiveRegistrant>,
    /// The initiator port that has the unit by RESERVE.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reserved: Option<String>,
}

/// A registration.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct LiveRegistrant {
    /// The initiator port: two halves of an identifier of SRP, or a port name of iSCSI.
    pub initiator: String,
    /// The target port, likewise.
    pub target: String,
    /// The target port's RELATIVE TARGET PORT IDENTIFIER.
    pub relative_id: u16,
    /// The reservation key, as `0x` and 16 digits.
    pub key: String,
    /// PRGENERATION before it got this key.
    pub generation: u32,
    /// Whether the persistent reservation was made by it. Of one of all registrants, every other
    /// registrant is a holder as well.
    pub has_reserved: bool,
}

/// What an initiator has done.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct LiveShare {
    /// Commands answered.
    pub commands: u64,
    /// Data to it, in bytes.
    pub read: u64,
    /// Data from it, in bytes.
    pub written: u64,
}

/// Commands of one kind.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct LiveOp {
    /// How many.
    pub commands: u64,
    /// Data both ways, in bytes.
    pub bytes: u64,
    /// Seconds that they took in all.
    pub seconds: f64,
    /// How many took how long, by bucket.
    pub buckets: Vec<u64>,
}

/// A connection of an initiator.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct LiveSession {
    /// The target's name.
    pub target: String,
    /// The initiator port.
    pub initiator: String,
    /// `srp`, `iser` or `iscsi`.
    pub protocol: String,
    /// Where the initiator is.
    pub peer: String,
    /// The worker.
    pub worker: u16,
    /// Where it is in its life.
    pub state: String,
    /// Requests under way.
    pub in_flight: usize,
    /// Commands answered to the initiator port by the target at this worker.
    pub commands: u64,
    /// Their data both ways, in bytes.
    pub bytes: u64,
    /// Data to the initiator, in bytes.
    #[serde(default)]
    pub read: u64,
    /// Data from the initiator, in bytes.
    #[serde(default)]
    pub written: u64,
    /// PDUs of iSCSI whose digest was wrong.
    #[serde(default)]
    pub digest_errors: u64,
}

/// Packets of our software NICs.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct LiveNetwork {
    /// Bytes that came.
    pub bytes_in: u64,
    /// Bytes that went.
    pub bytes_out: u64,
    /// Packets that came or went.
    pub packets: u64,
    /// Packets sent again.
    pub retransmits: u64,
}

/// What its units have done, without asking workers for anything.
#[must_use]
pub fn sums(server: &Server, uptime: Duration) -> Live {
    let now = SystemTime::now().duration_since(UNIX_EPOCH);
    let catalog = server.shared().registry.catalog();
    let stats = catalog.targets.iter().flat_map(|target| &target.stats);
    let lun = |stats: &Arc<LunStats>| LiveLun {
        target: stats.target().to_owned(),
        lun: stats.lun(),
        queue_depth: stats.queue_depth(),
        errors: errors(&stats.faults()),
        ops: ops(stats),
        ..LiveLun::default()
    };
    Live {
        time: now.unwrap_or_default().as_secs_f64(),
        uptime: uptime.as_secs_f64(),
        version: env!("CARGO_PKG_VERSION").to_owned(),
        bounds: (0..BUCKETS).filter_map(bound).map(seconds).collect(),
        luns: stats.map(lun).collect(),
        ..Live::default()
    }
}

/// The daemon now.
#[must_use]
pub fn live(server: &Server, uptime: Duration) -> Live {
    let snapshots = server.snapshot();
    let now = SystemTime::now().duration_since(UNIX_EPOCH);
    let uname = rustix::system::uname();
    Live {
        time: now.unwrap_or_default().as_secs_f64(),
        uptime: uptime.as_secs_f64(),
        version: env!("CARGO_PKG_VERSION").to_owned(),
        host: uname.nodename().to_string_lossy().into_owned(),
        missing: health::ready(server, &snapshots).err(),
        bounds: (0..BUCKETS).filter_map(bound).map(seconds).collect(),
        portals: portals(server, &snapshots),
        backends: backends(server),
        workers: snapshots.iter().map(worker).collect(),
        targets: targets(server),
        luns: luns(server, &snapshots),
        sessions: sessions(server, &snapshots),
        network: network(&snapshots),
    }
}

fn seconds(nanos: u64) -> f64 {
    nanos as f64 / 1e9
}

fn worker(snapshot: &Snapshot) -> LiveWorker {
    LiveWorker {
        worker: snapshot.worker,
        busy: snapshot.busy.as_secs_f64(),
        ran: snapshot.ran.as_secs_f64(),
        pool: snapshot.pool_size,
        pool_free: snapshot.pool_free,
    }
}

fn targets(server: &Server) -> Vec<LiveTarget> {
    let catalog = server.shared().registry.catalog();
    let live = |target: &TargetDef| {
        let counts = target.counts.counts();
        let events = counts.events.iter();
        let refused = counts.refused.iter();
        LiveTarget {
            target: target.config.name.clone(),
            logins: counts.logins,
            refused: refused
                .map(|(status, n)| (status.name().to_owned(), n))
                .collect(),
            last_refused: counts.last_refused.map(|refused| LiveRefused {
                answer: refused.status.name().to_owned(),
                initiator: refused.initiator,
                address: refused.address.to_string(),
                ago: refused.at.elapsed().as_secs_f64(),
            }),
            events: events
                .map(|(event, n)| (event.name().to_owned(), n))
                .collect(),
            last_error: counts.last_error.map(|(event, initiator)| LiveError {
                event: event.name().to_owned(),
                initiator,
            }),
        }
    };
    catalog.targets.iter().map(live).collect()
}

fn luns(server: &Server, snapshots: &[Snapshot]) -> Vec<LiveLun> {
    let catalog = server.shared().registry.catalog();
    let mut luns = Vec::new();
    for target in &catalog.targets {
        for ((number, unit), stats) in target.units.iter().zip(&target.stats) {
            let management = unit.management();
            let faults = stats.faults();
            luns.push(LiveLun {
                target: target.config.name.clone(),
                lun: *number,
                size: unit.lu.capacity_bytes(),
                read_only: target.is_read_only(*number),
                queue_depth: stats.queue_depth(),
                errors: errors(&faults),
                attentions: attentions(&faults),
                faults: by_kind(&faults),
                ops: ops(stats),
                initiators: initiators(stats, snapshots),
                resets: management.resets,
                aborts: management.aborts,
                vain_aborts: management.vain_aborts,
                reservations: reservations(&unit.lu),
            });
        }
    }
    luns
}

/// All portals, each once.
fn portals(server: &Server, snapshots: &[Snapshot]) -> Vec<LivePortal> {
    let catalog = server.shared().registry.catalog();
    let problems = server.problems();
    let mut portals: BTreeMap<(String, SocketAddr), LivePortal> = BTreeMap::new();
    for target in &catalog.targets {
        for (protocol, at) in &target.listens {
            let new = || {
                let problem = problems.of(&Subject::portal(*protocol, *at));
                LivePortal {
                    protocol: protocol.to_string(),
                    listen: at.to_string(),
                    targets: Vec::new(),
                    is_listening: health::is_listening(*protocol, *at, snapshots),
                    error: problem.map(|problem| problem.why.clone()),
                }
            };
            let live = portals
                .entry((protocol.to_string(), *at))
                .or_insert_with(new);
            live.targets.push(target.config.name.clone());
        }
    }
    // What is not at an address yet, by how it is configured.
    let targets = &server.config().targets;
    let all = targets
        .iter()
        .flat_map(|target| target.portals.iter().map(move |portal| (target, portal)));
    let lacking = all.filter_map(|(target, portal)| {
        let problem = problems.of(&Subject::Wildcard(portal.listen, portal.protocol))?;
        Some(LivePortal {
            protocol: portal.protocol.to_string(),
            listen: portal.listen.to_string(),
            targets: vec![target.name.clone()],
            is_listening: false,
            error: Some(problem.why.clone()),
        })
    });
    portals.into_values().chain(lacking).collect()
}

/// Backends of units, and others that are open, in the order of the configuration.
fn backends(server: &Server) -> Vec<LiveBackend> {
    let open: BTreeMap<_, _> = server.backends().collect();
    let problems = server.problems();
    let configured = server.config().backends.iter();
    let live = |backend: &Backend| {
        let name = backend.name.as_str();
        let store = open.get(name);
        let problem = problems.of(&Subject::Backend(name.to_owned()));
        // One that no target uses is neither.
        if store.is_none() && problem.is_none() {
            return None;
        }
        let store = store.filter(|store| !store.is_absent());
        let space = store.and_then(|store| store.space());
        let unit = server.unit_on(name);
        let errors = store.into_iter().flat_map(|store| store.errors());
        Some(LiveBackend {
            name: name.to_owned(),
            kind: backend.spec.source.kind().to_owned(),
            size: store.map(|store| store.capacity()),
            allocated: space.map(|space| space.allocated),
            free: space.map(|space| space.free),
            threshold: unit.and_then(|unit| unit.lu.threshold()),
            is_filling: unit.is_some_and(|unit| unit.lu.is_filling()),
            errors: errors.map(|(kind, n)| (kind.to_owned(), n)).collect(),
            error: problem.map(|problem| problem.why.clone()),
        })
    };
    configured.filter_map(live).collect()
}

fn errors(faults: &Tally<Fault>) -> u64 {
    let errors = faults.iter().filter(|(fault, _)| fault.is_error());
    errors.map(|(_, n)| n).sum()
}

fn attentions(faults: &Tally<Fault>) -> u64 {
    let met = faults.iter().filter(|(fault, _)| fault.is_attention());
    met.map(|(_, n)| n).sum()
}

fn by_kind(faults: &Tally<Fault>) -> BTreeMap<String, u64> {
    let kind = |fault: Fault| format!("{}: {}", class_name(fault.class), fault.name());
    let mut kinds = BTreeMap::new();
    for (fault, n) in faults.iter() {
        *kinds.entry(kind(fault)).or_default() += n;
    }
    kinds
}

fn reservations(lu: &LogicalUnit) -> LiveReservations {
    let all = lu.registrations();
    let registrant = |one: Registration| LiveRegistrant {
        initiator: one.initiator.to_string(),
        target: one.target.to_string(),
        relative_id: one.relative_id,
        key: format!("{:#018x}", one.key),
        generation: one.generation,
        has_reserved: one.has_reserved,
    };
    let holder = all.reserved.and_then(|holder| lu.nexus(holder));
    LiveReservations {
        generation: all.generation,
        kind: all.kind,
        persists: all.persists,
        registrants: all.registrants.into_iter().map(registrant).collect(),
        reserved: holder.map(|nexus| nexus.initiator.to_string()),
    }
}

/// What initiators have done at a unit, now and before.
fn initiators(stats: &Arc<LunStats>, snapshots: &[Snapshot]) -> BTreeMap<String, LiveShare> {
    let mut shares = stats.kept();
    for entry in snapshots.iter().flat_map(|snapshot| &snapshot.accounts) {
        if Arc::ptr_eq(entry.account.lun(), stats) {
            // Of a port of iSCSI the name without the session's identifier.
            let name = entry.initiator.split(',').next().unwrap_or_default();
            *shares.entry(name.to_owned()).or_default() += entry.account.share();
        }
    }
    let live = |(name, share): (String, Share)| (name, live_share(share));
    shares.into_iter().map(live).collect()
}

fn live_share(share: Share) -> LiveShare {
    LiveShare {
        commands: share.commands,
        read: share.read,
        written: share.written,
    }
}

fn ops(stats: &LunStats) -> BTreeMap<String, LiveOp> {
    let op = |times: &Times, bytes| LiveOp {
        commands: times.count(),
        bytes,
        seconds: seconds(times.nanos),
        buckets: times.buckets.to_vec(),
    };
    let all = CLASSES.map(|class| (class_name(class), stats.total(class)));
    let used = all.iter().filter(|(_, counts)| counts.total.count() > 0);
    used.map(|(name, counts)| ((*name).to_owned(), op(&counts.total, counts.bytes)))
        .collect()
}

fn sessions(server: &Server, snapshots: &[Snapshot]) -> Vec<LiveSession> {
    let catalog = server.shared().registry.catalog();
    let mut done: BTreeMap<(u16, &str, &str), Share> = BTreeMap::new();
    for snapshot in snapshots {
        for entry in &snapshot.accounts {
            let key = (
                snapshot.worker,
                &*entry.initiator,
                entry.account.lun().target(),
            );
            *done.entry(key).or_default() += entry.account.share();
        }
    }
    let live = |view: view::SessionView| {
        let share = done
            .get(&(view.worker, &*view.initiator, &*view.target))
            .copied()
            .unwrap_or_default();
        LiveSession {
            target: view.target,
            initiator: view.initiator,
            protocol: view.protocol,
            peer: view.peer,
            worker: view.worker,
            state: view.state,
            in_flight: view.in_flight,
            digest_errors: view.digest_errors,
            commands: share.commands,
            bytes: share.read + share.written,
            read: share.read,
            written: share.written,
        }
    };
    let views = view::sessions_of(snapshots, &catalog);
    views.into_iter().map(live).collect()
}

fn network(snapshots: &[Snapshot]) -> LiveNetwork {
    let mut sum = LiveNetwork::default();
    let devices = snapshots.iter().flat_map(|s| &s.devices);
    for nic in devices.filter_map(|device| device.nic) {
        sum.bytes_in += nic.nic.rx_bytes;
        sum.bytes_out += nic.nic.tx_bytes;
        sum.packets += nic.nic.rx_packets + nic.nic.tx_packets;
        sum.retransmits += nic.rc.retransmits;
    }
    sum
}
