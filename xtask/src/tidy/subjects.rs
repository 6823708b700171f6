//! Checks the subjects of new commits: `component: imperative summary`, at most 72 characters.

use crate::{root, sh};

/// Commits before this time are not checked.
const SINCE: &str = "2026-11-29T16:00:00Z";

/// Maximum length of a subject in characters.
const MAX_LEN: usize = 72;

/// Verb forms that are often used instead of the imperative.
const FORMS: &[&str] = &[
    "added", "adds", "adding", "fixed", "fixes", "fixing", "removed", "removes",
];

/// Returns a message for each invalid commit in the history of this checkout. If git cannot read
/// it, as with the sources in an archive, there are no commits to check.
pub(super) fn invalid_subjects() -> Vec<String> {
    let since = format!("--since-as-filter={SINCE}");
    let args = ["log", "--no-merges", &since, "--format=%h %s"];
    let log = sh::output(sh::cmd("git", args).current_dir(root()));
    let log = log.inspect_err(|error| eprintln!("skipping commit subjects: {error}"));
    log.unwrap_or_default()
        .lines()
        .filter_map(invalid)
        .collect()
}

/// Returns a message if the subject of a commit is invalid. The line contains its hash and subject.
fn invalid(line: &str) -> Option<String> {
    let (hash, subject) = line.split_once(' ').unwrap_or((line, ""));
    let reason = reason(subject)?;
    Some(format!("commit {hash}: {reason}: {subject}"))
}

fn reason(subject: &str) -> Option<&'static str> {
    if subject.chars().count() > MAX_LEN {
        return Some("subject longer than 72 characters");
    }
    let is_part_of_name =
        |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || "-_/.".contains(c);
    let is_name = |name: &str| !name.is_empty() && name.chars().all(is_part_of_name);
    let Some((components, summary)) = subject.split_once(": ") else {
        return Some("missing component");
    };
    if !components.split(", ").all(is_name) {
        return Some("invalid component");
    }
    let verb = summary.split(' ').next().unwrap_or_default();
    if verb.is_empty() || FORMS.contains(&verb.to_ascii_lowercase().as_str()) {
        return Some("summary is not imperative");
    }
    summary
        .ends_with('.')
        .then_some("summary with a final period")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn valid_subjects_pass() {
        for subject in [
            "iscsi: reject a second login",
            "rdma-core-sys: load 1.14",
            "tests/sim: add a plan",
            "initiator, disks: name functions",
        ] {
            assert_eq!(reason(subject), None, "{subject}");
        }
    }

    #[test]
    fn invalid_subjects_have_reasons() {
        let long = format!("iscsi: {}", "x".repeat(66));
        for (subject, expected) in [
            (long.as_str(), "subject longer than 72 characters"),
            ("Reject a second login", "missing component"),
            ("In iscsi: reject it", "invalid component"),
            ("iscsi,iser: reject it", "invalid component"),
            (": reject it", "invalid component"),
            ("iscsi: fixed a race", "summary is not imperative"),
            ("iscsi: ", "summary is not imperative"),
            ("iscsi: fix a race.", "summary with a final period"),
        ] {
            assert_eq!(reason(subject), Some(expected), "{subject}");
        }
    }

    #[test]
    fn message_contains_hash_and_subject() {
        let message = invalid("0123abc iscsi: fixes a race").expect("invalid subject");
        assert_eq!(
            message,
            "commit 0123abc: summary is not imperative: iscsi: fixes a race"
        );
    }
}
