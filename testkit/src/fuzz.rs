//! Creates histories for fuzz targets: these are the actions of a property test, selected by the
//! fuzzer's input.
//!
//! A proptest strategy normally uses random numbers. Here we pass the input bytes instead, so that
//! a fuzzer with coverage can decide which actions to run and in which order. Each action uses a
//! separate chunk of the input. This way, if the fuzzer changes, removes or repeats a chunk, all
//! other actions stay the same.

use std::fmt::Debug;
use std::sync::LazyLock;

use proptest::prelude::Rng as _;
use proptest::strategy::{BoxedStrategy, NewTree, Strategy, ValueTree};
use proptest::test_runner::{Config, RngAlgorithm, TestRng, TestRunner};

/// Number of bytes before the first action, used for the start of a history.
pub const HEAD: usize = 16;

/// Number of bytes per action. If an action has longer byte strings, the rest can't be selected by
/// the input.
pub const PIECE: usize = 64;

/// Maximum number of actions in a history.
pub const MOST: usize = 128;

/// Numbers to use at the end of a chunk. They must not be constant: if a strategy tries again until
/// a number is in range, it would never return with just zeros.
static REST: LazyLock<Vec<u8>> = LazyLock::new(|| {
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    let words = std::iter::repeat_with(|| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state.to_le_bytes()
    });
    words.take(512).flatten().collect()
});

/// Selects one of several strategies, like `prop_oneof!`, but doesn't use any bytes for strategies
/// that were not selected. In `prop_oneof!`, each of them would use half of the remaining bytes.
/// The disadvantage is that this can't shrink from one strategy to another.
#[derive(Clone, Debug)]
pub struct OneOf<T>(Vec<(u32, BoxedStrategy<T>)>);

impl<T: Debug> OneOf<T> {
    /// Creates this from strategies and their weights.
    pub fn new(options: impl IntoIterator<Item = (u32, BoxedStrategy<T>)>) -> Self {
        Self(options.into_iter().collect())
    }
}

impl<T: Debug> Strategy for OneOf<T> {
    type Tree = Box<dyn ValueTree<Value = T>>;
    type Value = T;

    fn new_tree(&self, runner: &mut TestRunner) -> NewTree<Self> {
        let sum: u32 = self.0.iter().map(|(weight, _)| weight).sum();
        let mut left = runner.rng().next_u32() % sum;
        let chosen = self.0.iter().find(|(weight, _)| {
            let is_here = left < *weight;
            left = left.saturating_sub(*weight);
            is_here
        });
        chosen.expect("less than the sum").1.new_tree(runner)
    }
}

/// Same as `prop_oneof!`, but uses [`OneOf`](crate::fuzz::OneOf).
#[macro_export]
macro_rules! one_of {
    ($($weight:expr => $strategy:expr),+ $(,)?) => {
        $crate::fuzz::OneOf::new([$(($weight, $crate::fuzz::boxed($strategy))),+])
    };
    ($($strategy:expr),+ $(,)?) => { $crate::one_of![$(1 => $strategy),+] };
}

/// Boxes a strategy.
pub fn boxed<S: Strategy + 'static>(strategy: S) -> BoxedStrategy<S::Value> {
    strategy.boxed()
}

/// Creates a value from a chunk. Returns `None` if the strategy has no value for these bytes.
pub fn value<S: Strategy>(strategy: &S, piece: &[u8]) -> Option<S::Value> {
    let bytes = [piece, &REST].concat();
    let rng = TestRng::from_seed(RngAlgorithm::PassThrough, &bytes);
    let mut runner = TestRunner::new_with_rng(Config::default(), rng);
    let tree = strategy.new_tree(&mut runner).ok()?;
    Some(tree.current())
}

/// Returns the start of a history and its actions, or `None` if there are not enough bytes for an
/// action.
pub fn history<H: Strategy, S: Strategy>(
    head: &H,
    action: &S,
    bytes: &[u8],
) -> Option<(H::Value, Vec<S::Value>)> {
    let (first, rest) = bytes.split_at_checked(HEAD)?;
    let actions: Vec<_> = rest
        .chunks(PIECE)
        .take(MOST)
        .filter_map(|piece| value(action, piece))
        .collect();
    let head = value(head, first)?;
    (!actions.is_empty()).then_some((head, actions))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// A strategy that tries again if the number is out of range.
    fn numbers() -> impl Strategy<Value = Vec<u32>> {
        proptest::collection::vec(0u32..1_000_003, 1..200)
    }

    #[test]
    fn chunk_selects_only_its_action() {
        let mut bytes = [0x5a; HEAD + 3 * PIECE];
        let before = history(&Just(()), &numbers(), &bytes).unwrap().1;
        bytes[HEAD + PIECE + 11] ^= 0xff;
        let after = history(&Just(()), &numbers(), &bytes).unwrap().1;
        assert_eq!((before.len(), after.len()), (3, 3));
        assert_eq!((&before[0], &before[2]), (&after[0], &after[2]));
        assert_ne!(before[1], after[1]);
    }

    #[test]
    fn bytes_select_by_weight() {
        let nested = one_of![Just(2_u32), 3..1000_u32];
        let strategy = one_of![3 => Just(0_u32), 1 => Just(1_u32), 4 => nested];
        let of = |number: u32, rest: u32| {
            let piece = [number.to_le_bytes(), rest.to_le_bytes()].concat();
            value(&strategy, &piece).unwrap()
        };
        assert_eq!([0, 2, 3, 8, 11].map(|n| of(n, 0)), [0, 0, 1, 0, 1]);
        assert_eq!(of(4, 0), 2);
        assert!((3..1000).contains(&of(7, 1)));
    }

    #[test]
    fn zeros_create_history() {
        let bytes = [0; HEAD + 1];
        let (head, actions) = history(&any::<u8>(), &numbers(), &bytes).unwrap();
        assert_eq!((head, actions.len()), (0, 1));
        assert!(history(&any::<u8>(), &numbers(), &bytes[..HEAD]).is_none());
    }
}
