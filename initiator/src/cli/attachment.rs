//! An attachment as the list of this host has it.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::engine::{LinkReport, PathReport};
use crate::mounts::MountId;
use crate::ublk;

/// Form in which an attachment shows on this host.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum Export {
    /// A file through FUSE.
    Fuse {
        /// Path that is mounted over: a directory or a file.
        path: PathBuf,
        /// Path of the disk's file.
        file: PathBuf,
        /// The mount as its process sees it. Older versions do not write it.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        id: Option<MountId>,
    },
    /// A network block device.
    Nbd {
        /// Path of its socket.
        socket: PathBuf,
        /// Its URI, for clients.
        uri: String,
    },
    /// A block device of `ublk_drv`.
    Ublk {
        /// Number of the device.
        number: u32,
        /// Path of the device's file.
        device: PathBuf,
        /// Number that its initiator port follows from, which a process that takes it over must
        /// have too.
        port: u64,
        /// The GUID of that port.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        guid: Option<u64>,
        /// Properties by which udev names it.
        properties: BTreeMap<String, String>,
    },
    /// A mounted file system.
    Mount {
        /// Path that it is mounted on.
        path: PathBuf,
        /// The loop device below it.
        device: PathBuf,
        /// The FUSE mount below that.
        fuse: PathBuf,
        /// The mount as its process sees it. Older versions do not write it.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        id: Option<MountId>,
    },
}

impl Export {
    /// The path that people know it by.
    #[must_use]
    pub fn path(&self) -> &Path {
        match self {
            Self::Fuse { path, .. } | Self::Mount { path, .. } => path,
            Self::Nbd { socket, .. } => socket,
            Self::Ublk { device, .. } => device,
        }
    }

    pub(super) fn is_named(&self, path: &Path) -> bool {
        match self {
            Self::Fuse {
                path: own, file, ..
            } => own == path || file == path,
            Self::Nbd { socket, .. } => socket == path,
            Self::Ublk { device, .. } => device == path,
            Self::Mount {
                path: own, device, ..
            } => own == path || device == path,
        }
    }
}

/// Phase of an attachment's life.
///
/// ```text
/// Starting ──► Serving ──► Ending
///                 └──► Failed ◄──┘
/// ```
///
/// An attachment that ends well, or fails while it starts, is removed in any phase.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Phase {
    /// Its process has reserved the logical unit and the path, and prepares the rest.
    Starting,
    /// The disk can be used. Older versions wrote no other phase.
    #[default]
    Serving,
    /// It was detached, and is served until its last user closes it.
    Ending,
    /// It could not be ended properly, so acknowledged writes may be lost. The entry stays until it
    /// is detached, or replaced by another attachment at its path.
    Failed,
}

impl Phase {
    pub(super) fn may_become(self, next: Self) -> bool {
        matches!(
            (self, next),
            (Self::Starting, Self::Serving)
                | (Self::Serving, Self::Ending | Self::Failed)
                | (Self::Ending, Self::Ending | Self::Failed)
        )
    }
}

/// An attachment as its file has it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Attachment {
    /// Its name on this host.
    pub id: String,
    /// Address of the logical unit, without secrets.
    pub url: String,
    /// Process that serves it.
    pub pid: u32,
    /// Start of that process, in clock ticks since the boot.
    pub started: u64,
    /// Time of the attachment, in seconds since 1970.
    pub since: u64,
    /// Phase of its life.
    #[serde(default)]
    pub phase: Phase,
    /// Reason for which it failed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub failure: Option<String>,
    /// Form in which it shows.
    pub export: Export,
    /// Size of the disk in bytes.
    pub capacity: u64,
    /// Size of a logical block in bytes.
    pub block_size: u32,
    /// The attachment refuses writes.
    pub read_only: bool,
    /// The logical unit's world-wide name, if it has one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub unit: Option<String>,
    /// Name of the RDMA device that it is reached over, which begins with its provider's.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub device: Option<String>,
    /// Log file of the process, if it does not log to its terminal.
    pub log: Option<PathBuf>,
    /// Report of its session, if it has one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub link: Option<LinkReport>,
    /// The paths to the logical unit, where there are several.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub paths: Vec<PathReport>,
    /// The generation of the unit's volatile cache, if it offers one: 32 hexadecimal digits.
    #[serde(default, skip_serializing_if = "Option::is_none", with = "generation")]
    pub cache: Option<[u8; 16]>,
}

/// The generation of a cache in files.
pub(super) mod generation {
    use serde::{Deserialize, Deserializer, Serializer};

    pub(in crate::cli) fn serialize<S: Serializer>(
        generation: &Option<[u8; 16]>,
        serializer: S,
    ) -> Result<S::Ok, S::Error> {
        match generation {
            Some(bytes) => {
                serializer.collect_str(&format_args!("{:032x}", u128::from_be_bytes(*bytes)))
            }
            None => serializer.serialize_none(),
        }
    }

    pub(in crate::cli) fn deserialize<'de, D: Deserializer<'de>>(
        deserializer: D,
    ) -> Result<Option<[u8; 16]>, D::Error> {
        let Some(text) = Option::<String>::deserialize(deserializer)? else {
            return Ok(None);
        };
        let number = u128::from_str_radix(&text, 16).map_err(serde::de::Error::custom)?;
        Ok(Some(number.to_be_bytes()))
    }
}

impl Attachment {
    /// Returns whether it outlives its process: a block device, in which requests wait for another
    /// process, or which was added and never started.
    #[must_use]
    pub fn waits(&self) -> bool {
        match &self.export {
            Export::Ublk { number, device, .. } => device.exists() || ublk::is_added(*number),
            _ => false,
        }
    }

    /// Returns whether it has failed, and uses neither its logical unit nor its path any longer.
    #[must_use]
    pub fn is_over(&self) -> bool {
        self.phase == Phase::Failed && !self.waits()
    }

    /// Returns whether the process that serves it is alive.
    #[must_use]
    pub fn is_alive(&self) -> bool {
        process_start(self.pid) == Some(self.started)
    }
}

/// Start of a process, in clock ticks since the boot; `None` if the process does not exist.
#[must_use]
pub fn process_start(pid: u32) -> Option<u64> {
    start_of(&fs::read_to_string(format!("/proc/{pid}/stat")).ok()?)
}

/// Name of this process for its files. An id alone may have belonged to an earlier process, whose
/// files remain.
pub(super) fn process_name() -> String {
    let pid = std::process::id();
    format!("{pid}-{}", process_start(pid).unwrap_or(0))
}

/// The same, of its `stat` file (proc(5)).
fn start_of(stat: &str) -> Option<u64> {
    // The name, in parentheses, may hold anything; the state and 16 numbers come before the number
    // of threads.
    let rest = &stat[stat.rfind(')')? + 1..];
    let mut fields = rest.split_ascii_whitespace();
    let is_zombie = fields.next()? == "Z";
    let threads: u64 = fields.nth(16)?.parse().ok()?;
    // A zombie serves nothing any longer once its other threads have released its files, too.
    if is_zombie && threads <= 1 {
        return None;
    }
    fields.nth(1)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn zombie_is_alive_until_last_thread_exits() {
        let stat = |state: &str, threads: u32| {
            format!("7 (a) b) {state} 1 7 7 0 -1 4194560 9 0 0 0 1 2 0 0 20 0 {threads} 0 4711 0 0")
        };
        assert_eq!(start_of(&stat("S", 3)), Some(4711));
        assert_eq!(start_of(&stat("Z", 2)), Some(4711));
        assert_eq!(start_of(&stat("Z", 1)), None);
        assert!(process_start(std::process::id()).is_some());
    }

    #[test]
    fn phases_follow_their_diagram() {
        use Phase::{Ending, Failed, Serving, Starting};
        let all = [Starting, Serving, Ending, Failed];
        let table = all.map(|from| all.map(|to| from.may_become(to)));
        let expected = [
            [false, true, false, false],
            [false, false, true, true],
            [false, false, true, true],
            [false; 4],
        ];
        assert_eq!(table, expected);
    }
}
