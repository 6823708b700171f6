//! Mounting.

use std::io;
use std::path::Path;
use std::sync::{Arc, Mutex};

use fuser::{BackgroundSession, Config, MountOption, Session};

use riser_config::mounts;

use super::fs::TreeFs;
use crate::engine::Engine;

/// A mounted tree. Dropping it unmounts it.
#[derive(Debug)]
pub struct Mount {
    session: BackgroundSession,
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
        let session = Session::new(TreeFs::new(engine), path, &config)?;
        Ok(Self {
            session: session.spawn()?,
        })
    }

    /// Waits until a user unmounts it.
    ///
    /// # Errors
    /// The session ended with an error.
    pub fn wait(self) -> io::Result<()> {
        self.session.join()
    }

    /// Unmounts it, and waits until it is gone.
    ///
    /// # Errors
    /// It cannot be unmounted.
    pub fn unmount(self) -> io::Result<()> {
        self.session.umount_and_join()
    }
}
