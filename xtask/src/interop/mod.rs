//! `cargo xtask interop`: tests with a stock Debian kernel as the peer, using QEMU.
//!
//! A test case is a script in `tests/vm/cases`. Lines that start with `#:` are the header, which
//! sets the group, the timeout, the minimum number of packets in captures, and if the case should
//! be run with the short cases or must run alone. Because a boot can be used for all cases in a
//! group, each case has to start with a clean state and restore it, using the functions in
//! `tests/vm/lib.sh`. We keep the output and the daemon's log for each case. If there is a packet
//! capture, we check it ([`judge`]). Some cases don't need a guest ([`here`]). If `boots` is set,
//! the case uses a guest with systemd that is shut down and booted several times with the same
//! disk.

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

/// Debian packages required for the guests.
pub(crate) const NEEDS: &[Need] = &[
    need("qemu-system-x86_64", "qemu-system-x86", "the guest"),
    need("busybox", "busybox-static", "the guest's initramfs"),
    need("depmod", "kmod", "the guest's modules"),
    need("modprobe", "kmod", "the guest's modules"),
    need("cpio", "cpio", "the guest's initramfs"),
    need("xz", "xz-utils", "the guest's modules"),
    need("rping", "rdmacm-utils", "rping as a peer"),
    need("ib_write_bw", "perftest", "perftest as a peer"),
    // We check for a file here because this package has no program.
    need(
        "/etc/libibverbs.d/rxe.driver",
        "ibverbs-providers",
        "rdma_rxe for programs in the guest",
    ),
    need("rdma", "iproute2", "rdma_rxe in the guest"),
    need(
        "ibv_devinfo",
        "ibverbs-utils",
        "showing devices in the guest",
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
    need("qemu-img", "qemu-utils", "checking riser's NBD export"),
    need("nbdcopy", "libnbd-bin", "checking riser's NBD export"),
    need("fusermount3", "fuse3", "riser's FUSE export in the guest"),
    need("python3", "python3", "a raw client in the guest"),
    need("udevadm", "udev", "udev's rules in the guest"),
    need(
        "/lib/systemd/systemd",
        "systemd",
        "guests that boot several times",
    ),
    need("targetcli", "targetcli-fb", "targetcli in the guest"),
    need("dbus-run-session", "dbus-daemon", "targetcli in the guest"),
    need("charon-systemd", "charon-systemd", "IPsec in the guest"),
    need("swanctl", "strongswan-swanctl", "IPsec in the guest"),
    need(
        "pki",
        "strongswan-pki",
        "certificates for IPsec in the guest",
    ),
    // We check for a file here because this package has no program.
    need(
        "/usr/lib/ipsec/plugins/libstrongswan-openssl.so",
        "libstrongswan-standard-plugins",
        "the keys of IPsec in the guest",
    ),
    need("iwpmd", "rdma-core", "a port mapper in the guest"),
    need("ibacm", "ibacm", "it conflicts with riser-sa"),
    need("saquery", "infiniband-diags", "requests to riser-sa"),
    need(
        "strace",
        "strace",
        "messages between riser-sa and the kernel",
    ),
    need("tcpdump", "tcpdump", "captures of the cases"),
    need("tshark", "tshark", "checking the captures of the cases"),
];

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
    /// Number of guests to run in parallel; by default one for every two cores, plus one.
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
    /// Options for the test command: either the short cases or all cases.
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

    /// Options for `cargo xtask crash`: run the cases that kill the daemon, with this number of
    /// rounds.
    pub(crate) fn for_kills(rounds: u32) -> Self {
        Self {
            cases: vec!["crash".into()],
            rounds: Some(rounds),
            ..Self::for_test(true)
        }
    }

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

/// Returns the available memory in MiB.
fn available_memory() -> Option<u64> {
    let text = fs::read_to_string("/proc/meminfo").ok()?;
    let line = text.lines().find(|l| l.starts_with("MemAvailable:"))?;
    let kib: u64 = line.split_whitespace().nth(1)?.parse().ok()?;
    Some(kib >> 10)
}

/// Result of a run.
pub(crate) enum Ended {
    /// The cases were run. Contains the counts, and the table if any case failed.
    Ran(Counts, Option<String>),
    /// The cases can't be run here. Contains their names and the reason.
    Unavailable(Vec<String>, String),
}

/// Runs the cases and prints the table.
pub(crate) fn run(options: &Options) -> Result<(), Failure> {
    match run_cases(options)? {
        Ended::Ran(_, None) => Ok(()),
        Ended::Ran(_, Some(why)) | Ended::Unavailable(_, why) => Err(why.into()),
    }
}

/// Returns the names of the cases selected by the options.
pub(crate) fn names(options: &Options) -> Result<Vec<String>, Failure> {
    let cases = case::load(&options.cases, options.short)?;
    let name = |case: &case::Case| format!("{}/{}", case.group, case.name);
    Ok(cases.iter().map(name).collect())
}

/// Runs the cases. If the requirements are not available, this is not a failure.
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
    // If a requirement is missing, return the case names so that they are counted as skipped.
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
                let why = format!("cannot prepare the guest's kernel: {e}");
                return Ok(Ended::Unavailable(names(options)?, why));
            }
        },
    };
    // The tools to build a module may be missing, but other cases can run without it.
    for module in &modules::MODULES {
        if let Some(kernel) = &kernel
            && guests.iter().any(|case| module.is_for(case))
            && let Err(e) = module.ensure(kernel)
        {
            let why = format!("cannot prepare {} for the guest: {e}", module.name());
            guests.retain(|case| !module.is_for(case));
            if here.is_empty() && guests.is_empty() {
                return Ok(Ended::Unavailable(names(options)?, why));
            }
            println!("skipping the cases with {}: {why}", module.name());
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

/// Formats the table: the reasons of all failures, then a line per case with its result, its run
/// time and the boot time, followed by its measured values.
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
            format!("the first attempt failed: {why}")
        });
        let lines = r.result.iter().flatten().cloned().chain(first);
        let lines: String = lines.map(|line| format!("\n        {line}")).collect();
        row + &lines
    });
    // Print the reasons first: the table line is enough to find a failed case, but the text would
    // break the columns.
    reasons.chain(lines).collect::<Vec<_>>().join("\n")
}

/// Directory for links to test programs.
const TESTS: &str = ".build/interop-tests";

/// Creates a link to a test used by cases in [`TESTS`]. The test is either from the given directory
/// or is built here.
fn link_test(test: &str, given: Option<&Path>) -> Result<(), Failure> {
    let given = given.map(|folder| folder.join(test));
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
    let folder = root().join(TESTS);
    fs::create_dir_all(&folder)?;
    let link = folder.join(test);
    let _ = fs::remove_file(&link);
    std::os::unix::fs::symlink(program, &link)?;
    Ok(())
}
