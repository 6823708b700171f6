//! UNMAP (SBC-3 5.28).

use super::plan::{Context, Next, Plan, PlanResult, Planner, Steps};
use crate::cdb::Cdb;
use crate::data::cdb::unmap::PARAMETER_LIST_LENGTH;
use crate::data::unmap::{
    BLOCKS, DESCRIPTOR_LEN, DESCRIPTORS_LENGTH, HEADER_LEN, parse_descriptor,
};
use crate::lu::LogicalUnit;
use crate::sense::{AdditionalSense, Sense};
use crate::step::{BlockOp, DataIn, StepResult};

/// An UNMAP. We receive the list, check all of it, and then process the descriptors.
#[derive(Debug)]
pub(crate) struct Unmap {
    list_len: u32,
    /// Number of descriptors in the list. This is set when the list has been checked.
    count: Option<u32>,
    next: u32,
    /// Set when a range has been unmapped but is not stable yet.
    unstable: bool,
}

pub(crate) fn plan_unmap<M: From<Unmap>>(planner: &Planner<'_>, cdb: &Cdb) -> PlanResult<M> {
    let len = u32::from(cdb.get(PARAMETER_LIST_LENGTH));
    // An empty list doesn't unmap anything, and is not an error. A list shorter than the header is
    // an error.
    if len == 0 {
        return Ok(Plan::good());
    }
    if len < HEADER_LEN as u32 {
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
    /// Checks the entire list before anything is unmapped. Returns the number of descriptors.
    fn check(&self, context: &Context<'_>) -> Result<u32, Sense> {
        let mut header = [0; HEADER_LEN];
        context.data.read(0, &mut header);
        // The list may be shorter than indicated by the length fields, so use the received length.
        // Incomplete descriptors are ignored (SBC-3 5.28.2).
        let declared = DESCRIPTORS_LENGTH.get(&header).unwrap_or_default();
        let count =
            u32::from(declared).min(self.list_len - HEADER_LEN as u32) / DESCRIPTOR_LEN as u32;
        let limits = &context.lu.config().limits;
        // Both limits are reported in the Block Limits page. Without these, a list of 64 KiB could
        // unmap the entire medium thousands of times.
        if count > limits.max_unmap_descriptors {
            return Err(Sense::parameter_field(DESCRIPTORS_LENGTH.at() as u16, None));
        }
        let mut total = 0_u64;
        for index in 0..count {
            let (lba, blocks) = descriptor(context, index);
            // This value was received from the initiator, so the sum may overflow. The total can't,
            // because there are at most 4095 values of 32 bits.
            let end = lba.checked_add(u64::from(blocks));
            if end.is_none_or(|end| end > context.lu.capacity_blocks()) {
                return Err(Sense::illegal(AdditionalSense::LBA_OUT_OF_RANGE));
            }
            total += u64::from(blocks);
        }
        if total > u64::from(limits.max_unmap_blocks) {
            return Err(Sense::parameter_field(
                (HEADER_LEN + BLOCKS.at()) as u16,
                None,
            ));
        }
        Ok(count)
    }
}

impl Steps for Unmap {
    fn advance(&mut self, context: &mut Context<'_>, _result: StepResult) -> Result<Next, Sense> {
        let count = match self.count {
            Some(count) => count,
            // Do this once, before the first range is unmapped. If the last descriptor is invalid,
            // we must not change anything, because this could not be reverted.
            None => *self.count.insert(self.check(context)?),
        };
        while self.next < count {
            let (lba, blocks) = descriptor(context, self.next);
            self.next += 1;
            // A descriptor without any blocks is valid, but we can ignore it.
            if blocks > 0 {
                self.unstable = true;
                let block = u64::from(context.lu.config().block_size.bytes());
                return Ok(Next::Block(BlockOp::Discard {
                    offset: lba * block,
                    len: u64::from(blocks) * block,
                }));
            }
        }
        // There is no FUA flag in BlockOp::Discard, so do a single flush after the last range.
        if std::mem::take(&mut self.unstable) && needs_flush(context.lu) {
            let len = context.lu.capacity_bytes();
            return Ok(Next::Block(BlockOp::Flush { offset: 0, len }));
        }
        Ok(Next::Respond(DataIn::None))
    }
}

/// Returns whether the backend has a volatile cache that the initiator has disabled, so that we
/// need to flush after an operation without FUA.
fn needs_flush(lu: &LogicalUnit) -> bool {
    lu.config().write_cache && !lu.is_write_cache_enabled()
}

/// Returns the first block and the number of blocks in an UNMAP block descriptor.
fn descriptor(context: &Context<'_>, index: u32) -> (u64, u32) {
    let mut bytes = [0; DESCRIPTOR_LEN];
    let at = HEADER_LEN as u32 + index * DESCRIPTOR_LEN as u32;
    context.data.read(at, &mut bytes);
    parse_descriptor(&bytes).expect("complete descriptor")
}
