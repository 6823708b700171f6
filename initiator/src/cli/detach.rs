//! `riser detach`.

use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal};

use super::args::{DetachArgs, Global};
use super::exit::{CliError, Exit};
use super::state::{Attachment, Export, StateDir};
use super::{mount, output};
use crate::{fuse, ublk};

/// How long a process that is ended by force may take to end properly.
const MERCY: Duration = Duration::from_secs(8);

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
    let mut mercy = args.force.then(|| Instant::now() + MERCY);
    while attachment.is_alive() {
        if mercy.is_some_and(|until| Instant::now() >= until) {
            // It waits for a target that does not answer, or for somebody who uses the file.
            mercy = None;
            signal(&attachment, Signal::KILL)?;
        }
        if Instant::now() >= patience {
            let what = format!("process {} still serves {}", attachment.pid, attachment.url);
            return Err(CliError::new(Exit::Timeout, what));
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    // Whatever a killed process could not undo is undone by looking.
    let _ = StateDir::open().and_then(|dir| dir.with_patience(global.timeout).list());
    output::result(&attachment, global, |out| {
        writeln!(
            out,
            "{}: {} is detached from {}",
            attachment.id,
            attachment.url,
            attachment.export.path().display()
        )
    })
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
