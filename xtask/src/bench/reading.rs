//! Parses the output of benchmark clients: fio, `riser bench` and `iscsi-perf`.

use serde_json::Value;

use super::workloads::Load;
use crate::{Failure, sh};

/// Results of a single measurement, as reported by the client.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Reading {
    pub(super) operations: f64,
    pub(super) iops: f64,
    pub(super) bytes_per_second: f64,
    /// Median latency in nanoseconds; not available from `iscsi-perf`.
    pub(super) p50_ns: Option<f64>,
    /// 99.9th percentile of the latency in nanoseconds, if available.
    pub(super) p99_9_ns: Option<f64>,
}

impl Reading {
    /// Returns an error if there were no operations, because the other values would be meaningless.
    pub(super) fn some(self) -> Result<Self, Failure> {
        if self.operations < 1.0 {
            return Err("the client executed no operation".into());
        }
        Ok(self)
    }
}

/// Paths to latency percentiles, in order of preference. In fio, `lat` starts when an operation is
/// submitted, same as in `riser bench`, but `clat` starts after the submission, so it doesn't
/// include an operation that already completes in this call. `riser bench` uses either `p50` or
/// fio's format.
const MEDIANS: [&str; 3] = [
    "/lat_ns/percentile/50.000000",
    "/lat_ns/p50",
    "/clat_ns/percentile/50.000000",
];

const TAILS: [&str; 2] = [
    "/lat_ns/percentile/99.900000",
    "/clat_ns/percentile/99.900000",
];

pub(super) fn json(text: &str, load: &Load) -> Result<Reading, Failure> {
    let document = sh::json(text)?;
    let job = document.pointer("/jobs/0").unwrap_or(&document);
    if let Some(error) = job["error"].as_i64().filter(|error| *error != 0) {
        return Err(format!("the client reports error {error}").into());
    }
    direction(&job[if load.is_write() { "write" } else { "read" }])
}

fn direction(results: &Value) -> Result<Reading, Failure> {
    let number = |name: &str| {
        let number = results[name].as_f64();
        number.ok_or_else(|| format!("missing {name} in the result"))
    };
    let first = |places: &[&str]| {
        let mut places = places.iter();
        places.find_map(|place| results.pointer(place)?.as_f64())
    };
    Ok(Reading {
        operations: number("total_ios")?,
        iops: number("iops")?,
        bytes_per_second: number("bw_bytes")?,
        p50_ns: first(&MEDIANS),
        p99_9_ns: first(&TAILS),
    })
}

/// Parses JSON output of `riser bench wire`. Of all cases with checksums and the same data size as
/// this load, we use the one with the highest bandwidth.
pub(super) fn wire(text: &str, load: &Load) -> Result<Reading, Failure> {
    let document = sh::json(text)?;
    let cases = document["cases"]
        .as_array()
        .ok_or("missing cases in the result")?;
    let is_like = |case: &&Value| {
        case["icrc"] == true && case["reply_bytes"].as_u64() == Some(load.block_size.into())
    };
    let bandwidth = |case: &Value| case["bytes_per_second"].as_f64().unwrap_or(0.0);
    let case = cases
        .iter()
        .filter(is_like)
        .max_by(|a, b| bandwidth(a).total_cmp(&bandwidth(b)))
        .ok_or_else(|| format!("missing wire case of {} bytes", load.block_size))?;
    let number = |name: &str| {
        let number = case[name].as_f64();
        number.ok_or_else(|| format!("missing {name} in the result"))
    };
    Ok(Reading {
        operations: number("operations")?,
        iops: number("operations_per_second")?,
        bytes_per_second: number("bytes_per_second")?,
        p50_ns: case["latency_ns"]["p50"].as_f64(),
        p99_9_ns: None,
    })
}

pub(super) fn iscsi_perf(text: &str, load: &Load, seconds: f64) -> Result<Reading, Failure> {
    let (_, average) = text
        .rsplit_once("iops average ")
        .ok_or("iscsi-perf printed no average")?;
    let digits = average.split(|c: char| !c.is_ascii_digit()).next();
    let iops: f64 = digits
        .and_then(|digits| digits.parse().ok())
        .filter(|iops| *iops > 0.0)
        .ok_or("invalid average of iscsi-perf: expected a number above 0")?;
    Ok(Reading {
        operations: iops * seconds,
        iops,
        // The program only prints whole MiB, so this value is more precise.
        bytes_per_second: iops * f64::from(load.block_size),
        p50_ns: None,
        p99_9_ns: None,
    })
}

pub(crate) fn summary(text: &str) -> Result<String, Failure> {
    let load = Load {
        rw: "randread",
        block_size: 4096,
        depth: 32,
    };
    let read = json(text, &load)?;
    Ok(format!(
        "{:.1}k IOPS, {:.0} MB/s",
        read.iops / 1e3,
        read.bytes_per_second / 1e6
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    const READ: Load = Load {
        rw: "randread",
        block_size: 4096,
        depth: 1,
    };

    const WRITE: Load = Load {
        rw: "write",
        ..READ
    };

    #[test]
    fn riser_and_fio_results_are_parsed() {
        let today = r#"{"url": "srp://h/0", "read": {"total_ios": 20, "iops": 10.5, "bw_bytes": 43008.0,
            "lat_ns": {"p50": 900, "mean": 1}}, "write": {"total_ios": 0, "iops": 0, "bw_bytes": 0, "lat_ns": null}}"#;
        let layout = r#"{"fio version": "x", "jobs": [{"error": 0, "read": {"total_ios": 20, "iops": 10.5,
            "bw_bytes": 43008, "clat_ns": {"percentile": {"1.000000": 5, "50.000000": 900}}}}]}"#;
        let fio = r#"fio: a warning
            {"jobs": [{"read": {"total_ios": 20, "iops": 10.5, "bw_bytes": 43008, "clat_ns": {"percentile":
            {"50.000000": 100}}, "lat_ns": {"percentile": {"50.000000": 900}}}}]}"#;
        let expected = Reading {
            operations: 20.0,
            iops: 10.5,
            bytes_per_second: 43008.0,
            p50_ns: Some(900.0),
            p99_9_ns: None,
        };
        for text in [today, layout, fio] {
            assert_eq!(json(text, &READ).unwrap(), expected, "{text}");
        }
    }

    /// If arrivals are scheduled, prefer the latency based on scheduled times.
    #[test]
    fn open_loop_tail_uses_response_times() {
        let text = r#"{"jobs": [{"read": {"total_ios": 1, "iops": 1, "bw_bytes": 1,
            "clat_ns": {"percentile": {"50.000000": 5, "99.900000": 6}},
            "lat_ns": {"percentile": {"50.000000": 50, "99.900000": 600}}}}]}"#;
        let read = json(text, &READ).unwrap();
        assert_eq!((read.p50_ns, read.p99_9_ns), (Some(50.0), Some(600.0)));
    }

    #[test]
    fn result_uses_load_direction() {
        let text = r#"{"jobs": [{"read": {"total_ios": 1, "iops": 1, "bw_bytes": 1},
                                 "write": {"total_ios": 2, "iops": 4, "bw_bytes": 8}}]}"#;
        let iops = |load| json(text, load).unwrap().iops;
        assert_eq!((iops(&READ), iops(&WRITE)), (1.0, 4.0));
        assert_eq!(json(text, &WRITE).unwrap().p50_ns, None);
    }

    #[test]
    fn failed_or_empty_run_is_rejected() {
        let why = |text| {
            let read = json(text, &READ).and_then(Reading::some);
            read.unwrap_err().to_string()
        };
        let none = r#"{"read": {"total_ios": 0, "iops": 0, "bw_bytes": 0}}"#;
        assert!(why(none).contains("no operation"));
        let failed =
            r#"{"jobs": [{"error": 5, "read": {"total_ios": 9, "iops": 9, "bw_bytes": 9}}]}"#;
        assert!(why(failed).contains("error 5"));
        assert!(why(r#"{"read": {"total_ios": 9, "iops": 9}}"#).contains("bw_bytes"));
        assert!(why("fio: engine nbd not loadable").contains("missing JSON"));
    }

    #[test]
    fn wire_result_uses_best_checksummed_case() {
        let case = |(bytes, rate): (u32, u32), icrc: bool| {
            format!(
                r#"{{"name": "x", "reply_bytes": {bytes}, "icrc": {icrc}, "operations": 7,
                "operations_per_second": 3.5, "bytes_per_second": {rate}, "latency_ns": {{"p50": 9}}}}"#
            )
        };
        let cases = [
            case((4096, 10), true),
            case((4096, 20), true),
            case((4096, 30), false),
            case((512, 40), true),
        ];
        let text = format!(r#"{{"cases": [{}]}}"#, cases.join(","));
        let read = wire(&text, &READ).unwrap();
        assert_eq!((read.bytes_per_second, read.p50_ns), (20.0, Some(9.0)));
        let longer = Load {
            block_size: 8192,
            ..READ
        };
        assert!(
            wire(&text, &longer)
                .unwrap_err()
                .to_string()
                .contains("8192")
        );
        assert!(wire("{}", &READ).is_err());
    }

    #[test]
    fn iscsi_perf_uses_last_average() {
        let text = "connected to iscsi://h/t/1\n\r00:00:01 - lba 9, iops current 7 (0 MB/s), \
                    iops average 7 (0 MB/s), in_flight 32, busy 0        \
                    \riops average 250 (0 MB/s)      \n\nfinished.\n";
        let read = iscsi_perf(text, &READ, 2.0).unwrap();
        assert_eq!((read.iops, read.operations), (250.0, 500.0));
        assert_eq!(read.bytes_per_second, 250.0 * 4096.0);
        assert!(iscsi_perf("Login Failed.", &READ, 2.0).is_err());
        assert!(iscsi_perf("iops average 0 (0 MB/s)", &READ, 2.0).is_err());
    }
}
