//! Engines, their targets and the network between them, with a virtual clock. Each test has a
//! separate world. Waiting for one object runs all other objects, and the time advances when all of
//! them are idle.

use std::cell::{Cell, RefCell};
use std::future::Future;
use std::io;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, Wake, Waker};
use std::time::{Duration, Instant};

use fastrand::Rng;
use riser_transport::loopback::{Endpoint, Fabric, FabricConfig};
use rustix::net::sockopt;

use crate::engine::fake_target::Target;
use crate::engine::{Client, ClientBuilder, Engine, Env};

/// Maximum wait of a test, in virtual time.
const PATIENCE: Duration = Duration::from_secs(300);

/// Minimum step of the clock, for expired deadlines without an effect.
const TICK: Duration = Duration::from_micros(1);

/// Send buffer of an engine's socket in bytes.
const SEND_BUFFER: usize = 4096;

/// Environment of an engine in the world.
pub(in crate::engine) struct Sim {
    device: Option<Endpoint>,
    random: Rng,
}

impl Sim {
    /// Creates the environment of an engine with this device.
    pub(in crate::engine) fn new(device: Option<Endpoint>) -> Self {
        Self {
            device,
            random: Rng::with_seed(7),
        }
    }
}

impl Env for Sim {
    type Provider = Endpoint;

    fn open_device(&mut self) -> io::Result<Option<Endpoint>> {
        Ok(self.device.take())
    }

    fn connect_tcp(&mut self, _: Option<SocketAddr>, _: SocketAddr) -> io::Result<OwnedFd> {
        let (ours, theirs) = UnixStream::pair()?;
        sockopt::set_socket_send_buffer_size(&ours, SEND_BUFFER)?;
        ours.set_nonblocking(true)?;
        theirs.set_nonblocking(true)?;
        WORLD.with(|world| world.streams.borrow_mut().push(theirs));
        Ok(ours.into())
    }

    fn fill_random(&mut self, out: &mut [u8]) -> io::Result<()> {
        self.random.fill(out);
        Ok(())
    }

    fn date(&self) -> Duration {
        Duration::from_secs(1_800_000_000)
    }
}

struct World {
    fabric: RefCell<Fabric>,
    /// Last byte of the most recently assigned address.
    addresses: Cell<u8>,
    engines: RefCell<Vec<Engine<Sim>>>,
    targets: RefCell<Vec<Target>>,
    /// The targets' sides of TCP connections not yet accepted by the test.
    streams: RefCell<Vec<UnixStream>>,
}

thread_local! {
    static WORLD: World = World {
        fabric: RefCell::new(Fabric::new(FabricConfig::default())),
        addresses: Cell::new(0),
        engines: RefCell::default(),
        targets: RefCell::default(),
        streams: RefCell::default(),
    };
}

pub(in crate::engine) fn fabric() -> Fabric {
    WORLD.with(|world| world.fabric.borrow().clone())
}

/// Removes all objects, so that the thread can start over.
pub(super) fn clear() {
    WORLD.with(|world| {
        world.engines.borrow_mut().clear();
        world.targets.borrow_mut().clear();
        world.streams.borrow_mut().clear();
        world.addresses.set(0);
        *world.fabric.borrow_mut() = Fabric::new(FabricConfig::default());
    });
}

pub(in crate::engine) fn now() -> Instant {
    fabric().now()
}

/// Returns an unused address.
pub(in crate::engine) fn address() -> IpAddr {
    WORLD.with(|world| {
        world.addresses.update(|last| last + 1);
        Ipv4Addr::new(127, 0, 0, world.addresses.get()).into()
    })
}

/// Adds an engine with a device at a new address.
pub(super) fn add_engine(builder: ClientBuilder) -> Client {
    let device = fabric().endpoint(address());
    let (client, engine) = builder.attach(Sim::new(Some(device))).unwrap();
    WORLD.with(|world| world.engines.borrow_mut().push(engine));
    client
}

/// Accepts the oldest pending TCP connection, if any.
pub(super) fn accept_tcp() -> Option<UnixStream> {
    WORLD.with(|world| {
        let mut streams = world.streams.borrow_mut();
        (!streams.is_empty()).then(|| streams.remove(0))
    })
}

pub(in crate::engine) fn add_target(target: Target) {
    WORLD.with(|world| world.targets.borrow_mut().push(target));
}

/// Runs all objects once. If all are idle, advances the time to the next deadline, including the
/// caller's deadline `own`. A target may call this during its turn.
pub(in crate::engine) fn step(own: Option<Instant>) {
    WORLD.with(|world| {
        let now = fabric().now();
        let mut worked = false;
        let mut next = own;
        let mut wait_for = |at: Option<Instant>| next = next.into_iter().chain(at).min();
        for engine in world.engines.borrow_mut().iter_mut() {
            worked |= engine.step(now);
            wait_for(engine.next_deadline());
        }
        if let Ok(mut targets) = world.targets.try_borrow_mut() {
            for target in targets.iter_mut() {
                worked |= target.turn();
                wait_for(target.deadline());
            }
        }
        if !worked {
            let next = next.expect("an engine waits for something");
            fabric().advance_to(next.max(now + TICK));
        }
    });
}

/// Waits until a condition becomes true while the world runs.
pub(super) fn eventually(what: &str, mut is_so: impl FnMut() -> bool) {
    let until = now() + PATIENCE;
    while !is_so() {
        assert!(now() < until, "not in time: {what}");
        step(None);
    }
}

/// Set when a future must be polled again.
struct Woken(AtomicBool);

impl Wake for Woken {
    fn wake(self: Arc<Self>) {
        self.0.store(true, Ordering::SeqCst);
    }
}

/// Waits for a future while the world runs.
pub(super) fn block_on<F: Future>(future: F) -> F::Output {
    let mut future = pin!(future);
    let woken = Arc::new(Woken(AtomicBool::new(true)));
    let waker = Waker::from(woken.clone());
    let until = now() + PATIENCE;
    loop {
        if woken.0.swap(false, Ordering::SeqCst)
            && let Poll::Ready(output) = future.as_mut().poll(&mut Context::from_waker(&waker))
        {
            return output;
        }
        assert!(now() < until, "not in time: the end of a future");
        step(None);
    }
}

/// Starts a future that continues while the test does something else.
pub(super) fn begin<F: Future>(future: F) -> Pin<Box<F>> {
    let mut future = Box::pin(future);
    let mut cx = Context::from_waker(Waker::noop());
    assert!(future.as_mut().poll(&mut cx).is_pending(), "it is over");
    future
}
