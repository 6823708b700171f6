//! [`Config`] and its parts, checked and complete. Enums are shared with the file format, with the
//! descriptions used by its schema. Everything else is independent of YAML.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::ops::RangeInclusive;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use riser_scsi::config as scsi;
use riser_scsi::data::designator::Naa;
use riser_scsi::iscsi::chap::{Algorithm, Credentials};
use riser_scsi::iscsi::name::{IscsiName, TargetAddress};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::identity::HostId;
use super::io_limits::IoLimits;
use super::listen::Listen;
use super::source::{Source, Spec};
use super::value::{Guid, InitiatorId, Net, Percent};

/// A complete configuration. All references in it are valid.
#[derive(Debug, Clone, PartialEq)]
pub struct Config {
    /// Source text for default names, if it is configured; see [`HostId::of`].
    pub identity: Option<String>,
    /// Fail the start if any backend or portal is not available.
    pub strict: bool,
    /// Backends in file order. Names are unique.
    pub backends: Vec<Backend>,
    /// Targets in file order. Names are unique.
    pub targets: Vec<Target>,
    /// Number and CPUs of the worker threads.
    pub workers: Workers,
    /// Limits on sessions, commands and memory.
    pub limits: Limits,
    /// Provider and settings for RDMA devices.
    pub transport: Transport,
    /// Log filter and format.
    pub log: Log,
    /// Credentials required for discovery. If `None`, all initiators can discover targets.
    pub discovery_chap: Option<Chap>,
    /// Admin API socket.
    pub admin: Location,
    /// Directory for applied configurations.
    pub state: Location,
    /// TCP address for metrics and the status page. If `None`, they are only available via the
    /// admin socket.
    pub metrics: Option<Metrics>,
    /// Warnings for users that are not errors, such as an unused backend, or a target that no
    /// initiator can use.
    pub notes: Vec<String>,
}

impl Config {
    /// Returns the backend of a logical unit.
    #[must_use]
    pub fn backend(&self, lun: &Lun) -> &Backend {
        &self.backends[lun.backend]
    }
}

impl HostId {
    /// Returns the configured identity, or the machine's identity: its machine ID or its host name.
    /// Reads `/etc`.
    #[must_use]
    pub fn of(config: &Config) -> Self {
        match &config.identity {
            Some(identity) => Self::new(identity),
            None => Self::of_machine(),
        }
    }
}

/// A backend and the names of its logical units.
#[derive(Debug, Clone, PartialEq)]
pub struct Backend {
    /// Name in the file.
    pub name: String,
    /// Data source and open options.
    pub spec: Spec,
    /// Support UNMAP, if the backend supports it.
    pub thin: bool,
    /// Space usage in percent above which we warn initiators; only for files.
    pub threshold: Option<u8>,
    /// Allow START STOP UNIT to stop the unit.
    pub stoppable: bool,
    /// True if the medium is rotational, if configured.
    pub rotational: Option<bool>,
    /// Configured names.
    pub names: Names,
    /// Rate limits for all initiators of this unit in total.
    pub limits: IoLimits,
}

/// Configured names of a logical unit. The remaining names are derived.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Names {
    /// Unit serial number, as in VPD page 80h.
    pub serial: Option<String>,
    /// World-wide name (NAA), as in VPD page 83h.
    pub naa: Option<Naa>,
    /// T10 vendor identification in INQUIRY data.
    pub vendor: Option<String>,
    /// Product identification in INQUIRY data.
    pub product: Option<String>,
    /// Product revision level in INQUIRY data.
    pub revision: Option<String>,
}

impl Backend {
    /// Returns the source text for stable names: the backend name and its data source. This ensures
    /// that two daemons on a host which use the same name for different files get different names.
    fn seed(&self) -> String {
        match &self.spec.source {
            Source::File { path, .. } | Source::Device { path } => {
                format!("{}\0{}", self.name, path.display())
            }
            Source::Ram { .. } | Source::Null { .. } => self.name.clone(),
        }
    }

    /// Returns the names of a logical unit on this backend: the configured names, or names derived
    /// from the host identity, which do not change on restart.
    #[must_use]
    pub fn identity(&self, host: &HostId) -> scsi::Identity {
        let seed = self.seed();
        let or = |name: &Option<String>, default: &str| {
            name.clone().unwrap_or_else(|| default.to_owned())
        };
        scsi::Identity {
            vendor: or(&self.names.vendor, scsi::DEFAULT_VENDOR),
            product: or(&self.names.product, scsi::DEFAULT_PRODUCT),
            revision: or(&self.names.revision, scsi::DEFAULT_REVISION),
            serial: self
                .names
                .serial
                .clone()
                .unwrap_or_else(|| format!("{:016x}", host.derive("serial", &seed))),
            // Locally assigned, because we don't have a company identifier.
            naa: self
                .names
                .naa
                .unwrap_or_else(|| Naa::LocallyAssigned(host.derive("naa", &seed) >> 4)),
        }
    }
}

/// A target: portals, logical units, and access rules.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Target {
    /// Name in the file, used by the log and the API.
    pub name: String,
    /// Portals; there is at least one.
    pub portals: Vec<Portal>,
    /// Logical units by number, 0 to 16383.
    pub luns: BTreeMap<u16, Lun>,
    /// Initiators that can use the target, and the units visible to them.
    pub access: Access,
    /// iSCSI name, if the target has iSCSI portals.
    pub iqn: Option<IscsiName>,
    /// Credentials for iSCSI initiators, unless their access rule sets them. If `None`, no
    /// credentials are required when `access` is open.
    pub chap: Option<Chap>,
}

/// CHAP settings: accepted users, and our own credentials.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Chap {
    /// Accepted names and secrets; at least one.
    pub users: Vec<ChapUser>,
    /// Our credentials, if an initiator requests mutual authentication.
    pub mutual: Option<ChapUser>,
    /// Supported digest algorithms; at least one, and all by default.
    pub algorithms: Vec<Algorithm>,
}

/// A name and the location of its secret.
#[derive(Clone, PartialEq, Eq)]
pub struct ChapUser {
    /// User name, the value of CHAP_N.
    pub name: String,
    /// The secret, or its location.
    pub secret: Secret,
}

/// Hides the secret, so that it cannot appear in a log.
impl fmt::Debug for ChapUser {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ChapUser")
            .field("name", &self.name)
            .finish_non_exhaustive()
    }
}

/// A CHAP secret, or where to read it.
#[derive(Clone, PartialEq, Eq)]
pub enum Secret {
    /// Stored in the configuration.
    Inline(String),
    /// Stored in a file. The trailing newline is ignored.
    File(PathBuf),
    /// Stored in an environment variable of the daemon.
    Env(String),
    /// A credential passed by the service manager: a file with this name in
    /// `$CREDENTIALS_DIRECTORY`.
    Credential(String),
}

/// Secret length in bytes: at least 96 bits (RFC 7143 12.1.3), and at most the maximum length of a
/// login value.
pub(super) const SECRET_LEN: RangeInclusive<usize> = 12..=255;

impl ChapUser {
    /// Returns the name, and reads the secret.
    ///
    /// # Errors
    /// Fails with the file path if the secret does not exist, cannot be read, or is not 12 to 255
    /// bytes long.
    pub fn credentials(&self) -> io::Result<Credentials> {
        let secret = match &self.secret {
            Secret::Inline(secret) => secret.clone().into_bytes(),
            Secret::File(path) => {
                let secret = read_line(path)?;
                warn_readable(path);
                secret
            }
            Secret::Env(name) => match std::env::var_os(name) {
                Some(value) => value.into_encoded_bytes(),
                None => return Err(missing(format!("${name} is not set"))),
            },
            Secret::Credential(name) => match std::env::var_os("CREDENTIALS_DIRECTORY") {
                Some(dir) => read_line(&Path::new(&dir).join(name))?,
                None => return Err(missing("$CREDENTIALS_DIRECTORY is not set".into())),
            },
        };
        // The configuration check does not read files or the environment, so we need to check this
        // here.
        if !SECRET_LEN.contains(&secret.len()) {
            let place = match &self.secret {
                Secret::Inline(_) => String::new(),
                Secret::File(path) => format!("{}: ", path.display()),
                Secret::Env(name) => format!("${name}: "),
                Secret::Credential(name) => format!("credential {name}: "),
            };
            let why = format!(
                "{place}a secret must have 12 to 255 bytes, not {}",
                secret.len()
            );
            return Err(io::Error::new(io::ErrorKind::InvalidData, why));
        }
        Ok(Credentials {
            name: self.name.clone(),
            secret,
        })
    }
}

/// Warns if a file is readable by all users of this host.
fn warn_readable(path: &Path) {
    let mode = std::fs::metadata(path).map_or(0, |file| file.mode());
    if mode & 0o004 != 0 {
        tracing::warn!(path = %path.display(), "secret is readable by all users of this host: \
                                                remove the permission with chmod o=");
    }
}

/// Reads a file without its trailing newlines.
fn read_line(path: &Path) -> io::Result<Vec<u8>> {
    let named = |e: io::Error| io::Error::new(e.kind(), format!("{}: {e}", path.display()));
    if let Some(mount) = crate::mounts::find(path) {
        return Err(io::Error::other(crate::mounts::why(path, &mount)));
    }
    let mut bytes = std::fs::read(path).map_err(named)?;
    while bytes.last().is_some_and(|b| matches!(b, b'\n' | b'\r')) {
        bytes.pop();
    }
    Ok(bytes)
}

fn missing(message: String) -> io::Error {
    io::Error::new(io::ErrorKind::NotFound, message)
}

impl Target {
    /// Returns the logical units available to an initiator port at this address, by the numbers
    /// visible to the initiator. If `None`, the login should be rejected. The first matching rule
    /// is used.
    #[must_use]
    pub fn allowed_luns(
        &self,
        port_id: &[u8; 16],
        address: IpAddr,
    ) -> Option<BTreeMap<u16, SeenLun>> {
        self.luns_by(|rule| rule.is_match(port_id, address))
    }

    /// Same as [`Target::allowed_luns`] for an iSCSI initiator.
    #[must_use]
    pub fn allowed_luns_of(
        &self,
        initiator: &IscsiName,
        address: IpAddr,
    ) -> Option<BTreeMap<u16, SeenLun>> {
        self.luns_by(|rule| rule.is_match_by_name(initiator, address))
    }

    /// Returns the index of the rule for an iSCSI initiator, if any rule matches.
    #[must_use]
    pub fn rule_of(&self, initiator: &IscsiName, address: IpAddr) -> Option<usize> {
        match &self.access {
            Access::Open => None,
            Access::Rules(rules) => {
                let is_match = |rule: &Rule| rule.is_match_by_name(initiator, address);
                rules.iter().position(is_match)
            }
        }
    }

    /// Same as [`Target::rule_of`] for an SRP initiator port.
    #[must_use]
    pub fn rule_of_port(&self, port_id: &[u8; 16], address: IpAddr) -> Option<usize> {
        match &self.access {
            Access::Open => None,
            Access::Rules(rules) => {
                let is_match = |rule: &Rule| rule.is_match(port_id, address);
                rules.iter().position(is_match)
            }
        }
    }

    /// Returns the access rule with this index.
    #[must_use]
    pub fn rule(&self, number: usize) -> Option<&Rule> {
        match &self.access {
            Access::Open => None,
            Access::Rules(rules) => rules.get(number),
        }
    }

    fn luns_by(&self, is_match: impl Fn(&Rule) -> bool) -> Option<BTreeMap<u16, SeenLun>> {
        match &self.access {
            Access::Open => Some(self.seen_by(None)),
            Access::Rules(rules) => {
                let rule = rules.iter().find(|rule| is_match(rule))?;
                Some(self.seen_by(rule.luns.as_ref()))
            }
        }
    }

    /// Returns the logical units visible with these rule LUNs, by the numbers visible to
    /// initiators.
    #[must_use]
    pub fn seen_by(&self, luns: Option<&RuleLuns>) -> BTreeMap<u16, SeenLun> {
        let own = |(number, lun): (&u16, &Lun)| {
            let seen = SeenLun {
                number: *number,
                read_only: lun.read_only,
            };
            (*number, seen)
        };
        match luns {
            None => self.luns.iter().map(own).collect(),
            Some(RuleLuns::Mask(mask)) => {
                let luns = self.luns.iter();
                luns.filter(|(number, _)| mask.contains(number))
                    .map(own)
                    .collect()
            }
            Some(RuleLuns::Map(map)) => {
                let seen = map.iter();
                seen.filter_map(|(number, lun)| Some((*number, self.shown(lun)?)))
                    .collect()
            }
        }
    }

    /// Returns the LUN for a rule entry. If the target has several numbers for this backend, we use
    /// the first number with the same rights. A LUN that is read-only in the target is also
    /// read-only in each rule.
    fn shown(&self, wanted: &Lun) -> Option<SeenLun> {
        let same = |lun: &Lun| lun.backend == wanted.backend;
        let mut all = self.luns.iter().filter(|(_, lun)| same(lun));
        let first = all.clone().next();
        let exact = all.find(|(_, lun)| lun.read_only == wanted.read_only);
        let (number, lun) = exact.or(first)?;
        Some(SeenLun {
            number: *number,
            read_only: lun.read_only || wanted.read_only,
        })
    }
}

/// A logical unit of a target.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Lun {
    /// Backend index in [`Config::backends`].
    pub backend: usize,
    /// Reject writes via this LUN, even if the backend allows them.
    pub read_only: bool,
}

/// A LUN as seen by an initiator.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SeenLun {
    /// Number in the target.
    pub number: u16,
    /// Reject writes, as for a write-protected disk.
    pub read_only: bool,
}

/// Initiators that can log in to a target.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Access {
    /// All initiators that can connect to a portal.
    Open,
    /// Initiators allowed by a rule. If the list is empty, no initiator is allowed.
    Rules(Vec<Rule>),
}

/// Allows initiators if all of the fields that are set match.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Rule {
    /// SRP initiator port. If `None`, matches all ports unless `iqn` is set.
    pub initiator: Option<InitiatorId>,
    /// iSCSI initiator name. If `None`, matches all names unless `initiator` is set.
    pub iqn: Option<IscsiName>,
    /// Source address. If `None`, matches all addresses.
    pub address: Option<Net>,
    /// Available units and their numbers. If `None`, all units with the target's numbers.
    pub luns: Option<RuleLuns>,
    /// Credentials for iSCSI. If `None`, the target's setting is used.
    pub chap: Option<Chap>,
    /// Rate limits for each initiator of this target.
    pub limits: Option<IoLimits>,
}

/// The units of a target that an initiator can use.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum RuleLuns {
    /// A set of LUNs, with the numbers used by the target.
    Mask(BTreeSet<u16>),
    /// Backends by rule-specific numbers. Each backend must be used by a unit of the target.
    Map(BTreeMap<u16, Lun>),
}

/// The initiators matched by a rule: SRP initiator port, iSCSI name, source address.
pub type RuleSubject = (Option<InitiatorId>, Option<IscsiName>, Option<Net>);

impl Rule {
    /// Returns the initiators matched by this rule.
    #[must_use]
    pub fn subject(&self) -> RuleSubject {
        (self.initiator, self.iqn.clone(), self.address)
    }

    /// Returns true if this rule matches initiators by name, not only by address.
    #[must_use]
    pub fn names_initiators(&self) -> bool {
        self.initiator.is_some() || self.iqn.is_some()
    }

    /// Returns true if this rule matches the initiator port at this address.
    #[must_use]
    pub fn is_match(&self, port_id: &[u8; 16], address: IpAddr) -> bool {
        let is_named = match (&self.initiator, &self.iqn) {
            (Some(initiator), _) => initiator.is_match(port_id),
            (None, iqn) => iqn.is_none(),
        };
        is_named && self.address.is_none_or(|n| n.contains(address))
    }

    /// Returns true if this rule matches the iSCSI initiator at this address.
    #[must_use]
    pub fn is_match_by_name(&self, name: &IscsiName, address: IpAddr) -> bool {
        let is_named = match (&self.iqn, &self.initiator) {
            (Some(iqn), _) => iqn == name,
            (None, initiator) => initiator.is_none(),
        };
        is_named && self.address.is_none_or(|n| n.contains(address))
    }
}

/// A storage protocol.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Deserialize, Serialize, JsonSchema,
)]
#[serde(rename_all = "lowercase")]
pub enum Protocol {
    /// SCSI RDMA Protocol.
    Srp,
    /// iSCSI over TCP.
    Iscsi,
    /// iSCSI over RDMA.
    Iser,
}

impl Protocol {
    /// Returns true if the protocol uses iSCSI names for initiators and targets.
    #[must_use]
    pub fn is_iscsi(self) -> bool {
        matches!(self, Self::Iscsi | Self::Iser)
    }

    /// Returns true if the protocol needs an RDMA device.
    #[must_use]
    pub fn is_rdma(self) -> bool {
        matches!(self, Self::Srp | Self::Iser)
    }
}

impl fmt::Display for Protocol {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Srp => "srp",
            Self::Iscsi => "iscsi",
            Self::Iser => "iser",
        })
    }
}

/// A portal of a target. Identifiers that are not configured are derived by
/// [`Portal::service_guid`] and similar methods.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Portal {
    /// The protocol of this portal.
    pub protocol: Protocol,
    /// Address or addresses, with the RDMA CM or TCP port.
    pub listen: Listen,
    /// Configured service GUID.
    pub set_service_guid: Option<Guid>,
    /// Configured I/O controller GUID.
    pub set_ioc_guid: Option<Guid>,
    /// Configured identifier extension.
    pub set_id_ext: Option<Guid>,
    /// If set, redirect iSCSI or SRP initiators that log in here to another address.
    pub redirect: Option<Redirect>,
}

/// A redirect to another address of a target.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Redirect {
    /// Address and port of the other portal.
    pub to: TargetAddress,
    /// True if initiators should remember the new address. Always false for SRP.
    pub permanent: bool,
}

impl Redirect {
    /// Returns the address of the other portal, unless it is a host name. Always set for SRP.
    #[must_use]
    pub fn ip(&self) -> Option<IpAddr> {
        let host = self.to.host.trim_start_matches('[').trim_end_matches(']');
        host.parse().ok()
    }
}

impl Portal {
    /// Returns the I/O controller GUID. If it is not configured, it is derived from the host and
    /// the target.
    #[must_use]
    pub fn ioc_guid(&self, host: &HostId, target: &str) -> Guid {
        self.set_ioc_guid
            .unwrap_or_else(|| host.local_guid("ioc", target))
    }

    /// Returns the service GUID. If it is not configured, this is the I/O controller GUID.
    #[must_use]
    pub fn service_guid(&self, host: &HostId, target: &str) -> Guid {
        self.set_service_guid
            .unwrap_or_else(|| self.ioc_guid(host, target))
    }

    /// Returns the identifier extension. If it is not configured, this is the I/O controller GUID.
    #[must_use]
    pub fn id_ext(&self, host: &HostId, target: &str) -> Guid {
        self.set_id_ext
            .unwrap_or_else(|| self.ioc_guid(host, target))
    }
}

/// Maximum number of workers.
pub const MAX_WORKERS: usize = 64;

/// Worker thread settings.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Workers {
    /// Number of threads. `None` means one thread per listed CPU. Without a list, we use one thread
    /// per core, or one per two cores if there are fewer than four.
    pub count: Option<usize>,
    /// CPUs to pin the threads to, in order. If empty, threads are not pinned.
    pub cpus: Vec<usize>,
}

impl Workers {
    /// Returns the number of workers for a host with this many cores. The configured number is
    /// rounded down to a power of two, because the low bits of a queue pair number select the
    /// worker.
    #[must_use]
    pub fn number(&self, cores: usize) -> usize {
        1 << self.wanted(cores).clamp(1, MAX_WORKERS).ilog2()
    }

    /// Returns the configured number.
    fn wanted(&self, cores: usize) -> usize {
        match (self.count, self.cpus.len()) {
            (Some(n), _) => n,
            // A polling worker would use CPU time needed by the kernel's network stack, and by
            // initiators on the same host.
            (None, 0) if cores < 4 => cores.div_ceil(2),
            (None, 0) => cores,
            (None, cpus) => cpus,
        }
    }

    /// Returns a note if fewer workers than configured will run on a host with this many cores.
    #[must_use]
    pub fn note(&self, cores: usize) -> Option<String> {
        let (wanted, number) = (self.wanted(cores), self.number(cores));
        (wanted > number).then(|| {
            format!(
                "{number} of {wanted} workers run: their number must be a power of two, at most \
                 {MAX_WORKERS}"
            )
        })
    }
}

/// Address for metrics and the status page.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Metrics {
    /// Address and TCP port.
    pub listen: SocketAddr,
    /// True if other hosts are allowed to connect.
    pub remote: bool,
}

/// Maximum value for the number of sessions: the connections of more sessions do not fit into a
/// worker's ring.
pub const MAX_SESSIONS: u32 = 7500;

/// Limits. Each value is fixed when the corresponding object is created.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// Maximum number of sessions (I_T nexuses).
    pub max_sessions: u32,
    /// Maximum number of sessions per source address.
    pub sessions_per_address: u32,
    /// Maximum number of channels per SRP session.
    pub channels_per_session: u32,
    /// Maximum number of connections per iSCSI session over TCP (RFC 7143 13.2), 1 to 8.
    pub connections_per_session: u32,
    /// Error recovery level of iSCSI sessions over TCP (RFC 7143 7.1.5, 13.20), 0 to 2.
    pub error_recovery_level: u32,
    /// Maximum number of commands per channel: the SRP request limit.
    pub queue_depth: u32,
    /// Maximum size of an information unit from an initiator, in bytes.
    pub max_iu_size: u32,
    /// Maximum transfer size of a command, in bytes. See [`window`](Self::window) for the part kept
    /// in memory.
    pub max_transfer: u32,
    /// Maximum bytes of a command's data in memory at a time: longer transfers are split into parts
    /// of this size. Configuration files use the smaller of `max_transfer` and [`WINDOW`].
    pub window: u32,
    /// Send queue size of an SRP channel, in work requests. Configuration files use four per
    /// command, and at least 64.
    pub send_queue: u32,
    /// Data buffer size of a worker, in bytes.
    pub buffer_pool: usize,
    /// Time for an initiator to send requested data, in whole seconds. For a long command, all data
    /// and the response can take eight times as long, not including the time that the connection
    /// needs to transfer the data.
    pub data_out_timeout: Duration,
}

/// [`Limits::window`] in bytes, unless transfers are shorter: the maximum block size of a worker's
/// memory.
pub const WINDOW: u32 = 1 << 20;

/// Default for [`Limits::data_out_timeout`]: the total time that LIO waits, five times three
/// seconds.
pub const DATA_OUT_TIMEOUT: Duration = Duration::from_secs(15);

/// RDMA devices of the portals.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Deserialize, Serialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Provider {
    /// The software NIC, over UDP.
    #[default]
    Roce,
    /// The host's RDMA devices, through rdma-core.
    RdmaCore,
    /// An RDMA device if it has the address, or else the software NIC.
    Auto,
    /// Shared memory, for initiators on this host only.
    Shm,
    /// iWARP: RDMA over TCP, for iSER only.
    Iwarp,
}

/// Provider and settings for RDMA devices.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Transport {
    /// The software NIC, RDMA devices of the host, or both.
    pub provider: Provider,
    /// Maximum path MTU in bytes: 256, 512, 1024, 2048 or 4096. `None` uses the interface MTU.
    pub mtu: Option<u16>,
    /// If set, the software NIC only accepts packets that were not forwarded by a router (RFC
    /// 5082).
    pub on_link: bool,
    /// If set, initiators on this host can use memory shared with the daemon, in addition to the
    /// portal devices.
    pub shm: bool,
    /// Subnet administrator where the ports of the software NIC are registered.
    pub administrator: Option<IpAddr>,
    /// Injected link faults, for tests.
    pub faults: Option<LinkFaults>,
}

/// Injected link faults, which affect sent packets.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LinkFaults {
    /// Percentage of packets to drop.
    pub loss: Percent,
    /// Percentage of packets to send twice.
    pub duplicate: Percent,
    /// Percentage of packets to reorder.
    pub reorder: Percent,
    /// Percentage of packets with a flipped bit.
    pub corrupt: Percent,
    /// Number of later packets that can overtake a held packet.
    pub reorder_window: u32,
    /// Random seed, so that a run can be repeated.
    pub seed: u64,
}

/// Path of a socket or directory used by the daemon.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum Location {
    /// The default path, if available.
    #[default]
    Default,
    /// This path. If it is not available, the daemon does not start.
    At(PathBuf),
    /// Disabled.
    Off,
}

/// Log filter and format.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Log {
    /// Filter in the syntax of `EnvFilter` in `tracing-subscriber`.
    pub filter: String,
    /// Text or JSON.
    pub format: LogFormat,
    /// True to include the audit log.
    pub audit: bool,
}

/// Log format.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Deserialize, Serialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum LogFormat {
    /// Human-readable lines.
    #[default]
    Text,
    /// A JSON object per line.
    Json,
}
