//! The schema as it is written. Every key of the file is a field here, and nothing else is
//! allowed.
//!
//! A key is declared once, here: its description (the first line is a summary, what follows an
//! empty line says more), its type, its default and its limits. What the type does not say stands
//! in the schema's own words beside it: `default`, `x-unit` and `x-limits` (see
//! [`schema`](super::schema())).
//!
//! The same declarations are written, in the order of the fields. Keys without a value are dropped
//! by [`Config::to_value`](super::Config::to_value), so only keys whose default is not `None` say
//! here when they are left out; so do those of [`Limits`], or the schema would show null for their
//! defaults, which their types have.

use std::fmt;

use schemars::JsonSchema;
use serde::de::value::{MapAccessDeserializer, SeqAccessDeserializer};
use serde::{Deserialize, Deserializer, Serialize, Serializer, de};

use super::bounded::{Bytes, NO_DEFAULT, Number};
use super::listen::Written as Listen;
use super::model::{DATA_OUT_TIMEOUT, LogFormat, MAX_SESSIONS, Protocol, Provider};
use super::source::Direct;
use super::value::{Count, Guid, InitiatorId, NaaText, Net, OnOff, Percent, Size, Span};
use super::yaml::{Entries, Located};

/// Returns true if a key has its default, which is omitted from files.
fn is_default<T: Default + PartialEq>(value: &T) -> bool {
    *value == T::default()
}

/// A configuration of riserd.
#[derive(Debug, Deserialize, Serialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct Root {
    /// Text from which serial numbers, world-wide names and GUIDs that are not set are derived.
    ///
    /// By default the machine's id (/etc/machine-id), else its host name with a random part that the
    /// state directory keeps from the first start on. Set it where several machines serve the same
    /// disks, where a machine's disks move to another one and keep their names, or where machines
    /// are clones with one id.
    pub(super) identity: Option<Located<String>>,
    /// Start with everything or not at all.
    ///
    /// By default a backend that cannot be opened, or an address that cannot be listened on, is
    /// reported and tried again, and the rest is served.
    #[serde(default, skip_serializing_if = "is_default")]
    #[schemars(extend("default" = false))]
    pub(super) strict: bool,
    /// Backends: the places of the bytes of disks, by names of your own.
    #[serde(default, skip_serializing_if = "Entries::is_empty")]
    pub(super) backends: Entries<String, Located<Backend>>,
    /// Targets: the disks that are served, and the addresses at which they are.
    pub(super) targets: Option<Vec<Located<Target>>>,
    /// Credentials that initiators need for discovery sessions over iSCSI.
    ///
    /// By default they need none.
    pub(super) discovery_chap: Option<Located<Chap>>,
    /// Worker threads.
    #[serde(default, skip_serializing_if = "is_default")]
    pub(super) workers: Workers,
    /// Bounds on sessions and memory.
    #[serde(default, skip_serializing_if = "is_default")]
    pub(super) limits: Limits,
    /// The network.
    #[serde(default, skip_serializing_if = "is_default")]
    pub(super) transport: Transport,
    /// The admin API.
    #[serde(default, skip_serializing_if = "is_default")]
    pub(super) admin: Admin,
    /// The directory for what the daemon keeps over restarts.
    #[serde(default, skip_serializing_if = "is_default")]
    pub(super) state: State,
    /// Metrics and the status page.
    #[serde(default, skip_serializing_if = "is_default")]
    pub(super) metrics: Metrics,
    /// The log.
    #[serde(default, skip_serializing_if = "is_default")]
    pub(super) log: Log,
}

#[derive(Debug, Default, PartialEq, Deserialize, Serialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct Admin {
    /// Path of the admin socket, or `none`.
    ///
    /// By default $RUNTIME_DIRECTORY/admin.sock, for root /run/riserd/admin.sock, for others
    /// $XDG_RUNTIME_DIR/riserd/admin.sock.
    #[schemars(extend("x-limits" = "an absolute path, or none"))]
    pub(super) socket: Option<Located<String>>,
}

#[derive(Debug, Default, PartialEq, Deserialize, Serialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct Metrics {
    /// TCP address and port for metrics and the status page, such as 127.0.0.1:9909.
    ///
    /// By default they are on the admin socket only.
    #[schemars(extend("x-limits" = "an IP address and a port"))]
    pub(super) listen: Option<Located<String>>,
    /// Allow an address that other hosts reach.
    ///
    /// No password protects it: every host that reaches it sees names, addresses and numbers.
    #[serde(default, skip_serializing_if = "is_default")]
    #[schemars(extend("default" = false))]
    pub(super) remote: bool,
}

#[derive(Debug, Default, PartialEq, Deserialize, Serialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct State {
    /// Directory for applied configurations, reservations and failed flushes, or `none`.
    ///
    /// By default $STATE_DIRECTORY, for root /var/lib/riserd, for others none.
    #[schemars(extend("x-limits" = "an absolute path, or none"))]
    pub(super) directory: Option<Located<String>>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize, Serialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub(super) enum Kind {
    /// A file.
    File,
    /// A block device.
    Device,
    /// Memory of the daemon, which is lost with it.
    Ram,
    /// Nothing: it takes every write, and reads zeroes.
    Null,
}

#[derive(Debug, Deserialize, Serialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct Backend {
    /// The medium.
    pub(super) kind: Kind,
    /// Path of the file or block device; of these kinds only, which need it.
    pub(super) path: Option<Located<String>>,
    /// Size, such as 10GiB: a number of blocks.
    ///
    /// The kinds ram and null need it. A file's is by default the size that it has; a device has
    /// its own.
    #[schemars(extend("x-unit" = "bytes", "x-limits" = "a multiple of block_size"))]
    pub(super) size: Option<Located<Size>>,
    /// Create the file, or extend it to `size`, sparsely; of kind file only.
    #[schemars(extend("default" = false))]
    pub(super) create: Option<Located<bool>>,
    /// Logical block size.
    #[schemars(extend("default" = 512, "enum" = [512, 4096], "x-unit" = "bytes"))]
    pub(super) block_size: Option<Located<u64>>,
    /// Bypass of the page cache; of kinds file and device only.
    #[schemars(extend("default" = "auto"))]
    pub(super) direct: Option<Located<Direct>>,
    /// Volatile write cache: `off` makes every write durable before it completes.
    ///
    /// Initiators can change it by MODE SELECT. A cache that one has disabled stays disabled over
    /// resets and upgrades; a restart restores this setting, so pages cannot be saved (SP) and
    /// `off` is the way to disable a cache for good.
    #[schemars(extend("default" = "on"))]
    pub(super) write_cache: Option<OnOff>,
    /// Refuse writes.
    #[schemars(extend("default" = false))]
    pub(super) read_only: Option<bool>,
    /// Offer UNMAP, as far as the backend can.
    #[schemars(extend("default" = true))]
    pub(super) thin: Option<bool>,
    /// Share of the space available to a file at which initiators are warned that it fills up,
    /// such as 80%.
    ///
    /// Of a thin backend of kind file only. By default they are not warned.
    #[schemars(extend("x-unit" = "percent", "x-limits" = "1% to 99%"))]
    pub(super) threshold: Option<Located<Percent>>,
    /// Let START STOP UNIT stop the unit, for all initiators.
    ///
    /// By default a stop only flushes.
    #[schemars(extend("default" = false))]
    pub(super) stoppable: Option<bool>,
    /// Report a medium that turns.
    ///
    /// By default what the device says.
    pub(super) rotational: Option<bool>,
    /// Unit serial number.
    ///
    /// By default derived from `identity`, the backend's name and its path.
    #[schemars(extend("x-limits" = "1 to 64 printable ASCII characters"))]
    pub(super) serial: Option<Located<String>>,
    /// World-wide name: 16 hexadecimal digits that begin with 3, or 32 that begin with 6.
    ///
    /// By default derived as `serial` is.
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
    /// Limits on the use of the disk by all initiators together.
    pub(super) limits: Option<Located<IoLimits>>,
}

/// Commands a second.
pub(super) type Iops = Number<1, 1_000_000_000, NO_DEFAULT>;

/// Bytes a second: at least the larger of the block sizes.
pub(super) type Bandwidth = Bytes<4096, { 1 << 50 }, 1, NO_DEFAULT>;

/// Limits on a rate. A key that is not given limits nothing.
#[derive(Debug, Deserialize, Serialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct IoLimits {
    /// Commands that read or write.
    #[schemars(extend("x-unit" = "commands a second"))]
    pub(super) iops: Option<Iops>,
    /// Commands that read.
    #[schemars(extend("x-unit" = "commands a second"))]
    pub(super) read_iops: Option<Iops>,
    /// Commands that write.
    #[schemars(extend("x-unit" = "commands a second"))]
    pub(super) write_iops: Option<Iops>,
    /// Data both ways.
    #[schemars(extend("x-unit" = "bytes a second"))]
    pub(super) bandwidth: Option<Bandwidth>,
    /// Data that are read.
    #[schemars(extend("x-unit" = "bytes a second"))]
    pub(super) read_bandwidth: Option<Bandwidth>,
    /// Data that are written.
    #[schemars(extend("x-unit" = "bytes a second"))]
    pub(super) write_bandwidth: Option<Bandwidth>,
    /// Time for which an unused rate is kept, to be used at once.
    #[schemars(extend("default" = "100ms", "x-unit" = "time", "x-limits" = "at most 60m"))]
    pub(super) burst: Option<Located<Span>>,
}

#[derive(Debug, Deserialize, Serialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct Target {
    /// Name of your own, by which the commands of riserd know the target.
    #[schemars(extend("x-limits" = "1 to 64 letters, digits, and - _ . :"))]
    pub(super) name: Located<String>,
    /// iSCSI name, which iSCSI and iSER portals need.
    ///
    /// By default the target's name, if that is an iSCSI name.
    pub(super) iqn: Option<Located<String>>,
    /// Addresses at which it listens; at least one.
    pub(super) portals: Located<Vec<Portal>>,
    /// Disks, by logical unit number: the name of a backend, or a mapping.
    #[serde(default, skip_serializing_if = "Entries::is_empty")]
    #[schemars(extend("x-limits" = "numbers from 0 to 16383"))]
    pub(super) luns: Entries<u64, Located<Lun>>,
    /// Credentials that iSCSI initiators need.
    ///
    /// By default they need none.
    pub(super) chap: Option<Located<Chap>>,
    /// Initiators that may use it: `open` for all, or a list of rules, of which the first that
    /// matches decides.
    ///
    /// By default there is no rule, and no initiator may log in.
    #[serde(default, skip_serializing_if = "Access::is_none")]
    pub(super) access: Access,
}

#[derive(Debug, Deserialize, Serialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct Chap {
    /// Names and secrets that are accepted; at least one.
    pub(super) users: Vec<Located<ChapUser>>,
    /// Name and secret by which the target proves itself to initiators that ask.
    pub(super) mutual: Option<Located<ChapUser>>,
    /// Digest algorithms that are accepted.
    #[schemars(extend("default" = ["sha3-256", "sha256", "sha1", "md5"]))]
    pub(super) algorithms: Option<Located<Vec<Located<String>>>>,
}

#[derive(Deserialize, Serialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct ChapUser {
    /// CHAP name.
    #[schemars(extend("x-limits" = "1 to 255 characters"))]
    pub(super) name: String,
    /// The secret itself. Exactly one of the keys of secrets is given.
    #[schemars(extend("x-limits" = "12 to 255 bytes"))]
    pub(super) secret: Option<String>,
    /// Path of a file with the secret.
    pub(super) secret_file: Option<String>,
    /// Name of a variable of the daemon's environment with the secret.
    pub(super) secret_env: Option<String>,
    /// Name of a systemd credential with the secret.
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
    /// Protocol.
    pub(super) protocol: Protocol,
    /// An address of this host, and a port: 192.0.2.10, [2001:db8::1]:5555, or for all addresses
    /// 0.0.0.0, [::], eth0.
    ///
    /// By default the port is 5555 for SRP, and 3260 for iSCSI and iSER.
    pub(super) listen: Located<Listen>,
    /// I/O controller GUID of an SRP portal.
    ///
    /// By default derived from `identity` and the target's name.
    pub(super) ioc_guid: Option<Guid>,
    /// Service GUID of an SRP portal.
    ///
    /// By default the `ioc_guid`.
    pub(super) service_guid: Option<Guid>,
    /// Identifier extension of an SRP portal.
    ///
    /// By default the `ioc_guid`.
    pub(super) id_ext: Option<Guid>,
    /// Address to which iSCSI initiators that log in here are sent.
    pub(super) redirect: Option<Located<Redirect>>,
}

#[derive(Debug, Deserialize, Serialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct Redirect {
    /// An address or host name, and a port if it is not 3260.
    pub(super) to: String,
    /// Ask initiators to remember it.
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
    /// Refuse writes through this number.
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

/// `open`, or a list of rules. Nothing is an empty list: no initiator.
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
    /// SRP initiator: its GUID, or its whole port identifier.
    pub(super) initiator: Option<InitiatorId>,
    /// iSCSI initiator's name.
    pub(super) iqn: Option<Located<String>>,
    /// Source address, or a network such as 192.0.2.0/24.
    pub(super) address: Option<Net>,
    /// Numbers that it may use, as in [0, 5], or its own numbers for units of the target, as in {
    /// 0: disk5 }.
    ///
    /// By default all, by the target's numbers.
    pub(super) luns: Option<RuleLuns>,
    /// Credentials that it needs over iSCSI, in the place of the target's `chap`.
    ///
    /// With `iqn` they bind the name to these users: no other user of the target can log in with
    /// it. Users that share a rule can use each other's initiator names.
    pub(super) chap: Option<Located<Chap>>,
    /// Limits on the use of this target by each of the initiators, by all its sessions together.
    pub(super) limits: Option<Located<IoLimits>>,
}

/// A list of numbers, or units by numbers.
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
    /// Number of workers, or `auto`: one for each CPU listed, or for each core; one for two cores
    /// where there are fewer than four.
    ///
    /// It is rounded down to a power of two, 64 at most.
    #[schemars(extend("default" = "auto", "x-limits" = "auto, or 1 to 1024"))]
    pub(super) count: Option<Located<Count>>,
    /// CPUs to which workers are pinned, in turn; by default they are not pinned.
    #[schemars(extend("default" = []))]
    pub(super) cpus: Option<Located<Vec<Located<Cpu>>>>,
}

/// Number of a CPU.
pub(super) type Cpu = Number<0, 1023, NO_DEFAULT>;

#[derive(Debug, Default, PartialEq, Deserialize, Serialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub(super) struct Limits {
    /// Sessions at once.
    #[serde(skip_serializing_if = "is_default")]
    pub(super) max_sessions: Number<1, { MAX_SESSIONS as u64 }, 256>,
    /// Sessions at once from one IPv4 address or one IPv6 network (/64); at most `max_sessions`.
    #[serde(skip_serializing_if = "is_default")]
    pub(super) sessions_per_address: Option<Located<SessionsPerAddress>>,
    /// Channels of one SRP session.
    #[serde(skip_serializing_if = "is_default")]
    pub(super) channels_per_session: Number<1, 256, 8>,
    /// Connections of one iSCSI session over TCP.
    #[serde(skip_serializing_if = "is_default")]
    pub(super) connections_per_session: Number<1, 8, 1>,
    /// Highest error recovery level of iSCSI over TCP.
    #[serde(skip_serializing_if = "is_default")]
    pub(super) error_recovery_level: Number<0, 2, 0>,
    /// Commands at once on one channel or session.
    ///
    /// iSCSI and iSER sessions have 1024 at most.
    #[serde(skip_serializing_if = "is_default")]
    pub(super) queue_depth: Number<1, 4096, 128>,
    /// Longest information unit of SRP.
    #[serde(skip_serializing_if = "is_default")]
    #[schemars(extend("x-unit" = "bytes"))]
    pub(super) max_iu_size: Number<256, 65_536, 8260>,
    /// Longest transfer of one command, of which 1 MiB at most is in memory at a time.
    #[serde(skip_serializing_if = "is_default")]
    #[schemars(extend("x-unit" = "bytes"))]
    pub(super) max_transfer: Option<Located<MaxTransfer>>,
    /// Data buffers of each worker: at least what two commands need.
    #[serde(skip_serializing_if = "is_default")]
    #[schemars(extend("x-unit" = "MiB"))]
    pub(super) buffer_pool_mib: Option<Located<BufferPool>>,
    /// Time that an initiator may take to send data that it was asked for.
    #[serde(skip_serializing_if = "is_default")]
    #[schemars(extend("x-unit" = "seconds"))]
    pub(super) data_out_timeout: Number<1, 3600, { DATA_OUT_TIMEOUT.as_secs() }>,
}

/// Sessions at once from one address.
pub(super) type SessionsPerAddress = Number<1, { MAX_SESSIONS as u64 }, 64>;

/// Longest transfer of one command, in bytes.
pub(super) type MaxTransfer = Bytes<{ 64 << 10 }, { 32 << 20 }, 4096, { 32 << 20 }>;

/// Data buffers of a worker, in MiB.
pub(super) type BufferPool = Number<1, 65_536, 64>;

#[derive(Debug, Default, PartialEq, Deserialize, Serialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct Transport {
    /// RDMA devices of the portals.
    #[schemars(extend("default" = "roce"))]
    pub(super) provider: Option<Located<Provider>>,
    /// Largest path MTU, or `auto`: as large as the interface allows.
    #[schemars(extend("default" = "auto", "x-unit" = "bytes", "x-limits" = "auto, 256, 512, 1024, 2048 or 4096"))]
    pub(super) mtu: Option<Located<Count>>,
    /// Take packets of the software NIC from its own link only; peers must send with hop limit
    /// 255.
    #[schemars(extend("default" = false))]
    pub(super) on_link: Option<bool>,
    /// Let initiators on this host share memory with the daemon, beside the device of their portal.
    #[schemars(extend("default" = false))]
    pub(super) shm: Option<bool>,
    /// Faults of the link on purpose, for tests.
    pub(super) faults: Option<Faults>,
}

#[derive(Debug, PartialEq, Deserialize, Serialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct Faults {
    /// Packets lost.
    #[schemars(extend("default" = "0%", "x-unit" = "percent"))]
    pub(super) loss: Option<Percent>,
    /// Packets sent twice.
    #[schemars(extend("default" = "0%", "x-unit" = "percent"))]
    pub(super) duplicate: Option<Percent>,
    /// Packets held back behind later ones.
    #[schemars(extend("default" = "0%", "x-unit" = "percent"))]
    pub(super) reorder: Option<Percent>,
    /// Packets with a bit flipped.
    #[schemars(extend("default" = "0%", "x-unit" = "percent"))]
    pub(super) corrupt: Option<Percent>,
    /// Later packets that may pass one held back.
    #[serde(default)]
    pub(super) reorder_window: Number<1, 1024, 8>,
    /// Seed of the random numbers, so that a run can be repeated.
    #[schemars(extend("default" = 1))]
    pub(super) seed: Option<u64>,
}

#[derive(Debug, Default, PartialEq, Deserialize, Serialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct Log {
    /// Level such as `info`, or levels by module such as `info,riser_target=debug`.
    #[schemars(extend("default" = "info"))]
    pub(super) filter: Option<Located<String>>,
    /// Form of the log.
    #[schemars(extend("default" = "text"))]
    pub(super) format: Option<LogFormat>,
    /// Log logins, refusals and changes even where the filter does not have them.
    #[schemars(extend("default" = "on"))]
    pub(super) audit: Option<OnOff>,
}
