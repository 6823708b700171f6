//! A block command under way, and the memory that its next ring operation moves.

use std::time::Instant;

use riser_memory::MemSlice;
use riser_scsi::step::{BackendError, BlockOp};

use super::plan::{self, Bounds, Stage};
use super::sys::Align;
use super::turns::Turn;

/// Bytes of one ring operation at most.
pub(super) const MAX_OPERATION: usize = 1 << 30;

/// Sizes of a driver, fixed when it is made.
#[derive(Debug, Clone, Copy)]
pub struct DriverConfig {
    /// The top byte of every ring token of this driver, by which the worker knows its completions.
    pub tag: u8,
    /// Requests in flight at most.
    pub depth: usize,
    /// Pieces of one ring operation at most; the ring's own bound holds as well.
    pub pieces: usize,
    /// Bytes of one bounce buffer; a multiple of 4096.
    pub bounce: usize,
    /// Number of bounce buffers that all stores share. A store that finds none idle has one of its
    /// own; requests that find that in use as well wait.
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
    /// Names a store of no driver.
    pub(crate) fn test(index: usize) -> Self {
        Self(index)
    }
}

/// A block command under way. It has at most one operation in the ring at a time.
pub(super) struct BlockCommand {
    pub(super) user: u64,
    pub(super) store: StoreId,
    /// Time of its submission, or its last progress.
    pub(super) since: Instant,
    pub(super) op: BlockOp,
    pub(super) data: Vec<MemSlice>,
    pub(super) stage: Stage,
    /// Bytes of the range that are finished within the stage.
    pub(super) done: u64,
    pub(super) state: State,
    pub(super) cancelled: bool,
    /// Its write failed with this number, and a flush says whether others have lost data.
    pub(super) failed: Option<i32>,
    /// How often the descriptor for flushes had been replaced when it began.
    pub(super) renewals: u32,
    /// The bounce buffer in use, and the part of the command's memory in whose place it is.
    pub(super) bounce: Option<Bounce>,
    /// It counts among the store's long changes in a ring.
    pub(super) is_changing: bool,
    /// Its place among the requests for the same bytes, where it needs one.
    pub(super) turn: Option<Turn>,
    pub(super) window: Vec<MemSlice>,
}

/// State of a block command, by what it waits for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum State {
    /// For its operation in the ring.
    Ring,
    /// For the helper thread.
    Helper,
    /// For a flush that serves it.
    Flush,
    /// For room in the ring, or a bounce buffer: in `stalled`.
    Stalled,
    /// For the time of a fault on purpose to come: in `delayed`.
    Delayed {
        until: Instant,
        error: Option<BackendError>,
    },
    /// For a fault on purpose to let it go: in `delayed`.
    Held,
    /// For older requests of the same bytes: in `delayed`.
    Turn,
}

/// The part of the command's buffer that an operation moves: start and length.
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

/// The part of a command's buffer that an operation moves, where that needs no list of its own: all
/// of the buffer, or what lies in its first piece, which is put into `part`. `None` where it needs
/// one, or direct I/O cannot use the memory as it lies.
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

/// Aligned memory in the place of a command's.
#[derive(Debug)]
pub(super) struct Bounce {
    pub(super) memory: MemSlice,
    /// It is one of those that all stores share.
    pub(super) is_shared: bool,
}

impl Bounce {
    /// Its first `len` bytes.
    pub(super) fn first(&self, len: usize) -> MemSlice {
        let first = self.memory.slice(0..len);
        first.expect("a window no longer than a bounce buffer")
    }
}

/// Cuts the next window of a read or write, of `most` bytes at most. `None` where it needs a bounce
/// buffer and none is idle; otherwise the bounce memory to use, or nothing where the request's own
/// memory will do.
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
    // Cut once more: the window must fit into the bounce buffer.
    bounds.bytes = config.bounce.min(most);
    let window = plan::cut_window(&request.data, start, left, align, bounds, out);
    let slice = bounce.first(window.len);
    request.bounce = Some(bounce);
    // Data of a read are copied when they have come.
    if let BlockOp::Write { .. } = request.op {
        plan::copy_pieces(out, &slice, true);
    }
    Some(Some(slice))
}

/// A list that names the same zeroes again and again.
pub(super) fn fill_window(zeroes: &MemSlice, mut len: u64, out: &mut Vec<MemSlice>) {
    out.clear();
    while len > 0 {
        let take = len.min(zeroes.len() as u64);
        out.extend(zeroes.slice(0..take as usize));
        len -= take;
    }
}
