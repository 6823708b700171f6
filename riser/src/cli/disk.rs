//! Disks at any address: a logical unit of a target, an NBD export, a file or block device on this
//! host, or memory in this process.

use std::io;
use std::net::{IpAddr, Ipv4Addr, SocketAddr, UdpSocket};
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;
use std::task::Waker;
use std::time::{Duration, Instant};

use riser_block::{
    BlockDevice, BlockError, Buffer, Extent, Geometry, MemoryDevice, Service, Workload,
    ZeroOptions, task,
};
use riser_disks::ThreadDisk;
use riser_disks::file::{FileConfig, FileError};
use riser_disks::nbd::{NbdConfig, NbdError};
use riser_exports::nbd::NbdUri;
use riser_exports::nbd::client::HandshakeError;
use riser_initiator::engine::{Client, ClientBuilder, EngineError, Session, SessionStatus};
use riser_initiator::lun::{Lun, LunError, LunInfo};
use riser_initiator::protection::PiFormat;
use riser_initiator::request::RequestError;
use riser_initiator::session::{ConnectError, Down, SrpLoginError, Timing};
use riser_initiator::url::TargetUrl;
use riser_scsi::iscsi::login::LoginError as IscsiLogin;
use riser_scsi::iscsi::pdu::LoginStatus;
use riser_scsi::srp::LoginRejReason;
use riser_transport::iwarp::{Iwarp, IwarpConfig};
use riser_transport::rdma_core::RdmaCoreDevice;
use riser_transport::roce::{Roce, RoceConfig};
use riser_transport::verbs::CmError;

use super::address::Address;
use super::args::{ConnectOptions, ProtectionChoice, ProviderChoice};
use super::exit::{CliError, Exit};
use super::shared;

/// UDP port of RoCEv2, which must be available for a software NIC.
const ROCE_PORT: u16 = 4791;

/// Maximum duration of the first attempt to connect and log in. If a target is unavailable for a
/// short time, it's usually faster to retry than to wait for the first attempt. As the target may
/// also be slow, the timeout is doubled for each attempt.
const ATTEMPT: Duration = Duration::from_secs(3);

/// Minimum time between the start of two attempts. Without this limit, a target that immediately
/// rejects us would receive thousands of requests per second.
const PAUSE: Duration = Duration::from_millis(200);

/// Logs in to a target.
///
/// # Errors
/// Fails if there is no local address, or the connection or login fails.
pub fn connect(
    url: &TargetUrl,
    link: &ConnectOptions,
    timeout: Duration,
) -> Result<Session, CliError> {
    let client = start_engine(url, link, timeout)?;
    let url = with_link(url, link);
    let mut outcome = login(&client, &url, timeout);
    if let Err(error) = &outcome
        && link.provider == ProviderChoice::Auto
        && shared::is_of_another(&client, error)
    {
        // Shared memory depends on an IP address, which may also be used by targets of other
        // processes.
        tracing::info!(%error, "no shared-memory listener for {url}; trying the network");
        let client = start_on_network(&url, link, &engine_builder(link, timeout))?;
        outcome = login(&client, &url, timeout);
    }
    outcome.map_err(|error| {
        let failed = login_failed(&url, error);
        match shared::refusal(&client, &url) {
            Some(reason) => failed.help(reason),
            None => failed,
        }
    })
}

/// Logs in to a target using an existing engine. If the target doesn't respond, this is retried
/// until `timeout`. If the address doesn't include a target port, this is queried first.
fn login(client: &Client, url: &TargetUrl, timeout: Duration) -> Result<Session, EngineError> {
    let mut attempts = Attempts::new(timeout);
    let until = attempts.until;
    loop {
        let found = match url {
            TargetUrl::Srp(srp) => {
                // Only use half of the remaining time for the query. Otherwise we would never log
                // in to targets that don't support queries.
                let left = until.saturating_duration_since(Instant::now());
                match task::block_on(client.timeout(left / 2, client.find_port(srp))) {
                    Ok(found) => TargetUrl::Srp(found?),
                    Err(_) => url.clone(),
                }
            }
            TargetUrl::Iscsi(_) => url.clone(),
        };
        match login_once(client, &found, attempts.patience, until) {
            Ok(session) => return Ok(session.with_timeout(timeout)),
            Err(EngineError::Login(Down::Connect(
                ConnectError::TimedOut
                | ConnectError::Unreachable
                | ConnectError::Address(CmError::Timeout),
            ))) if attempts.again() => {}
            Err(error) => return Err(error),
        }
    }
}

/// Attempts to log in until a deadline.
#[derive(Debug)]
struct Attempts {
    /// Deadline of all attempts.
    until: Instant,
    /// Maximum duration of an attempt.
    longest: Duration,
    /// Maximum duration of the current attempt.
    patience: Duration,
    began: Instant,
}

impl Attempts {
    /// Starts the first attempt.
    fn new(timeout: Duration) -> Self {
        let began = Instant::now();
        Self {
            until: began + timeout,
            longest: timeout,
            patience: ATTEMPT.min(timeout),
            began,
        }
    }

    /// Starts another attempt with twice the duration. If the last attempt failed early, this
    /// sleeps first. Returns false after the deadline.
    fn again(&mut self) -> bool {
        let next = self.until.min(self.began + PAUSE);
        std::thread::sleep(next.saturating_duration_since(Instant::now()));
        self.patience = self.patience.saturating_mul(2).min(self.longest);
        self.began = Instant::now();
        self.began < self.until
    }
}

/// Applies connection options to an address: the number of channels for SRP, and the local address
/// for TCP, where no device is opened.
pub(super) fn with_link(url: &TargetUrl, link: &ConnectOptions) -> TargetUrl {
    let mut url = url.clone();
    match &mut url {
        TargetUrl::Srp(url) => url.channels = link.channels.or(url.channels),
        TargetUrl::Iscsi(url) if !url.is_iser() => url.src = link.addr.or(url.src),
        TargetUrl::Iscsi(_) => {}
    }
    url
}

/// Logs in once. The address includes the target port, unless it's unknown.
pub(super) fn login_once(
    client: &Client,
    url: &TargetUrl,
    patience: Duration,
    until: Instant,
) -> Result<Session, EngineError> {
    let left = until.saturating_duration_since(Instant::now());
    task::block_on(client.timeout(left, client.login(url, patience)))
        .unwrap_or(Err(EngineError::Login(ConnectError::TimedOut.into())))
}

pub(super) fn login_failed(url: &TargetUrl, error: EngineError) -> CliError {
    let exit = match &error {
        EngineError::Login(Down::Connect(
            ConnectError::TimedOut | ConnectError::Address(CmError::Timeout),
        )) => Exit::Timeout,
        EngineError::Login(Down::Connect(ConnectError::Local(_))) | EngineError::Gone => {
            Exit::Failure
        }
        EngineError::Device(_) => Exit::Failure,
        EngineError::Unnamed
        | EngineError::SamePortal(_)
        | EngineError::Ambiguous
        | EngineError::NoTarget
        | EngineError::Secret(_) => Exit::Usage,
        _ => Exit::Refused,
    };
    // Most failed logins have one of a few causes, for which we provide specific advice. For other
    // causes, we suggest checking the target.
    let help = match &error {
        EngineError::Unnamed | EngineError::Ambiguous => {
            "for example srp://HOST/LUN?id_ext=HEX&ioc_guid=HEX; use `riser discover` on the \
             software NIC to find them"
        }
        EngineError::NoTarget => "for example iscsi://HOST/iqn.2026-01.com.example:disk/0",
        EngineError::Login(Down::OtherUnit | Down::NoIdentity) => {
            "all portals of an address must lead to the same logical unit, which must report a \
             serial number or a designator; use `riser inquiry` with one portal to check"
        }
        EngineError::Login(Down::Connect(ConnectError::Tcp(libc::ECONNREFUSED))) => {
            "no process is listening on this port: check the port, and whether the target is \
             running"
        }
        EngineError::Secret(_) => "set the password in the address, a file or the environment",
        EngineError::Login(Down::Connect(ConnectError::IscsiLogin(IscsiLogin::Refused(
            LoginStatus::AUTHENTICATION_FAILURE,
        )))) => "check the user name and password configured on the target for this initiator",
        EngineError::Login(Down::Connect(ConnectError::IscsiLogin(
            IscsiLogin::TargetNotProved,
        ))) => "the target's user name and password must match target_user",
        EngineError::Login(Down::Connect(ConnectError::Login(SrpLoginError::Rejected(
            LoginRejReason::ChannelLimitReached,
        )))) => "a Linux target also reports this for initiators missing from its access lists",
        _ => {
            "check whether the target is running, and whether its configuration allows this \
             initiator"
        }
    };
    CliError::new(exit, format!("cannot log in to {url}"))
        .because(error)
        .help(help)
}

/// Creates a builder for an engine using these options, except for the device.
fn engine_builder(link: &ConnectOptions, timeout: Duration) -> ClientBuilder {
    let timing = Timing {
        login: timeout.min(ATTEMPT),
        ..Timing::default()
    };
    let mut builder = Client::builder()
        .timing(timing)
        .protection(link.protection.into());
    if let Some(bytes) = link.buffers {
        builder = builder.pool(usize::try_from(bytes).unwrap_or(usize::MAX));
    }
    if let Some(port) = link.port {
        builder = builder
            .port(port)
            .guid(link.guid)
            .recovers(link.recovers)
            .noted_cache(link.noted)
            .was_redirected(link.was_redirected);
    }
    builder
}

/// Starts an engine using the requested local address, or a suitable address if none was specified.
pub(super) fn start_engine(
    url: &TargetUrl,
    link: &ConnectOptions,
    timeout: Duration,
) -> Result<Client, CliError> {
    let builder = engine_builder(link, timeout);
    if !url.needs_device() {
        if link.inject.is_some() {
            let what = "--inject requires the software NIC, which is not used for TCP";
            return Err(CliError::new(Exit::Usage, what));
        }
        return builder
            .without_device()
            .map_err(|error| CliError::new(Exit::Failure, "cannot start").because(error));
    }
    // With `auto`, we first try shared memory, then the RDMA device. The software NIC is only used
    // if no device has this address. We never use another provider if one was specified explicitly.
    // In particular, shared memory must not replace a network, because `roce` may be used for
    // measurements.
    if matches!(link.provider, ProviderChoice::Shm | ProviderChoice::Auto)
        && let Some(started) = shared::start(url, resolve(url)?.ip(), link, &builder)?
    {
        return Ok(started);
    }
    if link.provider == ProviderChoice::Iwarp {
        return start_on_iwarp(url, link, &builder);
    }
    start_on_network(url, link, &builder)
}

/// Starts an engine using an iWARP device.
fn start_on_iwarp(
    url: &TargetUrl,
    link: &ConnectOptions,
    builder: &ClientBuilder,
) -> Result<Client, CliError> {
    let usage = |what: &str| Err(CliError::new(Exit::Usage, what));
    if matches!(url, TargetUrl::Srp(_)) {
        return usage("SRP does not support iWARP: use an address that starts with iser://");
    }
    if link.inject.is_some() {
        return usage("--inject requires the software NIC, which is not used for iWARP");
    }
    let addr = match link.addr.or(url.src()) {
        Some(addr) => addr,
        None => route_source(resolve(url)?)?,
    };
    let open = move || Iwarp::open(IwarpConfig::new(addr));
    builder.clone().build(open).map_err(|error| {
        let what = format!("cannot open an iWARP device at {addr}");
        CliError::new(Exit::Failure, what).because(error)
    })
}

/// Starts an engine using an RDMA device or the software NIC.
fn start_on_network(
    url: &TargetUrl,
    link: &ConnectOptions,
    builder: &ClientBuilder,
) -> Result<Client, CliError> {
    if link.provider != ProviderChoice::Roce {
        let addr = match link.addr.or(url.src()) {
            Some(addr) => addr,
            None => route_source(resolve(url)?)?,
        };
        let opened = builder
            .clone()
            .build(move || RdmaCoreDevice::open(addr).map_err(io::Error::other));
        match opened {
            Ok(_) if link.inject.is_some() => {
                return Err(CliError::new(
                    Exit::Usage,
                    "--inject requires the software NIC, and cannot be used with an RDMA device",
                ));
            }
            Ok(client) => return Ok(client),
            Err(error) if link.provider == ProviderChoice::Auto => {
                tracing::info!(
                    %error,
                    "no RDMA device has the address {addr}; using the software NIC"
                );
            }
            Err(error) => return Err(no_rdma_device(addr, error)),
        }
    }
    let faults = link.inject.unwrap_or_default();
    let start = |addr: IpAddr| {
        let mut config = RoceConfig::new(addr);
        config.faults = faults;
        builder.clone().build(move || Roce::open(&config))
    };
    let source = match link.addr.or(url.src()) {
        Some(addr) => addr,
        None => match resolve(url)? {
            target if !target.ip().is_loopback() => route_source(target)?,
            SocketAddr::V6(target) => (*target.ip()).into(),
            SocketAddr::V4(target) => return start_on_loopback(*target.ip(), start),
        },
    };
    start(source).map_err(|error| no_device(source, error))
}

/// Starts an engine using an unused loopback address.
fn start_on_loopback<C>(
    target: Ipv4Addr,
    start: impl Fn(IpAddr) -> Result<C, EngineError>,
) -> Result<C, CliError> {
    let addresses = (2..=254).map(|last| Ipv4Addr::new(127, 0, 0, last));
    for addr in addresses.filter(|addr| *addr != target) {
        match start(addr.into()) {
            Err(EngineError::Device(e)) if e.kind() == io::ErrorKind::AddrInUse => {}
            started => return started.map_err(|error| no_device(addr.into(), error)),
        }
    }
    Err(CliError::new(
        Exit::Busy,
        "all loopback addresses from 127.0.0.2 to 127.0.0.254 are in use",
    ))
}

fn no_device(addr: IpAddr, error: EngineError) -> CliError {
    let what = format!("cannot open a software NIC at {addr}");
    match error {
        EngineError::Device(e) => CliError::io(what, e).help(format!(
            "use --addr to select a local address where UDP port {ROCE_PORT} is unused"
        )),
        other => CliError::new(Exit::Failure, what).because(other),
    }
}

fn no_rdma_device(addr: IpAddr, error: EngineError) -> CliError {
    CliError::new(
        Exit::NotFound,
        format!("cannot open an RDMA device at {addr}"),
    )
    .because(error)
    .help("use `rdma link` to list the devices of this host, or --provider roce without a device")
}

fn resolve(url: &TargetUrl) -> Result<SocketAddr, CliError> {
    url.resolve().map_err(|e| {
        let what = format!("cannot resolve host {}", url.host());
        CliError::new(Exit::Refused, what).because(e)
    })
}

/// Returns the source address of the route to a target.
pub(super) fn route_source(target: SocketAddr) -> Result<IpAddr, CliError> {
    let any: SocketAddr = match target {
        SocketAddr::V4(_) => (Ipv4Addr::UNSPECIFIED, 0).into(),
        SocketAddr::V6(_) => (std::net::Ipv6Addr::UNSPECIFIED, 0).into(),
    };
    // Connecting a datagram socket only selects the route, and doesn't send any packets.
    UdpSocket::bind(any)
        .and_then(|socket| {
            socket.connect(target)?;
            socket.local_addr()
        })
        .map(|local| local.ip())
        .map_err(|e| {
            CliError::new(Exit::Refused, format!("no route to {}", target.ip())).because(e)
        })
}

/// Converts an error of a logical unit, including its exit status.
pub(super) fn lun_failed(what: String, error: LunError) -> CliError {
    let exit = match &error {
        LunError::NoUnit
        | LunError::NotADisk(_)
        | LunError::Number(_)
        | LunError::Unprotected(_) => Exit::NotFound,
        LunError::Request(RequestError::TimedOut) => Exit::Timeout,
        _ => Exit::Failure,
    };
    CliError::new(exit, what).because(error)
}

enum Kind {
    Memory(MemoryDevice),
    /// An NBD export, file or block device.
    Thread(ThreadDisk),
    Lun(Lun),
}

/// Connects to an NBD export.
fn open_nbd(uri: &NbdUri, link: &ConnectOptions, access: Access) -> Result<ThreadDisk, CliError> {
    refuse_link(link, "an NBD export")?;
    let config = NbdConfig {
        connect: access.login,
        operation: access.operation,
        read_only: access.read_only,
        buffers: link.buffers.unwrap_or(riser_disks::BUFFERS),
    };
    riser_disks::nbd::connect(uri, config).map_err(|error| {
        let exit = match &error {
            _ if error.is_timeout() => Exit::Timeout,
            NbdError::Handshake(HandshakeError::UnknownExport { .. }) => Exit::NotFound,
            NbdError::Start(_) | NbdError::Size { .. } | NbdError::MaxPayload { .. } => {
                Exit::Failure
            }
            _ => Exit::Refused,
        };
        let mut failed = CliError::new(exit, format!("cannot use {uri}")).because(error);
        if exit == Exit::NotFound {
            failed = failed.help("use `nbdinfo --list` to list the exports of a server");
        }
        failed
    })
}

/// Opens a file or block device on this host.
fn open_file(
    path: &Path,
    direct: bool,
    link: &ConnectOptions,
    read_only: bool,
) -> Result<ThreadDisk, CliError> {
    refuse_link(link, "a file")?;
    let config = FileConfig {
        direct,
        read_only,
        buffers: link.buffers.unwrap_or(riser_disks::BUFFERS),
    };
    riser_disks::file::open(path, config).map_err(|error| {
        let what = format!("cannot use {} as a disk", path.display());
        match error {
            FileError::Open { source } => CliError::io(what, source),
            FileError::InUse => CliError::new(Exit::Busy, what).because(error).help(
                "unmount it, or remove it from the device that contains it; use `lsblk` to \
                     find it",
            ),
            FileError::Kind(_) | FileError::NoDirect | FileError::Size { .. } => {
                CliError::new(Exit::Usage, what).because(error)
            }
            FileError::Start(_) => CliError::new(Exit::Failure, what).because(error),
        }
    })
}

/// Rejects options for the connection to a target if the disk doesn't have one, because they would
/// have no effect.
fn refuse_link(link: &ConnectOptions, what: &str) -> Result<(), CliError> {
    let given = [
        (link.addr.is_some(), "--addr"),
        (link.channels.is_some(), "--channels"),
        (link.inject.is_some(), "--inject"),
        (
            link.protection != ProtectionChoice::default(),
            "--protection",
        ),
    ];
    match given.iter().find(|(is_given, _)| *is_given) {
        None => Ok(()),
        Some((_, option)) => Err(CliError::new(
            Exit::Usage,
            format!("{option} only applies to connections to a target, not to {what}"),
        )),
    }
}

/// A disk at any address.
pub struct Disk {
    kind: Kind,
    geometry: Geometry,
}

/// Limits for access to a disk.
#[derive(Clone, Copy, Debug)]
pub struct Access {
    /// Maximum time for the login.
    pub login: Duration,
    /// Maximum time for an operation, including reconnections.
    pub operation: Duration,
    /// Set to reject writes, even if they are supported by the disk.
    pub read_only: bool,
}

impl Disk {
    /// Opens the disk at this address.
    ///
    /// # Errors
    /// Returns errors from [`connect`], or fails if the disk doesn't exist.
    pub fn open(
        address: &Address,
        link: &ConnectOptions,
        access: Access,
    ) -> Result<Self, CliError> {
        let kind = match address {
            Address::Memory {
                capacity,
                block_size,
            } => Kind::Memory(
                MemoryDevice::new(*capacity, *block_size)
                    .map(|disk| {
                        disk.with_buffer_budget(link.buffers.unwrap_or(riser_disks::BUFFERS))
                    })
                    .and_then(MemoryDevice::with_thread)
                    .map_err(|e| CliError::io(format!("cannot create {address}"), e))?,
            ),
            Address::Nbd(uri) => Kind::Thread(open_nbd(uri, link, access)?),
            Address::File { path, direct } => {
                Kind::Thread(open_file(path, *direct, link, access.read_only)?)
            }
            Address::Target(url) => {
                let session = connect(url, link, access.login)?;
                let lun = task::block_on(session.lun(address.lun()))
                    .map_err(|e| lun_failed(format!("cannot use {url}"), e))?;
                Kind::Lun(lun.with_timeout(access.operation))
            }
        };
        let mut geometry = match &kind {
            Kind::Memory(disk) => disk.geometry().clone(),
            Kind::Thread(disk) => disk.geometry().clone(),
            Kind::Lun(lun) => lun.geometry().clone(),
        };
        geometry.read_only |= access.read_only;
        Ok(Self { kind, geometry })
    }

    /// Returns the GUID of the initiator port for a logical unit.
    #[must_use]
    pub fn port_guid(&self) -> Option<u64> {
        match &self.kind {
            Kind::Memory(_) | Kind::Thread(_) => None,
            Kind::Lun(lun) => Some(lun.session().port_guid()),
        }
    }

    /// Returns the name of the RDMA device used for the connection, including the provider. Returns
    /// `None` if there isn't one, e.g. for memory or TCP.
    #[must_use]
    pub fn device(&self) -> Option<String> {
        match &self.kind {
            Kind::Lun(lun) if lun.session().url().needs_device() => {
                Some(lun.session().client().device().to_owned())
            }
            _ => None,
        }
    }

    /// Returns the description provided by the disk.
    #[must_use]
    pub fn description(&self) -> String {
        match &self.kind {
            Kind::Memory(_) => "a disk in memory".into(),
            Kind::Thread(disk) => disk.description().to_owned(),
            Kind::Lun(lun) => {
                let inquiry = &lun.info().inquiry;
                let name = format!("{} {}", inquiry.vendor.trim(), inquiry.product.trim());
                match self.protection() {
                    Some(number) => format!("{name}, protection type {number}"),
                    None => name,
                }
            }
        }
    }

    /// Returns the type of the protection information that is transferred with the data, if any.
    #[must_use]
    pub fn protection(&self) -> Option<u8> {
        match &self.kind {
            Kind::Memory(_) | Kind::Thread(_) => None,
            Kind::Lun(lun) => lun.protection().map(PiFormat::type_number),
        }
    }

    /// Returns information from INQUIRY for a logical unit.
    #[must_use]
    pub fn info(&self) -> Option<&LunInfo> {
        match &self.kind {
            Kind::Memory(_) | Kind::Thread(_) => None,
            Kind::Lun(lun) => Some(lun.info()),
        }
    }

    /// Returns a globally unique name of the logical unit, if it has one. This is a designator, or
    /// the vendor, product and serial number.
    #[must_use]
    pub fn unit(&self) -> Option<String> {
        let LunInfo {
            identity, inquiry, ..
        } = self.info()?;
        let names = [
            ("naa", &identity.naa),
            ("eui", &identity.eui),
            ("name", &identity.name),
            ("t10", &identity.t10),
        ];
        let mut names = names.into_iter();
        let designator = names.find_map(|(kind, name)| Some(format!("{kind}.{}", name.as_ref()?)));
        designator.or_else(|| {
            let (vendor, product) = (inquiry.vendor.trim(), inquiry.product.trim());
            let serial = identity.serial.as_ref()?.trim();
            (!serial.is_empty()).then(|| format!("serial.{vendor}.{product}.{serial}"))
        })
    }

    /// Returns the status of the session, if there is one.
    #[must_use]
    pub fn watch(&self) -> Option<Arc<SessionStatus>> {
        match &self.kind {
            Kind::Memory(_) | Kind::Thread(_) => None,
            Kind::Lun(lun) => Some(lun.session().watch()),
        }
    }

    /// Logs out from the session, or closes the connection or file. Returns whether the initiator
    /// port can be released, see [`Session::close_settled`].
    pub fn close(&self) -> bool {
        match &self.kind {
            Kind::Memory(_) => true,
            Kind::Thread(disk) => {
                disk.close();
                true
            }
            Kind::Lun(lun) => task::block_on(lun.session().close_settled()),
        }
    }
}

/// Forwards a call to the actual disk.
macro_rules! on_disk {
    ($self:ident, $disk:ident => $call:expr) => {
        match &$self.kind {
            Kind::Memory($disk) => $call,
            Kind::Thread($disk) => $call,
            Kind::Lun($disk) => $call,
        }
    };
}

impl BlockDevice for Disk {
    fn geometry(&self) -> &Geometry {
        &self.geometry
    }

    fn try_buffer(&self, len: usize) -> Option<Buffer> {
        on_disk!(self, disk => disk.try_buffer(len))
    }

    fn buffer_bytes(&self) -> u64 {
        on_disk!(self, disk => disk.buffer_bytes())
    }

    fn losses(&self) -> u64 {
        on_disk!(self, disk => disk.losses())
    }

    fn wake_when_free(&self, waker: &Waker) {
        on_disk!(self, disk => disk.wake_when_free(waker));
    }

    async fn buffer(&self, len: usize) -> Buffer {
        on_disk!(self, disk => disk.buffer(len).await)
    }

    fn host(&self, service: Box<dyn Service>) -> Result<(), Box<dyn Service>> {
        on_disk!(self, disk => disk.host(service))
    }

    fn drive(&self, workload: Box<dyn Workload>) -> Result<(), Box<dyn Workload>> {
        on_disk!(self, disk => disk.drive(workload))
    }

    async fn read(&self, offset: u64, buffer: Buffer) -> Result<Buffer, BlockError> {
        on_disk!(self, disk => BlockDevice::read(disk, offset, buffer).await)
    }

    async fn write(&self, offset: u64, buffer: Buffer, fua: bool) -> Result<Buffer, BlockError> {
        on_disk!(self, disk => BlockDevice::write(disk, offset, buffer, fua).await)
    }

    async fn flush(&self) -> Result<(), BlockError> {
        on_disk!(self, disk => BlockDevice::flush(disk).await)
    }

    async fn discard(&self, range: Range<u64>) -> Result<(), BlockError> {
        on_disk!(self, disk => BlockDevice::discard(disk, range).await)
    }

    async fn write_zeroes(
        &self,
        range: Range<u64>,
        options: ZeroOptions,
    ) -> Result<(), BlockError> {
        on_disk!(self, disk => BlockDevice::write_zeroes(disk, range, options).await)
    }

    async fn status(&self, range: Range<u64>) -> Result<Vec<Extent>, BlockError> {
        on_disk!(self, disk => BlockDevice::status(disk, range).await)
    }
}

/// Opens a disk for a verb that exits after using it.
pub(super) fn open(
    address: &Address,
    link: &ConnectOptions,
    timeout: Duration,
    read_only: bool,
) -> Result<Arc<Disk>, CliError> {
    let access = Access {
        login: timeout,
        operation: timeout,
        read_only,
    };
    Disk::open(address, link, access).map(Arc::new)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn silent_host_times_out_with_any_provider() {
        let url: TargetUrl = "srp://192.0.2.1/0".parse().unwrap();
        let exit = |error: ConnectError| {
            let error = login_failed(&url, EngineError::Login(error.into()));
            error.exit
        };
        assert_eq!(exit(ConnectError::TimedOut), Exit::Timeout);
        // For the connection manager in the kernel, address resolution is part of connecting.
        assert_eq!(exit(ConnectError::Address(CmError::Timeout)), Exit::Timeout);
        assert_eq!(exit(ConnectError::Unreachable), Exit::Refused);
    }

    #[test]
    fn login_attempts_are_spaced_and_bounded() {
        let timeout = PAUSE * 2;
        let mut attempts = Attempts::new(timeout);
        let mut again = 0;
        while attempts.again() {
            assert!(attempts.patience <= timeout);
            again += 1;
        }
        // The third attempt would start after the deadline.
        assert!(again <= 2, "{again}");
        let mut long = Attempts {
            longest: Duration::MAX,
            patience: Duration::MAX,
            ..attempts
        };
        assert!(!long.again());
    }

    #[test]
    fn used_loopback_addresses_are_skipped() {
        // Don't check for unused addresses in advance, as two programs could then select the same
        // address.
        let taken = |free: u8| {
            move |addr: IpAddr| match addr {
                IpAddr::V4(v4) if v4.octets()[3] < free => {
                    Err(EngineError::Device(io::ErrorKind::AddrInUse.into()))
                }
                addr => Ok(addr),
            }
        };
        let target = Ipv4Addr::new(127, 0, 0, 4);
        let started = |free: u8| start_on_loopback(target, taken(free)).ok();
        assert_eq!(started(1), Some([127, 0, 0, 2].into()));
        assert_eq!(started(4), Some([127, 0, 0, 5].into()), "not the target's");
        let all = start_on_loopback(target, taken(255)).unwrap_err();
        assert_eq!(all.exit, Exit::Busy);

        let refused = |_: IpAddr| -> Result<(), _> {
            Err(EngineError::Device(io::ErrorKind::PermissionDenied.into()))
        };
        let error = start_on_loopback(target, refused).unwrap_err();
        assert!(error.to_string().contains("127.0.0.2"), "{error}");
    }

    #[test]
    fn addresses() {
        assert_eq!(
            "mem:64M,4K".parse(),
            Ok(Address::Memory {
                capacity: 64 << 20,
                block_size: 4096
            })
        );
        let srp: Address = "srp://[::1]:5555/3".parse().unwrap();
        assert_eq!(srp.lun(), 3);
        let kernel: Address = "id_ext=2b,ioc_guid=02,dest=[::1]:5556,queue_size=7"
            .parse()
            .unwrap();
        let url = "srp://[::1]:5556/?id_ext=2b&ioc_guid=02&queue_size=7";
        assert_eq!(Ok(kernel), url.parse());
        for bad in [
            "id_ext=1,dest=",
            "dest=a,dest=b",
            "mem:",
            "mem:1M,513",
            "mem:1000",
            "nvme://x",
        ] {
            assert!(bad.parse::<Address>().is_err(), "{bad}");
        }
    }

    #[test]
    fn connection_options_are_added_to_url() {
        let link = ConnectOptions {
            addr: Some("127.0.0.9".parse().unwrap()),
            channels: Some(3),
            ..ConnectOptions::default()
        };
        for (url, want) in [
            ("srp://127.0.0.1/0", "srp://127.0.0.1/0?channels=3"),
            ("iscsi://127.0.0.1/", "iscsi://127.0.0.1/?src=127.0.0.9"),
            ("iser://127.0.0.1/", "iser://127.0.0.1/"),
        ] {
            assert_eq!(with_link(&url.parse().unwrap(), &link).to_string(), want);
        }
    }
}
