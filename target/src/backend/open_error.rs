//! Reasons why a backend cannot be opened.

use std::io;
use std::path::{Path, PathBuf};

use super::file_id::FileId;
use super::protected::HeaderError;
use crate::holder::Holder;

/// Reason why a backend cannot be opened.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// A system call failed.
    #[error("{}: cannot {action}: {source}", path.display())]
    Io {
        /// Path of the backend.
        path: PathBuf,
        /// Operation that failed, such as "open it".
        action: &'static str,
        /// System error.
        source: io::Error,
    },
    /// A file cannot be opened, and advice is available.
    #[error("{}: cannot {action}: {source}; {hint}", path.display())]
    File {
        /// Path of the file.
        path: PathBuf,
        /// Operation that failed, such as "open it".
        action: &'static str,
        /// System error.
        source: io::Error,
        /// Advice on permissions or on suitable locations for this file.
        hint: String,
    },
    /// The path does not refer to the open file.
    #[error("{}: file was replaced while being served", path.display())]
    Moved {
        /// Path of the backend.
        path: PathBuf,
    },
    /// The path refers to a different kind of file.
    #[error("{}: is not a {expected}", path.display())]
    Kind {
        /// Path of the backend.
        path: PathBuf,
        /// Expected kind of file.
        expected: &'static str,
    },
    /// In use by another process, or by another backend of this process.
    #[error(
        "{}: is in use: {}",
        path.display(),
        match holder {
            Some(holder) => format!("{holder} holds its lock"),
            None if *is_accessed => "a thread of riserd is still accessing it".to_owned(),
            None => "another backend or another program holds its lock".to_owned(),
        }
    )]
    Locked {
        /// Path of the backend.
        path: PathBuf,
        /// The process that has opened the file, if this is known.
        holder: Option<Holder>,
        /// A thread of this process is accessing it, for example to flush a backend that was removed.
        is_accessed: bool,
        /// The file, if it is one.
        file: Option<FileId>,
    },
    /// A file that existed before is missing.
    #[error(
        "{}: is missing, but it existed before: is its file system mounted? It is not created \
         again; for an empty disk, create an empty file there",
        path.display()
    )]
    Gone {
        /// Path of the file.
        path: PathBuf,
    },
    /// The names of its unit are not available, because the file with names cannot be read.
    #[error(
        "cannot read the names of logical units: {why}; restore the file from a backup, or move it \
         away and restart riserd, which assigns new names: initiators will see new disks"
    )]
    Unnamed {
        /// Error with the path of the file.
        why: String,
    },
    /// The file is too small, and it is not configured to be extended.
    #[error(
        "{}: is {actual} bytes, fewer than {wanted}; `create: true` extends a file",
        path.display()
    )]
    Size {
        /// Path of the backend.
        path: PathBuf,
        /// Size on disk in bytes.
        actual: u64,
        /// Requested size in bytes.
        wanted: u64,
    },
    /// The path is on a file system that depends on this daemon.
    #[error("{}", riser_config::mounts::why(path, mount))]
    DependsOnUs {
        /// Path of the backend.
        path: PathBuf,
        /// Mount point of this file system.
        mount: PathBuf,
    },
    /// A served backend would become smaller.
    #[error("cannot shrink from {from} to {to} bytes")]
    Shrinks {
        /// Current capacity in bytes.
        from: u64,
        /// Requested capacity in bytes.
        to: u64,
    },
    /// The backend is smaller than a single block.
    #[error("backend of {size} bytes is smaller than a block of {block_size} bytes")]
    Empty {
        /// Size of the file or device, in bytes.
        size: u64,
        /// Block size in bytes.
        block_size: u32,
    },
    /// A failed flush was not cleared. Acknowledged writes may be lost, and the flush at shutdown
    /// would fail.
    #[error(
        "a flush failed ({0}): check for lost writes, and clear the failure (riserd \
         clear-flush-failure)"
    )]
    FlushFailed(io::Error),
    /// The block size is not supported.
    #[error("unsupported block size of {0} bytes: must be 512 or 4096")]
    BlockSize(u32),
    /// The protection information of the file does not match the configuration.
    #[error("{}: {source}", path.display())]
    Protection {
        /// Path of the file.
        path: PathBuf,
        /// The reason.
        source: HeaderError,
    },
    /// Devices have no protection information.
    #[error("protection information is not supported for block devices")]
    ProtectedDevice,
    /// `direct: on` is not supported for this file or device.
    #[error("{}: cannot be served with direct I/O: {reason}", path.display())]
    Direct {
        /// Path of the backend.
        path: PathBuf,
        /// Text with the reason.
        reason: String,
    },
}

impl OpenError {
    /// Returns true if the path does not exist or does not respond.
    pub(super) fn is_missing(&self) -> bool {
        match self {
            Self::Gone { .. } => true,
            Self::Io { source, .. } | Self::File { source, .. } => {
                source.kind() != io::ErrorKind::PermissionDenied
            }
            _ => false,
        }
    }
}

pub(super) fn io_error(path: &Path, action: &'static str) -> impl FnOnce(io::Error) -> OpenError {
    let path = path.to_owned();
    move |source| OpenError::Io {
        path,
        action,
        source,
    }
}
