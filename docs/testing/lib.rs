//! The book and the other documents of the repository, as tests read them.
//!
//! Tests of several crates check what documents say, each against its own code: the command lines
//! of `riserd` and `riser` in `docs/tests/book`, those of `riserd-configfs` and `cargo xtask` in
//! their own crates, the first steps of the README in `tests/tests/readme.rs`.
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

/// Pages of the book, relative to the repository's root.
pub const BOOK: &str = "docs/src";

/// Documents beside the book, relative to the repository's root.
const DOCUMENTS: &[&str] = &[
    "README.md",
    "CONTRIBUTING.md",
    "ARCHITECTURE.md",
    "CHANGELOG.md",
    "SECURITY.md",
    "docs/verbs.md",
    "docs/seeds.md",
];

/// Returns the repository's root folder.
#[must_use]
pub fn root() -> PathBuf {
    let docs = Path::new(env!("CARGO_MANIFEST_DIR"));
    docs.parent().expect("docs is in a folder").to_owned()
}

/// Reads the pages of the book, in the order of their names.
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
    /// The document and the line, for messages.
    pub place: String,
    /// The program and its arguments.
    pub words: Vec<String>,
    /// Whether it is in running text, where arguments may be left out.
    pub is_prose: bool,
}

/// Returns the commands of a program in all documents: lines of shell blocks, and code in running
/// text that begins with the program's words.
#[must_use]
pub fn commands_of(program: &[&str]) -> Vec<Named> {
    let mut commands = Vec::new();
    // The changelog may name what is gone.
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
