//! Health of the daemon: that it works, and that it serves all that it should.

use std::net::SocketAddr;

use crate::config::Protocol;
use crate::server::Server;
use crate::server::problems::Subject;
use crate::worker::mail::Snapshot;

/// Returns whether every worker answers, every portal is listened on and every backend is open.
///
/// # Errors
/// What is missing, a line each.
pub fn ready(server: &Server, snapshots: &[Snapshot]) -> Result<(), String> {
    let mut missing = Vec::new();
    let (answering, workers) = (snapshots.len(), server.workers());
    if answering < workers {
        missing.push(format!("{answering} of {workers} workers answer"));
    }
    let problems = server.problems();
    // Known problems come first, with their reasons; what the workers report is added only where
    // there is no reason yet.
    let required = problems.not_served();
    for (subject, problem) in required.filter(|(subject, _)| !subject.is_optional()) {
        missing.push(format!(
            "{} {}: {}",
            subject.kind(),
            subject.name(),
            problem.why
        ));
    }
    let catalog = server.shared().registry.catalog();
    for target in &catalog.targets {
        for (protocol, listen) in &target.listens {
            if problems.has(&Subject::portal(*protocol, *listen)) {
                continue;
            }
            if !is_listening(*protocol, *listen, snapshots) {
                let name = &target.config.name;
                missing.push(format!(
                    "target {name}: no worker listens on {protocol} {listen}"
                ));
            }
        }
        for (number, unit) in &target.units {
            let place = catalog.unit_stores[unit.index.0 as usize];
            if catalog.stores[place].is_none() {
                let name = &target.config.name;
                missing.push(format!(
                    "target {name}: the backend of LUN {number} is closed"
                ));
            }
        }
    }
    if missing.is_empty() {
        Ok(())
    } else {
        Err(missing.join("\n"))
    }
}

/// Returns true if a worker listens on a portal.
pub(super) fn is_listening(protocol: Protocol, at: SocketAddr, snapshots: &[Snapshot]) -> bool {
    let mut listening = snapshots.iter().flat_map(|s| match protocol {
        Protocol::Srp | Protocol::Iser => &s.rdma_listeners,
        Protocol::Iscsi => &s.tcp_listeners,
    });
    listening.any(|other| *other == at)
}
