//! The data buffer pool of a worker.
//!
//! A single mapping, which is registered with the NIC and with `io_uring`, is allocated in
//! power-of-two blocks (a buddy allocator), so that data is transferred disk → buffer → wire
//! without a copy. A [`Buffer`] consists of up to [`MAX_PIECES`] blocks for the data of a command.
//! Usually it is a single block, and only a list of more than two blocks is allocated on the heap.
//!
//! # Isolation
//! A command keeps its buffer until its initiator has sent or received the data, and until its unit
//! has executed the command. We cannot bound either of these: a disk may hang, and an initiator may
//! be very slow. Therefore, each buffer is charged to a *claim*: the initiator and the unit of its
//! command. It is allocated from one of three parts of the pool:
//!
//! | part | size | available to |
//! | --- | --- | --- |
//! | common | the rest, at least half | every claim, see *Fairness* |
//! | initiators | a quarter, with at least two initiators | each initiator, up to an equal part |
//! | units | a quarter, with at least two units | each unit, up to an equal part |
//!
//! A request tries them in this order. Bytes are counted for the claim that uses them, so the
//! invariant is a sum: *common + parts of all initiators + parts of all units ≤ pool*. Therefore,
//! regardless of how much memory is used by units that never complete a command and by initiators
//! that never send their data,
//! - a unit that uses less than its part can get memory up to that part, for any initiator, and
//! - an initiator that uses less than its part can get memory up to that part, for any unit.
//!
//! Half of a unit's part is reserved for commands that have started: commands that have gathered
//! their data may be waiting for one of these in the order of the task set, so they must leave
//! memory for it. Commands that have started can also use the other half while no command is
//! waiting to gather its data.
//!
//! All memory of an initiator counts against its part. A unit's part is available in addition to
//! the other memory of the unit: initiators with memory must not keep a unit busy at the expense of
//! an initiator without memory.
//!
//! If a buffer is larger than a part, it can still be allocated if it is the only buffer of its
//! account, while there is room in its area. If the parts are smaller than the largest block
//! ([`MAX_BLOCK`]), the guarantee for such large buffers therefore ends when as many accounts have
//! a large buffer as the area has room for: 16 units, or 16 initiators, with the default pool of 64
//! MiB. A pool smaller than 4 MiB does not have any parts.
//!
//! All sessions of an initiator share a single part. An owner ([`Owner`]) without a session is
//! treated as an initiator.
//!
//! # Fairness
//! While no claim is waiting for memory, every request can use common memory if available.
//! Otherwise, a claim only gets more if its initiator and its unit are within their shares: the
//! pool divided by the number of initiators, or units, that use or want memory. The first claim in
//! the line that is allowed by its shares has its turn. Other claims can still be granted memory
//! before it, because a small request may fit where a large one does not, but only up to half of
//! the common memory. After that, only the claim whose turn it is can get memory. So neither small
//! nor large requests starve. If an initiator had more than half of its share before other
//! initiators started to wait, it must transfer its data at a minimum rate, or its connection is
//! closed: [`Pool::is_owed_by`].
//!
//! The part of a unit also has turns. The first request in the line for a half of it reserves the
//! bytes it was refused until it is granted or withdrawn, and other requests can only get the
//! remaining memory. A request larger than this half needs the whole part, so it also excludes
//! commands that want to start, as soon as there is no command left that has gathered its data and
//! may be waiting for them. If a request does not fit into the part, even if the unit had no
//! memory, it does not reserve anything.
//!
//! # Reserve
//! A command that waits in the order of its task set may have a buffer with its data, while the
//! command it is waiting for has no buffer yet. The unit's part has room for that command, unless
//! the part is too small. Therefore, there is an additional reserve for commands that have started
//! and wait for memory, for one command per unit at a time. Such a command does not wait for any
//! other command, so the reserve is returned unless its unit hangs. Claims take turns to use it.
//!
//! This means that a unit depends on the reserve if half of its part is less than a window: with
//! the default pool, if there are more than 8 units. If as many other units hang as there are
//! windows in the reserve (4), commands in the order of its task set may have to wait for a command
//! that is waiting for memory.
//!
//! # Tables
//! Descriptor tables use separate memory, because a command keeps its table while it waits for data
//! memory. If both used the same memory, tables could use all of it. An owner can use at most half
//! of the table memory.
//!
//! # Invariants
//! - Each byte of the pool belongs either to the pool or to exactly one buffer.
//! - A buffer is returned with [`Pool::release`]. Dropping a buffer instead is a bug, which is
//!   reported in debug builds.
//! - There are no references into a buffer while a device may write to it: data is copied
//!   ([`riser_scsi::access::DataAccess`]), and a caller that accesses it in place must ensure this
//!   ([`Buffer::for_each_piece`]).
//!
//! # Not implemented
//! Growing: the size is fixed when the worker starts. Parts are counted in bytes and have no fixed
//! location: the buffers of a hanging claim may leave a part in blocks that are too small for a
//! large buffer of [`MAX_PIECES`]. Turns within the part of an initiator. A buffer that is larger
//! than a unit's part (1 MiB, with the default pool and more than 16 units) has to wait while other
//! initiators keep the unit busy using other memory.
//!
//! # Modules
//! - `blocks`: the allocator. `buffer`: buffers. `shares`: the accounts.

mod blocks;
mod buffer;
mod shares;

use std::collections::VecDeque;
use std::hash::Hash;
use std::io;

use riser_memory::Memory;

use blocks::Blocks;
pub use buffer::{Buffer, Ranges};
use shares::{Ahead, Charge, Part, Shares};

/// The smallest block in bytes. This is a page, so that blocks can be used for direct I/O.
pub const MIN_BLOCK: usize = 4096;

/// The largest block is `MIN_BLOCK << MAX_ORDER`: 1 MiB.
const MAX_ORDER: usize = 8;

/// The largest block, in bytes.
pub const MAX_BLOCK: usize = MIN_BLOCK << MAX_ORDER;

// The window of a long command is a single block.
const _: () = assert!(MAX_BLOCK == riser_config::WINDOW as usize);

/// Minimum size of the reserve in bytes: room for a window and its scratch memory.
const RESERVE: usize = 2 * MAX_BLOCK;

/// Maximum number of blocks per buffer: enough for a large block in pieces of 32 KiB, if memory is
/// fragmented.
pub const MAX_PIECES: usize = 32;

/// Owner of a buffer: the channel number at its worker.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Owner(pub u64);

/// The claim for a buffer: the owner and the unit of its command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Claim {
    /// Channel of the command.
    pub owner: Owner,
    /// Unit number, if the command is for a unit.
    pub unit: Option<u32>,
}

impl From<Owner> for Claim {
    fn from(owner: Owner) -> Self {
        Self { owner, unit: None }
    }
}

/// A claim in the line. There are separate entries for commands that gather their data and for
/// commands that have started.
#[derive(Clone, Copy, Debug)]
struct Waiter {
    claim: Claim,
    gathers: bool,
    /// Size of the last refused request in bytes.
    need: usize,
    /// Bytes of common memory that were granted to other waiters during its turn.
    passed: usize,
}

impl Waiter {
    fn is_of(&self, claim: Claim, gathers: bool) -> bool {
        self.claim == claim && self.gathers == gathers
    }
}

/// The buffers of a worker.
#[derive(Debug)]
pub struct Pool {
    memory: Memory,
    data: Blocks,
    tables: Blocks,
    reserve: Blocks,
    lowest_free: usize,
    shares: Shares,
    /// Refused requests for data memory, in the order of turns.
    line: VecDeque<Waiter>,
    /// Waiting claims without duplicates, in the order of turns for the reserve.
    queue: VecDeque<Claim>,
    /// The last refused request, until it starts to wait.
    refused: Option<Waiter>,
    /// Set if a claim in the line may now get memory that was refused before.
    has_changed: bool,
    /// Bytes received by commands without a buffer, outside of the pool.
    staged: usize,
}

impl Pool {
    /// Maps a pool of `bytes`, rounded up to a multiple of [`MAX_BLOCK`]. We also map a sixteenth
    /// of that for descriptor tables, and a sixteenth, but at least 2 MiB, for the reserve.
    ///
    /// # Errors
    /// Errors from `mmap(2)`.
    pub fn new(bytes: usize) -> io::Result<Self> {
        // Round up, because the end of the pool could otherwise not be used for a long command.
        let len = bytes.max(1).next_multiple_of(MAX_BLOCK);
        let sixteenth = (len / 16).next_multiple_of(MAX_BLOCK);
        let (tables, reserve) = (sixteenth, len.min(sixteenth.max(RESERVE)));
        let memory = Memory::new(len + tables + reserve)?;
        Ok(Self {
            memory,
            data: Blocks::new(0, len),
            tables: Blocks::new(len, tables),
            reserve: Blocks::undivided(len + tables, reserve),
            lowest_free: len,
            shares: Shares::new(len),
            line: VecDeque::new(),
            queue: VecDeque::new(),
            refused: None,
            has_changed: false,
            staged: 0,
        })
    }

    /// Sets the number of units, which share a part of the pool.
    pub fn set_units(&mut self, count: usize) {
        self.shares.set_units(count);
        self.has_changed = true;
    }

    /// Called when an owner has logged in with this initiator name. The initiator has its part of
    /// the pool until [`Pool::remove_member`].
    pub fn add_member(&mut self, owner: Owner, initiator: &impl Hash) {
        self.shares.add_member(owner, initiator);
        self.has_changed = true;
    }

    /// Called when the session of an owner is closed.
    pub fn remove_member(&mut self, owner: Owner) {
        self.shares.remove_member(owner);
        self.has_changed = true;
    }

    /// Returns the mapping, so that it can be registered with devices.
    #[must_use]
    pub fn memory(&self) -> &Memory {
        &self.memory
    }

    /// Returns the size in bytes, not including the table memory and the reserve.
    #[must_use]
    pub fn size(&self) -> usize {
        self.data.len
    }

    /// Returns the number of bytes that are not in use for data buffers, not including the reserve.
    #[must_use]
    pub fn free(&self) -> usize {
        self.data.free
    }

    /// Returns the lowest value of [`Pool::free`] since the start.
    #[must_use]
    pub fn lowest_free(&self) -> usize {
        self.lowest_free
    }

    /// Returns whether all buffers were returned, including tables and the reserve.
    #[must_use]
    pub fn is_whole(&self) -> bool {
        let parts = [&self.data, &self.tables, &self.reserve];
        parts.iter().all(|blocks| blocks.is_whole())
    }

    /// Returns the maximum size of a buffer in an empty pool, in bytes.
    #[must_use]
    pub fn max_buffer(&self) -> usize {
        self.size().min(MAX_PIECES * MAX_BLOCK)
    }

    /// Allocates a data buffer of `len` bytes for a command that has started. Returns `None` if
    /// there is not enough memory, or if it is not its turn. In this case, the caller should use
    /// [`Pool::wait`].
    pub fn grant(&mut self, claim: impl Into<Claim>, len: u32) -> Option<Buffer> {
        self.grant_part(claim.into(), len, false)
    }

    /// Same as [`Pool::grant`], for a command that has not started and needs to gather its data.
    pub fn grant_to_gather(&mut self, claim: Claim, len: u32) -> Option<Buffer> {
        self.grant_part(claim, len, true)
    }

    fn grant_part(&mut self, claim: Claim, len: u32, gathers: bool) -> Option<Buffer> {
        let need = needed(len);
        let part = match self.may_take(claim, need, gathers) {
            true => Some(Part::Common),
            false => self.guaranteed(claim, need, gathers),
        };
        // Moving a buffer is expensive, so return it directly.
        let mut granted = match part {
            Some(_) => self.allocate(len),
            None => None,
        };
        let (Some(buffer), Some(part)) = (&mut granted, part) else {
            self.refused = Some(Waiter {
                claim,
                gathers,
                need,
                passed: 0,
            });
            let mut line = self.line.iter_mut();
            if let Some(waiter) = line.find(|w| w.is_of(claim, gathers)) {
                waiter.need = need;
            }
            return None;
        };
        let charge = Charge { claim, part };
        buffer.charge = Some(charge);
        self.shares.charge(charge, buffer.held());
        if !self.queue.is_empty() {
            self.update_line(charge, need, gathers);
        }
        granted
    }

    /// Called when a request was granted while claims are waiting.
    fn update_line(&mut self, Charge { claim, part }: Charge, need: usize, gathers: bool) {
        let turn = self.turn();
        let has_turn = turn.is_some_and(|at| self.line[at].is_of(claim, gathers));
        if let Some(at) = turn.filter(|_| !has_turn && part == Part::Common) {
            self.line[at].passed += need;
        }
        let own = self.line.iter().position(|w| w.is_of(claim, gathers));
        if let Some(own) = own {
            // If its claim is still waiting, the next refused request is appended to the line.
            self.line.remove(own);
            if has_turn {
                self.end_turn(claim);
            }
            // The next waiter may have been refused only because of this one.
            self.has_changed = true;
        }
    }

    /// Allocates a data buffer of `len` bytes from the reserve, for a command that has started.
    /// This should be used for waiting claims in the order of [`Pool::waiting`].
    pub fn grant_reserve(&mut self, claim: impl Into<Claim>, len: u32) -> Option<Buffer> {
        let claim = claim.into();
        if !self.has_reserve(claim, len) {
            return None;
        }
        let mut buffer = self.reserve.allocate(&self.memory, len)?;
        let charge = Charge {
            claim,
            part: Part::Reserve,
        };
        buffer.charge = Some(charge);
        self.shares.charge(charge, buffer.held());
        self.end_turn(claim);
        Some(buffer)
    }

    /// Returns whether the reserve has `len` bytes for a claim.
    #[must_use]
    pub fn has_reserve(&self, claim: Claim, len: u32) -> bool {
        let need = (len as usize).next_multiple_of(MAX_BLOCK);
        need <= self.reserve.free && !self.shares.has_reserve(claim.unit)
    }

    /// Called when memory was granted to a claim in the line.
    fn end_turn(&mut self, claim: Claim) {
        if let Some(at) = self.queue.iter().position(|&other| other == claim) {
            self.queue.remove(at);
            self.queue.push_back(claim);
        }
    }

    /// Allocates a buffer for descriptors. Returns `None` if there is not enough memory, or if the
    /// owner already has its half.
    pub fn take_table(&mut self, owner: Owner, len: u32) -> Option<Buffer> {
        if self.shares.tables(owner) + needed(len) > self.tables.len / 2 {
            return None;
        }
        let mut buffer = self.tables.allocate(&self.memory, len)?;
        buffer.charge = Some(Charge {
            claim: owner.into(),
            part: Part::Reserve,
        });
        self.shares.add_table(owner, buffer.held());
        Some(buffer)
    }

    /// Returns whether more than half of the table memory is free, and this owner uses at most a
    /// sixteenth.
    #[must_use]
    pub fn has_spare_tables(&self, owner: Owner) -> bool {
        self.shares.tables(owner) <= self.tables.len / 16 && self.tables.free > self.tables.len / 2
    }

    /// Waits for the data buffer that was just refused by [`Pool::grant`]. The owner is now
    /// included in [`Pool::waiting`].
    pub fn wait(&mut self, claim: impl Into<Claim>) {
        let claim = claim.into();
        let waits = self.shares.waits(claim.owner) && self.queue.contains(&claim);
        let refused = self.refused.take();
        if !waits {
            self.shares.begin_wait(claim);
            self.queue.push_back(claim);
        }
        let Some(waiter) = refused.map(|refused| Waiter { claim, ..refused }) else {
            return;
        };
        let mut line = self.line.iter();
        if !line.any(|w| w.is_of(claim, waiter.gathers)) {
            self.line.push_back(waiter);
        }
    }

    /// Same as [`Pool::wait`], for `len` bytes of a command that has started, which may be able to
    /// use the reserve.
    pub fn wait_started(&mut self, claim: impl Into<Claim>, len: u32) {
        let claim = claim.into();
        self.wait(claim);
        self.has_changed |= self.has_reserve(claim, len);
    }

    /// Stops waiting.
    pub fn leave_line(&mut self, claim: impl Into<Claim>) {
        let claim = claim.into();
        if self.shares.waits(claim.owner) && self.queue.contains(&claim) {
            self.line.retain(|waiter| waiter.claim != claim);
            self.queue.retain(|&other| other != claim);
            self.shares.end_wait(claim);
            self.has_changed = true;
        }
    }

    /// Called when a request of a claim was withdrawn. If its other requests are still waiting, the
    /// next refused request will be added to the line again.
    pub fn withdraw(&mut self, claim: Claim) {
        self.line.retain(|waiter| waiter.claim != claim);
        self.has_changed = true;
    }

    /// If claims are waiting, returns whether memory was returned or the line has moved since the
    /// last call.
    pub fn take_change(&mut self) -> bool {
        std::mem::take(&mut self.has_changed) && !self.queue.is_empty()
    }

    /// Returns the same as [`Pool::take_change`], without resetting it.
    #[must_use]
    pub fn has_change(&self) -> bool {
        self.has_changed && !self.queue.is_empty()
    }

    /// Returns the number of bytes of unsolicited data from commands that are waiting for data
    /// memory. This is stored outside of the pool.
    #[must_use]
    pub fn staged(&self) -> usize {
        self.staged
    }

    /// Called when a command with `bytes` of unsolicited data starts to wait.
    pub fn stage(&mut self, bytes: usize) {
        self.staged += bytes;
    }

    /// Reverses [`Pool::stage`].
    pub fn unstage(&mut self, bytes: usize) {
        self.staged -= bytes;
    }

    /// Returns the waiting owners in the order of turns. An owner is returned once per claim.
    pub fn waiting(&self) -> impl Iterator<Item = Owner> + '_ {
        self.queue.iter().map(|claim| claim.owner)
    }

    /// Allocates a data buffer of `len` bytes. Returns `None` if there is not enough memory, or if
    /// it is too fragmented.
    pub fn allocate(&mut self, len: u32) -> Option<Buffer> {
        let buffer = self.data.allocate(&self.memory, len);
        self.lowest_free = self.lowest_free.min(self.data.free);
        buffer
    }

    /// Returns a buffer, which must no longer be used by any device.
    ///
    /// # Panics
    /// If the buffer belongs to a different pool.
    pub fn release(&mut self, mut buffer: Buffer) {
        // The offset determines the part of the mapping. An empty buffer does not have any pieces.
        let start = buffer.pieces.first().map_or(0, |piece| piece.offset);
        let is_table = (self.tables.base..self.reserve.base).contains(&start);
        let held = buffer.held();
        let blocks = if start >= self.reserve.base {
            &mut self.reserve
        } else if is_table {
            &mut self.tables
        } else {
            &mut self.data
        };
        for piece in &buffer.pieces {
            blocks.release(piece.offset);
        }
        buffer.pieces.clear();
        self.has_changed = true;
        match buffer.charge {
            Some(charge) if is_table => self.shares.remove_table(charge.claim.owner, held),
            Some(charge) => self.shares.discharge(charge, held),
            None => {}
        }
    }

    /// Returns whether this owner has to return memory: a claim of another initiator is waiting and
    /// within its shares (without guaranteed parts, its unit may exceed its share), and this
    /// initiator uses more than half of its share.
    pub fn is_owed_by(&self, owner: Owner) -> bool {
        self.shares.is_beyond_half_share(owner)
            && self.line.iter().any(|waiter| {
                !self.shares.is_same_initiator(waiter.claim.owner, owner)
                    && self.shares.is_entitled(waiter.claim, waiter.need)
            })
    }

    /// Returns the position in the line of the claim whose turn it is.
    fn turn(&self) -> Option<usize> {
        if self.line.is_empty() {
            return None;
        }
        let mut line = self.line.iter();
        line.position(|waiter| self.shares.is_within_share(waiter.claim, waiter.need))
    }

    /// Returns whether a claim can use common memory.
    fn may_take(&self, claim: Claim, need: usize, gathers: bool) -> bool {
        if !self.shares.has_common(need) {
            return false;
        }
        // No other claim is waiting, so there is no need to share.
        if self.queue.is_empty() || self.queue.iter().all(|&waiting| waiting == claim) {
            return true;
        }
        if !self.shares.is_within_share(claim, need) {
            return false;
        }
        self.turn().is_none_or(|at| {
            let waiter = &self.line[at];
            waiter.is_of(claim, gathers) || waiter.passed + need <= self.shares.common() / 2
        })
    }

    /// Returns the guaranteed part with room for a request, if any.
    fn guaranteed(&self, claim: Claim, need: usize, gathers: bool) -> Option<Part> {
        if self.shares.has_initiator_room(claim.owner, need) {
            return Some(Part::Initiator);
        }
        let unit = claim.unit?;
        let ahead = self.ahead(unit, |waiter| waiter.is_of(claim, gathers), gathers);
        self.shares.unit_part(unit, need, gathers, ahead)
    }

    /// Returns the requests before a request for a unit's part. We ignore requests that do not fit
    /// into the part, because the memory they need is used by other units.
    fn ahead(&self, unit: u32, is_own: impl Fn(&Waiter) -> bool, gathers: bool) -> Ahead {
        let mut ahead = Ahead::default();
        let mut first = None;
        for waiter in &self.line {
            if waiter.claim.unit != Some(unit) || !self.shares.can_hold(unit, waiter.need) {
                continue;
            }
            ahead.gathers |= waiter.gathers;
            let is_rival = waiter.gathers == gathers
                || (waiter.gathers && self.shares.excludes_started(unit, waiter.need));
            if is_rival && first.is_none() {
                first = Some(waiter);
            }
        }
        ahead.reserved = first.filter(|first| !is_own(first)).map_or(0, |w| w.need);
        ahead
    }
}

/// Returns the size in bytes of the blocks required for `len` bytes.
fn needed(len: u32) -> usize {
    let len = len as usize;
    let rest = len % MAX_BLOCK;
    let last = match rest {
        0 => 0,
        _ => MIN_BLOCK * rest.div_ceil(MIN_BLOCK).next_power_of_two(),
    };
    len - rest + last
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use riser_scsi::access::DataAccess as _;

    use super::*;

    #[test]
    fn data_crosses_pieces_and_is_released() {
        let mut pool = Pool::new(4 << 20).unwrap();
        let len = (2 << 20) + 4096 + 7;
        let buffer = pool.allocate(len).unwrap();
        assert_eq!(buffer.len(), len);
        assert!(buffer.pieces.len() >= 3);
        let data: Vec<u8> = (0..3000u32).map(|i| (i % 251) as u8).collect();
        let at = (1 << 20) - 1000;
        buffer.write(at, &data);
        let mut back = vec![0; data.len()];
        buffer.read(at, &mut back);
        assert_eq!(back, data);
        let mut in_place = Vec::new();
        // SAFETY: the buffer is not used by any device.
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
    fn exhausted_pool_recovers_all_memory() {
        let mut pool = Pool::new(1 << 20).unwrap();
        let a = pool.allocate(1 << 19).unwrap();
        assert!(pool.allocate((1 << 19) + 1).is_none());
        assert_eq!(pool.free(), 1 << 19);
        let b = pool.allocate(1 << 19).unwrap();
        assert!(pool.allocate(1).is_none());
        let nothing = pool.allocate(0).unwrap();
        assert!(nothing.is_empty());
        for x in [a, b, nothing] {
            pool.release(x);
        }
        let whole = pool.allocate(1 << 20).unwrap();
        assert_eq!(whole.ranges(0..1 << 20).count(), 1, "neighbours rejoin");
        pool.release(whole);
    }

    #[test]
    fn owner_keeps_share_while_others_wait() {
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
            assert_eq!(pool.is_owed_by(hog), left > 2, "{left}");
            assert!(!pool.is_owed_by(other));
        }
        let all = [hog, other].map(|owner| pool.grant(owner, MIB).unwrap());
        all.into_iter().for_each(|buffer| pool.release(buffer));
        pool.leave_line(hog);
        pool.leave_line(other);
        assert!(pool.shares.is_idle() && pool.is_whole());
    }

    #[test]
    fn owner_over_share_loses_turn() {
        const MIB: u32 = 1 << 20;
        let (first, other) = (Owner(1), Owner(2));
        let mut pool = Pool::new(8 << 20).unwrap();
        let held = pool.grant(first, 3 * MIB + MIB / 2).unwrap();
        let rest = pool.allocate(4 * MIB + MIB / 2).unwrap();
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
        // Small requests are granted and released, but the large request should get the memory in
        // the end.
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
    fn started_commands_take_turns_with_reserve() {
        let (greedy, other) = (Owner(1), Owner(2));
        let mut pool = Pool::new(4 << 20).unwrap();
        let mut held: Vec<_> = std::iter::from_fn(|| pool.grant(greedy, 1 << 20)).collect();
        for owner in [greedy, other] {
            assert!(pool.grant(owner, 4096).is_none());
            pool.wait_started(owner, 4096);
            assert!(pool.has_change() && pool.take_change());
        }
        // This does not depend on shares, but no owner should get two turns while another owner is
        // waiting.
        for owner in [greedy, other, greedy, other] {
            assert_eq!(pool.waiting().next(), Some(owner));
            let reserve = pool.grant_reserve(owner, 4096).unwrap();
            assert!(pool.grant_reserve(greedy, 4096).is_none());
            assert!(pool.grant_reserve(other, 4096).is_none());
            // A new waiter cannot use the reserve.
            pool.wait_started(Owner(3), 4096);
            assert!(!pool.has_change());
            pool.leave_line(Owner(3));
            pool.release(reserve);
            assert!(pool.take_change());
        }
        // It has room for a window and its scratch memory, even if the rest is fragmented.
        held.push(pool.grant_reserve(other, 2 << 20).unwrap());
        pool.leave_line(greedy);
        pool.leave_line(other);
        assert!(!pool.is_whole());
        held.into_iter().for_each(|buffer| pool.release(buffer));
        assert!(pool.is_whole() && pool.shares.is_idle() && pool.queue.is_empty());
    }

    #[test]
    fn next_turn_wakes_its_claim() {
        const HALF: u32 = 1 << 19;
        let (first, other, passing) = (Owner(1), Owner(2), Owner(3));
        // A small pool only consists of common memory.
        let mut pool = Pool::new(3 << 20).unwrap();
        let held = pool.allocate(3 << 20).unwrap();
        for owner in [first, other] {
            assert!(pool.grant(owner, HALF).is_none());
            pool.wait_started(owner, HALF);
        }
        let reserve = pool.grant_reserve(first, HALF).unwrap();
        pool.release(reserve);
        pool.release(held);
        while let Some(buffer) = pool.grant(passing, HALF) {
            pool.release(buffer);
        }
        // The reserve has separate turns, so the claim whose turn it is here is not the first to
        // try.
        assert!(pool.take_change());
        assert_eq!(pool.waiting().collect::<Vec<_>>(), [other, first]);
        assert!(pool.grant(other, HALF).is_none());
        let own = pool.grant(first, HALF).unwrap();
        assert!(pool.take_change(), "there is memory for the other");
        let next = pool.grant(other, HALF).unwrap();
        pool.release(own);
        pool.release(next);
    }

    #[test]
    fn tables_do_not_use_data_memory() {
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
        assert!(pool.is_whole() && pool.shares.is_idle());
    }

    fn claim(owner: u64, unit: u32) -> Claim {
        Claim {
            owner: Owner(owner),
            unit: Some(unit),
        }
    }

    /// Returns a pool with sessions of this number of initiators, and with this number of units.
    fn shared(bytes: usize, sessions: u64, units: usize) -> Pool {
        let mut pool = Pool::new(bytes).unwrap();
        pool.set_units(units);
        for n in 0..sessions {
            pool.add_member(Owner(n), &n);
        }
        pool
    }

    /// Allocates as many buffers as possible for a claim, and waits for more.
    fn take_all(pool: &mut Pool, claim: Claim, len: u32) -> Vec<Buffer> {
        let all = std::iter::from_fn(|| pool.grant_to_gather(claim, len)).collect();
        pool.wait(claim);
        all
    }

    #[test]
    fn hung_units_leave_memory_for_healthy_unit() {
        const MIB: u32 = 1 << 20;
        let mut pool = shared(64 << 20, 8, 4);
        let mut held = Vec::new();
        // Three of four units hang, and all sessions except one have commands for them.
        for unit in 0..3 {
            for owner in 0..7 {
                held.append(&mut take_all(&mut pool, claim(owner, unit), MIB));
            }
        }
        assert!(pool.free() >= 4 << 20, "{} bytes are left", pool.free());
        for owner in [0, 7] {
            let healthy = claim(owner, 3);
            let write = pool.grant_to_gather(healthy, MIB).unwrap();
            let read = pool.grant(healthy, MIB).unwrap();
            pool.release(write);
            pool.release(read);
        }
        // A session without any memory can use its part even for a hanging unit.
        held.push(pool.grant_to_gather(claim(7, 0), MIB).unwrap());
        held.into_iter().for_each(|buffer| pool.release(buffer));
        assert!(pool.is_whole());
    }

    #[test]
    fn trickling_sessions_leave_memory_for_others() {
        const MIB: u32 = 1 << 20;
        let mut pool = shared(64 << 20, 8, 1);
        let mut held = Vec::new();
        for owner in 0..7 {
            held.append(&mut take_all(&mut pool, claim(owner, 0), MIB));
        }
        let other = pool.grant_to_gather(claim(7, 0), MIB).unwrap();
        pool.release(other);
        held.into_iter().for_each(|buffer| pool.release(buffer));
    }

    /// A pool that is too small for parts has no memory left for other initiators. The commands of
    /// the idle initiator also use up the share of the unit.
    #[test]
    fn idle_initiator_returns_memory_of_small_pool() {
        let mut pool = shared(2 << 20, 2, 1);
        let held = take_all(&mut pool, claim(0, 0), 64 << 10);
        assert_eq!(pool.free(), 0);
        assert!(pool.grant_to_gather(claim(1, 0), 4096).is_none());
        pool.wait(claim(1, 0));
        assert!(pool.is_owed_by(Owner(0)));
        assert!(!pool.is_owed_by(Owner(1)));
        held.into_iter().for_each(|buffer| pool.release(buffer));
        pool.leave_line(claim(1, 0));
        assert!(pool.is_whole());
    }

    /// An initiator can send commands immediately after its last login request.
    #[test]
    fn early_commands_count_for_initiator() {
        let mut pool = shared(64 << 20, 2, 1);
        let early = Owner(2);
        let mut held = vec![pool.grant(early, 1 << 20).unwrap()];
        pool.add_member(early, &0u64);
        pool.add_member(early, &0u64);
        assert!(pool.shares.is_same_initiator(early, Owner(0)));
        assert_eq!(pool.shares.parts().0, 8 << 20, "of two initiators");
        held.push(pool.grant(Owner(0), 1 << 20).unwrap());
        pool.remove_member(Owner(0));
        held.into_iter().for_each(|buffer| pool.release(buffer));
        assert_eq!(pool.shares.parts().0, 8 << 20);
        pool.remove_member(early);
        assert!(pool.shares.is_idle());
        assert_eq!(pool.shares.parts().0, 0, "of one");
    }

    /// If a disk hangs, it may take a long time until a buffer is returned.
    #[test]
    fn departed_initiator_and_unit_wake_waiters() {
        let mut pool = shared(64 << 20, 2, 1);
        let waiter = Claim::from(Owner(0));
        let mut held = take_all(&mut pool, waiter, 1 << 20);
        assert_eq!(held.len(), 48 + 8 - 8);
        let _ = pool.take_change();
        pool.remove_member(Owner(1));
        assert!(pool.take_change(), "the part of the initiators is common");
        held.append(&mut take_all(&mut pool, waiter, 1 << 20));
        assert_eq!(pool.free(), 0);
        held.into_iter().for_each(|buffer| pool.release(buffer));
        let mut pool = shared(64 << 20, 1, 2);
        let mut held = take_all(&mut pool, waiter, 1 << 20);
        let _ = pool.take_change();
        pool.set_units(1);
        assert!(pool.take_change(), "the part of the units is common");
        held.append(&mut take_all(&mut pool, waiter, 1 << 20));
        assert_eq!(pool.free(), 0);
        held.into_iter().for_each(|buffer| pool.release(buffer));
    }

    /// The account of the owner is removed, and the part of each initiator becomes larger.
    #[test]
    fn early_login_wakes_waiters() {
        const MIB: u32 = 1 << 20;
        let mut pool = shared(64 << 20, 2, 1);
        let early = Owner(2);
        let mut held = vec![pool.grant(early, MIB).unwrap()];
        held.append(&mut take_all(&mut pool, Owner(1).into(), MIB));
        let waiter = Claim::from(Owner(0));
        held.append(&mut take_all(&mut pool, waiter, MIB));
        let _ = pool.take_change();
        pool.add_member(early, &1u64);
        assert!(pool.take_change(), "parts of two initiators, not of three");
        let more = take_all(&mut pool, waiter, MIB);
        assert!(!more.is_empty());
        held.into_iter().chain(more).for_each(|b| pool.release(b));
    }

    #[test]
    fn sessions_of_one_initiator_share_its_part() {
        const MIB: u32 = 1 << 20;
        let mut pool = Pool::new(16 << 20).unwrap();
        for n in 0..30 {
            pool.add_member(Owner(n), &1);
        }
        pool.add_member(Owner(30), &2);
        let mut held = Vec::new();
        for owner in 0..30 {
            held.append(&mut take_all(&mut pool, claim(owner, 0), MIB));
        }
        // The pool has 16 MiB, and 4 MiB of this is for initiators: 2 MiB each.
        assert_eq!(pool.free(), 4 << 20);
        let own: Vec<_> = (0..2)
            .map(|_| pool.grant_to_gather(claim(30, 0), MIB).unwrap())
            .collect();
        assert!(pool.grant_to_gather(claim(30, 0), MIB).is_none());
        held.into_iter()
            .chain(own)
            .for_each(|buffer| pool.release(buffer));
        for owner in 0..30 {
            pool.leave_line(claim(owner, 0));
        }
        assert!(pool.is_whole() && pool.shares.is_idle());
    }

    #[test]
    fn started_commands_find_memory_behind_gathered_ones() {
        let mut pool = shared(64 << 20, 4, 4);
        let mut held = Vec::new();
        for owner in 0..4 {
            held.append(&mut take_all(&mut pool, claim(owner, 0), 1 << 20));
        }
        let started = pool.grant(claim(0, 0), 1 << 20).unwrap();
        held.push(started);
        held.into_iter().for_each(|buffer| pool.release(buffer));
    }

    #[test]
    fn reserve_serves_one_command_per_unit() {
        let mut pool = shared(64 << 20, 2, 8);
        let all = pool.allocate(32 << 20).unwrap();
        let rest = pool.allocate(32 << 20).unwrap();
        let granted: Vec<_> = (0..8)
            .filter_map(|unit| {
                let buffer = pool.grant_reserve(claim(0, unit), 4096)?;
                assert!(pool.grant_reserve(claim(1, unit), 4096).is_none());
                Some(buffer)
            })
            .collect();
        assert_eq!(granted.len(), 4);
        granted
            .into_iter()
            .chain([all, rest])
            .for_each(|buffer| pool.release(buffer));
        assert!(pool.is_whole() && pool.shares.is_idle());
    }

    /// Returns a pool of 64 MiB in which the hanging unit 0 uses the common memory and the
    /// initiators' parts.
    fn with_hung_unit(units: usize) -> (Pool, Vec<Buffer>) {
        let mut pool = shared(64 << 20, 4, units);
        let mut held = Vec::new();
        for owner in 0..4 {
            held.append(&mut take_all(&mut pool, claim(owner, 0), 1 << 20));
        }
        (pool, held)
    }

    /// Returns whether a WRITE of 1 MiB from initiator 3 for unit 1 is granted. In the meantime,
    /// other initiators keep four requests of 64 KiB for this unit in flight, which use memory for
    /// several rounds.
    fn is_long_write_granted(pool: &mut Pool, are_reads: bool, is_retried_first: bool) -> bool {
        const SHORT: u32 = 64 << 10;
        let long = claim(3, 1);
        let grant_short = |pool: &mut Pool, owner| match are_reads {
            true => pool.grant(claim(owner, 1), SHORT),
            false => pool.grant_to_gather(claim(owner, 1), SHORT),
        };
        let mut short: VecDeque<_> = (0..4).filter_map(|n| grant_short(pool, n % 3)).collect();
        let got = (0..10_000u64).find_map(|n| {
            if let Some(buffer) = short.pop_front() {
                pool.release(buffer);
            }
            let owner = n % 3;
            let mut add_short = |pool: &mut Pool| match grant_short(pool, owner) {
                Some(buffer) => short.push_back(buffer),
                None => pool.wait(claim(owner, 1)),
            };
            if !is_retried_first {
                add_short(pool);
            }
            let granted = pool.grant_to_gather(long, 1 << 20);
            if granted.is_none() {
                pool.wait(long);
            }
            if is_retried_first {
                add_short(pool);
            }
            granted
        });
        let is_granted = got.is_some();
        short.into_iter().chain(got).for_each(|b| pool.release(b));
        is_granted
    }

    #[test]
    fn long_write_is_granted_behind_short_requests() {
        for units in [2, 4, 8, 12, 16, 32] {
            for (are_reads, is_retried_first) in
                [(false, true), (false, false), (true, true), (true, false)]
            {
                let (mut pool, held) = with_hung_unit(units);
                let is_granted = is_long_write_granted(&mut pool, are_reads, is_retried_first);
                assert!(is_granted, "{units} units, reads: {are_reads}");
                held.into_iter().for_each(|buffer| pool.release(buffer));
                assert!(pool.is_whole());
            }
        }
    }

    /// An initiator without commands for the hanging unit uses its part for another unit.
    #[test]
    fn busy_initiator_leaves_unit_part_alone() {
        for units in [2, 8, 16] {
            let mut pool = shared(64 << 20, 5, units);
            let mut held = Vec::new();
            let busy = claim(4, 1);
            let own = pool.grant_to_gather(busy, 1 << 20).unwrap();
            for owner in 0..4 {
                held.append(&mut take_all(&mut pool, claim(owner, 0), 1 << 20));
            }
            held.push(own);
            held.extend(pool.grant_to_gather(busy, 1 << 20));
            held.extend(pool.grant_to_gather(busy, 1 << 20));
            assert!(
                is_long_write_granted(&mut pool, false, true),
                "{units} units"
            );
            held.into_iter().for_each(|buffer| pool.release(buffer));
        }
    }

    /// Commands that have gathered their data may be waiting for commands that have started.
    #[test]
    fn waiting_write_leaves_memory_for_started_commands() {
        for units in [4, 8, 16] {
            let (mut pool, mut held) = with_hung_unit(units);
            let gathered = pool.grant_to_gather(claim(0, 1), 64 << 10).unwrap();
            while let Some(buffer) = pool.grant_to_gather(claim(1, 1), 1 << 20) {
                held.push(buffer);
            }
            pool.wait(claim(1, 1));
            for _ in 0..4 {
                held.push(pool.grant(claim(2, 1), 64 << 10).unwrap());
            }
            held.push(gathered);
            held.into_iter().for_each(|buffer| pool.release(buffer));
        }
    }

    #[test]
    fn withdrawn_write_reserves_no_memory() {
        let (mut pool, mut held) = with_hung_unit(8);
        let short = claim(0, 1);
        held.push(pool.grant_to_gather(short, 4096).unwrap());
        let long = claim(3, 1);
        for withdraw in [Pool::withdraw, Pool::leave_line] {
            assert!(pool.grant_to_gather(long, 1 << 20).is_none());
            pool.wait(long);
            assert!(pool.grant_to_gather(short, 4096).is_none());
            withdraw(&mut pool, long);
            assert!(pool.take_change());
            held.push(pool.grant_to_gather(short, 4096).unwrap());
        }
        held.into_iter().for_each(|buffer| pool.release(buffer));
    }

    /// Large buffers of other units use up the units' part of the pool.
    #[test]
    fn write_beyond_unit_part_reserves_no_memory() {
        const MIB: u32 = 1 << 20;
        let (mut pool, mut held) = with_hung_unit(32);
        // All of 16 MiB except for 512 KiB.
        for unit in 2..17 {
            held.push(pool.grant_to_gather(claim(0, unit), MIB).unwrap());
        }
        held.push(pool.grant_to_gather(claim(0, 17), MIB / 2).unwrap());
        let (short, long) = (claim(0, 1), claim(3, 1));
        assert!(pool.grant_to_gather(long, MIB).is_none());
        pool.wait(long);
        let granted = std::iter::from_fn(|| pool.grant_to_gather(short, 4096));
        let granted: Vec<_> = granted.collect();
        assert_eq!(granted.len(), 64, "half of the unit's part");
        held.into_iter()
            .chain(granted)
            .for_each(|b| pool.release(b));
    }

    /// Commands that have gathered their data may be waiting for the started command in the order
    /// of the unit.
    #[test]
    fn hung_units_leave_memory_for_started_commands() {
        const MIB: u32 = 1 << 20;
        for units in [5, 6, 8] {
            let mut pool = shared(64 << 20, 4, units);
            let mut held = Vec::new();
            for owner in 0..4 {
                for unit in 0..units as u32 - 1 {
                    held.append(&mut take_all(&mut pool, claim(owner, unit), MIB));
                    held.extend(std::iter::from_fn(|| pool.grant(claim(owner, unit), MIB)));
                    pool.wait_started(claim(owner, unit), MIB);
                    held.extend(pool.grant_reserve(claim(owner, unit), MIB));
                }
            }
            let mut gathered = take_all(&mut pool, claim(0, units as u32 - 1), 64 << 10);
            assert!(!gathered.is_empty(), "{units} units");
            let started = pool.grant(claim(1, units as u32 - 1), MIB);
            assert!(started.is_some(), "{units} units");
            gathered.extend(started);
            held.into_iter()
                .chain(gathered)
                .for_each(|b| pool.release(b));
        }
    }

    /// Waiting requests of a claim: bytes, gathers, first round. They are executed in this order.
    type Requests = VecDeque<(u32, bool, u32)>;

    /// Grants requests of a claim in order while the pool has room.
    fn serve(pool: &mut Pool, claim: Claim, requests: &mut Requests, granted: &mut Vec<Buffer>) {
        while let Some(&(len, gathers, _)) = requests.front() {
            let buffer = match gathers {
                true => pool.grant_to_gather(claim, len),
                false => pool.grant(claim, len),
            };
            let Some(buffer) = buffer else {
                return pool.wait(claim);
            };
            requests.pop_front();
            granted.push(buffer);
        }
        pool.leave_line(claim);
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(24))]

        /// All initiators have a deep queue for a hanging unit, in some cases with one exception.
        /// They also send requests to three healthy units, which execute them within several
        /// rounds.
        #[test]
        fn healthy_units_serve_all_requests(
            units in 4usize..=16,
            is_one_spared in any::<bool>(),
            requests in proptest::collection::vec((0u32..9, any::<bool>(), 1u32..6), 8..100),
        ) {
            let (mut pool, mut hung) = with_hung_unit(units);
            if is_one_spared {
                let is_spared = |b: &Buffer| b.charge.is_some_and(|c| c.claim.owner == Owner(3));
                hung.extract_if(.., |b| is_spared(b)).for_each(|b| pool.release(b));
                pool.leave_line(claim(3, 0));
            }
            let mut requests = requests.iter().cycle();
            let mut claims: Vec<(Claim, Requests)> = (0..12)
                .map(|n| (claim(n % 4, n as u32 / 4 + 1), Requests::new()))
                .collect();
            let mut in_flight: Vec<(u32, Buffer)> = Vec::new();
            for round in 0..500 {
                let over = in_flight.extract_if(.., |(until, _)| *until <= round);
                over.for_each(|(_, buffer)| pool.release(buffer));
                let mut granted = Vec::new();
                let waiting: Vec<_> = pool.waiting().collect();
                for owner in waiting {
                    for (claim, queue) in claims.iter_mut().filter(|(c, _)| c.owner == owner) {
                        serve(&mut pool, *claim, queue, &mut granted);
                    }
                }
                for (claim, queue) in &mut claims {
                    let &(order, gathers, _) = requests.next().unwrap();
                    if queue.len() < 4 {
                        queue.push_back((4096 << order, gathers, round));
                    }
                    if queue.len() == 1 {
                        serve(&mut pool, *claim, queue, &mut granted);
                    }
                }
                for buffer in granted {
                    let &(_, _, rounds) = requests.next().unwrap();
                    in_flight.push((round + rounds, buffer));
                }
                let oldest = claims.iter().filter_map(|(c, q)| Some((q.front()?, c)));
                for (&(len, gathers, since), claim) in oldest {
                    prop_assert!(round - since < 200, "{claim:?}, {len} bytes, {gathers}");
                }
            }
            let all = in_flight.into_iter().map(|(_, buffer)| buffer).chain(hung);
            all.for_each(|buffer| pool.release(buffer));
            prop_assert!(pool.is_whole());
        }
    }

    proptest! {
        /// Buffers should never overlap, and all released memory should be merged again.
        #[test]
        fn buffers_are_disjoint(steps in proptest::collection::vec((any::<bool>(), 0u32..3 << 20), 1..200)) {
            let mut pool = Pool::new(8 << 20).unwrap();
            let mut held: Vec<Buffer> = Vec::new();
            for (releases, n) in steps {
                if releases && !held.is_empty() {
                    let buffer = held.swap_remove(n as usize % held.len());
                    pool.release(buffer);
                } else if let Some(buffer) = pool.allocate(n) {
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
            let whole = pool.allocate(8 << 20).unwrap();
            prop_assert_eq!(whole.pieces.len(), 8);
            pool.release(whole);
        }

        /// Regardless of how sessions allocate, keep and wait for memory, and which units hang: a
        /// session without memory can get its part, and so can a unit without memory, for each
        /// session.
        #[test]
        fn parts_are_always_granted(
            sessions in 2u64..12,
            units in 2u32..12,
            steps in proptest::collection::vec(
                (0u64..12, 0u32..12, 1u32..1 << 20, 0u8..8),
                1..400,
            ),
        ) {
            let mut pool = shared(64 << 20, sessions, units as usize);
            let mut held: Vec<Buffer> = Vec::new();
            for (owner, unit, len, action) in steps {
                // For now, the last session and the last unit are idle.
                let claim = claim(owner % (sessions - 1), unit % (units - 1));
                let buffer = match action {
                    0 if !held.is_empty() => {
                        let buffer = held.swap_remove(len as usize % held.len());
                        pool.release(buffer);
                        continue;
                    }
                    1 => {
                        pool.leave_line(claim);
                        continue;
                    }
                    2 => pool.grant_reserve(claim, len),
                    3 | 4 => pool.grant(claim, len),
                    _ => pool.grant_to_gather(claim, len),
                };
                match buffer {
                    Some(buffer) => held.push(buffer),
                    None => pool.wait(claim),
                }
            }
            let (of_initiator, of_unit) = pool.shares.parts();
            // This length fits even if the memory is fragmented.
            let len = 64 << 10;
            let mut check = |claim: Claim, part: usize| {
                let count = part / len as usize;
                let granted = |_| pool.grant_to_gather(claim, len);
                let granted: Vec<_> = (0..count).map_while(granted).collect();
                let is_whole = granted.len() == count;
                granted.into_iter().for_each(|buffer| pool.release(buffer));
                is_whole
            };
            for unit in 0..units {
                prop_assert!(check(claim(sessions - 1, unit), of_initiator.min(1 << 20)));
            }
            for owner in 0..sessions {
                prop_assert!(check(claim(owner, units - 1), (of_unit / 2).min(1 << 20)));
            }
            held.into_iter().for_each(|buffer| pool.release(buffer));
            prop_assert!(pool.is_whole());
        }
    }
}
