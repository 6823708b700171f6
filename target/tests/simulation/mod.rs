//! Simulates a worker with in-memory ring, disk, TCP sockets and threads. The seed determines the
//! order of events.

#![allow(dead_code, reason = "each test uses a part of it")]

use std::cell::RefCell;
use std::io::{self, Read, Write};
use std::net::SocketAddr;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use riser_memory::simulated::fail_after;
use riser_reactor::simulated::{Disk, Kernel, Listener, Operation, Outcome, Peer, Threads};
use riser_reactor::{Next, Op, Ring, RingConfig};
use riser_target::backend::{OpenedStores, Store};
use riser_target::config::Config;
use riser_target::host::{Host, SimulatedHost};
use riser_target::server::{Keepers, build_shared_on};
use riser_target::worker::{TcpListener, WorkerError};
use riser_transport::loopback::{Endpoint, Fabric, FabricConfig};
use riser_transport::verbs::Provider;

use crate::world::{SERVER, World};

pub(crate) const IQN: &str = "iqn.2026-01.org.example:disk";

/// Selects the error of an operation.
pub(crate) type ErrorOf = Box<dyn Fn(Op) -> i32>;

/// The world and all parts controlled by a seed.
pub(crate) struct Simulation {
    pub(crate) world: World,
    pub(crate) kernel: Kernel,
    pub(crate) threads: Threads,
    pub(crate) listener: Listener,
    pub(crate) disk: Disk,
    random: u64,
    /// Number of completed thread jobs.
    pub(crate) jobs: usize,
    /// Number of iterations after which the worker would have slept.
    pub(crate) sleeps: usize,
    /// Number of completed ring operations.
    pub(crate) ended: usize,
    /// The number of the operation that should fail, in order of completion, and its error.
    pub(crate) fails: Option<(usize, ErrorOf)>,
    /// The failed operation, and its error.
    pub(crate) failed: Option<(Operation, i32)>,
    /// Number of memory mappings before one fails.
    pub(crate) mappings_left: usize,
    /// Virtual time per step.
    pub(crate) pace: Duration,
    /// Set while the worker is running: a panic is caused by the worker, and not by a check in a
    /// test.
    pub(crate) is_working: bool,
}

impl Simulation {
    pub(crate) fn new(seed: u64) -> Self {
        let fabric = Fabric::new(FabricConfig {
            seed,
            ..FabricConfig::default()
        });
        let (simulation, unserved) = Self::on(fabric, seed, usize::MAX).unwrap();
        assert!(unserved.is_empty(), "{unserved:?}");
        simulation
    }

    /// Creates a worker on this wire. The memory mapping after this number of mappings fails.
    pub(crate) fn on(
        fabric: Fabric,
        seed: u64,
        mappings_left: usize,
    ) -> Result<(Self, Vec<String>), WorkerError> {
        let text = format!(
            "backends:\n  d: {{ kind: file, path: /in/memory, size: 16MiB, create: true, thin: true }}\n\
             targets:\n  - name: t\n    iqn: {IQN}\n    portals:\n      \
             - {{ protocol: srp, listen: \"{SERVER}:5555\" }}\n      \
             - {{ protocol: iser, listen: \"{SERVER}:3260\" }}\n      \
             - {{ protocol: iscsi, listen: \"{SERVER}:3260\" }}\n    \
             luns: {{ 0: {{ backend: d }} }}\n    access: open\nworkers: {{ count: 1 }}\n"
        );
        let config = Config::parse(&text, "test.yaml").unwrap();
        let threads = Threads::default();
        let host: Arc<dyn Host> = Arc::new(SimulatedHost::new(threads.clone(), fabric.now()));
        let disk = Disk::new(0);
        let mut opened = OpenedStores::default();
        let backend = &config.backends[0];
        let store = Store::on_disk(&backend.spec, &disk, Arc::clone(&host));
        opened.insert(&backend.name, &backend.spec, store);
        let shared = build_shared_on(&config, Keepers::default(), opened).unwrap();
        let (ring, kernel) = Ring::simulated(RingConfig::default()).unwrap();
        let listener = Listener::new(SocketAddr::new(SERVER, 3260));
        let sockets = vec![TcpListener::simulated(&listener)];
        fail_after(Some(mappings_left));
        let started = World::start(fabric, shared, ring, sockets, (seed, host));
        let mappings_left = fail_after(None).unwrap_or(usize::MAX);
        let (world, unserved) = started?;
        let simulation = Self {
            world,
            kernel,
            threads,
            listener,
            disk,
            random: seed,
            jobs: 0,
            sleeps: 0,
            ended: 0,
            fails: None,
            failed: None,
            mappings_left,
            pace: Duration::from_micros(10),
            is_working: false,
        };
        Ok((simulation, unserved))
    }

    fn draw(&mut self, below: usize) -> usize {
        // Same as in `world`.
        self.random = self
            .random
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1);
        (self.random >> 33) as usize % below
    }

    /// Runs one step: an iteration of the worker, one completion, and one job.
    pub(crate) fn step(&mut self, dev: &mut Endpoint) {
        let now = self.world.fabric.now();
        dev.progress(now);
        self.is_working = true;
        fail_after(Some(self.mappings_left));
        let worked = self.world.worker.step(now).unwrap();
        let next = self.world.worker.park(worked).unwrap();
        // Only a single mapping fails.
        self.mappings_left = fail_after(None).unwrap_or(usize::MAX);
        self.is_working = false;
        self.sleeps += usize::from(matches!(next, Next::Park(_)));
        let mut ready = self.kernel.operations();
        ready.retain(|operation| operation.is_ready);
        if !ready.is_empty() {
            let chosen = self.draw(ready.len());
            self.end(ready.swap_remove(chosen));
        }
        if let [thread, ..] = self.threads.runnable()[..] {
            self.threads.step(thread);
            self.jobs += 1;
        }
        dev.progress(now);
        let later = now + self.pace;
        self.world.fabric.advance_to(later);
    }

    /// Completes a ring operation, either successfully or with an error if it's due.
    fn end(&mut self, operation: Operation) {
        let fails = self.fails.as_ref();
        let fails = fails.filter(|(index, _)| *index == self.ended);
        let errno = fails.map(|(_, errno)| errno(operation.op));
        let outcome = errno.map_or(Outcome::Whole, Outcome::Failed);
        if self.kernel.complete(operation.id, outcome).is_some() {
            self.ended += 1;
            self.failed = errno.map(|errno| (operation, errno)).or(self.failed.take());
        }
    }
}

/// A TCP connection with its other end in the simulation, and the received data.
pub(crate) struct Wire {
    pub(crate) simulation: Rc<RefCell<Simulation>>,
    pub(crate) peer: Peer,
    pub(crate) idle: Endpoint,
    pub(crate) received: Rc<RefCell<Vec<u8>>>,
}

impl Wire {
    /// Runs the simulation until `done` returns a value, for up to one second of virtual time.
    fn until<T>(&mut self, mut done: impl FnMut(&Peer) -> Option<T>) -> io::Result<T> {
        for _ in 0..100_000 {
            if let Some(result) = done(&self.peer) {
                return Ok(result);
            }
            self.simulation.borrow_mut().step(&mut self.idle);
        }
        Err(io::ErrorKind::TimedOut.into())
    }
}

/// Same as the kernel when a socket is closed.
impl Drop for Wire {
    fn drop(&mut self) {
        self.peer.close();
    }
}

impl Read for Wire {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        let most = buf.len();
        let bytes = self.until(|peer| {
            let bytes = peer.read_bytes(most);
            (!bytes.is_empty() || peer.is_closed()).then_some(bytes)
        })?;
        buf[..bytes.len()].copy_from_slice(&bytes);
        self.received.borrow_mut().extend(&bytes);
        Ok(bytes.len())
    }
}

impl Write for Wire {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.until(|peer| Some(peer.deliver(bytes)).filter(|n| *n > 0))
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Returns the number of descriptors and threads of this process.
pub(crate) fn footprint() -> (usize, usize) {
    let count = |path| std::fs::read_dir(path).unwrap().count();
    (count("/proc/self/fd"), count("/proc/self/task"))
}
