//! Names of files that outlive a rename.

use std::fs::File;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::time::UNIX_EPOCH;

use serde::{Deserialize, Serialize};

/// A file, independent of its path.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileId {
    /// Device number of its file system.
    pub device: u64,
    /// Inode number in its file system.
    pub inode: u64,
    /// Time of its creation, in nanoseconds since 1970, where the file system knows: inode numbers
    /// of files that are gone are given to new ones.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub born: Option<u64>,
}

impl FileId {
    /// Names an open file.
    pub(super) fn of(file: &File) -> io::Result<Self> {
        let file = file.metadata()?;
        let born = file.created().ok();
        let born = born.and_then(|born| born.duration_since(UNIX_EPOCH).ok());
        Ok(Self {
            device: file.dev(),
            inode: file.ino(),
            born: born.map(|born| born.as_nanos() as u64),
        })
    }

    /// Returns true if it is the same file. Numbers of devices change when the host starts again.
    #[must_use]
    pub fn is_same(&self, other: &Self) -> bool {
        let device = |file: &Self| file.born.is_none().then_some(file.device);
        (self.inode, self.born, device(self)) == (other.inode, other.born, device(other))
    }
}
