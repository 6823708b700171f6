//! Metrics for targets, their units, and their sessions.

use std::collections::BTreeMap;

use super::family::Family;
use crate::control::view::Inventory;
use crate::stats::{
    CHECKS, CLASSES, ClassTotals, Fault, LunStats, Stage, Tally, Throttle, check_name, class_name,
};

pub(super) fn families(inventory: &Inventory<'_>) -> Vec<Family> {
    let mut families = units(inventory);
    families.extend(sessions(inventory));
    families
}

/// Formats a status or sense key in the notation used by the SCSI standards.
fn hex(value: u8) -> String {
    format!("{value:#04x}")
}

/// Returns the labels for a fault: type, status, sense key.
fn fault_labels(fault: Fault) -> (&'static str, String, String) {
    let key = fault.sense_key.map_or_else(String::new, hex);
    (class_name(fault.class), hex(fault.status), key)
}

fn units(inventory: &Inventory<'_>) -> Vec<Family> {
    let mut commands = Family::counter(
        "riser_commands_total",
        "Completed commands, by target, logical unit and kind of command.",
    );
    let mut bytes = Family::counter(
        "riser_command_bytes_total",
        "Data of successful commands in both directions, in bytes.",
    );
    let mut errors = Family::counter(
        "riser_command_errors_total",
        "Commands that completed with a status other than GOOD, by SCSI status and sense key; without unit \
         attentions and flow control.",
    );
    let mut checks = Family::counter(
        "riser_protection_errors_total",
        "Commands that failed a check of T10 protection information, by kind of command and by \
         field: guard, application tag or reference tag.",
    );
    let mut throttled = Family::counter(
        "riser_commands_throttled_total",
        "Commands rejected by flow control with TASK SET FULL or BUSY, by reason: limits of the \
         backend or initiator, or a full queue.",
    );
    let mut info = Family::gauge(
        "riser_lun_info",
        "Backend and serial number of a logical unit; the value is always 1.",
    );
    let mut attentions = Family::counter(
        "riser_unit_attentions_total",
        "Commands completed with a unit attention, after which initiators retry them.",
    );
    let mut total = Family::histogram(
        "riser_command_duration_seconds",
        "Time from a command's arrival until its response is passed to the network, in seconds.",
    );
    let mut stages = Family::summary(
        "riser_command_stage_duration_seconds",
        "Time that commands spend in each stage, in seconds; measured for one command in 16, and \
         for traced commands.",
    );
    let mut depth = Family::gauge("riser_lun_queue_depth", "Commands in flight.");
    let mut limited = Family::gauge(
        "riser_lun_limit_waiting",
        "Commands for the backend of a logical unit that are waiting for rate limits.",
    );
    let mut size = Family::gauge("riser_lun_size_bytes", "Size of a logical unit, in bytes.");
    let mut failed = Family::gauge(
        "riser_lun_flush_failed",
        "1 if a flush has failed, after which flushes fail until the failure is cleared, else 0.",
    );
    let mut memory = Family::gauge(
        "riser_stats_memory_bytes",
        "Memory used by these metrics, in bytes.",
    );
    let mut taken = 0;
    for target in &inventory.catalog.targets {
        for ((index, unit), stats) in target.units.iter().zip(&target.stats) {
            let number = index.to_string();
            let unit_labels = [("target", stats.target()), ("lun", number.as_str())];
            depth.add(&unit_labels, stats.queue_depth() as f64);
            limited.add(&unit_labels, f64::from(unit.limit_waits()));
            let view = inventory.lun(target, *index, unit);
            if let Some(bytes) = view.size {
                size.add(&unit_labels, bytes as f64);
            }
            let [target_label, lun_label] = unit_labels;
            let labels = [
                target_label,
                lun_label,
                ("backend", &*view.backend),
                ("serial", &*view.serial),
            ];
            info.add(&labels, 1.0);
            let has_failed = view.flush_failure.is_some();
            failed.add(&unit_labels, f64::from(u8::from(has_failed)));
            taken += stats.memory();
            let faults = stats.faults();
            add_faults(&mut errors, &unit_labels, &faults);
            add_checks(&mut checks, unit_labels, &faults);
            add_throttled(&mut throttled, unit_labels, &faults);
            let met = faults.total_of(Fault::is_attention);
            attentions.add(&unit_labels, met as f64);
            let mut spent = [(0, 0); Stage::ALL.len()];
            for class in CLASSES {
                let counts = stats.class(class);
                let n = counts.total.count();
                // Most command types are never sent to a unit, and each of them has a histogram, so
                // we skip command types that were not used.
                if n == 0 {
                    continue;
                }
                let [target, lun] = unit_labels;
                let labels = [target, lun, ("op", class_name(class))];
                commands.add(&labels, n as f64);
                bytes.add(&labels, counts.bytes as f64);
                total.times(&labels, &counts.total);
                for ((count, nanos), times) in spent.iter_mut().zip(&counts.stages) {
                    *count += times.count();
                    *nanos += times.nanos;
                }
            }
            // We sum up all command types: a histogram for each stage and type would be hundreds of
            // series per unit.
            for (stage, (count, nanos)) in Stage::ALL.iter().zip(spent) {
                if count > 0 {
                    let [target, lun] = unit_labels;
                    stages.sum(&[target, lun, ("stage", stage.name())], count, nanos);
                }
            }
        }
    }
    memory.add(&[], taken as f64);
    vec![
        commands, bytes, errors, checks, throttled, attentions, total, stages, depth, limited,
        info, size, failed, memory,
    ]
}

fn add_faults(family: &mut Family, labels: &[(&str, &str)], faults: &Tally<Fault>) {
    // The check is not a label of this family.
    let mut sums = Tally::default();
    for (fault, n) in faults.iter().filter(|(fault, _)| fault.is_error()) {
        let check = None;
        sums.add(Fault { check, ..fault }, n);
    }
    for (fault, n) in sums.iter() {
        let (op, status, key) = fault_labels(fault);
        let mut labels = labels.to_vec();
        labels.extend([("op", op), ("status", &status), ("sense_key", &key)]);
        family.add(&labels, n as f64);
    }
}

/// Adds a series for each kind of command and check that has failed.
fn add_checks(family: &mut Family, labels: [(&str, &str); 2], faults: &Tally<Fault>) {
    let [target, lun] = labels;
    for class in CLASSES {
        for check in CHECKS {
            let is_meant = |fault: &Fault| fault.class == class && fault.check == Some(check);
            let failed = faults.total_of(is_meant);
            if failed > 0 {
                let labels = [
                    target,
                    lun,
                    ("op", class_name(class)),
                    ("check", check_name(check)),
                ];
                family.add(&labels, failed as f64);
            }
        }
    }
}

/// Adds a series for each reason, even if its count is zero.
fn add_throttled(family: &mut Family, labels: [(&str, &str); 2], faults: &Tally<Fault>) {
    let [target, lun] = labels;
    for reason in Throttle::ALL {
        let sum = faults.total_of(|fault| fault.throttle == Some(reason));
        family.add(&[target, lun, ("reason", reason.name())], sum as f64);
    }
}

/// Commands from an initiator to a unit, for a single connection.
#[derive(Default)]
struct Part {
    classes: [ClassTotals; CLASSES.len()],
    faults: Tally<Fault>,
}

/// Protocol, initiator, target, unit.
type Who<'a> = (String, &'a str, &'a str, u16);

fn sessions(inventory: &Inventory<'_>) -> Vec<Family> {
    let mut parts: BTreeMap<Who<'_>, Part> = BTreeMap::new();
    for snapshot in inventory.snapshots() {
        for entry in &snapshot.accounts {
            let unit: &LunStats = entry.account.lun();
            let protocol = entry.protocol.to_string();
            let who = (protocol, &*entry.initiator, unit.target(), unit.lun());
            let part = parts.entry(who).or_default();
            // An initiator can have connections on several workers, but each label set must be
            // unique, so we add them up first.
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
    }
    let mut under_way: BTreeMap<(String, String), usize> = BTreeMap::new();
    for session in inventory.sessions() {
        let who = (session.protocol, session.initiator);
        *under_way.entry(who).or_default() += session.in_flight;
    }
    let mut commands = Family::counter(
        "riser_session_commands_total",
        "Completed commands, by initiator port, since it logged in.",
    );
    let mut bytes = Family::counter(
        "riser_session_bytes_total",
        "Data of successful commands in both directions, in bytes.",
    );
    let mut errors = Family::counter(
        "riser_session_errors_total",
        "Commands that completed with a status other than GOOD, by initiator port, status and sense key; without \
         unit attentions and flow control.",
    );
    let mut depth = Family::gauge(
        "riser_session_queue_depth",
        "Requests of an initiator port in flight.",
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
        depth.add(
            &[("initiator", initiator), ("protocol", protocol)],
            *n as f64,
        );
    }
    vec![commands, bytes, errors, depth]
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::time::Instant;

    use prometheus::TextEncoder;
    use riser_scsi::opcode::Kind;
    use riser_scsi::step::{DataIn, Residual, Response, Status};

    use super::*;
    use crate::config::Config;
    use crate::server::Server;
    use crate::stats::{CommandTimer, SessionStats, TraceKey};

    const UNITS: usize = 1000;

    fn config() -> Config {
        let names = |entry: fn(usize) -> String| {
            let entries: Vec<_> = (0..UNITS).map(entry).collect();
            entries.join(", ")
        };
        let backends = names(|n| format!("b{n}: {{ kind: null, size: 1MiB }}"));
        let luns = names(|n| format!("{n}: b{n}"));
        let text = format!(
            "backends: {{ {backends} }}\n\
             targets:\n\
             - name: iqn.2026-01.com.example:production\n\
             \x20 portals: [{{ protocol: iscsi, listen: \"127.97.8.6:3290\" }}]\n\
             \x20 luns: {{ {luns} }}\n\
             \x20 access: open\n\
             workers: {{ count: 1 }}\n"
        );
        Config::parse(&text, "test.yaml").unwrap_or_else(|error| panic!("{error}"))
    }

    /// Completes one command of each type used by a file system without discard.
    fn run_commands(stats: &Arc<LunStats>) {
        let account = Arc::new(SessionStats::new(Arc::clone(stats), 0));
        let key = || TraceKey {
            tag: 1,
            nexus: 1,
            cdb: [0x2a; 10].into_iter().collect(),
        };
        for kind in [Kind::Read, Kind::Write, Kind::Flush, Kind::Other] {
            let (mut timer, now) = (CommandTimer::default(), Instant::now());
            timer.start(Arc::clone(&account), key, now);
            timer.classify(kind);
            timer.enter_stage(Stage::Scsi, now);
            timer.carry(4096);
            let response = Response {
                status: Status::Good,
                sense: std::iter::empty().collect(),
                data_in: DataIn::None,
                residual_in: Residual::None,
                residual_out: Residual::None,
            };
            timer.record_response(&response, 0, now);
            timer.arrive(now);
        }
    }

    /// Series for the session of an initiator: commands and bytes of each type.
    const OF_SESSION: usize = 8;

    #[test]
    fn busy_units_have_bounded_series() {
        let server = Server::start(&config()).unwrap();
        let catalog = server.shared().registry.catalog();
        for stats in &catalog.targets[0].stats {
            run_commands(stats);
        }
        let inventory = Inventory::new(&server);
        let mut all = units(&inventory);
        all.extend(super::super::backends::families(&inventory));
        let families: Vec<_> = all.into_iter().filter_map(Family::finish).collect();
        let text = TextEncoder::new().encode_to_string(&families).unwrap();
        let series = text.lines().filter(|line| !line.starts_with('#')).count();
        let bytes = text.len() / UNITS;
        server.shutdown().unwrap();
        assert!(series / UNITS + OF_SESSION <= 100, "{series} series");
        assert!(bytes < 12_000, "{bytes} bytes of each unit");
        assert!(text.contains("lun=\"999\""));
    }
}
