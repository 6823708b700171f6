//! `cargo xtask sim --mutants`: modifies the state machines and checks that the simulator detects
//! these changes.
//!
//! `cargo mutants` is used to list possible changes. For each state machine, we add a sample of
//! them to a single program, using switches ([`super::switches`]). This way, a mutant requires only
//! time for its seeds, but no build. If a mutant doesn't compile, it's replaced by the next mutant.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::fs;
use std::sync::LazyLock;
use std::time::{Duration, Instant};

use proc_macro2::LineColumn;
use serde::Deserialize;
use serde_json::Value;
use sha2::{Digest, Sha256};

use super::copy::{Copy, Run};
use super::judge::Judge;
use super::switches::{Lines, Mutant, switched};
use crate::cases::{self, select};
use crate::packages::have_program;
use crate::{Failure, sh};

/// Sample size: number of mutants per state machine that must compile.
const SAMPLE: usize = 10;

/// Minimum number of mutants in the sample that must be detected for each state machine. We can't
/// require all of them, because some mutants don't change the behavior.
const FLOOR: usize = 5;

/// Time limit for the seeds of a mutant. This is also used to detect an infinite loop.
const PATIENCE: Duration = Duration::from_secs(1200);

/// A state machine and the source files with its transitions.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Machine {
    name: String,
    folder: String,
    files: Vec<String>,
    judge: Option<String>,
}

/// All state machines that use `riser_state::become_state`.
static MACHINES: LazyLock<Vec<Machine>> =
    LazyLock::new(|| cases::read(include_str!("../../cases/machines.toml")));

/// Mutants of a state machine.
struct Sample {
    machine: &'static Machine,
    /// Total number of mutants listed by `cargo mutants`.
    listed: usize,
    /// Mutants to test.
    chosen: Vec<Mutant>,
    /// Mutants used to replace mutants that don't compile, in order.
    spare: VecDeque<Mutant>,
    unviable: Vec<Mutant>,
}

impl Machine {
    fn paths(&self) -> impl Iterator<Item = String> + '_ {
        self.files
            .iter()
            .map(|file| format!("{}/{file}", self.folder))
    }

    fn judge(&self) -> Judge<'_> {
        let named = |words| Judge::named(words).unwrap_or_else(|| panic!("unknown judge {words}"));
        self.judge.as_deref().map_or(Judge::Simulator, named)
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
    let (mut samples, mut last) = (Vec::new(), 0);
    for machine in machines {
        samples.push(Sample::of(&copy, machine, &mut last)?);
    }
    build(&copy, &mut samples)?;
    // If this fails, every mutant would be reported as detected.
    let judges: BTreeSet<_> = samples
        .iter()
        .map(|sample| sample.machine.judge())
        .collect();
    for judge in judges {
        let end = judge.run(&copy, None, seeds, PATIENCE)?;
        is_clean(&judge.runs(seeds), end)?;
    }
    let mut below = Vec::new();
    for sample in &samples {
        let name = &sample.machine.name;
        let mut counts = BTreeMap::new();
        for mutant in &sample.chosen {
            let start = Instant::now();
            let (verdict, why) = try_one(&copy, sample.machine, mutant, seeds)?;
            *counts.entry(verdict).or_insert(0) += 1;
            let seconds = start.elapsed().as_secs();
            println!("{name}: {verdict} {}: {why} ({seconds} s)", mutant.name);
        }
        for mutant in &sample.unviable {
            println!("{name}: unviable {}", mutant.name);
        }
        println!("{name}: {counts:?} of {}", sample.listed);
        below.extend(shortfall(sample.machine, &counts));
        below.extend(sample.lack());
    }
    copy.restore()?;
    match below.is_empty() {
        true => Ok(()),
        false => Err(format!(
            "too few mutants were detected or tried: {}",
            below.join(", ")
        )
        .into()),
    }
}

/// Returns an error if a run without mutants has failed.
fn is_clean(what: &str, run: Run) -> Result<(), Failure> {
    match run {
        Run::Clean => Ok(()),
        Run::Hung => Err(format!("{what} hangs or dies without a mutant").into()),
        Run::Failed(seed, why) => {
            Err(format!("{what}: {}fails without a mutant: {why}", at(seed)).into())
        }
    }
}

/// Formats the failed seed for use before the reason.
fn at(seed: Option<u64>) -> String {
    seed.map_or_else(String::new, |seed| format!("seed {seed}: "))
}

/// Returns a message if not enough mutants of this state machine were detected.
fn shortfall(machine: &Machine, counts: &BTreeMap<&str, usize>) -> Option<String> {
    let count = |verdict| counts.get(verdict).copied().unwrap_or(0);
    let noticed = count("caught") + count("hangs or dies");
    let least = FLOOR.min(noticed + count("missed"));
    (noticed < least).then(|| format!("{} ({noticed}, not {least})", machine.name))
}

fn try_one(
    copy: &Copy,
    machine: &Machine,
    mutant: &Mutant,
    seeds: u64,
) -> Result<(&'static str, String), Failure> {
    let number = mutant.number.to_string();
    let end = machine.judge().run(copy, Some(&number), seeds, PATIENCE)?;
    Ok(match end {
        Run::Clean => ("missed", String::new()),
        Run::Hung => ("hangs or dies", String::new()),
        Run::Failed(seed, why) => ("caught", at(seed) + &why),
    })
}

impl Sample {
    /// Chooses mutants of a state machine and numbers them, starting after `last`. The choice is
    /// always the same and is spread over all mutants.
    fn of(copy: &Copy, machine: &'static Machine, last: &mut usize) -> Result<Self, Failure> {
        let mut command = sh::cargo(["mutants", "--list", "--json", "--no-config"]);
        command.current_dir(copy.path(""));
        for path in machine.paths() {
            command.args(["--file", &path]);
        }
        let listed: Vec<Value> = serde_json::from_str(&sh::output(&mut command)?)?;
        let mut mutants = Vec::new();
        for listed in &listed {
            let file = listed["file"].as_str().unwrap_or_default();
            let source = fs::read_to_string(copy.path(file))?;
            let text = |key: &str| listed[key].as_str().unwrap_or_default().to_owned();
            let mutant = Mutant {
                number: 0,
                place: Lines::of(&source).at(place(&listed["span"]["start"])),
                genre: text("genre"),
                replacement: text("replacement"),
                name: text("name"),
                file: file.to_owned(),
            };
            // If a mutant can't have a switch, for example in a constant, it would have to be
            // replaced later.
            let is_switched = switched(&source, std::slice::from_ref(&mutant))?
                .without
                .is_empty();
            mutants.extend(is_switched.then_some(mutant));
        }
        // Sort by a hash of the name without the location, so that changes in other code don't
        // change the sample.
        mutants.sort_by_cached_key(|mutant| {
            let name = mutant.name.splitn(4, ':').last().unwrap_or_default();
            Sha256::digest(name.as_bytes()).to_vec()
        });
        for mutant in &mut mutants {
            *last += 1;
            mutant.number = *last;
        }
        let mut sample = Self {
            machine,
            listed: listed.len(),
            chosen: Vec::new(),
            spare: mutants.into(),
            unviable: Vec::new(),
        };
        sample.fill();
        Ok(sample)
    }

    /// Adds more mutants if available.
    fn fill(&mut self) {
        let places = SAMPLE - self.chosen.len();
        let next = self.spare.drain(..places.min(self.spare.len()));
        self.chosen.extend(next);
    }

    /// Replaces mutants that don't compile.
    fn replace(&mut self, unviable: &BTreeSet<usize>) {
        let is_unviable = |mutant: &mut Mutant| unviable.contains(&mutant.number);
        self.unviable
            .extend(self.chosen.extract_if(.., is_unviable));
        self.fill();
    }

    /// Returns a message if there are enough mutants for a full sample, but not enough of them
    /// compile.
    fn lack(&self) -> Option<String> {
        let (name, tried) = (&self.machine.name, self.chosen.len());
        let is_short = tried < SAMPLE && self.listed >= SAMPLE;
        is_short.then(|| format!("{name} ({tried} of {} compile)", self.listed))
    }
}

/// Converts a location from `cargo mutants`, where columns start at 1.
fn place(of: &Value) -> LineColumn {
    let number = |key: &str| of[key].as_u64().unwrap_or(1) as usize;
    LineColumn {
        line: number("line"),
        column: number("column") - 1,
    }
}

/// Builds the simulator with all samples. Mutants that don't compile are replaced.
fn build(copy: &Copy, samples: &mut [Sample]) -> Result<(), Failure> {
    copy.restore()?;
    let mut sources = BTreeMap::new();
    for file in samples.iter().flat_map(|sample| sample.machine.paths()) {
        let source = fs::read_to_string(copy.path(&file))?;
        sources.insert(file, source);
    }
    loop {
        let chosen = || samples.iter().flat_map(|sample| &sample.chosen);
        println!("building the simulator with {} mutants", chosen().count());
        let mut ranges = BTreeMap::new();
        for (file, source) in &sources {
            let here: Vec<_> = chosen().filter(|m| m.file == *file).cloned().collect();
            let with_switches = switched(source, &here)?;
            let path = copy.path(file);
            if fs::read_to_string(&path)? != with_switches.text {
                fs::write(path, &with_switches.text)?;
            }
            ranges.insert(file.as_str(), with_switches.ranges);
        }
        let mut command = copy.building();
        // Packages that are not part of the simulator.
        let judges = samples.iter().map(|sample| sample.machine.judge());
        let packages: BTreeSet<_> = judges.filter_map(Judge::package).collect();
        command.args(packages.into_iter().flat_map(|name| ["--package", name]));
        let out = command.arg("--message-format=json").output()?;
        if out.status.success() {
            return Ok(());
        }
        let mut unviable = BTreeSet::new();
        for (file, at) in errors(&String::from_utf8_lossy(&out.stdout)) {
            let ranges = ranges.get(file.as_str()).into_iter().flatten();
            let here = ranges.filter(|(range, _)| range.contains(&at));
            unviable.extend(here.map(|(_, number)| *number));
        }
        if unviable.is_empty() {
            let why = String::from_utf8_lossy(&out.stderr).into_owned();
            return Err(format!("compilation failed, but not because of a mutant\n{why}").into());
        }
        for sample in &mut *samples {
            sample.replace(&unviable);
        }
    }
}

/// Returns the file and byte offset of each compiler error.
fn errors(messages: &str) -> Vec<(String, usize)> {
    let mut found = Vec::new();
    for message in sh::messages(messages) {
        let message = &message["message"];
        if message["level"] != "error" {
            continue;
        }
        for span in message["spans"].as_array().into_iter().flatten() {
            if let (Some(file), Some(at)) =
                (span["file_name"].as_str(), span["byte_start"].as_u64())
            {
                found.push((file.to_owned(), at as usize));
            }
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use walkdir::WalkDir;

    use super::*;
    use crate::root;

    #[test]
    fn too_many_missed_mutants_are_reported() {
        let machine = &MACHINES[0];
        let of = |caught, dead, missed| {
            let counts = [
                ("caught", caught),
                ("hangs or dies", dead),
                ("missed", missed),
            ];
            shortfall(machine, &counts.into())
        };
        assert_eq!(of(FLOOR, 0, 5), None);
        assert_eq!(of(FLOOR - 1, 1, 5), None);
        assert!(of(FLOOR - 1, 0, 6).is_some());
        // There are fewer mutants than the minimum, but all of them were detected.
        assert_eq!(of(2, 0, 0), None);
        assert!(of(1, 0, 1).unwrap().contains(&machine.name));
    }

    #[test]
    fn uncompilable_mutant_is_replaced() {
        let mutant = |number| Mutant {
            number,
            file: String::new(),
            place: 0,
            genre: String::new(),
            replacement: String::new(),
            name: String::new(),
        };
        let mut sample = Sample {
            machine: &MACHINES[0],
            listed: SAMPLE + 3,
            chosen: Vec::new(),
            spare: (1..SAMPLE + 3).map(mutant).collect(),
            unviable: Vec::new(),
        };
        sample.fill();
        assert_eq!((sample.chosen.len(), sample.spare.len()), (SAMPLE, 2));
        // One of the numbers belongs to another state machine.
        sample.replace(&[3, 4, 99].into());
        assert_eq!(sample.unviable.len(), 2);
        let numbers: Vec<_> = sample.chosen.iter().map(|mutant| mutant.number).collect();
        let viable = (1..SAMPLE + 3).filter(|number| ![3, 4].contains(number));
        assert_eq!(numbers, viable.collect::<Vec<_>>());
        assert_eq!(sample.lack(), None);
        sample.replace(&[SAMPLE + 2].into());
        let lack = sample.lack().unwrap();
        assert!(lack.contains(&sample.machine.name), "{lack}");
        // There are no more mutants.
        sample.listed = SAMPLE - 1;
        assert_eq!(sample.lack(), None);
    }

    #[test]
    fn state_tables_belong_to_machines() {
        let crates = [
            "block",
            "exports",
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
