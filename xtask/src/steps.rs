//! Steps of `cargo xtask test` and `cargo xtask check`: run in order, timed and counted.

use std::collections::BTreeSet;
use std::fs;
use std::process::Command;
use std::time::{Duration, Instant};

use crate::packages::{Need, ensure, have_program, missing};
use crate::tally::{Kind, Skip, Tally, noted, skip_log};
use crate::{Failure, sh, tidy};

/// End of a step.
pub(crate) enum Outcome {
    /// It was tried: its counts, and what went wrong if something did.
    Ran(Tally, Option<String>),
    /// It could not be tried: what is in it, if that is more than one check, and why.
    Skipped(Vec<(Kind, String)>, String),
}

impl Outcome {
    /// Something that succeeds or fails as a whole.
    pub(crate) fn of(result: Result<(), Failure>) -> Self {
        Self::Ran(
            Tally::check(result.is_ok()),
            result.err().map(|e| e.to_string()),
        )
    }

    /// A check that could not be tried.
    pub(crate) fn skipped(why: String) -> Self {
        Self::Skipped(Vec::new(), why)
    }
}

/// A step of a run: it has a name, needs, and a result that is counted.
pub(crate) struct Step {
    pub(crate) name: &'static str,
    /// Runs with `--all` only.
    is_extra: bool,
    /// Programs that it uses, as far as they are there.
    needs: &'static [&'static [Need]],
    /// Programs without which it is skipped.
    required: &'static [Need],
    /// The program of a crate without which it is skipped.
    of_crate: Option<&'static str>,
    run: fn(&Run) -> Outcome,
}

/// The run that a step is part of.
pub(crate) struct Run {
    /// Steps of `--all` are part of it.
    pub(crate) all: bool,
    /// No word selects steps.
    pub(crate) is_whole: bool,
    /// Harnesses of test functions that run at once.
    pub(crate) lanes: usize,
}

/// A step of every run.
pub(crate) const fn step(name: &'static str, run: fn(&Run) -> Outcome) -> Step {
    Step {
        name,
        is_extra: false,
        needs: &[],
        required: &[],
        of_crate: None,
        run,
    }
}

impl Step {
    /// Makes it a step of `--all`.
    pub(crate) const fn extra(self) -> Self {
        Self {
            is_extra: true,
            ..self
        }
    }

    /// Names the programs that it uses. What lacks one of them is skipped within the step.
    pub(crate) const fn needing(self, needs: &'static [&'static [Need]]) -> Self {
        Self { needs, ..self }
    }

    /// Names the programs without which the whole step is skipped.
    pub(crate) const fn requiring(self, required: &'static [Need]) -> Self {
        Self { required, ..self }
    }

    /// Names the program of a crate without which the whole step is skipped.
    pub(crate) const fn requiring_crate(self, program: &'static str) -> Self {
        Self {
            of_crate: Some(program),
            ..self
        }
    }

    fn all_needs(&self) -> impl Iterator<Item = &'static Need> {
        self.needs.iter().copied().flatten().chain(self.required)
    }

    /// The reason why the step cannot be tried here, if there is one. It is asked for before the
    /// step builds anything, and after what may be installed has been.
    fn obstacle(&self) -> Option<String> {
        let missing = missing(self.required);
        if !missing.is_empty() {
            let programs = missing.iter().map(|need| need.program);
            let programs = programs.collect::<Vec<_>>().join(", ");
            return Some(format!("missing: {programs}"));
        }
        let lacking = |name| have_program(name).err().map(|e| e.to_string());
        self.of_crate.and_then(lacking)
    }
}

pub(crate) const FMT: Step = step("fmt", |_| check(sh::cargo(["fmt", "--all", "--check"])));
pub(crate) const CLIPPY: Step = step("clippy", |_| check(clippy()));
pub(crate) const DOC: Step = step("doc", |_| check(doc()));
pub(crate) const TIDY: Step = step("tidy", |_| Outcome::of(tidy::check()));
pub(crate) const DEPENDENCIES: Step = step("unused dependencies", |_| {
    Outcome::of(tidy::check_dependencies())
});

pub(crate) fn clippy() -> Command {
    let args = "clippy -q --workspace --all-targets -- -D warnings";
    sh::cargo(args.split(' '))
}

pub(crate) fn doc() -> Command {
    let mut command = sh::cargo(["doc", "-q", "--workspace", "--no-deps"]);
    command.env("RUSTDOCFLAGS", "-D warnings");
    command
}

/// Options about steps.
#[derive(clap::Args)]
pub(crate) struct Selection {
    /// Run only the steps whose name contains one of these words.
    only: Vec<String>,
    /// List the steps.
    #[arg(long)]
    list: bool,
}

impl Selection {
    /// Without words, a run is whole.
    pub(crate) fn is_whole(&self) -> bool {
        self.only.is_empty()
    }
}

/// Runs the steps; fails if one did.
pub(crate) fn run(steps: &[Step], selection: &Selection, run: &Run) -> Result<(), Failure> {
    if selection.list {
        for step in steps {
            let note = if step.is_extra { "  (--all)" } else { "" };
            println!("{}{note}", step.name);
        }
        return Ok(());
    }
    let steps = chosen(steps, selection, run)?;
    // All together, so that a question about them comes before hours of work, and once.
    ensure(steps.iter().flat_map(|step| step.all_needs()));
    // What an earlier process with this number has left.
    let _ = fs::remove_file(skip_log());
    let (mut tally, mut rows, mut failures) = (Tally::default(), Vec::new(), Vec::new());
    for step in steps {
        println!("── {}", step.name);
        let started = Instant::now();
        let outcome = match step.obstacle() {
            Some(why) => Outcome::skipped(why),
            None => (step.run)(run),
        };
        let took = started.elapsed();
        let (how, mut counts) = match outcome {
            Outcome::Ran(counts, None) => ("ok", counts),
            Outcome::Ran(mut counts, Some(why)) => {
                // At once and not with the summary: a run of hours may be ended by hand before
                // that.
                println!("{why}");
                failures.push(failure(step.name, &why));
                // Something that is no test of its own went wrong, as a build.
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
        // Skips that the step has not taken itself are still its own, so they are read before the
        // next one begins.
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
    // Again, as the end of a long output is what is looked at first, and sometimes all that is kept.
    for failure in failures {
        println!("{failure}");
    }
    match tally.total().failed {
        0 => Ok(()),
        failed => Err(format!("{failed} failed").into()),
    }
}

/// The steps that a run consists of. A word that no step's name contains is a mistake: without this
/// check, such a run would succeed by running nothing.
fn chosen<'a>(
    steps: &'a [Step],
    selection: &Selection,
    run: &Run,
) -> Result<Vec<&'a Step>, Failure> {
    let only = &selection.only;
    for word in only {
        if !steps.iter().any(|step| step.name.contains(word)) {
            return Err(format!("no step's name contains \"{word}\"; --list names them").into());
        }
    }
    let is_wanted = |step: &&Step| {
        let named = only.iter().any(|word| step.name.contains(word));
        // A step that is named runs in any case.
        named || (run.is_whole && (run.all || !step.is_extra))
    };
    Ok(steps.iter().filter(is_wanted).collect())
}

/// A step that could not be tried: everything that is in it was skipped.
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

/// Why a step failed, in its last lines.
fn failure(name: &str, why: &str) -> String {
    const LINES: usize = 10;
    let lines: Vec<_> = why.lines().filter(|line| !line.is_empty()).collect();
    let last = &lines[lines.len().saturating_sub(LINES)..];
    format!("FAILED   {name}: {}", last.join("\n         "))
}

/// A program that succeeds or fails as a whole.
pub(crate) fn check(mut command: Command) -> Outcome {
    Outcome::of(sh::output(&mut command).map(drop))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::packages::need;
    use crate::{conformance, interop};

    /// A step that fails the test if it is run.
    const NEVER: Step = step("one of these", |_| panic!("the step runs"));

    fn selection(words: &[&str]) -> Selection {
        Selection {
            only: words.iter().map(|word| (*word).to_owned()).collect(),
            list: false,
        }
    }

    fn names(words: &[&str], all: bool) -> Result<Vec<&'static str>, Failure> {
        const STEPS: &[Step] = &[NEVER, step("another", |_| panic!("it runs")).extra()];
        let selection = selection(words);
        let run = Run {
            all,
            is_whole: selection.is_whole(),
            lanes: 1,
        };
        let chosen = chosen(STEPS, &selection, &run)?;
        Ok(chosen.iter().map(|step| step.name).collect())
    }

    #[test]
    fn steps_are_chosen_by_words_of_their_names() {
        assert_eq!(names(&[], false).unwrap(), ["one of these"]);
        assert_eq!(names(&[], true).unwrap(), ["one of these", "another"]);
        assert_eq!(names(&["other"], false).unwrap(), ["another"]);
        assert_eq!(names(&["one", "another"], false).unwrap().len(), 2);
    }

    #[test]
    fn a_failure_is_repeated_with_its_last_lines() {
        assert_eq!(failure("tidy", "a\n\nb\n"), "FAILED   tidy: a\n         b");
        let long = (0..30).map(|n| format!("{n}\n")).collect::<String>();
        let text = failure("tests", &long);
        assert!(text.starts_with("FAILED   tests: 20\n"), "{text}");
        assert!(text.ends_with(" 29"), "{text}");
    }

    #[test]
    fn a_word_of_no_step_is_a_failure() {
        let why = names(&["one", "fuzz"], false).unwrap_err().to_string();
        assert_eq!(why, "no step's name contains \"fuzz\"; --list names them");
    }

    #[test]
    fn a_step_that_lacks_a_program_is_not_run() {
        const LACKING: &[Need] = &[
            need("sh", "dash", "nothing"),
            need("no-such-program", "no-such-package", "nothing"),
        ];
        const HERE: &[Need] = &[need("sh", "dash", "nothing")];
        let why = NEVER.requiring(LACKING).obstacle();
        assert_eq!(why.as_deref(), Some("missing: no-such-program"));
        assert_eq!(NEVER.requiring(HERE).obstacle(), None);
        assert_eq!(NEVER.needing(&[LACKING]).obstacle(), None);
    }

    #[test]
    fn all_that_is_in_a_step_is_skipped_with_it() {
        let cases = interop::names(&interop::Options::for_test(true)).unwrap();
        assert!(cases.len() > 50, "{}", cases.len());
        let number = cases.len() as u64;
        let cases = cases.into_iter().map(|name| (Kind::Case, name)).collect();
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
