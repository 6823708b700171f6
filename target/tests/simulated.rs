//! Tests a worker in a single thread with a virtual clock and in-memory ring, disk, TCP sockets and
//! threads: a seed always results in the same trace.

mod simulation;
mod world;

use std::cell::RefCell;
use std::net::SocketAddr;
use std::rc::Rc;

use riser_test_peers::mini::{Mini, login_req};
use riser_test_peers::pdus::{cdb10, pattern};
use riser_test_peers::tcp::Client;
use riser_transport::loopback::Endpoint;
use simulation::{IQN, Simulation, Wire, footprint};
use world::SERVER;

/// Data sent by the target: over TCP, and a hash for RDMA, with timestamps.
#[derive(Debug, PartialEq)]
struct Trace {
    tcp: Vec<u8>,
    rdma: u64,
    sleeps: usize,
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

    // Over TCP: written data is in the cache until a flush.
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
    // GET LBA STATUS, which requires a thread.
    let mut status = [0; 16];
    (status[0], status[1], status[13]) = (0x9e, 0x12, 24);
    let (code, extents) = tcp.command(&status, false, 24, &[]);
    assert_eq!((code, &extents[16..20]), (0, &[0, 0, 0, 8][..]));
    assert!(simulation.borrow().jobs > 0);

    // Over RDMA, with the same disk.
    let step = |dev: &mut Endpoint| simulation.borrow_mut().step(dev);
    let dev = simulation.borrow().world.client(1);
    let at = SocketAddr::new(SERVER, 5555);
    let mut rdma = Mini::connected(dev, at, &login_req(1, target), &mut |d| step(d));
    rdma.clear_unit_attention(&mut |d| step(d));
    assert_eq!(rdma.read(8, 16, 0, &mut |d| step(d)).status, 0);
    assert_eq!(rdma.data.slice(0..8192).unwrap().to_vec(), data);
    let other = pattern(4096, 9);
    rdma.data.write(0, &other);
    assert_eq!(rdma.write(100, 8, 0, &mut |d| step(d)).status, 0);
    let (code, read) = tcp.command(&cdb10(0x28, 100, 8), false, 4096, &[]);
    assert!(code == 0 && read == other);
    rdma.disconnect(&mut |d| step(d));

    // After a power loss, flushed data must not be lost, but other data may be.
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

#[test]
fn same_seed_repeats_trace() {
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
