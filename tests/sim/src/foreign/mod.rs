//! A target of another implementation, different from `riserd`, to test the initiator against
//! foreign behaviour. Most of its behaviour is allowed by the standards. The rest is wrong, but in
//! a way that an initiator can detect.
//!
//! Two nodes share one unit. Each node has one portal in a separate portal group, so a login at one
//! node doesn't terminate tasks of the other node. Writes reach the medium late, possibly after
//! their session was closed. The optional cache has no generation that would indicate its loss.
//!
//! | Module | |
//! |---|---|
//! | `plan` | properties and faults of the target, plans of seeds |
//! | `unit`, `scsi`, `disk` | the logical unit, for all protocols |
//! | `target` | nodes, sessions and their faults |
//! | `connection`, `pdu`, `text` | iSCSI, and iSER on top of `rdma` |
//! | `srp`, `rdma` | SRP, and the RDMA device of a node |
//!
//! # Verdict
//! - A history of every block explains each read, even after the cache was lost.
//! - Reads and writes only fail after a fault that an initiator must report
//!   ([`ForeignFault::fails_requests`]): all other faults are shorter than the timeout.
//! - A flush, or a write with FUA, only reports a lost cache if the cache was lost, or if the
//!   initiator could not know better because its only path was unavailable.
//! - No write reaches another unit.
//! - No read waits for an unavailable path while another path is working.
//! - Discovery finds every target.
//! - No login is received earlier than DefaultTime2Wait after a lost connection.
//! - All memory and all objects of the initiator's device are released at the end.

mod connection;
mod disk;
mod pdu;
mod plan;
mod rdma;
mod scsi;
mod srp;
mod target;
mod text;
mod unit;

use std::cell::{Cell, RefCell};
use std::hash::Hasher as _;
use std::net::{IpAddr, Ipv4Addr};
use std::ops::Range;
use std::rc::Rc;
use std::time::{Duration, Instant};

use fastrand::Rng;
use riser_initiator::engine::{Client, Engine};
use riser_initiator::lun::{Lun, LunError};
use riser_initiator::request::RequestError;
use riser_initiator::url::TargetUrl;
use riser_tests::history::{BLOCK, History, Port};
use riser_transport::loopback::{Endpoint, Fabric};
use tracing::debug;

use self::disk::Disk;
pub(crate) use self::plan::draw;
pub use self::plan::{ForeignFault, Lack, Traits};
use self::target::{Active, Target, portal};
use self::unit::Unit;
use crate::executor::Executor;
use crate::initiator::{Dialed, SimulatedEnv, User, Verdict, pause};
use crate::plan::{Fault, Plan, Protocol, Trouble};
use crate::run::{Outcome, PATIENCE};
use crate::{coverage, events, pulse};

/// Name of the target.
const IQN: &str = "iqn.2026-01.com.example:foreign";

/// Timeout of a request, longer than all faults and reconnects.
const TIMEOUT: Duration = Duration::from_secs(240);

/// Maximum latency of a read while one path is working: the initiator must detect that a path is
/// unavailable, and stop using it. A hanging target still acknowledges packets. SRP can only use a
/// command as a ping, which is aborted after 30 seconds; then its unit is reset, and each function
/// takes five seconds.
fn prompt(protocol: Protocol) -> Duration {
    Duration::from_secs(match protocol {
        Protocol::Srp => 41,
        Protocol::Iser | Protocol::Iscsi => 20,
    })
}

/// Maximum number of steps in a run.
const STEPS: u64 = 5_000_000;

/// A wrong response.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Mischief {
    /// The response is sent twice.
    Repeat,
    /// A response with another tag is sent before, where these bits are flipped.
    Unknown(u64),
    /// The response skips status numbers.
    SkipNumbers,
}

/// Compares the number of failed flushes with the number of lost caches.
#[derive(Debug, Default)]
struct Checker {
    verdict: Verdict,
    /// Events after which the initiator has to assume that the cache was lost.
    losses: Cell<usize>,
    failures: Cell<usize>,
    tasks: usize,
    /// Set after a fault that may cause failed requests.
    is_excused: Cell<bool>,
}

impl Checker {
    fn blame(&self, why: String) {
        self.verdict.borrow_mut().get_or_insert(why);
    }

    /// Called when a request has failed. If it `flushes`, it could have reported a lost cache. One
    /// loss fails all flushes in flight.
    fn on_failure(&self, what: &str, flushes: bool, error: &LunError) {
        if flushes && *error == LunError::Request(RequestError::CacheLost) {
            self.failures.set(self.failures.get() + 1);
            if self.failures.get() > self.losses.get() * self.tasks {
                self.blame(format!("a {what} fails without a lost cache: {error}"));
            }
        } else if !self.is_excused.get() {
            self.blame(format!("a {what} fails: {error}"));
        }
    }
}

struct World {
    plan: Plan,
    traits: Traits,
    url: TargetUrl,
    fabric: Fabric,
    rng: Rng,
    target: Target,
    dialed: Dialed,
    client: Client,
    engine: Engine<SimulatedEnv>,
    executor: Executor,
    history: Rc<History>,
    checker: Rc<Checker>,
    opened: Rc<RefCell<Option<(User, Lun)>>>,
    active: Vec<bool>,
    steps: u64,
}

/// Runs the plan of a foreign target.
pub(crate) fn run(plan: &Plan, traits: &Traits, fabric: Fabric) -> Result<Outcome, String> {
    World::new(plan, traits, fabric).run()
}

fn url(plan: &Plan, traits: &Traits) -> TargetUrl {
    let protocol = plan.initiators[0];
    let (name, first) = match protocol {
        Protocol::Srp => ("srp", String::new()),
        Protocol::Iser => ("iser", format!("/{IQN}")),
        Protocol::Iscsi => ("iscsi", format!("/{IQN}")),
    };
    let channels = traits.channels;
    let mut keys = match protocol {
        Protocol::Srp => vec![format!("id_ext=1&ioc_guid=2&channels={channels}")],
        Protocol::Iser | Protocol::Iscsi => vec![],
    };
    keys.extend((1..plan.paths).map(|node| format!("portal={}", portal(node, protocol))));
    let text = format!(
        "{name}://{}{first}/0?{}",
        portal(0, protocol),
        keys.join("&")
    );
    let text = text.trim_end_matches('?');
    text.parse().expect("a valid address")
}

impl World {
    fn new(plan: &Plan, traits: &Traits, fabric: Fabric) -> Self {
        let mut rng = Rng::with_seed(plan.seed ^ 0xf0_4e17);
        let verdict = Verdict::default();
        // The last block is used by the task that watches the paths.
        let disk = Disk::new(plan.blocks.max(1) + 1, plan.write_cache);
        let unit = Unit::new(disk, traits.clone(), rng.fork(), Rc::clone(&verdict));
        let ways = (plan.initiators[0], &fabric);
        let target = Target::new(unit, traits.clone(), ways, rng.fork(), Rc::clone(&verdict));
        let dialed = Dialed::default();
        let address = IpAddr::V4(Ipv4Addr::new(10, 9, 1, 1));
        let is_rdma = plan.initiators[0] != Protocol::Iscsi;
        let device = is_rdma.then(|| fabric.endpoint(address));
        let env = SimulatedEnv::new(address, device, &dialed, rng.fork());
        let builder = Client::builder().pool(4 << 20).port(rng.u64(..));
        let queue_size = rng.u16(1..=32);
        let attached = builder.queue_size(queue_size).attach(env);
        let (client, engine) = attached.expect("an engine");
        let history = History::new(plan.blocks.max(1) as usize);
        let history = history.with_repeats().with_power_cuts().with_paths();
        Self {
            url: url(plan, traits),
            traits: traits.clone(),
            plan: plan.clone(),
            active: vec![false; plan.troubles.len()],
            fabric,
            target,
            dialed,
            client,
            engine,
            executor: Executor::default(),
            history: Rc::new(history),
            checker: Rc::new(Checker {
                verdict,
                tasks: plan.tasks + 1,
                ..Checker::default()
            }),
            opened: Rc::default(),
            rng,
            steps: 0,
        }
    }

    fn user(&self) -> User {
        User {
            port: Port(1),
            history: Rc::clone(&self.history),
            is_cached: self.plan.write_cache,
            is_quiet: false,
            model: None,
            is_prompt: false,
            keeps_protection: false,
            is_alone: true,
            max_latency: Duration::MAX,
            begun: Cell::default(),
            verdict: Rc::clone(&self.checker.verdict),
        }
    }

    fn run(mut self) -> Result<Outcome, String> {
        self.start();
        let healed = self.plan.healed();
        self.run_until("all commands have completed", |world| {
            world.executor.is_empty()
                && world.fabric.elapsed() >= healed
                && !world.active.contains(&true)
        })?;
        let Some((user, lun)) = self.opened.borrow_mut().take() else {
            return Err("the unit was never opened".to_owned());
        };
        let last = look_at_last((user, lun), self.url.clone(), &self.plan, &self.checker);
        self.executor.spawn(last);
        self.run_until("all blocks are read", |world| world.executor.is_empty())?;
        self.client.shutdown();
        self.run_until("all sessions have ended", |world| {
            world.engine.is_over() && world.target.is_idle()
        })?;
        let (free, all) = (self.client.buffers().free(), self.client.buffers().size());
        if free != all {
            return Err(format!("the initiator has {free} of {all} bytes back"));
        }
        let device = self.engine.device().map(Endpoint::usage);
        if let Some(usage) = device.filter(|usage| usage.qps + usage.mrs + usage.pds > 0) {
            return Err(format!("the initiator's device has objects: {usage:?}"));
        }
        Ok(Outcome {
            packets: self.fabric.packets(),
            bytes: self.target.bytes,
            steps: self.steps,
            time: self.fabric.elapsed(),
            counted: [0; 2],
            trace: self.target.trace.finish(),
        })
    }

    /// Opens the unit and starts the tasks that use it.
    fn start(&mut self) {
        let (client, url) = (self.client.clone(), self.url.clone());
        let opened = Rc::clone(&self.opened);
        let (checker, plan) = (Rc::clone(&self.checker), self.plan.clone());
        let users = (0..plan.tasks).map(|_| (self.user(), self.rng.fork()));
        let users: Vec<_> = users.collect();
        let first = self.user();
        self.start_discovery();
        self.executor.spawn(async move {
            let lun = open(&client, &url).await;
            *opened.borrow_mut() = Some((first, lun.clone()));
            let mut all = Executor::default();
            for (user, rng) in users {
                let (lun, plan, checker) = (lun.clone(), plan.clone(), Rc::clone(&checker));
                all.spawn(run_workload((user, lun), plan, rng, checker));
            }
            if is_watched(&plan) {
                all.spawn(watch_paths(lun, plan, checker));
            }
            all.finish().await;
        });
    }

    /// Starts a task that lists all targets.
    fn start_discovery(&mut self) {
        let TargetUrl::Iscsi(url) = self.url.clone() else {
            return;
        };
        let targets = self.traits.targets as usize;
        if targets == 0 {
            return;
        }
        let (client, checker) = (self.client.clone(), Rc::clone(&self.checker));
        self.executor.spawn(async move {
            loop {
                match client.discover_targets(&url).await {
                    Ok(found) if found.len() == targets => return,
                    Ok(found) => {
                        let found = found.len();
                        return checker.blame(format!("discovery finds {found} of {targets}"));
                    }
                    Err(error) => debug!(%error, "discovery fails"),
                }
                pause(&client, Duration::from_secs(1)).await;
            }
        });
    }

    fn run_until(
        &mut self,
        goal: &str,
        mut is_reached: impl FnMut(&Self) -> bool,
    ) -> Result<(), String> {
        let limit = self.fabric.elapsed() + self.plan.healed() + PATIENCE;
        while !is_reached(self) {
            self.step();
            if let Some(why) = self.checker.verdict.borrow().clone() {
                return Err(why);
            }
            if self.fabric.elapsed() > limit || self.steps > STEPS {
                let tasks = self.executor.len();
                return Err(format!("not in time: {goal}; {tasks} tasks are pending"));
            }
        }
        Ok(())
    }

    fn step(&mut self) {
        self.steps += 1;
        pulse::beat();
        events::set_time(self.fabric.elapsed());
        self.trouble();
        let now = self.fabric.now();
        let mut order = [0, 1, 2];
        self.rng.shuffle(&mut order);
        let mut has_worked = false;
        for actor in order {
            has_worked |= match actor {
                0 => self.executor.turn() > 0,
                1 => {
                    for dial in self.dialed.take() {
                        self.target.accept(dial.to, dial.stream.into_socket());
                    }
                    self.target.turn(now)
                }
                _ => self.engine.step(now),
            };
        }
        let soon = now + Duration::from_micros(self.rng.u64(1..=20));
        let next = match has_worked {
            true => soon,
            false => self.next_deadline(now).max(now + Duration::from_micros(1)),
        };
        self.fabric.advance_to(next);
    }

    fn next_deadline(&self, now: Instant) -> Instant {
        let start = now - self.fabric.elapsed();
        let troubles = self.plan.troubles.iter();
        let troubles = troubles.flat_map(|trouble| [start + trouble.from, start + trouble.until]);
        let deadlines = troubles
            .filter(|at| *at > now)
            .chain(self.engine.next_deadline())
            .chain(self.target.next_deadline());
        let lull = now + Duration::from_millis(1);
        let arrival = self.fabric.next_arrival_after(now);
        deadlines.chain(arrival).min().unwrap_or(lull)
    }

    /// Starts and ends troubles.
    fn trouble(&mut self) {
        let elapsed = self.fabric.elapsed();
        let mut is_changed = false;
        for at in 0..self.plan.troubles.len() {
            let trouble = self.plan.troubles[at];
            let is_active = (trouble.from..trouble.until).contains(&elapsed);
            let Fault::Foreign(fault) = trouble.fault else {
                continue;
            };
            // Before that, the other unit would be opened.
            let is_opened = self.opened.borrow().is_some();
            let is_active = is_active && (is_opened || fault != ForeignFault::ReplaceUnit);
            if is_active != self.active[at] {
                (self.active[at], is_changed) = (is_active, true);
                debug!(?fault, "{}", if is_active { "begins" } else { "ends" });
                if is_active {
                    coverage::note("fault", trouble.fault.kind(), "begins");
                    self.strike(fault);
                } else if fault == ForeignFault::ReplaceUnit {
                    self.target.close_all(self.fabric.now());
                }
            }
        }
        if is_changed {
            let mut active = Active::default();
            let troubles = self.plan.troubles.iter().zip(&self.active);
            for (trouble, _) in troubles.filter(|(_, is_active)| **is_active) {
                if let Fault::Foreign(fault) = trouble.fault {
                    active.add(fault);
                }
            }
            self.target.set_active(active);
        }
    }

    /// Applies the immediate effect of a fault when it starts.
    fn strike(&mut self, fault: ForeignFault) {
        const SHARE: f64 = 0.5;
        let now = self.fabric.now();
        let is_lost = match fault {
            ForeignFault::StopPortal(node) => {
                self.target.close_node(node, true, now);
                false
            }
            ForeignFault::Redirect => {
                self.target.close_node(0, true, now);
                false
            }
            ForeignFault::RequestLogout => {
                self.target.request_logout();
                false
            }
            ForeignFault::ResetUnit(qualifier) => {
                self.target.reset_unit(qualifier);
                false
            }
            ForeignFault::LoseCache => self.target.lose_cache(SHARE),
            // The initiator must assume that data was lost.
            ForeignFault::LosePower => {
                self.target.lose_power(SHARE, now);
                true
            }
            _ => false,
        };
        if is_lost {
            self.history.power_cut();
        }
        let is_excused = self.checker.is_excused.get() || fault.fails_requests();
        self.checker.is_excused.set(is_excused);
        // With a single path, an initiator cannot distinguish between a restart of the portal and
        // of the disk.
        let ends_sessions = |trouble: &Trouble| match trouble.fault {
            Fault::Foreign(fault) => fault.ends_sessions(),
            _ => false,
        };
        let mut troubles = self.plan.troubles.iter();
        let may_be_only = self.plan.paths == 1 || troubles.any(ends_sessions);
        let is_only = may_be_only && fault.interrupts();
        if is_lost || fault.loses_data() || is_only {
            self.checker.losses.set(self.checker.losses.get() + 1);
        }
    }
}

/// Opens the unit, retrying as often as needed.
async fn open(client: &Client, url: &TargetUrl) -> Lun {
    loop {
        if let Ok(session) = client.connect(url.clone()).await {
            match session.lun(0).await {
                Ok(lun) => return lun.with_timeout(TIMEOUT),
                Err(_) => session.close().await,
            }
        }
        pause(client, Duration::from_millis(500)).await;
    }
}

/// After the last fault, writes a block and reads all of them. If a session was closed because the
/// unit was replaced, it is opened again, just like a user would do after an error.
fn look_at_last(
    (user, lun): (User, Lun),
    url: TargetUrl,
    plan: &Plan,
    checker: &Rc<Checker>,
) -> impl Future<Output = ()> + use<> {
    let replaces = |trouble: &Trouble| trouble.fault == Fault::Foreign(ForeignFault::ReplaceUnit);
    let may_be_closed = plan.troubles.iter().any(replaces);
    let (checker, blocks) = (Rc::clone(checker), plan.blocks);
    async move {
        let client = lun.session().client().clone();
        let mut lun = lun;
        let mut result = user.write_at_last(&lun, 0).await;
        if may_be_closed && result == Err(LunError::Request(RequestError::Closed)) {
            // The flush that reports the closed session covers all later losses.
            if user.flush(&lun).await.is_ok() {
                checker.blame("a flush succeeds on a closed session".to_owned());
            }
            lun.session().close().await;
            user.history.forgive_losses();
            lun = open(&client, &url).await;
            result = user.write_at_last(&lun, 0).await;
        }
        if let Err(error) = result {
            checker.blame(format!("no fault is left, and a write fails: {error}"));
        }
        for block in 0..blocks {
            if !user.read(&lun, block..block + 1).await {
                checker.blame(format!("no fault is left, and block {block} is unreadable"));
            }
        }
        lun.session().close().await;
    }
}

/// Returns whether one path is always working.
fn is_watched(plan: &Plan) -> bool {
    let is_of_first = |trouble: &Trouble| match trouble.fault {
        Fault::Foreign(fault) => fault.is_of_first_path(),
        _ => false,
    };
    plan.paths > 1 && plan.troubles.iter().all(is_of_first)
}

/// Continuously reads a block that is never written, to check that no read waits for an unavailable
/// path.
async fn watch_paths(lun: Lun, plan: Plan, checker: Rc<Checker>) {
    let client = lun.session().client().clone();
    let prompt = prompt(plan.initiators[0]);
    while events::now() < plan.healed() {
        let begin = events::now();
        let buffer = lun.buffers().take_buffer(BLOCK).await;
        let result = lun.read(plan.blocks * BLOCK as u64, buffer).await;
        let time = events::now() - begin;
        if result.is_err() || time > prompt {
            checker.blame(format!("a path serves, and a read takes {time:?}"));
        }
        pause(&client, Duration::from_millis(500)).await;
    }
}

/// Sends random commands to the unit, during the troubles of the plan.
async fn run_workload((user, lun): (User, Lun), plan: Plan, mut rng: Rng, checker: Rc<Checker>) {
    let client = lun.session().client().clone();
    let each = plan.healed().max(Duration::from_millis(10)) / plan.commands.max(1) as u32;
    for _ in 0..plan.commands {
        if rng.bool() {
            pause(&client, each.mul_f64(4.0 * rng.f64())).await;
        }
        let len = rng.u64(1..=plan.longest.clamp(1, plan.blocks));
        let first = rng.u64(..=plan.blocks - len);
        let blocks = first..first + len;
        let is_fua = rng.u8(..6) == 0;
        match rng.u8(..8) {
            0 => {
                if let Err(error) = user.flush(&lun).await {
                    checker.on_failure("flush", true, &error);
                }
            }
            1..5 => {
                if let Err(error) = write(&user, &lun, blocks, is_fua).await {
                    checker.on_failure("write", is_fua, &error);
                }
            }
            _ => {
                let is_read = user.read(&lun, blocks.clone()).await;
                if !is_read && !checker.is_excused.get() {
                    checker.blame(format!("a read of blocks {blocks:?} fails"));
                }
            }
        }
    }
}

/// Writes blocks. Without DPOFUA, a write with FUA includes a flush, which may be the flush that
/// reports a lost cache.
async fn write(user: &User, lun: &Lun, blocks: Range<u64>, is_fua: bool) -> Result<(), LunError> {
    let flushes = is_fua && !lun.info().caching.has_fua;
    let flush = flushes.then(|| user.history.begin_flush(user.port));
    let result = user.write(lun, blocks, is_fua).await;
    match (flush, &result) {
        (Some(flush), Ok(())) => user.check_result(user.history.end_flush(flush)),
        (Some(flush), Err(_)) => user.history.fail_flush(flush),
        (None, _) => {}
    }
    result
}
