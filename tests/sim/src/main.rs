//! `riser-sim`: runs seeds.

#![allow(
    clippy::print_stdout,
    clippy::print_stderr,
    reason = "the report is for who runs it"
)]

use std::process::ExitCode;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Instant;

use clap::Parser;
use riser_sim::{Plan, run};

/// Runs seeds, and prints the plan of each that fails
#[derive(Debug, Parser)]
struct Args {
    /// Number of seeds
    #[arg(long, default_value_t = 1000)]
    seeds: u64,
    /// The first one
    #[arg(long, default_value_t = 1)]
    from: u64,
}

fn main() -> ExitCode {
    let Args { seeds, from } = Args::parse();
    let start = Instant::now();
    let next = AtomicU64::new(from);
    let failures = Mutex::new(Vec::new());
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    std::thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                loop {
                    let seed = next.fetch_add(1, Ordering::Relaxed);
                    if seed >= from + seeds {
                        return;
                    }
                    if let Err(failure) = run(&Plan::of(seed)) {
                        eprintln!("{failure}\n");
                        let mut failures = failures.lock().unwrap_or_else(PoisonError::into_inner);
                        failures.push(seed);
                    }
                }
            });
        }
    });
    let mut failures = failures
        .into_inner()
        .unwrap_or_else(PoisonError::into_inner);
    failures.sort_unstable();
    let seconds = start.elapsed().as_secs_f64();
    println!(
        "{seeds} seeds in {seconds:.1} s, {:.0} a second: {} failed {failures:?}",
        seeds as f64 / seconds,
        failures.len()
    );
    match failures.is_empty() {
        true => ExitCode::SUCCESS,
        false => ExitCode::FAILURE,
    }
}
