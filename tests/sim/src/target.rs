//! The target: workers on simulated rings, and what a schedule does for them. Its process, or its
//! host, may go and come back.

use std::collections::BTreeMap;
use std::io;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::sync::mpsc::{Receiver, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use fastrand::Rng;
use riser_reactor::simulated::{
    Disk, Kernel, Listener, Operation, OperationId, Outcome, SECTOR, Threads,
};
use riser_reactor::{MailSender, Next, Ring, RingConfig, mailbox};
use riser_scsi::config::Identity;
use riser_target::backend::{FlushFailure, FlushKeeper, OpenedStores, Store};
use riser_target::config::Config;
use riser_target::host::{Host, SimulatedHost};
use riser_target::server::{Keepers, build_shared_on};
use riser_target::worker::mail::{MAILBOX, Mail, Outbox, Snapshot};
use riser_target::worker::{Env, Report, Shared, TcpListener, Worker, WorkerConfig};
use riser_transport::loopback::Fabric;
use riser_transport::verbs::Mtu;

use crate::plan::Plan;

/// Name of the iSCSI target.
pub const IQN: &str = "iqn.2026-01.org.example:disk";

/// Memory of a worker for data. Little, so that commands wait for it.
const POOL: usize = 2 << 20;

/// Wait between rounds of a worker that polls.
const SPIN: Duration = Duration::from_micros(10);

/// Address of the RDMA device.
pub const ADDRESS: IpAddr = IpAddr::V4(Ipv4Addr::new(10, 0, 0, 1));

/// Where TCP connections go.
const TCP: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::new(10, 0, 1, 1)), 3260);

/// Keeps failures of flushes, as files of the state directory do.
#[derive(Clone, Debug, Default)]
struct Failures(Arc<Mutex<BTreeMap<String, FlushFailure>>>);

impl FlushKeeper for Failures {
    fn load(&self, unit: &Identity) -> io::Result<Option<FlushFailure>> {
        let all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        Ok(all.get(&unit.serial).copied())
    }

    fn save(&self, unit: &Identity, failure: Option<&FlushFailure>) -> io::Result<()> {
        let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        match failure {
            Some(failure) => all.insert(unit.serial.clone(), *failure),
            None => all.remove(&unit.serial),
        };
        Ok(())
    }
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

/// The target: what stays, and the process while there is one.
pub struct Target {
    config: Config,
    fabric: Fabric,
    start: Instant,
    mtu: Mtu,
    disk: Disk,
    failures: Failures,
    /// Times that the host was started.
    boots: u64,
    rng: Rng,
    members: Vec<Member>,
    mail: Vec<MailSender<Mail>>,
    threads: Threads,
    shared: Option<Arc<Shared>>,
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
        let text = format!(
            "identity: simulated\n\
             backends:\n  d: {{ kind: file, path: /in/memory, size: 16MiB, create: true, thin: true, write_cache: {} }}\n\
             targets:\n  - name: t\n    iqn: {IQN}\n    portals:\n      \
             - {{ protocol: srp, listen: \"{ADDRESS}:5555\" }}\n      \
             - {{ protocol: iser, listen: \"{ADDRESS}:3260\" }}\n      \
             - {{ protocol: iscsi, listen: \"{TCP}\" }}\n    \
             luns: {{ 0: {{ backend: d }} }}\n    access: open\nworkers: {{ count: {} }}\n",
            if plan.write_cache { "on" } else { "off" },
            plan.workers
        );
        let mut target = Self {
            config: Config::parse(&text, "sim.yaml").expect("the configuration is right"),
            fabric: fabric.clone(),
            start: fabric.now(),
            mtu: plan.mtus[0],
            disk: Disk::new(0),
            failures: Failures::default(),
            boots: 1,
            rng: rng.fork(),
            members: Vec::new(),
            mail: Vec::new(),
            threads: Threads::default(),
            shared: None,
            faults: DiskFaults::default(),
        };
        let listeners = target.start(plan.workers);
        (target, listeners)
    }

    /// Starts the process; returns the listeners of TCP.
    pub fn start(&mut self, workers: usize) -> Vec<Listener> {
        let fabric = &self.fabric;
        let host = SimulatedHost::new(self.threads.clone(), self.start).with_boot(self.boots);
        let host: Arc<dyn Host> = Arc::new(host);
        let backend = &self.config.backends[0];
        let mut opened = OpenedStores::default();
        let store = Store::on_disk(&backend.spec, &self.disk, Arc::clone(&host));
        opened.insert(
            &backend.name,
            &backend.spec,
            store.expect("a disk in memory"),
        );
        let keepers = Keepers {
            flushes: Some(Arc::new(self.failures.clone())),
            ..Keepers::default()
        };
        let shared = build_shared_on(&self.config, keepers, opened);
        let shared = Arc::new(shared.expect("the configuration can be served"));

        let listeners: Vec<_> = (0..workers).map(|_| Listener::new(TCP)).collect();
        let rings = (0..workers).map(|_| Ring::simulated(RingConfig::default()));
        let rings: Vec<_> = rings.map(|ring| ring.expect("memory")).collect();
        let mailboxes = rings.iter().map(|(ring, _)| mailbox(MAILBOX, ring.waker()));
        let (senders, inboxes): (Vec<_>, Vec<_>) = mailboxes.unzip();
        let parts = rings.into_iter().zip(inboxes).zip(&listeners);
        let bits = workers.ilog2() as u8;
        for (index, (((ring, kernel), inbox), listener)) in parts.enumerate() {
            let (reports, _reports) = channel();
            let env = SimulatedEnv {
                random: self.rng.fork(),
                host: Arc::clone(&host),
            };
            let mut device = fabric.endpoint_of(ADDRESS, index as u32, bits);
            device.set_mtu(self.mtu);
            let (worker, unserved) = Worker::new(WorkerConfig {
                index: index as u16,
                now: fabric.now(),
                env: Box::new(env),
                pool: POOL,
                shared: Arc::clone(&shared),
                devices: vec![Box::new(device)],
                sockets: vec![TcpListener::simulated(listener)],
                ring,
                mailbox: inbox,
                outbox: Outbox::new(senders.clone()),
                reports,
            })
            .expect("a worker");
            assert_eq!(unserved, [], "all portals are free");
            self.members.push(Member {
                worker,
                kernel,
                due: BTreeMap::new(),
                wakes: None,
                _reports,
            });
        }
        self.mail = senders;
        self.shared = Some(shared);
        listeners
    }

    /// Ends the process without a word. What it had at its disk may be done, in part or not at all.
    pub fn crash(&mut self) {
        for member in &self.members {
            let mut operations = member.kernel.operations();
            operations.retain(|operation| operation.disk().is_some());
            self.rng.shuffle(&mut operations);
            for operation in operations {
                let sectors = operation.len / SECTOR as usize;
                let outcome = match self.rng.u8(..3) {
                    0 => continue,
                    1 if sectors > 0 => {
                        Outcome::Short(self.rng.usize(..=sectors) * SECTOR as usize)
                    }
                    _ => Outcome::Whole,
                };
                member.kernel.complete(operation.id, outcome);
            }
        }
        self.members.clear();
        self.mail.clear();
        self.shared = None;
        self.threads = Threads::default();
    }

    /// The host loses its power: what was not flushed may be lost, sector by sector.
    pub fn cut_power(&mut self) {
        self.crash();
        self.boots += 1;
        let rng = &mut self.rng;
        // Whole caches are lost as well as single sectors.
        let share = [0.0, 0.5, 1.0][rng.usize(..3)];
        self.disk.crash(|_, versions| match rng.f64() < share {
            true => rng.usize(..=versions),
            false => 0,
        });
    }

    /// Whether there is a process.
    #[must_use]
    pub fn is_running(&self) -> bool {
        !self.members.is_empty()
    }

    /// The administrator has looked at a failed flush.
    pub fn clear_failures(&self) {
        let catalog = self.shared.as_ref().map(|shared| shared.registry.catalog());
        let Some(catalog) = catalog else {
            self.failures
                .0
                .lock()
                .unwrap_or_else(PoisonError::into_inner)
                .clear();
            return;
        };
        for store in catalog.stores.iter().flatten() {
            store.clear_flush_failure();
        }
    }

    /// Asks all workers for reports, which come with their next rounds.
    #[must_use]
    pub fn ask(&self) -> Receiver<Snapshot> {
        let (answers, snapshots) = channel();
        for mail in &self.mail {
            let _ = mail.send(Mail::Snapshot(answers.clone()));
        }
        snapshots
    }

    /// What is still held for sessions that are over, from the reports of all workers.
    #[must_use]
    pub fn leftovers(&self, snapshots: &[Snapshot]) -> Vec<String> {
        let mut found = Vec::new();
        let mut check = |what: String, count: usize| {
            if count > 0 {
                found.push(format!("{count} {what}"));
            }
        };
        if let Some(shared) = &self.shared {
            check("sessions of SRP".into(), shared.registry.sessions());
            check("unconfirmed logins".into(), shared.registry.unconfirmed());
        }
        for one in snapshots {
            let of = |what: &str| format!("{what} of worker {}", one.worker);
            check(of("channels of SRP"), one.sessions.len());
            check(of("connections of iSCSI"), one.iscsi_sessions.len());
            let used = one.pool_size - one.pool_free;
            check(of("bytes of the pool"), used);
        }
        for (index, member) in self.members.iter().enumerate() {
            let operations = member.kernel.operations();
            let at_disk = operations.iter().filter(|o| o.disk().is_some()).count();
            check(format!("operations of worker {index} at a disk"), at_disk);
        }
        found
    }

    /// What is served.
    #[must_use]
    pub fn shared(&self) -> Option<&Shared> {
        self.shared.as_deref()
    }

    /// The disk.
    #[must_use]
    pub fn disk(&self) -> &Disk {
        &self.disk
    }

    /// A round of a worker, and of the kernel for it. Returns whether there was anything to do.
    pub fn turn(&mut self, index: usize, now: Instant, rng: &mut Rng) -> bool {
        let Self {
            members, faults, ..
        } = self;
        let Some(member) = members.get_mut(index) else {
            return false;
        };
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
