//! A process of libFuzzer, and what it says.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use serde_json::{Value, json};

use super::targets::Target;
use crate::{Failure, root, sh};

/// Longest input that is made, in bytes.
const MAX_LEN: usize = 16 << 10;

/// Time and memory that one input may take, in seconds and MiB.
const TIMEOUT: u64 = 20;
const MEMORY: u64 = 2048;

/// Name of the list of transitions in a target's folder.
pub(super) const TRANSITIONS: &str = "transitions";

/// Ticks of a second in `/proc` (`USER_HZ`).
const TICKS: f64 = 100.0;

/// What came of a target.
#[derive(Debug)]
pub(super) struct Figures {
    pub(super) target: Target,
    /// CPU time of the process.
    pub(super) cpu: Duration,
    pub(super) executions: u64,
    /// Inputs that the working corpus has.
    pub(super) corpus: u64,
    /// Edges that were reached, of all in the crates that are fuzzed, as far as the program has them.
    pub(super) edges: u64,
    pub(super) all_edges: u64,
    /// Inputs that reached something new in this run.
    pub(super) finds: u64,
    /// The input that failed.
    pub(super) crash: Option<PathBuf>,
    /// The process ended otherwise than it should.
    pub(super) failure: Option<String>,
}

impl Figures {
    pub(super) fn per_second(&self) -> f64 {
        self.executions as f64 / self.cpu.as_secs_f64().max(0.001)
    }

    pub(super) fn json(&self) -> Value {
        json!({
            "target": self.target.name,
            "about": self.target.about,
            "cpu_seconds": self.cpu.as_secs_f64(),
            "executions": self.executions,
            "executions_per_cpu_second": self.per_second(),
            "corpus": self.corpus,
            "edges": self.edges,
            "all_edges": self.all_edges,
            "finds": self.finds,
            "crash": self.crash,
            "failure": self.failure,
        })
    }
}

/// Folder of a target's work.
pub(super) fn work(target: &Target) -> PathBuf {
    root().join(".build/fuzz").join(target.name)
}

/// Command that runs a target's test with arguments of libFuzzer, which bolero takes from the
/// environment and separates at spaces.
pub(super) fn command(program: &Path, target: &Target, args: &[String]) -> Command {
    let mut command = sh::cmd(program, ["--exact", "--nocapture", "--test-threads=1"]);
    command.arg(target.test());
    command.env("BOLERO_LIBFUZZER_ARGS", args.join(" "));
    command.env("RUST_BACKTRACE", "0").current_dir(root());
    command.stdin(Stdio::null());
    command
}

/// A path below the root, without that: arguments have no spaces then.
pub(super) fn relative(path: &Path) -> String {
    let path = path.strip_prefix(root()).unwrap_or(path);
    path.display().to_string()
}

/// Explores a target for a time.
pub(super) fn explore(program: &Path, target: &Target, time: Duration) -> Result<Figures, Failure> {
    let work = work(target);
    let (corpus, log) = (work.join("corpus"), work.join("log"));
    fs::create_dir_all(&corpus)?;
    let committed = target.folder().join("corpus");
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
    // Inputs that are known are tried again, so the list becomes what it was.
    let transitions = work.join(TRANSITIONS);
    let _ = fs::remove_file(&transitions);
    command.env("RISER_TRANSITIONS", &transitions);
    let output = File::create(&log)?;
    command.stdout(output.try_clone()?).stderr(output);
    let mut child = command.spawn()?;
    let cpu = wait_for_end(child.id());
    let status = child.wait()?;
    let text = String::from_utf8_lossy(&fs::read(&log)?).into_owned();
    let crash = kept(target, &text)?;
    let executions = number_after(&text, "stat::number_of_executed_units:").unwrap_or(0);
    // A harness that has no test of that name succeeds, too.
    let failure = match status.success() {
        true if executions > 0 => None,
        true => Some(format!("nothing was executed, see {}", relative(&log))),
        false => Some(format!("{status}, see {}", relative(&log))),
    };
    Ok(Figures {
        target: *target,
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

/// CPU time of a child of ours, once it has ended. Until it is waited for, `/proc` has it.
fn wait_for_end(pid: u32) -> Duration {
    let stat = format!("/proc/{pid}/stat");
    loop {
        let text = fs::read_to_string(&stat).unwrap_or_default();
        // Behind the name, which may have spaces: the state, and in the 12th and 13th place the
        // times in user mode and in the kernel (proc_pid_stat(5)).
        let fields: Vec<_> = match text.rsplit_once(')') {
            Some((_, rest)) => rest.split_whitespace().collect(),
            None => return Duration::ZERO,
        };
        if fields.first() == Some(&"Z") {
            let ticks = fields[11..13].iter().filter_map(|t| t.parse::<f64>().ok());
            return Duration::from_secs_f64(ticks.sum::<f64>() / TICKS);
        }
        std::thread::sleep(Duration::from_millis(50));
    }
}

/// Puts the input that failed where `cargo test` replays it, if there is one.
fn kept(target: &Target, text: &str) -> Result<Option<PathBuf>, Failure> {
    let written = text.rsplit_once("Test unit written to ");
    let Some(path) = written.and_then(|(_, rest)| rest.lines().next()) else {
        return Ok(None);
    };
    let path = root().join(path.trim());
    let crashes = target.folder().join("crashes");
    fs::create_dir_all(&crashes)?;
    let kept = crashes.join(path.file_name().ok_or("an input has a name")?);
    fs::copy(&path, &kept)?;
    Ok(Some(kept))
}

/// The last number that follows a word.
fn number_after(text: &str, word: &str) -> Option<u64> {
    let (_, rest) = text.rsplit_once(word)?;
    let digits: String = rest
        .trim_start()
        .chars()
        .take_while(char::is_ascii_digit)
        .collect();
    digits.parse().ok()
}

/// Number of counters: `INFO: Loaded 1 modules   (123 inline 8-bit counters): …`.
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
    fn figures_are_read_from_a_log() {
        assert_eq!(counters(LOG), Some(1234));
        assert_eq!(number_after(LOG, " cov:"), Some(77));
        assert_eq!(
            number_after(LOG, "stat::number_of_executed_units:"),
            Some(999)
        );
        assert_eq!(number_after(LOG, "stat::new_units_added:"), Some(11));
        assert_eq!(number_after(LOG, "stat::peak_rss_mb:"), None);
    }

    #[test]
    fn a_child_that_ends_is_noticed_before_it_is_waited_for() {
        let loops = "i=0; while [ $i -lt 200000 ]; do i=$((i+1)); done";
        let mut child = sh::cmd("sh", ["-c", loops]).spawn().unwrap();
        let cpu = wait_for_end(child.id());
        assert!(child.wait().unwrap().success());
        assert!(cpu > Duration::ZERO);
    }
}
