//! Words that should be avoided in text for users, and their replacements.

use std::sync::LazyLock;

/// List from `words.txt`.
static WORDS: LazyLock<Vec<Word>> = LazyLock::new(|| {
    let lines = include_str!("../../words.txt").lines();
    let entries = lines.filter(|line| !line.starts_with('#'));
    entries
        .map(|line| Word::parse(line).unwrap_or_else(|| panic!("words.txt: {line}")))
        .collect()
});

/// An entry in the list.
struct Word {
    phrase: &'static str,
    /// If the phrase is followed by this word, it should be ignored.
    unless: &'static str,
    instead: &'static str,
}

impl Word {
    fn parse(line: &'static str) -> Option<Self> {
        let (phrase, instead) = line.split_once(": ")?;
        let (phrase, unless) = match phrase.split_once(" [") {
            Some((phrase, unless)) => (phrase, unless.strip_suffix(']')?),
            None => (phrase, ""),
        };
        Some(Self {
            phrase,
            unless,
            instead,
        })
    }

    fn opens(&self, words: &[(usize, String)]) -> bool {
        let mut words = words.iter().map(|(_, word)| word.as_str());
        let is_here = self
            .phrase
            .split(' ')
            .all(|part| words.next() == Some(part));
        is_here && words.next().is_none_or(|next| next != self.unless)
    }
}

/// A word from the list that was found in a text.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Found {
    pub(crate) line: usize,
    pub(crate) word: &'static str,
    pub(crate) instead: &'static str,
}

/// Finds words from the list in a text. `first_line` is the line number of its first line. A phrase
/// can continue on the next line.
pub(crate) fn find(text: &str, first_line: usize) -> Vec<Found> {
    let words = words_of(text, first_line);
    let mut found = Vec::new();
    for at in 0..words.len() {
        let here = WORDS.iter().filter(|word| word.opens(&words[at..]));
        found.extend(here.map(|word| Found {
            line: words[at].0,
            word: word.phrase,
            instead: word.instead,
        }));
    }
    found
}

/// Splits a text into lowercase words with line numbers. Identifiers such as `tell_peer` or
/// `so-many` are also split.
fn words_of(text: &str, first_line: usize) -> Vec<(usize, String)> {
    let mut words = Vec::new();
    for (n, line) in text.lines().enumerate() {
        let parts = line.split(|c: char| !c.is_alphabetic() && c != '\'' && c != '’');
        let parts = parts.filter(|part| !part.is_empty());
        words.extend(parts.map(|part| (first_line + n, part.to_lowercase())));
    }
    words
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_are_found_with_line_numbers() {
        let lines = |text: &str| -> Vec<_> {
            let found = find(text, 10);
            found.iter().map(|found| (found.line, found.word)).collect()
        };
        assert_eq!(
            lines("Whoever asks\nis told so\nmany"),
            [(10, "whoever"), (11, "told"), (11, "so many")]
        );
        assert_eq!(lines("no more than three, and no more"), [(10, "no more")]);
        assert_eq!(lines("a retelling of legacies, fortold"), []);
    }

    #[test]
    fn word_list_is_valid() {
        for word in WORDS.iter() {
            assert_eq!(word.phrase, word.phrase.to_lowercase());
            assert!(find(word.instead, 1).is_empty(), "{}", word.instead);
        }
    }
}
