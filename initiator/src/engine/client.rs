//! Handle of an engine: its buffers, clock and shutdown.

use std::future::Future;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use fastrand::Rng;
use riser_block::oneshot::oneshot;
use riser_block::{BufferPool, Mailbox, Service};
use riser_transport::verbs::{PKey, Provider};

use super::builder::ClientBuilder;
use super::driver::Message;
use super::timer::Timeout;
#[cfg(doc)]
use crate::request::RequestError;

/// Handle of an engine. Clones share the engine. When the last clone, session and logical unit is
/// dropped, the engine closes its sessions and terminates.
#[derive(Clone)]
pub struct Client(pub(super) Arc<Shared>);

impl std::fmt::Debug for Client {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Client")
            .field("device", &self.0.device.name)
            .finish_non_exhaustive()
    }
}

impl Client {
    /// Returns a builder with the default configuration.
    #[must_use]
    pub fn builder() -> ClientBuilder {
        ClientBuilder::default()
    }

    /// Returns the name of the RDMA device.
    #[must_use]
    pub fn device(&self) -> &str {
        &self.0.device.name
    }

    /// Returns the pool for data buffers.
    #[must_use]
    pub fn buffers(&self) -> &BufferPool {
        &self.0.pool
    }

    /// Returns the number of free bytes in [`Self::buffers`], including the part that is reserved
    /// for data with protection information.
    #[must_use]
    pub fn free_bytes(&self) -> usize {
        let protected = self.0.protection_pool.get();
        self.0.pool.free() + protected.map_or(0, BufferPool::free)
    }

    /// Returns the number of bytes in [`Self::buffers`], except for the part that is reserved for data
    /// with protection information.
    pub(crate) fn unreserved_bytes(&self) -> usize {
        let protected = self.0.protection_pool.get();
        self.0.pool.size() - protected.map_or(0, BufferPool::size)
    }

    /// Closes all sessions and waits for the engine to terminate. Outstanding commands fail with
    /// [`RequestError::Closed`].
    pub fn shutdown(&self) {
        self.0.stop();
    }

    /// Returns whether the engine has a dedicated thread. Otherwise its owner steps it, at times
    /// unknown to its users.
    pub(crate) fn has_thread(&self) -> bool {
        let thread = self.0.thread.lock();
        thread.unwrap_or_else(PoisonError::into_inner).is_some()
    }

    /// Runs a service of a disk's client on the engine's thread until it completes.
    pub(crate) fn host(&self, service: Box<dyn Service>) -> Result<(), Box<dyn Service>> {
        // An engine without a thread is stepped by its owner at arbitrary times, possibly never.
        if !self.has_thread() {
            return Err(service);
        }
        let sent = self.0.mailbox.send(Message::Host(service));
        sent.map_err(|message| match message {
            Message::Host(service) => service,
            _ => unreachable!("the mailbox returns a rejected message"),
        })
    }

    /// Waits for a future, but at most for `limit`. The engine runs the timer, so this works with
    /// any executor. On timeout the future is dropped.
    pub fn timeout<F: Future>(&self, limit: Duration, future: F) -> Timeout<F> {
        let (sender, receiver) = oneshot();
        let message = Message::Timer(limit, sender);
        // A closed mailbox drops the sender, which completes the wait.
        drop(self.0.mailbox.send(message));
        Timeout::new(future, receiver)
    }
}

/// Attributes of the engine's device.
#[derive(Clone, Debug)]
pub(super) struct DeviceInfo {
    pub(super) name: String,
    pub(super) guid: u64,
    pub(super) region_segments: u32,
    /// Receive completions report the key invalidated by the peer.
    pub(super) reports_invalidation: bool,
    pub(super) pkeys: Vec<PKey>,
}

impl DeviceInfo {
    /// Returns the attributes of an engine without a device.
    pub(super) fn none() -> Self {
        Self {
            name: "none".to_owned(),
            guid: 0,
            region_segments: 1,
            reports_invalidation: false,
            pkeys: Vec::new(),
        }
    }

    pub(super) fn of<P: Provider>(provider: &P) -> Self {
        let attr = provider.device_attr();
        let entries = provider.query_port(1).map_or(0, |p| p.pkey_table_len);
        Self {
            name: attr.name.clone(),
            guid: attr.node_guid,
            region_segments: if attr.sg_gaps {
                attr.max_fast_reg_segments
            } else {
                1
            },
            reports_invalidation: attr.reports_invalidation,
            pkeys: (0..entries)
                .filter_map(|i| provider.query_pkey(1, i).ok())
                .collect(),
        }
    }

    /// Returns whether the device is a full or limited member of a partition.
    pub(super) fn has_pkey(&self, pkey: u16) -> bool {
        self.pkeys.iter().any(|p| p.0 & 0x7fff == pkey & 0x7fff)
    }
}

pub(super) struct Shared {
    pub(super) mailbox: Arc<Mailbox<Message>>,
    pub(super) pool: BufferPool,
    /// Part of the pool for data with protection information, from the first protected unit on.
    pub(super) protection_pool: OnceLock<BufferPool>,
    pub(super) device: DeviceInfo,
    /// Random number generator for sessions.
    pub(super) random: Mutex<Rng>,
    /// Extension of this client's initiator port identifier, if the address doesn't specify one.
    pub(super) extension: u64,
    pub(super) config: ClientBuilder,
    pub(super) thread: Mutex<Option<JoinHandle<()>>>,
}

impl Shared {
    /// Returns a random number from the environment.
    pub(super) fn random(&self) -> u64 {
        let random = self.random.lock();
        random.unwrap_or_else(PoisonError::into_inner).u64(..)
    }

    /// Returns the second half of this client's SRP initiator port identifiers.
    pub(super) fn port_guid(&self) -> u64 {
        self.config.guid.unwrap_or(self.device.guid)
    }

    pub(super) fn stop(&self) {
        let _ = self.mailbox.send(Message::Shutdown);
        let thread = self
            .thread
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .take();
        if let Some(thread) = thread
            && thread.thread().id() != std::thread::current().id()
        {
            let _ = thread.join();
        }
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        self.stop();
    }
}
