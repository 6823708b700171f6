//! Whether a program can take over: asked of itself, as a child that checks the running configuration.
//!
//! `PROGRAM check -o json /dev/stdin` is to find the configuration valid, and to say which versions of
//! the hand-over it takes. So what is no `riserd`, or one from before hand-overs, is told from one that
//! can, before anything has ended.

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

/// How long a program may take to check a configuration.
const PATIENCE: Duration = Duration::from_secs(10);

/// How often it is looked whether it has.
const LOOK: Duration = Duration::from_millis(5);

/// The longest answer that is read, in bytes.
const MAX_ANSWER: u64 = 16 << 20;

/// A program that can take over.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Candidate {
    /// Where it is.
    pub(super) program: PathBuf,
    /// Its version.
    pub(super) version: String,
}

/// Why a program cannot take over.
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
    #[error("it is no riserd that can take over from a running one; restart the service instead")]
    Stranger,
    #[error(
        "riserd {version} takes over with other words than this one has ({words:?}, not {VERSION}); restart the service instead"
    )]
    OtherWords { version: String, words: Vec<u32> },
}

/// What `check -o json` says that is of interest here.
#[derive(Deserialize)]
struct Said {
    valid: bool,
    version: String,
    takes_over: Vec<u32>,
}

/// Asks a program whether it can take over with this configuration.
pub(super) fn check(program: &Path, yaml: &str) -> Result<Candidate, CandidateError> {
    if !program.is_absolute() {
        return Err(CandidateError::NotAbsolute);
    }
    let metadata = std::fs::metadata(program).map_err(CandidateError::NotThere)?;
    if !metadata.is_file() {
        return Err(CandidateError::NotAFile);
    }
    access(program, Access::EXEC_OK).map_err(|e| CandidateError::NotThere(e.into()))?;
    let config = process::sealed(yaml.as_bytes()).map_err(CandidateError::NotAsked)?;
    let (status, answer, complaint) = ask(program, config)?;
    if !status.success() {
        let complaint = String::from_utf8_lossy(&complaint);
        let first = complaint.lines().find(|line| !line.trim().is_empty());
        let ended = || match status.signal() {
            Some(signal) => format!("it was ended by signal {signal}"),
            None => status.to_string(),
        };
        let why = first.map_or_else(ended, str::to_owned);
        return Err(CandidateError::Refuses(why));
    }
    let said: Said = serde_json::from_slice(&answer).map_err(|_| CandidateError::Stranger)?;
    if !said.valid {
        return Err(CandidateError::Stranger);
    }
    if !said.takes_over.contains(&VERSION) {
        return Err(CandidateError::OtherWords {
            version: said.version,
            words: said.takes_over,
        });
    }
    Ok(Candidate {
        program: program.to_owned(),
        version: said.version,
    })
}

/// Runs the check; how it ended, and what it has written.
fn ask(program: &Path, config: File) -> Result<(ExitStatus, Vec<u8>, Vec<u8>), CandidateError> {
    let mut child = Command::new(program)
        .args(["check", "-o", "json", "/dev/stdin"])
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
    let answer = read(child.stdout.take());
    let complaint = read(child.stderr.take());
    let status = wait(&mut child, until)?;
    // Somebody whom it has left behind may still hold the pipes.
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
            // What there is of it counts.
            let _ = pipe.take(MAX_ANSWER).read_to_end(&mut bytes);
        }
        // Whoever asked may have given up.
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
                let _ = child.wait();
                return Err(CandidateError::Silent);
            }
            Err(error) => return Err(CandidateError::NotAsked(error)),
        }
    }
}
