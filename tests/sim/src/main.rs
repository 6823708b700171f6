//! `riser-sim`: runs the plans of seeds or of a file.

#![allow(
    clippy::print_stdout,
    clippy::print_stderr,
    reason = "the report is for who runs it"
)]

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use clap::Parser;
use indicatif::{ProgressBar, ProgressStyle};
use riser_sim::coverage::Coverage;
use riser_sim::plan::Fault;
use riser_sim::shrink::{Budget, shrink};
use riser_sim::{Failure, Plan, events, pulse, run};

/// Exit code if a run hangs.
const HUNG: i32 = 3;

/// Time limit for a single step of a run. A complete run only takes a few seconds.
const HANGS: Duration = Duration::from_secs(120);

/// Interval between progress lines if there is no terminal.
const LINES: Duration = Duration::from_secs(30);

/// Run plans, and reduce and save the first failing plan of each kind
#[derive(Debug, Parser)]
struct Args {
    /// Number of seeds
    #[arg(long, default_value_t = 1000)]
    seeds: u64,
    /// First seed
    #[arg(long, default_value_t = 1)]
    from: u64,
    /// Only use these kinds of trouble, separated by commas
    #[arg(long, value_delimiter = ',', value_parser = Fault::kinds())]
    faults: Vec<String>,
    /// Run the plan in this file instead
    #[arg(long, conflicts_with_all = ["seeds", "from", "faults"])]
    plan: Option<PathBuf>,
    /// Print the plans without running them
    #[arg(long)]
    show: bool,
    /// Directory for failing plans
    #[arg(long, default_value = ".build/sim")]
    keep: PathBuf,
    /// Maximum number of runs to reduce a plan
    #[arg(long, default_value_t = Budget::default().runs)]
    shrink: usize,
    /// Number of events to print for a failing plan
    #[arg(long, default_value_t = 40)]
    events: usize,
    /// Only print the first failing seed and the reason
    #[arg(long)]
    first: bool,
    /// Fail if a transition is neither reached nor listed in `tests/sim/unreached.txt`, or if no
    /// seed starts some kind of trouble
    #[arg(long)]
    coverage: bool,
    /// Fail if no seed starts some kind of trouble
    #[arg(long)]
    kinds: bool,
}

fn main() -> ExitCode {
    let args = Args::parse();
    pulse::watch(HANGS, |seed| {
        eprintln!("seed {seed} hangs in a step: riser-sim --from {seed} --seeds 1");
        std::process::exit(HUNG);
    });
    let result = match &args.plan {
        Some(file) => replay(&args, file),
        None if args.show => show(&args),
        None if args.first => first(&args),
        None => explore(&args),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(text) => {
            eprintln!("{text}");
            ExitCode::FAILURE
        }
    }
}

/// Runs the plan in a file and prints its events.
fn replay(args: &Args, file: &Path) -> Result<(), String> {
    let text = std::fs::read_to_string(file);
    let text = text.map_err(|error| format!("{}: {error}", file.display()))?;
    let plan = Plan::parse(&text).map_err(|error| format!("{}: {error}", file.display()))?;
    let (result, events) = events::record(args.events, || run(&plan));
    println!("{}", events.join("\n"));
    let outcome = result.map_err(|failure| failure.to_string())?;
    println!("passed: {outcome:?}");
    Ok(())
}

/// Returns the plan of a seed.
fn plan_of(args: &Args, seed: u64) -> Plan {
    let is_named = |fault: Fault| args.faults.iter().any(|kind| kind == fault.kind());
    Plan::drawn(seed, |fault| args.faults.is_empty() || is_named(fault))
}

fn show(args: &Args) -> Result<(), String> {
    for seed in args.from..args.from.saturating_add(args.seeds) {
        println!("---\n{}", plan_of(args, seed));
    }
    Ok(())
}

/// Runs seeds on all cores until one of them fails.
fn first(args: &Args) -> Result<(), String> {
    let next = AtomicU64::new(args.from);
    let end = AtomicU64::new(args.from.saturating_add(args.seeds));
    let failures = Mutex::new(BTreeMap::<u64, String>::new());
    std::thread::scope(|scope| {
        for _ in 0..std::thread::available_parallelism().map_or(1, usize::from) {
            scope.spawn(|| {
                // After a failure, lower seeds are still run to find the first one.
                while let seed = next.fetch_add(1, Ordering::Relaxed)
                    && seed < end.load(Ordering::Relaxed)
                {
                    if let Err(failure) = run(&plan_of(args, seed)) {
                        end.fetch_min(seed, Ordering::Relaxed);
                        lock(&failures).insert(seed, failure.why);
                    }
                }
            });
        }
    });
    match lock(&failures).first_key_value() {
        Some((seed, why)) => {
            println!("seed {seed}: {}", why.replace('\n', " "));
            Err("a seed failed".to_owned())
        }
        None => Ok(()),
    }
}

/// Runs seeds on all cores.
fn explore(args: &Args) -> Result<(), String> {
    let start = Instant::now();
    let progress = Progress::new(args.seeds, start);
    let next = AtomicU64::new(args.from);
    let seeds = args.from..args.from.saturating_add(args.seeds);
    let coverage = Mutex::new(Coverage::default());
    let failures = Mutex::new(BTreeMap::<u64, Box<Failure>>::new());
    let work = || {
        while let seed = next.fetch_add(1, Ordering::Relaxed)
            && seeds.contains(&seed)
        {
            if let Err(failure) = run(&plan_of(args, seed)) {
                progress.print(&format!("seed {seed}: {}", failure.why));
                lock(&failures).insert(seed, failure);
            }
            progress.advance();
        }
    };
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    std::thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                let ((), reached) = Coverage::of(work);
                lock(&coverage).merge(reached);
            });
        }
    });
    progress.bar.finish_and_clear();

    let seconds = start.elapsed().as_secs_f64();
    let (coverage, failures) = (lock(&coverage), lock(&failures));
    println!("{coverage}");
    for failure in first_of_each_kind(&failures) {
        report(args, failure);
    }
    let mut kinds = Fault::drawn_kinds();
    kinds.retain(|kind| args.faults.is_empty() || args.faults.iter().any(|one| one == kind));
    let mistakes = match (args.coverage, args.kinds) {
        (true, _) => coverage.mistakes(&kinds),
        (false, true) => coverage.faults_missing(&kinds),
        (false, false) => Vec::new(),
    };
    for mistake in &mistakes {
        println!("{mistake}");
    }
    println!(
        "{} seeds in {seconds:.1} s, {:.0} a second: {} failed {:?}",
        args.seeds,
        args.seeds as f64 / seconds,
        failures.len(),
        failures.keys().collect::<Vec<_>>()
    );
    match (failures.len(), mistakes.len()) {
        (0, 0) => Ok(()),
        (0, mistakes) => Err(format!("{mistakes} coverage errors")),
        (failed, _) => Err(format!("{failed} seeds failed")),
    }
}

fn lock<T>(of: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    of.lock().unwrap_or_else(PoisonError::into_inner)
}

fn first_of_each_kind(failures: &BTreeMap<u64, Box<Failure>>) -> Vec<&Failure> {
    let mut kinds = BTreeMap::new();
    for failure in failures.values() {
        kinds.entry(failure.kind()).or_insert(&**failure);
    }
    kinds.into_values().collect()
}

/// Reduces the plan of a failure, saves it, and prints its events.
fn report(args: &Args, failure: &Failure) {
    let seed = failure.plan.seed;
    println!("── seed {seed}: {}", failure.why);
    let budget = Budget {
        runs: args.shrink,
        ..Budget::default()
    };
    let small = shrink(Box::new(failure.clone()), budget, run);
    let (_, events) = events::record(args.events, || run(&small.plan));
    println!("{}\n\n{small}", events.join("\n"));
    let file = args.keep.join(format!("seed-{seed}.yaml"));
    let text = format!("# {}\n{}\n", small.why, small.plan);
    let kept = std::fs::create_dir_all(&args.keep).and_then(|()| std::fs::write(&file, text));
    match kept {
        Ok(()) => println!("cargo xtask sim --plan {}\n", file.display()),
        Err(error) => println!("{}: {error}\n", file.display()),
    }
}

/// A progress bar on a terminal, otherwise lines.
struct Progress {
    bar: ProgressBar,
    start: Instant,
    /// Time when the last line was printed.
    printed: Mutex<Instant>,
}

impl Progress {
    fn new(seeds: u64, start: Instant) -> Self {
        let style = "{wide_bar} {pos} of {len} seeds, {per_sec}, {eta} left";
        let style = ProgressStyle::with_template(style).expect("a template");
        Self {
            bar: ProgressBar::new(seeds).with_style(style),
            start,
            printed: Mutex::new(start),
        }
    }

    fn advance(&self) {
        self.bar.inc(1);
        let mut printed = lock(&self.printed);
        if self.bar.is_hidden() && printed.elapsed() >= LINES {
            *printed = Instant::now();
            let (done, seconds) = (self.bar.position(), self.start.elapsed().as_secs_f64());
            eprintln!("{done} seeds, {:.0} a second", done as f64 / seconds);
        }
    }

    fn print(&self, line: &str) {
        self.bar.suspend(|| eprintln!("{line}"));
    }
}
