//! [`Map`]: a mapping of a file as it is filled.

use super::tree::Tree;

/// A mapping as it is filled.
#[derive(Default)]
pub(super) struct Map(Vec<(String, Tree)>);

impl Map {
    pub(super) fn put(&mut self, key: &str, value: Tree) {
        self.0.push((key.to_owned(), value));
    }

    /// A value, where there is one.
    pub(super) fn set(&mut self, key: &str, value: Option<Tree>) {
        if let Some(value) = value {
            self.put(key, value);
        }
    }

    pub(super) fn text(&mut self, key: &str, value: Option<&str>) {
        self.set(key, value.map(|v| Tree::Text(v.to_owned())));
    }

    /// What is written as text, where there is one.
    pub(super) fn shown(&mut self, key: &str, value: Option<impl std::fmt::Display>) {
        self.set(key, value.map(|v| Tree::Text(v.to_string())));
    }

    /// A number that is not the default.
    pub(super) fn number(&mut self, key: &str, value: u64, default: u64) {
        self.set(key, (value != default).then_some(Tree::Number(value)));
    }

    /// A choice that is not the default.
    pub(super) fn flag(&mut self, key: &str, value: bool, default: bool) {
        self.set(key, (value != default).then_some(Tree::Bool(value)));
    }

    /// A list or mapping that is not empty.
    pub(super) fn some(&mut self, key: &str, value: Tree) {
        let is_empty = match &value {
            Tree::Map(entries) => entries.is_empty(),
            Tree::List(items) => items.is_empty(),
            _ => false,
        };
        self.set(key, (!is_empty).then_some(value));
    }

    pub(super) fn tree(self) -> Tree {
        Tree::Map(self.0)
    }
}

/// Bytes in the largest unit that has no fraction.
pub(super) fn size_text(bytes: u64) -> String {
    let units = [(40, "TiB"), (30, "GiB"), (20, "MiB"), (10, "KiB")];
    let mut whole = units
        .iter()
        .filter(|(shift, _)| bytes != 0 && bytes.is_multiple_of(1 << shift));
    match whole.next() {
        Some((shift, unit)) => format!("{}{unit}", bytes >> shift),
        None => bytes.to_string(),
    }
}

/// As [`size_text`], in a file: a number where there is no unit.
pub(super) fn size(bytes: u64) -> Tree {
    match bytes != 0 && bytes.is_multiple_of(1 << 10) {
        true => Tree::Text(size_text(bytes)),
        false => Tree::Number(bytes),
    }
}
