//! What has to notice a change: the simulator, or tests that see what no simulation has.
//!
//! In the simulator a worker's step is one piece, and no session uses atomics. So the head of a
//! planted defect may name tests instead, in a line `judge: WORDS` ([`Judge::named`]).

use std::time::Duration;

use super::copy::{Copy, Run};
use crate::daemon::OPTIMIZED;
use crate::{Failure, sh};

/// The test of `rc_sim` that takes seeds.
const QUEUE_PAIRS: &str = "every_byte_and_every_completion_survives_a_bad_wire";

/// Messages of each of its seeds.
const SESSION_MESSAGES: u64 = 1000;

/// What has to notice a change.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Judge<'a> {
    /// Seeds of the simulator.
    Simulator,
    /// Seeds of two queue pairs on a bad wire (`transport/tests/rc_sim.rs`).
    QueuePairs,
    /// Unit tests of this package that explore interleavings and whose names contain this word.
    Interleavings(&'a str, &'a str),
    /// Unit tests of this package whose names contain this word. They have no seeds.
    Tests(&'a str, &'a str),
    /// Likewise, integration tests: of a package, its file of tests, and the word.
    Integration(&'a str, &'a str, &'a str),
}

impl<'a> Judge<'a> {
    /// Returns the judge of a line `judge: WORDS`.
    pub(super) fn named(words: &'a str) -> Option<Self> {
        let words: Vec<_> = words.split_whitespace().collect();
        Some(match words[..] {
            ["rc_sim"] => Self::QueuePairs,
            ["interleavings", package, word] => Self::Interleavings(package, word),
            ["tests", package, word] => Self::Tests(package, word),
            ["tests", package, file, word] => Self::Integration(package, file, word),
            _ => return None,
        })
    }

    /// Its package, the arguments that choose its harness, and a word of its tests' names; none for
    /// the simulator.
    fn tests(self) -> Option<(&'a str, Vec<&'a str>, &'a str)> {
        match self {
            Self::Simulator => None,
            Self::QueuePairs => {
                let args = vec!["--test", "rc_sim", "--profile", OPTIMIZED];
                Some(("riser-transport", args, QUEUE_PAIRS))
            }
            // The checker of interleavings takes no build without debug assertions.
            Self::Interleavings(package, word) => {
                let args = vec!["--lib", "--features", "riser-sync/shuttle"];
                Some((package, args, word))
            }
            Self::Tests(package, word) => {
                Some((package, vec!["--lib", "--profile", OPTIMIZED], word))
            }
            Self::Integration(package, file, word) => {
                let args = vec!["--test", file, "--profile", OPTIMIZED];
                Some((package, args, word))
            }
        }
    }

    /// Variables by which tests learn how many seeds or interleavings they have.
    fn sizes(self, count: u64) -> Vec<(&'static str, u64)> {
        match self {
            Self::Simulator | Self::Tests(..) | Self::Integration(..) => Vec::new(),
            Self::QueuePairs => {
                let messages = count * SESSION_MESSAGES;
                vec![("RISER_SIM_MESSAGES", messages), ("RISER_SEED", 1)]
            }
            // By each of two schedulers.
            Self::Interleavings(..) => vec![("RISER_INTERLEAVINGS", count.div_ceil(2))],
        }
    }

    /// Builds it in the copy.
    pub(super) fn build(self, copy: &Copy) -> Result<(), Failure> {
        let mut command = match self.tests() {
            None => copy.building(),
            Some((package, harness, _)) => copy.testing(package, &harness),
        };
        if self.tests().is_some() {
            command.arg("--no-run");
        }
        sh::output(&mut command).map(drop)
    }

    /// Runs it, with a change or without any, until one of so many seeds or interleavings fails.
    pub(super) fn run(
        self,
        copy: &Copy,
        planted: Option<&str>,
        count: u64,
        patience: Duration,
    ) -> Result<Run, Failure> {
        let mut command = match self.tests() {
            None => copy.simulator(count),
            Some((package, harness, word)) => {
                // Built before: a build must not take the time that the tests have.
                self.build(copy)?;
                let mut command = copy.testing(package, &harness);
                command.args(["--", word]);
                command
            }
        };
        let sizes = self.sizes(count).into_iter();
        command.envs(sizes.map(|(name, size)| (name, size.to_string())));
        copy.run(&command, planted, patience, |text| self.failure(text))
    }

    /// The first failure that a run has printed: the seed, or the number of interleavings, and why.
    fn failure(self, text: &str) -> Option<(Option<u64>, String)> {
        if self == Self::Simulator {
            return text.lines().find_map(|line| {
                let (seed, why) = line.strip_prefix("seed ")?.split_once(": ")?;
                Some((Some(seed.parse().ok()?), why.to_owned()))
            });
        }
        let mut lines = text.lines();
        let result = lines.find(|line| line.starts_with("test result: FAILED"))?;
        // A panic's message is below its place.
        let mut lines = text.lines();
        let place =
            lines.find(|line| line.starts_with("thread ") && line.contains(" panicked at "));
        let why = place.and_then(|_| lines.next()).unwrap_or(result);
        let count = text.lines().find_map(|line| {
            let rest = line.strip_prefix("session seed ");
            let rest = rest.or_else(|| line.strip_prefix("interleaving "))?;
            rest.split_once(" failed")?.0.parse().ok()
        });
        Some((count, why.to_owned()))
    }

    /// Words for so many runs: `7 seeds`.
    pub(super) fn runs(self, count: u64) -> String {
        match self {
            Self::Simulator => format!("{count} seeds"),
            Self::QueuePairs => format!("{count} seeds of rc_sim"),
            Self::Interleavings(..) => format!("{count} interleavings"),
            Self::Tests(..) | Self::Integration(..) => "the tests".to_owned(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_judge_is_named_by_words() {
        let named = [
            ("rc_sim", Some(Judge::QueuePairs)),
            ("interleavings a b", Some(Judge::Interleavings("a", "b"))),
            ("tests a b", Some(Judge::Tests("a", "b"))),
            ("tests a", None),
            ("", None),
        ];
        for (words, judge) in named {
            assert_eq!(Judge::named(words), judge, "{words}");
        }
    }

    #[test]
    fn a_failure_has_its_first_message_and_its_seed() {
        let printed = "
running 1 test
---- a_test stdout ----
RISER_SEED=1
thread 'a_test' (7) panicked at a/file.rs:1:2:
assertion `left == right` failed: a reason
  left: 1
 right: 2
session seed 12 failed; run it again with
    a command
thread 'a_test' (7) panicked at a/file.rs:3:4:
what follows from it
test result: FAILED. 0 passed; 1 failed
";
        let why = "assertion `left == right` failed: a reason".to_owned();
        let failure = |text: &str| Judge::QueuePairs.failure(text);
        assert_eq!(failure(printed), Some((Some(12), why.clone())));
        let printed = printed.replace("session seed", "interleaving");
        let failure = |text: &str| Judge::Interleavings("a", "b").failure(text);
        assert_eq!(failure(&printed), Some((Some(12), why)));
        assert_eq!(failure("test result: ok."), None);
        let printed = "noise\nseed 3: a reason: more\nseed 4: another";
        let why = "a reason: more".to_owned();
        assert_eq!(Judge::Simulator.failure(printed), Some((Some(3), why)));
    }
}
