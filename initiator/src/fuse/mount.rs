//! Mounting and unmounting.

use std::io;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::thread::{self, JoinHandle};

use fuser::{Config, MountOption, Session, SessionACL};
use rustix::mount::UnmountFlags;
use thiserror::Error;

use super::disk::{Caching, DiskFs, Layout};
use crate::block::{BlockDevice, ByteDevice, task};

/// Threads that take requests out of the FUSE device.
const SESSION_THREADS: usize = 2;

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

/// A mounted disk. Dropping it detaches the mount, even if it is in use.
pub struct FuseMount {
    path: PathBuf,
    file: PathBuf,
    thread: Option<JoinHandle<io::Result<()>>>,
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
    /// has been unmounted and has no user any longer.
    ///
    /// # Errors
    /// The path does not exist, FUSE is missing or not permitted.
    pub fn new<D: BlockDevice>(
        device: Arc<ByteDevice<D>>,
        options: FuseOptions,
        on_end: impl FnOnce() + Send + 'static,
    ) -> io::Result<Self> {
        let path = options.path.canonicalize()?;
        let (layout, file) = if path.is_dir() {
            let file = path.join(&options.name);
            (Layout::Directory { name: options.name }, file)
        } else {
            (Layout::File, path.clone())
        };
        let mut config = Config::default();
        config.mount_options = vec![
            // A comma would begin another option.
            MountOption::FSName(options.source.replace([',', '\\'], "_")),
            MountOption::Subtype("riser".into()),
            MountOption::DefaultPermissions,
            MountOption::NoAtime,
            MountOption::NoExec,
        ];
        if device.geometry().read_only {
            config.mount_options.push(MountOption::RO);
        }
        if options.allow_other {
            config.acl = SessionACL::All;
        }
        config.n_threads = Some(SESSION_THREADS);
        config.clone_fd = true;
        let flushed = device.clone();
        let fs = DiskFs::new(device, layout, options.caching)?;
        let session = Session::new(fs, &path, &config)?;
        let thread = thread::Builder::new()
            .name("fuse-session".into())
            .spawn(move || {
                let result = session.run();
                on_end();
                result
            })?;
        Ok(Self {
            path,
            file,
            thread: Some(thread),
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

    /// Returns whether it is unmounted and everything is answered.
    #[must_use]
    pub fn is_ended(&self) -> bool {
        self.thread.as_ref().is_none_or(JoinHandle::is_finished)
    }

    /// Takes the mount away if it is not in use.
    ///
    /// # Errors
    /// It is in use, or it cannot be unmounted; it is still mounted then.
    pub fn try_unmount(&self) -> Result<(), UnmountError> {
        if self.is_ended() {
            return Ok(());
        }
        unmount(&self.path, false)
    }

    /// Takes the mount out of the tree, even if a program has it open, which may go on until it
    /// closes the file or this process ends.
    ///
    /// # Errors
    /// It cannot be unmounted.
    pub fn detach(&self) -> Result<(), UnmountError> {
        if self.is_ended() {
            return Ok(());
        }
        unmount(&self.path, true)
    }

    /// Waits until the mount is gone, and flushes the disk.
    ///
    /// # Errors
    /// The session ended with an error, or the flush failed.
    pub fn wait(mut self) -> io::Result<()> {
        let result = self.join();
        result.and((self.flush)())
    }

    fn join(&mut self) -> io::Result<()> {
        match self.thread.take().map(JoinHandle::join) {
            None => Ok(()),
            Some(Ok(result)) => result,
            Some(Err(_)) => Err(io::Error::other("the FUSE session's thread panicked")),
        }
    }
}

impl Drop for FuseMount {
    fn drop(&mut self) {
        if self.thread.is_some()
            && let Err(error) = self.detach()
        {
            tracing::warn!(%error, "cannot remove the FUSE mount");
        }
        // Not joined: a program may have the file open for any time.
    }
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
