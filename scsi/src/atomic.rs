//! COMPARE AND WRITE (SBC-3 5.2) and ORWRITE (16) (5.15): commands that read, decide, and write.
//!
//! What they read must still be true when they write. Neither takes a lock for
//! that: the opcode table marks them atomic, and the task set lets nothing else
//! change their blocks while they run (see [`task`](crate::task)).

use crate::access::or_into;
use crate::cdb::Cdb;
use crate::config::Config;
use crate::plan::{Context, Machine, Next, Pieces, Plan, PlanResult, Planner, Transfer};
use crate::rw::Write;
use crate::sense::Sense;
use crate::step::BlockOp;
use crate::verify::{Compare, Verify};

const FUA: u8 = 3;

/// Where COMPARE AND WRITE has its NUMBER OF LOGICAL BLOCKS.
const BLOCKS_BYTE: u16 = 13;

/// MAXIMUM COMPARE AND WRITE LENGTH in blocks: what the configuration says, as
/// far as both halves of the data fit one transfer and one window: they are compared and written as a
/// whole.
pub(crate) fn max_compare_write(config: &Config) -> u8 {
    let limits = &config.limits;
    let fit = limits.max_transfer.min(limits.window) / (2 * config.block_size.bytes());
    config
        .limits
        .max_compare_write_blocks
        .min(u8::try_from(fit).unwrap_or(u8::MAX))
}

/// A COMPARE AND WRITE. The buffer holds what is expected, what is to be
/// written instead, and scratch for the medium, in this order.
#[derive(Debug)]
pub(crate) struct CompareWrite {
    /// The comparison, until it has succeeded.
    verify: Option<Verify>,
    write: Write,
}

/// COMPARE AND WRITE.
pub(crate) fn plan_compare_and_write(planner: &Planner<'_>, cdb: &Cdb) -> PlanResult {
    let (offset, len) = planner.byte_range(cdb.extent())?;
    let blocks = cdb.byte(BLOCKS_BYTE.into());
    // Data for no blocks: an initiator means more blocks than the field can say.
    let is_empty = blocks == 0 && planner.request.expected.data_out > 0;
    if blocks > max_compare_write(planner.lu.config()) || is_empty {
        return Err(Sense::cdb_field(BLOCKS_BYTE, None).into());
    }
    if blocks == 0 {
        return Ok(Plan::good());
    }
    let len = u32::try_from(len).expect("no more than 255 blocks");
    let received = 2 * len;
    // Half a comparison compares nothing: there must be exactly as much.
    if planner.request.expected.data_out != received {
        return Err(Planner::short_data_out(received));
    }
    let scratch = planner.segment(len.into());
    let verify = Verify::new(
        offset,
        len.into(),
        Compare::Buffer,
        Pieces::whole(len),
        received..received + scratch,
        planner.block(),
    );
    let fua = cdb.bit(1, FUA) || !planner.lu.is_write_cache_enabled();
    Ok(Plan {
        transfer: Transfer {
            data_in: 0,
            data_out: received,
        },
        buffer_len: received + scratch,
        first: Next::receive(received),
        machine: Machine::CompareWrite(CompareWrite {
            verify: Some(verify.after_receive().of_cache()),
            write: Write::from_buffer(offset, len, len, fua),
        }),
    })
}

impl CompareWrite {
    pub(crate) fn advance(&mut self, context: &mut Context<'_>) -> Result<Next, Sense> {
        if let Some(verify) = &mut self.verify {
            match verify.advance(context)? {
                Next::Answer(_) => self.verify = None,
                next => return Ok(next),
            }
        }
        self.write.advance(context)
    }
}

/// An ORWRITE. The buffer holds a piece of the data, and scratch for the medium
/// behind it. One piece after the other is brought, read, and written; the task
/// set keeps the blocks of all of them for the command.
#[derive(Debug)]
pub(crate) struct OrWrite {
    offset: u64,
    data: Pieces,
    /// Where the scratch is in the buffer.
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

/// ORWRITE (16).
pub(crate) fn plan_or_write(planner: &Planner<'_>, cdb: &Cdb) -> PlanResult {
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
    let data = planner.pieces(len);
    let scratch = planner.segment(data.len().into());
    Ok(Plan {
        transfer,
        buffer_len: data.len() + scratch,
        first: data.receive(),
        machine: Machine::OrWrite(OrWrite {
            offset,
            data,
            scratch_offset: data.len(),
            scratch_len: scratch,
            done: 0,
            fua: cdb.bit(1, FUA) || !planner.lu.is_write_cache_enabled(),
            stage: OrStage::Receiving,
        }),
    })
}

impl OrWrite {
    /// Where the present piece is on the medium.
    fn start(&self) -> u64 {
        self.offset + u64::from(self.data.from())
    }

    fn segment(&self) -> u32 {
        (self.data.len() - self.done).min(self.scratch_len)
    }

    pub(crate) fn advance(&mut self, context: &mut Context<'_>) -> Result<Next, Sense> {
        match &mut self.stage {
            OrStage::Receiving => self.stage = OrStage::Reading,
            OrStage::Reading => {
                let segment = self.segment();
                or_into(context.data, self.done, self.scratch_offset, segment);
                self.done += segment;
            }
            OrStage::Writing(write) => {
                let next = write.advance(context)?;
                if !matches!(next, Next::Answer(_)) || !self.data.advance() {
                    return Ok(next);
                }
                self.done = 0;
                self.stage = OrStage::Receiving;
                return Ok(self.data.receive());
            }
        }
        if self.done == self.data.len() {
            let mut write = Write::from_buffer(self.start(), self.data.len(), 0, self.fua);
            let next = write.advance(context);
            self.stage = OrStage::Writing(write);
            return next;
        }
        Ok(Next::Block(BlockOp::Read {
            offset: self.start() + u64::from(self.done),
            len: self.segment(),
            buffer_offset: self.scratch_offset,
            fua: false,
        }))
    }
}
