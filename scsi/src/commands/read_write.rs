//! READ and WRITE (SBC-3 5.7 to 5.12, 5.40 to 5.43) and the write half of
//! WRITE AND VERIFY (5.45 to 5.47).
//!
//! What is longer than the window goes through the buffer in pieces.

use super::plan::{Context, Next, Pieces, Plan, PlanResult, Planner, Steps, Transfer};
use super::verify::{Compare, Verify};
use crate::cdb::Cdb;
use crate::data::cdb::block_16::FUA;
use crate::sense::Sense;
use crate::step::{BlockOp, DataIn, StepResult};

/// A READ whose block operation is on its way, or a piece of whose data is.
#[derive(Debug)]
pub(crate) struct Read {
    offset: u64,
    data: Pieces,
    fua: bool,
    /// Whether the present piece is on its way to the initiator.
    is_sending: bool,
}

/// READ (6), (10), (12) and (16).
pub(crate) fn plan_read<M: From<Read>>(planner: &Planner<'_>, cdb: &Cdb) -> PlanResult<M> {
    let (offset, wanted) = planner.transfer_range(cdb.extent())?;
    // In READ (6) this bit belongs to the LBA.
    let fua = cdb.byte(0) != 0x08 && cdb.get(FUA);
    let block = planner.block();
    // Blocks that the initiator has no room for are not read at all.
    let len = wanted.min(
        planner
            .expected
            .data_in
            .div_ceil(block)
            .saturating_mul(block),
    );
    let transfer = Transfer::data_in(wanted);
    // A transfer of no blocks is no error, even right behind the last block.
    if len == 0 {
        return Ok(Plan::nothing(transfer));
    }
    let read = Read {
        offset,
        data: planner.pieces(len),
        fua,
        is_sending: false,
    };
    Ok(Plan {
        transfer,
        buffer_len: read.data.len(),
        first: read.read(),
        machine: Some(read.into()),
    })
}

impl Read {
    fn read(&self) -> Next {
        Next::Block(BlockOp::Read {
            offset: self.offset + u64::from(self.data.from()),
            len: self.data.len(),
            buffer_offset: 0,
            fua: self.fua,
        })
    }
}

impl Steps for Read {
    fn advance(&mut self, _context: &mut Context<'_>, _result: StepResult) -> Result<Next, Sense> {
        // The buffer holds one piece, so the next one is read only when this one has been sent.
        if self.is_sending {
            self.is_sending = false;
            self.data.advance();
            return Ok(self.read());
        }
        let (from, len) = (self.data.from(), self.data.len());
        // The last piece goes with the response, which saves a step, and for most reads is the
        // only one.
        if self.data.end() == self.data.total() {
            return Ok(Next::Answer(DataIn::Buffer { from, len }));
        }
        self.is_sending = true;
        Ok(Next::Send { from, len })
    }
}

/// A WRITE that waits for its data, then for the medium.
#[derive(Debug)]
pub(crate) struct Write {
    offset: u64,
    data: Pieces,
    /// Offset of the data in the command's buffer.
    buffer_offset: u32,
    fua: bool,
    /// The verification of what was written, piece by piece.
    verify: Option<Verify>,
    stage: WriteStage,
}

/// ```text
/// Receiving -> Writing -> (answer)
///    ^           |-----> Verifying -> (answer)
///    |           |-----> Flushing --> (answer)
///    \-----------/ the next piece, verified where that is asked for
/// ```
#[derive(Clone, Copy, Debug)]
enum WriteStage {
    /// Data-Out is on its way.
    Receiving,
    /// The block operation is on its way.
    Writing,
    /// The data that were written are being verified.
    Verifying,
    /// The cache was turned off while the write was on its way.
    Flushing,
}

/// WRITE (6), (10), (12) and (16).
pub(crate) fn plan_write<M: From<Write>>(planner: &Planner<'_>, cdb: &Cdb) -> PlanResult<M> {
    // As in READ (6): the bit belongs to the LBA.
    let fua = cdb.byte(0) != 0x0a && cdb.get(FUA);
    plan(planner, cdb, fua, None)
}

/// WRITE AND VERIFY (10), (12) and (16).
pub(crate) fn plan_write_and_verify<M: From<Write>>(
    planner: &Planner<'_>,
    cdb: &Cdb,
) -> PlanResult<M> {
    let compare = match (cdb.byte(1) >> 1) & 0x3 {
        0 => Compare::Readable,
        1 => Compare::Buffer,
        _ => return Err(Sense::cdb_field(1, Some(2)).into()),
    };
    // The medium is what is to be verified, so the data must reach it first.
    plan(planner, cdb, true, Some(compare))
}

fn plan<M: From<Write>>(
    planner: &Planner<'_>,
    cdb: &Cdb,
    fua: bool,
    compare: Option<Compare>,
) -> PlanResult<M> {
    let (offset, wanted) = planner.transfer_range(cdb.extent())?;
    let len = planner.data_out(wanted)?;
    let transfer = Transfer::data_out(wanted);
    if len == 0 {
        return Ok(Plan::nothing(transfer));
    }
    let data = planner.pieces(len);
    // The data stay in the buffer until they are compared with what was written, which is read
    // behind them.
    let scratch = if compare.is_some() {
        planner.segment(data.len().into())
    } else {
        0
    };
    let buffer_len = data.len() + scratch;
    let scratch = data.len()..buffer_len;
    let verify = compare
        .map(|compare| Verify::new(offset, len.into(), compare, data, scratch, planner.block()));
    Ok(Plan {
        transfer,
        buffer_len,
        first: data.receive(),
        machine: Some(
            Write {
                offset,
                data,
                buffer_offset: 0,
                // The initiator turns the cache off where it wants every status to mean stable
                // data, so each write goes through as if it had FUA.
                fua: fua || !planner.lu.is_write_cache_enabled(),
                verify,
                stage: WriteStage::Receiving,
            }
            .into(),
        ),
    })
}

impl Write {
    /// The write half of a command whose data are in its buffer already; the
    /// first `advance` begins it.
    pub(crate) fn from_buffer(offset: u64, len: u32, buffer_offset: u32, fua: bool) -> Self {
        Self {
            offset,
            data: Pieces::whole(len),
            buffer_offset,
            fua,
            verify: None,
            stage: WriteStage::Receiving,
        }
    }

    /// A piece is on the medium: the next one, or the end.
    fn end_piece(&mut self, context: &Context<'_>) -> Next {
        // Only now may the buffer be overwritten: the piece is on the medium, and verified where
        // that is asked for.
        if self.data.advance() {
            self.stage = WriteStage::Receiving;
            return self.data.receive();
        }
        // The flush of the MODE SELECT that turned the cache off may have come
        // before this write, so it needs one of its own.
        if !self.fua && !context.lu.is_write_cache_enabled() {
            self.stage = WriteStage::Flushing;
            return Next::Block(BlockOp::Flush {
                offset: self.offset,
                len: self.data.total().into(),
            });
        }
        Next::Answer(DataIn::None)
    }
}

impl Steps for Write {
    fn advance(&mut self, context: &mut Context<'_>, _result: StepResult) -> Result<Next, Sense> {
        match (self.stage, &mut self.verify) {
            (WriteStage::Receiving, _) => {
                self.stage = WriteStage::Writing;
                Ok(Next::Block(BlockOp::Write {
                    offset: self.offset + u64::from(self.data.from()),
                    len: self.data.len(),
                    buffer_offset: self.buffer_offset,
                    fua: self.fua,
                }))
            }
            (WriteStage::Writing, Some(verify)) => {
                self.stage = WriteStage::Verifying;
                Ok(verify.begin_piece(self.data))
            }
            (WriteStage::Verifying, Some(verify)) => match verify.compare_segment(context)? {
                Some(next) => Ok(next),
                None => Ok(self.end_piece(context)),
            },
            (WriteStage::Writing | WriteStage::Verifying, _) => Ok(self.end_piece(context)),
            (WriteStage::Flushing, _) => Ok(Next::Answer(DataIn::None)),
        }
    }
}
