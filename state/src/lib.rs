//! State machines that change their state through one checked function.
//!
//! A machine's states list their legal transitions in [`State::may_become`]. [`become_state`] is
//! the only assignment of a state, so a transition that the table lacks is a bug of ours and panics
//! where it happens, in production as in tests.
//!
//! A test of the machine compares its table with its diagram (`testing::table`) and takes every
//! transition of it (`testing::assert_all_taken`); both need the feature `testing`, as does a
//! simulation that counts what it has reached (`testing::recorded`).

#![forbid(unsafe_code)]

use std::fmt::Debug;

/// A state of a machine whose transitions are listed.
pub trait State: Debug {
    /// Returns whether the machine may go from this state to `next`.
    fn may_become(&self, next: &Self) -> bool;
}

/// Changes a machine's state.
///
/// # Panics
/// If the table has no such transition. While the thread unwinds from another panic nothing is
/// checked: a machine may be dropped in the middle of a step then, and a second panic would abort
/// the process, with all threads that were to go on.
#[inline]
pub fn become_state<S: State>(state: &mut S, next: S) {
    let is_legal = state.may_become(&next) || std::thread::panicking();
    assert!(is_legal, "{state:?} became {next:?}");
    #[cfg(feature = "testing")]
    testing::record(state, &next);
    *state = next;
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

    /// A machine that is idle once its owner has dropped it.
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
    fn an_illegal_transition_panics() {
        let mut step = Step::Begun;
        assert_eq!(
            message(|| become_state(&mut step, Step::Idle)),
            "Begun became Idle"
        );
        assert_eq!(step, Step::Begun);
    }

    #[test]
    fn a_machine_is_dropped_in_any_state_while_its_thread_unwinds() {
        let first = message(|| {
            let mut machine = Machine(Step::Idle);
            become_state(&mut machine.0, Step::Begun);
            panic!("in the middle of a step");
        });
        assert_eq!(first, "in the middle of a step");
    }
}
