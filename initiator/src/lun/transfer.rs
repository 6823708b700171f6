//! Reads and writes of a disk, with protection information if it is transferred.

use std::collections::VecDeque;

use riser_block::{Buffer, BufferPool, SharedBuffer, TakeBuffer};

use super::error::check_whole;
use super::{Lun, LunError};
use crate::engine::{IoCompletion, IoData, IoFuture, ScsiIo};
use crate::protection::{PiError, PiFormat, ProtectedData, ReadMarker};
use crate::request::RequestError;
use crate::scsi::{BlockRange, CdbSize, Command};

/// Maximum share of the pool for protected data that a single command uses.
const COMMAND_SHARE: usize = 4;

/// Direction of a transfer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Transfer {
    Read,
    Write { fua: bool },
}

/// Transfer of protection information.
#[derive(Debug)]
pub(super) struct Prot {
    pub(super) format: PiFormat,
    pub(super) cdb_size: CdbSize,
    pub(super) marker: ReadMarker,
    /// Pool for blocks with their tuples. Only commands in flight own its buffers, so waiting for
    /// one is safe while holding a buffer of the client's pool.
    pub(super) pool: BufferPool,
}

impl Prot {
    /// Returns the maximum transfer length for a command in bytes, without tuples.
    pub(super) fn max_command(&self) -> u32 {
        let len = self.format.fitting_len(self.pool.size() / COMMAND_SHARE);
        u32::try_from(len).unwrap_or(u32::MAX)
    }

    fn create_data(&self, transfer: Transfer, lba: u64, blocks: Buffer, wire: Buffer) -> IoData {
        let Self { format, marker, .. } = *self;
        IoData::Protected(Box::new(match transfer {
            Transfer::Read => ProtectedData::read(format, marker, lba, blocks, wire),
            Transfer::Write { .. } => ProtectedData::write(format, lba, blocks, wire),
        }))
    }
}

impl Lun {
    /// Returns the buffer for `len` bytes with their tuples, or `None` if they have none.
    ///
    /// # Errors
    /// [`LunError::NoMemory`] if there is no buffer: retry after one of the unit's commands
    /// has completed.
    pub(super) fn try_wire(&self, len: usize) -> Result<Option<Buffer>, LunError> {
        let Some(prot) = &self.shared.prot else {
            return Ok(None);
        };
        let wire = prot.pool.try_take(prot.format.interleaved_len(len));
        wire.map(Some).ok_or(LunError::NoMemory)
    }

    /// Returns the blocks of a transfer by a single command.
    fn check_command(&self, offset: u64, len: usize) -> Result<BlockRange, LunError> {
        if len > self.shared.max_command as usize {
            return Err(LunError::OutOfRange);
        }
        self.check_transfer(offset, len)
    }

    /// Returns the command that transfers a whole buffer; `wire` is from [`Self::try_wire`].
    pub(super) fn transfer_io(
        &self,
        transfer: Transfer,
        offset: u64,
        buffer: Buffer,
        wire: Option<Buffer>,
    ) -> Result<ScsiIo, LunError> {
        let range = self.check_command(offset, buffer.len())?;
        if let Some(prot) = &self.shared.prot {
            let wire = wire.ok_or(LunError::NoMemory)?;
            let (size, len) = (prot.cdb_size, wire.len() as u32);
            let command = match transfer {
                Transfer::Read => Command::read_protected(size, range, len),
                Transfer::Write { fua } => Command::write_protected(size, range, len, fua),
            };
            return Ok(self.io(command, prot.create_data(transfer, range.lba, buffer, wire)));
        }
        let (size, len) = (self.shared.info.cdb_size, buffer.len() as u32);
        let command = match transfer {
            Transfer::Read => Command::read_by(size, range, len),
            Transfer::Write { fua } => Command::write_by(size, range, len, fua),
        };
        Ok(self.io(command, IoData::One(buffer)))
    }

    /// Returns a READ for the whole buffer, ready to submit.
    ///
    /// # Errors
    /// [`LunError::OutOfRange`], also if the buffer exceeds the maximum for a single command.
    /// [`LunError::NoMemory`] if there is no memory for protection information: retry after one of
    /// the unit's commands has completed.
    pub fn read_io(&self, offset: u64, buffer: Buffer) -> Result<ScsiIo, LunError> {
        // There is never memory for an excessive length, so check the length first.
        self.check_command(offset, buffer.len())?;
        let wire = self.try_wire(buffer.len())?;
        self.transfer_io(Transfer::Read, offset, buffer, wire)
    }

    /// Returns a WRITE for the whole buffer, ready to submit, with FUA if supported by the unit.
    ///
    /// # Errors
    /// Same as for [`Self::read_io`].
    pub fn write_io(&self, offset: u64, buffer: Buffer, fua: bool) -> Result<ScsiIo, LunError> {
        self.check_command(offset, buffer.len())?;
        let wire = self.try_wire(buffer.len())?;
        let fua = fua && self.shared.info.caching.has_fua;
        self.transfer_io(Transfer::Write { fua }, offset, buffer, wire)
    }

    /// Returns the buffer of a successful transfer, for example of [`Self::write_io`]. Verifies
    /// blocks with protection information that were read.
    ///
    /// # Errors
    /// [`LunError`].
    pub fn completed_buffer(end: IoCompletion) -> Result<Buffer, LunError> {
        match check_whole(end)? {
            IoData::One(buffer) => Ok(buffer),
            IoData::Protected(data) => Ok(data.check_protection()?),
            IoData::None | IoData::Many(_) => Err(RequestError::Closed.into()),
        }
    }

    /// Same as [`Self::completed_buffer`], and records a failed check.
    pub(super) fn complete(&self, end: IoCompletion) -> Result<Buffer, LunError> {
        let buffer = Self::completed_buffer(end);
        if let Err(LunError::Protection(error)) = &buffer {
            self.note_protection_error(*error);
        }
        buffer
    }

    /// Counts a failed check, and logs it with a decreasing rate.
    #[cold]
    fn note_protection_error(&self, error: PiError) {
        let count = self.session.status().count_protection_error(error.check);
        if count.is_power_of_two() {
            let lun = self.shared.info.lun.number();
            tracing::error!(lun, count, "{error}");
        }
    }

    /// Transfers a buffer with as many commands as required by the unit's limit.
    async fn transfer(
        &self,
        transfer: Transfer,
        offset: u64,
        buffer: Buffer,
    ) -> Result<Buffer, LunError> {
        let most = self.shared.max_command as usize;
        if buffer.len() <= most {
            let wire = self.wire(buffer.len()).await?;
            let io = self.transfer_io(transfer, offset, buffer, wire)?;
            return self.complete(self.session.submit(io).await);
        }
        self.check_transfer(offset, buffer.len())?;
        let whole = SharedBuffer::new(buffer);
        let mut at = offset;
        let mut ends = Ends {
            lun: self,
            pending: VecDeque::new(),
            result: Ok(()),
        };
        for piece in whole.pieces(most) {
            let len = piece.len();
            let wire = loop {
                match self.try_wire(len) {
                    // The earlier pieces may own all buffers.
                    Err(LunError::NoMemory) if ends.complete_first().await => {}
                    Err(LunError::NoMemory) => break self.wire(len).await?,
                    wire => break wire?,
                }
            };
            let io = self.transfer_io(transfer, at, piece, wire)?;
            ends.pending.push_back(self.session.submit(io));
            at += len as u64;
        }
        while ends.complete_first().await {}
        ends.result?;
        whole.into_whole().ok_or(RequestError::Closed.into())
    }

    /// Waits for the buffer of [`Self::try_wire`].
    async fn wire(&self, len: usize) -> Result<Option<Buffer>, LunError> {
        match self.try_wire(len) {
            Err(LunError::NoMemory) => {
                let wire = self.take_wire(len);
                let wait = self.session.client().timeout(self.session.timeout(), wire);
                Ok(Some(wait.await?))
            }
            wire => wire,
        }
    }

    /// Returns a future for a buffer for which [`Self::try_wire`] has failed.
    ///
    /// # Panics
    /// Panics if the unit has no protection information.
    pub(super) fn take_wire(&self, len: usize) -> TakeBuffer {
        let prot = self.shared.prot.as_ref().expect("a protected unit");
        prot.pool.take_buffer(prot.format.interleaved_len(len))
    }

    /// Reads into the buffer, starting at `offset`.
    ///
    /// # Errors
    /// [`LunError`].
    pub async fn read(&self, offset: u64, buffer: Buffer) -> Result<Buffer, LunError> {
        if buffer.is_empty() {
            return Ok(buffer);
        }
        self.transfer(Transfer::Read, offset, buffer).await
    }

    /// Writes the buffer at `offset`. With `fua`, it is on the medium afterwards. If the unit does
    /// not support FUA, flushes it even without a volatile cache, because a cache may have been
    /// enabled since.
    ///
    /// # Errors
    /// [`LunError`].
    pub async fn write(&self, offset: u64, buffer: Buffer, fua: bool) -> Result<Buffer, LunError> {
        if buffer.is_empty() {
            return Ok(buffer);
        }
        let has_fua = self.shared.info.caching.has_fua;
        let write = Transfer::Write {
            fua: fua && has_fua,
        };
        let buffer = self.transfer(write, offset, buffer).await?;
        if fua && !has_fua {
            self.flush().await?;
        }
        Ok(buffer)
    }
}

/// Commands of a transfer in flight.
struct Ends<'a> {
    lun: &'a Lun,
    /// In order of submission.
    pending: VecDeque<IoFuture>,
    /// First error.
    result: Result<(), LunError>,
}

impl Ends<'_> {
    /// Waits for the oldest command; returns whether there was one.
    async fn complete_first(&mut self) -> bool {
        let Some(end) = self.pending.pop_front() else {
            return false;
        };
        let ended = self.lun.complete(end.await).map(drop);
        self.result = std::mem::replace(&mut self.result, Ok(())).and(ended);
        true
    }
}
