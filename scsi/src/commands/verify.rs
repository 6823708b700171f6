//! VERIFY (SBC-3 5.36 to 5.38), also as the second half of WRITE AND VERIFY.
//!
//! The medium is read in segments into scratch space behind the Data-Out data
//! and compared there, so a verification of any length needs a fixed buffer.
//! Data-Out that is longer than the window comes in pieces, each of which is
//! compared before the next one is asked for.

use std::ops::Range;

use super::plan::{Context, Next, Pieces, Plan, PlanResult, Planner, Steps, Transfer};
use crate::access::first_difference;
use crate::cdb::Cdb;
use crate::sense::{AdditionalSense, Sense, SenseKey};
use crate::step::{BlockOp, DataIn, StepResult};

/// The other side of the comparison with the medium (the BYTCHK field).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Compare {
    /// Nothing: it must only be readable (00b).
    Readable,
    /// The Data-Out buffer, byte for byte (01b).
    Buffer,
    /// One block of Data-Out, with every block (11b).
    OneBlock,
}

/// A verification in progress.
#[derive(Debug)]
pub(crate) struct Verify {
    /// Byte on the medium where the range starts.
    start: u64,
    /// Bytes of the range.
    len: u64,
    /// Number of bytes already verified.
    done: u64,
    /// End of what can be verified before the next piece of Data-Out.
    until: u64,
    compare: Compare,
    /// Data-Out to compare with.
    data: Pieces,
    /// Place of the scratch space in the command's buffer.
    scratch: Range<u32>,
    block: u32,
    /// Data-Out has not arrived yet.
    receiving: bool,
    /// Reads the stable medium, and not what a READ would give.
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
    // Also what moves no data keeps to the limit (SBC-3 6.5.3): others may wait for its end.
    let (offset, range) = planner.transfer_range(cdb.extent())?;
    let mut len = u64::from(range);
    let wanted = match compare {
        Compare::Readable => 0,
        Compare::Buffer => range,
        Compare::OneBlock => block.min(range),
    };
    // VERIFY without Data-Out (BYTCHK zero) wants nothing, and so takes any buffer.
    let received = planner.data_out(wanted)?;
    if compare != Compare::Readable && received < wanted {
        // Only whole blocks that the initiator offers can be compared.
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
    // Data-Out comes first: with nothing to compare with, the medium would be read in vain.
    let first = if received > 0 {
        verify = verify.after_receive();
        data.receive()
    } else {
        verify.begin()
    };
    Ok(Plan {
        transfer,
        buffer_len,
        first,
        machine: Some(verify.into()),
    })
}

impl Verify {
    /// A verification of `len` bytes from `start`, against Data-Out that lies at the start of the
    /// buffer, with scratch space behind it.
    pub(crate) fn new(
        start: u64,
        len: u64,
        compare: Compare,
        data: Pieces,
        scratch: Range<u32>,
        block: u32,
    ) -> Self {
        // Against Data-Out only the blocks of the piece in the buffer can be compared; the other
        // forms need no further data.
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

    /// The same while Data-Out is still on its way.
    pub(crate) fn after_receive(mut self) -> Self {
        self.receiving = true;
        self
    }

    /// The same against what a READ would give.
    pub(crate) fn of_cache(mut self) -> Self {
        self.stable = false;
        self
    }

    fn segment(&self) -> u32 {
        (self.until - self.done).min(self.scratch.len() as u64) as u32
    }

    /// The read of the next segment. What is verified is the medium, so the
    /// first read makes cached data stable; once is enough for everything that
    /// was written before the command.
    fn begin(&self) -> Next {
        Next::Block(BlockOp::Read {
            offset: self.start + self.done,
            len: self.segment(),
            buffer_offset: self.scratch.start,
            fua: self.stable && self.done == 0,
        })
    }

    /// Verifies only the blocks of one piece of Data-Out.
    pub(crate) fn begin_piece(&mut self, data: Pieces) -> Next {
        self.data = data;
        self.until = data.end().into();
        self.begin()
    }

    /// Compares the segment that was read: the read of the next one, or `None` where there is
    /// nothing more to compare for the moment.
    pub(crate) fn compare_segment(&mut self, context: &Context<'_>) -> Result<Option<Next>, Sense> {
        let segment = self.segment();
        // INFORMATION is the offset from the first byte of the range, so that the initiator finds
        // the byte without knowing our segments.
        if let Some(index) = self.difference(context, segment) {
            return Err(Sense::new(
                SenseKey::Miscompare,
                AdditionalSense::MISCOMPARE_DURING_VERIFY,
            )
            .with_information(self.done + u64::from(index)));
        }
        self.done += u64::from(segment);
        Ok((self.done < self.until).then(|| self.begin()))
    }

    /// Index in the segment of the first byte that differs.
    fn difference(&self, context: &Context<'_>, segment: u32) -> Option<u32> {
        let scratch = self.scratch.start;
        match self.compare {
            Compare::Readable => None,
            Compare::Buffer => {
                // The buffer holds the present piece only, so offsets in the data become offsets
                // in it.
                let done = u32::try_from(self.done).expect("Data-Out is below 4 GiB");
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
            return Ok(self.begin());
        }
        // The piece in the buffer is compared to its end before the next one takes its place.
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
