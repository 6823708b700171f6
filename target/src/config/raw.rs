//! The schema as it is written. Every key of the file is a field here, and nothing else is allowed.

use std::fmt;

use schemars::JsonSchema;
use serde::de::value::{MapAccessDeserializer, SeqAccessDeserializer};
use serde::{Deserialize, Deserializer, de};

use super::listen::Written as Listen;
use super::value::{Count, Guid, InitiatorId, NaaText, Net, OnOff, Percent, Size, Span};
use super::yaml::{Entries, Located};

/// A configuration of riserd.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct Root {
    /// What serial numbers, world-wide names and GUIDs that are not set derive from; by default the machine's id.
    pub(super) identity: Option<Located<String>>,
    /// Start with everything or not at all; by default what cannot be had is reported and tried again, and the
    /// rest is served.
    #[serde(default)]
    pub(super) strict: bool,
    /// Where the bytes of disks are, by names of your own.
    #[serde(default)]
    pub(super) backends: Entries<String, Located<Backend>>,
    /// What is served, and where.
    pub(super) targets: Option<Vec<Located<Target>>>,
    /// Worker threads.
    #[serde(default)]
    pub(super) workers: Workers,
    /// Bounds on sessions and memory.
    #[serde(default)]
    pub(super) limits: Limits,
    /// The network.
    #[serde(default)]
    pub(super) transport: Transport,
    /// What is logged, and how.
    #[serde(default)]
    pub(super) log: Log,
    /// What discovery sessions over iSCSI must prove. By default nothing.
    pub(super) discovery_chap: Option<Located<Chap>>,
    /// The admin API.
    #[serde(default)]
    pub(super) admin: Admin,
    /// Where applied configurations are kept.
    #[serde(default)]
    pub(super) state: State,
    /// Metrics and the status page.
    #[serde(default)]
    pub(super) metrics: Metrics,
}

#[derive(Debug, Default, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct Admin {
    /// The admin socket, or `none`. Root's default is /run/riserd/admin.sock.
    pub(super) socket: Option<Located<String>>,
}

#[derive(Debug, Default, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct Metrics {
    /// A TCP address and port such as 127.0.0.1:9909; by default they are on the admin socket only.
    pub(super) listen: Option<Located<String>>,
    /// Whether other hosts may reach it: whoever does sees names, addresses and numbers.
    #[serde(default)]
    pub(super) remote: bool,
}

#[derive(Debug, Default, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct State {
    /// The directory, or `none`. Root's default is /var/lib/riserd.
    pub(super) directory: Option<Located<String>>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub(super) enum Kind {
    File,
    Device,
    Ram,
    Null,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub(super) enum Direct {
    Auto,
    On,
    Off,
}

#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct Backend {
    /// What it is made of.
    pub(super) kind: Kind,
    /// The file or block device.
    pub(super) path: Option<Located<String>>,
    /// Its size; by default the size that the file has.
    pub(super) size: Option<Located<Size>>,
    /// Create the file, or extend it to `size`, sparsely.
    pub(super) create: Option<Located<bool>>,
    /// 512 or 4096 bytes; 512 by default.
    pub(super) block_size: Option<Located<u64>>,
    /// Whether to bypass the page cache; by default where that works.
    pub(super) direct: Option<Located<Direct>>,
    /// `off` makes every write durable before it completes.
    pub(super) write_cache: Option<OnOff>,
    /// Refuse writes.
    pub(super) read_only: Option<bool>,
    /// Offer UNMAP, as far as the backend can; on by default.
    pub(super) thin: Option<bool>,
    /// The share of the space available to a file, such as 80%, at which initiators are warned that it fills up; by
    /// default they are not.
    pub(super) threshold: Option<Located<Percent>>,
    /// Let START STOP UNIT stop the unit, for all initiators; off by default, when a stop only flushes.
    pub(super) stoppable: Option<bool>,
    /// Whether the medium turns; by default what the device says.
    pub(super) rotational: Option<bool>,
    /// Unit serial number; by default derived.
    pub(super) serial: Option<Located<String>>,
    /// World-wide name: 16 digits that begin with 3, or 32 that begin with 6; by default derived.
    pub(super) naa: Option<Located<NaaText>>,
    /// T10 vendor identification.
    pub(super) vendor: Option<Located<String>>,
    /// Product identification.
    pub(super) product: Option<Located<String>>,
    /// Product revision level.
    pub(super) revision: Option<Located<String>>,
    /// How fast it may be used by all initiators together.
    pub(super) limits: Option<Located<IoLimits>>,
}

/// How fast. What is not given is not limited.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct IoLimits {
    /// Commands a second that read or write.
    pub(super) iops: Option<Located<u64>>,
    /// Commands a second that read.
    pub(super) read_iops: Option<Located<u64>>,
    /// Commands a second that write.
    pub(super) write_iops: Option<Located<u64>>,
    /// Bytes a second.
    pub(super) bandwidth: Option<Located<Size>>,
    /// Bytes a second that are read.
    pub(super) read_bandwidth: Option<Located<Size>>,
    /// Bytes a second that are written.
    pub(super) write_bandwidth: Option<Located<Size>>,
    /// For how long what is not used is kept, to be used at once; 100ms by default.
    pub(super) burst: Option<Located<Span>>,
}

#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct Target {
    /// A name of your own.
    pub(super) name: Located<String>,
    /// Where it listens; at least one.
    pub(super) portals: Located<Vec<Portal>>,
    /// Its disks, by logical unit number.
    #[serde(default)]
    pub(super) luns: Entries<u64, Located<Lun>>,
    /// Who may use it; nobody by default.
    #[serde(default)]
    pub(super) access: Access,
    /// Its iSCSI name, which iSCSI and iSER portals need.
    pub(super) iqn: Option<Located<String>>,
    /// What iSCSI initiators must prove. By default nothing.
    pub(super) chap: Option<Located<Chap>>,
}

#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct Chap {
    /// Names and secrets that are accepted.
    pub(super) users: Vec<Located<ChapUser>>,
    /// What the target proves to initiators that ask.
    pub(super) mutual: Option<Located<ChapUser>>,
    /// Digest algorithms that are taken: sha3-256, sha256, sha1, md5. All by default.
    pub(super) algorithms: Option<Located<Vec<Located<String>>>>,
}

#[derive(Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct ChapUser {
    /// The CHAP name.
    pub(super) name: String,
    /// The secret itself, 12 to 255 bytes.
    pub(super) secret: Option<String>,
    /// A file that holds the secret.
    pub(super) secret_file: Option<String>,
    /// A variable of the daemon's environment that holds the secret.
    pub(super) secret_env: Option<String>,
    /// The name of a systemd credential that holds the secret.
    pub(super) secret_credential: Option<String>,
}

/// Without the secret.
impl fmt::Debug for ChapUser {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ChapUser")
            .field("name", &self.name)
            .finish_non_exhaustive()
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub(super) enum Protocol {
    Srp,
    Iscsi,
    Iser,
}

#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct Portal {
    /// The protocol spoken.
    pub(super) protocol: Protocol,
    /// An address of this host, and a port if it is not the usual one: 5555 for SRP, 3260 for iSCSI and iSER.
    pub(super) listen: Located<Listen>,
    /// By default the `ioc_guid`.
    pub(super) service_guid: Option<Guid>,
    /// I/O controller GUID; by default derived.
    pub(super) ioc_guid: Option<Guid>,
    /// Identifier extension; by default the `ioc_guid`.
    pub(super) id_ext: Option<Guid>,
    /// Where iSCSI initiators that log in here are sent instead.
    pub(super) redirect: Option<Located<Redirect>>,
}

#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct Redirect {
    /// An address or host name, and a port if it is not 3260.
    pub(super) to: String,
    /// Whether initiators should remember it.
    #[serde(default)]
    pub(super) permanent: bool,
}

/// `name`, or `{ backend: name, read_only: true }`.
#[derive(Debug)]
pub(super) struct Lun {
    pub(super) backend: String,
    pub(super) read_only: bool,
}

#[derive(Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct LunMapping {
    /// The name of a backend.
    backend: String,
    /// Refuse writes through this number.
    #[serde(default)]
    read_only: bool,
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

/// `open`, or a list of rules. Nothing is an empty list: nobody.
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

#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct Rule {
    /// An SRP initiator: its GUID, or its whole port identifier.
    pub(super) initiator: Option<InitiatorId>,
    /// An iSCSI initiator's name.
    pub(super) iqn: Option<Located<String>>,
    /// An address, or a network such as 192.0.2.0/24.
    pub(super) address: Option<Net>,
    /// The numbers that it may use, as in [0, 5], or its own numbers for units of the target, as in
    /// { 0: disk5 }; by default all.
    pub(super) luns: Option<RuleLuns>,
    /// What it must prove over iSCSI, in the place of the target's `chap`. With `iqn` it binds the name to
    /// these users: no other user of the target can log in with it. Users that share a rule can use each
    /// other's initiator names.
    pub(super) chap: Option<Located<Chap>>,
    /// How fast each initiator that it is about may use this target, by all its sessions together.
    pub(super) limits: Option<Located<IoLimits>>,
}

/// A list of numbers, or units by numbers.
#[derive(Debug)]
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
                    "open" => Ok(Access::Open),
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

#[derive(Debug, Default, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct Workers {
    /// How many, or `auto`: one per core, or per CPU listed. Rounded down to a power of two.
    pub(super) count: Option<Located<Count>>,
    /// The CPUs to pin them to; by default none.
    pub(super) cpus: Option<Located<Vec<Located<u64>>>>,
}

#[derive(Debug, Default, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct Limits {
    /// Sessions at once.
    pub(super) max_sessions: Option<Located<u64>>,
    /// Sessions at once from one address.
    pub(super) sessions_per_address: Option<Located<u64>>,
    /// Channels of one SRP session.
    pub(super) channels_per_session: Option<Located<u64>>,
    /// Connections of one iSCSI session over TCP: 1, which is the default, to 8.
    pub(super) connections_per_session: Option<Located<u64>>,
    /// Highest error recovery level of iSCSI over TCP: 0, which is the default, to 2.
    pub(super) error_recovery_level: Option<Located<u64>>,
    /// Commands at once on one channel or session.
    pub(super) queue_depth: Option<Located<u64>>,
    /// Longest information unit of SRP, in bytes.
    pub(super) max_iu_size: Option<Located<u64>>,
    /// Longest transfer of one command, of which 1 MiB at most is in memory at a time.
    pub(super) max_transfer: Option<Located<Size>>,
    /// Data buffers of each worker, in MiB.
    pub(super) buffer_pool_mib: Option<Located<u64>>,
    /// Seconds that an initiator may take to send data that it was asked for.
    pub(super) data_out_timeout: Option<Located<u64>>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub(super) enum Provider {
    Roce,
    RdmaCore,
    Auto,
}

#[derive(Debug, Default, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct Transport {
    /// The software NIC, the host's RDMA devices, or these where there are some.
    pub(super) provider: Option<Provider>,
    /// Largest path MTU, or `auto`.
    pub(super) mtu: Option<Located<Count>>,
    /// Take packets of the software NIC from its own link only; peers must send with hop limit 255.
    pub(super) on_link: Option<bool>,
    /// Faults of the link on purpose, for tests.
    pub(super) faults: Option<Faults>,
}

#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct Faults {
    /// Packets lost.
    pub(super) loss: Option<Percent>,
    /// Packets sent twice.
    pub(super) duplicate: Option<Percent>,
    /// Packets held back behind later ones.
    pub(super) reorder: Option<Percent>,
    /// Packets with a bit flipped.
    pub(super) corrupt: Option<Percent>,
    /// How many later packets may pass one held back.
    pub(super) reorder_window: Option<Located<u64>>,
    /// Where chance starts.
    pub(super) seed: Option<u64>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub(super) enum LogFormat {
    Text,
    Json,
}

#[derive(Debug, Default, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct Log {
    /// A level such as `info`, or `info,riser_target=debug`.
    pub(super) filter: Option<Located<String>>,
    /// Lines for people, or JSON.
    pub(super) format: Option<LogFormat>,
    /// Whether logins, denials and changes are logged whatever the filter says; on by default.
    pub(super) audit: Option<OnOff>,
}
