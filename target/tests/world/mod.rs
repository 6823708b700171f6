//! A worker on one end of an in-memory wire with a virtual clock.

#![allow(dead_code, reason = "each test uses a part of it")]

use std::net::{IpAddr, Ipv4Addr};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;

use riser_reactor::{MailReceiver, MailSender, Ring, RingConfig, mailbox};
use riser_target::config::Config;
use riser_target::host::{Host, SystemHost};
use riser_target::server::build_shared;
use riser_target::worker::mail::{MAILBOX, Mail, Outbox};
use riser_target::worker::{
    Env, Opened, Report, Shared, TcpListener, Worker, WorkerConfig, WorkerError,
};
use riser_transport::loopback::{Endpoint, Fabric, FabricConfig};
use riser_transport::roce::fault::FaultConfig;
use riser_transport::verbs::Provider;

/// Address of the worker.
pub(crate) const SERVER: IpAddr = IpAddr::V4(Ipv4Addr::new(10, 0, 0, 1));

/// Environment with random numbers from a seed, so that all runs are identical.
struct SeededEnv {
    state: u64,
    host: Arc<dyn Host>,
}

impl Env for SeededEnv {
    fn fill_random(&mut self, out: &mut [u8]) {
        for byte in out {
            // Random number generator from Knuth's MMIX.
            self.state = self
                .state
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1);
            *byte = (self.state >> 56) as u8;
        }
    }

    fn host(&self) -> Arc<dyn Host> {
        Arc::clone(&self.host)
    }
}

/// A wire with a worker on one end.
pub(crate) struct World {
    pub(crate) fabric: Fabric,
    pub(crate) worker: Worker,
    pub(crate) shared: Arc<Shared>,
    pub(crate) mail: MailSender<Mail>,
    /// Mailbox of another worker, which is not running.
    pub(crate) other: MailReceiver<Mail>,
    pub(crate) reports: Receiver<Report>,
}

impl World {
    /// Creates a wire with these faults, and a worker that serves a configuration on [`SERVER`].
    pub(crate) fn serving(faults: FaultConfig, config: &Config) -> Self {
        Self::over(faults, build_shared(config, None).unwrap())
    }

    /// Creates a wire with these faults, and a worker that serves the given objects.
    pub(crate) fn over(faults: FaultConfig, shared: Shared) -> Self {
        Self::with(faults, shared, RingConfig::default(), Vec::new())
    }

    /// Same as [`Self::over`], but with a custom ring and TCP portals.
    pub(crate) fn with(
        faults: FaultConfig,
        shared: Shared,
        ring: RingConfig,
        sockets: Vec<TcpListener>,
    ) -> Self {
        let fabric = Fabric::new(FabricConfig {
            faults,
            ..FabricConfig::default()
        });
        let ring = Ring::new(ring).unwrap();
        Self::on(fabric, shared, ring, sockets, (1, Arc::new(SystemHost)))
    }

    /// Creates a worker on any kind of ring, with random numbers from a seed.
    pub(crate) fn on(
        fabric: Fabric,
        shared: Shared,
        ring: Ring,
        sockets: Vec<TcpListener>,
        of_run: (u64, Arc<dyn Host>),
    ) -> Self {
        let (world, unserved) = Self::start(fabric, shared, ring, sockets, of_run).unwrap();
        assert!(unserved.is_empty(), "{unserved:?}");
        world
    }

    /// Same as [`Self::on`], but the worker may fail to start, or only serve some of the portals.
    pub(crate) fn start(
        fabric: Fabric,
        shared: Shared,
        ring: Ring,
        sockets: Vec<TcpListener>,
        (seed, host): (u64, Arc<dyn Host>),
    ) -> Result<(Self, Vec<String>), WorkerError> {
        let shared = Arc::new(shared);
        let (mail, inbox) = mailbox(MAILBOX, ring.waker());
        let (other_mail, other) = mailbox(MAILBOX, ring.waker());
        let (reports_tx, reports) = channel();
        let (worker, unserved) = Worker::new(WorkerConfig {
            index: 0,
            now: fabric.now(),
            env: Box::new(SeededEnv { state: seed, host }),
            pool: 16 << 20,
            shared: Arc::clone(&shared),
            devices: vec![Opened::Simulated(Box::new(fabric.endpoint(SERVER)))],
            sockets,
            ring,
            mailbox: inbox,
            outbox: Outbox::new(vec![mail.clone(), other_mail]),
            reports: reports_tx,
        })?;
        let world = Self {
            fabric,
            worker,
            shared,
            mail,
            other,
            reports,
        };
        let unserved = unserved.iter().map(|portal| format!("{portal:?}"));
        Ok((world, unserved.collect()))
    }

    /// Creates the device of an initiator.
    pub(crate) fn client(&self, n: u8) -> Endpoint {
        self.fabric
            .endpoint(IpAddr::V4(Ipv4Addr::new(10, 0, 0, 100 + n)))
    }

    /// Runs one step of all components.
    pub(crate) fn pump(&mut self, dev: &mut Endpoint) {
        let now = self.fabric.now();
        dev.progress(now);
        self.worker.step(now).unwrap();
        dev.progress(now);
        let next = [self.fabric.next_arrival(), dev.deadline()]
            .into_iter()
            .flatten()
            .min();
        // The clock must not stop because of pending events for a device that is currently not
        // driven.
        let (least, most) = (
            now + Duration::from_micros(10),
            now + Duration::from_millis(1),
        );
        let next = next.map_or(most, |t| t.clamp(least, most));
        self.fabric.advance_to(next);
    }
}
