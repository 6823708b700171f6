//! `cargo xtask neighbours`: what one initiator at full load does to another's latency, and what
//! limits do about that. It fails where the 99th percentile beside a limited one is [`TOO_MUCH`]
//! times that alone, by the medians, and where the other one has not done what it was there for.

use std::fs;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::Value;

use crate::daemon::{self, Daemon};
use crate::{Failure, sh};

/// Options of `cargo xtask neighbours`.
#[derive(clap::Args)]
pub(crate) struct Options {
    /// Seconds of each measurement.
    #[arg(long, default_value_t = 5)]
    seconds: u32,
    /// Number of runs of every measurement; medians are printed.
    #[arg(long, default_value_t = 3)]
    runs: usize,
    /// Limit of the noisy initiator, in commands per second.
    #[arg(long, default_value_t = 1000)]
    iops: u32,
    /// Folder of riserd and riser; by default they are built for this.
    #[arg(long)]
    programs: Option<PathBuf>,
}

/// Name of the noisy initiator.
const NOISY: &str = "iqn.2026-01.com.example:noisy";

const TARGET: &str = "iqn.2026-01.com.example:t";

/// Factor by which a limited neighbour must not raise the quiet initiator's latency.
const TOO_MUCH: f64 = 2.0;

/// Seconds for which the noisy one goes on beyond each measurement.
const MARGIN: u32 = 5;

/// For how many seconds a limit is saved up by default.
const BURST: f64 = 0.1;

/// The quiet one's latency, in microseconds.
#[derive(Clone, Copy)]
struct Figure {
    p50: f64,
    p99: f64,
}

/// Measures and prints a table that can go into a document.
pub(crate) fn run(options: &Options) -> Result<(), Failure> {
    let programs = match &options.programs {
        Some(folder) => folder.clone(),
        None => daemon::build_release()?,
    };
    let scratch = sh::Scratch::new("neighbours")?;
    let rows = measure(options, &programs, scratch.path())?;
    let alone = median(&rows[0]);
    println!("\n| 4 KiB random reads at depth 1 | p50 | p99 | p99 beside alone |");
    println!("| --- | --- | --- | --- |");
    for (name, figures) in ["alone", "beside a noisy one", "beside a limited one"]
        .iter()
        .zip(&rows)
    {
        let Figure { p50, p99 } = median(figures);
        let ratio = p99 / alone.p99;
        println!("| {name} | {p50:.0} us | {p99:.0} us | {ratio:.2} |");
    }
    let (runs, seconds, iops) = (options.runs, options.seconds, options.iops);
    println!(
        "\nMedians of {runs} runs of {seconds} s each. The noisy one reads 4 KiB at depth 32, from another \
         unit; limited, {iops} times a second."
    );
    check_quiet(alone, median(&rows[2]))
}

/// Fails if a limited neighbour disturbs the quiet initiator.
fn check_quiet(alone: Figure, beside: Figure) -> Result<(), Failure> {
    // Asked so that a quotient which is no number fails.
    let ratio = beside.p99 / alone.p99;
    if ratio < TOO_MUCH {
        return Ok(());
    }
    Err(format!("beside a limited one, the p99 is {ratio:.2} times that alone").into())
}

fn measure(
    options: &Options,
    programs: &Path,
    scratch: &Path,
) -> Result<[Vec<Figure>; 3], Failure> {
    let mut rows = [const { Vec::new() }; 3];
    for _ in 0..options.runs {
        // The three cases take turns within a round, so that a slow minute of the machine is in
        // all of them. Each has a fresh daemon: limits of the one before would still be owed.
        for (row, limits) in [None, Some(String::new()), Some(limits(options.iops))]
            .into_iter()
            .enumerate()
        {
            let config = scratch.join("riserd.yaml");
            let rule = limits.as_deref().unwrap_or_default();
            fs::write(&config, configuration(rule, scratch))?;
            let log = scratch.join("riserd.log");
            let daemon = Daemon::start(&programs.join("riserd"), &config, &log)?;
            let noisy = limits
                .as_ref()
                .map(|_| Noisy::start(options, programs))
                .transpose()?;
            let figure = quiet(options, programs)?;
            if let Some(noisy) = noisy {
                let done = noisy.finish()?;
                let is_limited = limits.is_some_and(|limits| !limits.is_empty());
                check_noisy(done, is_limited, options)?;
            }
            daemon.stop()?;
            rows[row].push(figure);
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

/// `riser bench`, as JSON.
fn bench(programs: &Path, url: &str, depth: u32, seconds: u32) -> Command {
    let mut command = sh::cmd(programs.join("riser"), ["-o", "json", "bench", url]);
    command.args(["--depth", &depth.to_string()]);
    command.args(["--runtime", &format!("{seconds}s")]);
    command
}

fn quiet(options: &Options, programs: &Path) -> Result<Figure, Failure> {
    let url = format!("iscsi://127.0.0.1:3261/{TARGET}/0");
    let json = sh::output(&mut bench(programs, &url, 1, options.seconds))?;
    let report: Value = serde_json::from_str(&json)?;
    let micros = |name: &str| {
        let nanos = report["jobs"][0]["read"]["clat_ns"]["percentile"][name].as_f64();
        nanos.map(|n| n / 1e3).ok_or("no latency in the result")
    };
    Ok(Figure {
        p50: micros("50.000000")?,
        p99: micros("99.000000")?,
    })
}

/// Fails unless the noisy initiator has done what it is there for: more than its limit lets pass,
/// or just that.
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
    Err(format!("the {what} one has read {commands} times in {seconds:.1} s").into())
}

/// Work of the noisy initiator: commands, and the seconds that it ran at most.
#[derive(Clone, Copy)]
struct Done {
    commands: f64,
    seconds: f64,
}

/// A load that ends with the value.
struct Noisy {
    child: Child,
    since: Instant,
}

impl Noisy {
    fn start(options: &Options, programs: &Path) -> Result<Self, Failure> {
        let url = format!("iscsi://127.0.0.1:3261/{TARGET}/1?initiator={NOISY}");
        let mut command = bench(programs, &url, 32, options.seconds + MARGIN);
        command.arg("--warm-up=0s");
        let since = Instant::now();
        let child = command
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .spawn()?;
        let load = Self { child, since };
        // Until it is at full load. This is no order of events: a load that comes late only makes
        // a figure better, and `check_noisy` looks at what it has done.
        std::thread::sleep(Duration::from_secs(1));
        Ok(load)
    }

    /// Waits until it ends by itself, which it must not have done before; returns its work.
    fn finish(mut self) -> Result<Done, Failure> {
        if let Some(status) = self.child.try_wait()? {
            return Err(format!("the noisy one has ended too early: {status}").into());
        }
        let mut json = String::new();
        let mut out = self.child.stdout.take().ok_or("it has an output")?;
        // Read to the end before the process is waited for: with a full pipe it would never end.
        out.read_to_string(&mut json)?;
        let status = self.child.wait()?;
        let seconds = self.since.elapsed().as_secs_f64();
        if !status.success() {
            return Err(format!("the noisy one has failed: {status}").into());
        }
        let report: Value = serde_json::from_str(&json)?;
        let commands = report["jobs"][0]["read"]["total_ios"].as_f64();
        let commands = commands.ok_or("no commands in the result")?;
        Ok(Done { commands, seconds })
    }
}

impl Drop for Noisy {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn median(figures: &[Figure]) -> Figure {
    let middle = |of: fn(&Figure) -> f64| {
        let mut sorted: Vec<f64> = figures.iter().map(of).collect();
        sorted.sort_by(f64::total_cmp);
        sorted[sorted.len() / 2]
    };
    Figure {
        p50: middle(|f| f.p50),
        p99: middle(|f| f.p99),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn twice_the_latency_alone_is_too_much() {
        let figure = |p99| Figure { p50: 1.0, p99 };
        assert!(check_quiet(figure(10.0), figure(19.9)).is_ok());
        assert!(check_quiet(figure(10.0), figure(20.0)).is_err());
        assert!(check_quiet(figure(10.0), figure(f64::NAN)).is_err());
    }

    #[test]
    fn a_load_counts_that_was_held_at_its_limit_or_exceeded_it() {
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
