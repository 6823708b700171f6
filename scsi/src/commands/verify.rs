//! VERIFY (SBC-3 5.36 to 5.38), also used as the second part of WRITE AND VERIFY.
//!
//! We read from the medium in segments and compare them in scratch space, which is located after
//! the Data-Out data in the buffer, so the buffer size doesn't depend on the length to verify. If
//! Data-Out is longer than the window, it is received in pieces, and we compare each piece before
//! we request the next one.

use super::integrity::{Integrity, Span};
use super::plan::{Context, Next, Pieces, Plan, PlanResult, Planner, Room, Steps, Transfer};
use crate::access::first_difference;
use crate::cdb::Cdb;
use crate::config::TUPLE_LEN;
use crate::sense::{AdditionalSense, Sense, SenseKey};
use crate::step::{BlockOp, DataIn, StepResult};

/// The data to compare the medium with (BYTCHK field).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Compare {
    /// No data. The blocks only need to be readable (00b).
    Readable,
    /// All bytes in the Data-Out buffer (01b).
    Buffer,
    /// A single block of Data-Out, which must be equal to each of the blocks (11b).
    OneBlock,
}

/// A verify in progress.
#[derive(Debug)]
pub(crate) struct Verify {
    /// Start of the range on the medium, as a byte offset.
    start: u64,
    /// Length of the range, in bytes.
    len: u64,
    /// Number of bytes that have been verified.
    done: u64,
    /// End of the range that can be verified with the current piece of Data-Out.
    until: u64,
    compare: Compare,
    /// The Data-Out to compare with.
    data: Pieces,
    /// The scratch space in the command buffer.
    scratch: Room,
    block: u32,
    integrity: Option<Box<Integrity>>,
    /// Set when we are still waiting for Data-Out.
    receiving: bool,
    /// If set, read from stable storage rather than the data that a READ would return.
    stable: bool,
}

/// VERIFY (10), (12), (16) and (32).
pub(crate) fn plan_verify<M: From<Verify>>(planner: &Planner<'_>, cdb: &Cdb) -> PlanResult<M> {
    let block = planner.block();
    let compare = match cdb.byte_check() {
        0 => Compare::Readable,
        1 => Compare::Buffer,
        3 => Compare::OneBlock,
        _ => return Err(Sense::cdb_field(cdb.flags_byte() as u16, Some(2)).into()),
    };
    let integrity = planner.integrity(cdb);
    let frame = planner.frame(integrity.as_deref());
    // This limit is used even if no data is transferred (SBC-3 6.5.3), because other commands might
    // have to wait for this one.
    let (offset, range) = planner.transfer_range(cdb.extent())?;
    let mut len = u64::from(range);
    let wanted = match compare {
        Compare::Readable => 0,
        Compare::Buffer => range,
        Compare::OneBlock => block.min(range),
    };
    // VERIFY without Data-Out (BYTCHK is zero) doesn't need a buffer, so we can accept any size.
    let received = planner.data_out(wanted, frame)?;
    if compare != Compare::Readable && received < wanted {
        // We can only compare complete blocks that are in the initiator's buffer.
        len = if compare == Compare::Buffer {
            u64::from(received)
        } else {
            0
        };
    }
    let transfer = Transfer::data_out(frame.transferred(wanted));
    if len == 0 {
        return Ok(Plan::nothing(transfer));
    }
    let data = planner.pieces(received, frame);
    let room = planner.room(data);
    let scratch = planner.segment(room.end(planner.block()), len);
    let mut verify =
        Verify::new(offset, len, compare, data, scratch, block).with_integrity(integrity);
    // Receive Data-Out first, because we need something to compare with before reading from the
    // medium.
    let first = if received > 0 {
        verify = verify.after_receive();
        data.receive()
    } else {
        verify.read_next_segment()
    };
    Ok(Plan {
        transfer,
        buffer_len: scratch.end(planner.block()),
        first,
        machine: Some(verify.into()),
    })
}

impl Verify {
    /// Creates a new verification of `len` bytes at `start`. The Data-Out is at the start of the
    /// buffer, and the scratch space is after it.
    pub(crate) fn new(
        start: u64,
        len: u64,
        compare: Compare,
        data: Pieces,
        scratch: Room,
        block: u32,
    ) -> Self {
        // With Data-Out, we can only compare the blocks of the piece that is currently in the
        // buffer. The other modes don't need any more data.
        let until = match compare {
            Compare::Buffer => data.end().into(),
            Compare::Readable | Compare::OneBlock => len,
        };
        Self {
            start,
            len,
            done: 0,
            until,
            compare,
            data,
            scratch,
            block,
            integrity: None,
            receiving: false,
            stable: true,
        }
    }

    /// Also verifies the protection information of the blocks.
    pub(crate) fn with_integrity(self, integrity: Option<Box<Integrity>>) -> Self {
        Self { integrity, ..self }
    }

    /// Sets the state to wait for Data-Out first.
    pub(crate) fn after_receive(mut self) -> Self {
        self.receiving = true;
        self
    }

    /// Compares with the data that a READ would return.
    pub(crate) fn of_cache(mut self) -> Self {
        self.stable = false;
        self
    }

    fn segment(&self) -> u32 {
        (self.until - self.done).min(self.scratch.len.into()) as u32
    }

    /// Returns a step to read the next segment. We need to verify the medium, so the first read
    /// will flush cached data to stable storage. It's enough to do this once for any data that was
    /// written before this command.
    fn read_next_segment(&self) -> Next {
        Next::Block(BlockOp::Read {
            offset: self.start + self.done,
            len: self.segment(),
            buffer_offset: self.scratch.data,
            tags: self.scratch.tags,
            fua: self.stable && self.done == 0,
        })
    }

    /// Starts to verify the blocks of a single piece of Data-Out.
    pub(crate) fn begin_piece(&mut self, data: Pieces) -> Next {
        self.data = data;
        self.until = data.end().into();
        self.read_next_segment()
    }

    /// Compares the segment that was just read. Returns the read for the next segment, or `None` if
    /// there is currently nothing left to compare.
    pub(crate) fn compare_segment(&mut self, context: &Context<'_>) -> Result<Option<Next>, Sense> {
        let segment = self.segment();
        self.check_stored(context, segment)?;
        // INFORMATION is set to the offset in the range, so that the initiator doesn't need to know
        // about our segments to find the byte.
        if let Some(index) = self.difference(context, segment) {
            return Err(Sense::new(
                SenseKey::Miscompare,
                AdditionalSense::MISCOMPARE_DURING_VERIFY,
            )
            .with_information(self.data.transferred_offset(self.done + u64::from(index))));
        }
        self.compare_tags(context, segment)?;
        self.done += u64::from(segment);
        Ok((self.done < self.until).then(|| self.read_next_segment()))
    }

    /// Returns the protection information of a segment that was just read.
    fn stored(&self, segment: u32) -> Option<(&Integrity, Span)> {
        let integrity = self.integrity.as_deref()?;
        let span = Span {
            start: self.done,
            len: segment,
            data: self.scratch.data,
            tags: self.scratch.tags?,
        };
        Some((integrity, span))
    }

    /// Checks the protection information on the medium.
    fn check_stored(&self, context: &Context<'_>, segment: u32) -> Result<(), Sense> {
        let Some((integrity, span)) = self.stored(segment) else {
            return Ok(());
        };
        // If it was received as well, both are compared, and only the received one is checked
        // (SBC-4, VRPROTECT with a BYTCHK of 01b or 11b).
        if self.compare != Compare::Readable && integrity.is_transferred() {
            return Ok(());
        }
        integrity.check_stored(context.data, span)
    }

    /// Compares the protection information with the Data-Out.
    fn compare_tags(&self, context: &Context<'_>, segment: u32) -> Result<(), Sense> {
        let Some((integrity, span)) = self.stored(segment) else {
            return Ok(());
        };
        let tags = self.data.tags_offset();
        match self.compare {
            Compare::Readable => Ok(()),
            Compare::Buffer => {
                let blocks = self.offset_in_piece() / self.block;
                integrity.compare(context.data, span, tags + blocks * TUPLE_LEN)
            }
            Compare::OneBlock => integrity.compare_one(context.data, span, tags),
        }
    }

    /// Returns the offset of the current segment in the current piece. The buffer only contains
    /// this piece.
    fn offset_in_piece(&self) -> u32 {
        let done = u32::try_from(self.done).expect("Data-Out is smaller than 4 GiB");
        done - self.data.from()
    }

    /// Validates an incoming piece of Data-Out, and separates its protection information.
    fn accept_piece(&self, context: &mut Context<'_>) -> Result<(), Sense> {
        match &self.integrity {
            // Without any received tuples, there is nothing to compare.
            Some(integrity) if integrity.is_transferred() => {
                let tags = self.data.tags_offset();
                integrity.receive(context.data, self.data.span(0, tags), 0)
            }
            _ => Ok(()),
        }
    }

    /// Returns the index of the first different byte in the segment.
    fn difference(&self, context: &Context<'_>, segment: u32) -> Option<u32> {
        let scratch = self.scratch.data;
        match self.compare {
            Compare::Readable => None,
            Compare::Buffer => {
                first_difference(context.data, scratch, self.offset_in_piece(), segment)
            }
            Compare::OneBlock => (0..segment).step_by(self.block as usize).find_map(|at| {
                first_difference(context.data, scratch + at, 0, self.block).map(|index| at + index)
            }),
        }
    }
}

impl Steps for Verify {
    fn advance(&mut self, context: &mut Context<'_>, _result: StepResult) -> Result<Next, Sense> {
        if self.receiving {
            self.accept_piece(context)?;
            self.receiving = false;
            return Ok(self.read_next_segment());
        }
        // Compare all of the current piece before it's replaced with the next one.
        if let Some(next) = self.compare_segment(context)? {
            return Ok(next);
        }
        if self.done == self.len {
            return Ok(Next::Respond(DataIn::None));
        }
        self.data.advance();
        self.until = self.data.end().into();
        self.receiving = true;
        Ok(self.data.receive())
    }
}
