//! Verifies the content of rows. Any file, function or case must be present in the repository. A
//! judge must use remote software that is not ours. If we use a different method, there must be a
//! reason.

use std::collections::BTreeSet;

use super::rows::{Class, Row, spans};
use super::sources::Sources;
use crate::{Failure, fuzz, interop, verbs};

/// Tests that use software that is not ours, or data sent by such software. To make sure that this
/// is still valid, there is also a word that must be present in the file.
const JUDGES: [(&str, &str); 7] = [
    ("fabric/tests/daemon.rs", "ib_acme"),
    ("fabric/tests/iwpmd.rs", "iwpmd"),
    ("tests/tests/golden_cm.rs", "capture"),
    ("tests/tests/golden_roce.rs", "captures"),
    ("tests/tests/golden_iser.rs", "capture"),
    ("tests/tests/golden_srp.rs", "capture"),
    ("tests/tests/targetcli.rs", "targetcli"),
];

/// Groups in `cargo xtask verbs` that only use our software, both local and remote.
const OWN_GROUPS: [&str; 2] = ["providers/", "disks/"];

/// Initial part of the names of cases that use our provider suite, and its directory.
const SUITE_CASES: [&str; 2] = ["transport-suite-", "iwarp-suite-"];
const SUITE: &str = "transport/tests/suite/";

/// Functions of the suite that do not use the remote device if this is `rdma_rxe`, since it does
/// not support them.
const WITHOUT_PEER: [&str; 7] = [
    "ack_timeout_is_proposed_to_peer()",
    "address_header_is_optional()",
    "bare_service_id_allows_full_private_data()",
    "device_connects_to_itself()",
    "groups_are_joined_and_left()",
    "multicast()",
    "null_regions_and_prefetching()",
];

/// Valid names that are not in source files.
pub(super) struct Known {
    interop: BTreeSet<String>,
    verbs: BTreeSet<String>,
    fuzz: BTreeSet<String>,
}

impl Known {
    pub(super) fn new() -> Result<Self, Failure> {
        let cases = interop::case::load(&[], false)?;
        Ok(Self {
            interop: cases.into_iter().map(|case| case.name).collect(),
            verbs: verbs::all_paths().into_iter().collect(),
            fuzz: fuzz::names().map(str::to_owned).collect(),
        })
    }

    /// Returns true for a valid case, or for a test of rdma-core in the form
    /// `pyverbs/MODULE.CLASS.TEST`. We don't have information about those tests.
    fn is_case(&self, name: &str) -> bool {
        let test = name.strip_prefix("pyverbs/test_");
        let parts = test.map(|test| test.split('.').collect::<Vec<_>>());
        let is_test = parts.is_some_and(|parts| {
            matches!(parts[..], [_, class, test] if !class.is_empty() && test.starts_with("test_"))
        });
        is_test || self.interop.contains(name) || self.verbs.contains(name)
    }
}

/// Verifies the content of all rows. Returns errors, including the location of the row.
pub(super) fn check(rows: &[Row], known: &Known, sources: &Sources) -> Vec<String> {
    let mut wrong = Vec::new();
    for row in rows {
        let mut report = |why: String| wrong.push(format!("{}: {why}", row.place));
        check_implementation(row, sources, &mut report);
        check_tests(row, known, sources, &mut report);
        check_judges(row, known, sources, &mut report);
        check_class(row, known, &mut report);
    }
    wrong
}

/// Verifies the implementation column: paths, functions, and also types that are specified in
/// parentheses after a path.
fn check_implementation(row: &Row, sources: &Sources, report: &mut impl FnMut(String)) {
    let mut paths: Vec<&str> = Vec::new();
    let mut before = "";
    for (n, part) in row.implementation.split('`').enumerate() {
        if n % 2 == 0 {
            before = part;
        } else if sources.is_path(part) {
            match sources.exists(part) {
                true => paths.push(part),
                false => report(format!("`{part}` does not exist")),
            }
        } else if let Some(name) = function(part) {
            if !paths.iter().any(|path| sources.has_function(path, name)) {
                report(format!("`{part}` is not in {}", paths.join(", ")));
            }
        } else if before.ends_with('(')
            && let Some(path) = paths.last()
            && is_identifier(part)
            && !sources.has_word(path, part)
        {
            report(format!("`{part}` is not in {path}"));
        }
    }
}

/// Verifies the test column: paths, functions, fuzz targets and cases. If no path is specified, we
/// use the package specified in the implementation column.
fn check_tests(row: &Row, known: &Known, sources: &Sources, report: &mut impl FnMut(String)) {
    let of_implementation = spans(&row.implementation).filter(|span| sources.is_path(span));
    let packages: BTreeSet<_> = of_implementation
        .filter_map(|p| sources.package(p))
        .collect();
    let mut paths: Vec<&str> = Vec::new();
    let mut before = "";
    for (n, part) in row.test.split('`').enumerate() {
        if n % 2 == 0 {
            before = part;
        } else if sources.is_path(part) && !known.is_case(part) {
            match sources.exists(part) {
                true => paths.push(part),
                false => report(format!("`{part}` does not exist")),
            }
        } else if let Some(name) = function(part) {
            let is_in = |path: &str| sources.has_function(path, name);
            let is_there = match &paths[..] {
                [] => packages.iter().any(|package| is_in(package)),
                paths => paths.iter().any(|path| is_in(path)),
            };
            if !is_there {
                report(format!("test `{part}` does not exist"));
            }
        } else if before.ends_with("fuzz target ") && !known.fuzz.contains(part) {
            report(format!("unknown fuzz target `{part}`"));
        } else if before.ends_with("case ") && !known.is_case(part) {
            report(format!("unknown case `{part}`"));
        }
    }
}

/// Verifies the judge column, which must be a valid case or a function in one of the [`JUDGES`].
fn check_judges(row: &Row, known: &Known, sources: &Sources, report: &mut impl FnMut(String)) {
    let mut file = None;
    for judge in row.judges() {
        if let Some((path, word)) = JUDGES.iter().find(|(path, _)| *path == judge) {
            file = Some(*path);
            if !sources.has_word(path, word) {
                report(format!("`{path}` does not contain \"{word}\""));
            }
        } else if let (Some(name), Some(path)) = (function(judge), file) {
            if !sources.has_function(path, name) {
                report(format!("judge `{judge}` is not in {path}"));
            }
        } else if !known.is_case(judge) {
            report(format!("unknown judge `{judge}`"));
        } else if OWN_GROUPS.iter().any(|group| judge.starts_with(group)) {
            report(format!("case `{judge}` has no foreign software"));
        } else if SUITE_CASES.iter().any(|case| judge.starts_with(case)) && !has_suite_test(row) {
            report(format!("case `{judge}` runs no test of this row"));
        }
    }
}

/// Returns true if the test column contains a function of the suite that uses the remote device.
fn has_suite_test(row: &Row) -> bool {
    let mut is_suite = false;
    spans(&row.test).any(|span| {
        if span.contains('/') {
            is_suite = span.starts_with(SUITE);
        }
        is_suite && function(span).is_some() && !WITHOUT_PEER.contains(&span)
    })
}

/// Verifies that there is either a test or a reason.
fn check_class(row: &Row, known: &Known, report: &mut impl FnMut(String)) {
    match row.class() {
        Class::Different => {
            let reason = row.reason();
            if reason.split_whitespace().count() < 3 {
                report(format!("no reason for its absence: \"{reason}\""));
            }
        }
        Class::Own => {
            let is_test = |span| function(span).is_some() || known.is_case(span);
            if !spans(&row.test).any(is_test) && !row.test.starts_with("the same") {
                report("no test".to_owned());
            }
        }
        Class::Foreign | Class::Partial | Class::Missing => {}
    }
}

/// Returns the name of a function in the form `name()`, or a method in the form `Type::name()`.
fn function(span: &str) -> Option<&str> {
    let path = span.strip_suffix("()")?;
    let name = path.rsplit("::").next().unwrap_or(path);
    is_identifier(name).then_some(name)
}

fn is_identifier(text: &str) -> bool {
    !text.is_empty() && text.chars().all(|c| c.is_ascii_alphanumeric() || c == '_')
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::items::rows;

    /// Returns errors about a row, but not its location.
    fn problems(line: &str) -> Vec<String> {
        let header = "## S\n\n| name | implementation | test | judge |\n\
                      | --- | --- | --- | --- |\n";
        let rows = rows::parse("d.md", &format!("{header}{line}\n"));
        let problems = check(&rows, &Known::new().unwrap(), &Sources::new());
        let place = "d.md:5: ";
        let problems = problems.iter().map(|p| p.strip_prefix(place).unwrap());
        problems.map(str::to_owned).collect()
    }

    const IMPLEMENTATION: &str = "`xtask/src/items/check.rs`: `check()`";
    const TEST: &str = "`xtask/src/items/check.rs`: `valid_rows_have_no_problem()`";

    #[test]
    fn valid_rows_have_no_problem() {
        let none: [String; 0] = [];
        for line in [
            format!("| `a` | {IMPLEMENTATION} | {TEST} | golden (of `x`); `srp-io` |"),
            format!("| `a` | {IMPLEMENTATION} | `valid_rows_have_no_problem()` | |"),
            "| `a` | `xtask/src/items/check.rs` (`Known`) | fuzz target `packet` | `rdmacm/rping` |"
                .to_owned(),
            "| `a` | no | for kernel drivers | |".to_owned(),
            "| `a` | none: a plain value | not needed | |".to_owned(),
        ] {
            assert_eq!(problems(&line), none, "{line}");
        }
    }

    #[test]
    fn unknown_names_are_reported() {
        for (implementation, test, judge, expected) in [
            (
                "`xtask/src/no.rs`",
                TEST,
                "",
                "`xtask/src/no.rs` does not exist",
            ),
            (
                "`xtask/src/items/check.rs`: `no_such()`",
                TEST,
                "",
                "`no_such()` is not in xtask/src/items/check.rs",
            ),
            (
                "`xtask/src/items/rows.rs` (`NoSuchType`)",
                TEST,
                "",
                "`NoSuchType` is not in xtask/src/items/rows.rs",
            ),
            (
                IMPLEMENTATION,
                "`no_such()`",
                "",
                "test `no_such()` does not exist",
            ),
            (
                IMPLEMENTATION,
                "`no_such()`, fuzz target `none`",
                "`srp-io`",
                "unknown fuzz target `none`",
            ),
            (IMPLEMENTATION, TEST, "`srp-no`", "unknown judge `srp-no`"),
            (
                IMPLEMENTATION,
                TEST,
                "`rdmacm/no`",
                "unknown judge `rdmacm/no`",
            ),
            (
                IMPLEMENTATION,
                TEST,
                "`pyverbs/test_qp`",
                "unknown judge `pyverbs/test_qp`",
            ),
            (
                IMPLEMENTATION,
                TEST,
                "`fabric/tests/daemon.rs`: `no_such()`",
                "judge `no_such()` is not in fabric/tests/daemon.rs",
            ),
        ] {
            let line = format!("| `a` | {implementation} | {test} | {judge} |");
            let problems = problems(&line);
            assert!(
                problems.iter().any(|p| p == expected),
                "{line}: {problems:?}"
            );
        }
    }

    #[test]
    fn weak_rows_are_reported() {
        let weak = |implementation: &str, test: &str, judge: &str| {
            problems(&format!("| `a` | {implementation} | {test} | {judge} |"))
        };
        assert_eq!(weak("no", "", ""), ["no reason for its absence: \"\""]);
        assert_eq!(weak("none", "not needed", "").len(), 1);
        assert_eq!(weak(IMPLEMENTATION, "not needed", ""), ["no test"]);
        let own = "case `disks/srp` has no foreign software";
        assert_eq!(weak(IMPLEMENTATION, TEST, "`disks/srp`"), [own]);
        let suite = "case `transport-suite-ipv6` runs no test of this row";
        assert_eq!(
            weak(IMPLEMENTATION, TEST, "`transport-suite-ipv6`"),
            [suite]
        );
        let skipped = "`transport/tests/suite/objects.rs`: `multicast()`";
        assert_eq!(
            weak(IMPLEMENTATION, skipped, "`transport-suite-ipv6`"),
            [suite]
        );
        let run = format!("{skipped}, `datagrams()`");
        assert!(weak(IMPLEMENTATION, &run, "`transport-suite-ipv6`").is_empty());
    }
}
