//! Test counts of `cargo xtask test`: passed, failed and skipped, by kind. Each test is counted
//! once.
//!
//! Tests and commands write one line to a common file ([`skip_log`]) for everything they have to
//! skip. If any part of a test function was skipped, the function is counted as skipped.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::fs;
use std::ops::AddAssign;
use std::path::PathBuf;

use crate::{Failure, skip};

/// Kinds of tests that we count.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// Functions of the Rust test harness.
    Function,
    /// Tests of external suites (libiscsi over TCP and rdma-core), and of our provider suite when
    /// using libraries.
    SuiteTest,
    /// Cases using external RDMA programs with our libraries.
    Program,
    /// Cases using a Linux kernel in a guest.
    Case,
    /// Any single check: formatting, lints, an external tool, a long run or the demo.
    Check,
}

impl Kind {
    const ALL: [Self; 5] = [
        Self::Function,
        Self::SuiteTest,
        Self::Program,
        Self::Case,
        Self::Check,
    ];

    /// Name of this kind in the skip log.
    const fn word(self) -> &'static str {
        match self {
            Self::Function => skip::FUNCTION,
            Self::SuiteTest => "suite",
            Self::Program => "program",
            Self::Case => "case",
            Self::Check => "check",
        }
    }

    const fn title(self) -> &'static str {
        match self {
            Self::Function => "test functions",
            Self::SuiteTest => "suite tests",
            Self::Program => "RDMA programs",
            Self::Case => "interop cases",
            Self::Check => "checks",
        }
    }

    fn of(word: &str) -> Self {
        let kind = Self::ALL.into_iter().find(|kind| kind.word() == word);
        kind.unwrap_or(Self::Check)
    }
}

/// Number of tests of a given kind that passed and failed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Counts {
    /// Passed at the first or second attempt.
    pub(crate) passed: u64,
    /// Passed at the second attempt; included in `passed`.
    pub(crate) second: u64,
    /// Failed at every attempt.
    pub(crate) failed: u64,
}

impl Counts {
    fn describe(self, skipped: u64) -> String {
        let Self {
            passed,
            second,
            failed,
        } = self;
        let second = match second {
            0 => String::new(),
            n => format!(" ({n} at the second attempt)"),
        };
        format!("{passed} passed{second}, {failed} failed, {skipped} skipped")
    }
}

impl AddAssign for Counts {
    fn add_assign(&mut self, other: Self) {
        self.passed += other.passed;
        self.second += other.second;
        self.failed += other.failed;
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Skip {
    pub(crate) kind: Kind,
    pub(crate) name: String,
    pub(crate) why: String,
}

/// Test counts of all kinds, and the skipped tests.
#[derive(Clone, Debug, Default)]
pub(crate) struct Tally {
    counts: [Counts; Kind::ALL.len()],
    skips: Vec<Skip>,
}

impl Tally {
    pub(crate) fn of(kind: Kind, counts: Counts) -> Self {
        let mut tally = Self::default();
        tally.add(kind, counts);
        tally
    }

    pub(crate) fn add(&mut self, kind: Kind, counts: Counts) {
        self.counts[kind as usize] += counts;
    }

    pub(crate) fn check(passed: bool) -> Self {
        let (passed, failed) = (u64::from(passed), u64::from(!passed));
        let counts = Counts {
            passed,
            failed,
            second: 0,
        };
        Self::of(Kind::Check, counts)
    }

    pub(crate) fn counts(&self, kind: Kind) -> Counts {
        self.counts[kind as usize]
    }

    pub(crate) fn total(&self) -> Counts {
        let mut total = Counts::default();
        for counts in self.counts {
            total += counts;
        }
        total
    }

    /// Returns the number of skipped tests of this kind. If there are several reasons to skip a
    /// test, it's still counted once.
    pub(crate) fn skipped(&self, kind: Kind) -> u64 {
        let of_kind = self.skips.iter().filter(|skip| skip.kind == kind);
        of_kind
            .map(|skip| &skip.name)
            .collect::<BTreeSet<_>>()
            .len() as u64
    }

    pub(crate) fn merge(&mut self, other: Self) {
        for (own, other) in self.counts.iter_mut().zip(other.counts) {
            *own += other;
        }
        self.skips.extend(other.skips);
    }

    /// Adds skipped tests. When a test function skips, the harness counts it as passed, so we need
    /// to subtract it unless it failed later and is listed in `failed`.
    pub(crate) fn take_skips(&mut self, skips: Vec<Skip>, failed: &BTreeSet<String>) {
        let has_failed = |skip: &Skip| {
            let function = skip.name.split(' ').next_back().unwrap_or_default();
            skip.kind == Kind::Function && failed.contains(function)
        };
        // Use the difference instead of the number of skips, because a function that skips two
        // parts has been counted as passed only once.
        let before = self.skipped(Kind::Function);
        self.skips
            .extend(skips.into_iter().filter(|skip| !has_failed(skip)));
        let more = self.skipped(Kind::Function) - before;
        let passed = &mut self.counts[Kind::Function as usize].passed;
        *passed = passed.saturating_sub(more);
    }

    pub(crate) fn in_a_row(&self) -> String {
        self.lines().join("; ")
    }

    fn lines(&self) -> Vec<String> {
        let line = |kind: Kind| {
            let (counts, skipped) = (self.counts(kind), self.skipped(kind));
            let is_any = counts.passed + counts.failed + skipped > 0;
            is_any.then(|| format!("{}: {}", kind.title(), counts.describe(skipped)))
        };
        Kind::ALL.into_iter().filter_map(line).collect()
    }

    pub(crate) fn reasons(&self) -> Vec<String> {
        let mut reasons = BTreeMap::<_, BTreeSet<_>>::new();
        for skip in &self.skips {
            let key = (skip.kind as usize, skip.kind.title(), &skip.why);
            reasons.entry(key).or_default().insert(skip.name.as_str());
        }
        let line = |((_, title, why), names): (_, BTreeSet<&str>)| {
            let names: Vec<_> = names.into_iter().collect();
            format!("skipped  {title}: {} ({why})", names.join(", "))
        };
        reasons.into_iter().map(line).collect()
    }
}

/// Result of a step of `cargo xtask test`, or of a command with several tests.
pub(crate) enum Outcome {
    /// The tests have run. Contains their counts, and an error message if any failed.
    Ran(Tally, Option<String>),
    /// The tests can't run here. Contains the skipped tests, if there is more than one check, and
    /// the reason.
    Skipped(Vec<(Kind, String)>, String),
}

impl Outcome {
    pub(crate) fn failed(why: impl Into<Failure>) -> Self {
        Err::<(), _>(why.into()).into()
    }

    pub(crate) fn skipped(why: impl Into<String>) -> Self {
        Self::Skipped(Vec::new(), why.into())
    }

    pub(crate) fn into_result(self) -> Result<(), Failure> {
        match self {
            Self::Ran(_, None) => Ok(()),
            Self::Ran(_, Some(why)) | Self::Skipped(_, why) => Err(why.into()),
        }
    }
}

/// Creates the outcome of a single check from its result.
impl From<Result<(), Failure>> for Outcome {
    fn from(result: Result<(), Failure>) -> Self {
        let why = result.err().map(|e| e.to_string());
        Self::Ran(Tally::check(why.is_none()), why)
    }
}

impl From<Result<Self, Failure>> for Outcome {
    fn from(result: Result<Self, Failure>) -> Self {
        result.unwrap_or_else(Self::failed)
    }
}

/// Formats a line for each kind and a line with the total.
impl fmt::Display for Tally {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let skipped = Kind::ALL.into_iter().map(|kind| self.skipped(kind)).sum();
        let total = self.total().describe(skipped);
        write!(f, "{}\n\nin total: {total}", self.lines().join("\n"))
    }
}

/// Path of the skip log used by this process and its children.
pub(crate) fn skip_log() -> PathBuf {
    std::env::temp_dir().join(format!("riser-skips-{}", std::process::id()))
}

pub(crate) fn note(kind: Kind, name: &str, why: &str) {
    if let Err(e) = skip::note(&skip_log(), kind.word(), name, why) {
        println!("{}: {e}", skip_log().display());
    }
}

pub(crate) fn noted() -> Vec<Skip> {
    let text = fs::read_to_string(skip_log()).unwrap_or_default();
    let _ = fs::remove_file(skip_log());
    text.lines().map(parse).collect()
}

/// Parses a line of the skip log. An invalid line is also counted.
fn parse(line: &str) -> Skip {
    let mut fields = line.splitn(3, '\t');
    let mut next = || fields.next().unwrap_or_default().to_owned();
    let (kind, name, why) = (next(), next(), next());
    Skip {
        kind: Kind::of(&kind),
        name: if name.is_empty() { kind } else { name },
        why,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn skip(kind: Kind, name: &str, why: &str) -> Skip {
        Skip {
            kind,
            name: name.to_owned(),
            why: why.to_owned(),
        }
    }

    fn passed(passed: u64) -> Counts {
        Counts {
            passed,
            ..Counts::default()
        }
    }

    #[test]
    fn skipped_function_is_counted_once() {
        let mut tally = Tally::of(Kind::Function, passed(10));
        let skips = vec![
            skip(Kind::Function, "cli fuse::a", "FUSE: no"),
            skip(Kind::Function, "cli fuse::a", "memory: no"),
            skip(Kind::Function, "nbd fuse::a", "FUSE: no"),
            skip(Kind::Function, "nbd fails", "FUSE: no"),
        ];
        tally.take_skips(skips, &BTreeSet::from(["fails".to_owned()]));
        assert_eq!(tally.counts(Kind::Function).passed, 8);
        assert_eq!(tally.skipped(Kind::Function), 2);
        let more = vec![skip(Kind::Check, "deny", "no network")];
        tally.take_skips(more, &BTreeSet::new());
        assert_eq!(tally.counts(Kind::Function).passed, 8);
        assert!(tally.to_string().ends_with(" 3 skipped"), "{tally}");
        assert_eq!(
            tally.reasons(),
            [
                "skipped  test functions: cli fuse::a, nbd fuse::a (FUSE: no)",
                "skipped  test functions: cli fuse::a (memory: no)",
                "skipped  checks: deny (no network)",
            ]
        );
    }

    #[test]
    fn summary_line_adds_all_kinds() {
        let mut tally = Tally::of(Kind::Function, passed(10));
        tally.merge(Tally::check(true));
        tally.merge(Tally::check(false));
        let cases = Counts {
            passed: 7,
            second: 2,
            failed: 1,
        };
        tally.merge(Tally::of(Kind::Case, cases));
        let text = tally.to_string();
        assert!(
            text.ends_with("\nin total: 18 passed (2 at the second attempt), 2 failed, 0 skipped"),
            "{text}"
        );
        let cases = "interop cases: 7 passed (2 at the second attempt), 1 failed, 0 skipped";
        assert!(text.contains(cases), "{text}");
    }

    #[test]
    fn skip_line_round_trips() {
        let directory = crate::sh::Scratch::new("tally").unwrap();
        let log = directory.join("log");
        skip::note(&log, Kind::SuiteTest.word(), "A.B", "one\ttwo\nthree").unwrap();
        let text = fs::read_to_string(log).unwrap();
        let expected = skip(Kind::SuiteTest, "A.B", "one two three");
        assert_eq!(text.lines().map(parse).collect::<Vec<_>>(), [expected]);
        assert_eq!(parse("garbled").name, "garbled");
    }
}
