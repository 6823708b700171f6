//! The file system: a directory with one file, or the file alone.

use std::ffi::OsStr;
use std::io;
use std::ops::Range;
use std::sync::Arc;
use std::sync::mpsc;
use std::time::{Duration, SystemTime};

use fuser::{
    BsdFileFlags, Errno, FileAttr, FileHandle, FileType, Filesystem, FopenFlags, Generation,
    INodeNo, InitFlags, KernelConfig, LockOwner, OpenFlags, ReplyAttr, ReplyData, ReplyDirectory,
    ReplyEmpty, ReplyEntry, ReplyLseek, ReplyOpen, ReplyStatfs, ReplyWrite, ReplyXattr, Request,
    TimeOrNow, WriteFlags,
};

use super::transfer::{Piece, seek, send, send_all, write_pieces};
use crate::block::{BlockDevice, BlockError, ByteDevice, Span, ZeroOptions, task};

/// Largest request that the kernel is asked to send, in bytes.
const MAX_REQUEST: u32 = 1 << 20;

/// Requests without a waiting process (readahead, direct I/O in the background) that the kernel
/// may have in flight.
const MAX_BACKGROUND: u16 = 128;

/// Replies of more bytes than this are copied to the kernel by a thread of their own.
const LARGE_REPLY: usize = 32 << 10;

/// Nothing about the file ever changes, so the kernel may believe what it knows for long.
const TTL: Duration = Duration::from_secs(86_400);

const FILE_IN_DIRECTORY: INodeNo = INodeNo(2);

type Job = Box<dyn FnOnce() + Send>;

/// The cache between readers of the file and the disk.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Caching {
    /// None: every read and write is one of the disk. Right for a loop device, which has the
    /// page cache above it, and where other hosts use the disk.
    #[default]
    Direct,
    /// The kernel's page cache, with readahead; writes go through it.
    Kernel,
}

/// Layout of the mount: a directory that holds the file, or the file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Layout {
    Directory { name: String },
    File,
}

/// The file system of one disk.
pub(super) struct DiskFs<D> {
    device: Arc<ByteDevice<D>>,
    layout: Layout,
    caching: Caching,
    started: SystemTime,
    replier: mpsc::Sender<Job>,
}

impl<D: BlockDevice> DiskFs<D> {
    pub(super) fn new(
        device: Arc<ByteDevice<D>>,
        layout: Layout,
        caching: Caching,
    ) -> io::Result<Self> {
        let (replier, jobs) = mpsc::channel::<Job>();
        std::thread::Builder::new()
            .name("fuse-reply".into())
            .spawn(move || jobs.into_iter().for_each(|job| job()))?;
        Ok(Self {
            device,
            layout,
            caching,
            started: SystemTime::now(),
            replier,
        })
    }

    fn file(&self) -> INodeNo {
        match self.layout {
            Layout::Directory { .. } => FILE_IN_DIRECTORY,
            Layout::File => INodeNo::ROOT,
        }
    }

    fn capacity(&self) -> u64 {
        self.device.geometry().capacity
    }

    fn attr(&self, ino: INodeNo) -> Option<FileAttr> {
        let is_file = ino == self.file();
        if !is_file && ino != INodeNo::ROOT {
            return None;
        }
        let geometry = self.device.geometry();
        let (size, kind, perm) = match (is_file, geometry.read_only) {
            (true, false) => (geometry.capacity, FileType::RegularFile, 0o600),
            (true, true) => (geometry.capacity, FileType::RegularFile, 0o400),
            (false, _) => (0, FileType::Directory, 0o500),
        };
        Some(FileAttr {
            ino,
            size,
            blocks: size.div_ceil(512),
            atime: self.started,
            mtime: self.started,
            ctime: self.started,
            crtime: self.started,
            kind,
            perm,
            nlink: if is_file { 1 } else { 2 },
            uid: rustix::process::geteuid().as_raw(),
            gid: rustix::process::getegid().as_raw(),
            rdev: 0,
            blksize: geometry.physical_block_size.max(4096),
            flags: 0,
        })
    }

    /// The part of a range that the disk has.
    fn clip(&self, offset: u64, len: u64) -> Range<u64> {
        let end = offset.saturating_add(len).min(self.capacity());
        offset.min(end)..end
    }

    /// The transfers that a range takes.
    fn plan_pieces(&self, range: Range<u64>) -> Vec<Span> {
        let mut spans = Vec::with_capacity(1);
        let mut at = range.start;
        while at < range.end {
            let span = self.device.first_piece(at, range.end - at);
            at += span.len as u64;
            spans.push(span);
        }
        spans
    }

    /// Runs a request that answers with nothing but success or failure.
    fn run(
        &self,
        reply: ReplyEmpty,
        work: impl Future<Output = Result<(), BlockError>> + Send + 'static,
    ) {
        task::spawn(async move {
            match work.await {
                Ok(()) => reply.ok(),
                Err(error) => reply.error(errno(&error)),
            }
        });
    }
}

fn errno(error: &BlockError) -> Errno {
    tracing::debug!(%error, "FUSE request failed");
    Errno::from_i32(error.errno())
}

impl<D: BlockDevice> Filesystem for DiskFs<D> {
    fn init(&mut self, _req: &Request, config: &mut KernelConfig) -> io::Result<()> {
        // Each of these says what the kernel allows where it allows less.
        let _ = config.set_max_write(MAX_REQUEST);
        if let Err(most) = config.set_max_readahead(MAX_REQUEST) {
            let _ = config.set_max_readahead(most);
        }
        let _ = config.set_max_background(MAX_BACKGROUND);
        let _ = config.set_congestion_threshold(MAX_BACKGROUND);
        for wish in [
            InitFlags::FUSE_ASYNC_DIO,
            InitFlags::FUSE_DIRECT_IO_ALLOW_MMAP,
        ] {
            // An older kernel does without.
            let _ = config.add_capabilities(wish);
        }
        Ok(())
    }

    fn lookup(&self, _req: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEntry) {
        match &self.layout {
            Layout::Directory { name: own } if parent == INodeNo::ROOT && name == own.as_str() => {
                let attr = self.attr(FILE_IN_DIRECTORY).expect("it is the file");
                reply.entry(&TTL, &attr, Generation(0));
            }
            _ => reply.error(Errno::ENOENT),
        }
    }

    fn getattr(&self, _req: &Request, ino: INodeNo, _fh: Option<FileHandle>, reply: ReplyAttr) {
        match self.attr(ino) {
            Some(attr) => reply.attr(&TTL, &attr),
            None => reply.error(Errno::ENOENT),
        }
    }

    fn setattr(
        &self,
        _req: &Request,
        ino: INodeNo,
        mode: Option<u32>,
        uid: Option<u32>,
        gid: Option<u32>,
        _size: Option<u64>,
        _atime: Option<TimeOrNow>,
        _mtime: Option<TimeOrNow>,
        _ctime: Option<SystemTime>,
        _fh: Option<FileHandle>,
        _crtime: Option<SystemTime>,
        _chgtime: Option<SystemTime>,
        _bkuptime: Option<SystemTime>,
        _flags: Option<BsdFileFlags>,
        reply: ReplyAttr,
    ) {
        // Times and sizes are taken and forgotten, as a block device does.
        match self.attr(ino) {
            Some(_) if mode.is_some() || uid.is_some() || gid.is_some() => {
                reply.error(Errno::EPERM);
            }
            Some(attr) => reply.attr(&TTL, &attr),
            None => reply.error(Errno::ENOENT),
        }
    }

    fn open(&self, _req: &Request, ino: INodeNo, _flags: OpenFlags, reply: ReplyOpen) {
        if ino != self.file() {
            return reply.error(Errno::EISDIR);
        }
        let flags = match self.caching {
            Caching::Direct => {
                FopenFlags::FOPEN_DIRECT_IO | FopenFlags::FOPEN_PARALLEL_DIRECT_WRITES
            }
            Caching::Kernel => FopenFlags::FOPEN_KEEP_CACHE,
        };
        reply.opened(FileHandle(0), flags);
    }

    fn read(
        &self,
        _req: &Request,
        _ino: INodeNo,
        _fh: FileHandle,
        offset: u64,
        size: u32,
        _flags: OpenFlags,
        _lock_owner: Option<LockOwner>,
        reply: ReplyData,
    ) {
        let spans = self.plan_pieces(self.clip(offset, size.into()));
        let large = size as usize > LARGE_REPLY;
        let (device, replier) = (self.device.clone(), self.replier.clone());
        task::spawn(async move {
            let read = async |span: Span| {
                let buffer = device.device().buffer(span.covering).await;
                device.read(span, buffer).await.map(|buffer| (buffer, span))
            };
            let job: Job = match spans.as_slice() {
                [] => return reply.data(&[]),
                [span] => match read(*span).await {
                    Ok((buffer, span)) => Box::new(move || send(reply, &buffer, &span)),
                    Err(error) => return reply.error(errno(&error)),
                },
                _ => {
                    let parts = task::join_all(spans.into_iter().map(read)).await;
                    match parts.into_iter().collect::<Result<Vec<_>, _>>() {
                        Ok(parts) => Box::new(move || send_all(reply, &parts)),
                        Err(error) => return reply.error(errno(&error)),
                    }
                }
            };
            if large {
                // The thread lives as long as a sender does.
                let _ = replier.send(job);
            } else {
                job();
            }
        });
    }

    fn write(
        &self,
        _req: &Request,
        _ino: INodeNo,
        _fh: FileHandle,
        offset: u64,
        data: &[u8],
        _write_flags: WriteFlags,
        flags: OpenFlags,
        _lock_owner: Option<LockOwner>,
        reply: ReplyWrite,
    ) {
        let range = self.clip(offset, data.len() as u64);
        if range.is_empty() && !data.is_empty() {
            return reply.error(Errno::ENOSPC);
        }
        let written = (range.end - range.start) as u32;
        // With direct I/O the kernel sends no fsync after a write that is to be on the medium when
        // it returns: the flags say it. O_SYNC includes O_DSYNC.
        let fua = flags.0 & libc::O_DSYNC != 0;
        let mut taken = 0;
        let mut copy = Vec::new();
        let pieces: Vec<Piece> = self
            .plan_pieces(range)
            .into_iter()
            .map(|span| {
                let part = &data[taken..taken + span.len];
                taken += span.len;
                let buffer = self.device.try_buffer(&span);
                match &buffer {
                    Some(buffer) => buffer.slice().write(span.head, part),
                    // The data is gone when this call returns, so it waits elsewhere.
                    None => copy.extend(part),
                }
                (span, buffer)
            })
            .collect();
        let device = self.device.clone();
        task::spawn(async move {
            match write_pieces(&device, pieces, &copy, fua).await {
                Ok(()) => reply.written(written),
                Err(error) => reply.error(errno(&error)),
            }
        });
    }

    fn flush(
        &self,
        _req: &Request,
        _ino: INodeNo,
        _fh: FileHandle,
        _lock_owner: LockOwner,
        reply: ReplyEmpty,
    ) {
        // Closing a block device does not flush it either.
        reply.ok();
    }

    fn fsync(
        &self,
        _req: &Request,
        _ino: INodeNo,
        _fh: FileHandle,
        _datasync: bool,
        reply: ReplyEmpty,
    ) {
        let device = self.device.clone();
        self.run(reply, async move { device.flush().await });
    }

    fn fallocate(
        &self,
        _req: &Request,
        _ino: INodeNo,
        _fh: FileHandle,
        offset: u64,
        length: u64,
        mode: i32,
        reply: ReplyEmpty,
    ) {
        const PUNCH_HOLE: i32 = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
        const ZERO_AND_KEEP: i32 = libc::FALLOC_FL_ZERO_RANGE | libc::FALLOC_FL_KEEP_SIZE;
        let range = self.clip(offset, length);
        let beyond = range.end - range.start < length;
        let may_unmap = match mode {
            // All of the disk counts as allocated.
            0 if beyond => return reply.error(Errno::ENOSPC),
            0 | libc::FALLOC_FL_KEEP_SIZE => return reply.ok(),
            PUNCH_HOLE => true,
            libc::FALLOC_FL_ZERO_RANGE if beyond => return reply.error(Errno::ENOSPC),
            libc::FALLOC_FL_ZERO_RANGE | ZERO_AND_KEEP => false,
            _ => return reply.error(Errno::EOPNOTSUPP),
        };
        if range.is_empty() {
            return reply.ok();
        }
        let device = self.device.clone();
        let options = ZeroOptions {
            may_unmap,
            fua: false,
        };
        self.run(
            reply,
            async move { device.write_zeroes(range, options).await },
        );
    }

    fn lseek(
        &self,
        _req: &Request,
        _ino: INodeNo,
        _fh: FileHandle,
        offset: i64,
        whence: i32,
        reply: ReplyLseek,
    ) {
        let want_data = match whence {
            libc::SEEK_DATA => true,
            libc::SEEK_HOLE => false,
            _ => return reply.error(Errno::EINVAL),
        };
        let capacity = self.capacity();
        let Some(from) = u64::try_from(offset).ok().filter(|at| *at < capacity) else {
            return reply.error(Errno::ENXIO);
        };
        let device = self.device.clone();
        task::spawn(async move {
            match seek(&device, from, want_data).await {
                Ok(Some(at)) => reply.offset(at as i64),
                Ok(None) if want_data => reply.error(Errno::ENXIO),
                // There is always a hole at the end.
                Ok(None) => reply.offset(capacity as i64),
                Err(error) => reply.error(errno(&error)),
            }
        });
    }

    fn readdir(
        &self,
        _req: &Request,
        ino: INodeNo,
        _fh: FileHandle,
        offset: u64,
        mut reply: ReplyDirectory,
    ) {
        let Layout::Directory { name } = &self.layout else {
            return reply.error(Errno::ENOTDIR);
        };
        if ino != INodeNo::ROOT {
            return reply.error(Errno::ENOTDIR);
        }
        let entries = [
            (INodeNo::ROOT, FileType::Directory, "."),
            (INodeNo::ROOT, FileType::Directory, ".."),
            (FILE_IN_DIRECTORY, FileType::RegularFile, name.as_str()),
        ];
        for (i, (ino, kind, name)) in entries.into_iter().enumerate().skip(offset as usize) {
            if reply.add(ino, i as u64 + 1, kind, name) {
                break;
            }
        }
        reply.ok();
    }

    fn statfs(&self, _req: &Request, _ino: INodeNo, reply: ReplyStatfs) {
        let block = self.device.geometry().block_size;
        let blocks = self.capacity() / u64::from(block);
        reply.statfs(blocks, 0, 0, 1, 0, block, 255, block);
    }

    fn getxattr(
        &self,
        _req: &Request,
        _ino: INodeNo,
        _name: &OsStr,
        _size: u32,
        reply: ReplyXattr,
    ) {
        // The kernel does not ask again.
        reply.error(Errno::ENOSYS);
    }

    fn listxattr(&self, _req: &Request, _ino: INodeNo, _size: u32, reply: ReplyXattr) {
        reply.error(Errno::ENOSYS);
    }
}
