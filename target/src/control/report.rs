//! What the admin API says, in lines for people.

use super::view::{SessionView, Status, TargetView};

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
            format!(
                "  lun {number}: {} bytes in blocks of {}, serial {}{read_only}",
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
