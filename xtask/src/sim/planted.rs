//! `cargo xtask sim --planted`: adds known defects to the code, one at a time. Each must be detected
//! by the simulator or by the tests listed in its patch.
//!
//! A patch in `tests/sim/planted` starts with a description of the defect and lines `expects: WORDS`.
//! The failure must contain the words of at least one such line. If the defect is not possible in the
//! simulator, a line `detector: WORDS` selects the tests to run ([`Detector::named`]). The patches are
//! maintained along with the code, so it's an error if a patch doesn't apply.

use std::collections::BTreeMap;
use std::fs;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use super::copy::{Copy, Run};
use super::detector::Detector;
use crate::cases::select;
use crate::{Failure, root};

/// Time limit for the seeds of a defect.
const PATIENCE: Duration = Duration::from_secs(3600);

/// Number of seeds or interleavings that must pass without a defect, even if all defects were
/// detected with fewer.
const CLEAN: u64 = 100;

/// Used if the simulator doesn't count steps any more, or if tests hang.
const HANGS: &str = "hangs or dies";

/// A planted defect.
#[derive(Clone, Debug)]
struct Planted {
    name: String,
    path: PathBuf,
    /// The failure must contain one of these.
    expected: Vec<String>,
    /// Selects the tests to use instead of the simulator.
    detector: Option<String>,
}

impl Planted {
    fn of(path: PathBuf) -> Result<Self, Failure> {
        let text = fs::read_to_string(&path)?;
        let head = || text.lines().take_while(|line| !line.starts_with("diff "));
        let expected = head().filter_map(|line| line.strip_prefix("expects: "));
        let expected: Vec<_> = expected.map(|words| words.trim().to_owned()).collect();
        let detector = head().find_map(|line| line.strip_prefix("detector: "));
        if detector.is_some_and(|words| Detector::named(words).is_none()) {
            return Err(format!("{}: unknown detector", path.display()).into());
        }
        let name = path.file_stem().unwrap_or_default();
        let name = name.to_string_lossy().into_owned();
        if expected.is_empty() || !text.contains(&format!("\"{name}\"")) {
            return Err(format!("{}: missing switch or expected message", path.display()).into());
        }
        Ok(Self {
            name,
            path,
            expected,
            detector: detector.map(str::to_owned),
        })
    }

    fn parse_detector(&self) -> Detector<'_> {
        let named = self.detector.as_deref().and_then(Detector::named);
        named.unwrap_or(Detector::Simulator)
    }
}

/// Returns the patches whose name contains one of these words. If there are no words, returns all
/// patches.
fn chosen(words: &[String]) -> Result<Vec<Planted>, Failure> {
    let mut all = Vec::new();
    for entry in fs::read_dir(root().join("tests/sim/planted"))? {
        let path = entry?.path();
        if path.extension().is_some_and(|kind| kind == "patch") {
            all.push(path);
        }
    }
    let mut paths = select(all, words, "planted defect", |path, word| {
        let name = path.file_stem().unwrap_or_default().to_string_lossy();
        name.contains(word)
    })?;
    paths.sort();
    match paths.is_empty() {
        true => Err("unknown planted defect".into()),
        false => paths.into_iter().map(Planted::of).collect(),
    }
}

/// Tests each defect and prints how many seeds were needed. The unmodified tree must pass with the
/// same number of seeds.
pub(super) fn run(words: &[String], seeds: u64) -> Result<(), Failure> {
    let all = chosen(words)?;
    let copy = Copy::of_head()?;
    let (mut left, mut missed) = (all.clone(), 0);
    while !left.is_empty() {
        copy.restore()?;
        // If patches change the same lines, they can't be in the same build.
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
        println!("building with {} defects", together.len());
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
        _ => Err("planted defects were missed".into()),
    }
}

/// Builds and runs the tests for each defect. Returns the number of defects that were not detected.
fn try_all(copy: &Copy, all: &[Planted], seeds: u64) -> Result<usize, Failure> {
    let (mut missed, mut most) = (0, BTreeMap::new());
    for detector in all.iter().map(Planted::parse_detector) {
        if most.insert(detector, CLEAN).is_none() {
            detector.build(copy)?;
        }
    }
    for planted in all {
        let detector = planted.parse_detector();
        let start = Instant::now();
        let end = detector.run(copy, Some(&planted.name), seeds, PATIENCE)?;
        let seconds = start.elapsed().as_secs();
        let expects = |why: &str| planted.expected.iter().any(|words| why.contains(words));
        let outcome = match &end {
            Run::Clean => Err(format!("{} pass", detector.runs(seeds))),
            Run::Hung if expects(HANGS) => Ok(HANGS.to_owned()),
            Run::Hung => Err(HANGS.to_owned()),
            Run::Failed(seed, why) => {
                let seed = seed.unwrap_or(1);
                let words = format!("{}: {why}", detector.runs(seed));
                match expects(why) {
                    true => {
                        let most = most.entry(detector).or_insert(seed);
                        *most = seed.max(*most);
                        Ok(words)
                    }
                    false => Err(format!("unexpected failure: {words}")),
                }
            }
        };
        missed += usize::from(outcome.is_err());
        let outcome = outcome.unwrap_or_else(|why| format!("MISSED, {why}"));
        println!("{}: {outcome} ({seconds} s)", planted.name);
    }
    // Run the same programs without any defect, to verify that adding the switches has no effect.
    for (detector, most) in most {
        let runs = detector.runs(most);
        match detector.run(copy, None, most, PATIENCE)? {
            Run::Clean => println!("none: {runs} pass"),
            Run::Failed(_, why) => {
                return Err(format!("without a defect, within {runs}: {why}").into());
            }
            Run::Hung => return Err(format!("without a defect, it {HANGS} within {runs}").into()),
        }
    }
    Ok(missed)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sh;

    #[test]
    fn planted_patches_apply() {
        for planted in chosen(&[]).unwrap() {
            let mut git = sh::cmd("git", ["apply", "--check"]);
            git.arg(&planted.path).current_dir(root());
            if let Err(why) = sh::output(&mut git) {
                panic!("{}: {why}", planted.name);
            }
        }
    }
}
