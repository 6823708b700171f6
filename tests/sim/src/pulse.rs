//! A watch over runs: one that is caught in a step is found by the time on the wall, since its own
//! clock stands still.

use std::cell::OnceCell;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

/// The run of a thread.
#[derive(Debug, Default)]
struct Pulse {
    seed: AtomicU64,
    /// Counts steps, and begins and ends of runs; odd while there is none.
    beats: AtomicU64,
}

/// Those of all threads that have run a plan.
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
            // No run goes on yet.
            pulse.beats.store(1, Ordering::Relaxed);
            all().push(Arc::clone(&pulse));
            pulse
        }));
    });
}

/// A run that goes on, on this thread.
#[derive(Debug)]
pub(crate) struct Running(());

impl Running {
    /// The run of a seed begins.
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

/// A step of the run on this thread begins.
pub(crate) fn beat() {
    with_own(|own| _ = own.beats.fetch_add(2, Ordering::Release));
}

/// Looks after all runs from now on: the first that is longer than `limit` in one step is given to
/// `on_hang`, by its seed.
///
/// # Panics
/// There is no thread for that.
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

/// The seed of a run that is in the step in which it was at the last look, of which `before` has
/// the beats.
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
    fn a_run_that_is_caught_in_a_step_is_named() {
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
