//! `cargo xtask interop`: a stock Debian kernel as the peer, in QEMU.
//!
//! A case is a script in `tests/vm/cases`. Its head says, in lines that start with `#:`, which
//! group it belongs to, how long it may take, whether it is short, whether it must run alone, and
//! how many packets its captures have at least. Cases of a group may share a boot, so each starts
//! from and returns to a clean state, with the functions of `tests/vm/lib.sh`. Of each the output
//! and the daemon's log are kept, and a capture of its packets if it has one, which is judged
//! ([`judge`]). Some cases need no guest ([`here`]).

pub(crate) mod case;
pub(crate) mod guest;
mod here;
pub(crate) mod initramfs;
pub(crate) mod judge;
pub(crate) mod kernel;
mod modules;
pub(crate) mod runner;
#[cfg(test)]
mod stand_ins;

use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

pub(crate) use here::NEEDS as NEEDS_HERE;
use runner::{Programs, Rig, Row};

use crate::packages::{Need, ensure, need};
use crate::tally::Counts;
use crate::{Failure, daemon, root, sh};

/// Debian packages that the rig needs.
pub(crate) const NEEDS: &[Need] = &[
    need("qemu-system-x86_64", "qemu-system-x86", "the guest"),
    need("busybox", "busybox-static", "the guest's initramfs"),
    need("depmod", "kmod", "the guest's modules"),
    need("modprobe", "kmod", "the guest's modules"),
    need("cpio", "cpio", "the guest's initramfs"),
    need("xz", "xz-utils", "the guest's modules"),
    need("rping", "rdmacm-utils", "rping as a peer"),
    need("ib_write_bw", "perftest", "perftest as a peer"),
    // A file of it, as it has no program.
    need(
        "/etc/libibverbs.d/rxe.driver",
        "ibverbs-providers",
        "rdma_rxe for programs in the guest",
    ),
    need("rdma", "iproute2", "rdma_rxe in the guest"),
    need(
        "ibv_devinfo",
        "ibverbs-utils",
        "looking at devices in the guest",
    ),
    need("fio", "fio", "verified I/O in the guest"),
    need("sg_inq", "sg3-utils", "SCSI commands in the guest"),
    need(
        "iscsiadm",
        "open-iscsi",
        "ib_iser and iscsi_tcp in the guest",
    ),
    need(
        "iscsi-test-cu",
        "libiscsi-bin",
        "libiscsi's suite over iSER",
    ),
    need("tgtd", "tgt", "tgt's iSER target"),
    need("multipath", "multipath-tools", "dm-multipath in the guest"),
    need("mkfs.ext4", "e2fsprogs", "file systems in the guest"),
    need("qemu-img", "qemu-utils", "a judge of riser's NBD export"),
    need("nbdcopy", "libnbd-bin", "a judge of riser's NBD export"),
    need("fusermount3", "fuse3", "riser's FUSE export in the guest"),
    need("python3", "python3", "a raw client in the guest"),
    need("udevadm", "udev", "udev's rules in the guest"),
    need("targetcli", "targetcli-fb", "targetcli in the guest"),
    need("dbus-run-session", "dbus-daemon", "targetcli in the guest"),
    need("charon-systemd", "charon-systemd", "IPsec in the guest"),
    need("swanctl", "strongswan-swanctl", "IPsec in the guest"),
    need(
        "pki",
        "strongswan-pki",
        "certificates for IPsec in the guest",
    ),
    // A file of it, as it has no program.
    need(
        "/usr/lib/ipsec/plugins/libstrongswan-openssl.so",
        "libstrongswan-standard-plugins",
        "the keys of IPsec in the guest",
    ),
    need("iwpmd", "rdma-core", "a port mapper in the guest"),
    need("ibacm", "ibacm", "its place is riser-sa's"),
    need("saquery", "infiniband-diags", "questions to riser-sa"),
    need("strace", "strace", "what riser-sa and the kernel exchange"),
    need("tcpdump", "tcpdump", "captures of the cases"),
    need("tshark", "tshark", "judging the captures of the cases"),
];

/// Memory that a guest and what runs beside it may need, in MiB.
const MEMORY_PER_GUEST: u64 = 7168;

/// Options of `cargo xtask interop`.
///
/// Of each case the output, the log of riserd and a capture are kept. A capture has the first 400
/// bytes, or where more is read 1000, of the first 100,000 packets between the two hosts; packets
/// that an RDMA device sends to itself do not pass there, so a few cases have none. tshark judges
/// every capture: a malformed packet fails its case, and so do too few packets. A case that fails
/// is tried once more; if it passes then, the table and the sum say so.
#[derive(clap::Args)]
pub(crate) struct Options {
    /// Run only the cases whose group or name contains one of these words.
    cases: Vec<String>,
    /// List the cases and end.
    #[arg(long)]
    list: bool,
    /// Only the short ones.
    #[arg(long)]
    short: bool,
    /// Guests that run at once; one per two cores and one more unless said otherwise.
    #[arg(long)]
    jobs: Option<usize>,
    /// Rounds of the cases that go round, as those of the group `crash`.
    #[arg(long)]
    rounds: Option<u32>,
    /// A folder with `riserd`, `riser` and `libriser_drop_in.so`, and perhaps the tests that cases
    /// run, instead of building them.
    #[arg(long)]
    programs: Option<PathBuf>,
    /// Folder of logs and captures.
    #[arg(long, default_value = ".build/interop")]
    logs: PathBuf,
}

impl Options {
    /// Options of the test command: the short cases, or all.
    pub(crate) fn for_test(all: bool) -> Self {
        Self {
            cases: Vec::new(),
            list: false,
            short: !all,
            jobs: None,
            rounds: None,
            programs: None,
            logs: ".build/interop".into(),
        }
    }

    /// Options of `cargo xtask crash`: the cases in which the daemon is killed, so many times.
    pub(crate) fn for_kills(rounds: u32) -> Self {
        Self {
            cases: vec!["crash".into()],
            rounds: Some(rounds),
            ..Self::for_test(true)
        }
    }

    /// Number of guests at once: more than one per two cores, because cases often wait, and at
    /// most as many as fit the memory.
    fn jobs(&self) -> usize {
        self.jobs.unwrap_or_else(|| {
            let cores = std::thread::available_parallelism().map_or(1, usize::from);
            let memory = available_memory().map_or(1, |mib| mib / MEMORY_PER_GUEST);
            (cores / 2 + 1).min(memory as usize)
        })
    }
}

/// Memory that could be had now, in MiB.
fn available_memory() -> Option<u64> {
    let text = fs::read_to_string("/proc/meminfo").ok()?;
    let line = text.lines().find(|l| l.starts_with("MemAvailable:"))?;
    let kib: u64 = line.split_whitespace().nth(1)?.parse().ok()?;
    Some(kib >> 10)
}

/// End of a run.
pub(crate) enum Ended {
    /// Cases ran: how many passed and failed, and the table if one did.
    Ran(Counts, Option<String>),
    /// The rig cannot be had here: the cases that were to run, and why not.
    Unavailable(Vec<String>, String),
}

/// Runs the cases and prints their table.
pub(crate) fn run(options: &Options) -> Result<(), Failure> {
    match run_cases(options)? {
        Ended::Ran(_, None) => Ok(()),
        Ended::Ran(_, Some(why)) | Ended::Unavailable(_, why) => Err(why.into()),
    }
}

/// The names of the cases that the options choose.
pub(crate) fn names(options: &Options) -> Result<Vec<String>, Failure> {
    let cases = case::load(&options.cases, options.short)?;
    let name = |case: &case::Case| format!("{}/{}", case.group, case.name);
    Ok(cases.iter().map(name).collect())
}

/// Runs the cases; a rig that is not to be had is not a case that fails.
pub(crate) fn run_cases(options: &Options) -> Result<Ended, Failure> {
    let mut cases = case::load(&options.cases, options.short)?;
    if let Some(rounds) = options.rounds {
        let with_rounds = |case: case::Case| case.with_rounds(rounds);
        cases = cases.into_iter().map(with_rounds).collect();
    }
    if options.list {
        for c in &cases {
            println!("{:<10} {:<28} {}", c.group, c.name, c.about);
        }
        return Ok(Ended::Ran(Counts::default(), None));
    }
    let (here, mut guests): (Vec<_>, Vec<_>) = cases.into_iter().partition(|case| case.here);
    // A missing rig is reported with the names of the cases, so that they are counted as skipped,
    // and not as none.
    for (cases, needs) in [(&here, here::NEEDS), (&guests, NEEDS)] {
        if !cases.is_empty()
            && let Some(n) = ensure(needs).first()
        {
            let why = format!("{} (Debian package {}) is missing", n.program, n.package);
            return Ok(Ended::Unavailable(names(options)?, why));
        }
    }
    let kernel = match guests.is_empty() {
        true => None,
        false => match kernel::ensure() {
            Ok(kernel) => Some(kernel),
            Err(e) => {
                let why = format!("no kernel for the guest: {e}");
                return Ok(Ended::Unavailable(names(options)?, why));
            }
        },
    };
    // What builds a module may be missing here. The other cases do without it.
    for module in &modules::MODULES {
        if let Some(kernel) = &kernel
            && guests.iter().any(|case| module.is_for(case))
            && let Err(e) = module.ensure(kernel)
        {
            let why = format!("no {} for the guest: {e}", module.name());
            guests.retain(|case| !module.is_for(case));
            if here.is_empty() && guests.is_empty() {
                return Ok(Ended::Unavailable(names(options)?, why));
            }
            println!("the cases with {} are left out: {why}", module.name());
        }
    }
    // Tests take minutes to build, so only cases that run them pay for them.
    let is_used = |word: &str| guests.iter().any(|c| c.text.contains(word));
    for (test, word) in [("devices", "on_devices"), ("crash", "killed_under_load")] {
        if is_used(word) {
            link_test(test, options.programs.as_deref())?;
        }
    }
    let programs = match &options.programs {
        Some(folder) => fs::canonicalize(folder)?,
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
    let mut rows = here::run(&here, &programs, &logs);
    if let Some(kernel) = &kernel {
        let rig = Rig {
            kernel,
            programs: &programs,
            logs: &logs,
        };
        rows.extend(rig.run(&guests, jobs));
    }
    let table = table(&rows);
    let counts = counts(&rows);
    println!(
        "\n{table}\n\ninterop cases: {} passed, of these {} at the second attempt, {} failed in {:.0} s \
         with {jobs} guest(s) at once; logs in {}",
        counts.passed,
        counts.second,
        counts.failed,
        started.elapsed().as_secs_f64(),
        options.logs.display()
    );
    Ok(Ended::Ran(counts, (counts.failed > 0).then_some(table)))
}

fn counts(rows: &[Row<'_>]) -> Counts {
    let count = |is: fn(&Row<'_>) -> bool| rows.iter().filter(|row| is(row)).count() as u64;
    Counts {
        passed: count(|row| row.result.is_ok()),
        second: count(|row| row.result.is_ok() && row.first.is_some()),
        failed: count(|row| row.result.is_err()),
    }
}

/// Text with the reasons of failures, and a line for each case: its result, its time, that of its
/// boot; below it its figures.
fn table(rows: &[Row<'_>]) -> String {
    let reasons = rows.iter().filter_map(|r| {
        let why = r.result.as_ref().err()?;
        Some(format!("{}/{}: {why}\n", r.case.group, r.case.name))
    });
    let seconds = |d: Duration| format!("{:.1} s", d.as_secs_f64());
    let lines = rows.iter().map(|r| {
        let how = match (&r.result, &r.first) {
            (Ok(_), None) => "ok",
            (Ok(_), Some(_)) => "ok, 2nd",
            (Err(_), _) => "FAILED",
        };
        let boot = r
            .boot
            .map_or_else(String::new, |b| format!("boot {}", seconds(b)));
        let (group, name) = (&r.case.group, &r.case.name);
        let row = format!(
            "{how:<7} {group:<10} {name:<34} {:>8}  {boot}",
            seconds(r.took)
        );
        let first = r.first.iter().map(|why| {
            let why = why.lines().last().unwrap_or_default();
            format!("the first attempt ended with: {why}")
        });
        let lines = r.result.iter().flatten().cloned().chain(first);
        let lines: String = lines.map(|line| format!("\n        {line}")).collect();
        row + &lines
    });
    // Reasons stand first: a failed case in a long table is found by its line, and its text would
    // break the columns.
    reasons.chain(lines).collect::<Vec<_>>().join("\n")
}

/// Folder of links to test programs.
const TESTS: &str = ".build/interop-tests";

/// Links a test that cases run into [`TESTS`]: that of a folder, or one that is built.
fn link_test(test: &str, given: Option<&Path>) -> Result<(), Failure> {
    let given = given.map(|folder| folder.join(test));
    let program = match given.filter(|program| program.is_file()) {
        Some(program) => fs::canonicalize(program)?,
        None => {
            println!("building the test {test}");
            // With the whole workspace, so that what the other tests have built serves here.
            let args = ["test", "-q", "--workspace", "--test", test];
            sh::built(&args, test)?
        }
    };
    let folder = root().join(TESTS);
    fs::create_dir_all(&folder)?;
    let link = folder.join(test);
    let _ = fs::remove_file(&link);
    std::os::unix::fs::symlink(program, &link)?;
    Ok(())
}
