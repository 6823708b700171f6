//! `cargo xtask fuzz`: runs the fuzz targets with libFuzzer, which is guided by the coverage of
//! each input.
//!
//! The targets are bolero tests. bolero selects its engine at compile time, and we use libFuzzer,
//! which is included as source in the crate `bolero-libfuzzer`. We can use a stable compiler
//! because the LLVM pass to count edges is part of every rustc. Only crates in the workspace are
//! instrumented (`rustc.sh`). Because these flags are different from any other build, we use a
//! separate target directory.
//!
//! | directory | contents |
//! | --- | --- |
//! | `__fuzz__/TARGET/corpus`, next to the test | files in the repository: `seed-*`, and `found-*` created by `--minimize` |
//! | `__fuzz__/TARGET/crashes` | failing inputs, which will be used by `cargo test` until they are removed |
//! | `.build/fuzz/TARGET` | the log, and the working corpus to be used by the next run |

mod corpus;
mod machines;
mod process;
mod targets;

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::Duration;

use serde_json::Value;

use self::process::FuzzStats;
use self::targets::{TARGETS, Target};
use crate::cases::{in_parallel, select};
use crate::packages::{ensure, needs};
use crate::{Failure, root, sh};

/// Compiler flags that bolero uses to select its engine.
const ENGINE: &str = "--cfg fuzzing --cfg fuzzing_libfuzzer";

#[derive(clap::Args)]
pub(crate) struct Options {
    /// Time per target in minutes, which can be a fraction; one target is run on each core. If
    /// set to 0, the targets are not run.
    #[arg(long, default_value_t = 1.0)]
    minutes: f64,
    /// Update the inputs in the repository after the run: for each target, keep the few inputs with
    /// the best coverage.
    #[arg(long)]
    minimize: bool,
    /// List the targets and exit.
    #[arg(long)]
    list: bool,
    /// Run only these targets; the full name is required.
    targets: Vec<String>,
}

/// Returns the names of all targets.
pub(crate) fn names() -> impl Iterator<Item = &'static str> {
    TARGETS.iter().map(|target| target.name.as_str())
}

pub(crate) fn run(options: &Options) -> Result<(), Failure> {
    let is_named = |target: &&Target, name: &str| target.name == name;
    let targets = select(TARGETS.iter(), &options.targets, "target", is_named)?;
    if options.list {
        for target in targets {
            println!("{:<22} {}", target.name, target.about);
        }
        return Ok(());
    }
    if !ensure(needs("fuzz")).is_empty() {
        return Err("cannot build libFuzzer".into());
    }
    let programs = build()?;
    let program = |target: &'static Target| &programs[&(&*target.package, &*target.program)];
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
            "kept in addition to the seeds: {} inputs",
            found.iter().sum::<usize>()
        );
    }
    match failed {
        0 => Ok(()),
        n => Err(format!("{n} targets failed").into()),
    }
}

/// Programs by package and name.
type Programs = BTreeMap<(&'static str, &'static str), PathBuf>;

/// Builds the programs of all targets in a single build, even if we only run some of them. A
/// different selection would change features and would have to build many crates again.
fn build() -> Result<Programs, Failure> {
    println!("building");
    let packages = TARGETS.iter().map(|t| format!("--package={}", t.package));
    let args: BTreeSet<_> = packages
        .chain(TARGETS.iter().map(Target::program_arg))
        .collect();
    let messages = sh::messages(&sh::output(compiler(&args)?.stderr(Stdio::inherit()))?);
    let program = |target: &'static Target| {
        let path = executable(&messages, target);
        let path = path.ok_or_else(|| format!("cargo reports no program of {}", target.name))?;
        Ok(((&*target.package, &*target.program), path))
    };
    TARGETS.iter().map(program).collect()
}

/// Returns a Cargo command to build tests as fuzz targets. We need to pass a target triple, because
/// otherwise the flags would also be used for build scripts and macros, and they are not linked
/// with the counters.
fn compiler(args: &BTreeSet<String>) -> Result<Command, Failure> {
    let host = sh::host(&mut sh::cmd("rustc", ["-vV"]))?;
    let fixed = [
        "test",
        "--no-run",
        "--message-format=json-render-diagnostics",
    ];
    let mut command = sh::cargo(fixed);
    command.args(["--profile", "fuzz", "--target", &host]);
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

fn executable(messages: &[Value], target: &Target) -> Option<PathBuf> {
    let library = target.package.replace('-', "_");
    let name = match target.program.as_str() {
        "lib" => &library,
        test => test,
    };
    messages
        .iter()
        .filter(|message| message["target"]["name"] == name && message["profile"]["test"] == true)
        .find_map(|message| message["executable"].as_str().map(PathBuf::from))
}

fn explore<'a>(
    targets: &[&'static Target],
    time: Duration,
    program: impl Fn(&'static Target) -> &'a PathBuf + Sync,
) -> Result<Vec<FuzzStats>, Failure> {
    let cores = std::thread::available_parallelism()?.get();
    println!("{} targets, {time:?} each, {cores} at once", targets.len());
    on_cores(cores, targets, |target| {
        let stats = process::explore(program(target), target, time)?;
        if let Some(failure) = &stats.failure {
            println!("{} failed: {failure}", target.name);
        }
        if let Some(crash) = &stats.crash {
            println!("  input:  {}", process::relative(crash));
            println!(
                "  replay: cargo test -p {} {} {} -- --exact",
                target.package,
                target.program_arg(),
                target.test()
            );
        }
        Ok(stats)
    })
}

/// Calls a function for all targets using a thread per core. Results are returned in the same order
/// as the targets.
fn on_cores<T: Send>(
    cores: usize,
    targets: &[&'static Target],
    work: impl Fn(&'static Target) -> Result<T, Failure> + Sync,
) -> Result<Vec<T>, Failure> {
    // We can't send a failure to another thread, so convert it to text.
    let work = |_, target: &&'static Target| work(target).map_err(|failure| failure.to_string());
    let results = in_parallel(cores.min(targets.len()), targets, work);
    Ok(results.into_iter().collect::<Result<_, _>>()?)
}

/// Prints the results. Returns the number of targets that failed.
fn report(stats: &[FuzzStats]) -> Result<usize, Failure> {
    println!(
        "\n{:<22} {:>7} {:>11} {:>9} {:>7} {:>7} {:>7} {:>6}",
        "target", "CPU s", "executions", "per CPU s", "inputs", "edges", "of", "new"
    );
    for f in stats {
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
    machines::report()?;
    Ok(stats.iter().filter(|f| f.failure.is_some()).count())
}
