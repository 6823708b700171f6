//! Mounting and unmounting.

use std::io;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use fuser::{Config, Filesystem, InitFlags, KernelConfig, MountOption, Session, SessionACL};
use rustix::fs::OFlags;
use rustix::mount::UnmountFlags;
use thiserror::Error;

use super::channel::Channel;
use super::disk::{Caching, DiskFs, Layout};
use super::queue::{Queue, max_write};
use super::sys;
use crate::block::{BlockDevice, ByteDevice, Ending, Outcome, Service, serve, task};
use crate::mounts::{MountId, Mounts};

/// Requests without a waiting process (readahead, direct I/O in the background) that the kernel
/// may have in flight.
const MAX_BACKGROUND: u16 = 128;

/// Parameters of a mount.
#[derive(Clone, Debug)]
pub struct FuseOptions {
    /// A directory or a file.
    pub path: PathBuf,
    /// Name of the disk's file in the directory.
    pub name: String,
    /// The source in the mount table.
    pub source: String,
    /// The cache between readers and the disk.
    pub caching: Caching,
    /// Other users may use the file. Needs `user_allow_other` in `/etc/fuse.conf` where the
    /// mounting user is not root.
    pub allow_other: bool,
}

/// Reason for a mount to be still there.
#[derive(Debug, Error)]
pub enum UnmountError {
    /// It is in use.
    #[error("{} is busy", .0.display())]
    Busy(PathBuf),
    /// Any other failure of the mount.
    #[error("cannot unmount {}", path.display())]
    Failed {
        /// Path of the mount.
        path: PathBuf,
        /// The error of the system.
        source: io::Error,
    },
}

/// The answers to the kernel's first request, in which features and sizes are agreed.
struct Negotiation {
    max_write: u32,
}

impl Filesystem for Negotiation {
    fn init(&mut self, _req: &fuser::Request, config: &mut KernelConfig) -> io::Result<()> {
        // Each of these says what the kernel allows where it allows less. The most pages of a
        // request follow from its most bytes.
        let _ = config.set_max_write(self.max_write);
        if let Err(most) = config.set_max_readahead(self.max_write) {
            let _ = config.set_max_readahead(most);
        }
        let _ = config.set_max_background(MAX_BACKGROUND);
        let _ = config.set_congestion_threshold(MAX_BACKGROUND);
        for wish in [
            InitFlags::FUSE_ASYNC_DIO,
            InitFlags::FUSE_DIRECT_IO_ALLOW_MMAP,
            // A connection that an administrator aborts has an error of its own: the mount is
            // still there then.
            InitFlags::FUSE_ABORT_ERROR,
        ] {
            // An older kernel does without.
            let _ = config.add_capabilities(wish);
        }
        Ok(())
    }
}

/// A mounted disk. Dropping it detaches the mount, even if it is in use.
pub struct FuseMount {
    path: PathBuf,
    file: PathBuf,
    id: MountId,
    outcome: Arc<Outcome>,
    /// It is out of the tree.
    is_removed: AtomicBool,
    flush: Box<dyn Fn() -> io::Result<()> + Send + Sync>,
}

impl std::fmt::Debug for FuseMount {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("FuseMount")
            .field("path", &self.path)
            .finish_non_exhaustive()
    }
}

impl FuseMount {
    /// Mounts a disk. It can be used when this returns. `on_end` is called once, when the mount
    /// has been unmounted and has no user any longer, or when it cannot be served any longer, and
    /// every request has ended: on the thread that serves it, which it must not hold up.
    ///
    /// # Errors
    /// The path does not exist, FUSE is missing or not permitted, the mounts cannot be read.
    pub fn new<D: BlockDevice>(
        device: Arc<ByteDevice<D>>,
        options: FuseOptions,
        on_end: impl FnOnce() + Send + 'static,
    ) -> io::Result<Self> {
        let path = options.path.canonicalize()?;
        let config = config(&options, device.geometry().read_only);
        let (layout, file) = if path.is_dir() {
            let file = path.join(&options.name);
            (Layout::Directory { name: options.name }, file)
        } else {
            (Layout::File, path.clone())
        };
        let negotiation = Negotiation {
            max_write: max_write(device.geometry()),
        };
        let session = Session::new(negotiation, &path, &config)?;
        // The session still unmounts it after an error.
        let id = find(&path)?;
        let fd = into_fd(session);
        let fs = DiskFs::new(device.geometry().clone(), layout, options.caching);
        let outcome = Arc::new(Outcome::default());
        let ending = Ending::new(outcome.clone(), on_end);
        let flushed = device.clone();
        if let Err(error) = start(fd, id, Arc::new(fs), device, Arc::new(ending)) {
            // Its descriptors are closed, so users of the mount get errors.
            let _ = unmount_listed(&path, id, true);
            return Err(error);
        }
        Ok(Self {
            path,
            file,
            id,
            outcome,
            is_removed: AtomicBool::new(false),
            flush: Box::new(move || task::block_on(flushed.flush()).map_err(io::Error::other)),
        })
    }

    /// Path of the mount.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Path of the disk's file.
    #[must_use]
    pub fn file(&self) -> &Path {
        &self.file
    }

    /// Identifies it among the mounts that this process sees.
    pub(crate) fn id(&self) -> MountId {
        self.id
    }

    /// Returns whether it is served no longer, and every request has ended: it is unmounted and has
    /// no user, or [`Self::wait`] has the reason.
    #[must_use]
    pub fn is_ended(&self) -> bool {
        self.outcome.is_over()
    }

    /// Takes the mount away if it is not in use. Does nothing where others have taken it away.
    ///
    /// # Errors
    /// It is in use, it cannot be unmounted, or another mount is on top of it; it is still mounted
    /// then.
    pub fn try_unmount(&self) -> Result<(), UnmountError> {
        self.unmount(false)
    }

    /// Takes the mount out of the tree, even if a program has it open, which may go on until it
    /// closes the file or this process ends. Does nothing where others have taken it away.
    ///
    /// # Errors
    /// It cannot be unmounted, or another mount is on top of it.
    pub fn detach(&self) -> Result<(), UnmountError> {
        self.unmount(true)
    }

    fn unmount(&self, lazy: bool) -> Result<(), UnmountError> {
        // Another mount may have the path by now, and later the id too.
        if self.outcome.is_complete() || self.is_removed.load(Ordering::Acquire) {
            return Ok(());
        }
        unmount_listed(&self.path, self.id, lazy)?;
        self.is_removed.store(true, Ordering::Release);
        Ok(())
    }

    /// Waits until it is served no longer, and flushes the disk.
    ///
    /// # Errors
    /// Its requests could not be served to the end, also because its connection was ended while it
    /// was mounted; or the flush failed.
    pub fn wait(self) -> io::Result<()> {
        let mut result = self.outcome.wait();
        // A forced unmount ends the connection first, and may then have taken the mount away.
        if let Err(error) = &result
            && error.kind() == io::ErrorKind::NotConnected
            // Another mount may have the id by now.
            && (self.is_removed.load(Ordering::Acquire) || matches!(self.id.is_listed(), Ok(false)))
        {
            result = Ok(());
        }
        result.and((self.flush)())
    }
}

impl Drop for FuseMount {
    fn drop(&mut self) {
        if let Err(error) = self.detach() {
            tracing::warn!(%error, "cannot remove the FUSE mount");
        }
        // Not waited for: a program may have the file open for any time.
    }
}

/// The source in the mount table for that of the options.
pub(crate) fn source(wanted: &str) -> String {
    // A comma would begin another option.
    wanted.replace([',', '\\'], "_")
}

fn config(options: &FuseOptions, read_only: bool) -> Config {
    let mut config = Config::default();
    config.mount_options = vec![
        MountOption::FSName(source(&options.source)),
        MountOption::Subtype("riser".into()),
        MountOption::DefaultPermissions,
        MountOption::NoAtime,
        MountOption::NoExec,
    ];
    if read_only {
        config.mount_options.push(MountOption::RO);
    }
    if options.allow_other {
        config.acl = SessionACL::All;
    }
    config
}

/// The id of the mount that was just made on a path.
fn find(path: &Path) -> io::Result<MountId> {
    let mounts = Mounts::read()?;
    let top = mounts.top(path).map(|mount| mount.id);
    top.ok_or_else(|| io::Error::other("the mount is gone at once"))
}

/// The descriptor of a mount whose features are agreed.
#[allow(
    unsafe_code,
    reason = "takes a descriptor over from a value that keeps it"
)]
fn into_fd(session: Session<Negotiation>) -> OwnedFd {
    let fd = session.as_fd().as_raw_fd();
    // A session that is dropped unmounts its path, though another mount may have that by then.
    std::mem::forget(session);
    // SAFETY: the session has owned the open descriptor alone, and does not close it any more.
    unsafe { OwnedFd::from_raw_fd(fd) }
}

/// Has the requests of a mount served: on the disk's thread, which reads alone, since its queues
/// would hold the same requests; or on threads of their own.
fn start<D: BlockDevice>(
    fd: OwnedFd,
    id: MountId,
    fs: Arc<DiskFs>,
    device: Arc<ByteDevice<D>>,
    ending: Arc<Ending>,
) -> io::Result<()> {
    let queue = |fd: OwnedFd| {
        let flags = rustix::fs::fcntl_getfl(&fd)?;
        rustix::fs::fcntl_setfl(&fd, flags | OFlags::NONBLOCK)?;
        let channel = Arc::new(Channel::new(fd)?);
        let (fs, device, ending) = (fs.clone(), device.clone(), ending.clone());
        let queue = Queue::new(channel.clone(), id, fs, device, ending)?;
        Ok::<_, io::Error>((channel, Box::new(queue)))
    };
    let (channel, first) = queue(fd)?;
    let Err(first) = device.device().host(first) else {
        return Ok(());
    };
    let second = sys::clone_queue(channel.fd()).and_then(queue);
    serve_apart("fuse-0", first)?;
    match second {
        Ok((_, second)) => serve_apart("fuse-1", second),
        Err(error) => {
            tracing::info!(%error, "the FUSE mount has one queue only");
            Ok(())
        }
    }
}

fn serve_apart(name: &str, mut queue: Box<dyn Service>) -> io::Result<()> {
    let thread = thread::Builder::new().name(name.to_owned());
    thread.spawn(move || serve(&mut *queue)).map(drop)
}

/// Unmounts the mount with an id from a path. Others may have taken it away, and may have mounted
/// something else there.
fn unmount_listed(path: &Path, id: MountId, lazy: bool) -> Result<(), UnmountError> {
    let failed = |source| UnmountError::Failed {
        path: path.to_owned(),
        source,
    };
    let mounts = Mounts::read().map_err(failed)?;
    if !mounts.has(id) {
        return Ok(());
    }
    if mounts.top(path).is_none_or(|top| top.id != id) {
        let text = "another mount is on top of it, or it was moved";
        return Err(failed(io::Error::new(io::ErrorKind::ResourceBusy, text)));
    }
    unmount(path, lazy)
}

/// Unmounts a FUSE mount as root does, or through `fusermount3` as every user may; with `lazy`
/// even if it is open.
///
/// # Errors
/// It is in use, or it cannot be unmounted.
pub fn unmount(path: &Path, lazy: bool) -> Result<(), UnmountError> {
    let flags = if lazy {
        UnmountFlags::DETACH
    } else {
        UnmountFlags::empty()
    };
    let failed = |source: io::Error| UnmountError::Failed {
        path: path.to_owned(),
        source,
    };
    // The system call comes first: it needs no program, and its errors are codes. `NOFOLLOW`
    // because a user's link must not lead root to another mount.
    match rustix::mount::unmount(path, flags | UnmountFlags::NOFOLLOW) {
        Ok(()) => return Ok(()),
        Err(rustix::io::Errno::BUSY) => return Err(UnmountError::Busy(path.to_owned())),
        Err(rustix::io::Errno::PERM) => {}
        Err(e) => return Err(failed(e.into())),
    }
    let output = Command::new("fusermount3")
        .arg(if lazy { "-uz" } else { "-u" })
        .arg("--")
        .arg(path)
        .stdin(Stdio::null())
        .output()
        .map_err(failed)?;
    if output.status.success() {
        return Ok(());
    }
    let said = String::from_utf8_lossy(&output.stderr);
    if said.contains("busy") {
        return Err(UnmountError::Busy(path.to_owned()));
    }
    Err(failed(io::Error::other(said.trim().to_owned())))
}
