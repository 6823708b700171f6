//! Converts a tree to a document.

use std::collections::BTreeMap;

use serde_json::{Map, Value};

use super::access::Group;
use super::credentials::{CheckedLogin, Credentials, Login, chap, login};
use super::{Omission, Rest, backend, notes, origin, target};
use crate::rules::{Fabric, Tree, backend_name, device, fabrics, tpgs};
use crate::tree::NodeId;
use crate::world::World;

/// Result of converting a tree to a configuration.
#[derive(Clone, Debug, PartialEq)]
pub struct Export {
    /// The configuration for this tree.
    pub document: Value,
    /// Parts of the tree that are not included in this configuration.
    pub omitted: Vec<Omission>,
    /// Settings in the tree that have no effect, to be shown to the user.
    pub notes: Vec<String>,
}

/// Creates a configuration from a tree and the parts of the configuration that are not shown in the
/// tree.
#[must_use]
pub fn export(tree: &Tree, rest: &Rest, world: &dyn World) -> Export {
    let mut omitted = Vec::new();
    let mut document = rest.base.clone();
    let backends = backends(tree, rest, world, &mut omitted);
    let mut targets = rest.targets.clone();
    let has_backend = |name: &str| backends.contains_key(name);
    let exporter = Exporter {
        tree,
        rest,
        world,
        has_backend: &has_backend,
    };
    for (fabric, dir) in fabrics(tree) {
        targets.extend(exporter.targets(dir, fabric, &mut omitted));
    }
    let discovery = discovery(tree, rest, &mut omitted);
    document.insert("backends".to_owned(), Value::Object(backends));
    document.insert("targets".to_owned(), Value::Array(targets));
    match discovery {
        Some(chap) => document.insert("discovery_chap".to_owned(), chap),
        None => document.shift_remove("discovery_chap"),
    };
    Export {
        document: Value::Object(document),
        omitted,
        notes: notes::notes(tree),
    }
}

/// Returns all backends. We start with the backends that are not shown in the tree, because they
/// must not be replaced.
fn backends(
    tree: &Tree,
    rest: &Rest,
    world: &dyn World,
    omitted: &mut Vec<Omission>,
) -> Map<String, Value> {
    let mut backends = rest.backends.clone();
    let mut identifiers = Identifiers::default();
    for (name, doc) in &backends {
        identifiers.add(name, doc);
    }
    for (device, plugin) in device::devices(tree) {
        if !device::is_configured(tree, device) {
            continue;
        }
        let name = backend_name(tree, device);
        if backends.contains_key(&name) {
            let reason = format!("another backend has the name {name}: this disk is omitted");
            omitted.push(Omission::new(tree, device, reason));
            continue;
        }
        let Some(doc) = backend::backend(tree, device, plugin, world, omitted) else {
            continue;
        };
        let mut doc = Value::Object(doc);
        // If this is from the configuration, the daemon has already accepted the identifiers.
        if tree.hidden(device, origin::ORIGINAL).is_none() {
            for reason in identifiers.remove_known(&mut doc) {
                omitted.push(Omission::new(tree, device, reason));
            }
        }
        identifiers.add(&name, &doc);
        backends.insert(name, doc);
    }
    backends
}

/// Tracks which backend is using an identifier. Two disks with the same identifier must be avoided,
/// because a host would merge them into a single multipath device and corrupt both.
#[derive(Debug, Default)]
struct Identifiers(BTreeMap<(&'static str, String), String>);

impl Identifiers {
    const KEYS: [(&'static str, &'static str); 2] =
        [("naa", "NAA identifier"), ("serial", "serial number")];

    fn add(&mut self, backend: &str, doc: &Value) {
        for (key, _) in Self::KEYS {
            if let Some(value) = doc[key].as_str() {
                let known = self.0.entry((key, value.to_owned()));
                known.or_insert_with(|| backend.to_owned());
            }
        }
    }

    /// Removes identifiers from a document if they are already used by another backend. Returns the
    /// reasons.
    fn remove_known(&self, doc: &mut Value) -> Vec<String> {
        let mut reasons = Vec::new();
        let Some(doc) = doc.as_object_mut() else {
            return reasons;
        };
        for (key, name) in Self::KEYS {
            let value = doc.get(key).and_then(Value::as_str).unwrap_or_default();
            if let Some(other) = self.0.get(&(key, value.to_owned())) {
                reasons.push(format!(
                    "the {name} {value} is also used by backend {other}, and hosts with multipath \
                     would treat both as a single disk: this disk gets a different {name}"
                ));
                doc.shift_remove(key);
            }
        }
        reasons
    }
}

struct Exporter<'a> {
    tree: &'a Tree,
    rest: &'a Rest,
    world: &'a dyn World,
    has_backend: &'a dyn Fn(&str) -> bool,
}

impl Exporter<'_> {
    /// Returns the targets for a fabric.
    fn targets(&self, dir: NodeId, fabric: Fabric, omitted: &mut Vec<Omission>) -> Vec<Value> {
        let tree = self.tree;
        let mut served: Vec<(&str, Value)> = Vec::new();
        for (wwn, _, tpg) in tpgs(tree, dir) {
            let group = Group {
                tree,
                tpg,
                fabric,
                has_backend: self.has_backend,
            };
            let mut parts = Vec::new();
            let Some(doc) = target::target(&group, self.world, &mut parts) else {
                continue;
            };
            let doc = Value::Object(doc);
            let refused = self.rest.refused.get(&tree.path(tpg));
            if let Some(refused) = refused.filter(|refused| refused.document == doc) {
                omitted.push(Omission::new(tree, tpg, refused.reason.clone()));
            } else if served.iter().any(|(other, _)| *other == wwn) {
                omitted.push(Omission::new(tree, tpg, second_group(tree, tpg, &doc)));
            } else {
                omitted.extend(parts);
                served.push((wwn, doc));
            }
        }
        served.into_iter().map(|(_, doc)| doc).collect()
    }
}

/// Returns the reason why a second portal group of a target is omitted.
fn second_group(tree: &Tree, tpg: NodeId, doc: &Value) -> String {
    let acls = tree.child(tpg, "acls").expect("it comes with it");
    format!(
        "second enabled portal group of a target, riserd supports one per target: its {} portals, \
         {} LUNs and {} initiators are omitted; use a target with a different name for them",
        doc["portals"].as_array().map_or(0, Vec::len),
        doc["luns"].as_object().map_or(0, Map::len),
        tree.subdirs(acls).count(),
    )
}

/// Returns the CHAP settings for discovery. If CHAP is required by the tree but there is no user,
/// we create a user with an unknown secret, so that no initiator can use discovery.
pub(super) fn discovery(tree: &Tree, rest: &Rest, omitted: &mut Vec<Omission>) -> Option<Value> {
    let auth = tree.find("target/iscsi/discovery_auth");
    let auth = auth.filter(|auth| tree.value(*auth, "enforce_discovery_auth") == "1");
    let Some(auth) = auth else {
        return rest.discovery.clone();
    };
    let lock = || Login {
        user: Credentials {
            name: "locked".to_owned(),
            secret: rest.lock_secret.clone(),
        },
        mutual: None,
    };
    let (login, omission) = match login(tree, auth) {
        CheckedLogin::None => (lock(), None),
        CheckedLogin::Unusable(reason) => {
            let reason = format!(
                "{reason}: no initiator can discover targets until valid credentials are set"
            );
            (lock(), Some(reason))
        }
        CheckedLogin::Usable(login, reason) => {
            let reason = reason
                .map(|reason| format!("{reason}: mutual authentication of discovery is omitted"));
            (login, reason)
        }
    };
    omitted.extend(omission.map(|reason| Omission::new(tree, auth, reason)));
    Some(chap(&login))
}
