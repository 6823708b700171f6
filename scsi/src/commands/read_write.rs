//! READ and WRITE (SBC-3 5.7 to 5.12, 5.40 to 5.43), and the write part of WRITE AND VERIFY (5.45
//! to 5.47).
//!
//! If the data is longer than the window, it is transferred via the buffer in pieces.

use super::integrity::{Frame, Integrity};
use super::plan::{Context, Next, Pieces, Plan, PlanResult, Planner, Room, Steps, Transfer};
use super::verify::{Compare, Verify};
use crate::cdb::Cdb;
use crate::sense::Sense;
use crate::step::{BlockOp, DataIn, StepResult};

/// A READ. Either the block operation or the transfer of a piece is in flight.
#[derive(Debug)]
pub(crate) struct Read {
    offset: u64,
    data: Pieces,
    fua: bool,
    /// Offset of the protection information in the command buffer.
    tags: Option<u32>,
    integrity: Option<Box<Integrity>>,
    /// Set while the current piece is being sent to the initiator.
    is_sending: bool,
}

/// READ (6), (10), (12), (16) and (32).
pub(crate) fn plan_read<M: From<Read>>(planner: &Planner<'_>, cdb: &Cdb) -> PlanResult<M> {
    let (offset, wanted) = planner.transfer_range(cdb.extent())?;
    let integrity = planner.integrity(cdb);
    let frame = planner.frame(integrity.as_deref());
    // Don't read any blocks that don't fit into the initiator's buffer.
    let len = wanted.min(frame.medium_len(planner.expected.data_in));
    let transfer = Transfer::data_in(frame.transferred(wanted));
    // A transfer length of zero is not an error, even if the LBA is just after the last block.
    if len == 0 {
        return Ok(Plan::nothing(transfer));
    }
    let data = planner.pieces(len, frame);
    let room = planner.room(data);
    let read = Read {
        offset,
        data,
        fua: cdb.fua(),
        tags: room.tags,
        integrity,
        is_sending: false,
    };
    Ok(Plan {
        transfer,
        buffer_len: room.end(planner.block()),
        first: read.read(),
        machine: Some(read.into()),
    })
}

impl Read {
    fn read(&self) -> Next {
        Next::Block(BlockOp::Read {
            offset: self.offset + u64::from(self.data.from()),
            len: self.data.len(),
            buffer_offset: 0,
            tags: self.tags,
            fua: self.fua,
        })
    }
}

impl Steps for Read {
    fn advance(&mut self, context: &mut Context<'_>, _result: StepResult) -> Result<Next, Sense> {
        // There is only a single piece in the buffer, so wait until this has been sent before
        // reading the next one.
        if self.is_sending {
            self.is_sending = false;
            self.data.advance();
            return Ok(self.read());
        }
        // Don't send any block of this piece if a check fails.
        if let Some((integrity, tags)) = self.integrity.as_deref().zip(self.tags) {
            integrity.send(context.data, self.data.span(0, tags))?;
        }
        let (from, len) = self.data.transferred();
        // The last piece is sent with the response, which avoids another step. For most reads, this
        // is the only piece.
        if self.data.end() == self.data.total() {
            return Ok(Next::Respond(DataIn::Buffer { from, len }));
        }
        self.is_sending = true;
        Ok(Next::Send { from, len })
    }
}

/// A WRITE. This first waits for the data, then for the medium.
#[derive(Debug)]
pub(crate) struct Write {
    offset: u64,
    data: Pieces,
    /// Location of the data in the command buffer.
    room: Room,
    fua: bool,
    /// Protection information to be checked or generated, unless this has already been done.
    integrity: Option<Box<Integrity>>,
    /// Used to verify the written data, piece by piece. This is a separate allocation, to avoid
    /// larger commands for WRITE.
    verify: Option<Box<Verify>>,
    stage: WriteStage,
}

/// ```text
/// Receiving -> Writing -> (response)
///    ^           |-----> Verifying -> (response)
///    |           |-----> Flushing --> (response)
///    \-----------/ next piece, after it has been verified if requested
/// ```
#[derive(Clone, Copy, Debug)]
enum WriteStage {
    /// Waiting for Data-Out.
    Receiving,
    /// Waiting for the block operation.
    Writing,
    /// Verifying the written data.
    Verifying,
    /// Flushing, because the cache was disabled during the write.
    Flushing,
}

/// WRITE (6), (10), (12), (16) and (32).
pub(crate) fn plan_write<M: From<Write>>(planner: &Planner<'_>, cdb: &Cdb) -> PlanResult<M> {
    plan(planner, cdb, cdb.fua())
}

/// WRITE AND VERIFY (10), (12), (16) and (32).
pub(crate) fn plan_write_and_verify<M: From<Write>>(
    planner: &Planner<'_>,
    cdb: &Cdb,
) -> PlanResult<M> {
    let compare = match cdb.byte_check() {
        0 => Compare::Readable,
        1 => Compare::Buffer,
        _ => return Err(Sense::cdb_field(cdb.flags_byte() as u16, Some(2)).into()),
    };
    // We need to verify the data on the medium, so it must be written there first.
    let plan: Plan<Write> = plan(planner, cdb, true)?;
    let Some(mut write) = plan.machine else {
        return Ok(Plan::nothing(plan.transfer));
    };
    // The data has to stay in the buffer until we have compared it with the written data, which is
    // read into the space after it.
    let (block, data) = (planner.block(), write.data);
    let scratch = planner.segment(write.room.end(block), data.len().into());
    let len = data.total().into();
    let verify = Verify::new(write.offset, len, compare, data, scratch, block);
    write.verify = Some(Box::new(verify.with_integrity(write.integrity.clone())));
    Ok(Plan {
        transfer: plan.transfer,
        buffer_len: scratch.end(block),
        first: plan.first,
        machine: Some(write.into()),
    })
}

fn plan<M: From<Write>>(planner: &Planner<'_>, cdb: &Cdb, fua: bool) -> PlanResult<M> {
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
    Ok(Plan {
        transfer,
        buffer_len: room.end(planner.block()),
        first: data.receive(),
        machine: Some(
            Write {
                offset,
                data,
                room,
                integrity,
                // An initiator disables the cache if it expects data to be stable for each status,
                // so in this case we handle every write as if FUA was set.
                fua: fua || !planner.lu.is_write_cache_enabled(),
                verify: None,
                stage: WriteStage::Receiving,
            }
            .into(),
        ),
    })
}

impl Write {
    /// Returns the write part of a command if the data is already in the buffer, together with its
    /// protection information. The first call to `advance` will start it.
    pub(crate) fn from_buffer(offset: u64, room: Room, frame: Frame, fua: bool) -> Self {
        Self {
            offset,
            data: Pieces::whole(room.len, frame),
            room,
            fua,
            integrity: None,
            verify: None,
            stage: WriteStage::Receiving,
        }
    }

    /// Called when a piece has been written. Returns the next piece, or completes the command.
    fn end_piece(&mut self, context: &Context<'_>) -> Next {
        // We can now overwrite the buffer, because the piece has been written, and also verified if
        // this was requested.
        if self.data.advance() {
            self.stage = WriteStage::Receiving;
            return self.data.receive();
        }
        // The cache has been disabled via MODE SELECT. The flush for this may have been done before
        // our write, so we need to flush again.
        if !self.fua && !context.lu.is_write_cache_enabled() {
            self.stage = WriteStage::Flushing;
            return Next::Block(BlockOp::Flush {
                offset: self.offset,
                len: self.data.total().into(),
            });
        }
        Next::Respond(DataIn::None)
    }
}

impl Steps for Write {
    fn advance(&mut self, context: &mut Context<'_>, _result: StepResult) -> Result<Next, Sense> {
        match (self.stage, &mut self.verify) {
            (WriteStage::Receiving, _) => {
                if let Some((integrity, tags)) = self.integrity.as_deref().zip(self.room.tags) {
                    integrity.receive(context.data, self.data.span(self.room.data, tags), 0)?;
                }
                self.stage = WriteStage::Writing;
                Ok(Next::Block(BlockOp::Write {
                    offset: self.offset + u64::from(self.data.from()),
                    len: self.data.len(),
                    buffer_offset: self.room.data,
                    tags: self.room.tags,
                    fua: self.fua,
                }))
            }
            (WriteStage::Writing, Some(verify)) => {
                self.stage = WriteStage::Verifying;
                Ok(verify.begin_piece(self.data))
            }
            (WriteStage::Verifying, Some(verify)) => match verify.compare_segment(context)? {
                Some(next) => Ok(next),
                None => Ok(self.end_piece(context)),
            },
            (WriteStage::Writing | WriteStage::Verifying, _) => Ok(self.end_piece(context)),
            (WriteStage::Flushing, _) => Ok(Next::Respond(DataIn::None)),
        }
    }
}
