//! `riser mount`: mounts the file system on a logical unit, using FUSE and a loop device.
//!
//! ```text
//! logical unit ── FUSE file ── loop device (direct I/O) ── file system on DIR
//! ```
//!
//! The loop device is released automatically when the file system is unmounted by any program. The
//! process that serves the file detects this, unmounts the file and logs out, so `umount DIR` is
//! sufficient. If the file system is also mounted elsewhere, e.g. with `mount --bind`, it's served
//! until all mounts are removed.

use std::ffi::OsStr;
use std::fs::File;
use std::io;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread;
use std::time::{Duration, Instant};

use riser_block::{BlockDevice, ByteDevice};
use riser_exports::fuse::{Caching, FuseMount, FuseOptions, UnmountError};
use riser_exports::mounts::{self, MountId, Mounts};
use rustix::event::{PollFd, PollFlags};
use rustix::mount::UnmountFlags;

use super::args::{Global, MountArgs};
use super::disk::Disk;
use super::exit::{CliError, Exit};
use super::file;
use super::guard;
use super::loops::{release_loop, run_tool};
use super::serve::{self, Event, Ready};
use super::state::{Export, StateDir, process_name};

/// Maximum time to wait for the kernel to release the file, after the loop device was released.
const RELEASE_PATIENCE: Duration = Duration::from_secs(30);

/// Initial interval for checking whether the loop device is in use. This is doubled each time.
const FIRST_PAUSE: Duration = Duration::from_millis(10);

/// Maximum interval.
const LONGEST_PAUSE: Duration = Duration::from_secs(1);

pub(super) fn run(args: &MountArgs, global: &Global) -> Result<(), CliError> {
    if !rustix::process::geteuid().is_root() {
        return Err(
            CliError::new(Exit::Usage, "mounting a file system requires root").help(
                "use `riser attach --fuse` to attach the logical unit as a file without root",
            ),
        );
    }
    if !args.dir.is_dir() {
        let what = format!("{} is not a directory", args.dir.display());
        return Err(CliError::new(Exit::NotFound, what));
    }
    serve::run(&args.serve, global, |events, sender, ready| {
        let dir = args
            .dir
            .canonicalize()
            .map_err(|e| CliError::io(format!("cannot resolve {}", args.dir.display()), e))?;
        check_vacant(&dir, global)?;
        let access = serve::access(&args.serve, global, args.read_only);
        let port = serve::export_port(&dir, &args.url)?;
        let mut link = args.link.clone();
        if let Some(port) = &port {
            port.set_on(&mut link);
        }
        serve::with_disk(&args.url, &link, access, port, ready, |disk, ready| {
            serve_mount(args, dir, disk, events, sender, ready)
        })
    })
}

fn serve_mount(
    args: &MountArgs,
    dir: PathBuf,
    disk: &Arc<Disk>,
    events: &mpsc::Receiver<Event>,
    sender: &mpsc::Sender<Event>,
    ready: &mut Ready<'_>,
) -> Result<(), CliError> {
    let mut export = Export::Mount {
        path: dir.clone(),
        device: PathBuf::new(),
        fuse: Below::path()?,
        id: None,
    };
    ready.claim(&args.url, disk, export.clone(), None)?;
    let device = Arc::new(ByteDevice::new(disk.clone()));
    // We unmount FUSE ourselves, so this event is ignored.
    let (ignored, _) = mpsc::channel();
    let below = Below::new(&device, args, ignored)?;
    let loop_device = attach_loop(below.file(), disk, args.partition)?;
    let mounted = mount(args, &loop_device, &dir).map_err(|error| explain(error, args, disk));
    // The loop device is released by its last user, which is the file system, or immediately if
    // it's unused.
    let freed = release_loop(&loop_device);
    let result = mounted.and_then(|_| {
        let mounted = Mounted::find(&dir)?;
        if let Export::Mount { device, id, .. } = &mut export {
            (*device, *id) = (loop_device, Some(mounted.id));
        }
        let shown = freed
            .and_then(|_| mounted.watch(sender.clone()))
            .and_then(|()| ready.announce(export));
        match &shown {
            Ok(()) => {
                mounted.wait(events);
                ready.mark_detached();
                below.wait(events);
            }
            Err(_) => mounted.force_unmount(),
        }
        shown
    });
    // The attachment remains in the list until this is done. If we are killed, the next process
    // will clean up.
    below.finish(&device)?;
    result
}

/// Adds causes to an error which are not known to mount(8).
fn explain(error: CliError, args: &MountArgs, disk: &Arc<Disk>) -> CliError {
    if args.partition.is_some() {
        return error;
    }
    let url = &args.url;
    let cause = error.causes().join(": ");
    match guard::content(disk) {
        Ok(None) => CliError::new(error.exit, format!("no file system found on {url}"))
            .because(cause)
            .help(format!(
                "to create one, which erases the disk: `riser attach {url} --fuse DIR`, \
                 `mkfs.ext4 DIR/{}`, `riser detach DIR`",
                url.name()
            )),
        Ok(Some(what)) if what.starts_with("a partition table") => {
            CliError::new(error.exit, format!("{url} contains {what}"))
                .because(cause)
                .help("use --partition N to mount a partition")
        }
        _ => error,
    }
}

/// A mounted file system.
struct Mounted {
    dir: PathBuf,
    id: MountId,
}

impl Mounted {
    /// Finds the file system currently mounted on a directory.
    fn find(dir: &Path) -> Result<Self, CliError> {
        let mounts = read_mounts().inspect_err(|_| {
            // We have just mounted this, so assume that it's the topmost mount.
            let _ = rustix::mount::unmount(dir, UnmountFlags::DETACH);
        })?;
        match mounts.top(dir) {
            Some(mount) => Ok(Self {
                dir: dir.to_owned(),
                id: mount.id,
            }),
            None => {
                let what = format!("nothing is mounted on {}", dir.display());
                Err(CliError::new(Exit::Failure, what))
            }
        }
    }

    /// Unmounts the file system, unless there is another mount on top, which isn't ours.
    fn unmount(&self, lazy: bool) -> Result<(), CliError> {
        let mounts = read_mounts()?;
        if mounts.top(&self.dir).map(|mount| mount.id) == Some(self.id) {
            return unmount(&self.dir, lazy);
        }
        match mounts.has(self.id) {
            true => Err(covered(&self.dir)),
            false => Ok(()),
        }
    }

    /// Waits until the file system was unmounted by any user, or unmounts it after receiving a
    /// signal.
    fn wait(&self, events: &mpsc::Receiver<Event>) {
        while events.recv() == Ok(Event::Signal) {
            // Unmounting triggers a separate event.
            if let Err(error) = self.unmount(false) {
                tracing::warn!(%error, "the file system stays mounted");
            }
        }
    }

    /// Unmounts a file system that couldn't be added to the list, even if it's in use.
    fn force_unmount(&self) {
        if let Err(error) = self.unmount(false).or_else(|_| self.unmount(true)) {
            tracing::warn!(%error, "the file system stays mounted");
        }
    }

    /// Sends an event after the file system was unmounted.
    fn watch(&self, sender: mpsc::Sender<Event>) -> Result<(), CliError> {
        let failed = |e| CliError::io("cannot watch the mounts", e);
        // Open this before checking the mounts. The first poll will then report any changes after
        // this point.
        let file = File::open(mounts::LIST).map_err(failed)?;
        let id = self.id;
        let watch = move || {
            loop {
                match id.is_listed() {
                    Ok(true) => {}
                    Ok(false) => {
                        let _ = sender.send(Event::Ended);
                        return;
                    }
                    Err(error) => return tracing::error!(%error, "cannot read the mounts"),
                }
                let mut fds = [PollFd::new(&file, PollFlags::PRI)];
                // In case of a spurious wakeup, we just check again.
                let _ = rustix::event::poll(&mut fds, None);
            }
        };
        thread::Builder::new()
            .name("mounts".into())
            .spawn(watch)
            .map(drop)
            .map_err(failed)
    }
}

/// FUSE mount used by the loop device, in a separate directory.
struct Below {
    path: PathBuf,
    mount: Option<FuseMount>,
}

impl Below {
    /// Returns the mount point for this process.
    fn path() -> Result<PathBuf, CliError> {
        let dir = StateDir::open().map_err(Self::no_directory)?;
        Ok(dir.path().join(format!("{}.fuse", process_name())))
    }

    fn no_directory(error: io::Error) -> CliError {
        CliError::io("cannot create a directory for the FUSE mount", error)
    }

    fn new(
        device: &Arc<ByteDevice<Disk>>,
        args: &MountArgs,
        sender: mpsc::Sender<Event>,
    ) -> Result<Self, CliError> {
        let path = Self::path()?;
        std::fs::create_dir(&path).map_err(Self::no_directory)?;
        let mut below = Self { path, mount: None };
        let options = FuseOptions {
            path: below.path.clone(),
            name: args.url.name(),
            source: args.url.to_string(),
            // The file system already uses the page cache.
            caching: Caching::Direct,
            allow_other: false,
        };
        below.mount = Some(file::mount(device, options, sender)?);
        Ok(below)
    }

    fn file(&self) -> &Path {
        self.mount.as_ref().expect("made with it").file()
    }

    /// Continues serving the loop device while it's in use, because the file system may also be
    /// mounted elsewhere. Returns if a signal is received.
    fn wait(&self, events: &mpsc::Receiver<Event>) {
        let mount = self.mount.as_ref().expect("made with it");
        let is_busy = || matches!(mount.try_unmount(), Err(UnmountError::Busy(_)));
        let is_used = || !mount.is_ended() && is_busy();
        wait_while(is_used, |time| events.recv_timeout(time));
    }

    fn finish(mut self, device: &ByteDevice<Disk>) -> Result<(), CliError> {
        let patience = Instant::now() + RELEASE_PATIENCE;
        let mount = self.mount.take().expect("made with it");
        let unmounted = loop {
            match mount.try_unmount() {
                Ok(()) => break Ok(()),
                Err(UnmountError::Busy(_)) if Instant::now() < patience => {
                    thread::sleep(FIRST_PAUSE);
                }
                Err(error) => {
                    tracing::warn!(%error, "the loop device is still in use");
                    break mount.detach().and(Err(error));
                }
            }
        };
        // Always flush data written by users.
        file::finish(mount, device)?;
        unmounted.map_err(|error| {
            CliError::new(Exit::Busy, "the loop device was still in use")
                .because(error)
                .help("data not written back by this host is lost")
        })
    }
}

/// Waits while something is in use, or until a signal is received. `next` waits for an event with
/// this timeout.
fn wait_while(
    is_used: impl Fn() -> bool,
    mut next: impl FnMut(Duration) -> Result<Event, RecvTimeoutError>,
) {
    let mut pause = FIRST_PAUSE;
    while is_used() {
        match next(pause) {
            Ok(Event::Ended) | Err(RecvTimeoutError::Timeout) => {}
            Ok(Event::Signal) | Err(RecvTimeoutError::Disconnected) => return,
        }
        let longer = (pause * 2).min(LONGEST_PAUSE);
        if pause < longer && longer == LONGEST_PAUSE {
            tracing::warn!(
                "the file system has another mount, or is in use; serving it until it is unused, \
                 or until a second signal"
            );
        }
        pause = longer;
    }
}

impl Drop for Below {
    fn drop(&mut self) {
        // Unmount the directory before removing it.
        self.mount = None;
        let _ = std::fs::remove_dir(&self.path);
    }
}

/// Creates a loop device for the file of a disk, or for a partition.
fn attach_loop(file: &Path, disk: &Disk, partition: Option<u32>) -> Result<PathBuf, CliError> {
    let whole = make_loop(file, disk, &[])?;
    let Some(number) = partition else {
        return Ok(whole);
    };
    // Read the partition table from a loop device because it uses the sector size of the disk.
    let columns = "--output=NR,START,SECTORS";
    let args = ["--raw", "--noheadings", columns].map(OsStr::new);
    let table = run_tool("partx", &[&args[..], &[whole.as_os_str()]].concat());
    release_loop(&whole)?;
    let Some(span) = find_partition(&table?, number) else {
        let what = format!("the disk has no partition {number}");
        return Err(CliError::new(Exit::NotFound, what));
    };
    let options = [
        format!("--offset={}", span.start),
        format!("--sizelimit={}", span.end - span.start),
    ];
    make_loop(file, disk, &options)
}

/// Returns the byte range of a partition, using the output of `partx` in units of 512 bytes.
fn find_partition(table: &str, number: u32) -> Option<Range<u64>> {
    table.lines().find_map(|line| {
        let mut fields = line.split_whitespace().map(str::parse::<u64>);
        let mut next = || fields.next()?.ok();
        let (nr, start, sectors) = (next()?, next()?, next()?);
        let start = start.checked_mul(512)?;
        let end = start.checked_add(sectors.checked_mul(512)?)?;
        (nr == u64::from(number)).then_some(start..end)
    })
}

fn make_loop(file: &Path, disk: &Disk, options: &[String]) -> Result<PathBuf, CliError> {
    let sector = disk.geometry().block_size.to_string();
    let mut args: Vec<&OsStr> = ["--find", "--show", "--direct-io=on", "--sector-size"]
        .map(AsRef::as_ref)
        .to_vec();
    args.push(sector.as_ref());
    if disk.geometry().read_only {
        args.push("--read-only".as_ref());
    }
    args.extend(options.iter().map(OsStr::new));
    args.push(file.as_ref());
    run_tool("losetup", &args).map(PathBuf::from)
}

fn mount(args: &MountArgs, device: &Path, dir: &Path) -> Result<String, CliError> {
    let mut tool: Vec<&OsStr> = Vec::new();
    if let Some(fs_type) = &args.fs_type {
        tool.extend::<[&OsStr; 2]>(["-t".as_ref(), fs_type.as_ref()]);
    }
    if let Some(options) = &args.options {
        tool.extend::<[&OsStr; 2]>(["-o".as_ref(), options.as_ref()]);
    }
    if args.read_only {
        tool.push("-r".as_ref());
    }
    tool.extend([device.as_os_str(), dir.as_os_str()]);
    run_tool("mount", &tool)
}

pub(super) fn read_mounts() -> Result<Mounts, CliError> {
    Mounts::read().map_err(|e| CliError::io("cannot read the mounts", e))
}

/// Returns the error if another file system is mounted on top.
pub(super) fn covered(path: &Path) -> CliError {
    let what = format!("another file system is mounted on {}", path.display());
    CliError::new(Exit::Busy, what).help("unmount it first")
}

/// Unmounts the topmost file system at a path.
pub(super) fn unmount(dir: &Path, lazy: bool) -> Result<(), CliError> {
    let mut args: Vec<&OsStr> = vec![dir.as_ref()];
    if lazy {
        args.insert(0, "-l".as_ref());
    }
    run_tool("umount", &args).map(drop).map_err(|mut error| {
        if error.causes().iter().any(|cause| cause.contains("busy")) {
            error.exit = Exit::Busy;
        }
        error
    })
}

/// Fails if there is already a mount at this path. This would be hidden by the new mount, and
/// unmounting could remove the wrong one.
pub(super) fn check_vacant(path: &Path, global: &Global) -> Result<(), CliError> {
    serve::check_vacant(path, global)?;
    let mounts = read_mounts()?;
    let path = path.canonicalize().unwrap_or_else(|_| path.to_owned());
    match mounts.top(&path) {
        None => Ok(()),
        Some(_) => {
            let what = format!("{} is already a mount point", path.display());
            Err(CliError::new(Exit::Busy, what).help(
                "use another path, or unmount it first; use `umount -l` after a crash of riser",
            ))
        }
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;

    #[test]
    fn partition_spans_are_read_from_partx() {
        let table = "1 2048 8192\n2 10240 4\n128 18446744073709551615 2\n";
        assert_eq!(find_partition(table, 1), Some(1 << 20..5 << 20));
        assert_eq!(find_partition(table, 2), Some(5 << 20..(5 << 20) + 2048));
        assert_eq!(find_partition(table, 3), None);
        assert_eq!(find_partition(table, 128), None, "beyond any disk");
        assert_eq!(find_partition("", 1), None);
    }

    #[test]
    fn busy_mount_is_served_until_signal() {
        let day = Duration::from_secs(86_400);
        let waited = Cell::new(Duration::ZERO);
        let next = |time: Duration| {
            assert!(time <= LONGEST_PAUSE, "its end is not seen in time");
            waited.set(waited.get() + time);
            match waited.get() {
                now if now >= day => Ok(Event::Signal),
                // The event for the mount may be delayed.
                now if now < LONGEST_PAUSE => Ok(Event::Ended),
                _ => Err(RecvTimeoutError::Timeout),
            }
        };
        wait_while(|| true, next);
        assert!(waited.get() >= day);
        // This also returns if it's no longer in use.
        waited.set(Duration::ZERO);
        let hour = Duration::from_secs(3600);
        wait_while(|| waited.get() < hour, next);
        assert!(waited.get() >= hour && waited.get() < day);
    }
}
