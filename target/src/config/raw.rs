//! The schema as it is written. Every key of the file is a field here, and nothing else is allowed.

use std::fmt;

use serde::de::value::MapAccessDeserializer;
use serde::{Deserialize, Deserializer, de};

use super::value::{Count, Guid, InitiatorId, Listen, NaaText, Net, OnOff, PKey, Percent, Size};
use super::yaml::{Entries, Located};

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Root {
    pub(super) identity: Option<Located<String>>,
    #[serde(default)]
    pub(super) backends: Entries<String, Located<Backend>>,
    pub(super) targets: Option<Vec<Located<Target>>>,
    #[serde(default)]
    pub(super) workers: Workers,
    #[serde(default)]
    pub(super) limits: Limits,
    #[serde(default)]
    pub(super) transport: Transport,
    #[serde(default)]
    pub(super) log: Log,
    pub(super) discovery_chap: Option<Located<Chap>>,
    #[serde(default)]
    pub(super) admin: Admin,
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Admin {
    pub(super) socket: Option<Located<String>>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum Kind {
    File,
    Device,
    Ram,
    Null,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum Direct {
    Auto,
    On,
    Off,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Backend {
    pub(super) kind: Kind,
    pub(super) path: Option<Located<String>>,
    pub(super) size: Option<Located<Size>>,
    pub(super) create: Option<Located<bool>>,
    pub(super) block_size: Option<Located<u64>>,
    pub(super) direct: Option<Located<Direct>>,
    pub(super) write_cache: Option<OnOff>,
    pub(super) read_only: Option<bool>,
    pub(super) thin: Option<bool>,
    pub(super) rotational: Option<bool>,
    pub(super) serial: Option<Located<String>>,
    pub(super) naa: Option<Located<NaaText>>,
    pub(super) vendor: Option<Located<String>>,
    pub(super) product: Option<Located<String>>,
    pub(super) revision: Option<Located<String>>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Target {
    pub(super) name: Located<String>,
    pub(super) portals: Located<Vec<Portal>>,
    #[serde(default)]
    pub(super) luns: Entries<u16, Located<Lun>>,
    #[serde(default)]
    pub(super) access: Access,
    pub(super) iqn: Option<Located<String>>,
    pub(super) chap: Option<Located<Chap>>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Chap {
    pub(super) users: Vec<Located<ChapUser>>,
    pub(super) mutual: Option<Located<ChapUser>>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct ChapUser {
    pub(super) name: String,
    pub(super) secret: Option<String>,
    pub(super) secret_file: Option<String>,
}

/// Without the secret.
impl fmt::Debug for ChapUser {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ChapUser")
            .field("name", &self.name)
            .finish_non_exhaustive()
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum Protocol {
    Srp,
    Iscsi,
    Iser,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Portal {
    pub(super) protocol: Protocol,
    pub(super) listen: Located<Listen>,
    pub(super) service_guid: Option<Guid>,
    pub(super) ioc_guid: Option<Guid>,
    pub(super) id_ext: Option<Guid>,
    pub(super) pkey: Option<PKey>,
    pub(super) redirect: Option<Located<Redirect>>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Redirect {
    pub(super) to: String,
    #[serde(default)]
    pub(super) permanent: bool,
}

/// `name`, or `{ backend: name, read_only: true }`.
#[derive(Debug)]
pub(super) struct Lun {
    pub(super) backend: String,
    pub(super) read_only: bool,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct LunMapping {
    backend: String,
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

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Rule {
    pub(super) initiator: Option<InitiatorId>,
    pub(super) iqn: Option<Located<String>>,
    pub(super) address: Option<Net>,
    pub(super) luns: Option<Vec<Located<u64>>>,
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

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Workers {
    pub(super) count: Option<Located<Count>>,
    pub(super) cpus: Option<Located<Vec<Located<u64>>>>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Limits {
    pub(super) max_sessions: Option<Located<u64>>,
    pub(super) sessions_per_address: Option<Located<u64>>,
    pub(super) channels_per_session: Option<Located<u64>>,
    pub(super) queue_depth: Option<Located<u64>>,
    pub(super) max_iu_size: Option<Located<u64>>,
    pub(super) max_transfer: Option<Located<Size>>,
    pub(super) buffer_pool_mib: Option<Located<u64>>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Provider {
    Roce,
    RdmaCore,
    Auto,
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Transport {
    pub(super) provider: Option<Provider>,
    pub(super) mtu: Option<Located<Count>>,
    pub(super) faults: Option<Faults>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Faults {
    pub(super) loss: Option<Percent>,
    pub(super) duplicate: Option<Percent>,
    pub(super) reorder: Option<Percent>,
    pub(super) corrupt: Option<Percent>,
    pub(super) reorder_window: Option<Located<u64>>,
    pub(super) seed: Option<u64>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum LogFormat {
    Text,
    Json,
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Log {
    pub(super) filter: Option<Located<String>>,
    pub(super) format: Option<LogFormat>,
}
