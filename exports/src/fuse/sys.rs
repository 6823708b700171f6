//! Messages between kernel and FUSE server: the `linux/fuse.h` structures (protocol 7.40) required
//! for a disk file, in host byte order.

#![allow(unsafe_code, reason = "calls an ioctl that no library has")]

use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};

use num_enum::TryFromPrimitive;
use zerocopy::byteorder::native_endian::{I32, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// Root node.
pub(super) const ROOT: u64 = 1;

/// Min buffer size for receiving a kernel request, in bytes.
pub(super) const MIN_ROOM: usize = 8192;

/// Min `max_write` value supported by the kernel, in bytes.
pub(super) const MIN_WRITE: u32 = 4096;

/// Request opcode, if supported.
#[derive(Clone, Copy, Debug, PartialEq, Eq, TryFromPrimitive)]
#[repr(u32)]
pub(super) enum Opcode {
    Lookup = 1,
    Forget = 2,
    Getattr = 3,
    Setattr = 4,
    Symlink = 6,
    Link = 13,
    Open = 14,
    Read = 15,
    Write = 16,
    Statfs = 17,
    Release = 18,
    Fsync = 20,
    Flush = 25,
    Opendir = 27,
    Readdir = 28,
    Releasedir = 29,
    Destroy = 38,
    BatchForget = 42,
    Fallocate = 43,
    Lseek = 46,
}

/// Request header: `struct fuse_in_header`.
#[derive(Clone, Copy, Debug, Default, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub(super) struct InHeader {
    /// Request length including this header, in bytes.
    pub(super) len: U32,
    pub(super) opcode: U32,
    /// Request ID assigned by the kernel.
    pub(super) unique: U64,
    pub(super) nodeid: U64,
    pub(super) uid: U32,
    pub(super) gid: U32,
    pub(super) pid: U32,
    pub(super) padding: U32,
}

/// Response header: `struct fuse_out_header`.
#[derive(Clone, Copy, Debug, Default, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub(super) struct OutHeader {
    /// Response length including this header, in bytes.
    pub(super) len: U32,
    /// 0, or a negative error code.
    pub(super) error: I32,
    pub(super) unique: U64,
}

/// READ, WRITE and READDIR argument: `struct fuse_read_in` and `struct fuse_write_in` use the same
/// fields.
#[derive(Clone, Copy, Debug, Default, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub(super) struct IoIn {
    pub(super) fh: U64,
    pub(super) offset: U64,
    pub(super) size: U32,
    pub(super) io_flags: U32,
    pub(super) lock_owner: U64,
    /// Open file flags.
    pub(super) flags: I32,
    pub(super) padding: U32,
}

/// FSYNC and RELEASE argument, starting with the handle of the open file: `struct fuse_fsync_in`
/// and `struct fuse_release_in`.
#[derive(Clone, Copy, Debug, Default, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub(super) struct FileIn {
    pub(super) fh: U64,
}

/// Start of the SETATTR argument: `struct fuse_setattr_in`.
#[derive(Clone, Copy, Debug, Default, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub(super) struct SetattrIn {
    pub(super) valid: U32,
    pub(super) padding: U32,
    pub(super) fh: U64,
    pub(super) size: U64,
}

/// Bits in [`SetattrIn::valid`]: `FATTR_MODE`, `FATTR_UID` and `FATTR_GID`.
pub(super) const SETS_OWNER: u32 = 0b111;
/// `FATTR_SIZE`.
pub(super) const SETS_SIZE: u32 = 1 << 3;
/// `FATTR_FH`: the request is for an open file, not for a path.
pub(super) const HAS_HANDLE: u32 = 1 << 6;

/// FALLOCATE argument: `struct fuse_fallocate_in`.
#[derive(Clone, Copy, Debug, Default, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub(super) struct FallocateIn {
    pub(super) fh: U64,
    pub(super) offset: U64,
    pub(super) length: U64,
    pub(super) mode: I32,
    pub(super) padding: U32,
}

/// LSEEK argument: `struct fuse_lseek_in`.
#[derive(Clone, Copy, Debug, Default, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub(super) struct LseekIn {
    pub(super) fh: U64,
    pub(super) offset: U64,
    pub(super) whence: I32,
    pub(super) padding: U32,
}

/// Node attributes: `struct fuse_attr`.
#[derive(Clone, Copy, Debug, Default, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub(super) struct Attr {
    pub(super) ino: U64,
    pub(super) size: U64,
    /// In 512-byte units.
    pub(super) blocks: U64,
    pub(super) atime: U64,
    pub(super) mtime: U64,
    pub(super) ctime: U64,
    pub(super) atimensec: U32,
    pub(super) mtimensec: U32,
    pub(super) ctimensec: U32,
    pub(super) mode: U32,
    pub(super) nlink: U32,
    pub(super) uid: U32,
    pub(super) gid: U32,
    pub(super) rdev: U32,
    pub(super) blksize: U32,
    pub(super) flags: U32,
}

/// GETATTR and SETATTR response: `struct fuse_attr_out`.
#[derive(Clone, Copy, Debug, Default, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub(super) struct AttrOut {
    /// How long the kernel can cache the attributes, in seconds.
    pub(super) attr_valid: U64,
    pub(super) attr_valid_nsec: U32,
    pub(super) dummy: U32,
    pub(super) attr: Attr,
}

/// LOOKUP response: `struct fuse_entry_out`.
#[derive(Clone, Copy, Debug, Default, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub(super) struct EntryOut {
    pub(super) nodeid: U64,
    pub(super) generation: U64,
    pub(super) entry_valid: U64,
    pub(super) attr_valid: U64,
    pub(super) entry_valid_nsec: U32,
    pub(super) attr_valid_nsec: U32,
    pub(super) attr: Attr,
}

/// Bits in [`OpenOut::open_flags`].
pub(super) mod open {
    /// Don't use the page cache: all reads and writes are sent as requests.
    pub(crate) const DIRECT_IO: u32 = 1 << 0;
    /// Keep existing data in the page cache.
    pub(crate) const KEEP_CACHE: u32 = 1 << 1;
    /// Non-extending writes can be sent in parallel.
    pub(crate) const PARALLEL_DIRECT_WRITES: u32 = 1 << 6;
}

/// OPEN and OPENDIR response: `struct fuse_open_out`.
#[derive(Clone, Copy, Debug, Default, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub(super) struct OpenOut {
    pub(super) fh: U64,
    pub(super) open_flags: U32,
    pub(super) backing_id: U32,
}

/// WRITE response: `struct fuse_write_out`.
#[derive(Clone, Copy, Debug, Default, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub(super) struct WriteOut {
    pub(super) size: U32,
    pub(super) padding: U32,
}

/// STATFS response: `struct fuse_statfs_out`.
#[derive(Clone, Copy, Debug, Default, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub(super) struct StatfsOut {
    pub(super) blocks: U64,
    pub(super) bfree: U64,
    pub(super) bavail: U64,
    pub(super) files: U64,
    pub(super) ffree: U64,
    pub(super) bsize: U32,
    pub(super) namelen: U32,
    pub(super) frsize: U32,
    pub(super) padding: U32,
    pub(super) spare: [U32; 6],
}

/// LSEEK response: `struct fuse_lseek_out`.
#[derive(Clone, Copy, Debug, Default, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub(super) struct LseekOut {
    pub(super) offset: U64,
}

/// Header for a READDIR entry, followed by the name: `struct fuse_dirent`.
#[derive(Clone, Copy, Debug, Default, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub(super) struct Dirent {
    pub(super) ino: U64,
    /// Next entry offset.
    pub(super) off: U64,
    pub(super) namelen: U32,
    /// File type: upper four mode bits.
    pub(super) kind: U32,
}

/// READDIR entry size in bytes, for a name with `namelen` bytes.
pub(super) fn dirent_len(namelen: usize) -> usize {
    (size_of::<Dirent>() + namelen).next_multiple_of(8)
}

/// `FUSE_DEV_IOC_CLONE`, `_IOR(229, 0, uint32_t)`: adds a new `/dev/fuse` file to an existing
/// connection as a queue.
const CLONE: libc::Ioctl = 0x8004_e500;

/// Opens an additional queue for a connection. A request is sent to the first queue which reads it,
/// and the response must be sent on the same queue.
///
/// # Errors
/// Returns an error if `/dev/fuse` can't be opened; `EINVAL` if the connection is closed.
pub(super) fn clone_queue(fd: BorrowedFd<'_>) -> io::Result<OwnedFd> {
    let queue = File::options().read(true).write(true).open("/dev/fuse")?;
    let source: u32 = fd.as_raw_fd().cast_unsigned();
    // SAFETY: the call only reads an integer, which outlives it.
    let result = unsafe { libc::ioctl(queue.as_raw_fd(), CLONE, &raw const source) };
    match result {
        0 => Ok(queue.into()),
        _ => Err(io::Error::last_os_error()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn structures_and_constants_match_kernel() {
        let lengths = [
            (size_of::<InHeader>(), 40),
            (size_of::<OutHeader>(), 16),
            (size_of::<IoIn>(), 40),
            (size_of::<FallocateIn>(), 32),
            (size_of::<LseekIn>(), 24),
            (size_of::<Attr>(), 88),
            (size_of::<AttrOut>(), 104),
            (size_of::<EntryOut>(), 128),
            (size_of::<OpenOut>(), 16),
            (size_of::<WriteOut>(), 8),
            (size_of::<StatfsOut>(), 80),
            (size_of::<LseekOut>(), 8),
            (size_of::<Dirent>(), 24),
        ];
        for (ours, theirs) in lengths {
            assert_eq!(ours, theirs);
        }
        assert_eq!((dirent_len(1), dirent_len(8), dirent_len(9)), (32, 32, 40));
    }
}
