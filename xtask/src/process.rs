//! Processes that run in the background. Their output is in a file, and they are killed on drop.

use std::fs::{self, File};
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, WaitId, WaitIdOptions, kill_process_group, waitid};

use crate::{Failure, sh};

/// Interval to poll processes.
pub(crate) const POLL_INTERVAL: Duration = Duration::from_millis(20);

/// Number of lines of the output that are part of an error.
const SHOWN: usize = 20;

/// A running process and its children, which are in the same process group.
pub(crate) struct Process {
    child: Child,
    /// The process group, until it was killed: another process may use its number later.
    group: Option<Pid>,
    name: String,
    log: PathBuf,
}

/// A process that has exited or was killed.
#[derive(Clone, Debug)]
pub(crate) struct Exited {
    /// Exit status, or `None` if it timed out.
    pub(crate) status: Option<ExitStatus>,
    /// Output, including standard error.
    pub(crate) output: String,
}

impl Process {
    pub(crate) fn start(command: Command, log: &Path) -> Result<Self, Failure> {
        let _ = fs::remove_file(log);
        Self::start_again(command, log)
    }

    /// Same, but keeps the output of an earlier process.
    pub(crate) fn start_again(mut command: Command, log: &Path) -> Result<Self, Failure> {
        let name = name_of(&command);
        let out = File::options().create(true).append(true).open(log)?;
        command
            .stdin(Stdio::null())
            .stderr(out.try_clone()?)
            .stdout(out)
            .process_group(0);
        let child = command.spawn().map_err(|e| format!("{name}: {e}"))?;
        let log = log.to_owned();
        Ok(Self {
            group: Pid::from_raw(child.id().cast_signed()),
            child,
            name,
            log,
        })
    }

    pub(crate) fn pid(&self) -> u32 {
        self.child.id()
    }

    pub(crate) fn output(&self) -> String {
        let output = fs::read(&self.log).unwrap_or_default();
        String::from_utf8_lossy(&output).into_owned()
    }

    /// Creates an error for this process, including its last output.
    pub(crate) fn failure(&self, what: &str) -> Failure {
        let output = self.output();
        let last = sh::last_lines(&output, SHOWN).join("\n");
        format!("{} {what}:\n{last}", self.name).into()
    }

    /// Waits until the condition is met. Returns an error if this takes too long, or if the process
    /// exits.
    pub(crate) fn wait_until(
        &mut self,
        patience: Duration,
        mut is_ready: impl FnMut(&Self) -> bool,
    ) -> Result<(), Failure> {
        let began = Instant::now();
        loop {
            // Read this first, because the process may exit as soon as it's ready.
            let status = self.child.try_wait()?;
            if is_ready(self) {
                return Ok(());
            }
            if let Some(status) = status {
                return Err(self.failure(&format!("exited too early, {status}")));
            }
            if began.elapsed() > patience {
                return Err(self.failure(&format!("was not ready within {patience:?}")));
            }
            std::thread::sleep(POLL_INTERVAL);
        }
    }

    fn signal(&self, signal: Signal) {
        if let Some(group) = self.group {
            let _ = kill_process_group(group, signal);
        }
    }

    /// Sends SIGTERM.
    pub(crate) fn request_stop(&self) {
        self.signal(Signal::TERM);
    }

    pub(crate) fn has_exited(&mut self) -> Result<bool, Failure> {
        Ok(self.child.try_wait()?.is_some())
    }

    /// Waits until the process exits. If it times out, it's killed.
    pub(crate) fn finish(&mut self, until: Instant) -> Exited {
        let patience = until.saturating_duration_since(Instant::now());
        let status = sh::wait_for_exit(&mut self.child, patience).ok().flatten();
        self.kill();
        Exited {
            status,
            output: self.output(),
        }
    }

    /// Stops the process with SIGTERM. Returns its exit status, or `None` if it had to be killed.
    pub(crate) fn stop(&mut self, patience: Duration) -> Option<ExitStatus> {
        if matches!(self.child.try_wait(), Ok(None)) {
            self.request_stop();
        }
        let status = sh::wait_for_exit(&mut self.child, patience).ok().flatten();
        self.kill();
        status
    }

    /// Kills the remaining processes of the group: children may still run, even if the process has
    /// exited.
    fn kill(&mut self) {
        self.signal(Signal::KILL);
        self.group = None;
        let _ = self.child.wait();
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        self.kill();
    }
}

fn name_of(command: &Command) -> String {
    let words = std::iter::once(command.get_program()).chain(command.get_args());
    let words: Vec<_> = words.collect();
    let behind = words.iter().rposition(|word| *word == "--");
    let name = behind.and_then(|at| words.get(at + 1)).unwrap_or(&words[0]);
    name.display().to_string()
}

/// Waits until a child process exits, without reaping it.
pub(crate) fn wait_for_zombie(pid: u32) -> Result<(), Failure> {
    let pid = Pid::from_raw(pid.cast_signed()).ok_or("a process ID is out of range")?;
    let options = WaitIdOptions::EXITED | WaitIdOptions::NOWAIT;
    waitid(WaitId::Pid(pid), options)?;
    Ok(())
}

/// Returns the CPU time of a process, including all threads and any children it has reaped. This
/// also works for a zombie.
pub(crate) fn cpu_time(pid: u32) -> Result<Duration, Failure> {
    let path = format!("/proc/{pid}/stat");
    let line = fs::read_to_string(&path).map_err(|e| format!("{path}: {e}"))?;
    let ticks = ticks(&line).ok_or_else(|| format!("{path}: {line}"))?;
    let each = 1.0 / rustix::param::clock_ticks_per_second() as f64;
    Ok(Duration::from_secs_f64(ticks as f64 * each))
}

/// Returns the sum of `utime`, `stime`, `cutime` and `cstime` in a `/proc/PID/stat` line (proc(5)).
fn ticks(line: &str) -> Option<u64> {
    // The process name is in parentheses, but may also contain spaces and parentheses. The first
    // field after the name is field 3 of the line, so the times are fields 14 to 17.
    let (_, behind) = line.rsplit_once(')')?;
    let times: Vec<u64> = behind
        .split_whitespace()
        .skip(11)
        .take(4)
        .map(|field| field.parse().ok())
        .collect::<Option<_>>()?;
    (times.len() == 4).then(|| times.iter().sum())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn name_is_behind_wrappers() {
        let riserd = sh::cmd("riserd", ["run"]);
        assert_eq!(name_of(&riserd), "riserd");
        assert_eq!(name_of(&sh::ending_with_us(riserd, "TERM")), "riserd");
    }

    #[test]
    fn process_is_awaited_and_stopped() {
        let scratch = sh::Scratch::new("process").unwrap();
        let log = scratch.join("log");
        let script = |text| sh::cmd("sh", ["-c", text]);
        let patience = Duration::from_secs(20);
        let mut process = Process::start(script("echo ready; sleep 60"), &log).unwrap();
        let is_ready = |process: &Process| process.output().contains("ready");
        process.wait_until(patience, is_ready).unwrap();
        assert!(!process.has_exited().unwrap());
        let status = process.stop(patience).unwrap();
        assert!(!status.success());
        let mut process = Process::start_again(script("echo two; exit 3"), &log).unwrap();
        let error = process.wait_until(patience, |_| false).unwrap_err();
        assert!(error.to_string().ends_with(":\nready\ntwo"), "{error}");
        let exited = process.finish(Instant::now());
        assert_eq!(exited.status.and_then(|status| status.code()), Some(3));
    }

    #[test]
    fn exited_child_is_noticed_before_reaping() {
        let loops = "i=0; while [ $i -lt 200000 ]; do i=$((i+1)); done";
        let mut child = sh::cmd("sh", ["-c", loops]).spawn().unwrap();
        wait_for_zombie(child.id()).unwrap();
        assert!(cpu_time(child.id()).unwrap() > Duration::ZERO);
        assert!(child.wait().unwrap().success());
    }

    #[test]
    fn times_are_found_behind_any_name() {
        let line = "12 (a) b (c) R 1 12 12 0 -1 4194304 90 80 0 0 1000 200 30 4 20 0 3 0 99 1 2";
        assert_eq!(ticks(line), Some(1234));
        assert_eq!(
            ticks("12 (a) R 1 12 12 0 -1 4194304 90 80 0 0 1000 200 30"),
            None
        );
        assert_eq!(ticks(""), None);
    }
}
