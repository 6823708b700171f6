//! `riser mount`: the file system on a logical unit, through FUSE and a loop device.
//!
//! ```text
//! logical unit ── FUSE file ── loop device (direct I/O) ── file system on DIR
//! ```
//!
//! The loop device frees itself when the file system is unmounted, by any program; the process
//! that serves the file sees that, unmounts the file and logs out. So `umount DIR` undoes
//! everything. A file system that is mounted elsewhere too, as with `mount --bind`, is served until
//! it is unmounted there.

use std::ffi::OsStr;
use std::fs::File;
use std::io;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread;
use std::time::{Duration, Instant};

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
use crate::block::{BlockDevice, ByteDevice};
use crate::fuse::{Caching, FuseMount, FuseOptions, UnmountError};
use crate::mounts::{self, MountId, Mounts};

/// Longest wait at the end for the kernel to release the file, which it does when the loop device
/// is free.
const RELEASE_PATIENCE: Duration = Duration::from_secs(30);

/// First time between two looks at whether the loop device is free, which doubles with each.
const FIRST_PAUSE: Duration = Duration::from_millis(10);

/// Longest such time.
const LONGEST_PAUSE: Duration = Duration::from_secs(1);

pub(super) fn run(args: &MountArgs, global: &Global) -> Result<(), CliError> {
    if !rustix::process::geteuid().is_root() {
        return Err(
            CliError::new(Exit::Usage, "mounting a file system needs root")
                .help("`riser attach --fuse` makes the logical unit a file without root"),
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
            .map_err(|e| CliError::io(format!("{} cannot be resolved", args.dir.display()), e))?;
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
    // The end of the FUSE mount is ours, not an event.
    let (ignored, _) = mpsc::channel();
    let below = Below::new(&device, args, ignored)?;
    let loop_device = attach_loop(below.file(), disk, args.partition)?;
    let mounted = mount(args, &loop_device, &dir).map_err(|error| explain(error, args, disk));
    // The loop device is released with its last user, the file system, or immediately if nothing
    // uses it.
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
                ready.end();
                below.wait(events);
            }
            Err(_) => mounted.give_up(),
        }
        shown
    });
    // Listed until then: if this process is killed, the next one cleans up.
    below.finish(&device)?;
    result
}

/// The failure of mount(8), with a reason that it does not know.
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
                "to make one, which erases the disk: `riser attach {url} --fuse DIR`, \
                 `mkfs.ext4 DIR/{}`, `riser detach DIR`",
                url.name()
            )),
        Ok(Some(what)) if what.starts_with("a partition table") => {
            CliError::new(error.exit, format!("{url} carries {what}"))
                .because(cause)
                .help("--partition N mounts one of its partitions")
        }
        _ => error,
    }
}

/// The file system that was mounted.
struct Mounted {
    dir: PathBuf,
    id: MountId,
}

impl Mounted {
    /// The one that is on a directory now.
    fn find(dir: &Path) -> Result<Self, CliError> {
        let mounts = read_mounts().inspect_err(|_| {
            // It was mounted just now, so it is on top without a look.
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

    /// Unmounts it. What others have mounted over it is not ours.
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

    /// Waits until it is unmounted, by a signal to us or by any user.
    fn wait(&self, events: &mpsc::Receiver<Event>) {
        while events.recv() == Ok(Event::Signal) {
            // The end of the mount is an event of its own.
            if let Err(error) = self.unmount(false) {
                tracing::warn!(%error, "the file system stays mounted");
            }
        }
    }

    /// Unmounts one that no list names, even if it is in use, so that it does not stay.
    fn give_up(&self) {
        if let Err(error) = self.unmount(false).or_else(|_| self.unmount(true)) {
            tracing::warn!(%error, "the file system stays mounted");
        }
    }

    /// Sends an event when it has gone.
    fn watch(&self, sender: mpsc::Sender<Event>) -> Result<(), CliError> {
        let failed = |e| CliError::io("cannot watch the mounts", e);
        // Before the list is read: what changes after that ends the first wait.
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
                // Woken for nothing, it looks for nothing.
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

/// The FUSE mount below, on a directory of its own.
struct Below {
    path: PathBuf,
    mount: Option<FuseMount>,
}

impl Below {
    /// Path of the mount of this process.
    fn path() -> Result<PathBuf, CliError> {
        let dir = StateDir::open().map_err(Self::no_directory)?;
        Ok(dir.path().join(format!("{}.fuse", process_name())))
    }

    fn no_directory(error: io::Error) -> CliError {
        CliError::io("cannot make a directory for the FUSE mount", error)
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
            // The file system has the page cache.
            caching: Caching::Direct,
            allow_other: false,
        };
        below.mount = Some(file::mount(device, options, sender)?);
        Ok(below)
    }

    fn file(&self) -> &Path {
        self.mount.as_ref().expect("made with it").file()
    }

    /// Serves on while the loop device is in use: its file system may be mounted elsewhere too. A
    /// signal ends that.
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
        // What was written is flushed in any case.
        file::finish(mount, device)?;
        unmounted.map_err(|error| {
            CliError::new(Exit::Busy, "the loop device was still in use")
                .because(error)
                .help("what this host had not written back is lost")
        })
    }
}

/// Waits while something is in use, but not beyond a signal. `next` waits for an event for the time
/// that it is given.
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
                "the file system is mounted elsewhere too, or in use; it is served until that ends, or another signal"
            );
        }
        pause = longer;
    }
}

impl Drop for Below {
    fn drop(&mut self) {
        // The mount first: it is over the directory.
        self.mount = None;
        let _ = std::fs::remove_dir(&self.path);
    }
}

/// Makes a loop device of a disk's file, or of a partition of it.
fn attach_loop(file: &Path, disk: &Disk, partition: Option<u32>) -> Result<PathBuf, CliError> {
    let whole = make_loop(file, disk, &[])?;
    let Some(number) = partition else {
        return Ok(whole);
    };
    // The table is read from a loop device, which has the sector size of the disk.
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

/// Bytes of a partition, from a table of `partx` in units of 512 bytes.
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

/// Refusal to unmount a file system that is not the topmost one at its path.
pub(super) fn covered(path: &Path) -> CliError {
    let what = format!("something else is mounted on {}", path.display());
    CliError::new(Exit::Busy, what).help("unmount that first")
}

/// Unmounts what is topmost at a path.
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

/// Refuses a path at which something is mounted, an attachment or anything else: it would be
/// hidden, and an unmount would take the wrong one.
pub(super) fn check_vacant(path: &Path, global: &Global) -> Result<(), CliError> {
    serve::check_vacant(path, global)?;
    let mounts = read_mounts()?;
    let path = path.canonicalize().unwrap_or_else(|_| path.to_owned());
    match mounts.top(&path) {
        None => Ok(()),
        Some(_) => {
            let what = format!("something is mounted on {} already", path.display());
            Err(CliError::new(Exit::Busy, what).help(
                "choose another path, or unmount it first; after a crash of riser, with `umount -l`",
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
    fn what_is_in_use_is_served_until_a_signal_however_long_that_takes() {
        let day = Duration::from_secs(86_400);
        let waited = Cell::new(Duration::ZERO);
        let next = |time: Duration| {
            assert!(time <= LONGEST_PAUSE, "its end is not seen in time");
            waited.set(waited.get() + time);
            match waited.get() {
                now if now >= day => Ok(Event::Signal),
                // The end of the mount may come late.
                now if now < LONGEST_PAUSE => Ok(Event::Ended),
                _ => Err(RecvTimeoutError::Timeout),
            }
        };
        wait_while(|| true, next);
        assert!(waited.get() >= day);
        // The end of its use ends the wait, too.
        waited.set(Duration::ZERO);
        let hour = Duration::from_secs(3600);
        wait_while(|| waited.get() < hour, next);
        assert!(waited.get() >= hour && waited.get() < day);
    }
}
