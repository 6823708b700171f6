//! List items by name, as used by [`ObjectPath`](super::ObjectPath).

use serde_json::{Map, Value, json};

use super::ObjectPath;
use super::shape::Shape;

/// Returns the items of a list, or an empty slice for other values.
pub(super) fn items(value: Option<&Value>) -> &[Value] {
    value.and_then(Value::as_array).map_or(&[], Vec::as_slice)
}

/// Returns the names of list items. If any item has no name or if two names are equal, we use
/// indices instead.
pub(super) fn names(items: &[Value]) -> Vec<String> {
    let named: Option<Vec<String>> = items.iter().map(|item| name_of(item, ':')).collect();
    let is_good = |names: &Vec<String>| {
        let mut all = names.iter().enumerate();
        all.all(|(n, name)| !name.is_empty() && !names[..n].contains(name))
    };
    let numbers = || (0..items.len()).map(|n| n.to_string()).collect();
    named.filter(is_good).unwrap_or_else(numbers)
}

/// Returns the index of an item, and whether `segment` was an index. The port of a portal can be
/// omitted if its protocol and address are unique. A name can look like it ends with a port, so it
/// must match in full.
pub(super) fn find(items: &[Value], segment: &str) -> Option<(usize, bool)> {
    let names = names(items);
    let named = |n: usize| (n, names[n].parse::<usize>().is_ok());
    if let Some(n) = names.iter().position(|name| name == segment) {
        return Some(named(n));
    }
    let is_meant = |n: &usize| {
        let port = names[*n].strip_prefix(segment);
        let port = port.and_then(|rest| rest.strip_prefix(':'));
        is_nameless(&items[*n]) && port.is_some_and(|port| port.parse::<u16>().is_ok())
    };
    let mut portals = (0..items.len()).filter(is_meant);
    if let (Some(n), None) = (portals.next(), portals.next()) {
        return Some(named(n));
    }
    let n: usize = segment.parse().ok()?;
    (n < items.len()).then_some((n, true))
}

/// Returns true if this item has no name.
fn is_nameless(item: &Value) -> bool {
    item.get("name").is_none()
}

/// Returns true if the items of this list have names.
pub(super) fn has_names(item: Shape<'_>) -> bool {
    item.key("name").is_some() || item.key("listen").is_some()
}

/// Appends an item with this name or index to a list, and returns its index.
pub(super) fn push(
    items: &mut Vec<Value>,
    item: Shape<'_>,
    segment: &str,
) -> Result<usize, String> {
    let count = items.len();
    let item = if segment.parse::<usize>() == Ok(count) {
        json!({})
    } else if item.key("name").is_some() {
        json!({ "name": segment })
    } else if item.key("listen").is_some()
        && let Some((protocol, listen)) = segment.split_once(':')
    {
        json!({ "protocol": protocol, "listen": listen })
    } else {
        return Err(format!("a new item must have the number {count}"));
    };
    items.push(item);
    Ok(count)
}

/// Returns the logical units that use this backend.
pub(super) fn users(root: &Value, backend: &str) -> Vec<ObjectPath> {
    let targets = ObjectPath::default().join("targets");
    let list = items(root.get("targets"));
    let mut users = Vec::new();
    for (name, target) in names(list).iter().zip(list) {
        let luns = targets.join(name).join("luns");
        let Some(Value::Object(entries)) = target.get("luns") else {
            continue;
        };
        let is_user = |lun: &Value| lun.get("backend").unwrap_or(lun) == backend;
        let entries = entries.iter().filter(|(_, lun)| is_user(lun));
        users.extend(entries.map(|(number, _)| luns.join(number)));
    }
    users
}

/// Returns the entries of a mapping. Other values are replaced with an empty mapping.
pub(super) fn as_map(value: &mut Value) -> &mut Map<String, Value> {
    if !value.is_object() {
        *value = Value::Object(Map::new());
    }
    match value {
        Value::Object(entries) => entries,
        _ => unreachable!("made one above"),
    }
}

/// Returns the items of a list. Other values are replaced with an empty list.
pub(super) fn as_list(value: &mut Value) -> &mut Vec<Value> {
    if !value.is_array() {
        *value = Value::Array(Vec::new());
    }
    match value {
        Value::Array(items) => items,
        _ => unreachable!("made one above"),
    }
}

/// Returns the name of a list item: its name, or its protocol and address with a separator.
pub(super) fn name_of(item: &Value, joint: char) -> Option<String> {
    let text = |wanted: &str| item.get(wanted)?.as_str();
    let portal = || Some(format!("{}{joint}{}", text("protocol")?, text("listen")?));
    text("name").map(str::to_owned).or_else(portal)
}
