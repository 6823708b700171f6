//! [`Config`] and its parts: checked and complete. Choices between words are those of the file,
//! with the descriptions of its schema; all else is free of anything YAML.

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

/// A whole configuration. Every reference in it resolves.
#[derive(Debug, Clone, PartialEq)]
pub struct Config {
    /// Text that default names are derived from, where the file says; see [`HostId::of`].
    pub identity: Option<String>,
    /// True if a start without all backends and portals fails.
    pub strict: bool,
    /// Backends, in the order of the file. Names are distinct.
    pub backends: Vec<Backend>,
    /// Targets, in the order of the file. Names are distinct.
    pub targets: Vec<Target>,
    /// Number and processors of the worker threads.
    pub workers: Workers,
    /// Bounds on sessions, commands and memory.
    pub limits: Limits,
    /// Provider and settings of RDMA devices.
    pub transport: Transport,
    /// Filter and format of the log.
    pub log: Log,
    /// Credentials for the discovery of targets; with `None` all initiators may discover them.
    pub discovery_chap: Option<Chap>,
    /// Socket of the admin API.
    pub admin: Location,
    /// The directory in which applied configurations are kept.
    pub state: Location,
    /// TCP address of metrics and the status page; `None`: on the admin socket only.
    pub metrics: Option<Metrics>,
    /// Oddities that are not errors, for users: an unused backend, a target that no initiator may
    /// use.
    pub notes: Vec<String>,
}

impl Config {
    /// The backend a logical unit is served from.
    #[must_use]
    pub fn backend(&self, lun: &Lun) -> &Backend {
        &self.backends[lun.backend]
    }
}

impl HostId {
    /// The identity that the configuration sets, else that of the machine: its machine id, else
    /// its host name. Reads `/etc`.
    #[must_use]
    pub fn of(config: &Config) -> Self {
        match &config.identity {
            Some(identity) => Self::new(identity),
            None => Self::of_machine(),
        }
    }
}

/// A backend and what its logical units call themselves.
#[derive(Debug, Clone, PartialEq)]
pub struct Backend {
    /// Its name in the file.
    pub name: String,
    /// Source of the bytes, and how it is opened.
    pub spec: Spec,
    /// Offer UNMAP, as far as the backend can.
    pub thin: bool,
    /// The share of its space, in percent, that is in use when initiators are warned; of files
    /// only.
    pub threshold: Option<u8>,
    /// Let START STOP UNIT stop the unit.
    pub stoppable: bool,
    /// True if the medium turns, where the file says.
    pub rotational: Option<bool>,
    /// Names, as far as the file gives them.
    pub names: Names,
    /// Rates at which all initiators together may use its unit.
    pub limits: IoLimits,
}

/// Names of a logical unit that the file sets; the others are derived.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Names {
    /// Unit serial number, as in VPD page 80h.
    pub serial: Option<String>,
    /// World-wide name (NAA), as in VPD page 83h.
    pub naa: Option<Naa>,
    /// T10 vendor identification of INQUIRY data.
    pub vendor: Option<String>,
    /// Product identification of INQUIRY data.
    pub product: Option<String>,
    /// Product revision level of INQUIRY data.
    pub revision: Option<String>,
}

impl Backend {
    /// Text from which a stable name is derived: the backend's name and where its bytes are. Two
    /// daemons of one host that serve different files under one name get different names this way.
    fn seed(&self) -> String {
        match &self.spec.source {
            Source::File { path, .. } | Source::Device { path } => {
                format!("{}\0{}", self.name, path.display())
            }
            Source::Ram { .. } | Source::Null { .. } => self.name.clone(),
        }
    }

    /// The names of a logical unit on this backend: the file's, else derived from the host's
    /// identity, and the same after every restart.
    #[must_use]
    pub fn identity(&self, host: &HostId) -> scsi::Identity {
        let seed = self.seed();
        let or = |name: &Option<String>, default: &str| {
            name.clone().unwrap_or_else(|| default.to_owned())
        };
        scsi::Identity {
            vendor: or(&self.names.vendor, "RISER"),
            product: or(&self.names.product, "VIRTUAL DISK"),
            revision: or(&self.names.revision, "0001"),
            serial: self
                .names
                .serial
                .clone()
                .unwrap_or_else(|| format!("{:016x}", host.derive("serial", &seed))),
            // Locally assigned: we own no company identifier.
            naa: self
                .names
                .naa
                .unwrap_or_else(|| Naa::LocallyAssigned(host.derive("naa", &seed) >> 4)),
        }
    }
}

/// A target: portals, logical units, and who may use them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Target {
    /// Name in the file, by which the log and the API refer to it.
    pub name: String,
    /// Portals, of which there is at least one.
    pub portals: Vec<Portal>,
    /// Logical units by number, 0 to 16383.
    pub luns: BTreeMap<u16, Lun>,
    /// Initiators that may use the target, and what they see.
    pub access: Access,
    /// Its iSCSI name, where it has iSCSI portals.
    pub iqn: Option<IscsiName>,
    /// Credentials of iSCSI initiators whose rule names none; with `None` those to which `access`
    /// is open need none.
    pub chap: Option<Chap>,
}

/// CHAP: who is let in, and how we prove who we are.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Chap {
    /// Names and secrets that are accepted, at least one.
    pub users: Vec<ChapUser>,
    /// Credentials that we prove to initiators that ask.
    pub mutual: Option<ChapUser>,
    /// Digest algorithms that are taken, at least one; all by default.
    pub algorithms: Vec<Algorithm>,
}

/// A name and where its secret is.
#[derive(Clone, PartialEq, Eq)]
pub struct ChapUser {
    /// User name, the value of CHAP_N.
    pub name: String,
    /// The secret, or the place where it is read.
    pub secret: Secret,
}

/// Shows no secret, so that none gets into a log.
impl fmt::Debug for ChapUser {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ChapUser")
            .field("name", &self.name)
            .finish_non_exhaustive()
    }
}

/// A CHAP secret, or the file that it is read from.
#[derive(Clone, PartialEq, Eq)]
pub enum Secret {
    /// Written in the configuration itself.
    Inline(String),
    /// In a file of its own, whose trailing line end does not count.
    File(PathBuf),
    /// In a variable of the daemon's environment.
    Env(String),
    /// In a credential that the service manager hands over: a file of this name in
    /// `$CREDENTIALS_DIRECTORY`.
    Credential(String),
}

/// Bytes of a secret: at least 96 bits (RFC 7143 12.1.3), and at most what a value of a login may
/// have.
pub(super) const SECRET_LEN: RangeInclusive<usize> = 12..=255;

impl ChapUser {
    /// The name and the secret, read from where it is.
    ///
    /// # Errors
    /// It is not there, cannot be read, or has not 12 to 255 bytes; with the path of its file.
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
        // The configuration was checked without reading files or the environment.
        if !SECRET_LEN.contains(&secret.len()) {
            let place = match &self.secret {
                Secret::Inline(_) => String::new(),
                Secret::File(path) => format!("{}: ", path.display()),
                Secret::Env(name) => format!("${name}: "),
                Secret::Credential(name) => format!("credential {name}: "),
            };
            let why = format!("{place}a secret has 12 to 255 bytes, not {}", secret.len());
            return Err(io::Error::new(io::ErrorKind::InvalidData, why));
        }
        Ok(Credentials {
            name: self.name.clone(),
            secret,
        })
    }
}

/// Warns of a file that all users of this host can read.
fn warn_readable(path: &Path) {
    let mode = std::fs::metadata(path).map_or(0, |file| file.mode());
    if mode & 0o004 != 0 {
        tracing::warn!(path = %path.display(), "every user of this host can read this secret: chmod o= it");
    }
}

/// The bytes of a file up to its trailing line ends.
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
    /// The logical units that an initiator port at an address may use, by the numbers that it
    /// sees; `None` refuses its login. The first rule that matches decides.
    #[must_use]
    pub fn allowed_luns(
        &self,
        port_id: &[u8; 16],
        address: IpAddr,
    ) -> Option<BTreeMap<u16, SeenLun>> {
        self.luns_by(|rule| rule.is_match(port_id, address))
    }

    /// As [`Target::allowed_luns`], for an iSCSI initiator.
    #[must_use]
    pub fn allowed_luns_of(
        &self,
        initiator: &IscsiName,
        address: IpAddr,
    ) -> Option<BTreeMap<u16, SeenLun>> {
        self.luns_by(|rule| rule.is_match_by_name(initiator, address))
    }

    /// The number of the rule that decides about an iSCSI initiator, if one does.
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

    /// As [`Target::rule_of`], for an SRP initiator port.
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

    /// The access rule of this number.
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

    /// The logical units that a rule with these shows, by the numbers that initiators see.
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

    /// The LUN that a number of a rule leads to: where the target has several numbers for the
    /// backend, the first one with the same rights. A number that is read-only for the target is
    /// so for each rule.
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

/// One logical unit of a target.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Lun {
    /// Index of its backend in [`Config::backends`].
    pub backend: usize,
    /// Refuse writes through this number, even if the backend allows them.
    pub read_only: bool,
}

/// The LUN that a number leads to as an initiator sees it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SeenLun {
    /// Its number in the target.
    pub number: u16,
    /// Writes are refused, as for a write-protected disk.
    pub read_only: bool,
}

/// Initiators that may log in to a target.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Access {
    /// All initiators that can reach a portal.
    Open,
    /// Those that a rule allows; no initiator where there is none.
    Rules(Vec<Rule>),
}

/// Allows initiators that match everything it names.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Rule {
    /// The SRP initiator port; any where absent, unless `iqn` is there.
    pub initiator: Option<InitiatorId>,
    /// The iSCSI initiator's name; any where absent, unless `initiator` is there.
    pub iqn: Option<IscsiName>,
    /// The source address; any where absent.
    pub address: Option<Net>,
    /// The units that it may use, and by which numbers; all by the target's where absent.
    pub luns: Option<RuleLuns>,
    /// Its credentials over iSCSI; as the target says where absent.
    pub chap: Option<Chap>,
    /// Rates at which each initiator may use the target.
    pub limits: Option<IoLimits>,
}

/// The units of a target that an initiator may use.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum RuleLuns {
    /// Those that have these numbers at the target, by the same numbers.
    Mask(BTreeSet<u16>),
    /// By numbers of the rule's own, those on these backends; each is that of a unit of the
    /// target.
    Map(BTreeMap<u16, Lun>),
}

/// The initiators that a rule is about: SRP initiator port, iSCSI name, source address.
pub type RuleSubject = (Option<InitiatorId>, Option<IscsiName>, Option<Net>);

impl Rule {
    /// The initiators that it is about, by name and address.
    #[must_use]
    pub fn subject(&self) -> RuleSubject {
        (self.initiator, self.iqn.clone(), self.address)
    }

    /// Returns true if it is about initiators of a name, not about all at an address.
    #[must_use]
    pub fn names_initiators(&self) -> bool {
        self.initiator.is_some() || self.iqn.is_some()
    }

    /// Returns true if the rule is about this initiator port at this address.
    #[must_use]
    pub fn is_match(&self, port_id: &[u8; 16], address: IpAddr) -> bool {
        let is_named = match (&self.initiator, &self.iqn) {
            (Some(initiator), _) => initiator.is_match(port_id),
            (None, iqn) => iqn.is_none(),
        };
        is_named && self.address.is_none_or(|n| n.contains(address))
    }

    /// Returns true if the rule is about an iSCSI initiator at this address.
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
    /// Returns true if initiators name targets and are named by iSCSI names.
    #[must_use]
    pub fn is_iscsi(self) -> bool {
        matches!(self, Self::Iscsi | Self::Iser)
    }

    /// Returns true if it listens on an RDMA device.
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

/// A portal of a target. Identifiers that the file leaves out are derived by
/// [`Portal::service_guid`] and the others.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Portal {
    /// The protocol spoken at this portal.
    pub protocol: Protocol,
    /// Address or addresses, and RDMA CM port or TCP port.
    pub listen: Listen,
    /// The file's service GUID.
    pub set_service_guid: Option<Guid>,
    /// The file's I/O controller GUID.
    pub set_ioc_guid: Option<Guid>,
    /// The file's identifier extension.
    pub set_id_ext: Option<Guid>,
    /// The place to which iSCSI initiators that log in to the target here are sent instead.
    pub redirect: Option<Redirect>,
}

/// Another address of a target.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Redirect {
    /// Address and port of the other portal.
    pub to: TargetAddress,
    /// True if initiators should remember it.
    pub permanent: bool,
}

impl Portal {
    /// I/O controller GUID: the file's, else one of the host and the target.
    #[must_use]
    pub fn ioc_guid(&self, host: &HostId, target: &str) -> Guid {
        self.set_ioc_guid
            .unwrap_or_else(|| host.local_guid("ioc", target))
    }

    /// Service GUID: the file's, else the I/O controller's.
    #[must_use]
    pub fn service_guid(&self, host: &HostId, target: &str) -> Guid {
        self.set_service_guid
            .unwrap_or_else(|| self.ioc_guid(host, target))
    }

    /// Identifier extension: the file's, else the I/O controller's GUID.
    #[must_use]
    pub fn id_ext(&self, host: &HostId, target: &str) -> Guid {
        self.set_id_ext
            .unwrap_or_else(|| self.ioc_guid(host, target))
    }
}

/// Maximum number of workers.
pub const MAX_WORKERS: usize = 64;

/// Number of worker threads, and their processors.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Workers {
    /// Number of threads. `None` is one per CPU listed; without a list, one per core, and one for
    /// two cores where there are fewer than four.
    pub count: Option<usize>,
    /// CPUs to pin them to, in turn; empty pins none.
    pub cpus: Vec<usize>,
}

impl Workers {
    /// The number of workers that run on a host with this many cores: what is asked for, rounded
    /// down to a power of two, since queue-pair numbers name their worker in their low bits.
    #[must_use]
    pub fn number(&self, cores: usize) -> usize {
        1 << self.wanted(cores).clamp(1, MAX_WORKERS).ilog2()
    }

    /// The number that is asked for.
    fn wanted(&self, cores: usize) -> usize {
        match (self.count, self.cpus.len()) {
            (Some(n), _) => n,
            // A worker that polls would take the time of the kernel's work for the network, and
            // of initiators on the same host.
            (None, 0) if cores < 4 => cores.div_ceil(2),
            (None, 0) => cores,
            (None, cpus) => cpus,
        }
    }

    /// That fewer workers run on a host with this many cores than are asked for, if they do.
    #[must_use]
    pub fn note(&self, cores: usize) -> Option<String> {
        let (wanted, number) = (self.wanted(cores), self.number(cores));
        (wanted > number).then(|| {
            format!(
                "{number} of {wanted} workers run: their number is a power of two, {MAX_WORKERS} at most"
            )
        })
    }
}

/// Address of metrics and the status page.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Metrics {
    /// Address and TCP port.
    pub listen: SocketAddr,
    /// The file says that other hosts may reach it.
    pub remote: bool,
}

/// Sessions that a configuration may allow at most: more connections than these can have do not
/// fit into the ring of a worker.
pub const MAX_SESSIONS: u32 = 7500;

/// Limits. Each is a number that is fixed when the thing it bounds is created.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// Sessions (I_T nexuses) at once.
    pub max_sessions: u32,
    /// Sessions at once from one source address.
    pub sessions_per_address: u32,
    /// Channels of one SRP session.
    pub channels_per_session: u32,
    /// Connections of one iSCSI session over TCP (RFC 7143 13.2), 1 to 8.
    pub connections_per_session: u32,
    /// Error recovery level of iSCSI sessions over TCP (RFC 7143 7.1.5, 13.20), 0 to 2.
    pub error_recovery_level: u32,
    /// Commands at once on one channel: SRP's request limit.
    pub queue_depth: u32,
    /// Longest information unit from an initiator, in bytes.
    pub max_iu_size: u32,
    /// Longest data transfer of one command, in bytes; [`window`](Self::window) says how much of it
    /// is in memory.
    pub max_transfer: u32,
    /// Bytes of one command's data that are in memory at a time: a longer transfer goes in pieces
    /// of this length. A file gives the lesser of `max_transfer` and [`WINDOW`].
    pub window: u32,
    /// Work requests in the send queue of an SRP channel. A file gives four for each command, and
    /// 64 at least.
    pub send_queue: u32,
    /// Data buffers of one worker, in bytes.
    pub buffer_pool: usize,
    /// Time that an initiator may take to send data that it was asked for, in whole seconds. All
    /// data of a long command, and its answer, have eight times as long, not counting what the
    /// data explain that the connection moves meanwhile.
    pub data_out_timeout: Duration,
}

/// [`Limits::window`] where transfers are not shorter, in bytes: the largest block of a worker's
/// memory.
pub const WINDOW: u32 = 1 << 20;

/// [`Limits::data_out_timeout`] where the file says nothing: what LIO waits in all, five times
/// three seconds.
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
    /// An RDMA device where the address belongs to one, else the software NIC.
    Auto,
    /// Memory shared with initiators on this host, and with no others.
    Shm,
    /// iWARP: RDMA over TCP, for iSER only.
    Iwarp,
}

/// Provider and settings of RDMA devices.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Transport {
    /// The software NIC, RDMA devices of the host, or both.
    pub provider: Provider,
    /// Largest path MTU in bytes: 256, 512, 1024, 2048 or 4096; `None` takes what the interface
    /// allows.
    pub mtu: Option<u16>,
    /// True if the software NIC takes only packets that no router has forwarded (RFC 5082).
    pub on_link: bool,
    /// True if initiators on this host may share memory with the daemon, beside the portals' devices.
    pub shm: bool,
    /// Faults of the link on purpose, for tests.
    pub faults: Option<LinkFaults>,
}

/// Faults of the link on purpose. They strike packets that are sent.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LinkFaults {
    /// Share of packets that are lost.
    pub loss: Percent,
    /// Share of packets that are sent twice.
    pub duplicate: Percent,
    /// Packets held back behind later ones.
    pub reorder: Percent,
    /// Packets with a bit flipped.
    pub corrupt: Percent,
    /// Number of later packets that may pass one held back.
    pub reorder_window: u32,
    /// Seed of the random numbers, so that a run can be repeated.
    pub seed: u64,
}

/// Path of a socket or directory of the daemon's own.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum Location {
    /// The usual place, if it can be had.
    #[default]
    Default,
    /// At this path, or the daemon does not start.
    At(PathBuf),
    /// Nowhere: the daemon does without.
    Off,
}

/// Filter and format of the log.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Log {
    /// Filter in the words of `tracing-subscriber`'s `EnvFilter`.
    pub filter: String,
    /// Lines for people, or JSON.
    pub format: LogFormat,
    /// True if the audit log is part of it.
    pub audit: bool,
}

/// The form of the log.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Deserialize, Serialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum LogFormat {
    /// Lines for people.
    #[default]
    Text,
    /// One JSON object a line.
    Json,
}
