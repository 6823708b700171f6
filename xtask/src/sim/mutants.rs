//! `cargo xtask sim --mutants`: changes the state machines using `cargo mutants`, and checks that
//! the simulator detects a sample of these changes.

use std::fs;
use std::sync::LazyLock;

use serde::Deserialize;
use serde_json::Value;

use super::copy::Copy;
use super::detector::Detector;
use crate::cases::{self, select};
use crate::daemon::RELEASE;
use crate::packages::have_program;
use crate::{Failure, sh};

/// Sample size: number of mutants to test per state machine.
const SAMPLE: usize = 10;

/// Minimum number of mutants in the sample that must be detected for each state machine. We can't
/// require all of them, because some mutants don't change the behavior.
const FLOOR: u64 = 5;

/// Time limit for the tests of a mutant in seconds. This is also used to detect an infinite loop.
const PATIENCE: &str = "1200";

/// A state machine and the source files with its transitions.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Machine {
    name: String,
    directory: String,
    files: Vec<String>,
    detector: Option<String>,
}

/// All state machines that use `riser_state::become_state`.
static MACHINES: LazyLock<Vec<Machine>> =
    LazyLock::new(|| cases::read(include_str!("../../cases/machines.toml")));

/// Number of mutants for each result.
#[derive(Deserialize)]
struct Outcomes {
    caught: u64,
    timeout: u64,
    missed: u64,
    unviable: u64,
}

impl Machine {
    fn paths(&self) -> impl Iterator<Item = String> + '_ {
        self.files
            .iter()
            .map(|file| format!("{}/{file}", self.directory))
    }

    fn detector(&self) -> Detector<'_> {
        let named =
            |words| Detector::named(words).unwrap_or_else(|| panic!("unknown detector {words}"));
        self.detector.as_deref().map_or(Detector::Simulator, named)
    }

    fn try_sample(&self, copy: &Copy, seeds: u64) -> Result<Outcomes, Failure> {
        let mutants = || {
            let mut command = copy.cargo(&["mutants", "--no-config"]);
            command.args(self.paths().flat_map(|path| ["--file".to_owned(), path]));
            command
        };
        let listed = sh::output(mutants().args(["--list", "--json"]))?;
        let listed: Vec<Value> = serde_json::from_str(&listed)?;
        let output = copy.path("").with_file_name("mutants");
        let _ = fs::remove_dir_all(&output);
        fs::create_dir_all(&output)?;
        let detector = self.detector();
        let (package, harness, word) = detector.tests();
        let shard = format!("0/{}", listed.len().div_ceil(SAMPLE).max(1));
        let mut command = mutants();
        command.args(["--in-place", "--profile", RELEASE, "--timeout", PATIENCE]);
        command.args(["--shard", &shard, "--test-package", package, "--output"]);
        command.arg(&output).arg("--").args(harness).arg(word);
        command.envs(detector.sizes(seeds));
        // The exit status is an error if a mutant was missed, but we use the numbers.
        let status = command.status()?;
        let outcomes = fs::read_to_string(output.join("mutants.out/outcomes.json"));
        let outcomes = outcomes.map_err(|e| format!("cargo mutants: {status}: {e}"))?;
        Ok(serde_json::from_str(&outcomes)?)
    }

    /// Returns a message if not enough mutants were detected.
    fn shortfall(&self, outcomes: &Outcomes) -> Option<String> {
        let detected = outcomes.caught + outcomes.timeout;
        let least = FLOOR.min(detected + outcomes.missed).max(1);
        (detected < least).then(|| format!("{} ({detected}, not {least})", self.name))
    }
}

/// Tests samples of all state machines whose name contains one of these words (or of all state
/// machines) using the given number of seeds. Returns an error if fewer mutants were detected than
/// required.
pub(super) fn run(words: &[String], seeds: u64) -> Result<(), Failure> {
    let machines = select(MACHINES.iter(), words, "machine", |machine, word| {
        machine.name.contains(word)
    })?;
    have_program("cargo-mutants")?;
    let copy = Copy::of_head()?;
    let mut below = Vec::new();
    for machine in machines {
        let outcomes = machine.try_sample(&copy, seeds)?;
        println!(
            "{}: {} caught, {} timed out, {} missed, {} unviable",
            machine.name, outcomes.caught, outcomes.timeout, outcomes.missed, outcomes.unviable
        );
        below.extend(machine.shortfall(&outcomes));
    }
    match below.is_empty() {
        true => Ok(()),
        false => Err(format!("too few mutants were detected: {}", below.join(", ")).into()),
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use walkdir::WalkDir;

    use super::*;
    use crate::root;

    #[test]
    fn too_many_missed_mutants_are_reported() {
        let machine = &MACHINES[0];
        let of = |caught, timeout, missed| {
            machine.shortfall(&Outcomes {
                caught,
                timeout,
                missed,
                unviable: 1,
            })
        };
        assert_eq!(of(FLOOR, 0, 5), None);
        assert_eq!(of(FLOOR - 1, 1, 5), None);
        assert!(of(FLOOR - 1, 0, 6).is_some());
        // There are fewer mutants than the minimum, but all of them were detected.
        assert_eq!(of(2, 0, 0), None);
        assert!(of(1, 0, 1).unwrap().contains(&machine.name));
        assert!(of(0, 0, 0).is_some(), "no mutant was tested");
    }

    #[test]
    fn state_tables_belong_to_machines() {
        let crates = [
            "block",
            "exports",
            "file",
            "initiator",
            "scsi",
            "target",
            "transport",
        ];
        let sources = crates.map(|name| root().join(name).join("src"));
        let files = sources.iter().flat_map(WalkDir::new).filter_map(Result::ok);
        let known: BTreeSet<_> = MACHINES.iter().flat_map(Machine::paths).collect();
        let mut tables = 0;
        for file in files.filter(|f| f.path().extension().is_some_and(|e| e == "rs")) {
            let text = fs::read_to_string(file.path()).unwrap();
            let is_table = |line: &str| line.starts_with("impl") && line.contains("State for ");
            if text.lines().any(is_table) {
                let path = file.path().strip_prefix(root()).unwrap();
                let path = path.to_string_lossy().into_owned();
                assert!(known.contains(&path), "{path} is of no machine");
                tables += 1;
            }
        }
        assert!(tables > 15, "only {tables} were found");
        for path in &known {
            assert!(root().join(path).exists(), "{path} has gone");
        }
    }
}
