//! Repairs frames that were torn by a crash, before a file is served.

use std::io;
use std::ops::Range;

use riser_reactor::Handle;
use riser_scsi::config::{Protection, ProtectionType};
use riser_scsi::protection::{Tuple, lba_tag};

use super::header::{Header, PAGE};
use super::intent::{BITMAP, BITS};
use super::layout::{Layout, inverted};
use crate::backend::errno::is_medium_error;
use crate::backend::sys;

/// Maximum number of bytes to read at once.
const PIECE: u64 = 1 << 20;

/// Number of bits that are cleared at once, because this requires a flush.
const CLEARED: usize = 256;

/// The page cache ignores a request to drop a part of a large folio, which is not larger than this.
const FOLIO: u64 = 2 << 20;

/// Maximum number of repaired frames that are listed.
const LISTED: usize = 8;

/// Result of a recovery.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(in crate::backend) struct Recovered {
    /// Number of regions that were checked.
    pub(in crate::backend) regions: u64,
    /// Number of frames with a new tuple.
    pub(in crate::backend) repaired: u64,
    /// LBAs of the first repaired frames.
    pub(in crate::backend) listed: Vec<u64>,
    /// Number of frames that cannot be read.
    pub(in crate::backend) unreadable: u64,
    /// Bitmap of the regions to be checked again, or an empty list.
    pub(in crate::backend) kept: Vec<u8>,
    /// Error number of a failed flush. The kernel reports this only once, and data that initiators
    /// wrote before may be lost.
    pub(in crate::backend) flush_failed: Option<i32>,
}

/// Checks all frames in the regions of the write-intent bitmap. The write of a torn frame was never
/// reported as stable, so any combination of its old and new data is valid, and it gets the same
/// tuple as for a write without protection information.
///
/// The bits of regions are cleared as soon as their frames are durable, so that the next recovery
/// continues if this recovery is interrupted. A bit is kept if some of its frames cannot be read, or
/// if a flush fails.
///
/// # Errors
/// Returns I/O errors, except for medium errors of frames. After a failed flush, no error is
/// returned, because this must be recorded.
pub(in crate::backend) fn recover(
    file: &Handle,
    header: &Header,
    protection: Protection,
) -> io::Result<Recovered> {
    recover_with(file, header, protection, &|into, at| {
        sys::read_at(file, into, at)
    })
}

/// Same as [`recover`], but uses this function to read frames.
fn recover_with(
    file: &Handle,
    header: &Header,
    protection: Protection,
    read: &dyn Fn(&mut [u8], u64) -> io::Result<usize>,
) -> io::Result<Recovered> {
    let mut bitmap = vec![0; BITMAP];
    sys::read_at(file, &mut bitmap, PAGE as u64)?;
    if bitmap.iter().all(|byte| *byte == 0) {
        return Ok(Recovered::default());
    }
    let mut recovery = Recovery {
        file,
        read,
        layout: Layout::new(header.block_size),
        protection: match header.protection_type {
            Some(protection_type) => Protection {
                protection_type,
                ..protection
            },
            // All tuples disable the checks of this type.
            None => Protection::new(ProtectionType::Type3),
        },
        bitmap,
        recovered: Recovered::default(),
    };
    let result = recovery.check_all(header.region_size);
    let Recovery {
        bitmap,
        mut recovered,
        ..
    } = recovery;
    recovered.kept = bitmap;
    match (result, recovered.flush_failed) {
        (Err(error), None) => Err(error),
        (Err(error), Some(_)) => {
            tracing::warn!(%error, "cannot check all interrupted writes");
            Ok(recovered)
        }
        (Ok(()), _) => Ok(recovered),
    }
}

struct Recovery<'a> {
    file: &'a Handle,
    read: &'a dyn Fn(&mut [u8], u64) -> io::Result<usize>,
    layout: Layout,
    protection: Protection,
    /// Bits that were not cleared.
    bitmap: Vec<u8>,
    recovered: Recovered,
}

impl Recovery<'_> {
    /// Checks the regions of all bits, and clears the bits.
    fn check_all(&mut self, region_size: u64) -> io::Result<()> {
        let len = sys::file_size(self.file)?;
        // Cached frames can only be dropped when they are on the medium.
        self.flush();
        let mut checked = Vec::new();
        for bit in 0..BITS {
            if self.bitmap[(bit / 8) as usize] & 1 << (bit % 8) == 0 {
                continue;
            }
            let regions = (bit..len.div_ceil(region_size)).step_by(BITS as usize);
            let regions = regions.map(|region| region * region_size);
            match self.check_regions(regions.map(|at| at..(at + region_size).min(len))) {
                Ok(true) => checked.push(bit),
                Ok(false) => {}
                Err(error) => {
                    self.clear_bits(&mut checked)?;
                    return Err(error);
                }
            }
            if checked.len() == CLEARED {
                self.clear_bits(&mut checked)?;
            }
        }
        self.clear_bits(&mut checked)?;
        self.flush();
        Ok(())
    }

    /// Makes the frames of these regions durable, and clears their bits. If a flush has failed, they
    /// may not be durable, even if the kernel reports success.
    fn clear_bits(&mut self, bits: &mut Vec<u64>) -> io::Result<()> {
        if bits.is_empty() {
            return Ok(());
        }
        self.flush();
        if self.recovered.flush_failed.is_some() {
            bits.clear();
            return Ok(());
        }
        let mut pages = Vec::new();
        for bit in bits.drain(..) {
            let byte = (bit / 8) as usize;
            self.bitmap[byte] &= !(1 << (bit % 8));
            pages.push(byte - byte % PAGE);
        }
        pages.dedup();
        for page in pages {
            let bytes = &self.bitmap[page..page + PAGE];
            sys::write_at(self.file, bytes, (PAGE + page) as u64)?;
        }
        Ok(())
    }

    fn flush(&mut self) {
        if let Err(error) = sys::sync_data(self.file) {
            let errno = error.raw_os_error().unwrap_or(libc::EIO);
            self.recovered.flush_failed.get_or_insert(errno);
        }
    }

    /// Checks all frames in these regions. Returns whether all of them can be read.
    fn check_regions(&mut self, regions: impl Iterator<Item = Range<u64>>) -> io::Result<bool> {
        let before = self.recovered.unreadable;
        for region in regions {
            // After a failed write-back, the page cache has frames that differ from the medium, which
            // it would evict later. Check the frames of the medium. Cached frames of other regions
            // remain.
            let frame = self.layout.frame();
            let start = region.start.saturating_sub(frame) / FOLIO * FOLIO;
            let end = (region.end + frame).next_multiple_of(FOLIO);
            sys::drop_cached(self.file, start, end - start);
            self.check(region)?;
            self.recovered.regions += 1;
        }
        Ok(self.recovered.unreadable == before)
    }

    /// Checks all frames that contain some of these bytes.
    fn check(&mut self, Range { start, end }: Range<u64>) -> io::Result<()> {
        let frame = self.layout.frame();
        let mut at = (start - start % frame).max(self.layout.medium_offset(0));
        let mut piece = vec![0; (PIECE - PIECE % frame) as usize];
        while at < end {
            let len = (end - at).next_multiple_of(frame);
            // Deallocated frames are valid. If this fails, reading the frames fails as well.
            let extent = riser_file::extent(self.file, at, len, frame as u32);
            let (is_data, len) = extent.unwrap_or((true, len));
            if !is_data {
                at += len;
                continue;
            }
            let len = len.min(piece.len() as u64);
            let piece = &mut piece[..len as usize];
            // An incomplete frame at the end is not part of the disk.
            match (self.read)(piece, at) {
                Ok(read) => self.check_frames(at, &piece[..read])?,
                Err(error) if is_medium_error(&error) => self.check_each(at, piece)?,
                Err(error) => return Err(error),
            }
            at += len;
        }
        Ok(())
    }

    /// Same as [`Recovery::check_frames`], but reads each frame separately.
    fn check_each(&mut self, mut at: u64, piece: &mut [u8]) -> io::Result<()> {
        for frame in piece.chunks_exact_mut(self.layout.frame() as usize) {
            match (self.read)(frame, at) {
                Ok(read) => self.check_frames(at, &frame[..read])?,
                Err(error) if is_medium_error(&error) => self.recovered.unreadable += 1,
                Err(error) => return Err(error),
            }
            at += frame.len() as u64;
        }
        Ok(())
    }

    /// Checks the frames in `bytes`, which starts at this offset.
    fn check_frames(&mut self, mut at: u64, bytes: &[u8]) -> io::Result<()> {
        for frame in bytes.chunks_exact(self.layout.frame() as usize) {
            let (block, tuple) = frame.split_at(frame.len() - Tuple::LEN);
            let (lba, kind) = (self.layout.lba(at), self.protection.protection_type);
            let tuple = tuple.try_into().expect("the end of the frame");
            let stored = Tuple::parse(inverted(tuple));
            if stored.check_stored(kind, lba, block).is_err() {
                let tuple = self.tuple(lba, block);
                let end = at + block.len() as u64;
                sys::write_at(self.file, &inverted(tuple.encode()), end)?;
                self.recovered.repaired += 1;
                if self.recovered.listed.len() < LISTED {
                    self.recovered.listed.push(lba);
                }
            }
            at += frame.len() as u64;
        }
        Ok(())
    }

    fn tuple(&self, lba: u64, block: &[u8]) -> Tuple {
        let kind: ProtectionType = self.protection.protection_type;
        Tuple::generate(self.protection, block, lba_tag(kind, lba))
    }
}

#[cfg(test)]
mod tests {
    use riser_reactor::simulated::Disk;

    use super::*;

    const REGION: u64 = 4 << 20;

    /// A file with a torn frame in each of its first three regions, and its torn LBAs.
    fn torn() -> (Handle, Header, Vec<u64>) {
        let header = Header::new(512, Some(ProtectionType::Type1));
        let layout = Layout::new(512);
        let file = Handle::from(Disk::new(3 * REGION).open().buffered());
        sys::write_at(&file, &header.encode(), 0).unwrap();
        sys::write_at(&file, &[0b111], PAGE as u64).unwrap();
        let lbas =
            [0, 1, 2].map(|region| layout.lba(layout.frame() * (REGION * region / 520 + 200)));
        for lba in lbas {
            sys::write_at(&file, &[1; 520], layout.medium_offset(lba * 512)).unwrap();
        }
        (file, header, lbas.to_vec())
    }

    fn bits(file: &Handle) -> u8 {
        let mut bits = [0];
        sys::read_at(file, &mut bits, PAGE as u64).unwrap();
        bits[0]
    }

    /// Fails each read of this frame.
    fn run(file: &Handle, header: &Header, bad: u64, errno: i32) -> io::Result<Recovered> {
        let bad = Layout::new(512).medium_offset(bad * 512);
        let protection = Protection::new(ProtectionType::Type1);
        recover_with(
            file,
            header,
            protection,
            &|into, at| match (at..at + into.len() as u64).contains(&bad) {
                true => Err(io::Error::from_raw_os_error(errno)),
                false => sys::read_at(file, into, at),
            },
        )
    }

    #[test]
    fn interrupted_recovery_continues() {
        let (file, header, lbas) = torn();
        let error = run(&file, &header, lbas[1], libc::ETIMEDOUT).unwrap_err();
        assert_eq!(error.raw_os_error(), Some(libc::ETIMEDOUT));
        assert_eq!(bits(&file), 0b110);
        let recovered = recover(&file, &header, Protection::new(ProtectionType::Type1)).unwrap();
        assert_eq!(recovered.listed, lbas[1..]);
        assert_eq!((recovered.regions, recovered.repaired), (2, 2));
        assert_eq!(bits(&file), 0);
    }

    #[test]
    fn unreadable_frame_keeps_bit() {
        let (file, header, lbas) = torn();
        let recovered = run(&file, &header, lbas[1], libc::EIO).unwrap();
        assert_eq!(recovered.listed, [lbas[0], lbas[2]]);
        assert_eq!((recovered.regions, recovered.unreadable), (3, 1));
        assert_eq!(bits(&file), 0b010);
    }

    /// The next flush reports no error.
    #[test]
    fn failed_flush_outweighs_other_errors() {
        let (file, header, lbas) = torn();
        file.disk().flush();
        sys::write_at(&file, &[2], Layout::new(512).medium_offset(lbas[0] * 512)).unwrap();
        file.disk().fail_write_back(libc::EIO, |_| true);
        let recovered = run(&file, &header, lbas[1], libc::ETIMEDOUT).unwrap();
        assert_eq!(recovered.flush_failed, Some(libc::EIO));
        assert_eq!((recovered.kept[0], bits(&file)), (0b111, 0b111));
    }

    #[test]
    fn frames_are_read_from_medium() {
        let (file, header, lbas) = torn();
        file.disk().flush();
        // The cache contains a whole frame that is not on the medium.
        let (lba, layout) = (lbas[0], Layout::new(512));
        let protection = Protection::new(ProtectionType::Type1);
        let tag = lba_tag(ProtectionType::Type1, lba);
        let tuple = Tuple::generate(protection, &[2; 512], tag);
        let frame = [&[2; 512][..], &inverted(tuple.encode())].concat();
        sys::write_at(&file, &frame, layout.medium_offset(lba * 512)).unwrap();
        file.disk().fail_write_back(libc::EIO, |_| true);
        let recovered = recover(&file, &header, protection).unwrap();
        assert_eq!(recovered.listed, lbas);
    }

    #[test]
    fn other_regions_remain_cached() {
        let (file, header, _) = torn();
        sys::write_at(&file, &[0b001], PAGE as u64).unwrap();
        file.disk().flush();
        let far = REGION + FOLIO;
        // Cached sectors can only be observed after a failed write-back.
        for at in [REGION - 512, REGION + 512, far] {
            sys::write_at(&file, &[3], at).unwrap();
        }
        file.disk().fail_write_back(libc::EIO, |_| true);
        let protection = Protection::new(ProtectionType::Type1);
        recover(&file, &header, protection).unwrap();
        assert_eq!(file.disk().drop_cache(), [far / 512]);
    }

    #[test]
    fn holes_are_not_read() {
        let header = Header::new(4096, None);
        let file = Handle::from(Disk::new(1000 * REGION).open().buffered());
        sys::write_at(&file, &header.encode(), 0).unwrap();
        sys::write_at(&file, &[0xff; 4096], PAGE as u64).unwrap();
        let at = 700 * REGION + 5;
        sys::write_at(&file, &[1; 5000], at).unwrap();
        let protection = Protection::new(ProtectionType::Type1);
        let reads = std::cell::RefCell::new(Vec::new());
        let recovered = recover_with(&file, &header, protection, &|into, at| {
            reads.borrow_mut().push(at..at + into.len() as u64);
            sys::read_at(&file, into, at)
        });
        let recovered = recovered.unwrap();
        assert_eq!((recovered.regions, recovered.unreadable), (1000, 0));
        let reads = reads.into_inner();
        let read: u64 = reads.iter().map(|range| range.end - range.start).sum();
        assert!(read < 64 << 10, "{reads:?}");
        let is_read = |at| reads.iter().any(|range| range.contains(&at));
        assert!(is_read(at) && is_read(at + 4999));
        assert_eq!(recovered.kept, [0; BITMAP]);
    }
}
