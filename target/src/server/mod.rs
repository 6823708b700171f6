//! The server: from a [`Config`] to running workers, and back to nothing.
//!
//! [`Server`] is a value, for programs and tests that have one in their process as well as for the
//! daemon, whose [control plane](crate::control) has one.
//!
//! # Start
//! Backends are opened and locked, logical units and targets made, devices opened (for each address
//! one per worker, in the workers' order, since packets are steered by it), workers started. A step
//! that fails undoes the rest; but files that were created or extended stay once workers may have
//! written to them.
//!
//! # Shutdown
//! ```text
//! logins refused → commands under way finish (at most PATIENCE) → T_LOGOUT, DREQ
//!   → all workers quiet → flush of every backend → workers end
//! ```
//!
//! # Changes
//! [`Server::change`] applies another configuration: see [`reload`]. The start is a change from
//! nothing, and acquires what it takes with the same code.
//!
//! # Successors
//! [`Server::export_state`] shuts down and gives what a restart would lose, and
//! [`Server::start_after`] starts with it: see [`handover`].

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
pub mod shutdown;
#[cfg(test)]
mod tests_files;
#[cfg(test)]
mod tests_hanging;

use std::cell::Cell;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant, SystemTime};

use riser_reactor::{MailSender, Ring, RingConfig, RingError, mailbox};
use riser_scsi::attention::Attention;
use riser_scsi::reservation::ReservationKeeper;
use rustix::thread::{CpuSet, sched_setaffinity};
use tokio::sync::Notify;

use crate::backend::{
    Failing, FlushKeeper, OpenError, OpenedStores, Resized, Space, Store, look, open_all,
};
use crate::config::{Config, Listen};
use crate::fabric::Unit;
use crate::holder::HeldBy;
use crate::sessions::blocklist::{BlockKeeper, Blocklist};
use crate::sessions::catalog::Catalog;
use crate::sessions::iscsi::IscsiSessions;
use crate::sessions::nexus::Registry;
use crate::worker::device_slots::DeviceSlots;
use crate::worker::mail::{MAILBOX, Mail, Outbox, Snapshot};
use crate::worker::portals::Unserved;
use crate::worker::{Report, Shared, System, Worker, WorkerConfig, ring_capacity};
use handover::ServerState;
use identities::IdentityKeeper;
use observation::{Observation, wanted_size};
use ports::PortKeeper;
use problems::{Problems, Subject};
use rollout::RolloutDriver;

pub use acquire::{Part, SimulatedNetwork};

pub use crate::worker::PATIENCE;

/// Time that the last block operations, and the flush, get after that.
const LAST_IO: Duration = Duration::from_secs(60);

/// Time that threads get to exit after a shutdown that failed.
const LAST_EXIT: Duration = Duration::from_secs(5);

/// An error at the start, in a change or at the end of a server.
#[derive(Debug, thiserror::Error)]
pub enum ServerError {
    /// A backend cannot be opened.
    #[error("backend {name}: {source}")]
    Backend {
        /// Name of the backend.
        name: String,
        /// Error of opening it.
        source: OpenError,
    },
    /// A logical unit cannot be made of its backend.
    #[error("backend {name}: {source}")]
    Unit {
        /// Name of the backend.
        name: String,
        /// Error in the settings of its unit.
        source: riser_scsi::config::ConfigError,
    },
    /// It is not known who may use a logical unit.
    #[error("backend {name}: its reservations: {source}")]
    Reservations {
        /// Name of the backend.
        name: String,
        /// Error of the operating system.
        source: io::Error,
    },
    /// A CHAP secret cannot be read.
    #[error("the secret of {name}: {source}")]
    Secret {
        /// User name, the value of CHAP_N.
        name: String,
        /// Error of reading the secret.
        source: io::Error,
    },
    /// A CHAP secret is used in both directions.
    #[error(
        "the CHAP user {own}, by which a target proves who it is (`mutual`), and the user {user}, which is admitted, \
         have one secret: give one of them another"
    )]
    SameSecret {
        /// CHAP name of the target's own secret.
        own: String,
        /// CHAP name of the initiator's.
        user: String,
    },
    /// A device cannot be opened.
    #[error("cannot open a RoCE device at {addr}: {source}{holder}")]
    Device {
        /// Address of the device.
        addr: IpAddr,
        /// The process that has it.
        holder: HeldBy,
        /// Error of the operating system.
        source: io::Error,
    },
    /// Memory cannot be shared with processes of this host.
    #[error("cannot share memory at {addr}: {source}")]
    SharedMemory {
        /// Address at which it would be.
        addr: IpAddr,
        /// Error of the operating system, which names the process that has the address's name.
        source: io::Error,
    },
    /// An RDMA device of the host cannot be opened.
    #[error(transparent)]
    RdmaCore(#[from] riser_transport::rdma_core::OpenError),
    /// A device at an address that was served before does not close.
    #[error("the device at {0} is still being closed; try again")]
    Closing(IpAddr),
    /// A portal over TCP cannot be listened on.
    #[error("cannot listen on {portal}: {source}{holder}")]
    Listen {
        /// Address and port of the portal.
        portal: SocketAddr,
        /// The process that has it.
        holder: HeldBy,
        /// Error of the operating system.
        source: io::Error,
    },
    /// A portal with a wildcard is not served everywhere.
    #[error("cannot listen on {listen}: {why}")]
    Wildcard {
        /// Address as the configuration has it.
        listen: Listen,
        /// Reason why it cannot be served there, for people.
        why: String,
    },
    /// A listening socket cannot be handed on.
    #[error("cannot duplicate a listening socket: {0}")]
    Duplicate(#[source] io::Error),
    /// A worker of the next program could have no ring.
    #[error(transparent)]
    Ring(#[from] RingError),
    /// The next program could not begin before what other users have sent is closed.
    #[error("no program can take over yet: {0}")]
    Unclosed(#[source] io::Error),
    /// A thread cannot be started.
    #[error("cannot start a worker: {0}")]
    Thread(#[source] io::Error),
    /// A thread or a socket of the control plane cannot be had.
    #[error("cannot start the control plane: {0}")]
    ControlPlane(#[source] io::Error),
    /// A worker has ended by itself.
    #[error("worker {index}: {message}")]
    Worker {
        /// Number of the worker.
        index: u16,
        /// Its error, for people.
        message: String,
    },
    /// Written data could not be made durable.
    #[error("the last flush failed: {0}")]
    Flush(String),
    /// Block operations hold up a hand-over or a shutdown.
    #[error(
        "block operations of backend {backend} have been in flight for {seconds} s: the disk does not respond"
    )]
    Hanging {
        /// Label of the backend.
        backend: String,
        /// Age of the oldest operation.
        seconds: u64,
    },
    /// Something took longer than it may.
    #[error("{0} did not end in time")]
    Timeout(&'static str),
    /// Metrics cannot be where the configuration wants them.
    #[error("cannot listen for metrics at {addr}: {source}")]
    Metrics {
        /// Address of the server for metrics.
        addr: SocketAddr,
        /// Error of the operating system.
        source: io::Error,
    },
    /// The admin API cannot be where the configuration wants it.
    #[error("cannot listen at {}: {source}", path.display())]
    Admin {
        /// Path of the socket.
        path: PathBuf,
        /// Error of the operating system.
        source: io::Error,
    },
    /// The socket that the service manager has handed over for the admin API is none.
    #[error("the service manager's socket for the admin API: {0}")]
    Inherited(#[source] io::Error),
    /// Applied configurations cannot be kept or read.
    #[error("the state directory: {0}")]
    State(#[source] io::Error),
    /// The path of this program is not known.
    #[error("cannot find this program: {0}")]
    Program(#[source] io::Error),
    /// Another program could not take over, and neither can this one.
    #[error("what was to be handed over cannot be taken back: {0}")]
    TakeBack(#[source] io::Error),
    /// The numbers of ports cannot be kept, or read.
    #[error("the numbers of target ports: {0}")]
    Ports(#[source] io::Error),
    /// The list of blocked initiators cannot be read.
    #[error("the list of blocked initiators: {0}")]
    Blocklist(#[source] io::Error),
    /// The names of logical units cannot be kept, or read.
    #[error("the names of logical units: {0}")]
    Identities(#[source] io::Error),
    /// That a disk was missing, or is another one, cannot be kept.
    #[error(
        "it cannot be saved that a disk was missing or is another one, so initiators may not be \
         notified after the next start of what it has lost: {0}"
    )]
    Losses(#[source] io::Error),
    /// The names of logical units that are kept cannot be read.
    #[error("{0}")]
    Unnamed(String),
    /// The program after this one would not start: `strict` is set.
    #[error("`strict` is set, and this is not served: {0}")]
    Strict(String),
    /// An RDMA portal cannot be listened on.
    #[error("{0}")]
    Portal(String),
    /// One reason for several things.
    #[error("{0}")]
    Shared(Arc<Self>),
    /// Signals cannot be waited for.
    #[error("cannot wait for signals: {0}")]
    Signal(#[source] io::Error),
}

impl ServerError {
    /// Returns true if something is in use that may be free in a moment: a file's lock, or an
    /// address. A daemon that was killed has both until the kernel has finished its I/O, which is
    /// after its process is gone.
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

/// Interval of attempts to have what is in use.
const IN_USE_RETRY: Duration = Duration::from_millis(20);

/// Attempts for which all else waits for the name for shared memory, which a process that was killed
/// has for a moment. Any local user can take it for longer, and the server tries it again every few
/// seconds.
const OPTIONAL_ATTEMPTS: u32 = 10;

/// Repeats an attempt that fails because something is in use, for `patience` at most.
///
/// # Errors
/// Those of the last attempt.
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
                    tracing::info!(%error, "waiting");
                    is_logged = true;
                }
                std::thread::sleep(IN_USE_RETRY);
            }
            end => return end,
        }
    }
}

/// Keepers of things beyond the end of the process, each of them if there is one.
#[derive(Clone, Debug, Default)]
pub struct Keepers {
    /// Reservations that persist through power loss.
    pub reservations: Option<Arc<dyn ReservationKeeper>>,
    /// The numbers of ports.
    pub ports: Option<Arc<dyn PortKeeper>>,
    /// Keeper of failures of flushes.
    pub flushes: Option<Arc<dyn FlushKeeper>>,
    /// The names of logical units.
    pub identities: Option<Arc<dyn IdentityKeeper>>,
    /// Keeper of the list of blocked initiators.
    pub blocklist: Option<Arc<dyn BlockKeeper>>,
}

/// A server with its workers; dropping it cuts all connections.
#[derive(Debug)]
pub struct Server {
    config: Config,
    /// Entries of each worker's ring, as the number of sessions at the start wanted it.
    ring: u32,
    builder: build::Builder,
    observation: Observation,
    shared: Arc<Shared>,
    /// The network, if it is not the host's.
    network: Option<Arc<dyn SimulatedNetwork>>,
    senders: Vec<MailSender<Mail>>,
    threads: Vec<Option<JoinHandle<()>>>,
    reports: Receiver<Report>,
    /// Workers that have ended by themselves.
    gone: usize,
    /// Number of flushes that the server has requested.
    flushes: u64,
    /// Error of the first of them.
    failed: Option<ServerError>,
    /// Notified when a worker fails.
    failure: Arc<Notify>,
}

/// Opens backends and makes units and targets, without devices and workers: for programs that bring
/// their own, such as simulations. Reservations persist through power loss as far as `keeper` keeps
/// them.
///
/// # Errors
/// [`ServerError`].
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

/// As [`build_shared`], with backends that are open already, such as those on disks in memory
/// ([`Store::on_disk`]). All others are opened.
///
/// # Errors
/// [`ServerError`].
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

/// Files that a start has created or extended. Unless they are kept, that is undone when this is
/// dropped.
#[derive(Debug)]
struct FirstFiles {
    /// The builder as it was before the files were opened.
    before: build::Builder,
    stores: Vec<Arc<Store>>,
}

impl FirstFiles {
    /// They may be written to from now on.
    fn keep(mut self) {
        self.stores.drain(..).for_each(|store| store.keep());
    }
}

impl Drop for FirstFiles {
    fn drop(&mut self) {
        // As after a start that goes on.
        if self.stores.is_empty() {
            return;
        }
        self.before.keep_missing();
        self.before.undo(self.stores.iter());
    }
}

/// Opens backends, and makes units and targets of them.
fn first_catalog(
    builder: &mut build::Builder,
    config: &Config,
    server_state: &ServerState,
    mut opened: OpenedStores,
) -> Result<(Catalog, FirstFiles), ServerError> {
    let before = builder.clone();
    builder.look(config);
    let mut wishes = builder.wishes(config);
    wishes.retain(|wish| !opened.has(&wish.backend, &wish.spec));
    opened.extend(open_all(wishes));
    let missing = opened.missing();
    let built = builder.catalog(config, &mut opened);
    let stores = builder.stores_beyond(&before).cloned().collect();
    // Before any error is returned: dropping it takes back what was done to files for a start that
    // fails.
    let files = FirstFiles { before, stores };
    let saved = built.and_then(|catalog| {
        // Before initiators can meet the numbers: a crash must not give another port the same one.
        builder.save_ports(builder.ports())?;
        builder.save_identities(None)?;
        Ok(catalog)
    });
    let catalog = saved.inspect_err(|_| builder.write_missing(&missing))?;
    builder.settle(server_state);
    Ok((catalog, files))
}

fn shared(catalog: Catalog, device_slots: Arc<DeviceSlots>) -> Shared {
    Shared {
        registry: Registry::new(catalog),
        iscsi: IscsiSessions::default(),
        device_slots,
    }
}

/// Mailboxes of all workers, which each of them gets once all exist.
type Setup = Vec<MailSender<Mail>>;

/// Sends each worker a question, with where to answer it.
fn ask<T>(senders: &[MailSender<Mail>], mail: impl Fn(Sender<T>) -> Mail) -> Vec<Receiver<T>> {
    let ask = |sender: &MailSender<Mail>| {
        let (tx, rx) = channel();
        let _ = sender.send(mail(tx));
        rx
    };
    senders.iter().map(ask).collect()
}

impl Server {
    /// Starts everything that a configuration describes, and returns when it listens.
    ///
    /// # Errors
    /// [`ServerError`]; nothing runs then.
    pub fn start(config: &Config) -> Result<Self, ServerError> {
        Self::start_after(config, &ServerState::default(), Keepers::default())
    }

    /// As [`Server::start`], in the place of a server that has left something, and with what is
    /// kept beyond the end of the process.
    ///
    /// # Errors
    /// [`ServerError`]; nothing runs then, and it may be tried again.
    pub fn start_after(
        config: &Config,
        server_state: &ServerState,
        keepers: Keepers,
    ) -> Result<Self, ServerError> {
        Self::start_patiently(config, server_state, keepers, Duration::ZERO)
    }

    /// As [`Server::start_after`], and waits for addresses that are in use, such as those of a
    /// daemon which is ending. Backends stay open meanwhile: opening one may change its file, or
    /// take long. What is in use for longer than `patience` is a problem, and the rest is served,
    /// unless nothing would be left: then another daemon serves this configuration.
    ///
    /// # Errors
    /// As [`Server::start_after`].
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
        // What is in use may be that of a daemon which is ending, and is waited for.
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
            // An address that is in use for longer is not a predecessor's. The rest is served.
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
        // Only the start may do without: a change later is refused for what it cannot have.
        builder.set_lenient(false);
        let mut problems = builder.problems().clone();
        problems.set_missing_portals(acquired.missing(), &[builder.unnamed_portals()]);
        problems.log_since(&Problems::default());
        builder.set_problems(problems);
        // Discovery must not name portals at which no worker listens.
        catalog.remove_portals(builder.problems().portals());
        let shared = Arc::new(shared(catalog, device_slots));
        let parts = acquired.keep();
        // Initiators may write to them as soon as workers run.
        files.keep();
        let (mut server, reports_tx) = Self::without_workers(config, builder, shared);
        let started = server.start_workers(config, parts, &reports_tx);
        // Or a wait for reports would not end once all workers have.
        drop(reports_tx);
        let started = started.and_then(|unserved| server.do_without(unserved));
        if let Err(error) = started {
            server.abandon(None);
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
        let (sender, reports) = channel();
        let server = Self {
            config: config.clone(),
            ring: ring_capacity(config.limits.max_sessions),
            builder,
            observation: Observation::default(),
            shared,
            network: None,
            senders: Vec::new(),
            threads: Vec::new(),
            reports,
            gone: 0,
            flushes: 0,
            failed: None,
            failure: Arc::default(),
        };
        (server, sender)
    }

    /// A server of a simulation, with backends that are open. The caller makes its workers, of the
    /// parts that this returns, and drives them; and names them by [`Server::attach`].
    ///
    /// # Errors
    /// [`ServerError`].
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

    /// Names the workers of a simulation, in their order.
    pub fn attach(&mut self, workers: Vec<MailSender<Mail>>) {
        self.senders = workers;
    }

    /// Goes on without portals that workers cannot listen on, or fails.
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
        let mut rollout = RolloutDriver::staged(self.senders.clone());
        self.exchange(&catalog, &[], &mut rollout, Instant::now());
        rollout.wait();
        self.settle();
        self.want_devices(&catalog);
        Ok(())
    }

    fn start_workers(
        &mut self,
        config: &Config,
        parts: Vec<acquire::Part>,
        reports: &Sender<Report>,
    ) -> Result<Vec<Unserved>, ServerError> {
        let mut setups = Vec::new();
        for (index, part) in parts.into_iter().enumerate() {
            let (setup_tx, setup_rx) = channel::<Setup>();
            let (mail_tx, mail_rx) = channel();
            let parts = ThreadParts {
                index: index as u16,
                cpu: build::cpu(config, index),
                pool: config.limits.buffer_pool,
                ring: self.ring,
                shared: Arc::clone(&self.shared),
                part,
                reports: reports.clone(),
                failure: Arc::clone(&self.failure),
            };
            let thread = std::thread::Builder::new()
                .name(format!("riser-worker-{index}"))
                .spawn(move || parts.run(&mail_tx, &setup_rx))
                .map_err(ServerError::Thread)?;
            self.threads.push(Some(thread));
            // A thread that cannot make its ring reports so and hangs up.
            // One after another: a worker's mailbox exists only once its ring does, which its
            // thread makes.
            match mail_rx.recv() {
                Ok(sender) => self.senders.push(sender),
                Err(_) => return Err(self.wait_failure()),
            }
            setups.push(setup_tx);
        }
        for setup in setups {
            // As above: its report says so.
            let _ = setup.send(self.senders.clone());
        }
        let mut unserved = Vec::new();
        // All have to start, since each has its share of the connections.
        for _ in 0..self.threads.len() {
            match self.reports.recv() {
                Ok(Report::Started(_, without)) => unserved.extend(without),
                Ok(Report::Ended(index, message)) => return Err(ended(index, message)),
                Ok(_) | Err(_) => return Err(ServerError::Timeout("the start of a worker")),
            }
        }
        Ok(unserved)
    }

    /// The report of a worker that has just ended.
    fn wait_failure(&self) -> ServerError {
        loop {
            match self.reports.recv_timeout(LAST_IO) {
                Ok(Report::Ended(index, message)) => return ended(index, message),
                Ok(_) => {}
                Err(_) => return ServerError::Timeout("the start of a worker"),
            }
        }
    }

    /// Ends the workers, and waits for their threads, if need be only until a time: the kernel lets no
    /// thread exit while block operations of its ring are in flight.
    fn abandon(&mut self, until: Option<Instant>) {
        for sender in &self.senders {
            let _ = sender.send_blocking(Mail::Exit);
        }
        self.senders.clear();
        for thread in self.threads.drain(..).flatten() {
            if until.is_none_or(|until| ends_in_time(&thread, until)) {
                let _ = thread.join();
            }
        }
    }

    /// Addresses at which it listens: the RDMA CM ports and the TCP ports of all portals.
    #[must_use]
    pub fn addresses(&self) -> Vec<SocketAddr> {
        let catalog = self.shared.registry.catalog();
        let targets = &catalog.targets;
        let iscsi = targets.iter().filter_map(|t| t.iscsi.as_ref());
        let iscsi = iscsi.flat_map(|t| &t.portals).copied();
        catalog.rdma_portals().chain(iscsi).collect()
    }

    /// Sets or clears the reason why metrics cannot be where the configuration wants them; it is
    /// named with what is not served.
    pub fn set_metrics_problem(&mut self, problem: Option<(SocketAddr, &ServerError)>) {
        self.builder.set_metrics_problem(problem);
    }

    /// Sets or clears the reason why the admin API cannot be where the configuration wants it; it
    /// is named with what is not served.
    pub fn set_admin_problem(&mut self, problem: Option<(&Path, &ServerError)>) {
        self.builder.set_admin_problem(problem);
    }

    /// Takes over what the control plane could not have before, in another server of this process.
    pub fn keep_control_problems(&mut self, before: &Problems) {
        self.builder.keep_control_problems(before);
    }

    /// Looks which addresses the host has now, and for names of units that could not be read.
    /// Whether it is time for [`Server::retry`]: something could not be served, a device is gone,
    /// or portals with a wildcard are to be at other addresses.
    pub fn look(&mut self) -> bool {
        self.observe();
        let builder = &mut self.builder;
        builder.look(&self.config);
        builder.is_elsewhere(&self.config)
            || builder.problems().can_be_tried()
            || builder.has_gone()
    }

    /// Looks for faults that have appeared since the last look.
    fn observe(&mut self) {
        let has_network = self.network.is_none();
        let senders = &self.senders;
        self.observation
            .update(&self.config, &self.builder, has_network, || {
                ask(senders, Mail::OldestRequests)
            });
    }

    /// Backends and portals that should be served and are not, and backends that need an operator.
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

    /// Everything for which an open backend needs an operator, the most serious first.
    #[must_use]
    pub fn causes(&self, backend: &str, store: &Store) -> Vec<Failing> {
        let wanted = wanted_size(&self.config, backend);
        let mut causes = store.problems(wanted, Instant::now(), SystemTime::now());
        // A device that is gone comes first, because it is opened again.
        let first = causes.iter().take_while(|cause| cause.is_gone()).count();
        let hanging = self.observation.hanging(backend, store);
        causes.splice(first..first, hanging);
        causes
    }

    /// The units that are served, by the names of their backends.
    pub fn units(&self) -> impl Iterator<Item = (&str, &Arc<Unit>)> {
        let units = self.builder.units().iter();
        units.map(|(name, unit)| (name.as_str(), unit))
    }

    /// The backends that are open, by name.
    pub fn backends(&self) -> impl Iterator<Item = (&str, &Arc<Store>)> {
        self.builder
            .open()
            .map(|(name, store)| (name.as_str(), store))
    }

    /// The unit on a backend that is served.
    #[must_use]
    pub fn unit_on(&self, backend: &str) -> Option<&Arc<Unit>> {
        self.builder.units().get(backend)
    }

    /// Measures the room of all backends and inspects their media, from any thread, and notifies
    /// initiators of thresholds. A file system that does not respond delays this once, for some
    /// seconds. `false` when the server is gone.
    pub fn measurer(&self) -> impl Fn() -> bool + Send + use<> {
        let shared = Arc::downgrade(&self.shared);
        move || {
            let Some(catalog) = shared.upgrade().map(|shared| shared.registry.catalog()) else {
                return false;
            };
            // One that hangs must keep open nothing but itself.
            let stores = catalog.stores.iter().enumerate();
            let stores =
                stores.filter_map(|(place, store)| Some((place, Arc::downgrade(store.as_ref()?))));
            let stores: Vec<_> = stores.collect();
            drop(catalog);
            for (place, store) in stores {
                let Some(store) = store.upgrade() else {
                    continue;
                };
                if let Err(error) = store.examine() {
                    tracing::debug!(%error, "cannot examine a backend");
                }
                let Some(catalog) = shared.upgrade().map(|shared| shared.registry.catalog()) else {
                    return false;
                };
                let is_there = catalog.stores.get(place).and_then(Option::as_ref);
                if let Some(space) = store.space()
                    && is_there.is_some_and(|now| Arc::ptr_eq(now, &store))
                {
                    note_space(&catalog, place, &store, space);
                }
            }
            true
        }
    }

    /// The present capacity of a backend that is served, in bytes.
    #[must_use]
    pub fn capacity_of(&self, backend: &str) -> Option<u64> {
        let place = self.builder.place_of(backend)?;
        let catalog = self.shared.registry.catalog();
        Some(catalog.stores.get(place)?.as_ref()?.capacity())
    }

    /// Sessions and what they are served.
    #[must_use]
    pub fn shared(&self) -> &Arc<Shared> {
        &self.shared
    }

    /// Notified when a worker fails: time to shut down.
    #[must_use]
    pub fn failure(&self) -> Arc<Notify> {
        Arc::clone(&self.failure)
    }

    /// Workers that there should be.
    #[must_use]
    pub fn workers(&self) -> usize {
        self.senders.len()
    }

    /// I_T nexuses at present.
    #[must_use]
    pub fn sessions(&self) -> usize {
        self.shared.registry.sessions()
    }

    /// Counters of each worker, and its sessions. Workers that do not answer within a second are
    /// left out.
    #[must_use]
    pub fn snapshot(&self) -> Vec<Snapshot> {
        let until = Instant::now() + Duration::from_secs(1);
        self.ask(Mail::Snapshot)
            .into_iter()
            .filter_map(|rx| {
                rx.recv_timeout(until.saturating_duration_since(Instant::now()))
                    .ok()
            })
            .collect()
    }

    /// Asks every worker to answer when it gets round to it, from any thread. A worker whose
    /// mailbox is full is not asked, and its receiver has no sender.
    pub fn pinger(&self) -> impl Fn() -> Vec<Receiver<()>> + Send + use<> {
        let senders = self.senders.clone();
        move || ask(&senders, Mail::Ping)
    }

    fn ask<T>(&self, mail: impl Fn(Sender<T>) -> Mail) -> Vec<Receiver<T>> {
        ask(&self.senders, mail)
    }

    /// Measures all backends again and inspects their media; initiators are notified of units whose
    /// capacity changed.
    ///
    /// # Errors
    /// The first backend that cannot be measured; the others are measured all the same.
    pub fn rescan(&mut self) -> io::Result<()> {
        let mut result = Ok(());
        let catalog = self.shared.registry.catalog();
        let until = look::until();
        let stores: Vec<_> = self
            .builder
            .open()
            .filter_map(|(name, store)| Some((name, self.builder.place_of(name)?, store)))
            .collect();
        // All looks begin before the first is waited for: media that hang share one deadline.
        let measured: Vec<_> = stores
            .iter()
            .map(|(.., store)| store.look_measure())
            .collect();
        let mut answering = Vec::new();
        for ((name, place, store), look) in stores.into_iter().zip(measured) {
            let measured = look.and_then(|look| look.finish(until)).flatten();
            match measured {
                Ok(Some(resized)) => {
                    log_resized(name, resized);
                    if self.on_resized(&catalog, place, resized.to) {
                        store.set_capacity(resized.to);
                    }
                    answering.push((name, store.look_inspect()));
                }
                Ok(None) => answering.push((name, store.look_inspect())),
                Err(error) if result.is_ok() => {
                    let text = format!("{}: {error}", store.label());
                    result = Err(io::Error::new(error.kind(), text));
                }
                Err(_) => {}
            }
        }
        let until = look::until();
        for (name, look) in answering {
            let inspected = look.and_then(|look| look.finish(until)).flatten();
            if let Err(error) = inspected {
                tracing::warn!(backend = %name, %error, "cannot inspect a backend");
            }
        }
        self.observe();
        result
    }

    /// Returns the initiators that may not log in.
    #[must_use]
    pub fn blocklist(&self) -> &Blocklist {
        self.builder.blocklist()
    }

    /// Lets flushes succeed again on the backends of units with this serial number, or of all,
    /// after an administrator has dealt with what was lost. How many backends that were.
    #[must_use]
    pub fn clear_flush_failure(&self, serial: Option<&str>) -> usize {
        let catalog = self.shared.registry.catalog();
        let is_meant = |unit: &crate::fabric::Unit| {
            serial.is_none_or(|serial| unit.lu.config().identity.serial == serial)
        };
        let units = catalog.targets.iter().flat_map(|t| &t.units);
        units
            .filter(|(_, unit)| is_meant(unit))
            .filter_map(|(_, unit)| catalog.store_of(unit)?.clear_flush_failure())
            .count()
    }

    /// Gives a backend's units their new size; whether all of them took it.
    fn on_resized(&self, catalog: &Catalog, store: usize, bytes: u64) -> bool {
        let mut is_taken = true;
        let mut told = Vec::new();
        for unit in catalog.units_on(store) {
            if told.contains(&unit.index) {
                continue;
            }
            told.push(unit.index);
            let blocks = bytes / u64::from(unit.lu.config().block_size.bytes());
            if let Err(error) = unit.lu.set_capacity(blocks) {
                tracing::warn!(%error, "the new size cannot be served");
                is_taken = false;
                continue;
            }
            for sender in &self.senders {
                let mail = Mail::Event {
                    unit: unit.index,
                    attention: Attention::CapacityChanged,
                };
                // A worker with a full mailbox has other worries; its initiators still meet the
                // unit attention.
                let _ = sender.send(mail);
            }
        }
        is_taken
    }

    /// Remembers workers that have ended by themselves.
    fn note(&mut self, report: &Report) {
        if let Report::Ended(index, message) = report {
            self.gone += 1;
            self.failed.get_or_insert(ended(*index, message.clone()));
        }
    }

    /// Takes the reports that have come meanwhile.
    fn poll_reports(&mut self) {
        while let Ok(report) = self.reports.try_recv() {
            self.note(&report);
        }
    }
}

impl Drop for Server {
    /// A server that is merely dropped ends without ceremony: connections are cut.
    fn drop(&mut self) {
        self.abandon(None);
    }
}

/// Waits for the end of a thread until then; returns whether it has ended.
fn ends_in_time(thread: &JoinHandle<()>, until: Instant) -> bool {
    while !thread.is_finished() && Instant::now() < until {
        std::thread::sleep(Duration::from_millis(10));
    }
    thread.is_finished()
}

fn ended(index: u16, message: Option<String>) -> ServerError {
    ServerError::Worker {
        index,
        message: message.unwrap_or_else(|| "ended".into()),
    }
}

/// Parts that a worker's thread begins with.
struct ThreadParts {
    index: u16,
    cpu: Option<usize>,
    pool: usize,
    /// Entries of its ring, which must have room for all sessions.
    ring: u32,
    shared: Arc<Shared>,
    part: acquire::Part,
    reports: Sender<Report>,
    failure: Arc<Notify>,
}

impl ThreadParts {
    fn run(self, mail: &Sender<MailSender<Mail>>, setup: &Receiver<Setup>) {
        let (index, reports) = (self.index, self.reports.clone());
        let failure = Arc::clone(&self.failure);
        let work = std::panic::AssertUnwindSafe(|| self.work(mail, setup));
        let outcome = std::panic::catch_unwind(work)
            .unwrap_or_else(|_| Err("panicked; this is a bug".into()));
        let message = outcome.err();
        if let Some(message) = &message {
            tracing::error!(worker = index, %message, "a worker failed");
        }
        let failed = message.is_some();
        let _ = reports.send(Report::Ended(index, message));
        if failed {
            // Woken up after its report is sent, so that the control plane finds the reason.
            failure.notify_one();
        }
    }

    fn work(self, mail: &Sender<MailSender<Mail>>, setup: &Receiver<Setup>) -> Result<(), String> {
        if let Some(cpu) = self.cpu
            && let Err(error) = pin(cpu)
        {
            tracing::warn!(cpu, %error, "a worker is not pinned");
        }
        let ring = Ring::new(RingConfig {
            capacity: self.ring,
            ..RingConfig::default()
        })
        .map_err(|e: RingError| e.to_string())?;
        let (sender, mailbox) = mailbox(MAILBOX, ring.waker());
        let _ = mail.send(sender);
        let Ok(senders) = setup.recv() else {
            return Ok(());
        };
        // The first devices have the first slots.
        let devices = self.part.devices.into_iter();
        let (mut worker, unserved) = Worker::new(WorkerConfig {
            index: self.index,
            now: Instant::now(),
            env: Box::new(System),
            pool: self.pool,
            shared: self.shared,
            devices: devices.map(|(_, device)| device).collect(),
            sockets: self.part.sockets,
            ring,
            mailbox,
            outbox: Outbox::new(senders),
            reports: self.reports.clone(),
        })
        .map_err(|e| e.to_string())?;
        let _ = self.reports.send(Report::Started(self.index, unserved));
        worker.run().map_err(|e| e.to_string())
    }
}

/// Ties the calling thread to a processor.
fn pin(cpu: usize) -> io::Result<()> {
    // `CpuSet::set` panics beyond its size.
    if cpu >= CpuSet::MAX_CPU {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    let mut set = CpuSet::new();
    set.set(cpu);
    Ok(sched_setaffinity(None, &set)?)
}

/// Logs another size of a backend. Data behind the new end are lost.
fn log_resized(backend: &str, Resized { from, to }: Resized) {
    if to < from {
        tracing::error!(backend, from, to, "backend has become smaller");
    } else {
        tracing::info!(backend, from, to, "backend has grown");
    }
}

/// Reports the use of a backend's space to its units, and logs when it reaches their threshold or
/// recedes.
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
                "the threshold is reached: the backend fills up"
            ),
            Some(false) => tracing::info!(
                backend,
                used,
                space = all,
                threshold,
                "below the threshold again"
            ),
            None => {}
        }
    }
}
