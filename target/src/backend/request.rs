//! An active block command, and the memory for its next ring operation.

use std::time::Instant;

use riser_memory::MemSlice;
use riser_scsi::step::{BackendError, BlockOp};

use super::plan::{self, Bounds, Stage};
use super::sys::Align;
use super::turns::Turn;

/// Maximum number of bytes in a ring operation.
pub(super) const MAX_OPERATION: usize = 1 << 30;

/// Sizes of a driver, fixed when it is created.
#[derive(Debug, Clone, Copy)]
pub struct DriverConfig {
    /// Top byte of all ring tokens of this driver, used by the worker to identify its completions.
    pub tag: u8,
    /// Maximum number of requests in flight.
    pub depth: usize,
    /// Maximum number of pieces in a ring operation. The limit of the ring applies as well.
    pub pieces: usize,
    /// Size of a bounce buffer in bytes, a multiple of 4096.
    pub bounce: usize,
    /// Number of bounce buffers shared by all stores. If none of these is available, a store uses
    /// its own buffer. If that buffer is in use as well, the request waits.
    pub bounces: usize,
}

impl Default for DriverConfig {
    fn default() -> Self {
        Self {
            tag: 1,
            depth: 256,
            pieces: 256,
            bounce: 128 << 10,
            bounces: 4,
        }
    }
}

/// A store attached to a driver.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct StoreId(pub(super) usize);

#[cfg(test)]
impl StoreId {
    /// Creates an identifier without a driver.
    pub(crate) fn test(index: usize) -> Self {
        Self(index)
    }
}

/// An active block command. It has at most one operation in the ring at a time.
pub(super) struct BlockCommand {
    pub(super) user: u64,
    pub(super) store: StoreId,
    /// Time of submission or of the last progress.
    pub(super) since: Instant,
    pub(super) op: BlockOp,
    pub(super) data: Vec<MemSlice>,
    pub(super) stage: Stage,
    /// Number of bytes completed in the current stage.
    pub(super) done: u64,
    pub(super) state: State,
    pub(super) cancelled: bool,
    /// Error number of a failed write. A flush is in progress to check whether data of other writes
    /// was lost.
    pub(super) failed: Option<i32>,
    /// Number of times that the descriptor for flushes had been replaced at the start of this
    /// command.
    pub(super) renewals: u32,
    /// Bounce buffer in use, which replaces a part of the command's memory.
    pub(super) bounce: Option<Bounce>,
    /// It is counted as one of the long changes of the store in a ring.
    pub(super) is_changing: bool,
    /// Position among requests for the same bytes, if required.
    pub(super) turn: Option<Turn>,
    pub(super) window: Vec<MemSlice>,
}

/// State of a block command, which determines what it waits for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum State {
    /// Waiting for its operation in the ring.
    Ring,
    /// Waiting for the helper thread.
    Helper,
    /// Waiting for a flush on its behalf.
    Flush,
    /// Waiting for space in the ring or for a bounce buffer: in `stalled`.
    Stalled,
    /// Waiting for the delay of an injected fault: in `delayed`.
    Delayed {
        until: Instant,
        error: Option<BackendError>,
    },
    /// Waiting until an injected fault resumes it: in `delayed`.
    Held,
    /// Waiting for older requests for the same bytes: in `delayed`.
    Turn,
}

/// Returns the part of the command's buffer used by an operation: start and length.
pub(super) fn buffer_range(op: &BlockOp) -> (usize, usize) {
    match *op {
        BlockOp::Read {
            len, buffer_offset, ..
        }
        | BlockOp::Write {
            len, buffer_offset, ..
        } => (buffer_offset as usize, len as usize),
        _ => (0, 0),
    }
}

/// Returns the part of a command's buffer used by an operation, if this does not require creating a
/// list: either the whole buffer, or a part of its first piece, which is stored in `part`. Returns
/// `None` if a list is required, or if direct I/O is not possible with this memory.
pub(super) fn uncut<'a>(
    op: &BlockOp,
    data: &'a [MemSlice],
    align: Option<Align>,
    part: &'a mut Option<MemSlice>,
) -> Option<&'a [MemSlice]> {
    let (start, len) = buffer_range(op);
    let is_whole = start == 0 && data.iter().map(MemSlice::len).sum::<usize>() == len;
    let list = if is_whole {
        data
    } else {
        let first = data.first()?.slice(start..start + len)?;
        std::slice::from_ref(part.insert(first))
    };
    let fits = |piece: &MemSlice| {
        align.is_none_or(|align| {
            piece.addr().is_multiple_of(align.memory.into())
                && piece.len().is_multiple_of(align.offset as usize)
        })
    };
    list.iter().all(fits).then_some(list)
}

/// Aligned memory that replaces a command's memory.
#[derive(Debug)]
pub(super) struct Bounce {
    pub(super) memory: MemSlice,
    /// It is one of the buffers shared by all stores.
    pub(super) is_shared: bool,
}

impl Bounce {
    /// Returns the first `len` bytes.
    pub(super) fn first(&self, len: usize) -> MemSlice {
        let first = self.memory.slice(0..len);
        first.expect("a window no longer than a bounce buffer")
    }
}

/// Sets the next window of a read or write, up to `most` bytes. Returns `None` if it requires a
/// bounce buffer and none is available. Otherwise returns the bounce memory to use, if required.
#[allow(
    clippy::option_option,
    reason = "waiting and not needing are different answers"
)]
pub(super) fn cut_transfer(
    request: &mut BlockCommand,
    align: Option<Align>,
    (config, most): (DriverConfig, usize),
    idle: impl FnOnce() -> Option<Bounce>,
) -> Option<Option<MemSlice>> {
    let (start, len) = buffer_range(&request.op);
    let (start, left) = (start + request.done as usize, len - request.done as usize);
    let mut bounds = Bounds {
        pieces: config.pieces,
        bytes: MAX_OPERATION.min(most),
    };
    let out = &mut request.window;
    let window = plan::cut_window(&request.data, start, left, align, bounds, out);
    if window.aligned {
        return Some(None);
    }
    let bounce = idle()?;
    // Set the window again, because it must fit in the bounce buffer.
    bounds.bytes = config.bounce.min(most);
    let window = plan::cut_window(&request.data, start, left, align, bounds, out);
    let slice = bounce.first(window.len);
    request.bounce = Some(bounce);
    // For a read, the data is copied on completion.
    if let BlockOp::Write { .. } = request.op {
        plan::copy_pieces(out, &slice, true);
    }
    Some(Some(slice))
}

/// Creates a list that repeats the same zeroes.
pub(super) fn fill_window(zeroes: &MemSlice, mut len: u64, out: &mut Vec<MemSlice>) {
    out.clear();
    while len > 0 {
        let take = len.min(zeroes.len() as u64);
        out.extend(zeroes.slice(0..take as usize));
        len -= take;
    }
}
