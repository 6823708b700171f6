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

use riser_sim::{Plan, run};

fn main() -> ExitCode {
    let mut from = 1;
    let mut seeds = 1000;
    let mut args = std::env::args().skip(1);
    while let Some(arg) = args.next() {
        let number = args.next().and_then(|text| text.parse().ok());
        match (arg.as_str(), number) {
            ("--from", Some(n)) => from = n,
            ("--seeds", Some(n)) => seeds = n,
            _ => {
                eprintln!("usage: riser-sim [--seeds N] [--from SEED]");
                return ExitCode::from(2);
            }
        }
    }
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
