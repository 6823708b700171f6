//! One run of a plan.

use std::cell::RefCell;
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::rc::Rc;
use std::time::Duration;

use fastrand::Rng;
use riser_tests::history::{History, Port};
use riser_transport::loopback::{Fabric, FabricConfig};
use riser_transport::roce::fault::FaultConfig;

use crate::executor::Executor;
use crate::initiator::{self, Dialed, Initiator, User, Verdict};
use crate::plan::{Fault, Plan};
use crate::target::{self, Target};
use crate::tcp::Network;

/// Virtual time after the last fault, in which all commands must have ended.
pub const PATIENCE: Duration = Duration::from_secs(600);

/// Most steps of a run: one that does not get on, in no time, is stuck.
const STEPS: u64 = 30_000_000;

/// What a run came to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Outcome {
    /// Packets on the RDMA network.
    pub packets: u64,
    /// Bytes that arrived over TCP.
    pub bytes: u64,
    /// Steps of the schedule.
    pub steps: u64,
    /// Virtual time.
    pub time: Duration,
    /// A number that stands for all bytes on both networks, and the times of the packets.
    pub trace: u64,
}

/// Why a run failed.
#[derive(Clone, Debug)]
pub struct Failure {
    /// The plan.
    pub plan: Plan,
    /// Time into the run.
    pub at: Duration,
    /// The reason.
    pub why: String,
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}\nat {:?}: {}", self.plan, self.at, self.why)
    }
}

/// Everything that takes part.
struct World {
    plan: Plan,
    rng: Rng,
    fabric: Fabric,
    target: Target,
    network: Network,
    initiators: Vec<Initiator>,
    executor: Executor,
    dialed: Dialed,
    verdict: Verdict,
    history: Rc<History>,
    steps: u64,
    /// Troubles that have begun and not ended.
    active: Vec<bool>,
}

/// Runs a plan.
///
/// # Errors
/// [`Failure`]: something is wrong with the programs, or with the simulator.
pub fn run(plan: &Plan) -> Result<Outcome, Box<Failure>> {
    riser_memory::simulated::addresses(|| run_here(plan))
}

fn run_here(plan: &Plan) -> Result<Outcome, Box<Failure>> {
    let fabric = Fabric::new(FabricConfig {
        seed: plan.seed,
        latency: plan.latency,
        socket_room: plan.socket_room,
        ..FabricConfig::default()
    });
    let clock = fabric.clone();
    let failed = |why: String| {
        Box::new(Failure {
            plan: plan.clone(),
            at: clock.elapsed(),
            why,
        })
    };
    // A panic of the programs is a failure like others.
    let result = catch_unwind(AssertUnwindSafe(|| World::new(plan, fabric.clone()).run()));
    match result {
        Ok(result) => result.map_err(failed),
        Err(panic) => {
            let text = panic.downcast_ref::<String>().cloned();
            let text = text.or_else(|| panic.downcast_ref::<&str>().map(|s| (*s).to_owned()));
            Err(failed(format!("panic: {}", text.unwrap_or_default())))
        }
    }
}

impl World {
    fn new(plan: &Plan, fabric: Fabric) -> Self {
        let mut rng = Rng::with_seed(plan.seed ^ 0x5eed);
        let (target, listeners) = Target::new(plan, &fabric, &mut rng);
        let shared = target.shared().expect("it runs");
        let port = shared.registry.catalog().targets[0].portals[0].target_port();
        let dialed = Dialed::default();
        let initiators = plan.initiators.iter().copied().enumerate();
        let initiators = initiators
            .map(|one| Initiator::new(one, port, &fabric, &dialed, (plan, &mut rng)))
            .collect();
        Self {
            history: Rc::new(
                History::new(plan.blocks as usize)
                    .with_repeats()
                    .with_power_cuts(),
            ),
            active: vec![false; plan.troubles.len()],
            plan: plan.clone(),
            rng,
            fabric,
            target,
            network: Network::new(listeners),
            initiators,
            executor: Executor::default(),
            dialed,
            verdict: Rc::new(RefCell::new(None)),
            steps: 0,
        }
    }

    fn user(&self, index: usize) -> User {
        User {
            port: Port(1 + index as u16),
            history: Rc::clone(&self.history),
            is_cached: self.plan.write_cache,
            verdict: Rc::clone(&self.verdict),
        }
    }

    /// The whole life: faults with work, then quiet, then a last look at all blocks.
    fn run(mut self) -> Result<Outcome, String> {
        let luns: Rc<RefCell<Vec<_>>> = Rc::default();
        for index in 0..self.initiators.len() {
            let (client, url) = (
                self.initiators[index].client.clone(),
                self.initiators[index].url.clone(),
            );
            let users = (0..self.plan.tasks).map(|_| (self.user(index), self.rng.fork()));
            let users: Vec<_> = users.collect();
            let (plan, luns) = (self.plan.clone(), Rc::clone(&luns));
            self.executor.spawn(async move {
                let lun = initiator::open(&client, &url).await;
                luns.borrow_mut().push((index, lun.clone()));
                let mut all = Executor::default();
                for (user, rng) in users {
                    all.spawn(user.work(lun.clone(), plan.clone(), rng));
                }
                all.finish().await;
            });
        }
        let healed = self.plan.healed();
        self.run_until("all commands have ended", healed + PATIENCE, |world| {
            world.executor.is_empty() && world.fabric.elapsed() >= healed
        })?;
        for (index, lun) in luns.take() {
            let (user, plan) = (self.user(index), self.plan.clone());
            let verdict = Rc::clone(&self.verdict);
            self.executor.spawn(async move {
                for first in (0..plan.blocks).step_by(8) {
                    let end = (first + 8).min(plan.blocks);
                    if !user.read(&lun, first..end).await {
                        let text = || format!("blocks {first} to {end} cannot be read");
                        verdict.borrow_mut().get_or_insert_with(text);
                    }
                }
                lun.session().close().await;
            });
        }
        let limit = self.fabric.elapsed() + PATIENCE;
        self.run_until("all blocks were read", limit, |world| {
            world.executor.is_empty()
        })?;
        for initiator in &self.initiators {
            let (free, all) = (
                initiator.client.buffers().free(),
                initiator.client.buffers().memory().len(),
            );
            if free != all {
                return Err(format!("an initiator has {free} of {all} bytes back"));
            }
            initiator.client.shutdown();
        }
        let limit = self.fabric.elapsed() + PATIENCE;
        self.run_until("all sessions have ended", limit, |world| {
            world.initiators.iter().all(|one| one.engine.is_over()) && world.network.is_empty()
        })?;
        self.check_leftovers()?;
        let trace = self.fabric.trace() ^ self.network.trace().rotate_left(1);
        Ok(Outcome {
            trace,
            packets: self.fabric.packets(),
            bytes: self.network.bytes(),
            steps: self.steps,
            time: self.fabric.elapsed(),
        })
    }

    /// After all sessions have ended, the target must let go of what it had for them.
    fn check_leftovers(&mut self) -> Result<(), String> {
        let limit = self.fabric.elapsed() + PATIENCE;
        loop {
            let (snapshots, workers) = (self.target.ask(), self.plan.workers);
            let mut reports = Vec::new();
            self.run_until("all workers report", limit, |_| {
                reports.extend(snapshots.try_iter());
                reports.len() == workers
            })?;
            let leftovers = self.target.leftovers(&reports);
            if leftovers.is_empty() {
                return Ok(());
            }
            let pause = self.fabric.elapsed() + Duration::from_secs(5);
            if pause > limit {
                return Err(format!("the target still has {}", leftovers.join(", ")));
            }
            self.run_until("time passes", limit, |world| {
                world.fabric.elapsed() >= pause
            })?;
        }
    }

    fn run_until(
        &mut self,
        what: &str,
        limit: Duration,
        mut is_so: impl FnMut(&Self) -> bool,
    ) -> Result<(), String> {
        while !is_so(self) {
            self.step();
            if let Some(why) = self.verdict.borrow().clone() {
                return Err(why);
            }
            if self.fabric.elapsed() > limit || self.steps > STEPS {
                return Err(format!("not in time: {what}"));
            }
        }
        Ok(())
    }

    /// Each actor has a turn, in an order of the seed. If none had anything to do, time passes.
    fn step(&mut self) {
        self.steps += 1;
        self.trouble();
        let now = self.fabric.now();
        let (workers, initiators) = (self.plan.workers, self.initiators.len());
        let mut order: Vec<usize> = (0..workers + initiators + 3).collect();
        self.rng.shuffle(&mut order);
        let mut worked = false;
        for actor in order {
            worked |= match actor {
                0 => self.executor.turn() > 0,
                1 => {
                    for (from, stream) in self.dialed.take() {
                        self.network.connect(stream, from, &mut self.rng);
                    }
                    self.network.turn(now)
                }
                2 => self.target.turn_of_threads(&mut self.rng),
                n if n < 3 + workers => self.target.turn(n - 3, now, &mut self.rng),
                n => self.initiators[n - 3 - workers].engine.step(now),
            };
        }
        let soon = now + Duration::from_micros(self.rng.u64(1..=20));
        let next = match worked {
            true => soon,
            false => self
                .next_deadline()
                .map_or(soon, |next| next.max(now + TICK)),
        };
        self.fabric.advance_to(next);
    }

    fn next_deadline(&self) -> Option<std::time::Instant> {
        let now = self.fabric.now();
        let start = now - self.fabric.elapsed();
        let engines = self.initiators.iter();
        let engines = engines.filter_map(|one| one.engine.next_deadline());
        let troubles = self.plan.troubles.iter();
        let troubles = troubles.flat_map(|trouble| [start + trouble.from, start + trouble.until]);
        engines
            .chain(troubles.filter(|at| *at > now))
            .chain(self.fabric.next_arrival())
            .chain(self.network.next_arrival(now))
            .chain(self.target.next_deadline())
            .min()
    }

    /// Begins and ends troubles.
    fn trouble(&mut self) {
        let elapsed = self.fabric.elapsed();
        let mut is_changed = false;
        for at in 0..self.plan.troubles.len() {
            let trouble = self.plan.troubles[at];
            let is_active = (trouble.from..trouble.until).contains(&elapsed);
            if is_active == self.active[at] {
                continue;
            }
            (self.active[at], is_changed) = (is_active, true);
            match trouble.fault {
                Fault::CutTcp(probability) if is_active => {
                    self.network.cut(probability, &mut self.rng);
                }
                Fault::CrashTarget if is_active => self.end_target(false),
                Fault::PowerCut if is_active => self.end_target(true),
                Fault::FailDisks(_) if !is_active => self.target.clear_failures(),
                Fault::Unplug if is_active => self.fabric.unplug(target::ADDRESS),
                Fault::Partition(index) => {
                    let address = initiator::address(index);
                    self.fabric.partition(address, is_active);
                }
                _ => {}
            }
        }
        if is_changed {
            self.follow();
        }
    }

    fn end_target(&mut self, is_power_cut: bool) {
        match is_power_cut {
            true => {
                self.target.cut_power();
                self.history.power_cut();
            }
            false => self.target.crash(),
        }
        self.network.end_target(!is_power_cut);
    }

    /// Sets what lasts, from the troubles that are there now.
    fn follow(&mut self) {
        let troubles = self.plan.troubles.iter().zip(&self.active);
        let active: Vec<_> = troubles
            .filter(|(_, is_active)| **is_active)
            .map(|(trouble, _)| trouble.fault)
            .collect();
        let is_unplugged = active.contains(&Fault::Unplug);
        if !is_unplugged {
            self.fabric.plug(target::ADDRESS);
        }
        if !self.target.is_running() && !active.iter().any(|fault| fault.ends_target()) {
            self.network.listen(self.target.start(self.plan.workers));
            if is_unplugged {
                self.fabric.unplug(target::ADDRESS);
            }
        }
        self.network.is_stalled = active.contains(&Fault::StallTcp);
        self.network.is_narrow = active.contains(&Fault::NarrowTcp);
        let disks = &mut self.target.faults;
        *disks = crate::target::DiskFaults::default();
        disks.is_stalled = active.contains(&Fault::StallDisks);
        let mut wire = FaultConfig::default();
        for fault in active {
            match fault {
                Fault::FailDisks(probability) => disks.failure = probability,
                Fault::ShortTransfers(probability) => disks.short = probability,
                Fault::Wire {
                    loss,
                    duplication,
                    corruption,
                    reorder,
                } => {
                    let seed = self.plan.seed;
                    wire = FaultConfig::percent(seed, loss, duplication, corruption, reorder);
                }
                _ => {}
            }
        }
        self.fabric.set_faults(wire);
    }
}

/// The shortest step of the clock, for what is due and does nothing.
const TICK: Duration = Duration::from_micros(1);
