//! From a tree to a document.

use serde_json::{Map, Value, json};

use super::access::{Login, chap, login};
use super::{ConversionError, Rest, backend, notes, target};
use crate::rules::{Fabric, Tree, backend_name, device, fabrics, tpgs};
use crate::tree::NodeId;
use crate::world::World;

/// A tree as a configuration.
#[derive(Clone, Debug, PartialEq)]
pub struct Export {
    /// The configuration that the tree means.
    pub document: Value,
    /// Settings of the tree that have no effect, for people.
    pub notes: Vec<String>,
}

/// Makes a configuration of a tree and of what the tree does not show.
///
/// # Errors
/// [`ConversionError`]: the tree says something that `riserd` cannot do.
pub fn export(tree: &Tree, rest: &Rest, world: &dyn World) -> Result<Export, ConversionError> {
    let mut document = rest.base.clone();
    let mut backends = rest.backends.clone();
    for (device, plugin) in device::devices(tree) {
        if !device::is_configured(tree, device) {
            continue;
        }
        let name = backend_name(tree, device);
        let doc = backend::backend(tree, device, plugin, world)?;
        // Backends that are not shown are in the map already, and none of them may be replaced.
        if !is_name(&name) || backends.insert(name, Value::Object(doc)).is_some() {
            return Err(ConversionError {
                path: tree.path(device),
                reason: "a name that cannot be a backend's, or is one already".to_owned(),
            });
        }
    }
    let mut targets = rest.targets.clone();
    for (fabric, dir) in fabrics(tree) {
        targets.extend(targets_of(tree, dir, fabric, world)?);
    }
    document.insert("backends".to_owned(), Value::Object(backends));
    document.insert("targets".to_owned(), Value::Array(targets));
    let discovery = discovery(tree, rest);
    match discovery {
        Some(chap) => document.insert("discovery_chap".to_owned(), chap),
        None => document.shift_remove("discovery_chap"),
    };
    Ok(Export {
        document: Value::Object(document),
        notes: notes::notes(tree),
    })
}

fn is_name(name: &str) -> bool {
    (1..=64).contains(&name.len())
        && name
            .bytes()
            .all(|b| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'_' | b'.' | b':'))
}

fn targets_of(
    tree: &Tree,
    dir: NodeId,
    fabric: Fabric,
    world: &dyn World,
) -> Result<Vec<Value>, ConversionError> {
    let mut served: Vec<(&str, Map<String, Value>)> = Vec::new();
    for (wwn, _, tpg) in tpgs(tree, dir) {
        let Some(doc) = target::target(tree, tpg, fabric, world)? else {
            continue;
        };
        if served.iter().any(|(other, _)| *other == wwn) {
            return Err(ConversionError {
                path: tree.path(tpg),
                reason: "a second portal group of one target is enabled".to_owned(),
            });
        }
        served.push((wwn, doc));
    }
    Ok(served
        .into_iter()
        .map(|(_, doc)| Value::Object(doc))
        .collect())
}

/// The CHAP of discovery. Where the tree demands it and names no user, the user is one whose secret
/// is not known, so no initiator discovers anything.
pub(super) fn discovery(tree: &Tree, rest: &Rest) -> Option<Value> {
    let auth = tree.find("target/iscsi/discovery_auth");
    let auth = auth.filter(|auth| tree.value(*auth, "enforce_discovery_auth") == "1");
    let Some(auth) = auth else {
        return rest.discovery.clone();
    };
    let lock = || Login {
        user: ("locked".to_owned(), rest.lock_secret.clone()),
        mutual: None,
    };
    Some(json!(chap(&login(tree, auth).unwrap_or_else(lock))))
}
