//! Operations on media that are not files. They are executed synchronously.

use riser_block::{Command, CommandKind};
use riser_file::cut_buffer;
use riser_memory::MemSlice;
use riser_scsi::step::{Allocation, BackendError};

use super::medium::Medium;

/// Maximum number of bytes of a RAM disk to zero or free in a single step, before serving other
/// requests.
const RAM_PIECE: u64 = 4 << 20;

/// Allocation of the blocks at the start of a range, and the number of bytes with this state.
pub(super) type Extent = (Allocation, u64);

impl Medium {
    /// Executes a command that consists of whole blocks: see
    /// [`Storage::execute`](riser_file::Storage::execute).
    ///
    /// # Panics
    /// Panics if the medium is a file.
    pub(super) fn execute(
        &self,
        op: &Command,
        block_size: u64,
        done: &mut u64,
        data: &[MemSlice],
        window: &mut Vec<MemSlice>,
    ) -> Option<Result<Option<Extent>, BackendError>> {
        Some(Ok(match (self, op.kind) {
            (Self::File(_), _) => unreachable!("a file's commands are put into the ring"),
            (Self::Ram(ram), CommandKind::Read | CommandKind::Write) => {
                cut_buffer(op, data, window);
                match op.kind {
                    CommandKind::Read => ram.read(op.offset, block_size, window),
                    _ => ram.write(op.offset, block_size, window),
                }
                None
            }
            (Self::Ram(ram), CommandKind::Status) => {
                Some(ram.status(op.offset, block_size, op.len))
            }
            (Self::Ram(ram), CommandKind::Discard { .. } | CommandKind::WriteZeroes { .. }) => {
                // A single UNMAP or WRITE SAME may include the whole disk, and this thread serves
                // all sessions of the worker.
                let most = RAM_PIECE - RAM_PIECE % block_size;
                let (at, piece) = (op.offset + *done, (op.len - *done).min(most));
                match op.kind {
                    // Without UNMAP, the initiator requires the blocks to remain allocated, so keep
                    // the chunks and fill them with zeroes.
                    CommandKind::WriteZeroes { unmap: false, .. } => {
                        ram.zero(at, block_size, piece);
                    }
                    _ => ram.discard(at, block_size, piece),
                }
                *done += piece;
                if *done < op.len {
                    return None;
                }
                None
            }
            // There are no previous writes.
            (Self::Ram(_) | Self::Absent, CommandKind::Flush) => None,
            (Self::Absent, _) => return Some(Err(BackendError::NotReady)),
            (Self::Null, CommandKind::Status) => Some((Allocation::Deallocated, op.len)),
            (Self::Null, CommandKind::Read) => {
                // The buffer may contain data of another initiator.
                cut_buffer(op, data, window);
                window
                    .iter()
                    .for_each(|piece| piece.fill(0, piece.len(), 0));
                None
            }
            (Self::Null, _) => None,
        }))
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::super::ram::Ram;
    use super::*;

    #[test]
    fn long_discard_is_executed_in_pieces() {
        let medium = Medium::Ram(Arc::new(Ram::default()));
        let kind = CommandKind::Discard { zeroes: true };
        let op = Command::new(kind, 0, 2 * RAM_PIECE + 512);
        let mut done = 0;
        for piece in [RAM_PIECE, 2 * RAM_PIECE] {
            assert_eq!(
                medium.execute(&op, 512, &mut done, &[], &mut Vec::new()),
                None
            );
            assert_eq!(done, piece);
        }
        let last = medium.execute(&op, 512, &mut done, &[], &mut Vec::new());
        assert_eq!(last, Some(Ok(None)));
    }

    #[test]
    fn absent_medium_only_flushes() {
        let execute = |kind| {
            let op = Command::new(kind, 0, 512);
            Medium::Absent.execute(&op, 512, &mut 0, &[], &mut Vec::new())
        };
        assert_eq!(execute(CommandKind::Flush), Some(Ok(None)));
        let missing = Some(Err(BackendError::NotReady));
        assert_eq!(execute(CommandKind::Status), missing);
    }
}
