//! Whether the daemon works, and whether it serves all that it should.

use crate::config::{Portal, Protocol};
use crate::server::Server;
use crate::server::problems::Subject;
use crate::worker::mail::Snapshot;

/// Whether every worker answers, every portal is listened on and every backend is open.
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
    for (subject, problem) in problems.iter() {
        missing.push(format!(
            "{} {}: {}",
            subject.kind(),
            subject.name(),
            problem.why
        ));
    }
    let catalog = server.shared().registry.catalog();
    for target in &catalog.targets {
        for portal in &target.config.portals {
            if problems.has(&Subject::portal(portal)) {
                continue;
            }
            if !is_listening(portal, snapshots) {
                let (name, protocol) = (&target.config.name, portal.protocol);
                missing.push(format!(
                    "target {name}: nobody listens on {protocol} {}",
                    portal.listen
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

/// Whether a worker listens on a portal.
pub(super) fn is_listening(portal: &Portal, snapshots: &[Snapshot]) -> bool {
    let mut listening = snapshots.iter().flat_map(|s| match portal.protocol {
        Protocol::Srp | Protocol::Iser => &s.rdma_listeners,
        Protocol::Iscsi => &s.tcp_listeners,
    });
    listening.any(|at| *at == portal.listen)
}
