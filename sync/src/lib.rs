//! Threads, locks, channels and atomics to be used for shared state.
//!
//! By default, these are the types in the standard library. If the `shuttle` feature is set, we use
//! the types from the `shuttle` crate instead. It runs one thread at a time, and selects the next
//! thread on each access to a lock, channel or atomic. This way, a test (`testing::explore`) can
//! check thousands of interleavings using the same code as in production, and a failure can be
//! reproduced. Note that all accesses are sequentially consistent in this case. To find an ordering
//! that is too weak, we need to use ThreadSanitizer and Miri.
//!
//! This crate should be used in modules with shared state that is covered by such a test. Other
//! modules don't need it.

#![forbid(unsafe_code)]

#[cfg(all(feature = "shuttle", not(debug_assertions)))]
compile_error!(
    "the feature `shuttle` is for tests of interleavings; programs built with it do not run"
);

#[cfg(not(feature = "shuttle"))]
pub use std::{
    sync::{Mutex, MutexGuard, atomic, mpsc},
    thread,
};

#[cfg(feature = "shuttle")]
pub use shuttle::{
    sync::{Mutex, MutexGuard, atomic, mpsc},
    thread,
};

/// Test support for interleavings.
#[cfg(feature = "testing")]
pub mod testing {
    /// Returns the value of an environment variable.
    #[cfg(feature = "shuttle")]
    fn number(name: &str) -> Option<u64> {
        std::env::var(name).ok()?.parse().ok()
    }

    /// Number of interleavings started by both schedulers. This is printed if a test fails.
    #[cfg(feature = "shuttle")]
    struct Count(std::sync::Arc<std::sync::atomic::AtomicUsize>);

    #[cfg(feature = "shuttle")]
    impl Drop for Count {
        #[allow(clippy::print_stderr, reason = "a failing test says how many it took")]
        fn drop(&mut self) {
            if std::thread::panicking() {
                let count = self.0.load(std::sync::atomic::Ordering::Relaxed);
                eprintln!("interleaving {count} failed");
            }
        }
    }

    /// Runs a test with many interleavings of its threads: `RISER_INTERLEAVINGS` is the number for
    /// each of the two schedulers, and `RISER_INTERLEAVINGS_SEED` is the seed. If the test fails,
    /// it prints the schedule and the number of interleavings, and it can be reproduced with the
    /// same seed. Without the `shuttle` feature, the test is run a few times using the scheduler of
    /// the operating system.
    pub fn explore(run: impl Fn() + Send + Sync + 'static) {
        #[cfg(not(feature = "shuttle"))]
        (0..20).for_each(|_| run());
        #[cfg(feature = "shuttle")]
        {
            use std::sync::Arc;
            use std::sync::atomic::{AtomicUsize, Ordering};

            use shuttle::scheduler::{PctScheduler, RandomScheduler};

            let runs = number("RISER_INTERLEAVINGS").unwrap_or(1000) as usize;
            let seed = number("RISER_INTERLEAVINGS_SEED").unwrap_or(1);
            let mut config = shuttle::Config::new();
            // Unoptimized builds use large stack frames.
            config.stack_size = 1 << 20;
            // A random scheduler will quickly reach most of the states. The other scheduler only
            // changes thread priorities a few times. This finds bugs that need a thread to be
            // delayed for a long time (Burckhardt et al., "A Randomized Scheduler with
            // Probabilistic Guarantees of Finding Bugs", 2010).
            let count = Count(Arc::new(AtomicUsize::new(0)));
            let begun = Arc::clone(&count.0);
            let run = Arc::new(move || {
                begun.fetch_add(1, Ordering::Relaxed);
                run();
            });
            let same = Arc::clone(&run);
            let random = RandomScheduler::new_from_seed(seed, runs);
            shuttle::Runner::new(random, config.clone()).run(move || same());
            let few_changes = PctScheduler::new_from_seed(seed, 3, runs);
            shuttle::Runner::new(few_changes, config).run(move || run());
        }
    }
}
