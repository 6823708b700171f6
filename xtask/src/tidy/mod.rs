//! `cargo xtask tidy`: import circles, words, and measures of the sources.
//!
//! Without options it fails for what is new: a circle of sibling modules that import each other, a
//! word of [`words`] in something that users see, a file or function that a document names and that
//! does not exist, or a dependency that [`layers`] forbids. What was there before it was looked for
//! is listed in [`KNOWN`], which only ever gets shorter: an entry that is not found any more fails,
//! too. With `--report` it measures, and never fails.

mod dependencies;
mod functions;
mod layers;
mod lexical;
mod measures;
mod modules;
mod references;
mod report;
mod sources;
mod visible;
mod words;

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

use measures::Measures;
use report::Report;

use crate::{Failure, root};

/// List of what is known and still to be repaired, a line each.
const KNOWN: &str = "xtask/tidy-known.txt";

/// Options of `cargo xtask tidy`.
#[derive(clap::Args)]
pub(crate) struct Options {
    /// Measure the sources and print a table.
    #[arg(long)]
    report: bool,
    /// Measure another tree of Rust sources beside this one: an older checkout, or another project.
    #[arg(long, value_name = "FOLDER", requires = "report")]
    against: Vec<PathBuf>,
    /// Print the measures as JSON.
    #[arg(long, requires = "report")]
    json: bool,
}

/// Checks the sources, or measures them with `--report`.
pub(crate) fn run(options: &Options) -> Result<(), Failure> {
    if !options.report {
        check()?;
        println!(
            "no new import circle, no word to replace, no dead reference, no dependency on a layer above"
        );
        return Ok(());
    }
    let trees = [root()].into_iter().chain(options.against.iter().cloned());
    let reports = trees
        .map(|tree| measure(&tree))
        .collect::<Result<Vec<_>, _>>()?;
    if options.json {
        println!("{}", serde_json::to_string_pretty(&report::json(&reports))?);
    } else {
        print!("{}", report::table(&reports));
    }
    Ok(())
}

fn measure(tree: &Path) -> Result<Report, Failure> {
    let packages = sources::read(tree)?;
    for message in packages.iter().flat_map(|package| &package.unreadable) {
        eprintln!("left out {message}");
    }
    let mut all = Measures::default();
    let mut by_package = Vec::new();
    for package in &packages {
        let own = Measures::of(package);
        all.add(own.clone());
        by_package.push((package.name.clone(), own));
    }
    let name = fs::canonicalize(tree)?;
    Ok(Report {
        name: name
            .file_name()
            .unwrap_or_default()
            .to_string_lossy()
            .into_owned(),
        all,
        packages: by_package,
        circles: packages.iter().flat_map(modules::circles).collect(),
    })
}

/// Reads our own sources. One that cannot be read would pass every check, so it fails here.
fn own_sources() -> Result<Vec<sources::Package>, Failure> {
    let packages = sources::read(&root())?;
    all_readable(&packages)?;
    Ok(packages)
}

fn all_readable(packages: &[sources::Package]) -> Result<(), Failure> {
    let unreadable = packages.iter().flat_map(|package| &package.unreadable);
    let unreadable: Vec<_> = unreadable.map(String::as_str).collect();
    if unreadable.is_empty() {
        return Ok(());
    }
    Err(format!("these cannot be read:\n{}", unreadable.join("\n")).into())
}

/// Fails with a list of what is new, and of what is known and gone.
pub(crate) fn check() -> Result<(), Failure> {
    let packages = own_sources()?;
    let mut found = Findings::default();
    for circle in packages.iter().flat_map(modules::circles) {
        // The key has no line numbers: a known entry must still be known when lines above it have
        // moved.
        let key = format!("circle {}", circle.name());
        found
            .entry(key)
            .or_default()
            .push(format!("circle {circle}"));
    }
    for visible in visible::texts(&root(), &packages)? {
        let path = visible.path.display();
        for word in words::find(&visible.text.text, visible.text.line) {
            let key = format!("word {path}: {}", word.word);
            let (line, instead, word) = (word.line, word.instead, word.word);
            let about = format!("{path}:{line}: replace \"{word}\" by one of: {instead}");
            found.entry(key).or_default().push(about);
        }
    }
    for (key, about) in references::dead(&root())? {
        found.entry(key).or_default().push(about);
    }
    for crossing in layers::crossings(&packages) {
        found
            .entry(crossing.clone())
            .or_default()
            .push(format!("{crossing}: must not depend on it"));
    }
    // Only these kinds of the list: entries of the other step would seem to be repaired.
    compare(&["circle", "reference", "word", "layer"], &found)
}

/// Fails with the dependencies that no source uses.
pub(crate) fn check_dependencies() -> Result<(), Failure> {
    let unused = dependencies::unused(&root(), &own_sources()?)?;
    let unused = unused.into_iter().map(|line| {
        let about = format!("unused {line}");
        (line, vec![about])
    });
    compare(&["dependency"], &unused.collect())
}

/// Fails with the difference between what was found and what is known of these kinds.
fn compare(kinds: &[&str], found: &Findings) -> Result<(), Failure> {
    let known = fs::read_to_string(root().join(KNOWN))?;
    let is_meant = |line: &&str| kinds.iter().any(|kind| line.starts_with(kind));
    let wrong = judge(found, known.lines().filter(is_meant));
    if wrong.is_empty() {
        return Ok(());
    }
    Err(format!("{}\n{} to repair", wrong.join("\n"), wrong.len()).into())
}

/// Messages about what was found, by the line in the list of what is known.
type Findings = BTreeMap<String, Vec<String>>;

/// Names what is found and not known, then what is known and not found.
fn judge<'a>(found: &Findings, known: impl Iterator<Item = &'a str>) -> Vec<String> {
    let known: BTreeSet<_> = known.collect();
    let new = found
        .iter()
        .filter(|(key, _)| !known.contains(key.as_str()));
    let new = new.flat_map(|(_, abouts)| abouts.clone());
    let gone = known.iter().filter(|line| !found.contains_key(**line));
    let gone = gone.map(|line| format!("{KNOWN}: remove \"{line}\", which is repaired"));
    new.chain(gone).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_source_that_cannot_be_read_fails() {
        let of = |text| all_readable(&sources::tests::tree("tidy-readable", &[("lib.rs", text)]));
        of("fn f() {}").unwrap();
        let why = of("fn f() {").unwrap_err().to_string();
        assert!(why.starts_with("these cannot be read:\nlib.rs: "), "{why}");
    }

    #[test]
    fn what_is_new_and_what_is_gone_fails() {
        let found = Findings::from([
            ("circle a: b c".to_owned(), vec!["a circle".to_owned()]),
            (
                "word d: e".to_owned(),
                vec!["d:1".to_owned(), "d:2".to_owned()],
            ),
        ]);
        let judge = |known: &str| judge(&found, known.lines());
        let known = "circle a: b c\nword d: e\n";
        assert!(judge(known).is_empty());
        assert_eq!(judge("word d: e\n"), ["a circle"]);
        assert_eq!(judge("circle a: b c\n"), ["d:1", "d:2"]);
        let repaired = judge(&format!("{known}word f: g\n"));
        assert_eq!(repaired.len(), 1);
        assert!(repaired[0].contains("word f: g"));
    }
}
