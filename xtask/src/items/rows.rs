//! Tables with information about items.
//!
//! Tables have the same structure in all sections, with four columns: name, implementation, test
//! and judge. The class depends on the initial words in the implementation column:
//!
//! | implementation | class |
//! | --- | --- |
//! | no, none | different, where the reason is the remaining text or the test column |
//! | not yet | missing |
//! | in part | partial |
//! | any other value | foreign if there is a judge, or own |

use std::fmt;
use std::fs;

use clap::ValueEnum;

use crate::{Failure, root};

/// Documents with sections about items.
pub(super) const DOCUMENTS: [&str; 2] = ["docs/verbs.md", "docs/seeds.md"];

/// Title of the last column. If this column is not present, a table does not contain any items.
const JUDGE: &str = "judge";

/// A row of a table.
#[derive(Debug)]
pub(super) struct Row {
    /// Location (document and line) to be used in error messages.
    pub(super) place: String,
    /// Heading of the section that contains this row.
    pub(super) section: String,
    /// All names in the first column. Those without backticks are not included.
    pub(super) names: Vec<String>,
    pub(super) implementation: String,
    pub(super) test: String,
    pub(super) judge: String,
}

/// Current state of the implementation of an item.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, ValueEnum)]
pub(super) enum Class {
    /// It was used with remote software that is not ours, or with data sent by such software.
    Foreign,
    /// It was only used by our own software.
    Own,
    /// Only some part of it is implemented at the moment.
    Partial,
    /// It will be implemented in the future.
    Missing,
    /// There is a good reason not to implement it, or we use a different method.
    Different,
}

impl Class {
    pub(super) const ALL: [Self; 5] = [
        Self::Foreign,
        Self::Own,
        Self::Partial,
        Self::Missing,
        Self::Different,
    ];
}

impl fmt::Display for Class {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Foreign => "foreign",
            Self::Own => "own",
            Self::Partial => "partial",
            Self::Missing => "missing",
            Self::Different => "different",
        })
    }
}

impl Row {
    pub(super) fn class(&self) -> Class {
        let begins = |word: &str| {
            let rest = self.implementation.strip_prefix(word);
            rest.is_some_and(|rest| !rest.starts_with(char::is_alphanumeric))
        };
        if begins("not yet") {
            Class::Missing
        } else if begins("in part") {
            Class::Partial
        } else if begins("no") || begins("none") {
            Class::Different
        } else if self.judges().next().is_some() {
            Class::Foreign
        } else {
            Class::Own
        }
    }

    /// Returns the reason why we use a different method.
    pub(super) fn reason(&self) -> &str {
        let rest = self.implementation.trim_start_matches("none");
        let rest = rest
            .trim_start_matches("no")
            .trim_start_matches([':', ';', ',', ' ']);
        match rest {
            "" => &self.test,
            rest => rest,
        }
    }

    /// Returns the values in the judge column. Those in parentheses are not included, since they
    /// are just additional information.
    pub(super) fn judges(&self) -> impl Iterator<Item = &str> {
        outside_parentheses(&self.judge)
    }
}

/// Returns all values in backticks, but not those in parentheses.
fn outside_parentheses(text: &str) -> impl Iterator<Item = &str> {
    let mut depth = 0;
    text.split('`').enumerate().filter_map(move |(n, part)| {
        if n % 2 == 1 {
            return (depth == 0).then_some(part);
        }
        for c in part.chars() {
            match c {
                '(' => depth += 1,
                ')' => depth -= 1,
                _ => {}
            }
        }
        None
    })
}

/// Returns all values in backticks.
pub(super) fn spans(text: &str) -> impl Iterator<Item = &str> {
    text.split('`').skip(1).step_by(2)
}

/// Reads the content of all tables.
pub(super) fn read() -> Result<Vec<Row>, Failure> {
    let mut rows = Vec::new();
    for document in DOCUMENTS {
        let path = root().join(document);
        let text = fs::read_to_string(&path).map_err(|e| format!("{}: {e}", path.display()))?;
        rows.extend(parse(document, &text));
    }
    Ok(rows)
}

/// Parses all tables in a document. Other content is ignored.
pub(super) fn parse(document: &str, text: &str) -> Vec<Row> {
    let (mut rows, mut section, mut is_table) = (Vec::new(), "", false);
    for (line, number) in text.lines().zip(1..) {
        if let Some(heading) = line.strip_prefix("## ") {
            section = heading.trim();
        }
        let Some(line) = line.strip_prefix("| ").and_then(|l| l.strip_suffix('|')) else {
            is_table = false;
            continue;
        };
        let cells: Vec<_> = line.split('|').map(str::trim).collect();
        if let [_, _, _, JUDGE] = cells[..] {
            is_table = true;
            continue;
        }
        if !is_table || line.starts_with("---") {
            continue;
        }
        let cell = |n: usize| cells.get(n).copied().unwrap_or_default().to_owned();
        rows.push(Row {
            place: format!("{document}:{number}"),
            section: section.to_owned(),
            names: spans(cells[0]).map(str::to_owned).collect(),
            implementation: cell(1),
            test: cell(2),
            judge: cell(3),
        });
    }
    rows
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(line: &str) -> Row {
        let header = "## Section\n\n| name | implementation | test | judge |\n\
                      | --- | --- | --- | --- |\n";
        let mut rows = parse("d.md", &format!("{header}{line}\n"));
        assert_eq!(rows.len(), 1, "{line}");
        rows.remove(0)
    }

    #[test]
    fn row_begins_with_class() {
        let class = |implementation: &str, judge: &str| {
            row(&format!("| `a` | {implementation} | `t()` | {judge} |")).class()
        };
        assert_eq!(class("`f.rs`: `a()`", "`case`"), Class::Foreign);
        assert_eq!(
            class("`f.rs`: `a()`", "golden (as `b` in Linux)"),
            Class::Own
        );
        assert_eq!(class("`f.rs`: `a()`", ""), Class::Own);
        assert_eq!(class("no", ""), Class::Different);
        assert_eq!(class("none: ownership replaces it", ""), Class::Different);
        assert_eq!(class("not yet", "`case`"), Class::Missing);
        assert_eq!(class("in part: `f.rs`", "`case`"), Class::Partial);
        assert_eq!(class("notices", ""), Class::Own);
    }

    #[test]
    fn reason_follows_absence_or_is_second() {
        let reason = |line: &str| row(line).reason().to_owned();
        assert_eq!(reason("| `a` | none: a value | not needed | |"), "a value");
        assert_eq!(reason("| `a` | no | for drivers | |"), "for drivers");
        assert_eq!(reason("| `a` | no | | |"), "");
    }

    #[test]
    fn only_tables_with_judges_have_rows() {
        let text = "## A\n\n| calls | implementation | rejected |\n| --- | --- | --- |\n\
                    | `a` | x | y |\n\n## B\n\n| name | implementation | test | judge |\n\
                    | --- | --- | --- | --- |\n| `b`, `c`: text | x | `t.rs`: `t()` | `j` |\n";
        let rows = parse("d.md", text);
        assert_eq!(rows.len(), 1);
        assert_eq!(
            (rows[0].place.as_str(), rows[0].section.as_str()),
            ("d.md:11", "B")
        );
        assert_eq!(rows[0].names, ["b", "c"]);
        assert_eq!(rows[0].test, "`t.rs`: `t()`");
    }

    #[test]
    fn text_in_parentheses_is_no_judge() {
        let row = row("| `a` | x | `t()` | golden (of `x` (and `y`)); `sa-kernel` (with `z`) |");
        assert_eq!(row.judges().collect::<Vec<_>>(), ["sa-kernel"]);
    }
}
