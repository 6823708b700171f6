//! Parses a Markdown document into headings, links and code, with line numbers.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

use pulldown_cmark::{CodeBlockKind, Event, Options, Parser, Tag, TagEnd};

use crate::root;

/// A document.
#[derive(Clone, Debug)]
pub struct Page {
    /// Path, relative to the repository's root.
    pub path: PathBuf,
    text: String,
}

/// A part of a document and its line number, starting at 1.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Piece {
    /// Text of inline code, or address of a link.
    pub text: String,
    /// Number of the first line.
    pub line: usize,
}

/// A code block.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Block {
    /// Language after the fence; may be empty.
    pub language: String,
    /// Preceding heading.
    pub section: String,
    /// Code in the block.
    pub text: String,
    /// Line of the fence; the code starts on the next line.
    pub line: usize,
}

impl Page {
    /// Reads a document by its path relative to the repository's root.
    #[must_use]
    pub fn read(path: &Path) -> Self {
        let text = fs::read_to_string(root().join(path));
        let text = text.unwrap_or_else(|e| panic!("{}: {e}", path.display()));
        Self::new(path, text)
    }

    /// Creates a document from text.
    #[must_use]
    pub fn new(path: &Path, text: String) -> Self {
        let path = path.to_owned();
        Self { path, text }
    }

    /// Returns the text of the document.
    #[must_use]
    pub fn text(&self) -> &str {
        &self.text
    }

    /// Formats a line reference for messages.
    #[must_use]
    pub fn place(&self, line: usize) -> String {
        format!("{}:{line}", self.path.display())
    }

    /// Returns the fenced code blocks.
    #[must_use]
    pub fn blocks(&self) -> Vec<Block> {
        let (mut blocks, mut section, mut is_heading) = (Vec::new(), String::new(), false);
        let mut open: Option<Block> = None;
        for (event, line) in self.events() {
            match event {
                Event::Start(Tag::Heading { .. }) => {
                    section.clear();
                    is_heading = true;
                }
                Event::End(TagEnd::Heading(_)) => is_heading = false,
                Event::Start(Tag::CodeBlock(CodeBlockKind::Fenced(language))) => {
                    open = Some(Block {
                        language: language.to_string(),
                        section: section.clone(),
                        text: String::new(),
                        line,
                    });
                }
                Event::End(TagEnd::CodeBlock) => blocks.extend(open.take()),
                Event::Text(text) | Event::Code(text) => match &mut open {
                    Some(block) => block.text.push_str(&text),
                    None if is_heading => section.push_str(&text),
                    None => {}
                },
                _ => {}
            }
        }
        blocks
    }

    /// Returns the blocks of a language below a heading, without those below subsequent headings.
    #[must_use]
    pub fn section(&self, section: &str, language: &str) -> Vec<String> {
        let mut blocks = self.blocks();
        blocks.retain(|block| block.section == section && block.language == language);
        blocks.into_iter().map(|block| block.text).collect()
    }

    /// Returns inline code.
    #[must_use]
    pub fn spans(&self) -> Vec<Piece> {
        let spans = self.events().filter_map(|(event, line)| match event {
            Event::Code(text) => Some(Piece {
                text: text.to_string(),
                line,
            }),
            _ => None,
        });
        spans.collect()
    }

    /// Returns the addresses of links and images.
    #[must_use]
    pub fn links(&self) -> Vec<Piece> {
        let links = self.events().filter_map(|(event, line)| match event {
            Event::Start(Tag::Link { dest_url, .. } | Tag::Image { dest_url, .. }) => Some(Piece {
                text: dest_url.to_string(),
                line,
            }),
            _ => None,
        });
        links.collect()
    }

    /// Returns the anchors of the headings in the format of mdBook and GitHub.
    #[must_use]
    pub fn anchors(&self) -> BTreeSet<String> {
        let (mut anchors, mut open) = (BTreeSet::new(), None::<String>);
        for (event, _) in self.events() {
            match event {
                Event::Start(Tag::Heading { .. }) => open = Some(String::new()),
                Event::End(TagEnd::Heading(_)) => {
                    let heading = open.take().expect("it has begun");
                    let first = anchor(&heading);
                    let further = (1..).map(|n| format!("{first}-{n}"));
                    let mut names = std::iter::once(first.clone()).chain(further);
                    let free = names.find(|name| !anchors.contains(name));
                    anchors.extend(free);
                }
                Event::Text(text) | Event::Code(text) => {
                    if let Some(heading) = &mut open {
                        heading.push_str(&text);
                    }
                }
                _ => {}
            }
        }
        anchors
    }

    fn events(&self) -> impl Iterator<Item = (Event<'_>, usize)> {
        let options = Options::ENABLE_TABLES;
        let events = Parser::new_ext(&self.text, options).into_offset_iter();
        // Events are not strictly in text order. We count lines from the start each time, because
        // pages are short.
        events.map(|(event, range)| {
            let line = self.text[..range.start].matches('\n').count() + 1;
            (event, line)
        })
    }
}

/// Converts a heading to its anchor: letters and digits in lower case, and `-` for whitespace.
fn anchor(heading: &str) -> String {
    let chars = heading.trim().chars().filter_map(|c| match c {
        c if c.is_alphanumeric() || c == '_' || c == '-' => Some(c.to_ascii_lowercase()),
        c if c.is_whitespace() => Some('-'),
        _ => None,
    });
    chars.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = "# One `two` (three)\n\ntext `code` and [a link](b.md#c)\n\n```sh\na\nb\n```\n\n\
                        ## One two three\n\n| `cell` | ![p](q.png) |\n| --- | --- |\n\n```yaml\nx: 1\n```\n";

    fn page() -> Page {
        Page::new(Path::new("a.md"), TEXT.to_owned())
    }

    #[test]
    fn page_elements_have_line_numbers() {
        let page = page();
        let lines = |pieces: Vec<Piece>| -> Vec<_> {
            let pieces = pieces.into_iter();
            pieces.map(|piece| (piece.text, piece.line)).collect()
        };
        assert_eq!(
            lines(page.links()),
            [("b.md#c".to_owned(), 3), ("q.png".to_owned(), 12)]
        );
        let spans: Vec<_> = lines(page.spans());
        assert_eq!(
            spans,
            [
                ("two".to_owned(), 1),
                ("code".to_owned(), 3),
                ("cell".to_owned(), 12)
            ]
        );
        let blocks = page.blocks();
        assert_eq!((blocks[0].line, &*blocks[0].text), (5, "a\nb\n"));
        assert_eq!(page.section("One two three", "yaml"), ["x: 1\n"]);
        assert!(page.section("One two three", "sh").is_empty());
    }

    #[test]
    fn anchors_are_unique() {
        let anchors: Vec<_> = page().anchors().into_iter().collect();
        assert_eq!(anchors, ["one-two-three", "one-two-three-1"]);
    }
}
