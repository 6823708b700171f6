//! System calls for the files and block devices of backends.

use std::io;
use std::num::NonZeroU64;
use std::ops::Range;
use std::os::fd::BorrowedFd;

use nix::fcntl::{FcntlArg, fcntl};
use riser_reactor::Handle;
use riser_reactor::simulated::Object;

use super::health::Space;

/// Returns the size of an open file in bytes.
pub(super) fn file_size(file: &Handle) -> io::Result<u64> {
    match file.fd() {
        // Don't use a copy of the descriptor, because closing it would flush all data on some file
        // systems.
        Some(fd) => Ok(u64::try_from(rustix::fs::fstat(fd)?.st_size).unwrap_or(0)),
        None => Ok(file.disk().len()),
    }
}

/// Changes the size of an open file.
pub(super) fn set_file_size(file: &Handle, len: u64) -> io::Result<()> {
    match file.fd() {
        Some(fd) => Ok(rustix::fs::ftruncate(fd, len)?),
        None => {
            file.disk().set_len(len);
            Ok(())
        }
    }
}

/// Extends an open file durably. After a crash, it must not be shorter than the disk that
/// initiators have seen.
pub(super) fn extend(file: &Handle, len: u64) -> io::Result<()> {
    set_file_size(file, len)?;
    match file.fd() {
        Some(fd) => Ok(rustix::fs::fsync(fd)?),
        None => Ok(()),
    }
}

/// Reads at an offset until the end of the file. Returns the number of bytes.
pub(super) fn read_at(file: &Handle, into: &mut [u8], offset: u64) -> io::Result<usize> {
    let Some(fd) = file.fd() else {
        return file.disk().try_read(offset, into);
    };
    let mut done = 0;
    while done < into.len() {
        match rustix::io::pread(fd, &mut into[done..], offset + done as u64) {
            Ok(0) => break,
            Ok(len) => done += len,
            Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
    Ok(done)
}

/// Ensures that the next read of a range accesses the medium instead of cached data. Data that was
/// not written back yet stays in the cache. This is only a hint, so errors are ignored.
pub(super) fn drop_cached(file: &Handle, offset: u64, len: u64) {
    if let Some(fd) = file.fd() {
        let pages = whole_pages(offset, len, rustix::param::page_size() as u64);
        let len = NonZeroU64::new(pages.end - pages.start);
        let _ = rustix::fs::fadvise(fd, pages.start, len, rustix::fs::Advice::DontNeed);
    } else if let Some(Object::File(file)) = file.simulated() {
        file.disk().drop_cached(offset, len);
    }
}

/// Extends a range to whole pages, because the kernel ignores incomplete pages at both ends.
fn whole_pages(offset: u64, len: u64, page: u64) -> Range<u64> {
    offset - offset % page..(offset + len).next_multiple_of(page)
}

/// Writes at an offset.
pub(super) fn write_at(file: &Handle, from: &[u8], offset: u64) -> io::Result<()> {
    let Some(fd) = file.fd() else {
        file.disk().write(offset, from);
        return Ok(());
    };
    let mut done = 0;
    while done < from.len() {
        match rustix::io::pwrite(fd, &from[done..], offset + done as u64) {
            Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
            Ok(len) => done += len,
            Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
    Ok(())
}

/// Flushes the data of a file to stable storage.
pub(super) fn sync_data(file: &Handle) -> io::Result<()> {
    match file.fd() {
        Some(fd) => Ok(rustix::fs::fdatasync(fd)?),
        None => match file.simulated() {
            Some(Object::File(file)) => file.sync(),
            _ => Err(io::ErrorKind::Unsupported.into()),
        },
    }
}

/// Returns the space used by an open file and available on its file system. Blocks if the file
/// system is not responding.
pub(super) fn space(file: &Handle) -> io::Result<Space> {
    let Some(fd) = file.fd() else {
        let disk = file.disk();
        let allocated = disk.allocated();
        let free = disk.len().saturating_sub(allocated);
        return Ok(Space { allocated, free });
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn range_includes_incomplete_pages() {
        assert_eq!(whole_pages(66_040, 520, 4096), 65_536..69_632);
        assert_eq!(whole_pages(4096, 8192, 4096), 4096..12_288);
        assert_eq!(whole_pages(4095, 2, 4096), 0..8192);
    }
}
