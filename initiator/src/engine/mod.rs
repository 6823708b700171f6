//! The engine: one thread that owns a device and any number of sessions, and the asynchronous API
//! on top of it.
//!
//! ```text
//!  any thread, any executor          engine thread
//!  ------------------------          -------------
//!  Client::connect, Session::submit ──mailbox──▶ Driver ── srp::session machines
//!  IoFuture ◀──────────── oneshot ───────────────  │
//!  Workload (runs here, without a wake-up) ───────▶ │
//!                                                Provider (verbs, connection manager)
//! ```
//!
//! - [`Client`]: starts and stops the thread, makes sessions, owns the buffer pool.
//! - [`Session`]: commands to logical units of one target; see [`crate::lun`] for disks.
//! - [`ScsiIo`], [`IoEnd`], [`IoFuture`]: a command, its end, and the wait for it.
//! - [`Workload`]: submissions from the engine's own thread, for benchmarks at high queue depth.
//!
//! # Invariants
//! - The engine owns a command's buffers from submission to its end, whatever becomes of the future
//!   that waits. Dropping a future abandons the wait, never the memory.
//! - A buffer is reachable for the target only while its command is outstanding: it is registered
//!   for that command and invalidated before the end is told. The exception is a session made with
//!   `register_always=0`, whose target may reach the whole pool while the session lasts.
//! - Wakers are called on the engine's thread with no lock held. What they run must not block.

mod conn;
mod driver;
mod io;
mod oneshot;
mod park;
mod pool;
mod status;
mod timer;

use std::future::Future;
use std::hash::{BuildHasher, Hasher, RandomState};
use std::io as stdio;
use std::net::{SocketAddr, ToSocketAddrs};
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use riser_scsi::srp::{MultiChannelAction, PortIdParts};
use riser_transport::roce::{Roce, RoceConfig};
use riser_transport::verbs::{PKey, Provider};

pub use io::{IoData, IoEnd, ScsiIo, WorkQueue, Workload};
pub use pool::{BufferPool, TakeBuffer};
pub use status::{LinkState, SessionStatus};
pub use timer::{Elapsed, Timeout};

use self::conn::ConnConfig;
use self::driver::{Driver, DriverConfig, Message, Open, SessionGuard, Target, new_io};
use self::io::Done;
use self::oneshot::{Receiver, oneshot};
use self::park::Mailbox;
use crate::block::Buffer;
use crate::srp::channel::ChannelConfig;
use crate::srp::discovery::{DiscoveryError, FoundPort, plan_port};
use crate::srp::request::RequestError;
use crate::srp::session::{Down, SessionConfig, Timing};
use crate::srp::url::{Host, SrpUrl};

/// How long a call of a session may take unless told otherwise.
pub const DEFAULT_TIMEOUT: Duration = Duration::from_secs(60);

/// Why the engine could not do something.
#[derive(Debug, thiserror::Error)]
pub enum EngineError {
    /// The device or the operating system refused at the start.
    #[error("device cannot be opened: {0}")]
    Device(#[from] stdio::Error),
    /// The host name has no address, or none of the device's family.
    #[error("host `{0}` has no usable address")]
    NoAddress(String),
    /// The session could not be made.
    #[error("cannot log in: {0}")]
    Login(#[from] Down),
    /// The device has no such partition key.
    #[error("device has no partition key {0:04x}")]
    NoPartition(u16),
    /// The address offers several target ports, and none was named.
    #[error("target has several ports; name one with its id_ext and ioc_guid")]
    Ambiguous,
    /// Nothing could be found out about the address.
    #[error(transparent)]
    Discovery(#[from] DiscoveryError),
    /// The engine has been shut down.
    #[error("engine is shut down")]
    Gone,
}

/// How to make a [`Client`].
#[derive(Clone, Debug)]
pub struct ClientBuilder {
    pool: usize,
    spin: Duration,
    timing: Timing,
    queue_size: u16,
    max_immediate: u32,
    region_segments: u32,
    max_requests: usize,
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

    /// Starts the engine on a software NIC at a local address.
    ///
    /// # Errors
    /// As [`Self::build`].
    pub fn open(self, addr: std::net::IpAddr) -> Result<Client, EngineError> {
        self.build(move || Roce::open(&RoceConfig::new(addr)))
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
                    let device = Device::of(&provider);
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
        let extension = RandomState::new().build_hasher().finish();
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

/// What the engine's device is.
#[derive(Clone, Debug)]
struct Device {
    name: String,
    guid: u64,
    region_segments: u32,
    pkeys: Vec<PKey>,
}

impl Device {
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
            pkeys: (0..entries)
                .filter_map(|i| provider.query_pkey(1, i).ok())
                .collect(),
        }
    }

    /// Whether the device is in a partition, as a full member or a limited one.
    fn has_pkey(&self, pkey: u16) -> bool {
        self.pkeys.iter().any(|p| p.0 & 0x7fff == pkey & 0x7fff)
    }
}

struct Shared {
    mailbox: Arc<Mailbox<Message>>,
    pool: BufferPool,
    device: Device,
    /// Extension of this client's initiator port identifier where an address gives none.
    extension: u64,
    config: ClientBuilder,
    thread: Mutex<Option<JoinHandle<()>>>,
}

impl Shared {
    fn stop(&self) {
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

/// An engine. Clones share it; when the last clone, session and logical unit is gone, it closes its
/// sessions and ends.
#[derive(Clone)]
pub struct Client(Arc<Shared>);

impl std::fmt::Debug for Client {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Client")
            .field("device", &self.0.device.name)
            .finish_non_exhaustive()
    }
}

impl Client {
    /// How to make one.
    #[must_use]
    pub fn builder() -> ClientBuilder {
        ClientBuilder::default()
    }

    /// The device's name.
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

    /// Asks an address which SRP ports it offers. A host name is looked up on the calling thread.
    ///
    /// # Errors
    /// [`EngineError::Discovery`] where nobody answers, or the device cannot ask.
    pub async fn discover(&self, url: &SrpUrl) -> Result<Vec<FoundPort>, EngineError> {
        let ip = resolve(url)?.dst.ip();
        let (reply, answer) = oneshot();
        let message = Message::Discover {
            ip,
            transaction: RandomState::new().build_hasher().finish(),
            reply,
        };
        self.0
            .mailbox
            .send(message)
            .map_err(|_| EngineError::Gone)?;
        Ok(answer.await.ok_or(EngineError::Gone)??)
    }

    /// The address with the target port's identifier in it: found out where it names none.
    async fn complete_url(&self, url: &SrpUrl) -> Result<SrpUrl, EngineError> {
        let mut url = url.clone();
        if url.id_ext.is_some() || url.ioc_guid.is_some() {
            return Ok(url);
        }
        match self.discover(&url).await {
            Ok(found) => match plan_port(&found, url.port) {
                Some(port) => {
                    url.id_ext = Some(port.id_ext);
                    url.ioc_guid = Some(port.ioc_guid);
                }
                None if found.iter().any(|f| f.port() == Some(url.port)) => {
                    return Err(EngineError::Ambiguous);
                }
                None => {}
            },
            // Not every target can be asked. The login will tell what it thinks of no identifier.
            Err(EngineError::Discovery(_)) => {}
            Err(e) => return Err(e),
        }
        Ok(url)
    }

    /// Logs in to a target. A host name is looked up on the calling thread. Where the address names
    /// no target port, the target is asked which it has; [`Session::url`] names it then.
    ///
    /// # Errors
    /// [`EngineError`]; the login is tried once, for as long as [`Timing::login`] says.
    pub async fn connect(&self, url: &SrpUrl) -> Result<Session, EngineError> {
        if let Some(pkey) = url.pkey.filter(|p| !self.0.device.has_pkey(*p)) {
            return Err(EngineError::NoPartition(pkey));
        }
        let url = &self.complete_url(url).await?;
        let target = resolve(url)?;
        let status = Arc::new(SessionStatus::default());
        let (reply, answer) = oneshot();
        let open = self.plan_open(url, target, status.clone(), reply);
        self.0
            .mailbox
            .send(Message::Open(Box::new(open)))
            .map_err(|_| EngineError::Gone)?;
        let guard = answer.await.ok_or(EngineError::Gone)??;
        Ok(Session {
            handle: Arc::new(SessionHandle {
                guard,
                client: self.clone(),
                status,
                url: url.clone(),
            }),
            timeout: DEFAULT_TIMEOUT,
        })
    }

    /// Waits for a future, but not longer than `limit`. The engine keeps the time, so any executor
    /// will do. A future that is late is dropped with the wait.
    pub fn timeout<F: Future>(&self, limit: Duration, future: F) -> Timeout<F> {
        let (sender, receiver) = oneshot();
        let message = Message::Timer(Instant::now() + limit, sender);
        // A closed mailbox drops the sender, which ends the wait.
        drop(self.0.mailbox.send(message));
        Timeout::new(future, receiver)
    }

    fn plan_open(
        &self,
        url: &SrpUrl,
        target: Target,
        status: Arc<SessionStatus>,
        reply: oneshot::Sender<Result<SessionGuard, Down>>,
    ) -> Open {
        let config = &self.0.config;
        let queue_size = url.queue_size.unwrap_or(config.queue_size);
        let inline_descriptors = url.cmd_sg_entries.unwrap_or(12);
        let external_descriptors = match url.allow_ext_sg {
            Some(true) => 256,
            _ => 0,
        };
        let max_immediate = match url.immediate {
            Some(false) => 0,
            _ => config.max_immediate,
        };
        let immediate_iu = 68 + max_immediate;
        let table_iu = 84 + 16 * u32::from(inline_descriptors);
        let asked = url.max_it_iu_size.unwrap_or(immediate_iu.max(table_iu));
        let channel = ChannelConfig {
            queue_size,
            max_it_iu_len: asked.max(riser_scsi::srp::MIN_MAX_IU_LEN),
            inline_descriptors,
            external_descriptors,
            max_immediate,
            initiator_port: url.initiator_port(PortIdParts {
                extension: self.0.extension,
                guid: self.0.device.guid,
            }),
            target_port: url.target_port(),
            multi_channel: MultiChannelAction::Single,
        };
        let region_segments = config.region_segments.min(self.0.device.region_segments);
        Open {
            target,
            config: SessionConfig {
                channels: url.channels.unwrap_or(1),
                channel,
                max_requests: config.max_requests.max(queue_size.into()),
                timing: config.timing,
                max_attempts: 32,
            },
            conn: ConnConfig {
                queue_size,
                inline_descriptors,
                external_descriptors,
                region_segments: region_segments.max(1),
            },
            pool_wide: url.register_always == Some(false),
            status,
            reply,
        }
    }
}

/// The addresses that a URL means.
fn resolve(url: &SrpUrl) -> Result<Target, EngineError> {
    let dst = match &url.host {
        Host::Ip(ip) => SocketAddr::new(*ip, url.port),
        Host::Name(name) => {
            let none = || EngineError::NoAddress(name.clone());
            let fits = |a: &SocketAddr| url.src.is_none_or(|s| s.is_ipv4() == a.is_ipv4());
            let mut found = (name.as_str(), url.port)
                .to_socket_addrs()
                .map_err(|_| none())?;
            found.find(fits).ok_or_else(none)?
        }
    };
    Ok(Target {
        dst,
        src: url.src.map(|ip| SocketAddr::new(ip, 0)),
        service_id: url.service_id,
    })
}

struct SessionHandle {
    guard: SessionGuard,
    client: Client,
    status: Arc<SessionStatus>,
    url: SrpUrl,
}

/// A session with a target. Clones share it; the last one to go logs out.
#[derive(Clone)]
pub struct Session {
    handle: Arc<SessionHandle>,
    timeout: Duration,
}

impl std::fmt::Debug for Session {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Session")
            .field("url", &self.handle.url.to_string())
            .field("link", &self.handle.status.link())
            .finish_non_exhaustive()
    }
}

impl Session {
    /// The engine.
    #[must_use]
    pub fn client(&self) -> &Client {
        &self.handle.client
    }

    /// The address that the session was made with.
    #[must_use]
    pub fn url(&self) -> &SrpUrl {
        &self.handle.url
    }

    /// The same session with another limit for each call.
    #[must_use]
    pub fn with_timeout(mut self, timeout: Duration) -> Self {
        self.timeout = timeout;
        self
    }

    /// How long a call may take.
    #[must_use]
    pub fn timeout(&self) -> Duration {
        self.timeout
    }

    /// Waits for a data buffer of `len` bytes, within the session's limit.
    ///
    /// # Errors
    /// [`Elapsed`].
    pub async fn buffer(&self, len: usize) -> Result<Buffer, Elapsed> {
        let pool = self.client().buffers();
        match pool.try_take(len) {
            Some(buffer) => Ok(buffer),
            None => self.client().timeout(self.timeout, pool.take(len)).await,
        }
    }

    /// Whether it works, and what happened to it.
    #[must_use]
    pub fn status(&self) -> &SessionStatus {
        &self.handle.status
    }

    /// Sends a command. The engine holds its buffers until it has ended, whether or not the future
    /// is still there.
    pub fn submit(&self, io: ScsiIo) -> IoFuture {
        let (sender, receiver) = oneshot();
        let io = new_io(io, Done::Future(sender), Instant::now());
        let message = Message::Submit(self.handle.guard.key, Box::new(io));
        // A closed mailbox drops the message, and with it the sender.
        drop(self.handle.client.0.mailbox.send(message));
        IoFuture(receiver)
    }

    /// Runs a workload on the engine's thread.
    ///
    /// # Errors
    /// [`EngineError::Gone`].
    pub fn run(&self, workload: Box<dyn Workload>) -> Result<(), EngineError> {
        self.handle
            .client
            .0
            .mailbox
            .send(Message::Work(self.handle.guard.key, workload))
            .map_err(|_| EngineError::Gone)
    }

    /// Logs out and waits until everything is released. Outstanding commands end with
    /// [`RequestError::Closed`]; later ones too.
    pub async fn close(&self) {
        let (sender, receiver) = oneshot();
        let message = Message::Close(self.handle.guard.key, Some(sender));
        if self.handle.client.0.mailbox.send(message).is_ok() {
            receiver.await;
        }
    }
}

/// The end of a command, to come. Dropping it abandons the wait; the command goes on.
#[derive(Debug)]
#[must_use = "futures do nothing unless polled"]
pub struct IoFuture(Receiver<IoEnd>);

impl Future for IoFuture {
    type Output = IoEnd;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<IoEnd> {
        Pin::new(&mut self.0).poll(cx).map(|end| {
            end.unwrap_or(IoEnd {
                result: Err(RequestError::Closed),
                data: IoData::None,
            })
        })
    }
}

#[cfg(test)]
mod fake_target;
#[cfg(test)]
mod tests;
