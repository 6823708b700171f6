//! Adapter from a block device's workload to a workload of the engine.

use std::sync::Arc;
use std::task::{Context, Waker};
use std::time::Instant;

use riser_block::{BlockError, Buffer, Completion, Operation, SharedBuffer, Submissions, Workload};
use rustc_hash::FxHashMap;

use super::error::check_response;
use super::transfer::Transfer;
use super::waiting::{WaitQueue, WaitingCommand, Work};
use super::{Lun, LunError};
use crate::engine::{self, IoCompletion, IoData, Wakeup, WorkQueue};
use crate::request::RequestError;
use crate::scsi::BlockRange;

/// Kind of a command, in the upper half of its token.
const TRANSFER: u64 = 0;
const DISCARD: u64 = 1 << 32;
const FLUSH: u64 = 2 << 32;
/// A part of an operation with several commands.
const PIECE: u64 = 3 << 32;
/// The flush at the end of such an operation.
const FINAL_FLUSH: u64 = 4 << 32;

/// Sends a workload to the engine's thread, if it has one.
pub(super) fn drive(lun: &Lun, workload: Box<dyn Workload>) -> Result<(), Box<dyn Workload>> {
    if !lun.session.client().has_thread() {
        return Err(workload);
    }
    start(lun, workload);
    Ok(())
}

/// Sends a workload to the engine.
pub(super) fn start(lun: &Lun, workload: Box<dyn Workload>) {
    let wakeup = lun.session.wakeup();
    let work = LunWorkload {
        lun: lun.clone(),
        workload,
        submissions: Submissions::default(),
        composites: FxHashMap::default(),
        transfers: WaitQueue::default(),
        discards: WaitQueue::default(),
        waker: wakeup.clone().into(),
        wakeup,
        last_call: None,
    };
    // If the engine was shut down, it drops the workload, as for a shutdown during the work.
    let _ = lun.session.run(Box::new(work));
}

struct LunWorkload {
    lun: Lun,
    workload: Box<dyn Workload>,
    /// Empty between calls, but kept to reuse its memory.
    submissions: Submissions,
    /// Operations with several commands, by tag.
    composites: FxHashMap<u32, Composite>,
    /// Transfers without a buffer for their protection information.
    transfers: WaitQueue,
    /// Discards without a buffer of the client. In a common queue, they could wait for a buffer of a
    /// transfer behind them.
    discards: WaitQueue,
    /// Set when a buffer for the first transfer or discard may be available.
    wakeup: Arc<Wakeup>,
    waker: Waker,
    /// Time of the last call.
    last_call: Option<Instant>,
}

/// An operation with several commands: a transfer beyond the unit's limit, or a write to stable
/// storage on a unit without FUA.
struct Composite {
    whole: SharedBuffer,
    /// Number of incomplete pieces.
    left: usize,
    then_flush: bool,
    result: Result<(), LunError>,
}

impl LunWorkload {
    /// Submits the workload's operations to the engine. An operation that cannot be
    /// expressed as a command completes immediately, and its completion may submit more.
    fn forward(&mut self, queue: &mut WorkQueue) {
        while !self.submissions.is_empty() {
            let mut failed = Vec::new();
            let mut submissions = std::mem::take(&mut self.submissions);
            for (tag, operation) in submissions.drain() {
                if let Err(error) = self.submit(tag, operation, queue) {
                    failed.push((tag, error));
                }
            }
            self.submissions = submissions;
            for (tag, error) in failed {
                let completion = Err(BlockError::from(error));
                self.workload
                    .complete(tag, completion, &mut self.submissions);
            }
        }
    }

    /// Submits the commands of an operation.
    fn submit(
        &mut self,
        tag: u32,
        operation: Operation,
        queue: &mut WorkQueue,
    ) -> Result<(), LunError> {
        let lun = &self.lun;
        let has_fua = lun.shared.info.caching.has_fua;
        let (kind, io) = match operation {
            Operation::Read { offset, buffer } => {
                if self.is_long(&buffer) {
                    return self.submit_pieces(tag, Transfer::Read, (offset, buffer), false, queue);
                }
                let token = u64::from(tag) | TRANSFER;
                return self.submit_transfer(token, Transfer::Read, (offset, buffer), queue);
            }
            Operation::Write {
                offset,
                buffer,
                fua,
            } => {
                let then_flush = fua && !has_fua && !buffer.is_empty();
                let write = Transfer::Write {
                    fua: fua && has_fua,
                };
                if then_flush || self.is_long(&buffer) {
                    return self.submit_pieces(tag, write, (offset, buffer), then_flush, queue);
                }
                let token = u64::from(tag) | TRANSFER;
                return self.submit_transfer(token, write, (offset, buffer), queue);
            }
            Operation::Flush => (FLUSH, lun.flush_io()),
            Operation::Discard(range) => {
                let len = range.end - range.start;
                if len > lun.shared.geometry.max_discard {
                    return Err(LunError::OutOfRange);
                }
                let run = lun.blocks(range.start, len)?;
                return self.submit_discard(u64::from(tag) | DISCARD, run, queue);
            }
        };
        queue.submit(u64::from(tag) | kind, io);
        Ok(())
    }

    /// Submits a transfer, or queues it until there is a buffer for its protection information.
    fn submit_transfer(
        &mut self,
        token: u64,
        transfer: Transfer,
        (offset, buffer): (u64, Buffer),
        queue: &mut WorkQueue,
    ) -> Result<(), LunError> {
        let lun = &self.lun;
        let wire = match self.transfers.is_empty() {
            true => lun.try_wire(buffer.len()),
            false => Err(LunError::NoMemory),
        };
        match wire {
            Ok(wire) => queue.submit(token, lun.transfer_io(transfer, offset, buffer, wire)?),
            Err(_) => {
                lun.check_transfer(offset, buffer.len())?;
                let work = Work::Transfer {
                    transfer,
                    offset,
                    buffer,
                };
                self.wait_for_buffer(token, work, queue);
            }
        }
        Ok(())
    }

    /// Submits an UNMAP for a run of blocks, or queues it until there is a buffer for its parameter
    /// list. Submits a WRITE SAME if the unit does not support UNMAP.
    fn submit_discard(
        &mut self,
        token: u64,
        run: BlockRange,
        queue: &mut WorkQueue,
    ) -> Result<(), LunError> {
        let lun = &self.lun;
        if !lun.unmaps() {
            queue.submit(token, lun.write_same_io(run, true));
            return Ok(());
        }
        let list = match self.discards.is_empty() {
            true => lun.try_list(),
            false => Err(LunError::NoMemory),
        };
        match list {
            Ok(list) => queue.submit(token, lun.unmap_io(run, list)),
            Err(_) => self.wait_for_buffer(token, Work::Unmap(run), queue),
        }
        Ok(())
    }

    /// Queues a command until there is a buffer for it.
    fn wait_for_buffer(&mut self, token: u64, work: Work, queue: &mut WorkQueue) {
        let waiting = match work {
            Work::Transfer { .. } => &mut self.transfers,
            Work::Unmap(_) => &mut self.discards,
        };
        waiting.push(WaitingCommand {
            token,
            work,
            deadline: queue.now() + self.lun.session.timeout(),
        });
        // Registers for a buffer, unless another command is already waiting in this queue.
        self.submit_waiting(queue);
    }

    fn is_waiting(&self) -> bool {
        !self.transfers.is_empty() || !self.discards.is_empty()
    }

    /// Submits waiting commands for which there are buffers.
    fn submit_waiting(&mut self, queue: &mut WorkQueue) {
        self.wakeup.reset();
        let mut cx = Context::from_waker(&self.waker);
        for waiting in [&mut self.transfers, &mut self.discards] {
            while let Some((token, io)) = waiting.poll_ready(&self.lun, &mut cx, queue.now()) {
                queue.submit(token, io);
            }
        }
    }

    /// Submits waiting commands for which there are buffers. Commands past their deadline fail.
    fn run_waiting(&mut self, queue: &mut WorkQueue) {
        let now = queue.now();
        while let Some(token) = self
            .transfers
            .take_expired(now)
            .or_else(|| self.discards.take_expired(now))
        {
            let end = IoCompletion {
                result: Err(RequestError::TimedOut),
                data: IoData::None,
            };
            self.finish(token, end, queue);
        }
        self.submit_waiting(queue);
    }

    /// Handles the completion of a command, or the timeout of a command that was not submitted.
    fn finish(&mut self, token: u64, end: IoCompletion, queue: &mut WorkQueue) {
        let (tag, kind) = (token as u32, token & !u64::from(u32::MAX));
        let completion = match kind {
            PIECE | FINAL_FLUSH => self.complete_composite(tag, kind, end, queue),
            _ => Some(self.check_completion(kind, end)),
        };
        if let Some(completion) = completion {
            self.workload
                .complete(tag, completion, &mut self.submissions);
        }
    }

    /// Returns whether a buffer exceeds the maximum for a single command.
    fn is_long(&self, buffer: &Buffer) -> bool {
        buffer.len() > self.lun.shared.max_command as usize
    }

    fn submit_pieces(
        &mut self,
        tag: u32,
        transfer: Transfer,
        (offset, buffer): (u64, Buffer),
        then_flush: bool,
        queue: &mut WorkQueue,
    ) -> Result<(), LunError> {
        self.lun.check_transfer(offset, buffer.len())?;
        let most = self.lun.shared.max_command as usize;
        let whole = SharedBuffer::new(buffer);
        let (mut at, mut left) = (offset, 0);
        for piece in whole.pieces(most) {
            let len = piece.len() as u64;
            self.submit_transfer(u64::from(tag) | PIECE, transfer, (at, piece), queue)?;
            (at, left) = (at + len, left + 1);
        }
        let composite = Composite {
            whole,
            left,
            then_flush,
            result: Ok(()),
        };
        self.composites.insert(tag, composite);
        Ok(())
    }

    /// Handles the completion of a command of a composite operation. Returns the result of the
    /// operation for its last command.
    fn complete_composite(
        &mut self,
        tag: u32,
        kind: u64,
        end: IoCompletion,
        queue: &mut WorkQueue,
    ) -> Option<Completion> {
        let result = match kind {
            PIECE => self.lun.complete(end).map(drop),
            _ => self.lun.check_flush(end),
        };
        let composite = self.composites.get_mut(&tag)?;
        composite.left -= usize::from(kind == PIECE);
        if composite.result.is_ok() {
            composite.result = result;
        }
        if composite.left > 0 {
            return None;
        }
        if composite.result.is_ok() && std::mem::take(&mut composite.then_flush) {
            queue.submit(u64::from(tag) | FINAL_FLUSH, self.lun.flush_io());
            return None;
        }
        let Composite { whole, result, .. } = self.composites.remove(&tag)?;
        let closed = LunError::from(RequestError::Closed);
        let whole = result.and_then(|()| whole.into_whole().ok_or(closed));
        Some(whole.map(Some).map_err(BlockError::from))
    }

    fn check_completion(&self, kind: u64, end: IoCompletion) -> Completion {
        let result = match kind {
            TRANSFER => self.lun.complete(end).map(Some),
            FLUSH => self.lun.check_flush(end).map(|()| None),
            _ => end
                .result
                .map_err(LunError::from)
                .and_then(|response| check_response(&response))
                .map(|()| None),
        };
        Ok(result?)
    }
}

impl engine::Workload for LunWorkload {
    fn start(&mut self, queue: &mut WorkQueue) {
        self.last_call = Some(queue.now());
        self.workload.submit(&mut self.submissions);
        self.forward(queue);
    }

    fn complete(&mut self, token: u64, end: IoCompletion, queue: &mut WorkQueue) {
        self.last_call = Some(queue.now());
        self.finish(token, end, queue);
        if self.is_waiting() {
            self.run_waiting(queue);
        }
        self.forward(queue);
    }

    fn due(&self) -> Option<Instant> {
        let deadlines = [self.transfers.deadline(), self.discards.deadline()];
        let waiting = deadlines.into_iter().flatten().min().map(|first| {
            let woken = self.last_call.filter(|_| self.wakeup.is_pending());
            woken.unwrap_or(first)
        });
        [self.workload.due(), waiting].into_iter().flatten().min()
    }

    fn wake(&mut self, queue: &mut WorkQueue) {
        self.last_call = Some(queue.now());
        if self.is_waiting() {
            self.run_waiting(queue);
        }
        if self.workload.due().is_some_and(|due| due <= queue.now()) {
            self.workload.submit(&mut self.submissions);
        }
        self.forward(queue);
    }
}
