//! `cargo xtask neighbours`: measures how an initiator at full load affects the latency of another
//! initiator, with and without limits. Using medians, this fails if the 99th percentile with a
//! limited neighbor is at least [`TOO_MUCH`] times the value for a single initiator, or if the
//! neighbor didn't generate enough load.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use crate::daemon::{self, Daemon};
use crate::process::Process;
use crate::{Failure, sh};

#[derive(clap::Args)]
pub(crate) struct Options {
    /// Measurement duration in seconds.
    #[arg(long, default_value_t = 5)]
    seconds: u32,
    /// Number of runs per measurement; the medians are printed.
    #[arg(long, default_value_t = 3)]
    runs: usize,
    /// Limit for the noisy initiator, in commands per second.
    #[arg(long, default_value_t = 1000)]
    iops: u32,
    /// Directory of riserd and riser; by default they are built first.
    #[arg(long)]
    programs: Option<PathBuf>,
}

/// Name of the noisy initiator.
const NOISY: &str = "iqn.2026-01.com.example:noisy";

const TARGET: &str = "iqn.2026-01.com.example:t";

/// Maximum factor by which a limited neighbor may increase the latency of the quiet initiator.
const TOO_MUCH: f64 = 2.0;

/// Number of seconds for which the noisy initiator should keep running after each measurement.
const MARGIN: u32 = 5;

/// Maximum time of the noisy initiator.
const PATIENCE: Duration = Duration::from_secs(600);

/// Default burst time of a limit, in seconds.
const BURST: f64 = 0.1;

/// Latency of the quiet initiator, in microseconds.
#[derive(Clone, Copy)]
struct Latency {
    p50: f64,
    p99: f64,
}

pub(crate) fn run(options: &Options) -> Result<(), Failure> {
    let programs = match &options.programs {
        Some(directory) => directory.clone(),
        None => daemon::build_dist()?,
    };
    let scratch = sh::Scratch::new("neighbours")?;
    let rows = measure(options, &programs, scratch.path())?;
    let alone = median(&rows[0]);
    println!("\n| 4 KiB random reads at depth 1 | p50 | p99 | p99 relative to alone |");
    println!("| --- | --- | --- | --- |");
    for (name, latencies) in [
        "alone",
        "with a noisy neighbour",
        "with a limited neighbour",
    ]
    .iter()
    .zip(&rows)
    {
        let Latency { p50, p99 } = median(latencies);
        let ratio = p99 / alone.p99;
        println!("| {name} | {p50:.0} us | {p99:.0} us | {ratio:.2} |");
    }
    let (runs, seconds, iops) = (options.runs, options.seconds, options.iops);
    println!(
        "\nMedians of {runs} runs of {seconds} s each. The noisy neighbour reads 4 KiB at depth 32 from another unit; \
             the limited one at most {iops} times per second."
    );
    check_quiet(alone, median(&rows[2]))
}

/// Returns an error if a limited neighbor disturbs the quiet initiator.
fn check_quiet(alone: Latency, loaded: Latency) -> Result<(), Failure> {
    // Use a negated comparison, so that NaN will fail as well.
    let ratio = loaded.p99 / alone.p99;
    if ratio < TOO_MUCH {
        return Ok(());
    }
    Err(format!("with a limited neighbour, the p99 is {ratio:.2} times the p99 alone").into())
}

fn measure(
    options: &Options,
    programs: &Path,
    scratch: &Path,
) -> Result<[Vec<Latency>; 3], Failure> {
    let mut rows = [const { Vec::new() }; 3];
    for _ in 0..options.runs {
        // We alternate between the three cases in every round, so that a slow phase of the machine
        // affects all of them. Each case starts a new daemon because a limit from the previous case
        // would still have debt.
        for (row, limits) in [None, Some(String::new()), Some(limits(options.iops))]
            .into_iter()
            .enumerate()
        {
            let config = scratch.join("riserd.yaml");
            let rule = limits.as_deref().unwrap_or_default();
            fs::write(&config, configuration(rule, scratch))?;
            let log = scratch.join("riserd.log");
            let daemon = Daemon::start(&programs.join("riserd"), &config, &log)?;
            let noisy = match limits {
                Some(_) => Some(start_noisy(options, programs, scratch)?),
                None => None,
            };
            let latency = quiet(options, programs)?;
            if let Some(noisy) = noisy {
                let done = finish_noisy(noisy)?;
                let is_limited = limits.is_some_and(|limits| !limits.is_empty());
                check_noisy(done, is_limited, options)?;
            }
            daemon.stop()?;
            rows[row].push(latency);
        }
    }
    Ok(rows)
}

fn limits(iops: u32) -> String {
    format!(", limits: {{ iops: {iops} }}")
}

fn configuration(limits: &str, scratch: &Path) -> String {
    format!(
        "backends:\n  quiet: {{ kind: ram, size: 64MiB }}\n  noisy: {{ kind: ram, size: 64MiB }}\n\
         targets:\n  - name: t\n    iqn: {TARGET}\n    portals: [{{ protocol: iscsi, listen: 127.0.0.1:3261 }}]\n    \
         luns: {{ 0: quiet, 1: noisy }}\n    access:\n      - {{ iqn: {NOISY}{limits} }}\n      \
         - {{ address: 127.0.0.1 }}\nadmin: {{ socket: none }}\nstate: {{ directory: {} }}\n",
        scratch.join("state").display()
    )
}

fn bench(programs: &Path, url: &str, depth: u32, seconds: u32) -> Command {
    let mut command = sh::cmd(programs.join("riser"), ["-o", "json", "bench", url]);
    command.args(["--depth", &depth.to_string()]);
    command.args(["--runtime", &format!("{seconds}s")]);
    command
}

fn quiet(options: &Options, programs: &Path) -> Result<Latency, Failure> {
    let url = format!("iscsi://127.0.0.1:3261/{TARGET}/0");
    let report = sh::json(&sh::output(&mut bench(programs, &url, 1, options.seconds))?)?;
    let micros = |name: &str| {
        let nanos = report["jobs"][0]["read"]["clat_ns"]["percentile"][name].as_f64();
        nanos
            .map(|n| n / 1e3)
            .ok_or("missing latency in the result")
    };
    Ok(Latency {
        p50: micros("50.000000")?,
        p99: micros("99.000000")?,
    })
}

/// Checks that the noisy initiator has generated the expected load: more than its limit allows, or
/// exactly this limit.
fn check_noisy(done: Done, is_limited: bool, options: &Options) -> Result<(), Failure> {
    let Done { commands, seconds } = done;
    let most = f64::from(options.iops) * (seconds + BURST) + 1.0;
    let runtime = f64::from(options.seconds + MARGIN);
    let is_held = commands <= most && commands >= f64::from(options.iops) * runtime / 2.0;
    let as_expected = if is_limited { is_held } else { commands > most };
    if as_expected {
        return Ok(());
    }
    let what = if is_limited { "limited" } else { "noisy" };
    Err(format!("the {what} neighbour has executed {commands} reads in {seconds:.1} s").into())
}

/// Work completed by the noisy initiator: the number of commands, and the maximum run time in
/// seconds.
#[derive(Clone, Copy)]
struct Done {
    commands: f64,
    seconds: f64,
}

fn start_noisy(
    options: &Options,
    programs: &Path,
    scratch: &Path,
) -> Result<(Process, Instant), Failure> {
    let url = format!("iscsi://127.0.0.1:3261/{TARGET}/1?initiator={NOISY}");
    let mut command = bench(programs, &url, 32, options.seconds + MARGIN);
    command.arg("--warm-up=0s");
    let since = Instant::now();
    let command = sh::ending_with_us(command, "KILL");
    let process = Process::start(command, &scratch.join("noisy.log"))?;
    // Wait for full load. We don't depend on this timing: if the load starts late, the results will
    // only be better, and `check_noisy` verifies the work that was completed.
    std::thread::sleep(Duration::from_secs(1));
    Ok((process, since))
}

/// Waits until the noisy initiator exits, which must not have happened before, and returns its
/// work.
fn finish_noisy((mut process, since): (Process, Instant)) -> Result<Done, Failure> {
    if process.has_exited()? {
        return Err(process.failure("exited too early"));
    }
    let exited = process.finish(since + PATIENCE);
    let seconds = since.elapsed().as_secs_f64();
    if !exited.status.is_some_and(|status| status.success()) {
        return Err(process.failure("failed"));
    }
    let commands = sh::json(&exited.output)?["jobs"][0]["read"]["total_ios"].as_f64();
    let commands = commands.ok_or("missing number of commands in the result")?;
    Ok(Done { commands, seconds })
}

fn median(latencies: &[Latency]) -> Latency {
    let middle = |of: fn(&Latency) -> f64| {
        let mut sorted: Vec<f64> = latencies.iter().map(of).collect();
        sorted.sort_by(f64::total_cmp);
        sorted[sorted.len() / 2]
    };
    Latency {
        p50: middle(|f| f.p50),
        p99: middle(|f| f.p99),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn doubled_latency_fails() {
        let latency = |p99| Latency { p50: 1.0, p99 };
        assert!(check_quiet(latency(10.0), latency(19.9)).is_ok());
        assert!(check_quiet(latency(10.0), latency(20.0)).is_err());
        assert!(check_quiet(latency(10.0), latency(f64::NAN)).is_err());
    }

    #[test]
    fn load_must_reach_its_limit() {
        let options = Options {
            seconds: 5,
            runs: 3,
            iops: 1000,
            programs: None,
        };
        let check = |commands, is_limited| {
            let done = Done {
                commands,
                seconds: 10.5,
            };
            check_noisy(done, is_limited, &options).is_ok()
        };
        assert!(check(10_100.0, true) && check(100_000.0, false));
        for commands in [0.0, 4000.0, 11_000.0] {
            assert!(!check(commands, true), "{commands}");
        }
        assert!(!check(0.0, false) && !check(10_100.0, false));
    }
}
