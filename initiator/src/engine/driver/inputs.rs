//! Inputs of sessions that are paths, and of sessions whose units are watched; and the commands
//! that identify a unit.

use std::time::{Duration, Instant};

use riser_scsi::lun::{LunId, WireLun};
use riser_scsi::sense::{AdditionalSense, Sense};

use crate::block::Buffer;
use crate::engine::io::{Done, Io, IoData, IoEnd, ScsiIo, SessionKey};
use crate::paths::{PathIndex, PortTag};
use crate::request::{RequestId, RequestResult, Retry};
use crate::scsi::Command;
use crate::session::Down;

/// Longest duration of one question of a unit's check.
const CHECK: Duration = Duration::from_secs(10);

/// An event of a session that is a path or whose unit is watched, or the end of a command on it.
/// The key is that of the paths, or of the session with the watched unit.
pub(super) enum Input {
    Live(SessionKey, PathIndex, Option<PortTag>),
    /// With the time of the target's last message, if there was one.
    Closed(SessionKey, PathIndex, Down, Option<Instant>),
    Ended(SessionKey, RequestId, Box<Io>, RequestResult),
    /// The unit has answered a question of a path's check, or not.
    PathAnswered(SessionKey, PathIndex, IoEnd),
    /// A ping on a path, sent because another path is back, has ended.
    Pinged(SessionKey, PathIndex),
    /// A unit attention, and whether it is the report of a reset of ours.
    Attention(SessionKey, PathIndex, AdditionalSense, bool),
    /// A deferred error of the unit.
    Deferred(SessionKey, WireLun, Sense),
    /// The watched units of a session are to be checked.
    Check(SessionKey),
    /// A watched unit, named by its serial number, has answered, or not.
    UnitAnswered(SessionKey, u64, IoEnd),
}

/// A command of the check of a unit's identity.
pub(super) fn probe(lun: LunId, command: Command, buffer: Buffer, done: Done, now: Instant) -> Io {
    let mut io = ScsiIo::new(lun, command, IoData::One(buffer), CHECK);
    io.retry = Retry::Probe;
    Io::new(io, done, now)
}

/// The memory of a probe, and the unit's answer, which is empty where it refused.
pub(super) fn answer_to_probe(end: IoEnd) -> (Option<Buffer>, Vec<u8>) {
    let mut data = Vec::new();
    let buffer = end.data.into_one();
    if let (Some(buffer), Ok(answer)) = (&buffer, &end.result)
        && answer.is_success()
    {
        data.resize((answer.transferred as usize).min(buffer.len()), 0);
        buffer.slice().read(0, &mut data);
    }
    (buffer, data)
}
