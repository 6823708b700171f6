//! What a CDB turns into: either a refusal, or a plan whose machine runs on.
//!
//! Every row of the opcode table names a function that makes a [`Plan`] from a CDB that has already
//! passed the checks all commands share. The plan says how much data the command would move, how
//! large a buffer it needs, its first step, and the machine that decides the following ones.
//!
//! A family of commands makes plans for any `M` that its own machine fits in, and so knows nothing
//! of the others; the opcode table chooses [`Machine`](super::machine::Machine).

use crate::access::DataAccess;
use crate::cdb::Extent;
use crate::lu::LogicalUnit;
use crate::lun::LunId;
use crate::nexus::NexusId;
use crate::sense::{AdditionalSense, Sense};
use crate::step::{BlockOp, DataIn, Expected, StepResult};

/// Bytes a CDB asks to move, regardless of the initiator's buffers.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) struct Transfer {
    pub(crate) data_in: u32,
    pub(crate) data_out: u32,
}

impl Transfer {
    pub(crate) fn data_in(len: u32) -> Self {
        Self {
            data_in: len,
            data_out: 0,
        }
    }

    pub(crate) fn data_out(len: u32) -> Self {
        Self {
            data_in: 0,
            data_out: len,
        }
    }
}

/// Reason of a refusal.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Reason {
    /// CHECK CONDITION with this.
    Sense(Sense),
    /// RESERVATION CONFLICT status, without sense data.
    Conflict,
}

/// A command that is refused before its first step.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Refusal {
    pub(crate) reason: Reason,
    /// Bytes that it would have moved, for residuals.
    pub(crate) transfer: Transfer,
}

impl From<Sense> for Refusal {
    fn from(sense: Sense) -> Self {
        Self {
            reason: Reason::Sense(sense),
            transfer: Transfer::default(),
        }
    }
}

impl Refusal {
    /// Another nexus has reserved the unit.
    pub(crate) fn conflict() -> Self {
        Self {
            reason: Reason::Conflict,
            transfer: Transfer::default(),
        }
    }
}

/// A command's next wish, from its machine.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) enum Next {
    /// A piece of Data-Out to the start of the buffer.
    Receive {
        from: u32,
        len: u32,
    },
    /// A piece of Data-In from the start of the buffer.
    Send {
        from: u32,
        len: u32,
    },
    Block(BlockOp),
    Answer(DataIn),
    /// RESERVATION CONFLICT status, without sense data.
    Conflict,
}

impl Next {
    /// All of the Data-Out of a command that needs it in one piece.
    pub(crate) fn receive(len: u32) -> Self {
        Self::Receive { from: 0, len }
    }
}

/// The piece of a command's data that is in its buffer. Data that are longer than the window go
/// through the buffer in pieces, first to last.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Pieces {
    total: u32,
    window: u32,
    /// Offset of the present piece in the data.
    from: u32,
}

impl Pieces {
    /// The first piece of `total` bytes.
    pub(crate) fn new(total: u32, window: u32) -> Self {
        Self {
            total,
            window,
            from: 0,
        }
    }

    /// All of the data as one piece.
    pub(crate) fn whole(total: u32) -> Self {
        Self::new(total, total)
    }

    /// Bytes of all pieces.
    pub(crate) fn total(self) -> u32 {
        self.total
    }

    /// Offset of the piece in the data.
    pub(crate) fn from(self) -> u32 {
        self.from
    }

    /// Its length; no piece is longer than the first one.
    pub(crate) fn len(self) -> u32 {
        (self.total - self.from).min(self.window)
    }

    /// Offset of the end of the piece in the data.
    pub(crate) fn end(self) -> u32 {
        self.from + self.len()
    }

    /// Goes on to the next piece, if there is one.
    pub(crate) fn advance(&mut self) -> bool {
        // It never leaves the last piece, so the length is always that of a piece, and not zero.
        let more = self.end() < self.total;
        if more {
            self.from = self.end();
        }
        more
    }

    /// The step that brings the piece.
    pub(crate) fn receive(self) -> Next {
        Next::Receive {
            from: self.from,
            len: self.len(),
        }
    }
}

/// A legal command, ready to run.
#[derive(Debug)]
pub(crate) struct Plan<M> {
    pub(crate) transfer: Transfer,
    /// Bytes of data buffer.
    pub(crate) buffer_len: u32,
    pub(crate) first: Next,
    /// The machine for the steps after the first one; `None` where that is the answer.
    pub(crate) machine: Option<M>,
}

pub(crate) type PlanResult<M> = Result<Plan<M>, Refusal>;

impl<M> Plan<M> {
    /// Done at once, nothing to move.
    pub(crate) fn good() -> Self {
        Self::nothing(Transfer::default())
    }

    /// Done at once: there is nothing to move of what the CDB asks for.
    pub(crate) fn nothing(transfer: Transfer) -> Self {
        Self {
            transfer,
            buffer_len: 0,
            first: Next::Answer(DataIn::None),
            machine: None,
        }
    }

    /// A parameter list of `len` bytes, in one piece, for `machine`.
    pub(crate) fn list(len: u32, machine: M) -> Self {
        Self {
            transfer: Transfer::data_out(len),
            buffer_len: len,
            first: Next::receive(len),
            machine: Some(machine),
        }
    }

    /// Done at once with parameter data, cut to the ALLOCATION LENGTH.
    pub(crate) fn data(mut bytes: Vec<u8>, allocation_length: u32) -> Self {
        bytes.truncate(allocation_length as usize);
        Self {
            transfer: Transfer::data_in(bytes.len() as u32),
            buffer_len: 0,
            first: Next::Answer(DataIn::Inline(bytes)),
            machine: None,
        }
    }
}

/// The steps of a command after its first one.
pub(crate) trait Steps {
    /// Takes the result of the last step, decides the next.
    fn advance(&mut self, context: &mut Context<'_>, result: StepResult) -> Result<Next, Sense>;
}

/// The view of a machine while it decides.
pub(crate) struct Context<'a> {
    pub(crate) lu: &'a LogicalUnit,
    pub(crate) nexus: NexusId,
    pub(crate) data: &'a mut dyn DataAccess,
}

/// The view of a planning function, besides the CDB.
pub(crate) struct Planner<'a> {
    pub(crate) lu: &'a LogicalUnit,
    pub(crate) nexus: NexusId,
    /// The initiator's buffer lengths.
    pub(crate) expected: Expected,
    /// The logical units that the nexus may see.
    pub(crate) luns: &'a [LunId],
    /// The LUN by which the unit is addressed is read-only.
    pub(crate) read_only: bool,
}

impl Planner<'_> {
    /// Bytes per logical block.
    pub(crate) fn block(&self) -> u32 {
        self.lu.config().block_size.bytes()
    }

    /// Byte range of an extent that lies inside the capacity.
    ///
    /// A run of zero blocks may start right behind the last block.
    pub(crate) fn byte_range(&self, extent: Extent) -> Result<(u64, u64), Sense> {
        // The sum is checked, since an LBA of 64 bits may wrap it. The products below cannot: a
        // unit has 2^63 bytes at most.
        let capacity = self.lu.capacity_blocks();
        extent
            .lba
            .checked_add(extent.blocks)
            .filter(|&end| end <= capacity)
            .ok_or(Sense::illegal(AdditionalSense::LBA_OUT_OF_RANGE))?;
        let block = u64::from(self.block());
        Ok((extent.lba * block, extent.blocks * block))
    }

    /// Byte range of an extent that moves through the data buffer, so that
    /// MAXIMUM TRANSFER LENGTH applies.
    pub(crate) fn transfer_range(&self, extent: Extent) -> Result<(u64, u32), Sense> {
        let (offset, len) = self.byte_range(extent)?;
        u32::try_from(len)
            .ok()
            .filter(|&len| len <= self.lu.config().limits.max_transfer)
            .map(|len| (offset, len))
            .ok_or(Sense::cdb_field(extent.length_byte, None))
    }

    /// Bytes of Data-Out to fetch for a command that wants `wanted` bytes.
    ///
    /// Without an initiator buffer for all of it, only what the initiator
    /// offers is processed, as long as these are whole blocks; a part of a
    /// block is refused (as FCP-4 9.4.2.9 does, which libiscsi demands too).
    pub(crate) fn data_out(&self, wanted: u32) -> Result<u32, Refusal> {
        // A longer buffer is no error: what the command does not take is a residual.
        let offered = self.expected.data_out;
        if offered >= wanted {
            return Ok(wanted);
        }
        if offered.is_multiple_of(self.block()) {
            return Ok(offered);
        }
        Err(Self::short_data_out(wanted))
    }

    /// A parameter list in one piece: the initiator must offer all of it.
    pub(crate) fn list<M>(&self, len: u32, machine: M) -> PlanResult<M> {
        // A part of a list says nothing reliable, so it is not taken at all, unlike a part of the
        // blocks of a WRITE.
        if self.expected.data_out < len {
            return Err(Self::short_data_out(len));
        }
        Ok(Plan::list(len, machine))
    }

    /// The Data-Out buffer does not fit what the CDB says.
    pub(crate) fn short_data_out(wanted: u32) -> Refusal {
        Refusal {
            reason: Reason::Sense(Sense::illegal(
                AdditionalSense::INVALID_FIELD_IN_INFORMATION_UNIT,
            )),
            transfer: Transfer::data_out(wanted),
        }
    }

    /// The data of a transfer, piece by piece.
    pub(crate) fn pieces(&self, total: u32) -> Pieces {
        Pieces::new(total, self.lu.config().limits.window)
    }

    /// Scratch for working through `total` bytes, at most one segment.
    pub(crate) fn segment(&self, total: u64) -> u32 {
        total.min(u64::from(self.lu.config().limits.segment)) as u32
    }
}
