//! Converts between the tree and the `riserd` configuration.
//!
//! In this module, a configuration is called a document: this is the JSON form of the YAML file
//! used by `riserd`. `export` converts a tree to a document, and `import` converts a document to a
//! tree.
//!
//! # Mapping
//! | LIO | `riserd` |
//! | --- | --- |
//! | an enabled device | a backend with the name `HOST:NAME` |
//! | an enabled portal group with portals | a target with the IQN or SRP port as its name |
//! | `np/A:P`, with `iser` | an iSCSI portal for A:P, and an iSER portal |
//! | the unspecified address | the unspecified address; for IPv6 this is `:PORT`, which uses all addresses of the host |
//! | an SRP port | a portal for each address of the port |
//! | an entry in `acls` with its mapped LUNs | an access rule with its LUNs, using the numbers seen by the initiator |
//! | `generate_node_acls` | access for all initiators |
//! | name and secret in an entry, or in the portal group for all initiators | CHAP: set for the target if all values are the same, otherwise for the rule |
//!
//! # Unsupported settings
//! An export only leaves out settings that are not supported by `riserd`: an [`Omission`] contains
//! the directory and the reason. An omission must never give an initiator more access. If a setting
//! has no effect, this is a note. If a part of the `riserd` configuration can't be shown in the
//! tree, we keep it ([`Rest`]) and add it to each export. A target is only shown if converting it
//! back from the tree has the same meaning.

mod access;
mod backend;
mod credentials;
mod export;
mod import;
pub(crate) mod luns;
mod naa;
mod notes;
mod show;
mod target;

use std::collections::BTreeMap;

use serde_json::{Map, Value};

pub use self::export::{Export, export};
pub use self::import::{Import, import, update};
pub(crate) use self::notes::is_meaningless;
use crate::rules::Tree;
use crate::tree::NodeId;

/// A part of the tree that is not supported in a configuration.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, thiserror::Error)]
#[error("{path}: {reason}")]
pub struct Omission {
    /// Path of the directory that is left out, or only included in part.
    pub path: String,
    /// Reason, and how to fix it.
    pub reason: String,
}

impl Omission {
    fn new(tree: &Tree, dir: NodeId, reason: impl Into<String>) -> Self {
        Self {
            path: tree.path(dir),
            reason: reason.into(),
        }
    }

    /// Returns true if this is for the given directory or anything below it.
    #[must_use]
    pub fn is_within(&self, path: &str) -> bool {
        let rest = self.path.strip_prefix(path);
        rest.is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
    }
}

/// A target that was rejected by the daemon.
#[derive(Clone, Debug, PartialEq)]
pub struct RefusedTarget {
    /// Document that was rejected. If the document is different, we should try again.
    pub document: Value,
    /// Reason returned by the daemon.
    pub reason: String,
}

/// Parts of the configuration that are not shown in the tree.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Rest {
    /// Everything except backends, targets and CHAP settings for discovery.
    pub base: Map<String, Value>,
    /// Backends that are not shown.
    pub backends: Map<String, Value>,
    /// Targets that are not shown.
    pub targets: Vec<Value>,
    /// CHAP settings for discovery, if they can't be shown in the tree.
    pub discovery: Option<Value>,
    /// Random secret used to disable discovery for all initiators. This is not stored anywhere.
    pub lock_secret: String,
    /// Enabled portal groups that are not served, by path.
    pub refused: BTreeMap<String, RefusedTarget>,
}

/// Names of hidden values, used to store the original part of the configuration in its directory.
pub(crate) mod origin {
    pub(crate) use crate::rules::NAME;
    /// Original part of the document.
    pub(crate) const ORIGINAL: &str = ".original";
    /// Export of this directory when it was created. We compare with this later to find any
    /// changes.
    pub(crate) const SEEN: &str = ".seen";
    /// Set for a portal that only uses RDMA.
    pub(crate) const NO_TCP: &str = ".no_tcp";
}

/// Merges the original part of a document with the changes made since.
fn merge(
    original: Option<&str>,
    seen: Option<&str>,
    now: Map<String, Value>,
) -> Map<String, Value> {
    let read = |text: Option<&str>| -> Option<Map<String, Value>> {
        text.and_then(|text| serde_json::from_str(text).ok())
    };
    let (Some(mut merged), Some(seen)) = (read(original), read(seen)) else {
        // This was created in the tree and not by a configuration, so there is nothing to merge.
        return now;
    };
    // Compare with the previous export instead of the original, because we need to keep any keys
    // that are not shown in the tree.
    for key in seen.keys().filter(|key| !now.contains_key(*key)) {
        merged.shift_remove(key);
    }
    for (key, value) in now {
        // If a value has not changed, keep it as written in the file, which may use a different
        // unit for a size.
        if seen.get(&key) != Some(&value) {
            merged.insert(key, value);
        }
    }
    merged
}

#[cfg(test)]
mod tests;
