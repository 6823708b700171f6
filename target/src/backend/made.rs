//! Changes made on disk when opening or growing a backend, to be reverted if it is not served.

use std::fs::File;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;
#[cfg(test)]
use std::sync::Mutex;

use riser_reactor::Handle;

use super::sys;

/// A change made on disk when opening or growing a backend.
#[derive(Debug)]
pub(super) struct Made {
    pub(super) path: PathBuf,
    pub(super) file: Handle,
    /// Previous length, or `None` if the file was created.
    pub(super) before: Option<u64>,
    /// A blank file got the header of a protected disk.
    pub(super) has_new_header: bool,
}

/// Blocks reverting the changes of a file until the sender is dropped.
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
            Some(len) => self.restore(len),
        };
        if let Err(error) = undone {
            tracing::warn!(path = %self.path.display(), %error, "cannot restore the size of a file");
        }
    }

    fn restore(&self, len: u64) -> io::Result<()> {
        if self.has_new_header {
            // The file contained zeroes, and was not longer than a header.
            sys::write_at(&self.file, &vec![0; len as usize], 0)?;
        }
        sys::set_file_size(&self.file, len)
    }

    /// Removes a file that was created, but not a different file that has the same name now.
    fn remove(&self) -> io::Result<()> {
        let Some(fd) = self.file.fd() else {
            return Ok(());
        };
        let made = File::from(fd.try_clone_to_owned()?).metadata()?;
        let there = std::fs::symlink_metadata(&self.path)?;
        if (there.dev(), there.ino()) != (made.dev(), made.ino()) {
            return Err(io::Error::other("the file was replaced"));
        }
        std::fs::remove_file(&self.path)
    }
}
