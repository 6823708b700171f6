//! Manual pages for the command line, and riserd.yaml(5), which is generated from the configuration
//! schema.

use std::fs;
use std::io::{self, Write};
use std::path::Path;

use clap::{Command, ValueEnum};
use clap_mangen::Man;
use roff::{Inline, Roff, bold, italic, roman};

use super::reference::{Key, Object, objects};
use super::{EXIT_CODES, EXIT_STATUS, command, examples};
use crate::config::schema;

/// Example for the page, where all keys have their defaults.
const EXAMPLE: &str = include_str!("../../../deploy/examples/minimal.yaml");

/// A page that can be printed.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, ValueEnum)]
pub(super) enum Page {
    /// riserd(1), the program.
    #[default]
    Riserd,
    /// riserd.yaml(5), the configuration file.
    #[value(name = "riserd.yaml")]
    Configuration,
}

/// Renders a page.
pub(super) fn render(page: Page) -> io::Result<Vec<u8>> {
    let mut text = Vec::new();
    match page {
        Page::Riserd => write_page(&built(), &mut text)?,
        Page::Configuration => configuration().to_writer(&mut text)?,
    }
    Ok(text)
}

/// Writes all pages to a directory.
pub(super) fn write_all(dir: &Path) -> io::Result<()> {
    write_pages(&built(), dir)?;
    fs::write(dir.join("riserd.yaml.5"), render(Page::Configuration)?)
}

/// Returns the command line with full command names.
fn built() -> Command {
    let mut command = command().disable_help_subcommand(true);
    command.build();
    command
}

fn page_name(command: &Command) -> &str {
    command.get_display_name().unwrap_or(command.get_name())
}

/// Writes the pages for a command and its subcommands.
fn write_pages(command: &Command, dir: &Path) -> io::Result<()> {
    let mut text = Vec::new();
    write_page(command, &mut text)?;
    fs::write(dir.join(format!("{}.1", page_name(command))), text)?;
    let verbs = command.get_subcommands();
    let mut shown = verbs.filter(|verb| !verb.is_hide_set());
    shown.try_for_each(|verb| write_pages(verb, dir))
}

/// Writes a page: the sections from the command line, followed by notes, examples, exit status and
/// related pages.
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
    let help = help.filter(|text| text != EXIT_CODES).unwrap_or_default();
    let (notes, examples) = help.split_once(examples::HEAD).unwrap_or((&help, ""));
    let mut rest = Roff::new();
    if !notes.trim().is_empty() {
        rest.control("SH", ["NOTES"]);
        rest.text([roman(notes.trim())]);
    }
    if !examples.is_empty() {
        rest.control("SH", ["EXAMPLES"]);
        rest.control("nf", []);
        for line in examples.trim_start_matches('\n').lines() {
            rest.text([roman(line)]);
        }
        rest.control("fi", []);
    }
    rest.control("SH", ["EXIT STATUS"]);
    for (code, meaning) in EXIT_STATUS {
        rest.control("TP", []);
        rest.text([bold(code)]);
        rest.text([roman(meaning)]);
    }
    rest.control("SH", ["SEE ALSO"]);
    let related = match page_name(command) {
        "riserd" => "riserd-apply(1), riserd-status(1), riserd.yaml(5), riser(1)",
        "riserd-trace" | "riserd-top" => "riserd(1), riserd-sessions(1), riserd-targets(1)",
        "riserd-disconnect" | "riserd-unblock" => "riserd(1), riserd-sessions(1), riserd-status(1)",
        _ => "riserd(1), riserd.yaml(5)",
    };
    rest.text([roman(related)]);
    rest.to_writer(out)
}

/// Returns the page riserd.yaml(5).
fn configuration() -> Roff {
    let mut page = Roff::new();
    let version = concat!("riserd ", env!("CARGO_PKG_VERSION"));
    // Omit the date, because the page depends on the program version. An empty argument would be
    // dropped.
    page.control("TH", ["riserd.yaml", "5", " ", version, "Riser"]);
    page.control("SH", ["NAME"]);
    page.text([roman("riserd.yaml - configuration of riserd")]);
    page.control("SH", ["DESCRIPTION"]);
    page.text([roman(
        "A YAML file with the keys below. Sizes have a suffix KiB to TiB (powers of 1024) or KB to \
         TB (powers of 1000); times have ms, s, m or h, or are numbers of seconds. Relative paths \
         are resolved from the directory in which riserd was started. Unknown keys are rejected.",
    )]);
    page.control("PP", []);
    page.text([
        bold("riserd check"),
        roman(" checks a file, "),
        bold("riserd schema"),
        roman(" prints its JSON Schema for editors, "),
        bold("riserd apply"),
        roman(" applies it to a running daemon."),
    ]);
    for object in objects(&schema()) {
        describe(&mut page, &object);
    }
    page.control("SH", ["EXAMPLES"]);
    page.control("nf", []);
    for line in EXAMPLE.lines() {
        page.text([roman(line)]);
    }
    page.control("fi", []);
    page.control("SH", ["FILES"]);
    for (file, about) in [
        (
            "/etc/riser/riserd.yaml",
            "The configuration of the service.",
        ),
        (
            "/usr/share/doc/riser/examples",
            "Examples; full.yaml contains all keys.",
        ),
        (
            "/usr/share/doc/riser/book",
            "The book, with a page about configuration.",
        ),
        ("/usr/share/riser/riserd.schema.json", "The JSON Schema."),
    ] {
        page.control("TP", []);
        page.text([italic(file)]);
        page.text([roman(about)]);
    }
    page.control("SH", ["SEE ALSO"]);
    page.text([
        bold("riserd"),
        roman("(1), "),
        bold("riserd-check"),
        roman("(1), "),
        bold("riserd-apply"),
        roman("(1), "),
        bold("riserd-set"),
        roman("(1)"),
    ]);
    page
}

/// Adds an object with its keys.
fn describe(page: &mut Roff, object: &Object) {
    let title = match object.places[0].as_str() {
        "" => "KEYS OF THE FILE",
        place => place,
    };
    page.control("SH", [title]);
    if let [_, others @ ..] = object.places.as_slice()
        && !others.is_empty()
    {
        page.text([roman(format!("Likewise {}.", others.join(", ")))]);
        page.control("PP", []);
    }
    for paragraph in &object.text {
        page.text(inlines(paragraph));
        page.control("PP", []);
    }
    for key in &object.keys {
        describe_key(page, key);
    }
}

fn describe_key(page: &mut Roff, key: &Key) {
    page.control("TP", []);
    let mut head = vec![bold(key.name.as_str()), roman(" (")];
    head.extend(inlines(&key.summary()));
    head.push(roman(")"));
    page.text(head);
    let choices = key.choices.iter().filter(|(_, about)| !about.is_empty());
    let choices = choices.map(|(value, about)| format!("`{value}`: {about}"));
    // Indent further paragraphs like the first.
    for (paragraph, n) in key.text.iter().cloned().chain(choices).zip(0..) {
        if n > 0 {
            page.control("IP", []);
        }
        page.text(inlines(&paragraph));
    }
}

/// Converts text, with words in backticks in bold.
fn inlines(text: &str) -> Vec<Inline> {
    let pieces = text.split('`').enumerate();
    let pieces = pieces.map(|(n, piece)| match n % 2 {
        0 => roman(piece),
        _ => bold(piece),
    });
    pieces.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn configuration_page_has_all_keys() {
        let page = String::from_utf8(render(Page::Configuration).unwrap()).unwrap();
        assert!(page.contains(".TH riserd.yaml 5"), "{page}");
        for object in objects(&schema()) {
            for key in &object.keys {
                assert!(page.contains(&key.name.replace('-', "\\-")), "{}", key.name);
            }
        }
        for part in ["NAME", "DESCRIPTION", "EXAMPLES", "FILES", "access: open"] {
            assert!(page.contains(part), "{part}");
        }
    }

    #[test]
    fn man_writes_all_pages() {
        let name = format!("riserd-man-{}", std::process::id());
        let dir = std::env::temp_dir().join(name);
        fs::create_dir_all(&dir).unwrap();
        write_all(&dir).unwrap();
        for page in ["riserd.1", "riserd-apply.1", "riserd.yaml.5"] {
            let text = fs::read_to_string(dir.join(page)).unwrap();
            assert!(text.contains(".TH"), "{page}");
        }
        let page = fs::read_to_string(dir.join("riserd-set.1")).unwrap();
        for head in ["NOTES", "EXAMPLES", "\"EXIT STATUS\"", "\"SEE ALSO\""] {
            let head = format!(".SH {head}\n");
            assert_eq!(page.matches(&head).count(), 1, "{head}{page}");
        }
        assert!(
            page.contains("riserd set /backends/disk0 size=2TiB"),
            "{page}"
        );
        fs::remove_dir_all(&dir).unwrap();
    }
}
