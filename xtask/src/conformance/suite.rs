//! Parser for the output of `iscsi-test-cu`.
//!
//! CUnit prints a line for each suite and each test, with the test's log output between them:
//!
//! ```text
//! Suite: Read10
//!   Test: Simple ...passed
//!   Test: ZeroBlocks ...    [SKIPPED] the reason
//! passed
//!   Test: Residuals ...    [FAILED] the reason
//! FAILED
//!     1. test_read10_residuals.c:229  - CU_ASSERT_EQUAL(a,b)
//! ```
//!
//! If a test skips itself, CUnit will report that it passed, but we count it as skipped.

use std::collections::BTreeSet;

use crate::cases::{Test, Verdict};

/// Parsed output of a run.
#[derive(Clone, Debug, Default)]
pub(super) struct Run {
    pub(super) tests: Vec<Test>,
    /// Set if the run has printed its summary.
    pub(super) is_complete: bool,
}

/// Maximum number of lines to keep for a failure.
const KEPT: usize = 4;

impl Run {
    pub(super) fn parse(text: &str) -> Self {
        let mut run = Self {
            tests: Vec::new(),
            is_complete: text.contains("Run Summary:"),
        };
        let mut suite = String::new();
        let body = text.split("Run Summary:").next().unwrap_or_default();
        // If the previous test logs a message without a newline, the next test name can be on the
        // same line.
        for part in split_before(body, &["Suite: ", "  Test: "]) {
            if let Some(rest) = part.strip_prefix("Suite: ") {
                suite = rest.lines().next().unwrap_or_default().trim().to_owned();
            } else if let Some(rest) = part.strip_prefix("  Test: ")
                && let Some((name, said)) = rest.split_once("...")
            {
                let (name, verdict) = (format!("{suite}.{}", name.trim()), verdict(said));
                run.tests.push(Test { name, verdict });
            }
        }
        run
    }

    pub(super) fn skipped_for(&self, words: &str) -> Vec<String> {
        let skipped = self.tests.iter().filter(|test| match &test.verdict {
            Verdict::Skipped(reasons) => reasons.split("; ").all(|r| r.starts_with(words)),
            _ => false,
        });
        skipped.map(|test| test.name.clone()).collect()
    }

    /// Replaces test results using the results from another run.
    pub(super) fn merge(&mut self, other: Self) {
        for test in other.tests {
            if let Some(own) = self.tests.iter_mut().find(|own| own.name == test.name) {
                own.verdict = test.verdict;
            }
        }
    }
}

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
    // The output of the suite's cleanup can be on the same line.
    let exited = |word: &str| lines().any(|line| line.starts_with(word) || line.ends_with(word));
    // CUnit prints its result at the end of a line, but the tests use brackets.
    if lines().any(|line| line == "FAILED" || line.ends_with("...FAILED")) {
        let numbered = |line: &&str| {
            line.split_once(". ")
                .is_some_and(|(n, _)| n.parse::<u32>().is_ok())
        };
        let logged = lines().filter(|line| line.starts_with("[FAILED]"));
        let lines = logged.take(1).chain(lines().filter(numbered)).take(KEPT);
        return Verdict::Failed(lines.collect::<Vec<_>>().join("; "));
    }
    // If we see neither of these words, the program exited during this test.
    if !exited("passed") {
        return Verdict::unfinished();
    }
    let skips = lines().filter_map(|line| line.split_once("[SKIPPED]"));
    let reasons: BTreeSet<_> = skips.map(|(_, why)| reason(why)).collect();
    match reasons.is_empty() {
        true => Verdict::Passed,
        false => Verdict::Skipped(reasons.into_iter().collect::<Vec<_>>().join("; ")),
    }
}

/// Returns the reason for a skip. If a command is not supported, this is the command name.
fn reason(why: &str) -> String {
    let why = why.trim().trim_end_matches("passed").trim_end_matches('.');
    match why.strip_suffix(" is not implemented") {
        Some(command) => format!("lacks {}", command.replace('_', "")),
        None => why.trim_end_matches(". Skipping test").to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cases::summary;

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
    fn suite_output_is_parsed() {
        let run = Run::parse(SAID);
        assert!(run.is_complete);
        let said = |run: &Run| summary(run.tests.iter().map(|test| &test.verdict));
        assert_eq!(said(&run), "1 passed, 1 failed, 2 skipped, 0 not yet");
        let failed = "[FAILED] READ10 successful but should have failed; \
                      1. test_read10_invalid.c:40  - CU_ASSERT_EQUAL(ret,0); \
                      2. test_read10_invalid.c:44  - CU_ASSERT_EQUAL(ret,0)";
        assert_eq!(run.tests[1].verdict, Verdict::Failed(failed.to_owned()));
        let skipped = |why: &str| Verdict::Skipped(why.to_owned());
        assert_eq!(run.tests[2].verdict, skipped("lacks PERSISTENTRESERVEIN"));
        assert_eq!(run.tests[3].verdict, skipped("LUN is not removable"));
        let mut run = run;
        assert_eq!(run.skipped_for("LUN is not"), ["Prin.Media"]);
        run.merge(Run::parse("\nSuite: Prin\n  Test: Media ...passed\n"));
        assert_eq!(said(&run), "2 passed, 1 failed, 1 skipped, 0 not yet");
    }

    #[test]
    fn incomplete_run_reports_last_test() {
        let cut = SAID.split("    [FAILED] again").next().unwrap();
        let run = Run::parse(cut);
        assert!(!run.is_complete);
        assert_eq!(run.tests.last().unwrap().verdict, Verdict::unfinished());
    }
}
