//! Opens a file or block device as a disk.

use std::fs::{File, Metadata, OpenOptions};
use std::io;
use std::os::fd::AsFd;
use std::os::unix::fs::{FileTypeExt, OpenOptionsExt};
use std::path::Path;

use riser_block::{Geometry, MAX_TRANSFER};
use riser_file::{Device, OpenFile, can_punch, direct_alignment, enable_direct};
use rustix::fs::OFlags;
use thiserror::Error;

use super::driver::FileBackend;
use super::local::LocalFile;
use crate::disk::{BUFFERS, MAX_RANGE, Properties, ThreadDisk};

/// Options for opening a disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FileConfig {
    /// Bypass the kernel page cache (`O_DIRECT`).
    pub direct: bool,
    /// Open the disk as read-only.
    pub read_only: bool,
    /// Buffer memory in bytes; should be enough for the largest transfer.
    pub buffers: u64,
}

impl Default for FileConfig {
    fn default() -> Self {
        Self {
            direct: false,
            read_only: false,
            buffers: BUFFERS,
        }
    }
}

/// Error when using a file as a disk.
#[derive(Debug, Error)]
pub enum FileError {
    /// The file can't be opened or accessed.
    #[error("{source}")]
    Open {
        /// System call error.
        source: io::Error,
    },
    /// Not a regular file or block device.
    #[error("{0} is not a regular file or block device")]
    Kind(&'static str),
    /// The device is mounted, used as swap, part of another device, or opened exclusively.
    #[error("the device is in use: it is mounted, or part of another device or swap space")]
    InUse,
    /// The file system doesn't support direct I/O for this file.
    #[error("the file system does not support direct I/O (O_DIRECT)")]
    NoDirect,
    /// The size is not a multiple of the block size.
    #[error("the size of {size} bytes is not a multiple of the block size of {block} bytes")]
    Size {
        /// File size in bytes.
        size: u64,
        /// Block size in bytes.
        block: u32,
    },
    /// The disk thread, the ring or its memory could not be created.
    #[error("cannot start: {0}")]
    Start(#[source] io::Error),
}

impl From<io::Error> for FileError {
    fn from(source: io::Error) -> Self {
        Self::Open { source }
    }
}

/// Opens a regular file or a block device.
///
/// # Errors
/// Returns [`FileError`] if the file can't be used as a disk.
pub fn open(path: &Path, config: FileConfig) -> Result<ThreadDisk, FileError> {
    let kind = std::fs::metadata(path)?;
    check_kind(&kind)?;
    let is_device = kind.file_type().is_block_device();
    let file = open_file(path, config, is_device)?;
    let metadata = file.metadata()?;
    // The file may have been replaced since we checked it.
    check_kind(&metadata)?;
    if metadata.file_type().is_block_device() != is_device {
        return Err(io::Error::from(io::ErrorKind::StaleNetworkFileHandle).into());
    }
    // The ring would execute blocking operations within the submit call.
    rustix::fs::fcntl_setfl(&file, OFlags::empty()).map_err(io::Error::from)?;
    let device = is_device.then(|| Device::of(&file)).transpose()?;
    let geometry = geometry(&file, device.as_ref(), config)?;
    let block = geometry.block_size;
    let align = config.direct.then(|| enable_direct(&file, block, block));
    let align = align.transpose().map_err(|_| FileError::NoDirect)?;
    let file = LocalFile::new(OpenFile::new(file, align, device), block);
    let properties = Properties {
        thread: "file-disk",
        description: format!(
            "{} {}",
            if is_device { "the device" } else { "the file" },
            path.display()
        ),
        has_fua: true,
        buffers: config.buffers,
        geometry,
    };
    ThreadDisk::start(properties, move || FileBackend::new(file)).map_err(FileError::Start)
}

fn check_kind(metadata: &Metadata) -> Result<(), FileError> {
    let kind = metadata.file_type();
    Err(FileError::Kind(match () {
        () if kind.is_file() || kind.is_block_device() => return Ok(()),
        () if kind.is_dir() => "a directory",
        () if kind.is_char_device() => "a character device",
        () if kind.is_fifo() => "a pipe",
        () if kind.is_socket() => "a socket",
        () => "a file of unknown type",
    }))
}

fn open_file(path: &Path, config: FileConfig, is_device: bool) -> Result<File, FileError> {
    let mut options = OpenOptions::new();
    options.read(true).write(!config.read_only);
    // If the file has been replaced by a pipe, this open must not block.
    let mut flags = OFlags::NONBLOCK;
    if is_device && !config.read_only {
        flags |= OFlags::EXCL;
    }
    options.custom_flags(flags.bits().cast_signed());
    options.open(path).map_err(|error| match error.kind() {
        io::ErrorKind::ResourceBusy if is_device => FileError::InUse,
        _ => error.into(),
    })
}

fn geometry(
    file: &File,
    device: Option<&Device>,
    config: FileConfig,
) -> Result<Geometry, FileError> {
    let fd = file.as_fd();
    let (size, logical, physical) = match (device, config.direct) {
        (Some(device), _) => (device.size, device.logical_block, device.physical_block),
        (None, false) => (file.metadata()?.len(), 512, 4096),
        (None, true) => {
            let align = direct_alignment(fd, 4096)?.ok_or(FileError::NoDirect)?;
            (file.metadata()?.len(), align.offset, 4096)
        }
    };
    let block = logical.max(512);
    if size == 0 || !size.is_multiple_of(block.into()) || !block.is_power_of_two() {
        return Err(FileError::Size { size, block });
    }
    let can_discard = !config.read_only
        && match device {
            Some(device) => device.can_discard,
            None => can_punch(fd, size.next_multiple_of(1 << 20), 1 << 20),
        };
    Ok(Geometry {
        block_size: block,
        physical_block_size: physical.max(block),
        capacity: size,
        max_transfer: MAX_TRANSFER,
        optimal_transfer: MAX_TRANSFER,
        max_discard: if can_discard { MAX_RANGE } else { 0 },
        max_write_zeroes: if config.read_only { 0 } else { MAX_RANGE },
        reports_status: device.is_none(),
        read_only: config.read_only,
        volatile_cache: true,
        flushes: true,
        stable_writes: true,
    })
}
