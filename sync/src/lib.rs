//! Threads, locks, channels and atomics of state that threads share.
//!
//! They are those of the standard library. With the feature `shuttle` they are those of the crate
//! of that name, which runs threads one at a time and decides at each access to a lock, a channel
//! or an atomic which one goes on. So a test (`testing::explore`) sees thousands of interleavings
//! of the code that ships, and a failure can be repeated. All accesses are sequentially consistent
//! there: what an ordering is too weak for is for ThreadSanitizer and Miri to find.
//!
//! A module whose state is shared on purpose, and has such a test, takes its types from here;
//! others have no reason to.

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

/// What tests of interleavings need.
#[cfg(feature = "testing")]
pub mod testing {
    /// The value of an environment variable.
    #[cfg(feature = "shuttle")]
    fn number(name: &str) -> Option<u64> {
        std::env::var(name).ok()?.parse().ok()
    }

    /// Number of interleavings that have begun, over both schedulers; says so when a test fails.
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

    /// Runs a test in many interleavings of the threads that it starts: `RISER_INTERLEAVINGS` by
    /// each of two schedulers, from the seed `RISER_INTERLEAVINGS_SEED`. A failure names its
    /// schedule and says how many it took, and the same seed finds it again. Without the feature
    /// `shuttle` the test runs a few times, and the system decides.
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
            // Builds without optimization have large frames.
            config.stack_size = 1 << 20;
            // Random choices reach most states soon. The other one changes priorities a few times
            // only, which finds what takes one thread that is held up for long (Burckhardt et al.,
            // "A Randomized Scheduler with Probabilistic Guarantees of Finding Bugs", 2010).
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
