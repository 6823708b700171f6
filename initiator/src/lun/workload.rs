//! A workload of a block device as one of the engine, whose commands it makes.

use std::time::Instant;

use super::error::judge;
use super::{Lun, LunError};
use crate::block::{BlockError, Completion, Operation, Submissions, Workload};
use crate::engine::{self, IoData, IoEnd, ScsiIo, WorkQueue};
use crate::scsi::{BlockRange, Command, unmap_list};

/// Kind of an operation, in the upper half of its token.
const TRANSFER: u64 = 0;
const DISCARD: u64 = 1 << 32;
const FLUSH: u64 = 2 << 32;

/// Sends a workload to the engine's thread, if it has one.
pub(super) fn drive(lun: &Lun, workload: Box<dyn Workload>) -> Result<(), Box<dyn Workload>> {
    if !lun.session.client().has_thread() {
        return Err(workload);
    }
    let work = LunWorkload {
        lun: lun.clone(),
        workload,
        submissions: Submissions::default(),
    };
    // An engine that is shut down drops it, as one that ends during the work.
    let _ = lun.session.run(Box::new(work));
    Ok(())
}

struct LunWorkload {
    lun: Lun,
    workload: Box<dyn Workload>,
    /// Empty between calls; kept for its memory.
    submissions: Submissions,
}

impl LunWorkload {
    /// Gives the engine what the workload has submitted. One that cannot be made into a command
    /// completes at once, and its completion may submit more.
    fn forward(&mut self, queue: &mut WorkQueue) {
        while !self.submissions.is_empty() {
            let mut failed = Vec::new();
            for (tag, operation) in self.submissions.drain() {
                match command(&self.lun, operation) {
                    Ok((kind, io)) => queue.submit(u64::from(tag) | kind, io),
                    Err(error) => failed.push((tag, error)),
                }
            }
            for (tag, error) in failed {
                let completion = Err(BlockError::from(error));
                self.workload
                    .complete(tag, completion, &mut self.submissions);
            }
        }
    }

    fn judge(&self, kind: u64, end: IoEnd) -> Completion {
        let result = match kind {
            TRANSFER => Lun::judge(end).map(Some),
            FLUSH => self.lun.judge_flush(end).map(|()| None),
            _ => end
                .result
                .map_err(LunError::from)
                .and_then(|answer| judge(&answer))
                .map(|()| None),
        };
        Ok(result?)
    }
}

/// The command that carries out an operation, with its kind.
fn command(lun: &Lun, operation: Operation) -> Result<(u64, ScsiIo), LunError> {
    match operation {
        Operation::Read { offset, buffer } => Ok((TRANSFER, lun.read_io(offset, buffer)?)),
        Operation::Write {
            offset,
            buffer,
            fua,
        } => Ok((TRANSFER, lun.write_io(offset, buffer, fua)?)),
        Operation::Flush => Ok((FLUSH, lun.flush_io())),
        Operation::Discard(range) => {
            let len = range.end - range.start;
            if len > lun.shared.geometry.max_discard {
                return Err(LunError::OutOfRange);
            }
            Ok((DISCARD, discard(lun, lun.blocks(range.start, len)?)?))
        }
    }
}

/// The UNMAP of a run of blocks, or the WRITE SAME where the unit has no UNMAP.
fn discard(lun: &Lun, run: BlockRange) -> Result<ScsiIo, LunError> {
    let block = lun.shared.geometry.block_size;
    let list = unmap_list(run);
    let len = if lun.unmaps() {
        list.len()
    } else {
        block as usize
    };
    let buffer = lun.buffers().try_take(len).ok_or(LunError::NoMemory)?;
    let command = if lun.unmaps() {
        buffer.slice().write(0, &list);
        Command::unmap(run)
    } else {
        buffer.slice().fill(0, len, 0);
        Command::write_same(run, block, true)
    };
    Ok(lun.io(command, IoData::One(buffer)))
}

impl engine::Workload for LunWorkload {
    fn start(&mut self, queue: &mut WorkQueue) {
        self.wake(queue);
    }

    fn complete(&mut self, token: u64, end: IoEnd, queue: &mut WorkQueue) {
        let tag = token as u32;
        let completion = self.judge(token & !u64::from(u32::MAX), end);
        self.workload
            .complete(tag, completion, &mut self.submissions);
        self.forward(queue);
    }

    fn due(&self) -> Option<Instant> {
        self.workload.due()
    }

    fn wake(&mut self, queue: &mut WorkQueue) {
        self.workload.submit(&mut self.submissions);
        self.forward(queue);
    }
}
