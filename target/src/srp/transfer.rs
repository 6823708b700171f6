//! Transfers between a buffer and a descriptor table, in portions that fit the send queue.
//!
//! A transfer is planned before any send-queue credit is taken: [`Transfer::plan`] says how many
//! work requests the next portion needs, and [`Transfer::each`] gives exactly these. A transfer
//! that needs more than a portion goes on when the portion has completed, so no peer can make a
//! chain longer than the queue.

use std::ops::Range;

use arrayvec::ArrayVec;
use riser_transport::verbs::RemoteAddr;

use super::table::{self, Table};
use crate::pool::Buffer;

/// Scatter-gather entries of a work request at most.
pub const MAX_SGE: usize = 8;

/// Which way data goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    /// From the initiator: RDMA READ.
    FromInitiator,
    /// To the initiator: RDMA WRITE.
    ToInitiator,
}

/// One RDMA request of a chain.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RdmaWr {
    /// The initiator's side.
    pub remote: RemoteAddr,
    /// Our side: ranges of the pool's mapping.
    pub local: ArrayVec<Range<usize>, MAX_SGE>,
}

/// How far a transfer has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
struct Position {
    /// Bytes of the buffer.
    bytes: u32,
    /// Descriptor.
    desc: u32,
    /// Bytes behind its beginning; where these are more than it has, in one after it.
    offset: u32,
}

/// Bounds of a portion.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PortionLimits {
    /// Work requests.
    pub wrs: u32,
    /// Scatter-gather entries of each, at most [`MAX_SGE`].
    pub sges: usize,
}

/// A transfer under way.
#[derive(Clone, Debug)]
pub struct Transfer {
    /// Which way.
    pub direction: Direction,
    /// Where it ends in the buffer.
    len: u32,
    done: Position,
    planned: Position,
    wrs: u32,
}

impl Transfer {
    /// A transfer of the first `len` bytes.
    #[must_use]
    pub fn new(direction: Direction, len: u32) -> Self {
        Self::of_range(direction, 0..len)
    }

    /// A transfer of these bytes of the buffer; the descriptors begin with the first of them.
    #[must_use]
    pub fn of_range(direction: Direction, range: Range<u32>) -> Self {
        Self::between(direction, range, 0)
    }

    /// A transfer of the first `len` bytes of the buffer, which are those from `from` on that the
    /// descriptors describe: a piece of longer data.
    #[must_use]
    pub fn of_piece(direction: Direction, from: u32, len: u32) -> Self {
        Self::between(direction, 0..len, from)
    }

    fn between(direction: Direction, range: Range<u32>, from: u32) -> Self {
        let start = Position {
            bytes: range.start,
            desc: 0,
            // Descriptors that lie before it are passed when the first portion is planned.
            offset: from,
        };
        Self {
            direction,
            len: range.end,
            done: start,
            planned: start,
            wrs: 0,
        }
    }

    /// Plans the next portion and says how many work requests it needs.
    pub fn plan(&mut self, table: &Table, buffer: &Buffer, limits: PortionLimits) -> u32 {
        let (end, wrs) = self.walk(table, buffer, limits, |_| {});
        self.planned = end;
        self.wrs = wrs;
        wrs
    }

    /// The work requests of the planned portion, in order.
    pub fn each(
        &self,
        table: &Table,
        buffer: &Buffer,
        limits: PortionLimits,
        f: impl FnMut(RdmaWr),
    ) {
        let (end, wrs) = self.walk(table, buffer, limits, f);
        assert_eq!((end, wrs), (self.planned, self.wrs), "a plan is kept");
    }

    /// Whether the planned portion is the last.
    #[must_use]
    pub fn is_last(&self) -> bool {
        self.planned.bytes == self.len
    }

    /// Bytes of the planned portion.
    #[must_use]
    pub fn portion_len(&self) -> u32 {
        self.planned.bytes - self.done.bytes
    }

    /// The planned portion has completed.
    pub fn portion_done(&mut self) {
        self.done = self.planned;
    }

    fn walk(
        &self,
        table: &Table,
        buffer: &Buffer,
        limits: PortionLimits,
        mut f: impl FnMut(RdmaWr),
    ) -> (Position, u32) {
        let mut at = self.done;
        let mut wrs = 0;
        while at.bytes < self.len && wrs < limits.wrs {
            let desc = table.desc(at.desc);
            if at.offset >= desc.data_len() {
                at.offset -= desc.data_len();
                at.desc += 1;
                continue;
            }
            let room = desc.data_len() - at.offset;
            let end = at.bytes + room.min(self.len - at.bytes);
            let mut wr = RdmaWr {
                remote: table::remote(&desc, at.offset),
                local: ArrayVec::new(),
            };
            let mut moved = 0;
            for range in buffer.ranges(at.bytes..end).take(limits.sges.min(MAX_SGE)) {
                moved += range.len() as u32;
                wr.local.push(range);
            }
            assert!(moved > 0, "the buffer holds the transfer");
            at.bytes += moved;
            at.offset += moved;
            wrs += 1;
            f(wr);
        }
        (at, wrs)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pool::Pool;
    use proptest::prelude::*;
    use riser_scsi::srp::MemDesc;

    proptest! {
        /// Every byte goes once, in order, whatever the descriptors, the buffer and the limits.
        #[test]
        fn portions_conserve_bytes(
            lens in proptest::collection::vec(0u32..70_000, 1..16),
            cut in any::<proptest::sample::Index>(),
            skip in any::<proptest::sample::Index>(),
            wrs in 1u32..5,
            sges in 1usize..5,
            holes in proptest::collection::vec(1u32..200_000, 0..20),
        ) {
            let mut pool = Pool::new(4 << 20).unwrap();
            let total: u32 = lens.iter().sum();
            prop_assume!(total > 0);
            // Fragment the pool so that buffers come in pieces.
            let mut held: Vec<_> = holes.iter().filter_map(|&n| pool.take(n)).collect();
            for i in (0..held.len()).rev().step_by(2) {
                let buffer = held.swap_remove(i);
                pool.release(buffer);
            }
            let Some(buffer) = pool.take(total) else {
                for b in held { pool.release(b); }
                return Ok(());
            };
            let table = Table::Inline(
                lens.iter()
                    .enumerate()
                    .map(|(i, &len)| MemDesc::new((i as u64) << 32, i as u32, len))
                    .collect(),
            );
            let len = cut.index(total as usize) as u32 + 1;
            // Those before `from` were moved before.
            let from = skip.index((total - len + 1) as usize) as u32;
            let limits = PortionLimits { wrs, sges };
            let mut transfer = Transfer::of_piece(Direction::ToInitiator, from, len);
            let mut before = u64::from(from);
            let mut local = Vec::new();
            let mut remote = 0u64;
            let mut next = (0u64, 0u64);
            loop {
                let n = transfer.plan(&table, &buffer, limits);
                prop_assert!(n > 0 && n <= wrs);
                let mut seen = 0;
                transfer.each(&table, &buffer, limits, |wr| {
                    seen += 1;
                    let bytes: usize = wr.local.iter().map(ExactSizeIterator::len).sum();
                    let (desc, offset) = (wr.remote.addr >> 32, wr.remote.addr & 0xffff_ffff);
                    assert!((desc, offset) >= next, "in order");
                    // Where it is in the data that the descriptors describe.
                    let at: u64 = lens[..desc as usize].iter().map(|&len| u64::from(len)).sum();
                    assert_eq!(at + offset, before, "without gaps");
                    before += bytes as u64;
                    assert_eq!(u64::from(wr.remote.rkey.0), desc);
                    assert!(offset + bytes as u64 <= u64::from(lens[desc as usize]));
                    next = (desc, offset + bytes as u64);
                    remote += bytes as u64;
                    local.extend(wr.local.iter().cloned().flatten());
                });
                prop_assert_eq!(seen, n);
                let last = transfer.is_last();
                transfer.portion_done();
                if last { break; }
            }
            prop_assert_eq!(remote, u64::from(len));
            let expected: Vec<usize> = buffer.ranges(0..len).flatten().collect();
            prop_assert_eq!(local, expected);
            pool.release(buffer);
            for b in held { pool.release(b); }
        }
    }
}
