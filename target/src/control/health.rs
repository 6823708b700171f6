//! Health checks: the daemon is alive, and all configured objects are available.

use std::net::SocketAddr;

use crate::config::Protocol;
use crate::server::Server;
use crate::server::problems::Subject;
use crate::worker::mail::Snapshot;

/// Checks that all workers respond, all portals are listening, all backends are open, and that the
/// next start would use the same data. We ignore backends that fail some commands, such as writes
/// on a full file system: other backends still work, so it does not help to take the daemon out of
/// service. This is reported by `riserd status`, the status page and alerts instead.
///
/// # Errors
/// Returns the missing objects, one per line.
pub fn ready(server: &Server, snapshots: &[Snapshot]) -> Result<(), String> {
    let mut missing = Vec::new();
    let (answering, workers) = (snapshots.len(), server.workers());
    if answering < workers {
        missing.push(format!("{answering} of {workers} workers respond"));
    }
    let problems = server.problems();
    // Add known problems with their errors first. After that, worker reports are only added if we
    // don't have an error yet.
    for (subject, problem) in problems.unready() {
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

/// Returns true if a worker is listening on this portal.
pub(super) fn is_listening(protocol: Protocol, at: SocketAddr, snapshots: &[Snapshot]) -> bool {
    let mut listening = snapshots.iter().flat_map(|s| match protocol {
        Protocol::Srp | Protocol::Iser => &s.rdma_listeners,
        Protocol::Iscsi => &s.tcp_listeners,
    });
    listening.any(|other| *other == at)
}
