//! The data of the status page and of `riserd top`: sums since the start, of which two give a
//! rate.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

/// The daemon at a moment.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Live {
    /// Seconds since 1970. That clock may be set, so this is for people only.
    pub time: f64,
    /// Seconds for which the daemon has served: what differs between two moments differs by this.
    pub uptime: f64,
    /// Version of the daemon's program.
    pub version: String,
    /// Name of the daemon's host.
    #[serde(default)]
    pub host: String,
    /// Problems with what it should serve; absent if it is ready.
    pub missing: Option<String>,
    /// The longest durations of the buckets of all histograms but the last, in seconds.
    pub bounds: Vec<f64>,
    /// Workers that have answered within a second.
    pub workers: Vec<LiveWorker>,
    /// Portals of all targets.
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
    /// Connections of initiators, of workers that have answered.
    pub sessions: Vec<LiveSession>,
    /// Packets of all devices.
    pub network: LiveNetwork,
}

/// Use of one worker thread since the start.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct LiveWorker {
    /// Number of the worker, from 0.
    pub worker: u16,
    /// Seconds in which it had something to do.
    pub busy: f64,
    /// Seconds since the worker's start.
    pub ran: f64,
    /// Bytes of its data buffers.
    pub pool: usize,
    /// Bytes of them that are free.
    pub pool_free: usize,
}

/// One address at which a protocol is served.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct LivePortal {
    /// `srp`, `iser` or `iscsi`.
    pub protocol: String,
    /// Its address and port.
    pub listen: String,
    /// The targets that it serves.
    pub targets: Vec<String>,
    /// True if it is listened on.
    pub is_listening: bool,
    /// Reason why it is not listened on, if that is known.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
}

/// State of one backend, served or not.
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
    /// True if that is reached.
    pub is_filling: bool,
    /// Operations that its medium failed, by kind.
    pub errors: BTreeMap<String, u64>,
    /// Reason why it is not served.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
}

/// Logins at one target and their ends.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct LiveTarget {
    /// Name in the configuration.
    pub target: String,
    /// Logins of iSCSI that were accepted.
    pub logins: u64,
    /// Those that were refused, by the answer.
    pub refused: BTreeMap<String, u64>,
    /// The last one of them.
    pub last_refused: Option<LiveRefused>,
    /// Events of sessions and their numbers: `logout`, `partial_logout`, `digest_error`,
    /// `timeout`, `format_error`.
    pub events: BTreeMap<String, u64>,
    /// The last one that was an error.
    pub last_error: Option<LiveError>,
}

/// A login that was refused.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct LiveRefused {
    /// Status of the login response, by the name that the metrics use.
    pub answer: String,
    /// Name of the initiator that tried to log in.
    pub initiator: String,
    /// Address from which it came.
    pub address: String,
    /// Seconds that have passed since.
    pub ago: f64,
}

/// An error in a session.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct LiveError {
    /// Name of the event, as in `events`.
    pub event: String,
    /// Initiator port of the session.
    pub initiator: String,
}

/// A logical unit of a target.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct LiveLun {
    /// Target's name in the configuration.
    pub target: String,
    /// Logical unit number in the target.
    pub lun: u16,
    /// Size of the unit in bytes.
    pub size: u64,
    /// True if it refuses writes.
    pub read_only: bool,
    /// Commands that have begun and not ended.
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
    /// Reservations of the unit, likewise.
    #[serde(default)]
    pub reservations: LiveReservations,
}

/// Registrations and reservations of a unit.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct LiveReservations {
    /// PRGENERATION, which counts changes of registrations.
    pub generation: u32,
    /// TYPE of the persistent reservation, if there is one (SPC-4 table 40).
    #[serde(rename = "type", skip_serializing_if = "Option::is_none")]
    pub kind: Option<u8>,
    /// True if all of it persists through power loss (PTPL_A).
    #[serde(default)]
    pub persists: bool,
    /// Registered initiators, in the order in which they came.
    pub registrants: Vec<LiveRegistrant>,
    /// The initiator port that has the unit by RESERVE.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reserved: Option<String>,
}

/// Registration of an I_T nexus for persistent reservations.
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
    /// True if the persistent reservation was made by it. Of one of all registrants, every other
    /// registrant is a holder as well.
    pub has_reserved: bool,
}

/// Totals of one initiator at a unit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct LiveShare {
    /// Commands answered, with GOOD status or another.
    pub commands: u64,
    /// Data to it, in bytes.
    pub read: u64,
    /// Data from it, in bytes.
    pub written: u64,
}

/// Commands of one kind.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct LiveOp {
    /// Commands of this kind that were answered.
    pub commands: u64,
    /// Data both ways, in bytes.
    pub bytes: u64,
    /// Seconds that they took in all.
    pub seconds: f64,
    /// Number of commands in each bucket of durations.
    pub buckets: Vec<u64>,
}

/// A connection of an initiator.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct LiveSession {
    /// Target's name in the configuration.
    pub target: String,
    /// The initiator port, as its protocol names it.
    pub initiator: String,
    /// `srp`, `iser` or `iscsi`.
    pub protocol: String,
    /// Address of the initiator.
    pub peer: String,
    /// Number of the worker that serves the connection.
    pub worker: u16,
    /// State of the connection, for people.
    pub state: String,
    /// Requests of the initiator under way.
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
    /// Bytes received from the initiator.
    pub bytes_in: u64,
    /// Bytes sent to the initiator.
    pub bytes_out: u64,
    /// Packets that came or went.
    pub packets: u64,
    /// Packets that were sent more than once.
    pub retransmits: u64,
}
