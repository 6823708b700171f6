//! Exit statuses and the corresponding errors.

use std::error::Error;
use std::fmt;
use std::io;
use std::process::ExitCode;

use miette::Diagnostic;
use num_enum::{FromPrimitive, IntoPrimitive};
use riser_bench::BenchError;
use riser_block::BlockError;
use riser_exports::fuse::UnmountError;

/// Exit status of a failure. If another riser process reports an unknown number, this is treated as
/// a failure. The exit status for success is 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromPrimitive, IntoPrimitive)]
#[repr(u8)]
pub enum Exit {
    /// An I/O or protocol failure.
    #[num_enum(default)]
    Failure = 1,
    /// Invalid command line.
    Usage = 2,
    /// The target can't be reached or has rejected the login.
    Refused = 3,
    /// Timeout.
    Timeout = 4,
    /// The attachment, logical unit or path doesn't exist.
    NotFound = 5,
    /// Already in use.
    Busy = 6,
    /// The data read differs from the data written.
    Mismatch = 7,
    /// The program of `riser run` can't be executed. This is the same status as in shells.
    NotExecutable = 126,
    /// The program of `riser run` doesn't exist. This is the same status as in shells.
    CommandNotFound = 127,
}

impl From<Exit> for ExitCode {
    fn from(exit: Exit) -> Self {
        Self::from(u8::from(exit))
    }
}

/// Cause of a failure, which can have another cause. It only contains text, so that it can be
/// received from another process.
#[derive(Debug)]
pub struct Cause {
    what: String,
    next: Option<Box<Cause>>,
}

impl Cause {
    /// Creates a chain of causes, starting with the outermost. If the text of a cause already ends
    /// with the text of the next cause, the latter is omitted.
    #[must_use]
    pub fn chain(texts: Vec<String>) -> Option<Box<Self>> {
        let mut kept: Vec<String> = Vec::new();
        for what in texts {
            if kept.last().is_none_or(|last| !last.ends_with(&what)) {
                kept.push(what);
            }
        }
        kept.into_iter()
            .rev()
            .fold(None, |next, what| Some(Box::new(Self { what, next })))
    }
}

impl fmt::Display for Cause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.what)
    }
}

impl Error for Cause {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        self.next.as_deref().map(|c| c as _)
    }
}

/// Failure of a verb, which includes its context, cause and advice.
#[derive(Debug)]
pub struct CliError {
    /// Exit status of this program.
    pub exit: Exit,
    /// Description of the failure and its context.
    pub what: String,
    /// Cause of the failure.
    pub cause: Option<Box<Cause>>,
    /// Advice for the user.
    pub help: Option<String>,
}

impl CliError {
    /// Creates a failure without a cause.
    #[must_use]
    pub fn new(exit: Exit, what: impl Into<String>) -> Self {
        Self {
            exit,
            what: what.into(),
            cause: None,
            help: None,
        }
    }

    /// Adds a cause.
    #[must_use]
    pub fn because(mut self, cause: impl Into<Box<dyn Error + Send + Sync>>) -> Self {
        let cause = cause.into();
        let mut texts = Vec::new();
        let mut next: Option<&dyn Error> = Some(&*cause);
        while let Some(cause) = next {
            texts.push(cause.to_string());
            next = cause.source();
        }
        self.cause = Cause::chain(texts);
        self
    }

    /// Adds advice for the user.
    #[must_use]
    pub fn help(mut self, help: impl Into<String>) -> Self {
        self.help = Some(help.into());
        self
    }

    /// Creates a failure of a system call or file operation.
    #[must_use]
    pub fn io(what: impl Into<String>, cause: io::Error) -> Self {
        let exit = match cause.kind() {
            io::ErrorKind::NotFound => Exit::NotFound,
            io::ErrorKind::TimedOut => Exit::Timeout,
            io::ErrorKind::AddrInUse | io::ErrorKind::ResourceBusy => Exit::Busy,
            _ => Exit::Failure,
        };
        Self::new(exit, what).because(cause)
    }

    /// Creates a failure of a block operation.
    #[must_use]
    pub fn block(what: impl Into<String>, cause: BlockError) -> Self {
        let exit = match cause {
            BlockError::TimedOut => Exit::Timeout,
            BlockError::OutOfRange => Exit::Usage,
            _ => Exit::Failure,
        };
        Self::new(exit, what).because(cause)
    }

    /// Creates a failure for an invalid command line.
    #[must_use]
    pub fn usage(error: &clap::Error) -> Self {
        let text = error.render().to_string();
        let text = text.trim();
        let text = text.strip_prefix("error: ").unwrap_or(text);
        match text.split_once("\n\n") {
            Some((what, help)) => Self::new(Exit::Usage, what).help(help),
            None => Self::new(Exit::Usage, text),
        }
    }

    /// Formats the failure and its causes in a single line.
    #[must_use]
    pub fn to_line(&self) -> String {
        let mut parts = vec![self.what.clone()];
        parts.extend(self.causes());
        parts.join(": ")
    }

    /// Returns the causes, starting with the outermost.
    #[must_use]
    pub fn causes(&self) -> Vec<String> {
        let mut causes = Vec::new();
        let mut next: Option<&dyn Error> = self.source();
        while let Some(cause) = next {
            causes.push(cause.to_string());
            next = cause.source();
        }
        causes
    }
}

impl fmt::Display for CliError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.what)
    }
}

impl Error for CliError {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        self.cause.as_deref().map(|c| c as _)
    }
}

impl Diagnostic for CliError {
    fn help<'a>(&'a self) -> Option<Box<dyn fmt::Display + 'a>> {
        self.help.as_ref().map(|h| Box::new(h) as _)
    }
}

impl From<UnmountError> for CliError {
    fn from(error: UnmountError) -> Self {
        match error {
            UnmountError::Busy(path) => {
                Self::new(Exit::Busy, format!("{} is busy", path.display()))
                    .help("stop the programs using it, or detach it with --force")
            }
            UnmountError::Failed { path, source } => {
                Self::io(format!("cannot unmount {}", path.display()), source)
            }
        }
    }
}

impl From<BenchError> for CliError {
    fn from(error: BenchError) -> Self {
        let exit = match &error {
            BenchError::Config(_) | BenchError::State { .. } => Exit::Usage,
            BenchError::Mismatch(_) => Exit::Mismatch,
            BenchError::Operation {
                error: BlockError::TimedOut,
                ..
            } => Exit::Timeout,
            _ => Exit::Failure,
        };
        Self::new(exit, "the benchmark failed").because(error)
    }
}
