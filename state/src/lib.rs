//! State machines that change their state through one checked function.
//!
//! A machine's states list their legal transitions in [`State::may_become`]. [`become_state`] is
//! the only assignment of a state, so a transition that the table lacks is a bug of ours and panics
//! where it happens, in production as in tests.
//!
//! A test of the machine compares its table with its diagram (`testing::table`) and takes every
//! transition of it (`testing::assert_all_taken`); both need the feature `testing`.

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

/// What the tests of a machine need.
#[cfg(feature = "testing")]
pub mod testing {
    use std::cell::RefCell;
    use std::collections::BTreeSet;
    use std::fmt::Debug;

    use super::State;

    type Taken = BTreeSet<(String, String)>;

    thread_local! {
        /// The transitions of this thread, while [`assert_all_taken`] runs.
        static TAKEN: RefCell<Option<Taken>> = const { RefCell::new(None) };
    }

    pub(super) fn record(from: &impl Debug, to: &impl Debug) {
        TAKEN.with_borrow_mut(|taken| {
            if let Some(taken) = taken {
                taken.insert((name(from), name(to)));
            }
        });
    }

    /// The name of a state's variant, without what it carries, unless that is a variant as well.
    fn name(state: &impl Debug) -> String {
        let text = format!("{state:?}");
        let end = text.find([' ', '(', '{']).unwrap_or(text.len());
        let is_plain = |c: char| c.is_alphabetic() || c == '(' || c == ')';
        if text.chars().all(is_plain) {
            return text;
        }
        text[..end].to_owned()
    }

    /// Renders a machine's table: a line for each state, with the states that may follow it.
    pub fn table<S: State>(all: &[S]) -> String {
        let row = |from: &S| {
            let next = all.iter().filter(|to| from.may_become(to));
            let next: Vec<String> = next.map(name).collect();
            format!("{}: {}\n", name(from), next.join(" "))
        };
        all.iter().map(row).collect()
    }

    /// Runs scripts and asserts that they take every transition of a machine's table.
    ///
    /// # Panics
    /// If they do not.
    pub fn assert_all_taken<S: State>(all: &[S], scripts: impl FnOnce()) {
        TAKEN.set(Some(Taken::new()));
        scripts();
        let taken = TAKEN.take().expect("the recording that was begun");
        let rows = all.iter().flat_map(|from| {
            let next = all.iter().filter(|to| from.may_become(to));
            next.map(|to| (name(from), name(to)))
        });
        let missing: Vec<_> = rows.filter(|row| !taken.contains(row)).collect();
        assert!(missing.is_empty(), "never taken: {missing:?}");
    }
}

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
