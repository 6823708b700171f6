//! The audit log: records logins and logouts, refused and disconnected initiators, and changes to
//! the configuration or program.
//!
//! Every line is a log event with the target [`TARGET`], which is not affected by the log filter.
//! These are the events and their fields:
//!
//! | event | when | fields |
//! | --- | --- | --- |
//! | `login` | a connection of a session has logged in | all fields of [`Who`] |
//! | `end` | a logged-in connection was closed | all fields of [`Who`], `reason` ([`CloseReason`]) |
//! | `denied` | a login was refused | all fields of [`Who`], `reason`, `detail` |
//! | `discovery` | an initiator requested the list of targets | all fields of [`Who`], `found` |
//! | `config_changed` | new configuration is active | `who`, `how`, `revision`, `changes`, `paths` |
//! | `config_rolled_back` | a previous configuration is active again | same as `config_changed` |
//! | `config_rejected` | a configuration was rejected | `who`, `how`, active `revision`, `reason` |
//! | `disconnect` | sessions are requested to log out | `who`, `initiator`, `connections` |
//! | `blocked` | an initiator is prevented from logging in | `who`, `initiator`, `seconds` |
//! | `unblocked` | a blocked initiator may log in again | `who`, `initiator` |
//! | `upgrade` | another program is about to take over | `who`, `program`, `from`, `to` |
//! | `upgrade_rejected` | a program was refused for an upgrade | `who`, `program`, `reason` |
//! | `suppressed` | lines were suppressed | `of`, `suppressed` |
//!
//! Lines never contain secrets. Events that can be triggered by peers are rate-limited per worker,
//! with a burst and a number of lines per second ([`Audit`]). The number of suppressed lines is
//! included in the next line of the same kind, or logged separately soon afterwards.

use std::fmt::Display;
use std::path::Path;
use std::time::{Duration, Instant};

use tracing::field::display;

use crate::config::{Difference, Protocol};
use crate::log::RateLimit;

/// Target of audit lines in the log.
pub const TARGET: &str = "riserd::audit";

/// Maximum number of changed paths listed in a line.
const PATHS: usize = 32;

/// The remote end of a connection, with all information available so far.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Who {
    /// Protocol of the connection.
    pub protocol: Protocol,
    /// Address of the initiator.
    pub peer: String,
    /// Address of the portal that accepted the connection.
    pub portal: String,
    /// Name of the initiator port, as sent by the initiator.
    pub initiator: Option<String>,
    /// Authenticated CHAP user, or the claimed CHAP user if the login was refused.
    pub user: Option<String>,
    /// Name of the target in the configuration, or the name requested by the initiator.
    pub target: Option<String>,
    /// I_T nexus number.
    pub nexus: Option<u64>,
}

/// Reason for closing a connection. If several reasons apply, this is the first one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CloseReason {
    /// The initiator logged out.
    Logout,
    /// The initiator closed the connection.
    Closed,
    /// The initiator was requested to log out, because we stopped serving a resource it was using,
    /// or because the daemon is shutting down.
    Shutdown,
    /// We closed the connection, because another login replaced it, or on request of another
    /// connection of the session.
    Terminated,
    /// The initiator violated the protocol.
    Protocol,
    /// The initiator stopped responding.
    Silent,
    /// The connection was lost.
    Lost,
}

impl CloseReason {
    /// Returns the name in the log.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Logout => "logout",
            Self::Closed => "closed",
            Self::Shutdown => "shutdown",
            Self::Terminated => "terminated",
            Self::Protocol => "protocol_error",
            Self::Silent => "silent",
            Self::Lost => "lost",
        }
    }
}

/// Rate-limited audit log of a worker.
#[derive(Debug)]
pub struct Audit {
    /// Logins and logouts: a burst for all sessions, then ten per second.
    sessions: RateLimit,
    denied: RateLimit,
    discoveries: RateLimit,
}

impl Default for Audit {
    fn default() -> Self {
        Self {
            sessions: RateLimit::new(1024, Duration::from_millis(100)),
            denied: RateLimit::default(),
            discoveries: RateLimit::default(),
        }
    }
}

macro_rules! line {
    ($level:ident, $event:literal, $who:expr, $suppressed:expr, { $($more:tt)* }, $message:literal) => {
        tracing::event!(
            target: TARGET,
            tracing::Level::$level,
            event = $event,
            protocol = %$who.protocol,
            peer = %$who.peer,
            portal = %$who.portal,
            initiator = $who.initiator.as_ref().map(display),
            user = $who.user.as_ref().map(display),
            target = $who.target.as_ref().map(display),
            nexus = $who.nexus,
            $($more)*
            suppressed = ($suppressed > 0).then_some($suppressed),
            $message
        )
    };
}

impl Audit {
    /// Logs that a connection has logged in.
    pub fn login(&mut self, now: Instant, who: &Who) {
        if let Some(suppressed) = self.sessions.admit(now) {
            line!(INFO, "login", who, suppressed, {}, "logged in");
        }
    }

    /// Logs that a logged-in connection was closed.
    pub fn log_close(&mut self, now: Instant, who: &Who, why: CloseReason) {
        if let Some(suppressed) = self.sessions.admit(now) {
            line!(INFO, "end", who, suppressed, { reason = why.name(), }, "session ended");
        }
    }

    /// Logs that a login was refused, or that a connection was closed before logging in.
    pub fn denied(&mut self, now: Instant, who: &Who, reason: &str, detail: Option<&dyn Display>) {
        if let Some(suppressed) = self.denied.admit(now) {
            let detail = detail.map(display);
            line!(WARN, "denied", who, suppressed, { reason, detail, }, "login denied");
        }
    }

    /// Logs a response to a discovery request with this number of targets.
    pub fn discovery(&mut self, now: Instant, who: &Who, found: usize) {
        if let Some(suppressed) = self.discoveries.admit(now) {
            line!(INFO, "discovery", who, suppressed, { found, }, "targets reported");
        }
    }

    /// Returns the next time when [`Audit::poll`] must be called.
    #[must_use]
    pub fn deadline(&self) -> Option<Instant> {
        let limits = [&self.sessions, &self.denied, &self.discoveries];
        limits.into_iter().filter_map(RateLimit::due).min()
    }

    /// Logs the number of suppressed lines, before the log is closed.
    pub fn finish(&mut self, now: Instant) {
        if let Some(due) = self.deadline() {
            // By then, the rate limit allows one more line of each kind.
            let interval = Duration::from_secs(1);
            self.poll(due.max(now) + interval);
        }
    }

    /// Logs the number of suppressed lines, if this is due.
    pub fn poll(&mut self, now: Instant) {
        let limits = [
            ("sessions", &mut self.sessions),
            ("denied", &mut self.denied),
            ("discovery", &mut self.discoveries),
        ];
        for (of, limit) in limits {
            if limit.due().is_some_and(|due| due <= now)
                && let Some(suppressed) = limit.admit(now)
            {
                tracing::info!(
                    target: TARGET, event = "suppressed", of, suppressed, "lines suppressed"
                );
            }
        }
    }
}

/// Origin of a configuration request.
#[derive(Clone, Copy, Debug)]
pub struct ChangeOrigin<'a> {
    /// User and process, or a signal.
    pub who: &'a str,
    /// `start`, `apply`, `reload`, `rollback 1`.
    pub how: &'a str,
}

/// Logs that a new configuration is active.
pub fn changed(origin: ChangeOrigin<'_>, revision: &str, changes: &[Difference]) {
    let ChangeOrigin { who, how } = origin;
    let event = if how.starts_with("rollback") {
        "config_rolled_back"
    } else {
        "config_changed"
    };
    let paths = changes
        .iter()
        .take(PATHS)
        .map(|change| change.path.as_str());
    let paths = paths.collect::<Vec<_>>().join(" ");
    let changes = changes.len();
    let message = match how {
        "start" => "configuration served",
        _ => "configuration applied",
    };
    tracing::info!(target: TARGET, event, who, how, revision, changes, paths, "{message}");
}

/// Logs that a configuration was rejected, and that `revision` remains active.
pub fn rejected(origin: ChangeOrigin<'_>, revision: &str, reason: &dyn Display) {
    let ChangeOrigin { who, how } = origin;
    tracing::warn!(
        target: TARGET, event = "config_rejected", who, how, revision, reason = %reason,
        "configuration not applied"
    );
}

/// Logs that an administrator requested an initiator to log out of its sessions.
pub fn disconnecting(who: &str, initiator: &str, connections: usize) {
    tracing::info!(
        target: TARGET, event = "disconnect", who, initiator, connections, "disconnecting"
    );
}

/// Logs that an administrator blocked an initiator from logging in, for a duration or indefinitely.
pub fn blocked(who: &str, initiator: &dyn Display, duration: Option<Duration>) {
    let (initiator, seconds) = (display(initiator), duration.map(|d| d.as_secs()));
    tracing::info!(target: TARGET, event = "blocked", who, initiator, seconds, "initiator blocked");
}

/// Logs that an administrator allowed a blocked initiator to log in again.
pub fn unblocked(who: &str, initiator: &dyn Display) {
    let initiator = display(initiator);
    tracing::info!(target: TARGET, event = "unblocked", who, initiator, "initiator unblocked");
}

/// Logs that another program is about to take over, with the old and new version.
pub fn upgrading(who: &str, program: &Path, from: &str, to: &str) {
    let program = program.display();
    tracing::info!(
        target: TARGET, event = "upgrade", who, %program, from, to, "handing over"
    );
}

/// Logs that a program was refused for an upgrade, so the current program continues.
pub fn not_upgraded(who: &str, program: &Path, reason: &dyn Display) {
    let program = program.display();
    tracing::warn!(
        target: TARGET, event = "upgrade_rejected", who, %program, reason = %reason, "not handed over"
    );
}
