//! Commands of a workload that wait for a buffer.

use std::collections::VecDeque;
use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Instant;

use riser_block::{Buffer, TakeBuffer};

use super::transfer::Transfer;
use super::{Lun, LunError};
use crate::engine::{IoData, ScsiIo};
use crate::scsi::{BlockRange, Command, UNMAP_LIST_LEN, unmap_list};

/// Length of the buffer of an UNMAP.
const LIST_LEN: usize = UNMAP_LIST_LEN as usize;

/// A checked operation of a command.
pub(super) enum Work {
    /// A transfer that requires a buffer for its protection information.
    Transfer {
        transfer: Transfer,
        offset: u64,
        buffer: Buffer,
    },
    /// An UNMAP, which requires a buffer of the client for its parameter list.
    Unmap(BlockRange),
}

impl Work {
    fn take_buffer(&self, lun: &Lun) -> TakeBuffer {
        match self {
            Self::Transfer { buffer, .. } => lun.take_wire(buffer.len()),
            Self::Unmap(_) => lun.buffers().take_buffer(LIST_LEN),
        }
    }

    fn into_io(self, lun: &Lun, buffer: Buffer) -> ScsiIo {
        match self {
            Self::Transfer {
                transfer,
                offset,
                buffer: blocks,
            } => {
                let io = lun.transfer_io(transfer, offset, blocks, Some(buffer));
                io.expect("checked before it was queued")
            }
            Self::Unmap(run) => lun.unmap_io(run, buffer),
        }
    }
}

/// A command without a buffer.
pub(super) struct WaitingCommand {
    pub(super) token: u64,
    pub(super) work: Work,
    pub(super) deadline: Instant,
}

/// Commands that wait for buffers of the same pool, in order of submission and of their deadlines.
/// The pool's queue ensures that other users of the pool do not starve them.
#[derive(Default)]
pub(super) struct WaitQueue {
    /// Bound: the operations of the workload.
    commands: VecDeque<WaitingCommand>,
    /// Buffer for the first command.
    first: Option<TakeBuffer>,
}

impl WaitQueue {
    pub(super) fn is_empty(&self) -> bool {
        self.commands.is_empty()
    }

    /// Returns the deadline of the first command.
    pub(super) fn deadline(&self) -> Option<Instant> {
        self.commands.front().map(|first| first.deadline)
    }

    pub(super) fn push(&mut self, command: WaitingCommand) {
        self.commands.push_back(command);
    }

    /// Removes the first command if its deadline has passed; returns its token.
    pub(super) fn take_expired(&mut self, now: Instant) -> Option<u64> {
        let expired = self.commands.pop_front_if(|first| first.deadline <= now)?;
        // The next command may need a buffer of a different length.
        self.first = None;
        Some(expired.token)
    }

    /// Returns the next command if there is a buffer for it, with its token. Otherwise, the waker
    /// will be woken when there may be a buffer.
    pub(super) fn poll_ready(
        &mut self,
        lun: &Lun,
        cx: &mut Context<'_>,
        now: Instant,
    ) -> Option<(u64, ScsiIo)> {
        let front = self.commands.front()?;
        let buffer = self
            .first
            .get_or_insert_with(|| front.work.take_buffer(lun));
        let Poll::Ready(buffer) = Pin::new(buffer).poll(cx) else {
            return None;
        };
        self.first = None;
        let WaitingCommand {
            token,
            work,
            deadline,
        } = self.commands.pop_front()?;
        let mut io = work.into_io(lun, buffer);
        io.timeout = deadline.saturating_duration_since(now);
        Some((token, io))
    }
}

impl Lun {
    /// Returns the buffer for the parameter list of an UNMAP.
    ///
    /// # Errors
    /// [`LunError::NoMemory`] if there is no free buffer.
    pub(super) fn try_list(&self) -> Result<Buffer, LunError> {
        self.buffers().try_take(LIST_LEN).ok_or(LunError::NoMemory)
    }

    /// Returns the UNMAP of a run of blocks, with its parameter list in the buffer.
    pub(super) fn unmap_io(&self, run: BlockRange, buffer: Buffer) -> ScsiIo {
        buffer.slice().write(0, &unmap_list(run));
        self.io(Command::unmap(run), IoData::One(buffer))
    }
}
