//! Differences between two configurations, using the keys of their files.

use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::items;
use super::model::Config;
use super::object_path::ObjectPath;
use super::show::masked;

/// A difference between two configurations.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Difference {
    /// The [`ObjectPath`], such as `/targets/demo/luns/1`.
    pub path: String,
    /// The old value, or null if the key was not set or had its default. Secrets are masked.
    pub old: Value,
    /// The new value, in the same form.
    pub new: Value,
}

/// Returns all differences between two configurations. The order of backends, targets, portals and
/// users is ignored.
#[must_use]
pub fn diff(old: &Config, new: &Config) -> Vec<Difference> {
    let mut out = Vec::new();
    let (old, new) = (old.to_value(), new.to_value());
    compare(&ObjectPath::default(), Some(&old), Some(&new), &mut out);
    out
}

/// A part of a mapping or list.
struct Part<'a> {
    /// Identifies the same part in another configuration: its key or name, or its index.
    key: String,
    place: ObjectPath,
    value: &'a Value,
}

fn compare(
    place: &ObjectPath,
    old: Option<&Value>,
    new: Option<&Value>,
    out: &mut Vec<Difference>,
) {
    // We must compare before masking: two different secrets look alike once they are masked.
    if old == new {
        return;
    }
    let parts = old
        .and_then(|value| parts(place, value))
        .zip(new.and_then(|value| parts(place, value)));
    let Some((old_parts, new_parts)) = parts else {
        out.push(Difference {
            path: place.to_string(),
            old: shown(place, old),
            new: shown(place, new),
        });
        return;
    };
    // Use the old order first and append new parts, so that a diff reads like the file.
    for old in &old_parts {
        let new = new_parts.iter().find(|new| new.key == old.key);
        compare(&old.place, Some(old.value), new.map(|new| new.value), out);
    }
    for new in &new_parts {
        if old_parts.iter().all(|old| old.key != new.key) {
            compare(&new.place, None, Some(new.value), out);
        }
    }
}

/// Returns the parts of a mapping or of a list of mappings. Other lists are treated as values.
fn parts<'a>(place: &ObjectPath, value: &'a Value) -> Option<Vec<Part<'a>>> {
    match value {
        Value::Object(entries) => {
            let part = |(key, value): (&'a String, &'a Value)| Part {
                key: key.clone(),
                place: place.join(key),
                value,
            };
            Some(entries.iter().map(part).collect())
        }
        Value::Array(items) if items.iter().all(Value::is_object) => {
            let names: Option<Vec<String>> =
                items.iter().map(|item| items::name_of(item, ':')).collect();
            // Items with the same name are distinguished by index.
            let names = names.filter(|names| {
                let mut all = names.iter().enumerate();
                all.all(|(n, name)| !names[..n].contains(name))
            });
            let key = |n: usize| {
                names
                    .as_ref()
                    .map_or_else(|| n.to_string(), |names| names[n].clone())
            };
            let places = items::names(items);
            let part = |(n, value): (usize, &'a Value)| Part {
                key: key(n),
                place: place.join(&places[n]),
                value,
            };
            Some(items.iter().enumerate().map(part).collect())
        }
        _ => None,
    }
}

/// Formats a value for display.
fn shown(place: &ObjectPath, value: Option<&Value>) -> Value {
    let key = place.segments().last().map_or("", String::as_str);
    value.map_or(Value::Null, |value| masked(value, key))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn config(target: &str, rest: &str) -> Config {
        let text = format!(
            "backends: {{ a: {{ kind: ram, size: 1MiB }}, b: {{ kind: ram, size: 2MiB }} }}\n\
             targets:\n  - name: t\n    iqn: iqn.2026-01.a:t\n    \
             portals: [{{ protocol: iscsi, listen: 127.0.0.1 }}]\n{target}{rest}"
        );
        Config::parse(&text, "test.yaml").unwrap()
    }

    fn said(old: &Config, new: &Config) -> Vec<(String, Value, Value)> {
        let all = diff(old, new).into_iter();
        all.map(|d| (d.path, d.old, d.new)).collect()
    }

    #[test]
    fn diff_ignores_syntax_differences() {
        let one = config("    luns: { 0: a }\n", "");
        let other = config(
            "    luns: { 0x0: { backend: a, read_only: false } }\n",
            "limits: { max_sessions: 256 }\n",
        );
        assert_eq!(said(&one, &other), []);
    }

    #[test]
    fn differences_have_paths() {
        let old = config("    luns: { 0: a, 1: b }\n    access: open\n", "");
        let new = config(
            "    luns: { 0: a, 2: { backend: b, read_only: true } }\n",
            "limits: { max_sessions: 9 }\nworkers: { cpus: [1, 2], count: 2 }\n",
        );
        let place = |path: &str, old, new| (path.to_owned(), old, new);
        assert_eq!(
            said(&old, &new),
            [
                place("/targets/t/luns/1", json!("b"), Value::Null),
                place(
                    "/targets/t/luns/2",
                    Value::Null,
                    json!({ "backend": "b", "read_only": true })
                ),
                place("/targets/t/access", json!("open"), Value::Null),
                place(
                    "/workers",
                    Value::Null,
                    json!({ "count": 2, "cpus": [1, 2] })
                ),
                place("/limits", Value::Null, json!({ "max_sessions": 9 })),
            ]
        );
    }

    #[test]
    fn changed_secret_is_reported_but_masked() {
        let chap = |secret: &str| {
            let users = format!("users: [{{ name: u, secret: {secret} }}]");
            config(&format!("    chap: {{ {users} }}\n"), "")
        };
        let found = diff(&chap("secret-number-1"), &chap("secret-number-2"));
        assert_eq!(found.len(), 1);
        assert_eq!(found[0].path, "/targets/t/chap/users/u/secret");
        assert_eq!(
            (&found[0].old, &found[0].new),
            (&json!("(secret)"), &json!("(secret)"))
        );
        let added = diff(&config("", ""), &chap("secret-number-1"));
        assert_eq!(
            added[0].new,
            json!({ "users": [{ "name": "u", "secret": "(secret)" }] })
        );
    }
}
