//! Checks the file and function names that documents contain in backticks.
//!
//! - If a path such as `target/src/main.rs` starts with a directory in the root, it must exist.
//! - If a line contains Rust file names, any function such as `run()` on this line must be in one
//!   of these files.

use std::fs;
use std::path::Path;

use riser_docs::{documents, root};

use crate::all_right;

#[test]
fn files_and_functions_exist() {
    let mut wrong = Vec::new();
    // The changelog may contain names that have been removed, and the table of seeds names tests
    // without their files.
    let others = ["CHANGELOG.md", "docs/seeds.md"].map(Path::new);
    let pages = documents().into_iter();
    for page in pages.filter(|page| !others.contains(&page.path.as_path())) {
        for (line, name) in dead_in(&root(), page.text()) {
            wrong.push(format!("{}: `{name}` does not exist", page.place(line)));
        }
    }
    all_right(&wrong);
}

/// Returns the invalid names in a document, including line numbers.
fn dead_in(root: &Path, text: &str) -> Vec<(usize, String)> {
    let (mut dead, mut is_code) = (Vec::new(), false);
    for (line, number) in text.lines().zip(1..) {
        if line.starts_with("```") {
            is_code = !is_code;
        }
        // Ignore code blocks: they contain input and output, which use paths on the reader's
        // machine.
        if is_code {
            continue;
        }
        let spans: Vec<_> = line.split('`').skip(1).step_by(2).collect();
        let mut sources = Vec::new();
        for span in spans.iter().filter(|span| is_path(root, span)) {
            match fs::read_to_string(root.join(span)) {
                Ok(source) if span.ends_with(".rs") => sources.push(source),
                _ if root.join(span).exists() => {}
                _ => dead.push((number, (*span).to_owned())),
            }
        }
        // If there is no file on the same line, we can't find the function.
        if sources.is_empty() {
            continue;
        }
        for name in spans.iter().filter_map(|span| span.strip_suffix("()")) {
            let name = name.rsplit("::").next().unwrap_or(name);
            let heads = ["(", "<"].map(|end| format!("fn {name}{end}"));
            let is_there = |source: &String| heads.iter().any(|head| source.contains(head));
            if !sources.iter().any(is_there) {
                dead.push((number, format!("{name}()")));
            }
        }
    }
    dead
}

/// Returns true if text in backticks should be a file or directory in the repository: it has no
/// spaces or wildcards and starts with an existing directory.
fn is_path(root: &Path, span: &str) -> bool {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || "/._-@".contains(c);
    let Some((first, _)) = span.split_once('/') else {
        return false;
    };
    let is_directory = !first.is_empty() && !first.starts_with('.') && root.join(first).is_dir();
    is_directory && span.chars().all(is_plain)
}

#[test]
fn missing_names_are_found() {
    let root = std::env::temp_dir().join(format!("riser-names-{}", std::process::id()));
    let directory = root.join("a/src");
    fs::create_dir_all(&directory).unwrap();
    fs::write(directory.join("b.rs"), "fn run(x: u8) {}\nfn of<T>() {}\n").unwrap();
    let text = "`a/src/b.rs`: `run()`, `B::of()`, `c()`\n`a/src/c.rs` and `a/*.rs`\n\
                `text/plain`, `lost()`, `/a/src/c.rs`\n```\n`a/src/d.rs`\n```\n`a/src` `a/t`\n";
    let expected = [(1, "c()"), (2, "a/src/c.rs"), (7, "a/t")];
    let found = dead_in(&root, text);
    let found: Vec<_> = found.iter().map(|(n, name)| (*n, name.as_str())).collect();
    assert_eq!(found, expected);
    fs::remove_dir_all(&root).unwrap();
}
