//! Changes on disk by opening or growing a backend, to be taken back where nothing was served from
//! it.

use std::fs::File;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;
#[cfg(test)]
use std::sync::Mutex;

use riser_reactor::Handle;

use super::sys;

/// Change on disk by opening or growing a backend.
#[derive(Debug)]
pub(super) struct Made {
    pub(super) path: PathBuf,
    pub(super) file: Handle,
    /// Its length before; `None` if it was not there.
    pub(super) before: Option<u64>,
}

/// Lets taking back changes of a file wait until the sender is gone.
#[cfg(test)]
pub(crate) static HANGING_UNDO: Mutex<Option<(PathBuf, std::sync::mpsc::Receiver<()>)>> =
    Mutex::new(None);

impl Made {
    pub(super) fn undo(&self) {
        #[cfg(test)]
        {
            let hangs = HANGING_UNDO
                .lock()
                .unwrap()
                .take_if(|(path, _)| *path == self.path);
            if let Some((_, hangs)) = hangs {
                let _ = hangs.recv_timeout(std::time::Duration::from_secs(20));
            }
        }
        let undone = match self.before {
            None => self.remove(),
            Some(len) => sys::set_file_size(&self.file, len),
        };
        if let Err(error) = undone {
            tracing::warn!(path = %self.path.display(), %error, "a file keeps its new size");
        }
    }

    /// Removes the file that was created, and no other that has got its name.
    fn remove(&self) -> io::Result<()> {
        let Some(fd) = self.file.fd() else {
            return Ok(());
        };
        let made = File::from(fd.try_clone_to_owned()?).metadata()?;
        let there = std::fs::symlink_metadata(&self.path)?;
        if (there.dev(), there.ino()) != (made.dev(), made.ino()) {
            return Err(io::Error::other("another file has its name"));
        }
        std::fs::remove_file(&self.path)
    }
}
