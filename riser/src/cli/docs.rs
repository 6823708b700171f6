//! `riser completions` and `riser man`.

use std::fs;
use std::io::{self, Write};
use std::path::Path;

use clap::{Command, CommandFactory};
use clap_complete::Shell;
use clap_mangen::Man;

use super::args::{Args, EXIT_STATUS};
use super::exit::CliError;

/// Section of the help that is included in each page.
const EXIT_HEAD: &str = "Exit status";

pub(super) fn completions(shell: Shell) -> Result<(), CliError> {
    // Generate the script in memory first, because the generator can't handle a broken pipe.
    let mut script = Vec::new();
    clap_complete::generate(shell, &mut Args::command(), "riser", &mut script);
    io::stdout()
        .write_all(&script)
        .map_err(|e| CliError::io("cannot write to standard output", e))
}

pub(super) fn man(dir: Option<&Path>) -> Result<(), CliError> {
    let mut command = Args::command().disable_help_subcommand(true);
    command.build();
    match dir {
        Some(dir) => write_pages(&command, dir).map_err(|e| {
            CliError::io(format!("cannot write manual pages to {}", dir.display()), e)
        }),
        None => write_page(&command, &mut io::stdout())
            .map_err(|e| CliError::io("cannot write to standard output", e)),
    }
}

/// Writes the manual pages of a command and all its subcommands, using their full names.
fn write_pages(command: &Command, dir: &Path) -> io::Result<()> {
    let name = page_name(command);
    let mut file = fs::File::create(dir.join(format!("{name}.1")))?;
    write_page(command, &mut file)?;
    let verbs = command.get_subcommands();
    let mut shown = verbs.filter(|verb| !verb.is_hide_set());
    shown.try_for_each(|verb| write_pages(verb, dir))
}

fn page_name(command: &Command) -> String {
    let name = command.get_display_name().unwrap_or(command.get_name());
    name.to_owned()
}

/// Writes a manual page: the sections generated from the command line, followed by examples, exit
/// status and related pages.
fn write_page(command: &Command, out: &mut dyn Write) -> io::Result<()> {
    let name = page_name(command);
    let page = Man::new(command.clone());
    page.render_title(out)?;
    page.render_name_section(out)?;
    page.render_synopsis_section(out)?;
    page.render_description_section(out)?;
    page.render_options_section(out)?;
    if command.has_subcommands() {
        page.render_subcommands_section(out)?;
    }
    let help = |command: &Command| command.get_after_help().map(ToString::to_string);
    let mut sections = sections(&help(command).unwrap_or_default());
    if !sections.iter().any(|(head, _)| head == EXIT_HEAD) {
        let common = self::sections(EXIT_STATUS).into_iter();
        sections.extend(common.filter(|(head, _)| head == EXIT_HEAD));
    }
    for (head, lines) in sections {
        writeln!(out, ".SH \"{}\"\n.nf", head.to_uppercase())?;
        for line in lines {
            writeln!(out, "{}", literal(&line))?;
        }
        writeln!(out, ".fi")?;
    }
    let related = match name.as_str() {
        "riser" => "riser\\-attach(1), riser\\-mount(1), riser\\-bench(1), riserd(1)",
        "riser-attach" | "riser-mount" => {
            "riser(1), riser\\-detach(1), riser\\-list(1), riser\\-discover(1), mount(8)"
        }
        _ => "riser(1)",
    };
    writeln!(out, ".SH \"SEE ALSO\"\n{related}")
}

/// Splits a help text into sections. Each section starts with a line that is not indented and ends
/// with a colon.
fn sections(text: &str) -> Vec<(String, Vec<String>)> {
    let mut found: Vec<(String, Vec<String>)> = Vec::new();
    for line in text.lines() {
        match line.strip_suffix(':') {
            Some(head) if !line.starts_with(' ') => found.push((head.to_owned(), Vec::new())),
            _ => {
                if let Some((_, lines)) = found.last_mut() {
                    lines.push(line.to_owned());
                }
            }
        }
    }
    found
}

/// Escapes a line for roff.
fn literal(line: &str) -> String {
    let escaped = line.replace('\\', "\\e").replace('-', "\\-");
    match escaped.starts_with(['.', '\'']) {
        true => format!("\\&{escaped}"),
        false => escaped,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn manual_pages_have_required_sections() {
        let mut command = Args::command();
        command.build();
        let attach = command.find_subcommand("attach").unwrap();
        let mut page = Vec::new();
        write_page(attach, &mut page).unwrap();
        let page = String::from_utf8(page).unwrap();
        let heads: Vec<&str> = page
            .lines()
            .filter_map(|l| l.strip_prefix(".SH "))
            .collect();
        for head in [
            "NAME",
            "SYNOPSIS",
            "OPTIONS",
            "\"EXAMPLES\"",
            "\"EXIT STATUS\"",
            "\"SEE ALSO\"",
        ] {
            assert_eq!(
                heads.iter().filter(|h| **h == head).count(),
                1,
                "{head}: {heads:?}"
            );
        }
        assert!(page.contains("riser attach srp://192.0.2.10/0 \\-\\-fuse /mnt/disk"));
        assert!(page.contains("  6  the resource is busy or already in use"));
        assert_eq!(literal(".a\\b-c"), "\\&.a\\eb\\-c");
    }
}
