//! Ordered, named values.

use std::fmt::{self, Write};

use serde::ser::{Serialize, SerializeMap, Serializer};

/// A value of a field.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Value {
    /// A number of any width.
    Number(u64),
    /// A number with a value that means "no limit" or "not reported".
    Optional(Option<u64>),
    /// A flag, printed as yes or no.
    Flag(bool),
    /// Text, made printable.
    Text(String),
    /// Bytes, printed in hexadecimal.
    Bytes(Vec<u8>),
    /// A list of values.
    List(Vec<Value>),
    /// Nested fields.
    Fields(Fields),
}

/// Ordered, named values.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Fields(pub Vec<(&'static str, Value)>);

impl Fields {
    /// Appends a field.
    pub fn push(&mut self, name: &'static str, value: Value) {
        self.0.push((name, value));
    }

    /// Returns the value of a field, if present.
    #[must_use]
    pub fn field(&self, name: &str) -> Option<&Value> {
        self.0.iter().find(|(n, _)| *n == name).map(|(_, v)| v)
    }

    fn write(&self, f: &mut fmt::Formatter<'_>, indent: usize) -> fmt::Result {
        for (name, value) in &self.0 {
            write!(f, "{:indent$}{name}:", "")?;
            value.write(f, indent)?;
        }
        Ok(())
    }
}

impl Value {
    fn write(&self, f: &mut fmt::Formatter<'_>, indent: usize) -> fmt::Result {
        match self {
            Self::List(values) if values.iter().any(|v| matches!(v, Self::Fields(_))) => {
                f.write_char('\n')?;
                for value in values {
                    let Self::Fields(fields) = value else {
                        continue;
                    };
                    writeln!(f, "{:1$}-", "", indent + 2)?;
                    fields.write(f, indent + 4)?;
                }
                Ok(())
            }
            Self::Fields(fields) => {
                f.write_char('\n')?;
                fields.write(f, indent + 2)
            }
            _ => writeln!(f, " {self}"),
        }
    }
}

impl fmt::Display for Value {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Number(n) | Self::Optional(Some(n)) => write!(f, "{n}"),
            Self::Optional(None) => f.write_str("not reported"),
            Self::Flag(flag) => f.write_str(if *flag { "yes" } else { "no" }),
            Self::Text(text) => f.write_str(text),
            Self::Bytes(bytes) => f.write_str(&hex(bytes)),
            Self::List(values) => {
                for (i, value) in values.iter().enumerate() {
                    if i > 0 {
                        f.write_str(", ")?;
                    }
                    write!(f, "{value}")?;
                }
                Ok(())
            }
            Self::Fields(fields) => fields.write(f, 0),
        }
    }
}

impl fmt::Display for Fields {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.write(f, 0)
    }
}

/// Formats each byte with two digits.
pub(super) fn hex(bytes: &[u8]) -> String {
    let mut out = String::with_capacity(2 * bytes.len());
    for byte in bytes {
        // Writing to a string cannot fail.
        let _ = write!(out, "{byte:02x}");
    }
    out
}

impl Serialize for Fields {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut map = serializer.serialize_map(Some(self.0.len()))?;
        for (name, value) in &self.0 {
            map.serialize_entry(name, value)?;
        }
        map.end()
    }
}

impl Serialize for Value {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            Self::Number(n) => serializer.serialize_u64(*n),
            Self::Optional(n) => n.serialize(serializer),
            Self::Flag(flag) => serializer.serialize_bool(*flag),
            Self::Text(text) => serializer.serialize_str(text),
            Self::Bytes(bytes) => serializer.serialize_str(&hex(bytes)),
            Self::List(values) => values.serialize(serializer),
            Self::Fields(fields) => fields.serialize(serializer),
        }
    }
}
