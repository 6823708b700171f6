//! What the status page and `riserd top` show: sums since the start, of which two tell a rate.

use std::collections::BTreeMap;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use serde::{Deserialize, Serialize};

use super::{health, view};
use crate::server::Server;
use crate::stats::{BUCKETS, CLASSES, LunStats, Times, bound, class_name};
use crate::worker::mail::Snapshot;

/// The daemon at a moment.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Live {
    /// When, in seconds since 1970.
    pub time: f64,
    /// How long the daemon has served, in seconds.
    pub uptime: f64,
    /// Its version.
    pub version: String,
    /// What is missing that it should serve; nothing if it is ready.
    pub missing: Option<String>,
    /// The longest durations of the buckets of all histograms but the last, in seconds.
    pub bounds: Vec<f64>,
    /// Workers.
    pub workers: Vec<LiveWorker>,
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
    /// Commands that failed.
    pub errors: u64,
    /// Commands, by kind; those that there were.
    pub ops: BTreeMap<String, LiveOp>,
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
    /// Commands answered to the initiator port at this worker.
    pub commands: u64,
    /// Their data both ways, in bytes.
    pub bytes: u64,
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

/// The daemon now.
#[must_use]
pub fn live(server: &Server, uptime: Duration) -> Live {
    let snapshots = server.snapshot();
    let now = SystemTime::now().duration_since(UNIX_EPOCH);
    Live {
        time: now.unwrap_or_default().as_secs_f64(),
        uptime: uptime.as_secs_f64(),
        version: env!("CARGO_PKG_VERSION").to_owned(),
        missing: health::ready(server, &snapshots).err(),
        bounds: (0..BUCKETS).filter_map(bound).map(seconds).collect(),
        workers: snapshots.iter().map(worker).collect(),
        luns: luns(server),
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

fn luns(server: &Server) -> Vec<LiveLun> {
    let catalog = server.shared().registry.catalog();
    let mut luns = Vec::new();
    for target in &catalog.targets {
        for ((number, unit), stats) in target.units.iter().zip(&target.stats) {
            luns.push(LiveLun {
                target: target.config.name.clone(),
                lun: *number,
                size: unit.lu.capacity_bytes(),
                read_only: unit.lu.config().read_only,
                queue_depth: stats.queue_depth(),
                errors: stats.faults().total(),
                ops: ops(stats),
            });
        }
    }
    luns
}

fn ops(stats: &LunStats) -> BTreeMap<String, LiveOp> {
    let op = |times: &Times, bytes| LiveOp {
        commands: times.count(),
        bytes,
        seconds: seconds(times.nanos),
        buckets: times.buckets.to_vec(),
    };
    let all = CLASSES.map(|class| (class_name(class), stats.class(class)));
    let used = all.iter().filter(|(_, counts)| counts.total.count() > 0);
    used.map(|(name, counts)| ((*name).to_owned(), op(&counts.total, counts.bytes)))
        .collect()
}

fn sessions(server: &Server, snapshots: &[Snapshot]) -> Vec<LiveSession> {
    let catalog = server.shared().registry.catalog();
    let mut done: BTreeMap<(u16, &str), (u64, u64)> = BTreeMap::new();
    for snapshot in snapshots {
        for entry in &snapshot.accounts {
            let sum = done.entry((snapshot.worker, &entry.initiator)).or_default();
            for class in CLASSES {
                let view = entry.account.class(class);
                sum.0 += view.commands;
                sum.1 += view.bytes;
            }
        }
    }
    let live = |view: view::SessionView| {
        let (commands, bytes) = done
            .get(&(view.worker, &*view.initiator))
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
            commands,
            bytes,
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
