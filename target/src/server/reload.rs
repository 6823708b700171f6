//! Another configuration for a running server.
//!
//! Everything may change but what workers, devices that stay and the daemon itself were made with:
//! identity, workers, transport, form of the log, admin socket, state, the buffer pool, the longest transfer,
//! and more sessions than the workers' rings have room for. A configuration that changes one of
//! these is refused whole and says which, as is one that makes another disk of a backend under the
//! feet of those who use it; a backend may grow.
//!
//! # In one step
//! ```text
//! prepare: check → files opened, locked, extended; secrets read → devices opened, sockets bound
//!   → every worker listens where it must, unseen
//!   any failure: all of it is released, and nothing has changed
//! commit: the catalog is exchanged, sessions are notified → workers take over what they hold
//!   cannot fail
//! ```
//!
//! # What sessions see
//! Those that it does not concern: nothing. Initiators whose units are others than before get the
//! unit attention REPORTED LUNS DATA HAS CHANGED, those of a unit that has grown CAPACITY DATA HAS
//! CHANGED. A unit that was taken away takes no new commands; those under way end as if nothing had
//! happened, and its backend closes after the last one. Initiators whose target or portal is gone,
//! or that may not log in any more, are logged out in the way of their protocol, for which they get
//! [`PATIENCE`]. The bounds of `limits` hold for sessions that log in from now on; the number of
//! commands that a unit takes from all of them together stays what it was when the unit was made.
//! The limits of a backend or an access rule hold at once, also for commands that wait.

use std::sync::Arc;
use std::time::Instant;

use super::acquire::{self, Acquired};
use super::handover::ServerState;
use super::problems::{Problems, Subject};
use super::rollout::{Refusal, RolloutDriver, RolloutState};
use super::{PATIENCE, Server, ServerError, build};
use crate::backend::{OpenedStores, Source, Spec, Store, Wish, look, open_all};
use crate::config::{Backend, Config, Protocol};
use crate::fabric::ConnRef;
use crate::qos::IoLimits;
use crate::sessions::catalog::Catalog;
use crate::worker::mail::Mail;
use crate::worker::portals::{Stage, Unserved};
use crate::worker::ring_capacity;

/// A configuration was not applied: the one before is still served.
#[derive(Debug, thiserror::Error)]
pub enum ChangeError {
    /// Something changed that cannot while the server runs.
    #[error("{0} changed, which takes a restart; nothing was applied")]
    NeedsRestart(String),
    /// A backend that is a LUN became another one.
    #[error(
        "backend {0} changed while it is a LUN: take its LUNs away first, and add them again; \
         nothing was applied"
    )]
    InUse(String),
    /// The threshold of a backend changed while it is a LUN.
    #[error(
        "/backends/{0}/threshold changed while the backend is a LUN: initiators have read the threshold \
         from its pages, and are not notified of another one; take its LUNs away first, and add them again; \
         nothing was applied"
    )]
    Threshold(String),
    /// Something that it needs cannot be had.
    #[error("{0}; nothing was applied")]
    Server(#[from] ServerError),
    /// A worker cannot serve it.
    #[error("worker {worker}: {message}; nothing was applied")]
    Worker {
        /// The worker's number, from 0.
        worker: usize,
        /// The worker's error, for people.
        message: String,
    },
}

/// Checks that one configuration can follow another while the server runs, whose workers' rings
/// have `ring` entries. A backend that is absent, since it could not be opened, may become another
/// one.
///
/// # Errors
/// [`ChangeError::NeedsRestart`], [`ChangeError::InUse`] or [`ChangeError::Threshold`] names the
/// first thing that cannot change.
pub fn check(
    old: &Config,
    new: &Config,
    ring: u32,
    is_absent: &dyn Fn(&str) -> bool,
) -> Result<(), ChangeError> {
    let (was, is) = (&old.limits, &new.limits);
    let parts = [
        // Names that the file does not give derive from it, and initiators know disks and ports by
        // these.
        ("/identity", old.identity == new.identity),
        ("/workers", old.workers == new.workers),
        ("/limits/buffer_pool_mib", was.buffer_pool == is.buffer_pool),
        ("/limits/max_transfer", was.max_transfer == is.max_transfer),
        (
            "/limits/max_sessions",
            // A worker's ring is made once, and each session needs its entries: more sessions than
            // it has room for would fail in the middle of their commands.
            ring_capacity(is.max_sessions) <= ring,
        ),
        ("/transport", old.transport == new.transport),
        ("/log/format", old.log.format == new.log.format),
        ("/log/audit", old.log.audit == new.log.audit),
        ("/admin", old.admin == new.admin),
        ("/state", old.state == new.state),
    ];
    // Refused whole rather than applied in part: else the file and what runs would differ until a
    // restart, and no message would name the difference.
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
        // Initiators have mounted it: other bytes under the same LUN would destroy their file
        // systems. One that could not be opened has shown them no bytes yet.
        if is_other && !is_absent(name) && served(old, name) && served(new, name) {
            let with_old_threshold = Backend {
                threshold: old_backend.threshold,
                ..new_backend.clone()
            };
            // A unit says its threshold in a VPD page and a mode page, and is made with both.
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

/// A backend without what may change while it is in use: its size, whether its file may be
/// created or extended, and its limits.
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

/// A change under way: see [`Server::begin_change`].
pub struct Change {
    config: Config,
    builder: build::Builder,
    /// The catalog with all portals.
    whole: Catalog,
    /// What workers are to serve.
    catalog: Arc<Catalog>,
    acquired: Acquired,
    rollout: RolloutDriver,
    grown: Vec<Grown>,
    /// What will not be served, until the builder has it.
    problems: Option<Problems>,
    /// Portals that workers could not listen on, and that are done without.
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
    /// The time at which workers are no longer waited for.
    #[must_use]
    pub fn deadline(&self) -> Option<Instant> {
        self.rollout.deadline()
    }
}

/// The progress of a [`Change`].
#[derive(Debug)]
pub enum ChangeStep {
    /// It waits for workers.
    Waiting,
    /// It has everything it takes, and nothing of it can be seen: to be committed or withdrawn.
    Staged,
    /// It is served.
    Applied,
    /// Nothing is left of it; why, unless it was withdrawn.
    Undone(Option<ChangeError>),
}

/// A backend with room for more.
pub(super) struct Grown {
    place: usize,
    store: Arc<Store>,
    /// Its capacity from the commit on, in bytes.
    to: u64,
}

impl Server {
    /// Applies another configuration: see the module's header.
    ///
    /// # Errors
    /// [`ChangeError`]; everything is as it was then.
    pub fn change(&mut self, config: Config) -> Result<(), ChangeError> {
        self.change_if(config, || Ok(()))
    }

    /// The files and devices that could not be opened, to be opened again with [`open_all`]:
    /// elsewhere, since that may take its time.
    #[must_use]
    pub fn wishes(&self) -> Vec<Wish> {
        self.builder.wishes(&self.config)
    }

    /// The files and devices that another configuration takes, and that are not open.
    #[must_use]
    pub fn wishes_for(&self, config: &Config) -> Vec<Wish> {
        self.builder.wishes(config)
    }

    /// The files and devices that a start takes.
    #[must_use]
    pub fn first_wishes(config: &Config) -> Vec<Wish> {
        build::Builder::default().wishes(config)
    }

    /// Tries again to serve what could not be served, with what came of opening it; see
    /// [`problems`](super::problems). What still cannot stays a problem.
    ///
    /// # Errors
    /// [`ChangeError`]; everything is as it was then.
    pub fn retry(&mut self, opened: OpenedStores) -> Result<(), ChangeError> {
        let mut builder = self.builder.clone();
        builder.set_retrying(true);
        self.change_with(self.config.clone(), builder, opened, || Ok(()))
    }

    /// Checks that another configuration can follow the present one.
    ///
    /// # Errors
    /// As [`check`].
    pub fn check(&self, config: &Config) -> Result<(), ChangeError> {
        check(&self.config, config, self.ring, &|name| {
            self.builder.is_absent(name)
        })
    }

    /// As [`Server::change`], but asks `agree` once everything is there that the change takes, and
    /// before anything of it can be seen.
    ///
    /// # Errors
    /// Those of [`Server::change`] and of `agree`; everything is as it was then.
    pub fn change_if<E: From<ChangeError>>(
        &mut self,
        config: Config,
        agree: impl FnOnce() -> Result<(), E>,
    ) -> Result<(), E> {
        self.check(&config)?;
        let opened = open_all(self.builder.wishes(&config));
        self.change_with(config, self.builder.clone(), opened, agree)
    }

    /// As [`Server::change_if`], but backends and portals that are not available are problems, as at
    /// a start, and are tried again.
    ///
    /// # Errors
    /// As [`Server::change_if`].
    pub fn change_without_unavailable<E: From<ChangeError>>(
        &mut self,
        config: Config,
        agree: impl FnOnce() -> Result<(), E>,
    ) -> Result<(), E> {
        self.check(&config)?;
        let mut builder = self.builder.clone();
        builder.set_lenient(true);
        let opened = open_all(builder.wishes(&config));
        self.change_with(config, builder, opened, agree)
    }

    fn change_with<E: From<ChangeError>>(
        &mut self,
        config: Config,
        builder: build::Builder,
        mut opened: OpenedStores,
        agree: impl FnOnce() -> Result<(), E>,
    ) -> Result<(), E> {
        // All that can fail, or take long, comes before the commit.
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
                            // Numbers that were saved stay: they are a superset of those in use,
                            // which does no harm.
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

    /// Begins to serve another configuration, with backends that were opened for it; for callers
    /// that go on meanwhile, and give the change its turns by [`Server::poll_change`].
    ///
    /// # Errors
    /// [`ChangeError`]; everything is as it was then.
    pub fn begin_change(
        &self,
        config: Config,
        mut opened: OpenedStores,
        now: Instant,
    ) -> Result<Change, ChangeError> {
        self.check(&config)?;
        self.prepare(config, self.builder.clone(), &mut opened, now)
    }

    /// Goes on with a change. It is over when it was applied or undone. Nothing else may change
    /// what is served meanwhile.
    ///
    /// # Panics
    /// If it was over before.
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
                    change.acquired.give_all_back();
                    // A file that was created or extended for a change that did not come would be
                    // left as litter, and keep room that others need.
                    self.undo_backends(&change.builder, &change.grown);
                    ChangeStep::Undone(end.err())
                }
            },
        }
    }

    /// Saves the numbers and names that a change has given, before it is committed.
    ///
    /// # Errors
    /// [`ChangeError`]; the change is to be withdrawn then.
    pub fn save_numbers(&self, change: &mut Change) -> Result<(), ChangeError> {
        // Before the configuration is written down: a restart with either finds its numbers.
        change.builder.save_ports(self.builder.ports())?;
        change.builder.save_identities(Some(&self.builder))?;
        Ok(())
    }

    /// The configuration that is served.
    #[must_use]
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// Acquires all that a configuration takes here, and has workers begin to acquire theirs.
    fn prepare(
        &self,
        config: Config,
        mut builder: build::Builder,
        opened: &mut OpenedStores,
        now: Instant,
    ) -> Result<Change, ChangeError> {
        // The host's addresses may be others than at the last change, and wildcards stand for
        // those of now.
        builder.look(&config);
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
                // As in `poll_change`.
                self.undo_backends(&builder, &grown);
                Err(error)
            }
        }
    }

    /// Acquires what a catalog takes of the network, and has every worker begin to. Portals that
    /// cannot be had are left out of it where the builder tolerates that: others are not to wait
    /// for them.
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
            // Only listeners of the RDMA CM can fail at a worker: TCP sockets are bound here
            // before.
            protocol != Protocol::Iscsi && unserved.iter().any(|other| other.portal == at)
        });
        let wanted = acquire::Wanted {
            config,
            catalog: &catalog,
            server_state: &ServerState::default(),
            old: Some(&old),
            workers: self.senders.len(),
            simulated: self.network.as_deref(),
            tolerates: &|subject: &Subject, _: &ServerError| is_tolerated(builder, subject),
        };
        let mut acquired = acquire::acquire(&wanted, &self.shared.device_slots)?;
        let mut problems = builder.problems().clone();
        let unserved = [unserved, builder.unnamed_portals()];
        problems.set_missing_portals(acquired.missing(), &unserved);
        catalog.remove_portals(problems.portals());
        // Without what is missing, so that discovery names only portals that are listened on.
        let catalog = Arc::new(catalog);
        let parts = acquired.take_parts().into_iter().map(|part| Stage {
            catalog: Arc::clone(&catalog),
            devices: part.devices,
            sockets: part.sockets,
        });
        let rollout = RolloutDriver::stage(self.senders.clone(), parts.collect(), now);
        Ok(Attempt {
            catalog,
            acquired,
            rollout,
            problems,
        })
    }

    /// Tries once more without portals that workers have refused; there is no third time. `false`
    /// if they have refused none.
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
        // All workers have released their parts, so these slots are free.
        change.acquired.give_all_back();
        let again = self.acquire(config, builder, &change.whole, &change.unserved, now)?;
        (change.catalog, change.acquired) = (again.catalog, again.acquired);
        (change.rollout, change.problems) = (again.rollout, Some(again.problems));
        Ok(true)
    }

    /// Makes room in backends that are to be larger.
    fn grow(
        &self,
        config: &Config,
        builder: &build::Builder,
        grown: &mut Vec<Grown>,
    ) -> Result<(), ServerError> {
        let catalog = self.shared.registry.catalog();
        // One time limit for all backends: the control plane is busy for as long as this takes.
        let until = look::growth_until();
        for (old, new) in backends_of_both(&self.config, config) {
            // One that is no longer served, or was not, is opened afresh.
            let places = (
                self.builder.place_of(&old.name),
                builder.place_of(&new.name),
            );
            let (Some(place), Some(same)) = places else {
                continue;
            };
            // A change measures only what it says other things of; anything else is for a rescan.
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

    /// Takes back what opening backends has done to files.
    fn undo_backends(&self, builder: &build::Builder, grown: &[Grown]) {
        let new = builder.stores_beyond(&self.builder);
        let grown = grown.iter().map(|grown| &grown.store);
        self.builder.undo(new.chain(grown));
    }

    /// Releases all that was acquired for a change that is staged.
    ///
    /// # Panics
    /// Unless it is staged.
    pub fn withdraw_change(&self, change: &mut Change, now: Instant) {
        change.rollout.withdraw(now);
    }

    /// Serves what a change has prepared. Workers follow; from here on nothing can fail.
    ///
    /// # Panics
    /// Unless it is staged.
    pub fn commit_change(&mut self, change: &mut Change, now: Instant) {
        let builder = &mut change.builder;
        builder
            // From here on the files are what initiators use, and nothing may cut or remove them
            // again.
            .stores_beyond(&self.builder)
            .chain(change.grown.iter().map(|g| &g.store))
            .for_each(|store| store.keep());
        // Only from here on: a change that was withdrawn must leave no lines about problems that
        // never were.
        builder.problems().log_since(self.builder.problems());
        builder.log_addresses_since(&self.builder);
        // What initiators have done to units without a medium while all this was acquired.
        builder.keep_unit_states(&self.builder, &change.config);
        self.builder = builder.clone();
        self.builder.settle_absent();
        self.config = change.config.clone();
        // Workers have taken their parts when they staged them; only the slots are to be kept
        // here.
        change.acquired.keep();
        self.exchange(&change.catalog, &change.grown, &mut change.rollout, now);
    }

    /// Workers have applied a change, or take too long over it.
    fn finish_change(&self, change: &Change) {
        // Otherwise a worker may lead commands by the map before, to units that do not know their
        // nexuses any more. A later change settles, or the end of a session.
        if !change.rollout.is_late() {
            self.settle();
        }
        self.want_devices(&change.catalog);
        // Saving too many numbers does no harm.
        if let Err(error) = self.builder.save_ports(self.builder.ports()) {
            tracing::warn!(%error, "port numbers that are no longer used stay saved");
        }
    }

    /// Serves another catalog, for which workers have acquired what it takes.
    pub(super) fn exchange(
        &self,
        catalog: &Arc<Catalog>,
        grown: &[Grown],
        rollout: &mut RolloutDriver,
        now: Instant,
    ) {
        // The catalog first: a login that comes now already meets it, so no session can slip in
        // between for a target that is gone.
        let ended = self.shared.registry.change(Arc::clone(catalog));
        let of_iscsi = self.shared.iscsi.change(catalog);
        for grown in grown {
            // Before initiators hear of it: they read the new end of the disk at once.
            grown.store.set_capacity(grown.to);
            self.on_resized(catalog, grown.place, grown.to);
        }
        self.log_out_until(ended.into_iter().chain(of_iscsi), now + PATIENCE);
        rollout.commit(now);
    }

    /// Logs out the sessions of blocked initiators.
    pub fn log_out_blocked(&self) {
        let catalog = self.shared.registry.catalog();
        // Without settling: workers lead commands to their units until the sessions end.
        let ended = self.shared.registry.change(Arc::clone(&catalog));
        let of_iscsi = self.shared.iscsi.change(&catalog);
        self.log_out(ended.into_iter().chain(of_iscsi));
    }

    /// Requests initiators to log out, and terminates the connections that remain after a time.
    pub fn log_out(&self, channels: impl IntoIterator<Item = ConnRef>) {
        self.log_out_until(channels, Instant::now() + PATIENCE);
    }

    fn log_out_until(&self, channels: impl IntoIterator<Item = ConnRef>, until: Instant) {
        for ConnRef { worker, serial } in channels {
            if let Some(sender) = self.senders.get(usize::from(worker)) {
                let _ = sender.send_blocking(Mail::LogOut { serial, until });
            }
        }
    }

    /// Lets sessions leave the units that they no longer see: after workers have followed, since
    /// they lead commands there until then.
    pub(super) fn settle(&self) {
        self.shared.registry.settle();
        self.shared.iscsi.settle();
    }

    /// Lets devices without portals be closed: after workers have left their listeners.
    pub(super) fn want_devices(&self, catalog: &Catalog) {
        let wanted = |addr, _| catalog.rdma_portals().any(|portal| portal.ip() == addr);
        self.shared.device_slots.want(wanted);
    }
}

/// The parts of a change that come of the network.
struct Attempt {
    catalog: Arc<Catalog>,
    acquired: Acquired,
    rollout: RolloutDriver,
    problems: Problems,
}

/// Returns true if a change may do without something. What was missing before may stay so: the
/// administrator knows of it, and the change does not make it worse. A new portal that cannot be had
/// is a mistake in the change.
fn is_tolerated(builder: &build::Builder, subject: &Subject) -> bool {
    builder.problems().has(subject) || builder.tolerates(subject)
}

/// Returns true if a backend's size is to be looked at: where the file's words about it are others
/// now.
fn may_resize(old: &Spec, new: &Spec) -> bool {
    old.source != new.source
}
