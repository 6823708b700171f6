//! Wrapper around the YAML library, which reads values with their positions and converts its
//! errors.

use serde::de::DeserializeOwned;
use serde::{Deserialize, Deserializer, Serialize, Serializer, de};
use serde_path_to_error::Segment;
use serde_saphyr::{Error, MessageFormatter, Options};

use super::error::{ConfigError, nearest};

/// Line and column, starting at 1.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct At {
    pub(super) line: u64,
    pub(super) column: u64,
}

/// A value with its position. Only the value is written.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Located<T> {
    pub(super) value: T,
    pub(super) at: At,
}

/// Creates a new value without a position.
impl<T> From<T> for Located<T> {
    fn from(value: T) -> Self {
        let at = At::default();
        Self { value, at }
    }
}

impl<T: Serialize> Serialize for Located<T> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        self.value.serialize(serializer)
    }
}

impl<'de, T: Deserialize<'de>> Deserialize<'de> for Located<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let spanned = serde_saphyr::Spanned::<T>::deserialize(deserializer)?;
        Ok(Self {
            at: At {
                line: spanned.referenced.line(),
                column: spanned.referenced.column(),
            },
            value: spanned.value,
        })
    }
}

/// A mapping in file order. Keys are unique, because the library rejects duplicates.
#[derive(Debug, Clone)]
pub(super) struct Entries<K, V>(pub(super) Vec<(K, V)>);

impl<K, V> Default for Entries<K, V> {
    fn default() -> Self {
        Self(Vec::new())
    }
}

impl<K, V> Entries<K, V> {
    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

impl<K: Serialize, V: Serialize> Serialize for Entries<K, V> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_map(self.0.iter().map(|(key, value)| (key, value)))
    }
}

impl<'de, K: Deserialize<'de>, V: Deserialize<'de>> Deserialize<'de> for Entries<K, V> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Visitor<K, V>(std::marker::PhantomData<(K, V)>);

        impl<'de, K: Deserialize<'de>, V: Deserialize<'de>> de::Visitor<'de> for Visitor<K, V> {
            type Value = Entries<K, V>;

            fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str("a mapping (`name: value`)")
            }

            fn visit_map<A: de::MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
                let mut entries = Vec::new();
                while let Some(entry) = map.next_entry()? {
                    entries.push(entry);
                }
                Ok(Entries(entries))
            }
        }

        deserializer.deserialize_map(Visitor(std::marker::PhantomData))
    }
}

/// Parses a document. Errors contain the position.
pub(super) fn read<T: DeserializeOwned>(text: &str, file: &str) -> Result<T, ConfigError> {
    let mut options = Options::default();
    options.with_snippet = false;
    // YAML 1.1 reads `no` and `off` as false, so a name such as `no` would silently become a
    // boolean.
    options.strict_booleans = true;
    let mut path = String::new();
    let result = serde_saphyr::with_deserializer_from_str_with_options(text, options, |d| {
        serde_path_to_error::deserialize(d).map_err(|e| {
            path = written_path(e.path());
            e.into_inner()
        })
    });
    result.map_err(|error| {
        let at = error.location().map_or(At { line: 1, column: 1 }, |l| At {
            // An error at the end of an empty file does not have a line.
            line: l.line().max(1),
            column: l.column().max(1),
        });
        let (message, hint) = in_our_words(error.without_snippet());
        ConfigError {
            file: file.to_owned(),
            line: at.line,
            column: at.column,
            path,
            message,
            hint,
        }
    })
}

/// Returns the path as seen in the file, without the wrappers used for positions.
fn written_path(path: &serde_path_to_error::Path) -> String {
    let mut out = String::new();
    for segment in path {
        match segment {
            // The library's wrapper shows up as a struct with this field. We don't use this name
            // for a key.
            Segment::Map { key } if key == "value" => {}
            Segment::Map { key } | Segment::Enum { variant: key } => {
                if !out.is_empty() {
                    out.push('.');
                }
                out.push_str(key);
            }
            Segment::Seq { index } => out.push_str(&format!("[{index}]")),
            Segment::Unknown => {}
        }
    }
    out
}

fn in_our_words(error: &Error) -> (String, Option<String>) {
    let list = |words: &[&str]| words.join(", ");
    match error {
        // The library uses names of Rust types and parser internals, which are not useful to users.
        Error::SerdeUnknownField {
            field, expected, ..
        } => (
            format!("unknown key `{field}`"),
            Some(
                suggestion(field, expected)
                    .unwrap_or_else(|| format!("valid keys are {}", list(expected))),
            ),
        ),
        Error::SerdeUnknownVariant {
            variant, expected, ..
        } => (
            format!("`{variant}` is not one of {}", list(expected)),
            suggestion(variant, expected),
        ),
        Error::SerdeMissingField { field, .. } => (format!("missing key `{field}`"), None),
        Error::DuplicateMappingKey { key, .. } => (
            match key {
                Some(key) => format!("duplicate key `{key}`"),
                None => "duplicate key".to_owned(),
            },
            None,
        ),
        Error::InvalidScalar { ty, .. } => (
            match *ty {
                "f32" | "f64" => "expected a number".to_owned(),
                _ => "expected a non-negative integer".to_owned(),
            },
            None,
        ),
        Error::InvalidBooleanStrict { .. } => ("expected true or false".to_owned(), None),
        Error::Unexpected { expected, .. } => (
            match *expected {
                "mapping start" => "expected a mapping (`key: value`)".to_owned(),
                "sequence start" => "expected a list (`- item`)".to_owned(),
                "string scalar" => "expected a single value, not a list or a mapping".to_owned(),
                other => format!("expected {other}"),
            },
            None,
        ),
        Error::MultipleDocuments { .. } => (
            "unsupported second YAML document".to_owned(),
            Some("a configuration must be a single YAML document".to_owned()),
        ),
        Error::NullIntoString { .. } => ("missing value".to_owned(), None),
        Error::SerdeInvalidType {
            unexpected,
            expected,
            ..
        }
        | Error::SerdeInvalidValue {
            unexpected,
            expected,
            ..
        } => (format!("expected {expected}, not {unexpected}"), None),
        other => {
            let text = serde_saphyr::DefaultMessageFormatter.format_message(other);
            (text.into_owned(), None)
        }
    }
}

fn suggestion(word: &str, known: &[&'static str]) -> Option<String> {
    nearest(word, known.iter().copied()).map(|k| format!("did you mean `{k}`?"))
}
