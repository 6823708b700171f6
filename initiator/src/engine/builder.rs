//! Starting an engine, and its end.

use std::hash::{BuildHasher, Hasher, RandomState};
use std::io as stdio;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use riser_transport::roce::{Roce, RoceConfig};
use riser_transport::verbs::{PKey, Provider};

use super::driver::{Driver, DriverConfig, Message};
use super::park::Mailbox;
use super::pool::BufferPool;
use super::{Client, EngineError};
use crate::session::Timing;

/// How to make a [`Client`].
#[derive(Clone, Debug)]
pub struct ClientBuilder {
    pub(super) pool: usize,
    pub(super) spin: Duration,
    pub(super) timing: Timing,
    pub(super) queue_size: u16,
    pub(super) max_immediate: u32,
    pub(super) region_segments: u32,
    pub(super) max_requests: usize,
    pub(super) port: Option<u64>,
    pub(super) recovers: bool,
    pub(super) noted: Option<[u8; 16]>,
}

impl Default for ClientBuilder {
    fn default() -> Self {
        Self {
            pool: 64 << 20,
            spin: Duration::from_micros(50),
            timing: Timing::default(),
            queue_size: 64,
            max_immediate: 8192,
            region_segments: 64,
            max_requests: 1024,
            port: None,
            recovers: false,
            noted: None,
        }
    }
}

impl ClientBuilder {
    /// Length of the buffer pool, in bytes. Default: 64 MiB.
    #[must_use]
    pub fn pool(mut self, bytes: usize) -> Self {
        self.pool = bytes;
        self
    }

    /// How long the thread polls after its last work before it sleeps. Default: 50 µs.
    #[must_use]
    pub fn spin(mut self, span: Duration) -> Self {
        self.spin = span;
        self
    }

    /// Times of sessions.
    #[must_use]
    pub fn timing(mut self, timing: Timing) -> Self {
        self.timing = timing;
        self
    }

    /// Commands outstanding on a channel where the address says nothing else. Default: 64.
    #[must_use]
    pub fn queue_size(mut self, commands: u16) -> Self {
        self.queue_size = commands.max(1);
        self
    }

    /// Longest data that travels within a command, in bytes; 0: none. Default: 8 KiB.
    #[must_use]
    pub fn max_immediate(mut self, bytes: u32) -> Self {
        self.max_immediate = bytes;
        self
    }

    /// Pieces of a buffer that one registration covers; a buffer of more needs more descriptors.
    /// Default: 64, or what the device can.
    #[must_use]
    pub fn region_segments(mut self, segments: u32) -> Self {
        self.region_segments = segments.max(1);
        self
    }

    /// What the identifiers of its initiator ports follow from, for a client of one disk. Two such
    /// clients with the same are one initiator in two lives: the later login ends the earlier session.
    /// Default: random, and another one for each session.
    #[must_use]
    pub fn port(mut self, seed: u64) -> Self {
        self.port = Some(seed);
        self
    }

    /// Whether [`Self::port`] is that of an earlier life which ended without closing its sessions: its
    /// commands may still be on their way. Default: no.
    #[must_use]
    pub fn recovers(mut self, recovers: bool) -> Self {
        self.recovers = recovers;
        self
    }

    /// Which generation of its unit's cache the earlier life had noted
    /// ([`SessionReport::cache`](super::SessionReport::cache)). If the unit has another, the first flush fails,
    /// since acknowledged writes may be lost. Default: not known.
    #[must_use]
    pub fn noted_cache(mut self, generation: Option<[u8; 16]>) -> Self {
        self.noted = generation;
        self
    }

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

/// Refuses messages once the thread is gone, and drops those that came too late: their senders are
/// told by the ends of their oneshots.
struct CloseOnExit<'a>(&'a Mailbox<Message>);

impl Drop for CloseOnExit<'_> {
    fn drop(&mut self) {
        drop(self.0.close());
    }
}

/// Attributes of the engine's device.
#[derive(Clone, Debug)]
pub(super) struct DeviceInfo {
    pub(super) name: String,
    pub(super) guid: u64,
    pub(super) region_segments: u32,
    /// Whether a receive reports which key the peer has invalidated.
    pub(super) tells_invalidation: bool,
    pub(super) pkeys: Vec<PKey>,
}

impl DeviceInfo {
    /// Those of an engine without a device.
    fn none() -> Self {
        Self {
            name: "none".to_owned(),
            guid: 0,
            region_segments: 1,
            tells_invalidation: false,
            pkeys: Vec::new(),
        }
    }

    fn of<P: Provider>(provider: &P) -> Self {
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
            tells_invalidation: attr.tells_invalidation,
            pkeys: (0..entries)
                .filter_map(|i| provider.query_pkey(1, i).ok())
                .collect(),
        }
    }

    /// Whether the device is in a partition, as a full member or a limited one.
    pub(super) fn has_pkey(&self, pkey: u16) -> bool {
        self.pkeys.iter().any(|p| p.0 & 0x7fff == pkey & 0x7fff)
    }
}

pub(super) struct Shared {
    pub(super) mailbox: Arc<Mailbox<Message>>,
    pub(super) pool: BufferPool,
    pub(super) device: DeviceInfo,
    /// Extension of this client's initiator port identifier where an address gives none.
    pub(super) extension: u64,
    pub(super) config: ClientBuilder,
    pub(super) thread: Mutex<Option<JoinHandle<()>>>,
}

impl Shared {
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
