//! Runs test cases in namespaces on this machine instead of in a guest.
//!
//! This is enabled in the script's header (`#: here: yes`). Each case has its own network, process
//! and mount namespaces. It can create interfaces and network namespaces, and all of them are
//! removed when it exits. This doesn't need any privileges, because users can do the same in their
//! own namespaces.

use std::fs;
use std::path::Path;
use std::time::{Duration, Instant};

use super::case::Case;
use super::judge::{Expected, check_captures};
use super::runner::{Programs, Row, report, result_of};
use crate::packages::{Need, need};
use crate::{Failure, root, sh};

/// Debian packages required by these cases.
pub(crate) const NEEDS: &[Need] = &[
    need("unshare", "util-linux", "namespaces for cases"),
    need("timeout", "coreutils", "limits of cases"),
    need("ip", "iproute2", "networks of cases"),
    need("ping", "iputils-ping", "ping over the virtual Ethernet"),
    need("arping", "arping", "ARP over the virtual Ethernet"),
    need("iperf3", "iperf3", "traffic over the virtual Ethernet"),
    need("ib_acme", "ibacm", "requests to riser-sa"),
    need("saquery", "infiniband-diags", "requests to riser-sa"),
    need("python3", "python3", "a program with libibumad"),
    need("tcpdump", "tcpdump", "captures of the cases"),
    need("tshark", "tshark", "checking the captures of the cases"),
];

/// Time to wait after SIGTERM before we kill a case.
const MERCY: Duration = Duration::from_secs(5);

/// Runs the cases sequentially, because they all use the same machine. If a case fails, we run it
/// again.
pub(crate) fn run<'a>(cases: &'a [Case], programs: &Programs, logs: &Path) -> Vec<Row<'a>> {
    let run = |case: &'a Case| {
        let first = run_case(case, programs, logs);
        report(&first);
        let Err(why) = first.result else { return first };
        let mut second = run_case(case, programs, logs);
        second.first = Some(why);
        report(&second);
        second
    };
    cases.iter().map(run).collect()
}

fn run_case<'a>(case: &'a Case, programs: &Programs, logs: &Path) -> Row<'a> {
    let started = Instant::now();
    let result = run_in_namespaces(case, programs, &logs.join(&case.group).join(&case.name));
    Row {
        case,
        boot: None,
        took: started.elapsed(),
        result: result.map_err(|e| e.to_string()),
        first: None,
    }
}

fn run_in_namespaces(
    case: &Case,
    programs: &Programs,
    saved: &Path,
) -> Result<Vec<String>, Failure> {
    let _ = fs::remove_dir_all(saved);
    fs::create_dir_all(saved)?;
    let script = saved.join("case.sh");
    let text = format!(". \"$RISER_ROOT/tests/vm/here.sh\"\n{}", case.text);
    fs::write(&script, text)?;
    let limit = case.limit.as_secs().to_string();
    let mercy = format!("--kill-after={}", MERCY.as_secs());
    let mut command = sh::cmd("timeout", [&*mercy, &*limit, "unshare"]);
    if !sh::is_root() {
        command.args(["--user", "--map-root-user"]);
    }
    command.args([
        "--net",
        "--mount",
        "--pid",
        "--fork",
        "--kill-child",
        "--mount-proc",
    ]);
    command.args(["--", "bash"]).arg(&script);
    command
        .env("RISER_ROOT", root())
        .env("RISER_BIN", &programs.programs)
        .env("KEEP", saved)
        .env("CASE", &case.name);
    let output = fs::File::create(saved.join("output.log"))?;
    let status = command
        .stdin(std::process::Stdio::null())
        .stderr(output.try_clone()?)
        .stdout(output)
        .status()?;
    let output = fs::read_to_string(saved.join("output.log"))?;
    let code = status.code().unwrap_or(-1);
    let figures = result_of(code, &output)?;
    check_captures(saved, Expected::of(case))?;
    Ok(figures)
}
