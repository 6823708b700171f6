//! Between the tree and the configuration of `riserd`.
//!
//! A configuration is a document here: the JSON of the YAML that `riserd` reads. `export` makes one
//! of a tree, `import` a tree of one.
//!
//! # Mapping
//! | LIO | `riserd` |
//! | --- | --- |
//! | an enabled device | a backend, named `HOST:NAME` |
//! | an enabled portal group with portals | a target, named by its IQN or SRP port |
//! | `np/A:P`, with `iser` | a portal of iSCSI at A:P, and one of iSER |
//! | the unspecified address | the unspecified address; that of IPv6 is `:PORT`, all addresses of the host |
//! | an SRP port | a portal at each of its addresses |
//! | an entry in `acls` with its mapped LUNs | an access rule with its LUNs, by the numbers that the initiator sees |
//! | `generate_node_acls` | access for all initiators |
//! | a name and secret of an entry, or of the portal group for all | CHAP: the target's if all have the same, else the rule's |
//!
//! # What one side says and the other cannot
//! What LIO allows and `riserd` cannot do is refused with its reason ([`ConversionError`]) if it
//! would change who sees what, and is a note otherwise. What `riserd` has and the tree cannot show
//! is kept ([`Rest`]) and goes back with every export; a target is shown only if what the tree says
//! of it means the same.

mod access;
mod backend;
mod export;
mod import;
mod naa;
mod notes;
mod show;
mod target;

use serde_json::{Map, Value};

pub use self::export::{Export, export};
pub use self::import::{Import, import, update};

/// Reason for which a tree is no configuration.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{path}: {reason}")]
pub struct ConversionError {
    /// The directory that it is about.
    pub path: String,
    /// The part of the directory that a configuration cannot have.
    pub reason: String,
}

/// The part of a configuration that the tree does not show.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Rest {
    /// Everything but backends, targets and the CHAP of discovery.
    pub base: Map<String, Value>,
    /// Backends that are not shown.
    pub backends: Map<String, Value>,
    /// Targets that are not shown.
    pub targets: Vec<Value>,
    /// The CHAP of discovery, if the tree cannot show it.
    pub discovery: Option<Value>,
    /// A random secret that is not kept anywhere, for a discovery that no initiator may do.
    pub lock_secret: String,
}

/// Names of hidden values: a directory's part of the configuration that it came from.
pub(crate) mod origin {
    pub(crate) use crate::rules::NAME;
    /// Its part of the document, as it was.
    pub(crate) const ORIGINAL: &str = ".original";
    /// The directory's export when it was new, to see later what was changed in it.
    pub(crate) const SEEN: &str = ".seen";
    /// A portal that is served on RDMA only.
    pub(crate) const NO_TCP: &str = ".no_tcp";
}

/// The original part of a document with the changes that were made since.
fn merge(
    original: Option<&str>,
    seen: Option<&str>,
    now: Map<String, Value>,
) -> Map<String, Value> {
    let read = |text: Option<&str>| -> Option<Map<String, Value>> {
        text.and_then(|text| serde_json::from_str(text).ok())
    };
    let (Some(mut merged), Some(seen)) = (read(original), read(seen)) else {
        // Made in the tree, and not by a configuration: there is nothing behind it to keep.
        return now;
    };
    // Against what was seen, not the original: keys that the tree never shows must survive.
    for key in seen.keys().filter(|key| !now.contains_key(*key)) {
        merged.shift_remove(key);
    }
    for (key, value) in now {
        // A key that was not touched keeps the words of the file, such as a size in other units.
        if seen.get(&key) != Some(&value) {
            merged.insert(key, value);
        }
    }
    merged
}

#[cfg(test)]
mod tests;
