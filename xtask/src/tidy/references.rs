//! Files and functions of the repository that documents name, in backticks.
//!
//! - A path below a folder of the root, as `target/src/main.rs`, must exist.
//! - On a line that names Rust files, each function, as `run()`, must be in one of them.

use std::fs;
use std::path::Path;

use super::sources;
use crate::Failure;

/// Documents beside the book. The changelog may name what is gone.
const DOCUMENTS: &[&str] = &[
    "README.md",
    "ARCHITECTURE.md",
    "CONTRIBUTING.md",
    "SECURITY.md",
    "docs/verbs.md",
];

/// Finds names of files and functions that do not exist: the line of the list of what is known, and
/// a message.
pub(super) fn dead(root: &Path) -> Result<Vec<(String, String)>, Failure> {
    let mut dead = Vec::new();
    for path in sources::paths(root)? {
        let is_page = path.starts_with("docs/src") && path.extension().is_some_and(|e| e == "md");
        if !is_page && !DOCUMENTS.iter().any(|name| path == Path::new(name)) {
            continue;
        }
        let text = fs::read_to_string(root.join(&path))?;
        for (number, name) in dead_in(root, &text) {
            let path = path.display();
            let key = format!("reference {path}: {name}");
            let about = format!("{path}:{number}: `{name}` does not exist");
            dead.push((key, about));
        }
    }
    Ok(dead)
}

/// The names in a document that lead nowhere, with their lines.
fn dead_in(root: &Path, text: &str) -> Vec<(usize, String)> {
    let (mut dead, mut is_code) = (Vec::new(), false);
    for (line, number) in text.lines().zip(1..) {
        if line.starts_with("```") {
            is_code = !is_code;
        }
        // Blocks of code show input and output, whose paths are those of the reader's machine.
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
        // A function without a file on its line could be anybody's.
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

/// Whether a name in backticks means a file or folder of the repository: without blanks and
/// wildcards, below one of its folders.
fn is_path(root: &Path, span: &str) -> bool {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || "/._-@".contains(c);
    let Some((first, _)) = span.split_once('/') else {
        return false;
    };
    let is_folder = !first.is_empty() && !first.starts_with('.') && root.join(first).is_dir();
    is_folder && span.chars().all(is_plain)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sh::Scratch;

    #[test]
    fn files_and_functions_that_do_not_exist_are_found() {
        let root = Scratch::new("tidy-references").unwrap();
        let folder = root.path().join("a/src");
        fs::create_dir_all(&folder).unwrap();
        fs::write(folder.join("b.rs"), "fn run(x: u8) {}\nfn of<T>() {}\n").unwrap();
        let text = "`a/src/b.rs`: `run()`, `B::of()`, `c()`\n`a/src/c.rs` and `a/*.rs`\n\
                    `text/plain`, `lost()`, `/a/src/c.rs`\n```\n`a/src/d.rs`\n```\n`a/src` `a/t`\n";
        let expected = [(1, "c()"), (2, "a/src/c.rs"), (7, "a/t")];
        let found = dead_in(root.path(), text);
        let found: Vec<_> = found.iter().map(|(n, name)| (*n, name.as_str())).collect();
        assert_eq!(found, expected);
    }
}
