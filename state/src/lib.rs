//! State machines that use a single checked function to change their state.
//!
//! The valid transitions of a state machine are listed in [`State::may_become`]. [`become_state`]
//! is the only place where a state is assigned. A transition that is not in the table is a bug in
//! our code, so this will panic immediately, both in production and in tests.
//!
//! The test of a state machine should compare its table with its diagram (`testing::table`) and
//! verify that every transition is covered (`testing::assert_all_taken`). Both require the
//! `testing` feature, which is also used by simulations to get their coverage
//! (`testing::recorded`).

#![forbid(unsafe_code)]

use std::fmt::Debug;

/// A state with a list of valid transitions.
pub trait State: Debug {
    /// Returns whether `next` is a valid next state.
    fn may_become(&self, next: &Self) -> bool;
}

/// Sets a new state.
///
/// # Panics
/// Panics if the transition is not valid. We don't check this if the thread is already panicking: a
/// state machine could then be dropped in the middle of a step, and a second panic would abort the
/// process, including all other threads.
#[inline]
pub fn become_state<S: State>(state: &mut S, next: S) {
    if !state.may_become(&next) {
        check_panicking(state, &next);
    }
    #[cfg(feature = "testing")]
    testing::record(state, &next);
    *state = next;
}

/// Called for a transition that is not valid. This is out of line to keep the valid case small.
#[cold]
fn check_panicking<S: State>(state: &S, next: &S) {
    assert!(std::thread::panicking(), "{state:?} became {next:?}");
}

#[cfg(feature = "testing")]
pub mod testing;

#[cfg(test)]
mod tests {
    use std::panic::{AssertUnwindSafe, catch_unwind};

    use super::*;

    #[derive(Clone, Copy, Debug, PartialEq)]
    enum Step {
        Idle,
        Begun,
    }

    impl State for Step {
        fn may_become(&self, next: &Self) -> bool {
            (*self, *next) == (Self::Idle, Self::Begun)
        }
    }

    /// A state machine that must be idle after its owner was dropped.
    struct Machine(Step);

    impl Drop for Machine {
        fn drop(&mut self) {
            become_state(&mut self.0, Step::Idle);
        }
    }

    fn message(f: impl FnOnce()) -> String {
        let panic = catch_unwind(AssertUnwindSafe(f)).expect_err("it panics");
        let text = panic.downcast_ref::<String>().cloned();
        text.unwrap_or_else(|| (*panic.downcast_ref::<&str>().expect("a text")).to_owned())
    }

    #[test]
    fn invalid_transition_panics() {
        let mut step = Step::Begun;
        assert_eq!(
            message(|| become_state(&mut step, Step::Idle)),
            "Begun became Idle"
        );
        assert_eq!(step, Step::Begun);
    }

    #[test]
    fn unwinding_skips_transition_check() {
        let first = message(|| {
            let mut machine = Machine(Step::Idle);
            become_state(&mut machine.0, Step::Begun);
            panic!("in the middle of a step");
        });
        assert_eq!(first, "in the middle of a step");
    }
}
