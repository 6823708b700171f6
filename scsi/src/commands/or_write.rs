//! ORWRITE (16) (SBC-3 5.15), atomic as [COMPARE AND WRITE](super::compare_and_write) is.

use super::plan::{Context, Next, Pieces, Plan, PlanResult, Planner, Steps, Transfer};
use super::read_write::Write;
use crate::access::or_into;
use crate::cdb::Cdb;
use crate::data::cdb::block_16::FUA;
use crate::sense::Sense;
use crate::step::{BlockOp, StepResult};

/// An ORWRITE. The buffer holds a piece of the data, and scratch for the medium
/// behind it. One piece after the other is brought, read, and written; the task
/// set keeps the blocks of all of them for the command.
#[derive(Debug)]
pub(crate) struct OrWrite {
    offset: u64,
    data: Pieces,
    /// Offset of the scratch space in the buffer.
    scratch_offset: u32,
    scratch_len: u32,
    /// Bytes of the piece that have the medium's bits in them.
    done: u32,
    fua: bool,
    stage: OrStage,
}

/// ```text
/// Receiving -> Reading (segment after segment) -> Writing -> (answer)
///     ^-------------- the next piece ----------------/
/// ```
#[derive(Debug)]
enum OrStage {
    /// Data-Out is on its way.
    Receiving,
    /// A segment of the medium is being read.
    Reading,
    /// The result is being written.
    Writing(Write),
}

/// Plans ORWRITE, a CDB of 16 bytes.
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
    /// Byte on the medium at which the present piece begins.
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
                // The answer of one piece's write is the end of the command for the last piece
                // only.
                let next = write.advance(context, result)?;
                if !matches!(next, Next::Answer(_)) || !self.data.advance() {
                    return Ok(next);
                }
                self.done = 0;
                self.stage = OrStage::Receiving;
                return Ok(self.data.receive());
            }
        }
        // The result is written over the blocks that it was made of. None of them can have changed
        // since: the command is atomic, and the task set keeps others away.
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
            // What a READ gives is what counts, in the cache or not.
            fua: false,
        }))
    }
}
