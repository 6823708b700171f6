//! Compares all systems in several rounds.

use std::time::Duration;

use super::machine;
use super::results::{Comparison, Sample};
use super::rig::{Measured, Rig};
use super::systems::{Client, System};
use super::workloads::Workload;
use crate::Failure;

/// Rows and columns to measure in this run.
pub(super) struct Selection {
    pub(super) systems: Vec<&'static System>,
    pub(super) workloads: Vec<&'static Workload>,
}

/// Measures all rounds.
pub(super) fn measure(
    rig: &Rig,
    selection: &Selection,
    rounds: usize,
) -> Result<Comparison, Failure> {
    let mut systems = selection.systems.clone();
    let mut skipped = Vec::new();
    systems.retain(|system| {
        let why = rig.lacks(system);
        skipped.extend(why.iter().map(|why| format!("{}: {why}", system.label)));
        why.is_none()
    });
    for line in &skipped {
        println!("not measured: {line}");
    }
    let mut comparison = Comparison {
        measured: machine::provenance(rig, rounds)?,
        skipped,
        samples: Vec::new(),
    };
    // Rounds must be the outermost loop, and systems the innermost. If the machine slows down for
    // some time, this should affect just one round, which is then ignored by the median, and both
    // sides of a ratio should be affected equally.
    for round in 1..=rounds {
        for workload in &selection.workloads {
            // Rotate the order, so that no system always runs after the same one.
            systems.rotate_left(usize::from(round > 1));
            for system in systems.iter().filter(|system| system.runs(&workload.load)) {
                let measured = rig.measure(system, &workload.load).map_err(|error| {
                    format!(
                        "round {round}, {}, {}: {error}",
                        workload.name, system.label
                    )
                })?;
                let sample = sample(round, system, workload, &measured);
                println!(
                    "round {round}/{rounds}: {}: {}: {}",
                    workload.name,
                    system.label,
                    format_sample(&sample)
                );
                comparison.samples.push(sample);
            }
        }
    }
    Ok(comparison)
}

fn sample(round: usize, system: &System, workload: &Workload, measured: &Measured) -> Sample {
    let reading = &measured.reading;
    let each = |time: Duration| {
        let each = time.as_secs_f64() * 1e9 / reading.operations;
        (system.client != Client::Wire).then(|| rounded(each))
    };
    Sample {
        round,
        system: system.id.to_owned(),
        workload: workload.id.to_owned(),
        iops: rounded(reading.iops),
        bytes_per_second: rounded(reading.bytes_per_second),
        p50_ns: reading.p50_ns,
        server_ns: each(measured.server),
        client_ns: each(measured.client),
    }
}

/// Rounds to an integer, because any fraction of a nanosecond or an operation is noise.
fn rounded(value: f64) -> f64 {
    value.round()
}

fn format_sample(sample: &Sample) -> String {
    let p50 = sample
        .p50_ns
        .map_or(String::new(), |ns| format!(", p50 {:.1} us", ns / 1e3));
    let cpu = sample.server_ns.zip(sample.client_ns);
    let cpu = cpu.map_or(String::new(), |(server, client)| {
        let (server, client) = (server / 1e3, client / 1e3);
        format!(", processor time {server:.2} + {client:.2} us")
    });
    format!(
        "{:.1}k IOPS, {:.0} MB/s{p50}{cpu}",
        sample.iops / 1e3,
        sample.bytes_per_second / 1e6
    )
}

#[cfg(test)]
mod tests {
    use super::super::reading::Reading;
    use super::super::{systems, workloads};
    use super::*;

    #[test]
    fn processor_time_is_for_each_operation() {
        let measured = Measured {
            reading: Reading {
                operations: 1000.0,
                iops: 500.4,
                bytes_per_second: 2e6,
                p50_ns: Some(12_345.0),
                p99_9_ns: None,
            },
            server: Duration::from_millis(3),
            client: Duration::from_millis(2),
        };
        let system = systems::named(systems::SRP).unwrap();
        let workload = workloads::named(workloads::READ_1).unwrap();
        let sample = sample(2, system, workload, &measured);
        assert_eq!(
            (sample.server_ns, sample.client_ns),
            (Some(3000.0), Some(2000.0))
        );
        assert_eq!((sample.round, sample.iops), (2, 500.0));
        assert_eq!(
            format_sample(&sample),
            "0.5k IOPS, 2 MB/s, p50 12.3 us, processor time 3.00 + 2.00 us"
        );
    }
}
