//! The memory-key table: which bytes of this process a key stands for, and who may touch them.
//!
//! - [`MrTable`]: registers regions, allocates fast-registration regions and resolves keys.
//! - [`Span`]: a checked range of a region. It is the only way from a key to memory, it borrows the
//!   table, and so it cannot outlive the registration that it was checked against.
//!
//! # Keys
//!
//! A key is 24 bits of index and a byte that its owner may change (IBTA 10.6.3.2). The index is the
//! slot number and the slot's generation, sent through a secret permutation of the 24-bit numbers,
//! so that a peer learns nothing of one key from another; the whole key must then equal the slot's.
//! Slots are reused oldest first, so that a key comes back only after all others and all
//! generations. Local and remote key of a region are the same number; the access rights separate
//! them.
//!
//! # Invariants
//!
//! - Arithmetic on a peer's address and length is checked: a range that wraps is refused
//!   (CVE-2026-98365, CVE-2026-46325).
//! - A range of length 0 looks at no key (IBTA 9.7.4.1.3 for the remote side).
//! - Resolving and registering through a work request allocate nothing: a fast-registration region
//!   holds room for its segments from the start.
//!
//! - A region stays as long as windows are bound to it, and a window of type 2 no longer than the
//!   queue pair that bound it.

mod keys;
mod span;
mod window;

use std::cell::Cell;
use std::collections::{BTreeSet, VecDeque};
use std::ops::Range;

use riser_memory::MemSlice;
use thiserror::Error;

use self::keys::{INDEX_BITS, Permutation, Prf};
use self::span::Segment;
use self::window::Binding;
use crate::umem;
use crate::verbs::{
    Access, Handle, LKey, Mr, MrAttr, MrChange, MrId, MwType, PdId, QpId, RKey, Sge, VerbsError,
};

pub use self::span::Span;

/// Most regions of a table: 2²⁰, which leaves four bits of the index for generations.
pub const MAX_REGIONS: u32 = 1 << 20;

/// Indices whose slots are remembered, a power of two: those of the few regions that the data path
/// uses all the time. The tables of the permutation are larger than a processor's first cache.
const RECENT: usize = 64;

/// No index of a key.
const NO_INDEX: u32 = u32::MAX;

/// Reason why a key does not give access.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum KeyError {
    /// No valid region has this key.
    #[error("no region has this key")]
    Key,
    /// The region belongs to another protection domain.
    #[error("the region belongs to another protection domain")]
    Domain,
    /// The region does not grant the right.
    #[error("the region does not grant this access")]
    Right,
    /// The range is not within the region.
    #[error("the range is not within the region")]
    Range,
    /// The region is not one that a work request may register or invalidate, or not in its state.
    #[error("the region cannot be registered or invalidated by a work request")]
    Kind,
}

/// Content of a slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Free,
    Registered,
    /// Fast registration, with room for this many segments.
    Fast(u32),
    /// Null region.
    Null,
    Window(MwType),
}

#[derive(Debug)]
struct Region {
    kind: Kind,
    generation: u32,
    key: u32,
    /// The key works. A fast-registration region has no working key until it is registered.
    valid: bool,
    pd: PdId,
    access: Access,
    /// Part of it may not be mapped, so its memory is looked at before each access.
    is_paged: bool,
    base: u64,
    length: u64,
    /// Never empty when `length` is not 0, but of a null region; segments of no bytes are left out.
    segments: Vec<Segment>,
    /// Windows that are bound to it.
    windows: u32,
    /// Of a window that is bound.
    binding: Option<Binding>,
}

/// All regions of a device. Bounds: as many regions as the table was created for, and as many
/// segments in a fast registration.
pub struct MrTable {
    slots: Vec<Region>,
    /// Free slots, the one freed longest ago first.
    free: VecDeque<u32>,
    slot_bits: u32,
    max_segments: u32,
    permutation: Permutation,
    /// Indices that were looked up last, each with its slot, by their low bits. What an index
    /// leads to never changes, so nothing is ever taken back here; whether a key works is asked
    /// of the region.
    recent: [Cell<(u32, u32)>; RECENT],
    random: Prf,
    /// Slots of windows of type 2 that are bound, by queue pair.
    by_qp: BTreeSet<(QpId, u32)>,
}

impl std::fmt::Debug for MrTable {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "MrTable({} of {})", self.len(), self.slots.len())
    }
}

impl MrTable {
    /// A table for `max_regions` regions (rounded up to a power of two, [`MAX_REGIONS`] at most)
    /// whose fast registrations have up to `max_segments` segments. `seed` comes from the operating
    /// system's random source; all keys follow from it.
    #[must_use]
    pub fn new(max_regions: u32, max_segments: u32, seed: [u8; 16]) -> Self {
        let count = max_regions.clamp(2, MAX_REGIONS).next_power_of_two();
        let mut random = Prf::new(seed);
        let permutation = Permutation::new(&mut random);
        let no_domain = PdId(Handle::new(u32::MAX, u32::MAX));
        Self {
            slots: (0..count)
                .map(|_| Region {
                    kind: Kind::Free,
                    generation: 0,
                    key: 0,
                    valid: false,
                    pd: no_domain,
                    access: Access::empty(),
                    is_paged: false,
                    base: 0,
                    length: 0,
                    segments: Vec::new(),
                    windows: 0,
                    binding: None,
                })
                .collect(),
            free: (0..count).collect(),
            slot_bits: count.trailing_zeros(),
            max_segments,
            permutation,
            recent: [const { Cell::new((NO_INDEX, 0)) }; RECENT],
            random,
            by_qp: BTreeSet::new(),
        }
    }

    /// Number of regions in the table.
    #[must_use]
    pub fn len(&self) -> usize {
        self.slots.len() - self.free.len()
    }

    /// Whether there are none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The region in a slot, by the index of its id.
    #[must_use]
    pub fn at(&self, slot: u32) -> Option<MrId> {
        let region = self.slots.get(slot as usize)?;
        let id = MrId(Handle::new(slot, region.generation));
        region.is_named(id).then_some(id)
    }

    /// Registers a range of memory (see [`crate::verbs::Verbs::reg_mr`]).
    ///
    /// # Errors
    /// As of [`MrTable::reg_iova`].
    pub fn reg(&mut self, pd: PdId, range: &MemSlice, access: Access) -> Result<Mr, VerbsError> {
        let iova = if access.contains(Access::ZERO_BASED) {
            0
        } else {
            range.addr()
        };
        self.reg_iova(pd, range, iova, access)
    }

    /// Registers a range of memory, whose addresses count from `iova` (see
    /// [`crate::verbs::Verbs::reg_mr_iova`]).
    ///
    /// # Errors
    /// [`VerbsError::InvalidAccess`], [`VerbsError::InvalidParameter`],
    /// [`VerbsError::InsufficientResources`].
    pub fn reg_iova(
        &mut self,
        pd: PdId,
        range: &MemSlice,
        iova: u64,
        access: Access,
    ) -> Result<Mr, VerbsError> {
        check_access(access)?;
        check_range(iova, range.len() as u64, access)?;
        let id = MrId(self.take_slot(pd)?);
        let region = &mut self.slots[id.0.index()];
        region.kind = Kind::Registered;
        region.valid = true;
        region.access = access;
        region.is_paged = access.contains(Access::ON_DEMAND);
        region.cover(range, iova);
        Ok(region.describe(id))
    }

    /// Changes a registered region (see [`crate::verbs::Verbs::rereg_mr`]). That the domain exists
    /// is the caller's to check.
    ///
    /// # Errors
    /// [`VerbsError`], and nothing has changed.
    pub fn rereg(&mut self, id: MrId, change: &MrChange<'_>) -> Result<Mr, VerbsError> {
        let region = self.region_mut(id)?;
        if region.kind != Kind::Registered {
            return Err(VerbsError::InvalidState("not a registered region"));
        }
        let MrChange {
            translation,
            pd,
            access,
        } = *change;
        if translation.is_none() && pd.is_none() && access.is_none() {
            return Err(VerbsError::InvalidParameter("change of a region"));
        }
        // Their rights and ranges follow from what would change.
        if region.windows > 0 {
            return Err(VerbsError::ResourceBusy("memory region"));
        }
        let access = access.unwrap_or(region.access);
        check_access(access)?;
        // Whether all of a range has to be mapped is found out with the range.
        let changes_mapping = (access ^ region.access).contains(Access::ON_DEMAND);
        if translation.is_none() && changes_mapping {
            return Err(VerbsError::InvalidAccess(
                "on-demand paging changes with the range only",
            ));
        }
        let (base, length) = translation.map_or((region.base, region.length), |(range, iova)| {
            (iova, range.len() as u64)
        });
        check_range(base, length, access)?;
        region.access = access;
        region.pd = pd.unwrap_or(region.pd);
        if let Some((range, iova)) = translation {
            region.is_paged = access.contains(Access::ON_DEMAND);
            region.cover(range, iova);
        }
        Ok(region.describe(id))
    }

    /// Allocates a null region (see [`crate::verbs::Verbs::alloc_null_mr`]).
    ///
    /// # Errors
    /// [`VerbsError::InsufficientResources`].
    pub fn alloc_null(&mut self, pd: PdId) -> Result<Mr, VerbsError> {
        span::prepare_zeros()?;
        let id = MrId(self.take_slot(pd)?);
        let region = &mut self.slots[id.0.index()];
        region.kind = Kind::Null;
        region.valid = true;
        region.access = Access::LOCAL_WRITE;
        region.length = u64::MAX;
        Ok(region.describe(id))
    }

    /// Allocates a fast-registration region (see [`crate::verbs::Verbs::alloc_fast_mr`]).
    ///
    /// # Errors
    /// [`VerbsError::InvalidParameter`], [`VerbsError::InsufficientResources`].
    pub fn alloc_fast(&mut self, pd: PdId, max_segments: u32) -> Result<Mr, VerbsError> {
        if max_segments == 0 || max_segments > self.max_segments {
            return Err(VerbsError::InvalidParameter("number of segments"));
        }
        let id = MrId(self.take_slot(pd)?);
        let region = &mut self.slots[id.0.index()];
        region.kind = Kind::Fast(max_segments);
        // Room for all segments now, so that a registration in the data path allocates nothing.
        region.segments.reserve_exact(max_segments as usize);
        Ok(region.describe(id))
    }

    /// Sets what the next registration of a fast-registration region covers: as many of `segments`
    /// as fit. Answers how many bytes that is.
    ///
    /// # Errors
    /// [`VerbsError::InvalidHandle`], [`VerbsError::InvalidState`] while the region is valid or is
    /// not for fast registration.
    pub fn map_sg(&mut self, id: MrId, segments: &[MemSlice]) -> Result<u64, VerbsError> {
        let region = self.region_mut(id)?;
        let Kind::Fast(room) = region.kind else {
            return Err(VerbsError::InvalidState("not a fast-registration region"));
        };
        // A key that works must not come to mean other memory: the peer would read or write that.
        if region.valid {
            return Err(VerbsError::InvalidState("the region is still valid"));
        }
        region.segments.clear();
        let mut end = 0u64;
        for slice in umem::ranges(segments).take(room as usize) {
            end += slice.len() as u64;
            region.segments.push(Segment { slice, end });
        }
        region.length = end;
        region.base = region.segments.first().map_or(0, |s| s.slice.addr());
        Ok(end)
    }

    /// A region's attributes at present.
    ///
    /// # Errors
    /// [`VerbsError::InvalidHandle`].
    pub fn query(&self, id: MrId) -> Result<MrAttr, VerbsError> {
        let region = self.region(id)?;
        Ok(MrAttr {
            pd: region.pd,
            mr: region.describe(id),
            access: region.access,
            valid: region.valid,
        })
    }

    /// Deregisters a region of any kind, valid or not; returns its protection domain.
    ///
    /// # Errors
    /// [`VerbsError::InvalidHandle`], [`VerbsError::ResourceBusy`].
    pub fn dereg(&mut self, id: MrId) -> Result<PdId, VerbsError> {
        if self.region(id)?.windows > 0 {
            return Err(VerbsError::ResourceBusy("memory region"));
        }
        Ok(self.free_slot(id.0.index()))
    }

    fn free_slot(&mut self, slot: usize) -> PdId {
        let region = &mut self.slots[slot];
        // The slot keeps its generation until it is taken again. Until then a stale handle is
        // refused by the slot's kind.
        region.kind = Kind::Free;
        region.valid = false;
        region.length = 0;
        region.segments = Vec::new();
        let pd = region.pd;
        // Behind all other free slots, so that this key comes back as late as possible.
        self.free.push_back(slot as u32);
        pd
    }

    /// Executes a REG_MR: makes what was mapped valid under `key` (IBTA 10.6.3.6).
    ///
    /// # Errors
    /// [`KeyError`] where the region is another domain's, valid already, of another kind, has
    /// nothing mapped, or `key` is not its key with another low byte, or `access` is not legal.
    pub fn reg_fast(
        &mut self,
        pd: PdId,
        id: MrId,
        key: RKey,
        access: Access,
    ) -> Result<(), KeyError> {
        let region = self.region_mut(id).map_err(|_| KeyError::Key)?;
        if region.pd != pd {
            return Err(KeyError::Domain);
        }
        // A second registration would take the region from under the key that a peer still has.
        if !matches!(region.kind, Kind::Fast(_)) || region.valid || region.segments.is_empty() {
            return Err(KeyError::Kind);
        }
        // Only the low byte of a key is its owner's (IBTA 10.6.3.2).
        if region.key >> 8 != key.0 >> 8 {
            return Err(KeyError::Key);
        }
        check_access(access).map_err(|_| KeyError::Right)?;
        region.base = if access.contains(Access::ZERO_BASED) {
            0
        } else {
            region.segments[0].slice.addr()
        };
        // Peers name places in the region by sums, which must not wrap.
        if region.base.checked_add(region.length).is_none() {
            return Err(KeyError::Range);
        }
        region.key = key.0;
        region.access = access;
        region.is_paged = access.contains(Access::ON_DEMAND);
        region.valid = true;
        Ok(())
    }

    /// Looks at the memory of regions before each access from now on, as it is for those on demand,
    /// where an access has found that part of it is not mapped any longer. Parts that are not fail as
    /// what is outside of the region does; all others stay as they were.
    pub fn page_faulted(&mut self) {
        for region in &mut self.slots {
            let mut segments = region.segments.iter();
            region.is_paged |= segments.any(|segment| segment.slice.memory().has_faulted());
        }
    }

    /// Executes a LOCAL_INV, or a peer's SEND with invalidate: the key stops working. Only a valid
    /// fast-registration region of the same protection domain, and a window of type 2 that this
    /// queue pair has bound, can be invalidated (IBTA 10.6.5, 10.6.7.2.6).
    ///
    /// # Errors
    /// [`KeyError`], and nothing has changed.
    pub fn invalidate(&mut self, pd: PdId, qp: QpId, key: RKey) -> Result<(), KeyError> {
        let slot = self.find_invalidatable(pd, qp, key)?;
        if self.slots[slot].is_window() {
            self.unbind(slot);
        }
        self.slots[slot].valid = false;
        Ok(())
    }

    /// Returns whether [`MrTable::invalidate`] would succeed.
    ///
    /// # Errors
    /// [`KeyError`] as there.
    pub fn check_invalidate(&self, pd: PdId, qp: QpId, key: RKey) -> Result<(), KeyError> {
        self.find_invalidatable(pd, qp, key).map(drop)
    }

    /// The memory of a scatter-gather entry. `write` asks for the right to write it.
    ///
    /// # Errors
    /// [`KeyError`]; never for an entry of length 0.
    pub fn resolve_local(&self, pd: PdId, sge: &Sge, write: bool) -> Result<Span<'_>, KeyError> {
        self.resolve_local_part(pd, sge, 0..sge.length as usize, write)
    }

    /// As [`MrTable::resolve_local`], where no byte outside `part` of the entry will be accessed: a
    /// packet of a message must not cost more than its own bytes, however long the entry is.
    ///
    /// # Errors
    /// As there.
    pub fn resolve_local_part(
        &self,
        pd: PdId,
        sge: &Sge,
        part: Range<usize>,
        write: bool,
    ) -> Result<Span<'_>, KeyError> {
        let right = if write {
            Access::LOCAL_WRITE
        } else {
            Access::empty()
        };
        self.resolve(pd, None, sge.lkey.0, sge.addr, sge.length, right, part)
    }

    /// The memory of a range of `len` bytes at `addr` that the peer of a queue pair names, for which
    /// it needs `right`.
    ///
    /// # Errors
    /// [`KeyError`]; never for a length of 0.
    pub fn resolve_remote(
        &self,
        pd: PdId,
        qp: QpId,
        key: RKey,
        addr: u64,
        len: u32,
        right: Access,
    ) -> Result<Span<'_>, KeyError> {
        self.resolve_remote_head(pd, qp, key, addr, len, len as usize, right)
    }

    /// As [`MrTable::resolve_remote`], where only the first `head` bytes of the range will be
    /// accessed: the length that a peer announces must not cost anything by itself.
    ///
    /// # Errors
    /// As there.
    #[allow(clippy::too_many_arguments, reason = "what a peer's packet names")]
    pub fn resolve_remote_head(
        &self,
        pd: PdId,
        qp: QpId,
        key: RKey,
        addr: u64,
        len: u32,
        head: usize,
        right: Access,
    ) -> Result<Span<'_>, KeyError> {
        debug_assert!(!(right & Access::REMOTE).is_empty(), "a remote right");
        self.resolve(pd, Some(qp), key.0, addr, len, right, 0..head)
    }

    #[allow(clippy::too_many_arguments, reason = "those of its callers")]
    fn resolve(
        &self,
        pd: PdId,
        qp: Option<QpId>,
        key: u32,
        addr: u64,
        len: u32,
        right: Access,
        accessed: Range<usize>,
    ) -> Result<Span<'_>, KeyError> {
        if len == 0 {
            return Ok(Span::EMPTY);
        }
        // The order of the checks only decides what a log says: a peer gets the same NAK for
        // each.
        let region = &self.slots[self.find_key(key)?];
        if region.pd != pd {
            return Err(KeyError::Domain);
        }
        if let Kind::Window(kind) = region.kind
            && !region.admits(kind, qp)
        {
            return Err(KeyError::Key);
        }
        if !region.access.contains(right) {
            return Err(KeyError::Right);
        }
        let span = region.span(addr, len.into()).ok_or(KeyError::Range)?;
        if region.is_paged {
            // A right to write was asked for, or none but to read.
            let write = !(right - Access::REMOTE_READ).is_empty();
            let accessed = span.part(accessed);
            accessed.populate(write).map_err(|_| KeyError::Range)?;
        }
        Ok(span)
    }

    #[inline]
    fn find_key(&self, key: u32) -> Result<usize, KeyError> {
        let index = key >> 8;
        let recent = &self.recent[index as usize % RECENT];
        let (known, slot) = recent.get();
        let slot = if known == index {
            slot
        } else {
            let slot = self.permutation.backward(index) & ((1 << self.slot_bits) - 1);
            recent.set((index, slot));
            slot
        };
        // The whole key is compared. One of an earlier registration leads to the slot as well,
        // but differs in its generation or its low byte.
        let slot = slot as usize;
        let region = &self.slots[slot];
        if region.valid && region.key == key {
            Ok(slot)
        } else {
            Err(KeyError::Key)
        }
    }

    fn find_invalidatable(&self, pd: PdId, qp: QpId, key: RKey) -> Result<usize, KeyError> {
        let slot = self.find_key(key.0)?;
        let region = &self.slots[slot];
        if region.pd != pd {
            return Err(KeyError::Domain);
        }
        // A peer may take back only what a work request has given. An ordinary region stays its
        // owner's.
        let is_theirs = match region.kind {
            Kind::Fast(_) => true,
            Kind::Window(MwType::Type2) => region.admits(MwType::Type2, Some(qp)),
            _ => false,
        };
        if !is_theirs {
            return Err(KeyError::Kind);
        }
        Ok(slot)
    }

    fn region(&self, id: MrId) -> Result<&Region, VerbsError> {
        self.slots
            .get(id.0.index())
            .filter(|r| r.is_named(id))
            .ok_or(VerbsError::InvalidHandle("memory region"))
    }

    fn region_mut(&mut self, id: MrId) -> Result<&mut Region, VerbsError> {
        self.slots
            .get_mut(id.0.index())
            .filter(|r| r.is_named(id))
            .ok_or(VerbsError::InvalidHandle("memory region"))
    }

    fn take_slot(&mut self, pd: PdId) -> Result<Handle, VerbsError> {
        let slot = self
            .free
            .pop_front()
            .ok_or(VerbsError::InsufficientResources("memory regions"))?;
        let random = self.random.next() as u32 & 0xff;
        let region = &mut self.slots[slot as usize];
        let generations = 1u32 << (INDEX_BITS - self.slot_bits);
        let index = loop {
            region.generation = region.generation.wrapping_add(1);
            // Generations come round after as many uses of the slot as the index has room for.
            let generation = region.generation % generations;
            let index = self
                .permutation
                .forward(generation << self.slot_bits | slot);
            // Index 0 would allow the key 0, which peers write where they mean no key.
            if index != 0 {
                break index;
            }
        };
        region.key = index << 8 | random;
        region.pd = pd;
        region.access = Access::empty();
        region.is_paged = false;
        region.base = 0;
        region.length = 0;
        Ok(Handle::new(slot, region.generation))
    }
}

impl Region {
    fn is_named(&self, id: MrId) -> bool {
        self.kind != Kind::Free && !self.is_window() && self.generation == id.0.generation()
    }

    /// Gives it a range of memory, whose addresses count from `iova`.
    fn cover(&mut self, range: &MemSlice, iova: u64) {
        self.base = iova;
        self.length = range.len() as u64;
        self.segments.clear();
        // A segment of no bytes would be in the way of the search for an address.
        if !range.is_empty() {
            self.segments.push(Segment {
                end: self.length,
                slice: range.clone(),
            });
        }
    }

    fn describe(&self, id: MrId) -> Mr {
        Mr {
            id,
            lkey: LKey(self.key),
            rkey: RKey(self.key),
            addr: self.base,
            length: self.length,
        }
    }

    /// The range, if it is within the region. No sum here can wrap: the offset is checked against
    /// the length before the length of the range is added to it.
    fn span(&self, addr: u64, len: u64) -> Option<Span<'_>> {
        let start = addr.checked_sub(self.base)?;
        let end = start.checked_add(len)?;
        (end <= self.length).then(|| Span {
            segments: &self.segments,
            start,
            len: len as usize,
        })
    }
}

/// IBTA 10.6.3.1: remote write and remote atomic need local write.
fn check_access(access: Access) -> Result<(), VerbsError> {
    let writes = Access::REMOTE_WRITE | Access::REMOTE_ATOMIC;
    if access.intersects(writes) && !access.contains(Access::LOCAL_WRITE) {
        return Err(VerbsError::InvalidAccess(
            "remote write and remote atomic need local write",
        ));
    }
    Ok(())
}

/// Checks the addresses of a region that begins at `base`.
fn check_range(base: u64, length: u64, access: Access) -> Result<(), VerbsError> {
    // Peers name places in the region by sums, which must not wrap.
    if base.checked_add(length).is_none() || (base != 0 && access.contains(Access::ZERO_BASED)) {
        return Err(VerbsError::InvalidParameter("address of the region"));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use riser_memory::Memory;

    use super::*;

    const PD: PdId = PdId(Handle::new(1, 1));
    const OTHER: PdId = PdId(Handle::new(2, 1));
    const QP: QpId = QpId(Handle::new(3, 1));

    fn table() -> MrTable {
        MrTable::new(16, 8, *b"sixteen bytes!!!")
    }

    fn sge(addr: u64, length: u32, lkey: LKey) -> Sge {
        Sge { addr, length, lkey }
    }

    #[test]
    fn a_key_gives_its_range_and_no_byte_more() {
        let mut mrs = table();
        let memory = Memory::new(4096).unwrap();
        let slice = memory.slice(100..200).unwrap();
        let mr = mrs
            .reg(PD, &slice, Access::LOCAL_WRITE | Access::REMOTE_READ)
            .unwrap();
        let get = |addr, len, right| {
            mrs.resolve_remote(PD, QP, mr.rkey, addr, len, right)
                .map(|s| s.len())
        };
        let read = Access::REMOTE_READ;
        assert_eq!(get(mr.addr, 100, read), Ok(100));
        assert_eq!(get(mr.addr + 99, 1, read), Ok(1));
        assert_eq!(get(mr.addr + 99, 2, read), Err(KeyError::Range));
        assert_eq!(get(mr.addr - 1, 1, read), Err(KeyError::Range));
        assert_eq!(get(mr.addr, 1, Access::REMOTE_WRITE), Err(KeyError::Right));
        assert_eq!(
            mrs.resolve_remote(OTHER, QP, mr.rkey, mr.addr, 1, read)
                .unwrap_err(),
            KeyError::Domain
        );
        assert_eq!(
            mrs.resolve_remote(PD, QP, mr.rkey.next(), mr.addr, 1, read)
                .unwrap_err(),
            KeyError::Key
        );
        assert!(
            mrs.resolve_remote(PD, QP, RKey(0), 0, 0, read)
                .unwrap()
                .is_empty()
        );
        mrs.dereg(mr.id).unwrap();
        assert_eq!(
            mrs.resolve_local(PD, &sge(mr.addr, 1, mr.lkey), false)
                .unwrap_err(),
            KeyError::Key
        );
        assert!(mrs.query(mr.id).is_err());
    }

    #[test]
    fn cve_2026_98365_and_2026_46325_ranges_that_wrap_are_refused() {
        // CVE-2026-98365, CVE-2026-46325.
        let mut mrs = table();
        let memory = Memory::new(4096).unwrap();
        let zero = Access::ZERO_BASED | Access::REMOTE_READ;
        for access in [Access::REMOTE_READ, zero] {
            let mr = mrs.reg(PD, &memory.whole(), access).unwrap();
            for (addr, len) in [
                (u64::MAX, 1),
                (u64::MAX, 2),
                (u64::MAX - 4095, 4096),
                (mr.addr.wrapping_sub(1), u32::MAX),
                (mr.addr, u32::MAX),
                (mr.addr + 4096, 1),
            ] {
                assert_eq!(
                    mrs.resolve_remote(PD, QP, mr.rkey, addr, len, Access::REMOTE_READ)
                        .unwrap_err(),
                    KeyError::Range,
                    "{addr:#x}+{len}"
                );
            }
        }
    }

    #[test]
    fn remote_rights_to_change_need_the_local_one() {
        let mut mrs = table();
        let memory = Memory::new(4096).unwrap();
        for access in [Access::REMOTE_WRITE, Access::REMOTE_ATOMIC] {
            assert!(matches!(
                mrs.reg(PD, &memory.whole(), access),
                Err(VerbsError::InvalidAccess(_))
            ));
            mrs.reg(PD, &memory.whole(), access | Access::LOCAL_WRITE)
                .unwrap();
        }
        assert_eq!(mrs.len(), 2);
    }

    #[test]
    fn addresses_count_from_where_the_owner_says() {
        let mut mrs = table();
        let memory = Memory::new(4096).unwrap();
        let slice = memory.slice(100..200).unwrap();
        let access = Access::LOCAL_WRITE | Access::REMOTE_WRITE;
        let iova = u64::MAX - 100;
        let mr = mrs.reg_iova(PD, &slice, iova, access).unwrap();
        assert_eq!((mr.addr, mr.length), (iova, 100));
        let right = Access::REMOTE_WRITE;
        let span = mrs.resolve_remote(PD, QP, mr.rkey, iova + 90, 10, right);
        span.unwrap().write(0, b"0123456789");
        let local = mrs.resolve_local(PD, &sge(iova + 90, 10, mr.lkey), false);
        let mut read = [0; 10];
        local.unwrap().read(0, &mut read);
        assert_eq!(&read, b"0123456789");
        assert_eq!(memory.slice(190..200).unwrap().to_vec(), b"0123456789");
        let beyond = mrs.resolve_remote(PD, QP, mr.rkey, iova + 91, 10, right);
        assert_eq!(beyond.unwrap_err(), KeyError::Range);
        let by_address = mrs.resolve_remote(PD, QP, mr.rkey, slice.addr(), 1, right);
        assert_eq!(by_address.unwrap_err(), KeyError::Range);
        for (iova, access) in [(iova + 1, access), (1, access | Access::ZERO_BASED)] {
            assert!(matches!(
                mrs.reg_iova(PD, &slice, iova, access),
                Err(VerbsError::InvalidParameter(_))
            ));
        }
        assert_eq!(mrs.len(), 1);
    }

    #[test]
    fn a_region_changes_as_a_whole_or_not_at_all() {
        let mut mrs = table();
        let (old, new) = (Memory::new(4096).unwrap(), Memory::new(8192).unwrap());
        let all = Access::LOCAL_WRITE | Access::REMOTE_WRITE;
        let mr = mrs.reg(PD, &old.whole(), all).unwrap();
        let slice = new.slice(1..101).unwrap();
        let moved = MrChange {
            translation: Some((&slice, 7)),
            ..MrChange::default()
        };
        let pd = |pd| MrChange {
            pd: Some(pd),
            ..MrChange::default()
        };
        let access = |access| MrChange {
            access: Some(access),
            ..MrChange::default()
        };
        let before = mrs.query(mr.id).unwrap();
        let refused = [
            MrChange::default(),
            access(Access::REMOTE_WRITE),
            access(all | Access::ZERO_BASED),
            MrChange {
                translation: Some((&slice, u64::MAX - 98)),
                pd: Some(OTHER),
                access: Some(Access::empty()),
            },
        ];
        for change in refused {
            mrs.rereg(mr.id, &change).unwrap_err();
            assert_eq!(mrs.query(mr.id).unwrap(), before);
        }
        let changed = mrs.rereg(mr.id, &moved).unwrap();
        let expected = Mr {
            addr: 7,
            length: 100,
            ..mr
        };
        assert_eq!(changed, expected, "the keys stay");
        let write = |mrs: &MrTable, pd, addr| {
            let span = mrs.resolve_remote(pd, QP, mr.rkey, addr, 3, Access::REMOTE_WRITE)?;
            span.write(0, b"new");
            Ok(())
        };
        assert_eq!(write(&mrs, PD, mr.addr), Err(KeyError::Range));
        assert_eq!(write(&mrs, PD, 104), Ok(()));
        assert_eq!(new.slice(98..101).unwrap().to_vec(), b"new");
        mrs.rereg(mr.id, &pd(OTHER)).unwrap();
        assert_eq!(write(&mrs, PD, 104), Err(KeyError::Domain));
        assert_eq!(write(&mrs, OTHER, 104), Ok(()));
        mrs.rereg(mr.id, &access(Access::LOCAL_WRITE)).unwrap();
        assert_eq!(write(&mrs, OTHER, 104), Err(KeyError::Right));
        let whole = old.whole();
        let all_three = MrChange {
            translation: Some((&whole, old.addr())),
            pd: Some(PD),
            access: Some(all),
        };
        assert_eq!(mrs.rereg(mr.id, &all_three).unwrap(), mr);
        assert_eq!(mrs.query(mr.id).unwrap(), before);
        assert_eq!(write(&mrs, PD, mr.addr), Ok(()));
        let fast = mrs.alloc_fast(PD, 1).unwrap();
        assert!(mrs.rereg(fast.id, &pd(OTHER)).is_err());
        assert_eq!(mrs.dereg(mr.id), Ok(PD));
        assert!(mrs.rereg(mr.id, &all_three).is_err());
    }

    #[test]
    fn a_null_region_reads_as_zeros_and_keeps_nothing() {
        let mut mrs = table();
        let mr = mrs.alloc_null(PD).unwrap();
        let far = u64::MAX - 10_000;
        for addr in [0, 1, far] {
            let span = mrs
                .resolve_local(PD, &sge(addr, 9000, mr.lkey), true)
                .unwrap();
            span.write(5, b"lost");
            let mut read = [9; 9000];
            span.read(0, &mut read);
            assert_eq!(read, [0; 9000]);
            let mut slices = Vec::new();
            span.push_slices(3, 8997, &mut slices);
            let bytes: Vec<u8> = slices.iter().flat_map(MemSlice::to_vec).collect();
            assert_eq!(bytes, [0; 8997]);
        }
        let wraps = mrs.resolve_local(PD, &sge(far, 10_001, mr.lkey), false);
        assert_eq!(wraps.unwrap_err(), KeyError::Range);
        let remote = mrs.resolve_remote(PD, QP, mr.rkey, 0, 1, Access::REMOTE_READ);
        assert_eq!(remote.unwrap_err(), KeyError::Right);
        assert_eq!(mrs.dereg(mr.id), Ok(PD));
    }

    #[test]
    #[allow(unsafe_code, reason = "the region covers the whole address space")]
    fn on_demand_a_range_that_is_not_mapped_is_outside_the_region() {
        let mut mrs = table();
        let memory = Memory::new(3 * 4096).unwrap();
        // SAFETY: what is not mapped is found out before it is touched.
        let space = unsafe { Memory::foreign(std::ptr::null_mut(), usize::MAX) };
        let all = Access::LOCAL_WRITE | Access::REMOTE_READ | Access::ON_DEMAND;
        let mr = mrs.reg(PD, &space.whole(), all).unwrap();
        assert_eq!((mr.addr, mr.length), (0, u64::MAX));
        let at = memory.addr() + 4000;
        let span = mrs.resolve_local(PD, &sge(at, 200, mr.lkey), true).unwrap();
        span.write(0, &[7; 200]);
        assert_eq!(memory.slice(4000..4200).unwrap().to_vec(), [7; 200]);
        for (addr, length) in [(0, 1), (8, 4096), (at, 1 << 31), (u64::MAX - 4096, 4096)] {
            let unmapped = mrs.resolve_local(PD, &sge(addr, length, mr.lkey), false);
            assert_eq!(unmapped.unwrap_err(), KeyError::Range, "{addr:#x}+{length}");
            let unmapped = mrs.resolve_remote(PD, QP, mr.rkey, addr, length, Access::REMOTE_READ);
            assert_eq!(unmapped.unwrap_err(), KeyError::Range, "{addr:#x}+{length}");
        }
    }

    #[test]
    fn on_demand_paging_changes_with_the_range_only() {
        let mut mrs = table();
        let memory = Memory::new(4096).unwrap();
        let (range, read) = (memory.whole(), Access::REMOTE_READ);
        let mr = mrs.reg(PD, &range, Access::ON_DEMAND).unwrap();
        let change = |access, translation| MrChange {
            translation,
            pd: None,
            access: Some(access),
        };
        let refused = mrs.rereg(mr.id, &change(read, None));
        assert!(matches!(refused, Err(VerbsError::InvalidAccess(_))));
        mrs.rereg(mr.id, &change(read | Access::ON_DEMAND, None))
            .unwrap();
        let again = Some((&range, range.addr()));
        mrs.rereg(mr.id, &change(read, again)).unwrap();
        let refused = mrs.rereg(mr.id, &change(Access::ON_DEMAND, None));
        assert!(matches!(refused, Err(VerbsError::InvalidAccess(_))));
    }

    #[test]
    #[allow(unsafe_code, reason = "the region covers the whole address space")]
    fn on_demand_only_what_is_accessed_is_populated() {
        use crate::rc::{RecvQueue, RecvWqe};
        use crate::verbs::{RecvWr, WrId};

        let mut mrs = table();
        let memory = Memory::new(4096).unwrap();
        // SAFETY: what is not mapped is found out before it is touched.
        let space = unsafe { Memory::foreign(std::ptr::null_mut(), usize::MAX) };
        let all = Access::LOCAL_WRITE | Access::REMOTE_WRITE | Access::ON_DEMAND;
        let mr = mrs.reg(PD, &space.whole(), all).unwrap();
        // A peer's short message, to a receive that is as long as no memory of this process.
        let sge = sge(memory.addr(), 1 << 31, mr.lkey);
        let mut rq = RecvQueue::new(1, 1);
        let (wr_id, sges) = (WrId(1), &[sge][..]);
        rq.post(&[RecvWr { wr_id, sges }]).unwrap();
        let mut wqe = RecvWqe::new(1);
        assert!(rq.pop(&mut wqe));
        wqe.scatter(PD, &mrs, 8, b"short").unwrap();
        assert_eq!(memory.slice(8..13).unwrap().to_vec(), b"short");
        let beyond = wqe.scatter(PD, &mrs, 1 << 30, b"short");
        assert_eq!(beyond, Err(KeyError::Range), "not mapped");
        // The first packet of a WRITE that announces as much.
        let (key, right) = (mr.rkey, Access::REMOTE_WRITE);
        let head = |addr, head| {
            mrs.resolve_remote_head(PD, QP, key, addr, 1 << 31, head, right)
                .map(|span| span.len())
        };
        assert_eq!(head(memory.addr(), 4096), Ok(1 << 31));
        assert_eq!(head(8, 4096), Err(KeyError::Range));
        assert_eq!(head(8, 0), Ok(1 << 31), "its packets come later");
    }

    #[test]
    fn fast_registration_covers_scattered_segments_as_one_range() {
        let mut mrs = table();
        let memory = Memory::new(4096).unwrap();
        let parts = [
            memory.slice(1000..1010).unwrap(),
            memory.slice(5..5).unwrap(),
            memory.slice(20..27).unwrap(),
            memory.slice(3000..3003).unwrap(),
        ];
        let mr = mrs.alloc_fast(PD, 3).unwrap();
        let access = Access::LOCAL_WRITE | Access::REMOTE_WRITE;
        assert_eq!(
            mrs.reg_fast(PD, mr.id, mr.rkey, access),
            Err(KeyError::Kind)
        );
        assert_eq!(mrs.map_sg(mr.id, &parts).unwrap(), 20);
        let key = mr.rkey.next();
        assert_eq!(
            mrs.reg_fast(OTHER, mr.id, key, access),
            Err(KeyError::Domain)
        );
        assert_eq!(
            mrs.reg_fast(PD, mr.id, RKey(key.0 ^ 0x100), access),
            Err(KeyError::Key)
        );
        assert_eq!(
            mrs.reg_fast(PD, mr.id, key, Access::REMOTE_WRITE),
            Err(KeyError::Right)
        );
        mrs.reg_fast(PD, mr.id, key, access).unwrap();
        assert_eq!(mrs.reg_fast(PD, mr.id, key, access), Err(KeyError::Kind));
        assert!(matches!(
            mrs.map_sg(mr.id, &parts),
            Err(VerbsError::InvalidState(_))
        ));
        let attr = mrs.query(mr.id).unwrap();
        assert!(attr.valid && attr.mr.addr == memory.addr() + 1000 && attr.mr.rkey == key);

        let span = mrs
            .resolve_remote(PD, QP, key, attr.mr.addr + 8, 12, Access::REMOTE_WRITE)
            .unwrap();
        span.write(0, b"abcdefghijkl");
        let mut out = [0; 3];
        span.read(8, &mut out);
        assert_eq!(&out, b"ijk");
        let bytes = memory.whole().to_vec();
        assert_eq!(
            (&bytes[1008..1010], &bytes[20..27], &bytes[3000..3003]),
            (&b"ab"[..], &b"cdefghi"[..], &b"jkl"[..])
        );
        let mut slices = Vec::new();
        span.push_slices(1, 9, &mut slices);
        assert_eq!(
            slices.iter().map(MemSlice::to_vec).collect::<Vec<_>>(),
            [&b"b"[..], b"cdefghi", b"j"]
        );

        mrs.invalidate(PD, QP, key).unwrap();
        assert_eq!(mrs.invalidate(PD, QP, key), Err(KeyError::Key));
        mrs.reg_fast(PD, mr.id, key.next(), access | Access::ZERO_BASED)
            .unwrap();
        assert!(
            mrs.resolve_remote(PD, QP, key.next(), 0, 20, Access::REMOTE_WRITE)
                .is_ok()
        );
    }

    #[test]
    fn only_fast_registrations_of_the_same_domain_can_be_invalidated() {
        let mut mrs = table();
        let memory = Memory::new(4096).unwrap();
        let plain = mrs.reg(PD, &memory.whole(), Access::REMOTE_READ).unwrap();
        assert_eq!(mrs.invalidate(PD, QP, plain.rkey), Err(KeyError::Kind));
        let fast = mrs.alloc_fast(PD, 1).unwrap();
        assert_eq!(mrs.invalidate(PD, QP, fast.rkey), Err(KeyError::Key));
        mrs.map_sg(fast.id, &[memory.whole()]).unwrap();
        mrs.reg_fast(PD, fast.id, fast.rkey, Access::REMOTE_READ)
            .unwrap();
        assert_eq!(mrs.invalidate(OTHER, QP, fast.rkey), Err(KeyError::Domain));
        mrs.check_invalidate(PD, QP, fast.rkey).unwrap();
        mrs.invalidate(PD, QP, fast.rkey).unwrap();
    }

    #[test]
    fn keys_are_not_soon_reused_and_depend_on_the_seed() {
        let mut mrs = table();
        let memory = Memory::new(4096).unwrap();
        let mut seen = std::collections::HashSet::new();
        for _ in 0..100_000 {
            let mr = mrs.reg(PD, &memory.whole(), Access::empty()).unwrap();
            assert!(seen.insert(mr.rkey.0 >> 8), "an index came back");
            mrs.dereg(mr.id).unwrap();
        }
        let first = |seed| {
            MrTable::new(16, 8, seed)
                .reg(PD, &memory.whole(), Access::empty())
                .unwrap()
                .rkey
        };
        assert_ne!(first([1; 16]), first([2; 16]));
        assert_eq!(first([1; 16]), first([1; 16]));
    }

    #[test]
    fn the_table_is_bounded() {
        let mut mrs = MrTable::new(2, 8, [0; 16]);
        let memory = Memory::new(4096).unwrap();
        let a = mrs.reg(PD, &memory.whole(), Access::empty()).unwrap();
        mrs.alloc_fast(PD, 8).unwrap();
        assert!(matches!(
            mrs.alloc_fast(PD, 9),
            Err(VerbsError::InvalidParameter(_))
        ));
        assert!(matches!(
            mrs.alloc_fast(PD, 8),
            Err(VerbsError::InsufficientResources(_))
        ));
        assert_eq!(mrs.dereg(a.id), Ok(PD));
        mrs.alloc_fast(PD, 8).unwrap();
    }

    proptest! {
        #[test]
        fn a_peers_numbers_never_panic(key: u32, addr: u64, len: u32, near: bool) {
            let mut mrs = table();
            let memory = Memory::new(4096).unwrap();
            let mr = mrs.reg(PD, &memory.whole(), Access::REMOTE_READ).unwrap();
            let key = if near { mr.rkey } else { RKey(key) };
            let addr = if near { mr.addr.wrapping_add(addr % 8192).wrapping_sub(2048) } else { addr };
            if let Ok(span) = mrs.resolve_remote(PD, QP, key, addr, len, Access::REMOTE_READ) {
                prop_assert!(len == 0 || (addr >= mr.addr && addr + u64::from(len) <= mr.addr + 4096));
                prop_assert_eq!(span.len(), len as usize);
            }
        }

        #[test]
        fn a_span_is_its_segments_end_to_end(
            cuts in proptest::collection::vec((0usize..4000, 0usize..90), 1..9),
            from in 0usize..400,
            len in 0usize..400,
        ) {
            let mut mrs = table();
            let memory = Memory::new(4096).unwrap();
            memory.write(0, &(0..4096).map(|i| (i * 31 / 7) as u8).collect::<Vec<_>>());
            let parts: Vec<_> = cuts.iter().map(|&(at, n)| memory.slice(at..at + n).unwrap()).collect();
            let whole: Vec<u8> = parts.iter().flat_map(MemSlice::to_vec).collect();
            let mr = mrs.alloc_fast(PD, 8).unwrap();
            prop_assert_eq!(mrs.map_sg(mr.id, &parts).unwrap(), whole.len() as u64);
            let access = Access::ZERO_BASED | Access::REMOTE_READ;
            let is_registered = mrs.reg_fast(PD, mr.id, mr.rkey, access).is_ok();
            prop_assert_eq!(is_registered, !whole.is_empty());
            let span = mrs.resolve_remote(PD, QP, mr.rkey, from as u64, len as u32, Access::REMOTE_READ);
            let fits = len == 0 || from + len <= whole.len();
            prop_assert_eq!(span.is_ok(), fits);
            if let Ok(span) = span && len > 0 {
                let mut read = vec![0; len];
                span.read(0, &mut read);
                prop_assert_eq!(&read[..], &whole[from..from + len]);
                let half = len / 2;
                let mut slices = Vec::new();
                span.push_slices(half, len - half, &mut slices);
                let joined: Vec<u8> = slices.iter().flat_map(MemSlice::to_vec).collect();
                prop_assert_eq!(&joined[..], &whole[from + half..from + len]);
            }
        }
    }
}
