//! COMPARE AND WRITE (SBC-3 5.2).
//!
//! The data must not change between our read and our write. We don't need a lock for this because
//! the opcode table marks the command as atomic, so the task set will not run any other command
//! that changes the same blocks (see [`task`](crate::task)).

use super::plan::{Context, Next, Pieces, Plan, PlanResult, Planner, Steps, Transfer};
use super::read_write::Write;
use super::verify::{Compare, Verify};
use crate::cdb::Cdb;
use crate::data::cdb::block_16::FUA;
use crate::sense::Sense;
use crate::step::StepResult;

/// Byte offset of NUMBER OF LOGICAL BLOCKS in the CDB.
const BLOCKS_BYTE: u16 = 13;

/// A COMPARE AND WRITE. The buffer contains the expected data, then the new data, then scratch
/// space for reading from the medium.
#[derive(Debug)]
pub(crate) struct CompareAndWrite {
    /// The comparison, until it succeeds.
    verify: Option<Verify>,
    write: Write,
}

pub(crate) fn plan_compare_and_write<M: From<CompareAndWrite>>(
    planner: &Planner<'_>,
    cdb: &Cdb,
) -> PlanResult<M> {
    let (offset, len) = planner.byte_range(cdb.extent())?;
    let blocks = cdb.byte(BLOCKS_BYTE.into());
    // Data without any blocks: the initiator wants more blocks than the field can specify.
    let is_empty = blocks == 0 && planner.expected.data_out > 0;
    if blocks > planner.lu.config().max_compare_write() || is_empty {
        return Err(Sense::cdb_field(BLOCKS_BYTE, None).into());
    }
    // With no blocks and no data there is nothing to do. This is not an error.
    if blocks == 0 {
        return Ok(Plan::good());
    }
    let len = u32::try_from(len).expect("255 blocks at most");
    let received = 2 * len;
    // We can't compare with only some of the data, so the buffer size must match exactly.
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
                // We compare with the data that a READ would return, which doesn't require a flush:
                // other initiators also use READ to make their decisions.
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
                // The data is equal. The `advance` call below starts the write, because the new
                // data is already in the buffer.
                Next::Answer(_) => self.verify = None,
                next => return Ok(next),
            }
        }
        self.write.advance(context, result)
    }
}
