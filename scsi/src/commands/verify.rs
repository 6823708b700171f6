//! VERIFY (SBC-3 5.36 to 5.38), also used as the second part of WRITE AND VERIFY.
//!
//! We read from the medium in segments and compare them in scratch space, which is located after
//! the Data-Out data in the buffer, so the buffer size doesn't depend on the length to verify. If
//! Data-Out is longer than the window, it is received in pieces, and we compare each piece before
//! we request the next one.

use std::ops::Range;

use super::plan::{Context, Next, Pieces, Plan, PlanResult, Planner, Steps, Transfer};
use crate::access::first_difference;
use crate::cdb::Cdb;
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
    scratch: Range<u32>,
    block: u32,
    /// Set when we are still waiting for Data-Out.
    receiving: bool,
    /// If set, read from stable storage instead of the data that a READ would return.
    stable: bool,
}

/// VERIFY (10), (12) and (16).
pub(crate) fn plan_verify<M: From<Verify>>(planner: &Planner<'_>, cdb: &Cdb) -> PlanResult<M> {
    let block = planner.block();
    let compare = match (cdb.byte(1) >> 1) & 0x3 {
        0 => Compare::Readable,
        1 => Compare::Buffer,
        3 => Compare::OneBlock,
        _ => return Err(Sense::cdb_field(1, Some(2)).into()),
    };
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
    let received = planner.data_out(wanted)?;
    if compare != Compare::Readable && received < wanted {
        // We can only compare complete blocks that are in the initiator's buffer.
        len = if compare == Compare::Buffer {
            u64::from(received)
        } else {
            0
        };
    }
    let transfer = Transfer::data_out(wanted);
    if len == 0 {
        return Ok(Plan::nothing(transfer));
    }
    let data = planner.pieces(received);
    let buffer_len = data.len() + planner.segment(len);
    let scratch = data.len()..buffer_len;
    let mut verify = Verify::new(offset, len, compare, data, scratch, block);
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
        buffer_len,
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
        scratch: Range<u32>,
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
            receiving: false,
            stable: true,
        }
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
        (self.until - self.done).min(self.scratch.len() as u64) as u32
    }

    /// Returns a step to read the next segment. We need to verify the medium, so the first read
    /// will flush cached data to stable storage. It's enough to do this once for any data that was
    /// written before this command.
    fn read_next_segment(&self) -> Next {
        Next::Block(BlockOp::Read {
            offset: self.start + self.done,
            len: self.segment(),
            buffer_offset: self.scratch.start,
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
        // INFORMATION is set to the offset in the range, so that the initiator doesn't need to know
        // about our segments to find the byte.
        if let Some(index) = self.difference(context, segment) {
            return Err(Sense::new(
                SenseKey::Miscompare,
                AdditionalSense::MISCOMPARE_DURING_VERIFY,
            )
            .with_information(self.done + u64::from(index)));
        }
        self.done += u64::from(segment);
        Ok((self.done < self.until).then(|| self.read_next_segment()))
    }

    /// Returns the index of the first different byte in the segment.
    fn difference(&self, context: &Context<'_>, segment: u32) -> Option<u32> {
        let scratch = self.scratch.start;
        match self.compare {
            Compare::Readable => None,
            Compare::Buffer => {
                // The buffer only contains the current piece, so convert the offset in the data to
                // an offset in the buffer.
                let done = u32::try_from(self.done).expect("Data-Out is smaller than 4 GiB");
                first_difference(context.data, scratch, done - self.data.from(), segment)
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
            self.receiving = false;
            return Ok(self.read_next_segment());
        }
        // Compare all of the current piece before it's replaced with the next one.
        if let Some(next) = self.compare_segment(context)? {
            return Ok(next);
        }
        if self.done == self.len {
            return Ok(Next::Answer(DataIn::None));
        }
        self.data.advance();
        self.until = self.data.end().into();
        self.receiving = true;
        Ok(self.data.receive())
    }
}
