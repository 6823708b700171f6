//! MODE SELECT (6) and (10) (SPC-4 6.11, 6.12).
//!
//! We check the entire parameter list before we change anything. If a bit cannot be changed, it
//! must be sent with the current value.

use super::mode_pages::{changeable, fields, render};
use super::plan::{Context, Next, Plan, PlanResult, Planner, Steps};
use super::threshold;
use crate::cdb::Cdb;
use crate::data::field::Field;
use crate::data::mode::{
    PAGE_HEADER_LEN, PS, SPF, header_6, header_10, long_descriptor, short_descriptor,
};
use crate::lu::{CacheEpoch, Flags, LogicalUnit};
use crate::sense::{AdditionalSense, Sense};
use crate::step::{BlockOp, DataIn, StepResult};

/// A MODE SELECT, waiting for the parameter list.
#[derive(Debug)]
pub(crate) struct ModeSelect {
    list_len: u32,
    header: Header,
    /// The parameters have been updated, and we are only waiting for the required flush to succeed.
    flushing: Option<CacheEpoch>,
}

/// The mode parameter header at the start of the list (SPC-4 7.5.5).
#[derive(Clone, Copy, Debug)]
enum Header {
    /// MODE SELECT (6): 4 bytes.
    Six,
    /// MODE SELECT (10): 8 bytes.
    Ten,
}

pub(crate) fn plan_mode_select_6<M: From<ModeSelect>>(
    planner: &Planner<'_>,
    cdb: &Cdb,
) -> PlanResult<M> {
    plan(planner, cdb, u32::from(cdb.byte(4)), Header::Six)
}

pub(crate) fn plan_mode_select_10<M: From<ModeSelect>>(
    planner: &Planner<'_>,
    cdb: &Cdb,
) -> PlanResult<M> {
    plan(planner, cdb, u32::from(cdb.be16(7)), Header::Ten)
}

fn plan<M: From<ModeSelect>>(
    planner: &Planner<'_>,
    cdb: &Cdb,
    list_len: u32,
    header: Header,
) -> PlanResult<M> {
    if list_len == 0 {
        return Ok(Plan::good());
    }
    // If PF is not set, the format of the list is vendor specific.
    if !cdb.bit(1, 4) {
        return Err(Sense::cdb_field(1, Some(4)).into());
    }
    let select = ModeSelect {
        list_len,
        header,
        flushing: None,
    };
    planner.list(list_len, select.into())
}

impl Steps for ModeSelect {
    fn advance(&mut self, context: &mut Context<'_>, _result: StepResult) -> Result<Next, Sense> {
        // We never get here if the flush has failed, in which case it is still owed.
        if let Some(epoch) = self.flushing {
            context.lu.cache_flushes().complete(epoch);
            return Ok(Next::Respond(DataIn::None));
        }
        let mut list = vec![0; self.list_len as usize];
        context.data.read(0, &mut list);
        let (mask, values) = parse(&list, self.header, context.lu)?;
        // Set the bit first, then flush. Any write that starts after this point will be written
        // through, and a write in flight will do a flush. If we flushed first, data written between
        // the two steps could stay in the cache.
        context.lu.change_mode(mask, values, context.nexus)?;
        // This is required even if the cache was already disabled: the previous flush may have
        // failed or may still be in flight, and GOOD must also mean for this initiator that the
        // cache is empty.
        let disables = (mask - values).contains(Flags::WRITE_CACHE);
        self.flushing = context.lu.cache_flushes().owed().filter(|_| disables);
        if self.flushing.is_some() {
            let len = context.lu.capacity_bytes();
            return Ok(Next::Block(BlockOp::Flush { offset: 0, len }));
        }
        Ok(Next::Respond(DataIn::None))
    }
}

const LENGTH_ERROR: Sense = Sense::illegal(AdditionalSense::PARAMETER_LIST_LENGTH_ERROR);

/// Parses a parameter list. Returns a mask of the flags that should be set, and the new values.
fn parse(list: &[u8], header: Header, lu: &LogicalUnit) -> Result<(Flags, Flags), Sense> {
    let (header_len, long_lba, descriptor_len) = match header {
        Header::Six => {
            let len = header_6::BLOCK_DESCRIPTOR_LENGTH.get(list);
            (header_6::LEN, Some(false), len.map(usize::from))
        }
        Header::Ten => {
            let len = header_10::BLOCK_DESCRIPTOR_LENGTH.get(list);
            let long_lba = header_10::LONGLBA.get(list);
            (header_10::LEN, long_lba, len.map(usize::from))
        }
    };
    let (long_lba, descriptor_len) = long_lba.zip(descriptor_len).ok_or(LENGTH_ERROR)?;
    // Lengths come from the list, so each must be checked against the received size.
    let at = header_len + descriptor_len;
    let descriptor = list.get(header_len..at).ok_or(LENGTH_ERROR)?;
    check_descriptor(descriptor, header_len, long_lba, lu)?;
    parse_pages(list, at, lu)
}

/// Checks that a block descriptor matches the current medium. If the number of blocks is zero or
/// all ones, the capacity should not be changed (SBC-3 6.5.2).
fn check_descriptor(
    descriptor: &[u8],
    at: usize,
    long_lba: bool,
    lu: &LogicalUnit,
) -> Result<(), Sense> {
    let field = |len: Field<u32>| len.get(descriptor).unwrap_or_default();
    let (blocks, unchanged, len) = match (descriptor.len(), long_lba) {
        // The medium is not changed if there is no descriptor.
        (0, _) => return Ok(()),
        (short_descriptor::LEN, false) => (
            u64::from(field(short_descriptor::BLOCKS)),
            u64::from(u32::MAX),
            short_descriptor::BLOCK_LENGTH,
        ),
        (long_descriptor::LEN, true) => (
            long_descriptor::BLOCKS.get(descriptor).unwrap_or_default(),
            u64::MAX,
            long_descriptor::BLOCK_LENGTH,
        ),
        // The length is the last field of the header in both formats.
        _ => return Err(Sense::parameter_field(at as u16 - 1, Some(7))),
    };
    if blocks != 0 && blocks != unchanged && blocks != lu.capacity_blocks() {
        return Err(Sense::parameter_field(at as u16, Some(7)));
    }
    if field(len) != lu.config().block_size.bytes() {
        return Err(Sense::parameter_field((at + len.at()) as u16, Some(7)));
    }
    Ok(())
}

fn parse_pages(list: &[u8], mut at: usize, lu: &LogicalUnit) -> Result<(Flags, Flags), Sense> {
    let (mut mask, mut values) = (Flags::empty(), Flags::empty());
    while at < list.len() {
        let rest = &list[at..];
        let &[first, len, ..] = rest else {
            return Err(LENGTH_ERROR);
        };
        // This bit is reserved in MODE SELECT. We never set it in MODE SENSE, so it will be zero if
        // an initiator sends back a page that it has received.
        if PS.get(rest) == Some(true) {
            return Err(Sense::parameter_field(at as u16, Some(7)));
        }
        // We only have a single subpage, and nothing in it can be changed.
        if SPF.get(rest) == Some(true) {
            let page = threshold::page(lu, false).filter(|page| page[..2] == [first, len]);
            let page = page.ok_or(Sense::parameter_field(at as u16, Some(6)))?;
            let given = list.get(at..at + page.len()).ok_or(LENGTH_ERROR)?;
            if let Some(byte) = (0..page.len()).find(|byte| given[*byte] != page[*byte]) {
                return Err(Sense::parameter_field((at + byte) as u16, Some(7)));
            }
            at += page.len();
            continue;
        }
        let current = render(first, lu.config(), lu.flags())
            .ok_or(Sense::parameter_field(at as u16, Some(5)))?;
        // If the length is different, the page is from some other version of the standard, and the
        // fields could be at other offsets.
        if current[1] != len {
            return Err(Sense::parameter_field(at as u16 + 1, Some(7)));
        }
        let page = list.get(at..at + current.len()).ok_or(LENGTH_ERROR)?;
        let changeable = changeable(first, lu.config()).unwrap_or_default();
        check_page(page, &current, &changeable)
            .map_err(|(byte, bit)| Sense::parameter_field((at + byte) as u16, Some(bit)))?;
        // Don't update anything yet. If a page after this is invalid, the entire list must be
        // ignored.
        for (field, flag) in fields(first, lu.config()) {
            mask |= flag;
            values.set(flag, field.get(page) == Some(true));
        }
        at += current.len();
    }
    Ok((mask, values))
}

/// Checks that a page is the same as the current one, except for bits that can be changed. Returns
/// the byte and bit of the first difference.
fn check_page(page: &[u8], current: &[u8], changeable: &[u8]) -> Result<(), (usize, u8)> {
    for (index, ((new, old), mask)) in page
        .iter()
        .zip(current)
        .zip(changeable)
        .enumerate()
        .skip(PAGE_HEADER_LEN)
    {
        // Initiators read a page, change a single bit and send the page back, so we need to accept
        // the current value for any bit that can't be changed.
        let wrong = (new ^ old) & !mask;
        if wrong != 0 {
            return Err((index, 7 - wrong.leading_zeros() as u8));
        }
    }
    Ok(())
}
