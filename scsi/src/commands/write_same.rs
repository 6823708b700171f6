//! WRITE SAME (10) and (16) (SBC-3 5.48, 5.49).

use super::plan::{Context, Next, Plan, PlanResult, Planner, Steps, Transfer};
use crate::access::is_zero;
use crate::cdb::Cdb;
use crate::data::cdb::write_same_16::{NDOB, UNMAP};
use crate::lu::LogicalUnit;
use crate::sense::Sense;
use crate::step::{BlockOp, DataIn, StepResult};

/// State of a WRITE SAME.
#[derive(Debug)]
pub(crate) struct WriteSame {
    offset: u64,
    len: u64,
    done: u64,
    unmap: bool,
    /// Bytes of pattern copies to write at a time.
    segment: u32,
    /// The write cache was on when a piece was sent.
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
pub(crate) fn plan_write_same<M: From<WriteSame>>(
    planner: &Planner<'_>,
    cdb: &Cdb,
) -> PlanResult<M> {
    // The limit is one of blocks and not of MAXIMUM TRANSFER LENGTH: only one block moves.
    let extent = cdb.extent();
    let (offset, len) = planner.byte_range(extent)?;
    // WSNZ: zero does not mean the rest of the medium here.
    if extent.blocks == 0
        || extent.blocks > u64::from(planner.lu.config().limits.max_write_same_blocks)
    {
        return Err(Sense::cdb_field(extent.length_byte, None).into());
    }
    let unmap = cdb.get(UNMAP);
    if unmap && !planner.lu.config().is_thin() {
        return Err(Sense::cdb_field(1, Some(UNMAP.highest_bit())).into());
    }
    // Reserved in the 10-byte form, and so never set there.
    let no_data = cdb.get(NDOB);
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
            machine: Some(same.into()),
            ..Plan::good()
        });
    }
    // One block is the pattern; with more or less, initiator and unit disagree about its length.
    if planner.expected.data_out != block {
        return Err(Planner::short_data_out(block));
    }
    Ok(Plan {
        transfer: Transfer::data_out(block),
        buffer_len: same.segment,
        first: Next::receive(block),
        machine: Some(same.into()),
    })
}

impl WriteSame {
    fn zero(&mut self, lu: &LogicalUnit) -> Next {
        self.stage = WriteSameStage::Zeroing;
        // Looked at when the operation is sent: MODE SELECT may turn the cache off while it is
        // under way.
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

    fn piece(&self) -> u32 {
        (self.len - self.done).min(u64::from(self.segment)) as u32
    }

    /// Fills the buffer with copies of its first block.
    fn fill(&self, context: &mut Context<'_>, block: u32) {
        // As long as the longest logical block, on the stack, so that nothing is allocated.
        let mut pattern = [0; 4096];
        let pattern = &mut pattern[..block as usize];
        context.data.read(0, pattern);
        for at in (block..self.segment).step_by(block as usize) {
            context.data.write(at, pattern);
        }
    }
}

impl Steps for WriteSame {
    fn advance(&mut self, context: &mut Context<'_>, _result: StepResult) -> Result<Next, Sense> {
        match self.stage {
            WriteSameStage::Receiving => {
                let block = context.lu.config().block_size.bytes();
                // Zeroes are left to the backend, which may make them without writing. Any other
                // pattern is written although UNMAP is set: that bit is a permission, and unmapped
                // blocks would read as zeroes.
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
        // Each segment goes by the state of its moment. If one of them went into the cache, the
        // end flushes for all.
        let cache = context.lu.is_write_cache_enabled();
        self.cached |= cache;
        Ok(Next::Block(BlockOp::Write {
            offset: self.offset + self.done,
            len: self.piece(),
            buffer_offset: 0,
            fua: !cache,
        }))
    }
}
