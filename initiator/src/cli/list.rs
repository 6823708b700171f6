//! `riser list`.

use std::time::{SystemTime, UNIX_EPOCH};

use super::args::Global;
use super::exit::CliError;
use super::state::{Attachment, Export, StateDir};
use super::{output, units};
use crate::engine::PathReport;
use crate::paths::PathState;

pub(super) fn run(global: &Global) -> Result<(), CliError> {
    let attachments = StateDir::open()
        .and_then(|dir| dir.with_patience(global.timeout).list())
        .map_err(|e| CliError::io("cannot read the list of attachments", e))?;
    output::result(&attachments, global, |out| {
        if attachments.is_empty() {
            return writeln!(out, "nothing is attached");
        }
        let now = SystemTime::now()
            .duration_since(UNIX_EPOCH)
            .map_or(0, |d| d.as_secs());
        writeln!(
            out,
            "{:<4} {:<6} {:>11} {:>9} {:<8} WHERE, WHAT",
            "ID", "KIND", "SIZE", "PID", "FOR"
        )?;
        for a in &attachments {
            writeln!(
                out,
                "{:<4} {:<6} {:>11} {:>9} {:<8} {}, {}",
                a.id,
                kind(a),
                units::show_size(a.capacity),
                process(a),
                since(now.saturating_sub(a.since)),
                a.export.path().display(),
                a.url
            )?;
            for path in &a.paths {
                writeln!(out, "       {}", show_path(path))?;
            }
        }
        Ok(())
    })
}

fn show_path(path: &PathReport) -> String {
    let state = match path.state {
        PathState::Connecting => "connecting",
        PathState::Live => "live",
        PathState::Standby => "standby",
        PathState::Lost => "lost",
        PathState::OtherUnit => "leads to another logical unit",
    };
    let mut line = format!("path {}: {state}", path.portal);
    if path.losses > 0 {
        line += &format!(", lost {} time(s)", path.losses);
    }
    match (&path.why, path.state) {
        (Some(why), PathState::Lost | PathState::OtherUnit) => line + ": " + why,
        _ => line,
    }
}

/// The process that serves it; or that none does, and it waits for one.
fn process(attachment: &Attachment) -> String {
    if attachment.is_alive() {
        attachment.pid.to_string()
    } else {
        "waits".to_owned()
    }
}

fn kind(attachment: &Attachment) -> &'static str {
    match attachment.export {
        Export::Fuse { .. } => "fuse",
        Export::Nbd { .. } => "nbd",
        Export::Ublk { .. } => "ublk",
        Export::Mount { .. } => "mount",
    }
}

fn since(seconds: u64) -> String {
    match seconds {
        0..60 => format!("{seconds}s"),
        60..3600 => format!("{}m", seconds / 60),
        3600..86_400 => format!("{}h", seconds / 3600),
        _ => format!("{}d", seconds / 86_400),
    }
}
