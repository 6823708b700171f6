//! Opens files and devices, and locks and measures them.

use std::fs::{File, Metadata, OpenOptions};
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use riser_config::{Direct, Source, Spec};
use riser_memory::{MappedFile, Memory};
use riser_reactor::Handle;
use riser_reactor::simulated::{Disk, SECTOR};

use super::file_id::FileId;
use super::hints;
use super::made::Made;
use super::open_error::{OpenError, io_error};
use super::ram::Ram;
use super::sys::{self, Align, Lock};
use crate::holder;
use crate::patience;

/// Attempts to open a file that was removed while its lock was waited for.
const ATTEMPTS: usize = 3;

/// Geometry of a backend, as its logical unit needs it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Geometry {
    /// Size in bytes, a multiple of `block_size`.
    pub capacity: u64,
    /// Logical block size in bytes.
    pub block_size: u32,
    /// Bytes that the medium writes at once; at least `block_size`.
    pub physical_block: u32,
    /// The unit in which space can be given back, in bytes; `None` where it cannot.
    pub unmap_granularity: Option<u32>,
    /// Writes fail, and the file is opened for reading.
    pub read_only: bool,
    /// Completed writes may be volatile until a flush.
    pub write_cache: bool,
    /// The medium turns, so its accesses have seek times.
    pub rotational: bool,
    /// The page cache is bypassed.
    pub direct: bool,
}

/// Access to the bytes.
#[derive(Debug)]
pub(super) enum Medium {
    /// A file or device.
    File {
        file: Handle,
        /// Alignment, where I/O is direct.
        align: Option<Align>,
        device: bool,
        /// Least that it zeroes and frees, in bytes.
        unit: u64,
        /// A device frees and zeroes ranges by itself. Otherwise the kernel would write the zeroes of
        /// a range of gigabytes in one call, which cannot be cancelled. A file is asked.
        can_zero: bool,
        /// Its file system keeps it in memory.
        in_memory: bool,
        /// By which it is read where that needs no system call.
        mapped: Option<MappedFile>,
    },
    /// Memory of this process.
    Ram(Arc<Ram>),
    /// Nowhere: reads give zeroes, and writes are lost.
    Null,
    /// Not now: see [`Store::absent`].
    Absent,
}

/// The geometry of a medium that is not a file; nothing is volatile where nothing survives anyway,
/// but the initiator sees the cache it was configured with.
pub(super) fn plain(spec: &Spec, capacity: u64) -> Geometry {
    Geometry {
        capacity,
        block_size: spec.block_size,
        // Memory has no larger block that a small write would have to read first.
        physical_block: spec.block_size,
        unmap_granularity: None,
        read_only: spec.read_only,
        write_cache: spec.write_cache,
        rotational: false,
        direct: false,
    }
}

pub(super) type Opened = Result<(Medium, Geometry), OpenError>;

/// Tries until a store is free: see [`patience`](crate::patience).
fn until_free<T>(
    path: &Path,
    file: Option<&File>,
    attempt: impl FnMut() -> Result<Option<T>, OpenError>,
) -> Result<T, OpenError> {
    patience::until_free(attempt)?.ok_or_else(|| OpenError::Locked {
        path: path.to_owned(),
        holder: holder::of_file(path),
        file: file.and_then(|file| FileId::of(file).ok()),
    })
}

fn lock(file: &File, spec: &Spec, path: &Path) -> Result<(), OpenError> {
    let mode = if spec.read_only {
        Lock::Shared
    } else {
        Lock::Exclusive
    };
    until_free(path, Some(file), || {
        // Readers share the lock, and with one of them there is no writer: data would change under
        // an initiator.
        let is_ours = sys::lock(file.as_fd(), mode).map_err(io_error(path, "lock it"))?;
        Ok(is_ours.then_some(()))
    })
}

/// Locks a file that may just have been created: if another process has the lock first, it serves
/// the file, which is not to be removed then.
fn lock_made(
    file: &File,
    spec: &Spec,
    path: &Path,
    made: &mut Option<Made>,
) -> Result<(), OpenError> {
    lock(file, spec, path).inspect_err(|error| {
        if matches!(error, OpenError::Locked { .. }) {
            *made = None;
        }
    })
}

/// Another handle of an open file.
fn handle(file: &File) -> io::Result<Handle> {
    Ok(OwnedFd::from(file.try_clone()?).into())
}

/// Refuses a path at which the daemon would wait for itself.
pub(super) fn check_mount(source: &Source) -> Result<(), OpenError> {
    let (Source::File { path, .. } | Source::Device { path }) = source else {
        return Ok(());
    };
    match riser_config::mounts::find(path) {
        Some(mount) => Err(OpenError::AsksUs {
            path: path.clone(),
            mount,
        }),
        None => Ok(()),
    }
}

/// Opens, or creates, a file, and locks it; what that changes on disk is noted in `made`.
pub(super) fn open_file(
    spec: &Spec,
    path: &Path,
    size: Option<u64>,
    create: bool,
    made: &mut Option<Made>,
) -> Result<File, OpenError> {
    // A file that goes away time and again, while its lock is waited for, is not waited for
    // without end.
    for _ in 0..ATTEMPTS {
        let file = open_or_create(spec, path, create, made)?;
        lock_made(&file, spec, path, made)?;
        // Only now: the one that had the lock may have cut the file back to the length that it had,
        // or removed it.
        let metadata = file.metadata().map_err(io_error(path, "examine it"))?;
        if is_removed(path, &metadata) {
            *made = None;
            continue;
        }
        // Without `create` a shorter file is probably the wrong one.
        let may_extend = create && !spec.read_only;
        return to_size(file, metadata.len(), path, size, may_extend, made);
    }
    Err(OpenError::Moved {
        path: path.to_owned(),
    })
}

/// Returns true if an open file is no longer at its path, nor at another one.
fn is_removed(path: &Path, open: &Metadata) -> bool {
    let is_there = |there: Metadata| (there.dev(), there.ino()) == (open.dev(), open.ino());
    open.nlink() == 0 && !std::fs::metadata(path).is_ok_and(is_there)
}

/// Opens a file as it is, or creates it.
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
        // A FIFO by mistake must not hang the daemon.
        .custom_flags(libc::O_NONBLOCK);
    let mut opened = options.open(path);
    let is_missing = |e: &io::Error| e.kind() == io::ErrorKind::NotFound;
    if create && writable && opened.as_ref().is_err_and(is_missing) {
        // What initiators keep there is not for every user of this host.
        opened = options.create_new(true).mode(0o600).open(path);
        if let Ok(file) = &opened {
            *made = Some(Made {
                path: path.to_owned(),
                file: handle(file).map_err(io_error(path, "examine it"))?,
                before: None,
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

/// Extends a file of `actual` bytes to its size, if it is shorter and may be.
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
                });
            }
            let parent = path.parent().filter(|p| !p.as_os_str().is_empty());
            // A new file's name is durable only with its directory.
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
            // It was extended, here or by hand, and initiators may have written there.
            let path = path.display();
            tracing::warn!(%path, actual, wanted, "a file is larger than its `size`: all of it is served");
            Ok(file)
        }
        _ => Ok(file),
    }
}

pub(super) fn measure_file(spec: &Spec, path: &Path, file: File) -> Opened {
    let metadata = file.metadata().map_err(io_error(path, "examine it"))?;
    let align = direct(spec, path, &file)?;
    let granularity = (metadata.blksize().clamp(512, 1 << 20) as u32).max(spec.block_size);
    // Past the end, where punching cannot hurt any data.
    let beyond = metadata.len().next_multiple_of(u64::from(granularity));
    let punch = !spec.read_only && sys::can_punch(file.as_fd(), beyond, granularity.into());
    let geometry = Geometry {
        physical_block: granularity.min(4096).max(spec.block_size),
        unmap_granularity: punch.then_some(granularity),
        direct: align.is_some(),
        ..plain(spec, metadata.len())
    };
    Ok((medium(file, align, None, true), geometry))
}

pub(super) fn open_device(spec: &Spec, path: &Path) -> Opened {
    // O_EXCL on a block device: not while it is mounted or part of something else.
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
    // `O_EXCL` keeps mounts and other exclusive opens out, but no opener without the flag.
    lock(&file, spec, path)?;
    let size = sys::device_size(file.as_fd()).map_err(io_error(path, "measure it"))?;
    // A device that does not answer this is served all the same: the number is only a hint for
    // initiators.
    let physical = sys::device_physical_block(file.as_fd()).unwrap_or(4096);
    let queue = Queue::of(metadata.rdev());
    let align = direct(spec, path, &file)?;
    // The kernel gives 0 for devices that cannot. A hole needs both: a discard after which the blocks
    // are zero.
    let can_zero = queue.number("write_zeroes_max_bytes") > 0;
    let unmap = !spec.read_only && can_zero && queue.number("discard_max_bytes") > 0;
    let granularity = queue.number("discard_granularity").clamp(512, 1 << 30) as u32;
    let geometry = Geometry {
        physical_block: physical.clamp(spec.block_size, 1 << 20),
        unmap_granularity: unmap.then_some(granularity.max(spec.block_size)),
        rotational: queue.number("rotational") == 1,
        direct: align.is_some(),
        ..plain(spec, size)
    };
    let logical = sys::device_logical_block(file.as_fd()).unwrap_or(4096);
    Ok((medium(file, align, Some(logical), can_zero), geometry))
}

/// A disk in memory in the place of the specification's file or device. Direct I/O on it goes by
/// sectors.
pub(super) fn simulated(spec: &Spec, disk: &Disk, made: &mut Option<Made>) -> Opened {
    let is_direct = spec.direct != Direct::Off;
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
        // Noted before it grows, as with a real file: what fails later gives back the length that
        // the disk had.
        *made = Some(Made {
            path: path.clone(),
            file: file.clone(),
            before: Some(actual),
        });
        disk.set_len(wanted);
    }
    let sector = Align {
        memory: SECTOR as u32,
        offset: SECTOR as u32,
    };
    let align = is_direct.then_some(sector);
    let device = matches!(spec.source, Source::Device { .. });
    let geometry = Geometry {
        physical_block: 4096,
        unmap_granularity: (!spec.read_only).then_some(4096),
        direct: align.is_some(),
        ..plain(spec, disk.len())
    };
    let medium = Medium::File {
        file,
        align,
        device,
        unit: if device { SECTOR } else { 1 },
        can_zero: true,
        // A simulation decides when its operations end.
        in_memory: false,
        mapped: None,
    };
    Ok((medium, geometry))
}

/// `logical_block` is a device's, in bytes. A file's ranges may begin and end anywhere.
fn medium(file: File, align: Option<Align>, logical_block: Option<u32>, can_zero: bool) -> Medium {
    let device = logical_block.is_some();
    // The special file of a device may lie on a file system in memory.
    let in_memory = !device && sys::is_in_memory(file.as_fd());
    Medium::File {
        in_memory,
        mapped: in_memory.then(|| sys::map(&file)).flatten(),
        file: OwnedFd::from(file).into(),
        align,
        device,
        unit: logical_block.map_or(1, |bytes| u64::from(bytes.max(1))),
        can_zero,
    }
}

/// Turns direct I/O on where it is wanted and works; `None` means the page cache.
fn direct(spec: &Spec, path: &Path, file: &File) -> Result<Option<Align>, OpenError> {
    if spec.direct == Direct::Off {
        return Ok(None);
    }
    match try_direct(spec.block_size, file) {
        Ok(align) => Ok(Some(align)),
        Err(reason) => {
            // It goes on without in any case; a failure here means it was never on.
            let _ = sys::set_direct(file.as_fd(), false);
            match spec.direct {
                Direct::On => Err(OpenError::Direct {
                    path: path.to_owned(),
                    reason,
                }),
                Direct::Auto | Direct::Off => Ok(None),
            }
        }
    }
}

fn try_direct(block_size: u32, file: &File) -> Result<Align, String> {
    let fd = file.as_fd();
    sys::set_direct(fd, true).map_err(|e| format!("the file system refuses it: {e}"))?;
    let align = sys::direct_alignment(fd)
        .map_err(|e| e.to_string())?
        .ok_or("the file system says that this file has none")?;
    // Otherwise each write of one block would be a read, a change and a write, which two workers
    // could interleave.
    if !block_size.is_multiple_of(align.offset) {
        return Err(format!(
            "it needs blocks of {} bytes, and the unit has blocks of {block_size}",
            align.offset
        ));
    }
    // Some file systems accept the flag and then fail each request.
    let block = Memory::new(align.offset as usize).map_err(|e| e.to_string())?;
    let block = block.whole().slice(0..align.offset as usize);
    sys::probe_read(fd, &block.expect("as long as the mapping at least"))
        .map_err(|e| format!("a first read fails: {e}"))?;
    Ok(align)
}

/// A block device's queue attributes.
struct Queue(Option<PathBuf>);

impl Queue {
    fn of(rdev: u64) -> Self {
        let (major, minor) = (libc::major(rdev), libc::minor(rdev));
        let device = PathBuf::from(format!("/sys/dev/block/{major}:{minor}"));
        // A partition shows its disk's queue one directory up.
        let found = [device.join("queue"), device.join("../queue")]
            .into_iter()
            .find(|p| p.is_dir());
        Self(found)
    }

    /// The attribute's value; 0 where there is none.
    fn number(&self, name: &str) -> u64 {
        self.0
            .as_ref()
            .and_then(|p| std::fs::read_to_string(p.join(name)).ok())
            .and_then(|s| s.trim().parse().ok())
            .unwrap_or(0)
    }
}

#[cfg(test)]
mod tests {
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
            faults: None,
        }
    }

    /// Descriptors of this process that lead to a path.
    fn descriptors_of(path: &Path) -> usize {
        let all = std::fs::read_dir("/proc/self/fd").unwrap();
        let leads = all.filter_map(|entry| std::fs::read_link(entry.ok()?.path()).ok());
        leads.filter(|lead| lead == path).count()
    }

    /// What is opened while another one has its lock, which then takes back what it has done to the
    /// file.
    fn after_undo(name: &str, before: Option<u64>) -> (PathBuf, Arc<Store>) {
        let path = path(name);
        if let Some(len) = before {
            File::create(&path).unwrap().set_len(len).unwrap();
        }
        let spec = spec(path.clone());
        let first = Store::open(&spec).unwrap();
        let before = descriptors_of(&path);
        let second = thread::spawn(move || Store::open(&spec));
        // It has found the file as it is, and cannot have its lock.
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
    fn a_file_that_was_removed_while_its_lock_was_waited_for_is_not_served() {
        let (path, store) = after_undo("removed", None);
        let there = std::fs::metadata(&path).expect("it is there");
        assert_eq!(store.file().unwrap().inode, there.ino());
        store.undo();
    }

    #[test]
    fn a_file_that_another_process_has_locked_first_is_not_ours_to_remove() {
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
    fn a_file_that_was_cut_while_its_lock_was_waited_for_is_extended() {
        let (path, store) = after_undo("cut", Some(4096));
        assert_eq!(store.capacity(), 1 << 20);
        drop(store);
        std::fs::remove_file(path).unwrap();
    }
}
