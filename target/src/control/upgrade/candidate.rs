//! Checks a program before an upgrade: it runs as a child process and checks the current
//! configuration.
//!
//! `PROGRAM check -o json /dev/stdin` must accept the configuration, and report the supported
//! handover state versions and the system calls that it needs ([`ProgramInfo`]). So other programs, or a `riserd`
//! without handover support, are rejected before anything is stopped.

use std::fs::File;
use std::io::Read;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

use rustix::fs::{Access, access};
use serde::{Deserialize, Serialize};

use super::{VERSION, process};
use crate::sandbox;

/// Timeout for a check.
const PATIENCE: Duration = Duration::from_secs(10);

/// Interval to poll the check.
const LOOK: Duration = Duration::from_millis(5);

/// Maximum output size in bytes.
const MAX_RESPONSE: u64 = 16 << 20;

/// A program that can be used for an upgrade.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Candidate {
    /// Absolute path of the program.
    pub(super) program: PathBuf,
    /// Version reported by the program.
    pub(super) version: String,
}

/// Reason why a program cannot be used for an upgrade.
#[derive(Debug, thiserror::Error)]
pub(super) enum CandidateError {
    #[error("the path of the program must be absolute")]
    NotAbsolute,
    #[error("cannot execute the program: {0}")]
    NotThere(#[source] std::io::Error),
    #[error("not a regular file")]
    NotAFile,
    #[error("cannot run the program to check the configuration: {0}")]
    NotRun(#[source] std::io::Error),
    #[error("the configuration check timed out after {} s", PATIENCE.as_secs())]
    Silent,
    #[error("the program rejected the current configuration: {0}")]
    Refuses(String),
    #[error("not a riserd that supports upgrades of a running daemon; restart the service instead")]
    Stranger,
    #[error(
        "riserd {version} only supports other versions of the handover state ({versions:?}, not \
         {VERSION}); restart the service instead"
    )]
    OtherVersions { version: String, versions: Vec<u32> },
    #[error(
        "riserd {version} requires system calls that are rejected by the sandbox of this process \
         ({calls}); restart the service instead"
    )]
    SystemCalls { version: String, calls: String },
}

/// Properties of a program that has accepted a configuration, in the output of `check -o json`.
/// They are used by daemons of any version, so they must not change.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct ProgramInfo {
    valid: bool,
    version: String,
    takes_over: Vec<u32>,
    /// Versions without a sandbox don't use any other system calls than we do.
    #[serde(default)]
    system_calls: Vec<String>,
}

impl ProgramInfo {
    /// Returns the properties of this program.
    pub(crate) fn own() -> Self {
        let calls = sandbox::system_calls().into_iter();
        Self {
            valid: true,
            version: env!("CARGO_PKG_VERSION").to_owned(),
            takes_over: vec![VERSION],
            system_calls: calls.map(str::to_owned).collect(),
        }
    }
}

/// Checks that a program supports this configuration.
pub(super) fn check(program: &Path, yaml: &str) -> Result<Candidate, CandidateError> {
    // The client has a different working directory, so it might mean a different program.
    if !program.is_absolute() {
        return Err(CandidateError::NotAbsolute);
    }
    let metadata = std::fs::metadata(program).map_err(CandidateError::NotThere)?;
    if !metadata.is_file() {
        return Err(CandidateError::NotAFile);
    }
    access(program, Access::EXEC_OK).map_err(|e| CandidateError::NotThere(e.into()))?;
    // We use a file instead of a pipe, because a child that does not read its input must not block
    // us.
    let config = process::sealed(yaml.as_bytes()).map_err(CandidateError::NotRun)?;
    let (status, info, complaint) = run_check(program, config)?;
    if !status.success() {
        // We only use the first line, because an unknown program could print anything.
        let complaint = String::from_utf8_lossy(&complaint);
        let first = complaint.lines().find(|line| !line.trim().is_empty());
        let ended = || match status.signal() {
            Some(signal) => format!("terminated by signal {signal}"),
            None => status.to_string(),
        };
        let why = first.map_or_else(ended, str::to_owned);
        return Err(CandidateError::Refuses(why));
    }
    let info: ProgramInfo =
        // A program can exit successfully without being a riserd: `true` accepts any arguments.
        serde_json::from_slice(&info).map_err(|_| CandidateError::Stranger)?;
    if !info.valid {
        return Err(CandidateError::Stranger);
    }
    if !info.takes_over.contains(&VERSION) {
        return Err(CandidateError::OtherVersions {
            version: info.version,
            versions: info.takes_over,
        });
    }
    let refused = refused_calls(&info.system_calls);
    if !refused.is_empty() {
        return Err(CandidateError::SystemCalls {
            version: info.version,
            calls: refused.join(", "),
        });
    }
    Ok(Candidate {
        program: program.to_owned(),
        version: info.version,
    })
}

/// Returns the system calls that may be rejected by the filter of this process. The filter was
/// installed by this program or a previous program, which allows all of our system calls.
fn refused_calls(wanted: &[String]) -> Vec<&str> {
    if !sandbox::is_confined() {
        return Vec::new();
    }
    let allowed = sandbox::system_calls();
    let wanted = wanted.iter().map(String::as_str);
    wanted.filter(|call| !allowed.contains(call)).collect()
}

/// Runs the check, and returns its exit status and output.
fn run_check(
    program: &Path,
    config: File,
) -> Result<(ExitStatus, Vec<u8>, Vec<u8>), CandidateError> {
    let mut child = Command::new(program)
        .args(["check", "-o", "json", "/dev/stdin"])
        // Remove the variables for descriptors from the service manager, or else the program would
        // try to use them.
        .env_clear()
        .envs(process::environment())
        // The child process is not the service.
        .env_remove("NOTIFY_SOCKET")
        .stdin(config)
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .map_err(CandidateError::NotRun)?;
    let until = Instant::now() + PATIENCE;
    // Read both pipes concurrently: if the child fills one pipe while we read the other, it would
    // block forever.
    let output = read(child.stdout.take());
    let complaint = read(child.stderr.take());
    let status = wait(&mut child, until)?;
    // A grandchild process may still hold the pipes.
    let rest = |pipe: &Receiver<Vec<u8>>| {
        let left = until.saturating_duration_since(Instant::now());
        pipe.recv_timeout(left).map_err(|_| CandidateError::Silent)
    };
    Ok((status, rest(&output)?, rest(&complaint)?))
}

/// Reads a pipe until EOF on a separate thread.
fn read(pipe: Option<impl Read + Send + 'static>) -> Receiver<Vec<u8>> {
    let (tx, rx) = channel();
    std::thread::spawn(move || {
        let mut bytes = Vec::new();
        if let Some(pipe) = pipe {
            // On errors, we use the output received so far.
            let _ = pipe.take(MAX_RESPONSE).read_to_end(&mut bytes);
        }
        // The check may have timed out.
        let _ = tx.send(bytes);
    });
    rx
}

fn wait(child: &mut Child, until: Instant) -> Result<ExitStatus, CandidateError> {
    loop {
        match child.try_wait() {
            Ok(Some(status)) => return Ok(status),
            Ok(None) if Instant::now() < until => std::thread::sleep(LOOK),
            Ok(None) => {
                // The process may have exited already.
                let _ = child.kill();
                // Otherwise, it would remain a zombie until the daemon exits.
                let _ = child.wait();
                return Err(CandidateError::Silent);
            }
            Err(error) => return Err(CandidateError::NotRun(error)),
        }
    }
}
