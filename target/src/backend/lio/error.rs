//! [`ConversionError`]: reasons why a disk cannot be converted.

use std::fmt;
use std::path::PathBuf;

use riser_scsi::protection::ProtectionError;

use crate::backend::{HeaderError, OpenError};
use crate::stats::{Tally, check_name};

/// Reason why a disk cannot be converted. No new file was created.
#[derive(Debug, thiserror::Error)]
pub enum ConversionError {
    /// A file cannot be accessed.
    #[error(transparent)]
    File(#[from] OpenError),
    /// A new file has the name of an existing file.
    #[error("{}: exists already", path.display())]
    Exists {
        /// Path of the file.
        path: PathBuf,
    },
    /// The temporary name of a new file is in use.
    #[error(
        "{}: exists already: another command is writing it, or was killed; remove it in the latter \
         case",
        path.display()
    )]
    Partial {
        /// Temporary path.
        path: PathBuf,
    },
    /// The image has no blocks.
    #[error("{}: is smaller than a block of {block_size} bytes", path.display())]
    Empty {
        /// Path of the image.
        path: PathBuf,
        /// Block size in bytes.
        block_size: u32,
    },
    /// The file with tuples has another size than the image.
    #[error(
        "{}: has {len} bytes, but {blocks} blocks of {block_size} bytes require {wanted}{}",
        path.display(),
        match other {
            Some(size) => format!("; its size is correct for blocks of {size} bytes"),
            None => String::new(),
        }
    )]
    Size {
        /// Path of the file with tuples.
        path: PathBuf,
        /// Its size in bytes.
        len: u64,
        /// Number of blocks in the image.
        blocks: u64,
        /// Block size in bytes.
        block_size: u32,
        /// Expected size in bytes.
        wanted: u64,
        /// Another block size for which the size is correct.
        other: Option<u32>,
    },
    /// LIO does not support this type.
    #[error("unsupported protection type {0}: LIO supports the types 1 and 3")]
    Type(u8),
    /// The header of a protected file is not valid.
    #[error("{}: {source}", path.display())]
    Header {
        /// Path of the file.
        path: PathBuf,
        /// The reason.
        source: HeaderError,
    },
    /// The file is not a protected file.
    #[error("{}: has no protection information", path.display())]
    Unprotected {
        /// Path of the file.
        path: PathBuf,
    },
    /// Frames may be torn or unreadable, and were not repaired.
    #[error(
        "{}: blocks of its last writes were not verified since a crash, a failed flush or a medium \
         error; serve it for writing and stop riserd, which repairs interrupted writes; if this does \
         not help, `riserd scrub` lists blocks that cannot be read",
        path.display()
    )]
    Torn {
        /// Path of the file.
        path: PathBuf,
    },
    /// Some blocks do not match their tuples.
    #[error("{}: {defects}", path.display())]
    Defects {
        /// Path of the file with the blocks.
        path: PathBuf,
        /// These blocks.
        defects: Defects,
    },
    /// The caller has stopped the conversion.
    #[error("command interrupted; no file was created")]
    Interrupted,
}

/// Blocks that do not match their tuples.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Defects {
    /// Number of blocks by failed check.
    pub counts: Tally<ProtectionError>,
    /// The first blocks, by LBA.
    pub listed: Vec<(u64, ProtectionError)>,
}

impl fmt::Display for Defects {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let total = self.counts.total();
        write!(
            f,
            "{total} blocks do not match their protection information ("
        )?;
        for (n, (check, count)) in self.counts.iter().enumerate() {
            let separator = if n == 0 { "" } else { ", " };
            write!(f, "{separator}{}: {count}", check_name(check))?;
        }
        f.write_str(")")?;
        for (lba, check) in &self.listed {
            write!(f, "\n    LBA {lba}: {}", check_name(*check))?;
        }
        if total > self.listed.len() as u64 {
            f.write_str("\n    ...")?;
        }
        Ok(())
    }
}
