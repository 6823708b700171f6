//! The target: workers on simulated rings, and what a schedule does for them. Its process, or its
//! host, may go and come back.

use std::collections::BTreeMap;
use std::io;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::sync::mpsc::{Receiver, channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use fastrand::Rng;
use riser_reactor::simulated::{
    Disk, Kernel, Listener, Operation, OperationId, Outcome, SECTOR, Threads,
};
use riser_reactor::{MailSender, Next, Ring, RingConfig, Waker, mailbox};
use riser_scsi::config::Identity;
use riser_scsi::srp::TargetPortId;
use riser_target::backend::{FlushFailure, FlushKeeper, OpenedStores, Store};
use riser_target::config::Config;
use riser_target::host::{Host, SimulatedHost};
use riser_target::server::{Keepers, build_shared_on};
use riser_target::worker::mail::{MAILBOX, Mail, Outbox, Snapshot};
use riser_target::worker::{Device, Env, Report, Shared, TcpListener, Worker, WorkerConfig};
use riser_tests::history::History;
use riser_transport::loopback::Fabric;
use riser_transport::roce::nic::NicUsage;
use riser_transport::verbs::Mtu;

use crate::disks::DiskFaults;
use crate::keeper::KeptReservations;
use crate::plan::Plan;
use crate::{cheat, initiator};

/// Name of the iSCSI target.
pub const IQN: &str = "iqn.2026-01.org.example:disk";

/// Serial number of the disk.
const SERIAL: &str = "D";

/// Wait between rounds of a worker that polls.
const SPIN: Duration = Duration::from_micros(10);

/// Address of the RDMA device.
pub const ADDRESS: IpAddr = rdma_address(0);

/// Address of the RDMA device of a path.
#[must_use]
pub const fn rdma_address(path: usize) -> IpAddr {
    IpAddr::V4(Ipv4Addr::new(10, 0, 0, 1 + path as u8))
}

/// Where TCP connections of a path go.
#[must_use]
pub const fn tcp_address(path: usize) -> SocketAddr {
    SocketAddr::new(IpAddr::V4(Ipv4Addr::new(10, 0, 1, 1 + path as u8)), 3260)
}

/// Keeps failures of flushes, as files of the state directory do.
#[derive(Clone, Debug, Default)]
struct Failures(Arc<Mutex<BTreeMap<String, FlushFailure>>>);

impl Failures {
    fn lock(&self) -> MutexGuard<'_, BTreeMap<String, FlushFailure>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether there is one of the disk.
    fn has(&self) -> bool {
        self.lock().contains_key(SERIAL)
    }
}

impl FlushKeeper for Failures {
    fn load(&self, unit: &Identity) -> io::Result<Option<FlushFailure>> {
        Ok(self.lock().get(&unit.serial).copied())
    }

    fn save(&self, unit: &Identity, failure: Option<&FlushFailure>) -> io::Result<()> {
        let mut all = self.lock();
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

/// One worker, and its ring from the kernel's side.
struct Member {
    worker: Worker,
    kernel: Kernel,
    /// Operations on disks, and when and how each ends.
    due: BTreeMap<OperationId, (Instant, Outcome)>,
    /// When the worker is given its next round, if nothing happens before.
    wakes: Option<Instant>,
    waker: Waker,
    /// It sleeps, and is given none before something wakes it.
    is_parked: bool,
    /// Kept open: what a worker reports is of no interest here.
    _reports: Receiver<Report>,
}

/// The target: what stays, and the process while there is one.
pub struct Target {
    config: Config,
    fabric: Fabric,
    paths: usize,
    start: Instant,
    mtu: Mtu,
    pool: usize,
    ring: u32,
    disk: Disk,
    /// Those of units that one initiator sees each.
    private: Vec<Disk>,
    /// That of the unit of cheating peers.
    cheats: Disk,
    failures: Failures,
    /// The process has the report of a failed write-back of the disk, and has not kept it yet.
    is_heard: bool,
    reservations: KeptReservations,
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
        let (backends, luns, access) = private_units(plan);
        let portals = |path| {
            let (rdma, tcp) = (rdma_address(path), tcp_address(path));
            format!(
                "      - {{ protocol: srp, listen: \"{rdma}:5555\" }}\n      \
                 - {{ protocol: iser, listen: \"{rdma}:3260\" }}\n      \
                 - {{ protocol: iscsi, listen: \"{tcp}\" }}\n"
            )
        };
        let portals: String = (0..plan.paths).map(portals).collect();
        let (cheats, more) = cheats(plan);
        let text = format!(
            "identity: simulated\n\
             backends:\n  d: {{ kind: file, path: /in/memory, size: 16MiB, create: true, thin: true, serial: {SERIAL}, write_cache: {} }}\n{backends}{cheats}\
             targets:\n  - name: t\n    iqn: {IQN}\n    portals:\n{portals}    \
             luns: {{ 0: {{ backend: d }}{luns} }}\n    access: {access}\n{more}workers: {{ count: {} }}\n\
             limits: {{ connections_per_session: {} }}\n",
            if plan.write_cache { "on" } else { "off" },
            plan.workers,
            plan.connections
        );
        let private = plan.initiators.iter().filter(|_| plan.private_units);
        let private = private
            .enumerate()
            .map(|(index, _)| Disk::new(1 + index as u64));
        let mut target = Self {
            config: Config::parse(&text, "sim.yaml").expect("the configuration is right"),
            fabric: fabric.clone(),
            paths: plan.paths,
            start: fabric.now(),
            mtu: plan.mtus[0],
            pool: plan.pool,
            ring: plan.ring,
            disk: Disk::new(0),
            private: private.collect(),
            cheats: Disk::new(0),
            failures: Failures::default(),
            is_heard: false,
            reservations: KeptReservations::default(),
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
        let disks = std::iter::once(&self.disk).chain(&self.private);
        let disks = disks.chain([&self.cheats]);
        let mut opened = OpenedStores::default();
        for (backend, disk) in self.config.backends.iter().zip(disks) {
            let store = Store::on_disk(&backend.spec, disk, Arc::clone(&host));
            opened.insert(&backend.name, &backend.spec, store);
        }
        let keepers = Keepers {
            flushes: Some(Arc::new(self.failures.clone())),
            reservations: Some(Arc::new(self.reservations.clone())),
            ..Keepers::default()
        };
        let shared = build_shared_on(&self.config, keepers, opened);
        let shared = Arc::new(shared.expect("the configuration can be served"));

        let at_paths = |_| (0..self.paths).map(|path| Listener::new(tcp_address(path)));
        let listeners: Vec<Vec<_>> = (0..workers).map(|w| at_paths(w).collect()).collect();
        let ring = RingConfig {
            capacity: self.ring,
            ..RingConfig::default()
        };
        let rings = (0..workers).map(|_| Ring::simulated(ring));
        let rings: Vec<_> = rings.map(|ring| ring.expect("memory")).collect();
        let mailboxes = rings.iter().map(|(ring, _)| mailbox(MAILBOX, ring.waker()));
        let (senders, inboxes): (Vec<_>, Vec<_>) = mailboxes.unzip();
        let parts = rings.into_iter().zip(inboxes).zip(&listeners);
        let bits = workers.ilog2() as u8;
        for (index, (((ring, kernel), inbox), listeners)) in parts.enumerate() {
            let waker = ring.waker();
            let (reports, _reports) = channel();
            let env = SimulatedEnv {
                random: self.rng.fork(),
                host: Arc::clone(&host),
            };
            let devices = (0..self.paths).map(|path| {
                let mut device = fabric.endpoint_of(rdma_address(path), index as u32, bits);
                device.set_mtu(self.mtu);
                Box::new(device) as Box<dyn Device>
            });
            let (worker, unserved) = Worker::new(WorkerConfig {
                index: index as u16,
                now: fabric.now(),
                env: Box::new(env),
                pool: self.pool,
                shared: Arc::clone(&shared),
                devices: devices.collect(),
                sockets: listeners.iter().map(TcpListener::simulated).collect(),
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
                waker,
                is_parked: false,
                _reports,
            });
        }
        self.mail = senders;
        self.shared = Some(shared);
        listeners.into_iter().flatten().collect()
    }

    /// Ends the process without a word. What it had at its disk may be done, in part or not at all.
    pub fn crash(&mut self, history: &History) {
        let was_unseen = self.disk.has_unseen_error();
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
        self.hear(was_unseen);
        // The disk reports a lost write-back once. What a process had not kept of it is lost with
        // the process.
        if std::mem::take(&mut self.is_heard) {
            self.end_loss(history);
            history.forgive_losses();
        }
        self.members.clear();
        self.mail.clear();
        self.shared = None;
        self.threads = Threads::default();
    }

    /// Notes that the disk has reported a failed write-back since the last look, or that the process
    /// has kept that.
    fn hear(&mut self, was_unseen: bool) {
        self.is_heard |= was_unseen && !self.disk.has_unseen_error();
        self.is_heard &= !self.failures.has();
    }

    /// A part of what is in the disk's cache cannot be written back. The disk reports that once, and
    /// takes the cache for clean. So the target must remember it: until its administrator knows, no
    /// flush may succeed.
    pub fn begin_loss(&mut self, share: f64) {
        let rng = &mut self.rng;
        let errno = [libc::EIO, libc::EIO, libc::ENOSPC][rng.usize(..3)];
        self.disk.fail_write_back(errno, |_| rng.f64() < share);
    }

    /// What could not be written back goes from the cache as well.
    pub fn end_loss(&mut self, history: &History) {
        history.lose_write_back(self.disk.drop_cache());
    }

    /// The host loses its power: what was not flushed may be lost, sector by sector.
    pub fn cut_power(&mut self, history: &History) {
        self.crash(history);
        self.boots += 1;
        let rng = &mut self.rng;
        // Whole caches are lost as well as single sectors.
        let share = [0.0, 0.5, 1.0][rng.usize(..3)];
        for disk in std::iter::once(&self.disk).chain(&self.private) {
            disk.crash(|_, versions| match rng.f64() < share {
                true => rng.usize(..=versions),
                false => 0,
            });
        }
    }

    /// Whether there is a process.
    #[must_use]
    pub fn is_running(&self) -> bool {
        !self.members.is_empty()
    }

    /// The administrator looks at a failed flush, and at what it has lost, if there is one.
    pub fn clear_failures(&mut self, history: &History) {
        self.end_loss(history);
        let mut is_forgiven = false;
        if !self.is_running() {
            is_forgiven = self.failures.has();
            self.failures.lock().clear();
        }
        let catalog = self.shared.as_ref().map(|shared| shared.registry.catalog());
        let stores = catalog.iter().flat_map(|catalog| &catalog.stores);
        for (at, store) in stores.enumerate() {
            let cleared = store.as_ref().and_then(|store| store.clear_flush_failure());
            is_forgiven |= at == 0 && cleared.is_some();
        }
        if is_forgiven {
            self.is_heard = false;
            history.forgive_losses();
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

    /// What is still held for sessions that are over: the difference between the reports of all
    /// workers and those taken before any session.
    #[must_use]
    pub fn leftovers(&self, snapshots: &[Snapshot], fresh: &[Snapshot]) -> Vec<String> {
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
            let closed = one.devices.iter().filter(|device| !device.is_open).count();
            check(of("devices that were not opened again"), closed);
            for (addr, usage) in usages(one) {
                let all = fresh.iter().filter(|other| other.worker == one.worker);
                let mut all = all.flat_map(usages);
                let own = all.find(|(other, _)| *other == addr).unwrap_or_default();
                for (now, then, what) in [
                    (usage.qps, own.1.qps, "queue pairs"),
                    (usage.cqs, own.1.cqs, "completion queues"),
                    (usage.mrs, own.1.mrs, "memory regions"),
                    (usage.pds, own.1.pds, "protection domains"),
                ] {
                    check(of(what), now.saturating_sub(then));
                }
            }
        }
        for (index, member) in self.members.iter().enumerate() {
            let operations = member.kernel.operations();
            let at_disk = operations.iter().filter(|o| o.disk().is_some()).count();
            check(format!("operations of worker {index} at a disk"), at_disk);
        }
        found
    }

    /// The SRP port of cheating peers, if there are some.
    #[must_use]
    pub fn port_of_cheats(&self) -> Option<TargetPortId> {
        let catalog = self.shared.as_ref()?.registry.catalog();
        Some(catalog.targets.get(1)?.portals[0].target_port())
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

    /// Wakes all workers: a device was removed or added.
    pub fn wake(&mut self) {
        for member in &mut self.members {
            member.is_parked = false;
        }
    }

    /// A round of a worker, and of the kernel for it. Returns whether there was anything to do.
    pub fn turn(&mut self, index: usize, now: Instant, rng: &mut Rng) -> bool {
        let Some(member) = self.members.get_mut(index) else {
            return false;
        };
        let arrival = self.fabric.next_arrival();
        let mut worked = 0;
        // As in a thread of its own, where it sleeps until its ring, a packet or its time wakes it.
        if !member.is_parked
            || member.waker.is_pending()
            || member.kernel.has_completions()
            || arrival.into_iter().chain(member.wakes).any(|at| at <= now)
        {
            worked = member.worker.step(now).expect("the ring works");
            let next = member.worker.park(worked).expect("the ring works");
            member.is_parked = matches!(next, Next::Park(_));
            member.wakes = match next {
                Next::Poll => Some(now + SPIN),
                Next::Park(timeout) => timeout.map(|timeout| now + timeout),
            };
        }
        let was_unseen = self.disk.has_unseen_error();
        let completed = member.complete(now, &mut self.faults, rng);
        self.hear(was_unseen);
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

/// Objects of the RDMA devices that work, by address.
fn usages(of: &Snapshot) -> impl Iterator<Item = (Option<IpAddr>, NicUsage)> {
    let open = of.devices.iter().filter(|device| device.is_open);
    open.filter_map(|device| Some((Some(device.addr), device.nic?.usage)))
}

/// The backend of cheating peers, and their target.
fn cheats(plan: &Plan) -> (String, String) {
    if plan.cheats.is_empty() {
        return (String::new(), String::new());
    }
    let (rdma, tcp) = (rdma_address(0), tcp_address(0));
    let backend = "  c: { kind: file, path: /in/memory/c, size: 1MiB, create: true, thin: true }\n";
    let target = format!(
        "  - name: c\n    iqn: {}\n    portals:\n      \
         - {{ protocol: srp, listen: \"{rdma}:{}\" }}\n      \
         - {{ protocol: iser, listen: \"{rdma}:3260\" }}\n      \
         - {{ protocol: iscsi, listen: \"{tcp}\" }}\n    \
         luns: {{ 0: {{ backend: c }} }}\n    access: open\n",
        cheat::IQN,
        cheat::SRP_PORT
    );
    (backend.to_owned(), target)
}

/// The backends of units that one initiator sees each, as number 1, their numbers in the target, and
/// the rules of access.
fn private_units(plan: &Plan) -> (String, String, String) {
    if !plan.private_units {
        return (String::new(), String::new(), "open".to_owned());
    }
    let (mut backends, mut luns, mut rules) = (String::new(), String::new(), String::from("["));
    for index in 0..plan.initiators.len() {
        let lun = index + 10;
        backends += &format!(
            "  p{index}: {{ kind: file, path: /in/memory/{index}, size: 1MiB, create: true, thin: true, write_cache: off }}\n"
        );
        luns += &format!(", {lun}: {{ backend: p{index} }}");
        for moves in 0..initiator::ADDRESSES {
            let address = initiator::address_after(index, moves as u8);
            rules += &format!("{{ address: {address}, luns: {{ 0: d, 1: p{index} }} }}, ");
        }
    }
    let others = "{ address: 10.0.0.0/8, luns: { 0: d } }]";
    (backends, luns, rules + others)
}

impl Member {
    /// Ends operations that are due, in an order that the seed chooses; returns their number.
    fn complete(&mut self, now: Instant, faults: &mut DiskFaults, rng: &mut Rng) -> usize {
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
        faults: &mut DiskFaults,
        rng: &mut Rng,
    ) -> Option<Outcome> {
        let (at, outcome) = *self.due.entry(operation.id).or_insert_with(|| {
            let most = [20, 200, 5_000][rng.usize(..3)];
            let time = Duration::from_micros(rng.u64(1..=most));
            (now + time, faults.outcome(operation, rng))
        });
        if at > now {
            return None;
        }
        self.due.remove(&operation.id);
        Some(faults.with_room(operation, outcome))
    }
}
