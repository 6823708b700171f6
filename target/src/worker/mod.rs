//! A worker: one thread, its devices, its ring, its channels.
//!
//! Everything that a worker works with belongs to it alone: the NIC's shard with its queue pairs,
//! the ring, the backend driver, the data buffers, the channels and their timers. Workers meet in
//! few places: logical units (shared, with their own locks), the [`sessions`](crate::sessions) at
//! login and logout, and [`mail::Mail`].
//!
//! # A round
//! ```text
//! devices: packets in, timers, packets out
//!   → connection events: logins, established, disconnected
//!   → completion queues that have something, a bounded batch of each
//! ring: finished block operations, readable descriptors
//! mailbox, timers, commands that wait for pool memory
//!   → poll again while there is work, else park: one system call waits for all of this
//! ```
//!
//! # Modules
//! - `blocks`: block operations and backends. `catalog`: follows what is served.
//! - `device`: [`Device`], a provider as a worker drives it, and those that a worker has.
//! - `portals`: where it listens on them, and what the next catalog takes is acquired before it is
//!   served. `listeners`: at their connection managers. `disconnects`: identifiers whose peer has
//!   not answered.
//! - `conns`: the connections of all fabrics, in one table. `fabrics`: the three kinds of them.
//! - `events`: completions, connection events and mail into connections.
//! - `exec`: carries out what connections ask for. `ends`: how they begin and end.
//! - `srp`: channels of SRP. `iscsi`: connections and sockets of iSCSI on TCP. `iser`: on RDMA.
//! - `gate`: who may log in by iSCSI. `login_log`: the lines and counts of logins. `listener`,
//!   `stream`: its sockets.
//! - `rdma`: what a connection has at its device. `queue`: posts on queue pairs.
//! - `work`: names of work requests and block operations. `env`: where random bytes, threads and
//!   dates come from.
//! - `reservations`: changes of reservations that are saved, or that abort commands.
//! - `discovery`: answers device-management MADs.
//! - `mail`: messages between workers.
//! - `park`: where a worker sleeps. `slots`: how its ring is shared.
//! - `removal`: devices that are taken away. `device_slots`: which are open,
//!   and how all workers close one together.
//! - `snapshot`: what a worker reports of itself.
//!
//! # Bounds
//! A completion queue gives at most [`CQ_BATCH`] completions per round, so one peer cannot keep the
//! others waiting. Channels, their memory and the pool are bounded by the configuration.

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
mod fabrics;
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
use login_log::LoginLog;
use mail::{Mail, Outbox};
use portals::{Portals, Unserved};
use snapshot::Totals;

/// Completions taken from one queue in a round.
pub const CQ_BATCH: usize = PollContext::Softirq.budget();

/// Time after the last work for which a worker goes on looking before it sleeps.
const SPIN: Duration = Duration::from_micros(50);

/// Time for which a connection's identifier outlives its channel, for the DREQ to be answered.
const LINGER: Duration = Duration::from_secs(5);

/// How long sessions get to finish and log out when what they use is no longer served, or the
/// server goes.
pub const PATIENCE: Duration = Duration::from_secs(5);

/// How often backends that are no longer served, and devices without portals, are looked at.
const LEAVING: Duration = Duration::from_millis(50);

/// Sessions get this long after a shutdown's patience has ended, then their connections are cut.
const GRACE: Duration = Duration::from_secs(2);

/// State that all workers share.
#[derive(Debug)]
pub struct Shared {
    /// Sessions, and what is served to them.
    pub registry: Registry,
    /// Sessions of iSCSI, over TCP and RDMA.
    pub iscsi: IscsiSessions,
    /// Slots of the devices that are open.
    pub device_slots: Arc<DeviceSlots>,
}

/// Report of a worker to the server.
#[derive(Debug)]
pub enum Report {
    /// It listens, but on these portals.
    Started(u16, Vec<Unserved>),
    /// It has no sessions any more, after a shutdown.
    Quiet(u16),
    /// The flush has ended: everything written is durable, or why not.
    Flushed(Result<(), String>),
    /// It is gone; with an error if it failed.
    Ended(u16, Option<String>),
}

/// Parts of a new worker.
pub struct WorkerConfig {
    /// Number of the worker; the first is 0.
    pub index: u16,
    /// Time at which it begins.
    pub now: Instant,
    /// Surroundings, such as the source of random bytes.
    pub env: Box<dyn Env>,
    /// Bytes of its data-buffer pool.
    pub pool: usize,
    /// State that all workers share.
    pub shared: Arc<Shared>,
    /// Its devices, by slot.
    pub devices: Vec<Opened>,
    /// Sockets of the TCP portals.
    pub sockets: Vec<TcpListener>,
    /// Ring, which belongs to the worker's thread.
    pub ring: Ring,
    /// Mailbox that other workers and the server write to.
    pub mailbox: MailReceiver<Mail>,
    /// Mailboxes of all workers, this one included.
    pub outbox: Outbox,
    /// Channel to the server.
    pub reports: Sender<Report>,
}

/// Reason for which a worker could not start or go on.
#[derive(Debug, thiserror::Error)]
pub enum WorkerError {
    /// No memory for buffers.
    #[error("cannot make the data buffers: {0}")]
    Memory(#[source] io::Error),
    /// The ring failed, and the worker with it.
    #[error(transparent)]
    Ring(#[from] RingError),
    /// A portal cannot be listened on.
    #[error("cannot listen on {portal}: {source}")]
    Listen {
        /// Portal or device, as text.
        portal: String,
        /// Error of the connection manager, or of the device.
        source: CmError,
    },
    /// No device has the portal's address.
    #[error("no device has the address of {0}")]
    NoDevice(String),
}

/// Progress of a shutdown.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    /// Accepts and serves connections.
    Serving,
    /// Sessions may finish until then.
    Stopping(Instant),
    /// Nothing is left; waits for the order to exit.
    Quiet,
}

/// One worker. Built and run on its own thread, since its ring belongs to that thread.
pub struct Worker {
    index: u16,
    env: Box<dyn Env>,
    shared: Arc<Shared>,
    devices: Devices,
    ring: Ring,
    /// Block operations, and the backends.
    blocks: Blocks,
    /// Catalog that this worker has followed last.
    catalog: Arc<Catalog>,
    pool: Pool,
    /// Contexts of commands that no connection has.
    spares: Spares,
    mailbox: MailReceiver<Mail>,
    outbox: Outbox,
    reports: Sender<Report>,
    /// Portals on devices, and what was acquired for the next catalog.
    portals: Portals,
    /// Connections of all fabrics.
    conns: Conns<Fabric>,
    /// A connection has entered a session, which may have units that this worker has not heard of.
    has_entered: bool,
    /// Sums over connections that are gone.
    past: Totals,
    /// Connections that [`Worker::poll_pool`] goes through.
    pool_line: Vec<ConnKey>,
    saver: reservations::Saver,
    /// Identifiers of connections whose channel is gone.
    disconnects: Disconnects,
    completions: Vec<Completion>,
    ring_completions: Vec<riser_reactor::Completion>,
    slices: Vec<MemSlice>,
    /// Chains of a connection that are posted together; empty between connections, and kept for its
    /// memory.
    chains: queue::Chains,
    spinner: Spinner,
    phase: Phase,
    /// Listening sockets of iSCSI.
    sockets: iscsi::Sockets,
    /// Lists for chains of iSER.
    iser: iser::Scratch,
    exiting: bool,
    /// Logins, and the audit log.
    logins: LoginLog,
    parks: u64,
    /// Time at which it began.
    began: Instant,
    /// Time that its rounds with something to do have taken.
    busy: Duration,
    complaints: RateLimit,
    now: Instant,
}

impl Worker {
    /// Sets a worker up on the calling thread, listening; the portals on which it cannot.
    ///
    /// # Errors
    /// [`WorkerError`].
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
        let pool = Pool::new(pool).map_err(WorkerError::Memory)?;
        // The kernel pins registered memory once, other memory with each direct operation. A limit
        // on locked memory may forbid it, which is no reason not to serve.
        if let Err(error) = ring.register_memory(pool.memory()) {
            tracing::warn!(%error, "data buffers are not registered with io_uring; it works, more slowly");
        }
        let catalog = shared.registry.catalog();
        let blocks = Blocks::new(&mut ring, now, &catalog).map_err(WorkerError::Memory)?;
        let mut worker = Self {
            index,
            env,
            shared,
            devices,
            ring,
            blocks,
            catalog,
            pool,
            spares: Spares::default(),
            mailbox,
            outbox,
            reports,
            portals: Portals::new(index == 0),
            conns: Conns::default(),
            has_entered: false,
            past: Totals::default(),
            pool_line: Vec::new(),
            saver: reservations::Saver::default(),
            disconnects: Disconnects::default(),
            completions: Vec::with_capacity(CQ_BATCH),
            ring_completions: Vec::new(),
            slices: Vec::new(),
            chains: queue::Chains::default(),
            spinner: Spinner::new(SPIN),
            phase: Phase::Serving,
            sockets: iscsi::Sockets::default(),
            iser: iser::Scratch::default(),
            exiting: false,
            logins: LoginLog::default(),
            parks: 0,
            began: now,
            busy: Duration::ZERO,
            complaints: RateLimit::default(),
            now,
        };
        let Self {
            portals,
            devices,
            catalog,
            ..
        } = &mut worker;
        // A portal without a device is a mistake of the configuration, so the start fails. One
        // that cannot be listened on, as when its port is taken, is reported, and the others are
        // served.
        portals.check_devices(devices, catalog)?;
        let mut unserved = Vec::new();
        for device in 0..devices.len() {
            unserved.extend(portals.serve_on(devices, device, catalog)?);
        }
        // Last: from here on connections are accepted, which an error of a later step would cut.
        worker.sockets.add(&mut worker.ring, now, sockets);
        Ok((worker, unserved))
    }

    /// Serves until it gets the order to exit.
    ///
    /// # Errors
    /// [`WorkerError::Ring`]: the ring is of no further use, and the worker neither.
    pub fn run(&mut self) -> Result<(), WorkerError> {
        let mut now = Instant::now();
        while !self.exiting {
            let worked = self.step(now)?;
            self.park(worked)?;
            let next = Instant::now();
            // Rounds without work are the spinning before a sleep; counted, they would make an
            // idle worker look busy.
            if worked > 0 {
                self.busy += next.saturating_duration_since(now);
            }
            now = next;
        }
        self.logins.audit.finish(now);
        Ok(())
    }

    /// One round at `now`, without sleeping; how much there was to do.
    ///
    /// # Errors
    /// As [`Worker::run`].
    pub fn step(&mut self, now: Instant) -> Result<usize, WorkerError> {
        self.now = now;
        self.blocks.begin_round(now);
        self.sockets.begin_round();
        // In this order a message that has just arrived is carried out in the same round: packets
        // make completions, completions make block operations.
        let mut work = self.poll_devices();
        work += self.poll_ready();
        work += self.poll_blocks()?;
        // After the ring was reaped, which frees the slots that these connections wait for.
        self.poll_stalled();
        work += self.poll_mail();
        // Here and not before a park only: a worker that is never idle never parks.
        self.outbox.retry();
        // After the inputs of the round: a silence that one of them has ended is not taken for
        // one.
        work += self.poll_timers();
        // After everything in the round that may have given memory back.
        work += self.poll_pool();
        self.sockets.accept(&mut self.ring, now);
        self.blocks.detach_unused();
        self.poll_returns();
        self.poll_unwanted();
        self.poll_phase();
        self.logins.audit.poll(now);
        // What this round asked for goes out now rather than in the next one.
        if work > 0 {
            for device in self.devices.open_mut() {
                work += device.progress(now);
            }
        }
        Ok(work)
    }

    /// Returns the time at which something is due without anything happening.
    fn deadline(&self) -> Option<Instant> {
        let timer = self.conns.next_timer();
        let phase = match self.phase {
            // Connections are cut once then. What is at a disk reports its end.
            Phase::Stopping(until) => Some(until + GRACE).filter(|at| *at > self.now),
            Phase::Serving | Phase::Quiet => None,
        };
        let listening = self.portals.deadline();
        // Nothing signals that the last holder of a unit or a device is gone, on this worker or
        // another, so it is looked at again and again while there is one.
        let leaves = self.blocks.has_leaving() || self.devices.has_unwanted();
        let leaving = leaves.then(|| self.now + LEAVING);
        [
            self.sockets.deadline(),
            timer,
            leaving,
            self.devices.deadline(self.phase == Phase::Serving),
            listening.filter(|_| self.phase == Phase::Serving),
            self.disconnects.deadline(),
            phase,
            self.blocks.deadline(),
            self.logins.audit.deadline(),
        ]
        .into_iter()
        .flatten()
        .min()
    }
}

impl Drop for Worker {
    /// Without a shutdown before, connections are cut: the devices go first, then the channels.
    fn drop(&mut self) {
        // A device that still runs could write into buffers that the channels give back to the
        // pool.
        self.devices.clear();
        for (_, conn) in self.conns.iter_mut() {
            conn.fabric.abandon(&mut self.pool);
        }
    }
}
