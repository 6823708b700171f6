//! The steps of a request in the ring. Pure: no I/O, no clock.

use std::ops::Range;

use riser_memory::MemSlice;
use riser_scsi::step::BlockOp;

use super::sys::Align;

/// The worker keeps such operations to itself.
const NOT_OF_THE_MEDIUM: &str = "a change of reservations is no operation on the medium";

/// The bytes of the medium an operation is about: offset and length.
pub(super) fn range(op: &BlockOp) -> (u64, u64) {
    match *op {
        BlockOp::Read { offset, len, .. } | BlockOp::Write { offset, len, .. } => {
            (offset, u64::from(len))
        }
        BlockOp::Flush { offset, len }
        | BlockOp::Discard { offset, len }
        | BlockOp::WriteZeroes { offset, len, .. }
        | BlockOp::Status { offset, len } => (offset, len),
        BlockOp::ChangeReservations(_) => unreachable!("{NOT_OF_THE_MEDIUM}"),
    }
}

/// Returns the name of an operation in the log.
pub(super) fn name(op: &BlockOp) -> &'static str {
    match op {
        BlockOp::Read { .. } => "read",
        BlockOp::Write { .. } => "write",
        BlockOp::Flush { .. } => "flush",
        BlockOp::Discard { .. } => "discard",
        BlockOp::WriteZeroes { .. } => "write zeroes",
        BlockOp::Status { .. } => "block status",
        BlockOp::ChangeReservations(_) => unreachable!("{NOT_OF_THE_MEDIUM}"),
    }
}

/// Stage of a request. Reads and writes move the data window by window; everything else is one
/// call, perhaps with another before or after it.
///
/// ```text
/// Read   ─→ Transfer ─(fua, cache)→ SyncLast ─→ done
/// Write  ─→ Transfer ─→ done
/// Flush  ─→ SyncLast ─→ done
/// Discard ─→ Punch ─→ SyncLast → done
/// WriteZeroes ─(unmap)→ Punch ─(unsupported)→ Zero ─(unsupported)→ Fill ─→ SyncLast → done
///               └─ else Zero …    └──────────────┴─(not whole units)→ Edges ─┘
/// Status ─→ Extent → done
/// ```
/// A device frees and zeroes whole logical blocks of its own, which may be larger than the unit's:
/// of a range that is no multiple of them, `Punch` and `Zero` take the whole ones inside. What is
/// left at the edges is written if it must be zero, and stays as it is if it was only to be freed.
///
/// A discard writes nothing: where no hole can be punched, the blocks stay mapped (SBC-3 5.28), since
/// an UNMAP of a few bytes would otherwise write gigabytes that no limit of the unit has counted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Stage {
    /// Moves data between buffer and medium.
    Transfer,
    /// Frees the range by a punched hole.
    Punch,
    /// Zeroes the range with the space kept.
    Zero,
    /// Writes zeroes, where the medium knows no better way.
    Fill,
    /// Writes zeroes before and behind the medium's whole units.
    Edges,
    /// Makes what was done durable.
    SyncLast,
    /// Asks for the state of an extent.
    Extent,
}

/// Operations that the medium does not support.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Lacks {
    pub(super) punch: bool,
    pub(super) zero: bool,
}

/// Returns the first stage of a request.
pub(super) fn first_stage(op: &BlockOp, lacks: Lacks) -> Stage {
    match op {
        BlockOp::Read { .. } | BlockOp::Write { .. } => Stage::Transfer,
        BlockOp::Flush { .. } => Stage::SyncLast,
        BlockOp::Discard { .. } => Stage::Punch,
        // UNMAP is permission to free blocks, and frees the space that a thin file would otherwise
        // keep.
        BlockOp::WriteZeroes { unmap: true, .. } if !lacks.punch => Stage::Punch,
        BlockOp::WriteZeroes { .. } if !lacks.zero => Stage::Zero,
        BlockOp::WriteZeroes { .. } => Stage::Fill,
        BlockOp::Status { .. } => Stage::Extent,
        BlockOp::ChangeReservations(_) => unreachable!("{NOT_OF_THE_MEDIUM}"),
    }
}

/// The next bytes of a stage, after `done` of them: where they begin, and how many follow in one
/// piece. `unit` is what the medium frees and zeroes at least, in bytes.
pub(super) fn piece(op: &BlockOp, stage: Stage, unit: u64, done: u64) -> (u64, u64) {
    let (start, len) = range(op);
    let end = start + len;
    let (first, last) = whole_units(start, end, unit);
    match stage {
        Stage::Punch | Stage::Zero => (first + done, last - first - done),
        Stage::Edges if done < first - start => (start + done, first - start - done),
        Stage::Edges => {
            let done = done - (first - start);
            (last + done, end - last - done)
        }
        _ => (start + done, len - done),
    }
}

/// The piece of a range to fill with zeroes that the next byte is in. Pieces of `most` bytes take
/// turns with reads, which must not wait for a range of gigabytes.
pub(super) fn fill_piece(op: &BlockOp, done: u64, most: u64) -> Range<u64> {
    let (start, len) = range(op);
    let begin = start + done - done % most;
    begin..(begin + most).min(start + len)
}

/// The part of a range that is whole units; empty at its end where there is none.
fn whole_units(start: u64, end: u64, unit: u64) -> (u64, u64) {
    let (first, last) = (start.next_multiple_of(unit), end - end % unit);
    if first < last {
        (first, last)
    } else {
        // At the end, so that all of the range lies before it and is written as an edge.
        (end, end)
    }
}

/// Returns the stage after one that is wholly done; `None` where the request is. `volatile` says that
/// completed writes may still be in a cache.
pub(super) fn next_stage(op: &BlockOp, stage: Stage, volatile: bool) -> Option<Stage> {
    match stage {
        // FUA of a read asks for the data on the medium (SBC-3 5.10), so what was read goes there.
        Stage::Transfer if volatile && matches!(op, BlockOp::Read { fua: true, .. }) => {
            Some(Stage::SyncLast)
        }
        Stage::Transfer | Stage::SyncLast | Stage::Extent => None,
        // A discard may leave the edges as they are; what was to be zero must be zero to the last
        // byte.
        Stage::Punch | Stage::Zero if matches!(op, BlockOp::WriteZeroes { .. }) => {
            Some(Stage::Edges)
        }
        Stage::Punch | Stage::Zero | Stage::Fill | Stage::Edges => {
            let fua = matches!(op, BlockOp::WriteZeroes { fua: true, .. });
            (fua || !volatile).then_some(Stage::SyncLast)
        }
    }
}

/// Returns true if the writes of an operation must be durable when they complete.
pub(super) fn is_durable(op: &BlockOp, volatile: bool) -> bool {
    !volatile || matches!(op, BlockOp::Write { fua: true, .. })
}

/// Whether an operation is a write that is on stable storage when it is done, so that its descriptor
/// may report lost write-backs.
pub(super) fn is_durable_write(op: &BlockOp, volatile: bool) -> bool {
    matches!(op, BlockOp::Write { .. }) && is_durable(op, volatile)
}

/// Bounds of one ring operation.
#[derive(Debug, Clone, Copy)]
pub(super) struct Bounds {
    /// Number of pieces at most.
    pub(super) pieces: usize,
    /// Bytes at most; a multiple of 4096.
    pub(super) bytes: usize,
}

/// A part of a request's buffer that one ring operation moves.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Window {
    /// Length of the part in bytes.
    pub(super) len: usize,
    /// Direct I/O can use the memory as it lies.
    pub(super) aligned: bool,
}

/// Cuts the next window, from `start` bytes into the buffer and at most `len` long, into `out`.
///
/// With an alignment, the window's length is a multiple of the device's block as long as `len` is.
///
/// # Panics
/// If the buffer ends before `start + len`: the logical unit promised otherwise.
pub(super) fn cut_window(
    buffer: &[MemSlice],
    start: usize,
    len: usize,
    align: Option<Align>,
    bounds: Bounds,
    out: &mut Vec<MemSlice>,
) -> Window {
    out.clear();
    let want = len.min(bounds.bytes);
    let mut skip = start;
    let mut got = 0;
    let mut aligned = true;
    // Pieces so small that the bound on their number comes before one whole block are copied
    // through a bounce buffer, so then the bound does not matter.
    let least = align.map_or(1, |a| a.offset as usize);
    for piece in buffer {
        if got == want || (out.len() >= bounds.pieces && got >= least) {
            break;
        }
        if skip >= piece.len() {
            skip -= piece.len();
            continue;
        }
        let take = (piece.len() - skip).min(want - got);
        let part = piece
            .slice(skip..skip + take)
            .expect("cut within the piece");
        skip = 0;
        got += take;
        if let Some(a) = align {
            aligned &= part.addr() % u64::from(a.memory) == 0;
            aligned &= take.is_multiple_of(a.offset as usize);
        }
        out.push(part);
    }
    assert!(
        got == want || out.len() >= bounds.pieces,
        "a buffer shorter than its operation"
    );
    if let Some(a) = align {
        // Too many small pieces: the tail that is no whole block waits for the next window.
        let whole = got - got % a.offset as usize;
        assert!(whole > 0, "an operation that is not in whole blocks");
        trim(out, got - whole);
        got = whole;
    }
    Window { len: got, aligned }
}

/// Takes `excess` bytes off the end.
fn trim(list: &mut Vec<MemSlice>, mut excess: usize) {
    while excess > 0 {
        let last = list.pop().expect("less excess than bytes");
        if last.len() > excess {
            let keep = last.len() - excess;
            list.push(last.slice(0..keep).expect("shorter than it was"));
            return;
        }
        excess -= last.len();
    }
}

/// Copies between a window's pieces and bounce memory.
pub(super) fn copy_pieces(pieces: &[MemSlice], bounce: &MemSlice, into_bounce: bool) {
    let mut at = 0;
    for p in pieces {
        let (from, from_at, to, to_at) = if into_bounce {
            (
                p.memory(),
                p.offset(),
                bounce.memory(),
                bounce.offset() + at,
            )
        } else {
            (
                bounce.memory(),
                bounce.offset() + at,
                p.memory(),
                p.offset(),
            )
        };
        riser_memory::Memory::copy(from, from_at, to, to_at, p.len());
        at += p.len();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use riser_memory::Memory;

    const ALIGN: Option<Align> = Some(Align {
        memory: 512,
        offset: 512,
    });

    #[test]
    fn requests_go_through_the_stages_their_durability_needs() {
        let read = BlockOp::Read {
            offset: 0,
            len: 512,
            buffer_offset: 0,
            fua: true,
        };
        assert_eq!(first_stage(&read, Lacks::default()), Stage::Transfer);
        assert_eq!(
            next_stage(&read, Stage::Transfer, true),
            Some(Stage::SyncLast)
        );
        assert_eq!(next_stage(&read, Stage::Transfer, false), None);
        let zero = |unmap, fua| BlockOp::WriteZeroes {
            offset: 0,
            len: 512,
            unmap,
            fua,
        };
        assert_eq!(
            first_stage(&zero(true, false), Lacks::default()),
            Stage::Punch
        );
        assert_eq!(
            first_stage(&zero(false, false), Lacks::default()),
            Stage::Zero
        );
        let nothing = Lacks {
            punch: true,
            zero: true,
        };
        assert_eq!(first_stage(&zero(true, false), nothing), Stage::Fill);
        let no_holes = Lacks {
            punch: true,
            zero: false,
        };
        assert_eq!(first_stage(&zero(true, false), no_holes), Stage::Zero);
        let edges = next_stage(&zero(true, false), Stage::Punch, true);
        assert_eq!(edges, Some(Stage::Edges));
        assert_eq!(next_stage(&zero(true, false), Stage::Edges, true), None);
        assert_eq!(
            next_stage(&zero(true, true), Stage::Edges, true),
            Some(Stage::SyncLast)
        );
        let discard = BlockOp::Discard {
            offset: 0,
            len: 512,
        };
        assert_eq!(
            next_stage(&discard, Stage::Punch, false),
            Some(Stage::SyncLast)
        );
    }

    #[test]
    fn whole_units_are_zeroed_and_the_edges_written() {
        let zero = |offset, len| BlockOp::WriteZeroes {
            offset,
            len,
            unmap: false,
            fua: false,
        };
        // Each piece of both stages, in order.
        let pieces = |op, unit| {
            let mut pieces = Vec::new();
            for stage in [Stage::Zero, Stage::Edges] {
                let mut done = 0;
                loop {
                    let (at, len) = piece(&op, stage, unit, done);
                    if len == 0 {
                        break;
                    }
                    pieces.push((stage, at, len));
                    done += len;
                }
            }
            pieces
        };
        let (zeroed, written) = (Stage::Zero, Stage::Edges);
        assert_eq!(pieces(zero(512, 1024), 1), [(zeroed, 512, 1024)]);
        assert_eq!(pieces(zero(4096, 8192), 4096), [(zeroed, 4096, 8192)]);
        assert_eq!(pieces(zero(512, 512), 4096), [(written, 512, 512)]);
        assert_eq!(
            pieces(zero(3584, 9216), 4096),
            [
                (zeroed, 4096, 8192),
                (written, 3584, 512),
                (written, 12288, 512)
            ]
        );
        assert_eq!(
            pieces(zero(3584, 1024), 4096),
            [(written, 3584, 1024)],
            "over a border without a whole unit"
        );
    }

    #[test]
    fn a_window_of_odd_pieces_is_cut_to_whole_blocks() {
        let m = Memory::new(8192).unwrap();
        let list: Vec<_> = (0..8)
            .map(|i| m.slice(i * 1000..i * 1000 + 300).unwrap())
            .collect();
        let mut out = Vec::new();
        let bounds = Bounds {
            pieces: 2,
            bytes: 4096,
        };
        let w = cut_window(&list, 0, 2048, ALIGN, bounds, &mut out);
        assert_eq!(
            w,
            Window {
                len: 512,
                aligned: false
            }
        );
        assert_eq!(
            out.iter().map(MemSlice::len).collect::<Vec<_>>(),
            [300, 212]
        );
        let w = cut_window(&list, 512, 2048 - 512, None, bounds, &mut out);
        assert_eq!(w.len, 88 + 300);
    }

    proptest! {
        #[test]
        fn windows_tile_the_buffer(
            lens in prop::collection::vec(1usize..3000, 1..20),
            pieces in 1usize..5,
            start in 0usize..1000,
        ) {
            let m = Memory::new(65536).unwrap();
            let mut at = 0;
            let list: Vec<_> = lens.iter().map(|&l| { at += l; m.slice(at - l..at).unwrap() }).collect();
            let total = at;
            prop_assume!(start < total);
            let bounds = Bounds { pieces, bytes: 4096 };
            let mut out = Vec::new();
            let mut pos = start;
            while pos < total {
                let w = cut_window(&list, pos, total - pos, None, bounds, &mut out);
                prop_assert!(w.len > 0 && w.len <= 4096 && out.len() <= pieces);
                prop_assert_eq!(out.iter().map(MemSlice::len).sum::<usize>(), w.len);
                prop_assert_eq!(out[0].addr(), m.addr() + pos as u64);
                pos += w.len;
            }
            prop_assert_eq!(pos, total);
        }
    }
}
