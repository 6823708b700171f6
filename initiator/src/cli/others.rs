//! Attachments of other users of this host, as far as this one can see it: their lists of
//! attachments, which root can read, and their FUSE mounts, which every user can.
//!
//! These files are written by other users, so nothing is changed or waited for, and what cannot be
//! read as an attachment is left out.

use std::fs::{self, OpenOptions};
use std::io::Read;
use std::os::fd::AsRawFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use rustix::fs::{Mode, OFlags};

use super::state::{Attachment, Export};
use crate::fuse;
use crate::mounts::{Mount, Mounts};

/// Longest file that is read, in bytes. An attachment with eight paths takes about 3 KiB.
const LONGEST: u64 = 64 << 10;

/// Most entries of a directory that are looked at.
const MOST: usize = 1024;

/// Attachments in the directories that other users have by default, that of this process excepted.
/// `run` is `/run`.
pub(super) fn attachments(run: &Path, own: &Path) -> Vec<Attachment> {
    let users = fs::read_dir(run.join("user")).into_iter().flatten();
    let users = users.flatten().map(|user| user.path().join("riser"));
    let users = users.filter(|dir| dir != own);
    // Only then: whether an attachment waits depends on paths in it.
    let of_users = users.flat_map(|dir| entries(&dir)).filter(is_of_users);
    let of_users = of_users.filter(|a| a.is_alive() || a.waits());
    of_users.chain(of_root(run, own)).collect()
}

/// The part of [`attachments`] that is root's. No other user can write it, so it may keep a process
/// from attaching.
pub(super) fn of_root(run: &Path, own: &Path) -> Vec<Attachment> {
    let dir = run.join("riser");
    if dir == own {
        return Vec::new();
    }
    let mut found = entries(&dir);
    found.retain(|a| a.is_alive() || a.waits());
    found
}

/// Entries of a directory that can be read as attachments.
fn entries(dir: &Path) -> Vec<Attachment> {
    // A link may lead to a file system that does not respond.
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
    // Neither a pipe nor a link to something else stops or misleads us.
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

/// Returns whether users other than root can have such an attachment. Only root has block devices
/// and mounts: a caller opens the former, and does not mount a unit of the latter, so a user
/// could have root open any file, or keep it from mounting.
fn is_of_users(attachment: &Attachment) -> bool {
    matches!(attachment.export, Export::Fuse { .. } | Export::Nbd { .. })
}

/// Path of a FUSE mount of `riser` that has this address as its source.
pub(super) fn mount_of(mounts: &Mounts, url: &str) -> Option<PathBuf> {
    let mount = mounts.all().find(|mount| is_mount_of(mount, url))?;
    Some(mount.path())
}

/// Returns whether a mount is one of `riser` that has this address as its source.
fn is_mount_of(mount: &Mount<'_>, url: &str) -> bool {
    // A mount that root makes without fusermount3 has no subtype.
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
    fn attachments_of_other_users_are_seen_and_left_alone() {
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
        // What would stop a reader that is not careful.
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
        // An export of a user keeps root from nothing.
        let list = StateDir::at(run.join("user/1000/riser")).unwrap();
        kept.push(list.register(attachment("srp://user/0")).unwrap());
        assert_eq!(attachments(&run, own).len(), 3);
        assert_eq!(of_root(&run, own).len(), 2);
        fs::remove_dir_all(&run).unwrap();
    }

    #[test]
    fn directories_of_users_are_bounded_and_no_links() {
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
    fn fuse_mounts_are_known_by_their_source() {
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
