//! Check of a program that is to take over: it runs as a child and checks the running
//! configuration.
//!
//! `PROGRAM check -o json /dev/stdin` is to find the configuration valid, and to report which
//! versions of the handover state it reads, and which system calls it makes. So another program, or
//! a `riserd` from before hand-overs, is refused before anything has ended.

use std::fs::File;
use std::io::Read;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

use rustix::fs::{Access, access};
use serde::Deserialize;

use super::{VERSION, process};
use crate::sandbox;

/// Time limit of a check.
const PATIENCE: Duration = Duration::from_secs(10);

/// Interval at which the end of the check is polled.
const LOOK: Duration = Duration::from_millis(5);

/// Longest output that is read, in bytes.
const MAX_ANSWER: u64 = 16 << 20;

/// A program that can take over.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Candidate {
    /// Absolute path of the program.
    pub(super) program: PathBuf,
    /// Version that the program reports.
    pub(super) version: String,
}

/// Reason why a program cannot take over.
#[derive(Debug, thiserror::Error)]
pub(super) enum CandidateError {
    #[error("the path of the program is not a whole one")]
    NotAbsolute,
    #[error("it cannot be run: {0}")]
    NotThere(#[source] std::io::Error),
    #[error("it is not a file")]
    NotAFile,
    #[error("it cannot be asked: {0}")]
    NotAsked(#[source] std::io::Error),
    #[error("it did not check the configuration within {} s", PATIENCE.as_secs())]
    Silent,
    #[error("it does not take the running configuration: {0}")]
    Refuses(String),
    #[error(
        "it is not a riserd that can take over from a running one; restart the service instead"
    )]
    Stranger,
    #[error(
        "riserd {version} reads other versions of the handover state ({versions:?}, not {VERSION}); restart the service instead"
    )]
    OtherVersions { version: String, versions: Vec<u32> },
    #[error(
        "riserd {version} makes system calls that the sandbox of this process refuses ({calls}); restart the service \
         instead"
    )]
    SystemCalls { version: String, calls: String },
}

/// The part of the output of `check -o json` that matters here.
#[derive(Deserialize)]
struct CheckAnswer {
    valid: bool,
    version: String,
    takes_over: Vec<u32>,
    /// Versions without a sandbox make no others than we do.
    #[serde(default)]
    system_calls: Vec<String>,
}

/// Checks that a program can take over with this configuration.
pub(super) fn check(program: &Path, yaml: &str) -> Result<Candidate, CandidateError> {
    // The daemon's working directory is not the client's, so another program might be meant.
    if !program.is_absolute() {
        return Err(CandidateError::NotAbsolute);
    }
    let metadata = std::fs::metadata(program).map_err(CandidateError::NotThere)?;
    if !metadata.is_file() {
        return Err(CandidateError::NotAFile);
    }
    access(program, Access::EXEC_OK).map_err(|e| CandidateError::NotThere(e.into()))?;
    // A file, not a pipe: a child that does not read its input cannot hold us up.
    let config = process::sealed(yaml.as_bytes()).map_err(CandidateError::NotAsked)?;
    let (status, answer, complaint) = ask(program, config)?;
    if !status.success() {
        // The first line only: a stranger may print anything at any length.
        let complaint = String::from_utf8_lossy(&complaint);
        let first = complaint.lines().find(|line| !line.trim().is_empty());
        let ended = || match status.signal() {
            Some(signal) => format!("it was ended by signal {signal}"),
            None => status.to_string(),
        };
        let why = first.map_or_else(ended, str::to_owned);
        return Err(CandidateError::Refuses(why));
    }
    let answer: CheckAnswer =
        // Not every program that ends with success is a riserd: `true` does so with any arguments.
        serde_json::from_slice(&answer).map_err(|_| CandidateError::Stranger)?;
    if !answer.valid {
        return Err(CandidateError::Stranger);
    }
    if !answer.takes_over.contains(&VERSION) {
        return Err(CandidateError::OtherVersions {
            version: answer.version,
            versions: answer.takes_over,
        });
    }
    let refused = refused_calls(&answer.system_calls);
    if !refused.is_empty() {
        return Err(CandidateError::SystemCalls {
            version: answer.version,
            calls: refused.join(", "),
        });
    }
    Ok(Candidate {
        program: program.to_owned(),
        version: answer.version,
    })
}

/// System calls among these that the filter of this process may refuse. It is that of this program,
/// or of a program before it, whose list had all of ours.
fn refused_calls(wanted: &[String]) -> Vec<&str> {
    if !sandbox::is_confined() {
        return Vec::new();
    }
    let allowed = sandbox::system_calls();
    let wanted = wanted.iter().map(String::as_str);
    wanted.filter(|call| !allowed.contains(call)).collect()
}

/// Runs the check; returns its exit status and what it has written.
fn ask(program: &Path, config: File) -> Result<(ExitStatus, Vec<u8>, Vec<u8>), CandidateError> {
    let mut child = Command::new(program)
        .args(["check", "-o", "json", "/dev/stdin"])
        // Without the descriptors that the service manager has given us: it would take them for
        // its own.
        .env_clear()
        .envs(process::environment())
        // It is not the service.
        .env_remove("NOTIFY_SOCKET")
        .stdin(config)
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .map_err(CandidateError::NotAsked)?;
    let until = Instant::now() + PATIENCE;
    // Both pipes at once: a child that fills one while we read the other would never end.
    let answer = read(child.stdout.take());
    let complaint = read(child.stderr.take());
    let status = wait(&mut child, until)?;
    // A child of its own may still hold the pipes.
    let rest = |pipe: &Receiver<Vec<u8>>| {
        let left = until.saturating_duration_since(Instant::now());
        pipe.recv_timeout(left).map_err(|_| CandidateError::Silent)
    };
    Ok((status, rest(&answer)?, rest(&complaint)?))
}

/// Reads a pipe to its end, on a thread of its own.
fn read(pipe: Option<impl Read + Send + 'static>) -> Receiver<Vec<u8>> {
    let (tx, rx) = channel();
    std::thread::spawn(move || {
        let mut bytes = Vec::new();
        if let Some(pipe) = pipe {
            // An output that ends early counts as far as it came.
            let _ = pipe.take(MAX_ANSWER).read_to_end(&mut bytes);
        }
        // The check may have run out of time.
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
                // It may have ended at last.
                let _ = child.kill();
                // Or it stays a zombie as long as the daemon runs.
                let _ = child.wait();
                return Err(CandidateError::Silent);
            }
            Err(error) => return Err(CandidateError::NotAsked(error)),
        }
    }
}
