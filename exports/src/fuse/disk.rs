//! Sans-I/O file system: a directory with a single file, or just the file. Requests are validated
//! here, and metadata requests are also processed here.

use std::ops::Range;
use std::time::{SystemTime, UNIX_EPOCH};

use riser_block::{Geometry, ZeroOptions};
use zerocopy::{FromBytes, IntoBytes};

use super::files::OpenFiles;
use super::sys::{
    self, Attr, AttrOut, Dirent, EntryOut, FallocateIn, FileIn, IoIn, LseekIn, Opcode, OpenOut,
    ROOT, SetattrIn, StatfsOut, dirent_len,
};

/// File attributes never change, so the kernel can cache them for a long time. In seconds.
const VALID: u64 = 86_400;

const FILE_IN_DIRECTORY: u64 = 2;

/// Max `st_blksize`. Programs allocate buffers based on this value, and an NBD server may report a
/// preferred block size of 2 GiB.
const MAX_BLKSIZE: u32 = 64 << 10;

/// Cache used between file readers and the disk.
///
/// We don't use the kernel's write-back cache (`FUSE_WRITEBACK_CACHE`), because it lets the kernel
/// control the file size: a write past the end of the disk would succeed and extend the file, and
/// then fail later for some other process, or not be reported at all. Also, write errors would only
/// be reported on the next `fsync(2)`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Caching {
    /// No cache: all reads and writes are sent to the disk. Should be used with a loop device,
    /// which already has a page cache, and if the disk is shared with other hosts.
    #[default]
    Direct,
    /// Use the kernel page cache with readahead; writes are written through.
    Kernel,
}

/// Mount layout: either a directory which contains the file, or the file itself.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Layout {
    Directory { name: String },
    File,
}

/// Request result.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Verdict {
    /// No response is expected.
    Silent,
    /// Success, with this response body.
    Reply(Vec<u8>),
    /// Failure, with this error code.
    Refuse(i32),
    /// Open the file with these flags.
    Open(u32),
    /// Close the open file with this handle.
    Release(u64),
    /// Start I/O on the disk.
    Start(Work),
}

/// Disk I/O. The range has been checked against the disk size.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Work {
    Read(Range<u64>),
    /// Write using the first bytes after the request.
    Write {
        range: Range<u64>,
        fua: bool,
    },
    /// Flush, with the handle of the open file.
    Flush(u64),
    Zero(Range<u64>, ZeroOptions),
    Seek {
        from: u64,
        want_data: bool,
    },
}

/// File system for a single disk.
#[derive(Debug)]
pub(super) struct DiskFs {
    geometry: Geometry,
    layout: Layout,
    caching: Caching,
    /// Users with access, as a mode mask: owner or everyone.
    users: u32,
    started: SystemTime,
    pub(super) files: OpenFiles,
}

impl DiskFs {
    /// Creates a file system with access for the owner.
    pub(super) fn new(geometry: Geometry, layout: Layout, caching: Caching) -> Self {
        Self {
            geometry,
            layout,
            caching,
            users: 0o700,
            started: SystemTime::now(),
            files: OpenFiles::default(),
        }
    }

    /// Allow access for everyone.
    pub(super) fn for_everyone(self) -> Self {
        let users = 0o777;
        Self { users, ..self }
    }

    /// Processes a request for a node. `body` starts with the argument and may contain more data.
    pub(super) fn handle(&self, opcode: u32, node: u64, body: &[u8]) -> Verdict {
        let Ok(opcode) = Opcode::try_from(opcode) else {
            // For most opcodes the kernel will not retry after ENOSYS.
            return Verdict::Refuse(libc::ENOSYS);
        };
        match opcode {
            Opcode::Forget | Opcode::BatchForget => Verdict::Silent,
            Opcode::Lookup => self.lookup(node, body),
            Opcode::Getattr => self.getattr(node),
            Opcode::Setattr => self.setattr(node, body),
            Opcode::Symlink | Opcode::Link => Verdict::Refuse(libc::EPERM),
            Opcode::Open => self.open(node),
            Opcode::Read => parsed(body, |io| self.read(io)),
            Opcode::Write => parsed(body, |io| self.write(io)),
            Opcode::Statfs => self.statfs(),
            Opcode::Fsync => parsed(body, |arg: FileIn| {
                Verdict::Start(Work::Flush(arg.fh.get()))
            }),
            Opcode::Release => parsed(body, |arg: FileIn| Verdict::Release(arg.fh.get())),
            // Closing a block device doesn't flush it either.
            Opcode::Flush | Opcode::Releasedir | Opcode::Destroy => Verdict::Reply(Vec::new()),
            Opcode::Opendir => reply_with(OpenOut::default()),
            Opcode::Readdir => parsed(body, |io| self.readdir(node, io)),
            Opcode::Fallocate => parsed(body, |arg| self.fallocate(arg)),
            Opcode::Lseek => parsed(body, |arg| self.lseek(arg)),
        }
    }

    fn file(&self) -> u64 {
        match self.layout {
            Layout::Directory { .. } => FILE_IN_DIRECTORY,
            Layout::File => ROOT,
        }
    }

    fn attr(&self, node: u64) -> Option<Attr> {
        let is_file = node == self.file();
        if !is_file && node != ROOT {
            return None;
        }
        let geometry = &self.geometry;
        let (size, kind, access) = match (is_file, geometry.read_only) {
            (true, false) => (geometry.capacity, libc::S_IFREG, 0o666),
            (true, true) => (geometry.capacity, libc::S_IFREG, 0o444),
            (false, _) => (0, libc::S_IFDIR, 0o555),
        };
        let mode = kind | (access & self.users);
        let time = self.started.duration_since(UNIX_EPOCH).unwrap_or_default();
        let (seconds, nanos) = (time.as_secs().into(), time.subsec_nanos().into());
        Some(Attr {
            ino: node.into(),
            size: size.into(),
            blocks: size.div_ceil(512).into(),
            atime: seconds,
            mtime: seconds,
            ctime: seconds,
            atimensec: nanos,
            mtimensec: nanos,
            ctimensec: nanos,
            mode: mode.into(),
            nlink: if is_file { 1 } else { 2 }.into(),
            uid: rustix::process::geteuid().as_raw().into(),
            gid: rustix::process::getegid().as_raw().into(),
            blksize: geometry.physical_block_size.clamp(4096, MAX_BLKSIZE).into(),
            ..Attr::default()
        })
    }

    fn lookup(&self, parent: u64, body: &[u8]) -> Verdict {
        let Layout::Directory { name } = &self.layout else {
            return Verdict::Refuse(libc::ENOENT);
        };
        let requested = body.split(|byte| *byte == 0).next();
        if parent != ROOT || requested != Some(name.as_bytes()) {
            return Verdict::Refuse(libc::ENOENT);
        }
        let attr = self.attr(FILE_IN_DIRECTORY).expect("it is the file");
        reply_with(EntryOut {
            nodeid: FILE_IN_DIRECTORY.into(),
            entry_valid: VALID.into(),
            attr_valid: VALID.into(),
            attr,
            ..EntryOut::default()
        })
    }

    fn getattr(&self, node: u64) -> Verdict {
        match self.attr(node) {
            Some(attr) => reply_with(AttrOut {
                attr_valid: VALID.into(),
                attr,
                ..AttrOut::default()
            }),
            None => Verdict::Refuse(libc::ENOENT),
        }
    }

    fn setattr(&self, node: u64, body: &[u8]) -> Verdict {
        parsed(body, |arg: SetattrIn| {
            let valid = arg.valid.get();
            let size = (valid & sys::SETS_SIZE != 0).then(|| arg.size.get());
            // O_TRUNC sets the size to 0 and doesn't use a handle. This must succeed, as for a
            // block device.
            let is_open = valid & sys::HAS_HANDLE != 0;
            let is_kept = |size| size == self.geometry.capacity || size == 0 && !is_open;
            let is_refused = valid & sys::SETS_OWNER != 0 || !size.is_none_or(is_kept);
            if is_refused && self.attr(node).is_some() {
                return Verdict::Refuse(libc::EPERM);
            }
            // Timestamps are ignored.
            self.getattr(node)
        })
    }

    fn open(&self, node: u64) -> Verdict {
        if node != self.file() {
            return Verdict::Refuse(libc::EISDIR);
        }
        let open_flags = match self.caching {
            Caching::Direct => sys::open::DIRECT_IO | sys::open::PARALLEL_DIRECT_WRITES,
            Caching::Kernel => sys::open::KEEP_CACHE,
        };
        Verdict::Open(open_flags)
    }

    /// Limits the range to the disk size.
    fn clip(&self, offset: u64, len: u64) -> Range<u64> {
        let end = offset.saturating_add(len).min(self.geometry.capacity);
        offset.min(end)..end
    }

    fn read(&self, io: IoIn) -> Verdict {
        Verdict::Start(Work::Read(self.clip(io.offset.get(), io.size.get().into())))
    }

    fn write(&self, io: IoIn) -> Verdict {
        let range = self.clip(io.offset.get(), io.size.get().into());
        if range.is_empty() && io.size.get() > 0 {
            return Verdict::Refuse(libc::ENOSPC);
        }
        // With direct I/O the kernel doesn't send an fsync for synchronous writes, so we need to
        // check the flags. Note that O_SYNC includes O_DSYNC.
        let fua = io.flags.get() & libc::O_DSYNC != 0;
        Verdict::Start(Work::Write { range, fua })
    }

    fn statfs(&self) -> Verdict {
        let block = self.geometry.block_size;
        reply_with(StatfsOut {
            blocks: (self.geometry.capacity / u64::from(block)).into(),
            files: 1.into(),
            bsize: block.into(),
            namelen: 255.into(),
            frsize: block.into(),
            ..StatfsOut::default()
        })
    }

    fn readdir(&self, node: u64, io: IoIn) -> Verdict {
        let Layout::Directory { name } = &self.layout else {
            return Verdict::Refuse(libc::ENOTDIR);
        };
        if node != ROOT {
            return Verdict::Refuse(libc::ENOTDIR);
        }
        let entries = [
            (ROOT, libc::S_IFDIR, "."),
            (ROOT, libc::S_IFDIR, ".."),
            (FILE_IN_DIRECTORY, libc::S_IFREG, name.as_str()),
        ];
        let mut bytes = Vec::new();
        let from = usize::try_from(io.offset.get()).unwrap_or(usize::MAX);
        for (at, (ino, kind, name)) in entries.into_iter().enumerate().skip(from) {
            let end = bytes.len() + dirent_len(name.len());
            if end > io.size.get() as usize {
                break;
            }
            let head = Dirent {
                ino: ino.into(),
                off: (at as u64 + 1).into(),
                namelen: (name.len() as u32).into(),
                kind: (kind >> 12).into(),
            };
            bytes.extend(head.as_bytes());
            bytes.extend(name.as_bytes());
            bytes.resize(end, 0);
        }
        Verdict::Reply(bytes)
    }

    fn fallocate(&self, arg: FallocateIn) -> Verdict {
        const PUNCH_HOLE: i32 = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
        const ZERO_AND_KEEP: i32 = libc::FALLOC_FL_ZERO_RANGE | libc::FALLOC_FL_KEEP_SIZE;
        let length = arg.length.get();
        let range = self.clip(arg.offset.get(), length);
        let beyond = range.end - range.start < length;
        let may_unmap = match arg.mode.get() {
            // The whole disk is treated as allocated.
            0 if beyond => return Verdict::Refuse(libc::ENOSPC),
            0 | libc::FALLOC_FL_KEEP_SIZE => return Verdict::Reply(Vec::new()),
            PUNCH_HOLE => true,
            libc::FALLOC_FL_ZERO_RANGE if beyond => return Verdict::Refuse(libc::ENOSPC),
            libc::FALLOC_FL_ZERO_RANGE | ZERO_AND_KEEP => false,
            _ => return Verdict::Refuse(libc::EOPNOTSUPP),
        };
        if range.is_empty() {
            return Verdict::Reply(Vec::new());
        }
        let options = ZeroOptions {
            may_unmap,
            ..ZeroOptions::default()
        };
        Verdict::Start(Work::Zero(range, options))
    }

    fn lseek(&self, arg: LseekIn) -> Verdict {
        let want_data = match arg.whence.get() {
            libc::SEEK_DATA => true,
            libc::SEEK_HOLE => false,
            _ => return Verdict::Refuse(libc::EINVAL),
        };
        let from = arg.offset.get();
        if from >= self.geometry.capacity {
            return Verdict::Refuse(libc::ENXIO);
        }
        Verdict::Start(Work::Seek { from, want_data })
    }
}

fn reply_with(body: impl IntoBytes + zerocopy::Immutable) -> Verdict {
    Verdict::Reply(body.as_bytes().to_vec())
}

/// Parses the argument at the start of `body` and passes it to `f`.
fn parsed<T: FromBytes>(body: &[u8], f: impl FnOnce(T) -> Verdict) -> Verdict {
    match T::read_from_prefix(body) {
        Ok((argument, _)) => f(argument),
        // Never sent by the kernel.
        Err(_) => Verdict::Refuse(libc::EINVAL),
    }
}

#[cfg(test)]
mod tests {
    use riser_block::{BlockDevice, MemoryDevice};

    use super::*;

    const SIZE: u64 = 1 << 20;

    fn fs(layout: Layout) -> DiskFs {
        let device = MemoryDevice::new(SIZE, 512).unwrap();
        DiskFs::new(device.geometry().clone(), layout, Caching::Direct)
    }

    fn directory() -> DiskFs {
        fs(Layout::Directory {
            name: "lun0".into(),
        })
    }

    fn io(offset: u64, size: u32, flags: i32) -> Vec<u8> {
        let io = IoIn {
            offset: offset.into(),
            size: size.into(),
            flags: flags.into(),
            ..IoIn::default()
        };
        io.as_bytes().to_vec()
    }

    fn handle(fs: &DiskFs, opcode: Opcode, node: u64, body: &[u8]) -> Verdict {
        fs.handle(opcode as u32, node, body)
    }

    #[test]
    fn reads_and_writes_stay_within_disk() {
        let fs = fs(Layout::File);
        let read = |offset, size| handle(&fs, Opcode::Read, ROOT, &io(offset, size, 0));
        let start = |range| Verdict::Start(Work::Read(range));
        assert_eq!(read(10, 100), start(10..110));
        assert_eq!(read(SIZE - 10, 100), start(SIZE - 10..SIZE));
        assert_eq!(read(u64::MAX, u32::MAX), start(SIZE..SIZE));
        let write = |offset, size, flags| {
            let body = io(offset, size, flags);
            handle(&fs, Opcode::Write, ROOT, &body)
        };
        let start = |range, fua| Verdict::Start(Work::Write { range, fua });
        assert_eq!(write(SIZE - 10, 100, 0), start(SIZE - 10..SIZE, false));
        assert_eq!(write(SIZE, 1, 0), Verdict::Refuse(libc::ENOSPC));
        assert_eq!(write(u64::MAX, 1, 0), Verdict::Refuse(libc::ENOSPC));
        assert_eq!(write(SIZE, 0, 0), start(SIZE..SIZE, false));
        for flags in [libc::O_DSYNC, libc::O_SYNC] {
            assert_eq!(write(0, 8, flags), start(0..8, true));
        }
        let file = FileIn { fh: 3.into() };
        let fsync = handle(&fs, Opcode::Fsync, ROOT, file.as_bytes());
        assert_eq!(fsync, Verdict::Start(Work::Flush(3)));
        let release = handle(&fs, Opcode::Release, ROOT, file.as_bytes());
        assert_eq!(release, Verdict::Release(3));
    }

    #[test]
    fn modes_admit_everyone_on_request_only() {
        let modes =
            |fs: &DiskFs| [ROOT, FILE_IN_DIRECTORY].map(|node| fs.attr(node).unwrap().mode.get());
        let (dir, file) = (libc::S_IFDIR, libc::S_IFREG);
        assert_eq!(modes(&directory()), [dir | 0o500, file | 0o600]);
        let mut shared = directory().for_everyone();
        assert_eq!(modes(&shared), [dir | 0o555, file | 0o666]);
        shared.geometry.read_only = true;
        assert_eq!(modes(&shared), [dir | 0o555, file | 0o444]);
    }

    #[test]
    fn fallocate_rejects_extension_and_other_modes() {
        let fs = fs(Layout::File);
        let allocate = |mode: i32, offset: u64, length: u64| {
            let argument = FallocateIn {
                offset: offset.into(),
                length: length.into(),
                mode: mode.into(),
                ..FallocateIn::default()
            };
            handle(&fs, Opcode::Fallocate, ROOT, argument.as_bytes())
        };
        let punch = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
        let zeroes = |range, may_unmap| {
            let options = ZeroOptions {
                may_unmap,
                ..ZeroOptions::default()
            };
            Verdict::Start(Work::Zero(range, options))
        };
        let done = Verdict::Reply(Vec::new());
        assert_eq!(allocate(punch, 512, SIZE), zeroes(512..SIZE, true));
        assert_eq!(allocate(punch, SIZE, 1), done);
        let zero = libc::FALLOC_FL_ZERO_RANGE;
        assert_eq!(allocate(zero, 1, 9), zeroes(1..10, false));
        assert_eq!(allocate(zero, 1, SIZE), Verdict::Refuse(libc::ENOSPC));
        assert_eq!(allocate(0, 0, SIZE), done);
        assert_eq!(allocate(0, 0, SIZE + 1), Verdict::Refuse(libc::ENOSPC));
        let collapse = libc::FALLOC_FL_COLLAPSE_RANGE;
        assert_eq!(allocate(collapse, 0, 1), Verdict::Refuse(libc::EOPNOTSUPP));
    }

    #[test]
    fn readdir_lists_single_file_within_size() {
        let fs = directory();
        let lookup = |name: &[u8]| handle(&fs, Opcode::Lookup, ROOT, name);
        let Verdict::Reply(entry) = lookup(b"lun0\0") else {
            panic!("it is there");
        };
        let entry = EntryOut::read_from_bytes(&entry).unwrap();
        assert_eq!(entry.nodeid.get(), FILE_IN_DIRECTORY);
        assert_eq!(entry.attr.size.get(), SIZE);
        for name in [&b"lun\0"[..], b"lun00\0", b"\0", b""] {
            assert_eq!(lookup(name), Verdict::Refuse(libc::ENOENT));
        }
        let list = |offset, size| handle(&fs, Opcode::Readdir, ROOT, &io(offset, size, 0));
        let len = |verdict| match verdict {
            Verdict::Reply(bytes) => bytes.len(),
            other => panic!("{other:?}"),
        };
        assert_eq!(len(list(0, 4096)), 3 * 32);
        assert_eq!(len(list(0, 95)), 2 * 32);
        assert_eq!(len(list(2, 4096)), 32);
        assert_eq!(len(list(u64::MAX, 4096)), 0);
        let file = handle(&fs, Opcode::Readdir, FILE_IN_DIRECTORY, &io(0, 4096, 0));
        assert_eq!(file, Verdict::Refuse(libc::ENOTDIR));
        let open = |node| handle(&fs, Opcode::Open, node, &[0; 8]);
        assert_eq!(open(ROOT), Verdict::Refuse(libc::EISDIR));
        assert!(matches!(open(FILE_IN_DIRECTORY), Verdict::Open(_)));
    }

    /// Otherwise `ftruncate(2)` would succeed but do nothing. O_TRUNC doesn't use a handle.
    #[test]
    fn truncation_of_open_file_fails() {
        let fs = fs(Layout::File);
        let set = |size: u64, valid: u32| {
            let argument = SetattrIn {
                valid: (valid | sys::SETS_SIZE).into(),
                size: size.into(),
                ..SetattrIn::default()
            };
            matches!(
                handle(&fs, Opcode::Setattr, ROOT, argument.as_bytes()),
                Verdict::Reply(_)
            )
        };
        assert!(set(0, 0) && set(SIZE, 0) && set(SIZE, sys::HAS_HANDLE));
        assert!(!set(0, sys::HAS_HANDLE) && !set(1, 0) && !set(SIZE + 1, sys::HAS_HANDLE));
    }

    /// NBD servers can report a preferred block size of 2 GiB, and programs use it for allocation.
    #[test]
    fn preferred_io_size_is_bounded() {
        let mut fs = fs(Layout::File);
        fs.geometry.physical_block_size = 1 << 31;
        assert_eq!(fs.attr(ROOT).unwrap().blksize.get(), 64 << 10);
    }

    #[test]
    fn unknown_or_short_requests_fail() {
        let fs = directory();
        for opcode in [0, 5, 36, 39, 48, 4096, u32::MAX] {
            assert_eq!(
                fs.handle(opcode, ROOT, &[0; 40]),
                Verdict::Refuse(libc::ENOSYS)
            );
        }
        for opcode in [
            Opcode::Read,
            Opcode::Write,
            Opcode::Fallocate,
            Opcode::Lseek,
        ] {
            let short = handle(&fs, opcode, FILE_IN_DIRECTORY, &[0; 23]);
            assert_eq!(short, Verdict::Refuse(libc::EINVAL), "{opcode:?}");
        }
        assert_eq!(handle(&fs, Opcode::Forget, 2, &[]), Verdict::Silent);
        let missing = handle(&fs, Opcode::Getattr, 3, &[]);
        assert_eq!(missing, Verdict::Refuse(libc::ENOENT));
        let argument = SetattrIn {
            valid: 2.into(),
            ..SetattrIn::default()
        };
        let owner = handle(&fs, Opcode::Setattr, 2, argument.as_bytes());
        assert_eq!(owner, Verdict::Refuse(libc::EPERM));
    }
}
