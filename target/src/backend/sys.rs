//! System calls for the files and block devices of backends.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};

use arrayvec::ArrayVec;
use nix::fcntl::{FcntlArg, fcntl};
use riser_memory::sys::{self, ReceivePiece, SendPiece};
use riser_memory::{MappedFile, MemSlice};
use riser_reactor::Handle;
use riser_reactor::simulated::{Disk, Object};
use rustix::fs::{AtFlags, FallocateFlags, OFlags, SeekFrom, StatxFlags};
use rustix::io::Errno;

use super::health::Space;

/// Target for the calls in this module that are made while an open file is served.
enum OpenFile<'a> {
    /// A file descriptor of the host.
    Fd(BorrowedFd<'a>),
    /// A disk in memory.
    Memory(&'a Disk),
}

fn open_file(file: &Handle) -> OpenFile<'_> {
    match (file.fd(), file.simulated()) {
        (Some(fd), _) => OpenFile::Fd(fd),
        (None, Some(Object::File(file))) => OpenFile::Memory(file.disk()),
        (None, _) => unreachable!("a backend's handle is a file's"),
    }
}

/// Returns the size of an open file in bytes.
pub(super) fn file_size(file: &Handle) -> io::Result<u64> {
    match open_file(file) {
        // Don't use a copy of the descriptor, because closing it would flush all data on some file
        // systems.
        OpenFile::Fd(fd) => Ok(u64::try_from(rustix::fs::fstat(fd)?.st_size).unwrap_or(0)),
        OpenFile::Memory(disk) => Ok(disk.len()),
    }
}

/// Changes the size of an open file.
pub(super) fn set_file_size(file: &Handle, len: u64) -> io::Result<()> {
    match open_file(file) {
        OpenFile::Fd(fd) => Ok(rustix::fs::ftruncate(fd, len)?),
        OpenFile::Memory(disk) => {
            disk.set_len(len);
            Ok(())
        }
    }
}

/// Extends an open file durably. After a crash, it must not be shorter than the disk that
/// initiators have seen.
pub(super) fn extend(file: &Handle, len: u64) -> io::Result<()> {
    set_file_size(file, len)?;
    match open_file(file) {
        OpenFile::Fd(fd) => Ok(rustix::fs::fsync(fd)?),
        OpenFile::Memory(_) => Ok(()),
    }
}

/// Returns the space used by an open file and available on its file system. Blocks if the file
/// system is not responding.
pub(super) fn space(file: &Handle) -> io::Result<Space> {
    let fd = match open_file(file) {
        OpenFile::Fd(fd) => fd,
        OpenFile::Memory(disk) => {
            let allocated = disk.allocated();
            let free = disk.len().saturating_sub(allocated);
            return Ok(Space { allocated, free });
        }
    };
    let stat = rustix::fs::fstat(fd)?;
    let system = rustix::fs::fstatvfs(fd)?;
    // `st_blocks` uses units of 512 bytes, regardless of the block size of the file system.
    let allocated = u64::try_from(stat.st_blocks)
        .unwrap_or(0)
        .saturating_mul(512);
    let free = system.f_bavail.saturating_mul(system.f_frsize);
    Ok(Space { allocated, free })
}

/// Kind of lock.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Lock {
    /// Excludes all other locks, so that the unit can be written.
    Exclusive,
    /// Excludes writers, but permits other readers.
    Shared,
}

/// Locks the whole file for this open file description. Returns false if it is locked by another
/// one. Unlike a POSIX lock, it is not released when another descriptor of the same file is closed
/// (fcntl(2)).
pub(super) fn lock(fd: BorrowedFd<'_>, lock: Lock) -> io::Result<bool> {
    let kind = match lock {
        Lock::Exclusive => libc::F_WRLCK,
        Lock::Shared => libc::F_RDLCK,
    };
    // A length of zero means the whole file.
    let range = libc::flock {
        l_type: kind as _,
        l_whence: libc::SEEK_SET as _,
        l_start: 0,
        l_len: 0,
        l_pid: 0,
    };
    match fcntl(fd, FcntlArg::F_OFD_SETLK(&range)) {
        Ok(_) => Ok(true),
        // POSIX permits both errors.
        Err(nix::errno::Errno::EAGAIN | nix::errno::Errno::EACCES) => Ok(false),
        Err(e) => Err(e.into()),
    }
}

/// Opens the same file again with the same access mode, as a separate open file description.
pub(super) fn reopen(file: &Handle) -> io::Result<Handle> {
    let fd = match open_file(file) {
        OpenFile::Fd(fd) => fd,
        OpenFile::Memory(disk) => return Ok(disk.reopen()?.into()),
    };
    let flags = rustix::fs::fcntl_getfl(fd)? & (OFlags::RWMODE | OFlags::DIRECT);
    // Don't use the path of the file, which may refer to another file now. dup(2) would share the
    // open file description. In this case, an error that is only reported once would be shared as
    // well.
    let path = format!("/proc/self/fd/{}", fd.as_raw_fd());
    let fd = rustix::fs::open(path, flags | OFlags::CLOEXEC, rustix::fs::Mode::empty())?;
    Ok(fd.into())
}

/// Enables or disables `O_DIRECT` for the open file description.
pub(super) fn set_direct(fd: BorrowedFd<'_>, on: bool) -> io::Result<()> {
    let mut flags = rustix::fs::fcntl_getfl(fd)?;
    flags.set(OFlags::DIRECT, on);
    Ok(rustix::fs::fcntl_setfl(fd, flags)?)
}

/// Alignment of memory addresses, and of offsets and lengths, for direct I/O in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Align {
    pub(super) memory: u32,
    pub(super) offset: u32,
}

/// Returns the alignment reported by the kernel. Returns `None` if direct I/O is not supported for
/// this file, and a page size for both if the kernel or file system does not report it.
pub(super) fn direct_alignment(fd: BorrowedFd<'_>) -> io::Result<Option<Align>> {
    let st = rustix::fs::statx(fd, c"", AtFlags::EMPTY_PATH, StatxFlags::DIOALIGN)?;
    // This applies to Linux versions before 6.1, and to file systems that don't report it. The
    // first read will show whether a page is sufficient.
    if st.stx_mask & StatxFlags::DIOALIGN.bits() == 0 {
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

/// Returns the size of a block device in bytes.
///
/// Changes the file position of the open file description, which we do not use.
pub(super) fn device_size(fd: BorrowedFd<'_>) -> io::Result<u64> {
    Ok(rustix::fs::seek(fd, SeekFrom::End(0))?)
}

/// Returns the logical block size of a block device in bytes.
pub(super) fn device_logical_block(fd: BorrowedFd<'_>) -> io::Result<u32> {
    Ok(rustix::fs::ioctl_blksszget(fd)?)
}

/// Returns the physical block size of a block device in bytes.
pub(super) fn device_physical_block(fd: BorrowedFd<'_>) -> io::Result<u32> {
    Ok(rustix::fs::ioctl_blkpbszget(fd)?)
}

/// Returns true if the file system supports punching holes. This tries to punch `len` bytes at
/// `beyond`, which must be past the end of the file.
pub(super) fn can_punch(fd: BorrowedFd<'_>, beyond: u64, len: u64) -> bool {
    // There is no data past the end, and the size is preserved, so the file is unchanged.
    let mode = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
    rustix::fs::fallocate(fd, mode, beyond, len).is_ok()
}

/// Returns whether there is data at `offset`, and the length of this extent, up to `len` bytes.
///
/// Changes the file position of the open file description, which we do not use.
pub(super) fn extent(file: &Handle, offset: u64, len: u64) -> io::Result<(bool, u64)> {
    let fd = match open_file(file) {
        OpenFile::Fd(fd) => fd,
        OpenFile::Memory(disk) => return Ok(disk.extent(offset, len)),
    };
    let seek = |to| rustix::fs::seek(fd, to);
    let end = offset.saturating_add(len);
    match seek(SeekFrom::Data(offset)) {
        // SEEK_DATA returns the next data. If it's after `offset`, there is a hole at `offset`.
        Ok(data) if data > offset => Ok((false, data.min(end) - offset)),
        Ok(_) => Ok((true, seek(SeekFrom::Hole(offset))?.min(end) - offset)),
        // There is no data from here to the end of the file.
        Err(Errno::NXIO) => Ok((false, len)),
        Err(e) => Err(e.into()),
    }
}

/// Maximum number of pieces to read or write in a single call.
const PIECES: usize = 32;

/// Returns whether reads and writes of an open file are copies in memory, which do not wait for a
/// medium unless data was swapped out.
pub(super) fn is_in_memory(fd: BorrowedFd<'_>) -> bool {
    rustix::fs::fstatfs(fd)
        .is_ok_and(|system| [libc::TMPFS_MAGIC, RAMFS_MAGIC].contains(&system.f_type))
}

/// `RAMFS_MAGIC` in `linux/magic.h`.
const RAMFS_MAGIC: libc::c_long = 0x8584_58f6;

/// Maps a file in memory for reading. Returns `None` if this is not possible and system calls must
/// be used.
pub(super) fn map(file: &File) -> Option<MappedFile> {
    let len = file.metadata().ok()?.len();
    MappedFile::new(file.as_fd(), len).ok()
}

/// Reads data into the pieces, in order, synchronously. Returns the number of bytes, or the error
/// number. Returns `None` if there are too many pieces.
pub(super) fn read_now(
    file: &Handle,
    mapped: Option<&MappedFile>,
    offset: u64,
    into: &[MemSlice],
) -> Option<Result<usize, i32>> {
    let fd = file.fd()?;
    if mapped.is_some_and(|mapped| mapped.read(fd, offset, into)) {
        return Some(Ok(into.iter().map(MemSlice::len).sum()));
    }
    if into.len() > PIECES {
        return None;
    }
    let mut pieces: ArrayVec<_, PIECES> = into.iter().map(ReceivePiece::from).collect();
    Some(until_done(|| sys::read_pieces_at(fd, &mut pieces, offset)))
}

/// Same as [`read_now`], but writes data.
pub(super) fn write_now(
    file: &Handle,
    offset: u64,
    from: &[MemSlice],
    durable: bool,
) -> Option<Result<usize, i32>> {
    let fd = file.fd().filter(|_| from.len() <= PIECES)?;
    let pieces: ArrayVec<_, PIECES> = from.iter().map(SendPiece::from).collect();
    Some(until_done(|| {
        sys::write_pieces_at(fd, &pieces, offset, durable)
    }))
}

/// Repeats a call that was interrupted by a signal.
fn until_done(mut call: impl FnMut() -> io::Result<usize>) -> Result<usize, i32> {
    loop {
        match call() {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            result => return result.map_err(|e| e.raw_os_error().unwrap_or(libc::EIO)),
        }
    }
}

/// Reads a block to check whether direct I/O works.
pub(super) fn probe_read(fd: BorrowedFd<'_>, block: &MemSlice) -> io::Result<()> {
    sys::read_at(fd, block, 0).map(drop)
}
