//! `cargo xtask instructions`: measures the number of instructions used by the target for 4 KiB
//! reads and writes.
//!
//! - [`paths`]: runs each protocol with depth 1 and 32. `riserd` is run with callgrind, and
//!   `riser` connects to it using real sockets.
//! - [`dump`]: parses the callgrind output.
//! - [`accepted`]: compares the counts with the accepted counts in `xtask/instructions.json`, both
//!   for the work and for the polling done per round.
//! - [`counting`](mod@counting): measures the cost of counting a command.
//!
//! We use callgrind directly instead of gungraun, which can only run a single program in the
//! foreground from start to exit. We need a daemon that keeps running with several clients, and we
//! must only count some of them.

mod accepted;
mod counting;
mod dump;
mod paths;

use std::collections::BTreeMap;
use std::fs;

use self::accepted::{Accepted, Cost, growth};
use self::paths::{Path4k, Rig};
use crate::packages::{ensure, needs};
use crate::tally::Outcome;
use crate::{Failure, sh};

/// Number of measurements for each path, which must be odd. The same number of runs is added if the
/// cost has increased.
const RUNS: usize = 3;
const MORE_RUNS: usize = 4;

/// Number of directories and libraries to print for a path.
const SHOWN: usize = 6;

/// CPU flags that libraries use to select functions, which also applies when running in valgrind.
const CPU_FLAGS: [&str; 4] = ["avx2", "erms", "fsrm", "pclmulqdq"];

#[derive(clap::Args)]
pub(crate) struct Options {
    /// Measure only paths that match all of these words: srp, iser or iscsi; read or write; 1 or
    /// 32.
    only: Vec<String>,
    /// Accept the new counts and write them to xtask/instructions.json.
    #[arg(long)]
    accept: bool,
    /// Measure only the cost of counting a command.
    #[arg(long, conflicts_with_all = ["only", "accept"])]
    counting: bool,
}

/// Measures and prints the counts, then compares or accepts them.
pub(crate) fn run(options: &Options) -> Result<(), Failure> {
    if !ensure(needs("instructions")).is_empty() {
        return Err("valgrind is missing".into());
    }
    if options.counting {
        return counting::run();
    }
    let chosen: Vec<_> = paths::all()
        .filter(|path| path.is_named(&options.only))
        .collect();
    if chosen.is_empty() {
        return Err(format!("unknown path: no name contains {}", options.only.join(" ")).into());
    }
    if options.accept {
        return accept(&chosen);
    }
    compare(&chosen)?.into_result()
}

/// Compares all paths with the accepted counts. This is skipped if there are no accepted counts, or
/// if they were created with other versions.
pub(crate) fn compare_all() -> Result<Outcome, Failure> {
    compare(&paths::all().collect::<Vec<_>>())
}

pub(crate) fn counting() -> Result<(), Failure> {
    counting::run()
}

fn compare(chosen: &[Path4k]) -> Result<Outcome, Failure> {
    let accepted = Accepted::load()?;
    if accepted.paths.is_empty() {
        let why = "missing accepted counts; run `cargo xtask instructions --accept`";
        return Ok(Outcome::skipped(why));
    }
    let others = accepted.other_versions(&versions()?);
    if !others.is_empty() {
        return Ok(Outcome::skipped(others.join("; ")));
    }
    let mut rig = Rig::start()?;
    let mut grown = Vec::new();
    for path in chosen {
        let name = path.to_string();
        let before = accepted.paths.get(&name);
        let before = before.ok_or_else(|| format!("missing accepted counts of {name}"))?;
        let mut runs = rig.measure(*path, RUNS)?;
        let mut after = Cost::least(runs.clone());
        if growth(&name, before, &after).is_some() {
            runs.extend(rig.measure(*path, MORE_RUNS)?);
            after = Cost::least(runs);
        }
        show(&name, &after, Some(before));
        grown.extend(growth(&name, before, &after));
    }
    let stopped = rig.stop();
    if grown.is_empty() {
        return stopped.map(|()| Ok(()).into());
    }
    let mut why = format!(
        "instructions of an operation have grown by more than is accepted:\n{}\n\
         If the growth is worth it: `cargo xtask instructions --accept`",
        grown.join("\n")
    );
    if let Err(failure) = stopped {
        why += &format!("\n{failure}");
    }
    Ok(Outcome::failed(why))
}

/// Saves the current counts. If a path was not measured, its previous counts are kept, but only if
/// the versions are the same.
fn accept(chosen: &[Path4k]) -> Result<(), Failure> {
    let made_with = versions()?;
    let mut accepted = Accepted::load()?;
    accepted.renew(made_with, chosen.len() == paths::all().count())?;
    let mut rig = Rig::start()?;
    for path in chosen {
        let name = path.to_string();
        let cost = Cost::least(rig.measure(*path, RUNS + MORE_RUNS)?);
        show(&name, &cost, accepted.paths.get(&name));
        accepted.paths.insert(name, cost);
    }
    // Save the counts first: they take a long time, and they are still valid if the target fails to
    // stop.
    accepted.save()?;
    rig.stop()
}

/// Prints the cost of a path, including the previous cost.
fn show(name: &str, cost: &Cost, before: Option<&Cost>) {
    let before = before.map_or(String::new(), |before| {
        format!(", accepted {:.0}", before.total)
    });
    println!(
        "{name}: {:.0} instructions of an operation{before} (spread {:.1} %); {:.1} rounds with {:.0} \
         for polling",
        cost.total, cost.spread, cost.rounds, cost.polling
    );
    let mut groups: Vec<_> = cost.groups.iter().collect();
    groups.sort_by(|(_, a), (_, b)| b.total_cmp(a));
    let groups = groups.iter().take(SHOWN);
    let groups: Vec<_> = groups
        .map(|(name, cost)| format!("{name} {cost:.0}"))
        .collect();
    println!("    {}", groups.join(", "));
}

fn versions() -> Result<BTreeMap<String, String>, Failure> {
    let of = |program: &str, argument: &str| -> Result<String, Failure> {
        let said = sh::output(&mut sh::cmd(program, [argument]))?;
        Ok(said.trim().to_owned())
    };
    let info = fs::read_to_string("/proc/cpuinfo")?;
    let has = |flag: &&str| info.split_ascii_whitespace().any(|word| word == *flag);
    let flags: Vec<_> = CPU_FLAGS.into_iter().filter(has).collect();
    let all = [
        ("rustc", of("rustc", "--version")?),
        ("valgrind", of("valgrind", "--version")?),
        ("libc", of("getconf", "GNU_LIBC_VERSION")?),
        ("processor", flags.join(" ")),
    ];
    Ok(all.map(|(name, version)| (name.to_owned(), version)).into())
}
