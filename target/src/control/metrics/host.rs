//! Worker, login and task management metrics.

use std::collections::BTreeMap;

use riser_scsi::iscsi::pdu::LoginStatus;
use riser_scsi::srp::LoginRejReason;

use super::family::Family;
use crate::config::Protocol;
use crate::control::view::{Inventory, WorkerView};
use crate::stats::{Functions, Tally};
use crate::worker::mail::Snapshot;

pub(super) fn families(inventory: &Inventory<'_>) -> Vec<Family> {
    let mut families = rare(inventory.snapshots(), inventory.server.workers());
    families.extend(workers(&inventory.workers()));
    families.extend(requests(inventory.snapshots()));
    families
}

/// Returns the metrics for logins and task management functions, which are totals of all workers.
/// If a worker does not respond, they are omitted: Prometheus treats a counter that decreases as a
/// restart, so its increase would be the whole value as soon as the worker responds again.
fn rare(snapshots: &[Snapshot], workers: usize) -> Vec<Family> {
    if snapshots.len() < workers {
        return Vec::new();
    }
    let mut accepted = Tally::default();
    let mut refused = Tally::default();
    let mut functions_by_protocol: BTreeMap<String, Functions> = BTreeMap::new();
    for snapshot in snapshots {
        accepted.merge(&snapshot.logins);
        refused.merge(&snapshot.rejects);
        for (protocol, functions) in &snapshot.functions {
            let sum = functions_by_protocol
                .entry(protocol.to_string())
                .or_default();
            sum.merge(functions);
        }
    }
    for protocol in [Protocol::Srp, Protocol::Iscsi, Protocol::Iser] {
        // An alert for a rate requires that the counter starts at 0.
        accepted.add(protocol, 0);
        for reason in common_reasons(protocol) {
            refused.add((protocol, reason), 0);
        }
    }
    let mut logins = Family::counter("riser_logins_total", "Accepted logins, by protocol.");
    for (protocol, n) in accepted.iter() {
        logins.add(&[("protocol", &protocol.to_string())], n as f64);
    }
    let mut failures = Family::counter(
        "riser_login_failures_total",
        "Rejected logins, by protocol and reason.",
    );
    for ((protocol, reason), n) in refused.iter() {
        let protocol = protocol.to_string();
        failures.add(&[("protocol", &protocol), ("reason", reason)], n as f64);
    }
    let mut functions = Family::counter(
        "riser_task_management_total",
        "Completed task-management functions, by function and response.",
    );
    for (protocol, tally) in &functions_by_protocol {
        for ((function, response), n) in tally.iter() {
            let labels = [
                ("protocol", protocol.as_str()),
                ("function", function),
                ("answer", response),
            ];
            functions.add(&labels, n as f64);
        }
    }
    vec![logins, failures, functions]
}

/// Returns the common login reject reasons as labels.
fn common_reasons(protocol: Protocol) -> Vec<&'static str> {
    match protocol {
        Protocol::Srp => [
            LoginRejReason::UnableToAssociateChannel,
            LoginRejReason::InsufficientResources,
        ]
        .map(LoginRejReason::name)
        .to_vec(),
        Protocol::Iscsi | Protocol::Iser => [
            LoginStatus::AUTHENTICATION_FAILURE,
            LoginStatus::AUTHORIZATION_FAILURE,
            LoginStatus::NOT_FOUND,
            LoginStatus::OUT_OF_RESOURCES,
        ]
        .map(LoginStatus::name)
        .to_vec(),
    }
}

/// Adds one series per worker.
fn per_worker(mut family: Family, workers: &[WorkerView], value: fn(&WorkerView) -> f64) -> Family {
    for worker in workers {
        family.add(&[("worker", &worker.worker.to_string())], value(worker));
    }
    family
}

fn workers(workers: &[WorkerView]) -> Vec<Family> {
    let counter = |name, help, value| per_worker(Family::counter(name, help), workers, value);
    let gauge = |name, help, value| per_worker(Family::gauge(name, help), workers, value);
    vec![
        counter(
            "riser_worker_busy_seconds_total",
            "Time that a worker was busy, in seconds.",
            |worker| worker.busy,
        ),
        counter(
            "riser_worker_run_seconds_total",
            "Time since a worker was started, in seconds.",
            |worker| worker.ran,
        ),
        counter(
            "riser_worker_parks_total",
            "Number of times that a worker went to sleep.",
            |worker| worker.parks as f64,
        ),
        gauge(
            "riser_buffer_pool_bytes",
            "Data buffers of a worker, in bytes.",
            |worker| worker.pool as f64,
        ),
        gauge(
            "riser_buffer_pool_free_bytes",
            "Free data buffers, in bytes.",
            |worker| worker.pool_free as f64,
        ),
        gauge(
            "riser_buffer_pool_lowest_free_bytes",
            "Lowest amount of free data buffers since the start, in bytes.",
            |worker| worker.pool_lowest as f64,
        ),
        gauge(
            "riser_contexts",
            "Maximum number of requests in flight of a worker's sessions.",
            |worker| worker.contexts as f64,
        ),
        gauge(
            "riser_contexts_in_use",
            "Requests in flight of a worker's sessions.",
            |worker| worker.contexts_in_use as f64,
        ),
    ]
}

/// Returns the request metrics by outcome for each worker.
fn requests(snapshots: &[Snapshot]) -> Vec<Family> {
    let mut taken = Family::counter(
        "riser_requests_total",
        "Received commands and functions, by worker and result.",
    );
    let mut waits = Family::counter(
        "riser_waits_total",
        "Times that a request waited for a context, a data buffer or send-queue credit.",
    );
    let mut malformed = Family::counter(
        "riser_protocol_errors_total",
        "Invalid messages from initiators.",
    );
    for snapshot in snapshots {
        let worker = snapshot.worker.to_string();
        let (srp, iscsi) = (&snapshot.counters, &snapshot.iscsi);
        // Each received request has one of the other three outcomes, so the difference is the
        // number of requests in flight.
        let families = [
            ("srp", "received", srp.commands + srp.task_management),
            ("srp", "answered", srp.responded),
            ("srp", "aborted", srp.aborted),
            ("srp", "torn_down", srp.torn_down),
            ("iscsi", "received", iscsi.commands + iscsi.task_management),
            ("iscsi", "answered", iscsi.responded),
            ("iscsi", "aborted", iscsi.aborted),
            ("iscsi", "torn_down", iscsi.torn_down),
        ];
        for (family, outcome, n) in families {
            let labels = [
                ("worker", &*worker),
                ("family", family),
                ("outcome", outcome),
            ];
            taken.add(&labels, n as f64);
        }
        let resources = [
            ("context", srp.context_waits),
            ("buffer", srp.buffer_waits + iscsi.buffer_waits),
            ("credit", srp.credit_waits),
        ];
        for (resource, n) in resources {
            waits.add(&[("worker", &*worker), ("resource", resource)], n as f64);
        }
        for (family, n) in [("srp", srp.malformed), ("iscsi", iscsi.rejected)] {
            malformed.add(&[("worker", &*worker), ("family", family)], n as f64);
        }
    }
    vec![taken, waits, malformed]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn totals_need_all_workers() {
        let mut snapshot = Snapshot::default();
        snapshot.logins.add(Protocol::Iscsi, 1);
        let families = |workers| rare(&[snapshot.clone()], workers).len();
        assert_eq!((families(1), families(2)), (3, 0));
    }
}
