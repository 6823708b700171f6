//! Questions to a running daemon, and its answers in print.

use std::fs;
use std::io::{self, IsTerminal, Write};
use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::ValueEnum;
use hyper::Method;
use serde::Serialize;
use serde::de::DeserializeOwned;

use super::{Failure, print};
use crate::control::client::{self, ClientError, Question};
use crate::control::top::{self, Top, TopError};
use crate::control::{report, socket, state};

/// A question to a running daemon.
#[derive(Debug, clap::Args)]
pub(super) struct Ask {
    /// The daemon's admin socket. Root's default is /run/riserd/admin.sock.
    #[arg(long, value_name = "PATH", env = "RISERD_SOCKET")]
    pub(super) socket: Option<PathBuf>,
    /// How to print the answer.
    #[arg(long, short, value_enum, default_value_t)]
    pub(super) output: Output,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, ValueEnum)]
pub(super) enum Output {
    /// Lines for people.
    #[default]
    #[value(alias = "human")]
    Text,
    /// One JSON document.
    Json,
}

impl Ask {
    /// Where the daemon is.
    pub(super) fn socket(&self) -> Result<PathBuf, Failure> {
        let socket = self.socket.clone().or_else(socket::default_path);
        socket.ok_or_else(|| ClientError::Nowhere.into())
    }
}

impl From<ClientError> for Failure {
    fn from(error: ClientError) -> Self {
        match error {
            ClientError::Mistake(_) => Self::mistake(error),
            _ => Self::run_time(error),
        }
    }
}

/// Asks a running daemon, and prints its answer.
pub(super) fn asked<T: Serialize + DeserializeOwned>(
    out: &mut dyn Write,
    ask: &Ask,
    question: Question,
    describe: impl Fn(&T) -> String,
) -> Result<(), Failure> {
    let answer: T = client::call(&ask.socket()?, question)?;
    tell(out, ask.output, &answer, describe)
}

pub(super) fn tell<T: Serialize>(
    out: &mut dyn Write,
    output: Output,
    answer: &T,
    describe: impl Fn(&T) -> String,
) -> Result<(), Failure> {
    let text = match output {
        Output::Text => describe(answer),
        Output::Json => serde_json::to_string(answer).map_err(Failure::run_time)?,
    };
    print(out, &text)
}

/// Reads a time between two looks.
pub(super) fn interval(text: &str) -> Result<f64, String> {
    let seconds: f64 = text.parse().map_err(|_| "not a number".to_owned())?;
    if (0.1..=3600.0).contains(&seconds) {
        Ok(seconds)
    } else {
        Err("from 0.1 to 3600 seconds".to_owned())
    }
}

/// Shows what a running daemon does.
pub(super) fn show_top(
    out: &mut dyn Write,
    interval: f64,
    once: bool,
    ask: &Ask,
) -> Result<(), Failure> {
    let stdout = io::stdout();
    let size = rustix::termios::tcgetwinsize(&stdout).ok();
    let size = size.filter(|_| stdout.is_terminal());
    let top = Top {
        every: Duration::from_secs_f64(interval),
        once,
        json: matches!(ask.output, Output::Json),
        terminal: size.map(|size| (size.ws_col.into(), size.ws_row.into())),
    };
    match top::run(&ask.socket()?, &top, out) {
        Err(TopError::Client(error)) => Err(error.into()),
        // Somebody's `head` has seen enough.
        Err(TopError::Output(e)) if e.kind() == io::ErrorKind::BrokenPipe => Ok(()),
        other => other.map_err(Failure::run_time),
    }
}

/// Writes down a running daemon's configuration.
pub(super) fn save(out: &mut dyn Write, file: Option<&Path>, ask: &Ask) -> Result<(), Failure> {
    let accept = match ask.output {
        Output::Text => None,
        Output::Json => Some("application/json"),
    };
    let question = Question {
        accept,
        ..Question::new(Method::GET, "/v1/config")
    };
    let text = client::fetch(&ask.socket()?, question)?.body;
    match file {
        Some(file) => match replace(file, &text) {
            Ok(None) => Ok(()),
            Ok(Some(old)) => {
                let (file, old) = (file.display(), old.display());
                let note =
                    format!("riserd: what {file} said before, comments included, is in {old}");
                // Nothing depends on it.
                let _ = writeln!(io::stderr(), "{note}");
                Ok(())
            }
            Err(e) => Err(Failure::run_time(format!("{}: {e}", file.display()))),
        },
        None => print(out, String::from_utf8_lossy(&text).trim_end()),
    }
}

/// Replaces a file, and keeps one that said something else: its name then.
fn replace(file: &Path, text: &[u8]) -> io::Result<Option<PathBuf>> {
    let is_file = fs::metadata(file).is_ok_and(|metadata| metadata.is_file());
    let old = is_file.then(|| fs::read(file)).transpose()?;
    let kept = match old {
        Some(old) if old != text => {
            let mut name = file.as_os_str().to_owned();
            name.push("~");
            let name = PathBuf::from(name);
            // It may hold secrets.
            state::replace(&name, &old)?;
            Some(name)
        }
        _ => None,
    };
    state::replace(file, text)?;
    Ok(kept)
}

/// Lets a running daemon hand over to a program.
pub(super) fn upgrade(
    out: &mut dyn Write,
    binary: Option<&Path>,
    ask: &Ask,
) -> Result<(), Failure> {
    let binary = binary.map(whole).transpose()?;
    let done = client::upgrade(&ask.socket()?, binary.as_deref())?;
    tell(out, ask.output, &done, report::upgraded)
}

/// A path that means the same to everybody.
fn whole(path: &Path) -> Result<String, Failure> {
    let failure =
        |why: &dyn std::fmt::Display| Failure::mistake(format!("{}: {why}", path.display()));
    let whole = std::path::absolute(path).map_err(|e| failure(&e))?;
    let text = whole.into_os_string().into_string();
    text.map_err(|_| failure(&"not UTF-8"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_that_is_replaced_is_kept() {
        let dir = std::env::temp_dir().join(format!("riserd-save-{}", std::process::id()));
        fs::create_dir_all(&dir).unwrap();
        let file = dir.join("riserd.yaml");
        assert_eq!(replace(&file, b"one").unwrap(), None);
        assert_eq!(replace(&file, b"one").unwrap(), None, "the same");
        let kept = replace(&file, b"two").unwrap().unwrap();
        assert_eq!(kept, dir.join("riserd.yaml~"));
        let read = |path: &Path| fs::read_to_string(path).unwrap();
        assert_eq!((read(&file), read(&kept)), ("two".into(), "one".into()));
        replace(&file, b"three").unwrap();
        assert_eq!((read(&file), read(&kept)), ("three".into(), "two".into()));
        fs::remove_dir_all(&dir).unwrap();
    }
}
