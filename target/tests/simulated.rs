//! A worker in one thread under a virtual clock, on a ring, a disk, TCP sockets and threads in
//! memory: one seed gives one trace.

mod world;

use std::cell::RefCell;
use std::io::{self, Read, Write};
use std::net::SocketAddr;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use riser_reactor::simulated::{Disk, Kernel, Listener, Outcome, Peer, Threads};
use riser_reactor::{Next, Ring, RingConfig};
use riser_target::backend::{OpenedStores, Store};
use riser_target::config::Config;
use riser_target::host::{Host, SimulatedHost};
use riser_target::server::{Keepers, build_shared_on};
use riser_target::worker::TcpListener;
use riser_test_peers::mini::{Mini, login_req};
use riser_test_peers::pdus::cdb10;
use riser_test_peers::tcp::Client;
use riser_transport::loopback::{Endpoint, Fabric, FabricConfig};
use riser_transport::verbs::Provider;
use world::{SERVER, World};

const IQN: &str = "iqn.2026-01.org.example:disk";

/// The world, and the parts of it that a seed drives.
struct Simulation {
    world: World,
    kernel: Kernel,
    threads: Threads,
    listener: Listener,
    disk: Disk,
    random: u64,
    /// Jobs that threads have done.
    jobs: usize,
    /// Rounds after which the worker would have slept.
    sleeps: usize,
}

impl Simulation {
    fn new(seed: u64) -> Self {
        let text = format!(
            "backends:\n  d: {{ kind: file, path: /in/memory, size: 16MiB, create: true, thin: true }}\n\
             targets:\n  - name: t\n    iqn: {IQN}\n    portals:\n      \
             - {{ protocol: srp, listen: \"{SERVER}:5555\" }}\n      \
             - {{ protocol: iscsi, listen: \"{SERVER}:3260\" }}\n    \
             luns: {{ 0: {{ backend: d }} }}\n    access: open\nworkers: {{ count: 1 }}\n"
        );
        let config = Config::parse(&text, "test.yaml").unwrap();
        let fabric = Fabric::new(FabricConfig {
            seed,
            ..FabricConfig::default()
        });
        let threads = Threads::default();
        let host: Arc<dyn Host> = Arc::new(SimulatedHost::new(threads.clone(), fabric.now()));
        let disk = Disk::new(0);
        let mut opened = OpenedStores::default();
        let backend = &config.backends[0];
        let store = Store::on_disk(&backend.spec, &disk, Arc::clone(&host)).unwrap();
        opened.insert(&backend.name, &backend.spec, store);
        let shared = build_shared_on(&config, Keepers::default(), opened).unwrap();
        let (ring, kernel) = Ring::simulated(RingConfig::default()).unwrap();
        let listener = Listener::new(SocketAddr::new(SERVER, 3260));
        let sockets = vec![TcpListener::simulated(&listener)];
        Self {
            world: World::on(fabric, shared, ring, sockets, (seed, host)),
            kernel,
            threads,
            listener,
            disk,
            random: seed,
            jobs: 0,
            sleeps: 0,
        }
    }

    fn draw(&mut self, below: usize) -> usize {
        // As in `world`.
        self.random = self
            .random
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1);
        (self.random >> 33) as usize % below
    }

    /// One step of everything: a round of the worker, the end of one operation, and one job.
    fn step(&mut self, dev: &mut Endpoint) {
        let now = self.world.fabric.now();
        dev.progress(now);
        let worked = self.world.worker.step(now).unwrap();
        let next = self.world.worker.park(worked).unwrap();
        self.sleeps += usize::from(matches!(next, Next::Park(_)));
        let mut ready = self.kernel.operations();
        ready.retain(|operation| operation.is_ready);
        if !ready.is_empty() {
            let chosen = self.draw(ready.len());
            self.kernel.complete(ready[chosen].id, Outcome::Whole);
        }
        if let [thread, ..] = self.threads.runnable()[..] {
            self.threads.step(thread);
            self.jobs += 1;
        }
        dev.progress(now);
        let later = now + Duration::from_micros(10);
        self.world.fabric.advance_to(later);
    }
}

/// A connection of TCP whose other end is in the simulation, and what came over it.
struct Wire {
    simulation: Rc<RefCell<Simulation>>,
    peer: Peer,
    idle: Endpoint,
    received: Rc<RefCell<Vec<u8>>>,
}

impl Wire {
    /// Goes on until `done` gives something, for a second of virtual time at most.
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

impl Read for Wire {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        let most = buf.len();
        let bytes = self.until(|peer| {
            let bytes = peer.take(most);
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

/// Bytes that left the target: over TCP, and a number for those over RDMA, with their times.
#[derive(Debug, PartialEq)]
struct Trace {
    tcp: Vec<u8>,
    rdma: u64,
    sleeps: usize,
}

fn pattern(len: usize, seed: u8) -> Vec<u8> {
    (0..len).map(|i| (i % 251) as u8 ^ seed).collect()
}

fn run(seed: u64) -> Trace {
    let simulation = Rc::new(RefCell::new(Simulation::new(seed)));
    let received = Rc::default();
    let (peer, idle, target) = {
        let one = simulation.borrow();
        let target = one.world.shared.registry.catalog().targets[0].portals[0].target_port();
        let client = SocketAddr::from(([10, 0, 0, 150], 40_000));
        let peer = one.listener.connect(client).unwrap();
        (peer, one.world.client(50), target)
    };
    let wire = Wire {
        simulation: Rc::clone(&simulation),
        peer,
        idle,
        received: Rc::clone(&received),
    };

    // Over TCP: written data are in the cache, until a flush.
    let mut tcp = Client::login_on(wire, IQN, 1).unwrap();
    assert_eq!(tcp.command(&[0; 6], false, 0, &[]).0, 2, "power on");
    let data = pattern(8192, 7);
    assert_eq!(tcp.command(&cdb10(0x2a, 8, 16), true, 8192, &data).0, 0);
    let disk = simulation.borrow().disk.clone();
    let mut there = vec![0; 8192];
    disk.read(4096, &mut there);
    assert!(there == data && !disk.dirty().is_empty());
    assert_eq!(tcp.command(&cdb10(0x35, 0, 0), false, 0, &[]).0, 0);
    assert!(disk.dirty().is_empty());
    // A question that takes a thread: GET LBA STATUS.
    let mut status = [0; 16];
    (status[0], status[1], status[13]) = (0x9e, 0x12, 24);
    let (code, extents) = tcp.command(&status, false, 24, &[]);
    assert_eq!((code, &extents[16..20]), (0, &[0, 0, 0, 8][..]));
    assert!(simulation.borrow().jobs > 0);

    // Over RDMA: the same disk.
    let step = |dev: &mut Endpoint| simulation.borrow_mut().step(dev);
    let dev = simulation.borrow().world.client(1);
    let at = SocketAddr::new(SERVER, 5555);
    let mut rdma = Mini::connect(dev, at, &login_req(1, target), &mut |d| step(d))
        .map_err(|(_, refused)| refused)
        .unwrap();
    rdma.settle(&mut |d| step(d));
    assert_eq!(rdma.read(8, 16, 0, &mut |d| step(d)).status, 0);
    assert_eq!(rdma.data.slice(0..8192).unwrap().to_vec(), data);
    let other = pattern(4096, 9);
    rdma.data.write(0, &other);
    assert_eq!(rdma.write(100, 8, 0, &mut |d| step(d)).status, 0);
    let (code, read) = tcp.command(&cdb10(0x28, 100, 8), false, 4096, &[]);
    assert!(code == 0 && read == other);
    rdma.disconnect(&mut |d| step(d));

    // What was not flushed may be lost with the power; what was is not.
    drop(tcp);
    let simulation = simulation.borrow();
    let trace = Trace {
        tcp: received.take(),
        rdma: simulation.world.fabric.trace(),
        sleeps: simulation.sleeps,
    };
    disk.crash(|_, _| 0);
    disk.read(4096, &mut there);
    assert_eq!(there, data);
    disk.read(51_200, &mut there);
    assert_eq!(there[..4096], [0; 4096]);
    trace
}

/// Descriptors and threads of this process.
fn footprint() -> (usize, usize) {
    let count = |path| std::fs::read_dir(path).unwrap().count();
    (count("/proc/self/fd"), count("/proc/self/task"))
}

#[test]
fn one_seed_gives_one_trace_without_a_kernel_a_thread_or_a_descriptor() {
    let before = footprint();
    let kept = Simulation::new(1);
    assert_eq!(footprint(), before, "descriptors and threads");
    drop(kept);
    let trace = run(1);
    assert!(trace.tcp.len() > 4096 && trace.sleeps > 0, "{trace:?}");
    assert_eq!(run(1), trace);
    assert_ne!(run(2).rdma, trace.rdma);
    assert_eq!(footprint(), before);
}
