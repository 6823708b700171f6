//! Output of `cargo xtask tidy --report`.

use std::cmp::Reverse;
use std::fmt::Write;

use super::english::{self, English};
use super::lexical::Line;
use super::measures::Measures;
use super::modules::Circle;
use super::sources::Purpose;

/// Maximum length of the lists with the largest entries.
const LONGEST: usize = 12;

/// Measured values of a source tree.
pub(crate) struct Report {
    pub(crate) name: String,
    pub(crate) all: Measures,
    /// Values by package name.
    pub(crate) packages: Vec<(String, Measures)>,
    /// English in the comments by package name.
    pub(crate) english: Vec<(String, English)>,
    pub(crate) circles: Vec<Circle>,
}

impl Report {
    /// Returns all rows of a tree. Import cycles are at the end.
    fn rows(&self) -> Vec<(&'static str, String)> {
        let mut rows = self.all.rows();
        let circles = self.circles.len().to_string();
        rows.push(("import circles between siblings", circles));
        rows
    }
}

pub(crate) fn table(reports: &[Report]) -> String {
    let columns: Vec<_> = reports.iter().map(Report::rows).collect();
    let mut text = format!("{:32}", "");
    for report in reports {
        let _ = write!(text, "  {:>15}", last_of(&report.name, 15));
    }
    text.push('\n');
    for (n, (title, _)) in columns[0].iter().enumerate() {
        let _ = write!(text, "{title:32}");
        for rows in &columns {
            let _ = write!(text, "  {:>15}", rows[n].1);
        }
        text.push('\n');
    }
    // Only show details for the first tree: the functions of another project would hide our own.
    let own = &reports[0];
    by_package(&mut text, own);
    let mut english = English::default();
    for (_, package) in &own.english {
        english.add(package.clone());
    }
    text.push_str(&english::table(&own.english, &english));
    let functions = own.all.functions.iter().map(|at| {
        let (line, name) = (at.function.lines.start(), &at.function.name);
        let place = format!("{}:{line} {name}", at.path.display());
        (at.function.len(), place)
    });
    list(&mut text, "Longest functions", functions);
    let methods = own.all.methods().into_iter().map(|(name, n)| (n, name));
    list(&mut text, "Types with most methods", methods);
    let files = own.all.files.iter();
    let files = files.map(|(lines, path)| (*lines, path.display().to_string()));
    list(&mut text, "Longest files, without their tests", files);
    let unsafes = own.all.unsafes.iter().filter(|(_, (_, bare))| *bare > 0);
    let unsafes = unsafes.map(|(path, (_, bare))| (*bare, path.display().to_string()));
    list(&mut text, "Unsafe blocks without SAFETY", unsafes);
    for circle in &own.circles {
        let _ = writeln!(text, "\nImport circle between siblings: {circle}");
    }
    text
}

fn by_package(text: &mut String, report: &Report) {
    let width = report.packages.iter().map(|(name, _)| name.len()).max();
    let width = width.unwrap_or_default();
    let heads = ["product", "test", "generated", "docs", "functions"];
    let _ = write!(text, "\n{:width$}", "by package");
    for head in heads {
        let _ = write!(text, "  {head:>12}");
    }
    text.push('\n');
    for (name, own) in &report.packages {
        let _ = write!(text, "{name:width$}");
        for value in [
            own.lines(Purpose::Product, Line::Code),
            own.lines(Purpose::Test, Line::Code),
            own.lines(Purpose::Generated, Line::Code),
            own.lines(Purpose::Product, Line::Doc),
            own.functions.len(),
        ] {
            let _ = write!(text, "  {value:>12}");
        }
        text.push('\n');
    }
}

/// Lists the entries with the largest sizes.
fn list(text: &mut String, title: &str, entries: impl Iterator<Item = (usize, String)>) {
    let mut entries: Vec<_> = entries.collect();
    entries.sort_by_key(|(size, _)| Reverse(*size));
    if !entries.is_empty() {
        let _ = writeln!(text, "\n{title}");
    }
    for (size, entry) in entries.iter().take(LONGEST) {
        let _ = writeln!(text, "{size:>5}  {entry}");
    }
}

/// Returns the last part of a name if it's too long for the column.
fn last_of(name: &str, width: usize) -> String {
    let skipped = name.chars().count().saturating_sub(width);
    name.chars().skip(skipped).collect()
}
