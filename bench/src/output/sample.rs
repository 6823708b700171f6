//! Outcomes for tests, generated from a seed with results that are plausible for a small disk.

use std::time::{Duration, UNIX_EPOCH};

use hdrhistogram::Histogram;

use super::machine::Machine;
use crate::outcome::{Holes, Interval, Measured, OpKind, Outcome, Usage, Verified};

/// Number of operations of a kind in a full interval, their size and their typical latency.
#[derive(Clone, Copy)]
struct Load {
    kind: OpKind,
    ios: u64,
    size: u64,
    micros: f64,
}

/// Start time of all runs: 2026-01-02 03:04:05 UTC.
pub(super) const STARTED: u64 = 1_767_323_045;

fn histogram() -> Histogram<u64> {
    Histogram::new(3).expect("three digits are allowed")
}

fn measured(response: bool) -> Measured {
    Measured {
        bytes: 0,
        service: histogram(),
        response: response.then(histogram),
    }
}

/// Records operations using a latency distribution with a long tail.
fn record(measured: &mut Measured, load: Load, ios: u64, random: &mut fastrand::Rng) {
    for _ in 0..ios {
        let tail = 1.0 / (1.0 - 0.98 * random.f64()).powf(0.35);
        let nanos = (load.micros * 1000.0 * tail * (0.9 + 0.2 * random.f64())) as u64;
        measured.service.record(nanos).expect("it fits");
        if let Some(response) = &mut measured.response {
            response.record(nanos * 2).expect("it fits");
        }
        measured.bytes += load.size;
    }
}

fn outcome(name: &str, seed: u64, loads: &[Load], open_loop: bool) -> Outcome {
    let mut random = fastrand::Rng::with_seed(seed);
    let mut total = std::array::from_fn(|_| measured(open_loop));
    let mut intervals = Vec::new();
    // Ten full intervals and a short one.
    for i in 0..11_u64 {
        let length = Duration::from_millis(if i == 10 { 10 } else { 100 });
        let mut part = std::array::from_fn(|_| measured(open_loop));
        for load in loads {
            let ios = load.ios * length.as_millis() as u64 / 100;
            let ios = ios * random.u64(90..=110) / 100;
            record(&mut part[load.kind as usize], *load, ios, &mut random);
        }
        for (sum, part) in total.iter_mut().zip(&part) {
            sum.bytes += part.bytes;
            sum.service.add(&part.service).expect("it resizes");
            if let (Some(sum), Some(part)) = (&mut sum.response, &part.response) {
                sum.add(part).expect("it resizes");
            }
        }
        intervals.push(Interval {
            at: Duration::from_millis(100 * i),
            length,
            measured: part,
        });
    }
    Outcome {
        name: name.into(),
        address: "srp://127.0.0.1/disk/0".into(),
        device: None,
        protection: None,
        options: Vec::new(),
        started: UNIX_EPOCH + Duration::from_secs(STARTED),
        runtime: Duration::from_millis(1010),
        measured: total,
        intervals,
        client: Usage {
            user: Duration::from_millis(120),
            system: Duration::from_millis(340),
            voluntary: 210,
            involuntary: 4,
        },
        server: None,
        verified: None,
        holes: None,
        unstable: false,
        not_started: 0,
    }
}

fn options(pairs: &[(&str, &str)]) -> Vec<(String, String)> {
    let owned = pairs.iter().map(|(k, v)| ((*k).into(), (*v).into()));
    owned.collect()
}

/// Returns reads, writes and flushes in a closed loop, including all optional values.
pub(super) fn mixed(name: &str, seed: u64) -> Outcome {
    let load = |kind, ios, size, micros| Load {
        kind,
        ios,
        size,
        micros,
    };
    let loads = [
        load(OpKind::Read, 300, 4096, 90.0),
        load(OpKind::Write, 130, 4096, 140.0),
        load(OpKind::Flush, 5, 0, 900.0),
    ];
    Outcome {
        options: options(&[("rw", "randrw"), ("bs", "4k"), ("iodepth", "8")]),
        server: Some(Usage {
            user: Duration::from_millis(90),
            system: Duration::from_millis(400),
            voluntary: 5000,
            involuntary: 20,
        }),
        verified: Some(Verified {
            blocks: 1234,
            torn: 0,
        }),
        holes: Some(Holes {
            bytes: 1 << 20,
            of: 8 << 20,
        }),
        ..outcome(name, seed, &loads, false)
    }
}

/// Returns reads in an open loop.
pub(super) fn open_loop(name: &str, seed: u64) -> Outcome {
    let load = Load {
        kind: OpKind::Read,
        ios: 400,
        size: 8192,
        micros: 70.0,
    };
    Outcome {
        options: options(&[("rw", "randread"), ("bs", "8k"), ("rate_iops", "4000")]),
        ..outcome(name, seed, &[load], true)
    }
}

/// Returns reads with one block size at different depths.
pub(super) fn sweep(bs: &str, depths: &[u64]) -> Vec<Outcome> {
    let runs = depths.iter().map(|depth| {
        let size = riser_units::parse_size(bs).expect("it is a size");
        let kib = size as f64 / 1024.0;
        let load = Load {
            kind: OpKind::Read,
            // Throughput saturates while latency continues to increase.
            ios: (900.0 / (1.0 + kib / 100.0)) as u64 * depth / (depth + 6),
            size,
            micros: (40.0 + 9.0 * *depth as f64) * (1.0 + kib / 100.0),
        };
        let depth = depth.to_string();
        Outcome {
            options: options(&[("rw", "randread"), ("bs", bs), ("iodepth", &depth)]),
            ..outcome("sweep", load.ios, &[load], false)
        }
    });
    runs.collect()
}

/// Returns a machine that doesn't exist.
pub(super) fn machine() -> Machine {
    Machine {
        kernel: "Linux 6.1.0-test x86_64".into(),
        cpu: "Imaginary CPU <1> & Co.".into(),
        cores: 2,
        memory_bytes: 24 << 30,
    }
}
