//! Login log for a worker. Each login adds a line to the audit log and updates a counter, so these
//! are always consistent.

use std::fmt::Display;
use std::time::Instant;

use crate::audit::{Audit, Who};
use crate::config::Protocol;
use crate::stats::Tally;

/// Reason for refusing a login.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Reason {
    /// Name used in the audit log.
    pub(super) logged: &'static str,
    /// Name used in metrics.
    pub(super) counted: &'static str,
}

impl Reason {
    /// There are too many connections.
    pub(super) const OUT_OF_RESOURCES: Self = Self::of("out_of_resources");

    /// Creates a reason using the same name in the log and in metrics.
    pub(super) const fn of(name: &'static str) -> Self {
        Self {
            logged: name,
            counted: name,
        }
    }
}

/// Accepted and refused logins.
#[derive(Debug, Default)]
pub(super) struct LoginLog {
    pub(super) audit: Audit,
    accepted: Tally<Protocol>,
    refused: Tally<(Protocol, &'static str)>,
}

impl LoginLog {
    /// Logs a successful login.
    pub(super) fn accept(&mut self, now: Instant, who: &Who) {
        self.audit.login(now, who);
        self.accepted.count(who.protocol);
    }

    /// Logs a failed login, or a connection refused before login.
    pub(super) fn refuse(
        &mut self,
        now: Instant,
        who: &Who,
        reason: Reason,
        detail: Option<&dyn Display>,
    ) {
        self.audit.denied(now, who, reason.logged, detail);
        self.refused.count((who.protocol, reason.counted));
    }

    /// Returns the number of accepted logins by protocol.
    pub(super) fn accepted(&self) -> &Tally<Protocol> {
        &self.accepted
    }

    /// Returns the number of refused logins by protocol and reason.
    pub(super) fn refused(&self) -> &Tally<(Protocol, &'static str)> {
        &self.refused
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn logins_are_counted_despite_suppressed_lines() {
        let who = Who {
            protocol: Protocol::Iscsi,
            peer: "10.0.0.9:1024".into(),
            portal: "10.0.0.1:3260".into(),
            initiator: None,
            user: None,
            target: None,
            nexus: None,
        };
        let now = Instant::now();
        let mut log = LoginLog::default();
        log.accept(now, &who);
        for _ in 0..10_000 {
            log.refuse(now, &who, Reason::OUT_OF_RESOURCES, None);
        }
        assert!(log.audit.deadline().is_some(), "lines are held back");
        let accepted: Vec<_> = log.accepted().iter().collect();
        assert_eq!(accepted, [(Protocol::Iscsi, 1)]);
        let refused: Vec<_> = log.refused().iter().collect();
        assert_eq!(refused, [((Protocol::Iscsi, "out_of_resources"), 10_000)]);
    }
}
