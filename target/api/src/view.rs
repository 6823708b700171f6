//! What the daemon says of itself, its sessions, targets and configurations.

use std::collections::BTreeMap;

use riser_config::Difference;
use serde::{Deserialize, Serialize};

use crate::upgrade::UpgradeRecord;

/// The daemon as a whole.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Status {
    /// Its version.
    pub version: String,
    /// Its process.
    pub pid: u32,
    /// How long it has served, in seconds.
    pub uptime: u64,
    /// I_T nexuses at present.
    pub sessions: usize,
    /// Its workers that answered.
    pub workers: Vec<WorkerView>,
    /// What it should serve and cannot, and backends that fail commands.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub problems: Vec<ProblemView>,
    /// Backends that are larger than the configuration says.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub drift: Vec<DriftView>,
    /// Whether what is served ends with the process, since no file has it and a restart does not
    /// restore it.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub unsaved: bool,
    /// Whether the configuration file does not have what is served, and a restart serves it again
    /// all the same.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub restored: bool,
    /// Upgrades in its process.
    #[serde(flatten)]
    pub upgrade_record: UpgradeRecord,
}

/// A backend that cannot be opened or fails commands, or a portal that cannot be listened on. It
/// is tried again.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ProblemView {
    /// `backend` or `portal`.
    pub kind: String,
    /// The backend's name, or the portal's address.
    pub name: String,
    /// Why.
    pub error: String,
    /// Since when, in seconds since 1970.
    pub since: u64,
    /// Whether it is a backend that is open and fails some commands, such as writes while its file
    /// system is full.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub failing: bool,
}

/// A worker.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct WorkerView {
    /// Its number.
    pub worker: u16,
    /// Logins accepted since the start.
    pub logins: u64,
    /// Logins refused since the start.
    pub rejects: u64,
    /// Commands taken in since the start.
    pub commands: u64,
    /// Bytes of the data-buffer pool.
    pub pool: usize,
    /// Bytes of it that are free.
    pub pool_free: usize,
    /// The least that was ever free, in bytes.
    pub pool_lowest: usize,
    /// Times that it slept.
    pub parks: u64,
}

/// One connection of a session: an SRP channel, or an iSCSI connection.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SessionView {
    /// `srp`, `iser` or `iscsi`.
    pub protocol: String,
    /// The target's name in the configuration; empty in a discovery session.
    pub target: String,
    /// The initiator port: an SRP port identifier, or an iSCSI name with its ISID.
    pub initiator: String,
    /// Where the initiator is.
    pub peer: String,
    /// The worker that has it.
    pub worker: u16,
    /// The I_T nexus; connections of one session share it.
    pub nexus: Option<u64>,
    /// Where it is in its life.
    pub state: String,
    /// Requests under way.
    pub in_flight: usize,
    /// PDUs of iSCSI whose digest was wrong.
    #[serde(default)]
    pub digest_errors: u64,
    /// Logical units that it sees.
    pub luns: usize,
    /// What the connection occupies, in bytes.
    pub memory: usize,
    /// What the login agreed on, by the names of the protocol.
    pub negotiated: BTreeMap<String, String>,
    /// How fast the initiator may use the target, by all its sessions together.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub limits: Option<LimitsView>,
}

/// A target.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TargetView {
    /// Its name in the configuration.
    pub name: String,
    /// Its iSCSI name, if it has one.
    pub iqn: Option<String>,
    /// Where it is served.
    pub portals: Vec<PortalView>,
    /// Its logical units, by number.
    pub luns: BTreeMap<u16, LunView>,
}

/// Where a target is served.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PortalView {
    /// `srp`, `iser` or `iscsi`.
    pub protocol: String,
    /// Its address and port.
    pub listen: String,
    /// What an SRP target port is known by.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub names: Option<PortNames>,
}

/// What an SRP target port is known by: 16 hexadecimal digits each, after `0x`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PortNames {
    /// I/O controller GUID.
    pub ioc_guid: String,
    /// The InfiniBand service id.
    pub service_guid: String,
    /// Identifier extension.
    pub id_ext: String,
}

/// A logical unit.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LunView {
    /// Unit serial number.
    pub serial: String,
    /// Size in bytes.
    pub size: u64,
    /// Block size in bytes.
    pub block_size: u32,
    /// Whether it refuses writes.
    pub read_only: bool,
    /// The flush that failed: acknowledged writes may be lost, and flushes fail until it is
    /// cleared.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub flush_failure: Option<FlushFailureView>,
    /// How fast it may be used by all initiators together.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub limits: Option<LimitsView>,
}

/// Limits, and what has waited for them.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LimitsView {
    /// Commands or bytes a second, by the names that they have in the configuration.
    pub rates: BTreeMap<String, u64>,
    /// For how long what is not used is kept, in milliseconds.
    pub burst_ms: u64,
    /// Commands that have waited.
    pub waits: u64,
    /// How long they have waited, in milliseconds.
    pub waited_ms: u64,
}

/// A flush that failed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FlushFailureView {
    /// Why.
    pub error: String,
    /// When, in seconds since 1970.
    pub at: u64,
}

/// What another configuration changes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Changes {
    /// Where it differs from the present one.
    pub changes: Vec<Difference>,
    /// Why it cannot follow while the daemon runs, if so.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub refused: Option<String>,
    /// Backends that are larger than it says: what was grown stays grown.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub drift: Vec<DriftView>,
    /// Whether what is served now, and was not before, ends with the process: see
    /// [`Status::unsaved`].
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub unsaved: bool,
    /// Whether, since this change, the configuration file does not have what is served: see
    /// [`Status::restored`].
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub restored: bool,
}

/// A backend that is larger than its configuration says.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DriftView {
    /// The place of the size in the configuration.
    pub path: String,
    /// What the configuration says, in bytes.
    pub configured: u64,
    /// What is served, in bytes.
    pub served: u64,
}

/// A configuration that the daemon has had.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct HistoryView {
    /// How many before the present one, which is 0.
    pub back: usize,
    /// When it was applied, in seconds since 1970.
    pub time: u64,
    /// Who asked for it.
    pub who: String,
    /// How: `start`, `upgrade`, `apply`, `reload`, `rollback 1`.
    pub how: String,
    /// Where it differs from the one before it, as far as that is kept.
    #[serde(default)]
    pub changes: Vec<Difference>,
}
