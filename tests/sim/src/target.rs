//! The target: workers on simulated rings, driven by the schedule. Its process or host may be
//! stopped and started again.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

use fastrand::Rng;
use riser_reactor::simulated::{Disk, Kernel, Operation, OperationId, Outcome, SECTOR, Threads};
use riser_reactor::{MailSender, Next, Op, Waker};
use riser_scsi::config::Identity;
use riser_scsi::srp::TargetPortId;
use riser_target::backend::{FlushFailure, FlushKeeper, Layout as Frames, Store};
use riser_target::config::Config;
use riser_target::host::Host;
use riser_target::server::Server;
use riser_target::server::handover::ServerState;
use riser_target::worker::mail::{Mail, Snapshot};
use riser_target::worker::{Announced, Env, Report, Shared, Worker};
use riser_tests::history::{BLOCK, History, Version};
use riser_transport::loopback::Fabric;
use riser_transport::nic::NicUsage;

use crate::admin::Layout;
use crate::disks::DiskFaults;
use crate::hog;
use crate::keeper::{SavedState, Saves};
use crate::memory;
use crate::plan::Plan;
use crate::process::{Ending, Ground, Job};
use crate::tcp::Listeners;

/// Name of the iSCSI target.
pub const IQN: &str = "iqn.2026-01.org.example:disk";

/// Serial number of the disk.
pub(crate) const SERIAL: &str = "D";

/// Maximum number of timers that may remain in a worker without connections.
const TIMERS: usize = 64;

/// Maximum number of sessions, which is never reached.
pub(crate) const SESSIONS: u32 = 64;

/// Delay between iterations of a polling worker.
const SPIN: Duration = Duration::from_micros(10);

/// Address of the RDMA device.
pub const ADDRESS: IpAddr = rdma_address(0);

/// Returns the address of the RDMA device on a path.
#[must_use]
pub const fn rdma_address(path: usize) -> IpAddr {
    IpAddr::V4(Ipv4Addr::new(10, 0, 0, 1 + path as u8))
}

/// Returns the address for TCP connections on a path.
#[must_use]
pub const fn tcp_address(path: usize) -> SocketAddr {
    SocketAddr::new(IpAddr::V4(Ipv4Addr::new(10, 0, 1, 1 + path as u8)), 3260)
}

/// Keeps flush failures, like the files in the state directory.
#[derive(Clone, Debug, Default)]
pub(crate) struct Failures {
    all: Arc<Mutex<BTreeMap<String, FlushFailure>>>,
    saves: Saves,
}

impl Failures {
    fn lock(&self) -> MutexGuard<'_, BTreeMap<String, FlushFailure>> {
        self.all.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns whether there is a failure of the shared disk.
    fn has(&self) -> bool {
        self.lock().contains_key(SERIAL)
    }
}

impl FlushKeeper for Failures {
    fn load(&self, unit: &Identity) -> io::Result<Option<FlushFailure>> {
        Ok(self.lock().get(&unit.serial).copied())
    }

    fn save(&self, unit: &Identity, failure: Option<&FlushFailure>) -> io::Result<()> {
        self.saves.save(|| {
            let mut all = self.lock();
            match failure {
                Some(failure) => all.insert(unit.serial.clone(), *failure),
                None => all.remove(&unit.serial),
            };
        })
    }
}

/// Environment of a worker.
pub(crate) struct SimulatedEnv {
    pub(crate) random: Rng,
    pub(crate) host: Arc<dyn Host>,
}

impl Env for SimulatedEnv {
    fn fill_random(&mut self, out: &mut [u8]) {
        self.random.fill(out);
    }

    fn host(&self) -> Arc<dyn Host> {
        Arc::clone(&self.host)
    }
}

/// A worker, and the kernel side of its ring.
pub(crate) struct Member {
    pub(crate) worker: Worker,
    pub(crate) kernel: Kernel,
    /// Pending disk operations, with the time and outcome of their completion.
    pub(crate) due: BTreeMap<OperationId, (Instant, Outcome)>,
    /// For a disk that holds some operations: the decision for each of them.
    pub(crate) held: BTreeMap<OperationId, bool>,
    /// Time of the next iteration of the worker, unless another event is earlier.
    pub(crate) wakes: Option<Instant>,
    pub(crate) waker: Waker,
    /// Set while the worker is sleeping until it's woken by an event.
    pub(crate) is_parked: bool,
}

/// The target: persistent parts, and the process while it is running.
pub struct Target {
    pub(crate) plan: Plan,
    /// Layout that is being served, or was served when the process exited.
    pub(crate) layout: Layout,
    pub(crate) config: Config,
    pub(crate) ground: Arc<Ground>,
    pub(crate) start: Instant,
    /// Number of workers in the process.
    workers: usize,
    disk: Disk,
    /// Disks of private units.
    private: Vec<Disk>,
    /// Disks of hogs.
    hogs: Vec<Disk>,
    /// All other disks, by backend.
    others: BTreeMap<&'static str, Disk>,
    /// Backends that were opened. While one of them is open, its disk can't be opened again.
    pub(crate) stores: BTreeMap<String, Weak<Store>>,
    failures: Failures,
    /// Set if the disk has reported a failed writeback to the process, but this is not saved yet.
    is_unsaved: bool,
    pub(crate) kept: SavedState,
    /// Number of times that the host was booted.
    pub(crate) boots: u64,
    pub(crate) rng: Rng,
    pub(crate) server: Option<Server>,
    /// Channel for reports from workers.
    pub(crate) reports: Option<Sender<Report>>,
    /// Workers, or `None` for failed workers.
    pub(crate) members: Vec<Option<Member>>,
    pub(crate) mail: Vec<MailSender<Mail>>,
    pub(crate) threads: Threads,
    pub(crate) shared: Option<Arc<Shared>>,
    /// Configuration change in progress.
    pub(crate) job: Option<Job>,
    /// Normal exit in progress.
    pub(crate) ending: Option<Ending>,
    /// State from a handover by the previous process.
    pub(crate) heritage: Option<ServerState>,
    pub(crate) faults: DiskFaults,
    /// Damaged block of the disk: the offset on the medium.
    damaged: Option<u64>,
    /// Workers with stalled threads.
    pub(crate) stalled: BTreeSet<usize>,
}

impl std::fmt::Debug for Target {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Target").finish_non_exhaustive()
    }
}

impl Target {
    /// Creates a target that serves one disk over all protocols.
    #[must_use]
    pub fn new(plan: &Plan, fabric: &Fabric, listeners: &Listeners, rng: &mut Rng) -> Self {
        let layout = Layout::first();
        let private = plan.initiators.iter().filter(|_| plan.private_units);
        let private = private
            .enumerate()
            .map(|(index, _)| Disk::new(1 + index as u64));
        let others = ["c", "s", "r", "a"].map(|backend| (backend, Disk::new(0)));
        let kept = SavedState::default();
        let failures = Failures {
            saves: kept.saves.clone(),
            ..Failures::default()
        };
        let mut target = Self {
            config: config_of(&layout, plan),
            layout,
            ground: Arc::new(Ground::new(fabric, plan.mtus[0], listeners)),
            start: fabric.now(),
            workers: 1 << plan.workers.clamp(1, 64).ilog2(),
            plan: plan.clone(),
            disk: Disk::new(0),
            private: private.collect(),
            hogs: hog::disks(plan),
            others: others.into(),
            stores: BTreeMap::new(),
            failures,
            is_unsaved: false,
            kept,
            boots: 1,
            rng: rng.fork(),
            server: None,
            reports: None,
            members: Vec::new(),
            mail: Vec::new(),
            threads: Threads::default(),
            shared: None,
            job: None,
            ending: None,
            heritage: None,
            faults: DiskFaults::default(),
            damaged: None,
            stalled: BTreeSet::new(),
        };
        target.begin();
        target
    }

    /// Returns the disk of a backend, if any.
    pub(crate) fn disk_of(&self, backend: &str) -> Option<&Disk> {
        let number = |prefix| backend.strip_prefix(prefix)?.parse::<usize>().ok();
        match (backend, number('p'), number('h')) {
            ("d", ..) => Some(&self.disk),
            (_, Some(index), _) => self.private.get(index),
            (_, _, Some(index)) => self.hogs.get(index),
            _ => self.others.get(backend),
        }
    }

    /// Sets the numbers of stalled disks: the shared disk, private disks, and then other disks,
    /// starting with the unit of the administrator.
    pub(crate) fn stall_disks(&mut self, numbers: impl Iterator<Item = usize>) {
        let all = std::iter::once(&self.disk).chain(&self.private);
        let others = ["s", "r", "c", "a"].map(|name| &self.others[name]);
        let all: Vec<_> = all.chain(others).collect();
        let stalled = numbers.map(|number| all[number % all.len()].clone());
        self.faults.stalled = stalled.collect();
    }

    /// Sets the numbers of hanging disks of hogs.
    pub(crate) fn hang_disks(&mut self, numbers: impl Iterator<Item = usize>) {
        let hung = numbers.filter_map(|number| self.hogs.get(number).cloned());
        self.faults.hung = hung.collect();
        let hung = &self.faults.hung;
        for member in self.members.iter_mut().flatten() {
            for operation in member.kernel.operations() {
                let mut hung = hung.iter();
                if operation
                    .disk()
                    .is_some_and(|disk| hung.any(|one| one.is_same(disk)))
                {
                    // The delay starts when the disk works again.
                    member.due.remove(&operation.id);
                }
            }
        }
    }

    pub(crate) fn failures(&self) -> Failures {
        self.failures.clone()
    }

    /// Returns the number of workers while there is a process.
    #[must_use]
    pub fn workers(&self) -> usize {
        self.workers
    }

    /// Kills the process. Disk operations in flight may be executed completely, partially or not at
    /// all.
    pub fn crash(&mut self, history: &History) {
        let was_unseen = self.disk.has_unseen_error();
        for member in self.members.iter().flatten() {
            member.abandon(&mut self.rng);
        }
        self.update_reported(was_unseen);
        // The disk only reports a lost writeback once. If the process has not saved this, it is
        // lost with the process.
        if std::mem::take(&mut self.is_unsaved) {
            self.end_loss(history);
            history.forgive_losses();
        }
        self.heritage = None;
        self.clear();
        self.note_torn_blocks(history);
        // The next process serves files with their complete size if they were extended by a change.
        let side = self.disk_of("s").map_or(0, Disk::len) >> 20;
        let disk = self.disk.len() >> 20;
        if side > self.layout.side || disk > self.layout.disk {
            self.layout.side = side.max(self.layout.side);
            self.layout.disk = disk.max(self.layout.disk);
            self.config = config_of(&self.layout, &self.plan);
        }
    }

    /// Called when the process has exited. Drops workers first, because these own resources that
    /// were acquired by a change.
    pub(crate) fn clear(&mut self) {
        self.members.clear();
        self.mail.clear();
        self.job = None;
        self.ending = None;
        self.server = None;
        self.reports = None;
        self.shared = None;
        self.threads = Threads::default();
    }

    /// Checks if the disk has reported a failed writeback since the last call, or if the process
    /// has saved this.
    pub(crate) fn update_reported(&mut self, was_unseen: bool) {
        self.is_unsaved |= was_unseen && !self.disk.has_unseen_error();
        self.is_unsaved &= !self.failures.has();
    }

    /// Starts to fail writeback for part of the disk's cache. The disk reports this once and then
    /// treats the cache as clean. The target must remember this: no flush may succeed until it was
    /// cleared by the administrator.
    pub fn begin_loss(&mut self, share: f64) {
        let rng = &mut self.rng;
        let errno = [libc::EIO, libc::EIO, libc::ENOSPC][rng.usize(..3)];
        self.disk.fail_write_back(errno, |_| rng.f64() < share);
    }

    /// Drops cached data for which writeback has failed.
    pub fn end_loss(&mut self, history: &History) {
        history.lose_write_back(self.disk.drop_cache());
    }

    /// The host loses power: sectors that were not flushed may be lost.
    pub fn cut_power(&mut self, history: &History) {
        self.crash(history);
        self.boots += 1;
        let rng = &mut self.rng;
        // Sometimes the entire cache is lost, sometimes only single sectors.
        let share = [0.0, 0.5, 1.0][rng.usize(..3)];
        let disks = std::iter::once(&self.disk).chain(&self.private);
        for disk in disks.chain(&self.hogs).chain(self.others.values()) {
            disk.crash(|_, versions| match rng.f64() < share {
                true => rng.usize(..=versions),
                false => 0,
            });
        }
        self.note_torn_blocks(history);
    }

    /// Frames of a protected disk are not written atomically. The target must repair their tuples,
    /// but a block may have parts of several versions if it was not durable.
    fn note_torn_blocks(&self, history: &History) {
        let Some(frames) = self.frames() else {
            return;
        };
        for block in 0..self.plan.blocks {
            let mut bytes = [0; BLOCK];
            let at = frames.medium_offset(block * BLOCK as u64);
            let len = self.disk.read(at, &mut bytes);
            // The file may not have its size yet.
            if len == BLOCK && Version::of(block, &bytes).is_none() {
                let torn = history.tear(block, &bytes);
                torn.unwrap_or_else(|violation| panic!("{violation}"));
            }
        }
    }

    /// Returns the frames of the disk if it is protected.
    fn frames(&self) -> Option<Frames> {
        (self.plan.protection > 0).then(|| Frames::new(BLOCK as u32))
    }

    /// Inverts a bit of a block, or restores it if the block is still damaged.
    pub(crate) fn damage(&mut self, which: u64, is_active: bool) {
        let Some(frames) = self.frames() else {
            return;
        };
        let block = which % self.plan.blocks;
        let start = frames.medium_offset(block * BLOCK as u64);
        let at = match is_active {
            true => start + (which >> 32) % frames.frame(),
            false => match self.damaged.take() {
                Some(at) => at,
                None => return,
            },
        };
        let mut frame = vec![0; frames.frame() as usize];
        self.disk.read(start, &mut frame);
        let (bytes, tuple) = frame.split_at(BLOCK);
        let guard = u16::from_be_bytes([!tuple[0], !tuple[1]]);
        let is_whole = guard == riser_scsi::protection::guard(bytes);
        let is_checked = tuple[2..4] != [0, 0];
        // Only the guard is damaged or checked. It has no guard while it is deallocated.
        let within = at - start;
        let is_relevant = is_checked && within < BLOCK as u64 + 2;
        if is_relevant && is_whole == is_active {
            let mut byte = [0];
            self.disk.read(at, &mut byte);
            self.disk.write(at, &[byte[0] ^ 0x10]);
            self.damaged = is_active.then_some(at);
        }
    }

    /// Returns whether all workers of the process are running and not stalled.
    #[must_use]
    pub fn is_whole(&self) -> bool {
        self.stalled.is_empty() && self.members.iter().all(Option::is_some)
    }

    /// Returns whether the process is running.
    #[must_use]
    pub fn is_running(&self) -> bool {
        !self.members.is_empty()
    }

    /// Returns whether a flush of any disk has failed, and this was not cleared by the
    /// administrator.
    #[must_use]
    pub fn has_failed(&self) -> bool {
        !self.failures.lock().is_empty()
    }

    /// Called when the administrator clears a failed flush and accepts the loss of data.
    pub fn clear_failures(&mut self, history: &History) {
        self.end_loss(history);
        let mut is_forgiven = false;
        if !self.is_running() {
            is_forgiven = self.failures.has();
            self.failures.lock().clear();
        }
        let catalog = self.shared.as_ref().map(|shared| shared.registry.catalog());
        let stores = catalog.iter().flat_map(|catalog| &catalog.stores);
        let own = self.stores.get("d").and_then(Weak::upgrade);
        for store in stores.flatten() {
            let is_cleared = store.clear_flush_failure().is_some();
            let is_own = own.as_ref().is_some_and(|own| Arc::ptr_eq(own, store));
            is_forgiven |= is_own && is_cleared;
        }
        if is_forgiven {
            self.is_unsaved = false;
            history.forgive_losses();
        }
    }

    /// Requests reports from all workers, which are sent in their next iteration.
    #[must_use]
    pub fn request_snapshots(&self) -> Receiver<Snapshot> {
        let (sender, snapshots) = channel();
        for mail in &self.mail {
            let _ = mail.send(Mail::Snapshot(sender.clone()));
        }
        snapshots
    }

    /// Returns the memory announced by connections of all workers.
    #[must_use]
    pub fn announced(&self) -> Announced {
        let all = self.members.iter().flatten();
        let all = all.map(|member| member.worker.announced());
        all.fold(Announced::default(), |sum, one| Announced {
            connections: sum.connections + one.connections,
            bytes: sum.bytes + one.bytes,
        })
    }

    /// Returns resources that are still allocated for closed sessions, compared to the reports of
    /// all workers from before the first session.
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
            let catalog = shared.registry.catalog();
            for unit in catalog.units.iter().filter_map(Weak::upgrade) {
                for (what, count) in unit.entries() {
                    check(format!("{what} of unit {}", unit.index.0), count);
                }
            }
        }
        for one in snapshots {
            let of = |what: &str| format!("{what} of worker {}", one.worker);
            check(of("channels of SRP"), one.sessions.len());
            check(of("connections of iSCSI"), one.iscsi_sessions.len());
            check(of("connections"), one.connections);
            // Obsolete timers remain until they expire. There are never many of them.
            check(of("timers"), one.timers.saturating_sub(TIMERS));
            check(of("messages to others"), one.waiting_mail);
            let used = one.pool_size - one.pool_free;
            check(of("bytes of the pool"), used);
            check(of("parts of the pool"), usize::from(!one.pool_is_whole));
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
                    (usage.cm_ids, own.1.cm_ids, "identifiers of connections"),
                ] {
                    check(of(what), now.saturating_sub(then));
                }
            }
        }
        for (index, member) in self.members.iter().flatten().enumerate() {
            let operations = member.kernel.operations();
            let at_disk = operations.iter().filter(|o| o.disk().is_some()).count();
            check(format!("operations of worker {index} at a disk"), at_disk);
            let is_transfer = |o: &&Operation| matches!(o.op, Op::Receive(_) | Op::Send);
            let transfers = operations.iter().filter(is_transfer).count();
            check(format!("transfers of worker {index} on sockets"), transfers);
        }
        found
    }

    /// Returns the SRP port for cheating peers, if there are any.
    #[must_use]
    pub fn port_of_cheats(&self) -> Option<TargetPortId> {
        let catalog = self.shared.as_ref()?.registry.catalog();
        Some(catalog.targets.get(1)?.portals[0].target_port())
    }

    /// Returns the objects that are being served.
    #[must_use]
    pub fn shared(&self) -> Option<&Shared> {
        self.shared.as_deref()
    }

    /// Returns the shared disk.
    #[must_use]
    pub fn disk(&self) -> &Disk {
        &self.disk
    }

    /// Wakes all workers after a device was removed or added.
    pub fn wake(&mut self) {
        for member in self.members.iter_mut().flatten() {
            member.is_parked = false;
        }
    }

    /// Runs an iteration of a worker and its kernel side. Returns whether there was anything to do.
    pub fn turn(&mut self, index: usize, now: Instant, rng: &mut Rng) -> bool {
        let Some(Some(member)) = self.members.get_mut(index) else {
            return false;
        };
        let is_stalled = self.stalled.contains(&index);
        let arrival = self.ground.fabric().next_arrival();
        let mut worked = 0;
        // Same as in the real thread, which sleeps until there is a completion, a packet or a
        // timeout.
        let is_due = !member.is_parked
            || member.waker.is_pending()
            || member.kernel.has_completions()
            || arrival.into_iter().chain(member.wakes).any(|at| at <= now);
        if is_due && !is_stalled {
            let worker = &mut member.worker;
            let next;
            (worked, next) = memory::of_target(|| {
                let worked = worker.step(now).expect("the ring works");
                (worked, worker.park(worked).expect("the ring works"))
            });
            member.is_parked = matches!(next, Next::Park(_));
            member.wakes = match next {
                Next::Poll => Some(now + SPIN),
                Next::Park(timeout) => timeout.map(|timeout| now + timeout),
            };
        }
        let was_unseen = self.disk.has_unseen_error();
        let completed = member.complete(now, &mut self.faults, rng);
        self.update_reported(was_unseen);
        worked > 0 || completed > 0
    }

    /// Runs a job of one of the helper threads. Returns whether there was one.
    pub fn turn_of_threads(&mut self, now: Instant, rng: &mut Rng) -> bool {
        // Same as in the control plane.
        if let Some(store) = self.stores.get("d").and_then(Weak::upgrade) {
            store.rest(now);
        }
        let runnable = self.threads.runnable();
        if runnable.is_empty() {
            return false;
        }
        self.threads.step(runnable[rng.usize(..runnable.len())])
    }

    /// Returns the time of the next action.
    #[must_use]
    pub fn next_deadline(&self) -> Option<Instant> {
        let members = || self.members.iter().enumerate();
        let awake = members().filter(|(index, _)| !self.stalled.contains(index));
        let wakes = awake.filter_map(|(_, member)| member.as_ref()?.wakes);
        let members = members().filter(|_| !self.faults.is_stalled);
        let members = members.filter_map(|(_, member)| member.as_ref());
        let due = members.flat_map(|member| member.due.values().map(|(at, _)| *at));
        wakes.chain(due).chain(self.next_step()).min()
    }
}

/// Returns the configuration for a layout.
pub(crate) fn config_of(layout: &Layout, plan: &Plan) -> Config {
    let text = layout.text(plan);
    let config = Config::parse(&text, "sim.yaml");
    let mut config = config.unwrap_or_else(|error| panic!("{error:?} in\n{text}"));
    // Smaller than the minimum for configuration files.
    config.limits.window = plan.window;
    // The task set of a unit is sized for all sessions, which takes time to allocate.
    config.limits.max_sessions = SESSIONS;
    config.limits.send_queue = plan.sends.unwrap_or(config.limits.send_queue);
    config
}

/// Returns the number of objects on all working RDMA devices, by address.
fn usages(of: &Snapshot) -> impl Iterator<Item = (Option<IpAddr>, NicUsage)> {
    let open = of.devices.iter().filter(|device| device.is_open);
    open.filter_map(|device| Some((Some(device.addr), device.nic?.usage)))
}

impl Member {
    /// Called when the thread has exited: pending disk operations may be executed completely,
    /// partially or not at all.
    pub(crate) fn abandon(&self, rng: &mut Rng) {
        let mut operations = self.kernel.operations();
        operations.retain(|operation| operation.disk().is_some());
        rng.shuffle(&mut operations);
        for operation in operations {
            let sectors = operation.len / SECTOR as usize;
            let outcome = match rng.u8(..3) {
                0 => continue,
                1 if sectors > 0 => Outcome::Short(rng.usize(..=sectors) * SECTOR as usize),
                _ => Outcome::Whole,
            };
            self.kernel.complete(operation.id, outcome);
        }
    }

    /// Completes operations that are due, in random order. Returns their number.
    fn complete(&mut self, now: Instant, faults: &mut DiskFaults, rng: &mut Rng) -> usize {
        let mut operations = self.kernel.operations_except(&faults.hung);
        rng.shuffle(&mut operations);
        let mut completed = 0;
        for operation in operations {
            let outcome = match operation.disk() {
                None => operation.is_ready.then_some(Outcome::Whole),
                // The operation can only be completed by its cancellation until it has a thread.
                Some(_) if operation.is_queued => operation.is_ready.then_some(Outcome::Whole),
                Some(_) if faults.is_stalled => None,
                Some(disk) if faults.is_stalled_one(disk) => {
                    // The delay starts when the disk works again.
                    self.due.remove(&operation.id);
                    None
                }
                Some(_) if self.is_held(operation.id, faults.held, rng) => {
                    self.due.remove(&operation.id);
                    None
                }
                Some(_) => self.outcome(&operation, now, faults, rng),
            };
            if let Some(outcome) = outcome {
                let ended = self.kernel.complete(operation.id, outcome);
                completed += usize::from(ended.is_some());
            }
        }
        completed
    }

    /// Returns whether an operation does not complete while the disk holds this share of all
    /// operations.
    fn is_held(&mut self, id: OperationId, share: f64, rng: &mut Rng) -> bool {
        if share == 0.0 {
            self.held.clear();
            return false;
        }
        *self.held.entry(id).or_insert_with(|| rng.f64() < share)
    }

    /// Returns the outcome of a disk operation if it is due.
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
