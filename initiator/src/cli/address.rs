//! Addresses of disks on the command line.

use std::fmt;
use std::str::FromStr;

use super::exit::{CliError, Exit};
use super::units;
use crate::url::{TargetUrl, UrlError};

/// The address of a disk.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Address {
    /// In the memory of this process.
    Memory {
        /// Size of the disk in bytes.
        capacity: u64,
        /// Size of a block in bytes.
        block_size: u32,
    },
    /// A logical unit of a target.
    Target(Box<TargetUrl>),
}

impl FromStr for Address {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let Some(memory) = text.strip_prefix("mem:") else {
            return add_target_url(text)
                .as_deref()
                .unwrap_or(text)
                .parse()
                .map(|url| Self::Target(Box::new(url)))
                .map_err(|e: UrlError| e.to_string());
        };
        let (capacity, block_size) = memory.split_once(',').unwrap_or((memory, "512"));
        let capacity = units::size(capacity)?;
        let block_size = units::size(block_size)?;
        if !matches!(block_size, 512 | 4096) {
            return Err(format!(
                "the block size {block_size} is neither 512 nor 4096"
            ));
        }
        if capacity == 0 || !capacity.is_multiple_of(block_size) {
            return Err(format!("{capacity} bytes are not a number of whole blocks"));
        }
        Ok(Self::Memory {
            capacity,
            block_size: block_size as u32,
        })
    }
}

/// The URL that a line for the Linux kernel's `add_target` file means: comma-separated keys and
/// values, `dest` among them.
fn add_target_url(text: &str) -> Option<String> {
    let (dest, keys): (Vec<&str>, Vec<&str>) = text
        .split(',')
        .map(str::trim)
        .partition(|part| part.starts_with("dest="));
    let [dest] = dest.as_slice() else {
        return None;
    };
    Some(format!(
        "srp://{}/?{}",
        &dest["dest=".len()..],
        keys.join("&")
    ))
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Memory {
                capacity,
                block_size,
            } => write!(f, "mem:{capacity},{block_size}"),
            Self::Target(url) => url.fmt(f),
        }
    }
}

impl Address {
    /// Number of the logical unit that it names; 0 if it names none.
    #[must_use]
    pub fn lun(&self) -> u32 {
        match self {
            Self::Memory { .. } => 0,
            Self::Target(url) => url.lun().unwrap_or(0).into(),
        }
    }

    /// The address of a target, for verbs that talk to nothing else.
    ///
    /// # Errors
    /// It is not one.
    pub fn target(&self) -> Result<&TargetUrl, CliError> {
        match self {
            Self::Target(url) => Ok(url),
            Self::Memory { .. } => Err(CliError::new(
                Exit::Usage,
                format!("{self} is not the address of a target"),
            )),
        }
    }
}
