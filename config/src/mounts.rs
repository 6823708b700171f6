//! Mounts that the daemon must not access: FUSE file systems that read their data from the daemon.
//! A system call on such a path would wait for the FUSE program, which is waiting for the daemon.

use std::ffi::{OsStr, OsString};
use std::fs;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Component, Path, PathBuf};

/// The mount source, as set by the FUSE program (`fsname`).
pub const SOURCE: &str = "riserd";

/// Maximum number of symbolic links to follow, same as in the kernel (`path_resolution(7)`).
const MAX_LINKS: u32 = 40;

/// Returns the mount with [`SOURCE`] that a path resolves to or passes through, if any. This must
/// not access anything below such a mount.
#[must_use]
pub fn find(path: &Path) -> Option<PathBuf> {
    let mounts = mounts(&fs::read("/proc/self/mountinfo").ok()?);
    resolve(path, &mounts)
}

/// Returns the error message for a path below such a mount.
#[must_use]
pub fn why(path: &Path, mount: &Path) -> String {
    let (path, mount) = (path.display(), mount.display());
    format!("{path}: is below {mount}, which is served by this daemon: it would wait for itself")
}

/// Returns the mount points from `mountinfo` (`proc_pid_mountinfo(5)`) that must not be used.
fn mounts(text: &[u8]) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for line in text.split(|b| *b == b'\n') {
        let mut fields = line.split(|b| *b == b' ');
        let Some(point) = fields.nth(4).map(unescape) else {
            continue;
        };
        // If there are several mounts at the same path, the last one is used.
        found.retain(|known| *known != point);
        let mut rest = fields.skip_while(|field| *field != b"-").skip(1);
        let is_fuse = rest.next().is_some_and(|kind| kind.starts_with(b"fuse"));
        if is_fuse && rest.next() == Some(SOURCE.as_bytes()) {
            found.push(point);
        }
    }
    found
}

/// Decodes octal escapes, which the kernel uses for spaces and backslashes.
fn unescape(field: &[u8]) -> PathBuf {
    let mut bytes = Vec::with_capacity(field.len());
    let mut rest = field;
    while let [first, tail @ ..] = rest {
        let code = tail.get(..3).filter(|_| *first == b'\\');
        let code = code.and_then(|digits| std::str::from_utf8(digits).ok());
        match code.and_then(|digits| u8::from_str_radix(digits, 8).ok()) {
            Some(byte) => {
                bytes.push(byte);
                rest = &tail[3..];
            }
            None => {
                bytes.push(*first);
                rest = tail;
            }
        }
    }
    PathBuf::from(OsString::from_vec(bytes))
}

/// Returns the first mount that a path passes through, including via symbolic links.
fn resolve(path: &Path, mounts: &[PathBuf]) -> Option<PathBuf> {
    let path = std::path::absolute(path).ok()?;
    let mut at = PathBuf::from("/");
    let mut left = Vec::new();
    push(&mut left, &path);
    let mut links = 0;
    while let Some(name) = left.pop() {
        match name.as_bytes() {
            b"/" => at = PathBuf::from("/"),
            b"." => {}
            b".." => {
                at.pop();
            }
            _ => at.push(name),
        }
        // `canonicalize` would access files below such a mount, and block on a program that is
        // waiting for this daemon. So we must check each component before accessing it.
        if mounts.contains(&at) {
            return Some(at);
        }
        let Ok(target) = fs::read_link(&at) else {
            continue;
        };
        links += 1;
        if links > MAX_LINKS {
            return None;
        }
        at.pop();
        push(&mut left, &target);
    }
    None
}

/// Pushes the components of a path on a stack, with the first component on top.
fn push(stack: &mut Vec<OsString>, path: &Path) {
    let names = path.components().rev().map(Component::as_os_str);
    stack.extend(names.map(OsStr::to_owned));
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    const MOUNTINFO: &[u8] = b"\
        22 27 0:20 / /sys rw,nosuid shared:7 - sysfs sysfs rw\n\
        30 22 0:25 / /sys/kernel/config rw shared:9 - configfs configfs rw\n\
        41 27 0:40 / /run/the\\040tree rw - fuse.configfs riserd rw,user_id=0\n\
        42 27 0:41 / /run/other rw - fuse.sshfs riser@host rw\n\
        43 30 0:42 /target /sys/kernel/config rw shared:9 master:1 - fuse.configfs riserd rw\n\
        44 27 0:43 / /run/hidden rw - fuse.configfs riserd rw\n\
        45 44 0:44 / /run/hidden rw - tmpfs riserd rw\n";

    #[test]
    fn daemon_mounts_are_detected_by_source() {
        let expected = ["/run/the tree", "/sys/kernel/config"];
        assert_eq!(mounts(MOUNTINFO), expected.map(PathBuf::from));
        assert!(mounts(b"\n1 2\n3 4 0:1 / /x rw -\n").is_empty());
    }

    #[test]
    fn path_is_resolved_up_to_mount() {
        let dir = std::env::temp_dir().join(format!("riserd-mounts-{}", std::process::id()));
        let mount = dir.join("mount");
        fs::create_dir_all(&mount).unwrap();
        fs::create_dir_all(dir.join("deep")).unwrap();
        symlink("../mount/target", dir.join("deep/link")).unwrap();
        symlink("loop", dir.join("loop")).unwrap();
        let mounts = [mount.clone()];
        let passed = |path: &str| resolve(&dir.join(path), &mounts).is_some();
        for path in [
            "mount",
            "mount/a/b",
            "deep/../mount/x",
            "deep/link",
            "deep/link/x",
        ] {
            assert!(passed(path), "{path}");
        }
        for path in ["", "mounted", "deep", "deep/nothing", "loop", "loop/x"] {
            assert!(!passed(path), "{path}");
        }
        // We must not access a mount that could block.
        assert_eq!(resolve(&mount.join("../x"), &mounts), Some(mount));
        fs::remove_dir_all(&dir).unwrap();
    }
}
