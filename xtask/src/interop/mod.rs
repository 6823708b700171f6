//! `cargo xtask interop`: tests with a stock Debian kernel as the peer, using QEMU.
//!
//! A test case is a script in `tests/vm/cases`. Lines that start with `#:` are the header, which
//! sets the group, the timeout, the minimum number of packets in captures, and if the case should
//! be run with the short cases or must run alone. Because a boot can be used for all cases in
//! a group, each case has to start with a clean state and restore it, using the functions in
//! `tests/vm/lib.sh`. We keep the output and the daemon's log for each case. If there is a packet
//! capture, we check it ([`riser_testkit::captures`]). Some cases don't need a guest ([`here`]). If
//! `boots` is set, the case uses a guest with systemd that is shut down and booted several times
//! with the same disk.

pub(crate) mod case;
pub(crate) mod guest;
mod here;
pub(crate) mod kernel;
mod modules;
pub(crate) mod runner;
#[cfg(test)]
mod stand_ins;

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Instant;

use runner::{Programs, Rig};

use crate::cases::{Row, Verdict, count, summary};
use crate::packages::{ensure, needs};
use crate::tally::{Kind, Outcome};
use crate::{Failure, daemon, root, sh};

/// Memory required by a guest and the processes that use it, in MiB.
const MEMORY_PER_GUEST: u64 = 7168;

/// Options of `cargo xtask interop`.
///
/// For each case, we keep the output, the riserd log and a packet capture. A capture contains the
/// first 400 bytes (or 1000 if required) of the first 100,000 packets sent between the two hosts.
/// Some cases have no capture because packets that an RDMA device sends to itself are not seen
/// there. All captures are checked using tshark: a case will fail if there is a malformed packet or
/// if there are not enough packets. If a case fails, it's run again. If it then passes, this is
/// shown in the table and the total.
#[derive(clap::Args)]
pub(crate) struct Options {
    /// Run only the cases whose group or name contains one of these words.
    cases: Vec<String>,
    /// List the cases and exit.
    #[arg(long)]
    list: bool,
    /// Run only the short cases.
    #[arg(long)]
    short: bool,
    /// Number of parallel guests; by default one for every two cores, plus one.
    #[arg(long)]
    jobs: Option<usize>,
    /// Number of rounds for cases that support it, such as the `crash` group.
    #[arg(long)]
    rounds: Option<u32>,
    /// Use `riserd`, `riser`, `libriser_drop_in.so` and, if available, the tests used by cases from
    /// this directory instead of building them.
    #[arg(long)]
    programs: Option<PathBuf>,
    /// Directory for logs and captures.
    #[arg(long, default_value = ".build/interop")]
    logs: PathBuf,
}

impl Options {
    /// Returns the number of parallel guests. Because cases spend much of their time waiting, we
    /// use more than one guest for every two cores, but the guests must fit into memory.
    fn jobs(&self) -> usize {
        self.jobs.unwrap_or_else(|| {
            let cores = std::thread::available_parallelism().map_or(1, usize::from);
            let memory = available_memory().map_or(1, |mib| mib / MEMORY_PER_GUEST);
            (cores / 2 + 1).min(memory as usize)
        })
    }
}

fn available_memory() -> Option<u64> {
    let text = fs::read_to_string("/proc/meminfo").ok()?;
    let line = text.lines().find(|l| l.starts_with("MemAvailable:"))?;
    let kib: u64 = line.split_whitespace().nth(1)?.parse().ok()?;
    Some(kib >> 10)
}

pub(crate) fn run(options: &Options) -> Result<(), Failure> {
    run_cases(options)?.into_result()
}

/// Runs the cases. If the requirements are not available, they are skipped.
pub(crate) fn run_cases(options: &Options) -> Result<Outcome, Failure> {
    let mut cases = case::load(&options.cases, options.short)?;
    if let Some(rounds) = options.rounds {
        cases = cases
            .into_iter()
            .map(|case| case.with_rounds(rounds))
            .collect();
    }
    if options.list {
        for c in &cases {
            println!("{:<10} {:<28} {}", c.group, c.name, c.about);
        }
        return Ok(Ok(()).into());
    }
    let all: Vec<_> = cases.iter().map(|case| (Kind::Case, case.path())).collect();
    let (here, mut guests): (Vec<_>, Vec<_>) = cases.into_iter().partition(|case| case.here);
    for (cases, names) in [(&here, "interop-here"), (&guests, "interop")] {
        if !cases.is_empty()
            && let Some(n) = ensure(needs(names)).first()
        {
            let why = format!("{} (Debian package {}) is missing", n.program, n.package);
            return Ok(Outcome::Skipped(all, why));
        }
    }
    let kernel = match guests.is_empty() {
        true => None,
        false => match kernel::ensure() {
            Ok(kernel) => Some(kernel),
            Err(e) => {
                let why = format!("cannot prepare the guest's kernel: {e}");
                return Ok(Outcome::Skipped(all, why));
            }
        },
    };
    let mut rows = Vec::new();
    // The tools to build a module may be missing, but other cases can run without it.
    for module in &modules::modules() {
        if let Some(kernel) = &kernel
            && guests.iter().any(|case| module.is_for(case))
            && let Err(e) = module.ensure(kernel)
        {
            let why = format!("cannot prepare {} for the guest: {e}", module.name);
            let is_skipped = |case: &mut case::Case| module.is_for(case);
            let skip = |case: case::Case| {
                Row::new(&case.path(), Kind::Case, Verdict::Skipped(why.clone()))
            };
            rows.extend(guests.extract_if(.., is_skipped).map(skip));
            if here.is_empty() && guests.is_empty() {
                return Ok(Outcome::Skipped(all, why));
            }
        }
    }
    // Tests take minutes to build, so we only build them for cases that need them.
    let is_used = |word: &str| guests.iter().any(|c| c.text.contains(word));
    for (test, word) in [("devices", "on_devices"), ("crash", "killed_under_load")] {
        if is_used(word) {
            link_test(test, options.programs.as_deref())?;
        }
    }
    let programs = match &options.programs {
        Some(directory) => fs::canonicalize(directory)?,
        None => {
            println!("building riserd and riser");
            daemon::build()?
        }
    };
    let programs = Programs {
        programs,
        tests: root().join(TESTS),
    };
    let logs = root().join(&options.logs);
    let started = Instant::now();
    let jobs = options.jobs().max(1);
    rows.extend(here::run(&here, &programs, &logs));
    if let Some(kernel) = &kernel {
        let rig = Rig {
            kernel,
            programs: &programs,
            logs: &logs,
        };
        rows.extend(rig.run(&guests, jobs));
    }
    println!("\n{}\n", table(&rows));
    let (summary, seconds) = (
        summary(rows.iter().map(|row| &row.verdict)),
        started.elapsed().as_secs_f64(),
    );
    let logs = options.logs.display();
    println!("{summary} in {seconds:.0} s with {jobs} guest(s) at once; logs in {logs}");
    Ok(count(&rows))
}

/// Formats the results. The reasons of failures have several lines, so they are listed first.
fn table(rows: &[Row]) -> String {
    let reasons = rows.iter().filter_map(|row| match &row.verdict {
        Verdict::Failed(why) => Some(format!("{}: {why}\n", row.path)),
        _ => None,
    });
    let lines = rows.iter().map(|row| {
        let mut row = row.clone();
        if let Verdict::Failed(why) = &mut row.verdict {
            why.truncate(why.find('\n').unwrap_or(why.len()));
        }
        row.line()
    });
    reasons.chain(lines).collect::<Vec<_>>().join("\n")
}

/// Directory for links to test programs.
const TESTS: &str = ".build/interop-tests";

/// Creates a link to a test used by cases in [`TESTS`]. The test is either from the given directory
/// or is built here.
fn link_test(test: &str, given: Option<&Path>) -> Result<(), Failure> {
    let given = given.map(|directory| directory.join(test));
    let program = match given.filter(|program| program.is_file()) {
        Some(program) => fs::canonicalize(program)?,
        None => {
            println!("building the test {test}");
            // Build with the whole workspace, so that we can use everything already built for other
            // tests.
            let args = ["test", "-q", "--workspace", "--test", test];
            sh::built(&args, test)?
        }
    };
    let directory = root().join(TESTS);
    fs::create_dir_all(&directory)?;
    let link = directory.join(test);
    let _ = fs::remove_file(&link);
    std::os::unix::fs::symlink(program, &link)?;
    Ok(())
}
