//! `cargo xtask interop`: a stock Debian kernel as the peer, in QEMU.
//!
//! A case is a script in `tests/vm/cases`. Its head says, in lines that start with `#:`, which group
//! it belongs to, how long it may take and whether it is short. All cases of a group share one boot
//! and run in the order of their names; each starts from and returns to a clean state, with the
//! functions of `tests/vm/lib.sh`.

pub(crate) mod guest;
pub(crate) mod initramfs;
pub(crate) mod kernel;

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use guest::{Guest, Shape};

use crate::packages::{Need, ensure, need};
use crate::{Failure, demo, root, sh};

/// What the rig needs.
const NEEDS: &[Need] = &[
    need("qemu-system-x86_64", "qemu-system-x86", "the guest"),
    need("busybox", "busybox-static", "the guest's initramfs"),
    need("depmod", "kmod", "the guest's modules"),
    need("modprobe", "kmod", "the guest's modules"),
    need("cpio", "cpio", "the guest's initramfs"),
    need("xz", "xz-utils", "the guest's modules"),
    need("rping", "rdmacm-utils", "rping as a peer"),
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
    need("multipath", "multipath-tools", "dm-multipath in the guest"),
    need("tcpdump", "tcpdump", "captures of the cases"),
];

/// Options of `cargo xtask interop`.
#[derive(clap::Args)]
pub(crate) struct Options {
    /// Run only the cases whose group or name contains one of these words.
    cases: Vec<String>,
    /// List the cases.
    #[arg(long)]
    list: bool,
    /// Only the short ones.
    #[arg(long)]
    short: bool,
    /// A folder with `riserd` and `riser`, instead of building them.
    #[arg(long)]
    programs: Option<PathBuf>,
    /// Where logs and captures are kept.
    #[arg(long, default_value = ".build/interop")]
    logs: PathBuf,
}

impl Options {
    /// What the test command runs.
    pub(crate) fn for_test() -> Self {
        Self {
            cases: Vec::new(),
            list: false,
            short: true,
            programs: None,
            logs: ".build/interop".into(),
        }
    }
}

/// One case: a script and what its head says.
struct Case {
    name: String,
    group: String,
    about: String,
    limit: Duration,
    short: bool,
    text: String,
}

/// What was built for the cases; empty where no case asks for it.
struct Programs {
    /// The folder of `riserd` and `riser`.
    programs: PathBuf,
    /// The folder of the test programs, under their plain names.
    tests: PathBuf,
}

/// Why nothing could be run at all, as opposed to a case that failed.
pub(crate) enum Ended {
    /// Every case passed: how many.
    Passed(u64),
    /// The rig cannot be had here.
    Unavailable(String),
    /// Some failed: how many passed and failed, and the table.
    Failed((u64, u64), String),
}

/// Runs the cases and prints their table.
pub(crate) fn run(options: &Options) -> Result<(), Failure> {
    match run_cases(options)? {
        Ended::Passed(_) => Ok(()),
        Ended::Unavailable(why) => Err(why.into()),
        Ended::Failed(_, why) => Err(why.into()),
    }
}

/// Runs the cases; tells a rig that is not to be had from a case that fails.
pub(crate) fn run_cases(options: &Options) -> Result<Ended, Failure> {
    let cases = load(options)?;
    if options.list {
        for c in &cases {
            println!("{:<10} {:<28} {}", c.group, c.name, c.about);
        }
        return Ok(Ended::Passed(0));
    }
    if let Some(n) = ensure(&NEEDS.iter().collect::<Vec<_>>()).first() {
        return Ok(Ended::Unavailable(format!(
            "{} (Debian package {}) is missing",
            n.program, n.package
        )));
    }
    let kernel = match kernel::ensure() {
        Ok(kernel) => kernel,
        Err(e) => return Ok(Ended::Unavailable(format!("no kernel for the guest: {e}"))),
    };
    let tests = if cases.iter().any(|c| c.text.contains("on_devices")) {
        println!("building the transport tests");
        build_tests()?
    } else {
        PathBuf::new()
    };
    let is_served = cases.iter().any(|c| {
        ["$RISER_BIN", "serve"]
            .iter()
            .any(|word| c.text.contains(word))
    });
    let programs = match &options.programs {
        Some(folder) => fs::canonicalize(folder)?,
        None if is_served => {
            println!("building riserd and riser");
            demo::build()?
        }
        None => PathBuf::new(),
    };
    let programs = Programs { programs, tests };
    let mut groups: BTreeMap<&str, Vec<&Case>> = BTreeMap::new();
    for case in &cases {
        groups.entry(&case.group).or_default().push(case);
    }
    let logs = root().join(&options.logs);
    let (mut rows, mut passed, mut failed) = (Vec::new(), 0, 0);
    for (group, cases) in groups {
        for (case, took, result) in run_group(&kernel, &logs.join(group), &programs, &cases) {
            let how = match &result {
                Ok(()) => {
                    passed += 1;
                    "ok"
                }
                Err(e) => {
                    failed += 1;
                    println!("{group}/{}: {e}", case.name);
                    "FAILED"
                }
            };
            rows.push(format!(
                "{how:<7} {group:<10} {:<28} {:>7.1} s",
                case.name,
                took.as_secs_f64()
            ));
        }
    }
    println!("\n{}", rows.join("\n"));
    println!(
        "\ninterop cases: {passed} passed, {failed} failed; logs in {}",
        options.logs.display()
    );
    if failed == 0 {
        Ok(Ended::Passed(passed))
    } else {
        Ok(Ended::Failed((passed, failed), rows.join("\n")))
    }
}

/// Builds the transport's tests that cases run, and answers a folder with links to them.
fn build_tests() -> Result<PathBuf, Failure> {
    const TEST: &str = "devices";
    let text = sh::output(&mut sh::cargo([
        "test",
        "-q",
        "-p",
        "riser-transport",
        "--test",
        TEST,
        "--no-run",
        "--message-format=json",
    ]))?;
    let program = text
        .lines()
        .filter_map(|l| serde_json::from_str::<serde_json::Value>(l).ok())
        .filter(|m| m["target"]["name"] == TEST)
        .find_map(|m| m["executable"].as_str().map(PathBuf::from))
        .ok_or("cargo names no test program")?;
    let folder = root().join(".build/interop-tests");
    fs::create_dir_all(&folder)?;
    let link = folder.join(TEST);
    let _ = fs::remove_file(&link);
    std::os::unix::fs::symlink(program, &link)?;
    Ok(folder)
}

type Row<'a> = (&'a Case, Duration, Result<(), Failure>);

/// Runs the cases of a group on one boot; a case that leaves the guest unusable costs a new boot.
fn run_group<'a>(
    kernel: &kernel::Kernel,
    folder: &Path,
    programs: &Programs,
    cases: &[&'a Case],
) -> Vec<Row<'a>> {
    let mut rows: Vec<Row<'a>> = Vec::new();
    let mut guest: Option<Guest> = None;
    for case in cases {
        let started = Instant::now();
        let result = run_case(kernel, folder, programs, case, &mut guest);
        println!(
            "{} {}/{} ({:.0} s)",
            if result.is_ok() { "ok    " } else { "FAILED" },
            case.group,
            case.name,
            started.elapsed().as_secs_f64()
        );
        rows.push((case, started.elapsed(), result));
    }
    rows
}

fn run_case(
    kernel: &kernel::Kernel,
    folder: &Path,
    programs: &Programs,
    case: &Case,
    guest: &mut Option<Guest>,
) -> Result<(), Failure> {
    fs::create_dir_all(folder)?;
    let vm = match guest.take() {
        Some(vm) => guest.insert(vm),
        None => guest.insert(Guest::boot(kernel, folder, Shape::default())?),
    };
    let script = format!(
        "export RISER_BIN='{}' RISER_TESTS='{}' CASE='{}'\n. /vm/lib.sh\n{}",
        programs.programs.display(),
        programs.tests.display(),
        case.name,
        case.text
    );
    let ran = vm.run(&script, case.limit);
    let saved = folder.join(&case.name);
    fs::create_dir_all(&saved)?;
    keep(vm.share(), &saved)?;
    match ran {
        Ok(ran) => {
            fs::write(saved.join("output.log"), &ran.output)?;
            if ran.status == 0 {
                return Ok(());
            }
            // What a failed case leaves behind must not fail the next one.
            *guest = None;
            let lines: Vec<_> = ran.output.lines().collect();
            let tail = lines[lines.len().saturating_sub(30)..].join("\n");
            Err(format!("exit status {}\n{tail}", ran.status).into())
        }
        Err(e) => {
            *guest = None;
            Err(e)
        }
    }
}

/// Moves what a case left in `/vm/keep` to the folder of its logs.
fn keep(share: &Path, saved: &Path) -> Result<(), Failure> {
    let from = share.join("keep");
    if from.is_dir() {
        for entry in fs::read_dir(&from)? {
            let entry = entry?;
            fs::copy(entry.path(), saved.join(entry.file_name()))?;
        }
        fs::remove_dir_all(&from)?;
    }
    Ok(())
}

/// Reads the cases that the options name, in the order of their names.
fn load(options: &Options) -> Result<Vec<Case>, Failure> {
    let mut cases = Vec::new();
    for entry in fs::read_dir(root().join("tests/vm/cases"))? {
        let script = entry?.path();
        if script.extension().is_some_and(|e| e == "sh") {
            cases.push(head(&script)?);
        }
    }
    cases.sort_by(|a, b| (&a.group, &a.name).cmp(&(&b.group, &b.name)));
    let wanted = |c: &Case| {
        (!options.short || c.short)
            && (options.cases.is_empty()
                || options
                    .cases
                    .iter()
                    .any(|w| c.name.contains(w.as_str()) || c.group == *w))
    };
    cases.retain(wanted);
    if cases.is_empty() {
        Err("no case of that name; --list names them".into())
    } else {
        Ok(cases)
    }
}

/// Reads the `#:` lines of a case.
fn head(script: &Path) -> Result<Case, Failure> {
    let text = fs::read_to_string(script)?;
    let field = |name: &str| {
        text.lines()
            .find_map(|l| {
                l.strip_prefix("#: ")?
                    .strip_prefix(name)?
                    .strip_prefix(": ")
            })
            .map(str::trim)
    };
    let missing = |name: &str| format!("{}: no line '#: {name}: …'", script.display());
    Ok(Case {
        name: script
            .file_stem()
            .unwrap_or_default()
            .to_string_lossy()
            .into_owned(),
        group: field("group").ok_or_else(|| missing("group"))?.to_owned(),
        about: field("about").ok_or_else(|| missing("about"))?.to_owned(),
        limit: Duration::from_secs(field("limit").ok_or_else(|| missing("limit"))?.parse()?),
        short: field("short") == Some("yes"),
        text: text.clone(),
    })
}
