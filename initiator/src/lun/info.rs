//! Discovery of logical units and their properties.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use riser_block::{Geometry, MAX_TRANSFER};
use riser_scsi::config::ProtectionType;
use riser_scsi::data::{luns, mode, vpd};
use riser_scsi::lun::LunId;
use riser_scsi::sense::SenseKey;

use super::error::check_response;
use super::transfer::Prot;
use super::{Lun, LunError, LunShared};
use crate::engine::{Elapsed, IoData, ScsiIo, Session};
use crate::protection::{PiFormat, PiSupport, ProtectionMode, ReadMarker};
use crate::request::DataLen;
use crate::request::RequestError;
use crate::scsi::{
    BlockLimits, CachingPage, Capacity, CdbSize, Command, Identity, Inquiry, Provisioning,
};
use crate::unit::{Losses, Snapshot};

/// Properties of a logical unit.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LunInfo {
    /// Number of the unit.
    pub lun: LunId,
    /// Standard INQUIRY data: vendor, product, revision.
    pub inquiry: Inquiry,
    /// Serial number and designators.
    pub identity: Identity,
    /// Number of blocks, and block size.
    pub capacity: Capacity,
    /// Limits for a single command.
    pub limits: BlockLimits,
    /// Supported kinds of deallocation.
    pub provisioning: Provisioning,
    /// Caching and write protection.
    pub caching: CachingPage,
    /// Supported form of READ and WRITE.
    pub cdb_size: CdbSize,
    /// Protection information of its medium, if any; also if it is not transferred.
    pub protection: Option<PiSupport>,
    /// Generation of the volatile cache, if available; see [`crate::unit`].
    pub cache_generation: Option<[u8; 16]>,
}

/// Requests are split into transfers of at least this length in bytes, even if the OPTIMAL TRANSFER
/// LENGTH is smaller.
const LEAST_SPLIT: u64 = 64 << 10;

/// Maximum transfer length in bytes for a unit that does not report a limit: the same as in Linux's
/// initiators, with which such targets were tested. tgt closes an iSER connection for longer
/// transfers.
const UNREPORTED: u64 = 512 << 10;

/// Maximum number of bytes for a single WRITE SAME or UNMAP, regardless of the unit's limit.
/// Devices that write the zeroes themselves need time for this, and an attempt at a command is
/// limited by [`Timing::attempt`](crate::session::Timing::attempt).
const MAX_RUN: u64 = 256 << 20;

/// Returns the maximum transfer length for a command to a unit with these limits, with a pool of
/// `pool` bytes, and the length beyond which several commands are faster.
fn transfers(limits: &BlockLimits, block: u32, pool: usize) -> (u32, u32) {
    let reported = |blocks: u32, otherwise| match blocks {
        0 => otherwise,
        blocks => u64::from(blocks) * u64::from(block),
    };
    let max = reported(limits.max_transfer, UNREPORTED).min(longest(block, pool).into());
    // Transfers beyond the optimal length are slower (SBC-3 6.5.3).
    let optimal = reported(limits.optimal_transfer, u64::MAX).max(LEAST_SPLIT);
    (whole(max, block), whole(optimal.min(max), block))
}

/// Returns the maximum transfer length for a pool of `pool` bytes: a quarter of the pool, so that a
/// few concurrent transfers are always possible.
fn longest(block: u32, pool: usize) -> u32 {
    whole(u64::from(MAX_TRANSFER).min(pool as u64 / 4), block)
}

/// Returns the maximum number of bytes for UNMAP, or for the WRITE SAME that replaces it, and for
/// WRITE SAME. Returns 0 for UNMAP if neither is supported.
fn ranges(limits: &BlockLimits, provisioning: &Provisioning, block: u32) -> (u64, u64) {
    let bytes = |blocks: u64| blocks.saturating_mul(block.into()).min(MAX_RUN);
    // A MAXIMUM WRITE SAME LENGTH of 0 means that no limit is reported.
    let same = match limits.max_write_same {
        0 => bytes(u32::MAX.into()),
        blocks => bytes(blocks.min(u32::MAX.into())),
    };
    // A MAXIMUM UNMAP LBA COUNT of 0 means that UNMAP must not be used.
    let discard = match (provisioning.unmap, provisioning.write_same) {
        (true, _) if limits.max_unmap > 0 => bytes(limits.max_unmap.into()),
        (_, true) => same,
        (_, false) => 0,
    };
    (discard, same)
}

/// Rounds a length down to whole blocks, but at least one.
fn whole(len: u64, block: u32) -> u32 {
    let len = len.max(block.into()) as u32;
    len - len % block
}

impl LunInfo {
    /// Returns the maximum transfer length for a command in bytes; longer transfers are split.
    fn max_command(&self, pool: usize, prot: Option<&Prot>) -> u32 {
        let (max, _) = transfers(&self.limits, self.capacity.block_size, pool);
        max.min(prot.map_or(u32::MAX, Prot::max_command))
    }

    fn geometry(&self, pool: usize, prot: Option<&Prot>) -> Geometry {
        let block = self.capacity.block_size;
        let (max_discard, max_write_zeroes) = ranges(&self.limits, &self.provisioning, block);
        let (_, optimal) = transfers(&self.limits, block, pool);
        let optimal_transfer = optimal.min(self.max_command(pool, prot));
        let max_transfer = longest(block, pool);
        Geometry {
            block_size: block,
            physical_block_size: block << self.capacity.physical_exponent.min(8),
            capacity: self.capacity.blocks.saturating_mul(block.into()),
            max_transfer,
            optimal_transfer,
            max_discard,
            max_write_zeroes,
            reports_status: self.capacity.provisioning,
            read_only: self.caching.write_protected,
            volatile_cache: self.caching.write_cache,
            flushes: true,
            stable_writes: true,
        }
    }
}

impl Session {
    /// Executes a Data-In command on a logical unit and returns the received data.
    pub(super) async fn fetch(&self, lun: LunId, command: Command) -> Result<Vec<u8>, LunError> {
        let DataLen::In(len) = command.len else {
            return Err(LunError::OutOfRange);
        };
        let buffer = self.buffer(len as usize).await?;
        let data = IoData::One(buffer);
        let end = self
            .submit(ScsiIo::new(lun, command, data, self.timeout()))
            .await;
        let response = end.result?;
        check_response(&response)?;
        let buffer = end.data.into_one().ok_or(RequestError::Closed)?;
        let mut out = vec![0; (response.transferred as usize).min(buffer.len())];
        buffer.slice().read(0, &mut out);
        Ok(out)
    }

    /// Returns the logical units reported by the target, or only unit 0 if it does not support
    /// REPORT LUNS.
    ///
    /// # Errors
    /// [`LunError`].
    pub async fn luns(&self) -> Result<Vec<LunId>, LunError> {
        match self.fetch(LunId::ZERO, Command::report_luns()).await {
            Err(error) if error.is_unknown_command() => Ok(vec![LunId::ZERO]),
            data => Ok(luns::parse(&data?)),
        }
    }

    /// Returns the standard INQUIRY data of a logical unit.
    ///
    /// # Errors
    /// [`LunError`].
    pub async fn inquiry(&self, lun: LunId) -> Result<Inquiry, LunError> {
        let data = self.fetch(lun, Command::inquiry()).await?;
        Inquiry::parse(&data).ok_or(LunError::Malformed("INQUIRY data"))
    }

    /// Returns a page of vital product data with its header, as received.
    ///
    /// # Errors
    /// [`LunError`].
    pub async fn vpd(&self, lun: LunId, page: u8) -> Result<Vec<u8>, LunError> {
        self.fetch(lun, Command::vpd(page)).await
    }

    /// Returns the protection information of a logical unit; `None` if its medium is not protected.
    ///
    /// # Errors
    /// [`LunError`].
    pub async fn protection(&self, lun: LunId) -> Result<Option<PiSupport>, LunError> {
        let inquiry = self.inquiry(lun).await?;
        let (capacity, _) = self.capacity(lun).await?;
        let pages = self.page(lun, vpd::SUPPORTED_PAGES).await?;
        let pages = pages.unwrap_or_default();
        self.pi_support(lun, &inquiry, &capacity, &pages).await
    }

    /// Opens a disk of the target.
    ///
    /// # Errors
    /// [`LunError::NotADisk`] if there is no disk with this number; otherwise, the first error of a
    /// command.
    pub async fn lun(&self, number: u32) -> Result<Lun, LunError> {
        let lun = LunId::new(number).ok_or(LunError::Number(number))?;
        let info = self.discover_at_once(lun).await?;
        let prot = self.prot(&info).await?;
        let reserved = prot.as_ref().map_or(0, |prot| prot.pool.size());
        let pool = self.client().buffers().size() - reserved;
        let losses = Arc::new(Losses::default());
        let unit = Snapshot {
            inquiry: Some(info.inquiry.clone()),
            identity: info.identity.clone(),
            capacity: Some(info.capacity),
            cache: info.cache_generation,
            write_cache: Some(info.caching.write_cache),
        };
        self.watch_unit(lun, unit, info.caching, Arc::downgrade(&losses))
            .await?;
        Ok(Lun {
            session: self.clone(),
            shared: Arc::new(LunShared {
                geometry: info.geometry(pool, prot.as_ref()),
                max_command: info.max_command(pool, prot.as_ref()),
                prot,
                info,
                writes_same: AtomicBool::new(true),
                losses,
            }),
        })
    }

    /// Returns the transfer of protection information for a unit; `None` if it is not transferred.
    async fn prot(&self, info: &LunInfo) -> Result<Option<Prot>, LunError> {
        let mode = self.protection_mode();
        let format = match (info.protection, mode) {
            (_, ProtectionMode::Off) | (None, ProtectionMode::Auto) => return Ok(None),
            (None, ProtectionMode::Require) => Err("the medium is not protected"),
            (Some(_), _) if !self.has_protection_memory() => Err("insufficient data buffers"),
            (Some(found), _) => found.format(info.capacity.block_size),
        };
        let why = match format {
            Err(why) => why,
            Ok(format) => match self.test_prot(info, format).await? {
                None => "the target does not transfer it",
                prot => return Ok(prot),
            },
        };
        if mode == ProtectionMode::Require {
            return Err(LunError::Unprotected(why));
        }
        let lun = info.lun.number();
        tracing::warn!(
            lun,
            "reading and writing without protection information: {why}"
        );
        Ok(None)
    }

    /// Returns the transfer of protection information if the target supports it.
    async fn test_prot(&self, info: &LunInfo, format: PiFormat) -> Result<Option<Prot>, LunError> {
        let cdb_size = match format.protection_type {
            ProtectionType::Type2 => CdbSize::ThirtyTwo,
            ProtectionType::Type1 | ProtectionType::Type3 => info.cdb_size,
        };
        let command = Command::read_nothing_protected(cdb_size);
        let read = ScsiIo::new(info.lun, command, IoData::None, self.timeout());
        match check_response(&self.submit(read).await.result?) {
            Err(error) if error.is_unsupported() => return Ok(None),
            result => result?,
        }
        Ok(Some(Prot {
            format,
            cdb_size,
            marker: ReadMarker::new(self.random()),
            pool: self.protection_pool(info.lun).await.map_err(|Elapsed| {
                LunError::Unprotected("timed out waiting for free data buffers")
            })?,
        }))
    }

    /// Queries the protection information of a unit; `None` if its medium is not protected.
    async fn pi_support(
        &self,
        lun: LunId,
        inquiry: &Inquiry,
        capacity: &Capacity,
        pages: &[u8],
    ) -> Result<Option<PiSupport>, LunError> {
        if !inquiry.protect || capacity.p_type.is_none() {
            return Ok(None);
        }
        let extended = match pages.contains(&vpd::EXTENDED_INQUIRY) {
            true => self.vpd(lun, vpd::EXTENDED_INQUIRY).await?,
            false => Vec::new(),
        };
        let extended = vpd::received(&extended, vpd::EXTENDED_INQUIRY).unwrap_or(&[]);
        let control = match self.fetch(lun, Command::mode_sense(mode::CONTROL)).await {
            Err(LunError::Check { .. }) => Vec::new(),
            data => data?,
        };
        Ok(PiSupport::parse(inquiry, capacity, extended, &control))
    }

    /// Discovers a unit without a reconnect in between. Responses from before and after a reconnect
    /// may be from two different units. Combined, they would not match either unit, and all later
    /// checks would fail.
    async fn discover_at_once(&self, lun: LunId) -> Result<LunInfo, LunError> {
        loop {
            let before = self.status().reconnects();
            let found = self.discover(lun).await;
            // An error may also be caused by mixing two units, if a query for the second depends on
            // a response of the first.
            let has_ended = matches!(found, Err(LunError::Request(_)));
            if has_ended || self.status().reconnects() == before {
                return found;
            }
        }
    }

    async fn discover(&self, lun: LunId) -> Result<LunInfo, LunError> {
        let inquiry = self.inquiry(lun).await?;
        if !inquiry.is_disk() {
            return Err(LunError::NotADisk(lun.number()));
        }
        // This clears pending unit attentions. A target may report that its LUNs have changed until
        // the unit was identified, as `riserd` does, so ignore a unit attention here.
        let is_named_first = match self.test_ready(lun).await {
            Err(LunError::Check {
                key: SenseKey::UnitAttention,
                ..
            }) => true,
            result => result.map(|()| false)?,
        };
        // Query these pages even if they are not listed, as after each login: identities must be
        // based on the same queries.
        let designators = self.page(lun, vpd::DEVICE_IDENTIFICATION).await?;
        let serial = self.page(lun, vpd::UNIT_SERIAL_NUMBER).await?;
        let inquiry = match is_named_first {
            true => {
                self.test_ready(lun).await?;
                // The first INQUIRY data may be from the previous unit.
                self.inquiry(lun).await?
            }
            false => inquiry,
        };
        let generation = self.vendor_page(lun, vpd::CACHE_GENERATION).await?;
        let pages = self
            .page(lun, vpd::SUPPORTED_PAGES)
            .await?
            .unwrap_or_default();
        let (mut limits, mut provisioning) = (Vec::new(), Vec::new());
        for (page, into) in [
            (vpd::BLOCK_LIMITS, &mut limits),
            (vpd::LOGICAL_BLOCK_PROVISIONING, &mut provisioning),
        ] {
            if pages.contains(&page) {
                let data = self.vpd(lun, page).await?;
                *into = vpd::received(&data, page).unwrap_or(&[]).to_vec();
            }
        }
        let (capacity, cdb_size) = self.capacity(lun).await?;
        let protection = self.pi_support(lun, &inquiry, &capacity, &pages).await?;
        // If a unit does not report this, assume a volatile cache: an unnecessary flush does no
        // harm.
        let unknown = CachingPage {
            write_cache: true,
            has_fua: false,
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
            identity: Identity::parse(serial.as_deref(), designators.as_deref()),
            capacity,
            limits: BlockLimits::parse(&limits),
            provisioning: Provisioning::parse(&provisioning),
            caching,
            cdb_size,
            protection,
            cache_generation: generation.as_deref().and_then(vpd::cache_generation),
        })
    }

    /// Returns the capacity of a unit and the supported form of READ and WRITE. Old and simple
    /// targets do not support commands with 16-byte CDBs.
    async fn capacity(&self, lun: LunId) -> Result<(Capacity, CdbSize), LunError> {
        let capacity = match self.fetch(lun, Command::read_capacity()).await {
            Err(error) if error.is_illegal_request() => {
                let data = self.fetch(lun, Command::read_capacity_10()).await?;
                return Ok((Capacity::parse_10(&data)?, CdbSize::Ten));
            }
            data => Capacity::parse(&data?)?,
        };
        let fits_ten = capacity.blocks <= 1 << 32;
        let read = ScsiIo::new(lun, Command::read_nothing(), IoData::None, self.timeout());
        let size = match check_response(&self.submit(read).await.result?) {
            Err(error) if error.is_unknown_command() && fits_ten => CdbSize::Ten,
            _ => CdbSize::Sixteen,
        };
        Ok((capacity, size))
    }

    async fn test_ready(&self, lun: LunId) -> Result<(), LunError> {
        let timeout = self.timeout();
        let ready = ScsiIo::new(lun, Command::test_unit_ready(), IoData::None, timeout);
        check_response(&self.submit(ready).await.result?)
    }

    /// Returns the body of a page, or `None` if the unit rejects it (ILLEGAL REQUEST) or returns
    /// something else. After other errors, the content of the page remains unknown, as for
    /// [`Check::is_conclusive`].
    ///
    /// [`Check::is_conclusive`]: crate::unit::Check::is_conclusive
    async fn page(&self, lun: LunId, page: u8) -> Result<Option<Vec<u8>>, LunError> {
        match self.vpd(lun, page).await {
            Ok(data) => Ok(vpd::body(&data, page).map(<[u8]>::to_vec)),
            Err(LunError::Check {
                key: SenseKey::IllegalRequest,
                ..
            }) => Ok(None),
            Err(e) => Err(e),
        }
    }

    /// Same as [`Self::page`], for a vendor-specific page, for which a target may return any
    /// status.
    async fn vendor_page(&self, lun: LunId, page: u8) -> Result<Option<Vec<u8>>, LunError> {
        match self.page(lun, page).await {
            Err(LunError::Check { .. } | LunError::Status(_) | LunError::NoUnit) => Ok(None),
            body => body,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unmap_and_write_same_are_bounded() {
        let mut limits = BlockLimits::default();
        let mut provisioning = Provisioning::default();
        assert_eq!(ranges(&limits, &provisioning, 512), (0, MAX_RUN));
        provisioning.write_same = true;
        assert_eq!(ranges(&limits, &provisioning, 512), (MAX_RUN, MAX_RUN));
        provisioning.unmap = true;
        limits.max_unmap = 8;
        assert_eq!(ranges(&limits, &provisioning, 512), (8 * 512, MAX_RUN));
        limits.max_unmap = u32::MAX;
        limits.max_write_same = 16;
        assert_eq!(ranges(&limits, &provisioning, 512), (MAX_RUN, 16 * 512));
    }

    #[test]
    fn transfers_respect_both_limits() {
        let longest = |max_transfer, optimal_transfer, pool| {
            let limits = BlockLimits {
                max_transfer,
                optimal_transfer,
                ..BlockLimits::default()
            };
            transfers(&limits, 512, pool)
        };
        assert_eq!(longest(0, 0, 1 << 30), (512 << 10, 512 << 10));
        assert_eq!(longest(65_536, 0, 1 << 30), (MAX_TRANSFER, MAX_TRANSFER));
        assert_eq!(longest(256, 2048, 1 << 30), (256 * 512, 256 * 512));
        assert_eq!(longest(4096, 2048, 1 << 30), (2 << 20, 1 << 20));
        assert_eq!(longest(65_536, 2048, 1 << 30), (MAX_TRANSFER, 1 << 20));
        assert_eq!(longest(65_536, 8, 1 << 30), (MAX_TRANSFER, 64 << 10));
        assert_eq!(longest(65_536, 2048, 1 << 20), (256 << 10, 256 << 10));
    }
}
