//! Planning of commands: a CDB is either refused, or results in a plan and a state machine.
//!
//! Each row in the opcode table has a function to create a [`Plan`] from a CDB. When this is
//! called, the checks that are common to all commands have already been done. The plan contains the
//! amount of data to transfer, the buffer size, the first step, and a state machine that will
//! return the following steps.
//!
//! A command family can create a plan for any `M` that its own state machine can be converted to,
//! so it does not depend on the other families. The opcode table uses
//! [`Machine`](super::machine::Machine).

use super::integrity::{Frame, Integrity, Span};
use crate::access::DataAccess;
use crate::cdb::{Cdb, Extent};
use crate::config::TUPLE_LEN;
use crate::lu::LogicalUnit;
use crate::lun::LunId;
use crate::nexus::NexusId;
use crate::sense::{AdditionalSense, Sense};
use crate::step::{BlockOp, DataIn, Expected, StepResult};

/// Number of bytes to transfer according to the CDB, independent of the buffer sizes at the
/// initiator.
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

/// The reason why a command is refused.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Reason {
    /// CHECK CONDITION status, with the given sense data.
    Sense(Sense),
    /// RESERVATION CONFLICT status, without sense data.
    Conflict,
}

/// A command that was refused before the first step.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Refusal {
    pub(crate) reason: Reason,
    /// Number of bytes that would have been transferred, used for the residuals.
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
    /// The unit is reserved by some other nexus.
    pub(crate) fn conflict() -> Self {
        Self {
            reason: Reason::Conflict,
            transfer: Transfer::default(),
        }
    }
}

/// The next step of a command, as requested by the state machine.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) enum Next {
    /// Receive a piece of Data-Out into the buffer, at offset 0.
    Receive {
        from: u32,
        len: u32,
    },
    /// Send a piece of Data-In from the buffer, at offset 0.
    Send {
        from: u32,
        len: u32,
    },
    Block(BlockOp),
    Respond(DataIn),
    /// RESERVATION CONFLICT status, without sense data.
    Conflict,
}

impl Next {
    /// Receives all of the Data-Out at once.
    pub(crate) fn receive(len: u32) -> Self {
        Self::Receive { from: 0, len }
    }
}

/// The piece of data that is currently in the buffer. If the data is longer than the window, we
/// process it in pieces, in order. All values are in bytes on the medium, without any protection
/// information that is transferred with the blocks.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Pieces {
    total: u32,
    window: u32,
    /// Offset of the current piece in the data.
    from: u32,
    frame: Frame,
}

impl Pieces {
    /// Returns a single piece containing all of the data.
    pub(crate) fn whole(total: u32, frame: Frame) -> Self {
        Self {
            total,
            window: total,
            from: 0,
            frame,
        }
    }

    /// Returns the total number of bytes in all pieces.
    pub(crate) fn total(self) -> u32 {
        self.total
    }

    /// Returns the offset of the current piece in the data.
    pub(crate) fn from(self) -> u32 {
        self.from
    }

    /// Returns the length of the current piece. This is never more than the length of the first
    /// piece.
    pub(crate) fn len(self) -> u32 {
        (self.total - self.from).min(self.window)
    }

    /// Returns the offset in the data at which this piece ends.
    pub(crate) fn end(self) -> u32 {
        self.from + self.len()
    }

    /// Moves to the next piece. Returns `false` if this is the last piece.
    pub(crate) fn advance(&mut self) -> bool {
        // We stay at the last piece, so that the length is always valid and never zero.
        let more = self.end() < self.total;
        if more {
            self.from = self.end();
        }
        more
    }

    /// Returns the offset and the length of this piece in the transferred data.
    pub(crate) fn transferred(self) -> (u32, u32) {
        let frame = self.frame;
        (frame.transferred(self.from), frame.transferred(self.len()))
    }

    /// Returns the offset of the protection information in the buffer: after the transferred data
    /// of the longest piece.
    pub(crate) fn tags_offset(self) -> u32 {
        self.frame.transferred(self.total.min(self.window))
    }

    /// Returns the offset in the transferred data for a byte of the data.
    pub(crate) fn transferred_offset(self, at: u64) -> u64 {
        self.frame.offset(at)
    }

    /// Returns the blocks of this piece if they are in the buffer at `data`, and their protection
    /// information at `tags`.
    pub(crate) fn span(self, data: u32, tags: u32) -> Span {
        Span {
            start: self.from.into(),
            len: self.len(),
            data,
            tags,
        }
    }

    /// Returns the step to receive this piece.
    pub(crate) fn receive(self) -> Next {
        let (from, len) = self.transferred();
        Next::Receive { from, len }
    }
}

/// Region of the command buffer. All values are in bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Room {
    /// Offset of the first block.
    pub(crate) data: u32,
    /// Maximum length of the blocks.
    pub(crate) len: u32,
    /// Offset of the protection information, or `None` if the medium has none.
    pub(crate) tags: Option<u32>,
}

impl Room {
    /// Returns the offset of the first block after this region, which is aligned for the backend.
    pub(crate) fn end(self, block: u32) -> u32 {
        match self.tags {
            None => self.data + self.len,
            Some(tags) => (tags + self.len / block * TUPLE_LEN).next_multiple_of(block),
        }
    }
}

/// A valid command that is ready to run.
#[derive(Debug)]
pub(crate) struct Plan<M> {
    pub(crate) transfer: Transfer,
    /// Required size of the data buffer, in bytes.
    pub(crate) buffer_len: u32,
    pub(crate) first: Next,
    /// State machine for the steps after the first one, or `None` if the first step is the
    /// response.
    pub(crate) machine: Option<M>,
}

pub(crate) type PlanResult<M> = Result<Plan<M>, Refusal>;

impl<M> Plan<M> {
    /// Returns GOOD status immediately, without any data to transfer.
    pub(crate) fn good() -> Self {
        Self::nothing(Transfer::default())
    }

    /// Returns GOOD status immediately. No data is transferred, even if the CDB requested some.
    pub(crate) fn nothing(transfer: Transfer) -> Self {
        Self {
            transfer,
            buffer_len: 0,
            first: Next::Respond(DataIn::None),
            machine: None,
        }
    }

    /// Receives a parameter list of `len` bytes at once, then runs `machine`.
    pub(crate) fn list(len: u32, machine: M) -> Self {
        Self {
            transfer: Transfer::data_out(len),
            buffer_len: len,
            first: Next::receive(len),
            machine: Some(machine),
        }
    }

    /// Returns parameter data immediately, truncated to the ALLOCATION LENGTH.
    pub(crate) fn data(mut bytes: Vec<u8>, allocation_length: u32) -> Self {
        bytes.truncate(allocation_length as usize);
        Self {
            transfer: Transfer::data_in(bytes.len() as u32),
            buffer_len: 0,
            first: Next::Respond(DataIn::Inline(bytes)),
            machine: None,
        }
    }
}

/// State machine for the steps of a command after the first one.
pub(crate) trait Steps {
    /// Handles the result of the previous step and returns the next step.
    fn advance(&mut self, context: &mut Context<'_>, result: StepResult) -> Result<Next, Sense>;
}

/// Context for a state machine when it needs to return the next step.
pub(crate) struct Context<'a> {
    pub(crate) lu: &'a LogicalUnit,
    pub(crate) nexus: NexusId,
    pub(crate) data: &'a mut dyn DataAccess,
}

/// Context for a planning function, in addition to the CDB.
pub(crate) struct Planner<'a> {
    pub(crate) lu: &'a LogicalUnit,
    pub(crate) nexus: NexusId,
    /// Buffer sizes at the initiator.
    pub(crate) expected: Expected,
    /// Logical units that are visible to the nexus.
    pub(crate) luns: &'a [LunId],
    /// The LUN used to address this LU is read-only.
    pub(crate) read_only: bool,
}

impl Planner<'_> {
    /// Returns the size of a logical block, in bytes.
    pub(crate) fn block(&self) -> u32 {
        self.lu.config().block_size.bytes()
    }

    /// Converts an extent to a byte range. Returns an error if this is not within the capacity.
    ///
    /// If the extent is empty, it can start immediately after the last block.
    pub(crate) fn byte_range(&self, extent: Extent) -> Result<(u64, u64), Sense> {
        // The LBA is a 64-bit value, so the sum could overflow. The multiplications below are safe
        // because the capacity is limited to 2^63 bytes.
        let capacity = self.lu.capacity_blocks();
        extent
            .lba
            .checked_add(extent.blocks)
            .filter(|&end| end <= capacity)
            .ok_or(Sense::illegal(AdditionalSense::LBA_OUT_OF_RANGE))?;
        let block = u64::from(self.block());
        Ok((extent.lba * block, extent.blocks * block))
    }

    /// Converts an extent to a byte range to be transferred via the data buffer, which is limited
    /// by MAXIMUM TRANSFER LENGTH.
    pub(crate) fn transfer_range(&self, extent: Extent) -> Result<(u64, u32), Sense> {
        let (offset, len) = self.byte_range(extent)?;
        u32::try_from(len)
            .ok()
            .filter(|&len| len <= self.lu.config().limits.max_transfer)
            .map(|len| (offset, len))
            .ok_or(Sense::cdb_field(extent.length_byte, None))
    }

    /// Returns the protection information of a command, or `None` if the medium has none. We use a
    /// separate allocation to avoid larger commands for all other LUs.
    #[inline]
    pub(crate) fn integrity(&self, cdb: &Cdb) -> Option<Box<Integrity>> {
        let protection = self.lu.stored_protection()?;
        Some(Box::new(Integrity::new(self.lu, protection, cdb)))
    }

    /// Returns the size of the blocks of a command.
    pub(crate) fn frame(&self, integrity: Option<&Integrity>) -> Frame {
        Frame::new(self.block(), integrity)
    }

    /// Returns the length of the blocks to receive for a command that needs blocks with `len`
    /// bytes. Both are without any protection information that is transferred with the blocks.
    ///
    /// If the initiator's buffer is too small, we only process the data in this buffer. This must
    /// be a multiple of the block size, because a partial block is an error (see FCP-4 9.4.2.9,
    /// which is also required by libiscsi).
    pub(crate) fn data_out(&self, len: u32, frame: Frame) -> Result<u32, Refusal> {
        // A larger buffer is not an error. The remaining bytes are reported as a residual.
        let offered = self.expected.data_out;
        let wanted = frame.transferred(len);
        if offered >= wanted {
            return Ok(len);
        }
        if offered.is_multiple_of(frame.size()) {
            return Ok(frame.medium_len(offered));
        }
        Err(Self::short_data_out(wanted))
    }

    /// Plans to receive a parameter list at once. The initiator must send all of it.
    pub(crate) fn list<M>(&self, len: u32, machine: M) -> PlanResult<M> {
        // Unlike for WRITE, where we can process only some of the blocks, a truncated list is not
        // reliable, so we don't receive it at all.
        if self.expected.data_out < len {
            return Err(Self::short_data_out(len));
        }
        Ok(Plan::list(len, machine))
    }

    /// Returns the error for a Data-Out buffer that does not match the CDB.
    pub(crate) fn short_data_out(wanted: u32) -> Refusal {
        Refusal {
            reason: Reason::Sense(Sense::illegal(
                AdditionalSense::INVALID_FIELD_IN_INFORMATION_UNIT,
            )),
            transfer: Transfer::data_out(wanted),
        }
    }

    /// Splits the data of a transfer into pieces.
    pub(crate) fn pieces(&self, total: u32, frame: Frame) -> Pieces {
        Pieces {
            window: self.lu.config().window_len(),
            ..Pieces::whole(total, frame)
        }
    }

    /// Returns the region for the current piece, at the start of the buffer.
    pub(crate) fn room(&self, data: Pieces) -> Room {
        // Blocks are first received together with their protection information, which is then moved
        // to the space after it.
        let protection = self.lu.config().protection;
        Room {
            data: 0,
            len: data.len(),
            tags: protection.map(|_| data.tags_offset()),
        }
    }

    /// Returns the region of the buffer after `start`, to be used as scratch space for processing
    /// `total` bytes, up to the segment size.
    pub(crate) fn segment(&self, start: u32, total: u64) -> Room {
        let config = self.lu.config();
        let len = total.min(u64::from(config.segment_len())) as u32;
        Room {
            data: start,
            len,
            tags: config.protection.map(|_| start + len),
        }
    }
}
