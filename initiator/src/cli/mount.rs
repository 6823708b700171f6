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
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
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
use super::port::ExportPort;
use super::serve::{self, Event};
use super::state::{Export, StateDir};
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
        let mut port = serve::export_port(&dir, &args.url)?;
        let mut link = args.link.clone();
        link.port = port.as_ref().map(ExportPort::port);
        link.guid = port.as_ref().and_then(ExportPort::noted_guid);
        link.recovers = port.as_ref().is_some_and(ExportPort::is_inherited);
        link.noted = port.as_ref().and_then(ExportPort::noted_cache);
        let disk = Arc::new(Disk::open(&args.url, &link, access)?);
        ready.port = serve::note_port(&mut port, &disk)?;
        let vacant = guard::check_mounted(&disk, global);
        if vacant.is_err() {
            disk.close();
            if let Some(port) = port {
                port.release();
            }
            return vacant;
        }
        let device = Arc::new(ByteDevice::new(disk.clone()));
        // The end of the FUSE mount is ours, not an event.
        let (ignored, _) = mpsc::channel();
        let below = Below::new(&device, args, ignored)?;
        let loop_device = attach_loop(below.file(), &disk)?;
        let mounted = mount(args, &loop_device, &dir);
        // From here on the loop device goes with its last user, the file system, or at once if it
        // has none.
        let freed = run_tool("losetup", &["-d".as_ref(), loop_device.as_ref()]);
        let result = mounted.and_then(|_| {
            let served = Mounted::find(&dir).and_then(|mounted| {
                let export = Export::Mount {
                    path: dir,
                    device: loop_device,
                    fuse: below.path.clone(),
                    id: Some(mounted.id),
                };
                let shown = freed
                    .and_then(|_| mounted.watch(sender.clone()))
                    .and_then(|()| ready.report(&args.url, &disk, export));
                match &shown {
                    Ok(_) => {
                        mounted.wait(events);
                        below.wait(events);
                    }
                    Err(_) => mounted.give_up(),
                }
                shown
            });
            // Listed until then: a killed process leaves this for others to undo.
            below.finish(&device)?;
            served.map(drop)
        });
        disk.close();
        if let Some(port) = port {
            port.release();
        }
        result
    })
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
    fn new(
        device: &Arc<ByteDevice<Disk>>,
        args: &MountArgs,
        sender: mpsc::Sender<Event>,
    ) -> Result<Self, CliError> {
        let path = StateDir::open()
            .map(|dir| dir.path().join(format!("{}.fuse", std::process::id())))
            .and_then(|path| std::fs::create_dir(&path).map(|()| path))
            .map_err(|e| CliError::io("cannot make a directory for the FUSE mount", e))?;
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

fn attach_loop(file: &Path, disk: &Disk) -> Result<PathBuf, CliError> {
    let sector = disk.geometry().block_size.to_string();
    let mut args: Vec<&OsStr> = ["--find", "--show", "--direct-io=on", "--sector-size"]
        .map(AsRef::as_ref)
        .to_vec();
    args.push(sector.as_ref());
    if disk.geometry().read_only {
        args.push("--read-only".as_ref());
    }
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

/// Runs a tool of the system, and gives what it printed.
fn run_tool(name: &str, args: &[&OsStr]) -> Result<String, CliError> {
    let output = Command::new(name)
        .args(args)
        .env("LC_ALL", "C")
        .stdin(Stdio::null())
        .output()
        .map_err(|e| CliError::io(format!("cannot run {name}"), e))?;
    if !output.status.success() {
        let said = String::from_utf8_lossy(&output.stderr).trim().to_owned();
        return Err(CliError::new(Exit::Failure, format!("{name} failed")).because(said));
    }
    Ok(String::from_utf8_lossy(&output.stdout).trim().to_owned())
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
