//! Measures a package, or all packages of a tree in total.

use std::collections::BTreeMap;
use std::path::PathBuf;

use proc_macro2::Delimiter;

use super::functions::{Function, functions};
use super::lexical::Line;
use super::sources::{Package, Purpose, Source};

/// Number of lines to search for a safety comment before an unsafe block.
const SAFETY_ABOVE: usize = 6;

/// A function with its file.
#[derive(Clone, Debug)]
pub(crate) struct At {
    pub(crate) path: PathBuf,
    pub(crate) function: Function,
}

/// Measured values, which are for product code unless they include the purpose.
#[derive(Clone, Default)]
pub(crate) struct Measures {
    /// Number of lines by purpose and type.
    lines: BTreeMap<(usize, usize), usize>,
    /// Number of lines for each file, not including tests.
    pub(crate) files: Vec<(usize, PathBuf)>,
    pub(crate) functions: Vec<At>,
    /// Number of unsafe blocks and implementations for each file, with and without a safety
    /// comment.
    pub(crate) unsafes: BTreeMap<PathBuf, (usize, usize)>,
}

impl Measures {
    pub(crate) fn of(package: &Package) -> Self {
        let mut measures = Self::default();
        for source in &package.sources {
            measures.add_source(source);
        }
        measures
    }

    pub(crate) fn add(&mut self, other: Self) {
        for (key, lines) in other.lines {
            *self.lines.entry(key).or_default() += lines;
        }
        self.files.extend(other.files);
        self.functions.extend(other.functions);
        self.unsafes.extend(other.unsafes);
    }

    pub(crate) fn lines(&self, purpose: Purpose, line: Line) -> usize {
        let key = (purpose as usize, line as usize);
        self.lines.get(&key).copied().unwrap_or_default()
    }

    fn add_source(&mut self, source: &Source) {
        let mut product = 0;
        for (at, line) in source.text.lines.iter().enumerate() {
            let purpose = source.purpose_of(at + 1);
            let key = (purpose as usize, *line as usize);
            *self.lines.entry(key).or_default() += 1;
            product += usize::from(purpose == Purpose::Product);
        }
        if source.purpose() != Purpose::Product {
            return;
        }
        self.files.push((product, source.path.clone()));
        let own = functions(&source.syntax).into_iter();
        let own = own.filter(|f| source.purpose_of(*f.lines.start()) == Purpose::Product);
        self.functions.extend(own.map(|function| At {
            path: source.path.clone(),
            function,
        }));
        self.add_unsafes(source);
    }

    fn add_unsafes(&mut self, source: &Source) {
        // We need to use tokens instead of the syntax tree, where macro arguments are not parsed
        // but can contain blocks.
        for pair in source.text.tokens.windows(2) {
            let is_block = pair[1].opens(Delimiter::Brace) || pair[1].is_ident("impl");
            let is_product = source.purpose_of(pair[0].line) == Purpose::Product;
            if pair[0].is_ident("unsafe") && is_block && is_product {
                let entry = self.unsafes.entry(source.path.clone()).or_default();
                match is_justified(source, pair[0].line) {
                    true => entry.0 += 1,
                    false => entry.1 += 1,
                }
            }
        }
    }

    /// Returns the number of methods of each type, by the directory of a crate that contains the
    /// type, because types in different directories can have the same name.
    pub(crate) fn methods(&self) -> BTreeMap<String, usize> {
        let mut methods = BTreeMap::new();
        for At { path, function } in &self.functions {
            if let Some((owner, _)) = function.name.split_once("::") {
                let mut parts = path.iter().map(|part| part.to_string_lossy());
                let of_crate: Vec<_> = parts.by_ref().take_while(|part| part != "src").collect();
                let module = parts.next().unwrap_or_default();
                let module = module.trim_end_matches(".rs");
                let name = format!("{}/{module} {owner}", of_crate.join("/"));
                *methods.entry(name).or_default() += 1;
            }
        }
        methods
    }

    /// Returns the values to be shown in a table, in order.
    pub(crate) fn rows(&self) -> Vec<(&'static str, String)> {
        let [code, test, generated] = [Purpose::Product, Purpose::Test, Purpose::Generated]
            .map(|purpose| self.lines(purpose, Line::Code));
        let comments = self.lines(Purpose::Product, Line::Comment);
        let docs = self.lines(Purpose::Product, Line::Doc);
        let lengths = self.functions.iter().map(|at| at.function.len());
        let mut lengths: Vec<_> = lengths.collect();
        lengths.sort_unstable();
        let all = lengths.len();
        let median = lengths.get(all / 2).copied().unwrap_or_default();
        let over = |limit| share(lengths.iter().filter(|len| **len > limit).count(), all);
        let unsafes = self.unsafes.values();
        let (with, without) = unsafes.fold((0, 0), |sum, file| (sum.0 + file.0, sum.1 + file.1));
        let count = |number: usize| number.to_string();
        vec![
            ("product, lines of code", count(code)),
            ("test, lines of code", count(test)),
            ("generated, lines of code", count(generated)),
            ("test : product", format!("{:.2}", ratio(test, code))),
            ("comments : code", share(comments, code)),
            ("docs : code", share(docs, code)),
            ("files", count(self.files.len())),
            ("functions", count(all)),
            ("function, median of lines", count(median)),
            ("functions > 50 lines", over(50)),
            ("functions > 80 lines", over(80)),
            ("functions > 120 lines", over(120)),
            ("unsafe blocks and impls", count(with + without)),
            ("… with SAFETY", share(with, with + without)),
        ]
    }
}

fn share(part: usize, whole: usize) -> String {
    format!("{part} ({:.1} %)", 100.0 * ratio(part, whole))
}

fn ratio(part: usize, whole: usize) -> f64 {
    part as f64 / whole.max(1) as f64
}

/// Returns whether there is a comment on this line or right before it that explains why unsafe code
/// is sound.
fn is_justified(source: &Source, line: usize) -> bool {
    let near = line.saturating_sub(SAFETY_ABOVE)..=line + 1;
    let mut comments = source.text.comments.iter();
    comments.any(|c| near.contains(&c.line) && c.text.contains("SAFETY"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tidy::sources::tests::tree;

    #[test]
    fn product_is_measured_without_tests() {
        let source = "// SAFETY: none.\nunsafe impl Sync for A {}\nimpl A {\n    fn f() {\n        \
                      g!(unsafe { 1 });\n    }\n    fn g() {}\n}\n\n#[cfg(test)]\nmod tests {\n    \
                      fn h() {}\n}\n";
        let manifest = "[package]\nname = \"a\"\n";
        let files = [("a/Cargo.toml", manifest), ("a/src/lib.rs", source)];
        let measures = Measures::of(&tree("tidy-measures", &files)[0]);
        assert_eq!(measures.lines(Purpose::Product, Line::Code), 7);
        assert_eq!(measures.lines(Purpose::Test, Line::Code), 4);
        assert_eq!(measures.methods(), [("a/lib A".to_owned(), 2)].into());
        let rows = measures.rows();
        assert!(rows.contains(&("functions", "2".to_owned())));
        assert!(rows.contains(&("… with SAFETY", "2 (100.0 %)".to_owned())));
    }
}
