//! Finds allocations on the data path and the function in our code that made them.
//!
//! We count all allocations made by data path threads, which are the workers in `riserd` and the
//! engine in `riser`. A test has to use [`record`] as the callback of its allocator:
//!
//! ```ignore
//! #[global_allocator]
//! static ALLOCATOR: Counting = Counting::new(allocations::record);
//! ```

#![allow(unsafe_code, reason = "the name of a thread takes a system call")]

use std::backtrace::Backtrace;
use std::cell::Cell;
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};

/// Name prefixes of the threads to check.
const THREADS: [&[u8]; 2] = [b"riser-worker", b"riser-engine"];

/// Maximum number of functions to show for an allocation, starting at the innermost function.
const CALLERS: usize = 4;

/// Maximum number of rounds until there should be no allocation, and the number of calls in each
/// round.
const ROUNDS: usize = 10;
const CALLS: u8 = 30;

/// Set if allocations should be counted.
static COUNTS: AtomicBool = AtomicBool::new(false);
/// Number of allocations for each location.
static ALLOCATIONS: Mutex<BTreeMap<String, u64>> = Mutex::new(BTreeMap::new());

thread_local! {
    /// Set while we record an allocation, because this also allocates.
    static RECORDS: Cell<bool> = const { Cell::new(false) };
}

/// Records an allocation if it was made by a data path thread and allocations are currently
/// counted.
pub fn record() {
    if !COUNTS.load(Ordering::Relaxed) || !is_of_data_path() || RECORDS.replace(true) {
        return;
    }
    let place = place(&Backtrace::force_capture().to_string());
    *allocations().entry(place).or_default() += 1;
    RECORDS.set(false);
}

/// Calls `round` until there is a round without any allocations on the data path.
///
/// We need to allow allocations in the first rounds, and possibly in a later round, because buffers
/// will grow to the size required for the current load. But if there is an allocation for each
/// operation, it will happen in every round.
///
/// # Panics
///
/// Panics if there were allocations in all of the ten rounds. The message contains `what`, and the
/// locations in the last round with their number of allocations. Also panics if this process has no
/// data path thread, because then nothing would be counted.
#[track_caller]
pub fn allocates_nothing(what: &str, mut round: impl FnMut(u8)) {
    assert!(
        !threads().is_empty(),
        "{what}: no data path thread is running"
    );
    let mut found = BTreeMap::new();
    for _ in 0..ROUNDS {
        COUNTS.store(true, Ordering::Relaxed);
        (0..CALLS).for_each(&mut round);
        COUNTS.store(false, Ordering::Relaxed);
        found = std::mem::take(&mut *allocations());
        if found.is_empty() {
            return;
        }
    }
    panic!("{what}: {found:#?}");
}

/// Returns the names of all data path threads in this process.
pub fn threads() -> Vec<String> {
    let tasks = std::fs::read_dir("/proc/self/task").into_iter().flatten();
    // If a thread has just exited, it has no name.
    let names =
        tasks.filter_map(|task| std::fs::read_to_string(task.ok()?.path().join("comm")).ok());
    let names = names.map(|name| name.trim_end().to_owned());
    names.filter(|name| is_counted(name.as_bytes())).collect()
}

fn is_counted(thread: &[u8]) -> bool {
    THREADS.iter().any(|start| thread.starts_with(start))
}

fn allocations() -> std::sync::MutexGuard<'static, BTreeMap<String, u64>> {
    ALLOCATIONS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// We can't use the thread name from the standard library: it may allocate, and it's not available
/// when a thread exits.
fn is_of_data_path() -> bool {
    let mut name = [0u8; 16];
    // SAFETY: the kernel writes up to 16 bytes.
    unsafe { libc::prctl(libc::PR_GET_NAME, name.as_mut_ptr()) };
    is_counted(&name)
}

/// Returns the innermost functions of our code in a backtrace. If it doesn't contain any of our
/// code, returns the whole backtrace.
fn place(trace: &str) -> String {
    let function = |line: &str| {
        let line = line.trim();
        // Inlined functions don't have a number.
        let function = match line.split_once(": ") {
            Some((number, function)) if number.parse::<u32>().is_ok() => function,
            _ => line,
        };
        let is_place = line.starts_with("at ");
        let is_ours =
            !is_place && function.contains("riser_") && !function.contains("riser_testkit");
        is_ours.then(|| function.to_owned())
    };
    let callers: Vec<_> = trace.lines().filter_map(function).take(CALLERS).collect();
    match callers.is_empty() {
        true => trace.to_owned(),
        false => callers.join(" < "),
    }
}

#[cfg(test)]
mod tests {
    use std::panic::catch_unwind;
    use std::sync::mpsc::channel;
    use std::thread;

    use super::*;

    /// Runs the check with a thread that allocates in every call.
    fn verdict(name: &str) -> Result<(), String> {
        let run = || catch_unwind(|| allocates_nothing("a read", |_| record()));
        let thread = thread::Builder::new().name(name.to_owned());
        let ended = thread.spawn(run).unwrap().join().unwrap();
        ended.map_err(|panic| *panic.downcast::<String>().unwrap())
    }

    /// This has to be a single function, because recorded allocations are shared by all tests in a
    /// process.
    #[test]
    fn only_data_path_allocations_fail() {
        let why = verdict("some-thread").unwrap_err();
        assert!(why.contains("no data path thread"), "{why}");
        // A thread that is waiting, like a daemon with nothing to do.
        let (started, is_there) = channel();
        let (end, ended) = channel::<()>();
        let waits = move || {
            started.send(()).unwrap();
            let _ = ended.recv();
        };
        let worker = thread::Builder::new().name("riser-worker-1".to_owned());
        let worker = worker.spawn(waits).unwrap();
        is_there.recv().unwrap();
        assert_eq!(threads(), ["riser-worker-1"]);
        assert_eq!(verdict("some-thread"), Ok(()));
        for thread in ["riser-worker-0", "riser-engine"] {
            let why = verdict(thread).unwrap_err();
            assert!(
                why.starts_with("a read: {") && why.contains(": 30"),
                "{why}"
            );
        }
        let mut calls = 0;
        allocates_nothing("nothing", |_| calls += 1);
        assert_eq!(
            calls,
            u32::from(CALLS),
            "one round is enough where nothing is allocated"
        );
        drop(end);
        worker.join().unwrap();
    }

    #[test]
    fn place_lists_own_functions() {
        let trace = "   0: std::backtrace::Backtrace::create\n\
                     \x20            at /rustc/library/std/src/backtrace.rs:331:13\n\
                     \x20  2: riser_testkit::allocations::record\n\
                     \x20  3: <riser_testkit::alloc::Counting as core::alloc::GlobalAlloc>::alloc\n\
                     \x20 12: <riser_transport::roce::Roce as riser_transport::verbs::Verbs>::post\n\
                     \x20            at ./transport/src/riser_x.rs: 9\n\
                     \x20     riser_target::worker::poll\n\
                     \x20 13: riser_target::worker::step\n";
        let named = "<riser_transport::roce::Roce as riser_transport::verbs::Verbs>::post < \
                     riser_target::worker::poll < riser_target::worker::step";
        assert_eq!(place(trace), named);
        assert_eq!(place("   0: malloc\n"), "   0: malloc\n");
    }
}
