//! Formats admin API responses for users.

use jiff::Timestamp;
use jiff::tz::TimeZone;
use std::time::Duration;

use nix::unistd::{Uid, User};
use riser_admin_api::client::Upgraded;
use riser_admin_api::trace::Traced;
use riser_admin_api::view::{
    BlockedView, Changes, DriftView, HistoryView, LimitsView, ProblemView, ScrubView, SessionView,
    Status, TargetView, Written, target_label,
};
use serde_json::Value;

use crate::config::Difference;
use crate::units::bytes;

/// Maximum number of changes to show per history entry.
const SHOWN: usize = 16;

/// Formats connections, one per line, followed by their login parameters.
#[must_use]
pub fn sessions(sessions: &Vec<SessionView>) -> String {
    if sessions.is_empty() {
        return "no sessions".to_owned();
    }
    let mut lines = Vec::new();
    for s in sessions {
        lines.push(format!(
            "{}  {}  {} from {}{}: {}, {} in flight, {} LUN(s), worker {}, {}",
            target_label(&s.target),
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

/// Formats sessions that were requested to log out.
#[must_use]
pub fn disconnected(sessions: &[SessionView], is_blocked: bool, time: Option<Duration>) -> String {
    let line = |s: &SessionView| {
        let (protocol, initiator, peer) = (&s.protocol, &s.initiator, &s.peer);
        format!("{protocol}  {initiator} from {peer} was requested to log out")
    };
    let mut lines: Vec<_> = sessions.iter().map(line).collect();
    if is_blocked {
        let time = time.map_or_else(String::new, |time| format!(" for {} s", time.as_secs()));
        lines.push(format!(
            "blocked{time}: `riserd status` lists blocked initiators, `riserd unblock` unblocks them"
        ));
    }
    lines.join("\n")
}

/// Returns the underlying transport, if it is not clear from the address and protocol.
fn over(provider: Option<&str>) -> &'static str {
    match provider {
        Some(riser_transport::shm::PROVIDER) => " over shared memory",
        _ => "",
    }
}

/// Formats targets with their portals and logical units.
#[must_use]
pub fn targets(targets: &Vec<TargetView>) -> String {
    let mut lines = Vec::new();
    for t in targets {
        let iqn = t
            .iqn
            .as_ref()
            .map_or_else(String::new, |iqn| format!("  {iqn}"));
        lines.push(format!("{}{iqn}", t.name));
        lines.extend(t.portals.iter().map(|p| {
            let problem = p.problem.as_ref().map_or_else(String::new, |problem| {
                format!(", {}: {}", problem.state, problem.error)
            });
            format!("  {} {}{problem}", p.protocol, p.listen)
        }));
        lines.extend(t.luns.iter().flat_map(|(number, lun)| {
            let read_only = if lun.read_only { ", read-only" } else { "" };
            // This is shown on the same line as the unit so that operators cannot miss it, because
            // data may be lost.
            let failed = lun.flush_failure.as_ref().map_or_else(String::new, |f| {
                format!(", A FLUSH FAILED ({}): writes may be lost", f.error)
            });
            let state = lun.problem.as_ref().map_or_else(String::new, |problem| {
                format!("{} (backend {}), ", problem.state, lun.backend)
            });
            let size = lun.size.map_or_else(
                || "size unknown".to_owned(),
                |size| format!("{} in blocks of {} bytes", bytes(size), lun.block_size),
            );
            let wwn = lun.wwn.as_ref();
            let wwn = wwn.map_or_else(String::new, |wwn| format!(", wwn-{wwn}"));
            let line = format!(
                "  lun {number}: {state}{size}, serial {}{wwn}{read_only}{failed}",
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

/// Formats limits and the commands delayed by them.
fn limits(limits: &LimitsView) -> String {
    let rates = limits
        .rates
        .iter()
        .map(|(name, rate)| format!("{name}={rate}"));
    format!(
        "limits: {} burst={}ms; {} command(s) waited {} ms in total",
        rates.collect::<Vec<_>>().join(" "),
        limits.burst_ms,
        limits.waits,
        limits.waited_ms
    )
}

/// Formats the daemon and its workers.
#[must_use]
pub fn status(status: &Status) -> String {
    let mut lines = vec![format!(
        "riserd {} (process {}), up {} s, {} session(s)",
        status.version, status.pid, status.uptime, status.sessions
    )];
    // Show problems before workers, because there may be more workers than lines on the screen.
    lines.extend(status.problems.iter().map(problem));
    lines.extend(status.scrubs.iter().map(scrub));
    let zone = TimeZone::system();
    lines.extend(status.blocked.iter().map(|b| blocked(b, &zone)));
    lines.extend(status.written.drift.iter().map(drift));
    lines.extend(standing(&status.written));
    let upgrade_record = &status.upgrade_record;
    if let Some(from) = &upgrade_record.upgraded_from {
        lines.push(format!(
            "upgraded from riserd {from}, {} time(s) in total",
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

/// Formats the last scrub of each backend.
#[must_use]
pub fn scrubs(scrubs: &[ScrubView]) -> String {
    if scrubs.is_empty() {
        return "no backend was scrubbed since the start".to_owned();
    }
    let lines = scrubs.iter().map(scrub);
    lines.collect::<Vec<_>>().join("\n")
}

/// Formats a scrub, with one line for each listed defect.
#[must_use]
pub fn scrub(scrub: &ScrubView) -> String {
    let zone = TimeZone::system();
    let percent = scrub.checked as f64 * 100.0 / scrub.blocks.max(1) as f64;
    let defects: u64 = scrub.defects.values().sum();
    let rate = scrub.rate.filter(|_| scrub.ended.is_none());
    let rate = rate.map_or_else(String::new, |rate| format!(" at {}/s", bytes(rate)));
    let error = scrub.error.as_ref();
    let error = error.map_or_else(String::new, |error| format!(" ({error})"));
    let ended = scrub
        .ended
        .map_or_else(String::new, |ended| format!(" at {}", time(ended, &zone)));
    let label = if defects > 0 {
        "DEFECTIVE"
    } else {
        "defective"
    };
    let mut lines = vec![format!(
        "backend {}: scrub {}{ended}{error}, {percent:.1} % of {} blocks{rate}, {defects} {label}",
        scrub.backend, scrub.state, scrub.blocks
    )];
    let listed = scrub.listed.iter();
    lines.extend(listed.map(|block| format!("    LBA {}: {}", block.lba, block.defect)));
    let hidden = defects.saturating_sub(scrub.listed.len() as u64);
    if hidden > 0 {
        lines.push(format!("    and {hidden} more: see the log"));
    }
    lines.join("\n")
}

/// Formats the initiators that are still blocked.
#[must_use]
pub fn blocklist(list: &[BlockedView]) -> String {
    let zone = TimeZone::system();
    match list {
        [] => "no initiator is blocked".to_owned(),
        list => {
            let lines = list.iter().map(|b| blocked(b, &zone));
            lines.collect::<Vec<_>>().join("\n")
        }
    }
}

/// Formats a blocked initiator.
fn blocked(blocked: &BlockedView, zone: &TimeZone) -> String {
    let until = match blocked.until {
        Some(until) => format!("until {}", time(until, zone)),
        None => "until `riserd unblock`".to_owned(),
    };
    let (since, who) = (time(blocked.since, zone), named(&blocked.who));
    format!(
        "BLOCKED: initiator {} {until}, since {since} by {who}",
        blocked.initiator
    )
}

/// Formats a problem.
#[must_use]
pub fn problem(problem: &ProblemView) -> String {
    format!("{}: {problem}", problem.state)
}

/// Formats a completed upgrade.
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

/// Formats differences, one per line.
#[must_use]
pub fn changes(changes: &Changes) -> String {
    let mut lines: Vec<String> = changes.changes.iter().map(difference).collect();
    lines.extend(changes.written.drift.iter().map(drift));
    if lines.is_empty() {
        lines.push("no differences".to_owned());
    }
    lines.extend(changes.warnings.iter().map(|w| format!("warning: {w}")));
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

/// Returns a warning if the configuration file is different from the current configuration.
fn standing(written: &Written) -> Option<String> {
    let said = match (written.unsaved, written.restored) {
        (true, _) => UNSAVED,
        (false, true) => RESTORED,
        (false, false) => return None,
    };
    Some(said.to_owned())
}

/// Changes would be lost on restart.
const UNSAVED: &str = "the configuration file does not contain these changes, and `riserd reload` \
                       or a restart reverts them: save them with `riserd save FILE`, or start with \
                       `riserd run --restore`, which restores them unless the file was edited";

/// Changes would be restored on restart.
const RESTORED: &str = "the configuration file does not contain these changes; a restart keeps \
                        them unless the file was edited, but `riserd reload` reverts them: save \
                        them with `riserd save FILE`";

/// Formats a backend that is larger than its configured size.
fn drift(drift: &DriftView) -> String {
    let (path, configured, served) = (&drift.path, bytes(drift.configured), bytes(drift.served));
    format!("! {path}: configured {configured}, served {served}; backends are not shrunk")
}

/// Formats commands, one per line, followed by the timestamps of their stages.
#[must_use]
pub fn traced(traced: &Traced) -> String {
    let mut lines = Vec::new();
    let zone = TimeZone::system();
    for command in &traced.commands {
        // A rejected command may have an unknown operation code.
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
        lines.push(format!(
            "{} more commands were dropped because they arrived too fast",
            traced.missed
        ));
    }
    if lines.is_empty() {
        lines.push("no command matched".to_owned());
    }
    lines.join("\n")
}

/// Formats previous configurations, one per line, followed by their changes.
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

/// Formats the origin of a change using the user name.
fn named(who: &str) -> String {
    let uid = who.strip_prefix("uid ");
    let uid = uid.and_then(|rest| rest.split(' ').next()?.parse().ok());
    let user = uid.and_then(|uid| User::from_uid(Uid::from_raw(uid)).ok()?);
    user.map_or_else(|| who.to_owned(), |user| format!("{}, {who}", user.name))
}

/// Formats a time in seconds since 1970 for a time zone, including the UTC offset.
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
    fn times_use_time_zone() {
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
    fn partly_failing_backend_is_reported_as_failing() {
        let line = |state: &str| {
            problem(&ProblemView {
                kind: "backend".to_owned(),
                name: "disk0".to_owned(),
                error: "No space left on device".to_owned(),
                state: state.to_owned(),
                ..ProblemView::default()
            })
        };
        let said = "backend disk0: No space left on device";
        assert_eq!(line("FAILING"), format!("FAILING: {said}"));
        assert_eq!(line("NOT SERVED"), format!("NOT SERVED: {said}"));
    }

    #[test]
    fn history_shows_changes_and_requester() {
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
