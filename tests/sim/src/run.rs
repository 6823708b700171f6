//! A single run of a plan.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::fmt;
use std::net::IpAddr;
use std::rc::Rc;
use std::time::{Duration, Instant};

use fastrand::Rng;
use riser_initiator::engine::Engine;
use riser_scsi::srp::TargetPortId;
use riser_target::worker::mail::Snapshot;
use riser_tests::history::{History, Port};
use riser_transport::loopback::{Delay, Fabric, FabricConfig};
use riser_transport::roce::fault::FaultConfig;
use tracing::debug;

use crate::administrator::Administrator;
use crate::caught::caught;
use crate::cheat::{Cheat, Sniffer, Surroundings};
use crate::disks::DiskFault;
use crate::exchange::{self, Disks};
use crate::executor::Executor;
use crate::flood::Flood;
use crate::hog::Hog;
use crate::initiator::{self, Dialed, Heritage, Initiator, User, Verdict};
use crate::leaks::{self, Guard};
use crate::memory::Meter;
use crate::model::Model;
use crate::nics::{NicFault, Place};
use crate::plan::{Fault, Plan, ProcessFault, Protocol, Trouble};
use crate::process::{EndKind, Ended};
use crate::rival::Rival;
use crate::target::{self, Target};
use crate::tcp::{Delays, Listeners, Network};
use crate::watcher::{Ledger, Watcher};
use crate::{coverage, events, foreign, nics, pulse};

/// Virtual time after the last fault in which all commands must complete.
pub const PATIENCE: Duration = Duration::from_secs(600);

/// Maximum number of steps: a run that exceeds it makes no progress and does not advance the clock.
const STEPS: u64 = 30_000_000;

/// Trouble index for the user of a replaced unit, which is larger than that of any twin.
const EXCHANGE: usize = usize::MAX;

/// Lowest initiator number for twins.
const TWINS: usize = 50;

/// The outcome of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Outcome {
    /// Number of packets on the RDMA network.
    pub packets: u64,
    /// Number of bytes received over TCP.
    pub bytes: u64,
    /// Number of steps.
    pub steps: u64,
    /// Virtual time.
    pub time: Duration,
    /// Number of allocating calls and of completions, for devices with a fault of one of these.
    pub counted: [usize; 2],
    /// Hash of all bytes on both networks and of the packet times.
    pub trace: u64,
}

/// A failed run.
#[derive(Clone, Debug)]
pub struct Failure {
    /// The failed plan.
    pub plan: Plan,
    /// Time since the start of the run.
    pub at: Duration,
    /// Reason for the failure.
    pub why: String,
}

impl Failure {
    /// Returns a text that is identical for similar failures: the first words of the reason,
    /// without numbers.
    #[must_use]
    pub fn kind(&self) -> String {
        let words = self.why.split(' ').take(3).collect::<Vec<_>>().join(" ");
        words.replace(|c: char| c.is_ascii_digit(), "")
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}\nat {:?}: {}", self.plan, self.at, self.why)
    }
}

/// All participants of a run.
struct World {
    plan: Plan,
    rng: Rng,
    fabric: Fabric,
    target: Target,
    network: Network,
    initiators: Vec<Initiator>,
    rivals: Vec<Rival>,
    cheats: Vec<Cheat>,
    flood: Option<Flood>,
    hogs: Vec<Hog>,
    /// Visible changes, and the watchers that check them.
    ledger: Rc<RefCell<Ledger>>,
    watchers: Vec<Watcher>,
    administrator: Administrator,
    /// Time when the process exits because a worker has failed.
    failed: Option<Instant>,
    /// Twins of initiators, by trouble.
    twins: BTreeMap<usize, Initiator>,
    executor: Executor,
    dialed: Dialed,
    verdict: Verdict,
    history: Rc<History>,
    model: Rc<Model>,
    /// Histories of private units.
    private: Vec<Rc<History>>,
    /// Histories of the disks that replace the disk of a unit.
    exchanged: Disks,
    guard: Guard,
    meter: Meter,
    /// Reports of idle workers before the first session: the baseline for leaks.
    fresh: Vec<Snapshot>,
    steps: u64,
    /// Active troubles.
    active: Vec<bool>,
    /// SRP target port.
    port: TargetPortId,
    /// Set if a trouble has started or ended.
    is_changed: bool,
}

/// Runs a plan.
///
/// # Errors
/// Returns [`Failure`] if there is a bug in the programs or in the simulator.
pub fn run(plan: &Plan) -> Result<Outcome, Box<Failure>> {
    let _running = pulse::Running::new(plan.seed);
    riser_memory::simulated::addresses(|| run_here(plan))
}

fn run_here(plan: &Plan) -> Result<Outcome, Box<Failure>> {
    let fabric = Fabric::new(FabricConfig {
        seed: plan.seed,
        latency: plan.latency,
        socket_room: plan.socket_room,
        segments: plan.segments,
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
    let run = || match &plan.foreign {
        Some(traits) => foreign::run(plan, traits, fabric.clone()),
        None => World::new(plan, fabric.clone()).run(),
    };
    caught(run).flatten().map_err(failed)
}

impl World {
    fn new(plan: &Plan, fabric: Fabric) -> Self {
        let mut rng = Rng::with_seed(plan.seed ^ 0x5eed);
        let meter = Meter::begin(plan);
        let listeners = Listeners::default();
        let target = Target::new(plan, &fabric, &listeners, &mut rng);
        let shared = target.shared().expect("it runs");
        let port = shared.registry.catalog().targets[0].portals[0].target_port();
        let dialed = Dialed::default();
        let initiators = plan.initiators.iter().copied().enumerate();
        let initiators = initiators.map(|one| {
            let first = Heritage {
                port: rng.u64(..),
                guid: None,
                recovers: false,
                cache: None,
                moves: 0,
            };
            Initiator::new(one, port, &fabric, &dialed, first, (plan, &mut rng))
        });
        let initiators = initiators.collect();
        let guard = Guard::new(plan.private_units);
        let (tap, paths) = (guard.clone(), plan.paths);
        let sniffer = Sniffer::default();
        let surroundings = Surroundings {
            fabric: fabric.clone(),
            dialed: dialed.clone(),
            port: target.port_of_cheats().unwrap_or(port),
            honest: port,
            hosts: (plan.initiators.len(), plan.rivals.len()),
            sniffer: sniffer.clone(),
        };
        let sniffer = (!plan.cheats.is_empty()).then_some(sniffer);
        let network_sniffer = sniffer.clone();
        fabric.tap(move |from, to, bytes| {
            if let Some(sniffer) = &network_sniffer {
                sniffer.record_packet(from.ip(), to.ip(), bytes);
            }
            let mut addresses = (0..paths).map(target::rdma_address);
            if addresses.any(|address| address == from.ip()) {
                tap.look_at_packet(from, to, bytes);
            }
        });
        let history = || history_of(plan);
        let owners = plan.initiators.iter().filter(|_| plan.private_units);
        let cheats = plan.cheats.iter().copied().enumerate();
        // Uses another sequence of random numbers, as in the plan.
        let mut chance = Rng::with_seed(plan.seed ^ 0xc4ea7);
        let cheats = cheats.map(|cheat| Cheat::new(cheat, &surroundings, chance.fork()));
        let verdict = Verdict::default();
        let ledger = Ledger::new(target.layout.visible_units(), fabric.now());
        let ledger = Rc::new(RefCell::new(ledger));
        let model = Rc::new(Model::new(plan.knowledge()));
        let mut chance = Rng::with_seed(plan.seed ^ 0xad_717);
        let watcher = |index| {
            let more = (plan.is_quiet(), fabric.now(), chance.fork());
            Watcher::new(index, &ledger, &verdict, &dialed, more)
        };
        let watchers = if plan.is_administered() { 2 } else { 0 };
        Self {
            watchers: (0..watchers).map(watcher).collect(),
            administrator: Administrator::new(plan, &ledger, &model, fabric.now()),
            ledger,
            failed: None,
            flood: None,
            hogs: Vec::new(),
            cheats: cheats.collect(),
            twins: BTreeMap::new(),
            history: history(),
            private: owners.map(|_| history()).collect(),
            model,
            active: vec![false; plan.troubles.len()],
            plan: plan.clone(),
            rng,
            fabric,
            target,
            network: Network::new(listeners, guard.clone(), sniffer),
            guard,
            exchanged: Disks::default(),
            initiators,
            rivals: Vec::new(),
            executor: Executor::default(),
            dialed,
            verdict,
            meter,
            fresh: Vec::new(),
            steps: 0,
            port,
            is_changed: false,
        }
    }

    fn user(&self, index: usize) -> User {
        User {
            is_quiet: self.plan.is_quiet_for(index),
            is_prompt: self.plan.is_prompt_for(index),
            ..self.user_of(leaks::shared_port(1 + index as u16))
        }
    }

    fn user_of(&self, port: Port) -> User {
        User {
            port,
            history: Rc::clone(&self.history),
            is_cached: self.plan.write_cache,
            is_quiet: self.plan.is_quiet(),
            model: Some(Rc::clone(&self.model)),
            is_prompt: self.plan.is_prompt(),
            max_latency: self.plan.max_latency(),
            is_alone: self.plan.is_alone(),
            keeps_protection: self.plan.keeps_protection(),
            begun: Cell::default(),
            verdict: Rc::clone(&self.verdict),
        }
    }

    /// Returns the user of the private unit of an initiator, if any.
    fn private_user(&self, index: usize) -> Option<User> {
        let history = Rc::clone(self.private.get(index)?);
        Some(User {
            port: leaks::private_port(index),
            history,
            // The next process of an initiator only keeps the cache generation of one unit.
            is_cached: false,
            model: None,
            ..self.user(index)
        })
    }

    /// Runs the world: first with faults, then without, and finally checks all blocks.
    fn run(mut self) -> Result<Outcome, String> {
        self.fresh = self.reports()?;
        for index in 0..self.initiators.len() {
            self.start_initiator(index);
        }
        self.start_rivals();
        self.start_exchange();
        if self.plan.flood > 0 {
            let mut chance = Rng::with_seed(self.plan.seed ^ 0x0f10_0d5e ^ 1);
            let now = self.fabric.now();
            let flood = Flood::new(self.plan.flood, &self.dialed, now, &mut chance);
            self.flood = Some(flood);
        }
        let healed = self.plan.healed();
        self.start_hogs(healed);
        self.run_until("all commands have ended", healed + PATIENCE, |world| {
            world.executor.is_empty()
                && world.rivals.iter().all(Rival::is_over)
                && world.flood.as_ref().is_none_or(Flood::is_over)
                && world.hogs.iter().all(Hog::is_over)
                && world.fabric.elapsed() >= healed
                && !world.active.contains(&true)
                && !world.initiators.iter().any(|one| one.is_leaving)
                && world
                    .administrator
                    .is_done(&world.target, world.fabric.now())
        })?;
        self.check_credit()?;
        // A disk reports a loss with the next flush, which may have been after the end of the
        // fault.
        let mut faults = self.plan.troubles.iter().map(|trouble| trouble.fault);
        if faults.any(Fault::fails_disks) {
            self.clear_failures();
        }
        let unwritten = Rc::new(RefCell::new(None));
        for index in 0..self.initiators.len() {
            let units = self.initiators[index].opened.take();
            let status = units[0].1.session().status();
            if self.plan.is_quiet_for(index) && status.reconnects() > 0 {
                return Err(format!("a quiet day, and {:?}", status.last_down()));
            }
            if self.plan.is_quiet() && status.stale() > 0 {
                return Err(format!("no faults, and {} stale responses", status.stale()));
            }
            let (blocks, verdict) = (self.plan.blocks, Rc::clone(&self.verdict));
            let unwritten = Rc::clone(&unwritten);
            self.executor.spawn(async move {
                for (user, lun) in &units {
                    if let Err(error) = user.write_at_last(lun, 0).await {
                        *unwritten.borrow_mut() = Some(error);
                    }
                    for first in (0..blocks).step_by(8) {
                        let end = (first + 8).min(blocks);
                        if !user.read(lun, first..end).await {
                            let text = || format!("blocks {first} to {end} cannot be read");
                            verdict.borrow_mut().get_or_insert_with(text);
                        }
                    }
                }
                units[0].1.session().close().await;
            });
        }
        let limit = self.fabric.elapsed() + PATIENCE;
        self.run_until("all blocks were read", limit, |world| {
            world.executor.is_empty()
        })?;
        // The administrator must clear a failure that was just detected.
        if let Some(error) = unwritten.take().filter(|_| !self.target.has_failed()) {
            return Err(format!(
                "no fault is left, and block 0 cannot be written: {error}"
            ));
        }
        let now = self.fabric.now();
        for watcher in &mut self.watchers {
            watcher.look_at_all(now);
        }
        let limit = self.fabric.elapsed() + PATIENCE;
        let seen = self.run_until("watchers find all units ready", limit, |world| {
            let mut watchers = world.watchers.iter();
            watchers.all(|one| one.missing().is_empty())
        });
        seen.map_err(|why| {
            let missing = self.watchers.iter().map(Watcher::missing);
            format!("{why}; not ready: {:?}", missing.collect::<Vec<_>>())
        })?;
        for initiator in self.initiators.iter().chain(self.twins.values()) {
            let client = &initiator.client;
            let (free, all) = (client.free_bytes(), client.buffers().size());
            if free != all {
                return Err(format!("an initiator has only {free} of {all} bytes free"));
            }
            initiator.client.shutdown();
        }
        self.cheats.clear();
        self.flood = None;
        self.watchers.iter_mut().for_each(Watcher::end_session);
        self.is_changed = true;
        let limit = self.fabric.elapsed() + PATIENCE;
        let ended = self.run_until("all sessions have ended", limit, |world| {
            let initiators = world.initiators.iter().chain(world.twins.values());
            let mut engines = initiators.flat_map(|one| &one.engine);
            engines.all(Engine::is_over) && world.network.is_empty()
        });
        ended.map_err(|why| format!("{why}; remaining: {}", self.network))?;
        self.check_initiators()?;
        self.check_leftovers()?;
        let trace = self.fabric.trace() ^ self.network.trace().rotate_left(1);
        Ok(Outcome {
            trace,
            packets: self.fabric.packets(),
            bytes: self.network.bytes(),
            steps: self.steps,
            time: self.fabric.elapsed(),
            counted: self.counted(),
        })
    }

    /// Stops counting calls and completions, and returns the numbers.
    fn counted(&self) -> [usize; 2] {
        let place = |trouble: &Trouble| match trouble.fault {
            Fault::Nic(place, fault) if fault.is_counted() => Some(place),
            _ => None,
        };
        let places = self.plan.troubles.iter().filter_map(place);
        let records = places.map(|place| self.fabric.take_record(self.address_of(place)));
        records.fold([0; 2], |[calls, completions], record| {
            [
                calls + record.calls.len(),
                completions + record.completions.len(),
            ]
        })
    }

    fn start_initiator(&mut self, index: usize) {
        let users = (0..self.plan.tasks).map(|_| (self.user(index), self.rng.fork()));
        let users: Vec<_> = users.collect();
        let private = self.private_user(index).map(|user| (user, self.rng.fork()));
        let work = self.initiators[index].start(users, private, &self.plan);
        self.executor.spawn(work);
    }

    /// Starts the user of the unit that is replaced, with another sequence of random numbers.
    fn start_exchange(&mut self) {
        // A reduced plan may not have this unit any more.
        if !self.plan.exchange || !self.plan.is_administered() {
            return;
        }
        let mut chance = Rng::with_seed(self.plan.seed ^ 0x0e8c_4a6e ^ 1);
        let protocols = [Protocol::Srp, Protocol::Iser, Protocol::Iscsi];
        let first = Heritage {
            port: chance.u64(..),
            guid: None,
            recovers: false,
            cache: None,
            moves: 0,
        };
        let one = Initiator::new(
            (exchange::NUMBER, protocols[chance.usize(..3)]),
            self.port,
            &self.fabric,
            &self.dialed,
            first,
            (&self.plan, &mut chance),
        );
        // Its sessions are closed when the unit is replaced, even without faults.
        let user = User {
            is_cached: false,
            is_quiet: false,
            is_prompt: self.plan.is_prompt() && !self.plan.may_lose_units(),
            is_alone: false,
            // The model is for the main unit.
            model: None,
            ..self.user(exchange::NUMBER)
        };
        let (plan, disks) = (self.plan.clone(), self.exchanged.clone());
        let new = move || history_of(&plan);
        let work = exchange::run_workload(&one, user, disks, (&self.plan, chance), new);
        self.executor.spawn(work);
        self.twins.insert(EXCHANGE, one);
    }

    fn start_rivals(&mut self) {
        for (index, plan) in self.plan.rivals.clone().into_iter().enumerate() {
            let user = self.user_of(leaks::shared_port(101 + index as u16));
            let seed = (self.fabric.now(), self.rng.fork());
            let user = (user, Rc::clone(&self.model));
            let rival = Rival::new((index, plan), user, &self.plan, &self.dialed, seed);
            self.rivals.push(rival);
        }
    }

    /// Starts the hogs, which leave when all disks work again.
    fn start_hogs(&mut self, healed: Duration) {
        let start = self.fabric.now();
        let until = start - self.fabric.elapsed() + healed;
        let mut chance = Rng::with_seed(self.plan.seed ^ 0x4096);
        let hogs = self.plan.hogs.iter().copied().enumerate();
        let hogs = hogs.map(|hog| Hog::new(hog, &self.dialed, (start, until), chance.fork()));
        self.hogs = hogs.collect();
    }

    /// Checks the request limits at SRP targets. While no command is in flight, initiators must
    /// have received all of them: the target returns the credit of an aborted command with another
    /// response, at the latest with the response to a ping.
    fn check_credit(&mut self) -> Result<(), String> {
        let limit = self.fabric.elapsed() + PATIENCE;
        let unreturned = |world: &Self| -> Vec<i64> {
            let engines = world.initiators.iter().flat_map(|one| &one.engine);
            engines.map(Engine::unreturned).collect()
        };
        let returned = self.run_until("all request limits are restored", limit, |world| {
            unreturned(world).iter().all(|units| *units == 0)
        });
        returned.map_err(|why| format!("{why}; missing at targets: {:?}", unreturned(self)))
    }

    /// Checks that initiators have released all resources after their sessions were closed.
    fn check_initiators(&self) -> Result<(), String> {
        let all = self.initiators.iter().chain(self.twins.values());
        match all.flat_map(Initiator::leftovers).next() {
            Some((what, count)) => Err(format!("an initiator still has {count} {what}")),
            None => Ok(()),
        }
    }

    /// Checks that the target has released all resources after all sessions were closed.
    fn check_leftovers(&mut self) -> Result<(), String> {
        let limit = self.fabric.elapsed() + PATIENCE;
        loop {
            let reports = self.reports()?;
            let leftovers = self.target.leftovers(&reports, &self.fresh);
            if leftovers.is_empty() {
                // Memory for sessions must also be released.
                return self
                    .meter
                    .check_usage(&self.target, &self.fabric, 0)
                    .map_or(Ok(()), Err);
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

    fn reports(&mut self) -> Result<Vec<Snapshot>, String> {
        let (snapshots, workers) = (self.target.request_snapshots(), self.target.workers());
        let limit = self.fabric.elapsed() + PATIENCE;
        let mut reports = Vec::new();
        self.run_until("all workers report", limit, |_| {
            reports.extend(snapshots.try_iter());
            reports.len() == workers
        })?;
        Ok(reports)
    }

    fn run_until(
        &mut self,
        what: &str,
        limit: Duration,
        mut is_so: impl FnMut(&Self) -> bool,
    ) -> Result<(), String> {
        while !is_so(self) {
            self.step();
            let verdict = self.verdict.borrow().clone();
            let verdict = verdict.or_else(|| self.guard.found());
            if let Some(why) = verdict.or_else(|| {
                self.meter
                    .check_usage(&self.target, &self.fabric, self.steps)
            }) {
                return Err(why);
            }
            if self.fabric.elapsed() > limit || self.steps > STEPS {
                return Err(format!("not in time: {what}; {}", self.under_way()));
            }
        }
        Ok(())
    }

    /// Describes pending work.
    fn under_way(&self) -> String {
        let is_leaving = |one: &&Initiator| one.is_leaving;
        let now = self.fabric.now();
        format!(
            "unfinished: {} tasks, {} rivals, {} troubles, {} leaving initiators{}{}",
            self.executor.len(),
            self.rivals.iter().filter(|one| !one.is_over()).count(),
            self.active.iter().filter(|is_active| **is_active).count(),
            self.initiators.iter().filter(is_leaving).count(),
            match self.administrator.is_done(&self.target, now) {
                true => "",
                false => ", an administrator",
            },
            match self.flood.as_ref().is_none_or(Flood::is_over) {
                true => "",
                false => ", a flood",
            },
        )
    }

    /// Runs each actor once, in random order. The clock advances if there was nothing to do.
    fn step(&mut self) {
        self.steps += 1;
        pulse::beat();
        events::set_time(self.fabric.elapsed());
        self.let_go();
        self.trouble();
        let now = self.fabric.now();
        let mut worked = self.control(now);
        // Including initiators that were started or stopped by a trouble.
        if worked || self.is_changed {
            self.network.note_activity(None);
        }
        self.is_changed = false;
        for watcher in &mut self.watchers {
            worked |= watcher.step(now);
        }
        worked |= self.flood.as_mut().is_some_and(|flood| flood.step(now));
        for hog in &mut self.hogs {
            worked |= hog.step(now);
        }
        let (workers, initiators) = (self.target.workers(), self.initiators.len());
        let (rivals, cheats) = (self.rivals.len(), self.cheats.len());
        let count = 3 + workers + initiators + rivals + cheats + self.twins.len();
        let mut order: Vec<usize> = (0..count).collect();
        self.rng.shuffle(&mut order);
        let turn = |one: &mut Initiator| one.engine.as_mut().is_some_and(|e| e.step(now));
        for actor in order {
            // Peers without a plain socket don't need this.
            let mut uses_socket = false;
            let mut active = None;
            let is_busy = match actor {
                0 => self.executor.turn() > 0,
                1 => {
                    for dial in self.dialed.take() {
                        self.network.connect(dial, &mut self.rng);
                    }
                    self.network.turn(now)
                }
                2 => self.target.turn_of_threads(now, &mut self.rng),
                n if n < 3 + workers => self.target.turn(n - 3, now, &mut self.rng),
                n => match n - 3 - workers {
                    n if n < initiators => {
                        (uses_socket, active) = (true, Some(self.initiators[n].address));
                        turn(&mut self.initiators[n])
                    }
                    n if n < initiators + rivals => self.rivals[n - initiators].step(now),
                    n if n < initiators + rivals + cheats => {
                        uses_socket = true;
                        self.cheats[n - initiators - rivals].step(now)
                    }
                    n => {
                        uses_socket = true;
                        let twin = self
                            .twins
                            .values_mut()
                            .nth(n - initiators - rivals - cheats);
                        twin.is_some_and(turn)
                    }
                },
            };
            if is_busy && uses_socket {
                self.network.note_activity(active);
            }
            worked |= is_busy;
        }
        if !worked {
            self.network.note_activity(None);
        }
        let soon = now + Duration::from_micros(self.rng.u64(1..=20));
        let next = match worked {
            true => soon,
            false => self
                .next_deadline()
                .map_or(now + LULL, |next| next.max(now + TICK)),
        };
        self.fabric.advance_to(next);
    }

    fn next_deadline(&self) -> Option<std::time::Instant> {
        let now = self.fabric.now();
        let start = now - self.fabric.elapsed();
        let engines = self.initiators.iter().chain(self.twins.values());
        let engines = engines.flat_map(|one| &one.engine);
        let engines = engines.filter_map(Engine::next_deadline);
        let troubles = self.plan.troubles.iter();
        let troubles = troubles.flat_map(|trouble| [start + trouble.from, start + trouble.until]);
        engines
            .chain(troubles.filter(|at| *at > now))
            .chain(self.fabric.next_arrival_after(now))
            .chain(self.network.next_arrival(now))
            .chain(self.target.next_deadline())
            .chain(self.rivals.iter().filter_map(Rival::next_deadline))
            .chain(self.cheats.iter().filter_map(Cheat::next_deadline))
            .chain(self.watchers.iter().filter_map(Watcher::next_deadline))
            .chain(self.flood.as_ref().and_then(Flood::next_deadline))
            .chain(self.hogs.iter().filter_map(Hog::next_deadline))
            .chain(self.administrator.next_deadline(&self.target, now))
            .chain(self.failed)
            .min()
    }

    /// Runs the control plane: exit of the process, and configuration changes.
    fn control(&mut self, now: Instant) -> bool {
        if self.failed.is_some_and(|at| at <= now) {
            self.failed = None;
            self.target.begin_end(EndKind::Failure);
        }
        let worked = match self.target.continue_ending(now, &self.history) {
            Ended::NotYet => false,
            Ended::Refused(why) => {
                coverage::note("process", "upgrade", "refused");
                debug!(why, "the upgrade is rejected");
                if !self.plan.may_fail_shutdown() {
                    self.blame(format!("an upgrade is rejected: {why}"));
                }
                true
            }
            Ended::Resumed(why) => {
                coverage::note("process", "upgrade", "undone");
                debug!(why, "the upgrade is undone");
                if self.plan.is_quiet() || !self.plan.may_fail_shutdown() {
                    self.blame(format!("an upgrade ends sessions and is undone: {why}"));
                }
                true
            }
            ended => {
                self.on_end_of_process(&ended, now);
                true
            }
        };
        let changed = self.administrator.step(&mut self.target, now);
        changed.map_or_else(
            |why| {
                self.blame(why);
                true
            },
            |changed| worked | changed,
        )
    }

    fn blame(&self, why: String) {
        self.verdict.borrow_mut().get_or_insert(why);
    }

    /// Called when the process has exited.
    fn on_end_of_process(&mut self, ended: &Ended, now: Instant) {
        match ended {
            Ended::HandedOver => {
                coverage::note("process", "end", "handed over");
                if self.plan.is_quiet() {
                    self.blame("an upgrade is accepted while a disk hangs".to_owned());
                }
                self.model.hand_over();
            }
            Ended::Failed(why) => {
                coverage::note("process", "end", "failed");
                debug!(why, "the shutdown failed");
                if !self.plan.may_fail_shutdown() || self.plan.may_only_hang() {
                    self.blame(format!("the shutdown failed: {why}"));
                }
                self.ledger.borrow_mut().lose_memory(self.fabric.now());
                self.model.lose_power();
                self.network.end_target(true);
            }
            _ => {
                coverage::note("process", "end", "in good order");
                self.ledger.borrow_mut().lose_memory(self.fabric.now());
                self.model.lose_power();
            }
        }
        self.administrator.on_end_of_process(&self.target, now);
        self.follow();
    }

    /// Starts a fault of the process or its threads.
    fn process_fault(&mut self, fault: ProcessFault) {
        match fault {
            ProcessFault::Restart => self.target.begin_end(EndKind::Restart),
            ProcessFault::Upgrade => self.target.begin_end(EndKind::Upgrade { fails: false }),
            ProcessFault::FailedUpgrade => {
                self.target.begin_end(EndKind::Upgrade { fails: true });
            }
            ProcessFault::FailWorker(index) => {
                if self.target.fail_worker(index % self.target.workers()) {
                    let soon = Duration::from_micros(self.rng.u64(..5_000));
                    self.failed = Some(self.fabric.now() + soon);
                }
            }
            ProcessFault::StallWorker(_) => {}
        }
    }

    /// Starts and ends troubles.
    fn trouble(&mut self) {
        // The baseline must include all devices.
        if self.fresh.is_empty() {
            return;
        }
        let elapsed = self.fabric.elapsed();
        let mut is_changed = false;
        for at in 0..self.plan.troubles.len() {
            let trouble = self.plan.troubles[at];
            let is_active = (trouble.from..trouble.until).contains(&elapsed);
            if is_active == self.active[at] {
                continue;
            }
            (self.active[at], is_changed) = (is_active, true);
            if is_active {
                coverage::note("fault", trouble.fault.kind(), "begins");
            }
            debug!(fault = ?trouble.fault, "{}", if is_active { "begins" } else { "ends" });
            match trouble.fault {
                Fault::CutTcp(probability) if is_active => {
                    self.network.cut(probability, &mut self.rng);
                }
                Fault::CrashTarget if is_active => self.end_target(false),
                Fault::PowerCut if is_active => self.end_target(true),
                Fault::FailDisks(_) if !is_active => self.clear_failures(),
                Fault::Disk(fault) => self.disk_fault(fault, is_active),
                Fault::KillInitiator { index, vanishes } => match is_active {
                    true => self.kill_initiator(index, vanishes),
                    false => self.revive_initiator(index),
                },
                Fault::RestartInitiator(index) => match is_active {
                    true => self.initiators.get_mut(index).map_or((), Initiator::leave),
                    false => self.revive_initiator(index),
                },
                Fault::Nic(Place::Initiator(index), NicFault::Unplug) if !is_active => {
                    self.replace_device(index);
                }
                Fault::Nic(place, fault) if is_active => {
                    fault.strike(self.address_of(place), &self.fabric);
                }
                Fault::MoveInitiator(index) => match is_active {
                    true => self.kill_initiator(index, true),
                    false => self.move_initiator(index),
                },
                Fault::Twin(index) => match is_active {
                    true => self.start_twin(at, index),
                    false => self.end_twin(at),
                },
                Fault::Admin(change) if is_active => self.administrator.on_begin(change),
                Fault::Process(fault) if is_active => self.process_fault(fault),
                _ => {}
            }
        }
        if is_changed {
            self.is_changed = true;
            self.follow();
        }
    }

    /// Returns the current RDMA address of a place.
    fn address_of(&self, place: Place) -> IpAddr {
        match place {
            Place::Path(path) => target::rdma_address(path),
            Place::Initiator(index) => match self.initiators.get(index) {
                Some(one) => one.address,
                None => initiator::address(index),
            },
        }
    }

    /// Returns the current TCP address of a place.
    fn tcp_address_of(&self, place: Place) -> IpAddr {
        match place {
            Place::Path(path) => target::tcp_address(path).ip(),
            Place::Initiator(_) => self.address_of(place),
        }
    }

    /// Kills the process of an initiator if it exists.
    fn kill_initiator(&mut self, index: usize, vanishes: bool) {
        if index >= self.initiators.len() {
            return;
        }
        let address = self.initiators[index].address;
        match vanishes {
            true => self.network.vanish(address),
            false => self.network.kill(address),
        }
        self.initiators[index].die();
    }

    /// Called when the device of an initiator is back, which requires a new process.
    fn replace_device(&mut self, index: usize) {
        if self
            .plan
            .initiators
            .get(index)
            .is_none_or(|one| *one == Protocol::Iscsi)
        {
            return;
        }
        self.fabric.plug(self.initiators[index].address);
        self.kill_initiator(index, false);
        self.revive_initiator(index);
    }

    /// Stops initiator processes that have closed all sessions, and starts the next ones.
    fn let_go(&mut self) {
        for index in 0..self.initiators.len() {
            let one = &mut self.initiators[index];
            if !one.is_leaving {
                continue;
            }
            match &one.engine {
                Some(engine) if engine.is_over() => one.engine = None,
                Some(_) => {}
                // Users have had one more step to process the completion of their commands. The
                // next process must recover if there are incomplete commands, which it has to
                // fence, or a write cache, because its flushes would cover earlier writes that the
                // cache may have lost.
                None => {
                    one.is_leaving = false;
                    let all = self.private.iter().chain([&self.history]);
                    let is_lost = all.map(|one| one.lost()).sum::<usize>() > 0;
                    one.heritage.recovers = is_lost || self.plan.write_cache;
                    debug!(
                        index,
                        one.heritage.recovers, "an initiator's process has ended"
                    );
                    self.revive_initiator(index);
                }
            }
        }
    }

    /// Starts the process of an initiator again, unless it is running or stopped by another
    /// trouble.
    fn revive_initiator(&mut self, index: usize) {
        let mut troubles = self.plan.troubles.iter().zip(&self.active);
        let is_dead =
            troubles.any(|(trouble, active)| *active && trouble.fault.ends_initiator(index));
        if is_dead
            || self
                .initiators
                .get(index)
                .is_none_or(|one| one.engine.is_some() || one.is_leaving)
        {
            return;
        }
        let heritage = self.initiators[index].heritage;
        self.initiators[index] = Initiator::new(
            (index, self.plan.initiators[index]),
            self.port,
            &self.fabric,
            &self.dialed,
            heritage,
            (&self.plan, &mut self.rng),
        );
        self.network.on_host_up(self.initiators[index].address);
        self.start_initiator(index);
    }

    /// Starts or ends a disk fault.
    fn disk_fault(&mut self, fault: DiskFault, is_active: bool) {
        match fault {
            DiskFault::FailOnce(kind) => self.target.faults.fail_once(kind, is_active),
            DiskFault::LoseWriteBack(share) if is_active => self.target.begin_loss(share),
            DiskFault::DamageBlock(which) => self.target.damage(which, is_active),
            _ => {}
        }
        if !is_active {
            self.clear_failures();
        }
    }

    /// An administrator clears disk failures when no more faults are active.
    fn clear_failures(&mut self) {
        let troubles = self.plan.troubles.iter().zip(&self.active);
        let mut active = troubles.filter(|(_, is_active)| **is_active);
        if !active.any(|(trouble, _)| trouble.fault.fails_disks()) {
            self.target.clear_failures(&self.history);
        }
    }

    /// The host of an initiator returns with another address, if it exists.
    fn move_initiator(&mut self, index: usize) {
        if let Some(one) = self.initiators.get_mut(index) {
            one.heritage.moves += 1;
            self.revive_initiator(index);
        }
    }

    /// Starts another initiator with the same names.
    fn start_twin(&mut self, at: usize, index: usize) {
        let Some(protocol) = self.plan.initiators.get(index).copied() else {
            return;
        };
        let first = &self.initiators[index];
        let opened = first.opened.borrow();
        let guid = opened.first().map(|(_, lun)| lun.session().port_guid());
        let heritage = Heritage {
            recovers: false,
            guid: guid.or(first.heritage.guid),
            cache: None,
            ..first.heritage
        };
        drop(opened);
        // A unique address, and a separate port in the history.
        let number = TWINS + at;
        let twin = Initiator::new(
            (number, protocol),
            self.port,
            &self.fabric,
            &self.dialed,
            heritage,
            (&self.plan, &mut self.rng),
        );
        let users = (0..self.plan.tasks).map(|_| (self.user(number), self.rng.fork()));
        let users: Vec<_> = users.collect();
        self.executor.spawn(twin.start(users, None, &self.plan));
        self.twins.insert(at, twin);
    }

    fn end_twin(&mut self, at: usize) {
        if let Some(mut twin) = self.twins.remove(&at) {
            self.network.kill(twin.address);
            twin.die();
        }
    }

    fn end_target(&mut self, is_power_cut: bool) {
        match is_power_cut {
            true => {
                self.target.cut_power(&self.history);
                for history in self.private.iter().chain([&self.history]) {
                    history.power_cut();
                }
                self.exchanged.power_cut();
            }
            false => self.target.crash(&self.history),
        }
        self.model.lose_power();
        self.network.end_target(!is_power_cut);
        let now = self.fabric.now();
        self.ledger.borrow_mut().lose_memory(now);
        self.administrator.on_end_of_process(&self.target, now);
        self.failed = None;
    }

    /// Applies permanent faults from the active troubles.
    fn follow(&mut self) {
        let troubles = self.plan.troubles.iter().zip(&self.active);
        let active: Vec<_> = troubles
            .filter(|(_, is_active)| **is_active)
            .map(|(trouble, _)| trouble.fault)
            .collect();
        self.target.wake();
        self.administrator.follow(&active);
        let workers = self.target.workers();
        let stalled = active.iter().filter_map(|fault| match fault {
            Fault::Process(ProcessFault::StallWorker(index)) => Some(index % workers),
            _ => None,
        });
        self.target.stalled = stalled.collect();
        if !self.target.is_running() && !active.iter().any(|fault| fault.ends_target()) {
            self.network.start_target();
            // Devices are present when the target starts.
            for path in 0..self.plan.paths {
                self.fabric.plug(target::rdma_address(path));
            }
            self.target.begin();
        }
        self.network.is_stalled = active.contains(&Fault::StallTcp);
        self.network.is_narrow = active.contains(&Fault::NarrowTcp);
        let paths = (0..self.plan.paths).map(Place::Path);
        let tcp = paths.map(|at| (self.tcp_address_of(at), at.blocked(&active)));
        let own = (0..self.initiators.len()).map(Place::Initiator);
        let own = own.map(|at| (self.tcp_address_of(at), at.blocked(&active)));
        let blocked = tcp.chain(own).collect();
        self.network.partition(blocked);
        self.follow_devices(&active);
        let stalled = active.iter().filter_map(|fault| match fault {
            Fault::Disk(DiskFault::StallDisk(number)) => Some(*number),
            _ => None,
        });
        let hung = active.iter().filter_map(|fault| match fault {
            Fault::Disk(DiskFault::HangDisk(number)) => Some(*number),
            _ => None,
        });
        let (mut delay, mut saving) = (None, None);
        let disks = &mut self.target.faults;
        disks.reset();
        disks.is_stalled = active.contains(&Fault::StallDisks);
        self.target.stall_disks(stalled);
        self.target.hang_disks(hung);
        let disks = &mut self.target.faults;
        let mut wire = FaultConfig::default();
        for fault in active {
            match fault {
                Fault::Delay { share, most } => delay = Some((share, most)),
                Fault::FailSaves(failure) => saving = Some(failure),
                Fault::FailDisks(probability) => disks.failure = probability,
                Fault::Disk(fault) => disks.add(fault),
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
        self.target.kept.saves.set(saving);
        self.hold(delay);
    }

    /// Sets the share of packets that the networks will delay, and the maximum delay.
    fn hold(&mut self, delay: Option<(f64, Duration)>) {
        // A new sequence of random numbers each time, which is the same if the run is repeated.
        let seed = self.plan.seed ^ 0x1a7e ^ self.steps;
        self.fabric.hold(delay.map(|(share, most)| Delay {
            seed,
            rate: (share * 1e6) as u32,
            most,
        }));
        self.network.delays = delay.map(|(share, most)| Delays {
            random: Rng::with_seed(seed),
            share,
            most,
        });
    }
}

impl World {
    /// Applies permanent faults of RDMA devices. They have no effect on initiators that were
    /// removed.
    fn follow_devices(&self, active: &[Fault]) {
        for path in (0..self.plan.paths).map(Place::Path) {
            nics::follow((path, self.address_of(path)), active, &self.fabric);
        }
        for index in 0..self.initiators.len() {
            let place = Place::Initiator(index);
            for moves in 0..initiator::ADDRESSES {
                let at = initiator::address_after(index, moves as u8);
                let is_here = at == self.address_of(place);
                let active = if is_here { active } else { &[] };
                nics::follow((place, at), active, &self.fabric);
            }
        }
    }
}

/// Creates the history of a disk.
fn history_of(plan: &Plan) -> Rc<History> {
    let history = History::new(plan.blocks as usize);
    let history = history.with_repeats().with_power_cuts();
    Rc::new(match plan.paths {
        1 => history,
        _ => history.with_paths(),
    })
}

/// Minimum step of the clock, for an action that is due but does nothing.
const TICK: Duration = Duration::from_micros(1);

/// Step of the clock while no action is due.
const LULL: Duration = Duration::from_millis(1);
