//! An active request: its states, the results of its operations, and the memory for its next ring
//! operation. Without I/O: see [`Driver`](super::Driver).

use std::time::Instant;

use riser_block::{Command, CommandKind};
use riser_memory::MemSlice;
use riser_state::State;

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

/// A storage attached to a driver.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct StoreId(pub(super) usize);

#[cfg(feature = "testing")]
impl StoreId {
    /// Creates an identifier without a driver.
    pub fn test(index: usize) -> Self {
        Self(index)
    }
}

/// An active request. It has at most one operation in the ring at a time.
pub(super) struct Request<E> {
    pub(super) user: u64,
    pub(super) store: StoreId,
    /// Time of submission or of the last progress.
    pub(super) since: Instant,
    pub(super) op: Command,
    pub(super) data: Vec<MemSlice>,
    pub(super) stage: Stage,
    /// Number of bytes completed in the current stage.
    pub(super) done: u64,
    pub(super) state: RequestState,
    pub(super) cancelled: bool,
    /// Error number of a failed write. A flush is in progress to check whether data of other writes
    /// was lost.
    pub(super) failed: Option<i32>,
    /// This flush will report the error again. Other workers must not miss it in the meantime.
    pub(super) is_checking: bool,
    /// Number of times that the descriptor for flushes had been replaced at the start of this
    /// request.
    pub(super) renewals: u32,
    /// Bounce buffer in use, which replaces a part of the caller's memory.
    pub(super) bounce: Option<Bounce>,
    /// It is counted as one of the long changes of the store in a ring.
    pub(super) is_changing: bool,
    /// Position among requests for the same bytes, if required.
    pub(super) turn: Option<Turn>,
    pub(super) intent: Intent,
    pub(super) window: Vec<MemSlice>,
    /// Error of an injected fault, after its delay.
    pub(super) injected: Option<E>,
    /// Maximum number of bytes in a ring operation, reduced by an injected fault.
    pub(super) most: usize,
}

/// State of the record of a change, if the store [records](super::Storage::records_changes) changes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Intent {
    /// The change has not been recorded.
    Unrecorded,
    /// The store returned this number, and will wake the driver.
    Waiting(u64),
    /// The change is active.
    Recorded,
}

/// State of a request, and the event that it is waiting for.
///
/// ```text
///  New ─┬─→ Held, Delayed (injected faults) ─┐
///       └────────────────────────────────────┴─→ Turn ──→ Stalled ──→ Ring
///                                                ↑ (each if required)   │ next operation
///                                                └──────────────────────┤
///  Helper ←─ Status of a file              Flush ←─ last operation ─────┤
///    └───────────────────────────────────────┴──────────────────────────┴─→ Done
/// ```
///
/// Operations that complete synchronously do not enter [`RequestState::Ring`], so any wait can be
/// followed by any later state. A state can be followed by itself: for the next operation in the
/// ring, another wait for its space, or the next piece of a long operation in memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum RequestState {
    /// Accepted, and not started.
    New,
    /// Waiting until an injected fault resumes it.
    Held,
    /// Waiting for the delay of an injected fault, or for other requests between two pieces of a
    /// long operation in memory.
    Delayed { until: Instant },
    /// Waiting for older requests for the same bytes, or until the store has recorded the change.
    Turn,
    /// Waiting for space in the ring or for a bounce buffer.
    Stalled,
    /// Waiting for its operation in the ring.
    Ring,
    /// Waiting for the helper thread.
    Helper,
    /// Waiting for a flush on its behalf.
    Flush,
    /// Completed.
    Done,
}

impl State for RequestState {
    fn may_become(&self, next: &Self) -> bool {
        match self {
            Self::New => !matches!(next, Self::New),
            // Pieces in memory are delayed between each other.
            Self::Held | Self::Delayed { .. } => !matches!(next, Self::New | Self::Held),
            // It has another turn after an operation that the medium does not support. A request
            // that waits for its turn or for space in the ring is not a status request.
            Self::Turn | Self::Stalled | Self::Ring => matches!(
                next,
                Self::Turn | Self::Stalled | Self::Ring | Self::Flush | Self::Done
            ),
            // Always the last operation.
            Self::Helper | Self::Flush => matches!(next, Self::Done),
            Self::Done => false,
        }
    }
}

/// Consequence of an operation on a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Outcome {
    /// This number of bytes was transferred. Continue after them.
    Moved(usize),
    /// The file is shorter than the range, at this offset.
    Truncated(u64),
    /// The operation of the current stage is complete.
    StageDone,
    /// The medium does not support the operation. Continue in another way.
    Unsupported,
    /// The flush on behalf of this and other requests has completed, possibly with an error.
    Flushed(Option<i32>),
    /// A durable write has failed. The error may be due to data of other writes: flush before
    /// completing the request.
    Suspect(i32),
    /// The request has failed.
    Failed(i32),
}

impl<E> Request<E> {
    /// Creates a request. `data` is the caller's memory, and `window` an empty list.
    pub(super) fn new(
        user: u64,
        store: StoreId,
        since: Instant,
        op: Command,
        (data, window): (Vec<MemSlice>, Vec<MemSlice>),
        stage: Stage,
    ) -> Self {
        Self {
            user,
            store,
            since,
            op,
            data,
            stage,
            done: 0,
            state: RequestState::New,
            cancelled: false,
            failed: None,
            is_checking: false,
            renewals: 0,
            bounce: None,
            is_changing: false,
            turn: None,
            intent: Intent::Unrecorded,
            window,
            injected: None,
            most: MAX_OPERATION,
        }
    }

    /// Returns the consequence of an operation. A transfer continues at a whole `block`, so that
    /// other writes can't interleave within it. If it was shorter than that, it continues at a
    /// block of the device, of `least` bytes. Additional bytes will be transferred again without
    /// changes. For exclusive changes, `block` is `least`. `is_suspect` is set if an error may be due
    /// to data of other writes.
    pub(super) fn outcome(
        &self,
        result: Result<usize, i32>,
        (block, least): (usize, usize),
        is_suspect: bool,
    ) -> Outcome {
        match (self.stage, result) {
            (Stage::Transfer | Stage::Fill | Stage::Edges, Ok(moved)) => {
                let unit = if moved < block { least } else { block };
                match moved - moved % unit {
                    0 => Outcome::Truncated(self.op.offset + self.done),
                    moved => Outcome::Moved(moved),
                }
            }
            (Stage::SyncLast, result) => Outcome::Flushed(result.err()),
            (Stage::Punch | Stage::Zero, Ok(_)) => Outcome::StageDone,
            (Stage::Punch | Stage::Zero, Err(libc::EOPNOTSUPP)) => Outcome::Unsupported,
            (Stage::Transfer, Err(errno)) if is_suspect => Outcome::Suspect(errno),
            // This includes a canceled ring operation (ECANCELED), which was aborted and didn't
            // fail.
            (_, Err(errno)) => Outcome::Failed(errno),
            (Stage::Call, Ok(_)) => unreachable!("calls are the helper's"),
        }
    }
}

/// Returns the part of the caller's buffer used by an operation, if this does not require creating a
/// list: either the whole buffer, or a part of its first piece, which is stored in `part`. Returns
/// `None` if a list is required, or if direct I/O is not possible with this memory.
pub(super) fn uncut<'a>(
    op: &Command,
    data: &'a [MemSlice],
    align: Option<Align>,
    part: &'a mut Option<MemSlice>,
) -> Option<&'a [MemSlice]> {
    let (start, len) = (op.buffer_offset, op.len as usize);
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

/// Aligned memory that replaces the caller's memory.
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

/// Sets the next window of a read or write. Returns `None` if it requires a
/// bounce buffer and none is available. Otherwise returns the bounce memory to use, if required.
#[allow(clippy::option_option, reason = "waiting differs from not required")]
pub(super) fn cut_transfer<E>(
    request: &mut Request<E>,
    align: Option<Align>,
    block_size: u32,
    config: DriverConfig,
    idle: impl FnOnce() -> Option<Bounce>,
) -> Option<Option<MemSlice>> {
    let start = request.op.buffer_offset + request.done as usize;
    let left = (request.op.len - request.done) as usize;
    let mut bounds = Bounds {
        pieces: config.pieces,
        bytes: request.most,
        block: block_size as usize,
        within: (request.done % u64::from(block_size)) as usize,
    };
    let out = &mut request.window;
    let window = plan::cut_window(&request.data, start, left, align, bounds, out);
    if window.aligned {
        return Some(None);
    }
    let bounce = idle()?;
    // Set the window again, because it must fit in the bounce buffer.
    bounds.bytes = config.bounce.min(request.most);
    let window = plan::cut_window(&request.data, start, left, align, bounds, out);
    let slice = bounce.first(window.len);
    request.bounce = Some(bounce);
    // For a read, the data is copied on completion.
    if request.op.kind == CommandKind::Write {
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

#[cfg(test)]
mod tests {
    use riser_state::testing::table;

    use super::*;

    fn states() -> [RequestState; 9] {
        use RequestState::*;

        let delayed = Delayed {
            until: Instant::now(),
        };
        [New, Held, delayed, Turn, Stalled, Ring, Helper, Flush, Done]
    }

    #[test]
    fn transition_table_matches_diagram() {
        let expected = "New: Held Delayed Turn Stalled Ring Helper Flush Done\n\
                        Held: Delayed Turn Stalled Ring Helper Flush Done\n\
                        Delayed: Delayed Turn Stalled Ring Helper Flush Done\n\
                        Turn: Turn Stalled Ring Flush Done\n\
                        Stalled: Turn Stalled Ring Flush Done\n\
                        Ring: Turn Stalled Ring Flush Done\n\
                        Helper: Done\n\
                        Flush: Done\n\
                        Done: \n";
        assert_eq!(table(&states()), expected);
    }

    fn request(kind: CommandKind, stage: Stage) -> Request<()> {
        let op = Command::new(kind, 8192, 8192);
        let lists = (Vec::new(), Vec::new());
        Request::new(1, StoreId(0), Instant::now(), op, lists, stage)
    }

    #[test]
    fn short_transfer_continues_at_whole_block() {
        let mut request = request(CommandKind::Read, Stage::Transfer);
        let outcome = |request: &Request<()>, moved| request.outcome(Ok(moved), (4096, 512), false);
        assert_eq!(outcome(&request, 8192), Outcome::Moved(8192));
        assert_eq!(outcome(&request, 5000), Outcome::Moved(4096));
        // Less than a block of the unit: at least whole blocks of the device.
        assert_eq!(outcome(&request, 1600), Outcome::Moved(1536));
        assert_eq!(outcome(&request, 511), Outcome::Truncated(8192));
        request.done = 4096;
        assert_eq!(outcome(&request, 0), Outcome::Truncated(12288));
    }

    #[test]
    fn unsupported_operations_are_replaced() {
        let (unmap, fast) = (true, false);
        let zero = CommandKind::WriteZeroes { unmap, fast };
        for stage in [Stage::Punch, Stage::Zero] {
            let request = request(zero, stage);
            let outcome = |result| request.outcome(result, (512, 512), false);
            assert_eq!(outcome(Err(libc::EOPNOTSUPP)), Outcome::Unsupported);
            assert_eq!(outcome(Err(libc::EIO)), Outcome::Failed(libc::EIO));
            assert_eq!(outcome(Ok(0)), Outcome::StageDone);
        }
        let fill = request(zero, Stage::Fill);
        let outcome = fill.outcome(Err(libc::EOPNOTSUPP), (512, 512), false);
        assert_eq!(outcome, Outcome::Failed(libc::EOPNOTSUPP));
    }

    #[test]
    fn suspect_write_error_requires_flush() {
        let write = request(CommandKind::Write, Stage::Transfer);
        let outcome = |is_suspect| write.outcome(Err(libc::EIO), (512, 512), is_suspect);
        assert_eq!(outcome(true), Outcome::Suspect(libc::EIO));
        assert_eq!(outcome(false), Outcome::Failed(libc::EIO));
        let flush = request(CommandKind::Flush, Stage::SyncLast);
        let outcome = flush.outcome(Err(libc::EIO), (512, 512), true);
        assert_eq!(outcome, Outcome::Flushed(Some(libc::EIO)));
    }
}
