//! Mounts and unmounts the tree.

use std::fs;
use std::io;
use std::mem;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::mpsc::channel;
use std::sync::{Arc, Mutex};
use std::thread::{self, JoinHandle};

use fuser::{BackgroundSession, Config, MountOption, Session};
use rustix::io::Errno;
use rustix::mount::UnmountFlags;

use riser_config::mounts;

use super::fs::TreeFs;
use crate::engine::Engine;

/// A mounted tree, which will be unmounted on drop.
#[derive(Debug)]
pub struct Mount {
    session: BackgroundSession,
    path: PathBuf,
    /// Device number for files in the tree, used to check if the tree is mounted at its path.
    device: u64,
}

impl Mount {
    /// Mounts a tree. The directory will then contain `target`, same as in `/sys/kernel/config`.
    ///
    /// # Errors
    /// Returns an error if the directory doesn't exist, or if FUSE is missing or not allowed.
    pub fn new(engine: Arc<Mutex<Engine>>, path: &Path) -> io::Result<Self> {
        let mut config = Config::default();
        config.mount_options = vec![
            // The daemon checks this source name, because it must not use files in this mount.
            MountOption::FSName(mounts::SOURCE.into()),
            MountOption::Subtype("configfs".into()),
            MountOption::DefaultPermissions,
            MountOption::NoAtime,
            MountOption::NoExec,
        ];
        let session = Session::new(TreeFs::new(engine), path, &config)?.spawn()?;
        let path = path.to_owned();
        // We need to read this after the mount, to get the device number of the tree and not of the
        // directory below.
        let device = fs::metadata(&path)?.dev();
        Ok(Self {
            session,
            path,
            device,
        })
    }

    /// Waits until the tree is unmounted by another process. If `on_mounted` returns first, we unmount
    /// it.
    ///
    /// # Errors
    /// Returns an error if the session failed or can't be unmounted.
    pub fn serve(mut self, on_mounted: impl FnOnce() + Send + 'static) -> io::Result<()> {
        let (events, event) = channel();
        // We have to keep the session to unmount it later, but joining needs to take its thread, so
        // we replace the thread.
        let guard = mem::replace(&mut self.session.guard, thread::spawn(|| Ok(())));
        let ended = events.clone();
        // We don't wait for these threads to exit, because one of them is waiting for something
        // that will never happen.
        thread::spawn(move || ended.send(Some(join(guard))));
        thread::spawn(move || {
            on_mounted();
            events.send(None)
        });
        let unreachable = |_| io::Error::other("the session's thread has exited");
        match event.recv().map_err(unreachable)? {
            Some(end) => {
                self.forget();
                end
            }
            None => self.unmount(),
        }
    }

    /// Unmounts the tree and waits until this is done. Any open files are disconnected. If a
    /// different file system is now mounted at this path, it's not changed.
    ///
    /// # Errors
    /// Returns an error if the tree can't be unmounted.
    pub fn unmount(self) -> io::Result<()> {
        // If another process has already unmounted the tree, it may have mounted a different file
        // system, and we must not unmount it.
        if !self.is_at_its_path() {
            self.forget();
            return Ok(());
        }
        let Self { session, path, .. } = self;
        match session.umount_and_join() {
            // If a shell uses a directory in the tree as its working directory, the mount would
            // stay active without a daemon to handle its requests.
            Err(error) if Errno::from_io_error(&error) == Some(Errno::BUSY) => {
                Ok(rustix::mount::unmount(&path, UnmountFlags::DETACH)?)
            }
            done => done,
        }
    }

    /// Returns true if the tree is still mounted at its path.
    fn is_at_its_path(&self) -> bool {
        match fs::metadata(&self.path) {
            Ok(found) => found.dev() == self.device,
            // The session has been closed, but the tree is still mounted.
            Err(error) => Errno::from_io_error(&error) == Some(Errno::NOTCONN),
        }
    }

    /// Drops the mount without using the path. If we dropped the session, this would unmount the
    /// path again and could remove the file system below: `fuser` 0.18 assumes that all of its
    /// mounts still exist.
    fn forget(self) {
        mem::forget(self.session);
    }
}

fn join(guard: JoinHandle<io::Result<()>>) -> io::Result<()> {
    let panicked = |_| io::Error::other("the session panicked");
    guard.join().map_err(panicked)?
}
