//! System calls on the files and block devices behind units.

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

/// An open file: where the calls of this module go that are made while it is served.
enum OpenFile<'a> {
    /// The host, by descriptor.
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

/// Size of an open file in bytes.
pub(super) fn file_size(file: &Handle) -> io::Result<u64> {
    match open_file(file) {
        // Closing a copy of the descriptor would have some file systems write everything back
        // first.
        OpenFile::Fd(fd) => Ok(u64::try_from(rustix::fs::fstat(fd)?.st_size).unwrap_or(0)),
        OpenFile::Memory(disk) => Ok(disk.len()),
    }
}

/// Gives an open file another size.
pub(super) fn set_file_size(file: &Handle, len: u64) -> io::Result<()> {
    match open_file(file) {
        OpenFile::Fd(fd) => Ok(rustix::fs::ftruncate(fd, len)?),
        OpenFile::Memory(disk) => {
            disk.set_len(len);
            Ok(())
        }
    }
}

/// Extends an open file, durably: after a crash it must not be shorter than the disk that
/// initiators have seen.
pub(super) fn extend(file: &Handle, len: u64) -> io::Result<()> {
    set_file_size(file, len)?;
    match open_file(file) {
        OpenFile::Fd(fd) => Ok(rustix::fs::fsync(fd)?),
        OpenFile::Memory(_) => Ok(()),
    }
}

/// Room of an open file and its file system. Blocks as long as that does.
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
    // `st_blocks` counts units of 512 bytes for every block size of the file system.
    let allocated = u64::try_from(stat.st_blocks)
        .unwrap_or(0)
        .saturating_mul(512);
    let free = system.f_bavail.saturating_mul(system.f_frsize);
    Ok(Space { allocated, free })
}

/// Other processes that may have the file open.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Lock {
    /// No other process may have it locked: the unit can be written.
    Exclusive,
    /// Others that only read.
    Shared,
}

/// Locks the whole file for this open file description; false where another holds it. Unlike
/// a POSIX lock, it is not lost when another descriptor of the same file is closed (fcntl(2)).
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
        // POSIX lets a system answer with either.
        Err(nix::errno::Errno::EAGAIN | nix::errno::Errno::EACCES) => Ok(false),
        Err(e) => Err(e.into()),
    }
}

/// Opens the same file again: another open file description, with the same access.
pub(super) fn reopen(file: &Handle) -> io::Result<Handle> {
    let fd = match open_file(file) {
        OpenFile::Fd(fd) => fd,
        OpenFile::Memory(disk) => return Ok(disk.reopen()?.into()),
    };
    let flags = rustix::fs::fcntl_getfl(fd)? & (OFlags::RWMODE | OFlags::DIRECT);
    // Not by the file's own path, which may lead to another file by now. dup(2) would share the
    // open file description, and with it the error that only one reader of it sees.
    let path = format!("/proc/self/fd/{}", fd.as_raw_fd());
    let fd = rustix::fs::open(path, flags | OFlags::CLOEXEC, rustix::fs::Mode::empty())?;
    Ok(fd.into())
}

/// Turns `O_DIRECT` on or off for the open file description.
pub(super) fn set_direct(fd: BorrowedFd<'_>, on: bool) -> io::Result<()> {
    let mut flags = rustix::fs::fcntl_getfl(fd)?;
    flags.set(OFlags::DIRECT, on);
    Ok(rustix::fs::fcntl_setfl(fd, flags)?)
}

/// Alignment of addresses, and of offsets and lengths, for direct I/O, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Align {
    pub(super) memory: u32,
    pub(super) offset: u32,
}

/// The alignment the kernel states: `None` where the file has no direct I/O, and a cautious page
/// for both where the kernel or file system does not say.
pub(super) fn direct_alignment(fd: BorrowedFd<'_>) -> io::Result<Option<Align>> {
    let st = rustix::fs::statx(fd, c"", AtFlags::EMPTY_PATH, StatxFlags::DIOALIGN)?;
    // Before Linux 6.1, and for file systems that do not fill it in. The first read then shows
    // whether a page is enough.
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

/// Size of a block device in bytes.
///
/// Moves the description's file position, which nothing of ours uses.
pub(super) fn device_size(fd: BorrowedFd<'_>) -> io::Result<u64> {
    Ok(rustix::fs::seek(fd, SeekFrom::End(0))?)
}

/// Size of a block device's logical block in bytes.
pub(super) fn device_logical_block(fd: BorrowedFd<'_>) -> io::Result<u32> {
    Ok(rustix::fs::ioctl_blksszget(fd)?)
}

/// Size of a block device's physical block in bytes.
pub(super) fn device_physical_block(fd: BorrowedFd<'_>) -> io::Result<u32> {
    Ok(rustix::fs::ioctl_blkpbszget(fd)?)
}

/// Returns true if the file system can punch holes, tried on `len` bytes at `beyond`, which must
/// lie past the end of the file.
pub(super) fn can_punch(fd: BorrowedFd<'_>, beyond: u64, len: u64) -> bool {
    // Beyond the end there is nothing to lose, and the size is kept, so a file is not changed by
    // being tried.
    let mode = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
    rustix::fs::fallocate(fd, mode, beyond, len).is_ok()
}

/// Looks for data at `offset`, and how far that state reaches, up to `len` bytes.
///
/// Moves the description's file position, which nothing of ours uses.
pub(super) fn extent(file: &Handle, offset: u64, len: u64) -> io::Result<(bool, u64)> {
    let fd = match open_file(file) {
        OpenFile::Fd(fd) => fd,
        OpenFile::Memory(disk) => return Ok(disk.extent(offset, len)),
    };
    let seek = |to| rustix::fs::seek(fd, to);
    let end = offset.saturating_add(len);
    match seek(SeekFrom::Data(offset)) {
        // SEEK_DATA gives the next data: where that is later than `offset`, a hole is here.
        Ok(data) if data > offset => Ok((false, data.min(end) - offset)),
        Ok(_) => Ok((true, seek(SeekFrom::Hole(offset))?.min(end) - offset)),
        // No data from here to the end of the file.
        Err(Errno::NXIO) => Ok((false, len)),
        Err(e) => Err(e.into()),
    }
}

/// Pieces of a list that is read or written at once.
const PIECES: usize = 32;

/// Whether reads and writes of an open file are copies in memory, and wait for no medium, at least
/// as long as nothing of it was swapped out.
pub(super) fn is_in_memory(fd: BorrowedFd<'_>) -> bool {
    rustix::fs::fstatfs(fd)
        .is_ok_and(|system| [libc::TMPFS_MAGIC, RAMFS_MAGIC].contains(&system.f_type))
}

/// `RAMFS_MAGIC` of `linux/magic.h`.
const RAMFS_MAGIC: libc::c_long = 0x8584_58f6;

/// Maps a file in memory for reading; `None` where that cannot be done, and system calls read it.
pub(super) fn map(file: &File) -> Option<MappedFile> {
    let len = file.metadata().ok()?.len();
    MappedFile::new(file.as_fd(), len).ok()
}

/// Reads into the pieces, in order, in this call; returns the number of bytes, or the error number.
/// `None` for a list that is too long.
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

/// As [`read_now`], for a write.
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

/// Repeats a call that a signal interrupted.
fn until_done(mut call: impl FnMut() -> io::Result<usize>) -> Result<usize, i32> {
    loop {
        match call() {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            result => return result.map_err(|e| e.raw_os_error().unwrap_or(libc::EIO)),
        }
    }
}

/// Reads one block to see whether direct I/O really works.
pub(super) fn probe_read(fd: BorrowedFd<'_>, block: &MemSlice) -> io::Result<()> {
    sys::read_at(fd, block, 0).map(drop)
}
