//! Operations on media that are not files. They are executed synchronously.

use riser_memory::MemSlice;
use riser_scsi::step::{Allocation, BackendError, BlockOp, StepResult};

use super::medium::Medium;
use super::plan;
use super::ram::Ram;

/// Maximum number of bytes of a RAM disk to zero or free in a single step, before serving other
/// requests.
const RAM_PIECE: u64 = 4 << 20;

/// Progress of a synchronous operation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Progress {
    /// The operation is complete.
    Done(StepResult),
    /// This number of bytes is complete. Continue later, because the whole range would take too
    /// long.
    Partial(u64),
}

impl Medium {
    /// Returns whether an operation accesses the memory of the command.
    pub(super) fn needs_memory(&self, op: &BlockOp) -> bool {
        match self {
            Self::Ram(_) => matches!(op, BlockOp::Read { .. } | BlockOp::Write { .. }),
            // The buffer may contain data of another initiator, so it is filled with zeroes.
            Self::Null => matches!(op, BlockOp::Read { .. }),
            Self::File { .. } | Self::Absent => false,
        }
    }

    /// Executes an operation after its first `done` bytes. `memory` is the command's memory if it
    /// [is needed](Self::needs_memory).
    ///
    /// # Panics
    /// Panics if the medium is a file.
    pub(super) fn execute(&self, op: &BlockOp, done: u64, memory: &[MemSlice]) -> Progress {
        match self {
            Self::File { .. } => unreachable!("a file's operations are put into the ring"),
            Self::Ram(ram) => execute_in_memory(ram, op, done, memory),
            Self::Absent => Progress::Done(match op {
                // There are no previous writes.
                BlockOp::Flush { .. } => StepResult::Done,
                _ => StepResult::Failed(BackendError::NotReady),
            }),
            Self::Null => {
                for piece in memory {
                    piece.fill(0, piece.len(), 0);
                }
                Progress::Done(match *op {
                    BlockOp::Status { len, .. } => StepResult::Status {
                        allocation: Allocation::Deallocated,
                        len,
                    },
                    _ => StepResult::Done,
                })
            }
        }
    }
}

fn execute_in_memory(ram: &Ram, op: &BlockOp, done: u64, memory: &[MemSlice]) -> Progress {
    let (offset, len) = plan::range(op);
    match op {
        BlockOp::Read { .. } => ram.read(offset, memory),
        BlockOp::Write { .. } => ram.write(offset, memory),
        BlockOp::Discard { .. } | BlockOp::WriteZeroes { .. } => {
            // A single UNMAP or WRITE SAME may include the whole disk, and this thread serves all
            // sessions of the worker.
            let piece = (len - done).min(RAM_PIECE);
            match op {
                // Without UNMAP, the initiator requires the blocks to remain allocated, so keep the
                // chunks and fill them with zeroes.
                BlockOp::WriteZeroes { unmap: false, .. } => ram.zero(offset + done, piece),
                _ => ram.discard(offset + done, piece),
            }
            if done + piece < len {
                return Progress::Partial(done + piece);
            }
        }
        BlockOp::Status { .. } => {
            let (allocation, len) = ram.status(offset, len);
            return Progress::Done(StepResult::Status { allocation, len });
        }
        BlockOp::Flush { .. } | BlockOp::ChangeReservations(_) => {}
    }
    Progress::Done(StepResult::Done)
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;

    #[test]
    fn long_discard_is_executed_in_pieces() {
        let medium = Medium::Ram(Arc::new(Ram::default()));
        let (offset, len) = (0, 2 * RAM_PIECE + 512);
        let op = BlockOp::Discard { offset, len };
        let mut done = 0;
        for piece in [RAM_PIECE, 2 * RAM_PIECE] {
            assert_eq!(medium.execute(&op, done, &[]), Progress::Partial(piece));
            done = piece;
        }
        let last = medium.execute(&op, done, &[]);
        assert_eq!(last, Progress::Done(StepResult::Done));
    }

    #[test]
    fn absent_medium_only_flushes() {
        let flush = BlockOp::Flush { offset: 0, len: 0 };
        let status = BlockOp::Status {
            offset: 0,
            len: 512,
        };
        let execute = |op| Medium::Absent.execute(op, 0, &[]);
        assert_eq!(execute(&flush), Progress::Done(StepResult::Done));
        let missing = StepResult::Failed(BackendError::NotReady);
        assert_eq!(execute(&status), Progress::Done(missing));
    }
}
