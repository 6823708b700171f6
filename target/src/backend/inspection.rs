//! Inspects the medium of an open backend: whether its path still refers to the open file or
//! device, and whether it is large enough for the served capacity.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::path::Path;
use std::time::SystemTime;

use rustix::fs::{Stat, fstat, stat};
use rustix::io::Errno;

use super::cause::Cause;
use super::health::Failing;
use super::medium_faults::too_small;
use super::store::{Store, is_same};

impl Store {
    /// Inspects the medium. Blocks if the file system is not responding.
    ///
    /// # Errors
    /// Returns I/O errors. In this case, the results of the previous inspection are kept.
    pub(super) fn inspect(&self) -> io::Result<()> {
        // A disk in memory doesn't have a path.
        let (Some(file), Some(path)) = (self.open_file(), self.path()) else {
            return Ok(());
        };
        let Some(fd) = file.handle.fd() else {
            return Ok(());
        };
        let open = fstat(fd)?;
        let at_path = match stat(path) {
            Ok(found) => Some(found),
            Err(Errno::NOENT | Errno::NOTDIR) => None,
            Err(error) => return Err(error.into()),
        };
        let mut faults = Vec::new();
        if let Some(cause) = path_fault(&open, at_path.as_ref(), file.device.is_some()) {
            faults.push((cause, describe(cause, path, fd)));
        }
        let (served, found) = (self.capacity(), self.size(file)?);
        if found < served {
            faults.push((Cause::Truncated, too_small(path, found, served)));
        }
        self.medium_faults.set(faults, SystemTime::now());
        Ok(())
    }

    /// Same as [`Store::inspect`], after a rescan by an administrator and serving the new size.
    pub(super) fn inspect_after_rescan(&self) -> io::Result<()> {
        self.medium_faults.accept_size();
        self.inspect()
    }

    /// Returns the faults found by the last inspection, starting with the most serious one.
    #[must_use]
    pub fn medium_faults(&self) -> Vec<Failing> {
        self.medium_faults.faults()
    }
}

/// Returns the fault of a path that should refer to an open file or device.
fn path_fault(open: &Stat, at_path: Option<&Stat>, is_device: bool) -> Option<Cause> {
    match at_path {
        Some(found) if is_same(open, found, is_device) => None,
        Some(_) => Some(Cause::Replaced),
        None if open.st_nlink == 0 && !is_device => Some(Cause::Deleted),
        None => Some(Cause::Moved),
    }
}

/// Describes a fault of the path, including a command to save the data. Root can access the file
/// using its descriptor in `/proc` while it is open in this process.
fn describe(cause: Cause, path: &Path, fd: BorrowedFd<'_>) -> String {
    let path = path.display();
    let copy = format!(
        "cp /proc/{}/fd/{} NEW_FILE",
        std::process::id(),
        fd.as_raw_fd()
    );
    match cause {
        Cause::Deleted => format!(
            "{path}: the served file was deleted; its data will be lost when riserd terminates. To \
             save the data, stop its initiators and run: {copy}"
        ),
        Cause::Replaced => format!(
            "{path}: the served file was replaced; the next start would serve the new file. To \
             save the data of the served file, stop its initiators and run: {copy}"
        ),
        _ => format!(
            "{path}: the served file was moved; the next start would not find it. Move it back, or \
             stop its initiators and run: {copy}"
        ),
    }
}

#[cfg(test)]
mod tests {
    use std::fs::{self, File};
    use std::path::PathBuf;
    use std::sync::Arc;

    use super::*;
    use crate::backend::{Direct, Source, Spec};

    /// An open file with its path. The directory is removed on drop.
    struct Disk {
        dir: PathBuf,
        store: Arc<Store>,
    }

    impl Disk {
        fn new(name: &str) -> Self {
            let name = format!("riserd-inspect-{name}-{}", std::process::id());
            let dir = std::env::temp_dir().join(name);
            let _ = fs::remove_dir_all(&dir);
            fs::create_dir(&dir).unwrap();
            let spec = Spec {
                name: "disk".into(),
                source: Source::File {
                    path: dir.join("disk"),
                    size: Some(1 << 20),
                    create: true,
                },
                block_size: 512,
                direct: Direct::Off,
                write_cache: true,
                read_only: false,
                protection: None,
                faults: None,
            };
            let store = Store::open(&spec).unwrap();
            store.keep();
            Self { dir, store }
        }

        fn path(&self) -> PathBuf {
            self.dir.join("disk")
        }

        fn causes(&self) -> Vec<Cause> {
            self.store.inspect().unwrap();
            let faults = self.store.medium_faults();
            faults.iter().map(|fault| fault.cause).collect()
        }
    }

    impl Drop for Disk {
        fn drop(&mut self) {
            let _ = fs::remove_dir_all(&self.dir);
        }
    }

    #[test]
    fn deleted_file_can_be_saved() {
        let disk = Disk::new("deleted");
        assert_eq!(disk.causes(), []);
        fs::remove_file(disk.path()).unwrap();
        assert_eq!(disk.causes(), [Cause::Deleted]);
        let fault = disk.store.medium_faults().remove(0);
        let command = fault.why.split("run: cp ").nth(1).unwrap();
        let source = command.split(' ').next().unwrap();
        assert_eq!(fs::copy(source, disk.dir.join("saved")).unwrap(), 1 << 20);
        assert_eq!(disk.causes(), [Cause::Deleted]);
        assert_eq!(disk.store.medium_faults()[0].since, fault.since);
    }

    #[test]
    fn replaced_or_moved_file_is_found() {
        let disk = Disk::new("replaced");
        let away = disk.dir.join("away");
        fs::rename(disk.path(), &away).unwrap();
        assert_eq!(disk.causes(), [Cause::Moved]);
        fs::write(disk.path(), "another").unwrap();
        assert_eq!(disk.causes(), [Cause::Replaced]);
        fs::rename(&away, disk.path()).unwrap();
        assert_eq!(disk.causes(), []);
        // Another hard link to the file isn't at its path.
        fs::hard_link(disk.path(), &away).unwrap();
        fs::remove_file(disk.path()).unwrap();
        assert_eq!(disk.causes(), [Cause::Moved]);
        fs::remove_dir_all(&disk.dir).unwrap();
        assert_eq!(disk.causes(), [Cause::Deleted]);
    }

    #[test]
    fn truncation_is_reported_until_rescan() {
        let disk = Disk::new("truncated");
        let resize = |len| {
            let file = File::options().write(true).open(disk.path()).unwrap();
            file.set_len(len).unwrap();
        };
        resize(4096);
        assert_eq!(disk.causes(), [Cause::Truncated]);
        let why = disk.store.medium_faults().remove(0).why;
        assert!(why.contains("has 4096 bytes instead of 1048576"), "{why}");
        // A write to the last block has extended it again.
        resize(1 << 20);
        assert_eq!(disk.causes(), [Cause::Truncated]);
        disk.store.inspect_after_rescan().unwrap();
        assert_eq!(disk.causes(), []);
        resize(2 << 20);
        assert_eq!(disk.causes(), []);
    }
}
