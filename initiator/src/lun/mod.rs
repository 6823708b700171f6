//! Logical units: discovery, reading and writing.
//!
//! - [`Session::lun`]: discovers a logical unit and returns a [`Lun`]; [`Session::luns`] lists the
//!   available ones.
//! - [`Lun`]: supports reads, writes, flushes, discards, zeroing, and arbitrary commands. It is a
//!   [`BlockDevice`], so all exports can serve it.
//! - [`LunInfo`]: capacity, limits, identity.
//!
//! Offsets and lengths are in bytes, and multiples of the block size. Every call completes within
//! the unit's timeout, including reconnects.

mod error;
mod info;
mod transfer;
mod waiting;
mod workload;

use std::future::Future;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::Waker;
use std::time::Duration;

use riser_block::{
    BlockDevice, BlockError, Buffer, BufferPool, Extent, ExtentKind, Geometry, Service, Workload,
    ZeroOptions,
};
use riser_scsi::data::lba_status;

pub use self::error::LunError;
use self::error::check_response;
pub use self::info::LunInfo;
use self::transfer::Prot;
use crate::engine::{IoCompletion, IoData, IoFuture, ScsiIo, Session};
use crate::protection::PiFormat;
use crate::request::{Cdb, DataLen, Retry};
use crate::scsi::{BlockRange, Command, UNMAP_LIST_LEN};
use crate::unit::Losses;

/// Maximum number of runs per GET LBA STATUS.
const STATUS_RUNS: usize = 64;
const STATUS_LEN: u32 = (lba_status::HEADER_LEN + lba_status::DESCRIPTOR_LEN * STATUS_RUNS) as u32;

#[derive(Debug)]
struct LunShared {
    info: LunInfo,
    geometry: Geometry,
    /// Maximum transfer length for a command in bytes.
    max_command: u32,
    /// Protection information is transferred.
    prot: Option<Prot>,
    /// WRITE SAME was not rejected yet.
    writes_same: AtomicBool,
    /// While this exists, the session ensures that the unit does not change.
    losses: Arc<Losses>,
}

/// A disk of a target. Clones share the disk.
#[derive(Clone, Debug)]
pub struct Lun {
    session: Session,
    shared: Arc<LunShared>,
}

impl Lun {
    /// Returns the properties found when it was opened.
    #[must_use]
    pub fn info(&self) -> &LunInfo {
        &self.shared.info
    }

    /// Returns the format of the transferred protection information, if there is any. The target
    /// may be protected even if there is none; see [`LunInfo::protection`].
    #[must_use]
    pub fn protection(&self) -> Option<PiFormat> {
        self.shared.prot.as_ref().map(|prot| prot.format)
    }

    /// Returns its session.
    #[must_use]
    pub fn session(&self) -> &Session {
        &self.session
    }

    /// Returns the pool for its buffers.
    #[must_use]
    pub fn buffers(&self) -> &BufferPool {
        self.session.client().buffers()
    }

    /// Returns the same disk with a different timeout for each call.
    #[must_use]
    pub fn with_timeout(mut self, timeout: Duration) -> Self {
        self.session = self.session.with_timeout(timeout);
        self
    }

    fn io(&self, command: Command, data: IoData) -> ScsiIo {
        ScsiIo::new(self.shared.info.lun, command, data, self.session.timeout())
    }

    /// Returns the blocks of a byte range. The range must consist of whole blocks within the disk.
    fn blocks(&self, offset: u64, len: u64) -> Result<BlockRange, LunError> {
        let geometry = &self.shared.geometry;
        let block = u64::from(geometry.block_size);
        let aligned = offset.is_multiple_of(block) && len.is_multiple_of(block);
        if !aligned || !geometry.contains(offset, len) {
            return Err(LunError::OutOfRange);
        }
        Ok(BlockRange {
            lba: offset / block,
            blocks: u32::try_from(len / block).map_err(|_| LunError::OutOfRange)?,
        })
    }

    fn check_transfer(&self, offset: u64, len: usize) -> Result<BlockRange, LunError> {
        if len > self.shared.geometry.max_transfer as usize {
            return Err(LunError::OutOfRange);
        }
        self.blocks(offset, len as u64)
    }

    /// Flushes all acknowledged writes to the medium.
    ///
    /// # Errors
    /// [`LunError`].
    pub async fn flush(&self) -> Result<(), LunError> {
        let io = self.flush_io();
        self.check_flush(self.session.submit(io).await)
    }

    fn flush_io(&self) -> ScsiIo {
        self.io(Command::synchronize_cache(), IoData::None)
    }

    fn check_flush(&self, end: IoCompletion) -> Result<(), LunError> {
        match check_response(&end.result?) {
            // The command is optional (SBC-3 clause 5.1), and without a cache there is nothing to
            // flush.
            Err(error) if error.is_unknown_command() && !self.shared.info.caching.write_cache => {
                Ok(())
            }
            result => result,
        }
    }

    /// Executes an arbitrary command. The length of `data` must equal the length in `len`. The
    /// response is returned unchanged, and there are no retries, except after a lost connection if
    /// this is safe.
    pub fn scsi(&self, cdb: Cdb, len: DataLen, data: IoData) -> IoFuture {
        let mut io = self.io(Command::raw(cdb, len), data);
        io.retry = Retry::Never;
        self.session.submit(io)
    }

    /// Splits a byte range into runs of at most `max` bytes. The iterator is lazy, because a
    /// target's limits may be so small that a list would exceed the memory.
    fn runs(
        &self,
        range: &Range<u64>,
        max: u64,
    ) -> Result<impl Iterator<Item = BlockRange> + Send + use<>, LunError> {
        let block = u64::from(self.shared.geometry.block_size);
        let len = range
            .end
            .checked_sub(range.start)
            .ok_or(LunError::OutOfRange)?;
        let aligned = range.start.is_multiple_of(block) && len.is_multiple_of(block);
        if !aligned || !self.shared.geometry.contains(range.start, len) {
            return Err(LunError::OutOfRange);
        }
        Ok(split(range.start / block..range.end / block, max / block))
    }

    /// Informs the disk that the contents of the range are no longer needed.
    ///
    /// # Errors
    /// [`LunError::Unsupported`] if the disk does not support this.
    pub async fn discard(&self, range: Range<u64>) -> Result<(), LunError> {
        let geometry = &self.shared.geometry;
        if geometry.max_discard == 0 {
            return Err(LunError::Unsupported);
        }
        let unmaps = self.unmaps();
        for run in self.runs(&range, geometry.max_discard)? {
            if unmaps {
                let buffer = self.session.buffer(UNMAP_LIST_LEN.into()).await?;
                let io = self.unmap_io(run, buffer);
                check_response(&self.session.submit(io).await.result?)?;
            } else {
                self.write_same(run, true).await?;
            }
        }
        Ok(())
    }

    /// Returns whether blocks are deallocated with UNMAP instead of WRITE SAME.
    fn unmaps(&self) -> bool {
        let info = &self.shared.info;
        info.provisioning.unmap && info.limits.max_unmap > 0
    }

    /// Returns a WRITE SAME of zeroes.
    fn write_same_io(&self, run: BlockRange, unmap: bool) -> ScsiIo {
        let block = self.shared.geometry.block_size;
        let buffer = self.buffers().zeroes(block.into());
        self.io(Command::write_same(run, block, unmap), IoData::One(buffer))
    }

    async fn write_same(&self, run: BlockRange, unmap: bool) -> Result<(), LunError> {
        let io = self.write_same_io(run, unmap);
        check_response(&self.session.submit(io).await.result?)
    }

    /// Fills the range with zeroes, with a zeroing command if the disk supports it, or otherwise by
    /// writing them as data.
    ///
    /// # Errors
    /// [`LunError`]. [`LunError::Unsupported`] for `fast` if the disk does not support the command.
    pub async fn write_zeroes(
        &self,
        range: Range<u64>,
        options: ZeroOptions,
    ) -> Result<(), LunError> {
        let info = &self.shared.info;
        let unmap = options.may_unmap && info.provisioning.write_same && info.capacity.reads_zeroes;
        let mut at = range.start;
        if self.shared.writes_same.load(Ordering::Relaxed) {
            for run in self.runs(&range, self.shared.geometry.max_write_zeroes)? {
                match self.write_same(run, unmap).await {
                    Ok(()) => {
                        at += u64::from(run.blocks) * u64::from(self.shared.geometry.block_size);
                    }
                    Err(error) if error.is_unsupported() => {
                        // The disk would reject further commands, too, so write the remaining
                        // zeroes as data.
                        self.shared.writes_same.store(false, Ordering::Relaxed);
                        break;
                    }
                    Err(e) => return Err(e),
                }
            }
        }
        if options.fast && at < range.end {
            return Err(LunError::Unsupported);
        }
        self.write_zero_data(at..range.end).await?;
        if options.fua {
            self.flush().await?;
        }
        Ok(())
    }

    /// Writes zeroes as data.
    async fn write_zero_data(&self, range: Range<u64>) -> Result<(), LunError> {
        let geometry = &self.shared.geometry;
        let len = range.end.saturating_sub(range.start);
        let most = len.min(geometry.split_len().into());
        let mut zeroes = self.buffers().zeroes(most);
        for run in self.runs(&range, zeroes.len() as u64)? {
            // Only the last run may be shorter.
            zeroes.set_len((run.blocks * geometry.block_size) as usize);
            let offset = run.lba * u64::from(geometry.block_size);
            zeroes = self.write(offset, zeroes, false).await?;
        }
        Ok(())
    }

    /// Queries the extents of a range, from its start up to the end reported by a single command.
    ///
    /// # Errors
    /// [`LunError`].
    pub async fn status(&self, range: Range<u64>) -> Result<Vec<Extent>, LunError> {
        if self.runs(&range, u64::MAX)?.next().is_none() {
            return Err(LunError::OutOfRange);
        }
        let len = range.end - range.start;
        let whole = vec![Extent {
            len,
            kind: ExtentKind::Data,
        }];
        if !self.shared.geometry.reports_status {
            return Ok(whole);
        }
        let block = u64::from(self.shared.geometry.block_size);
        let command = Command::lba_status(range.start / block, STATUS_LEN);
        let data = match self.session.fetch(self.shared.info.lun, command).await {
            Ok(data) => data,
            Err(error) if error.is_illegal_request() => return Ok(whole),
            Err(e) => return Err(e),
        };
        let mut at = range.start;
        let mut extents = Vec::new();
        for run in lba_status::parse(&data) {
            let start = run.lba.saturating_mul(block);
            let end = start.saturating_add(u64::from(run.blocks) * block);
            // The first run may start before the range; all other runs must be contiguous.
            if start > at || end <= at || at >= range.end {
                break;
            }
            let kind = match run.status {
                lba_status::DEALLOCATED if self.shared.info.capacity.reads_zeroes => {
                    ExtentKind::Hole
                }
                _ => ExtentKind::Data,
            };
            let end = end.min(range.end);
            extents.push(Extent {
                len: end - at,
                kind,
            });
            at = end;
        }
        Ok(if extents.is_empty() { whole } else { extents })
    }
}

/// Splits a range of block addresses into runs of at most `max` blocks.
fn split(blocks: Range<u64>, max: u64) -> impl Iterator<Item = BlockRange> + Send {
    let step = max.clamp(1, u32::MAX.into());
    let mut lba = blocks.start;
    std::iter::from_fn(move || {
        let run = BlockRange {
            lba,
            blocks: step.min(blocks.end - lba) as u32,
        };
        lba += u64::from(run.blocks);
        (run.blocks > 0).then_some(run)
    })
}

#[cfg(test)]
impl Lun {
    /// Starts a workload, which also runs without a thread.
    pub(crate) fn start_workload(&self, workload: Box<dyn Workload>) {
        workload::start(self, workload);
    }
}

impl BlockDevice for Lun {
    fn geometry(&self) -> &Geometry {
        &self.shared.geometry
    }

    fn try_buffer(&self, len: usize) -> Option<Buffer> {
        self.buffers().try_take(len)
    }

    fn buffer_bytes(&self) -> u64 {
        self.session.client().unreserved_bytes() as u64
    }

    fn wake_when_free(&self, waker: &Waker) {
        self.buffers().wake_when_free(waker);
    }

    fn losses(&self) -> u64 {
        self.shared.losses.count()
    }

    fn buffer(&self, len: usize) -> impl Future<Output = Buffer> + Send {
        self.buffers().take_buffer(len)
    }

    fn host(&self, service: Box<dyn Service>) -> Result<(), Box<dyn Service>> {
        self.session.client().host(service)
    }

    fn drive(&self, workload: Box<dyn Workload>) -> Result<(), Box<dyn Workload>> {
        workload::drive(self, workload)
    }

    async fn read(&self, offset: u64, buffer: Buffer) -> Result<Buffer, BlockError> {
        Ok(Self::read(self, offset, buffer).await?)
    }

    async fn write(&self, offset: u64, buffer: Buffer, fua: bool) -> Result<Buffer, BlockError> {
        Ok(Self::write(self, offset, buffer, fua).await?)
    }

    async fn flush(&self) -> Result<(), BlockError> {
        Ok(Self::flush(self).await?)
    }

    async fn discard(&self, range: Range<u64>) -> Result<(), BlockError> {
        Ok(Self::discard(self, range).await?)
    }

    async fn write_zeroes(
        &self,
        range: Range<u64>,
        options: ZeroOptions,
    ) -> Result<(), BlockError> {
        Ok(Self::write_zeroes(self, range, options).await?)
    }

    async fn status(&self, range: Range<u64>) -> Result<Vec<Extent>, BlockError> {
        Ok(Self::status(self, range).await?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn range_is_split_lazily() {
        let run = |lba, blocks| BlockRange { lba, blocks };
        let parts: Vec<_> = split(10..20, 4).collect();
        assert_eq!(parts, [run(10, 4), run(14, 4), run(18, 2)]);
        // A target with a limit of one block, and all possible block addresses.
        let mut parts = split(0..u64::MAX, 1);
        assert_eq!(parts.nth(2), Some(run(2, 1)));
        assert_eq!(split(0..1 << 40, u64::MAX).next(), Some(run(0, u32::MAX)));
        assert_eq!(split(7..7, 4).next(), None);
    }
}
