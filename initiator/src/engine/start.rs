//! Starting an engine: on a dedicated thread, or without a thread in a simulation.

use std::io;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::Instant;

use fastrand::Rng;
use riser_block::{BufferPool, Mailbox};
use riser_transport::roce::{Roce, RoceConfig};
use riser_transport::verbs::Provider;

use super::EngineError;
use super::builder::ClientBuilder;
use super::client::{Client, DeviceInfo, Shared};
use super::driver::Driver;
use super::env::Env;
use super::system::{self, OpenDevice, System};

/// Engine without a thread. Its owner steps it and provides the time.
pub struct Engine<E: Env>(Driver<E>);

impl<E: Env> std::fmt::Debug for Engine<E> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Engine").finish_non_exhaustive()
    }
}

impl<E: Env> Engine<E> {
    /// Performs all pending work once, at the given time. Returns whether there was any; if so,
    /// more work may be pending. The time must not decrease.
    pub fn step(&mut self, now: Instant) -> bool {
        self.0.round(now)
    }

    /// Returns the latest time of the next step. Packets of the device, data on sockets and calls
    /// of users may require an earlier one.
    #[must_use]
    pub fn next_deadline(&self) -> Option<Instant> {
        self.0.deadline()
    }

    /// Returns the device, for reading its counters.
    #[must_use]
    pub fn device(&self) -> Option<&E::Provider> {
        self.0.provider()
    }

    /// Returns the number of SRP request-limit credits held by targets without an outstanding
    /// request. A target may return a credit late, but must return each exactly once.
    #[must_use]
    pub fn unreturned(&self) -> i64 {
        self.0.unreturned()
    }

    /// Returns whether the engine was shut down and all sessions have closed.
    #[must_use]
    pub fn is_over(&self) -> bool {
        self.0.is_over()
    }
}

impl ClientBuilder {
    /// Starts the engine on a software NIC at a local address.
    ///
    /// # Errors
    /// See [`Self::build`].
    pub fn open(self, addr: std::net::IpAddr) -> Result<Client, EngineError> {
        self.build(move || Roce::open(&RoceConfig::new(addr)))
    }

    /// Starts the engine without an RDMA device, for TCP sessions only.
    ///
    /// # Errors
    /// See [`Self::build`].
    pub fn without_device(self) -> Result<Client, EngineError> {
        self.start::<Roce>(Box::new(|| Ok(None)))
    }

    /// Starts the engine. `open` opens the device on the engine's thread.
    ///
    /// # Errors
    /// Returns [`EngineError::Device`] with the error of `open`, of the thread, or of the pool.
    pub fn build<P, F>(self, open: F) -> Result<Client, EngineError>
    where
        P: Provider + 'static,
        F: FnOnce() -> io::Result<P> + Send + 'static,
    {
        self.start(Box::new(move || open().map(Some)))
    }

    /// Creates an engine without a thread, in an environment provided by its owner. Requests of its
    /// clients are processed when the owner calls [`Engine::step`].
    ///
    /// # Errors
    /// See [`Self::build`].
    pub fn attach<E: Env>(self, mut env: E) -> Result<(Client, Engine<E>), EngineError> {
        let pool = BufferPool::new(self.pool)?;
        let mailbox = Arc::new(Mailbox::new()?);
        let provider = env.open_device()?;
        let device = provider.as_ref();
        let device = device.map_or_else(DeviceInfo::none, DeviceInfo::of);
        let mut seed = [0; 8];
        env.fill_random(&mut seed)?;
        let mut random = Rng::with_seed(u64::from_ne_bytes(seed));
        let memory = pool.memory().whole();
        let driver = Driver::new(env, provider, mailbox.clone(), memory);
        let client = Client(Arc::new(Shared {
            mailbox,
            pool,
            protection_pool: OnceLock::new(),
            device,
            extension: self.port.unwrap_or_else(|| random.u64(..)),
            random: Mutex::new(random),
            config: self,
            thread: Mutex::new(None),
        }));
        Ok((client, Engine(driver)))
    }

    /// Starts the engine's thread, which creates the engine, because a device may not be `Send`.
    fn start<P: Provider + 'static>(self, open: OpenDevice<P>) -> Result<Client, EngineError> {
        let (ready, made) = std::sync::mpsc::channel();
        let thread = std::thread::Builder::new().name("riser-engine".to_owned());
        let thread = thread.spawn(move || {
            let spin = self.spin;
            match self.attach(System::new(open)) {
                Ok((client, mut engine)) => {
                    let _ = ready.send(Ok(client));
                    system::run(&mut engine.0, spin);
                }
                Err(error) => drop(ready.send(Err(error))),
            }
        })?;
        let client: Client = made.recv().unwrap_or(Err(EngineError::Gone))?;
        let place = &client.0.thread;
        *place.lock().unwrap_or_else(PoisonError::into_inner) = Some(thread);
        Ok(client)
    }
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;
    use std::time::Duration;

    use riser_block::task::block_on;

    use super::*;
    use crate::engine::Elapsed;
    use crate::session::{ConnectError, Down};
    use crate::url::IscsiUrl;

    /// Uses the clock, sockets and device of the host.
    #[test]
    fn engine_runs_on_dedicated_thread() {
        let client = Client::builder().pool(1 << 20).without_device().unwrap();
        let wait = client.timeout(Duration::from_millis(5), std::future::pending::<()>());
        assert_eq!(block_on(wait), Err(Elapsed));

        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let portal = listener.local_addr().unwrap();
        let url = format!("iscsi://{portal}/iqn.2026-01.com.example:disk/0");
        let url: IscsiUrl = url.parse().unwrap();
        let hung_up = std::thread::spawn(move || drop(listener.accept().unwrap()));
        let error = block_on(client.connect(&url)).unwrap_err();
        let is_lost = matches!(error, EngineError::Login(Down::ConnectionLost));
        assert!(is_lost, "{error}");
        hung_up.join().unwrap();
        let error = block_on(client.connect(&url)).unwrap_err();
        let refused = EngineError::Login(Down::Connect(ConnectError::Tcp(111)));
        assert_eq!(error.to_string(), refused.to_string());
        client.shutdown();
        let error = block_on(client.connect(&url)).unwrap_err();
        assert!(matches!(error, EngineError::Gone), "{error}");

        let builder = Client::builder().pool(1 << 20);
        let client = builder.open("127.0.42.1".parse().unwrap()).unwrap();
        assert_ne!(client.device(), "none");
        client.shutdown();
    }
}
