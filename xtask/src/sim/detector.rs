//! Selects how a change should be detected: by the simulator, or by tests for code not covered by
//! the simulator.
//!
//! The simulator runs a whole worker step at a time and doesn't use sessions with atomics. So the
//! header of a planted defect can select tests instead, in a line `detector: WORDS`
//! ([`Detector::named`]).

use std::process::Command;
use std::time::Duration;

use super::copy::{Copy, Run};
use crate::daemon::RELEASE;
use crate::{Failure, sh};

/// The test of the simulator that runs `RISER_SIM_SEEDS` seeds.
const FIRST_SEEDS: &str = "first_seeds_pass";

/// The test in `rc_sim` that uses seeds.
const QUEUE_PAIRS: &str = "bytes_and_completions_survive_bad_wire";

/// Number of messages per seed in this test.
const SESSION_MESSAGES: u64 = 1000;

/// Test used to detect a change.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Detector<'a> {
    /// Simulator seeds.
    Simulator,
    /// Seeds for two queue pairs on an unreliable wire (`transport/tests/rc_sim.rs`).
    QueuePairs,
    /// Unit tests that explore interleavings; contains the package and a word in the test name.
    Interleavings(&'a str, &'a str),
    /// Unit tests, which don't use seeds; contains the package and a word in the test name.
    Tests(&'a str, &'a str),
    /// Integration tests; contains the package, the test file and a word in the test name.
    Integration(&'a str, &'a str, &'a str),
}

impl<'a> Detector<'a> {
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

    pub(super) fn tests(self) -> (&'a str, Vec<&'a str>, &'a str) {
        match self {
            Self::Simulator => ("riser-sim", vec!["--test", "seeds"], FIRST_SEEDS),
            Self::QueuePairs => ("riser-transport", vec!["--test", "rc_sim"], QUEUE_PAIRS),
            Self::Interleavings(package, word) => {
                let args = vec!["--lib", "--features", "riser-sync/shuttle"];
                (package, args, word)
            }
            Self::Tests(package, word) => (package, vec!["--lib"], word),
            Self::Integration(package, file, word) => (package, vec!["--test", file], word),
        }
    }

    pub(super) fn sizes(self, count: u64) -> Vec<(&'static str, String)> {
        let sizes = match self {
            Self::Tests(..) | Self::Integration(..) => Vec::new(),
            Self::Simulator => vec![("RISER_SIM_SEEDS", count)],
            Self::QueuePairs => {
                let messages = count * SESSION_MESSAGES;
                vec![("RISER_SIM_MESSAGES", messages), ("RISER_SEED", 1)]
            }
            // The number is split between two schedulers.
            Self::Interleavings(..) => vec![("RISER_INTERLEAVINGS", count.div_ceil(2))],
        };
        let text = |(name, size): (_, u64)| (name, size.to_string());
        sizes.into_iter().map(text).collect()
    }

    fn testing(self, copy: &Copy) -> Command {
        let (package, harness, _) = self.tests();
        let mut command = copy.cargo(&["test", "--quiet", "--package", package]);
        command.args(harness);
        // The interleaving checker requires a build with debug assertions.
        if !matches!(self, Self::Interleavings(..)) {
            command.args(["--profile", RELEASE]);
        }
        command
    }

    pub(super) fn build(self, copy: &Copy) -> Result<(), Failure> {
        let mut command = match self {
            Self::Simulator => copy.building(),
            _ => self.testing(copy),
        };
        if self != Self::Simulator {
            command.arg("--no-run");
        }
        sh::output(&mut command).map(drop)
    }

    /// Runs seeds or interleavings until one fails or the limit is reached, either with a
    /// change or without changes.
    pub(super) fn run(
        self,
        copy: &Copy,
        planted: Option<&str>,
        count: u64,
        patience: Duration,
    ) -> Result<Run, Failure> {
        let mut command = match self {
            Self::Simulator => copy.simulator(count),
            _ => {
                // Build first, so that the build doesn't use up the time limit of the tests.
                self.build(copy)?;
                let mut command = self.testing(copy);
                command.args(["--", self.tests().2]);
                command
            }
        };
        command.envs(self.sizes(count));
        copy.run(&command, planted, patience, |text| self.failure(text))
    }

    /// Returns the first failure in the output: the seed or the number of interleavings, and the
    /// reason.
    fn failure(self, text: &str) -> Option<(Option<u64>, String)> {
        if self == Self::Simulator {
            return text.lines().find_map(|line| {
                let (seed, why) = line.strip_prefix("seed ")?.split_once(": ")?;
                Some((Some(seed.parse().ok()?), why.to_owned()))
            });
        }
        let mut lines = text.lines();
        let result = lines.find(|line| line.starts_with("test result: FAILED"))?;
        // The message of a panic is on the line after its location.
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

    /// Formats the number of runs, for example `7 seeds`.
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
    fn detector_line_is_parsed() {
        let named = [
            ("rc_sim", Some(Detector::QueuePairs)),
            ("interleavings a b", Some(Detector::Interleavings("a", "b"))),
            ("tests a b", Some(Detector::Tests("a", "b"))),
            ("tests a", None),
            ("", None),
        ];
        for (words, detector) in named {
            assert_eq!(Detector::named(words), detector, "{words}");
        }
    }

    #[test]
    fn failure_contains_message_and_seed() {
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
        let failure = |text: &str| Detector::QueuePairs.failure(text);
        assert_eq!(failure(printed), Some((Some(12), why.clone())));
        let printed = printed.replace("session seed", "interleaving");
        let failure = |text: &str| Detector::Interleavings("a", "b").failure(text);
        assert_eq!(failure(&printed), Some((Some(12), why)));
        assert_eq!(failure("test result: ok."), None);
        let printed = "noise\nseed 3: a reason: more\nseed 4: another";
        let why = "a reason: more".to_owned();
        assert_eq!(Detector::Simulator.failure(printed), Some((Some(3), why)));
    }
}
