//! What the programs of this crate have in common: their log and their manual pages.

use std::io::{self, IsTerminal as _};
use std::path::Path;

use tracing_subscriber::EnvFilter;

/// Variable of the environment with the filter of the log.
const VARIABLE: &str = "RISER_LOG";

/// Begins the log on standard error. `RISER_LOG` filters it; without it, it has `info` and what is worse.
pub fn start_log() {
    let text = std::env::var(VARIABLE).unwrap_or_default();
    let (filter, wrong) = filter(&text);
    tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(io::stderr)
        .with_ansi(io::stderr().is_terminal())
        .init();
    if let Some(wrong) = wrong {
        tracing::warn!("{VARIABLE}: {wrong}");
    }
}

/// A filter, and what is wrong with its text.
fn filter(text: &str) -> (EnvFilter, Option<String>) {
    let default = || EnvFilter::new("info");
    if text.is_empty() {
        return (default(), None);
    }
    match EnvFilter::try_new(text) {
        Ok(filter) => (filter, None),
        Err(error) => (default(), Some(format!("{text:?} is no filter: {error}"))),
    }
}

/// Writes the manual page of a program to standard output, or into a folder with a page for each of
/// its commands.
///
/// # Errors
/// Those of writing.
pub fn write_manual(command: clap::Command, folder: Option<&Path>) -> io::Result<()> {
    match folder {
        Some(folder) => clap_mangen::generate_to(command, folder),
        None => clap_mangen::Man::new(command).render(&mut io::stdout()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wrong_filter_is_reported_and_the_usual_one_taken() {
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
