//! System calls for open files and block devices.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};

use arrayvec::ArrayVec;
use riser_memory::sys::{self, ReceivePiece, SendPiece};
use riser_memory::{MappedFile, MemSlice, Memory};
use riser_reactor::Handle;
use rustix::fs::{AtFlags, FallocateFlags, OFlags, SeekFrom, StatxFlags};
use rustix::io::Errno;

/// Opens the same file again with the same access mode, as a separate open file description.
pub(super) fn reopen(file: &Handle) -> io::Result<Handle> {
    let Some(fd) = file.fd() else {
        return Ok(file.disk().reopen()?.into());
    };
    let flags = rustix::fs::fcntl_getfl(fd)? & (OFlags::RWMODE | OFlags::DIRECT);
    // Don't use the path of the file, which may refer to another file now. dup(2) would share the
    // open file description. In this case, an error that is only reported once would be shared as
    // well.
    let path = format!("/proc/self/fd/{}", fd.as_raw_fd());
    let fd = rustix::fs::open(path, flags | OFlags::CLOEXEC, rustix::fs::Mode::empty())?;
    Ok(fd.into())
}

/// Alignment of memory addresses, and of offsets and lengths, for direct I/O in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Align {
    /// Alignment of memory addresses.
    pub memory: u32,
    /// Alignment of offsets and lengths.
    pub offset: u32,
}

/// Returns the alignment reported by the kernel. Returns `None` if direct I/O is not supported for
/// this file, and `fallback` for both if the kernel or file system does not report it.
pub fn direct_alignment(fd: BorrowedFd<'_>, fallback: u32) -> io::Result<Option<Align>> {
    let st = rustix::fs::statx(fd, c"", AtFlags::EMPTY_PATH, StatxFlags::DIOALIGN)?;
    // This applies to Linux versions before 6.1, and to file systems that don't report it. The
    // first read will show whether this is sufficient.
    if st.stx_mask & StatxFlags::DIOALIGN.bits() == 0 {
        return Ok(Some(Align {
            memory: fallback,
            offset: fallback,
        }));
    }
    Ok((st.stx_dio_offset_align != 0).then_some(Align {
        memory: st.stx_dio_mem_align.max(1),
        offset: st.stx_dio_offset_align,
    }))
}

/// Enables direct I/O for a file whose user has blocks of `block_size` bytes. Its alignment is
/// `fallback` if the kernel does not report it.
///
/// # Errors
/// Returns the reason why direct I/O cannot be used. In this case it is disabled.
pub fn enable_direct(file: &File, block_size: u32, fallback: u32) -> Result<Align, String> {
    try_direct(file.as_fd(), block_size, fallback).inspect_err(|_| {
        // If this fails, it wasn't enabled.
        let _ = set_direct(file.as_fd(), false);
    })
}

fn try_direct(fd: BorrowedFd<'_>, block_size: u32, fallback: u32) -> Result<Align, String> {
    set_direct(fd, true).map_err(|e| format!("rejected by the file system: {e}"))?;
    let align = direct_alignment(fd, fallback)
        .map_err(|e| e.to_string())?
        .ok_or("the file system does not support it for this file")?;
    // Otherwise a write of a single block would be a read-modify-write, and two workers could
    // overwrite each other's data.
    if !block_size.is_multiple_of(align.offset) {
        return Err(format!(
            "it requires blocks of {} bytes, but the unit has blocks of {block_size} bytes",
            align.offset
        ));
    }
    // Some file systems accept the flag, but then all requests fail.
    let block = Memory::new(align.offset as usize).map_err(|e| e.to_string())?;
    let block = block.whole().slice(0..align.offset as usize);
    sys::read_at(fd, &block.expect("as long as the mapping at least"), 0)
        .map_err(|e| format!("the first read failed: {e}"))?;
    Ok(align)
}

/// Enables or disables `O_DIRECT` for the open file description.
fn set_direct(fd: BorrowedFd<'_>, on: bool) -> io::Result<()> {
    let mut flags = rustix::fs::fcntl_getfl(fd)?;
    flags.set(OFlags::DIRECT, on);
    Ok(rustix::fs::fcntl_setfl(fd, flags)?)
}

/// Returns true if the file system supports punching holes. This tries to punch `len` bytes at
/// `beyond`, which must be past the end of the file.
#[must_use]
pub fn can_punch(fd: BorrowedFd<'_>, beyond: u64, len: u64) -> bool {
    // There is no data past the end, and the size is preserved, so the file is unchanged.
    let mode = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
    rustix::fs::fallocate(fd, mode, beyond, len).is_ok()
}

/// Returns whether there is data at `offset`, and the length of this extent, up to `len` bytes. Both
/// are whole blocks. A block with any data is data, and so is everything if the file system does not
/// report holes.
///
/// Changes the file position of the open file description, which we do not use.
pub fn extent(file: &Handle, offset: u64, len: u64, block_size: u32) -> io::Result<(bool, u64)> {
    let block = u64::from(block_size);
    let (is_data, extent) = match file.fd() {
        None => file.disk().extent(offset, len),
        Some(fd) => match seek_extent(fd, offset, len) {
            Err(Errno::INVAL | Errno::OPNOTSUPP) => (true, len),
            extent => extent?,
        },
    };
    Ok(match is_data || extent < block {
        true => (true, extent.next_multiple_of(block).max(block).min(len)),
        false => (false, extent - extent % block),
    })
}

fn seek_extent(fd: BorrowedFd<'_>, offset: u64, len: u64) -> Result<(bool, u64), Errno> {
    let seek = |to| rustix::fs::seek(fd, to);
    let end = offset.saturating_add(len);
    match seek(SeekFrom::Data(offset)) {
        // SEEK_DATA returns the next data. If it's after `offset`, there is a hole at `offset`.
        Ok(data) if data > offset => Ok((false, data.min(end) - offset)),
        Ok(_) => Ok((true, seek(SeekFrom::Hole(offset))?.min(end) - offset)),
        // There is no data from here to the end of the file. If the file was truncated, the
        // remaining part can't be read, so we must not report that it is zero.
        Err(Errno::NXIO) => {
            let hole = seek(SeekFrom::End(0))?.min(end).saturating_sub(offset);
            Ok(if hole > 0 { (false, hole) } else { (true, len) })
        }
        Err(error) => Err(error),
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
    // Filled in place, because `collect` would have to copy the full array.
    let mut pieces = ArrayVec::<_, PIECES>::new();
    pieces.extend(into.iter().map(ReceivePiece::from));
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
    let mut pieces = ArrayVec::<_, PIECES>::new();
    pieces.extend(from.iter().map(SendPiece::from));
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

#[cfg(test)]
mod tests {
    use super::*;

    /// Otherwise, a user could skip reading lost data because it must be zero.
    #[test]
    fn missing_end_of_file_is_data() {
        let file = rustix::fs::memfd_create("short", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        rustix::fs::ftruncate(&file, 6000).unwrap();
        let file = Handle::from(file);
        let extent = |offset| extent(&file, offset, 65536 - offset, 512).unwrap();
        assert_eq!(extent(0), (false, 5632));
        assert_eq!(extent(5632), (true, 512));
        assert_eq!(extent(6144), (true, 65536 - 6144));
        rustix::io::pwrite(file.fd().unwrap(), &[1; 512], 4096).unwrap();
        assert_eq!(extent(0), (false, 4096));
        assert!(extent(4096).0 && extent(6144).0);
    }
}
