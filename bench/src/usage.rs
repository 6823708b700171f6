//! CPU usage and context switches of processes, as reported by the kernel.

use std::fs;
use std::io;
use std::time::Duration;

use super::outcome::{Measured, Outcome, Usage};

/// Returns the usage of a process since its start.
///
/// # Errors
/// Fails if the process doesn't exist.
pub(super) fn of(pid: u32) -> io::Result<Usage> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat"))?;
    let (user, system) = times(&stat, rustix::param::clock_ticks_per_second())
        .ok_or_else(|| io::Error::from(io::ErrorKind::InvalidData))?;
    let mut usage = Usage {
        user,
        system,
        ..Usage::default()
    };
    // The status file of the process itself only includes its main thread.
    for task in fs::read_dir(format!("/proc/{pid}/task"))? {
        // A thread may exit while the directory is read.
        let status = fs::read_to_string(task?.path().join("status")).unwrap_or_default();
        let (voluntary, involuntary) = switches(&status);
        usage.voluntary += voluntary;
        usage.involuntary += involuntary;
    }
    Ok(usage)
}

/// Returns the usage between two samples. Context switches of threads that have exited are not
/// included.
fn between(before: Usage, after: Usage) -> Usage {
    Usage {
        user: after.user.saturating_sub(before.user),
        system: after.system.saturating_sub(before.system),
        voluntary: after.voluntary.saturating_sub(before.voluntary),
        involuntary: after.involuntary.saturating_sub(before.involuntary),
    }
}

/// CPU usage of a process between two points in time.
struct Sample {
    pid: Option<u32>,
    before: Option<Usage>,
    after: Option<Usage>,
}

impl Sample {
    fn now(&self) -> Option<Usage> {
        of(self.pid?).ok()
    }
}

/// Measures CPU usage of this process and the process serving the disks, while any of the
/// concurrent jobs is being measured.
pub(super) struct Meter {
    samples: [Sample; 2],
}

impl Meter {
    /// Creates a meter that is not running.
    pub(super) fn new(server: Option<u32>) -> Self {
        let sample = |pid| Sample {
            pid,
            before: None,
            after: None,
        };
        Self {
            samples: [Some(std::process::id()), server].map(sample),
        }
    }

    /// Called when the measurement of a job starts. Only the first call has an effect.
    pub(super) fn start_measurement(&mut self) {
        for sample in &mut self.samples {
            sample.before = sample.before.or_else(|| sample.now());
        }
    }

    /// Called when a job completes. Only the last call is used.
    pub(super) fn stop_measurement(&mut self) {
        for sample in &mut self.samples {
            sample.after = sample.now();
        }
    }

    /// Adds the usage to the results of all jobs, in proportion to their number of operations.
    pub(super) fn divide(&self, outcomes: &mut [Outcome]) {
        let [client, server] = &self.samples;
        let used = |sample: &Sample| Some(between(sample.before?, sample.after?));
        for outcome in &mut *outcomes {
            outcome.client = used(client).unwrap_or_default();
            outcome.server = used(server);
        }
        divide(outcomes);
    }
}

/// Divides the usage between concurrent jobs in proportion to their number of operations.
/// Initially, each job has the total usage.
fn divide(outcomes: &mut [Outcome]) {
    if outcomes.len() < 2 {
        return;
    }
    let ios = |outcome: &Outcome| {
        let ios: u64 = outcome.measured.iter().map(Measured::ios).sum();
        ios as f64
    };
    let all: f64 = outcomes.iter().map(ios).sum();
    for outcome in outcomes {
        let share = ios(outcome) / all.max(1.0);
        outcome.client = part(outcome.client, share);
        outcome.server = outcome.server.map(|server| part(server, share));
    }
}

fn part(usage: Usage, share: f64) -> Usage {
    let count = |n: u64| (n as f64 * share).round() as u64;
    Usage {
        user: usage.user.mul_f64(share),
        system: usage.system.mul_f64(share),
        voluntary: count(usage.voluntary),
        involuntary: count(usage.involuntary),
    }
}

/// Parses user and system time from `/proc/PID/stat` (see proc(5)).
fn times(stat: &str, ticks: u64) -> Option<(Duration, Duration)> {
    // The name is in parentheses, and can itself contain spaces and parentheses.
    let (_, fields) = stat.rsplit_once(')')?;
    let mut fields = fields.split_ascii_whitespace().skip(11);
    let mut time = || {
        let count: u64 = fields.next()?.parse().ok()?;
        Some(Duration::from_secs_f64(count as f64 / ticks as f64))
    };
    Some((time()?, time()?))
}

/// Parses the number of voluntary and involuntary context switches from `/proc/PID/status`.
fn switches(status: &str) -> (u64, u64) {
    let value = |name: &str| {
        let line = status.lines().find_map(|line| line.strip_prefix(name));
        line.and_then(|value| value.trim().parse().ok())
            .unwrap_or(0)
    };
    (
        value("voluntary_ctxt_switches:"),
        value("nonvoluntary_ctxt_switches:"),
    )
}

#[cfg(test)]
mod tests {
    use std::time::SystemTime;

    use super::super::stats::no_measurements;
    use super::*;

    #[test]
    fn times_are_parsed_after_any_name() {
        let stat = "42 (a) b (c) S 1 42 42 0 -1 4194560 1 2 3 4 250 75 0 0 20 0 9 0 100";
        let (user, system) = times(stat, 100).unwrap();
        assert_eq!(user, Duration::from_millis(2500));
        assert_eq!(system, Duration::from_millis(750));
        assert_eq!(times("42", 100), None);
    }

    #[test]
    fn switches_are_parsed_by_name() {
        let status = "Name:\tx\nvoluntary_ctxt_switches:\t17\nnonvoluntary_ctxt_switches:\t4\n";
        assert_eq!(switches(status), (17, 4));
        assert_eq!(switches(""), (0, 0));
    }

    /// Returns the outcome of a job with `ios` reads.
    fn outcome(seconds: u64, ios: u64) -> Outcome {
        let mut measured = no_measurements(false);
        measured[0].service.record_n(1000, ios).unwrap();
        Outcome {
            name: "job".into(),
            address: "mem".into(),
            device: None,
            protection: None,
            options: Vec::new(),
            started: SystemTime::UNIX_EPOCH,
            runtime: Duration::from_secs(seconds),
            measured,
            intervals: Vec::new(),
            client: Usage::default(),
            server: None,
            verified: None,
            holes: None,
            unstable: false,
            not_started: 0,
        }
    }

    #[test]
    fn concurrent_jobs_share_process_usage() {
        let usage = Usage {
            user: Duration::from_millis(400),
            system: Duration::from_millis(800),
            voluntary: 40,
            involuntary: 4,
        };
        let outcome = |seconds, ios| Outcome {
            client: usage,
            server: Some(usage),
            ..outcome(seconds, ios)
        };
        // This doesn't depend on the duration of the jobs.
        let mut outcomes = [outcome(1, 6), outcome(2, 3)];
        divide(&mut outcomes[..1]);
        assert_eq!(outcomes[0].client, usage, "it was alone");
        divide(&mut outcomes);
        let [one, two] = &outcomes;
        assert_eq!((two.client.voluntary, two.client.involuntary), (13, 1));
        assert_eq!(one.client.voluntary, 27);
        let user = two.client.user.abs_diff(Duration::from_micros(133_333));
        assert!(user < Duration::from_micros(1), "{user:?}");
        assert_eq!(two.server, Some(two.client));
    }

    #[test]
    fn operation_cost_is_independent_of_duration() {
        let used = |seconds| Usage {
            user: Duration::from_secs(seconds),
            ..Usage::default()
        };
        let meter = Meter {
            samples: [Some(1), None].map(|pid| Sample {
                pid,
                before: Some(used(100)),
                after: pid.map(|_| used(111)),
            }),
        };
        let mut outcomes = [(10, 10_000), (1, 1000)].map(|(seconds, ios)| outcome(seconds, ios));
        meter.divide(&mut outcomes);
        for (outcome, ios) in outcomes.iter().zip([10_000, 1000]) {
            let each = outcome.client.user / ios;
            let difference = each.abs_diff(Duration::from_millis(1));
            assert!(difference < Duration::from_micros(1), "{each:?}");
            assert_eq!(outcome.server, None);
        }
    }

    #[test]
    fn usage_is_read_for_existing_processes() {
        let usage = of(std::process::id()).unwrap();
        assert!(usage.voluntary + usage.involuntary > 0);
        assert!(of(u32::MAX).is_err());
    }
}
