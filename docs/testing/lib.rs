//! Parses the book and the other documents of the repository for tests.
//!
//! Tests of several crates compare documents with their own code: `docs/tests/book` checks command
//! lines of `riserd` and `riser`, the crates of `riserd-configfs` and `cargo xtask` check their
//! own, and `tests/tests/readme.rs` runs the first steps of the README.
//!
//! - [`page`]: a document with its headings, links and code. [`shell`]: the commands of a script.

#![allow(
    clippy::missing_panics_doc,
    reason = "for tests, which panic when something fails"
)]

pub mod page;
pub mod shell;

use std::path::{Path, PathBuf};

use walkdir::WalkDir;

pub use page::Page;

/// Directory of the book, relative to the repository's root.
pub const BOOK: &str = "docs/src";

/// Documents other than the book, relative to the repository's root.
const DOCUMENTS: &[&str] = &[
    "README.md",
    "CONTRIBUTING.md",
    "ARCHITECTURE.md",
    "CHANGELOG.md",
    "SECURITY.md",
    "docs/verbs.md",
    "docs/seeds.md",
];

/// Returns the repository's root directory.
#[must_use]
pub fn root() -> PathBuf {
    let docs = Path::new(env!("CARGO_MANIFEST_DIR"));
    docs.parent()
        .expect("docs has a parent directory")
        .to_owned()
}

/// Reads the pages of the book, sorted by name.
#[must_use]
pub fn book() -> Vec<Page> {
    let root = root();
    let entries = WalkDir::new(root.join(BOOK)).sort_by_file_name();
    let files = entries
        .into_iter()
        .map(|entry| entry.expect("the book can be read").into_path());
    files
        .filter(|path| path.extension().is_some_and(|e| e == "md"))
        .map(|path| Page::read(path.strip_prefix(&root).expect("it is below")))
        .collect()
}

/// Reads the book, the README and the other documents.
#[must_use]
pub fn documents() -> Vec<Page> {
    let others = DOCUMENTS.iter().map(|path| Page::read(Path::new(path)));
    others.chain(book()).collect()
}

/// A command in a document.
#[derive(Clone, Debug)]
pub struct Named {
    /// Document and line, for messages.
    pub place: String,
    /// The program and its arguments.
    pub words: Vec<String>,
    /// Whether this is in running text, where arguments may be omitted.
    pub is_prose: bool,
}

/// Returns the commands of a program in all documents: lines of shell blocks, and inline code that
/// begins with the program's words.
#[must_use]
pub fn commands_of(program: &[&str]) -> Vec<Named> {
    let mut commands = Vec::new();
    // The changelog may contain removed commands.
    let pages = documents().into_iter();
    for page in pages.filter(|page| !page.path.ends_with("CHANGELOG.md")) {
        let blocks = page.blocks();
        for block in blocks.iter().filter(|block| block.language == "sh") {
            for line in shell::commands(&block.text) {
                commands.push(Named {
                    place: page.place(block.line + line.line),
                    words: line.words,
                    is_prose: false,
                });
            }
        }
        for span in page.spans() {
            let line = shell::commands(&span.text).into_iter().next();
            commands.extend(line.map(|line| Named {
                place: page.place(span.line),
                words: line.words,
                is_prose: true,
            }));
        }
    }
    commands.retain(|command| command.words.iter().take(program.len()).eq(program));
    commands
}
