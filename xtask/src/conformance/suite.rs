//! Parser of the output of `iscsi-test-cu`.
//!
//! CUnit prints a line per suite and per test, and between them the log of the test:
//!
//! ```text
//! Suite: Read10
//!   Test: Simple ...passed
//!   Test: ZeroBlocks ...    [SKIPPED] the reason
//! passed
//!   Test: Residuals ...    [FAILED] what was seen
//! FAILED
//!     1. test_read10_residuals.c:229  - CU_ASSERT_EQUAL(a,b)
//! ```
//!
//! A test that skips itself counts as a pass for CUnit, and as a skip here.

use std::collections::BTreeMap;

/// Verdict on a test.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Verdict {
    /// All assertions of the test held.
    Passed,
    /// Some did not; the first lines that say which.
    Failed(Vec<String>),
    /// It was not tried, for these reasons.
    Skipped(Vec<String>),
    /// The program ended, or was ended, in it.
    Unfinished,
}

/// A test that was begun.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Test {
    pub(super) suite: String,
    pub(super) name: String,
    pub(super) verdict: Verdict,
}

/// Tests of a suite, or of all, by how they ended.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Counts {
    pub(super) passed: u32,
    pub(super) failed: u32,
    pub(super) skipped: u32,
}

impl Counts {
    fn add(&mut self, verdict: &Verdict) {
        match verdict {
            Verdict::Passed => self.passed += 1,
            Verdict::Skipped(_) => self.skipped += 1,
            Verdict::Failed(_) | Verdict::Unfinished => self.failed += 1,
        }
    }
}

/// All that a run said.
#[derive(Clone, Debug, Default)]
pub(super) struct Run {
    pub(super) tests: Vec<Test>,
    /// Whether it came to its summary.
    pub(super) is_complete: bool,
}

/// Number of lines of a failure that are kept.
const KEPT: usize = 4;

impl Run {
    /// Reads the program's output.
    pub(super) fn parse(text: &str) -> Self {
        let mut run = Self {
            tests: Vec::new(),
            is_complete: text.contains("Run Summary:"),
        };
        let mut suite = String::new();
        let body = text.split("Run Summary:").next().unwrap_or_default();
        // A test's name may follow, on one line, what the one before it logged last.
        for part in split_before(body, &["Suite: ", "  Test: "]) {
            if let Some(rest) = part.strip_prefix("Suite: ") {
                suite = rest.lines().next().unwrap_or_default().trim().to_owned();
            } else if let Some(rest) = part.strip_prefix("  Test: ")
                && let Some((name, said)) = rest.split_once("...")
            {
                run.tests.push(Test {
                    suite: suite.clone(),
                    name: name.trim().to_owned(),
                    verdict: verdict(said),
                });
            }
        }
        run
    }

    /// By suite, in the order of the run.
    pub(super) fn suites(&self) -> Vec<(&str, Counts)> {
        let mut suites: Vec<(&str, Counts)> = Vec::new();
        for test in &self.tests {
            let at = suites.iter().position(|(name, _)| *name == test.suite);
            let at = at.unwrap_or_else(|| {
                suites.push((&test.suite, Counts::default()));
                suites.len() - 1
            });
            suites[at].1.add(&test.verdict);
        }
        suites
    }

    /// Counts of all suites together.
    pub(super) fn counts(&self) -> Counts {
        let mut counts = Counts::default();
        for test in &self.tests {
            counts.add(&test.verdict);
        }
        counts
    }

    /// Tests, as suite and name, that were skipped for a reason that begins with some words.
    pub(super) fn skipped_for(&self, words: &str) -> Vec<String> {
        let skipped = |test: &&Test| match &test.verdict {
            Verdict::Skipped(reasons) => reasons.iter().all(|r| r.starts_with(words)),
            _ => false,
        };
        let skipped = self.tests.iter().filter(skipped);
        skipped
            .map(|test| format!("{}.{}", test.suite, test.name))
            .collect()
    }

    /// Takes over how tests of another run ended.
    pub(super) fn take(&mut self, other: Self) {
        for test in other.tests {
            let mut own = self.tests.iter_mut();
            if let Some(own) = own.find(|t| t.suite == test.suite && t.name == test.name) {
                own.verdict = test.verdict;
            }
        }
    }

    /// Skipped tests by what they lacked.
    pub(super) fn skips(&self) -> BTreeMap<String, Vec<String>> {
        let mut skips = BTreeMap::<String, Vec<String>>::new();
        for test in &self.tests {
            if let Verdict::Skipped(reasons) = &test.verdict {
                let full = format!("{}.{}", test.suite, test.name);
                skips.entry(reasons.join("; ")).or_default().push(full);
            }
        }
        skips
    }
}

/// Cuts a text in front of every occurrence of one of the words.
fn split_before<'a>(text: &'a str, words: &[&str]) -> Vec<&'a str> {
    let mut cuts: Vec<usize> = words
        .iter()
        .flat_map(|word| text.match_indices(word).map(|(at, _)| at))
        .collect();
    cuts.sort_unstable();
    cuts.push(text.len());
    cuts.windows(2)
        .map(|pair| &text[pair[0]..pair[1]])
        .collect()
}

fn verdict(said: &str) -> Verdict {
    let lines = || said.lines().map(str::trim);
    // What the suite's own end logs follows on the same line.
    let ended = |word: &str| lines().any(|line| line.starts_with(word) || line.ends_with(word));
    // CUnit's own word stands at the end of a line; the tests log theirs in brackets.
    if lines().any(|line| line == "FAILED" || line.ends_with("...FAILED")) {
        let numbered = |line: &&str| {
            line.split_once(". ")
                .is_some_and(|(n, _)| n.parse::<u32>().is_ok())
        };
        let logged = lines().filter(|line| line.starts_with("[FAILED]"));
        let asserted = lines().filter(numbered);
        return Verdict::Failed(
            logged
                .take(1)
                .chain(asserted)
                .take(KEPT)
                .map(into)
                .collect(),
        );
    }
    // Neither word: the program ended within the test.
    if !ended("passed") {
        return Verdict::Unfinished;
    }
    let mut reasons: Vec<String> = lines()
        .filter_map(|line| line.split_once("[SKIPPED]"))
        .map(|(_, why)| reason(why))
        .collect();
    reasons.sort();
    reasons.dedup();
    if reasons.is_empty() {
        Verdict::Passed
    } else {
        Verdict::Skipped(reasons)
    }
}

/// The reason of a skip: the command that is missing, where that is it.
fn reason(why: &str) -> String {
    let why = why.trim().trim_end_matches("passed").trim_end_matches('.');
    match why.strip_suffix(" is not implemented") {
        Some(command) => format!("lacks {}", command.replace('_', "")),
        None => why.trim_end_matches(". Skipping test").to_owned(),
    }
}

fn into(line: &str) -> String {
    line.to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    const SAID: &str = "

     CUnit - A unit testing framework for C - Version 2.1-3
     http://cunit.sourceforge.net/


Suite: Read10
  Test: Simple ...passed    [FAILED] PRIN command: failed with sense.
  Test: Invalid ...    [FAILED] READ10 successful but should have failed
    [FAILED] again
FAILED
    1. test_read10_invalid.c:40  - CU_ASSERT_EQUAL(ret,0)
    2. test_read10_invalid.c:44  - CU_ASSERT_EQUAL(ret,0)
Suite: Prin
  Test: Keys ...    [SKIPPED] PERSISTENT_RESERVE_IN is not implemented.
    [SKIPPED] PERSISTENTRESERVEIN is not implemented.
passed
  Test: Media ...    [SKIPPED] LUN is not removable. Skipping test.passed

Run Summary:    Type  Total    Ran Passed Failed Inactive
              suites      2      2    n/a      0        0
               tests      4      4      3      1        0
";

    #[test]
    fn a_run_is_understood() {
        let run = Run::parse(SAID);
        assert!(run.is_complete);
        let all = Counts {
            passed: 1,
            failed: 1,
            skipped: 2,
        };
        assert_eq!(run.counts(), all);
        assert_eq!(run.suites().len(), 2);
        assert_eq!(
            run.tests[1].verdict,
            Verdict::Failed(vec![
                "[FAILED] READ10 successful but should have failed".to_owned(),
                "1. test_read10_invalid.c:40  - CU_ASSERT_EQUAL(ret,0)".to_owned(),
                "2. test_read10_invalid.c:44  - CU_ASSERT_EQUAL(ret,0)".to_owned(),
            ])
        );
        let skips = run.skips();
        assert_eq!(skips["lacks PERSISTENTRESERVEIN"], ["Prin.Keys"]);
        assert_eq!(skips["LUN is not removable"], ["Prin.Media"]);
        let mut run = run;
        assert_eq!(run.skipped_for("LUN is not"), ["Prin.Media"]);
        run.take(Run::parse("\nSuite: Prin\n  Test: Media ...passed\n"));
        assert_eq!(run.counts().skipped, 1);
    }

    #[test]
    fn a_run_that_was_cut_short_says_where() {
        let cut = SAID.split("    [FAILED] again").next().unwrap();
        let run = Run::parse(cut);
        assert!(!run.is_complete);
        assert_eq!(run.tests.last().unwrap().verdict, Verdict::Unfinished);
        assert_eq!(run.counts().failed, 1);
    }
}
