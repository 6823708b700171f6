//! Objects of the daemon: each has a single type, from which all output formats are rendered.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use riser_config::Difference;
use serde::{Deserialize, Serialize};

use crate::upgrade::UpgradeRecord;

/// Status of the daemon.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Status {
    /// Version of the daemon's program.
    pub version: String,
    /// Process ID of the daemon.
    pub pid: u32,
    /// Uptime in seconds.
    pub uptime: u64,
    /// Current number of I_T nexuses.
    pub sessions: usize,
    /// Workers that responded.
    pub workers: Vec<WorkerView>,
    /// Backends and portals that are not available, and backends that fail commands.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub problems: Vec<ProblemView>,
    /// The last scrub of each backend.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub scrubs: Vec<ScrubView>,
    /// Initiators blocked by an administrator.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub blocked: Vec<BlockedView>,
    /// Differences between the current configuration and its file.
    #[serde(flatten)]
    pub written: Written,
    /// Upgrade history of the process.
    #[serde(flatten)]
    pub upgrade_record: UpgradeRecord,
}

/// An initiator blocked by an administrator.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct BlockedView {
    /// iSCSI name, or GUID of an SRP initiator.
    pub initiator: String,
    /// Start time in seconds since 1970.
    pub since: u64,
    /// End time in seconds since 1970; not set if there is no limit.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub until: Option<u64>,
    /// User and process that requested the block.
    pub who: String,
}

/// Differences between the current configuration and its file.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Written {
    /// Backends that are larger than configured, because we don't shrink a backend.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub drift: Vec<DriftView>,
    /// True if the current configuration will be lost on restart, because it was not saved.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub unsaved: bool,
    /// True if the current configuration is different from the file, but will be restored on
    /// restart.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub restored: bool,
}

/// A backend that cannot be opened or needs attention, or another object that is not available. Its
/// text consists of `kind`, `name` and `error`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ProblemView {
    /// Object type: `backend`, `portal`, `shared memory`, `metrics`, `admin` or `state`; in
    /// configuration checks also `secret`.
    pub kind: String,
    /// Backend name, portal address, or path.
    pub name: String,
    /// Human-readable error.
    pub error: String,
    /// Start time in seconds since 1970.
    pub since: u64,
    /// True for an open backend that fails some commands, such as writes when its file system is
    /// full.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub failing: bool,
    /// Error cause for an open backend that needs attention: `medium`, `no_space`, `read_only`,
    /// `not_ready`, `internal`, `hanging`, `flush_failed`, `deleted`, `replaced`, `moved` or
    /// `truncated`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cause: Option<String>,
    /// Human-readable state: `NOT SERVED`, `HANGING`, `FAILING` or `REPLACED`.
    #[serde(default)]
    pub state: String,
}

impl fmt::Display for ProblemView {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}: {}", self.kind, self.name, self.error)
    }
}

/// Worker thread counters.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct WorkerView {
    /// Worker number, starting at 0.
    pub worker: u16,
    /// Logins accepted since the start.
    pub logins: u64,
    /// Logins rejected since the start.
    pub rejects: u64,
    /// Commands received since the start.
    pub commands: u64,
    /// Size of the data buffer pool in bytes.
    pub pool: usize,
    /// Free bytes in the pool.
    pub pool_free: usize,
    /// Minimum of the free bytes so far.
    pub pool_lowest: usize,
    /// Number of times that the worker went to sleep.
    pub parks: u64,
    /// Busy time in seconds.
    pub busy: f64,
    /// Seconds since the worker was started.
    pub ran: f64,
    /// Maximum number of requests in flight of the worker's sessions.
    pub contexts: usize,
    /// Requests in flight of the worker's sessions.
    pub contexts_in_use: usize,
}

/// A connection of a session: an SRP channel, or an iSCSI connection.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct SessionView {
    /// `srp`, `iser` or `iscsi`.
    pub protocol: String,
    /// Target name in the configuration, or in the protocol while the sessions of a removed target
    /// are closed; empty in a discovery session.
    pub target: String,
    /// Initiator port: an SRP port identifier, or an iSCSI name with an ISID.
    pub initiator: String,
    /// Initiator address.
    pub peer: String,
    /// Provider of the RDMA device, such as `roce` or `shm`; not set for TCP.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub provider: Option<String>,
    /// Worker that handles this connection.
    pub worker: u16,
    /// The I_T nexus, which is shared by all connections of a session.
    pub nexus: Option<u64>,
    /// Human-readable connection state.
    pub state: String,
    /// Requests in flight.
    pub in_flight: usize,
    /// iSCSI PDUs with an invalid digest.
    pub digest_errors: u64,
    /// Number of visible logical units.
    pub luns: usize,
    /// Maximum memory used by this connection in bytes, based on its login parameters. For TCP,
    /// this includes the current buffer size.
    pub memory: usize,
    /// Login parameters, using their names in the protocol.
    pub negotiated: BTreeMap<String, String>,
    /// Rate limits for all sessions of this initiator and target.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub limits: Option<LimitsView>,
    /// Completed commands for this initiator port and target on this worker.
    pub commands: u64,
    /// Bytes in both directions for these commands.
    pub bytes: u64,
    /// Bytes sent to the initiator.
    pub read: u64,
    /// Bytes received from the initiator.
    pub written: u64,
}

/// Returns the initiator name in the name of an initiator port: without the ISID for iSCSI.
#[must_use]
pub fn initiator_name(port: &str) -> &str {
    port.split_once(',').map_or(port, |(name, _)| name)
}

/// Returns the target of a session for display. With an empty name, the next column would look like
/// the target. A discovery session has no target (RFC 7143 4.3).
#[must_use]
pub fn target_label(target: &str) -> &str {
    match target {
        "" => "(discovery)",
        target => target,
    }
}

/// Returns the number of I_T nexuses of these connections, as `sessions` in [`Status`]. A session
/// can have several connections, and discovery sessions are not included.
#[must_use]
pub fn count_nexuses(connections: &[SessionView]) -> usize {
    let nexuses: BTreeSet<_> = connections.iter().filter_map(|c| c.nexus).collect();
    // `GET /v1/live` of version 0.1.0 has no nexuses, so count connections in this case.
    let unknown = connections.iter().filter(|c| c.nexus.is_none());
    nexuses.len() + unknown.filter(|c| !c.target.is_empty()).count()
}

/// An active target.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TargetView {
    /// Name in the configuration.
    pub name: String,
    /// iSCSI name, if any.
    pub iqn: Option<String>,
    /// Portals of this target.
    pub portals: Vec<PortalView>,
    /// Logical units by number.
    pub luns: BTreeMap<u16, LunView>,
}

/// A portal of an active target.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PortalView {
    /// `srp`, `iser` or `iscsi`.
    pub protocol: String,
    /// Address and port. A wildcard is replaced by its current addresses, and only included itself
    /// if it has a problem.
    pub listen: String,
    /// Names of an SRP target port.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub names: Option<PortNames>,
    /// The problem if the portal is not available.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub problem: Option<ProblemView>,
}

/// Names used by initiators to find an SRP target port: `0x` followed by 16 hexadecimal digits
/// each.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PortNames {
    /// GUID of the I/O controller, which represents the target.
    pub ioc_guid: String,
    /// The InfiniBand service ID.
    pub service_guid: String,
    /// Identifier extension of the target port.
    pub id_ext: String,
}

/// An active logical unit.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct LunView {
    /// Unit serial number, as in VPD page 80h.
    pub serial: String,
    /// World-wide name (NAA) as in VPD page 83h, formatted like Linux does: `0x3` followed by 15
    /// digits. Not set if the names of the unit are not known yet.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub wwn: Option<String>,
    /// Backend name in the configuration.
    pub backend: String,
    /// Backend problem.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub problem: Option<ProblemView>,
    /// Capacity in bytes; not set if the backend is not open.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub size: Option<u64>,
    /// Block size in bytes.
    pub block_size: u32,
    /// True if writes are rejected.
    pub read_only: bool,
    /// The failed flush, if any: acknowledged writes can be lost, and all flushes will fail until
    /// this is cleared.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub flush_failure: Option<FlushFailureView>,
    /// Rate limits for all initiators.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub limits: Option<LimitsView>,
}

/// Rate limits, and the commands delayed by them.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LimitsView {
    /// Commands or bytes per second, using the names from the configuration.
    pub rates: BTreeMap<String, u64>,
    /// Burst time in milliseconds.
    pub burst_ms: u64,
    /// Number of delayed commands.
    pub waits: u64,
    /// Total delay in milliseconds.
    pub waited_ms: u64,
}

/// A failed flush.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FlushFailureView {
    /// Error of the first failed flush.
    pub error: String,
    /// Time of this error in seconds since 1970.
    pub at: u64,
}

/// Changes made by a new configuration.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Changes {
    /// Differences from the current configuration.
    pub changes: Vec<Difference>,
    /// The reason if the changes cannot be applied at runtime.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub refused: Option<String>,
    /// Human-readable warnings about the changes.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub warnings: Vec<String>,
    /// Differences between the new configuration and its file. `unsaved` and `restored` are only
    /// set if they were not set before the change.
    #[serde(flatten)]
    pub written: Written,
}

/// A backend that is larger than its configured size.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DriftView {
    /// Path of the size in the configuration.
    pub path: String,
    /// Configured size in bytes.
    pub configured: u64,
    /// Current size in bytes.
    pub served: u64,
}

/// A previous configuration.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct HistoryView {
    /// Number of changes since this configuration; 0 for the current configuration.
    pub back: usize,
    /// Time when it was applied, in seconds since 1970.
    pub time: u64,
    /// User and process that requested it.
    pub who: String,
    /// Type of request: `start`, `upgrade`, `apply`, `reload`, `rollback 1`.
    pub how: String,
    /// Differences from the previous configuration, if it is available.
    #[serde(default)]
    pub changes: Vec<Difference>,
}

/// Verification of all blocks on a backend.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ScrubView {
    /// Name of the backend.
    pub backend: String,
    /// `running`, `completed`, `stopped`, `removed` or `failed`.
    pub state: String,
    /// Human-readable error if the state is `failed`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
    /// Start time in seconds since 1970.
    pub started: u64,
    /// End time in seconds since 1970; not set while it is running.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ended: Option<u64>,
    /// End time of the last completed scrub, in seconds since 1970.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub completed: Option<u64>,
    /// Maximum number of bytes read in a second; not set if it is not limited.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rate: Option<u64>,
    /// Number of blocks on the backend.
    pub blocks: u64,
    /// Number of blocks that were verified.
    pub checked: u64,
    /// Number of defective blocks by defect: `guard`, `application_tag`, `reference_tag` or
    /// `unreadable`.
    pub defects: BTreeMap<String, u64>,
    /// The first defective blocks.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub listed: Vec<DefectView>,
}

/// A defective block.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DefectView {
    /// Address of the block.
    pub lba: u64,
    /// Same as in [`ScrubView::defects`].
    pub defect: String,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn connections_of_session_count_once() {
        let connection = |nexus| SessionView {
            nexus,
            ..SessionView::default()
        };
        let connections = [Some(1), Some(2), Some(1), None].map(connection);
        assert_eq!(count_nexuses(&connections), 2);
    }

    /// `riserd top` can be newer than the daemon until an upgrade.
    #[test]
    fn connections_without_numbers_are_counted() {
        let connection = |target: &str| SessionView {
            target: target.to_owned(),
            ..SessionView::default()
        };
        let connections = ["t", "t", ""].map(connection);
        assert_eq!(count_nexuses(&connections), 2);
    }
}
