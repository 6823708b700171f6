//! The contexts of a channel: one per command that it may have under way.

use std::sync::Arc;
use std::time::{Duration, Instant};

use riser_scsi::srp::{RspCode, Tag};
use riser_scsi::step::Response;
use riser_state::State;

use super::table::Tables;
use crate::fabric::task_mgmt::{Function, PendingFunction};
use crate::fabric::{
    Execution, MAX_DATA_TIMEOUTS, Pace, PortionLimits, RdmaRequest, Transfer, Unit, Wait,
};
use crate::pool::Ranges;

/// Number of a receive context.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct RecvIdx(pub u16);

/// Purpose of a chain of work requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ChainKind {
    /// Read an external descriptor table.
    FetchTable,
    /// Read the command's data, or a piece of them.
    NeedData,
    /// Write a piece of the data that others follow.
    SendData,
    /// Write data, and answer with the last portion.
    Respond,
}

/// State of a send context. The names are those of `srpt_command_state`, with a state for each
/// resource that a command may have to wait for.
///
/// ```text
///  Done → New ─→ AwaitLimit ─→ AwaitBuffer ─→ FetchTable ─→ NeedData ─→ AwaitTask ─→ AwaitBuffer
///          │         (each only where it is needed, in this order)                        │
///          │                                                                v─────────────┘
///          └──────────────────────────────────────────────→ DataIn (block operations)
///                                                             ↑ └→ NeedData, SendData (pieces)
///                                                             └──────────┘  │
///  Done ←── CmdRspSent ←── WriteData (portions) ←───────────────────────────┘
///
///  Done → Mgmt → MgmtRspSent → Done         AwaitCredit(then) before every post
///  New → Mgmt → New                         a command with the tag of another one
/// ```
///
/// A command may be answered early in every state (it is refused, or another nexus ends it: TASK
/// ABORTED), and ends without an answer where its own nexus or the end of the channel takes it. A
/// state that follows itself is the next portion of a transfer, the next block operation, or
/// another wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum IoctxState {
    /// Idle: processing finished, or never began.
    Done,
    /// Taken in, being looked at.
    New,
    /// Waits for the limits of its unit or initiator.
    AwaitLimit,
    /// Waits in the unit's task set for older tasks.
    AwaitTask,
    /// The external descriptor table is being read.
    FetchTable,
    /// Waits for a data buffer of the pool.
    AwaitBuffer,
    /// The command's data is being read from the initiator, or a piece of it.
    NeedData,
    /// A piece of the data is being written to the initiator, and more will follow.
    SendData,
    /// Data is here or not needed: a block operation runs.
    DataIn,
    /// Data is being written to the initiator; the answer goes with the last portion.
    WriteData,
    /// Waits for room in the send queue.
    AwaitCredit(ChainKind),
    /// The answer to a command is posted.
    CmdRspSent,
    /// A task-management function runs.
    Mgmt,
    /// The answer to a task-management function is posted.
    MgmtRspSent,
}

/// States by their numbers; one of them is not used.
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

/// The states that may follow each one: a bit for the number of each of them. Every command goes
/// through several states, and what it pays for the check is one look here.
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
    /// Its place in `STATES`. These are the numbers that the compiler gives the states as well, so
    /// this costs nothing.
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

    /// The transitions, from which the table is made.
    const fn leads_to(self, next: Self) -> bool {
        use IoctxState::*;

        // What every command that is not answered yet may come to.
        let is_end = matches!(next, AwaitCredit(ChainKind::Respond) | CmdRspSent | Done);
        let is_fetch = matches!(next, FetchTable | AwaitCredit(ChainKind::FetchTable));
        let is_receive = matches!(next, NeedData | AwaitCredit(ChainKind::NeedData));
        let is_send = matches!(next, SendData | AwaitCredit(ChainKind::SendData));
        match self {
            Done => matches!(next, New | Mgmt),
            // It is looked at in one go, so nothing ends it before it is answered or waits.
            New => {
                let waits = matches!(next, AwaitLimit | AwaitTask | AwaitBuffer);
                let begins = is_fetch || is_receive || matches!(next, DataIn | WriteData | Mgmt);
                waits || begins || (is_end && !matches!(next, Done))
            }
            AwaitLimit => {
                is_end || is_fetch || is_receive || matches!(next, AwaitTask | AwaitBuffer)
            }
            // Data come before the order, but for a command that could take none when it came: the
            // unit has grown since.
            AwaitTask => is_end || is_receive || matches!(next, AwaitBuffer | DataIn | WriteData),
            // The buffer for the data was there before the table was fetched.
            FetchTable => is_end || is_fetch || is_receive || matches!(next, AwaitTask),
            AwaitBuffer => {
                let goes_on = matches!(next, AwaitBuffer | AwaitTask | DataIn | WriteData);
                is_end || is_fetch || is_receive || goes_on
            }
            NeedData => is_end || is_receive || matches!(next, AwaitTask | DataIn),
            SendData => is_end || is_send || matches!(next, DataIn),
            // Parameter data that an operation has found may lack a buffer.
            DataIn => {
                let goes_on = matches!(next, AwaitBuffer | DataIn | WriteData);
                is_end || is_receive || is_send || goes_on
            }
            WriteData => is_end || matches!(next, WriteData),
            AwaitCredit(ChainKind::FetchTable) => is_end || matches!(next, FetchTable),
            AwaitCredit(ChainKind::NeedData) => is_end || matches!(next, NeedData),
            AwaitCredit(ChainKind::SendData) => is_end || matches!(next, SendData),
            AwaitCredit(ChainKind::Respond) => is_end || matches!(next, WriteData | MgmtRspSent),
            // A function is answered, or a command with the tag of another one goes on to its
            // answer.
            Mgmt => matches!(
                next,
                New | AwaitCredit(ChainKind::Respond) | MgmtRspSent | Done
            ),
            CmdRspSent | MgmtRspSent => matches!(next, Done),
        }
    }
}

/// A request that ends tasks, and is answered when they are gone.
#[derive(Clone, Debug)]
pub enum Cause {
    /// A task-management function of the initiator.
    Function(Function),
    /// A command with the tag of another one; its unit, if there is such a one.
    Overlap(Option<Arc<Unit>>),
}

/// Proof that a request was taken in. It ends in exactly one of three ways; a context that lets it
/// go otherwise has lost a command, which debug builds report.
#[derive(Debug)]
#[must_use = "a request is answered, aborted or torn down"]
pub struct CommandToken(());

impl CommandToken {
    /// A request came in.
    pub(super) fn taken_in() -> Self {
        Self(())
    }

    /// Its answer is on its way.
    pub(super) fn answered(self) {
        std::mem::forget(self);
    }

    /// Task management aborted it: no answer.
    pub(super) fn aborted(self) {
        std::mem::forget(self);
    }

    /// Its channel is gone.
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

/// Immediate data that still lies in the receive ring.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Immediate {
    /// The receive context that is held back for it.
    pub recv: RecvIdx,
    /// Offset in the information unit, in bytes.
    pub offset: u32,
    /// Bytes that are still there.
    pub len: u32,
}

/// One request under way, and everything that it holds.
#[derive(Debug)]
pub struct SendIoctx {
    /// State of the request.
    pub state: IoctxState,
    /// Tag that the initiator knows the request by.
    pub tag: Tag,
    /// Command, its steps and its data buffer.
    pub exec: Execution,
    /// Notify the initiator of success.
    pub notify_success: bool,
    /// Notify the initiator of failure.
    pub notify_failure: bool,
    /// Immediate data not yet taken from the receive ring.
    pub immediate: Option<Immediate>,
    /// The initiator's memory that the command names.
    pub tables: Tables,
    /// The transfer under way.
    pub transfer: Option<Transfer>,
    /// RSP_CODE of the answer, for one with response data.
    pub code: Option<RspCode>,
    /// The answer, once there is one.
    pub response: Option<Response>,
    /// Work requests of the chain that is posted.
    pub wrs: u32,
    /// Since when a command that has started waits for the initiator to give or take a piece of its
    /// data, or its answer.
    pub wait: Option<Wait>,
    /// The same, also of a command that gathers its data.
    pub began: Option<Wait>,
    /// The first wait with a place in the order of its unit.
    pub ordered: Option<Wait>,
    /// Time that its waits for earlier pieces count.
    pub waited: Duration,
    /// The function, in a context of a task-management request.
    pub mgmt: Option<PendingFunction<Cause>>,
    /// Proof of the request, until it ends.
    pub token: Option<CommandToken>,
}

impl SendIoctx {
    /// Makes a context that no request has.
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

    /// Whether a device may still touch what the context holds.
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

    /// Deadline of the piece that it waits for; all pieces together have `time`.
    #[must_use]
    pub fn piece_due(&self, time: Duration, pace: &Pace) -> Option<Instant> {
        let mut left = time.saturating_sub(self.waited);
        if self.response.is_some() || self.state == IoctxState::CmdRspSent {
            // No command waits for an answered one: see `iscsi::Channel::check_data`.
            left = left.max(time / MAX_DATA_TIMEOUTS);
        }
        Some(pace.due(self.wait?, left))
    }

    /// Whether it is a command, as opposed to idle or a task-management request.
    #[must_use]
    pub fn is_command(&self) -> bool {
        self.state != IoctxState::Done && self.mgmt.is_none() && self.state != IoctxState::Mgmt
    }

    /// Plans the next portion of the transfer under way; returns its number of work requests.
    /// Without a transfer there are none.
    pub(super) fn plan_portion(&mut self, limits: PortionLimits) -> u32 {
        let Some(transfer) = &mut self.transfer else {
            return 0;
        };
        let data = self.exec.buffer.as_ref();
        let (table, buffer) = self.tables.sides(transfer.direction(), data);
        transfer.plan(table, buffer, limits)
    }

    /// Whether nothing remains of the transfer after the planned portion.
    pub(super) fn is_last_portion(&self) -> bool {
        self.transfer.as_ref().is_none_or(Transfer::is_last)
    }

    /// Returns the work requests of the planned portion.
    pub(super) fn requests(&self) -> impl Iterator<Item = RdmaRequest<Ranges<'_>>> {
        self.transfer.iter().flat_map(|transfer| {
            let data = self.exec.buffer.as_ref();
            let (table, buffer) = self.tables.sides(transfer.direction(), data);
            transfer.requests(table, buffer)
        })
    }
}

impl Default for SendIoctx {
    fn default() -> Self {
        Self::new()
    }
}
