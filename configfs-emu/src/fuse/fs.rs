//! Maps FUSE requests to tree operations.

use std::collections::HashMap;
use std::ffi::OsStr;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant, SystemTime};

use fuser::{
    BsdFileFlags, Errno, FileAttr, FileHandle, FileType, Filesystem, FopenFlags, Generation,
    INodeNo, IoctlFlags, LockOwner, OpenAccMode, OpenFlags, RenameFlags, ReplyAttr, ReplyCreate,
    ReplyData, ReplyDirectory, ReplyEmpty, ReplyEntry, ReplyIoctl, ReplyOpen, ReplyStatfs,
    ReplyWrite, ReplyXattr, Request, TimeOrNow, WriteFlags,
};
use rustix::io::Errno as Number;

use crate::engine::Engine;
use crate::tree::{EntryKind, Ino, MAX_WRITE, NodeId};

/// The kernel must not cache attributes, because many of the files can change at any time.
const TTL: Duration = Duration::ZERO;

/// If the last refresh is not older than this, we don't need to check the daemon for changes.
const FRESH: Duration = Duration::from_millis(100);

/// A FUSE file system for the tree.
pub(super) struct TreeFs {
    engine: Arc<Mutex<Engine>>,
    /// Contents of open files after the first read. The contents must not change until the file is
    /// closed or written.
    open: Mutex<Open>,
    started: SystemTime,
    /// Time when we last checked the daemon for changes made by other users.
    last_checked: Mutex<Option<Instant>>,
}

#[derive(Default)]
struct Open {
    next: u64,
    content: HashMap<u64, Option<Vec<u8>>>,
}

impl TreeFs {
    pub(super) fn new(engine: Arc<Mutex<Engine>>) -> Self {
        Self {
            engine,
            open: Mutex::default(),
            started: SystemTime::now(),
            last_checked: Mutex::default(),
        }
    }

    fn engine(&self) -> MutexGuard<'_, Engine> {
        // We always change a copy, so the tree is still valid after a panic.
        self.engine.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the tree after an update from the daemon, for use at the start of a read.
    fn fresh(&self) -> MutexGuard<'_, Engine> {
        let mut engine = self.engine();
        let mut last_checked = self
            .last_checked
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        // A tool can read hundreds of files in sequence, but each request to the daemon returns the
        // whole configuration.
        if last_checked.is_none_or(|last_checked| last_checked.elapsed() >= FRESH) {
            engine.refresh();
            *last_checked = Some(Instant::now());
        }
        engine
    }

    fn open_files(&self) -> MutexGuard<'_, Open> {
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn attr(&self, engine: &Engine, ino: Ino) -> Result<FileAttr, Number> {
        let meta = engine.tree().meta(ino)?;
        Ok(FileAttr {
            ino: number(ino),
            size: meta.size,
            blocks: 0,
            atime: self.started,
            mtime: self.started,
            ctime: self.started,
            crtime: self.started,
            kind: file_type(meta.kind),
            perm: meta.mode,
            nlink: meta.nlink,
            uid: rustix::process::geteuid().as_raw(),
            gid: rustix::process::getegid().as_raw(),
            rdev: 0,
            blksize: 4096,
            flags: 0,
        })
    }

    /// Replies with the given inode.
    fn entry(&self, engine: &Engine, ino: Result<Ino, Number>, reply: ReplyEntry) {
        match ino.and_then(|ino| self.attr(engine, ino)) {
            Ok(attr) => reply.entry(&TTL, &attr, Generation(0)),
            Err(errno) => reply.error(error(errno)),
        }
    }
}

fn error(errno: Number) -> Errno {
    Errno::from_i32(errno.raw_os_error())
}

/// In FUSE, the root inode is 1, which is not a valid inode in the tree.
fn inode(number: INodeNo) -> Ino {
    match number {
        INodeNo::ROOT => NodeId::ROOT.ino(),
        INodeNo(ino) => Ino(ino),
    }
}

fn number(ino: Ino) -> INodeNo {
    match ino == NodeId::ROOT.ino() {
        true => INodeNo::ROOT,
        false => INodeNo(ino.0),
    }
}

fn file_type(kind: EntryKind) -> FileType {
    match kind {
        EntryKind::Dir => FileType::Directory,
        EntryKind::File => FileType::RegularFile,
        EntryKind::Symlink => FileType::Symlink,
    }
}

fn text(name: &OsStr) -> Result<&str, Number> {
    name.to_str().ok_or(Number::INVAL)
}

fn done(result: Result<(), Number>, reply: ReplyEmpty) {
    match result {
        Ok(()) => reply.ok(),
        Err(errno) => reply.error(error(errno)),
    }
}

impl Filesystem for TreeFs {
    fn lookup(&self, _req: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEntry) {
        let engine = self.fresh();
        // All names in the tree are valid UTF-8.
        let found = name.to_str().ok_or(Number::NOENT);
        let found = found.and_then(|name| engine.tree().lookup(inode(parent), name));
        self.entry(&engine, found, reply);
    }

    fn getattr(&self, _req: &Request, ino: INodeNo, _fh: Option<FileHandle>, reply: ReplyAttr) {
        match self.attr(&self.engine(), inode(ino)) {
            Ok(attr) => reply.attr(&TTL, &attr),
            Err(errno) => reply.error(error(errno)),
        }
    }

    fn setattr(
        &self,
        _req: &Request,
        ino: INodeNo,
        _mode: Option<u32>,
        _uid: Option<u32>,
        _gid: Option<u32>,
        _size: Option<u64>,
        _atime: Option<TimeOrNow>,
        _mtime: Option<TimeOrNow>,
        _ctime: Option<SystemTime>,
        fh: Option<FileHandle>,
        _crtime: Option<SystemTime>,
        _chgtime: Option<SystemTime>,
        _bkuptime: Option<SystemTime>,
        _flags: Option<BsdFileFlags>,
        reply: ReplyAttr,
    ) {
        // A shell uses `>` to truncate a file, but there is no content to remove. Owner and mode
        // can't be changed.
        self.getattr(_req, ino, fh, reply);
    }

    fn readlink(&self, _req: &Request, ino: INodeNo, reply: ReplyData) {
        match self.engine().tree().read_link(inode(ino)) {
            Ok(target) => reply.data(target.as_bytes()),
            Err(errno) => reply.error(error(errno)),
        }
    }

    fn mknod(
        &self,
        _req: &Request,
        _parent: INodeNo,
        _name: &OsStr,
        _mode: u32,
        _umask: u32,
        _rdev: u32,
        reply: ReplyEntry,
    ) {
        reply.error(Errno::EPERM);
    }

    fn create(
        &self,
        _req: &Request,
        _parent: INodeNo,
        _name: &OsStr,
        _mode: u32,
        _umask: u32,
        _flags: i32,
        reply: ReplyCreate,
    ) {
        // Files can only be created with their directory.
        reply.error(Errno::EACCES);
    }

    fn mkdir(
        &self,
        _req: &Request,
        parent: INodeNo,
        name: &OsStr,
        _mode: u32,
        _umask: u32,
        reply: ReplyEntry,
    ) {
        let mut engine = self.engine();
        let made = text(name).and_then(|name| {
            engine.change(|tree, world| tree.make_dir(inode(parent), name, world))
        });
        self.entry(&engine, made, reply);
    }

    fn unlink(&self, _req: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEmpty) {
        let removed = text(name).and_then(|name| {
            let mut engine = self.engine();
            engine.change(|tree, _| tree.unlink(inode(parent), name))
        });
        done(removed, reply);
    }

    fn rmdir(&self, _req: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEmpty) {
        let removed = text(name).and_then(|name| {
            let mut engine = self.engine();
            engine.change(|tree, _| tree.remove_dir(inode(parent), name))
        });
        done(removed, reply);
    }

    fn symlink(
        &self,
        _req: &Request,
        parent: INodeNo,
        link_name: &OsStr,
        target: &Path,
        reply: ReplyEntry,
    ) {
        let mut engine = self.engine();
        let made = text(link_name).and_then(|name| {
            let target = text(target.as_os_str())?;
            engine.change(|tree, world| tree.link(inode(parent), name, target, world))
        });
        self.entry(&engine, made, reply);
    }

    fn rename(
        &self,
        _req: &Request,
        _parent: INodeNo,
        _name: &OsStr,
        _newparent: INodeNo,
        _newname: &OsStr,
        _flags: RenameFlags,
        reply: ReplyEmpty,
    ) {
        reply.error(Errno::EPERM);
    }

    fn open(&self, _req: &Request, ino: INodeNo, flags: OpenFlags, reply: ReplyOpen) {
        let (reads, writes) = match flags.acc_mode() {
            OpenAccMode::O_RDONLY => (true, false),
            OpenAccMode::O_WRONLY => (false, true),
            OpenAccMode::O_RDWR => (true, true),
        };
        if let Err(errno) = self.engine().tree().open(inode(ino), reads, writes) {
            return reply.error(error(errno));
        }
        // Add this after the tree has allowed it: if we return an error, there will be no release
        // request to remove the entry.
        let mut open = self.open_files();
        let handle = open.next;
        open.next += 1;
        open.content.insert(handle, None);
        // We need to disable the page cache. As in configfs, the file size is always a page, and
        // the kernel would use this size to truncate or pad the data.
        reply.opened(FileHandle(handle), FopenFlags::FOPEN_DIRECT_IO);
    }

    fn read(
        &self,
        _req: &Request,
        ino: INodeNo,
        fh: FileHandle,
        offset: u64,
        size: u32,
        _flags: OpenFlags,
        _lock_owner: Option<LockOwner>,
        reply: ReplyData,
    ) {
        // As in configfs, the content is created once per open, so that several reads return
        // consistent data.
        let known = self.open_files().content.get(&fh.0).cloned().flatten();
        let content = match known {
            Some(content) => Ok(content),
            None => self
                .engine()
                .read_tree(|tree, world| tree.read(inode(ino), world))
                .map(String::into_bytes),
        };
        match content {
            Ok(content) => {
                let end = content.len();
                let from = usize::try_from(offset).unwrap_or(end).min(end);
                let to = from.saturating_add(size as usize).min(end);
                reply.data(&content[from..to]);
                self.open_files().content.insert(fh.0, Some(content));
            }
            Err(errno) => reply.error(error(errno)),
        }
    }

    fn write(
        &self,
        _req: &Request,
        ino: INodeNo,
        fh: FileHandle,
        _offset: u64,
        data: &[u8],
        _write_flags: WriteFlags,
        _flags: OpenFlags,
        _lock_owner: Option<LockOwner>,
        reply: ReplyWrite,
    ) {
        let mut engine = self.engine();
        // Return a short write if the data is too long. As in configfs, the program will then write
        // the rest as a separate value.
        let data = &data[..data.len().min(MAX_WRITE)];
        match engine.change(|tree, world| tree.write(inode(ino), data, world)) {
            Ok(written) => {
                reply.written(written as u32);
                self.open_files().content.insert(fh.0, None);
            }
            Err(errno) => reply.error(error(errno)),
        }
    }

    fn flush(
        &self,
        _req: &Request,
        _ino: INodeNo,
        _fh: FileHandle,
        _lock_owner: LockOwner,
        reply: ReplyEmpty,
    ) {
        // The change was already applied when the write returned.
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
        reply.ok();
    }

    fn release(
        &self,
        _req: &Request,
        _ino: INodeNo,
        fh: FileHandle,
        _flags: OpenFlags,
        _lock_owner: Option<LockOwner>,
        _flush: bool,
        reply: ReplyEmpty,
    ) {
        self.open_files().content.remove(&fh.0);
        reply.ok();
    }

    fn readdir(
        &self,
        _req: &Request,
        ino: INodeNo,
        _fh: FileHandle,
        offset: u64,
        mut reply: ReplyDirectory,
    ) {
        let engine = self.fresh();
        let ino = inode(ino);
        let entries = engine.tree().read_dir(ino);
        let (entries, parent) = match (entries, engine.tree().parent_of(ino)) {
            (Ok(entries), Ok(parent)) => (entries, parent),
            (Err(errno), _) | (_, Err(errno)) => return reply.error(error(errno)),
        };
        // The kernel uses their position and number as an offset to continue, so we always need to
        // return them first.
        let dots = [(".", ino), ("..", parent)].map(|(n, i)| (n, i, EntryKind::Dir));
        let named = entries.iter().map(|e| (e.name.as_str(), e.ino, e.kind));
        let all = dots.into_iter().chain(named).enumerate();
        for (i, (name, ino, kind)) in all.skip(offset as usize) {
            if reply.add(number(ino), i as u64 + 1, file_type(kind), name) {
                break;
            }
        }
        reply.ok();
    }

    fn ioctl(
        &self,
        _req: &Request,
        _ino: INodeNo,
        _fh: FileHandle,
        _flags: IoctlFlags,
        _cmd: u32,
        _in_data: &[u8],
        _out_size: u32,
        reply: ReplyIoctl,
    ) {
        // This is used by libraries to check if a file is a terminal.
        reply.error(Errno::ENOTTY);
    }

    fn statfs(&self, _req: &Request, _ino: INodeNo, reply: ReplyStatfs) {
        reply.statfs(0, 0, 0, 0, 0, 4096, 255, 4096);
    }

    fn getxattr(
        &self,
        _req: &Request,
        _ino: INodeNo,
        _name: &OsStr,
        _size: u32,
        reply: ReplyXattr,
    ) {
        // With this error, the kernel will not send this request again.
        reply.error(Errno::ENOSYS);
    }

    fn listxattr(&self, _req: &Request, _ino: INodeNo, _size: u32, reply: ReplyXattr) {
        reply.error(Errno::ENOSYS);
    }
}
