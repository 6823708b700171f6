//! `riser detach`.

use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal};

use super::args::{DetachArgs, Global};
use super::exit::{CliError, Exit};
use super::state::{Attachment, Export, StateDir};
use super::{mount, output};
use crate::fuse;

pub(super) fn run(args: &DetachArgs, global: &Global) -> Result<(), CliError> {
    let found = StateDir::open()
        .and_then(|dir| dir.find(&args.what))
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
        Export::Fuse { .. } | Export::Nbd { .. } => end(&attachment)?,
    }
    let patience = Instant::now() + global.timeout;
    while attachment.is_alive() {
        if Instant::now() >= patience {
            let what = format!("process {} still serves {}", attachment.pid, attachment.url);
            return Err(CliError::new(Exit::Timeout, what));
        }
        std::thread::sleep(Duration::from_millis(5));
    }
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

/// Asks the process that serves an attachment to end it.
fn end(attachment: &Attachment) -> Result<(), CliError> {
    let pid = i32::try_from(attachment.pid).ok().and_then(Pid::from_raw);
    let result = match pid {
        Some(pid) => rustix::process::kill_process(pid, Signal::TERM),
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
