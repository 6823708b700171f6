//! Configured resources that are not available: backends that cannot be opened, portals we cannot
//! listen on, and resources for the control plane.
//!
//! # Degraded operation
//! If a backend or a portal is not available at startup, this is reported as a problem, and
//! everything else is started, unless the configuration contains `strict: true`. Units of missing
//! backends report NOT READY, MANUAL INTERVENTION REQUIRED. Missing portals are not advertised.
//! [`Server::retry`](super::Server::retry) tries again, and so does any configuration change. If an
//! address or file is in use, we wait first, because it may belong to a daemon that is still
//! exiting. If none of the portals are available because another program uses them, the start
//! fails, because that would be a second daemon. Shared memory for portals is optional: if it is
//! missing, this is a problem like any other, but the daemon is ready without it, and it is not
//! required by `strict: true`.
//!
//! A change is atomic: it is only applied if all problems existed before.

use std::collections::BTreeMap;
use std::fmt;
use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;
use std::time::SystemTime;

use super::ServerError;
use crate::backend::{Cause, Failing};
use crate::config::{Listen, Protocol};
use crate::worker::portals::Unserved;

/// Log target for messages about problems.
pub const TARGET: &str = "riserd::problems";

/// State of a resource that is not available.
pub(crate) const NOT_SERVED: &str = "NOT SERVED";

/// A resource that may be missing.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Subject {
    /// A backend, by name.
    Backend(String),
    /// An RDMA portal.
    RdmaPortal(SocketAddr),
    /// A TCP portal.
    TcpPortal(SocketAddr),
    /// Memory shared with initiators on this host, in addition to the RDMA portals of an address.
    SharedMemory(IpAddr),
    /// A portal with a wildcard, and its protocol.
    Wildcard(Listen, Protocol),
    /// The address for metrics and the status page.
    Metrics(SocketAddr),
    /// The admin socket.
    Admin(PathBuf),
    /// Unit names in the state directory.
    Identities,
}

impl Subject {
    /// Returns the subject for a portal.
    #[must_use]
    pub const fn portal(protocol: Protocol, at: SocketAddr) -> Self {
        match protocol {
            Protocol::Srp | Protocol::Iser => Self::RdmaPortal(at),
            Protocol::Iscsi => Self::TcpPortal(at),
        }
    }

    /// Returns true if the daemon is ready without this, and can start without it even in strict
    /// mode, because any local user could prevent it.
    #[must_use]
    pub const fn is_optional(&self) -> bool {
        matches!(self, Self::SharedMemory(_))
    }

    /// Returns `backend`, `portal`, `shared memory`, `metrics`, `admin` or `state`.
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

    /// Returns the backend name, address, path or file name.
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

impl fmt::Display for Subject {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.kind(), self.name())
    }
}

/// The reason why a resource is missing, with a date.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Problem {
    /// Human-readable reason.
    pub why: String,
    /// Date when the problem was detected.
    pub since: SystemTime,
    /// If an open backend requires action by an administrator, the reason, such as a full file
    /// system.
    pub cause: Option<Cause>,
}

impl Problem {
    /// Returns true if some commands are still executed.
    #[must_use]
    pub fn is_failing(&self) -> bool {
        self.cause.is_some_and(Cause::is_served)
    }

    /// Returns a human-readable state.
    #[must_use]
    pub fn state(&self) -> &'static str {
        self.cause.map_or(NOT_SERVED, Cause::state)
    }
}

/// Problems by subject, backends first.
#[derive(Clone, Debug, Default)]
pub struct Problems(BTreeMap<Subject, Problem>);

impl Problems {
    /// Returns true if there are no problems.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Returns true if any problem could be solved by a retry. Wildcards have to wait for other
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

    /// Returns the problems where a resource is not available, omitting backends that only fail
    /// some commands.
    pub fn not_served(&self) -> impl Iterator<Item = (&Subject, &Problem)> {
        self.iter().filter(|(_, problem)| !problem.is_failing())
    }

    /// Returns the problems that prevent the daemon from being ready: see [`Cause::is_ready`].
    pub fn unready(&self) -> impl Iterator<Item = (&Subject, &Problem)> {
        let is_ready = |problem: &Problem| problem.cause.is_some_and(Cause::is_ready);
        self.iter()
            .filter(move |(subject, problem)| !subject.is_optional() && !is_ready(problem))
    }

    /// Returns true if there is a problem for this subject.
    #[must_use]
    pub fn has(&self, subject: &Subject) -> bool {
        self.0.contains_key(subject)
    }

    /// Returns a predicate for missing portals.
    pub(super) fn portals(&self) -> impl Fn(Protocol, SocketAddr) -> bool + '_ {
        |protocol, at| self.has(&Subject::portal(protocol, at))
    }

    /// Returns the problem for a subject, if any.
    #[must_use]
    pub fn of(&self, subject: &Subject) -> Option<&Problem> {
        self.0.get(subject)
    }

    /// Adds or updates a problem.
    pub(super) fn add(&mut self, subject: Subject, why: &dyn fmt::Display) {
        let new = || Problem {
            why: String::new(),
            since: SystemTime::now(),
            cause: None,
        };
        self.0.entry(subject).or_insert_with(new).why = why.to_string();
    }

    /// Adds an open backend that requires action. If there is already a problem, it is not changed.
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

    /// Copies the dates of problems that also exist in the previous set.
    pub(super) fn keep_dates(&mut self, before: &Self) {
        for (subject, problem) in &mut self.0 {
            let same = before.0.get(subject);
            if let Some(same) = same.filter(|same| same.cause == problem.cause) {
                problem.since = same.since;
            }
        }
    }

    /// Replaces the problems for portals and their shared memory, both from missing devices or
    /// sockets, and from workers that could not listen.
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

    /// Removes the problem for a subject.
    pub(super) fn remove(&mut self, subject: &Subject) {
        self.0.remove(subject);
    }

    /// Removes problems unless `is_wanted` returns true, for example if a resource is no longer
    /// configured.
    pub(super) fn retain(&mut self, is_wanted: impl Fn(&Subject) -> bool) {
        self.0.retain(|subject, _| is_wanted(subject));
    }

    /// Logs changes since `before`, in separate messages.
    pub(super) fn log_since(&self, before: &Self) {
        for (subject, problem) in &self.0 {
            let (kind, name, why) = (subject.kind(), subject.name(), &problem.why);
            if before.0.get(subject).is_some_and(|old| old.why == *why) {
                continue;
            }
            match problem.cause {
                None => {
                    tracing::error!(target: TARGET, kind, name, why, "not served; will be retried");
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
    fn only_removed_devices_are_not_served() {
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
