//! Commands with their buffers between users and the engine, and identifiers of sessions and
//! targets.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use riser_block::Buffer;
use riser_block::oneshot::Sender;
use riser_memory::MemSlice;
use riser_scsi::lun::LunId;
use riser_scsi::srp::TaskAttr;

use super::hostname::HostName;
use crate::paths::PathIndex;
use crate::protection::ProtectedData;
use crate::request::{RequestId, RequestResult, Retry};
use crate::scsi::Command;
use crate::unit::FlushMark;

/// Identifies a session of the engine; never reused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct SessionKey {
    pub(super) index: usize,
    pub(super) serial: u64,
}

/// Address of a session's target.
#[derive(Clone, Debug)]
pub(super) struct Target {
    pub(super) dst: SocketAddr,
    /// Host name for [`Self::dst`].
    pub(super) host: Option<Arc<HostName>>,
    pub(super) src: Option<SocketAddr>,
    /// InfiniBand service ID, overriding the port's.
    pub(super) service_id: Option<u64>,
}

impl Target {
    /// Updates the address of a host name for the next connection.
    pub(super) fn renew(&mut self) {
        if let Some(dst) = self.host.as_ref().and_then(HostName::renew) {
            self.dst = dst;
        }
    }
}

/// Memory for the data of a command. Its length must equal the data length of the command.
#[derive(Debug, Default)]
pub enum IoData {
    /// The command transfers no data.
    #[default]
    None,
    /// A single buffer for all data.
    One(Buffer),
    /// Several buffers in order.
    Many(Vec<Buffer>),
    /// Blocks of a protected unit with their tuples.
    Protected(Box<ProtectedData>),
}

impl IoData {
    /// Returns the length of the data in bytes.
    #[must_use]
    pub fn len(&self) -> usize {
        self.buffers().iter().map(Buffer::len).sum()
    }

    /// Returns whether the length is 0.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns the buffers in the order of the data.
    #[must_use]
    pub fn buffers(&self) -> &[Buffer] {
        match self {
            Self::None => &[],
            Self::One(buffer) => std::slice::from_ref(buffer),
            Self::Many(buffers) => buffers,
            Self::Protected(data) => std::slice::from_ref(data.interleaved()),
        }
    }

    /// Returns the buffer if there is exactly one.
    #[must_use]
    pub fn into_one(self) -> Option<Buffer> {
        match self {
            Self::One(buffer) => Some(buffer),
            _ => None,
        }
    }

    /// Collects the non-empty ranges.
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
    /// SCSI command to execute.
    pub command: Command,
    /// Task attribute of the command.
    pub attr: TaskAttr,
    /// Memory of the data.
    pub data: IoData,
    /// Timeout, including retries and reconnections.
    pub timeout: Duration,
    /// Retries for statuses that request them.
    pub retry: Retry,
}

impl ScsiIo {
    /// Creates a simple task that is retried if the target is busy or not ready.
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

/// Completion of a command, with its memory.
#[derive(Debug)]
pub struct IoCompletion {
    /// Response of the target, or the error.
    pub result: RequestResult,
    /// Memory passed with the command.
    pub data: IoData,
}

/// Receiver of a command's completion.
pub(super) enum Done {
    /// A future, which may no longer be polled.
    Future(Sender<IoCompletion>),
    /// A workload on the engine's thread, with its token.
    Workload { workload: usize, token: u64 },
    /// The paths that submitted the command.
    Path {
        paths: SessionKey,
        request: RequestId,
    },
    /// Paths that identify the unit.
    Check { paths: SessionKey, path: PathIndex },
    /// A session that identifies the watched unit with this number.
    Unit { session: SessionKey, unit: u64 },
    /// No receiver: the response only shows that the target is alive.
    Ping,
    /// Paths that check whether another path has recovered.
    PathPing { paths: SessionKey, path: PathIndex },
}

/// A command in the engine.
pub(super) struct Io {
    pub(super) io: ScsiIo,
    pub(super) deadline: Instant,
    pub(super) done: Done,
    /// For a flush: the writes acknowledged when it was submitted, from
    /// [`WriteCache::begin_flush`](crate::unit::WriteCache::begin_flush).
    pub(super) mark: FlushMark,
    /// Submitted again after its unit was missing.
    pub(super) is_resubmitted: bool,
}

impl Io {
    /// Creates a command submitted at `now`.
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

/// Work that runs on the engine's thread, without a wake-up or a queue between a completion and the
/// next submission. Calls must not block, and should be short for good benchmark results.
///
/// A workload completes when, after a call, it has no outstanding commands and no wake-up time. It
/// is then dropped.
pub trait Workload: Send {
    /// Starts the workload by submitting its first commands.
    fn start(&mut self, queue: &mut WorkQueue);

    /// Handles the completion of the command with this token.
    fn complete(&mut self, token: u64, end: IoCompletion, queue: &mut WorkQueue);

    /// Returns the wake-up time. `None` means that it only waits for completions of its commands.
    fn due(&self) -> Option<Instant> {
        None
    }

    /// Called when the time returned by [`Workload::due`] is reached. If it was already in the past
    /// when returned, this is called once per round.
    fn wake(&mut self, _queue: &mut WorkQueue) {}
}

/// Queue for the commands of a workload.
#[derive(Debug)]
pub struct WorkQueue {
    pub(super) submitted: Vec<(u64, ScsiIo)>,
    pub(super) now: Instant,
}

impl WorkQueue {
    /// Returns the time of this call.
    #[must_use]
    pub fn now(&self) -> Instant {
        self.now
    }

    /// Submits a command. Its completion is reported with `token`.
    pub fn submit(&mut self, token: u64, io: ScsiIo) {
        self.submitted.push((token, io));
    }
}
