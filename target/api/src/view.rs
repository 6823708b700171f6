//! Views of the daemon, its sessions, targets and configurations.

use std::collections::BTreeMap;

use riser_config::Difference;
use serde::{Deserialize, Serialize};

use crate::upgrade::UpgradeRecord;

/// The daemon as a whole.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Status {
    /// Version of the daemon's program.
    pub version: String,
    /// Process id of the daemon.
    pub pid: u32,
    /// Seconds since it began to serve.
    pub uptime: u64,
    /// I_T nexuses at present.
    pub sessions: usize,
    /// Its workers that answered.
    pub workers: Vec<WorkerView>,
    /// Backends and portals that it should serve and cannot, and backends that fail commands.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub problems: Vec<ProblemView>,
    /// Differences between what is served and what is written down.
    #[serde(flatten)]
    pub written: Written,
    /// Upgrades in its process.
    #[serde(flatten)]
    pub upgrade_record: UpgradeRecord,
}

/// Differences between what is served and what is written down.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Written {
    /// Backends that are larger than the configuration says: what was grown stays grown.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub drift: Vec<DriftView>,
    /// True if what is served ends with the process, since no file has it and a restart does not
    /// restore it.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub unsaved: bool,
    /// True if the configuration file does not have what is served, and a restart serves it again
    /// all the same.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub restored: bool,
}

/// A backend that cannot be opened or fails commands, or a portal that cannot be listened on. It
/// is tried again.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ProblemView {
    /// Kind of object: `backend` or `portal`.
    pub kind: String,
    /// The backend's name, or the portal's address.
    pub name: String,
    /// Reason why it is not served, for people.
    pub error: String,
    /// Since when, in seconds since 1970.
    pub since: u64,
    /// True if it is a backend that is open and fails some commands, such as writes while its file
    /// system is full.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub failing: bool,
}

/// Use of one worker thread.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct WorkerView {
    /// Number of the worker, from 0.
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
    /// Address of the initiator.
    pub peer: String,
    /// Provider of the RDMA device that carries it, such as `roce` or `shm`; absent over TCP.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub provider: Option<String>,
    /// The worker that has it.
    pub worker: u16,
    /// The I_T nexus; connections of one session share it.
    pub nexus: Option<u64>,
    /// State of the connection, for people.
    pub state: String,
    /// Requests of the initiator under way.
    pub in_flight: usize,
    /// PDUs of iSCSI whose digest was wrong.
    #[serde(default)]
    pub digest_errors: u64,
    /// Logical units that it sees.
    pub luns: usize,
    /// Memory that the connection may occupy, in bytes: what its login has settled, and over TCP what
    /// its buffers have grown to.
    pub memory: usize,
    /// Values that the login agreed on, by the names of the protocol.
    pub negotiated: BTreeMap<String, String>,
    /// Rates at which the initiator may use the target, by all its sessions together.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub limits: Option<LimitsView>,
}

/// One target as it is served.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TargetView {
    /// Its name in the configuration.
    pub name: String,
    /// Its iSCSI name, if it has one.
    pub iqn: Option<String>,
    /// Addresses at which it is served.
    pub portals: Vec<PortalView>,
    /// Its logical units, by number.
    pub luns: BTreeMap<u16, LunView>,
}

/// One address at which a target is served.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PortalView {
    /// `srp`, `iser` or `iscsi`.
    pub protocol: String,
    /// Its address and port.
    pub listen: String,
    /// Names of an SRP target port.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub names: Option<PortNames>,
}

/// Names by which initiators find an SRP target port: 16 hexadecimal digits each, after `0x`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PortNames {
    /// GUID of the I/O controller, which is the target.
    pub ioc_guid: String,
    /// The InfiniBand service id.
    pub service_guid: String,
    /// Identifier extension of the target port.
    pub id_ext: String,
}

/// One logical unit as it is served.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LunView {
    /// Unit serial number, as in VPD page 80h.
    pub serial: String,
    /// Capacity of the unit in bytes.
    pub size: u64,
    /// Block size in bytes.
    pub block_size: u32,
    /// True if it refuses writes.
    pub read_only: bool,
    /// The flush that failed: acknowledged writes may be lost, and flushes fail until it is
    /// cleared.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub flush_failure: Option<FlushFailureView>,
    /// Rates at which all initiators together may use it.
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
    /// Sum of the times that they have waited, in milliseconds.
    pub waited_ms: u64,
}

/// A flush that failed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FlushFailureView {
    /// Error of the first flush that failed.
    pub error: String,
    /// Time of that, in seconds since 1970.
    pub at: u64,
}

/// Changes that another configuration makes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Changes {
    /// Places at which it differs from the present one.
    pub changes: Vec<Difference>,
    /// Reason why it cannot follow while the daemon runs, if so.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub refused: Option<String>,
    /// Differences between what is served then and what is written down. `unsaved` and `restored`
    /// are true only if they were not before the change.
    #[serde(flatten)]
    pub written: Written,
}

/// A backend that is larger than its configuration says.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DriftView {
    /// The place of the size in the configuration.
    pub path: String,
    /// Size in the configuration, in bytes.
    pub configured: u64,
    /// Size that is served, in bytes.
    pub served: u64,
}

/// A configuration that the daemon has had.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct HistoryView {
    /// Number of changes since it was the present one, which is 0.
    pub back: usize,
    /// Time at which it was applied, in seconds since 1970.
    pub time: u64,
    /// The user and process that asked for it.
    pub who: String,
    /// `start`, `upgrade`, `apply`, `reload`, `rollback 1`: the request that led to it.
    pub how: String,
    /// Differences from the one before it, as far as that is kept.
    #[serde(default)]
    pub changes: Vec<Difference>,
}
