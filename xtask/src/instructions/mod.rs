//! `cargo xtask instructions`: what reads and writes of 4 KiB cost the target, in instructions.
//!
//! - [`paths`]: each protocol at depth 1 and 32, in a `riserd` that runs under callgrind and is
//!   used by `riser` through real sockets.
//! - [`dump`]: what callgrind writes.
//! - [`accepted`]: the counts that were accepted, in `xtask/instructions.json`, and what has
//!   grown, of the work and of a round's polling.
//! - [`counting`](mod@counting): what counting a command adds to it.
//!
//! Callgrind is driven here and not by gungraun, which runs a program from its start to its end,
//! in the foreground and alone: here a daemon goes on while clients come and go, and only some of
//! them count.

mod accepted;
mod counting;
mod dump;
mod paths;

use std::collections::BTreeMap;
use std::fs;

use self::accepted::{Accepted, Cost, growth};
use self::paths::{Path4k, Rig};
use crate::packages::{Need, ensure, need};
use crate::{Failure, sh};

pub(crate) const NEEDS: &[Need] = &[
    need("valgrind", "valgrind", "counting instructions"),
    need("callgrind_control", "valgrind", "counting instructions"),
];

/// Runs of each path, an odd number; and those that are added where it has grown.
const RUNS: usize = 3;
const MORE_RUNS: usize = 4;

/// Folders and libraries that are printed of a path.
const SHOWN: usize = 6;

/// Flags of the processor by which libraries choose between functions, under valgrind as well.
const CPU_FLAGS: [&str; 4] = ["avx2", "erms", "fsrm", "pclmulqdq"];

/// Options of `cargo xtask instructions`.
#[derive(clap::Args)]
pub(crate) struct Options {
    /// Only paths with all of these words: srp, iser or iscsi; read or write; 1 or 32.
    only: Vec<String>,
    /// Accept the counts: write them to xtask/instructions.json.
    #[arg(long)]
    accept: bool,
    /// Measure what counting a command adds to a read, and nothing else.
    #[arg(long, conflicts_with_all = ["only", "accept"])]
    counting: bool,
}

/// End of a comparison.
pub(crate) enum Ended {
    /// It was made: how many paths have grown, in words.
    Compared(Result<(), Failure>),
    /// No counts were accepted, or with other versions, so that they say nothing here.
    Unavailable(String),
}

/// Measures, prints, and compares or accepts.
pub(crate) fn run(options: &Options) -> Result<(), Failure> {
    if !ensure(NEEDS).is_empty() {
        return Err("there is no valgrind".into());
    }
    if options.counting {
        return counting::run();
    }
    let chosen: Vec<_> = paths::all()
        .filter(|path| path.is_named(&options.only))
        .collect();
    if chosen.is_empty() {
        return Err(format!("no path has the words {}", options.only.join(" ")).into());
    }
    if options.accept {
        return accept(&chosen);
    }
    match compare(&chosen)? {
        Ended::Compared(result) => result,
        Ended::Unavailable(why) => Err(why.into()),
    }
}

/// Compares all paths with what was accepted.
pub(crate) fn compare_all() -> Result<Ended, Failure> {
    compare(&paths::all().collect::<Vec<_>>())
}

/// Measures what counting a command adds.
pub(crate) fn counting() -> Result<(), Failure> {
    counting::run()
}

fn compare(chosen: &[Path4k]) -> Result<Ended, Failure> {
    let accepted = Accepted::load()?;
    if accepted.paths.is_empty() {
        let why = "no counts were accepted; `cargo xtask instructions --accept` measures them";
        return Ok(Ended::Unavailable(why.to_owned()));
    }
    let others = accepted.other_versions(&versions()?);
    if !others.is_empty() {
        return Ok(Ended::Unavailable(others.join("; ")));
    }
    let mut rig = Rig::start()?;
    let mut grown = Vec::new();
    for path in chosen {
        let name = path.to_string();
        let before = accepted.paths.get(&name);
        let before = before.ok_or_else(|| format!("no counts of {name} were accepted"))?;
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
        return stopped.map(|()| Ended::Compared(Ok(())));
    }
    let mut why = format!(
        "instructions of an operation have grown by more than is accepted:\n{}\n\
         If the growth is worth it: `cargo xtask instructions --accept`",
        grown.join("\n")
    );
    if let Err(failure) = stopped {
        why += &format!("\n{failure}");
    }
    Ok(Ended::Compared(Err(why.into())))
}

/// Writes what is measured now. Paths that are not measured keep their counts, if these were made
/// with the same versions.
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
    // The counts take long, and a target that does not end well does not spoil them.
    accepted.save()?;
    rig.stop()
}

/// Prints a path, with what it cost before.
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

/// What the counts depend on, beside the code.
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
