//! `cargo xtask baddays`: runs the failure scenarios and prints one line for each case.
//!
//! The cases are tests (`tests/tests/baddays`) that use the programs the way an operator does. They
//! are also part of `cargo xtask test` and are counted there in the same way: a case that skipped
//! some of its parts has not passed.

use std::collections::BTreeSet;
use std::process::Command;
use std::time::Instant;

use crate::tally::{Counts, Kind, Tally, noted, skip_log};
use crate::{Failure, sh};

/// Runs all cases sequentially, so that we can report the time of each case.
pub(crate) fn run() -> Result<(), Failure> {
    let args = ["test", "-q", "-p", "riser-tests", "--test", "baddays"];
    let program = sh::built(&args, "baddays")?;
    let list = sh::output(&mut sh::cmd(&program, ["--list", "--format", "terse"]))?;
    let cases: Vec<_> = list
        .lines()
        .filter_map(|line| line.strip_suffix(": test"))
        .collect();
    if cases.is_empty() {
        return Err("found no cases".into());
    }
    let mut tally = Tally::default();
    // Discard skips that were left by an earlier process with the same ID.
    let _ = noted();
    for case in &cases {
        let begin = Instant::now();
        let mut command = sh::cmd(&program, ["--exact", case]);
        command.current_dir(crate::root().join("tests"));
        let (word, of_case, error) = try_case(command);
        let seconds = begin.elapsed().as_secs_f64();
        let name = case.rsplit("::").next().unwrap_or(case).replace('_', " ");
        println!("{word:<7} {seconds:5.1} s  {name}");
        for line in of_case.reasons().into_iter().chain(error) {
            println!("{line}");
        }
        tally.merge(of_case);
    }
    println!("{}", tally.in_a_row());
    match tally.total().failed {
        0 => Ok(()),
        failed => Err(format!("{failed} of {} cases failed", cases.len()).into()),
    }
}

/// Runs one case and returns its result as a word, its counts, and the output if it failed.
fn try_case(mut command: Command) -> (&'static str, Tally, Option<String>) {
    let result = sh::output(command.env(crate::skip::LOG, skip_log()));
    let skips = noted();
    let is_ok = result.is_ok();
    let counts = Counts {
        passed: u64::from(is_ok),
        failed: u64::from(!is_ok),
        second: 0,
    };
    let mut tally = Tally::of(Kind::Function, counts);
    if is_ok {
        tally.take_skips(skips, &BTreeSet::new());
    }
    let word = match (is_ok, tally.counts(Kind::Function).passed) {
        (false, _) => "FAILED",
        (true, 0) => "skipped",
        (true, _) => "ok",
    };
    (word, tally, result.err().map(|error| error.to_string()))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Uses shell scripts instead of the test program.
    #[test]
    fn skipped_case_has_not_passed() {
        let skips = r#"printf 'function\tbaddays a\tFUSE: none\n' >>"$RISER_SKIP_LOG""#;
        let cases = [
            ("true".to_owned(), "ok", (1, 0, 0)),
            (skips.to_owned(), "skipped", (0, 0, 1)),
            // The case continued after the skip, but then failed.
            (format!("{skips}; false"), "FAILED", (0, 1, 0)),
            ("true".to_owned(), "ok", (1, 0, 0)),
        ];
        let mut all = Tally::default();
        for (script, expected, numbers) in cases {
            let (word, tally, error) = try_case(sh::cmd("sh", ["-c", &script]));
            assert_eq!(word, expected, "{script}");
            let counts = tally.counts(Kind::Function);
            let skipped = tally.skipped(Kind::Function);
            assert_eq!((counts.passed, counts.failed, skipped), numbers, "{script}");
            assert_eq!(error.is_some(), word == "FAILED");
            all.merge(tally);
        }
        assert_eq!(
            all.in_a_row(),
            "test functions: 2 passed, 1 failed, 1 skipped"
        );
    }
}
