//! Command contexts of a channel, one for each command in flight.

use std::sync::Arc;
use std::time::{Duration, Instant};

use riser_scsi::sense::{AdditionalSense, Sense, SenseFormat, SenseKey};
use riser_scsi::srp::{RspCode, Tag};
use riser_scsi::step::Response;
use riser_state::{State, become_state};

use super::table::{Table, Tables};
use crate::fabric::task_mgmt::{Function, PendingFunction};
use crate::fabric::{
    Execution, MAX_DATA_TIMEOUTS, Pace, PortionLimits, Requests, Transfer, Unit, Wait,
};

/// Index of a receive context.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct RecvIdx(pub u16);

/// Purpose of a chain of work requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ChainKind {
    /// Read an external descriptor table.
    FetchTable,
    /// Read the command's data, or a piece of it.
    NeedData,
    /// Write a piece of data, with more to follow.
    SendData,
    /// Write data, and send the response after the last portion.
    Respond,
}

/// State of a send context. The names are the same as in `srpt_command_state`, with an additional
/// state for each resource that a command may have to wait for.
///
/// ```text
///  Done → New ─→ AwaitLimit ─→ AwaitBuffer ─→ FetchTable ─→ NeedData ─→ AwaitTask ─→ AwaitBuffer
///          │         (each only if required, in this order)                               │
///          │                                                                v─────────────┘
///          └──────────────────────────────────────────────→ DataIn (block operations)
///                                                             ↑ └→ NeedData, SendData (pieces)
///                                                             └──────────┘  │
///  Done ←── CmdRspSent ←── WriteData (portions) ←───────────────────────────┘
///
///  Done → Mgmt → MgmtRspSent → Done         AwaitCredit(then) before every post
///  New → Mgmt → New                         a command with a duplicate tag
/// ```
///
/// In any state, a command can be completed early (if it is rejected, or aborted by another nexus:
/// TASK ABORTED). If it is aborted by its own nexus or the channel is closed, there is no response.
/// A state can be followed by itself: for the next portion of a transfer, the next block operation,
/// or another wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum IoctxState {
    /// Idle: processing has finished, or was never started.
    Done,
    /// Received and being parsed.
    New,
    /// Waiting for the rate limits of the unit or initiator.
    AwaitLimit,
    /// Waiting for older tasks in the unit's task set.
    AwaitTask,
    /// Reading the external descriptor table.
    FetchTable,
    /// Waiting for a data buffer from the pool.
    AwaitBuffer,
    /// Reading the command's data, or a piece of it, from the initiator.
    NeedData,
    /// Writing a piece of data to the initiator, with more to follow.
    SendData,
    /// Executing a block operation. Its data was received, or is not required.
    DataIn,
    /// Writing data to the initiator. The response is sent after the last portion.
    WriteData,
    /// Waiting for room in the send queue.
    AwaitCredit(ChainKind),
    /// The response to a command has been posted.
    CmdRspSent,
    /// A task management function is running.
    Mgmt,
    /// The response to a task management function has been posted.
    MgmtRspSent,
}

/// States by number. One number is not used.
pub(super) const STATES: [Option<IoctxState>; 18] = {
    use IoctxState::*;

    [
        Some(AwaitCredit(ChainKind::FetchTable)),
        Some(AwaitCredit(ChainKind::NeedData)),
        Some(AwaitCredit(ChainKind::SendData)),
        Some(AwaitCredit(ChainKind::Respond)),
        Some(Done),
        Some(New),
        Some(AwaitLimit),
        Some(AwaitTask),
        Some(FetchTable),
        Some(AwaitBuffer),
        Some(NeedData),
        Some(SendData),
        Some(DataIn),
        Some(WriteData),
        None,
        Some(CmdRspSent),
        Some(Mgmt),
        Some(MgmtRspSent),
    ]
};

/// Bit mask of valid next states for each state. Each command goes through several states, and this
/// makes the check a single lookup.
const MAY_FOLLOW: [u32; STATES.len()] = {
    let mut table = [0; STATES.len()];
    let mut from = 0;
    while from < STATES.len() {
        let mut to = 0;
        while to < STATES.len() {
            if let (Some(state), Some(next)) = (STATES[from], STATES[to])
                && state.leads_to(next)
            {
                table[from] |= 1 << to;
            }
            to += 1;
        }
        from += 1;
    }
    table
};

impl State for IoctxState {
    fn may_become(&self, next: &Self) -> bool {
        MAY_FOLLOW[self.number()] & 1 << next.number() != 0
    }
}

impl IoctxState {
    /// Returns the index in `STATES`. The compiler uses the same numbers for the states, so this
    /// has no cost.
    pub(super) const fn number(self) -> usize {
        match self {
            Self::AwaitCredit(then) => then as usize,
            Self::Done => 4,
            Self::New => 5,
            Self::AwaitLimit => 6,
            Self::AwaitTask => 7,
            Self::FetchTable => 8,
            Self::AwaitBuffer => 9,
            Self::NeedData => 10,
            Self::SendData => 11,
            Self::DataIn => 12,
            Self::WriteData => 13,
            Self::CmdRspSent => 15,
            Self::Mgmt => 16,
            Self::MgmtRspSent => 17,
        }
    }

    /// Returns whether a transition is valid. This is used to create the table.
    const fn leads_to(self, next: Self) -> bool {
        use IoctxState::*;

        // Valid for any command without a response.
        let is_end = matches!(next, AwaitCredit(ChainKind::Respond) | CmdRspSent | Done);
        let is_fetch = matches!(next, FetchTable | AwaitCredit(ChainKind::FetchTable));
        let is_receive = matches!(next, NeedData | AwaitCredit(ChainKind::NeedData));
        let is_send = matches!(next, SendData | AwaitCredit(ChainKind::SendData));
        match self {
            Done => matches!(next, New | Mgmt),
            // This state is left in a single call, so the command cannot complete without a
            // response or a wait.
            New => {
                let waits = matches!(next, AwaitLimit | AwaitTask | AwaitBuffer);
                let begins = is_fetch || is_receive || matches!(next, DataIn | WriteData | Mgmt);
                waits || begins || (is_end && !matches!(next, Done))
            }
            AwaitLimit => {
                is_end || is_fetch || is_receive || matches!(next, AwaitTask | AwaitBuffer)
            }
            // Data is received before the task is ordered, unless the command could not accept any
            // data at first because the unit has grown since.
            AwaitTask => is_end || is_receive || matches!(next, AwaitBuffer | DataIn | WriteData),
            // The data buffer was allocated before the table was fetched.
            FetchTable => is_end || is_fetch || is_receive || matches!(next, AwaitTask),
            AwaitBuffer => {
                let continues = matches!(next, AwaitBuffer | AwaitTask | DataIn | WriteData);
                is_end || is_fetch || is_receive || continues
            }
            NeedData => is_end || is_receive || matches!(next, AwaitTask | DataIn),
            SendData => is_end || is_send || matches!(next, DataIn),
            // A buffer may be required for parameter data found by the operation.
            DataIn => {
                let continues = matches!(next, AwaitBuffer | DataIn | WriteData);
                is_end || is_receive || is_send || continues
            }
            WriteData => is_end || matches!(next, WriteData),
            AwaitCredit(ChainKind::FetchTable) => is_end || matches!(next, FetchTable),
            AwaitCredit(ChainKind::NeedData) => is_end || matches!(next, NeedData),
            AwaitCredit(ChainKind::SendData) => is_end || matches!(next, SendData),
            AwaitCredit(ChainKind::Respond) => is_end || matches!(next, WriteData | MgmtRspSent),
            // The function completes, or a command with a duplicate tag continues to its response.
            Mgmt => matches!(
                next,
                New | AwaitCredit(ChainKind::Respond) | MgmtRspSent | Done
            ),
            CmdRspSent | MgmtRspSent => matches!(next, Done),
        }
    }
}

/// A request that aborts tasks, and completes once they are removed.
#[derive(Clone, Debug)]
pub enum Cause {
    /// A task management function of the initiator.
    Function(Function),
    /// A command with a duplicate tag, and its unit, if it exists.
    Overlap(Option<Arc<Unit>>),
}

/// Proof that a request was received. It must be consumed in exactly one of three ways. If a
/// context drops it, a command was lost, which is reported in debug builds.
#[derive(Debug)]
#[must_use = "a request gets a response, or is aborted or torn down"]
pub struct CommandToken(());

impl CommandToken {
    /// Called when a request is received.
    pub(super) fn taken_in() -> Self {
        Self(())
    }

    /// Called when the response was written.
    pub(super) fn responded(self) {
        std::mem::forget(self);
    }

    /// Called when the request was aborted by task management, without a response.
    pub(super) fn aborted(self) {
        std::mem::forget(self);
    }

    /// Called when the channel was torn down.
    pub(super) fn torn_down(self) {
        std::mem::forget(self);
    }
}

impl Drop for CommandToken {
    fn drop(&mut self) {
        if !std::thread::panicking() {
            debug_assert!(false, "a command was lost");
        }
    }
}

/// Immediate data in the receive ring.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Immediate {
    /// The receive context, which is not posted again until the data is consumed.
    pub recv: RecvIdx,
    /// Offset in the information unit, in bytes.
    pub offset: u32,
    /// Remaining length in bytes.
    pub len: u32,
}

/// A request in flight, with all of its resources.
#[derive(Debug)]
pub struct SendIoctx {
    /// State of the request.
    pub state: IoctxState,
    /// Tag used by the initiator.
    pub tag: Tag,
    /// The command, its steps and its data buffer.
    pub exec: Execution,
    /// True to notify the initiator on success.
    pub notify_success: bool,
    /// True to notify the initiator on failure.
    pub notify_failure: bool,
    /// Immediate data that was not copied from the receive ring yet.
    pub immediate: Option<Immediate>,
    /// The command's data in the initiator's memory.
    pub tables: Tables,
    /// The current transfer.
    pub transfer: Option<Transfer>,
    /// RSP_CODE for a response with response data.
    pub code: Option<RspCode>,
    /// The response, if available.
    pub response: Option<Response>,
    /// Number of work requests in the posted chain.
    pub wrs: u32,
    /// Start of the current wait, if a running command waits for the initiator to send or receive a
    /// piece of data, or the response.
    pub wait: Option<Wait>,
    /// Same as `wait`, but also set for a command that gathers its data.
    pub began: Option<Wait>,
    /// The first wait after the command was ordered in its unit.
    pub ordered: Option<Wait>,
    /// Total time of previous waits for pieces.
    pub waited: Duration,
    /// The function, for a task management request.
    pub mgmt: Option<PendingFunction<Cause>>,
    /// Proof of the request until it completes.
    pub token: Option<CommandToken>,
}

impl SendIoctx {
    /// Creates an unused context.
    #[must_use]
    pub fn new() -> Self {
        Self {
            state: IoctxState::Done,
            tag: Tag(0),
            exec: Execution::new(),
            notify_success: false,
            notify_failure: false,
            immediate: None,
            tables: Tables::default(),
            transfer: None,
            code: None,
            response: None,
            wrs: 0,
            wait: None,
            began: None,
            ordered: None,
            waited: Duration::ZERO,
            mgmt: None,
            token: None,
        }
    }

    /// Returns whether a device may still access buffers of this context.
    #[must_use]
    pub fn is_in_device(&self) -> bool {
        matches!(
            self.state,
            IoctxState::FetchTable
                | IoctxState::NeedData
                | IoctxState::SendData
                | IoctxState::DataIn
                | IoctxState::WriteData
                | IoctxState::CmdRspSent
                | IoctxState::MgmtRspSent
        )
    }

    /// Returns the deadline for the current piece. `time` is the limit for all pieces in total.
    #[must_use]
    pub fn piece_due(&self, time: Duration, pace: &Pace) -> Option<Instant> {
        let mut left = time.saturating_sub(self.waited);
        if self.response.is_some() || self.state == IoctxState::CmdRspSent {
            // No other command waits for a completed command: see `iscsi::Channel::check_data`.
            left = left.max(time / MAX_DATA_TIMEOUTS);
        }
        Some(pace.due(self.wait?, left))
    }

    /// Returns whether this is a command, instead of a task management request or an unused
    /// context.
    #[must_use]
    pub fn is_command(&self) -> bool {
        self.state != IoctxState::Done && self.mgmt.is_none() && self.state != IoctxState::Mgmt
    }

    /// Returns the function in progress.
    ///
    /// # Panics
    /// If this is not a task management request.
    pub(super) fn pending_function(&mut self) -> &mut PendingFunction<Cause> {
        self.mgmt.as_mut().expect("a function runs")
    }

    /// Returns the response for a command with a duplicate tag, whose tasks have been aborted.
    pub(super) fn overlapped_response(&mut self, unit: Option<&Unit>) -> Response {
        let format = unit.map_or(SenseFormat::Fixed, |unit| unit.lu.sense_format());
        let overlapped = AdditionalSense::OVERLAPPED_COMMANDS;
        let sense = Sense::new(SenseKey::AbortedCommand, overlapped);
        self.mgmt = None;
        become_state(&mut self.state, IoctxState::New);
        Response::check_condition(&sense, format, self.exec.expected)
    }

    /// Plans the next portion of the current transfer. Returns the number of work requests, which
    /// is zero without a transfer.
    pub(super) fn plan_portion(&mut self, limits: PortionLimits) -> u32 {
        let Some(transfer) = &mut self.transfer else {
            return 0;
        };
        let data = self.exec.buffer.as_ref();
        let (table, buffer) = self.tables.sides(transfer.direction(), data);
        transfer.plan(table, buffer, limits)
    }

    /// Returns whether the planned portion completes the transfer.
    pub(super) fn is_last_portion(&self) -> bool {
        self.transfer.as_ref().is_none_or(Transfer::is_last)
    }

    /// Returns the work requests of the planned portion.
    pub(super) fn requests(&self) -> Option<Requests<'_, Table>> {
        let transfer = self.transfer.as_ref()?;
        let data = self.exec.buffer.as_ref();
        let (table, buffer) = self.tables.sides(transfer.direction(), data);
        Some(transfer.requests(table, buffer))
    }
}

impl Default for SendIoctx {
    fn default() -> Self {
        Self::new()
    }
}
