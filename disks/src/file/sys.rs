//! System calls for files and devices that are not supported by the ring.

use std::io;
use std::ops::Range;
use std::os::fd::BorrowedFd;

use riser_block::{Extent, ExtentKind};
use rustix::fs::{AtFlags, FallocateFlags, OFlags, SeekFrom, StatxFlags};
use rustix::io::Errno;

/// Max extents returned; if there are more, a smaller range is reported.
const MAX_EXTENTS: usize = 4096;

/// `BLKDISCARD` from `linux/fs.h`.
const BLKDISCARD: rustix::ioctl::Opcode = rustix::ioctl::opcode::none(0x12, 119);

/// `TMPFS_MAGIC` and `RAMFS_MAGIC` from `linux/magic.h`.
const IN_MEMORY: [u64; 2] = [0x0102_1994, 0x8584_58f6];

/// Discards a range on a device.
#[allow(unsafe_code, reason = "ioctl(2) has no safe wrapper")]
pub(super) fn discard(device: BorrowedFd<'_>, range: &Range<u64>) -> io::Result<()> {
    let range = [range.start, range.end - range.start];
    // SAFETY: the request expects a pointer to start and length (two 64-bit values), which are only
    // read.
    let request = unsafe { rustix::ioctl::Setter::<BLKDISCARD, [u64; 2]>::new(range) };
    // SAFETY: as above; the descriptor is borrowed for the call.
    unsafe { rustix::ioctl::ioctl(device, request)? };
    Ok(())
}

/// Sets or clears flags of the open file description.
pub(super) fn set_flags(file: BorrowedFd<'_>, flags: OFlags, on: bool) -> io::Result<()> {
    let mut all = rustix::fs::fcntl_getfl(file)?;
    all.set(flags, on);
    Ok(rustix::fs::fcntl_setfl(file, all)?)
}

/// Returns the alignment required for direct I/O on this file, in bytes. This is 0 if direct I/O is
/// not supported, and the page size if the kernel doesn't provide the value (before Linux 6.1).
pub(super) fn direct_alignment(file: BorrowedFd<'_>) -> io::Result<u32> {
    let stat = rustix::fs::statx(file, c"", AtFlags::EMPTY_PATH, StatxFlags::DIOALIGN)?;
    let is_known = stat.stx_mask & StatxFlags::DIOALIGN.bits() != 0;
    Ok(if is_known {
        stat.stx_dio_offset_align
    } else {
        4096
    })
}

/// Returns whether reads and writes for this file are just a memory copy.
pub(super) fn is_in_memory(file: BorrowedFd<'_>) -> bool {
    let system = rustix::fs::fstatfs(file);
    system.is_ok_and(|system| IN_MEMORY.contains(&(system.f_type as u64)))
}

/// Returns whether the file system can punch holes. We try it past the end of the file, so no data
/// is lost and the size doesn't change.
pub(super) fn can_punch(file: BorrowedFd<'_>, end: u64) -> bool {
    let mode = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
    rustix::fs::fallocate(file, mode, end.next_multiple_of(1 << 20), 1 << 20).is_ok()
}

/// Returns the allocation status for a file range, from its start, in whole blocks. If a block
/// contains both data and a hole, it is treated as data. This changes the file position, but we
/// don't use it.
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
            // There is always a hole at the end of a file. If the file was truncated, there may be
            // none.
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
