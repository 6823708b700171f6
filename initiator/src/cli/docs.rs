//! `riser completions` and `riser man`.

use std::io::{self, Write};
use std::path::Path;

use clap::CommandFactory;
use clap_complete::Shell;

use super::args::Args;
use super::exit::CliError;

pub(super) fn completions(shell: Shell) -> Result<(), CliError> {
    // Into memory first: the generator does not take a broken pipe well.
    let mut script = Vec::new();
    clap_complete::generate(shell, &mut Args::command(), "riser", &mut script);
    io::stdout()
        .write_all(&script)
        .map_err(|e| CliError::io("cannot write to standard output", e))
}

pub(super) fn man(dir: Option<&Path>) -> Result<(), CliError> {
    let command = Args::command();
    match dir {
        Some(dir) => clap_mangen::generate_to(command, dir).map_err(|e| {
            CliError::io(format!("cannot write manual pages to {}", dir.display()), e)
        }),
        None => clap_mangen::Man::new(command)
            .render(&mut io::stdout())
            .map_err(|e| CliError::io("cannot write to standard output", e)),
    }
}
