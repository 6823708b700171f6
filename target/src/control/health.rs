//! Health checks: the daemon is alive, and all configured objects are available.

use std::net::SocketAddr;

use super::view::{self, Inventory};
use crate::config::Protocol;
use crate::server::problems::Subject;

impl Inventory<'_> {
    /// Checks that all workers respond, all portals are listening, all backends are open, and that
    /// the next start would use the same data. We ignore backends that fail some commands, such as
    /// writes on a full file system: other backends still work, so it does not help to take the
    /// daemon out of service. This is reported by `riserd status`, the status page and alerts
    /// instead.
    ///
    /// # Errors
    /// Returns the missing objects, one per line.
    pub fn ready(&self) -> Result<(), String> {
        let mut missing = Vec::new();
        let (responding, workers) = (self.snapshots().len(), self.server.workers());
        if responding < workers {
            missing.push(format!("{responding} of {workers} workers respond"));
        }
        // Add known problems with their errors first. After that, worker reports are only added if
        // we don't have an error yet.
        let problems = self.problems();
        missing.extend(
            problems
                .unready()
                .map(|known| view::problem(known).to_string()),
        );
        for target in &self.catalog.targets {
            let name = &target.config.name;
            for (protocol, listen) in &target.listens {
                let is_known = problems.has(&Subject::portal(*protocol, *listen));
                if !is_known && !self.is_listening(*protocol, *listen) {
                    missing.push(format!(
                        "target {name}: no worker listens on {protocol} {listen}"
                    ));
                }
            }
            for (number, unit) in &target.units {
                if self.catalog.store_of(unit).is_none() {
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
    pub(super) fn is_listening(&self, protocol: Protocol, at: SocketAddr) -> bool {
        let mut listening = self.snapshots().iter().flat_map(|s| match protocol {
            Protocol::Srp | Protocol::Iser => &s.rdma_listeners,
            Protocol::Iscsi => &s.tcp_listeners,
        });
        listening.any(|other| *other == at)
    }
}
