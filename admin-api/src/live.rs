//! Data for the status page and `riserd top`. All values are totals since the start, so rates can
//! be computed from two samples.

use std::collections::BTreeMap;
use std::ops::AddAssign;

use serde::{Deserialize, Serialize};

use crate::view::{LunView, PortalView, ProblemView, SessionView, WorkerView};

/// The daemon at a point in time.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Live {
    /// Seconds since 1970. This clock can be adjusted, so it should only be used for display.
    pub time: f64,
    /// Uptime of the daemon in seconds. Use this to compute rates.
    pub uptime: f64,
    /// Version of the daemon.
    pub version: String,
    /// Host name.
    #[serde(default)]
    pub host: String,
    /// Problems with configured objects. Not set if the daemon is ready.
    pub missing: Option<String>,
    /// Backends and portals that are not available, and backends that need attention.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub problems: Vec<ProblemView>,
    /// Same as in [`Written`](crate::view::Written).
    #[serde(default)]
    pub unsaved: bool,
    /// Same as in [`Written`](crate::view::Written).
    #[serde(default)]
    pub restored: bool,
    /// Upper bounds of all histogram buckets except the last one, in seconds.
    pub bounds: Vec<f64>,
    /// Workers that responded within a second.
    pub workers: Vec<WorkerView>,
    /// Portals of all targets.
    #[serde(default)]
    pub portals: Vec<LivePortal>,
    /// Backends, including backends that are not available.
    #[serde(default)]
    pub backends: Vec<LiveBackend>,
    /// Login counters for iSCSI targets.
    #[serde(default)]
    pub targets: Vec<LiveTarget>,
    /// Logical units by target.
    pub luns: Vec<LiveLun>,
    /// Connections from initiators, for workers that responded.
    pub sessions: Vec<SessionView>,
    /// Packet counters for all devices.
    pub network: LiveNetwork,
}

/// The address of a portal.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct LivePortal {
    /// The portal without names, which depend on the target.
    #[serde(flatten)]
    pub portal: PortalView,
    /// Targets available at this address.
    pub targets: Vec<String>,
    /// True if the daemon is listening.
    pub is_listening: bool,
    /// The error of its problem, if any.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
}

/// State of a backend.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct LiveBackend {
    /// Name in the configuration.
    pub name: String,
    /// `file`, `device`, `ram` or `null`.
    pub kind: String,
    /// Size in bytes; not set if the backend is not open.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub size: Option<u64>,
    /// Bytes allocated for the file; not set if unknown.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub allocated: Option<u64>,
    /// Free bytes on the file system; not set if unknown.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub free: Option<u64>,
    /// Space usage in percent above which initiators are warned.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub threshold: Option<u8>,
    /// True if this threshold was reached.
    pub is_filling: bool,
    /// Failed operations by error kind, including kinds without failures.
    pub errors: BTreeMap<String, u64>,
    /// The error if the backend is not available or needs attention.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
    /// State for this error: `NOT SERVED`, `HANGING`, `FAILING` or `REPLACED`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub state: Option<String>,
    /// All causes of an open backend that needs attention; see [`ProblemView::cause`].
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub causes: Vec<String>,
}

/// Login and logout counters of a target.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct LiveTarget {
    /// Name in the configuration.
    pub target: String,
    /// Successful iSCSI logins.
    pub logins: u64,
    /// Rejected logins by response status.
    pub refused: BTreeMap<String, u64>,
    /// The last rejected login.
    pub last_refused: Option<LiveRefused>,
    /// Session events with their counts: `logout`, `partial_logout`, `digest_error`, `timeout`,
    /// `format_error`.
    pub events: BTreeMap<String, u64>,
    /// The last event that was an error.
    pub last_error: Option<LiveError>,
}

/// A rejected login.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct LiveRefused {
    /// Login response status, using the name from the metrics.
    pub answer: String,
    /// Initiator name.
    pub initiator: String,
    /// Source address.
    pub address: String,
    /// Seconds since this event.
    pub ago: f64,
}

/// A session error.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct LiveError {
    /// Event name, as in `events`.
    pub event: String,
    /// Initiator port.
    pub initiator: String,
}

/// A logical unit of a target.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct LiveLun {
    /// Target name in the configuration.
    pub target: String,
    /// Logical unit number.
    pub lun: u16,
    /// Properties of the unit.
    #[serde(flatten)]
    pub unit: LunView,
    /// State of the unit's problem, if any.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub state: Option<String>,
    /// Commands in flight.
    pub queue_depth: u64,
    /// Failed commands, not including unit attentions and flow control.
    pub errors: u64,
    /// Commands rejected by flow control, with TASK SET FULL or BUSY.
    pub throttled: u64,
    /// Commands completed with a unit attention.
    pub attentions: u64,
    /// All of these, by command type and by status or sense key.
    pub faults: BTreeMap<String, u64>,
    /// Commands by type, if there were any.
    pub ops: BTreeMap<String, LiveOp>,
    /// Commands by initiator name, including closed sessions.
    pub initiators: BTreeMap<String, LiveShare>,
    /// Unit resets, received via any target.
    pub resets: u64,
    /// Task aborts requested by initiators, received via any target.
    pub aborts: u64,
    /// Task aborts for tasks that did not exist.
    pub vain_aborts: u64,
    /// Reservations of the unit, received via any target.
    pub reservations: LiveReservations,
}

impl LiveLun {
    /// Returns the totals for all command types. The type determines the direction of the data.
    #[must_use]
    pub fn total(&self) -> LiveShare {
        let mut sum = LiveShare::default();
        for (kind, op) in &self.ops {
            sum.commands += op.commands;
            match kind.as_str() {
                "write" | "unmap" | "compare" => sum.written += op.bytes,
                _ => sum.read += op.bytes,
            }
        }
        sum
    }
}

/// Registrations and reservations of a unit.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct LiveReservations {
    /// PRGENERATION, which is incremented on registration changes.
    pub generation: u32,
    /// TYPE of the persistent reservation, if any (SPC-4 table 40).
    #[serde(rename = "type", skip_serializing_if = "Option::is_none")]
    pub kind: Option<u8>,
    /// True if reservations persist through power loss (PTPL_A).
    #[serde(default)]
    pub persists: bool,
    /// Registered initiators in the order of registration.
    pub registrants: Vec<LiveRegistrant>,
    /// The initiator port that holds a reservation via RESERVE.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reserved: Option<String>,
}

/// Registration of an I_T nexus for persistent reservations.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct LiveRegistrant {
    /// Initiator port: the two halves of an SRP identifier, or an iSCSI port name.
    pub initiator: String,
    /// Target port, in the same format.
    pub target: String,
    /// RELATIVE TARGET PORT IDENTIFIER of the target port.
    pub relative_id: u16,
    /// Reservation key, as `0x` followed by 16 digits.
    pub key: String,
    /// PRGENERATION before this key was registered.
    pub generation: u32,
    /// True if this registrant made the persistent reservation. With an all-registrants
    /// reservation, all other registrants are holders as well.
    pub has_reserved: bool,
}

/// Totals for an initiator on a unit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct LiveShare {
    /// Completed commands with any status.
    pub commands: u64,
    /// Bytes sent to the initiator.
    pub read: u64,
    /// Bytes received from the initiator.
    pub written: u64,
}

impl AddAssign for LiveShare {
    fn add_assign(&mut self, other: Self) {
        self.commands += other.commands;
        self.read += other.read;
        self.written += other.written;
    }
}

/// Counters for a command type.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct LiveOp {
    /// Completed commands.
    pub commands: u64,
    /// Bytes in both directions.
    pub bytes: u64,
    /// Total time in seconds.
    pub seconds: f64,
    /// Number of commands per latency bucket.
    pub buckets: Vec<u64>,
}

/// Packet counters of our software NICs.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct LiveNetwork {
    /// Bytes received from initiators.
    pub bytes_in: u64,
    /// Bytes sent to initiators.
    pub bytes_out: u64,
    /// Packets sent or received.
    pub packets: u64,
    /// Retransmitted packets.
    pub retransmits: u64,
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A daemon of an earlier version does not send all fields.
    #[test]
    fn objects_stay_flat_and_compatible() {
        let earlier = r#"{
            "time": 1.0, "uptime": 1.0, "version": "0.1.0", "missing": null, "bounds": [],
            "workers": [{ "worker": 0, "busy": 0.5, "ran": 1.0, "pool": 4096, "pool_free": 0 }],
            "portals": [{
                "protocol": "srp", "listen": "192.0.2.1:5555", "targets": ["t"],
                "is_listening": true
            }],
            "luns": [{
                "target": "t", "lun": 7, "backend": "d", "size": 512, "read_only": true,
                "queue_depth": 1, "errors": 0, "ops": {}
            }],
            "sessions": [{
                "target": "t", "initiator": "i", "protocol": "srp", "peer": "192.0.2.2:1",
                "worker": 0, "state": "live", "in_flight": 1, "commands": 5, "bytes": 512
            }],
            "network": { "bytes_in": 0, "bytes_out": 0, "packets": 0, "retransmits": 0 }
        }"#;
        let live: Live = serde_json::from_str(earlier).unwrap();
        assert_eq!(live.luns[0].unit.size, Some(512));
        assert_eq!(live.portals[0].portal.listen, "192.0.2.1:5555");
        let json = serde_json::to_value(&live).unwrap();
        let earlier: serde_json::Value = serde_json::from_str(earlier).unwrap();
        for list in ["workers", "portals", "luns", "sessions"] {
            for (field, value) in earlier[list][0].as_object().unwrap() {
                assert_eq!(json[list][0][field], *value, "{list} {field}");
            }
        }
        assert_eq!(serde_json::from_value::<Live>(json).unwrap(), live);
    }
}
