//! Measures a package, or all packages of a tree in total.

use std::collections::BTreeMap;
use std::fmt;
use std::path::PathBuf;

use proc_macro2::Delimiter;

use super::functions::{Function, functions};
use super::lexical::{Line, Remark, Token};
use super::sources::{Package, Purpose, Source};
use super::words;

/// Functions longer than this should have a comment that explains how they work.
const LONG: usize = 30;

/// Maximum width of a comment line.
const WIDTH: usize = 106;

/// Number of lines to search for a safety comment before an unsafe block.
const SAFETY_ABOVE: usize = 6;

/// Words that should not be used to start a comment, because a noun or verb would be better.
const OPENERS: &[&str] = &[
    "What", "Whether", "How", "Where", "Who", "Whose", "When", "Which", "Why",
];

/// A value with its file and line.
#[derive(Clone, Debug)]
pub(crate) struct At<T> {
    pub(crate) path: PathBuf,
    pub(crate) line: usize,
    pub(crate) what: T,
}

/// Measured values, which are for product code unless the name includes tests.
#[derive(Clone, Default)]
pub(crate) struct Measures {
    /// Number of lines by purpose and type.
    lines: BTreeMap<(usize, usize), usize>,
    /// Number of lines for each file, not including tests.
    pub(crate) files: Vec<At<usize>>,
    pub(crate) functions: Vec<At<Function>>,
    pub(crate) test_functions: Vec<At<Function>>,
    /// Number of comment lines in function bodies.
    body_comments: usize,
    /// Number of functions with at least [`LONG`] lines, and how many of these have no comment.
    long: usize,
    pub(crate) silent: Vec<At<Function>>,
    unwraps: usize,
    expects: usize,
    unreachables: usize,
    /// Number of unsafe blocks and implementations for each file, with and without a safety
    /// comment.
    pub(crate) unsafes: BTreeMap<PathBuf, (usize, usize)>,
    docs: usize,
    questions: usize,
    short_docs: usize,
    /// Number of words in comments that are on the word list.
    words: usize,
    /// Number of comment lines that exceed [`WIDTH`], including tests.
    wide: usize,
}

impl Measures {
    pub(crate) fn of(package: &Package) -> Self {
        let mut measures = Self::default();
        for source in &package.sources {
            measures.add_source(source);
        }
        measures
    }

    /// Adds the values of another package.
    pub(crate) fn add(&mut self, other: Self) {
        for (key, lines) in other.lines {
            *self.lines.entry(key).or_default() += lines;
        }
        self.files.extend(other.files);
        self.functions.extend(other.functions);
        self.test_functions.extend(other.test_functions);
        self.body_comments += other.body_comments;
        self.long += other.long;
        self.silent.extend(other.silent);
        self.unwraps += other.unwraps;
        self.expects += other.expects;
        self.unreachables += other.unreachables;
        self.unsafes.extend(other.unsafes);
        self.docs += other.docs;
        self.questions += other.questions;
        self.short_docs += other.short_docs;
        self.words += other.words;
        self.wide += other.wide;
    }

    /// Returns the number of lines with this purpose and type.
    pub(crate) fn lines(&self, purpose: Purpose, line: Line) -> usize {
        let key = (purpose as usize, line as usize);
        self.lines.get(&key).copied().unwrap_or_default()
    }

    fn add_source(&mut self, source: &Source) {
        let mut product = 0;
        for (at, line) in source.text.lines.iter().enumerate() {
            let purpose = source.purpose_of(at + 1);
            *self
                .lines
                .entry((purpose as usize, *line as usize))
                .or_default() += 1;
            product += usize::from(purpose == Purpose::Product);
        }
        if source.purpose() == Purpose::Generated {
            return;
        }
        let numbers = 1..=source.text.lines.len();
        let is_wide = |number: &usize| source.text.is_wide_remark(*number, WIDTH);
        self.wide += numbers.filter(is_wide).count();
        if source.purpose() == Purpose::Product {
            self.files.push(at(source, 1, product));
        }
        for function in functions(&source.syntax) {
            self.take_function(source, function);
        }
        self.take_tokens(source);
        self.take_docs(source);
    }

    fn take_function(&mut self, source: &Source, function: Function) {
        let line = *function.lines.start();
        if source.purpose_of(line) == Purpose::Test {
            return self.test_functions.push(at(source, line, function));
        }
        let is_within = |comment: &&Remark| function.lines.contains(&comment.line);
        let comments = || source.text.comments.iter().filter(is_within);
        let alone = |comment: &&Remark| source.text.line(comment.line) == Line::Comment;
        self.body_comments += comments().filter(alone).count();
        if function.len() >= LONG {
            self.long += 1;
            if comments().next().is_none() {
                self.silent.push(at(source, line, function.clone()));
            }
        }
        self.functions.push(at(source, line, function));
    }

    fn take_tokens(&mut self, source: &Source) {
        let is_product = |token: &Token| source.purpose_of(token.line) == Purpose::Product;
        // We need to use tokens instead of the syntax tree, where macro arguments are not parsed
        // but can contain calls.
        for tokens in source.text.tokens.windows(3) {
            let [first, second, third] = tokens else {
                unreachable!("windows have three tokens");
            };
            if !is_product(second) {
                continue;
            }
            let is_call = first.is_punct('.') && third.opens(Delimiter::Parenthesis);
            self.unwraps += usize::from(is_call && second.is_ident("unwrap"));
            self.expects += usize::from(is_call && second.is_ident("expect"));
            let is_unreachable = first.is_ident("unreachable") && second.is_punct('!');
            self.unreachables += usize::from(is_unreachable);
            let is_block = second.opens(Delimiter::Brace) || second.is_ident("impl");
            if first.is_ident("unsafe") && is_block {
                let entry = self.unsafes.entry(source.path.clone()).or_default();
                if is_justified(source, first.line) {
                    entry.0 += 1;
                } else {
                    entry.1 += 1;
                }
            }
        }
    }

    fn take_docs(&mut self, source: &Source) {
        let is_product = |remark: &&Remark| source.purpose_of(remark.line) == Purpose::Product;
        for doc in source.text.docs.iter().filter(is_product) {
            let mut words = doc.text.split_whitespace();
            let opener = words.next().unwrap_or_default();
            let opener = opener.strip_suffix("ever").unwrap_or(opener);
            self.docs += 1;
            self.questions += usize::from(OPENERS.contains(&opener));
            self.short_docs += usize::from(words.count() < 3);
        }
        let text = &source.text;
        let remarks = text
            .docs
            .iter()
            .chain(&text.inner_docs)
            .chain(&text.comments);
        self.words += remarks
            .filter(is_product)
            .map(|remark| words::find(&remark.text, remark.line).len())
            .sum::<usize>();
    }

    /// Returns the values to be shown in a table, in order.
    pub(crate) fn rows(&self) -> Vec<Row> {
        [self.sizes(), self.functions(), self.texts(), self.risks()].concat()
    }

    fn sizes(&self) -> Vec<Row> {
        let [code, test, generated] = [Purpose::Product, Purpose::Test, Purpose::Generated]
            .map(|purpose| self.lines(purpose, Line::Code));
        let files = sorted(self.files.iter().map(|f| f.what));
        vec![
            Row::count("product", "product, lines of code", code),
            Row::count("test", "test, lines of code", test),
            Row::count("generated", "generated, lines of code", generated),
            Row::ratio("test_ratio", "test : product", test, code),
            Row::count("files", "files", files.len()),
            Row::count("file_median", "file, median of lines", median(&files)),
            Row::count("file_longest", "file, longest", longest(&files)),
        ]
    }

    fn functions(&self) -> Vec<Row> {
        // Sort once, because we need the sorted values to get the median, the maximum and the
        // percentages.
        let lengths = sorted(self.functions.iter().map(|f| f.what.len()));
        let (all, sum) = (lengths.len(), lengths.iter().sum());
        let over = |limit| lengths.iter().filter(|len| **len > limit).count();
        let having = |is: fn(&Function) -> bool| {
            let functions = self.functions.iter().filter(|f| is(&f.what));
            functions.count()
        };
        let (wide, nested) = (having(|f| f.parameters > 6), having(|f| f.depth > 4));
        let silent = self.silent.len();
        vec![
            Row::count("functions", "functions", all),
            Row::count(
                "function_median",
                "function, median of lines",
                median(&lengths),
            ),
            Row::ratio("function_mean", "function, mean of lines", sum, all),
            Row::count("function_longest", "function, longest", longest(&lengths)),
            Row::share("over_50", "functions > 50 lines", over(50), all),
            Row::share("over_80", "functions > 80 lines", over(80), all),
            Row::share("over_120", "functions > 120 lines", over(120), all),
            Row::share("parameters", "functions > 6 parameters", wide, all),
            Row::share("nested", "functions nested deeper than 4", nested, all),
            Row::share(
                "silent",
                "functions ≥ 30 lines, no comment",
                silent,
                self.long,
            ),
        ]
    }

    fn texts(&self) -> Vec<Row> {
        let code = self.lines(Purpose::Product, Line::Code);
        let own = self.lines(Purpose::Product, Line::Comment);
        let doc = self.lines(Purpose::Product, Line::Doc);
        let (questions, short) = (self.questions, self.short_docs);
        vec![
            Row::share(
                "body_comments",
                "comments in bodies : code",
                self.body_comments,
                code,
            ),
            Row::share("comments", "comments : code", own, code),
            Row::share("docs", "docs : code", doc, code),
            Row::share(
                "questions",
                "docs opening with What, How…",
                questions,
                self.docs,
            ),
            Row::share("short_docs", "docs of ≤ 3 words", short, self.docs),
            Row::count("words", "words to replace in comments", self.words),
            Row::count("wide", "docs and comments > 100 columns", self.wide),
        ]
    }

    fn risks(&self) -> Vec<Row> {
        let files = self.unsafes.values();
        let (with, without) = files.fold((0, 0), |sum, file| (sum.0 + file.0, sum.1 + file.1));
        let files = self.unsafes.len();
        vec![
            Row::count("unwrap", "unwrap()", self.unwraps),
            Row::count("expect", "expect(…)", self.expects),
            Row::count("unreachable", "unreachable!", self.unreachables),
            Row::count("unsafe", "unsafe blocks and impls", with + without),
            Row::share("justified", "… with SAFETY", with, with + without),
            Row::count("unsafe_files", "… files with some", files),
        ]
    }
}

#[derive(Clone)]
pub(crate) struct Row {
    /// JSON key.
    pub(crate) key: &'static str,
    pub(crate) title: &'static str,
    pub(crate) value: Value,
}

impl Row {
    pub(crate) fn count(key: &'static str, title: &'static str, count: usize) -> Self {
        let value = Value::Count(count);
        Self { key, title, value }
    }

    fn share(key: &'static str, title: &'static str, part: usize, whole: usize) -> Self {
        let value = Value::Share(part, whole);
        Self { key, title, value }
    }

    fn ratio(key: &'static str, title: &'static str, part: usize, whole: usize) -> Self {
        let value = Value::Ratio(part, whole);
        Self { key, title, value }
    }
}

/// A value, which is formatted based on its type.
#[derive(Clone, Copy)]
pub(crate) enum Value {
    Count(usize),
    /// Part of a total, shown as a percentage.
    Share(usize, usize),
    /// Ratio, shown with two digits.
    Ratio(usize, usize),
}

impl Value {
    /// Returns the value as a number. For a part of a total, this is between 0 and 1.
    pub(crate) fn number(self) -> f64 {
        match self {
            Self::Count(count) => count as f64,
            Self::Share(_, 0) | Self::Ratio(_, 0) => 0.0,
            Self::Share(part, whole) | Self::Ratio(part, whole) => part as f64 / whole as f64,
        }
    }
}

impl fmt::Display for Value {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let text = match self {
            Self::Count(count) => count.to_string(),
            Self::Share(part, _) => format!("{part} ({:.1} %)", 100.0 * self.number()),
            Self::Ratio(..) => format!("{:.2}", self.number()),
        };
        f.pad(&text)
    }
}

fn at<T>(source: &Source, line: usize, what: T) -> At<T> {
    At {
        path: source.path.clone(),
        line,
        what,
    }
}

/// Returns true if there is a comment on this line or right before it that explains why unsafe code
/// is sound.
fn is_justified(source: &Source, line: usize) -> bool {
    let near = line.saturating_sub(SAFETY_ABOVE)..=line + 1;
    let mut comments = source.text.comments.iter();
    comments.any(|c| near.contains(&c.line) && c.text.contains("SAFETY"))
}

fn sorted(numbers: impl Iterator<Item = usize>) -> Vec<usize> {
    let mut numbers: Vec<_> = numbers.collect();
    numbers.sort_unstable();
    numbers
}

fn longest(sorted: &[usize]) -> usize {
    sorted.last().copied().unwrap_or_default()
}

fn median(sorted: &[usize]) -> usize {
    sorted.get(sorted.len() / 2).copied().unwrap_or_default()
}
