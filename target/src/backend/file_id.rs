//! File identifiers that do not depend on the path.

use std::fs::File;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::time::UNIX_EPOCH;

use serde::{Deserialize, Serialize};

/// Identifies a file, independently of its path.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileId {
    /// Device number of the file system.
    pub device: u64,
    /// Inode number in the file system.
    pub inode: u64,
    /// Creation time in nanoseconds since 1970, if available from the file system. Required because
    /// inode numbers of deleted files are reused.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub born: Option<u64>,
}

impl FileId {
    /// Returns the identifier of an open file.
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

    /// Returns true if this is the same file. Device numbers can change when the host reboots.
    #[must_use]
    pub fn is_same(&self, other: &Self) -> bool {
        let device = |file: &Self| file.born.is_none().then_some(file.device);
        (self.inode, self.born, device(self)) == (other.inode, other.born, device(other))
    }
}
