//! `cargo xtask sim --planted`: defects that were found by reading, put back one at a time. The
//! simulator must find each.
//!
//! A patch of `tests/sim/planted` begins with plain words about its defect, and with lines
//! `expects: WORDS`: the failure must contain the words of one of them. Patches are maintained with
//! the code, so one that does not apply is a failure.

use std::fs;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use super::copy::{Copy, Run};
use crate::{Failure, root};

/// Time that the simulator may take for them.
const PATIENCE: Duration = Duration::from_secs(3600);

/// Words for a simulator that counts no steps any more.
const HANGS: &str = "the simulator hangs or dies";

/// A planted defect.
#[derive(Clone, Debug)]
struct Planted {
    name: String,
    path: PathBuf,
    /// Words of which its failure has some.
    expected: Vec<String>,
}

impl Planted {
    fn of(path: PathBuf) -> Result<Self, Failure> {
        let text = fs::read_to_string(&path)?;
        let head = text.lines().take_while(|line| !line.starts_with("diff "));
        let expected = head.filter_map(|line| line.strip_prefix("expects: "));
        let expected: Vec<_> = expected.map(|words| words.trim().to_owned()).collect();
        let name = path.file_stem().unwrap_or_default();
        let name = name.to_string_lossy().into_owned();
        if expected.is_empty() || !text.contains(&format!("\"{name}\"")) {
            return Err(format!("{} lacks its switch or what to expect", path.display()).into());
        }
        Ok(Self {
            name,
            path,
            expected,
        })
    }
}

/// Patches whose names contain one of these words; all without words.
fn chosen(words: &[String]) -> Result<Vec<Planted>, Failure> {
    let mut paths = Vec::new();
    for entry in fs::read_dir(root().join("tests/sim/planted"))? {
        let path = entry?.path();
        let name = path.file_stem().unwrap_or_default().to_string_lossy();
        let is_meant = words.is_empty() || words.iter().any(|word| name.contains(word.as_str()));
        if is_meant && path.extension().is_some_and(|kind| kind == "patch") {
            paths.push(path);
        }
    }
    paths.sort();
    match paths.is_empty() {
        true => Err("no planted defect has such a name".into()),
        false => paths.into_iter().map(Planted::of).collect(),
    }
}

/// Plants each, and prints how many seeds it took, of so many. The tree as it is must pass as many.
pub(super) fn run(words: &[String], seeds: u64) -> Result<(), Failure> {
    let all = chosen(words)?;
    let copy = Copy::of_head()?;
    let (mut left, mut missed) = (all.clone(), 0);
    while !left.is_empty() {
        copy.restore()?;
        // Patches that change the same lines take turns.
        let mut together = Vec::new();
        let mut others = Vec::new();
        for planted in left {
            match copy.apply(&planted.path) {
                Ok(()) => together.push(planted),
                Err(why) if together.is_empty() => return Err(why),
                Err(_) => others.push(planted),
            }
        }
        left = others;
        println!("building the simulator with {} defects", together.len());
        copy.build()?;
        missed += try_all(&copy, &together, seeds)?;
    }
    copy.restore()?;
    println!(
        "{} of {} planted defects were found",
        all.len() - missed,
        all.len()
    );
    match missed {
        0 => Ok(()),
        _ => Err("the simulator has missed planted defects".into()),
    }
}

/// Runs the simulator with each; returns how many it has missed.
fn try_all(copy: &Copy, all: &[Planted], seeds: u64) -> Result<usize, Failure> {
    let (mut missed, mut most) = (0, 0);
    for planted in all {
        let start = Instant::now();
        let end = copy.simulate(Some(&planted.name), seeds, PATIENCE)?;
        let seconds = start.elapsed().as_secs();
        let expects = |why: &str| planted.expected.iter().any(|words| why.contains(words));
        let outcome = match &end {
            Run::Clean => format!("MISSED, {seeds} seeds pass"),
            Run::Hung if expects(HANGS) => HANGS.to_owned(),
            Run::Hung => format!("MISSED, {HANGS}"),
            Run::Failed(seed, why) if expects(why) => {
                most = most.max(*seed);
                format!("{seed} seeds: {why}")
            }
            Run::Failed(seed, why) => format!("MISSED, seed {seed} fails in another way: {why}"),
        };
        missed += usize::from(outcome.starts_with("MISSED"));
        println!("{}: {outcome} ({seconds} s)", planted.name);
    }
    // The same program without any of them, so the switches themselves do nothing.
    match copy.simulate(None, most, PATIENCE)? {
        Run::Clean => println!("none: {most} seeds pass"),
        Run::Failed(seed, why) => return Err(format!("without any, seed {seed}: {why}").into()),
        Run::Hung => return Err("without any, the simulator hangs or dies".into()),
    }
    Ok(missed)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sh;

    #[test]
    fn every_patch_applies() {
        for planted in chosen(&[]).unwrap() {
            let mut git = sh::cmd("git", ["apply", "--check"]);
            git.arg(&planted.path).current_dir(root());
            if let Err(why) = sh::output(&mut git) {
                panic!("{}: {why}", planted.name);
            }
        }
    }
}
