//! Data for the status page and `riserd top`: creates [`Live`].

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use riser_admin_api::live::{
    Live, LiveBackend, LiveError, LiveLun, LiveNetwork, LiveOp, LivePortal, LiveRefused,
    LiveRegistrant, LiveReservations, LiveSession, LiveShare, LiveTarget, LiveWorker,
};
use riser_scsi::lu::LogicalUnit;
use riser_scsi::reservation::Registration;

use super::{health, view};
use crate::config::Backend;
use crate::server::Server;
use crate::server::problems::{Problems, Subject};
use crate::sessions::catalog::TargetDef;
use crate::stats::{
    BUCKETS, CLASSES, Fault, InitiatorStats, LunStats, Tally, Times, bound, class_name,
};
use crate::worker::mail::Snapshot;

/// Returns the totals of all units, without sending requests to workers.
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

/// Returns all current counters of the daemon. `unsaved` should be true if the configuration file
/// is different from the current configuration.
#[must_use]
pub fn live(server: &Server, uptime: Duration, unsaved: bool) -> Live {
    let snapshots = server.snapshot();
    let problems = server.problems();
    let now = SystemTime::now().duration_since(UNIX_EPOCH);
    let uname = rustix::system::uname();
    Live {
        time: now.unwrap_or_default().as_secs_f64(),
        uptime: uptime.as_secs_f64(),
        version: env!("CARGO_PKG_VERSION").to_owned(),
        host: uname.nodename().to_string_lossy().into_owned(),
        missing: health::ready(server, &snapshots).err(),
        problems: problems.iter().map(view::problem).collect(),
        unsaved,
        bounds: (0..BUCKETS).filter_map(bound).map(seconds).collect(),
        portals: portals(server, &problems, &snapshots),
        backends: backends(server, &problems),
        workers: snapshots.iter().map(worker).collect(),
        targets: targets(server),
        luns: luns(server, &problems, &snapshots),
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

fn luns(server: &Server, problems: &Problems, snapshots: &[Snapshot]) -> Vec<LiveLun> {
    let catalog = server.shared().registry.catalog();
    let mut luns = Vec::new();
    for target in &catalog.targets {
        for ((number, unit), stats) in target.units.iter().zip(&target.stats) {
            let management = unit.management();
            let faults = stats.faults();
            let backend = view::backend_of(server, target, *number);
            let problem = problems.of(&Subject::Backend(backend.to_owned()));
            luns.push(LiveLun {
                target: target.config.name.clone(),
                lun: *number,
                backend: backend.to_owned(),
                state: problem.map(|problem| problem.state().to_owned()),
                size: view::size_of(unit, &catalog),
                read_only: target.is_read_only(*number),
                queue_depth: stats.queue_depth(),
                errors: errors(&faults),
                throttled: throttled(&faults),
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

/// Returns all portals without duplicates.
fn portals(server: &Server, problems: &Problems, snapshots: &[Snapshot]) -> Vec<LivePortal> {
    let catalog = server.shared().registry.catalog();
    let mut portals: BTreeMap<(String, SocketAddr), LivePortal> = BTreeMap::new();
    for target in &catalog.targets {
        for (protocol, at) in &target.listens {
            let new = || {
                let problem = problems.of(&Subject::portal(*protocol, *at));
                LivePortal {
                    protocol: protocol.to_string(),
                    listen: at.to_string(),
                    targets: Vec::new(),
                    is_listening: problem.is_none()
                        && health::is_listening(*protocol, *at, snapshots),
                    error: problem.map(|problem| problem.why.clone()),
                }
            };
            let live = portals
                .entry((protocol.to_string(), *at))
                .or_insert_with(new);
            live.targets.push(target.config.name.clone());
        }
    }
    // If there is no current address, use the configured address.
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

/// Returns the backends of all units and other open backends, in configuration order.
fn backends(server: &Server, problems: &Problems) -> Vec<LiveBackend> {
    let open: BTreeMap<_, _> = server.backends().collect();
    let configured = server.config().backends.iter();
    let live = |backend: &Backend| {
        let name = backend.name.as_str();
        let store = open.get(name);
        let problem = problems.of(&Subject::Backend(name.to_owned()));
        // This backend is not used by any target.
        if store.is_none() && problem.is_none() {
            return None;
        }
        let store = store.filter(|store| !store.is_absent());
        let space = store.and_then(|store| store.space());
        let unit = server.unit_on(name);
        let errors = store.into_iter().flat_map(|store| store.errors());
        let errors = errors.filter(|(_, n)| *n > 0);
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
            state: problem.map(|problem| problem.state().to_owned()),
        })
    };
    configured.filter_map(live).collect()
}

fn errors(faults: &Tally<Fault>) -> u64 {
    let errors = faults.iter().filter(|(fault, _)| fault.is_error());
    errors.map(|(_, n)| n).sum()
}

fn throttled(faults: &Tally<Fault>) -> u64 {
    let turned_away = faults.iter().filter(|(fault, _)| fault.throttle.is_some());
    turned_away.map(|(_, n)| n).sum()
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

/// Returns the totals of all initiators of a unit, for current and closed sessions.
fn initiators(stats: &Arc<LunStats>, snapshots: &[Snapshot]) -> BTreeMap<String, LiveShare> {
    let mut shares = stats.kept();
    for entry in snapshots.iter().flat_map(|snapshot| &snapshot.accounts) {
        if Arc::ptr_eq(entry.account.lun(), stats) {
            // For an iSCSI port, use the name without the session identifier.
            let name = entry.initiator.split(',').next().unwrap_or_default();
            *shares.entry(name.to_owned()).or_default() += entry.account.share();
        }
    }
    let live = |(name, share): (String, InitiatorStats)| (name, live_share(share));
    shares.into_iter().map(live).collect()
}

fn live_share(share: InitiatorStats) -> LiveShare {
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
    // We need the worker in the key as well: an initiator with channels on several workers has a
    // separate account on each of them, but every channel reports the whole account, so a plain sum
    // would count it several times.
    let mut done: BTreeMap<(u16, &str, &str), InitiatorStats> = BTreeMap::new();
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
    // Shared memory is not a network.
    let devices = snapshots.iter().flat_map(|s| &s.devices);
    let devices = devices.filter(|device| device.provider != riser_transport::shm::PROVIDER);
    for nic in devices.filter_map(|device| device.nic) {
        sum.bytes_in += nic.nic.rx_bytes;
        sum.bytes_out += nic.nic.tx_bytes;
        sum.packets += nic.nic.rx_packets + nic.nic.tx_packets;
        sum.retransmits += nic.rc.retransmits;
    }
    sum
}
