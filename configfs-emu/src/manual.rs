//! Manual pages, and text that is used by both manual pages and help.

use std::fs;
use std::io::{self, Write};
use std::path::Path;

use clap::Command;
use clap_mangen::Man;

pub(crate) const MOUNT: &str = "\
Examples:
  riserd-configfs /sys/kernel/config
  riserd-configfs --socket /run/riserd/admin.sock /sys/kernel/config

Exit status:
  0  the tree was unmounted
  1  the tree cannot be mounted, or riserd cannot be reached
  2  invalid usage";

pub(crate) const IMPORT: &str = "\
Examples:
  riserd-configfs import /etc/target/saveconfig.json

Exit status:
  0  everything was converted
  1  the file cannot be read
  2  invalid usage
  3  an object served by LIO was omitted
  4  only notes: settings without an effect, and objects that LIO does not serve either";

pub(crate) const EXPORT: &str = "\
Examples:
  riserd-configfs export
  riserd-configfs export /etc/riser/riserd.yaml

Exit status:
  0  everything was converted
  1  the configuration cannot be read
  2  invalid usage
  3  an object or setting not supported by LIO was omitted";

/// Writes the manual page of a command to standard output, or the pages for the command and all of
/// its subcommands to a directory.
///
/// # Errors
/// Returns an error if the pages can't be written.
pub(crate) fn write(command: Command, dir: Option<&Path>) -> io::Result<()> {
    let mut command = command.disable_help_subcommand(true);
    command.build();
    match dir {
        Some(dir) => write_pages(&command, dir),
        None => write_page(&command, &mut io::stdout()),
    }
}

fn page_name(command: &Command) -> &str {
    command.get_display_name().unwrap_or(command.get_name())
}

fn write_pages(command: &Command, dir: &Path) -> io::Result<()> {
    let mut page = Vec::new();
    write_page(command, &mut page)?;
    fs::write(dir.join(format!("{}.1", page_name(command))), page)?;
    let verbs = command.get_subcommands();
    let mut shown = verbs.filter(|verb| !verb.is_hide_set());
    shown.try_for_each(|verb| write_pages(verb, dir))
}

fn write_page(command: &Command, out: &mut dyn Write) -> io::Result<()> {
    let page = Man::new(command.clone());
    page.render_title(out)?;
    page.render_name_section(out)?;
    page.render_synopsis_section(out)?;
    page.render_description_section(out)?;
    page.render_options_section(out)?;
    if command.has_subcommands() {
        page.render_subcommands_section(out)?;
    }
    let help = command.get_after_help().map(ToString::to_string);
    for line in help.unwrap_or_default().lines() {
        match line.strip_suffix(':') {
            Some(head) if !line.starts_with(' ') => {
                writeln!(out, ".SH \"{}\"\n.nf", head.to_uppercase())?;
            }
            _ if line.is_empty() => writeln!(out, ".fi")?,
            _ => writeln!(out, "{}", line.replace('-', "\\-"))?,
        }
    }
    let related = "riserd(1), riserd\\-apply(1), riserd.yaml(5), targetcli(8)";
    writeln!(out, ".fi\n.SH \"SEE ALSO\"\n{related}")
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;
    use crate::Cli;

    #[test]
    fn manual_pages_have_required_sections() {
        let dir = std::env::temp_dir().join(format!("riserd-configfs-man-{}", std::process::id()));
        fs::create_dir(&dir).unwrap();
        write(Cli::command(), Some(&dir)).unwrap();
        for name in [
            "riserd-configfs",
            "riserd-configfs-import",
            "riserd-configfs-export",
        ] {
            let page = fs::read_to_string(dir.join(format!("{name}.1"))).unwrap();
            for head in [
                "NAME",
                "SYNOPSIS",
                "DESCRIPTION",
                "OPTIONS",
                "\"EXAMPLES\"",
                "\"EXIT STATUS\"",
                "\"SEE ALSO\"",
            ] {
                let head = format!("\n.SH {head}\n");
                assert_eq!(page.matches(&head).count(), 1, "{name}: {head}{page}");
            }
        }
        fs::remove_dir_all(&dir).unwrap();
    }

    #[test]
    fn examples_are_valid_commands() {
        for text in [MOUNT, IMPORT, EXPORT] {
            let lines = text.lines().skip(1).take_while(|line| !line.is_empty());
            for line in lines {
                let parsed = Cli::command().try_get_matches_from(line.split_whitespace());
                assert!(parsed.is_ok(), "{line}: {}", parsed.unwrap_err());
            }
        }
    }
}
