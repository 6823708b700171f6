//! UNMAP, WRITE SAME and GET LBA STATUS (SBC-3 5.28, 5.48, 5.49, 5.6).

use crate::access::{copy_in, copy_out, is_zero};
use crate::cdb::{Cdb, Extent};
use crate::lu::LogicalUnit;
use crate::plan::{Context, Machine, Next, Plan, PlanResult, Planner, Transfer};
use crate::sense::{AdditionalSense, Sense};
use crate::step::{Allocation, BlockOp, DataIn, StepResult};

/// Header and descriptor length of UNMAP parameter data.
const UNMAP_HEADER: u32 = 8;
const UNMAP_DESCRIPTOR: u32 = 16;

/// An UNMAP: its list arrives, is checked whole, then worked through.
#[derive(Debug)]
pub(crate) struct Unmap {
    list_len: u32,
    /// Descriptors in the list, once it has been checked.
    count: Option<u32>,
    next: u32,
    /// Whether something was unmapped that is not stable yet.
    unstable: bool,
}

/// UNMAP.
pub(crate) fn plan_unmap(planner: &Planner<'_>, cdb: &Cdb) -> PlanResult {
    let len = u32::from(cdb.be16(7));
    if len == 0 {
        return Ok(Plan::good());
    }
    if len < UNMAP_HEADER {
        return Err(Sense::illegal(AdditionalSense::PARAMETER_LIST_LENGTH_ERROR).into());
    }
    if planner.request.expected.data_out < len {
        return Err(Planner::short_data_out(len));
    }
    Ok(Plan {
        transfer: Transfer {
            data_in: 0,
            data_out: len,
        },
        buffer_len: len,
        first: Next::receive(len),
        machine: Machine::Unmap(Unmap {
            list_len: len,
            count: None,
            next: 0,
            unstable: false,
        }),
    })
}

impl Unmap {
    pub(crate) fn advance(&mut self, context: &mut Context<'_>) -> Result<Next, Sense> {
        let count = match self.count {
            Some(count) => count,
            None => *self.count.insert(self.check(context)?),
        };
        while self.next < count {
            let (lba, blocks) = descriptor(context, self.next);
            self.next += 1;
            if blocks > 0 {
                self.unstable = true;
                let block = u64::from(context.lu.config().block_size.bytes());
                return Ok(Next::Block(BlockOp::Discard {
                    offset: lba * block,
                    len: u64::from(blocks) * block,
                }));
            }
        }
        if std::mem::take(&mut self.unstable) && needs_flush(context.lu) {
            let len = context.lu.capacity_bytes();
            return Ok(Next::Block(BlockOp::Flush { offset: 0, len }));
        }
        Ok(Next::Answer(DataIn::None))
    }

    /// Checks the whole list before anything is unmapped; the descriptor count.
    fn check(&self, context: &Context<'_>) -> Result<u32, Sense> {
        let mut header = [0; 4];
        copy_out(context.data, 0, &mut header);
        // The list may be shorter than its length fields say: what arrived
        // counts. A part of a descriptor is ignored (SBC-3 5.28.2).
        let declared = u32::from(u16::from_be_bytes([header[2], header[3]]));
        let count = declared.min(self.list_len - UNMAP_HEADER) / UNMAP_DESCRIPTOR;
        let limits = &context.lu.config().limits;
        if count > limits.max_unmap_descriptors {
            return Err(Sense::parameter_field(2, None));
        }
        let mut total = 0_u64;
        for index in 0..count {
            let (lba, blocks) = descriptor(context, index);
            let end = lba.checked_add(u64::from(blocks));
            if end.is_none_or(|end| end > context.lu.capacity_blocks()) {
                return Err(Sense::illegal(AdditionalSense::LBA_OUT_OF_RANGE));
            }
            total += u64::from(blocks);
        }
        if total > u64::from(limits.max_unmap_blocks) {
            return Err(Sense::parameter_field(UNMAP_HEADER as u16 + 8, None));
        }
        Ok(count)
    }
}

/// Whether the backend has a volatile cache that the initiator has turned off,
/// so that whatever has no FUA of its own must be followed by a flush.
fn needs_flush(lu: &LogicalUnit) -> bool {
    lu.config().write_cache && !lu.is_write_cache_enabled()
}

/// One UNMAP block descriptor: first block and number.
fn descriptor(context: &Context<'_>, index: u32) -> (u64, u32) {
    let mut bytes = [0; 12];
    copy_out(
        context.data,
        UNMAP_HEADER + index * UNMAP_DESCRIPTOR,
        &mut bytes,
    );
    let mut lba = [0; 8];
    lba.copy_from_slice(&bytes[..8]);
    (
        u64::from_be_bytes(lba),
        u32::from_be_bytes([bytes[8], bytes[9], bytes[10], bytes[11]]),
    )
}

const UNMAP_BIT: u8 = 3;

/// A WRITE SAME.
#[derive(Debug)]
pub(crate) struct WriteSame {
    offset: u64,
    len: u64,
    done: u64,
    unmap: bool,
    /// Bytes of pattern copies to write at a time.
    segment: u32,
    /// Whether the write cache was on when a piece was sent.
    cached: bool,
    stage: WriteSameStage,
}

/// ```text
/// Receiving -> Writing (segment after segment) -> (answer)
///       |                        \-> Flushing --> (answer)
///       \----> Zeroing -------------------------> (answer)
///                  \---------------> Flushing --> (answer)
/// ```
#[derive(Debug)]
enum WriteSameStage {
    /// The block is on its way.
    Receiving,
    /// Copies of it are being written.
    Writing,
    /// It was all zeroes, or there was none: the backend makes zeroes.
    Zeroing,
    /// The write cache was turned off meanwhile.
    Flushing,
}

/// WRITE SAME (10) and (16).
pub(crate) fn plan_write_same(planner: &Planner<'_>, cdb: &Cdb) -> PlanResult {
    let extent = cdb.extent();
    let (offset, len) = planner.byte_range(extent)?;
    // WSNZ: zero does not mean the rest of the medium here.
    if extent.blocks == 0
        || extent.blocks > u64::from(planner.lu.config().limits.max_write_same_blocks)
    {
        return Err(Sense::cdb_field(extent.length_byte, None).into());
    }
    let unmap = cdb.bit(1, UNMAP_BIT);
    if unmap && !planner.lu.config().is_thin() {
        return Err(Sense::cdb_field(1, Some(UNMAP_BIT)).into());
    }
    let no_data = cdb.byte(0) == 0x93 && cdb.bit(1, 0);
    let block = planner.block();
    let mut same = WriteSame {
        offset,
        len,
        done: 0,
        unmap,
        segment: planner.segment(len),
        cached: false,
        stage: WriteSameStage::Receiving,
    };
    if no_data {
        let first = same.zero(planner.lu);
        return Ok(Plan {
            first,
            machine: Machine::WriteSame(same),
            ..Plan::good()
        });
    }
    if planner.request.expected.data_out != block {
        return Err(Planner::short_data_out(block));
    }
    Ok(Plan {
        transfer: Transfer {
            data_in: 0,
            data_out: block,
        },
        buffer_len: same.segment,
        first: Next::receive(block),
        machine: Machine::WriteSame(same),
    })
}

impl WriteSame {
    fn zero(&mut self, lu: &LogicalUnit) -> Next {
        self.stage = WriteSameStage::Zeroing;
        self.cached = lu.is_write_cache_enabled();
        Next::Block(BlockOp::WriteZeroes {
            offset: self.offset,
            len: self.len,
            unmap: self.unmap,
            fua: !self.cached,
        })
    }

    /// The answer, after a flush if the write cache has been turned off since
    /// something went into it.
    fn end(&mut self, lu: &LogicalUnit) -> Next {
        if self.cached && !lu.is_write_cache_enabled() {
            self.stage = WriteSameStage::Flushing;
            return Next::Block(BlockOp::Flush {
                offset: self.offset,
                len: self.len,
            });
        }
        Next::Answer(DataIn::None)
    }

    pub(crate) fn advance(&mut self, context: &mut Context<'_>) -> Result<Next, Sense> {
        match self.stage {
            WriteSameStage::Receiving => {
                let block = context.lu.config().block_size.bytes();
                if is_zero(context.data, 0, block) {
                    return Ok(self.zero(context.lu));
                }
                self.fill(context, block);
                self.stage = WriteSameStage::Writing;
            }
            WriteSameStage::Writing => self.done += u64::from(self.piece()),
            WriteSameStage::Zeroing => return Ok(self.end(context.lu)),
            WriteSameStage::Flushing => return Ok(Next::Answer(DataIn::None)),
        }
        if self.done == self.len {
            return Ok(self.end(context.lu));
        }
        let cache = context.lu.is_write_cache_enabled();
        self.cached |= cache;
        Ok(Next::Block(BlockOp::Write {
            offset: self.offset + self.done,
            len: self.piece(),
            buffer_offset: 0,
            fua: !cache,
        }))
    }

    fn piece(&self) -> u32 {
        (self.len - self.done).min(u64::from(self.segment)) as u32
    }

    /// Fills the buffer with copies of its first block.
    fn fill(&self, context: &mut Context<'_>, block: u32) {
        let mut pattern = [0; 4096];
        let pattern = &mut pattern[..block as usize];
        copy_out(context.data, 0, pattern);
        for at in (block..self.segment).step_by(block as usize) {
            copy_in(context.data, at, pattern);
        }
    }
}

/// Most descriptors one GET LBA STATUS answers with.
const STATUS_DESCRIPTORS: u32 = 256;

/// A GET LBA STATUS that gathers descriptors.
#[derive(Debug)]
pub(crate) struct LbaStatus {
    data: Vec<u8>,
    allocation_length: u32,
    /// Byte on the medium to ask about next.
    offset: u64,
    /// Descriptors there is still room for.
    room: u32,
}

/// GET LBA STATUS.
pub(crate) fn plan_get_lba_status(planner: &Planner<'_>, cdb: &Cdb) -> PlanResult {
    // The starting LBA itself must exist.
    let start = Extent {
        lba: cdb.be64(2),
        blocks: 1,
        length_byte: 2,
    };
    let (offset, _) = planner.byte_range(start)?;
    let allocation_length = cdb.be32(10);
    let room = allocation_length
        .saturating_sub(8)
        .div_ceil(16)
        .clamp(1, STATUS_DESCRIPTORS);
    let status = LbaStatus {
        data: vec![0; 8],
        allocation_length,
        offset,
        room,
    };
    Ok(Plan {
        first: status.ask(planner.lu),
        machine: Machine::LbaStatus(status),
        ..Plan::good()
    })
}

impl LbaStatus {
    fn ask(&self, lu: &LogicalUnit) -> Next {
        Next::Block(BlockOp::Status {
            offset: self.offset,
            len: lu.capacity_bytes().saturating_sub(self.offset),
        })
    }

    pub(crate) fn advance(
        &mut self,
        context: &mut Context<'_>,
        result: StepResult,
    ) -> Result<Next, Sense> {
        let block = u64::from(context.lu.config().block_size.bytes());
        let rest = context.lu.capacity_bytes().saturating_sub(self.offset);
        let (allocation, len) = match result {
            StepResult::Status { allocation, len } => (allocation, len),
            // A backend that cannot tell has allocated everything.
            _ => (Allocation::Mapped, rest),
        };
        let len = len.min(rest);
        // A backend may see smaller units than blocks: a block that is mapped
        // in part is mapped.
        let len = match allocation {
            Allocation::Mapped => len.next_multiple_of(block),
            Allocation::Deallocated => len - len % block,
        };
        let (allocation, len) = if len == 0 {
            (Allocation::Mapped, block)
        } else {
            (allocation, len)
        };
        let blocks = (len.min(rest) / block).min(u64::from(u32::MAX)) as u32;
        self.data.extend((self.offset / block).to_be_bytes());
        self.data.extend(blocks.to_be_bytes());
        self.data
            .extend([(allocation == Allocation::Deallocated).into(), 0, 0, 0]);
        self.offset += u64::from(blocks) * block;
        self.room -= 1;
        if self.room > 0 && self.offset < context.lu.capacity_bytes() && blocks > 0 {
            return Ok(self.ask(context.lu));
        }
        // PARAMETER DATA LENGTH counts what follows it.
        let counted = self.data.len() as u32 - 4;
        self.data[..4].copy_from_slice(&counted.to_be_bytes());
        self.data.truncate(self.allocation_length as usize);
        Ok(Next::Answer(DataIn::Inline(std::mem::take(&mut self.data))))
    }
}
