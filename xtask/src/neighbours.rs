//! `cargo xtask neighbours`: what one initiator at full load does to another's latency, and what limits do
//! about that.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use serde_json::Value;

use crate::daemon::Daemon;
use crate::{Failure, demo, sh};

/// Options of `cargo xtask neighbours`.
#[derive(clap::Args)]
pub(crate) struct Options {
    /// Seconds of each measurement.
    #[arg(long, default_value_t = 5)]
    seconds: u32,
    /// How often everything is measured; medians are printed.
    #[arg(long, default_value_t = 3)]
    runs: usize,
    /// What the noisy one is limited to, in commands a second.
    #[arg(long, default_value_t = 1000)]
    iops: u32,
    /// Folder of riserd and riser; by default they are built for this.
    #[arg(long)]
    programs: Option<PathBuf>,
}

/// Who the noisy one is.
const NOISY: &str = "iqn.2026-01.com.example:noisy";

const TARGET: &str = "iqn.2026-01.com.example:t";

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
        None => demo::build()?,
    };
    let scratch = std::env::temp_dir().join(format!("riser-neighbours-{}", std::process::id()));
    fs::create_dir_all(&scratch)?;
    let measured = measure(options, &programs, &scratch);
    let _ = fs::remove_dir_all(&scratch);
    let rows = measured?;
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
    Ok(())
}

fn measure(
    options: &Options,
    programs: &Path,
    scratch: &Path,
) -> Result<[Vec<Figure>; 3], Failure> {
    let mut rows = [const { Vec::new() }; 3];
    for _ in 0..options.runs {
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
                .map(|_| Noisy::start(options, programs))
                .transpose()?;
            let figure = quiet(options, programs)?;
            drop(noisy);
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
        let nanos = report["read"]["lat_ns"][name].as_f64();
        nanos.map(|n| n / 1e3).ok_or("no latency in the result")
    };
    Ok(Figure {
        p50: micros("p50")?,
        p99: micros("p99")?,
    })
}

/// A load that ends with the value.
struct Noisy(Child);

impl Noisy {
    fn start(options: &Options, programs: &Path) -> Result<Self, Failure> {
        let url = format!("iscsi://127.0.0.1:3261/{TARGET}/1?initiator={NOISY}");
        let mut command = bench(programs, &url, 32, 10 * options.seconds);
        let child = command.stdin(Stdio::null()).stdout(Stdio::null()).spawn()?;
        let load = Self(child);
        std::thread::sleep(Duration::from_secs(1));
        Ok(load)
    }
}

impl Drop for Noisy {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
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
