//! Ring operations for a request, step by step, without I/O or a clock.

use std::ops::Range;

use riser_block::{Command, CommandKind};
use riser_memory::MemSlice;

use super::sys::Align;

/// Stage of a request. Reads and writes transfer the data window by window. All other operations
/// are a single call, with optional calls before or after it.
///
/// ```text
/// Read   ─→ Transfer ─(fua, cache)→ SyncLast ─→ done
/// Write  ─→ Transfer ─→ done
/// Flush  ─→ SyncLast ─→ done
/// Discard ─(zeroes)→ Punch ─→ SyncLast → done
/// WriteZeroes ─(unmap)→ Punch ─(unsupported)→ Zero ─(unsupported)→ Fill ─→ SyncLast → done
///               └─ else Zero …    └──────────────┴─(not whole units)→ Edges ─┘
/// Status, Discard ─→ Call → done
/// ```
/// A device discards and zeroes its own logical blocks, which may be larger than the unit's blocks.
/// `Punch` and `Zero` only apply to whole device blocks within the range. Zeroes are written to the
/// edges for an operation that requires zeroes, but a discard leaves the edges unchanged.
///
/// A discard does not write. If holes are not supported, the blocks remain mapped (SBC-3 5.28).
/// Otherwise an UNMAP with a few bytes of parameters could write gigabytes, which are not covered
/// by the limits of the unit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Stage {
    /// Transfers data between the buffer and the medium.
    Transfer,
    /// Discards the range by punching a hole.
    Punch,
    /// Zeroes the range without deallocating it.
    Zero,
    /// Writes zeroes, if the medium does not support a better way.
    Fill,
    /// Writes zeroes before and after the whole units of the medium.
    Edges,
    /// Makes all changes durable.
    SyncLast,
    /// Executes a call on the helper thread.
    Call,
}

/// Operations not supported by the medium.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Lacks {
    pub(super) punch: bool,
    pub(super) zero: bool,
}

/// Returns the first stage of a request.
pub(super) fn first_stage(op: &Command, lacks: Lacks) -> Stage {
    match op.kind {
        CommandKind::Read | CommandKind::Write => Stage::Transfer,
        CommandKind::Flush => Stage::SyncLast,
        CommandKind::Discard { zeroes: true } => Stage::Punch,
        // UNMAP permits deallocating blocks, so the file doesn't use more space than necessary.
        CommandKind::WriteZeroes { unmap: true, .. } if !lacks.punch => Stage::Punch,
        CommandKind::WriteZeroes { .. } if !lacks.zero => Stage::Zero,
        CommandKind::WriteZeroes { .. } => Stage::Fill,
        CommandKind::Discard { zeroes: false } | CommandKind::Status => Stage::Call,
    }
}

/// Returns the start and length of the next piece of a stage, after `done` bytes. `unit` is the
/// minimum size for discarding and zeroing on the medium, in bytes.
pub(super) fn piece(op: &Command, stage: Stage, unit: u64, done: u64) -> (u64, u64) {
    let (start, len) = (op.offset, op.len);
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

/// Returns the piece of a range that contains the next byte to fill with zeroes. Reads can be
/// executed between pieces of `most` bytes, so that they do not have to wait for long ranges.
pub(super) fn fill_piece(op: &Command, done: u64, most: u64) -> Range<u64> {
    let begin = op.offset + done - done % most;
    begin..(begin + most).min(op.offset + op.len)
}

/// Returns the part of a range that consists of whole units, or an empty range at its end.
fn whole_units(start: u64, end: u64, unit: u64) -> (u64, u64) {
    let (first, last) = (start.next_multiple_of(unit), end - end % unit);
    if first < last {
        (first, last)
    } else {
        // Use the end, so that the whole range precedes it and is written as an edge.
        (end, end)
    }
}

/// Returns the stage after a completed one, or `None` if the request is complete. `volatile` is set
/// if completed writes may still be in a cache.
pub(super) fn next_stage(op: &Command, stage: Stage, volatile: bool) -> Option<Stage> {
    match stage {
        // For a read with FUA, the data must be on the medium (SBC-3 5.10), so flush it.
        Stage::Transfer if volatile && op.fua && op.kind == CommandKind::Read => {
            Some(Stage::SyncLast)
        }
        Stage::Transfer | Stage::SyncLast | Stage::Call => None,
        // A discard can leave the edges unchanged, but zeroing must include every byte.
        Stage::Punch | Stage::Zero if matches!(op.kind, CommandKind::WriteZeroes { .. }) => {
            Some(Stage::Edges)
        }
        Stage::Punch | Stage::Zero | Stage::Fill | Stage::Edges => {
            (op.fua || !volatile).then_some(Stage::SyncLast)
        }
    }
}

/// Returns true if the writes of an operation must be durable on completion.
pub(super) fn is_durable(op: &Command, volatile: bool) -> bool {
    !volatile || (op.fua && op.kind == CommandKind::Write)
}

/// Returns true for a write that is on stable storage on completion. Its descriptor may report lost
/// write-backs.
pub(super) fn is_durable_write(op: &Command, volatile: bool) -> bool {
    op.kind == CommandKind::Write && is_durable(op, volatile)
}

/// Limits for a ring operation.
#[derive(Debug, Clone, Copy)]
pub(super) struct Bounds {
    /// Maximum number of pieces.
    pub(super) pieces: usize,
    /// Maximum number of bytes.
    pub(super) bytes: usize,
    /// Block size in bytes, and the offset of the first byte in its block. An operation ends with a
    /// whole block if possible.
    pub(super) block: usize,
    pub(super) within: usize,
}

/// Part of a request's buffer, transferred by a single ring operation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Window {
    /// Length in bytes.
    pub(super) len: usize,
    /// The memory is suitable for direct I/O.
    pub(super) aligned: bool,
}

/// Sets `out` to the next window, which starts at offset `start` of the buffer and is limited to
/// `len` bytes.
///
/// With an alignment, the window length is a multiple of the device's block size if `len` is.
///
/// # Panics
/// Panics if the buffer is shorter than `start + len`, contrary to the guarantee of the logical
/// unit.
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
    // If the limit on pieces is reached before a whole block, the pieces are copied to a bounce
    // buffer. In this case the limit doesn't apply.
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
        // If there are too many small pieces, leave the incomplete block at the end for the next
        // window.
        let whole = got - got % a.offset as usize;
        assert!(whole > 0, "an operation that is not in whole blocks");
        trim(out, got - whole);
        got = whole;
    }
    // If the write is cancelled after this operation, no block should be torn.
    let part = (bounds.within + got) % bounds.block;
    if got < len && part < got {
        trim(out, part);
        got -= part;
    }
    Window { len: got, aligned }
}

/// Sets `out` to the part of the caller's buffer that an operation transfers.
///
/// # Panics
/// Panics if the buffer is too short for the operation.
pub fn cut_buffer(op: &Command, data: &[MemSlice], out: &mut Vec<MemSlice>) {
    let (pieces, bytes) = (usize::MAX, op.len as usize);
    let bounds = Bounds {
        pieces,
        bytes,
        block: 1,
        within: 0,
    };
    cut_window(data, op.buffer_offset, bytes, None, bounds, out);
}

/// Removes `excess` bytes from the end.
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

/// Copies data between the pieces of a window and a bounce buffer, which may be shorter.
pub(super) fn copy_pieces(pieces: &[MemSlice], bounce: &MemSlice, into_bounce: bool) {
    let mut at = 0;
    for piece in pieces {
        let len = piece.len().min(bounce.len() - at);
        let piece = (piece.memory(), piece.offset());
        let place = (bounce.memory(), bounce.offset() + at);
        let ((from, from_at), (to, to_at)) = match into_bounce {
            true => (piece, place),
            false => (place, piece),
        };
        riser_memory::Memory::copy(from, from_at, to, to_at, len);
        at += len;
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
    fn stages_depend_on_durability() {
        let op = |kind, fua| Command {
            fua,
            ..Command::new(kind, 0, 512)
        };
        let read = op(CommandKind::Read, true);
        assert_eq!(first_stage(&read, Lacks::default()), Stage::Transfer);
        assert_eq!(
            next_stage(&read, Stage::Transfer, true),
            Some(Stage::SyncLast)
        );
        assert_eq!(next_stage(&read, Stage::Transfer, false), None);
        let zero = |unmap, fua| op(CommandKind::WriteZeroes { unmap, fast: false }, fua);
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
        let discard = op(CommandKind::Discard { zeroes: true }, false);
        assert_eq!(
            next_stage(&discard, Stage::Punch, false),
            Some(Stage::SyncLast)
        );
    }

    #[test]
    fn zeroing_writes_edges_of_whole_units() {
        let (unmap, fast) = (false, false);
        let zero =
            |offset, len| Command::new(CommandKind::WriteZeroes { unmap, fast }, offset, len);
        // All pieces of both stages, in order.
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
    fn window_is_cut_to_whole_blocks() {
        let m = Memory::new(8192).unwrap();
        let list: Vec<_> = (0..8)
            .map(|i| m.slice(i * 1000..i * 1000 + 300).unwrap())
            .collect();
        let mut out = Vec::new();
        let bounds = Bounds {
            pieces: 2,
            bytes: 4096,
            block: 1,
            within: 0,
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

    #[test]
    fn window_ends_with_whole_block_if_possible() {
        let m = Memory::new(8192).unwrap();
        let list: Vec<_> = (0..8)
            .flat_map(|i| [(i * 520, 512), (i * 520 + 512, 8)])
            .map(|(at, len)| m.slice(at..at + len).unwrap())
            .collect();
        let mut out = Vec::new();
        let mut cut = |start: usize, pieces, bytes| {
            let bounds = Bounds {
                pieces,
                bytes,
                block: 520,
                within: start % 520,
            };
            let window = cut_window(&list, start, 8 * 520 - start, None, bounds, &mut out);
            assert_eq!(out.iter().map(MemSlice::len).sum::<usize>(), window.len);
            window.len
        };
        assert_eq!(cut(0, 256, 1 << 20), 8 * 520);
        assert_eq!(cut(0, 7, 1 << 20), 3 * 520);
        assert_eq!(cut(520, 256, 1100), 2 * 520);
        assert_eq!(cut(600, 256, 1000), 960);
        assert_eq!(cut(0, 256, 519), 519, "less than a block");
    }

    proptest! {
        #[test]
        fn windows_cover_buffer_without_gaps(
            lens in prop::collection::vec(1usize..3000, 1..20),
            pieces in 1usize..5,
            start in 0usize..1000,
        ) {
            let m = Memory::new(65536).unwrap();
            let mut at = 0;
            let list: Vec<_> = lens.iter().map(|&l| { at += l; m.slice(at - l..at).unwrap() }).collect();
            let total = at;
            prop_assume!(start < total);
            let bounds = Bounds { pieces, bytes: 4096, block: 1, within: 0 };
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
