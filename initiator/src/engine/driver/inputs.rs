//! Inputs for sessions that are paths or have watched units; and the commands that identify a unit.

use std::time::{Duration, Instant};

use riser_block::Buffer;
use riser_scsi::lun::{LunId, WireLun};
use riser_scsi::sense::{AdditionalSense, Sense};

use crate::engine::io::{Done, Io, IoCompletion, IoData, ScsiIo, SessionKey};
use crate::paths::{PathIndex, PortTag};
use crate::request::{RequestId, RequestResult, Retry};
use crate::scsi::Command;
use crate::session::Down;

/// Timeout for a single query of a unit's check.
const CHECK: Duration = Duration::from_secs(10);

/// An event of a session that is a path or has watched units, or the completion of a command on it.
/// The key identifies the paths, or the session with the watched units.
pub(super) enum Input {
    Live(SessionKey, PathIndex, Option<PortTag>),
    /// Includes the time of the target's last message, if any.
    Closed(SessionKey, PathIndex, Down, Option<Instant>),
    Completed(SessionKey, RequestId, Box<Io>, RequestResult),
    /// A query of a path's check completed or failed.
    PathResponse(SessionKey, PathIndex, IoCompletion),
    /// A ping on a path, sent because another path recovered, completed.
    Pinged(SessionKey, PathIndex),
    /// A unit attention, and whether it reports a reset of ours.
    Attention(SessionKey, PathIndex, AdditionalSense, bool),
    /// A deferred error of the unit.
    Deferred(SessionKey, WireLun, Sense),
    /// Check the watched units of a session.
    Check(SessionKey),
    /// A query for the watched unit with this serial number completed or failed.
    UnitResponse(SessionKey, u64, IoCompletion),
}

/// Creates a command for checking a unit's identity.
pub(super) fn probe(lun: LunId, command: Command, buffer: Buffer, done: Done, now: Instant) -> Io {
    let mut io = ScsiIo::new(lun, command, IoData::One(buffer), CHECK);
    io.retry = Retry::Probe;
    Io::new(io, done, now)
}

/// Returns the memory of a probe and the unit's response, which is empty if the unit rejected it.
pub(super) fn probe_response(completion: IoCompletion) -> (Option<Buffer>, Vec<u8>) {
    let mut data = Vec::new();
    let buffer = completion.data.into_one();
    if let (Some(buffer), Ok(response)) = (&buffer, &completion.result)
        && response.is_success()
    {
        data.resize((response.transferred as usize).min(buffer.len()), 0);
        buffer.slice().read(0, &mut data);
    }
    (buffer, data)
}
