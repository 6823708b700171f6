//! Integrity regions: the peer and local scatter lists use the wire layout of the blocks, and the
//! user's memory has the memory layout (see [`SigAttrs`]).
//!
//! The region has a buffer for the wire layout, from which packets are sent and to which their data
//! is written, like the memory of any other region. [`Span`](super::Span) calls
//! [`Integrity::gather`] before reading a range and [`Integrity::scatter`] after writing:
//!
//! ```text
//!   data segments ──┐  gather: check, insert, strip   ┌─────────────┐
//!   protection ─────┴───────────────────────────────▶ │ buffer:     │ ◀──▶ packets
//!   segments    ◀──────────────────────────────────── │ wire layout │
//!                    scatter: check, insert, strip    └─────────────┘
//! ```
//!
//! Any range can be read or written. A block is checked and stored when its last byte has been
//! written, provided that its bytes were written in order, as by the packets of a message. A write
//! of its first byte starts again, and bytes after a gap are ignored. A block that was written only
//! in part, or after a gap, has the error [`SigErrorKind::Incomplete`] until it is complete.
//!
//! Like in Linux `mlx5_ib`, a failed check does not stop the transfer: the data is sent or stored,
//! and the owner must get the error before using it. Only the first error is recorded, because the
//! following blocks often fail as well.

use std::cell::{Cell, RefCell};
use std::io;
use std::ops::Range;

use riser_memory::{MemSlice, Memory};

use super::dif::{TUPLE_LEN, convert};
use super::segment::{self, Segment};
use super::{Kind, MrTable};
use crate::umem;
use crate::verbs::{
    Access, Mr, MrId, PdId, SigAttrs, SigDomain, SigError, SigErrorKind, VerbsError,
};

/// Maximum size of the wire layout in bytes: the longest message.
const MAX_WIRE: u64 = 1 << 31;

/// Location of the tuples in memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Layout {
    /// There are no tuples.
    Plain,
    /// After each block.
    Interleaved,
    /// In the protection segments.
    Separate,
}

/// Blocks of a region in both domains.
#[derive(Clone, Copy, Debug)]
struct Format {
    attrs: SigAttrs,
    layout: Layout,
    /// Protection interval in bytes.
    interval: usize,
    blocks: u32,
}

/// Written part of a block. It is empty again when the block is complete.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Written {
    /// Number of bytes from the first one.
    end: u16,
    /// Bytes after a gap were ignored.
    has_gap: bool,
}

/// Memory and state of an integrity region.
#[derive(Debug)]
pub(super) struct Integrity {
    /// Maximum number of data segments.
    max_data: usize,
    /// Maximum number of protection segments.
    max_protection: usize,
    data: Vec<Segment>,
    protection: Vec<Segment>,
    /// `None` until memory is mapped.
    format: Option<Format>,
    /// Buffer for the wire layout. This is not smaller than the region.
    wire: MemSlice,
    /// Progress of each block in the wire layout.
    written: Vec<Cell<Written>>,
    /// Number of blocks that were written in part.
    incomplete: Cell<u32>,
    /// End of the range that was last read. A message is sent in several packets, and the block at
    /// their boundary is only converted for the first of them.
    gathered: Cell<u64>,
    /// A block with its tuple.
    scratch: RefCell<Box<[u8]>>,
    error: Cell<Option<SigError>>,
}

impl Format {
    /// Creates the format for `data` bytes of data segments and `protection` bytes of protection
    /// segments.
    fn new(attrs: &SigAttrs, data: u64, protection: u64) -> Result<Self, VerbsError> {
        let invalid = |name| Err(VerbsError::InvalidParameter(name));
        let interval = match (attrs.mem, attrs.wire) {
            (SigDomain::T10Dif(mem), SigDomain::T10Dif(wire)) if mem.interval != wire.interval => {
                return invalid("protection intervals: different in memory and on the wire");
            }
            (SigDomain::T10Dif(dif), _) | (SigDomain::None, SigDomain::T10Dif(dif)) => dif.interval,
            (SigDomain::None, SigDomain::None) => {
                return invalid("signature domains: no protection information");
            }
        };
        if !matches!(interval, 512 | 4096) {
            return invalid("protection interval: neither 512 nor 4096");
        }
        let layout = match (attrs.mem, protection) {
            (SigDomain::None, 0) => Layout::Plain,
            (SigDomain::None, _) => {
                return invalid("protection segments: no protection information in memory");
            }
            (SigDomain::T10Dif(_), 0) => Layout::Interleaved,
            (SigDomain::T10Dif(_), _) => Layout::Separate,
        };
        let tuple = TUPLE_LEN as u64;
        let stride = match layout {
            Layout::Interleaved => u64::from(interval) + tuple,
            Layout::Plain | Layout::Separate => interval.into(),
        };
        let blocks = data / stride;
        if data == 0 || !data.is_multiple_of(stride) {
            return invalid("size of the data segments: not a multiple of the block size");
        }
        if layout == Layout::Separate && protection != blocks * tuple {
            return invalid("size of the protection segments: not 8 bytes for each block");
        }
        if blocks > MAX_WIRE / (u64::from(interval) + tuple) {
            return invalid("size of the data segments: exceeds the longest message");
        }
        Ok(Self {
            attrs: *attrs,
            layout,
            interval: interval as usize,
            blocks: blocks as u32,
        })
    }

    /// Size of a block on the wire in bytes, including its tuple.
    fn wire_block(&self) -> usize {
        match self.attrs.wire {
            SigDomain::None => self.interval,
            SigDomain::T10Dif(_) => self.interval + TUPLE_LEN,
        }
    }

    fn wire_len(&self) -> usize {
        self.blocks as usize * self.wire_block()
    }

    /// Ranges of a block and its tuple in the data segments and the protection segments.
    fn memory(&self, index: u32) -> [Range<u64>; 2] {
        let tuple = TUPLE_LEN as u64;
        let (data, protection) = match self.layout {
            Layout::Plain => (self.interval as u64, 0),
            Layout::Interleaved => (self.interval as u64 + tuple, 0),
            Layout::Separate => (self.interval as u64, tuple),
        };
        [data, protection].map(|size| {
            let at = u64::from(index) * size;
            at..at + size
        })
    }

    /// Indexes of the blocks that overlap a range of the wire layout, which must not be empty.
    fn overlapping(&self, at: u64, len: usize) -> Range<u32> {
        let size = self.wire_block() as u64;
        let end = at + len as u64;
        (at / size) as u32..end.div_ceil(size) as u32
    }
}

impl Integrity {
    fn new(max_data: u32, max_protection: u32) -> io::Result<Self> {
        Ok(Self {
            max_data: max_data as usize,
            max_protection: max_protection as usize,
            data: Vec::with_capacity(max_data as usize),
            protection: Vec::with_capacity(max_protection as usize),
            format: None,
            wire: Memory::new(1)?.whole(),
            written: Vec::new(),
            incomplete: Cell::new(0),
            gathered: Cell::new(0),
            scratch: RefCell::default(),
            error: Cell::new(None),
        })
    }

    /// Sets the memory and attributes. Returns the size of the wire layout in bytes.
    fn map(
        &mut self,
        data: &[MemSlice],
        protection: &[MemSlice],
        attrs: &SigAttrs,
    ) -> Result<u64, VerbsError> {
        let bytes = |list: &[MemSlice]| list.iter().map(|s| s.len() as u64).sum();
        let format = Format::new(attrs, bytes(data), bytes(protection))?;
        if umem::ranges(data).count() > self.max_data
            || umem::ranges(protection).count() > self.max_protection
        {
            return Err(VerbsError::InvalidParameter("number of segments"));
        }
        let len = format.wire_len();
        if self.wire.len() < len {
            let memory = Memory::new(len);
            self.wire = memory
                .map_err(|_| VerbsError::InsufficientResources("memory"))?
                .whole();
        }
        segment::assign(&mut self.data, umem::ranges(data));
        segment::assign(&mut self.protection, umem::ranges(protection));
        self.written.clear();
        self.written.resize(format.blocks as usize, Cell::default());
        self.incomplete.set(0);
        let block = format.interval + TUPLE_LEN;
        if self.scratch.get_mut().len() != block {
            *self.scratch.get_mut() = vec![0; block].into();
        }
        self.format = Some(format);
        Ok(len as u64)
    }

    /// Prepares the region for a registration. Returns whether this is possible: memory must be
    /// mapped, and atomics do not follow the block layout.
    pub(super) fn start(&self, access: Access) -> bool {
        // The owner may check the status later.
        self.error.set(self.take_status());
        self.gathered.set(0);
        self.format.is_some() && !access.contains(Access::REMOTE_ATOMIC)
    }

    fn format(&self) -> &Format {
        self.format.as_ref().expect("a valid region is mapped")
    }

    /// Buffer for the wire layout.
    pub(super) fn wire(&self) -> &MemSlice {
        &self.wire
    }

    /// Segments in both lists.
    pub(super) fn segments(&self) -> impl Iterator<Item = &Segment> {
        self.data.iter().chain(&self.protection)
    }

    /// Updates the wire layout from memory, before this range is read. The written part of an
    /// incomplete block is kept. The range must be within the region.
    pub(super) fn gather(&self, at: u64, len: usize) {
        let format = self.format();
        let mut blocks = format.overlapping(at, len);
        let is_boundary = at.is_multiple_of(format.wire_block() as u64);
        if self.gathered.get() == at && !is_boundary {
            blocks.start += 1;
        }
        self.gathered.set(at + len as u64);
        let (mem, wire) = (&format.attrs.mem, &format.attrs.wire);
        for index in blocks {
            let block = &mut *self.scratch.borrow_mut();
            let [data, protection] = format.memory(index);
            let (first, tuple) = block.split_at_mut((data.end - data.start) as usize);
            segment::read(&self.data, data.start, first);
            if !protection.is_empty() {
                segment::read(&self.protection, protection.start, tuple);
            }
            self.convert(block, index, (mem, wire));
            let size = format.wire_block();
            let kept = usize::from(self.written[index as usize].get().end);
            self.wire
                .write(index as usize * size + kept, &block[kept..size]);
        }
    }

    /// Updates memory from the wire layout, after this range was written. The range must be within
    /// the region.
    pub(super) fn scatter(&self, at: u64, len: usize) {
        let format = self.format();
        let size = format.wire_block();
        for index in format.overlapping(at, len) {
            let begin = u64::from(index) * size as u64;
            let from = at.saturating_sub(begin) as u16;
            let to = (at + len as u64 - begin).min(size as u64) as u16;
            let before = self.written[index as usize].get();
            let written = match before {
                _ if from == 0 => Written {
                    end: to,
                    has_gap: false,
                },
                Written { end, .. } if from <= end => Written {
                    end: end.max(to),
                    ..before
                },
                Written { end, .. } => Written { end, has_gap: true },
            };
            if usize::from(written.end) == size {
                self.set_written(index, Written::default());
                self.scatter_block(format, index);
            } else {
                self.set_written(index, written);
            }
        }
    }

    fn set_written(&self, index: u32, written: Written) {
        let before = self.written[index as usize].replace(written);
        let is_incomplete = |written: Written| u32::from(written != Written::default());
        let others = self.incomplete.get() - is_incomplete(before);
        self.incomplete.set(others + is_incomplete(written));
    }

    /// Returns whether [`Self::take_status`] would return an error.
    fn has_error(&self) -> bool {
        self.error.get().is_some() || self.incomplete.get() > 0
    }

    /// Returns the first error and clears all errors. Incomplete blocks must be written again from
    /// their first byte.
    fn take_status(&self) -> Option<SigError> {
        let error = self.error.take();
        if self.incomplete.replace(0) == 0 {
            return error;
        }
        let mut blocks = self.written.iter().map(Cell::take).zip(0u64..);
        let first = blocks.find(|(written, _)| *written != Written::default());
        blocks.for_each(drop);
        error.or_else(|| {
            let (written, index) = first?;
            let interleaved = (self.format().interval + TUPLE_LEN) as u64;
            Some(SigError {
                kind: SigErrorKind::Incomplete,
                expected: self.format().wire_block() as u32,
                actual: written.end.into(),
                offset: index * interleaved,
            })
        })
    }

    fn scatter_block(&self, format: &Format, index: u32) {
        let block = &mut *self.scratch.borrow_mut();
        let size = format.wire_block();
        self.wire.read(index as usize * size, &mut block[..size]);
        self.convert(block, index, (&format.attrs.wire, &format.attrs.mem));
        let [data, protection] = format.memory(index);
        let (first, tuple) = block.split_at((data.end - data.start) as usize);
        segment::write(&self.data, data.start, first);
        if !protection.is_empty() {
            segment::write(&self.protection, protection.start, tuple);
        }
    }

    fn convert(&self, block: &mut [u8], index: u32, domains: (&SigDomain, &SigDomain)) {
        let error = convert(block, index, domains, self.format().attrs.check);
        self.error.set(self.error.get().or(error));
    }

    /// Ensures that the memory of these blocks is mapped, see [`Span::populate`](super::Span).
    pub(super) fn populate(&self, at: u64, len: usize, write: bool) -> io::Result<()> {
        let mut result = Ok(());
        if len == 0 {
            return result;
        }
        for index in self.format().overlapping(at, len) {
            let [data, protection] = self.format().memory(index);
            for (list, range) in [(&self.data, data), (&self.protection, protection)] {
                let size = (range.end - range.start) as usize;
                segment::pieces(list, range.start, size, |slice, within, _, take| {
                    let part = slice.slice(within..within + take).expect("range is valid");
                    if result.is_ok() {
                        result = part.populate(write);
                    }
                });
            }
        }
        result
    }
}

impl MrTable {
    /// Allocates an integrity region (see [`crate::verbs::Verbs::alloc_mr_integrity`]).
    ///
    /// # Errors
    /// [`VerbsError::InvalidParameter`], [`VerbsError::InsufficientResources`].
    pub fn alloc_integrity(
        &mut self,
        pd: PdId,
        max_data: u32,
        max_protection: u32,
    ) -> Result<Mr, VerbsError> {
        if max_data == 0 || max_data.max(max_protection) > self.max_segments {
            return Err(VerbsError::InvalidParameter("number of segments"));
        }
        let integrity = Integrity::new(max_data, max_protection)
            .map_err(|_| VerbsError::InsufficientResources("memory"))?;
        let id = MrId(self.take_slot(pd)?);
        let region = &mut self.slots[id.0.index()];
        region.kind = Kind::Integrity;
        region.integrity = Some(Box::new(integrity));
        Ok(region.describe(id))
    }

    /// Sets the memory and signature attributes for the next registration of an integrity region
    /// (see [`crate::verbs::Verbs::map_mr_sg_pi`]). Returns the size of the wire layout in bytes.
    ///
    /// # Errors
    /// [`VerbsError::InvalidHandle`], [`VerbsError::InvalidState`],
    /// [`VerbsError::InvalidParameter`], [`VerbsError::InsufficientResources`].
    pub fn map_sg_pi(
        &mut self,
        id: MrId,
        data: &[MemSlice],
        protection: &[MemSlice],
        attrs: &SigAttrs,
    ) -> Result<u64, VerbsError> {
        let region = self.region_mut(id)?;
        let Some(integrity) = &mut region.integrity else {
            return Err(VerbsError::InvalidState("not an integrity region"));
        };
        // We must not change the memory of a valid key, because it could be used by the peer.
        if region.valid {
            return Err(VerbsError::InvalidState("the region is still valid"));
        }
        // Otherwise the owner could not distinguish the errors of two transfers.
        if integrity.has_error() {
            return Err(VerbsError::InvalidState(
                "the region has an unread signature error",
            ));
        }
        region.length = integrity.map(data, protection, attrs)?;
        region.base = 0;
        Ok(region.length)
    }

    /// Returns the first failed check of an integrity region since the last call, and clears it
    /// (see [`crate::verbs::Verbs::check_mr_status`]).
    ///
    /// # Errors
    /// [`VerbsError::InvalidHandle`], [`VerbsError::InvalidState`].
    pub fn check_status(&mut self, id: MrId) -> Result<Option<SigError>, VerbsError> {
        let integrity = self.region(id)?.integrity.as_ref();
        integrity
            .map(|integrity| integrity.take_status())
            .ok_or(VerbsError::InvalidState("not an integrity region"))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use proptest::sample::select;

    use super::super::KeyError;
    use super::*;
    use crate::verbs::{GuardType, Handle, QpId, SigCheck, T10Dif, TagEscape};

    const PD: PdId = PdId(Handle::new(1, 1));
    const QP: QpId = QpId(Handle::new(3, 1));
    const RIGHTS: Access = Access::LOCAL_WRITE
        .union(Access::REMOTE_WRITE)
        .union(Access::REMOTE_READ);
    const BLOCK: usize = 512;

    type TupleBytes = [u8; TUPLE_LEN];

    /// A registered region, with memory that is not aligned to blocks.
    struct Region {
        mrs: MrTable,
        mr: Mr,
        data: MemSlice,
        protection: Option<MemSlice>,
    }

    impl Region {
        fn new(attrs: &SigAttrs, blocks: usize, is_separate: bool) -> Self {
            let mut mrs = MrTable::new(16, 8, *b"sixteen bytes!!!");
            let mr = mrs.alloc_integrity(PD, 2, 1).unwrap();
            let memory = Memory::new(1 << 14).unwrap();
            let has_tuples = attrs.mem != SigDomain::None;
            let (stride, tuple) = match (has_tuples, is_separate) {
                (true, false) => (BLOCK + TUPLE_LEN, 0),
                (true, true) => (BLOCK, TUPLE_LEN),
                (false, _) => (BLOCK, 0),
            };
            let data = memory.slice(5..5 + blocks * stride).unwrap();
            let protection = memory.slice(9000..9000 + blocks * tuple).unwrap();
            let parts = [
                data.slice(0..77).unwrap(),
                // An empty segment prevents that the parts are joined.
                memory.slice(0..0).unwrap(),
                data.slice(77..data.len()).unwrap(),
            ];
            let protection = (tuple > 0).then_some(protection);
            let len = mrs
                .map_sg_pi(mr.id, &parts, protection.as_slice(), attrs)
                .unwrap();
            mrs.reg_fast(PD, mr.id, mr.rkey, RIGHTS).unwrap();
            let mr = mrs.query(mr.id).unwrap().mr;
            assert_eq!((mr.addr, mr.length), (0, len));
            Self {
                mrs,
                mr,
                data,
                protection,
            }
        }

        fn read(&self, at: usize, len: usize) -> Vec<u8> {
            let (key, right) = (self.mr.rkey, Access::REMOTE_READ);
            let span = self
                .mrs
                .resolve_remote(PD, QP, key, at as u64, len as u32, right);
            let mut slices = Vec::new();
            span.unwrap().push_slices(0, len, &mut slices);
            slices.iter().flat_map(MemSlice::to_vec).collect()
        }

        fn write(&self, at: usize, data: &[u8]) {
            let (key, right) = (self.mr.rkey, Access::REMOTE_WRITE);
            let span = self
                .mrs
                .resolve_remote(PD, QP, key, at as u64, data.len() as u32, right);
            span.unwrap().write(0, data);
        }

        fn fill(&self, blocks: &[[u8; BLOCK]], tuples: &[TupleBytes]) {
            if let Some(protection) = &self.protection {
                protection.write(0, tuples.as_flattened());
            }
            if self.data.len() == blocks.len() * BLOCK {
                self.data.write(0, blocks.as_flattened());
            } else {
                self.data.write(0, &interleave(blocks, tuples));
            }
        }
    }

    fn interleave(blocks: &[[u8; BLOCK]], tuples: &[TupleBytes]) -> Vec<u8> {
        let pairs = blocks.iter().zip(tuples);
        pairs
            .flat_map(|(block, tuple)| block.iter().chain(tuple))
            .copied()
            .collect()
    }

    fn guard(dif: &T10Dif, block: &[u8]) -> u16 {
        match dif.guard {
            GuardType::Crc => block.iter().fold(dif.guard_seed, |crc, &byte| {
                (0..8).fold(crc ^ u16::from(byte) << 8, |crc, _| {
                    (crc << 1) ^ (0x8bb7 * (crc >> 15))
                })
            }),
            GuardType::IpChecksum => {
                let high: u64 = block.iter().step_by(2).map(|&b| u64::from(b)).sum();
                let low: u64 = block.iter().skip(1).step_by(2).map(|&b| u64::from(b)).sum();
                let sum = u64::from(dif.guard_seed) + (high << 8) + low;
                // The ones' complement sum is the remainder, with FFFFh instead of 0 for any other
                // sum than 0.
                let rest = match (sum, sum % 0xffff) {
                    (1.., 0) => 0xffff,
                    (_, rest) => rest,
                };
                !(rest as u16)
            }
        }
    }

    fn correct(dif: &T10Dif, block: &[u8], index: u32) -> TupleBytes {
        let step = if dif.ref_remap { index } else { 0 };
        let mut tuple = [0; TUPLE_LEN];
        tuple[..2].copy_from_slice(&guard(dif, block).to_be_bytes());
        tuple[2..4].copy_from_slice(&dif.app_tag.to_be_bytes());
        tuple[4..].copy_from_slice(&dif.ref_tag.wrapping_add(step).to_be_bytes());
        tuple
    }

    fn number(bytes: &[u8]) -> u32 {
        bytes.iter().fold(0, |n, &byte| n << 8 | u32::from(byte))
    }

    /// Model of a transfer: the tuples of the other domain, and the first error.
    fn model(
        (from, to): (&SigDomain, &SigDomain),
        check: SigCheck,
        blocks: &[[u8; BLOCK]],
        tuples: &[TupleBytes],
    ) -> (Vec<TupleBytes>, Option<SigError>) {
        let mut first = None;
        let mut out = Vec::new();
        for (index, (block, tuple)) in blocks.iter().zip(tuples).enumerate() {
            let want = |dif| correct(dif, block, index as u32);
            let (SigDomain::T10Dif(source), other) = (from, to) else {
                let SigDomain::T10Dif(dif) = to else {
                    unreachable!("one domain has tuples")
                };
                out.push(want(dif));
                continue;
            };
            let expected = want(source);
            let is_escaped = match source.escape {
                TagEscape::None => false,
                TagEscape::AppTag => tuple[2..4] == [0xff; 2],
                TagEscape::AppAndRefTag => tuple[2..] == [0xff; 6],
            };
            let mask = u32::from(source.app_tag_check_mask);
            let fields = [
                (SigCheck::GUARD, SigErrorKind::BadGuard, 0..2, 0xffff),
                (SigCheck::REF_TAG, SigErrorKind::BadRefTag, 4..8, u32::MAX),
                (SigCheck::APP_TAG, SigErrorKind::BadAppTag, 2..4, mask),
            ];
            for (flag, kind, range, mask) in fields {
                let (expected, actual) = (number(&expected[range.clone()]), number(&tuple[range]));
                if !is_escaped && check.contains(flag) && (expected ^ actual) & mask != 0 {
                    first = first.or(Some(SigError {
                        kind,
                        expected,
                        actual,
                        offset: index as u64 * 520,
                    }));
                }
            }
            let mut passed = *tuple;
            if let (SigDomain::T10Dif(dest), false) = (other, is_escaped) {
                let new = want(dest);
                if dest.guard != source.guard || dest.guard_seed != source.guard_seed {
                    passed[..2].copy_from_slice(&new[..2]);
                }
                if dest.app_tag != source.app_tag {
                    passed[2..4].copy_from_slice(&new[2..4]);
                }
                if dest.ref_tag != source.ref_tag || dest.ref_remap != source.ref_remap {
                    passed[4..].copy_from_slice(&new[4..]);
                }
            }
            out.push(passed);
        }
        (out, first)
    }

    fn any_dif() -> impl Strategy<Value = T10Dif> {
        let guards = select(vec![GuardType::Crc, GuardType::IpChecksum]);
        let escapes = vec![TagEscape::None, TagEscape::AppTag, TagEscape::AppAndRefTag];
        let masks = select(vec![0xffff, 0, 0xff00]);
        let app_tags = select(vec![0, 0x0103, 0xffff]);
        let seeds = select(vec![0, 0xffff, 0x1234]);
        let ref_tags = select(vec![0, 77, u32::MAX]);
        let tags = (app_tags, masks, ref_tags, any::<bool>());
        (guards, seeds, tags, select(escapes)).prop_map(
            |(guard, guard_seed, (app_tag, app_tag_check_mask, ref_tag, ref_remap), escape)| {
                T10Dif {
                    guard,
                    guard_seed,
                    interval: 512,
                    app_tag,
                    app_tag_check_mask,
                    ref_tag,
                    ref_remap,
                    escape,
                }
            },
        )
    }

    /// Attributes of which at least one domain has tuples, often with the same values.
    fn any_attrs() -> impl Strategy<Value = SigAttrs> {
        (any_dif(), any_dif(), 0..4, 0u8..8).prop_map(|(one, other, domains, checks)| {
            let (mem, wire) = match domains {
                0 => (SigDomain::None, SigDomain::T10Dif(one)),
                1 => (SigDomain::T10Dif(one), SigDomain::None),
                2 => (SigDomain::T10Dif(one), SigDomain::T10Dif(one)),
                _ => (SigDomain::T10Dif(one), SigDomain::T10Dif(other)),
            };
            let flags = [SigCheck::GUARD, SigCheck::APP_TAG, SigCheck::REF_TAG];
            let chosen = flags.into_iter().enumerate();
            let check = chosen
                .filter(|(bit, _)| checks >> bit & 1 == 1)
                .map(|(_, flag)| flag)
                .collect();
            SigAttrs { mem, wire, check }
        })
    }

    /// Blocks, and for each a change of its correct tuple.
    fn any_blocks() -> impl Strategy<Value = Vec<(u8, u64, u8)>> {
        proptest::collection::vec((0..6u8, any::<u64>(), 0..64u8), 1..5)
    }

    /// Returns the blocks, and their tuples in a domain.
    fn contents(
        seeds: &[(u8, u64, u8)],
        domain: &SigDomain,
    ) -> (Vec<[u8; BLOCK]>, Vec<TupleBytes>) {
        let blocks = seeds.iter().map(|&(_, seed, _)| {
            let mut x = seed | 1;
            std::array::from_fn(|_| {
                x = x.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(11);
                (x >> 56) as u8
            })
        });
        let blocks: Vec<_> = blocks.collect();
        let SigDomain::T10Dif(dif) = domain else {
            let tuples = vec![[0; TUPLE_LEN]; blocks.len()];
            return (blocks, tuples);
        };
        let tuples = seeds
            .iter()
            .zip(&blocks)
            .enumerate()
            .map(|(index, (&(kind, seed, bit), block))| {
                let mut tuple = correct(dif, block, index as u32);
                match kind {
                    0 => tuple[usize::from(bit / 8)] ^= 1 << (bit % 8),
                    1 => tuple = seed.to_be_bytes(),
                    2 => tuple[2..4].fill(0xff),
                    3 => tuple.fill(0xff),
                    _ => {}
                }
                tuple
            })
            .collect();
        (blocks, tuples)
    }

    /// Returns contiguous ranges with these sizes, repeatedly, up to `end`.
    fn pieces(sizes: &[usize], end: usize) -> Vec<Range<usize>> {
        let mut ranges = Vec::new();
        let mut at = 0;
        for size in sizes.iter().cycle() {
            if at == end {
                break;
            }
            let next = (at + size).min(end);
            ranges.push(at..next);
            at = next;
        }
        ranges
    }

    fn wire_image(attrs: &SigAttrs, blocks: &[[u8; BLOCK]], tuples: &[TupleBytes]) -> Vec<u8> {
        match attrs.wire {
            SigDomain::None => blocks.as_flattened().to_vec(),
            SigDomain::T10Dif(_) => interleave(blocks, tuples),
        }
    }

    proptest! {
        #[test]
        fn gathered_data_matches_model(
            attrs in any_attrs(),
            seeds in any_blocks(),
            is_separate: bool,
            sizes in proptest::collection::vec(1usize..1500, 1..4),
        ) {
            let (blocks, tuples) = contents(&seeds, &attrs.mem);
            let mut region = Region::new(&attrs, blocks.len(), is_separate);
            region.fill(&blocks, &tuples);
            let (passed, error) = model((&attrs.mem, &attrs.wire), attrs.check, &blocks, &tuples);
            let image = wire_image(&attrs, &blocks, &passed);
            prop_assert_eq!(region.mr.length, image.len() as u64);
            let sent = pieces(&sizes, image.len())
                .into_iter()
                .flat_map(|range| region.read(range.start, range.len()))
                .collect::<Vec<_>>();
            prop_assert_eq!(sent, image);
            prop_assert_eq!(region.mrs.check_status(region.mr.id), Ok(error));
            prop_assert_eq!(region.mrs.check_status(region.mr.id), Ok(None));
        }

        #[test]
        fn scattered_data_matches_model(
            attrs in any_attrs(),
            seeds in any_blocks(),
            is_separate: bool,
            sizes in proptest::collection::vec(1usize..1500, 1..4),
            strays in proptest::collection::vec((0usize..2000, 1usize..600), 0..4),
        ) {
            let (blocks, tuples) = contents(&seeds, &attrs.wire);
            let mut region = Region::new(&attrs, blocks.len(), is_separate);
            let image = wire_image(&attrs, &blocks, &tuples);
            // Any writes before have no effect on the result.
            for (at, len) in strays {
                let at = at % image.len();
                region.write(at, &vec![0x5a; len.min(image.len() - at)]);
            }
            let _ = region.mrs.check_status(region.mr.id);
            region.fill(&vec![[0; BLOCK]; blocks.len()], &vec![[0; TUPLE_LEN]; blocks.len()]);
            for range in pieces(&sizes, image.len()) {
                region.write(range.start, &image[range]);
            }
            let (passed, error) = model((&attrs.wire, &attrs.mem), attrs.check, &blocks, &tuples);
            if let Some(protection) = &region.protection {
                prop_assert_eq!(protection.to_vec(), passed.as_flattened());
            }
            let stored = match region.data.len() == blocks.len() * BLOCK {
                true => blocks.as_flattened().to_vec(),
                false => interleave(&blocks, &passed),
            };
            prop_assert_eq!(region.data.to_vec(), stored);
            prop_assert_eq!(region.mrs.check_status(region.mr.id), Ok(error));
        }
    }

    #[test]
    fn incomplete_blocks_are_not_stored() {
        let attrs = SigAttrs {
            mem: SigDomain::None,
            wire: SigDomain::T10Dif(T10Dif::new(512, 0)),
            check: SigCheck::empty(),
        };
        let mut region = Region::new(&attrs, 2, false);
        let stored = |region: &Region| {
            region
                .data
                .to_vec()
                .iter()
                .map(|&b| u32::from(b))
                .sum::<u32>()
        };
        region.write(0, &[1; 519]);
        region.write(521, &[1; 519]);
        assert_eq!(stored(&region), 0);
        // Bytes after a gap are ignored.
        region.write(0, &[1; 100]);
        region.write(101, &[1; 419]);
        assert_eq!(stored(&region), 0);
        region.write(100, &[1; 1]);
        region.write(50, &[1; 470]);
        assert_eq!(stored(&region), 512);
        // The first byte starts again.
        region.write(520, &[2; 519]);
        region.write(520, &[1; 519]);
        assert_eq!(stored(&region), 512);
        region.write(1039, &[1]);
        assert_eq!(stored(&region), 1024);
        assert_eq!(region.mrs.check_status(region.mr.id), Ok(None));
    }

    #[test]
    fn incomplete_blocks_fail_check() {
        let attrs = SigAttrs {
            mem: SigDomain::None,
            wire: SigDomain::T10Dif(T10Dif::new(512, 0)),
            check: SigCheck::empty(),
        };
        let error = |actual, offset| {
            Ok(Some(SigError {
                kind: SigErrorKind::Incomplete,
                expected: 520,
                actual,
                offset,
            }))
        };
        // Ranges, and the number of bytes in order of the first incomplete block.
        for (ranges, actual, offset) in [
            (vec![0..300, 300..519], 519, 0),
            (vec![0..520, 520..1000], 480, 520),
            // The second part is a complete block.
            (vec![521..1040, 1040..1560], 0, 520),
            (vec![0..100, 101..520], 100, 0),
            (vec![1..520, 0..1], 1, 0),
            (vec![1030..1500, 0..30], 30, 0),
        ] {
            let mut region = Region::new(&attrs, 3, false);
            for range in &ranges {
                region.write(range.start, &vec![1; range.len()]);
            }
            let status = region.mrs.check_status(region.mr.id);
            assert_eq!(status, error(actual, offset), "{ranges:?}");
            assert_eq!(region.mrs.check_status(region.mr.id), Ok(None));
            // The remaining bytes alone do not complete the block.
            region.write(offset as usize + 519, &[1]);
            let status = region.mrs.check_status(region.mr.id);
            assert_eq!(status, error(0, offset), "{ranges:?}");
            region.write(0, &[1; 1560]);
            assert_eq!(region.mrs.check_status(region.mr.id), Ok(None));
        }
    }

    #[test]
    fn status_of_incomplete_block_survives_registration() {
        let dif = SigDomain::T10Dif(T10Dif::new(512, 0));
        let attrs = SigAttrs {
            mem: dif,
            wire: dif,
            check: SigCheck::empty(),
        };
        let mut region = Region::new(&attrs, 1, false);
        let (id, parts) = (region.mr.id, [region.data.clone()]);
        region.write(8, &[1; 100]);
        region.mrs.invalidate(PD, QP, region.mr.rkey).unwrap();
        assert!(matches!(
            region.mrs.map_sg_pi(id, &parts, &[], &attrs),
            Err(VerbsError::InvalidState(_))
        ));
        region.mrs.reg_fast(PD, id, region.mr.rkey, RIGHTS).unwrap();
        let status = region.mrs.check_status(id).unwrap();
        assert_eq!(status.map(|e| e.kind), Some(SigErrorKind::Incomplete));
        region.mrs.invalidate(PD, QP, region.mr.rkey).unwrap();
        region.mrs.map_sg_pi(id, &parts, &[], &attrs).unwrap();
    }

    #[test]
    fn read_keeps_partly_written_block() {
        let attrs = SigAttrs {
            mem: SigDomain::None,
            wire: SigDomain::T10Dif(T10Dif::new(512, 0)),
            check: SigCheck::empty(),
        };
        let region = Region::new(&attrs, 1, false);
        region.write(0, &[1; 300]);
        region.read(0, 10);
        region.write(300, &[1; 220]);
        assert_eq!(region.data.to_vec(), [1; 512]);
    }

    #[test]
    #[allow(unsafe_code, reason = "the region covers the whole address space")]
    fn unmapped_memory_rejects_access() {
        let memory = Memory::new(4096).unwrap();
        // SAFETY: we check that memory is mapped before it is accessed.
        let space = unsafe { Memory::foreign(std::ptr::null_mut(), usize::MAX) };
        let dif = T10Dif::new(512, 0);
        let attrs = SigAttrs {
            mem: SigDomain::T10Dif(dif),
            wire: SigDomain::T10Dif(dif),
            check: SigCheck::empty(),
        };
        let at = memory.addr() as usize;
        let mapped = space.slice(at..at + 1024).unwrap();
        let unmapped = space.slice(8..8 + 512).unwrap();
        let tuples = space.slice(at + 1024..at + 1048).unwrap();
        let mut mrs = MrTable::new(16, 8, *b"sixteen bytes!!!");
        let mr = mrs.alloc_integrity(PD, 2, 1).unwrap();
        mrs.map_sg_pi(mr.id, &[mapped, unmapped], &[tuples], &attrs)
            .unwrap();
        mrs.reg_fast(PD, mr.id, mr.rkey, RIGHTS | Access::ON_DEMAND)
            .unwrap();
        for right in [Access::REMOTE_READ, Access::REMOTE_WRITE] {
            let get = |at, len| mrs.resolve_remote(PD, QP, mr.rkey, at, len, right);
            assert!(get(0, 1040).is_ok());
            assert_eq!(get(1039, 2).unwrap_err(), KeyError::Range);
            assert_eq!(get(1559, 1).unwrap_err(), KeyError::Range);
        }
    }
}
