//! Removes the part of a document that contains an error.

use serde_json::{Value, json};

use crate::convert::luns::{backend, remove_lun};

/// Removes the smallest part that is optional in a configuration: a rule, LUN, portal, target or
/// backend. Returns the name of this part.
pub(super) fn remove(document: &mut Value, place: &str, lock_secret: &str) -> String {
    if let Some((index, rest)) = item(place, "targets")
        && document["targets"].get(index).is_some()
    {
        return remove_of_target(document, index, rest);
    }
    if let Some(rest) = place.strip_prefix("backends.")
        && let Some(name) = backend_of(document, rest)
    {
        return remove_backend(document, &name);
    }
    let lock = json!({ "users": [{ "name": "locked", "secret": lock_secret }] });
    if place.starts_with("discovery_chap") && document["discovery_chap"] != lock {
        // If initiators must authenticate for discovery, removing this must not give access to all
        // initiators.
        document["discovery_chap"] = lock;
        return "credentials for discovery; no initiator can discover targets".to_owned();
    }
    *document = json!({ "targets": [] });
    format!("all targets, because of {place}")
}

/// Parses the index in `NAME[3].more` and returns the rest.
fn item<'a>(place: &'a str, name: &str) -> Option<(usize, &'a str)> {
    let rest = place.strip_prefix(name)?.strip_prefix('[')?;
    let (index, rest) = rest.split_once(']')?;
    Some((index.parse().ok()?, rest.trim_start_matches('.')))
}

/// Removes a part of a target, or the whole target.
fn remove_of_target(document: &mut Value, index: usize, place: &str) -> String {
    let target = &mut document["targets"][index];
    let name = target["name"].as_str().unwrap_or_default().to_owned();
    if let Some((at, _)) = item(place, "portals")
        && let Some(portals) = target["portals"].as_array_mut()
        && at < portals.len()
        && portals.len() > 1
    {
        let listen = portals.remove(at)["listen"].clone();
        return format!(
            "target {name}, portal {}",
            listen.as_str().unwrap_or_default()
        );
    }
    if let Some((at, _)) = item(place, "access")
        && let Some(rules) = target["access"].as_array_mut()
        && at < rules.len()
        // This could be followed by a rule for all initiators, which must not be used for this
        // initiator.
        && !rules[at..].iter().any(|rule| rule.get("address").is_some())
    {
        let rule = rules.remove(at);
        let subject = ["iqn", "initiator", "address"]
            .iter()
            .find_map(|key| rule[key].as_str());
        return format!("target {name}, initiator {}", subject.unwrap_or_default());
    }
    let lun = place
        .strip_prefix("luns.")
        .map(|rest| rest.split(['.', '[']).next());
    if let Some(number) = lun.flatten()
        && remove_lun(target, number)
    {
        return format!("target {name}, LUN {number}");
    }
    if let Some(targets) = document["targets"].as_array_mut() {
        targets.remove(index);
    }
    match place {
        "" => format!("target {name}"),
        place => format!("target {name}, because of its {place}"),
    }
}

/// Returns the backend for a path in `backends`. Note that names may contain dots.
fn backend_of(document: &Value, place: &str) -> Option<String> {
    let names = document["backends"].as_object()?.keys();
    let is_it = |name: &&String| {
        let rest = place.strip_prefix(name.as_str());
        rest.is_some_and(|rest| rest.is_empty() || rest.starts_with('.'))
    };
    names.filter(is_it).max_by_key(|name| name.len()).cloned()
}

/// Removes a backend and its LUNs.
fn remove_backend(document: &mut Value, name: &str) -> String {
    if let Some(backends) = document["backends"].as_object_mut() {
        backends.shift_remove(name);
    }
    let mut gone = Vec::new();
    for target in document["targets"].as_array_mut().into_iter().flatten() {
        let luns = target["luns"].as_object().into_iter().flatten();
        let luns = luns.filter(|(_, lun)| backend(lun) == Some(name));
        let numbers: Vec<String> = luns.map(|(number, _)| number.clone()).collect();
        for number in numbers {
            remove_lun(target, &number);
            gone.push(format!(
                "LUN {number} of {}",
                target["name"].as_str().unwrap_or_default()
            ));
        }
    }
    match gone.is_empty() {
        true => format!("backend {name}"),
        false => format!("backend {name} with {}", gone.join(", ")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn document() -> Value {
        json!({
            "backends": { "a.b": { "kind": "ram" }, "a": { "kind": "ram" } },
            "targets": [{
                "name": "t",
                "portals": [{ "listen": "127.0.0.1:1" }, { "listen": "x" }],
                "luns": { "0": "a.b", "1": { "backend": "a", "read_only": true } },
                "access": [
                    { "iqn": "iqn.a:1", "luns": [0, 1] },
                    { "iqn": "iqn.a:2", "luns": { "7": "a.b" } },
                    { "iqn": "iqn.a:3" },
                ],
            }],
        })
    }

    #[test]
    fn smallest_part_is_removed() {
        for (place, name) in [
            ("targets[0].portals[1].listen", "target t, portal x"),
            ("targets[0].access[2].iqn", "target t, initiator iqn.a:3"),
            ("targets[0].luns.1", "target t, LUN 1"),
            ("targets[0].iqn", "target t, because of its iqn"),
            ("backends.a.b.size", "backend a.b with LUN 0 of t"),
        ] {
            assert_eq!(remove(&mut document(), place, "secret"), name, "{place}");
        }
        let mut document = document();
        remove(&mut document, "backends.a.b.size", "secret");
        let target = &document["targets"][0];
        assert_eq!(
            target["luns"],
            json!({ "1": { "backend": "a", "read_only": true } })
        );
        let rules = [json!([1]), json!({}), Value::Null];
        for (rule, luns) in target["access"].as_array().unwrap().iter().zip(rules) {
            assert_eq!(rule.get("luns").cloned().unwrap_or_default(), luns);
        }
    }

    #[test]
    fn rule_before_open_rule_removes_target() {
        let mut document = document();
        let rules = document["targets"][0]["access"].as_array_mut().unwrap();
        rules.push(json!({ "address": "0.0.0.0/0" }));
        remove(&mut document, "targets[0].access[0].iqn", "secret");
        assert_eq!(document["targets"], json!([]));
    }

    #[test]
    fn invalid_discovery_credentials_lock_discovery() {
        let mut document = document();
        document["discovery_chap"] = json!({ "users": [] });
        remove(&mut document, "discovery_chap", "secret");
        assert_eq!(document["targets"].as_array().unwrap().len(), 1);
        assert_eq!(document["discovery_chap"]["users"][0]["name"], "locked");
        remove(&mut document, "discovery_chap", "secret");
        assert_eq!(document, json!({ "targets": [] }));
    }
}
