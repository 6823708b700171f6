//! Logging and manual pages, shared by the programs of this crate.

use std::io::{self, IsTerminal as _};
use std::path::Path;

use tracing_subscriber::EnvFilter;

/// Environment variable that contains the log filter.
const VARIABLE: &str = "RISER_LOG";

/// Initializes logging to standard error. The filter is `RISER_LOG`, or `info` by default.
pub fn start_log() {
    let text = std::env::var(VARIABLE).unwrap_or_default();
    let (filter, wrong) = filter(&text);
    tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(io::stderr)
        .with_ansi(io::stderr().is_terminal())
        // The subscriber reports its own errors to standard error and panics if that fails too.
        .log_internal_errors(false)
        .init();
    if let Some(wrong) = wrong {
        tracing::warn!("{VARIABLE}: {wrong}");
    }
}

/// Parses a filter; also returns the error if the text is invalid.
fn filter(text: &str) -> (EnvFilter, Option<String>) {
    let default = || EnvFilter::new("info");
    if text.is_empty() {
        return (default(), None);
    }
    match EnvFilter::try_new(text) {
        Ok(filter) => (filter, None),
        Err(error) => (
            default(),
            Some(format!("invalid log filter {text:?}: {error}")),
        ),
    }
}

/// Writes the manual page of a program to standard output, or a page for each of its commands into
/// a directory.
///
/// # Errors
/// Returns any write error.
pub fn write_manual(command: clap::Command, directory: Option<&Path>) -> io::Result<()> {
    match directory {
        Some(directory) => clap_mangen::generate_to(command, directory),
        None => clap_mangen::Man::new(command).render(&mut io::stdout()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn invalid_filter_falls_back_to_default() {
        for (text, want, is_wrong) in [
            ("", "info", false),
            ("debug", "debug", false),
            ("riser_fabric=trace", "riser_fabric=trace", false),
            ("riser_fabric=loud", "info", true),
        ] {
            let (filter, wrong) = filter(text);
            assert_eq!(filter.to_string(), want);
            assert_eq!(wrong.is_some(), is_wrong, "{wrong:?}");
        }
    }
}
