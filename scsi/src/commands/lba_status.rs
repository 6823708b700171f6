//! GET LBA STATUS (SBC-3 5.6).

use super::plan::{Context, Next, Plan, PlanResult, Planner, Steps};
use crate::cdb::{Cdb, Extent};
use crate::data::cdb::get_lba_status::{ALLOCATION_LENGTH, STARTING_LBA};
use crate::data::lba_status::{DEALLOCATED, DESCRIPTOR_LEN, HEADER_LEN, LbaStatus, MAPPED, encode};
use crate::lu::LogicalUnit;
use crate::sense::Sense;
use crate::step::{Allocation, BlockOp, DataIn, StepResult};

/// Maximum number of descriptors to return for a single GET LBA STATUS.
const STATUS_DESCRIPTORS: u32 = 256;

/// A GET LBA STATUS, used to collect the descriptors.
#[derive(Debug)]
pub(crate) struct GetLbaStatus {
    runs: Vec<LbaStatus>,
    allocation_length: u32,
    /// Offset on the medium to query next, in bytes.
    offset: u64,
    /// Number of descriptors that still fit into the response.
    room: u32,
}

pub(crate) fn plan_get_lba_status<M: From<GetLbaStatus>>(
    planner: &Planner<'_>,
    cdb: &Cdb,
) -> PlanResult<M> {
    // The starting LBA must be valid.
    let start = Extent {
        lba: cdb.get(STARTING_LBA),
        blocks: 1,
        length_byte: STARTING_LBA.at() as u16,
    };
    let (offset, _) = planner.byte_range(start)?;
    let allocation_length = cdb.get(ALLOCATION_LENGTH);
    // Every descriptor requires a call to the backend, so don't collect more than the initiator has
    // room for. We always return at least one to have something to report, and limit the total to
    // keep the response small.
    let room = allocation_length
        .saturating_sub(HEADER_LEN as u32)
        .div_ceil(DESCRIPTOR_LEN as u32)
        .clamp(1, STATUS_DESCRIPTORS);
    let status = GetLbaStatus {
        runs: Vec::new(),
        allocation_length,
        offset,
        room,
    };
    Ok(Plan {
        first: status.request_status(planner.lu),
        machine: Some(status.into()),
        ..Plan::good()
    })
}

impl GetLbaStatus {
    fn request_status(&self, lu: &LogicalUnit) -> Next {
        Next::Block(BlockOp::Status {
            offset: self.offset,
            len: lu.capacity_bytes().saturating_sub(self.offset),
        })
    }
}

impl Steps for GetLbaStatus {
    fn advance(&mut self, context: &mut Context<'_>, result: StepResult) -> Result<Next, Sense> {
        let block = u64::from(context.lu.config().block_size.bytes());
        let rest = context.lu.capacity_bytes().saturating_sub(self.offset);
        let (allocation, len) = match result {
            StepResult::Status { allocation, len } => (allocation, len),
            // If the backend doesn't know, report all blocks as allocated.
            _ => (Allocation::Mapped, rest),
        };
        let len = len.min(rest);
        // The backend's allocation unit may be smaller than a block. If only some of a block is
        // mapped, we report the block as mapped.
        let len = match allocation {
            Allocation::Mapped => len.next_multiple_of(block),
            Allocation::Deallocated => len - len % block,
        };
        // If the backend reports less than a block as deallocated, we would never make progress.
        // Report this block as mapped instead.
        let (allocation, len) = if len == 0 {
            (Allocation::Mapped, block)
        } else {
            (allocation, len)
        };
        // This is a 32-bit field, so any remaining blocks will go into the next descriptor.
        let blocks = (len.min(rest) / block).min(u64::from(u32::MAX)) as u32;
        self.runs.push(LbaStatus {
            lba: self.offset / block,
            blocks,
            status: match allocation {
                Allocation::Mapped => MAPPED,
                Allocation::Deallocated => DEALLOCATED,
            },
        });
        self.offset += u64::from(blocks) * block;
        self.room -= 1;
        // If there are no blocks, the capacity has been reduced to below the current offset. We
        // must not try again because this would loop forever.
        if self.room > 0 && self.offset < context.lu.capacity_bytes() && blocks > 0 {
            return Ok(self.request_status(context.lu));
        }
        let mut data = encode(&self.runs);
        data.truncate(self.allocation_length as usize);
        Ok(Next::Respond(DataIn::Inline(data)))
    }
}
