//! Serialized JSON document, using fio's names and order.

use std::io::{self, Write};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use jiff::Timestamp;
use jiff::tz::TimeZone;
use serde::Serialize;
use serde_json::{Map, Value};

use super::latency::{Latency, Shares};
use crate::outcome::{Interval, Measured, OpKind, Outcome, Usage};
use crate::output::machine::Machine;
use crate::output::summary::{
    active, cpu_per_op, latencies, per_second, samples, switches_per_op, total_ios,
};
use crate::output::text::notes;

#[derive(Serialize)]
struct Document<'a> {
    #[serde(rename = "fio version")]
    fio_version: String,
    timestamp: u64,
    timestamp_ms: u64,
    time: String,
    jobs: Vec<Job<'a>>,
    riser: Tool<'a>,
}

#[derive(Serialize)]
struct Tool<'a> {
    version: &'static str,
    machine: &'a Machine,
}

#[derive(Serialize)]
struct Job<'a> {
    jobname: &'a str,
    groupid: usize,
    error: u32,
    #[serde(rename = "job options")]
    options: Map<String, Value>,
    read: Direction,
    write: Direction,
    trim: Direction,
    sync: Flushes,
    job_runtime: u64,
    usr_cpu: f64,
    sys_cpu: f64,
    ctx: u64,
    latency_ns: Map<String, Value>,
    latency_us: Map<String, Value>,
    latency_ms: Map<String, Value>,
    riser: Extra<'a>,
}

/// Results for reads, writes or trims.
#[derive(Serialize)]
struct Direction {
    io_bytes: u64,
    io_kbytes: u64,
    bw_bytes: u64,
    bw: u64,
    iops: f64,
    runtime: u64,
    total_ios: u64,
    short_ios: u64,
    drop_ios: u64,
    slat_ns: Latency,
    clat_ns: Latency,
    lat_ns: Latency,
    #[serde(flatten)]
    samples: Samples,
}

/// Statistics of rates over all intervals.
#[derive(Serialize)]
struct Samples {
    bw_min: u64,
    bw_max: u64,
    bw_agg: f64,
    bw_mean: f64,
    bw_dev: f64,
    bw_samples: usize,
    iops_min: u64,
    iops_max: u64,
    iops_mean: f64,
    iops_stddev: f64,
    iops_samples: usize,
}

#[derive(Serialize)]
struct Flushes {
    total_ios: u64,
    lat_ns: Latency,
}

/// Additional results that are not included in fio's format.
#[derive(Serialize)]
struct Extra<'a> {
    address: &'a str,
    device: Option<&'a str>,
    protection: Option<u8>,
    started_ms: u64,
    open_loop: bool,
    mean_in_flight: f64,
    client: Process,
    server: Option<Process>,
    verified_blocks: Option<u64>,
    torn_blocks: Option<u64>,
    unstable: bool,
    holes: Option<Holes>,
    not_started: u64,
    notes: Vec<String>,
    intervals: Vec<Part>,
}

#[derive(Serialize)]
struct Process {
    user_ns: u64,
    system_ns: u64,
    voluntary_ctx: u64,
    involuntary_ctx: u64,
    cpu_ns_per_io: f64,
    ctx_per_io: f64,
}

#[derive(Serialize)]
struct Holes {
    unallocated_bytes: u64,
    region_bytes: u64,
}

#[derive(Serialize)]
struct Part {
    at_ms: f64,
    length_ms: f64,
    #[serde(flatten)]
    kinds: Map<String, Value>,
}

/// Results for one kind of operation in an interval. In an open loop, latencies are measured from
/// the planned arrival.
#[derive(Serialize)]
struct PartValues {
    iops: f64,
    bw_bytes: f64,
    mean_ns: f64,
    p50_ns: u64,
    p90_ns: u64,
    p99_ns: u64,
    p99_9_ns: u64,
    max_ns: u64,
}

/// Writes a document with all outcomes. If `bins` is set, this uses the `json+` format.
///
/// # Errors
/// Returns errors from `out`.
pub fn write(
    out: &mut dyn Write,
    outcomes: &[Outcome],
    machine: &Machine,
    bins: bool,
) -> io::Result<()> {
    let ended = outcomes.iter().map(|o| o.started + o.runtime).max();
    let ended = ended.unwrap_or(UNIX_EPOCH);
    let jobs = outcomes.iter().enumerate();
    let document = Document {
        // Other programs parse the text after "fio-" as a version, so we use a different prefix.
        fio_version: format!("riser-{}", env!("CARGO_PKG_VERSION")),
        timestamp: millis(since_epoch(ended)) / 1000,
        timestamp_ms: millis(since_epoch(ended)),
        time: ctime(ended),
        jobs: jobs.map(|(id, outcome)| job(id, outcome, bins)).collect(),
        riser: Tool {
            version: env!("CARGO_PKG_VERSION"),
            machine,
        },
    };
    serde_json::to_writer_pretty(&mut *out, &document)?;
    writeln!(out)
}

fn job(id: usize, outcome: &Outcome, bins: bool) -> Job<'_> {
    let direction = |kind| direction(outcome, kind, bins);
    let flushes = outcome.of(OpKind::Flush);
    let shares = Shares::of(outcome.measured[..3].iter().map(latencies));
    let runtime = outcome.runtime.as_secs_f64().max(1e-9);
    let of_one_cpu = |time: Duration| 100.0 * time.as_secs_f64() / runtime;
    Job {
        jobname: &outcome.name,
        groupid: id,
        // There is no outcome for a failed run.
        error: 0,
        options: options(outcome),
        read: direction(OpKind::Read),
        write: direction(OpKind::Write),
        trim: direction(OpKind::Trim),
        sync: Flushes {
            total_ios: flushes.ios(),
            lat_ns: Latency::distribution(latencies(flushes), bins),
        },
        job_runtime: millis(outcome.runtime),
        usr_cpu: of_one_cpu(outcome.client.user),
        sys_cpu: of_one_cpu(outcome.client.system),
        ctx: outcome.client.voluntary + outcome.client.involuntary,
        latency_ns: shares.ns,
        latency_us: shares.us,
        latency_ms: shares.ms,
        riser: extra(outcome),
    }
}

/// Returns the options of the job. As in fio, the name is the first option.
fn options(outcome: &Outcome) -> Map<String, Value> {
    let name = ("name".to_owned(), Value::from(outcome.name.as_str()));
    let others = outcome.options.iter().filter(|(key, _)| key != "name");
    let others = others.map(|(key, value)| (key.clone(), Value::from(value.as_str())));
    std::iter::once(name).chain(others).collect()
}

fn direction(outcome: &Outcome, kind: OpKind, bins: bool) -> Direction {
    let measured = outcome.of(kind);
    let used = measured.ios() > 0;
    let rate = outcome.bytes_per_second(kind);
    let lat_ns = match &measured.response {
        Some(response) => Latency::distribution(response, bins),
        None => Latency::summary(&measured.service),
    };
    Direction {
        io_bytes: measured.bytes,
        io_kbytes: measured.bytes / 1024,
        bw_bytes: rate as u64,
        bw: (rate / 1024.0) as u64,
        iops: outcome.iops(kind),
        runtime: if used { millis(outcome.runtime) } else { 0 },
        total_ios: measured.ios(),
        // The run is aborted if an operation is incomplete.
        short_ios: 0,
        drop_ios: 0,
        slat_ns: Latency::default(),
        clat_ns: Latency::distribution(&measured.service, bins),
        lat_ns,
        samples: rates(outcome, kind),
    }
}

fn rates(outcome: &Outcome, kind: OpKind) -> Samples {
    // As in fio, there are no samples if there were no operations.
    let samples = match outcome.of(kind).ios() {
        0 => Vec::new(),
        _ => samples(outcome, kind),
    };
    let iops = Spread::of(samples.iter().map(|(iops, _)| *iops));
    let bw = Spread::of(samples.iter().map(|(_, bytes)| bytes / 1024.0));
    let share_of_all = match outcome.bytes_per_second(kind) {
        0.0 => 0.0,
        rate => (100.0 * bw.mean * 1024.0 / rate).min(100.0),
    };
    Samples {
        bw_min: bw.min as u64,
        bw_max: bw.max as u64,
        bw_agg: share_of_all,
        bw_mean: bw.mean,
        bw_dev: bw.deviation,
        bw_samples: samples.len(),
        iops_min: iops.min as u64,
        iops_max: iops.max as u64,
        iops_mean: iops.mean,
        iops_stddev: iops.deviation,
        iops_samples: samples.len(),
    }
}

/// Statistics of samples. All are 0 if there are no samples. The deviation is 0 if there is only
/// one.
#[derive(Default)]
struct Spread {
    min: f64,
    max: f64,
    mean: f64,
    deviation: f64,
}

impl Spread {
    fn of(samples: impl Iterator<Item = f64> + Clone) -> Self {
        let n = samples.clone().count() as f64;
        if n == 0.0 {
            return Self::default();
        }
        let mean = samples.clone().sum::<f64>() / n;
        let squares: f64 = samples.clone().map(|s| (s - mean).powi(2)).sum();
        Self {
            min: samples.clone().fold(f64::INFINITY, f64::min),
            max: samples.fold(0.0, f64::max),
            mean,
            deviation: if n > 1.0 {
                (squares / (n - 1.0)).sqrt()
            } else {
                0.0
            },
        }
    }
}

fn extra(outcome: &Outcome) -> Extra<'_> {
    let ios = total_ios(outcome);
    let busy: f64 = outcome
        .measured
        .iter()
        .map(|m| m.service.mean() * m.ios() as f64)
        .sum();
    Extra {
        address: &outcome.address,
        device: outcome.device.as_deref(),
        protection: outcome.protection,
        started_ms: millis(since_epoch(outcome.started)),
        open_loop: outcome.measured.iter().any(|m| m.response.is_some()),
        // Little's law: the sum of all latencies divided by the measurement time.
        mean_in_flight: busy / outcome.runtime.as_nanos().max(1) as f64,
        client: process(&outcome.client, ios),
        server: outcome.server.as_ref().map(|usage| process(usage, ios)),
        verified_blocks: outcome.verified.map(|verified| verified.blocks),
        torn_blocks: outcome.verified.map(|verified| verified.torn),
        unstable: outcome.unstable,
        holes: outcome.holes.map(|holes| Holes {
            unallocated_bytes: holes.bytes,
            region_bytes: holes.of,
        }),
        not_started: outcome.not_started,
        notes: notes(outcome),
        intervals: outcome
            .intervals
            .iter()
            .map(|interval| part(outcome, interval))
            .collect(),
    }
}

fn process(usage: &Usage, ios: u64) -> Process {
    Process {
        user_ns: nanos(usage.user),
        system_ns: nanos(usage.system),
        voluntary_ctx: usage.voluntary,
        involuntary_ctx: usage.involuntary,
        cpu_ns_per_io: cpu_per_op(usage, ios),
        ctx_per_io: switches_per_op(usage, ios),
    }
}

fn part(outcome: &Outcome, interval: &Interval) -> Part {
    let kinds = active(outcome).map(|kind| {
        let values = part_values(&interval.measured[kind as usize], interval);
        let values = serde_json::to_value(values).expect("numbers serialize");
        (kind.name().to_owned(), values)
    });
    Part {
        at_ms: 1000.0 * interval.at.as_secs_f64(),
        length_ms: 1000.0 * interval.length.as_secs_f64(),
        kinds: kinds.collect(),
    }
}

fn part_values(measured: &Measured, interval: &Interval) -> PartValues {
    let latencies = latencies(measured);
    PartValues {
        iops: per_second(measured.ios(), interval),
        bw_bytes: per_second(measured.bytes, interval),
        mean_ns: latencies.mean(),
        p50_ns: latencies.value_at_percentile(50.0),
        p90_ns: latencies.value_at_percentile(90.0),
        p99_ns: latencies.value_at_percentile(99.0),
        p99_9_ns: latencies.value_at_percentile(99.9),
        max_ns: latencies.max(),
    }
}

fn since_epoch(time: SystemTime) -> Duration {
    time.duration_since(UNIX_EPOCH).unwrap_or_default()
}

fn millis(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}

fn nanos(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

/// Formats a time like `ctime`, using the local time zone.
fn ctime(time: SystemTime) -> String {
    let time = Timestamp::try_from(time).unwrap_or_default();
    let local = time.to_zoned(TimeZone::system());
    local.strftime("%a %b %e %H:%M:%S %Y").to_string()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::output::sample;

    fn written(outcome: &Outcome) -> Value {
        let mut out = Vec::new();
        let outcomes = std::slice::from_ref(outcome);
        write(&mut out, outcomes, &sample::machine(), true).unwrap();
        serde_json::from_slice(&out).unwrap()
    }

    #[test]
    fn results_use_fio_units() {
        let outcome = sample::mixed("a", 1);
        let json = written(&outcome);
        assert_eq!(json["timestamp"], sample::STARTED + 1);
        assert_eq!(json["timestamp_ms"], sample::STARTED * 1000 + 1010);
        let job = &json["jobs"][0];
        let reads = outcome.of(OpKind::Read);
        let seconds = 1.01;
        let read = &job["read"];
        assert_eq!(read["io_kbytes"], reads.bytes / 1024);
        assert_eq!(read["bw"], (reads.bytes as f64 / 1024.0 / seconds) as u64);
        assert_eq!(read["runtime"], 1010);
        assert_eq!(read["iops"], reads.ios() as f64 / seconds);
        assert_eq!(read["iops_samples"], 10);
        assert_eq!(read["lat_ns"]["N"], reads.ios());
        assert_eq!(read["lat_ns"].get("percentile"), None);
        assert_eq!(job["sync"]["total_ios"], outcome.of(OpKind::Flush).ios());
        assert_eq!(job["trim"]["runtime"], 0);
        assert_eq!(job["ctx"], 214);
        let usr = job["usr_cpu"].as_f64().unwrap();
        assert!((usr - 12.0 / 1.01).abs() < 1e-9, "{usr}");
        assert_eq!(job["riser"]["server"]["voluntary_ctx"], 5000);
        assert_eq!(job["riser"]["holes"]["unallocated_bytes"], 1 << 20);
        assert_eq!(job["riser"]["intervals"].as_array().unwrap().len(), 11);
    }

    #[test]
    fn open_loops_have_percentiles_of_both_times() {
        let outcome = sample::open_loop("a", 1);
        let json = written(&outcome);
        let read = &json["jobs"][0]["read"];
        let reads = outcome.of(OpKind::Read);
        let at = |histogram: &hdrhistogram::Histogram<u64>| histogram.value_at_percentile(99.0);
        assert_eq!(
            read["clat_ns"]["percentile"]["99.000000"],
            at(&reads.service)
        );
        let response = reads.response.as_ref().unwrap();
        assert_eq!(read["lat_ns"]["percentile"]["99.000000"], at(response));
        assert_eq!(json["jobs"][0]["riser"]["open_loop"], true);
        assert_eq!(json["jobs"][0]["riser"]["not_started"], 0);
    }

    #[test]
    fn warnings_are_in_document() {
        let sound = written(&sample::mixed("a", 1));
        let sound = &sound["jobs"][0]["riser"];
        assert_eq!(sound["unstable"], false);
        assert_eq!(sound["torn_blocks"], 0);
        let json = written(&Outcome {
            unstable: true,
            ..sample::mixed("a", 1)
        });
        let riser = &json["jobs"][0]["riser"];
        assert_eq!(riser["unstable"], true);
        let notes = riser["notes"].as_array().unwrap();
        assert_eq!(notes.len(), sound["notes"].as_array().unwrap().len() + 1);
        let has = |words: &str| {
            notes
                .iter()
                .any(|note| note.as_str().unwrap().contains(words))
        };
        assert!(has("lacks flushes or fua") && has("12.5 %"), "{notes:?}");
    }

    #[test]
    fn operations_in_flight_follow_from_latencies() {
        let mut outcome = sample::open_loop("a", 1);
        let reads = &mut outcome.measured[0];
        reads.service.reset();
        // Three concurrent operations during one second.
        reads.service.record_n(1_000_000, 3_000).unwrap();
        outcome.runtime = Duration::from_secs(1);
        let json = written(&outcome);
        let depth = json["jobs"][0]["riser"]["mean_in_flight"].as_f64().unwrap();
        assert!((depth - 3.0).abs() < 0.01, "{depth}");
    }
}
