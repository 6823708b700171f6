//! Answers of the admin API, in lines for people.

use jiff::Timestamp;
use jiff::tz::TimeZone;
use nix::unistd::{Uid, User};
use riser_admin_api::client::Upgraded;
use riser_admin_api::trace::Traced;
use riser_admin_api::view::{
    Changes, DriftView, HistoryView, LimitsView, ProblemView, SessionView, Status, TargetView,
    Written,
};
use serde_json::Value;

use crate::config::Difference;
use crate::units::bytes;

/// Changes that are shown of each configuration of the history.
const SHOWN: usize = 16;

/// Connections, a line each, and beneath it what was agreed on.
#[must_use]
pub fn sessions(sessions: &Vec<SessionView>) -> String {
    if sessions.is_empty() {
        return "no sessions".to_owned();
    }
    let mut lines = Vec::new();
    for s in sessions {
        // A discovery session has no target (RFC 7143 4.3). An empty name would leave the protocol
        // as the first word of its line, where others have a target.
        let target = if s.target.is_empty() {
            "(discovery)"
        } else {
            &s.target
        };
        lines.push(format!(
            "{target}  {}  {} from {}{}: {}, {} under way, {} LUN(s), worker {}, {}",
            s.protocol,
            s.initiator,
            s.peer,
            over(s.provider.as_deref()),
            s.state,
            s.in_flight,
            s.luns,
            s.worker,
            bytes(s.memory as u64)
        ));
        let terms = s
            .negotiated
            .iter()
            .map(|(name, value)| format!("{name}={value}"));
        lines.push(format!("    {}", terms.collect::<Vec<_>>().join(" ")));
        let own = s.limits.as_ref().map(limits);
        lines.extend(own.map(|own| format!("    {own}")));
    }
    lines.join("\n")
}

/// What a connection goes over, where the address and protocol do not say.
fn over(provider: Option<&str>) -> &'static str {
    match provider {
        Some(riser_transport::shm::PROVIDER) => " over shared memory",
        _ => "",
    }
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
        lines.extend(t.luns.iter().flat_map(|(number, lun)| {
            let read_only = if lun.read_only { ", read-only" } else { "" };
            // In the line of the unit, and loud: an operator who looks for anything else has to see
            // that data may be gone.
            let failed = lun.flush_failure.as_ref().map_or_else(String::new, |f| {
                format!(", A FLUSH FAILED ({}): writes may be lost", f.error)
            });
            let line = format!(
                "  lun {number}: {} in blocks of {} bytes, serial {}{read_only}{failed}",
                bytes(lun.size),
                lun.block_size,
                lun.serial
            );
            let own = lun.limits.as_ref().map(limits);
            [Some(line), own.map(|own| format!("    {own}"))]
                .into_iter()
                .flatten()
        }));
    }
    lines.join("\n")
}

/// Limits, and what has waited for them.
fn limits(limits: &LimitsView) -> String {
    let rates = limits
        .rates
        .iter()
        .map(|(name, rate)| format!("{name}={rate}"));
    format!(
        "limits: {} burst={}ms; {} command(s) waited {} ms in all",
        rates.collect::<Vec<_>>().join(" "),
        limits.burst_ms,
        limits.waits,
        limits.waited_ms
    )
}

/// The daemon and its workers.
#[must_use]
pub fn status(status: &Status) -> String {
    let mut lines = vec![format!(
        "riserd {} (process {}), up {} s, {} session(s)",
        status.version, status.pid, status.uptime, status.sessions
    )];
    // What needs an operator comes before the workers, of which there may be more lines than a
    // screen has.
    lines.extend(status.problems.iter().map(problem));
    lines.extend(status.written.drift.iter().map(drift));
    lines.extend(standing(&status.written));
    let upgrade_record = &status.upgrade_record;
    if let Some(from) = &upgrade_record.upgraded_from {
        lines.push(format!(
            "upgraded from riserd {from}, {} time(s) in all",
            upgrade_record.upgrades
        ));
    }
    if let Some(error) = &upgrade_record.upgrade_error {
        lines.push(format!("the last upgrade failed: {error}"));
    }
    lines.extend(status.workers.iter().map(|w| {
        format!(
            "worker {}: {} commands, {} logins, {} refused, buffers {} of {} free (least {})",
            w.worker,
            w.commands,
            w.logins,
            w.rejects,
            bytes(w.pool_free as u64),
            bytes(w.pool as u64),
            bytes(w.pool_lowest as u64)
        )
    }));
    lines.join("\n")
}

/// A line about what is not served, or served in part.
fn problem(problem: &ProblemView) -> String {
    let (kind, name, error) = (&problem.kind, &problem.name, &problem.error);
    let state = if problem.failing {
        "FAILING"
    } else {
        "NOT SERVED"
    };
    format!("{state}: {kind} {name}: {error}")
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
    let mut lines: Vec<String> = changes.changes.iter().map(difference).collect();
    lines.extend(changes.written.drift.iter().map(drift));
    if lines.is_empty() {
        lines.push("no difference".to_owned());
    }
    lines.extend(standing(&changes.written));
    if let Some(refused) = &changes.refused {
        lines.push(format!("cannot be applied: {refused}"));
    }
    lines.join("\n")
}

fn difference(change: &Difference) -> String {
    match (&change.old, &change.new) {
        (Value::Null, new) => format!("+ {}: {new}", change.path),
        (old, Value::Null) => format!("- {}: {old}", change.path),
        (old, new) => format!("~ {}: {old} -> {new}", change.path),
    }
}

/// The warning where the configuration file does not have what is served.
fn standing(written: &Written) -> Option<String> {
    let said = match (written.unsaved, written.restored) {
        (true, _) => UNSAVED,
        (false, true) => RESTORED,
        (false, false) => return None,
    };
    Some(said.to_owned())
}

/// A restart would undo changes.
const UNSAVED: &str = "the configuration file does not have these changes, and `riserd reload` or a \
                       restart undoes them: `riserd save FILE` writes them down, and \
                       `riserd run --restore` serves them again unless the file is edited";

/// A restart would not.
const RESTORED: &str = "the configuration file does not have these changes; a restart keeps them, but \
                        `riserd reload` serves the file without them, as a restart does once it is \
                        edited: `riserd save FILE` writes them down";

/// A backend that is larger than its configuration says.
fn drift(drift: &DriftView) -> String {
    let (path, configured, served) = (&drift.path, bytes(drift.configured), bytes(drift.served));
    format!("! {path}: configured {configured}, served {served}; it stays as large")
}

/// Commands, a line each, and beneath it when they reached which stage.
#[must_use]
pub fn traced(traced: &Traced) -> String {
    let mut lines = Vec::new();
    let zone = TimeZone::system();
    for command in &traced.commands {
        // A command that was refused may have an operation code that no table names.
        let name = command.name.clone();
        let name = name.unwrap_or_else(|| format!("opcode {:#04x}", command.opcode));
        let blocks = match (command.lba, command.blocks) {
            (Some(lba), Some(blocks)) => format!(" lba {lba} blocks {blocks}"),
            _ => String::new(),
        };
        let micros = |seconds: f64| seconds * 1e6;
        lines.push(format!(
            "{}  {}/{}  nexus {} {}  tag {:#x}  {name}{blocks}: {} bytes, status {:#04x}, {:.1} us",
            time(command.time as u64, &zone),
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
        lines.push("no command matched".to_owned());
    }
    lines.join("\n")
}

/// Configurations that were applied, a line each, and beneath it what changed with it.
#[must_use]
pub fn history(entries: &[HistoryView]) -> String {
    let zone = TimeZone::system();
    let mut lines = Vec::new();
    for entry in entries {
        let (time, who) = (time(entry.time, &zone), named(&entry.who));
        lines.push(format!(
            "{:>3}  {time}  {}  by {who}",
            entry.back, entry.how
        ));
        let changes = entry.changes.iter().take(SHOWN);
        lines.extend(changes.map(|change| format!("       {}", difference(change))));
        if entry.changes.len() > SHOWN {
            lines.push(format!("       and {} more", entry.changes.len() - SHOWN));
        }
    }
    lines.join("\n")
}

/// The origin of a change, with the name of the user.
fn named(who: &str) -> String {
    let uid = who.strip_prefix("uid ");
    let uid = uid.and_then(|rest| rest.split(' ').next()?.parse().ok());
    let user = uid.and_then(|uid| User::from_uid(Uid::from_raw(uid)).ok()?);
    user.map_or_else(|| who.to_owned(), |user| format!("{}, {who}", user.name))
}

/// A time in seconds since 1970 as the clocks of a time zone show it, with its distance from UTC.
fn time(seconds: u64, zone: &TimeZone) -> String {
    let time = i64::try_from(seconds).ok();
    let time = time.and_then(|seconds| Timestamp::from_second(seconds).ok());
    time.map_or_else(
        || format!("{seconds} s after 1970"),
        |time| {
            let local = time.to_zoned(zone.clone());
            local.strftime("%F %T %:z").to_string()
        },
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_those_of_the_zone() {
        let zone = |text| TimeZone::posix(text).unwrap();
        for (seconds, text, expected) in [
            (0, "UTC0", "1970-01-01 00:00:00 +00:00"),
            (951_782_400, "UTC0", "2000-02-29 00:00:00 +00:00"),
            (1_767_225_599, "EST5", "2025-12-31 18:59:59 -05:00"),
        ] {
            assert_eq!(time(seconds, &zone(text)), expected);
        }
        assert_eq!(
            time(u64::MAX, &TimeZone::UTC),
            "18446744073709551615 s after 1970"
        );
    }

    #[test]
    fn a_backend_that_fails_some_commands_is_not_called_not_served() {
        let line = |failing| {
            problem(&ProblemView {
                kind: "backend".to_owned(),
                name: "disk0".to_owned(),
                error: "No space left on device".to_owned(),
                since: 0,
                failing,
            })
        };
        let said = "backend disk0: No space left on device";
        assert_eq!(line(true), format!("FAILING: {said}"));
        assert_eq!(line(false), format!("NOT SERVED: {said}"));
    }

    #[test]
    fn history_shows_what_each_configuration_changed_and_who_asked() {
        let difference = |path: String, old: Value, new: Value| Difference { path, old, new };
        let more = (0..SHOWN).map(|n| difference(format!("/limits/{n}"), Value::Null, n.into()));
        let entry = |back, changes| HistoryView {
            back,
            time: 0,
            who: "uid 0 (process 7)".to_owned(),
            how: "apply".to_owned(),
            changes,
        };
        let mut many: Vec<_> = more.collect();
        many.push(difference("/x".to_owned(), 1.into(), 2.into()));
        let moved = difference("/targets/t/luns/0".to_owned(), "a".into(), "b".into());
        let text = history(&[entry(0, vec![moved]), entry(1, many)]);
        let lines: Vec<&str> = text.lines().collect();
        assert!(
            lines[0].ends_with("  apply  by root, uid 0 (process 7)"),
            "{text}"
        );
        assert_eq!(lines[1], "       ~ /targets/t/luns/0: \"a\" -> \"b\"");
        assert_eq!(lines[3], "       + /limits/0: 0");
        assert_eq!(*lines.last().unwrap(), "       and 1 more");
        assert_eq!(named("SIGHUP"), "SIGHUP");
    }
}
