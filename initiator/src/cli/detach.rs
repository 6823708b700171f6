//! `riser detach`.

use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal};
use serde::Serialize;

use super::args::{DetachArgs, Global};
use super::exit::{CliError, Exit};
use super::state::{Attachment, Export, StateDir};
use super::{mount, output};
use crate::engine::{LinkState, Pending};
use crate::{fuse, ublk};

/// How long a process that is ended by force may take to end properly: to flush, where its target answers.
const MERCY: Duration = Duration::from_secs(8);

/// The same where its target does not.
const SHORT_MERCY: Duration = Duration::from_secs(1);

#[derive(Serialize)]
struct Detached {
    #[serde(flatten)]
    attachment: Attachment,
    /// What its target did not get.
    #[serde(skip_serializing_if = "Option::is_none")]
    lost: Option<String>,
}

pub(super) fn run(args: &DetachArgs, global: &Global) -> Result<(), CliError> {
    let found = StateDir::open()
        .and_then(|dir| dir.with_patience(global.timeout).find(&args.what))
        .map_err(|e| CliError::io("cannot read the list of attachments", e))?;
    let attachment = found.ok_or_else(|| {
        CliError::new(
            Exit::NotFound,
            format!("nothing is attached as {}", args.what),
        )
        .help("`riser list` shows what is attached")
    })?;
    let is_alive = attachment.is_alive();
    let link = attachment.link.as_ref().filter(|_| is_alive);
    let down = link.filter(|link| link.state == LinkState::Reconnecting);
    let lost = down.map(|link| show_lost(link.pending.unwrap_or_default()));
    if let (Some(link), Some(lost), false) = (down, &lost, args.force) {
        let error = link.last_error.clone().unwrap_or_default();
        let what = format!("{} cannot be reached", attachment.url);
        let help = format!("{lost}; --force detaches it all the same");
        return Err(CliError::new(Exit::Timeout, what).because(error).help(help));
    }
    match &attachment.export {
        // Unmounting it ends the process that serves it, unless somebody uses the file.
        Export::Fuse { path, .. } if !args.force => fuse::unmount(path, false)?,
        Export::Mount { path, .. } => mount::unmount(path, args.force)?,
        Export::Ublk { device, .. } if !args.force && ublk::is_in_use(device) => {
            let what = format!("{} is in use", device.display());
            return Err(CliError::new(Exit::Busy, what).help("--force takes it away all the same"));
        }
        Export::Ublk { number, device, .. } if !attachment.is_alive() => ublk::remove(*number)
            .map_err(|e| CliError::io(format!("cannot take {} away", device.display()), e))?,
        Export::Fuse { .. } | Export::Nbd { .. } | Export::Ublk { .. } => {
            signal(&attachment, Signal::TERM)?;
            if args.force {
                // The second one ends the wait for those who use the disk.
                signal(&attachment, Signal::INT)?;
            }
        }
    }
    let patience = Instant::now() + global.timeout;
    let mercy = if lost.is_some() { SHORT_MERCY } else { MERCY };
    let mut mercy = args.force.then(|| Instant::now() + mercy);
    while attachment.is_alive() {
        if mercy.is_some_and(|until| Instant::now() >= until) {
            // It waits for a target that does not answer, or for somebody who uses the file.
            mercy = None;
            signal(&attachment, Signal::KILL)?;
        }
        if Instant::now() >= patience {
            let what = format!("process {} still serves {}", attachment.pid, attachment.url);
            return Err(CliError::new(Exit::Timeout, what)
                .help("it waits for its target, or for who uses it; --force ends that"));
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    // Whatever a killed process could not undo is undone by looking.
    let _ = StateDir::open().and_then(|dir| dir.with_patience(global.timeout).list());
    let detached = Detached { attachment, lost };
    output::result(&detached, global, |out| {
        let Detached { attachment, lost } = &detached;
        writeln!(
            out,
            "{}: {} is detached from {}",
            attachment.id,
            attachment.url,
            attachment.export.path().display()
        )?;
        match lost {
            Some(lost) => writeln!(out, "its target could not be reached: {lost}"),
            None => Ok(()),
        }
    })
}

/// What is lost with a session whose target cannot be reached.
fn show_lost(pending: Pending) -> String {
    let operations = match pending.operations {
        0 => None,
        1 => Some("1 operation fails".to_owned()),
        n => Some(format!("{n} operations fail")),
    };
    let cache = pending
        .unflushed
        .then(|| "acknowledged writes that were not flushed may be lost".to_owned());
    let parts: Vec<String> = operations.into_iter().chain(cache).collect();
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
        // It ended by itself.
        Ok(()) | Err(rustix::io::Errno::SRCH) => Ok(()),
        Err(e) => Err(CliError::io(
            format!("cannot signal process {}", attachment.pid),
            e.into(),
        )),
    }
}
