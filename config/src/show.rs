//! Conversion of a configuration to file format, in order: as JSON values, or as YAML with or
//! without secrets.

use std::fmt::Write;

use serde_json::{Map, Value};

use super::{Config, raw};

/// Replacement text for secrets.
const MASK: &str = "(secret)";

impl Config {
    /// Converts this configuration to file format, including secrets.
    #[must_use]
    pub fn to_value(&self) -> Value {
        let root = raw::Root::from(self);
        let mut value = serde_json::to_value(root).expect("its keys are names and numbers");
        remove_nulls(&mut value);
        value
    }

    /// Converts this configuration to a file that can be parsed again, including secrets.
    #[must_use]
    pub fn to_yaml(&self) -> String {
        to_yaml(&self.to_value())
    }
}

/// Removes keys without a value, which are omitted from files.
fn remove_nulls(value: &mut Value) {
    match value {
        Value::Array(items) => items.iter_mut().for_each(remove_nulls),
        Value::Object(entries) => {
            entries.retain(|_, value| !value.is_null());
            entries.values_mut().for_each(remove_nulls);
        }
        _ => {}
    }
}

/// Returns the value for a key, with secrets replaced by [`MASK`].
#[must_use]
pub fn masked(value: &Value, key: &str) -> Value {
    match value {
        Value::String(_) if key == "secret" => MASK.into(),
        Value::Array(items) => items.iter().map(|item| masked(item, "")).collect(),
        Value::Object(entries) => {
            let entries = entries.iter();
            Value::Object(
                entries
                    .map(|(key, value)| (key.clone(), masked(value, key)))
                    .collect(),
            )
        }
        other => other.clone(),
    }
}

/// Converts a value to block-style YAML, with a trailing newline.
#[must_use]
pub fn to_yaml(value: &Value) -> String {
    let mut out = String::new();
    match value {
        Value::Object(entries) if !entries.is_empty() => put_map(entries, 0, &mut out),
        other => {
            put_inline(other, &mut out);
            out.push('\n');
        }
    }
    out
}

fn put_map(entries: &Map<String, Value>, indent: usize, out: &mut String) {
    for (n, (key, value)) in entries.iter().enumerate() {
        // The first entry of a list item follows the dash on the same line.
        if n > 0 || !out.ends_with("- ") {
            out.extend(std::iter::repeat_n(' ', indent));
        }
        put_key(key, out);
        out.push(':');
        match value {
            Value::Object(inner) if !inner.is_empty() => {
                out.push('\n');
                put_map(inner, indent + 2, out);
            }
            Value::Array(items) if items.iter().any(|i| matches!(i, Value::Object(_))) => {
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

fn put_list(items: &[Value], indent: usize, out: &mut String) {
    for item in items {
        out.extend(std::iter::repeat_n(' ', indent));
        out.push_str("- ");
        match item {
            Value::Object(inner) if !inner.is_empty() => put_map(inner, indent + 2, out),
            item => {
                put_inline(item, out);
                out.push('\n');
            }
        }
    }
}

fn put_inline(value: &Value, out: &mut String) {
    match value {
        Value::Bool(value) => out.push_str(if *value { "true" } else { "false" }),
        Value::Number(number) if number.is_u64() => {
            let _ = write!(out, "{number}");
        }
        // Other numbers are not used by any key, so they could be parsed as text.
        Value::Number(_) | Value::Null => put_text(&value.to_string(), out),
        Value::String(text) => put_text(text, out),
        Value::Array(items) => {
            out.push('[');
            for (n, item) in items.iter().enumerate() {
                out.push_str(if n > 0 { ", " } else { "" });
                put_inline(item, out);
            }
            out.push(']');
        }
        Value::Object(entries) => {
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

/// Keys are strings or small numbers.
fn put_key(key: &str, out: &mut String) {
    match key.parse::<u16>() {
        Ok(number) if number.to_string() == key => out.push_str(key),
        _ => put_text(key, out),
    }
}

/// Uses plain style if the value can only be parsed as a string, or double quotes otherwise.
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
