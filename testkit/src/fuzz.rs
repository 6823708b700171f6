//! Histories for fuzz targets: the actions of a property test, chosen by a fuzzer's bytes.
//!
//! A strategy of proptest asks for random numbers; here it gets the bytes instead, so a fuzzer that
//! sees coverage decides which actions come, and in which order. Each action has a piece of the
//! input of its own: a fuzzer that changes, removes or repeats a piece leaves the others as they are.

use std::sync::LazyLock;

use proptest::strategy::{Strategy, ValueTree};
use proptest::test_runner::{Config, RngAlgorithm, TestRng, TestRunner};

/// Bytes in front of the actions, for what a history begins with.
pub const HEAD: usize = 16;

/// Bytes of an action. Longer byte strings of an action end in bytes that no input chooses.
pub const PIECE: usize = 64;

/// Actions of the longest history.
pub const MOST: usize = 128;

/// Numbers behind the end of a piece. They vary, since a strategy that draws a number again until it
/// is in range would never end with zeros.
static REST: LazyLock<Vec<u8>> = LazyLock::new(|| {
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    let words = std::iter::repeat_with(|| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state.to_le_bytes()
    });
    words.take(256).flatten().collect()
});

/// The value that a strategy makes of a piece; `None` if it has none for these bytes.
pub fn value<S: Strategy>(strategy: &S, piece: &[u8]) -> Option<S::Value> {
    let bytes = [piece, &REST].concat();
    let rng = TestRng::from_seed(RngAlgorithm::PassThrough, &bytes);
    let mut runner = TestRunner::new_with_rng(Config::default(), rng);
    let tree = strategy.new_tree(&mut runner).ok()?;
    Some(tree.current())
}

/// The beginning of a history and its actions; `None` if the bytes are too few for one action.
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

    /// A strategy that draws again what is out of its range.
    fn numbers() -> impl Strategy<Value = Vec<u32>> {
        proptest::collection::vec(0u32..1_000_003, 1..200)
    }

    #[test]
    fn a_piece_chooses_its_own_action_only() {
        let mut bytes = [0x5a; HEAD + 3 * PIECE];
        let before = history(&Just(()), &numbers(), &bytes).unwrap().1;
        bytes[HEAD + PIECE + 11] ^= 0xff;
        let after = history(&Just(()), &numbers(), &bytes).unwrap().1;
        assert_eq!((before.len(), after.len()), (3, 3));
        assert_eq!((&before[0], &before[2]), (&after[0], &after[2]));
        assert_ne!(before[1], after[1]);
    }

    #[test]
    fn zeros_make_a_history_too() {
        let bytes = [0; HEAD + 1];
        let (head, actions) = history(&any::<u8>(), &numbers(), &bytes).unwrap();
        assert_eq!((head, actions.len()), (0, 1));
        assert!(history(&any::<u8>(), &numbers(), &bytes[..HEAD]).is_none());
    }
}
