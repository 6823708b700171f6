//! Problems of what should be served and is not: backends that cannot be opened, portals whose
//! address cannot be listened on, and what the control plane cannot have.
//!
//! # Degraded, not dead
//! At the start, a backend or portal that cannot be had is a problem, and the rest is served,
//! unless the configuration says `strict: true`. Logical units of such a backend answer NOT READY,
//! MANUAL INTERVENTION REQUIRED; such a portal is not advertised.
//! [`Server::retry`](super::Server::retry) tries again, and each change of the configuration does.
//! Addresses and files that are in use are waited for first, since a daemon that is ending has
//! them for a while. Where no portal at all can be listened on since another program has them, the
//! start fails: that is a second daemon. Shared memory beside portals is optional: a problem like the
//! others, but the daemon is ready without it, and `strict: true` does not insist on it.
//!
//! A change is made whole or not at all: only problems that there were before may remain.

use std::collections::BTreeMap;
use std::fmt;
use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;
use std::time::SystemTime;

use super::ServerError;
use crate::backend::{Cause, Failing};
use crate::config::{Listen, Protocol};
use crate::worker::portals::Unserved;

/// Target of the lines about problems in the log.
pub const TARGET: &str = "riserd::problems";

/// Something that is not served.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Subject {
    /// A backend, by its name.
    Backend(String),
    /// A portal on an RDMA device.
    RdmaPortal(SocketAddr),
    /// A portal on TCP.
    TcpPortal(SocketAddr),
    /// Memory shared with initiators on this host, beside the RDMA portals of an address.
    SharedMemory(IpAddr),
    /// A portal with a wildcard, of a protocol.
    Wildcard(Listen, Protocol),
    /// The address of metrics and the status page.
    Metrics(SocketAddr),
    /// The socket of the admin API.
    Admin(PathBuf),
    /// The names of logical units in the state directory.
    Identities,
}

impl Subject {
    /// A portal at an address.
    #[must_use]
    pub const fn portal(protocol: Protocol, at: SocketAddr) -> Self {
        match protocol {
            Protocol::Srp | Protocol::Iser => Self::RdmaPortal(at),
            Protocol::Iscsi => Self::TcpPortal(at),
        }
    }

    /// Returns true for what is offered beside the portals. A daemon is ready without it, and
    /// starts without it even if it is to be strict: any local user can keep it from being had.
    #[must_use]
    pub const fn is_optional(&self) -> bool {
        matches!(self, Self::SharedMemory(_))
    }

    /// `backend`, `portal`, `shared memory`, `metrics`, `admin` or `state`.
    #[must_use]
    pub const fn kind(&self) -> &'static str {
        match self {
            Self::Backend(_) => "backend",
            Self::RdmaPortal(_) | Self::TcpPortal(_) | Self::Wildcard(..) => "portal",
            Self::SharedMemory(_) => "shared memory",
            Self::Metrics(_) => "metrics",
            Self::Admin(_) => "admin",
            Self::Identities => "state",
        }
    }

    /// The backend's name, the address, the path, or the name of the file.
    #[must_use]
    pub fn name(&self) -> String {
        match self {
            Self::Backend(name) => name.clone(),
            Self::RdmaPortal(addr) | Self::TcpPortal(addr) | Self::Metrics(addr) => {
                addr.to_string()
            }
            Self::SharedMemory(addr) => addr.to_string(),
            Self::Wildcard(listen, _) => listen.to_string(),
            Self::Admin(path) => path.display().to_string(),
            Self::Identities => "identities.json".to_owned(),
        }
    }
}

/// A reason why something is not served, and its time.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Problem {
    /// Reason for it, for people.
    pub why: String,
    /// Time since which it is not served.
    pub since: SystemTime,
    /// Cause for which a backend that is open needs an operator, such as a file system that is full.
    pub cause: Option<Cause>,
}

impl Problem {
    /// Returns true if some commands are still executed.
    #[must_use]
    pub fn is_failing(&self) -> bool {
        self.cause.is_some_and(Cause::is_served)
    }

    /// State of its subject, as text for people.
    #[must_use]
    pub fn state(&self) -> &'static str {
        self.cause.map_or("NOT SERVED", Cause::state)
    }
}

/// Problems by subject, backends first.
#[derive(Clone, Debug, Default)]
pub struct Problems(BTreeMap<Subject, Problem>);

impl Problems {
    /// Returns true if there are none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Returns true if there is one that may end by trying again: a wildcard waits for other
    /// addresses.
    #[must_use]
    pub fn can_be_tried(&self) -> bool {
        let is_wildcard = |subject: &Subject| matches!(subject, Subject::Wildcard(..));
        !self.0.keys().all(is_wildcard)
    }

    /// Returns all problems, backends first.
    pub fn iter(&self) -> impl Iterator<Item = (&Subject, &Problem)> {
        self.0.iter()
    }

    /// Those because of which something is not served at all: without backends that fail some
    /// commands.
    pub fn not_served(&self) -> impl Iterator<Item = (&Subject, &Problem)> {
        self.iter().filter(|(_, problem)| !problem.is_failing())
    }

    /// Those because of which the daemon is not ready: see [`Cause::is_ready`].
    pub fn unready(&self) -> impl Iterator<Item = (&Subject, &Problem)> {
        let is_ready = |problem: &Problem| problem.cause.is_some_and(Cause::is_ready);
        self.iter()
            .filter(move |(subject, problem)| !subject.is_optional() && !is_ready(problem))
    }

    /// Returns true if something is not served.
    #[must_use]
    pub fn has(&self, subject: &Subject) -> bool {
        self.0.contains_key(subject)
    }

    /// Returns true if a portal of a protocol (`srp`, `iser` or `iscsi`) at an address is not
    /// listened on.
    #[must_use]
    pub fn has_portal(&self, protocol: &str, listen: &str) -> bool {
        self.0.keys().any(|subject| match subject {
            Subject::Backend(_)
            | Subject::SharedMemory(_)
            | Subject::Wildcard(..)
            | Subject::Metrics(_)
            | Subject::Admin(_)
            | Subject::Identities => false,
            Subject::RdmaPortal(addr) => protocol != "iscsi" && addr.to_string() == listen,
            Subject::TcpPortal(addr) => protocol == "iscsi" && addr.to_string() == listen,
        })
    }

    /// Returns a predicate that holds for the portals that are not listened on.
    pub(super) fn portals(&self) -> impl Fn(Protocol, SocketAddr) -> bool + '_ {
        |protocol, at| self.has(&Subject::portal(protocol, at))
    }

    /// The reason why something is not served, if it is not.
    #[must_use]
    pub fn of(&self, subject: &Subject) -> Option<&Problem> {
        self.0.get(subject)
    }

    /// Something cannot be had, or still cannot.
    pub(super) fn add(&mut self, subject: Subject, why: &dyn fmt::Display) {
        let new = || Problem {
            why: String::new(),
            since: SystemTime::now(),
            cause: None,
        };
        self.0.entry(subject).or_insert_with(new).why = why.to_string();
    }

    /// A backend is open and needs an operator. The first cause that is added counts.
    pub(super) fn add_failing(&mut self, subject: Subject, failing: Failing) {
        let Failing { since, why, cause } = failing;
        self.0.entry(subject).or_insert(Problem {
            why,
            since,
            cause: Some(cause),
        });
    }

    /// Adds the problems of another set. Existing problems take precedence.
    pub(super) fn add_missing(&mut self, other: &Self) {
        for (subject, problem) in &other.0 {
            let new = || problem.clone();
            self.0.entry(subject.clone()).or_insert_with(new);
        }
    }

    /// Takes the dates of problems that persist from the previous set.
    pub(super) fn keep_dates(&mut self, before: &Self) {
        for (subject, problem) in &mut self.0 {
            let same = before.0.get(subject);
            if let Some(same) = same.filter(|same| same.cause == problem.cause) {
                problem.since = same.since;
            }
        }
    }

    /// The portals that could not be listened on, in the place of those before: for want of a
    /// device or socket, or at workers; likewise shared memory beside them.
    pub(super) fn set_missing_portals(
        &mut self,
        missing: &[(Subject, ServerError)],
        unserved: &[&[Unserved]],
    ) {
        let mut all = Self::default();
        for (subject, why) in missing {
            all.add(subject.clone(), why);
        }
        for Unserved { portal, why } in unserved.iter().copied().flatten() {
            all.add(Subject::RdmaPortal(*portal), why);
        }
        self.0.retain(|subject, _| match subject {
            Subject::RdmaPortal(_) | Subject::TcpPortal(_) | Subject::SharedMemory(_) => {
                all.has(subject)
            }
            Subject::Backend(_)
            | Subject::Wildcard(..)
            | Subject::Metrics(_)
            | Subject::Admin(_)
            | Subject::Identities => true,
        });
        for (subject, problem) in all.0 {
            self.add(subject, &problem.why);
        }
    }

    /// Removes the problem of something that is served.
    pub(super) fn remove(&mut self, subject: &Subject) {
        self.0.remove(subject);
    }

    /// Keeps those that are wanted: what is not configured any longer is no problem.
    pub(super) fn retain(&mut self, is_wanted: impl Fn(&Subject) -> bool) {
        self.0.retain(|subject, _| is_wanted(subject));
    }

    /// Logs what has changed since `before`, a line for each.
    pub(super) fn log_since(&self, before: &Self) {
        for (subject, problem) in &self.0 {
            let (kind, name, why) = (subject.kind(), subject.name(), &problem.why);
            if before.0.get(subject).is_some_and(|old| old.why == *why) {
                continue;
            }
            match problem.cause {
                None => {
                    tracing::error!(target: TARGET, kind, name, why, "not served; it is tried again");
                }
                Some(cause) => {
                    let cause = cause.label();
                    tracing::error!(target: TARGET, kind, name, cause, why, "backend needs attention");
                }
            }
        }
        for (subject, problem) in before.0.iter().filter(|(subject, _)| !self.has(subject)) {
            let (kind, name) = (subject.kind(), subject.name());
            match problem.cause {
                None => {
                    tracing::info!(target: TARGET, kind, name, "served again, or no longer configured");
                }
                Some(cause) => {
                    let cause = cause.label();
                    tracing::info!(target: TARGET, kind, name, cause, "backend no longer needs attention");
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use riser_scsi::step::BackendError;

    use super::*;

    #[test]
    fn a_backend_that_fails_some_commands_is_served_and_a_device_that_is_gone_is_not() {
        let subject = |name: &str| Subject::Backend(name.to_owned());
        let mut problems = Problems::default();
        for (name, error) in [
            ("full", BackendError::NoSpace),
            ("worn", BackendError::Medium { offset: None }),
            ("gone", BackendError::NotReady),
        ] {
            problems.add_failing(subject(name), Failing::of(error));
        }
        problems.add(subject("absent"), &"it cannot be opened");
        assert_eq!(problems.iter().count(), 4);
        let not_served: Vec<_> = problems.not_served().map(|(s, _)| s.name()).collect();
        assert_eq!(not_served, ["absent", "gone"]);
        let unready: Vec<_> = problems.unready().map(|(s, _)| s.name()).collect();
        assert_eq!(unready, ["absent", "gone"]);
    }
}
