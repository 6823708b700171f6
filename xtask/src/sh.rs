//! Runs other programs.

use std::ffi::OsStr;
use std::io;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use crate::Failure;

/// Runs a program until it exits and returns its standard output. On failure, the error
/// contains its standard error.
pub(crate) fn output(command: &mut Command) -> Result<String, Failure> {
    let shown = command_line(command);
    let out = command
        .stdin(Stdio::null())
        .output()
        .map_err(|e| format!("{shown}: {e}"))?;
    // We don't show standard error on success, because progress and warnings would hide the output
    // of a step.
    if out.status.success() {
        return Ok(String::from_utf8_lossy(&out.stdout).into_owned());
    }
    let printed = [out.stderr.as_slice(), out.stdout.as_slice()].concat();
    Err(format!(
        "{shown}: {}\n{}",
        out.status,
        String::from_utf8_lossy(&printed).trim_end()
    )
    .into())
}

/// Runs a program until it exits, using our standard output and error.
pub(crate) fn run(command: &mut Command) -> Result<(), Failure> {
    let shown = command_line(command);
    let status = command
        .stdin(Stdio::null())
        .status()
        .map_err(|e| format!("{shown}: {e}"))?;
    if status.success() {
        Ok(())
    } else {
        Err(format!("{shown}: {status}").into())
    }
}

pub(crate) fn cmd<S: AsRef<OsStr>>(
    program: impl AsRef<OsStr>,
    args: impl IntoIterator<Item = S>,
) -> Command {
    let mut c = Command::new(program);
    c.args(args);
    c
}

pub(crate) fn cargo<S: AsRef<OsStr>>(args: impl IntoIterator<Item = S>) -> Command {
    let mut c = cmd(
        std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()),
        args,
    );
    c.current_dir(crate::root());
    c
}

/// Returns a command for a program installed by `cargo install`, because its directory may not be
/// in `PATH`.
pub(crate) fn installed(program: &str) -> Command {
    let home = std::env::var_os("CARGO_HOME").map(PathBuf::from);
    let home = home.or_else(|| std::env::home_dir().map(|home| home.join(".cargo")));
    let there = home.map(|home| home.join("bin").join(program));
    let there = there.filter(|path| path.is_file());
    let mut c = Command::new(there.unwrap_or_else(|| program.into()));
    c.current_dir(crate::root());
    c
}

pub(crate) fn behind(mut program: Command, command: &Command) -> Command {
    program.arg(command.get_program()).args(command.get_args());
    // `Command` has no support for adding a wrapper, so we create a new one based on the values it
    // can return.
    for (name, value) in command.get_envs() {
        if let Some(value) = value {
            program.env(name, value);
        }
    }
    program.current_dir(command.get_current_dir().unwrap_or(Path::new(".")));
    program
}

/// Returns the same command, but the process will receive a signal if the thread that started it
/// exits. This ensures that no daemon is left behind if we are killed.
pub(crate) fn ending_with_us(command: Command, signal: &str) -> Command {
    // util-linux supports this as an option, so we don't have to run code between fork and
    // exec.
    match which("setpriv") {
        Some(setpriv) => behind(cmd(setpriv, ["--pdeathsig", signal, "--"]), &command),
        None => command,
    }
}

/// Returns the last lines of an output, without empty lines.
pub(crate) fn last_lines(output: &str, number: usize) -> Vec<&str> {
    let lines: Vec<_> = output
        .lines()
        .filter(|line| !line.trim().is_empty())
        .collect();
    lines[lines.len().saturating_sub(number)..].to_vec()
}

/// Waits until a process exits. Returns `None` if it's still running after this time.
pub(crate) fn wait_for_exit(
    child: &mut Child,
    patience: Duration,
) -> io::Result<Option<ExitStatus>> {
    let began = Instant::now();
    loop {
        let status = child.try_wait()?;
        if status.is_some() || began.elapsed() >= patience {
            return Ok(status);
        }
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// Removes directories of killed runs: their names start with this prefix, followed by the ID of a
/// process that no longer exists.
fn remove_abandoned(parent: &Path, beginning: &str) {
    let entries = std::fs::read_dir(parent).into_iter().flatten().flatten();
    for entry in entries {
        let name = entry.file_name();
        let pid = name.to_str().and_then(|name| name.strip_prefix(beginning));
        let pid = pid.and_then(|pid| pid.parse::<u32>().ok());
        if pid.is_some_and(|pid| !Path::new(&format!("/proc/{pid}")).exists()) {
            let _ = std::fs::remove_dir_all(entry.path());
        }
    }
}

pub(crate) fn host(rustc: &mut Command) -> Result<String, Failure> {
    let text = output(rustc)?;
    let host = text.lines().find_map(|line| line.strip_prefix("host: "));
    Ok(host.ok_or("rustc does not report its host")?.to_owned())
}

/// Parses Cargo's messages in JSON; any other lines are ignored.
pub(crate) fn messages(output: &str) -> Vec<serde_json::Value> {
    let lines = output.lines();
    lines
        .filter_map(|line| serde_json::from_str(line).ok())
        .collect()
}

pub(crate) fn json(output: &str) -> Result<serde_json::Value, Failure> {
    let start = output.find('{').ok_or("missing JSON in the output")?;
    let mut documents = serde_json::Deserializer::from_str(&output[start..]).into_iter();
    Ok(documents.next().ok_or("missing JSON in the output")??)
}

pub(crate) fn built(args: &[&str], name: &str) -> Result<PathBuf, Failure> {
    let args = args.iter().chain(&["--no-run", "--message-format=json"]);
    let messages = messages(&output(&mut cargo(args))?);
    let program = messages
        .iter()
        .filter(|m| m["target"]["name"] == name)
        .find_map(|m| m["executable"].as_str().map(PathBuf::from));
    program.ok_or_else(|| format!("cargo reports no program {name}").into())
}

pub(crate) fn which(program: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    // For a regular user, `PATH` may not include the system directories, but these programs still
    // work.
    std::env::split_paths(&path)
        .chain(["/usr/sbin", "/sbin"].map(PathBuf::from))
        .map(|dir| dir.join(program))
        .find(|p| p.is_file())
}

pub(crate) fn is_root() -> bool {
    std::fs::metadata("/proc/self").is_ok_and(|m| std::os::unix::fs::MetadataExt::uid(&m) == 0)
}

/// Temporary directory that is removed on drop.
pub(crate) struct Scratch(PathBuf);

impl Scratch {
    /// Creates the directory; its name contains our process ID.
    pub(crate) fn new(name: &str) -> Result<Self, Failure> {
        Self::below(&std::env::temp_dir(), name)
    }

    /// Creates the directory in memory if possible.
    pub(crate) fn in_memory(name: &str) -> Result<Self, Failure> {
        let shm = Path::new("/dev/shm");
        match shm.is_dir() {
            true => Self::below(shm, name),
            false => Self::new(name),
        }
    }

    pub(crate) fn below(parent: &Path, name: &str) -> Result<Self, Failure> {
        remove_abandoned(parent, &format!("riser-{name}-"));
        let path = parent.join(format!("riser-{name}-{}", std::process::id()));
        std::fs::create_dir_all(&path).map_err(|e| format!("{}: {e}", path.display()))?;
        Ok(Self(path))
    }

    pub(crate) fn path(&self) -> &Path {
        &self.0
    }

    pub(crate) fn join(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

fn command_line(command: &Command) -> String {
    std::iter::once(command.get_program())
        .chain(command.get_args())
        .map(|s| s.to_string_lossy().into_owned())
        .collect::<Vec<_>>()
        .join(" ")
}

#[cfg(test)]
mod tests {
    use std::io::Read;
    use std::os::unix::process::ExitStatusExt;

    use riser_testkit::skip::skip;

    use super::*;

    #[test]
    fn server_exits_with_starting_thread() {
        if which("setpriv").is_none() {
            return skip("ending a server with its parent", "there is no setpriv");
        }
        let start = || {
            let server = cmd("sh", ["-c", "echo up; exec sleep 60"]);
            let mut server = ending_with_us(server, "TERM");
            let mut child = server.stdout(Stdio::piped()).spawn().unwrap();
            let mut line = [0; 3];
            let out = child.stdout.as_mut().unwrap();
            out.read_exact(&mut line).unwrap();
            child
        };
        let mut child = std::thread::spawn(start).join().unwrap();
        assert_eq!(child.wait().unwrap().signal(), Some(15));
    }

    #[test]
    fn directories_of_dead_processes_are_removed() {
        let scratch = Scratch::new("abandoned-test").unwrap();
        let ours = format!("riser-bench-{}", std::process::id());
        // Larger than any valid process ID.
        let directories = [
            "riser-bench-4194305",
            ours.as_str(),
            "riser-bench-notes",
            "other-4194305",
        ];
        for directory in directories {
            std::fs::create_dir(scratch.join(directory)).unwrap();
        }
        std::fs::write(scratch.join(directories[0]).join("disk.img"), "data").unwrap();
        remove_abandoned(scratch.path(), "riser-bench-");
        let left = directories.map(|directory| scratch.join(directory).exists());
        assert_eq!(left, [false, true, true, true]);
    }
}
