//! Detects faults while the server is running: media that require action by an administrator, and
//! portal addresses that are removed from the host.
//!
//! A portal keeps its device or socket while its address is missing. Both work again as soon as the
//! address returns. Until then, the portal is reported as if we could not listen on it at startup.
//! Wildcard portals follow the addresses of the host: see [`addresses`](super::addresses). For
//! these, we only monitor the link if the portal is for an interface.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::sync::mpsc::Receiver;
use std::time::{Instant, SystemTime};

use riser_transport::netif::{AddressState, AddressWatch};

use super::build::Builder;
use super::hanging::HangWatch;
use super::problems::{Problems, Subject};
use crate::backend::{Failing, Source, Store};
use crate::config::Config;
use crate::worker::mail::OldestRequest;

/// Current faults, and the state required to detect them.
#[derive(Debug, Default)]
pub(super) struct Observation {
    /// Monitored portal addresses. `None` if an address cannot be monitored.
    watches: BTreeMap<IpAddr, Option<AddressWatch>>,
    hangs: HangWatch,
    problems: Problems,
}

impl Observation {
    /// Returns the faults detected by the last update.
    pub(super) fn problems(&self) -> &Problems {
        &self.problems
    }

    /// Returns the fault if a backend hangs.
    pub(super) fn hanging(&self, backend: &str, store: &Store) -> Option<Failing> {
        self.hangs.fault(backend, store)
    }

    /// Updates the faults of backends and portals, and logs changes. `send_requests` requests the oldest
    /// block operations from each worker.
    pub(super) fn update(
        &mut self,
        config: &Config,
        builder: &Builder,
        has_network: bool,
        send_requests: impl FnOnce() -> Vec<Receiver<Vec<OldestRequest>>>,
    ) {
        let mut found = Problems::default();
        self.hangs.update(builder.open(), send_requests);
        for (name, store) in builder.open() {
            let hanging = self.hanging(name, store);
            let faults = medium_faults(config, name, store);
            for fault in hanging.into_iter().chain(faults) {
                found.add_failing(Subject::Backend(name.clone()), fault);
            }
        }
        if has_network {
            self.add_lost_portals(&builder.named_portals(config), &mut found);
        }
        // For these, the builder has already reported the error when opening them.
        found.retain(|subject| !builder.problems().has(subject));
        found.keep_dates(&self.problems);
        found.log_since(&self.problems);
        self.problems = found;
    }

    /// Adds portals whose addresses are not reachable.
    fn add_lost_portals(&mut self, portals: &[(Subject, IpAddr)], found: &mut Problems) {
        let is_used = |addr: &IpAddr| portals.iter().any(|(_, at)| at == addr);
        self.watches.retain(|addr, _| is_used(addr));
        for watch in self.watches.values_mut().flatten() {
            watch.follow();
        }
        for (subject, addr) in portals {
            let watch = self.watches.entry(*addr).or_insert_with(|| open(*addr));
            let state = watch.as_ref().map(AddressWatch::state);
            if let Some(why) = state.and_then(|state| loss(subject, state)) {
                found.add(subject.clone(), &why);
            }
        }
    }
}

/// Returns the faults for the medium of an open backend.
fn medium_faults(config: &Config, name: &str, store: &Store) -> impl Iterator<Item = Failing> {
    let (now, date) = (Instant::now(), SystemTime::now());
    let all = store.problems(wanted_size(config, name), now, date);
    // Failed operations are already logged when they fail.
    all.into_iter().filter(|fault| fault.cause.is_of_medium())
}

/// Returns the configured file size of a backend, in bytes.
pub(super) fn wanted_size(config: &Config, name: &str) -> Option<u64> {
    let mut backends = config.backends.iter();
    match backends.find(|backend| backend.name == name)?.spec.source {
        Source::File { size, .. } => size,
        Source::Device { .. } | Source::Ram { .. } | Source::Null { .. } => None,
    }
}

fn open(addr: IpAddr) -> Option<AddressWatch> {
    let opened = AddressWatch::open(addr);
    opened
        .inspect_err(|error| {
            tracing::warn!(%addr, %error, "cannot watch the address of a portal; its loss will not be reported");
        })
        .ok()
}

/// Returns the reason why initiators cannot reach a portal, if any.
const fn loss(subject: &Subject, state: AddressState) -> Option<&'static str> {
    match (state, subject) {
        (AddressState::Down, _) => Some("the link of its interface is down"),
        // A wildcard portal follows the addresses of its interface.
        (AddressState::Up, _) | (_, Subject::Wildcard(..)) => None,
        (AddressState::Absent, _) => Some("its address was removed from this host"),
        (AddressState::Gone, _) => Some("the interface with its address was removed"),
    }
}
