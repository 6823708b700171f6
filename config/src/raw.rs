//! The schema of the configuration file. Every key is a field here, and no other keys are allowed.
//!
//! Each key is declared once, with its description (the first line is a summary, and details follow
//! after an empty line), its type, its default and its limits. Schema keywords are used for
//! anything that the type cannot express: `default`, `x-unit` and `x-limits` (see
//! [`schema`](super::schema())).
//!
//! The same declarations are used for writing, in the order of the fields.
//! [`Config::to_value`](super::Config::to_value) drops keys without a value, so only keys with a
//! default other than `None` need a condition here to be left out. The keys of [`Limits`] also need
//! one, because the schema would otherwise show null instead of the default from their types.

use std::fmt;

use schemars::JsonSchema;
use serde::de::value::{MapAccessDeserializer, SeqAccessDeserializer};
use serde::{Deserialize, Deserializer, Serialize, Serializer, de};

use super::bounded::{Bytes, NO_DEFAULT, Number};
use super::listen::Written as Listen;
use super::model::{DATA_OUT_TIMEOUT, LogFormat, MAX_SESSIONS, Protocol, Provider};
use super::source::{Direct, TagOwner};
use super::value::{Count, Guid, InitiatorId, NaaText, Net, OnOff, Percent, Size, Span};
use super::yaml::{Entries, Located};

/// Returns true if a key has its default value, so that it can be omitted from the file.
fn is_default<T: Default + PartialEq>(value: &T) -> bool {
    *value == T::default()
}

/// The configuration of riserd.
#[derive(Debug, Deserialize, Serialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct Root {
    /// Text used to derive serial numbers, world-wide names and GUIDs that are not set.
    ///
    /// The default is the machine ID (/etc/machine-id). If it is missing, the default is the host
    /// name with a random suffix, which is saved in the state directory on the first start. Set
    /// this if multiple machines serve the same disks, if a disk must keep its names when it is
    /// moved to another machine, or if machines are clones with the same machine ID.
    pub(super) identity: Option<Located<String>>,
    /// Do not start unless everything is available.
    ///
    /// By default, a backend that cannot be opened or an address that cannot be bound is reported
    /// and retried, and everything else is served.
    #[serde(default, skip_serializing_if = "is_default")]
    #[schemars(extend("default" = false))]
    pub(super) strict: bool,
    /// Backends, which store the data of disks, by name.
    #[serde(default, skip_serializing_if = "Entries::is_empty")]
    pub(super) backends: Entries<String, Located<Backend>>,
    /// Targets, with their disks and addresses.
    pub(super) targets: Option<Vec<Located<Target>>>,
    /// Credentials required for iSCSI discovery sessions.
    ///
    /// By default, no credentials are required.
    pub(super) discovery_chap: Option<Located<Chap>>,
    /// Worker threads.
    #[serde(default, skip_serializing_if = "is_default")]
    pub(super) workers: Workers,
    /// Limits for sessions and memory.
    #[serde(default, skip_serializing_if = "is_default")]
    pub(super) limits: Limits,
    /// Network settings.
    #[serde(default, skip_serializing_if = "is_default")]
    pub(super) transport: Transport,
    /// The admin API.
    #[serde(default, skip_serializing_if = "is_default")]
    pub(super) admin: Admin,
    /// Directory for state that must survive a restart.
    #[serde(default, skip_serializing_if = "is_default")]
    pub(super) state: State,
    /// Metrics and the status page.
    #[serde(default, skip_serializing_if = "is_default")]
    pub(super) metrics: Metrics,
    /// Log settings.
    #[serde(default, skip_serializing_if = "is_default")]
    pub(super) log: Log,
}

#[derive(Debug, Default, PartialEq, Deserialize, Serialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct Admin {
    /// Path of the admin socket, or `none`.
    ///
    /// The default is $RUNTIME_DIRECTORY/admin.sock. If this is not set, it is
    /// /run/riserd/admin.sock for root, and $XDG_RUNTIME_DIR/riserd/admin.sock for other users.
    #[schemars(extend("x-limits" = "an absolute path, or none"))]
    pub(super) socket: Option<Located<String>>,
}

#[derive(Debug, Default, PartialEq, Deserialize, Serialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct Metrics {
    /// TCP address and port for metrics and the status page, such as 127.0.0.1:9909.
    ///
    /// By default, they are only available on the admin socket.
    #[schemars(extend("x-limits" = "an IP address and a port"))]
    pub(super) listen: Option<Located<String>>,
    /// Allow an address that other hosts can reach.
    ///
    /// There is no password: any host that can reach this address can read names, addresses and
    /// statistics.
    #[serde(default, skip_serializing_if = "is_default")]
    #[schemars(extend("default" = false))]
    pub(super) remote: bool,
}

#[derive(Debug, Default, PartialEq, Deserialize, Serialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct State {
    /// Directory for applied configurations, reservations and failed flushes, or `none`.
    ///
    /// The default is $STATE_DIRECTORY. If this is not set, it is /var/lib/riserd for root, and
    /// none for other users.
    #[schemars(extend("x-limits" = "an absolute path, or none"))]
    pub(super) directory: Option<Located<String>>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize, Serialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub(super) enum Kind {
    /// A regular file.
    File,
    /// A block device.
    Device,
    /// Memory of the daemon. The data is lost when the daemon exits.
    Ram,
    /// No medium: writes are discarded, and reads return zeros.
    Null,
}

#[derive(Debug, Deserialize, Serialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct Backend {
    /// Type of the medium.
    pub(super) kind: Kind,
    /// Path of the file or block device. Required for these kinds, and only valid for them.
    pub(super) path: Option<Located<String>>,
    /// Size, such as 10GiB.
    ///
    /// Required for the kinds ram and null. The default for a file is its current size. For a
    /// device, the size cannot be set.
    #[schemars(extend("x-unit" = "bytes", "x-limits" = "a multiple of block_size"))]
    pub(super) size: Option<Located<Size>>,
    /// Create the file, or extend it to `size` as a sparse file. Only for kind file.
    #[schemars(extend("default" = false))]
    pub(super) create: Option<Located<bool>>,
    /// Logical block size.
    #[schemars(extend("default" = 512, "enum" = [512, 4096], "x-unit" = "bytes"))]
    pub(super) block_size: Option<Located<u64>>,
    /// Store T10 protection information with each block.
    ///
    /// By default, there is none. Not supported for kind device. It must be set when the file is
    /// created, and remain set.
    pub(super) protection: Option<Located<Protection>>,
    /// Bypass the page cache. Only for the kinds file and device.
    #[schemars(extend("default" = "auto"))]
    pub(super) direct: Option<Located<Direct>>,
    /// Volatile write cache. If `off`, a write only completes when it is durable.
    ///
    /// Initiators can change this with MODE SELECT. If an initiator has disabled the cache, it
    /// remains disabled across resets and upgrades, but a restart restores this setting. Therefore,
    /// pages cannot be saved (SP), and the cache can only be disabled permanently by setting this
    /// to `off`.
    #[schemars(extend("default" = "on"))]
    pub(super) write_cache: Option<OnOff>,
    /// Reject writes.
    #[schemars(extend("default" = false))]
    pub(super) read_only: Option<bool>,
    /// Support UNMAP if the backend does.
    #[schemars(extend("default" = true))]
    pub(super) thin: Option<bool>,
    /// Used share of the space available to a file at which initiators receive a warning, such as
    /// 80%.
    ///
    /// Only for thin backends of kind file. By default, there is no warning.
    #[schemars(extend("x-unit" = "percent", "x-limits" = "1% to 99%"))]
    pub(super) threshold: Option<Located<Percent>>,
    /// Allow initiators to stop the unit for all initiators with START STOP UNIT.
    ///
    /// By default, a stop only flushes the cache.
    #[schemars(extend("default" = false))]
    pub(super) stoppable: Option<bool>,
    /// Report a rotating medium.
    ///
    /// The default is detected from the device.
    pub(super) rotational: Option<bool>,
    /// Unit serial number.
    ///
    /// The default is derived from `identity`, and the name and path of the backend.
    #[schemars(extend("x-limits" = "1 to 64 printable ASCII characters"))]
    pub(super) serial: Option<Located<String>>,
    /// World-wide name: 16 hexadecimal digits starting with 3, or 32 digits starting with 6.
    ///
    /// The default is derived in the same way as `serial`.
    pub(super) naa: Option<Located<NaaText>>,
    /// T10 vendor identification.
    #[schemars(extend("default" = "RISER", "x-limits" = "1 to 8 printable ASCII characters"))]
    pub(super) vendor: Option<Located<String>>,
    /// Product identification.
    #[schemars(extend("default" = "VIRTUAL DISK", "x-limits" = "1 to 16 printable ASCII characters"))]
    pub(super) product: Option<Located<String>>,
    /// Product revision level.
    #[schemars(extend("default" = "0001", "x-limits" = "1 to 4 printable ASCII characters"))]
    pub(super) revision: Option<Located<String>>,
    /// Rate limits for this disk, shared by all initiators.
    pub(super) limits: Option<Located<IoLimits>>,
}

/// T10 protection information.
#[derive(Debug, Deserialize, Serialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct Protection {
    /// Protection type of a new disk.
    #[serde(rename = "type")]
    #[schemars(extend("enum" = [1, 2, 3]))]
    pub(super) protection_type: Located<u64>,
    /// Owner of the application tags (ATO).
    #[schemars(extend("default" = "target"))]
    pub(super) owner: Option<TagOwner>,
}

/// Commands per second.
pub(super) type Iops = Number<1, 1_000_000_000, NO_DEFAULT>;

/// Bytes per second. The minimum is the largest block size.
pub(super) type Bandwidth = Bytes<4096, { 1 << 50 }, 1, NO_DEFAULT>;

/// Rate limits. If a key is not set, there is no limit.
#[derive(Debug, Deserialize, Serialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct IoLimits {
    /// Read and write commands.
    #[schemars(extend("x-unit" = "commands per second"))]
    pub(super) iops: Option<Iops>,
    /// Read commands.
    #[schemars(extend("x-unit" = "commands per second"))]
    pub(super) read_iops: Option<Iops>,
    /// Write commands.
    #[schemars(extend("x-unit" = "commands per second"))]
    pub(super) write_iops: Option<Iops>,
    /// Data read and written in total.
    #[schemars(extend("x-unit" = "bytes per second"))]
    pub(super) bandwidth: Option<Bandwidth>,
    /// Data read.
    #[schemars(extend("x-unit" = "bytes per second"))]
    pub(super) read_bandwidth: Option<Bandwidth>,
    /// Data written.
    #[schemars(extend("x-unit" = "bytes per second"))]
    pub(super) write_bandwidth: Option<Bandwidth>,
    /// Time for which unused capacity is kept, so that it can be used in a burst.
    #[schemars(extend("default" = "100ms", "x-unit" = "time", "x-limits" = "at most 60m"))]
    pub(super) burst: Option<Located<Span>>,
}

#[derive(Debug, Deserialize, Serialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct Target {
    /// Name of the target for riserd commands.
    #[schemars(extend("x-limits" = "1 to 64 letters, digits, and - _ . :"))]
    pub(super) name: Located<String>,
    /// iSCSI name. Required for iSCSI and iSER portals.
    ///
    /// The default is the name of the target, if that is a valid iSCSI name.
    pub(super) iqn: Option<Located<String>>,
    /// Addresses to listen on. At least one is required.
    pub(super) portals: Located<Vec<Portal>>,
    /// Disks by logical unit number: the name of a backend, or an object.
    #[serde(default, skip_serializing_if = "Entries::is_empty")]
    #[schemars(extend("x-limits" = "numbers from 0 to 16383"))]
    pub(super) luns: Entries<u64, Located<Lun>>,
    /// Credentials required for iSCSI initiators.
    ///
    /// By default, no credentials are required.
    pub(super) chap: Option<Located<Chap>>,
    /// Initiators that can log in: `open` for all, or a list of rules. The first matching rule is
    /// used.
    ///
    /// By default, there are no rules, and no initiator can log in.
    #[serde(default, skip_serializing_if = "Access::is_none")]
    pub(super) access: Access,
}

#[derive(Debug, Deserialize, Serialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct Chap {
    /// Names and secrets of initiators. At least one is required.
    pub(super) users: Vec<Located<ChapUser>>,
    /// Name and secret used by the target if an initiator requests mutual authentication.
    pub(super) mutual: Option<Located<ChapUser>>,
    /// Supported digest algorithms.
    #[schemars(extend("default" = ["sha3-256", "sha256", "sha1", "md5"]))]
    pub(super) algorithms: Option<Located<Vec<Located<String>>>>,
}

#[derive(Deserialize, Serialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct ChapUser {
    /// CHAP name.
    #[schemars(extend("x-limits" = "1 to 255 characters"))]
    pub(super) name: String,
    /// The secret. Exactly one of the keys for a secret is required.
    #[schemars(extend("x-limits" = "12 to 255 bytes"))]
    pub(super) secret: Option<String>,
    /// Path of a file that contains the secret.
    pub(super) secret_file: Option<String>,
    /// Name of an environment variable of the daemon that contains the secret.
    pub(super) secret_env: Option<String>,
    /// Name of a systemd credential that contains the secret.
    pub(super) secret_credential: Option<String>,
}

/// Hides the secret.
impl fmt::Debug for ChapUser {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ChapUser")
            .field("name", &self.name)
            .finish_non_exhaustive()
    }
}

#[derive(Debug, Deserialize, Serialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct Portal {
    /// Storage protocol.
    pub(super) protocol: Protocol,
    /// Address and port of this host, such as 192.0.2.10 or [2001:db8::1]:5555. Use 0.0.0.0, [::]
    /// or eth0 for all addresses of the host or an interface.
    ///
    /// The default port is 5555 for SRP, and 3260 for iSCSI and iSER.
    pub(super) listen: Located<Listen>,
    /// I/O controller GUID of an SRP portal.
    ///
    /// The default is derived from `identity` and the name of the target.
    pub(super) ioc_guid: Option<Guid>,
    /// Service GUID of an SRP portal.
    ///
    /// The default is the `ioc_guid`.
    pub(super) service_guid: Option<Guid>,
    /// Identifier extension of an SRP portal.
    ///
    /// The default is the `ioc_guid`.
    pub(super) id_ext: Option<Guid>,
    /// Redirect iSCSI or SRP initiators that log in here to another address.
    pub(super) redirect: Option<Located<Redirect>>,
}

#[derive(Debug, Deserialize, Serialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct Redirect {
    /// Address or host name, with a port unless it is 3260. For SRP: an IP address, which has the
    /// same port.
    pub(super) to: String,
    /// Mark the redirect as permanent.
    #[serde(default, skip_serializing_if = "is_default")]
    #[schemars(extend("default" = false))]
    pub(super) permanent: bool,
}

/// `name`, or `{ backend: name, read_only: true }`.
#[derive(Debug)]
pub(super) struct Lun {
    pub(super) backend: String,
    pub(super) read_only: bool,
}

#[derive(Deserialize, Serialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct LunMapping {
    /// Name of a backend.
    backend: String,
    /// Reject writes through this number.
    #[serde(default, skip_serializing_if = "is_default")]
    #[schemars(extend("default" = false))]
    read_only: bool,
}

/// Only writes the backend name if there are no other settings.
impl Serialize for Lun {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        if !self.read_only {
            return serializer.serialize_str(&self.backend);
        }
        let mapping = LunMapping {
            backend: self.backend.clone(),
            read_only: self.read_only,
        };
        mapping.serialize(serializer)
    }
}

impl<'de> Deserialize<'de> for Lun {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Visitor;

        impl<'de> de::Visitor<'de> for Visitor {
            type Value = Lun;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("the name of a backend, or a mapping with `backend`")
            }

            fn visit_str<E: de::Error>(self, name: &str) -> Result<Lun, E> {
                Ok(Lun {
                    backend: name.to_owned(),
                    read_only: false,
                })
            }

            fn visit_map<A: de::MapAccess<'de>>(self, map: A) -> Result<Lun, A::Error> {
                let m = LunMapping::deserialize(MapAccessDeserializer::new(map))?;
                Ok(Lun {
                    backend: m.backend,
                    read_only: m.read_only,
                })
            }
        }

        deserializer.deserialize_any(Visitor)
    }
}

/// `open`, or a list of rules. An empty list does not allow any initiator.
#[derive(Debug)]
pub(super) enum Access {
    Open,
    Rules(Vec<Located<Rule>>),
}

impl Default for Access {
    fn default() -> Self {
        Self::Rules(Vec::new())
    }
}

impl Access {
    /// The keyword used instead of rules.
    const OPEN: &str = "open";

    /// Returns true if there are no rules, which is the default.
    fn is_none(&self) -> bool {
        matches!(self, Self::Rules(rules) if rules.is_empty())
    }
}

impl Serialize for Access {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            Self::Open => serializer.serialize_str(Self::OPEN),
            Self::Rules(rules) => rules.serialize(serializer),
        }
    }
}

#[derive(Debug, Deserialize, Serialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct Rule {
    /// SRP initiator: its GUID, or its full port identifier.
    pub(super) initiator: Option<InitiatorId>,
    /// iSCSI initiator name.
    pub(super) iqn: Option<Located<String>>,
    /// Source address, or a network such as 192.0.2.0/24.
    pub(super) address: Option<Net>,
    /// Available units: a list of numbers, such as [0, 5], or separate numbers for units of the
    /// target, such as { 0: disk5 }.
    ///
    /// By default, all units are available with the numbers of the target.
    pub(super) luns: Option<RuleLuns>,
    /// Credentials required for iSCSI, instead of the target's `chap`.
    ///
    /// If `iqn` is set, this name can only be used with these credentials, and not by other users
    /// of the target. Users in the same rule can use each other's initiator names.
    pub(super) chap: Option<Located<Chap>>,
    /// Rate limits for each initiator of this target, shared by all of its sessions.
    pub(super) limits: Option<Located<IoLimits>>,
}

/// A list of numbers, or a mapping of numbers to units.
#[derive(Debug, Serialize)]
#[serde(untagged)]
pub(super) enum RuleLuns {
    Mask(Vec<Located<u64>>),
    Map(Entries<u64, Located<Lun>>),
}

impl<'de> Deserialize<'de> for RuleLuns {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Visitor;

        impl<'de> de::Visitor<'de> for Visitor {
            type Value = RuleLuns;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a list of numbers, or a mapping of numbers to backends")
            }

            fn visit_seq<A: de::SeqAccess<'de>>(self, seq: A) -> Result<RuleLuns, A::Error> {
                let numbers = Vec::deserialize(SeqAccessDeserializer::new(seq))?;
                Ok(RuleLuns::Mask(numbers))
            }

            fn visit_map<A: de::MapAccess<'de>>(self, map: A) -> Result<RuleLuns, A::Error> {
                let luns = Entries::deserialize(MapAccessDeserializer::new(map))?;
                Ok(RuleLuns::Map(luns))
            }
        }

        deserializer.deserialize_any(Visitor)
    }
}

impl<'de> Deserialize<'de> for Access {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Visitor;

        impl<'de> de::Visitor<'de> for Visitor {
            type Value = Access;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("`open`, or a list of rules")
            }

            fn visit_str<E: de::Error>(self, word: &str) -> Result<Access, E> {
                match word {
                    Access::OPEN => Ok(Access::Open),
                    _ => Err(E::invalid_value(de::Unexpected::Str(word), &self)),
                }
            }

            fn visit_seq<A: de::SeqAccess<'de>>(self, mut seq: A) -> Result<Access, A::Error> {
                let mut rules = Vec::new();
                while let Some(rule) = seq.next_element()? {
                    rules.push(rule);
                }
                Ok(Access::Rules(rules))
            }
        }

        deserializer.deserialize_any(Visitor)
    }
}

#[derive(Debug, Default, PartialEq, Deserialize, Serialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct Workers {
    /// Number of workers, or `auto`: one per CPU in `cpus`, or one per core. With fewer than four
    /// cores, one per two cores.
    ///
    /// The number is rounded down to a power of two, with a maximum of 64.
    #[schemars(extend("default" = "auto", "x-limits" = "auto, or 1 to 1024"))]
    pub(super) count: Option<Located<Count>>,
    /// CPUs to pin workers to, in this order. By default, workers are not pinned.
    #[schemars(extend("default" = []))]
    pub(super) cpus: Option<Located<Vec<Located<Cpu>>>>,
}

/// CPU number.
pub(super) type Cpu = Number<0, 1023, NO_DEFAULT>;

#[derive(Debug, Default, PartialEq, Deserialize, Serialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub(super) struct Limits {
    /// Maximum number of sessions.
    #[serde(skip_serializing_if = "is_default")]
    pub(super) max_sessions: Number<1, { MAX_SESSIONS as u64 }, 256>,
    /// Maximum number of sessions from one IPv4 address or IPv6 network (/64), up to
    /// `max_sessions`.
    #[serde(skip_serializing_if = "is_default")]
    pub(super) sessions_per_address: Option<Located<SessionsPerAddress>>,
    /// Maximum number of channels per SRP session.
    #[serde(skip_serializing_if = "is_default")]
    pub(super) channels_per_session: Number<1, 256, 8>,
    /// Maximum number of connections per iSCSI session over TCP.
    #[serde(skip_serializing_if = "is_default")]
    pub(super) connections_per_session: Number<1, 8, 1>,
    /// Maximum error recovery level for iSCSI over TCP.
    #[serde(skip_serializing_if = "is_default")]
    pub(super) error_recovery_level: Number<0, 2, 0>,
    /// Maximum number of commands in flight per channel or session.
    ///
    /// For iSCSI and iSER, the maximum is 1024.
    #[serde(skip_serializing_if = "is_default")]
    pub(super) queue_depth: Number<1, 4096, 128>,
    /// Maximum size of an SRP information unit.
    #[serde(skip_serializing_if = "is_default")]
    #[schemars(extend("x-unit" = "bytes"))]
    pub(super) max_iu_size: Number<256, 65_536, 8260>,
    /// Maximum transfer size of a command. At most 1 MiB of it is in memory at a time.
    #[serde(skip_serializing_if = "is_default")]
    #[schemars(extend("x-unit" = "bytes"))]
    pub(super) max_transfer: Option<Located<MaxTransfer>>,
    /// Size of the data buffers per worker. Must be large enough for two commands.
    #[serde(skip_serializing_if = "is_default")]
    #[schemars(extend("x-unit" = "MiB"))]
    pub(super) buffer_pool_mib: Option<Located<BufferPool>>,
    /// Timeout for an initiator to send solicited data.
    #[serde(skip_serializing_if = "is_default")]
    #[schemars(extend("x-unit" = "seconds"))]
    pub(super) data_out_timeout: Number<1, 3600, { DATA_OUT_TIMEOUT.as_secs() }>,
}

/// Maximum number of sessions from one address.
pub(super) type SessionsPerAddress = Number<1, { MAX_SESSIONS as u64 }, 64>;

/// Maximum transfer size of a command, in bytes.
pub(super) type MaxTransfer = Bytes<{ 64 << 10 }, { 32 << 20 }, 4096, { 32 << 20 }>;

/// Data buffer size of a worker, in MiB.
pub(super) type BufferPool = Number<1, 65_536, 64>;

#[derive(Debug, Default, PartialEq, Deserialize, Serialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct Transport {
    /// RDMA devices of the portals.
    #[schemars(extend("default" = "roce"))]
    pub(super) provider: Option<Located<Provider>>,
    /// Maximum path MTU, or `auto` for the interface MTU.
    #[schemars(extend("default" = "auto", "x-unit" = "bytes", "x-limits" = "auto, 256, 512, 1024, 2048 or 4096"))]
    pub(super) mtu: Option<Located<Count>>,
    /// Only accept packets from the local link on the software NIC. Peers must send with hop limit
    /// 255.
    #[schemars(extend("default" = false))]
    pub(super) on_link: Option<bool>,
    /// Allow initiators on this host to share memory with the daemon, in addition to the device of
    /// their portal.
    #[schemars(extend("default" = false))]
    pub(super) shm: Option<bool>,
    /// IP address of a subnet administrator (`riser-sa`), where the software NIC registers its
    /// ports, so that `srp_daemon` finds them.
    ///
    /// It must be of the same IP version as the portals. By default, ports are not registered.
    pub(super) administrator: Option<Located<String>>,
    /// Injected link faults, for tests.
    pub(super) faults: Option<Faults>,
}

#[derive(Debug, PartialEq, Deserialize, Serialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct Faults {
    /// Packets to drop.
    #[schemars(extend("default" = "0%", "x-unit" = "percent"))]
    pub(super) loss: Option<Percent>,
    /// Packets to send twice.
    #[schemars(extend("default" = "0%", "x-unit" = "percent"))]
    pub(super) duplicate: Option<Percent>,
    /// Packets to reorder.
    #[schemars(extend("default" = "0%", "x-unit" = "percent"))]
    pub(super) reorder: Option<Percent>,
    /// Packets to send with a flipped bit.
    #[schemars(extend("default" = "0%", "x-unit" = "percent"))]
    pub(super) corrupt: Option<Percent>,
    /// Number of later packets that can overtake a held packet.
    #[serde(default)]
    pub(super) reorder_window: Number<1, 1024, 8>,
    /// Random seed, so that a run can be repeated.
    #[schemars(extend("default" = 1))]
    pub(super) seed: Option<u64>,
}

#[derive(Debug, Default, PartialEq, Deserialize, Serialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct Log {
    /// Level such as `info`, or levels per module such as `info,riser_target=debug`.
    #[schemars(extend("default" = "info"))]
    pub(super) filter: Option<Located<String>>,
    /// Log format.
    #[schemars(extend("default" = "text"))]
    pub(super) format: Option<LogFormat>,
    /// Log logins, rejections and changes even if `filter` excludes them.
    #[schemars(extend("default" = "on"))]
    pub(super) audit: Option<OnOff>,
}
