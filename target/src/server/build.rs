//! Converts a configuration to the state shared by workers.

#[cfg(test)]
mod losses;
mod names;
mod portals;
mod secrets;

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::net::SocketAddr;
use std::path::Path;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant, SystemTime};

use riser_scsi::config::Identity;
use riser_scsi::lu::{LogicalUnit, UnitState};
use rustc_hash::FxHashMap;

pub(crate) use self::secrets::check_own;
use self::secrets::{Secrets, check_secrets};
use super::ServerError;
use super::addresses::{self, Addresses, Expansion, PortalAt};
use super::handover::ServerState;
use super::identities::{Found, Identities};
use super::ports::{AllPortIds, Port, PortIds};
use super::problems::{Problems, Subject};
use super::{Keepers, ports};
use crate::backend::{
    FileId, FlushFailures, OpenError, OpenRequest, OpenedStores, Ram, Spec, Store, lost_flushes,
    open_all, query, undo_all, unit_config,
};
use crate::config::{self, Backend, Config, HostId, Listen, Lun, Protocol, Target};
use crate::fabric::{Unit, UnitIdx};
use crate::qos::{Initiators, IoLimits};
use crate::sessions::blocklist::Blocklist;
use crate::sessions::budget::SessionLimits;
use crate::sessions::catalog::{Catalog, IscsiDef, PortalDef, TargetDef};
use crate::srp::LoginLimits;
use crate::stats::{LunStats, TargetStats};
use crate::worker::portals::Unserved;

/// Maximum number of tasks per unit, for all initiators.
const MAX_TASKS: u32 = 1 << 16;

/// Returns the number of workers.
pub(super) fn workers(config: &Config) -> usize {
    let cores = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    if let Some(note) = config.workers.note(cores) {
        tracing::warn!("{note}");
    }
    config.workers.number(cores)
}

/// Returns the CPU to pin a worker to, if configured.
pub(super) fn cpu(config: &Config, worker: usize) -> Option<usize> {
    let cpus = &config.workers.cpus;
    (!cpus.is_empty()).then(|| cpus[worker % cpus.len()])
}

/// Returns the session limits from the configuration.
pub(super) fn session_limits(config: &Config) -> SessionLimits {
    let limits = &config.limits;
    SessionLimits {
        sessions: limits.max_sessions,
        per_address: limits.sessions_per_address,
        login: LoginLimits {
            req_lim: limits.queue_depth,
            max_it_iu_len: limits.max_iu_size,
            max_channels: limits.channels_per_session,
            send_queue: limits.send_queue,
        },
    }
}

/// Returns the iSCSI part of a target.
fn iscsi(
    target: &config::Target,
    listens: &[PortalAt],
    ids: &PortIds,
    secrets: &mut Secrets,
) -> Result<Option<IscsiDef>, ServerError> {
    // All portals belong to the same sessions, on any transport. So they are a single portal group,
    // which is a single port for initiators. Relative port identifiers are unique across all
    // portals of a target. A target may have a name and a port number without having any iSCSI
    // portal.
    let has_portal = target.portals.iter().any(|p| p.protocol.is_iscsi());
    let group = ids.get(&Port::Iscsi).filter(|_| has_portal);
    let (Some(name), Some(&group)) = (&target.iqn, group) else {
        return Ok(None);
    };
    let portals = |protocol| {
        let all = listens.iter().filter(move |p| p.protocol == protocol);
        all.map(|p| p.at).collect()
    };
    Ok(Some(IscsiDef {
        name: name.clone(),
        group,
        portals: portals(Protocol::Iscsi),
        iser: portals(Protocol::Iser),
        auth: secrets.auth(target.chap.as_ref())?,
        rule_auths: secrets.rule_auths(&target.access)?,
        unlisted: addresses::of_any_only(listens).collect(),
        redirects: listens
            .iter()
            .filter_map(|p| Some((p.at, target.portals[p.portal].redirect.clone()?)))
            .collect(),
    }))
}

/// Time for which a unit is reported as becoming ready while its file is locked: if a daemon was
/// killed, the kernel may still be completing its I/O.
const LOCK_WAIT: Duration = Duration::from_secs(30);

/// A backend that could not be opened.
#[derive(Clone, Debug)]
struct Absent {
    /// The configuration used for the last attempt.
    spec: Spec,
    /// Set if we are only waiting for a lock.
    awaited: Option<Awaited>,
}

/// A file that is locked by another process.
#[derive(Clone, Copy, Debug)]
struct Awaited {
    since: Instant,
    /// The file, or `None` for a device.
    file: Option<FileId>,
}

/// Creates catalogs. Objects that are also used by the previous catalog are kept, with the same
/// numbers.
///
/// Backends are identified by name. Each backend is a single unit, even if it is used by multiple
/// targets or LUNs, so they all share its reservations. Whether a LUN is read-only is part of the
/// LUN map.
#[derive(Clone, Debug, Default)]
pub(super) struct Builder {
    stores: BTreeMap<String, usize>,
    units: BTreeMap<String, Arc<Unit>>,
    opened: Vec<Option<Arc<Store>>>,
    unit_stores: Vec<usize>,
    /// Units by number, including removed units.
    numbered: Vec<Weak<Unit>>,
    ports: AllPortIds,
    stats: BTreeMap<(String, u16), Arc<LunStats>>,
    counts: BTreeMap<String, Arc<TargetStats>>,
    blocklist: Arc<Blocklist>,
    /// Limiters for initiators, by target name.
    initiators: BTreeMap<String, Arc<Initiators>>,
    /// Limits by unit number.
    unit_limits: Vec<IoLimits>,
    /// Store state that must survive a restart.
    keepers: Keepers,
    /// Contents of RAM disks that are not open yet.
    rams: BTreeMap<String, Arc<Ram>>,
    /// Backends that could not be opened.
    absent: BTreeMap<String, Absent>,
    /// Backends for which we tried to open the file for the current catalog.
    tried: BTreeSet<String>,
    problems: Problems,
    addresses: Addresses,
    /// Portal addresses of the current catalog.
    expansion: Expansion,
    /// Portals with a wildcard in the current catalog.
    wildcards: BTreeSet<(Protocol, Listen)>,
    /// True if the previous catalog did not contain all of these wildcards.
    has_new_wildcards: bool,
    identities: Identities,
    /// State of removed units by backend name, to be restored if the backend has a LUN again.
    removed: BTreeMap<String, UnitState>,
    /// Flush failures of units, and of removed units while they may still fail, or until they are
    /// cleared.
    flush_failures: FxHashMap<Identity, Arc<FlushFailures>>,
    /// The error, if the stored names could not be read.
    unread: Option<String>,
    /// SRP portals without names because of this error.
    unnamed_portals: Vec<Unserved>,
    secrets: Secrets,
    /// True if missing resources should be reported as problems instead of errors.
    is_lenient: bool,
}

/// Converts an error when opening a backend, or when checking if it could be opened.
fn closed(name: &str) -> impl FnOnce(OpenError) -> ServerError {
    let name = name.to_owned();
    move |source| ServerError::Backend { name, source }
}

impl Builder {
    /// Creates an empty builder that continues the numbering of the previous server.
    ///
    /// # Errors
    /// [`ServerError::Ports`], [`ServerError::Blocklist`].
    pub(super) fn after(server_state: &ServerState, keepers: Keepers) -> Result<Self, ServerError> {
        let saved = keepers.ports.as_ref().map(|keeper| keeper.load());
        let saved = saved.transpose().map_err(ServerError::Ports)?;
        let mut ports = ports::read(saved.unwrap_or_default());
        // Ports from the handover override stored ports, because they are already in use by
        // initiators.
        ports.extend(server_state.ports.clone());
        let blocklist = Blocklist::open(keepers.blocklist.clone());
        let blocklist = blocklist.map_err(ServerError::Blocklist)?;
        let mut builder = Self {
            keepers,
            blocklist: Arc::new(blocklist),
            ports,
            rams: server_state.rams.clone(),
            ..Self::default()
        };
        builder.read_identities();
        Ok(builder)
    }

    /// Sets whether an existing configuration is being retried. If so, known secrets are used
    /// again, and missing resources are reported as problems.
    pub(super) fn set_retrying(&mut self, is_retrying: bool) {
        self.secrets.set_kept(is_retrying);
        self.set_lenient(is_retrying);
    }

    /// Sets whether missing resources should be reported as problems instead of errors.
    pub(super) fn set_lenient(&mut self, is_lenient: bool) {
        self.is_lenient = is_lenient;
    }

    /// Returns true if a missing resource should be reported as a problem instead of an error: if
    /// it is optional, was missing before, belongs to a known wildcard, or is not required at
    /// startup.
    pub(super) fn tolerates(&self, subject: &Subject) -> bool {
        self.is_lenient
            || subject.is_optional()
            || self.problems.has(subject)
            || self.is_of_known_wildcard(subject)
    }

    /// Returns the list of blocked initiators.
    pub(super) fn blocklist(&self) -> &Blocklist {
        &self.blocklist
    }

    /// Returns the current problems.
    pub(super) fn problems(&self) -> &Problems {
        &self.problems
    }

    /// Sets or clears the problem for the metrics address.
    pub(super) fn set_metrics_problem(&mut self, problem: Option<(SocketAddr, &ServerError)>) {
        let problem = problem.map(|(addr, error)| (Subject::Metrics(addr), error));
        self.set_problem(|subject| matches!(subject, Subject::Metrics(_)), problem);
    }

    /// Sets or clears the problem for the admin socket.
    pub(super) fn set_admin_problem(&mut self, problem: Option<(&Path, &ServerError)>) {
        let problem = problem.map(|(path, error)| (Subject::Admin(path.to_owned()), error));
        self.set_problem(|subject| matches!(subject, Subject::Admin(_)), problem);
    }

    /// Copies the control plane problems of the previous server.
    pub(super) fn keep_control_problems(&mut self, before: &Problems) {
        for (subject, problem) in before.iter() {
            // All other problems are detected again by the new server.
            if matches!(subject, Subject::Metrics(_) | Subject::Admin(_)) {
                self.problems.add(subject.clone(), &problem.why);
            }
        }
    }

    /// Sets or clears a problem, for types that can only have a single problem.
    fn set_problem(
        &mut self,
        is_of_kind: impl Fn(&Subject) -> bool,
        problem: Option<(Subject, &ServerError)>,
    ) {
        let before = self.problems.clone();
        let wanted = problem.as_ref().map(|(subject, _)| subject);
        self.problems
            .retain(|subject| !is_of_kind(subject) || Some(subject) == wanted);
        if let Some((subject, error)) = problem {
            self.problems.add(subject, error);
        }
        self.problems.log_since(&before);
    }

    /// Replaces all problems.
    pub(super) fn set_problems(&mut self, problems: Problems) {
        self.problems = problems;
    }

    /// Returns true if a backend could not be opened because it is locked, and we are waiting for
    /// the lock.
    pub(super) fn is_awaited(&self, name: &str) -> bool {
        let absent = self.absent.get(name);
        absent.is_some_and(|absent| absent.awaited.is_some())
    }

    /// Returns true if a backend could not be opened.
    pub(super) fn is_absent(&self, name: &str) -> bool {
        self.absent.contains_key(name)
    }

    /// Called when this has become the builder of the server. Units whose lock we no longer wait
    /// for will report that manual intervention is required.
    pub(super) fn abandon_absent(&self) {
        let abandoned = self.absent.iter().filter(|(_, one)| one.awaited.is_none());
        for (name, _) in abandoned {
            if let Some(unit) = self.units.get(name) {
                unit.lu.stop_awaiting_medium();
            }
        }
    }

    /// Returns true if the device of an open backend was removed.
    fn is_gone(&self, name: &str) -> bool {
        let store = self
            .place_of(name)
            .and_then(|place| self.opened[place].as_ref());
        let failing = store.and_then(|store| store.failing(Instant::now(), SystemTime::now()));
        failing.is_some_and(|failing| failing.is_gone())
    }

    /// Returns true if any open device was removed.
    pub(super) fn has_gone(&self) -> bool {
        self.stores.keys().any(|name| self.is_gone(name))
    }

    /// Stores the port numbers, including those in `old`, because it is still open which of these
    /// will be used.
    ///
    /// # Errors
    /// [`ServerError::Ports`].
    pub(super) fn save_ports(&self, old: &AllPortIds) -> Result<(), ServerError> {
        let Some(keeper) = &self.keepers.ports else {
            return Ok(());
        };
        let all = ports::during(old, &self.ports);
        let ports = ports::write(&all);
        let kept = keeper.load().map_err(ServerError::Ports)?;
        if kept == ports {
            return Ok(());
        }
        match keeper.save(&ports) {
            // The stored file also contains the numbers of removed ports, which is not a reason to
            // fail.
            Err(error) if ports::has_all(&ports::read(kept), &all) => {
                tracing::warn!(%error, "cannot save port numbers to the state directory; numbers of removed ports stay reserved");
                Ok(())
            }
            saved => saved.map_err(ServerError::Ports),
        }
    }

    /// Reverts changes on disk, after backends were created or extended for a catalog that will not
    /// be used.
    pub(super) fn undo<'a>(&self, stores: impl Iterator<Item = &'a Arc<Store>>) {
        let changed: Vec<_> = stores
            .filter(|store| store.changed_file().is_some())
            .collect();
        // Do this first, because a file recorded as existing will not be created again.
        if !changed.is_empty()
            && let Err(error) = self.write_identities()
        {
            tracing::warn!(%error, "cannot remove the saved names of units that are not served");
        }
        undo_all(changed.into_iter());
    }

    /// Called after the first catalog was created. Restores the state of its units from the
    /// previous process.
    pub(super) fn restore_units(&mut self, server_state: &ServerState) {
        for (backend, state) in &server_state.units {
            match self.units.get(backend) {
                Some(unit) => unit.lu.import_state(state),
                None => _ = self.removed.insert(backend.clone(), state.clone()),
            }
        }
        // Backends without names are opened later.
        self.rams.retain(|name, _| self.absent.contains_key(name));
    }

    /// Copies unit states from another builder. If a unit is created again for a backend, or if its
    /// LUN was removed and added again, it is a new object. But registrations and mode pages belong
    /// to the backend while it is in the configuration.
    pub(super) fn keep_unit_states(&mut self, before: &Self, config: &Config) {
        self.removed = before.removed.clone();
        for (name, unit) in &before.units {
            match self.units.get(name) {
                Some(new) if Arc::ptr_eq(new, unit) => {}
                Some(new) => {
                    new.lu.import_state(&unit.lu.retire());
                    // A FORMAT UNIT may have changed the type after the new unit was created.
                    if let Some((_, store)) = self.open().find(|(other, _)| *other == name) {
                        new.lu
                            .restore_protection(|| store.protection().map(|p| p.protection_type));
                    }
                }
                None => _ = self.removed.insert(name.clone(), unit.lu.retire()),
            }
        }
        let has = |name: &str| config.backends.iter().any(|b| b.name == name);
        self.removed.retain(|name, _| has(name));
        let units = &self.units;
        let back = self
            .removed
            .extract_if(.., |name, _| units.contains_key(name));
        for (name, state) in back {
            units[&name].lu.import_state(&state);
        }
    }

    /// Returns states to be imported by the next server, after this server has shut down.
    pub(super) fn removed_states(&self) -> &BTreeMap<String, UnitState> {
        &self.removed
    }

    /// Returns port numbers by target.
    pub(super) fn ports(&self) -> &AllPortIds {
        &self.ports
    }

    /// Returns the current units.
    pub(super) fn units(&self) -> &BTreeMap<String, Arc<Unit>> {
        &self.units
    }

    /// Returns the open backends by name.
    pub(super) fn open(&self) -> impl Iterator<Item = (&String, &Arc<Store>)> {
        let stores = self.stores.iter();
        stores.filter_map(|(name, place)| Some((name, self.opened[*place].as_ref()?)))
    }

    /// Returns the contents of open RAM disks.
    pub(super) fn open_rams(&self) -> BTreeMap<String, Arc<Ram>> {
        self.open()
            .filter_map(|(name, store)| Some((name.clone(), store.ram()?)))
            .collect()
    }

    /// Checks that everything could be opened again by a new process.
    pub(super) fn check_successor(&self, config: &Config) -> Result<(), ServerError> {
        // The new process reads the secrets again.
        let mut secrets = Secrets::default();
        secrets.auth(config.discovery_chap.as_ref())?;
        for target in &config.targets {
            secrets.auth(target.chap.as_ref())?;
            secrets.rule_auths(&target.access)?;
        }
        let spec_of = |name: &str| -> Option<&Spec> {
            let mut backends = config.backends.iter();
            backends.find(|b| b.name == name).map(|b| &b.spec)
        };
        let mut required = self.problems.iter();
        let required = required.find(|(subject, _)| !subject.is_optional());
        if let (true, Some((subject, problem))) = (config.strict, required) {
            let why = format!("{subject}: {}", problem.why);
            return Err(ServerError::Strict(why));
        }
        self.check_identities()?;
        let until = query::until();
        let queries: Vec<_> = self
            .open()
            .filter_map(|(name, store)| Some((name, store, store.start_reopen(spec_of(name)?))))
            .collect();
        // Wait for all of them, so that no thread is left. It would look like a file system that
        // does not respond.
        let results = queries.into_iter();
        let results: Vec<_> = results
            .map(|(name, store, query)| store.reopens(query, until).map_err(closed(name)))
            .collect();
        results.into_iter().collect()
    }

    /// Returns the files and devices that are used by a catalog but not open.
    pub(super) fn open_requests(&self, config: &Config) -> Vec<OpenRequest> {
        let luns = config
            .targets
            .iter()
            .flat_map(|target| target.luns.values());
        let served: BTreeSet<usize> = luns.map(|lun| lun.backend).collect();
        let backends = served.into_iter().map(|place| &config.backends[place]);
        let is_open = |name: &str| {
            self.stores.contains_key(name) && !self.is_absent(name) && !self.is_gone(name)
        };
        let closed = backends.filter(|backend| !is_open(&backend.name));
        let closed = closed.filter(|backend| self.unnamed_unit(backend).is_none());
        closed.filter_map(|backend| self.wish(backend)).collect()
    }

    fn wish(&self, backend: &Backend) -> Option<OpenRequest> {
        backend.spec.source.path()?;
        Some(OpenRequest {
            backend: backend.name.clone(),
            spec: backend.spec.clone(),
            // At startup, wait for a daemon that is still exiting. Otherwise, there will be another
            // retry anyway.
            is_patient: !self.stores.contains_key(&backend.name),
            is_known: self.unread.is_some() || self.identities.knows(backend),
        })
    }

    /// Creates a catalog with the units and targets of backends that are open. Backends that are
    /// not used by the configuration are omitted. They are closed when their last request has
    /// completed.
    pub(super) fn catalog(
        &mut self,
        config: &Config,
        opened: &mut OpenedStores,
    ) -> Result<Catalog, ServerError> {
        let host = self.identities.host(config);
        self.tried.clear();
        // A removed unit does not have limits, so that its waiting commands complete and the
        // backend can be closed.
        self.unit_limits.clear();
        let mut targets = Vec::new();
        self.expand(config)?;
        self.go_without_names(config)?;
        let expansion = std::mem::take(&mut self.expansion);
        for (target, listens) in config.targets.iter().zip(&expansion.targets) {
            let ids = self.port_ids(target);
            let portals = listens.iter().filter(|p| p.protocol == Protocol::Srp);
            let portals =
                portals.filter(|p| !self.is_unnamed_portal(config, &target.portals[p.portal]));
            let portals = portals.map(|p| portal_def(&host, target, p, &ids));
            let portals = portals.collect();
            let (mut members, mut stats) = (Vec::new(), Vec::new());
            for (number, lun) in &target.luns {
                let unit = self.unit(config, &host, *lun, opened)?;
                self.limit(&unit, config.backend(lun));
                members.push((*number, unit));
                stats.push(self.stats(&target.name, *number));
            }
            targets.push(TargetDef {
                config: target.clone(),
                portals,
                units: members,
                stats,
                counts: Arc::clone(self.counts.entry(target.name.clone()).or_default()),
                initiators: Arc::clone(self.initiators.entry(target.name.clone()).or_default()),
                iscsi: iscsi(target, listens, &ids, &mut self.secrets)?,
                listens: listens.iter().map(|p| (p.protocol, p.at)).collect(),
                blocklist: Arc::clone(&self.blocklist),
            });
        }
        self.expansion = expansion;
        self.unit_limits
            .resize(self.unit_stores.len(), IoLimits::default());
        let discovery = self.secrets.auth(config.discovery_chap.as_ref())?;
        self.secrets.drop_unused();
        check_secrets(&discovery, &targets)?;
        self.forget_others(&targets);
        Ok(Catalog {
            limits: session_limits(config),
            commands: config.limits.queue_depth.min(1024) as u16,
            data_out_timeout: config.limits.data_out_timeout,
            connections: config.limits.connections_per_session,
            recovery_level: config.limits.error_recovery_level,
            discovery,
            administrator: config.transport.administrator,
            targets,
            unit_stores: self.unit_stores.clone(),
            units: self.numbered.clone(),
            unit_limits: self.unit_limits.clone(),
            stores: self.opened.clone(),
        })
    }

    /// Returns the port numbers of a target.
    fn port_ids(&mut self, target: &Target) -> PortIds {
        let known = self.ports.entry(target.name.clone()).or_default();
        ports::number(known, target);
        known.clone()
    }

    fn forget_others(&mut self, targets: &[TargetDef]) {
        let is_there = |name: &str| targets.iter().any(|t| t.config.name == name);
        ports::forget_others(&mut self.ports, is_there);
        self.counts.retain(|name, _| is_there(name));
        self.initiators.retain(|name, _| is_there(name));
        let has = |name: &str, lun: u16| {
            let mut same = targets.iter().filter(|t| t.config.name == name);
            same.any(|t| t.config.luns.contains_key(&lun))
        };
        self.stats.retain(|(name, lun), _| has(name, *lun));
        // Compare the object instead of the name, because a unit that was created again has the
        // same name.
        let served = |unit: &Arc<Unit>| {
            let mut all = targets.iter().flat_map(|t| &t.units);
            all.any(|(_, u)| Arc::ptr_eq(u, unit))
        };
        self.units.retain(|_, unit| served(unit));
        self.absent.retain(|name, _| self.units.contains_key(name));
        self.problems.retain(|subject| match subject {
            Subject::Backend(name) => self.absent.contains_key(name),
            _ => true,
        });
        self.flush_failures
            .retain(|_, failures| failures.is_needed());
        let (units, unit_stores) = (&self.units, &self.unit_stores);
        let in_use = |place: usize| {
            let mut all = units.values();
            all.any(|u| unit_stores[u.index.0 as usize] == place)
        };
        self.stores.retain(|_, place| in_use(*place));
        for (place, store) in self.opened.iter_mut().enumerate() {
            if !in_use(place) {
                *store = None;
            }
        }
    }

    /// Returns the backends that the other builder does not have.
    pub(super) fn stores_beyond<'a>(
        &'a self,
        other: &'a Self,
    ) -> impl Iterator<Item = &'a Arc<Store>> {
        let places = self.opened.iter().enumerate();
        places.filter_map(|(place, store)| {
            let is_known = other.opened.get(place).is_some_and(Option::is_some);
            store.as_ref().filter(|_| !is_known)
        })
    }

    /// Returns the index of an open backend.
    pub(super) fn place_of(&self, name: &str) -> Option<usize> {
        self.stores.get(name).copied()
    }

    fn unit(
        &mut self,
        config: &Config,
        host: &HostId,
        lun: Lun,
        opened: &mut OpenedStores,
    ) -> Result<Arc<Unit>, ServerError> {
        let backend = &config.backends[lun.backend];
        let before = self.units.get(&backend.name).cloned();
        let is_back = opened.has(&backend.name, &backend.spec);
        if let Some(unit) = &before
            && ((unit.lu.has_medium() && !is_back) || !self.tried.insert(backend.name.clone()))
        {
            if self.is_gone(&backend.name) {
                // Record this now, because the process may be killed before the device returns.
                self.identities.set_missing(&backend.name, true);
            }
            return Ok(Arc::clone(unit));
        }
        // Not available yet, so it's added later.
        if let Some(unit) = &before
            && self.is_lenient
            && backend.spec.source.path().is_some()
            && !opened.has_result(&backend.name, &backend.spec)
        {
            return Ok(Arc::clone(unit));
        }
        let absent = self.absent.get(&backend.name);
        let awaited = absent.and_then(|absent| absent.awaited);
        let place = self.store(backend, opened)?;
        let is_absent = self.is_absent(&backend.name);
        let has_names = self.unnamed_unit(backend).is_none();
        if let Some(unit) = &before
            && is_absent
            && unit.lu.has_names() == has_names
        {
            return Ok(Arc::clone(unit));
        }
        // Either the device was removed and is back, or the file is different from the locked file.
        // It may also be a device, for which there is no file ID.
        let was_removed = before.as_ref().is_some_and(|unit| unit.lu.has_medium());
        let found = self.opened[place].as_ref().and_then(|store| store.file());
        let awaited = awaited.filter(|_| !is_absent).and_then(|one| one.file);
        let is_other = awaited.is_some_and(|file| found.is_none_or(|found| !found.is_same(&file)));
        if was_removed || is_other {
            self.identities.set_missing(&backend.name, true);
        }
        let unit_config = self.unit_config(config, host, backend, place);
        let name = || backend.name.clone();
        let make = || {
            LogicalUnit::new(unit_config.clone()).map_err(|source| ServerError::Unit {
                name: name(),
                source,
            })
        };
        let mut lu = make()?;
        let mut is_absent = is_absent;
        if !has_names {
            lu = lu.without_names();
        } else if let Some(keeper) = self.keepers.reservations.clone() {
            lu = match lu.with_keeper(keeper) {
                Ok(lu) => lu,
                Err(source) => {
                    self.leave_out(backend, place, source)?;
                    if let Some(before) = before {
                        // It keeps its old index. A new index, which is always the last, is not
                        // used.
                        let old = self.unit_stores[before.index.0 as usize];
                        if place != old {
                            self.opened.truncate(place);
                            self.stores.insert(backend.name.clone(), old);
                        }
                        return Ok(before);
                    }
                    is_absent = true;
                    make()?.without_reservations()
                }
            };
        }
        if self.is_awaited(&backend.name) {
            lu = lu.awaiting_medium();
        } else if is_absent {
            lu = lu.without_medium();
        } else {
            // Don't do this earlier: if its reservations still cannot be read, the backend remains
            // a problem instead of an error.
            let subject = Subject::Backend(backend.name.clone());
            self.problems.remove(&subject);
        }
        if !is_absent {
            self.keep_flush_failures(place, &lu.config().identity);
        }
        Ok(self.enter_unit(config, backend, place, lu))
    }

    /// Uses the flush failures of previous stores for the same unit, or loads saved failures.
    fn keep_flush_failures(&mut self, place: usize, identity: &Identity) {
        let store = self.opened[place].as_ref().expect("just opened");
        let failures = self.flush_failures.entry(identity.clone()).or_default();
        store.share_flush_failures(Arc::clone(failures));
        if let Some(keeper) = &self.keepers.flushes {
            store.keep_flush_failures(Arc::clone(keeper), identity, Instant::now());
        }
    }

    /// Saves failed flushes of backends that were opened but are not served, because the next process
    /// does not receive these errors.
    pub(super) fn save_lost_flushes(&mut self, config: &Config) {
        for lost in lost_flushes() {
            let is_at = |backend: &&Backend| backend.spec.source.path() == Some(&lost.path);
            let backend = config.backends.iter().find(is_at);
            let unit = backend.and_then(|backend| self.units.get(&backend.name));
            let Some(unit) = unit.filter(|unit| unit.lu.has_names()) else {
                let error = io::Error::from_raw_os_error(lost.errno);
                let path = lost.path.display();
                tracing::error!(%path, %error, "cannot save the failed flush of a file without a unit: \
                                                acknowledged writes may be lost");
                continue;
            };
            let identity = &unit.lu.config().identity;
            let failures = self.flush_failures.entry(identity.clone()).or_default();
            failures.record_lost(lost.errno, self.keepers.flushes.as_ref(), identity);
        }
    }

    /// Waits until all flush failures are saved persistently, including failures of removed units.
    pub(super) fn wait_flush_failures_saved(&self) {
        let all = self.flush_failures.values();
        all.for_each(|failures| failures.wait_saved());
    }

    /// Returns the configuration of a backend's unit, using stored names. If these could not be
    /// read, it does not have a name.
    fn unit_config(
        &mut self,
        config: &Config,
        host: &HostId,
        backend: &Backend,
        place: usize,
    ) -> riser_scsi::config::Config {
        let has_names = self.unnamed_unit(backend).is_none();
        let store = self.opened[place].as_ref().expect("just opened");
        let geometry = store.geometry();
        let mut unit_config = unit_config(backend, &geometry, host);
        let identity = &mut unit_config.identity;
        if has_names {
            let found = self.found(&backend.name, store);
            self.identities.keep(config, backend, found, identity);
            // Do this before reading the generation, which counts these changes. A locked file
            // exists, and a backend without names was not tried.
            let is_missing = self.is_absent(&backend.name) && !self.is_awaited(&backend.name);
            self.identities.set_missing(&backend.name, is_missing);
        } else {
            "unknown".clone_into(&mut identity.serial);
        }
        let store = self.opened[place].as_ref().expect("just opened");
        unit_config.cache_generation = Some(self.cache_generation(backend, store));
        let block = geometry.block_size;
        let limits = &mut unit_config.limits;
        limits.max_transfer = config.limits.max_transfer / block * block;
        limits.window = config.limits.window / block * block;
        unit_config
    }

    /// Returns the kind of file found for a backend.
    fn found(&self, name: &str, store: &Store) -> Found {
        match self.is_absent(name) {
            true => Found::Nothing,
            false => store.file().map_or(Found::Other, Found::File),
        }
    }

    /// Adds a unit with the next number, replacing any earlier unit of the backend.
    fn enter_unit(
        &mut self,
        config: &Config,
        backend: &Backend,
        place: usize,
        lu: LogicalUnit,
    ) -> Arc<Unit> {
        let limits = &config.limits;
        let tasks = limits.max_sessions.saturating_mul(limits.queue_depth);
        let index = UnitIdx(self.unit_stores.len() as u32);
        let unit = Arc::new(Unit::new(index, Arc::new(lu), tasks.min(MAX_TASKS)));
        self.unit_stores.push(place);
        self.numbered.push(Arc::downgrade(&unit));
        self.units.insert(backend.name.clone(), Arc::clone(&unit));
        unit
    }

    /// Sets the limits of a unit from its backend, which apply when the catalog is used.
    fn limit(&mut self, unit: &Unit, backend: &Backend) {
        let at = unit.index.0 as usize;
        self.unit_limits
            .resize(self.unit_stores.len(), IoLimits::default());
        self.unit_limits[at] = backend.limits;
    }

    /// Returns the statistics for a LUN, which are kept across catalogs.
    fn stats(&mut self, target: &str, lun: u16) -> Arc<LunStats> {
        let key = (target.to_owned(), lun);
        let new = || Arc::new(LunStats::new(target, lun, Some(Instant::now)));
        Arc::clone(self.stats.entry(key).or_insert_with(new))
    }

    fn store(
        &mut self,
        backend: &Backend,
        opened: &mut OpenedStores,
    ) -> Result<usize, ServerError> {
        let name = &backend.name;
        if let Some(place) = self.stores.get(name)
            && !self.is_absent(name)
            && !opened.has(name, &backend.spec)
        {
            return Ok(*place);
        }
        self.tried.insert(name.clone());
        if let Some(error) = self.unnamed_unit(backend) {
            return self.store_absent(backend, error);
        }
        // Remove the contents from the map: if they were shared by two backends, the two disks
        // would have the same data.
        let ram = self.rams.remove(name).unwrap_or_default();
        let result = match opened.take_result(name, &backend.spec) {
            Some(result) => result,
            None => match self.wish(backend) {
                Some(wish) => open_all(vec![wish])
                    .take_result(name, &backend.spec)
                    .expect("just opened"),
                None => Store::open_with(&backend.spec, ram),
            },
        };
        let store = match result {
            Ok(store) => store,
            Err(error) => return self.store_absent(backend, error),
        };
        self.absent.remove(name);
        let geometry = store.geometry();
        tracing::info!(
            backend = %backend.name, bytes = geometry.capacity, block = geometry.block_size,
            direct = geometry.direct, read_only = geometry.read_only, "opened"
        );
        if let Some(from) = store.extended_from().filter(|from| *from > 0) {
            let to = geometry.capacity;
            tracing::warn!(
                backend = %backend.name, from, to,
                "file was shorter than `size` and was extended with zeroes"
            );
        }
        Ok(self.insert_store(name, store))
    }

    /// Adds a backend that could not be opened.
    fn store_absent(&mut self, backend: &Backend, error: OpenError) -> Result<usize, ServerError> {
        let name = &backend.name;
        let subject = Subject::Backend(name.clone());
        // If its configuration has changed, the backend must exist.
        let is_other = self
            .absent
            .get(name)
            .is_some_and(|absent| absent.spec != backend.spec);
        if is_other || !self.tolerates(&subject) {
            return Err(closed(name)(error));
        }
        self.problems.add(subject, &error);
        // Units and catalogs refer to this index, so keep it while the backend is missing.
        let now = Instant::now();
        let locked = match error {
            OpenError::Locked { file, .. } => Some(Awaited { since: now, file }),
            _ => None,
        };
        if let Some(place) = self.stores.get(name) {
            if let Some(absent) = self.absent.get_mut(name) {
                let is_old = |one: Awaited| now - one.since > LOCK_WAIT;
                if locked.is_none() || absent.awaited.is_some_and(is_old) {
                    absent.awaited = None;
                    self.identities.set_missing(name, true);
                } else if !self.identities.is_missing(name) {
                    // So far, it was missing for a different reason.
                    absent.awaited = absent.awaited.or(locked);
                }
            }
            return Ok(*place);
        }
        let absent = Absent {
            spec: backend.spec.clone(),
            awaited: locked,
        };
        self.absent.insert(name.clone(), absent);
        Ok(self.insert_store(name, Store::absent(&backend.spec)))
    }

    /// Treats a backend as missing because its reservations could not be read, so we do not know
    /// which initiators can use it.
    fn leave_out(
        &mut self,
        backend: &Backend,
        place: usize,
        source: io::Error,
    ) -> Result<(), ServerError> {
        let name = backend.name.clone();
        let subject = Subject::Backend(name.clone());
        if !self.tolerates(&subject) {
            return Err(ServerError::Reservations { name, source });
        }
        let why = format!("cannot read its reservations: {source}");
        self.problems.add(subject, &why);
        let absent = Absent {
            spec: backend.spec.clone(),
            awaited: None,
        };
        self.absent.insert(backend.name.clone(), absent);
        self.opened[place] = Some(Store::absent(&backend.spec));
        Ok(())
    }

    fn insert_store(&mut self, name: &str, store: Arc<Store>) -> usize {
        let place = self.opened.len();
        self.opened.push(Some(store));
        self.stores.insert(name.to_owned(), place);
        place
    }
}

fn portal_def(host: &HostId, target: &Target, listens: &PortalAt, ids: &PortIds) -> PortalDef {
    let portal = &target.portals[listens.portal];
    PortalDef {
        listen: listens.at,
        id_ext: portal.id_ext(host, &target.name).0,
        ioc_guid: portal.ioc_guid(host, &target.name).0,
        service_id: portal.service_guid(host, &target.name).0,
        relative_id: ids[&ports::port_of(portal)],
        redirect: portal.redirect.as_ref().and_then(config::Redirect::ip),
    }
}
