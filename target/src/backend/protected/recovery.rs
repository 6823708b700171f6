//! Repairs frames that were torn by a crash, before a file is served.

use std::io;

use riser_reactor::Handle;
use riser_scsi::config::{Protection, ProtectionType};
use riser_scsi::protection::{Tuple, lba_tag};

use super::header::{HEADER_LEN, Header, PAGE};
use super::intent::{BITMAP, BITS};
use super::layout::{Layout, inverted};
use crate::backend::sys;

/// Maximum number of bytes to read at once.
const PIECE: u64 = 1 << 20;

/// Result of a recovery.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(in crate::backend) struct Recovered {
    /// Number of regions that were checked.
    pub(in crate::backend) regions: u64,
    /// Number of frames with a new tuple.
    pub(in crate::backend) repaired: u64,
    /// Number of frames that cannot be read.
    pub(in crate::backend) unreadable: u64,
}

/// Checks all frames in the regions of the write-intent bitmap. The write of a torn frame was never
/// reported as stable, so any combination of its old and new data is valid, and it gets the same
/// tuple as for a write without protection information. Then clears the bitmap.
///
/// # Errors
/// Returns I/O errors, except for frames that cannot be read.
pub(in crate::backend) fn recover(
    file: &Handle,
    header: &Header,
    protection: Protection,
) -> io::Result<Recovered> {
    let mut recovered = Recovered::default();
    let mut bitmap = vec![0; BITMAP];
    sys::read_at(file, &mut bitmap, PAGE as u64)?;
    if bitmap.iter().all(|byte| *byte == 0) {
        return Ok(recovered);
    }
    let mut frames = Frames {
        file,
        layout: Layout::new(header.block_size),
        protection: match header.protection_type {
            Some(protection_type) => Protection {
                protection_type,
                ..protection
            },
            // All tuples disable the checks of this type.
            None => Protection::new(ProtectionType::Type3),
        },
        recovered: &mut recovered,
    };
    let len = sys::file_size(file)?;
    for bit in (0..BITS).filter(|bit| bitmap[(bit / 8) as usize] & 1 << (bit % 8) != 0) {
        let regions = (bit..len.div_ceil(header.region_size)).step_by(BITS as usize);
        for region in regions {
            let start = region * header.region_size;
            frames.check(start, (start + header.region_size).min(len))?;
            frames.recovered.regions += 1;
        }
    }
    sys::sync_data(file)?;
    sys::write_at(file, &vec![0; HEADER_LEN as usize - PAGE], PAGE as u64)?;
    sys::sync_data(file)?;
    Ok(recovered)
}

struct Frames<'a> {
    file: &'a Handle,
    layout: Layout,
    protection: Protection,
    recovered: &'a mut Recovered,
}

impl Frames<'_> {
    /// Checks all frames that contain some of these bytes.
    fn check(&mut self, start: u64, end: u64) -> io::Result<()> {
        let frame = self.layout.frame();
        let mut at = (start - start % frame).max(self.layout.medium_offset(0));
        let mut piece = vec![0; (PIECE - PIECE % frame) as usize];
        while at < end {
            let len = (end - at).next_multiple_of(frame).min(piece.len() as u64);
            let piece = &mut piece[..len as usize];
            // An incomplete frame at the end is not part of the disk.
            match sys::read_at(self.file, piece, at) {
                Ok(read) => self.check_frames(at, &piece[..read])?,
                Err(_) => self.check_each(at, piece)?,
            }
            at += len;
        }
        Ok(())
    }

    /// Same as [`Frames::check_frames`], but reads each frame separately.
    fn check_each(&mut self, mut at: u64, piece: &mut [u8]) -> io::Result<()> {
        for frame in piece.chunks_exact_mut(self.layout.frame() as usize) {
            match sys::read_at(self.file, frame, at) {
                Ok(read) => self.check_frames(at, &frame[..read])?,
                Err(_) => self.recovered.unreadable += 1,
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
