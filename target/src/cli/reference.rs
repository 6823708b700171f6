//! The keys of a configuration file from its JSON Schema. This is used for the manual page
//! riserd.yaml(5) and the book, so that they have the same contents.

use serde_json::{Map, Value};

/// An object in the file: the root, a backend, a portal.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Object {
    /// Paths in the file, such as `targets[].portals[]`. Empty for the root.
    pub places: Vec<String>,
    /// Paragraphs of the description.
    pub text: Vec<String>,
    /// Keys in schema order.
    pub keys: Vec<Key>,
    /// Name of the schema definition.
    definition: String,
}

/// A key of an object.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Key {
    /// The key in the file.
    pub name: String,
    /// Human-readable type: "size", "list of objects".
    pub kind: String,
    /// True if the key is required.
    pub is_required: bool,
    /// Default value, in file syntax.
    pub default: Option<String>,
    /// Human-readable unit and range.
    pub limits: Vec<String>,
    /// Paragraphs of the description.
    pub text: Vec<String>,
    /// Possible values with their descriptions.
    pub choices: Vec<(String, String)>,
}

impl Key {
    /// Returns the text in parentheses after the key.
    #[must_use]
    pub fn summary(&self) -> String {
        let mut parts = vec![self.kind.clone()];
        parts.extend(self.limits.iter().cloned());
        if self.is_required {
            parts.push("required".to_owned());
        }
        parts.extend(self.default.as_ref().map(|d| format!("default {d}")));
        parts.retain(|part| !part.is_empty());
        parts.join("; ")
    }
}

/// Returns all objects in a schema. The first is the root, and each object is followed by the new
/// objects that it contains.
///
/// An object with multiple paths (`limits` of a backend and of a rule) is only returned once,
/// because it has a single definition in the schema.
#[must_use]
pub fn objects(schema: &Value) -> Vec<Object> {
    let mut reader = Reader {
        schema,
        objects: Vec::new(),
    };
    reader.object(schema, "", "");
    reader.objects
}

/// The type of a value from the schema.
#[derive(Default)]
struct Kind {
    words: Vec<String>,
    choices: Vec<(String, String)>,
    /// Contained objects: path suffix and definition.
    within: Vec<(String, String)>,
}

struct Reader<'a> {
    schema: &'a Value,
    objects: Vec<Object>,
}

impl Reader<'_> {
    fn object(&mut self, node: &Value, definition: &str, place: &str) {
        let required: Vec<_> = strings(&node["required"]).collect();
        let (mut keys, mut within) = (Vec::new(), Vec::new());
        for (name, key) in entries(&node["properties"]) {
            let mut kind = Kind::default();
            self.kind(key, "", &mut kind);
            let inner = match place {
                "" => name.clone(),
                place => format!("{place}.{name}"),
            };
            let places = kind.within.iter();
            within.extend(
                places.map(|(end, definition)| (format!("{inner}{end}"), definition.clone())),
            );
            keys.push(Key {
                name: name.clone(),
                kind: kind.words.join(" or "),
                is_required: required.contains(&name.as_str()),
                default: default_of(key),
                limits: limits_of(key),
                text: paragraphs(key),
                choices: kind.choices,
            });
        }
        self.objects.push(Object {
            places: vec![place.to_owned()],
            text: paragraphs(node),
            keys,
            definition: definition.to_owned(),
        });
        // Do this after adding the object, so that the list has the same order as a file.
        for (place, definition) in within {
            self.add_object(&definition, place);
        }
    }

    /// Adds an object, or another path to an existing object.
    fn add_object(&mut self, definition: &str, place: String) {
        let known = self.objects.iter_mut().find(|o| o.definition == definition);
        if let Some(object) = known {
            if !object.places.contains(&place) {
                object.places.push(place);
            }
            return;
        }
        let node = &self.schema["definitions"][definition];
        self.object(node, definition, &place);
    }

    /// Adds the type from a node. `end` is the path suffix for contained objects.
    fn kind(&self, node: &Value, end: &str, kind: &mut Kind) {
        if let Some(name) = node["$ref"].as_str() {
            let name = name.rsplit('/').next().unwrap_or(name);
            let definition = &self.schema["definitions"][name];
            if definition.get("properties").is_none() {
                return self.kind(definition, end, kind);
            }
            add(&mut kind.words, "object");
            kind.within.push((end.to_owned(), name.to_owned()));
            return;
        }
        for list in ["allOf", "anyOf", "oneOf"] {
            for node in node[list].as_array().into_iter().flatten() {
                self.kind(node, end, kind);
            }
        }
        if let Some(value) = node.get("const") {
            let text = node["description"].as_str().unwrap_or_default();
            kind.choices.push((plain(value), text.to_owned()));
            return add(&mut kind.words, &format!("`{}`", plain(value)));
        }
        // Ignore null, which is the same as an omitted key.
        let values = node["enum"].as_array().into_iter().flatten();
        for value in values.filter(|value| !value.is_null()) {
            add(&mut kind.words, &format!("`{}`", plain(value)));
        }
        if node.get("enum").is_none() {
            self.typed(node, end, kind);
        }
    }

    /// The same for a node with types.
    fn typed(&self, node: &Value, end: &str, kind: &mut Kind) {
        // Sizes and times can be strings or numbers, but the unit is more useful.
        let unit = match node["x-unit"].as_str() {
            Some("bytes" | "bytes per second") => Some("size"),
            Some("time") => Some("time"),
            Some("percent") => Some("percentage"),
            _ => None,
        };
        let types = &node["type"];
        let all: Vec<&str> = types.as_str().into_iter().chain(strings(types)).collect();
        for name in &all {
            match *name {
                "null" => {}
                "array" => self.container(&node["items"], end, "[]", "list of", kind),
                "object" => {
                    let values = &node["additionalProperties"];
                    self.container(values, end, ".NAME", "mapping to", kind);
                }
                "integer" | "number" if all.contains(&"string") => {}
                _ if unit.is_some() => add(&mut kind.words, unit.unwrap_or_default()),
                "integer" | "number" => add(&mut kind.words, "number"),
                "boolean" => add(&mut kind.words, "`true` or `false`"),
                "string" => add(&mut kind.words, "text"),
                other => add(&mut kind.words, other),
            }
        }
    }

    fn container(&self, inner: &Value, end: &str, more: &str, of: &str, kind: &mut Kind) {
        let mut items = Kind::default();
        self.kind(inner, &format!("{end}{more}"), &mut items);
        let words: Vec<_> = items.words.iter().map(|word| plural(word)).collect();
        add(&mut kind.words, &format!("{of} {}", words.join(" or ")));
        kind.choices.extend(items.choices);
        kind.within.extend(items.within);
    }
}

fn plural(word: &str) -> String {
    match word {
        "object" | "number" | "size" | "time" => format!("{word}s"),
        "text" => "texts".to_owned(),
        other => other.to_owned(),
    }
}

fn add(words: &mut Vec<String>, word: &str) {
    if !words.iter().any(|w| w == word) {
        words.push(word.to_owned());
    }
}

fn strings(value: &Value) -> impl Iterator<Item = &str> {
    value
        .as_array()
        .into_iter()
        .flatten()
        .filter_map(Value::as_str)
}

fn entries(value: &Value) -> impl Iterator<Item = (&String, &Value)> {
    value.as_object().into_iter().flat_map(Map::iter)
}

/// Returns the paragraphs of a description.
fn paragraphs(node: &Value) -> Vec<String> {
    let text = node["description"].as_str().unwrap_or_default();
    let paragraphs = text
        .split("\n\n")
        .map(|p| p.split_whitespace().collect::<Vec<_>>().join(" "));
    paragraphs.filter(|p| !p.is_empty()).collect()
}

/// Returns a value in file syntax.
fn plain(value: &Value) -> String {
    match value {
        Value::String(text) => text.clone(),
        other => other.to_string(),
    }
}

fn default_of(node: &Value) -> Option<String> {
    match node.get("default")? {
        // An object or list whose keys have their own defaults.
        Value::Object(_) | Value::Array(_) | Value::Null => None,
        value => Some(format!("`{}`", plain(value))),
    }
}

/// Returns the unit and range of a key.
fn limits_of(node: &Value) -> Vec<String> {
    let unit = node["x-unit"].as_str();
    // Sizes and times include the unit in the value.
    let unit = unit.filter(|unit| !matches!(*unit, "bytes" | "time" | "percent"));
    let range = match (node.get("minimum"), node.get("maximum")) {
        (Some(low), Some(high)) => Some(format!("{low} to {high}")),
        (Some(low), None) if *low != 0 => Some(format!("at least {low}")),
        (None, Some(high)) => Some(format!("at most {high}")),
        _ => None,
    };
    let range = node["x-limits"].as_str().map(str::to_owned).or(range);
    unit.map(str::to_owned).into_iter().chain(range).collect()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::config::schema;

    #[test]
    fn schema_keys_are_described_once() {
        let objects = objects(&schema());
        let find = |place: &str| {
            let found = objects.iter().find(|o| o.places.iter().any(|p| p == place));
            found.unwrap_or_else(|| panic!("no {place}"))
        };
        for (place, key) in [
            ("", "strict"),
            ("backends.NAME", "path"),
            ("backends.NAME.limits", "iops"),
            ("targets[]", "luns"),
            ("targets[].portals[]", "listen"),
            ("targets[].access[]", "iqn"),
            ("discovery_chap.users[]", "secret_file"),
            ("targets[].access[].chap", "users"),
            ("discovery_chap", "users"),
            ("transport.faults", "loss"),
            ("limits", "queue_depth"),
        ] {
            let object = find(place);
            let found = object.keys.iter().find(|k| k.name == key);
            let found = found.unwrap_or_else(|| panic!("no {place}.{key}"));
            assert!(
                !found.text.is_empty() && !found.kind.is_empty(),
                "{found:?}"
            );
        }
        let definitions = schema()["definitions"].as_object().unwrap().clone();
        let with_keys = definitions
            .values()
            .filter(|d| d.get("properties").is_some());
        assert_eq!(objects.len(), 1 + with_keys.count());
        assert_eq!(
            find("backends.NAME.limits"),
            find("targets[].access[].limits")
        );
    }

    #[test]
    fn key_summary_has_unit_range_and_default() {
        let schema = json!({
            "properties": {
                "depth": { "description": "Depth.\n\nMore of\nit.", "type": "integer", "minimum": 1, "maximum": 9,
                    "default": 4, "x-unit": "commands" },
                "kind": { "allOf": [{ "$ref": "#/definitions/Kind" }] },
                "length": { "type": ["string", "integer", "null"], "x-unit": "bytes", "x-limits": "64KiB to 1MiB",
                    "default": "64KiB" },
            },
            "required": ["kind"],
            "definitions": {
                "Kind": { "oneOf": [{ "const": "file", "description": "A file." }, { "const": "ram" }] },
            },
        });
        let objects = objects(&schema);
        let keys = &objects[0].keys;
        let summaries: Vec<_> = keys.iter().map(Key::summary).collect();
        let expected = [
            "number; commands; 1 to 9; default `4`",
            "`file` or `ram`; required",
            "size; 64KiB to 1MiB; default `64KiB`",
        ];
        assert_eq!(summaries, expected);
        assert_eq!(keys[0].text, ["Depth.", "More of it."]);
        assert_eq!(
            keys[1].choices[0],
            ("file".to_owned(), "A file.".to_owned())
        );
    }
}
