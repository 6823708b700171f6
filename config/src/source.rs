//! [`Spec`]: the data source of a backend, and how to open it.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use riser_scsi::config::Protection;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::faults::Faults;

/// Bypass of the page cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Deserialize, Serialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum Direct {
    /// If the file system and the block size support it.
    #[default]
    Auto,
    /// Always. If this is not possible, the backend cannot be opened.
    On,
    /// Never.
    Off,
}

/// Owner of the application tags in protection information (ATO).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Deserialize, Serialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum TagOwner {
    /// The target. A block that is written without protection information is checked when it is
    /// read, except with type 2.
    #[default]
    Target,
    /// The initiator. A block that is written without protection information is not checked.
    Client,
}

/// The data source of a backend.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Source {
    /// A regular file, which can be created at startup.
    File {
        /// File path.
        path: PathBuf,
        /// File size in bytes. If `None`, the current size is used.
        size: Option<u64>,
        /// Create the file or extend it to `size`, as a sparse file.
        create: bool,
    },
    /// A whole block device.
    Device {
        /// Device path.
        path: PathBuf,
    },
    /// Memory of this process, allocated on write.
    Ram {
        /// Disk size in bytes.
        size: u64,
    },
    /// No data: ignores writes and reads zeros.
    Null {
        /// Disk size in bytes.
        size: u64,
    },
}

impl Source {
    /// Returns the kind, as used in the configuration.
    #[must_use]
    pub const fn kind(&self) -> &'static str {
        match self {
            Self::File { .. } => "file",
            Self::Device { .. } => "device",
            Self::Ram { .. } => "ram",
            Self::Null { .. } => "null",
        }
    }

    /// Returns the path of a file or device.
    #[must_use]
    pub fn path(&self) -> Option<&Path> {
        match self {
            Self::File { path, .. } | Self::Device { path } => Some(path),
            Self::Ram { .. } | Self::Null { .. } => None,
        }
    }
}

/// Everything needed to open a backend.
#[derive(Debug, Clone, PartialEq)]
pub struct Spec {
    /// Backend name, for the log.
    pub name: String,
    /// The data source.
    pub source: Source,
    /// Logical block size in bytes: a power of two from 512 to 4096.
    pub block_size: u32,
    /// Page cache bypass: always, never, or if supported.
    pub direct: Direct,
    /// True if completed writes can be volatile until the next flush.
    pub write_cache: bool,
    /// Reject writes, and allow other processes to read the file.
    pub read_only: bool,
    /// Protection information of each block. An existing file may have another type, which is
    /// stored in its header.
    pub protection: Option<Protection>,
    /// Injected errors and delays.
    pub faults: Option<Arc<Faults>>,
}
