//! Parses the `riserd` and `riser` commands in documents with their command-line parsers.

use clap::{Command, CommandFactory};
use riser_docs::{Named, commands_of};

use crate::all_right;

/// Returns the reason if a command line is invalid.
fn refused(command: &Command, words: &[String]) -> Option<String> {
    let parsed = command.clone().try_get_matches_from(words);
    // `--help` and `--version` are errors of clap that print to standard output.
    let error = parsed.err().filter(clap::Error::use_stderr)?;
    Some(
        error
            .to_string()
            .lines()
            .next()
            .unwrap_or_default()
            .to_owned(),
    )
}

/// Returns the verb or the option in running text that the program does not have.
fn unknown(command: &Command, words: &[String]) -> Option<String> {
    let mut command = command;
    let mut verbs = words[1..].iter().peekable();
    while let Some(verb) = verbs.peek() {
        let Some(next) = command.find_subcommand(verb) else {
            break;
        };
        command = next;
        verbs.next();
    }
    let is_verb = |word: &&&String| word.chars().all(|c| c.is_ascii_lowercase() || c == '-');
    let first = verbs.peek().filter(is_verb);
    if command.has_subcommands() && first.is_some_and(|word| !word.starts_with('-')) {
        return Some(format!("no command `{}`", verbs.peek()?));
    }
    let options = verbs.filter_map(|word| word.strip_prefix("--"));
    let names = options.map(|word| word.split('=').next().unwrap_or(word));
    let has = |name: &str| {
        matches!(name, "" | "help" | "version")
            || command
                .get_arguments()
                .any(|arg| arg.get_long() == Some(name))
    };
    let other = names.into_iter().find(|name| !has(name))?;
    Some(format!("no option `--{other}`"))
}

fn check(program: &str, mut command: Command, at_least: usize) {
    // Propagates global options to all verbs.
    command.build();
    let named = commands_of(&[program]);
    let whole = named.iter().filter(|named| !named.is_prose).count();
    assert!(whole >= at_least, "only {whole} commands were found");
    let wrong = |named: &Named| {
        // An ellipsis stands for omitted arguments.
        let is_partial = named.is_prose || named.words.iter().any(|word| word == "…");
        let why = match is_partial {
            true => unknown(&command, &named.words),
            false => refused(&command, &named.words),
        };
        why.map(|why| format!("{}: {}: {why}", named.place, named.words.join(" ")))
    };
    let wrong: Vec<_> = named.iter().filter_map(wrong).collect();
    all_right(&wrong);
}

#[test]
fn riserd_accepts_documented_commands() {
    check("riserd", riser_target::cli::command(), 30);
}

#[test]
fn riser_accepts_documented_commands() {
    check("riser", riser::cli::args::Args::command(), 25);
}

#[test]
fn unknown_options_are_detected() {
    let mut command = riser_target::cli::command();
    command.build();
    let words = |line: &str| -> Vec<_> { line.split(' ').map(str::to_owned).collect() };
    for (line, expected) in [
        ("riserd check --open FILE", None),
        ("riserd check --shut", Some("no option `--shut`")),
        ("riserd serve", Some("no command `serve`")),
        ("riserd -o json status", None),
    ] {
        let found = unknown(&command, &words(line));
        assert_eq!(found.as_deref(), expected, "{line}");
    }
    assert!(refused(&command, &words("riserd run")).is_some());
    assert!(refused(&command, &words("riserd run --help")).is_none());
}
