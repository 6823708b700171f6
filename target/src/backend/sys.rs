//! The system calls that the standard library lacks, with their results checked.

#![allow(
    unsafe_code,
    reason = "fcntl, ioctl, statx, lseek and fallocate have no safe wrapper in the standard library"
)]

use std::io;
use std::mem;
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};

/// `BLKGETSIZE64`: the size of a block device in bytes, as a 64-bit integer.
const BLKGETSIZE64: libc::c_ulong = 0x8008_1272;

fn check(result: libc::c_int) -> io::Result<()> {
    if result < 0 {
        Err(io::Error::last_os_error())
    } else {
        Ok(())
    }
}

/// Who else may have the file open.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Lock {
    /// Nobody.
    Exclusive,
    /// Others that only read.
    Shared,
}

/// Locks the whole file for this open file description; false where another holds it.
pub(super) fn lock(fd: BorrowedFd<'_>, lock: Lock) -> io::Result<bool> {
    // SAFETY: `flock` is plain data for which zeroes are valid; zero length means the whole file.
    let mut range: libc::flock = unsafe { mem::zeroed() };
    range.l_type = match lock {
        Lock::Exclusive => libc::F_WRLCK,
        Lock::Shared => libc::F_RDLCK,
    } as _;
    range.l_whence = libc::SEEK_SET as _;
    // SAFETY: an open descriptor and a valid `flock`.
    let result = check(unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_OFD_SETLK, &range) });
    match result {
        Ok(()) => Ok(true),
        Err(e) if matches!(e.raw_os_error(), Some(libc::EAGAIN | libc::EACCES)) => Ok(false),
        Err(e) => Err(e),
    }
}

/// Opens the same file again: another open file description, with the same access.
pub(super) fn reopen(fd: BorrowedFd<'_>) -> io::Result<OwnedFd> {
    use rustix::fs::OFlags;

    let flags = rustix::fs::fcntl_getfl(fd)? & (OFlags::RWMODE | OFlags::DIRECT);
    let path = format!("/proc/self/fd/{}", fd.as_raw_fd());
    let fd = rustix::fs::open(path, flags | OFlags::CLOEXEC, rustix::fs::Mode::empty())?;
    Ok(fd)
}

/// Turns `O_DIRECT` on or off for the open file description.
pub(super) fn set_direct(fd: BorrowedFd<'_>, on: bool) -> io::Result<()> {
    // SAFETY: an open descriptor; the calls take and return integers.
    let flags = unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_GETFL) };
    check(flags)?;
    let flags = if on {
        flags | libc::O_DIRECT
    } else {
        flags & !libc::O_DIRECT
    };
    // SAFETY: as above.
    check(unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_SETFL, flags) })
}

/// What direct I/O needs of addresses and of offsets and lengths, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Align {
    pub(super) memory: u32,
    pub(super) offset: u32,
}

/// The alignment the kernel states: `None` where the file has no direct I/O, and a cautious page
/// for both where the kernel or file system does not say.
pub(super) fn direct_alignment(fd: BorrowedFd<'_>) -> io::Result<Option<Align>> {
    // SAFETY: `statx` is plain data for which zeroes are valid.
    let mut st: libc::statx = unsafe { mem::zeroed() };
    // SAFETY: an open descriptor, an empty path as the flag demands, and room for the answer.
    check(unsafe {
        libc::statx(
            fd.as_raw_fd(),
            c"".as_ptr(),
            libc::AT_EMPTY_PATH,
            libc::STATX_DIOALIGN,
            &raw mut st,
        )
    })?;
    if st.stx_mask & libc::STATX_DIOALIGN == 0 {
        return Ok(Some(Align {
            memory: 4096,
            offset: 4096,
        }));
    }
    Ok((st.stx_dio_offset_align != 0).then_some(Align {
        memory: st.stx_dio_mem_align.max(1),
        offset: st.stx_dio_offset_align,
    }))
}

/// Size of a block device in bytes.
pub(super) fn device_size(fd: BorrowedFd<'_>) -> io::Result<u64> {
    let mut size = 0u64;
    // SAFETY: the request writes one 64-bit integer.
    check(unsafe { libc::ioctl(fd.as_raw_fd(), BLKGETSIZE64 as _, &raw mut size) })?;
    Ok(size)
}

/// Size of a block device's logical block in bytes.
pub(super) fn device_logical_block(fd: BorrowedFd<'_>) -> io::Result<u32> {
    let mut size: libc::c_int = 0;
    // SAFETY: the request writes one integer.
    check(unsafe { libc::ioctl(fd.as_raw_fd(), libc::BLKSSZGET as _, &raw mut size) })?;
    u32::try_from(size).map_err(|_| io::ErrorKind::InvalidData.into())
}

/// Size of a block device's physical block in bytes.
pub(super) fn device_physical_block(fd: BorrowedFd<'_>) -> io::Result<u32> {
    let mut size: libc::c_uint = 0;
    // SAFETY: the request writes one unsigned integer.
    check(unsafe { libc::ioctl(fd.as_raw_fd(), libc::BLKPBSZGET as _, &raw mut size) })?;
    Ok(size)
}

/// Whether the file system can punch holes, tried on `len` bytes at `beyond`, which must lie past
/// the end of the file.
pub(super) fn can_punch(fd: BorrowedFd<'_>, beyond: u64, len: u64) -> bool {
    let mode = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
    let (Ok(beyond), Ok(len)) = (i64::try_from(beyond), i64::try_from(len)) else {
        return false;
    };
    // SAFETY: an open descriptor and integers.
    check(unsafe { libc::fallocate(fd.as_raw_fd(), mode, beyond, len) }).is_ok()
}

/// Whether there is data at `offset`, and how far that state reaches, up to `len` bytes.
///
/// Moves the description's file position, which nothing of ours uses.
pub(super) fn extent(fd: BorrowedFd<'_>, offset: u64, len: u64) -> io::Result<(bool, u64)> {
    let seek = |whence| -> io::Result<u64> {
        // SAFETY: an open descriptor and integers.
        let at = unsafe { libc::lseek(fd.as_raw_fd(), offset as i64, whence) };
        u64::try_from(at).map_err(|_| io::Error::last_os_error())
    };
    let end = offset.saturating_add(len);
    match seek(libc::SEEK_DATA) {
        Ok(data) if data > offset => Ok((false, data.min(end) - offset)),
        Ok(_) => Ok((true, seek(libc::SEEK_HOLE)?.min(end) - offset)),
        // No data from here to the end of the file.
        Err(e) if e.raw_os_error() == Some(libc::ENXIO) => Ok((false, len)),
        Err(e) => Err(e),
    }
}

/// Reads one block to see whether direct I/O really works.
pub(super) fn probe_read(fd: BorrowedFd<'_>, block: &riser_memory::MemSlice) -> io::Result<()> {
    // SAFETY: the slice keeps its range mapped and writable during the call.
    let n = unsafe { libc::pread(fd.as_raw_fd(), block.ptr().cast(), block.len(), 0) };
    check(n as libc::c_int)
}
