//! The mounts that this process sees, as the kernel lists them (`proc_pid_mountinfo(5)`).

use std::ffi::OsString;
use std::io;
use std::os::unix::ffi::OsStringExt;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// The file with the list. It is ready for `POLLPRI` when the list has changed.
pub(crate) const LIST: &str = "/proc/self/mountinfo";

/// The list, whose names need not be UTF-8.
#[derive(Debug)]
pub(crate) struct Mounts(Vec<u8>);

impl Mounts {
    /// Reads the list.
    ///
    /// # Errors
    /// Those of reading the file.
    pub(crate) fn read() -> io::Result<Self> {
        std::fs::read(LIST).map(Self)
    }

    /// Reads the list of the mounts that another process sees.
    ///
    /// # Errors
    /// Those of reading the file: also of a process that has ended.
    pub(crate) fn of_process(pid: u32) -> io::Result<Self> {
        std::fs::read(format!("/proc/{pid}/mountinfo")).map(Self)
    }

    #[cfg(test)]
    pub(crate) fn of(list: &[u8]) -> Self {
        Self(list.to_vec())
    }

    /// All mounts, the oldest first.
    pub(crate) fn all(&self) -> impl DoubleEndedIterator<Item = Mount<'_>> {
        let lines = self.0.split(|byte| *byte == b'\n');
        lines.filter_map(Mount::parse)
    }

    /// The topmost mount on a path.
    pub(crate) fn top(&self, path: &Path) -> Option<Mount<'_>> {
        self.all().rfind(|mount| mount.path() == path)
    }

    /// Returns whether a mount is there, at its path or where it was moved.
    pub(crate) fn has(&self, id: MountId) -> bool {
        self.all().any(|mount| mount.id == id)
    }
}

/// Identifies a mount.
///
/// The kernel gives the number of a mount that is gone to the next one, so that of the file
/// system's device counts too.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MountId {
    number: u64,
    device: (u32, u32),
}

impl MountId {
    /// Returns whether the mount is there now.
    ///
    /// # Errors
    /// Those of reading the list.
    pub(crate) fn is_listed(self) -> io::Result<bool> {
        Mounts::read().map(|mounts| mounts.has(self))
    }

    /// That of no mount.
    #[cfg(test)]
    pub(crate) fn unlisted() -> Self {
        Self {
            number: u64::MAX,
            device: (u32::MAX, u32::MAX),
        }
    }
}

/// A mount of the list.
#[derive(Debug)]
pub(crate) struct Mount<'a> {
    pub(crate) id: MountId,
    /// Type of the file system.
    pub(crate) kind: &'a [u8],
    path: &'a [u8],
    source: &'a [u8],
}

impl<'a> Mount<'a> {
    fn parse(line: &'a [u8]) -> Option<Self> {
        let mut fields = line.split(|byte| *byte == b' ');
        let number = parsed(fields.next()?)?;
        // Between them are the number of the mount below, and the root in the file system.
        let device = fields.nth(1)?;
        let path = fields.nth(1)?;
        let colon = device.iter().position(|byte| *byte == b':')?;
        let device = (parsed(&device[..colon])?, parsed(&device[colon + 1..])?);
        // A number of optional fields ends with a hyphen.
        let mut fields = fields.skip_while(|field| *field != b"-").skip(1);
        Some(Self {
            id: MountId { number, device },
            kind: fields.next()?,
            path,
            source: fields.next()?,
        })
    }

    /// Path that it is mounted on.
    pub(crate) fn path(&self) -> PathBuf {
        plain(self.path).into()
    }

    /// What is mounted, as its file system names it.
    pub(crate) fn source(&self) -> OsString {
        plain(self.source)
    }
}

fn parsed<T: FromStr>(field: &[u8]) -> Option<T> {
    std::str::from_utf8(field).ok()?.parse().ok()
}

/// A field without its escapes: octal numbers for blanks, line breaks and backslashes.
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
    fn a_mount_that_has_the_number_of_an_earlier_one_is_another_one() {
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
