//! An engine as its users hold it: its buffers, its clock, its end.

use std::future::Future;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use fastrand::Rng;
use riser_transport::verbs::{PKey, Provider};

use super::builder::ClientBuilder;
use super::driver::Message;
use super::oneshot::oneshot;
use super::park::Mailbox;
use super::pool::BufferPool;
use super::timer::Timeout;
use crate::block::Service;
#[cfg(doc)]
use crate::request::RequestError;

/// An engine. Clones share it; when the last clone, session and logical unit is gone, it closes its
/// sessions and ends.
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
    /// The default configuration of one.
    #[must_use]
    pub fn builder() -> ClientBuilder {
        ClientBuilder::default()
    }

    /// Name of the RDMA device.
    #[must_use]
    pub fn device(&self) -> &str {
        &self.0.device.name
    }

    /// The pool that data buffers come from.
    #[must_use]
    pub fn buffers(&self) -> &BufferPool {
        &self.0.pool
    }

    /// Closes every session and waits for the engine to end. Outstanding commands end with
    /// [`RequestError::Closed`].
    pub fn shutdown(&self) {
        self.0.stop();
    }

    /// Returns whether the engine runs on a thread of its own. One that its owner steps runs at
    /// times that nothing else knows.
    pub(crate) fn has_thread(&self) -> bool {
        let thread = self.0.thread.lock();
        thread.unwrap_or_else(PoisonError::into_inner).is_some()
    }

    /// Serves a client of a disk on the engine's thread, until that is over.
    pub(crate) fn host(&self, service: Box<dyn Service>) -> Result<(), Box<dyn Service>> {
        // An engine that its owner steps runs whenever the owner likes, which may be never.
        if !self.has_thread() {
            return Err(service);
        }
        let sent = self.0.mailbox.send(Message::Host(service));
        sent.map_err(|message| match message {
            Message::Host(service) => service,
            _ => unreachable!("a mailbox gives back what it was sent"),
        })
    }

    /// Waits for a future, but not longer than `limit`. The engine keeps the time, so any executor
    /// will do. A future that is late is dropped with the wait.
    pub fn timeout<F: Future>(&self, limit: Duration, future: F) -> Timeout<F> {
        let (sender, receiver) = oneshot();
        let message = Message::Timer(limit, sender);
        // A closed mailbox drops the sender, which ends the wait.
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
    /// A receive reports which key the peer has invalidated.
    pub(super) reports_invalidation: bool,
    pub(super) pkeys: Vec<PKey>,
}

impl DeviceInfo {
    /// Attributes of an engine without a device.
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

    /// Returns whether the device is in a partition, as a full member or a limited one.
    pub(super) fn has_pkey(&self, pkey: u16) -> bool {
        self.pkeys.iter().any(|p| p.0 & 0x7fff == pkey & 0x7fff)
    }
}

pub(super) struct Shared {
    pub(super) mailbox: Arc<Mailbox<Message>>,
    pub(super) pool: BufferPool,
    pub(super) device: DeviceInfo,
    /// Random numbers of its sessions.
    pub(super) random: Mutex<Rng>,
    /// Extension of this client's initiator port identifier where an address gives none.
    pub(super) extension: u64,
    pub(super) config: ClientBuilder,
    pub(super) thread: Mutex<Option<JoinHandle<()>>>,
}

impl Shared {
    /// A random number from the surroundings.
    pub(super) fn random(&self) -> u64 {
        let random = self.random.lock();
        random.unwrap_or_else(PoisonError::into_inner).u64(..)
    }

    /// The second half of the identifiers of this client's initiator ports (SRP).
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
