//! COMPARE AND WRITE (SBC-3 5.2).
//!
//! What it reads must still be true when it writes. It takes no lock for that: the opcode table
//! marks it as atomic, and the task set lets nothing else change its blocks while it runs (see
//! [`task`](crate::task)).

use super::plan::{Context, Next, Pieces, Plan, PlanResult, Planner, Steps, Transfer};
use super::read_write::Write;
use super::verify::{Compare, Verify};
use crate::cdb::Cdb;
use crate::data::cdb::block_16::FUA;
use crate::sense::Sense;
use crate::step::StepResult;

/// First byte of NUMBER OF LOGICAL BLOCKS.
const BLOCKS_BYTE: u16 = 13;

/// A COMPARE AND WRITE. The buffer holds what is expected, what is to be
/// written instead, and scratch for the medium, in this order.
#[derive(Debug)]
pub(crate) struct CompareAndWrite {
    /// The comparison, until it has succeeded.
    verify: Option<Verify>,
    write: Write,
}

pub(crate) fn plan_compare_and_write<M: From<CompareAndWrite>>(
    planner: &Planner<'_>,
    cdb: &Cdb,
) -> PlanResult<M> {
    let (offset, len) = planner.byte_range(cdb.extent())?;
    let blocks = cdb.byte(BLOCKS_BYTE.into());
    // Data for no blocks: an initiator means more blocks than the field can say.
    let is_empty = blocks == 0 && planner.expected.data_out > 0;
    if blocks > planner.lu.config().max_compare_write() || is_empty {
        return Err(Sense::cdb_field(BLOCKS_BYTE, None).into());
    }
    // No blocks and no data: there is nothing to do, which is no error.
    if blocks == 0 {
        return Ok(Plan::good());
    }
    let len = u32::try_from(len).expect("255 blocks at most");
    let received = 2 * len;
    // Half a comparison compares nothing: there must be exactly as much.
    if planner.expected.data_out != received {
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
    let fua = cdb.get(FUA) || !planner.lu.is_write_cache_enabled();
    Ok(Plan {
        transfer: Transfer::data_out(received),
        buffer_len: received + scratch,
        first: Next::receive(received),
        machine: Some(
            CompareAndWrite {
                // What a READ would give is compared, which needs no flush: other initiators
                // decide by READs, too.
                verify: Some(verify.after_receive().of_cache()),
                write: Write::from_buffer(offset, len, len, fua),
            }
            .into(),
        ),
    })
}

impl Steps for CompareAndWrite {
    fn advance(&mut self, context: &mut Context<'_>, result: StepResult) -> Result<Next, Sense> {
        if let Some(verify) = &mut self.verify {
            match verify.advance(context, result)? {
                // Equal. The write begins by the `advance` below, since its data are in the buffer
                // already.
                Next::Answer(_) => self.verify = None,
                next => return Ok(next),
            }
        }
        self.write.advance(context, result)
    }
}
