//! [`Layout`]: the mapping between the blocks of a unit and the frames of its medium.

use std::ops::Range;

use riser_block::{Command, CommandKind};
use riser_memory::MemSlice;
use riser_scsi::protection::Tuple;
use riser_scsi::step::{Allocation, BackendError, BlockOp};

use super::header::HEADER_LEN;

/// State of the first bytes of a range, and their number.
type Extent = (Allocation, u64);

/// Mapping between the blocks of a unit and the frames of its medium. Offsets of the unit refer to
/// its blocks without tuples. All values are in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Layout {
    block: u64,
}

impl Layout {
    /// Creates the layout for blocks of this size.
    #[must_use]
    pub const fn new(block_size: u32) -> Self {
        let block = block_size as u64;
        Self { block }
    }

    /// Returns the size of a frame: a block and its tuple.
    #[must_use]
    pub const fn frame(self) -> u64 {
        self.block + Tuple::LEN as u64
    }

    /// Returns the number of frames that the space for the header could contain. It is not shorter than
    /// the header, and the offset of each frame is a multiple of its size.
    const fn reserved(self) -> u64 {
        HEADER_LEN.div_ceil(self.frame())
    }

    /// Returns the offset on the medium for the start of a block.
    #[must_use]
    pub const fn medium_offset(self, offset: u64) -> u64 {
        (self.reserved() + offset / self.block) * self.frame()
    }

    /// Returns the length of the frames for whole blocks.
    const fn medium_len(self, len: u64) -> u64 {
        len / self.block * self.frame()
    }

    /// Returns the length of the blocks in frames that are completely within `len` bytes.
    #[must_use]
    pub const fn blocks_of(self, len: u64) -> u64 {
        len / self.frame() * self.block
    }

    /// Returns the size of the file for a unit of this capacity.
    #[must_use]
    pub const fn file_len(self, capacity: u64) -> u64 {
        self.medium_offset(capacity)
    }

    /// Returns the capacity of a unit in a file of this size. An incomplete frame is ignored.
    #[must_use]
    pub const fn capacity(self, file_len: u64) -> u64 {
        (file_len / self.frame()).saturating_sub(self.reserved()) * self.block
    }

    /// Returns the offset of a byte on the medium. For a tuple, this is the last byte of its block.
    #[must_use]
    pub fn unit_offset(self, offset: u64) -> u64 {
        let within = (offset % self.frame()).min(self.block - 1);
        (offset / self.frame()).saturating_sub(self.reserved()) * self.block + within
    }

    /// Returns the LBA of a frame at this offset on the medium.
    #[must_use]
    pub fn lba(self, offset: u64) -> u64 {
        self.unit_offset(offset) / self.block
    }

    /// Converts a command for the unit to a command for the medium.
    pub(in crate::backend) fn on_medium(self, op: Command) -> Command {
        Command {
            offset: self.medium_offset(op.offset),
            len: self.medium_len(op.len),
            buffer_offset: 0,
            ..op
        }
    }

    /// Converts a command for the medium to a command for the unit.
    pub(in crate::backend) fn on_unit(self, op: &Command) -> Command {
        Command {
            offset: self.unit_offset(op.offset),
            len: op.len / self.frame() * self.block,
            ..*op
        }
    }

    /// Converts a result for the medium to a result for the unit.
    #[cold]
    pub(in crate::backend) fn result_on_unit(
        self,
        result: Result<Option<Extent>, BackendError>,
    ) -> Result<Option<Extent>, BackendError> {
        let extent = |(allocation, len): Extent| {
            let frames = match allocation {
                Allocation::Mapped => len.div_ceil(self.frame()),
                Allocation::Deallocated => len / self.frame(),
            };
            match frames {
                // A part of the frame is a hole.
                0 => (Allocation::Mapped, self.block),
                _ => (allocation, frames * self.block),
            }
        };
        match result {
            Ok(found) => Ok(found.map(extent)),
            Err(BackendError::Medium { offset }) => Err(BackendError::Medium {
                offset: offset.map(|offset| self.unit_offset(offset)),
            }),
            Err(other) => Err(other),
        }
    }

    /// Converts an error with an offset of the unit to an error for the medium.
    pub(in crate::backend) fn error_on_medium(self, error: BackendError) -> BackendError {
        let BackendError::Medium { offset } = error else {
            return error;
        };
        BackendError::Medium {
            offset: offset.map(|offset| self.medium_offset(offset) + offset % self.block),
        }
    }

    /// Returns the parts of the command buffer that a read or write transfers, in the order of the
    /// medium: each block is followed by its tuple.
    ///
    /// # Panics
    /// Panics if the operation has no tuples.
    pub(crate) fn parts(self, op: &BlockOp) -> impl Iterator<Item = Range<u32>> {
        let (len, data, tags) = match *op {
            BlockOp::Read {
                len,
                buffer_offset,
                tags,
                ..
            }
            | BlockOp::Write {
                len,
                buffer_offset,
                tags,
                ..
            } => (len, buffer_offset, tags.expect("the unit is protected")),
            _ => (0, 0, 0),
        };
        let (block, tuple) = (self.block as u32, Tuple::LEN as u32);
        (0..len / block).flat_map(move |n| {
            let (data, tags) = (data + n * block, tags + n * tuple);
            [data..data + block, tags..tags + tuple]
        })
    }

    /// Converts the tuples in the frames of a read or write between the format of the unit and the
    /// format of the medium.
    pub(in crate::backend) fn invert_tuples(self, op: &Command, data: &[MemSlice]) {
        if !matches!(op.kind, CommandKind::Read | CommandKind::Write) {
            return;
        }
        let (block, frame) = (self.block as usize, self.frame() as usize);
        // Position in the frame. A buffer may consist of several pieces, which can start anywhere.
        let mut at = 0;
        for piece in data {
            let mut done = 0;
            while done < piece.len() {
                let end = if at < block { block } else { frame };
                let len = (end - at).min(piece.len() - done);
                if at >= block {
                    invert(piece, done..done + len);
                }
                done += len;
                at = (at + len) % frame;
            }
        }
    }
}

/// Inverts all bits of a tuple, or of a part of it.
fn invert(piece: &MemSlice, part: Range<usize>) {
    let mut bytes = [0; Tuple::LEN];
    let bytes = &mut bytes[..part.len()];
    piece.read(part.start, bytes);
    bytes.iter_mut().for_each(|byte| *byte = !*byte);
    piece.write(part.start, bytes);
}

/// Converts a tuple between the format of the unit and the format of the medium.
#[must_use]
pub(in crate::backend) fn inverted(bytes: [u8; Tuple::LEN]) -> [u8; Tuple::LEN] {
    bytes.map(|byte| !byte)
}

#[cfg(test)]
mod tests {
    use riser_memory::Memory;

    use super::*;

    /// Layouts with the offset of their first block on the medium.
    const LAYOUTS: [(u32, u64); 2] = [(512, 66_040), (4096, 65_664)];

    #[test]
    fn offsets_are_multiples_of_frame() {
        for (block_size, first) in LAYOUTS {
            let (layout, block) = (Layout::new(block_size), u64::from(block_size));
            assert_eq!(layout.medium_offset(0), first);
            assert!(first.is_multiple_of(block + 8));
            assert_eq!(layout.medium_offset(3 * block), first + 3 * (block + 8));
            assert_eq!(layout.file_len(7 * block), first + 7 * (block + 8));
            assert_eq!(layout.lba(first + 3 * (block + 8)), 3);
        }
    }

    #[test]
    fn capacity_ignores_incomplete_frame() {
        for (block_size, first) in LAYOUTS {
            let (layout, block) = (Layout::new(block_size), u64::from(block_size));
            for (len, blocks) in [
                (0, 0),
                (first, 0),
                (first + block + 7, 0),
                (first + block + 8, 1),
                (first + 9 * (block + 8) + 1, 9),
            ] {
                assert_eq!(layout.capacity(len), blocks * block, "{len}");
            }
            let capacity = 1_000_000 * block;
            assert_eq!(layout.capacity(layout.file_len(capacity)), capacity);
        }
    }

    #[test]
    fn offset_of_tuple_is_in_its_block() {
        let layout = Layout::new(512);
        for (on_medium, on_unit) in [
            (66_040, 0),
            (66_551, 511),
            (66_552, 511),
            (66_559, 511),
            (66_560, 512),
            (66_570, 522),
        ] {
            assert_eq!(layout.unit_offset(on_medium), on_unit, "{on_medium}");
        }
        let error = |offset| BackendError::Medium {
            offset: Some(offset),
        };
        assert_eq!(layout.error_on_medium(error(522)), error(66_570));
        let result = layout.result_on_unit(Err(error(66_570)));
        assert_eq!(result, Err(error(522)));
        let full = Err(BackendError::NoSpace);
        assert_eq!(layout.result_on_unit(full), full);
    }

    #[test]
    fn commands_are_mapped_both_ways() {
        let layout = Layout::new(4096);
        let op = Command {
            fua: true,
            buffer_offset: 77,
            ..Command::new(CommandKind::Write, 3 * 4096, 2 * 4096)
        };
        let mapped = layout.on_medium(op);
        assert_eq!((mapped.offset, mapped.len), (77_976, 8208));
        assert_eq!((mapped.buffer_offset, mapped.fua), (0, true));
        let op = Command {
            buffer_offset: 0,
            ..op
        };
        assert_eq!(layout.on_unit(&mapped), op);
    }

    #[test]
    fn extents_are_whole_blocks() {
        let layout = Layout::new(512);
        let extent = |allocation, len| {
            let result = layout.result_on_unit(Ok(Some((allocation, len))));
            result.unwrap().unwrap()
        };
        use Allocation::{Deallocated, Mapped};
        assert_eq!(extent(Mapped, 521), (Mapped, 1024));
        assert_eq!(extent(Mapped, 1040), (Mapped, 1024));
        assert_eq!(extent(Deallocated, 1041), (Deallocated, 1024));
        assert_eq!(extent(Deallocated, 519), (Mapped, 512));
        assert_eq!(layout.result_on_unit(Ok(None)), Ok(None));
    }

    #[test]
    fn blocks_alternate_with_tuples() {
        let op = BlockOp::Read {
            offset: 0,
            len: 1024,
            buffer_offset: 100,
            tags: Some(2000),
            fua: false,
        };
        let parts: Vec<_> = Layout::new(512).parts(&op).collect();
        assert_eq!(parts, [100..612, 2000..2008, 612..1124, 2008..2016]);
        let flush = BlockOp::Flush { offset: 0, len: 0 };
        assert_eq!(Layout::new(512).parts(&flush).count(), 0);
    }

    #[test]
    fn tuples_are_inverted_across_pieces() {
        let memory = Memory::new(4096).unwrap();
        for cut in [1, 512, 515, 520, 700, 1035] {
            memory.fill(0, 4096, 0x0f);
            let data = [0..cut, cut..1040].map(|range| memory.slice(range).unwrap());
            let op = |kind| Command::new(kind, 0, 1040);
            Layout::new(512).invert_tuples(&op(CommandKind::Write), &data);
            let bytes = memory.whole().to_vec();
            for (at, byte) in bytes[..1040].iter().enumerate() {
                let is_tuple = at % 520 >= 512;
                assert_eq!(*byte, if is_tuple { 0xf0 } else { 0x0f }, "{cut} {at}");
            }
            assert!(bytes[1040..].iter().all(|byte| *byte == 0x0f));
            Layout::new(512).invert_tuples(&op(CommandKind::Flush), &data);
            assert_eq!(memory.whole().to_vec(), bytes);
        }
    }
}
