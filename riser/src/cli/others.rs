//! Attachments of other users on this host. These are found in their lists of attachments, which
//! are only accessible to root, and their FUSE mounts, which are visible to all users.
//!
//! As these files are written by other users, we never modify or wait for them, and ignore invalid
//! files.

use std::fs::{self, OpenOptions};
use std::io::Read;
use std::os::fd::AsRawFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use riser_exports::fuse;
use riser_exports::mounts::{Mount, Mounts};
use rustix::fs::{Mode, OFlags};

use super::state::{Attachment, Export};

/// Maximum file size in bytes. An attachment with eight paths requires about 3 KiB.
const LONGEST: u64 = 64 << 10;

/// Maximum number of entries to check in a directory.
const MOST: usize = 1024;

/// Returns attachments from the default directories of other users, excluding `own` for this
/// process. `run` is `/run`.
pub(super) fn attachments(run: &Path, own: &Path) -> Vec<Attachment> {
    let users = fs::read_dir(run.join("user")).into_iter().flatten();
    let users = users.flatten().map(|user| user.path().join("riser"));
    let users = users.filter(|dir| dir != own);
    // This must be checked last, because it may access paths from the attachment.
    let of_users = users.flat_map(|dir| entries(&dir)).filter(is_of_users);
    let of_users = of_users.filter(|a| a.is_alive() || a.waits());
    of_users.chain(of_root(run, own)).collect()
}

/// Returns only the [`attachments`] of root. These can't be modified by other users, so they are
/// allowed to prevent other attachments.
pub(super) fn of_root(run: &Path, own: &Path) -> Vec<Attachment> {
    let dir = run.join("riser");
    if dir == own {
        return Vec::new();
    }
    let mut found = entries(&dir);
    found.retain(|a| a.is_alive() || a.waits());
    found
}

/// Returns all valid attachments in a directory.
fn entries(dir: &Path) -> Vec<Attachment> {
    // Don't follow links, which may refer to a file system that doesn't respond.
    let flags = OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let Ok(open) = rustix::fs::open(dir, flags, Mode::empty()) else {
        return Vec::new();
    };
    let entries = fs::read_dir(format!("/proc/self/fd/{}", open.as_raw_fd()));
    let files = entries.into_iter().flatten().flatten().take(MOST);
    let is_one = |path: &PathBuf| path.extension().is_some_and(|e| e == "json");
    let files = files.map(|file| file.path()).filter(is_one);
    files.filter_map(|file| read(&file)).collect()
}

fn read(path: &Path) -> Option<Attachment> {
    // Don't block on a pipe, and don't follow links.
    let flags = OFlags::NONBLOCK | OFlags::NOFOLLOW;
    let mut options = OpenOptions::new();
    options.read(true).custom_flags(flags.bits().cast_signed());
    let file = options.open(path).ok()?;
    if !file.metadata().ok()?.is_file() {
        return None;
    }
    let mut text = Vec::new();
    file.take(LONGEST).read_to_end(&mut text).ok()?;
    serde_json::from_slice(&text).ok()
}

/// Returns whether this attachment can belong to a user other than root. Only root can have block
/// devices and mounts. The caller opens block devices and refuses to mount a unit that is already
/// mounted. If we accepted these from users, they could make root open any file, or prevent it from
/// mounting.
fn is_of_users(attachment: &Attachment) -> bool {
    matches!(attachment.export, Export::Fuse { .. } | Export::Nbd { .. })
}

/// Returns the path of a FUSE mount of `riser` with this address as its source.
pub(super) fn mount_of(mounts: &Mounts, url: &str) -> Option<PathBuf> {
    let mount = mounts.all().find(|mount| is_mount_of(mount, url))?;
    Some(mount.path())
}

/// Returns whether this is a mount of `riser` with this address as its source.
fn is_mount_of(mount: &Mount<'_>, url: &str) -> bool {
    // If root mounts without fusermount3, there is no subtype.
    let is_fuse = mount.kind == b"fuse" || mount.kind == b"fuse.riser";
    is_fuse && mount.source() == *fuse::source(url)
}

#[cfg(test)]
mod tests {
    use super::super::state::{StateDir, fixture};
    use super::*;

    fn attachment(url: &str) -> Attachment {
        Attachment {
            url: url.to_owned(),
            ..fixture::attachment("/run/user/1000/nbd".as_ref())
        }
    }

    #[test]
    fn foreign_attachments_are_visible_and_unchanged() {
        let run = std::env::temp_dir().join(format!("riser-run-{}", std::process::id()));
        let own = run.join("riser");
        let other = run.join("user/1000/riser");
        let mut kept = Vec::new();
        for (dir, url) in [(&own, "srp://own/0"), (&other, "srp://other/0")] {
            let dir = StateDir::at(dir.clone()).unwrap();
            kept.push(dir.register(attachment(url)).unwrap());
            let mut dead = attachment("srp://dead/0");
            dead.started += 1;
            kept.push(dir.register(dead).unwrap());
        }
        // These could block or mislead a careless reader.
        let pipe = rustix::fs::FileType::Fifo;
        let mode = rustix::fs::Mode::from(0o600);
        rustix::fs::mknodat(rustix::fs::CWD, other.join("pipe.json"), pipe, mode, 0).unwrap();
        std::os::unix::fs::symlink(own.join("0.json"), other.join("link.json")).unwrap();
        fs::write(other.join("damaged.json"), "{").unwrap();
        let urls = |own: &Path| -> Vec<_> {
            let found = attachments(&run, own);
            found.into_iter().map(|a| a.url).collect()
        };
        assert_eq!(urls(&own), ["srp://other/0"]);
        assert_eq!(urls(&other), ["srp://own/0"]);
        assert_eq!(urls(Path::new("/elsewhere")).len(), 2);
        assert_eq!(
            fs::read_dir(&other).unwrap().count(),
            5,
            "nothing is removed"
        );
        drop(kept);
        fs::remove_dir_all(&run).unwrap();
        assert!(attachments(&run, &own).is_empty());
    }

    #[test]
    fn only_root_has_block_devices_and_mounts() {
        let run = std::env::temp_dir().join(format!("riser-root-{}", std::process::id()));
        let device = Export::Ublk {
            number: 0,
            device: "/dev/watchdog".into(),
            port: 0,
            guid: None,
            properties: std::collections::BTreeMap::new(),
        };
        let mount = Export::Mount {
            path: "/mnt".into(),
            device: "/dev/loop0".into(),
            fuse: "/run/riser/mnt".into(),
            id: None,
        };
        let mut kept = Vec::new();
        for dir in ["riser", "user/1000/riser"] {
            let list = StateDir::at(run.join(dir)).unwrap();
            for export in [&device, &mount] {
                let mut attachment = attachment(dir);
                attachment.export = export.clone();
                kept.push(list.register(attachment).unwrap());
            }
        }
        let own = Path::new("/elsewhere");
        for found in [attachments(&run, own), of_root(&run, own)] {
            let urls: Vec<_> = found.iter().map(|a| a.url.as_str()).collect();
            assert_eq!(urls, ["riser", "riser"]);
        }
        // An attachment of a user doesn't affect root.
        let list = StateDir::at(run.join("user/1000/riser")).unwrap();
        kept.push(list.register(attachment("srp://user/0")).unwrap());
        assert_eq!(attachments(&run, own).len(), 3);
        assert_eq!(of_root(&run, own).len(), 2);
        fs::remove_dir_all(&run).unwrap();
    }

    #[test]
    fn user_directories_are_bounded_without_links() {
        let run = std::env::temp_dir().join(format!("riser-bound-{}", std::process::id()));
        let dir = StateDir::at(run.join("user/1000/riser")).unwrap();
        let one = dir.register(attachment("srp://host/0")).unwrap();
        let file = dir.path().join("0.json");
        for n in 1..=MOST {
            fs::hard_link(&file, dir.path().join(format!("{n}.json"))).unwrap();
        }
        fs::create_dir(run.join("user/1001")).unwrap();
        std::os::unix::fs::symlink(dir.path(), run.join("user/1001/riser")).unwrap();
        assert_eq!(attachments(&run, Path::new("/elsewhere")).len(), MOST);
        drop(one);
        fs::remove_dir_all(&run).unwrap();
    }

    #[test]
    fn fuse_mounts_are_found_by_source() {
        let mounts = Mounts::of(
            b"22 27 0:21 / /proc rw,relatime - proc proc rw\n\
            90 27 0:50 / /mnt/a\\040b rw,nosuid shared:2 - fuse.riser iscsi://h_i/iqn.x:y\\040z/0 rw\n\
            93 27 0:53 / /mnt/\xff rw - tmpfs tmpfs rw\n\
            91 27 0:51 / /mnt/c rw - fuse.other srp://host/0 rw\n\
            92 27 0:52 / /mnt/d rw - fuse srp://root/0 rw\n",
        );
        let mount_of = |url| mount_of(&mounts, url);
        let url = "iscsi://h,i/iqn.x:y z/0";
        assert_eq!(mount_of(url), Some("/mnt/a b".into()));
        assert_eq!(mount_of("srp://root/0"), Some("/mnt/d".into()));
        assert_eq!(mount_of("srp://host/0"), None);
        assert_eq!(mount_of("iscsi://h/iqn.x:y/0"), None);
    }
}
