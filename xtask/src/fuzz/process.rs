//! Runs a libFuzzer process and parses its output.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use super::targets::Target;
use crate::process::{Exited, Process, cpu_time, wait_for_zombie};
use crate::{Failure, root, sh};

/// Maximum input size in bytes.
const MAX_LEN: usize = 16 << 10;

/// Maximum time per input in seconds, and maximum memory in MiB.
const TIMEOUT: u64 = 20;
const MEMORY: u64 = 2048;

/// Name of the file in the target's directory used to list transitions.
pub(super) const TRANSITIONS: &str = "transitions";

/// Results for a target.
#[derive(Debug)]
pub(super) struct FuzzStats {
    pub(super) target: &'static Target,
    /// CPU time used by this process.
    pub(super) cpu: Duration,
    pub(super) executions: u64,
    /// Number of inputs in the working corpus.
    pub(super) corpus: u64,
    /// Number of edges covered. The total includes all edges in this program that belong to
    /// instrumented crates.
    pub(super) edges: u64,
    pub(super) all_edges: u64,
    /// Number of inputs in this run that have new coverage.
    pub(super) finds: u64,
    /// The input that failed, if any.
    pub(super) crash: Option<PathBuf>,
    /// Set if the process did not exit as expected.
    pub(super) failure: Option<String>,
}

impl FuzzStats {
    pub(super) fn per_second(&self) -> f64 {
        self.executions as f64 / self.cpu.as_secs_f64().max(0.001)
    }
}

pub(super) fn work_dir(target: &Target) -> PathBuf {
    root().join(".build/fuzz").join(&target.name)
}

/// Returns a command to run a target's test with libFuzzer arguments. bolero reads them from
/// the environment and splits them at spaces.
pub(super) fn command(program: &Path, target: &Target, args: &[String]) -> Command {
    let mut command = sh::cmd(program, ["--exact", "--nocapture", "--test-threads=1"]);
    command.arg(target.test());
    command.env("BOLERO_LIBFUZZER_ARGS", args.join(" "));
    command.env("RUST_BACKTRACE", "0").current_dir(root());
    command.stdin(Stdio::null());
    command
}

/// Returns a path relative to the root, because the arguments must not contain spaces.
pub(super) fn relative(path: &Path) -> String {
    let path = path.strip_prefix(root()).unwrap_or(path);
    path.display().to_string()
}

pub(super) fn explore(
    program: &Path,
    target: &'static Target,
    time: Duration,
) -> Result<FuzzStats, Failure> {
    let work = work_dir(target);
    let (corpus, log) = (work.join("corpus"), work.join("log"));
    fs::create_dir_all(&corpus)?;
    let committed = target.directory().join("corpus");
    fs::create_dir_all(&committed)?;
    let args = [
        relative(&corpus),
        relative(&committed),
        format!("-max_total_time={}", time.as_secs().max(1)),
        format!("-max_len={MAX_LEN}"),
        format!("-timeout={TIMEOUT}"),
        format!("-rss_limit_mb={MEMORY}"),
        format!("-artifact_prefix={}/", relative(&work)),
        "-print_final_stats=1".to_owned(),
        "-reload=0".to_owned(),
    ];
    let mut command = command(program, target, &args);
    // Remove the old list. All known inputs will be run again, so we don't lose any
    // transitions.
    let transitions = work.join(TRANSITIONS);
    let _ = fs::remove_file(&transitions);
    command.env("RISER_TRANSITIONS", &transitions);
    let command = sh::ending_with_us(command, "KILL");
    let mut process = Process::start(command, &log)?;
    wait_for_zombie(process.pid())?;
    let cpu = cpu_time(process.pid())?;
    let Exited {
        status,
        output: text,
    } = process.finish(Instant::now());
    let status = status.ok_or("a process that has exited has a status")?;
    let crash = save_crash(target, &text)?;
    let executions = number_after(&text, "stat::number_of_executed_units:").unwrap_or(0);
    // If there is no test with this name, the harness still returns success.
    let failure = match status.success() {
        true if executions > 0 => None,
        true => Some(format!("no input was executed, see {}", relative(&log))),
        false => Some(format!("{status}, see {}", relative(&log))),
    };
    Ok(FuzzStats {
        target,
        cpu,
        executions,
        corpus: fs::read_dir(&corpus)?.count() as u64,
        edges: number_after(&text, " cov:").unwrap_or(0),
        all_edges: counters(&text).unwrap_or(0),
        finds: number_after(&text, "stat::new_units_added:").unwrap_or(0),
        crash,
        failure,
    })
}

/// If an input failed, this copies it to the directory that `cargo test` will use to run it
/// again.
fn save_crash(target: &Target, text: &str) -> Result<Option<PathBuf>, Failure> {
    let written = text.rsplit_once("Test unit written to ");
    let Some(path) = written.and_then(|(_, rest)| rest.lines().next()) else {
        return Ok(None);
    };
    let path = root().join(path.trim());
    let crashes = target.directory().join("crashes");
    fs::create_dir_all(&crashes)?;
    let kept = crashes.join(path.file_name().ok_or("an input has a name")?);
    fs::copy(&path, &kept)?;
    Ok(Some(kept))
}

fn number_after(text: &str, word: &str) -> Option<u64> {
    let (_, rest) = text.rsplit_once(word)?;
    let digits: String = rest
        .trim_start()
        .chars()
        .take_while(char::is_ascii_digit)
        .collect();
    digits.parse().ok()
}

fn counters(text: &str) -> Option<u64> {
    let (before, _) = text.split_once(" inline 8-bit counters")?;
    before.rsplit_once('(')?.1.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    const LOG: &str = "INFO: Loaded 1 modules   (1234 inline 8-bit counters): 1234 [0x1, 0x2),\n\
        #2\tINITED cov: 5 ft: 6 corp: 1/1b exec/s: 0 rss: 30Mb\n\
        #999\tDONE   cov: 77 ft: 160 corp: 12/1Kb lim: 4 exec/s: 333 rss: 40Mb\n\
        stat::number_of_executed_units: 999\nstat::new_units_added:          11\n";

    #[test]
    fn results_are_parsed_from_log() {
        assert_eq!(counters(LOG), Some(1234));
        assert_eq!(number_after(LOG, " cov:"), Some(77));
        assert_eq!(
            number_after(LOG, "stat::number_of_executed_units:"),
            Some(999)
        );
        assert_eq!(number_after(LOG, "stat::new_units_added:"), Some(11));
        assert_eq!(number_after(LOG, "stat::peak_rss_mb:"), None);
    }
}
