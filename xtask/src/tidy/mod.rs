//! `cargo xtask tidy`: checks for import cycles and words to avoid, and measures the source code.
//!
//! By default, this returns an error for an import cycle between sibling modules, a word from
//! [`words`] in user-visible text, a dependency that is not allowed by [`layers`], an invalid
//! commit subject, a type with too many [`methods`], or comments that exceed a budget of
//! [`english`]. If `--report` is set, we only measure and never return an error.

mod dependencies;
mod english;
mod functions;
mod layers;
mod lexical;
mod measures;
mod methods;
mod modules;
mod report;
mod sources;
mod subjects;
mod visible;
mod words;

use std::fs;
use std::path::{Path, PathBuf};

use english::English;
use measures::Measures;
use report::Report;

use crate::{Failure, root};

#[derive(clap::Args)]
pub(crate) struct Options {
    /// Measure the source code and print a table.
    #[arg(long)]
    report: bool,
    /// Also measure this Rust source tree for comparison, such as an older checkout or another
    /// project.
    #[arg(long, value_name = "DIRECTORY", requires = "report")]
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
            "no import circle, no word to replace, no dependency on a layer above, no invalid commit subject, methods of \
             types and English within their budgets"
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

/// Checks the source code.
///
/// # Errors
/// A line for each issue.
pub(crate) fn check() -> Result<(), Failure> {
    let packages = own_sources()?;
    let circles = packages.iter().flat_map(modules::circles);
    let mut wrong: Vec<_> = circles.map(|circle| format!("circle {circle}")).collect();
    for visible in visible::texts(&root(), &packages)? {
        let path = visible.path.display();
        for words::Found {
            line,
            word,
            instead,
        } in words::find(&visible.text.text, visible.text.line)
        {
            let about = format!("{path}:{line}: replace \"{word}\" with one of: {instead}");
            wrong.push(about);
        }
    }
    wrong.extend(layers::crossings(&packages));
    wrong.extend(subjects::invalid_subjects());
    wrong.extend(methods::over_budget(&packages)?);
    wrong.extend(english::over_budget(&packages)?);
    none_wrong(&wrong)
}

/// Returns an error if there are unused dependencies.
pub(crate) fn check_dependencies() -> Result<(), Failure> {
    none_wrong(&dependencies::unused(&root(), &own_sources()?)?)
}

fn none_wrong(wrong: &[String]) -> Result<(), Failure> {
    match wrong.len() {
        0 => Ok(()),
        number => Err(format!("{}\n{number} to fix", wrong.join("\n")).into()),
    }
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
}
