//! [`Spec`]: what a backend is made of, and how it is opened.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::faults::Faults;

/// Bypass of the page cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Deserialize, Serialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum Direct {
    /// Where the file system and the block size allow it.
    #[default]
    Auto,
    /// Always; a backend where that is not possible is not opened.
    On,
    /// Never.
    Off,
}

/// The source of a backend's bytes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Source {
    /// A regular file, perhaps one that is made at the start.
    File {
        /// Path of the file.
        path: PathBuf,
        /// Its size in bytes; by default, what it has.
        size: Option<u64>,
        /// Create it, or extend it to `size`, sparsely.
        create: bool,
    },
    /// A block device, whole.
    Device {
        /// Path of the device.
        path: PathBuf,
    },
    /// Memory of this process, allocated as it is written.
    Ram {
        /// Size of the disk in bytes.
        size: u64,
    },
    /// Nothing: takes every write, reads zeroes.
    Null {
        /// Size of the disk in bytes.
        size: u64,
    },
}

impl Source {
    /// Its kind, as the configuration calls it.
    #[must_use]
    pub const fn kind(&self) -> &'static str {
        match self {
            Self::File { .. } => "file",
            Self::Device { .. } => "device",
            Self::Ram { .. } => "ram",
            Self::Null { .. } => "null",
        }
    }

    /// The path of a file or device.
    #[must_use]
    pub fn path(&self) -> Option<&Path> {
        match self {
            Self::File { path, .. } | Self::Device { path } => Some(path),
            Self::Ram { .. } | Self::Null { .. } => None,
        }
    }
}

/// Everything that opening a backend depends on.
#[derive(Debug, Clone, PartialEq)]
pub struct Spec {
    /// The source of its bytes.
    pub source: Source,
    /// Logical block size in bytes: a power of two from 512 to 4096.
    pub block_size: u32,
    /// Way past the page cache: always, never, or where it works.
    pub direct: Direct,
    /// True if completed writes may be volatile until a flush.
    pub write_cache: bool,
    /// Refuse writes, and let others read the file too.
    pub read_only: bool,
    /// Errors and delays on purpose.
    pub faults: Option<Arc<Faults>>,
}
