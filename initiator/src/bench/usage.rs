//! Processor time and context switches of processes, as the kernel counts them.

use std::fs;
use std::io;
use std::time::Duration;

use super::outcome::{Measured, Outcome, Usage};

/// What a process has used since it was started.
///
/// # Errors
/// There is no such process.
pub(super) fn of(pid: u32) -> io::Result<Usage> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat"))?;
    let (user, system) = times(&stat, rustix::param::clock_ticks_per_second())
        .ok_or_else(|| io::Error::from(io::ErrorKind::InvalidData))?;
    let mut usage = Usage {
        user,
        system,
        ..Usage::default()
    };
    // The file of the process itself counts its first thread only.
    for task in fs::read_dir(format!("/proc/{pid}/task"))? {
        // A thread may end while the list is read.
        let status = fs::read_to_string(task?.path().join("status")).unwrap_or_default();
        let (voluntary, involuntary) = switches(&status);
        usage.voluntary += voluntary;
        usage.involuntary += involuntary;
    }
    Ok(usage)
}

/// What was used between two times. Threads that ended in between take their switches with them.
pub(super) fn between(before: Usage, after: Usage) -> Usage {
    Usage {
        user: after.user.saturating_sub(before.user),
        system: after.system.saturating_sub(before.system),
        voluntary: after.voluntary.saturating_sub(before.voluntary),
        involuntary: after.involuntary.saturating_sub(before.involuntary),
    }
}

/// Divides the use of the processor among jobs that ran side by side, each of which has that of
/// all, by their operations per second.
pub(super) fn divide(outcomes: &mut [Outcome]) {
    if outcomes.len() < 2 {
        return;
    }
    let rate = |outcome: &Outcome| {
        let ios: u64 = outcome.measured.iter().map(Measured::ios).sum();
        ios as f64 / outcome.runtime.as_secs_f64().max(1e-9)
    };
    let all: f64 = outcomes.iter().map(rate).sum();
    for outcome in outcomes {
        let share = rate(outcome) / all.max(1e-9);
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

/// Times in user mode and in the kernel, from `/proc/PID/stat` (proc(5)).
fn times(stat: &str, ticks: u64) -> Option<(Duration, Duration)> {
    // The name, in parentheses, may have blanks and parentheses itself.
    let (_, fields) = stat.rsplit_once(')')?;
    let mut fields = fields.split_ascii_whitespace().skip(11);
    let mut time = || {
        let count: u64 = fields.next()?.parse().ok()?;
        Some(Duration::from_secs_f64(count as f64 / ticks as f64))
    };
    Some((time()?, time()?))
}

/// Voluntary and involuntary context switches, from `/proc/PID/status`.
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

    use super::super::stats::no_figures;
    use super::*;

    #[test]
    fn times_are_found_behind_any_name() {
        let stat = "42 (a) b (c) S 1 42 42 0 -1 4194560 1 2 3 4 250 75 0 0 20 0 9 0 100";
        let (user, system) = times(stat, 100).unwrap();
        assert_eq!(user, Duration::from_millis(2500));
        assert_eq!(system, Duration::from_millis(750));
        assert_eq!(times("42", 100), None);
    }

    #[test]
    fn switches_are_found_by_their_names() {
        let status = "Name:\tx\nvoluntary_ctxt_switches:\t17\nnonvoluntary_ctxt_switches:\t4\n";
        assert_eq!(switches(status), (17, 4));
        assert_eq!(switches(""), (0, 0));
    }

    #[test]
    fn jobs_side_by_side_share_what_their_process_used() {
        let usage = Usage {
            user: Duration::from_millis(400),
            system: Duration::from_millis(800),
            voluntary: 40,
            involuntary: 4,
        };
        let outcome = |seconds| {
            let mut measured = no_figures(false);
            measured[0].service.record_n(1000, 6).unwrap();
            Outcome {
                name: "job".into(),
                address: "mem".into(),
                device: None,
                options: Vec::new(),
                started: SystemTime::UNIX_EPOCH,
                runtime: Duration::from_secs(seconds),
                measured,
                intervals: Vec::new(),
                client: usage,
                server: Some(usage),
                verified: None,
                holes: None,
                not_started: 0,
            }
        };
        // The second one has half the operations per second.
        let mut outcomes = [outcome(1), outcome(2)];
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
    fn this_process_has_used_something_and_no_other_is_invented() {
        let usage = of(std::process::id()).unwrap();
        assert!(usage.voluntary + usage.involuntary > 0);
        assert!(of(u32::MAX).is_err());
    }
}
