//! Contexts of a channel, used for commands and functions.

use std::time::Instant;

use riser_scsi::iscsi::Itt;
use riser_scsi::lun::WireLun;
use riser_scsi::step::{Response, TransferError};
use riser_state::State;

use super::datamover::Start;
use crate::fabric::task_mgmt::{Function, PendingFunction};
use crate::fabric::{Execution, Pace, Spare, Wait};

/// Context state.
///
/// ```text
///  Idle → New → AwaitLimit → AwaitBuffer → Receive → AwaitTask → AwaitBuffer → Block
///    │           (each only if it is required)                     │ ↑  │ (once per operation)
///    │                                                             │ └──┴→ Receive, Send (pieces)
///    │                                                             v
///    │                                        AwaitUnsolicited ──→ Sent → Idle
///    ├──→ Mgmt ─────────────────────────────────────────→ Sent
///    └──→ Expected ──→ AwaitBuffer, Receive, Send, Sent: depends on the state before reassignment
/// ```
///
/// In any state, a command can complete early with a response (if it fails or is aborted by another
/// nexus: TASK ABORTED), or without a response if it's aborted by its own nexus or the connection
/// is closed. A transition to the same state is the next block operation, or another wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TaskState {
    /// Not used by a request.
    Idle,
    /// Initial state when a request is received.
    New,
    /// Waiting for the rate limit of the unit or initiator.
    AwaitLimit,
    /// Waiting for older tasks in the task set of the unit.
    AwaitTask,
    /// Waiting for a data buffer from the pool.
    AwaitBuffer,
    /// Receiving data from the initiator.
    Receive,
    /// Sending a piece of data to the initiator, with more to follow.
    Send,
    /// Executing a block operation.
    Block,
    /// The response is ready, but we must wait for the end of unsolicited data, which is ignored.
    AwaitUnsolicited,
    /// Executing a task-management function.
    Mgmt,
    /// The response was passed to the datamover.
    Sent,
    /// Waiting for another connection to hand over a command.
    Expected,
}

impl State for TaskState {
    fn may_become(&self, next: &Self) -> bool {
        // Possible for each command without a response. The response must wait for the end of
        // unsolicited data.
        let is_end = matches!(next, Self::AwaitUnsolicited | Self::Sent | Self::Idle);
        match self {
            Self::Idle => matches!(next, Self::New | Self::Mgmt | Self::Expected),
            // Processing isn't interrupted, so it can't be aborted before it completes or starts
            // waiting.
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
            // Data is received before entering the task set, unless the command initially didn't
            // transfer any data because the unit was smaller at that time.
            Self::AwaitTask => {
                is_end || matches!(next, Self::AwaitBuffer | Self::Receive | Self::Block)
            }
            // A piece to be sent only waits for memory after the command was reassigned.
            Self::AwaitBuffer => {
                let continues = matches!(
                    next,
                    Self::AwaitBuffer | Self::Receive | Self::Send | Self::Block
                );
                is_end || continues
            }
            Self::Receive => is_end || matches!(next, Self::AwaitTask | Self::Block),
            Self::Send => is_end || matches!(next, Self::Block),
            // There may be no buffer for parameter data returned by an operation.
            Self::Block => {
                let continues = matches!(
                    next,
                    Self::AwaitBuffer | Self::Receive | Self::Send | Self::Block
                );
                is_end || continues
            }
            Self::AwaitUnsolicited => is_end || matches!(next, Self::AwaitBuffer),
            Self::Mgmt => matches!(next, Self::Sent | Self::Idle),
            Self::Sent => matches!(next, Self::Idle),
            // Unsolicited data not yet received was lost with the other connection.
            Self::Expected => matches!(
                next,
                Self::AwaitBuffer | Self::Receive | Self::Send | Self::Sent | Self::Idle
            ),
        }
    }
}

/// Data received from the initiator.
#[derive(Debug, Default)]
pub(super) struct Incoming {
    /// Number of bytes of immediate and unsolicited data received.
    pub(super) got: u32,
    /// Set if more unsolicited data will follow.
    pub(super) open: bool,
    /// Number of bytes of unsolicited data not received yet. Data that is damaged or out of order
    /// is considered received.
    pub(super) announced: u32,
    /// Next DataSN.
    pub(super) next_sn: u32,
    /// First error in the data.
    pub(super) fault: Option<TransferError>,
    /// Some data was lost, so the data after it is ignored.
    pub(super) lost: bool,
    /// Data received before a buffer was available, or for a later piece. The size is limited to
    /// FirstBurstLength, or a single piece from another connection.
    pub(super) staged: Vec<u8>,
    /// This is a piece to be sent, from another connection.
    pub(super) is_moved: bool,
    /// Offset of the requested piece and its buffer.
    pub(super) from: u32,
    /// End offset of this piece, if known.
    pub(super) wanted: Option<u32>,
    /// The remaining data was requested from the datamover.
    pub(super) solicited: bool,
}

/// Piece of data being sent to the initiator.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Piece {
    /// Offset in the command data.
    pub(super) from: u32,
    /// Size in bytes.
    pub(super) len: u32,
    /// DataSN of the PDU after this piece.
    pub(super) next_sn: u32,
}

/// Pending command or function, and its resources.
#[derive(Debug)]
pub(super) struct Task {
    pub(super) state: TaskState,
    pub(super) itt: Itt,
    /// Uses a slot in the command window.
    pub(super) counted: bool,
    /// Used a slot in the command window, and is complete.
    pub(super) lingers: bool,
    /// Uses a slot on another connection that will hand it over.
    pub(super) expected: bool,
    pub(super) lun: WireLun,
    pub(super) exec: Execution,
    pub(super) incoming: Incoming,
    /// Time waiting for the initiator in the states [`TaskState::Receive`], [`TaskState::Send`] and
    /// [`TaskState::AwaitUnsolicited`], and for commands in [`TaskState::Sent`].
    pub(super) wait: Wait,
    /// Time when the last data request was sent for a command in this context.
    pub(super) requested_at: Instant,
    /// Time when the first data request was sent for the current piece.
    pub(super) first_wait: Wait,
    /// Time of the first wait that holds a place in the order of the unit.
    pub(super) ordered: Option<Wait>,
    /// Total wait time for previous pieces during which others could be waiting for this command,
    /// in milliseconds.
    pub(super) waited: u32,
    /// Response, while waiting for unsolicited data and after it was sent.
    pub(super) response: Option<Response>,
    /// First data that the initiator hasn't received.
    pub(super) data_start: Start,
    /// Piece being sent, in [`TaskState::Send`].
    pub(super) piece: Piece,
    /// The initiator didn't receive all of this piece, and it can't be retransmitted.
    pub(super) is_lacking: bool,
    /// Number of R2T PDUs sent.
    pub(super) r2ts: u32,
    pub(super) mgmt: Option<PendingFunction<Function>>,
}

/// Unused contexts of a worker.
#[derive(Debug, Default)]
pub struct SpareTasks(pub(super) Spare<Task>);

impl SpareTasks {
    /// Returns the memory used by the contexts in bytes.
    #[must_use]
    pub fn memory(&self) -> usize {
        self.0.memory()
    }
}

impl Task {
    pub(super) fn new(wait: Wait) -> Self {
        Self {
            wait,
            requested_at: wait.since,
            first_wait: wait,
            ordered: None,
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

    /// Releases all resources of a command that has completed or was handed over to another
    /// connection.
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

    /// Returns the total wait time for pieces, during which others could be waiting for this
    /// command, in milliseconds.
    pub(super) fn waited_by(&self, now: Instant, pace: &Pace) -> u32 {
        let is_waiting = matches!(self.state, TaskState::Receive | TaskState::Send);
        if !is_waiting || self.exec.is_gathering() {
            return self.waited;
        }
        let waited = pace.waited(self.wait, now);
        let millis = u32::try_from(waited.as_millis()).unwrap_or(u32::MAX);
        self.waited.saturating_add(millis)
    }

    /// Called when the current piece was sent. The initiator has received all data before its end.
    pub(super) fn pass_piece(&mut self) {
        self.data_start = Start {
            data_sn: self.piece.next_sn,
            offset: self.piece.from + self.piece.len,
        };
    }

    /// Returns true if this task is waiting for the initiator to send or receive data. This
    /// includes an aborted task with a buffer still used by a socket or device, because others may
    /// be waiting for it, and a completed task, because it still has a buffer.
    pub(super) fn waits_for_initiator(&self) -> bool {
        match self.state {
            TaskState::Receive | TaskState::Send | TaskState::AwaitUnsolicited => true,
            TaskState::Sent => self.response.is_some(),
            _ => false,
        }
    }

    /// Returns the function in progress.
    ///
    /// # Panics
    /// Panics if this is not a task-management request.
    pub(super) fn pending_function(&mut self) -> &mut PendingFunction<Function> {
        self.mgmt.as_mut().expect("a function runs")
    }

    /// Returns true for a command without a response.
    pub(super) fn is_command(&self) -> bool {
        !matches!(
            self.state,
            TaskState::Idle | TaskState::Mgmt | TaskState::Sent
        )
    }
}
