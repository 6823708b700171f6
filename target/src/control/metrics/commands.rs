//! Targets, their units, and the sessions that use them.

use std::collections::BTreeMap;

use super::family::Family;
use crate::server::Server;
use crate::sessions::catalog::Catalog;
use crate::stats::{CLASSES, ClassTotals, Fault, LunStats, Stage, Tally, class_name};
use crate::worker::mail::Snapshot;

pub(super) fn families(server: &Server, snapshots: &[Snapshot]) -> Vec<Family> {
    let catalog = server.shared().registry.catalog();
    let mut families = units(&catalog);
    families.extend(sessions(snapshots));
    families
}

/// A status or sense key, as SCSI standards write it.
fn hex(value: u8) -> String {
    format!("{value:#04x}")
}

/// The labels of a fault: kind, status, sense key.
fn fault_labels(fault: Fault) -> (&'static str, String, String) {
    let key = fault.sense_key.map_or_else(String::new, hex);
    (class_name(fault.class), hex(fault.status), key)
}

fn units(catalog: &Catalog) -> Vec<Family> {
    let mut commands = Family::counter(
        "riser_commands_total",
        "Commands answered, by target, logical unit and kind of command.",
    );
    let mut bytes = Family::counter(
        "riser_command_bytes_total",
        "Data of these commands, both ways, in bytes.",
    );
    let mut errors = Family::counter(
        "riser_command_errors_total",
        "Commands answered with another status than GOOD, by SCSI status and sense key; without unit attentions.",
    );
    let mut attentions = Family::counter(
        "riser_unit_attentions_total",
        "Commands answered with a unit attention, after which initiators repeat them.",
    );
    let mut total = Family::histogram(
        "riser_command_duration_seconds",
        "Time from a command's arrival until the network has its answer, in seconds.",
    );
    let mut stages = Family::histogram(
        "riser_command_stage_duration_seconds",
        "Time that commands spend in each stage, in seconds; of one command in 16, and of those traced.",
    );
    let mut depth = Family::gauge("riser_lun_queue_depth", "Commands under way.");
    let mut limited = Family::gauge(
        "riser_lun_limit_waiting",
        "Commands for the backend of a logical unit that wait for limits.",
    );
    let mut size = Family::gauge("riser_lun_size_bytes", "Size of a logical unit, in bytes.");
    let mut failed = Family::gauge(
        "riser_lun_flush_failed",
        "1 if a flush has failed, after which flushes fail until that is cleared, else 0.",
    );
    let mut memory = Family::gauge(
        "riser_stats_memory_bytes",
        "Memory of these numbers themselves, in bytes.",
    );
    let mut taken = 0;
    for target in &catalog.targets {
        for ((number, unit), stats) in target.units.iter().zip(&target.stats) {
            let number = number.to_string();
            let unit_labels = [("target", stats.target()), ("lun", number.as_str())];
            depth.add(&unit_labels, stats.queue_depth() as f64);
            limited.add(&unit_labels, f64::from(unit.limit_waits()));
            size.add(&unit_labels, unit.lu.capacity_bytes() as f64);
            let store = catalog.store_of(unit);
            let has_failed = store.is_some_and(|store| store.flush_failure().is_some());
            failed.add(&unit_labels, f64::from(u8::from(has_failed)));
            taken += stats.memory();
            let faults = stats.faults();
            add_faults(&mut errors, &unit_labels, &faults);
            let met = faults.iter().filter(|(fault, _)| fault.is_attention());
            attentions.add(&unit_labels, met.map(|(_, n)| n).sum::<u64>() as f64);
            for class in CLASSES {
                let counts = stats.class(class);
                let n = counts.total.count();
                // Most kinds of commands are never sent to a unit, and each has a histogram for
                // each stage: only those that were sent are series.
                if n == 0 {
                    continue;
                }
                let [target, lun] = unit_labels;
                let labels = [target, lun, ("op", class_name(class))];
                commands.add(&labels, n as f64);
                bytes.add(&labels, counts.bytes as f64);
                total.times(&labels, &counts.total);
                for (stage, times) in Stage::ALL.iter().zip(&counts.stages) {
                    let [target, lun, op] = labels;
                    stages.times(&[target, lun, op, ("stage", stage.name())], times);
                }
            }
        }
    }
    memory.add(&[], taken as f64);
    vec![
        commands, bytes, errors, attentions, total, stages, depth, limited, size, failed, memory,
    ]
}

fn add_faults(family: &mut Family, labels: &[(&str, &str)], faults: &Tally<Fault>) {
    for (fault, n) in faults.iter().filter(|(fault, _)| fault.is_error()) {
        let (op, status, key) = fault_labels(fault);
        let mut labels = labels.to_vec();
        labels.extend([("op", op), ("status", &status), ("sense_key", &key)]);
        family.add(&labels, n as f64);
    }
}

/// Commands of one initiator at one unit; it may have several connections there.
#[derive(Default)]
struct Part {
    classes: [ClassTotals; CLASSES.len()],
    faults: Tally<Fault>,
}

/// Protocol, initiator, target, unit.
type Who<'a> = (String, &'a str, &'a str, u16);

fn sessions(snapshots: &[Snapshot]) -> Vec<Family> {
    let mut parts: BTreeMap<Who<'_>, Part> = BTreeMap::new();
    let mut under_way: BTreeMap<(String, String), f64> = BTreeMap::new();
    for snapshot in snapshots {
        for entry in &snapshot.accounts {
            let unit: &LunStats = entry.account.lun();
            let protocol = entry.protocol.to_string();
            let who = (protocol, &*entry.initiator, unit.target(), unit.lun());
            let part = parts.entry(who).or_default();
            // An initiator may have several connections and several workers: a label set must
            // appear once, so they are summed before a series is made.
            for class in CLASSES {
                let (sum, view) = (
                    &mut part.classes[class as usize],
                    entry.account.class(class),
                );
                sum.commands += view.commands;
                sum.bytes += view.bytes;
            }
            part.faults.merge(&entry.account.faults());
        }
        for session in &snapshot.sessions {
            let who = ("srp".to_owned(), session.initiator.to_string());
            *under_way.entry(who).or_default() += session.in_flight as f64;
        }
        for session in &snapshot.iscsi_sessions {
            let identity = &session.info.identity;
            let protocol = match session.provider {
                Some(_) => "iser",
                None => "iscsi",
            };
            let initiator = format!("{},{}", identity.initiator, identity.isid);
            let who = (protocol.to_owned(), initiator);
            *under_way.entry(who).or_default() += session.info.in_flight as f64;
        }
    }
    let mut commands = Family::counter(
        "riser_session_commands_total",
        "Commands answered, by initiator port, since it logged in.",
    );
    let mut bytes = Family::counter(
        "riser_session_bytes_total",
        "Data of these commands, both ways, in bytes.",
    );
    let mut errors = Family::counter(
        "riser_session_errors_total",
        "Commands answered with another status than GOOD, by initiator port, status and sense key.",
    );
    let mut depth = Family::gauge(
        "riser_session_queue_depth",
        "Requests of an initiator port under way.",
    );
    for ((protocol, initiator, target, lun), part) in &parts {
        let lun = lun.to_string();
        let labels = [
            ("target", *target),
            ("lun", lun.as_str()),
            ("initiator", *initiator),
            ("protocol", protocol.as_str()),
        ];
        for class in CLASSES {
            let view = part.classes[class as usize];
            if view.commands > 0 {
                let [target, lun, initiator, protocol] = labels;
                let labels = [target, lun, initiator, protocol, ("op", class_name(class))];
                commands.add(&labels, view.commands as f64);
                bytes.add(&labels, view.bytes as f64);
            }
        }
        add_faults(&mut errors, &labels, &part.faults);
    }
    for ((protocol, initiator), n) in &under_way {
        depth.add(&[("initiator", initiator), ("protocol", protocol)], *n);
    }
    vec![commands, bytes, errors, depth]
}
