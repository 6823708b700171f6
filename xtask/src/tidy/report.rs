//! Output of `cargo xtask tidy --report`.

use std::fmt::Write;

use serde_json::{Value as Json, json};

use super::english::{self, English};
use super::functions::Function;
use super::measures::{At, Measures, Row};
use super::modules::Circle;

/// Maximum length of the lists with the largest entries.
const LONGEST: usize = 12;

/// Values with a column in the package table.
const BY_PACKAGE: &[(&str, &str)] = &[
    ("product", "product"),
    ("test", "test"),
    ("generated", "generated"),
    ("functions", "functions"),
    ("over_50", "> 50 lines"),
    ("silent", "silent ≥ 30"),
    ("body_comments", "comments"),
    ("docs", "docs"),
    ("questions", "questions"),
    ("short_docs", "≤ 3 words"),
    ("words", "words"),
    ("wide", "> 106 wide"),
];

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

/// Formats a table with a column for each tree, then details of the first tree.
pub(crate) fn table(reports: &[Report]) -> String {
    let columns: Vec<_> = reports
        .iter()
        .map(|r| (r.name.as_str(), rows_of(r)))
        .collect();
    let mut text = String::new();
    let titles = columns[0].1.iter().map(|row| row.title.chars().count());
    // Use the number of characters, because a title can contain multi-byte characters.
    let width = titles.max().unwrap_or_default();
    let _ = write!(text, "{:width$}", "");
    for (name, _) in &columns {
        let _ = write!(text, "  {:>15}", last_of(name, 15));
    }
    text.push('\n');
    for (n, row) in columns[0].1.iter().enumerate() {
        let _ = write!(text, "{:width$}", row.title);
        for (_, rows) in &columns {
            let _ = write!(text, "  {:>15}", rows[n].value);
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
    let all = &own.all;
    list(
        &mut text,
        "Longest functions",
        largest(&all.functions, Function::len),
    );
    list(
        &mut text,
        "Longest test functions",
        largest(&all.test_functions, Function::len),
    );
    let wide = all.functions.iter().filter(|f| f.what.parameters > 6);
    list(
        &mut text,
        "Most parameters",
        largest(wide, |f| f.parameters),
    );
    let deep = all.functions.iter().filter(|f| f.what.depth > 4);
    list(&mut text, "Deepest nesting", largest(deep, |f| f.depth));
    list(
        &mut text,
        "Longest functions without a comment",
        largest(&all.silent, Function::len),
    );
    let mut files: Vec<_> = all.files.iter().collect();
    files.sort_by_key(|file| std::cmp::Reverse(file.what));
    let files = files.iter().take(LONGEST);
    let files = files.map(|file| format!("{:>5}  {}", file.what, file.path.display()));
    list(
        &mut text,
        "Longest files, without their tests",
        files.collect(),
    );
    let unsafes = all.unsafes.iter().map(|(path, (with, without))| {
        let bare = match without {
            0 => String::new(),
            n => format!(", {n} without SAFETY"),
        };
        format!("{:>5}  {}{bare}", with + without, path.display())
    });
    list(
        &mut text,
        "Unsafe blocks and impls by file",
        unsafes.collect(),
    );
    let circles = own.circles.iter().map(ToString::to_string);
    list(
        &mut text,
        "Import circles between siblings",
        circles.collect(),
    );
    text
}

/// Returns the same values as JSON.
pub(crate) fn json(reports: &[Report]) -> Json {
    let measures = |rows: Vec<Row>| -> Json {
        let rows = rows.into_iter();
        rows.map(|row| (row.key.to_owned(), json!(row.value.number())))
            .collect()
    };
    // Return raw values without units and limits, so that programs can use their own.
    let functions = |functions: &[At<Function>]| -> Json {
        let shown = functions.iter().map(|f| {
            json!({
                "file": f.path, "line": f.line, "name": f.what.name, "lines": f.what.len(),
                "parameters": f.what.parameters, "depth": f.what.depth,
            })
        });
        shown.collect()
    };
    let circle = |circle: &Circle| {
        let arrows = circle.arrows.iter().map(|arrow| {
            let uses: Vec<_> = arrow.references.iter().map(ToString::to_string).collect();
            json!({ "from": arrow.from, "to": arrow.to, "uses": uses })
        });
        json!({
            "parent": circle.parent, "siblings": circle.siblings, "arrows": arrows.collect::<Json>(),
        })
    };
    let tree = |report: &Report| {
        let packages = report.packages.iter();
        let packages = packages.map(|(name, own)| (name.clone(), measures(own.rows())));
        json!({
            "tree": report.name,
            "measures": measures(rows_of(report)),
            "packages": packages.collect::<Json>(),
            "functions": functions(&report.all.functions),
            "silent": functions(&report.all.silent),
            "circles": report.circles.iter().map(circle).collect::<Json>(),
        })
    };
    reports.iter().map(tree).collect()
}

/// Returns all rows of a tree. Import cycles are at the end.
fn rows_of(report: &Report) -> Vec<Row> {
    let mut rows = report.all.rows();
    let siblings = report.circles.iter().map(|c| c.siblings.len()).sum();
    rows.push(Row::count(
        "circles",
        "import circles between siblings",
        report.circles.len(),
    ));
    rows.push(Row::count("in_circles", "… modules in them", siblings));
    rows
}

fn by_package(text: &mut String, report: &Report) {
    let width = report.packages.iter().map(|(name, _)| name.len()).max();
    let width = width.unwrap_or_default();
    let _ = write!(text, "\n{:width$}", "by package");
    for (_, head) in BY_PACKAGE {
        let _ = write!(text, "  {head:>12}");
    }
    text.push('\n');
    for (name, measures) in &report.packages {
        let _ = write!(text, "{name:width$}");
        let rows = measures.rows();
        for (key, _) in BY_PACKAGE {
            let row = rows.iter().find(|row| row.key == *key).expect("a measure");
            let _ = write!(text, "  {:>12}", row.value);
        }
        text.push('\n');
    }
}

fn list(text: &mut String, title: &str, entries: Vec<String>) {
    if !entries.is_empty() {
        let _ = write!(text, "\n{title}\n{}\n", entries.join("\n"));
    }
}

fn largest<'a>(
    functions: impl IntoIterator<Item = &'a At<Function>>,
    size: fn(&Function) -> usize,
) -> Vec<String> {
    let mut functions: Vec<_> = functions.into_iter().collect();
    functions.sort_by_key(|f| std::cmp::Reverse(size(&f.what)));
    let shown = functions.iter().take(LONGEST).map(|f| {
        let (path, line, name) = (f.path.display(), f.line, &f.what.name);
        format!("{:>5}  {path}:{line} {name}", size(&f.what))
    });
    shown.collect()
}

/// Returns the last part of a name if it's too long for the column.
fn last_of(name: &str, width: usize) -> String {
    let skipped = name.chars().count().saturating_sub(width);
    name.chars().skip(skipped).collect()
}
