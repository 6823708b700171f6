//! Files that are read from start to end, and new files.

use std::ffi::OsStr;
use std::fs::{self, File, OpenOptions};
use std::io;
use std::ops::Range;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use rustix::fs::{CWD, RenameFlags, SeekFrom, renameat_with, seek};
use rustix::io::Errno;

use super::error::ConversionError;
use crate::backend::OpenError;
use crate::backend::medium::lock;
use crate::backend::open_error::io_error;
use crate::backend::sys::Lock;

/// Granularity of holes in new files, in bytes.
const PAGE: usize = 4096;

/// Files of a `fileio` backstore of LIO.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LioFiles {
    /// Blocks.
    pub image: PathBuf,
    /// Tuples.
    pub protection: PathBuf,
}

impl LioFiles {
    /// Returns the files of a backstore with this image.
    #[must_use]
    pub fn new(image: &Path) -> Self {
        Self {
            image: image.to_owned(),
            protection: with_suffix(image, ".protection"),
        }
    }
}

fn with_suffix(path: &Path, suffix: &str) -> PathBuf {
    let mut path = path.as_os_str().to_owned();
    path.push(OsStr::new(suffix));
    path.into()
}

/// An existing file. Its lock prevents a daemon from serving it for writing.
pub(super) struct Source {
    path: PathBuf,
    file: File,
    len: u64,
    /// Offset of the first data after the known holes, or the maximum if no data follows.
    data: u64,
}

impl Source {
    pub(super) fn open(path: &Path) -> Result<Self, OpenError> {
        let file = OpenOptions::new()
            .read(true)
            // Opening a FIFO must not block.
            .custom_flags(libc::O_NONBLOCK)
            .open(path)
            .map_err(io_error(path, "open it"))?;
        let metadata = file.metadata().map_err(io_error(path, "examine it"))?;
        if !metadata.is_file() {
            return Err(OpenError::Kind {
                path: path.to_owned(),
                expected: "regular file",
            });
        }
        lock(&file, Lock::Shared, path)?;
        // A daemon may have extended it before.
        let metadata = file.metadata().map_err(io_error(path, "examine it"))?;
        Ok(Self {
            path: path.to_owned(),
            len: metadata.len(),
            file,
            data: 0,
        })
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// Returns the size in bytes.
    pub(super) fn len(&self) -> u64 {
        self.len
    }

    pub(super) fn read(&self, into: &mut [u8], at: u64) -> Result<(), OpenError> {
        let read = self.file.read_exact_at(into, at);
        read.map_err(io_error(&self.path, "read it"))
    }

    /// Returns whether some bytes of a range are not in a hole. Ranges must be in ascending order.
    pub(super) fn has_data(&mut self, range: &Range<u64>) -> Result<bool, OpenError> {
        if self.data < range.start {
            self.data = match seek(&self.file, SeekFrom::Data(range.start)) {
                Ok(data) => data,
                // There is no data after this offset.
                Err(Errno::NXIO) => u64::MAX,
                // The file system does not report holes.
                Err(Errno::INVAL | Errno::NOTSUP) => range.start,
                Err(error) => return Err(io_error(&self.path, "find its holes")(error.into())),
            };
        }
        Ok(self.data < range.end)
    }
}

/// A new file. It has a temporary name until it is [published](publish), and is removed otherwise.
pub(super) struct NewFile {
    path: PathBuf,
    /// Current path.
    name: PathBuf,
    file: File,
    is_published: bool,
}

impl NewFile {
    pub(super) fn create(path: &Path) -> Result<Self, ConversionError> {
        if fs::symlink_metadata(path).is_ok() {
            return Err(exists(path));
        }
        let name = with_suffix(path, ".partial");
        let created = OpenOptions::new()
            .write(true)
            .create_new(true)
            // Data of initiators must not be readable by all users of this host.
            .mode(0o600)
            .open(&name);
        match created {
            Ok(file) => Ok(Self {
                path: path.to_owned(),
                name,
                file,
                is_published: false,
            }),
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
                Err(ConversionError::Partial { path: name })
            }
            Err(error) => Err(io_error(&name, "create it")(error).into()),
        }
    }

    /// Extends the file with a hole.
    pub(super) fn set_len(&self, len: u64) -> Result<(), OpenError> {
        let changed = self.file.set_len(len);
        changed.map_err(io_error(&self.name, "extend it"))
    }

    pub(super) fn write(&self, bytes: &[u8], at: u64) -> Result<(), OpenError> {
        let written = self.file.write_all_at(bytes, at);
        written.map_err(io_error(&self.name, "write it"))
    }

    /// Writes bytes to a hole. Pages of zeroes remain holes.
    pub(super) fn write_sparse(&self, bytes: &[u8], at: u64) -> Result<(), OpenError> {
        const ZEROES: [u8; PAGE] = [0; PAGE];
        let (mut start, mut done) = (0, 0);
        while done < bytes.len() {
            let within = ((at + done as u64) % PAGE as u64) as usize;
            let end = (done + PAGE - within).min(bytes.len());
            if bytes[done..end] == ZEROES[..end - done] {
                self.write(&bytes[start..done], at + start as u64)?;
                start = end;
            }
            done = end;
        }
        self.write(&bytes[start..], at + start as u64)
    }

    /// Renames the file, unless another file has its name.
    fn rename(&mut self) -> Result<(), ConversionError> {
        let (from, to) = (&self.name, &self.path);
        let renamed = match renameat_with(CWD, from, CWD, to, RenameFlags::NOREPLACE) {
            // Network file systems do not support this flag.
            Err(Errno::INVAL | Errno::NOSYS) => {
                fs::hard_link(from, to).and_then(|()| fs::remove_file(from))
            }
            renamed => renamed.map_err(io::Error::from),
        };
        match renamed {
            Ok(()) => {
                self.name.clone_from(&self.path);
                Ok(())
            }
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Err(exists(to)),
            Err(error) => Err(io_error(from, "rename it")(error).into()),
        }
    }

    fn sync_directory(&self) -> Result<(), OpenError> {
        let parent = self.path.parent().filter(|p| !p.as_os_str().is_empty());
        File::open(parent.unwrap_or(Path::new(".")))
            .and_then(|directory| directory.sync_all())
            .map_err(io_error(&self.path, "sync its directory"))
    }
}

impl Drop for NewFile {
    fn drop(&mut self) {
        if !self.is_published {
            // The file may have been removed by another process.
            let _ = fs::remove_file(&self.name);
        }
    }
}

fn exists(path: &Path) -> ConversionError {
    ConversionError::Exists {
        path: path.to_owned(),
    }
}

/// Makes complete files durable, and renames them in this order. After an error, all of them are
/// removed.
pub(super) fn publish(mut files: Vec<NewFile>) -> Result<(), ConversionError> {
    for file in &files {
        let synced = file.file.sync_all();
        synced.map_err(io_error(&file.name, "sync it"))?;
    }
    files.iter_mut().try_for_each(NewFile::rename)?;
    for file in &files {
        file.sync_directory()?;
    }
    for file in &mut files {
        file.is_published = true;
    }
    Ok(())
}
