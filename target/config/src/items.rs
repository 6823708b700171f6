//! Items of lists by their names: what [`Place`](super::Place) calls them.

use super::shape::Shape;
use super::{Place, Tree};

/// The items of a list; none of anything else.
pub(super) fn items(tree: Option<&Tree>) -> &[Tree] {
    match tree {
        Some(Tree::List(items)) => items,
        _ => &[],
    }
}

/// What the items of a list are called: their names if all have one that can stand in a path and
/// no two are alike, else their numbers.
pub(super) fn names(items: &[Tree]) -> Vec<String> {
    let named: Option<Vec<String>> = items.iter().map(|item| name_of(item, ':')).collect();
    let is_good = |names: &Vec<String>| {
        let mut all = names.iter().enumerate();
        all.all(|(n, name)| !name.contains('/') && !names[..n].contains(name))
    };
    let numbers = || (0..items.len()).map(|n| n.to_string()).collect();
    named.filter(is_good).unwrap_or_else(numbers)
}

/// The number of an item, and whether only that was said. A portal may go without its port where no other
/// has its protocol and address; a name may end like a port, and is meant only in full.
pub(super) fn find(items: &[Tree], segment: &str) -> Option<(usize, bool)> {
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

/// Whether an item is not known by a name of its own.
fn is_nameless(item: &Tree) -> bool {
    child(item, "name").is_none()
}

/// Whether the items of a list have names.
pub(super) fn has_names(item: Shape<'_>) -> bool {
    item.key("name").is_some() || item.key("listen").is_some()
}

/// Puts a further item of this name or number at the end of a list; its number.
pub(super) fn push(items: &mut Vec<Tree>, item: Shape<'_>, segment: &str) -> Result<usize, String> {
    let count = items.len();
    let text = |key: &str, text: &str| (key.to_owned(), Tree::Text(text.to_owned()));
    let entries = if segment.parse::<usize>() == Ok(count) {
        Vec::new()
    } else if item.key("name").is_some() {
        vec![text("name", segment)]
    } else if item.key("listen").is_some()
        && let Some((protocol, listen)) = segment.split_once(':')
    {
        vec![text("protocol", protocol), text("listen", listen)]
    } else {
        return Err(format!("a further one has the number {count}"));
    };
    items.push(Tree::Map(entries));
    Ok(count)
}

/// The logical units of targets that are on a backend.
pub(super) fn users(root: &Tree, backend: &str) -> Vec<Place> {
    let targets = Place::default().join("targets");
    let Some(list) = child(root, "targets") else {
        return Vec::new();
    };
    let list = items(Some(list));
    let mut users = Vec::new();
    for (name, target) in names(list).iter().zip(list) {
        let luns = targets.join(name).join("luns");
        let Some(Tree::Map(entries)) = child(target, "luns") else {
            continue;
        };
        let is_user = |lun: &Tree| {
            let named = child(lun, "backend").unwrap_or(lun);
            matches!(named, Tree::Text(name) if name == backend)
        };
        let entries = entries.iter().filter(|(_, lun)| is_user(lun));
        users.extend(entries.map(|(number, _)| luns.join(number)));
    }
    users
}

/// What a key of a mapping is set to.
fn child<'t>(tree: &'t Tree, wanted: &str) -> Option<&'t Tree> {
    let Tree::Map(entries) = tree else {
        return None;
    };
    let mut entries = entries.iter();
    entries
        .find(|(key, _)| key == wanted)
        .map(|(_, value)| value)
}

/// The entries of a mapping, which it is made if it is none.
pub(super) fn as_map(tree: &mut Tree) -> &mut Vec<(String, Tree)> {
    if !matches!(tree, Tree::Map(_)) {
        *tree = Tree::Map(Vec::new());
    }
    match tree {
        Tree::Map(entries) => entries,
        _ => unreachable!("made one above"),
    }
}

/// The items of a list, which it is made if it is none.
pub(super) fn as_list(tree: &mut Tree) -> &mut Vec<Tree> {
    if !matches!(tree, Tree::List(_)) {
        *tree = Tree::List(Vec::new());
    }
    match tree {
        Tree::List(items) => items,
        _ => unreachable!("made one above"),
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
