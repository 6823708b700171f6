//! Serving an attachment: in the foreground, or by a process in the background.
//!
//! The background process is this program again, with the same arguments and `--foreground
//! --supervised LOG`, in a session of its own. Passwords are not among the arguments: they come on
//! its standard input. It prints one line of JSON when the attachment is
//! usable, or why it is not; whoever started it waits for that line. What ends an attachment is a
//! signal (`SIGTERM`, `SIGINT`, `SIGHUP`), or that somebody unmounts it.

use std::ffi::OsString;
use std::fs::File;
use std::io::{self, BufRead, BufReader, Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::{Arc, mpsc};
use std::thread;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use sd_notify::NotifyState;
use serde::{Deserialize, Serialize};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator::Signals;

use super::args::{Global, ServeArgs};
use super::disk::{Access, Address, Disk};
use super::exit::{Cause, CliError, Exit};
use super::output;
use super::state::{Attachment, Export, PathsEntry, Registration, StateDir, process_start};
use super::units;
use crate::block::BlockDevice;
use crate::engine::SessionStatus;
use crate::iscsi::url::{SECRET_ENV, Secrets};
use crate::url::TargetUrl;

/// How long one operation of an export may take at least, reconnections included: a kernel that
/// gets an error gives up the file system, so patience is cheaper.
const OPERATION: Duration = Duration::from_secs(60);

/// How much longer than the background process its starter waits.
const SLACK: Duration = Duration::from_secs(10);

/// Why an attachment ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Event {
    /// A signal asks for it.
    Signal,
    /// Nobody uses it any more: it was unmounted.
    Unmounted,
}

#[derive(Serialize, Deserialize)]
enum Told {
    Attached(Attachment),
    Failed {
        exit: u8,
        what: String,
        causes: Vec<String>,
        help: Option<String>,
    },
}

/// What an attachment's process does, from the first step to the last: `work` gets the channel of
/// events, and tells when it is usable by the function it is given.
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
    if args.supervised.is_some() {
        // It fails only for a process that leads a group already, which is as good.
        let _ = rustix::process::setsid();
    }
    let (sender, events) = mpsc::channel();
    let mut ready = Ready {
        args,
        global,
        told: false,
    };
    let result = watch_signals(sender.clone()).and_then(|()| work(&events, &sender, &mut ready));
    if let Some(log) = &args.supervised {
        match &result {
            Err(error) if !ready.told => tell(&Told::Failed {
                exit: error.exit as u8,
                what: error.what.clone(),
                causes: error.causes(),
                help: error.help.clone(),
            })?,
            // A log that tells of no failure is of no use any more.
            Ok(()) if args.log_file.is_none() => drop(std::fs::remove_file(log)),
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
                tracing::info!(signal, "asked to end");
                // Whoever asks again and again does not want to wait any longer.
                if seen > 2 || sender.send(Event::Signal).is_err() {
                    std::process::exit(128 + signal);
                }
            }
        })
        .map(drop)
        .map_err(failed)
}

/// Tells once that an attachment is usable.
pub(super) struct Ready<'a> {
    args: &'a ServeArgs,
    global: &'a Global,
    told: bool,
}

impl Ready<'_> {
    /// Writes the attachment into the list, and tells that it is usable.
    pub(super) fn tell(
        &mut self,
        address: &Address,
        disk: &Disk,
        export: Export,
    ) -> Result<Registration, CliError> {
        let pid = std::process::id();
        let geometry = disk.geometry();
        let since = SystemTime::now().duration_since(UNIX_EPOCH);
        let attachment = Attachment {
            id: String::new(),
            url: address.to_string(),
            pid,
            started: process_start(pid).unwrap_or(0),
            since: since.map_or(0, |d| d.as_secs()),
            export,
            capacity: geometry.capacity,
            block_size: geometry.block_size,
            read_only: geometry.read_only,
            log: self.args.supervised.clone(),
            paths: disk.watch().map_or_else(Vec::new, |status| status.paths()),
        };
        let registration = StateDir::open()
            .and_then(|dir| dir.register(attachment))
            .map_err(|e| CliError::io("cannot write down the attachment", e))?;
        if let Some(status) = disk.watch() {
            watch_paths(status, registration.paths())?;
        }
        let attachment = registration.attachment();
        tracing::info!(id = attachment.id, url = attachment.url, "attached");
        if self.args.supervised.is_some() {
            tell(&Told::Attached(attachment.clone()))?;
            // Whatever directory it was started in may go away.
            let _ = std::env::set_current_dir("/");
        } else {
            print(attachment, self.global)?;
            if let Err(error) = sd_notify::notify(&[NotifyState::Ready]) {
                tracing::debug!(%error, "the service manager was not told");
            }
        }
        self.told = true;
        Ok(registration)
    }
}

/// Keeps what the list of attachments says of a disk's paths up to date, where there are several.
fn watch_paths(status: Arc<SessionStatus>, mut entry: PathsEntry) -> Result<(), CliError> {
    if status.paths().is_empty() {
        return Ok(());
    }
    let watch = move || {
        let mut known = Vec::new();
        while let Some(paths) = status.wait_for_paths(&known) {
            known.clone_from(&paths);
            match entry.update(paths) {
                Ok(true) => {}
                Ok(false) => return,
                Err(error) => tracing::warn!(%error, "cannot write down the paths"),
            }
        }
    };
    thread::Builder::new()
        .name("paths".into())
        .spawn(watch)
        .map(drop)
        .map_err(|e| CliError::io("cannot watch the paths", e))
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
            "{}: {} is at {usable} ({})",
            attachment.id,
            attachment.url,
            units::show_size(attachment.capacity)
        )
    })
}

fn tell(told: &Told) -> Result<(), CliError> {
    let mut out = io::stdout().lock();
    serde_json::to_writer(&mut out, told)
        .map_err(io::Error::from)
        .and_then(|()| writeln!(out))
        .and_then(|()| out.flush())
        .map_err(|e| CliError::io("nobody listens to the background process", e))
}

/// Starts the background process and waits until it tells how it went.
fn in_background(args: &ServeArgs, global: &Global) -> Result<Attachment, CliError> {
    let failed = |e| CliError::io("cannot start the background process", e);
    let log = match &args.log_file {
        Some(log) => std::path::absolute(log).map_err(failed)?,
        None => {
            let dir = StateDir::open().map_err(failed)?;
            dir.path().join(format!("{}.log", std::process::id()))
        }
    };
    let to_log = File::create(&log)
        .map_err(|e| CliError::io(format!("cannot create {}", log.display()), e))?;
    let mut command = Command::new(std::env::current_exe().map_err(failed)?);
    let (arguments, secrets) = arguments(&log);
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
    let mut child = command.spawn().map_err(failed)?;
    if let Some(mut stdin) = child.stdin.take() {
        let text = serde_json::to_vec(&secrets).expect("strings serialize");
        stdin.write_all(&text).map_err(failed)?;
    }
    let stdout = child.stdout.take().expect("it is piped");
    let (sender, told) = mpsc::channel();
    thread::Builder::new()
        .name("background".into())
        .spawn(move || {
            let mut line = String::new();
            // An end without a line says enough.
            let _ = BufReader::new(stdout).read_line(&mut line);
            let _ = sender.send(line);
        })
        .map_err(failed)?;
    let Ok(line) = told.recv_timeout(global.timeout + SLACK) else {
        let _ = child.kill();
        let _ = child.wait();
        return Err(CliError::new(
            Exit::Timeout,
            "the attachment was not usable in time",
        ));
    };
    match serde_json::from_str(&line) {
        Ok(Told::Attached(attachment)) => Ok(attachment),
        Ok(Told::Failed {
            exit,
            what,
            causes,
            help,
        }) => {
            if args.log_file.is_none() {
                let _ = std::fs::remove_file(&log);
            }
            let _ = child.wait();
            let mut error = CliError::new(Exit::of(exit), what);
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
                format!("the background process ended without a word: {status}"),
            )
            .help(format!("its log is {}", log.display())))
        }
    }
}

/// This process's arguments without passwords, those that make the other one serve, and the
/// passwords.
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
    // What comes after `--` is no option.
    let at = args.iter().position(|a| a == "--").unwrap_or(args.len());
    let own = ["--foreground".into(), "--supervised".into(), log.into()];
    args.splice(at..at, own);
    (args, secrets)
}

/// Takes the passwords that the process which started this one has for it.
pub(super) fn take_secrets(args: &ServeArgs, address: &mut Address) -> Result<(), CliError> {
    let Address::Target(url) = address else {
        return Ok(());
    };
    let TargetUrl::Iscsi(url) = &mut **url else {
        return Ok(());
    };
    if args.supervised.is_none() {
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

/// How an attachment uses its disk.
pub(super) fn access(global: &Global, read_only: bool) -> Access {
    Access {
        login: global.timeout,
        operation: global.timeout.max(OPERATION),
        read_only,
    }
}

/// A path that stays right when the working directory changes.
pub(super) fn absolute(path: &Path) -> Result<PathBuf, CliError> {
    std::path::absolute(path)
        .map_err(|e| CliError::io(format!("{} cannot be resolved", path.display()), e))
}
