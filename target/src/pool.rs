//! The pool of data buffers of one worker.
//!
//! One mapping, registered with the NIC and with `io_uring`, is handed out in power-of-two blocks
//! (a buddy allocator), so that bytes go disk → buffer → wire without a copy. A [`Buffer`] is up to
//! [`MAX_PIECES`] blocks that together hold a command's data; as a rule one, and only a list of more
//! than two takes memory of the heap.
//!
//! # Fairness
//! Channels ask for memory under their number ([`Owner`]). While none waits, each request gets what
//! there is. Otherwise an owner that has some gets more only up to its share: the pool divided by
//! the owners that have or want some. The first in the line that its share allows has its turn.
//! Others may still be served before it, as a small request fits where a large one does not; but
//! when half the pool has gone past it, only the one whose turn it is gets memory. So neither small
//! nor large requests starve. An owner that had more than its share before the others came is asked
//! for it: [`Pool::is_owed_by`].
//!
//! # Reserve
//! A command that waits in its task set's order may have its data in a buffer, while the one that
//! it waits for has none yet. So there is a reserve besides: it goes to one command at a time that
//! has started and waits for memory, no matter how much its owner has. Such a command waits for no
//! other, so the reserve is returned. Owners take turns with it.
//!
//! # Tables
//! Descriptor tables have memory of their own, since a command holds its table while it waits for
//! data memory: taken from there, tables could leave none to wait for. An owner gets half of it at
//! most.
//!
//! # Invariants
//! - Every byte of the pool belongs to the pool or to exactly one buffer.
//! - A buffer goes back through [`Pool::release`]; one that is merely dropped is a bug, which
//!   debug builds report.
//! - No reference into a buffer exists while a device may write it: bytes are copied out and in
//!   ([`DataAccess`]), and who looks at them in place promises that ([`Buffer::for_each_piece`]).
//!
//! # Not implemented
//! Growing: the size is fixed when the worker starts.

use std::collections::VecDeque;
use std::io;
use std::ops::Range;

use riser_memory::{MemSlice, Memory};
use riser_scsi::access::DataAccess;
use rustc_hash::FxHashMap;
use smallvec::SmallVec;

/// The smallest block, in bytes: a page, so that blocks suit direct I/O.
pub const MIN_BLOCK: usize = 4096;

/// The largest block is `MIN_BLOCK << MAX_ORDER`: 1 MiB.
const MAX_ORDER: usize = 8;

/// The largest block, in bytes.
pub const MAX_BLOCK: usize = MIN_BLOCK << MAX_ORDER;

// The window of a long command is one block.
const _: () = assert!(MAX_BLOCK == riser_config::WINDOW as usize);

/// Bytes of the reserve at most: a window and its scratch memory fit.
const RESERVE: usize = 2 * MAX_BLOCK;

/// Blocks in one buffer at most: a large block in pieces of 32 KiB, where memory is in pieces.
pub const MAX_PIECES: usize = 32;

/// No neighbour in a free list.
const NIL: u32 = u32::MAX;

/// State of the unit (of [`MIN_BLOCK`] bytes) at which a block starts.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Unit {
    /// Not the start of a block.
    Inner,
    /// A free block of this order starts here.
    Free { order: u8, prev: u32, next: u32 },
    /// A block in use of this order starts here.
    Used { order: u8 },
}

/// A part of a buffer, contiguous in memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Piece {
    /// Byte offset within the pool's mapping.
    offset: usize,
    /// Bytes of the block that the buffer uses.
    len: u32,
    /// The block is `MIN_BLOCK << order` bytes long.
    order: u8,
}

/// Owner of a buffer: the number of a channel at its worker.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Owner(pub u64);

/// Memory that an owner has.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Holding {
    /// Bytes of data buffers, in whole blocks.
    data: usize,
    /// Bytes of descriptor tables, in whole blocks.
    tables: usize,
    /// The owner is in the line for data memory.
    waits: bool,
}

impl Holding {
    /// Whether its owner has and wants nothing, and need not be known.
    fn is_idle(&self) -> bool {
        *self == Self::default()
    }
}

/// An owner in the line.
#[derive(Clone, Copy, Debug)]
struct Waiter {
    owner: Owner,
    /// Bytes that it was last refused.
    need: usize,
    /// Bytes that others were given while it had its turn.
    passed: usize,
}

/// The buffers of one worker.
#[derive(Debug)]
pub struct Pool {
    memory: Memory,
    data: Blocks,
    tables: Blocks,
    reserve: Blocks,
    lowest_free: usize,
    /// Owners that have or want something, by numbers of ours: no peer can choose them for their
    /// hashes.
    owners: FxHashMap<Owner, Holding>,
    /// Owners that wait for data memory, by turns; each once.
    line: VecDeque<Waiter>,
    /// The same owners, by turns at the reserve.
    queue: VecDeque<Owner>,
    /// Bytes that were last refused.
    refused: usize,
    /// An owner in the line may get memory that it was refused before.
    has_changed: bool,
}

impl Pool {
    /// Maps a pool of `bytes`, rounded up to whole blocks of [`MAX_BLOCK`], and besides a
    /// sixteenth of that for descriptor tables, and the reserve.
    ///
    /// # Errors
    /// The error of `mmap(2)`.
    pub fn new(bytes: usize) -> io::Result<Self> {
        // Whole blocks, or the end of the pool could never serve a long command.
        let len = bytes.max(1).next_multiple_of(MAX_BLOCK);
        let tables = (len / 16).next_multiple_of(MAX_BLOCK);
        let reserve = len.min(RESERVE);
        let memory = Memory::new(len + tables + reserve)?;
        Ok(Self {
            memory,
            data: Blocks::new(0, len),
            tables: Blocks::new(len, tables),
            reserve: Blocks::new(len + tables, reserve),
            lowest_free: len,
            owners: FxHashMap::default(),
            line: VecDeque::new(),
            queue: VecDeque::new(),
            refused: 0,
            has_changed: false,
        })
    }

    /// The mapping, for registering it with devices.
    #[must_use]
    pub fn memory(&self) -> &Memory {
        &self.memory
    }

    /// Size in bytes, without the tables' memory and the reserve.
    #[must_use]
    pub fn size(&self) -> usize {
        self.data.len
    }

    /// Bytes not in any data buffer, without the reserve.
    #[must_use]
    pub fn free(&self) -> usize {
        self.data.free
    }

    /// The least that [`Pool::free`] has ever been.
    #[must_use]
    pub fn lowest_free(&self) -> usize {
        self.lowest_free
    }

    /// Returns whether every buffer is back, tables and the reserve included.
    #[must_use]
    pub fn is_whole(&self) -> bool {
        let parts = [&self.data, &self.tables, &self.reserve];
        parts.iter().all(|blocks| blocks.is_whole())
    }

    /// The longest buffer that an empty pool can give, in bytes.
    #[must_use]
    pub fn max_buffer(&self) -> usize {
        self.size().min(MAX_PIECES * MAX_BLOCK)
    }

    /// A data buffer of `len` bytes for an owner, or `None` while there is not enough, or it is not
    /// its turn. [`Pool::wait`] then.
    pub fn grant(&mut self, owner: Owner, len: u32) -> Option<Buffer> {
        let need = needed(len);
        // A buffer is large to move: it stays where it is made.
        let mut granted = match self.may_take(owner, need) {
            true => self.take(len),
            false => None,
        };
        let Some(buffer) = &mut granted else {
            self.refused = need;
            if let Some(waiter) = self.line.iter_mut().find(|w| w.owner == owner) {
                waiter.need = need;
            }
            return None;
        };
        buffer.owner = Some(owner);
        let held = buffer.held();
        match self.owners.get_mut(&owner) {
            Some(holding) => holding.data += held,
            None => self.owners.entry(owner).or_default().data = held,
        }
        if let Some(at) = self.turn() {
            if self.line[at].owner != owner {
                self.line[at].passed += need;
            } else if let Some(mut waiter) = self.line.remove(at) {
                // It has had its turn; if it still waits, it is the last.
                waiter.passed = 0;
                self.line.push_back(waiter);
                self.end_turn(owner);
                // The next one may have been refused only because of this one.
                self.has_changed |= self.line.len() > 1;
            }
        }
        granted
    }

    /// The reserve, as a data buffer of `len` bytes for a command that has started, while it is not
    /// in use. For owners that wait, in the order of [`Pool::waiting`].
    pub fn grant_reserve(&mut self, owner: Owner, len: u32) -> Option<Buffer> {
        if !self.has_reserve(len) {
            return None;
        }
        self.end_turn(owner);
        self.reserve.take(&self.memory, len)
    }

    fn has_reserve(&self, len: u32) -> bool {
        self.reserve.is_whole() && len as usize <= self.reserve.len
    }

    /// An owner in the line has got something.
    fn end_turn(&mut self, owner: Owner) {
        if let Some(at) = self.queue.iter().position(|&other| other == owner) {
            self.queue.remove(at);
            self.queue.push_back(owner);
        }
    }

    /// A buffer for descriptors, or `None` while there is not enough, or the owner has its half.
    pub fn take_table(&mut self, owner: Owner, len: u32) -> Option<Buffer> {
        let has = self.owners.get(&owner).map_or(0, |holding| holding.tables);
        if has + needed(len) > self.tables.len / 2 {
            return None;
        }
        let mut buffer = self.tables.take(&self.memory, len)?;
        buffer.owner = Some(owner);
        self.owners.entry(owner).or_default().tables += buffer.held();
        Some(buffer)
    }

    /// Returns whether more than half of the tables' memory is free, and this owner has a
    /// sixteenth at most.
    #[must_use]
    pub fn has_spare_tables(&self, owner: Owner) -> bool {
        let has = self.owners.get(&owner).map_or(0, |holding| holding.tables);
        has <= self.tables.len / 16 && self.tables.free > self.tables.len / 2
    }

    /// An owner waits for the data buffer that [`Pool::grant`] has just refused: it is in
    /// [`Pool::waiting`] from now on.
    pub fn wait(&mut self, owner: Owner) {
        let holding = self.owners.entry(owner).or_default();
        if !std::mem::replace(&mut holding.waits, true) {
            self.line.push_back(Waiter {
                owner,
                need: self.refused,
                passed: 0,
            });
            self.queue.push_back(owner);
        }
    }

    /// As [`Pool::wait`], for `len` bytes of a started command: the reserve may be free for it.
    pub fn wait_started(&mut self, owner: Owner, len: u32) {
        self.wait(owner);
        self.has_changed |= self.has_reserve(len);
    }

    /// An owner waits no longer.
    pub fn leave_line(&mut self, owner: Owner) {
        let Some(holding) = self.owners.get_mut(&owner) else {
            return;
        };
        if std::mem::take(&mut holding.waits) {
            self.line.retain(|waiter| waiter.owner != owner);
            self.queue.retain(|&other| other != owner);
            self.has_changed = true;
        }
        if holding.is_idle() {
            self.owners.remove(&owner);
        }
    }

    /// Returns whether memory has come back, or the line has moved, since the last call, while an
    /// owner waits.
    pub fn take_change(&mut self) -> bool {
        std::mem::take(&mut self.has_changed) && !self.line.is_empty()
    }

    /// Returns the result that [`Pool::take_change`] would have, without taking it.
    #[must_use]
    pub fn has_change(&self) -> bool {
        self.has_changed && !self.line.is_empty()
    }

    /// The owners that wait, by turns.
    pub fn waiting(&self) -> impl Iterator<Item = Owner> + '_ {
        self.queue.iter().copied()
    }

    /// A data buffer of `len` bytes, or `None` while the pool has not enough in few enough blocks.
    pub fn take(&mut self, len: u32) -> Option<Buffer> {
        let buffer = self.data.take(&self.memory, len);
        self.lowest_free = self.lowest_free.min(self.data.free);
        buffer
    }

    /// Takes a buffer back. No device may be using it any more.
    ///
    /// # Panics
    /// If the buffer is another pool's.
    pub fn release(&mut self, mut buffer: Buffer) {
        // The offset says which part of the mapping it is from. An empty buffer has no pieces to
        // return.
        let start = buffer.pieces.first().map_or(0, |piece| piece.offset);
        let is_table = start >= self.tables.base;
        let held = buffer.held();
        let blocks = if start >= self.reserve.base {
            &mut self.reserve
        } else if is_table {
            &mut self.tables
        } else {
            &mut self.data
        };
        for piece in &buffer.pieces {
            blocks.put(piece.offset);
        }
        buffer.pieces.clear();
        self.has_changed = true;
        if let Some(owner) = buffer.owner
            && let Some(holding) = self.owners.get_mut(&owner)
        {
            let part = if is_table {
                &mut holding.tables
            } else {
                &mut holding.data
            };
            *part -= held;
            if holding.is_idle() {
                self.owners.remove(&owner);
            }
        }
    }

    /// Whether an owner is within its share with `need` bytes more. One that has nothing is.
    fn is_within_share(&self, owner: Owner, need: usize) -> bool {
        let has = self.owners.get(&owner).map_or(0, |holding| holding.data);
        has == 0 || has + need <= self.size() / self.owners.len().max(1)
    }

    /// Whether others wait, and this owner has more than its share of what they wait for.
    pub fn is_owed_by(&self, owner: Owner) -> bool {
        let mut line = self.line.iter();
        line.any(|waiter| waiter.owner != owner) && !self.is_within_share(owner, 0)
    }

    /// Place in the line of the owner whose turn it is.
    fn turn(&self) -> Option<usize> {
        if self.line.is_empty() {
            return None;
        }
        let mut line = self.line.iter();
        line.position(|waiter| self.is_within_share(waiter.owner, waiter.need))
    }

    fn may_take(&self, owner: Owner, need: usize) -> bool {
        // No other owner waits, so there is nothing to share.
        if self.line.is_empty() || self.line.iter().all(|waiter| waiter.owner == owner) {
            return true;
        }
        if !self.is_within_share(owner, need) {
            return false;
        }
        self.turn().is_none_or(|at| {
            let waiter = &self.line[at];
            waiter.owner == owner || waiter.passed + need <= self.size() / 2
        })
    }
}

/// Bytes of whole blocks that hold `len`.
fn needed(len: u32) -> usize {
    (len as usize).next_multiple_of(MIN_BLOCK)
}

/// A part of the mapping, in blocks.
#[derive(Debug)]
struct Blocks {
    /// Offset of its first byte in the mapping.
    base: usize,
    len: usize,
    units: Vec<Unit>,
    heads: [u32; MAX_ORDER + 1],
    free: usize,
}

impl Blocks {
    fn new(base: usize, len: usize) -> Self {
        let mut blocks = Self {
            base,
            len,
            units: vec![Unit::Inner; len / MIN_BLOCK],
            heads: [NIL; MAX_ORDER + 1],
            free: len,
        };
        // In reverse, since a free list gives first what was put last: memory is used from its
        // beginning.
        for block in (0..len / MAX_BLOCK).rev() {
            blocks.push((block << MAX_ORDER) as u32, MAX_ORDER);
        }
        blocks
    }

    fn is_whole(&self) -> bool {
        self.free == self.len
    }

    fn take(&mut self, memory: &Memory, len: u32) -> Option<Buffer> {
        let mut buffer = Buffer {
            memory: memory.clone(),
            pieces: SmallVec::new(),
            len,
            owner: None,
        };
        let mut left = len as usize;
        while left > 0 {
            let want = left.min(MAX_BLOCK).next_multiple_of(MIN_BLOCK);
            let taken = if buffer.pieces.len() == MAX_PIECES {
                None
            } else {
                self.take_block(order_of(want))
            };
            // Memory is taken whole or not at all: two commands that each wait with a part of
            // theirs could wait for each other.
            let Some((unit, order)) = taken else {
                for piece in buffer.pieces.drain(..) {
                    self.put(piece.offset);
                }
                return None;
            };
            let used = left.min(MIN_BLOCK << order);
            buffer.pieces.push(Piece {
                offset: self.base + unit as usize * MIN_BLOCK,
                len: used as u32,
                order: order as u8,
            });
            left -= used;
        }
        Some(buffer)
    }

    fn put(&mut self, offset: usize) {
        self.put_block(((offset - self.base) / MIN_BLOCK) as u32);
    }

    /// A block of `order`, or a smaller one where no larger one is left.
    fn take_block(&mut self, order: usize) -> Option<(u32, usize)> {
        // The smallest that is large enough, to keep large blocks whole. A smaller one only where
        // memory is in pieces: the buffer has more of them then.
        let from = match self.heads[order] {
            NIL => (order + 1..=MAX_ORDER)
                .chain((0..order).rev())
                .find(|&o| self.heads[o] != NIL)?,
            _ => order,
        };
        let unit = self.heads[from];
        self.unlink(unit);
        let order = order.min(from);
        for o in (order..from).rev() {
            self.push(unit + (1 << o), o);
        }
        self.units[unit as usize] = Unit::Used { order: order as u8 };
        self.free -= MIN_BLOCK << order;
        Some((unit, order))
    }

    fn put_block(&mut self, mut unit: u32) {
        let Unit::Used { order } = self.units[unit as usize] else {
            panic!("a block that is not in use came back");
        };
        let mut order = usize::from(order);
        self.free += MIN_BLOCK << order;
        self.units[unit as usize] = Unit::Inner;
        while order < MAX_ORDER {
            // Blocks of one order lie at multiples of their size, so the two halves of a larger
            // block differ in one bit of their numbers.
            let buddy = unit ^ (1 << order);
            match self.units.get(buddy as usize) {
                Some(Unit::Free { order: o, .. }) if usize::from(*o) == order => {
                    self.unlink(buddy);
                    unit = unit.min(buddy);
                    order += 1;
                }
                _ => break,
            }
        }
        self.push(unit, order);
    }

    fn push(&mut self, unit: u32, order: usize) {
        let next = self.heads[order];
        if next != NIL {
            let Unit::Free { prev, .. } = &mut self.units[next as usize] else {
                unreachable!("free lists hold free blocks");
            };
            *prev = unit;
        }
        self.heads[order] = unit;
        self.units[unit as usize] = Unit::Free {
            order: order as u8,
            prev: NIL,
            next,
        };
    }

    fn unlink(&mut self, unit: u32) {
        let Unit::Free { order, prev, next } = self.units[unit as usize] else {
            unreachable!("free lists hold free blocks");
        };
        if let Some(Unit::Free { prev: p, .. }) = self.units.get_mut(next as usize) {
            *p = prev;
        }
        match self.units.get_mut(prev as usize) {
            Some(Unit::Free { next: n, .. }) => *n = next,
            _ => self.heads[usize::from(order)] = next,
        }
        self.units[unit as usize] = Unit::Inner;
    }
}

/// The order of the smallest block that holds `len` bytes, at most [`MAX_ORDER`].
fn order_of(len: usize) -> usize {
    let blocks = len.div_ceil(MIN_BLOCK).next_power_of_two();
    (blocks.trailing_zeros() as usize).min(MAX_ORDER)
}

/// Data of one command: blocks of a pool, in order.
#[derive(Debug)]
pub struct Buffer {
    memory: Memory,
    /// At most [`MAX_PIECES`]; nearly all buffers are of one or two, and are moved a lot.
    pieces: SmallVec<[Piece; 2]>,
    len: u32,
    owner: Option<Owner>,
}

impl Buffer {
    /// Length in bytes, as it was asked for.
    #[must_use]
    pub fn len(&self) -> u32 {
        self.len
    }

    /// Whether it holds no byte.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Bytes of its blocks.
    fn held(&self) -> usize {
        self.pieces.iter().map(|p| MIN_BLOCK << p.order).sum()
    }

    /// The ranges of the mapping that hold bytes `range` of the buffer, in order. What lies beyond
    /// the end is left out.
    #[must_use]
    pub fn ranges(&self, range: Range<u32>) -> Ranges<'_> {
        Ranges {
            pieces: self.pieces.iter(),
            at: 0,
            range,
        }
    }

    /// The bytes of a part that lie in its first `pieces` pieces. The part begins within the
    /// buffer.
    pub(crate) fn len_of_pieces(&self, part: Range<u32>, pieces: usize) -> u32 {
        // Nearly all buffers are of one piece, and no part has more pieces than its buffer.
        if self.pieces.len() <= pieces {
            return part.end.min(self.len) - part.start;
        }
        let ranges = self.ranges(part).take(pieces);
        ranges.map(|range| range.len() as u32).sum()
    }

    /// Appends all of its pieces to a list, as slices that keep the mapping alive.
    pub(crate) fn put_slices(&self, out: &mut Vec<MemSlice>) {
        for range in self.ranges(0..self.len) {
            out.push(self.memory.slice(range).expect("pieces lie in the mapping"));
        }
    }

    /// The same ranges as slices that keep the mapping alive.
    pub fn slices(&self, range: Range<u32>) -> impl Iterator<Item = MemSlice> + '_ {
        self.ranges(range)
            .map(|r| self.memory.slice(r).expect("pieces lie in the mapping"))
    }

    /// The mapping that its ranges lie in.
    #[must_use]
    pub fn memory(&self) -> &Memory {
        &self.memory
    }

    /// Copies `bytes` in, at `offset`.
    ///
    /// # Panics
    /// If they do not fit.
    pub fn write(&self, offset: u32, bytes: &[u8]) {
        let mut done = 0;
        for range in self.ranges(self.part(offset, bytes.len())) {
            let len = range.len();
            self.memory.write(range.start, &bytes[done..done + len]);
            done += len;
        }
    }

    /// The part of `len` bytes from `offset` on.
    fn part(&self, offset: u32, len: usize) -> Range<u32> {
        let end = u32::try_from(len)
            .ok()
            .and_then(|len| offset.checked_add(len))
            .filter(|&end| end <= self.len);
        offset..end.expect("the bytes fit the buffer")
    }

    /// Calls `f` with the bytes of a part, piece by piece and in order, where they lie: for a digest,
    /// which is to cost no copy.
    ///
    /// # Safety
    /// No operation that writes the part, of the ring or of a device, is under way until this
    /// returns.
    ///
    /// # Panics
    /// If the part is not within the buffer.
    #[allow(
        unsafe_code,
        reason = "looks at a buffer in place, between operations of devices"
    )]
    pub unsafe fn for_each_piece(&self, part: Range<u32>, mut f: impl FnMut(&[u8])) {
        assert!(part.end <= self.len, "part {part:?} beyond {}", self.len);
        for run in self.ranges(part) {
            // SAFETY: the caller's promise; the run belongs to this buffer alone.
            unsafe { self.memory.with_bytes(run.start, run.len(), &mut f) };
        }
    }
}

/// Ranges of a pool's mapping that hold a part of a buffer, in order: see [`Buffer::ranges`].
#[derive(Clone, Debug)]
pub struct Ranges<'a> {
    pieces: std::slice::Iter<'a, Piece>,
    /// Offset of the next piece in the buffer.
    at: u32,
    range: Range<u32>,
}

impl Iterator for Ranges<'_> {
    type Item = Range<usize>;

    #[inline]
    fn next(&mut self) -> Option<Range<usize>> {
        while self.at < self.range.end {
            let piece = self.pieces.next()?;
            let at = self.at;
            self.at += piece.len;
            let from = self.range.start.max(at);
            let to = self.range.end.min(self.at);
            if from < to {
                let base = piece.offset;
                return Some(base + (from - at) as usize..base + (to - at) as usize);
            }
        }
        None
    }
}

impl DataAccess for Buffer {
    fn len(&self) -> u32 {
        self.len
    }

    fn read(&self, offset: u32, into: &mut [u8]) {
        let mut done = 0;
        for range in self.ranges(self.part(offset, into.len())) {
            let len = range.len();
            self.memory.read(range.start, &mut into[done..done + len]);
            done += len;
        }
    }

    fn write(&mut self, offset: u32, from: &[u8]) {
        Buffer::write(self, offset, from);
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        if !std::thread::panicking() {
            debug_assert!(
                self.pieces.is_empty(),
                "a buffer was dropped instead of released"
            );
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn bytes_cross_pieces_and_come_back() {
        let mut pool = Pool::new(4 << 20).unwrap();
        let len = (2 << 20) + 4096 + 7;
        let buffer = pool.take(len).unwrap();
        assert_eq!(buffer.len(), len);
        assert!(buffer.pieces.len() >= 3);
        let data: Vec<u8> = (0..3000u32).map(|i| (i % 251) as u8).collect();
        let at = (1 << 20) - 1000;
        buffer.write(at, &data);
        let mut back = vec![0; data.len()];
        buffer.read(at, &mut back);
        assert_eq!(back, data);
        let mut in_place = Vec::new();
        // SAFETY: no device knows the buffer.
        #[allow(unsafe_code, reason = "what is tested")]
        unsafe {
            let part = at..at + data.len() as u32;
            buffer.for_each_piece(part, |piece| in_place.extend_from_slice(piece));
        }
        assert_eq!(in_place, data);
        buffer.write(len - 1, &[9]);
        let mut last = [0];
        buffer.read(len - 1, &mut last);
        assert_eq!(last, [9]);
        buffer.read(len, &mut []);
        let total: usize = buffer.slices(5..len).map(|s| s.len()).sum();
        assert_eq!(total, len as usize - 5);
        pool.release(buffer);
        assert_eq!(pool.free(), pool.size());
    }

    #[test]
    fn an_exhausted_pool_gives_nothing_and_loses_nothing() {
        let mut pool = Pool::new(1 << 20).unwrap();
        let a = pool.take(1 << 19).unwrap();
        assert!(pool.take((1 << 19) + 1).is_none());
        assert_eq!(pool.free(), 1 << 19);
        let b = pool.take(1 << 19).unwrap();
        assert!(pool.take(1).is_none());
        let nothing = pool.take(0).unwrap();
        assert!(nothing.is_empty());
        for x in [a, b, nothing] {
            pool.release(x);
        }
        let whole = pool.take(1 << 20).unwrap();
        assert_eq!(whole.ranges(0..1 << 20).count(), 1, "neighbours rejoin");
        pool.release(whole);
    }

    #[test]
    fn an_owner_keeps_to_its_share_while_others_wait() {
        const MIB: u32 = 1 << 20;
        let (hog, other) = (Owner(1), Owner(2));
        let mut pool = Pool::new(8 << 20).unwrap();
        let mut held: Vec<_> = std::iter::from_fn(|| pool.grant(hog, MIB)).collect();
        assert_eq!(held.len(), 8, "alone, it may have all");
        assert!(pool.grant(other, MIB).is_none());
        pool.wait(other);
        pool.wait(hog);
        for left in (0..8).rev() {
            let buffer = held.pop().unwrap();
            pool.release(buffer);
            assert!(pool.take_change());
            if left >= 4 {
                assert!(pool.grant(hog, MIB).is_none(), "it has {left} of 8");
            }
            assert_eq!(pool.is_owed_by(hog), left > 4, "{left}");
            assert!(!pool.is_owed_by(other));
        }
        let all = [hog, other].map(|owner| pool.grant(owner, MIB).unwrap());
        all.into_iter().for_each(|buffer| pool.release(buffer));
        pool.leave_line(hog);
        pool.leave_line(other);
        assert!(pool.owners.is_empty() && pool.is_whole());
    }

    #[test]
    fn an_owner_that_would_exceed_its_share_does_not_keep_the_turn() {
        const MIB: u32 = 1 << 20;
        let (first, other) = (Owner(1), Owner(2));
        let mut pool = Pool::new(8 << 20).unwrap();
        let held = pool.grant(first, 3 * MIB + MIB / 2).unwrap();
        let rest = pool.take(4 * MIB + MIB / 2).unwrap();
        for owner in [first, other] {
            assert!(pool.grant(owner, MIB).is_none());
            pool.wait(owner);
        }
        pool.release(rest);
        for _ in 0..20 {
            assert!(pool.grant(first, MIB).is_none());
            let buffer = pool.grant(other, MIB).unwrap();
            pool.release(buffer);
        }
        pool.leave_line(other);
        pool.release(held);
        let buffer = pool.grant(first, MIB).unwrap();
        pool.release(buffer);
    }

    #[test]
    fn neither_small_nor_large_requests_starve() {
        const MIB: u32 = 1 << 20;
        let (small, large) = (Owner(1), Owner(2));
        let mut pool = Pool::new(4 << 20).unwrap();
        let mut held: Vec<_> = (0..1024)
            .map(|_| pool.grant(small, 4096).unwrap())
            .collect();
        pool.wait(large);
        let mut passed = 0;
        // Small ones come and go; the large one gets the memory that they leave at last.
        for _ in 0..4096 {
            if let Some(buffer) = held.pop() {
                pool.release(buffer);
            }
            match pool.grant(small, 4096) {
                Some(buffer) => {
                    held.push(buffer);
                    passed += 4096;
                }
                None => pool.wait(small),
            }
            if let Some(buffer) = pool.grant(large, MIB) {
                pool.release(buffer);
                held.into_iter().for_each(|buffer| pool.release(buffer));
                assert!(passed <= pool.size(), "{passed} bytes went past it");
                return;
            }
        }
        panic!("the large request never got its memory");
    }

    #[test]
    fn the_reserve_goes_to_one_started_command_after_the_other() {
        let (greedy, other) = (Owner(1), Owner(2));
        let mut pool = Pool::new(4 << 20).unwrap();
        let mut held: Vec<_> = std::iter::from_fn(|| pool.grant(greedy, 1 << 20)).collect();
        for owner in [greedy, other] {
            assert!(pool.grant(owner, 4096).is_none());
            pool.wait_started(owner, 4096);
            assert!(pool.has_change() && pool.take_change());
        }
        // Its share does not matter, but no owner has two turns while another one waits.
        for owner in [greedy, other, greedy, other] {
            assert_eq!(pool.waiting().next(), Some(owner));
            let reserve = pool.grant_reserve(owner, 4096).unwrap();
            assert!(pool.grant_reserve(greedy, 4096).is_none());
            assert!(pool.grant_reserve(other, 4096).is_none());
            // Nothing to try for one that comes meanwhile.
            pool.wait_started(Owner(3), 4096);
            assert!(!pool.has_change());
            pool.leave_line(Owner(3));
            pool.release(reserve);
            assert!(pool.take_change());
        }
        // It is as long as a window and its scratch memory, also where the rest is in pieces.
        held.push(pool.grant_reserve(other, 2 << 20).unwrap());
        pool.leave_line(greedy);
        pool.leave_line(other);
        assert!(!pool.is_whole());
        held.into_iter().for_each(|buffer| pool.release(buffer));
        assert!(pool.is_whole() && pool.owners.is_empty() && pool.queue.is_empty());
    }

    #[test]
    fn whoever_has_the_next_turn_tries_again() {
        const MIB: u32 = 1 << 20;
        let (first, other, passing) = (Owner(1), Owner(2), Owner(3));
        let mut pool = Pool::new(8 << 20).unwrap();
        let held = pool.take(8 * MIB).unwrap();
        for owner in [first, other] {
            assert!(pool.grant(owner, MIB).is_none());
            pool.wait_started(owner, MIB);
        }
        let reserve = pool.grant_reserve(first, MIB).unwrap();
        pool.release(reserve);
        pool.release(held);
        while let Some(buffer) = pool.grant(passing, MIB) {
            pool.release(buffer);
        }
        // The reserve has its own turns, so the one whose turn it is here is not the first to try.
        assert!(pool.take_change());
        assert_eq!(pool.waiting().collect::<Vec<_>>(), [other, first]);
        assert!(pool.grant(other, MIB).is_none());
        let own = pool.grant(first, MIB).unwrap();
        assert!(pool.take_change(), "there is memory for the other");
        let next = pool.grant(other, MIB).unwrap();
        pool.release(own);
        pool.release(next);
    }

    #[test]
    fn tables_leave_the_data_memory_alone() {
        let mut pool = Pool::new(1 << 20).unwrap();
        let one = Owner(1);
        let tables: Vec<_> = std::iter::from_fn(|| pool.take_table(one, 4096)).collect();
        assert_eq!(tables.len(), 128, "half of a MiB");
        let other = pool.take_table(Owner(2), 4096).unwrap();
        let data = pool.grant(one, 1 << 20).unwrap();
        assert_eq!(pool.free(), 0);
        for buffer in tables.into_iter().chain([other, data]) {
            pool.release(buffer);
        }
        assert!(pool.is_whole() && pool.owners.is_empty());
    }

    proptest! {
        /// Buffers never overlap, and everything released is whole again.
        #[test]
        fn buffers_are_disjoint(steps in proptest::collection::vec((any::<bool>(), 0u32..3 << 20), 1..200)) {
            let mut pool = Pool::new(8 << 20).unwrap();
            let mut held: Vec<Buffer> = Vec::new();
            for (give_back, n) in steps {
                if give_back && !held.is_empty() {
                    let buffer = held.swap_remove(n as usize % held.len());
                    pool.release(buffer);
                } else if let Some(buffer) = pool.take(n) {
                    held.push(buffer);
                }
                let mut all: Vec<_> = held.iter().flat_map(|b| b.ranges(0..u32::MAX)).collect();
                all.sort_by_key(|r| r.start);
                prop_assert!(all.windows(2).all(|w| w[0].end <= w[1].start));
            }
            for buffer in held {
                pool.release(buffer);
            }
            prop_assert_eq!(pool.free(), pool.size());
            let whole = pool.take(8 << 20).unwrap();
            prop_assert_eq!(whole.pieces.len(), 8);
            pool.release(whole);
        }
    }
}
