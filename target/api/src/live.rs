//! What the status page and `riserd top` show: sums since the start, of which two give a rate.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

/// The daemon at a moment.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Live {
    /// When, in seconds since 1970. That clock may be set, so this is for people only.
    pub time: f64,
    /// How long the daemon has served, in seconds: what differs between two moments differs by
    /// this.
    pub uptime: f64,
    /// Its version.
    pub version: String,
    /// The host's name.
    #[serde(default)]
    pub host: String,
    /// What is missing that it should serve; nothing if it is ready.
    pub missing: Option<String>,
    /// The longest durations of the buckets of all histograms but the last, in seconds.
    pub bounds: Vec<f64>,
    /// Workers.
    pub workers: Vec<LiveWorker>,
    /// Where targets are served.
    #[serde(default)]
    pub portals: Vec<LivePortal>,
    /// Backends that are served, or should be.
    #[serde(default)]
    pub backends: Vec<LiveBackend>,
    /// Targets, as initiators of iSCSI come and leave.
    #[serde(default)]
    pub targets: Vec<LiveTarget>,
    /// Logical units, by target.
    pub luns: Vec<LiveLun>,
    /// Connections of initiators.
    pub sessions: Vec<LiveSession>,
    /// Packets of all devices.
    pub network: LiveNetwork,
}

/// A worker.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct LiveWorker {
    /// Its number.
    pub worker: u16,
    /// Seconds in which it had something to do.
    pub busy: f64,
    /// Seconds in all.
    pub ran: f64,
    /// Bytes of its data buffers.
    pub pool: usize,
    /// Bytes of them that are free.
    pub pool_free: usize,
}

/// A portal.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct LivePortal {
    /// `srp`, `iser` or `iscsi`.
    pub protocol: String,
    /// Its address and port.
    pub listen: String,
    /// The targets that it serves.
    pub targets: Vec<String>,
    /// Whether it is listened on.
    pub is_listening: bool,
    /// Why not, if that is known.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
}

/// A backend.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct LiveBackend {
    /// Its name in the configuration.
    pub name: String,
    /// `file`, `device`, `ram` or `null`.
    pub kind: String,
    /// Bytes that it offers; nothing if it is not open.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub size: Option<u64>,
    /// Bytes that its file has been allocated; nothing if that was not measured.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub allocated: Option<u64>,
    /// Bytes that its file system has free; likewise.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub free: Option<u64>,
    /// The percentage of the space available to it at which initiators are warned.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub threshold: Option<u8>,
    /// Whether that is reached.
    pub is_filling: bool,
    /// Operations that its medium failed, by kind.
    pub errors: BTreeMap<String, u64>,
    /// Why it is not served.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
}

/// A target.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct LiveTarget {
    /// Its name.
    pub target: String,
    /// Logins of iSCSI that were accepted.
    pub logins: u64,
    /// Those that were refused, by the answer.
    pub refused: BTreeMap<String, u64>,
    /// The last one of them.
    pub last_refused: Option<LiveRefused>,
    /// What has happened to sessions: `logout`, `partial_logout`, `digest_error`, `timeout`,
    /// `format_error`.
    pub events: BTreeMap<String, u64>,
    /// The last one that was an error.
    pub last_error: Option<LiveError>,
}

/// A login that was refused.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct LiveRefused {
    /// With what answer.
    pub answer: String,
    /// Whose.
    pub initiator: String,
    /// From where.
    pub address: String,
    /// How long ago, in seconds.
    pub ago: f64,
}

/// An error in a session.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct LiveError {
    /// What.
    pub event: String,
    /// Whose session.
    pub initiator: String,
}

/// A logical unit of a target.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct LiveLun {
    /// The target.
    pub target: String,
    /// Its number.
    pub lun: u16,
    /// Bytes.
    pub size: u64,
    /// Whether it refuses writes.
    pub read_only: bool,
    /// Commands under way.
    pub queue_depth: u64,
    /// Commands that failed, unit attentions apart.
    pub errors: u64,
    /// Commands that were answered with a unit attention.
    #[serde(default)]
    pub attentions: u64,
    /// All of these, by kind of command and by status or sense key.
    #[serde(default)]
    pub faults: BTreeMap<String, u64>,
    /// Commands, by kind; those that there were.
    pub ops: BTreeMap<String, LiveOp>,
    /// Commands, by the initiator's name, sessions that are over included.
    #[serde(default)]
    pub initiators: BTreeMap<String, LiveShare>,
    /// Resets of the unit, whichever target they came by.
    #[serde(default)]
    pub resets: u64,
    /// Tasks that an initiator asked to be aborted, likewise.
    #[serde(default)]
    pub aborts: u64,
    /// Those that were not there.
    #[serde(default)]
    pub vain_aborts: u64,
    /// Who has reserved the unit, likewise.
    #[serde(default)]
    pub reservations: LiveReservations,
}

/// Registrations and reservations of a unit.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct LiveReservations {
    /// PRGENERATION.
    pub generation: u32,
    /// TYPE of the persistent reservation, if there is one (SPC-4 table 40).
    #[serde(rename = "type", skip_serializing_if = "Option::is_none")]
    pub kind: Option<u8>,
    /// Whether all of it persists through power loss (PTPL_A).
    #[serde(default)]
    pub persists: bool,
    /// Who is registered, in the order in which they came.
    pub registrants: Vec<LiveRegistrant>,
    /// The initiator port that has the unit by RESERVE.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reserved: Option<String>,
}

/// A registration.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct LiveRegistrant {
    /// The initiator port: two halves of an identifier of SRP, or a port name of iSCSI.
    pub initiator: String,
    /// The target port, likewise.
    pub target: String,
    /// The target port's RELATIVE TARGET PORT IDENTIFIER.
    pub relative_id: u16,
    /// The reservation key, as `0x` and 16 digits.
    pub key: String,
    /// PRGENERATION before it got this key.
    pub generation: u32,
    /// Whether the persistent reservation was made by it. Of one of all registrants, every other
    /// registrant is a holder as well.
    pub has_reserved: bool,
}

/// What an initiator has done.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct LiveShare {
    /// Commands answered.
    pub commands: u64,
    /// Data to it, in bytes.
    pub read: u64,
    /// Data from it, in bytes.
    pub written: u64,
}

/// Commands of one kind.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct LiveOp {
    /// How many.
    pub commands: u64,
    /// Data both ways, in bytes.
    pub bytes: u64,
    /// Seconds that they took in all.
    pub seconds: f64,
    /// How many took how long, by bucket.
    pub buckets: Vec<u64>,
}

/// A connection of an initiator.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct LiveSession {
    /// The target's name.
    pub target: String,
    /// The initiator port.
    pub initiator: String,
    /// `srp`, `iser` or `iscsi`.
    pub protocol: String,
    /// Where the initiator is.
    pub peer: String,
    /// The worker.
    pub worker: u16,
    /// Where it is in its life.
    pub state: String,
    /// Requests under way.
    pub in_flight: usize,
    /// Commands answered to the initiator port by the target at this worker.
    pub commands: u64,
    /// Their data both ways, in bytes.
    pub bytes: u64,
    /// Data to the initiator, in bytes.
    #[serde(default)]
    pub read: u64,
    /// Data from the initiator, in bytes.
    #[serde(default)]
    pub written: u64,
    /// PDUs of iSCSI whose digest was wrong.
    #[serde(default)]
    pub digest_errors: u64,
}

/// Packets of our software NICs.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct LiveNetwork {
    /// Bytes that came.
    pub bytes_in: u64,
    /// Bytes that went.
    pub bytes_out: u64,
    /// Packets that came or went.
    pub packets: u64,
    /// Packets sent again.
    pub retransmits: u64,
}
