//! Output to standard output and standard error.

#![allow(clippy::print_stderr, reason = "this is where errors are printed")]

use std::ffi::OsString;
use std::fmt::Display;
use std::io::{self, IsTerminal, Write};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use serde::Serialize;

use super::args::{Format, Global};
use super::exit::CliError;

/// Prints a result, either as JSON or as text written by `human`.
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
        // The pipe was closed by its reader.
        Err(e) if e.kind() == io::ErrorKind::BrokenPipe => Ok(()),
        Err(e) => Err(CliError::io("cannot write to standard output", e)),
        Ok(()) => Ok(()),
    }
}

/// Replaces control characters in text, which could change the terminal. This is used for paths and
/// names chosen by other users or targets.
pub(super) fn printable(text: &dyn Display) -> String {
    let visible = |c: char| if c.is_control() { '?' } else { c };
    text.to_string().chars().map(visible).collect()
}

/// Returns whether a command line requests JSON, even if it's invalid.
pub(super) fn wants_json(args: impl Iterator<Item = OsString>) -> bool {
    let mut before = OsString::new();
    args.take_while(|arg| arg != "--").any(|arg| {
        let is_option = ["-ojson", "-o=json", "--output=json"]
            .iter()
            .any(|o| arg == *o);
        let is_value = arg == "json" && (before == "-o" || before == "--output");
        before = arg;
        is_option || is_value
    })
}

/// Prints an error and its causes as JSON. As for text, this is written to standard error, so that
/// standard output is either a result or empty.
pub(super) fn json_error(error: &CliError) {
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

/// Prints an error and its causes.
pub(super) fn error(error: &CliError, global: &Global) {
    match global.output {
        Format::Json => json_error(error),
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

/// Creates a progress bar on standard error for `total` bytes, or a spinner if the total is
/// unknown. It's hidden if standard error is not a terminal, or if `--quiet` is specified.
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

/// Creates a line on standard error that is updated in place. It's hidden in the same cases as
/// [`progress`].
pub(super) fn status_line(global: &Global) -> ProgressBar {
    if global.quiet || global.output == Format::Json {
        return ProgressBar::hidden();
    }
    let bar = ProgressBar::with_draw_target(None, ProgressDrawTarget::stderr());
    bar.set_style(ProgressStyle::with_template("{msg}").expect("the template is right"));
    bar
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn control_characters_are_replaced() {
        let name = "a\u{1b}]0;title\u{7}\u{9b}31m\r\nb";
        assert_eq!(printable(&name), "a?]0;title??31m??b");
    }
}
