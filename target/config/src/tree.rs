//! [`Tree`]: a configuration in the words of its file, in order, and as YAML and JSON.

use std::fmt::Write;

use serde::ser::{SerializeMap, SerializeSeq};
use serde::{Serialize, Serializer};

/// A part of a configuration file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Tree {
    /// `true` or `false`.
    Bool(bool),
    /// A number.
    Number(u64),
    /// Any other scalar.
    Text(String),
    /// A list.
    List(Vec<Tree>),
    /// A mapping, in the order of the file. Keys are distinct.
    Map(Vec<(String, Tree)>),
}

/// What stands for a secret.
const MASK: &str = "(secret)";

impl Tree {
    /// The value of a key with something else in the place of its secrets.
    #[must_use]
    pub fn masked(self, key: &str) -> Self {
        match self {
            Self::Text(_) if key == "secret" => Self::Text(MASK.into()),
            Self::List(items) => {
                Self::List(items.into_iter().map(|item| item.masked("")).collect())
            }
            Self::Map(entries) => {
                let masked = entries.into_iter().map(|(key, value)| {
                    let value = value.masked(&key);
                    (key, value)
                });
                Self::Map(masked.collect())
            }
            scalar => scalar,
        }
    }

    /// As YAML in block style, which ends with a line end.
    #[must_use]
    pub fn to_yaml(&self) -> String {
        let mut out = String::new();
        match self {
            Self::Map(entries) if !entries.is_empty() => put_map(entries, 0, &mut out),
            other => {
                put_inline(other, &mut out);
                out.push('\n');
            }
        }
        out
    }
}

impl From<&serde_json::Value> for Tree {
    fn from(value: &serde_json::Value) -> Self {
        use serde_json::Value;
        match value {
            Value::Bool(value) => Self::Bool(*value),
            Value::String(text) => Self::Text(text.clone()),
            Value::Array(items) => Self::List(items.iter().map(Self::from).collect()),
            Value::Object(entries) => {
                let entry = |(key, value): (&String, &Value)| (key.clone(), Self::from(value));
                Self::Map(entries.iter().map(entry).collect())
            }
            other => match other.as_u64() {
                Some(number) => Self::Number(number),
                None => Self::Text(other.to_string()),
            },
        }
    }
}

fn put_map(entries: &[(String, Tree)], indent: usize, out: &mut String) {
    for (n, (key, value)) in entries.iter().enumerate() {
        // The first entry of a list's item stands after its dash.
        if n > 0 || !out.ends_with("- ") {
            out.extend(std::iter::repeat_n(' ', indent));
        }
        put_key(key, out);
        out.push(':');
        match value {
            Tree::Map(inner) if !inner.is_empty() => {
                out.push('\n');
                put_map(inner, indent + 2, out);
            }
            Tree::List(items) if items.iter().any(|i| matches!(i, Tree::Map(_))) => {
                out.push('\n');
                put_list(items, indent + 2, out);
            }
            value => {
                out.push(' ');
                put_inline(value, out);
                out.push('\n');
            }
        }
    }
}

fn put_list(items: &[Tree], indent: usize, out: &mut String) {
    for item in items {
        out.extend(std::iter::repeat_n(' ', indent));
        out.push_str("- ");
        match item {
            Tree::Map(inner) if !inner.is_empty() => put_map(inner, indent + 2, out),
            item => {
                put_inline(item, out);
                out.push('\n');
            }
        }
    }
}

fn put_inline(tree: &Tree, out: &mut String) {
    match tree {
        Tree::Bool(value) => out.push_str(if *value { "true" } else { "false" }),
        Tree::Number(value) => {
            let _ = write!(out, "{value}");
        }
        Tree::Text(text) => put_text(text, out),
        Tree::List(items) => {
            out.push('[');
            for (n, item) in items.iter().enumerate() {
                out.push_str(if n > 0 { ", " } else { "" });
                put_inline(item, out);
            }
            out.push(']');
        }
        Tree::Map(entries) => {
            out.push('{');
            for (n, (key, value)) in entries.iter().enumerate() {
                out.push_str(if n > 0 { ", " } else { " " });
                put_key(key, out);
                out.push_str(": ");
                put_inline(value, out);
            }
            out.push_str(if entries.is_empty() { "}" } else { " }" });
        }
    }
}

/// A key is text, or a small number.
fn put_key(key: &str, out: &mut String) {
    match key.parse::<u16>() {
        Ok(number) if number.to_string() == key => out.push_str(key),
        _ => put_text(key, out),
    }
}

/// Plain where no reader could take it for anything but text, else in double quotes.
fn put_text(text: &str, out: &mut String) {
    if is_plain(text) {
        out.push_str(text);
        return;
    }
    out.push('"');
    for c in text.chars() {
        match c {
            '"' | '\\' => out.extend(['\\', c]),
            ' '..='~' => out.push(c),
            c if (c as u32) < 0x1_0000 => {
                let _ = write!(out, "\\u{:04x}", c as u32);
            }
            c => {
                let _ = write!(out, "\\U{:08x}", c as u32);
            }
        }
    }
    out.push('"');
}

fn is_plain(text: &str) -> bool {
    let legal = |b: u8| b.is_ascii_alphanumeric() || matches!(b, b'_' | b'-' | b'.' | b'/');
    let begins = text.starts_with(|c: char| c.is_ascii_alphabetic() || c == '/');
    let is_size = text.ends_with("iB") && text.starts_with(|c: char| c.is_ascii_digit());
    let lower = text.to_ascii_lowercase();
    let is_word = matches!(
        lower.as_str(),
        "true" | "false" | "yes" | "no" | "on" | "off" | "null" | "y" | "n" | "inf" | "nan"
    );
    (begins || is_size) && text.bytes().all(legal) && !is_word
}

impl Serialize for Tree {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            Self::Bool(value) => serializer.serialize_bool(*value),
            Self::Number(value) => serializer.serialize_u64(*value),
            Self::Text(text) => serializer.serialize_str(text),
            Self::List(items) => {
                let mut seq = serializer.serialize_seq(Some(items.len()))?;
                items
                    .iter()
                    .try_for_each(|item| seq.serialize_element(item))?;
                seq.end()
            }
            Self::Map(entries) => {
                let mut map = serializer.serialize_map(Some(entries.len()))?;
                entries
                    .iter()
                    .try_for_each(|(key, value)| map.serialize_entry(key, value))?;
                map.end()
            }
        }
    }
}
