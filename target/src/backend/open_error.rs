//! Reasons for which backends are not opened.

use std::io;
use std::path::{Path, PathBuf};

use super::file_id::FileId;
use crate::holder::Holder;

/// Reason for which a backend could not be opened.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// A system call failed.
    #[error("{}: cannot {action}: {source}", path.display())]
    Io {
        /// Path of the backend.
        path: PathBuf,
        /// Action that failed, as "open it".
        action: &'static str,
        /// Error of the system.
        source: io::Error,
    },
    /// A file cannot be opened, and it is known what may help.
    #[error("{}: cannot {action}: {source}; {hint}", path.display())]
    File {
        /// Path of the file.
        path: PathBuf,
        /// Action that failed, as "open it".
        action: &'static str,
        /// Error of the system.
        source: io::Error,
        /// Advice on permissions or on where such a file can be.
        hint: String,
    },
    /// The path leads to something else than what is open.
    #[error("{}: is not what is served any more; another file has taken its place", path.display())]
    Moved {
        /// Path of the backend.
        path: PathBuf,
    },
    /// The path is something else.
    #[error("{}: is not a {expected}", path.display())]
    Kind {
        /// Path of the backend.
        path: PathBuf,
        /// Kind of file that it should be.
        expected: &'static str,
    },
    /// Another process, or another backend of this one, has it.
    #[error(
        "{}: is in use: {} holds its lock",
        path.display(),
        holder.as_ref().map_or("another backend or another program".to_owned(), ToString::to_string)
    )]
    Locked {
        /// Path of the backend.
        path: PathBuf,
        /// The process that has it open, if that can be seen.
        holder: Option<Holder>,
        /// The file, if it is one.
        file: Option<FileId>,
    },
    /// A file that was there before is missing.
    #[error(
        "{}: is missing, and it was there before: is its file system mounted? It is not created again; for an \
         empty disk, create an empty file there",
        path.display()
    )]
    Gone {
        /// Path of the file.
        path: PathBuf,
    },
    /// Its unit would have no names: those that are kept cannot be read.
    #[error(
        "the names of logical units cannot be read: {why}; restore the file from a backup, or move it away and \
         restart riserd: then there are new names, and initiators see new disks"
    )]
    Unnamed {
        /// Fault of the file, with its path.
        why: String,
    },
    /// The file is smaller than it should be, and nothing says to extend it.
    #[error(
        "{}: is {actual} bytes, fewer than {wanted}; `create: true` extends a file",
        path.display()
    )]
    Size {
        /// Path of the backend.
        path: PathBuf,
        /// Size on disk in bytes.
        actual: u64,
        /// Size asked for in bytes.
        wanted: u64,
    },
    /// The path leads to a file system that asks this daemon.
    #[error("{}", riser_config::mounts::why(path, mount))]
    AsksUs {
        /// Path of the backend.
        path: PathBuf,
        /// Mount point of that file system.
        mount: PathBuf,
    },
    /// A backend that is served would become smaller.
    #[error("it has {from} bytes and nothing shrinks one to {to}")]
    Shrinks {
        /// Capacity before, in bytes.
        from: u64,
        /// Capacity asked for in bytes.
        to: u64,
    },
    /// There is not one whole block.
    #[error("a backend of {size} bytes holds no block of {block_size} bytes")]
    Empty {
        /// Size of the file or device, in bytes.
        size: u64,
        /// Block size in bytes.
        block_size: u32,
    },
    /// A failed flush was not cleared: acknowledged writes may be lost, and the flush at shutdown
    /// would fail.
    #[error(
        "a flush failed ({0}): deal with what was lost, and clear it (riserd clear-flush-failure)"
    )]
    FlushFailed(io::Error),
    /// The block size is not supported.
    #[error("a block size of {0} bytes; 512 and 4096 are supported")]
    BlockSize(u32),
    /// `direct: on` cannot be had.
    #[error("{}: cannot be served with direct I/O: {reason}", path.display())]
    Direct {
        /// Path of the backend.
        path: PathBuf,
        /// Reason why it is refused, for people.
        reason: String,
    },
}

impl OpenError {
    /// Returns true if there was nothing at the path, or nothing that answers.
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
