//! Items of lists by their names: what [`Place`](super::Place) calls them.

use super::Tree;
use super::diff::name_of;
use super::shape::Shape;

/// The items of a list; none of anything else.
pub(super) fn items(tree: Option<&Tree>) -> &[Tree] {
    match tree {
        Some(Tree::List(items)) => items,
        _ => &[],
    }
}

/// What the items of a list are called: their names if all have one that can stand in a path and no two
/// are alike, else their numbers.
pub(super) fn names(items: &[Tree]) -> Vec<String> {
    let named: Option<Vec<String>> = items.iter().map(|item| name_of(item, ':')).collect();
    let is_good = |names: &Vec<String>| {
        let mut all = names.iter().enumerate();
        all.all(|(n, name)| !name.contains('/') && !names[..n].contains(name))
    };
    let numbers = || (0..items.len()).map(|n| n.to_string()).collect();
    named.filter(is_good).unwrap_or_else(numbers)
}

/// The number of an item, and whether only that was said. A portal may go without its port.
pub(super) fn find(items: &[Tree], segment: &str) -> Option<(usize, bool)> {
    let names = names(items);
    let is_meant = |name: &String| {
        let port = name
            .strip_prefix(segment)
            .and_then(|rest| rest.strip_prefix(':'));
        let port = port.map(str::parse::<u16>);
        name == segment || matches!(port, Some(Ok(_)))
    };
    if let Some(n) = names.iter().position(is_meant) {
        return Some((n, names[n].parse::<usize>().is_ok()));
    }
    let n: usize = segment.parse().ok()?;
    (n < items.len()).then_some((n, true))
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
