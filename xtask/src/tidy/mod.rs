//! `cargo xtask tidy`: checks for import cycles and words to avoid, and measures the source code.
//!
//! By default, this returns an error for anything new: an import cycle between sibling modules, a
//! word from [`words`] in user-visible text, a reference in a document to a file or function that
//! doesn't exist, a dependency that is not allowed by [`layers`], an invalid commit subject, or a
//! type with too many [`methods`].
//! Issues that existed before the check was added are listed in [`KNOWN`]. This list must only get
//! shorter, so an entry that doesn't match any more is an error as well. If `--report` is set, we
//! only measure and never return an error.

mod dependencies;
mod english;
mod functions;
mod layers;
mod lexical;
mod measures;
mod methods;
mod modules;
mod references;
mod report;
mod sources;
mod subjects;
mod visible;
mod words;

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

use english::English;
use measures::Measures;
use report::Report;

use crate::{Failure, root};

/// List of known issues to be fixed, one per line.
const KNOWN: &str = "xtask/tidy-known.txt";

#[derive(clap::Args)]
pub(crate) struct Options {
    /// Measure the source code and print a table.
    #[arg(long)]
    report: bool,
    /// Also measure this Rust source tree for comparison, such as an older checkout or another
    /// project.
    #[arg(long, value_name = "FOLDER", requires = "report")]
    against: Vec<PathBuf>,
    /// List the unusual phrases in the comments of this package.
    #[arg(long, value_name = "PACKAGE", conflicts_with = "report")]
    english: Option<String>,
}

/// Checks the source code, or measures it if `--report` is set.
pub(crate) fn run(options: &Options) -> Result<(), Failure> {
    if let Some(name) = &options.english {
        return list_phrases(name);
    }
    if !options.report {
        check()?;
        println!(
            "no new import circle, no word to replace, no dead reference, no dependency on a layer above, no invalid \
             commit subject, methods of types and English within their budgets"
        );
        return Ok(());
    }
    let trees = [root()].into_iter().chain(options.against.iter().cloned());
    let reports = trees
        .map(|tree| measure(&tree))
        .collect::<Result<Vec<_>, _>>()?;
    print!("{}", report::table(&reports));
    Ok(())
}

fn list_phrases(name: &str) -> Result<(), Failure> {
    let packages = own_sources()?;
    let package = packages.iter().find(|package| package.name == name);
    let package = package.ok_or_else(|| format!("unknown package {name}"))?;
    for phrase in english::phrases(package) {
        println!("{phrase}");
    }
    Ok(())
}

fn measure(tree: &Path) -> Result<Report, Failure> {
    let packages = sources::read(tree)?;
    for message in packages.iter().flat_map(|package| &package.unreadable) {
        eprintln!("skipping {message}");
    }
    let mut all = Measures::default();
    let (mut by_package, mut english) = (Vec::new(), Vec::new());
    for package in &packages {
        let own = Measures::of(package);
        all.add(own.clone());
        by_package.push((package.name.clone(), own));
        english.push((package.name.clone(), English::of(package)));
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
        english,
        circles: packages.iter().flat_map(modules::circles).collect(),
    })
}

/// Reads our own source code. Returns an error for files that can't be parsed, because they would
/// pass every check.
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
    Err(format!("cannot read:\n{}", unreadable.join("\n")).into())
}

/// Checks the source code. The error contains new issues, and known issues that no longer exist.
pub(crate) fn check() -> Result<(), Failure> {
    let packages = own_sources()?;
    let mut found = Findings::default();
    for circle in packages.iter().flat_map(modules::circles) {
        // The key must not contain line numbers, so that a known issue still matches when other
        // lines have changed.
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
            let about = format!("{path}:{line}: replace \"{word}\" with one of: {instead}");
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
    // Only compare issues of these types; otherwise known issues of the other step would look as if
    // they were fixed.
    compare(&["circle", "reference", "word", "layer"], &found)?;
    subjects::check()?;
    methods::check(&packages)?;
    english::check(&packages)
}

/// Returns an error if there are unused dependencies.
pub(crate) fn check_dependencies() -> Result<(), Failure> {
    let unused = dependencies::unused(&root(), &own_sources()?)?;
    let unused = unused.into_iter().map(|line| {
        let about = format!("unused {line}");
        (line, vec![about])
    });
    compare(&["dependency"], &unused.collect())
}

/// Compares the issues of these types with the known issues and returns an error if they are
/// different.
fn compare(kinds: &[&str], found: &Findings) -> Result<(), Failure> {
    let known = fs::read_to_string(root().join(KNOWN))?;
    let is_meant = |line: &&str| kinds.iter().any(|kind| line.starts_with(kind));
    let wrong = new_findings(found, known.lines().filter(is_meant));
    if wrong.is_empty() {
        return Ok(());
    }
    Err(format!("{}\n{} to fix", wrong.join("\n"), wrong.len()).into())
}

/// Messages for each issue. The key is the same as in the list of known issues.
type Findings = BTreeMap<String, Vec<String>>;

/// Returns messages for issues that are not known, then for known issues that were not found.
fn new_findings<'a>(found: &Findings, known: impl Iterator<Item = &'a str>) -> Vec<String> {
    let known: BTreeSet<_> = known.collect();
    let new = found
        .iter()
        .filter(|(key, _)| !known.contains(key.as_str()));
    let new = new.flat_map(|(_, abouts)| abouts.clone());
    let gone = known.iter().filter(|line| !found.contains_key(**line));
    let gone = gone.map(|line| format!("{KNOWN}: remove \"{line}\", which is fixed"));
    new.chain(gone).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unreadable_source_fails() {
        let of = |text| all_readable(&sources::tests::tree("tidy-readable", &[("lib.rs", text)]));
        of("fn f() {}").unwrap();
        let why = of("fn f() {").unwrap_err().to_string();
        assert!(why.starts_with("cannot read:\nlib.rs: "), "{why}");
    }

    #[test]
    fn new_and_fixed_issues_fail() {
        let found = Findings::from([
            ("circle a: b c".to_owned(), vec!["a circle".to_owned()]),
            (
                "word d: e".to_owned(),
                vec!["d:1".to_owned(), "d:2".to_owned()],
            ),
        ]);
        let check = |known: &str| new_findings(&found, known.lines());
        let known = "circle a: b c\nword d: e\n";
        assert!(check(known).is_empty());
        assert_eq!(check("word d: e\n"), ["a circle"]);
        assert_eq!(check("circle a: b c\n"), ["d:1", "d:2"]);
        let repaired = check(&format!("{known}word f: g\n"));
        assert_eq!(repaired.len(), 1);
        assert!(repaired[0].contains("word f: g"));
    }
}
