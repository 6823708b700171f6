//! ORWRITE (16) (SBC-3 5.15), which is atomic in the same way as [COMPARE AND
//! WRITE](super::compare_and_write).

use super::integrity::{Frame, Integrity, Span};
use super::plan::{Context, Next, Pieces, Plan, PlanResult, Planner, Room, Steps, Transfer};
use super::read_write::Write;
use crate::access::or_into;
use crate::cdb::Cdb;
use crate::sense::Sense;
use crate::step::{BlockOp, StepResult};

/// An ORWRITE. The buffer contains a piece of the data, then scratch space for reading from the
/// medium. We receive, read and write the data in pieces, and the task set reserves the blocks for
/// this command until the last piece has been written.
#[derive(Debug)]
pub(crate) struct OrWrite {
    offset: u64,
    data: Pieces,
    frame: Frame,
    /// Location of the data in the buffer.
    room: Room,
    /// The scratch region in the buffer.
    scratch: Room,
    integrity: Option<Box<Integrity>>,
    /// Number of bytes in this piece that have been updated with the bits from the medium.
    done: u32,
    fua: bool,
    stage: OrStage,
}

/// ```text
/// Receiving -> Reading (segment by segment) -> Writing -> (response)
///     ^-------------- next piece ------------------/
/// ```
#[derive(Debug)]
enum OrStage {
    /// Waiting for Data-Out.
    Receiving,
    /// Reading a segment from the medium.
    Reading,
    /// Writing the result.
    Writing(Box<Write>),
}

/// Plans an ORWRITE (16).
pub(crate) fn plan_or_write<M: From<OrWrite>>(planner: &Planner<'_>, cdb: &Cdb) -> PlanResult<M> {
    let (offset, wanted) = planner.transfer_range(cdb.extent())?;
    let integrity = planner.integrity(cdb);
    let frame = planner.frame(integrity.as_deref());
    let len = planner.data_out(wanted, frame)?;
    let transfer = Transfer::data_out(frame.transferred(wanted));
    if len == 0 {
        return Ok(Plan::nothing(transfer));
    }
    let data = planner.pieces(len, frame);
    let room = planner.room(data);
    let scratch = planner.segment(room.end(planner.block()), data.len().into());
    Ok(Plan {
        transfer,
        buffer_len: scratch.end(planner.block()),
        first: data.receive(),
        machine: Some(
            OrWrite {
                offset,
                data,
                frame,
                room,
                scratch,
                integrity,
                done: 0,
                fua: cdb.fua() || !planner.lu.is_write_cache_enabled(),
                stage: OrStage::Receiving,
            }
            .into(),
        ),
    })
}

impl OrWrite {
    /// Returns the offset on the medium at which the current piece starts, in bytes.
    fn start(&self) -> u64 {
        self.offset + u64::from(self.data.from())
    }

    fn segment(&self) -> u32 {
        (self.data.len() - self.done).min(self.scratch.len)
    }

    /// Validates an incoming piece, and separates its protection information.
    fn accept_piece(&self, context: &mut Context<'_>) -> Result<(), Sense> {
        match self.integrity.as_deref().zip(self.room.tags) {
            Some((integrity, tags)) if integrity.is_transferred() => {
                integrity.receive(context.data, self.data.span(0, tags), 0)
            }
            _ => Ok(()),
        }
    }

    /// Checks the protection information of a segment that was just read.
    fn check_stored(&self, context: &Context<'_>, segment: u32) -> Result<(), Sense> {
        let Some((integrity, tags)) = self.integrity.as_deref().zip(self.scratch.tags) else {
            return Ok(());
        };
        let span = Span {
            start: u64::from(self.data.from() + self.done),
            len: segment,
            data: self.scratch.data,
            tags,
        };
        integrity.check_stored(context.data, span)
    }
}

impl Steps for OrWrite {
    fn advance(&mut self, context: &mut Context<'_>, result: StepResult) -> Result<Next, Sense> {
        match &mut self.stage {
            OrStage::Receiving => {
                self.accept_piece(context)?;
                self.stage = OrStage::Reading;
            }
            OrStage::Reading => {
                let segment = self.segment();
                self.check_stored(context, segment)?;
                or_into(context.data, self.done, self.scratch.data, segment);
                self.done += segment;
            }
            OrStage::Writing(write) => {
                // When the write returns a response, the command is only complete if this was the
                // last piece.
                let next = write.advance(context, result)?;
                if !matches!(next, Next::Respond(_)) || !self.data.advance() {
                    return Ok(next);
                }
                self.done = 0;
                self.stage = OrStage::Receiving;
                return Ok(self.data.receive());
            }
        }
        // Write the result to the blocks that we have read. They can't have been changed since,
        // because this command is atomic and the task set will not run any conflicting command.
        if self.done == self.data.len() {
            if let Some((integrity, tags)) = self.integrity.as_deref().zip(self.room.tags) {
                integrity.update(context.data, self.data.span(0, tags));
            }
            let room = Room {
                len: self.data.len(),
                ..self.room
            };
            let mut write = Write::from_buffer(self.start(), room, self.frame, self.fua);
            let next = write.advance(context, result);
            self.stage = OrStage::Writing(Box::new(write));
            return next;
        }
        Ok(Next::Block(BlockOp::Read {
            offset: self.start() + u64::from(self.done),
            len: self.segment(),
            buffer_offset: self.scratch.data,
            tags: self.scratch.tags,
            // We use the data that a READ would return, whether or not it's from the cache.
            fua: false,
        }))
    }
}
