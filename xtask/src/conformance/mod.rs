//! `cargo xtask conformance`: runs the libiscsi test suite against our iSCSI target over TCP
//! and, for comparison, against `tgt` on the same machine.
//!
//! The suite is also run over iSER with a client that uses our libraries ([`iser`]).
//!
//! The whole suite runs in a single process of the installed client. We use two paths to the same
//! LUN, because this is required by the multipath tests. Physical and logical blocks of the LUN
//! have the same size, because a test depends on this without checking it. Tests that need a
//! different LUN are then run on that LUN. QEMU's own client is used to compare images and to boot
//! a guest from a disk. The command returns an error if a test fails, if a client crashes or hangs,
//! if the daemon logs errors, or if the daemon leaks file descriptors after all initiators have
//! disconnected. The results of the other target are ignored.

mod iser;
mod qemu;
mod suite;

use std::fs::{self, File};
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use serde::Deserialize;
use suite::Run;

use crate::cases::{Row, Test, Verdict, count, print_skips, summary};
use crate::daemon::{self, Daemon};
use crate::packages::{ensure, needs};
use crate::process::{Exited, Process};
use crate::tally::{Kind, Outcome, note, noted};
use crate::tgt::{Tgt, free_port};
use crate::{Failure, cases, sh};

#[derive(clap::Args)]
pub(crate) struct Options {
    /// Test our own target only.
    #[arg(long)]
    no_peer: bool,
    /// Skip the suite over iSER.
    #[arg(long)]
    no_iser: bool,
    /// Run only these tests, using the client's format: FAMILY, FAMILY.SUITE or FAMILY.SUITE.TEST.
    #[arg(long)]
    tests: Option<String>,
    /// Timeout for the suite with each target, in minutes.
    #[arg(long, default_value_t = 15)]
    minutes: u64,
    /// Directory of programs that have already been built.
    #[arg(long)]
    programs: Option<PathBuf>,
}

impl Options {
    fn tests(&self) -> &str {
        self.tests.as_deref().unwrap_or("ALL")
    }
}

/// All programs that can be used by this command, by their names in `packages.toml`.
pub(crate) const NEEDS: &str = "conformance conformance-qemu conformance-tgt";

/// The client with the suite.
const CLIENT: &str = "iscsi-test-cu";

/// Target name.
const IQN: &str = "iqn.2026-01.org.example:conformance";

/// LUN size in bytes, which must be large enough for tests that read and write 32 MiB in a single
/// command.
const SIZE: u64 = 64 << 20;

/// LUNs for tests that skip the first LUN, and the message used to skip. The first LUN here has
/// larger physical blocks and the other is read-only.
const OTHER_LUNS: [(u8, &str); 2] = [(1, "LBPPB < 2"), (2, "Logical unit is not write-protected")];

/// Runs all tests and returns an error if any failed on our target.
pub(crate) fn run(options: &Options) -> Result<(), Failure> {
    let outcome = run_all(options)?;
    // Skips are printed, but we don't count them here.
    let _ = noted();
    outcome.into_result()
}

pub(crate) fn run_all(options: &Options) -> Result<Outcome, Failure> {
    if !ensure(needs("conformance")).is_empty() {
        return Ok(Outcome::Skipped(parts(), format!("{CLIENT} is missing")));
    }
    let programs = match &options.programs {
        Some(directory) => directory.clone(),
        None => daemon::build()?,
    };
    let scratch = sh::Scratch::new("conformance")?;
    let mut rows = Vec::new();
    let ours = over_tcp(options, &programs, &scratch, &mut rows)?;
    let iser = over_iser(options, &programs, &scratch)?;
    rows.extend(qemu_checks(&programs, &scratch));
    let theirs = match options.no_peer {
        true => None,
        false => over_tgt(options, &scratch),
    };
    let runs = [
        ("riserd", Some(&ours)),
        ("over iSER", iser.as_ref()),
        ("tgt", theirs.as_ref()),
    ];
    println!();
    for (name, run) in runs
        .into_iter()
        .filter_map(|(name, run)| Some((name, run?)))
    {
        let end = if run.is_complete {
            ""
        } else {
            "; the client did not finish"
        };
        let verdicts = run.tests.iter().map(|test| &test.verdict);
        println!("{name}: {}{end}", summary(verdicts));
    }
    let row = |suffix: &'static str| {
        move |test: Test| Row::new(&(test.name + suffix), Kind::SuiteTest, test.verdict)
    };
    rows.extend(ours.tests.into_iter().map(row("")));
    let iser = iser.into_iter().flat_map(|run| run.tests);
    rows.extend(iser.map(row(" over iSER")));
    print_skips(&rows);
    Ok(count(&rows))
}

/// Returns the parts of this step, to be counted when nothing can be tested. Only the client knows
/// the number of tests in the suite.
pub(crate) fn parts() -> Vec<(Kind, String)> {
    let checks = checks().into_iter().map(|check| check.name);
    let checks = checks
        .chain(qemu::CHECKS.map(str::to_owned))
        .map(|name| (Kind::Check, name));
    let suite = (Kind::SuiteTest, "all of libiscsi's suite".to_owned());
    std::iter::once(suite).chain(checks).collect()
}

/// Runs the suite over iSER, if possible.
fn over_iser(
    options: &Options,
    programs: &Path,
    scratch: &sh::Scratch,
) -> Result<Option<Run>, Failure> {
    if options.no_iser {
        return Ok(None);
    }
    let run = iser::run(options, programs, scratch)?;
    Ok(run
        .inspect_err(|why| {
            println!("skipping the suite over iSER: {why}");
            note(Kind::SuiteTest, "all of libiscsi's suite over iSER", why);
        })
        .ok())
}

fn qemu_checks(programs: &Path, scratch: &sh::Scratch) -> Vec<Row> {
    qemu::run(programs, scratch).unwrap_or_else(|why| {
        let skip = |name| Row::run(name, Kind::Check, |_| Verdict::Skipped(why.clone()));
        qemu::CHECKS.map(skip).into()
    })
}

/// Runs the tools and the suite over TCP. Returns the results of the suite, and adds a row for
/// each check and for each other problem.
fn over_tcp(
    options: &Options,
    programs: &Path,
    scratch: &sh::Scratch,
    rows: &mut Vec<Row>,
) -> Result<Run, Failure> {
    let port = free_port()?;
    let image = scratch.join("riser.img");
    let config = scratch.join("riserd.yaml");
    fs::write(&config, configuration(&image, port))?;
    let log = scratch.join("riserd.log");
    let daemon = Daemon::start(&programs.join("riserd"), &config, &log)?;
    let portal = format!("iscsi://127.0.0.1:{port}");
    let url = format!("{portal}/{IQN}/0");
    let of_file = format!("{portal}/{IQN}/1");
    for check in checks() {
        rows.push(match sh::which(&check.program) {
            Some(program) => Row::check(&check.name, || {
                check.run(&program, &portal, &of_file, &image)
            }),
            None => Row::run(&check.name, Kind::Check, |_| {
                Verdict::Skipped("not in this version of libiscsi".to_owned())
            }),
        });
    }
    let mut failures = Vec::new();
    // After a single session was opened and closed, all lazy initialization should be done.
    let before = Usage::of(daemon.pid())?;
    let (mut run, exited) = run_suite(options, options.tests(), &url, scratch, "riser")?;
    failures.extend(exited.map(|how| format!("{CLIENT} {how}")));
    if run.tests.is_empty() || !run.is_complete {
        failures.push("the suite did not finish".to_owned());
    }
    // We only run tests that were skipped for this reason. If a test passed on the first LUN, there
    // is no need to run it again.
    for (lun, lacking) in OTHER_LUNS {
        let url = format!("{portal}/{IQN}/{lun}");
        for test in run.skipped_for(lacking) {
            let full = format!("ALL.{test}");
            let (again, exited) = run_suite(options, &full, &url, scratch, "riser-again")?;
            failures.extend(exited.map(|how| format!("{CLIENT} {how} in {test}")));
            if again.tests.is_empty() || !again.is_complete {
                failures.push(format!("{test} did not finish at LUN {lun}"));
            }
            run.merge(again);
        }
    }
    // Only file descriptors are checked, but memory is printed as well: pools and tables in the
    // daemon may grow once and keep their size.
    let after = Usage::stable(daemon.pid(), &before)?;
    println!(
        "file descriptors: {} before the suite, {} after",
        before.fds, after.fds
    );
    println!(
        "resident memory: {} KiB before the suite, {} KiB after",
        before.kib, after.kib
    );
    if after.fds > before.fds {
        failures.push("riserd leaks file descriptors of closed sessions".to_owned());
    }
    if let Err(error) = daemon.stop() {
        failures.push(error.to_string());
    }
    // We read the log after the daemon has exited, because this will flush the log and can also add
    // errors.
    let said = fs::read_to_string(&log).unwrap_or_default();
    let complaints = said
        .lines()
        .filter(|line| line.contains("panicked") || line.contains(" ERROR "));
    failures.extend(complaints.map(|line| format!("riserd: {line}")));
    let failed = |why| Row::new("riserd and the suite", Kind::Check, Verdict::Failed(why));
    rows.extend(failures.into_iter().map(failed));
    Ok(run)
}

fn configuration(image: &Path, port: u16) -> String {
    format!(
        "backends:\n  ram: {{ kind: ram, size: {SIZE} }}\n  \
         disk: {{ kind: file, path: {}, size: {SIZE}, create: true }}\n\
         targets:\n  - name: conformance\n    iqn: {IQN}\n    \
         portals: [{{ protocol: iscsi, listen: \"127.0.0.1:{port}\" }}]\n    \
         luns: {{ 0: ram, 1: disk, 2: {{ backend: disk, read_only: true }} }}\n    access: open\n",
        image.display()
    )
}

/// Runs the suite on `tgt` for comparison, the other user-space iSCSI target included in
/// Debian. Returns `None` if this is not possible.
fn over_tgt(options: &Options, scratch: &sh::Scratch) -> Option<Run> {
    if !ensure(needs("conformance-tgt")).is_empty() {
        return None;
    }
    let run = || -> Result<Run, Failure> {
        let image = scratch.join("tgt.img");
        File::create(&image)?.set_len(SIZE)?;
        let tgt = Tgt::start(&image, IQN, &scratch.join("tgt.log"))?;
        tgt.update("thin_provisioning=1")?;
        let (run, exited) = run_suite(options, options.tests(), tgt.url(), scratch, "tgt")?;
        if let Some(how) = exited {
            println!("against tgt, {CLIENT} {how}");
        }
        Ok(run)
    };
    run()
        .inspect_err(|error| println!("cannot compare with tgt: {error}"))
        .ok()
}

/// Runs the suite in a single process. Returns its output, and the error if it didn't exit
/// properly.
fn run_suite(
    options: &Options,
    tests: &str,
    url: &str,
    scratch: &sh::Scratch,
    name: &str,
) -> Result<(Run, Option<String>), Failure> {
    println!("{CLIENT} -t {tests} against {name}");
    // Use two paths to the same LUN.
    let command = sh::cmd(CLIENT, ["--dataloss", "-t", tests, url, url]);
    let command = sh::ending_with_us(command, "KILL");
    let mut process = Process::start(command, &scratch.join(&format!("{name}.out")))?;
    let (started, patience) = (Instant::now(), Duration::from_secs(60 * options.minutes));
    let Exited {
        status,
        output: said,
    } = process.finish(started + patience);
    println!("{name}: {:.1} s", started.elapsed().as_secs_f64());
    let exited = match status {
        // If a test fails, the client exits with an error, but the test output already has more
        // details.
        Some(status) => status.signal().map(|n| format!("died of signal {n}")),
        None => Some(format!("did not exit within {patience:?}")),
    };
    Ok((Run::parse(&said), exited))
}

/// Resources used by a process.
struct Usage {
    fds: usize,
    kib: u64,
}

impl Usage {
    fn of(pid: u32) -> Result<Self, Failure> {
        let status = fs::read_to_string(format!("/proc/{pid}/status"))?;
        let resident = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
        let kib = resident.and_then(|line| line.split_whitespace().next()?.parse().ok());
        Ok(Self {
            fds: fs::read_dir(format!("/proc/{pid}/fd"))?.count(),
            kib: kib.unwrap_or(0),
        })
    }

    /// Waits for a short time until the usage is the same as before, because the last connections
    /// may not be closed yet.
    fn stable(pid: u32, before: &Self) -> Result<Self, Failure> {
        let started = Instant::now();
        loop {
            let now = Self::of(pid)?;
            if now.fds <= before.fds || started.elapsed() > Duration::from_secs(20) {
                return Ok(now);
            }
            std::thread::sleep(Duration::from_millis(100));
        }
    }
}

/// A libiscsi tool and its expected output.
#[derive(Deserialize)]
struct Check {
    name: String,
    program: String,
    args: String,
    says: Vec<String>,
}

fn checks() -> Vec<Check> {
    cases::read(include_str!("../../cases/conformance.toml"))
}

impl Check {
    /// Runs a program and returns the line of its output with the last text of `says`.
    fn run(
        &self,
        program: &Path,
        portal: &str,
        url: &str,
        image: &Path,
    ) -> Result<String, Failure> {
        let args = self.args.replace("{portal}", portal).replace("{url}", url);
        let mut command = sh::cmd("timeout", ["60"]);
        let said = sh::output(command.arg(program).args(args.split(' ')))?;
        let mut found = String::new();
        for words in &self.says {
            let words = match words.as_str() {
                "{md5}" => {
                    let sum = sh::output(&mut sh::cmd("md5sum", [image]))?;
                    sum.split(' ').next().unwrap_or_default().to_owned()
                }
                words => words
                    .replace("{iqn}", IQN)
                    .replace("{size}", &SIZE.to_string()),
            };
            // Progress output overwrites the previous line.
            let line = said.split(['\n', '\r']).find(|line| line.contains(&words));
            let line = line.ok_or_else(|| format!("said: {}", said.trim()))?;
            line.trim().clone_into(&mut found);
        }
        Ok(found)
    }
}
