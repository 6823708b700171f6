//! A FUSE mount with a server that can stop responding, similar to a network file system if the
//! server is not available.
//!
//! If a process waits for this server, it can't be killed until the server has responded or closed
//! the connection, for example by exiting. If a thread in the process that serves the file accesses
//! it, another thread must always resume the server or kill it by dropping [`HungMount`].

use std::ffi::OsStr;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, UNIX_EPOCH};

use fuser::{
    BackgroundSession, Config, Errno, FileAttr, FileHandle, FileType, Filesystem, FopenFlags,
    Generation, INodeNo, LockOwner, MountOption, OpenFlags, ReplyAttr, ReplyData, ReplyEmpty,
    ReplyEntry, ReplyOpen, ReplyStatfs, ReplyWrite, Request, Session, SessionACL, WriteFlags,
};
use rustix::mount::{UnmountFlags, unmount};

/// Name of the only file.
const NAME: &str = "disk";

/// Inode number of this file.
const DISK: INodeNo = INodeNo(2);

/// The kernel must not cache attributes, so that accesses will block if the server hangs.
const TTL: Duration = Duration::ZERO;

/// Requests that the server should ignore.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Silence {
    /// Reads, writes and flushes, like a disk that hangs.
    Data,
    /// All requests, like a server that is not available.
    All,
}

type Work = Box<dyn FnOnce(&mut [u8]) + Send>;

#[derive(Default)]
struct State {
    disk: Vec<u8>,
    silence: Option<Silence>,
    /// Requests that have not been executed.
    pending: Vec<Work>,
}

/// State of the server, which is shared between its thread and the test.
#[derive(Clone, Default)]
struct Disk(Arc<Mutex<State>>);

impl Disk {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Executes a request, either immediately or when the server is resumed.
    fn execute(&self, is_data: bool, work: impl FnOnce(&mut [u8]) + Send + 'static) {
        let mut state = self.lock();
        match (state.silence, is_data) {
            (Some(Silence::All), _) | (Some(Silence::Data), true) => {
                state.pending.push(Box::new(work));
            }
            (None, _) | (Some(Silence::Data), false) => work(&mut state.disk),
        }
    }
}

fn attributes(ino: INodeNo, size: usize) -> FileAttr {
    let is_disk = ino == DISK;
    FileAttr {
        ino,
        size: size as u64,
        blocks: size as u64 / 512,
        atime: UNIX_EPOCH,
        mtime: UNIX_EPOCH,
        ctime: UNIX_EPOCH,
        crtime: UNIX_EPOCH,
        kind: match is_disk {
            true => FileType::RegularFile,
            false => FileType::Directory,
        },
        perm: if is_disk { 0o666 } else { 0o777 },
        nlink: 1,
        uid: 0,
        gid: 0,
        rdev: 0,
        flags: 0,
        blksize: 4096,
    }
}

impl Filesystem for Disk {
    fn lookup(&self, _: &Request, _: INodeNo, name: &OsStr, reply: ReplyEntry) {
        let is_disk = name == NAME;
        self.execute(false, move |disk| match is_disk {
            true => reply.entry(&TTL, &attributes(DISK, disk.len()), Generation(0)),
            false => reply.error(Errno::ENOENT),
        });
    }

    fn getattr(&self, _: &Request, ino: INodeNo, _: Option<FileHandle>, reply: ReplyAttr) {
        self.execute(false, move |disk| {
            reply.attr(&TTL, &attributes(ino, disk.len()));
        });
    }

    fn open(&self, _: &Request, _: INodeNo, _: OpenFlags, reply: ReplyOpen) {
        self.execute(false, |_| {
            reply.opened(FileHandle(0), FopenFlags::empty());
        });
    }

    fn statfs(&self, _: &Request, _: INodeNo, reply: ReplyStatfs) {
        self.execute(false, |_| {
            reply.statfs(1 << 20, 1 << 20, 1 << 20, 2, 2, 4096, 255, 4096);
        });
    }

    fn flush(&self, _: &Request, _: INodeNo, _: FileHandle, _: LockOwner, reply: ReplyEmpty) {
        self.execute(false, |_| reply.ok());
    }

    fn read(
        &self,
        _: &Request,
        _: INodeNo,
        _: FileHandle,
        offset: u64,
        size: u32,
        _: OpenFlags,
        _: Option<LockOwner>,
        reply: ReplyData,
    ) {
        self.execute(true, move |disk| {
            let from = (offset as usize).min(disk.len());
            let to = (from + size as usize).min(disk.len());
            reply.data(&disk[from..to]);
        });
    }

    fn write(
        &self,
        _: &Request,
        _: INodeNo,
        _: FileHandle,
        offset: u64,
        data: &[u8],
        _: WriteFlags,
        _: OpenFlags,
        _: Option<LockOwner>,
        reply: ReplyWrite,
    ) {
        let (data, from) = (data.to_vec(), offset as usize);
        self.execute(true, move |disk| {
            match disk.get_mut(from..from + data.len()) {
                Some(place) => {
                    place.copy_from_slice(&data);
                    reply.written(data.len() as u32);
                }
                None => reply.error(Errno::ENOSPC),
            }
        });
    }

    fn fsync(&self, _: &Request, _: INodeNo, _: FileHandle, _: bool, reply: ReplyEmpty) {
        self.execute(true, |_| reply.ok());
    }
}

/// The mount. This is removed on drop, even if the file is still open in another process.
pub struct HungMount {
    disk: Disk,
    at: PathBuf,
    _session: BackgroundSession,
}

impl HungMount {
    /// Creates the directory `at` and mounts a file system with a single file of `size` bytes. The
    /// server responds until [`HungMount::hang`] is called.
    ///
    /// # Errors
    /// Returns an error if FUSE is missing or not allowed.
    pub fn new(at: &Path, size: usize) -> io::Result<Self> {
        std::fs::create_dir(at)?;
        let disk = Disk::default();
        disk.lock().disk = vec![0; size];
        let mut config = Config::default();
        config.mount_options = vec![MountOption::FSName("hung".into())];
        // The mount must be accessible for programs of other users, such as the daemon.
        config.acl = SessionACL::All;
        let session = Session::new(disk.clone(), at, &config)?.spawn()?;
        Ok(Self {
            disk,
            at: at.to_owned(),
            _session: session,
        })
    }

    /// Returns the path of the file.
    #[must_use]
    pub fn file(&self) -> PathBuf {
        self.at.join(NAME)
    }

    /// Stops responding to requests.
    pub fn hang(&self, silence: Silence) {
        self.disk.lock().silence = Some(silence);
    }

    /// Returns the number of pending requests.
    #[must_use]
    pub fn pending(&self) -> usize {
        self.disk.lock().pending.len()
    }

    /// Responds to requests again, including all pending requests.
    pub fn resume(&self) {
        let mut state = self.disk.lock();
        state.silence = None;
        let State { disk, pending, .. } = &mut *state;
        for work in pending.drain(..) {
            work(disk);
        }
    }

    /// Aborts the connection, like a server that exits: current requests fail with ECONNABORTED,
    /// and new requests fail with ENOTCONN.
    pub fn kill(&self) {
        // The mount is busy, so it's not removed here.
        let _ = unmount(&self.at, UnmountFlags::FORCE);
    }
}

impl Drop for HungMount {
    fn drop(&mut self) {
        self.kill();
        let _ = unmount(&self.at, UnmountFlags::DETACH);
        let _ = std::fs::remove_dir(&self.at);
    }
}
