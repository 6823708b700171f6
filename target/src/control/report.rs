//! What the admin API says, in lines for people.

use serde_json::Value;

use super::client::Upgraded;
use super::trace::Traced;
use super::view::{Changes, DriftView, HistoryView, SessionView, Status, TargetView};

/// Connections, a line each, and beneath it what was agreed on.
#[must_use]
pub fn sessions(sessions: &Vec<SessionView>) -> String {
    if sessions.is_empty() {
        return "no sessions".to_owned();
    }
    let mut lines = Vec::new();
    for s in sessions {
        let target = if s.target.is_empty() {
            "(discovery)"
        } else {
            &s.target
        };
        lines.push(format!(
            "{target}  {}  {} from {}: {}, {} under way, {} LUN(s), worker {}, {} KiB",
            s.protocol,
            s.initiator,
            s.peer,
            s.state,
            s.in_flight,
            s.luns,
            s.worker,
            s.memory >> 10
        ));
        let terms = s
            .negotiated
            .iter()
            .map(|(name, value)| format!("{name}={value}"));
        lines.push(format!("    {}", terms.collect::<Vec<_>>().join(" ")));
    }
    lines.join("\n")
}

/// Targets with their portals and logical units.
#[must_use]
pub fn targets(targets: &Vec<TargetView>) -> String {
    let mut lines = Vec::new();
    for t in targets {
        let iqn = t
            .iqn
            .as_ref()
            .map_or_else(String::new, |iqn| format!("  {iqn}"));
        lines.push(format!("{}{iqn}", t.name));
        lines.extend(
            t.portals
                .iter()
                .map(|p| format!("  {} {}", p.protocol, p.listen)),
        );
        lines.extend(t.luns.iter().map(|(number, lun)| {
            let read_only = if lun.read_only { ", read-only" } else { "" };
            let failed = lun.flush_failure.as_ref().map_or_else(String::new, |f| {
                format!(", A FLUSH FAILED ({}): writes may be lost", f.error)
            });
            format!(
                "  lun {number}: {} bytes in blocks of {}, serial {}{read_only}{failed}",
                lun.size, lun.block_size, lun.serial
            )
        }));
    }
    lines.join("\n")
}

/// The daemon and its workers.
#[must_use]
pub fn status(status: &Status) -> String {
    let mut lines = vec![format!(
        "riserd {} (process {}), up {} s, {} session(s)",
        status.version, status.pid, status.uptime, status.sessions
    )];
    lines.extend(status.problems.iter().map(|problem| {
        let (kind, name, error) = (&problem.kind, &problem.name, &problem.error);
        format!("NOT SERVED: {kind} {name}: {error}")
    }));
    lines.extend(status.drift.iter().map(drift));
    lines.extend(status.unsaved.then(|| UNSAVED.to_owned()));
    let tenure = &status.tenure;
    if let Some(from) = &tenure.upgraded_from {
        lines.push(format!(
            "upgraded from riserd {from}, {} time(s) in all",
            tenure.upgrades
        ));
    }
    if let Some(error) = &tenure.upgrade_error {
        lines.push(format!("the last upgrade failed: {error}"));
    }
    lines.extend(status.workers.iter().map(|w| {
        format!(
            "worker {}: {} commands, {} logins, {} refused, buffers {} of {} KiB free (least {})",
            w.worker,
            w.commands,
            w.logins,
            w.rejects,
            w.pool_free >> 10,
            w.pool >> 10,
            w.pool_lowest >> 10
        )
    }));
    lines.join("\n")
}

/// An upgrade that is done.
#[must_use]
pub fn upgraded(upgraded: &Upgraded) -> String {
    let upgrade = &upgraded.upgrade;
    format!(
        "riserd {} ({}, process {}) has taken over from riserd {}",
        upgrade.to,
        upgrade.program.display(),
        upgraded.pid,
        upgrade.from
    )
}

/// Differences, a line each.
#[must_use]
pub fn changes(changes: &Changes) -> String {
    let mut lines: Vec<String> = changes
        .changes
        .iter()
        .map(|change| match (&change.old, &change.new) {
            (Value::Null, new) => format!("+ {}: {new}", change.path),
            (old, Value::Null) => format!("- {}: {old}", change.path),
            (old, new) => format!("~ {}: {old} -> {new}", change.path),
        })
        .collect();
    lines.extend(changes.drift.iter().map(drift));
    if lines.is_empty() {
        lines.push("no difference".to_owned());
    }
    lines.extend(changes.unsaved.then(|| UNSAVED.to_owned()));
    if let Some(refused) = &changes.refused {
        lines.push(format!("cannot be applied: {refused}"));
    }
    lines.join("\n")
}

/// What is said where a restart would undo changes.
const UNSAVED: &str = "the configuration file does not have these changes, and a restart undoes them: `riserd save \
                       FILE` writes them down, and `riserd run --restore` serves them again";

/// A backend that is larger than its configuration says.
fn drift(drift: &DriftView) -> String {
    let (path, configured, served) = (&drift.path, drift.configured, drift.served);
    format!("! {path}: {configured} bytes are configured, {served} are served; it stays as large")
}

/// Commands, a line each, and beneath it when they reached which stage.
#[must_use]
pub fn traced(traced: &Traced) -> String {
    let mut lines = Vec::new();
    for command in &traced.commands {
        let name = command.name.clone();
        let name = name.unwrap_or_else(|| format!("opcode {:#04x}", command.opcode));
        let blocks = match (command.lba, command.blocks) {
            (Some(lba), Some(blocks)) => format!(" lba {lba} blocks {blocks}"),
            _ => String::new(),
        };
        let micros = |seconds: f64| seconds * 1e6;
        lines.push(format!(
            "{}  {}/{}  nexus {} {}  tag {:#x}  {name}{blocks}: {} bytes, status {:#04x}, {:.1} us",
            utc(command.time as u64),
            command.target,
            command.lun,
            command.nexus,
            command.initiator.as_deref().unwrap_or("(gone)"),
            command.tag,
            command.bytes,
            command.status,
            micros(command.seconds)
        ));
        let steps = command.steps.iter();
        let steps = steps.map(|step| format!("{} +{:.1}", step.stage, micros(step.at)));
        let steps = steps.collect::<Vec<_>>().join(", ");
        lines.push(format!("    {steps}, done +{:.1}", micros(command.seconds)));
    }
    if traced.missed > 0 {
        lines.push(format!("{} more came too fast to be kept", traced.missed));
    }
    if lines.is_empty() {
        lines.push("no such command".to_owned());
    }
    lines.join("\n")
}

/// Configurations that were applied, a line each.
#[must_use]
pub fn history(entries: &[HistoryView]) -> String {
    let line = |entry: &HistoryView| {
        let time = utc(entry.time);
        format!("{:>3}  {time}  {}  by {}", entry.back, entry.how, entry.who)
    };
    entries.iter().map(line).collect::<Vec<_>>().join("\n")
}

/// A time in seconds since 1970 as people write it.
fn utc(time: u64) -> String {
    let (days, second) = (time / 86_400, time % 86_400);
    // Eras of 400 years that begin on the first of March (H. Hinnant, "chrono-compatible low-level
    // date algorithms").
    let day = days + 719_468;
    let (era, day) = (day / 146_097, day % 146_097);
    let year = (day - day / 1460 + day / 36_524 - day / 146_096) / 365;
    let day = day - (365 * year + year / 4 - year / 100);
    let month = (5 * day + 2) / 153;
    let date = day - (153 * month + 2) / 5 + 1;
    let month = if month < 10 { month + 3 } else { month - 9 };
    let year = era * 400 + year + u64::from(month <= 2);
    let (hour, minute) = (second / 3600, second / 60 % 60);
    format!(
        "{year:04}-{month:02}-{date:02} {hour:02}:{minute:02}:{:02} UTC",
        second % 60
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_as_in_the_calendar() {
        assert_eq!(utc(0), "1970-01-01 00:00:00 UTC");
        assert_eq!(utc(951_782_400), "2000-02-29 00:00:00 UTC");
        assert_eq!(utc(1_767_225_599), "2025-12-31 23:59:59 UTC");
    }
}
