//! Runs test cases in namespaces on this machine instead of in a guest.
//!
//! This is enabled in the script's header (`#: here: yes`). Each case has its own network, process
//! and mount namespaces. It can create interfaces and network namespaces, and all of them are
//! removed when it exits. This doesn't need any privileges, because users can do the same in their
//! own namespaces.

use std::fs;
use std::path::Path;
use std::time::Duration;

use riser_testkit::captures::check_captures;

use super::case::Case;
use super::runner::{Programs, result_of};
use crate::cases::{Row, attempt};
use crate::tally::Kind;
use crate::{Failure, root, sh};

/// Time to wait after SIGTERM before we kill a case.
const MERCY: Duration = Duration::from_secs(5);

/// Runs the cases sequentially, because they all use the same machine. If a case fails, we run
/// it again.
pub(crate) fn run(cases: &[Case], programs: &Programs, logs: &Path) -> Vec<Row> {
    let run = |case: &Case| {
        let saved = logs.join(&case.group).join(&case.name);
        Row::run(&case.path(), Kind::Case, |results| {
            attempt(true, || {
                *results = run_in_namespaces(case, programs, &saved)?;
                Ok(())
            })
        })
    };
    cases.iter().map(run).collect()
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
    let results = result_of(code, &output)?;
    check_captures(saved, case.expected())?;
    Ok(results)
}
