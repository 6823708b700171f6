//! WRITE SAME (10), (16) and (32) (SBC-3 5.48, 5.49, SBC-4 5.53).

use super::integrity::{BLOCK_MAX, Integrity, Span, read_tuple};
use super::plan::{Context, Next, Plan, PlanResult, Planner, Room, Steps, Transfer};
use crate::access::is_zero;
use crate::cdb::Cdb;
use crate::data::cdb::write_same_16::{NDOB, UNMAP};
use crate::lu::LogicalUnit;
use crate::protection::Tuple;
use crate::sense::Sense;
use crate::step::{BlockOp, DataIn, StepResult};

/// State of a WRITE SAME.
#[derive(Debug)]
pub(crate) struct WriteSame {
    offset: u64,
    len: u64,
    done: u64,
    unmap: bool,
    /// Region of the buffer that is written at once, filled with the pattern.
    segment: Room,
    integrity: Option<Box<Integrity>>,
    /// Protection information of the first block, once it has been received or generated.
    tuple: Option<Tuple>,
    /// Set if the write cache was enabled when a write was started.
    cached: bool,
    stage: WriteSameStage,
}

/// ```text
/// Receiving -> Writing (segment by segment) -> (response)
///       |                      \-> Flushing -> (response)
///       \----> Zeroing ----------------------> (response)
///                  \-------------> Flushing -> (response)
/// ```
#[derive(Debug)]
enum WriteSameStage {
    /// Waiting for the block.
    Receiving,
    /// Writing copies of the block.
    Writing,
    /// The block was all zeros or missing, so we use the backend to write zeros.
    Zeroing,
    /// Flushing, because the write cache was disabled in the meantime.
    Flushing,
}

/// WRITE SAME (10), (16) and (32).
pub(crate) fn plan_write_same<M: From<WriteSame>>(
    planner: &Planner<'_>,
    cdb: &Cdb,
) -> PlanResult<M> {
    // We check this against the limit in blocks instead of MAXIMUM TRANSFER LENGTH, because only a
    // single block is transferred.
    let extent = cdb.extent();
    let (offset, len) = planner.byte_range(extent)?;
    // WSNZ is set, so a value of zero must not be handled as "up to the end of the medium".
    if extent.blocks == 0
        || extent.blocks > u64::from(planner.lu.config().limits.max_write_same_blocks)
    {
        return Err(Sense::cdb_field(extent.length_byte, None).into());
    }
    let unmap = cdb.flag(UNMAP);
    if unmap && !planner.lu.config().is_thin() {
        return Err(Sense::cdb_field(cdb.flags_byte() as u16, Some(UNMAP.highest_bit())).into());
    }
    // This bit is reserved in the 10-byte CDB, so it's never set there.
    let no_data = cdb.flag(NDOB);
    let integrity = planner.integrity(cdb);
    let block = planner.frame(integrity.as_deref()).size();
    let mut same = WriteSame {
        offset,
        len,
        done: 0,
        unmap,
        segment: planner.segment(0, len),
        integrity,
        tuple: None,
        cached: false,
        stage: WriteSameStage::Receiving,
    };
    if no_data {
        let first = same.zero(planner.lu);
        return Ok(Plan {
            first,
            machine: Some(same.into()),
            ..Plan::good()
        });
    }
    // The pattern must be a single block. For any other size, the initiator and the target don't
    // have the same block size.
    if planner.expected.data_out != block {
        return Err(Planner::short_data_out(block));
    }
    Ok(Plan {
        transfer: Transfer::data_out(block),
        buffer_len: same.segment.end(planner.block()),
        first: Next::receive(block),
        machine: Some(same.into()),
    })
}

impl WriteSame {
    fn zero(&mut self, lu: &LogicalUnit) -> Next {
        self.stage = WriteSameStage::Zeroing;
        // Check this when we send the operation, because the cache may be disabled via MODE SELECT
        // before it completes.
        self.cached = lu.is_write_cache_enabled();
        Next::Block(BlockOp::WriteZeroes {
            offset: self.offset,
            len: self.len,
            unmap: self.unmap,
            fua: !self.cached,
        })
    }

    /// Completes the command. This does a flush first if the write cache was disabled after it has
    /// been used for this command.
    fn complete_command(&mut self, lu: &LogicalUnit) -> Next {
        if self.cached && !lu.is_write_cache_enabled() {
            self.stage = WriteSameStage::Flushing;
            return Next::Block(BlockOp::Flush {
                offset: self.offset,
                len: self.len,
            });
        }
        Next::Respond(DataIn::None)
    }

    fn piece(&self) -> u32 {
        (self.len - self.done).min(self.segment.len.into()) as u32
    }

    /// Validates or generates the protection information of the received block.
    fn accept_block(&mut self, context: &mut Context<'_>, block: u32) -> Result<(), Sense> {
        if let Some((integrity, tags)) = self.integrity.as_deref().zip(self.segment.tags) {
            let span = Span {
                start: 0,
                len: block,
                data: 0,
                tags,
            };
            integrity.receive(context.data, span, 0)?;
            self.tuple = Some(read_tuple(context.data, tags));
        }
        Ok(())
    }

    /// Returns whether the backend can be used to write zeros, which also resets any protection
    /// information.
    fn allows_zeroing(&self) -> bool {
        match (&self.integrity, self.tuple) {
            (Some(integrity), Some(tuple)) => {
                // If the blocks are unmapped, only protection information from the initiator is
                // lost. Otherwise it must be written.
                self.unmap && (!integrity.is_transferred() || tuple == Tuple::DEALLOCATED)
            }
            _ => true,
        }
    }

    /// Fills the buffer with copies of the first block.
    fn fill(&self, context: &mut Context<'_>, block: u32) {
        // We use the stack here to avoid an allocation.
        let mut pattern = [0; BLOCK_MAX];
        let pattern = &mut pattern[..block as usize];
        context.data.read(0, pattern);
        for at in (block..self.segment.len).step_by(block as usize) {
            context.data.write(at, pattern);
        }
    }

    /// Sets the protection information of the next piece.
    fn fill_tags(&self, context: &mut Context<'_>) {
        let Some(integrity) = &self.integrity else {
            return;
        };
        if let Some((tuple, tags)) = self.tuple.zip(self.segment.tags) {
            let span = Span {
                start: self.done,
                len: self.piece(),
                data: 0,
                tags,
            };
            integrity.repeat(context.data, span, tuple);
        }
    }
}

impl Steps for WriteSame {
    fn advance(&mut self, context: &mut Context<'_>, _result: StepResult) -> Result<Next, Sense> {
        match self.stage {
            WriteSameStage::Receiving => {
                let block = context.lu.config().block_size.bytes();
                self.accept_block(context, block)?;
                // Let the backend handle zeros, because it may not need to write them. Any other
                // pattern is written, even if UNMAP is set: this bit only allows us to unmap, and
                // blocks would be read as zeros after that.
                if self.allows_zeroing() && is_zero(context.data, 0, block) {
                    return Ok(self.zero(context.lu));
                }
                self.fill(context, block);
                self.stage = WriteSameStage::Writing;
            }
            WriteSameStage::Writing => self.done += u64::from(self.piece()),
            WriteSameStage::Zeroing => return Ok(self.complete_command(context.lu)),
            WriteSameStage::Flushing => return Ok(Next::Respond(DataIn::None)),
        }
        if self.done == self.len {
            return Ok(self.complete_command(context.lu));
        }
        self.fill_tags(context);
        // Use the current state for each segment. If any of these was written to the cache, we do a
        // single flush at the end.
        let cache = context.lu.is_write_cache_enabled();
        self.cached |= cache;
        Ok(Next::Block(BlockOp::Write {
            offset: self.offset + self.done,
            len: self.piece(),
            buffer_offset: 0,
            tags: self.segment.tags,
            fua: !cache,
        }))
    }
}
