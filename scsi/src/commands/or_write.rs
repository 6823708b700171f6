//! ORWRITE (16) (SBC-3 5.15), which is atomic in the same way as [COMPARE AND
//! WRITE](super::compare_and_write).

use super::plan::{Context, Next, Pieces, Plan, PlanResult, Planner, Steps, Transfer};
use super::read_write::Write;
use crate::access::or_into;
use crate::cdb::Cdb;
use crate::data::cdb::block_16::FUA;
use crate::sense::Sense;
use crate::step::{BlockOp, StepResult};

/// An ORWRITE. The buffer contains a piece of the data, then scratch space for reading from the
/// medium. We receive, read and write the data in pieces, and the task set reserves the blocks for
/// this command until the last piece has been written.
#[derive(Debug)]
pub(crate) struct OrWrite {
    offset: u64,
    data: Pieces,
    /// Offset of the scratch space in the buffer, in bytes.
    scratch_offset: u32,
    scratch_len: u32,
    /// Number of bytes in this piece that have been updated with the bits from the medium.
    done: u32,
    fua: bool,
    stage: OrStage,
}

/// ```text
/// Receiving -> Reading (segment by segment) -> Writing -> (response)
///     ^-------------- next piece ------------------/
/// ```
#[derive(Debug)]
enum OrStage {
    /// Waiting for Data-Out.
    Receiving,
    /// Reading a segment from the medium.
    Reading,
    /// Writing the result.
    Writing(Write),
}

/// Plans an ORWRITE (16).
pub(crate) fn plan_or_write<M: From<OrWrite>>(planner: &Planner<'_>, cdb: &Cdb) -> PlanResult<M> {
    let (offset, wanted) = planner.transfer_range(cdb.extent())?;
    let len = planner.data_out(wanted)?;
    let transfer = Transfer::data_out(wanted);
    if len == 0 {
        return Ok(Plan::nothing(transfer));
    }
    let data = planner.pieces(len);
    let scratch = planner.segment(data.len().into());
    Ok(Plan {
        transfer,
        buffer_len: data.len() + scratch,
        first: data.receive(),
        machine: Some(
            OrWrite {
                offset,
                data,
                scratch_offset: data.len(),
                scratch_len: scratch,
                done: 0,
                fua: cdb.get(FUA) || !planner.lu.is_write_cache_enabled(),
                stage: OrStage::Receiving,
            }
            .into(),
        ),
    })
}

impl OrWrite {
    /// Returns the offset on the medium at which the current piece starts, in bytes.
    fn start(&self) -> u64 {
        self.offset + u64::from(self.data.from())
    }

    fn segment(&self) -> u32 {
        (self.data.len() - self.done).min(self.scratch_len)
    }
}

impl Steps for OrWrite {
    fn advance(&mut self, context: &mut Context<'_>, result: StepResult) -> Result<Next, Sense> {
        match &mut self.stage {
            OrStage::Receiving => self.stage = OrStage::Reading,
            OrStage::Reading => {
                let segment = self.segment();
                or_into(context.data, self.done, self.scratch_offset, segment);
                self.done += segment;
            }
            OrStage::Writing(write) => {
                // When the write returns a response, the command is only complete if this was the
                // last piece.
                let next = write.advance(context, result)?;
                if !matches!(next, Next::Answer(_)) || !self.data.advance() {
                    return Ok(next);
                }
                self.done = 0;
                self.stage = OrStage::Receiving;
                return Ok(self.data.receive());
            }
        }
        // Write the result to the blocks that we have read. They can't have been changed since,
        // because this command is atomic and the task set will not run any conflicting command.
        if self.done == self.data.len() {
            let mut write = Write::from_buffer(self.start(), self.data.len(), 0, self.fua);
            let next = write.advance(context, result);
            self.stage = OrStage::Writing(write);
            return next;
        }
        Ok(Next::Block(BlockOp::Read {
            offset: self.start() + u64::from(self.done),
            len: self.segment(),
            buffer_offset: self.scratch_offset,
            // We use the data that a READ would return, whether or not it's from the cache.
            fua: false,
        }))
    }
}
