//! Logical units: what they are, and reading and writing them.
//!
//! - [`Session::lun`]: finds out what a logical unit is and gives a [`Lun`]; [`Session::luns`] lists
//!   those there are.
//! - [`Lun`]: reads, writes, flushes, discards, zeroes, and any other command. It is a
//!   [`BlockDevice`], so every export serves it.
//! - [`LunInfo`]: capacity, limits, identity.
//!
//! Offsets and lengths are bytes, and multiples of the block size. Every call ends within the
//! unit's timeout, reconnections included.

use std::future::Future;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::Waker;
use std::time::Duration;

use riser_scsi::lun::LunId;
use riser_scsi::sense::{AdditionalSense, Sense, SenseKey};

use crate::block::{BlockDevice, BlockError, Buffer, Extent, ExtentKind, Geometry, ZeroOptions};
use crate::engine::{BufferPool, IoData, IoEnd, IoFuture, ScsiIo, Session};
use crate::scsi::{
    BlockLimits, BlockRange, CachingPage, Capacity, Command, Identity, Inquiry, Provisioning,
    parse_lba_status, parse_luns, unmap_list, vpd_body,
};
use crate::srp::channel::{Cdb, DataLen};
use crate::srp::request::{Answer, GOOD, RequestError, Retry};

/// How long a call may take unless told otherwise.
pub const DEFAULT_TIMEOUT: Duration = Duration::from_secs(60);

/// Largest transfer of one command, whatever the target would take.
const MAX_TRANSFER: u32 = 4 << 20;

/// Runs that one GET LBA STATUS asks for.
const STATUS_RUNS: u32 = 64;

/// SCSI status RESERVATION CONFLICT.
const RESERVATION_CONFLICT: u8 = 0x18;

/// Why an operation on a logical unit failed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LunError {
    /// There is no answer.
    #[error(transparent)]
    Request(#[from] RequestError),
    /// CHECK CONDITION.
    #[error("{key:?}, additional sense {:02x}h/{:02x}h", .additional.code, .additional.qualifier)]
    Check {
        /// Sense key.
        key: SenseKey,
        /// Additional sense code and qualifier.
        additional: AdditionalSense,
    },
    /// Another status than GOOD, or CHECK CONDITION without sense data.
    #[error("status {0:#04x}")]
    Status(u8),
    /// The command moved less than it should have.
    #[error("{got} of {want} bytes transferred")]
    Short {
        /// Bytes asked for.
        want: u32,
        /// Bytes moved.
        got: u32,
    },
    /// What the target told of the unit cannot be.
    #[error("target's {0} cannot be worked with")]
    Malformed(&'static str),
    /// There is no disk of that number.
    #[error("logical unit {0} is not a disk, or not there")]
    NotADisk(u32),
    /// The number is beyond what a logical unit can have.
    #[error("no logical unit can have number {0}")]
    Number(u32),
    /// Offset or length is not a multiple of the block size, or beyond the end, or too long.
    #[error("range is not within the disk's bounds")]
    OutOfRange,
    /// The logical unit does not do that.
    #[error("not supported by the logical unit")]
    Unsupported,
}

impl From<LunError> for BlockError {
    fn from(error: LunError) -> Self {
        let text = error.to_string();
        match error {
            LunError::Request(RequestError::TimedOut) => Self::TimedOut,
            LunError::Request(RequestError::ConnectionLost | RequestError::Closed) => {
                Self::Disconnected(text)
            }
            LunError::Check { key, additional } => match (key, additional.code) {
                (SenseKey::MediumError, _) => Self::Medium(text),
                (SenseKey::DataProtect, 0x27) if additional.qualifier == 0x07 => Self::NoSpace,
                (SenseKey::DataProtect, _) => Self::ReadOnly,
                (SenseKey::IllegalRequest, 0x20 | 0x24) => Self::Unsupported,
                (SenseKey::IllegalRequest, 0x21) => Self::OutOfRange,
                _ => Self::Io(text),
            },
            LunError::Status(RESERVATION_CONFLICT) => Self::ReservationConflict,
            LunError::OutOfRange => Self::OutOfRange,
            LunError::Unsupported => Self::Unsupported,
            _ => Self::Io(text),
        }
    }
}

/// Judges an answer: GOOD, or why not.
fn judge(answer: &Answer) -> Result<(), LunError> {
    if answer.status == GOOD {
        return Ok(());
    }
    match answer.sense() {
        Some(Sense {
            key, additional, ..
        }) if answer.status == 0x02 => Err(LunError::Check { key, additional }),
        _ => Err(LunError::Status(answer.status)),
    }
}

/// Judges the end of a command that must have moved all of its data, and gives its memory.
fn judge_whole(end: IoEnd) -> Result<IoData, LunError> {
    let answer = end.result?;
    judge(&answer)?;
    let want = end.data.len() as u32;
    if answer.transferred == want {
        Ok(end.data)
    } else {
        let got = answer.transferred;
        Err(LunError::Short { want, got })
    }
}

/// What a logical unit is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LunInfo {
    /// Its number.
    pub lun: LunId,
    /// Who made it.
    pub inquiry: Inquiry,
    /// Serial number and designators.
    pub identity: Identity,
    /// Size.
    pub capacity: Capacity,
    /// Limits.
    pub limits: BlockLimits,
    /// What deallocation it knows.
    pub provisioning: Provisioning,
    /// Caching and write protection.
    pub caching: CachingPage,
}

impl LunInfo {
    fn geometry(&self, pool: usize) -> Geometry {
        let block = self.capacity.block_size;
        let bytes = |blocks: u64| blocks.saturating_mul(block.into());
        let reported = match self.limits.max_transfer {
            0 => u64::MAX,
            blocks => bytes(blocks.into()),
        };
        // A quarter of the pool, so that a few transfers are always possible at once.
        let ours = u64::from(MAX_TRANSFER).min(pool as u64 / 4);
        let max_transfer = reported.min(ours).max(block.into()) as u32;
        let runs = u64::from(u32::MAX);
        let max_discard = if self.provisioning.unmap {
            match self.limits.max_unmap {
                0 => 0,
                blocks => bytes(blocks.into()),
            }
        } else {
            0
        };
        let same = match self.limits.max_write_same {
            0 => runs,
            blocks => blocks.min(runs),
        };
        let max_discard = match max_discard {
            0 if self.provisioning.write_same => bytes(same),
            n => n,
        };
        Geometry {
            block_size: block,
            physical_block_size: block << self.capacity.physical_exponent.min(8),
            capacity: bytes(self.capacity.blocks),
            max_transfer: max_transfer - max_transfer % block,
            max_discard,
            max_write_zeroes: bytes(same),
            reports_status: self.capacity.provisioning,
            read_only: self.caching.write_protected,
            volatile_cache: self.caching.write_cache,
        }
    }
}

impl Session {
    /// Sends a command with data-in to a logical unit and gives what was transferred.
    async fn fetch(&self, lun: LunId, command: Command) -> Result<Vec<u8>, LunError> {
        let DataLen::In(len) = command.len else {
            return Err(LunError::OutOfRange);
        };
        let buffer = self.client().buffers().take(len as usize).await;
        let data = IoData::One(buffer);
        let end = self
            .submit(ScsiIo::new(lun, command, data, DEFAULT_TIMEOUT))
            .await;
        let answer = end.result?;
        judge(&answer)?;
        let buffer = end.data.into_one().ok_or(RequestError::Closed)?;
        let mut out = vec![0; (answer.transferred as usize).min(buffer.len())];
        buffer.slice().read(0, &mut out);
        Ok(out)
    }

    /// The logical units that the target lists.
    ///
    /// # Errors
    /// [`LunError`].
    pub async fn luns(&self) -> Result<Vec<LunId>, LunError> {
        let data = self.fetch(LunId::ZERO, Command::report_luns()).await?;
        Ok(parse_luns(&data))
    }

    /// Standard INQUIRY data of a logical unit.
    ///
    /// # Errors
    /// [`LunError`].
    pub async fn inquiry(&self, lun: LunId) -> Result<Inquiry, LunError> {
        let data = self.fetch(lun, Command::inquiry()).await?;
        Inquiry::parse(&data).ok_or(LunError::Malformed("INQUIRY data"))
    }

    /// A page of vital product data, with its header, as received.
    ///
    /// # Errors
    /// [`LunError`].
    pub async fn vpd(&self, lun: LunId, page: u8) -> Result<Vec<u8>, LunError> {
        self.fetch(lun, Command::vpd(page)).await
    }

    /// A disk of the target.
    ///
    /// # Errors
    /// [`LunError::NotADisk`] where there is none of that number; others as they come.
    pub async fn lun(&self, number: u32) -> Result<Lun, LunError> {
        let lun = LunId::new(number).ok_or(LunError::Number(number))?;
        let info = self.discover(lun).await?;
        let pool = self.client().buffers().memory().len();
        Ok(Lun {
            session: self.clone(),
            shared: Arc::new(LunShared {
                geometry: info.geometry(pool),
                info,
                writes_same: AtomicBool::new(true),
            }),
            timeout: DEFAULT_TIMEOUT,
        })
    }

    async fn discover(&self, lun: LunId) -> Result<LunInfo, LunError> {
        let inquiry = self.inquiry(lun).await?;
        if !inquiry.is_disk() {
            return Err(LunError::NotADisk(lun.number()));
        }
        let ready = ScsiIo::new(
            lun,
            Command::test_unit_ready(),
            IoData::None,
            DEFAULT_TIMEOUT,
        );
        judge(&self.submit(ready).await.result?)?;
        let pages = self.vpd(lun, 0x00).await.unwrap_or_default();
        let pages = vpd_body(&pages, 0x00).unwrap_or(&[]).to_vec();
        let mut bodies = Vec::new();
        for page in [0x80, 0x83, 0xb0, 0xb2] {
            if pages.contains(&page) {
                let data = self.vpd(lun, page).await?;
                if let Some(body) = vpd_body(&data, page) {
                    bodies.push((page, body.to_vec()));
                }
            }
        }
        let body = |page| {
            bodies
                .iter()
                .find(|(p, _)| *p == page)
                .map(|(_, b)| b.as_slice())
        };
        let capacity = self.fetch(lun, Command::read_capacity()).await?;
        let capacity = Capacity::parse(&capacity).ok_or(LunError::Malformed("capacity"))?;
        // A unit that does not tell is taken to have a cache: a flush too many does no harm.
        let unknown = CachingPage {
            write_cache: true,
            write_protected: false,
        };
        let caching = match self.fetch(lun, Command::mode_sense_caching()).await {
            Ok(data) => CachingPage::parse(&data).unwrap_or(unknown),
            Err(LunError::Check { .. }) => unknown,
            Err(e) => return Err(e),
        };
        Ok(LunInfo {
            lun,
            inquiry,
            identity: Identity::parse(body(0x80), body(0x83)),
            capacity,
            limits: BlockLimits::parse(body(0xb0).unwrap_or(&[])),
            provisioning: Provisioning::parse(body(0xb2).unwrap_or(&[])),
            caching,
        })
    }
}

#[derive(Debug)]
struct LunShared {
    info: LunInfo,
    geometry: Geometry,
    /// Whether WRITE SAME has not been refused so far.
    writes_same: AtomicBool,
}

/// A disk of a target. Clones share it.
#[derive(Clone, Debug)]
pub struct Lun {
    session: Session,
    shared: Arc<LunShared>,
    timeout: Duration,
}

impl Lun {
    /// What it is.
    #[must_use]
    pub fn info(&self) -> &LunInfo {
        &self.shared.info
    }

    /// The session it belongs to.
    #[must_use]
    pub fn session(&self) -> &Session {
        &self.session
    }

    /// The pool that its buffers come from.
    #[must_use]
    pub fn buffers(&self) -> &BufferPool {
        self.session.client().buffers()
    }

    /// The same disk with another timeout for each call.
    #[must_use]
    pub fn with_timeout(mut self, timeout: Duration) -> Self {
        self.timeout = timeout;
        self
    }

    fn io(&self, command: Command, data: IoData) -> ScsiIo {
        ScsiIo::new(self.shared.info.lun, command, data, self.timeout)
    }

    /// The blocks of a byte range, if it is whole blocks within the disk.
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

    /// A READ of the whole buffer, ready to submit: for workloads, which see its end themselves.
    ///
    /// # Errors
    /// [`LunError::OutOfRange`].
    pub fn read_io(&self, offset: u64, buffer: Buffer) -> Result<ScsiIo, LunError> {
        let range = self.check_transfer(offset, buffer.len())?;
        let command = Command::read(range, buffer.len() as u32);
        Ok(self.io(command, IoData::One(buffer)))
    }

    /// A WRITE of the whole buffer, as [`Self::read_io`].
    ///
    /// # Errors
    /// [`LunError::OutOfRange`].
    pub fn write_io(&self, offset: u64, buffer: Buffer, fua: bool) -> Result<ScsiIo, LunError> {
        let range = self.check_transfer(offset, buffer.len())?;
        let command = Command::write(range, buffer.len() as u32, fua);
        Ok(self.io(command, IoData::One(buffer)))
    }

    /// Judges the end of a command made by [`Self::read_io`] or [`Self::write_io`], and gives its
    /// buffer.
    ///
    /// # Errors
    /// [`LunError`].
    pub fn judge(end: IoEnd) -> Result<Buffer, LunError> {
        let data = judge_whole(end)?;
        data.into_one().ok_or(RequestError::Closed.into())
    }

    /// Fills the buffer from `offset` on.
    ///
    /// # Errors
    /// [`LunError`].
    pub async fn read(&self, offset: u64, buffer: Buffer) -> Result<Buffer, LunError> {
        if buffer.is_empty() {
            return Ok(buffer);
        }
        let io = self.read_io(offset, buffer)?;
        Self::judge(self.session.submit(io).await)
    }

    /// Writes the buffer to `offset`; with `fua` it is on the medium afterwards.
    ///
    /// # Errors
    /// [`LunError`].
    pub async fn write(&self, offset: u64, buffer: Buffer, fua: bool) -> Result<Buffer, LunError> {
        if buffer.is_empty() {
            return Ok(buffer);
        }
        let io = self.write_io(offset, buffer, fua)?;
        Self::judge(self.session.submit(io).await)
    }

    /// Puts every write that was acknowledged onto the medium.
    ///
    /// # Errors
    /// [`LunError`].
    pub async fn flush(&self) -> Result<(), LunError> {
        let io = self.io(Command::synchronize_cache(), IoData::None);
        judge(&self.session.submit(io).await.result?)
    }

    /// Sends any command, whose length of data must be that of `data`. Its answer is given as it
    /// comes, and nothing is repeated, except after a lost connection where that is safe.
    pub fn scsi(&self, cdb: Cdb, len: DataLen, data: IoData) -> IoFuture {
        let mut io = self.io(Command::raw(cdb, len), data);
        io.retry = Retry::Never;
        self.session.submit(io)
    }

    /// Splits a byte range into runs of blocks of at most `max` bytes.
    fn runs(&self, range: &Range<u64>, max: u64) -> Result<Vec<BlockRange>, LunError> {
        let block = u64::from(self.shared.geometry.block_size);
        let len = range
            .end
            .checked_sub(range.start)
            .ok_or(LunError::OutOfRange)?;
        let aligned = range.start.is_multiple_of(block) && len.is_multiple_of(block);
        if !aligned || !self.shared.geometry.contains(range.start, len) {
            return Err(LunError::OutOfRange);
        }
        let max = max.min(u64::from(u32::MAX) * block);
        let step = (max - max % block).max(block);
        (range.start..range.end)
            .step_by(usize::try_from(step).unwrap_or(usize::MAX))
            .map(|at| self.blocks(at, step.min(range.end - at)))
            .collect()
    }

    /// Tells the disk that nobody needs the range's contents any more.
    ///
    /// # Errors
    /// [`LunError::Unsupported`] where it does not want to know.
    pub async fn discard(&self, range: Range<u64>) -> Result<(), LunError> {
        let geometry = &self.shared.geometry;
        if geometry.max_discard == 0 {
            return Err(LunError::Unsupported);
        }
        let info = &self.shared.info;
        let unmaps = info.provisioning.unmap && info.limits.max_unmap > 0;
        for run in self.runs(&range, geometry.max_discard)? {
            if unmaps {
                let list = unmap_list(run);
                let buffer = self.buffers().take(list.len()).await;
                buffer.slice().write(0, &list);
                let io = self.io(Command::unmap(run), IoData::One(buffer));
                judge(&self.session.submit(io).await.result?)?;
            } else {
                self.write_same(run, true).await?;
            }
        }
        Ok(())
    }

    async fn write_same(&self, run: BlockRange, unmap: bool) -> Result<(), LunError> {
        let block = self.shared.geometry.block_size;
        let buffer = self.buffers().take(block as usize).await;
        buffer.slice().fill(0, block as usize, 0);
        let io = self.io(Command::write_same(run, block, unmap), IoData::One(buffer));
        judge(&self.session.submit(io).await.result?)
    }

    /// Makes the range read as zeroes, by command where the disk has one, otherwise by writing them.
    ///
    /// # Errors
    /// [`LunError`].
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
                    Err(LunError::Check {
                        key: SenseKey::IllegalRequest,
                        ..
                    }) => {
                        self.shared.writes_same.store(false, Ordering::Relaxed);
                        break;
                    }
                    Err(e) => return Err(e),
                }
            }
        }
        let piece = self.shared.geometry.max_transfer.min(256 << 10);
        for run in self.runs(&(at..range.end), piece.into())? {
            let block = self.shared.geometry.block_size;
            let len = (run.blocks * block) as usize;
            let buffer = self.buffers().take(len).await;
            buffer.slice().fill(0, len, 0);
            self.write(run.lba * u64::from(block), buffer, false)
                .await?;
        }
        if options.fua {
            self.flush().await?;
        }
        Ok(())
    }

    /// What the range holds, from its start on, as far as one command tells.
    ///
    /// # Errors
    /// [`LunError`].
    pub async fn status(&self, range: Range<u64>) -> Result<Vec<Extent>, LunError> {
        if self.runs(&range, u64::MAX)?.is_empty() {
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
        let command = Command::lba_status(range.start / block, 8 + 16 * STATUS_RUNS);
        let data = match self.session.fetch(self.shared.info.lun, command).await {
            Ok(data) => data,
            Err(LunError::Check {
                key: SenseKey::IllegalRequest,
                ..
            }) => return Ok(whole),
            Err(e) => return Err(e),
        };
        let mut at = range.start;
        let mut extents = Vec::new();
        for run in parse_lba_status(&data) {
            let start = run.range.lba.saturating_mul(block);
            let end = start.saturating_add(u64::from(run.range.blocks) * block);
            // The first run may begin before the range; the others must follow one another.
            if start > at || end <= at || at >= range.end {
                break;
            }
            let kind = match run.status {
                1 if self.shared.info.capacity.reads_zeroes => ExtentKind::Hole,
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

impl BlockDevice for Lun {
    fn geometry(&self) -> &Geometry {
        &self.shared.geometry
    }

    fn try_buffer(&self, len: usize) -> Option<Buffer> {
        self.buffers().try_take(len)
    }

    fn wake_when_free(&self, waker: &Waker) {
        self.buffers().wake_when_free(waker);
    }

    fn buffer(&self, len: usize) -> impl Future<Output = Buffer> + Send {
        self.buffers().take(len)
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
