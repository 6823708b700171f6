//! Allocations on the data path of our programs, by the place in our code that makes them.
//!
//! Counts what the threads of the data path allocate: the workers of `riserd` and the engine of
//! `riser`. A test makes [`record`] the callback of its allocator:
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

/// Beginnings of the names of the threads whose allocations count.
const THREADS: [&[u8]; 2] = [b"riser-worker", b"riser-engine"];

/// Functions of ours that are named for an allocation, from the one that makes it outwards.
const CALLERS: usize = 4;

/// Rounds of which one must allocate nothing, and calls of a test in each.
const ROUNDS: usize = 10;
const CALLS: u8 = 30;

/// Allocations count now.
static COUNTS: AtomicBool = AtomicBool::new(false);
/// Number of allocations, by place.
static ALLOCATIONS: Mutex<BTreeMap<String, u64>> = Mutex::new(BTreeMap::new());

thread_local! {
    /// An allocation is being recorded, which allocates.
    static RECORDS: Cell<bool> = const { Cell::new(false) };
}

/// Records an allocation of the calling thread, if that is of the data path and allocations count.
pub fn record() {
    if !COUNTS.load(Ordering::Relaxed) || !is_of_data_path() || RECORDS.replace(true) {
        return;
    }
    let place = place(&Backtrace::force_capture().to_string());
    *allocations().entry(place).or_default() += 1;
    RECORDS.set(false);
}

/// Calls `round` until the data path allocates nothing during many calls.
///
/// Lists grow to what the load of the machine makes them hold, so the first calls may allocate, and
/// one may later; what is allocated for each operation is so in every round.
///
/// # Panics
///
/// If something is allocated in each of ten rounds. The message names `what`, and the places of the
/// last round with their numbers of allocations. And if this process has no thread of the data path,
/// so that nothing would count.
#[track_caller]
pub fn allocates_nothing(what: &str, mut round: impl FnMut(u8)) {
    assert!(
        !threads().is_empty(),
        "{what}: there is no thread of the data path"
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

/// Returns the names of this process's threads of the data path.
pub fn threads() -> Vec<String> {
    let tasks = std::fs::read_dir("/proc/self/task").into_iter().flatten();
    // One that has just ended has no name.
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

/// The standard library's name of a thread may allocate, and is gone when the thread ends.
fn is_of_data_path() -> bool {
    let mut name = [0u8; 16];
    // SAFETY: the kernel writes 16 bytes at most.
    unsafe { libc::prctl(libc::PR_GET_NAME, name.as_mut_ptr()) };
    is_counted(&name)
}

/// The innermost functions of ours in a backtrace. The whole of it stands for an allocation that no
/// function of ours has made.
fn place(trace: &str) -> String {
    let function = |line: &str| {
        let line = line.trim();
        // What was inlined has no number of its own.
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

    /// What a test says of a thread whose every call allocates.
    fn verdict(name: &str) -> Result<(), String> {
        let run = || catch_unwind(|| allocates_nothing("a read", |_| record()));
        let thread = thread::Builder::new().name(name.to_owned());
        let ended = thread.spawn(run).unwrap().join().unwrap();
        ended.map_err(|panic| *panic.downcast::<String>().unwrap())
    }

    /// One function, since all tests of a process share what is recorded.
    #[test]
    fn only_allocations_of_the_data_path_fail_a_test() {
        let why = verdict("some-thread").unwrap_err();
        assert!(why.contains("no thread of the data path"), "{why}");
        // One that waits, as where a daemon has nothing to do.
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
    fn a_place_is_named_by_the_functions_of_ours() {
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
