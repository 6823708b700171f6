//! Serves attachments, either in the foreground or using a background process.
//!
//! The background process runs this program again using the same arguments and
//! `--foreground --supervised LOG`, in a separate session. Passwords are not included in the
//! arguments, but passed using standard input. The process prints a single line of JSON when the
//! attachment is ready, or if it has failed, and the parent process waits for this line. The
//! attachment is stopped by a signal (`SIGTERM`, `SIGINT`, `SIGHUP`), or by unmounting.

use std::ffi::OsString;
use std::io::{self, BufRead, BufReader, Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, mpsc};
use std::thread;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use riser_block::BlockDevice;
use riser_initiator::engine::{SessionReport, SessionStatus};
use riser_initiator::url::TargetUrl;
use riser_initiator::url::{SECRET_ENV, Secrets};
use rustix::process::{Pid, Signal};
use sd_notify::NotifyState;
use serde::{Deserialize, Serialize};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator::Signals;

use super::address::Address;
use super::args::{ConnectOptions, Global, ServeArgs};
use super::disk::{Access, Disk};
use super::exit::{Cause, CliError, Exit};
use super::guard;
use super::log;
use super::output;
use super::port::{ExportPort, PortEntry};
use super::process;
use super::state::{
    Attachment, Export, LinkEntry, Phase, Registration, StateDir, process_name, process_start,
};
use super::units;

/// Minimum default timeout for an operation of an export, including reconnections. After an error,
/// a file system in the kernel can't be used, so it's better to wait for longer.
const OPERATION: Duration = Duration::from_secs(60);

/// Time before a state that could not be recorded is recorded again. Until then, a process that takes
/// over from this process does not know a redirect.
const RETRY: Duration = Duration::from_secs(1);

/// Additional time that the parent process waits for the background process.
const SLACK: Duration = Duration::from_secs(10);

/// Reason for stopping an attachment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Event {
    /// A signal was received.
    Signal,
    /// The attachment was unmounted and is no longer in use, or an error has occurred.
    Ended,
}

#[derive(Serialize, Deserialize)]
enum Outcome {
    Attached(Attachment),
    Failed {
        exit: u8,
        what: String,
        causes: Vec<String>,
        help: Option<String>,
    },
}

/// Runs the process of an attachment. `work` receives the channel for events, and must report when
/// the attachment is ready.
pub(super) fn run(
    args: &ServeArgs,
    global: &Global,
    work: impl FnOnce(
        &mpsc::Receiver<Event>,
        &mpsc::Sender<Event>,
        &mut Ready<'_>,
    ) -> Result<(), CliError>,
) -> Result<(), CliError> {
    if !args.foreground {
        let attachment = in_background(args, global)?;
        return print(&attachment, global);
    }
    process::abort_on_panic();
    process::serve_without_reclaim();
    if args.supervised.is_some() {
        // This can only fail if we already are the leader of a process group, which is sufficient.
        let _ = rustix::process::setsid();
    }
    let (sender, events) = mpsc::channel();
    let mut ready = Ready {
        args,
        global,
        port: None,
        registration: None,
        reported: false,
    };
    let result = watch_signals(sender.clone()).and_then(|()| work(&events, &sender, &mut ready));
    if let (Some(registration), Err(error), true) =
        (ready.registration.take(), &result, ready.reported)
    {
        // `riser detach` waits until this process has exited, and then reads the reason.
        if let Err(error) = registration.fail(error.to_line()) {
            tracing::error!(%error, "cannot record the failure");
        }
    }
    if let Some(log) = &args.supervised {
        match &result {
            Err(error) if !ready.reported => report(&Outcome::Failed {
                exit: error.exit.into(),
                what: error.what.clone(),
                causes: error.causes(),
                help: error.help.clone(),
            })?,
            // The log isn't needed if there was no error.
            Ok(()) if args.log_file.is_none() => log::remove(log),
            _ => {}
        }
    }
    result
}

fn watch_signals(sender: mpsc::Sender<Event>) -> Result<(), CliError> {
    let failed = |e| CliError::io("cannot handle signals", e);
    let mut signals = Signals::new([SIGTERM, SIGINT, SIGHUP]).map_err(failed)?;
    thread::Builder::new()
        .name("signals".into())
        .spawn(move || {
            let mut seen = 0;
            for signal in signals.forever() {
                seen += 1;
                // If the signal is repeated, the user doesn't want to wait.
                if seen > 2 || sender.send(Event::Signal).is_err() {
                    std::process::exit(128 + signal);
                }
                // Log this last, so that a slow log doesn't cause a delay.
                tracing::info!(signal, "received a signal to stop");
            }
        })
        .map(drop)
        .map_err(failed)
}

/// Adds the attachment of this process to the list, and reports when it is ready.
pub(super) struct Ready<'a> {
    args: &'a ServeArgs,
    global: &'a Global,
    /// File of the initiator port, unless this is stored in the list of attachments.
    pub(super) port: Option<PortEntry>,
    registration: Option<Registration>,
    reported: bool,
}

impl Ready<'_> {
    /// Reserves the logical unit and path of an attachment by adding it to the list. If `of` is
    /// set, replaces the entry with this ID.
    ///
    /// # Errors
    /// Fails if another attachment has the same path, or uses the unit in a way that conflicts.
    pub(super) fn claim(
        &mut self,
        address: &Address,
        disk: &Disk,
        export: Export,
        of: Option<&str>,
    ) -> Result<(), CliError> {
        let failed = |e| CliError::io("cannot record the attachment", e);
        let attachment = self.starting(address, disk, export);
        let dir = StateDir::open().map_err(failed)?;
        let dir = dir.with_patience(self.global.timeout);
        let list = dir.locked().map_err(failed)?;
        let listing = list.scan().map_err(failed)?;
        if of.is_none() {
            let path = attachment.export.path();
            let is_there = |a: &&Attachment| !a.is_over() && a.export.is_named(path);
            if let Some(other) = listing.attachments.iter().find(is_there) {
                return Err(occupied(path, other));
            }
        }
        if !self.args.shared {
            guard::check_unused(&attachment, &listing)?;
        }
        let registration = match of {
            Some(id) => list.replace(id, attachment),
            None => list.register(attachment),
        };
        let registration = registration.map_err(failed)?;
        // Start watching the session after adding the entry, because this is updated on the first
        // change.
        if let Some(status) = disk.watch() {
            watch_link(status, registration.link(), self.port.clone())?;
        }
        self.registration = Some(registration);
        Ok(())
    }

    fn starting(&self, address: &Address, disk: &Disk, export: Export) -> Attachment {
        let pid = std::process::id();
        let geometry = disk.geometry();
        let since = SystemTime::now().duration_since(UNIX_EPOCH);
        let report = disk.watch().map(|status| status.report());
        Attachment {
            id: String::new(),
            url: address.to_string(),
            pid,
            started: process_start(pid).unwrap_or(0),
            since: since.map_or(0, |d| d.as_secs()),
            phase: Phase::Starting,
            failure: None,
            export,
            capacity: geometry.capacity,
            block_size: geometry.block_size,
            read_only: geometry.read_only,
            unit: disk.unit(),
            device: disk.device(),
            protection: disk.protection(),
            log: self.args.supervised.clone(),
            link: report.as_ref().map(|report| report.link.clone()),
            cache: report.as_ref().and_then(|report| report.cache),
            was_redirected: report.as_ref().is_some_and(|report| report.is_redirected),
            paths: report.map_or_else(Vec::new, |report| report.paths),
        }
    }

    /// Reports that the reserved attachment is ready as `export`.
    ///
    /// # Errors
    /// Fails if the list can't be written, or the parent process doesn't read the report.
    pub(super) fn announce(&mut self, export: Export) -> Result<(), CliError> {
        let registration = self.registration.as_ref().expect("it was claimed before");
        registration
            .change_phase(Phase::Serving, |a| a.export = export)
            .map_err(|e| CliError::io("cannot record the attachment", e))?;
        let attachment = registration.attachment();
        tracing::info!(id = attachment.id, url = attachment.url, "attached");
        if self.args.supervised.is_some() {
            report(&Outcome::Attached(attachment))?;
            // Don't block removal of the initial working directory.
            let _ = std::env::set_current_dir("/");
        } else {
            print(&attachment, self.global)?;
            if let Err(error) = sd_notify::notify(&[NotifyState::Ready]) {
                tracing::debug!(%error, "the service manager was not notified");
            }
        }
        self.reported = true;
        Ok(())
    }

    /// Marks the attachment as detached. It's only served for its remaining users.
    pub(super) fn mark_detached(&self) {
        let Some(registration) = &self.registration else {
            return;
        };
        if let Err(error) = registration.change_phase(Phase::Ending, |_| ()) {
            tracing::warn!(%error, "cannot record that the attachment is stopping");
        }
    }
}

/// Opens a disk for `work` and always closes it when this returns.
///
/// # Errors
/// Fails if the disk can't be opened. Also returns errors from `work`.
pub(super) fn with_disk(
    address: &Address,
    link: &ConnectOptions,
    access: Access,
    mut port: Option<ExportPort>,
    ready: &mut Ready<'_>,
    work: impl FnOnce(&Arc<Disk>, &mut Ready<'_>) -> Result<(), CliError>,
) -> Result<(), CliError> {
    let disk = match Disk::open(address, link, access) {
        Ok(disk) => Arc::new(disk),
        Err(error) => {
            // Keep the port, because the session of a killed process may still exist and has to be
            // closed by the next login.
            if let Some(port) = port.filter(|port| !port.is_inherited()) {
                port.release();
            }
            return Err(error);
        }
    };
    let result = note_port(&mut port, &disk).and_then(|entry| {
        ready.port = entry;
        work(&disk, ready)
    });
    let is_settled = disk.close();
    // Otherwise the next login must use this port to terminate pending commands.
    if let Some(port) = port.filter(|_| is_settled) {
        port.release();
    }
    result
}

/// Updates the state of the session and paths of a disk in the list of attachments. The part used
/// by the next process is also stored in the file of the initiator port (`port`).
fn watch_link(
    status: Arc<SessionStatus>,
    mut entry: LinkEntry,
    mut port: Option<PortEntry>,
) -> Result<(), CliError> {
    let watch = move || {
        let mut known = status.report();
        let mut is_failing = false;
        loop {
            let note = |report: &SessionReport| match &mut port {
                Some(port) => port.note_session(report),
                None => Ok(()),
            };
            match entry.update(known.clone(), note) {
                Ok(true) => is_failing = false,
                Ok(false) => return,
                Err(error) => {
                    if !std::mem::replace(&mut is_failing, true) {
                        tracing::warn!(%error, "cannot record the state of the link; retrying");
                    }
                    thread::sleep(RETRY);
                    known = status.report();
                    continue;
                }
            }
            match status.wait_for_change(&known) {
                Some(report) => known = report,
                None => return,
            }
        }
    };
    thread::Builder::new()
        .name("link".into())
        .spawn(watch)
        .map(drop)
        .map_err(|e| CliError::io("cannot watch the link", e))
}

fn print(attachment: &Attachment, global: &Global) -> Result<(), CliError> {
    output::result(attachment, global, |out| {
        let usable = match &attachment.export {
            Export::Fuse { file, .. } => file.display().to_string(),
            Export::Nbd { uri, .. } => uri.clone(),
            Export::Ublk { device, .. } => device.display().to_string(),
            Export::Mount { path, .. } => path.display().to_string(),
        };
        writeln!(
            out,
            "{}: {} is available at {usable} ({})",
            attachment.id,
            attachment.url,
            units::show_size(attachment.capacity)
        )
    })
}

fn report(outcome: &Outcome) -> Result<(), CliError> {
    let mut out = io::stdout().lock();
    serde_json::to_writer(&mut out, outcome)
        .map_err(io::Error::from)
        .and_then(|()| writeln!(out))
        .and_then(|()| out.flush())
        .map_err(|e| CliError::io("cannot report to the parent process", e))
}

/// Starts the background process and waits for its report.
fn in_background(args: &ServeArgs, global: &Global) -> Result<Attachment, CliError> {
    // This lock is also required by the background process, which would only log that it's waiting
    // to its own file.
    drop(
        StateDir::open()
            .and_then(|dir| dir.with_patience(global.timeout).lock())
            .map_err(not_started)?,
    );
    let log = match &args.log_file {
        Some(log) => std::path::absolute(log).map_err(not_started)?,
        None => {
            let dir = StateDir::open().map_err(not_started)?;
            dir.path().join(format!("{}.log", process_name()))
        }
    };
    let mut child = spawn_background(&log, args.log_file.is_none(), global)?;
    let stdout = child.stdout.take().expect("it is piped");
    let (sender, outcome) = mpsc::channel();
    thread::Builder::new()
        .name("background".into())
        .spawn(move || {
            let mut line = String::new();
            // An empty line indicates that the process has exited.
            let _ = BufReader::new(stdout).read_line(&mut line);
            let _ = sender.send(line);
        })
        .map_err(not_started)?;
    let Ok(line) = outcome.recv_timeout(global.timeout + SLACK) else {
        return Err(stop_background(&mut child, &log));
    };
    match serde_json::from_str(&line) {
        Ok(Outcome::Attached(attachment)) => Ok(attachment),
        Ok(Outcome::Failed {
            exit,
            what,
            causes,
            help,
        }) => {
            if args.log_file.is_none() {
                log::remove(&log);
            }
            let _ = child.wait();
            let mut error = CliError::new(Exit::from(exit), what);
            error.cause = Cause::chain(causes);
            error.help = help;
            Err(error)
        }
        Err(_) => {
            let status = child
                .wait()
                .map_or_else(|e| e.to_string(), |s| s.to_string());
            Err(CliError::new(
                Exit::Failure,
                format!("the background process exited without a report: {status}"),
            )
            .help(format!("see the log {}", log.display())))
        }
    }
}

fn not_started(error: io::Error) -> CliError {
    CliError::io("cannot start the background process", error)
}

/// Starts the background process. If `is_new` is set, its log must not exist. Passwords are sent to
/// its standard input, because arguments are visible to all users, and the environment is inherited
/// by child processes.
fn spawn_background(log: &Path, is_new: bool, global: &Global) -> Result<Child, CliError> {
    let to_log = log::create(log, is_new)
        .map_err(|e| CliError::io(format!("cannot create {}", log.display()), e))?;
    let mut command = Command::new(std::env::current_exe().map_err(not_started)?);
    let (arguments, secrets) = arguments(log);
    let stdin = if secrets.is_empty() {
        Stdio::null()
    } else {
        Stdio::piped()
    };
    for name in SECRET_ENV {
        command.env_remove(name);
    }
    command
        .args(arguments)
        .stdin(stdin)
        .stdout(Stdio::piped())
        .stderr(to_log);
    if global.log.is_none() && global.verbose == 0 && !global.quiet {
        command.env("RISER_LOG", "info");
    }
    let mut child = command.spawn().map_err(not_started)?;
    if let Some(mut stdin) = child.stdin.take() {
        let text = serde_json::to_vec(&secrets).expect("strings serialize");
        stdin.write_all(&text).map_err(not_started)?;
    }
    Ok(child)
}

/// Requests a background process to exit after a timeout. It must not be killed, because it may be
/// serving a disk which is being mounted by the kernel, and it cleans up before it exits.
fn stop_background(child: &mut Child, log: &Path) -> CliError {
    let pid = Pid::from_child(child);
    // The process may already have exited.
    let _ = rustix::process::kill_process(pid, Signal::TERM);
    let patience = Instant::now() + SLACK;
    while matches!(child.try_wait(), Ok(None)) && Instant::now() < patience {
        thread::sleep(Duration::from_millis(10));
    }
    let error = CliError::new(Exit::Timeout, "timed out waiting for the attachment");
    match child.try_wait() {
        Ok(None) => error.help(format!(
            "process {pid} exits after cleaning up; see the log {}",
            log.display()
        )),
        _ => error.help(format!("see the log {}", log.display())),
    }
}

/// Returns the arguments of this process without passwords, including arguments that select the
/// background process, and the passwords.
fn arguments(log: &Path) -> (Vec<OsString>, Secrets) {
    let mut args: Vec<OsString> = std::env::args_os().skip(1).collect();
    let mut secrets = Secrets::default();
    for arg in &mut args {
        let url = arg.to_str().map(str::parse);
        if let Some(Ok(TargetUrl::Iscsi(mut url))) = url {
            secrets = url.take_secrets();
            *arg = url.to_string().into();
        }
    }
    // There are no options after `--`.
    let at = args.iter().position(|a| a == "--").unwrap_or(args.len());
    let own = ["--foreground".into(), "--supervised".into(), log.into()];
    args.splice(at..at, own);
    (args, secrets)
}

/// Adds passwords to the address in a serving process. They are received from the parent process,
/// or removed from the environment.
pub(super) fn take_secrets(args: &ServeArgs, address: &mut Address) -> Result<(), CliError> {
    let Address::Target(url) = address else {
        return Ok(());
    };
    let TargetUrl::Iscsi(url) = &mut **url else {
        return Ok(());
    };
    if !args.foreground {
        return Ok(());
    }
    if args.supervised.is_none() {
        let secrets = url.take_secrets();
        url.put_secrets(secrets);
        process::forget_secrets();
        return Ok(());
    }
    let mut text = Vec::new();
    io::stdin()
        .read_to_end(&mut text)
        .map_err(|e| CliError::io("cannot read the passwords", e))?;
    if !text.is_empty() {
        let secrets = serde_json::from_slice(&text);
        url.put_secrets(secrets.map_err(|e| CliError::io("cannot read the passwords", e.into()))?);
    }
    Ok(())
}

/// Returns the initiator port of a disk exported at `path`, or `None` if the disk isn't a logical
/// unit.
pub(super) fn export_port(path: &Path, address: &Address) -> Result<Option<ExportPort>, CliError> {
    if !matches!(address, Address::Target(_)) {
        return Ok(None);
    }
    let path = absolute(path)?;
    StateDir::open()
        .and_then(|dir| ExportPort::allocate_port(&dir, &path, &address.to_string()))
        .map(Some)
        .map_err(|e| CliError::io("cannot save the initiator port", e))
}

/// Records the GUID of the port used by a disk, and whether its login was redirected. Returns the
/// file of the port.
fn note_port(port: &mut Option<ExportPort>, disk: &Disk) -> Result<Option<PortEntry>, CliError> {
    let Some(port) = port else {
        return Ok(None);
    };
    let report = disk.watch().map(|status| status.report());
    let is_redirected = report.is_some_and(|report| report.is_redirected);
    port.note_login(disk.port_guid(), is_redirected)
        .map_err(|e| CliError::io("cannot save the initiator port", e))?;
    Ok(port.entry())
}

/// Fails if there is already an attachment at this path.
pub(super) fn check_vacant(path: &Path, global: &Global) -> Result<(), CliError> {
    let other = StateDir::open()
        .and_then(|dir| dir.with_patience(global.timeout).find_path(path))
        .map_err(|e| CliError::io("cannot read the list of attachments", e))?;
    match other {
        Some(other) if !other.is_over() => Err(occupied(path, &other)),
        _ => Ok(()),
    }
}

/// Returns the error if the path is used by another attachment.
fn occupied(path: &Path, other: &Attachment) -> CliError {
    let what = format!("{} is already used by {}", path.display(), other.url);
    let help = format!("use another path, or run `riser detach {}` first", other.id);
    CliError::new(Exit::Busy, what).help(help)
}

/// Returns the limits for access to the disk of an attachment.
pub(super) fn access(args: &ServeArgs, global: &Global, read_only: bool) -> Access {
    Access {
        login: global.timeout,
        operation: args.io_timeout.unwrap_or(global.timeout.max(OPERATION)),
        read_only,
    }
}

/// Returns an absolute path, which doesn't depend on the working directory.
pub(super) fn absolute(path: &Path) -> Result<PathBuf, CliError> {
    std::path::absolute(path)
        .map_err(|e| CliError::io(format!("cannot resolve {}", path.display()), e))
}

#[cfg(test)]
mod tests {
    use std::fs;

    use riser_testkit::eventually;

    use super::super::state::fixture;
    use super::*;

    /// For example because the file system of the state directory was full.
    #[test]
    fn failed_record_of_link_is_retried() {
        let path = std::env::temp_dir().join(format!("riser-record-{}", std::process::id()));
        let dir = StateDir::at(path.clone()).unwrap();
        let attachment = fixture::attachment("/run/disk".as_ref());
        let registration = dir.register(attachment).unwrap();
        fs::remove_dir_all(&path).unwrap();
        let status = Arc::new(SessionStatus::default());
        watch_link(status, registration.link(), None).unwrap();
        thread::sleep(Duration::from_millis(300));
        fs::create_dir(&path).unwrap();
        eventually("the link is recorded", Duration::from_secs(60), || {
            fs::read_dir(&path).unwrap().count() == 1
        });
        drop(registration);
        fs::remove_dir_all(&path).unwrap();
    }

    #[test]
    fn late_background_process_is_not_killed() {
        let path = std::env::temp_dir().join(format!("riser-late-{}", std::process::id()));
        let script =
            "trap 'echo taken away > \"$0\"; exit' TERM; echo ready; while :; do sleep 0.01; done";
        let mut child = Command::new("sh")
            .args(["-c", script])
            .arg(&path)
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut ready = String::new();
        let mut stdout = BufReader::new(child.stdout.take().unwrap());
        stdout.read_line(&mut ready).unwrap();
        let error = stop_background(&mut child, Path::new("/a/log"));
        assert_eq!(error.exit, Exit::Timeout);
        assert_eq!(error.help.as_deref(), Some("see the log /a/log"));
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "taken away\n");
        std::fs::remove_file(path).unwrap();
    }
}
