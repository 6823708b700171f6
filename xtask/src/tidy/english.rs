//! Measures the English in comments: how often unusual phrases are used, and how different the
//! vocabulary is from that of comparable projects. Each package has a budget that can only be
//! lowered.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::fs;
use std::path::Path;
use std::sync::LazyLock;

use regex::{Regex, RegexBuilder};

use super::sources::{Package, Source};
use crate::{Failure, root};

/// Budgets: a package, the maximum rate and the maximum distance per line. Small packages have `-`
/// instead of a distance.
const BUDGETS: &str = "xtask/english/budgets.txt";

/// Number of words in a package below which we don't measure its vocabulary.
const MIN_WORDS: usize = 2500;

/// Maximum number of phrases that are listed for a package that exceeds its budget.
const LISTED: usize = 10;

/// A budget must be lowered if the value is better than this share of the budget.
const LOWER_BELOW: f64 = 0.8;

static PHRASES: LazyLock<Regex> = LazyLock::new(|| {
    let phrases: Vec<_> = lines(include_str!("../../english/phrases.txt")).collect();
    RegexBuilder::new(&phrases.join("|"))
        .case_insensitive(true)
        .build()
        .expect("phrases.txt has valid regular expressions")
});

/// Words of comparable projects, with the number per million words.
static FIELD: LazyLock<BTreeMap<&str, f64>> = LazyLock::new(|| {
    let entries = lines(include_str!("../../english/words.txt"));
    let parse = |line: &'static str| {
        let (word, number) = line.split_once(' ')?;
        Some((word, number.parse().ok()?))
    };
    entries
        .map(|line| parse(line).unwrap_or_else(|| panic!("words.txt: {line}")))
        .collect()
});

/// Code and links, which are not part of the vocabulary.
static CODE: LazyLock<Regex> = LazyLock::new(|| {
    Regex::new(r"`[^`]*`|\[[^\]]*\]\([^)]*\)|https?://\S+").expect("a valid expression")
});

static WORD: LazyLock<Regex> =
    LazyLock::new(|| Regex::new(r"[a-z]+(?:'[a-z]+)?").expect("a valid expression"));

fn lines(text: &'static str) -> impl Iterator<Item = &'static str> {
    text.lines().filter(|line| !line.starts_with('#'))
}

/// The English in a set of comments.
#[derive(Clone, Default)]
pub(crate) struct English {
    words: usize,
    phrases: usize,
    /// Number of uses of each word in [`FIELD`].
    vocabulary: BTreeMap<&'static str, usize>,
}

impl English {
    /// Measures a whole package, including its tests.
    pub(crate) fn of(package: &Package) -> Self {
        let mut english = Self::default();
        for source in &package.sources {
            for (_, text) in remarks(source) {
                english.read(text);
            }
        }
        english
    }

    fn read(&mut self, text: &str) {
        self.phrases += PHRASES.find_iter(text).count();
        let text = text.to_lowercase();
        self.words += WORD.find_iter(&text).count();
        for word in WORD.find_iter(&CODE.replace_all(&text, " ")) {
            if let Some((word, _)) = FIELD.get_key_value(word.as_str()) {
                *self.vocabulary.entry(word).or_default() += 1;
            }
        }
    }

    pub(crate) fn add(&mut self, other: Self) {
        self.words += other.words;
        self.phrases += other.phrases;
        for (word, number) in other.vocabulary {
            *self.vocabulary.entry(word).or_default() += number;
        }
    }

    pub(crate) fn rate(&self) -> f64 {
        1000.0 * self.phrases as f64 / self.words.max(1) as f64
    }

    /// Returns the Jensen-Shannon divergence between the vocabulary and that of the field, from 0
    /// to 1, or `None` if there are too few words.
    pub(crate) fn distance(&self) -> Option<f64> {
        let counts = FIELD.keys().map(|word| self.vocabulary.get(word));
        let ours = shares(counts.map(|count| count.map_or(0.0, |count| *count as f64)));
        let field = shares(FIELD.values().copied());
        let parts = ours.iter().zip(&field).map(|(p, q)| {
            let mean = f64::midpoint(*p, *q);
            0.5 * (p * (p / mean).log2() + q * (q / mean).log2())
        });
        (self.words >= MIN_WORDS).then(|| parts.sum())
    }
}

fn shares(counts: impl Iterator<Item = f64>) -> Vec<f64> {
    let counts: Vec<_> = counts.map(|count| count + 0.5).collect();
    let total: f64 = counts.iter().sum();
    counts.iter().map(|count| count / total).collect()
}

fn remarks(source: &Source) -> impl Iterator<Item = (usize, &str)> {
    let text = &source.text;
    let docs = text.docs.iter().chain(&text.inner_docs);
    let all = docs.chain(&text.comments);
    all.map(|remark| (remark.line, remark.text.as_str()))
}

/// Lists the unusual phrases in a package as `file:line: phrase`.
pub(crate) fn phrases(package: &Package) -> Vec<String> {
    let mut found = Vec::new();
    for source in &package.sources {
        for (first, text) in remarks(source) {
            for phrase in PHRASES.find_iter(text) {
                let line = first + text[..phrase.start()].matches('\n').count();
                found.push(format!(
                    "{}:{line}: {}",
                    source.path.display(),
                    phrase.as_str()
                ));
            }
        }
    }
    found
}

/// Maximum values for a package.
#[derive(Clone, Copy, PartialEq, Debug)]
struct Budget {
    rate: f64,
    distance: Option<f64>,
}

/// Returns the packages that exceed their budgets, with phrases to replace, and budgets to be
/// added, lowered or removed.
pub(super) fn over_budget(packages: &[Package]) -> Result<Vec<String>, Failure> {
    let budgets = read_budgets(&root().join(BUDGETS))?;
    let measured: BTreeMap<_, _> = packages
        .iter()
        .map(|package| (package.name.as_str(), English::of(package)))
        .collect();
    let mut wrong = compare(&measured, &budgets);
    for package in packages {
        let budget = budgets.get(&package.name);
        if budget.is_some_and(|budget| measured[package.name.as_str()].rate() > budget.rate) {
            wrong.extend(phrases(package).into_iter().take(LISTED));
        }
    }
    Ok(wrong)
}

fn compare(measured: &BTreeMap<&str, English>, budgets: &BTreeMap<String, Budget>) -> Vec<String> {
    let mut wrong = Vec::new();
    for (name, english) in measured {
        let Some(budget) = budgets.get(*name) else {
            wrong.push(format!("{BUDGETS}: missing package {name}"));
            continue;
        };
        let distance = english.distance();
        let values = [
            (
                "phrases per 1,000 words",
                Some(english.rate()),
                Some(budget.rate),
            ),
            ("distance of the vocabulary", distance, budget.distance),
        ];
        for (title, value, most) in values {
            let about = match (value, most) {
                (Some(value), Some(most)) if value > most => {
                    format!("{value:.3} exceeds {most}; run cargo xtask tidy --english {name}")
                }
                (Some(value), Some(most)) if value < most * LOWER_BELOW && most > 1.0 => {
                    format!("lower {most} in {BUDGETS} to {value:.1}")
                }
                (Some(value), None) => format!("add {value:.2} to {BUDGETS}"),
                _ => continue,
            };
            wrong.push(format!("{name}: {title}: {about}"));
        }
    }
    let unknown = budgets
        .keys()
        .filter(|name| !measured.contains_key(name.as_str()));
    wrong.extend(unknown.map(|name| format!("{BUDGETS}: unknown package {name}")));
    wrong
}

fn read_budgets(path: &Path) -> Result<BTreeMap<String, Budget>, Failure> {
    let text = fs::read_to_string(path)?;
    let mut budgets = BTreeMap::new();
    for line in text.lines().filter(|line| !line.starts_with('#')) {
        let (name, budget) =
            parse_budget(line).ok_or_else(|| format!("{BUDGETS}: invalid line \"{line}\""))?;
        budgets.insert(name, budget);
    }
    Ok(budgets)
}

fn parse_budget(line: &str) -> Option<(String, Budget)> {
    let mut fields = line.split_whitespace();
    let name = fields.next()?.to_owned();
    let rate = fields.next()?.parse().ok()?;
    let distance = match fields.next()? {
        "-" => None,
        distance => Some(distance.parse().ok()?),
    };
    fields
        .next()
        .is_none()
        .then_some((name, Budget { rate, distance }))
}

pub(crate) fn table(packages: &[(String, English)], all: &English) -> String {
    let width = packages
        .iter()
        .map(|(name, _)| name.len())
        .max()
        .unwrap_or(0);
    let mut text = format!(
        "\n{:width$}  {:>9}  {:>12}  {:>9}\n",
        "English", "words", "odd / 1,000", "distance"
    );
    let total = ("all".to_owned(), all.clone());
    for (name, english) in packages.iter().chain([&total]) {
        let distance = english.distance();
        let distance = distance.map_or_else(String::new, |distance| format!("{distance:.3}"));
        let _ = writeln!(
            text,
            "{name:width$}  {:>9}  {:>12.1}  {distance:>9}",
            english.words,
            english.rate()
        );
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    fn english(text: &str) -> English {
        let mut english = English::default();
        english.read(text);
        english
    }

    #[test]
    fn phrases_are_counted_per_thousand_words() {
        let odd = english("The daemon answers what is asked for.");
        assert_eq!((odd.words, odd.phrases), (7, 3));
        assert!((odd.rate() - 3000.0 / 7.0).abs() < 1e-9);
        assert_eq!(
            english("The daemon returns the requested value.").phrases,
            0
        );
    }

    #[test]
    fn vocabulary_of_field_has_small_distance() {
        let mut usual = English::default();
        for (word, rate) in FIELD.iter() {
            usual.vocabulary.insert(word, rate.round() as usize);
        }
        usual.words = MIN_WORDS;
        assert!(usual.distance().unwrap() < 0.001);
        let narrow = english(&"whose its of ".repeat(MIN_WORDS));
        assert!(narrow.distance().unwrap() > 0.5);
        assert_eq!(english("too short").distance(), None);
    }

    #[test]
    fn code_is_not_part_of_vocabulary() {
        let vocabulary = english("`the the` and https://the.the the").vocabulary;
        assert_eq!(vocabulary["the"], 1);
    }

    #[test]
    fn budget_is_exceeded_missing_or_too_high() {
        let measured = BTreeMap::from([("a", english("It answers what is asked for."))]);
        let with = |line: &str| {
            let budgets = line
                .lines()
                .map(|line| parse_budget(line).unwrap())
                .collect();
            compare(&measured, &budgets).join("\n")
        };
        assert_eq!(with("a 500 -"), "");
        assert!(with("a 300 -").contains("500.000 exceeds 300"));
        assert!(with("a 700 -").contains("lower 700 in"));
        assert!(with("").contains("missing package a"));
        assert!(with("a 500 -\nb 1 0.1").contains("unknown package b"));
        assert_eq!(parse_budget("a 1"), None);
        assert_eq!(parse_budget("a 1 0.1 2"), None);
    }
}
