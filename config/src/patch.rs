//! [`Patch`]: a configuration change in JSON format.

use json_patch::PatchOperation;
use serde_json::{Map, Value};

use super::edit::{Document, EditError};
use super::{Config, ObjectPath};

/// Maximum depth of a document created by operations. Valid configurations are less deep. We need
/// this limit because the code to read and free a document is recursive.
const MAX_DEPTH: usize = 128;

/// Maximum number of bytes that the operations of a patch can copy in total: each of them could
/// double the document size.
const MAX_COPIED: usize = 16 << 20;

/// A configuration change, which applies to the JSON returned by [`Config::to_value`].
#[derive(Clone, Debug, PartialEq)]
pub enum Patch {
    /// Values to replace existing values, where null removes a value (JSON Merge Patch, RFC 7396).
    /// Lists are replaced as a whole.
    Merge(Value),
    /// A sequence of operations on JSON Pointers, which is atomic (JSON Patch, RFC 6902). List
    /// items are addressed by index, so use `test` to verify the existing value.
    Operations(json_patch::Patch),
}

impl Patch {
    /// Media type for [`Patch::Merge`].
    pub const MERGE: &str = "application/merge-patch+json";

    /// Media type for [`Patch::Operations`].
    pub const OPERATIONS: &str = "application/json-patch+json";

    /// Parses a patch with this media type, ignoring its parameters. Returns `None` if the type is
    /// not supported.
    ///
    /// # Errors
    /// Fails if the text is not a valid patch.
    pub fn parse(media_type: &str, text: &str) -> Option<Result<Self, serde_json::Error>> {
        let name = media_type.split(';').next().unwrap_or_default().trim();
        match name.to_ascii_lowercase().as_str() {
            Self::MERGE => Some(serde_json::from_str(text).map(Self::Merge)),
            Self::OPERATIONS => Some(serde_json::from_str(text).map(Self::Operations)),
            _ => None,
        }
    }

    /// Applies this patch to a configuration.
    ///
    /// # Errors
    /// Fails if an operation is not possible, or if the result is not a valid configuration.
    pub fn apply(&self, config: &Config) -> Result<Config, EditError> {
        let top = ObjectPath::default();
        let wrong = |message: String| EditError::new(&top, message);
        let before = config.to_value();
        let mut json = before.clone();
        match self {
            Self::Merge(patch) => json_patch::merge(&mut json, patch),
            Self::Operations(operations) => operate(&mut json, operations).map_err(wrong)?,
        }
        restore_order(&before, &mut json);
        Config::parse(&yaml_of(&json), "configuration")
            .map_err(|error| Document::of(&json).placed(error))
    }
}

/// Converts JSON to YAML. The formats are the same, except for characters that YAML only supports
/// as escapes. These only appear in strings.
fn yaml_of(json: &Value) -> String {
    let is_printable = |c: char| !matches!(c, '\u{7f}'..='\u{9f}' | '\u{fffe}' | '\u{ffff}');
    let mut yaml = String::new();
    for c in json.to_string().chars() {
        match is_printable(c) {
            true => yaml.push(c),
            false => yaml.push_str(&format!("\\u{:04x}", u32::from(c))),
        }
    }
    yaml
}

/// Applies operations. After an error, the document must not be used: we do not undo anything,
/// because not all operations can be undone.
fn operate(json: &mut Value, operations: &[PatchOperation]) -> Result<(), String> {
    let mut copied = 0;
    for (n, operation) in operations.iter().enumerate() {
        let too_much = |what: &str| format!("operation '/{n}' makes the document too {what}");
        if let Some((depth, size)) = growth(json, operation) {
            if depth > MAX_DEPTH {
                return Err(too_much("deep"));
            }
            copied += size;
            if copied > MAX_COPIED {
                return Err(too_much("large"));
            }
        }
        let done = json_patch::patch_unsafe(json, std::slice::from_ref(operation));
        done.map_err(|mut error| {
            error.operation = n;
            error.to_string()
        })?;
    }
    Ok(())
}

/// Returns the depth of an operation's value, and the number of bytes that it copies.
fn growth(json: &Value, operation: &PatchOperation) -> Option<(usize, usize)> {
    let (path, value) = match operation {
        PatchOperation::Add(op) => (&op.path, &op.value),
        PatchOperation::Replace(op) => (&op.path, &op.value),
        PatchOperation::Move(op) => (&op.path, json.pointer(op.from.as_str())?),
        PatchOperation::Copy(op) => (&op.path, json.pointer(op.from.as_str())?),
        PatchOperation::Remove(_) | PatchOperation::Test(_) => return None,
    };
    let (depth, size) = extent(value);
    let is_copy = matches!(operation, PatchOperation::Copy(_));
    let above = path.as_str().matches('/').count();
    Some((above + depth, if is_copy { size } else { 0 }))
}

/// Returns the depth of a value, and its approximate size in bytes.
fn extent(value: &Value) -> (usize, usize) {
    let join = |(depth, size): (usize, usize), (inner, more): (usize, usize)| {
        (depth.max(inner + 1), size + more)
    };
    let own = (1, size_of::<Value>());
    match value {
        Value::Array(items) => items.iter().map(extent).fold(own, join),
        Value::Object(entries) => {
            let entry = |(key, value): (&String, &Value)| {
                let (depth, size) = extent(value);
                (depth, size + size_of::<String>() + key.len())
            };
            entries.iter().map(entry).fold(own, join)
        }
        Value::String(text) => (1, size_of::<Value>() + text.len()),
        Value::Null | Value::Bool(_) | Value::Number(_) => own,
    }
}

/// Restores the order of existing keys. When the library removes a key from an object, it moves the
/// last key into its place, but backends should keep their file order.
fn restore_order(before: &Value, after: &mut Value) {
    let (Value::Object(before), Value::Object(after)) = (before, after) else {
        return;
    };
    let mut ordered = Map::new();
    for (key, before) in before {
        if let Some(mut value) = after.shift_remove(key) {
            restore_order(before, &mut value);
            ordered.insert(key.clone(), value);
        }
    }
    ordered.append(after);
    *after = ordered;
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = "\
backends: { a: { kind: ram, size: 1MiB }, b: { kind: ram, size: 2MiB, serial: B } }
targets:
  - name: t
    portals: [{ protocol: srp, listen: 127.0.0.1 }]
    luns: { 0: a }
    access: open
limits: { queue_depth: 7 }
";

    fn patched(media_type: &str, patch: &str) -> Result<Config, EditError> {
        let config = Config::parse(TEXT, "test.yaml").unwrap();
        let patch = Patch::parse(media_type, patch).unwrap().unwrap();
        patch.apply(&config)
    }

    #[test]
    fn merge_patch_sets_and_removes() {
        let text =
            r#"{ "backends": { "b": { "serial": null, "read_only": true } }, "limits": null }"#;
        let config = patched(Patch::MERGE, text).unwrap();
        let expected = TEXT
            .replace("serial: B", "read_only: true")
            .replace("queue_depth: 7", "");
        assert_eq!(config, Config::parse(&expected, "test.yaml").unwrap());
    }

    #[test]
    fn backends_keep_their_order() {
        let text = "targets: []\nbackends:\n".to_owned();
        let names = ["d", "a", "c", "b"];
        let line = |name: &&str| format!("  {name}: {{ kind: ram, size: 1MiB }}\n");
        let text = text + &names.iter().map(line).collect::<String>();
        let config = Config::parse(&text, "test.yaml").unwrap();
        let merge = r#"{ "backends": { "d": null, "e": { "kind": "ram", "size": 4096 } } }"#;
        let remove = r#"[{ "op": "remove", "path": "/backends/d" }]"#;
        for (kind, patch, expected) in [
            (Patch::MERGE, merge, &["a", "c", "b", "e"] as &[&str]),
            (Patch::OPERATIONS, remove, &["a", "c", "b"]),
        ] {
            let patch = Patch::parse(kind, patch).unwrap().unwrap();
            let after = patch.apply(&config).unwrap();
            let names: Vec<_> = after.backends.iter().map(|b| b.name.as_str()).collect();
            assert_eq!(names, expected);
        }
    }

    #[test]
    fn patch_operations_are_atomic() {
        let text = r#"[
            { "op": "test", "path": "/backends/b/serial", "value": "B" },
            { "op": "add", "path": "/targets/0/luns/1", "value": { "backend": "b", "read_only": true } },
            { "op": "remove", "path": "/backends/b/serial" }
        ]"#;
        let config = patched(Patch::OPERATIONS, text).unwrap();
        let expected = TEXT
            .replace(", serial: B", "")
            .replace("{ 0: a }", "{ 0: a, 1: { backend: b, read_only: true } }");
        assert_eq!(config, Config::parse(&expected, "test.yaml").unwrap());
        let other = text.replace("\"B\"", "\"C\"");
        assert!(patched(Patch::OPERATIONS, &other).is_err());
        let nowhere = r#"[{ "op": "remove", "path": "/backends/c" }]"#;
        assert!(patched(Patch::OPERATIONS, nowhere).is_err());
    }

    #[test]
    fn invalid_result_error_has_position() {
        for (patch, said) in [
            (
                r#"{ "limits": { "queue_depth": 0 } }"#,
                "/limits/queue_depth: must be from 1 to 4096, not 0",
            ),
            (
                r#"{ "backends": { "a": null } }"#,
                "/targets/t/luns/0: unknown backend `a`",
            ),
            (
                r#"{ "limit": {} }"#,
                "/limit: unknown key `limit` (did you mean `limits`?)",
            ),
        ] {
            let error = patched(Patch::MERGE, patch).unwrap_err().to_string();
            assert!(error.starts_with(said), "{error}");
        }
    }

    /// A value that a patch has moved to the root cannot be moved back from there.
    #[test]
    fn failed_operation_after_root_replacement_is_rejected() {
        let text = r#"[
            { "op": "move", "from": "/limits", "path": "" },
            { "op": "test", "path": "/queue_depth", "value": 8 }
        ]"#;
        let error = patched(Patch::OPERATIONS, text).unwrap_err().to_string();
        assert!(error.contains("operation"), "{error}");
    }

    /// Each operation doubles the size of the configuration.
    #[test]
    fn patch_copies_are_limited() {
        let double = |n: usize| format!(r#"{{ "op": "copy", "from": "", "path": "/a{n}" }}"#);
        let operations: Vec<_> = (0..24).map(double).collect();
        let text = format!("[{}]", operations.join(","));
        assert!(text.len() < 2000);
        let error = patched(Patch::OPERATIONS, &text).unwrap_err().to_string();
        assert!(error.ends_with("too large"), "{error}");
    }

    /// The stack size is limited, too.
    #[test]
    fn patch_depth_is_limited() {
        let mut operations = vec![r#"{"op":"add","path":"/a","value":{}}"#.to_owned()];
        for _ in 0..20_000 {
            operations.push(r#"{"op":"add","path":"/b","value":{}}"#.to_owned());
            operations.push(r#"{"op":"move","from":"/a","path":"/b/a"}"#.to_owned());
            operations.push(r#"{"op":"move","from":"/b","path":"/a"}"#.to_owned());
        }
        let text = format!("[{}]", operations.join(","));
        let error = patched(Patch::OPERATIONS, &text).unwrap_err().to_string();
        assert!(error.ends_with("too deep"), "{error}");
    }

    /// Characters allowed in a file must be preserved when a different key changes.
    #[test]
    fn patch_preserves_special_characters() {
        for c in ('\u{1}'..'\u{100}').chain(['\u{2028}', '\u{feff}', '\u{fffe}', '\u{1f512}']) {
            let text = format!("{TEXT}identity: \"a\\U{:08x}b\"\n", u32::from(c));
            let config = Config::parse(&text, "test.yaml").unwrap();
            assert_eq!(config.identity, Some(format!("a{c}b")));
            let nothing = Patch::Merge(serde_json::json!({}));
            assert_eq!(nothing.apply(&config).as_ref(), Ok(&config), "{c:?}");
        }
    }

    #[test]
    fn unknown_media_types_are_rejected() {
        assert!(Patch::parse("application/yaml", "{}").is_none());
        assert!(Patch::parse("Application/Merge-Patch+JSON; charset=utf-8", "{}").is_some());
        assert!(Patch::parse(Patch::OPERATIONS, "{}").unwrap().is_err());
    }
}
