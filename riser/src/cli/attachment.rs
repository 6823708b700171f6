//! Attachments in the list of this host.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use riser_exports::mounts::MountId;
use riser_exports::ublk;
use riser_initiator::engine::{LinkReport, PathReport};
use serde::{Deserialize, Serialize};

/// Type of an attachment.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum Export {
    /// A file using FUSE.
    Fuse {
        /// Mount point, which is a directory or a file.
        path: PathBuf,
        /// Path of the disk file.
        file: PathBuf,
        /// ID of the mount in the namespace of its process. Not included by older versions.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        id: Option<MountId>,
    },
    /// A network block device.
    Nbd {
        /// Path of the socket.
        socket: PathBuf,
        /// URI for clients.
        uri: String,
    },
    /// A block device using `ublk_drv`.
    Ublk {
        /// Number of the device.
        number: u32,
        /// Path of the device node.
        device: PathBuf,
        /// Number used to generate the initiator port. A process that takes over the device must
        /// use the same number.
        port: u64,
        /// GUID of the initiator port.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        guid: Option<u64>,
        /// Properties used by udev to name the device.
        properties: BTreeMap<String, String>,
    },
    /// A mounted file system.
    Mount {
        /// Mount point.
        path: PathBuf,
        /// Underlying loop device.
        device: PathBuf,
        /// FUSE mount used by the loop device.
        fuse: PathBuf,
        /// ID of the mount in the namespace of its process. Not included by older versions.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        id: Option<MountId>,
    },
}

impl Export {
    /// Returns the path used to identify the attachment.
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

/// Phase of an attachment.
///
/// ```text
/// Starting ──► Serving ──► Ending
///                 └──► Failed ◄──┘
/// ```
///
/// If an attachment is stopped cleanly or fails to start, it's removed regardless of its phase.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Phase {
    /// The process has reserved the logical unit and path, and is preparing the attachment.
    Starting,
    /// The disk can be used. Older versions only used this phase.
    #[default]
    Serving,
    /// The disk was detached, but is served until it's closed by its last user.
    Ending,
    /// The attachment was not stopped cleanly, so acknowledged writes may have been lost. The entry
    /// remains until it's detached or replaced by another attachment at the same path.
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

/// An attachment as stored in its file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Attachment {
    /// ID on this host.
    pub id: String,
    /// Address of the logical unit, without secrets.
    pub url: String,
    /// Process that serves the attachment.
    pub pid: u32,
    /// Start time of the process in clock ticks since boot.
    pub started: u64,
    /// Time when it was attached, in seconds since 1970.
    pub since: u64,
    /// Phase of the attachment.
    #[serde(default)]
    pub phase: Phase,
    /// Reason of the failure.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub failure: Option<String>,
    /// Type of the attachment.
    pub export: Export,
    /// Size of the disk in bytes.
    pub capacity: u64,
    /// Size of a logical block in bytes.
    pub block_size: u32,
    /// Set if writes are rejected.
    pub read_only: bool,
    /// Globally unique name of the logical unit, if it has one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub unit: Option<String>,
    /// Name of the RDMA device used for the connection, including the provider.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub device: Option<String>,
    /// Type of the protection information that is transferred with the data, if any.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub protection: Option<u8>,
    /// Log file of the process, unless it logs to a terminal.
    pub log: Option<PathBuf>,
    /// State of the session, if there is one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub link: Option<LinkReport>,
    /// Paths to the logical unit, if there is more than one.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub paths: Vec<PathReport>,
    /// Generation of the unit's volatile cache if supported, as 32 hexadecimal digits.
    #[serde(default, skip_serializing_if = "Option::is_none", with = "generation")]
    pub cache: Option<[u8; 16]>,
    /// A login was redirected to another port.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub was_redirected: bool,
}

/// Serialization of cache generations in files.
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
    /// Returns whether the attachment exists without its process. This is the case for a block
    /// device which is waiting for another process, or was added but never started.
    #[must_use]
    pub fn waits(&self) -> bool {
        match &self.export {
            Export::Ublk { number, device, .. } => device.exists() || ublk::is_added(*number),
            _ => false,
        }
    }

    /// Returns whether the attachment has failed, and no longer uses its logical unit and path.
    #[must_use]
    pub fn is_over(&self) -> bool {
        self.phase == Phase::Failed && !self.waits()
    }

    /// Returns whether the process serving the attachment is alive.
    #[must_use]
    pub fn is_alive(&self) -> bool {
        process_start(self.pid) == Some(self.started)
    }
}

/// Returns the start time of a process in clock ticks since boot, or `None` if the process doesn't
/// exist.
#[must_use]
pub fn process_start(pid: u32) -> Option<u64> {
    start_of(&fs::read_to_string(format!("/proc/{pid}/stat")).ok()?)
}

/// Returns a unique name for files of this process. We can't just use the process ID, because there
/// may be files from a previous process with the same ID.
pub(super) fn process_name() -> String {
    let pid = std::process::id();
    format!("{pid}-{}", process_start(pid).unwrap_or(0))
}

/// Parses the start time from a `stat` file (see proc(5)).
fn start_of(stat: &str) -> Option<u64> {
    // The name is in parentheses and can contain any characters. The number of threads follows
    // after the state and 16 numbers.
    let rest = &stat[stat.rfind(')')? + 1..];
    let mut fields = rest.split_ascii_whitespace();
    let is_zombie = fields.next()? == "Z";
    let threads: u64 = fields.nth(16)?.parse().ok()?;
    // A zombie is no longer serving if all its other threads have exited and released its files.
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
    fn phases_match_diagram() {
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
