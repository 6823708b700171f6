//! `cargo xtask conformance`: libiscsi's test suite against our iSCSI target over TCP, and beside
//! it the same against `tgt` on the same machine.
//!
//! The same suite runs over iSER, its client on our libraries ([`iser`]).
//!
//! The whole suite runs in one process of the installed client, or suite by suite in processes of
//! another one (`--libiscsi`), with two paths to one LUN so that the tests of multipath run too.
//! The LUN has physical blocks as long as its logical ones, as one test demands without saying so;
//! those that want another LUN are tried on one. QEMU's own client compares images on a disk of
//! ours, and boots a guest from one. A failed test, a client that dies or hangs, a daemon that
//! complains, or one that keeps file descriptors when all initiators have gone, makes the command
//! fail; what happens to the peer does not.

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
    /// Run only our own target.
    #[arg(long)]
    no_peer: bool,
    /// Leave out the suite over iSER.
    #[arg(long)]
    no_iser: bool,
    /// Only these tests, in the client's words: FAMILY, FAMILY.SUITE or FAMILY.SUITE.TEST.
    #[arg(long)]
    tests: Option<String>,
    /// Minutes that the suite may take against one target.
    #[arg(long, default_value_t = 15)]
    minutes: u64,
    /// Folder of programs that are built already.
    #[arg(long)]
    programs: Option<PathBuf>,
    /// Take the client from this folder, in which libiscsi was built, in the place of the installed
    /// one.
    #[arg(long, value_name = "DIR")]
    libiscsi: Option<PathBuf>,
    /// Keep what the client said of our target in this file.
    #[arg(long)]
    log: Option<PathBuf>,
}

impl Options {
    /// As `cargo xtask test` runs it: our target alone.
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

    /// Path of a program of libiscsi, if it is there.
    fn client(&self, program: &str) -> Option<PathBuf> {
        let Some(folder) = &self.libiscsi else {
            return sh::which(program);
        };
        // Where its build leaves programs, and where it installs them.
        let places = ["test-tool", "utils", "bin", "."];
        let mut places = places.iter().map(|place| folder.join(place).join(program));
        places.find(|path| path.is_file())
    }
}

/// End of a run.
pub(crate) enum Ended {
    /// It was tried: the suite's tests and the checks beside it, and what went wrong if something
    /// did.
    Ran(Tally, Option<String>),
    /// The client is missing.
    Unavailable(String),
}

/// All that it can make use of.
pub(crate) const NEEDS: &[&[Need]] = &[&[CLIENT], qemu::NEEDS, peer::NEEDS];

const CLIENT: Need = need(
    "iscsi-test-cu",
    "libiscsi-bin",
    "libiscsi's conformance suite",
);

/// Name of the target.
const IQN: &str = "iqn.2026-01.org.example:conformance";

/// Tests of a newer libiscsi than the distribution's that fail by their own mistakes.
const CLIENT_FAULTS: [(&str, &str); 4] = [
    (
        "CompareAndWrite.InvalidDataOutSize",
        "since libiscsi's commit b4d59cd it changes the length in every PDU but the command, so that what \
         it sends is valid",
    ),
    (
        "GetLBAStatus.UnmapSingle",
        "it asks for the status of the block after the unmapped ones, and expects that of the next \
         physical block, which is another one where these have several logical blocks",
    ),
    (
        "iSCSISendTargets.Simple",
        "it expects an answer to SendTargets=All in a normal session, where RFC 7143 Appendix C forbids it",
    ),
    (
        "iSCSITMF.AbortTaskSimpleAsync",
        "it expects its command in libiscsi's queue of what is to be sent, but libiscsi sends at once",
    ),
];

/// A test that does not end, and why.
const CLIENT_HANGS: (&str, &str) = (
    "iSCSISendTargets.Invalid",
    "it closes its connection when a key that it made up is answered by NotUnderstood, as RFC 7143 section 6.2 \
     demands, and then waits for ever for an answer by the connection that it has closed",
);

/// Bytes of a LUN: enough for the tests that write and read 32 MiB with one command.
const SIZE: u64 = 64 << 20;

/// LUNs for tests that are skipped on the first one, and with what words they say so: one has
/// longer physical blocks, one is read-only.
const OTHER_LUNS: [(u8, &str); 2] = [(1, "LBPPB < 2"), (2, "Logical unit is not write-protected")];

/// Runs everything; fails if our target failed in anything.
pub(crate) fn run(options: &Options) -> Result<(), Failure> {
    let ended = run_all(options)?;
    // They are printed, and nothing counts them here.
    let _ = noted();
    match ended {
        Ended::Ran(_, None) => Ok(()),
        Ended::Ran(_, Some(why)) | Ended::Unavailable(why) => Err(why.into()),
    }
}

/// Runs everything and says how it ended.
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
    Ok(ended(options, ours))
}

/// Parts of the step, as they are counted where nothing of it can be tried. The number of tests in
/// the suite is known to the client only.
pub(crate) fn parts() -> Vec<(Kind, String)> {
    let checks = CHECKS.iter().map(|check| check.name).chain(qemu::CHECKS);
    let checks = checks.map(|name| (Kind::Check, name.to_owned()));
    let suite = (Kind::SuiteTest, "all of libiscsi's suite".to_owned());
    std::iter::once(suite).chain(checks).collect()
}

/// Counts what came of our target. What was skipped is noted.
fn ended(options: &Options, ours: Ours) -> Ended {
    let mut suite = Counts::default();
    let mut failures = Vec::new();
    for test in &ours.run.tests {
        let name = format!("{}.{}", test.suite, test.name);
        match &test.verdict {
            Verdict::Passed => suite.passed += 1,
            Verdict::Skipped(reasons) => note(Kind::SuiteTest, &name, &reasons.join("; ")),
            Verdict::Failed(_) | Verdict::Unfinished => {
                let fault = CLIENT_FAULTS.iter().find(|(test, _)| *test == name);
                // The distribution's version does not have these faults, so there a failure is
                // ours.
                if let (Some((_, why)), true) = (fault, options.libiscsi.is_some()) {
                    println!("{name} fails, but not by our fault: {why}");
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

/// The suite over iSER.
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
            println!("the suite over iSER is left out: {why}");
            note(Kind::SuiteTest, "all of libiscsi's suite over iSER", &why);
        }
    }
    Ok(())
}

/// QEMU as a client.
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

/// Prints what came of a check, `None` if its program is missing, and keeps a failure; how many
/// checks held.
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

/// Results of our target.
struct Ours {
    run: Run,
    /// The suite over iSER.
    iser: Option<Run>,
    /// Checks beside the suite that held.
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
    // After one session has come and gone, everything that is made once is there.
    let before = Usage::of(daemon.pid())?;
    let mut run = Run::default();
    let mut said = Vec::new();
    for tests in all_tests(options)? {
        let (part, ended) = run_suite(options, &tests, &url, scratch, "riser")?;
        said.extend(fs::read(scratch.join("riser.out"))?);
        failures.extend(ended.map(|how| format!("iscsi-test-cu {how} in {tests}")));
        if !part.is_complete {
            failures.push(format!("{tests} did not come to its end"));
        }
        run.tests.extend(part.tests);
    }
    if let Some(keep) = &options.log {
        fs::write(keep, said)?;
    }
    // Only tests that were skipped for this reason: what has passed on the first LUN need not run
    // again.
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
            run.take(again);
        }
    }
    // Descriptors decide and memory is only shown: pools and tables of a daemon may grow once and
    // stay.
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
        failures.push("riserd keeps file descriptors of sessions that are gone".to_owned());
    }
    if let Err(error) = daemon.stop() {
        failures.push(error.to_string());
    }
    // Read after the end, which flushes the log and may have complaints of its own.
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

/// Tests that the client is to run: one process runs all of them, and another libiscsi a process
/// for each suite, so that a test that never ends can be left out.
fn all_tests(options: &Options) -> Result<Vec<String>, Failure> {
    let client = options
        .client(CLIENT.program)
        .filter(|_| options.libiscsi.is_some());
    // One process is much faster. Only another version of the client, in which a test hangs, has
    // to be split, and only a `--list` says which tests it has.
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
            println!("{name} is left out: {why}");
        } else if name.contains('.') == is_split {
            tests.push(format!("ALL.{name}"));
        }
    }
    if tests.is_empty() {
        return Err("iscsi-test-cu lists no tests".into());
    }
    Ok(tests)
}

/// Runs the suite in one process; what it said, and how it ended if that was no proper end.
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
    // Two paths to one LUN.
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
            // It exits with a failure if a test failed, which the tests report in more detail.
            break status.signal().map(|n| format!("died of signal {n}"));
        }
        if started.elapsed() > patience {
            let _ = child.kill();
            let _ = child.wait();
            break Some(format!("had not ended after {patience:?}"));
        }
        std::thread::sleep(Duration::from_millis(50));
    };
    println!("{name}: {:.1} s", started.elapsed().as_secs_f64());
    let said = String::from_utf8_lossy(&fs::read(&path)?).into_owned();
    Ok((Run::parse(&said), ended))
}

/// Resources that a process holds.
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

    /// Waits a little for what was there before: the last connections are still closing.
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

/// A tool of libiscsi, and what it must say.
struct Check {
    name: &'static str,
    program: &'static str,
    args: fn(&str, &str) -> Vec<String>,
    /// The line of the output that reports success.
    judge: fn(&str, &Path) -> Option<String>,
}

impl Check {
    /// Runs a program; returns its output.
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
    // Progress is written over itself.
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
        // What it was before, too.
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
    // Suites that only another column has run have no row: the table is about our target.
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
        println!("(the client did not come to its end against tgt)");
    }
}

fn print_skips(ours: &Run) {
    for (reason, tests) in ours.skips() {
        println!("skipped, {reason}: {}", tests.join(" "));
    }
}
