//! VERIFY (SBC-3 5.36 to 5.38), also as the second half of WRITE AND VERIFY.
//!
//! The medium is read in segments into scratch space behind the Data-Out data
//! and compared there, so a verification of any length needs a fixed buffer.

use crate::access::first_difference;
use crate::cdb::Cdb;
use crate::plan::{Context, Machine, Next, Plan, PlanResult, Planner, Transfer};
use crate::sense::{AdditionalSense, Sense, SenseKey};
use crate::step::{BlockOp, DataIn};

/// What the medium is compared with (the BYTCHK field).
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
    /// Bytes already verified.
    done: u64,
    compare: Compare,
    /// Where the scratch space is in the command's buffer.
    scratch_offset: u32,
    /// Its length.
    scratch_len: u32,
    block: u32,
    /// Whether Data-Out is still on its way.
    receiving: bool,
    /// Whether the stable medium is looked at, or whatever a READ would give.
    stable: bool,
}

/// VERIFY (10), (12) and (16).
pub(crate) fn plan_verify(planner: &Planner<'_>, cdb: &Cdb) -> PlanResult {
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
    let received = planner.data_out(wanted)?;
    if compare != Compare::Readable && received < wanted {
        // Only whole blocks that the initiator offers can be compared.
        len = if compare == Compare::Buffer {
            u64::from(received)
        } else {
            0
        };
    }
    let transfer = Transfer {
        data_in: 0,
        data_out: wanted,
    };
    if len == 0 {
        return Ok(Plan {
            transfer,
            ..Plan::good()
        });
    }
    let scratch = planner.segment(len);
    let mut verify = Verify::new(offset, len, compare, received, scratch, block);
    let first = if received > 0 {
        verify = verify.after_receive();
        Next::Receive(received)
    } else {
        verify.begin()
    };
    Ok(Plan {
        transfer,
        buffer_len: received + scratch,
        first,
        machine: Machine::Verify(verify),
    })
}

impl Verify {
    /// A verification of `len` bytes from `start`, with scratch space behind
    /// the first `received` bytes of the buffer.
    pub(crate) fn new(
        start: u64,
        len: u64,
        compare: Compare,
        received: u32,
        scratch_len: u32,
        block: u32,
    ) -> Self {
        Self {
            start,
            len,
            done: 0,
            compare,
            scratch_offset: received,
            scratch_len,
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

    fn piece(&self) -> u32 {
        (self.len - self.done).min(u64::from(self.scratch_len)) as u32
    }

    /// The read of the next piece. What is verified is the medium, so the
    /// first read makes cached data stable; once is enough for everything that
    /// was written before the command.
    pub(crate) fn begin(&mut self) -> Next {
        Next::Block(BlockOp::Read {
            offset: self.start + self.done,
            len: self.piece(),
            buffer_offset: self.scratch_offset,
            fua: self.stable && self.done == 0,
        })
    }

    pub(crate) fn advance(&mut self, context: &mut Context<'_>) -> Result<Next, Sense> {
        if self.receiving {
            self.receiving = false;
            return Ok(self.begin());
        }
        let piece = self.piece();
        if let Some(index) = self.difference(context, piece) {
            return Err(Sense::new(
                SenseKey::Miscompare,
                AdditionalSense::MISCOMPARE_DURING_VERIFY,
            )
            .with_information(self.done + u64::from(index)));
        }
        self.done += u64::from(piece);
        if self.done < self.len {
            Ok(self.begin())
        } else {
            Ok(Next::Answer(DataIn::None))
        }
    }

    /// Index in the piece of the first byte that differs.
    fn difference(&self, context: &Context<'_>, piece: u32) -> Option<u32> {
        match self.compare {
            Compare::Readable => None,
            Compare::Buffer => {
                let expected = u32::try_from(self.done).expect("Data-Out is below 4 GiB");
                first_difference(context.data, self.scratch_offset, expected, piece)
            }
            Compare::OneBlock => (0..piece).step_by(self.block as usize).find_map(|at| {
                first_difference(context.data, self.scratch_offset + at, 0, self.block)
                    .map(|index| at + index)
            }),
        }
    }
}
