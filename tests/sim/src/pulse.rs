//! Watchdog for runs: uses wall-clock time to find runs that are stuck in a step, because the
//! virtual clock has stopped.

use std::cell::OnceCell;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

/// State of the run on a thread.
#[derive(Debug, Default)]
struct Pulse {
    seed: AtomicU64,
    /// Counts steps, and starts and ends of runs. Odd while there is no run.
    beats: AtomicU64,
}

/// State of all threads that have run a plan.
static ALL: Mutex<Vec<Arc<Pulse>>> = Mutex::new(Vec::new());

thread_local! {
    static OWN: OnceCell<Arc<Pulse>> = const { OnceCell::new() };
}

fn all() -> std::sync::MutexGuard<'static, Vec<Arc<Pulse>>> {
    ALL.lock().unwrap_or_else(PoisonError::into_inner)
}

fn with_own(f: impl FnOnce(&Pulse)) {
    OWN.with(|own| {
        f(own.get_or_init(|| {
            let pulse = Arc::new(Pulse::default());
            // There is no run yet.
            pulse.beats.store(1, Ordering::Relaxed);
            all().push(Arc::clone(&pulse));
            pulse
        }));
    });
}

/// A run in progress on this thread.
#[derive(Debug)]
pub(crate) struct Running(());

impl Running {
    /// Called when the run of a seed starts.
    pub(crate) fn new(seed: u64) -> Self {
        with_own(|own| {
            own.seed.store(seed, Ordering::Relaxed);
            own.beats.fetch_add(1, Ordering::Release);
        });
        Self(())
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        with_own(|own| _ = own.beats.fetch_add(1, Ordering::Release));
    }
}

/// Called when the next step of the run starts.
pub(crate) fn beat() {
    with_own(|own| _ = own.beats.fetch_add(2, Ordering::Release));
}

/// Starts to watch all runs. If the first run is stuck in a step for longer than `limit`, `on_hang`
/// is called with its seed.
///
/// # Panics
/// Panics if a thread cannot be created.
pub fn watch(limit: Duration, on_hang: impl FnOnce(u64) + Send + 'static) {
    let watch = move || {
        let mut before = Vec::new();
        loop {
            std::thread::sleep(limit);
            if let Some(seed) = hung(&all(), &mut before) {
                return on_hang(seed);
            }
        }
    };
    let thread = std::thread::Builder::new().name("pulse".to_owned());
    thread.spawn(watch).expect("a thread");
}

/// Returns the seed of a run that is still in the same step as at the last check. `before` contains
/// the counters from this check.
fn hung(all: &[Arc<Pulse>], before: &mut Vec<u64>) -> Option<u64> {
    let now = all.iter().map(|one| one.beats.load(Ordering::Acquire));
    let now: Vec<_> = now.collect();
    let mut pairs = now.iter().zip(&*before).zip(all);
    let hung = pairs.find(|((now, before), _)| now == before && **now % 2 == 0);
    let seed = hung.map(|(_, one)| one.seed.load(Ordering::Relaxed));
    *before = now;
    seed
}

#[cfg(test)]
mod tests {
    use super::*;

    fn own() -> Arc<Pulse> {
        with_own(|_| {});
        OWN.with(|own| Arc::clone(own.get().expect("just made")))
    }

    #[test]
    fn stuck_run_is_reported() {
        let (all, mut before) = ([own()], Vec::new());
        assert_eq!(hung(&all, &mut before), None);
        assert_eq!(hung(&all, &mut before), None, "none has begun");
        let running = Running::new(42);
        assert_eq!(hung(&all, &mut before), None, "for the first time");
        beat();
        assert_eq!(hung(&all, &mut before), None, "another step");
        assert_eq!(hung(&all, &mut before), Some(42));
        drop(running);
        assert_eq!(hung(&all, &mut before), None, "it is over");
        assert_eq!(hung(&all, &mut before), None, "it is over");
    }
}
