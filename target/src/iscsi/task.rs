//! The contexts of a channel: one per command or function under way.

use std::time::Instant;

use riser_scsi::iscsi::Itt;
use riser_scsi::lun::WireLun;
use riser_scsi::step::{Response, TransferError};
use riser_state::State;

use super::datamover::Start;
use crate::fabric::task_mgmt::{Function, PendingFunction};
use crate::fabric::{Execution, Pace, Spare, Wait};

/// State of a context.
///
/// ```text
///  Idle → New → AwaitLimit → AwaitBuffer → Receive → AwaitTask → AwaitBuffer → Block
///    │           (each only where it is needed)                    │ ↑  │ (once per operation)
///    │                                                             │ └──┴→ Receive, Send (pieces)
///    │                                                             v
///    │                                        AwaitUnsolicited ──→ Sent → Idle
///    ├──→ Mgmt ─────────────────────────────────────────→ Sent
///    └──→ Expected ──→ AwaitBuffer, Receive, Send, Sent: where the other connection has left it
/// ```
///
/// A command may be answered early in every state (it is refused, or another nexus ends it: TASK
/// ABORTED), and ends without an answer where its own nexus or the end of the connection takes it.
/// A state that follows itself is the next block operation, or another wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TaskState {
    /// No request has the context.
    Idle,
    /// Taken in, being looked at.
    New,
    /// Waits for the limits of its unit or initiator.
    AwaitLimit,
    /// Waits in the unit's task set for older tasks.
    AwaitTask,
    /// Waits for a data buffer of the pool.
    AwaitBuffer,
    /// Data of the initiator are on their way.
    Receive,
    /// A piece of the data is on its way to the initiator, and more will follow.
    Send,
    /// A block operation runs.
    Block,
    /// The answer is known, and waits for the end of unsolicited data that are not wanted.
    AwaitUnsolicited,
    /// A task management function runs.
    Mgmt,
    /// The answer was handed to the datamover.
    Sent,
    /// A command that another connection had under way, which is to hand it over.
    Expected,
}

impl State for TaskState {
    fn may_become(&self, next: &Self) -> bool {
        // What every command that is not answered yet may come to. The answer waits for the end of
        // unsolicited data.
        let is_end = matches!(next, Self::AwaitUnsolicited | Self::Sent | Self::Idle);
        match self {
            Self::Idle => matches!(next, Self::New | Self::Mgmt | Self::Expected),
            // It is looked at in one go, so nothing ends it before it is answered or waits.
            Self::New => matches!(
                next,
                Self::AwaitLimit
                    | Self::AwaitTask
                    | Self::AwaitBuffer
                    | Self::Receive
                    | Self::Block
                    | Self::AwaitUnsolicited
                    | Self::Sent
            ),
            Self::AwaitLimit => {
                is_end || matches!(next, Self::AwaitTask | Self::AwaitBuffer | Self::Receive)
            }
            // Data come before the order, but for a command that could take none when it came: the
            // unit has grown since.
            Self::AwaitTask => {
                is_end || matches!(next, Self::AwaitBuffer | Self::Receive | Self::Block)
            }
            // A piece to send waits for memory only on the connection that takes the command over.
            Self::AwaitBuffer => {
                let goes_on = matches!(
                    next,
                    Self::AwaitBuffer | Self::Receive | Self::Send | Self::Block
                );
                is_end || goes_on
            }
            Self::Receive => is_end || matches!(next, Self::AwaitTask | Self::Block),
            Self::Send => is_end || matches!(next, Self::Block),
            // Parameter data that an operation has found may lack a buffer.
            Self::Block => {
                let goes_on = matches!(
                    next,
                    Self::AwaitBuffer | Self::Receive | Self::Send | Self::Block
                );
                is_end || goes_on
            }
            Self::AwaitUnsolicited => is_end || matches!(next, Self::AwaitBuffer),
            Self::Mgmt => matches!(next, Self::Sent | Self::Idle),
            Self::Sent => matches!(next, Self::Idle),
            // What was open at the other connection is lost with it.
            Self::Expected => matches!(
                next,
                Self::AwaitBuffer | Self::Receive | Self::Send | Self::Sent | Self::Idle
            ),
        }
    }
}

/// Data that come from the initiator.
#[derive(Debug, Default)]
pub(super) struct Incoming {
    /// Bytes of immediate and unsolicited data so far.
    pub(super) got: u32,
    /// More unsolicited data follow.
    pub(super) open: bool,
    /// Bytes of unsolicited data not received yet; those that arrive damaged or out of order count
    /// as received.
    pub(super) announced: u32,
    /// DataSN that comes next.
    pub(super) next_sn: u32,
    /// The first thing that was wrong with them.
    pub(super) fault: Option<TransferError>,
    /// Some of them were lost, and those that follow are ignored.
    pub(super) lost: bool,
    /// Data that came before there was a buffer, or are for a later piece; at most
    /// FirstBurstLength, or a piece that comes from another connection.
    pub(super) staged: Vec<u8>,
    /// These are a piece to send, from another connection.
    pub(super) is_moved: bool,
    /// Offset of the piece that the command wants, and of its buffer.
    pub(super) from: u32,
    /// Offset of the end of that piece, once it is known.
    pub(super) wanted: Option<u32>,
    /// The datamover has been asked for the rest.
    pub(super) solicited: bool,
}

/// A piece of a command's data that is on its way to the initiator.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Piece {
    /// Offset in the data.
    pub(super) from: u32,
    /// Length of the piece in bytes.
    pub(super) len: u32,
    /// Number of the Data-In PDU after it.
    pub(super) next_sn: u32,
}

/// One command or function under way, and everything that it holds.
#[derive(Debug)]
pub(super) struct Task {
    pub(super) state: TaskState,
    pub(super) itt: Itt,
    /// It takes a place of the command window.
    pub(super) counted: bool,
    /// It took one, and is answered.
    pub(super) lingers: bool,
    /// It took one on another connection, which it is to come from.
    pub(super) expected: bool,
    pub(super) lun: WireLun,
    pub(super) exec: Execution,
    pub(super) incoming: Incoming,
    /// Since when it waits for the initiator, in [`TaskState::Receive`], [`TaskState::Send`],
    /// [`TaskState::AwaitUnsolicited`], and in [`TaskState::Sent`] where it is a command.
    pub(super) wait: Wait,
    /// Time at which the last request for data of a command in this context was sent.
    pub(super) asked: Instant,
    /// Milliseconds that its waits for earlier pieces count, while others may have waited for it.
    pub(super) waited: u32,
    /// The answer, while it waits for unsolicited data, and once it is sent.
    pub(super) response: Option<Response>,
    /// First of its data that the initiator does not have.
    pub(super) data_start: Start,
    /// The piece that is being sent, in [`TaskState::Send`].
    pub(super) piece: Piece,
    /// The initiator lacks some of that piece, which cannot be sent once more.
    pub(super) is_lacking: bool,
    /// R2T PDUs that it had.
    pub(super) r2ts: u32,
    pub(super) mgmt: Option<PendingFunction<Function>>,
}

/// Contexts of one worker that no request has.
#[derive(Debug, Default)]
pub struct SpareTasks(pub(super) Spare<Task>);

impl SpareTasks {
    /// Returns the memory of the contexts in bytes.
    #[must_use]
    pub fn memory(&self) -> usize {
        self.0.memory()
    }
}

impl Task {
    pub(super) fn new(wait: Wait) -> Self {
        Self {
            wait,
            asked: wait.since,
            waited: 0,
            state: TaskState::Idle,
            itt: Itt::NONE,
            counted: false,
            lingers: false,
            expected: false,
            lun: [0; 8],
            exec: Execution::new(),
            incoming: Incoming::default(),
            response: None,
            data_start: Start::default(),
            piece: Piece::default(),
            is_lacking: false,
            r2ts: 0,
            mgmt: None,
        }
    }

    /// Releases what is left of a command that has ended, or that another connection carries on.
    pub(super) fn clear(&mut self) {
        self.lun = [0; 8];
        self.incoming = Incoming::default();
        self.response = None;
        self.mgmt = None;
        self.r2ts = 0;
        self.waited = 0;
        self.data_start = Start::default();
        self.piece = Piece::default();
        self.is_lacking = false;
    }

    /// Milliseconds that its waits for pieces count by now, while others may have waited for it.
    pub(super) fn waited_by(&self, now: Instant, pace: &Pace) -> u32 {
        let is_waiting = matches!(self.state, TaskState::Receive | TaskState::Send);
        if !is_waiting || self.exec.is_gathering() {
            return self.waited;
        }
        let waited = pace.waited(self.wait, now);
        let millis = u32::try_from(waited.as_millis()).unwrap_or(u32::MAX);
        self.waited.saturating_add(millis)
    }

    /// The piece that was sent is over: the initiator's data begin behind it.
    pub(super) fn pass_piece(&mut self) {
        self.data_start = Start {
            data_sn: self.piece.next_sn,
            offset: self.piece.from + self.piece.len,
        };
    }

    /// Whether it waits for the initiator to send data, or to take them. One that was aborted, and
    /// which a socket or a device still has, counts: others may wait for its end. So does one that
    /// is answered, which keeps its buffer.
    pub(super) fn waits_for_initiator(&self) -> bool {
        match self.state {
            TaskState::Receive | TaskState::Send | TaskState::AwaitUnsolicited => true,
            TaskState::Sent => self.response.is_some(),
            _ => false,
        }
    }

    /// Whether it is a command that has not been answered.
    pub(super) fn is_command(&self) -> bool {
        !matches!(
            self.state,
            TaskState::Idle | TaskState::Mgmt | TaskState::Sent
        )
    }
}
