//! The audit log: who logged in and out, whom we sent away, and who changed the configuration or
//! the program.
//!
//! Every line is an event of the log under [`TARGET`], which the log's filter does not hide, with
//! fields of these names:
//!
//! | event | when | fields |
//! | --- | --- | --- |
//! | `login` | a connection of a session has logged in | those of [`Who`] |
//! | `end` | such a connection is gone | likewise, `reason` ([`Parting`]) |
//! | `denied` | an initiator may not log in | likewise, `reason`, `detail` |
//! | `discovery` | an initiator asked for the targets | likewise, `found` |
//! | `config_changed` | a configuration is served | `who`, `how`, `revision`, `changes`, `paths` |
//! | `config_rolled_back` | likewise, one that was served before | likewise |
//! | `config_rejected` | a configuration is not served | `who`, `how`, `revision` that stays, `reason` |
//! | `disconnect` | sessions are requested to log out | `who`, `initiator`, `connections` |
//! | `blocked` | an initiator is kept from logging in | `who`, `initiator`, `seconds` |
//! | `unblocked` | a blocked initiator may log in again | `who`, `initiator` |
//! | `upgrade` | another program is about to take over | `who`, `program`, `from`, `to` |
//! | `upgrade_rejected` | a program may not take over | `who`, `program`, `reason` |
//! | `suppressed` | lines were held back | `of`, `suppressed` |
//!
//! No line has a secret. What peers can cause is bounded at each worker, by a burst and a number of
//! lines a second ([`Audit`]); the next line of the kind has the number that was held back, or one
//! of its own soon after.

use std::fmt::Display;
use std::path::Path;
use std::time::{Duration, Instant};

use tracing::field::display;

use crate::config::{Difference, Protocol};
use crate::log::RateLimit;

/// Target of these lines in the log.
pub const TARGET: &str = "riserd::audit";

/// Places of a change that are named.
const PATHS: usize = 32;

/// The other end of a connection, as far as it is known.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Who {
    /// Protocol of the connection.
    pub protocol: Protocol,
    /// Address of the initiator.
    pub peer: String,
    /// Address of the portal that it came to.
    pub portal: String,
    /// The initiator port, as it calls itself.
    pub initiator: Option<String>,
    /// The CHAP user that it has proved to be; of a refused login, that it claims to be.
    pub user: Option<String>,
    /// The target's name in the configuration, or what the initiator calls it.
    pub target: Option<String>,
    /// Number of the I_T nexus.
    pub nexus: Option<u64>,
}

/// Reason for the end of a connection: the first that applies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Parting {
    /// The initiator logged out.
    Logout,
    /// The initiator closed the connection.
    Closed,
    /// It was asked to leave: what it used is no longer served to it, or the daemon ends.
    Shutdown,
    /// We ended it: another login took its place, or another connection of the session ended it.
    Terminated,
    /// The initiator broke the protocol.
    Protocol,
    /// The initiator did not answer any more.
    Silent,
    /// The connection was lost.
    Lost,
}

impl Parting {
    /// Its name in the log.
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

/// The lines of one worker, within bounds.
#[derive(Debug)]
pub struct Audit {
    /// Logins and their ends: those of all sessions at once, then ten a second.
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
    /// A connection has logged in.
    pub fn login(&mut self, now: Instant, who: &Who) {
        if let Some(suppressed) = self.sessions.admit(now) {
            line!(INFO, "login", who, suppressed, {}, "logged in");
        }
    }

    /// A connection that had logged in is gone.
    pub fn end(&mut self, now: Instant, who: &Who, why: Parting) {
        if let Some(suppressed) = self.sessions.admit(now) {
            line!(INFO, "end", who, suppressed, { reason = why.name(), }, "session ended");
        }
    }

    /// A login was refused, or a connection was closed before one.
    pub fn denied(&mut self, now: Instant, who: &Who, reason: &str, detail: Option<&dyn Display>) {
        if let Some(suppressed) = self.denied.admit(now) {
            let detail = detail.map(display);
            line!(WARN, "denied", who, suppressed, { reason, detail, }, "login denied");
        }
    }

    /// A discovery was answered with this number of targets.
    pub fn discovery(&mut self, now: Instant, who: &Who, found: usize) {
        if let Some(suppressed) = self.discoveries.admit(now) {
            line!(INFO, "discovery", who, suppressed, { found, }, "targets reported");
        }
    }

    /// Next time at which [`Audit::poll`] has something to log.
    #[must_use]
    pub fn deadline(&self) -> Option<Instant> {
        let limits = [&self.sessions, &self.denied, &self.discoveries];
        limits.into_iter().filter_map(RateLimit::due).min()
    }

    /// Says how many lines were held back, before nothing is said any more.
    pub fn finish(&mut self, now: Instant) {
        if let Some(due) = self.deadline() {
            // Each kind has earned a line by then.
            let interval = Duration::from_secs(1);
            self.poll(due.max(now) + interval);
        }
    }

    /// Says how many lines were held back, where it is time to.
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
                    target: TARGET, event = "suppressed", of, suppressed, "lines held back"
                );
            }
        }
    }
}

/// Origin of a request for a configuration.
#[derive(Clone, Copy, Debug)]
pub struct Asked<'a> {
    /// User and process, or the signal.
    pub who: &'a str,
    /// `start`, `apply`, `reload`, `rollback 1`.
    pub how: &'a str,
}

/// A configuration is served from now on.
pub fn changed(asked: Asked<'_>, revision: &str, changes: &[Difference]) {
    let Asked { who, how } = asked;
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

/// A configuration is not served; the one of this revision stays.
pub fn rejected(asked: Asked<'_>, revision: &str, reason: &dyn Display) {
    let Asked { who, how } = asked;
    tracing::warn!(
        target: TARGET, event = "config_rejected", who, how, revision, reason = %reason,
        "configuration not applied"
    );
}

/// An administrator requests the sessions of an initiator to log out.
pub fn disconnecting(who: &str, initiator: &str, connections: usize) {
    tracing::info!(
        target: TARGET, event = "disconnect", who, initiator, connections, "disconnecting"
    );
}

/// An administrator keeps an initiator from logging in, for a time or without limit.
pub fn blocked(who: &str, initiator: &dyn Display, duration: Option<Duration>) {
    let (initiator, seconds) = (display(initiator), duration.map(|d| d.as_secs()));
    tracing::info!(target: TARGET, event = "blocked", who, initiator, seconds, "initiator blocked");
}

/// An administrator lets a blocked initiator log in again.
pub fn unblocked(who: &str, initiator: &dyn Display) {
    let initiator = display(initiator);
    tracing::info!(target: TARGET, event = "unblocked", who, initiator, "initiator unblocked");
}

/// Another program is about to take over: from a version, to a version.
pub fn upgrading(who: &str, program: &Path, from: &str, to: &str) {
    let program = program.display();
    tracing::info!(
        target: TARGET, event = "upgrade", who, %program, from, to, "handing over"
    );
}

/// A program may not take over, and this one stays.
pub fn not_upgraded(who: &str, program: &Path, reason: &dyn Display) {
    let program = program.display();
    tracing::warn!(
        target: TARGET, event = "upgrade_rejected", who, %program, reason = %reason, "not handed over"
    );
}
