//! Commands with their buffers, on their way to the engine and back; and the names of sessions and
//! targets.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use riser_memory::MemSlice;
use riser_scsi::lun::LunId;
use riser_scsi::srp::TaskAttr;

use super::hostname::HostName;
use super::oneshot::Sender;
use crate::block::Buffer;
use crate::paths::PathIndex;
use crate::request::{RequestId, RequestResult, Retry};
use crate::scsi::Command;
use crate::unit::FlushMark;

/// Names a session of the engine; never used again for another one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct SessionKey {
    pub(super) index: usize,
    pub(super) serial: u64,
}

/// The address of a session's target.
#[derive(Clone, Debug)]
pub(super) struct Target {
    pub(super) dst: SocketAddr,
    /// The name that [`Self::dst`] is the address of.
    pub(super) host: Option<Arc<HostName>>,
    pub(super) src: Option<SocketAddr>,
    /// InfiniBand service id, instead of the port's.
    pub(super) service_id: Option<u64>,
}

impl Target {
    /// Brings the address of a host name up to date, for the next connection.
    pub(super) fn renew(&mut self) {
        if let Some(dst) = self.host.as_ref().and_then(HostName::renew) {
            self.dst = dst;
        }
    }
}

/// The memory of a command's data. Its length must be that of the command's data.
#[derive(Debug, Default)]
pub enum IoData {
    /// The command has no data.
    #[default]
    None,
    /// One buffer for all data.
    One(Buffer),
    /// Several buffers, in order.
    Many(Vec<Buffer>),
}

impl IoData {
    /// Length of the data, in bytes.
    #[must_use]
    pub fn len(&self) -> usize {
        self.buffers().iter().map(Buffer::len).sum()
    }

    /// Returns whether there is no byte.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Buffers in the order of the data.
    #[must_use]
    pub fn buffers(&self) -> &[Buffer] {
        match self {
            Self::None => &[],
            Self::One(buffer) => std::slice::from_ref(buffer),
            Self::Many(buffers) => buffers,
        }
    }

    /// The only buffer, if that is what it is.
    #[must_use]
    pub fn into_one(self) -> Option<Buffer> {
        match self {
            Self::One(buffer) => Some(buffer),
            _ => None,
        }
    }

    /// Collects the ranges that are not empty.
    pub(super) fn slices(&self, out: &mut Vec<MemSlice>) {
        out.clear();
        let full = self.buffers().iter().map(Buffer::slice);
        out.extend(full.filter(|s| !s.is_empty()).cloned());
    }
}

/// A command for a logical unit, with its memory.
#[derive(Debug)]
pub struct ScsiIo {
    /// Logical unit of the command.
    pub lun: LunId,
    /// SCSI command to carry out.
    pub command: Command,
    /// Task attribute of the command.
    pub attr: TaskAttr,
    /// Memory of the data.
    pub data: IoData,
    /// Longest duration, retries and reconnections included.
    pub timeout: Duration,
    /// Repetition on the target's wish.
    pub retry: Retry,
}

impl ScsiIo {
    /// A simple task that is repeated when the target is busy or not ready.
    #[must_use]
    pub fn new(lun: LunId, command: Command, data: IoData, timeout: Duration) -> Self {
        Self {
            lun,
            command,
            attr: TaskAttr::Simple,
            data,
            timeout,
            retry: Retry::Standard,
        }
    }
}

/// End of a command, with its memory.
#[derive(Debug)]
pub struct IoEnd {
    /// The target's answer, or why there is none.
    pub result: RequestResult,
    /// The memory that was given with the command.
    pub data: IoData,
}

/// The receiver of a command's end.
pub(super) enum Done {
    /// A future, perhaps one that is no longer polled.
    Future(Sender<IoEnd>),
    /// A workload on the engine's thread, with its own token.
    Workload { workload: usize, token: u64 },
    /// The paths that the command came from.
    Path {
        paths: SessionKey,
        request: RequestId,
    },
    /// Paths that identify the unit.
    Check { paths: SessionKey, path: PathIndex },
    /// A session that identifies a watched unit, which has this number.
    Unit { session: SessionKey, unit: u64 },
    /// None: the answer itself shows that the target is there.
    Ping,
    /// Paths of which another one is back.
    PathPing { paths: SessionKey, path: PathIndex },
}

/// A command in the engine.
pub(super) struct Io {
    pub(super) io: ScsiIo,
    pub(super) deadline: Instant,
    pub(super) done: Done,
    /// Of a flush: the writes that were acknowledged when it was submitted, from
    /// [`WriteCache::begin_flush`](crate::unit::WriteCache::begin_flush).
    pub(super) mark: FlushMark,
    /// It was submitted again after its unit had been missing.
    pub(super) is_resubmitted: bool,
}

impl Io {
    /// A command that is submitted now.
    pub(super) fn new(io: ScsiIo, done: Done, now: Instant) -> Self {
        Self {
            deadline: now + io.timeout,
            io,
            done,
            mark: FlushMark::default(),
            is_resubmitted: false,
        }
    }
}

/// Work that runs on the engine's own thread: no wake-up and no queue between a completion and the
/// next submission. Calls must not block, and are few instructions in a good benchmark.
///
/// A workload ends when none of its commands is outstanding after a call and it waits for no time;
/// it is then dropped.
pub trait Workload: Send {
    /// Begins: submit the first commands.
    fn start(&mut self, queue: &mut WorkQueue);

    /// Handles the end of the command with that token.
    fn complete(&mut self, token: u64, end: IoEnd, queue: &mut WorkQueue);

    /// Time at which it wants to be woken; `None`: it waits for the ends of its commands only.
    fn due(&self) -> Option<Instant> {
        None
    }

    /// The time of [`Workload::due`] has come. It may have come already when the call before
    /// returned; then this is called once in a round.
    fn wake(&mut self, _queue: &mut WorkQueue) {}
}

/// Takes a workload's commands.
#[derive(Debug, Default)]
pub struct WorkQueue {
    pub(super) submitted: Vec<(u64, ScsiIo)>,
}

impl WorkQueue {
    /// Submits a command. `token` comes back with its end.
    pub fn submit(&mut self, token: u64, io: ScsiIo) {
        self.submitted.push((token, io));
    }
}
