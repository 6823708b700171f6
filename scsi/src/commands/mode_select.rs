//! MODE SELECT (6) and (10) (SPC-4 6.11, 6.12).
//!
//! The whole parameter list is checked before anything changes. A bit that
//! cannot change must bear its current value.

use super::mode_pages::{FLAGS, changeable, render};
use super::plan::{Context, Next, Plan, PlanResult, Planner, Steps};
use super::threshold;
use crate::cdb::Cdb;
use crate::data::field::Field;
use crate::data::mode::{
    PAGE_HEADER_LEN, PS, SPF, header_6, header_10, long_descriptor, short_descriptor,
};
use crate::lu::{Flags, LogicalUnit};
use crate::sense::{AdditionalSense, Sense};
use crate::step::{BlockOp, DataIn, StepResult};

/// A MODE SELECT that waits for its list.
#[derive(Debug)]
pub(crate) struct ModeSelect {
    list_len: u32,
    header: Header,
    /// The parameters are in force; only the cache must still be emptied.
    flushing: bool,
}

/// Mode parameter header that the list starts with (SPC-4 7.5.5).
#[derive(Clone, Copy, Debug)]
enum Header {
    /// Four bytes, MODE SELECT (6).
    Six,
    /// Eight bytes, MODE SELECT (10).
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
    // Without PF the list would be vendor specific.
    if !cdb.bit(1, 4) {
        return Err(Sense::cdb_field(1, Some(4)).into());
    }
    let select = ModeSelect {
        list_len,
        header,
        flushing: false,
    };
    planner.list(list_len, select.into())
}

impl Steps for ModeSelect {
    fn advance(&mut self, context: &mut Context<'_>, _result: StepResult) -> Result<Next, Sense> {
        if self.flushing {
            return Ok(Next::Answer(DataIn::None));
        }
        let mut list = vec![0; self.list_len as usize];
        context.data.read(0, &mut list);
        let (mask, values) = parse(&list, self.header, context.lu)?;
        let before = context.lu.flags();
        // First the bit, then the flush: writes that start from here on go through, and those
        // under way flush for themselves. The other order would leave what is written between the
        // two in the cache.
        context.lu.change_mode(mask, values, context.nexus)?;
        let cache_off = (mask - values).contains(Flags::WRITE_CACHE);
        if cache_off && before.contains(Flags::WRITE_CACHE) {
            // The target answers for what the cache holds: an initiator that knows of no cache
            // sends no flush.
            self.flushing = true;
            let len = context.lu.capacity_bytes();
            return Ok(Next::Block(BlockOp::Flush { offset: 0, len }));
        }
        Ok(Next::Answer(DataIn::None))
    }
}

const LENGTH_ERROR: Sense = Sense::illegal(AdditionalSense::PARAMETER_LIST_LENGTH_ERROR);

/// Reads a parameter list: which flags it sets, and to what.
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
    // The list is cut by its own lengths, each of which is compared with what came.
    let at = header_len + descriptor_len;
    let descriptor = list.get(header_len..at).ok_or(LENGTH_ERROR)?;
    check_descriptor(descriptor, header_len, long_lba, lu)?;
    parse_pages(list, at, lu)
}

/// A block descriptor must describe the medium as it is; zero blocks, or all
/// ones, mean the capacity as it is (SBC-3 6.5.2).
fn check_descriptor(
    descriptor: &[u8],
    at: usize,
    long_lba: bool,
    lu: &LogicalUnit,
) -> Result<(), Sense> {
    let field = |len: Field<u32>| len.get(descriptor).unwrap_or_default();
    let (blocks, unchanged, len) = match (descriptor.len(), long_lba) {
        // Without a descriptor the medium stays as it is.
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
        // The length field is the last of the header, in both forms.
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
        // Reserved in MODE SELECT. MODE SENSE never sets it here, so an initiator that sends a
        // page back has it at zero.
        if PS.get(rest) == Some(true) {
            return Err(Sense::parameter_field(at as u16, Some(7)));
        }
        // Nothing of the only subpage can be changed.
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
        let current =
            render(first, lu.flags()).ok_or(Sense::parameter_field(at as u16, Some(5)))?;
        // A page of another length is of another version of the standard, and its fields may lie
        // elsewhere.
        if current[1] != len {
            return Err(Sense::parameter_field(at as u16 + 1, Some(7)));
        }
        let page = list.get(at..at + current.len()).ok_or(LENGTH_ERROR)?;
        check_page(page, &current, at)?;
        // Nothing takes effect here. A later page may be illegal, and then the whole list changes
        // nothing.
        for (_, field, flag) in FLAGS.into_iter().filter(|(code, ..)| *code == first) {
            mask |= flag;
            values.set(flag, field.get(page) == Some(true));
        }
        at += current.len();
    }
    Ok((mask, values))
}

/// Refuses a page that differs from the current one in a bit that is fixed.
fn check_page(page: &[u8], current: &[u8], at: usize) -> Result<(), Sense> {
    let mask = changeable(page[0]).unwrap_or_default();
    for (index, ((new, old), mask)) in page
        .iter()
        .zip(current)
        .zip(&mask)
        .enumerate()
        .skip(PAGE_HEADER_LEN)
    {
        // A bit that cannot change may be sent as it is: initiators read a page, change one bit,
        // and send it back.
        let wrong = (new ^ old) & !mask;
        if wrong != 0 {
            let bit = 7 - wrong.leading_zeros() as u8;
            return Err(Sense::parameter_field((at + index) as u16, Some(bit)));
        }
    }
    Ok(())
}
