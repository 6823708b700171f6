//! `cargo xtask fuzz`: the fuzz targets with libFuzzer, which sees what each input reaches.
//!
//! The targets are tests of bolero, which chooses its engine at compile time: here libFuzzer's, of
//! which the crate `bolero-libfuzzer` has the sources. LLVM's pass that counts edges is part of every
//! rustc, so a stable one will do; only crates of the workspace are compiled with it (`rustc.sh`).
//! The build has a folder of its own, as all its flags are others.
//!
//! | folder | what it has |
//! | --- | --- |
//! | `__fuzz__/TARGET/corpus`, beside the test | what is checked in: `seed-*`, and `found-*` of `--minimize` |
//! | `__fuzz__/TARGET/crashes` | inputs that failed, which `cargo test` replays until they are removed |
//! | `.build/fuzz/TARGET` | the working corpus, from which the next run goes on, and the log |
//! | `.build/fuzz/report.json` | figures of each target's last run and sums of all its runs, and what all targets reach of the state machines |

mod corpus;
mod machines;
mod process;
mod report;
mod targets;

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use self::process::Figures;
use self::targets::{TARGETS, Target};
use crate::packages::{Need, ensure, need};
use crate::{Failure, root, sh};

const NEEDS: &[Need] = &[need("g++", "g++", "libFuzzer is written in C++")];

/// Compiler flags by which bolero chooses its engine.
const ENGINE: &str = "--cfg fuzzing --cfg fuzzing_libfuzzer";

/// Options of `cargo xtask fuzz`.
#[derive(clap::Args)]
pub(crate) struct Options {
    /// Time for each target, in minutes, which may have a fraction; several run at once, one on each
    /// core. With 0, nothing is explored.
    #[arg(long, default_value_t = 1.0)]
    minutes: f64,
    /// Afterwards renew what is checked in of the inputs that were found: for each target the few
    /// that reach most.
    #[arg(long)]
    minimize: bool,
    /// List the targets instead.
    #[arg(long)]
    list: bool,
    /// Only these, by their whole names.
    targets: Vec<String>,
}

/// Builds what the targets need, explores them, and prints and keeps the figures.
pub(crate) fn run(options: &Options) -> Result<(), Failure> {
    let targets = selected(&options.targets)?;
    if options.list {
        for target in targets {
            println!("{:<22} {}", target.name, target.about);
        }
        return Ok(());
    }
    if !ensure(NEEDS).is_empty() {
        return Err("libFuzzer cannot be built".into());
    }
    let programs = build()?;
    let program = |target: &Target| -> &PathBuf { &programs[&(target.package, target.program)] };
    let failed = match options.minutes > 0.0 {
        true => {
            let time = Duration::from_secs_f64(options.minutes * 60.0);
            report(&explore(&targets, time, program)?)?
        }
        false => 0,
    };
    if options.minimize {
        let cores = std::thread::available_parallelism()?.get();
        let found = on_cores(cores, &targets, |target| {
            corpus::minimize(program(target), target)
        })?;
        println!(
            "kept beside the seeds: {} inputs",
            found.iter().sum::<usize>()
        );
    }
    match failed {
        0 => Ok(()),
        n => Err(format!("{n} targets failed").into()),
    }
}

fn selected(names: &[String]) -> Result<Vec<Target>, Failure> {
    let unknown = names.iter().find(|n| TARGETS.iter().all(|t| t.name != **n));
    if let Some(name) = unknown {
        return Err(format!("there is no target {name}; --list names them").into());
    }
    let is_selected = |t: &&Target| names.is_empty() || names.iter().any(|n| n == t.name);
    Ok(TARGETS.iter().filter(is_selected).copied().collect())
}

/// Programs by package and name.
type Programs = BTreeMap<(&'static str, &'static str), PathBuf>;

/// Builds the programs of all targets at once, whichever are run: another selection would have other
/// features, and would build much again.
fn build() -> Result<Programs, Failure> {
    println!("building");
    let packages = TARGETS.iter().map(|t| format!("--package={}", t.package));
    let args: BTreeSet<_> = packages
        .chain(TARGETS.iter().map(Target::program_arg))
        .collect();
    let text = sh::output(compiler(&args)?.stderr(Stdio::inherit()))?;
    let program = |target: &Target| {
        let path = executable(&text, target);
        let path = path.ok_or_else(|| format!("cargo names no program of {}", target.name))?;
        Ok(((target.package, target.program), path))
    };
    TARGETS.iter().map(program).collect()
}

/// Cargo, about to build tests as fuzz targets. Only with a target triple are the flags not those
/// of build scripts and macros as well, which would lack what the counters need.
fn compiler(args: &BTreeSet<String>) -> Result<Command, Failure> {
    let version = sh::output(&mut sh::cmd("rustc", ["-vV"]))?;
    let host = version.lines().find_map(|line| line.strip_prefix("host: "));
    let host = host.ok_or("rustc does not say its host")?;
    let fixed = [
        "test",
        "--no-run",
        "--message-format=json-render-diagnostics",
    ];
    let mut command = sh::cargo(fixed);
    command.args(["--profile", "fuzz", "--target", host]);
    command
        .args(["--target-dir", ".build/fuzz/build"])
        .args(args);
    command.env("RUSTFLAGS", ENGINE);
    command.env(
        "RUSTC_WORKSPACE_WRAPPER",
        root().join("xtask/src/fuzz/rustc.sh"),
    );
    Ok(command)
}

/// The program of a target in the messages of Cargo.
fn executable(messages: &str, target: &Target) -> Option<PathBuf> {
    let library = target.package.replace('-', "_");
    let name = match target.program {
        "lib" => &library,
        test => test,
    };
    messages
        .lines()
        .filter_map(|line| serde_json::from_str::<serde_json::Value>(line).ok())
        .filter(|message| message["target"]["name"] == name && message["profile"]["test"] == true)
        .find_map(|message| message["executable"].as_str().map(PathBuf::from))
}

/// Explores each target, in a process of its own, one on each core.
fn explore<'a>(
    targets: &[Target],
    time: Duration,
    program: impl Fn(&Target) -> &'a PathBuf + Sync,
) -> Result<Vec<Figures>, Failure> {
    let cores = std::thread::available_parallelism()?.get();
    println!("{} targets, {time:?} each, {cores} at once", targets.len());
    on_cores(cores, targets, |target| {
        let figures = process::explore(program(target), target, time)?;
        if let Some(failure) = &figures.failure {
            println!("{} failed: {failure}", target.name);
        }
        if let Some(crash) = &figures.crash {
            println!("  input:  {}", process::relative(crash));
            println!(
                "  replay: cargo test -p {} {} {} -- --exact",
                target.package,
                target.program_arg(),
                target.test()
            );
        }
        Ok(figures)
    })
}

/// Does something with all targets, with some at once; the results are in the targets' order.
fn on_cores<T: Send>(
    cores: usize,
    targets: &[Target],
    work: impl Fn(&Target) -> Result<T, Failure> + Sync,
) -> Result<Vec<T>, Failure> {
    let queue: Mutex<VecDeque<_>> = Mutex::new(targets.iter().enumerate().collect());
    let done = Mutex::new(Vec::new());
    std::thread::scope(|scope| {
        for _ in 0..cores.min(targets.len()) {
            scope.spawn(|| {
                loop {
                    let next = queue
                        .lock()
                        .unwrap_or_else(PoisonError::into_inner)
                        .pop_front();
                    let Some((at, target)) = next else { break };
                    // A failure goes to another thread as text.
                    let result = work(target).map_err(|failure| failure.to_string());
                    let mut done = done.lock().unwrap_or_else(PoisonError::into_inner);
                    done.push((at, result));
                }
            });
        }
    });
    let mut done = done.into_inner().unwrap_or_else(PoisonError::into_inner);
    done.sort_by_key(|(at, _)| *at);
    Ok(done
        .into_iter()
        .map(|(_, result)| result)
        .collect::<Result<_, _>>()?)
}

/// Prints the figures, keeps them, and returns the number of targets that failed.
fn report(figures: &[Figures]) -> Result<usize, Failure> {
    println!(
        "\n{:<22} {:>7} {:>11} {:>9} {:>7} {:>7} {:>7} {:>6}",
        "target", "CPU s", "executions", "per CPU s", "inputs", "edges", "of", "new"
    );
    for f in figures {
        println!(
            "{:<22} {:>7.1} {:>11} {:>9.0} {:>7} {:>7} {:>7} {:>6}{}",
            f.target.name,
            f.cpu.as_secs_f64(),
            f.executions,
            f.per_second(),
            f.corpus,
            f.edges,
            f.all_edges,
            f.finds,
            if f.failure.is_some() { "  failed" } else { "" },
        );
    }
    report::keep(figures, &machines::report()?)?;
    Ok(figures.iter().filter(|f| f.failure.is_some()).count())
}
