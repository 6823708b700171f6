//! Mount and unmount.

use std::io;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use fuser::{Config, Filesystem, InitFlags, KernelConfig, MountOption, Session, SessionACL};
use riser_block::{BlockDevice, ByteDevice, Service, serve, task};
use rustix::fs::OFlags;
use rustix::mount::UnmountFlags;
use thiserror::Error;

use super::channel::Channel;
use super::disk::{Caching, DiskFs, Layout};
use super::queue::{Queue, max_write};
use super::sys;
use crate::ending::{Ending, Outcome};
use crate::mounts::{MountId, Mounts};

/// Max number of background requests (readahead, async direct I/O) which the kernel can have in
/// flight.
const MAX_BACKGROUND: u16 = 128;

/// Mount options.
#[derive(Clone, Debug)]
pub struct FuseOptions {
    /// Mount point: directory or file.
    pub path: PathBuf,
    /// File name for the disk, used if the mount point is a directory.
    pub name: String,
    /// Mount source, as shown in the mount table.
    pub source: String,
    /// Cache mode used for the file.
    pub caching: Caching,
    /// Allow access by other users. Requires `user_allow_other` in `/etc/fuse.conf` unless mounted
    /// by root.
    pub allow_other: bool,
}

/// Unmount failure; the file system is still mounted.
#[derive(Debug, Error)]
pub enum UnmountError {
    /// The file system is busy.
    #[error("{} is busy", .0.display())]
    Busy(PathBuf),
    /// Any other unmount error.
    #[error("cannot unmount {}", path.display())]
    Failed {
        /// Mount point.
        path: PathBuf,
        /// System error.
        source: io::Error,
    },
}

/// Handles the FUSE init request, which negotiates features and limits.
struct Negotiation {
    max_write: u32,
}

impl Filesystem for Negotiation {
    fn init(&mut self, _req: &fuser::Request, config: &mut KernelConfig) -> io::Result<()> {
        // If the limit is lower, the error contains the value supported by the kernel. Max pages is
        // derived from max write.
        let _ = config.set_max_write(self.max_write);
        if let Err(most) = config.set_max_readahead(self.max_write) {
            let _ = config.set_max_readahead(most);
        }
        let _ = config.set_max_background(MAX_BACKGROUND);
        let _ = config.set_congestion_threshold(MAX_BACKGROUND);
        for wish in [
            InitFlags::FUSE_ASYNC_DIO,
            InitFlags::FUSE_DIRECT_IO_ALLOW_MMAP,
            // We need a separate error code if an administrator aborts the connection, because then
            // it's still mounted.
            InitFlags::FUSE_ABORT_ERROR,
        ] {
            // Not supported by older kernels, so ignore errors.
            let _ = config.add_capabilities(wish);
        }
        Ok(())
    }
}

/// Mounted disk. The mount is detached on drop, even if it's busy.
pub struct FuseMount {
    path: PathBuf,
    file: PathBuf,
    id: MountId,
    outcome: Arc<Outcome>,
    /// Set when it has been removed from the mount tree.
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
    /// Mounts the disk. The file can be used when this returns. `on_end` is called once, after all
    /// requests have completed and the mount has either been unmounted and closed by all users, or
    /// failed. It is called on the thread serving the mount and must not block.
    ///
    /// # Errors
    /// Returns an error if the path doesn't exist, if FUSE is not available or not permitted, or if
    /// the mount list can't be read.
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
        // If this fails, the session will still unmount.
        let id = find(&path)?;
        let fd = into_fd(session);
        let mut fs = DiskFs::new(device.geometry().clone(), layout, options.caching);
        if options.allow_other {
            fs = fs.for_everyone();
        }
        let outcome = Arc::new(Outcome::default());
        let ending = Ending::new(outcome.clone(), on_end);
        let flushed = device.clone();
        if let Err(error) = start(fd, id, Arc::new(fs), device, Arc::new(ending)) {
            // The descriptors are closed, so users will get errors.
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

    /// Mount point.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Path to the disk file.
    #[must_use]
    pub fn file(&self) -> &Path {
        &self.file
    }

    /// Mount ID, as seen by this process.
    #[must_use]
    pub fn id(&self) -> MountId {
        self.id
    }

    /// Returns whether the mount is closed and all requests are complete: it was either unmounted
    /// and closed by all users, or it failed, see [`Self::wait`].
    #[must_use]
    pub fn is_ended(&self) -> bool {
        self.outcome.is_over()
    }

    /// Unmounts if not busy. Does nothing if it's already unmounted.
    ///
    /// # Errors
    /// Returns an error if the mount is busy, can't be unmounted, or if there is another mount on
    /// top; in this case it stays mounted.
    pub fn try_unmount(&self) -> Result<(), UnmountError> {
        self.unmount(false)
    }

    /// Removes the mount from the tree, even if a file is open. A program can still use its open
    /// file until this process exits. Does nothing if it's already unmounted.
    ///
    /// # Errors
    /// Returns an error if it can't be unmounted, or if there is another mount on top.
    pub fn detach(&self) -> Result<(), UnmountError> {
        self.unmount(true)
    }

    fn unmount(&self, lazy: bool) -> Result<(), UnmountError> {
        // The path may already be used by another mount, and the ID could be reused later.
        if self.outcome.is_complete() || self.is_removed.load(Ordering::Acquire) {
            return Ok(());
        }
        unmount_listed(&self.path, self.id, lazy)?;
        self.is_removed.store(true, Ordering::Release);
        Ok(())
    }

    /// Waits until the mount is closed, then flushes the disk.
    ///
    /// # Errors
    /// Returns an error if requests can no longer be processed, for example because the connection
    /// was aborted while mounted, or if the flush failed.
    pub fn wait(self) -> io::Result<()> {
        let mut result = self.outcome.wait();
        // A forced unmount first aborts the connection, and may already have removed the mount.
        if let Err(error) = &result
            && error.kind() == io::ErrorKind::NotConnected
            // The ID may have been reused.
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
        // Don't wait here: a program can keep the file open as long as it wants.
    }
}

/// Converts [`FuseOptions::source`] for use in the mount table.
#[must_use]
pub fn source(wanted: &str) -> String {
    // A comma would start a new option.
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

/// Returns the ID for a mount just created on this path.
fn find(path: &Path) -> io::Result<MountId> {
    let mounts = Mounts::read()?;
    let top = mounts.top(path).map(|mount| mount.id);
    top.ok_or_else(|| io::Error::other("the mount was removed immediately"))
}

/// Extracts the descriptor after negotiation.
#[allow(
    unsafe_code,
    reason = "takes a descriptor over from a value that keeps it"
)]
fn into_fd(session: Session<Negotiation>) -> OwnedFd {
    let fd = session.as_fd().as_raw_fd();
    // Don't drop the session: this would unmount the path, which may be in use by a new mount.
    std::mem::forget(session);
    // SAFETY: the session was the only owner of this open descriptor and will not close it.
    unsafe { OwnedFd::from_raw_fd(fd) }
}

/// Starts serving the mount: if the disk has a thread, it uses a single queue, because more queues
/// would only contain the same requests. Otherwise we create new threads.
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
            tracing::info!(%error, "the FUSE mount uses a single queue");
            Ok(())
        }
    }
}

fn serve_apart(name: &str, mut queue: Box<dyn Service>) -> io::Result<()> {
    let thread = thread::Builder::new().name(name.to_owned());
    thread.spawn(move || serve(&mut *queue)).map(drop)
}

/// Unmounts this mount ID from a path. It may already be unmounted, and something else could be
/// mounted on the path.
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
        let text = "the mount is covered by another mount, or was moved";
        return Err(failed(io::Error::new(io::ErrorKind::ResourceBusy, text)));
    }
    unmount(path, lazy)
}

/// Unmounts a FUSE mount, directly as root or via `fusermount3`, which is available to all users.
/// If `lazy` is set, this works even if a file is open.
///
/// # Errors
/// Returns an error if the mount is busy or can't be unmounted.
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
    // Try the system call first: it doesn't require a program, and it returns an error code. Use
    // `NOFOLLOW`, so that root will not follow a user's symlink to another mount.
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
