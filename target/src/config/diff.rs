//! What differs between two configurations, in the words of their files.

use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::model::Config;
use super::tree::Tree;

/// A place where two configurations differ.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Difference {
    /// The place, such as `targets[demo].luns.1`. Targets and users stand by their names, portals by
    /// protocol and address, access rules by their number from 0.
    pub path: String,
    /// What was there; null where there was nothing, or the default. Secrets are masked.
    pub old: Value,
    /// What is there now; likewise.
    pub new: Value,
}

/// All places where two configurations differ. The order of backends, targets, portals and users
/// makes no difference.
#[must_use]
pub fn diff(old: &Config, new: &Config) -> Vec<Difference> {
    let mut out = Vec::new();
    compare("", Some(&old.to_tree()), Some(&new.to_tree()), &mut out);
    out
}

/// Parts with their places.
type Parts<'a> = Vec<(String, &'a Tree)>;

fn compare(path: &str, old: Option<&Tree>, new: Option<&Tree>, out: &mut Vec<Difference>) {
    if old == new {
        return;
    }
    let parts = old
        .and_then(|t| parts(path, t))
        .zip(new.and_then(|t| parts(path, t)));
    let Some((old_parts, new_parts)) = parts else {
        out.push(Difference {
            path: path.to_owned(),
            old: shown(path, old),
            new: shown(path, new),
        });
        return;
    };
    let find = |parts: &Parts<'_>, place: &str| parts.iter().position(|(p, _)| p == place);
    for (place, old) in &old_parts {
        let new = find(&new_parts, place).map(|n| new_parts[n].1);
        compare(place, Some(old), new, out);
    }
    for (place, new) in &new_parts {
        if find(&old_parts, place).is_none() {
            compare(place, None, Some(new), out);
        }
    }
}

/// The parts of a mapping, or of a list of mappings; other lists are values.
fn parts<'a>(path: &str, tree: &'a Tree) -> Option<Parts<'a>> {
    match tree {
        Tree::Map(entries) => {
            let dot = if path.is_empty() { "" } else { "." };
            let part = |(key, value): &'a (String, Tree)| (format!("{path}{dot}{key}"), value);
            Some(entries.iter().map(part).collect())
        }
        Tree::List(items) if items.iter().all(|item| matches!(item, Tree::Map(_))) => {
            let names: Option<Vec<String>> = items.iter().map(|item| name_of(item, ' ')).collect();
            // Two of one name are told apart by their numbers.
            let names = names.filter(|names| {
                let mut all = names.iter().enumerate();
                all.all(|(n, name)| !names[..n].contains(name))
            });
            let place = |n: usize| match &names {
                Some(names) => format!("{path}[{}]", names[n]),
                None => format!("{path}[{n}]"),
            };
            let items = items.iter().enumerate();
            Some(items.map(|(n, item)| (place(n), item)).collect())
        }
        _ => None,
    }
}

/// What an item of a list is known by: its name, or protocol and address with something between.
pub(super) fn name_of(item: &Tree, joint: char) -> Option<String> {
    let Tree::Map(entries) = item else {
        return None;
    };
    let text = |wanted: &str| {
        entries.iter().find_map(|(key, value)| match value {
            Tree::Text(text) if key == wanted => Some(text.as_str()),
            _ => None,
        })
    };
    let portal = || Some(format!("{}{joint}{}", text("protocol")?, text("listen")?));
    text("name").map(str::to_owned).or_else(portal)
}

/// A value for people.
fn shown(path: &str, tree: Option<&Tree>) -> Value {
    let Some(tree) = tree else {
        return Value::Null;
    };
    let key = path.rsplit('.').next().unwrap_or_default();
    serde_json::to_value(tree.clone().masked(key)).unwrap_or_default()
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
    fn equal_files_do_not_differ_however_they_are_written() {
        let one = config("    luns: { 0: a }\n", "");
        let other = config(
            "    luns: { 0x0: { backend: a, read_only: false } }\n",
            "limits: { max_sessions: 256 }\n",
        );
        assert_eq!(said(&one, &other), []);
    }

    #[test]
    fn differences_stand_at_their_places() {
        let old = config("    luns: { 0: a, 1: b }\n    access: open\n", "");
        let new = config(
            "    luns: { 0: a, 2: { backend: b, read_only: true } }\n",
            "limits: { max_sessions: 9 }\nworkers: { cpus: [1, 2], count: 2 }\n",
        );
        let place = |path: &str, old, new| (path.to_owned(), old, new);
        assert_eq!(
            said(&old, &new),
            [
                place("targets[t].luns.1", json!("b"), Value::Null),
                place(
                    "targets[t].luns.2",
                    Value::Null,
                    json!({ "backend": "b", "read_only": true })
                ),
                place("targets[t].access", json!("open"), Value::Null),
                place(
                    "workers",
                    Value::Null,
                    json!({ "count": 2, "cpus": [1, 2] })
                ),
                place("limits", Value::Null, json!({ "max_sessions": 9 })),
            ]
        );
    }

    #[test]
    fn secrets_are_masked_and_their_change_is_told() {
        let chap = |secret: &str| {
            let users = format!("users: [{{ name: u, secret: {secret} }}]");
            config(&format!("    chap: {{ {users} }}\n"), "")
        };
        let found = diff(&chap("secret-number-1"), &chap("secret-number-2"));
        assert_eq!(found.len(), 1);
        assert_eq!(found[0].path, "targets[t].chap.users[u].secret");
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
