//! Memory key table: maps a key to the memory of this process and checks access rights.
//!
//! - [`MrTable`]: registers regions, allocates fast-registration regions and resolves keys.
//! - [`Span`]: a checked range of a region. This is the only way to get from a key to memory. It
//!   borrows the table, so it cannot outlive the registration it was checked against.
//! - Integrity regions ([`MrTable::alloc_integrity`]): the range of a span has the wire layout,
//!   which the span converts from and to the layout in memory.
//!
//! # Keys
//!
//! A key consists of a 24-bit index and a byte that can be changed by its owner (IBTA 10.6.3.2).
//! The index contains the slot number and the slot's generation, encoded using a secret permutation
//! of 24-bit numbers, so that a key does not tell a peer anything about other keys. The complete
//! key must then match the slot. Slots are reused oldest first, so that a key is only used again
//! after all other slots and generations. A region uses the same number as local and remote key,
//! and they are distinguished by access rights.
//!
//! # Invariants
//!
//! - All arithmetic on addresses and lengths provided by a peer is checked, and a range that wraps
//!   is rejected (CVE-2026-98365, CVE-2026-46325).
//! - The key is not checked for a zero-length range (IBTA 9.7.4.1.3 for the remote side).
//! - Resolving keys and registering via a work request must not allocate: a fast-registration
//!   region is created with space for all segments.
//!
//! - A region can't be removed while windows are bound to it, and a type 2 window is unbound when
//!   its QP is destroyed.

mod dif;
mod integrity;
mod keys;
mod segment;
mod span;
mod window;

use std::cell::Cell;
use std::collections::{BTreeSet, VecDeque};
use std::ops::Range;

use riser_memory::MemSlice;
use thiserror::Error;

use self::integrity::Integrity;
use self::keys::{INDEX_BITS, Permutation, Prf};
use self::segment::Segment;
use self::window::Binding;
use crate::umem;
use crate::verbs::{
    Access, Handle, LKey, Mr, MrAttr, MrChange, MrId, MwType, PdId, QpId, RKey, Sge, VerbsError,
};

pub use self::span::Span;

/// Maximum number of regions in a table: 2²⁰, which leaves four bits of the index for the
/// generation.
pub const MAX_REGIONS: u32 = 1 << 20;

/// Number of recently used indexes for which we cache the slot, which must be a power of two. This
/// covers the few regions used by the data path and avoids reading the permutation tables, which
/// don't fit into the L1 cache.
const RECENT: usize = 64;

/// Not a valid key index.
const NO_INDEX: u32 = u32::MAX;

/// Error returned if a key does not grant access.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum KeyError {
    /// There is no valid region with this key.
    #[error("unknown key")]
    Key,
    /// The region belongs to a different protection domain.
    #[error("region in a different protection domain")]
    Domain,
    /// The region does not grant the required access rights.
    #[error("access not permitted by the region")]
    Right,
    /// The range exceeds the region.
    #[error("range exceeds the region")]
    Range,
    /// The region can't be registered or invalidated by a work request, or not in its current
    /// state.
    #[error("region cannot be registered or invalidated by a work request")]
    Kind,
}

/// Slot type.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Free,
    Registered,
    /// Fast-registration region, with the maximum number of segments.
    Fast(u32),
    /// Integrity region, which is also registered by a work request.
    Integrity,
    /// Null region.
    Null,
    Window(MwType),
}

#[derive(Debug)]
struct Region {
    kind: Kind,
    generation: u32,
    key: u32,
    /// Set if the key is valid. The key of a fast-registration region is not valid until it is
    /// registered.
    valid: bool,
    pd: PdId,
    access: Access,
    /// Set if parts of the region may not be mapped, so that we need to check this before each
    /// access.
    is_paged: bool,
    base: u64,
    length: u64,
    /// Not empty if `length` is not 0, except for null regions and integrity regions. Empty
    /// segments are not stored.
    segments: Vec<Segment>,
    /// Set for an integrity region.
    integrity: Option<Box<Integrity>>,
    /// Number of windows bound to this region.
    windows: u32,
    /// Set for a bound window.
    binding: Option<Binding>,
}

/// All regions of a device. The maximum number of regions, and of segments in a fast registration,
/// is set when the table is created.
pub struct MrTable {
    slots: Vec<Region>,
    /// Free slots, ordered by the time they were freed.
    free: VecDeque<u32>,
    slot_bits: u32,
    max_segments: u32,
    permutation: Permutation,
    /// Cache of recently used indexes and their slots, using the low bits of the index. The mapping
    /// never changes, so entries don't need to be invalidated, and the region is used to check if
    /// the key is valid.
    recent: [Cell<(u32, u32)>; RECENT],
    random: Prf,
    /// Slots of bound type 2 windows, by QP.
    by_qp: BTreeSet<(QpId, u32)>,
}

impl std::fmt::Debug for MrTable {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "MrTable({} of {})", self.len(), self.slots.len())
    }
}

impl MrTable {
    /// Creates a table for `max_regions` regions (rounded up to a power of two, at most
    /// [`MAX_REGIONS`]) with up to `max_segments` segments in a fast registration. `seed` is used
    /// to generate all keys and must come from the random source of the operating system.
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
                    integrity: None,
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

    /// Returns the number of regions in the table.
    #[must_use]
    pub fn len(&self) -> usize {
        self.slots.len() - self.free.len()
    }

    /// Returns whether there are no regions.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns the region in a slot, where `slot` is the index of its ID.
    #[must_use]
    pub fn at(&self, slot: u32) -> Option<MrId> {
        let region = self.slots.get(slot as usize)?;
        let id = MrId(Handle::new(slot, region.generation));
        region.is_named(id).then_some(id)
    }

    /// Registers a memory range (see [`crate::verbs::Verbs::reg_mr`]).
    ///
    /// # Errors
    /// See [`MrTable::reg_iova`].
    pub fn reg(&mut self, pd: PdId, range: &MemSlice, access: Access) -> Result<Mr, VerbsError> {
        let iova = if access.contains(Access::ZERO_BASED) {
            0
        } else {
            range.addr()
        };
        self.reg_iova(pd, range, iova, access)
    }

    /// Registers a memory range with addresses starting at `iova` (see
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

    /// Modifies a registered region (see [`crate::verbs::Verbs::rereg_mr`]). The caller must check
    /// that the protection domain exists.
    ///
    /// # Errors
    /// Returns [`VerbsError`]. In this case the region is not modified.
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
            return Err(VerbsError::InvalidParameter("region change"));
        }
        // The access rights and ranges of windows depend on the values to be changed.
        if region.windows > 0 {
            return Err(VerbsError::ResourceBusy("memory region"));
        }
        let access = access.unwrap_or(region.access);
        check_access(access)?;
        // The access rights determine if the full range must be mapped, so they must be changed
        // together with the range.
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
        // Allocate the space for all segments now, so that a registration on the data path doesn't
        // need an allocation.
        region.segments.reserve_exact(max_segments as usize);
        Ok(region.describe(id))
    }

    /// Sets the memory for the next registration of a fast-registration region, using as many
    /// `segments` as possible. Returns the size in bytes.
    ///
    /// # Errors
    /// [`VerbsError::InvalidHandle`], or [`VerbsError::InvalidState`] if the region is currently
    /// valid or is not a fast-registration region.
    pub fn map_sg(&mut self, id: MrId, segments: &[MemSlice]) -> Result<u64, VerbsError> {
        let region = self.region_mut(id)?;
        let Kind::Fast(room) = region.kind else {
            return Err(VerbsError::InvalidState("not a fast-registration region"));
        };
        // We must not change the memory of a valid key, because it could be used by the peer to
        // read or write this memory.
        if region.valid {
            return Err(VerbsError::InvalidState("the region is still valid"));
        }
        let ranges = umem::ranges(segments).take(room as usize);
        region.length = segment::assign(&mut region.segments, ranges);
        region.base = region.segments.first().map_or(0, |s| s.slice.addr());
        Ok(region.length)
    }

    /// Returns the current attributes of a region.
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

    /// Deregisters a region of any type, even if it is not valid. Returns its protection domain.
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
        // The generation is only updated when the slot is reused. Until then, a stale handle is
        // rejected because of the slot type.
        region.kind = Kind::Free;
        region.valid = false;
        region.length = 0;
        region.segments = Vec::new();
        region.integrity = None;
        let pd = region.pd;
        // Add this at the end, so that the key is not reused for as long as possible.
        self.free.push_back(slot as u32);
        pd
    }

    /// Executes a REG_MR of a fast-registration region or integrity region: makes the mapped memory
    /// accessible using `key` (IBTA 10.6.3.6).
    ///
    /// # Errors
    /// Returns [`KeyError`] if the region belongs to a different domain, is already valid, has a
    /// different type or no mapped memory, if `key` differs in more than the low byte, or if
    /// `access` is invalid.
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
        // A second registration would replace the memory while the peer can still use the old key.
        if region.valid {
            return Err(KeyError::Kind);
        }
        let addr = match (region.kind, &region.segments[..], &region.integrity) {
            (Kind::Fast(_), [first, ..], _) => first.slice.addr(),
            (Kind::Integrity, _, Some(integrity)) if integrity.start(access) => 0,
            _ => return Err(KeyError::Kind),
        };
        // Only the low byte of a key can be changed by its owner (IBTA 10.6.3.2).
        if region.key >> 8 != key.0 >> 8 {
            return Err(KeyError::Key);
        }
        check_access(access).map_err(|_| KeyError::Right)?;
        region.base = if access.contains(Access::ZERO_BASED) {
            0
        } else {
            addr
        };
        // A peer adds an offset to the address, which must not wrap.
        if region.base.checked_add(region.length).is_none() {
            return Err(KeyError::Range);
        }
        region.key = key.0;
        region.access = access;
        region.is_paged = access.contains(Access::ON_DEMAND);
        region.valid = true;
        Ok(())
    }

    /// Enables the check if memory is mapped before each access for all regions, as for on-demand
    /// regions. This is used after an access has found that some memory is not mapped anymore.
    /// Unmapped parts are then handled as if they were outside of the region, and there is no
    /// change for the rest.
    pub fn page_faulted(&mut self) {
        for region in &mut self.slots {
            let integrity = region.integrity.iter().flat_map(|i| i.segments());
            let mut segments = region.segments.iter().chain(integrity);
            region.is_paged |= segments.any(|segment| segment.slice.memory().has_faulted());
        }
    }

    /// Executes a LOCAL_INV or a SEND with invalidate from a peer, after which the key is invalid.
    /// This is only possible for a valid fast-registration region or integrity region in the same
    /// protection domain and for a type 2 window bound by this QP (IBTA 10.6.5, 10.6.7.2.6).
    ///
    /// # Errors
    /// Returns [`KeyError`]. In this case nothing is changed.
    pub fn invalidate(&mut self, pd: PdId, qp: QpId, key: RKey) -> Result<(), KeyError> {
        let slot = self.find_invalidatable(pd, qp, key)?;
        if self.slots[slot].is_window() {
            self.unbind(slot);
        }
        self.slots[slot].valid = false;
        Ok(())
    }

    /// Checks if [`MrTable::invalidate`] would succeed.
    ///
    /// # Errors
    /// The same as for [`MrTable::invalidate`].
    pub fn check_invalidate(&self, pd: PdId, qp: QpId, key: RKey) -> Result<(), KeyError> {
        self.find_invalidatable(pd, qp, key).map(drop)
    }

    /// Returns the memory of a scatter list entry. `write` must be set if the memory will be
    /// written.
    ///
    /// # Errors
    /// Returns [`KeyError`]. An entry with length 0 is always valid.
    pub fn resolve_local(&self, pd: PdId, sge: &Sge, write: bool) -> Result<Span<'_>, KeyError> {
        self.resolve_local_part(pd, sge, 0..sge.length as usize, write)
    }

    /// Like [`MrTable::resolve_local`], but only `part` of the entry will be accessed. This ensures
    /// that the cost of a packet doesn't depend on the size of the entry.
    ///
    /// # Errors
    /// The same as for [`MrTable::resolve_local`].
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

    /// Returns the memory for `len` bytes at `addr`, as specified by the peer of a QP, and checks
    /// the access rights.
    ///
    /// # Errors
    /// Returns [`KeyError`]. A range with length 0 is always valid.
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

    /// Like [`MrTable::resolve_remote`], but only the first `head` bytes will be accessed. This
    /// ensures that the cost doesn't depend on the length provided by the peer.
    ///
    /// # Errors
    /// The same as for [`MrTable::resolve_remote`].
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
        // The order of these checks is only visible in the log, since the peer always gets the same
        // NAK.
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
            // True if any right except read access was requested.
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
        // Compare the complete key. A key of an old registration can lead to the same slot but has
        // a different generation or low byte.
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
        // A peer can only invalidate a region registered by a work request. All other regions are
        // controlled by their owner.
        let is_theirs = match region.kind {
            Kind::Fast(_) | Kind::Integrity => true,
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
            // Generations wrap after the slot has been used as often as there is space in the
            // index.
            let generation = region.generation % generations;
            let index = self
                .permutation
                .forward(generation << self.slot_bits | slot);
            // Index 0 could result in key 0, which is used by peers if there is no key.
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

    /// Sets the memory range, with addresses starting at `iova`.
    fn cover(&mut self, range: &MemSlice, iova: u64) {
        self.base = iova;
        self.length = range.len() as u64;
        self.segments.clear();
        // An empty segment would break the search for an address.
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

    /// Returns the range if it is within the region. The additions cannot overflow because the
    /// offset is checked against the length first.
    fn span(&self, addr: u64, len: u64) -> Option<Span<'_>> {
        let start = addr.checked_sub(self.base)?;
        let end = start.checked_add(len)?;
        (end <= self.length).then(|| Span {
            segments: &self.segments,
            integrity: self.integrity.as_deref(),
            start,
            len: len as usize,
        })
    }
}

/// IBTA 10.6.3.1: remote write and remote atomic access require local write access.
fn check_access(access: Access) -> Result<(), VerbsError> {
    let writes = Access::REMOTE_WRITE | Access::REMOTE_ATOMIC;
    if access.intersects(writes) && !access.contains(Access::LOCAL_WRITE) {
        return Err(VerbsError::InvalidAccess(
            "remote write and remote atomic need local write",
        ));
    }
    Ok(())
}

/// Checks the addresses of a region starting at `base`.
fn check_range(base: u64, length: u64, access: Access) -> Result<(), VerbsError> {
    // A peer adds an offset to the address, which must not wrap.
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
    fn key_grants_only_its_range() {
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
    fn cve_2026_98365_and_2026_46325_range_wraps() {
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
    fn remote_write_requires_local_write() {
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
    fn addresses_start_at_iova() {
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
    fn rereg_is_atomic() {
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
    fn null_region_reads_zeros_and_discards_writes() {
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
    fn on_demand_unmapped_range_is_rejected() {
        let mut mrs = table();
        let memory = Memory::new(3 * 4096).unwrap();
        // SAFETY: we check that memory is mapped before it is accessed.
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
    fn on_demand_changes_only_with_range() {
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
    fn on_demand_populates_only_accessed_pages() {
        use crate::rc::{RecvQueue, RecvWqe};
        use crate::verbs::{RecvWr, WrId};

        let mut mrs = table();
        let memory = Memory::new(4096).unwrap();
        // SAFETY: we check that memory is mapped before it is accessed.
        let space = unsafe { Memory::foreign(std::ptr::null_mut(), usize::MAX) };
        let all = Access::LOCAL_WRITE | Access::REMOTE_WRITE | Access::ON_DEMAND;
        let mr = mrs.reg(PD, &space.whole(), all).unwrap();
        // A short message from a peer, for a receive exceeding all memory of this process.
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
        // The first packet of a WRITE with the same length.
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
    fn fast_registration_combines_segments() {
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
    fn invalidation_requires_fast_registration_in_domain() {
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
    fn keys_are_reused_late_and_seeded() {
        let mut mrs = table();
        let memory = Memory::new(4096).unwrap();
        let mut seen = std::collections::HashSet::new();
        for _ in 0..100_000 {
            let mr = mrs.reg(PD, &memory.whole(), Access::empty()).unwrap();
            assert!(seen.insert(mr.rkey.0 >> 8), "an index was reused");
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
    fn region_table_is_limited() {
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
        fn hostile_ranges_never_panic(key: u32, addr: u64, len: u32, near: bool) {
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
        fn span_concatenates_segments(
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
