//! Starting an engine.

use std::hash::{BuildHasher, Hasher, RandomState};
use std::io as stdio;
use std::sync::{Arc, Mutex};

use riser_transport::roce::{Roce, RoceConfig};
use riser_transport::verbs::Provider;

use super::EngineError;
use super::builder::ClientBuilder;
use super::client::{Client, DeviceInfo, Shared};
use super::driver::{Driver, DriverConfig, Message};
use super::park::Mailbox;
use super::pool::BufferPool;

impl ClientBuilder {
    /// Starts the engine on a software NIC at a local address.
    ///
    /// # Errors
    /// As [`Self::build`].
    pub fn open(self, addr: std::net::IpAddr) -> Result<Client, EngineError> {
        self.build(move || Roce::open(&RoceConfig::new(addr)))
    }

    /// Starts the engine without an RDMA device, for sessions on TCP.
    ///
    /// # Errors
    /// As [`Self::build`].
    pub fn without_device(self) -> Result<Client, EngineError> {
        self.start::<Roce, _>(|| Ok(None))
    }

    /// Starts the engine on a device that `open` makes on the engine's thread.
    ///
    /// # Errors
    /// [`EngineError::Device`] with the error of `open`, of the thread, or of the pool.
    pub fn build<P, F>(self, open: F) -> Result<Client, EngineError>
    where
        P: Provider,
        F: FnOnce() -> stdio::Result<P> + Send + 'static,
    {
        self.start(move || open().map(Some))
    }

    /// Starts the engine's thread, with the device that `open` makes there, or without one.
    fn start<P, F>(self, open: F) -> Result<Client, EngineError>
    where
        P: Provider,
        F: FnOnce() -> stdio::Result<Option<P>> + Send + 'static,
    {
        let pool = BufferPool::new(self.pool)?;
        let mailbox = Arc::new(Mailbox::new()?);
        let (ready, opened) = std::sync::mpsc::channel();
        let thread = std::thread::Builder::new()
            .name("riser-engine".to_owned())
            .spawn({
                let (mailbox, pool) = (mailbox.clone(), pool.memory().whole());
                let config = DriverConfig { spin: self.spin };
                move || {
                    let provider = match open() {
                        Ok(provider) => provider,
                        Err(e) => return drop(ready.send(Err(e))),
                    };
                    let device = provider
                        .as_ref()
                        .map_or_else(DeviceInfo::none, DeviceInfo::of);
                    let _ = ready.send(Ok(device));
                    let _close = CloseOnExit(&mailbox);
                    Driver::new(provider, mailbox.clone(), pool, config).run();
                }
            })?;
        let device = match opened.recv() {
            Ok(Ok(device)) => device,
            Ok(Err(e)) => return Err(e.into()),
            Err(_) => return Err(EngineError::Gone),
        };
        let random = RandomState::new().build_hasher().finish();
        let extension = self.port.unwrap_or(random);
        Ok(Client(Arc::new(Shared {
            mailbox,
            pool,
            device,
            extension,
            config: self,
            thread: Mutex::new(Some(thread)),
        })))
    }
}

/// Refuses messages once the thread is gone, and drops those that came too late, whose senders are
/// notified by the ends of their oneshots.
struct CloseOnExit<'a>(&'a Mailbox<Message>);

impl Drop for CloseOnExit<'_> {
    fn drop(&mut self) {
        drop(self.0.close());
    }
}
