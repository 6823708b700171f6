//! System calls on files and devices that the ring lacks.

use std::io;
use std::ops::Range;
use std::os::fd::BorrowedFd;

use rustix::fs::{AtFlags, FallocateFlags, OFlags, SeekFrom, StatxFlags};
use rustix::io::Errno;

use crate::block::{Extent, ExtentKind};

/// Most extents of one answer; the range that it covers is shorter then.
const MAX_EXTENTS: usize = 4096;

/// `BLKDISCARD` of `linux/fs.h`.
const BLKDISCARD: rustix::ioctl::Opcode = rustix::ioctl::opcode::none(0x12, 119);

/// `TMPFS_MAGIC` and `RAMFS_MAGIC` of `linux/magic.h`.
const IN_MEMORY: [u64; 2] = [0x0102_1994, 0x8584_58f6];

/// Gives up the contents of a part of a device.
#[allow(unsafe_code, reason = "ioctl(2) has no safe wrapper")]
pub(super) fn discard(device: BorrowedFd<'_>, range: &Range<u64>) -> io::Result<()> {
    let range = [range.start, range.end - range.start];
    // SAFETY: the request takes a pointer to start and length, two 64-bit numbers, which it only
    // reads.
    let request = unsafe { rustix::ioctl::Setter::<BLKDISCARD, [u64; 2]>::new(range) };
    // SAFETY: as above; the descriptor is borrowed for the call.
    unsafe { rustix::ioctl::ioctl(device, request)? };
    Ok(())
}

/// Changes flags of the open file description.
pub(super) fn set_flags(file: BorrowedFd<'_>, flags: OFlags, on: bool) -> io::Result<()> {
    let mut all = rustix::fs::fcntl_getfl(file)?;
    all.set(flags, on);
    Ok(rustix::fs::fcntl_setfl(file, all)?)
}

/// Alignment that direct I/O of a file demands of offsets and lengths, in bytes; 0 where it has
/// none, and a cautious page where the kernel does not say (before Linux 6.1).
pub(super) fn direct_alignment(file: BorrowedFd<'_>) -> io::Result<u32> {
    let stat = rustix::fs::statx(file, c"", AtFlags::EMPTY_PATH, StatxFlags::DIOALIGN)?;
    let is_known = stat.stx_mask & StatxFlags::DIOALIGN.bits() != 0;
    Ok(if is_known {
        stat.stx_dio_offset_align
    } else {
        4096
    })
}

/// Returns whether reads and writes of a file are copies in memory.
pub(super) fn is_in_memory(file: BorrowedFd<'_>) -> bool {
    let system = rustix::fs::fstatfs(file);
    system.is_ok_and(|system| IN_MEMORY.contains(&(system.f_type as u64)))
}

/// Returns whether the file system punches holes, tried beyond the end, where nothing is lost. The
/// size stays.
pub(super) fn can_punch(file: BorrowedFd<'_>, end: u64) -> bool {
    let mode = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
    rustix::fs::fallocate(file, mode, end.next_multiple_of(1 << 20), 1 << 20).is_ok()
}

/// Allocation of a range of a file, from its start on, in whole blocks. A block in which data and a
/// hole meet is data. The file position moves, which nothing uses.
pub(super) fn status_of(
    file: BorrowedFd<'_>,
    range: &Range<u64>,
    block: u64,
) -> io::Result<Vec<Extent>> {
    let seek = |to| rustix::fs::seek(file, to);
    let mut extents: Vec<Extent> = Vec::new();
    let (mut at, mut looked) = (range.start, range.start);
    let mut push = |from: &mut u64, to: u64, kind| {
        if to > *from {
            let len = to - *from;
            extents.push(Extent { len, kind });
            *from = to;
        }
        extents.len() < MAX_EXTENTS
    };
    while at < range.end {
        let hole = match seek(SeekFrom::Hole(looked)) {
            // Every file ends with a hole. One that has become shorter reports none.
            Ok(hole) => hole.min(range.end),
            Err(Errno::NXIO) => looked,
            Err(error) => return Err(error.into()),
        };
        if hole >= range.end {
            push(&mut at, range.end, ExtentKind::Data);
            break;
        }
        let data = match seek(SeekFrom::Data(hole)) {
            Ok(data) => data.min(range.end),
            Err(Errno::NXIO) => range.end,
            Err(error) => return Err(error.into()),
        };
        let from = hole.next_multiple_of(block);
        let to = data - data % block;
        looked = data;
        if to > from {
            if !push(&mut at, from, ExtentKind::Data) || !push(&mut at, to, ExtentKind::Hole) {
                break;
            }
        } else if data >= range.end {
            push(&mut at, range.end, ExtentKind::Data);
        }
    }
    Ok(extents)
}
