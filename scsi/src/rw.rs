//! READ and WRITE (SBC-3 5.7 to 5.12, 5.40 to 5.43) and the write half of
//! WRITE AND VERIFY (5.45 to 5.47).

use crate::cdb::Cdb;
use crate::plan::{Context, Machine, Next, Plan, PlanResult, Planner, Transfer};
use crate::sense::Sense;
use crate::step::{BlockOp, DataIn};
use crate::verify::{Compare, Verify};

const FUA: u8 = 3;

/// A READ whose block operation is on its way.
#[derive(Debug)]
pub(crate) struct Read {
    len: u32,
}

/// READ (6), (10), (12) and (16).
pub(crate) fn plan_read(planner: &Planner<'_>, cdb: &Cdb) -> PlanResult {
    let (offset, wanted) = planner.transfer_range(cdb.extent())?;
    let fua = cdb.byte(0) != 0x08 && cdb.bit(1, FUA);
    let block = planner.block();
    // Blocks that the initiator has no room for are not read at all.
    let len = wanted.min(
        planner
            .request
            .expected
            .data_in
            .div_ceil(block)
            .saturating_mul(block),
    );
    let transfer = Transfer {
        data_in: wanted,
        data_out: 0,
    };
    if len == 0 {
        return Ok(Plan {
            transfer,
            ..Plan::good()
        });
    }
    Ok(Plan {
        transfer,
        buffer_len: len,
        first: Next::Block(BlockOp::Read {
            offset,
            len,
            buffer_offset: 0,
            fua,
        }),
        machine: Machine::Read(Read { len }),
    })
}

impl Read {
    pub(crate) fn advance(&mut self) -> Next {
        Next::Answer(DataIn::Buffer { len: self.len })
    }
}

/// A WRITE that waits for its data, then for the medium.
#[derive(Debug)]
pub(crate) struct Write {
    offset: u64,
    len: u32,
    /// Where the data are in the command's buffer.
    buffer_offset: u32,
    fua: bool,
    stage: WriteStage,
}

/// ```text
/// Receiving -> Writing -> (answer)
///                 |-----> Verifying -> (answer)
///                 \-----> Flushing --> (answer)
/// ```
#[derive(Debug)]
enum WriteStage {
    /// Data-Out is on its way; the verification follows the write, if any.
    Receiving(Option<Verify>),
    /// The medium is being written.
    Writing(Option<Verify>),
    /// What was written is being read back.
    Verifying(Verify),
    /// The write cache was turned off while the write was on its way.
    Flushing,
}

/// WRITE (6), (10), (12) and (16).
pub(crate) fn plan_write(planner: &Planner<'_>, cdb: &Cdb) -> PlanResult {
    let fua = cdb.byte(0) != 0x0a && cdb.bit(1, FUA);
    plan(planner, cdb, fua, None)
}

/// WRITE AND VERIFY (10), (12) and (16).
pub(crate) fn plan_write_and_verify(planner: &Planner<'_>, cdb: &Cdb) -> PlanResult {
    let compare = match (cdb.byte(1) >> 1) & 0x3 {
        0 => Compare::Readable,
        1 => Compare::Buffer,
        _ => return Err(Sense::cdb_field(1, Some(2)).into()),
    };
    // The medium is what is to be verified, so the data must reach it first.
    plan(planner, cdb, true, Some(compare))
}

fn plan(planner: &Planner<'_>, cdb: &Cdb, fua: bool, compare: Option<Compare>) -> PlanResult {
    let (offset, wanted) = planner.transfer_range(cdb.extent())?;
    let len = planner.data_out(wanted)?;
    let transfer = Transfer {
        data_in: 0,
        data_out: wanted,
    };
    if len == 0 {
        return Ok(Plan {
            transfer,
            ..Plan::good()
        });
    }
    let scratch = if compare.is_some() {
        planner.segment(u64::from(len))
    } else {
        0
    };
    let verify = compare.map(|compare| {
        Verify::new(
            offset,
            u64::from(len),
            compare,
            len,
            scratch,
            planner.block(),
        )
    });
    Ok(Plan {
        transfer,
        buffer_len: len + scratch,
        first: Next::Receive(len),
        machine: Machine::Write(Write {
            offset,
            len,
            buffer_offset: 0,
            fua: fua || !planner.lu.is_write_cache_enabled(),
            stage: WriteStage::Receiving(verify),
        }),
    })
}

impl Write {
    /// The write half of a command whose data are in its buffer already; the
    /// first `advance` begins it.
    pub(crate) fn from_buffer(offset: u64, len: u32, buffer_offset: u32, fua: bool) -> Self {
        Self {
            offset,
            len,
            buffer_offset,
            fua,
            stage: WriteStage::Receiving(None),
        }
    }

    pub(crate) fn advance(&mut self, context: &mut Context<'_>) -> Result<Next, Sense> {
        match &mut self.stage {
            WriteStage::Receiving(verify) => {
                self.stage = WriteStage::Writing(verify.take());
                Ok(Next::Block(BlockOp::Write {
                    offset: self.offset,
                    len: self.len,
                    buffer_offset: self.buffer_offset,
                    fua: self.fua,
                }))
            }
            WriteStage::Writing(verify) => match verify.take() {
                // The flush of the MODE SELECT that turned the cache off may
                // have come before this write, so it needs one of its own.
                None if !self.fua && !context.lu.is_write_cache_enabled() => {
                    self.stage = WriteStage::Flushing;
                    Ok(Next::Block(BlockOp::Flush {
                        offset: self.offset,
                        len: self.len.into(),
                    }))
                }
                None => Ok(Next::Answer(DataIn::None)),
                Some(mut verify) => {
                    let next = verify.begin();
                    self.stage = WriteStage::Verifying(verify);
                    Ok(next)
                }
            },
            WriteStage::Verifying(verify) => verify.advance(context),
            WriteStage::Flushing => Ok(Next::Answer(DataIn::None)),
        }
    }
}
