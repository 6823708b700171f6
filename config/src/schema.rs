//! The JSON Schema for a configuration file, used by editors, the reference, and the daemon's
//! commands. It describes the keys in `raw`. Rules across keys are handled by `check` and are not
//! included.

use std::borrow::Cow;

use schemars::generate::SchemaSettings;
use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde_json::Value;

use super::listen::Written as Listen;
use super::raw;
use super::value::{Count, Guid, InitiatorId, NaaText, Net, OnOff, Percent, Size, Span};
use super::yaml::{Entries, Located};

/// Returns the schema for a configuration file in JSON format (draft 7).
///
/// Each key has a `description`. The first line is a summary, and more paragraphs can follow after
/// an empty line. `default` is the value of a key that is not set, in file syntax; if there is no
/// `default`, the description contains it. We use two additional keywords, which are ignored by
/// other readers: `x-unit` is the unit of a value (`bytes`, `MiB`, `seconds`, `percent`, `time`,
/// `commands per second`, `bytes per second`), and `x-limits` describes valid values if `minimum`,
/// `maximum` and `enum` cannot.
#[must_use]
pub fn schema() -> serde_json::Value {
    let generator = SchemaSettings::draft07().into_generator();
    let mut schema = generator.into_root_schema_for::<raw::Root>().to_value();
    unwrap_lines(&mut schema);
    // Sort keys so that readers can find them by name.
    schema.sort_all_objects();
    schema
}

/// Joins the source lines of each paragraph in descriptions.
fn unwrap_lines(node: &mut Value) {
    match node {
        Value::Array(items) => items.iter_mut().for_each(unwrap_lines),
        Value::Object(entries) => {
            for (key, value) in entries {
                match value {
                    Value::String(text) if key == "description" => {
                        let paragraphs = text.split("\n\n").map(|text| text.replace('\n', " "));
                        *text = paragraphs.collect::<Vec<_>>().join("\n\n");
                    }
                    value => unwrap_lines(value),
                }
            }
        }
        _ => {}
    }
}

impl<T: JsonSchema> JsonSchema for Located<T> {
    fn schema_name() -> Cow<'static, str> {
        T::schema_name()
    }

    fn inline_schema() -> bool {
        T::inline_schema()
    }

    fn json_schema(generator: &mut SchemaGenerator) -> Schema {
        T::json_schema(generator)
    }
}

impl<K, V: JsonSchema> JsonSchema for Entries<K, V> {
    fn schema_name() -> Cow<'static, str> {
        format!("{}_by_name", V::schema_name()).into()
    }

    fn inline_schema() -> bool {
        true
    }

    fn json_schema(generator: &mut SchemaGenerator) -> Schema {
        let value = generator.subschema_for::<V>();
        json_schema!({ "type": "object", "additionalProperties": value })
    }
}

impl JsonSchema for raw::Lun {
    fn schema_name() -> Cow<'static, str> {
        "Lun".into()
    }

    fn json_schema(generator: &mut SchemaGenerator) -> Schema {
        let mapping = generator.subschema_for::<raw::LunMapping>();
        json_schema!({ "anyOf": [{ "type": "string" }, mapping] })
    }
}

impl JsonSchema for raw::Access {
    fn schema_name() -> Cow<'static, str> {
        "Access".into()
    }

    fn json_schema(generator: &mut SchemaGenerator) -> Schema {
        let rule = generator.subschema_for::<raw::Rule>();
        json_schema!({ "anyOf": [{ "const": "open" }, { "type": "array", "items": rule }] })
    }
}

impl JsonSchema for raw::RuleLuns {
    fn schema_name() -> Cow<'static, str> {
        "RuleLuns".into()
    }

    fn json_schema(generator: &mut SchemaGenerator) -> Schema {
        let numbers = generator.subschema_for::<Vec<Located<u64>>>();
        let luns = generator.subschema_for::<Entries<u64, Located<raw::Lun>>>();
        json_schema!({ "anyOf": [numbers, luns] })
    }
}

/// Implements scalars that YAML parses as text, as numbers, or as one of several types.
macro_rules! scalars {
    ($($name:ident: $schema:tt,)*) => {$(
        impl JsonSchema for $name {
            fn schema_name() -> Cow<'static, str> {
                stringify!($name).into()
            }

            fn inline_schema() -> bool {
                true
            }

            fn json_schema(_: &mut SchemaGenerator) -> Schema {
                json_schema!($schema)
            }
        }
    )*};
}

scalars! {
    Size: { "type": ["string", "integer"], "examples": ["512KiB", "1GiB"] },
    Span: { "type": ["string", "integer"], "examples": ["500ms", "2s"] },
    OnOff: { "enum": ["on", "off", "true", "false", true, false] },
    Guid: { "type": ["string", "integer"], "examples": ["0x0200c0ffee000001"] },
    InitiatorId: { "type": ["string", "number"], "examples": ["0002:c903:00a1:b2c3"] },
    Net: { "type": "string", "examples": ["192.0.2.1", "2001:db8::/64"] },
    Percent: { "type": ["string", "number"], "examples": ["0.5%"] },
    Listen: { "type": "string", "examples": ["192.0.2.1", "192.0.2.1:5555", "[2001:db8::1]:5555", "0.0.0.0", "eth0"] },
    Count: { "anyOf": [{ "const": "auto" }, { "type": "integer", "minimum": 0 }] },
    NaaText: { "type": ["string", "number"], "examples": ["3123456789abcdef"] },
}
