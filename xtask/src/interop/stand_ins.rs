//! Tests how `tests/vm/libiscsi.sh` and the case using it handle results, with fake clients instead
//! of libiscsi.

use std::fmt::Write as _;
use std::fs;
use std::os::unix::fs::PermissionsExt as _;

use crate::{root, sh};

/// A fake client controlled by a table: test name, how the test exits, and the output.
const CLIENT: &str = r#"#!/bin/bash
ulimit -c 0
if [ "$1" = -l ]; then exec sed 's/ .*//; s/^/ALL./' "$TABLE"; fi
name=${3#ALL.}
read -r how words < <(sed -n "s/^$name //p" "$TABLE")
printf '  Test: %s ...%s\n' "${name#*.}" "$words"
case $how in
passed) echo passed; exit 0 ;;
skipped) printf '    [SKIPPED] for a reason\npassed\n'; exit 0 ;;
failed) echo FAILED; exit 1 ;;
died) kill -SEGV $$ ;;
failed-and-died) echo FAILED; kill -SEGV $$ ;;
hung) exec sleep 60 ;;
refused) exit 255 ;;
esac
"#;

/// Prologue that replaces the rig for a case.
const RIG: &str = r#"set -euo pipefail
PORTAL=10.99.0.2:3260
IQN=iqn.2026-01.com.example:rig
fail() { echo "FAILED: $*"; exit 1; }
client_died() { echo "riserd starts again"; }
stop_serving() { :; }
. "$RISER_ROOT/tests/vm/libiscsi.sh"
"#;

/// Runs `script` after [`RIG`], using a client with this table. Returns success and the output,
/// or `None` if there is no compiler. `expected` replaces the list of the case, and `limit` is the
/// timeout per test in seconds.
fn run_script(
    name: &str,
    table: &str,
    expected: Option<&str>,
    limit: u32,
    script: &str,
) -> Option<(bool, String)> {
    if sh::which("cc").is_none() {
        crate::skip::skip("libiscsi's clients", "there is no C compiler");
        return None;
    }
    let scratch = sh::Scratch::new(&format!("stand-in-{name}")).unwrap();
    let client = scratch.join("iscsi-test-cu");
    fs::write(&client, CLIENT).unwrap();
    fs::set_permissions(&client, fs::Permissions::from_mode(0o755)).unwrap();
    fs::write(scratch.join("table"), table).unwrap();
    let path = std::env::var("PATH").unwrap_or_default();
    let mut command = sh::cmd("bash", ["-c", &format!("{RIG}{script}")]);
    command
        .env("PATH", format!("{}:{path}", scratch.path().display()))
        .env("RISER_ROOT", root())
        .env("TABLE", scratch.join("table"))
        .env("KEEP", scratch.path())
        .env("OUTCOME", scratch.join("outcome"))
        .env("LIMIT", limit.to_string())
        .env_remove("ONLY");
    if let Some(expected) = expected {
        let file = scratch.join("expected");
        fs::write(&file, expected).unwrap();
        command.env("EXPECTED", file);
    }
    let out = command.output().unwrap();
    let said = String::from_utf8_lossy(&out.stdout).into_owned();
    Some((out.status.success(), said))
}

fn case() -> String {
    let text = fs::read_to_string(root().join("tests/vm/cases/iser-libiscsi.sh")).unwrap();
    let at = text.find("libiscsi_suite \"").expect("it runs the suite");
    text[at..].to_owned()
}

fn as_listed() -> String {
    let text = fs::read_to_string(root().join("tests/vm/libiscsi-iser.txt")).unwrap();
    let mut table = String::new();
    for line in text
        .lines()
        .filter(|l| !l.is_empty() && !l.starts_with('#'))
    {
        let (how, rest) = line.split_once(' ').unwrap();
        let (name, words) = rest.split_once(' ').unwrap_or((rest, ""));
        writeln!(table, "{name} {how} {words}").unwrap();
    }
    table
}

/// Compares the result with a list; at least one test must have passed.
const SUITE_OUTPUT: &str = "libiscsi_suite iser://x\nlibiscsi_unexpected 1";

#[test]
fn client_matching_list_passes() {
    let mut table = as_listed();
    for n in 0..150 {
        writeln!(table, "Some.Test{n} passed").unwrap();
    }
    table.push_str("Some.Skipped skipped\n");
    if let Some((ok, said)) = run_script("listed", &table, None, 60, &case()) {
        assert!(ok, "{said}");
    }
    let few = "Some.Test0 passed\nSome.Test1 passed\nSome.Test2 skipped\n";
    let script = "libiscsi_suite iser://x\nlibiscsi_unexpected 3";
    if let Some((_, said)) = run_script("few", few, Some(""), 60, script) {
        assert!(said.ends_with("\n2 tests passed, fewer than 3\n"), "{said}");
    }
}

#[test]
fn client_crash_in_all_tests_fails() {
    let mut table = as_listed();
    for n in 0..9 {
        writeln!(table, "Some.Test{n} died").unwrap();
    }
    let table = table.replace(" failed", " died");
    if let Some((ok, said)) = run_script("dies", &table, None, 60, &case()) {
        assert!(!ok, "{said}");
        for n in 0..9 {
            let line = format!("Some.Test{n} died, but is not listed");
            assert!(said.contains(&line), "{said}");
        }
        assert!(said.contains("0 tests passed"), "{said}");
        let line = "Inquiry.AllocLength is listed as failed, result: died";
        assert!(said.contains(line), "{said}");
    }
}

#[test]
fn client_hanging_in_most_tests_fails() {
    let mut table = String::new();
    for n in 0..9 {
        let how = if n == 4 { "passed" } else { "hung" };
        writeln!(table, "Some.Test{n} {how}").unwrap();
    }
    if let Some((ok, said)) = run_script("hangs", &table, None, 1, &case()) {
        assert!(!ok, "{said}");
        let line = "Some.Test0 hung, but is not listed";
        assert!(said.contains(line), "{said}");
    }
}

#[test]
fn target_rejecting_all_logins_fails() {
    let table: String = (0..9).map(|n| format!("Some.Test{n} refused\n")).collect();
    if let Some((_, said)) = run_script("refused", &table, Some(""), 60, SUITE_OUTPUT) {
        assert!(
            said.contains("five tests in a row received no response"),
            "{said}"
        );
        assert!(!said.contains("Some.Test5"), "{said}");
    }
}

#[test]
fn difference_from_list_is_reported() {
    let expected = "failed A.Words these words\nfailed A.OtherWords these words\n\
                    failed A.Passes\ndied A.Fails\ndied A.Dies\nfailed A.Gone\n";
    let table = "A.Words failed these words\nA.OtherWords failed other words\nA.Passes passed\n\
                 A.Fails failed-and-died\nA.Dies died\nB.New failed-and-died\nB.Dies died\n\
                 B.Skipped skipped\nB.Trails passed\n";
    if let Some((_, said)) = run_script("named", table, Some(expected), 60, SUITE_OUTPUT) {
        let wrong: Vec<_> = said
            .lines()
            .filter(|l| l.contains(" listed") || l.contains(" contain: "))
            .collect();
        assert_eq!(
            wrong,
            [
                "B.Dies died, but is not listed",
                "B.New failed, but is not listed",
                "A.OtherWords failed, but its output does not contain: these words",
                "A.Passes is listed as failed, result: passed",
                "A.Fails is listed as died, result: failed",
                "A.Gone is listed as failed, result: not run",
            ]
        );
    }
}

#[test]
fn unconfirmed_reason_is_reported() {
    let expected = "failed A.One\ndied A.Two\nfailed A.Three\nfailed A.Four\n";
    let table = "A.One passed\nA.Two skipped\nA.Three failed\n";
    let script = "libiscsi_suite iser://x\nlibiscsi_not_the_client";
    if let Some((_, said)) = run_script("reason", table, Some(expected), 60, script) {
        let wrong: Vec<_> = said.lines().filter(|l| l.contains(" listed")).collect();
        assert_eq!(
            wrong,
            [
                "A.One is listed as failed, but passed",
                "A.Four is listed as failed, but was not run",
            ]
        );
    }
}

#[test]
fn wedged_target_stops_suite() {
    let expected = "died A.One\nfailed B.Two\ndied D.Four\n";
    let mut table = "A.One died\nB.Two failed\nC.Three passed\nD.Four died\n".to_owned();
    let script = "libiscsi_suite iser://x\nlibiscsi_not_the_client";
    if let Some((_, said)) = run_script("order", &table, Some(expected), 60, script) {
        assert!(!said.contains(" listed"), "{said}");
        let place = |line: &str| {
            said.find(line)
                .unwrap_or_else(|| panic!("no {line}: {said}"))
        };
        assert!(place("passed C.Three") < place("died A.One"), "{said}");
    }
    // The run stops before it reaches the listed tests, so their results are not known.
    for n in 0..9 {
        writeln!(table, "A.Stops{n} refused").unwrap();
    }
    if let Some((_, said)) = run_script("stops", &table, Some(expected), 60, script) {
        let line = "B.Two is listed as failed, but was not run";
        assert!(said.contains(line), "{said}");
    }
}
