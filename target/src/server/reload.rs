//! Configuration changes at runtime.
//!
//! All settings can be changed, except for those that are fixed for workers, existing devices and
//! the daemon itself: identity, workers, transport, log format, admin socket, state, buffer pool,
//! maximum transfer size, and more sessions than the rings of workers have room for. If any of
//! these has changed, the configuration is rejected, and the error names the key. The same applies
//! if a backend in use would become a different disk, but it can be extended.
//!
//! # Atomic changes
//! ```text
//! prepare: check → files opened, locked, extended; secrets read → devices opened, sockets bound
//!   → every worker listens on its portals, invisible to initiators
//!   any failure: all resources are released, and nothing has changed
//! commit: the catalog is replaced, sessions are notified → workers use the new resources
//!   cannot fail
//! ```
//!
//! # Effect on sessions
//! Sessions are not affected unless the change is about them. If the units of an initiator have
//! changed, it gets the unit attention REPORTED LUNS DATA HAS CHANGED. If a unit was extended, its
//! initiators get CAPACITY DATA HAS CHANGED. A removed unit rejects new commands, but commands in
//! flight complete normally, and the backend is closed after the last command. If its target or
//! portal was removed, or if it is no longer allowed to log in, an initiator is logged out as
//! defined by the protocol, and has [`PATIENCE`] to comply. New values of `limits` apply to new
//! sessions. The maximum number of commands of a unit, for all initiators, is fixed when the unit
//! is created. Rate limits of a backend or an access rule apply immediately, even to waiting
//! commands.

use std::sync::Arc;
use std::time::Instant;

use super::acquire::{self, Acquired};
use super::handover::ServerState;
use super::problems::{Problems, Subject};
use super::rollout::{Refusal, RolloutDriver, RolloutState};
use super::{PATIENCE, Server, ServerError, build};
use crate::backend::{OpenRequest, OpenedStores, Source, Spec, Store, open_all, query};
use crate::config::{Backend, Config, Protocol};
use crate::fabric::ConnRef;
use crate::qos::IoLimits;
use crate::sessions::catalog::Catalog;
use crate::worker::portals::{Stage, Unserved};
use crate::worker::ring_capacity;

/// A configuration was rejected. The old configuration is still in use.
#[derive(Debug, thiserror::Error)]
pub enum ChangeError {
    /// A setting cannot be changed at runtime.
    #[error("{0} changed, which requires a restart; nothing was applied")]
    NeedsRestart(String),
    /// A backend in use would become a different disk.
    #[error(
        "backend {0} changed while it is a LUN: remove its LUNs first, and add them again; nothing \
         was applied"
    )]
    InUse(String),
    /// The threshold of a backend in use cannot be changed.
    #[error(
        "/backends/{0}/threshold changed while the backend is a LUN: initiators have read the \
         threshold from its mode pages, and are not notified of changes; remove its LUNs first, \
         and add them again; nothing was applied"
    )]
    Threshold(String),
    /// A resource is not available.
    #[error("{0}; nothing was applied")]
    Server(#[from] ServerError),
    /// A worker has rejected the change.
    #[error("worker {worker}: {message}; nothing was applied")]
    Worker {
        /// Worker index.
        worker: usize,
        /// Human-readable error.
        message: String,
    },
}

/// Checks whether the configuration can be changed at runtime. `ring` is the ring size of the
/// workers. If a backend could not be opened, it may become a different disk.
///
/// # Errors
/// [`ChangeError::NeedsRestart`], [`ChangeError::InUse`] or [`ChangeError::Threshold`], with the
/// first setting that cannot be changed.
pub fn check(
    old: &Config,
    new: &Config,
    ring: u32,
    is_absent: &dyn Fn(&str) -> bool,
) -> Result<(), ChangeError> {
    let (was, is) = (&old.limits, &new.limits);
    let parts = [
        // Names that are not configured are derived from this, and used by initiators to identify
        // disks and ports.
        ("/identity", old.identity == new.identity),
        ("/workers", old.workers == new.workers),
        ("/limits/buffer_pool_mib", was.buffer_pool == is.buffer_pool),
        ("/limits/max_transfer", was.max_transfer == is.max_transfer),
        (
            "/limits/max_sessions",
            // The ring of a worker cannot be resized. Each session needs some of its entries, so
            // with too many sessions, commands would fail.
            ring_capacity(is.max_sessions) <= ring,
        ),
        ("/transport", old.transport == new.transport),
        ("/log/format", old.log.format == new.log.format),
        ("/log/audit", old.log.audit == new.log.audit),
        ("/admin", old.admin == new.admin),
        ("/state", old.state == new.state),
    ];
    // Reject the configuration instead of applying a part of it. Otherwise, the file would not
    // match the running configuration until the next restart, without any error message.
    let mut changed = parts.iter().filter(|(_, same)| !same);
    if let Some((name, _)) = changed.next() {
        return Err(ChangeError::NeedsRestart((*name).to_owned()));
    }
    let served = |config: &Config, name: &str| {
        let mut luns = config.targets.iter().flat_map(|t| t.luns.values());
        luns.any(|lun| config.backend(lun).name == name)
    };
    for (old_backend, new_backend) in backends_of_both(old, new) {
        let name = &old_backend.name;
        let is_other = size_aside(old_backend) != size_aside(new_backend);
        // Initiators may have mounted this. If the same LUN had different contents, their file
        // systems would be destroyed. A backend that could not be opened has not been read yet.
        if is_other && !is_absent(name) && served(old, name) && served(new, name) {
            let with_old_threshold = Backend {
                threshold: old_backend.threshold,
                ..new_backend.clone()
            };
            // The threshold is reported in a VPD page and a mode page, which are fixed when the
            // unit is created.
            let is_threshold = size_aside(old_backend) == size_aside(&with_old_threshold);
            return Err(match is_threshold {
                true => ChangeError::Threshold(name.clone()),
                false => ChangeError::InUse(name.clone()),
            });
        }
    }
    Ok(())
}

fn backends_of_both<'a>(
    old: &'a Config,
    new: &'a Config,
) -> impl Iterator<Item = (&'a Backend, &'a Backend)> {
    let pair = |backend: &'a Backend| {
        let same = new.backends.iter().find(|b| b.name == backend.name);
        Some((backend, same?))
    };
    old.backends.iter().filter_map(pair)
}

/// Returns a backend without the settings that can be changed while it is in use: size, whether to
/// create or extend its file, and limits.
fn size_aside(backend: &Backend) -> Backend {
    let mut backend = backend.clone();
    match &mut backend.spec.source {
        Source::File { size, create, .. } => (*size, *create) = (None, false),
        Source::Ram { size } | Source::Null { size } => *size = 0,
        Source::Device { .. } => {}
    }
    backend.limits = IoLimits::default();
    backend
}

/// A change in progress: see [`Server::begin_change`].
pub struct Change {
    config: Config,
    builder: build::Builder,
    /// The catalog with all portals.
    whole: Catalog,
    /// The catalog for workers.
    catalog: Arc<Catalog>,
    acquired: Acquired,
    rollout: RolloutDriver,
    grown: Vec<Grown>,
    /// Problems after this change, until they are passed to the builder.
    problems: Option<Problems>,
    /// Portals that workers could not listen on, and which are not required.
    unserved: Vec<Unserved>,
}

impl std::fmt::Debug for Change {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Change")
            .field("rollout", &self.rollout)
            .finish_non_exhaustive()
    }
}

impl Change {
    /// Returns the time at which we stop waiting for workers.
    #[must_use]
    pub fn deadline(&self) -> Option<Instant> {
        self.rollout.deadline()
    }
}

/// The state of a [`Change`].
#[derive(Debug)]
pub enum ChangeStep {
    /// Waiting for workers.
    Waiting,
    /// All resources were acquired, but are not visible yet. The change must be committed or
    /// withdrawn.
    Staged,
    /// The change was applied.
    Applied,
    /// All resources were released. Contains the reason, unless the change was withdrawn.
    Undone(Option<ChangeError>),
}

/// A backend that was extended.
pub(super) struct Grown {
    place: usize,
    store: Arc<Store>,
    /// Capacity after the commit, in bytes.
    to: u64,
}

impl Server {
    /// Applies a new configuration: see the module documentation.
    ///
    /// # Errors
    /// Returns a [`ChangeError`]. The server is not changed in this case.
    pub fn change(&mut self, config: Config) -> Result<(), ChangeError> {
        self.change_if(config, || Ok(()))
    }

    /// Returns the files and devices that could not be opened. The caller should open them again
    /// with [`open_all`], on another thread because this can take a long time.
    #[must_use]
    pub fn open_requests(&self) -> Vec<OpenRequest> {
        self.builder.open_requests(&self.config)
    }

    /// Returns the files and devices that are required for a configuration and not open.
    #[must_use]
    pub fn wishes_for(&self, config: &Config) -> Vec<OpenRequest> {
        self.builder.open_requests(config)
    }

    /// Returns the files and devices that are required to start with a configuration.
    #[must_use]
    pub fn first_wishes(config: &Config) -> Vec<OpenRequest> {
        build::Builder::default().open_requests(config)
    }

    /// Retries to use missing resources, including backends that were opened by the caller: see
    /// [`problems`](super::problems). If a resource is still missing, the problem remains.
    ///
    /// # Errors
    /// Returns a [`ChangeError`]. The server is not changed in this case.
    pub fn retry(&mut self, opened: OpenedStores) -> Result<(), ChangeError> {
        let mut builder = self.builder.clone();
        builder.set_retrying(true);
        self.change_with(self.config.clone(), builder, opened, || Ok(()))
    }

    /// Checks whether a configuration can replace the current one.
    ///
    /// # Errors
    /// Same as [`check`].
    pub fn check(&self, config: &Config) -> Result<(), ChangeError> {
        check(&self.config, config, self.ring, &|name| {
            self.builder.is_absent(name)
        })
    }

    /// Same as [`Server::change`], but calls `agree` when all resources for the change were
    /// acquired, before any of it is visible.
    ///
    /// # Errors
    /// Errors from [`Server::change`] and `agree`. The server is not changed in this case.
    pub fn change_if<E: From<ChangeError>>(
        &mut self,
        config: Config,
        agree: impl FnOnce() -> Result<(), E>,
    ) -> Result<(), E> {
        self.check(&config)?;
        let opened = open_all(self.builder.open_requests(&config));
        self.change_with(config, self.builder.clone(), opened, agree)
    }

    /// Same as [`Server::change_if`], but missing backends and portals are reported as problems and
    /// retried, as for a start.
    ///
    /// # Errors
    /// Same as [`Server::change_if`].
    pub fn change_without_unavailable<E: From<ChangeError>>(
        &mut self,
        config: Config,
        agree: impl FnOnce() -> Result<(), E>,
    ) -> Result<(), E> {
        self.check(&config)?;
        let mut builder = self.builder.clone();
        builder.set_lenient(true);
        let opened = open_all(builder.open_requests(&config));
        self.change_with(config, builder, opened, agree)
    }

    fn change_with<E: From<ChangeError>>(
        &mut self,
        config: Config,
        builder: build::Builder,
        mut opened: OpenedStores,
        agree: impl FnOnce() -> Result<(), E>,
    ) -> Result<(), E> {
        // Do everything that can fail or take a long time before the commit.
        let mut change = self.prepare(config, builder, &mut opened, Instant::now())?;
        let (mut agree, mut refused) = (Some(agree), None);
        loop {
            change.rollout.wait();
            match self.poll_change(&mut change, Instant::now()) {
                ChangeStep::Waiting => {}
                ChangeStep::Staged => {
                    let agree = agree.take().expect("it is staged once");
                    let saved = self.save_numbers(&mut change).map_err(E::from);
                    match saved.and_then(|()| agree()) {
                        Ok(()) => self.commit_change(&mut change, Instant::now()),
                        Err(error) => {
                            refused = Some(error);
                            // We can keep the stored numbers, which include all numbers in use.
                            self.withdraw_change(&mut change, Instant::now());
                        }
                    }
                }
                ChangeStep::Applied => return Ok(()),
                ChangeStep::Undone(error) => {
                    let error = error.map(E::from).or(refused);
                    return Err(error.expect("there is a reason"));
                }
            }
        }
    }

    /// Starts a change with backends that were opened for it. The caller can continue, but has to
    /// call [`Server::poll_change`].
    ///
    /// # Errors
    /// Returns a [`ChangeError`]. The server is not changed in this case.
    pub fn begin_change(
        &self,
        config: Config,
        mut opened: OpenedStores,
        now: Instant,
    ) -> Result<Change, ChangeError> {
        self.check(&config)?;
        self.prepare(config, self.builder.clone(), &mut opened, now)
    }

    /// Advances a change. It is complete when it was applied or undone. The configuration must not
    /// be changed in any other way until then.
    ///
    /// # Panics
    /// If it was already complete.
    pub fn poll_change(&mut self, change: &mut Change, now: Instant) -> ChangeStep {
        match change.rollout.poll(now) {
            RolloutState::Staging | RolloutState::Applying | RolloutState::Undoing => {
                ChangeStep::Waiting
            }
            RolloutState::Staged => {
                if let Some(problems) = change.problems.take() {
                    change.builder.set_problems(problems);
                    change.builder.set_retrying(false);
                }
                ChangeStep::Staged
            }
            RolloutState::Applied => {
                self.finish_change(change);
                self.observe();
                ChangeStep::Applied
            }
            RolloutState::Undone => match self.stage_again(change, now) {
                Ok(true) => ChangeStep::Waiting,
                end => {
                    change.acquired.release_all();
                    // If a file was created or extended for this change, it would otherwise waste
                    // space.
                    self.undo_backends(&change.builder, &change.grown);
                    ChangeStep::Undone(end.err())
                }
            },
        }
    }

    /// Stores the numbers and names assigned by a change before it is committed.
    ///
    /// # Errors
    /// Returns a [`ChangeError`]. The change must then be withdrawn.
    pub fn save_numbers(&self, change: &mut Change) -> Result<(), ChangeError> {
        // Do this before storing the configuration, so that after a restart, the numbers are valid
        // for either of them.
        change.builder.save_ports(self.builder.ports())?;
        change.builder.save_identities(Some(&self.builder))?;
        Ok(())
    }

    /// Returns the current configuration.
    #[must_use]
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// Acquires the resources for a configuration, and lets workers start to do the same.
    fn prepare(
        &self,
        config: Config,
        mut builder: build::Builder,
        opened: &mut OpenedStores,
        now: Instant,
    ) -> Result<Change, ChangeError> {
        // The addresses of the host may have changed since the last change, and wildcards include
        // the current addresses.
        builder.refresh_addresses(&config);
        let mut grown = Vec::new();
        let built = builder
            .catalog(&config, opened)
            .and_then(|catalog| self.grow(&config, &builder, &mut grown).map(|()| catalog))
            .map_err(ChangeError::from)
            .and_then(|whole| {
                let attempt = self.acquire(&config, &builder, &whole, &[], now)?;
                Ok((whole, attempt))
            });
        match built {
            Ok((whole, attempt)) => Ok(Change {
                config,
                builder,
                whole,
                catalog: attempt.catalog,
                acquired: attempt.acquired,
                rollout: attempt.rollout,
                grown,
                problems: Some(attempt.problems),
                unserved: Vec::new(),
            }),
            Err(error) => {
                // Same as in `poll_change`.
                self.undo_backends(&builder, &grown);
                Err(error)
            }
        }
    }

    /// Acquires network resources for a catalog, and lets all workers start to do the same. If a
    /// portal is not available and the builder tolerates this, it is removed from the catalog, so
    /// that other portals do not have to wait for it.
    fn acquire(
        &self,
        config: &Config,
        builder: &build::Builder,
        whole: &Catalog,
        unserved: &[Unserved],
        now: Instant,
    ) -> Result<Attempt, ChangeError> {
        let old = self.shared.registry.catalog();
        let mut catalog = whole.clone();
        catalog.remove_portals(|protocol, at| {
            // Workers can only fail to listen via the RDMA CM, because TCP sockets are already
            // bound here.
            protocol != Protocol::Iscsi && unserved.iter().any(|other| other.portal == at)
        });
        let wanted = acquire::Wanted {
            config,
            catalog: &catalog,
            server_state: &ServerState::default(),
            old: Some(&old),
            workers: self.workers.senders.len(),
            simulated: self.network.as_deref(),
            tolerates: &|subject: &Subject, _: &ServerError| is_tolerated(builder, subject),
        };
        let mut acquired = acquire::acquire(&wanted, &self.shared.device_slots)?;
        let mut problems = builder.problems().clone();
        let unserved = [unserved, builder.unnamed_portals()];
        problems.set_missing_portals(acquired.missing(), &unserved);
        catalog.remove_portals(problems.portals());
        // Discovery must only return portals that we are listening on.
        let catalog = Arc::new(catalog);
        let parts = acquired.take_parts().into_iter().map(|part| Stage {
            catalog: Arc::clone(&catalog),
            devices: part.devices,
            sockets: part.sockets,
        });
        let rollout = RolloutDriver::stage(self.workers.senders.clone(), parts.collect(), now);
        Ok(Attempt {
            catalog,
            acquired,
            rollout,
            problems,
        })
    }

    /// Tries a second and last time without the portals rejected by workers. Returns `false` if
    /// there are no such portals.
    fn stage_again(&self, change: &mut Change, now: Instant) -> Result<bool, ChangeError> {
        let refused = match change.rollout.refusal() {
            None => return Ok(false),
            Some(Refusal::Worker { worker, message }) => {
                return Err(ChangeError::Worker { worker, message });
            }
            Some(Refusal::Portals(refused)) => refused,
        };
        let can_go_without = |(_, other): &(usize, Unserved)| {
            is_tolerated(&change.builder, &Subject::RdmaPortal(other.portal))
        };
        let is_over = !change.unserved.is_empty() || !refused.iter().all(can_go_without);
        if let Some((worker, first)) = refused.first().filter(|_| is_over) {
            let (worker, message) = (*worker, first.why.clone());
            return Err(ChangeError::Worker { worker, message });
        }
        change.unserved = refused.into_iter().map(|(_, other)| other).collect();
        let (config, builder) = (&change.config, &change.builder);
        // All workers have released their resources, so these slots are free.
        change.acquired.release_all();
        let again = self.acquire(config, builder, &change.whole, &change.unserved, now)?;
        (change.catalog, change.acquired) = (again.catalog, again.acquired);
        (change.rollout, change.problems) = (again.rollout, Some(again.problems));
        Ok(true)
    }

    /// Extends backends whose size has increased.
    fn grow(
        &self,
        config: &Config,
        builder: &build::Builder,
        grown: &mut Vec<Grown>,
    ) -> Result<(), ServerError> {
        let catalog = self.shared.registry.catalog();
        // Use a single deadline for all backends, because this blocks the control plane.
        let until = query::growth_until();
        for (old, new) in backends_of_both(&self.config, config) {
            // A backend that was added or removed is opened anyway.
            let places = (
                self.builder.place_of(&old.name),
                builder.place_of(&new.name),
            );
            let (Some(place), Some(same)) = places else {
                continue;
            };
            // Only measure a backend if its configuration has changed. In all other cases, a rescan
            // is required.
            if place != same || !may_resize(&old.spec, &new.spec) {
                continue;
            }
            let Some(store) = &catalog.stores[place] else {
                continue;
            };
            let to =
                store
                    .grow_in_time(&new.spec, until)
                    .map_err(|source| ServerError::Backend {
                        name: new.name.clone(),
                        source,
                    })?;
            if let Some(to) = to {
                let store = Arc::clone(store);
                grown.push(Grown { place, store, to });
            }
        }
        Ok(())
    }

    /// Undoes changes to the files of backends.
    fn undo_backends(&self, builder: &build::Builder, grown: &[Grown]) {
        let new = builder.stores_beyond(&self.builder);
        let grown = grown.iter().map(|grown| &grown.store);
        self.builder.undo(new.chain(grown));
    }

    /// Releases all resources for a change.
    ///
    /// # Panics
    /// Unless it is staged.
    pub fn withdraw_change(&self, change: &mut Change, now: Instant) {
        change.rollout.withdraw(now);
    }

    /// Applies a change, which can no longer fail. Workers will follow.
    ///
    /// # Panics
    /// Unless it is staged.
    pub fn commit_change(&mut self, change: &mut Change, now: Instant) {
        let builder = &mut change.builder;
        builder
            // Initiators will now use these files, so they must not be truncated or removed again.
            .stores_beyond(&self.builder)
            .chain(change.grown.iter().map(|g| &g.store))
            .for_each(|store| store.keep());
        // Do this here, because if the change had been withdrawn, these problems would not exist.
        builder.problems().log_since(self.builder.problems());
        builder.log_addresses_since(&self.builder);
        // Include changes made by initiators to units without a medium in the meantime.
        builder.keep_unit_states(&self.builder, &change.config);
        self.builder = builder.clone();
        self.builder.abandon_absent();
        self.config = change.config.clone();
        // Workers already have their parts, so only keep the slots.
        change.acquired.keep();
        self.exchange(&change.catalog, &change.grown, &mut change.rollout, now);
    }

    /// Called when all workers have applied a change, or have timed out.
    fn finish_change(&self, change: &Change) {
        // If we did this too early, a worker might use the old map to send commands to units
        // without an entry for the nexus. It will be done by a later change, or when the session is
        // closed.
        if !change.rollout.is_late() {
            self.remove_former_units();
        }
        self.want_devices(&change.catalog);
        // It is harmless to store additional numbers.
        if let Err(error) = self.builder.save_ports(self.builder.ports()) {
            tracing::warn!(%error, "cannot remove unused port numbers from the state directory");
        }
    }

    /// Switches to a new catalog, for which workers have acquired their resources.
    pub(super) fn exchange(
        &self,
        catalog: &Arc<Catalog>,
        grown: &[Grown],
        rollout: &mut RolloutDriver,
        now: Instant,
    ) {
        // Replace the catalog first. New logins will then use it, so that no session can be added
        // for a removed target.
        let ended = self.shared.registry.change(Arc::clone(catalog));
        let of_iscsi = self.shared.iscsi.change(catalog);
        for grown in grown {
            // Do this before initiators are notified, because they immediately read the new end of
            // the disk.
            grown.store.set_capacity(grown.to);
            self.on_resized(catalog, grown.place, grown.to);
        }
        self.workers
            .log_out_until(ended.into_iter().chain(of_iscsi), now + PATIENCE);
        rollout.commit(now);
    }

    /// Logs out the sessions of blocked initiators.
    pub fn log_out_blocked(&self) {
        let catalog = self.shared.registry.catalog();
        // Don't remove former units here: workers use the existing map until the sessions are
        // closed.
        let ended = self.shared.registry.change(Arc::clone(&catalog));
        let of_iscsi = self.shared.iscsi.change(&catalog);
        self.log_out(ended.into_iter().chain(of_iscsi));
    }

    /// Requests a logout from these initiators, and terminates any remaining connections after some
    /// time.
    pub fn log_out(&self, channels: impl IntoIterator<Item = ConnRef>) {
        self.workers
            .log_out_until(channels, Instant::now() + PATIENCE);
    }

    /// Removes sessions from units that they can no longer use. Must be called when all workers
    /// have switched, because they use the old map until then.
    pub(super) fn remove_former_units(&self) {
        self.shared.registry.remove_former_units();
        self.shared.iscsi.remove_former_units();
    }

    /// Closes devices without portals. Must be called when workers no longer listen on them.
    pub(super) fn want_devices(&self, catalog: &Catalog) {
        let wanted = |addr, _| catalog.rdma_portals().any(|portal| portal.ip() == addr);
        self.shared.device_slots.want(wanted);
    }
}

/// Network resources for a change.
struct Attempt {
    catalog: Arc<Catalog>,
    acquired: Acquired,
    rollout: RolloutDriver,
    problems: Problems,
}

/// Returns true if a change can be applied without this resource. If it was missing before, the
/// administrator knows about it, and the change does not make it worse. If a new portal is not
/// available, this is an error in the change.
fn is_tolerated(builder: &build::Builder, subject: &Subject) -> bool {
    builder.problems().has(subject) || builder.tolerates(subject)
}

/// Returns true if we need to check the size of a backend, because its configuration has changed.
fn may_resize(old: &Spec, new: &Spec) -> bool {
    old.source != new.source
}
