//! State files of ledgers, which record acknowledged writes even if this process crashes.
//!
//! ```text
//!   magic 8 | seed 8 | block size 8 | first byte 8 | length 8 | checksum kind 8 | disk 8 | content 8 |
//!   0 … 4096
//!   then 8 bytes for each block, little-endian: acknowledged 4 | in flight 4
//! ```
//!
//! The file is written before a write is started and after it was acknowledged. The kernel
//! completes these system calls even if the process is killed at this point. The file doesn't
//! survive a crash of the host, and doesn't record the state of device caches.

use std::fs::{self, File, OpenOptions, TryLockError};
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::Path;

use super::error::BenchError;
use super::job::{Checksum, Content};

const MAGIC: u64 = u64::from_le_bytes(*b"RISERBV3");

/// Length of the header in bytes.
const HEADER: u64 = 4096;

/// Number of words used in the header.
const WORDS: usize = 8;

/// Number of blocks to load at the same time.
const BATCH: usize = 8192;

/// Parameters that must match between a state file and its job.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Layout {
    /// Region of the device in bytes.
    pub(super) region: Range<u64>,
    /// Size of a block in bytes.
    pub(super) block: u64,
    pub(super) checksum: Checksum,
    /// Hash of the disk name.
    pub(super) disk: u64,
    /// Hash of the options for contents. Using other options, we couldn't distinguish a torn block
    /// from a damaged one.
    pub(super) content: u64,
}

impl Layout {
    fn words(&self) -> [u64; 6] {
        let checksum = match self.checksum {
            Checksum::Crc32c => 1,
            Checksum::Crc32 => 2,
            Checksum::Crc64 => 3,
        };
        let Range { start, end } = self.region;
        [
            self.block,
            start,
            end - start,
            checksum,
            self.disk,
            self.content,
        ]
    }

    fn of_words(words: &[u64; 6]) -> Option<Self> {
        let [block, start, len, checksum, disk, content] = *words;
        let checksum = match checksum {
            1 => Checksum::Crc32c,
            2 => Checksum::Crc32,
            3 => Checksum::Crc64,
            _ => return None,
        };
        let end = start.checked_add(len)?;
        (block > 0 && len.is_multiple_of(block)).then_some(Self {
            region: start..end,
            block,
            checksum,
            disk,
            content,
        })
    }

    /// Fails if a parameter in the file differs from the job.
    fn check(&self, found: &Self) -> Result<(), String> {
        if found.disk != self.disk {
            return Err(
                "the file belongs to another disk, or to this disk at another address".into(),
            );
        }
        if found.content != self.content {
            return Err(
                "the recorded blocks were written with other content: use the previous \
                 buffer_pattern and buffer_compress_percentage"
                    .into(),
            );
        }
        let names = ["block size", "offset", "size", "checksum"];
        for ((name, found), own) in names.iter().zip(found.words()).zip(self.words()) {
            if found != own {
                return Err(format!(
                    "the file belongs to another job: its {name} is {found}, expected {own}"
                ));
            }
        }
        Ok(())
    }
}

/// Hashes the name of a disk for the state file.
pub(super) fn hash(name: &str) -> u64 {
    crc_fast::checksum(crc_fast::CrcAlgorithm::Crc64Nvme, name.as_bytes())
}

/// Hashes the options that determine the contents of verified blocks.
pub(super) fn hash_content(content: &Content) -> u64 {
    let Content {
        compress_percentage,
        pattern,
        refill: _,
    } = content;
    hash(&format!("{compress_percentage:?} {pattern:?}"))
}

/// An open state file.
#[derive(Debug)]
pub(super) struct StateFile {
    file: File,
    path: String,
    /// Set for a run, which may create and initialize the file.
    may_create: bool,
}

/// Prevents other runs from using the same state file, both in this process and in other processes.
#[derive(Debug)]
pub(super) struct Lock(File);

impl Drop for Lock {
    /// Unlock explicitly, because the file may still be kept open for a short time by completed
    /// workers.
    fn drop(&mut self) {
        let _ = self.0.unlock();
    }
}

impl StateFile {
    /// Opens a state file. If it doesn't exist and `may_create` is set, creates an empty file.
    ///
    /// # Errors
    /// Fails if it can't be opened, is not a regular file, or is used by another run.
    pub(super) fn open(path: &Path, may_create: bool) -> Result<(Self, Lock), BenchError> {
        let fail = |reason: String| BenchError::State {
            path: path.display().to_string(),
            reason,
        };
        // Check this first, because opening a device can have side effects.
        if fs::metadata(path).is_ok_and(|file| !file.is_file()) {
            return Err(fail("not a regular file".into()));
        }
        let mut options = OpenOptions::new();
        options.read(true).write(true).create(may_create);
        let opened = options.truncate(false).open(path);
        let file = opened.map_err(|error| fail(error.to_string()))?;
        match file.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => {
                return Err(fail("the file is in use by another run".into()));
            }
            Err(TryLockError::Error(error)) => return Err(fail(error.to_string())),
        }
        let other = file.try_clone().map_err(|error| fail(error.to_string()))?;
        let path = path.display().to_string();
        let state = Self {
            file,
            path,
            may_create,
        };
        Ok((state, Lock(other)))
    }

    /// Creates an error for this file.
    pub(super) fn error(&self, reason: String) -> BenchError {
        BenchError::State {
            path: self.path.clone(),
            reason,
        }
    }

    fn io(&self, error: io::Error) -> BenchError {
        self.error(error.to_string())
    }

    fn len(&self) -> Result<u64, BenchError> {
        let file = self.file.metadata();
        file.map(|file| file.len()).map_err(|error| self.io(error))
    }

    /// Returns the layout and seed of the blocks, or `None` if the file is empty.
    ///
    /// # Errors
    /// Fails if the file can't be read or is not a state file.
    pub(super) fn header(&self) -> Result<Option<(Layout, u64)>, BenchError> {
        let len = self.len()?;
        if len == 0 {
            return Ok(None);
        }
        let foreign = || self.error("not a state file of riser bench".into());
        if len < HEADER {
            return Err(foreign());
        }
        let mut bytes = [0; 8 * WORDS];
        let read = self.file.read_exact_at(&mut bytes, 0);
        read.map_err(|error| self.io(error))?;
        let mut words = [0; WORDS];
        for (word, bytes) in words.iter_mut().zip(bytes.chunks_exact(8)) {
            *word = from_bytes(bytes);
        }
        let [magic, seed, rest @ ..] = words;
        match Layout::of_words(&rest) {
            Some(layout) if magic == MAGIC => Ok(Some((layout, seed))),
            _ => Err(foreign()),
        }
    }

    /// Returns whether the file only contains a header. This happens if it was interrupted by a
    /// crash during initialization.
    ///
    /// # Errors
    /// Fails if the file can't be read. Also fails if it was opened for verification, because a
    /// truncated copy looks the same and must not be treated as an empty record.
    pub(super) fn is_half_made(&self) -> Result<bool, BenchError> {
        match self.len()? == HEADER {
            true if !self.may_create => {
                Err(self.error("the file is truncated and records no write".into()))
            }
            // This may also be caused by truncation, which loses the records required for
            // verification.
            true => {
                let path = &self.path;
                tracing::warn!(
                    "state file {path} has no records: blocks written by previous runs are not \
                     verified"
                );
                Ok(true)
            }
            false => Ok(false),
        }
    }

    /// Fails if the file belongs to another job or disk.
    pub(super) fn check(&self, layout: &Layout, found: &Layout) -> Result<(), BenchError> {
        layout.check(found).map_err(|why| self.error(why))
    }

    /// Initializes a new file with unknown blocks.
    ///
    /// # Errors
    /// Fails if the file can't be written.
    pub(super) fn make(&self, layout: &Layout, seed: u64, blocks: usize) -> Result<(), BenchError> {
        let mut header = vec![0; HEADER as usize];
        let words = [MAGIC, seed].into_iter().chain(layout.words());
        for (bytes, word) in header.chunks_exact_mut(8).zip(words) {
            bytes.copy_from_slice(&word.to_le_bytes());
        }
        let written = self.file.write_all_at(&header, 0);
        written
            .and_then(|()| self.file.set_len(whole(blocks)))
            .map_err(|error| self.io(error))
    }

    /// Loads the records of all blocks.
    ///
    /// # Errors
    /// Fails if the file can't be read or has the wrong length.
    pub(super) fn load(
        &self,
        blocks: usize,
        mut each: impl FnMut(usize, u64),
    ) -> Result<(), BenchError> {
        let (len, whole) = (self.len()?, whole(blocks));
        if len != whole {
            return Err(self.error(format!("invalid length of {len} bytes, expected {whole}")));
        }
        let mut bytes = vec![0; 8 * BATCH];
        for first in (0..blocks).step_by(BATCH) {
            let bytes = &mut bytes[..8 * BATCH.min(blocks - first)];
            let read = self.file.read_exact_at(bytes, HEADER + 8 * first as u64);
            read.map_err(|error| self.io(error))?;
            for (index, bytes) in bytes.chunks_exact(8).enumerate() {
                each(first + index, from_bytes(bytes));
            }
        }
        Ok(())
    }

    /// Writes the records of consecutive blocks.
    ///
    /// # Errors
    /// Fails if the file can't be written.
    pub(super) fn write(
        &self,
        first: usize,
        words: impl Iterator<Item = u64>,
    ) -> Result<(), BenchError> {
        let bytes: Vec<u8> = words.flat_map(u64::to_le_bytes).collect();
        let written = self.file.write_all_at(&bytes, HEADER + 8 * first as u64);
        written.map_err(|error| self.io(error))
    }
}

/// Returns the file size in bytes.
fn whole(blocks: usize) -> u64 {
    HEADER + 8 * blocks as u64
}

fn from_bytes(bytes: &[u8]) -> u64 {
    u64::from_le_bytes(bytes.try_into().expect("8 bytes"))
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use super::*;

    fn layout() -> Layout {
        Layout {
            region: 8192..8192 + 16 * 4096,
            block: 4096,
            checksum: Checksum::Crc32c,
            disk: hash("disk"),
            content: hash_content(&Content::default()),
        }
    }

    /// A path that is removed on drop.
    struct Temporary(PathBuf);

    impl Temporary {
        fn new(name: &str) -> Self {
            let name = format!("riser-state-{name}-{}", std::process::id());
            let path = std::env::temp_dir().join(name);
            let _ = fs::remove_file(&path);
            Self(path)
        }

        fn open(&self) -> (StateFile, Lock) {
            StateFile::open(&self.0, true).unwrap()
        }

        fn refused(&self) -> String {
            StateFile::open(&self.0, true).unwrap_err().to_string()
        }
    }

    impl Drop for Temporary {
        fn drop(&mut self) {
            let _ = fs::remove_file(&self.0);
        }
    }

    fn words(file: &StateFile) -> Result<Vec<u64>, BenchError> {
        let mut words = Vec::new();
        file.load(16, |_, word| words.push(word))?;
        Ok(words)
    }

    #[test]
    fn header_and_records_roundtrip() {
        let path = Temporary::new("words");
        let (file, lock) = path.open();
        assert_eq!(file.header(), Ok(None));
        file.make(&layout(), 99, 16).unwrap();
        file.write(3, [7, 8].into_iter()).unwrap();
        drop((file, lock));
        let (file, _lock) = path.open();
        assert_eq!(file.header(), Ok(Some((layout(), 99))));
        let words = words(&file).unwrap();
        assert_eq!(words[2..6], [0, 7, 8, 0]);
        assert_eq!(words.len(), 16);
    }

    #[test]
    fn state_file_excludes_other_runs() {
        let path = Temporary::new("lock");
        let (file, lock) = path.open();
        assert!(path.refused().contains("the file is in use by another run"));
        drop(lock);
        let _other = path.open();
        // The file can be open for longer than the lock, e.g. if a worker is about to exit.
        drop(file);
    }

    #[test]
    fn open_requires_regular_file() {
        let directory = std::env::temp_dir();
        for path in [Path::new("/dev/null"), directory.as_path()] {
            let error = StateFile::open(path, true).unwrap_err().to_string();
            assert!(error.contains("not a regular file"), "{error}");
        }
    }

    #[test]
    fn missing_blocks_fail_only_for_checks() {
        let path = Temporary::new("half");
        let (file, lock) = path.open();
        file.make(&layout(), 99, 16).unwrap();
        assert_eq!(file.is_half_made(), Ok(false));
        file.file.set_len(HEADER).unwrap();
        drop((file, lock));
        let (file, lock) = StateFile::open(&path.0, false).unwrap();
        let error = file.is_half_made().unwrap_err().to_string();
        assert!(error.contains("records no write"), "{error}");
        drop((file, lock));
        let (file, _lock) = path.open();
        assert_eq!(file.header(), Ok(Some((layout(), 99))));
        assert_eq!(file.is_half_made(), Ok(true));
        file.make(&layout(), 98, 16).unwrap();
        assert_eq!(file.header(), Ok(Some((layout(), 98))));
        assert_eq!(words(&file), Ok(vec![0; 16]));
        file.file.set_len(HEADER + 64).unwrap();
        let error = words(&file).unwrap_err().to_string();
        assert!(error.contains("4160 bytes, expected 4224"), "{error}");
    }

    #[test]
    fn foreign_state_files_are_rejected() {
        let path = Temporary::new("foreign");
        let (file, _lock) = path.open();
        file.make(&layout(), 99, 16).unwrap();
        let refused = |other: Layout| {
            let checked = file.check(&other, &layout());
            checked.unwrap_err().to_string()
        };
        let block = refused(Layout {
            block: 512,
            ..layout()
        });
        assert!(block.contains("its block size is 4096, expected 512"));
        let disk = refused(Layout {
            disk: hash("another"),
            ..layout()
        });
        assert!(disk.contains("belongs to another disk"), "{disk}");
        let content = refused(Layout {
            content: hash_content(&Content {
                pattern: b"ab".to_vec(),
                ..Content::default()
            }),
            ..layout()
        });
        assert!(content.contains("with other content"), "{content}");
        for foreign in [&[1; 5000][..], &b"short"[..], &[0; 4096][..]] {
            fs::write(&path.0, foreign).unwrap();
            let error = file.header().unwrap_err().to_string();
            assert!(error.contains("not a state file"), "{error}");
        }
    }
}
