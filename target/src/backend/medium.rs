//! Opens, locks and measures files and devices.

use std::fs::{File, Metadata, OpenOptions};
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::Path;
use std::sync::Arc;

use riser_config::{Direct, Source, Spec};
use riser_file::{Align, Device, OpenFile, can_punch, enable_direct};
use riser_reactor::Handle;
use riser_reactor::simulated::{Disk, SECTOR};
use riser_scsi::config::{Protection, ProtectionFormat};

use super::file_id::FileId;
use super::hints;
use super::made::Made;
use super::open_error::{OpenError, io_error};
use super::protected::{self, Header, Layout};
use super::ram::Ram;
use super::sys::{self, Lock};
use super::threads::has_thread;
use crate::holder;
use crate::patience;

/// Maximum number of attempts to open a file that is removed while waiting for its lock.
const ATTEMPTS: usize = 3;

/// Geometry of a backend, as required by its logical unit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Geometry {
    /// Size in bytes, a multiple of `block_size`.
    pub capacity: u64,
    /// Logical block size in bytes.
    pub block_size: u32,
    /// Physical block size in bytes, at least `block_size`.
    pub physical_block: u32,
    /// Granularity of UNMAP in bytes, or `None` if it is not supported.
    pub unmap_granularity: Option<u32>,
    /// Writes fail, and the file is opened read-only.
    pub read_only: bool,
    /// Completed writes may be volatile until a flush.
    pub write_cache: bool,
    /// The medium is rotational, so accesses have seek times.
    pub rotational: bool,
    /// Bypass the page cache.
    pub direct: bool,
    /// Protection information of each block.
    pub protection: Option<Protection>,
    /// Whether FORMAT UNIT can change the type of the protection information.
    pub protection_format: ProtectionFormat,
}

/// Data access.
#[derive(Debug)]
pub(super) enum Medium {
    /// A file or device.
    File(OpenFile),
    /// Memory of this process.
    Ram(Arc<Ram>),
    /// Null device: reads return zeroes and writes are ignored.
    Null,
    /// Not available. See [`Store::absent`].
    Absent,
}

/// Returns the geometry of a medium that is not a file. Such a medium does not survive a restart,
/// so a volatile cache does not matter, but the initiator sees the configured cache.
pub(super) fn plain(spec: &Spec, capacity: u64) -> Geometry {
    Geometry {
        capacity,
        block_size: spec.block_size,
        // With memory, a small write never requires reading a larger block.
        physical_block: spec.block_size,
        unmap_granularity: None,
        read_only: spec.read_only,
        write_cache: spec.write_cache,
        rotational: false,
        direct: false,
        protection: spec.protection,
        protection_format: ProtectionFormat::Fixed,
    }
}

pub(super) type Opened = Result<(Medium, Geometry), OpenError>;

/// Retries until a store is available. See [`patience`](crate::patience).
fn until_free<T>(
    path: &Path,
    file: Option<&File>,
    attempt: impl FnMut() -> Result<Option<T>, OpenError>,
) -> Result<T, OpenError> {
    patience::until_free(attempt)?.ok_or_else(|| OpenError::Locked {
        path: path.to_owned(),
        holder: holder::of_file(path),
        is_accessed: has_thread(&path.display().to_string()),
        file: file.and_then(|file| FileId::of(file).ok()),
    })
}

/// Locks a file, as soon as it is free.
pub(super) fn lock(file: &File, mode: Lock, path: &Path) -> Result<(), OpenError> {
    until_free(path, Some(file), || {
        // Several readers can share the lock. They exclude writers, because otherwise data would
        // change while an initiator is using it.
        let is_ours = sys::lock(file.as_fd(), mode).map_err(io_error(path, "lock it"))?;
        Ok(is_ours.then_some(()))
    })
}

/// Returns the lock that is required to serve a file or device.
fn lock_mode(spec: &Spec) -> Lock {
    match spec.read_only {
        true => Lock::Shared,
        false => Lock::Exclusive,
    }
}

/// Locks a file that may have just been created. If another process has locked it before, that
/// process is serving the file and we must not remove it.
fn lock_made(
    file: &File,
    spec: &Spec,
    path: &Path,
    made: &mut Option<Made>,
) -> Result<(), OpenError> {
    lock(file, lock_mode(spec), path).inspect_err(|error| {
        if matches!(error, OpenError::Locked { .. }) {
            *made = None;
        }
    })
}

/// Returns another handle of an open file.
fn handle(file: &File) -> io::Result<Handle> {
    Ok(OwnedFd::from(file.try_clone()?).into())
}

/// Rejects a path if accessing it would make the daemon wait for itself.
pub(super) fn check_mount(source: &Source) -> Result<(), OpenError> {
    let (Source::File { path, .. } | Source::Device { path }) = source else {
        return Ok(());
    };
    match riser_config::mounts::find(path) {
        Some(mount) => Err(OpenError::DependsOnUs {
            path: path.clone(),
            mount,
        }),
        None => Ok(()),
    }
}

/// Opens or creates a file, and locks it. Returns its header if it is protected. Changes on disk are
/// recorded in `made`.
pub(super) fn open_file(
    spec: &Spec,
    path: &Path,
    size: Option<u64>,
    create: bool,
    made: &mut Option<Made>,
) -> Result<(File, Option<Header>), OpenError> {
    // If the file is removed while waiting for its lock, don't repeat this forever.
    for _ in 0..ATTEMPTS {
        let file = open_or_create(spec, path, create, made)?;
        lock_made(&file, spec, path, made)?;
        // Do this after locking the file, because the previous owner of the lock may have restored
        // its old length or removed it.
        let metadata = file.metadata().map_err(io_error(path, "examine it"))?;
        if is_removed(path, &metadata) {
            *made = None;
            continue;
        }
        // Without `create`, a file that is too short is probably the wrong file.
        let may_extend = create && !spec.read_only;
        let open = handle(&file).map_err(io_error(path, "examine it"))?;
        let header = open_header(spec, path, &open, may_extend, made)?;
        let actual = sys::file_size(&open).map_err(io_error(path, "examine it"))?;
        let size = size.map(|size| file_len(spec, size));
        let file = to_size(file, actual, path, size, may_extend, made)?;
        return Ok((file, header));
    }
    Err(OpenError::Moved {
        path: path.to_owned(),
    })
}

/// Returns the size of the file for a unit of this capacity.
pub(super) fn file_len(spec: &Spec, capacity: u64) -> u64 {
    match spec.protection {
        Some(_) => Layout::new(spec.block_size).file_len(capacity),
        None => capacity,
    }
}

/// Checks or creates the header of a file. See [`protected::open_header`].
fn open_header(
    spec: &Spec,
    path: &Path,
    file: &Handle,
    may_create: bool,
    made: &mut Option<Made>,
) -> Result<Option<Header>, OpenError> {
    protected::open_header(spec, path, file, may_create, made)
        .map_err(io_error(path, "access its header"))?
        .map_err(|source| OpenError::Protection {
            path: path.to_owned(),
            source,
        })
}

/// Sets the capacity and the type of protection information of a protected file.
fn protect(spec: &Spec, header: Option<Header>, geometry: Geometry) -> Geometry {
    let Some(header) = header else {
        return geometry;
    };
    Geometry {
        capacity: Layout::new(spec.block_size).capacity(geometry.capacity),
        // Frames are not aligned to the blocks of the file system.
        physical_block: spec.block_size,
        protection_format: ProtectionFormat::Changeable(header.protection_type),
        ..geometry
    }
}

/// Returns true if an open file was removed from its path and has no other links.
fn is_removed(path: &Path, open: &Metadata) -> bool {
    let is_there = |there: Metadata| (there.dev(), there.ino()) == (open.dev(), open.ino());
    open.nlink() == 0 && !std::fs::metadata(path).is_ok_and(is_there)
}

/// Opens an existing file, or creates it.
fn open_or_create(
    spec: &Spec,
    path: &Path,
    create: bool,
    made: &mut Option<Made>,
) -> Result<File, OpenError> {
    let writable = !spec.read_only;
    let mut options = OpenOptions::new();
    options
        .read(true)
        .write(writable)
        // Prevents the daemon from blocking on a FIFO, if this is configured by mistake.
        .custom_flags(libc::O_NONBLOCK);
    let mut opened = options.open(path);
    let is_missing = |e: &io::Error| e.kind() == io::ErrorKind::NotFound;
    if create && writable && opened.as_ref().is_err_and(is_missing) {
        // Data of initiators must not be readable by all users of this host.
        opened = options.create_new(true).mode(0o600).open(path);
        if let Ok(file) = &opened {
            *made = Some(Made {
                path: path.to_owned(),
                file: handle(file).map_err(io_error(path, "examine it"))?,
                before: None,
                has_new_header: false,
            });
        }
    }
    let file = opened.map_err(|source| {
        let action = match writable {
            true => "open it for writing",
            false => "open it",
        };
        match hints::hint(spec, path, &source) {
            Some(hint) => OpenError::File {
                path: path.to_owned(),
                action,
                source,
                hint,
            },
            None => io_error(path, action)(source),
        }
    })?;
    let metadata = file.metadata().map_err(io_error(path, "examine it"))?;
    if !metadata.is_file() {
        return Err(OpenError::Kind {
            path: path.to_owned(),
            expected: "regular file (kind: device serves block devices)",
        });
    }
    Ok(file)
}

/// Extends a file of `actual` bytes to this size, if it is shorter and `may_extend` is
/// set.
fn to_size(
    file: File,
    actual: u64,
    path: &Path,
    size: Option<u64>,
    may_extend: bool,
    made: &mut Option<Made>,
) -> Result<File, OpenError> {
    match size {
        Some(wanted) if wanted > actual && may_extend => {
            let extended = handle(&file).and_then(|file| sys::extend(&file, wanted));
            extended.map_err(io_error(path, "extend it"))?;
            if made.is_none() {
                *made = Some(Made {
                    path: path.to_owned(),
                    file: handle(&file).map_err(io_error(path, "examine it"))?,
                    before: Some(actual),
                    has_new_header: false,
                });
            }
            let parent = path.parent().filter(|p| !p.as_os_str().is_empty());
            // The name of a new file isn't durable until its directory was synced.
            File::open(parent.unwrap_or(Path::new(".")))
                .and_then(|dir| dir.sync_all())
                .map_err(io_error(path, "sync its directory"))?;
            Ok(file)
        }
        Some(wanted) if wanted > actual => Err(OpenError::Size {
            path: path.to_owned(),
            actual,
            wanted,
        }),
        Some(wanted) if wanted < actual => {
            // It was extended before, by us or by the user, so initiators may have written to this
            // area.
            let path = path.display();
            tracing::warn!(%path, actual, wanted, "file is larger than its `size`; the whole file \
                                                   is served");
            Ok(file)
        }
        _ => Ok(file),
    }
}

pub(super) fn measure_file(
    spec: &Spec,
    path: &Path,
    (file, header): (File, Option<Header>),
) -> Opened {
    let metadata = file.metadata().map_err(io_error(path, "examine it"))?;
    let align = direct(spec, path, &file)?;
    let granularity = (metadata.blksize().clamp(512, 1 << 20) as u32).max(spec.block_size);
    // Beyond the end of the file, where punching a hole doesn't affect any data.
    let beyond = metadata.len().next_multiple_of(u64::from(granularity));
    let punch = !spec.read_only && can_punch(file.as_fd(), beyond, granularity.into());
    let geometry = Geometry {
        physical_block: granularity.min(4096).max(spec.block_size),
        unmap_granularity: punch.then_some(granularity),
        direct: align.is_some(),
        ..plain(spec, metadata.len())
    };
    let geometry = protect(spec, header, geometry);
    let file = OpenFile::new(file, align, None);
    Ok((Medium::File(framed(spec, file)), geometry))
}

pub(super) fn open_device(spec: &Spec, path: &Path) -> Opened {
    // O_EXCL on a block device: fails if it's mounted or in use as part of another device.
    let exclusive = if spec.read_only { 0 } else { libc::O_EXCL };
    let mut options = OpenOptions::new();
    options
        .read(true)
        .write(!spec.read_only)
        .custom_flags(exclusive | libc::O_NONBLOCK);
    let file = until_free(path, None, || match options.open(path) {
        Ok(file) => Ok(Some(file)),
        Err(e) if e.raw_os_error() == Some(libc::EBUSY) => Ok(None),
        Err(e) => Err(io_error(path, "open it")(e)),
    })?;
    let metadata = file.metadata().map_err(io_error(path, "examine it"))?;
    if !metadata.file_type().is_block_device() {
        return Err(OpenError::Kind {
            path: path.to_owned(),
            expected: "block device (kind: file serves regular files)",
        });
    }
    // `O_EXCL` excludes mounts and other exclusive users, but not users that open the device
    // without this flag.
    lock(&file, lock_mode(spec), path)?;
    let device = Device::of(&file).map_err(io_error(path, "measure it"))?;
    let align = direct(spec, path, &file)?;
    // Punching a hole requires both: a discard, after which the blocks read as zeroes.
    let unmap = !spec.read_only && device.can_zero && device.can_discard;
    let granularity = device.discard_granularity.max(spec.block_size);
    let geometry = Geometry {
        physical_block: device.physical_block.clamp(spec.block_size, 1 << 20),
        unmap_granularity: unmap.then_some(granularity),
        rotational: device.is_rotational,
        direct: align.is_some(),
        ..plain(spec, device.size)
    };
    Ok((
        Medium::File(OpenFile::new(file, align, Some(device))),
        geometry,
    ))
}

/// Creates the medium for a disk in memory that replaces the file or device in the specification.
/// Direct I/O uses sectors.
pub(super) fn simulated(spec: &Spec, disk: &Disk, made: &mut Option<Made>) -> Opened {
    let is_direct = spec.direct != Direct::Off && spec.protection.is_none();
    let file = match is_direct {
        true => disk.open(),
        false => disk.open().buffered(),
    };
    let file = Handle::from(file);
    let (path, wanted, may_extend) = match &spec.source {
        Source::File { path, size, create } => (path, *size, *create && !spec.read_only),
        Source::Device { path } => (path, None, false),
        Source::Ram { .. } | Source::Null { .. } => panic!("memory needs no disk"),
    };
    let header = match &spec.source {
        Source::File { .. } => open_header(spec, path, &file, may_extend, made)?,
        _ => None,
    };
    let wanted = wanted.map(|wanted| file_len(spec, wanted));
    let actual = disk.len();
    if let Some(wanted) = wanted.filter(|wanted| *wanted > actual) {
        if !may_extend {
            let path = path.clone();
            return Err(OpenError::Size {
                path,
                actual,
                wanted,
            });
        }
        // Record this before extending the disk, as for a real file. If a later step fails, the
        // previous length is restored.
        made.get_or_insert_with(|| Made {
            path: path.clone(),
            file: file.clone(),
            before: Some(actual),
            has_new_header: false,
        });
        disk.set_len(wanted);
    }
    let sector = Align {
        memory: SECTOR as u32,
        offset: SECTOR as u32,
    };
    let align = is_direct.then_some(sector);
    let device = matches!(spec.source, Source::Device { .. }).then_some(Device {
        logical_block: SECTOR as u32,
        can_zero: true,
        ..Device::default()
    });
    let geometry = Geometry {
        physical_block: 4096,
        unmap_granularity: (!spec.read_only).then_some(4096),
        direct: align.is_some(),
        ..plain(spec, disk.len())
    };
    let geometry = protect(spec, header, geometry);
    let file = OpenFile::simulated(file, align, device);
    Ok((Medium::File(framed(spec, file)), geometry))
}

/// Sets the properties of a file with frames, if blocks have protection information.
fn framed(spec: &Spec, file: OpenFile) -> OpenFile {
    match spec.protection {
        Some(_) => file.with_unaligned_blocks(),
        None => file,
    }
}

/// Enables direct I/O if configured and supported. Returns `None` to use the page cache.
fn direct(spec: &Spec, path: &Path, file: &File) -> Result<Option<Align>, OpenError> {
    match (spec.direct, spec.protection) {
        (Direct::Off, _) | (Direct::Auto, Some(_)) => return Ok(None),
        (Direct::On, Some(_)) => {
            let (path, reason) = (path.to_owned(), "it has protection information".into());
            return Err(OpenError::Direct { path, reason });
        }
        (Direct::Auto | Direct::On, None) => {}
    }
    match (enable_direct(file, spec.block_size, 4096), spec.direct) {
        (Ok(align), _) => Ok(Some(align)),
        (Err(reason), Direct::On) => Err(OpenError::Direct {
            path: path.to_owned(),
            reason,
        }),
        // Continue without direct I/O.
        (Err(_), Direct::Auto | Direct::Off) => Ok(None),
    }
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;
    use std::thread;
    use std::time::Duration;

    use riser_testkit::eventually;

    use super::super::Store;
    use super::*;

    fn path(name: &str) -> PathBuf {
        let path = std::env::temp_dir().join(format!("riserd-{name}-{}", std::process::id()));
        let _ = std::fs::remove_file(&path);
        path
    }

    fn spec(path: PathBuf) -> Spec {
        Spec {
            name: "disk".into(),
            source: Source::File {
                path,
                size: Some(1 << 20),
                create: true,
            },
            block_size: 512,
            direct: Direct::Off,
            write_cache: true,
            read_only: false,
            protection: None,
            faults: None,
        }
    }

    /// Returns the number of descriptors of this process for a path.
    fn descriptors_of(path: &Path) -> usize {
        let all = std::fs::read_dir("/proc/self/fd").unwrap();
        let leads = all.filter_map(|entry| std::fs::read_link(entry.ok()?.path()).ok());
        leads.filter(|lead| lead == path).count()
    }

    /// Opens a store while another store has its lock and then reverts its changes to the file.
    fn after_undo(name: &str, before: Option<u64>) -> (PathBuf, Arc<Store>) {
        let path = path(name);
        if let Some(len) = before {
            File::create(&path).unwrap().set_len(len).unwrap();
        }
        let spec = spec(path.clone());
        let first = Store::open(&spec).unwrap();
        let before = descriptors_of(&path);
        let second = thread::spawn(move || Store::open(&spec));
        // It has opened the unmodified file, and is waiting for the lock.
        eventually(
            "the second one opens the file",
            Duration::from_secs(60),
            || descriptors_of(&path) > before,
        );
        first.undo();
        drop(first);
        (path, second.join().unwrap().unwrap())
    }

    #[test]
    fn file_removed_during_lock_wait_is_recreated() {
        let (path, store) = after_undo("removed", None);
        let there = std::fs::metadata(&path).expect("it is there");
        assert_eq!(store.file().unwrap().inode, there.ino());
        store.undo();
    }

    #[test]
    fn created_file_locked_elsewhere_is_kept() {
        let path = path("first");
        let spec = spec(path.clone());
        let mut made = None;
        let file = open_or_create(&spec, &path, true, &mut made).unwrap();
        let other = OpenOptions::new().write(true).open(&path).unwrap();
        assert!(sys::lock(other.as_fd(), Lock::Exclusive).unwrap());
        assert!(made.is_some());
        let locked = patience::at_once(|| lock_made(&file, &spec, &path, &mut made));
        let error = locked.unwrap_err();
        assert!(matches!(error, OpenError::Locked { .. }), "{error}");
        assert!(made.is_none());
        std::fs::remove_file(path).unwrap();
    }

    #[test]
    fn file_truncated_during_lock_wait_is_extended() {
        let (path, store) = after_undo("cut", Some(4096));
        assert_eq!(store.capacity(), 1 << 20);
        drop(store);
        std::fs::remove_file(path).unwrap();
    }
}
