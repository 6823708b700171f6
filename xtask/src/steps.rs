//! Steps of `cargo xtask test` and `cargo xtask check`. They run in order, and we record the time
//! and the number of tests.

use std::collections::BTreeSet;
use std::fs;
use std::process::Command;
use std::time::{Duration, Instant};

use crate::cases::select;
use crate::packages::{Need, ensure, have_program, missing, needs};
use crate::tally::{Kind, Outcome, Skip, Tally, noted, skip_log};
use crate::{Failure, sh, tidy};

/// Selects the steps of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Suite {
    /// Steps for every change.
    Everyday,
    /// Longer steps, which run before a change is merged.
    Full,
    /// All steps, including steps that take hours or need other privileges.
    All,
}

impl Suite {
    fn includes(self, other: Self) -> bool {
        self == Self::All || self == other
    }

    fn option(self) -> &'static str {
        match self {
            Self::Everyday => "",
            Self::Full => "  (--full)",
            Self::All => "  (--all)",
        }
    }
}

/// A step of a run. Every step has a name and requirements, and returns counts.
pub(crate) struct Step {
    pub(crate) name: &'static str,
    suite: Suite,
    /// Programs to use if available, by their names in `packages.toml`.
    needs: &'static str,
    /// Programs that must be available; otherwise the step is skipped.
    required: &'static str,
    /// Crate program that must be available; otherwise the step is skipped.
    of_crate: Option<&'static str>,
    run: fn(&Run) -> Outcome,
}

/// Options of the current run, passed to every step.
pub(crate) struct Run {
    pub(crate) suite: Suite,
    /// Number of parallel test harnesses.
    pub(crate) lanes: usize,
    /// Time after which no step is started, if limited.
    pub(crate) until: Option<Instant>,
}

pub(crate) const fn step(name: &'static str, run: fn(&Run) -> Outcome) -> Step {
    Step {
        name,
        suite: Suite::Everyday,
        needs: "",
        required: "",
        of_crate: None,
        run,
    }
}

impl Step {
    /// Moves this step to another suite.
    pub(crate) const fn suite(self, suite: Suite) -> Self {
        Self { suite, ..self }
    }

    /// Sets the programs used by this step. If a program is missing, the step skips just the tests
    /// that need it.
    pub(crate) const fn needing(self, needs: &'static str) -> Self {
        Self { needs, ..self }
    }

    pub(crate) const fn requiring(self, required: &'static str) -> Self {
        Self { required, ..self }
    }

    pub(crate) const fn requiring_crate(self, program: &'static str) -> Self {
        Self {
            of_crate: Some(program),
            ..self
        }
    }

    pub(crate) fn all_needs(&self) -> impl Iterator<Item = &'static Need> {
        needs(self.needs).chain(needs(self.required))
    }

    /// Returns the reason why this step can't run here, if any. We check this before the step
    /// builds anything, but after missing packages were installed.
    fn obstacle(&self, run: &Run) -> Option<String> {
        if run.until.is_some_and(|until| until <= Instant::now()) {
            return Some("no time left (--minutes)".to_owned());
        }
        let programs = missing_programs(needs(self.required));
        if programs.is_some() {
            return programs;
        }
        let lacking = |name| have_program(name).err().map(|e| e.to_string());
        self.of_crate.and_then(lacking)
    }
}

/// Returns a message with the missing programs, if any.
fn missing_programs(needs: impl Iterator<Item = &'static Need>) -> Option<String> {
    let missing = missing(needs);
    let programs: Vec<_> = missing.iter().map(|need| need.program.as_str()).collect();
    (!programs.is_empty()).then(|| format!("missing: {}", programs.join(", ")))
}

pub(crate) const FMT: Step = step("fmt", |_| check(sh::cargo(["fmt", "--all", "--check"])));
pub(crate) const CLIPPY: Step = step("clippy", |_| check(clippy()));
pub(crate) const DOC: Step = step("doc", |_| check(doc()));
pub(crate) const TIDY: Step = step("tidy", |_| tidy::check().into());
pub(crate) const DEPENDENCIES: Step =
    step("unused dependencies", |_| tidy::check_dependencies().into());

pub(crate) fn clippy() -> Command {
    let args = "clippy -q --workspace --all-targets -- -D warnings";
    sh::cargo(args.split(' '))
}

pub(crate) fn doc() -> Command {
    let mut command = sh::cargo(["doc", "-q", "--workspace", "--no-deps"]);
    command.env("RUSTDOCFLAGS", "-D warnings");
    command
}

/// Options to select steps.
#[derive(clap::Args)]
pub(crate) struct Selection {
    /// Run only the steps whose name contains one of these words.
    only: Vec<String>,
    /// List the steps.
    #[arg(long)]
    list: bool,
}

/// Runs the steps and returns an error if any step failed.
pub(crate) fn run(steps: &[Step], selection: &Selection, run: &Run) -> Result<(), Failure> {
    if selection.list {
        for step in steps {
            println!("{}{}", step.name, step.suite.option());
        }
        return Ok(());
    }
    let steps = chosen(steps, selection, run)?;
    // Handle the needs of all steps at once, so that the user only gets a single prompt, before
    // hours of work.
    ensure(steps.iter().flat_map(|step| step.all_needs()));
    // Remove the log of an earlier process with the same ID.
    let _ = fs::remove_file(skip_log());
    let (mut tally, mut rows, mut failures) = (Tally::default(), Vec::new(), Vec::new());
    for step in steps {
        println!("── {}", step.name);
        let started = Instant::now();
        let outcome = match step.obstacle(run) {
            Some(why) => Outcome::skipped(why),
            None => (step.run)(run),
        };
        let took = started.elapsed();
        let (how, mut counts) = match outcome {
            Outcome::Ran(counts, None) => ("ok", counts),
            Outcome::Ran(mut counts, Some(why)) => {
                // Print this now instead of in the summary: the run takes hours, and the user may
                // interrupt it first.
                println!("{why}");
                failures.push(failure(step.name, &why));
                // The failure was not in a test, but for example in a build.
                if counts.total().failed == 0 {
                    counts.merge(Tally::check(false));
                }
                ("FAILED", counts)
            }
            Outcome::Skipped(things, why) => {
                println!("{why}");
                ("skipped", without(step.name, things, &why))
            }
        };
        // Any skips not read by the step still belong to it, so we need to read them before the
        // next step starts.
        counts.take_skips(noted(), &BTreeSet::new());
        let row = row(step.name, how, took, &counts.in_a_row());
        println!("{row}");
        rows.push(row);
        tally.merge(counts);
    }
    println!("\n{}\n", rows.join("\n"));
    for line in tally.reasons() {
        println!("{line}");
    }
    println!("\n{tally}");
    // Print the failures again at the end, because this is the first part of the output that users
    // read, and sometimes all they keep.
    for failure in failures {
        println!("{failure}");
    }
    match tally.total().failed {
        0 => Ok(()),
        failed => Err(format!("{failed} failed").into()),
    }
}

/// Returns the steps to run. A step selected by name always runs.
fn chosen<'a>(
    steps: &'a [Step],
    selection: &Selection,
    run: &Run,
) -> Result<Vec<&'a Step>, Failure> {
    let is_named = |step: &&Step, word: &str| step.name.contains(word);
    let mut chosen = select(steps, &selection.only, "step", is_named)?;
    chosen.retain(|step| !selection.only.is_empty() || run.suite.includes(step.suite));
    Ok(chosen)
}

fn without(step: &str, mut things: Vec<(Kind, String)>, why: &str) -> Tally {
    if things.is_empty() {
        things.push((Kind::Check, step.to_owned()));
    }
    let skip = |(kind, name)| Skip {
        kind,
        name,
        why: why.to_owned(),
    };
    let mut tally = Tally::default();
    tally.take_skips(things.into_iter().map(skip).collect(), &BTreeSet::new());
    tally
}

fn row(name: &str, how: &str, took: Duration, more: &str) -> String {
    format!("{how:<8} {name:<36} {:>7.1} s  {more}", took.as_secs_f64())
}

fn failure(name: &str, why: &str) -> String {
    const LINES: usize = 10;
    let last = sh::last_lines(why, LINES);
    format!("FAILED   {name}: {}", last.join("\n         "))
}

pub(crate) fn check(mut command: Command) -> Outcome {
    sh::output(&mut command).map(drop).into()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{conformance, interop};

    /// A step that makes the test fail if it's ever run.
    const NEVER: Step = step("one of these", |_| panic!("the step runs"));

    fn selection(words: &[&str]) -> Selection {
        Selection {
            only: words.iter().map(|word| (*word).to_owned()).collect(),
            list: false,
        }
    }

    fn names(words: &[&str], suite: Suite) -> Result<Vec<&'static str>, Failure> {
        const STEPS: &[Step] = &[
            NEVER,
            step("another", |_| panic!("it runs")).suite(Suite::Full),
            step("third", |_| panic!("it runs")).suite(Suite::All),
        ];
        let run = Run {
            suite,
            lanes: 1,
            until: None,
        };
        let chosen = chosen(STEPS, &selection(words), &run)?;
        Ok(chosen.iter().map(|step| step.name).collect())
    }

    #[test]
    fn steps_are_selected_by_name() {
        assert_eq!(names(&["other"], Suite::Everyday).unwrap(), ["another"]);
        let both = names(&["one", "another"], Suite::Everyday);
        assert_eq!(both.unwrap(), ["one of these", "another"]);
    }

    #[test]
    fn steps_are_selected_by_suite() {
        assert_eq!(names(&[], Suite::Everyday).unwrap(), ["one of these"]);
        assert_eq!(names(&[], Suite::Full).unwrap(), ["another"]);
        let all = names(&[], Suite::All).unwrap();
        assert_eq!(all, ["one of these", "another", "third"]);
    }

    #[test]
    fn failure_shows_last_output_lines() {
        assert_eq!(failure("tidy", "a\n\nb\n"), "FAILED   tidy: a\n         b");
        let long = (0..30).map(|n| format!("{n}\n")).collect::<String>();
        let text = failure("tests", &long);
        assert!(text.starts_with("FAILED   tests: 20\n"), "{text}");
        assert!(text.ends_with(" 29"), "{text}");
    }

    #[test]
    fn unknown_step_name_fails() {
        let why = names(&["one", "fuzz"], Suite::All).unwrap_err().to_string();
        assert_eq!(why, "unknown step \"fuzz\"");
    }

    #[test]
    fn step_without_program_is_skipped() {
        let missing = |programs: &[&str]| {
            let need = |program: &&str| -> &'static Need {
                Box::leak(Box::new(Need {
                    program: (*program).to_owned(),
                    package: "no-such-package".to_owned(),
                    purpose: "nothing".to_owned(),
                }))
            };
            missing_programs(programs.iter().map(need))
        };
        let why = missing(&["sh", "no-such-program"]);
        assert_eq!(why.as_deref(), Some("missing: no-such-program"));
        assert_eq!(missing(&["sh"]), None);
    }

    #[test]
    fn step_is_skipped_after_time_limit() {
        let run = |until| Run {
            suite: Suite::Everyday,
            lanes: 1,
            until,
        };
        let now = Instant::now();
        let why = NEVER.obstacle(&run(Some(now)));
        assert_eq!(why.as_deref(), Some("no time left (--minutes)"));
        let later = now + Duration::from_secs(600);
        assert_eq!(NEVER.obstacle(&run(Some(later))), None);
    }

    #[test]
    fn skipped_step_skips_its_checks() {
        let cases = interop::case::load(&[], false).unwrap();
        assert!(cases.len() > 50, "{}", cases.len());
        let number = cases.len() as u64;
        let cases = cases.iter().map(|case| (Kind::Case, case.path())).collect();
        let tally = without("interop", cases, "no kernel");
        assert_eq!(tally.skipped(Kind::Case), number);
        assert_eq!(tally.skipped(Kind::Check), 0);
        let tally = without("conformance", conformance::parts(), "no client");
        assert_eq!(tally.skipped(Kind::SuiteTest), 1, "the number is unknown");
        assert_eq!(tally.skipped(Kind::Check), 12);
        let tally = without("container", Vec::new(), "no image");
        assert_eq!(tally.skipped(Kind::Check), 1);
        assert_eq!(tally.reasons(), ["skipped  checks: container (no image)"]);
    }
}
