//! UNMAP (SBC-3 5.28).

use super::plan::{Context, Next, Plan, PlanResult, Planner, Steps};
use crate::access::copy_out;
use crate::cdb::Cdb;
use crate::lu::LogicalUnit;
use crate::sense::{AdditionalSense, Sense};
use crate::step::{BlockOp, DataIn, StepResult};

/// Header and descriptor length of UNMAP parameter data.
const UNMAP_HEADER: u32 = 8;
const UNMAP_DESCRIPTOR: u32 = 16;

/// An UNMAP: its list arrives, is checked whole, then worked through.
#[derive(Debug)]
pub(crate) struct Unmap {
    list_len: u32,
    /// Descriptors in the list, once it has been checked.
    count: Option<u32>,
    next: u32,
    /// Whether something was unmapped that is not stable yet.
    unstable: bool,
}

/// UNMAP.
pub(crate) fn plan_unmap<M: From<Unmap>>(planner: &Planner<'_>, cdb: &Cdb) -> PlanResult<M> {
    let len = u32::from(cdb.be16(7));
    if len == 0 {
        return Ok(Plan::good());
    }
    if len < UNMAP_HEADER {
        return Err(Sense::illegal(AdditionalSense::PARAMETER_LIST_LENGTH_ERROR).into());
    }
    let unmap = Unmap {
        list_len: len,
        count: None,
        next: 0,
        unstable: false,
    };
    planner.list(len, unmap.into())
}

impl Unmap {
    /// Checks the whole list before anything is unmapped; the descriptor count.
    fn check(&self, context: &Context<'_>) -> Result<u32, Sense> {
        let mut header = [0; 4];
        copy_out(context.data, 0, &mut header);
        // The list may be shorter than its length fields say: what arrived
        // counts. A part of a descriptor is ignored (SBC-3 5.28.2).
        let declared = u32::from(u16::from_be_bytes([header[2], header[3]]));
        let count = declared.min(self.list_len - UNMAP_HEADER) / UNMAP_DESCRIPTOR;
        let limits = &context.lu.config().limits;
        if count > limits.max_unmap_descriptors {
            return Err(Sense::parameter_field(2, None));
        }
        let mut total = 0_u64;
        for index in 0..count {
            let (lba, blocks) = descriptor(context, index);
            let end = lba.checked_add(u64::from(blocks));
            if end.is_none_or(|end| end > context.lu.capacity_blocks()) {
                return Err(Sense::illegal(AdditionalSense::LBA_OUT_OF_RANGE));
            }
            total += u64::from(blocks);
        }
        if total > u64::from(limits.max_unmap_blocks) {
            return Err(Sense::parameter_field(UNMAP_HEADER as u16 + 8, None));
        }
        Ok(count)
    }
}

impl Steps for Unmap {
    fn advance(&mut self, context: &mut Context<'_>, _result: StepResult) -> Result<Next, Sense> {
        let count = match self.count {
            Some(count) => count,
            None => *self.count.insert(self.check(context)?),
        };
        while self.next < count {
            let (lba, blocks) = descriptor(context, self.next);
            self.next += 1;
            if blocks > 0 {
                self.unstable = true;
                let block = u64::from(context.lu.config().block_size.bytes());
                return Ok(Next::Block(BlockOp::Discard {
                    offset: lba * block,
                    len: u64::from(blocks) * block,
                }));
            }
        }
        if std::mem::take(&mut self.unstable) && needs_flush(context.lu) {
            let len = context.lu.capacity_bytes();
            return Ok(Next::Block(BlockOp::Flush { offset: 0, len }));
        }
        Ok(Next::Answer(DataIn::None))
    }
}

/// Whether the backend has a volatile cache that the initiator has turned off,
/// so that whatever has no FUA of its own must be followed by a flush.
fn needs_flush(lu: &LogicalUnit) -> bool {
    lu.config().write_cache && !lu.is_write_cache_enabled()
}

/// One UNMAP block descriptor: first block and number.
fn descriptor(context: &Context<'_>, index: u32) -> (u64, u32) {
    let mut bytes = [0; 12];
    copy_out(
        context.data,
        UNMAP_HEADER + index * UNMAP_DESCRIPTOR,
        &mut bytes,
    );
    let mut lba = [0; 8];
    lba.copy_from_slice(&bytes[..8]);
    (
        u64::from_be_bytes(lba),
        u32::from_be_bytes([bytes[8], bytes[9], bytes[10], bytes[11]]),
    )
}
