//! Standard output and standard error.

#![allow(clippy::print_stderr, reason = "this is where errors are printed")]

use std::io::{self, IsTerminal, Write};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use serde::Serialize;

use super::args::{Format, Global};
use super::exit::CliError;

/// Prints a result: as JSON, or as the lines that `human` writes.
pub(super) fn result<T: Serialize>(
    value: &T,
    global: &Global,
    human: impl FnOnce(&mut dyn Write) -> io::Result<()>,
) -> Result<(), CliError> {
    print(|out| match global.output {
        Format::Json => {
            serde_json::to_writer_pretty(&mut *out, value)?;
            writeln!(out)
        }
        Format::Text => human(out),
    })
}

/// Prints to standard output.
pub(super) fn print(write: impl FnOnce(&mut dyn Write) -> io::Result<()>) -> Result<(), CliError> {
    let mut out = io::stdout().lock();
    let written = write(&mut out);
    match written.and_then(|()| out.flush()) {
        // The reader of the pipe has read enough.
        Err(e) if e.kind() == io::ErrorKind::BrokenPipe => Ok(()),
        Err(e) => Err(CliError::io("cannot write to standard output", e)),
        Ok(()) => Ok(()),
    }
}

/// Prints an error with its causes.
pub(super) fn error(error: &CliError, global: &Global) {
    #[derive(Serialize)]
    struct Body<'a> {
        message: &'a str,
        causes: Vec<String>,
        #[serde(skip_serializing_if = "Option::is_none")]
        help: Option<&'a str>,
        exit_status: u8,
    }
    #[derive(Serialize)]
    struct Document<'a> {
        error: Body<'a>,
    }
    match global.output {
        // The document goes to standard error as text would: what a script reads on standard
        // output is a result or nothing.
        Format::Json => {
            let document = Document {
                error: Body {
                    message: &error.what,
                    causes: error.causes(),
                    help: error.help.as_deref(),
                    exit_status: error.exit.into(),
                },
            };
            let text = serde_json::to_string_pretty(&document);
            eprintln!("{}", text.expect("strings and numbers serialize"));
        }
        Format::Text => {
            let mut text = String::new();
            let handler = miette::GraphicalReportHandler::new_themed(theme());
            if handler.render_report(&mut text, error).is_err() {
                text = error.to_string();
            }
            eprintln!("{}", text.trim_end());
        }
    }
}

fn theme() -> miette::GraphicalTheme {
    let colour = io::stderr().is_terminal() && std::env::var_os("NO_COLOR").is_none();
    match colour {
        true => miette::GraphicalTheme::unicode(),
        false => miette::GraphicalTheme::unicode_nocolor(),
    }
}

/// A progress bar on standard error: `total` bytes, or a spinner where the total is not known.
/// Hidden where standard error is no terminal, or `--quiet` is given.
pub(super) fn progress(total: Option<u64>, global: &Global) -> ProgressBar {
    if global.quiet || global.output == Format::Json {
        return ProgressBar::hidden();
    }
    let template = match total {
        Some(_) => {
            "{bar:30} {percent:>3}% {binary_bytes} of {binary_total_bytes}, {binary_bytes_per_sec}, {eta} left"
        }
        None => "{spinner} {binary_bytes}, {binary_bytes_per_sec}",
    };
    let bar = ProgressBar::with_draw_target(total, ProgressDrawTarget::stderr());
    bar.set_style(ProgressStyle::with_template(template).expect("the template is right"));
    bar
}

/// A line on standard error that changes in place. Hidden like [`progress`].
pub(super) fn status_line(global: &Global) -> ProgressBar {
    if global.quiet || global.output == Format::Json {
        return ProgressBar::hidden();
    }
    let bar = ProgressBar::with_draw_target(None, ProgressDrawTarget::stderr());
    bar.set_style(ProgressStyle::with_template("{msg}").expect("the template is right"));
    bar
}
