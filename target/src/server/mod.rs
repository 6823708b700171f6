//! The server: runs the workers for a [`Config`], from start to shutdown.
//!
//! [`Server`] is a value that can be used by any program or test in its own process, and by the
//! [control plane](crate::control) of the daemon.
//!
//! # Start
//! Backends are opened and locked, logical units and targets are created, devices are opened (one
//! per worker for each address, in worker order, which is required for packet steering), and
//! workers are started. If any step fails, all previous steps are undone, except that files which
//! were created or extended are kept once workers could have written to them.
//!
//! # Shutdown
//! ```text
//! logins rejected → commands in flight complete (at most PATIENCE) → T_LOGOUT, DREQ
//!   → all workers quiet → flush of every backend → workers exit
//! ```
//!
//! # Changes
//! [`Server::change`] applies a new configuration: see [`reload`]. A start uses the same code,
//! because it is like a change from an empty configuration.
//!
//! # Handover
//! [`Server::export_state`] shuts down the server, and returns state that would be lost on a
//! restart. This can be passed to [`Server::start_after`]: see [`handover`].

mod acquire;
pub(crate) mod addresses;
mod both_ways;
pub(crate) mod build;
pub mod drain;
pub mod handover;
pub mod hanging;
pub mod identities;
mod observation;
pub mod ports;
pub mod problems;
pub mod reload;
pub mod rollout;
mod scrubs;
pub mod shutdown;
#[cfg(test)]
mod tests_files;
#[cfg(test)]
mod tests_hanging;
mod workers;

use std::cell::Cell;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender};
use std::time::{Duration, Instant, SystemTime};

use riser_reactor::{MailSender, RingError};
use riser_scsi::attention::Attention;
use riser_scsi::reservation::ReservationKeeper;
use tokio::sync::Notify;

use crate::backend::{
    Failing, FlushKeeper, OpenError, OpenedStores, Resized, Space, Store, open_all, query,
};
use crate::config::{Config, Listen};
use crate::fabric::Unit;
use crate::holder::HeldBy;
use crate::sessions::blocklist::{BlockKeeper, Blocklist};
use crate::sessions::catalog::Catalog;
use crate::sessions::iscsi::IscsiSessions;
use crate::sessions::nexus::Registry;
use crate::worker::device_slots::DeviceSlots;
use crate::worker::mail::{Mail, Snapshot};
use crate::worker::portals::Unserved;
use crate::worker::{Report, Shared, ring_capacity};
use handover::ServerState;
use identities::IdentityKeeper;
use observation::{Observation, wanted_size};
use ports::PortKeeper;
use problems::{Problems, Subject};
use rollout::RolloutDriver;
use workers::{Workers, send_to_workers};

pub use acquire::{Part, SimulatedNetwork};

pub use crate::worker::PATIENCE;

/// Additional time for the last block operations, and for the flush.
const LAST_IO: Duration = Duration::from_secs(60);

/// Time for threads to exit after a failed shutdown.
const LAST_EXIT: Duration = Duration::from_secs(5);

/// Time to wait for threads that access files of backends during the shutdown.
const LAST_THREADS: Duration = Duration::from_secs(3);

/// An error when starting, changing or stopping a server.
#[derive(Debug, thiserror::Error)]
pub enum ServerError {
    /// A backend cannot be opened.
    #[error("backend {name}: {source}")]
    Backend {
        /// Backend name.
        name: String,
        /// Error when opening it.
        source: OpenError,
    },
    /// A logical unit cannot be created.
    #[error("backend {name}: {source}")]
    Unit {
        /// Backend name.
        name: String,
        /// The invalid setting.
        source: riser_scsi::config::ConfigError,
    },
    /// Reservations cannot be read, so we do not know which initiators can use the unit.
    #[error("backend {name}: cannot read its reservations: {source}")]
    Reservations {
        /// Backend name.
        name: String,
        /// Error of the operating system.
        source: io::Error,
    },
    /// A CHAP secret cannot be read.
    #[error("cannot read the secret of {name}: {source}")]
    Secret {
        /// User name (CHAP_N).
        name: String,
        /// Error when reading the secret.
        source: io::Error,
    },
    /// A CHAP secret is used in both directions.
    #[error(
        "the CHAP user {own} of the target (`mutual`) and the user {user} have the same secret: \
         use a different secret for one of them"
    )]
    SameSecret {
        /// CHAP name of the target.
        own: String,
        /// CHAP name of the initiator.
        user: String,
    },
    /// A device cannot be opened.
    #[error("cannot open a RoCE device at {addr}: {source}{holder}")]
    Device {
        /// Address of the device.
        addr: IpAddr,
        /// The process that uses this address.
        holder: HeldBy,
        /// Error of the operating system.
        source: io::Error,
    },
    /// Memory cannot be shared with other processes on this host.
    #[error("cannot share memory at {addr}: {source}")]
    SharedMemory {
        /// The address.
        addr: IpAddr,
        /// Error of the operating system, with the process that uses the name for this address.
        source: io::Error,
    },
    /// An RDMA device of the host cannot be opened.
    #[error(transparent)]
    RdmaCore(#[from] riser_transport::rdma_core::OpenError),
    /// A device from a previous configuration has not been closed.
    #[error("the device at {0} is still being closed; try again")]
    Closing(IpAddr),
    /// Cannot listen on a TCP portal.
    #[error("cannot listen on {portal}: {source}{holder}")]
    Listen {
        /// Address and port of the portal.
        portal: SocketAddr,
        /// The process that uses this address.
        holder: HeldBy,
        /// Error of the operating system.
        source: io::Error,
    },
    /// A portal with a wildcard is not fully available.
    #[error("cannot listen on {listen}: {why}")]
    Wildcard {
        /// Address in the configuration.
        listen: Listen,
        /// Human-readable reason.
        why: String,
    },
    /// A listening socket cannot be handed over.
    #[error("cannot duplicate a listening socket: {0}")]
    Duplicate(#[source] io::Error),
    /// A worker of the next program could not create a ring.
    #[error(transparent)]
    Ring(#[from] RingError),
    /// The next program cannot start until file descriptors sent by other users are closed.
    #[error("cannot hand over to another program yet: {0}")]
    Unclosed(#[source] io::Error),
    /// A thread cannot be started.
    #[error("cannot start a worker: {0}")]
    Thread(#[source] io::Error),
    /// A thread or a socket of the control plane cannot be created.
    #[error("cannot start the control plane: {0}")]
    ControlPlane(#[source] io::Error),
    /// A worker has exited.
    #[error("worker {index}: {message}")]
    Worker {
        /// Worker index.
        index: u16,
        /// Human-readable error.
        message: String,
    },
    /// Written data could not be made durable.
    #[error("the last flush failed: {0}")]
    Flush(String),
    /// Block operations, or threads that access a file, are delaying a handover or a shutdown.
    #[error(
        "block operations of backend {backend}, or other accesses to its file, have been in progress for {seconds} s: the disk does not respond"
    )]
    Hanging {
        /// Backend label.
        backend: String,
        /// Age of the oldest operation or thread, in seconds.
        seconds: u64,
    },
    /// A step did not complete in time.
    #[error("timed out waiting for {0}")]
    Timeout(&'static str),
    /// Cannot listen on the configured address for metrics.
    #[error("cannot listen for metrics at {addr}: {source}")]
    Metrics {
        /// Metrics address.
        addr: SocketAddr,
        /// Error of the operating system.
        source: io::Error,
    },
    /// Cannot listen on the configured admin socket.
    #[error("cannot listen at {}: {source}", path.display())]
    Admin {
        /// Socket path.
        path: PathBuf,
        /// Error of the operating system.
        source: io::Error,
    },
    /// The admin socket passed by the service manager is invalid.
    #[error("cannot use the service manager's socket for the admin API: {0}")]
    Inherited(#[source] io::Error),
    /// Applied configurations cannot be stored or read.
    #[error("cannot use the state directory: {0}")]
    State(#[source] io::Error),
    /// The path of this program cannot be determined.
    #[error("cannot find this program: {0}")]
    Program(#[source] io::Error),
    /// The handover to another program failed, and the state cannot be restored.
    #[error("cannot restore the handover state: {0}")]
    TakeBack(#[source] io::Error),
    /// Port numbers cannot be stored or read.
    #[error("cannot load or save the numbers of target ports: {0}")]
    Ports(#[source] io::Error),
    /// The list of blocked initiators cannot be read.
    #[error("cannot load the list of blocked initiators: {0}")]
    Blocklist(#[source] io::Error),
    /// Unit names cannot be stored or read.
    #[error("cannot load or save the names of logical units: {0}")]
    Identities(#[source] io::Error),
    /// Missing or replaced disks cannot be recorded.
    #[error(
        "cannot save that a disk was missing or replaced, so initiators may not be notified of \
         lost data after the next start: {0}"
    )]
    Losses(#[source] io::Error),
    /// Stored unit names cannot be read.
    #[error("{0}")]
    Unnamed(String),
    /// The next program would not start, because `strict` is set.
    #[error("`strict` is set, but this is not available: {0}")]
    Strict(String),
    /// Cannot listen on an RDMA portal.
    #[error("{0}")]
    Portal(String),
    /// An error shared by several subjects.
    #[error("{0}")]
    Shared(Arc<Self>),
    /// Cannot wait for signals.
    #[error("cannot wait for signals: {0}")]
    Signal(#[source] io::Error),
}

impl ServerError {
    /// Returns true if a lock or an address is in use, but may be available soon. If a daemon was
    /// killed, the kernel only releases these when its I/O has completed, which is after the
    /// process has exited.
    #[must_use]
    pub fn is_in_use(&self) -> bool {
        match self {
            Self::Backend { source, .. } => matches!(source, OpenError::Locked { .. }),
            Self::Device { source, .. }
            | Self::SharedMemory { source, .. }
            | Self::Listen { source, .. }
            | Self::Metrics { source, .. } => source.kind() == io::ErrorKind::AddrInUse,
            Self::Shared(error) => error.is_in_use(),
            _ => false,
        }
    }
}

/// Retry interval for resources in use.
const IN_USE_RETRY: Duration = Duration::from_millis(20);

/// Number of attempts before we start without the shared memory name. A killed process only keeps
/// it for a moment, but any local user can keep it for longer. The server will then retry every few
/// seconds.
const OPTIONAL_ATTEMPTS: u32 = 10;

/// Retries an operation that fails because a resource is in use, for at most `patience`.
///
/// # Errors
/// Returns the error from the last attempt.
pub(crate) fn while_in_use<T>(
    patience: Duration,
    mut attempt: impl FnMut() -> Result<T, ServerError>,
) -> Result<T, ServerError> {
    let until = Instant::now() + patience;
    let mut is_logged = false;
    loop {
        match attempt() {
            Err(error) if error.is_in_use() && Instant::now() < until => {
                if !is_logged {
                    tracing::info!(%error, "waiting for a resource that is in use");
                    is_logged = true;
                }
                std::thread::sleep(IN_USE_RETRY);
            }
            end => return end,
        }
    }
}

/// Interfaces to store state that must survive a restart. All of them are optional.
#[derive(Clone, Debug, Default)]
pub struct Keepers {
    /// Stores persistent reservations.
    pub reservations: Option<Arc<dyn ReservationKeeper>>,
    /// Stores port numbers.
    pub ports: Option<Arc<dyn PortKeeper>>,
    /// Stores flush failures.
    pub flushes: Option<Arc<dyn FlushKeeper>>,
    /// Stores unit names.
    pub identities: Option<Arc<dyn IdentityKeeper>>,
    /// Stores the list of blocked initiators.
    pub blocklist: Option<Arc<dyn BlockKeeper>>,
}

/// A server with its workers. On drop, all connections are closed immediately.
#[derive(Debug)]
pub struct Server {
    config: Config,
    /// Ring size of each worker, based on the maximum number of sessions at startup.
    ring: u32,
    builder: build::Builder,
    observation: Observation,
    scrubs: scrubs::Scrubs,
    shared: Arc<Shared>,
    /// The simulated network, if any.
    network: Option<Arc<dyn SimulatedNetwork>>,
    workers: Workers,
}

/// Opens backends and creates units and targets, without devices and workers. For programs with
/// their own workers, such as simulations. Persistent reservations are stored by `keeper`.
///
/// # Errors
/// Returns a [`ServerError`].
pub fn build_shared(
    config: &Config,
    keeper: Option<Arc<dyn ReservationKeeper>>,
) -> Result<Shared, ServerError> {
    let keepers = Keepers {
        reservations: keeper,
        ..Keepers::default()
    };
    build_shared_on(config, keepers, OpenedStores::default())
}

/// Same as [`build_shared`], but some backends are already open, for example on simulated disks
/// ([`Store::on_disk`]). All other backends are opened.
///
/// # Errors
/// Returns a [`ServerError`].
pub fn build_shared_on(
    config: &Config,
    keepers: Keepers,
    opened: OpenedStores,
) -> Result<Shared, ServerError> {
    let server_state = ServerState::default();
    let mut builder = build::Builder::after(&server_state, keepers)?;
    let (catalog, files) = first_catalog(&mut builder, config, &server_state, opened)?;
    files.keep();
    Ok(shared(catalog, Arc::default()))
}

/// Files that were created or extended on startup. This is undone on drop, unless they are kept.
#[derive(Debug)]
struct FirstFiles {
    /// The builder before the files were opened.
    before: build::Builder,
    stores: Vec<Arc<Store>>,
}

impl FirstFiles {
    /// Keeps the files, because they can be written to now.
    fn keep(mut self) {
        self.stores.drain(..).for_each(|store| store.keep());
    }
}

impl Drop for FirstFiles {
    fn drop(&mut self) {
        // The files were kept, or no files were opened.
        if self.stores.is_empty() {
            return;
        }
        self.before.keep_missing();
        self.before.undo(self.stores.iter());
    }
}

/// Opens backends, and creates units and targets.
fn first_catalog(
    builder: &mut build::Builder,
    config: &Config,
    server_state: &ServerState,
    mut opened: OpenedStores,
) -> Result<(Catalog, FirstFiles), ServerError> {
    let before = builder.clone();
    builder.refresh_addresses(config);
    let mut open_requests = builder.open_requests(config);
    open_requests.retain(|wish| !opened.has(&wish.backend, &wish.spec));
    opened.extend(open_all(open_requests));
    let missing = opened.missing();
    let built = builder.catalog(config, &mut opened);
    let stores = builder.stores_beyond(&before).cloned().collect();
    // Create this before returning any error, so that changes to files are undone if the start
    // fails.
    let files = FirstFiles { before, stores };
    let saved = built.and_then(|catalog| {
        // Store the numbers before they are visible to initiators. This ensures that after a crash,
        // they are not assigned to other ports.
        builder.save_ports(builder.ports())?;
        builder.save_identities(None)?;
        Ok(catalog)
    });
    let catalog = saved.inspect_err(|_| builder.write_missing(&missing))?;
    builder.restore_units(server_state);
    Ok((catalog, files))
}

fn shared(catalog: Catalog, device_slots: Arc<DeviceSlots>) -> Shared {
    Shared {
        registry: Registry::new(catalog),
        iscsi: IscsiSessions::default(),
        device_slots,
    }
}

impl Server {
    /// Starts a server, and returns when it is listening.
    ///
    /// # Errors
    /// Returns a [`ServerError`]. The server is stopped in this case.
    pub fn start(config: &Config) -> Result<Self, ServerError> {
        Self::start_after(config, &ServerState::default(), Keepers::default())
    }

    /// Same as [`Server::start`], but with state from a previous server, and with storage for state
    /// that must survive a restart.
    ///
    /// # Errors
    /// Returns a [`ServerError`]. The server is stopped in this case, and the start can be retried.
    pub fn start_after(
        config: &Config,
        server_state: &ServerState,
        keepers: Keepers,
    ) -> Result<Self, ServerError> {
        Self::start_patiently(config, server_state, keepers, Duration::ZERO)
    }

    /// Same as [`Server::start_after`], but waits for addresses in use, which may belong to a
    /// daemon that is still exiting. Backends are kept open, because opening them may change files
    /// or take a long time. If an address is still in use after `patience`, it is reported as a
    /// problem and the server starts without it. If all addresses are in use, another daemon is
    /// serving this configuration, and this is an error.
    ///
    /// # Errors
    /// Same as [`Server::start_after`].
    pub fn start_patiently(
        config: &Config,
        server_state: &ServerState,
        keepers: Keepers,
        patience: Duration,
    ) -> Result<Self, ServerError> {
        let mut builder = build::Builder::after(server_state, keepers)?;
        builder.set_lenient(!config.strict);
        let (mut catalog, files) =
            first_catalog(&mut builder, config, server_state, OpenedStores::default())?;
        let device_slots = Arc::new(DeviceSlots::default());
        // The resource may be used by a daemon that is still exiting, so we wait for it.
        let is_waited_for = Cell::new(true);
        let attempts = Cell::new(0);
        let tolerates = |subject: &Subject, error: &ServerError| {
            let is_over = subject.is_optional() && attempts.get() > OPTIONAL_ATTEMPTS;
            let waits = is_waited_for.get() && !is_over;
            builder.tolerates(subject) && !(waits && error.is_in_use())
        };
        let wanted = acquire::Wanted {
            config,
            catalog: &catalog,
            server_state,
            old: None,
            workers: build::workers(config),
            simulated: None,
            tolerates: &tolerates,
        };
        let attempt = || {
            attempts.set(attempts.get() + 1);
            acquire::acquire(&wanted, &device_slots)
        };
        let mut acquired = match while_in_use(patience, attempt) {
            // If the address is still in use, it does not belong to the previous process. Start
            // without it.
            Err(error) if error.is_in_use() && !patience.is_zero() => {
                is_waited_for.set(false);
                let mut acquired = acquire::acquire(&wanted, &device_slots)?;
                match acquired.take_in_use_of_all(&catalog) {
                    Some(error) => return Err(error),
                    None => acquired,
                }
            }
            end => end?,
        };
        // Only a start can skip missing resources. A later change will be rejected.
        builder.set_lenient(false);
        let mut problems = builder.problems().clone();
        problems.set_missing_portals(acquired.missing(), &[builder.unnamed_portals()]);
        problems.log_since(&Problems::default());
        builder.set_problems(problems);
        // Discovery must not return portals without a listening worker.
        catalog.remove_portals(builder.problems().portals());
        let shared = Arc::new(shared(catalog, device_slots));
        let parts = acquired.keep();
        // As soon as workers are running, initiators can write to the files.
        files.keep();
        let (mut server, reports_tx) = Self::without_workers(config, builder, shared);
        let Self {
            ring,
            shared,
            workers,
            ..
        } = &mut server;
        let started = workers.start(config, *ring, shared, parts, &reports_tx);
        // Otherwise, waiting for reports would continue after all workers have exited.
        drop(reports_tx);
        let started = started.and_then(|unserved| server.do_without(unserved));
        if let Err(error) = started {
            server.workers.abandon(None);
            return Err(error);
        }
        server.observe();
        Ok(server)
    }

    fn without_workers(
        config: &Config,
        builder: build::Builder,
        shared: Arc<Shared>,
    ) -> (Self, Sender<Report>) {
        let (workers, reports) = Workers::new();
        let server = Self {
            config: config.clone(),
            ring: ring_capacity(config.limits.max_sessions),
            builder,
            observation: Observation::default(),
            scrubs: scrubs::Scrubs::default(),
            shared,
            network: None,
            workers,
        };
        (server, reports)
    }

    /// Creates the server for a simulation, with open backends. The caller must create and run its
    /// workers using the returned parts, and pass them to [`Server::attach`].
    ///
    /// # Errors
    /// Returns a [`ServerError`].
    pub fn simulated(
        config: &Config,
        server_state: &ServerState,
        keepers: Keepers,
        opened: OpenedStores,
        network: Arc<dyn SimulatedNetwork>,
    ) -> Result<(Self, Vec<Part>, Sender<Report>), ServerError> {
        let mut builder = build::Builder::after(server_state, keepers)?;
        let (catalog, files) = first_catalog(&mut builder, config, server_state, opened)?;
        let device_slots = Arc::new(DeviceSlots::default());
        let wanted = acquire::Wanted {
            config,
            catalog: &catalog,
            server_state,
            old: None,
            workers: build::workers(config),
            simulated: Some(&*network),
            tolerates: &|_, _| false,
        };
        let parts = acquire::acquire(&wanted, &device_slots)?.keep();
        files.keep();
        let shared = Arc::new(shared(catalog, device_slots));
        let (mut server, reports) = Self::without_workers(config, builder, shared);
        server.network = Some(network);
        Ok((server, parts, reports))
    }

    /// Sets the workers of a simulation, in order.
    pub fn attach(&mut self, workers: Vec<MailSender<Mail>>) {
        self.workers.senders = workers;
    }

    /// Removes portals that workers cannot listen on, or fails in strict mode.
    fn do_without(&mut self, unserved: Vec<Unserved>) -> Result<(), ServerError> {
        if unserved.is_empty() {
            return Ok(());
        }
        if self.config.strict {
            let first = unserved.into_iter().next().expect("not empty");
            return Err(ServerError::Portal(first.why));
        }
        let before = self.builder.problems().clone();
        let mut problems = before.clone();
        for Unserved { portal, why } in unserved {
            problems.add(Subject::RdmaPortal(portal), &why);
        }
        problems.log_since(&before);
        let mut catalog = Catalog::clone(&self.shared.registry.catalog());
        catalog.remove_portals(problems.portals());
        self.builder.set_problems(problems);
        let catalog = Arc::new(catalog);
        let mut rollout = RolloutDriver::staged(self.workers.senders.clone());
        self.exchange(&catalog, &[], &mut rollout, Instant::now());
        rollout.wait();
        self.remove_former_units();
        self.want_devices(&catalog);
        Ok(())
    }

    /// Returns the addresses and ports of all portals, for the RDMA CM and TCP.
    #[must_use]
    pub fn addresses(&self) -> Vec<SocketAddr> {
        let catalog = self.shared.registry.catalog();
        let targets = &catalog.targets;
        let iscsi = targets.iter().filter_map(|t| t.iscsi.as_ref());
        let iscsi = iscsi.flat_map(|t| &t.portals).copied();
        catalog.rdma_portals().chain(iscsi).collect()
    }

    /// Sets or clears the problem for the metrics address, which is then included in the problems
    /// of the server.
    pub fn set_metrics_problem(&mut self, problem: Option<(SocketAddr, &ServerError)>) {
        self.builder.set_metrics_problem(problem);
    }

    /// Sets or clears the problem for the admin socket, which is then included in the problems of
    /// the server.
    pub fn set_admin_problem(&mut self, problem: Option<(&Path, &ServerError)>) {
        self.builder.set_admin_problem(problem);
    }

    /// Copies the control plane problems of another server in this process.
    pub fn keep_control_problems(&mut self, before: &Problems) {
        self.builder.keep_control_problems(before);
    }

    /// Lists the current addresses of the host, and tries to read unit names again if necessary.
    /// Returns whether to call [`Server::retry`]: if there are problems, if a device was removed,
    /// or if the addresses of wildcard portals have changed.
    pub fn check_resources(&mut self) -> bool {
        self.observe();
        let builder = &mut self.builder;
        builder.refresh_addresses(&self.config);
        builder.is_elsewhere(&self.config)
            || builder.problems().can_be_tried()
            || builder.has_gone()
    }

    /// Detects new faults.
    fn observe(&mut self) {
        let has_network = self.network.is_none();
        let workers = &self.workers;
        self.observation
            .update(&self.config, &self.builder, has_network, || {
                workers.send_to_all(Mail::OldestRequests)
            });
    }

    /// Returns missing backends and portals, and backends that require action by an administrator.
    #[must_use]
    pub fn problems(&self) -> Problems {
        let mut all = self.builder.problems().clone();
        for (name, store) in self.builder.open() {
            for failing in self.causes(name, store) {
                all.add_failing(Subject::Backend(name.clone()), failing);
            }
        }
        all.add_missing(self.observation.problems());
        all.keep_dates(self.observation.problems());
        all
    }

    /// Returns all reasons why an open backend requires action, the most serious first.
    #[must_use]
    pub fn causes(&self, backend: &str, store: &Store) -> Vec<Failing> {
        let wanted = wanted_size(&self.config, backend);
        let mut causes = store.problems(wanted, Instant::now(), SystemTime::now());
        // If the device was removed, this comes first, because it will be opened again.
        let first = causes.iter().take_while(|cause| cause.is_gone()).count();
        let hanging = self.observation.hanging(backend, store);
        causes.splice(first..first, hanging);
        causes
    }

    /// Returns the current units by backend name.
    pub fn units(&self) -> impl Iterator<Item = (&str, &Arc<Unit>)> {
        let units = self.builder.units().iter();
        units.map(|(name, unit)| (name.as_str(), unit))
    }

    /// Returns the open backends by name.
    pub fn backends(&self) -> impl Iterator<Item = (&str, &Arc<Store>)> {
        self.builder
            .open()
            .map(|(name, store)| (name.as_str(), store))
    }

    /// Returns the unit for a backend.
    #[must_use]
    pub fn unit_on(&self, backend: &str) -> Option<&Arc<Unit>> {
        self.builder.units().get(backend)
    }

    /// Returns a function that measures the space and checks the media of all backends, and
    /// notifies initiators if a threshold is reached. It can be called from any thread, and returns
    /// `false` if the server has been stopped. A file system that does not respond delays this only
    /// once, for a few seconds.
    pub fn measurer(&self) -> impl Fn() -> bool + Send + use<> {
        let shared = Arc::downgrade(&self.shared);
        move || {
            let Some(catalog) = shared.upgrade().map(|shared| shared.registry.catalog()) else {
                return false;
            };
            // Don't keep a reference to the catalog: if a backend hangs, only this backend should
            // remain open.
            let stores = catalog.stores.iter().enumerate();
            let stores =
                stores.filter_map(|(place, store)| Some((place, Arc::downgrade(store.as_ref()?))));
            let stores: Vec<_> = stores.collect();
            drop(catalog);
            for (place, store) in stores {
                let Some(store) = store.upgrade() else {
                    continue;
                };
                let entry = store.list_thread();
                if let Err(error) = store.examine() {
                    tracing::debug!(%error, "cannot examine a backend");
                }
                store.rest(Instant::now());
                if let Some(shared) = shared.upgrade() {
                    let catalog = shared.registry.catalog();
                    let is_there = catalog.stores.get(place).and_then(Option::as_ref);
                    if is_there.is_some_and(|now| Arc::ptr_eq(now, &store)) {
                        if let Some(space) = store.space() {
                            note_space(&catalog, place, &store, space);
                        }
                        // A FORMAT UNIT may have completed after its unit was replaced.
                        for unit in catalog.units_on(place) {
                            unit.lu.restore_protection(|| {
                                store.protection().map(|p| p.protection_type)
                            });
                        }
                    }
                }
                // This closes the file if the backend was removed, or the server was shut down.
                drop(store);
                drop(entry);
            }
            shared.strong_count() > 0
        }
    }

    /// Returns the current capacity of a backend in bytes.
    #[must_use]
    pub fn capacity_of(&self, backend: &str) -> Option<u64> {
        let place = self.builder.place_of(backend)?;
        let catalog = self.shared.registry.catalog();
        Some(catalog.stores.get(place)?.as_ref()?.capacity())
    }

    /// Returns the sessions and the current catalog.
    #[must_use]
    pub fn shared(&self) -> &Arc<Shared> {
        &self.shared
    }

    /// Returns an object that is notified when a worker fails. The server should then be shut down.
    #[must_use]
    pub fn failure(&self) -> Arc<Notify> {
        Arc::clone(&self.workers.failure)
    }

    /// Returns the configured number of workers.
    #[must_use]
    pub fn workers(&self) -> usize {
        self.workers.senders.len()
    }

    /// Returns the current number of I_T nexuses.
    #[must_use]
    pub fn sessions(&self) -> usize {
        self.shared.registry.sessions()
    }

    /// Returns the counters and sessions of each worker. Workers that do not reply within a second
    /// are omitted.
    #[must_use]
    pub fn snapshot(&self) -> Vec<Snapshot> {
        let until = Instant::now() + Duration::from_secs(1);
        self.workers
            .send_to_all(Mail::Snapshot)
            .into_iter()
            .filter_map(|rx| {
                rx.recv_timeout(until.saturating_duration_since(Instant::now()))
                    .ok()
            })
            .collect()
    }

    /// Returns a function that requests a reply from each worker. It can be called from any thread.
    /// If the mailbox of a worker is full, the request is dropped, and the receiver is
    /// disconnected.
    pub fn pinger(&self) -> impl Fn() -> Vec<Receiver<()>> + Send + use<> {
        let senders = self.workers.senders.clone();
        move || send_to_workers(&senders, Mail::Ping)
    }

    /// Measures all backends again and checks their media. Initiators are notified if the capacity
    /// of a unit has changed.
    ///
    /// # Errors
    /// Returns the error for the first backend that could not be measured. All other backends are
    /// still measured.
    pub fn rescan(&mut self) -> io::Result<()> {
        let mut result = Ok(());
        let catalog = self.shared.registry.catalog();
        let until = query::until();
        let stores: Vec<_> = self
            .builder
            .open()
            .filter_map(|(name, store)| Some((name, self.builder.place_of(name)?, store)))
            .collect();
        // Start all operations before waiting, so that hanging media share a deadline.
        let measured: Vec<_> = stores
            .iter()
            .map(|(.., store)| store.start_measure())
            .collect();
        let mut pending = Vec::new();
        for ((name, place, store), query) in stores.into_iter().zip(measured) {
            let measured = query.and_then(|query| query.finish(until)).flatten();
            match measured {
                Ok(Some(resized)) => {
                    log_resized(name, resized);
                    if self.on_resized(&catalog, place, resized.to) {
                        store.set_capacity(resized.to);
                    }
                    pending.push((name, store.start_inspect()));
                }
                Ok(None) => pending.push((name, store.start_inspect())),
                Err(error) if result.is_ok() => {
                    let text = format!("{}: {error}", store.label());
                    result = Err(io::Error::new(error.kind(), text));
                }
                Err(_) => {}
            }
        }
        let until = query::until();
        for (name, query) in pending {
            let inspected = query.and_then(|query| query.finish(until)).flatten();
            if let Err(error) = inspected {
                tracing::warn!(backend = %name, %error, "cannot inspect a backend");
            }
        }
        self.observe();
        result
    }

    /// Returns the list of blocked initiators.
    #[must_use]
    pub fn blocklist(&self) -> &Blocklist {
        self.builder.blocklist()
    }

    /// Clears recorded flush failures for units with this serial number, or for all units, after an
    /// administrator has handled the lost data. Returns the number of backends.
    ///
    /// # Errors
    /// Returns an error with the label of a backend if its file system does not respond. In this
    /// case, nothing is cleared.
    pub fn clear_flush_failure(&self, serial: Option<&str>) -> io::Result<usize> {
        let catalog = self.shared.registry.catalog();
        let is_meant = |unit: &crate::fabric::Unit| {
            serial.is_none_or(|serial| unit.lu.config().identity.serial == serial)
        };
        let mut stores: Vec<&Arc<Store>> = Vec::new();
        for (_, unit) in catalog.targets.iter().flat_map(|target| &target.units) {
            if is_meant(unit)
                && let Some(store) = catalog.store_of(unit)
                && store.flush_failure().is_some()
                && !stores.iter().any(|other| Arc::ptr_eq(other, store))
            {
                stores.push(store);
            }
        }
        let until = query::until();
        let checks: Vec<_> = stores
            .iter()
            .map(|store| store.start_open_check())
            .collect();
        let checked = stores.iter().zip(checks).map(|(store, check)| {
            let label = |error: io::Error| {
                io::Error::new(error.kind(), format!("{}: {error}", store.label()))
            };
            check.and_then(|check| check.finish(until)).map_err(label)
        });
        // Wait for all of them: a store with a pending check would fail other queries.
        let checked: Vec<_> = checked.collect();
        checked.into_iter().collect::<io::Result<()>>()?;
        let cleared = stores
            .iter()
            .filter_map(|store| store.clear_flush_failure());
        Ok(cleared.count())
    }

    /// Updates the capacity of a backend's units. Returns whether all of them have accepted it.
    fn on_resized(&self, catalog: &Catalog, store: usize, bytes: u64) -> bool {
        let mut is_taken = true;
        let mut resized = Vec::new();
        for unit in catalog.units_on(store) {
            if resized.contains(&unit.index) {
                continue;
            }
            resized.push(unit.index);
            let blocks = bytes / u64::from(unit.lu.config().block_size.bytes());
            if let Err(error) = unit.lu.set_capacity(blocks) {
                tracing::warn!(%error, "the new size cannot be served");
                is_taken = false;
                continue;
            }
            for sender in &self.workers.senders {
                let mail = Mail::Event {
                    unit: unit.index,
                    attention: Attention::CapacityChanged,
                };
                // If the mailbox is full, the worker is overloaded. Its initiators will still get a
                // unit attention.
                let _ = sender.send(mail);
            }
        }
        is_taken
    }
}

impl Drop for Server {
    /// If a server is just dropped, all connections are closed without a logout.
    fn drop(&mut self) {
        self.workers.abandon(None);
    }
}

/// Logs the new size of a backend. If it is smaller, the data after the new end is lost.
fn log_resized(backend: &str, Resized { from, to }: Resized) {
    if to < from {
        tracing::error!(backend, from, to, "backend has shrunk");
    } else {
        tracing::info!(backend, from, to, "backend has grown");
    }
}

/// Reports the used space of a backend to its units. Logs when the threshold is reached, and when
/// it no longer is.
fn note_space(catalog: &Catalog, place: usize, store: &Store, space: Space) {
    let (used, all) = space.of(store.capacity());
    for unit in catalog.units_on(place) {
        let (backend, threshold) = (store.name(), unit.lu.threshold().unwrap_or_default());
        match unit.lu.note_space(used, all) {
            Some(true) => tracing::warn!(
                backend,
                used,
                space = all,
                threshold,
                "backend has reached its threshold"
            ),
            Some(false) => tracing::info!(
                backend,
                used,
                space = all,
                threshold,
                "backend is below its threshold again"
            ),
            None => {}
        }
    }
}
