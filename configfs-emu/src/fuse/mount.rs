//! Mounting the tree at a directory, and taking it away again.

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

/// A mounted tree. Dropping it unmounts it.
#[derive(Debug)]
pub struct Mount {
    session: BackgroundSession,
    path: PathBuf,
    /// Device number of the tree's files, by which it is known at its path.
    device: u64,
}

impl Mount {
    /// Mounts a tree at a directory, which then has `target` in it, as `/sys/kernel/config` has.
    ///
    /// # Errors
    /// The directory does not exist; FUSE is missing or not permitted.
    pub fn new(engine: Arc<Mutex<Engine>>, path: &Path) -> io::Result<Self> {
        let mut config = Config::default();
        config.mount_options = vec![
            // By this the daemon knows that it must not use the files here.
            MountOption::FSName(mounts::SOURCE.into()),
            MountOption::Subtype("configfs".into()),
            MountOption::DefaultPermissions,
            MountOption::NoAtime,
            MountOption::NoExec,
        ];
        let session = Session::new(TreeFs::new(engine), path, &config)?.spawn()?;
        let path = path.to_owned();
        // After the mount: this is the number of the tree, not that of the directory below.
        let device = fs::metadata(&path)?.dev();
        Ok(Self {
            session,
            path,
            device,
        })
    }

    /// Waits until another process unmounts it, or until `asked` returns, and unmounts it then.
    ///
    /// # Errors
    /// The session ended with an error, or it cannot be unmounted.
    pub fn serve(mut self, asked: impl FnOnce() + Send + 'static) -> io::Result<()> {
        let (events, event) = channel();
        // The session must stay whole for an unmount later, and joining takes its thread away.
        let guard = mem::replace(&mut self.session.guard, thread::spawn(|| Ok(())));
        let ended = events.clone();
        // The process does not wait for these threads: one of them waits for what never comes.
        thread::spawn(move || ended.send(Some(join(guard))));
        thread::spawn(move || {
            asked();
            events.send(None)
        });
        let unreachable = |_| io::Error::other("the session's thread is gone");
        match event.recv().map_err(unreachable)? {
            Some(end) => {
                self.forget();
                end
            }
            None => self.unmount(),
        }
    }

    /// Unmounts it, and waits until it is gone; files that are open there are cut off. What is
    /// mounted at its path in its place stays.
    ///
    /// # Errors
    /// It cannot be unmounted.
    pub fn unmount(self) -> io::Result<()> {
        // Another process has unmounted it, and perhaps mounted something else there, which is not
        // ours to take away.
        if !self.is_at_its_path() {
            self.forget();
            return Ok(());
        }
        let Self { session, path, .. } = self;
        match session.umount_and_join() {
            // A shell whose directory is in the tree would keep it mounted without a daemon to
            // answer.
            Err(error) if Errno::from_io_error(&error) == Some(Errno::BUSY) => {
                Ok(rustix::mount::unmount(&path, UnmountFlags::DETACH)?)
            }
            done => done,
        }
    }

    /// Returns true if the tree is the one that its path leads to.
    fn is_at_its_path(&self) -> bool {
        match fs::metadata(&self.path) {
            Ok(found) => found.dev() == self.device,
            // Its session has ended, and it is still mounted.
            Err(error) => Errno::from_io_error(&error) == Some(Errno::NOTCONN),
        }
    }

    /// Leaves the path alone. Dropping the session would unmount it once more, and so take away
    /// what was mounted below: `fuser` 0.18 takes every mount for one that is still there.
    fn forget(self) {
        mem::forget(self.session);
    }
}

fn join(guard: JoinHandle<io::Result<()>>) -> io::Result<()> {
    let panicked = |_| io::Error::other("the session panicked");
    guard.join().map_err(panicked)?
}
