//! Worker: a thread with its devices, ring, and channels.
//!
//! A worker owns everything it uses: its part of the NIC with all queue pairs, the ring, the block
//! driver, data buffers, channels, and timers. State is only shared between workers for logical
//! units (with their own locks), the [`sessions`](crate::sessions) at login and logout, and
//! [`mail::Mail`].
//!
//! `PollGroup` has the connections and everything that their commands use. [`Worker`] itself is the
//! main loop, and handles events, logins and the shutdown.
//!
//! # Main loop
//! ```text
//! devices: received packets, timers, sent packets
//!   → connection events: logins, established, disconnected
//!   → completion queues that are ready, up to a fixed number for each
//! ring: completed block operations, readable descriptors
//! mailbox, timers, commands waiting for pool memory
//!   → poll again if there was work, else park: a single system call to wait for all of this
//! ```
//!
//! # Modules
//! - `blocks`: block operations and backends. `catalog`: configuration updates.
//! - `device`: [`Device`], the provider interface for a worker, and its list of devices.
//! - `portals`: listening on devices, and acquiring the resources for a new catalog before it is
//!   used. `listeners`: connection manager listeners. `disconnects`: disconnect requests waiting
//!   for a reply.
//! - `conns`: table of connections for all fabrics. `fabrics`: the three types of connections.
//! - `events`: completions, connection events and mail.
//! - `exec`: executes actions. `ends`: setup and teardown of connections.
//! - `srp`: SRP channels. `iscsi`: connections and sockets for iSCSI over TCP. `iser`: iSCSI over
//!   RDMA.
//! - `gate`: login decisions for iSCSI. `login_log`: audit log and counters for logins. `listener`,
//!   `stream`: sockets.
//! - `rdma`: device objects of a connection. `queue`: posting work requests.
//! - `work`: identifiers of work requests and block operations. `env`: random numbers, threads and
//!   dates.
//! - `formats`: changes of the protection type by FORMAT UNIT.
//! - `reservations`: changes of reservations that have to be saved, or that abort commands.
//! - `discovery`: device-management agent.
//! - `registration`: registration of a port with a subnet administrator.
//! - `mail`: messages between workers.
//! - `park`: sleeping. `slots`: use of the ring.
//! - `removal`: hot removal of devices. `device_slots`: which devices are open, and how all workers
//!   coordinate to close a device.
//! - `snapshot`: counters and sessions for reports.
//!
//! # Limits
//! We process up to [`CQ_BATCH`] completions per queue and round, so a single peer can't delay all
//! other connections. The number of channels, their memory, and the pool size are set by the
//! configuration.

mod blocks;
mod catalog;
mod conns;
mod device;
pub mod device_slots;
mod disconnects;
mod discovery;
mod ends;
mod env;
mod events;
mod exec;
pub(crate) mod fabrics;
mod formats;
mod gate;
mod iscsi;
mod iser;
mod listener;
mod listeners;
mod login_log;
pub mod mail;
mod park;
pub mod portals;
mod queue;
mod rdma;
mod registration;
mod removal;
mod reservations;
mod slots;
mod snapshot;
mod srp;
mod stream;
mod work;

use std::io;
use std::sync::Arc;
use std::sync::mpsc::Sender;
use std::time::{Duration, Instant};

use riser_memory::MemSlice;
use riser_reactor::{MailReceiver, Ring, RingError, Spinner};
use riser_transport::verbs::{CmError, Completion, PollContext};

use crate::log::RateLimit;
use crate::pool::Pool;
use crate::sessions::iscsi::IscsiSessions;

pub use device::{Device, DeviceInfo, NicInfo, Opened, Reopen};
pub use env::{Env, System};
pub use listener::TcpListener;
pub use mail::SessionInfo;
pub use slots::ring_capacity;
pub use snapshot::Announced;

use crate::sessions::catalog::Catalog;
use crate::sessions::nexus::Registry;
use blocks::Blocks;
use conns::{ConnKey, Conns};
use device::Devices;
use device_slots::DeviceSlots;
use disconnects::Disconnects;
use fabrics::{Fabric, Spares};
use formats::Formats;
use login_log::LoginLog;
use mail::{Mail, Outbox};
use portals::{Portals, Unserved};
use reservations::Saver;
use snapshot::Totals;

/// Maximum number of completions per queue and round.
pub const CQ_BATCH: usize = PollContext::Softirq.budget();

/// Time to continue polling after the last work, before sleeping.
const SPIN: Duration = Duration::from_micros(50);

/// Time to keep a connection identifier after the channel was released, while waiting for a reply
/// to the DREQ.
const LINGER: Duration = Duration::from_secs(5);

/// Time for sessions to complete and log out, if something they use is no longer served or on
/// shutdown of the server.
pub const PATIENCE: Duration = Duration::from_secs(5);

/// Interval to check removed backends and devices without portals.
const LEAVING: Duration = Duration::from_millis(50);

/// Additional time for sessions on shutdown, before their connections are closed.
const GRACE: Duration = Duration::from_secs(2);

/// State shared by all workers.
#[derive(Debug)]
pub struct Shared {
    /// Sessions and the current configuration.
    pub registry: Registry,
    /// iSCSI sessions over TCP and RDMA.
    pub iscsi: IscsiSessions,
    /// Slots for open devices.
    pub device_slots: Arc<DeviceSlots>,
}

/// Report from a worker to the server.
#[derive(Debug)]
pub enum Report {
    /// The worker is listening, except on these portals.
    Started(u16, Vec<Unserved>),
    /// There are no more sessions after a drain or shutdown.
    Quiet(u16),
    /// The flush with this number is complete. All written data is on stable storage, or an error
    /// is returned.
    Flushed(u64, Result<(), String>),
    /// The worker was stopped, with an error if it failed.
    Ended(u16, Option<String>),
}

/// Configuration for a new worker.
pub struct WorkerConfig {
    /// Worker index, starting with 0.
    pub index: u16,
    /// Current time.
    pub now: Instant,
    /// Environment, for example the source of random bytes.
    pub env: Box<dyn Env>,
    /// Data buffer pool size in bytes.
    pub pool: usize,
    /// State shared by all workers.
    pub shared: Arc<Shared>,
    /// Devices by slot.
    pub devices: Vec<Opened>,
    /// Sockets for TCP portals.
    pub sockets: Vec<TcpListener>,
    /// Ring, which can only be used by the worker thread.
    pub ring: Ring,
    /// Mailbox for messages from other workers and the server.
    pub mailbox: MailReceiver<Mail>,
    /// Senders for the mailboxes of all workers, including this one.
    pub outbox: Outbox,
    /// Channel for reports to the server.
    pub reports: Sender<Report>,
}

/// Error when starting or running a worker.
#[derive(Debug, thiserror::Error)]
pub enum WorkerError {
    /// Can't allocate buffers.
    #[error("cannot allocate the data buffers: {0}")]
    Memory(#[source] io::Error),
    /// The ring failed, so the worker can't continue.
    #[error(transparent)]
    Ring(#[from] RingError),
    /// Can't listen on a portal.
    #[error("cannot listen on {portal}: {source}")]
    Listen {
        /// Portal or device.
        portal: String,
        /// Error from the connection manager or device.
        source: CmError,
    },
    /// There is no device with the address of this portal.
    #[error("no device with the address of {0}")]
    NoDevice(String),
}

/// Shutdown state.
///
/// ```text
/// Serving ─ Drain ─→ Draining ─ no connection left ─→ Drained
///    │ ↑                │                                │
///    │ └──── Resume ────┴────────────────────────────────┤
///    └────── Shutdown ──→ Stopping ─ none left ─→ Quiet  │
///                            ↑                           │
///                            └──────── Shutdown ─────────┘
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    /// Accepting and serving connections.
    Serving,
    /// Listeners are paused. Remaining sessions will be closed at this time.
    Draining(Instant),
    /// All connections are closed. Waiting for a message to stop or resume.
    Drained,
    /// Remaining sessions will be closed at this time.
    Stopping(Instant),
    /// Everything is closed. Waiting for a message to exit.
    Quiet,
}

/// Connections of a worker, with the devices, ring and memory to execute their actions.
///
/// [`Worker`] decides when to poll, and handles logins, devices and the shutdown.
struct PollGroup {
    index: u16,
    env: Box<dyn Env>,
    shared: Arc<Shared>,
    devices: Devices,
    ring: Ring,
    /// Block operations and backends.
    blocks: Blocks,
    /// Last catalog used by this worker.
    catalog: Arc<Catalog>,
    pool: Pool,
    /// Unused command contexts.
    spares: Spares,
    outbox: Outbox,
    reports: Sender<Report>,
    /// Portals on devices, and the resources for a new catalog.
    portals: Portals,
    /// Connections of all fabrics.
    conns: Conns<Fabric>,
    /// Set if a connection was added to a session, which may have units that are new for this
    /// worker.
    has_entered: bool,
    /// Totals for closed connections.
    past: Totals,
    saver: Saver,
    formats: Formats,
    /// Identifiers of released channels.
    disconnects: Disconnects,
    completions: Vec<Completion>,
    ring_completions: Vec<riser_reactor::Completion>,
    slices: Vec<MemSlice>,
    /// Chains to be posted together for a connection. This is empty between connections and only
    /// kept to avoid allocations.
    chains: queue::Chains,
    /// Listening sockets for iSCSI.
    sockets: iscsi::Sockets,
    /// Lists used for iSER chains.
    iser: iser::Scratch,
    /// Login counters and the audit log.
    logins: LoginLog,
    now: Instant,
}

/// Worker. This must be created and used on its own thread because of the ring.
pub struct Worker {
    /// Connections of this worker.
    group: PollGroup,
    mailbox: MailReceiver<Mail>,
    /// Connections used by [`Worker::poll_pool`].
    pool_line: Vec<ConnKey>,
    spinner: Spinner,
    phase: Phase,
    exiting: bool,
    parks: u64,
    /// Time when the worker was started.
    began: Instant,
    /// Total time used by rounds with work.
    busy: Duration,
    complaints: RateLimit,
}

impl Worker {
    /// Creates a worker on the current thread and starts listening. Also returns the portals where
    /// this is not possible.
    ///
    /// # Errors
    /// Returns a [`WorkerError`].
    pub fn new(config: WorkerConfig) -> Result<(Self, Vec<Unserved>), WorkerError> {
        let WorkerConfig {
            index,
            now,
            env,
            pool,
            shared,
            devices,
            sockets,
            mut ring,
            mailbox,
            outbox,
            reports,
        } = config;
        let devices = Devices::new(devices).map_err(|source| WorkerError::Listen {
            portal: "a device".into(),
            source: source.into(),
        })?;
        let mut pool = Pool::new(pool).map_err(WorkerError::Memory)?;
        // For registered memory, the kernel only has to pin pages once and not for each direct
        // operation. This can fail because of a limit on locked memory, but we can continue without
        // it.
        if let Err(error) = ring.register_memory(pool.memory()) {
            tracing::warn!(%error, "cannot register data buffers with io_uring; continuing with \
                                    reduced performance");
        }
        let catalog = shared.registry.catalog();
        pool.set_units(catalog.live_units());
        let blocks = Blocks::new(&mut ring, now, &catalog).map_err(WorkerError::Memory)?;
        let group = PollGroup {
            index,
            env,
            shared,
            devices,
            ring,
            blocks,
            catalog,
            pool,
            spares: Spares::default(),
            outbox,
            reports,
            portals: Portals::new(index == 0),
            conns: Conns::default(),
            has_entered: false,
            past: Totals::default(),
            saver: Saver::default(),
            formats: Formats::default(),
            disconnects: Disconnects::default(),
            completions: Vec::with_capacity(CQ_BATCH),
            ring_completions: Vec::new(),
            slices: Vec::new(),
            chains: queue::Chains::default(),
            sockets: iscsi::Sockets::default(),
            iser: iser::Scratch::default(),
            logins: LoginLog::default(),
            now,
        };
        let mut worker = Self {
            group,
            mailbox,
            pool_line: Vec::new(),
            spinner: Spinner::new(SPIN),
            phase: Phase::Serving,
            exiting: false,
            parks: 0,
            began: now,
            busy: Duration::ZERO,
            complaints: RateLimit::default(),
        };
        let group = &mut worker.group;
        let PollGroup {
            portals,
            devices,
            catalog,
            ..
        } = &mut *group;
        // A portal without a device is a configuration error, so we fail here. If we can't listen
        // on a portal, for example because the port is in use, this is reported and we continue
        // with the other portals.
        portals.check_devices(devices, catalog)?;
        let mut unserved = Vec::new();
        for device in 0..devices.len() {
            unserved.extend(portals.serve_on(devices, device, catalog)?);
        }
        // Do this last, because it starts accepting connections, which would be closed by a later
        // error.
        group.sockets.add(&mut group.ring, now, sockets);
        Ok((worker, unserved))
    }

    /// Runs the worker until it receives a message to exit.
    ///
    /// # Errors
    /// Returns [`WorkerError::Ring`] if the ring has failed. The worker can't be used after this.
    pub fn run(&mut self) -> Result<(), WorkerError> {
        let mut now = Instant::now();
        while !self.exiting {
            let worked = self.step(now)?;
            self.park(worked)?;
            let next = Instant::now();
            // Don't count rounds without work. The worker is only polling before it sleeps, and
            // would otherwise look busy while idle.
            if worked > 0 {
                self.busy += next.saturating_duration_since(now);
            }
            now = next;
        }
        self.group.logins.audit.finish(now);
        Ok(())
    }

    /// Runs a single round at time `now` without sleeping. Returns the amount of work.
    ///
    /// # Errors
    /// Same as [`Worker::run`].
    pub fn step(&mut self, now: Instant) -> Result<usize, WorkerError> {
        self.group.now = now;
        self.group.blocks.begin_round(now);
        self.group.sockets.begin_round();
        // This order allows a new message to be processed in a single round: packets generate
        // completions, and completions generate block operations.
        let mut work = self.poll_devices();
        work += self.group.poll_ready();
        work += self.group.poll_blocks()?;
        // This is called after reaping the ring, because these connections are waiting for free
        // slots.
        self.poll_stalled();
        work += self.poll_mail();
        // We can't only do this before parking, because a busy worker never parks.
        self.group.outbox.retry();
        // This is called after all inputs of this round, so that a timeout is not reported if there
        // was new input.
        work += self.poll_timers();
        // This is called after everything that can release memory.
        work += self.poll_pool();
        self.group.sockets.accept(&mut self.group.ring, now);
        self.group.blocks.detach_unused(&mut self.group.ring);
        self.poll_returns();
        self.poll_unwanted();
        self.poll_phase();
        self.group.logins.audit.poll(now);
        work += self.group.devices.poll_registrations(now);
        // Send everything that was generated in this round instead of waiting for the next one.
        if work > 0 {
            for device in self.group.devices.open_mut() {
                work += device.progress(now);
            }
        }
        Ok(work)
    }

    /// Returns the time of the next timeout.
    fn deadline(&self) -> Option<Instant> {
        let timer = self.group.conns.next_timer();
        let phase = match self.phase {
            // All connections are closed at this time. Pending disk operations will send a
            // completion.
            Phase::Draining(until) | Phase::Stopping(until) => {
                Some(until + GRACE).filter(|at| *at > self.group.now)
            }
            Phase::Serving | Phase::Drained | Phase::Quiet => None,
        };
        let listening = self.group.portals.deadline();
        // There is no notification when a unit or device is no longer in use on this or any other
        // worker, so we have to check this periodically.
        let leaves = self.group.blocks.has_leaving() || self.group.devices.has_unwanted();
        let leaving = leaves.then(|| self.group.now + LEAVING);
        [
            self.group.sockets.deadline(),
            timer,
            leaving,
            self.group.devices.deadline(self.phase == Phase::Serving),
            listening.filter(|_| self.phase == Phase::Serving),
            self.group.disconnects.deadline(),
            phase,
            self.group.blocks.deadline(),
            self.group.logins.audit.deadline(),
        ]
        .into_iter()
        .flatten()
        .min()
    }
}

impl Drop for Worker {
    /// If the worker was not shut down before, this closes the devices first and then all channels.
    fn drop(&mut self) {
        // An active device could otherwise write to buffers that are returned to the pool by the
        // channels.
        self.group.devices.clear();
        for (_, conn) in self.group.conns.iter_mut() {
            conn.fabric.abandon(&mut self.group.pool);
        }
    }
}
