//! [`ConfigError`]: the error, its position, and a hint to fix it.

use std::fmt;

/// An error in a configuration file.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub struct ConfigError {
    /// File name, as provided by the caller.
    pub file: String,
    /// Line number, starting at 1.
    pub line: u64,
    /// Column in characters, starting at 1.
    pub column: u64,
    /// Path in the tree, such as `targets[0].luns.3`; empty at the top.
    pub path: String,
    /// Human-readable error message.
    pub message: String,
    /// Hint for the user, if the fix is not obvious.
    pub hint: Option<String>,
}

impl fmt::Display for ConfigError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}:{}: ", self.file, self.line, self.column)?;
        if !self.path.is_empty() {
            write!(f, "{}: ", self.path)?;
        }
        f.write_str(&self.message)?;
        if let Some(hint) = &self.hint {
            write!(f, " ({hint})")?;
        }
        Ok(())
    }
}

impl ConfigError {
    /// Returns the byte offset of the error in its source text, used to highlight it.
    #[must_use]
    pub fn offset_in(&self, text: &str) -> usize {
        let line = usize::try_from(self.line.saturating_sub(1)).unwrap_or(usize::MAX);
        let start: usize = text.split_inclusive('\n').take(line).map(str::len).sum();
        let column = usize::try_from(self.column.saturating_sub(1)).unwrap_or(usize::MAX);
        let rest = &text[start..];
        start
            + rest
                .char_indices()
                .nth(column)
                .map_or(rest.trim_end().len(), |(i, _)| i)
    }
}

/// Returns the most similar known word, if it is close enough to be a typo.
pub(super) fn nearest<'a>(word: &str, known: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    known
        .into_iter()
        .map(|k| (distance(word, k), k))
        .filter(|&(d, k)| d <= k.chars().count() / 3 + 1 && d < k.chars().count())
        .min_by_key(|&(d, _)| d)
        .map(|(_, k)| k)
}

/// Returns the edit distance between two words. Long words are not compared, because the time grows
/// with the product of their lengths.
fn distance(a: &str, b: &str) -> usize {
    match a.len().max(b.len()) {
        0..=64 => strsim::levenshtein(a, b),
        _ => usize::MAX,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_similar_words_are_suggested() {
        let known = ["path", "block_size", "write_cache"];
        assert_eq!(nearest("pth", known), Some("path"));
        assert_eq!(nearest("blocksize", known), Some("block_size"));
        assert_eq!(nearest("colour", known), None);
        assert_eq!(nearest("", known), None);
    }

    #[test]
    fn offset_is_in_bytes() {
        let error = |line, column| ConfigError {
            file: "f".into(),
            line,
            column,
            path: String::new(),
            message: String::new(),
            hint: None,
        };
        let text = "ä: 1\nb: ü x\n";
        assert_eq!(&text[error(2, 6).offset_in(text)..], "x\n");
        assert_eq!(error(9, 9).offset_in(text), text.len());
        assert_eq!(error(0, 0).offset_in(""), 0);
    }
}
