//! Software NIC counters.

use prometheus::proto::MetricType::{self, COUNTER, GAUGE};

use super::family::Family;
use crate::worker::NicInfo;
use crate::worker::mail::Snapshot;

/// A counter or gauge of a NIC.
struct NicMetric {
    kind: MetricType,
    name: &'static str,
    help: &'static str,
    /// Additional label for its series, next to device, provider and worker.
    label: Option<&'static str>,
    /// Returns its series with the value of the additional label.
    series: fn(&NicInfo) -> Vec<(&'static str, u64)>,
}

/// Returns the devices of all workers, and the counters of software NICs.
pub(super) fn families(snapshots: &[Snapshot]) -> Vec<Family> {
    let mut open = Family::gauge(
        "riser_device_open",
        "1 if a network device of a worker is open, else 0.",
    );
    // We create all families first: the series of a family must be contiguous, but we iterate over
    // workers and devices.
    let new = |metric: &NicMetric| Family::new(metric.kind, metric.name, metric.help);
    let mut families: Vec<Family> = METRICS.iter().map(new).collect();
    for snapshot in snapshots {
        let worker = snapshot.worker.to_string();
        for device in &snapshot.devices {
            let addr = device.addr.to_string();
            // An address can have two devices, when one of them uses shared memory.
            let labels = [
                ("device", &*addr),
                ("provider", device.provider),
                ("worker", &*worker),
            ];
            open.add(&labels, f64::from(device.is_open));
            // RDMA devices of the host have their own counters, so we only export counters for the
            // software NIC.
            let Some(nic) = &device.nic else {
                continue;
            };
            for (family, metric) in families.iter_mut().zip(METRICS) {
                for (value, n) in (metric.series)(nic) {
                    let further = metric.label.map(|label| (label, value));
                    let labels: Vec<_> = labels.iter().copied().chain(further).collect();
                    family.add(&labels, n as f64);
                }
            }
        }
    }
    std::iter::once(open).chain(families).collect()
}

const METRICS: &[NicMetric] = &[
    NicMetric {
        kind: COUNTER,
        name: "riser_device_packets_total",
        help: "Packets of the software NIC or in shared memory, by direction.",
        label: Some("direction"),
        series: |n| vec![("in", n.nic.rx_packets), ("out", n.nic.tx_packets)],
    },
    NicMetric {
        kind: COUNTER,
        name: "riser_device_bytes_total",
        help: "Bytes of packets of the software NIC or in shared memory, by direction.",
        label: Some("direction"),
        series: |n| vec![("in", n.nic.rx_bytes), ("out", n.nic.tx_bytes)],
    },
    NicMetric {
        kind: COUNTER,
        name: "riser_device_icrc_errors_total",
        help: "Packets with an invalid ICRC.",
        label: None,
        series: |n| vec![("", n.nic.rx_icrc_errors)],
    },
    NicMetric {
        kind: COUNTER,
        name: "riser_device_dropped_packets_total",
        help: "Dropped packets, by reason, without packets with an invalid ICRC.",
        label: Some("reason"),
        series: |n| {
            vec![
                ("malformed", n.nic.rx_malformed),
                ("unknown_qp", n.nic.rx_unknown_qp),
                ("wrong_source", n.nic.rx_wrong_source),
                ("wrong_pkey", n.nic.rx_wrong_pkey),
                ("unwanted_mad", n.nic.rx_dropped_mads),
                ("wrong_state", n.rc.dropped),
            ]
        },
    },
    NicMetric {
        kind: COUNTER,
        name: "riser_device_retransmits_total",
        help: "Retransmitted request packets.",
        label: None,
        series: |n| vec![("", n.rc.retransmits)],
    },
    NicMetric {
        kind: COUNTER,
        name: "riser_device_retransmit_causes_total",
        help: "Retransmissions of queue pairs, by cause.",
        label: Some("cause"),
        series: |n| {
            vec![
                ("timeout", n.rc.timeouts),
                ("implied_nak", n.rc.implied_naks),
                ("nak", n.rc.rx_nak_sequence),
                ("rnr", n.rc.rx_rnr_naks),
            ]
        },
    },
    NicMetric {
        kind: COUNTER,
        name: "riser_device_naks_received_total",
        help: "Negative acknowledgements sent by initiators, without RNR.",
        label: Some("kind"),
        series: |n| {
            vec![
                ("sequence", n.rc.rx_nak_sequence),
                ("invalid", n.rc.rx_nak_invalid),
                ("access", n.rc.rx_nak_access),
                ("operation", n.rc.rx_nak_operation),
            ]
        },
    },
    NicMetric {
        kind: COUNTER,
        name: "riser_device_naks_sent_total",
        help: "Negative acknowledgements sent by this host, without RNR.",
        label: Some("kind"),
        series: |n| {
            vec![
                ("sequence", n.rc.tx_nak_sequence),
                ("invalid", n.rc.tx_nak_invalid),
                ("access", n.rc.tx_nak_access),
                ("operation", n.rc.tx_nak_operation),
            ]
        },
    },
    NicMetric {
        kind: COUNTER,
        name: "riser_device_rnr_naks_total",
        help: "Receiver-not-ready NAKs, by direction.",
        label: Some("direction"),
        series: |n| vec![("in", n.rc.rx_rnr_naks), ("out", n.rc.tx_rnr_naks)],
    },
    NicMetric {
        kind: COUNTER,
        name: "riser_device_congestion_packets_total",
        help: "Packets that a router has marked for congestion, and congestion notifications (CNPs) received and sent.",
        label: Some("kind"),
        series: |n| {
            vec![
                ("marked", n.rc.rx_marked),
                ("notification_in", n.rc.rx_cnps),
                ("notification_out", n.rc.tx_cnps),
            ]
        },
    },
    NicMetric {
        kind: COUNTER,
        name: "riser_device_odd_packets_total",
        help: "Packets that were duplicates, ahead of a missing packet, or responses without an \
               outstanding request.",
        label: Some("kind"),
        series: |n| {
            vec![
                ("duplicate", n.rc.duplicates),
                ("out_of_order", n.rc.out_of_order),
                ("stale", n.rc.stale_responses),
            ]
        },
    },
    NicMetric {
        kind: COUNTER,
        name: "riser_device_lost_completions_total",
        help: "Completions lost because their queue was full.",
        label: None,
        series: |n| vec![("", n.nic.cq_overruns)],
    },
    NicMetric {
        kind: COUNTER,
        name: "riser_device_refused_queue_pairs_total",
        help: "Queue pairs rejected because their peer already had the maximum number.",
        label: None,
        series: |n| vec![("", n.nic.refused_qps)],
    },
    NicMetric {
        kind: COUNTER,
        name: "riser_device_cm_messages_total",
        help: "Messages of the connection manager, by kind; `received` counts all received messages.",
        label: Some("kind"),
        series: |n| {
            vec![
                ("received", n.cm.received),
                ("malformed", n.cm.malformed),
                ("illegal", n.cm.illegal),
                ("unknown", n.cm.unknown),
                ("duplicate", n.cm.duplicates),
                ("repeated", n.cm.retries),
                ("refused", n.cm.refused),
                ("dropped", n.cm.dropped),
                ("displaced", n.cm.displaced),
            ]
        },
    },
    NicMetric {
        kind: COUNTER,
        name: "riser_device_links_total",
        help: "Links to processes of this host, by outcome: `up` counts established links, \
               including the link that `riser --provider auto` uses to check for shared memory, \
               `broken` counts links closed after an error of the peer, and `refused` counts links \
               that were not established.",
        label: Some("outcome"),
        series: |n| {
            n.links.map_or_else(Vec::new, |links| {
                vec![
                    ("up", links.up),
                    ("refused", links.refused),
                    ("broken", links.broken),
                ]
            })
        },
    },
    NicMetric {
        kind: COUNTER,
        name: "riser_device_link_dropped_packets_total",
        help: "Packets lost because a ring in shared memory was full, or its link was closed.",
        label: None,
        series: |n| {
            n.links
                .map_or_else(Vec::new, |links| vec![("", links.dropped)])
        },
    },
    NicMetric {
        kind: COUNTER,
        name: "riser_device_link_wakeups_total",
        help: "Wake-ups sent to sleeping processes that share memory.",
        label: None,
        series: |n| {
            n.links
                .map_or_else(Vec::new, |links| vec![("", links.bells)])
        },
    },
    NicMetric {
        kind: COUNTER,
        name: "riser_device_socket_calls_total",
        help: "System calls on the device's socket, by direction.",
        label: Some("direction"),
        series: |n| vec![("in", n.socket.receive_calls), ("out", n.socket.send_calls)],
    },
    NicMetric {
        kind: COUNTER,
        name: "riser_device_socket_errors_total",
        help: "Failures and drops at the device's socket, by kind.",
        label: Some("kind"),
        series: |n| {
            vec![
                ("too_long", n.socket.too_long),
                ("send", n.socket.send_errors),
                ("full", n.socket.blocked),
                ("stranger", n.socket.strangers_dropped),
                ("truncated", n.socket.truncated),
                ("off_link", n.socket.off_link),
            ]
        },
    },
    NicMetric {
        kind: GAUGE,
        name: "riser_device_objects",
        help: "Objects of a device, by kind.",
        label: Some("kind"),
        series: |n| {
            vec![
                ("queue_pair", n.usage.qps as u64),
                ("completion_queue", n.usage.cqs as u64),
                ("memory_region", n.usage.mrs as u64),
                ("protection_domain", n.usage.pds as u64),
            ]
        },
    },
];
