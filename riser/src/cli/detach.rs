//! `riser detach`.

use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use riser_exports::mounts::{self, MountId, MountUser, Mounts};
use riser_exports::{fuse, ublk};
use riser_initiator::engine::{LinkState, Pending};
use rustix::process::{Pid, Signal};
use serde::Serialize;

use super::args::{DetachArgs, Global};
use super::exit::{CliError, Exit};
use super::state::{Attachment, Export, Phase, StateDir};
use super::{lock, mount, output};

/// Maximum time for a process to exit cleanly with `--force`. If the target responds, this includes
/// a flush.
const MERCY: Duration = Duration::from_secs(8);

/// Maximum time if the target doesn't respond.
const SHORT_MERCY: Duration = Duration::from_secs(1);

/// Time before reading the list again if a target is listed as down.
const SECOND_LOOK: Duration = Duration::from_millis(500);

/// Maximum time for an NBD server to detect that a client has disconnected.
const CLIENT_PATIENCE: Duration = Duration::from_millis(500);

/// Maximum number of users of a mount to report.
const MAX_USERS: usize = 4;

#[derive(Serialize)]
struct Detached {
    #[serde(flatten)]
    attachment: Attachment,
    /// Describes data that may be lost, and the reason.
    #[serde(skip_serializing_if = "Option::is_none")]
    lost: Option<String>,
}

pub(super) fn run(args: &DetachArgs, global: &Global) -> Result<(), CliError> {
    let mut attachment = find(args, global)?;
    if attachment.is_over() {
        return check_failure(&attachment, global);
    }
    let is_down =
        |a: &Attachment| a.link.as_ref().map(|link| link.state) == Some(LinkState::Reconnecting);
    if is_down(&attachment) && !args.force {
        // The target may have reconnected and its process is about to record this.
        thread::sleep(SECOND_LOOK);
        let now = find(args, global)?;
        if !is_same(&attachment, &now) {
            return Err(not_found(args));
        }
        attachment = now;
    }
    let was_alive = attachment.is_alive();
    let link = attachment.link.as_ref().filter(|_| was_alive);
    let down = link.filter(|link| link.state == LinkState::Reconnecting);
    let lost = down.map(|link| show_lost(link.pending, &attachment.export));
    if let (Some(link), Some(lost), false) = (down, &lost, args.force) {
        let error = link.last_error.clone().unwrap_or_default();
        let what = format!("cannot reach {}", attachment.url);
        let help = format!("{lost}; use --force to detach it anyway");
        return Err(CliError::new(Exit::Timeout, what).because(error).help(help));
    }
    if !args.force {
        check_idle(&attachment)?;
    }
    let unmounting = start_detach(&attachment, args.force)?;
    let mercy = if lost.is_some() { SHORT_MERCY } else { MERCY };
    // Make sure we can still see a killed process exit before the timeout.
    let mercy = args.force.then(|| mercy.min(global.timeout / 2));
    let is_killed = wait(&attachment, unmounting, mercy, global.timeout)?;
    // A block device remains after its process was killed. Remove it, or queued requests would wait
    // for another process.
    if let Export::Ublk { number, device, .. } = &attachment.export
        && is_killed
        && attachment.waits()
    {
        remove(*number, device)?;
    }
    if was_alive && down.is_none() && !is_killed {
        check_failure(&attachment, global)?;
    }
    // Listing attachments cleans up after a killed process.
    let _ = StateDir::open().and_then(|dir| dir.with_patience(global.timeout).list());
    if args.force {
        // The reason is already known and will be reported below.
        let _ = StateDir::open().and_then(|dir| dir.remove_failed(&attachment));
    }
    let killed = || "the process was killed: writes that were not flushed may be lost".to_owned();
    let lost = match lost {
        Some(lost) => Some(format!("the target could not be reached: {lost}")),
        None => is_killed.then(killed),
    };
    print(&Detached { attachment, lost }, global)
}

fn find(args: &DetachArgs, global: &Global) -> Result<Attachment, CliError> {
    let found = StateDir::open()
        .and_then(|dir| dir.with_patience(global.timeout).find(&args.what))
        .map_err(|e| CliError::io("cannot read the list of attachments", e))?;
    found.ok_or_else(|| not_found(args))
}

fn not_found(args: &DetachArgs) -> CliError {
    CliError::new(Exit::NotFound, format!("no attachment `{}`", args.what))
        .help("use `riser list` to list attachments")
}

/// Returns whether an ID still refers to the same attachment, either with the same process or after
/// it was taken over.
fn is_same(before: &Attachment, now: &Attachment) -> bool {
    (before.pid, before.started) == (now.pid, now.started)
        || (&before.url, before.export.path()) == (&now.url, now.export.path())
}

/// Thread for a forced unmount.
type Unmounting = JoinHandle<Result<(), CliError>>;

/// Starts detaching an attachment.
fn start_detach(attachment: &Attachment, force: bool) -> Result<Option<Unmounting>, CliError> {
    match &attachment.export {
        // Unmounting stops the process unless the file is in use. With `--force`, a signal is sent
        // instead, but this still fails if there is another mount on top.
        Export::Fuse { path, id, .. }
            if is_on_top(&mount::read_mounts()?, path, *id)? && !force =>
        {
            fuse::unmount(path, false)?;
            // There may be copies of the mount in other namespaces, so also notify the process.
            signal(attachment, Signal::TERM)?;
        }
        // A second signal would stop waiting for users.
        Export::Fuse { .. } if attachment.phase == Phase::Ending && !force => {}
        Export::Mount { path, id, .. } => {
            if !is_on_top(&mount::read_mounts()?, path, *id)? {
                // The mount is either in another namespace or was already unmounted, and only the
                // process knows which of these is the case. If it was unmounted, a signal would
                // stop waiting for users.
                if force || !is_unmounted(attachment.pid, *id) {
                    signal(attachment, Signal::TERM)?;
                }
                return Ok(None);
            }
            if force {
                // A lazy unmount also writes data, and may wait for the target until the process
                // has exited.
                let path = path.clone();
                return Ok(Some(thread::spawn(move || mount::unmount(&path, true))));
            }
            mount::unmount(path, false)?;
        }
        Export::Ublk { number, device, .. } if !attachment.is_alive() => remove(*number, device)?,
        Export::Fuse { .. } | Export::Nbd { .. } | Export::Ublk { .. } => {
            signal(attachment, Signal::TERM)?;
            if force && attachment.phase != Phase::Ending {
                // The second signal stops waiting for users of the disk. A third signal would exit
                // the process without the final flush.
                signal(attachment, Signal::INT)?;
            }
        }
    }
    Ok(None)
}

/// Fails if a block device or NBD export is in use. For a mount, the unmount will fail.
fn check_idle(attachment: &Attachment) -> Result<(), CliError> {
    let what = match &attachment.export {
        Export::Ublk { device, .. } if ublk::is_in_use(device) => {
            format!("{} is in use", device.display())
        }
        Export::Nbd { socket, .. } => match count_clients(socket) {
            0 => return Ok(()),
            1 => format!("{} has a client connected", socket.display()),
            n => format!("{} has {n} clients connected", socket.display()),
        },
        _ => return Ok(()),
    };
    Err(CliError::new(Exit::Busy, what).help("disconnect it first, or detach it with --force"))
}

/// Returns the number of clients that remain connected to a socket in this network namespace.
fn count_clients(socket: &Path) -> usize {
    let until = Instant::now() + CLIENT_PATIENCE;
    loop {
        let sockets = fs::read("/proc/net/unix").unwrap_or_default();
        let clients = connected(&sockets, socket);
        if clients == 0 || Instant::now() >= until {
            return clients;
        }
        thread::sleep(Duration::from_millis(10));
    }
}

/// Returns the number of connections that were accepted by a server at this path, using the
/// contents of `/proc/net/unix`:
///
/// ```text
/// Num       RefCount Protocol Flags    Type St Inode Path
/// 0000000000000000: 00000003 00000000 00000000 0001 03 20481 /run/nbd
/// ```
fn connected(sockets: &[u8], path: &Path) -> usize {
    let is_connected = |line: &[u8]| {
        let mut fields = line.splitn(8, |byte| *byte == b' ').skip(5);
        let state = fields.next();
        // Inode numbers are padded with spaces.
        let at = fields.nth(1).map(<[u8]>::trim_ascii_start);
        let at = at.and_then(|rest| match rest.iter().position(|byte| *byte == b' ') {
            Some(blank) if rest[..blank].iter().all(u8::is_ascii_digit) => rest.get(blank + 1..),
            _ => Some(rest),
        });
        state == Some(b"03") && at == Some(path.as_os_str().as_bytes())
    };
    sockets
        .split(|byte| *byte == b'\n')
        .filter(|line| is_connected(line))
        .count()
}

/// Returns whether the mount of an attachment is the topmost mount at its path. If it was replaced
/// by another mount, this doesn't belong to us, even if it is a bind mount of the same file system.
///
/// # Errors
/// Fails if there is another mount on top.
fn is_on_top(mounts: &Mounts, path: &Path, id: Option<MountId>) -> Result<bool, CliError> {
    let Some(id) = id else {
        return Ok(false);
    };
    match mounts.top(path) {
        Some(mount) if mount.id == id => Ok(true),
        Some(_) if mounts.has(id) => Err(mount::covered(path)),
        _ => Ok(false),
    }
}

/// Returns whether the mount was removed from the namespace of its process.
fn is_unmounted(pid: u32, id: Option<MountId>) -> bool {
    let is_gone = |id| Mounts::of_process(pid).is_ok_and(|mounts| !mounts.has(id));
    id.is_some_and(is_gone)
}

fn remove(number: u32, device: &Path) -> Result<(), CliError> {
    ublk::remove(number).map_err(|e| CliError::io(format!("cannot remove {}", device.display()), e))
}

/// Waits until the process of an attachment has exited. If `mercy` is set, it's killed after this
/// time. Returns whether it was killed.
fn wait(
    attachment: &Attachment,
    mut unmounting: Option<Unmounting>,
    mercy: Option<Duration>,
    timeout: Duration,
) -> Result<bool, CliError> {
    let begin = Instant::now();
    let mut is_killed = false;
    while attachment.is_alive() {
        if let Some(unmounting) = unmounting.take_if(|thread| thread.is_finished()) {
            join(unmounting)?;
        }
        let waited = begin.elapsed();
        if !is_killed && mercy.is_some_and(|mercy| waited >= mercy) {
            // The process is waiting for a target that doesn't respond, or for a program that uses
            // the file.
            is_killed = true;
            signal(attachment, Signal::KILL)?;
        }
        if waited >= timeout {
            let what = format!("process {} still serves {}", attachment.pid, attachment.url);
            let help = match is_killed {
                true => "the process was killed, but has not exited yet".to_owned(),
                false => format!("{}; use --force to stop it", show_users(attachment)),
            };
            return Err(CliError::new(Exit::Timeout, what).help(help));
        }
        thread::sleep(Duration::from_millis(5));
    }
    // After the process has exited, the unmount doesn't wait for the target.
    unmounting.map_or(Ok(()), join)?;
    Ok(is_killed)
}

fn join(unmounting: Unmounting) -> Result<(), CliError> {
    let panicked = |_| Err(CliError::new(Exit::Failure, "the unmount panicked"));
    unmounting.join().unwrap_or_else(panicked)
}

/// Describes known users of an attachment that was detached and is still being served.
fn show_users(attachment: &Attachment) -> String {
    let id = match &attachment.export {
        Export::Fuse { id, .. } | Export::Mount { id, .. } => *id,
        Export::Nbd { .. } | Export::Ublk { .. } => None,
    };
    let users = id.map_or_else(Vec::new, |id| mounts::users(id, attachment.pid));
    if users.is_empty() {
        return "it is waiting for its target, or for a user of the disk".to_owned();
    }
    let shown: Vec<String> = users.iter().take(MAX_USERS).map(show_user).collect();
    let more = match users.len().saturating_sub(MAX_USERS) {
        0 => String::new(),
        n => format!(" and {n} more"),
    };
    format!("it is in use: {}{more}", shown.join(", "))
}

fn show_user(user: &MountUser) -> String {
    let pid = user.pid;
    let process = match lock::command(pid) {
        Some(command) => format!("process {pid} ({command})"),
        None => format!("process {pid}"),
    };
    match &user.mounted {
        None => format!("{process} has it open"),
        Some(path) => {
            let path = output::printable(&path.display());
            format!("mounted on {path} in the mount namespace of {process}")
        }
    }
}

/// Fails if an attachment was not stopped cleanly, and removes its entry.
fn check_failure(attachment: &Attachment, global: &Global) -> Result<(), CliError> {
    let failure = StateDir::open()
        .and_then(|dir| dir.with_patience(global.timeout).remove_failed(attachment))
        .map_err(|e| CliError::io("cannot read the list of attachments", e))?;
    let Some(failure) = failure else {
        return Ok(());
    };
    let what = format!("{} was detached with an error", attachment.url);
    let log = attachment.log.as_ref().filter(|log| log.exists());
    let log = log.map_or_else(String::new, |log| {
        format!("; see the log {}", log.display())
    });
    let help = format!("writes that were not flushed may be lost{log}");
    Err(CliError::new(Exit::Failure, what)
        .because(failure)
        .help(help))
}

fn print(detached: &Detached, global: &Global) -> Result<(), CliError> {
    output::result(detached, global, |out| {
        let Detached { attachment, lost } = detached;
        writeln!(
            out,
            "{}: {} is detached from {}",
            attachment.id,
            attachment.url,
            attachment.export.path().display()
        )?;
        match lost {
            Some(lost) => writeln!(out, "{lost}"),
            None => Ok(()),
        }
    })
}

/// Describes the data that will be lost if the target of the session can't be reached.
fn show_lost(pending: Option<Pending>, export: &Export) -> String {
    // This is not reported by older versions.
    let Some(pending) = pending else {
        return "the lost data is unknown".to_owned();
    };
    let operations = match pending.operations {
        0 => None,
        1 => Some("1 operation fails".to_owned()),
        n => Some(format!("{n} operations fail")),
    };
    let cache = pending
        .unflushed
        .then(|| "acknowledged writes that were not flushed may be lost".to_owned());
    // The amount of data is only known to the kernel.
    let has_cache = matches!(export, Export::Mount { .. } | Export::Ublk { .. });
    let host = has_cache.then(|| "data not written back by this host is lost".to_owned());
    let parts: Vec<String> = operations.into_iter().chain(cache).chain(host).collect();
    match parts.is_empty() {
        true => "nothing is lost".to_owned(),
        false => parts.join(", and "),
    }
}

/// Sends a signal to the process that serves an attachment.
fn signal(attachment: &Attachment, signal: Signal) -> Result<(), CliError> {
    let pid = i32::try_from(attachment.pid).ok().and_then(Pid::from_raw);
    let result = match pid {
        Some(pid) => rustix::process::kill_process(pid, signal),
        None => Err(rustix::io::Errno::SRCH),
    };
    match result {
        // The process has already exited.
        Ok(()) | Err(rustix::io::Errno::SRCH) => Ok(()),
        Err(e) => Err(CliError::io(
            format!("cannot signal process {}", attachment.pid),
            e.into(),
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::super::state::fixture;
    use super::*;

    #[test]
    fn bind_mount_on_top_is_distinguished() {
        let path = Path::new("/mnt/a");
        let own = "40 22 7:0 / /mnt/a rw - ext4 /dev/loop0 rw\n";
        let bind = "41 40 7:0 / /mnt/a rw - ext4 /dev/loop0 rw\n";
        let elsewhere = "42 22 7:0 / /mnt/b rw - ext4 /dev/loop0 rw\n";
        let of = |lines: &[&str]| Mounts::of(lines.concat().as_bytes());
        let id = of(&[own]).top(path).map(|mount| mount.id);
        let is_on_top = |lines: &[&str]| is_on_top(&of(lines), path, id);
        assert!(is_on_top(&[own, elsewhere]).unwrap());
        assert_eq!(is_on_top(&[own, bind]).unwrap_err().exit, Exit::Busy);
        // After unmounting, the remaining mount is not ours.
        assert!(!is_on_top(&[bind]).unwrap());
        assert!(!is_on_top(&[elsewhere]).unwrap());
    }

    #[test]
    fn connected_nbd_clients_are_counted() {
        let sockets = b"Num       RefCount Protocol Flags    Type St Inode Path\n\
            0000000000000000: 00000002 00000000 00010000 0001 01 20480 /run/my nbd\n\
            0000000000000000: 00000003 00000000 00000000 0001 03 20481 /run/my nbd\n\
            0000000000000000: 00000003 00000000 00000000 0001 03    17 /run/my nbd\n\
            0000000000000000: 00000003 00000000 00000000 0001 03 20483\n\
            0000000000000000: 00000003 00000000 00000000 0001 03 20484 /run/nbd\n";
        assert_eq!(connected(sockets, Path::new("/run/my nbd")), 2);
        assert_eq!(connected(sockets, Path::new("/run/nbd")), 1);
        assert_eq!(connected(sockets, Path::new("/run/other")), 0);
        assert_eq!(connected(b"", Path::new("/run/nbd")), 0);
    }

    #[test]
    fn reused_id_is_not_same_attachment() {
        let before = Attachment {
            id: "0".into(),
            url: "srp://host/0".into(),
            pid: 7,
            started: 70,
            export: Export::Ublk {
                number: 0,
                device: "/dev/ublkb0".into(),
                port: 0,
                guid: None,
                properties: std::collections::BTreeMap::new(),
            },
            ..fixture::attachment("".as_ref())
        };
        let mut now = before.clone();
        now.capacity *= 2;
        assert!(is_same(&before, &now), "of the same process");
        (now.pid, now.started) = (8, 80);
        assert!(is_same(&before, &now), "taken over");
        now.url = "srp://host/1".into();
        assert!(!is_same(&before, &now));
        now.pid = 7;
        assert!(!is_same(&before, &now), "another process with that id");
    }
}
