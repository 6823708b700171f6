//! Mounts visible to this process, as listed by the kernel (`proc_pid_mountinfo(5)`).

use std::ffi::OsString;
use std::io;
use std::os::unix::ffi::OsStringExt;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// Mount list. It becomes ready for `POLLPRI` when the list changes.
pub const LIST: &str = "/proc/self/mountinfo";

/// Mount list contents. Paths may not be valid UTF-8.
#[derive(Debug)]
pub struct Mounts(Vec<u8>);

impl Mounts {
    /// Reads the list.
    ///
    /// # Errors
    /// Returns an error if the file can't be read.
    pub fn read() -> io::Result<Self> {
        std::fs::read(LIST).map(Self)
    }

    /// Reads the mount list visible to another process.
    ///
    /// # Errors
    /// Returns an error if the file can't be read, or if the process has exited.
    pub fn of_process(pid: u32) -> io::Result<Self> {
        std::fs::read(format!("/proc/{pid}/mountinfo")).map(Self)
    }

    /// Uses a list in the format of `proc_pid_mountinfo(5)`. Lines that can't be parsed are skipped.
    #[must_use]
    pub fn of(list: &[u8]) -> Self {
        Self(list.to_vec())
    }

    /// All mounts, oldest first.
    pub fn all(&self) -> impl DoubleEndedIterator<Item = Mount<'_>> {
        let lines = self.0.split(|byte| *byte == b'\n');
        lines.filter_map(Mount::parse)
    }

    /// Returns the topmost mount on this path.
    #[must_use]
    pub fn top(&self, path: &Path) -> Option<Mount<'_>> {
        self.all().rfind(|mount| mount.path() == path)
    }

    /// Returns whether this mount exists, even if it was moved.
    #[must_use]
    pub fn has(&self, id: MountId) -> bool {
        self.all().any(|mount| mount.id == id)
    }
}

/// Identifies a mount.
///
/// The kernel can reuse a mount ID after an unmount, so we need to check the device number as well.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MountId {
    number: u64,
    device: (u32, u32),
}

impl MountId {
    /// Returns whether the mount currently exists.
    ///
    /// # Errors
    /// Returns an error if the list can't be read.
    pub fn is_listed(self) -> io::Result<bool> {
        Mounts::read().map(|mounts| mounts.has(self))
    }

    /// ID which doesn't match any mount.
    #[cfg(test)]
    pub(crate) fn unlisted() -> Self {
        Self {
            number: u64::MAX,
            device: (u32::MAX, u32::MAX),
        }
    }
}

/// Process using the file system of a mount.
#[derive(Debug)]
pub struct MountUser {
    /// Process ID.
    pub pid: u32,
    /// Mount path in the mount namespace used by this process; `None` if the process has an open
    /// file.
    pub mounted: Option<PathBuf>,
}

/// Returns processes using this file system, except for `server`: the first process in each mount
/// namespace where it's mounted, and processes with open files. Only root can see processes running
/// as other users.
#[must_use]
pub fn users(id: MountId, server: u32) -> Vec<MountUser> {
    let mut namespaces = Vec::new();
    let mut users = Vec::new();
    let processes = std::fs::read_dir("/proc").into_iter().flatten().flatten();
    let pids = processes.filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    for pid in pids.filter(|pid| ![server, std::process::id()].contains(pid)) {
        let namespace = std::fs::read_link(format!("/proc/{pid}/ns/mnt")).ok();
        if namespace.is_none() || !namespaces.contains(&namespace) {
            namespaces.push(namespace);
            let mounts = Mounts::of_process(pid);
            let mounts = mounts.unwrap_or(Mounts(Vec::new()));
            let mounted = mounts.all().find(|mount| mount.id.device == id.device);
            users.extend(mounted.map(|mount| MountUser {
                pid,
                mounted: Some(mount.path()),
            }));
        }
        if has_open(pid, id) {
            let mounted = None;
            users.push(MountUser { pid, mounted });
        }
    }
    users
}

/// Returns whether the process has open files on this mount. This doesn't access the file system,
/// because it may not respond.
fn has_open(pid: u32, id: MountId) -> bool {
    let files = std::fs::read_dir(format!("/proc/{pid}/fdinfo"));
    let mut files = files.into_iter().flatten().flatten();
    files.any(|file| {
        let info = std::fs::read_to_string(file.path()).unwrap_or_default();
        let mount = info.lines().find_map(|line| line.strip_prefix("mnt_id:"));
        mount.and_then(|mount| mount.trim().parse().ok()) == Some(id.number)
    })
}

/// Entry in the mount list.
#[derive(Debug)]
pub struct Mount<'a> {
    /// Identifies this mount.
    pub id: MountId,
    /// File system type.
    pub kind: &'a [u8],
    path: &'a [u8],
    source: &'a [u8],
}

impl<'a> Mount<'a> {
    fn parse(line: &'a [u8]) -> Option<Self> {
        let mut fields = line.split(|byte| *byte == b' ');
        let number = parsed(fields.next()?)?;
        // Skip the parent mount ID and the root path.
        let device = fields.nth(1)?;
        let path = fields.nth(1)?;
        let colon = device.iter().position(|byte| *byte == b':')?;
        let device = (parsed(&device[..colon])?, parsed(&device[colon + 1..])?);
        // A hyphen terminates the optional fields.
        let mut fields = fields.skip_while(|field| *field != b"-").skip(1);
        Some(Self {
            id: MountId { number, device },
            kind: fields.next()?,
            path,
            source: fields.next()?,
        })
    }

    /// Mount point.
    #[must_use]
    pub fn path(&self) -> PathBuf {
        plain(self.path).into()
    }

    /// Mount source, as reported by the file system.
    #[must_use]
    pub fn source(&self) -> OsString {
        plain(self.source)
    }
}

fn parsed<T: FromStr>(field: &[u8]) -> Option<T> {
    std::str::from_utf8(field).ok()?.parse().ok()
}

/// Decodes octal escapes for blanks, line breaks and backslashes.
fn plain(field: &[u8]) -> OsString {
    let mut out = Vec::with_capacity(field.len());
    let mut rest = field;
    while let Some((&byte, tail)) = rest.split_first() {
        let octal = tail
            .get(..3)
            .filter(|_| byte == b'\\')
            .and_then(|digits| std::str::from_utf8(digits).ok())
            .and_then(|digits| u8::from_str_radix(digits, 8).ok());
        out.push(octal.unwrap_or(byte));
        rest = if octal.is_some() { &tail[3..] } else { tail };
    }
    OsString::from_vec(out)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mounts_are_found_by_their_escaped_names() {
        let mounts = Mounts::of(
            b"22 1 8:1 / / rw - ext4 /dev/sda1 rw\n\
              39 22 0:53 / /mnt/\xff rw - tmpfs tmpfs rw\n\
              40 22 7:0 / /mnt/a\\040b rw - ext4 /dev/loop0 rw\n\
              41 22 7:1 / /mnt/a\\040b rw shared:2 master:7 - xfs a\\134b rw\n",
        );
        let top = mounts.top(Path::new("/mnt/a b")).unwrap();
        assert_eq!((top.id.number, top.id.device), (41, (7, 1)));
        assert_eq!((top.kind, top.source()), (&b"xfs"[..], "a\\b".into()));
        assert!(mounts.top(Path::new("/mnt/a")).is_none());
        assert_eq!(mounts.all().count(), 4);
        assert_eq!(plain(b"a\\134\\04"), "a\\\\04");
    }

    #[test]
    fn reused_mount_id_is_different_mount() {
        let first = Mounts::of(b"40 22 0:50 / /mnt/a rw - fuse one rw\n");
        let id = first.top(Path::new("/mnt/a")).unwrap().id;
        assert!(first.has(id));
        let moved = Mounts::of(b"40 22 0:50 / /mnt/b ro - fuse one ro\n");
        assert!(moved.has(id));
        let next = Mounts::of(b"40 22 7:0 / /mnt/a rw - ext4 /dev/loop0 rw\n");
        assert!(!next.has(id));
        assert!(!Mounts::of(b"").has(id));
    }
}
