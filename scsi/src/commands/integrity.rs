//! Protection information of a single command. This code will separate it from incoming data or
//! insert it into outgoing data, generate it, and validate it (SBC-4, tables for RDPROTECT,
//! WRPROTECT, VRPROTECT and ORPROTECT).
//!
//! A block operation uses a separate region of the buffer for tuples, to ensure that the blocks are
//! contiguous and aligned for the backend. If protection information is transferred, it's inside
//! the payload, after every block:
//!
//! ```text
//!   transferred   | block 0 | tuple 0 | block 1 | tuple 1 | block 2 | tuple 2 |
//!                      receive |   ^ send
//!                              v   |
//!   BlockOp       | block 0 | block 1 | block 2 |   ...   | tuple 0 | tuple 1 | tuple 2 |
//!                 data                                    tags
//! ```
//!
//! We don't need this module for an LU without protection information.

use crate::access::DataAccess;
use crate::cdb::Cdb;
use crate::config::{Protection, ProtectionType, TUPLE_LEN};
use crate::data::cdb::block_32;
use crate::lu::LogicalUnit;
use crate::protection::{ExpectedTuple, MaskedTag, ProtectionError, Tuple, guard, lba_tag};
use crate::sense::{Sense, SenseKey};

/// Max size of a logical block, in bytes.
pub(super) const BLOCK_MAX: usize = 4096;

/// Size of a logical block on the medium and in transferred data.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Frame {
    block: u32,
    /// Set if every block is followed by its protection information.
    has_tuple: bool,
}

impl Frame {
    pub(crate) fn new(block: u32, integrity: Option<&Integrity>) -> Self {
        Self {
            block,
            has_tuple: integrity.is_some_and(Integrity::is_transferred),
        }
    }

    /// Returns the number of transferred bytes for `len` bytes on the medium.
    pub(crate) fn transferred(self, len: u32) -> u32 {
        match self.has_tuple {
            true => self.with_tuples(len),
            false => len,
        }
    }

    /// Out of line, because usually only the blocks are transferred.
    #[cold]
    fn with_tuples(self, len: u32) -> u32 {
        len + len / self.block * TUPLE_LEN
    }

    /// Returns the offset of a byte in the transferred data.
    pub(crate) fn offset(self, at: u64) -> u64 {
        match self.has_tuple {
            true => at + at / u64::from(self.block) * u64::from(TUPLE_LEN),
            false => at,
        }
    }

    /// Returns the size of a transferred block.
    pub(crate) fn size(self) -> u32 {
        self.transferred(self.block)
    }

    /// Returns the number of bytes on the medium for `len` transferred bytes, rounded up to a
    /// block.
    pub(crate) fn medium_len(self, len: u32) -> u32 {
        len.div_ceil(self.size()).saturating_mul(self.block)
    }
}

/// Blocks in the command buffer, with their tuples. All values are in bytes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Span {
    /// Offset of the first block in the range of the command.
    pub(crate) start: u64,
    /// Length of the blocks.
    pub(crate) len: u32,
    /// Offset of the blocks in the buffer.
    pub(crate) data: u32,
    /// Offset of the tuples in the buffer.
    pub(crate) tags: u32,
}

/// Fields to be checked.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Checks {
    guard: bool,
    /// The application tag and the reference tag.
    tags: bool,
}

impl Checks {
    const ALL: Self = Self {
        guard: true,
        tags: true,
    };
    const NONE: Self = Self {
        guard: false,
        tags: false,
    };

    /// Returns the checks that are enabled by a CDB. Zero does not enable any of them.
    fn selected(protect: u8) -> Self {
        match protect {
            0b001 | 0b101 => Self::ALL,
            0b010 => Self {
                guard: false,
                tags: true,
            },
            0b100 => Self {
                guard: true,
                tags: false,
            },
            _ => Self::NONE,
        }
    }
}

/// Expected tags in a 32-byte CDB.
#[derive(Clone, Copy, Debug)]
struct ExpectedTags {
    /// Reference tag of the first block. We increment it for every subsequent block.
    reference: u32,
    application: MaskedTag,
}

/// Protection information of a command.
#[derive(Clone, Debug)]
pub(crate) struct Integrity {
    protection: Protection,
    /// RDPROTECT, WRPROTECT, VRPROTECT or ORPROTECT. If this is zero, protection information is not
    /// transferred.
    protect: u8,
    /// We need to verify blocks on the medium even if `protect` is zero (DPICZ is zero).
    checks_by_default: bool,
    expected: Option<ExpectedTags>,
    /// LBA of the first block.
    lba: u64,
    block: u32,
}

impl Integrity {
    /// Returns the protection information for a command. `protection` is that of the LU.
    #[inline(never)]
    pub(crate) fn new(lu: &LogicalUnit, protection: Protection, cdb: &Cdb) -> Self {
        use block_32::{APPLICATION_TAG_MASK, EXPECTED_APPLICATION_TAG, EXPECTED_REFERENCE_TAG};
        let expected = cdb.has_expected_tags().then(|| ExpectedTags {
            reference: cdb.get(EXPECTED_REFERENCE_TAG),
            application: MaskedTag {
                value: cdb.get(EXPECTED_APPLICATION_TAG),
                mask: cdb.get(APPLICATION_TAG_MASK),
            },
        });
        Self {
            protection,
            protect: cdb.protect(),
            // Without protection, blocks are never checked.
            checks_by_default: lu.protection().is_some() && !lu.ignores_unrequested_checks(),
            expected,
            lba: cdb.extent().lba,
            block: lu.config().block_size.bytes(),
        }
    }

    /// Returns whether every block of the payload is followed by its protection information.
    pub(crate) fn is_transferred(&self) -> bool {
        self.protect != 0
    }

    /// Returns the same for blocks that are transferred without protection information.
    pub(crate) fn without_transfer(&self) -> Self {
        Self {
            protect: 0,
            ..self.clone()
        }
    }

    /// Returns the same for blocks with protection information that we will ignore.
    pub(crate) fn without_checks(&self) -> Self {
        Self {
            protect: 0b011,
            ..self.clone()
        }
    }

    /// Separates incoming blocks from their tuples, and validates them. If there are no tuples in
    /// the received data, we generate them. `received` is the offset of the data in the buffer,
    /// which must not be less than the offset of the blocks.
    pub(crate) fn receive(
        &self,
        data: &mut dyn DataAccess,
        span: Span,
        received: u32,
    ) -> Result<(), Sense> {
        let checks = Checks::selected(self.protect);
        let mut block = [0; BLOCK_MAX];
        let block = &mut block[..self.block as usize];
        let size = Frame::new(self.block, Some(self)).size();
        let transferred = (received..).step_by(size as usize);
        for ((index, to, tag), at) in self.blocks(span).zip(transferred) {
            data.read(at, block);
            let tuple = if self.is_transferred() {
                let tuple = read_tuple(data, at + self.block);
                let expected = self.expected(checks, index, block);
                tuple
                    .check(&expected)
                    .map_err(|error| self.sense(SenseKey::AbortedCommand, error, index))?;
                tuple
            } else {
                self.generate(index, block)
            };
            // This is safe, because it can only overwrite blocks that were previously moved,
            // together with their tuples.
            if at != to {
                data.write(to, block);
            }
            data.write(tag, &tuple.encode());
        }
        Ok(())
    }

    /// Validates blocks read from the medium.
    pub(crate) fn check_stored(&self, data: &dyn DataAccess, span: Span) -> Result<(), Sense> {
        let checks = self.stored_checks();
        if checks == Checks::NONE {
            return Ok(());
        }
        let mut block = [0; BLOCK_MAX];
        let block = &mut block[..self.block as usize];
        for (index, at, tag) in self.blocks(span) {
            data.read(at, block);
            self.check_block(checks, index, block, read_tuple(data, tag))?;
        }
        Ok(())
    }

    /// Verifies blocks read from the medium, and inserts the tuples into the outgoing data, at the
    /// offset of the blocks. The caller must not send this data if the check fails.
    pub(crate) fn send(&self, data: &mut dyn DataAccess, span: Span) -> Result<(), Sense> {
        if !self.is_transferred() {
            return self.check_stored(data, span);
        }
        let checks = self.stored_checks();
        let mut block = [0; BLOCK_MAX];
        let block = &mut block[..self.block as usize];
        let size = Frame::new(self.block, Some(self)).size();
        let mut result = Ok(());
        // Start with the final block, because this can only overwrite blocks after it, which have
        // already been copied.
        for (order, (index, at, tag)) in self.blocks(span).enumerate().rev() {
            data.read(at, block);
            let tuple = read_tuple(data, tag);
            // If there are multiple errors, report the first block.
            if let Err(sense) = self.check_block(checks, index, block, tuple) {
                result = Err(sense);
            }
            let to = span.data + order as u32 * size;
            data.write(to, block);
            data.write(to + self.block, &tuple.encode());
        }
        result
    }

    /// Compares the tuples of blocks on the medium with incoming tuples, starting at `received` in
    /// the buffer.
    pub(crate) fn compare(
        &self,
        data: &dyn DataAccess,
        stored: Span,
        received: u32,
    ) -> Result<(), Sense> {
        self.compare_with(stored, data, |order, _| {
            read_tuple(data, received + order * TUPLE_LEN)
        })
    }

    /// Compares the tuples of blocks on the medium with a single received tuple, which is used for
    /// all blocks of the command in the same way as for WRITE SAME.
    pub(crate) fn compare_one(
        &self,
        data: &dyn DataAccess,
        stored: Span,
        received: u32,
    ) -> Result<(), Sense> {
        let first = read_tuple(data, received);
        self.compare_with(stored, data, |_, index| self.repeated(first, index))
    }

    fn compare_with(
        &self,
        stored: Span,
        data: &dyn DataAccess,
        received: impl Fn(u32, u64) -> Tuple,
    ) -> Result<(), Sense> {
        if !self.is_transferred() {
            return Ok(());
        }
        let Protection {
            protection_type,
            client_owns_tag,
        } = self.protection;
        for (order, (index, _, tag)) in (0..).zip(self.blocks(stored)) {
            let (received, tuple) = (received(order, index), read_tuple(data, tag));
            // Don't compare a block if the client or the medium provided an escape (SBC-4,
            // VRPROTECT with a BYTCHK of 01b or 11b).
            if [received, tuple]
                .iter()
                .any(|tuple| tuple.is_unchecked(protection_type))
            {
                continue;
            }
            // Ignore tags that the device server is allowed to modify, and the reference tag if
            // VRPROTECT is 101b.
            let expected = ExpectedTuple {
                guard: (self.protect != 0b010).then_some(received.guard),
                application_tag: client_owns_tag.then_some(MaskedTag {
                    value: received.application_tag,
                    mask: u16::MAX,
                }),
                reference_tag: (self.protect != 0b101
                    && (client_owns_tag || protection_type != ProtectionType::Type3))
                    .then_some(received.reference_tag),
            };
            tuple
                .check(&expected)
                .map_err(|error| self.sense(SenseKey::Miscompare, error, index))?;
        }
        Ok(())
    }

    /// Writes the tuples of blocks that are all equal to the first block of the command.
    pub(crate) fn repeat(&self, data: &mut dyn DataAccess, span: Span, first: Tuple) {
        for (index, _, tag) in self.blocks(span) {
            data.write(tag, &self.repeated(first, index).encode());
        }
    }

    /// Updates the tuples of received blocks after their data was changed.
    pub(crate) fn update(&self, data: &mut dyn DataAccess, span: Span) {
        let mut block = [0; BLOCK_MAX];
        let block = &mut block[..self.block as usize];
        for (index, at, tag) in self.blocks(span) {
            data.read(at, block);
            let tuple = match self.is_transferred() {
                true => Tuple {
                    guard: guard(block),
                    ..read_tuple(data, tag)
                },
                false => self.generate(index, block),
            };
            data.write(tag, &tuple.encode());
        }
    }

    /// Returns the index in the command and the offsets in the buffer of each block and tuple.
    fn blocks(
        &self,
        span: Span,
    ) -> impl DoubleEndedIterator<Item = (u64, u32, u32)> + ExactSizeIterator + use<> {
        let block = self.block;
        let first = span.start / u64::from(block);
        (0..span.len / block).map(move |order| {
            (
                first + u64::from(order),
                span.data + order * block,
                span.tags + order * TUPLE_LEN,
            )
        })
    }

    fn stored_checks(&self) -> Checks {
        match self.protect {
            0 if self.checks_by_default => Checks::ALL,
            protect => Checks::selected(protect),
        }
    }

    /// Checks a block read from the medium.
    fn check_block(
        &self,
        checks: Checks,
        index: u64,
        block: &[u8],
        tuple: Tuple,
    ) -> Result<(), Sense> {
        if checks == Checks::NONE || tuple.is_unchecked(self.protection.protection_type) {
            return Ok(());
        }
        let expected = self.expected(checks, index, block);
        tuple
            .check(&expected)
            .map_err(|error| self.sense(SenseKey::AbortedCommand, error, index))
    }

    fn expected(&self, checks: Checks, index: u64, block: &[u8]) -> ExpectedTuple {
        ExpectedTuple {
            guard: checks.guard.then(|| guard(block)),
            // Without an expected tag in the CDB, we don't know the content.
            application_tag: self
                .expected
                .filter(|_| checks.tags && self.protection.client_owns_tag)
                .map(|expected| expected.application),
            reference_tag: self.reference_tag(index).filter(|_| checks.tags),
        }
    }

    /// Returns the reference tag of a block, if we know it.
    fn reference_tag(&self, index: u64) -> Option<u32> {
        let expected = self
            .expected
            .map(|expected| expected.reference.wrapping_add(index as u32));
        expected.or(lba_tag(self.protection.protection_type, self.lba + index))
    }

    fn generate(&self, index: u64, block: &[u8]) -> Tuple {
        let reference_tag = self.reference_tag(index).filter(|_| self.counts_blocks());
        Tuple::generate(self.protection, block, reference_tag)
    }

    /// Returns whether the reference tag of each block is one more than the previous one.
    fn counts_blocks(&self) -> bool {
        match self.protection.protection_type {
            ProtectionType::Type1 => true,
            // Generated tags should be all ones, even if the CDB has an expected tag.
            ProtectionType::Type2 => self.is_transferred(),
            ProtectionType::Type3 => false,
        }
    }

    /// Returns the tuple of a block that is equal to the first block of the command.
    fn repeated(&self, first: Tuple, index: u64) -> Tuple {
        // Since this is an escape, write the original value to every block (SBC-4 5.52).
        let is_escape = self.is_transferred() && first == Tuple::DEALLOCATED;
        match self.counts_blocks() && !is_escape {
            true => Tuple {
                reference_tag: first.reference_tag.wrapping_add(index as u32),
                ..first
            },
            false => first,
        }
    }

    fn sense(&self, key: SenseKey, error: ProtectionError, index: u64) -> Sense {
        Sense::new(key, error.additional_sense()).with_information(self.lba + index)
    }
}

pub(crate) fn read_tuple(data: &dyn DataAccess, at: u32) -> Tuple {
    let mut bytes = [0; Tuple::LEN];
    data.read(at, &mut bytes);
    Tuple::parse(bytes)
}
