//! Test cases: reads tables of cases, selects and runs them, and reports their results.

use std::collections::BTreeMap;
use std::panic::resume_unwind;
use std::sync::Mutex;
use std::thread;
use std::time::{Duration, Instant};

use serde::Deserialize;
use serde::de::DeserializeOwned;
use toml::Value;

use crate::Failure;
use crate::tally::{Counts, Kind, Outcome, Tally, note};

/// A table of cases in TOML.
#[derive(Deserialize)]
struct Table {
    case: Vec<toml::Table>,
}

/// Reads the cases of a table in `xtask/cases`, in order. If a case has `rows`, it stands for a
/// case per row: `{0}`, `{1}` and so on are replaced by the strings of the row.
///
/// # Panics
/// The table is part of this program, so it must be valid.
pub(crate) fn read<T: DeserializeOwned>(text: &str) -> Vec<T> {
    let table: Table = toml::from_str(text).unwrap_or_else(|e| panic!("{e}"));
    let mut cases = Vec::new();
    for mut case in table.case {
        let rows = case.remove("rows");
        let case = Value::Table(case);
        match rows.map(Value::try_into::<Vec<Vec<String>>>) {
            None => cases.push(case),
            Some(Ok(rows)) => cases.extend(rows.iter().map(|row| fill(&case, row))),
            Some(Err(e)) => panic!("{case:?}: {e}"),
        }
    }
    let parse = |case: Value| {
        case.clone()
            .try_into()
            .unwrap_or_else(|e| panic!("{case:?}: {e}"))
    };
    cases.into_iter().map(parse).collect()
}

fn fill(value: &Value, row: &[String]) -> Value {
    match value {
        Value::String(text) => {
            let replace = |text: String, n: usize| {
                text.replace(&format!("{{{n}}}"), row.get(n).map_or("", String::as_str))
            };
            Value::String((0..10).fold(text.clone(), replace))
        }
        Value::Array(values) => Value::Array(values.iter().map(|value| fill(value, row)).collect()),
        Value::Table(fields) => {
            let fill = |(name, field): (&String, &Value)| (name.clone(), fill(field, row));
            Value::Table(fields.iter().map(fill).collect())
        }
        value => value.clone(),
    }
}

/// Returns the items that match any of the words, or all items if there are no words. We need to
/// check each word, because a typo in one of several words would just run fewer cases.
pub(crate) fn select<T>(
    items: impl IntoIterator<Item = T>,
    words: &[String],
    what: &str,
    is_match: impl Fn(&T, &str) -> bool,
) -> Result<Vec<T>, Failure> {
    let mut items: Vec<T> = items.into_iter().collect();
    for word in words {
        if !items.iter().any(|item| is_match(item, word)) {
            return Err(format!("unknown {what} \"{word}\"").into());
        }
    }
    items.retain(|item| words.is_empty() || words.iter().any(|word| is_match(item, word)));
    Ok(items)
}

/// Calls a function for all items, in threads that fetch the next item when they are idle, because
/// run times vary too much to assign the items up front. Passes the number of the thread. Results
/// are in the order of the items.
pub(crate) fn in_parallel<T: Send, R: Send>(
    lanes: usize,
    items: impl IntoIterator<Item = T>,
    work: impl Fn(usize, T) -> R + Sync,
) -> Vec<R> {
    let items: Vec<T> = items.into_iter().collect();
    let queue = Mutex::new(items.into_iter().enumerate());
    let lane = &|lane: usize| {
        let next = || queue.lock().expect("no iterator panics").next();
        let mut done = Vec::new();
        while let Some((at, item)) = next() {
            done.push((at, work(lane, item)));
        }
        done
    };
    let mut done: Vec<(usize, R)> = thread::scope(|scope| {
        let lanes: Vec<_> = (0..lanes).map(|n| scope.spawn(move || lane(n))).collect();
        let ended = lanes.into_iter().map(thread::ScopedJoinHandle::join);
        ended
            .flat_map(|done| done.unwrap_or_else(|panic| resume_unwind(panic)))
            .collect()
    });
    done.sort_by_key(|(at, _)| *at);
    done.into_iter().map(|(_, result)| result).collect()
}

/// Result of a case or of a test in an external suite.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Verdict {
    Passed,
    /// The second attempt passed. Contains the reason why the first attempt failed.
    PassedAgain(String),
    Failed(String),
    Skipped(String),
    /// The case is on a list of known failures, which has this reason.
    NotYet(String),
}

impl Verdict {
    /// Verdict of a test whose process exited or was killed during the test.
    pub(crate) fn unfinished() -> Self {
        Self::Failed("the process exited or timed out".to_owned())
    }
}

impl From<Result<(), Failure>> for Verdict {
    fn from(result: Result<(), Failure>) -> Self {
        result.map_or_else(|why| Self::Failed(why.to_string()), |()| Self::Passed)
    }
}

/// A test in an external suite and its result.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Test {
    pub(crate) name: String,
    pub(crate) verdict: Verdict,
}

/// Result of a case, for a report.
#[derive(Clone, Debug)]
pub(crate) struct Row {
    pub(crate) path: String,
    pub(crate) kind: Kind,
    pub(crate) verdict: Verdict,
    pub(crate) took: Duration,
    pub(crate) results: Vec<String>,
}

impl Row {
    pub(crate) fn new(path: &str, kind: Kind, verdict: Verdict) -> Self {
        Self {
            path: path.to_owned(),
            kind,
            verdict,
            took: Duration::ZERO,
            results: Vec::new(),
        }
    }

    /// Runs a case and prints its result. The case may add measured values.
    pub(crate) fn run(
        path: &str,
        kind: Kind,
        work: impl FnOnce(&mut Vec<String>) -> Verdict,
    ) -> Self {
        let (began, mut results) = (Instant::now(), Vec::new());
        let verdict = work(&mut results);
        let row = Self {
            took: began.elapsed(),
            results,
            ..Self::new(path, kind, verdict)
        };
        println!("{}", row.line());
        row
    }

    pub(crate) fn check(name: &str, work: impl FnOnce() -> Result<String, Failure>) -> Self {
        Self::run(name, Kind::Check, |results| {
            work().map(|said| results.push(said)).into()
        })
    }

    pub(crate) fn line(&self) -> String {
        let said = match &self.verdict {
            Verdict::Passed => "ok".to_owned(),
            Verdict::PassedAgain(why) => format!("ok at the second attempt: {why}"),
            Verdict::Failed(why) => format!("FAILED: {why}"),
            Verdict::Skipped(why) => format!("skipped: {why}"),
            Verdict::NotYet(why) => format!("not yet: {why}"),
        };
        let seconds = self.took.as_secs_f64();
        let results = self
            .results
            .iter()
            .map(|result| format!("\n        {result}"));
        format!("{:<58} {seconds:>6.1} s  {said}", self.path) + &results.collect::<String>()
    }
}

/// Runs a case, and again if it fails and may have a second attempt.
pub(crate) fn attempt(may_repeat: bool, mut run: impl FnMut() -> Result<(), Failure>) -> Verdict {
    match run() {
        Err(first) if may_repeat => match run() {
            Ok(()) => Verdict::PassedAgain(shorten(&first.to_string())),
            Err(second) => Verdict::Failed(format!(
                "{second}\nfirst attempt: {}",
                shorten(&first.to_string())
            )),
        },
        result => result.into(),
    }
}

pub(crate) fn shorten(why: &str) -> String {
    let mut lines = why.lines().map(str::trim).filter(|line| !line.is_empty());
    let first = lines.next().unwrap_or_default();
    lines
        .next_back()
        .map_or_else(|| first.to_owned(), |last| format!("{first}: {last}"))
}

/// Returns the counts and the failures. Skips are recorded.
pub(crate) fn count(rows: &[Row]) -> Outcome {
    let mut tally = Tally::default();
    let mut failures = Vec::new();
    for row in rows {
        let mut counts = Counts::default();
        match &row.verdict {
            Verdict::Passed => counts.passed = 1,
            Verdict::PassedAgain(_) => (counts.passed, counts.second) = (1, 1),
            Verdict::Failed(why) => {
                counts.failed = 1;
                failures.push(format!("{}: {why}", row.path));
            }
            Verdict::Skipped(why) => note(row.kind, &row.path, why),
            Verdict::NotYet(why) => note(row.kind, &row.path, &format!("not yet: {why}")),
        }
        tally.add(row.kind, counts);
    }
    Outcome::Ran(tally, (!failures.is_empty()).then(|| failures.join("\n")))
}

pub(crate) fn summary<'a>(verdicts: impl Iterator<Item = &'a Verdict> + Clone) -> String {
    let count = |is: fn(&Verdict) -> bool| verdicts.clone().filter(|verdict| is(verdict)).count();
    let again = match count(|v| matches!(v, Verdict::PassedAgain(_))) {
        0 => String::new(),
        n => format!(" ({n} at the second attempt)"),
    };
    format!(
        "{} passed{again}, {} failed, {} skipped, {} not yet",
        count(|v| matches!(v, Verdict::Passed | Verdict::PassedAgain(_))),
        count(|v| matches!(v, Verdict::Failed(_))),
        count(|v| matches!(v, Verdict::Skipped(_))),
        count(|v| matches!(v, Verdict::NotYet(_)))
    )
}

/// Prints a line for each reason to skip.
pub(crate) fn print_skips(rows: &[Row]) {
    let mut reasons = BTreeMap::<&str, Vec<&str>>::new();
    for row in rows {
        if let Verdict::Skipped(why) = &row.verdict {
            reasons.entry(why).or_default().push(&row.path);
        }
    }
    for (why, paths) in reasons {
        println!("skipped, {why}: {}", paths.join(" "));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, Deserialize, PartialEq)]
    struct Case {
        name: String,
        says: Vec<String>,
    }

    #[test]
    fn rows_fill_placeholders() {
        let text = "[[case]]\nname = \"a {0}\"\nsays = [\"{1}{port}\", \"{2}\"]\n\
                    rows = [[\"b\", \"c\"], [\"d\"]]\n[[case]]\nname = \"e\"\nsays = []\n";
        let case = |name: &str, says: &[&str]| Case {
            name: name.to_owned(),
            says: says.iter().map(|words| (*words).to_owned()).collect(),
        };
        let expected = [
            case("a b", &["c{port}", ""]),
            case("a d", &["{port}", ""]),
            case("e", &[]),
        ];
        assert_eq!(read::<Case>(text), expected);
    }

    #[test]
    fn unknown_word_selects_nothing() {
        let of = |words: &[&str]| {
            let words: Vec<_> = words.iter().map(|word| (*word).to_owned()).collect();
            select(["ab", "bc"], &words, "case", |item, word| {
                item.contains(word)
            })
        };
        assert_eq!(of(&[]).unwrap(), ["ab", "bc"]);
        assert_eq!(of(&["a"]).unwrap(), ["ab"]);
        let why = of(&["a", "d"]).unwrap_err().to_string();
        assert_eq!(why, "unknown case \"d\"");
    }

    #[test]
    fn parallel_results_keep_order() {
        let results = in_parallel(3, 0..100, |lane, item| {
            assert!(lane < 3);
            item * 2
        });
        assert_eq!(results, (0..100).map(|item| item * 2).collect::<Vec<_>>());
    }

    #[test]
    fn second_attempt_may_pass() {
        let tries = std::cell::Cell::new(0);
        let run = || {
            tries.set(tries.get() + 1);
            match tries.get() {
                2 => Ok(()),
                n => Err(format!("attempt {n}\nmore").into()),
            }
        };
        let again = Verdict::PassedAgain("attempt 1: more".to_owned());
        assert_eq!(attempt(true, run), again);
        assert!(matches!(attempt(true, run), Verdict::Failed(why) if why.contains('4')));
        assert!(matches!(attempt(false, run), Verdict::Failed(_)));
    }

    #[test]
    fn rows_are_counted() {
        let row = |verdict| Row::new("a/b", Kind::Program, verdict);
        let failed = row(Verdict::Failed("why".to_owned()));
        let again = row(Verdict::PassedAgain("why".to_owned()));
        let rows = [row(Verdict::Passed), failed, again];
        let said = "2 passed (1 at the second attempt), 1 failed, 0 skipped, 0 not yet";
        assert_eq!(summary(rows.iter().map(|row| &row.verdict)), said);
        let Outcome::Ran(tally, failure) = count(&rows) else {
            panic!("nothing was skipped");
        };
        assert_eq!(tally.counts(Kind::Program).passed, 2);
        assert_eq!(tally.counts(Kind::Program).failed, 1);
        assert_eq!(failure.as_deref(), Some("a/b: why"));
    }
}
