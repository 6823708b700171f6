//! Lines, comments and tokens of a source file.
//!
//! A syntax tree doesn't contain comments, and macro bodies are not parsed. We can get both from
//! the tokens: every line is classified by the tokens it contains, and any text between tokens is a
//! comment.

use proc_macro2::{Delimiter, LexError, LineColumn, TokenStream, TokenTree};

/// Line type. If a comment follows code on the same line, this is a code line.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Line {
    Blank,
    Code,
    /// An inner or outer doc comment.
    Doc,
    /// A normal comment on a separate line.
    Comment,
}

/// A normal or doc comment and its first line number, starting at 1.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Remark {
    pub(crate) line: usize,
    pub(crate) text: String,
}

impl Remark {
    pub(crate) fn new(line: usize, text: String) -> Self {
        Self { line, text }
    }
}

/// A token and its first line number, starting at 1.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Token {
    pub(crate) line: usize,
    pub(crate) kind: Kind,
}

#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) enum Kind {
    Ident(String),
    Punct(char),
    Open(Delimiter),
    Close(Delimiter),
    /// A literal as in the source, including quotes.
    Literal(String),
}

impl Token {
    pub(crate) fn is_ident(&self, name: &str) -> bool {
        matches!(&self.kind, Kind::Ident(ident) if ident == name)
    }

    pub(crate) fn is_punct(&self, c: char) -> bool {
        self.kind == Kind::Punct(c)
    }

    pub(crate) fn opens(&self, delimiter: Delimiter) -> bool {
        self.kind == Kind::Open(delimiter)
    }
}

/// A source file split into lines, comments and tokens.
pub(crate) struct Text {
    pub(crate) lines: Vec<Line>,
    /// All tokens in order, including tokens in groups but without doc comments.
    pub(crate) tokens: Vec<Token>,
    /// Outer doc comments. Consecutive lines are merged.
    pub(crate) docs: Vec<Remark>,
    /// Inner doc comments by line.
    pub(crate) inner_docs: Vec<Remark>,
    /// Normal comments by line, on separate lines or after code.
    pub(crate) comments: Vec<Remark>,
    /// Column where the last token on each line stops.
    ends: Vec<usize>,
    /// Last line of the previous outer doc comment.
    doc_end: usize,
}

impl Text {
    /// Splits a source file. Also returns the tokens for use by the parser.
    pub(crate) fn new(source: &str) -> Result<(Self, TokenStream), LexError> {
        let stream: TokenStream = source.parse()?;
        let count = source.lines().count();
        let mut text = Self {
            lines: vec![Line::Blank; count],
            tokens: Vec::new(),
            docs: Vec::new(),
            inner_docs: Vec::new(),
            comments: Vec::new(),
            ends: vec![0; count],
            doc_end: 0,
        };
        text.push_tokens(stream.clone());
        text.take_comments(source);
        Ok((text, stream))
    }

    fn push_tokens(&mut self, stream: TokenStream) {
        let mut trees = stream.into_iter().peekable();
        while let Some(tree) = trees.next() {
            let (from, to) = (tree.span().start(), tree.span().end());
            // We receive a doc comment as `#[doc = "…"]`, where the span of `#` includes the whole
            // comment.
            if matches!(&tree, TokenTree::Punct(_))
                && (to.line, to.column) > (from.line, from.column + 1)
            {
                let mut is_outer = true;
                while let Some(TokenTree::Punct(_)) = trees.peek() {
                    trees.next();
                    is_outer = false;
                }
                if let Some(TokenTree::Group(group)) = trees.next() {
                    self.take_doc(from, to, is_outer, group.stream());
                }
                continue;
            }
            match tree {
                TokenTree::Group(group) => {
                    let (open, close) = (group.span_open(), group.span_close());
                    let delimiter = group.delimiter();
                    self.push(open.start(), open.end(), Kind::Open(delimiter));
                    self.push_tokens(group.stream());
                    self.push(close.start(), close.end(), Kind::Close(delimiter));
                }
                TokenTree::Ident(ident) => self.push(from, to, Kind::Ident(ident.to_string())),
                TokenTree::Punct(punct) => self.push(from, to, Kind::Punct(punct.as_char())),
                TokenTree::Literal(literal) => {
                    self.push(from, to, Kind::Literal(literal.to_string()));
                }
            }
        }
    }

    fn push(&mut self, from: LineColumn, to: LineColumn, kind: Kind) {
        self.mark(from, to, Line::Code);
        self.tokens.push(Token {
            line: from.line,
            kind,
        });
    }

    fn take_doc(&mut self, from: LineColumn, to: LineColumn, is_outer: bool, doc: TokenStream) {
        self.mark(from, to, Line::Doc);
        let Some(TokenTree::Literal(literal)) = doc.into_iter().last() else {
            return;
        };
        let syn::Lit::Str(words) = syn::Lit::new(literal) else {
            return;
        };
        if !is_outer {
            return self.inner_docs.push(Remark::new(from.line, words.value()));
        }
        match self.docs.last_mut() {
            Some(last) if self.doc_end + 1 == from.line => {
                last.text.push('\n');
                last.text.push_str(&words.value());
            }
            _ => self.docs.push(Remark::new(from.line, words.value())),
        }
        self.doc_end = to.line;
    }

    /// Sets the type of all lines covered by a token or doc comment. Code has priority.
    fn mark(&mut self, from: LineColumn, to: LineColumn, kind: Line) {
        for line in &mut self.lines[from.line - 1..to.line] {
            if *line != Line::Code {
                *line = kind;
            }
        }
        self.ends[to.line - 1] = to.column;
    }

    /// Collects all comments, which is any text not covered by a token, except whitespace.
    fn take_comments(&mut self, source: &str) {
        for (at, line) in source.lines().enumerate() {
            let behind: String = line.chars().skip(self.ends[at]).collect();
            let behind = behind.trim();
            // If a line is inside a long literal, it has no token, but this is not a comment.
            if behind.is_empty() || (self.lines[at] == Line::Code && !behind.starts_with('/')) {
                continue;
            }
            match self.lines[at] {
                // An inner line of a doc comment block.
                Line::Doc => continue,
                Line::Blank => self.lines[at] = Line::Comment,
                Line::Code | Line::Comment => {}
            }
            self.comments.push(Remark::new(at + 1, behind.to_owned()));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_classified_by_content() {
        let source = "//! About.\n\n/// One\n/// two.\nfn f() { // behind\n    /* alone */\n    \
                      let s = \"// text\n    // text\";\n}\n";
        let (text, _) = Text::new(source).unwrap();
        use Line::{Blank, Code, Comment, Doc};
        assert_eq!(
            text.lines,
            [Doc, Blank, Doc, Doc, Code, Comment, Code, Code, Code]
        );
        assert_eq!(text.inner_docs, [Remark::new(1, " About.".to_owned())]);
        assert_eq!(text.docs, [Remark::new(3, " One\n two.".to_owned())]);
        let comments: Vec<_> = text.comments.iter().map(|c| (c.line, &*c.text)).collect();
        assert_eq!(comments, [(5, "// behind"), (6, "/* alone */")]);
    }

    #[test]
    fn tokens_exclude_docs() {
        let (text, _) = Text::new("/** A doc. */\nstruct S;\n").unwrap();
        assert!(text.tokens[0].is_ident("struct"));
        assert_eq!(text.docs.len(), 1);
    }
}
