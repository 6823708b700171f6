//! Puts several mutants in the same program. Each mutant has a switch, so a single build is enough
//! for all of them.
//!
//! `cargo mutants` returns the source location of each mutant. We change the code at this location
//! to choose at run time: `a < b` is replaced by `(if is_planted("7") { a > b } else { a < b })`,
//! and a function starts with `if is_planted("8") { return true; }`. A separate build for each
//! mutant would take minutes.

use std::cmp::Reverse;
use std::ops::Range;

use proc_macro2::LineColumn;
use syn::spanned::Spanned;
use syn::visit::{self, Visit};

/// A mutant that can be controlled by a switch.
#[derive(Clone, Debug)]
pub(super) struct Mutant {
    /// Switch number, starting at 1.
    pub(super) number: usize,
    /// Path of the source file.
    pub(super) file: String,
    /// Offset of the first byte to replace.
    pub(super) place: usize,
    /// Mutation type as used by `cargo mutants`.
    pub(super) genre: String,
    /// Replacement text.
    pub(super) replacement: String,
    /// Description for the user.
    pub(super) name: String,
}

/// Text to insert.
struct Insertion {
    at: usize,
    /// At the same offset, inner suffixes must be inserted before outer prefixes.
    order: (bool, Reverse<usize>),
    text: String,
    number: usize,
}

/// A source file with switches.
pub(super) struct Switched {
    /// Modified source text.
    pub(super) text: String,
    /// Ranges in this text that belong to a mutant, with its number.
    pub(super) ranges: Vec<(Range<usize>, usize)>,
    /// Numbers of mutants that can't have a switch.
    pub(super) without: Vec<usize>,
}

/// Adds switches for the mutants of a source file.
pub(super) fn switched(source: &str, mutants: &[Mutant]) -> Result<Switched, syn::Error> {
    let file = syn::parse_file(source)?;
    let lines = Lines::of(source);
    let mut without = Vec::new();
    let mut insertions = Vec::new();
    for mutant in mutants {
        let mut search = Search {
            lines: &lines,
            mutant,
            found: None,
        };
        search.visit_file(&file);
        let Some(Found {
            range,
            before,
            after,
        }) = search.found.map(|f| f.switch(source, mutant))
        else {
            without.push(mutant.number);
            continue;
        };
        let number = mutant.number;
        let len = range.len();
        insertions.push(Insertion {
            at: range.start,
            order: (true, Reverse(len)),
            text: before,
            number,
        });
        if !after.is_empty() {
            insertions.push(Insertion {
                at: range.end,
                // Sort by length, so that the shortest is first.
                order: (false, Reverse(usize::MAX - len)),
                text: after,
                number,
            });
        }
    }
    insertions.sort_by_key(|insertion| (insertion.at, insertion.order));
    let (mut text, mut ranges, mut at) = (String::new(), Vec::new(), 0);
    for insertion in insertions {
        text.push_str(&source[at..insertion.at]);
        at = insertion.at;
        let start = text.len();
        text.push_str(&insertion.text);
        ranges.push((start..text.len(), insertion.number));
    }
    text.push_str(&source[at..]);
    Ok(Switched {
        text,
        ranges,
        without,
    })
}

/// Text before and after a range.
struct Found {
    range: Range<usize>,
    before: String,
    after: String,
}

/// Syntax location of a mutant.
enum Place {
    /// Function body.
    Body(Range<usize>),
    /// Binary operation and its operands.
    Binary([Range<usize>; 3]),
    /// Unary operation and its operand.
    Unary([Range<usize>; 2]),
    /// Guard of a match arm.
    Guard(Range<usize>),
    /// End of the pattern, for a match arm without a guard.
    Arm(usize),
}

impl Place {
    fn switch(self, source: &str, mutant: &Mutant) -> Found {
        let chosen = format!("riser_state::is_planted(\"{}\")", mutant.number);
        let new = &mutant.replacement;
        let instead = |range: Range<usize>, with: String| Found {
            before: format!("(if {chosen} {{ {with} }} else {{ "),
            after: " })".to_owned(),
            range,
        };
        match self {
            Self::Body(range) => Found {
                range: range.start..range.start,
                before: format!("if {chosen} {{ return {new}; }} "),
                after: String::new(),
            },
            Self::Binary([all, left, right]) => {
                let with = format!("{} {new} {}", &source[left], &source[right]);
                instead(all, with)
            }
            Self::Unary([all, operand]) => instead(all, format!("{new}{}", &source[operand])),
            Self::Guard(range) => instead(range, new.clone()),
            Self::Arm(end) => Found {
                range: end..end,
                before: format!(" if !{chosen}"),
                after: String::new(),
            },
        }
    }
}

/// Searches for the location of a mutant.
struct Search<'a> {
    lines: &'a Lines,
    mutant: &'a Mutant,
    found: Option<Place>,
}

impl Search<'_> {
    fn range(&self, part: &impl Spanned) -> Range<usize> {
        let span = part.span();
        self.lines.at(span.start())..self.lines.at(span.end())
    }

    fn is(&self, genre: &str, range: &Range<usize>) -> bool {
        self.mutant.genre == genre && self.mutant.place == range.start
    }

    /// A switch has to call a function, but this is not possible in a constant function.
    fn body(&mut self, signature: &syn::Signature, block: &syn::Block) -> bool {
        let range = self.range(block);
        if !range.contains(&self.mutant.place) || signature.constness.is_some() {
            return false;
        }
        if self.mutant.genre == "FnValue"
            && let Some(first) = block.stmts.first()
        {
            let first = self.range(first);
            if self.mutant.place == first.start {
                self.found = Some(Place::Body(first));
            }
        }
        true
    }
}

impl<'ast> Visit<'ast> for Search<'_> {
    fn visit_item_fn(&mut self, item: &'ast syn::ItemFn) {
        if self.body(&item.sig, &item.block) {
            visit::visit_item_fn(self, item);
        }
    }

    fn visit_impl_item_fn(&mut self, item: &'ast syn::ImplItemFn) {
        if self.body(&item.sig, &item.block) {
            visit::visit_impl_item_fn(self, item);
        }
    }

    fn visit_trait_item_fn(&mut self, item: &'ast syn::TraitItemFn) {
        if let Some(block) = &item.default
            && self.body(&item.sig, block)
        {
            visit::visit_trait_item_fn(self, item);
        }
    }

    fn visit_expr_binary(&mut self, expr: &'ast syn::ExprBinary) {
        if self.is("BinaryOperator", &self.range(&expr.op)) {
            let parts = [
                self.range(expr),
                self.range(&expr.left),
                self.range(&expr.right),
            ];
            self.found = Some(Place::Binary(parts));
        }
        visit::visit_expr_binary(self, expr);
    }

    fn visit_expr_unary(&mut self, expr: &'ast syn::ExprUnary) {
        if self.is("UnaryOperator", &self.range(&expr.op)) {
            self.found = Some(Place::Unary([self.range(expr), self.range(&expr.expr)]));
        }
        visit::visit_expr_unary(self, expr);
    }

    fn visit_arm(&mut self, arm: &'ast syn::Arm) {
        if let syn::Pat::Guard(pattern) = &arm.pat {
            let guard = self.range(&pattern.guard);
            if self.is("MatchArmGuard", &guard) {
                self.found = Some(Place::Guard(guard));
            }
        } else if self.is("MatchArm", &self.range(arm)) {
            self.found = Some(Place::Arm(self.range(&arm.pat).end));
        }
        visit::visit_arm(self, arm);
    }
}

/// Line offsets of a text.
pub(super) struct Lines {
    text: String,
    starts: Vec<usize>,
}

impl Lines {
    pub(super) fn of(text: &str) -> Self {
        let ends = text.match_indices('\n').map(|(at, _)| at + 1);
        Self {
            starts: std::iter::once(0).chain(ends).collect(),
            text: text.to_owned(),
        }
    }

    /// Converts a line (starting at 1) and column (in characters, starting at 0) to a byte offset.
    pub(super) fn at(&self, place: LineColumn) -> usize {
        let start = self.starts[place.line - 1];
        let mut characters = self.text[start..].char_indices();
        characters
            .nth(place.column)
            .map_or(self.text.len(), |(at, _)| start + at)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SOURCE: &str = "fn f(a: u8) -> bool {
    match a {
        1 => !true,
        n if n > 2 => a < 3 && a - 1 < n,
        _ => false,
    }
}
";

    /// Creates a mutant for the first occurrence of this text in the source.
    fn mutant(number: usize, genre: &str, at: &str, replacement: &str) -> Mutant {
        Mutant {
            number,
            file: String::new(),
            place: SOURCE.find(at).unwrap(),
            genre: genre.to_owned(),
            replacement: replacement.to_owned(),
            name: String::new(),
        }
    }

    #[test]
    fn mutant_kinds_keep_original_code() {
        let mutants = [
            mutant(1, "FnValue", "match", "true"),
            mutant(2, "MatchArm", "1 =>", ""),
            mutant(3, "UnaryOperator", "!true", ""),
            mutant(4, "MatchArmGuard", "n > 2", "true"),
            mutant(5, "BinaryOperator", "&&", "||"),
            mutant(6, "BinaryOperator", "< 3", ">"),
            mutant(7, "BinaryOperator", "- 1", "+"),
            mutant(8, "BinaryOperator", "fn f", "+"),
        ];
        let switched = switched(SOURCE, &mutants).unwrap();
        assert_eq!(switched.without, [8]);
        let text = switched.text.replace("riser_state::is_planted", "is");
        let expected = r#"fn f(a: u8) -> bool {
    if is("1") { return true; } match a {
        1 if !is("2") => (if is("3") { true } else { !true }),
        n if (if is("4") { true } else { n > 2 }) => (if is("5") { a < 3 || a - 1 < n } else { (if is("6") { a > 3 } else { a < 3 }) && (if is("7") { a + 1 } else { a - 1 }) < n }),
        _ => false,
    }
}
"#;
        assert_eq!(text, expected);
        syn::parse_file(&switched.text).unwrap();
        let (range, _) = &switched.ranges[0];
        assert_eq!(&switched.text[range.start..range.start + 2], "if");
    }
}
