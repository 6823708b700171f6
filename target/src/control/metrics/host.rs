//! Workers, devices, logins and task management.

use std::collections::BTreeMap;

use super::family::Family;
use crate::config::Protocol;
use crate::stats::{Functions, Tally};
use crate::worker::NicInfo;
use crate::worker::mail::Snapshot;

pub(super) fn families(snapshots: &[Snapshot]) -> Vec<Family> {
    let mut families = rare(snapshots);
    families.extend(workers(snapshots));
    families.extend(requests(snapshots));
    families.extend(devices(snapshots));
    families
}

/// Families of logins and task management functions.
fn rare(snapshots: &[Snapshot]) -> Vec<Family> {
    let mut accepted = Tally::default();
    let mut refused = Tally::default();
    let mut answered: BTreeMap<String, Functions> = BTreeMap::new();
    for snapshot in snapshots {
        accepted.merge(&snapshot.logins);
        refused.merge(&snapshot.rejects);
        for (protocol, functions) in &snapshot.functions {
            let sum = answered.entry(protocol.to_string()).or_default();
            sum.merge(functions);
        }
    }
    for protocol in [Protocol::Srp, Protocol::Iscsi, Protocol::Iser] {
        // An alert on a rate has to see it begin at 0.
        accepted.add(protocol, 0);
    }
    let mut logins = Family::counter("riser_logins_total", "Logins accepted.");
    for (protocol, n) in accepted.iter() {
        logins.add(&[("protocol", &protocol.to_string())], n as f64);
    }
    let mut failures = Family::counter("riser_login_failures_total", "Logins refused, by reason.");
    for ((protocol, reason), n) in refused.iter() {
        let protocol = protocol.to_string();
        failures.add(&[("protocol", &protocol), ("reason", reason)], n as f64);
    }
    let mut functions = Family::counter(
        "riser_task_management_total",
        "Task-management functions answered, by function and answer.",
    );
    for (protocol, tally) in &answered {
        for ((function, answer), n) in tally.iter() {
            let labels = [
                ("protocol", protocol.as_str()),
                ("function", function),
                ("answer", answer),
            ];
            functions.add(&labels, n as f64);
        }
    }
    vec![logins, failures, functions]
}

/// A family with one series for each worker.
fn per_worker(mut family: Family, snapshots: &[Snapshot], value: fn(&Snapshot) -> f64) -> Family {
    for snapshot in snapshots {
        family.add(&[("worker", &snapshot.worker.to_string())], value(snapshot));
    }
    family
}

fn workers(snapshots: &[Snapshot]) -> Vec<Family> {
    let counter = |name, help, value| per_worker(Family::counter(name, help), snapshots, value);
    let gauge = |name, help, value| per_worker(Family::gauge(name, help), snapshots, value);
    vec![
        counter(
            "riser_worker_busy_seconds_total",
            "Time that a worker has had something to do, in seconds.",
            |s| s.busy.as_secs_f64(),
        ),
        counter(
            "riser_worker_run_seconds_total",
            "Time that a worker has run, in seconds.",
            |s| s.ran.as_secs_f64(),
        ),
        counter(
            "riser_worker_parks_total",
            "Times that a worker went to sleep.",
            |s| s.parks as f64,
        ),
        gauge(
            "riser_buffer_pool_bytes",
            "Data buffers of a worker, in bytes.",
            |s| s.pool_size as f64,
        ),
        gauge(
            "riser_buffer_pool_free_bytes",
            "Data buffers that are free, in bytes.",
            |s| s.pool_free as f64,
        ),
        gauge(
            "riser_buffer_pool_lowest_free_bytes",
            "Least memory of data buffers that was ever free, in bytes.",
            |s| s.pool_lowest as f64,
        ),
        gauge(
            "riser_contexts",
            "Requests that a worker's sessions may have under way.",
            |s| {
                // The bound of SRP is the request limit of the login; that of iSCSI is the number
                // of commands of a session.
                let srp = s.sessions.iter().map(|s| f64::from(s.params.req_lim));
                srp.chain(s.iscsi_sessions.iter().map(|s| f64::from(s.info.commands)))
                    .fold(0.0, |sum, n| sum + n)
            },
        ),
        gauge(
            "riser_contexts_in_use",
            "Requests that a worker's sessions have under way.",
            |s| {
                let srp = s.sessions.iter().map(|s| s.in_flight);
                let iscsi = s.iscsi_sessions.iter().map(|s| s.info.in_flight);
                srp.chain(iscsi).sum::<usize>() as f64
            },
        ),
    ]
}

/// Families of requests by their outcomes, for each worker.
fn requests(snapshots: &[Snapshot]) -> Vec<Family> {
    let mut taken = Family::counter(
        "riser_requests_total",
        "Commands and functions taken in, by worker and result.",
    );
    let mut waits = Family::counter(
        "riser_waits_total",
        "Times that a request waited for a context, a data buffer or send-queue credit.",
    );
    let mut malformed = Family::counter(
        "riser_protocol_errors_total",
        "Messages of initiators that were not legal.",
    );
    for snapshot in snapshots {
        let worker = snapshot.worker.to_string();
        let (srp, iscsi) = (&snapshot.counters, &snapshot.iscsi);
        // Each request that was received ends by one of the other three outcomes, so the
        // difference is what is under way.
        let families = [
            ("srp", "received", srp.commands + srp.task_management),
            ("srp", "answered", srp.answered),
            ("srp", "aborted", srp.aborted),
            ("srp", "torn_down", srp.torn_down),
            ("iscsi", "received", iscsi.commands + iscsi.task_management),
            ("iscsi", "answered", iscsi.answered),
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

/// A counter or gauge of a NIC, and its series by their further label.
type NicFamily = (
    Family,
    Option<&'static str>,
    fn(&NicInfo) -> Vec<(&'static str, u64)>,
);

fn devices(snapshots: &[Snapshot]) -> Vec<Family> {
    let mut open = Family::gauge(
        "riser_device_open",
        "1 if a worker's network device works, else 0.",
    );
    let mut families = nic_families();
    for snapshot in snapshots {
        let worker = snapshot.worker.to_string();
        for device in &snapshot.devices {
            let addr = device.addr.to_string();
            let labels = [("device", &*addr), ("worker", &*worker)];
            open.add(&labels, f64::from(device.is_open));
            // An RDMA device of the host counts for itself; only the software NIC is ours to
            // count.
            let Some(nic) = &device.nic else {
                continue;
            };
            for (family, label, series) in &mut families {
                for (value, n) in series(nic) {
                    let further = label.map(|label| (label, value));
                    let labels: Vec<_> = labels.iter().copied().chain(further).collect();
                    family.add(&labels, n as f64);
                }
            }
        }
    }
    let families = families.into_iter().map(|(family, ..)| family);
    std::iter::once(open).chain(families).collect()
}

fn nic_families() -> Vec<NicFamily> {
    // A table, and not a call for each: all series of a family have to stand together, while they
    // come from workers and devices one after another.
    let counter = Family::counter;
    vec![
        (
            counter("riser_device_packets_total", "RoCE packets, by direction."),
            Some("direction"),
            |n| vec![("in", n.nic.rx_packets), ("out", n.nic.tx_packets)],
        ),
        (
            counter("riser_device_bytes_total", "Bytes of these packets."),
            Some("direction"),
            |n| vec![("in", n.nic.rx_bytes), ("out", n.nic.tx_bytes)],
        ),
        (
            counter(
                "riser_device_icrc_errors_total",
                "Packets whose invariant CRC was wrong.",
            ),
            None,
            |n| vec![("", n.nic.rx_icrc_errors)],
        ),
        (
            counter(
                "riser_device_dropped_packets_total",
                "Packets that were not taken in, by reason; those with a wrong ICRC aside.",
            ),
            Some("reason"),
            |n| {
                vec![
                    ("malformed", n.nic.rx_malformed),
                    ("unknown_qp", n.nic.rx_unknown_qp),
                    ("wrong_source", n.nic.rx_wrong_source),
                    ("wrong_pkey", n.nic.rx_wrong_pkey),
                    ("unwanted_mad", n.nic.rx_dropped_mads),
                    ("wrong_state", n.rc.dropped),
                ]
            },
        ),
        (
            counter(
                "riser_device_retransmits_total",
                "Request packets that were sent again.",
            ),
            None,
            |n| vec![("", n.rc.retransmits)],
        ),
        (
            counter(
                "riser_device_retransmit_causes_total",
                "Retransmissions of queue pairs, by cause.",
            ),
            Some("cause"),
            |n| {
                vec![
                    ("timeout", n.rc.timeouts),
                    ("implied_nak", n.rc.implied_naks),
                    ("nak", n.rc.rx_nak_sequence),
                    ("rnr", n.rc.rx_rnr_naks),
                ]
            },
        ),
        (
            counter(
                "riser_device_naks_received_total",
                "Negative acknowledgements that initiators sent, RNR aside.",
            ),
            Some("kind"),
            |n| {
                vec![
                    ("sequence", n.rc.rx_nak_sequence),
                    ("invalid", n.rc.rx_nak_invalid),
                    ("access", n.rc.rx_nak_access),
                    ("operation", n.rc.rx_nak_operation),
                ]
            },
        ),
        (
            counter(
                "riser_device_naks_sent_total",
                "Negative acknowledgements that we sent, RNR aside.",
            ),
            Some("kind"),
            |n| {
                vec![
                    ("sequence", n.rc.tx_nak_sequence),
                    ("invalid", n.rc.tx_nak_invalid),
                    ("access", n.rc.tx_nak_access),
                    ("operation", n.rc.tx_nak_operation),
                ]
            },
        ),
        (
            counter(
                "riser_device_rnr_naks_total",
                "Receiver-not-ready NAKs, by direction.",
            ),
            Some("direction"),
            |n| vec![("in", n.rc.rx_rnr_naks), ("out", n.rc.tx_rnr_naks)],
        ),
        (
            counter(
                "riser_device_congestion_packets_total",
                "Packets that a router has marked for congestion, and congestion notifications (CNPs) received and sent.",
            ),
            Some("kind"),
            |n| {
                vec![
                    ("marked", n.rc.rx_marked),
                    ("notification_in", n.rc.rx_cnps),
                    ("notification_out", n.rc.tx_cnps),
                ]
            },
        ),
        (
            counter(
                "riser_device_odd_packets_total",
                "Packets that came again, ahead of a missing one, or answered nothing outstanding.",
            ),
            Some("kind"),
            |n| {
                vec![
                    ("duplicate", n.rc.duplicates),
                    ("out_of_order", n.rc.out_of_order),
                    ("stale", n.rc.stale_responses),
                ]
            },
        ),
        (
            counter(
                "riser_device_lost_completions_total",
                "Completions lost because their queue was full.",
            ),
            None,
            |n| vec![("", n.nic.cq_overruns)],
        ),
        (
            counter(
                "riser_device_refused_queue_pairs_total",
                "Queue pairs refused because their peer had too many.",
            ),
            None,
            |n| vec![("", n.nic.refused_qps)],
        ),
        (
            counter(
                "riser_device_cm_messages_total",
                "Messages of the connection manager, by kind; `received` counts all that came.",
            ),
            Some("kind"),
            |n| {
                vec![
                    ("received", n.cm.received),
                    ("malformed", n.cm.malformed),
                    ("illegal", n.cm.illegal),
                    ("duplicate", n.cm.duplicates),
                    ("repeated", n.cm.retries),
                    ("refused", n.cm.refused),
                    ("dropped", n.cm.dropped),
                    ("displaced", n.cm.displaced),
                ]
            },
        ),
        (
            counter(
                "riser_device_socket_calls_total",
                "System calls on the device's socket, by direction.",
            ),
            Some("direction"),
            |n| vec![("in", n.socket.receive_calls), ("out", n.socket.send_calls)],
        ),
        (
            counter(
                "riser_device_socket_errors_total",
                "Failures and drops at the device's socket, by kind.",
            ),
            Some("kind"),
            |n| {
                vec![
                    ("too_long", n.socket.too_long),
                    ("send", n.socket.send_errors),
                    ("full", n.socket.blocked),
                    ("stranger", n.socket.strangers_dropped),
                    ("truncated", n.socket.truncated),
                    ("off_link", n.socket.off_link),
                ]
            },
        ),
        (
            Family::gauge("riser_device_objects", "Objects of a device, by kind."),
            Some("kind"),
            |n| {
                vec![
                    ("queue_pair", n.usage.qps as u64),
                    ("completion_queue", n.usage.cqs as u64),
                    ("memory_region", n.usage.mrs as u64),
                    ("protection_domain", n.usage.pds as u64),
                ]
            },
        ),
    ]
}
