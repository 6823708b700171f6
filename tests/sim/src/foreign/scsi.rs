//! Commands of a foreign target's only logical unit, except for data transfers.

use std::ops::Range;

use super::disk::Disk;
use super::{Lack, Traits};

/// CHECK CONDITION sense data: response code, sense key, additional sense code and qualifier.
pub(super) type SenseBytes = [u8; 4];

/// INVALID COMMAND OPERATION CODE.
const INVALID_OPCODE: SenseBytes = [0x70, 0x05, 0x20, 0x00];

/// INVALID FIELD IN CDB.
const INVALID_FIELD: SenseBytes = [0x70, 0x05, 0x24, 0x00];

/// SCSI status RESERVATION CONFLICT.
pub(super) const RESERVATION_CONFLICT: u8 = 0x18;

/// LOGICAL BLOCK ADDRESS OUT OF RANGE.
const OUT_OF_RANGE: SenseBytes = [0x70, 0x05, 0x21, 0x00];

/// A decoded command.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Action {
    /// Completes with these data.
    Return(Vec<u8>),
    /// Reads blocks.
    Read(Range<u64>),
    /// Writes blocks.
    Write { blocks: Range<u64>, fua: bool },
    /// Flushes the cache.
    Flush,
    /// Completes with CHECK CONDITION.
    Check(SenseBytes),
}

fn be(bytes: &[u8]) -> u64 {
    let bytes = bytes.iter();
    bytes.fold(0, |value, byte| value << 8 | u64::from(*byte))
}

/// Fixed format sense data.
pub(super) fn sense_data(sense: SenseBytes) -> [u8; 18] {
    let mut bytes = [0; 18];
    (bytes[0], bytes[2], bytes[7]) = (sense[0], sense[1], 10);
    (bytes[12], bytes[13]) = (sense[2], sense[3]);
    bytes
}

/// Returns whether a command reads, writes or flushes the medium.
pub(super) fn is_io(opcode: u8) -> bool {
    matches!(opcode, 0x28 | 0x2a | 0x35 | 0x88 | 0x8a | 0x91)
}

/// Decodes a command. `name` is the last byte of the unit's designator.
pub(super) fn plan(cdb: &[u8], disk: &Disk, traits: &Traits, name: u8) -> Action {
    let lacks = |lack| traits.lacks.contains(&lack);
    match cdb[0] {
        0x00 => Action::Return(Vec::new()),
        0x12 => inquiry(cdb, name),
        0x1a => cut(mode_sense(disk, traits), u64::from(cdb[4])),
        0x25 => {
            let last = (disk.blocks() - 1) as u32;
            Action::Return([last.to_be_bytes(), 512_u32.to_be_bytes()].concat())
        }
        0x9e if cdb[1] & 0x1f == 0x10 && !lacks(Lack::ReadCapacity16) => {
            let mut capacity = vec![0; 32];
            capacity[..8].copy_from_slice(&(disk.blocks() - 1).to_be_bytes());
            capacity[10] = 2;
            cut(capacity, be(&cdb[10..14]))
        }
        0xa0 if !lacks(Lack::ReportLuns) => {
            let mut luns = vec![0; 16];
            luns[3] = 8;
            cut(luns, be(&cdb[6..10]))
        }
        0x28 => transfer(cdb, be(&cdb[2..6]), be(&cdb[7..9]), false, (disk, traits)),
        0x2a => transfer(cdb, be(&cdb[2..6]), be(&cdb[7..9]), true, (disk, traits)),
        0x88 | 0x8a if !lacks(Lack::LongCdbs) => {
            let is_write = cdb[0] == 0x8a;
            let (first, count) = (be(&cdb[2..10]), be(&cdb[10..14]));
            transfer(cdb, first, count, is_write, (disk, traits))
        }
        0x35 => Action::Flush,
        0x91 if !lacks(Lack::LongCdbs) => Action::Flush,
        _ => Action::Check(INVALID_OPCODE),
    }
}

fn cut(mut data: Vec<u8>, allocated: u64) -> Action {
    data.truncate(allocated as usize);
    Action::Return(data)
}

fn transfer(
    cdb: &[u8],
    first: u64,
    count: u64,
    is_write: bool,
    (disk, traits): (&Disk, &Traits),
) -> Action {
    const FUA: u8 = 0x08;
    let fua = cdb[1] & FUA != 0;
    // SBC-3 5.32: FUA is reserved if MODE SENSE does not report DPOFUA.
    if fua && !traits.dpofua {
        return Action::Check(INVALID_FIELD);
    }
    let blocks = first..first.saturating_add(count);
    match (disk.contains(&blocks), is_write) {
        (false, _) => Action::Check(OUT_OF_RANGE),
        (true, true) => Action::Write { blocks, fua },
        (true, false) => Action::Read(blocks),
    }
}

fn inquiry(cdb: &[u8], name: u8) -> Action {
    let page = |body: &[u8]| [&[0, cdb[2], 0, body.len() as u8], body].concat();
    let data = match (cdb[1] & 1, cdb[2]) {
        (0, 0) => {
            let mut standard = vec![b' '; 36];
            standard[..8].copy_from_slice(&[0, 0, 6, 2, 31, 0, 0, 2]);
            standard[8..15].copy_from_slice(b"FOREIGN");
            standard
        }
        (1, 0x00) => page(&[0x00, 0x80, 0x83]),
        (1, 0x80) => page(b"F0123456"),
        // A binary NAA designator of the logical unit.
        (1, 0x83) => page(&[1, 3, 0, 8, 0x50, 0x11, 0x22, 0x33, 0x44, 0x55, 0x66, name]),
        _ => return Action::Check(INVALID_FIELD),
    };
    cut(data, be(&cdb[3..5]))
}

/// Mode parameter header and caching mode page.
fn mode_sense(disk: &Disk, traits: &Traits) -> Vec<u8> {
    const DPOFUA: u8 = 0x10;
    const WCE: u8 = 0x04;
    let mut mode = vec![0; 24];
    (mode[0], mode[2]) = (23, if traits.dpofua { DPOFUA } else { 0 });
    (mode[4], mode[5]) = (0x08, 0x12);
    mode[6] = if disk.has_cache() { WCE } else { 0 };
    mode
}
