//! Advice if a file cannot be opened, and notes about an open backend.

use std::io;
use std::path::Path;

use riser_config::{Source, Spec};

use crate::units::bytes;

/// Returns advice for an error when opening a file, if available.
pub(super) fn hint(spec: &Spec, path: &Path, error: &io::Error) -> Option<String> {
    let directory = path.parent().filter(|p| !p.as_os_str().is_empty());
    let is_readable = || !spec.read_only && std::fs::File::open(path).is_ok();
    match (error.kind(), directory) {
        (io::ErrorKind::NotFound, Some(directory)) if !directory.exists() => {
            let directory = directory.display();
            Some(format!(
                "directory {directory} does not exist: create it with `mkdir -p {directory}`, or \
                 use another `path`"
            ))
        }
        (io::ErrorKind::NotFound, _) => {
            Some("`create: true` and a `size` create a file".to_owned())
        }
        (io::ErrorKind::PermissionDenied, _) if is_readable() => {
            Some("it is readable: use `read_only: true` to serve it read-only".to_owned())
        }
        // The sandbox of the service mounts everything read-only except for its `ReadWritePaths=`.
        // Therefore other paths fail with the same error as a read-only file system.
        (io::ErrorKind::ReadOnlyFilesystem, Some(directory)) => {
            let or = if is_readable() {
                ", or use `read_only: true`"
            } else {
                ""
            };
            let directory = directory.display();
            Some(format!(
                "if this is due to the sandbox of the service, add `ReadWritePaths={directory}` \
                 with `systemctl edit riserd`{or}"
            ))
        }
        _ => None,
    }
}

/// Returns notes for the administrator about a served backend with `size` bytes.
pub(super) fn notes(spec: &Spec, size: u64) -> Vec<String> {
    let mut notes = Vec::new();
    let tail = size % u64::from(spec.block_size);
    if tail > 0 {
        notes.push(format!(
            "{size} bytes are not a multiple of the block size, {} bytes: the last {tail} are not \
             served",
            spec.block_size
        ));
    }
    if let Source::Ram { size } = spec.source
        && let Some(memory) = memory().filter(|memory| size > *memory)
    {
        notes.push(format!(
            "RAM disk of {} exceeds the memory of the host, {}: writes beyond it will fail",
            bytes(size),
            bytes(memory)
        ));
    }
    notes
}

/// Returns the total memory and swap space of the host in bytes.
fn memory() -> Option<u64> {
    let info = rustix::system::sysinfo();
    let units = info.totalram.checked_add(info.totalswap)?;
    units.checked_mul(u64::from(info.mem_unit))
}

#[cfg(test)]
mod tests {
    use riser_config::{Source, Spec};

    use super::*;
    use crate::backend::Direct;

    #[test]
    fn read_only_file_gets_hint() {
        let mut spec = Spec {
            name: "disk".into(),
            source: Source::Null { size: 512 },
            block_size: 512,
            direct: Direct::Auto,
            write_cache: true,
            read_only: false,
            protection: None,
            faults: None,
        };
        let path = std::env::current_exe().unwrap();
        let hint = |spec: &Spec, errno| hint(spec, &path, &io::Error::from_raw_os_error(errno));
        let expected =
            Some("it is readable: use `read_only: true` to serve it read-only".to_owned());
        for errno in [libc::EACCES, libc::EPERM] {
            assert_eq!(hint(&spec, errno), expected);
        }
        let sandbox = hint(&spec, libc::EROFS).unwrap();
        assert!(sandbox.contains("`ReadWritePaths=/"), "{sandbox}");
        assert!(sandbox.contains("`read_only: true`"), "{sandbox}");
        assert_eq!(hint(&spec, libc::EIO), None);
        spec.read_only = true;
        assert_eq!(hint(&spec, libc::EACCES), None);
        assert!(!hint(&spec, libc::EROFS).unwrap().contains("read_only"));
    }
}
