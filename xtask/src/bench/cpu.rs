//! Measures the CPU time used by a client and its servers during a measurement.

use std::fs::{self, File};
use std::io::Read;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use crate::Failure;
use crate::process::{cpu_time, wait_for_zombie};

/// Result of a client that exited successfully.
pub(super) struct Ran {
    /// Standard output of the client.
    pub(super) output: String,
    /// CPU time used by the client from start to exit.
    pub(super) client: Duration,
    /// CPU time used by all servers during the same time.
    pub(super) server: Duration,
}

/// Runs a client until it exits. Its standard error is written to the `log` file.
pub(super) fn run(client: &mut Command, servers: &[u32], log: &Path) -> Result<Ran, Failure> {
    let name = client.get_program().to_string_lossy().into_owned();
    let failed = |e: &dyn std::fmt::Display| format!("{name}: {e}");
    let before = sum(servers)?;
    let mut child = client
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(File::create(log)?)
        .spawn()
        .map_err(|e| failed(&e))?;
    let mut output = String::new();
    let mut out = child.stdout.take().ok_or("it has an output")?;
    // Read all output before we wait for the process: with a full pipe, it would never exit.
    let read = out.read_to_string(&mut output);
    // Because the process stays a zombie until it's reaped, we can read its CPU time the same way
    // as for a server: from the same clock, and including children.
    wait_for_zombie(child.id())?;
    let spent = cpu_time(child.id());
    let status = child.wait()?;
    if !status.success() {
        let said = fs::read_to_string(log).unwrap_or_default();
        let said = [said.trim_end(), output.trim_end()].join("\n");
        return Err(failed(&format!("{status}\n{}", said.trim())).into());
    }
    read?;
    Ok(Ran {
        output,
        client: spent?,
        server: sum(servers)?.saturating_sub(before),
    })
}

fn sum(processes: &[u32]) -> Result<Duration, Failure> {
    processes.iter().map(|pid| cpu_time(*pid)).sum()
}

/// Returns the total CPU time of all threads in these processes, in nanoseconds. Unlike
/// [`cpu_time`], whose tick size is too large for idle processes, this doesn't include threads that
/// have already exited.
pub(super) fn on_processor(processes: &[u32]) -> Result<u64, Failure> {
    let mut sum = 0;
    for pid in processes {
        let tasks = format!("/proc/{pid}/task");
        for task in fs::read_dir(&tasks).map_err(|e| format!("{tasks}: {e}"))? {
            let path = task?.path().join("schedstat");
            match fs::read_to_string(&path) {
                Ok(line) => sum += run_time(&line).ok_or_else(|| format!("{path:?}: {line}"))?,
                // This thread has just exited.
                Err(e) if e.raw_os_error() == Some(rustix::io::Errno::SRCH.raw_os_error()) => {}
                Err(e) => return Err(format!("{}: {e}", path.display()).into()),
            }
        }
    }
    Ok(sum)
}

fn run_time(line: &str) -> Option<u64> {
    line.split_whitespace().next()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sh;

    #[test]
    fn process_run_time_grows() {
        assert_eq!(run_time("123456789 22 7\n"), Some(123_456_789));
        assert_eq!(run_time(""), None);
        let me = [std::process::id()];
        let before = on_processor(&me).unwrap();
        let sum: u64 = (0..2_000_000u64).map(std::hint::black_box).sum();
        assert!(sum > 0 && on_processor(&me).unwrap() > before);
        assert!(on_processor(&[u32::MAX]).is_err());
    }

    #[test]
    fn client_time_and_failure_are_reported() {
        let scratch = sh::Scratch::new("cpu-test").unwrap();
        let log = scratch.join("client.log");
        // The client's time should also include its children.
        let busy = "sh -c 'i=0; while [ $i -lt 300000 ]; do i=$((i+1)); done'; echo done";
        let me = std::process::id();
        let ran = run(&mut sh::cmd("sh", ["-c", busy]), &[me], &log).unwrap();
        assert_eq!(ran.output, "done\n");
        assert!(ran.client > Duration::ZERO, "300,000 rounds take some time");
        let why = run(
            &mut sh::cmd("sh", ["-c", "echo why >&2; exit 3"]),
            &[],
            &log,
        );
        let why = why.err().unwrap().to_string();
        assert!(why.contains("why") && why.contains('3'), "{why}");
    }
}
