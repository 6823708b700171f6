//! Messages between the kernel and a FUSE server: the structures of `linux/fuse.h` (protocol 7.40)
//! that a disk's file needs, in the host's byte order.

#![allow(unsafe_code, reason = "calls an ioctl that no library has")]

use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};

use num_enum::TryFromPrimitive;
use zerocopy::byteorder::native_endian::{I32, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// The node that a mount begins with.
pub(super) const ROOT: u64 = 1;

/// Length of the smallest room that the kernel writes a request into, in bytes.
pub(super) const MIN_ROOM: usize = 8192;

/// Length of the smallest `max_write` that the kernel has, in bytes.
pub(super) const MIN_WRITE: u32 = 4096;

/// Operation of a request, as far as it is not refused for being unknown.
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

/// Head of each request: `struct fuse_in_header`.
#[derive(Clone, Copy, Debug, Default, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub(super) struct InHeader {
    /// Length of the request with this header, in bytes.
    pub(super) len: U32,
    pub(super) opcode: U32,
    /// The kernel's name for the request.
    pub(super) unique: U64,
    pub(super) nodeid: U64,
    pub(super) uid: U32,
    pub(super) gid: U32,
    pub(super) pid: U32,
    pub(super) padding: U32,
}

/// Head of each answer: `struct fuse_out_header`.
#[derive(Clone, Copy, Debug, Default, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub(super) struct OutHeader {
    /// Length of the answer with this header, in bytes.
    pub(super) len: U32,
    /// 0, or a negative error number.
    pub(super) error: I32,
    pub(super) unique: U64,
}

/// Argument of READ, WRITE and READDIR: `struct fuse_read_in` and `struct fuse_write_in`, which
/// have the same fields.
#[derive(Clone, Copy, Debug, Default, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub(super) struct IoIn {
    pub(super) fh: U64,
    pub(super) offset: U64,
    pub(super) size: U32,
    pub(super) io_flags: U32,
    pub(super) lock_owner: U64,
    /// Flags of the open file.
    pub(super) flags: I32,
    pub(super) padding: U32,
}

/// Bits of SETATTR's first field: `FATTR_MODE`, `FATTR_UID` and `FATTR_GID`.
pub(super) const SETS_OWNER: u32 = 0b111;

/// Argument of FALLOCATE: `struct fuse_fallocate_in`.
#[derive(Clone, Copy, Debug, Default, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub(super) struct FallocateIn {
    pub(super) fh: U64,
    pub(super) offset: U64,
    pub(super) length: U64,
    pub(super) mode: I32,
    pub(super) padding: U32,
}

/// Argument of LSEEK: `struct fuse_lseek_in`.
#[derive(Clone, Copy, Debug, Default, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub(super) struct LseekIn {
    pub(super) fh: U64,
    pub(super) offset: U64,
    pub(super) whence: I32,
    pub(super) padding: U32,
}

/// Attributes of a node: `struct fuse_attr`.
#[derive(Clone, Copy, Debug, Default, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub(super) struct Attr {
    pub(super) ino: U64,
    pub(super) size: U64,
    /// In units of 512 bytes.
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

/// Answer to GETATTR and SETATTR: `struct fuse_attr_out`.
#[derive(Clone, Copy, Debug, Default, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub(super) struct AttrOut {
    /// Seconds for which the kernel may believe the attributes.
    pub(super) attr_valid: U64,
    pub(super) attr_valid_nsec: U32,
    pub(super) dummy: U32,
    pub(super) attr: Attr,
}

/// Answer to LOOKUP: `struct fuse_entry_out`.
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

/// Bits of [`OpenOut::open_flags`].
pub(super) mod open {
    /// No page cache: every read and write is a request.
    pub(crate) const DIRECT_IO: u32 = 1 << 0;
    /// What the page cache has stays valid.
    pub(crate) const KEEP_CACHE: u32 = 1 << 1;
    /// Writes that do not extend the file need not wait for each other.
    pub(crate) const PARALLEL_DIRECT_WRITES: u32 = 1 << 6;
}

/// Answer to OPEN and OPENDIR: `struct fuse_open_out`.
#[derive(Clone, Copy, Debug, Default, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub(super) struct OpenOut {
    pub(super) fh: U64,
    pub(super) open_flags: U32,
    pub(super) backing_id: U32,
}

/// Answer to WRITE: `struct fuse_write_out`.
#[derive(Clone, Copy, Debug, Default, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub(super) struct WriteOut {
    pub(super) size: U32,
    pub(super) padding: U32,
}

/// Answer to STATFS: `struct fuse_statfs_out`.
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

/// Answer to LSEEK: `struct fuse_lseek_out`.
#[derive(Clone, Copy, Debug, Default, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub(super) struct LseekOut {
    pub(super) offset: U64,
}

/// Head of an entry in the answer to READDIR, before its name: `struct fuse_dirent`.
#[derive(Clone, Copy, Debug, Default, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub(super) struct Dirent {
    pub(super) ino: U64,
    /// Position of the next entry.
    pub(super) off: U64,
    pub(super) namelen: U32,
    /// File type: the upper four bits of a mode.
    pub(super) kind: U32,
}

/// Bytes of an entry with a name of `namelen` bytes in the answer to READDIR.
pub(super) fn dirent_len(namelen: usize) -> usize {
    (size_of::<Dirent>() + namelen).next_multiple_of(8)
}

/// `FUSE_DEV_IOC_CLONE`, `_IOR(229, 0, uint32_t)`: makes an open file of `/dev/fuse` a further
/// queue of a connection.
const CLONE: libc::Ioctl = 0x8004_e500;

/// Opens a further queue of a connection. Requests go to the one that reads first, and each must be
/// answered where it was read.
///
/// # Errors
/// Those of opening `/dev/fuse`; `EINVAL` where the connection has ended.
pub(super) fn clone_queue(fd: BorrowedFd<'_>) -> io::Result<OwnedFd> {
    let queue = File::options().read(true).write(true).open("/dev/fuse")?;
    let source: u32 = fd.as_raw_fd().cast_unsigned();
    // SAFETY: the call reads one integer, which outlives it.
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
    fn structures_and_numbers_are_those_of_the_kernel() {
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
