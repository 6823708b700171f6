//! `riser list`.

use std::time::{SystemTime, UNIX_EPOCH};

use riser_initiator::engine::{LinkState, PathReport, ProtectionErrors};
use riser_initiator::paths::PathState;
use riser_transport::shm::PROVIDER;

use super::args::Global;
use super::exit::CliError;
use super::state::{Attachment, Export, Phase, StateDir};
use super::{output, units};

pub(super) fn run(global: &Global) -> Result<(), CliError> {
    let attachments = StateDir::open()
        .and_then(|dir| dir.with_patience(global.timeout).list())
        .map_err(|e| CliError::io("cannot read the list of attachments", e))?;
    output::result(&attachments, global, |out| {
        if attachments.is_empty() {
            return writeln!(out, "no attachments");
        }
        let now = SystemTime::now()
            .duration_since(UNIX_EPOCH)
            .map_or(0, |d| d.as_secs());
        writeln!(
            out,
            "{:<4} {:<6} {:<10} {:>11} {:>9} {:<8} LOCATION, ADDRESS",
            "ID", "KIND", "STATE", "SIZE", "PID", "AGE"
        )?;
        for a in &attachments {
            writeln!(
                out,
                "{:<4} {:<6} {:<10} {:>11} {:>9} {:<8} {}, {}{}{}",
                a.id,
                kind(a),
                state(a),
                units::show_size(a.capacity),
                process(a),
                since(now.saturating_sub(a.since)),
                a.export.path().display(),
                a.url,
                over(a),
                protection(a)
            )?;
            // Additional lines are indented and only used if there is more to report. A healthy
            // attachment only uses a single line, which can be parsed by scripts.
            if let Some(reason) = &a.failure {
                writeln!(
                    out,
                    "       {reason}; `riser detach {}` removes this entry",
                    a.id
                )?;
            }
            if let Some(line) = show_link(a, now) {
                writeln!(out, "       {line}")?;
            }
            if let Some(grown) = a.link.as_ref().and_then(|link| link.grown) {
                let size = units::show_size(grown);
                writeln!(
                    out,
                    "       grown to {size}: detach and attach it again to use the new size"
                )?;
            }
            let errors = a.link.as_ref().map(|link| link.protection_errors);
            if let Some(line) = errors.and_then(show_failed_checks) {
                writeln!(out, "       {line}")?;
            }
            for path in &a.paths {
                writeln!(out, "       {}", show_path(path))?;
            }
        }
        Ok(())
    })
}

/// Returns the transport of an attachment if it isn't part of the address.
fn over(attachment: &Attachment) -> &'static str {
    let device = attachment.device.as_deref().unwrap_or_default();
    match device.starts_with(PROVIDER) {
        true => " over shared memory",
        false => "",
    }
}

/// Returns the protection of an attachment's data.
fn protection(attachment: &Attachment) -> String {
    let protection = attachment.protection;
    protection.map_or_else(String::new, |number| format!(", protection type {number}"))
}

/// Describes the failed checks of protection information, if there are any.
fn show_failed_checks(errors: ProtectionErrors) -> Option<String> {
    let counts = [
        (errors.guard, "guard"),
        (errors.application_tag, "application tag"),
        (errors.reference_tag, "reference tag"),
    ];
    let counts = counts.iter().filter(|(count, _)| *count > 0);
    let counts: Vec<_> = counts.map(|(n, what)| format!("{n} {what}")).collect();
    (!counts.is_empty()).then(|| {
        let counts = counts.join(", ");
        format!("failed checks of protection information: {counts}; see the log for the blocks")
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

/// Returns whether a path can't be used, which reduces redundancy.
fn is_lost(path: &PathReport) -> bool {
    !matches!(path.state, PathState::Live | PathState::Standby)
}

/// Returns the state of an attachment. This includes whether the target can be reached, and whether
/// it's waiting for a process.
fn state(attachment: &Attachment) -> &'static str {
    let link = attachment.link.as_ref().map(|link| link.state);
    match link {
        _ if attachment.is_over() => "failed",
        _ if !attachment.is_alive() => "waits",
        _ if attachment.phase == Phase::Starting => "starting",
        _ if attachment.phase == Phase::Ending => "ending",
        // This isn't reported by older versions.
        None if !attachment.url.starts_with("mem:") => "unknown",
        Some(LinkState::Live) if attachment.paths.iter().any(is_lost) => "degraded",
        None | Some(LinkState::Live) => "live",
        Some(LinkState::Connecting) => "connecting",
        Some(LinkState::Reconnecting) => "down",
        Some(LinkState::Closed) => "closed",
    }
}

/// Describes the current outage and its duration, or the last outage.
fn show_link(attachment: &Attachment, now: u64) -> Option<String> {
    let link = attachment.link.as_ref()?;
    let time = since(now.saturating_sub(link.since));
    let error = link.last_error.as_ref()?;
    Some(match link.state {
        LinkState::Live => format!("live for {time}; before that: {error}"),
        _ => format!("down for {time}: {error}"),
    })
}

/// Returns the process that serves the attachment, if there is one.
fn process(attachment: &Attachment) -> String {
    match attachment.is_alive() {
        true => attachment.pid.to_string(),
        false => "-".to_owned(),
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn failed_checks_are_listed_by_kind() {
        let mut errors = ProtectionErrors::default();
        assert_eq!(show_failed_checks(errors), None);
        (errors.guard, errors.reference_tag) = (2, 1);
        let line = show_failed_checks(errors).unwrap();
        assert!(line.contains(": 2 guard, 1 reference tag;"), "{line}");
    }

    #[test]
    fn unusable_path_is_lost() {
        let is_lost = |state| {
            is_lost(&PathReport {
                portal: "192.0.2.1:3260".into(),
                state,
                losses: 0,
                why: None,
            })
        };
        assert!(!is_lost(PathState::Live) && !is_lost(PathState::Standby));
        assert!(is_lost(PathState::Lost) && is_lost(PathState::OtherUnit));
    }
}
