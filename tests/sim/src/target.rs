//! The target: workers on simulated rings, and what a schedule does for them.

use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

use fastrand::Rng;
use riser_reactor::simulated::{
    Disk, Kernel, Listener, Operation, OperationId, Outcome, SECTOR, Threads,
};
use riser_reactor::{Next, Ring, RingConfig, mailbox};
use riser_target::backend::{OpenedStores, Store};
use riser_target::config::Config;
use riser_target::host::{Host, SimulatedHost};
use riser_target::server::{Keepers, build_shared_on};
use riser_target::worker::mail::{MAILBOX, Outbox};
use riser_target::worker::{Env, Report, Shared, TcpListener, Worker, WorkerConfig};
use riser_transport::loopback::Fabric;

use crate::plan::Plan;

/// Name of the iSCSI target.
pub const IQN: &str = "iqn.2026-01.org.example:disk";

/// Memory of a worker for data. Little, so that commands wait for it.
const POOL: usize = 2 << 20;

/// Wait between rounds of a worker that polls.
const SPIN: Duration = Duration::from_micros(10);

/// Address of a worker's RDMA device.
#[must_use]
pub fn address(worker: usize) -> IpAddr {
    IpAddr::V4(Ipv4Addr::new(10, 0, 0, 1 + worker as u8))
}

/// Surroundings of a worker.
struct SimulatedEnv {
    random: Rng,
    host: Arc<dyn Host>,
}

impl Env for SimulatedEnv {
    fn fill_random(&mut self, out: &mut [u8]) {
        self.random.fill(out);
    }

    fn host(&self) -> Arc<dyn Host> {
        Arc::clone(&self.host)
    }
}

/// The state of the disks, as troubles have it.
#[derive(Clone, Copy, Debug, Default)]
pub struct DiskFaults {
    pub(crate) is_stalled: bool,
    pub(crate) failure: f64,
    pub(crate) short: f64,
}

/// One worker, and its ring from the kernel's side.
struct Member {
    worker: Worker,
    kernel: Kernel,
    /// Operations on disks, and when and how each ends.
    due: BTreeMap<OperationId, (Instant, Outcome)>,
    /// When the worker is given its next round, if nothing happens before.
    wakes: Option<Instant>,
    /// Kept open: what a worker reports is of no interest here.
    _reports: Receiver<Report>,
}

/// The target.
pub struct Target {
    members: Vec<Member>,
    threads: Threads,
    shared: Arc<Shared>,
    disk: Disk,
    pub(crate) faults: DiskFaults,
}

impl std::fmt::Debug for Target {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Target").finish_non_exhaustive()
    }
}

impl Target {
    /// Serves one disk by all protocols; returns the listeners of TCP as well.
    #[must_use]
    pub fn new(plan: &Plan, fabric: &Fabric, rng: &mut Rng) -> (Self, Vec<Listener>) {
        let portals = (0..plan.workers).map(|worker| {
            let at = address(worker);
            format!(
                "      - {{ protocol: srp, listen: \"{at}:5555\" }}\n      \
                 - {{ protocol: iser, listen: \"{at}:3260\" }}\n"
            )
        });
        let portals: String = portals.collect();
        let text = format!(
            "backends:\n  d: {{ kind: file, path: /in/memory, size: 16MiB, create: true, thin: true }}\n\
             targets:\n  - name: t\n    iqn: {IQN}\n    portals:\n{portals}      \
             - {{ protocol: iscsi, listen: \"10.0.1.1:3260\" }}\n    \
             luns: {{ 0: {{ backend: d }} }}\n    access: open\nworkers: {{ count: {} }}\n",
            plan.workers
        );
        let config = Config::parse(&text, "sim.yaml").expect("the configuration is right");
        let threads = Threads::default();
        let host: Arc<dyn Host> = Arc::new(SimulatedHost::new(threads.clone(), fabric.now()));
        let disk = Disk::new(0);
        let backend = &config.backends[0];
        let mut opened = OpenedStores::default();
        let store = Store::on_disk(&backend.spec, &disk, Arc::clone(&host));
        opened.insert(
            &backend.name,
            &backend.spec,
            store.expect("a disk in memory"),
        );
        let shared = build_shared_on(&config, Keepers::default(), opened);
        let shared = Arc::new(shared.expect("the configuration can be served"));

        let at = SocketAddr::new(IpAddr::V4(Ipv4Addr::new(10, 0, 1, 1)), 3260);
        let listeners: Vec<_> = (0..plan.workers).map(|_| Listener::new(at)).collect();
        let rings = (0..plan.workers).map(|_| Ring::simulated(RingConfig::default()));
        let rings: Vec<_> = rings.map(|ring| ring.expect("memory")).collect();
        let mailboxes = rings.iter().map(|(ring, _)| mailbox(MAILBOX, ring.waker()));
        let (senders, inboxes): (Vec<_>, Vec<_>) = mailboxes.unzip();
        let mut members = Vec::new();
        let parts = rings.into_iter().zip(inboxes).zip(&listeners);
        for (index, (((ring, kernel), inbox), listener)) in parts.enumerate() {
            let (reports, _reports) = channel();
            let env = SimulatedEnv {
                random: Rng::with_seed(rng.u64(..)),
                host: Arc::clone(&host),
            };
            // A worker has no device for the addresses of the others.
            let (worker, _unserved) = Worker::new(WorkerConfig {
                index: index as u16,
                now: fabric.now(),
                env: Box::new(env),
                pool: POOL,
                shared: Arc::clone(&shared),
                devices: vec![Box::new(fabric.endpoint(address(index)))],
                sockets: vec![TcpListener::simulated(listener)],
                ring,
                mailbox: inbox,
                outbox: Outbox::new(senders.clone()),
                reports,
            })
            .expect("a worker");
            members.push(Member {
                worker,
                kernel,
                due: BTreeMap::new(),
                wakes: None,
                _reports,
            });
        }
        let target = Self {
            members,
            threads,
            shared,
            disk,
            faults: DiskFaults::default(),
        };
        (target, listeners)
    }

    /// What is served.
    #[must_use]
    pub fn shared(&self) -> &Shared {
        &self.shared
    }

    /// The disk.
    #[must_use]
    pub fn disk(&self) -> &Disk {
        &self.disk
    }

    /// Returns the number of workers.
    #[must_use]
    pub fn workers(&self) -> usize {
        self.members.len()
    }

    /// A round of a worker, and of the kernel for it. Returns whether there was anything to do.
    pub fn turn(&mut self, index: usize, now: Instant, rng: &mut Rng) -> bool {
        let Self {
            members, faults, ..
        } = self;
        let member = &mut members[index];
        let worked = member.worker.step(now).expect("the ring works");
        let next = member.worker.park(worked).expect("the ring works");
        member.wakes = match next {
            Next::Poll => Some(now + SPIN),
            Next::Park(timeout) => timeout.map(|timeout| now + timeout),
        };
        let completed = member.complete(now, *faults, rng);
        worked > 0 || completed > 0
    }

    /// A job of one of the helper threads; returns whether there was one.
    pub fn turn_of_threads(&mut self, rng: &mut Rng) -> bool {
        let runnable = self.threads.runnable();
        if runnable.is_empty() {
            return false;
        }
        self.threads.step(runnable[rng.usize(..runnable.len())])
    }

    /// When the next thing happens by itself.
    #[must_use]
    pub fn next_deadline(&self) -> Option<Instant> {
        let wakes = self.members.iter().filter_map(|member| member.wakes);
        let members = self.members.iter().filter(|_| !self.faults.is_stalled);
        let due = members.flat_map(|member| member.due.values().map(|(at, _)| *at));
        wakes.chain(due).min()
    }
}

impl Member {
    /// Ends operations that are due, in an order that the seed chooses; returns their number.
    fn complete(&mut self, now: Instant, faults: DiskFaults, rng: &mut Rng) -> usize {
        let mut operations = self.kernel.operations();
        rng.shuffle(&mut operations);
        let mut completed = 0;
        for operation in operations {
            let outcome = match operation.disk() {
                None => operation.is_ready.then_some(Outcome::Whole),
                Some(_) if faults.is_stalled => None,
                Some(_) => self.outcome(&operation, now, faults, rng),
            };
            if let Some(outcome) = outcome {
                let ended = self.kernel.complete(operation.id, outcome);
                completed += usize::from(ended.is_some());
            }
        }
        completed
    }

    /// The end of an operation on a disk, if it is time.
    fn outcome(
        &mut self,
        operation: &Operation,
        now: Instant,
        faults: DiskFaults,
        rng: &mut Rng,
    ) -> Option<Outcome> {
        let (at, outcome) = *self.due.entry(operation.id).or_insert_with(|| {
            let most = [20, 200, 5_000][rng.usize(..3)];
            let time = Duration::from_micros(rng.u64(1..=most));
            let outcome = match () {
                () if rng.f64() < faults.failure => Outcome::Failed(libc::EIO),
                // Whole sectors, as with direct I/O.
                () if rng.f64() < faults.short && operation.len > SECTOR as usize => {
                    let sectors = operation.len / SECTOR as usize;
                    Outcome::Short(rng.usize(1..=sectors) * SECTOR as usize)
                }
                () => Outcome::Whole,
            };
            (now + time, outcome)
        });
        if at > now {
            return None;
        }
        self.due.remove(&operation.id);
        Some(outcome)
    }
}
