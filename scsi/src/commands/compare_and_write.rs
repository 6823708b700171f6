//! COMPARE AND WRITE (SBC-3 5.2).
//!
//! The data must not change between our read and our write. We don't need a lock for this because
//! the opcode table marks the command as atomic, so the task set will not run any other command
//! that changes the same blocks (see [`task`](crate::task)).

use super::integrity::{Integrity, Span};
use super::plan::{Context, Next, Pieces, Plan, PlanResult, Planner, Room, Steps, Transfer};
use super::read_write::Write;
use super::verify::{Compare, Verify};
use crate::cdb::Cdb;
use crate::config::TUPLE_LEN;
use crate::sense::Sense;
use crate::step::StepResult;

/// Byte offset of NUMBER OF LOGICAL BLOCKS in the CDB.
const BLOCKS_BYTE: u16 = 13;

/// A COMPARE AND WRITE. The buffer contains the expected data, then the new data, then scratch
/// space for reading from the medium. We only compare the actual data, without any metadata.
#[derive(Debug)]
pub(crate) struct CompareAndWrite {
    /// Incoming protection information, until we have checked the new data.
    received: Option<Box<Received>>,
    /// The comparison, until it succeeds.
    verify: Option<Box<Verify>>,
    write: Write,
}

/// Incoming data with its protection information.
#[derive(Debug)]
struct Received {
    integrity: Integrity,
    /// The original expected data, until we have removed its protection information.
    expected: Option<Span>,
    new: Span,
    /// Offset of the new data in the incoming data.
    new_offset: u32,
}

impl Received {
    /// Removes the protection information provided with the expected data, since we will only
    /// compare the data (SBC-4 5.3).
    fn separate_expected(&mut self, context: &mut Context<'_>) -> Result<(), Sense> {
        match self.expected.take() {
            Some(expected) => {
                let ignored = self.integrity.without_checks();
                ignored.receive(context.data, expected, 0)
            }
            None => Ok(()),
        }
    }

    /// Validates the new data.
    fn check_new(&self, context: &mut Context<'_>) -> Result<(), Sense> {
        self.integrity
            .receive(context.data, self.new, self.new_offset)
    }
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
    let integrity = planner.integrity(cdb);
    let frame = planner.frame(integrity.as_deref());
    let received = frame.transferred(2 * len);
    // We can't compare with only some of the data, so the buffer size must match exactly.
    if planner.expected.data_out != received {
        return Err(Planner::short_data_out(received));
    }
    let room = planner.room(Pieces::whole(2 * len, frame));
    let scratch = planner.segment(room.end(planner.block()), len.into());
    let expected = Pieces::whole(len, frame);
    let new = Room {
        data: len,
        len,
        tags: room
            .tags
            .map(|tags| tags + len / planner.block() * TUPLE_LEN),
    };
    // The medium is checked in the same way as for a READ without protection information.
    let stored = integrity
        .as_deref()
        .map(|integrity| Box::new(integrity.without_transfer()));
    let received_tags = room.tags.zip(new.tags).zip(integrity);
    let checks = received_tags.map(|((tags, new_tags), integrity)| {
        Box::new(Received {
            expected: integrity.is_transferred().then(|| expected.span(0, tags)),
            integrity: *integrity,
            new: expected.span(new.data, new_tags),
            new_offset: received / 2,
        })
    });
    let verify = Verify::new(
        offset,
        len.into(),
        Compare::Buffer,
        expected,
        scratch,
        planner.block(),
    )
    .with_integrity(stored);
    let fua = cdb.fua() || !planner.lu.is_write_cache_enabled();
    Ok(Plan {
        transfer: Transfer::data_out(received),
        buffer_len: scratch.end(planner.block()),
        first: Next::receive(received),
        machine: Some(
            CompareAndWrite {
                received: checks,
                // We compare with the data that a READ would return, which doesn't require a flush:
                // other initiators also use READ to make their decisions.
                verify: Some(Box::new(verify.after_receive().of_cache())),
                write: Write::from_buffer(offset, new, frame, fua),
            }
            .into(),
        ),
    })
}

impl Steps for CompareAndWrite {
    fn advance(&mut self, context: &mut Context<'_>, result: StepResult) -> Result<Next, Sense> {
        if let Some(received) = &mut self.received {
            received.separate_expected(context)?;
        }
        if let Some(verify) = &mut self.verify {
            match verify.advance(context, result)? {
                // The data is equal. The `advance` call below starts the write, because the new
                // data is already in the buffer.
                Next::Respond(_) => self.verify = None,
                next => return Ok(next),
            }
            // Do this now instead of on arrival, to ensure that a miscompare is reported first.
            if let Some(received) = self.received.take() {
                received.check_new(context)?;
            }
        }
        self.write.advance(context, result)
    }
}
