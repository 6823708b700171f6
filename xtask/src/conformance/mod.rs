//! `cargo xtask conformance`: runs the libiscsi test suite against our iSCSI target over TCP and,
//! for comparison, against `tgt` on the same machine.
//!
//! The suite is also run over iSER with a client that uses our libraries ([`iser`]).
//!
//! By default, the whole suite runs in a single process of the installed client. If another client
//! is given (`--libiscsi`), each suite will use a separate process. We use two paths to the same
//! LUN, because this is required by the multipath tests. Physical and logical blocks of the LUN
//! have the same size, because a test depends on this without checking it. Tests that need a
//! different LUN are then run on that LUN. QEMU's own client is used to compare images and to boot
//! a guest from a disk. The command returns an error if a test fails, if a client crashes or hangs,
//! if the daemon logs errors, or if the daemon leaks file descriptors after all initiators have
//! disconnected. The results of the other target are ignored.

mod iser;
mod peer;
mod qemu;
mod suite;

use std::fs::{self, File};
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use crate::daemon::{self, Daemon};
use crate::packages::{Need, ensure, need};
use crate::tally::{Counts, Kind, Tally, note, noted};
use crate::tgt::free_port;
use crate::{Failure, sh};
use suite::{Run, Verdict};

/// Options of `cargo xtask conformance`.
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
    /// Use the client from this libiscsi build directory instead of the installed client.
    #[arg(long, value_name = "DIR")]
    libiscsi: Option<PathBuf>,
    /// Write the client's output for our target to this file.
    #[arg(long)]
    log: Option<PathBuf>,
}

impl Options {
    /// Options for `cargo xtask test`, which should only test our target.
    pub(crate) fn for_test() -> Self {
        Self {
            no_peer: true,
            no_iser: false,
            tests: None,
            minutes: 15,
            programs: None,
            libiscsi: None,
            log: None,
        }
    }

    /// Returns the path of a libiscsi program, if available.
    fn client(&self, program: &str) -> Option<PathBuf> {
        let Some(folder) = &self.libiscsi else {
            return sh::which(program);
        };
        // Directories used for programs by the build, and directories used by an install.
        let places = ["test-tool", "utils", "bin", "."];
        let mut places = places.iter().map(|place| folder.join(place).join(program));
        places.find(|path| path.is_file())
    }
}

/// Result of a run.
pub(crate) enum Ended {
    /// The run was completed. Contains the counts of the suite and of additional checks, and an
    /// error message if anything failed.
    Ran(Tally, Option<String>),
    /// The client is not available.
    Unavailable(String),
}

/// All programs that can be used by this command.
pub(crate) const NEEDS: &[&[Need]] = &[&[CLIENT], qemu::NEEDS, peer::NEEDS];

const CLIENT: Need = need(
    "iscsi-test-cu",
    "libiscsi-bin",
    "libiscsi's conformance suite",
);

/// Target name.
const IQN: &str = "iqn.2026-01.org.example:conformance";

/// Tests that fail because of bugs in the test itself. These are only in newer versions of libiscsi
/// than the packaged version.
const CLIENT_FAULTS: [(&str, &str); 4] = [
    (
        "CompareAndWrite.InvalidDataOutSize",
        "since libiscsi's commit b4d59cd it changes the length in every PDU but the command, so that what \
         it sends is valid",
    ),
    (
        "GetLBAStatus.UnmapSingle",
        "it requests the status of the block after the unmapped blocks, and expects that of the next \
             physical block, which differs if physical blocks have several logical blocks",
    ),
    (
        "iSCSISendTargets.Simple",
        "it expects a response to SendTargets=All in a normal session, where RFC 7143 Appendix C forbids it",
    ),
    (
        "iSCSITMF.AbortTaskSimpleAsync",
        "it expects its command in libiscsi's send queue, but libiscsi sends immediately",
    ),
];

/// A test that hangs, and the reason.
const CLIENT_HANGS: (&str, &str) = (
    "iSCSISendTargets.Invalid",
    "it closes its connection when the response to an invented key is NotUnderstood, as required by RFC 7143 \
             section 6.2, and then waits forever for a response on the closed connection",
);

/// LUN size in bytes, which must be large enough for tests that read and write 32 MiB in a single
/// command.
const SIZE: u64 = 64 << 20;

/// LUNs for tests that skip the first LUN, and the message used to skip. The first LUN here has
/// larger physical blocks and the other is read-only.
const OTHER_LUNS: [(u8, &str); 2] = [(1, "LBPPB < 2"), (2, "Logical unit is not write-protected")];

/// Runs all tests and returns an error if any failed on our target.
pub(crate) fn run(options: &Options) -> Result<(), Failure> {
    let ended = run_all(options)?;
    // Skips are printed, but we don't count them here.
    let _ = noted();
    match ended {
        Ended::Ran(_, None) => Ok(()),
        Ended::Ran(_, Some(why)) | Ended::Unavailable(why) => Err(why.into()),
    }
}

/// Runs all tests and returns the result.
pub(crate) fn run_all(options: &Options) -> Result<Ended, Failure> {
    if options.libiscsi.is_none() {
        ensure([&CLIENT]);
    }
    if options.client(CLIENT.program).is_none() {
        return Ok(Ended::Unavailable(format!("{} is missing", CLIENT.program)));
    }
    let programs = match &options.programs {
        Some(folder) => folder.clone(),
        None => daemon::build()?,
    };
    let scratch = sh::Scratch::new("conformance")?;
    let mut ours = ours(options, &programs, &scratch)?;
    over_iser(options, &programs, &scratch, &mut ours)?;
    qemu_checks(&programs, &scratch, &mut ours);
    let theirs = if options.no_peer {
        None
    } else {
        peer::run(options, &scratch)
    };
    print_table(&ours, theirs.as_ref());
    print_skips(&ours.run);
    Ok(outcome_of(options, ours))
}

/// Returns the parts of this step, to be counted when nothing can be tested. Only the client knows
/// the number of tests in the suite.
pub(crate) fn parts() -> Vec<(Kind, String)> {
    let checks = CHECKS.iter().map(|check| check.name).chain(qemu::CHECKS);
    let checks = checks.map(|name| (Kind::Check, name.to_owned()));
    let suite = (Kind::SuiteTest, "all of libiscsi's suite".to_owned());
    std::iter::once(suite).chain(checks).collect()
}

/// Counts the results for our target. Skips are recorded.
fn outcome_of(options: &Options, ours: Ours) -> Ended {
    let mut suite = Counts::default();
    let mut failures = Vec::new();
    for test in &ours.run.tests {
        let name = format!("{}.{}", test.suite, test.name);
        match &test.verdict {
            Verdict::Passed => suite.passed += 1,
            Verdict::Skipped(reasons) => note(Kind::SuiteTest, &name, &reasons.join("; ")),
            Verdict::Failed(_) | Verdict::Unfinished => {
                let fault = CLIENT_FAULTS.iter().find(|(test, _)| *test == name);
                // The packaged version doesn't have these bugs, so if it fails, this is our bug.
                if let (Some((_, why)), true) = (fault, options.libiscsi.is_some()) {
                    println!("{name} fails for another reason: {why}");
                    continue;
                }
                suite.failed += 1;
                failures.push(format!("{name}: {:?}", test.verdict));
            }
        }
    }
    for test in ours.iser.iter().flat_map(|run| &run.tests) {
        let name = format!("{}.{} over iSER", test.suite, test.name);
        match &test.verdict {
            Verdict::Passed => suite.passed += 1,
            Verdict::Skipped(reasons) => note(Kind::SuiteTest, &name, &reasons.join("; ")),
            Verdict::Failed(_) | Verdict::Unfinished => {
                suite.failed += 1;
                failures.push(format!("{name}: {:?}", test.verdict));
            }
        }
    }
    let checks = Counts {
        passed: ours.checks,
        failed: ours.failures.len() as u64,
        ..Counts::default()
    };
    failures.extend(ours.failures);
    let mut tally = Tally::of(Kind::SuiteTest, suite);
    tally.add(Kind::Check, checks);
    Ended::Ran(tally, (!failures.is_empty()).then(|| failures.join("\n")))
}

/// Runs the suite over iSER.
fn over_iser(
    options: &Options,
    programs: &Path,
    scratch: &sh::Scratch,
    ours: &mut Ours,
) -> Result<(), Failure> {
    if options.no_iser {
        return Ok(());
    }
    match iser::run(options, programs, scratch)? {
        Ok(run) => ours.iser = Some(run),
        Err(why) => {
            println!("skipping the suite over iSER: {why}");
            note(Kind::SuiteTest, "all of libiscsi's suite over iSER", &why);
        }
    }
    Ok(())
}

/// Runs the checks that use QEMU as a client.
fn qemu_checks(programs: &Path, scratch: &sh::Scratch, ours: &mut Ours) {
    match qemu::run(programs, scratch) {
        Ok(outcomes) => {
            for (name, outcome) in outcomes {
                ours.checks += report(name, outcome.map(Some), &mut ours.failures);
            }
        }
        Err(why) => {
            for name in qemu::CHECKS {
                println!("{name:<22} skipped  {why}");
                note(Kind::Check, name, &why);
            }
        }
    }
}

/// Prints the result of a check, which is `None` if its program is missing, and records failures.
/// Returns the number of checks that passed.
fn report(name: &str, outcome: Result<Option<String>, Failure>, failures: &mut Vec<String>) -> u64 {
    match outcome {
        Ok(Some(said)) => {
            println!("{name:<22} ok       {said}");
            return 1;
        }
        Ok(None) => {
            let why = "not in this version of libiscsi";
            println!("{name:<22} skipped  {why}");
            note(Kind::Check, name, why);
        }
        Err(error) => {
            println!("{name:<22} FAILED   {error}");
            failures.push(format!("{name}: {error}"));
        }
    }
    0
}

/// Results for our target.
struct Ours {
    run: Run,
    /// Results of the suite over iSER.
    iser: Option<Run>,
    /// Number of additional checks that passed.
    checks: u64,
    failures: Vec<String>,
}

fn ours(options: &Options, programs: &Path, scratch: &sh::Scratch) -> Result<Ours, Failure> {
    let port = free_port()?;
    let image = scratch.join("riser.img");
    let config = scratch.join("riserd.yaml");
    fs::write(&config, configuration(&image, port))?;
    let log = scratch.join("riserd.log");
    let daemon = Daemon::start(&programs.join("riserd"), &config, &log)?;
    let portal = format!("iscsi://127.0.0.1:{port}");
    let url = format!("{portal}/{IQN}/0");
    let of_file = format!("{portal}/{IQN}/1");
    let mut failures = Vec::new();
    let mut checks = 0;
    for check in CHECKS {
        let program = options.client(check.program);
        let outcome = program.map_or(Ok(None), |program| {
            check.run(&program, &portal, &of_file, &image)
        });
        checks += report(check.name, outcome, &mut failures);
    }
    // After a single session was opened and closed, all lazy initialization should be done.
    let before = Usage::of(daemon.pid())?;
    let mut run = Run::default();
    let mut said = Vec::new();
    for tests in all_tests(options)? {
        let (part, ended) = run_suite(options, &tests, &url, scratch, "riser")?;
        said.extend(fs::read(scratch.join("riser.out"))?);
        failures.extend(ended.map(|how| format!("iscsi-test-cu {how} in {tests}")));
        if !part.is_complete {
            failures.push(format!("{tests} did not finish"));
        }
        run.tests.extend(part.tests);
    }
    if let Some(keep) = &options.log {
        fs::write(keep, said)?;
    }
    // We only run tests that were skipped for this reason. If a test passed on the first LUN, there
    // is no need to run it again.
    for (lun, lacking) in OTHER_LUNS {
        let url = format!("{portal}/{IQN}/{lun}");
        for test in run.skipped_for(lacking) {
            let (again, ended) = run_suite(
                options,
                &format!("ALL.{test}"),
                &url,
                scratch,
                "riser-again",
            )?;
            failures.extend(ended.map(|how| format!("iscsi-test-cu {how} in {test}")));
            run.merge(again);
        }
    }
    // Only file descriptors are checked, but memory is printed as well: pools and tables in the
    // daemon may grow once and keep their size.
    let after = Usage::settled(daemon.pid(), &before)?;
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
    Ok(Ours {
        run,
        iser: None,
        checks,
        failures,
    })
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

/// Returns the test names passed to the client. Usually a single process can run all tests. With
/// another libiscsi, we start a process for each suite so that we can skip a test that hangs.
fn all_tests(options: &Options) -> Result<Vec<String>, Failure> {
    let client = options
        .client(CLIENT.program)
        .filter(|_| options.libiscsi.is_some());
    // A single process is much faster. We only need to split the tests for other client versions,
    // because they have a test that hangs, and we need `--list` to get the test names.
    let (Some(client), None) = (client, &options.tests) else {
        let tests = options.tests.clone();
        return Ok(vec![tests.unwrap_or_else(|| "ALL".to_owned())]);
    };
    let list = sh::cmd(client, ["--list"]).output()?;
    let list = String::from_utf8_lossy(&list.stdout).into_owned();
    let (hangs, why) = CLIENT_HANGS;
    let suite_of = |test: &str| test.split('.').next().map(str::to_owned);
    let split = suite_of(hangs);
    let mut tests = Vec::new();
    for name in list
        .lines()
        .filter_map(|line| line.trim().strip_prefix("ALL."))
    {
        let is_split = suite_of(name) == split;
        if name == hangs {
            println!("skipping {name}: {why}");
        } else if name.contains('.') == is_split {
            tests.push(format!("ALL.{name}"));
        }
    }
    if tests.is_empty() {
        return Err("iscsi-test-cu lists no tests".into());
    }
    Ok(tests)
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
    println!("iscsi-test-cu -t {tests} against {name}");
    let path = scratch.join(&format!("{name}.out"));
    let out = File::create(&path)?;
    // Use two paths to the same LUN.
    let client = options.client(CLIENT.program);
    let client = client.ok_or("iscsi-test-cu is missing")?;
    let mut command = sh::cmd(client, ["--dataloss", "-t", tests, url, url]);
    let mut child = command
        .stdin(Stdio::null())
        .stderr(out.try_clone()?)
        .stdout(out)
        .spawn()?;
    let started = Instant::now();
    let patience = Duration::from_secs(60 * options.minutes);
    let ended = loop {
        if let Some(status) = child.try_wait()? {
            // If a test fails, the client exits with an error, but the test output already has more
            // details.
            break status.signal().map(|n| format!("died of signal {n}"));
        }
        if started.elapsed() > patience {
            let _ = child.kill();
            let _ = child.wait();
            break Some(format!("did not exit within {patience:?}"));
        }
        std::thread::sleep(Duration::from_millis(50));
    };
    println!("{name}: {:.1} s", started.elapsed().as_secs_f64());
    let said = String::from_utf8_lossy(&fs::read(&path)?).into_owned();
    Ok((Run::parse(&said), ended))
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
    fn settled(pid: u32, before: &Self) -> Result<Self, Failure> {
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
struct Check {
    name: &'static str,
    program: &'static str,
    args: fn(&str, &str) -> Vec<String>,
    /// Finds the line in the output that reports success.
    judge: fn(&str, &Path) -> Option<String>,
}

impl Check {
    /// Runs a program and returns its output.
    fn run(
        &self,
        program: &Path,
        portal: &str,
        url: &str,
        image: &Path,
    ) -> Result<Option<String>, Failure> {
        let mut command = Command::new("timeout");
        command.arg("60").arg(program);
        command.args((self.args)(portal, url));
        let said = sh::output(&mut command)?;
        match (self.judge)(&said, image) {
            Some(line) => Ok(Some(line)),
            None => Err(format!("said: {}", said.trim()).into()),
        }
    }
}

fn line_with(said: &str, word: &str) -> Option<String> {
    // Progress output overwrites the previous line.
    let mut lines = said.split(['\n', '\r']);
    lines
        .find(|line| line.contains(word))
        .map(|line| line.trim().to_owned())
}

const CHECKS: &[Check] = &[
    Check {
        name: "iscsi-ls",
        program: "iscsi-ls",
        args: |portal, _| vec![portal.to_owned()],
        judge: |said, _| line_with(said, IQN),
    },
    Check {
        name: "iscsi-ls --show-luns",
        program: "iscsi-ls",
        args: |portal, _| vec!["--show-luns".to_owned(), portal.to_owned()],
        judge: |said, _| line_with(said, "Lun:0"),
    },
    Check {
        name: "iscsi-inq",
        program: "iscsi-inq",
        args: |_, url| vec![url.to_owned()],
        judge: |said, _| line_with(said, "RISER"),
    },
    Check {
        name: "iscsi-inq --evpd",
        program: "iscsi-inq",
        args: |_, url| {
            ["--evpd=1", "--pagecode=176", url]
                .map(str::to_owned)
                .to_vec()
        },
        judge: |said, _| line_with(said, "maximum compare and write"),
    },
    Check {
        name: "iscsi-readcapacity16",
        program: "iscsi-readcapacity16",
        args: |_, url| vec![url.to_owned()],
        judge: |said, _| line_with(said, &SIZE.to_string()),
    },
    Check {
        name: "iscsi-swp on",
        program: "iscsi-swp",
        args: |_, url| vec!["--swp=on".to_owned(), url.to_owned()],
        judge: |said, _| line_with(said, "Turning SWP ON"),
    },
    Check {
        name: "iscsi-swp off",
        program: "iscsi-swp",
        args: |_, url| vec!["--swp=off".to_owned(), url.to_owned()],
        // The size must not have changed.
        judge: |said, _| {
            line_with(said, "SWP:1")?;
            line_with(said, "Turning SWP OFF")
        },
    },
    Check {
        name: "iscsi-swp",
        program: "iscsi-swp",
        args: |_, url| vec![url.to_owned()],
        judge: |said, _| line_with(said, "SWP:0"),
    },
    Check {
        name: "iscsi-perf",
        program: "iscsi-perf",
        args: |_, url| ["-t", "2", "-r", url].map(str::to_owned).to_vec(),
        judge: |said, _| line_with(said, "iops average"),
    },
    Check {
        name: "iscsi-md5sum",
        program: "iscsi-md5sum",
        args: |_, url| vec![url.to_owned()],
        judge: |said, image| {
            let sum = sh::output(&mut sh::cmd("md5sum", [image])).ok()?;
            line_with(said, sum.split_whitespace().next()?)
        },
    },
];

fn print_table(ours: &Ours, theirs: Option<&Run>) {
    // This table is for our target, so we don't add a row for a suite if it was only run on the
    // other target.
    let columns: Vec<_> = [
        Some(("riserd", &ours.run)),
        ours.iser.as_ref().map(|run| ("over iSER", run)),
        theirs.map(|run| ("tgt", run)),
    ]
    .into_iter()
    .flatten()
    .collect();
    let row = |name: &str, counts: &[Option<suite::Counts>]| {
        let cells = counts.iter().map(|counts| match counts {
            Some(c) => format!("{:>16}{:>6}{:>6}", c.passed, c.failed, c.skipped),
            None => format!("{:28}", ""),
        });
        println!("{name:<28}{}", cells.collect::<String>().trim_end());
    };
    let heads = columns
        .iter()
        .map(|(name, _)| format!("{:>16}{:>6}{:>6}", format!("{name}: pass"), "fail", "skip"));
    println!("\n{:<28}{}", "suite", heads.collect::<String>());
    for (name, _) in ours.run.suites() {
        let of = |(_, run): &(_, &Run)| {
            let mut suites = run.suites().into_iter();
            suites.find(|(n, _)| *n == name).map(|(_, counts)| counts)
        };
        row(name, &columns.iter().map(of).collect::<Vec<_>>());
    }
    let all = |(_, run): &(_, &Run)| Some(run.counts());
    row("all", &columns.iter().map(all).collect::<Vec<_>>());
    if let Some(theirs) = theirs
        && !theirs.is_complete
    {
        println!("(the client did not finish against tgt)");
    }
}

fn print_skips(ours: &Run) {
    for (reason, tests) in ours.skips() {
        println!("skipped, {reason}: {}", tests.join(" "));
    }
}
