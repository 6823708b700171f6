//! The configuration of `riserd`: YAML in, checked values out.
//!
//! [`Config::parse`] is pure: text in, a [`Config`] or one [`ConfigError`] out, which names the
//! file, the line, the column and the place in the tree. Nothing is opened, resolved or created;
//! what a configuration asks for is tried when the server starts.
//!
//! # Modules
//! - `model`: [`Config`] and its parts, as the rest of the daemon sees them.
//! - `raw`: the schema as it is written, before anything is compared with anything.
//! - `check`: from `raw` to `model`: ranges, references, duplicates.
//! - `write`, `tree`: back to a file's words. `diff`: what two configurations differ in.
//! - `schema`: its JSON Schema, for editors. `shape`: the same, as a question about one place.
//! - `edit`: [`Document`]: objects of a configuration, by their [`Place`] (`place`, `items`).
//! - `value`: scalars with a meaning: sizes, GUIDs, addresses, percentages.
//! - `yaml`: the one place that knows the YAML library.
//! - `identity`: [`HostId`] and the names derived from it.
//! - `io_limits`: the limits of backends and initiators.
//! - `error`: [`ConfigError`].
//!
//! # Rules
//! - Unknown keys, duplicate keys, wrong types and values out of range are errors, everywhere.
//! - Access is denied unless a rule allows it or `access: open` says so.
//! - Names derived by default depend on nothing that changes between restarts.

mod check;
mod diff;
mod edit;
mod error;
mod identity;
mod io_limits;
mod items;
mod listen;
mod model;
mod place;
mod raw;
mod schema;
mod shape;
mod tree;
mod value;
mod write;
mod yaml;

pub use diff::{Difference, diff};
pub use edit::{Document, EditError, Found};
pub use error::ConfigError;
pub use identity::HostId;
pub use listen::{Listen, Wildcard};
pub use model::{
    Access, Backend, Chap, ChapUser, Config, DATA_OUT_TIMEOUT, Limits, LinkFaults, Location, Log,
    LogFormat, Lun, MAX_SESSIONS, Metrics, Names, Portal, Protocol, Provider, Redirect, Rule,
    RuleLuns, RuleSubject, Secret, SeenLun, Target, Transport, Workers,
};
pub use place::Place;
pub use schema::schema;
pub use shape::{Kind, Scalar, Shape};
pub use tree::Tree;
pub use value::{Guid, InitiatorId, Net, Percent};

#[cfg(test)]
mod tests;
#[cfg(test)]
mod tests_edit;
#[cfg(test)]
mod tests_write;
