//! Transfers: the RDMA READs or WRITEs that move bytes between a buffer of the pool and ranges of
//! the initiator's memory.
//!
//! One walk over both sides yields the work requests: [`Requests`]. [`Transfer::plan`] takes it as
//! far as a portion may go, to count them before any send-queue credit is taken.
//! [`Transfer::requests`] repeats it over the same bytes, to post them. So the requests that are
//! posted are those that were counted. A transfer that needs more than a portion goes on when the
//! portion has completed, so no peer can make a chain longer than the queue.

use std::ops::Range;

use arrayvec::ArrayVec;
use riser_transport::verbs::{RKey, RemoteAddr};

use crate::pool::{Buffer, Ranges};

/// Maximum number of scatter-gather entries of a work request.
pub const MAX_SGE: usize = 8;

/// Direction of a transfer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    /// RDMA READ: Data-Out, or a descriptor table.
    FromInitiator,
    /// RDMA WRITE by the target: Data-In.
    ToInitiator,
}

/// A range of the initiator's memory. It may run past the end of the address space if the initiator
/// says so.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RemoteRange {
    /// Address of the first byte, as the initiator counts.
    pub addr: u64,
    /// Key by which the initiator's device knows the memory.
    pub rkey: RKey,
    /// Length in bytes, as the initiator says.
    pub len: u32,
}

/// The initiator's side of a transfer: ranges of its memory, in order.
pub trait RemoteMemory {
    /// Returns the range at `index`.
    ///
    /// # Panics
    /// If there is none.
    fn range(&self, index: u32) -> RemoteRange;
}

impl RemoteMemory for RemoteRange {
    fn range(&self, index: u32) -> RemoteRange {
        assert_eq!(index, 0, "one range");
        *self
    }
}

/// One RDMA request of a chain.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RdmaRequest<L = ArrayVec<Range<usize>, MAX_SGE>> {
    /// Direction, which chooses READ or WRITE.
    pub direction: Direction,
    /// Start of the range in the initiator's memory.
    pub remote: RemoteAddr,
    /// Our side: ranges of the pool's mapping, as a list or as what yields them.
    pub local: L,
}

impl RdmaRequest<Ranges<'_>> {
    /// Returns the request with a list of its own, for those that keep it.
    #[must_use]
    pub fn to_list(self) -> RdmaRequest {
        RdmaRequest {
            direction: self.direction,
            remote: self.remote,
            local: self.local.collect(),
        }
    }
}

impl RdmaRequest {
    /// Returns its length in bytes.
    #[must_use]
    pub fn bytes(&self) -> u32 {
        let bytes: usize = self.local.iter().map(ExactSizeIterator::len).sum();
        bytes as u32
    }
}

/// Progress of a transfer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
struct Position {
    /// Bytes of the buffer.
    bytes: u32,
    /// Index of a remote range.
    range: u32,
    /// Bytes from the beginning of that range. At least as many as it has put the position in a
    /// later one.
    offset: u32,
}

/// Bounds of a portion.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PortionLimits {
    /// Maximum number of work requests.
    pub wrs: u32,
    /// Scatter-gather entries of each, at most [`MAX_SGE`].
    pub sges: usize,
}

/// A transfer under way.
#[derive(Clone, Debug)]
pub struct Transfer {
    direction: Direction,
    /// End of the transfer in the buffer.
    len: u32,
    /// Scatter-gather entries of a request, since the last plan.
    sges: usize,
    done: Position,
    planned: Position,
}

impl Transfer {
    /// A transfer of the first `len` bytes of the buffer.
    #[must_use]
    pub fn new(direction: Direction, len: u32) -> Self {
        Self::of_range(direction, 0..len)
    }

    /// A transfer of these bytes of the buffer; the remote ranges begin with the first of them.
    #[must_use]
    pub fn of_range(direction: Direction, range: Range<u32>) -> Self {
        Self::between(direction, range, 0)
    }

    /// A transfer of the first `len` bytes of the buffer: a piece of longer data, of which the
    /// remote ranges describe all. The piece begins `from` bytes into the data.
    #[must_use]
    pub fn of_piece(direction: Direction, from: u32, len: u32) -> Self {
        Self::between(direction, 0..len, from)
    }

    fn between(direction: Direction, range: Range<u32>, from: u32) -> Self {
        let start = Position {
            bytes: range.start,
            range: 0,
            // Ranges that lie before it are passed when the first portion is planned.
            offset: from,
        };
        Self {
            direction,
            len: range.end,
            sges: 0,
            done: start,
            planned: start,
        }
    }

    /// Returns the direction of the data.
    #[must_use]
    pub fn direction(&self) -> Direction {
        self.direction
    }

    /// Plans the next portion; returns its number of work requests.
    pub fn plan(
        &mut self,
        remote: &impl RemoteMemory,
        buffer: &Buffer,
        limits: PortionLimits,
    ) -> u32 {
        self.sges = limits.sges.min(MAX_SGE);
        let mut requests = self.walk(remote, buffer, self.len);
        let mut wrs = 0;
        while wrs < limits.wrs && requests.pass().is_some() {
            wrs += 1;
        }
        self.planned = requests.at;
        wrs
    }

    /// Returns the work requests of the planned portion, in order. Both sides have to be those that
    /// it was planned with.
    pub fn requests<'a, R: RemoteMemory>(
        &self,
        remote: &'a R,
        buffer: &'a Buffer,
    ) -> Requests<'a, R> {
        // The portion ends where a request does, so the walk cuts it as it did for the plan.
        self.walk(remote, buffer, self.planned.bytes)
    }

    fn walk<'a, R>(&self, remote: &'a R, buffer: &'a Buffer, end: u32) -> Requests<'a, R> {
        Requests {
            direction: self.direction,
            remote,
            buffer,
            sges: self.sges,
            at: self.done,
            end,
        }
    }

    /// Whether the planned portion is the last.
    #[must_use]
    pub fn is_last(&self) -> bool {
        self.planned.bytes == self.len
    }

    /// Returns the length of the planned portion in bytes.
    #[must_use]
    pub fn portion_len(&self) -> u32 {
        self.planned.bytes - self.done.bytes
    }

    /// The planned portion has completed.
    pub fn portion_done(&mut self) {
        self.done = self.planned;
    }
}

/// The walk over both sides of a transfer. A request covers one remote range at most, and has as
/// many pieces of the buffer as there are scatter-gather entries.
#[derive(Debug)]
pub struct Requests<'a, R> {
    direction: Direction,
    remote: &'a R,
    buffer: &'a Buffer,
    sges: usize,
    at: Position,
    /// End of the walk in the buffer.
    end: u32,
}

impl<R: RemoteMemory> Requests<'_, R> {
    /// Passes a request: where it begins in the initiator's memory, and which bytes of the buffer
    /// it moves.
    #[inline]
    fn pass(&mut self) -> Option<(RemoteAddr, Range<u32>)> {
        let at = &mut self.at;
        if at.bytes >= self.end {
            return None;
        }
        let mut range = self.remote.range(at.range);
        // The initiator may describe empty ranges. The sum of all was checked against the data, so
        // one that is not empty follows.
        while at.offset >= range.len {
            at.offset -= range.len;
            at.range += 1;
            range = self.remote.range(at.range);
        }
        let remote = RemoteAddr {
            // Where this wraps, the initiator's own device would refuse the range.
            addr: range.addr.wrapping_add(u64::from(at.offset)),
            rkey: range.rkey,
        };
        let room = (range.len - at.offset).min(self.end - at.bytes);
        let part = at.bytes..at.bytes + room;
        let bytes = self.buffer.len_of_pieces(part, self.sges);
        assert!(bytes > 0, "the buffer holds the transfer");
        let start = at.bytes;
        at.bytes += bytes;
        at.offset += bytes;
        Some((remote, start..at.bytes))
    }
}

impl<'a, R: RemoteMemory> Iterator for Requests<'a, R> {
    type Item = RdmaRequest<Ranges<'a>>;

    #[inline]
    fn next(&mut self) -> Option<Self::Item> {
        let (remote, bytes) = self.pass()?;
        Some(RdmaRequest {
            direction: self.direction,
            remote,
            local: self.buffer.ranges(bytes),
        })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::pool::Pool;

    /// Ranges whose keys are their numbers, at addresses that name them too.
    struct Ranges(Vec<u32>);

    impl RemoteMemory for Ranges {
        fn range(&self, index: u32) -> RemoteRange {
            RemoteRange {
                addr: u64::from(index) << 32,
                rkey: RKey(index),
                len: self.0[index as usize],
            }
        }
    }

    /// A buffer of a pool in pieces, and what keeps it so; none where there is no room.
    fn fragmented(pool: &mut Pool, holes: &[u32], len: u32) -> Option<(Buffer, Vec<Buffer>)> {
        let mut held: Vec<_> = holes.iter().filter_map(|&n| pool.take(n)).collect();
        for i in (0..held.len()).rev().step_by(2) {
            let buffer = held.swap_remove(i);
            pool.release(buffer);
        }
        let Some(buffer) = pool.take(len) else {
            held.into_iter().for_each(|b| pool.release(b));
            return None;
        };
        Some((buffer, held))
    }

    #[test]
    fn requests_end_at_remote_ranges_and_at_the_entry_limit() {
        let mut pool = Pool::new(1 << 20).unwrap();
        // Pages with gaps: a buffer gets single ones.
        let pages: Vec<_> = std::iter::from_fn(|| pool.take(4096)).collect();
        let (odd, even): (Vec<_>, Vec<_>) =
            pages.into_iter().enumerate().partition(|(i, _)| i % 2 == 1);
        even.into_iter().for_each(|(_, page)| pool.release(page));
        let buffer = pool.take(5 * 4096).unwrap();
        assert_eq!(buffer.ranges(0..5 * 4096).count(), 5);
        let remote = Ranges(vec![15, 0, 5 * 4096]);
        let mut transfer = Transfer::of_range(Direction::FromInitiator, 5..4 * 4096 + 6);
        let limits = PortionLimits { wrs: 60, sges: 3 };
        assert_eq!(transfer.plan(&remote, &buffer, limits), 3);
        let shape: Vec<_> = transfer
            .requests(&remote, &buffer)
            .map(RdmaRequest::to_list)
            .map(|r| {
                let local: Vec<_> = r.local.iter().map(ExactSizeIterator::len).collect();
                (r.remote.rkey.0, r.remote.addr & 0xffff_ffff, local)
            })
            .collect();
        let expected = [
            (0, 0, vec![15]),
            (2, 0, vec![4076, 4096, 4096]),
            (2, 12_268, vec![4096, 6]),
        ];
        assert_eq!(shape, expected);
        pool.release(buffer);
        odd.into_iter().for_each(|(_, page)| pool.release(page));
    }

    proptest! {
        /// Every byte goes once, in order, and as many requests are posted as were counted, for
        /// any ranges, buffer and limits.
        #[test]
        fn portions_conserve_bytes_and_post_what_was_counted(
            is_read in any::<bool>(),
            lens in proptest::collection::vec(0u32..70_000, 1..16),
            cut in any::<proptest::sample::Index>(),
            skip in any::<proptest::sample::Index>(),
            start in 0u32..9000,
            wrs in 1u32..5,
            sges in 1usize..5,
            holes in proptest::collection::vec(1u32..200_000, 0..20),
        ) {
            let mut pool = Pool::new(4 << 20).unwrap();
            let total: u32 = lens.iter().sum();
            prop_assume!(total > 0);
            let Some((buffer, held)) = fragmented(&mut pool, &holes, start + total) else {
                return Ok(());
            };
            let remote = Ranges(lens.clone());
            let len = cut.index(total as usize) as u32 + 1;
            let direction = match is_read {
                true => Direction::FromInitiator,
                false => Direction::ToInitiator,
            };
            // Either a part of the buffer, or a piece of the data: those before `from` were moved
            // before.
            let (from, part) = match is_read {
                true => (0, start..start + len),
                false => (skip.index((total - len + 1) as usize) as u32, 0..len),
            };
            let mut transfer = Transfer::between(direction, part.clone(), from);
            let mut before = u64::from(from);
            let mut local = Vec::new();
            let mut next = (0u64, 0u64);
            loop {
                let counted = transfer.plan(&remote, &buffer, PortionLimits { wrs, sges });
                prop_assert!(counted > 0 && counted <= wrs);
                let mut posted = 0;
                let mut bytes = 0;
                for request in transfer.requests(&remote, &buffer).map(RdmaRequest::to_list) {
                    posted += 1;
                    bytes += request.bytes();
                    prop_assert_eq!(request.direction, direction);
                    prop_assert!(request.local.len() <= sges);
                    let (index, offset) =
                        (request.remote.addr >> 32, request.remote.addr & 0xffff_ffff);
                    prop_assert!((index, offset) >= next, "in order");
                    // Its place in the data that the ranges describe.
                    let at: u64 = lens[..index as usize].iter().map(|&len| u64::from(len)).sum();
                    prop_assert_eq!(at + offset, before, "without gaps");
                    before += u64::from(request.bytes());
                    prop_assert_eq!(u64::from(request.remote.rkey.0), index);
                    next = (index, offset + u64::from(request.bytes()));
                    prop_assert!(next.1 <= u64::from(lens[index as usize]));
                    local.extend(request.local.iter().cloned().flatten());
                }
                prop_assert_eq!(posted, counted);
                prop_assert_eq!(bytes, transfer.portion_len());
                let last = transfer.is_last();
                transfer.portion_done();
                if last { break; }
            }
            let expected: Vec<usize> = buffer.ranges(part).flatten().collect();
            prop_assert_eq!(local, expected);
            pool.release(buffer);
            for b in held { pool.release(b); }
        }
    }
}
