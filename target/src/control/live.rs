//! Data for the status page and `riserd top`: creates [`Live`].

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use riser_admin_api::live::{
    Live, LiveBackend, LiveError, LiveLun, LiveNetwork, LiveOp, LivePortal, LiveRefused,
    LiveRegistrant, LiveReservations, LiveShare, LiveTarget,
};
use riser_admin_api::view::{PortalView, initiator_name};
use riser_scsi::lu::LogicalUnit;
use riser_scsi::reservation::Registration;

use super::view::{Inventory, Standing};
use crate::config::{Backend, Listen};
use crate::fabric::Unit;
use crate::server::Server;
use crate::server::problems::Subject;
use crate::sessions::catalog::TargetDef;
use crate::stats::{BUCKETS, CLASSES, Fault, LunStats, Tally, Times, bound, class_name};
use crate::worker::mail::{SessionAccount, Snapshot};

/// Returns the totals of all units, without sending requests to workers.
#[must_use]
pub fn sums(server: &Server, uptime: Duration) -> Live {
    let catalog = server.shared().registry.catalog();
    let stats = catalog.targets.iter().flat_map(|target| &target.stats);
    Live {
        luns: stats
            .map(|stats| rates_of(stats, &stats.faults()))
            .collect(),
        ..header(uptime)
    }
}

/// Returns the fields that are required to compute rates, without objects.
fn header(uptime: Duration) -> Live {
    let now = SystemTime::now().duration_since(UNIX_EPOCH);
    Live {
        time: now.unwrap_or_default().as_secs_f64(),
        uptime: uptime.as_secs_f64(),
        version: env!("CARGO_PKG_VERSION").to_owned(),
        bounds: (0..BUCKETS).filter_map(bound).map(seconds).collect(),
        ..Live::default()
    }
}

/// Returns the counters of a unit that are required to compute rates.
fn rates_of(stats: &LunStats, faults: &Tally<Fault>) -> LiveLun {
    LiveLun {
        target: stats.target().to_owned(),
        lun: stats.lun(),
        queue_depth: stats.queue_depth(),
        errors: faults.total_of(Fault::is_error),
        ops: ops(stats),
        ..LiveLun::default()
    }
}

impl Inventory<'_> {
    /// Returns all current counters of the daemon.
    #[must_use]
    pub fn live(&self, uptime: Duration, standing: Standing) -> Live {
        let uname = rustix::system::uname();
        Live {
            host: uname.nodename().to_string_lossy().into_owned(),
            missing: self.ready().err(),
            problems: self.problem_views(),
            unsaved: standing == Standing::Unsaved,
            restored: standing == Standing::Restored,
            portals: self.live_portals(),
            backends: self.backends(),
            workers: self.workers(),
            targets: self.catalog.targets.iter().map(live_target).collect(),
            luns: self.live_luns(),
            sessions: self.sessions(),
            network: network(self.snapshots()),
            ..header(uptime)
        }
    }

    fn live_luns(&self) -> Vec<LiveLun> {
        // Each session has an account for each of its units, so only iterate over them once.
        let mut accounts = Accounts::new();
        for entry in self.snapshots().iter().flat_map(|s| &s.accounts) {
            let unit = accounts.entry(Arc::as_ptr(entry.account.lun()));
            unit.or_default().push(entry);
        }
        let accounts = &accounts;
        let targets = self.catalog.targets.iter();
        let luns = targets.flat_map(|target| {
            let units = target.units.iter().zip(&target.stats);
            units.map(move |((number, unit), stats)| {
                let accounts = accounts.get(&Arc::as_ptr(stats));
                let accounts = accounts.map_or(&[][..], Vec::as_slice);
                LiveLun {
                    initiators: initiators(stats, accounts),
                    ..self.live_lun(target, *number, unit, stats)
                }
            })
        });
        luns.collect()
    }

    fn live_lun(
        &self,
        target: &TargetDef,
        number: u16,
        unit: &Unit,
        stats: &Arc<LunStats>,
    ) -> LiveLun {
        let (management, faults) = (unit.management(), stats.faults());
        let view = self.lun(target, number, unit);
        LiveLun {
            state: view.problem.as_ref().map(|problem| problem.state.clone()),
            unit: view,
            throttled: faults.total_of(|fault| fault.throttle.is_some()),
            attentions: faults.total_of(Fault::is_attention),
            faults: by_kind(&faults),
            resets: management.resets,
            aborts: management.aborts,
            vain_aborts: management.vain_aborts,
            reservations: reservations(&unit.lu),
            ..rates_of(stats, &faults)
        }
    }

    /// Returns the portals of all targets without duplicates.
    fn live_portals(&self) -> Vec<LivePortal> {
        let mut portals: BTreeMap<(String, Listen), LivePortal> = BTreeMap::new();
        for target in &self.catalog.targets {
            for ((protocol, listen), portal) in self.portals(target) {
                let at = listen.at().filter(|_| portal.problem.is_none());
                let new = || LivePortal {
                    is_listening: at.is_some_and(|at| self.is_listening(protocol, at)),
                    error: portal.problem.as_ref().map(|problem| problem.error.clone()),
                    portal: PortalView {
                        names: None,
                        ..portal.clone()
                    },
                    targets: Vec::new(),
                };
                let live = portals.entry((portal.protocol.clone(), listen));
                let live = live.or_insert_with(new);
                live.targets.push(target.config.name.clone());
            }
        }
        portals.into_values().collect()
    }

    /// Returns the backends of all units and other open backends, in configuration order.
    pub(super) fn backends(&self) -> Vec<LiveBackend> {
        let open: BTreeMap<_, _> = self.server.backends().collect();
        let live = |backend: &Backend| {
            let name = backend.name.as_str();
            let store = open.get(name);
            let problem = self.problem_of(&Subject::Backend(name.to_owned()));
            // This backend is not used by any target.
            if store.is_none() && problem.is_none() {
                return None;
            }
            let store = store.filter(|store| !store.is_absent());
            let space = store.and_then(|store| store.space());
            let unit = self.server.unit_on(name);
            let errors = store.into_iter().flat_map(|store| store.errors());
            let causes = store.map(|store| self.server.causes(name, store));
            let causes = causes.into_iter().flatten().map(|failing| failing.cause);
            let causes: BTreeSet<_> = causes.collect();
            let (error, state) = problem
                .map(|problem| (problem.error, problem.state))
                .unzip();
            Some(LiveBackend {
                name: name.to_owned(),
                kind: backend.spec.source.kind().to_owned(),
                size: store.map(|store| store.capacity()),
                allocated: space.map(|space| space.allocated),
                free: space.map(|space| space.free),
                threshold: unit.and_then(|unit| unit.lu.threshold()),
                is_filling: unit.is_some_and(|unit| unit.lu.is_filling()),
                errors: errors.map(|(kind, n)| (kind.to_owned(), n)).collect(),
                error,
                state,
                causes: causes
                    .iter()
                    .map(|cause| cause.label().to_owned())
                    .collect(),
            })
        };
        let configured = self.server.config().backends.iter();
        configured.filter_map(live).collect()
    }
}

fn seconds(nanos: u64) -> f64 {
    nanos as f64 / 1e9
}

fn live_target(target: &TargetDef) -> LiveTarget {
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

/// Current sessions by unit.
type Accounts<'a> = HashMap<*const LunStats, Vec<&'a SessionAccount>>;

/// Returns the totals of all initiators of a unit, for current and closed sessions.
fn initiators(stats: &LunStats, accounts: &[&SessionAccount]) -> BTreeMap<String, LiveShare> {
    let mut shares = stats.kept();
    for entry in accounts {
        let name = initiator_name(&entry.initiator).to_owned();
        *shares.entry(name).or_default() += entry.account.share();
    }
    shares
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
