//! The logins of a worker: for each a line of the audit log and a count, which therefore never
//! differ.

use std::fmt::Display;
use std::time::Instant;

use crate::audit::{Audit, Who};
use crate::config::Protocol;
use crate::stats::Tally;

/// A reason for a refusal, by its names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Reason {
    /// In the audit log.
    pub(super) logged: &'static str,
    /// Name among the metrics.
    pub(super) counted: &'static str,
}

impl Reason {
    /// There is no room for another connection.
    pub(super) const OUT_OF_RESOURCES: Self = Self::of("out_of_resources");

    /// Makes a reason that has one name for both.
    pub(super) const fn of(name: &'static str) -> Self {
        Self {
            logged: name,
            counted: name,
        }
    }
}

/// Logins that were accepted and refused.
#[derive(Debug, Default)]
pub(super) struct LoginLog {
    pub(super) audit: Audit,
    accepted: Tally<Protocol>,
    refused: Tally<(Protocol, &'static str)>,
}

impl LoginLog {
    /// Notes that a connection has logged in.
    pub(super) fn accept(&mut self, now: Instant, who: &Who) {
        self.audit.login(now, who);
        self.accepted.count(who.protocol);
    }

    /// Notes that a login was refused, or a connection before its login.
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

    /// Accepted logins by protocol.
    pub(super) fn accepted(&self) -> &Tally<Protocol> {
        &self.accepted
    }

    /// Refused logins by protocol and reason.
    pub(super) fn refused(&self) -> &Tally<(Protocol, &'static str)> {
        &self.refused
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn logins_are_counted_however_many_lines_are_held_back() {
        let who = Who {
            protocol: Protocol::Iscsi,
            peer: "10.0.0.9:1024".into(),
            portal: "10.0.0.1:3260".into(),
            initiator: None,
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
